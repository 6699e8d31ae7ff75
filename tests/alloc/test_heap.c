/* The tensors' allocator: hits, streams, the order of pressure, faults, and threads against an oracle. */
#include "alloc/heap.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>

#include "tests/alloc/support.h"
#include "tools/simgpu/simgpu_cuda.h"

enum { PAGE = 2 << 20, KIB = 1 << 10, MIB = 1 << 20 };

typedef struct world {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_heap *heap;
    fcdp_stream streams[4];
} world;

static world world_open(size_t n_pages) {
    world w = {.drv = driver_open_sim()};
    assert_ok(fcdp__pool_create(w.drv, n_pages * PAGE, &w.pool));
    assert_ok(fcdp_heap_create(w.drv, w.pool, &w.heap));
    for (int i = 0; i < 4; i++) assert_ok(fcdp__driver_stream_create(w.drv, &w.streams[i]));
    return w;
}

static void world_close(world *w) {
    fcdp_heap_destroy(w->heap);
    for (int i = 0; i < 4; i++) fcdp__driver_stream_destroy(w->drv, w->streams[i]);
    fcdp__pool_destroy(w->pool);
    assert_nothing_lives();
    fcdp__driver_close(w->drv);
}

static fcdp_dptr take(world *w, size_t bytes, int stream) {
    fcdp_dptr at = {0};
    assert_ok(fcdp_heap_malloc(w->heap, bytes, w->streams[stream], &at));
    assert_int_equal(at.addr % 512, 0);
    return at;
}

static void give(world *w, fcdp_dptr at) {
    assert_ok(fcdp_heap_free(w->heap, at));
}

static fcdp_heap_stats stats_of(world *w) {
    fcdp_heap_stats stats;
    fcdp_heap_stats_get(w->heap, &stats);
    return stats;
}

/* Streams that are busy until the gate opens. */
typedef uint32_t *gate;

static gate gate_make(void) {
    CUcontext context;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0),
                     CUDA_SUCCESS); /* the test's own calls need a current one */
    assert_int_equal(cuCtxSetCurrent(context), CUDA_SUCCESS);
    gate g = aligned_alloc(4096, 4096);
    memset(g, 0, 4096);
    assert_int_equal(cuMemHostRegister_v2(g, 4096, 0), CUDA_SUCCESS);
    return g;
}

static void gate_hold(gate g, fcdp_stream stream) {
    assert_int_equal(cuStreamWaitValue32_v2(stream, (uintptr_t)g, 1, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
}

static void gate_open(gate g) {
    __atomic_store_n(g, 1, __ATOMIC_RELEASE);
}

static void gate_free(gate g) {
    assert_int_equal(cuMemHostUnregister(g), CUDA_SUCCESS);
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    free(g);
}

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

static void nothing_is_reserved_beyond_the_last_page(void **state) {
    (void)state;
    world w = world_open(64);
    fcdp_dptr a = take(&w, PAGE + PAGE / 2, 0), b = take(&w, PAGE + PAGE / 2, 0);
    assert_int_equal(stats_of(&w).reserved_bytes, 3 * PAGE);
    give(&w, a);
    fcdp_dptr c = take(&w, 2 * PAGE, 0); /* the free page moves, one more comes */
    assert_int_equal(stats_of(&w).reserved_bytes, 4 * PAGE);
    give(&w, b);
    give(&w, c);
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    fcdp_pool_stats pool;
    fcdp__pool_stats(w.pool, &pool);
    assert_int_equal(pool.live_pages + pool.cached_pages, 0);
    world_close(&w);
}

/* Every second block of many is freed; as many bytes in one piece then need no new page. */
static void fragmentation_costs_no_page(void **state) {
    (void)state;
    world w = world_open(64);
    fcdp_dptr at[32];
    for (int i = 0; i < 32; i++) at[i] = take(&w, PAGE, 0);
    for (int i = 0; i < 32; i += 2) give(&w, at[i]);
    fcdp_dptr large = take(&w, 16 * PAGE, 0);
    memset((void *)(uintptr_t)large.addr, 1, 16 * PAGE);
    fcdp_heap_stats stats = stats_of(&w);
    assert_int_equal(stats.reserved_bytes, 32 * PAGE);
    assert_int_equal(stats.peak_reserved_bytes, 32 * PAGE);
    assert_int_equal(stats.n_pages_moved, 16);
    world_close(&w);
}

/* One stream: the counts of a class are exact, and so is the heap's peak to the bytes that small blocks move. */
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
    assert_int_equal(stats_of(&w).held_bytes, PAGE);
    fcdp_dptr b = take(&w, PAGE, 0);
    assert_int_not_equal(b.addr, a.addr);
    gate_open(g);
    assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[1]));
    assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[2]));
    fcdp_dptr c = take(&w, PAGE, 0);
    assert_int_equal(c.addr, a.addr);
    assert_int_equal(stats_of(&w).held_bytes, 0);
    gate_free(g);
    world_close(&w);
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
    fcdp__pool_give(r->pool, FCDP_HOLDER_REGIONS, n, r->pages + r->n);
    return n;
}

