/* binding.h - what the extension's files share: Python's limited API, the core's errors. */
#ifndef FCDP_BINDING_H
#define FCDP_BINDING_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm/group.h"

extern PyObject *binding_error_class; /* _fcdp.Error */

/* Set _fcdp.Error(text, status) from the calling thread's failure text;
 * NULL, so that callers can return it. */
PyObject *binding_raise(fcdp_status status);

/* The other way round: the Python error that is set becomes the calling thread's failure `status`; none is
 * set afterwards, so that objects may be released. */
fcdp_status binding_exception_take(fcdp_status status) FCDP_MUST_CHECK;

/* As last loaded. GIL held. */
const fcdp_options *binding_options(void);

/* `node_of`: bytes, a uint32 per rank. FCDP_ERR_INVALID may come with a Python error set. GIL held. */
fcdp_status binding_topology(PyObject *node_of, unsigned int rank,
                             fcdp_topology *topology_out) FCDP_MUST_CHECK;

#endif
