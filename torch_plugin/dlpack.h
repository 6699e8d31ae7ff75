/* dlpack.h - memory of the core as a tensor. */
#ifndef FCDP_DLPACK_H
#define FCDP_DLPACK_H

#include "torch_plugin/binding.h"

/* DLPack: a one-dimensional tensor over `bytes` at `address`; `owner` lives as long as the tensor. */
PyObject *binding_dlpack(PyObject *self, PyObject *args);

#endif
