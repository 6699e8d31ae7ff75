/* _fcdp.c - the extension module. */
#include "comm/whole.h"
#include "torch_plugin/allocator_calls.h"
#include "torch_plugin/dlpack.h"
#include "torch_plugin/evidence.h"
#include "torch_plugin/history.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/nccl.h"
#include "torch_plugin/neighbour.h"
#include "torch_plugin/tensors.h"

PyObject *binding_error_class;

static PyMethodDef methods[] = {
    {"dlpack", binding_dlpack, METH_VARARGS, NULL},
    {"dtype_codes", binding_evidence_dtypes, METH_VARARGS, NULL},
    {"evidence_places", binding_evidence_places, METH_VARARGS, NULL},
    {"evidence_signals", binding_evidence_signals, METH_VARARGS, NULL},
    {"evidence_written", binding_evidence_was_written, METH_O, NULL},
    {"nccl_load", binding_nccl_load, METH_VARARGS, NULL},
    {"nccl_ids", binding_nccl_ids, METH_VARARGS, NULL},
    {"nccl_comm_create", binding_nccl_comm_create, METH_VARARGS, NULL},
    {"tensors_enable", binding_tensors_enable, METH_VARARGS, NULL},
    {"allocator_calls_find", binding_allocator_calls_find, METH_NOARGS, NULL},
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
    if (!m || !binding_evidence_init() || PyModule_AddFunctions(m, methods_engine) < 0 ||
        PyModule_AddFunctions(m, methods_comm) < 0 || PyModule_AddFunctions(m, methods_group) < 0 ||
        PyModule_AddFunctions(m, methods_trace) < 0)
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
        {"MAPPING_AUTO", FCDP_MAPPING_AUTO},
        {"MAPPING_EXACT", FCDP_MAPPING_EXACT},
        {"RESTORE_SLICE", FCDP_RESTORE_SLICE},
        {"FINGERPRINT_AUTO", FCDP_FINGERPRINT_AUTO},
        {"FINGERPRINT_NEVER", FCDP_FINGERPRINT_NEVER},
        {"FINGERPRINT_DEVICE", FCDP_FINGERPRINT_DEVICE},
        {"ALLOC_NATIVE", FCDP_ALLOC_NATIVE},
        {"TRANSPORT_AUTO", FCDP_TRANSPORT_AUTO},
        {"TRANSPORT_NCCL", FCDP_TRANSPORT_NCCL},
        {"TENSORS_MAX_DEVICES", TENSORS_MAX_DEVICES},
        {"ERR_NO_DEVICE_MEM", FCDP_ERR_NO_DEVICE_MEM},
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
