/* The tensors' allocator: hits, streams, the order of pressure, misuse, and driver calls that fail. */
#include <setjmp.h>
#include <signal.h>

#include "tests/alloc/heap_world.h"
#include "tests/log_text.h"

/* ---- hits ---- */

static void a_hit_calls_no_driver(void **state) {
    (void)state;
    world w = world_open(64);
    size_t sizes[] = {1, 512, 5000, MIB, MIB + 1, 3 * PAGE, 9 * PAGE + 77};
    enum { N = sizeof sizes / sizeof sizes[0] };
    fcdp_dptr at[N], again[N];
    for (int i = 0; i < N; i++) at[i] = take(&w, sizes[i], 0);
    for (int i = 0; i < N; i++) memset((void *)(uintptr_t)at[i].addr, i, sizes[i]);
    for (int i = 0; i < N; i++) give(&w, at[i]);
    unsigned long calls = simgpu_calls(NULL);
    for (int round = 0; round < 3; round++) {
        for (int i = N; i-- > 0;) again[i] = take(&w, sizes[i], 0);
        for (int i = 0; i < N; i++) assert_int_equal(again[i].addr, at[i].addr);
        for (int i = 0; i < N; i++) give(&w, again[i]);
    }
    assert_int_equal(simgpu_calls(NULL), calls);
    assert_int_equal(stats_of(&w).n_hits, 3 * N);
    assert_int_equal(stats_of(&w).allocated_bytes, 0);
    world_close(&w);
}

/* Pages of the pool that are idle come first; what is mapped moves when there are none. */
static void idle_pages_come_before_pages_that_move(void **state) {
    (void)state;
    for (size_t n_budget = 4; n_budget <= 5; n_budget++) { /* too little for handles of several pages */
        world w = world_open(n_budget);
        fcdp_dptr a = take(&w, PAGE + PAGE / 2, 0), b = take(&w, PAGE + PAGE / 2, 0);
        assert_int_equal(stats_of(&w).reserved_bytes, 3 * PAGE);
        give(&w, a);
        fcdp_dptr c = take(&w, 2 * PAGE, 0);
        assert_int_equal(stats_of(&w).reserved_bytes, n_budget * PAGE);
        assert_int_equal(stats_of(&w).n_pages_moved, 5 - n_budget);
        give(&w, b);
        give(&w, c);
        assert_ok(fcdp_heap_trim(w.heap));
        assert_int_equal(stats_of(&w).reserved_bytes, 0);
        fcdp_pool_stats pool;
        fcdp__pool_stats(w.pool, &pool);
        assert_int_equal(pool.live_pages + pool.cached_pages, 0);
        world_close(&w);
    }
}

/* Every second block of many is freed; as many bytes in one piece then need no new page but what is idle. */
static void fragmentation_costs_no_page(void **state) {
    (void)state;
    world w = world_open(64);
    fcdp_dptr at[31];
    (void)take(&w, 32 * PAGE + 1, 1); /* memory is short from here on */
    for (int i = 0; i < 31; i++) at[i] = take(&w, PAGE, 0);
    for (int i = 0; i < 31; i += 2) give(&w, at[i]);
    fcdp_dptr large = take(&w, 16 * PAGE, 0);
    memset((void *)(uintptr_t)large.addr, 1, 16 * PAGE);
    fcdp_heap_stats stats = stats_of(&w);
    assert_int_equal(stats.reserved_bytes, 64 * PAGE);
    assert_int_equal(stats.peak_reserved_bytes, 64 * PAGE);
    assert_int_equal(stats.n_pages_moved, 15); /* the last of them is used where it is */
    world_close(&w);
}

/* While memory is not short: handles that grow with what is mapped, so a few calls for many pages. Once it
 * is, they are released as soon as nothing lies on them, and their memory serves as single pages. */
