/* nccl.c - loads NCCL and makes shard groups whose collectives are NCCL's.
 *
 * Python carries the ids of the communicators to the other ranks. After that it has no part in such a shard
 * group's collectives: the core enqueues them on its streams.
 */
#include "torch_plugin/nccl.h"

#include <string.h>

#include "comm/nccl.h"
#include "torch_plugin/handles.h"

static const char CAPSULE[] = "fcdp.nccl";

static void library_free(PyObject *capsule) {
    fcdp__nccl_unload(PyCapsule_GetPointer(capsule, CAPSULE));
}

/* (named or None, beside torch or None) -> the library, for as long as a shard group uses it */
PyObject *binding_nccl_load(PyObject *self __attribute__((unused)), PyObject *args) {
    const char *named, *beside_torch;
    if (!PyArg_ParseTuple(args, "zz:nccl_load", &named, &beside_torch)) return NULL;
    fcdp_nccl *nccl;
    fcdp_status status;
    Py_BEGIN_ALLOW_THREADS status = fcdp__nccl_load(named, beside_torch, &nccl);
    Py_END_ALLOW_THREADS if (status) return binding_raise(status);
    PyObject *capsule = PyCapsule_New(nccl, CAPSULE, library_free);
    if (!capsule) fcdp__nccl_unload(nccl);
    return capsule;
}

/* (nccl, node_of, rank) -> bytes: the ids of the lanes that this rank leads */
PyObject *binding_nccl_ids(PyObject *self __attribute__((unused)), PyObject *args) {
    PyObject *library, *node_of;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "OSI:nccl_ids", &library, &node_of, &rank)) return NULL;
    const fcdp_nccl *nccl = PyCapsule_GetPointer(library, CAPSULE);
    if (!nccl) return NULL;
    fcdp_topology topology;
    fcdp_nccl_ids ids;
    fcdp_status status = binding_topology(node_of, rank, &topology);
    if (status) return binding_raise(status);
    Py_BEGIN_ALLOW_THREADS status = fcdp__nccl_ids_make(nccl, &topology, &ids);
    Py_END_ALLOW_THREADS return status ? binding_raise(status)
                                       : PyBytes_FromStringAndSize((const char *)&ids, sizeof ids);
}

static fcdp_status comm_make(fcdp_engine *engine, const fcdp_nccl_config *config, fcdp_comm **comm_out) {
    fcdp_nccl_transport *transport;
    fcdp_status status = fcdp__nccl_create(config, &transport);
    if (status) return status;
    fcdp_transport table = fcdp__nccl_table(transport);
    status = fcdp_comm_create(engine, &config->topology, &table, comm_out);
    if (!status) return FCDP_OK;
    fcdp_failure error = fcdp__failure_keep(status);
    table.abort(table.ctx, error.text); /* else the end would wait for peers, who know nothing of it */
    fcdp__nccl_destroy(transport);
    return fcdp__failure_restore(&error);
}

/* (engine, node_of, rank, nccl, ids of all ranks) -> comm; a collective of the shard
 * group, of at most 3/4 of FCDP_TIMEOUT */
PyObject *binding_nccl_comm_create(PyObject *self __attribute__((unused)), PyObject *args) {
    PyObject *handle, *node_of, *library;
    unsigned int rank;
    const char *ids;
    Py_ssize_t ids_bytes;
    if (!PyArg_ParseTuple(args, "OSIOy#:nccl_comm_create", &handle, &node_of, &rank, &library, &ids,
                          &ids_bytes))
        return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    const fcdp_nccl *nccl = engine ? PyCapsule_GetPointer(library, CAPSULE) : NULL;
    if (!nccl) return NULL;
    fcdp_nccl_config config = {.nccl = nccl,
                               .drv = fcdp_engine_driver(engine),
                               .ids = (const fcdp_nccl_ids *)(const void *)ids,
                               .timeout_s = binding_options()->timeout_s};
    fcdp_status status = binding_topology(node_of, rank, &config.topology);
    if (status) return binding_raise(status);
    if ((size_t)ids_bytes != config.topology.n_ranks * sizeof(fcdp_nccl_ids)) {
        PyErr_Format(PyExc_ValueError, "ids: expected those of %u ranks, got %zd bytes",
                     config.topology.n_ranks, ids_bytes);
        return NULL;
    }
    fcdp_comm *comm;
    PyObject *owner = Py_BuildValue("(OO)", handle, library);
    if (!owner) return NULL;
    Py_BEGIN_ALLOW_THREADS status = comm_make(engine, &config, &comm);
    Py_END_ALLOW_THREADS PyObject *wrapped = status ? binding_raise(status)
                                                    : binding_wrap(BINDING_COMM, comm, owner);
    Py_DECREF(owner);
    return wrapped;
}
