/* Frozen parameters come from disk in a second run: nothing of them crosses the nodes, and every byte is
 * right; whatever has changed, or is damaged, is gathered. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/frozen.h"
#include "tests/comm/engine_world.h"
#include "tests/comm/random.h"
#include "tests/fail_thread.h"
#include "tests/log_text.h"

static char dir[64];

/* One group of both kinds, one that is frozen, and one that is not. */
static const cluster_config base = {
    .n_nodes = 2,
    .node_size = 2,
    .n_groups = 3,
    .groups = {{4, {{90000, 0}, {700, 0}, {70001, 1}, {513, 1}}},
               {2, {{66000, 0}, {0, 0}}},
               {1, {{4000, 1}}}},
    .mapping = FCDP_MAPPING_SLOTS,
    .prefetch = 1,
    .device_budget_bytes = 16 * (size_t)PAGE_BYTES,
    .cache_dir = dir,
};
enum { FROZEN_SHARDS = 90000 + 700 + 66000 };

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/fcdp-frozen-XXXXXX");
    assert_non_null(mkdtemp(dir));
    return 0;
}

static int teardown(void **state) {
    (void)state;
    DIR *listing = opendir(dir);
    for (const struct dirent *file; (file = readdir(listing));)
        (void)unlinkat(dirfd(listing), file->d_name, 0);
    closedir(listing);
    assert_int_equal(rmdir(dir), 0);
    return 0;
}

/* The files of the cache, in a fixed order: their number. */
static size_t files(char names[64][128]) {
    size_t n = 0;
    DIR *listing = opendir(dir);
    for (const struct dirent *file; (file = readdir(listing)) && n < 64;)
        if (file->d_name[0] != '.') snprintf(names[n++], 128, "%s/%.60s", dir, file->d_name);
    closedir(listing);
    qsort(names, n, 128, (int (*)(const void *, const void *))strcmp);
    return n;
}

typedef struct job {
    uint8_t changed[3][CLUSTER_MAX_EXTENTS]; /* by one more step, before the first forward */
    bool by_hand;
} job;

