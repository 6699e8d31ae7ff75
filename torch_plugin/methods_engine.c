/* methods_engine.c - the options, and _fcdp.Engine. */
#include "base/size.h"
#include "tiering/account.h"
#include "tiering/cache.h"
#include "tiering/disk.h"
#include "tiering/host.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/nccl.h"
#include "torch_plugin/neighbour.h"
#include "torch_plugin/tensors.h"

extern char **environ;

static fcdp_options options; /* as last loaded; guarded by the GIL */

const fcdp_options *binding_options(void) {
    return &options;
}

FUNCTION_NOARGS(options_load) {
    fcdp_options loaded;
    fcdp_status status = fcdp_options_load(environ, &loaded);
    if (status != FCDP_OK) return binding_raise(status);
    options = loaded;
    fcdp__check_level = loaded.check;
    fcdp_log_set_level(loaded.log);
    return Py_BuildValue(
        "{s:i,s:i,s:d,s:i,s:i,s:i,s:i,s:d,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K,s:s,s:i,s:i,s:i,s:s,s:s}",
        "enabled", loaded.enabled, "driver", (int)loaded.driver, "tau", loaded.tau, "restore",
        (int)loaded.restore, "local_size", loaded.local_size, "fingerprint", (int)loaded.fingerprint,
        "prefetch", loaded.prefetch, "timeout_s", loaded.timeout_s, "log", (int)loaded.log, "summary",
        loaded.summary, "agree", (int)loaded.agree, "alloc", (int)loaded.alloc, "codec", (int)loaded.codec,
        "mapping", (int)loaded.mapping, "transport", (int)loaded.transport, "whole_tensors",
        loaded.whole_tensors, "coalesce_bytes", (unsigned long long)loaded.coalesce_bytes, "spill_dir",
        loaded.spill_dir, "reduce", (int)loaded.reduce, "reduce_dtype", (int)loaded.reduce_dtype,
        "host_copies", (int)loaded.host_copies, "plan", loaded.plan, "host_map", loaded.host_map);
}

FUNCTION_NOARGS(options_table) {
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

FUNCTION(size_parse) {
    const char *text;
    if (!PyArg_ParseTuple(args, "s:size_parse", &text)) return NULL;
    size_t bytes;
    if (!fcdp__size_parse(text, &bytes))
        return binding_raise(fcdp__fail(FCDP_ERR_OPTION, "%s: expected " FCDP_SIZE_EXPECTED, text));
    return PyLong_FromSize_t(bytes);
}

FUNCTION(size_text) {
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "K:size_text", &bytes)) return NULL;
    return PyUnicode_FromString(fcdp__size_text(bytes).s);
}

FUNCTION(host_budget) {
    const char *root;
    if (!PyArg_ParseTuple(args, "s:host_budget", &root)) return NULL;
    fcdp_host_budget budget;
    fcdp_status status = fcdp__host_budget_read(root, options.host_budget_bytes, &budget);
    if (!status && !root[0]) CALL(fcdp__host_try(options.host_budget_bytes));
    if (status != FCDP_OK) return binding_raise(status);
    return Py_BuildValue("(ns)", (Py_ssize_t)budget.bytes, budget.limit);
}

FUNCTION(spill_lacks) {
    const char *dir;
    char lacks[512];
    if (!PyArg_ParseTuple(args, "s:spill_lacks", &dir)) return NULL;
    fcdp_status status = fcdp__disk_probe(dir, lacks, sizeof lacks);
    return status == FCDP_OK ? PyUnicode_DecodeFSDefault(lacks) : binding_raise(status);
}

FUNCTION(cache_check) {
    const char *dir;
    if (!PyArg_ParseTuple(args, "s:cache_check", &dir)) return NULL;
    fcdp_cache *cache;
    fcdp_status status = fcdp__cache_open(dir, 0, &cache);
    if (status == FCDP_OK) fcdp__cache_close(cache);
    return methods_none_or_raise(status);
}

FUNCTION(create_engine) {
    int driver, ordinal;
    const char *sim_library;
    int on_tensors_device, storages_raise, host_computes;
    if (!PyArg_ParseTuple(args, "iisppp:create_engine", &driver, &ordinal, &sim_library, &on_tensors_device,
                          &storages_raise, &host_computes))
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
                                 .host_computes = host_computes,
                                 .storages_raise = storages_raise};
    fcdp_engine *engine;
    CALL(fcdp_engine_create(&config, &engine));
    if (status == FCDP_OK && on_tensors_device) binding_tensors_set_engine(engine);
    return status == FCDP_OK ? binding_wrap(BINDING_ENGINE, engine, NULL) : binding_raise(status);
}

