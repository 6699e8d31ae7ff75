/* nccl.h - _fcdp.Nccl, and shard groups whose collectives are NCCL's. */
#ifndef FCDP_NCCL_METHODS_H
#define FCDP_NCCL_METHODS_H

#include "torch_plugin/binding.h"

bool binding_nccl_type(PyObject *module);
/* The module's load_nccl, and a method of an engine. */
PyObject *binding_nccl_load(PyObject *self, PyObject *args);
PyObject *binding_create_nccl_shard_group(PyObject *engine, PyObject *args);

#endif
