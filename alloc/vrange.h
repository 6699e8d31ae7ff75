/* vrange.h - a reserved range of device addresses, which keeps its address for life.
 *
 * A handle of pages (pages.h) is mapped at its start and unmapped again. A range owns no pages: the caller
 * owns the handle, and decides how many ranges it is mapped under. CUDA lets one handle be mapped at several
 * addresses; a stream or events must order the uses through them. Unmapping does not wait for work on the
 * device: the caller gates it on events of every stream that used this range. A range has no lock: its owner
 * serialises map, unmap and destroy.
 */
#ifndef FCDP_VRANGE_H
#define FCDP_VRANGE_H

#include "alloc/driver.h"

typedef struct fcdp_vrange fcdp_vrange;

/* Reserve `bytes` rounded up to pages. */
fcdp_status fcdp__vrange_create(fcdp_driver *drv, size_t bytes, fcdp_vrange **range_out) FCDP_MUST_CHECK;
/* Unmaps first if mapped. */
void fcdp__vrange_destroy(fcdp_vrange *range);
fcdp_dptr fcdp__vrange_base(const fcdp_vrange *range);
size_t fcdp__vrange_bytes(const fcdp_vrange *range);
bool fcdp__vrange_is_mapped(const fcdp_vrange *range);
/* The whole of `handle` at the range's start, and access to it. `bytes`: the handle's, at most the
 * range's. On failure nothing is mapped. */
fcdp_status fcdp__vrange_map(fcdp_vrange *range, fcdp_phys handle, size_t bytes) FCDP_MUST_CHECK;
/* From then on a touch faults. On a driver failure the range stays mapped. */
fcdp_status fcdp__vrange_unmap(fcdp_vrange *range) FCDP_MUST_CHECK;

#endif
