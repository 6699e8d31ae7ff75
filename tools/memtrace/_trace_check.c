/* _trace_check.c - the module's function of checks. */
#include "tools/memtrace/_trace.h"
#include "tools/memtrace/check.h"
#include "tools/memtrace/kinds.h"

/* Names beside numbers, since a reader of JSON has no list of kinds. */
static PyObject *violation_dict(memtrace_file *file, const memtrace_violation *v) {
    char label[64] = "";
    const fcdp_trace_event *e = &v->event;
    const memtrace_kind *kind = v->has_event ? memtrace_kind_of(e->kind) : NULL;
    const memtrace_cause *cause = v->has_event ? memtrace_cause_of(e->cause) : NULL;
    if (v->process < memtrace_file_summary(file).n_processes)
        memtrace_process_label(memtrace_file_process(file, v->process), label);
    PyObject *dict = Py_BuildValue("{s:s,s:s,s:N,s:N,s:O}", "rule", memtrace_rule_name(v->rule), "says",
                                   memtrace_rule_says(v->rule), "text", trace_text(v->text), "process",
                                   trace_text(label), "event", Py_None);
    if (!dict || !v->has_event) return dict;
    const char *region = memtrace_file_object_name(file, v->process, v->chunk, e->object);
    PyObject *event = Py_BuildValue("{s:K,s:I,s:s,s:s,s:K,s:K,s:K,s:I,s:N,s:I,s:I,s:I,s:K,s:K}", "number",
                                    e->stamp, "kind_number", (unsigned)e->kind, "kind",
                                    kind ? kind->name : "", "cause", cause ? cause->name : "", "time_ns",
                                    e->time_ns, "duration_ns", e->duration_ns, "bytes", e->bytes, "object",
                                    e->object, "region", trace_text(region), "step", e->step, "thread",
                                    e->thread, "flags", (unsigned)e->flags, "a", e->a, "b", e->b);
    if (trace_set(dict, "event", event)) return dict;
    Py_DECREF(dict);
    return NULL;
}

/* {name: how often the rule was applied} */
static PyObject *applied(const memtrace_checked *checked) {
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < MEMTRACE_N_RULES; i++)
        if (!trace_set(dict, memtrace_rule_name(i), PyLong_FromUnsignedLongLong(checked->n_by_rule[i])))
            Py_CLEAR(dict);
    return dict;
}

/* check(file, max_stall_ns, max_peak_bytes, max_inter_bytes, first_step) -> what was checked, and
 * "violation": None or it. */
static PyObject *check(PyObject *self, PyObject *args) {
    PyObject *handle;
    unsigned long long stall, peak, inter;
    unsigned int first_step;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKKKI:check", &handle, &stall, &peak, &inter, &first_step)) return NULL;
    memtrace_file *file = trace_file(handle);
    memtrace_gates gates = {stall, peak, inter, first_step};
    memtrace_checked checked;
    memtrace_violation violation;
    bool is_good;
    if (!file) return NULL;
    Py_BEGIN_ALLOW_THREADS is_good = memtrace_check(file, &gates, &checked, &violation);
    Py_END_ALLOW_THREADS PyObject *found = is_good ? Py_NewRef(Py_None) : violation_dict(file, &violation);
    return found ? Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:N,s:N}", "events", checked.n_events, "lost",
                                 checked.n_lost, "max_stall_ns", checked.max_stall_ns, "max_peak_bytes",
                                 checked.max_peak_bytes, "max_inter_bytes", checked.max_inter_bytes,
                                 "applied", applied(&checked), "violation", found)
                 : NULL;
}

/* [(name, says)] */
static PyObject *check_rules(PyObject *self, PyObject *unused) {
    PyObject *list = PyList_New(0);
    (void)self, (void)unused;
    for (int i = 0; list && i < MEMTRACE_N_RULES; i++)
        if (!trace_append(list, Py_BuildValue("(ss)", memtrace_rule_name(i), memtrace_rule_says(i))))
            Py_CLEAR(list);
    return list;
}

PyMethodDef trace_methods_check[] = {
    {"check", check, METH_VARARGS, NULL},
    {"check_rules", check_rules, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
