/* What moving a region costs, beside what the same bytes cost without one. Not run by ctest.
 *
 *     FCDP_DRIVER=sim|cuda FCDP_SIM_LIBRARY=... bench_tiering_moves [MiB, default 256] [rounds, default 10]
 *
 * Medians over the rounds, one rank, GB = 1e9 bytes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc/options.h"
#include "tiering/region.h"

extern char **environ;
enum { MAX_ROUNDS = 1000, PAGE = 2 << 20 };

static void check(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench: %s: %s\n", fcdp_status_name(status), fcdp_error_text());
    exit(1);
}

typedef struct bench {
    fcdp_driver *drv;
    fcdp_stream stream;
    fcdp_region *region;
    char *host, *other;
    size_t bytes;
    int n_rounds;
} bench;

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* `prepare` is not timed. */
static void measure(bench *b, const char *what, void (*prepare)(bench *), void (*body)(bench *)) {
    uint64_t ns[MAX_ROUNDS];
    for (int i = 0; i < b->n_rounds; i++) {
        if (prepare) prepare(b);
        uint64_t start_ns = fcdp__now_ns();
        body(b);
        ns[i] = fcdp__now_ns() - start_ns;
    }
    qsort(ns, (size_t)b->n_rounds, sizeof ns[0], by_value);
    uint64_t median = ns[b->n_rounds / 2];
    printf("%-44s %9.3f ms %8.2f GB/s\n", what, (double)median / 1e6, (double)b->bytes / (double)median);
}

static void plain_memcpy(bench *b) {
    memcpy(b->other, b->host, b->bytes);
}

static void raw_d2h(bench *b) {
    check(fcdp__driver_copy_d2h(b->drv, b->host, fcdp__region_base(b->region), b->bytes, b->stream));
    check(fcdp__driver_stream_sync(b->drv, b->stream));
}

static void raw_h2d(bench *b) {
    check(fcdp__driver_copy_h2d(b->drv, fcdp__region_base(b->region), b->host, b->bytes, b->stream));
    check(fcdp__driver_stream_sync(b->drv, b->stream));
}

static void make_filled(bench *b) {
    check(fcdp__region_begin_use(b->region));
    fcdp__region_filled(b->region, FCDP_SPAN_MASK_ALL);
    fcdp__region_end_use(b->region);
}

static void store(bench *b) {
    check(fcdp__region_store(b->region, NULL));
}
static void drop(bench *b) {
    check(fcdp__region_drop(b->region, NULL));
}
static void make_stored(bench *b) {
    make_filled(b), store(b);
}
static void make_dropped(bench *b) {
    drop(b);
}

static void begin_use(bench *b) {
    check(fcdp__region_begin_use(b->region));
}
static void end_use(bench *b) {
    fcdp__region_end_use(b->region);
}
static void make_mapped(bench *b) {
    drop(b), begin_use(b);
}

static void load_whole(bench *b) {
    check(fcdp__region_load_whole(b->region, FCDP_SPAN_TRAINABLE));
    end_use(b);
}

static void map_and_end(bench *b) {
    begin_use(b), end_use(b);
}

static void run(bench *b) {
    make_filled(b);
    measure(b, "memcpy, host to host", NULL, plain_memcpy);
    begin_use(b);
    measure(b, "driver copy, device to host block", NULL, raw_d2h);
    measure(b, "driver copy, host block to device", NULL, raw_h2d);
    end_use(b);
    measure(b, "region store", make_filled, store);
    measure(b, "region drop (unmap, pages to the pool)", make_stored, drop);
    make_stored(b);
    measure(b, "region begin_use (pages from the pool, map)", make_dropped, map_and_end);
    measure(b, "region load_whole, mapped", make_mapped, load_whole);
}

int main(int argc, char **argv) {
    fcdp_options options;
    fcdp_pool *pool;
    fcdp_tiering *tiering;
    fcdp_host *host;
    fcdp_shared_ticket ticket;
    fcdp_host_block *block;
    fcdp_layout *layout;
    fcdp_account *account;
    uint64_t offset;
    bench b = {.bytes = (size_t)(argc > 1 ? atoi(argv[1]) : 256) << 20,
               .n_rounds = argc > 2 ? atoi(argv[2]) : 10};
    if (!b.bytes || b.n_rounds < 1 || b.n_rounds > MAX_ROUNDS)
        return fprintf(stderr, "usage: %s [MiB] [rounds, up to %d]\n", argv[0], MAX_ROUNDS), 2;
    check(fcdp_options_load(environ, &options));
    check(fcdp__driver_open(options.driver, 0, NULL, &b.drv));
    check(fcdp__driver_stream_create(b.drv, &b.stream));
    check(fcdp__pool_create(b.drv, b.bytes + PAGE, &pool));
    check(fcdp__tiering_create(b.drv, pool, &tiering));
    check(fcdp__account_create(0, &account, &ticket));
    fcdp_host_config host_config = {.drv = b.drv,
                                    .account = account,
                                    .numa_node = fcdp__driver_numa_node(b.drv),
                                    .pin = FCDP_PIN_AUTO,
                                    .n_slices = 1,
                                    .timeout_s = 10};
    check(fcdp__host_create(&host_config, &host, &ticket));
    fcdp_extent_spec spec = {b.bytes, FCDP_SPAN_TRAINABLE};
    check(fcdp__layout_create(&spec, 1, 1, 1, &layout));
    check(fcdp__host_carve(host, layout->bytes, &offset));
    check(fcdp__host_attach(host, offset, layout->bytes, &block));
    check(fcdp__region_create(tiering, "bench", layout, 0, block, &b.region));
    b.host = fcdp__host_data(block);
    b.other = malloc(b.bytes);
    if (!b.other) return 1;
    memset(b.other, 1, b.bytes);
    printf("%s driver, %zu MiB, %d rounds\n", fcdp__driver_is_sim(b.drv) ? "simulated" : "CUDA",
           b.bytes >> 20, b.n_rounds);
    run(&b);
    fcdp__region_destroy(b.region);
    fcdp__host_detach(block);
    fcdp__host_free(host, offset);
    fcdp__layout_destroy(layout);
    free(b.other);
    fcdp__tiering_destroy(tiering);
    fcdp__pool_destroy(pool);
    fcdp__host_destroy(host);
    fcdp__account_destroy(account);
    fcdp__driver_stream_destroy(b.drv, b.stream);
    fcdp__driver_close(b.drv);
    return 0;
}