static void few_large_handles_while_memory_is_not_short(void **state) {
    (void)state;
    world w = world_open(256);
    fcdp_dptr at[100];
    fcdp_phys *pages = calloc(256, sizeof *pages);
    unsigned long n_creates = simgpu_calls("cuMemCreate");
    for (int i = 0; i < 100; i++) at[i] = take(&w, PAGE, 0);
    assert_in_range(simgpu_calls("cuMemCreate") - n_creates, 1, 16);
    assert_in_range(stats_of(&w).reserved_bytes, 100 * (size_t)PAGE, 150 * (size_t)PAGE);
    for (int i = 0; i < 100; i++) memset((void *)(uintptr_t)at[i].addr, i, PAGE);
    for (int i = 0; i < 100; i++) assert_int_equal(*(unsigned char *)(uintptr_t)(at[i].addr + PAGE - 1), i);
    for (int i = 0; i < 100; i++) give(&w, at[i]);
    assert_int_equal(fcdp__pool_pages_in_use(w.pool), 0);
    assert_ok(fcdp__pool_take(w.pool, HOLDER_OTHERS, 256, pages));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    fcdp__pool_give(w.pool, HOLDER_OTHERS, 256, pages);
    free(pages);
    world_close(&w);
}

/* One stream: the counts of a class are exact, and so is the heap's peak
 * to the bytes that small blocks move. */
static void peaks_and_sums_by_class(void **state) {
    (void)state;
    world w = world_open(64);
    fcdp_dptr small = take(&w, 1000, 0), large = take(&w, 3 * PAGE, 0), other = take(&w, 5 * PAGE + 1, 0);
    give(&w, large);
    fcdp_heap_stats stats = stats_of(&w);
    assert_int_equal(stats.large.n_live, 1);
    assert_int_equal(stats.large.allocated_bytes, 5 * PAGE + 512);
    assert_int_equal(stats.large.requested_bytes, 5 * PAGE + 1);
    assert_int_equal(stats.large.free_bytes, 4 * PAGE - 512);
    assert_int_equal(stats.large.peak_n_live, 2);
    assert_int_equal(stats.large.peak_allocated_bytes, 8 * PAGE + 512);
    assert_int_equal(stats.large.peak_reserved_bytes, 9 * PAGE);
    assert_int_equal(stats.large.malloc_bytes, 8 * PAGE + 512);
    assert_int_equal(stats.small.allocated_bytes, 1024);
    assert_int_equal(stats.small.requested_bytes, 1000);
    assert_int_equal(stats.reserved_bytes, 10 * PAGE);
    assert_in_range(stats.peak_allocated_bytes, 8 * PAGE + 512, 8 * PAGE + 512 + 1024);
    fcdp_heap_reset_peaks(w.heap);
    stats = stats_of(&w);
    assert_int_equal(stats.large.peak_n_live, 1);
    assert_int_equal(stats.large.peak_allocated_bytes, 5 * PAGE + 512);
    assert_int_equal(stats.peak_allocated_bytes, 5 * PAGE + 512 + 1024);
    assert_int_equal(stats.large.n_mallocs, 2); /* sums stay */
    give(&w, small);
    give(&w, other);
    fcdp_heap_reset_peaks(w.heap);
    small = take(&w, 4096, 0); /* far below a report */
    give(&w, small);
    assert_int_equal(stats_of(&w).peak_allocated_bytes, 4096);
    assert_int_equal(stats_of(&w).small.peak_allocated_bytes, 4096);
    world_close(&w);
}

/* ---- streams ---- */

static void a_stream_reuses_its_own_at_once_and_another_not(void **state) {
    (void)state;
    world w = world_open(4);
    gate g = gate_make();
    fcdp_dptr a = take(&w, 4 * PAGE, 0), b;
    gate_hold(g, w.streams[0]);
    give(&w, a);
    assert_int_equal(take(&w, 4 * PAGE, 0).addr, a.addr); /* ordered by the stream */
    give(&w, a);
    /* Another stream would have to wait: the opener is already under way, so the wait ends. */
    gate_open(g);
    b = take(&w, 4 * PAGE, 1);
    assert_int_not_equal(b.addr, a.addr);
    assert_int_equal(cuStreamQuery(w.streams[0]), CUDA_SUCCESS); /* it has been waited for */
    assert_int_equal(stats_of(&w).reserved_bytes, 4 * PAGE);
    gate_free(g);
    world_close(&w);
}

