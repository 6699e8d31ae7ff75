/* _fcdp.c - the extension module: parses arguments, calls the core without the GIL, raises its errors. No decision here. */
#include "torch_plugin/binding.h"

#include "torch_plugin/history.h"
#include "torch_plugin/tensors.h"

#include <stdlib.h>
#include <string.h>

extern char **environ;

PyObject *binding_error_class;

/* Call the core without the GIL; `status` must be declared. */
#define CALL(expr)                                                                                                     \
    do {                                                                                                               \
        Py_BEGIN_ALLOW_THREADS status = (expr);                                                                        \
        Py_END_ALLOW_THREADS                                                                                           \
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

const fcdp_options *binding_options(void) { return &options; }

METHOD(options_load) {
    if (!PyArg_ParseTuple(args, ":options_load")) return NULL;
    fcdp_options loaded;
    fcdp_status status = fcdp_options_load(environ, &loaded);
    if (status != FCDP_OK) return binding_raise(status);
    options = loaded;
    fcdp__check_level = loaded.check;
    fcdp_log_set_level(loaded.log);
    return Py_BuildValue("{s:i,s:i,s:d,s:i,s:i,s:i,s:i,s:d,s:i,s:i,s:i,s:i}", "enabled", loaded.enabled, "driver", (int)loaded.driver, "tau",
                         loaded.tau, "restore", (int)loaded.restore, "local_size", loaded.local_size, "fingerprint",
                         (int)loaded.fingerprint, "prefetch", loaded.prefetch, "timeout_s", loaded.timeout_s, "log", (int)loaded.log,
                         "summary", loaded.summary, "agree", (int)loaded.agree, "alloc", (int)loaded.alloc);
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
    int on_tensors_device;
    if (!PyArg_ParseTuple(args, "iisp:engine_create", &driver, &ordinal, &sim_library, &on_tensors_device)) return NULL;
    const fcdp_device *device = NULL;
    fcdp_status status = FCDP_OK;
    if (on_tensors_device) CALL(binding_tensors_device(ordinal, &device));
    if (status != FCDP_OK) return binding_raise(status);
    fcdp_engine_config config = {.options = options, .driver = (fcdp_driver_kind)driver, .ordinal = ordinal,
                                 .sim_library = sim_library, .device = device, .one_worker = driver == FCDP_DRIVER_CUDA};
    fcdp_engine *engine;
    CALL(fcdp_engine_create(&config, &engine));
    return status == FCDP_OK ? binding_wrap(BINDING_ENGINE, engine, NULL) : binding_raise(status);
}

METHOD(engine_destroy) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_destroy", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    Py_BEGIN_ALLOW_THREADS
    fcdp_engine_destroy(engine);
    Py_END_ALLOW_THREADS
    binding_end_generation();
    Py_RETURN_NONE;
}

/* What the two kinds of shared memory have in common: the ticket of a creation as bytes, a join by such bytes. */
static PyObject *ticket_or_raise(fcdp_status status, const fcdp_shared_ticket *ticket) {
    return status == FCDP_OK ? PyBytes_FromStringAndSize((const char *)ticket, sizeof *ticket) : binding_raise(status);
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

METHOD(engine_stats) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_stats", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_engine_stats s;
    Py_BEGIN_ALLOW_THREADS
    fcdp_engine_stats_get(engine, &s);
    Py_END_ALLOW_THREADS
    return Py_BuildValue(
        "{s:s,s:(KKK),s:(KKK),s:{s:K,s:K,s:K,s:K,s:K,s:K,s:K},s:{s:n,s:n,s:n},s:{s:n,s:n}}", "driver",
        fcdp_engine_is_sim(engine) ? "sim" : "cuda", "gather", s.gather.calls, s.gather.inter_bytes_sent, s.gather.intra_bytes_sent,
        "restore", s.restore.calls, s.restore.inter_bytes_sent, s.restore.intra_bytes_sent, "moves", "h2d_bytes", s.moves.h2d_bytes,
        "d2h_bytes", s.moves.d2h_bytes, "stores", s.moves.n_stores, "slice_loads", s.moves.n_slice_loads, "whole_loads",
        s.moves.n_whole_loads, "drops", s.moves.n_drops, "evictions", s.moves.n_evictions, "device_bytes", "current",
        (Py_ssize_t)s.device_bytes, "peak", (Py_ssize_t)s.device_peak_bytes, "budget", (Py_ssize_t)s.device_budget_bytes, "host_bytes",
        "current", (Py_ssize_t)s.host_bytes, "peak", (Py_ssize_t)s.host_peak_bytes);
}

