/* simulate.c - builds a step's operations in the program's order, and lets events carry them out.
 *
 * Which operations wait for which (the arrows of comm/moves.c, and FSDP2's own):
 *
 *     gather k      for the compute that used its slot last: k - 1 - prefetch in this order
 *     node k        for gather k (FCDP)               store k     for node k
 *     restore k     for the slot, as a gather         node k      for restore k
 *     compute k     for gather, node and store k
 *     reduce k      for the backward of k             optimizer   for all reductions
 *     next step     for the optimizer
 *
 * An agreement is on the compute stream: the host waits in it, and the device has nothing to do.
 *
 * On CPUs (host_computes) the program's thread is the compute stream. It carries FSDP2's collectives itself.
 * FCDP's gathers run beside it; its copies take the same cores as the model, and so are on that stream. So is
 * what else the host does (host_seconds): of each compute a share, by the region's parameters.
 */
#include "tools/plan/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/plan/moves.h"

typedef enum stream { COMPUTE, INTER, NODE, TO_DEVICE, TO_HOST, DISK, REDUCE, N_STREAMS } stream;

enum { MAX_NEEDS = 4, NONE = -1 };
/* As in the engine: an agreement's message; the least half of a staging buffer, and how many of its halves
 * small regions fill (comm/coalesce.c). */
enum { FRAME_BYTES = 1024, MIN_CHUNK_BYTES = 1 << 20, MAX_CHUNKS = 8 };

/* Its legs are carried by their links side by side, each in its turn there; then it takes `seconds` more. */
typedef struct operation {
    double legs[PLAN_N_LINKS]; /* seconds on each link; negative: none */
    double seconds;            /* of computing, or of hops */
    int needs[MAX_NEEDS];      /* operations that must have ended; NONE ends the list */
    uint8_t stream;
    bool jitters; /* its time varies from step to step */
} operation;

typedef enum phase { FORWARD, BACKWARD, REDUCTION } phase;

/* One step's operations, in the order in which they are enqueued. */
typedef struct program {
    const plan_job *job;
    const plan_cluster *cluster;
    plan_mode mode;
    const uint8_t *tiers;
    const plan_schedule *schedule;
    operation *operations;
    int n, capacity;
    int *computes; /* of this step, in order: the last reader of each slot */
    int n_computes;
    int *crossed;   /* of each region, the gather that it had together with others; NONE */
    int *stored;    /* what brought that to host memory; NONE: nothing yet */
    double *stores; /* bytes that this does, of the first region of such a gather; 0: of others */
    int agreed;     /* the last agreement: no gather begins before it */
    int held;       /* what the next compute waits for, beside its region; NONE */
    bool failed;    /* no memory, or no plan */
    plan_step sums;
} program;

static int add(program *p, stream on, const operation *made, const int *needs, int n_needs) {
    if (p->failed) return NONE;
    if (p->n == p->capacity) {
        int capacity = p->capacity ? 2 * p->capacity : 256;
        operation *more = realloc(p->operations, (size_t)capacity * sizeof *more);
        if (!more) {
            p->failed = true;
            return NONE;
        }
        p->operations = more;
        p->capacity = capacity;
    }
    operation *o = &p->operations[p->n];
    *o = *made;
    o->stream = (uint8_t)on;
    int k = 0;
    for (int i = 0; i < n_needs; i++)
        if (needs[i] != NONE) o->needs[k++] = needs[i];
    bool serial = p->schedule->no_overlap || (p->schedule->host_computes && p->mode != PLAN_FCDP);
    if (serial && p->n) {
        o->needs[0] = p->n - 1;
        k = 1;
    }
    for (; k < MAX_NEEDS; k++) o->needs[k] = NONE;
    return p->n++;
}

static bool is_empty(const plan_bytes *b) {
    return b->inter + b->node + b->to_device + b->to_host + b->file <= 0;
}

static bool is_in_lanes(const program *p, const plan_bytes *b) {
    return b->inter_hops < plan_n_gpus(p->cluster) - 1;
}

/* Messages in which a node sends them over gloo. Each step of a ring moves one rank's part: an all-gather's
 * in two, as FCDP's exchanges do, and a reduction's, which is an all-reduce, in two or more of at most 1 MiB.
 */