static void assert_nobody_spun(void) {
    struct simgpu_blocking all;
    simgpu_blocking_total(-1, &all);
    assert_true(all.waits > 0);
    assert_int_equal(all.spins, 0);
}

/* At whatever moment of the search the other stream is done: between two looks, too, its pages can be had. */
static void pages_that_come_free_during_the_search_are_found(void **state) {
    (void)state;
    uint64_t seed = seed_choose("heap");
    world w = world_open(4);
    simgpu_blocking_reset();
    for (int i = 0; i < 400; i++) {
        int from = i % 2;
        fcdp_dptr a = take(&w, 4 * PAGE, from);
        assert_int_equal(simgpu_launch(w.streams[from],
                                       &(struct simgpu_kernel){.duration_ns = random_below(&seed, 60000)}),
                         0);
        give(&w, a);
        give(&w, take(&w, 4 * PAGE, 1 - from));
    }
    assert_nobody_spun();
    world_close(&w);
}

static void a_recorded_stream_holds_a_block_back(void **state) {
    (void)state;
    world w = world_open(16);
    gate g = gate_make();
    fcdp_dptr a = take(&w, PAGE, 0);
    assert_ok(fcdp_heap_record_stream(w.heap, a, w.streams[0])); /* its own: nothing */
    assert_ok(fcdp_heap_record_stream(w.heap, a, w.streams[1]));
    assert_ok(fcdp_heap_record_stream(w.heap, a, w.streams[1]));
    assert_ok(fcdp_heap_record_stream(w.heap, a, w.streams[2]));
    gate_hold(g, w.streams[1]);
    give(&w, a);
    assert_int_equal(stats_of(&w).busy_bytes, PAGE);
    fcdp_dptr b = take(&w, PAGE, 0);
    assert_int_not_equal(b.addr, a.addr);
    gate_open(g);
    assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[1]));
    assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[2]));
    fcdp_dptr c = take(&w, PAGE, 0);
    assert_int_equal(c.addr, a.addr);
    assert_int_equal(stats_of(&w).busy_bytes, 0);
    gate_free(g);
    world_close(&w);
}

/* The driver's, by the linker: simgpu fails one call at a time. */
static bool syncs_nothing, frees_no_range;
static fcdp_dptr unfreed;
static size_t unfreed_bytes;
fcdp_status __real_fcdp__driver_stream_sync(fcdp_driver *drv, fcdp_stream stream);
fcdp_status __real_fcdp__driver_range_free(fcdp_driver *drv, fcdp_dptr at, size_t bytes);
fcdp_status __wrap_fcdp__driver_stream_sync(fcdp_driver *drv, fcdp_stream stream);
fcdp_status __wrap_fcdp__driver_range_free(fcdp_driver *drv, fcdp_dptr at, size_t bytes);

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_stream_sync(fcdp_driver *drv,
                                                                                   fcdp_stream stream) {
    return syncs_nothing ? fcdp__fail(FCDP_ERR_DRIVER, "no sync")
                         : __real_fcdp__driver_stream_sync(drv, stream);
}

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_range_free(fcdp_driver *drv,
                                                                                  fcdp_dptr at,
                                                                                  size_t bytes) {
    if (!frees_no_range) return __real_fcdp__driver_range_free(drv, at, bytes);
    unfreed = at;
    unfreed_bytes = bytes;
    return fcdp__fail(FCDP_ERR_DRIVER, "no free");
}

static void a_stream_that_cannot_be_waited_for_is_said(void **state) {
    (void)state;
    world w = world_open(16);
    fcdp_dptr a = take(&w, PAGE, 0);
    assert_ok(fcdp_heap_record_stream(w.heap, a, w.streams[1]));
    log_keep(FCDP_LOG_WARN);
    assert_int_equal(simgpu_fail_nth("cuEventRecord", 1, CUDA_UNKNOWN), 0);
    syncs_nothing = true;
    fcdp_status status = fcdp_heap_free(w.heap, a);
    syncs_nothing = false;
    assert_says(log_kept(), "warning: a stream that used freed memory cannot be waited for: no sync\n");
    assert_ok(status);
    world_close(&w);
}

