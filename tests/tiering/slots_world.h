/* slots_world.h - groups that share slots, and the driver calls that they make. */
#ifndef FCDP_TESTS_TIERING_SLOTS_WORLD_H
#define FCDP_TESTS_TIERING_SLOTS_WORLD_H

#include "tests/tiering/support.h"

enum { BOTH = FCDP_SPAN_MASK_ALL, TRAINABLE = 1u << FCDP_SPAN_TRAINABLE, MS = 1000000, MAX_GROUPS = 24 };
static const fcdp_extent_spec SPECS[] = {{60000, FCDP_SPAN_FROZEN}, {90001, FCDP_SPAN_TRAINABLE}};

static inline void groups_open(group *groups, int n_groups, node *n) {
    char name[32];
    for (int i = 0; i < n_groups; i++) {
        snprintf(name, sizeof name, "layer %d", i);
        group_open(&groups[i], n, name, SPECS, 2, 100 + (uint64_t)i);
    }
}

static inline void groups_close(group *groups, int n_groups) {
    for (int i = 0; i < n_groups; i++) group_close(&groups[i]);
}

static inline fcdp_slot *slot_of(const group *g) {
    return g->regions[0]->slot;
}

/* ---- calls ---- */

typedef struct calls {
    unsigned long creates, maps, accesses, unmaps, releases, pins, blocking; /* pins: and unpins */
} calls;

static inline calls calls_now(void) {
    struct simgpu_blocking blocking;
    simgpu_blocking_total(0, &blocking);
    return (calls){simgpu_calls("cuMemCreate"),
                   simgpu_calls("cuMemMap"),
                   simgpu_calls("cuMemSetAccess"),
                   simgpu_calls("cuMemUnmap"),
                   simgpu_calls("cuMemRelease"),
                   simgpu_calls("cuMemHostRegister") + simgpu_calls("cuMemHostUnregister"),
                   blocking.calls};
}

static inline calls calls_since(calls then) {
    calls now = calls_now();
    return (calls){now.creates - then.creates,  now.maps - then.maps,         now.accesses - then.accesses,
                   now.unmaps - then.unmaps,    now.releases - then.releases, now.pins - then.pins,
                   now.blocking - then.blocking};
}

static inline void assert_no_calls(calls c) {
    if (c.creates + c.maps + c.accesses + c.unmaps + c.releases + c.pins + c.blocking)
        fail_msg("%lu creates, %lu maps, %lu set-accesses, %lu unmaps, %lu releases, %lu pins, "
                 "%lu blocking calls",
                 c.creates, c.maps, c.accesses, c.unmaps, c.releases, c.pins, c.blocking);
}

#endif
