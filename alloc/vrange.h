/* vrange.h - a reserved range of device addresses that keeps its address for life; pages come and go under it.
 *
 * No policy here. Unmapping does not wait for work on the device: the caller gates it on events of every stream that used
 * the range. A range is either wholly mapped or wholly unmapped. A range has no lock: its owner serialises map, unmap and
 * destroy.
 */
#ifndef FCDP_VRANGE_H
#define FCDP_VRANGE_H

#include "alloc/pages.h"

typedef struct fcdp_vrange fcdp_vrange;

/* Reserve `bytes` rounded up to pages. */
fcdp_status fcdp__vrange_create(fcdp_driver *drv, fcdp_pool *pool, size_t bytes, fcdp_vrange **range_out) FCDP_MUST_CHECK;
/* Unmaps and gives pages back first if mapped. */
void fcdp__vrange_destroy(fcdp_vrange *range);
fcdp_dptr fcdp__vrange_base(const fcdp_vrange *range);
size_t fcdp__vrange_n_pages(const fcdp_vrange *range);
bool fcdp__vrange_is_mapped(const fcdp_vrange *range);
/* Take pages from the pool, map them, one set-access over all. On failure nothing stays mapped and no page is kept. */
fcdp_status fcdp__vrange_map(fcdp_vrange *range) FCDP_MUST_CHECK;
/* One unmap over all, pages go back to the pool; from then on a touch faults. On a driver failure the range stays mapped. */
fcdp_status fcdp__vrange_unmap(fcdp_vrange *range) FCDP_MUST_CHECK;

#endif