static double n_messages(const program *p, phase in, const plan_bytes *b) {
    if (b->inter <= 0 || b->inter_hops <= 0) return 0;
    bool in_lanes = is_in_lanes(p, b);
    double steps = b->inter_hops * (in_lanes ? p->cluster->gpus_per_node : 1);
    if (in != REDUCTION) return steps * 2;
    if (!in_lanes) steps *= p->schedule->reduce_times;
    return steps * fmax(2, ceil(b->inter / steps / (1 << 20)));
}

/* What a node sends for them beside, as the kernel counts it. */
static double message_headers(const program *p, double messages, double bytes) {
    const plan_cluster *c = p->cluster;
    if (messages <= 0 || c->packet_payload <= 0) return 0;
    double packets = messages * ceil(bytes / messages / c->packet_payload);
    return messages * c->message_bytes + packets * c->packet_bytes;
}

/* So many times as long as its bytes take, a collective holds the link between the nodes. */
static double wire_times(const program *p, phase in, const plan_bytes *b) {
    const plan_cluster *c = p->cluster;
    bool reduces = in == REDUCTION, in_lanes = is_in_lanes(p, b);
    double times = reduces ? (in_lanes ? c->lane_reduce_times : c->reduce_times)
                           : (in_lanes ? c->lane_gather_times : c->gather_times);
    return times > 0 ? times : 1;
}

/* On CPUs a hop is work of the cores, as traffic within the node is: the node's leg stands for both. */
static void hold_cores(program *p, phase in, operation *made) {
    double *leg = &made->legs[PLAN_LINK_NODE], seconds = fmax(0, *leg) + made->seconds;
    bool reduces = in == REDUCTION, is_plain = reduces || p->mode != PLAN_FCDP;
    double times = reduces ? p->schedule->reduce_cores : p->schedule->gather_cores;
    if (seconds <= 0) return;
    *leg = is_plain && times > 0 ? seconds * times : seconds;
    made->seconds = 0;
    if (is_plain) *(reduces ? &p->sums.reduce_core_seconds : &p->sums.gather_core_seconds) += *leg;
}

/* Each link carries its bytes; hops of a ring come on top, and hold no link. */
static int add_move(program *p, stream on, phase in, const plan_bytes *b, const int *needs, int n_needs) {
    if (is_empty(b)) return NONE;
    const plan_cluster *c = p->cluster;
    double pcie = plan_copy_rate(c);
    double node = in == REDUCTION && c->reduce_rate > 0 ? c->reduce_rate : c->node_rate;
    double messages = n_messages(p, in, b);
    double sent = b->inter + message_headers(p, messages, b->inter);
    double announced = messages * c->message_bytes; /* the link's rate has the packets' headers */
    double bytes[PLAN_N_LINKS] = {b->inter + announced, b->node, b->to_device, b->to_host, b->file};
    double rates[PLAN_N_LINKS] = {c->inter_rate, node, pcie, pcie, c->file_rate};
    operation made = {.seconds = b->inter > 0 ? b->inter_hops * c->inter_latency_s
                                              : b->node_hops * c->node_latency_s};
    for (int link = 0; link < PLAN_N_LINKS; link++) {
        made.legs[link] = bytes[link] > 0 ? plan_seconds(bytes[link], rates[link]) : -1;
        if (link == PLAN_LINK_INTER && made.legs[link] > 0) made.legs[link] *= wire_times(p, in, b);
        p->sums.busy_seconds[link] += fmax(0, made.legs[link]);
    }
    if (p->schedule->host_computes) hold_cores(p, in, &made);
    *(in == FORWARD ? &p->sums.forward_inter : &p->sums.backward_inter) += sent;
    if (in == REDUCTION) p->sums.reduce_inter += sent;
    p->sums.to_device += b->to_device;
    p->sums.to_host += b->to_host;
    p->sums.file += b->file;
    return add(p, on, &made, needs, n_needs);
}

static int add_compute(program *p, double seconds, const int *needs, int n_needs, bool jitters) {
    operation made = {.legs = {-1, -1, -1, -1, -1}, .seconds = seconds, .jitters = jitters};
    p->sums.compute_seconds += seconds;
    return add(p, COMPUTE, &made, needs, n_needs);
}

