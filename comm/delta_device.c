/* delta_device.c - a gather of differences where the device's memory is not the host's: copies to page-locked
 * memory and from it, and what kernels do for it.
 *
 * The device encodes from this rank's own base: in the region, if the base of all members is there, else one
 * that is kept for that (own_base.h). The wire that it makes is used if what it encoded from is of the fill
 * that a verdict has named, or has the fingerprint of the base that the host reads. If it is not, or if the
 * device has no own base, the host encodes.
 */
#include <stdlib.h>

#include "base/size.h"
#include "comm/delta_exchange.h"

typedef fcdp_delta delta;
typedef fcdp_delta_extent cut;

/* ---- page-locked memory ---- */

enum { N_EVENTS = 4 + 2 * FCDP_DELTA_N_ROOMS + FCDP_DELTA_MOST_PARTS };

static void events_of(fcdp_delta_scratch *scratch, fcdp_event *events_out[N_EVENTS]) {
    fcdp_event **next = events_out;
    *next++ = &scratch->encoded;
    *next++ = &scratch->fetched;
    *next++ = &scratch->arrived;
    *next++ = &scratch->parts_brought;
    for (int i = 0; i < FCDP_DELTA_N_ROOMS; i++) *next++ = &scratch->brought[i];
    for (int i = 0; i < FCDP_DELTA_N_ROOMS; i++) *next++ = &scratch->stored[i];
    for (int i = 0; i < FCDP_DELTA_MOST_PARTS; i++) *next++ = &scratch->decoded[i];
}

void fcdp__delta_scratch_free(fcdp_delta_scratch *scratch, fcdp_driver *drv) {
    if (fcdp__pinned_destroy(drv, &scratch->staged)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    fcdp_event *events[N_EVENTS];
    events_of(scratch, events);
    for (size_t i = 0; i < N_EVENTS; i++)
        if (*events[i]) fcdp__driver_event_destroy(drv, *events[i]);
    free(scratch->own);
    free(scratch->all);
    free(scratch->prints);
    *scratch = (fcdp_delta_scratch){0};
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Of the others. */
static size_t places_bytes(const delta *d) {
    return fcdp__round_up((d->n - 1) * d->bytes, 64);
}

static bool has_base_on_device(const delta *d) {
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts && d->encodes; c++)
        if (c->from.where == FCDP_BASE_ON_DEVICE) return true;
    return false;
}

/* What is on the streams uses the smaller one, and what the host does for them. Not all of it is behind the
 * scratch's events, or behind anything on the streams, if a call of another shard group's gather has
 * failed. */
static fcdp_status staged_empty(const delta *d) {
    fcdp_status status = fcdp__stream_set_drain(d->comm->set);
    return status ? status : fcdp__pinned_destroy(d->comm->engine->drv, &d->scratch->staged);
}

static fcdp_status events_make(fcdp_delta_scratch *scratch, fcdp_driver *drv) {
    fcdp_event *events[N_EVENTS];
    events_of(scratch, events);
    return fcdp__driver_events_make_blocking(drv, events, N_EVENTS);
}

static fcdp_status staged_reserve(delta *d, size_t slots, fcdp_delta_staged *staged_out) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_delta_scratch *scratch = d->scratch;
    size_t own = larger(fcdp__round_up(d->bytes, 64), scratch->own_room_bytes);
    size_t places = larger(places_bytes(d), scratch->places_room_bytes);
    slots = larger(slots, scratch->slots_room_bytes);
    size_t bytes = FCDP_DELTA_N_ROOMS * (own + places) + slots +
                   (has_base_on_device(d) ? d->n * d->bytes : 0);
    bool fits = own == scratch->own_room_bytes && slots == scratch->slots_room_bytes &&
                places == scratch->places_room_bytes;
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_INTER && !status; i++)
        status = events_make(&d->comm->set->delta_scratch[i], drv);
    if (!status && !(fits && bytes <= scratch->staged.bytes)) {
        bytes = larger(bytes, scratch->staged.bytes);
        status = staged_empty(d);
        scratch->own_room_bytes = scratch->slots_room_bytes = scratch->places_room_bytes = 0;
        if (!status) status = fcdp__pinned_create(drv, bytes, "a gather", &scratch->staged);
        if (!status) {
            scratch->own_room_bytes = own;
            scratch->slots_room_bytes = slots;
            scratch->places_room_bytes = places;
        }
    }
    if (status) return status;
    d->room = scratch->room = (scratch->room + 1) % FCDP_DELTA_N_ROOMS;
    staged_out->own = (char *)scratch->staged.at + d->room * own;
    staged_out->slots = (char *)scratch->staged.at + FCDP_DELTA_N_ROOMS * own;
    staged_out->places = staged_out->slots + slots + d->room * places;
    staged_out->base = staged_out->slots + slots + FCDP_DELTA_N_ROOMS * places;
    return FCDP_OK;
}

