/* bench_vrange - what mapping and unmapping a range costs per 2 MiB page, on the driver that FCDP_DRIVER
 * chooses.
 *
 * Usage: bench_vrange [ROUNDS]. One line per range size: microseconds per page, medians. "first map" creates
 * the physical pages, "map" and "unmap" use pooled ones, "release" is a trim of the pool.
 */
#include <stdio.h>
#include <stdlib.h>

#include "alloc/options.h"
#include "alloc/vrange.h"

extern char **environ;

static void must(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench_vrange: %s\n", fcdp_error_text());
    exit(1);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double median_us_per_page(uint64_t *ns, int n, size_t n_pages) {
    qsort(ns, (size_t)n, sizeof *ns, by_value);
    return (double)ns[n / 2] / 1e3 / (double)n_pages;
}

static void size_measure(fcdp_driver *drv, size_t n_pages, int n_rounds) {
    enum { FIRST_MAP, MAP, UNMAP, RELEASE, N_KINDS };
    uint64_t *ns[N_KINDS];
    size_t bytes = n_pages * fcdp__driver_page_bytes(drv);
    fcdp_pool *pool;
    fcdp_vrange *range;
    for (int kind = 0; kind < N_KINDS; kind++) ns[kind] = calloc((size_t)n_rounds, sizeof *ns[kind]);
    must(fcdp__pool_create(drv, bytes, &pool));
    must(fcdp__vrange_create(drv, pool, bytes, &range));
    for (int round = 0; round < n_rounds; round++) {
        uint64_t start = fcdp__now_ns();
        must(fcdp__vrange_map(range));
        ns[FIRST_MAP][round] = fcdp__now_ns() - start;
        must(fcdp__vrange_unmap(range));
        start = fcdp__now_ns();
        must(fcdp__vrange_map(range));
        ns[MAP][round] = fcdp__now_ns() - start;
        start = fcdp__now_ns();
        must(fcdp__vrange_unmap(range));
        ns[UNMAP][round] = fcdp__now_ns() - start;
        start = fcdp__now_ns();
        (void)fcdp__pool_trim(pool);
        ns[RELEASE][round] = fcdp__now_ns() - start;
    }
    printf("%8zu", n_pages);
    for (int kind = 0; kind < N_KINDS; kind++) {
        printf("%12.2f", median_us_per_page(ns[kind], n_rounds, n_pages));
        free(ns[kind]);
    }
    printf("\n");
    fcdp__vrange_destroy(range);
    fcdp__pool_destroy(pool);
}

int main(int argc, char **argv) {
    int n_rounds = argc > 1 ? atoi(argv[1]) : 50;
    fcdp_options options;
    fcdp_driver *drv;
    if (n_rounds < 1) return 2;
    must(fcdp_options_load(environ, &options));
    must(fcdp__driver_open(options.driver, 0, NULL, &drv));
    printf("%s driver, pages of %zu KiB, median of %d rounds, us per page\n",
           fcdp__driver_is_sim(drv) ? "simulated" : "CUDA", fcdp__driver_page_bytes(drv) >> 10, n_rounds);
    printf("%8s%12s%12s%12s%12s\n", "pages", "first map", "map", "unmap", "release");
    for (size_t n_pages = 1; n_pages <= 256; n_pages *= 4) size_measure(drv, n_pages, n_rounds);
    fcdp__driver_close(drv);
    return 0;
}
