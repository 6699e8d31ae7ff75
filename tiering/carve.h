/* carve.h - places blocks in the slab: offsets only, it never touches the slab's bytes.
 *
 * jemalloc sees an address range of the slab's size that is reserved and inaccessible; a block's offset is
 * its address minus the range's start. Size-class slack and the arena's growth cost address space alone.
 * Nothing here knows budgets.
 */
#ifndef FCDP_CARVE_H
#define FCDP_CARVE_H

#include "alloc/base.h"

typedef struct fcdp_carver fcdp_carver;

/* Offsets in [first_bytes, capacity_bytes), both multiples of `page_bytes`. */
fcdp_status fcdp__carver_create(size_t first_bytes, size_t capacity_bytes, size_t page_bytes,
                                fcdp_carver **carver_out) FCDP_MUST_CHECK;
/* Every block is void. Does nothing but forget in a forked child. */
void fcdp__carver_destroy(fcdp_carver *carver);
/* `bytes` at a multiple of page_bytes. FCDP_ERR_NO_HOST_MEM when the slab has no such gap,
 * FCDP_ERR_INVALID in a forked child. */
fcdp_status fcdp__carver_take(fcdp_carver *carver, size_t bytes, uint64_t *offset_out) FCDP_MUST_CHECK;
void fcdp__carver_give(fcdp_carver *carver, uint64_t offset);

#endif
