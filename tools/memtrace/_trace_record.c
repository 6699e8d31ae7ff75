/* _trace_record.c - the module's functions of recording. */
#include <stdlib.h>
#include <sys/prctl.h>

#include "tools/memtrace/_trace.h"
#include "tools/memtrace/attach.h"
#include "tools/memtrace/recorder.h"

#define RECORDER_CAPSULE "fcdp_memtrace.recorder"
#define RECORDING_CAPSULE "fcdp_memtrace.recording"

static PyObject *progress_of(const memtrace_progress *p) {
    return Py_BuildValue("{s:n,s:n,s:n,s:K,s:K,s:K,s:I}", "processes", (Py_ssize_t)p->n_processes, "live",
                         (Py_ssize_t)p->n_live, "ancestors", (Py_ssize_t)p->n_ancestors, "events",
                         p->n_events, "lost", p->n_lost, "bytes", p->n_bytes, "step", p->step);
}

/* The pointer of a handle, once: closing uses the handle up, and a second call is refused. */
static void *take(PyObject *handle, const char *name) {
    void *pointer = PyCapsule_GetPointer(handle, name);
    if (pointer && PyCapsule_SetName(handle, "closed") != 0) return NULL;
    return pointer;
}

/* The numbers of a sequence, to be freed. NULL with an error set. */
static pid_t *pids_of(PyObject *sequence, Py_ssize_t *n_out) {
    Py_ssize_t n = sequence ? PySequence_Size(sequence) : 0;
    pid_t *pids = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *pids);
    if (!pids) {
        if (n >= 0) PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        pids[i] = item ? (pid_t)PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
    }
    *n_out = n;
    if (!PyErr_Occurred()) return pids;
    free(pids);
    return NULL;
}

/* recorder_create(path, ancestors, pids, replaces) */
static PyObject *recorder_create(PyObject *self, PyObject *args) {
    PyObject *path, *of_ancestors, *of_pids = NULL;
    int replaces = 0;
    Py_ssize_t n_ancestors, n_pids;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O|Op:recorder_create", PyUnicode_FSConverter, &path, &of_ancestors,
                          &of_pids, &replaces))
        return NULL;
    memtrace_recorder *recorder;
    memtrace_error error = {0};
    pid_t *ancestors = pids_of(of_ancestors, &n_ancestors),
          *pids = ancestors ? pids_of(of_pids, &n_pids) : NULL;
    bool is_good = false;
    if (pids) {
        memtrace_targets targets = {pids, ancestors, (size_t)n_pids, (size_t)n_ancestors};
        is_good = memtrace_recorder_create(PyBytes_AsString(path), replaces, &targets, &recorder, &error);
    }
    Py_DECREF(path);
    free(ancestors);
    free(pids);
    if (!pids) return NULL;
    return is_good ? PyCapsule_New(recorder, RECORDER_CAPSULE, NULL) : trace_raise(&error);
}

static PyObject *recorder_poll(PyObject *self, PyObject *args) {
    PyObject *handle;
    int timeout_ms;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oi:recorder_poll", &handle, &timeout_ms)) return NULL;
    memtrace_recorder *recorder = PyCapsule_GetPointer(handle, RECORDER_CAPSULE);
    memtrace_progress progress;
    memtrace_error error = {0};
    bool is_good;
    if (!recorder) return NULL;
    Py_BEGIN_ALLOW_THREADS is_good = memtrace_recorder_poll(recorder, timeout_ms, &progress, &error);
    Py_END_ALLOW_THREADS return is_good ? progress_of(&progress) : trace_raise(&error);
}

static PyObject *recorder_close(PyObject *self, PyObject *handle) {
    memtrace_recorder *recorder = take(handle, RECORDER_CAPSULE);
    memtrace_progress progress;
    memtrace_error error = {0};
    bool is_good;
    (void)self;
    if (!recorder) return NULL;
    Py_BEGIN_ALLOW_THREADS is_good = memtrace_recorder_close(recorder, &progress, &error);
    Py_END_ALLOW_THREADS return is_good ? progress_of(&progress) : trace_raise(&error);
}

/* The recorder is the recording's from here on. */
static PyObject *recording_start(PyObject *self, PyObject *handle) {
    memtrace_recorder *recorder = take(handle, RECORDER_CAPSULE);
    memtrace_recording *recording;
    memtrace_error error = {0};
    (void)self;
    if (!recorder) return NULL;
    if (!memtrace_recording_start(recorder, &recording, &error)) return trace_raise(&error);
    return PyCapsule_New(recording, RECORDING_CAPSULE, NULL);
}

static PyObject *recording_stop(PyObject *self, PyObject *handle) {
    memtrace_recording *recording = take(handle, RECORDING_CAPSULE);
    memtrace_progress progress;
    memtrace_error error = {0};
    bool is_good;
    (void)self;
    if (!recording) return NULL;
    Py_BEGIN_ALLOW_THREADS is_good = memtrace_recording_stop(recording, &progress, &error);
    Py_END_ALLOW_THREADS return is_good ? progress_of(&progress) : trace_raise(&error);
}

static void append_pid(pid_t pid, uint64_t start_ticks, void *list) {
    (void)start_ticks;
    (void)trace_append(list, PyLong_FromLong(pid));
}

/* traced(ancestor) -> those of it and its descendants that write a trace */
static PyObject *traced(PyObject *self, PyObject *args) {
    int ancestor;
    (void)self;
    PyObject *list = PyArg_ParseTuple(args, "i:traced", &ancestor) ? PyList_New(0) : NULL;
    if (list) memtrace_find(ancestor, append_pid, list);
    if (list && PyErr_Occurred()) Py_CLEAR(list);
    return list;
}

/* Orphans among this process's descendants become its children: they can be found as its descendants. */
static PyObject *adopt_orphans(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyBool_FromLong(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
}

PyMethodDef trace_methods_record[] = {
    {"recorder_create", recorder_create, METH_VARARGS, NULL},
    {"recorder_poll", recorder_poll, METH_VARARGS, NULL},
    {"recorder_close", recorder_close, METH_O, NULL},
    {"recording_start", recording_start, METH_O, NULL},
    {"recording_stop", recording_stop, METH_O, NULL},
    {"traced", traced, METH_VARARGS, NULL},
    {"adopt_orphans", adopt_orphans, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