static void addresses_that_are_lost_are_said(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_pool *pool;
    fcdp_heap *heap;
    fcdp_dptr at;
    assert_ok(fcdp__pool_create(drv, 8 * PAGE, &pool));
    assert_ok(fcdp_heap_create(drv, pool, &heap));
    assert_ok(fcdp_heap_malloc(heap, PAGE, NULL, &at));
    assert_ok(fcdp_heap_free(heap, at));
    log_keep(FCDP_LOG_WARN);
    frees_no_range = true;
    fcdp_heap_destroy(heap);
    frees_no_range = false;
    assert_says(log_kept(), "warning: a range of device addresses is lost until the process ends: no free\n");
    assert_ok(fcdp__driver_range_free(drv, unfreed, unfreed_bytes));
    fcdp__pool_destroy(pool);
    assert_nothing_lives();
    fcdp__driver_close(drv);
}

static void what_is_held_is_waited_for_before_memory_is_out(void **state) {
    (void)state;
    world w = world_open(2);
    gate g = gate_make();
    fcdp_dptr a = take(&w, 2 * PAGE, 0);
    assert_ok(fcdp_heap_record_stream(w.heap, a, w.streams[1]));
    gate_hold(g, w.streams[1]);
    give(&w, a);
    gate_open(g);
    a = take(&w, 2 * PAGE, 2);
    memset((void *)(uintptr_t)a.addr, 1, 2 * PAGE);
    gate_free(g);
    world_close(&w);
}

/* ---- pressure ---- */

typedef struct regions { /* what tiering would be: pages that it gives back when asked */
    fcdp_pool *pool;
    fcdp_phys pages[64];
    size_t n, n_asked;
} regions;

static size_t regions_reclaim(void *ctx, size_t n_pages) {
    regions *r = ctx;
    size_t n = n_pages < r->n ? n_pages : r->n;
    r->n_asked++;
    r->n -= n;
    fcdp__pool_give(r->pool, HOLDER_OTHERS, n, r->pages + r->n);
    return n;
}

static void regions_are_asked_last_and_yield_all(void **state) {
    (void)state;
    world w = world_open(32);
    regions r = {.pool = w.pool};
    fcdp_dptr other = take(&w, 4 * PAGE, 1);
    give(&w, other); /* quiescent, another stream's */
    assert_ok(fcdp__pool_take(w.pool, HOLDER_OTHERS, 20, r.pages));
    r.n = 20;
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, regions_reclaim, NULL, &r);
    fcdp_dptr a = take(&w, 8 * PAGE, 0); /* idle ones */
    assert_int_equal(r.n_asked, 0);
    fcdp_dptr b = take(&w, 4 * PAGE, 0); /* the other stream's */
    assert_int_equal(r.n_asked, 0);
    fcdp_dptr c = take(&w, 7 * PAGE, 0);
    assert_true(r.n_asked > 0);
    assert_int_equal(r.n, 13);
    fcdp_dptr d = take(&w, 13 * PAGE, 2);
    assert_int_equal(r.n, 0);
    fcdp_dptr e;
    assert_int_equal(fcdp_heap_malloc(w.heap, 1, w.streams[0], &e), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("2.1 MB are missing");
    assert_text("0 B to 1 MB, 8.39 MB to 10 MB, 58.7 MB to 100 MB, 0 B larger");
    assert_text("raise FCDP_DEVICE_BUDGET");
    assert_int_equal(stats_of(&w).n_ooms, 1);
    give(&w, a), give(&w, b), give(&w, c), give(&w, d);
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    world_close(&w);
}