/* The operation of the compute stream that an unshard waits for: the last that reads the slot which it
 * takes, or the agreement, whichever is later. NONE: neither. */
static int slot_reader(const program *p) {
    int at = p->n_computes - 1 - (int)p->schedule->prefetch;
    int reader = at >= 0 ? p->computes[at] : NONE;
    return reader > p->agreed ? reader : p->agreed;
}

/* FSDP2's and its like: what one unshard gathers, and over which ring. */
static plan_bytes plain_gather(const program *p, const plan_region *region, phase in) {
    double bytes = plan_parameters(region) * p->job->parameter_bytes;
    bool in_node = p->mode == PLAN_HSDP || (p->mode == PLAN_HPZ && in == BACKWARD);
    return in_node ? plan_node_ring(p->cluster, bytes) : plan_flat_ring(p->cluster, bytes);
}

/* HFSDP: in the first micro-batch the node's copy is gathered, and the node's ranks gather from that. */
static void unshard_from_copy(program *p, const plan_region *region, phase in, bool first_use, int needs[3]) {
    double bytes = plan_parameters(region) * p->job->parameter_bytes;
    plan_bytes copy = first_use ? plan_between_nodes(p->cluster, bytes) : (plan_bytes){0};
    plan_bytes node = plan_node_ring(p->cluster, bytes);
    int slot = slot_reader(p), copied = add_move(p, INTER, in, &copy, &slot, 1);
    needs[0] = add_move(p, NODE, in, &node, (int[]){slot, copied}, 2);
}

static int last_compute(const program *p) {
    return p->n_computes ? p->computes[p->n_computes - 1] : NONE;
}

/* The stream of FCDP's copies. */
static stream copies(const program *p, stream to) {
    return p->schedule->host_computes ? COMPUTE : to;
}

static void unshard_plainly(program *p, const plan_region *region, double share, phase in, int needs[3]) {
    plan_bytes gather = plain_gather(p, region, in);
    gather.inter *= share;
    gather.node *= share;
    int slot = p->schedule->host_computes ? last_compute(p) : slot_reader(p);
    needs[0] = add_move(p, INTER, in, &gather, &slot, 1);
    if (p->schedule->host_computes && region->unshard_seconds > 0)
        needs[1] = add_compute(p, plan_measured(p->cluster, region->unshard_seconds * share), needs, 1, true);
}

/* Where the ranks of a node meet in host memory, each takes from there what the others have gathered, and a
 * whole region to restore it. What is kept crosses host memory too, once. */
static bool moves_make(const program *p, const plan_region *region, plan_tier tier, bool stale,
                       plan_engine_moves *moves) {
    bool meet = p->schedule->host_computes, keeps = tier == PLAN_ON_DEVICE;
    if (meet && (keeps || tier == PLAN_BY_SLICE)) tier = PLAN_WHOLE;
    if (!plan_engine_moves_make(p->cluster, p->job, region, tier, false, stale, moves)) return false;
    if (!meet) return true;
    moves->node = (plan_bytes){.to_device = moves->node.node};
    if (keeps) moves->restore = (plan_bytes){0};
    return true;
}

/* What is restored of a region once the stale part lies in host memory: that alone, if the rest is kept. And
 * what brought it there. */
static bool moves_together(const program *p, size_t i, plan_engine_moves *moves) {
    const plan_region *region = &p->job->regions[i];
    bool keeps = p->tiers[i] == PLAN_ON_DEVICE, meet = p->schedule->host_computes;
    plan_tier tier = keeps ? PLAN_BY_SLICE : (plan_tier)p->tiers[i];
    plan_engine_moves gathered;
    if (meet && tier == PLAN_BY_SLICE) tier = PLAN_WHOLE;
    if (!plan_engine_moves_make(p->cluster, p->job, region, tier, false, true, &gathered) ||
        !plan_engine_moves_make(p->cluster, p->job, region, tier, keeps, false, moves))
        return false;
    *moves = (plan_engine_moves){
        .gather = gathered.gather, .store = gathered.store, .restore = moves->restore};
    return true;
}

