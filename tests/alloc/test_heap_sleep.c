/* Tensors leave the device and come back: the same bytes at the same addresses, whatever was freed meanwhile;
 * only what has changed is copied again; whatever call of the driver fails, no byte is lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "alloc/heap_internal.h"
#include "tests/alloc/heap_world.h"
#include "tests/log_text.h"

enum { MAX_BLOCKS = 200 };
static const fcdp_sleep_of everything = {.all = true};

typedef struct tensor {
    fcdp_dptr at;
    size_t bytes;
    uint64_t seed;
} tensor;

static void fill(const tensor *t) {
    uint64_t *words = (uint64_t *)(uintptr_t)t->at.addr;
    for (size_t i = 0; i < t->bytes / 8; i++) words[i] = t->seed + i * UINT64_C(0x100000001b3);
}

static void assert_holds(const tensor *t) {
    const uint64_t *words = (const uint64_t *)(uintptr_t)t->at.addr;
    for (size_t i = 0; i < t->bytes / 8; i++)
        if (words[i] != t->seed + i * UINT64_C(0x100000001b3))
            fail_msg("byte %zu of a tensor of %zu bytes is not what it was", 8 * i, t->bytes);
}

static tensor make(world *w, size_t bytes, int stream) {
    static uint64_t seed;
    tensor t = {take(w, bytes, stream), bytes, ++seed << 32};
    fill(&t);
    return t;
}

/* A host's way to read a simulated device. */
static fcdp_status read_host(void *ctx, const uint64_t *arrays, const size_t *bytes, size_t n,
                             uint64_t *prints_out) {
    (void)ctx;
    for (size_t i = 0; i < n; i++) {
        const uint64_t *at = (const uint64_t *)(uintptr_t)arrays[i];
        uint64_t sum = bytes[i];
        for (size_t k = 0; k < bytes[i] / 8; k++) sum = (sum ^ at[k]) * UINT64_C(0x100000001b3);
        prints_out[i] = sum;
    }
    return FCDP_OK;
}

static fcdp_sleep_counts sleep_all(world *w) {
    fcdp_sleep_counts counts;
    struct simgpu_live live;
    assert_ok(fcdp_heap_sleep(w->heap, &everything, read_host, NULL, &counts));
    simgpu_live(&live);
    assert_int_equal(live.device_bytes, 0);
    assert_int_equal(stats_of(w).reserved_bytes, 0);
    return counts;
}

static fcdp_sleep_counts wake_all(world *w, bool keeps) {
    fcdp_sleep_counts counts;
    assert_ok(fcdp_heap_wake(w->heap, &everything, keeps, &counts));
    return counts;
}

/* Small and large blocks on several streams, in handles of one page and of many. */
static void test_bytes_and_addresses_come_back(void **state) {
    (void)state;
    uint64_t seed = seed_choose("sleep");
    world w = world_open(256);
    tensor tensors[MAX_BLOCKS];
    size_t n = 0, live = 0;
    for (int round = 0; round < 6; round++) {
        while (n < MAX_BLOCKS && random_below(&seed, 40)) {
            size_t bytes = random_below(&seed, 3) ? 8 + random_below(&seed, 300 * KIB)
                                                  : 8 + random_below(&seed, 6 * MIB);
            tensors[n++] = make(&w, bytes, (int)random_below(&seed, 4));
        }
        live = stats_of(&w).allocated_bytes;
        fcdp_sleep_counts down = sleep_all(&w);
        assert_int_equal(down.live_bytes, live);
        assert_true(down.copied_bytes <= live && down.page_bytes >= live);
        for (size_t k = random_below(&seed, n / 3 + 1); k-- > 0;) { /* freed in its sleep */
            size_t i = random_below(&seed, n);
            give(&w, tensors[i].at);
            tensors[i] = tensors[--n];
        }
        live = stats_of(&w).allocated_bytes;
        fcdp_sleep_counts up = wake_all(&w, round % 2);
        assert_int_equal(up.copied_bytes, live);
        for (size_t i = 0; i < n; i++) assert_holds(&tensors[i]);
        for (size_t k = random_below(&seed, n / 2 + 1); k-- > 0;) {
            size_t i = random_below(&seed, n);
            give(&w, tensors[i].at);
            tensors[i] = tensors[--n];
        }
    }
    for (size_t i = 0; i < n; i++) assert_holds(&tensors[i]);
    world_close(&w);
}

