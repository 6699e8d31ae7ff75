/* _trace_report.c - the module's functions of reports. */
#include "tools/memtrace/_trace.h"
#include "tools/memtrace/kinds.h"
#include "tools/memtrace/report.h"

static PyObject *sums_of(const memtrace_sums *s) {
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}",
                         "gathers", s->n_gathers, "restores", s->n_restores, "stores", s->n_stores, "loads",
                         s->n_loads, "evictions", s->n_evictions, "hits", s->n_hits, "made", s->n_made,
                         "stale", s->n_stale, "inter_bytes", s->inter_bytes, "intra_bytes", s->intra_bytes,
                         "h2d_bytes", s->h2d_bytes, "d2h_bytes", s->d2h_bytes, "moved_ns", s->moved_ns,
                         "stall_ns", s->stall_ns, "host_wait_ns", s->host_wait_ns, "waits", s->n_waits,
                         "exposed_ns", s->exposed_ns, "hidden_ns", memtrace_hidden_ns(s));
}

static PyObject *cause_name(uint32_t number) {
    const memtrace_cause *row = memtrace_cause_of(number);
    return row ? PyUnicode_FromString(row->name) : PyUnicode_FromFormat("cause %u", number);
}

static PyObject *kind_name(uint32_t number) {
    const memtrace_kind *row = memtrace_kind_of(number);
    return row ? PyUnicode_FromString(row->name) : PyUnicode_FromFormat("kind %u", number);
}

/* {name: values[i]} of those that are not 0. `name` makes the key of i. */
static PyObject *named(PyObject *(*name)(uint32_t), const uint64_t *values, size_t n) {
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < n; i++) {
        if (!values[i]) continue;
        PyObject *key = name((uint32_t)i), *value = PyLong_FromUnsignedLongLong(values[i]);
        if (!key || !value || PyDict_SetItem(dict, key, value) != 0) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

/* Beside the sums of all steps, those of the steps that are compared, where any are. */
static PyObject *region_row(const memtrace_report *r, const memtrace_region *region) {
    uint64_t causes[MEMTRACE_N_CAUSES];
    for (size_t i = 0; i < MEMTRACE_N_CAUSES; i++) causes[i] = region->n_by_cause[i];
    PyObject *row = Py_BuildValue("{s:N,s:K,s:N,s:N}", "name", trace_text(region->name), "bytes",
                                  region->bytes, "causes", named(cause_name, causes, MEMTRACE_N_CAUSES),
                                  "sums", sums_of(&region->sums));
    if (row && r->n_compared && !trace_set(row, "compared", sums_of(&region->compared))) Py_CLEAR(row);
    return row;
}

static PyObject *step_row(const memtrace_report *r, const memtrace_step *step) {
    PyObject *row = Py_BuildValue("{s:I,s:I,s:K,s:N}", "step", step->step, "timed", step->n_timed, "span_ns",
                                  step->span_ns, "sums", sums_of(&step->sums));
    if (row && r->n_compared && !trace_set(row, "compared", PyBool_FromLong(step->is_compared)))
        Py_CLEAR(row);
    return row;
}

static PyObject *move_row(const fcdp_trace_event *move) {
    if (!move->kind) Py_RETURN_NONE;
    return Py_BuildValue("{s:N,s:K,s:K,s:K}", "kind", kind_name(move->kind), "time_ns", move->time_ns,
                         "duration_ns", move->duration_ns, "bytes", move->bytes);
}

static PyObject *stall_row(memtrace_file *file, const memtrace_stall *stall) {
    const fcdp_trace_event *e = &stall->event;
    char label[64];
    memtrace_process_label(memtrace_file_process(file, stall->process), label);
    return Py_BuildValue(
        "{s:N,s:n,s:K,s:N,s:N,s:N,s:I,s:K,s:K,s:O,s:s,s:s,s:s,s:N}", "process", trace_text(label),
        "process_index", (Py_ssize_t)stall->process, "event", e->stamp, "kind", kind_name(e->kind), "cause",
        e->cause ? cause_name(e->cause) : trace_text(""), "region", trace_text(stall->region), "step",
        e->step, "time_ns", e->time_ns, "duration_ns", e->duration_ns, "backward",
        e->flags & FCDP_TRACE_BACKWARD ? Py_True : Py_False, "reason", memtrace_reason_says(stall->reason),
        "option", memtrace_reason_option(stall->reason), "advice", memtrace_reason_advice(stall->reason),
        "move", move_row(&stall->move));
}

/* Lists of rows, as JSON has them; their order is report.h's. */
static PyObject *report_dict(memtrace_file *file, const memtrace_report *r) {
    PyObject *steps = PyList_New(0), *regions = PyList_New(0), *stalls = PyList_New(0),
             *peaks = PyList_New(0);
    bool is_good = steps && regions && stalls && peaks;
    for (size_t i = 0; is_good && i < memtrace_file_summary(file).n_processes; i++)
        is_good = trace_append(peaks, PyLong_FromUnsignedLongLong(r->peaks[i]));
    for (size_t i = 0; is_good && i < r->n_steps; i++)
        is_good = trace_append(steps, step_row(r, &r->steps[i]));
    for (size_t i = 0; is_good && i < r->n_regions; i++)
        is_good = trace_append(regions, region_row(r, &r->regions[i]));
    for (size_t i = 0; is_good && i < r->n_stalls; i++)
        is_good = trace_append(stalls, stall_row(file, &r->stalls[i]));
    if (is_good)
        return Py_BuildValue("{s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N}", "peaks", peaks, "total", sums_of(&r->total),
                             "steps", steps, "regions", regions, "stalls", stalls, "host_waits",
                             named(cause_name, r->n_by_cause, MEMTRACE_N_CAUSES), "host_wait_ns",
                             named(cause_name, r->ns_by_cause, MEMTRACE_N_CAUSES), "kinds",
                             named(kind_name, r->n_by_kind, sizeof r->n_by_kind / sizeof *r->n_by_kind));
    Py_XDECREF(steps), Py_XDECREF(regions), Py_XDECREF(stalls), Py_XDECREF(peaks);
    return NULL;
}

/* report(file, first_compared or none) */
static PyObject *report(PyObject *self, PyObject *args) {
    PyObject *handle;
    unsigned int first_compared = MEMTRACE_COMPARE_NONE;
    (void)self;
    if (!PyArg_ParseTuple(args, "O|I:report", &handle, &first_compared)) return NULL;
    memtrace_file *file = trace_file(handle);
    memtrace_report *r;
    if (!file) return NULL;
    Py_BEGIN_ALLOW_THREADS r = memtrace_report_create(file, first_compared);
    Py_END_ALLOW_THREADS if (!r) return PyErr_NoMemory();
    PyObject *dict = report_dict(file, r);
    memtrace_report_destroy(r);
    return dict;
}

PyMethodDef trace_methods_report[] = {
    {"report", report, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
