/* methods_group.c - the module's functions of a parameter group. */
#include <stdlib.h>

#include "comm/whole.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/program.h"

/* (comm, name, [(shard_bytes, span)] of the extents) -> group */
METHOD(group_create) {
    PyObject *handle, *list;
    const char *name;
    if (!PyArg_ParseTuple(args, "OsO:group_create", &handle, &name, &list)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    Py_ssize_t n = comm ? PyList_Size(list) : -1;
    if (n < 0) return NULL;
    fcdp_extent_spec *specs = calloc((size_t)n + 1, sizeof *specs);
    if (!specs) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t shard_bytes;
        int span;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "ni", &shard_bytes, &span)) {
            free(specs);
            return NULL;
        }
        specs[i] = (fcdp_extent_spec){.shard_bytes = (size_t)shard_bytes, .span = (uint8_t)span};
    }
    fcdp_group *group;
    fcdp_status status = fcdp_group_create(comm, name, specs, (uint32_t)n, &group);
    free(specs);
    return status == FCDP_OK ? binding_wrap(BINDING_GROUP, group, handle) : binding_raise(status);
}

static fcdp_group *group_of(PyObject *handle) {
    return binding_unwrap(BINDING_GROUP, handle);
}

/* The one argument of a method, which `format` parses; NULL with an error set. */
static fcdp_group *only_group(PyObject *args, const char *format) {
    PyObject *handle;
    return PyArg_ParseTuple(args, format, &handle) ? group_of(handle) : NULL;
}

METHOD(group_host_alloc) {
    fcdp_group *group = only_group(args, "O:group_host_alloc");
    if (!group) return NULL;
    uint64_t offset;
    fcdp_status status;
    CALL(fcdp_group_host_alloc(group, &offset));
    return status == FCDP_OK ? PyLong_FromUnsignedLongLong(offset) : binding_raise(status);
}

METHOD(group_attach) {
    PyObject *handle;
    unsigned long long offset;
    if (!PyArg_ParseTuple(args, "OK:group_attach", &handle, &offset)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_attach(group, offset));
    return methods_none_or_raise(status);
}

METHOD(group_extent) {
    PyObject *handle;
    unsigned int i;
    if (!PyArg_ParseTuple(args, "OI:group_extent", &handle, &i)) return NULL;
    fcdp_group *group = group_of(handle);
    return group ? PyLong_FromUnsignedLongLong(fcdp_group_extent(group, i).addr) : NULL;
}

METHOD(group_id) {
    fcdp_group *group = only_group(args, "O:group_id");
    return group ? PyLong_FromUnsignedLongLong(fcdp_group_id(group)) : NULL;
}

/* ([group], a byte for each: does it stay gathered between forward and backward?)
 * -> is there room to begin one ahead? */
METHOD(groups_fit) {
    PyObject *list, *bytes;
    if (!PyArg_ParseTuple(args, "OO:groups_fit", &list, &bytes)) return NULL;
    uint32_t n;
    fcdp_group **groups = methods_groups(list, &n);
    if (!groups) return NULL;
    const void *stays = methods_bytes(bytes, n, "stays");
    bool ahead;
    fcdp_status status = stays ? fcdp_groups_fit(groups, stays, n, &ahead) : FCDP_OK;
    free(groups);
    if (!stays) return NULL;
    return status ? binding_raise(status) : PyBool_FromLong(ahead);
}

/* The n_extents names of a list, borrowed from it, for the caller to free(); NULL with an error set. */
static const char **names_of(const fcdp_group *group, PyObject *list) {
    Py_ssize_t n = PyList_Size(list);
    if (n < 0) return NULL;
    if ((uint32_t)n != fcdp_group_n_extents(group)) {
        PyErr_Format(PyExc_ValueError, "%zd names for %u parameters", n, fcdp_group_n_extents(group));
        return NULL;
    }
    const char **names = calloc((size_t)n + 1, sizeof *names);
    if (!names) return (const char **)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        names[i] = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, i), NULL); /* lives as long as the string */
        if (names[i]) continue;
        free(names);
        return NULL;
    }
    return names;
}

/* (group, [name of extent i]) */
METHOD(group_watch) {
    PyObject *handle, *list;
    if (!PyArg_ParseTuple(args, "OO:group_watch", &handle, &list)) return NULL;
    fcdp_group *group = group_of(handle);
    const char **names = group ? names_of(group, list) : NULL;
    if (!names) return NULL;
    fcdp_status status = fcdp_group_watch(group, names, fcdp_group_n_extents(group));
    free(names);
    return methods_none_or_raise(status);
}