static void test_a_second_sleep_copies_what_has_changed(void **state) {
    (void)state;
    world w = world_open(64);
    tensor a = make(&w, 12 * MIB, 0), b = make(&w, 8 * MIB, 0), c = make(&w, 600, 0);
    fcdp_sleep_counts first = sleep_all(&w);
    assert_int_equal(first.copied_bytes, first.live_bytes);
    (void)wake_all(&w, true);
    assert_int_equal(sleep_all(&w).copied_bytes, 0);
    (void)wake_all(&w, true);
    ((uint8_t *)(uintptr_t)b.at.addr)[5 * MIB] ^= 1; /* one byte: a page of it */
    assert_int_equal(sleep_all(&w).copied_bytes, PAGE);
    (void)wake_all(&w, true);
    ((uint8_t *)(uintptr_t)b.at.addr)[5 * MIB] ^= 1;
    give(&w, c.at);
    tensor d = make(&w, 600, 0);
    (void)sleep_all(&w);
    (void)wake_all(&w, false);
    fcdp_driver_pins pins = fcdp__driver_pins_get(w.drv);
    assert_int_equal(pins.bytes, 0);
    assert_holds(&a);
    assert_holds(&b);
    assert_holds(&d);
    fcdp_sleep_counts again = sleep_all(&w);
    assert_int_equal(again.copied_bytes, again.live_bytes);
    (void)wake_all(&w, true);
    assert_holds(&a);
    world_close(&w);
}

static size_t pinned(const world *w) {
    return fcdp__driver_pins_get(w->drv).bytes;
}

/* What is asleep keeps its host memory; what is awake gives it back, whenever it woke. */
static void test_host_memory_goes_back(void **state) {
    (void)state;
    world w = world_open(128);
    const fcdp_sleep_of kv = {.tag = 7}, model = {.tag = 0};
    fcdp_sleep_counts counts;
    tensor a = make(&w, 80 * MIB, 0);
    (void)fcdp_heap_set_tag(7);
    tensor b = make(&w, 80 * MIB, 0);
    (void)fcdp_heap_set_tag(0);
    (void)sleep_all(&w);
    assert_true(pinned(&w) >= 160 * MIB);
    assert_ok(fcdp_heap_wake(w.heap, &model, false, &counts));
    assert_in_range(pinned(&w), 80 * MIB, 80 * MIB + 2 * 32 * MIB); /* in chunks of 32 MiB */
    assert_ok(fcdp_heap_wake(w.heap, &kv, true, &counts));
    assert_true(pinned(&w) >= 80 * MIB);
    assert_ok(fcdp_heap_wake(w.heap, &model, false, &counts)); /* it does not sleep, nor has it any */
    assert_true(pinned(&w) >= 80 * MIB);
    (void)wake_all(&w, false); /* none sleeps */
    assert_int_equal(pinned(&w), 0);
    assert_holds(&a);
    assert_holds(&b);
    (void)sleep_all(&w);
    (void)wake_all(&w, true);
    assert_holds(&a);
    assert_holds(&b);
    world_close(&w);
}

/* Without fingerprints all is copied. */
static void test_what_cannot_be_compared_is_copied(void **state) {
    (void)state;
    world w = world_open(64);
    tensor a = make(&w, 5 * MIB, 0);
    fcdp_sleep_counts counts;
    for (int i = 0; i < 2; i++) {
        assert_ok(fcdp_heap_sleep(w.heap, &everything, NULL, NULL, &counts));
        assert_int_equal(counts.copied_bytes, 5 * MIB);
        (void)wake_all(&w, true);
        assert_holds(&a);
    }
    world_close(&w);
}

