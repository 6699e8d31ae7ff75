/* Threads and streams against one heap, while regions take and yield pages: every access is work on a stream,
 * as a kernel's would be, so memory that is used again too early shows as a wrong pattern.
 *
 * What is checked: the first and last bytes of every block, when it is freed and, by a reader that is still
 * under way then, after; no two live blocks overlap; reserved = live + freed, at the end nothing.
 * HEAP_STRESS_S=60 runs that many seconds (default 2).
 */
#include "alloc/heap.h"

#include <pthread.h>
#include <stdatomic.h>

#include "tests/alloc/support.h"

enum {
    PAGE = 2 << 20,
    N_PAGES = 96,
    N_THREADS = 4,
    N_STREAMS = 3,
    N_SHARED = 64,
    N_READS = 8,
    EDGE = 1024,
    N_PATTERNS = 251
};

typedef struct block {
    uint64_t address;
    size_t bytes;
    int pattern, stream, other; /* other: recorded, -1: none */
} block;

typedef struct reading { /* of a block's edges, on a stream; checked when that has passed */
    char bytes[2 * EDGE];
    size_t n_edge;
    int pattern;
    fcdp_event event;
    bool pending;
} reading;

typedef struct ranges { /* the oracle: live blocks, in no order */
    pthread_mutex_t mutex;
    struct {
        uint64_t address, end;
    } *items;
    size_t n, capacity;
} ranges;

typedef struct world {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_heap *heap;
    fcdp_stream streams[N_STREAMS];
    char patterns[N_PATTERNS][EDGE];
    struct {
        pthread_mutex_t mutex;
        block b;
    } shared[N_SHARED];
    ranges live;
    _Atomic bool stop;
    _Atomic uint64_t n_ops, n_ooms, n_wrong, n_yields;
    pthread_mutex_t region_mutex;
    fcdp_phys region_pages[N_PAGES]; /* under region_mutex */
    size_t n_region;
} world;

typedef struct runner {
    world *w;
    uint64_t seed;
    reading reads[N_READS];
} runner;

/* ---- the oracle ---- */

static void ranges_add(world *w, const block *b) {
    ranges *r = &w->live;
    pthread_mutex_lock(&r->mutex);
    for (size_t i = 0; i < r->n; i++)
        if (b->address < r->items[i].end && r->items[i].address < b->address + b->bytes) w->n_wrong++;
    if (r->n == r->capacity) {
        r->capacity = r->capacity ? 2 * r->capacity : 256;
        r->items = realloc(r->items, r->capacity * sizeof *r->items);
    }
    r->items[r->n].address = b->address;
    r->items[r->n++].end = b->address + b->bytes;
    pthread_mutex_unlock(&r->mutex);
}

static void ranges_remove(world *w, const block *b) {
    ranges *r = &w->live;
    pthread_mutex_lock(&r->mutex);
    size_t i = 0;
    while (i < r->n && r->items[i].address != b->address) i++;
    if (i == r->n)
        w->n_wrong++;
    else
        r->items[i] = r->items[--r->n];
    pthread_mutex_unlock(&r->mutex);
}

/* ---- accesses ---- */

static size_t edge_of(size_t bytes) {
    return bytes < EDGE ? bytes : EDGE;
}

static fcdp_dptr at_end(const block *b) {
    return (fcdp_dptr){b->address + b->bytes - edge_of(b->bytes)};
}

static void block_write(world *w, const block *b, int stream) {
    fcdp_dptr pattern = {(uintptr_t)w->patterns[b->pattern]};
    size_t n = edge_of(b->bytes);
    assert_ok(fcdp__driver_copy_d2d(w->drv, (fcdp_dptr){b->address}, pattern, n, w->streams[stream]));
    assert_ok(fcdp__driver_copy_d2d(w->drv, at_end(b), pattern, n, w->streams[stream]));
}

static void reading_check(world *w, reading *r) {
    if (!r->pending) return;
    assert_ok(fcdp__driver_event_sync(w->drv, r->event));
    r->pending = false;
    for (size_t i = 0; i < 2 * r->n_edge; i++)
        if (r->bytes[i] != (char)r->pattern) {
            w->n_wrong++;
            return;
        }
}

static void block_read(runner *me, const block *b, int stream) {
    world *w = me->w;
    reading *r = &me->reads[random_below(&me->seed, N_READS)];
    reading_check(w, r);
    r->n_edge = edge_of(b->bytes);
    r->pattern = b->pattern;
    fcdp_dptr to = {(uintptr_t)r->bytes};
    assert_ok(fcdp__driver_copy_d2d(w->drv, to, (fcdp_dptr){b->address}, r->n_edge, w->streams[stream]));
    assert_ok(fcdp__driver_copy_d2d(w->drv, fcdp__dptr_add(to, r->n_edge), at_end(b), r->n_edge,
                                    w->streams[stream]));
    assert_ok(fcdp__driver_event_record(w->drv, r->event, w->streams[stream]));
    r->pending = true;
}

