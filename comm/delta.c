/* delta.c - a gather of differences, or of rounded numbers: what its host functions do, and when it is worth
 * it.
 *
 * All of it runs in two host functions on the gather's stream, so nothing here is known when the gather is
 * enqueued: neither how large the differences are, nor whether the members have one base. They find that out
 * in the lane's turn, which lasts until the bytes are right. The next gather encodes meanwhile, unless CUDA
 * runs one host function at a time.
 *
 * A failure of an exchange is the transport's, which the program finds when it waits for the gather, as with
 * any other collective. What goes wrong on this rank alone (no memory) aborts the transport: the others wait
 * for this rank.
 */
#include "comm/delta.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/size.h"
#include "comm/codec.h"
#include "comm/trace.h"

/* What differs from a base must be smaller than this share of the shards, to be sent at all. */
static const double MOST_WIRE = 0.9375;
/* With FCDP_CODEC=auto, so many gathers of a group at most do not even ask after one that would not have
 * gained: 1, then 3, 7, 15, as the first measurements are the worst. */
enum { MAX_RESTS = 15 };
/* Of fewer bytes the latency says more than the link, unless it is known. */
enum { MEASURED_BYTES = 64 << 10 };

typedef struct head {      /* of a member; all zeroes but for the gain: it has no base */
    uint64_t wire_bytes;   /* 0: there are too many differences */
    uint64_t base, shards; /* fingerprints of the base of all members, and of its own shards */
    int64_t gain_ns;       /* what it expects of differences, in this gather */
} head;

typedef struct rows { /* of all members: that of member i begins i * stride_bytes on */
    char *at;
    size_t stride_bytes;
} rows;

typedef struct cut { /* one stale extent */
    fcdp_group *group;
    const char *shard; /* this rank's */
    rows places;       /* of what comes */
    rows base;         /* read alone, or the places; NULL: there is none */
    fcdp_base from;
    uint32_t span;
    size_t bytes;
    unsigned element_bytes;
    fcdp_number number;
} cut;

/* Whose the gather is. RUNNING: a host function's. */
enum { IDLE, RUNNING, DONE, CANCELLED };

/* One gather, of the last ones of its state. Made by the thread that enqueues it, then the stream's; freed by
 * the former once DONE. */
typedef struct fcdp_delta {
    struct fcdp_delta *next; /* of the state's; then of those that a device which failed has left undone */
    atomic_int phase; /* release: all of this, and the state, has been written; acquire where it is read */
    fcdp_comm *comm;
    fcdp_delta_state *state;
    fcdp_delta_scratch *scratch;
    uint32_t object;      /* the trace's */
    fcdp_trace_span span; /* of the second host function */
    uint32_t n, me;       /* members */
    bool by_gain;         /* FCDP_CODEC=auto */
    bool encodes;         /* it has a base to encode from */
    bool rounds;          /* FCDP_CODEC=int8 */
    fcdp_rounding rounding;
    uint64_t encode_ns;
    size_t bytes; /* of one member's shards */
    uint64_t sent_bytes;
    head *heads; /* n */
    uint32_t n_cuts;
    cut cuts[];
} delta;

/* What the driver does not give back stays page-locked, and so allocated. */
static fcdp_status staged_free(fcdp_delta_scratch *scratch, fcdp_driver *drv) {
    size_t stay_bytes;
    if (!scratch->staged) return FCDP_OK;
    fcdp_status status = fcdp__driver_host_unpin(drv, scratch->staged, scratch->staged_bytes, &stay_bytes);
    if (!status) munmap(scratch->staged, scratch->staged_bytes);
    scratch->staged = NULL;
    scratch->staged_bytes = 0;
    return status;
}

