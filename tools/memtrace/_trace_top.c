/* _trace_top.c - the module's functions for `top`: the model, and frames of it as dictionaries. */
#include <string.h>

#include "tools/memtrace/_trace.h"
#include "tools/memtrace/frame.h"
#include "tools/memtrace/kinds.h"
#include "tools/memtrace/source.h"

#define CAPSULE "fcdp_memtrace.model"

static const char *const link_names[MEMTRACE_N_LINKS] = {"inter", "node", "to_host", "to_device"};
static const char *const fate_names[] = {"running", "ended", "killed"};

static memtrace_model *model_of(PyObject *capsule) {
    return PyCapsule_GetPointer(capsule, CAPSULE);
}

static void model_free(PyObject *capsule) {
    memtrace_model_destroy(PyCapsule_GetPointer(capsule, CAPSULE));
}

static PyObject *top_create(PyObject *self, PyObject *args) {
    (void)self;
    Py_ssize_t history_bytes;
    if (!PyArg_ParseTuple(args, "n:top_create", &history_bytes)) return NULL;
    memtrace_model *model = memtrace_model_create((size_t)history_bytes);
    if (!model) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(model, CAPSULE, model_free);
    if (!capsule) memtrace_model_destroy(model);
    return capsule;
}

static PyObject *top_attach(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    int pid;
    if (!PyArg_ParseTuple(args, "Oi:top_attach", &capsule, &pid)) return NULL;
    memtrace_model *model = model_of(capsule);
    if (!model) return NULL;
    memtrace_error error = {0};
    if (!memtrace_model_attach(model, pid, &error)) return trace_raise(&error);
    Py_RETURN_NONE;
}

static PyObject *top_find(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    int ancestor;
    if (!PyArg_ParseTuple(args, "Oi:top_find", &capsule, &ancestor)) return NULL;
    memtrace_model *model = model_of(capsule);
    if (!model) return NULL;
    size_t n_new = memtrace_model_find(model, ancestor);
    return Py_BuildValue("(nnn)", (Py_ssize_t)n_new, (Py_ssize_t)model->scan.n_processes,
                         (Py_ssize_t)model->scan.n_refused);
}

static PyObject *top_poll(PyObject *self, PyObject *capsule) {
    (void)self;
    memtrace_model *model = model_of(capsule);
    if (!model) return NULL;
    memtrace_model_poll(model, memtrace_now_ns());
    Py_RETURN_NONE;
}

/* ---- frames ---- */

static PyObject *links_dict(const double *per_s) {
    return Py_BuildValue("{s:d,s:d,s:d,s:d}", link_names[0], per_s[0], link_names[1], per_s[1], link_names[2],
                         per_s[2], link_names[3], per_s[3]);
}

static const char *wait_name(unsigned wait) {
    const memtrace_cause *cause = memtrace_cause_of(memtrace_wait_cause(wait));
    return wait == MEMTRACE_STALL ? "stall" : cause ? cause->name : "other";
}

/* Milliseconds per step by cause; causes that took no time are left out. */
static PyObject *waits_dict(const memtrace_live_rank *rank) {
    PyObject *waits = PyDict_New();
    for (unsigned i = 0; waits && i < MEMTRACE_N_WAITS; i++)
        if (rank->waited_ns[i] > 0 &&
            !trace_set(waits, wait_name(i), PyFloat_FromDouble(rank->waited_ns[i] / 1e6)))
            Py_CLEAR(waits);
    return waits;
}

static PyObject *counters_dict(const memtrace_sample *sample) {
    size_t n;
    const memtrace_counter *counters = memtrace_counters(&n);
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < n; i++)
        if (!trace_set(dict, counters[i].name,
                       PyLong_FromUnsignedLongLong(sample->counters[counters[i].number])))
            Py_CLEAR(dict);
    return dict;
}

/* Of the process's own: not ended, perhaps, where it has no room. */
static PyObject *text_within(const char *bytes, size_t room) {
    return PyUnicode_DecodeUTF8(bytes, (Py_ssize_t)strnlen(bytes, room), "replace");
}

typedef struct named_number {
    const char *name;
    double value; /* whole numbers below 2^53 */
} named_number;

/* Whole ones become int. */
static bool put_numbers(PyObject *dict, const named_number *numbers, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double value = numbers[i].value, whole = (double)(long long)value;
        PyObject *number = value == whole ? PyLong_FromLongLong((long long)value) : PyFloat_FromDouble(value);
        if (!trace_set(dict, numbers[i].name, number)) return false;
    }
    return true;
}
#define PUT_NUMBERS(dict, numbers) put_numbers(dict, numbers, sizeof(numbers) / sizeof *(numbers))