/* ---- steps ---- */

static size_t random_bytes(runner *me) {
    switch (random_below(&me->seed, 8)) {
    case 0: return 1 + random_below(&me->seed, 12 * PAGE);
    case 1:
    case 2: return 1 + random_below(&me->seed, PAGE);
    default: return 1 + random_below(&me->seed, 40000);
    }
}

static bool block_make(runner *me, block *b) {
    world *w = me->w;
    fcdp_dptr at;
    *b = (block){.bytes = random_bytes(me),
                 .other = -1,
                 .stream = (int)random_below(&me->seed, N_STREAMS),
                 .pattern = (int)random_below(&me->seed, N_PATTERNS)};
    fcdp_status status = fcdp_heap_malloc(w->heap, b->bytes, w->streams[b->stream], &at);
    if (status == FCDP_ERR_NO_DEVICE_MEM) {
        w->n_ooms++;
        return false;
    }
    assert_ok(status);
    b->address = at.addr;
    ranges_add(w, b);
    block_write(w, b, b->stream);
    if (random_below(&me->seed, 6) == 0) {
        b->other = (b->stream + 1) % N_STREAMS;
        assert_ok(fcdp_heap_record_stream(w->heap, at, w->streams[b->other]));
        fcdp_event ready; /* the other stream comes after the write */
        assert_ok(fcdp__driver_event_create(w->drv, &ready));
        assert_ok(fcdp__driver_event_record(w->drv, ready, w->streams[b->stream]));
        assert_ok(fcdp__driver_stream_wait(w->drv, w->streams[b->other], ready));
        fcdp__driver_event_destroy(w->drv, ready);
    }
    return true;
}

static void block_end(runner *me, const block *b) {
    world *w = me->w;
    if (random_below(&me->seed, 2)) block_read(me, b, b->stream);
    if (b->other >= 0) block_read(me, b, b->other);
    ranges_remove(w, b);
    assert_ok(fcdp_heap_free(w->heap, (fcdp_dptr){b->address}));
}

/* Put a new block into a slot that all threads share, and free the block that was there, of any thread. */
static void *runner_main(void *arg) {
    runner *me = arg;
    world *w = me->w;
    while (!w->stop) {
        size_t slot = random_below(&me->seed, N_SHARED);
        block made = {0}, was;
        bool has = random_below(&me->seed, 5) > 0 && block_make(me, &made);
        pthread_mutex_lock(&w->shared[slot].mutex);
        was = w->shared[slot].b;
        w->shared[slot].b = has ? made : (block){0};
        pthread_mutex_unlock(&w->shared[slot].mutex);
        if (was.address) block_end(me, &was);
        if (random_below(&me->seed, 500) == 0) assert_ok(fcdp_heap_trim(w->heap));
        w->n_ops++;
    }
    for (int i = 0; i < N_READS; i++) reading_check(w, &me->reads[i]);
    return NULL;
}

static size_t regions_yield(void *ctx, size_t n_pages) {
    world *w = ctx;
    pthread_mutex_lock(&w->region_mutex);
    size_t n = n_pages < w->n_region ? n_pages : w->n_region;
    w->n_region -= n;
    fcdp__pool_give(w->pool, HOLDER_OTHERS, n, w->region_pages + w->n_region);
    pthread_mutex_unlock(&w->region_mutex);
    w->n_yields += n;
    return n;
}

/* Regions fill what is left, again and again: a thread that allocates must take it back. */
static void *regions_main(void *arg) {
    world *w = arg;
    uint64_t seed = 7;
    while (!w->stop) {
        fcdp_phys pages[8];
        size_t n = 1 + random_below(&seed, 8);
        if (fcdp__pool_take(w->pool, HOLDER_OTHERS, n, pages)) continue;
        pthread_mutex_lock(&w->region_mutex);
        bool fits = w->n_region + n <= N_PAGES;
        if (fits) memcpy(w->region_pages + w->n_region, pages, n * sizeof *pages);
        if (fits) w->n_region += n;
        pthread_mutex_unlock(&w->region_mutex);
        if (!fits) fcdp__pool_give(w->pool, HOLDER_OTHERS, n, pages);
        sched_yield();
    }
    return NULL;
}

