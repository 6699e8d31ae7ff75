/* _fcdp.c - the extension module. Its functions parse arguments, call the core without the GIL, raise its
 * errors; nothing is decided here. */
#include "torch_plugin/binding.h"

#include "comm/coalesce.h"
#include "comm/fit.h"
#include "comm/tree.h"
#include "comm/unshard.h"
#include "comm/vote.h"
#include "torch_plugin/history.h"
#include "torch_plugin/neighbour.h"
#include "torch_plugin/tensors.h"

#include <stdlib.h>
#include <string.h>

extern char **environ;

PyObject *binding_error_class;

/* Call the core without the GIL; `status` must be declared. */
#define CALL(expr)                                                                                           \
    do {                                                                                                     \
        Py_BEGIN_ALLOW_THREADS status = (expr);                                                              \
        Py_END_ALLOW_THREADS                                                                                 \
    } while (0)
#define METHOD(name) static PyObject *name(PyObject *self __attribute__((unused)), PyObject *args)

/* `object` as bytes of exactly `bytes` bytes, borrowed; NULL with an error set. */
static const void *bytes_of(PyObject *object, size_t bytes, const char *what) {
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &data, &length) < 0) return NULL;
    if ((size_t)length == bytes) return data;
    PyErr_Format(PyExc_ValueError, "%s: expected %zu bytes, got %zd", what, bytes, length);
    return NULL;
}

static PyObject *none_or_raise(fcdp_status status) {
    if (status < 0) return binding_raise(status);
    Py_RETURN_NONE;
}

static fcdp_options options; /* as last loaded; guarded by the GIL */

const fcdp_options *binding_options(void) {
    return &options;
}

METHOD(options_load) {
    if (!PyArg_ParseTuple(args, ":options_load")) return NULL;
    fcdp_options loaded;
    fcdp_status status = fcdp_options_load(environ, &loaded);
    if (status != FCDP_OK) return binding_raise(status);
    options = loaded;
    fcdp__check_level = loaded.check;
    fcdp_log_set_level(loaded.log);
    return Py_BuildValue(
        "{s:i,s:i,s:d,s:i,s:i,s:i,s:i,s:d,s:i,s:i,s:i,s:i,s:i,s:i}", "enabled", loaded.enabled, "driver",
        (int)loaded.driver, "tau", loaded.tau, "restore", (int)loaded.restore, "local_size",
        loaded.local_size, "fingerprint", (int)loaded.fingerprint, "prefetch", loaded.prefetch, "timeout_s",
        loaded.timeout_s, "log", (int)loaded.log, "summary", loaded.summary, "agree", (int)loaded.agree,
        "alloc", (int)loaded.alloc, "mapping", (int)loaded.mapping, "transport", (int)loaded.transport);
}

METHOD(options_table) {
    if (!PyArg_ParseTuple(args, ":options_table")) return NULL;
    size_t n;
    const fcdp_option_row *rows = fcdp_options_table(&n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *row = Py_BuildValue("(zzzz)", rows[i].name, rows[i].values, rows[i].fallback, rows[i].help);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

METHOD(engine_create) {
    int driver, ordinal;
    const char *sim_library;
    int on_tensors_device, mapping;
    if (!PyArg_ParseTuple(args, "iispi:engine_create", &driver, &ordinal, &sim_library, &on_tensors_device,
                          &mapping))
        return NULL;
    const fcdp_device *device = NULL;
    fcdp_status status = FCDP_OK;
    if (on_tensors_device) CALL(binding_tensors_device(ordinal, &device));
    if (status != FCDP_OK) return binding_raise(status);
    fcdp_engine_config config = {.options = options,
                                 .driver = (fcdp_driver_kind)driver,
                                 .ordinal = ordinal,
                                 .sim_library = sim_library,
                                 .device = device,
                                 .host_computes = driver != FCDP_DRIVER_CUDA};
    config.options.mapping = (fcdp_mapping_mode)mapping;
    fcdp_engine *engine;
    CALL(fcdp_engine_create(&config, &engine));
    return status == FCDP_OK ? binding_wrap(BINDING_ENGINE, engine, NULL) : binding_raise(status);
}

METHOD(engine_destroy) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_destroy", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    Py_BEGIN_ALLOW_THREADS binding_neighbour_end();
    fcdp_engine_destroy(engine);
    Py_END_ALLOW_THREADS binding_end_generation();
    Py_RETURN_NONE;
}

/* What the two kinds of shared memory have in common: the ticket of a
 * creation as bytes, a join by such bytes. */
static PyObject *ticket_or_raise(fcdp_status status, const fcdp_shared_ticket *ticket) {
    return status == FCDP_OK ? PyBytes_FromStringAndSize((const char *)ticket, sizeof *ticket)
                             : binding_raise(status);
}

static bool ticket_from(PyObject *bytes, fcdp_shared_ticket *ticket_out) {
    const void *data = bytes_of(bytes, sizeof *ticket_out, "ticket");
    if (data) memcpy(ticket_out, data, sizeof *ticket_out);
    return data != NULL;
}

METHOD(engine_account_create) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_account_create", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_shared_ticket ticket = {0};
    fcdp_status status;
    CALL(fcdp_engine_account_create(engine, &ticket));
    return ticket_or_raise(status, &ticket);
}

