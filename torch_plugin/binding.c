/* binding.c - carries failures between Python and the core, and reads what several functions take.
 *
 * A failure of the core becomes fcdp.Error with its text and status. An exception of a collective that Python
 * runs becomes a failure of the core, whose text is the exception's: the core knows no Python.
 */
#include "torch_plugin/binding.h"

PyObject *binding_raise(fcdp_status status) {
    PyObject *args = Py_BuildValue("(si)", fcdp_error_text(), (int)status);
    if (args) {
        PyErr_SetObject(binding_error_class, args);
        Py_DECREF(args);
    }
    return NULL;
}

fcdp_status binding_exception_take(fcdp_status status) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *chars = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    status = fcdp__fail(status, "%s", chars ? chars : "the collective raised an exception");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return status;
}

fcdp_status binding_topology(PyObject *node_of, unsigned int rank, fcdp_topology *topology_out) {
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(node_of, &data, &length) < 0) return FCDP_ERR_INVALID;
    return fcdp__topology_make((const uint32_t *)(const void *)data, (uint32_t)(length / 4), rank,
                               topology_out);
}
