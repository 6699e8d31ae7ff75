/* delta.c - which gathers bring differences, or rounded numbers, and how one is enqueued. What happens in it
 * is in delta_exchange.c.
 *
 * What the host does for a gather are stages in its stream's order: it encodes, then in the lane's turn the
 * differences cross; on a device they are decoded and judged behind the turn, mended if they are wrong, and
 * mostly stored, on the stream of copies to the host. There workers do that (alloc/worker.h); where the
 * host computes, host functions do, and decode in the turn. What they read and write lies in device memory
 * where the host computes, and else in page-locked memory, with copies beside them and behind
 * (delta_device.c).
 */
#include "comm/delta.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "comm/delta_exchange.h"
#include "comm/trace.h"

typedef fcdp_delta delta;
typedef fcdp_delta_extent cut;

/* ---- which gathers ---- */

/* NULL: differences can cross. The same on every member. */
static const char *why_whole(const fcdp_comm *comm) {
    const fcdp_engine *engine = comm->engine;
    if (!engine->host_computes && engine->options.codec != FCDP_CODEC_DELTA)
        return "the model computes on a device, where FCDP_CODEC=delta alone serves";
    const fcdp_transport *transport = &comm->transport;
    if (!transport->exchange)
        return transport->why_no_exchange ? transport->why_no_exchange
                                          : "the transport exchanges no host memory";
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

/* No stage of it is under way, or will be; no stream has it. */
static void delta_free(delta *d) {
    for (size_t i = 0; i < sizeof d->jobs / sizeof *d->jobs; i++) fcdp__worker_job_end(&d->jobs[i]);
    free(d->heads);
    free(d);
}

/* What a gather kept on the device, and the name of what it brought, are the next one's. Of several groups'
 * gather, some may have ended. */
static void delta_end(delta *d) {
    fcdp__own_bases_learn(d);
    d->state->named = (fcdp_delta_named){d->name, d->brings, d->stores};
    if (d->decodes_behind && d->decode_ns > 0)
        fcdp__delta_rate_note(&d->comm->delta_rates.decode_ns, d->decode_ns);
    delta_free(d);
}

/* Where its last gathers are still under way, the host waits behind the n events. */
static fcdp_status state_await(fcdp_delta_state *state, fcdp_driver *drv, const fcdp_event *events, int n) {
    bool done = true;
    for (const delta *d = state->last; d; d = d->next)
        done = done && atomic_load_explicit(&d->phase, memory_order_acquire) == FCDP_DELTA_DONE;
    for (int i = 0; i < n && !done; i++) {
        fcdp_status status = fcdp__driver_event_sync(drv, events[i]);
        if (status) return status;
    }
    while (state->last) {
        delta *d = state->last;
        state->last = d->next;
        delta_end(d);
    }
    return FCDP_OK;
}

/* Of the gathers that come next: is it their turn? */
static bool state_serves(fcdp_delta_state *state) {
    if (state->rests_left > 0) {
        state->rests_left--;
        return false;
    }
    state->is_hopeless = state->most_ns < 0;
    state->gain_ns = state->most_ns = 0;
    state->rest_before = state->rest; /* of several gathers together, each decides anew */
    return true;
}

/* On a mapped group's device the bytes are in host memory, and nothing restores them. */
bool fcdp__delta_may_store(const fcdp_group *group) {
    return fcdp__delta_may(group) && !group->comm->engine->host_computes && group->tier != FCDP_TIER_MAPPED;
}

/* On a device each gather is one of differences, once there is a base. */
bool fcdp__delta_stores_next(const fcdp_group *group) {
    return fcdp__delta_may_store(group) && group->delta.is_primed;
}

fcdp_status fcdp__delta_serves(fcdp_use *use, bool *serves_out) {
    fcdp_group *group = use->group;
    *serves_out = false;
    if (!fcdp__delta_may(group)) return FCDP_OK;
    const fcdp_event events[] = {group->crossed, fcdp__region_stored(group->region)};
    fcdp_status status = state_await(&group->delta, group->comm->engine->drv, events, 2);
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

/* Of which bytes, `fill` fills behind the base. */
static uint64_t cuts_fingerprint(const delta *d, uint32_t fill) {
    uint64_t all = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        const uint64_t of[] = {c->group->id, c->index, c->from.epoch + fill};
        all = fcdp__fingerprint_by_host(of, sizeof of, all);
    }
    return all;
}

static delta *delta_make(fcdp_comm *comm, fcdp_delta_state *state, const fcdp_delta_cut *cuts, size_t n,
                         const fcdp_delta_way *way) {
    uint32_t which = way->inter == comm->set->streams[FCDP_STREAM_INTER_0] ? 0 : 1;
    delta *d = calloc(1, sizeof *d + n * sizeof *d->cuts);
    fcdp_delta_head *heads = calloc(comm->topology.n_nodes, sizeof *heads);
    if (!d || !heads) {
        free(d);
        free(heads);
        return NULL;
    }
    d->comm = comm;
    d->state = state;
    d->scratch = &comm->set->delta_scratch[which];
    d->inter_index = which;
    d->object = cuts[0].group == cuts[n - 1].group ? fcdp__group_object(cuts[0].group) : 0;
    d->n = comm->topology.n_nodes;
    d->me = comm->topology.node;
    d->n_parts = 1;
    d->by_gain = comm->engine->options.codec == FCDP_CODEC_AUTO;
    d->encodes = !(d->by_gain && state->is_hopeless);
    d->rounds = comm->engine->options.codec == FCDP_CODEC_INT8;
    d->stores = way->stores;
    d->may_decode_behind = !comm->engine->host_computes && comm->transport.all_channels &&
                           fcdp__driver_has_values(comm->engine->drv);
    heads[d->me].may_decode_behind = d->may_decode_behind;
    d->heads = heads;
    bool of_others = false;
    for (const fcdp_delta_cut *c = cuts; c < cuts + n; c++) {
        d->cuts[d->n_cuts++] = (cut){.group = c->group,
                                     .from = c->base,
                                     .span = c->group->layout->extents[c->extent].span,
                                     .index = c->extent,
                                     .bytes = c->part.bytes,
                                     .number = (fcdp_number)c->group->numbers[c->extent],
                                     .element_bytes = c->group->element_bytes[c->extent] == 2 ? 2 : 4};
        d->bytes += c->part.bytes;
        d->encodes = d->encodes && c->base.where != FCDP_BASE_NOWHERE;
        of_others = of_others || c->base.of_others;
    }
    const fcdp_delta_named *named = &state->named;
    if (d->encodes && named->cuts == cuts_fingerprint(d, 0) && (named->stored_by_host || !of_others))
        d->base_name = named->name;
    d->brings = cuts_fingerprint(d, 1);
    d->next = state->last;
    state->last = d;
    return d;
}

/* Where the stages find each cut's bytes: with `staged`, all but a base in host memory there, and else in
 * device memory. */
static void rows_set(delta *d, const fcdp_delta_cut *cuts, fcdp_delta_staged *staged) {
    const fcdp_topology *topology = &d->comm->topology;
    for (uint32_t k = 0; k < d->n_cuts; k++) {
        cut *c = &d->cuts[k];
        c->shard = (const char *)(uintptr_t)cuts[k].shard.addr;
        c->places = (fcdp_delta_rows){.at = (char *)(uintptr_t)cuts[k].part.at.addr,
                                      .stride_bytes = cuts[k].part.stride_bytes};
        c->base = c->places;
        if (staged) {
            c->places = (fcdp_delta_rows){
                .at = staged->places, .stride_bytes = d->bytes, .own = staged->own, .me = d->me};
            c->shard = staged->own;
            c->base = (fcdp_delta_rows){.at = staged->base, .stride_bytes = d->bytes};
            c->slots = c->slots_bytes ? staged->slots : NULL;
            staged->own += c->bytes;
            staged->places += c->bytes;
            staged->base += c->bytes;
            staged->slots += c->slots_bytes;
        }
        fcdp_piece first = fcdp__plan_shard(c->group->layout, topology, cuts[k].extent, 0, topology->local);
        c->host_offset_bytes = first.offset_bytes;
        c->host_stride_bytes = topology->node_size * first.bytes;
        if (c->from.where == FCDP_BASE_IN_HOST)
            c->base = (fcdp_delta_rows){.at = (char *)fcdp__host_data(c->group->block) + c->host_offset_bytes,
                                        .stride_bytes = c->host_stride_bytes};
        else if (c->from.where == FCDP_BASE_NOWHERE)
            c->base = (fcdp_delta_rows){0};
    }
}

/* What the stages read and write, for the simulated device's checks. Host memory that is page-locked in part
 * is not one range to it. */
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

/* A piece of a group's host memory. */
static void host_add(access_list *list, const cut *c, const char *at, size_t bytes, bool writes) {
    bool pinned;
    for (size_t done = 0, n; done < bytes; done += n) {
        n = fcdp__host_run_bytes(c->group->block, at + done, bytes - done, &pinned);
        access_add(list, at + done, n, writes);
    }
}

static void base_add(access_list *list, const cut *c, uint32_t member, size_t begin, size_t bytes) {
    const char *at = fcdp__delta_row(c->base, member) + begin;
    if (c->from.where == FCDP_BASE_IN_HOST)
        host_add(list, c, at, bytes, false);
    else
        access_add(list, at, bytes, false);
}

static void announce_list(const delta *d, access_list *list) {
    fcdp__driver_announce(d->comm->engine->drv, list->at, list->n);
    free(list->at);
}

static void announce_part(const delta *d, unsigned part) {
    access_list list = {0};
    fcdp_delta_run run;
    fcdp_delta_walk walk = fcdp__delta_walk(d, part, 0, 1);
    while (fcdp__delta_walk_next(&walk, &run)) {
        const cut *c = &d->cuts[run.cut];
        size_t bytes = run.end - run.begin;
        if (d->encodes) base_add(&list, c, run.member, run.begin, bytes);
        access_add(&list, fcdp__delta_row(c->places, run.member) + run.begin, bytes, true);
    }
    announce_list(d, &list);
}

/* But for a part. In the turn all of the three stages behind the first one may come to pass. */
static void announce(const delta *d, fcdp_delta_stage stage) {
    access_list list = {0};
    bool encodes = stage == FCDP_DELTA_ENCODE;
    bool reads_alone = d->copies && stage == FCDP_DELTA_JUDGE;
    if (d->fetches_beside && stage == FCDP_DELTA_CROSS) return;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        bool is_in_place = c->shard == fcdp__delta_row(c->places, d->me);
        if (encodes && c->slots) access_add(&list, c->slots, c->slots_bytes, false);
        if (encodes && d->fetches_beside) continue;
        if (encodes) access_add(&list, c->shard, c->bytes, false);
        for (uint32_t b = 0; b < d->n; b++) {
            bool is_mine = b == d->me;
            if (d->encodes && stage <= FCDP_DELTA_CROSS && (encodes || !is_mine))
                base_add(&list, c, b, 0, c->bytes);
            if (is_mine ? !(encodes && is_in_place) : !encodes && !reads_alone)
                access_add(&list, fcdp__delta_row(c->places, b), c->bytes, encodes == is_mine);
        }
    }
    if (stage == FCDP_DELTA_MEND)
        access_add(&list, (const char *)d->copies, d->n_copies * sizeof *d->copies, true);
    announce_list(d, &list);
}