static double sum_held(const memtrace_sample *sample) {
    double bytes = 0;
    for (unsigned i = 0; sample && i < MEMTRACE_N_HOLDERS; i++) bytes += (double)sample->held_bytes[i];
    return bytes;
}

/* A list of pairs, so that a number's name stands beside it. */
static PyObject *rank_dict(const memtrace_live_rank *rank) {
    const memtrace_live_process *p = rank->process;
    const fcdp_trace_header *h = p->segment.header;
    const memtrace_sample *s = rank->sample;
    const named_number numbers[] = {
        {"pid", p->segment.pid},
        {"rank", trace_number(&h->rank)},
        {"world_size", trace_number(&h->world_size)},
        {"node", trace_number(&h->node)},
        {"n_nodes", trace_number(&h->n_nodes)},
        {"local_rank", trace_number(&h->local_rank)},
        {"node_size", trace_number(&h->node_size)},
        {"step", s->step},
        {"step_ms", rank->step_ns / 1e6},
        {"waited_ms", rank->all_waited_ns / 1e6},
        {"waited_steps", rank->n_waited_steps},
        {"tensors_bytes", (double)s->held_bytes[0]},
        {"gathered_bytes", (double)s->held_bytes[1]},
        {"held_bytes", sum_held(s)},
        {"peak_held_bytes", sum_held(memtrace_follower_peak(p->follower))},
        {"events", (double)s->head},
        {"events_lost", (double)s->n_lost},
        {"events_dropped", (double)s->n_dropped},
        {"at_real_s",
         ((double)h->start_real_ns + ((double)s->time_ns - (double)h->start_monotonic_ns)) / 1e9},
    };
    PyObject *out = PyDict_New();
    if (!PUT_NUMBERS(out, numbers) || !trace_set(out, "state", trace_text(fate_names[p->fate])) ||
        !trace_set(out, "host", text_within(h->host, sizeof h->host)) ||
        !trace_set(out, "device", text_within(h->device, sizeof h->device)) ||
        !trace_set(out, "command", text_within(h->command, sizeof h->command)) ||
        !trace_set(out, "waits_ms", waits_dict(rank)) || !trace_set(out, "counters", counters_dict(s)))
        Py_CLEAR(out);
    return out;
}

static PyObject *is_in(uint32_t mask, uint32_t bit) {
    return PyBool_FromLong((mask & bit) != 0);
}

/* As rank_dict; the bits of the state by name. */
static PyObject *row_dict(const memtrace_live_row *row) {
    const named_number numbers[] = {
        {"bytes", (double)row->bytes},
        {"device_bytes", (double)row->device_bytes},
        {"host_bytes", (double)row->host_bytes},
        {"file_bytes", (double)row->file_bytes},
        {"ranks", row->n_ranks},
        {"evictions", row->n_evictions},
    };
    PyObject *out = PyDict_New();
    if (!PUT_NUMBERS(out, numbers) || !trace_set(out, "name", trace_text(row->name)) ||
        !trace_set(out, "in_use", is_in(row->state, FCDP_OBJECT_IN_USE)) ||
        !trace_set(out, "kept", is_in(row->state, FCDP_OBJECT_KEPT)) ||
        !trace_set(out, "moving", is_in(row->state, FCDP_OBJECT_MOVING)) ||
        !trace_set(out, "bypassed", is_in(row->state, FCDP_OBJECT_BYPASSED)) ||
        !trace_set(out, "mapped", is_in(row->lives, FCDP_LIVES_MAPPED)) ||
        !trace_set(out, "on_disk", is_in(row->lives, FCDP_LIVES_ON_DISK)) ||
        !trace_set(out, "per_s", links_dict(row->moved_per_s)))
        Py_CLEAR(out);
    return out;
}

