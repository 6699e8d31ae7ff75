/* reclaim.h - whose device pages go back when the pool has none left: those of free slots first,
 * then of kept regions, as policy says. */
#ifndef FCDP_RECLAIM_H
#define FCDP_RECLAIM_H

#include "tiering/internal.h"

/* An fcdp_reclaim_fn; `ctx` is the fcdp_tiering. */
size_t fcdp__tiering_reclaim(void *ctx, size_t n_pages);
/* An fcdp_idle_fn: pages of free slots. */
size_t fcdp__tiering_idle(void *ctx);

#endif