METHOD_NOARGS(engine_destroy) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    Py_BEGIN_ALLOW_THREADS binding_neighbour_end();
    binding_tensors_set_engine(NULL);
    fcdp_engine_destroy(engine);
    Py_END_ALLOW_THREADS binding_end_generation();
    Py_RETURN_NONE;
}

METHOD_NOARGS(engine_create_account) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    fcdp_shared_ticket ticket = {0};
    fcdp_status status;
    CALL(fcdp_engine_account_create(engine, &ticket));
    return methods_ticket_or_raise(status, &ticket);
}

METHOD_O(engine_join_account) {
    fcdp_engine *engine = binding_core(self);
    fcdp_shared_ticket ticket;
    if (!engine || !methods_ticket(argument, &ticket)) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_account_join(engine, &ticket));
    return methods_none_or_raise(status);
}

METHOD_NOARGS(engine_drain) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_drain(engine));
    return methods_none_or_raise(status);
}

METHOD_O(engine_sleep) {
    fcdp_engine *engine = binding_core(self);
    fcdp_stream stream;
    if (!engine || !methods_stream(argument, &stream)) return NULL;
    bool was_asleep = fcdp_engine_is_asleep(engine);
    fcdp_status status;
    CALL(fcdp_engine_sleep(engine, stream));
    return status ? binding_raise(status) : PyBool_FromLong(!was_asleep);
}

METHOD_NOARGS(engine_wake) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    fcdp_engine_wake(engine);
    Py_RETURN_NONE;
}

METHOD_NOARGS(engine_is_asleep) {
    fcdp_engine *engine = binding_core(self);
    return engine ? PyBool_FromLong(fcdp_engine_is_asleep(engine)) : NULL;
}

METHOD_O(engine_order_writes) {
    fcdp_engine *engine = binding_core(self);
    fcdp_stream stream;
    if (!engine || !methods_stream(argument, &stream)) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_order_writes(engine, stream));
    return methods_none_or_raise(status);
}

METHOD_NOARGS(engine_begin_pass) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    Py_BEGIN_ALLOW_THREADS fcdp_engine_begin_pass(engine);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *counts_of(const fcdp_collective_counts *counts) {
    return Py_BuildValue("(KKK)", counts->calls, counts->inter_bytes_sent, counts->intra_bytes_sent);
}

METHOD_NOARGS(engine_stats) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    fcdp_engine_stats s;
    char cpus[512] = "";
    Py_BEGIN_ALLOW_THREADS fcdp_engine_stats_get(engine, &s);
    Py_END_ALLOW_THREADS if (s.numa.binds) fcdp__cpus_text(&s.numa.cpus, cpus, sizeof cpus);
    return Py_BuildValue(
        "{s:s,s:s,s:N,s:N,s:{s:K,s:K,s:K,s:K,s:K},s:{s:K,s:K},s:{s:K,s:d,s:K,s:d},"
        "s:{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K},"
        "s:{s:n,s:n,s:n},s:{s:n,s:n},s:{s:K,s:K,s:K,s:i,s:I,s:K,s:K,s:K,s:s,s:s},s:{s:K,s:K,s:K},"
        "s:{s:K,s:K,s:K,s:K,s:K,s:d},s:{s:K,s:K,s:K,s:d,s:d}}",
        "driver", fcdp_engine_is_sim(engine) ? "sim" : "cuda", "policy",
        s.policy == FCDP_POLICY_NEXT_USE ? "next-use" : "tau", "gather", counts_of(&s.gather), "restore",
        counts_of(&s.restore), "gathers", "made", s.gathers.made, "avoided", s.gathers.avoided, "forward",
        s.gathers.forward, "backward", s.gathers.backward, "late", s.n_late, "saved", "plain_bytes",
        s.plain_bytes, "gather_bytes", s.gather_bytes, "waits", "gathers", s.n_host_waits, "seconds",
        (double)s.host_wait_ns / 1e9, "pages", s.moves.n_waits, "page_seconds", (double)s.moves.wait_ns / 1e9,
        "moves", "h2d_bytes", s.moves.h2d_bytes, "d2h_bytes", s.moves.d2h_bytes, "stores", s.moves.n_stores,
        "slice_loads", s.moves.n_slice_loads, "whole_loads", s.moves.n_whole_loads, "evictions",
        s.moves.n_evictions, "maps", s.moves.n_maps, "memory_waits", s.moves.n_waits, "plans",
        s.moves.n_plans, "surprises", s.moves.n_surprises, "drops", s.n_drops, "device_bytes", "current",
        (Py_ssize_t)s.device_bytes, "peak", (Py_ssize_t)s.device_peak_bytes, "budget",
        (Py_ssize_t)s.device_budget_bytes, "host_bytes", "current", (Py_ssize_t)s.host_bytes, "peak",
        (Py_ssize_t)s.host_peak_bytes, "host", "pins", s.pins.n_made, "unpins", s.pins.n_undone,
        "pinned_bytes", s.pins.bytes, "numa_node", s.numa.node, "copies", s.host_copies, "near_bytes",
        s.host_near_bytes, "far_bytes", s.host_far_bytes, "mapped_bytes", s.moves.mapped_bytes, "cpus", cpus,
        "binding", s.numa.text, "cache", "read_bytes", s.cache.read_bytes, "written_bytes",
        s.cache.written_bytes, "failures", s.cache.n_failures, "spill", "bytes", s.spill.bytes,
        "written_bytes", s.spill.written_bytes, "read_bytes", s.spill.read_bytes, "failures",
        s.spill.n_failures, "waits", s.spill.n_waits, "wait_seconds", (double)s.spill.wait_ns / 1e9, "deltas",
        "gathers", s.n_delta_gathers, "whole", s.n_delta_whole, "by_device", s.n_delta_by_device, "lost",
        s.rounding.lost, "rounded", s.rounding.whole);
}