static void test_asleep_nothing_is_allocated(void **state) {
    (void)state;
    world w = world_open(64);
    tensor a = make(&w, 3 * MIB, 0), b = make(&w, 100, 1);
    fcdp_dptr at;
    (void)sleep_all(&w);
    (void)sleep_all(&w); /* they are, already */
    assert_int_equal(fcdp_heap_malloc(w.heap, 3 * MIB, w.streams[0], &at), FCDP_ERR_INVALID);
    assert_text("fcdp.wake()");
    assert_int_equal(fcdp_heap_malloc(w.heap, 100, w.streams[1], &at), FCDP_ERR_INVALID);
    assert_int_equal(fcdp_heap_malloc(w.heap, 100, w.streams[2], &at), FCDP_ERR_INVALID); /* it is new */
    assert_text("fcdp.wake()");
    (void)fcdp_heap_set_tag(7); /* so is this */
    assert_int_equal(fcdp_heap_malloc(w.heap, 100, w.streams[2], &at), FCDP_ERR_INVALID);
    (void)fcdp_heap_set_tag(0);
    assert_int_equal(fcdp__heap_reclaim(w.heap, 1), 0);
    (void)wake_all(&w, true);
    (void)wake_all(&w, true);
    assert_holds(&a);
    assert_holds(&b);
    (void)take(&w, 3 * MIB, 0);
    (void)take(&w, 100, 2);
    (void)take(&w, 100, 3);
    world_close(&w);
}

static bool covers_stream(void *ctx, fcdp_stream stream) {
    return stream == ctx;
}

/* Before the first tensor there is no arena. */
static void test_an_empty_heap_sleeps(void **state) {
    (void)state;
    world w = world_open(64);
    fcdp_dptr at;
    (void)sleep_all(&w);
    assert_int_equal(fcdp_heap_malloc(w.heap, 100, w.streams[0], &at), FCDP_ERR_INVALID);
    (void)wake_all(&w, true);
    (void)take(&w, 100, 0);
    world_close(&w);
}

/* One that has failed may leave its private pool open. */
static void test_a_capture_refuses_sleep_until_it_ends(void **state) {
    (void)state;
    world w = world_open(64);
    void *stale;
    fcdp_sleep_counts counts;
    tensor a = make(&w, 3 * MIB, 1);
    assert_ok(fcdp_heap_private_begin(w.heap, (fcdp_private_id){3, 0}, covers_stream, w.streams[0], &stale));
    assert_int_equal(simgpu_capture(w.streams[0], 1), 0);
    tensor b = make(&w, 3 * MIB, 0), used = make(&w, 512, 1);
    assert_ok(fcdp_heap_record_stream(w.heap, used.at, w.streams[2]));
    give(&w, used.at);
    assert_int_equal(fcdp_heap_sleep(w.heap, &everything, read_host, NULL, &counts), FCDP_ERR_INVALID);
    assert_text("captured");
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0); /* it was not broken */
    (void)sleep_all(&w);
    (void)wake_all(&w, true);
    assert_holds(&a);
    assert_holds(&b);
    world_close(&w);
}

/* What a search for pages asks, while its place is the heap's holes alone. */
static size_t sleep_meanwhile(void *ctx, size_t n_pages) {
    world *w = ctx;
    fcdp_sleep_counts counts;
    (void)n_pages;
    assert_int_equal(fcdp_heap_sleep(w->heap, &everything, NULL, NULL, &counts), FCDP_ERR_INVALID);
    assert_text("another thread allocates");
    return 0;
}

static void test_a_search_for_pages_refuses_sleep(void **state) {
    (void)state;
    world w = world_open(8);
    tensor a = make(&w, 8 * PAGE, 0);
    fcdp_dptr at;
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, sleep_meanwhile, NULL, &w);
    assert_int_equal(fcdp_heap_malloc(w.heap, PAGE, w.streams[1], &at), FCDP_ERR_NO_DEVICE_MEM);
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    assert_holds(&a);
    (void)sleep_all(&w);
    (void)wake_all(&w, true);
    assert_holds(&a);
    world_close(&w);
}

/* Pinned pages that a child shared would be copied when this process writes them: the device would go on
 * with the old ones. */
static void test_a_forked_child_has_no_host_page(void **state) {
    (void)state;
    if (getenv("TEST_EMULATED")) skip(); /* qemu-user ignores MADV_DONTFORK */
    world w = world_open(64);
    (void)make(&w, 3 * MIB, 0);
    (void)sleep_all(&w);
    assert_true(w.heap->sleep.n_free > 0);
    char *page = w.heap->sleep.free_pages[0];
    int seen = 0;
    assert_int_equal(msync(page, PAGE, MS_ASYNC), 0);
    pid_t child = fork();
    if (child == 0) _exit(msync(page, PAGE, MS_ASYNC) ? 0 : 1);
    assert_int_equal(waitpid(child, &seen, 0), child);
    assert_true(WIFEXITED(seen) && WEXITSTATUS(seen) == 0);
    (void)wake_all(&w, true);
    world_close(&w);
}

