/* delta_exchange.c - what a rank does in one gather of differences, or of rounded numbers, and whether it is
 * worth it.
 *
 * All of it runs in the streams' order, so nothing here is known when the gather is enqueued: neither how
 * large the differences are, nor whether the members have one base. They find that out in the lane's turn.
 * The next gather encodes meanwhile. Where a device computes the model, all members decode behind the turn,
 * and exchange their verdicts on a channel of their own, and the shards, if these cross whole: the link
 * carries the next gather's differences meanwhile. Where the host does, the turn lasts until the bytes are
 * right.
 *
 * A failure of an exchange is the transport's, which the program finds when it waits for the gather, as with
 * any other collective. What goes wrong on this rank alone (no memory) aborts the transport: the others wait
 * for this rank.
 */
#include "comm/delta_exchange.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/size.h"
#include "comm/codec_kernel.h"
#include "comm/trace.h"

typedef fcdp_delta delta;
typedef fcdp_delta_extent cut;

/* What differs from a base must be smaller than this share of the shards, to be sent at all. */
static const double MOST_WIRE = 0.9375;
/* With FCDP_CODEC=auto, so many gathers of a group at most do not even ask after one that would not have
 * gained: 1, then 3, 7, 15, as the first measurements are the worst. */
enum { MAX_RESTS = 15 };
/* Of fewer bytes the latency says more than the link, unless it is known. */
enum { MEASURED_BYTES = 64 << 10 };

/* Time that this thread has had of a core: what the codec takes from those that compute. By the clock it
 * would be longer, at random, where there are more ranks than cores. */
static uint64_t core_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
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

/* What has a fingerprint of its own, so that threads make them side by side: whole blocks of the codec. */
enum { PIECE_BYTES = 16 << 10 };

static size_t pieces_of(size_t bytes) {
    return bytes / PIECE_BYTES + (bytes % PIECE_BYTES != 0);
}

static uint64_t piece_fingerprint(const char *row, size_t bytes, size_t piece) {
    size_t left = bytes - piece * PIECE_BYTES;
    return fcdp__fingerprint_by_host(row + piece * PIECE_BYTES, left < PIECE_BYTES ? left : PIECE_BYTES, 0);
}

/* Of several, one after another. */
static uint64_t joined(uint64_t before, uint64_t fingerprint) {
    return fcdp__fingerprint_by_host(&fingerprint, sizeof fingerprint, before);
}

/* Of fewer pieces a thread alone has made them before the others have woken up. */
enum { TEAM_PIECES = 4 };

static void team_run(const delta *d, size_t n_pieces, fcdp_team_part part, void *context) {
    fcdp_team *team = d->comm->set->teams[d->inter_index];
    fcdp__team_run(n_pieces < TEAM_PIECES ? NULL : team, part, context);
}

static size_t pieces_of_cuts(const delta *d) {
    size_t n = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) n += pieces_of(c->bytes);
    return n;
}

fcdp_delta_walk fcdp__delta_walk(const delta *d, unsigned part, unsigned i, unsigned n) {
    size_t all = (d->n - 1) * pieces_of_cuts(d);
    size_t first = all * part / d->n_parts, part_pieces = all * (part + 1) / d->n_parts - first;
    return (fcdp_delta_walk){
        .d = d, .first = first + part_pieces * i / n, .until = first + part_pieces * (i + 1) / n};
}

static size_t within(size_t x, size_t least, size_t most) {
    return x < least ? least : x > most ? most : x;
}

bool fcdp__delta_walk_next(fcdp_delta_walk *w, fcdp_delta_run *run_out) {
    const delta *d = w->d;
    while (w->member < d->n && w->at < w->until) {
        uint32_t member = w->member, k = w->cut++;
        if (member == d->me || k == d->n_cuts) {
            w->member++;
            w->cut = 0;
            w->in_member = 0;
            continue;
        }
        size_t bytes = d->cuts[k].bytes, n_pieces = pieces_of(bytes);
        size_t begin = within(w->first, w->at, w->at + n_pieces) - w->at;
        size_t end = within(w->until, w->at, w->at + n_pieces) - w->at, piece = w->in_member + begin;
        w->at += n_pieces;
        w->in_member += n_pieces;
        if (begin == end) continue;
        *run_out = (fcdp_delta_run){member, k, begin * PIECE_BYTES, within(end * PIECE_BYTES, 0, bytes),
                                    piece};
        return true;
    }
    return false;
}

