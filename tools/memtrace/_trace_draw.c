/* _trace_draw.c - the module's functions of pictures and other viewers. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "tools/memtrace/_trace.h"
#include "tools/memtrace/chrome.h"
#include "tools/memtrace/kinds.h"
#include "tools/memtrace/series.h"

/* Python's json writes texts. */
typedef struct encoder {
    PyObject *dumps, *last;
} encoder;

static const char *encode(void *context, const char *text) {
    encoder *e = context;
    PyObject *argument = trace_text(text);
    PyObject *quoted = argument ? PyObject_CallFunctionObjArgs(e->dumps, argument, NULL) : NULL;
    Py_XDECREF(argument);
    Py_XDECREF(e->last);
    e->last = quoted ? PyUnicode_AsUTF8String(quoted) : NULL;
    Py_XDECREF(quoted);
    return e->last ? PyBytes_AsString(e->last) : NULL;
}

/* chrome_write(file, descriptor, base_real_ns, dumps) -> events written. The GIL stays: it calls dumps. */
static PyObject *chrome_write(PyObject *self, PyObject *args) {
    PyObject *handle;
    encoder e = {0};
    int fd;
    unsigned long long base_ns;
    (void)self;
    if (!PyArg_ParseTuple(args, "OiKO:chrome_write", &handle, &fd, &base_ns, &e.dumps)) return NULL;
    memtrace_file *file = trace_file(handle);
    if (!file) return NULL;
    int copy = dup(fd);
    FILE *out = copy >= 0 ? fdopen(copy, "w") : NULL;
    uint64_t n_events = 0;
    memtrace_error error;
    bool is_good = out && memtrace_chrome_write(file, base_ns, out, encode, &e, &n_events);
    int failure = errno;
    if (out && fclose(out) != 0) is_good = false;
    Py_XDECREF(e.last);
    if (is_good) return PyLong_FromUnsignedLongLong(n_events);
    if (PyErr_Occurred()) return NULL;
    memtrace_fail(&error, "cannot write the JSON: %s", strerror(failure));
    return trace_raise(&error);
}

static PyObject *row_dict(const memtrace_row *row, size_t n_columns) {
    return Py_BuildValue("{s:N,s:K,s:y#}", "name", trace_text(row->name), "bytes", row->bytes, "tiers",
                         row->tiers, (Py_ssize_t)n_columns);
}

/* bytes of doubles or of 64-bit numbers, as numpy reads them. */
static PyObject *column_dict(const memtrace_series *s) {
    PyObject *links = PyDict_New(), *held = PyList_New(0);
    bool is_good = links && held;
    for (int i = 0; is_good && i < MEMTRACE_N_LINKS; i++)
        is_good = trace_set(links, memtrace_link_name(i),
                            PyBytes_FromStringAndSize((const char *)s->links[i],
                                                      (Py_ssize_t)(s->n_columns * sizeof *s->links[i])));
    for (int i = 0; is_good && i < MEMTRACE_N_HOLDERS; i++)
        is_good = trace_append(held,
                               PyBytes_FromStringAndSize((const char *)s->held[i],
                                                         (Py_ssize_t)(s->n_columns * sizeof *s->held[i])));
    if (is_good) return Py_BuildValue("(NN)", links, held);
    Py_XDECREF(links);
    Py_XDECREF(held);
    return NULL;
}

/* (time_ns, kind, link, bytes) for each link that a mark's bytes crossed. */
static bool append_mark(PyObject *list, const memtrace_mark *mark) {
    const memtrace_kind *kind = memtrace_kind_of(mark->kind);
    bool is_good = true;
    for (int i = 0; is_good && i < MEMTRACE_N_LINKS; i++)
        if (mark->bytes[i])
            is_good = trace_append(list, Py_BuildValue("(KssK)", mark->time_ns, kind ? kind->name : "unknown",
                                                       memtrace_link_name(i), mark->bytes[i]));
    return is_good;
}

/* series(file, process, n_columns) */
static PyObject *series(PyObject *self, PyObject *args) {
    PyObject *handle;
    Py_ssize_t process, n_columns;
    (void)self;
    if (!PyArg_ParseTuple(args, "Onn:series", &handle, &process, &n_columns)) return NULL;
    memtrace_file *file = trace_file(handle);
    memtrace_series *s;
    if (!file) return NULL;
    if (process < 0 || (size_t)process >= memtrace_file_summary(file).n_processes || n_columns < 1) {
        PyErr_SetString(PyExc_IndexError, "no such process, or no columns");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS s = memtrace_series_create(file, (size_t)process, (size_t)n_columns);
    Py_END_ALLOW_THREADS if (!s) return PyErr_NoMemory();
    PyObject *rows = PyList_New(0), *steps = PyList_New(0), *marks = PyList_New(0);
    bool is_good = rows && steps && marks;
    for (size_t i = 0; is_good && i < s->n_rows; i++)
        is_good = trace_append(rows, row_dict(&s->rows[i], s->n_columns));
    for (size_t i = 0; is_good && i < s->n_steps; i++)
        is_good = trace_append(steps, PyLong_FromUnsignedLongLong(s->steps_ns[i]));
    for (size_t i = 0; is_good && i < s->n_marks; i++) is_good = append_mark(marks, &s->marks[i]);
    PyObject *columns = is_good ? column_dict(s) : NULL, *dict = NULL;
    if (columns)
        dict = Py_BuildValue("{s:K,s:K,s:O,s:O,s:O,s:N,s:y#}", "first_ns", s->first_ns, "last_ns", s->last_ns,
                             "rows", rows, "steps_ns", steps, "marks", marks, "columns", columns, "waited",
                             (const char *)s->waited, (Py_ssize_t)(s->n_columns * sizeof *s->waited));
    Py_XDECREF(marks);
    Py_XDECREF(rows);
    Py_XDECREF(steps);
    memtrace_series_destroy(s);
    return dict;
}

/* The names of tiers, in the order of their numbers. */
static PyObject *tiers(PyObject *self, PyObject *unused) {
    PyObject *list = PyList_New(0);
    (void)self, (void)unused;
    for (int i = 0; list && i < MEMTRACE_N_TIERS; i++)
        if (!trace_append(list, PyUnicode_FromString(memtrace_tier_name(i)))) Py_CLEAR(list);
    return list;
}

PyMethodDef trace_methods_draw[] = {
    {"chrome_write", chrome_write, METH_VARARGS, NULL},
    {"series", series, METH_VARARGS, NULL},
    {"tiers", tiers, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