/* Of a lane, in the staging buffer. */
static double staged_bytes(const program *p, size_t i) {
    double bytes = p->job->regions[i].trainable * p->job->parameter_bytes;
    bool in_memory = p->tiers[i] != PLAN_GATHERED && p->tiers[i] != PLAN_IN_FILE;
    return in_memory && bytes <= p->schedule->coalesce_bytes ? bytes / p->cluster->gpus_per_node : 0;
}

/* Small stale regions, right behind an agreement: in chunks of half a staging buffer (comm/coalesce.c), each
 * one gather, which goes on to host memory. */
static void gather_together(program *p) {
    size_t n = p->job->n_regions, n_small = 0;
    double total = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        double bytes = p->mode == PLAN_FCDP ? staged_bytes(p, i) : 0;
        p->crossed[i] = p->stored[i] = NONE;
        p->stores[i] = 0;
        if (bytes <= 0) continue;
        n_small++;
        total += bytes;
        largest = fmax(largest, bytes);
    }
    double half = fmax(MIN_CHUNK_BYTES, total / MAX_CHUNKS + largest);
    for (size_t first = 0, i = 0; n_small > 1 && i < n && !p->failed; first = i) {
        plan_bytes gather = {0};
        size_t leader = n;
        for (double chunk = 0; i < n; i++) {
            plan_engine_moves moves;
            double bytes = staged_bytes(p, i);
            if (bytes <= 0) continue;
            if (chunk > 0 && chunk + bytes > half) break;
            if (!moves_together(p, i, &moves)) p->failed = true;
            if (p->failed) return;
            chunk += bytes;
            gather.inter += moves.gather.inter * p->schedule->differences;
            gather.inter_hops = moves.gather.inter_hops;
            if (leader == n) leader = i;
            p->stores[leader] += moves.store.to_host;
        }
        int crossed = add_move(p, INTER, FORWARD, &gather, &p->agreed, 1);
        for (size_t k = first; k < i; k++)
            if (staged_bytes(p, k) > 0) p->crossed[k] = crossed;
    }
}

/* Where the host computes, a store holds up what is enqueued behind it: so it comes before the first region
 * that needs it, and not before all. */
static int stored_together(program *p, size_t i) {
    if (p->stores[i] > 0) {
        plan_bytes copy = {.to_host = p->stores[i]};
        int stored = add_move(p, copies(p, TO_HOST), FORWARD, &copy, &p->crossed[i], 1);
        for (size_t k = i; k < p->job->n_regions; k++)
            if (p->crossed[k] == p->crossed[i]) p->stored[k] = stored;
    }
    return p->stored[i] == NONE ? p->crossed[i] : p->stored[i];
}

/* Restore what is fresh, gather what is stale, store what was gathered. */
static void unshard_cached(program *p, size_t i, phase in, bool first_use, int needs[3]) {
    const plan_region *region = &p->job->regions[i];
    bool stale = in == FORWARD && first_use; /* frozen parameters were gathered before this step */
    plan_engine_moves moves;
    int stored_before = stale && p->crossed[i] != NONE ? stored_together(p, i) : NONE;
    bool together = stored_before != NONE;
    if (!(together ? moves_together(p, i, &moves)
                   : moves_make(p, region, (plan_tier)p->tiers[i], stale, &moves))) {
        p->failed = true;
        return;
    }
    if (together) moves.gather = moves.store = (plan_bytes){0};
    if (p->schedule->flat_gather && moves.gather.inter > 0) {
        plan_bytes flat = plan_flat_ring(p->cluster, moves.gather.inter * p->cluster->n_nodes /
                                                         (p->cluster->n_nodes - 1));
        moves.gather = flat;
        moves.node = (plan_bytes){0};
    }
    moves.gather.inter *= p->schedule->differences;
    int slot = slot_reader(p), fetched = NONE, restored;
    if (moves.restore.file > 0) {
        plan_bytes file = {.file = moves.restore.file};
        fetched = add_move(p, DISK, in, &file, &slot, 1);
    }
    plan_bytes load = {.to_device = moves.restore.to_device};
    restored = add_move(p, copies(p, TO_DEVICE), in, &load, (int[]){slot, fetched, stored_before}, 3);
    plan_bytes slices = {.node = moves.restore.node, .node_hops = moves.restore.node_hops};
    int whole = add_move(p, NODE, in, &slices, &restored, 1);
    if (whole == NONE) whole = restored;
    int crossed = add_move(p, INTER, in, &moves.gather, (int[]){slot, whole}, 2);
    int gathered = add_move(p, copies(p, NODE), in, &moves.node, &crossed, 1);
    if (gathered == NONE) gathered = crossed;
    plan_bytes copy = {.to_host = moves.store.to_host}, write = {.file = moves.store.file};
    int stored = add_move(p, copies(p, TO_HOST), in, &copy, &gathered, 1);
    add_move(p, DISK, in, &write, &stored, 1);
    needs[0] = whole;
    needs[1] = gathered;
    needs[2] = stored;
}

