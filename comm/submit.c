/* submit.c - the caller's side of every job: what the shards look like now, the plan, an event on the
 * caller's stream, the queue.
 *
 * Decisions that must be the same on every rank (does an unshard follow a release, does it use a prefetch)
 * are made here, from the order of submissions, never from what has happened on this rank.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/group.h"

/* ---- signals ---- */

void fcdp_group_observe(fcdp_group *group, const fcdp_signals *signals, const fcdp_scene *scene,
                        const void *const *shards, const size_t *shard_bytes, uint8_t *stale_out) {
    fcdp__lock_acquire(&group->lock);
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        const void *shard = shards ? shards[i] : NULL;
        stale_out[i] = (uint8_t)fcdp__validity_observe(group->validity, i, &signals[i], scene, shard,
                                                       shard ? shard_bytes[i] : 0);
    }
    fcdp__lock_release(&group->lock);
}

void fcdp_group_moved(const fcdp_group *group, const fcdp_signals *signals, const void *const *shards,
                      const size_t *shard_bytes, uint8_t *moved_out) {
    fcdp_lock *lock = &((fcdp_group *)group)->lock;
    fcdp__lock_acquire(lock);
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        const void *shard = shards ? shards[i] : NULL;
        moved_out[i] =
            fcdp__validity_moved(group->validity, i, &signals[i], shard, shard ? shard_bytes[i] : 0);
    }
    fcdp__lock_release(lock);
}

void fcdp_group_spoil(fcdp_group *group) {
    fcdp__lock_acquire(&group->lock);
    fcdp__validity_spoil(group->validity);
    group->n_spoils++;
    fcdp__lock_release(&group->lock);
}

void fcdp__seen_free(fcdp_seen_list *seen) {
    free(seen->items);
    *seen = (fcdp_seen_list){0, NULL};
}

/* ---- jobs ---- */

void fcdp__job_dispose(fcdp_work *work) {
    fcdp_job *job = (fcdp_job *)work;
    if (job->event) fcdp__event_give(job->engine, job->event);
    if (job->plan) fcdp__plan_destroy(job->plan);
    free(job->inputs);
    fcdp__seen_free(&job->seen);
    free(job);
}

static fcdp_status job_create(fcdp_group *group, fcdp_status (*run)(fcdp_work *), bool waited,
                              fcdp_job **job_out) {
    fcdp_status status = fcdp__engine_check(group->comm->engine, group->name);
    if (status) return status;
    if (!group->region)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is not attached to host memory yet", group->name);
    fcdp_job *job = calloc(1, sizeof *job);
    if (!job) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a job of '%s'", group->name);
    job->engine = group->comm->engine;
    job->group = group;
    job->work = (fcdp_work){.run = run, .dispose = fcdp__job_dispose, .waited = waited};
    *job_out = job;
    return FCDP_OK;
}

static fcdp_status event_record(fcdp_job *job, fcdp_stream stream) {
    fcdp_engine *engine = job->engine;
    fcdp_status status = fcdp__event_take(engine, &job->event);
    if (status) return status;
    status = fcdp__driver_event_record(engine->drv, job->event->event, stream);
    if (!status) return FCDP_OK;
    fcdp__event_give(engine, job->event);
    job->event = NULL;
    return status;
}

/* Without an event the caller waits here, so that the job need not. */
static void job_record_event(fcdp_job *job, fcdp_stream stream) {
    if (!event_record(job, stream)) return;
    job->refused = fcdp__driver_stream_sync(job->engine->drv, stream);
    if (job->refused) snprintf(job->refused_text, sizeof job->refused_text, "%s", fcdp_error_text());
}

static fcdp_status job_plan(fcdp_job *job, const uint8_t *stale, const uint64_t *inputs) {
    const fcdp_group *group = job->group;
    fcdp_status status = fcdp__plan_make(group->layout, &group->comm->topology, stale, &job->plan);
    if (status) return status;
    uint32_t n = job->plan->n_big + job->plan->n_small, n_extents = group->layout->n_extents;
    job->inputs = malloc((n + 1) * sizeof *job->inputs);
    job->seen.items = malloc((n_extents + 1) * sizeof *job->seen.items);
    if (!job->inputs || !job->seen.items)
        return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    for (uint32_t k = 0; k < n; k++) {
        job->inputs[k] = inputs[job->plan->extents[k].extent];
        if (!job->inputs[k])
            return fcdp__fail(FCDP_ERR_INVALID, "'%s': extent %u is stale and has no input", group->name,
                              job->plan->extents[k].extent);
    }
    return FCDP_OK;
}

/* With the group's lock. Extents without bytes are in no plan, but they too have been seen. */
static void job_see(fcdp_job *job, const uint8_t *stale) {
    const fcdp_group *group = job->group;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (stale[i])
            job->seen.items[job->seen.n++] = (fcdp_seen){i, fcdp__validity_observed(group->validity, i)};
}

/* With the group's lock. */
static bool prefetch_matches(const fcdp_group *group, const uint8_t *stale) {
    if (!group->prefetched) return false;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (!stale[i] != !group->prefetched[i]) return false;
    return true;
}

/* With the group's lock. */
static void prefetch_forget(fcdp_group *group) {
    free(group->prefetched);
    group->prefetched = NULL;
    fcdp__seen_free(&group->prefetched_seen);
}

