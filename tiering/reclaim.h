/* reclaim.h - the order in which device pages go back to the pool when it has none left: free slots first,
 * then kept regions, as policy says. */
#ifndef FCDP_RECLAIM_H
#define FCDP_RECLAIM_H

#include "tiering/internal.h"

/* An fcdp_reclaim_fn; `ctx` is the fcdp_tiering. */
size_t fcdp__tiering_reclaim(void *ctx, size_t n_pages);
/* An fcdp_idle_fn: pages of free slots. */
size_t fcdp__tiering_idle(void *ctx);

#endif