METHOD(engine_reset_peaks) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_reset_peaks", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_engine_reset_peaks(engine);
    Py_RETURN_NONE;
}

static fcdp_status topology_from(PyObject *node_of, unsigned int rank, fcdp_topology *topology_out) {
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(node_of, &data, &length) < 0) return FCDP_ERR_INVALID;
    return fcdp__topology_make((const uint32_t *)(const void *)data, (uint32_t)(length / 4), rank, topology_out);
}

METHOD(topology) {
    PyObject *node_of;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "SI:topology", &node_of, &rank)) return NULL;
    fcdp_topology t;
    fcdp_status status = topology_from(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    return Py_BuildValue("{s:I,s:I,s:I,s:I}", "nodes", t.n_nodes, "ranks_per_node", t.node_size, "node", t.node, "local_rank", t.local);
}

METHOD(comm_create) {
    PyObject *handle, *node_of, *callable;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "OSIO:comm_create", &handle, &node_of, &rank, &callable)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_topology t;
    fcdp_status status = topology_from(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    fcdp_transport transport = binding_transport(callable, fcdp_engine_is_sim(engine)); /* there it is gloo */
    fcdp_comm *comm;
    CALL(fcdp_comm_create(engine, &t, &transport, &comm));
    if (status != FCDP_OK) return binding_raise(status);
    PyObject *owner = Py_BuildValue("(OO)", handle, callable);
    PyObject *wrapped = owner ? binding_wrap(BINDING_COMM, comm, owner) : NULL;
    Py_XDECREF(owner);
    return wrapped;
}

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

/* One (shard_bytes, span) pair per extent into malloc'd specs. */
static fcdp_extent_spec *specs_from(PyObject *list, uint32_t *n_out) {
    Py_ssize_t n = PyList_Size(list);
    if (n < 0) return NULL;
    fcdp_extent_spec *specs = calloc((size_t)n + 1, sizeof *specs);
    if (!specs) return (fcdp_extent_spec *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t shard_bytes;
        int span;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "ni", &shard_bytes, &span)) {
            free(specs);
            return NULL;
        }
        specs[i] = (fcdp_extent_spec){.shard_bytes = (size_t)shard_bytes, .span = (uint8_t)span};
    }
    *n_out = (uint32_t)n;
    return specs;
}

METHOD(group_create) {
    PyObject *handle, *list;
    const char *name;
    if (!PyArg_ParseTuple(args, "OsO:group_create", &handle, &name, &list)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    uint32_t n = 0;
    fcdp_extent_spec *specs = comm ? specs_from(list, &n) : NULL;
    if (!specs) return NULL;
    fcdp_group *group;
    fcdp_status status = fcdp_group_create(comm, name, specs, n, &group);
    free(specs);
    return status == FCDP_OK ? binding_wrap(BINDING_GROUP, group, handle) : binding_raise(status);
}

static fcdp_group *group_of(PyObject *handle) { return binding_unwrap(BINDING_GROUP, handle); }

METHOD(group_carve) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_carve", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    uint64_t offset;
    fcdp_status status;
    CALL(fcdp_group_carve(group, &offset));
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

METHOD(group_bytes) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_bytes", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    return group ? PyLong_FromSize_t(fcdp_group_bytes(group)) : NULL;
}

/* ([group], a byte for each: does it stay gathered between forward and backward?) */
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
    fcdp_status status = read ? fcdp_groups_fit(groups, stays, (uint32_t)n) : FCDP_OK;
    free(groups);
    return read ? none_or_raise(status) : NULL;
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