void fcdp__delta_scratch_free(fcdp_delta_scratch *scratch, fcdp_driver *drv) {
    if (staged_free(scratch, drv)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    free(scratch->own);
    free(scratch->all);
    *scratch = (fcdp_delta_scratch){0};
}

/* ---- the bytes ---- */

static void *grown(char **at, size_t *has_bytes, size_t bytes) {
    if (*has_bytes >= bytes) return *at;
    free(*at);
    *has_bytes = fcdp__round_up(bytes, 64 << 10);
    *at = aligned_alloc(64, *has_bytes);
    if (!*at) *has_bytes = 0;
    return *at;
}

static char *of_member(rows of, uint32_t member) {
    return of.at + member * of.stride_bytes;
}

/* Of what lies in the member's place. */
static uint64_t place_fingerprint(const delta *d, uint32_t member) {
    uint64_t fingerprint = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        fingerprint = fcdp__fingerprint_by_host(of_member(c->places, member), c->bytes, fingerprint);
    return fingerprint;
}

/* Of all members'. */
static uint64_t base_fingerprint(const delta *d) {
    uint64_t fingerprint = 0;
    for (uint32_t b = 0; b < d->n; b++)
        for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
            fingerprint = fcdp__fingerprint_by_host(of_member(c->base, b), c->bytes, fingerprint);
    return fingerprint;
}

/* A member's differences: of each cut its length, 8 bytes, and as many bytes of the codec's. 0: too many. */
static size_t encode(delta *d, char *wire, size_t capacity) {
    size_t at = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        uint64_t n = 0;
        if (at + sizeof n >= capacity) return 0;
        n = d->rounds ? fcdp__int8_encode(c->shard, c->bytes, c->number, wire + at + sizeof n, &d->rounding)
                      : fcdp__delta_encode(of_member(c->base, d->me), c->shard, c->bytes, c->element_bytes,
                                           wire + at + sizeof n, capacity - at - sizeof n);
        if (!n) return 0;
        memcpy(wire + at, &n, sizeof n);
        at += sizeof n + n;
    }
    return at;
}

static bool decode(const delta *d, uint32_t member, const char *wire, size_t bytes) {
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        char *place = of_member(c->places, member);
        uint64_t n;
        if (bytes < sizeof n) return false;
        memcpy(&n, wire, sizeof n);
        wire += sizeof n;
        bytes -= sizeof n;
        if (n > bytes) return false;
        if (d->rounds
                ? fcdp__int8_decode(place, c->bytes, c->number, wire, n)
                : fcdp__delta_decode(of_member(c->base, member), place, c->bytes, c->element_bytes, wire, n))
            return false;
        wire += n;
        bytes -= n;
    }
    return true;
}

static void own_place(const delta *d) {
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        memcpy(of_member(c->places, d->me), c->shard, c->bytes);
}

/* ---- the rates ---- */

/* A first measurement stands alone; later ones are averaged, since a busy machine's are noisy. */
static void rate_note(double *rate, double measured) {
    *rate = *rate > 0 ? 0.75 * *rate + 0.25 * measured : measured;
}

/* The least that a verdict took. Most take longer, as they wait for a member whose core computes before it
 * decodes, and plain gathers wait for such members, too. It rises where the link has become slower. */
static void latency_note(double *latency_ns, double measured) {
    double risen = *latency_ns + *latency_ns / 64;
    *latency_ns = *latency_ns > 0 && risen < measured ? risen : measured;
}

/* Time that this thread has had of a core: what the codec takes from those that compute. By the clock it
 * would be longer, at random, where there are more ranks than cores. */
static uint64_t core_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Each byte of a shard is encoded once, and decoded by each of the others, by a core that would compute, and
 * others wait for it: so that time counts three times. Where all cores compute, the link's time by the clock
 * may be twice what it is. Until a gather has measured it, differences are tried. */
static int64_t gain_ns(const delta *d) {
    const fcdp_delta_rates *r = &d->comm->delta_rates;
    double others = d->n - 1, bytes = (double)d->bytes;
    if (d->state->wire >= 1) return -1;
    if (!(r->link_ns > 0 && r->decode_ns > 0 && d->state->wire > 0)) return 1;
    double spared_ns = others * bytes * r->link_ns * (1 - d->state->wire);
    return (int64_t)(spared_ns - 3 * (bytes * r->encode_ns + others * bytes * r->decode_ns) - r->latency_ns);
}

/* The same on all members: each has all heads. After a rest they are tried anew, and measured. */
static void next_decide(delta *d) {
    for (uint32_t b = 0; b < d->n; b++) d->state->gain_ns += d->heads[b].gain_ns;
    uint32_t longer = 2 * d->state->rest_before + 1;
    d->state->rest = d->by_gain && d->state->gain_ns <= 0 ? longer < MAX_RESTS ? longer : MAX_RESTS : 0;
    d->state->rests_left = d->state->rest;
}

/* ---- the exchanges, on the stream's thread, in the lane's turn ---- */