/* (group, owner, [name of extent i]): the owner's methods are what the core asks of the group's parameters
 * (program.c); it is referred to weakly. */
METHOD(group_set_owner) {
    PyObject *handle, *owner, *list;
    if (!PyArg_ParseTuple(args, "OOO:group_set_owner", &handle, &owner, &list)) return NULL;
    fcdp_group *group = group_of(handle);
    const char **names = group ? names_of(group, list) : NULL;
    if (!names) return NULL;
    fcdp_status status = fcdp_group_name_extents(group, names);
    free(names);
    if (status) return binding_raise(status);
    if (!binding_set_owner(handle, owner)) return NULL;
    Py_RETURN_NONE;
}

METHOD(group_ask_again) {
    fcdp_group *group = only_group(args, "O:group_ask_again");
    if (!group) return NULL;
    fcdp_group_ask_again(group);
    Py_RETURN_NONE;
}

/* The group and extent of (group, i, ...); NULL with an error set. */
static fcdp_group *group_with_extent(PyObject *handle, unsigned int i) {
    fcdp_group *group = group_of(handle);
    if (!group || i < fcdp_group_n_extents(group)) return group;
    PyErr_SetString(PyExc_IndexError, "the group has no such extent");
    return NULL;
}

/* (group, i, signals: 8 uint64, address of the shard or 0, its bytes, its fingerprint by the device: a uint64
 * or b"") -> WHOLE_* */
METHOD(group_whole_vote) {
    PyObject *handle, *signals, *fingerprint;
    unsigned int i;
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "OISKKS:group_whole_vote", &handle, &i, &signals, &address, &bytes,
                          &fingerprint))
        return NULL;
    fcdp_group *group = group_with_extent(handle, i);
    const void *shard = (const void *)(uintptr_t)address;
    const size_t shard_bytes = (size_t)bytes;
    fcdp_evidence evidence = {.shards = &shard, .shard_bytes = &shard_bytes};
    if (group) evidence.signals = methods_bytes(signals, sizeof *evidence.signals, "signals");
    if (!evidence.signals) return NULL;
    if (PyBytes_Size(fingerprint) > 0) {
        evidence.fingerprints = methods_bytes(fingerprint, sizeof(uint64_t), "fingerprint");
        if (!evidence.fingerprints) return NULL;
    }
    fcdp_whole vote;
    Py_BEGIN_ALLOW_THREADS vote = fcdp_group_whole_vote(group, i, &evidence);
    Py_END_ALLOW_THREADS return PyLong_FromLong(vote);
}

/* (group, i, stream) */
METHOD(group_whole_begin) {
    PyObject *handle;
    unsigned int i;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OIK:group_whole_begin", &handle, &i, &stream)) return NULL;
    fcdp_group *group = group_with_extent(handle, i);
    if (!group) return NULL;
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, Py_None);
    CALL(fcdp_group_whole_begin(group, i, &program.table, (fcdp_stream)(uintptr_t)stream));
    return binding_program_end(&program, status);
}

/* (group, i, address, bytes, stream) */
METHOD(group_whole_read) {
    PyObject *handle;
    unsigned int i;
    unsigned long long address, bytes, stream;
    if (!PyArg_ParseTuple(args, "OIKKK:group_whole_read", &handle, &i, &address, &bytes, &stream))
        return NULL;
    fcdp_group *group = group_with_extent(handle, i);
    if (!group) return NULL;
    fcdp_status status;
    CALL(
        fcdp_group_whole_read(group, i, (fcdp_dptr){address}, (size_t)bytes, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
}

/* (group, tree, pass, by_hand, stream, stream behind which an agreement by hand looks, side.Side or None):
 * its use begins, or is put off (comm/unshard.h) */
METHOD(group_unshard) {
    PyObject *handle, *tree_handle, *side;
    int pass, by_hand;
    unsigned long long stream, made_on;
    if (!PyArg_ParseTuple(args, "OOipKKO:group_unshard", &handle, &tree_handle, &pass, &by_hand, &stream,
                          &made_on, &side))
        return NULL;
    fcdp_group *group = group_of(handle);
    fcdp_tree *tree = group ? binding_unwrap(BINDING_TREE, tree_handle) : NULL;
    if (!tree) return NULL;
    const fcdp_unshard_args unshard = {.pass = (fcdp_pass)pass,
                                       .by_hand = by_hand,
                                       .stream = (fcdp_stream)(uintptr_t)stream,
                                       .made_on = (fcdp_stream)(uintptr_t)made_on};
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, side);
    CALL(fcdp_unshard(group, tree, &program.table, &unshard));
    if (!status && binding_program_has_raised(&program)) /* FSDP will not know of the use */
        Py_BEGIN_ALLOW_THREADS fcdp_give_up(group, &program.table, unshard.stream);
    Py_END_ALLOW_THREADS return binding_program_end(&program, status);
}

/* (group, stream): the ranks agree on it alone -> is a shard of it missing on some rank? */
METHOD(group_agree) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:group_agree", &handle, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, Py_None);
    CALL(fcdp_agree(&group, 1, &program.table, (fcdp_stream)(uintptr_t)stream));
    PyObject *result = binding_program_end(&program, status);
    if (!result) return NULL;
    Py_DECREF(result);
    return PyBool_FromLong(fcdp_group_missing(group) < fcdp_group_n_extents(group));
}

