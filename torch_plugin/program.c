/* program.c - what the core asks of FSDP's parameters, answered in Python.
 *
 * The owner of a group (comm/group.h) is a weak reference to its group.Group: tensors over a region may
 * outlive the model. A tree asks for no group that is dead, since the tree's own holds them.
 */
#include "torch_plugin/program.h"

#include <string.h>

#include "torch_plugin/evidence.h"
#include "torch_plugin/methods.h"

/* ---- exceptions ---- */

/* An interrupt takes the place of an error: it must not be lost. */
static void exception_keep(binding_program *program) {
    PyObject *type, *value, *trace;
    bool is_error = PyErr_ExceptionMatches(PyExc_Exception);
    PyErr_Fetch(&type, &value, &trace);
    if (program->type && (is_error || !PyErr_GivenExceptionMatches(program->type, PyExc_Exception))) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return;
    }
    Py_XDECREF(program->type);
    Py_XDECREF(program->value);
    Py_XDECREF(program->trace);
    program->type = type;
    program->value = value;
    program->trace = trace;
}

static fcdp_status failed(binding_program *program) {
    exception_keep(program);
    return fcdp__fail(FCDP_ERR_PROGRAM, "Python raised an exception");
}

bool binding_program_has_raised(const binding_program *program) {
    return program->type != NULL;
}

/* The core may have found what says more than the exception (comm/unshard.c): but for an interrupt. */
PyObject *binding_program_end(binding_program *program, fcdp_status status) {
    PyObject *type = program->type, *value = program->value, *trace = program->trace;
    program->type = program->value = program->trace = NULL;
    if (type &&
        (!status || status == FCDP_ERR_PROGRAM || !PyErr_GivenExceptionMatches(type, PyExc_Exception))) {
        PyErr_Restore(type, value, trace);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return methods_none_or_raise(status);
}

/* ---- the group ---- */

/* A new reference; NULL with an exception set. */
static PyObject *owner_of(const fcdp_group *group) {
    PyObject *owner = fcdp_group_owner(group) ? PyObject_CallNoArgs(fcdp_group_owner(group)) : NULL;
    if (owner && owner != Py_None) return owner;
    Py_XDECREF(owner);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "this group has ended");
    return NULL;
}

/* As bytes of n values of 8; NULL with an exception set. */
static const void *column(PyObject *tuple, Py_ssize_t i, size_t n, const char *what) {
    PyObject *bytes = PyTuple_GetItem(tuple, i);
    return bytes ? methods_bytes(bytes, n * sizeof(uint64_t), what) : NULL;
}

/* (addresses, sizes, n_pieces, steps, by_device), as Group.look has them. */
static bool places_take(PyObject *places, fcdp_sight *sight) {
    uint32_t n = sight->n_extents;
    const uint64_t *counts = column(places, 2, n, "n_pieces"), *steps = column(places, 3, n, "steps");
    if (!counts || !steps) return false;
    size_t n_pieces = 0;
    for (uint32_t i = 0; i < n; i++) n_pieces += counts[i];
    const uint64_t *addresses = column(places, 0, n_pieces, "addresses"),
                   *sizes = column(places, 1, n_pieces, "sizes");
    int by_device = PyObject_IsTrue(PyTuple_GetItem(places, 4));
    if (!addresses || !sizes || by_device < 0) return false;
    if (fcdp_sight_reserve(sight, n_pieces)) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t p = 0; p < n_pieces; p++) {
        sight->shards[p] = (const void *)(uintptr_t)addresses[p];
        sight->shard_bytes[p] = (size_t)sizes[p];
    }
    for (uint32_t i = 0; i < n; i++) sight->signals[i].optimizer_steps = steps[i];
    memcpy(sight->n_pieces, counts, n * sizeof *counts);
    sight->by_device = by_device;
    return true;
}

