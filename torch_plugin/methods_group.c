/* methods_group.c - _fcdp.Group, a parameter group. */
#include <stdlib.h>

#include "comm/int8.h"
#include "comm/shard.h"
#include "comm/spilled.h"
#include "comm/whole.h"
#include "torch_plugin/dlpack.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/program.h"

PyObject *methods_create_group(PyObject *self, PyObject *args) {
    PyObject *list;
    const char *name;
    if (!PyArg_ParseTuple(args, "sO:create_group", &name, &list)) return NULL;
    fcdp_comm *comm = binding_core(self);
    Py_ssize_t n = comm ? PyList_Size(list) : -1;
    if (n < 0) return NULL;
    fcdp_extent_spec *specs = calloc((size_t)n + 1, sizeof *specs);
    uint8_t *element_bytes = calloc((size_t)n + 1, 1), *numbers = calloc((size_t)n + 1, 1);
    fcdp_group *group;
    fcdp_status status = FCDP_OK;
    if (!specs || !element_bytes || !numbers)
        status = fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zd extents", n);
    for (Py_ssize_t i = 0; i < n && !status; i++) {
        Py_ssize_t shard_bytes;
        int span, width = 0, number = FCDP_NUMBER_OTHER;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "ni|ii", &shard_bytes, &span, &width, &number)) {
            free(specs);
            free(element_bytes);
            free(numbers);
            return NULL;
        }
        specs[i] = (fcdp_extent_spec){.shard_bytes = (size_t)shard_bytes, .span = (uint8_t)span};
        element_bytes[i] = (uint8_t)width;
        numbers[i] = number > 0 && number < FCDP_N_NUMBERS ? (uint8_t)number : FCDP_NUMBER_OTHER;
    }
    if (!status) status = fcdp_group_create(comm, name, specs, (uint32_t)n, &group);
    if (!status) fcdp_group_set_element_bytes(group, element_bytes);
    if (!status) fcdp_group_set_numbers(group, numbers);
    free(specs);
    free(element_bytes);
    free(numbers);
    return status == FCDP_OK ? binding_wrap(BINDING_GROUP, group, self) : binding_raise(status);
}

METHOD_O(group_set_tier) {
    fcdp_group *group = binding_core(self);
    PyObject *name = group ? PyUnicode_AsUTF8String(argument) : NULL;
    fcdp_tier tier;
    if (!name) return NULL;
    bool is_tier = fcdp__tier_parse(PyBytes_AsString(name), &tier);
    Py_DECREF(name);
    if (!is_tier || tier == FCDP_TIER_MAPPED)
        return PyErr_Format(PyExc_ValueError, "no tier is called %R", argument);
    fcdp_group_set_tier(group, tier);
    Py_RETURN_NONE;
}

METHOD_NOARGS(group_allocate_host) {
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    uint64_t offset;
    fcdp_status status;
    CALL(fcdp_group_host_alloc(group, &offset));
    return status == FCDP_OK ? PyLong_FromUnsignedLongLong(offset) : binding_raise(status);
}

METHOD(group_attach) {
    unsigned long long offset;
    if (!PyArg_ParseTuple(args, "K:attach", &offset)) return NULL;
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_attach(group, offset));
    return methods_none_or_raise(status);
}

METHOD_NOARGS(group_attach_file) {
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_attach_file(group));
    return methods_none_or_raise(status);
}

METHOD_NOARGS(group_map_host) {
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_map_host(group));
    return methods_none_or_raise(status);
}

METHOD_NOARGS(group_unmap_host) {
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_unmap_host(group));
    return methods_none_or_raise(status);
}

static PyObject *group_id(PyObject *self, void *closure __attribute__((unused))) {
    fcdp_group *group = binding_core(self);
    return group ? PyLong_FromUnsignedLongLong(fcdp_group_id(group)) : NULL;
}

