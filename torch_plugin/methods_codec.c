/* methods_codec.c - the module's functions of differences between two versions of an array. */
#include <stdlib.h>

#include "comm/codec.h"
#include "comm/fingerprint.h"
#include "torch_plugin/methods.h"

static const void *array_at(unsigned long long address) {
    return (const void *)(uintptr_t)address;
}

FUNCTION(delta_encode) {
    unsigned long long base, now;
    Py_ssize_t bytes;
    unsigned int element_bytes;
    if (!PyArg_ParseTuple(args, "KKnI:delta_encode", &base, &now, &bytes, &element_bytes)) return NULL;
    if (bytes < 2) return PyBytes_FromStringAndSize(NULL, 0);
    char *wire = malloc((size_t)bytes);
    if (!wire) return PyErr_NoMemory();
    size_t wire_bytes;
    Py_BEGIN_ALLOW_THREADS wire_bytes = fcdp__delta_encode(array_at(base), array_at(now), (size_t)bytes,
                                                           element_bytes, wire, (size_t)bytes - 1);
    Py_END_ALLOW_THREADS PyObject *result = PyBytes_FromStringAndSize(wire, (Py_ssize_t)wire_bytes);
    free(wire);
    return result;
}

FUNCTION(delta_decode) {
    unsigned long long address;
    Py_ssize_t bytes, wire_bytes;
    unsigned int element_bytes;
    const char *wire;
    if (!PyArg_ParseTuple(args, "KnIy#:delta_decode", &address, &bytes, &element_bytes, &wire, &wire_bytes))
        return NULL;
    void *array = (void *)(uintptr_t)address;
    fcdp_status status;
    CALL(fcdp__delta_decode(array, array, (size_t)bytes, element_bytes, wire, (size_t)wire_bytes));
    return methods_none_or_raise(status);
}

FUNCTION(fingerprint) {
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Kn:fingerprint", &address, &bytes)) return NULL;
    uint64_t fingerprint;
    Py_BEGIN_ALLOW_THREADS fingerprint = fcdp__fingerprint_by_host(array_at(address), (size_t)bytes, 0);
    Py_END_ALLOW_THREADS return PyLong_FromUnsignedLongLong(fingerprint);
}

PyMethodDef methods_codec[] = {
    {"delta_encode", delta_encode, METH_VARARGS,
     DOC("delta_encode($module, base, now, n_bytes, element_bytes, /)",
         "What differs between two arrays of n_bytes bytes in host memory, given by their addresses, as\n"
         "bytes (comm/codec.h).\n\n"
         "element_bytes: 2 or 4 for floating point numbers of that size. Returns b\"\" where that would\n"
         "be no smaller than the array.")},
    {"delta_decode", delta_decode, METH_VARARGS,
     DOC("delta_decode($module, address, n_bytes, element_bytes, wire, /)",
         "Make the array at `address` what `now` was, if it is what `base` was. After Error (ERR_INVALID:\n"
         "that is no such wire) the array is undefined.")},
    {"fingerprint", fingerprint, METH_VARARGS,
     DOC("fingerprint($module, address, n_bytes, /)", "XXH3 of n_bytes bytes in host memory, 64 bits.")},
    {NULL, NULL, 0, NULL},
};
