/* methods.h - what the files with the module's types and functions have in common. Such a function parses its
 * arguments, calls the core without the GIL, raises its errors; it decides nothing. */
#ifndef FCDP_METHODS_H
#define FCDP_METHODS_H

#include "torch_plugin/handles.h"

/* Call the core without the GIL; `status` must be declared. */
#define CALL(expr)                                                                                           \
    do {                                                                                                     \
        Py_BEGIN_ALLOW_THREADS status = (expr);                                                              \
        Py_END_ALLOW_THREADS                                                                                 \
    } while (0)
/* A function of the module, with arguments and without; a method of a type, likewise, and with just one. */
#define FUNCTION(name) static PyObject *name(PyObject *self __attribute__((unused)), PyObject *args)
#define FUNCTION_NOARGS(name)                                                                                \
    static PyObject *name(PyObject *self __attribute__((unused)), PyObject *args __attribute__((unused)))
#define METHOD(name) static PyObject *name(PyObject *self, PyObject *args)
#define METHOD_NOARGS(name) static PyObject *name(PyObject *self, PyObject *args __attribute__((unused)))
#define METHOD_O(name) static PyObject *name(PyObject *self, PyObject *argument)
/* A docstring. `signature` as Python shows it: name($self, argument, /), or $module. */
#define DOC(signature, text) PyDoc_STR(signature "\n--\n\n" text)

/* Each ends with a row of NULLs. */
extern PyMethodDef methods_engine[], methods_comm[], methods_group[], methods_codec[], methods_trace[];
/* The types, into the module. False: an exception is set. */
bool methods_engine_type(PyObject *module);
bool methods_comm_types(PyObject *module);
bool methods_group_type(PyObject *module);
/* Methods of one type that make an object of another. */
PyObject *methods_create_shard_group(PyObject *engine, PyObject *args);
PyObject *methods_create_group(PyObject *shard_group, PyObject *args);

/* The process's ring, if the options want one; cheap where it is there. */
void binding_trace_open(void);
/* `object` as bytes of exactly `bytes` bytes, borrowed; NULL with an error set. */
const void *methods_bytes(PyObject *object, size_t bytes, const char *what);
/* The groups of a list, in its order, for the caller to free(); NULL with an error set. */
fcdp_group **methods_groups(PyObject *list, uint32_t *n_out);
/* A stream, as PyTorch numbers it. False: an exception is set. */
bool methods_stream(PyObject *number, fcdp_stream *stream_out);
PyObject *methods_none_or_raise(fcdp_status status);
/* The ticket of a creation as bytes; a join by such bytes. */
PyObject *methods_ticket_or_raise(fcdp_status status, const fcdp_shared_ticket *ticket);
bool methods_ticket(PyObject *bytes, fcdp_shared_ticket *ticket_out);

#endif