/* On a link of a set rate, beside one plain copy from pinned memory, each way. */
static void test_it_copies_as_fast_as_the_link(void **state) {
    (void)state;
    enum { BYTES = 48 * MIB };
    world w = world_open(64);
    fcdp_sleep_counts counts;
    double best[2] = {0};
    char *host = aligned_alloc(4096, BYTES);
    size_t stay_bytes;
    tensor parts[] = {make(&w, 24 * MIB, 0), make(&w, 23 * MIB, 1), make(&w, 700 * KIB, 0),
                      make(&w, 300 * KIB, 2)};
    fcdp_dptr at = parts[0].at;
    assert_ok(fcdp__driver_host_pin(w.drv, host, BYTES, &stay_bytes));
    simgpu_set_pcie(0.25); /* so slow that this machine's own copies and unmaps hardly count */
    /* the machine may be busy */
    for (int round = 0; round < 12 && (best[0] < 0.7 || best[1] < 0.7); round++) {
        double plain[2], slept[2];
        uint64_t start_ns = fcdp__now_ns();
        for (int half = 0; half < 2; half++)
            assert_ok(fcdp__driver_copy_d2h(w.drv, host + half * 24 * MIB, at, 24 * MIB, w.streams[0]));
        assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[0]));
        plain[0] = (double)(fcdp__now_ns() - start_ns);
        start_ns = fcdp__now_ns();
        for (int half = 0; half < 2; half++)
            assert_ok(fcdp__driver_copy_h2d(w.drv, at, host, 24 * MIB, w.streams[0]));
        assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[0]));
        plain[1] = (double)(fcdp__now_ns() - start_ns);
        fill(&parts[0]);
        start_ns = fcdp__now_ns();
        assert_ok(fcdp_heap_sleep(w.heap, &everything, NULL, NULL, &counts));
        slept[0] = (double)(fcdp__now_ns() - start_ns);
        assert_true(counts.copied_bytes > 47 * MIB && counts.copied_bytes <= BYTES);
        start_ns = fcdp__now_ns();
        (void)wake_all(&w, true);
        slept[1] = (double)(fcdp__now_ns() - start_ns);
        for (int way = 0; way < 2; way++)
            if (round && plain[way] / slept[way] > best[way]) best[way] = plain[way] / slept[way];
    }
    print_message("of a plain copy's rate: sleep %.2f, wake %.2f\n", best[0], best[1]);
    if (!getenv("TEST_COARSER")) assert_true(best[0] >= 0.7 && best[1] >= 0.7); /* beside other tests */
    simgpu_set_pcie(0);
    assert_ok(fcdp__driver_host_unpin(w.drv, host, BYTES, &stay_bytes));
    free(host);
    world_close(&w);
}

