/* methods.c - reads arguments that several of the module's functions take, and makes their results.
 *
 * A wrong argument raises what Python raises for it; the core never sees one.
 */
#include "torch_plugin/methods.h"

#include <stdlib.h>
#include <string.h>

const void *methods_bytes(PyObject *object, size_t bytes, const char *what) {
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &data, &length) < 0) return NULL;
    if ((size_t)length == bytes) return data;
    PyErr_Format(PyExc_ValueError, "%s: expected %zu bytes, got %zd", what, bytes, length);
    return NULL;
}

fcdp_group **methods_groups(PyObject *list, uint32_t *n_out) {
    Py_ssize_t n = PyList_Size(list);
    if (n < 0) return NULL;
    fcdp_group **groups = calloc((size_t)n + 1, sizeof *groups);
    if (!groups) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        groups[i] = binding_unwrap(BINDING_GROUP, PyList_GetItem(list, i));
        if (groups[i]) continue;
        free(groups);
        return NULL;
    }
    *n_out = (uint32_t)n;
    return groups;
}

bool methods_stream(PyObject *number, fcdp_stream *stream_out) {
    unsigned long long address = PyLong_AsUnsignedLongLongMask(number);
    if (address == (unsigned long long)-1 && PyErr_Occurred()) return false;
    *stream_out = (fcdp_stream)(uintptr_t)address;
    return true;
}

PyObject *methods_none_or_raise(fcdp_status status) {
    if (status < 0) return binding_raise(status);
    Py_RETURN_NONE;
}

PyObject *methods_ticket_or_raise(fcdp_status status, const fcdp_shared_ticket *ticket) {
    return status == FCDP_OK ? PyBytes_FromStringAndSize((const char *)ticket, sizeof *ticket)
                             : binding_raise(status);
}

bool methods_ticket(PyObject *bytes, fcdp_shared_ticket *ticket_out) {
    const void *data = methods_bytes(bytes, sizeof *ticket_out, "ticket");
    if (data) memcpy(ticket_out, data, sizeof *ticket_out);
    return data != NULL;
}
