/* transport.c - a transport whose collectives are a Python callable (torch.distributed). */
#include "torch_plugin/binding.h"

/* The pending Python exception as the failure text of this thread. GIL held. */
static fcdp_status exception_status(void) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *chars = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    fcdp_status status = fcdp__fail(FCDP_ERR_TRANSPORT, "%s", chars ? chars : "the collective raised an exception");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return status;
}

/* `pending` is a callable, owned. */
static fcdp_status python_start(void *ctx, fcdp_lane lane, fcdp_dptr buffer, size_t bytes, void **pending_out) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *finish = PyObject_CallFunction(ctx, "iKn", (int)lane, (unsigned long long)buffer.addr, (Py_ssize_t)bytes);
    fcdp_status status = finish ? FCDP_OK : exception_status();
    PyGILState_Release(gil);
    if (finish) *pending_out = finish;
    return status;
}

static fcdp_status python_wait(void *ctx, void *pending) {
    (void)ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallObject(pending, NULL);
    fcdp_status status = result ? FCDP_OK : exception_status();
    Py_XDECREF(result);
    Py_DECREF((PyObject *)pending);
    PyGILState_Release(gil);
    return status;
}

fcdp_transport binding_transport(PyObject *callable, bool fails_quietly) {
    return (fcdp_transport){.ctx = callable, .start = python_start, .wait = python_wait, .fails_quietly = fails_quietly};
}