METHOD(engine_account_join) {
    PyObject *handle, *bytes;
    fcdp_shared_ticket ticket;
    if (!PyArg_ParseTuple(args, "OO:engine_account_join", &handle, &bytes)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine || !ticket_from(bytes, &ticket)) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_account_join(engine, &ticket));
    return none_or_raise(status);
}

METHOD(engine_drain) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_drain", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_drain(engine));
    return none_or_raise(status);
}

METHOD(engine_check) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_check", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_check(engine));
    return none_or_raise(status);
}

METHOD(engine_order_writes) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:engine_order_writes", &handle, &stream)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_order_writes(engine, (fcdp_stream)(uintptr_t)stream));
    return none_or_raise(status);
}

METHOD(engine_begin_pass) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_begin_pass", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    Py_BEGIN_ALLOW_THREADS fcdp_engine_begin_pass(engine);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *counts_of(const fcdp_collective_counts *counts) {
    return Py_BuildValue("(KKK)", counts->calls, counts->inter_bytes_sent, counts->intra_bytes_sent);
}

METHOD(engine_stats) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_stats", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_engine_stats s;
    Py_BEGIN_ALLOW_THREADS fcdp_engine_stats_get(engine, &s);
    Py_END_ALLOW_THREADS return Py_BuildValue(
        "{s:s,s:N,s:N,s:{s:K,s:K,s:K,s:K},s:{s:K,s:K},s:{s:K,s:d},s:{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K},s:{s:n,"
        "s:n,s:n},s:{s:n,s:n}}",
        "driver", fcdp_engine_is_sim(engine) ? "sim" : "cuda", "gather", counts_of(&s.gather), "restore",
        counts_of(&s.restore), "gathers", "made", s.gathers.made, "avoided", s.gathers.avoided, "forward",
        s.gathers.forward, "backward", s.gathers.backward, "saved", "plain_bytes", s.plain_bytes,
        "gather_bytes", s.gather_bytes, "waits", "gathers", s.n_host_waits, "seconds",
        (double)s.host_wait_ns / 1e9, "moves", "h2d_bytes", s.moves.h2d_bytes, "d2h_bytes", s.moves.d2h_bytes,
        "stores", s.moves.n_puts, "slice_loads", s.moves.n_slice_loads, "whole_loads", s.moves.n_whole_loads,
        "evictions", s.moves.n_evictions, "maps", s.moves.n_maps, "memory_waits", s.moves.n_waits,
        "device_bytes", "current", (Py_ssize_t)s.device_bytes, "peak", (Py_ssize_t)s.device_peak_bytes,
        "budget", (Py_ssize_t)s.device_budget_bytes, "host_bytes", "current", (Py_ssize_t)s.host_bytes,
        "peak", (Py_ssize_t)s.host_peak_bytes);
}

METHOD(python_calls) {
    if (!PyArg_ParseTuple(args, ":python_calls")) return NULL;
    return PyLong_FromUnsignedLongLong(binding_transport_python_calls());
}

METHOD(engine_reset_peaks) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_reset_peaks", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_engine_reset_peaks(engine);
    Py_RETURN_NONE;
}

fcdp_status binding_topology(PyObject *node_of, unsigned int rank, fcdp_topology *topology_out) {
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(node_of, &data, &length) < 0) return FCDP_ERR_INVALID;
    return fcdp__topology_make((const uint32_t *)(const void *)data, (uint32_t)(length / 4), rank,
                               topology_out);
}

METHOD(topology) {
    PyObject *node_of;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "SI:topology", &node_of, &rank)) return NULL;
    fcdp_topology t;
    fcdp_status status = binding_topology(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    return Py_BuildValue("{s:I,s:I,s:I,s:I}", "nodes", t.n_nodes, "ranks_per_node", t.node_size, "node",
                         t.node, "local_rank", t.local);
}