/* Tags sleep by themselves, and what is awake goes on, in the memory that the others have left. */
static void test_a_tag_sleeps_alone(void **state) {
    (void)state;
    world w = world_open(16);
    const fcdp_sleep_of kv = {.tag = 7};
    fcdp_sleep_counts counts;
    tensor model = make(&w, 12 * MIB, 0);
    assert_int_equal(fcdp_heap_set_tag(7), 0);
    tensor cache = make(&w, 16 * MIB, 0);
    assert_int_equal(fcdp_heap_set_tag(0), 7);
    assert_ok(fcdp_heap_sleep(w.heap, &kv, read_host, NULL, &counts));
    assert_int_equal(counts.live_bytes, 16 * MIB);
    fcdp_dptr at;
    (void)fcdp_heap_set_tag(7);
    assert_int_equal(fcdp_heap_malloc(w.heap, 100, w.streams[1], &at), FCDP_ERR_INVALID); /* a new arena */
    (void)fcdp_heap_set_tag(0);
    give(&w, take(&w, 100, 1));
    tensor more = make(&w, 16 * MIB, 0);
    assert_int_equal(fcdp_heap_wake(w.heap, &kv, true, &counts), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("call fcdp.wake() again");
    give(&w, more.at);
    assert_ok(fcdp_heap_wake(w.heap, &kv, true, &counts));
    assert_holds(&model);
    assert_holds(&cache);
    give(&w, cache.at);
    (void)fcdp_heap_set_tag(7);
    give(&w, take(&w, 100, 1));
    (void)fcdp_heap_set_tag(0);
    assert_holds(&model);
    world_close(&w);
}

/* An event that the driver did not destroy is left. */
static void world_close_after_fault(world *w) {
    struct simgpu_live live;
    fcdp_heap_destroy(w->heap);
    for (int i = 0; i < 4; i++) fcdp__driver_stream_destroy(w->drv, w->streams[i]);
    fcdp__pool_destroy(w->pool);
    simgpu_live(&live);
    assert_true(live.events <= 1);
    assert_int_equal(
        live.handles + live.ranges + live.maps + live.streams + live.registrations + live.device_bytes, 0);
    fcdp__driver_close(w->drv);
}

/* Sleep and wake, with the n-th call failing; again if that was refused. */
static void test_whatever_call_fails_no_byte_is_lost(void **state) {
    (void)state;
    unsigned long n_calls = 0;
    for (unsigned long n = 0; n <= n_calls; n += n && getenv("TEST_COARSER") ? 7 : 1) {
        world w = world_open(64);
        tensor tensors[] = {make(&w, 7 * MIB, 0), make(&w, 300, 0), make(&w, 2 * MIB, 1),
                            make(&w, 90 * KIB, 2)};
        unsigned long before = simgpu_calls(NULL);
        fcdp_sleep_counts counts;
        if (n) simgpu_fail_nth(NULL, n, CUDA_UNKNOWN);
        fcdp_status status = fcdp_heap_sleep(w.heap, &everything, read_host, NULL, &counts);
        if (status) {
            assert_true(n && fcdp_error_text()[0]);
            for (size_t i = 0; i < 4; i++) assert_holds(&tensors[i]);
            simgpu_fail_nth(NULL, 0, 0);
            assert_ok(fcdp_heap_sleep(w.heap, &everything, read_host, NULL, &counts));
        }
        status = fcdp_heap_wake(w.heap, &everything, true, &counts);
        if (status) {
            assert_true(n && fcdp_error_text()[0]);
            simgpu_fail_nth(NULL, 0, 0);
            assert_ok(fcdp_heap_wake(w.heap, &everything, true, &counts));
        }
        simgpu_fail_nth(NULL, 0, 0);
        if (!n) n_calls = simgpu_calls(NULL) - before;
        for (size_t i = 0; i < 4; i++) assert_holds(&tensors[i]);
        for (size_t i = 0; i < 4; i++) give(&w, tensors[i].at);
        world_close_after_fault(&w);
    }
    assert_true(n_calls > 20);
}

/* The driver's, by the linker. */
static bool gives_no_access, unmaps_nothing;
fcdp_status __real_fcdp__driver_set_access(fcdp_driver *drv, fcdp_dptr at, size_t bytes);
fcdp_status __real_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes);
fcdp_status __wrap_fcdp__driver_set_access(fcdp_driver *drv, fcdp_dptr at, size_t bytes);
fcdp_status __wrap_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes);

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_set_access(fcdp_driver *drv,
                                                                                  fcdp_dptr at,
                                                                                  size_t bytes) {
    return gives_no_access ? fcdp__fail(FCDP_ERR_DRIVER, "no access")
                           : __real_fcdp__driver_set_access(drv, at, bytes);
}

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at,
                                                                             size_t bytes) {
    return unmaps_nothing ? fcdp__fail(FCDP_ERR_DRIVER, "no unmap")
                          : __real_fcdp__driver_unmap(drv, at, bytes);
}

/* What is mapped without access stays so, and wakes later. */
static void test_what_stays_mapped_wakes_later(void **state) {
    (void)state;
    for (int ends = 0; ends < 2; ends++) {
        world w = world_open(64);
        tensor tensors[] = {make(&w, 7 * MIB, 0), make(&w, 300, 0), make(&w, 2 * MIB, 1)};
        fcdp_sleep_counts counts;
        (void)sleep_all(&w);
        gives_no_access = unmaps_nothing = true;
        for (int i = 0; i < 2; i++)
            assert_int_equal(fcdp_heap_wake(w.heap, &everything, true, &counts), FCDP_ERR_DRIVER);
        unmaps_nothing = false;
        if (ends) assert_int_equal(fcdp_heap_wake(w.heap, &everything, true, &counts), FCDP_ERR_DRIVER);
        gives_no_access = false;
        (void)wake_all(&w, true);
        for (size_t i = 0; i < 3; i++) assert_holds(&tensors[i]);
        for (size_t i = 0; i < 3; i++) give(&w, tensors[i].at);
        world_close(&w);
    }
}

