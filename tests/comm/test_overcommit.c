/* Regions and tensors on the same pages: at tau 1 the regions fill the device, then tensors want all of it.
 *
 * No allocation may fail before tensors alone exceed the budget, and no byte of any region may be lost: what
 * was evicted comes back from the host. One rank alone, and nodes of two, whose ranks evict at the same time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc/heap.h"
#include "comm/internal.h"
#include "sim/gpu/simgpu.h"
#include "tests/comm/member.h"

enum {
    PAGE_BYTES = 2 << 20,
    N_GROUPS = 5,
    REGION_PAGES = 3,
    MAX_TENSORS = 64,
    N_ROUNDS = 3,
    N_ROUNDS_COARSER = 1
};

static const uint8_t all_extents[CLUSTER_MAX_EXTENTS] = {1, 1, 1, 1, 1, 1, 1, 1};

typedef struct rank {
    member *m;
    fcdp_heap *heap;
    fcdp_stream stream; /* the tensors' */
    pthread_barrier_t *barrier;
    int round;
    fcdp_dptr tensors[MAX_TENSORS];
} rank;

/* Agree, gather or restore, compare every byte, keep. */
static void group_use(rank *r, uint32_t g, unshard_kind kind) {
    MUST(!member_unshard(r->m, g, kind));
    MUST(!member_use(r->m, g));
    MUST(!member_reshard(r->m, g, false));
}

static void device_wait(rank *r) {
    MUST(!fcdp__driver_stream_sync(r->m->engine->drv, r->m->stream));
    MUST(!fcdp_engine_drain(r->m->engine));
    if (!r->m->wrong[0]) return;
    fprintf(stderr, "%s\n", r->m->wrong);
    abort();
}

static size_t regions_mapped(const rank *r) {
    size_t n = 0;
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        fcdp_region_state state;
        fcdp__region_state(r->m->groups[g]->region, &state);
        n += state.mapped;
    }
    return n;
}

/* Page by page until nothing is left; every page written. */
static size_t tensors_fill(rank *r) {
    size_t n = 0;
    for (;; n++) {
        fcdp_status status = fcdp_heap_malloc(r->heap, PAGE_BYTES, r->stream, &r->tensors[n]);
        if (status == FCDP_ERR_NO_DEVICE_MEM) return n;
        MUST(!status);
        memset((void *)(uintptr_t)r->tensors[n].addr, (int)n, PAGE_BYTES);
    }
}

static void tensors_check_and_free(rank *r, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const uint8_t *bytes = (const uint8_t *)(uintptr_t)r->tensors[i].addr;
        MUST(bytes[0] == i);
        MUST(bytes[PAGE_BYTES - 1] == i);
        MUST(!fcdp_heap_free(r->heap, r->tensors[i]));
    }
}

static uint64_t inter_bytes(const rank *r) {
    fcdp_engine_stats stats;
    fcdp_engine_stats_get(r->m->engine, &stats);
    return stats.gather.inter_bytes_sent;
}

/* The first round gathers; the others find what the evictions of the one before have left in host memory. */
static void *rank_main(void *arg) {
    rank *r = arg;
    size_t n_budget = r->m->cluster->config.device_budget_bytes / PAGE_BYTES;
    uint64_t crossed = inter_bytes(r);
    member_begin_forward(r->m);
    for (uint32_t g = 0; g < N_GROUPS; g++) group_use(r, g, UNSHARD_FORWARD);
    device_wait(r);
    MUST((inter_bytes(r) > crossed) == (r->round == 0));
    crossed = inter_bytes(r);
    MUST(regions_mapped(r) == N_GROUPS);
    pthread_barrier_wait(r->barrier);
    size_t n = tensors_fill(r);
    MUST(n == n_budget);
    MUST(regions_mapped(r) == 0);
    pthread_barrier_wait(r->barrier);
    tensors_check_and_free(r, n);
    member_begin_backward(r->m);
    for (uint32_t g = N_GROUPS; g-- > 0;) group_use(r, g, UNSHARD_BACKWARD);
    device_wait(r);
    MUST(inter_bytes(r) == crossed);
    return NULL;
}