/* The group, if it has an extent i; NULL with an exception set. */
static fcdp_group *group_with_extent(PyObject *self, unsigned int i) {
    fcdp_group *group = binding_core(self);
    if (!group || i < fcdp_group_n_extents(group)) return group;
    PyErr_SetString(PyExc_IndexError, "the group has no such extent");
    return NULL;
}

METHOD(group_address) {
    unsigned int i;
    if (!PyArg_ParseTuple(args, "I:address", &i)) return NULL;
    fcdp_group *group = group_with_extent(self, i);
    return group ? PyLong_FromUnsignedLongLong(fcdp_group_extent(group, i).addr) : NULL;
}

METHOD(group_dlpack) {
    unsigned int i;
    long long numel;
    int code, bits, device_type, device_id;
    if (!PyArg_ParseTuple(args, "ILiiii:dlpack", &i, &numel, &code, &bits, &device_type, &device_id))
        return NULL;
    fcdp_group *group = group_with_extent(self, i);
    return group ? binding_dlpack_over(fcdp_group_extent(group, i).addr, numel, code, bits, device_type,
                                       device_id, self)
                 : NULL;
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

METHOD_O(group_watch) {
    fcdp_group *group = binding_core(self);
    const char **names = group ? names_of(group, argument) : NULL;
    if (!names) return NULL;
    fcdp_status status = fcdp_group_watch(group, names, fcdp_group_n_extents(group));
    free(names);
    return methods_none_or_raise(status);
}

METHOD(group_set_owner) {
    PyObject *owner, *list;
    if (!PyArg_ParseTuple(args, "OO:set_owner", &owner, &list)) return NULL;
    fcdp_group *group = binding_core(self);
    const char **names = group ? names_of(group, list) : NULL;
    if (!names) return NULL;
    fcdp_status status = fcdp_group_name_extents(group, names);
    free(names);
    if (status) return binding_raise(status);
    if (!binding_set_owner(self, owner)) return NULL;
    Py_RETURN_NONE;
}

METHOD_NOARGS(group_ask_again) {
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    fcdp_group_ask_again(group);
    Py_RETURN_NONE;
}

METHOD(group_vote_whole) {
    PyObject *signals, *fingerprint;
    unsigned int i;
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "ISKKS:vote_whole", &i, &signals, &address, &bytes, &fingerprint))
        return NULL;
    fcdp_group *group = group_with_extent(self, i);
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

METHOD(group_begin_whole) {
    unsigned int i;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "IK:begin_whole", &i, &stream)) return NULL;
    fcdp_group *group = group_with_extent(self, i);
    if (!group) return NULL;
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, Py_None);
    CALL(fcdp_group_whole_begin(group, i, &program.table, (fcdp_stream)(uintptr_t)stream));
    return binding_program_end(&program, status);
}

METHOD(group_read_whole) {
    unsigned int i;
    unsigned long long address, bytes, stream;
    if (!PyArg_ParseTuple(args, "IKKK:read_whole", &i, &address, &bytes, &stream)) return NULL;
    fcdp_group *group = group_with_extent(self, i);
    if (!group) return NULL;
    fcdp_status status;
    CALL(
        fcdp_group_whole_read(group, i, (fcdp_dptr){address}, (size_t)bytes, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
}

METHOD(group_gathered_shard) {
    unsigned int i;
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "IKK:gathered_shard", &i, &address, &bytes)) return NULL;
    fcdp_group *group = group_with_extent(self, i);
    if (!group) return NULL;
    bool has;
    fcdp_status status;
    CALL(fcdp_group_gathered_shard(group, i, (void *)(uintptr_t)address, (size_t)bytes, &has));
    return status == FCDP_OK ? PyBool_FromLong(has) : binding_raise(status);
}

