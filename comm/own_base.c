/* own_base.c - a copy of this rank's shards on the device, lent to whatever needs its pages more.
 *
 * All groups of a set of streams have their places in one range, since a group's own shards may be far
 * smaller than a page. A group that comes later makes it anew, and what was known is forgotten: then the host
 * encodes each group once.
 */
#include "comm/own_base.h"

#include <stdlib.h>

#include "base/size.h"
#include "comm/internal.h"

/* Pages that were reclaimed are not asked for again in the passes that follow: where memory lacks in each
 * step, they would come and go in each. */
enum { RESTS = 64 };

void fcdp__own_bases_init(fcdp_own_bases *own) {
    fcdp__lock_init(&own->lock, FCDP_RANK_ENGINE);
    pthread_cond_init(&own->released, NULL);
}

void fcdp__own_bases_acquire(fcdp_own_bases *own) {
    fcdp__lock_acquire(&own->lock);
    while (own->busy) fcdp__lock_wait(&own->lock, &own->released);
    own->busy = true;
    fcdp__lock_release(&own->lock);
}

void fcdp__own_bases_release(fcdp_own_bases *own) {
    fcdp__lock_acquire(&own->lock);
    own->busy = false;
    pthread_cond_broadcast(&own->released);
    fcdp__lock_release(&own->lock);
}

/* ---- pages and tasks ---- */

/* What reads and writes them on a stream lies before that stream's `fetched`. FCDP_PENDING: not `waits`, and
 * it has not ended. */
static fcdp_status uses_end(fcdp_stream_set *set, bool waits) {
    fcdp_driver *drv = set->engine->drv;
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_INTER && !status; i++) {
        fcdp_stream inter = set->streams[FCDP_STREAM_INTER_0 + i];
        fcdp_event fetched = set->delta_scratch[i].fetched;
        if (set->own_bases.incomplete)
            status = waits ? FCDP_RETRY_ONCE(fcdp__driver_stream_sync(drv, inter)) : FCDP_PENDING;
        else if (fetched)
            status = waits ? fcdp__driver_event_sync(drv, fetched) : fcdp__driver_event_query(drv, fetched);
    }
    return status;
}

/* Acquired. The tasks stay: to page-unlock memory may wait for all of the device. */
static fcdp_status memory_free(fcdp_stream_set *set, bool waits) {
    fcdp_own_bases *own = &set->own_bases;
    if (!own->range) return FCDP_OK;
    fcdp_status status = uses_end(set, waits);
    if (status) return status;
    own->incomplete = false;
    fcdp__vrange_destroy(own->range);
    own->range = NULL;
    atomic_store_explicit(&own->n_held, 0, memory_order_relaxed);
    fcdp__pool_give_handle(set->engine->pool, FCDP_HOLDER_GATHERED, own->n_pages, own->block);
    return FCDP_OK;
}

/* Acquired. What cannot be freed now is freed later. */
static void memory_try_free(fcdp_stream_set *set, bool waits) {
    fcdp_status status = memory_free(set, waits);
    if (status && status != FCDP_PENDING)
        fcdp__log(FCDP_LOG_WARN, "the own bases stay for now: %s", fcdp_error_text());
}

/* Acquired, and no stream uses them. */
static void tasks_free(fcdp_stream_set *set) {
    if (fcdp__pinned_destroy(set->engine->drv, &set->own_bases.tasks))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
}

static fcdp_status tasks_reserve(fcdp_stream_set *set, size_t n) {
    fcdp_own_bases *own = &set->own_bases;
    if (own->tasks.bytes >= n * sizeof(fcdp_delta_task)) return FCDP_OK;
    tasks_free(set);
    return fcdp__pinned_create(set->engine->drv, n * sizeof(fcdp_delta_task), "tasks of the encoder",
                               &own->tasks);
}

/* FCDP_PENDING: other things want the pages, or soon may: tensors take what is spare before they ask for what
 * is lent. On any failure there is nothing. */
static fcdp_status memory_take(fcdp_stream_set *set, size_t n_pages, size_t n_tasks) {
    fcdp_own_bases *own = &set->own_bases;
    fcdp_engine *engine = set->engine;
    size_t bytes = n_pages * fcdp__driver_page_bytes(engine->drv);
    fcdp_vrange *range;
    fcdp_phys block;
    size_t n_budget;
    if (fcdp__pool_spare_pages(engine->pool, &n_budget) < 2 * n_pages) return FCDP_PENDING;
    fcdp_status status = fcdp__pool_try_handle(engine->pool, FCDP_HOLDER_GATHERED, n_pages, &block);
    if (status) return status;
    status = fcdp__vrange_create(engine->drv, bytes, &range);
    if (!status) {
        status = fcdp__vrange_map(range, block, bytes);
        if (!status) status = tasks_reserve(set, n_tasks);
        if (status) fcdp__vrange_destroy(range);
    }
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        fcdp__pool_give_handle(engine->pool, FCDP_HOLDER_GATHERED, n_pages, block);
        return fcdp__failure_restore(&failure);
    }
    own->range = range;
    own->block = block;
    own->n_pages = n_pages;
    atomic_store_explicit(&own->n_held, n_pages, memory_order_relaxed);
    own->generation++;
    return FCDP_OK;
}

/* ---- places ---- */

/* Lays the group's trainable extents behind what is there so far, if `generation` is not 0: frozen ones are
 * gathered once, mostly. False: no memory. */
