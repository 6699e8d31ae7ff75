/* binding.h - what the extension's files share: handles, errors. The
 * extension marshals; it decides nothing. */
#ifndef FCDP_BINDING_H
#define FCDP_BINDING_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm/group.h"

/* Set _fcdp.Error(text, status) from the calling thread's failure text;
 * NULL, so that callers can return it. */
PyObject *binding_raise(fcdp_status status);

/* A capsule around a core object. An engine's end ends all that belong to it: handles made before it are dead
 * afterwards, and their destructors do nothing (generation mismatch). */
typedef enum binding_kind { BINDING_ENGINE, BINDING_COMM, BINDING_TREE, BINDING_GROUP } binding_kind;
PyObject *binding_wrap(binding_kind kind, void *object, PyObject *owner);
/* The core object, or NULL with a Python error set (wrong kind or dead). */
void *binding_unwrap(binding_kind kind, PyObject *handle);
/* Every living handle is dead from here on: its engine has ended. */
void binding_end_generation(void);
uint64_t binding_generation(void);
/* While the calling thread runs a stream's host function, which must not call the driver: what dies
 * meanwhile is ended by the next caller. */
void binding_host_function_begin(void);
void binding_host_function_end(void);

/* A transport whose collectives are Python's: `python.begin(lane, address, bytes)` all-gathers in place over
 * `members * bytes` of host memory at `address` behind what has begun on the lane before, and returns at
 * once; `python.finish(lane, begun)` returns when that is done. Called on threads of the engine's streams,
 * without a lock of the core's. Borrows the reference. NULL with an error set. */
typedef struct binding_transport binding_transport;
binding_transport *binding_transport_create(PyObject *python, fcdp_engine *engine,
                                            const fcdp_topology *topology);
/* Is there one? Then what the device does may wait for the GIL. */
bool binding_transport_uses_python(void);
fcdp_transport binding_transport_table(binding_transport *transport);
/* No operation of it is pending. Steals the reference. */
void binding_transport_destroy(binding_transport *transport);
/* How often such transports of this process have called Python so far. Any thread. */
uint64_t binding_transport_python_calls(void);

/* As last loaded. GIL held. */
const fcdp_options *binding_options(void);

/* `node_of`: bytes, a uint32 per rank. FCDP_ERR_INVALID may come with a Python error set. GIL held. */
fcdp_status binding_topology(PyObject *node_of, unsigned int rank,
                             fcdp_topology *topology_out) FCDP_MUST_CHECK;

/* nccl.c: nccl_load(path or None), nccl_ids(nccl, node_of, rank), nccl_comm_create(engine,
 * node_of, rank, nccl, ids of all ranks). */
PyObject *binding_nccl_load(PyObject *self, PyObject *args);
PyObject *binding_nccl_ids(PyObject *self, PyObject *args);
PyObject *binding_nccl_comm_create(PyObject *self, PyObject *args);

/* DLPack: a one-dimensional tensor over `bytes` at `address`; `owner` lives as long as the tensor. */
PyObject *binding_dlpack(PyObject *self, PyObject *args);

#endif