/* The share of a region that is gathered in backward: what is live still is not. */
static double backward_share(const program *p, size_t i) {
    double behind = 0, own = plan_parameters(&p->job->regions[i]);
    for (size_t k = i + 1; k < p->job->n_regions; k++) behind += plan_parameters(&p->job->regions[k]);
    double live = p->job->live_parameters - behind;
    return live <= 0 || own <= 0 ? 1 : live >= own ? 0 : 1 - live / own;
}

static void unshard(program *p, size_t i, phase in, bool first_use, int needs[3]) {
    const plan_region *region = &p->job->regions[i];
    needs[0] = needs[1] = needs[2] = NONE;
    if (in == BACKWARD && (region->stays || p->mode == PLAN_KEEP)) return;
    if (p->mode == PLAN_HFSDP) {
        unshard_from_copy(p, region, in, first_use, needs);
    } else if (p->mode != PLAN_FCDP) {
        if (in == FORWARD && p->mode == PLAN_KEEP && !first_use) return;
        unshard_plainly(p, region, in == BACKWARD ? backward_share(p, i) : 1, in, needs);
    } else if (p->tiers[i] != PLAN_GATHERED) {
        unshard_cached(p, i, in, first_use, needs);
    } else {
        unshard_plainly(p, region, 1, in, needs);
    }
}

/* HSDP over a transport that carries one step behind the other. */
static int reduce_in_steps(program *p, double bytes, int at) {
    const plan_cluster *c = p->cluster;
    plan_bytes all = plan_hsdp_reduction(c, bytes),
               node = {.node = all.node * p->schedule->reduce_times, .node_hops = all.node_hops};
    int scattered = add_move(p, REDUCE, REDUCTION, &node, &at, 1);
    all.node = all.inter / c->gpus_per_node;
    return add_move(p, REDUCE, REDUCTION, &all, (int[]){at, scattered}, 2);
}

/* HFSDP reduces within the node, and between nodes in the last micro-batch alone. */
static int reduce(program *p, const plan_region *region, bool last_use) {
    double bytes = region->trainable * p->job->gradient_bytes, times = p->schedule->reduce_times;
    int at = last_compute(p);
    if (p->schedule->host_computes && bytes > 0 && region->reduce_seconds > 0)
        at = add_compute(p, plan_measured(p->cluster, region->reduce_seconds), &at, 1, true);
    if (p->mode == PLAN_HSDP && p->schedule->host_computes) return reduce_in_steps(p, bytes, at);
    if (p->mode == PLAN_HSDP) {
        plan_bytes moves = plan_hsdp_reduction(p->cluster, bytes);
        return add_move(p, REDUCE, REDUCTION, &moves, &at, 1);
    }
    bool in_node = p->mode == PLAN_HFSDP;
    plan_bytes moves = in_node ? plan_node_ring(p->cluster, bytes) : plan_flat_ring(p->cluster, bytes);
    moves.inter *= times;
    moves.node *= times;
    int reduced = add_move(p, REDUCE, REDUCTION, &moves, &at, 1);
    if (in_node && last_use) {
        plan_bytes rest = plan_between_nodes(p->cluster, bytes * times);
        int done = add_move(p, REDUCE, REDUCTION, &rest, (int[]){reduced, at}, 2);
        return done == NONE ? reduced : done;
    }
    if (p->mode != PLAN_OFFLOAD || bytes <= 0) return reduced;
    plan_bytes shard = {.to_host = bytes / plan_n_gpus(p->cluster)};
    int copied = add_move(p, TO_HOST, BACKWARD, &shard, (int[]){reduced, at}, 2);
    return copied == NONE ? reduced : copied;
}

