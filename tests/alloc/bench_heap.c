/* What a hit costs: malloc and free of a size that is in the cache, on one thread, and on two threads with a
 * stream each.
 *
 *     ninja -C build/release bench_heap && FCDP_DRIVER=sim FCDP_SIM_LIBRARY=...
 * build/release/tests/alloc/bench_heap
 *
 * Every figure is the median of rounds; one thread and two take turns, so that their ratio is of the same
 * moments.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "alloc/heap.h"
#include "base/options.h"

extern char **environ;

enum { N_PAIRS = 1 << 20, N_ROUNDS = 9, DEPTH = 16 };

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        if (call) {                                                                                          \
            fprintf(stderr, "bench_heap: %s\n", fcdp_error_text());                                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef struct runner {
    fcdp_heap *heap;
    fcdp_stream stream;
    pthread_barrier_t *barrier;
    uint64_t ns;
} runner;

/* Last freed, first used, over DEPTH sizes as a training step has them. */
static void *runner_main(void *arg) {
    runner *r = arg;
    fcdp_dptr at[DEPTH];
    if (r->barrier) pthread_barrier_wait(r->barrier);
    uint64_t begun = fcdp__now_ns();
    for (int i = 0; i < N_PAIRS / DEPTH; i++) {
        for (size_t k = 0; k < DEPTH; k++)
            MUST(fcdp_heap_malloc(r->heap, 1000 + k * k * 9000, r->stream, &at[k]));
        for (size_t k = DEPTH; k-- > 0;) MUST(fcdp_heap_free(r->heap, at[k]));
    }
    r->ns = fcdp__now_ns() - begun;
    return NULL;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values) {
    qsort(values, N_ROUNDS, sizeof *values, by_value);
    return values[N_ROUNDS / 2];
}

/* Pairs per second of both together. */
static double two_threads(runner *runners) {
    pthread_t threads[2];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, 2);
    for (int i = 0; i < 2; i++) {
        runners[i].barrier = &barrier;
        pthread_create(&threads[i], NULL, runner_main, &runners[i]);
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    runners[0].barrier = NULL;
    return N_PAIRS / (double)runners[0].ns + N_PAIRS / (double)runners[1].ns;
}

/* The same of two heaps that share nothing: what this machine's cores can do at best. */
static fcdp_heap *heap_make(fcdp_driver *drv, fcdp_pool **pool_out) {
    fcdp_heap *heap;
    MUST(fcdp__pool_create(drv, (size_t)256 << 20, pool_out));
    MUST(fcdp_heap_create(drv, *pool_out, &heap));
    return heap;
}

int main(void) {
    fcdp_options options;
    fcdp_driver *drv;
    fcdp_pool *pools[2];
    fcdp_heap *heaps[2];
    runner together[2], apart[2];
    double one[N_ROUNDS], shared[N_ROUNDS], ideal[N_ROUNDS], part[N_ROUNDS];
    MUST(fcdp_options_load(environ, &options));
    MUST(fcdp__driver_open(options.driver, 0, NULL, &drv));
    for (int i = 0; i < 2; i++) {
        heaps[i] = heap_make(drv, &pools[i]);
        together[i] = (runner){.heap = heaps[0]};
        MUST(fcdp__driver_stream_create(drv, &together[i].stream));
        apart[i] = (runner){.heap = heaps[i], .stream = together[i].stream};
        runner_main(&together[i]);
        runner_main(&apart[i]);
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        runner_main(&together[0]);
        one[round] = (double)together[0].ns / N_PAIRS;
        shared[round] = two_threads(together) * one[round];
        ideal[round] = two_threads(apart) * one[round];
        part[round] = shared[round] / ideal[round];
    }
    fcdp_heap_stats stats;
    fcdp_heap_stats_get(heaps[0], &stats);
    printf("malloc + free, a hit: %.1f ns (median of %d rounds of %d)\n", median(one), N_ROUNDS, N_PAIRS);
    printf("two threads on two streams: %.2f times one; with a heap each, which share nothing: %.2f (ratio "
           "%.2f)\n",
           median(shared), median(ideal), median(part));
    printf("%.4f %% of %llu mallocs were hits; driver: %s\n",
           100.0 * (double)stats.n_hits / (double)stats.n_mallocs, (unsigned long long)stats.n_mallocs,
           fcdp__driver_is_sim(drv) ? "simulated" : "CUDA");
    for (int i = 0; i < 2; i++) {
        fcdp_heap_destroy(heaps[i]);
        fcdp__driver_stream_destroy(drv, together[i].stream);
        fcdp__pool_destroy(pools[i]);
    }
    fcdp__driver_close(drv);
    return 0;
}
