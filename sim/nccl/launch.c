/* launch.c - groups, and what becomes of them: one operation of simnet's, and behind it a hold, which a
 * failed operation does not pass before its communicator is aborted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/nccl/internal.h"
#include "sim/nccl/nccl_entries.h"

typedef enum op_kind { OP_ALL_GATHER, OP_SEND, OP_RECV } op_kind;

typedef struct group_op {
    op_kind kind;
    ncclComm_t comm;
    uint64_t from, to;
    size_t count;
    int peer;
    fcdp_stream stream;
} group_op;

static _Thread_local struct {
    unsigned depth;
    group_op *ops;
    size_t n, room;
    ncclResult_t failure; /* of a call in it: nothing of it is launched */
} group;

unsigned simnccl__group_depth(void) {
    return group.depth;
}

/* ---- what a group is, as parts ---- */

static ncclResult_t part_of_all_gather(const group_op *op, simnet_part *part_out) {
    uint64_t place = op->to + op->comm->rank * op->count, end = op->to + op->comm->n * op->count;
    if (op->from != place && op->from + op->count > op->to && op->from < end)
        return simnccl__broken(
            ncclInvalidArgument,
            "ncclAllGather: rank %u sends from recvbuff + %lld in place; it must be + rank * count, %zu",
            op->comm->rank, (long long)(op->from - op->to), op->comm->rank * op->count);
    if (op->from != place)
        return simnccl__broken(ncclInternalError, "ncclAllGather out of place is not modelled");
    *part_out = (simnet_part){{op->to}, op->count, op->count};
    return ncclSuccess;
}

/* The k-th send to a peer, or receive from it; NULL: there are not so many. */
static const group_op *find(op_kind kind, int peer, size_t k) {
    for (size_t i = 0; i < group.n; i++)
        if (group.ops[i].kind == kind && group.ops[i].peer == peer && k-- == 0) return &group.ops[i];
    return NULL;
}

static size_t count_of(op_kind kind, int peer) {
    size_t n = 0;
    for (size_t i = 0; i < group.n; i++) n += group.ops[i].kind == kind && group.ops[i].peer == peer;
    return n;
}

/* The k-th with every peer: the same bytes to all, and theirs at one stride from each other. */
static ncclResult_t part_of_exchange(const ncclComm_t comm, size_t k, simnet_part *part_out) {
    int64_t me = comm->rank, stride = 0;
    const group_op *first = find(OP_SEND, me ? 0 : 1, k);
    for (int64_t peer = 0; peer < (int64_t)comm->n && first; peer++) {
        const group_op *send = find(OP_SEND, (int)peer, k), *recv = find(OP_RECV, (int)peer, k);
        if (peer == me) continue;
        bool alike = send && recv && send->from == first->from && send->count == first->count &&
                     recv->count == first->count;
        int64_t apart = alike ? (int64_t)(recv->to - send->from) : 0;
        if (alike && !stride) stride = apart / (peer - me);
        if (!alike || apart != stride * (peer - me)) first = NULL;
    }
    if (!first || stride < (int64_t)first->count)
        return simnccl__broken(
            ncclInternalError,
            "sends and receives that are not an all-gather with a stride are not modelled");
    *part_out = (simnet_part){{first->from - (uint64_t)(me * stride)}, first->count, (size_t)stride};
    return ncclSuccess;
}

static ncclResult_t exchanges_count(const ncclComm_t comm, size_t *n_out) {
    *n_out = count_of(OP_SEND, comm->rank ? 0 : 1);
    for (uint32_t peer = 0; peer < comm->n; peer++) {
        size_t expected = peer == comm->rank ? 0 : *n_out;
        if (count_of(OP_SEND, (int)peer) != expected || count_of(OP_RECV, (int)peer) != expected)
            return simnccl__broken(
                ncclInternalError,
                "as many sends to and receives from every other rank, or it is not modelled");
    }
    return ncclSuccess;
}

static ncclResult_t group_check(void) {
    const group_op *first = &group.ops[0];
    for (size_t i = 1; i < group.n; i++)
        if (group.ops[i].comm != first->comm || group.ops[i].stream != first->stream)
            return simnccl__broken(ncclInternalError,
                                   "several communicators or streams in a group are not modelled");
    return ncclSuccess;
}

/* How NCCL would carry them: each is another algorithm, with connections of its own. */
static uint32_t op_ways(const group_op *op) {
    if (op->kind != OP_ALL_GATHER) return SIMNCCL_WAY_PEERS;
    return op->count * op->comm->n < SIMNCCL_LARGE_BYTES ? SIMNCCL_WAY_SMALL : SIMNCCL_WAY_LARGE;
}