static void announce_store(const delta *d) {
    access_list list = {0};
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++)
        for (uint32_t b = 0; b < d->n; b++) {
            access_add(&list, fcdp__delta_row(c->places, b), c->bytes, false);
            for (uint32_t i = 0; i < fcdp__host_block_copies(c->group->block); i++)
                host_add(&list, c, fcdp__delta_host_row(c, i, b), c->bytes, true);
        }
    announce_list(d, &list);
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

/* ---- one gather ---- */

/* Of each of two gathers that may decode at once: half of this rank's share of the cores. Where something has
 * chosen the process's cores, they are taken for its own; FCDP itself binds it to those of a NUMA node. */
static unsigned n_decoders(const fcdp_comm *comm) {
    enum { MOST = 4 };
    const fcdp_engine *engine = comm->engine;
    if (engine->options.codec_threads) return (unsigned)engine->options.codec_threads;
    fcdp_cpus cpus;
    unsigned n = fcdp__cpus_own(&cpus) ? fcdp__cpus_count(&cpus) : 1;
    bool is_shared = engine->numa.binds || (long)n >= sysconf(_SC_NPROCESSORS_ONLN);
    if (engine->numa.binds) n *= engine->numa.n_nodes;
    n /= 2 * (is_shared ? comm->topology.node_size : 1);
    return n < 1 ? 1 : n > MOST ? MOST : n;
}