static fcdp_status exchange(delta *d, void *buffer, size_t bytes, double *ns_out) {
    const fcdp_transport *transport = &d->comm->transport;
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = transport->exchange(transport->ctx, FCDP_LANE_INTER, buffer, bytes);
    *ns_out = (double)(fcdp__now_ns() - start_ns);
    d->sent_bytes += (d->n - 1) * bytes;
    double latency_ns = d->comm->delta_rates.latency_ns / 2, moved = (double)((d->n - 1) * bytes);
    if (!status && *ns_out > latency_ns && (moved >= MEASURED_BYTES || (latency_ns > 0 && bytes > 4096)))
        rate_note(&d->comm->delta_rates.link_ns, (*ns_out - latency_ns) / moved);
    return status;
}

static fcdp_status no_memory(delta *d, size_t bytes) {
    const fcdp_transport *transport = &d->comm->transport;
    fcdp_status status = fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for a gather of %zu bytes", bytes);
    transport->abort(transport->ctx, fcdp_error_text());
    return status;
}

static fcdp_status whole_cross(delta *d) {
    double ns;
    char *all = grown(&d->scratch->all, &d->scratch->all_bytes, d->n * d->bytes);
    if (!all) return no_memory(d, d->n * d->bytes);
    char *at = all + d->me * d->bytes;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; at += c->bytes, c++)
        memcpy(at, of_member(c->places, d->me), c->bytes);
    fcdp_status status = exchange(d, all, d->bytes, &ns);
    if (status) return status;
    at = all;
    for (uint32_t b = 0; b < d->n; b++)
        for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; at += c->bytes, c++)
            memcpy(of_member(c->places, b), at, c->bytes);
    fcdp__count(&d->comm->engine->counts, FCDP_COUNT_DELTA_WHOLE, 1);
    return FCDP_OK;
}

/* Of `wire_bytes` from each member. *right_out: all members have all bytes. */
static fcdp_status differences_cross(delta *d, size_t wire_bytes, bool *right_out) {
    fcdp_delta_rates *rates = &d->comm->delta_rates;
    double ns;
    char *all = grown(&d->scratch->all, &d->scratch->all_bytes, d->n * wire_bytes);
    if (!all) return no_memory(d, d->n * wire_bytes);
    char *own = all + d->me * wire_bytes;
    size_t own_bytes = d->heads[d->me].wire_bytes;
    memcpy(own, d->scratch->own, own_bytes);
    memset(own + own_bytes, 0, wire_bytes - own_bytes);
    fcdp_status status = exchange(d, all, wire_bytes, &ns);
    if (status) return status;
    uint64_t start_ns = core_ns();
    bool right = true;
    for (uint32_t b = 0; b < d->n && right; b++)
        right = b == d->me || (decode(d, b, all + b * wire_bytes, d->heads[b].wire_bytes) &&
                               place_fingerprint(d, b) == d->heads[b].shards);
    double decode_ns = (double)(core_ns() - start_ns);
    rate_note(&rates->decode_ns, decode_ns / ((double)(d->n - 1) * (double)d->bytes));
    uint64_t *verdicts = (uint64_t *)all;
    verdicts[d->me] = right;
    status = exchange(d, verdicts, sizeof *verdicts, &ns);
    if (status) return status;
    latency_note(&rates->latency_ns, 2 * ns); /* and the heads' */
    *right_out = true;
    for (uint32_t b = 0; b < d->n; b++) *right_out = *right_out && verdicts[b] == 1;
    static atomic_bool said;
    if (!*right_out && !atomic_exchange(&said, true))
        fcdp__log(FCDP_LOG_WARN,
                  "'%s': what came of differences does not have its sender's fingerprint on some rank, and "
                  "crosses whole; this is said once",
                  fcdp__name_text(d->cuts[0].group->name));
    return FCDP_OK;
}

/* The largest differences of a member; 0: not all members have encoded, or they had different bases. */
static size_t wire_bytes_of(const delta *d) {
    size_t most = 0;
    for (uint32_t b = 0; b < d->n; b++) {
        if (!d->heads[b].wire_bytes || d->heads[b].base != d->heads[0].base) return 0;
        if (d->heads[b].wire_bytes > most) most = d->heads[b].wire_bytes;
    }
    return most < sizeof(uint64_t) ? sizeof(uint64_t) : most; /* the verdicts take its place */
}

static fcdp_status cross(delta *d) {
    double ns;
    bool right = false;
    d->heads[d->me].gain_ns = gain_ns(d);
    fcdp_status status = exchange(d, d->heads, sizeof *d->heads, &ns);
    if (status) return status;
    size_t wire_bytes = wire_bytes_of(d);
    for (uint32_t b = 0; b < d->n; b++) /* it has a base, and encoded in vain */
        if (d->heads[b].base && !d->heads[b].wire_bytes) d->state->wire = 1;
    if (wire_bytes) {
        status = differences_cross(d, wire_bytes, &right);
        d->state->wire = (double)wire_bytes / (double)d->bytes;
        rate_note(&d->comm->delta_rates.encode_ns, (double)d->encode_ns / (double)d->bytes);
        if (!status && right) fcdp__count(&d->comm->engine->counts, FCDP_COUNT_DELTA_GATHERS, 1);
    }
    if (!status && !right) status = whole_cross(d);
    if (!status) next_decide(d);
    return status;
}