/* (places or None, signals or None, scene or None) */
static bool sight_take(PyObject *seen, unsigned what, fcdp_sight *sight) {
    const fcdp_signals *signals = NULL;
    if (what & FCDP_LOOK_PLACES) {
        PyObject *places = PyTuple_GetItem(seen, 0);
        if (!places || !places_take(places, sight)) return false;
    }
    if (what & FCDP_LOOK_SIGNALS) {
        PyObject *bytes = PyTuple_GetItem(seen, 1);
        signals = bytes ? methods_bytes(bytes, sight->n_extents * sizeof *signals, "signals") : NULL;
        if (!signals) return false;
        memcpy(sight->signals, signals, sight->n_extents * sizeof *signals);
    }
    if (!(what & FCDP_LOOK_SCENE)) return true;
    int grad_mode, optimizer_seen;
    unsigned long long reductions;
    PyObject *scene = PyTuple_GetItem(seen, 2);
    if (!scene || !PyArg_ParseTuple(scene, "ppK:scene", &grad_mode, &optimizer_seen, &reductions))
        return false;
    sight->process = (fcdp_process_signals){
        .grad_mode = grad_mode, .optimizer_seen = optimizer_seen, .reductions = reductions};
    return true;
}

/* What FSDP2's extents are, which C reads (evidence.h): with no places agreed on anew, and no scene. */
static bool sight_read(PyObject *owner, PyObject *extents, fcdp_sight *sight) {
    uint32_t n = sight->n_extents;
    if (fcdp_sight_reserve(sight, n)) {
        PyErr_NoMemory();
        return false;
    }
    binding_evidence evidence = {sight->signals, sight->shards, sight->shard_bytes};
    for (uint32_t i = 0; i < n; i++) sight->n_pieces[i] = 1;
    return binding_evidence_read(owner, extents, &evidence, &sight->by_device);
}

/* A new reference to the extents, if C reads them; NULL without an error: it does not. */
static PyObject *read_in_c(PyObject *owner) {
    PyObject *in_c = PyObject_GetAttrString(owner, "in_c");
    int yes = in_c ? PyObject_IsTrue(in_c) : -1;
    Py_XDECREF(in_c);
    return yes > 0 ? PyObject_GetAttrString(owner, "extents") : NULL;
}

/* ---- the core's functions ---- */

static fcdp_status program_settle(void *ctx, fcdp_group *group) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *owner = owner_of(group);
    PyObject *result = owner ? PyObject_CallMethod(owner, "settle", NULL) : NULL;
    fcdp_status status = result ? FCDP_OK : failed(ctx);
    Py_XDECREF(result);
    Py_XDECREF(owner);
    PyGILState_Release(gil);
    return status;
}

static fcdp_status program_look(void *ctx, fcdp_group *group, unsigned what, fcdp_sight *sight) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *owner = owner_of(group), *seen = NULL;
    PyObject *extents = owner && what == (FCDP_LOOK_PLACES | FCDP_LOOK_SIGNALS) ? read_in_c(owner) : NULL;
    bool done = false;
    if (extents)
        done = sight_read(owner, extents, sight);
    else if (owner && !PyErr_Occurred())
        done = (seen = PyObject_CallMethod(owner, "look", "I", what)) && sight_take(seen, what, sight);
    fcdp_status status = done ? FCDP_OK : failed(ctx);
    Py_XDECREF(seen);
    Py_XDECREF(extents);
    Py_XDECREF(owner);
    PyGILState_Release(gil);
    return status;
}

static fcdp_status program_inputs(void *ctx, fcdp_group *group, const uint8_t *stale, uint64_t *inputs_out,
                                  fcdp_stream *stream) {
    binding_program *program = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    uint32_t n = fcdp_group_n_extents(group);
    PyObject *owner = owner_of(group);
    PyObject *made = owner ? PyObject_CallMethod(owner, "make_inputs", "y#O", (const char *)stale,
                                                 (Py_ssize_t)n, program->side)
                           : NULL;
    const void *addresses = made ? column(made, 0, n, "inputs") : NULL;
    PyObject *behind = addresses ? PyTuple_GetItem(made, 1) : NULL;
    if (behind && behind != Py_None) *stream = (fcdp_stream)(uintptr_t)PyLong_AsUnsignedLongLong(behind);
    if (addresses) memcpy(inputs_out, addresses, n * sizeof *inputs_out);
    fcdp_status status = behind && !PyErr_Occurred() ? FCDP_OK : failed(ctx);
    Py_XDECREF(made);
    Py_XDECREF(owner);
    PyGILState_Release(gil);
    return status;
}

