/* imprint.c - the fingerprint of a gathered copy (XXH3, 64 bit), see the header. */
#define XXH_INLINE_ALL
#include "comm/imprint.h"

#include <xxhash.h>

static bool is_readable(const fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    return fcdp__driver_is_sim(engine->drv) && engine->options.fingerprint != FCDP_FINGERPRINT_NEVER;
}

static const char *region_bytes(const fcdp_group *group) {
    return (const char *)(uintptr_t)fcdp__region_base(group->region).addr;
}

static uint64_t imprint_of_slices(const fcdp_group *group) {
    uint64_t mixed = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        fcdp_piece slice = fcdp__layout_slice(group->layout, s, group->comm->topology.local);
        mixed = XXH3_64bits_withSeed(region_bytes(group) + slice.offset_bytes, slice.bytes, mixed);
    }
    return mixed;
}

/* Without the padding: it differs between ranks, and a restore by slice brings the peers'. */
static uint64_t imprint_of_extents(const fcdp_group *group) {
    uint64_t mixed = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        const fcdp_extent *extent = &group->layout->extents[i];
        size_t bytes = group->layout->n_shards * extent->shard_bytes;
        mixed = XXH3_64bits_withSeed(region_bytes(group) + extent->offset_bytes, bytes, mixed);
    }
    return mixed;
}

static uint64_t imprint(const fcdp_group *group) {
    return group->imprint_is_whole ? imprint_of_extents(group) : imprint_of_slices(group);
}

void fcdp__imprint_take(fcdp_group *group) {
    group->has_imprint =
        is_readable(group) && (group->comm->engine->options.tau > 0 || fcdp__group_is_dirty(group));
    group->imprint_is_whole = group->comm->engine->options.tau > 0;
    if (group->has_imprint) group->imprint = imprint(group);
}

bool fcdp__imprint_holds(const fcdp_group *group) {
    return !group->has_imprint || imprint(group) == group->imprint;
}
