/* dlpack.c - makes a capsule from which torch.from_dlpack takes a tensor over memory of the core.
 *
 * The tensor shares the bytes, and keeps the owner that the caller names alive until its last view is gone.
 * The structs are DLPack's ABI (dlpack.h, v0.8), declared here because nothing else of it is needed.
 */
#include "torch_plugin/dlpack.h"

#include <stdlib.h>

typedef struct {
    int32_t device_type, device_id;
} dl_device;
typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} dl_dtype;
typedef struct {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;
typedef struct dl_managed {
    dl_tensor tensor;
    void *manager_ctx;
    void (*deleter)(struct dl_managed *);
} dl_managed;

typedef struct view {
    dl_managed managed;
    int64_t shape, stride;
    PyObject *owner;
} view;

/* Runs once, after the last view of the tensor is gone; any thread, possibly without the GIL. */
static void view_delete(dl_managed *managed) {
    view *v = managed->manager_ctx;
    if (Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_XDECREF(v->owner);
        PyGILState_Release(gil);
    }
    free(v);
}

static void capsule_delete(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* consumed: renamed to used_dltensor */
    dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

PyObject *binding_dlpack_over(uint64_t address, long long numel, int code, int bits, int device_type,
                              int device_id, PyObject *owner) {
    view *v = calloc(1, sizeof *v);
    if (!v) return PyErr_NoMemory();
    v->shape = numel;
    v->stride = 1;
    v->owner = Py_NewRef(owner);
    v->managed = (dl_managed){.tensor = {.data = (void *)(uintptr_t)address,
                                         .device = {device_type, device_id},
                                         .ndim = 1,
                                         .dtype = {(uint8_t)code, (uint8_t)bits, 1},
                                         .shape = &v->shape,
                                         .strides = &v->stride},
                              .manager_ctx = v,
                              .deleter = view_delete};
    PyObject *capsule = PyCapsule_New(&v->managed, "dltensor", capsule_delete);
    if (!capsule) view_delete(&v->managed);
    return capsule;
}

PyObject *binding_dlpack(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    long long numel;
    int code, bits, device_type, device_id;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "KLiiiiO:dlpack", &address, &numel, &code, &bits, &device_type, &device_id,
                          &owner))
        return NULL;
    return binding_dlpack_over(address, numel, code, bits, device_type, device_id, owner);
}