/* ---- what it says ---- */

/* The driver's and the kernel's, by the linker. */
static enum { PINS, PINS_NOTHING, PINS_IN_PART } pinning;
static bool unpins_nothing, maps_nothing;
static char *stays; /* what was not unpinned, or is pinned in part */
static size_t stays_bytes;
fcdp_status __real_fcdp__driver_host_pin(fcdp_driver *drv, void *at, size_t bytes, size_t *stay_bytes_out);
fcdp_status __real_fcdp__driver_host_unpin(fcdp_driver *drv, void *at, size_t bytes, size_t *stay_bytes_out);
void *__real_mmap(void *at, size_t bytes, int access, int flags, int fd, off_t offset);
fcdp_status __wrap_fcdp__driver_host_pin(fcdp_driver *drv, void *at, size_t bytes, size_t *stay_bytes_out);
fcdp_status __wrap_fcdp__driver_host_unpin(fcdp_driver *drv, void *at, size_t bytes, size_t *stay_bytes_out);
void *__wrap_mmap(void *at, size_t bytes, int access, int flags, int fd, off_t offset);

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_host_pin(fcdp_driver *drv, void *at,
                                                                                size_t bytes,
                                                                                size_t *stay_bytes_out) {
    if (pinning == PINS) return __real_fcdp__driver_host_pin(drv, at, bytes, stay_bytes_out);
    *stay_bytes_out = pinning == PINS_IN_PART ? PAGE : 0;
    if (pinning == PINS_IN_PART) stays = at, stays_bytes = bytes;
    return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no pin");
}

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_host_unpin(fcdp_driver *drv, void *at,
                                                                                  size_t bytes,
                                                                                  size_t *stay_bytes_out) {
    if (!unpins_nothing) return __real_fcdp__driver_host_unpin(drv, at, bytes, stay_bytes_out);
    stays = at;
    *stay_bytes_out = stays_bytes = bytes;
    return fcdp__fail(FCDP_ERR_DRIVER, "no unpin");
}