static PyObject *group_unshard(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 6) return PyErr_Format(PyExc_TypeError, "unshard() takes 6 arguments, got %zd", n);
    fcdp_group *group = binding_core(self);
    fcdp_tree *tree = group ? binding_unwrap(BINDING_TREE, args[0]) : NULL;
    if (!tree) return NULL;
    const long pass = PyLong_AsLong(args[1]);
    const int by_hand = PyObject_IsTrue(args[2]);
    fcdp_unshard_args unshard = {.pass = (fcdp_pass)pass, .by_hand = by_hand > 0};
    if (PyErr_Occurred() || !methods_stream(args[3], &unshard.stream) ||
        !methods_stream(args[4], &unshard.made_on))
        return NULL;
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, args[5]);
    CALL(fcdp_unshard(group, tree, &program.table, &unshard));
    if (!status && binding_program_has_raised(&program)) /* FSDP will not know of the use */
        Py_BEGIN_ALLOW_THREADS fcdp_give_up(group, &program.table, unshard.stream);
    Py_END_ALLOW_THREADS return binding_program_end(&program, status);
}

METHOD_O(group_agree) {
    fcdp_group *group = binding_core(self);
    fcdp_stream stream;
    if (!group || !methods_stream(argument, &stream)) return NULL;
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, Py_None);
    CALL(fcdp_agree(&group, 1, &program.table, stream));
    PyObject *result = binding_program_end(&program, status);
    if (!result) return NULL;
    Py_DECREF(result);
    return PyBool_FromLong(fcdp_group_missing(group) < fcdp_group_n_extents(group));
}

/* What the core does of a group on a stream, with the program. */
typedef fcdp_status (*use_step)(fcdp_group *group, const fcdp_program *program, fcdp_stream stream);

static PyObject *step(fcdp_group *group, PyObject *number, use_step call) {
    fcdp_stream stream;
    if (!group || !methods_stream(number, &stream)) return NULL;
    binding_program program;
    fcdp_status status;
    binding_program_begin(&program, Py_None);
    CALL(call(group, &program.table, stream));
    return binding_program_end(&program, status);
}

METHOD_O(group_wait) {
    return step(binding_core(self), argument, fcdp_wait);
}

METHOD_O(group_cancel) {
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    bool begun = fcdp_group_has_begun(group);
    PyObject *result = step(group, argument, fcdp_cancel);
    if (!result) return NULL;
    Py_DECREF(result);
    return PyBool_FromLong(begun);
}

static fcdp_status give_up(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) {
    fcdp_give_up(group, program, stream);
    return FCDP_OK;
}

METHOD_O(group_give_up) {
    PyObject *result = step(binding_core(self), argument, give_up);
    if (result || !PyErr_ExceptionMatches(PyExc_Exception)) return result;
    PyErr_Clear();
    Py_RETURN_NONE;
}

METHOD_O(group_reshard) {
    fcdp_group *group = binding_core(self);
    fcdp_stream stream;
    if (!group || !methods_stream(argument, &stream)) return NULL;
    int written = binding_program_written(group);
    if (written < 0) return NULL;
    fcdp_status status;
    CALL(fcdp_group_reshard(group, stream, written));
    return methods_none_or_raise(status);
}

METHOD_NOARGS(group_stats) {
    fcdp_group *group = binding_core(self);
    if (!group) return NULL;
    fcdp_group_stats s;
    Py_BEGIN_ALLOW_THREADS fcdp_group_stats_get(group, &s);
    Py_END_ALLOW_THREADS return Py_BuildValue(
        "{s:s,s:n,s:n,s:K,s:K,s:K,s:K,s:K,s:K,s:s,s:N,s:N,s:s}", "name", s.name, "bytes", (Py_ssize_t)s.bytes,
        "trainable_bytes", (Py_ssize_t)s.trainable_bytes, "gathers_made", s.gathers.made, "gathers_avoided",
        s.gathers.avoided, "gathers_forward", s.gathers.forward, "gathers_backward", s.gathers.backward,
        "plain_bytes", s.plain_bytes, "gather_bytes", s.gather_bytes, "state", s.state, "in_file",
        PyBool_FromLong(s.in_file), "on_disk", PyBool_FromLong(s.on_disk), "tier", fcdp__tier_name(s.tier));
}

