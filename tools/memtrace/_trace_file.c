/* _trace_file.c - the module's functions of a file. */
#include "tools/memtrace/_trace.h"
#include "tools/memtrace/each.h"
#include "tools/memtrace/kinds.h"

#define FILE_CAPSULE "fcdp_memtrace.file"

memtrace_file *trace_file(PyObject *handle) {
    return PyCapsule_GetPointer(handle, FILE_CAPSULE);
}

static void close_file(PyObject *handle) {
    memtrace_file_close(PyCapsule_GetPointer(handle, FILE_CAPSULE));
}

static PyObject *file_open(PyObject *self, PyObject *args) {
    PyObject *path;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&:file_open", PyUnicode_FSConverter, &path)) return NULL;
    memtrace_file *file;
    memtrace_error error;
    bool is_good;
    Py_BEGIN_ALLOW_THREADS is_good = memtrace_file_open(PyBytes_AsString(path), &file, &error);
    Py_END_ALLOW_THREADS Py_DECREF(path);
    if (!is_good) return trace_raise(&error);
    PyObject *handle = PyCapsule_New(file, FILE_CAPSULE, close_file);
    if (!handle) memtrace_file_close(file);
    return handle;
}

/* Made anew at each call, as reading chunks adds notes. */
static PyObject *file_summary(PyObject *self, PyObject *handle) {
    memtrace_file *file = trace_file(handle);
    (void)self;
    if (!file) return NULL;
    memtrace_summary s = memtrace_file_summary(file);
    PyObject *notes = PyList_New(0);
    bool is_good = notes;
    for (size_t i = 0; is_good && i < memtrace_file_n_notes(file); i++)
        is_good = trace_append(notes, trace_text(memtrace_file_note(file, i)));
    if (!is_good) {
        Py_XDECREF(notes);
        return NULL;
    }
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:n,s:n,s:O,s:O,s:N}", "bytes", s.n_bytes, "events", s.n_events,
                         "unreadable_bytes", s.n_unreadable_bytes, "created_real_ns", s.created_real_ns,
                         "chunks", (Py_ssize_t)s.n_chunks, "processes", (Py_ssize_t)s.n_processes,
                         "is_complete", s.is_complete ? Py_True : Py_False, "is_growing",
                         s.is_growing ? Py_True : Py_False, "notes", notes);
}

/* {name: value} of the counters that a chunk has, those that no list has as "counter 17"; {} where it cannot
 * be read. */
static PyObject *counters_of(memtrace_file *file, long chunk) {
    memtrace_state s;
    PyObject *dict = PyDict_New();
    if (!dict || chunk == MEMTRACE_NO_CHUNK || !memtrace_file_state(file, (size_t)chunk, &s)) return dict;
    for (uint32_t i = 0; i < s.state.n_counters; i++) {
        const memtrace_counter *row = memtrace_counter_of(i);
        char unknown[32];
        if (!row && !s.counters[i]) continue;
        if (!row) PyOS_snprintf(unknown, sizeof unknown, "counter %u", i);
        if (!trace_set(dict, row ? row->name : unknown, PyLong_FromUnsignedLongLong(s.counters[i]))) {
            Py_DECREF(dict);
            return NULL;
        }
    }
    return dict;
}

/* With its first counters and its last, so that the recorded span's are their difference. */
static PyObject *process_of(memtrace_file *file, size_t i) {
    const memtrace_process *p = memtrace_file_process(file, i);
    const fcdp_trace_header *h = &p->header;
    char label[64];
    memtrace_process_label(p, label);
    return Py_BuildValue(
        "{s:N,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:N,s:N,s:N,s:K,s:K,s:K,s:K,s:I,s:I,s:s,s:K,s:K,s:K,s:K,s:K,s:N,s:"
        "N}",
        "label", trace_text(label), "pid", h->pid, "rank", (int)h->rank, "world_size", (int)h->world_size,
        "node", (int)h->node, "n_nodes", (int)h->n_nodes, "local_rank", (int)h->local_rank, "node_size",
        (int)h->node_size, "host", trace_text(h->host), "device", trace_text(h->device), "command",
        trace_text(h->command), "start_monotonic_ns", h->start_monotonic_ns, "start_real_ns",
        h->start_real_ns, "page_bytes", (unsigned long long)h->page_bytes, "device_budget_bytes",
        (unsigned long long)h->device_budget_bytes, "level", h->level, "step", (unsigned)h->step, "end",
        !p->is_ended ? "running"
        : p->ended   ? "ended"
                     : "killed",
        "events", p->n_events, "lost", p->n_lost, "dropped", p->n_dropped, "first_ns", p->first_ns, "last_ns",
        p->last_ns, "first_counters", counters_of(file, p->first_state), "counters",
        counters_of(file, p->last_state));
}

