/* copy.h - copies of a region's pieces between the tiers, on the copy streams. region.c decides what a copy
 * means. */
#ifndef FCDP_COPY_H
#define FCDP_COPY_H

#include "tiering/internal.h"

/* Enqueue the copies of the region's own pieces, of the spans of `span_mask`. A failed call may have
 * enqueued some of them. */
fcdp_status fcdp__region_copy(fcdp_region *region, fcdp_direction direction, uint32_t span_mask,
                              fcdp_piece_list pieces) FCDP_MUST_CHECK;
/* To the host, from elsewhere on the device. */
fcdp_status fcdp__region_copy_in(fcdp_region *region, uint32_t span_mask, const fcdp_source *sources,
                                 size_t n) FCDP_MUST_CHECK;

/* From the host, to elsewhere on the device. */
fcdp_status fcdp__region_copy_out(fcdp_region *region, uint32_t span_mask, fcdp_piece piece,
                                  fcdp_dptr to) FCDP_MUST_CHECK;

#endif