/* Of all members' pieces, for this gather. NULL: no memory. */
static uint64_t *prints_of(const delta *d) {
    size_t bytes = d->n * pieces_of_cuts(d) * sizeof(uint64_t);
    return grown(&d->scratch->prints, &d->scratch->prints_bytes, bytes);
}

/* A member's bytes, whose pieces' fingerprints these are: in its places, or of its base. */
static uint64_t member_print(delta *d, uint32_t member, const uint64_t *prints, bool of_base) {
    uint64_t all = 0;
    for (cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        uint64_t row = 0;
        for (size_t piece = 0; piece < pieces_of(c->bytes); piece++) row = joined(row, *prints++);
        if (member == d->me) *(of_base ? &c->base_fingerprint : &c->shard_fingerprint) = row;
        c->shard_is_known = c->shard_is_known || (member == d->me && !of_base);
        all = joined(all, row);
    }
    return all;
}

/* Of all members' bytes; never 0. */
static uint64_t name_of(delta *d, const uint64_t *prints, bool of_base) {
    uint64_t name = 0;
    size_t n_pieces = pieces_of_cuts(d);
    for (uint32_t b = 0; b < d->n; b++)
        name = joined(name, member_print(d, b, prints + b * n_pieces, of_base));
    return name | 1;
}

/* As a verdict would name it; 0: no memory. */
static uint64_t base_name(delta *d) {
    uint64_t *prints = prints_of(d), *at = prints;
    if (!prints) return 0;
    for (uint32_t b = 0; b < d->n; b++)
        for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
            for (size_t piece = 0; piece < pieces_of(c->bytes); piece++)
                *at++ = piece_fingerprint(fcdp__delta_row(c->base, b), c->bytes, piece);
    return name_of(d, prints, true);
}

/* One cut's; 0: too many. */
static size_t cut_encode(delta *d, const cut *c, char *wire, size_t capacity) {
    if (d->rounds) return fcdp__int8_encode(c->shard, c->bytes, c->number, wire, &d->rounding);
    bool by_device = c->slots && (!c->own_is_known || c->own_fingerprint == c->base_fingerprint);
    d->n_by_device += by_device;
    return by_device ? fcdp__delta_wire_of_slots(c->slots, c->bytes, c->element_bytes, wire, capacity)
                     : fcdp__delta_encode(fcdp__delta_row(c->base, d->me), c->shard, c->bytes,
                                          c->element_bytes, wire, capacity);
}

/* A member's differences: of each cut its length, 8 bytes, and as many bytes of the codec's. 0: too many. */
static size_t encode(delta *d, char *wire, size_t capacity) {
    size_t at = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        uint64_t n = 0;
        if (at + sizeof n >= capacity) return 0;
        n = cut_encode(d, c, wire + at + sizeof n, capacity - at - sizeof n);
        if (!n) return 0;
        memcpy(wire + at, &n, sizeof n);
        at += sizeof n + n;
    }
    return at;
}

typedef struct wire_reader {
    const char *at;
    size_t left_bytes;
} wire_reader;

/* What a member has sent of its next cut. False, at the end or if the wire is malformed: nothing. */
static bool wire_next(wire_reader *r, const char **wire_out, size_t *bytes_out) {
    uint64_t n;
    if (r->left_bytes < sizeof n) return false;
    memcpy(&n, r->at, sizeof n);
    r->at += sizeof n;
    r->left_bytes -= sizeof n;
    if (n > r->left_bytes) return false;
    *wire_out = r->at;
    *bytes_out = n;
    r->at += n;
    r->left_bytes -= n;
    return true;
}