__attribute__((visibility("default"))) void *__wrap_mmap(void *at, size_t bytes, int access, int flags,
                                                         int fd, off_t offset) {
    if (!maps_nothing) return __real_mmap(at, bytes, access, flags, fd, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

static void test_host_memory_that_is_not_pinned_is_said(void **state) {
    (void)state;
    world w = world_open(64);
    tensor a = make(&w, 3 * MIB, 0);
    log_keep(FCDP_LOG_WARN);
    pinning = PINS_NOTHING;
    for (int i = 0; i < 2; i++) {
        (void)sleep_all(&w);
        (void)wake_all(&w, false);
    }
    pinning = PINS;
    const char *said = log_kept();
    assert_says(
        said, "warning: sleep: host memory is not pinned, so copies are slower; this is said once: no pin\n");
    assert_int_equal(log_count(said, "warning: "), 1);
    assert_holds(&a);
    world_close(&w);
}

static void test_without_host_memory_sleep_is_refused(void **state) {
    (void)state;
    world w = world_open(64);
    tensor a = make(&w, 3 * MIB, 0);
    fcdp_sleep_counts counts;
    maps_nothing = true;
    fcdp_status status = fcdp_heap_sleep(w.heap, &everything, read_host, NULL, &counts);
    maps_nothing = false;
    assert_int_equal(status, FCDP_ERR_NO_HOST_MEM);
    assert_text("no host memory (33.6 MB) for tensors that sleep: Cannot allocate memory");
    pinning = PINS_IN_PART;
    status = fcdp_heap_sleep(w.heap, &everything, read_host, NULL, &counts);
    pinning = PINS;
    assert_int_equal(status, FCDP_ERR_NO_HOST_MEM);
    assert_text("host memory for tensors that sleep is pinned in part: no pin");
    munmap(stays, stays_bytes);
    assert_holds(&a);
    (void)sleep_all(&w);
    (void)wake_all(&w, true);
    assert_holds(&a);
    world_close(&w);
}

static void test_host_memory_that_stays_pinned_is_said(void **state) {
    (void)state;
    world w = world_open(64);
    tensor a = make(&w, 3 * MIB, 0);
    (void)sleep_all(&w);
    log_keep(FCDP_LOG_WARN);
    unpins_nothing = true;
    (void)wake_all(&w, false);
    unpins_nothing = false;
    assert_says(log_kept(),
                "warning: sleep: 33.6 MB of host memory stay in use, and pinned, until the process ends: no "
                "unpin\n");
    size_t stay_bytes;
    assert_ok(fcdp__driver_host_unpin(w.drv, stays, stays_bytes, &stay_bytes));
    munmap(stays, stays_bytes);
    assert_holds(&a);
    world_close(&w);
}

static void test_device_memory_that_stays_is_said(void **state) {
    (void)state;
    world w = world_open(64);
    tensor a = make(&w, 3 * MIB, 0);
    fcdp_sleep_counts counts;
    log_keep(FCDP_LOG_WARN);
    unmaps_nothing = true;
    fcdp_status status = fcdp_heap_sleep(w.heap, &everything, read_host, NULL, &counts);
    unmaps_nothing = false;
    assert_says(log_kept(), "warning: sleep: 4.19 MB of device memory stay in use: no unmap\n");
    assert_ok(status);
    (void)wake_all(&w, true);
    assert_holds(&a);
    world_close(&w);
}

/* Some call of it fails once pages are away, and these do not come back. */
static void test_a_sleep_that_cannot_be_undone_is_said(void **state) {
    (void)state;
    bool is_said = false;
    for (unsigned long n = 1, n_calls = n; n <= n_calls && !is_said; n++) {
        world w = world_open(64);
        tensor tensors[] = {make(&w, 7 * MIB, 0), make(&w, 2 * MIB, 1), make(&w, 9 * MIB, 2)};
        unsigned long before = simgpu_calls(NULL);
        fcdp_sleep_counts counts;
        log_keep(FCDP_LOG_WARN);
        gives_no_access = true;
        simgpu_fail_nth(NULL, n, CUDA_UNKNOWN);
        fcdp_status status = fcdp_heap_sleep(w.heap, &everything, NULL, NULL, &counts);
        simgpu_fail_nth(NULL, 0, 0);
        gives_no_access = false;
        is_said = strstr(log_kept(),
                         "warning: sleep failed, and so did waking (no access): free memory and call "
                         "fcdp.wake() again\n");
        n_calls = status ? n + 1 : simgpu_calls(NULL) - before;
        if (is_said) assert_int_equal(status, FCDP_ERR_DRIVER);
        (void)wake_all(&w, true);
        for (size_t i = 0; i < 3; i++) assert_holds(&tensors[i]);
        for (size_t i = 0; i < 3; i++) give(&w, tensors[i].at);
        world_close_after_fault(&w);
    }
    assert_true(is_said);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_and_addresses_come_back),
        cmocka_unit_test(test_a_second_sleep_copies_what_has_changed),
        cmocka_unit_test(test_host_memory_goes_back),
        cmocka_unit_test(test_what_cannot_be_compared_is_copied),
        cmocka_unit_test(test_asleep_nothing_is_allocated),
        cmocka_unit_test(test_an_empty_heap_sleeps),
        cmocka_unit_test(test_a_capture_refuses_sleep_until_it_ends),
        cmocka_unit_test(test_a_search_for_pages_refuses_sleep),
        cmocka_unit_test(test_a_forked_child_has_no_host_page),
        cmocka_unit_test(test_it_copies_as_fast_as_the_link),
        cmocka_unit_test(test_a_tag_sleeps_alone),
        cmocka_unit_test(test_what_stays_mapped_wakes_later),
        cmocka_unit_test(test_host_memory_that_is_not_pinned_is_said),
        cmocka_unit_test(test_without_host_memory_sleep_is_refused),
        cmocka_unit_test(test_host_memory_that_stays_pinned_is_said),
        cmocka_unit_test(test_device_memory_that_stays_is_said),
        cmocka_unit_test(test_a_sleep_that_cannot_be_undone_is_said),
        cmocka_unit_test(test_whatever_call_fails_no_byte_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
