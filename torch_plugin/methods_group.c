/* methods_group.c - the module's functions of a parameter group. */
#include <stdlib.h>

#include "comm/coalesce.h"
#include "comm/fit.h"
#include "comm/tree.h"
#include "comm/unshard.h"
#include "comm/vote.h"
#include "comm/whole.h"
#include "torch_plugin/methods.h"

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

/* The groups of a list, in its order, for the caller to free(); NULL with an error set. */
static fcdp_group **groups_of(PyObject *list, uint32_t *n_out) {
    Py_ssize_t n = PyList_Size(list);
    if (n < 0) return NULL;
    fcdp_group **groups = calloc((size_t)n + 1, sizeof *groups);
    if (!groups) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        groups[i] = group_of(PyList_GetItem(list, i));
        if (groups[i]) continue;
        free(groups);
        return NULL;
    }
    *n_out = (uint32_t)n;
    return groups;
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

/* Tells a group from others while it lives. */
METHOD(group_id) {
    fcdp_group *group = only_group(args, "O:group_id");
    return group ? PyLong_FromVoidPtr(group) : NULL;
}

/* ([group], a byte for each: does it stay gathered between forward and backward?)
 * -> is there room to begin one ahead? */
METHOD(groups_fit) {
    PyObject *list, *bytes;
    if (!PyArg_ParseTuple(args, "OO:groups_fit", &list, &bytes)) return NULL;
    uint32_t n;
    fcdp_group **groups = groups_of(list, &n);
    if (!groups) return NULL;
    const void *stays = methods_bytes(bytes, n, "stays");
    bool ahead;
    fcdp_status status = stays ? fcdp_groups_fit(groups, stays, n, &ahead) : FCDP_OK;
    free(groups);
    if (!stays) return NULL;
    return status ? binding_raise(status) : PyBool_FromLong(ahead);
}

METHOD(group_is_small) {
    fcdp_group *group = only_group(args, "O:group_is_small");
    return group ? PyBool_FromLong(fcdp_group_is_small(group)) : NULL;
}

METHOD(group_begins_alone) {
    fcdp_group *group = only_group(args, "O:group_begins_alone");
    return group ? PyBool_FromLong(fcdp_group_begins_alone(group)) : NULL;
}

/* (group, pass, stream) */
METHOD(group_begin_late) {
    PyObject *handle;
    int pass;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OiK:group_begin_late", &handle, &pass, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_begin_late(group, (fcdp_pass)pass, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
}

/* ([group], inputs: uint64 per extent, one group after another, stream) */
METHOD(groups_coalesce) {
    PyObject *list, *inputs;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OSK:groups_coalesce", &list, &inputs, &stream)) return NULL;
    uint32_t n;
    fcdp_group **groups = groups_of(list, &n);
    if (!groups) return NULL;
    size_t n_extents = 0;
    for (uint32_t i = 0; i < n; i++) n_extents += fcdp_group_n_extents(groups[i]);
    const uint64_t *addresses = methods_bytes(inputs, n_extents * sizeof *addresses, "inputs");
    fcdp_status status = FCDP_OK;
    if (addresses) CALL(fcdp_groups_coalesce(groups, addresses, n, (fcdp_stream)(uintptr_t)stream));
    free(groups);
    return addresses ? methods_none_or_raise(status) : NULL;
}

/* (group, [name of extent i]) */
METHOD(group_watch) {
    PyObject *handle, *list;
    if (!PyArg_ParseTuple(args, "OO:group_watch", &handle, &list)) return NULL;
    fcdp_group *group = group_of(handle);
    Py_ssize_t n = group ? PyList_Size(list) : -1;
    if (n < 0) return NULL;
    const char **names = calloc((size_t)n + 1, sizeof *names);
    if (!names) return PyErr_NoMemory();
    bool read = true;
    for (Py_ssize_t i = 0; i < n && read; i++) {
        names[i] = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, i), NULL); /* lives as long as the string */
        read = names[i] != NULL;
    }
    fcdp_status status = read ? fcdp_group_watch(group, names, (uint32_t)n) : FCDP_OK;
    free(names);
    return read ? methods_none_or_raise(status) : NULL;
}

METHOD(group_join) {
    PyObject *handle, *tree_handle;
    if (!PyArg_ParseTuple(args, "OO:group_join", &handle, &tree_handle)) return NULL;
    fcdp_group *group = group_of(handle);
    fcdp_tree *tree = group ? binding_unwrap(BINDING_TREE, tree_handle) : NULL;
    if (!tree) return NULL;
    fcdp_group_join(group, tree);
    Py_RETURN_NONE;
}

/* (group, by_hand) -> ASK_GROUP, ASK_TREE, or 0: nobody is asked */
METHOD(group_question) {
    PyObject *handle;
    int by_hand;
    if (!PyArg_ParseTuple(args, "Op:group_question", &handle, &by_hand)) return NULL;
    fcdp_group *group = group_of(handle);
    return group ? PyLong_FromLong(fcdp_group_question(group, by_hand)) : NULL;
}

