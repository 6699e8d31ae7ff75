/* trace.c - writes the pool's events and counters to the trace.
 *
 * It compares the pool's counts with those of the last look, each time the pool's lock is released, and
 * writes the differences as events. So no place that changes a count can forget its event, and the sums of
 * events are the counts. A failure of the trace is never the pool's.
 */
#include "alloc/trace.h"

#include <stdatomic.h>

uint32_t fcdp__pool_next_number(void) {
    static _Atomic uint32_t n_pools;
    return 1 + atomic_fetch_add_explicit(&n_pools, 1, memory_order_relaxed);
}

static uint64_t created_bytes(const fcdp_pool_stats *stats) {
    return (uint64_t)(stats->live_pages + stats->cached_pages) * stats->page_bytes;
}

static uint64_t live_bytes(const fcdp_pool_stats *stats) {
    return (uint64_t)stats->live_pages * stats->page_bytes;
}

static uint64_t owner_of(uint32_t pool, fcdp_holder holder) {
    return holder | (uint64_t)pool << 8;
}

/* Levels of several pools add up, so each pool adds what has changed. */
static void level_tell(unsigned counter, uint64_t now, uint64_t before) {
    fcdp__trace_count(counter, now - before);
}

static void created_tell(const fcdp_pool_told *told, const fcdp_pool_stats *now) {
    uint64_t before = created_bytes(&told->stats), after = created_bytes(now);
    if (after > before)
        fcdp__trace_now(FCDP_EVENT_PAGES_CREATE, 0, after - before, told->pool, after);
    else if (after < before)
        fcdp__trace_now(FCDP_EVENT_PAGES_RELEASE, 0, before - after, told->pool, after);
    level_tell(FCDP_COUNT_CREATED_BYTES, after, before);
    level_tell(FCDP_COUNT_CACHED_BYTES, after - live_bytes(now), before - live_bytes(&told->stats));
    level_tell(FCDP_COUNT_CREATES, now->n_creates, told->stats.n_creates);
}

static void held_tell(const fcdp_pool_told *told, const fcdp_pool_stats *now, fcdp_holder holder) {
    uint64_t before = (uint64_t)told->stats.held_pages[holder] * now->page_bytes,
             after = (uint64_t)now->held_pages[holder] * now->page_bytes;
    if (after == before) return;
    fcdp__trace(&(fcdp_trace_event){
        .kind = after > before ? FCDP_EVENT_PAGES_TAKE : FCDP_EVENT_PAGES_GIVE,
        .bytes = after > before ? after - before : before - after,
        .a = owner_of(told->pool, holder),
        .b = after,
    });
    level_tell(FCDP_COUNT_HELD_0_BYTES + holder, after, before);
}

/* Created before taken, given before released: at no event does a holder have more than there is. */
void fcdp__pool_tell(fcdp_pool_told *told, const fcdp_pool_stats *now) {
    if (!fcdp__trace_is_on(1)) return;
    told->stats.page_bytes = now->page_bytes;
    bool grows = created_bytes(now) > created_bytes(&told->stats);
    if (grows) created_tell(told, now);
    for (fcdp_holder holder = 0; holder < FCDP_N_HOLDERS; holder++) {
        held_tell(told, now, holder);
        level_tell(FCDP_COUNT_PEAK_0_BYTES + holder, now->peak_held_pages[holder] * now->page_bytes,
                   told->stats.peak_held_pages[holder] * now->page_bytes);
    }
    if (!grows) created_tell(told, now);
    level_tell(FCDP_COUNT_PEAK_BYTES, now->peak_live_pages * now->page_bytes,
               told->stats.peak_live_pages * now->page_bytes);
    level_tell(FCDP_COUNT_BUDGET_BYTES, now->budget_bytes, told->stats.budget_bytes);
    told->stats = *now;
}

