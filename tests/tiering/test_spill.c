/* Slices in a file: whatever order they are stored and fetched in, and whatever the disk does, a slice that
 * is fetched is as it was stored. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "alloc/vrange.h"
#include "sim/gpu/simgpu.h"
#include "tests/assert_ok.h"
#include "tests/comm/random.h"
#include "tests/log_text.h"
#include "tiering/disk.h"
#include "tiering/foresight.h"
#include "tiering/spill.h"
#include "tiering/trace_events.h"

enum { PAGE = 2 << 20, MAX_SLICES = 12 };

typedef struct world {
    char dir[64];
    fcdp_driver *drv;
    fcdp_stream d2h, h2d, compute;
    fcdp_event moved;
    fcdp_vrange *range;
    fcdp_phys block;
    fcdp_counts counts;
    fcdp_spill *spill;
    uint32_t n;
    size_t bytes[MAX_SLICES];
    fcdp_spilled *slices[MAX_SLICES];
    uint64_t stored[MAX_SLICES]; /* its version; 0: never */
    uint64_t versions;
} world;

static double world_timeout_s = 60;

static uint64_t word_of(uint64_t version, size_t at) {
    return version * 0x9e3779b97f4a7c15u ^ at;
}

static uint64_t *bytes_of(const world *w) {
    return (uint64_t *)(uintptr_t)fcdp__vrange_base(w->range).addr;
}