/* Rounded numbers are one range. */
static bool cut_decode(const delta *d, const cut *c, uint32_t member, const char *wire, size_t wire_bytes,
                       size_t begin, size_t end) {
    char *place = fcdp__delta_row(c->places, member);
    if (d->rounds) return !fcdp__int8_decode(place, c->bytes, c->number, wire, wire_bytes);
    return !fcdp__delta_decode_range(fcdp__delta_row(c->base, member), place, c->bytes, c->element_bytes,
                                     wire, wire_bytes, begin, end);
}

/* Of this rank's own wire, into its own place. */
static bool own_decode(const delta *d, const char *wire, size_t bytes) {
    wire_reader reader = {wire, bytes};
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        const char *of_cut;
        size_t n;
        if (!wire_next(&reader, &of_cut, &n) || !cut_decode(d, c, d->me, of_cut, n, 0, c->bytes))
            return false;
    }
    return true;
}

/* What threads do side by side. */
typedef struct decoding {
    const delta *d;
    size_t n_pieces;    /* of a member */
    uint64_t *prints;   /* of all members' pieces */
    atomic_bool failed; /* relaxed, as the next one: the team's end orders them */
    atomic_ullong core_ns;
} decoding;

/* What the members have sent, in the walk's order. */
typedef struct runs_reader {
    uint32_t member, n_cuts; /* n_cuts: of the member's, read so far; 0: none of any */
    wire_reader reader;
} runs_reader;

static bool run_decode(const decoding *of, const fcdp_delta_run *run, runs_reader *r) {
    const delta *d = of->d;
    const cut *c = &d->cuts[run->cut];
    uint64_t *prints = of->prints + run->member * of->n_pieces + run->piece;
    const char *wire, *place = fcdp__delta_row(c->places, run->member);
    size_t n;
    if (!r->n_cuts || r->member != run->member)
        *r = (runs_reader){
            .member = run->member,
            .reader = {d->scratch->all + run->member * d->wire_bytes, d->heads[run->member].wire_bytes}};
    do
        if (!wire_next(&r->reader, &wire, &n)) return false;
    while (r->n_cuts++ < run->cut);
    if (!cut_decode(d, c, run->member, wire, n, run->begin, run->end)) return false;
    for (size_t at = run->begin; at < run->end; at += PIECE_BYTES)
        *prints++ = piece_fingerprint(place, c->bytes, at / PIECE_BYTES);
    return true;
}

/* The same of this rank's own, which are there. */
static void part_own(void *context, unsigned part, unsigned n_parts) {
    const decoding *of = context;
    const delta *d = of->d;
    uint64_t *prints = of->prints + d->me * of->n_pieces;
    size_t first = of->n_pieces * part / n_parts, until = of->n_pieces * (part + 1) / n_parts, at = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        for (size_t piece = 0; piece < pieces_of(c->bytes); piece++, at++)
            if (at >= first && at < until)
                prints[at] = piece_fingerprint(fcdp__delta_row(c->places, d->me), c->bytes, piece);
}

static void part_decode(void *context, unsigned part, unsigned n_parts) {
    decoding *of = context;
    uint64_t start_ns = core_ns();
    fcdp_delta_run run;
    runs_reader reader = {0};
    fcdp_delta_walk walk = fcdp__delta_walk(of->d, of->d->n_decoded, part, n_parts);
    while (fcdp__delta_walk_next(&walk, &run))
        if (!run_decode(of, &run, &reader)) atomic_store_explicit(&of->failed, true, memory_order_relaxed);
    atomic_fetch_add_explicit(&of->core_ns, core_ns() - start_ns, memory_order_relaxed);
}

/* In staged memory the shard lies there. */
static void own_place(const delta *d) {
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        if (fcdp__delta_row(c->places, d->me) != c->shard)
            memcpy(fcdp__delta_row(c->places, d->me), c->shard, c->bytes);
}

/* ---- the rates ---- */

/* A first measurement stands alone; later ones are averaged, since a busy machine's are noisy. */
void fcdp__delta_rate_note(double *rate, double measured) {
    *rate = *rate > 0 ? 0.75 * *rate + 0.25 * measured : measured;
}