/* ---- the host functions ---- */

/* The transport is not asked: NCCL's may end what its launches have begun, which is not for a host function.
 * An exchange over one that has failed returns at once, and the monitor finds the failure. */
static bool is_over(const delta *d) {
    return atomic_load_explicit(&d->comm->failed, memory_order_acquire);
}

/* Words are raised without bytes where a rank has failed, and before that its failure is there. They are of a
 * later epoch where others are ahead in a gather of several groups: these store their own lanes' pieces. */
static bool base_is_there(const delta *d) {
    uint32_t slice;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        if (c->from.of_others && !fcdp__region_others_stored(c->group->region, c->span, c->from.epoch))
            return false;
    return !fcdp__host_peer_failed(d->comm->host, &slice);
}

static void differences_make(delta *d) {
    uint64_t start_ns = core_ns();
    size_t most = (size_t)(MOST_WIRE * (double)d->bytes);
    char *wire = grown(&d->scratch->own, &d->scratch->own_bytes, most + 1);
    head *mine = &d->heads[d->me];
    if (!wire || !base_is_there(d)) return; /* the shards cross whole */
    mine->base = base_fingerprint(d) | 1;   /* 0 says that it has none */
    mine->wire_bytes = encode(d, wire, most);
    d->encode_ns = core_ns() - start_ns;
}

/* There is no base, which is the same on all members, then. */
static void rounded_make(delta *d) {
    size_t most = 1;
    head *mine = &d->heads[d->me];
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        most += sizeof(uint64_t) + fcdp__int8_bound(c->bytes, c->number);
    char *wire = grown(&d->scratch->own, &d->scratch->own_bytes, most);
    if (!wire) {
        fcdp__log(FCDP_LOG_DEBUG, "'%s': %d", d->cuts[0].group->name, (int)no_memory(d, most));
        return;
    }
    mine->base = 1;
    mine->wire_bytes = encode(d, wire, most);
    bool decoded = decode(d, d->me, wire, mine->wire_bytes); /* into this rank's own place */
    FCDP_CHECK(0, decoded);
    fcdp__lock_acquire(&d->comm->engine->lock);
    d->comm->engine->rounding.lost += d->rounding.lost;
    d->comm->engine->rounding.whole += d->rounding.whole;
    fcdp__lock_release(&d->comm->engine->lock);
}