METHOD_NOARGS(engine_host_map_lacks) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    fcdp_status status;
    CALL(fcdp_engine_probe_host_map(engine));
    return PyUnicode_FromString(status ? fcdp_error_text() : "");
}

METHOD_NOARGS(engine_reset_peaks) {
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    fcdp_engine_reset_peaks(engine);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"host_map_lacks", engine_host_map_lacks, METH_NOARGS,
     DOC("host_map_lacks($self, /)",
         "Why no group can be mapped onto host memory here (FCDP_HOST_MAP), as one page says that is\n"
         "mapped and given back; \"\": groups can be.")},
    {"create_account", engine_create_account, METH_NOARGS,
     DOC("create_account($self, /)",
         "Create the budget of the node's host memory (FCDP_HOST_BUDGET), which all processes of the\n"
         "node share.\n\n"
         "One process of the node creates it, once, before its first shard group; the others join it.\n"
         "Returns the ticket for join_account, as bytes. Raises Error.")},
    {"join_account", engine_join_account, METH_O,
     DOC("join_account($self, ticket, /)",
         "Join the budget of the node's host memory that another process of the node has created.\n\n"
         "ticket: what its create_account returned. Once, before the first shard group. Raises Error.")},
    {"create_shard_group", methods_create_shard_group, METH_VARARGS,
     DOC("create_shard_group($self, node_of, rank, transport, /)",
         "Create the core's view of a process group whose collectives are Python's.\n\n"
         "node_of: bytes, a uint32 for each rank of the group: its node. rank: this one's place in the\n"
         "group. transport: an object with two methods, which threads of the engine's streams call.\n"
         "begin(lane, address, n_bytes) starts an all-gather in place over members * n_bytes bytes of\n"
         "host memory at `address`, among the members of a lane (LANE_*), and returns at once;\n"
         "finish(lane, begun) gets what begin returned, and returns when that all-gather is done. The\n"
         "shard group keeps a reference to it. Returns a ShardGroup, which keeps the engine. Raises\n"
         "Error.")},
    {"create_nccl_shard_group", binding_create_nccl_shard_group, METH_VARARGS,
     DOC("create_nccl_shard_group($self, node_of, rank, nccl, ids, beside, /)",
         "Create the core's view of a process group whose collectives are NCCL's. A collective of its\n"
         "ranks, of at most 3/4 of FCDP_TIMEOUT.\n\n"
         "node_of, rank: as in create_shard_group. nccl: an Nccl, which the shard group keeps. ids:\n"
         "what nccl.ids() returned on each rank, one after another in the ranks' order. beside: a\n"
         "connected Exchange of the members of LANE_INTER, which FCDP_CODEC uses and the shard group\n"
         "takes over; or why there is none, as text; or None. Returns a ShardGroup. Raises Error, and\n"
         "ValueError where `ids` is not of all ranks.")},
    {"share_device", binding_share_device, METH_O,
     DOC("share_device($self, empty_cache, /)",
         "Share the device with PyTorch's own caching allocator, until the engine ends: before one\n"
         "says that memory is out, the other gives back what it does not use.\n\n"
         "empty_cache: a callable without arguments (torch.cuda.empty_cache). Returns whether\n"
         "PyTorch's allocator can ask, too: not where libc10_cuda does not import cudaMalloc.")},
    {"begin_pass", engine_begin_pass, METH_NOARGS,
     DOC("begin_pass($self, /)",
         "A root module's forward begins: device pages that the passes before did not need go back.")},
    {"order_writes", engine_order_writes, METH_O,
     DOC("order_writes($self, stream, /)",
         "Put what `stream` does next behind every read of a shard, so that it may write into shards.\n\n"
         "stream: its address or id; 0: the default one. Where the model computes on the host, the\n"
         "host waits. Raises Error with the first failure of any shard group that is known by now.")},
    {"sleep", engine_sleep, METH_O,
     DOC("sleep($self, stream, /)",
         "Give every device page of gathered parameters to the driver, until wake(): no group may be\n"
         "unsharded before. stream: the current one's address or id. False: it was asleep already.\n"
         "Raises Error where a group is in use, or the stream captures a CUDA graph.")},
    {"wake", engine_wake, METH_NOARGS,
     DOC("wake($self, /)", "End a sleep. Does nothing where the engine is awake.")},
    {"is_asleep", engine_is_asleep, METH_NOARGS,
     DOC("is_asleep($self, /)", "Between a sleep() and the wake() that ends it?")},
    {"drain", engine_drain, METH_NOARGS,
     DOC("drain($self, /)",
         "Wait until the device has done all that was enqueued. Raises Error with the first failure of\n"
         "any shard group.")},
    {"stats", engine_stats, METH_NOARGS,
     DOC("stats($self, /)",
         "What the engine has done so far: a dict of dicts.\n\n"
         "driver: \"sim\" or \"cuda\". gather, restore: (calls, bytes sent between nodes, bytes sent\n"
         "within the node) of this rank. gathers, saved, waits, moves, device_bytes, host_bytes, host:\n"
         "as fcdp.stats() has them.")},
    {"reset_peaks", engine_reset_peaks, METH_NOARGS,
     DOC("reset_peaks($self, /)", "Set the peaks in stats() to the current values.")},
    {"destroy", engine_destroy, METH_NOARGS,
     DOC("destroy($self, /)",
         "End the engine, behind all that the device has to do. Shard groups, trees and groups of it\n"
         "end too: their methods raise RuntimeError from here on. Without this call the engine lives\n"
         "as long as the process, also when no reference to it is left.")},
    {NULL, NULL, 0, NULL},
};

