/* endpoint.c - one rank: its communicators, its operations on their way, and its first failure. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/net/internal.h"

static const char *const lane_names[] = {"inter", "intra", "world"};

const char *simnet__kind_name(uint32_t kind) {
    return kind == OP_ALL_GATHER ? "all-gather" : "reduce-scatter";
}

const char *simnet__describe(const simnet_op *op, char *text, size_t n) {
    snprintf(text, n, "operation %llu of %s/%u, %s %s of %zu bytes a rank", (unsigned long long)op->number,
             lane_names[op->comm->lane], op->comm->id, op->kind == OP_ALL_GATHER ? "an" : "a",
             simnet__kind_name(op->kind), op->bytes);
    return text;
}

/* ---- attaching ---- */

/* All of them at once: a communicator is a few words here, and its memory is there only once it is used. */
static fcdp_status comms_make(simnet_endpoint *endpoint) {
    shared_fabric *shared = endpoint->fabric->shared;
    endpoint->comms = calloc((size_t)SIMNET_N_LANES * shared->ids, sizeof *endpoint->comms);
    if (!endpoint->comms)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no memory for %u communicators", 3 * shared->ids);
    for (uint32_t i = 0; i < SIMNET_N_LANES * shared->ids; i++) {
        simnet_comm *comm = &endpoint->comms[i];
        comm->endpoint = endpoint;
        comm->lane = (simnet_lane)(i / shared->ids);
        comm->id = i % shared->ids;
        comm->n = simnet__members(shared, comm->lane, endpoint->rank, comm->ranks, &comm->me);
        comm->shared = simnet__shared_comm(shared, comm->lane, endpoint->rank, comm->id);
        comm->staging = simnet__staging(shared, comm->shared);
    }
    return FCDP_OK;
}

/* What a driver other than the simulated one lacks: modelled times, and what is ordered with what. */
static void symbols_find(simnet_endpoint *endpoint) {
    *(void **)&endpoint->ready_ns = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_ready_ns");
    *(void **)&endpoint->here_ns = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_here_ns");
    *(void **)&endpoint->end_at = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_end_at");
    *(void **)&endpoint->signal = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_signal");
    *(void **)&endpoint->observe = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_observe");
    *(void **)&endpoint->launch = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_launch");
    *(void **)&endpoint->announce = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_announce");
    *(void **)&endpoint->stand_in = fcdp__driver_sim_symbol(endpoint->drv, "simgpu_stand_in");
}

/* The rank is announced last: from then on others may wait for it. */
fcdp_status simnet_attach(simnet_fabric *fabric, uint32_t rank, fcdp_driver *drv,
                          simnet_endpoint **endpoint_out) {
    shared_fabric *shared = fabric->shared;
    if (rank >= shared->nodes * shared->ranks_per_node ||
        atomic_load(&shared->ranks[rank].state) != RANK_ABSENT)
        return fcdp__fail(FCDP_ERR_INVALID, "rank %u of %u x %u: there is none, or it was attached before",
                          rank, shared->nodes, shared->ranks_per_node);
    simnet_endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no memory for an endpoint");
    endpoint->fabric = fabric;
    endpoint->drv = drv;
    endpoint->rank = rank;
    symbols_find(endpoint);
    if (!endpoint->ready_ns || !endpoint->here_ns || !endpoint->end_at || !endpoint->signal ||
        !endpoint->observe || !endpoint->launch || !endpoint->announce || !endpoint->stand_in) {
        free(endpoint);
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "simnet needs the simulated driver, FCDP_DRIVER=sim");
    }
    fcdp_status status = comms_make(endpoint);
    if (status) {
        free(endpoint);
        return status;
    }
    pthread_mutex_init(&endpoint->lock, NULL);
    pthread_cond_init(&endpoint->changed, NULL);
    simnet__rank_begin(shared, rank);
    *endpoint_out = endpoint;
    return FCDP_OK;
}

void simnet_detach(simnet_endpoint *endpoint) {
    if (!endpoint) return;
    if (!atomic_load(&endpoint->has_failed))
        simnet__rank_end(endpoint->fabric->shared, endpoint->rank, RANK_LEFT, "");
    while (endpoint->ops) { /* those that a failed device never ran */
        simnet_op *op = endpoint->ops;
        endpoint->ops = op->next;
        free(op);
    }
    pthread_cond_destroy(&endpoint->changed);
    pthread_mutex_destroy(&endpoint->lock);
    free(endpoint->comms);
    free(endpoint);
}

simnet_comm *simnet_comm_get(simnet_endpoint *endpoint, simnet_lane lane, uint32_t id) {
    uint32_t ids = endpoint->fabric->shared->ids;
    return lane < SIMNET_N_LANES && id < ids ? &endpoint->comms[(uint32_t)lane * ids + id] : NULL;
}

uint32_t simnet_comm_size(const simnet_comm *comm) {
    return comm->n;
}

uint32_t simnet_comm_index(const simnet_comm *comm) {
    return comm->me;
}

