/* methods_engine.c - the module's functions of the engine. */
#include "base/size.h"
#include "tiering/account.h"
#include "tiering/host.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/neighbour.h"
#include "torch_plugin/tensors.h"
#include "torch_plugin/transport.h"

extern char **environ;

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
        "{s:i,s:i,s:d,s:i,s:i,s:i,s:i,s:d,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K}", "enabled", loaded.enabled,
        "driver", (int)loaded.driver, "tau", loaded.tau, "restore", (int)loaded.restore, "local_size",
        loaded.local_size, "fingerprint", (int)loaded.fingerprint, "prefetch", loaded.prefetch, "timeout_s",
        loaded.timeout_s, "log", (int)loaded.log, "summary", loaded.summary, "agree", (int)loaded.agree,
        "alloc", (int)loaded.alloc, "mapping", (int)loaded.mapping, "transport", (int)loaded.transport,
        "whole_tensors", loaded.whole_tensors, "coalesce_bytes", (unsigned long long)loaded.coalesce_bytes);
}

METHOD(options_table) {
    if (!PyArg_ParseTuple(args, ":options_table")) return NULL;
    size_t n;
    const fcdp_option_row *rows = fcdp_options_table(&n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *row = Py_BuildValue("(zzzzi)", rows[i].name, rows[i].values, rows[i].fallback, rows[i].help,
                                      (int)rows[i].audience);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* (text) -> bytes; raises Error for what is no size. */
METHOD(size_parse) {
    const char *text;
    if (!PyArg_ParseTuple(args, "s:size_parse", &text)) return NULL;
    size_t bytes;
    if (!fcdp__size_parse(text, &bytes))
        return binding_raise(fcdp__fail(FCDP_ERR_OPTION, "%s: expected " FCDP_SIZE_EXPECTED, text));
    return PyLong_FromSize_t(bytes);
}

/* (bytes) -> as all messages have it */
METHOD(size_text) {
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "K:size_text", &bytes)) return NULL;
    return PyUnicode_FromString(fcdp__size_text(bytes).s);
}

/* (root) -> (bytes that a node's ranks may take together, who sets that). Raises Error where a job here would
 * not get them; with a `root`, which is put before /proc and /sys, that is not tried. */
METHOD(host_budget) {
    const char *root;
    if (!PyArg_ParseTuple(args, "s:host_budget", &root)) return NULL;
    fcdp_host_budget budget;
    fcdp_status status = fcdp__host_budget_read(root, options.host_budget_bytes, &budget);
    if (!status && !root[0]) CALL(fcdp__host_try(options.host_budget_bytes));
    if (status != FCDP_OK) return binding_raise(status);
    return Py_BuildValue("(ns)", (Py_ssize_t)budget.bytes, budget.limit);
}

METHOD(engine_create) {
    int driver, ordinal;
    const char *sim_library;
    int on_tensors_device, mapping, host_computes;
    if (!PyArg_ParseTuple(args, "iispip:engine_create", &driver, &ordinal, &sim_library, &on_tensors_device,
                          &mapping, &host_computes))
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
                                 .host_computes = host_computes};
    config.options.mapping = (fcdp_mapping_mode)mapping;
    fcdp_engine *engine;
    CALL(fcdp_engine_create(&config, &engine));
    if (status == FCDP_OK && on_tensors_device) binding_tensors_set_engine(engine);
    return status == FCDP_OK ? binding_wrap(BINDING_ENGINE, engine, NULL) : binding_raise(status);
}

METHOD(engine_destroy) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_destroy", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    Py_BEGIN_ALLOW_THREADS binding_neighbour_end();
    binding_tensors_set_engine(NULL);
    fcdp_engine_destroy(engine);
    Py_END_ALLOW_THREADS binding_end_generation();
    Py_RETURN_NONE;
}

METHOD(engine_account_create) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_account_create", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_shared_ticket ticket = {0};
    fcdp_status status;
    CALL(fcdp_engine_account_create(engine, &ticket));
    return methods_ticket_or_raise(status, &ticket);
}

METHOD(engine_account_join) {
    PyObject *handle, *bytes;
    fcdp_shared_ticket ticket;
    if (!PyArg_ParseTuple(args, "OO:engine_account_join", &handle, &bytes)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine || !methods_ticket(bytes, &ticket)) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_account_join(engine, &ticket));
    return methods_none_or_raise(status);
}

METHOD(engine_drain) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_drain", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_drain(engine));
    return methods_none_or_raise(status);
}

METHOD(engine_check) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:engine_check", &handle)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_check(engine));
    return methods_none_or_raise(status);
}

METHOD(engine_order_writes) {
    PyObject *handle;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OK:engine_order_writes", &handle, &stream)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_order_writes(engine, (fcdp_stream)(uintptr_t)stream));
    return methods_none_or_raise(status);
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
        "{s:s,s:N,s:N,s:{s:K,s:K,s:K,s:K},s:{s:K,s:K},s:{s:K,s:d,s:K,s:d},s:{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}"
        ",s:{s:n,"
        "s:n,s:n},s:{s:n,s:n}}",
        "driver", fcdp_engine_is_sim(engine) ? "sim" : "cuda", "gather", counts_of(&s.gather), "restore",
        counts_of(&s.restore), "gathers", "made", s.gathers.made, "avoided", s.gathers.avoided, "forward",
        s.gathers.forward, "backward", s.gathers.backward, "saved", "plain_bytes", s.plain_bytes,
        "gather_bytes", s.gather_bytes, "waits", "gathers", s.n_host_waits, "seconds",
        (double)s.host_wait_ns / 1e9, "pages", s.moves.n_waits, "page_seconds", (double)s.moves.wait_ns / 1e9,
        "moves", "h2d_bytes", s.moves.h2d_bytes, "d2h_bytes", s.moves.d2h_bytes, "stores", s.moves.n_stores,
        "slice_loads", s.moves.n_slice_loads, "whole_loads", s.moves.n_whole_loads, "evictions",
        s.moves.n_evictions, "maps", s.moves.n_maps, "memory_waits", s.moves.n_waits, "device_bytes",
        "current", (Py_ssize_t)s.device_bytes, "peak", (Py_ssize_t)s.device_peak_bytes, "budget",
        (Py_ssize_t)s.device_budget_bytes, "host_bytes", "current", (Py_ssize_t)s.host_bytes, "peak",
        (Py_ssize_t)s.host_peak_bytes);
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

PyMethodDef methods_engine[] = {
    ENTRY(options_load),          ENTRY(options_table),       ENTRY(engine_create), ENTRY(engine_destroy),
    ENTRY(engine_account_create), ENTRY(engine_account_join), ENTRY(engine_drain),  ENTRY(engine_check),
    ENTRY(engine_order_writes),   ENTRY(engine_begin_pass),   ENTRY(engine_stats),  ENTRY(python_calls),
    ENTRY(engine_reset_peaks),    ENTRY(host_budget),         ENTRY(size_parse),    ENTRY(size_text),
    {NULL, NULL, 0, NULL},
};