static fcdp_status workers_make(const fcdp_comm *comm) {
    static const char *const names[FCDP_N_INTER] = {"fcdp-inter 0", "fcdp-inter 1"};
    fcdp_stream_set *set = comm->set;
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_INTER && !status; i++) {
        if (set->workers[i]) continue;
        status = fcdp__worker_create(set->engine->drv, names[i], &set->workers[i]);
        if (!status) set->teams[i] = fcdp__team_create(set->engine->drv, "fcdp-decode", n_decoders(comm));
    }
    if (!status && !set->storer) status = fcdp__worker_create(set->engine->drv, "fcdp-store", &set->storer);
    return status;
}

/* Where the host computes, a stream is a thread. `part`: of FCDP_DELTA_DECODE. */
static fcdp_status part_launch(delta *d, fcdp_delta_stage stage, unsigned part, fcdp_stream stream) {
    static const fcdp_host_function functions[FCDP_DELTA_N_STAGES] = {
        fcdp__delta_encode_run, fcdp__delta_cross_run, fcdp__delta_decode_run,
        fcdp__delta_judge_run,  fcdp__delta_mend_run,  fcdp__delta_store_run};
    if (d->comm->engine->host_computes)
        return fcdp__driver_host_function(d->comm->engine->drv, stream, functions[stage], d);
    fcdp_stream_set *set = d->comm->set;
    fcdp_worker *worker = stage == FCDP_DELTA_STORE ? set->storer : set->workers[d->inter_index];
    fcdp_worker_job *job = &d->jobs[part ? FCDP_DELTA_N_STAGES + part - 1 : stage];
    return fcdp__worker_launch(worker, stream, functions[stage], d, job);
}