bool methods_engine_type(PyObject *module) {
    static const char doc[] =
        "What all shard groups of a process share on one device: its driver, its streams and its\n"
        "pages.\n\n"
        "Made by create_engine() alone.";
    return binding_type_add(module, BINDING_ENGINE, doc, methods, NULL);
}

PyMethodDef methods_engine[] = {
    {"options_load", options_load, METH_NOARGS,
     DOC("options_load($module, /)",
         "Read the FCDP_* variables of the process's environment, which the core uses from here on.\n\n"
         "Returns a dict of those that Python needs; a choice is one of the module's constants. Raises\n"
         "Error (ERR_OPTION) for an unknown or malformed variable, and changes nothing then.")},
    {"options_table", options_table, METH_NOARGS,
     DOC("options_table($module, /)",
         "All options: a list of (name, values, default, help, audience); audience is 0 for users, 1\n"
         "for experts, 2 for development. None for a default: another component reads the variable.")},
    {"size_parse", size_parse, METH_VARARGS,
     DOC("size_parse($module, text, /)",
         "The bytes of a size as options have it (\"2 GiB\"). Raises Error.")},
    {"size_text", size_text, METH_VARARGS,
     DOC("size_text($module, n_bytes, /)", "A size as all messages write it.")},
    {"host_budget", host_budget, METH_VARARGS,
     DOC("host_budget($module, root, /)",
         "The host memory that a node's ranks may take together: (bytes, what sets that limit).\n\n"
         "root: \"\", or what is put before /proc and /sys. With \"\", raises Error where a job here\n"
         "would not get as much as FCDP_HOST_BUDGET asks for.")},
    {"spill_lacks", spill_lacks, METH_VARARGS,
     DOC("spill_lacks($module, directory, /)",
         "What makes reads and writes slower there, as for FCDP_SPILL_DIR; \"\": nothing. The directory\n"
         "is made. Raises Error where it cannot be used.")},
    {"cache_check", cache_check, METH_VARARGS,
     DOC("cache_check($module, directory, /)",
         "Can it be FCDP_CACHE_DIR? It is made. Raises Error, which says why it cannot.")},
    {"create_engine", create_engine, METH_VARARGS,
     DOC("create_engine($module, driver, ordinal, sim_library, on_tensors_device, storages_raise, "
         "host_computes, /)",
         "Create an engine with the options as last loaded; the only way to make an Engine.\n\n"
         "driver: DRIVER_CUDA or DRIVER_SIM. ordinal: the device's index. sim_library: path of the\n"
         "simulated driver. on_tensors_device: gathered parameters share the pages of fcdp_alloc's\n"
         "tensors. storages_raise: torch's storages can be made to raise while they are released;\n"
         "without that, FCDP_MAPPING=auto is exact. host_computes: the model's tensors are the host's, and\n"
         "Group.wait waits on the host. Raises Error.")},
    {NULL, NULL, 0, NULL},
};