uint64_t simnet_comm_operations(simnet_comm *comm) {
    pthread_mutex_lock(&comm->endpoint->lock);
    uint64_t n = comm->n_enqueued;
    pthread_mutex_unlock(&comm->endpoint->lock);
    return n;
}

/* ---- failures ---- */

/* Under the endpoint's lock, so that `text` is complete before anybody may read it. */
static void latch_locked(simnet_endpoint *endpoint, fcdp_status status, const char *cause, const char *text) {
    if (endpoint->status) return;
    snprintf(endpoint->text, sizeof endpoint->text, "%s", text);
    endpoint->status = status;
    atomic_store(&endpoint->has_failed, 1);
    simnet__rank_end(endpoint->fabric->shared, endpoint->rank, RANK_FAILED, cause ? cause : endpoint->text);
    pthread_cond_broadcast(&endpoint->changed);
}

void simnet__latch(simnet_endpoint *endpoint, fcdp_status status, const char *cause, const char *format,
                   ...) {
    char text[SIMNET_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&endpoint->lock);
    latch_locked(endpoint, status, cause, text);
    pthread_mutex_unlock(&endpoint->lock);
}

fcdp_status simnet_status(simnet_endpoint *endpoint, char *text, size_t n) {
    pthread_mutex_lock(&endpoint->lock);
    fcdp_status status = endpoint->status;
    if (text && n) snprintf(text, n, "%s", endpoint->text);
    pthread_mutex_unlock(&endpoint->lock);
    return status;
}

void simnet_abort(simnet_endpoint *endpoint) {
    simnet__latch(endpoint, FCDP_ERR_TRANSPORT, NULL, "rank %u: aborted", endpoint->rank);
}

void simnet_fail_nth(simnet_endpoint *endpoint, uint64_t n, simnet_fault fault) {
    pthread_mutex_lock(&endpoint->lock);
    endpoint->until_fault = n;
    endpoint->fault = fault;
    pthread_mutex_unlock(&endpoint->lock);
}

/* ---- operations ---- */

static void op_link(simnet_endpoint *endpoint, simnet_op *op) {
    op->next = endpoint->ops;
    if (op->next) op->next->previous = op;
    endpoint->ops = op;
}

static void op_unlink(simnet_endpoint *endpoint, simnet_op *op) {
    *(op->previous ? &op->previous->next : &endpoint->ops) = op->next;
    if (op->next) op->next->previous = op->previous;
}

/* Operations of one communicator take their turns, on whatever streams they are. */
static void op_run(void *context) {
    simnet_op *op = context;
    simnet_comm *comm = op->comm;
    simnet_endpoint *endpoint = comm->endpoint;
    pthread_mutex_lock(&endpoint->lock);
    while (comm->n_done < op->number && !endpoint->status)
        pthread_cond_wait(&endpoint->changed, &endpoint->lock);
    bool runs = !endpoint->status;
    pthread_mutex_unlock(&endpoint->lock);
    if (runs) simnet__run(op);
    pthread_mutex_lock(&endpoint->lock);
    comm->n_done++;
    op_unlink(endpoint, op);
    pthread_cond_broadcast(&endpoint->changed);
    pthread_mutex_unlock(&endpoint->lock);
    free(op);
}

/* What the operation will read and write, for the simulated driver's checks: in place, an
 * all-gather reads its own part only. A host function can announce eight ranges, so kernels of
 * no duration before it say the rest. */
static void announce(const simnet_op *op, fcdp_stream stream) {
    simnet_endpoint *endpoint = op->comm->endpoint;
    struct simgpu_kernel touch = {.name = "all-gather"};
    if (op->kind == OP_REDUCE_SCATTER) {
        touch.accesses[touch.n_accesses++] = (struct simgpu_access){(uintptr_t)op->from,
                                                                    op->comm->n * op->bytes, 0};
        touch.accesses[touch.n_accesses++] = (struct simgpu_access){(uintptr_t)op->to, op->bytes, 1};
    }
    for (size_t p = 0; p < op->n_parts; p++)
        for (uint32_t i = 0; i < op->comm->n && op->parts[p].bytes > 0; i++) {
            if (touch.n_accesses == SIMGPU_MAX_ACCESSES) {
                (void)endpoint->launch(stream, &touch); /* where it fails, so does the operation behind it */
                touch.n_accesses = 0;
            }
            uint64_t at = op->parts[p].at.addr + i * op->parts[p].stride_bytes;
            touch.accesses[touch.n_accesses++] = (struct simgpu_access){at, op->parts[p].bytes,
                                                                        i != op->comm->me};
        }
    (void)endpoint->announce(touch.accesses, touch.n_accesses);
    endpoint->stand_in();
}

/* The fault that was asked for, if it is this operation's; under the lock. */
static fcdp_status fault_apply(simnet_endpoint *endpoint, simnet_op *op) {
    if (!endpoint->until_fault || --endpoint->until_fault > 0) return FCDP_OK;
    char text[128];
    op->fails = endpoint->fault == SIMNET_FAULT_FAIL;
    op->stalls = endpoint->fault == SIMNET_FAULT_STALL;
    if (endpoint->fault != SIMNET_FAULT_CALL) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_TRANSPORT, "rank %u: %s was made to fail", endpoint->rank,
                      simnet__describe(op, text, sizeof text));
}

