/* layout.c - places a group's extents in its region, and cuts its spans into slices.
 *
 * Pure arithmetic, the same on every rank. Sizes come from the program, so every sum is checked for overflow.
 */
#include "tiering/layout.h"

#include <stdlib.h>

/* `*at` moves past `bytes` rounded up to `multiple`; false when that does not fit in size_t. */
static bool advance(size_t *at, size_t bytes, size_t multiple) {
    size_t end;
    if (__builtin_add_overflow(*at, bytes, &end) || end > SIZE_MAX - multiple) return false;
    *at = fcdp__round_up(end, multiple);
    return true;
}

/* Extents, then padding for the slices. */
static fcdp_status place_span(const fcdp_extent_spec *specs, uint8_t s, fcdp_layout *layout) {
    size_t at = 0;
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        if (specs[i].span != s) continue;
        size_t bytes;
        layout->extents[i] = (fcdp_extent){layout->bytes + at, specs[i].shard_bytes, s};
        if (__builtin_mul_overflow(specs[i].shard_bytes, (size_t)layout->n_shards, &bytes) ||
            !advance(&at, bytes, FCDP_EXTENT_ALIGN))
            return fcdp__fail(FCDP_ERR_INVALID, "layout: extent %u of %u shards of %zu bytes is too large", i,
                              layout->n_shards, specs[i].shard_bytes);
    }
    if (!advance(&at, 0, (size_t)layout->n_slices * FCDP_EXTENT_ALIGN) || layout->bytes > SIZE_MAX - at)
        return fcdp__fail(FCDP_ERR_INVALID, "layout: the group's %u extents together are too large",
                          layout->n_extents);
    layout->span[s] = (fcdp_piece){layout->bytes, at};
    layout->bytes += at;
    return FCDP_OK;
}

fcdp_status fcdp__layout_create(const fcdp_extent_spec *specs, uint32_t n_extents, uint32_t n_shards,
                                uint32_t n_slices, fcdp_layout **layout_out) {
    if ((!specs && n_extents) || !n_shards || !n_slices || n_slices > FCDP_MAX_SLICES)
        return fcdp__fail(FCDP_ERR_INVALID, "layout: %u extents, %u shards, %u slices", n_extents, n_shards,
                          n_slices);
    for (uint32_t i = 0; i < n_extents; i++)
        if (specs[i].span >= FCDP_N_SPANS)
            return fcdp__fail(FCDP_ERR_INVALID, "layout: extent %u names span %u of %d", i, specs[i].span,
                              FCDP_N_SPANS);
    fcdp_layout *layout = calloc(1, sizeof *layout + n_extents * sizeof layout->extents[0]);
    if (!layout) return fcdp__fail(FCDP_ERR_SYSTEM, "layout: no memory for %u extents", n_extents);
    layout->n_extents = n_extents;
    layout->n_shards = n_shards;
    layout->n_slices = n_slices;
    for (int s = 0; s < FCDP_N_SPANS; s++) {
        fcdp_status status = place_span(specs, (uint8_t)s, layout);
        if (status) {
            free(layout);
            return status;
        }
    }
    *layout_out = layout;
    return FCDP_OK;
}

void fcdp__layout_destroy(fcdp_layout *layout) {
    free(layout);
}

fcdp_piece fcdp__layout_slice(const fcdp_layout *layout, uint32_t span, uint32_t slice) {
    FCDP_CHECK(1, span < FCDP_N_SPANS && slice < layout->n_slices);
    size_t bytes = layout->span[span].bytes / layout->n_slices;
    return (fcdp_piece){layout->span[span].offset_bytes + slice * bytes, bytes};
}
