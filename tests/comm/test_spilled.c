/* Groups that live in files: nothing of a fresh one crosses the nodes, and whatever a disk does to one
 * rank, all ranks go on, with every byte right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/comm/engine_world.h"
#include "tests/comm/random.h"
#include "tests/log_text.h"
#include "tiering/disk.h"

enum { N_GROUPS = 9, N_STEPS = 3 };

static cluster_config make_config(uint32_t n_nodes, uint32_t node_size) {
    cluster_config config = {.n_nodes = n_nodes,
                             .node_size = node_size,
                             .n_groups = N_GROUPS,
                             .mapping = FCDP_MAPPING_SLOTS,
                             .prefetch = 1,
                             .fingerprints = true,
                             .device_budget_bytes = 40 * (size_t)PAGE_BYTES,
                             .spill_dir = "/tmp"};
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        /* frozen, trainable, both */
        config.groups[g] = (group_spec){2, {{150000 + g, g % 3 != 1}, {66001, g % 3 == 0}}};
        config.spilled[g] = g != 4;
    }
    return config;
}

static void pass_begin(member *m, int pass) {
    if (pass % 2)
        member_begin_backward(m);
    else
        member_begin_forward(m);
}

/* Steps of training: forward, backward, and the optimizer's. */
static void job_body(member *m, void *arg) {
    (void)arg;
    for (uint32_t g = 0; g < N_GROUPS; g++) MUST(!member_step(m, g, all_extents, true));
    for (int pass = 0; pass < 2 * N_STEPS; pass++) {
        pass_begin(m, pass);
        for (uint32_t k = 0; k < N_GROUPS; k++) {
            uint32_t g = pass % 2 ? N_GROUPS - 1 - k : k;
            MUST(!member_unshard(m, g, pass % 2 ? UNSHARD_BACKWARD : UNSHARD_FORWARD));
            MUST(!member_use(m, g));
            MUST(!member_reshard(m, g, false));
        }
        if (pass % 2) member_step_trainable(m);
    }
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!m->wrong[0]);
}

typedef struct outcome {
    uint64_t sent, read, written, n_failures;
} outcome;

static outcome run(const cluster_config *config) {
    cluster *c = start(config);
    outcome result = {0};
    cluster_run(c, job_body, NULL);
    cluster_check_launches(c, true);
    EVERY_MEMBER(c, m) {
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(m->engine, &stats);
        result.sent += stats.gather.inter_bytes_sent;
        result.read += stats.spill.read_bytes;
        result.written += stats.spill.written_bytes;
        result.n_failures += stats.spill.n_failures;
    }
    end(c);
    return result;
}

static const uint32_t shapes[][2] = {{2, 2}, {3, 1}};

static void test_they_send_no_more_than_those_in_host_memory(void **state) {
    (void)state;
    for (int way = 0; way < 8; way += getenv("TEST_COARSER") ? 5 : 1) {
        cluster_config config = make_config(shapes[way & 1][0], shapes[way & 1][1]);
        config.prefetch = way & 2 ? 2 : 0;
        config.host_computes = way & 4;
        config.restore = way & 2 ? FCDP_RESTORE_SLICE : FCDP_RESTORE_WHOLE;
        config.mapping = way & 4 ? FCDP_MAPPING_EXACT : FCDP_MAPPING_SLOTS;
        cluster_config in_memory = config;
        memset(in_memory.spilled, 0, sizeof in_memory.spilled);
        outcome files = run(&config), memory = run(&in_memory);
        assert_int_equal(files.sent, memory.sent);
        assert_true(files.read > 0 && files.written > 0);
        assert_int_equal(files.n_failures, 0);
    }
}

/* The device has room for one group: with FCDP_PREFETCH=0, what is unsharded ahead is put off. */
static void backward_ahead_body(member *m, void *arg) {
    (void)arg;
    for (uint32_t g = 0; g < N_GROUPS; g++) MUST(!member_step(m, g, all_extents, true));
    for (int pass = 0; pass < 4; pass++) {
        pass_begin(m, pass);
        for (uint32_t k = 0; k < N_GROUPS; k++) {
            uint32_t g = pass % 2 ? N_GROUPS - 1 - k : k;
            if (k == 0 || pass == 0)
                MUST(!member_unshard(m, g, pass % 2 ? UNSHARD_BACKWARD : UNSHARD_FORWARD));
            uint32_t next = pass % 2 ? g - 1 : g + 1;
            if (k + 1 < N_GROUPS && pass)
                MUST(!member_unshard(m, next, pass % 2 ? UNSHARD_BACKWARD : UNSHARD_FORWARD));
            MUST(!member_use(m, g));
            MUST(!member_reshard(m, g, false));
        }
    }
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!m->wrong[0]);
}