/* ceil(log2 nodes) rounds of one hop; before a backward the host waits for the shards to be read as well. */
static void agree(program *p, phase in) {
    if (p->mode != PLAN_FCDP) return;
    double rounds = ceil(log2(p->cluster->n_nodes)), all = 0;
    for (size_t i = 0; i < p->job->n_regions; i++) all += plan_parameters(&p->job->regions[i]);
    double seconds = rounds * p->cluster->inter_latency_s;
    double shards = all * p->job->shard_bytes / plan_n_gpus(p->cluster);
    if (in == BACKWARD) seconds += plan_seconds(shards, p->cluster->memory_rate);
    if (p->cluster->packet_payload > 0) {
        double frames = rounds * FRAME_BYTES;
        *(in == FORWARD ? &p->sums.forward_inter
                        : &p->sums.backward_inter) += frames + message_headers(p, rounds, frames);
    }
    p->agreed = add_compute(p, seconds, NULL, 0, false);
    p->sums.agreement_seconds += seconds;
}

static void optimize(program *p, const int *last, int n_last) {
    double state = 0, bytes;
    for (size_t i = 0; i < p->job->n_regions; i++) state += p->job->regions[i].trainable;
    bytes = state * (p->job->state_bytes + p->job->gradient_bytes);
    if (p->job->step_seconds > 0)
        add_compute(p, plan_measured(p->cluster, p->job->step_seconds), last, n_last, false);
    if (p->mode != PLAN_OFFLOAD) {
        double shards = p->mode == PLAN_HSDP ? p->cluster->gpus_per_node : plan_n_gpus(p->cluster);
        double measured = p->job->optimizer_seconds;
        double all = measured > 0 ? plan_measured(p->cluster, measured)
                                  : plan_seconds(2 * bytes, p->cluster->memory_rate);
        add_compute(p, all / shards, last, n_last, false);
        return;
    }
    double seconds = plan_seconds(bytes / p->cluster->n_nodes, p->cluster->cpu_rate);
    int stepped = add_compute(p, seconds, last, n_last, false);
    plan_bytes shard = {.to_device = state * p->job->parameter_bytes / plan_n_gpus(p->cluster)};
    int copied = add_move(p, TO_DEVICE, BACKWARD, &shard, &stepped, 1);
    add_compute(p, 0, &copied, 1, false);
}

/* Of a use of a region: half of what its parameters are of all, since a micro-batch uses it twice. */
static double host_work(const program *p, const plan_region *region) {
    double all = 0, uses = 2 * (double)p->schedule->micro_batches;
    if (p->schedule->host_seconds == 0) return 0;
    for (size_t i = 0; i < p->job->n_regions; i++) all += plan_parameters(&p->job->regions[i]);
    double seconds = plan_measured(p->cluster, p->schedule->host_seconds);
    return all > 0 ? seconds / uses * plan_parameters(region) / all : 0;
}

static void compute(program *p, const plan_region *region, double seconds, const int needs[3]) {
    seconds = fmax(0, seconds + host_work(p, region));
    int at = add_compute(p, seconds, (int[]){needs[0], needs[1], needs[2], p->held}, 4, true);
    if (at != NONE) p->computes[p->n_computes++] = at;
    p->held = NONE;
}