/* A list of (name, trainable, frozen), for the caller to free(); the names are borrowed. NULL: an exception
 * is set. */
static fcdp_counted *counted_of(PyObject *list, uint32_t *n_out) {
    Py_ssize_t n = PyList_Check(list) ? PyList_Size(list) : -1;
    if (n < 0) return PyErr_SetString(PyExc_TypeError, "a list is expected"), NULL;
    fcdp_counted *counted = calloc((size_t)n + 1, sizeof *counted);
    if (!counted) return (fcdp_counted *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        unsigned long long trainable, frozen;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "sKK", &counted[i].name, &trainable, &frozen)) {
            free(counted);
            return NULL;
        }
        counted[i].trainable = trainable;
        counted[i].frozen = frozen;
    }
    *n_out = (uint32_t)n;
    return counted;
}

FUNCTION(match_plan) {
    PyObject *planned, *model, *result = NULL;
    uint32_t n_regions, n_groups;
    if (!PyArg_ParseTuple(args, "OO:match_plan", &planned, &model)) return NULL;
    fcdp_counted *regions = counted_of(planned, &n_regions);
    fcdp_counted *groups = regions ? counted_of(model, &n_groups) : NULL;
    uint32_t *region_of = groups ? calloc((size_t)n_groups + 1, sizeof *region_of) : NULL;
    if (groups && !region_of) PyErr_NoMemory();
    if (region_of) {
        fcdp_status status = fcdp__tiers_match(regions, n_regions, groups, n_groups, region_of);
        result = status ? binding_raise(status) : PyList_New(n_groups);
        for (uint32_t g = 0; result && !status && g < n_groups; g++)
            PyList_SetItem(result, g, PyLong_FromUnsignedLong(region_of[g]));
    }
    free(regions);
    free(groups);
    free(region_of);
    return result;
}

FUNCTION(refuse_restores) {
    PyObject *callable;
    if (!PyArg_ParseTuple(args, "O:refuse_restores", &callable)) return NULL;
    binding_refuse_restores(callable);
    Py_RETURN_NONE;
}

PyMethodDef methods_group[] = {
    {"match_plan", match_plan, METH_VARARGS,
     DOC("match_plan($module, regions, groups, /)",
         "Find the groups of a model in a plan (FCDP_PLAN): by their names, or else by their numbers of\n"
         "parameters.\n\n"
         "regions, groups: a list of (name, trainable parameters, frozen ones). Returns the index of its\n"
         "region for each group. Raises Error (ERR_INVALID), with the first difference.")},
    {"refuse_restores", refuse_restores, METH_VARARGS,
     DOC("refuse_restores($module, callable, /)",
         "For tests: a restore finds no device memory where callable(id of the group) is true. None:\n"
         "none does.")},
    {NULL, NULL, 0, NULL},
};

/* ---- the type ---- */

