/* copy_fingerprint.c - see the header. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "comm/copy_fingerprint.h"
#include "comm/internal.h"

static bool is_readable(const fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    return engine->host_computes && engine->options.fingerprint != FCDP_FINGERPRINT_NEVER;
}

/* Without the padding, which differs between ranks: a restore by slices brings the peers'. */
static uint64_t of_copy(const fcdp_group *group) {
    const char *bytes = (const char *)(uintptr_t)fcdp__region_base(group->region).addr;
    uint64_t mixed = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        mixed = fcdp__copy_fingerprint_of(bytes + group->layout->extents[i].offset_bytes,
                                          fcdp__layout_extent_bytes(group->layout, i), mixed);
    return mixed;
}

uint64_t fcdp__copy_fingerprint_of(const void *bytes, size_t n_bytes, uint64_t before) {
    return XXH3_64bits_withSeed(bytes, n_bytes, before);
}

void fcdp__copy_fingerprint_take(fcdp_group *group) {
    group->has_fingerprint = is_readable(group);
    if (group->has_fingerprint) group->fingerprint = of_copy(group);
}

bool fcdp__copy_fingerprint_is_known(const fcdp_group *group) {
    return !group->waited || group->has_fingerprint || !is_readable(group);
}

bool fcdp__copy_fingerprint_matches(const fcdp_group *group) {
    return !group->waited || !group->has_fingerprint || of_copy(group) == group->fingerprint;
}