/* A (group, stream) that the core goes through with the program. */
typedef fcdp_status (*use_step)(fcdp_group *group, const fcdp_program *program, fcdp_stream stream);

static PyObject *step(PyObject *args, const char *format, use_step call) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, format, &handle, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, Py_None);
    CALL(call(group, &program.table, (fcdp_stream)(uintptr_t)stream));
    return binding_program_end(&program, status);
}

METHOD(group_wait) {
    return step(args, "OK:group_wait", fcdp_wait);
}

/* -> had it begun? Then it has been waited for. */
METHOD(group_cancel) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:group_cancel", &handle, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    bool begun = fcdp_group_has_begun(group);
    PyObject *result = step(args, "OK:group_cancel", fcdp_cancel);
    if (!result) return NULL;
    Py_DECREF(result);
    return PyBool_FromLong(begun);
}

static fcdp_status give_up(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) {
    fcdp_give_up(group, program, stream);
    return FCDP_OK;
}

/* What fails here comes second to what has failed; an interrupt does not. */
METHOD(group_give_up) {
    PyObject *result = step(args, "OK:group_give_up", give_up);
    if (result || !PyErr_ExceptionMatches(PyExc_Exception)) return result;
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* (group, stream) */
METHOD(group_reshard) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:group_reshard", &handle, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    int written = group ? binding_program_written(group) : -1;
    if (written < 0) return NULL;
    fcdp_status status;
    CALL(fcdp_group_reshard(group, (fcdp_stream)(uintptr_t)stream, written));
    return methods_none_or_raise(status);
}

METHOD(group_stats) {
    fcdp_group *group = only_group(args, "O:group_stats");
    if (!group) return NULL;
    fcdp_group_stats s;
    Py_BEGIN_ALLOW_THREADS fcdp_group_stats_get(group, &s);
    Py_END_ALLOW_THREADS return Py_BuildValue(
        "{s:s,s:n,s:n,s:K,s:K,s:K,s:K,s:K,s:K,s:s}", "name", s.name, "bytes", (Py_ssize_t)s.bytes,
        "trainable_bytes", (Py_ssize_t)s.trainable_bytes, "gathers_made", s.gathers.made, "gathers_avoided",
        s.gathers.avoided, "gathers_forward", s.gathers.forward, "gathers_backward", s.gathers.backward,
        "plain_bytes", s.plain_bytes, "gather_bytes", s.gather_bytes, "state", s.state);
}

/* (callable or None): binding_refuse_restores */
METHOD(refuse_restores) {
    PyObject *callable;
    if (!PyArg_ParseTuple(args, "O:refuse_restores", &callable)) return NULL;
    binding_refuse_restores(callable);
    Py_RETURN_NONE;
}

PyMethodDef methods_group[] = {
    ENTRY(refuse_restores), ENTRY(group_create),     ENTRY(group_host_alloc),  ENTRY(group_attach),
    ENTRY(group_extent),    ENTRY(group_id),         ENTRY(groups_fit),        ENTRY(group_watch),
    ENTRY(group_set_owner), ENTRY(group_ask_again),  ENTRY(group_unshard),     ENTRY(group_agree),
    ENTRY(group_wait),      ENTRY(group_cancel),     ENTRY(group_give_up),     ENTRY(group_reshard),
    ENTRY(group_stats),     ENTRY(group_whole_vote), ENTRY(group_whole_begin), ENTRY(group_whole_read),
    {NULL, NULL, 0, NULL},
};