static void build(program *p) {
    size_t n = p->job->n_regions;
    int last[2] = {NONE, NONE}, needs[3];
    p->agreed = p->held = NONE;
    for (uint32_t m = 0; m < p->schedule->micro_batches; m++) {
        agree(p, FORWARD);
        if (m == 0) gather_together(p);
        for (size_t i = 0; i < n; i++) {
            unshard(p, i, FORWARD, m == 0, needs);
            compute(p, &p->job->regions[i], plan_forward_seconds(&p->job->regions[i], p->cluster), needs);
        }
        agree(p, BACKWARD);
        for (size_t i = n; i-- > 0;) {
            for (int again = 0; again < p->job->regions[i].extra_gathers; again++)
                unshard(p, i, BACKWARD, false, needs);
            unshard(p, i, BACKWARD, m == 0, needs);
            compute(p, &p->job->regions[i], plan_backward_seconds(&p->job->regions[i], p->cluster), needs);
            if (p->failed) return;
            int reduced = reduce(p, &p->job->regions[i], m + 1 == p->schedule->micro_batches);
            if (reduced != NONE) last[p->operations[reduced].stream == REDUCE] = reduced;
            if (p->schedule->host_computes) p->held = reduced;
        }
    }
    optimize(p, last, 2);
}

/* ---- events ---- */