/* A comm's owner: what it stands on, and its transport, which goes after it. */
static void transport_free(PyObject *capsule) {
    binding_transport_destroy(PyCapsule_GetPointer(capsule, "fcdp.transport"));
}

METHOD(comm_create) {
    PyObject *handle, *node_of, *callable;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "OSIO:comm_create", &handle, &node_of, &rank, &callable)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_topology t;
    fcdp_status status = binding_topology(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    binding_transport *transport = binding_transport_create(callable, engine, &t);
    PyObject *of_transport = transport ? PyCapsule_New(transport, "fcdp.transport", transport_free) : NULL;
    PyObject *owner = of_transport ? Py_BuildValue("(ON)", handle, of_transport) : NULL;
    if (!owner) return NULL;
    fcdp_transport table = binding_transport_table(transport);
    fcdp_comm *comm;
    CALL(fcdp_comm_create(engine, &t, &table, &comm));
    PyObject *wrapped = status == FCDP_OK ? binding_wrap(BINDING_COMM, comm, owner) : binding_raise(status);
    Py_DECREF(owner);
    return wrapped;
}

METHOD(comm_check) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:comm_check", &handle)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    return comm ? none_or_raise(fcdp_comm_check(comm)) : NULL;
}

METHOD(tree_create) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:tree_create", &handle)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    fcdp_tree *tree;
    fcdp_status status = fcdp_tree_create(comm, &tree);
    return status == FCDP_OK ? binding_wrap(BINDING_TREE, tree, handle) : binding_raise(status);
}

#define TREE_EVENT(name, call)                                                                               \
    METHOD(name) {                                                                                           \
        PyObject *handle;                                                                                    \
        if (!PyArg_ParseTuple(args, "O:" #name, &handle)) return NULL;                                       \
        fcdp_tree *tree = binding_unwrap(BINDING_TREE, handle);                                              \
        if (!tree) return NULL;                                                                              \
        call(tree);                                                                                          \
        Py_RETURN_NONE;                                                                                      \
    }
TREE_EVENT(tree_begin_forward, fcdp_tree_begin_forward)
TREE_EVENT(tree_begin_backward, fcdp_tree_begin_backward)
TREE_EVENT(tree_agreed, fcdp_tree_agreed)

METHOD(comm_host_create) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:comm_host_create", &handle)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    fcdp_shared_ticket ticket = {0};
    fcdp_status status;
    CALL(fcdp_comm_host_create(comm, &ticket));
    return ticket_or_raise(status, &ticket);
}

METHOD(comm_host_join) {
    PyObject *handle, *bytes;
    fcdp_shared_ticket ticket;
    if (!PyArg_ParseTuple(args, "OO:comm_host_join", &handle, &bytes)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm || !ticket_from(bytes, &ticket)) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_host_join(comm, &ticket));
    return none_or_raise(status);
}

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

METHOD(group_host_alloc) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_host_alloc", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
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
    return none_or_raise(status);
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
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_id", &handle)) return NULL;
    return PyLong_FromVoidPtr(group_of(handle));
}

/* ([group], a byte for each: does it stay gathered between forward and backward?)
 * -> is there room to begin one ahead? */
METHOD(groups_fit) {
    PyObject *list, *bytes;
    if (!PyArg_ParseTuple(args, "OO:groups_fit", &list, &bytes)) return NULL;
    Py_ssize_t n = PyList_Size(list);
    const void *stays = n < 0 ? NULL : bytes_of(bytes, (size_t)n, "stays");
    fcdp_group **groups = stays ? calloc((size_t)n + 1, sizeof *groups) : NULL;
    if (!groups) return stays ? PyErr_NoMemory() : NULL;
    bool read = true;
    for (Py_ssize_t i = 0; i < n && read; i++) {
        groups[i] = group_of(PyList_GetItem(list, i));
        read = groups[i] != NULL;
    }
    bool ahead;
    fcdp_status status = read ? fcdp_groups_fit(groups, stays, (uint32_t)n, &ahead) : FCDP_OK;
    free(groups);
    if (!read) return NULL;
    return status ? binding_raise(status) : PyBool_FromLong(ahead);
}

METHOD(group_is_small) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_is_small", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    return group ? PyBool_FromLong(fcdp_group_is_small(group)) : NULL;
}