/* The least that a verdict took. Most take longer, as they wait for a member whose core computes before it
 * decodes, and plain gathers wait for such members, too. It rises where the link has become slower. */
static void latency_note(double *latency_ns, double measured) {
    double risen = *latency_ns + *latency_ns / 64;
    *latency_ns = *latency_ns > 0 && risen < measured ? risen : measured;
}

/* Of a gather whose differences are `wire` of its bytes. Each byte of a shard is encoded once, and decoded by
 * each of the others, by a core that would compute, and others wait for it: so that time counts three times.
 * Where all cores compute, the link's time by the clock may be twice what it is. Until a gather has measured
 * it, differences are tried. */
static int64_t gain_ns(const delta *d, double wire) {
    const fcdp_delta_rates *r = &d->comm->delta_rates;
    double others = d->n - 1, bytes = (double)d->bytes;
    if (!(r->link_ns > 0 && r->decode_ns > 0)) return 1;
    double spared_ns = others * bytes * r->link_ns * (1 - wire);
    return (int64_t)(spared_ns - 3 * (bytes * r->encode_ns + others * bytes * r->decode_ns) - r->latency_ns);
}

/* The same on all members: each has all heads. After a rest they are tried anew, and measured. */
static void next_decide(delta *d) {
    fcdp_delta_state *state = d->state;
    for (uint32_t b = 0; b < d->n; b++) {
        state->gain_ns += d->heads[b].gain_ns;
        state->most_ns += d->heads[b].most_ns;
    }
    uint32_t longer = 2 * state->rest_before + 1;
    state->rest = d->by_gain && state->gain_ns <= 0 ? longer < MAX_RESTS ? longer : MAX_RESTS : 0;
    state->rests_left = state->rest;
}

/* ---- the exchanges ---- */

/* The rates are for FCDP_CODEC=auto, none of whose gathers decodes behind the turn. */
static fcdp_status exchange(delta *d, fcdp_channel channel, void *buffer, size_t bytes, double *ns_out) {
    const fcdp_transport *transport = &d->comm->transport;
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = transport->exchange(transport->ctx, channel, buffer, bytes);
    *ns_out = (double)(fcdp__now_ns() - start_ns);
    d->sent_bytes += (d->n - 1) * bytes;
    if (d->decodes_behind) return status;
    double latency_ns = d->comm->delta_rates.latency_ns / 2, moved = (double)((d->n - 1) * bytes);
    if (!status && *ns_out > latency_ns && (moved >= MEASURED_BYTES || (latency_ns > 0 && bytes > 4096)))
        fcdp__delta_rate_note(&d->comm->delta_rates.link_ns, (*ns_out - latency_ns) / moved);
    return status;
}

static fcdp_status no_memory(delta *d, size_t bytes) {
    const fcdp_transport *transport = &d->comm->transport;
    fcdp_status status = fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for a gather of %zu bytes", bytes);
    transport->abort(transport->ctx, fcdp_error_text());
    return status;
}

/* To the scratch. */
static fcdp_status whole_exchange(delta *d, fcdp_channel channel) {
    double ns;
    char *all = grown(&d->scratch->all, &d->scratch->all_bytes, d->n * d->bytes);
    if (!all) return no_memory(d, d->n * d->bytes);
    char *at = all + d->me * d->bytes;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; at += c->bytes, c++)
        memcpy(at, fcdp__delta_row(c->places, d->me), c->bytes);
    return exchange(d, channel, all, d->bytes, &ns);
}

static void whole_place(const delta *d) {
    const char *at = d->scratch->all;
    for (uint32_t b = 0; b < d->n; b++)
        for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; at += c->bytes, c++)
            memcpy(fcdp__delta_row(c->places, b), at, c->bytes);
    fcdp__count(&d->comm->engine->counts, FCDP_COUNT_DELTA_WHOLE, 1);
}