static void world_open(world *w, uint32_t n, uint32_t n_buffers) {
    simgpu_reset();
    *w = (world){.n = n, .versions = 1};
    snprintf(w->dir, sizeof w->dir, "/tmp/fcdp-spill-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    assert_ok(fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &w->drv));
    assert_ok(fcdp__driver_stream_create(w->drv, &w->d2h));
    assert_ok(fcdp__driver_stream_create(w->drv, &w->h2d));
    assert_ok(fcdp__driver_event_create(w->drv, &w->moved));
    assert_ok(fcdp__vrange_create(w->drv, 2 * PAGE, &w->range));
    assert_ok(fcdp__driver_phys_create(w->drv, 2 * PAGE, &w->block));
    assert_ok(fcdp__vrange_map(w->range, w->block, 2 * PAGE));
    fcdp_spill_config config = {.n_buffers = n_buffers, .timeout_s = world_timeout_s, .counts = &w->counts};
    assert_ok(fcdp__spill_open(w->drv, w->dir, &config, &w->spill));
    for (uint32_t i = 0; i < n; i++) {
        w->bytes[i] = i % 3 == 0 ? 3 * (1 << 20) / 2 + 512 * i : i % 3 == 1 ? 512 * (i + 1) : 1 << 20;
        assert_ok(fcdp__spill_reserve(w->spill, "a group", 0, w->bytes[i], &w->slices[i]));
    }
}

static void world_close(world *w) {
    for (uint32_t i = 0; i < w->n; i++) fcdp__spill_release(w->slices[i]);
    assert_int_equal(fcdp__spill_bytes(w->spill), 0);
    fcdp__spill_close(w->spill);
    fcdp__vrange_destroy(w->range);
    assert_ok(fcdp__driver_phys_release(w->drv, w->block));
    fcdp__driver_event_destroy(w->drv, w->moved);
    fcdp__driver_stream_destroy(w->drv, w->d2h);
    fcdp__driver_stream_destroy(w->drv, w->h2d);
    assert_int_equal(fcdp__driver_pins_get(w->drv).bytes, 0);
    fcdp__driver_close(w->drv);
    assert_int_equal(rmdir(w->dir), 0); /* nothing is left there */
}

/* The same place of the device serves all: each store and load is waited for before the next. */
static void store(world *w, uint32_t i) {
    uint64_t version = w->versions++;
    for (size_t k = 0; k < w->bytes[i] / 8; k++) bytes_of(w)[k] = word_of(version, k);
    assert_ok(fcdp__spill_store(w->slices[i], fcdp__vrange_base(w->range), w->d2h));
    assert_ok(fcdp__driver_stream_sync(w->drv, w->d2h));
    w->stored[i] = version;
}

/* False: it is lost. */
static bool load(world *w, uint32_t i) {
    if (!fcdp__spill_fetch(w->slices[i])) return false;
    memset(bytes_of(w), 0x3C, w->bytes[i]);
    assert_ok(fcdp__spill_load(w->slices[i], fcdp__vrange_base(w->range), w->h2d));
    assert_ok(fcdp__driver_stream_sync(w->drv, w->h2d));
    for (size_t k = 0; k < w->bytes[i] / 8; k++)
        if (bytes_of(w)[k] != word_of(w->stored[i], k))
            fail_msg("slice %u of %zu bytes, version %lu: word %zu is wrong", i, w->bytes[i],
                     (unsigned long)w->stored[i], k);
    return true;
}

static uint64_t count(const world *w, unsigned counter) {
    return atomic_load(&w->counts.n[counter]);
}

/* ---- the disk's faults ---- */

enum { NO_FAULT, FAULT_ERROR, FAULT_SHORT, FAULT_NOTHING, FAULT_FLIP, FAULT_AGAIN, N_FAULTS };
static _Atomic int fault_kind;
static _Atomic int fault_after; /* the how many-th block from now on; then none; < 0: each */
static _Atomic uint64_t n_faults;

static int64_t fault(const fcdp_disk_block *block, int64_t result) {
    int kind = atomic_load(&fault_kind), after = atomic_load(&fault_after);
    if (kind == NO_FAULT || result <= 0) return result;
    if (after > 0) {
        atomic_store(&fault_after, after - 1);
        return result;
    }
    if (after == 0) atomic_store(&fault_kind, NO_FAULT);
    atomic_fetch_add(&n_faults, 1);
    switch (kind) {
    case FAULT_ERROR: return block->writes ? -ENOSPC : -EIO;
    case FAULT_SHORT: return result > 512 ? result / 2 / 512 * 512 : result;
    case FAULT_NOTHING: return 0;
    case FAULT_AGAIN: return -EAGAIN;
    default:
        if (!block->writes) block->at[block->bytes / 2] ^= 4;
        return result;
    }
}

static void fault_set(int kind, int after) {
    atomic_store(&fault_after, after);
    atomic_store(&fault_kind, kind);
}

/* A block is asked for, and never comes within the test. */
static _Atomic bool held;

static int64_t fault_or_held(const fcdp_disk_block *block, int64_t result) {
    while (!block->writes && atomic_load(&held)) sched_yield();
    return fault(block, result);
}

/* The library's, too. A file system without direct I/O says so of O_DIRECT. */
static bool has_no_direct_io;

/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the library's names are reserved */
int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    if (has_no_direct_io && flags & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* ---- tests ---- */

/* The device fails for good while a slice is loaded. Nothing will tell any more that its buffer is free, so
 * the end of the slice does not wait for that. */
static void test_a_load_on_a_device_that_has_failed(void **state) {
    (void)state;
    world w;
    world_open(&w, 1, 2);
    store(&w, 0);
    assert_true(load(&w, 0) && fcdp__spill_fetch(w.slices[0]));
    simgpu_fail_nth("cuMemcpyHtoDAsync", 1, 700);
    assert_int_equal(fcdp__spill_load(w.slices[0], fcdp__vrange_base(w.range), w.h2d), FCDP_ERR_DRIVER);
    uint64_t start_ns = fcdp__now_ns();
    fcdp__spill_release(w.slices[0]);
    fcdp__spill_close(w.spill);
    assert_true(fcdp__now_ns() - start_ns < UINT64_C(30000000000)); /* of 2 * timeout_s */
    fcdp__vrange_destroy(w.range);
    (void)!fcdp__driver_phys_release(w.drv, w.block);
    fcdp__driver_event_destroy(w.drv, w.moved);
    fcdp__driver_stream_destroy(w.drv, w.d2h);
    fcdp__driver_stream_destroy(w.drv, w.h2d);
    fcdp__driver_close(w.drv);
    assert_int_equal(rmdir(w.dir), 0);
}

static void test_what_is_stored_is_loaded(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        world w;
        fcdp__disk_without_uring = way & 1;
        world_open(&w, 7, way & 2 ? 2 : 4);
        fcdp__disk_without_uring = false;
        for (uint32_t i = 0; i < w.n; i++) assert_false(fcdp__spill_fetch(w.slices[i]));
        for (int round = 0; round < 3; round++) {
            for (uint32_t i = 0; i < w.n; i++) store(&w, i);
            for (uint32_t i = w.n; i-- > 0;) assert_true(load(&w, i));
            for (uint32_t i = 0; i < w.n; i++) assert_true(load(&w, i));
        }
        assert_int_equal(count(&w, FCDP_COUNT_SPILL_FAILURES), 0);
        assert_true(count(&w, FCDP_COUNT_SPILL_READ_BYTES) > 0);
        world_close(&w);
    }
}

/* After a first round, each slice is read ahead of its fetch, and none twice for one. */
static void test_reads_run_ahead(void **state) {
    (void)state;
    world w;
    world_open(&w, 10, 5);
    size_t bytes = 0;
    for (uint32_t i = 0; i < w.n; i++) {
        store(&w, i);
        bytes += w.bytes[i];
    }
    for (int round = 0; round < 5; round++)
        for (uint32_t i = 0; i < w.n; i++) assert_true(load(&w, i));
    assert_true(count(&w, FCDP_COUNT_SPILL_READ_BYTES) <= 5 * bytes + 2 * (4 << 20));
    world_close(&w);
}

static void opened(void *held) {
    while (!atomic_load((atomic_bool *)held)) sched_yield();
}

/* Another model's restore, which waits for its peers, holds the only buffer: this one's store does not wait
 * for it, as such a peer may wait for this store. */
static void test_another_models_load_is_not_waited_for(void **state) {
    (void)state;
    static atomic_bool open;
    world w;
    fcdp_stream others;
    atomic_store(&open, false);
    world_open(&w, 2, 1);
    fcdp_dptr from = {fcdp__vrange_base(w.range).addr + PAGE}; /* the load writes the range's first page */
    assert_ok(fcdp__driver_stream_create(w.drv, &others));
    store(&w, 0);
    assert_true(fcdp__spill_fetch(w.slices[0]));
    assert_ok(fcdp__driver_host_function(w.drv, w.h2d, opened, &open));
    assert_ok(fcdp__spill_load(w.slices[0], fcdp__vrange_base(w.range), w.h2d));
    alarm(60); /* where it waits, the test ends */
    assert_ok(fcdp__spill_store(w.slices[1], from, others));
    alarm(0);
    atomic_store(&open, true);
    assert_ok(fcdp__driver_stream_sync(w.drv, w.h2d));
    assert_ok(fcdp__driver_stream_sync(w.drv, others));
    fcdp__driver_stream_destroy(w.drv, others);
    world_close(&w);
}

/* All are fetched before any is loaded: there are fewer buffers than that. */
static void test_all_may_be_fetched_at_once(void **state) {
    (void)state;
    world w;
    world_open(&w, 6, 2);
    for (uint32_t i = 0; i < w.n; i++) store(&w, i);
    for (uint32_t i = 0; i < w.n; i++) assert_true(fcdp__spill_fetch(w.slices[i]));
    for (uint32_t i = 0; i < w.n; i++) assert_true(load(&w, i));
    fcdp_dptr at = fcdp__vrange_base(w.range);
    assert_int_equal(fcdp__spill_load(w.slices[0], at, w.h2d), FCDP_ERR_INVALID);
    world_close(&w);
}

/* A larger slice comes while a buffer is claimed, and another was loaded from long ago. */
static void test_a_larger_slice_comes_later(void **state) {
    (void)state;
    world w;
    world_open(&w, 3, 3);
    for (uint32_t i = 0; i < w.n; i++) store(&w, i);
    assert_true(load(&w, 1));
    assert_true(fcdp__spill_fetch(w.slices[0]));
    w.bytes[w.n] = 2 << 20;
    assert_ok(fcdp__spill_reserve(w.spill, "a larger one", 0, w.bytes[w.n], &w.slices[w.n]));
    w.n++;
    for (int round = 0; round < 3; round++) {
        store(&w, 3);
        for (uint32_t i = 0; i < w.n; i++) assert_true(load(&w, i));
    }
    world_close(&w);
}

/* One that no machine holds is refused, and those after it are not. */
static void test_a_slice_that_is_too_large(void **state) {
    (void)state;
    world w;
    fcdp_spilled *slice;
    world_open(&w, 0, 3);
    assert_int_equal(fcdp__spill_reserve(w.spill, "huge", 0, (size_t)1 << 46, &slice), FCDP_ERR_NO_HOST_MEM);
    assert_non_null(strstr(fcdp_error_text(), "in FCDP_SPILL_DIR for 'huge': "));
    assert_int_equal(fcdp__driver_pins_get(w.drv).bytes, 0);
    for (; w.n < 3; w.n++) {
        w.bytes[w.n] = 4096;
        assert_ok(fcdp__spill_reserve(w.spill, "small", 0, w.bytes[w.n], &w.slices[w.n]));
    }
    for (uint32_t i = 0; i < w.n; i++) store(&w, i);
    for (uint32_t i = 0; i < w.n; i++) assert_true(load(&w, i));
    for (uint32_t i = 0; i < w.n; i++) fcdp__spill_release(w.slices[i]);
    assert_int_equal(fcdp__driver_pins_get(w.drv).bytes, 0); /* with the last slice the buffers go */
    w.n = 0;
    world_close(&w);
}

/* Two programs on two threads, with slices of their own, in the same few buffers. */
typedef struct model {
    world w; /* its own streams, device memory and slices; the spill is the other's too */
    uint64_t seed;
    int rounds;
} model;

static void *model_main(void *arg) {
    model *m = arg;
    test_random random = {m->seed};
    for (int round = 0; round < m->rounds; round++) {
        for (uint32_t i = 0; i < m->w.n; i++) store(&m->w, i);
        for (uint32_t i = m->w.n; i-- > 0;) assert_true(load(&m->w, i));
        if (random_below(&random, 3) == 0) assert_true(load(&m->w, random_below(&random, m->w.n)));
    }
    return NULL;
}

static void test_two_models_at_once(void **state) {
    (void)state;
    enum { N = 2 };
    static model models[N];
    pthread_t threads[N];
    uint64_t seed = random_seed("test_two_models_at_once", 5);
    world_open(&models[0].w, 4, 3);
    world *first = &models[0].w, *second = &models[1].w;
    *second = (world){.n = 4, .versions = 1 << 20, .drv = first->drv, .spill = first->spill};
    assert_ok(fcdp__driver_stream_create(second->drv, &second->d2h));
    assert_ok(fcdp__driver_stream_create(second->drv, &second->h2d));
    assert_ok(fcdp__vrange_create(second->drv, 2 * PAGE, &second->range));
    assert_ok(fcdp__driver_phys_create(second->drv, 2 * PAGE, &second->block));
    assert_ok(fcdp__vrange_map(second->range, second->block, 2 * PAGE));
    for (uint32_t i = 0; i < second->n; i++) {
        second->bytes[i] = 4096 * (300 + i);
        assert_ok(fcdp__spill_reserve(second->spill, "of another", 0, second->bytes[i], &second->slices[i]));
    }
    for (int k = 0; k < N; k++) {
        models[k].seed = seed + (uint64_t)k;
        models[k].rounds = getenv("TEST_COARSER") ? 10 : 120;
        assert_int_equal(pthread_create(&threads[k], NULL, model_main, &models[k]), 0);
    }
    for (int k = 0; k < N; k++) pthread_join(threads[k], NULL);
    for (uint32_t i = 0; i < second->n; i++) fcdp__spill_release(second->slices[i]);
    fcdp__vrange_destroy(second->range);
    assert_ok(fcdp__driver_phys_release(second->drv, second->block));
    fcdp__driver_stream_destroy(second->drv, second->d2h);
    fcdp__driver_stream_destroy(second->drv, second->h2d);
    world_close(first);
}

/* Each fault at each block of a schedule: what is fetched is right, and what is not fetched was hit,
 * itself. */
static void test_every_fault_at_every_block(void **state) {
    (void)state;
    int stride = getenv("TEST_COARSER") ? 7 : 3;
    int first = FAULT_ERROR, last = N_FAULTS - 1;
    if (getenv("TEST_COARSER")) /* one of them, at random: many runs come to all */
        first = last = FAULT_ERROR + (int)(fcdp__now_ns() / 1000 % (N_FAULTS - 1));
    for (int kind = first; kind <= last; kind++)
        for (int after = 0, hit = 1; hit; after += stride) {
            world w;
            uint32_t n_lost = 0;
            fcdp__disk_without_uring = after & 1;
            world_open(&w, 4, 2);
            fcdp__disk_without_uring = false;
            atomic_store(&n_faults, 0);
            fault_set(kind, after);
            for (int round = 0; round < 2; round++) {
                for (uint32_t i = 0; i < w.n; i++) store(&w, i);
                for (uint32_t i = 0; i < w.n; i++)
                    if (!load(&w, i)) {
                        n_lost++;
                        store(&w, i); /* as a gather does */
                        assert_true(load(&w, i));
                    }
            }
            hit = atomic_load(&n_faults) > 0;
            atomic_store(&fault_kind, NO_FAULT);
            assert_true(n_lost <= (unsigned)hit);
            if (kind == FAULT_AGAIN) assert_int_equal(n_lost, 0);
            assert_true(n_lost <= count(&w, FCDP_COUNT_SPILL_FAILURES));
            world_close(&w);
        }
}

/* Another slice is stored into the one buffer, so that the first is read anew; its content is lost. */
static void lose(world *w, int kind) {
    store(w, 1);
    store(w, 0);
    fault_set(kind, -1);
    store(w, 1);
    assert_false(load(w, 0));
    fault_set(NO_FAULT, 0);
}

static void test_what_is_lost_is_said_once(void **state) {
    (void)state;
    const struct {
        int kind;
        const char *says;
    } cases[] = {
        {FAULT_ERROR, "FCDP_SPILL_DIR: a part of 'a group' cannot be written: No space left on device. "},
        {FAULT_FLIP, "FCDP_SPILL_DIR: a part of 'a group' cannot be read: it is not what was written. "}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w;
        log_keep(FCDP_LOG_WARN);
        world_open(&w, 2, 1);
        for (int times = 0; times < 3; times++) lose(&w, cases[i].kind);
        world_close(&w);
        const char *said = log_kept();
        assert_says(said, cases[i].says);
        assert_says(said, "What is lost there is gathered again; check the disk (this is said once)\n");
        assert_int_equal(log_count(said, "FCDP_SPILL_DIR"), 1);
    }
}

/* The disk gives nothing for longer than the patience. */
static void test_a_disk_that_does_not_answer(void **state) {
    (void)state;
    world w;
    world_timeout_s = 2;
    world_open(&w, 2, 1);
    world_timeout_s = 60;
    store(&w, 0);
    store(&w, 1);
    atomic_store(&held, true);
    log_keep(FCDP_LOG_WARN);
    bool came = fcdp__spill_fetch(w.slices[0]);
    const char *said = log_kept();
    atomic_store(&held, false);
    assert_false(came);
    assert_says(said, "warning: FCDP_SPILL_DIR: 'a group' cannot be read, and is gathered again: the disk of "
                      "FCDP_SPILL_DIR has not answered for 2 s: check it (this is said once)\n");
    store(&w, 0);
    assert_true(load(&w, 0) && load(&w, 1));
    world_close(&w);
}

static void test_buffers_need_pinned_memory(void **state) {
    (void)state;
    world w;
    fcdp_spilled *slice;
    world_open(&w, 0, 1);
    assert_int_equal(simgpu_fail_nth("cuMemHostRegister", 1, 2), 0);
    assert_int_equal(fcdp__spill_reserve(w.spill, "a group", 0, 4096, &slice), FCDP_ERR_NO_HOST_MEM);
    assert_says(fcdp_error_text(), "a buffer of FCDP_SPILL_DIR must be pinned: cuMemHostRegister");
    assert_says(fcdp_error_text(), "raise the limit (ulimit -l unlimited)");
    assert_null(strstr(fcdp_error_text(), "FCDP_PIN"));
    world_close(&w);
}

static void test_random_schedules(void **state) {
    (void)state;
    test_random random = {random_seed("test_random_schedules", 7)};
    int rounds = getenv("TEST_COARSER") ? 3 : 12;
    for (int round = 0; round < rounds; round++) {
        world w;
        uint32_t n_lost = 0;
        fcdp__disk_without_uring = random_below(&random, 3) == 0;
        world_open(&w, 2 + random_below(&random, MAX_SLICES - 2), 2 + random_below(&random, 4));
        fcdp__disk_without_uring = false;
        bool faulty = random_below(&random, 2);
        for (int k = 0; k < 120; k++) {
            uint32_t i = random_below(&random, w.n);
            if (faulty && random_below(&random, 4) == 0)
                fault_set(1 + (int)random_below(&random, N_FAULTS - 1), (int)random_below(&random, 6));
            switch (random_below(&random, 8)) {
            case 0:
            case 1:
            case 2: store(&w, i); break;
            case 3: /* it ends, and another takes its place */
                fcdp__spill_release(w.slices[i]);
                assert_ok(fcdp__spill_reserve(w.spill, "another", 0, w.bytes[i], &w.slices[i]));
                w.stored[i] = 0;
                assert_false(fcdp__spill_fetch(w.slices[i]));
                break;
            case 4: (void)fcdp__spill_fetch(w.slices[i]); break;
            default:
                if (!w.stored[i])
                    assert_false(load(&w, i));
                else if (!load(&w, i)) {
                    assert_true(faulty);
                    n_lost++;
                    w.stored[i] = 0;
                }
            }
        }
        atomic_store(&fault_kind, NO_FAULT);
        world_close(&w);
        print_message("round %d: %u slices, %s, %u lost\n", round, w.n, faulty ? "faults" : "no fault",
                      n_lost);
    }
}

static void test_directories_that_do_not_serve(void **state) {
    (void)state;
    fcdp_disk *disk;
    assert_int_equal(fcdp__disk_open("/dev/null/there", &disk), FCDP_ERR_OPTION);
    assert_non_null(strstr(fcdp_error_text(), "FCDP_SPILL_DIR=/dev/null/there: Not a directory"));
    assert_int_equal(fcdp__disk_open("/proc", &disk), FCDP_ERR_OPTION);
}

static void test_what_a_disk_lacks_is_said(void **state) {
    (void)state;
    char lacks[256];
    has_no_direct_io = fcdp__disk_without_uring = true;
    fcdp_status status = fcdp__disk_probe("/dev/shm", lacks, sizeof lacks);
    has_no_direct_io = fcdp__disk_without_uring = false;
    assert_ok(status);
    assert_says(
        lacks,
        "no direct I/O there, so the page cache holds a copy too (Invalid argument); it is memory, and "
        "not a disk; no io_uring, so one block is read or written at a time (");
}

/* A limit on the file's size, as a quota: the slice has no room, the ones before keep theirs. */
static void test_a_disk_without_room(void **state) {
    (void)state;
    world w;
    struct rlimit before, limit;
    signal(SIGXFSZ, SIG_IGN); /* as Python does */
    world_open(&w, 2, 2);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = (struct rlimit){4 << 20, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    fcdp_spilled *slice = NULL;
    assert_int_equal(fcdp__spill_reserve(w.spill, "large", 0, 8 << 20, &slice), FCDP_ERR_NO_HOST_MEM);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    store(&w, 0);
    assert_true(load(&w, 0));
    world_close(&w);
}

static void test_foresight(void **state) {
    (void)state;
    static fcdp_foresight f;
    char groups[4];
    const void *next[8];
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 4; i++) fcdp__foresight_note(&f, &groups[i], true);
        for (int i = 3; i >= 0; i--) fcdp__foresight_note(&f, &groups[i], false);
    }
    for (int i = 0; i < 4; i++) fcdp__foresight_note(&f, &groups[i], true); /* at the turn of a step */
    assert_int_equal(fcdp__foresight_reads(&f, next, 8), 4);
    for (int i = 0; i < 4; i++) assert_ptr_equal(next[i], &groups[3 - i]);
    for (int i = 3; i >= 1; i--) fcdp__foresight_note(&f, &groups[i], false);
    assert_int_equal(fcdp__foresight_reads(&f, next, 8), 1); /* the rest is stored anew before */
    assert_ptr_equal(next[0], &groups[0]);
    fcdp__foresight_forget(&f, &groups[0]);
    assert_int_equal(fcdp__foresight_reads(&f, next, 8), 0);
}

int main(void) {
    fcdp__disk_fault = fault_or_held; /* before any thread of a spill */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_foresight),
        cmocka_unit_test(test_directories_that_do_not_serve),
        cmocka_unit_test(test_what_a_disk_lacks_is_said),
        cmocka_unit_test(test_what_is_lost_is_said_once),
        cmocka_unit_test(test_a_disk_that_does_not_answer),
        cmocka_unit_test(test_buffers_need_pinned_memory),
        cmocka_unit_test(test_what_is_stored_is_loaded),
        cmocka_unit_test(test_reads_run_ahead),
        cmocka_unit_test(test_all_may_be_fetched_at_once),
        cmocka_unit_test(test_a_disk_without_room),
        cmocka_unit_test(test_a_larger_slice_comes_later),
        cmocka_unit_test(test_a_slice_that_is_too_large),
        cmocka_unit_test(test_two_models_at_once),
        cmocka_unit_test(test_another_models_load_is_not_waited_for),
        cmocka_unit_test(test_every_fault_at_every_block),
        cmocka_unit_test(test_random_schedules),
        cmocka_unit_test(test_a_load_on_a_device_that_has_failed),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