/* ([group], inputs: uint64 per extent, one group after another, stream) */
METHOD(groups_coalesce) {
    PyObject *list, *inputs;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OSK:groups_coalesce", &list, &inputs, &stream)) return NULL;
    Py_ssize_t n = PyList_Size(list);
    fcdp_group **groups = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *groups);
    if (!groups) return n < 0 ? NULL : PyErr_NoMemory();
    size_t n_extents = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        groups[i] = group_of(PyList_GetItem(list, i));
        if (!groups[i]) break;
        n_extents += fcdp_group_n_extents(groups[i]);
    }
    const uint64_t *addresses = PyErr_Occurred() ? NULL
                                                 : bytes_of(inputs, n_extents * sizeof *addresses, "inputs");
    fcdp_status status = FCDP_OK;
    if (addresses) CALL(fcdp_groups_coalesce(groups, addresses, (uint32_t)n, (fcdp_stream)(uintptr_t)stream));
    free(groups);
    return addresses ? none_or_raise(status) : NULL;
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
    return read ? none_or_raise(status) : NULL;
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

/* (group, by_hand) -> ASK_NOBODY, ASK_GROUP or ASK_TREE */
METHOD(group_question) {
    PyObject *handle;
    int by_hand;
    if (!PyArg_ParseTuple(args, "Op:group_question", &handle, &by_hand)) return NULL;
    fcdp_group *group = group_of(handle);
    return group ? PyLong_FromLong(fcdp_group_question(group, by_hand)) : NULL;
}

METHOD(group_ask_again) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_ask_again", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_group_ask_again(group);
    Py_RETURN_NONE;
}

/* (signals: n x 8 uint64, shards: n uint64 (0: cannot be read), shard_bytes: n
 * uint64), borrowed from the arguments. */
static bool evidence_from(const fcdp_group *group, PyObject *signals, PyObject *shards, PyObject *sizes,
                          fcdp_evidence *evidence_out) {
    size_t n = fcdp_group_n_extents(group);
    evidence_out->fingerprints = NULL;
    evidence_out->signals = bytes_of(signals, n * sizeof(fcdp_signals), "signals");
    evidence_out->shards = evidence_out->signals ? bytes_of(shards, n * sizeof(uint64_t), "shards") : NULL;
    evidence_out->shard_bytes = evidence_out->shards ? bytes_of(sizes, n * sizeof(uint64_t), "shard_bytes")
                                                     : NULL;
    return evidence_out->shard_bytes != NULL;
}

/* (comm, addresses: n uint64, sizes: n uint64, stream) -> n uint64: fingerprints that the device takes of
 * arrays in its memory; None: it cannot. The host waits for what is on the stream. */
METHOD(comm_fingerprints) {
    PyObject *handle, *addresses, *sizes;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OSSK:comm_fingerprints", &handle, &addresses, &sizes, &stream)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    Py_ssize_t bytes = PyBytes_Size(addresses);
    const uint64_t *at = bytes_of(addresses, (size_t)bytes, "addresses"),
                   *n_bytes = at ? bytes_of(sizes, (size_t)bytes, "sizes") : NULL;
    PyObject *fingerprints = n_bytes ? PyBytes_FromStringAndSize(NULL, bytes) : NULL;
    if (!fingerprints) return NULL;
    uint64_t *out = (uint64_t *)(void *)PyBytes_AsString(fingerprints);
    fcdp_status status;
    CALL(fcdp_comm_fingerprint_begin(comm, at, n_bytes, (size_t)bytes / sizeof *at,
                                     (fcdp_stream)(uintptr_t)stream));
    if (status == FCDP_OK) CALL(fcdp_comm_fingerprint_end(comm, out));
    if (status == FCDP_OK) return fingerprints;
    Py_DECREF(fingerprints);
    if (status == FCDP_ERR_UNSUPPORTED) Py_RETURN_NONE;
    return binding_raise(status);
}

/* (group, signals, shards, shard_bytes, fingerprints: n uint64 or b"", grad_mode,
 * optimizer_seen, reductions) -> n + 1 bytes */