static PyMethodDef methods[] = {
    {"set_tier", group_set_tier, METH_O,
     DOC("set_tier($self, tier, /)",
         "Say where the group lives between its uses; before attach(), and the same on every rank.\n\n"
         "tier: \"policy\", or what a plan has of it: \"device\", \"host\", \"host-whole\", \"file\" or\n"
         "\"gather\". Raises ValueError for another.")},
    {"allocate_host", group_allocate_host, METH_NOARGS,
     DOC("allocate_host($self, /)",
         "Take the group's block of the host memory that the node's ranks share; local rank 0 alone\n"
         "does.\n\n"
         "Returns its offset there, in bytes, for attach(). Raises Error (ERR_NO_HOST_MEM) where\n"
         "the node's budget is spent.")},
    {"attach", group_attach, METH_VARARGS,
     DOC("attach($self, offset, /)",
         "Reserve the group's addresses on the device, over the block of host memory at `offset`,\n"
         "which is what allocate_host() returned on the node's local rank 0. On every rank, once,\n"
         "before any use. Raises Error.")},
    {"attach_file", group_attach_file, METH_NOARGS,
     DOC("attach_file($self, /)",
         "The same, for a group that the nodes' host memory has no room for: it lives in a file of\n"
         "each rank's (FCDP_SPILL_DIR). Every rank of the shard group does, or none: where one raises\n"
         "Error (ERR_UNSUPPORTED, ERR_NO_HOST_MEM: the disk is full), the others drop theirs.")},
    {"map_host", group_map_host, METH_NOARGS,
     DOC("map_host($self, /)",
         "Put host memory of this rank's under the group's device addresses (FCDP_HOST_MAP): the tier\n"
         "\"mapped\". After attach(), before any use; on every rank, or those that did call unmap_host().\n"
         "Raises Error where the system does not offer it or the host budget is spent; then the group is\n"
         "as it was.")},
    {"unmap_host", group_unmap_host, METH_NOARGS,
     DOC("unmap_host($self, /)", "Undo map_host(), before any use. Raises Error; then it stays mapped.")},
    {"address", group_address, METH_VARARGS,
     DOC("address($self, i, /)",
         "Where extent i is on the device, as long as the group lives: n_ranks * shard_bytes bytes.\n"
         "Raises IndexError.")},
    {"dlpack", group_dlpack, METH_VARARGS,
     DOC("dlpack($self, i, numel, code, bits, device_type, device_id, /)",
         "A DLPack capsule of extent i for torch.from_dlpack: one dimension of `numel` elements.\n\n"
         "code, bits: DLPack's of the dtype. device_type, device_id: DLPack's. The tensor keeps the\n"
         "group; its memory is there between wait() and reshard() alone. Raises IndexError.")},
    {"watch", group_watch, METH_O,
     DOC("watch($self, names, /)",
         "Let a SIGSEGV in the group's memory name the parameter that was used while it was sharded.\n\n"
         "names: a list of str, one for each extent. After attach(), once. Raises Error, and\n"
         "ValueError for another number of names.")},
    {"set_owner", group_set_owner, METH_VARARGS,
     DOC("set_owner($self, owner, names, /)",
         "Set the object whose methods the core calls for what Python alone knows of the group's\n"
         "parameters (fcdp.group.Group has them), on the thread that unshards.\n\n"
         "owner: referred to weakly. names: a list of str, one for each extent, for messages. Raises\n"
         "ValueError for another number of names.")},
    {"unshard", (PyCFunction)(void (*)(void))group_unshard, METH_FASTCALL,
     DOC("unshard($self, tree, pass_, by_hand, stream, made_on, side, /)",
         "Begin the group's gather or restore, or put it off until wait(); then those of the groups\n"
         "that follow. The ranks agree before, if they must. All ranks call it in the same order of\n"
         "groups.\n\n"
         "tree: the Tree that the group belongs to from here on. pass_: PASS_*. by_hand: not from a\n"
         "hook of FSDP's; the ranks agree on the group alone. stream: the current one, by its address\n"
         "or id. made_on: the stream behind which an agreement by hand reads the shards. side: the\n"
         "fcdp.side.Side on which the gather's inputs are made; None: on the current stream. Raises\n"
         "Error, and what the owner's methods raised. After an exception there is nothing to wait for.")},
    {"wait", group_wait, METH_O,
     DOC("wait($self, stream, /)",
         "Make `stream` wait until the gathered bytes are there; where the model computes on the host,\n"
         "the host waits. Begins what unshard() has put off.\n\n"
         "stream: its address or id; 0: the default one. Raises Error, and what the owner's methods\n"
         "raised.")},
    {"reshard", group_reshard, METH_O,
     DOC("reshard($self, stream, /)",
         "End the group's use: its device memory may go behind what is on `stream` by now. Asks the\n"
         "owner whether the gathered bytes were written to, since such a copy is not fresh.\n\n"
         "stream: its address or id. Raises Error, and what the owner's methods raised.")},
    {"cancel", group_cancel, METH_O,
     DOC("cancel($self, stream, /)",
         "The gathered bytes of an unshard() will not be used: in place of wait(), and before\n"
         "reshard().\n\n"
         "Returns whether the gather or restore had begun; then it has been waited for. Raises Error.")},
    {"give_up", group_give_up, METH_O,
     DOC("give_up($self, stream, /)",
         "End a use that has failed after its unshard(): in place of wait() and reshard(). Raises\n"
         "nothing but an interrupt, since an exception is under way.")},
    {"agree", group_agree, METH_O,
     DOC("agree($self, stream, /)",
         "Agree with the other ranks on the group alone, behind what is on `stream`; all ranks call\n"
         "it.\n\n"
         "Returns whether a shard of the group is missing on some rank. Raises Error, and what the\n"
         "owner's methods raised.")},
    {"ask_again", group_ask_again, METH_NOARGS,
     DOC("ask_again($self, /)",
         "Its gradients were reduced, or an optimizer stepped its parameters: the ranks agree anew at\n"
         "the next unshard.")},
    {"vote_whole", group_vote_whole, METH_VARARGS,
     DOC("vote_whole($self, i, signals, address, n_bytes, fingerprint, /)",
         "This rank's vote on reading parameter i as a whole from the node's copy. Changes nothing.\n\n"
         "signals: bytes, the 8 uint64 of comm/validity.h's fcdp_signals. address: of the shard's\n"
         "n_bytes bytes where the host reads them, else 0. fingerprint: a uint64 as bytes where the\n"
         "device has read them, else b\"\". Returns WHOLE_*; the ranks take their maximum. Raises\n"
         "IndexError.")},
    {"begin_whole", group_begin_whole, METH_VARARGS,
     DOC("begin_whole($self, i, stream, /)",
         "As unshard(), to read parameter i as a whole, after a vote of WHOLE_FRESH or an agreement on\n"
         "the group. wait() and reshard() follow. Raises Error, IndexError, and what the owner's\n"
         "methods raised.")},
    {"read_whole", group_read_whole, METH_VARARGS,
     DOC("read_whole($self, i, address, n_bytes, stream, /)",
         "Copy the first n_bytes bytes of parameter i from host memory to the device memory at\n"
         "`address`, after a vote of WHOLE_HOST. `stream` waits for them; where the model computes on\n"
         "the host, the host does. Raises Error and IndexError.")},
    {"gathered_shard", group_gathered_shard, METH_VARARGS,
     DOC("gathered_shard($self, i, address, n_bytes, /)",
         "Copy the first n_bytes bytes of this rank's shard of parameter i, as they were last gathered, to\n"
         "the host memory at `address`; the host waits.\n\n"
         "Returns False where no copy is on the node, only a file has it, or another rank keeps a part of\n"
         "it on its device: nothing is copied then.\n"
         "Raises Error (ERR_INVALID: it is being unsharded, or asleep) and IndexError.")},
    {"stats", group_stats, METH_NOARGS,
     DOC("stats($self, /)",
         "What the group is and did so far: a dict with name, bytes, trainable_bytes, gathers_made,\n"
         "gathers_avoided, gathers_forward, gathers_backward, plain_bytes, gather_bytes (as\n"
         "fcdp.stats() has them), in_file, on_disk, tier (set_tier(), or \"mapped\"), and state:\n"
         "\"device\", \"host\", \"file\", \"mapped\", \"mixed\" or \"invalid\".")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"id", group_id, NULL, "A number that no other group of this process has, before or after; not 0.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

bool methods_group_type(PyObject *module) {
    static const char doc[] =
        "One parameter group of FSDP's in a shard group: the same bytes on the device and in the\n"
        "node's host memory.\n\n"
        "Made by ShardGroup.create_group() alone. It ends with its last reference, that of a tensor\n"
        "over its memory included, and waits for its operations then. Calls on one group are the\n"
        "caller's to order.";
    return binding_type_add(module, BINDING_GROUP, doc, methods, getters);
}