/* False: the group has ended, and the memory that the gather is in may have. */
static bool run_begin(delta *d) {
    int idle = IDLE;
    return atomic_compare_exchange_strong_explicit(&d->phase, &idle, RUNNING, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* The shard is read here alone: whatever the program makes of it later, all members get what this rank has in
 * its own place. Where it changed while it was encoded, what the others decode has another fingerprint. */
static void encode_run(void *arg) {
    delta *d = arg;
    if (!run_begin(d)) return;
    if (!is_over(d)) {
        if (d->encodes) differences_make(d);
        if (d->rounds)
            rounded_make(d);
        else
            own_place(d);
        if (d->heads[d->me].wire_bytes) d->heads[d->me].shards = place_fingerprint(d, d->me);
    }
    atomic_store_explicit(&d->phase, IDLE, memory_order_release);
}

/* Each group's part of what was sent. */
static void groups_count(const delta *d) {
    size_t at = 0, counted = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        at += c->bytes;
        uint64_t until = (uint64_t)((double)d->sent_bytes * ((double)at / (double)d->bytes));
        if (c + 1 == d->cuts + d->n_cuts) until = d->sent_bytes;
        fcdp__count(&c->group->counts, FCDP_COUNT_SAVED_GATHER_BYTES,
                    (until - counted) * d->comm->topology.node_size);
        counted = until;
    }
}

static fcdp_trace_spans *spans_of(const delta *d) {
    return fcdp__tiering_spans(d->comm->engine->tiering);
}

static void span_end(const delta *d, fcdp_stream stream, uint64_t bytes) {
    fcdp_trace_event event = {.kind = FCDP_EVENT_GATHER, .object = d->object, .bytes = bytes, .a = bytes};
    fcdp__trace_span_end(spans_of(d), d->span, stream, &event, 1);
}

/* Where the device's times are not known, the event is written here. */
static void span_say(const delta *d) {
    if (d->span.number)
        fcdp__trace_span_bytes(spans_of(d), d->span, d->sent_bytes);
    else
        span_end(d, NULL, d->sent_bytes);
}

static void cross_run(void *arg) {
    delta *d = arg;
    if (!run_begin(d)) return;
    fcdp_engine *engine = d->comm->engine;
    if (!is_over(d) && cross(d)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    fcdp__count(&engine->counts, FCDP_COUNT_GATHER_INTER_BYTES, d->sent_bytes);
    if (d->sent_bytes) groups_count(d);
    span_say(d);
    atomic_store_explicit(&d->phase, DONE, memory_order_release);
}

/* ---- enqueueing ---- */

/* NULL: differences can cross. The same on every member. */
static const char *why_whole(const fcdp_comm *comm) {
    const fcdp_engine *engine = comm->engine;
    if (!engine->host_computes && engine->options.codec != FCDP_CODEC_DELTA)
        return "the model computes on a device, where FCDP_CODEC=delta alone serves";
    if (!comm->transport.exchange) return "the transport exchanges no host memory";
    bool by_slice = engine->options.codec == FCDP_CODEC_INT8 && fcdp__comm_by_slice(comm);
    return by_slice ? "FCDP_RESTORE is slice" : NULL;
}

void fcdp__delta_warn(const fcdp_comm *comm) {
    static atomic_bool said;
    fcdp_codec_mode codec = comm->engine->options.codec;
    const char *why = why_whole(comm);
    bool was_asked_for = codec == FCDP_CODEC_DELTA || codec == FCDP_CODEC_INT8;
    if (!was_asked_for || comm->topology.n_nodes == 1 || comm->topology.local || !why ||
        atomic_exchange(&said, true))
        return;
    fcdp__log(FCDP_LOG_WARN, "FCDP_CODEC=%s: parameters cross the nodes whole: %s",
              codec == FCDP_CODEC_DELTA ? "delta" : "int8", why);
}

/* All of this holds on every member, or on none: the options are compared when the shard group is made, and
 * it is agreed which groups have host memory. */
bool fcdp__delta_may(const fcdp_group *group) {
    const fcdp_comm *comm = group->comm;
    return comm->engine->options.codec != FCDP_CODEC_NONE && comm->topology.n_nodes > 1 && group->block &&
           !(comm->engine->options.codec == FCDP_CODEC_INT8 && fcdp__group_by_slice(group)) &&
           !why_whole(comm);
}

bool fcdp__extent_rounds(const fcdp_group *group, uint32_t i) {
    return group->comm->engine->options.codec == FCDP_CODEC_INT8 && fcdp__delta_may(group) &&
           group->numbers[i] != FCDP_NUMBER_OTHER;
}

bool fcdp__group_rounds(const fcdp_group *group) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (fcdp__extent_rounds(group, i)) return true;
    return false;
}

bool fcdp__delta_joins(const fcdp_group *group) {
    const fcdp_comm *comm = group->comm;
    bool rounds = comm->engine->options.codec == FCDP_CODEC_INT8;
    return !rounds || comm->topology.n_nodes == 1 || why_whole(comm) || fcdp__delta_may(group);
}

/* Rounded gathers need none. */
static bool takes_base(const fcdp_comm *comm) {
    return comm->engine->options.codec != FCDP_CODEC_INT8;
}

static void delta_free(delta *d) {
    free(d->heads);
    free(d);
}

/* Where its last gathers are still under way, the host waits behind the n events. */
static fcdp_status state_await(fcdp_delta_state *state, fcdp_driver *drv, const fcdp_event *events, int n) {
    bool done = true;
    for (const delta *d = state->last; d; d = d->next)
        done = done && atomic_load_explicit(&d->phase, memory_order_acquire) == DONE;
    for (int i = 0; i < n && !done; i++) {
        fcdp_status status = fcdp__driver_event_sync(drv, events[i]);
        if (status) return status;
    }
    while (state->last) {
        delta *d = state->last;
        state->last = d->next;
        delta_free(d);
    }
    return FCDP_OK;
}

/* Of the gathers that come next: is it their turn? */
static bool state_serves(fcdp_delta_state *state) {
    if (state->rests_left > 0) {
        state->rests_left--;
        return false;
    }
    state->gain_ns = 0;
    state->rest_before = state->rest; /* of several gathers together, each decides anew */
    return true;
}

fcdp_status fcdp__delta_serves(fcdp_use *use, bool *serves_out) {
    fcdp_group *group = use->group;
    *serves_out = false;
    if (!fcdp__delta_may(group)) return FCDP_OK;
    fcdp_status status = state_await(&group->delta, group->comm->engine->drv, &group->crossed, 1);
    if (status) return status;
    bool comes = takes_base(group->comm) ? group->delta.is_primed : fcdp__group_rounds(group);
    *serves_out = comes && state_serves(&group->delta);
    group->delta.is_primed = true;
    return FCDP_OK;
}

/* They have been used before, so gathered; the heads say if a base is missing. */
fcdp_status fcdp__deltas_serve(fcdp_group *const *groups, uint32_t n, bool *serves_out) {
    fcdp_comm *comm = groups[0]->comm;
    *serves_out = true;
    bool rounds = false;
    for (uint32_t g = 0; g < n; g++) {
        *serves_out = *serves_out && fcdp__delta_may(groups[g]);
        rounds = rounds || fcdp__group_rounds(groups[g]);
    }
    *serves_out = *serves_out && (rounds || takes_base(comm));
    if (!*serves_out) return FCDP_OK;
    fcdp_status status = state_await(&comm->deltas_together, comm->engine->drv, comm->set->staging.filled, 2);
    if (!status) *serves_out = state_serves(&comm->deltas_together);
    return status;
}

/* Of the members of its lane this rank itself has stored the pieces, unless it stores slices. */
fcdp_base fcdp__delta_base(fcdp_group *group, uint32_t span) {
    if (!takes_base(group->comm)) return (fcdp_base){.where = FCDP_BASE_NOWHERE};
    return fcdp__region_base_of(group->region, span, fcdp__group_by_slice(group));
}

static delta *delta_make(fcdp_comm *comm, fcdp_delta_state *state, const fcdp_delta_cut *cuts, size_t n,
                         fcdp_stream inter) {
    uint32_t which = inter == comm->set->streams[FCDP_STREAM_INTER_0] ? 0 : 1;
    delta *d = calloc(1, sizeof *d + n * sizeof *d->cuts);
    head *heads = calloc(comm->topology.n_nodes, sizeof *heads);
    if (!d || !heads) {
        free(d);
        free(heads);
        return NULL;
    }
    d->comm = comm;
    d->state = state;
    d->scratch = &comm->set->delta_scratch[which];
    d->object = cuts[0].group == cuts[n - 1].group ? fcdp__group_object(cuts[0].group) : 0;
    d->n = comm->topology.n_nodes;
    d->me = comm->topology.node;
    d->by_gain = comm->engine->options.codec == FCDP_CODEC_AUTO;
    d->encodes = true;
    d->rounds = comm->engine->options.codec == FCDP_CODEC_INT8;
    d->heads = heads;
    for (const fcdp_delta_cut *c = cuts; c < cuts + n; c++) {
        d->cuts[d->n_cuts++] = (cut){.group = c->group,
                                     .from = c->base,
                                     .span = c->group->layout->extents[c->extent].span,
                                     .bytes = c->part.bytes,
                                     .number = (fcdp_number)c->group->numbers[c->extent],
                                     .element_bytes = c->group->element_bytes[c->extent] == 2 ? 2 : 4};
        d->bytes += c->part.bytes;
        d->encodes = d->encodes && c->base.where != FCDP_BASE_NOWHERE;
    }
    d->next = state->last;
    state->last = d;
    return d;
}

static size_t shards_bytes(const delta *d) {
    return fcdp__round_up(d->bytes, 64);
}

/* Where the host functions find each cut's bytes: with `staged`, all but a base in host memory there, and
 * else in device memory. */
static void rows_set(delta *d, const fcdp_delta_cut *cuts, char *staged) {
    const fcdp_topology *topology = &d->comm->topology;
    char *place = staged ? staged + shards_bytes(d) : NULL;
    for (uint32_t k = 0; k < d->n_cuts; k++) {
        cut *c = &d->cuts[k];
        c->shard = staged ? staged : (const char *)(uintptr_t)cuts[k].shard.addr;
        c->places = (rows){(char *)(uintptr_t)cuts[k].part.at.addr, cuts[k].part.stride_bytes};
        if (staged) {
            c->places = (rows){place, d->bytes};
            staged += c->bytes;
            place += c->bytes;
        }
        fcdp_piece first = fcdp__plan_shard(c->group->layout, topology, cuts[k].extent, 0, topology->local);
        char *host = fcdp__host_data(c->group->block);
        if (c->from.where == FCDP_BASE_IN_HOST)
            c->base = (rows){host + first.offset_bytes, topology->node_size * first.bytes};
        else if (c->from.where == FCDP_BASE_ON_DEVICE)
            c->base = c->places;
    }
}

/* What the host functions read and write, for the simulated device's checks. Host memory that is page-locked
 * in part is not one range to it. */
typedef struct access_list {
    fcdp_access *at; /* NULL: no memory for them */
    size_t n, capacity;
} access_list;

static void access_add(access_list *list, const char *at, size_t bytes, bool writes) {
    if (list->n == list->capacity) {
        size_t capacity = 2 * list->capacity + 64;
        fcdp_access *grown = realloc(list->at, capacity * sizeof *grown);
        if (!grown) return;
        list->at = grown;
        list->capacity = capacity;
    }
    list->at[list->n++] = (fcdp_access){{(uintptr_t)at}, bytes, writes};
}

static void base_add(access_list *list, const cut *c, uint32_t member) {
    const char *at = of_member(c->base, member);
    bool pinned;
    for (size_t done = 0, n; done < c->bytes; done += n) {
        n = c->from.where == FCDP_BASE_IN_HOST
                ? fcdp__host_run_bytes(c->group->block, at + done, c->bytes - done, &pinned)
                : c->bytes;
        access_add(list, at + done, n, false);
    }
}

static void announce(const delta *d, bool crosses) {
    access_list list = {0};
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        if (!crosses) access_add(&list, c->shard, c->bytes, false);
        for (uint32_t b = 0; b < d->n; b++) {
            if (d->encodes && !(crosses && b == d->me)) base_add(&list, c, b);
            if (crosses || b == d->me)
                access_add(&list, of_member(c->places, b), c->bytes, crosses != (b == d->me));
        }
    }
    fcdp__driver_announce(d->comm->engine->drv, list.at, list.n);
    free(list.at);
}

