/* methods_trace.c - the module's functions of the trace: they write what Python alone knows. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/trace.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/trace_events.h"

void binding_trace_open(void) {
    const fcdp_options *options = binding_options();
    fcdp_trace_open((uint32_t)options->trace, options->trace_bytes);
}

FUNCTION_NOARGS(trace_is_open) {
    return PyBool_FromLong(fcdp__trace_header() != NULL);
}

FUNCTION(trace_job) {
    int rank, world_size, node, n_nodes, local_rank, node_size;
    if (!PyArg_ParseTuple(args, "iiiiii:trace_job", &rank, &world_size, &node, &n_nodes, &local_rank,
                          &node_size))
        return NULL;
    binding_trace_open();
    fcdp_trace_header *header = fcdp__trace_header();
    if (!header) Py_RETURN_NONE;
    atomic_store_explicit(&header->rank, rank, memory_order_relaxed);
    atomic_store_explicit(&header->world_size, world_size, memory_order_relaxed);
    atomic_store_explicit(&header->node, node, memory_order_relaxed);
    atomic_store_explicit(&header->n_nodes, n_nodes, memory_order_relaxed);
    atomic_store_explicit(&header->local_rank, local_rank, memory_order_relaxed);
    atomic_store_explicit(&header->node_size, node_size, memory_order_relaxed);
    Py_RETURN_NONE;
}

FUNCTION(trace_step) {
    unsigned int steps;
    if (!PyArg_ParseTuple(args, "I:trace_step", &steps)) return NULL;
    fcdp_trace_header *header = fcdp__trace_header();
    if (!header) Py_RETURN_NONE;
    fcdp__trace_now(FCDP_EVENT_STEP, 0, 0, steps, 0);
    fcdp__trace_set(FCDP_COUNT_STEPS, steps);
    atomic_store_explicit(&header->step, steps, memory_order_relaxed);
    Py_RETURN_NONE;
}

FUNCTION_NOARGS(trace_start) {
    binding_trace_open();
    return PyLong_FromUnsignedLongLong(fcdp__trace_start());
}

FUNCTION(trace_agreement) {
    unsigned long long start_ns, n_calls, bytes;
    if (!PyArg_ParseTuple(args, "KKK:trace_agreement", &start_ns, &n_calls, &bytes)) return NULL;
    fcdp__trace_since(
        start_ns,
        (fcdp_trace_event){.kind = FCDP_EVENT_HOST_WAIT, .cause = FCDP_CAUSE_FOR_AGREEMENT, .bytes = bytes});
    fcdp__trace_count(FCDP_COUNT_AGREE_CALLS, n_calls);
    fcdp__trace_count(FCDP_COUNT_AGREE_INTER_BYTES, bytes);
    uint64_t now_ns = fcdp__trace_start();
    fcdp__trace_count(FCDP_COUNT_AGREE_NS, now_ns > start_ns ? now_ns - start_ns : 0);
    Py_RETURN_NONE;
}

FUNCTION(trace_plain) {
    int gathers;
    unsigned long long bytes, start_ns;
    PyObject *between;
    unsigned int n_ranks;
    if (!PyArg_ParseTuple(args, "pKOIK:trace_plain", &gathers, &bytes, &between, &n_ranks, &start_ns))
        return NULL;
    uint64_t inter = 0, intra = 0;
    if (between != Py_None) {
        inter = PyLong_AsUnsignedLongLong(between);
        if (PyErr_Occurred()) return NULL;
        intra = bytes - inter;
    }
    binding_trace_open();
    uint16_t kind = gathers ? FCDP_EVENT_PLAIN_GATHER : FCDP_EVENT_REDUCE_SCATTER;
    if (start_ns)
        fcdp__trace_since(start_ns,
                          (fcdp_trace_event){.kind = kind, .bytes = bytes, .a = inter, .b = n_ranks});
    else
        fcdp__trace_now(kind, 0, bytes, inter, n_ranks);
    fcdp__trace_count(gathers ? FCDP_COUNT_PLAIN_GATHER_CALLS : FCDP_COUNT_REDUCE_SCATTER_CALLS, 1);
    fcdp__trace_count(gathers ? FCDP_COUNT_PLAIN_GATHER_INTER_BYTES : FCDP_COUNT_REDUCE_SCATTER_INTER_BYTES,
                      inter);
    fcdp__trace_count(gathers ? FCDP_COUNT_PLAIN_GATHER_INTRA_BYTES : FCDP_COUNT_REDUCE_SCATTER_INTRA_BYTES,
                      intra);
    if (gathers) fcdp__trace_count(FCDP_COUNT_BESIDE_BYTES, bytes);
    Py_RETURN_NONE;
}

/* The object with which the text begins; 0: there is no place. The groups of a model are mostly left for one
 * reason: its text is kept once, in pieces, of which the last is made first. Under the GIL. */