/* Neither pages of the driver's, nor a peak that nothing has had. */
static void a_malloc_in_vain_creates_nothing(void **state) {
    (void)state;
    world w = world_open(32);
    fcdp_dptr a = take(&w, 5 * PAGE, 0), none;
    give(&w, take(&w, 3 * PAGE, 1));
    size_t peak_bytes = stats_of(&w).peak_reserved_bytes;
    fcdp_pool_stats before, after;
    fcdp__pool_stats(w.pool, &before);
    const size_t n_asked[] = {28, 32, 33, 400};
    for (size_t i = 0; i < sizeof n_asked / sizeof *n_asked; i++)
        assert_int_equal(fcdp_heap_malloc(w.heap, n_asked[i] * PAGE, w.streams[0], &none),
                         FCDP_ERR_NO_DEVICE_MEM);
    assert_text("782 MB are missing"); /* beside the 27 pages that could be had */
    fcdp__pool_stats(w.pool, &after);
    assert_int_equal(after.n_creates, before.n_creates);
    assert_int_equal(after.peak_live_pages, before.peak_live_pages);
    assert_int_equal(stats_of(&w).peak_reserved_bytes, peak_bytes);
    assert_int_equal(stats_of(&w).n_ooms, 4);
    fcdp_dptr b = take(&w, 27 * PAGE, 0);
    give(&w, a), give(&w, b);
    world_close(&w);
}

static void a_cache_gives_its_pages_to_regions(void **state) {
    (void)state;
    world w = world_open(8);
    fcdp_phys pages[8];
    fcdp_dptr a = take(&w, 5 * PAGE, 0), b = take(&w, 3 * PAGE - 1000, 1);
    assert_int_equal(fcdp__pool_pages_in_use(w.pool), 8);
    give(&w, a);
    assert_int_equal(fcdp__pool_pages_in_use(w.pool), 3);
    give(&w, b);
    assert_int_equal(fcdp__pool_pages_in_use(w.pool),
                     0); /* the last page too: what is free beside it counts */
    assert_ok(fcdp__pool_take(w.pool, HOLDER_OTHERS, 8, pages));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    fcdp__pool_give(w.pool, HOLDER_OTHERS, 8, pages);
    world_close(&w);
}

/* Freed memory is not quiescent while its stream is busy: regions wait for it. */
static void a_busy_cache_gives_its_pages_to_regions(void **state) {
    (void)state;
    world w = world_open(8);
    gate g = gate_make();
    fcdp_phys pages[8];
    fcdp_dptr a = take(&w, 5 * PAGE, 0), b = take(&w, 3 * PAGE, 1);
    assert_ok(fcdp_heap_record_stream(w.heap, b, w.streams[0]));
    gate_hold(g, w.streams[0]);
    give(&w, a);
    give(&w, b);
    size_t n_idle;
    assert_ok(fcdp__pool_take_some(w.pool, HOLDER_OTHERS, 1, pages, &n_idle));
    assert_int_equal(n_idle, 0);
    gate_open(g);
    assert_ok(fcdp__pool_take(w.pool, HOLDER_OTHERS, 8, pages));
    fcdp__pool_give(w.pool, HOLDER_OTHERS, 8, pages);
    gate_free(g);
    world_close(&w);
}

/* As FSDP2 does with sharded gradients: allocated on one stream (1), read on another (0), not recorded,
 * freed. Reuse on stream 1 would be ordered; an unmap is not, whether the malloc that needs the pages is on
 * stream 1 or on a third. `reader_open` lets the reader go on. */
static fcdp_dptr read_without_record_stream(world *w, gate g, fcdp_dptr copy, char pattern) {
    fcdp_dptr grads = take(w, 2 * PAGE, 1);
    (void)take(w, PAGE, 1); /* behind it: nothing longer than the freed block is placed over it */
    memset((void *)(uintptr_t)grads.addr, pattern, 2 * PAGE);
    gate_hold(g, w->streams[0]);
    assert_ok(fcdp__driver_copy_d2d(w->drv, copy, grads, 2 * PAGE, w->streams[0]));
    give(w, grads);
    return grads;
}

static void assert_was_read(world *w, fcdp_dptr copy, char pattern) {
    assert_ok(fcdp__driver_stream_sync(w->drv, w->streams[0])); /* 700 if pages were taken from under it */
    for (size_t i = 0; i < 2 * PAGE; i += PAGE / 4)
        assert_int_equal(((char *)(uintptr_t)copy.addr)[i], pattern);
}