static bool group_place(fcdp_group *group, uint64_t generation, size_t *bytes, size_t *n_tasks) {
    fcdp_own_group *own = &group->own;
    uint32_t n = group->layout->n_extents;
    if (generation && !own->extents) own->extents = calloc(n, sizeof *own->extents);
    if (generation && !own->extents) return false;
    if (generation) own->generation = generation, own->first_task = *n_tasks;
    for (uint32_t i = 0; i < n; i++) {
        size_t shard_bytes = group->layout->extents[i].shard_bytes;
        bool has_place = group->layout->extents[i].span == FCDP_SPAN_TRAINABLE;
        if (generation) own->extents[i] = (fcdp_own_base){.has_place = has_place, .offset_bytes = *bytes};
        if (!has_place) continue;
        *bytes += fcdp__round_up(shard_bytes, 16);
        *n_tasks += fcdp__delta_tasks_of(shard_bytes);
    }
    return true;
}

/* Of all groups of the set whose differences the host stores. */
static bool places_make(fcdp_stream_set *set, uint64_t generation, size_t *bytes, size_t *n_tasks) {
    fcdp_engine *engine = set->engine;
    bool made = true;
    *bytes = *n_tasks = 0;
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm; comm = comm->next)
        for (fcdp_group *group = comm->set == set ? comm->groups : NULL; group; group = group->next)
            if (fcdp__delta_may_store(group)) made = made && group_place(group, generation, bytes, n_tasks);
    fcdp__lock_release(&engine->lock);
    return made;
}

bool fcdp__own_bases_kernel(fcdp_stream_set *set) {
    fcdp_own_bases *own = &set->own_bases;
    if (own->has_kernel == FCDP_KERNEL_UNTRIED) {
        fcdp_status status = fcdp__driver_kernel_load(set->engine->drv, &fcdp__delta_kernel, &own->kernel);
        if (status) fcdp__log(FCDP_LOG_INFO, "the host encodes differences: %s", fcdp_error_text());
        own->has_kernel = status ? FCDP_KERNEL_LACKS : FCDP_KERNEL_LOADED;
    }
    if (own->lacks_memory) memory_try_free(set, false);
    return own->has_kernel == FCDP_KERNEL_LOADED && !own->lacks_memory;
}

void fcdp__own_bases_lack(fcdp_stream_set *set) {
    set->own_bases.lacks_memory = true;
}

bool fcdp__own_bases_reserve(fcdp_group *group) {
    fcdp_stream_set *set = group->comm->set;
    fcdp_own_bases *own = &set->own_bases;
    if (own->range && group->own.generation == own->generation) return true;
    if (own->n_rests) return false;
    size_t bytes, n_tasks, page_bytes = fcdp__driver_page_bytes(set->engine->drv);
    (void)places_make(set, 0, &bytes, &n_tasks);
    if (!bytes) return false;
    fcdp_status status = memory_free(set, true);
    if (!status) status = memory_take(set, fcdp__round_up(bytes, page_bytes) / page_bytes, n_tasks);
    if (!status) {
        bool made = places_make(set, own->generation, &bytes, &n_tasks);
        /* a group that another thread has made meanwhile has no room */
        bool fits = bytes <= own->n_pages * page_bytes &&
                    n_tasks * sizeof(fcdp_delta_task) <= own->tasks.bytes;
        if (made && fits) return group->own.generation == own->generation;
        own->generation++; /* these places are void, also if the pages stay */
        memory_try_free(set, true);
    }
    if (status && status != FCDP_PENDING) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    own->n_rests = RESTS;
    return false;
}

fcdp_dptr fcdp__own_base_at(const fcdp_group *group, uint32_t extent) {
    return fcdp__dptr_add(fcdp__vrange_base(group->comm->set->own_bases.range),
                          group->own.extents[extent].offset_bytes);
}

/* ---- who else wants the pages ---- */

/* Acquires them if there are any, and no thread has them. */
static bool acquire_idle(fcdp_own_bases *own) {
    fcdp__lock_acquire(&own->lock);
    bool is_mine = !own->busy && own->range;
    if (is_mine) own->busy = true;
    fcdp__lock_release(&own->lock);
    return is_mine;
}

void fcdp__own_bases_begin_pass(fcdp_stream_set *set) {
    fcdp_own_bases *own = &set->own_bases;
    fcdp__lock_acquire(&own->lock);
    if (!own->busy && own->n_rests) own->n_rests--;
    fcdp__lock_release(&own->lock);
}

void fcdp__own_bases_trim(fcdp_stream_set *set) {
    fcdp__own_bases_acquire(&set->own_bases);
    memory_try_free(set, true);
    if (!set->own_bases.range) tasks_free(set);
    fcdp__own_bases_release(&set->own_bases);
}

/* What lies before an event may wait for other ranks, whose threads wait for pages, too, and for the gathers
 * of another set: in a circle. */
size_t fcdp__own_bases_reclaim(fcdp_stream_set *set) {
    fcdp_own_bases *own = &set->own_bases;
    bool is_alone = !set->engine->sets->next;
    if (!acquire_idle(own)) return 0;
    memory_try_free(set, is_alone);
    size_t n_given = own->range ? 0 : own->n_pages;
    own->n_rests = RESTS;
    fcdp__own_bases_release(own);
    return n_given;
}

size_t fcdp__own_bases_idle(const fcdp_stream_set *set) {
    return atomic_load_explicit(&set->own_bases.n_held, memory_order_relaxed);
}

void fcdp__own_bases_destroy(fcdp_stream_set *set) {
    fcdp_own_bases *own = &set->own_bases;
    if (set->engine->drv && (own->range || own->tasks.at)) fcdp__own_bases_trim(set);
    if (own->has_kernel == FCDP_KERNEL_LOADED) fcdp__driver_kernel_unload(set->engine->drv, &own->kernel);
    pthread_cond_destroy(&own->released);
    fcdp__lock_destroy(&own->lock);
}
