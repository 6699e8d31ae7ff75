/* collective.c - how the members of a communicator carry one operation out.
 *
 * In rounds: each member puts a piece of what the others need into its staging memory and says so
 * (`written`); once all have, each takes what is its own and says so (`read`); once all have, the staging
 * memory is free again, and the operation ends where that was its last round. With the first `written` a
 * member also says which operation it is in, so that all see it when they disagree.
 */
#include <stdio.h>
#include <string.h>

#include "sim/net/internal.h"

/* ---- waiting for the others ---- */

static _Atomic uint64_t *word_of(shared_member *member, bool read) {
    return read ? &member->read : &member->written;
}

/* The members that have not come so far yet, as a mask by index. */
static uint64_t missing_members(const simnet_comm *comm, bool read, uint64_t target) {
    uint64_t missing = 0;
    for (uint32_t i = 0; i < comm->n; i++)
        if (atomic_load_explicit(word_of(&comm->shared->members[i], read), memory_order_acquire) < target)
            missing |= (uint64_t)1 << i;
    return missing;
}

/* "rank 3", or "ranks 1, 3" */
static const char *name_ranks(const simnet_comm *comm, uint64_t members, char *text, size_t n) {
    size_t at = (size_t)snprintf(text, n, "rank%s", members & (members - 1) ? "s" : "");
    const char *before = " ";
    for (uint32_t i = 0; i < comm->n && at < n; i++) {
        if (!(members >> i & 1)) continue;
        at += (size_t)snprintf(text + at, n - at, "%s%u", before, comm->ranks[i]);
        before = ", ";
    }
    return text;
}

/* What a waiting member looks at: its operation, and how far all must come. */
typedef struct waiting {
    const simnet_op *op;
    bool read;
    uint64_t target;
    uint64_t begin_ns, looked_ns;
} waiting;

/* A rank that goes after it has done its part is not missed: so its word is looked at once more, after the
 * rank. */
static bool fail_gone(const waiting *wait, uint64_t missing, bool look) {
    const simnet_comm *comm = wait->op->comm;
    const shared_fabric *shared = comm->endpoint->fabric->shared;
    char what[128], why[SIMNET_TEXT_BYTES];
    const char *cause;
    for (uint32_t i = 0; i < comm->n; i++) {
        if (!(missing >> i & 1)) continue;
        if (!simnet__rank_gone(shared, comm->ranks[i], look, why, sizeof why, &cause)) continue;
        if (!(missing_members(comm, wait->read, wait->target) >> i & 1)) continue;
        simnet__latch(comm->endpoint, FCDP_ERR_PEER, cause, "rank %u: %s: %s", comm->endpoint->rank,
                      simnet__describe(wait->op, what, sizeof what), why);
        return true;
    }
    return false;
}

static bool fail_late(const waiting *wait, uint64_t missing, uint64_t now_ns) {
    const simnet_op *op = wait->op;
    double timeout_s = op->comm->endpoint->fabric->shared->timeout_s;
    if (timeout_s <= 0 || (double)(now_ns - wait->begin_ns) <= timeout_s * 1e9) return false;
    char what[128], who[160];
    simnet__latch(op->comm->endpoint, FCDP_ERR_TIMEOUT, NULL, "rank %u: %s: %s did not come within %g s",
                  op->comm->endpoint->rank, simnet__describe(op, what, sizeof what),
                  name_ranks(op->comm, missing, who, sizeof who), timeout_s);
    return true;
}

/* Until all members' words have come to `target`. False: the endpoint has failed, by this or otherwise. */
static bool wait_for_members(const simnet_op *op, bool read, uint64_t target) {
    shared_comm *shared = op->comm->shared;
    waiting wait = {.op = op, .read = read, .target = target, .begin_ns = fcdp__now_ns()};
    wait.looked_ns = wait.begin_ns;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&shared->wake, memory_order_acquire);
        uint64_t missing = missing_members(op->comm, read, target);
        if (!missing) return true;
        if (atomic_load(&op->comm->endpoint->has_failed)) return false;
        uint64_t now_ns = fcdp__now_ns();
        bool look = now_ns - wait.looked_ns > SIMNET_POLL_NS;
        if (look) wait.looked_ns = now_ns;
        if (fail_gone(&wait, missing, look) || fail_late(&wait, missing, now_ns)) return false;
        simnet__sleep(shared, seen);
    }
}

static void stall(const simnet_op *op) {
    simnet_endpoint *endpoint = op->comm->endpoint;
    while (!atomic_load(&endpoint->has_failed)) {
        uint32_t seen = atomic_load_explicit(&op->comm->shared->wake, memory_order_acquire);
        if (!atomic_load(&endpoint->has_failed)) simnet__sleep(op->comm->shared, seen);
    }
}

/* ---- agreeing ---- */

/* Once all have written their first round. Every member finds the same, and names the first that is not as it
 * is. */
