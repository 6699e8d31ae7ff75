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
    fcdp__lent_init(&own->pages);
}

void fcdp__own_bases_acquire(fcdp_own_bases *own) {
    fcdp__lent_acquire(&own->pages);
}

void fcdp__own_bases_release(fcdp_own_bases *own) {
    fcdp__lent_release(&own->pages);
}

/* ---- pages and tasks ---- */

/* What reads and writes them on a stream lies before that stream's `encoded`. FCDP_PENDING: not `waits`, and
 * it has not ended. */
static fcdp_status uses_end(fcdp_stream_set *set, bool waits) {
    fcdp_driver *drv = set->engine->drv;
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_INTER && !status; i++) {
        fcdp_stream inter = set->streams[FCDP_STREAM_INTER_0 + i];
        fcdp_event encoded = set->delta_scratch[i].encoded;
        if (set->own_bases.incomplete)
            status = waits ? FCDP_RETRY_ONCE(fcdp__driver_stream_sync(drv, inter)) : FCDP_PENDING;
        else if (encoded)
            status = waits ? fcdp__driver_event_sync(drv, encoded) : fcdp__driver_event_query(drv, encoded);
    }
    return status;
}

/* Acquired. The tasks stay: to page-unlock memory may wait for all of the device. */
static fcdp_status memory_free(fcdp_stream_set *set, bool waits) {
    fcdp_own_bases *own = &set->own_bases;
    if (!own->pages.range) return FCDP_OK;
    fcdp_status status = uses_end(set, waits);
    if (status) return status;
    own->incomplete = false;
    fcdp__lent_give(&own->pages, set->engine->pool);
    return FCDP_OK;
}

/* Acquired. What cannot be freed now is freed later. */
static void memory_try_free(fcdp_stream_set *set, bool waits) {
    fcdp_status status = memory_free(set, waits);
    if (status && status != FCDP_PENDING)
        fcdp__log(FCDP_LOG_WARN, "the own bases stay for now: %s", fcdp_error_text());
}

/* Acquired, without pages. Launches of the copies may still read them. */
static fcdp_status tasks_await(fcdp_stream_set *set) {
    return set->own_bases.tasks.at ? fcdp__stream_set_drain(set) : FCDP_OK;
}

/* And nothing uses them. */
static void tasks_free(fcdp_stream_set *set) {
    if (fcdp__pinned_destroy(set->engine->drv, &set->own_bases.tasks))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
}

/* Those of all groups are laid anew. */
static fcdp_status tasks_reserve(fcdp_stream_set *set, size_t n) {
    fcdp_own_bases *own = &set->own_bases;
    fcdp_status status = tasks_await(set);
    if (status || own->tasks.bytes >= n * sizeof(fcdp_own_task)) return status;
    tasks_free(set);
    return fcdp__pinned_create(set->engine->drv, n * sizeof(fcdp_own_task), "tasks of kernels", &own->tasks);
}

/* FCDP_PENDING: other things want the pages, or soon may: tensors take what is spare before they ask for what
 * is lent. On any failure there is nothing. */
static fcdp_status memory_take(fcdp_stream_set *set, size_t n_pages, size_t n_tasks) {
    fcdp_own_bases *own = &set->own_bases;
    fcdp_engine *engine = set->engine;
    size_t n_budget;
    if (fcdp__pool_spare_pages(engine->pool, &n_budget) < 2 * n_pages) return FCDP_PENDING;
    fcdp_status status = tasks_reserve(set, n_tasks);
    if (!status) status = fcdp__lent_take(&own->pages, engine->drv, engine->pool, n_pages, false);
    if (!status) own->generation++;
    return status;
}

/* ---- places ---- */

/* Lays the group's trainable extents behind what is there so far, if `generation` is not 0: frozen ones are
 * gathered once, mostly. False: no memory. */
static bool group_place(fcdp_group *group, uint64_t generation, size_t *bytes, size_t *n_tasks) {
    fcdp_own_group *own = &group->own;
    uint32_t n = group->layout->n_extents, n_others = group->comm->topology.n_nodes - 1;
    size_t n_copies = 0;
    if (generation && !own->extents) own->extents = calloc(n, sizeof *own->extents);
    if (generation && !own->extents) return false;
    if (generation) own->generation = generation, own->first_task = *n_tasks, own->copies_are_lost = false;
    for (uint32_t i = 0; i < n; i++) {
        size_t shard_bytes = group->layout->extents[i].shard_bytes;
        bool has_place = group->layout->extents[i].span == FCDP_SPAN_TRAINABLE;
        if (generation) own->extents[i] = (fcdp_own_base){.has_place = has_place, .offset_bytes = *bytes};
        if (!has_place) continue;
        *bytes += fcdp__round_up(shard_bytes, 16);
        *n_tasks += fcdp__delta_tasks_of(shard_bytes);
        n_copies += n_others * fcdp__copy_if_tasks_of(shard_bytes);
    }
    if (generation) own->first_copy = *n_tasks;
    *n_tasks += n_copies;
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
        if (!status && fcdp__driver_kernel_load(set->engine->drv, &fcdp__copy_if_kernel, &own->copy_if))
            fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
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
    if (own->pages.range && group->own.generation == own->generation) return true;
    if (own->n_rests) return false;
    size_t bytes, n_tasks, page_bytes = fcdp__driver_page_bytes(set->engine->drv);
    (void)places_make(set, 0, &bytes, &n_tasks);
    if (!bytes) return false;
    fcdp_status status = memory_free(set, true);
    if (!status) status = memory_take(set, fcdp__round_up(bytes, page_bytes) / page_bytes, n_tasks);
    if (!status) {
        bool made = places_make(set, own->generation, &bytes, &n_tasks);
        /* a group that another thread has made meanwhile has no room */
        bool fits = bytes <= own->pages.n_pages * page_bytes &&
                    n_tasks * sizeof(fcdp_own_task) <= own->tasks.bytes;
        if (made && fits) return group->own.generation == own->generation;
        own->generation++; /* these places are void, also if the pages stay */
        memory_try_free(set, true);
    }
    if (status && status != FCDP_PENDING) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    own->n_rests = RESTS;
    return false;
}