static void pages_stay_while_another_stream_reads_them(void **state) {
    (void)state;
    for (int stream = 1; stream <= 2; stream++) {
        world w = world_open(9);
        gate g = gate_make();
        regions r = {.pool = w.pool};
        fcdp_dptr copy = take(&w, 2 * PAGE, 0), rest;
        assert_ok(fcdp__pool_take(w.pool, HOLDER_OTHERS, 4, r.pages));
        r.n = 4;
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, regions_reclaim, NULL, &r);
        (void)read_without_record_stream(&w, g, copy, 42);
        rest = take(&w, 4 * PAGE, stream); /* regions yield before the reader is waited for */
        assert_int_equal(r.n, 0);
        memset((void *)(uintptr_t)rest.addr, 1, 4 * PAGE);
        gate_open(g);
        assert_was_read(&w, copy, 42);
        give(&w, take(&w, 2 * PAGE, 2)); /* now they move */
        assert_int_equal(stats_of(&w).reserved_bytes, 9 * PAGE);
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
        gate_free(g);
        world_close(&w);
    }
}

/* The last to be asked before a wait: it lets the reader go on, and has nothing to give. */
static size_t gate_open_when_asked(void *ctx, size_t n_pages) {
    (void)n_pages;
    gate_open(ctx);
    return 0;
}

static void whoever_needs_the_pages_waits_for_the_reader(void **state) {
    (void)state;
    for (int region = 0; region < 2; region++) {
        world w = world_open(5);
        gate g = gate_make();
        fcdp_dptr copy = take(&w, 2 * PAGE, 0);
        fcdp_phys pages[2];
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, gate_open_when_asked, NULL, g);
        (void)read_without_record_stream(&w, g, copy, 43);
        if (region)
            assert_ok(fcdp__pool_take(w.pool, HOLDER_OTHERS, 2, pages));
        else
            memset((void *)(uintptr_t)take(&w, 2 * PAGE, 2).addr, 1, 2 * PAGE);
        assert_was_read(&w, copy, 43);
        /* none where the reader ended before it was asked about once more */
        assert_in_range(stats_of(&w).n_waits, 0, 1);
        if (region) fcdp__pool_give(w.pool, HOLDER_OTHERS, 2, pages);
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
        gate_free(g);
        world_close(&w);
    }
}

/* A stream that no malloc has named is known by record_stream. */
static void a_recorded_stream_is_waited_for_ever_after(void **state) {
    (void)state;
    world w = world_open(4);
    gate g = gate_make();
    fcdp_dptr copy = take(&w, 2 * PAGE, 1), seen = take(&w, 512, 1);
    assert_ok(fcdp_heap_record_stream(w.heap, seen, w.streams[0]));
    give(&w, seen);
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, gate_open_when_asked, NULL, g);
    give(&w, copy);
    copy = take(&w, PAGE, 1);
    fcdp_dptr read = take(&w, PAGE, 1), large;
    gate_hold(g, w.streams[0]);
    assert_ok(fcdp__driver_copy_d2d(w.drv, copy, read, PAGE, w.streams[0]));
    give(&w, read);
    large = take(&w, 3 * PAGE - 512, 2);
    assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[0]));
    give(&w, large);
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    gate_free(g);
    world_close(&w);
}

/* ---- misuse ---- */

static sigjmp_buf fault_jump;

static void fault_catch(int signal) {
    siglongjmp(fault_jump, signal);
}

static bool faults(uint64_t address) {
    struct sigaction before_segv, before_bus, catch = {.sa_handler = fault_catch};
    sigaction(SIGSEGV, &catch, &before_segv);
    sigaction(SIGBUS, &catch, &before_bus);
    bool caught = sigsetjmp(fault_jump, 1) != 0;
    if (!caught) (void)*(volatile char *)(uintptr_t)address;
    sigaction(SIGSEGV, &before_segv, NULL);
    sigaction(SIGBUS, &before_bus, NULL);
    return caught;
}