/* Numbered and put on its stream under one lock, so that threads cannot swap the two. */
static fcdp_status enqueue_locked(simnet_endpoint *endpoint, simnet_op *op, fcdp_stream stream) {
    if (endpoint->status) return fcdp__fail(endpoint->status, "%s", endpoint->text);
    op->number = op->comm->n_enqueued;
    fcdp_status status = fault_apply(endpoint, op);
    if (status) return status;
    announce(op, stream);
    op_link(endpoint, op);
    op->comm->n_enqueued++;
    status = fcdp__driver_host_function(endpoint->drv, stream, op_run, op);
    if (!status) return FCDP_OK;
    op->comm->n_enqueued--;
    op_unlink(endpoint, op);
    return status;
}

/* An operation on `comm`, to be filled in and enqueued. NULL: no memory. */
static simnet_op *op_make(simnet_comm *comm, op_kind kind, size_t n_parts) {
    simnet_op *op = calloc(1, sizeof *op + n_parts * sizeof op->parts[0]);
    if (!op) return NULL;
    op->comm = comm;
    op->kind = kind;
    op->n_parts = n_parts;
    return op;
}

/* Takes the operation over. */
static fcdp_status enqueue(simnet_op *op, fcdp_stream stream) {
    simnet_endpoint *endpoint = op->comm->endpoint;
    pthread_mutex_lock(&endpoint->lock);
    fcdp_status status = enqueue_locked(endpoint, op, stream);
    pthread_mutex_unlock(&endpoint->lock);
    if (status) free(op);
    return status;
}

/* As enqueue, and to its end. */
static fcdp_status run_here(simnet_op *op) {
    simnet_endpoint *endpoint = op->comm->endpoint;
    char text[SIMNET_TEXT_BYTES];
    pthread_mutex_lock(&endpoint->lock);
    fcdp_status status = endpoint->status ? fcdp__fail(endpoint->status, "%s", endpoint->text)
                                          : fault_apply(endpoint, op);
    op->number = op->comm->n_enqueued;
    if (!status) {
        op_link(endpoint, op);
        op->comm->n_enqueued++;
    }
    pthread_mutex_unlock(&endpoint->lock);
    if (status) {
        free(op);
        return status;
    }
    op_run(op);
    status = simnet_status(endpoint, text, sizeof text);
    return status ? fcdp__fail(status, "%s", text) : FCDP_OK;
}

/* FNV-1a over the sizes: members that differ in them are told so, not given each other's bytes. */
static void shape_add(uint64_t *shape, uint64_t value) {
    *shape = (*shape ^ value) * 0x100000001b3u;
}

static simnet_op *gather_make(simnet_comm *comm, const simnet_part *parts, size_t n) {
    simnet_op *op = op_make(comm, OP_ALL_GATHER, n);
    if (!op) return NULL;
    op->shape = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) {
        op->parts[i] = parts[i];
        op->bytes += parts[i].bytes;
        shape_add(&op->shape, parts[i].bytes);
        shape_add(&op->shape, parts[i].stride_bytes);
    }
    return op;
}

fcdp_status simnet_all_gather_parts(simnet_comm *comm, const simnet_part *parts, size_t n,
                                    fcdp_stream stream) {
    for (size_t i = 0; i < n; i++)
        if (parts[i].stride_bytes < parts[i].bytes)
            return fcdp__fail(FCDP_ERR_INVALID, "part %zu of an all-gather: %zu bytes a rank, %zu apart", i,
                              parts[i].bytes, parts[i].stride_bytes);
    simnet_op *op = gather_make(comm, parts, n);
    if (!op) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no memory for an operation of %zu parts", n);
    return enqueue(op, stream);
}

fcdp_status simnet_all_gather(simnet_comm *comm, fcdp_dptr at, size_t bytes, fcdp_stream stream) {
    return simnet_all_gather_parts(comm, &(simnet_part){at, bytes, bytes}, 1, stream);
}

fcdp_status simnet_exchange(simnet_comm *comm, void *buffer, size_t bytes) {
    simnet_op *op = gather_make(comm, &(simnet_part){{(uintptr_t)buffer}, bytes, bytes}, 1);
    if (!op) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no memory for an exchange");
    op->within = true;
    return run_here(op);
}

fcdp_status simnet_reduce_scatter(simnet_comm *comm, fcdp_dptr from, fcdp_dptr to, size_t bytes,
                                  fcdp_stream stream) {
    if (bytes % sizeof(float))
        return fcdp__fail(FCDP_ERR_INVALID, "a reduce-scatter of %zu bytes a rank: no whole number of floats",
                          bytes);
    simnet_op *op = op_make(comm, OP_REDUCE_SCATTER, 0);
    if (!op) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no memory for an operation");
    op->from = (char *)(uintptr_t)from.addr;
    op->to = (char *)(uintptr_t)to.addr;
    op->bytes = bytes;
    return enqueue(op, stream);
}