static void regions_are_asked_last_and_yield_all(void **state) {
    (void)state;
    world w = world_open(32);
    regions r = {.pool = w.pool};
    fcdp_dptr other = take(&w, 4 * PAGE, 1);
    give(&w, other); /* quiescent, another stream's */
    assert_ok(fcdp__pool_take(w.pool, FCDP_HOLDER_REGIONS, 20, r.pages));
    r.n = 20;
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, regions_reclaim, NULL, &r);
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
    assert_text("1 pages of 2048 KiB are missing");
    assert_text("0 MiB to 1 MiB, 38 MiB to 16 MiB, 26 MiB to 128 MiB");
    assert_text("raise FCDP_DEVICE_BUDGET");
    assert_int_equal(stats_of(&w).n_ooms, 1);
    give(&w, a), give(&w, b), give(&w, c), give(&w, d);
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, NULL, NULL, NULL);
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
    assert_ok(fcdp__pool_take(w.pool, FCDP_HOLDER_REGIONS, 8, pages));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    fcdp__pool_give(w.pool, FCDP_HOLDER_REGIONS, 8, pages);
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
    assert_int_equal(fcdp__pool_take_idle(w.pool, FCDP_HOLDER_REGIONS, 1, pages), FCDP_PENDING);
    gate_open(g);
    assert_ok(fcdp__pool_take(w.pool, FCDP_HOLDER_REGIONS, 8, pages));
    fcdp__pool_give(w.pool, FCDP_HOLDER_REGIONS, 8, pages);
    gate_free(g);
    world_close(&w);
}

/* As FSDP2 does with sharded gradients: allocated on one stream (1), read on another (0), not recorded, freed. Reuse on stream 1 would be
 * ordered; an unmap is not, whether the malloc that needs the pages is on stream 1 or on a third. `reader_open` lets the reader go on. */
static void read_without_record_stream(world *w, gate g, fcdp_dptr copy, char pattern) {
    fcdp_dptr grads = take(w, 2 * PAGE, 1);
    (void)take(w, PAGE, 1); /* behind it: nothing longer than the freed block is placed over it */
    memset((void *)(uintptr_t)grads.addr, pattern, 2 * PAGE);
    gate_hold(g, w->streams[0]);
    assert_ok(fcdp__driver_copy_d2d(w->drv, copy, grads, 2 * PAGE, w->streams[0]));
    give(w, grads);
}

static void assert_was_read(world *w, fcdp_dptr copy, char pattern) {
    assert_ok(fcdp__driver_stream_sync(w->drv, w->streams[0])); /* 700 if pages were taken from under it */
    for (size_t i = 0; i < 2 * PAGE; i += PAGE / 4) assert_int_equal(((char *)(uintptr_t)copy.addr)[i], pattern);
}

