/* _trace.h - what the extension's files share: Python's limited API, and their tables of functions. */
#ifndef MEMTRACE_TRACE_H
#define MEMTRACE_TRACE_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "tools/memtrace/error.h"
#include "tools/memtrace/reader.h"

/* Raises fcdp_memtrace.Error(text); NULL, so that callers can return it. */
PyObject *trace_raise(const memtrace_error *error);

/* Appends `item`, whose reference it takes; false: `item` is NULL, or there is no memory. */
bool trace_append(PyObject *list, PyObject *item);
/* dict[key] = value, whose reference it takes. */
bool trace_set(PyObject *dict, const char *key, PyObject *value);
/* A text as the trace has it: bytes that are no UTF-8 are replaced. */
PyObject *trace_text(const char *text);

/* What a live process's header says of it now. */
int trace_number(const _Atomic int32_t *of_header);

/* The file of a handle that trace_file_open gave; NULL with an error set. */
memtrace_file *trace_file(PyObject *handle);

/* One table per _trace_*.c; _trace.c adds all to the module. */
extern PyMethodDef trace_methods_file[], trace_methods_record[], trace_methods_report[],
    trace_methods_check[], trace_methods_draw[], trace_methods_top[], trace_methods_groups[];

#endif