METHOD(group_vote) {
    PyObject *handle, *signals, *shards, *sizes, *fingerprints;
    int grad_mode, optimizer_seen;
    unsigned long long reductions;
    fcdp_evidence evidence;
    if (!PyArg_ParseTuple(args, "OSSSSppK:group_vote", &handle, &signals, &shards, &sizes, &fingerprints,
                          &grad_mode, &optimizer_seen, &reductions))
        return NULL;
    fcdp_group *group = group_of(handle);
    if (!group || !evidence_from(group, signals, shards, sizes, &evidence)) return NULL;
    if (PyBytes_Size(fingerprints) > 0) {
        evidence.fingerprints = bytes_of(fingerprints, fcdp_group_n_extents(group) * sizeof(uint64_t),
                                         "fingerprints");
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

/* (group, n + 1 bytes) */
METHOD(group_agree) {
    PyObject *handle, *agreed;
    if (!PyArg_ParseTuple(args, "OS:group_agree", &handle, &agreed)) return NULL;
    fcdp_group *group = group_of(handle);
    const uint8_t *bytes = group ? bytes_of(agreed, (size_t)fcdp_group_n_extents(group) + 1, "agreed") : NULL;
    if (!bytes) return NULL;
    fcdp_group_agree(group, bytes);
    Py_RETURN_NONE;
}

/* (group, signals, shards, shard_bytes) -> index of the first parameter that has
 * changed since the ranks agreed, -1: none */
METHOD(group_audit) {
    PyObject *handle, *signals, *shards, *sizes;
    fcdp_evidence evidence;
    if (!PyArg_ParseTuple(args, "OSSS:group_audit", &handle, &signals, &shards, &sizes)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group || !evidence_from(group, signals, shards, sizes, &evidence)) return NULL;
    uint32_t changed;
    Py_BEGIN_ALLOW_THREADS changed = fcdp_group_audit(group, &evidence);
    Py_END_ALLOW_THREADS return PyLong_FromLong(changed < fcdp_group_n_extents(group) ? (long)changed : -1);
}

/* (group, signals): what is agreed stale is read next */
METHOD(group_confirm) {
    PyObject *handle, *signals;
    if (!PyArg_ParseTuple(args, "OS:group_confirm", &handle, &signals)) return NULL;
    fcdp_group *group = group_of(handle);
    const fcdp_signals *now = group ? bytes_of(signals, fcdp_group_n_extents(group) * sizeof *now, "signals")
                                    : NULL;
    if (!now) return NULL;
    fcdp_group_confirm(group, now);
    Py_RETURN_NONE;
}

/* group -> n flags */
METHOD(group_stale) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_stale", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
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
    return group ? none_or_raise(fcdp_group_check_capture(group, (fcdp_stream)(uintptr_t)stream)) : NULL;
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
        addresses = bytes_of(inputs, fcdp_group_n_extents(group) * sizeof(uint64_t), "inputs");
        if (!addresses) return NULL;
    }
    fcdp_status status;
    CALL(fcdp_group_begin(group, addresses, (fcdp_pass)pass, (fcdp_stream)(uintptr_t)stream));
    return none_or_raise(status);
}

METHOD(group_has_begun) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_has_begun", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
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
    return none_or_raise(status);
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
    return none_or_raise(status);
}

METHOD(group_stats) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_stats", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_group_stats s;
    Py_BEGIN_ALLOW_THREADS fcdp_group_stats_get(group, &s);
    Py_END_ALLOW_THREADS return Py_BuildValue(
        "{s:s,s:n,s:K,s:K,s:K,s:K,s:s}", "name", s.name, "bytes", (Py_ssize_t)s.bytes, "gathers_made",
        s.gathers.made, "gathers_avoided", s.gathers.avoided, "gathers_forward", s.gathers.forward,
        "gathers_backward", s.gathers.backward, "state", s.state);
}