METHOD(group_ask_again) {
    fcdp_group *group = only_group(args, "O:group_ask_again");
    if (!group) return NULL;
    fcdp_group_ask_again(group);
    Py_RETURN_NONE;
}

/* (signals: n x 8 uint64, shards: uint64 per piece (0: cannot be read), shard_bytes: uint64 per piece (of one
 * that cannot be read 0, unless its bytes are not there), n_pieces: n uint64, by_device: the shards are read
 * there), borrowed from the arguments. */
static bool evidence_from(const fcdp_group *group, PyObject *signals, PyObject *shards, PyObject *sizes,
                          PyObject *counts, int by_device, fcdp_evidence *evidence_out) {
    size_t n = fcdp_group_n_extents(group), n_pieces = 0;
    *evidence_out = (fcdp_evidence){.signals = methods_bytes(signals, n * sizeof(fcdp_signals), "signals"),
                                    .by_device = by_device};
    if (evidence_out->signals)
        evidence_out->n_pieces = methods_bytes(counts, n * sizeof(uint64_t), "n_pieces");
    if (!evidence_out->n_pieces) return false;
    for (size_t i = 0; i < n; i++) n_pieces += evidence_out->n_pieces[i];
    evidence_out->shards = methods_bytes(shards, n_pieces * sizeof(uint64_t), "shards");
    if (evidence_out->shards)
        evidence_out->shard_bytes = methods_bytes(sizes, n_pieces * sizeof(uint64_t), "shard_bytes");
    return evidence_out->shard_bytes != NULL;
}

/* (group, steps of optimizers: n uint64) -> must the device read its shards before it votes? */
METHOD(group_needs_fingerprints) {
    PyObject *handle, *steps;
    if (!PyArg_ParseTuple(args, "OS:group_needs_fingerprints", &handle, &steps)) return NULL;
    fcdp_group *group = group_of(handle);
    const uint64_t *at = group ? methods_bytes(steps, fcdp_group_n_extents(group) * sizeof *at, "steps")
                               : NULL;
    return at ? PyBool_FromLong(fcdp_group_needs_fingerprints(group, at)) : NULL;
}

/* (group, signals, shards, shard_bytes, n_pieces, by_device, fingerprints, with by_device: uint64 per
 * piece, or none, grad_mode, optimizer_seen, reductions) -> n + 1 bytes */
METHOD(group_vote) {
    PyObject *handle, *signals, *shards, *sizes, *counts, *fingerprints;
    int by_device, grad_mode, optimizer_seen;
    unsigned long long reductions;
    fcdp_evidence evidence;
    if (!PyArg_ParseTuple(args, "OSSSSpSppK:group_vote", &handle, &signals, &shards, &sizes, &counts,
                          &by_device, &fingerprints, &grad_mode, &optimizer_seen, &reductions))
        return NULL;
    fcdp_group *group = group_of(handle);
    if (!group || !evidence_from(group, signals, shards, sizes, counts, by_device, &evidence)) return NULL;
    if (by_device && PyBytes_Size(fingerprints) > 0) {
        evidence.fingerprints = methods_bytes(fingerprints, (size_t)PyBytes_Size(sizes), "fingerprints");
        if (!evidence.fingerprints) return NULL;
    }
    PyObject *vote = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)fcdp_group_n_extents(group) + 1);
    if (!vote) return NULL;
    uint8_t *vote_out = (uint8_t *)PyBytes_AsString(vote);
    fcdp_process_signals process = {
        .grad_mode = grad_mode, .optimizer_seen = optimizer_seen, .reductions = reductions};
    fcdp_status status;
    CALL(fcdp_group_vote(group, &evidence, &process, vote_out));
    if (status == FCDP_OK) return vote;
    Py_DECREF(vote);
    return binding_raise(status);
}

/* (group, n + 1 bytes) -> index of the first parameter of which some rank's shard is missing, -1: none */
METHOD(group_agree) {
    PyObject *handle, *agreed;
    if (!PyArg_ParseTuple(args, "OS:group_agree", &handle, &agreed)) return NULL;
    fcdp_group *group = group_of(handle);
    const uint8_t *bytes = group ? methods_bytes(agreed, (size_t)fcdp_group_n_extents(group) + 1, "agreed")
                                 : NULL;
    if (!bytes) return NULL;
    uint32_t missing = fcdp_group_agree(group, bytes);
    return PyLong_FromLong(missing < fcdp_group_n_extents(group) ? (long)missing : -1);
}

/* (group, signals, shards, shard_bytes, n_pieces, by_device) -> index of the first parameter that has
 * changed since the ranks agreed, -1: none */
METHOD(group_audit) {
    PyObject *handle, *signals, *shards, *sizes, *counts;
    int by_device;
    fcdp_evidence evidence;
    if (!PyArg_ParseTuple(args, "OSSSSp:group_audit", &handle, &signals, &shards, &sizes, &counts,
                          &by_device))
        return NULL;
    fcdp_group *group = group_of(handle);
    if (!group || !evidence_from(group, signals, shards, sizes, counts, by_device, &evidence)) return NULL;
    uint32_t changed;
    Py_BEGIN_ALLOW_THREADS changed = fcdp_group_audit(group, &evidence);
    Py_END_ALLOW_THREADS return PyLong_FromLong(changed < fcdp_group_n_extents(group) ? (long)changed : -1);
}

