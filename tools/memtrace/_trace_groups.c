/* _trace_groups.c - the module's function for fcdp-doctor: the parameter groups of live processes. */
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/_trace.h"
#include "tools/memtrace/attach.h"
#include "tools/memtrace/grow.h"

typedef struct pid_list {
    pid_t *pids;
    size_t n, n_room;
    bool is_short; /* there was no memory for all */
} pid_list;

static void found(pid_t pid, uint64_t start_ticks, void *context) {
    pid_list *list = context;
    (void)start_ticks;
    pid_t *pids = memtrace_grown(list->pids, &list->n_room, list->n, sizeof *pids);
    list->is_short = list->is_short || !pids;
    if (!pids) return;
    list->pids = pids;
    list->pids[list->n++] = pid;
}

static PyObject *group_dict(const memtrace_segment *segment, const fcdp_trace_object *object) {
    char why[1024];
    bool is_bypassed = (object->state & FCDP_OBJECT_BYPASSED) != 0;
    memtrace_read_text(segment, is_bypassed ? object->why : 0, why, sizeof why);
    return Py_BuildValue(
        "{s:N,s:K,s:K,s:O,s:N,s:K,s:K,s:K,s:O,s:O,s:O}", "name", trace_text(object->name), "bytes",
        (unsigned long long)object->bytes, "trainable_bytes", (unsigned long long)object->trainable_bytes,
        "served", is_bypassed ? Py_False : Py_True, "reason", trace_text(why), "uses",
        (unsigned long long)object->n_uses, "plain_bytes", (unsigned long long)object->plain_bytes,
        "gather_bytes", (unsigned long long)object->gather_bytes, "in_file",
        object->lives & FCDP_LIVES_IN_FILE ? Py_True : Py_False, "mapped",
        object->lives & FCDP_LIVES_MAPPED ? Py_True : Py_False, "on_disk",
        object->lives & FCDP_LIVES_ON_DISK ? Py_True : Py_False);
}

static PyObject *groups_list(const memtrace_segment *segment) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 1; list && i < segment->n_objects; i++) {
        fcdp_trace_object object;
        if (memtrace_read_object(segment, i, &object) && !trace_append(list, group_dict(segment, &object)))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *process_dict(const memtrace_segment *segment) {
    const fcdp_trace_header *h = segment->header;
    char command[sizeof h->command + 1] = {0};
    memcpy(command, h->command, sizeof h->command);
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:I,s:N,s:N}", "pid", (int)segment->pid, "rank",
                         trace_number(&h->rank), "world_size", trace_number(&h->world_size), "nodes",
                         trace_number(&h->n_nodes), "ranks_per_node", trace_number(&h->node_size), "steps",
                         (unsigned)atomic_load_explicit(&h->step, memory_order_relaxed), "command",
                         trace_text(command), "groups", groups_list(segment));
}

/* What ends while it is looked at is left out. */
static PyObject *processes_list(const pid_list *pids) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < pids->n; i++) {
        memtrace_segment segment;
        memtrace_error unused;
        if (!memtrace_attach(pids->pids[i], &segment, &unused)) continue;
        if (!trace_append(list, process_dict(&segment))) Py_CLEAR(list);
        memtrace_detach(&segment);
    }
    return list;
}

static PyObject *live_groups(PyObject *self, PyObject *args) {
    (void)self;
    int pid;
    if (!PyArg_ParseTuple(args, "i:live_groups", &pid)) return NULL;
    pid_list pids = {0};
    memtrace_find(pid, found, &pids);
    PyObject *list = pids.is_short ? PyErr_NoMemory() : processes_list(&pids);
    free(pids.pids);
    memtrace_segment segment;
    memtrace_error error = {0};
    if (!list || PyList_Size(list) > 0) return list;
    Py_DECREF(list);
    if (!memtrace_attach(pid, &segment, &error)) return trace_raise(&error); /* says why there is none */
    memtrace_detach(&segment);
    return PyList_New(0);
}

PyMethodDef trace_methods_groups[] = {
    {"live_groups", live_groups, METH_VARARGS,
     "(pid) -> the parameter groups of each process with a trace that it is, or has started."},
    {NULL, NULL, 0, NULL},
};
