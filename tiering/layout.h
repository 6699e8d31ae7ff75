/* layout.h - where each gathered parameter lies inside a region. Pure.
 *
 * A region holds FSDP's final unsharded storages: the frozen extents side by side (span 0), then the
 * trainable ones (span 1). An extent is n_shards equal shards in rank order, so its bytes = n_shards *
 * shard_bytes. Every extent starts on 512 bytes (what torch's allocator gives, so kernels choose the same
 * vector paths). A span is padded to n_slices * 512 bytes and cut into n_slices equal slices: slice i is what
 * the node's rank i writes to and reads from the host tier.
 *
 *     bytes = span[0].bytes + span[1].bytes
 *     span[s].bytes % (n_slices * 512) == 0
 *     extents of a span do not overlap
 */
#ifndef FCDP_LAYOUT_H
#define FCDP_LAYOUT_H

#include "base/base.h"

enum { FCDP_SPAN_FROZEN = 0, FCDP_SPAN_TRAINABLE = 1, FCDP_N_SPANS = 2 };
enum { FCDP_SPAN_MASK_ALL = 3 };
enum { FCDP_EXTENT_ALIGN = 512 };
enum { FCDP_MAX_SLICES = 64 }; /* ranks per node */

typedef struct fcdp_extent_spec {
    /* one rank's shard, padded as FSDP pads it, in the dtype that is gathered; may be 0 */
    size_t shard_bytes;
    uint8_t span; /* FCDP_SPAN_FROZEN or FCDP_SPAN_TRAINABLE at creation */
} fcdp_extent_spec;

typedef struct fcdp_extent {
    size_t offset_bytes; /* from the region's start */
    size_t shard_bytes;  /* shard r lies at offset + r * shard_bytes */
    uint8_t span;
} fcdp_extent;

typedef struct fcdp_piece {
    size_t offset_bytes, bytes;
} fcdp_piece;

typedef struct fcdp_layout {
    uint32_t n_extents, n_shards, n_slices;
    size_t bytes;
    fcdp_piece span[FCDP_N_SPANS];
    fcdp_extent extents[]; /* in the caller's order */
} fcdp_layout;

/* n_shards: ranks of the shard group (G). n_slices: ranks per node (g). The
 * caller frees with fcdp__layout_destroy. */
fcdp_status fcdp__layout_create(const fcdp_extent_spec *specs, uint32_t n_extents, uint32_t n_shards,
                                uint32_t n_slices, fcdp_layout **layout_out) FCDP_MUST_CHECK;
void fcdp__layout_destroy(fcdp_layout *layout);
/* All ranks' shards of extent i: the gathered parameter, with what pads it to equal shards. */
static inline size_t fcdp__layout_extent_bytes(const fcdp_layout *layout, uint32_t i) {
    return layout->n_shards * layout->extents[i].shard_bytes;
}
/* Slice `slice` of span `span`: span.offset + slice * span.bytes / n_slices. */
fcdp_piece fcdp__layout_slice(const fcdp_layout *layout, uint32_t span, uint32_t slice);

#endif