/* (group, signals: n x 8 uint64, grad_mode, optimizer_seen, reductions, shards: n uint64, shard_bytes: n uint64) -> n bytes */
METHOD(group_observe) {
    PyObject *handle, *signals_bytes, *shards_bytes, *sizes_bytes;
    int grad_mode, optimizer_seen;
    unsigned long long reductions;
    if (!PyArg_ParseTuple(args, "OSppKSS:group_observe", &handle, &signals_bytes, &grad_mode, &optimizer_seen, &reductions,
                          &shards_bytes, &sizes_bytes))
        return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    size_t n = (size_t)PyBytes_Size(shards_bytes) / sizeof(uint64_t);
    const fcdp_signals *signals = bytes_of(signals_bytes, n * sizeof(fcdp_signals), "signals");
    const void *shards = signals ? bytes_of(shards_bytes, n * sizeof(uint64_t), "shards") : NULL;
    const void *sizes = shards ? bytes_of(sizes_bytes, n * sizeof(uint64_t), "shard_bytes") : NULL;
    if (!sizes) return NULL;
    PyObject *stale = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n);
    if (!stale) return NULL;
    uint8_t *stale_out = (uint8_t *)PyBytes_AsString(stale);
    fcdp_scene scene = {.grad_mode = grad_mode, .optimizer_seen = optimizer_seen, .reductions = reductions};
    Py_BEGIN_ALLOW_THREADS
    fcdp_group_observe(group, signals, &scene, shards, sizes, stale_out);
    Py_END_ALLOW_THREADS
    return stale;
}

/* (group, signals, shards, shard_bytes) -> n bytes, nonzero where something changed since the last observation */
METHOD(group_moved) {
    PyObject *handle, *signals, *shards, *sizes;
    if (!PyArg_ParseTuple(args, "OSSS:group_moved", &handle, &signals, &shards, &sizes)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    Py_ssize_t n = PyBytes_Size(shards) / (Py_ssize_t)sizeof(uint64_t);
    PyObject *moved = PyBytes_FromStringAndSize(NULL, n);
    if (!moved) return NULL;
    uint8_t *moved_out = (uint8_t *)PyBytes_AsString(moved);
    const void *s = PyBytes_AsString(signals), *at = PyBytes_AsString(shards), *bytes = PyBytes_AsString(sizes);
    Py_BEGIN_ALLOW_THREADS
    fcdp_group_moved(group, s, at, bytes, moved_out);
    Py_END_ALLOW_THREADS
    return moved;
}

METHOD(group_spoil) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_spoil", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_group_spoil(group);
    Py_RETURN_NONE;
}

/* (group, stale: n bytes, inputs: n uint64 or empty, pass, stream) -> job */
METHOD(group_unshard) {
    PyObject *handle, *stale, *inputs;
    int pass;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OSSiK:group_unshard", &handle, &stale, &inputs, &pass, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    const uint64_t *addresses = NULL;
    if (PyBytes_Size(inputs) > 0) {
        addresses = bytes_of(inputs, (size_t)PyBytes_Size(stale) * sizeof(uint64_t), "inputs");
        if (!addresses) return NULL;
    }
    const uint8_t *flags = (const uint8_t *)PyBytes_AsString(stale);
    fcdp_job *job;
    fcdp_status status;
    CALL(fcdp_group_unshard(group, flags, addresses, (fcdp_pass)pass, (fcdp_stream)(uintptr_t)stream, &job));
    return status == FCDP_OK ? binding_wrap(BINDING_JOB, job, handle) : binding_raise(status);
}

/* (group, stale, inputs, stream) -> is it ahead now? */
METHOD(group_prefetch) {
    PyObject *handle, *stale, *inputs;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OSSK:group_prefetch", &handle, &stale, &inputs, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    const uint64_t *addresses = group ? bytes_of(inputs, (size_t)PyBytes_Size(stale) * sizeof(uint64_t), "inputs") : NULL;
    if (!addresses) return NULL;
    const uint8_t *flags = (const uint8_t *)PyBytes_AsString(stale);
    bool ahead;
    fcdp_status status;
    CALL(fcdp_group_prefetch(group, flags, addresses, (fcdp_stream)(uintptr_t)stream, &ahead));
    return status == FCDP_OK ? PyBool_FromLong(ahead) : binding_raise(status);
}

METHOD(group_unprefetch) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_unprefetch", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_unprefetch(group));
    return none_or_raise(status);
}