/* Behind this rank's own stores. */
static fcdp_status stores_await(const delta *d, fcdp_stream inter) {
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < d->n_cuts && d->encodes && !status; k++) {
        const cut *c = &d->cuts[k];
        bool is_behind = k > 0 && c[-1].group == c->group && c[-1].from.where == FCDP_BASE_IN_HOST;
        if (c->from.where == FCDP_BASE_IN_HOST && !is_behind)
            status = fcdp__driver_stream_wait(d->comm->engine->drv, inter,
                                              fcdp__region_stored(c->group->region));
    }
    return status;
}

/* ---- a device whose memory is not the host's ---- */

static fcdp_status staged_reserve(const delta *d, fcdp_stream inter) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_delta_scratch *scratch = d->scratch;
    size_t bytes = fcdp__round_up(shards_bytes(d) + d->n * d->bytes, 64 << 10), stay_bytes;
    if (bytes <= scratch->staged_bytes) return FCDP_OK;
    fcdp_status status = fcdp__driver_stream_sync(drv, inter); /* what is on it uses the smaller one */
    if (!status) status = staged_free(scratch, drv);
    if (status) return status;
    char *staged = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (staged == MAP_FAILED)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for a gather of %zu bytes", bytes);
    (void)madvise(staged, bytes, MADV_DONTFORK); /* behind a fork, a write would move pages that are pinned */
    status = fcdp__driver_host_pin(drv, staged, bytes, &stay_bytes);
    if (status) {
        if (!stay_bytes) munmap(staged, bytes);
        return status;
    }
    scratch->staged = staged;
    scratch->staged_bytes = bytes;
    return FCDP_OK;
}