/* Where there is no memory for slots, the host encodes from here on. */
fcdp_status fcdp__delta_staged_reserve(delta *d, fcdp_delta_staged *staged_out) {
    size_t slots = 0;
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) slots += c->slots_bytes;
    fcdp_status status = staged_reserve(d, slots, staged_out);
    if (!status || !slots || d->scratch->staged.at) return status;
    fcdp__log(FCDP_LOG_INFO, "the host encodes differences: %s", fcdp_error_text());
    fcdp__own_bases_lack(d->comm->set);
    for (cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) c->slots_bytes = 0;
    return staged_reserve(d, 0, staged_out);
}

/* ---- the kernels ---- */

static fcdp_dptr part_of(const fcdp_delta_cut *of, uint32_t member) {
    return fcdp__dptr_add(of->part.at, member * of->part.stride_bytes);
}

/* The base of a cut's own shard on the device. */
static fcdp_dptr own_base_of(const delta *d, const fcdp_delta_cut *of) {
    return of->base.where == FCDP_BASE_ON_DEVICE ? part_of(of, d->me)
                                                 : fcdp__own_base_at(of->group, of->extent);
}

static bool has_encoder(const delta *d, const fcdp_delta_cut *cuts) {
    fcdp_group *group = cuts[0].group;
    return d->state == &group->delta && fcdp__delta_may_store(group) &&
           fcdp__own_bases_kernel(d->comm->set) && fcdp__own_bases_reserve(group);
}

/* Which cuts the device encodes, and which own bases are anew behind this gather. Nothing is known of these
 * before it is done. */
void fcdp__delta_encoder_begin(delta *d, const fcdp_delta_cut *cuts) {
    if (!has_encoder(d, cuts)) return;
    fcdp_own_group *own = &cuts[0].group->own;
    for (uint32_t k = 0; k < d->n_cuts; k++) {
        cut *c = &d->cuts[k];
        fcdp_own_base *base = &own->extents[cuts[k].extent];
        bool is_of_fill = d->base_name && base->epoch == c->from.epoch;
        bool is_kept = c->from.where == FCDP_BASE_IN_HOST && base->known && (!d->base_name || is_of_fill);
        if (!base->has_place) continue;
        c->own_is_known = is_kept && !is_of_fill;
        c->own_fingerprint = base->fingerprint;
        c->keeps = own->generation;
        base->known = false;
        bool has_base = d->encodes && (is_kept || c->from.where == FCDP_BASE_ON_DEVICE);
        if (has_base && (cuts[k].shard.addr | own_base_of(d, &cuts[k]).addr) % c->element_bytes == 0)
            c->slots_bytes = fcdp__delta_tasks_of(c->bytes) * FCDP_DELTA_SLOTS_BYTES;
    }
}

/* The kernel, then the copies of the shards to their bases, which it has read. */
static fcdp_status encoder_launch(const delta *d, const fcdp_delta_cut *cuts, fcdp_stream inter) {
    fcdp_driver *drv = d->comm->engine->drv;
    const fcdp_own_bases *own = &d->comm->set->own_bases;
    fcdp_own_task *tasks = (fcdp_own_task *)(void *)own->tasks.at + cuts[0].group->own.first_task;
    size_t n_tasks = 0;
    fcdp_status status = FCDP_OK;
    fcdp_dptr at;
    for (uint32_t k = 0; k < d->n_cuts && !status; k++) {
        const cut *c = &d->cuts[k];
        if (!c->slots) continue;
        status = fcdp__driver_host_dptr(drv, (void *)(uintptr_t)c->slots, &at);
        if (status) return status;
        fcdp__delta_tasks_fill(&tasks[n_tasks].encode, own_base_of(d, &cuts[k]), cuts[k].shard, c->bytes,
                               c->element_bytes, at);
        n_tasks += fcdp__delta_tasks_of(c->bytes);
    }
    if (n_tasks) {
        status = fcdp__driver_host_dptr(drv, tasks, &at);
        if (!status) status = fcdp__driver_launch(drv, &own->kernel, at, (uint32_t)n_tasks, inter);
    }
    for (uint32_t k = 0; k < d->n_cuts && !status; k++)
        if (d->cuts[k].keeps)
            status = fcdp__driver_copy_d2d(drv, fcdp__own_base_at(cuts[k].group, cuts[k].extent),
                                           cuts[k].shard, d->cuts[k].bytes, inter);
    return status;
}

/* Of fewer bytes a part is not worth its launch. */
size_t fcdp__delta_part_bytes = (size_t)128 << 10;

static unsigned parts_of(const delta *d) {
    size_t n = (d->n - 1) * d->bytes / fcdp__delta_part_bytes;
    return n < 1 ? 1 : n > FCDP_DELTA_MOST_PARTS ? FCDP_DELTA_MOST_PARTS : (unsigned)n;
}