static void pages_stay_while_another_stream_reads_them(void **state) {
    (void)state;
    for (int stream = 1; stream <= 2; stream++) {
        world w = world_open(9);
        gate g = gate_make();
        regions r = {.pool = w.pool};
        fcdp_dptr copy = take(&w, 2 * PAGE, 0), rest;
        assert_ok(fcdp__pool_take(w.pool, FCDP_HOLDER_REGIONS, 4, r.pages));
        r.n = 4;
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, regions_reclaim, NULL, &r);
        read_without_record_stream(&w, g, copy, 42);
        rest = take(&w, 4 * PAGE, stream); /* regions yield before the reader is waited for */
        assert_int_equal(r.n, 0);
        memset((void *)(uintptr_t)rest.addr, 1, 4 * PAGE);
        gate_open(g);
        assert_was_read(&w, copy, 42);
        give(&w, take(&w, 2 * PAGE, 2)); /* now they move */
        assert_int_equal(stats_of(&w).reserved_bytes, 9 * PAGE);
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, NULL, NULL, NULL);
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
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, gate_open_when_asked, NULL, g);
        read_without_record_stream(&w, g, copy, 43);
        if (region)
            assert_ok(fcdp__pool_take(w.pool, FCDP_HOLDER_REGIONS, 2, pages));
        else
            memset((void *)(uintptr_t)take(&w, 2 * PAGE, 2).addr, 1, 2 * PAGE);
        assert_was_read(&w, copy, 43);
        assert_int_equal(stats_of(&w).n_waits, 1);
        if (region) fcdp__pool_give(w.pool, FCDP_HOLDER_REGIONS, 2, pages);
        fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, NULL, NULL, NULL);
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
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, gate_open_when_asked, NULL, g);
    give(&w, copy);
    copy = take(&w, PAGE, 1);
    fcdp_dptr read = take(&w, PAGE, 1), large;
    gate_hold(g, w.streams[0]);
    assert_ok(fcdp__driver_copy_d2d(w.drv, copy, read, PAGE, w.streams[0]));
    give(&w, read);
    large = take(&w, 3 * PAGE - 512, 2);
    assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[0]));
    give(&w, large);
    fcdp__pool_set_reclaimer(w.pool, FCDP_RECLAIM_REGIONS, NULL, NULL, NULL);
    gate_free(g);
    world_close(&w);
}

/* ---- private pools ---- */

static bool covers_stream(void *ctx, fcdp_stream stream) {
    return stream == ctx;
}

/* As torch.cuda.graph: the pool begins, then the capture. */
static void capture_begin(world *w, fcdp_pool_id id, int stream) {
    void *stale;
    assert_ok(fcdp_heap_pool_begin(w->heap, id, covers_stream, w->streams[stream], &stale));
    assert_int_equal(simgpu_capture(w->streams[stream], 1), 0);
}

static void capture_end(world *w, fcdp_pool_id id, int stream) {
    void *ctx;
    assert_int_equal(simgpu_capture(w->streams[stream], 0), 0);
    assert_ok(fcdp_heap_pool_end(w->heap, id, &ctx));
}

static void a_private_pool_keeps_to_itself_until_it_is_released(void **state) {
    (void)state;
    world w = world_open(8);
    fcdp_pool_id id = {3, 0};
    void *ctx = NULL, *stale;
    fcdp_dptr before = take(&w, 2 * PAGE, 0), other, ooms;
    give(&w, before);
    capture_begin(&w, id, 0);
    assert_int_equal(fcdp_heap_pool_begin(w.heap, id, covers_stream, w.streams[0], &stale), FCDP_ERR_INVALID);
    assert_null(stale);
    fcdp_dptr a = take(&w, 2 * PAGE, 0), b = take(&w, PAGE, 0);
    assert_int_not_equal(a.addr, before.addr);
    give(&w, a);
    assert_int_equal(take(&w, 2 * PAGE, 0).addr, a.addr);
    other = take(&w, PAGE, 1); /* not covered */
    fcdp_dptr used = take(&w, 512, 1);
    assert_ok(fcdp_heap_record_stream(w.heap, used, w.streams[0]));
    static const char *const asking[] = {"cuStreamQuery",      "cuEventRecord",       "cuEventQuery",
                                         "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"};
    unsigned long before_calls[6];
    for (int i = 0; i < 6; i++) before_calls[i] = simgpu_calls(asking[i]);
    give(&w, used); /* the stream is captured: its event comes later */
    assert_int_equal(stats_of(&w).held_bytes, 512);
    assert_int_equal(fcdp_heap_malloc(w.heap, 7 * PAGE, w.streams[1], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp_heap_trim(w.heap));
    for (int i = 0; i < 6; i++) assert_int_equal(simgpu_calls(asking[i]), before_calls[i]);
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0); /* it is not invalidated */
    assert_ok(fcdp_heap_pool_end(w.heap, id, &ctx));
    assert_ptr_equal(ctx, w.streams[0]);
    assert_int_equal(fcdp_heap_pool_end(w.heap, id, &ctx), FCDP_ERR_INVALID);
    give(&w, a);
    give(&w, b);
    give(&w, other);
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 3 * PAGE); /* a graph may write there */
    assert_int_equal(fcdp_heap_malloc(w.heap, 6 * PAGE, w.streams[0], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp_heap_pool_release(w.heap, id));
    assert_int_equal(fcdp_heap_pool_release(w.heap, id), FCDP_ERR_INVALID);
    gate g = gate_make(); /* a last replay, on another stream, is still under way */
    gate_hold(g, w.streams[2]);
    assert_ok(fcdp__driver_copy_d2d(w.drv, a, b, 4096, w.streams[2]));
    assert_ok(fcdp_heap_malloc(w.heap, 5 * PAGE, w.streams[1], &other)); /* not of the pool's pages */
    assert_int_equal(stats_of(&w).reserved_bytes, 8 * PAGE);
    give(&w, other);
    gate_open(g);
    give(&w, take(&w, 8 * PAGE, 1));
    assert_int_equal(cuStreamQuery(w.streams[2]), CUDA_SUCCESS); /* it has been waited for */
    gate_free(g);
    assert_ok(fcdp_heap_pool_begin(w.heap, id, covers_stream, w.streams[0], &stale)); /* its name may come again */
    give(&w, take(&w, PAGE, 0));
    assert_ok(fcdp_heap_pool_end(w.heap, id, &ctx));
    world_close(&w);
}