/* Of wire_bytes from each member, to the scratch. */
static fcdp_status differences_cross(delta *d) {
    double ns;
    char *all = grown(&d->scratch->all, &d->scratch->all_bytes, d->n * d->wire_bytes);
    if (!all) return no_memory(d, d->n * d->wire_bytes);
    char *own = all + d->me * d->wire_bytes;
    size_t own_bytes = d->heads[d->me].wire_bytes;
    memcpy(own, d->scratch->own, own_bytes);
    memset(own + own_bytes, 0, d->wire_bytes - own_bytes);
    return exchange(d, FCDP_CHANNEL_TURN, all, d->wire_bytes, &ns);
}

/* The next part of what has come of the others, to its places. Whether it is right, all members find out. */
static fcdp_status differences_decode(delta *d) {
    decoding of = {.d = d, .n_pieces = pieces_of_cuts(d), .prints = prints_of(d)};
    if (!of.prints) return no_memory(d, d->n * of.n_pieces * sizeof *of.prints);
    team_run(d, (d->n - 1) * of.n_pieces / d->n_parts, part_decode, &of);
    d->n_decoded++;
    d->malformed = d->malformed || of.failed;
    d->decode_ns += (double)of.core_ns / ((double)(d->n - 1) * (double)d->bytes);
    if (!d->decodes_behind) fcdp__delta_rate_note(&d->comm->delta_rates.decode_ns, d->decode_ns);
    return FCDP_OK;
}

/* *right_out: all members have the same bytes. */
static fcdp_status differences_judge(delta *d, fcdp_channel channel, bool *right_out) {
    double ns;
    uint64_t *prints = prints_of(d);
    if (!prints) return no_memory(d, d->n * pieces_of_cuts(d) * sizeof *prints);
    bool decoded = d->n_decoded == d->n_parts && !d->malformed;
    uint64_t name = decoded ? name_of(d, prints, false) : 0;
    uint64_t *verdicts = (uint64_t *)(void *)d->scratch->all;
    verdicts[d->me] = name;
    fcdp_status status = exchange(d, channel, verdicts, sizeof *verdicts, &ns);
    if (status) return status;
    if (!d->decodes_behind) latency_note(&d->comm->delta_rates.latency_ns, 2 * ns); /* and the heads' */
    *right_out = verdicts[0] != 0;
    for (uint32_t b = 1; b < d->n; b++) *right_out = *right_out && verdicts[b] == verdicts[0];
    if (*right_out) d->name = name;
    static atomic_bool said;
    if (!*right_out && !atomic_exchange(&said, true))
        fcdp__log(
            FCDP_LOG_WARN,
            "'%s': what came of differences is not the same on all ranks, and crosses whole; this is said "
            "once",
            fcdp__name_text(d->cuts[0].group->name));
    return FCDP_OK;
}

/* The places have the bytes of all members: they are decoded and right, or cross whole. With copies, these
 * stay in the scratch, as the parts may be under way from the places. */
static fcdp_status places_finish(delta *d) {
    fcdp_channel channel = d->decodes_behind ? FCDP_CHANNEL_VERDICT_0 + d->inter_index : FCDP_CHANNEL_TURN;
    bool right = false;
    fcdp_status status = d->wire_bytes ? differences_judge(d, channel, &right) : FCDP_OK;
    if (!status && right) fcdp__count(&d->comm->engine->counts, FCDP_COUNT_DELTA_GATHERS, 1);
    if (status || right) return status;
    status = whole_exchange(d, channel);
    if (status) return status;
    if (d->copies)
        d->mends = true;
    else
        whole_place(d);
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
    if (d->by_gain) {
        d->heads[d->me].most_ns = gain_ns(d, 0);
        d->heads[d->me].gain_ns = d->state->wire >= 1 ? -1 : gain_ns(d, d->state->wire);
    }
    fcdp_status status = exchange(d, FCDP_CHANNEL_TURN, d->heads, sizeof *d->heads, &ns);
    if (status) return status;
    d->wire_bytes = wire_bytes_of(d);
    d->decodes_behind = true;
    for (uint32_t b = 0; b < d->n; b++) {
        d->decodes_behind = d->decodes_behind && d->heads[b].may_decode_behind;
        if (d->heads[b].base && !d->heads[b].wire_bytes) d->state->wire = 1; /* it encoded in vain */
    }
    atomic_store_explicit(&d->comm->all_decode_behind, d->decodes_behind, memory_order_relaxed);
    next_decide(d);
    if (d->wire_bytes) {
        d->state->wire = (double)d->wire_bytes / (double)d->bytes;
        fcdp__delta_rate_note(&d->comm->delta_rates.encode_ns, (double)d->encode_ns / (double)d->bytes);
        status = differences_cross(d);
    }
    if (status || d->decodes_behind) return status;
    FCDP_CHECK(0, !d->fetches_beside);
    if (d->wire_bytes) status = differences_decode(d);
    return status ? status : places_finish(d);
}