static double random_next(uint64_t *state) { /* splitmix64, as a number of 0 to 1 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) / 9007199254740992.0;
}

/* The largest of as many normal numbers as there are ranks: each collective waits for the slowest rank. Of
 * one uniform number u, by the inverse of the maximum's distribution, in its tail: P(max <= x) =
 * P(x)^ranks. */
static double slowest(double ranks, uint64_t *state) {
    double tail = -expm1(log(random_next(state)) / ranks);
    if (tail >= 0.5) return 0;       /* of few ranks: none is slower than the mean */
    double t = sqrt(-2 * log(tail)); /* Abramowitz and Stegun 26.2.23 */
    return t -
           (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
}

/* A stream. Its first operation that has not ended waits for others; then its legs wait for their links
 * (waits), or are carried (n_carried); then it runs until `end`. */
typedef struct queue {
    const int *operations; /* in order */
    int n, at;
    bool is_ready, runs;
    uint32_t waits; /* links */
    int n_carried;
    double ready, end;
} queue;

typedef struct link {
    int carries; /* a stream; NONE: it is free */
    double end;
    double saved, burst; /* seconds of its rate, in its token bucket at `end`; that it holds: 0 for most */
} link;

static bool needs_have_ended(const operation *o, const double *ends) {
    for (int i = 0; i < MAX_NEEDS && o->needs[i] != NONE; i++)
        if (ends[o->needs[i]] < 0) return false;
    return true;
}

/* Heads of streams whose needs have ended, from `now` on. */
static void make_ready(queue *queues, const operation *all, const double *ends, double now) {
    for (int s = 0; s < N_STREAMS; s++) {
        queue *q = &queues[s];
        if (q->is_ready || q->at == q->n) continue;
        const operation *o = &all[q->operations[q->at]];
        if (!needs_have_ended(o, ends)) continue;
        q->is_ready = true;
        q->ready = now;
        for (int l = 0; l < PLAN_N_LINKS; l++)
            if (o->legs[l] >= 0) q->waits |= 1u << l;
    }
}

/* The bucket has filled since the last leg's end, at the link's rate; what is in it passes at once. */
static void begin_leg(link *l, int stream, double seconds, double now) {
    double saved = fmin(l->burst, l->saved + now - l->end), spent = fmin(saved, seconds);
    *l = (link){stream, now + seconds - spent, saved - spent, l->burst};
}

/* A link takes the leg that has been ready longest. */
static void start_legs(queue *queues, link *links, const operation *all, double now) {
    for (int l = 0; l < PLAN_N_LINKS; l++) {
        int first = NONE;
        if (links[l].carries != NONE) continue;
        for (int s = 0; s < N_STREAMS; s++)
            if (queues[s].waits & 1u << l && (first == NONE || queues[s].ready < queues[first].ready))
                first = s;
        if (first == NONE) continue;
        queue *q = &queues[first];
        q->waits &= ~(1u << l);
        q->n_carried++;
        begin_leg(&links[l], first, all[q->operations[q->at]].legs[l], now);
    }
}

/* Operations whose legs are over run on. */
static void start_running(queue *queues, const operation *all, double now, double stretch) {
    for (int s = 0; s < N_STREAMS; s++) {
        queue *q = &queues[s];
        if (!q->is_ready || q->runs || q->waits || q->n_carried) continue;
        const operation *o = &all[q->operations[q->at]];
        q->runs = true;
        q->end = now + o->seconds * (o->jitters ? stretch : 1);
    }
}

/* What ends next, and when; infinite: nothing is under way. */
static double next_end(const queue *queues, const link *links) {
    double next = INFINITY;
    for (int s = 0; s < N_STREAMS; s++)
        if (queues[s].runs) next = fmin(next, queues[s].end);
    for (int l = 0; l < PLAN_N_LINKS; l++)
        if (links[l].carries != NONE) next = fmin(next, links[l].end);
    return next;
}

/* Seconds from the first operation's start to the last one's end. */
static double carry_out(const program *p, queue *queues, double *ends, double stretch) {
    link links[PLAN_N_LINKS];
    double now = 0;
    for (int i = 0; i < p->n; i++) ends[i] = -1;
    for (int l = 0; l < PLAN_N_LINKS; l++) links[l] = (link){.carries = NONE};
    links[PLAN_LINK_INTER].burst = plan_seconds(p->cluster->burst_bytes, p->cluster->inter_rate);
    links[PLAN_LINK_INTER].saved = links[PLAN_LINK_INTER].burst; /* other steps came before */
    for (int s = 0; s < N_STREAMS; s++) queues[s].at = 0;
    for (;;) {
        make_ready(queues, p->operations, ends, now);
        start_legs(queues, links, p->operations, now);
        start_running(queues, p->operations, now, stretch);
        double next = next_end(queues, links);
        if (isinf(next)) return now;
        now = next;
        for (int l = 0; l < PLAN_N_LINKS; l++)
            if (links[l].carries != NONE && links[l].end <= now) {
                queues[links[l].carries].n_carried--;
                links[l].carries = NONE;
            }
        for (int s = 0; s < N_STREAMS; s++) {
            queue *q = &queues[s];
            if (!q->runs || q->end > now) continue;
            ends[q->operations[q->at++]] = now;
            q->runs = q->is_ready = false;
        }
    }
}

/* The streams' operations, in `room` for p->n numbers. */
static void sort_by_stream(const program *p, queue *queues, int *room) {
    int n = 0;
    for (int s = 0; s < N_STREAMS; s++) {
        queues[s] = (queue){.operations = room + n};
        for (int i = 0; i < p->n; i++)
            if (p->operations[i].stream == s) room[n++] = i;
        queues[s].n = (int)(room + n - queues[s].operations);
    }
}

bool plan_simulate(const plan_job *job, const plan_cluster *cluster, plan_mode mode, const uint8_t *tiers,
                   const plan_schedule *schedule, plan_step *step_out) {
    program p = {.job = job, .cluster = cluster, .mode = mode, .tiers = tiers, .schedule = schedule};
    queue queues[N_STREAMS];
    double *ends = NULL, seconds = 0;
    int *room = NULL;
    uint64_t state = schedule->seed;
    p.computes = calloc(schedule->micro_batches * 2 * job->n_regions + 1, sizeof *p.computes);
    p.crossed = calloc(job->n_regions + 1, sizeof *p.crossed);
    p.stored = calloc(job->n_regions + 1, sizeof *p.stored);
    p.stores = calloc(job->n_regions + 1, sizeof *p.stores);
    p.failed = !p.computes || !p.crossed || !p.stored || !p.stores;
    if (!p.failed) build(&p);
    if (!p.failed) {
        ends = malloc((size_t)p.n * sizeof *ends);
        room = malloc((size_t)p.n * sizeof *room);
    }
    bool is_good = ends && room;
    if (is_good) sort_by_stream(&p, queues, room);
    for (uint32_t k = 0; is_good && k < schedule->n_steps; k++) {
        double stretch = 1;
        if (schedule->jitter > 0) stretch += schedule->jitter * slowest(plan_n_gpus(cluster), &state);
        seconds += carry_out(&p, queues, ends, stretch);
    }
    if (is_good) {
        *step_out = p.sums;
        step_out->seconds = seconds / schedule->n_steps;
        step_out->n_operations = p.n;
    }
    free(p.operations);
    free(p.computes);
    free(p.crossed);
    free(p.stored);
    free(p.stores);
    free(ends);
    free(room);
    return is_good;
}