static bool check_agreement(const simnet_op *op) {
    const simnet_comm *comm = op->comm;
    char what[128];
    for (uint32_t i = 0; i < comm->n; i++) {
        const shared_member *other = &comm->shared->members[i];
        bool as_much = other->kind == op->kind && other->bytes == op->bytes,
             as_cut = other->shape == op->shape;
        if (other->operation == op->number && as_much && as_cut) continue;
        simnet__latch(
            comm->endpoint, FCDP_ERR_PEER, NULL,
            "rank %u: %s, but rank %u is in operation %llu, %s of %llu bytes a rank%s: all members must call "
            "the same, in the same order",
            comm->endpoint->rank, simnet__describe(op, what, sizeof what), comm->ranks[i],
            (unsigned long long)other->operation, simnet__kind_name(other->kind),
            (unsigned long long)other->bytes, as_much && !as_cut ? ", in other parts" : "");
        return false;
    }
    return true;
}

/* ---- moving bytes ---- */

/* Bytes of a part that one round takes: all of it, or as much as the staging memory holds. */
static size_t round_bytes(const simnet_op *op) {
    size_t most = op->comm->endpoint->fabric->shared->staging_bytes;
    if (op->kind == OP_REDUCE_SCATTER) most = most / op->comm->n / sizeof(float) * sizeof(float);
    return op->bytes < most ? op->bytes : most;
}

static char *staging_of(const simnet_comm *comm, uint32_t member) {
    return comm->staging + member * comm->endpoint->fabric->shared->staging_bytes;
}

/* Bytes [offset, offset + bytes) of a member's parts, laid end to end,
 * from their places to `staging` or back. */
static void parts_move(const simnet_op *op, uint32_t member, size_t offset, size_t bytes, char *staging,
                       bool to_staging) {
    size_t at = 0; /* of the part, end to end */
    for (size_t p = 0; p < op->n_parts && bytes > 0; at += op->parts[p++].bytes) {
        const simnet_part *part = &op->parts[p];
        if (offset >= at + part->bytes) continue;
        size_t within = offset - at, n = part->bytes - within < bytes ? part->bytes - within : bytes;
        char *place = (char *)(uintptr_t)part->at.addr + member * part->stride_bytes + within;
        memcpy(to_staging ? staging : place, to_staging ? place : staging, n);
        staging += n;
        offset += n;
        bytes -= n;
    }
}

static void put(const simnet_op *op, size_t offset, size_t bytes) {
    const simnet_comm *comm = op->comm;
    char *own = staging_of(comm, comm->me);
    if (op->kind == OP_ALL_GATHER) parts_move(op, comm->me, offset, bytes, own, true);
    for (uint32_t i = 0; op->kind == OP_REDUCE_SCATTER && i < comm->n; i++)
        memcpy(own + i * bytes, op->from + i * op->bytes + offset, bytes);
}

static void take(const simnet_op *op, size_t offset, size_t bytes) {
    const simnet_comm *comm = op->comm;
    for (uint32_t i = 0; op->kind == OP_ALL_GATHER && i < comm->n; i++)
        if (i != comm->me) parts_move(op, i, offset, bytes, staging_of(comm, i), false);
    if (op->kind == OP_ALL_GATHER) return;
    float *sum = (float *)(void *)(op->to + offset);
    memcpy(sum, staging_of(comm, 0) + comm->me * bytes, bytes);
    for (uint32_t i = 1; i < comm->n; i++) {
        const float *part = (const float *)(const void *)(staging_of(comm, i) + comm->me * bytes);
        for (size_t k = 0; k < bytes / sizeof *sum; k++) sum[k] += part[k];
    }
}

static void say(const simnet_op *op, bool read, uint64_t rounds) {
    shared_comm *shared = op->comm->shared;
    atomic_store_explicit(word_of(&shared->members[op->comm->me], read), rounds, memory_order_release);
    simnet__wake(shared);
}

/* The first round tells the others what this member is in, and once all have come, how long it takes. */
static bool run_rounds(const simnet_op *op, uint64_t *end_ns_out) {
    simnet_comm *comm = op->comm;
    size_t step = round_bytes(op), offset = 0;
    do {
        size_t bytes = op->bytes - offset < step ? op->bytes - offset : step;
        uint64_t round = ++comm->rounds;
        put(op, offset, bytes);
        say(op, false, round);
        if (!wait_for_members(op, false, round)) return false;
        if (offset == 0) {
            if (!check_agreement(op)) return false;
            comm->endpoint->observe(comm->shared);
            *end_ns_out = simnet__book(comm->endpoint->fabric->shared, op);
        }
        take(op, offset, bytes);
        say(op, true, round);
        if (!wait_for_members(op, true, round)) return false;
        offset += step;
    } while (offset < op->bytes);
    return true;
}

/* What this member is in is written before anything says that it came. */
void simnet__run(simnet_op *op) {
    simnet_comm *comm = op->comm;
    simnet_endpoint *endpoint = comm->endpoint;
    char what[128];
    if (op->fails)
        simnet__latch(endpoint, FCDP_ERR_TRANSPORT, NULL, "rank %u: %s was made to fail", endpoint->rank,
                      simnet__describe(op, what, sizeof what));
    if (op->stalls) stall(op);
    if (op->fails || op->stalls) return;
    shared_member *own = &comm->shared->members[comm->me];
    own->operation = op->number;
    own->kind = op->kind;
    own->bytes = op->bytes;
    own->shape = op->shape;
    own->ready_ns = op->within ? endpoint->here_ns() : endpoint->ready_ns();
    endpoint->signal(comm->shared);
    uint64_t end_ns = 0;
    if (run_rounds(op, &end_ns) && end_ns) endpoint->end_at(end_ns);
}