/* ---- what runs in the streams' order ---- */

/* The transport is not asked: NCCL's may end what its launches have begun, which is not for a host function.
 * An exchange over one that has failed returns at once, and the monitor finds the failure. */
static bool is_over(const delta *d) {
    return atomic_load_explicit(&d->comm->failed, memory_order_acquire);
}

/* Words are raised without bytes where a rank has failed, and before that its failure is there. They are of a
 * later epoch where others are ahead, and have stored their own lanes' pieces of what comes next, perhaps
 * without ever storing this epoch's slices. What lies there then is a base if all members have the same
 * bytes: heads and decoded bytes are compared. */
static bool base_is_there(const delta *d) {
    uint32_t slice;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        if (!d->base_name && c->from.of_others &&
            !fcdp__region_others_stored(c->group->region, c->span, c->from.epoch))
            return false;
    return !fcdp__host_peer_failed(d->comm->host, &slice);
}

static void differences_make(delta *d) {
    uint64_t start_ns = core_ns();
    size_t most = (size_t)(MOST_WIRE * (double)d->bytes);
    char *wire = grown(&d->scratch->own, &d->scratch->own_bytes, most + 1);
    fcdp_delta_head *mine = &d->heads[d->me];
    if (!wire || !base_is_there(d)) return;                  /* the shards cross whole */
    mine->base = d->base_name ? d->base_name : base_name(d); /* 0 says that it has none */
    if (mine->base) mine->wire_bytes = encode(d, wire, most);
    if (mine->wire_bytes && d->n_by_device == d->n_cuts)
        fcdp__count(&d->comm->engine->counts, FCDP_COUNT_DELTA_BY_DEVICE, 1);
    d->encode_ns = core_ns() - start_ns;
}

/* There is no base, which is the same on all members, then. */
static void rounded_make(delta *d) {
    size_t most = 1;
    fcdp_delta_head *mine = &d->heads[d->me];
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        most += sizeof(uint64_t) + fcdp__int8_bound(c->bytes, c->number);
    char *wire = grown(&d->scratch->own, &d->scratch->own_bytes, most);
    if (!wire) {
        fcdp__log(FCDP_LOG_DEBUG, "'%s': %d", d->cuts[0].group->name, (int)no_memory(d, most));
        return;
    }
    mine->base = 1;
    mine->wire_bytes = encode(d, wire, most);
    bool decoded = own_decode(d, wire, mine->wire_bytes);
    FCDP_CHECK(0, decoded);
    fcdp__lock_acquire(&d->comm->engine->lock);
    d->comm->engine->rounding.lost += d->rounding.lost;
    d->comm->engine->rounding.whole += d->rounding.whole;
    fcdp__lock_release(&d->comm->engine->lock);
}

/* False: the group has ended, and the memory that the gather is in may have. */
static bool run_begin(delta *d) {
    int idle = FCDP_DELTA_IDLE;
    return atomic_compare_exchange_strong_explicit(&d->phase, &idle, FCDP_DELTA_RUNNING, memory_order_acquire,
                                                   memory_order_relaxed);
}

static void run_end(delta *d, bool is_last) {
    atomic_store_explicit(&d->phase, is_last ? FCDP_DELTA_DONE : FCDP_DELTA_IDLE, memory_order_release);
}

