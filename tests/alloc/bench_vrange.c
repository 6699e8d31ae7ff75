/* bench_vrange - what a block of device pages costs by itself, on the driver that FCDP_DRIVER chooses: making
 * it, mapping it under a range, unmapping it, giving it back.
 *
 * Usage: bench_vrange [ROUNDS]. One line per size: microseconds per block, medians; beside them the same
 * pages as handles of one page each under one range, since cost goes by handles and calls. "map" includes the
 * access, "give" the release.
 */
#include <stdio.h>
#include <stdlib.h>

#include "alloc/pages.h"
#include "alloc/vrange.h"
#include "base/options.h"

enum { HOLDER_OTHERS = 1 };
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

enum { TAKE, MAP, UNMAP, GIVE, PAGES_MAP, PAGES_UNMAP, N_KINDS };
static const char *const KIND[N_KINDS] = {"take", "map", "unmap", "give", "map pages", "unmap pages"};

typedef struct bench {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_vrange *range;
    size_t n_pages, bytes;
    fcdp_phys *pages;
} bench;

static uint64_t lap(uint64_t *since_ns) {
    uint64_t now_ns = fcdp__now_ns(), took_ns = now_ns - *since_ns;
    *since_ns = now_ns;
    return took_ns;
}

static void block_round(bench *b, uint64_t *ns[N_KINDS], int round) {
    fcdp_phys block;
    uint64_t since_ns = fcdp__now_ns();
    must(fcdp__pool_take_handle(b->pool, HOLDER_OTHERS, b->n_pages, &block));
    ns[TAKE][round] = lap(&since_ns);
    must(fcdp__vrange_map(b->range, block, b->bytes));
    ns[MAP][round] = lap(&since_ns);
    must(fcdp__vrange_unmap(b->range));
    ns[UNMAP][round] = lap(&since_ns);
    fcdp__pool_give_handle(b->pool, HOLDER_OTHERS, b->n_pages, block);
    ns[GIVE][round] = lap(&since_ns);
}

static void pages_round(bench *b, uint64_t *ns[N_KINDS], int round) {
    size_t page_bytes = b->bytes / b->n_pages;
    fcdp_dptr base = fcdp__vrange_base(b->range);
    must(fcdp__pool_take(b->pool, HOLDER_OTHERS, b->n_pages, b->pages));
    uint64_t since_ns = fcdp__now_ns();
    for (size_t i = 0; i < b->n_pages; i++)
        must(fcdp__driver_map(b->drv, fcdp__dptr_add(base, i * page_bytes), page_bytes, b->pages[i]));
    must(fcdp__driver_set_access(b->drv, base, b->bytes));
    ns[PAGES_MAP][round] = lap(&since_ns);
    must(fcdp__driver_unmap(b->drv, base, b->bytes));
    ns[PAGES_UNMAP][round] = lap(&since_ns);
    fcdp__pool_give(b->pool, HOLDER_OTHERS, b->n_pages, b->pages);
}

static void size_measure(fcdp_driver *drv, size_t n_pages, int n_rounds) {
    uint64_t *ns[N_KINDS];
    bench b = {.drv = drv, .n_pages = n_pages, .bytes = n_pages * fcdp__driver_page_bytes(drv)};
    b.pages = calloc(n_pages, sizeof *b.pages);
    for (int kind = 0; kind < N_KINDS; kind++) ns[kind] = calloc((size_t)n_rounds, sizeof *ns[kind]);
    must(fcdp__pool_create(drv, b.bytes, &b.pool));
    must(fcdp__vrange_create(drv, b.bytes, &b.range));
    for (int round = 0; round < n_rounds; round++) block_round(&b, ns, round);
    for (int round = 0; round < n_rounds; round++) pages_round(&b, ns, round);
    printf("%8zu", n_pages);
    for (int kind = 0; kind < N_KINDS; kind++) {
        qsort(ns[kind], (size_t)n_rounds, sizeof *ns[kind], by_value);
        printf("%12.1f", (double)ns[kind][n_rounds / 2] / 1e3);
        free(ns[kind]);
    }
    printf("\n");
    free(b.pages);
    fcdp__vrange_destroy(b.range);
    fcdp__pool_destroy(b.pool);
}

int main(int argc, char **argv) {
    int n_rounds = argc > 1 ? atoi(argv[1]) : 50;
    fcdp_options options;
    fcdp_driver *drv;
    if (n_rounds < 1) return 2;
    must(fcdp_options_load(environ, &options));
    must(fcdp__driver_open(options.driver, 0, NULL, &drv));
    printf("%s driver, pages of %zu KiB, median of %d rounds, us per block\n",
           fcdp__driver_is_sim(drv) ? "simulated" : "CUDA", fcdp__driver_page_bytes(drv) >> 10, n_rounds);
    printf("%8s", "pages");
    for (int kind = 0; kind < N_KINDS; kind++) printf("%12s", KIND[kind]);
    printf("\n");
    for (size_t n_pages = 1; n_pages <= 256; n_pages *= 4) size_measure(drv, n_pages, n_rounds);
    fcdp__driver_close(drv);
    return 0;
}
