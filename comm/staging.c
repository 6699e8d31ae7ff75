/* staging.c - device pages that gathers pack into, lent to whatever needs them more.
 *
 * The buffer is only worth its pages while passes use it. So it grows to the largest gather, stays mapped
 * from one pass to the next, and goes after MAX_IDLE_PASSES without use, at the last group's end, or when the
 * pool has no pages left. It is one block, since one all-gather uses a half as a whole.
 */
#include "comm/staging.h"

#include "comm/internal.h"

enum { MAX_IDLE_PASSES = 4 };

void fcdp__staging_acquire(fcdp_staging *staging) {
    fcdp__lent_acquire(&staging->pages);
}

void fcdp__staging_release(fcdp_staging *staging) {
    fcdp__lent_release(&staging->pages);
}

/* Acquired: its pages go, once the device is done with them. After a gather that failed half way that is when
 * the streams are idle. */
static fcdp_status pages_free(fcdp_stream_set *set) {
    fcdp_staging *staging = &set->staging;
    fcdp_status status = FCDP_OK;
    if (!staging->pages.range) return FCDP_OK;
    for (int i = 0; i < FCDP_N_STREAMS && staging->incomplete && !status; i++)
        status = FCDP_RETRY_ONCE(fcdp__driver_stream_sync(set->engine->drv, set->streams[i]));
    if (staging->incomplete && !status)
        status = FCDP_RETRY_ONCE(fcdp__driver_stream_sync(set->engine->drv, set->copies[FCDP_TO_HOST]));
    staging->incomplete = staging->incomplete && status;
    for (int h = 0; h < 2 && !status; h++)
        if (staging->emptied[h]) status = fcdp__driver_event_sync(set->engine->drv, staging->emptied[h]);
    if (status) return status;
    fcdp__lent_give(&staging->pages, set->engine->pool);
    return FCDP_OK;
}

/* Acquired. A buffer that cannot be freed now is freed later. */
static void pages_try_free(fcdp_stream_set *set) {
    if (pages_free(set)) fcdp__log(FCDP_LOG_WARN, "the staging buffer stays for now: %s", fcdp_error_text());
}

void fcdp__staging_trim(fcdp_stream_set *set) {
    fcdp__staging_acquire(&set->staging);
    pages_try_free(set);
    fcdp__staging_release(&set->staging);
}

static bool has_been_emptied(const fcdp_stream_set *set) {
    for (int h = 0; h < 2; h++)
        if (set->staging.emptied[h] && fcdp__driver_event_query(set->engine->drv, set->staging.emptied[h]))
            return false;
    return true;
}

/* The pass may be another model's: what that set is at is not waited for. */
void fcdp__staging_begin_pass(fcdp_stream_set *set) {
    fcdp_staging *staging = &set->staging;
    if (!fcdp__lent_try_acquire(&staging->pages)) return;
    if (++staging->n_idle > MAX_IDLE_PASSES && has_been_emptied(set)) pages_try_free(set);
    fcdp__staging_release(staging);
}

size_t fcdp__staging_reclaim(fcdp_stream_set *set) {
    fcdp_staging *staging = &set->staging;
    if (!fcdp__lent_try_acquire(&staging->pages)) return 0;
    bool had = staging->pages.range != NULL;
    pages_try_free(set);
    size_t n_given = had && !staging->pages.range ? staging->pages.n_pages : 0;
    fcdp__staging_release(staging);
    return n_given;
}

size_t fcdp__staging_idle(fcdp_stream_set *set) {
    return fcdp__lent_idle(&set->staging.pages);
}

void fcdp__staging_init(fcdp_staging *staging) {
    fcdp__lent_init(&staging->pages);
}

void fcdp__staging_destroy(fcdp_stream_set *set) {
    fcdp_staging *staging = &set->staging;
    if (set->engine->drv && staging->pages.range) fcdp__staging_trim(set);
    for (int h = 0; h < 2; h++) {
        if (staging->filled[h]) fcdp__driver_event_destroy(set->engine->drv, staging->filled[h]);
        if (staging->emptied[h]) fcdp__driver_event_destroy(set->engine->drv, staging->emptied[h]);
    }
    fcdp__lent_destroy(&staging->pages);
}

int fcdp__staging_take(fcdp_stream_set *set, fcdp_dptr *half_out) {
    fcdp_staging *staging = &set->staging;
    int half = staging->next;
    staging->next = !half;
    staging->n_idle = 0;
    size_t bytes = staging->pages.n_pages * fcdp__driver_page_bytes(set->engine->drv);
    *half_out = fcdp__dptr_add(fcdp__vrange_base(staging->pages.range), (size_t)half * (bytes / 2));
    return half;
}

fcdp_status fcdp__staging_reserve(fcdp_stream_set *set, size_t half_bytes) {
    fcdp_staging *staging = &set->staging;
    fcdp_event *const events[] = {&staging->filled[0], &staging->filled[1], &staging->emptied[0],
                                  &staging->emptied[1]};
    fcdp_status status = fcdp__driver_events_make_blocking(set->engine->drv, events,
                                                           sizeof events / sizeof *events);
    if (status) return status;
    size_t page_bytes = fcdp__driver_page_bytes(set->engine->drv);
    size_t n_pages = fcdp__round_up(2 * half_bytes, page_bytes) / page_bytes;
    if (staging->pages.range && staging->pages.n_pages >= n_pages) return FCDP_OK;
    status = pages_free(set);
    return status ? status
                  : fcdp__lent_take(&staging->pages, set->engine->drv, set->engine->pool, n_pages, true);
}