void fcdp__pool_tell_end(fcdp_pool_told *told) {
    fcdp_pool_stats none = {.page_bytes = told->stats.page_bytes, .n_creates = told->stats.n_creates};
    fcdp__pool_tell(told, &none);
}

/* What fails says nothing: the thread's failure text stays. */
void fcdp__pool_trace_device(fcdp_pool *pool) {
    size_t free_bytes, total_bytes;
    fcdp_pool_stats now;
    if (!fcdp__trace_is_on(1)) return;
    fcdp__pool_stats(pool, &now);
    fcdp_failure before = fcdp__failure_keep(FCDP_ERR_INVALID);
    fcdp_status status = fcdp__driver_mem_info(fcdp__pool_driver(pool), &free_bytes, &total_bytes);
    (void)!fcdp__failure_restore(&before);
    if (status) return;
    uint64_t used_bytes = total_bytes - free_bytes, ours_bytes = created_bytes(&now);
    fcdp__trace_set(FCDP_COUNT_TOTAL_BYTES, total_bytes);
    fcdp__trace_set(FCDP_COUNT_FREE_BYTES, free_bytes);
    fcdp__trace_set(FCDP_COUNT_OTHERS_BYTES, used_bytes > ours_bytes ? used_bytes - ours_bytes : 0);
}

void fcdp__pool_trace_pins(const fcdp_pool *pool) {
    fcdp_driver_pins pins = fcdp__driver_pins_get(fcdp__pool_driver(pool));
    fcdp__trace_set(FCDP_COUNT_HOST_PINS, pins.n_made);
    fcdp__trace_set(FCDP_COUNT_HOST_UNPINS, pins.n_undone);
    fcdp__trace_set(FCDP_COUNT_HOST_PINNED_BYTES, pins.bytes);
}

/* ---- shortages ---- */

void fcdp__pool_tell_pressure(fcdp_pool_shortage *shortage, const fcdp_pool_stats *now) {
    if (shortage->begun_ns) return; /* one take, one event */
    shortage->begun_ns = fcdp__trace_start();
    fcdp__trace_now(FCDP_EVENT_PRESSURE, 0, shortage->bytes, live_bytes(now), now->budget_bytes);
    fcdp__trace_count(FCDP_COUNT_PRESSURES, 1);
}

void fcdp__pool_tell_reclaim(const fcdp_pool_shortage *shortage, fcdp_reclaimer which, uint64_t begun_ns,
                             size_t missing_bytes, size_t back_bytes) {
    fcdp__trace_since(begun_ns, (fcdp_trace_event){.kind = FCDP_EVENT_RECLAIM,
                                                   .cause = (uint8_t)(FCDP_CAUSE_RECLAIM_CACHES + which),
                                                   .bytes = back_bytes,
                                                   .a = missing_bytes,
                                                   .b = owner_of(shortage->pool, shortage->holder)});
    fcdp__trace_count(FCDP_COUNT_RECLAIMS, 1);
}

void fcdp__pool_tell_outcome(const fcdp_pool_shortage *shortage, bool found) {
    fcdp__trace_since(shortage->begun_ns, (fcdp_trace_event){.kind = FCDP_EVENT_HOST_WAIT,
                                                             .cause = FCDP_CAUSE_FOR_MEMORY,
                                                             .bytes = shortage->bytes});
    if (!found) return;
    fcdp__trace_since(shortage->begun_ns,
                      (fcdp_trace_event){.kind = FCDP_EVENT_OOM_AVOIDED,
                                         .bytes = shortage->bytes,
                                         .a = shortage->back_bytes,
                                         .b = owner_of(shortage->pool, shortage->holder)});
    fcdp__trace_count(FCDP_COUNT_OOMS_AVOIDED, 1);
}

void fcdp__pool_tell_oom(size_t bytes, const fcdp_pool_stats *now) {
    fcdp__trace_now(FCDP_EVENT_OOM, 0, bytes, live_bytes(now), now->budget_bytes);
    fcdp__trace_count(FCDP_COUNT_OOMS, 1);
}