/* ---- misuse ---- */

/* One after the other, any number of them; what is alive in one keeps its place from the next. */
static void released_pools_make_room_for_others(void **state) {
    (void)state;
    enum { N_POOLS = 1100 /* more than there are streams */, N_KEPT = 100 };
    world w = world_open(2 * N_KEPT + 16);
    fcdp_dptr kept[N_KEPT] = {{0}};
    for (uint64_t i = 0; i < N_POOLS; i++) {
        fcdp_pool_id id = {i + 1, 1};
        capture_begin(&w, id, 0);
        fcdp_dptr at = take(&w, 2 * PAGE, 0), output = take(&w, 1000, 0);
        for (int k = 0; k < N_KEPT; k++) assert_int_not_equal(output.addr, kept[k].addr);
        capture_end(&w, id, 0);
        if (kept[i % N_KEPT].addr) give(&w, kept[i % N_KEPT]);
        kept[i % N_KEPT] = output;
        give(&w, at);
        assert_ok(fcdp_heap_pool_release(w.heap, id));
    }
    for (int k = 0; k < N_KEPT; k++) give(&w, kept[k]);
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    world_close(&w);
}

/* A block that lives in one arena of a released pool keeps the pool, not the pages of its other arenas. */
static void a_released_pools_free_pages_serve_the_next_capture(void **state) {
    (void)state;
    for (int order = 0; order < 2; order++) { /* whichever arena is looked at first */
        world w = world_open(8);
        fcdp_pool_id first = {1, 1}, second = {2, 1};
        int a = order, b = !order;
        capture_begin(&w, first, a);
        fcdp_dptr alive = take(&w, 1000, a);
        capture_end(&w, first, a);
        capture_begin(&w, first, b);
        give(&w, take(&w, 5 * PAGE, b));
        capture_end(&w, first, b);
        assert_ok(fcdp_heap_pool_release(w.heap, first));
        assert_ok(fcdp_heap_pool_release(w.heap, first));
        capture_begin(&w, second, a);
        give(&w, take(&w, 6 * PAGE, a));
        capture_end(&w, second, a);
        give(&w, alive);
        world_close(&w);
    }
}

/* As torch does for a graph's conditional nodes. */
static void a_pool_may_end_and_begin_within_a_capture(void **state) {
    (void)state;
    world w = world_open(8);
    fcdp_pool_id id = {1, 1};
    void *ctx, *stale;
    gate g = gate_make();
    fcdp_dptr warm = take(&w, 2 * PAGE, 1), ooms;
    capture_begin(&w, id, 0);
    fcdp_dptr first = take(&w, PAGE, 0);
    give(&w, warm);
    assert_ok(fcdp_heap_pool_end(w.heap, id, &ctx));
    assert_int_equal(fcdp_heap_malloc(w.heap, 7 * PAGE, w.streams[2], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp_heap_trim(w.heap)); /* the gap is part of the capture */
    assert_ok(fcdp_heap_pool_begin(w.heap, id, covers_stream, w.streams[0], &stale));
    assert_null(stale);
    give(&w, first);
    assert_int_equal(take(&w, PAGE, 0).addr, first.addr);
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0);
    assert_ok(fcdp_heap_pool_end(w.heap, id, &ctx));
    give(&w, take(&w, 7 * PAGE, 2)); /* and now it is over */
    give(&w, first);
    capture_begin(&w, id, 0); /* once more, without a malloc, and it ends before the capture does */
    assert_ok(fcdp_heap_pool_end(w.heap, id, &ctx));
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0);
    give(&w, take(&w, 7 * PAGE, 1));
    assert_ok(fcdp_heap_pool_release(w.heap, id));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, PAGE); /* released once, begun three times */
    gate_free(g);
    world_close(&w);
}