static void program_inputs_done(void *ctx, fcdp_group *group) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *owner = owner_of(group);
    PyObject *result = owner ? PyObject_CallMethod(owner, "inputs_done", NULL) : NULL;
    if (!result) exception_keep(ctx);
    Py_XDECREF(result);
    Py_XDECREF(owner);
    PyGILState_Release(gil);
}

static fcdp_status program_agree(void *ctx, fcdp_group *const *groups, uint32_t n_groups, uint8_t *votes,
                                 size_t n) {
    (void)n_groups;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *owner = owner_of(groups[0]);
    PyObject *agreed = owner ? PyObject_CallMethod(owner, "carry", "y#", (const char *)votes, (Py_ssize_t)n)
                             : NULL;
    const void *bytes = agreed ? methods_bytes(agreed, n, "agreed votes") : NULL;
    if (bytes) memcpy(votes, bytes, n);
    fcdp_status status = bytes ? FCDP_OK : failed(ctx);
    Py_XDECREF(agreed);
    Py_XDECREF(owner);
    PyGILState_Release(gil);
    return status;
}

/* A method whose answer is yes or no; < 0: an exception is set. */
static int answer_of(const fcdp_group *group, const char *method, const char *format, int argument) {
    PyObject *owner = owner_of(group);
    PyObject *answer = owner ? PyObject_CallMethod(owner, method, format, argument) : NULL;
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    Py_XDECREF(owner);
    return yes;
}

static bool program_may_begin(void *ctx, fcdp_group *group, bool ahead) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int yes = answer_of(group, "may_begin", "i", ahead);
    if (yes < 0) exception_keep(ctx);
    PyGILState_Release(gil);
    return yes > 0;
}

int binding_program_written(const fcdp_group *group) {
    if (!fcdp_group_owner(group)) return 0;
    PyObject *owner = owner_of(group), *extents = owner ? read_in_c(owner) : NULL;
    int yes = -1;
    if (extents)
        yes = binding_evidence_written(extents);
    else if (!PyErr_Occurred())
        yes = answer_of(group, "written", "", 0);
    Py_XDECREF(extents);
    Py_XDECREF(owner);
    return yes;
}

static bool program_written(void *ctx, fcdp_group *group) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int yes = binding_program_written(group);
    if (yes < 0) exception_keep(ctx);
    PyGILState_Release(gil);
    return yes > 0;
}

/* Of all groups, so any of them is told. */
static void program_blind(void *ctx, fcdp_group *group) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *owner = owner_of(group);
    PyObject *result = owner ? PyObject_CallMethod(owner, "blind", NULL) : NULL;
    if (!result) exception_keep(ctx);
    Py_XDECREF(result);
    Py_XDECREF(owner);
    PyGILState_Release(gil);
}

void binding_program_begin(binding_program *program, PyObject *side) {
    *program = (binding_program){.table = {.ctx = program,
                                           .settle = program_settle,
                                           .look = program_look,
                                           .blind = program_blind,
                                           .may_begin = program_may_begin,
                                           .inputs = program_inputs,
                                           .inputs_done = program_inputs_done,
                                           .agree = program_agree,
                                           .written = program_written},
                                 .side = side};
}

/* ---- a test's ---- */

static PyObject *refuses; /* guarded by the GIL */

static bool restore_is_refused(const fcdp_group *group) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *answer = PyObject_CallFunction(refuses, "K", (unsigned long long)fcdp_group_id(group));
    bool yes = answer && PyObject_IsTrue(answer) > 0;
    Py_XDECREF(answer);
    PyErr_Clear();
    PyGILState_Release(gil);
    return yes;
}

void binding_refuse_restores(PyObject *callable) {
    Py_XDECREF(refuses);
    refuses = callable == Py_None ? NULL : Py_NewRef(callable);
    fcdp__restore_is_refused = refuses ? restore_is_refused : NULL;
}