/* This rank's shards, and a base that the device alone has. */
static fcdp_status shards_fetch(const delta *d, const fcdp_delta_cut *cuts, fcdp_stream inter) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < d->n_cuts && !status; k++) {
        const cut *c = &d->cuts[k];
        status = fcdp__driver_copy_d2h(drv, (char *)c->shard, cuts[k].shard, c->bytes, inter);
        for (uint32_t b = 0; b < d->n && d->encodes && c->from.where == FCDP_BASE_ON_DEVICE && !status; b++)
            status = fcdp__driver_copy_d2h(drv, of_member(c->base, b),
                                           fcdp__dptr_add(cuts[k].part.at, b * cuts[k].part.stride_bytes),
                                           c->bytes, inter);
    }
    return status;
}

/* What has come of all members. In staged memory it lies side by side; where it does so on the device, too,
 * it is one copy. */
static fcdp_status places_bring(const delta *d, const fcdp_delta_cut *cuts, fcdp_stream inter) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_status status = FCDP_OK;
    fcdp_dptr to = {0};
    const char *from = NULL;
    size_t bytes = 0;
    for (uint32_t b = 0; b < d->n && !status; b++)
        for (uint32_t k = 0; k < d->n_cuts && !status; k++) {
            fcdp_dptr at = fcdp__dptr_add(cuts[k].part.at, b * cuts[k].part.stride_bytes);
            if (bytes && at.addr != to.addr + bytes) {
                status = fcdp__driver_copy_h2d(drv, to, from, bytes, inter);
                bytes = 0;
            }
            if (!bytes) to = at, from = of_member(d->cuts[k].places, b);
            bytes += d->cuts[k].bytes;
        }
    return status ? status : fcdp__driver_copy_h2d(drv, to, from, bytes, inter);
}