void fcdp__delta_copies_begin(delta *d, const fcdp_delta_cut *cuts) {
    const fcdp_pinned *staged = &d->scratch->staged;
    fcdp_dptr from;
    if (fcdp__driver_host_dptr(d->comm->engine->drv, staged->at, &from)) return;
    fcdp_copy_if_task *tasks = fcdp__own_copies_take(cuts[0].group);
    if (!tasks) return;
    for (uint32_t b = 0; b < d->n; b++)
        for (uint32_t k = 0; k < d->n_cuts && b != d->me; k++) {
            size_t at = (size_t)(fcdp__delta_row(d->cuts[k].places, b) - staged->at),
                   bytes = d->cuts[k].bytes;
            fcdp__copy_if_tasks_fill(tasks + d->n_copies, part_of(&cuts[k], b), fcdp__dptr_add(from, at),
                                     bytes);
            d->n_copies += fcdp__copy_if_tasks_of(bytes);
        }
    d->copies = tasks;
    d->n_parts = parts_of(d);
}

/* By the thread that enqueues: the gather is done. */
void fcdp__own_bases_learn(const delta *d) {
    fcdp_own_bases *bases = &d->comm->set->own_bases;
    if (!fcdp__delta_keeps(d)) return;
    fcdp__own_bases_acquire(bases);
    for (const cut *c = d->cuts; c < d->cuts + d->n_cuts; c++) {
        fcdp_own_group *own = &c->group->own;
        if (!c->keeps || c->keeps != own->generation || !c->shard_is_known) continue;
        own->extents[c->index].known = true;
        own->extents[c->index].epoch = c->from.epoch + 1;
        own->extents[c->index].fingerprint = c->shard_fingerprint;
    }
    fcdp__own_bases_release(bases);
}

/* ---- copies ---- */

/* The places of gathers before that were in this room have been read. */
fcdp_status fcdp__delta_places_await(const delta *d, fcdp_stream stream) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_status status = fcdp__driver_stream_wait(drv, stream, d->scratch->brought[d->room]);
    return status ? status : fcdp__driver_stream_wait(drv, stream, d->scratch->stored[d->room]);
}

/* Own bases are used in the order of the gathers, on whichever stream. Then come this rank's shards, once the
 * room's last ones have been stored: what else reads them is on `inter` before, as is what reads a base that
 * the device alone has, and that comes with them. */
fcdp_status fcdp__delta_shards_fetch(const delta *d, const fcdp_delta_cut *cuts, fcdp_stream inter) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_delta_scratch *scratch = d->scratch;
    fcdp_stream fetch = d->comm->set->streams[FCDP_STREAM_FETCH];
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_INTER && !status; i++)
        status = fcdp__driver_stream_wait(drv, inter, d->comm->set->delta_scratch[i].encoded);
    if (!status) status = encoder_launch(d, cuts, inter);
    if (!status) status = fcdp__driver_event_record(drv, scratch->encoded, inter);
    if (!status) status = fcdp__driver_stream_wait(drv, fetch, scratch->encoded);
    if (!status) status = fcdp__driver_stream_wait(drv, fetch, scratch->stored[d->room]);
    for (uint32_t k = 0; k < d->n_cuts && !status; k++) {
        const cut *c = &d->cuts[k];
        status = fcdp__driver_copy_d2h(drv, (char *)c->shard, cuts[k].shard, c->bytes, fetch);
        for (uint32_t b = 0; b < d->n && d->encodes && c->from.where == FCDP_BASE_ON_DEVICE && !status; b++)
            status = fcdp__driver_copy_d2h(drv, fcdp__delta_row(c->base, b), part_of(&cuts[k], b), c->bytes,
                                           fetch);
    }
    return status ? status : fcdp__driver_event_record(drv, scratch->fetched, fetch);
}

/* This rank's own, within the device: it ends before `crossed`, and so before an optimizer writes them. */
fcdp_status fcdp__delta_own_bring(const delta *d, const fcdp_delta_cut *cuts, fcdp_stream bring) {
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < d->n_cuts && !status; k++)
        status = fcdp__driver_copy_d2d(d->comm->engine->drv, part_of(&cuts[k], d->me), cuts[k].shard,
                                       d->cuts[k].bytes, bring);
    return status;
}

/* In staged memory a member's lie side by side; where they do so on the device, too, it is one copy. */
fcdp_status fcdp__delta_part_bring(const delta *d, const fcdp_delta_cut *cuts, unsigned part,
                                   fcdp_stream bring) {
    fcdp_driver *drv = d->comm->engine->drv;
    fcdp_status status = FCDP_OK;
    fcdp_dptr to = {0};
    const char *from = NULL;
    size_t bytes = 0;
    fcdp_delta_run run;
    fcdp_delta_walk walk = fcdp__delta_walk(d, part, 0, 1);
    while (!status && fcdp__delta_walk_next(&walk, &run)) {
        fcdp_dptr at = fcdp__dptr_add(part_of(&cuts[run.cut], run.member), run.begin);
        const char *row = fcdp__delta_row(d->cuts[run.cut].places, run.member) + run.begin;
        if (bytes && (at.addr != to.addr + bytes || row != from + bytes)) {
            status = fcdp__driver_copy_h2d(drv, to, from, bytes, bring);
            bytes = 0;
        }
        if (!bytes) to = at, from = row;
        bytes += run.end - run.begin;
    }
    return !status && bytes ? fcdp__driver_copy_h2d(drv, to, from, bytes, bring) : status;
}
