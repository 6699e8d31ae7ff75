/* submit.c - the caller's side of every job: what the shards look like now, the plan, an event on the
 * caller's stream, the queue.
 *
 * Decisions that must be the same on every rank (does an unshard follow a release, does it use a prefetch)
 * are made here, from the order of submissions, never from what has happened on this rank.
 */
#include <stdlib.h>

#include "comm/crossing.h"

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
    fcdp__mark_forget(job->engine, &job->mark);
    if (job->plan) fcdp__plan_destroy(job->plan);
    fcdp__crossing_destroy(job->crossing);
    fcdp__seen_free(&job->seen);
    free(job);
}

static fcdp_status group_check(const fcdp_group *group) {
    fcdp_status status = fcdp__engine_check(group->comm->engine, group->name);
    if (status || group->region) return status;
    return fcdp__fail(FCDP_ERR_INVALID, "'%s' is not attached to host memory yet", group->name);
}

static fcdp_status job_create(fcdp_group *group, fcdp_status (*run)(fcdp_work *), bool waited,
                              fcdp_job **job_out) {
    fcdp_status status = group_check(group);
    if (status) return status;
    fcdp_job *job = calloc(1, sizeof *job);
    if (!job) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a job of '%s'", group->name);
    job->engine = group->comm->engine;
    job->group = group;
    job->work = (fcdp_work){.run = run, .dispose = fcdp__job_dispose, .waited = waited};
    *job_out = job;
    return FCDP_OK;
}

static fcdp_status seen_reserve(const fcdp_group *group, fcdp_seen_list *seen) {
    seen->items = malloc((group->layout->n_extents + 1) * sizeof *seen->items);
    return seen->items ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
}

/* With the group's lock. Extents without bytes are in no plan, but they too have been seen. */
static void seen_take(const fcdp_group *group, const uint8_t *stale, fcdp_seen_list *seen) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (stale[i]) seen->items[seen->n++] = (fcdp_seen){i, fcdp__validity_observed(group->validity, i)};
}

/* ---- unshard ---- */

/* With the group's lock. */
static bool is_ahead(const fcdp_group *group, const uint8_t *stale) {
    return group->ahead && fcdp__crossing_matches(group->ahead, stale);
}

bool fcdp_group_is_prefetched(const fcdp_group *group, const uint8_t *stale) {
    fcdp_lock *lock = &((fcdp_group *)group)->lock;
    fcdp__lock_acquire(lock);
    bool matches = is_ahead(group, stale);
    fcdp__lock_release(lock);
    return matches;
}

/* All that can fail, before the job has its place. Only the caller changes what is ahead. */
static fcdp_status unshard_prepare(fcdp_job *job, const uint8_t *stale, const uint64_t *inputs,
                                   fcdp_stream stream) {
    fcdp_group *group = job->group;
    fcdp_status status = fcdp__plan_make(group->layout, &group->comm->topology, stale, &job->plan);
    if (!status) status = seen_reserve(group, &job->seen);
    if (status) return status;
    if (fcdp_group_is_prefetched(group, stale)) {
        fcdp__mark_make(job->engine, stream, &job->mark);
        return FCDP_OK;
    }
    status = fcdp__crossing_create(group, stale, inputs, stream, &job->crossing);
    if (status) return status;
    fcdp__mark_make(job->engine, stream, &job->mark);
    status = fcdp_group_unprefetch(group);
    if (status) fcdp__mark_refuse(&job->mark, status);
    return FCDP_OK;
}

/* With the group's lock: the crossing that was ahead is this job's now. */
static void ahead_take(fcdp_job *job) {
    fcdp_group *group = job->group;
    fcdp_seen_list reserved = job->seen; /* the bytes are those of the prefetch's moment */
    job->crossing = group->ahead;
    job->seen = job->crossing->seen;
    job->crossing->seen = reserved;
    group->ahead = NULL;
}

/* With the group's lock: from here on the job's place in the order of submissions is fixed. */
static void unshard_place(fcdp_job *job, const uint8_t *stale) {
    fcdp_group *group = job->group;
    if (group->ahead)
        ahead_take(job);
    else
        seen_take(group, stale, &job->seen);
    job->after_release = !group->is_unsharded && group->n_releases > 0;
    job->n_releases = group->n_releases;
    job->n_spoils = group->n_spoils;
    if (job->plan->block_bytes > 0) job->n_fills = ++group->n_fills;
    group->is_unsharded = true;
}

