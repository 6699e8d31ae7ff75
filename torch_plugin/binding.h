/* binding.h - what the extension's files share: handles, errors. The extension marshals; it decides nothing. */
#ifndef FCDP_BINDING_H
#define FCDP_BINDING_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm/engine.h"

/* Set _fcdp.Error(text, status) from the calling thread's failure text; NULL, so that callers can return it. */
PyObject *binding_raise(fcdp_status status);

/* A capsule around a core object. An engine's end ends all that belong to it: handles made before it are dead afterwards,
 * and their destructors do nothing (generation mismatch). */
typedef enum binding_kind { BINDING_ENGINE, BINDING_COMM, BINDING_GROUP, BINDING_JOB } binding_kind;
PyObject *binding_wrap(binding_kind kind, void *object, PyObject *owner);
/* The core object, or NULL with a Python error set (wrong kind or dead). */
void *binding_unwrap(binding_kind kind, PyObject *handle);
/* Every living handle is dead from here on. */
void binding_end_generation(void);
/* The job has been waited for (and so freed): its handle is empty now. */
void binding_consume(PyObject *handle);

/* A transport whose start calls `callable(lane, address, bytes)`, and whose wait what that returned; borrows the reference. */
fcdp_transport binding_transport(PyObject *callable, bool fails_quietly);

/* As last loaded. GIL held. */
const fcdp_options *binding_options(void);

/* DLPack: a one-dimensional tensor over `bytes` at `address`; `owner` lives as long as the tensor. */
PyObject *binding_dlpack(PyObject *self, PyObject *args);

#endif
