/* What an event costs: the whole call, with its clock read, on one thread and on two that write to the
 * same ring; beside it what reading the clock costs alone. A lap of the ring is written first, so that its
 * pages are there.
 *
 *     tools/bench.sh trace
 *
 * Every figure is the median of rounds, one thread and two in turn. "two threads": the time of one call on
 * each thread while the other writes too.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "alloc/trace_events.h"
#include "base/trace.h"

enum { N_EVENTS = 1 << 18, N_ROUNDS = 15, RING_BYTES = 8 << 20 };

typedef struct runner {
    pthread_barrier_t *barrier;
    double ns;
} runner;

static void *runner_main(void *arg) {
    runner *r = arg;
    if (r->barrier) pthread_barrier_wait(r->barrier);
    uint64_t begun = fcdp__now_ns();
    for (uint64_t i = 0; i < N_EVENTS; i++) fcdp__trace_now(FCDP_EVENT_MAP, 1, i, i, i);
    r->ns = (double)(fcdp__now_ns() - begun) / N_EVENTS;
    return NULL;
}

static double two_run(void) {
    pthread_barrier_t barrier;
    pthread_t thread;
    runner here = {&barrier, 0}, there = {&barrier, 0};
    pthread_barrier_init(&barrier, NULL, 2);
    if (pthread_create(&thread, NULL, runner_main, &there)) exit(1);
    runner_main(&here);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&barrier);
    return (here.ns + there.ns) / 2;
}

static double clock_run(void) {
    uint64_t begun = fcdp__now_ns(), sum = 0;
    for (int i = 0; i < N_EVENTS; i++) sum += fcdp__now_ns();
    return (double)(fcdp__now_ns() - begun) / N_EVENTS + (sum == 0);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values) {
    qsort(values, N_ROUNDS, sizeof *values, by_value);
    return values[N_ROUNDS / 2];
}

int main(void) {
    double clock[N_ROUNDS], one[N_ROUNDS], two[N_ROUNDS], off[N_ROUNDS];
    for (int i = 0; i < N_ROUNDS; i++) {
        runner r = {NULL, 0};
        runner_main(&r);
        off[i] = r.ns;
    }
    fcdp_trace_open(1, RING_BYTES);
    if (!fcdp__trace_header()) return 1;
    (void)two_run();
    for (int i = 0; i < N_ROUNDS; i++) {
        runner r = {NULL, 0};
        clock[i] = clock_run();
        runner_main(&r);
        one[i] = r.ns;
        two[i] = two_run();
    }
    const fcdp_trace_header *header = fcdp__trace_header();
    printf("ns per event (median of %d rounds): one thread %.1f, two threads %.1f; the clock alone %.1f; "
           "FCDP_TRACE=0: %.1f; of %llu events %llu were dropped\n",
           N_ROUNDS, median(one), median(two), median(clock), median(off), (unsigned long long)header->head,
           (unsigned long long)header->n_dropped);
    return median(one) <= 50 ? 0 : 1;
}
