/* imprint.c - the fingerprint of a gathered copy (XXH3, 64 bit), see the header. */
#define XXH_INLINE_ALL
#include "comm/imprint.h"

#include <xxhash.h>

static bool is_readable(const fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    return fcdp__driver_is_sim(engine->drv) && engine->options.fingerprint != FCDP_FINGERPRINT_NEVER;
}

static uint64_t imprint(const fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    const char *base = (const char *)(uintptr_t)fcdp__region_base(group->region).addr;
    if (engine->options.tau > 0) return XXH3_64bits(base, group->layout->bytes);
    uint64_t mixed = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        fcdp_piece slice = fcdp__layout_slice(group->layout, s, group->comm->topology.local);
        mixed = XXH3_64bits_withSeed(base + slice.offset_bytes, slice.bytes, mixed);
    }
    return mixed;
}

void fcdp__imprint_take(fcdp_group *group) {
    group->has_imprint = is_readable(group);
    if (group->has_imprint) group->imprint = imprint(group);
}

bool fcdp__imprint_holds(const fcdp_group *group) {
    return !group->has_imprint || imprint(group) == group->imprint;
}