/* All members get what of the shard is read here: where the host computes, into this rank's own place. (On a
 * device the shards are fetched once, and copied to their place there later; a program that writes them
 * meanwhile, without FCDP's order, has two versions of them.) Where it changed while it was encoded, what the
 * others decode has another fingerprint. */
static void shards_read(delta *d) {
    if (!d->rounds) own_place(d);
    uint64_t *prints = d->heads[d->me].wire_bytes || fcdp__delta_keeps(d) ? prints_of(d) : NULL;
    if (!prints) return;
    decoding of = {.d = d, .n_pieces = pieces_of_cuts(d), .prints = prints};
    team_run(d, of.n_pieces, part_own, &of);
    (void)member_print(d, d->me, prints + d->me * of.n_pieces, false);
}

void fcdp__delta_encode_run(void *gather) {
    delta *d = gather;
    if (!run_begin(d)) return;
    if (!is_over(d)) {
        if (d->encodes) differences_make(d);
        if (d->rounds) rounded_make(d);
        if (!d->fetches_beside) shards_read(d);
    }
    run_end(d, false);
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

void fcdp__delta_span_end(const fcdp_delta *d, fcdp_stream stream, uint64_t bytes) {
    fcdp_trace_event event = {.kind = FCDP_EVENT_GATHER, .object = d->object, .bytes = bytes, .a = bytes};
    fcdp__trace_span_end(spans_of(d), d->span, stream, &event, 1);
}

/* The turn's bytes, and those of the verdict that follows, or of the shards. Where the device's times are not
 * known, the event is written here. */
static void span_say(const delta *d) {
    size_t follow = !(d->came && d->decodes_behind) ? 0 : d->wire_bytes ? sizeof(uint64_t) : d->bytes;
    uint64_t bytes = d->sent_bytes + (d->n - 1) * follow;
    if (d->span.number)
        fcdp__trace_span_bytes(spans_of(d), d->span, bytes);
    else
        fcdp__delta_span_end(d, NULL, bytes);
}

/* False: it was too late, or it failed. */
static bool tried(delta *d, fcdp_status (*step)(delta *)) {
    if (is_over(d)) return false;
    bool done = !step(d);
    if (!done) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    return done;
}

static void bytes_count(const delta *d) {
    fcdp__count(&d->comm->engine->counts, FCDP_COUNT_GATHER_INTER_BYTES, d->sent_bytes);
    if (d->sent_bytes) groups_count(d);
}

void fcdp__delta_cross_run(void *gather) {
    delta *d = gather;
    if (!run_begin(d)) return;
    d->came = tried(d, cross);
    span_say(d);
    if (!d->may_decode_behind) bytes_count(d);
    run_end(d, !d->may_decode_behind && !d->stores);
}

void fcdp__delta_decode_run(void *gather) {
    delta *d = gather;
    if (!run_begin(d)) return;
    if (d->came && d->decodes_behind && d->wire_bytes) d->came = tried(d, differences_decode);
    run_end(d, false);
}

void fcdp__delta_judge_run(void *gather) {
    delta *d = gather;
    if (!run_begin(d)) return;
    if (d->came && d->fetches_beside) shards_read(d);
    if (d->came && d->decodes_behind) d->came = tried(d, places_finish);
    bytes_count(d);
    run_end(d, !d->copies && !d->stores);
}

void fcdp__delta_mend_run(void *gather) {
    delta *d = gather;
    if (!run_begin(d)) return;
    if (d->came && d->mends) {
        whole_place(d);
        for (size_t i = 0; i < d->n_copies; i++) d->copies[i].wanted = 1;
    }
    run_end(d, !d->stores);
}

void fcdp__delta_store_run(void *gather) {
    delta *d = gather;
    if (!run_begin(d)) return;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts && d->came; c++)
        for (uint32_t i = 0; i < fcdp__host_block_copies(c->group->block); i++)
            for (uint32_t b = 0; b < d->n; b++)
                memcpy(fcdp__delta_host_row(c, i, b), fcdp__delta_row(c->places, b), c->bytes);
    run_end(d, true);
}