static fcdp_status stage_launch(delta *d, fcdp_delta_stage stage, fcdp_stream stream) {
    return part_launch(d, stage, 0, stream);
}

/* Does the host read the shards only to name and store them? Not before all members are known to decode
 * behind the turn: else they may have to cross whole in it. A base on the device comes to the host with
 * them. */
static bool may_fetch_beside(const delta *d) {
    bool may = d->may_decode_behind && d->base_name &&
               atomic_load_explicit(&d->comm->all_decode_behind, memory_order_relaxed);
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts && may; c++)
        may = c->slots && !c->own_is_known && c->from.where == FCDP_BASE_IN_HOST;
    return may;
}

static fcdp_status shards_begin(delta *d, const fcdp_delta_cut *cuts, fcdp_stream inter) {
    fcdp_delta_staged staged;
    if (d->comm->engine->host_computes) {
        rows_set(d, cuts, NULL);
        return stores_await(d, inter);
    }
    fcdp__delta_encoder_begin(d, cuts);
    fcdp_status status = fcdp__delta_staged_reserve(d, &staged);
    if (status) return status;
    rows_set(d, cuts, &staged);
    d->fetches_beside = may_fetch_beside(d);
    if (d->fetches_beside) fcdp__delta_copies_begin(d, cuts);
    status = fcdp__delta_shards_fetch(d, cuts, inter);
    if (status || d->fetches_beside) return status;
    status = fcdp__driver_stream_wait(d->comm->engine->drv, inter, d->scratch->fetched);
    return status ? status : stores_await(d, inter);
}

/* With d->copies: the part comes to the device as it is. */
static fcdp_status part_follow(const delta *d, const fcdp_delta_cut *cuts, unsigned part,
                               const fcdp_delta_way *way) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_status status = fcdp__driver_event_record(drv, d->scratch->decoded[part], way->inter);
    if (!status) status = fcdp__driver_stream_wait(drv, way->bring, d->scratch->decoded[part]);
    if (!status) status = fcdp__delta_part_bring(d, cuts, part, way->bring);
    return status || part ? status : fcdp__delta_own_bring(d, cuts, way->bring);
}

/* What the turn has left to do. */
static fcdp_status places_launch(delta *d, const fcdp_delta_cut *cuts, const fcdp_delta_way *way) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_stream inter = way->inter;
    fcdp_status status = d->fetches_beside ? stores_await(d, inter) : FCDP_OK;
    if (!status && d->fetches_beside) status = fcdp__delta_places_await(d, inter);
    for (unsigned part = 0; part < d->n_parts && !status; part++) {
        announce_part(d, part);
        status = part_launch(d, FCDP_DELTA_DECODE, part, inter);
        if (!status && d->copies) status = part_follow(d, cuts, part, way);
    }
    if (!status && d->copies) status = fcdp__driver_event_record(drv, d->scratch->parts_brought, way->bring);
    if (!status && d->fetches_beside) status = fcdp__driver_stream_wait(drv, inter, d->scratch->fetched);
    if (status) return status;
    announce(d, FCDP_DELTA_JUDGE);
    status = stage_launch(d, FCDP_DELTA_JUDGE, inter);
    if (status || !d->copies) return status;
    status = fcdp__driver_stream_wait(drv, inter, d->scratch->parts_brought);
    if (status) return status;
    announce(d, FCDP_DELTA_MEND);
    return stage_launch(d, FCDP_DELTA_MEND, inter);
}

