/* content.c - the fingerprint of a gathered copy (XXH3, 64 bit), see internal.h. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "comm/internal.h"

static bool is_readable(const fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    return engine->host_computes && engine->options.fingerprint != FCDP_FINGERPRINT_NEVER;
}

/* Without the padding, which differs between ranks: a restore by slices brings the peers'. */
static uint64_t content_of(const fcdp_group *group) {
    const char *bytes = (const char *)(uintptr_t)fcdp__region_base(group->region).addr;
    uint64_t mixed = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        const fcdp_extent *extent = &group->layout->extents[i];
        mixed = XXH3_64bits_withSeed(bytes + extent->offset_bytes,
                                     group->layout->n_shards * extent->shard_bytes, mixed);
    }
    return mixed;
}

uint64_t fcdp__content_of_bytes(const void *bytes, size_t n_bytes) {
    return XXH3_64bits(bytes, n_bytes);
}

void fcdp__content_take(fcdp_group *group) {
    group->has_content = is_readable(group);
    if (group->has_content) group->content = content_of(group);
}

bool fcdp__content_is_known(const fcdp_group *group) {
    return !group->waited || group->has_content || !is_readable(group);
}

bool fcdp__content_holds(const fcdp_group *group) {
    return !group->waited || !group->has_content || content_of(group) == group->content;
}