/* (group, signals, shards, shard_bytes, n_pieces, by_device, stream): what is agreed stale is read next */
METHOD(group_confirm) {
    PyObject *handle, *signals, *shards, *sizes, *counts;
    int by_device;
    unsigned long long stream;
    fcdp_evidence evidence;
    if (!PyArg_ParseTuple(args, "OSSSSpK:group_confirm", &handle, &signals, &shards, &sizes, &counts,
                          &by_device, &stream))
        return NULL;
    fcdp_group *group = group_of(handle);
    if (!group || !evidence_from(group, signals, shards, sizes, counts, by_device, &evidence)) return NULL;
    fcdp_status status;
    CALL(fcdp_group_confirm(group, &evidence, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
}

/* group -> n flags */
METHOD(group_stale) {
    fcdp_group *group = only_group(args, "O:group_stale");
    PyObject *stale = group ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)fcdp_group_n_extents(group)) : NULL;
    if (stale) fcdp_group_stale(group, (uint8_t *)PyBytes_AsString(stale));
    return stale;
}

/* (group, stream): raises while the stream captures a CUDA graph. */
METHOD(group_check_capture) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:group_check_capture", &handle, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    return group ? methods_none_or_raise(fcdp_group_check_capture(group, (fcdp_stream)(uintptr_t)stream))
                 : NULL;
}

/* (group, inputs: n uint64 or empty, pass, stream) */
METHOD(group_begin) {
    PyObject *handle, *inputs;
    int pass;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OSiK:group_begin", &handle, &inputs, &pass, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    const uint64_t *addresses = NULL;
    if (PyBytes_Size(inputs) > 0) {
        addresses = methods_bytes(inputs, fcdp_group_n_extents(group) * sizeof(uint64_t), "inputs");
        if (!addresses) return NULL;
    }
    fcdp_status status;
    CALL(fcdp_group_begin(group, addresses, (fcdp_pass)pass, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
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

/* (group, i, inputs: n uint64, stream) */
METHOD(group_whole_begin) {
    PyObject *handle, *inputs;
    unsigned int i;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OISK:group_whole_begin", &handle, &i, &inputs, &stream)) return NULL;
    fcdp_group *group = group_with_extent(handle, i);
    if (!group) return NULL;
    const uint64_t *addresses = methods_bytes(inputs, fcdp_group_n_extents(group) * sizeof(uint64_t),
                                              "inputs");
    if (!addresses) return NULL;
    fcdp_status status;
    CALL(fcdp_group_whole_begin(group, i, addresses, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
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

METHOD(group_has_begun) {
    fcdp_group *group = only_group(args, "O:group_has_begun");
    return group ? PyBool_FromLong(fcdp_group_has_begun(group)) : NULL;
}

/* (group, forward) -> ids of the groups to be begun ahead, in order */
METHOD(group_unsharded) {
    enum { MOST = 8 };
    PyObject *handle;
    int forward;
    fcdp_group *ahead[MOST];
    if (!PyArg_ParseTuple(args, "Op:group_unsharded", &handle, &forward)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    size_t n = fcdp_group_unsharded(group, forward, ahead, MOST);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) PyList_SetItem(list, (Py_ssize_t)i, PyLong_FromVoidPtr(ahead[i]));
    return list;
}

METHOD(group_wait) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:group_wait", &handle, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_wait(group, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
}

/* (group, stream, written) */
METHOD(group_reshard) {
    PyObject *handle;
    unsigned long long stream;
    int written;
    if (!PyArg_ParseTuple(args, "OKp:group_reshard", &handle, &stream, &written)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
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

PyMethodDef methods_group[] = {
    ENTRY(group_create),
    ENTRY(group_host_alloc),
    ENTRY(group_attach),
    ENTRY(group_extent),
    ENTRY(group_id),
    ENTRY(groups_fit),
    ENTRY(group_is_small),
    ENTRY(groups_coalesce),
    ENTRY(group_watch),
    ENTRY(group_join),
    ENTRY(group_question),
    ENTRY(group_ask_again),
    ENTRY(group_needs_fingerprints),
    ENTRY(group_vote),
    ENTRY(group_agree),
    ENTRY(group_audit),
    ENTRY(group_confirm),
    ENTRY(group_stale),
    ENTRY(group_check_capture),
    ENTRY(group_begin),
    ENTRY(group_has_begun),
    ENTRY(group_unsharded),
    ENTRY(group_wait),
    ENTRY(group_reshard),
    ENTRY(group_stats),
    ENTRY(group_whole_vote),
    ENTRY(group_whole_begin),
    ENTRY(group_whole_read),
    ENTRY(group_begins_alone),
    ENTRY(group_begin_late),
    {NULL, NULL, 0, NULL},
};
