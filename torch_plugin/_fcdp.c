/* _fcdp.c - the extension module. */
#include "comm/int8.h"
#include "comm/whole.h"
#include "torch_plugin/allocator_calls.h"
#include "torch_plugin/dlpack.h"
#include "torch_plugin/evidence.h"
#include "torch_plugin/exchange.h"
#include "torch_plugin/history.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/nccl.h"
#include "torch_plugin/neighbour.h"
#include "torch_plugin/tensors.h"

PyObject *binding_error_class;

/* Those of files that have more to do than to make functions for Python. */
static PyMethodDef methods_others[] = {
    {"dlpack", binding_dlpack, METH_VARARGS,
     DOC("dlpack($module, address, numel, code, bits, device_type, device_id, owner, /)",
         "A DLPack capsule of memory for torch.from_dlpack: one dimension of `numel` elements at\n"
         "`address`.\n\n"
         "code, bits: DLPack's of the dtype. device_type, device_id: DLPack's. The tensor keeps\n"
         "`owner`, on which the memory depends; None: the caller sees to it.")},
    {"dtype_codes", binding_evidence_dtypes, METH_VARARGS,
     DOC("dtype_codes($module, shard, gathered, /)",
         "A number for the two dtypes, for a parameter's signals; the same for the same dtypes in this\n"
         "process.")},
    {"evidence_places", binding_evidence_places, METH_VARARGS,
     DOC("evidence_places($module, group, extents, /)",
         "Where the shards of FSDP2's parameters lie: (addresses, sizes), each a uint64 per extent, as\n"
         "bytes.\n\n"
         "group: the fcdp.group.Group, which says which shards are read; extents: a list of its own.\n"
         "An address is 0 for a shard that is not read, and so is the size, unless its bytes are not\n"
         "there. Raises what an attribute of a parameter raises.")},
    {"evidence_signals", binding_evidence_signals, METH_VARARGS,
     DOC("evidence_signals($module, group, extents, /)",
         "What FSDP2's parameters say of their state: the 8 uint64 of comm/validity.h's fcdp_signals\n"
         "per extent, as bytes.\n\n"
         "group, extents: as in evidence_places. Raises what an attribute of a parameter raises.")},
    {"evidence_written", binding_evidence_was_written, METH_O,
     DOC("evidence_written($module, extents, /)",
         "Was any of these gathered parameters written to since this was asked last? Raises what an\n"
         "attribute of a parameter raises.")},
    {"load_nccl", binding_nccl_load, METH_VARARGS,
     DOC("load_nccl($module, named, beside_torch, /)",
         "Load NCCL; the only way to make an Nccl.\n\n"
         "named: a path that the user asks for; None: beside_torch, the library that torch brought\n"
         "along, or else the system's. Raises Error where it cannot be loaded or used.")},
    {"listen", binding_exchange_listen, METH_VARARGS,
     DOC("listen($module, gloo, nccl, master, /)",
         "Listen for the other members of the lane between the nodes; the only way to make an Exchange.\n\n"
         "gloo, nccl, master: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and MASTER_ADDR, by which the\n"
         "address is chosen; None: not set. Raises Error where there is none.")},
    {"tensors_enable", binding_tensors_enable, METH_VARARGS,
     DOC("tensors_enable($module, driver, sim_library, /)",
         "Let fcdp_alloc serve tensors on every device, each from its first one on; options_load()\n"
         "comes before.\n\n"
         "driver: DRIVER_CUDA or DRIVER_SIM. sim_library: path of the simulated driver, or None.\n"
         "Returns a dict: hook of PyTorch's pluggable allocator -> address of its function. Raises\n"
         "Error where this torch cannot be served.")},
    {"allocator_calls_find", binding_allocator_calls_find, METH_NOARGS,
     DOC("allocator_calls_find($module, /)",
         "Find what PyTorch's pluggable allocator refuses and its own does not, for fcdp_alloc to pass\n"
         "on. Returns None, or why it cannot be found.")},
    {"tensors_stats", binding_tensors_stats, METH_VARARGS,
     DOC("tensors_stats($module, ordinal, /)",
         "A dict of fcdp_alloc's counts and bytes on a device, with one of each pool; None before its\n"
         "first tensor there.")},
    {"tensors_reset_peaks", binding_tensors_reset_peaks, METH_VARARGS,
     DOC("tensors_reset_peaks($module, ordinal, /)",
         "Set the peaks in tensors_stats() to the current values.")},
    {"tensors_tag", binding_tensors_tag, METH_VARARGS,
     DOC("tensors_tag($module, tag, /)",
         "Set the tag of tensors that this thread allocates from here on. Returns the one before; 0 is\n"
         "that of a thread that has set none.")},
    {"tensors_check_capture", binding_tensors_check_capture, METH_NOARGS,
     DOC("tensors_check_capture($module, /)",
         "Raises Error while a CUDA graph is captured with fcdp_alloc's tensors.")},
    {"tensors_sleep", binding_tensors_sleep, METH_VARARGS,
     DOC("tensors_sleep($module, tag, /)",
         "Take the tensors of a tag (None: of all) off every device, until tensors_wake. Waits for the\n"
         "devices. Returns a dict: live_bytes, copied_bytes, freed_bytes. Raises Error.")},
    {"tensors_wake", binding_tensors_wake, METH_VARARGS,
     DOC("tensors_wake($module, tag, keep, /)",
         "Bring them back to their addresses. keep: host memory keeps their bytes for the next sleep.\n"
         "Returns a dict: live_bytes, copied_bytes. Raises Error; they sleep on then.")},
    {"tensors_blocks", binding_tensors_blocks, METH_VARARGS,
     DOC("tensors_blocks($module, ordinal, /)",
         "Every mapped block of fcdp_alloc's on a device, by address: a list of (stream, address,\n"
         "bytes, requested bytes, \"live\", \"held\" or \"free\", id of its pool, is it small?); None\n"
         "before its first tensor there.")},
    {"history_record", binding_history_record, METH_VARARGS,
     DOC("history_record($module, max_entries, clear, /)",
         "Record the last max_entries calls of fcdp_alloc from now on; 0 stops. clear: drop what was\n"
         "recorded.")},
    {"history_entries", binding_history_entries, METH_NOARGS,
     DOC("history_entries($module, /)",
         "What was recorded, the oldest first: a list of (action, address, bytes, stream, time in\n"
         "microseconds since the epoch, ordinal).")},
    {"neighbour_yield", binding_neighbour_yield, METH_VARARGS,
     DOC("neighbour_yield($module, n_bytes, /)",
         "PyTorch's own allocator lacks n_bytes of device memory: give back what gathered parameters\n"
         "do not need now. Returns the bytes given back; 0 without an engine that shares the device.")},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_fcdp",
    "FCDP's core for Python. Errors of the core are Error, with args (text, status: ERR_*).\n\n"
    "Streams are given by their address or id. What C has as an array is bytes, in\n"
    "the machine's byte order.",
    -1,
    methods_others,
    NULL,
    NULL,
    NULL,
    NULL};

