/* trace.h - what alloc writes to the trace (trace_events.h): maps and unmaps, and all that a pool does.
 *
 * A pool's events are the differences between two looks at its counts, so their sums are the counts. Both
 * looks are under the pool's lock (fcdp__pool_tell), so the events come in the order of what they say.
 */
#ifndef FCDP_ALLOC_TRACE_H
#define FCDP_ALLOC_TRACE_H

#include "alloc/pages.h"
#include "alloc/trace_events.h"
#include "base/trace.h"

/* ---- maps of device addresses ---- */

static inline void fcdp__trace_map(uint64_t at, uint64_t bytes) {
    fcdp__trace_now(FCDP_EVENT_MAP, 0, bytes, at, 0);
    fcdp__trace_count(FCDP_COUNT_MAPS, 1);
    fcdp__trace_count(FCDP_COUNT_MAPPED_BYTES, bytes);
}

static inline void fcdp__trace_unmap(uint64_t at, uint64_t bytes) {
    fcdp__trace_now(FCDP_EVENT_UNMAP, 0, bytes, at, 0);
    fcdp__trace_count(FCDP_COUNT_UNMAPS, 1);
    fcdp__trace_count(FCDP_COUNT_MAPPED_BYTES, -bytes);
}

/* ---- the pool ---- */

/* What the trace has of one pool so far, under the pool's lock. */
typedef struct fcdp_pool_told {
    uint32_t pool; /* its number in the process */
    fcdp_pool_stats stats;
} fcdp_pool_told;

uint32_t fcdp__pool_next_number(void);
fcdp_driver *fcdp__pool_driver(const fcdp_pool *pool);
/* Write events and counters for what has changed since the last call. */
void fcdp__pool_tell(fcdp_pool_told *told, const fcdp_pool_stats *now);
/* Nothing is left of it. */
void fcdp__pool_tell_end(fcdp_pool_told *told);

/* One take that was short of pages. */
typedef struct fcdp_pool_shortage {
    uint32_t pool;
    fcdp_holder holder;
    size_t bytes;      /* asked for */
    uint64_t begun_ns; /* 0: it was not short, or nothing is traced */
    size_t back_bytes; /* that reclaimers gave */
} fcdp_pool_shortage;
void fcdp__pool_tell_pressure(fcdp_pool_shortage *shortage, const fcdp_pool_stats *now);
void fcdp__pool_tell_reclaim(const fcdp_pool_shortage *shortage, fcdp_reclaimer which, uint64_t begun_ns,
                             size_t missing_bytes, size_t back_bytes);
/* It was short, and its search has ended. */
void fcdp__pool_tell_outcome(const fcdp_pool_shortage *shortage, bool found);
void fcdp__pool_tell_oom(size_t bytes, const fcdp_pool_stats *now);

#endif
