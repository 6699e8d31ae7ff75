/* handles.h - the module's objects around the core's: _fcdp.Engine, ShardGroup, Tree and Group.
 *
 * An engine's end ends all that belong to it: objects made before it are dead afterwards, and freeing them
 * does nothing (generation mismatch). In a forked child nothing is ended, as it owns nothing.
 *
 *     Group, Tree -> ShardGroup -> Engine        an object keeps what it stands on
 *
 * These references, and a shard group's to its transport or NCCL, are set once, when the object is made, and
 * the garbage collector sees all of them. A cycle through one is closed by some other object, which the
 * collector can clear, so the types have no tp_clear. A group refers to its owner weakly. */
#ifndef FCDP_HANDLES_H
#define FCDP_HANDLES_H

#include "torch_plugin/transport.h"

typedef enum binding_kind { BINDING_ENGINE, BINDING_COMM, BINDING_TREE, BINDING_GROUP } binding_kind;
/* The type of a kind, in the module under its name. `methods` and `getters` (may be NULL) are static; each
 * ends with a row of NULLs. Once; false: an exception is set. */
bool binding_type_add(PyObject *module, binding_kind kind, const char *doc, PyMethodDef *methods,
                      PyGetSetDef *getters);
/* A new object around the core's, which it ends when it is freed, an engine excepted. `owner`: what it stands
 * on; NULL: none. */
PyObject *binding_wrap(binding_kind kind, void *object, PyObject *owner);
/* What carries a new shard group's collectives, and goes after it: a transport, which it takes over, or an
 * _fcdp.Nccl. The other is NULL. */
void binding_set_carrier(PyObject *shard_group, binding_transport *transport, PyObject *nccl);
/* The core object of a method's own `self`; NULL with an exception set: it has ended. */
void *binding_core(PyObject *self);
/* The core object of an argument; NULL with an exception set: it is of another type, or has ended. */
void *binding_unwrap(binding_kind kind, PyObject *object);
/* A group's own Python object, to which it keeps a weak reference, for as long as it lives (the core has it
 * as the group's owner). False: an exception is set. */
bool binding_set_owner(PyObject *group, PyObject *owner);
/* Every living object is dead from here on: its engine has ended. */
void binding_end_generation(void);
uint64_t binding_generation(void);
/* While the calling thread runs a stream's host function, which must not call the driver: what dies
 * meanwhile is ended by the next caller. */
void binding_host_function_begin(void);
void binding_host_function_end(void);

#endif
