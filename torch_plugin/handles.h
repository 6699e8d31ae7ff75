/* handles.h - capsules around the core's objects. */
#ifndef FCDP_HANDLES_H
#define FCDP_HANDLES_H

#include "torch_plugin/binding.h"

/* A capsule around a core object. An engine's end ends all that belong to it: handles made before it are dead
 * afterwards, and their destructors do nothing (generation mismatch). */
typedef enum binding_kind { BINDING_ENGINE, BINDING_COMM, BINDING_TREE, BINDING_GROUP } binding_kind;
PyObject *binding_wrap(binding_kind kind, void *object, PyObject *owner);
/* The core object, or NULL with a Python error set (wrong kind or dead). */
void *binding_unwrap(binding_kind kind, PyObject *handle);
/* The object's own Python object, of which the handle keeps a weak reference, for as long as it lives (the
 * core has it as the group's owner). False: an exception is set. */
bool binding_set_owner(PyObject *handle, PyObject *owner);
/* Every living handle is dead from here on: its engine has ended. */
void binding_end_generation(void);
uint64_t binding_generation(void);
/* While the calling thread runs a stream's host function, which must not call the driver: what dies
 * meanwhile is ended by the next caller. */
void binding_host_function_begin(void);
void binding_host_function_end(void);

#endif
