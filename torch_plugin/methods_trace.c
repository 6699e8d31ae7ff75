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

/* () -> has the trace its level and size by now? */
METHOD(trace_is_open) {
    if (!PyArg_ParseTuple(args, ":trace_is_open")) return NULL;
    return PyBool_FromLong(fcdp__trace_header() != NULL);
}

/* (rank, world_size, node, n_nodes, local_rank, node_size): this process's place in the job. */
METHOD(trace_job) {
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

/* (steps of optimizers so far) */
METHOD(trace_step) {
    unsigned int steps;
    if (!PyArg_ParseTuple(args, "I:trace_step", &steps)) return NULL;
    fcdp_trace_header *header = fcdp__trace_header();
    if (!header) Py_RETURN_NONE;
    fcdp__trace_now(FCDP_EVENT_STEP, 0, 0, steps, 0);
    fcdp__trace_set(FCDP_COUNT_STEPS, steps);
    atomic_store_explicit(&header->step, steps, memory_order_relaxed);
    Py_RETURN_NONE;
}

/* () -> the time, for those below; 0: nothing is traced */
METHOD(trace_start) {
    if (!PyArg_ParseTuple(args, ":trace_start")) return NULL;
    binding_trace_open();
    return PyLong_FromUnsignedLongLong(fcdp__trace_start());
}

/* (start, collectives since the last call, bytes that this rank sent to other nodes): ranks agreed, on
 * whatever. */
METHOD(trace_agreement) {
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

/* (is it a gather, bytes to the next of the ring, do they leave the node (None: it is not known), ranks,
 * start): a collective of FSDP2's own, which the program has waited for since start. 0: it begins now, on a
 * stream, and its end is not known. */
METHOD(trace_plain) {
    int gathers;
    unsigned long long bytes, start_ns;
    PyObject *crosses;
    unsigned int n_ranks;
    if (!PyArg_ParseTuple(args, "pKOIK:trace_plain", &gathers, &bytes, &crosses, &n_ranks, &start_ns))
        return NULL;
    binding_trace_open();
    uint64_t inter = crosses == Py_True ? bytes : 0, intra = crosses == Py_False ? bytes : 0;
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

/* (name, reason, bytes, trainable_bytes): the group is FSDP's from here on. */
METHOD(trace_bypass) {
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
    ENTRY(trace_is_open),   ENTRY(trace_job),   ENTRY(trace_step),   ENTRY(trace_start),
    ENTRY(trace_agreement), ENTRY(trace_plain), ENTRY(trace_bypass), {NULL, NULL, 0, NULL},
};
