/* _trace.c - the extension module of fcdp-memtrace. */
#include "tools/memtrace/_trace.h"

#include <string.h>

#include "tools/memtrace/kinds.h"

static PyObject *error_class;

PyObject *trace_raise(const memtrace_error *error) {
    PyErr_SetString(error_class, error->text);
    return NULL;
}

bool trace_append(PyObject *list, PyObject *item) {
    bool is_good = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return is_good;
}

bool trace_set(PyObject *dict, const char *key, PyObject *value) {
    bool is_good = value && PyDict_SetItemString(dict, key, value) == 0;
    Py_XDECREF(value);
    return is_good;
}

PyObject *trace_text(const char *text) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

int trace_number(const _Atomic int32_t *of_header) {
    return atomic_load_explicit(of_header, memory_order_relaxed);
}

static PyObject *version(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyLong_FromLong(FCDP_TRACE_VERSION);
}

/* {"events": [(layer, number, name, a, b, says)], "causes", "counters", "streams"}: the lists, for documents
 * and labels. */
static PyObject *tables(PyObject *self, PyObject *unused) {
    static const char *const units[] = {"bytes", "ns", "count"}, *const whats[] = {"sum", "node sum", "level",
                                                                                   "peak"};
    (void)self, (void)unused;
    size_t n_kinds, n_causes, n_counters, n_streams;
    const memtrace_kind *kind = memtrace_kinds(&n_kinds);
    const memtrace_cause *cause = memtrace_causes(&n_causes);
    const memtrace_counter *counter = memtrace_counters(&n_counters);
    const memtrace_stream *stream = memtrace_streams(&n_streams);
    PyObject *events = PyList_New(0), *causes = PyList_New(0), *counters = PyList_New(0),
             *streams = PyList_New(0);
    bool is_good = events && causes && counters && streams;
    for (size_t i = 0; is_good && i < n_kinds; i++, kind++)
        is_good = trace_append(events, Py_BuildValue("(sissss)", kind->layer, kind->number, kind->name,
                                                     kind->a, kind->b, kind->says));
    for (size_t i = 0; is_good && i < n_causes; i++, cause++)
        is_good = trace_append(
            causes, Py_BuildValue("(siss)", cause->layer, cause->number, cause->name, cause->says));
    for (size_t i = 0; is_good && i < n_counters; i++, counter++)
        is_good = trace_append(counters,
                               Py_BuildValue("(sissss)", counter->layer, counter->number, counter->name,
                                             units[counter->unit], whats[counter->what], counter->says));
    for (size_t i = 0; is_good && i < n_streams; i++, stream++)
        is_good = trace_append(
            streams, Py_BuildValue("(siss)", stream->layer, stream->number, stream->name, stream->says));
    if (is_good)
        return Py_BuildValue("{s:N,s:N,s:N,s:N}", "events", events, "causes", causes, "counters", counters,
                             "streams", streams);
    Py_XDECREF(events), Py_XDECREF(causes), Py_XDECREF(counters), Py_XDECREF(streams);
    return NULL;
}

static PyMethodDef methods[] = {
    {"version", version, METH_NOARGS, "Of the format that this reads and writes."},
    {"tables", tables, METH_NOARGS, "The kinds of events, causes, counters and streams that it knows."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_trace", "FCDP's traces, marshalled.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__trace(void) {
    PyObject *m = PyModule_Create(&module);
    error_class = PyErr_NewExceptionWithDoc("fcdp_memtrace.Error", "What failed, and what to do.",
                                            PyExc_RuntimeError, NULL);
    if (!m || !error_class || PyModule_AddObjectRef(m, "Error", error_class) < 0 ||
        PyModule_AddFunctions(m, trace_methods_file) < 0 ||
        PyModule_AddFunctions(m, trace_methods_record) < 0 ||
        PyModule_AddFunctions(m, trace_methods_report) < 0 ||
        PyModule_AddFunctions(m, trace_methods_check) < 0 ||
        PyModule_AddFunctions(m, trace_methods_draw) < 0 || PyModule_AddFunctions(m, trace_methods_top) < 0 ||
        PyModule_AddFunctions(m, trace_methods_groups) < 0)
        return NULL;
    return m;
}