static void a_capture_that_fails_does_not_stop_the_heap(void **state) {
    (void)state;
    fcdp_log_set_level(FCDP_LOG_QUIET);
    world w = world_open(8);
    fcdp_pool_id id = {1, 1};
    void *ctx, *stale;
    fcdp_dptr before = take(&w, 5 * PAGE, 1), ooms;
    capture_begin(&w, id, 0);
    assert_int_equal(fcdp_heap_malloc(w.heap, 9 * PAGE, w.streams[1], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    fcdp_dptr inside = take(&w, PAGE, 0);
    give(&w, before);
    assert_int_equal(fcdp_heap_malloc(w.heap, 5 * PAGE, w.streams[2], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("a graph is being captured");
    give(&w, inside);
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0); /* and its owner does not end the pool */
    give(&w, take(&w, 5 * PAGE, 2));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, PAGE); /* not released */
    assert_ok(fcdp_heap_pool_end(w.heap, id, &ctx));     /* late, but it gets back what is its own */
    assert_ptr_equal(ctx, w.streams[0]);
    assert_int_equal(fcdp_heap_pool_end(w.heap, id, &ctx), FCDP_ERR_INVALID);
    capture_begin(&w, id, 0);
    give(&w, take(&w, PAGE, 0));
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0);
    assert_ok(fcdp_heap_trim(w.heap)); /* closes it */
    assert_ok(fcdp_heap_pool_begin(w.heap, id, covers_stream, w.streams[0], &stale));
    assert_ptr_equal(stale, w.streams[0]); /* or the next begin gives it back */
    assert_ok(fcdp_heap_pool_end(w.heap, id, &ctx));
    for (int i = 0; i < 3; i++) assert_ok(fcdp_heap_pool_release(w.heap, id));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    fcdp_log_set_level(FCDP_LOG_WARN);
    world_close(&w);
}

/* ---- captures beside other threads ---- */

enum { N_ROUNDS = 60 };

typedef struct beside {
    world *w;
    pthread_t thread;
    int stream;
    atomic_int *n_done;
    int n_invalidated, n_failed;
} beside;

static void *capturer_main(void *arg) {
    beside *me = arg;
    world *w = me->w;
    CUcontext context;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    assert_int_equal(cuCtxSetCurrent(context), CUDA_SUCCESS);
    for (uint64_t i = 0; i < N_ROUNDS / (1 + (uint64_t)me->stream); i++) { /* the second is done sooner */
        fcdp_pool_id id = {i + 1, (uint64_t)me->stream};
        fcdp_dptr at[4] = {{0}};
        void *ctx, *stale;
        assert_ok(fcdp_heap_pool_begin(w->heap, id, covers_stream, w->streams[me->stream], &stale));
        assert_int_equal(simgpu_capture(w->streams[me->stream], 1), 0);
        for (int k = 0; k < 4; k++) {
            if (fcdp_heap_malloc(w->heap, (size_t)(k + 1) * 700 * KIB, w->streams[me->stream], &at[k])) me->n_failed++;
            sched_yield();
        }
        for (int k = 0; k < 2; k++) give(w, at[k]);
        me->n_invalidated += simgpu_capture(w->streams[me->stream], 0) != 0;
        assert_ok(fcdp_heap_pool_end(w->heap, id, &ctx));
        for (int k = 2; k < 4; k++) give(w, at[k]);
        assert_ok(fcdp_heap_pool_release(w->heap, id));
        if (me->stream == 0) assert_ok(fcdp_heap_trim(w->heap)); /* waits, unless the other one captures */
    }
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    atomic_fetch_add(me->n_done, 1);
    return NULL;
}

/* Keeps its stream busy, and allocates so much that it must wait for what others have freed. */
static void *neighbour_main(void *arg) {
    beside *me = arg;
    world *w = me->w;
    for (int i = 0; atomic_load(me->n_done) < 2; i++) {
        fcdp_dptr at[6] = {{0}};
        for (int k = 0; k < 6; k++)
            if (fcdp_heap_malloc(w->heap, (size_t)(1 + (i + k) % 5) * PAGE, w->streams[me->stream], &at[k])) me->n_failed++;
        for (int k = 0; k < 5; k++)
            if (at[k].addr && at[k + 1].addr)
                assert_ok(fcdp__driver_copy_d2d(w->drv, at[k], at[k + 1], MIB, w->streams[me->stream]));
        if (at[0].addr) assert_ok(fcdp_heap_record_stream(w->heap, at[0], w->streams[(me->stream + 1) % 4]));
        for (int k = 0; k < 6; k++) give(w, at[k]);
        if (i % 7 == 0) assert_ok(fcdp_heap_trim(w->heap));
    }
    return NULL;
}

static void captures_survive_other_threads(void **state) {
    (void)state;
    world w = world_open(96);
    atomic_int n_done = 0;
    beside threads[4];
    for (int i = 0; i < 4; i++) {
        threads[i] = (beside){.w = &w, .stream = i, .n_done = &n_done};
        pthread_create(&threads[i].thread, NULL, i < 2 ? capturer_main : neighbour_main, &threads[i]);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i].thread, NULL);
    print_message("out of memory: %d and %d in captures, %d and %d beside them\n", threads[0].n_failed,
                  threads[1].n_failed, threads[2].n_failed, threads[3].n_failed);
    assert_int_equal(threads[0].n_invalidated + threads[1].n_invalidated, 0);
    for (int i = 0; i < 4; i++) assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[i]));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    world_close(&w);
}

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

