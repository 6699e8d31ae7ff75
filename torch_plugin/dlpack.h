/* dlpack.h - memory of the core as a tensor. */
#ifndef FCDP_DLPACK_H
#define FCDP_DLPACK_H

#include "torch_plugin/binding.h"

/* A capsule of DLPack's: a tensor of one dimension, numel elements of `bits` bits at `address`, which keeps
 * `owner`. NULL with an exception set. */
PyObject *binding_dlpack_over(uint64_t address, long long numel, int code, int bits, int device_type,
                              int device_id, PyObject *owner);
/* The module's function. */
PyObject *binding_dlpack(PyObject *self, PyObject *args);

#endif
