/* engine_world.h - a cluster whose ranks one thread drives, one after the other: where compute is the
 * device's no call waits for another rank. */
#ifndef FCDP_TEST_ENGINE_WORLD_H
#define FCDP_TEST_ENGINE_WORLD_H

#include <string.h>

#include "comm/internal.h"
#include "sim/gpu/simgpu.h"
#include "tests/comm/member.h"

enum { PAGE_BYTES = 2 << 20, CUDA_UNKNOWN = 999 };

static const uint8_t all_extents[CLUSTER_MAX_EXTENTS] = {1, 1, 1, 1, 1, 1, 1, 1};

static const cluster_config one_group = {
    .n_nodes = 2,
    .node_size = 3,
    .n_groups = 1,
    .groups = {{4, {{90000, 0}, {700, 0}, {70001, 1}, {513, 1}}}},
    .mapping = FCDP_MAPPING_SLOTS,
    .prefetch = 2,
    .device_budget_bytes = 16 * (size_t)PAGE_BYTES,
};

static inline cluster *start(const cluster_config *config) {
    simgpu_reset();
    simgpu_set_races(1);
    return cluster_create(config);
}

static inline void end(cluster *c) {
    cluster_check_launches(c, false);
    cluster_destroy(c);
    assert_nobody_spun();
    assert_nothing_lives();
}

/* ---- all ranks, one after the other ---- */

#define EVERY_MEMBER(c, m) for (member *m = (c)->members; m < (c)->members + (c)->n_ranks; m++)

static inline void step_all(cluster *c, uint32_t g, const uint8_t *which) {
    EVERY_MEMBER(c, m) assert_ok(member_step(m, g, which, true));
}

/* The maximum of the votes, of n_extents + FCDP_VOTE_MORE. */
static inline void agree_all(cluster *c, uint32_t g, uint8_t *agreed_out) {
    uint32_t n = c->config.groups[g].n_extents + FCDP_VOTE_MORE;
    uint8_t vote[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    memset(agreed_out, 0, n);
    EVERY_MEMBER(c, m) {
        assert_ok(member_vote(m, g, vote));
        for (uint32_t i = 0; i < n; i++)
            if (vote[i] > agreed_out[i]) agreed_out[i] = vote[i];
    }
    EVERY_MEMBER(c, m) fcdp_group_agree(m->groups[g], agreed_out);
}

static inline void begin_all(cluster *c, uint32_t g, fcdp_pass pass) {
    EVERY_MEMBER(c, m) assert_ok(member_begin(m, g, pass));
}

static inline void drain_all(cluster *c) {
    EVERY_MEMBER(c, m) {
        assert_ok(fcdp__driver_stream_sync(m->engine->drv, m->stream));
        assert_ok(fcdp_engine_drain(m->engine));
        if (m->wrong[0]) fail_msg("%s", m->wrong);
    }
}

static inline void use_all(cluster *c, uint32_t g) {
    EVERY_MEMBER(c, m) {
        fcdp_group *ahead[1];
        (void)fcdp_group_unsharded(m->groups[g], false, ahead, 1);
        assert_ok(member_use(m, g));
    }
    drain_all(c);
}

/* Agree, gather or restore, look at every byte. */
static inline void unshard_all(cluster *c, uint32_t g, fcdp_pass pass) {
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    agree_all(c, g, agreed);
    begin_all(c, g, pass);
    use_all(c, g);
}

static inline void reshard_all(cluster *c, uint32_t g) {
    EVERY_MEMBER(c, m) assert_ok(member_reshard(m, g, false));
    EVERY_MEMBER(c, m) assert_ok(fcdp_engine_drain(m->engine));
}

static inline uint64_t sent(const cluster *c) {
    return c->hub.inter_bytes_sent;
}

#endif