static cluster_config config_of(uint32_t n_nodes, uint32_t node_size, fcdp_restore_mode restore,
                                fcdp_mapping_mode mapping) {
    size_t shard_bytes = (REGION_PAGES * PAGE_BYTES - 65536) / (n_nodes * node_size);
    cluster_config config = {.n_nodes = n_nodes,
                             .node_size = node_size,
                             .n_groups = N_GROUPS,
                             .restore = restore,
                             .mapping = mapping};
    for (uint32_t g = 0; g < N_GROUPS; g++) config.groups[g] = (group_spec){1, {{shard_bytes, 1}}};
    for (uint32_t i = 0; i < CLUSTER_MAX_RANKS; i++) config.tau[i] = 1;
    config.device_budget_bytes = (N_GROUPS * REGION_PAGES + 1) * (size_t)PAGE_BYTES;
    return config;
}

static void rank_open(rank *r, member *m, pthread_barrier_t *barrier) {
    *r = (rank){.m = m, .barrier = barrier};
    assert_ok(fcdp_heap_create(m->engine->drv, m->engine->pool, &r->heap));
    assert_ok(fcdp__driver_stream_create(m->engine->drv, &r->stream));
    for (uint32_t g = 0; g < N_GROUPS; g++) assert_ok(member_step(m, g, all_extents, true));
    assert_ok(fcdp__driver_stream_sync(m->engine->drv, m->stream));
}

static void overcommit_with(const cluster_config *config) {
    simgpu_reset();
    simgpu_set_races(1);
    cluster *c = cluster_create(config);
    rank ranks[CLUSTER_MAX_RANKS];
    pthread_t threads[CLUSTER_MAX_RANKS];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, c->n_ranks);
    for (uint32_t i = 0; i < c->n_ranks; i++) rank_open(&ranks[i], &c->members[i], &barrier);
    const int n_rounds = getenv("TEST_COARSER") ? N_ROUNDS_COARSER : N_ROUNDS;
    for (int round = 0; round < n_rounds; round++) {
        for (uint32_t i = 0; i < c->n_ranks; i++) {
            ranks[i].round = round;
            pthread_create(&threads[i], NULL, rank_main, &ranks[i]);
        }
        for (uint32_t i = 0; i < c->n_ranks; i++) pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&barrier);
    for (uint32_t i = 0; i < c->n_ranks; i++) {
        fcdp_heap_destroy(ranks[i].heap);
        fcdp__driver_stream_destroy(c->members[i].engine->drv, ranks[i].stream);
    }
    cluster_check_launches(c, true);
    cluster_destroy(c);
    assert_nothing_lives();
}

/* In both mappings; with TEST_COARSER in one of them, by chance, as most of the time is new pages. */
static void overcommit(uint32_t n_nodes, uint32_t node_size, fcdp_restore_mode restore) {
    static const fcdp_mapping_mode mappings[] = {FCDP_MAPPING_SLOTS, FCDP_MAPPING_EXACT};
    const uint64_t stride = getenv("TEST_COARSER") ? 2 : 1;
    for (uint64_t i = fcdp__now_ns() / 1000 % stride; i < 2; i += stride) {
        cluster_config config = config_of(n_nodes, node_size, restore, mappings[i]);
        overcommit_with(&config);
    }
}

static void one_rank_on_a_node(void **state) {
    (void)state;
    overcommit(2, 1, FCDP_RESTORE_SLICE);
}

static void four_ranks_restore_by_slice(void **state) {
    (void)state;
    overcommit(2, 2, FCDP_RESTORE_SLICE);
}

static void four_ranks_restore_whole(void **state) {
    (void)state;
    overcommit(2, 2, FCDP_RESTORE_WHOLE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_on_a_node),
        cmocka_unit_test(four_ranks_restore_by_slice),
        cmocka_unit_test(four_ranks_restore_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