/* ---- one gather ---- */

/* `state`'s gather is the stream's from here on, whatever fails. */
fcdp_status fcdp__delta_gather(fcdp_comm *comm, fcdp_delta_state *state, const fcdp_delta_cut *cuts, size_t n,
                               fcdp_stream inter) {
    fcdp_driver *drv = comm->engine->drv;
    fcdp_event turn = comm->set->turn[FCDP_LANE_INTER];
    delta *d = delta_make(comm, state, cuts, n, inter);
    if (!d) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", cuts[0].group->name);
    bool stages = !comm->engine->host_computes;
    fcdp_status status = stages ? staged_reserve(d, inter) : FCDP_OK;
    if (!status) rows_set(d, cuts, stages ? d->scratch->staged : NULL);
    if (!status && stages) status = shards_fetch(d, cuts, inter);
    if (!status) status = stores_await(d, inter);
    if (!status) {
        announce(d, false);
        status = fcdp__driver_host_function(drv, inter, encode_run, d);
    }
    if (!status) d->span = fcdp__comm_span_begin(comm->set, FCDP_LANE_INTER, inter);
    if (!status) status = fcdp__driver_stream_wait(drv, inter, turn);
    if (!status) {
        announce(d, true);
        status = fcdp__driver_host_function(drv, inter, cross_run, d);
    }
    if (status)
        fcdp__trace_span_drop(spans_of(d), d->span);
    else if (d->span.number)
        span_end(d, inter, 0); /* the bytes are the host function's to say */
    if (!status) status = fcdp__driver_event_record(drv, turn, inter);
    if (!status) fcdp__count(&comm->engine->counts, FCDP_COUNT_GATHER_CALLS, 1);
    if (!status && stages) status = places_bring(d, cuts, inter);
    return status;
}

/* From here on no host function reads or writes what is not the gather's own. Where the device has failed,
 * one may be under way that no wait for the device has waited for: it ends as its exchange does. False: it
 * is done, and no stream has it. */
static bool delta_cancel(delta *d) {
    const struct timespec pause = {.tv_nsec = 1000000};
    int phase = IDLE;
    while (!atomic_compare_exchange_strong_explicit(&d->phase, &phase, CANCELLED, memory_order_acq_rel,
                                                    memory_order_acquire)) {
        if (phase != RUNNING) return phase == CANCELLED;
        (void)nanosleep(&pause, NULL);
        phase = IDLE;
    }
    return true;
}

static bool is_of(const delta *d, const fcdp_group *group) {
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        if (c->group == group) return true;
    return false;
}

/* The group's streams have been drained. Where the device has failed its last gather may never be done, and
 * what waits on a stream may still point to it. */
void fcdp__delta_forget(fcdp_group *group) {
    delta *d = group->delta.last;
    for (delta *of = group->comm->deltas_together.last; of; of = of->next)
        if (is_of(of, group)) (void)delta_cancel(of);
    group->delta.last = NULL;
    if (!d) return;
    if (!delta_cancel(d)) {
        delta_free(d);
        return;
    }
    fcdp__lock_acquire(&group->comm->engine->lock);
    d->next = group->comm->deltas;
    group->comm->deltas = d;
    fcdp__lock_release(&group->comm->engine->lock);
}

void fcdp__deltas_free(fcdp_comm *comm) {
    struct fcdp_delta **const lists[] = {&comm->deltas, &comm->deltas_together.last};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        while (*lists[i]) {
            delta *d = *lists[i];
            *lists[i] = d->next;
            (void)delta_cancel(d);
            delta_free(d);
        }
}