/* The group, as its communicator's next operation. */
static ncclResult_t group_begin(void) {
    ncclComm_t comm = group.ops[0].comm;
    size_t n_exchanges = 0, n = 0;
    ncclResult_t result = group_check();
    if (result == ncclSuccess) result = exchanges_count(comm, &n_exchanges);
    simnet_part *parts = malloc((group.n + 1) * sizeof *parts);
    if (!parts) abort();
    for (size_t i = 0; i < group.n && result == ncclSuccess; i++)
        if (group.ops[i].kind == OP_ALL_GATHER) result = part_of_all_gather(&group.ops[i], &parts[n++]);
    for (size_t k = 0; k < n_exchanges && result == ncclSuccess; k++)
        result = part_of_exchange(comm, k, &parts[n++]);
    if (result != ncclSuccess) {
        free(parts);
        return result;
    }
    comm->parts = parts;
    comm->n_parts = n;
    comm->stream = group.ops[0].stream;
    comm->polls_left = POLLS_IN_PROGRESS;
    comm->user = pthread_self();
    comm->wanted = 0;
    for (size_t i = 0; i < group.n; i++) comm->wanted |= op_ways(&group.ops[i]);
    atomic_fetch_or(&comm->page->members[comm->rank].begun, comm->wanted);
    return ncclInProgress;
}

/* ---- the members' launches ---- */

static uint64_t shape_of(const ncclComm_t comm) {
    uint64_t shape = 0xcbf29ce484222325u;
    for (size_t i = 0; i < comm->n_parts; i++) {
        shape = (shape ^ comm->parts[i].bytes) * 0x100000001b3u;
        shape = (shape ^ comm->parts[i].stride_bytes) * 0x100000001b3u;
    }
    return shape;
}

static void page_break(page *page, const char *text) {
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&page->broken, &none, 1)) return;
    snprintf(page->text, sizeof page->text, "%s", text);
    atomic_store_explicit(&page->broken, 2, memory_order_release);
}

/* Another member's launch of the same number, if it is there and has not been written over. */
static bool launch_read(page_launch *other, uint64_t number, uint64_t *place_out, uint64_t *shape_out) {
    if (atomic_load(&other->number) != number) return false;
    *place_out = atomic_load(&other->place);
    *shape_out = atomic_load(&other->shape);
    return atomic_load(&other->number) == number;
}

/* Each rank writes its own before it looks at the others': the later one sees what is
 * wrong, and tells the others by the page. */
static ncclResult_t launch_compare(ncclComm_t comm, uint64_t place) {
    uint64_t number = ++comm->n_launched, shape = shape_of(comm), other_place, other_shape;
    page_launch *own = &comm->page->members[comm->rank].launches[number % SIMNCCL_LOG];
    atomic_store(&own->number, 0);
    atomic_store(&own->place, place);
    atomic_store(&own->shape, shape);
    atomic_store(&own->number, number);
    for (uint32_t i = 0; i < comm->n; i++) {
        if (!launch_read(&comm->page->members[i].launches[number % SIMNCCL_LOG], number, &other_place,
                         &other_shape))
            continue;
        if (other_place == place && other_shape == shape) continue;
        ncclResult_t result =
            other_shape != shape
                ? simnccl__broken(ncclInvalidUsage,
                                  "operation %llu of a communicator has other counts on ranks %u and %u",
                                  (unsigned long long)number, comm->rank, i)
                : simnccl__broken(
                      ncclInvalidUsage,
                      "operation %llu of a communicator is launch %llu of rank %u's device and %llu of rank "
                      "%u's: the launch order across communicators differs",
                      (unsigned long long)number, (unsigned long long)place, comm->rank,
                      (unsigned long long)other_place, i);
        page_break(comm->page, simnccl.last_error);
        return result;
    }
    return ncclSuccess;
}

/* ---- on the stream ---- */

/* On the stream's thread. A kernel of NCCL's whose peers are gone spins until its communicator is aborted.
 * Otherwise this takes no time. */
static void hold(void *context) {
    ncclComm_t comm = context;
    comm->device->end_at(comm->device->ready_ns());
    pthread_mutex_lock(&simnccl.lock);
    while (simnet_status(comm->device->endpoint, NULL, 0) != FCDP_OK && comm->state != COMM_ABORTED)
        pthread_cond_wait(&simnccl.changed, &simnccl.lock);
    comm->device->in_flight--;
    pthread_cond_broadcast(&simnccl.changed);
    pthread_mutex_unlock(&simnccl.lock);
}

static ncclResult_t comm_connect(ncclComm_t comm) {
    fcdp_driver *drv = comm->device->drv;
    size_t bytes = fcdp__round_up(simnccl.connection_bytes, fcdp__driver_page_bytes(drv));
    for (int way = 0; way < SIMNCCL_N_WAYS; way++) {
        if (!(comm->wanted & ~comm->connected & 1u << way)) continue;
        if (bytes && fcdp__driver_phys_create(drv, bytes, &comm->memory[way])) {
            comm->memory[way] = (fcdp_phys){0};
            snprintf(simnccl.last_error, sizeof simnccl.last_error, "Cuda failure 'out of memory': %s",
                     fcdp_error_text());
            return ncclUnhandledCudaError;
        }
        comm->connected |= 1u << way;
        simnccl.state.connections++;
    }
    return ncclSuccess;
}

