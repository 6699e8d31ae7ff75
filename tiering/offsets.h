/* offsets.h - an allocator of offsets in the slab. It never touches the slab's bytes.
 *
 * jemalloc sees an address range of the slab's size that is reserved and inaccessible; a block's offset is
 * its address minus the range's start. Size-class slack and the arena's growth cost address space alone.
 * The host budget is account.h's.
 */
#ifndef FCDP_OFFSETS_H
#define FCDP_OFFSETS_H

#include "base/base.h"

typedef struct fcdp_offsets fcdp_offsets;

/* Offsets in [first_bytes, capacity_bytes), both multiples of `page_bytes`. */
fcdp_status fcdp__offsets_create(size_t first_bytes, size_t capacity_bytes, size_t page_bytes,
                                 fcdp_offsets **offsets_out) FCDP_MUST_CHECK;
/* No block may be used any more. In a forked child it does nothing. */
void fcdp__offsets_destroy(fcdp_offsets *offsets);
/* `bytes` at a multiple of page_bytes. FCDP_ERR_NO_HOST_MEM when the slab has no such gap,
 * FCDP_ERR_INVALID in a forked child. */
fcdp_status fcdp__offsets_alloc(fcdp_offsets *offsets, size_t bytes, uint64_t *offset_out) FCDP_MUST_CHECK;
void fcdp__offsets_free(fcdp_offsets *offsets, uint64_t offset);

#endif