static PyObject *note_dict(const memtrace_frame *frame, const memtrace_shown_note *shown) {
    const memtrace_live_note *note = shown->note;
    uint64_t ago_ns = frame->at_ns > note->time_ns ? frame->at_ns - note->time_ns : 0;
    const named_number numbers[] = {{"ago_s", (double)ago_ns / 1e9},
                                    {"bytes", (double)note->bytes},
                                    {"a", (double)note->a},
                                    {"b", (double)note->b},
                                    {"rank", shown->rank}};
    const memtrace_kind *kind = memtrace_kind_of(note->kind);
    const memtrace_cause *cause = memtrace_cause_of(note->cause);
    PyObject *out = PyDict_New();
    if (!PUT_NUMBERS(out, numbers) || !trace_set(out, "kind", trace_text(kind ? kind->name : "unknown")) ||
        !trace_set(out, "cause", trace_text(cause ? cause->name : "")) ||
        !trace_set(out, "region", trace_text(shown->name ? shown->name : "")))
        Py_CLEAR(out);
    return out;
}

static PyObject *ranks_list(const memtrace_frame *f) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < f->n_ranks; i++)
        if (!trace_append(list, rank_dict(&f->ranks[i]))) Py_CLEAR(list);
    return list;
}

static PyObject *rows_list(const memtrace_frame *f) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < f->n_rows; i++)
        if (!trace_append(list, row_dict(&f->rows[i]))) Py_CLEAR(list);
    return list;
}

static PyObject *notes_list(const memtrace_frame *f) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < f->n_notes; i++)
        if (!trace_append(list, note_dict(f, &f->notes[i]))) Py_CLEAR(list);
    return list;
}

/* As rank_dict. Times of the monotonic clock fit into a double: 2^53 ns are 104 days, and later ones lose
 * a few ns. */
static PyObject *frame_dict(const memtrace_frame *f) {
    const named_number numbers[] = {
        {"jobs", (double)f->n_jobs},
        {"job", (double)f->job},
        {"running", (double)f->n_running},
        {"ended", (double)f->n_ended},
        {"killed", (double)f->n_killed},
        {"at_ns", (double)f->at_ns},
        {"now_ns", (double)f->now_ns},
        {"oldest_ns", (double)f->oldest_ns},
        {"newest_ns", (double)f->newest_ns},
        {"worst", (double)f->worst},
        {"fullest", (double)f->fullest},
        {"plain_bytes", (double)f->plain_bytes},
        {"gather_bytes", (double)f->gather_bytes},
        {"events_lost", (double)f->n_lost},
        {"events_dropped", (double)f->n_dropped},
    };
    PyObject *out = PyDict_New();
    if (!PUT_NUMBERS(out, numbers) || !trace_set(out, "per_s", links_dict(f->moved_per_s)) ||
        !trace_set(out, "ranks", ranks_list(f)) || !trace_set(out, "regions", rows_list(f)) ||
        !trace_set(out, "notes", notes_list(f)))
        Py_CLEAR(out);
    return out;
}

static PyObject *top_frame(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned long long at_ns;
    double window_s;
    int pid, rank_pid, at_peak;
    if (!PyArg_ParseTuple(args, "OiiKpd:top_frame", &capsule, &pid, &rank_pid, &at_ns, &at_peak, &window_s))
        return NULL;
    memtrace_model *model = model_of(capsule);
    if (!model) return NULL;
    memtrace_query query = {pid, rank_pid, at_ns, at_peak != 0, (uint64_t)(window_s * 1e9)};
    memtrace_frame *frame = memtrace_frame_create(model, &query);
    if (!frame) Py_RETURN_NONE;
    PyObject *out = frame_dict(frame);
    memtrace_frame_destroy(frame);
    return out;
}

static PyObject *top_jobs(PyObject *self, PyObject *capsule) {
    (void)self;
    const memtrace_model *model = model_of(capsule);
    PyObject *pids = model ? PyList_New(0) : NULL;
    for (size_t i = 0; pids && i < model->n_processes; i++)
        if (model->processes[i]->job == i &&
            !trace_append(pids, PyLong_FromLong(model->processes[i]->segment.pid)))
            Py_CLEAR(pids);
    return pids;
}

PyMethodDef trace_methods_top[] = {
    {"top_create", top_create, METH_VARARGS, "(history_bytes) -> model of the jobs of this machine"},
    {"top_attach", top_attach, METH_VARARGS, "(model, pid): follow that process too"},
    {"top_find", top_find, METH_VARARGS, "(model, ancestor or 0) -> (new, looked at, refused) processes"},
    {"top_jobs", top_jobs, METH_O, "(model) -> of each job, a process"},
    {"top_poll", top_poll, METH_O, "(model): read what all have written"},
    {"top_frame", top_frame, METH_VARARGS,
     "(model, pid, rank_pid, at_ns, at_peak, window_s) -> what frame.h has, or None without a job"},
    {NULL, NULL, 0, NULL},
};
