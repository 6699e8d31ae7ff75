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
#include "tests/comm/cluster.h"
#include "tools/simgpu/simgpu.h"

enum { PAGE_BYTES = 2 << 20, N_GROUPS = 5, REGION_PAGES = 3, MAX_TENSORS = 64, N_ROUNDS = 3 };

static const uint8_t none_stale[CLUSTER_MAX_EXTENTS],
    all_stale[CLUSTER_MAX_EXTENTS] = {1, 1, 1, 1, 1, 1, 1, 1};

/* For the ranks' threads, from which cmocka cannot return. */
#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s; last failure: %s\n", __FILE__, __LINE__, #condition,                 \
                    fcdp_error_text());                                                                      \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

typedef struct rank {
    member *m;
    fcdp_heap *heap;
    fcdp_stream stream; /* the tensors' */
    pthread_barrier_t *barrier;
    int round;
    fcdp_dptr tensors[MAX_TENSORS];
} rank;

static void group_use(rank *r, uint32_t g, const uint8_t *stale, fcdp_pass pass) {
    uint64_t inputs[CLUSTER_MAX_EXTENTS];
    fcdp_job *job;
    for (uint32_t i = 0; i < CLUSTER_MAX_EXTENTS; i++) inputs[i] = (uintptr_t)r->m->shards[g][i];
    MUST(!fcdp_group_unshard(r->m->groups[g], stale, inputs, pass, r->m->stream, &job));
    MUST(!fcdp_job_wait(job));
    MUST(member_wrong_extent(r->m, g) == -1);
    MUST(!fcdp_group_reshard(r->m->groups[g], r->m->stream));
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

static void *rank_main(void *arg) {
    rank *r = arg;
    size_t n_budget = r->m->cluster->config.device_budget_bytes / PAGE_BYTES;
    for (uint32_t g = 0; g < N_GROUPS; g++)
        group_use(r, g, r->round == 0 ? all_stale : none_stale, FCDP_PASS_FORWARD);
    MUST(!fcdp_engine_drain(r->m->engine));
    MUST(regions_mapped(r) == N_GROUPS);
    pthread_barrier_wait(r->barrier);
    size_t n = tensors_fill(r);
    MUST(n == n_budget);
    MUST(regions_mapped(r) == 0);
    pthread_barrier_wait(r->barrier);
    tensors_check_and_free(r, n);
    for (uint32_t g = N_GROUPS; g-- > 0;) group_use(r, g, none_stale, FCDP_PASS_BACKWARD);
    MUST(!fcdp_engine_drain(r->m->engine));
    return NULL;
}

static void overcommit(uint32_t n_nodes, uint32_t node_size, fcdp_restore_mode restore) {
    uint32_t n_ranks = n_nodes * node_size;
    size_t shard_bytes = (REGION_PAGES * PAGE_BYTES - 65536) / n_ranks;
    cluster_config config = {
        .n_nodes = n_nodes, .node_size = node_size, .n_groups = N_GROUPS, .restore = restore};
    for (uint32_t g = 0; g < N_GROUPS; g++) config.groups[g] = (group_spec){1, {{shard_bytes, 1}}};
    for (uint32_t i = 0; i < CLUSTER_MAX_RANKS; i++) config.tau[i] = 1;
    /* all regions, and what a gather needs beside them */
    config.device_budget_bytes = (N_GROUPS * REGION_PAGES + REGION_PAGES) * (size_t)PAGE_BYTES;
    cluster *c = cluster_create(&config);
    rank ranks[CLUSTER_MAX_RANKS];
    pthread_t threads[CLUSTER_MAX_RANKS];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, n_ranks);
    for (uint32_t i = 0; i < n_ranks; i++) {
        member *m = &c->members[i];
        ranks[i] = (rank){.m = m, .barrier = &barrier};
        assert_ok(fcdp_heap_create(m->engine->drv, m->engine->pool, &ranks[i].heap));
        assert_ok(fcdp__driver_stream_create(m->engine->drv, &ranks[i].stream));
        for (uint32_t g = 0; g < N_GROUPS; g++) assert_ok(member_update_shards(m, g, all_stale));
        assert_ok(fcdp__driver_stream_sync(m->engine->drv, m->stream));
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        for (uint32_t i = 0; i < n_ranks; i++) {
            ranks[i].round = round;
            pthread_create(&threads[i], NULL, rank_main, &ranks[i]);
        }
        for (uint32_t i = 0; i < n_ranks; i++) pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&barrier);
    for (uint32_t i = 0; i < n_ranks; i++) {
        fcdp_heap_destroy(ranks[i].heap);
        fcdp__driver_stream_destroy(c->members[i].engine->drv, ranks[i].stream);
    }
    cluster_destroy(c);
    assert_nothing_lives();
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