void simnccl__disconnect(ncclComm_t comm) {
    for (int way = 0; way < SIMNCCL_N_WAYS; way++)
        if (comm->memory[way].handle) (void)!fcdp__driver_phys_release(comm->device->drv, comm->memory[way]);
    memset(comm->memory, 0, sizeof comm->memory);
}

/* The hold is behind the operation, on its stream. */
ncclResult_t simnccl__launch(ncclComm_t comm) {
    sim_device *device = comm->device;
    simnccl.state.launches++;
    ncclResult_t result = comm_connect(comm);
    if (result == ncclSuccess) result = launch_compare(comm, ++device->n_launches);
    if (result == ncclSuccess &&
        simnet_all_gather_parts(comm->net, comm->parts, comm->n_parts, comm->stream)) {
        snprintf(simnccl.last_error, sizeof simnccl.last_error, "%s", fcdp_error_text());
        result = ncclSystemError;
    }
    free(comm->parts);
    comm->parts = NULL;
    if (result != ncclSuccess) return result;
    device->in_flight++;
    if (!fcdp__driver_host_function(device->drv, comm->stream, hold, comm)) return ncclSuccess;
    device->in_flight--;
    snprintf(simnccl.last_error, sizeof simnccl.last_error, "%s", fcdp_error_text());
    return ncclUnhandledCudaError;
}

/* ---- the calls ---- */

static ncclResult_t group_fail(ncclResult_t result) {
    if (result != ncclSuccess && group.failure == ncclSuccess) group.failure = result;
    return result;
}

static ncclResult_t op_check(const char *call, const group_op *op, int type) {
    if (type < 0 || type > 1)
        return simnccl__broken(ncclInternalError, "%s: types other than bytes are not modelled", call);
    if (op->comm->state != COMM_READY)
        return simnccl__broken(ncclInvalidUsage, "%s: the communicator is not there, or not any more", call);
    if (op->comm->polls_left)
        return simnccl__broken(ncclInvalidUsage, "%s: the communicator is in progress", call);
    if (op->kind == OP_ALL_GATHER ||
        (op->peer >= 0 && (uint32_t)op->peer < op->comm->n && (uint32_t)op->peer != op->comm->rank))
        return op->comm->failure;
    return simnccl__broken(ncclInvalidArgument, "%s: peer %d of %u, by rank %u", call, op->peer, op->comm->n,
                           op->comm->rank);
}

/* With the lock, in a group. */
static ncclResult_t op_add(const char *call, group_op op, int type) {
    ncclResult_t result = op_check(call, &op, type);
    if (result != ncclSuccess) return group_fail(result);
    if (group.n == group.room) {
        group.room = 2 * group.room + 16;
        group.ops = realloc(group.ops, group.room * sizeof *group.ops);
        if (!group.ops) abort();
    }
    group.ops[group.n++] = op;
    return ncclSuccess;
}

static ncclResult_t op_call(sim_entry entry, const char *call, group_op op, int type) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(entry);
    if (result == ncclSuccess && group.depth == 0)
        result = simnccl__broken(ncclInternalError, "%s outside of a group is not modelled", call);
    result = result == ncclSuccess ? op_add(call, op, type) : group_fail(result);
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

SIMNCCL_API ncclResult_t ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm_t comm,
                                       fcdp_stream stream) {
    group_op op = {OP_ALL_GATHER, comm, (uintptr_t)from, (uintptr_t)to, count, -1, stream};
    return op_call(ENTRY_ncclAllGather, "ncclAllGather", op, type);
}

SIMNCCL_API ncclResult_t ncclSend(const void *from, size_t count, int type, int peer, ncclComm_t comm,
                                  fcdp_stream stream) {
    group_op op = {OP_SEND, comm, (uintptr_t)from, 0, count, peer, stream};
    return op_call(ENTRY_ncclSend, "ncclSend", op, type);
}

SIMNCCL_API ncclResult_t ncclRecv(void *to, size_t count, int type, int peer, ncclComm_t comm,
                                  fcdp_stream stream) {
    group_op op = {OP_RECV, comm, 0, (uintptr_t)to, count, peer, stream};
    return op_call(ENTRY_ncclRecv, "ncclRecv", op, type);
}

SIMNCCL_API ncclResult_t ncclGroupStart(void) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclGroupStart);
    if (result == ncclSuccess) group.depth++, simnccl.state.groups++;
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

/* The outermost one's end. A call that failed takes the whole group with it. */
static ncclResult_t group_end(void) {
    ncclResult_t result = group.failure;
    if (result == ncclSuccess && group.n > 0) result = group_begin();
    group.n = 0;
    group.failure = ncclSuccess;
    free(group.ops);
    group.ops = NULL;
    group.room = 0;
    return result;
}

SIMNCCL_API ncclResult_t ncclGroupEnd(void) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclGroupEnd);
    group_fail(result);
    if (group.depth == 0)
        result = simnccl__broken(ncclInvalidUsage, "ncclGroupEnd: not in a group");
    else if (simnccl.state.groups--, --group.depth == 0)
        result = group_end();
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}