/* Two training steps: forward and backward over all groups, then the trainable ones change. */
static void job_body(member *m, void *arg) {
    const job *j = arg;
    const cluster_config *config = &m->cluster->config;
    for (uint32_t g = 0; g < config->n_groups; g++) {
        MUST(!member_step(m, g, all_extents, true));
        MUST(!member_step(m, g, j->changed[g], true));
    }
    for (int pass = 0; pass < 4; pass++) {
        if (pass % 2)
            member_begin_backward(m);
        else
            member_begin_forward(m);
        unshard_kind kind = j->by_hand ? UNSHARD_BY_HAND : pass % 2 ? UNSHARD_BACKWARD : UNSHARD_FORWARD;
        for (uint32_t k = 0; k < config->n_groups; k++) {
            uint32_t g = pass % 2 ? config->n_groups - 1 - k : k;
            MUST(!member_unshard(m, g, kind));
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

static outcome run(const cluster_config *config, const job *j) {
    static const job plain;
    cluster *c = start(config);
    outcome result = {0};
    cluster_run(c, job_body, (void *)(uintptr_t)(j ? j : &plain));
    cluster_check_launches(c, true);
    result.sent = sent(c);
    EVERY_MEMBER(c, m)
    for (uint32_t g = 0; g < config->n_groups; g++) { /* which waits for what is being written */
        fcdp_group_destroy(m->groups[g]);
        m->groups[g] = NULL;
    }
    EVERY_MEMBER(c, m) {
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(m->engine, &stats);
        result.read += stats.cache.read_bytes;
        result.written += stats.cache.written_bytes;
        result.n_failures += stats.cache.n_failures;
    }
    end(c);
    return result;
}

/* The nodes share the directory here: each slice is written once, or by several at the same time. */
static void assert_written(const outcome *of, uint64_t slices_bytes, const cluster_config *config) {
    assert_true(of->written >= slices_bytes / config->n_nodes && of->written <= slices_bytes);
    assert_int_equal(of->n_failures, 0);
}

static uint64_t frozen_bytes(const cluster_config *config) {
    return (uint64_t)FROZEN_SHARDS * config->n_nodes * config->node_size * (config->n_nodes - 1);
}

static void test_a_second_run_sends_nothing_of_them(void **state) {
    (void)state;
    const char *coarser = getenv("TEST_COARSER");
    const int stride = !coarser ? 1 : atoi(coarser) < 32 ? 9 : 21; /* of either, each option both ways */
    for (int way = 0; way < 64; way += stride) {
        cluster_config config = base;
        job j = {.by_hand = way & 16};
        config.host_computes = way & 1;
        config.restore = way & 2 ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
        config.host_copies = way & 8;
        config.coalesce_bytes = way & 4 ? 1 << 20 : 0;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way & 8 ? 1 : 0;
        config.fingerprints = way & 32;
        fcdp__frozen_batch_bytes = way & 1 ? 1 : 1 << 20; /* a group at a time, or all */
        outcome first = run(&config, &j), second = run(&config, &j);
        assert_int_equal(first.read, 0);
        assert_true(second.read > 0);
        assert_written(&first, second.read, &config);
        assert_int_equal(second.written, 0);
        if (first.sent - second.sent < frozen_bytes(&config))
            fail_msg("way %d: %lu and %lu bytes crossed; %lu are frozen", way, first.sent, second.sent,
                     frozen_bytes(&config));
        assert_int_equal(teardown(NULL) | setup(NULL), 0);
    }
}

/* With the names of a size and of the directory. One rank of each node says it. */
static void test_what_came_from_disk_is_said(void **state) {
    (void)state;
    char says[128];
    outcome first = run(&base, NULL);
    log_keep(FCDP_LOG_INFO);
    outcome second = run(&base, NULL);
    const char *said = log_kept();
    assert_written(&first, second.read, &base);
    snprintf(says, sizeof says, " of frozen parameters came from %s in ", dir);
    assert_int_equal(log_count(said, says), 2);
    assert_says(said, "info: 628 KB of frozen parameters came from ");
}

/* One rank's shard of one parameter has changed: the keys of its group's slices are others, on all ranks. */
static void test_a_changed_weight_is_gathered(void **state) {
    (void)state;
    job changed = {.changed = {{0, 1}}};
    outcome first = run(&base, NULL), second = run(&base, &changed);
    assert_true(second.sent < first.sent);
    outcome third = run(&base, &changed), fourth = run(&base, NULL);
    assert_true(second.read > 0 && second.read < fourth.read);
    assert_int_equal(third.read, fourth.read);
    assert_written(&first, fourth.read, &base);
    assert_written(&second, fourth.read - second.read, &base);
    assert_int_equal(third.sent, fourth.sent);
}

static void flip(const char *path, off_t at) {
    uint8_t byte;
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* In turn each file is damaged, in its first byte or in its last that is not padding; cut short; or has the
 * bytes of another slice. All of it is written anew, and right in the run after. With TEST_COARSER one file,
 * by chance. */
static void test_a_damaged_file_is_gathered(void **state) {
    (void)state;
    char names[64][128];
    cluster_config config = base;
    config.has_root = true;
    outcome first = run(&config, NULL), clean = run(&config, NULL);
    size_t n = files(names);
    assert_int_equal(n, 4); /* two groups, two slices; the nodes share the directory here */
    const size_t stride = getenv("TEST_COARSER") ? n : 1;
    for (size_t f = fcdp__now_ns() / 1000 % stride; f < n; f += stride)
        for (int way = 0; way < 4; way++) {
            if (way == 0) flip(names[f], FCDP_CACHE_HEADER_BYTES);
            if (way == 1) flip(names[f], FCDP_CACHE_HEADER_BYTES + 66000 - 1);
            if (way == 2) assert_int_equal(truncate(names[f], FCDP_CACHE_HEADER_BYTES + 10), 0);
            if (way == 3) {
                char other[4096 + 512];
                int from = open(names[(f + 1) % n], O_RDONLY), to = open(names[f], O_WRONLY);
                assert_int_equal(pread(from, other, 512, FCDP_CACHE_HEADER_BYTES), 512);
                assert_int_equal(pwrite(to, other, 512, FCDP_CACHE_HEADER_BYTES), 512);
                close(from);
                close(to);
            }
            char says[256];
            if (way == 2)
                snprintf(says, sizeof says, "warning: FCDP_CACHE_DIR: %s is damaged, and removed; ",
                         names[f]);
            else
                snprintf(
                    says, sizeof says,
                    "' in %s is damaged: its files are removed, and its frozen parameters are gathered\n",
                    dir);
            log_keep(FCDP_LOG_WARN);
            outcome damaged = run(&config, NULL);
            const char *said = log_kept();
            assert_says(said, says);
            if (way != 2)
                assert_int_equal(log_count(said, "warning: FCDP_CACHE_DIR: a file of 'the root' in ") +
                                     log_count(said, "warning: FCDP_CACHE_DIR: a file of 'blocks.1' in "),
                                 config.n_nodes);
            assert_true(damaged.sent > clean.sent && damaged.sent < first.sent);
            assert_true(damaged.written > 0 && damaged.n_failures > 0);
            outcome after = run(&config, NULL);
            assert_int_equal(after.sent, clean.sent);
            assert_int_equal(after.written + after.n_failures, 0);
        }
}

static void test_another_layout_is_gathered(void **state) {
    (void)state;
    cluster_config other = base;
    outcome first = run(&base, NULL), again = run(&base, NULL);
    assert_true(first.read == 0 && again.read > 0);
    other.n_nodes = 4; /* as many ranks, with the same shards */
    other.node_size = 1;
    outcome second = run(&other, NULL);
    assert_int_equal(second.read, 0);
    assert_true(second.written > 0);
}

/* What a rank without the directory cannot have, no rank takes; nor does it wait for it. */
static void test_a_rank_without_it_has_all_gather(void **state) {
    (void)state;
    cluster_config without = base;
    outcome first = run(&base, NULL);
    without.uncached_rank = 2; /* the first of its node, which says why */
    log_keep(FCDP_LOG_WARN);
    outcome second = run(&without, NULL);
    assert_says(log_kept(),
                "warning: FCDP_CACHE_DIR=/dev/null/none: the directory cannot be made: Not a directory; "
                "frozen parameters are gathered\n");
    assert_int_equal(second.sent, first.sent);
    assert_int_equal(second.read + second.written, 0);
}

/* Two of three groups' files fit. The rest is gathered again, and said once. */
static void test_what_does_not_fit_is_gathered(void **state) {
    (void)state;
    cluster_config bounded = base;
    outcome first = run(&base, NULL), second = run(&base, NULL);
    assert_int_equal(teardown(NULL) | setup(NULL), 0);
    bounded.cache_bytes = 200000 + FCDP_CACHE_HEADER_BYTES * 2;
    bounded.has_root = true;
    log_keep(FCDP_LOG_WARN);
    outcome some = run(&bounded, NULL), again = run(&bounded, NULL);
    const char *said = log_kept();
    assert_says(said, "warning: FCDP_CACHE_DIR: the frozen parameters of '");
    assert_says(said, "' cannot be written, so the next run gathers them: /tmp/fcdp-frozen-");
    assert_says(said, " (FCDP_CACHE_SIZE) (this is said once)\n");
    assert_in_range(log_count(said, "this is said once"), 1, 2 * bounded.n_nodes * bounded.node_size);
    assert_true(some.written > 0 && some.n_failures > 0);
    assert_true(again.read > 0 && again.read < second.read);
    assert_true(again.sent <= first.sent);
}

/* The n-th driver call fails, in a run that writes and in one that reads: an error, or right bytes. Every
 * TEST_STRIDE-th n. */
typedef struct fault_end {
    fcdp_status statuses[CLUSTER_MAX_RANKS];
} fault_end;

static void load_body(member *m, void *arg) {
    fault_end *end_of = arg;
    fcdp_status status = member_step(m, 0, all_extents, true);
    member_begin_forward(m);
    if (!status) status = member_unshard(m, 0, UNSHARD_FORWARD);
    if (!status) status = member_use(m, 0);
    if (!status) status = member_reshard(m, 0, false);
    if (status) council_leave(&m->cluster->council);
    end_of->statuses[m->topology.rank] = status;
}

static void test_a_failing_driver_leaves_no_wrong_byte(void **state) {
    (void)state;
    cluster_config config = base;
    const char *coarser = getenv("TEST_COARSER"), *given = getenv("TEST_STRIDE");
    const uint32_t stride = given ? (uint32_t)atoi(given) : !coarser ? 24 : atoi(coarser) < 32 ? 40 : 120;
    test_random random = {random_seed("frozen", fcdp__now_ns())};
    config.n_groups = 2;
    config.timeout_s = 0.5;
    for (int reads = 0; reads < 2; reads++) {
        long n_calls = 1;
        for (long n = 0; n <= n_calls; n += n ? stride : 1 + random_below(&random, stride)) {
            fault_end ends = {0};
            if (!reads) assert_int_equal(teardown(NULL) | setup(NULL), 0);
            cluster *c = start(&config);
            unsigned long before = simgpu_calls(NULL);
            if (n) simgpu_fail_nth(NULL, (unsigned long)n, CUDA_UNKNOWN);
            cluster_run(c, load_body, &ends);
            simgpu_fail_nth(NULL, 0, 0);
            if (!n) n_calls = (long)(simgpu_calls(NULL) - before);
            EVERY_MEMBER(c, m) {
                (void)!fcdp__driver_stream_sync(m->engine->drv, m->stream);
                if (m->wrong[0] && !ends.statuses[m->topology.rank] && !fcdp_engine_check(m->engine))
                    fail_msg("call %ld: %s", n, m->wrong);
            }
            cluster_destroy(c);
            assert_nothing_lives();
            for (uint32_t r = 0; r < CLUSTER_MAX_RANKS && !n; r++) assert_int_equal(ends.statuses[r], 0);
        }
    }
}

static void use_body(member *m, void *arg) {
    (void)arg;
    MUST(!member_step(m, 0, all_extents, true));
    member_begin_forward(m);
    MUST(!member_unshard(m, 0, UNSHARD_FORWARD));
    MUST(!member_use(m, 0));
}

/* What the use has stored is being written from here on. */
static void release_body(member *m, void *arg) {
    int mode = FCDP_CAPTURE_MODE_RELAXED;
    (void)arg;
    MUST(!fcdp__driver_capture_mode_exchange(m->engine->drv, &mode));
    MUST(!member_reshard(m, 0, false));
}

/* Once all that is being written has ended. */
static uint64_t written(cluster *c) {
    uint64_t bytes = 0;
    EVERY_MEMBER(c, m) {
        fcdp_engine_stats stats;
        fcdp_group_destroy(m->groups[0]);
        m->groups[0] = NULL;
        fcdp_engine_stats_get(m->engine, &stats);
        bytes += stats.cache.written_bytes;
    }
    return bytes;
}

/* Another stream is being captured while the writer waits for the stores. */
static void test_the_writer_breaks_no_capture(void **state) {
    (void)state;
    cluster_config config = base;
    config.n_groups = 1;
    cluster *c = start(&config);
    fcdp_driver *drv = c->members[0].engine->drv;
    fcdp_stream captured;
    int mode = FCDP_CAPTURE_MODE_RELAXED;
    cluster_run(c, use_body, NULL);
    assert_ok(fcdp__driver_stream_create(drv, &captured));
    assert_int_equal(simgpu_capture(captured, 1), 0);
    cluster_run(c, release_body, NULL);
    assert_ok(fcdp__driver_capture_mode_exchange(drv, &mode));
    uint64_t bytes = written(c);
    assert_ok(fcdp__driver_capture_mode_exchange(drv, &mode));
    assert_int_equal(simgpu_capture(captured, 0), 0);
    assert_true(bytes > 0);
    fcdp__driver_stream_destroy(drv, captured);
    end(c);
}

/* Opens the directory for the writers once one of them is waited for, and that is said. */
static void *say_await(void *lock) {
    while (!strstr(log_peek(), "waited for")) sched_yield();
    (void)flock(*(int *)lock, LOCK_UN);
    return NULL;
}

static void test_a_wait_for_the_writer_is_said(void **state) {
    (void)state;
    cluster_config config = base;
    char path[128];
    pthread_t thread;
    config.n_groups = 1;
    config.has_root = true;
    snprintf(path, sizeof path, "%s/.lock", dir);
    int lock = open(path, O_CREAT | O_RDWR, 0666);
    assert_int_equal(flock(lock, LOCK_EX), 0);
    cluster *c = start(&config);
    cluster_run(c, use_body, NULL);
    log_keep(FCDP_LOG_WARN);
    cluster_run(c, release_body, NULL);
    uint64_t before_ns = fcdp__frozen_quiet_ns;
    fcdp__frozen_quiet_ns = 1;
    int error = pthread_create(&thread, NULL, say_await, &lock);
    uint64_t bytes = written(c);
    if (!error) pthread_join(thread, NULL);
    fcdp__frozen_quiet_ns = before_ns;
    char says[256];
    snprintf(
        says, sizeof says,
        "warning: FCDP_CACHE_DIR: the frozen parameters of 'the root' are not written to %s yet, which is "
        "waited for; if this does not end, check the disk and the node's other ranks\n",
        dir);
    assert_says(log_kept(), says);
    assert_int_equal(error, 0);
    assert_true(bytes > 0);
    close(lock);
    end(c);
}

static void test_a_writer_that_cannot_start_is_said(void **state) {
    (void)state;
    cluster_config config = base;
    config.n_groups = 1;
    cluster *c = start(&config);
    cluster_run(c, use_body, NULL);
    log_keep(FCDP_LOG_WARN);
    starts_no_thread = true;
    cluster_run(c, release_body, NULL);
    starts_no_thread = false;
    const char *said = log_kept();
    assert_int_equal(written(c), 0);
    assert_int_equal(log_count(said,
                               "warning: FCDP_CACHE_DIR: no thread can be started to write frozen parameters "
                               "(Resource temporarily unavailable), so the next run gathers them\n"),
                     c->n_ranks);
    end(c);
}

/* The others wait for it, but not for ever: the failure is one of the comm. */
static void test_a_rank_without_inputs_fails_for_all(void **state) {
    (void)state;
    cluster_config config = base;
    fault_end ends = {0};
    config.n_groups = 1;
    cluster *c = start(&config);
    c->members[1].inputs_fail = true;
    cluster_run(c, load_body, &ends);
    EVERY_MEMBER(c, m) assert_true(ends.statuses[m->topology.rank] != FCDP_OK);
    assert_int_equal(ends.statuses[1], FCDP_ERR_INVALID);
    assert_int_equal(fcdp_comm_check(c->members[1].comm), FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "inputs: planted"));
    assert_int_equal(fcdp_comm_check(c->members[0].comm), FCDP_ERR_PEER);
    cluster_destroy(c);
    assert_nothing_lives();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_second_run_sends_nothing_of_them, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_came_from_disk_is_said, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_changed_weight_is_gathered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_damaged_file_is_gathered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_another_layout_is_gathered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_rank_without_it_has_all_gather, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_does_not_fit_is_gathered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_failing_driver_leaves_no_wrong_byte, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_rank_without_inputs_fails_for_all, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_writer_breaks_no_capture, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_wait_for_the_writer_is_said, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_writer_that_cannot_start_is_said, setup, teardown),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