static void quarantine_makes_a_stale_access_fault(void **state) {
    (void)state;
    world w = world_open(8);
    fcdp_heap_set_quarantine(w.heap, 16 * PAGE);
    fcdp__check_level = 3;
    gate g = gate_make();
    fcdp_dptr a = take(&w, 3 * PAGE - 1000, 0), b = take(&w, MIB + 1, 0);
    assert_int_equal(stats_of(&w).large.allocated_bytes, 4 * PAGE); /* whole pages of their own */
    gate_hold(g, w.streams[0]);
    give(&w, a);
    assert_false(faults(a.addr)); /* the device may still be at it */
    gate_open(g);
    assert_int_equal(cuStreamSynchronize(w.streams[0]), CUDA_SUCCESS);
    fcdp_dptr c = take(&w, 7 * PAGE, 0); /* takes the freed block's pages, at other addresses */
    assert_true(faults(a.addr) && faults(a.addr + 3 * PAGE - 1));
    assert_int_equal(fcdp_heap_free(w.heap, a), FCDP_ERR_INVALID);
    assert_text("freed already");
    give(&w, c);
    assert_true(faults(c.addr));
    fcdp_dptr d = take(&w, 3 * PAGE, 0); /* 10 pages of addresses are in quarantine */
    assert_true(d.addr >= c.addr + 7 * PAGE || d.addr + 3 * PAGE <= a.addr);
    give(&w, d);
    fcdp_dptr e = take(&w, 5 * PAGE, 0);
    give(&w, e); /* 18 of 16: the oldest may be used again */
    fcdp_dptr f = take(&w, 3 * PAGE, 0);
    assert_int_equal(f.addr, a.addr);
    assert_false(faults(f.addr));
    give(&w, f);
    give(&w, b);
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    fcdp__check_level = 0;
    gate_free(g);
    world_close(&w);
}

static void quarantine_begins_behind_every_stream(void **state) {
    (void)state;
    world w = world_open(9);
    fcdp_heap_set_quarantine(w.heap, 16 * PAGE);
    gate g = gate_make();
    fcdp_dptr copy = take(&w, 2 * PAGE, 0);
    fcdp_dptr grads = read_without_record_stream(&w, g, copy, 44);
    assert_int_equal(stats_of(&w).busy_bytes, 2 * PAGE); /* their own stream is idle, the reader is not */
    gate_open(g);
    assert_was_read(&w, copy, 44);
    give(&w, copy);
    assert_true(faults(grads.addr));
    gate_free(g);
    world_close(&w);
}

static void wrong_frees_are_named(void **state) {
    (void)state;
    world w = world_open(8);
    fcdp_dptr a = take(&w, 1000, 0), foreign = {(uintptr_t)&w};
    give(&w, a);
    assert_int_equal(fcdp_heap_free(w.heap, a), FCDP_ERR_INVALID);
    assert_text("it was freed already");
    assert_int_equal(fcdp_heap_free(w.heap, foreign), FCDP_ERR_INVALID);
    assert_int_equal(fcdp_heap_record_stream(w.heap, a, w.streams[1]), FCDP_ERR_INVALID);
    a = take(&w, 1000, 0);
    assert_int_equal(fcdp_heap_free(w.heap, (fcdp_dptr){a.addr + 512}), FCDP_ERR_INVALID);
    give(&w, (fcdp_dptr){0});
    assert_int_equal(take(&w, 0, 0).addr, 0);
    give(&w, a);
    world_close(&w);
}

/* ---- the n-th driver call fails ---- */

/* A short schedule with every kind of driver call; true: an error was seen. */
static bool schedule_run(world *w) {
    const size_t sizes[] = {3 * PAGE, 700, PAGE + 5, 5 * PAGE, MIB / 2, 2 * PAGE};
    enum { N = sizeof sizes / sizeof sizes[0] };
    bool failed = false;
    for (int round = 0; round < 3; round++) {
        fcdp_dptr at[N];
        for (int i = 0; i < N; i++) {
            at[i].addr = 0;
            fcdp_status status = fcdp_heap_malloc(w->heap, sizes[(i + round) % N], w->streams[i % 3], &at[i]);
            failed = failed || status;
            if (status) {
                assert_true(fcdp_error_text()[0]);
                continue;
            }
            char *bytes = (char *)(uintptr_t)at[i].addr;
            for (size_t b = 0; b < sizes[(i + round) % N]; b += PAGE / 2) bytes[b] = 1;
            if (i % 2) assert_ok(fcdp_heap_record_stream(w->heap, at[i], w->streams[(i + 1) % 3]));
        }
        for (int i = 0; i < N; i++) give(w, at[i]); /* a free never fails */
        if (round == 1) (void)!fcdp_heap_trim(w->heap);
    }
    return failed;
}