fcdp_dptr fcdp__own_base_at(const fcdp_group *group, uint32_t extent) {
    return fcdp__dptr_add(fcdp__vrange_base(group->comm->set->own_bases.pages.range),
                          group->own.extents[extent].offset_bytes);
}

static fcdp_copy_if_task *copies_of(const fcdp_group *group) {
    const fcdp_own_bases *bases = &group->comm->set->own_bases;
    return &((fcdp_own_task *)(void *)bases->tasks.at + group->own.first_copy)->copy;
}

fcdp_copy_if_task *fcdp__own_copies_take(fcdp_group *group) {
    fcdp_own_group *own = &group->own;
    fcdp_driver *drv = group->comm->engine->drv;
    if (!group->comm->set->own_bases.copy_if.function || own->copies_are_lost) return NULL;
    fcdp_status status = own->copied ? fcdp__driver_event_sync(drv, own->copied)
                                     : fcdp__driver_event_create_blocking(drv, &own->copied);
    if (status) {
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
        return NULL;
    }
    own->copies_are_lost = true;
    return copies_of(group);
}

fcdp_status fcdp__own_copies_launch(fcdp_group *group, size_t n, fcdp_stream stream) {
    fcdp_driver *drv = group->comm->engine->drv;
    const fcdp_kernel *kernel = &group->comm->set->own_bases.copy_if;
    fcdp_dptr at;
    fcdp_status status = fcdp__driver_host_dptr(drv, copies_of(group), &at);
    if (!status) status = fcdp__driver_launch(drv, kernel, at, (uint32_t)n, stream);
    if (!status) status = fcdp__driver_event_record(drv, group->own.copied, stream);
    group->own.copies_are_lost = status != FCDP_OK;
    return status;
}

void fcdp__own_bases_fail(fcdp_stream_set *set) {
    if (set->own_bases.pages.range) set->own_bases.incomplete = true;
}

void fcdp__own_group_free(fcdp_own_group *own, fcdp_driver *drv) {
    if (own->copied) fcdp__driver_event_destroy(drv, own->copied);
    free(own->extents);
}

/* ---- who else wants the pages ---- */

/* The pass may be another model's: a thread that has them is not waited for. */
void fcdp__own_bases_begin_pass(fcdp_stream_set *set) {
    fcdp_own_bases *own = &set->own_bases;
    if (!fcdp__lent_try_acquire(&own->pages)) return;
    if (own->n_rests) own->n_rests--;
    fcdp__own_bases_release(own);
}

void fcdp__own_bases_trim(fcdp_stream_set *set) {
    fcdp__own_bases_acquire(&set->own_bases);
    memory_try_free(set, true);
    if (!set->own_bases.pages.range && !tasks_await(set)) tasks_free(set);
    fcdp__own_bases_release(&set->own_bases);
}

/* What lies before an event may wait for other ranks, whose threads wait for pages, too, and for the gathers
 * of another set: in a circle. */
size_t fcdp__own_bases_reclaim(fcdp_stream_set *set) {
    fcdp_own_bases *own = &set->own_bases;
    bool is_alone = !set->engine->sets->next;
    if (!fcdp__lent_try_acquire(&own->pages)) return 0;
    bool had = own->pages.range != NULL;
    memory_try_free(set, is_alone);
    size_t n_given = had && !own->pages.range ? own->pages.n_pages : 0;
    if (had) own->n_rests = RESTS;
    fcdp__own_bases_release(own);
    return n_given;
}

size_t fcdp__own_bases_idle(fcdp_stream_set *set) {
    return fcdp__lent_idle(&set->own_bases.pages);
}

void fcdp__own_bases_destroy(fcdp_stream_set *set) {
    fcdp_own_bases *own = &set->own_bases;
    if (set->engine->drv && (own->pages.range || own->tasks.at)) fcdp__own_bases_trim(set);
    if (own->tasks.at) tasks_free(set); /* the device is no more */
    if (own->has_kernel == FCDP_KERNEL_LOADED) fcdp__driver_kernel_unload(set->engine->drv, &own->kernel);
    fcdp__driver_kernel_unload(set->engine->drv, &own->copy_if);
    fcdp__lent_destroy(&own->pages);
}
