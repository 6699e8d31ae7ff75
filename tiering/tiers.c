/* tiers.c - finds the regions of a plan among a model's groups. It moves nothing: what a tier means is
 * comm/moves.c's, of host memory policy.c's.
 *
 * Regions of one layer's kind are alike, so counts alone do not tell them apart, but their order does. A
 * model's root comes first among its groups, where the embedding may or may not be; so the order is that of
 * groups with the same counts, and not of all of them.
 */
#include "tiering/tiers.h"

#include <inttypes.h>
#include <string.h>

static const char *const names[FCDP_N_TIERS] = {"policy", "device", "host",  "host-whole",
                                                "file",   "gather", "mapped"};

const char *fcdp__tier_name(fcdp_tier tier) {
    return names[tier];
}

bool fcdp__tier_parse(const char *name, fcdp_tier *tier_out) {
    for (int tier = 0; tier < FCDP_N_TIERS; tier++) {
        if (strcmp(names[tier], name) != 0) continue;
        *tier_out = (fcdp_tier)tier;
        return true;
    }
    return false;
}

static const char *name_of(const fcdp_counted *one) {
    return one->name[0] ? one->name : "(root)";
}

static bool is_taken(uint32_t region, const uint32_t *region_of, uint32_t n) {
    uint32_t g = 0;
    while (g < n && region_of[g] != region) g++;
    return g < n;
}

/* region_of_out[g]: the region of that name; n_regions: there is none. How many groups have one. */
static uint32_t names_match(const fcdp_counted *regions, uint32_t n_regions, const fcdp_counted *groups,
                            uint32_t n_groups, uint32_t *region_of_out) {
    uint32_t n_named = 0;
    for (uint32_t g = 0; g < n_groups; g++) {
        uint32_t r = 0;
        while (r < n_regions &&
               (strcmp(name_of(&regions[r]), name_of(&groups[g])) != 0 || is_taken(r, region_of_out, g)))
            r++;
        region_of_out[g] = r;
        n_named += r < n_regions;
    }
    return n_named;
}

static bool count_agrees(uint64_t planned, uint64_t count, bool is_padded) {
    enum { PADDING_SHARE = 16, PADDING = 1 << 15 }; /* one parameter of few rows, on many ranks */
    uint64_t larger = planned > count ? planned : count, less = planned > count ? count : planned;
    bool may_differ = is_padded && less > 0;
    return larger - less <= (may_differ ? less / PADDING_SHARE + PADDING : 0);
}

static bool counts_agree(const fcdp_counted *region, const fcdp_counted *group, bool is_padded) {
    return count_agrees(region->trainable, group->trainable, is_padded) &&
           count_agrees(region->frozen, group->frozen, is_padded);
}

static fcdp_status counts_differ(const fcdp_counted *region, const fcdp_counted *group) {
    return fcdp__fail(FCDP_ERR_INVALID,
                      "its region '%s' has %" PRIu64 " trainable and %" PRIu64
                      " frozen parameters, and the model's group '%s' has %" PRIu64 " and %" PRIu64,
                      name_of(region), region->trainable, region->frozen, name_of(group), group->trainable,
                      group->frozen);
}

/* With the first name that one side alone has, if the other names agree. */
static fcdp_status numbers_differ(const fcdp_counted *regions, uint32_t n_regions, const fcdp_counted *groups,
                                  uint32_t n_groups, uint32_t n_named, const uint32_t *region_of) {
    if (n_named == 0)
        return fcdp__fail(FCDP_ERR_INVALID, "it has %u regions, and the model %u groups", n_regions,
                          n_groups);
    for (uint32_t g = 0; g < n_groups; g++)
        if (region_of[g] == n_regions)
            return fcdp__fail(FCDP_ERR_INVALID, "it has no region for the model's group '%s'",
                              name_of(&groups[g]));
    uint32_t r = 0;
    while (is_taken(r, region_of, n_groups)) r++;
    return fcdp__fail(FCDP_ERR_INVALID, "the model has no group '%s'", name_of(&regions[r]));
}

static fcdp_status counts_match(const fcdp_counted *regions, const fcdp_counted *groups, uint32_t n,
                                uint32_t *region_of_out) {
    for (uint32_t g = 0; g < n; g++) region_of_out[g] = n;
    for (uint32_t r = 0, first = 0; r < n; r++) {
        while (region_of_out[first] < n) first++; /* r of n are taken */
        uint32_t g = first;
        while (g < n && (region_of_out[g] < n || !counts_agree(&regions[r], &groups[g], false))) g++;
        if (g == n) return counts_differ(&regions[r], &groups[first]);
        region_of_out[g] = r;
    }
    return FCDP_OK;
}

fcdp_status fcdp__tiers_match(const fcdp_counted *regions, uint32_t n_regions, const fcdp_counted *groups,
                              uint32_t n_groups, uint32_t *region_of_out) {
    uint32_t n_named = names_match(regions, n_regions, groups, n_groups, region_of_out);
    if (n_regions != n_groups)
        return numbers_differ(regions, n_regions, groups, n_groups, n_named, region_of_out);
    if (n_named < n_groups) return counts_match(regions, groups, n_groups, region_of_out);
    for (uint32_t g = 0; g < n_groups; g++)
        if (!counts_agree(&regions[region_of_out[g]], &groups[g], true))
            return counts_differ(&regions[region_of_out[g]], &groups[g]);
    return FCDP_OK;
}