/* Constants are those of the core's enums, so that Python repeats none of their values. */
PyMODINIT_FUNC PyInit__fcdp(void) {
    PyObject *m = PyModule_Create(&module);
    if (!m || !binding_evidence_init() || PyModule_AddFunctions(m, methods_engine) < 0 ||
        PyModule_AddFunctions(m, methods_comm) < 0 || PyModule_AddFunctions(m, methods_group) < 0 ||
        PyModule_AddFunctions(m, methods_codec) < 0 || PyModule_AddFunctions(m, methods_trace) < 0)
        return NULL;
    if (!methods_engine_type(m) || !methods_comm_types(m) || !methods_group_type(m) ||
        !binding_nccl_type(m) || !binding_exchange_type(m))
        return NULL;
    binding_error_class = PyErr_NewExceptionWithDoc(
        "fcdp.Error", "A failure of FCDP's core; args = (text, status).", PyExc_RuntimeError, NULL);
    if (!binding_error_class || PyModule_AddObjectRef(m, "Error", binding_error_class) < 0) return NULL;
    static const struct {
        const char *name;
        long value;
    } constants[] = {
        {"DRIVER_CUDA", FCDP_DRIVER_CUDA},
        {"DRIVER_SIM", FCDP_DRIVER_SIM},
        {"PASS_FORWARD", FCDP_PASS_FORWARD},
        {"PASS_BACKWARD", FCDP_PASS_BACKWARD},
        {"PASS_OTHER", FCDP_PASS_OTHER},
        {"LANE_INTER", FCDP_LANE_INTER},
        {"LANE_NODE", FCDP_LANE_NODE},
        {"LOOK_PLACES", FCDP_LOOK_PLACES},
        {"LOOK_SIGNALS", FCDP_LOOK_SIGNALS},
        {"LOOK_SCENE", FCDP_LOOK_SCENE},
        {"WHOLE_HOST", FCDP_WHOLE_HOST},
        {"WHOLE_FRESH", FCDP_WHOLE_FRESH},
        {"WHOLE_STALE", FCDP_WHOLE_STALE},
        {"WHOLE_PLAIN", FCDP_WHOLE_PLAIN},
        {"RESTORE_SLICE", FCDP_RESTORE_SLICE},
        {"HOST_COPIES_NUMA", FCDP_HOST_COPIES_NUMA},
        {"REDUCE_FLAT", FCDP_REDUCE_FLAT},
        {"REDUCE_DTYPE_SAME", FCDP_REDUCE_DTYPE_SAME},
        {"REDUCE_DTYPE_BF16", FCDP_REDUCE_DTYPE_BF16},
        {"REDUCE_DTYPE_INT8", FCDP_REDUCE_DTYPE_INT8},
        {"CODEC_DELTA", FCDP_CODEC_DELTA},
        {"CODEC_INT8", FCDP_CODEC_INT8},
        {"NUMBER_OTHER", FCDP_NUMBER_OTHER},
        {"NUMBER_BF16", FCDP_NUMBER_BF16},
        {"NUMBER_F16", FCDP_NUMBER_F16},
        {"NUMBER_F32", FCDP_NUMBER_F32},
        {"FINGERPRINT_AUTO", FCDP_FINGERPRINT_AUTO},
        {"FINGERPRINT_NEVER", FCDP_FINGERPRINT_NEVER},
        {"FINGERPRINT_DEVICE", FCDP_FINGERPRINT_DEVICE},
        {"ALLOC_NATIVE", FCDP_ALLOC_NATIVE},
        {"TRANSPORT_AUTO", FCDP_TRANSPORT_AUTO},
        {"TRANSPORT_NCCL", FCDP_TRANSPORT_NCCL},
        {"TENSORS_MAX_DEVICES", TENSORS_MAX_DEVICES},
        {"ERR_NO_DEVICE_MEM", FCDP_ERR_NO_DEVICE_MEM},
        {"ERR_NO_HOST_MEM", FCDP_ERR_NO_HOST_MEM},
        {"ERR_UNSUPPORTED", FCDP_ERR_UNSUPPORTED},
        {"ERR_OPTION", FCDP_ERR_OPTION},
        {"ERR_TIMEOUT", FCDP_ERR_TIMEOUT},
        {"ERR_INVALID", FCDP_ERR_INVALID},
        {"ERR_PEER", FCDP_ERR_PEER},
        {"ERR_TRANSPORT", FCDP_ERR_TRANSPORT},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value) < 0) return NULL;
    return m;
}
