/* pages_internal.h - what the pool's files share: what it writes to the trace. */
#ifndef FCDP_PAGES_INTERNAL_H
#define FCDP_PAGES_INTERNAL_H

#include "alloc/pages.h"

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