METHOD(group_reshard) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:group_reshard", &handle, &stream)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_status status;
    CALL(fcdp_group_reshard(group, (fcdp_stream)(uintptr_t)stream));
    return none_or_raise(status);
}

METHOD(group_stats) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:group_stats", &handle)) return NULL;
    fcdp_group *group = group_of(handle);
    if (!group) return NULL;
    fcdp_group_stats s;
    Py_BEGIN_ALLOW_THREADS
    fcdp_group_stats_get(group, &s);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("{s:s,s:n,s:K,s:K,s:K,s:K,s:s}", "name", s.name, "bytes", (Py_ssize_t)s.bytes, "gathers_made", s.gathers_made,
                         "gathers_avoided", s.gathers_avoided, "gathers_forward", s.gathers_forward, "gathers_backward",
                         s.gathers_backward, "state", s.state);
}

METHOD(job_wait) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:job_wait", &handle)) return NULL;
    fcdp_job *job = binding_unwrap(BINDING_JOB, handle);
    if (!job) return NULL;
    fcdp_status status;
    CALL(fcdp_job_wait(job));
    binding_consume(handle);
    return none_or_raise(status);
}

#define ENTRY(name) {#name, name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    ENTRY(options_load), ENTRY(options_table), ENTRY(engine_create), ENTRY(engine_destroy), ENTRY(engine_account_create),
    ENTRY(engine_account_join), ENTRY(engine_drain), ENTRY(engine_stats), ENTRY(engine_reset_peaks), ENTRY(topology), ENTRY(comm_create),
    ENTRY(comm_host_create), ENTRY(comm_host_join),
    ENTRY(group_create), ENTRY(group_carve), ENTRY(group_attach), ENTRY(group_extent), ENTRY(group_bytes), ENTRY(group_watch), ENTRY(groups_fit),
    ENTRY(group_observe),
    ENTRY(group_moved), ENTRY(group_spoil), ENTRY(group_unshard), ENTRY(group_prefetch), ENTRY(group_unprefetch), ENTRY(group_reshard),
    ENTRY(group_stats), ENTRY(job_wait), {"dlpack", binding_dlpack, METH_VARARGS, NULL},
    {"tensors_enable", binding_tensors_enable, METH_VARARGS, NULL}, {"tensors_stats", binding_tensors_stats, METH_VARARGS, NULL},
    {"tensors_reset_peaks", binding_tensors_reset_peaks, METH_VARARGS, NULL}, {"tensors_blocks", binding_tensors_blocks, METH_VARARGS, NULL},
    {"history_record", binding_history_record, METH_VARARGS, NULL}, {"history_entries", binding_history_entries, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fcdp", "FCDP's core, marshalled.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fcdp(void) {
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    binding_error_class = PyErr_NewExceptionWithDoc("fcdp.Error", "A failure of FCDP's core; args = (text, status).", PyExc_RuntimeError, NULL);
    if (!binding_error_class || PyModule_AddObjectRef(m, "Error", binding_error_class) < 0) return NULL;
    static const struct { const char *name; long value; } constants[] = {
        {"DRIVER_AUTO", FCDP_DRIVER_AUTO}, {"DRIVER_CUDA", FCDP_DRIVER_CUDA}, {"DRIVER_SIM", FCDP_DRIVER_SIM},
        {"PASS_FORWARD", FCDP_PASS_FORWARD}, {"PASS_BACKWARD", FCDP_PASS_BACKWARD}, {"PASS_OTHER", FCDP_PASS_OTHER},
        {"LANE_INTER", FCDP_LANE_INTER}, {"LANE_INTRA", FCDP_LANE_INTRA}, {"FINGERPRINT_NEVER", FCDP_FINGERPRINT_NEVER},
        {"ALLOC_NATIVE", FCDP_ALLOC_NATIVE}, {"TENSORS_MAX_DEVICES", TENSORS_MAX_DEVICES},
        {"ERR_OPTION", FCDP_ERR_OPTION}, {"ERR_UNSUPPORTED", FCDP_ERR_UNSUPPORTED}, {"ERR_NO_HOST_MEM", FCDP_ERR_NO_HOST_MEM},
        {"ERR_NO_DEVICE_MEM", FCDP_ERR_NO_DEVICE_MEM},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value) < 0) return NULL;
    return m;
}