static uint32_t reason_of(const char *reason) {
    enum { PIECE = FCDP_TRACE_NAME_BYTES - 1 };
    static char last[1024];
    static uint32_t number;
    static pid_t pid;
    if (number && pid == getpid() && strncmp(last, reason, sizeof last - 1) == 0) return number;
    snprintf(last, sizeof last, "%s", reason);
    pid = getpid();
    number = 0;
    for (size_t i = (strlen(last) + PIECE - 1) / PIECE; i-- > 0;) {
        number = fcdp__trace_object_add(
            &(fcdp_trace_new){.name = last + i * PIECE, .state = FCDP_OBJECT_TEXT, .why = number});
        if (!number) break;
    }
    return number;
}

FUNCTION(trace_bypass) {
    const char *name, *reason;
    unsigned long long bytes, trainable_bytes;
    if (!PyArg_ParseTuple(args, "ssKK:trace_bypass", &name, &reason, &bytes, &trainable_bytes)) return NULL;
    binding_trace_open();
    uint32_t number = fcdp__trace_object_add(
        &(fcdp_trace_new){.name = name[0] ? name : "(root)",
                          .state = FCDP_OBJECT_LIVE | FCDP_OBJECT_BYPASSED,
                          .why = reason_of(reason),
                          .bytes = bytes,
                          .trainable_bytes = trainable_bytes});
    fcdp__trace_now(FCDP_EVENT_BYPASS, number, 0, 0, 0);
    fcdp__trace_count(FCDP_COUNT_BYPASSED, 1);
    Py_RETURN_NONE;
}

PyMethodDef methods_trace[] = {
    {"trace_is_open", trace_is_open, METH_NOARGS,
     DOC("trace_is_open($module, /)",
         "Has the trace its level and size (FCDP_TRACE, FCDP_TRACE_BUFFER) by now?")},
    {"trace_job", trace_job, METH_VARARGS,
     DOC("trace_job($module, rank, world_size, node, n_nodes, local_rank, node_size, /)",
         "Write this process's place in the job into the trace's header.")},
    {"trace_step", trace_step, METH_VARARGS,
     DOC("trace_step($module, n_steps, /)", "An optimizer has stepped; n_steps: so far in this process.")},
    {"trace_start", trace_start, METH_NOARGS,
     DOC("trace_start($module, /)",
         "The time now, in nanoseconds, for trace_agreement and trace_plain; 0: nothing is traced.")},
    {"trace_agreement", trace_agreement, METH_VARARGS,
     DOC("trace_agreement($module, start_ns, n_calls, n_bytes, /)",
         "The ranks have agreed on something since start_ns. n_calls: agreements since the last call;\n"
         "n_bytes: what this rank sent to other nodes.")},
    {"trace_plain", trace_plain, METH_VARARGS,
     DOC("trace_plain($module, is_gather, n_bytes, inter_bytes, n_ranks, start_ns, /)",
         "A collective in the place of FSDP's own: an all-gather, or a reduce-scatter.\n\n"
         "n_bytes: what this rank sends. inter_bytes: those of them that leave the node; None: it is not\n"
         "known. start_ns: the program has waited for it since then; 0: it begins now, on a stream.")},
    {"trace_bypass", trace_bypass, METH_VARARGS,
     DOC("trace_bypass($module, name, reason, n_bytes, trainable_bytes, /)",
         "A parameter group is left to FSDP. n_bytes, trainable_bytes: its size, and that of its\n"
         "trainable parameters; 0: not known.")},
    {NULL, NULL, 0, NULL},
};