static world *world_open(void) {
    world *w = calloc(1, sizeof *w);
    w->drv = driver_open_sim();
    assert_ok(fcdp__pool_create(w->drv, (size_t)N_PAGES * PAGE, &w->pool));
    assert_ok(fcdp_heap_create(w->drv, w->pool, &w->heap));
    for (int i = 0; i < N_STREAMS; i++) assert_ok(fcdp__driver_stream_create(w->drv, &w->streams[i]));
    for (int i = 0; i < N_PATTERNS; i++) memset(w->patterns[i], i, EDGE);
    for (int i = 0; i < N_SHARED; i++) pthread_mutex_init(&w->shared[i].mutex, NULL);
    pthread_mutex_init(&w->live.mutex, NULL);
    pthread_mutex_init(&w->region_mutex, NULL);
    fcdp__pool_set_reclaimer(w->pool, FCDP_RECLAIM_EVICT, regions_yield, NULL, w);
    return w;
}

static void world_close(world *w) {
    fcdp_heap_stats stats;
    for (int i = 0; i < N_SHARED; i++)
        if (w->shared[i].b.address) assert_ok(fcdp_heap_free(w->heap, (fcdp_dptr){w->shared[i].b.address}));
    assert_ok(fcdp_heap_trim(w->heap));
    fcdp_heap_stats_get(w->heap, &stats);
    assert_int_equal(stats.allocated_bytes + stats.requested_bytes + stats.busy_bytes + stats.reserved_bytes,
                     0);
    assert_int_equal(stats.n_mallocs, stats.n_frees);
    print_message(
        "%llu hits, %llu fits, %llu growths; pages: %llu moved, %llu taken, %llu from regions; %llu waits\n",
        (unsigned long long)stats.n_hits, (unsigned long long)stats.n_fits, (unsigned long long)stats.n_grows,
        (unsigned long long)stats.n_pages_moved, (unsigned long long)stats.n_pages_taken,
        (unsigned long long)w->n_yields, (unsigned long long)stats.n_waits);
    fcdp__pool_set_reclaimer(w->pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    fcdp__pool_give(w->pool, HOLDER_OTHERS, w->n_region, w->region_pages);
    fcdp_heap_destroy(w->heap);
    for (int i = 0; i < N_STREAMS; i++) fcdp__driver_stream_destroy(w->drv, w->streams[i]);
    fcdp__pool_destroy(w->pool);
    assert_nothing_lives();
    fcdp__driver_close(w->drv);
    free(w->live.items);
    free(w);
}

static uint64_t run_ns(void) {
    const char *given = getenv("HEAP_STRESS_S");
    return (uint64_t)((given ? atof(given) : 2.0) * 1e9);
}

static void stress(const char *name, uint64_t length, size_t quarantine_bytes) {
    uint64_t seed = seed_choose(name);
    world *w = world_open();
    fcdp_heap_set_quarantine(w->heap, quarantine_bytes);
    runner *runners = calloc(N_THREADS, sizeof *runners);
    pthread_t threads[N_THREADS + 1];
    uint64_t begun = fcdp__now_ns();
    for (int i = 0; i < N_THREADS; i++) {
        runners[i].w = w;
        runners[i].seed = random_next(&seed);
        for (int k = 0; k < N_READS; k++)
            assert_ok(fcdp__driver_event_create(w->drv, &runners[i].reads[k].event));
        pthread_create(&threads[i], NULL, runner_main, &runners[i]);
    }
    pthread_create(&threads[N_THREADS], NULL, regions_main, w);
    while (fcdp__now_ns() - begun < length && w->n_wrong == 0) {
        struct timespec tick = {0, 20 * 1000 * 1000}; /* only how often the clock is looked at */
        nanosleep(&tick, NULL);
    }
    w->stop = true;
    for (int i = 0; i <= N_THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < N_THREADS; i++)
        for (int k = 0; k < N_READS; k++) fcdp__driver_event_destroy(w->drv, runners[i].reads[k].event);
    print_message("%llu steps, %llu out of memory\n", (unsigned long long)w->n_ops,
                  (unsigned long long)w->n_ooms);
    assert_int_equal(w->n_wrong, 0);
    free(runners);
    world_close(w);
}

static void threads_streams_and_regions(void **state) {
    (void)state;
    stress(__func__, run_ns() * 5 / 6, 0);
}

/* Freed blocks are unmapped at once, and their addresses come back after a while. */
static void the_same_in_quarantine(void **state) {
    (void)state;
    stress(__func__, run_ns() / 6, (size_t)64 * PAGE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_streams_and_regions),
        cmocka_unit_test(the_same_in_quarantine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
