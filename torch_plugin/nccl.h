/* nccl.h - the module's functions of shard groups whose collectives are NCCL's. */
#ifndef FCDP_NCCL_METHODS_H
#define FCDP_NCCL_METHODS_H

#include "torch_plugin/binding.h"

/* nccl_load(named or None, beside torch or None), nccl_ids(nccl, node_of, rank), nccl_comm_create(engine,
 * node_of, rank, nccl, ids of all ranks). */
PyObject *binding_nccl_load(PyObject *self, PyObject *args);
PyObject *binding_nccl_ids(PyObject *self, PyObject *args);
PyObject *binding_nccl_comm_create(PyObject *self, PyObject *args);

#endif
