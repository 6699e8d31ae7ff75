/* tensors.h - fcdp_alloc in C: one device per ordinal for this process's tensors. PyTorch's pluggable
 * allocator calls its functions (torch/csrc/cuda/CUDAPluggableAllocator.h; their addresses are handed to its
 * set_*_fn). */
#ifndef FCDP_TENSORS_H
#define FCDP_TENSORS_H

#include "torch_plugin/binding.h"

#include "alloc/heap.h"
#include "comm/engine.h"

enum { TENSORS_MAX_DEVICES = 64 };

/* The device that tensors on `ordinal` come from, opened now if need be and for the life of the process.
 * FCDP_ERR_INVALID: they are not FCDP's. Any thread. */
fcdp_status binding_tensors_device(int ordinal, const fcdp_device **device_out) FCDP_MUST_CHECK;

/* The engine whose gathered parameters lie on these devices' pages; NULL: none from here on. */
void binding_tensors_set_engine(fcdp_engine *engine);

/* Methods of the extension module. */
PyObject *binding_tensors_enable(PyObject *self, PyObject *args);
PyObject *binding_tensors_stats(PyObject *self, PyObject *args);
PyObject *binding_tensors_reset_peaks(PyObject *self, PyObject *args);
PyObject *binding_tensors_tag(PyObject *self, PyObject *args);
PyObject *binding_tensors_check_capture(PyObject *self, PyObject *args);
PyObject *binding_tensors_sleep(PyObject *self, PyObject *args);
PyObject *binding_tensors_wake(PyObject *self, PyObject *args);
PyObject *binding_tensors_blocks(PyObject *self, PyObject *args);

#endif