#define ENTRY(name) {#name, name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    ENTRY(options_load),
    ENTRY(options_table),
    ENTRY(engine_create),
    ENTRY(engine_destroy),
    ENTRY(engine_account_create),
    ENTRY(engine_account_join),
    ENTRY(engine_drain),
    ENTRY(engine_check),
    ENTRY(engine_order_writes),
    ENTRY(engine_begin_pass),
    ENTRY(engine_stats),
    ENTRY(python_calls),
    ENTRY(engine_reset_peaks),
    ENTRY(topology),
    ENTRY(comm_create),
    ENTRY(comm_host_create),
    ENTRY(comm_host_join),
    ENTRY(comm_check),
    ENTRY(tree_create),
    ENTRY(tree_begin_forward),
    ENTRY(tree_begin_backward),
    ENTRY(tree_agreed),
    ENTRY(group_create),
    ENTRY(group_host_alloc),
    ENTRY(group_attach),
    ENTRY(group_extent),
    ENTRY(group_watch),
    ENTRY(groups_fit),
    ENTRY(group_is_small),
    ENTRY(groups_coalesce),
    ENTRY(group_id),
    ENTRY(group_join),
    ENTRY(group_question),
    ENTRY(group_ask_again),
    ENTRY(group_vote),
    ENTRY(group_agree),
    ENTRY(group_audit),
    ENTRY(group_confirm),
    ENTRY(comm_fingerprints),
    ENTRY(group_stale),
    ENTRY(group_check_capture),
    ENTRY(group_begin),
    ENTRY(group_has_begun),
    ENTRY(group_unsharded),
    ENTRY(group_wait),
    ENTRY(group_reshard),
    ENTRY(group_stats),
    {"dlpack", binding_dlpack, METH_VARARGS, NULL},
    {"nccl_load", binding_nccl_load, METH_VARARGS, NULL},
    {"nccl_ids", binding_nccl_ids, METH_VARARGS, NULL},
    {"nccl_comm_create", binding_nccl_comm_create, METH_VARARGS, NULL},
    {"tensors_enable", binding_tensors_enable, METH_VARARGS, NULL},
    {"tensors_stats", binding_tensors_stats, METH_VARARGS, NULL},
    {"tensors_reset_peaks", binding_tensors_reset_peaks, METH_VARARGS, NULL},
    {"tensors_blocks", binding_tensors_blocks, METH_VARARGS, NULL},
    {"history_record", binding_history_record, METH_VARARGS, NULL},
    {"history_entries", binding_history_entries, METH_VARARGS, NULL},
    {"neighbour_begin", binding_neighbour_begin, METH_VARARGS, NULL},
    {"neighbour_yield", binding_neighbour_yield, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_fcdp", "FCDP's core, marshalled.", -1, methods, NULL, NULL, NULL, NULL};

/* Constants are those of the core's enums, so that Python repeats none of their values. */
PyMODINIT_FUNC PyInit__fcdp(void) {
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    binding_error_class = PyErr_NewExceptionWithDoc(
        "fcdp.Error", "A failure of FCDP's core; args = (text, status).", PyExc_RuntimeError, NULL);
    if (!binding_error_class || PyModule_AddObjectRef(m, "Error", binding_error_class) < 0) return NULL;
    static const struct {
        const char *name;
        long value;
    } constants[] = {
        {"DRIVER_AUTO", FCDP_DRIVER_AUTO},
        {"DRIVER_CUDA", FCDP_DRIVER_CUDA},
        {"DRIVER_SIM", FCDP_DRIVER_SIM},
        {"PASS_FORWARD", FCDP_PASS_FORWARD},
        {"PASS_BACKWARD", FCDP_PASS_BACKWARD},
        {"PASS_OTHER", FCDP_PASS_OTHER},
        {"LANE_INTER", FCDP_LANE_INTER},
        {"LANE_NODE", FCDP_LANE_NODE},
        {"ASK_NOBODY", FCDP_ASK_NOBODY},
        {"ASK_GROUP", FCDP_ASK_GROUP},
        {"ASK_TREE", FCDP_ASK_TREE},
        {"MAPPING_AUTO", FCDP_MAPPING_AUTO},
        {"MAPPING_SLOTS", FCDP_MAPPING_SLOTS},
        {"MAPPING_EXACT", FCDP_MAPPING_EXACT},
        {"RESTORE_SLICE", FCDP_RESTORE_SLICE},
        {"FINGERPRINT_AUTO", FCDP_FINGERPRINT_AUTO},
        {"FINGERPRINT_NEVER", FCDP_FINGERPRINT_NEVER},
        {"FINGERPRINT_DEVICE", FCDP_FINGERPRINT_DEVICE},
        {"ALLOC_NATIVE", FCDP_ALLOC_NATIVE},
        {"TRANSPORT_AUTO", FCDP_TRANSPORT_AUTO},
        {"TRANSPORT_NCCL", FCDP_TRANSPORT_NCCL},
        {"TENSORS_MAX_DEVICES", TENSORS_MAX_DEVICES},
        {"ERR_OPTION", FCDP_ERR_OPTION},
        {"ERR_UNSUPPORTED", FCDP_ERR_UNSUPPORTED},
        {"ERR_NO_HOST_MEM", FCDP_ERR_NO_HOST_MEM},
        {"ERR_NO_DEVICE_MEM", FCDP_ERR_NO_DEVICE_MEM},
        {"ERR_TIMEOUT", FCDP_ERR_TIMEOUT},
        {"ERR_PEER", FCDP_ERR_PEER},
        {"ERR_TRANSPORT", FCDP_ERR_TRANSPORT},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value) < 0) return NULL;
    return m;
}