static PyObject *file_processes(PyObject *self, PyObject *handle) {
    memtrace_file *file = trace_file(handle);
    (void)self;
    PyObject *list = file ? PyList_New(0) : NULL;
    for (size_t i = 0; list && i < memtrace_file_summary(file).n_processes; i++)
        if (!trace_append(list, process_of(file, i))) Py_CLEAR(list);
    return list;
}

/* The regions that the process's states know, an object again in each: what changes is that state's. */
static PyObject *file_regions(PyObject *self, PyObject *args) {
    PyObject *handle;
    Py_ssize_t process;
    (void)self;
    if (!PyArg_ParseTuple(args, "On:file_regions", &handle, &process)) return NULL;
    memtrace_file *file = trace_file(handle);
    PyObject *list = file ? PyList_New(0) : NULL;
    for (size_t i = 0; list && i < memtrace_file_summary(file).n_chunks; i++) {
        memtrace_state state;
        const fcdp_trace_chunk *chunk = memtrace_file_chunk(file, i);
        bool says = chunk->type == FCDP_CHUNK_STATE || chunk->type == FCDP_CHUNK_END;
        if (!says || chunk->process != (size_t)process || !memtrace_file_state(file, i, &state)) continue;
        for (size_t k = 0; list && k < state.state.n_objects; k++) {
            uint32_t number;
            const fcdp_trace_object *o = memtrace_state_object(&state, k, &number);
            PyObject *region = Py_BuildValue("{s:I,s:N,s:K,s:K}", "number", number, "name",
                                             trace_text(o->name), "bytes", (unsigned long long)o->bytes,
                                             "trainable_bytes", (unsigned long long)o->trainable_bytes);
            if (!trace_append(list, region)) Py_CLEAR(list);
        }
    }
    return list;
}

typedef struct listing {
    PyObject *list; /* NULL: there was no memory */
} listing;

static bool list_event(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    listing *l = context;
    const memtrace_kind *kind = memtrace_kind_of(e->kind);
    const memtrace_cause *cause = e->cause ? memtrace_cause_of(e->cause) : NULL;
    (void)process, (void)chunk;
    if (kind && !trace_append(l->list, Py_BuildValue("(KKssIiI)", e->time_ns, e->duration_ns, kind->name,
                                                     cause ? cause->name : "", e->object,
                                                     (e->flags & FCDP_TRACE_BACKWARD) != 0, e->step)))
        Py_CLEAR(l->list);
    return l->list != NULL;
}

static PyObject *file_events(PyObject *self, PyObject *args) {
    PyObject *handle;
    Py_ssize_t process;
    (void)self;
    if (!PyArg_ParseTuple(args, "On:file_events", &handle, &process)) return NULL;
    memtrace_file *file = trace_file(handle);
    listing l = {file ? PyList_New(0) : NULL};
    if (l.list) memtrace_each(file, process, list_event, &l);
    return l.list;
}

PyMethodDef trace_methods_file[] = {
    {"file_open", file_open, METH_VARARGS, NULL},
    {"file_summary", file_summary, METH_O, NULL},
    {"file_processes", file_processes, METH_O, NULL},
    {"file_regions", file_regions, METH_VARARGS,
     "(file, process) -> of each state that was recorded, its regions: number, name, bytes, trainable_bytes"},
    {"file_events", file_events, METH_VARARGS,
     "(file, process) -> [(time_ns, duration_ns, kind, cause, object, is backward, step)], in its order"},
    {NULL, NULL, 0, NULL},
};