/* With the group's lock: from here on the job's place in the order of submissions is fixed. */
static void unshard_place(fcdp_job *job, const uint8_t *stale) {
    fcdp_group *group = job->group;
    job->use_column = job->plan->block_bytes > 0 && prefetch_matches(group, stale);
    if (job->use_column) { /* the bytes are those of the prefetch's moment */
        fcdp_seen_list fresh = job->seen;
        job->seen = group->prefetched_seen;
        group->prefetched_seen = fresh;
    } else {
        job_see(job, stale);
    }
    prefetch_forget(group);
    job->after_release = !group->is_unsharded && group->n_releases > 0;
    job->n_releases = group->n_releases;
    job->n_spoils = group->n_spoils;
    if (job->plan->block_bytes > 0) job->n_fills = ++group->n_fills;
    group->is_unsharded = true;
}

static fcdp_status unshard_prepare(fcdp_job *job, const uint8_t *stale, const uint64_t *inputs,
                                   fcdp_pass pass, fcdp_stream stream) {
    job->pass = pass;
    fcdp_status status = job_plan(job, stale, inputs);
    if (!status) job_record_event(job, stream);
    return status;
}

fcdp_status fcdp_group_unshard(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs,
                               fcdp_pass pass, fcdp_stream stream, fcdp_job **job_out) {
    fcdp_job *job = NULL;
    fcdp_status status = job_create(group, fcdp__job_unshard, true, &job);
    if (status) return status;
    status = unshard_prepare(job, stale, inputs, pass, stream);
    if (status) {
        fcdp__job_dispose(&job->work);
        return status;
    }
    fcdp__lock_acquire(&group->lock);
    unshard_place(job, stale);
    fcdp__lock_release(&group->lock);
    fcdp__worker_submit(group->comm->engine->worker, &job->work);
    *job_out = job;
    return FCDP_OK;
}

/* With the group's lock. `copy` becomes the group's. */
static void prefetch_place(fcdp_job *job, const uint8_t *stale, uint8_t *copy) {
    fcdp_group *group = job->group;
    prefetch_forget(group);
    memcpy(copy, stale, group->layout->n_extents);
    group->prefetched = copy;
    job_see(job, stale);
    group->prefetched_seen = job->seen;
    job->seen = (fcdp_seen_list){0, NULL};
}

fcdp_status fcdp_group_prefetch(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs,
                                fcdp_stream stream, fcdp_job **job_out) {
    fcdp_job *job = NULL;
    fcdp_status status = job_create(group, fcdp__job_prefetch, true, &job);
    if (status) return status;
    status = unshard_prepare(job, stale, inputs, FCDP_PASS_OTHER, stream);
    bool needed = !status && job->plan->block_bytes > 0;
    uint8_t *copy = needed ? malloc(group->layout->n_extents) : NULL;
    if (needed && !copy)
        status = fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a prefetch of '%s'", group->name);
    if (status || !needed) {
        fcdp__job_dispose(&job->work);
        if (!status) *job_out = NULL;
        return status;
    }
    fcdp__lock_acquire(&group->lock);
    prefetch_place(job, stale, copy);
    fcdp__lock_release(&group->lock);
    fcdp__worker_submit(group->comm->engine->worker, &job->work);
    *job_out = job;
    return FCDP_OK;
}

bool fcdp_group_is_prefetched(const fcdp_group *group, const uint8_t *stale) {
    fcdp_lock *lock = &((fcdp_group *)group)->lock;
    fcdp__lock_acquire(lock);
    bool matches = prefetch_matches(group, stale);
    fcdp__lock_release(lock);
    return matches;
}

fcdp_status fcdp_group_unprefetch(fcdp_group *group) {
    fcdp_job *job = NULL;
    fcdp_status status = job_create(group, fcdp__job_unprefetch, false, &job);
    if (status) return status;
    fcdp__lock_acquire(&group->lock);
    bool prefetched = group->prefetched != NULL;
    prefetch_forget(group);
    fcdp__lock_release(&group->lock);
    if (prefetched)
        fcdp__worker_submit(group->comm->engine->worker, &job->work);
    else
        fcdp__job_dispose(&job->work);
    return FCDP_OK;
}

/* With the group's lock. */
static bool reshard_place(fcdp_job *job) {
    fcdp_group *group = job->group;
    if (!group->is_unsharded) return false;
    group->is_unsharded = false;
    job->n_releases = ++group->n_releases;
    job->n_spoils = group->n_spoils;
    return true;
}

fcdp_status fcdp_group_reshard(fcdp_group *group, fcdp_stream stream) {
    fcdp_job *job = NULL;
    fcdp_status status = job_create(group, fcdp__job_reshard, false, &job);
    if (status) return status;
    job_record_event(job, stream);
    fcdp__lock_acquire(&group->lock);
    bool placed = reshard_place(job);
    fcdp__lock_release(&group->lock);
    if (placed)
        fcdp__worker_submit(group->comm->engine->worker, &job->work);
    else
        fcdp__job_dispose(&job->work);
    return FCDP_OK;
}

fcdp_status fcdp_job_wait(fcdp_job *job) {
    fcdp_status status = fcdp__engine_check(job->engine, "the job");
    if (status) return status;
    status = fcdp__worker_wait(job->engine->worker, &job->work);
    char late_text[FCDP_LATE_TEXT_BYTES];
    fcdp_status late =
        job->work.run == fcdp__job_unshard ? fcdp__group_late_take(job->group, late_text) : FCDP_OK;
    if (late)
        status = status ? fcdp__fail(status, "%s; before that: %s", fcdp_error_text(), late_text)
                        : fcdp__fail(late, "%s", late_text);
    fcdp__job_dispose(&job->work);
    return status;
}