static void every_driver_call_fails_once(void **state) {
    (void)state;
    fcdp_log_set_level(FCDP_LOG_QUIET);
    fcdp__check_level = 3;
    const int codes[] = {CUDA_UNKNOWN, CUDA_OUT_OF_MEMORY, CUDA_UNKNOWN};
    for (int c = 0; c < 3; c++) {
        size_t n_failed = 0, n_calls = 1;
        for (unsigned long n = 0; n <= n_calls; n++) {
            world w = world_open(14);
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
        print_message("%zu driver calls, each failed once with %d%s: %zu runs saw an error\n", n_calls,
                      codes[c], c == 2 ? ", in quarantine" : "", n_failed);
        assert_true(n_failed > 0);
    }
    fcdp__check_level = 0;
    fcdp_log_set_level(FCDP_LOG_WARN);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hit_calls_no_driver),
        cmocka_unit_test(nothing_is_reserved_beyond_the_last_page),
        cmocka_unit_test(fragmentation_costs_no_page),
        cmocka_unit_test(peaks_and_sums_by_class),
        cmocka_unit_test(a_stream_reuses_its_own_at_once_and_another_not),
        cmocka_unit_test(a_recorded_stream_holds_a_block_back),
        cmocka_unit_test(what_is_held_is_waited_for_before_memory_is_out),
        cmocka_unit_test(regions_are_asked_last_and_yield_all),
        cmocka_unit_test(a_cache_gives_its_pages_to_regions),
        cmocka_unit_test(a_busy_cache_gives_its_pages_to_regions),
        cmocka_unit_test(pages_stay_while_another_stream_reads_them),
        cmocka_unit_test(whoever_needs_the_pages_waits_for_the_reader),
        cmocka_unit_test(a_recorded_stream_is_waited_for_ever_after),
        cmocka_unit_test(a_private_pool_keeps_to_itself_until_it_is_released),
        cmocka_unit_test(released_pools_make_room_for_others),
        cmocka_unit_test(a_released_pools_free_pages_serve_the_next_capture),
        cmocka_unit_test(a_pool_may_end_and_begin_within_a_capture),
        cmocka_unit_test(a_capture_that_fails_does_not_stop_the_heap),
        cmocka_unit_test(captures_survive_other_threads),
        cmocka_unit_test(quarantine_makes_a_stale_access_fault),
        cmocka_unit_test(wrong_frees_are_named),
        cmocka_unit_test(every_driver_call_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