/* The crossing first: the job waits for it. `anew`: it is not one that was ahead. */
static void unshard_submit(fcdp_job *job, bool anew) {
    fcdp_engine *engine = job->engine;
    if (anew) fcdp__crossing_submit(job->crossing);
    if (job->crossing && !anew) fcdp__crossing_not_ahead(job->group->comm);
    uint64_t ticket = fcdp__worker_submit(engine->node_worker, &job->work);
    if (job->crossing) fcdp__crossing_taken(job->group->comm, ticket);
}

fcdp_status fcdp_group_unshard(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs,
                               fcdp_pass pass, fcdp_stream stream, fcdp_job **job_out) {
    fcdp_job *job = NULL;
    fcdp_status status = job_create(group, fcdp__job_unshard, true, &job);
    if (status) return status;
    job->pass = pass;
    status = unshard_prepare(job, stale, inputs, stream);
    if (status) { /* without its place; what the caller did wrong, it does on every rank */
        if (status != FCDP_ERR_INVALID) fcdp__comm_lose_step(group->comm);
        fcdp__job_dispose(&job->work);
        return status;
    }
    bool anew = job->crossing != NULL;
    fcdp__lock_acquire(&group->lock);
    unshard_place(job, stale);
    fcdp__lock_release(&group->lock);
    unshard_submit(job, anew);
    *job_out = job;
    return FCDP_OK;
}

fcdp_status fcdp_job_wait(fcdp_job *job) {
    fcdp_status status = fcdp__engine_check(job->engine, "the job");
    if (status) return status;
    status = fcdp__worker_wait(job->engine->node_worker, &job->work);
    char late_text[FCDP_LATE_TEXT_BYTES];
    fcdp_status late = fcdp__group_late_take(job->group, late_text);
    if (late)
        status = status ? fcdp__fail(status, "%s; before that: %s", fcdp_error_text(), late_text)
                        : fcdp__fail(late, "%s", late_text);
    fcdp__job_dispose(&job->work);
    return status;
}

/* ---- prefetch ---- */

fcdp_status fcdp_group_prefetch(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs,
                                fcdp_stream stream, bool *ahead_out) {
    *ahead_out = false;
    fcdp_status status = group_check(group);
    fcdp_crossing *crossing = NULL;
    if (!status) status = fcdp_group_unprefetch(group);
    if (!status) status = fcdp__crossing_create(group, stale, inputs, stream, &crossing);
    if (!status && crossing) status = seen_reserve(group, &crossing->seen);
    if (status && status != FCDP_ERR_INVALID) fcdp__comm_lose_step(group->comm); /* the peers' may have begun */
    if (!crossing) return status;
    if (status || !fcdp__crossing_submit_ahead(crossing)) {
        fcdp__crossing_destroy(crossing);
        return status;
    }
    fcdp__lock_acquire(&group->lock);
    seen_take(group, stale, &crossing->seen);
    group->ahead = crossing;
    fcdp__lock_release(&group->lock);
    *ahead_out = true;
    return FCDP_OK;
}

fcdp_status fcdp_group_unprefetch(fcdp_group *group) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = fcdp__engine_check(engine, group->name);
    if (status) return status;
    fcdp__lock_acquire(&group->lock);
    fcdp_crossing *crossing = group->ahead;
    group->ahead = NULL;
    fcdp__lock_release(&group->lock);
    if (!crossing) return FCDP_OK;
    fcdp__crossing_not_ahead(group->comm);
    status = fcdp__crossing_wait(crossing);
    if (!status) status = fcdp__crossing_end(crossing);
    if (status) status = fcdp__crossing_abandon(crossing, engine->inter_stream, status);
    fcdp__crossing_destroy(crossing);
    return status;
}

/* ---- reshard ---- */

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
    fcdp__mark_make(job->engine, stream, &job->mark);
    fcdp__lock_acquire(&group->lock);
    bool placed = reshard_place(job);
    fcdp__lock_release(&group->lock);
    if (placed)
        (void)fcdp__worker_submit(job->engine->node_worker, &job->work);
    else
        fcdp__job_dispose(&job->work);
    return FCDP_OK;
}