/* Behind the verdict. */
static fcdp_status places_bring(const delta *d, const fcdp_delta_cut *cuts, fcdp_stream bring) {
    fcdp_status status;
    if (d->copies) {
        status = fcdp__own_copies_launch(d->cuts[0].group, d->n_copies, bring);
    } else {
        status = fcdp__delta_own_bring(d, cuts, bring);
        if (!status) status = fcdp__delta_part_bring(d, cuts, 0, bring);
    }
    return status ? status
                  : fcdp__driver_event_record(d->comm->engine->drv, d->scratch->brought[d->room], bring);
}

static fcdp_status gather_enqueue(delta *d, const fcdp_delta_cut *cuts, const fcdp_delta_way *way) {
    fcdp_comm *comm = d->comm;
    fcdp_driver *drv = comm->engine->drv;
    fcdp_event turn = comm->set->turn[FCDP_LANE_INTER];
    fcdp_stream inter = way->inter;
    bool is_staged = !comm->engine->host_computes;
    fcdp_status status = shards_begin(d, cuts, inter);
    if (!status) {
        announce(d, FCDP_DELTA_ENCODE);
        status = stage_launch(d, FCDP_DELTA_ENCODE, inter);
    }
    if (!status && is_staged && !d->fetches_beside) status = fcdp__delta_places_await(d, inter);
    if (!status) d->span = fcdp__comm_span_begin(comm->set, FCDP_LANE_INTER, inter);
    if (!status) status = fcdp__driver_stream_wait(drv, inter, turn);
    if (!status) {
        announce(d, FCDP_DELTA_CROSS);
        status = stage_launch(d, FCDP_DELTA_CROSS, inter);
    }
    if (status)
        fcdp__trace_span_drop(fcdp__tiering_spans(comm->engine->tiering), d->span);
    else if (d->span.number)
        fcdp__delta_span_end(d, inter, 0); /* the bytes are the stage's to say */
    if (!status) status = fcdp__driver_event_record(drv, turn, inter);
    if (!status) fcdp__count(&comm->engine->counts, FCDP_COUNT_GATHER_CALLS, 1);
    if (!status && d->may_decode_behind) status = places_launch(d, cuts, way);
    if (!status && is_staged) status = fcdp__driver_event_record(drv, d->scratch->arrived, inter);
    if (!status && way->bring != inter)
        status = fcdp__driver_stream_wait(drv, way->bring, d->scratch->arrived);
    return !status && is_staged ? places_bring(d, cuts, way->bring) : status;
}

/* `state`'s gather is the stream's from here on, whatever fails. */
fcdp_status fcdp__delta_gather(fcdp_comm *comm, fcdp_delta_state *state, const fcdp_delta_cut *cuts, size_t n,
                               const fcdp_delta_way *way) {
    delta *d = delta_make(comm, state, cuts, n, way);
    if (!d) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", cuts[0].group->name);
    if (comm->engine->host_computes) return gather_enqueue(d, cuts, way);
    fcdp_status status = workers_make(comm);
    if (status) return status;
    fcdp__own_bases_acquire(&comm->set->own_bases);
    status = gather_enqueue(d, cuts, way);
    if (status) fcdp__own_bases_fail(comm->set);
    fcdp__own_bases_release(&comm->set->own_bases);
    return status;
}

static fcdp_status store_enqueue(void *gather, fcdp_stream d2h) {
    delta *d = gather;
    fcdp_driver *drv = d->comm->engine->drv;
    announce_store(d);
    fcdp_status status = stage_launch(d, FCDP_DELTA_STORE, d2h);
    return status ? status : fcdp__driver_event_record(drv, d->scratch->stored[d->room], d2h);
}

fcdp_status fcdp__delta_store(fcdp_group *group, uint32_t span_mask) {
    return fcdp__region_store_by(group->region, span_mask, store_enqueue, group->delta.last,
                                 group->delta.last->scratch->arrived);
}

/* From here on no stage reads or writes what is not the gather's own. Where the device has failed, one may be
 * under way that no wait for the device has waited for: it ends as its exchange does. False: it is done, and
 * no stream has it. */
static bool delta_cancel(delta *d) {
    const struct timespec pause = {.tv_nsec = 1000000};
    int phase = FCDP_DELTA_IDLE;
    while (!atomic_compare_exchange_strong_explicit(&d->phase, &phase, FCDP_DELTA_CANCELLED,
                                                    memory_order_acq_rel, memory_order_acquire)) {
        if (phase != FCDP_DELTA_RUNNING) return phase == FCDP_DELTA_CANCELLED;
        (void)nanosleep(&pause, NULL);
        phase = FCDP_DELTA_IDLE;
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