/* TEST_COARSER=k: about every k-th, from a random one on, for builds that are slow; many runs come to all of
 * them. Odd: the kinds of calls come in turns of even length. */
static void every_driver_call_fails_once(void **state) {
    (void)state;
    const char *coarser = getenv("TEST_COARSER");
    unsigned long stride = coarser ? strtoul(coarser, NULL, 10) | 1 : 1,
                  first = 1 + fcdp__now_ns() / 1000 % stride;
    fcdp_log_set_level(FCDP_LOG_QUIET);
    fcdp__check_level = 3;
    const int codes[] = {CUDA_UNKNOWN, CUDA_OUT_OF_MEMORY, CUDA_UNKNOWN, CUDA_UNKNOWN};
    for (int c = 0; c < 4; c++) {
        size_t n_failed = 0, n_calls = 1;
        for (unsigned long n = 0; n <= n_calls; n = n ? n + stride : first) {
            world w = world_open(c == 3 ? 128 : 14); /* the first: handles of many pages */
            fcdp_heap_set_quarantine(w.heap, c == 2 ? 6 * PAGE : 0);
            unsigned long before = simgpu_calls(NULL);
            if (n > 0) assert_int_equal(simgpu_fail_nth(NULL, n, codes[c]), 0);
            n_failed += schedule_run(&w);
            if (n == 0) n_calls = simgpu_calls(NULL) - before;
            simgpu_fail_nth(NULL, 0, 0);
            assert_false(schedule_run(&w)); /* it has cost nothing that lasts */
            assert_int_equal(stats_of(&w).allocated_bytes, 0);
            world_close(&w);
        }
        print_message(
            "%zu driver calls, each %lu. from %lu on failed once with %d%s: %zu runs saw an error\n", n_calls,
            stride, first, codes[c], c == 2 ? ", in quarantine" : "", n_failed);
        assert_true(n_failed > 0);
    }
    fcdp__check_level = 0;
    fcdp_log_set_level(FCDP_LOG_WARN);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hit_calls_no_driver),
        cmocka_unit_test(idle_pages_come_before_pages_that_move),
        cmocka_unit_test(fragmentation_costs_no_page),
        cmocka_unit_test(few_large_handles_while_memory_is_not_short),
        cmocka_unit_test(peaks_and_sums_by_class),
        cmocka_unit_test(a_stream_reuses_its_own_at_once_and_another_not),
        cmocka_unit_test(pages_that_come_free_during_the_search_are_found),
        cmocka_unit_test(a_recorded_stream_holds_a_block_back),
        cmocka_unit_test(a_stream_that_cannot_be_waited_for_is_said),
        cmocka_unit_test(addresses_that_are_lost_are_said),
        cmocka_unit_test(what_is_held_is_waited_for_before_memory_is_out),
        cmocka_unit_test(regions_are_asked_last_and_yield_all),
        cmocka_unit_test(a_malloc_in_vain_creates_nothing),
        cmocka_unit_test(a_cache_gives_its_pages_to_regions),
        cmocka_unit_test(a_busy_cache_gives_its_pages_to_regions),
        cmocka_unit_test(pages_stay_while_another_stream_reads_them),
        cmocka_unit_test(whoever_needs_the_pages_waits_for_the_reader),
        cmocka_unit_test(a_recorded_stream_is_waited_for_ever_after),
        cmocka_unit_test(quarantine_makes_a_stale_access_fault),
        cmocka_unit_test(quarantine_begins_behind_every_stream),
        cmocka_unit_test(wrong_frees_are_named),
        cmocka_unit_test(every_driver_call_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