static void test_a_restore_is_put_off(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        cluster_config config = make_config(shapes[way & 1][0], shapes[way & 1][1]);
        config.prefetch = 0;
        config.host_computes = way & 2;
        config.device_budget_bytes = PAGE_BYTES;
        cluster *c = start(&config);
        cluster_run(c, backward_ahead_body, NULL);
        cluster_check_launches(c, true);
        end(c);
    }
}

static _Atomic int fault_at;
static int fault_kind;

static int64_t fault(const fcdp_disk_block *block, int64_t result) {
    if (atomic_fetch_sub(&fault_at, 1) != 0) return result;
    switch (fault_kind) {
    case 0: return block->writes ? -ENOSPC : -EIO;
    case 1: return 0;
    default:
        if (!block->writes) block->at[3] ^= 8; /* else the buffer would be wrong, and not the disk */
        return result;
    }
}

/* One block of one rank's. */
static void test_every_fault_of_a_disk(void **state) {
    (void)state;
    int stride = getenv("TEST_COARSER") ? 197 : 29;
    test_random random = {random_seed("test_every_fault_of_a_disk", 3)};
    int kinds = getenv("TEST_COARSER") ? 1 : 3; /* one of them, at random: many runs come to all */
    int first = kinds == 1 ? (int)(fcdp__now_ns() / 1000 % 3) : 0;
    for (fault_kind = first; fault_kind < first + kinds; fault_kind++) {
        int n_lost = 0, n_runs = 0;
        cluster_config config = make_config(2, 2);
        outcome clean = run(&config);
        for (int at = (int)random_below(&random, (uint32_t)stride);; at += stride, n_runs++) {
            atomic_store(&fault_at, at);
            fcdp__disk_fault = fault;
            config.host_computes = at & 1;
            config.fingerprints = !(at & 1);
            outcome hit = run(&config);
            fcdp__disk_fault = NULL;
            if (atomic_load(&fault_at) >= 0) break; /* there are fewer blocks */
            assert_true(hit.sent >= clean.sent);
            n_lost += hit.sent > clean.sent;
        }
        print_message("fault %d: %d runs, in %d of them a group was gathered again\n", fault_kind, n_runs,
                      n_lost);
        assert_true(kinds == 1 || (n_lost > 0 && n_runs > 2)); /* of few, none may lose anything */
    }
}

static void test_what_has_no_file_says_so(void **state) {
    (void)state;
    cluster_config config = make_config(2, 1);
    memset(config.spilled, 0, sizeof config.spilled);
    config.spill_dir = "/dev/null/no";
    log_keep(FCDP_LOG_WARN);
    cluster *c = start(&config);
    assert_says(log_kept(), "warning: FCDP_SPILL_DIR=/dev/null/no: Not a directory\n");
    fcdp_group *group;
    fcdp_extent_spec spec = {4000, FCDP_SPAN_TRAINABLE};
    assert_ok(fcdp_group_create(c->members[0].comm, "another", &spec, 1, &group));
    assert_int_equal(fcdp_group_attach_file(group), FCDP_ERR_UNSUPPORTED);
    assert_non_null(strstr(fcdp_error_text(), "FCDP_SPILL_DIR"));
    fcdp_group_destroy(group);
    end(c);
}

static void test_what_is_in_a_file_is_not_mapped(void **state) {
    (void)state;
    cluster_config config = make_config(2, 1);
    cluster *c = start(&config);
    assert_int_equal(fcdp_group_map_host(c->members[0].groups[0]), FCDP_ERR_UNSUPPORTED);
    assert_says(fcdp_error_text(),
                "'blocks.0' has no copy in the node's host memory that could be mapped: it is in a "
                "file, or gathered at each use");
    end(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_they_send_no_more_than_those_in_host_memory),
        cmocka_unit_test(test_a_restore_is_put_off),
        cmocka_unit_test(test_every_fault_of_a_disk),
        cmocka_unit_test(test_what_has_no_file_says_so),
        cmocka_unit_test(test_what_is_in_a_file_is_not_mapped),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
