/* What moving a region costs, beside what the same bytes cost without one, with both mappings. Not run by
 * ctest.
 *
 *     FCDP_DRIVER=sim|cuda FCDP_SIM_LIBRARY=... bench_tiering_moves [MiB, default 256] [rounds, default 10]
 *
 * Medians over the rounds, one rank, GB = 1e9 bytes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/options.h"
#include "tiering/region.h"

extern char **environ;
enum { MAX_ROUNDS = 1000, PAGE = 2 << 20 };

static void check(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench: %s\n", fcdp_error_text());
    exit(1);
}

typedef struct bench {
    fcdp_driver *drv;
    fcdp_stream stream;
    fcdp_pool *pool;
    fcdp_region *region;
    bool exact;
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

static void acquire(bench *b) {
    check(fcdp__region_acquire(b->region));
}
static void release(bench *b) {
    check(fcdp__region_release(b->region, b->stream, false));
}
/* As after a gather: the bytes are on the device alone. */
static void fill(bench *b) {
    check(fcdp__region_begin_fill(b->region, FCDP_SPAN_MASK_ALL));
    check(fcdp__driver_event_record(b->drv, fcdp__region_ready(b->region), b->stream));
}

static void store(bench *b) {
    fcdp_piece_list all = {&(fcdp_piece){0, b->bytes}, 1};
    check(fcdp__region_store(b->region, 1u << FCDP_SPAN_TRAINABLE, all, fcdp__region_ready(b->region)));
    check(fcdp__driver_event_sync(b->drv, fcdp__region_stored(b->region)));
}

static void load_whole(bench *b) {
    check(fcdp__region_load_whole(b->region, FCDP_SPAN_TRAINABLE));
    check(fcdp__driver_event_sync(b->drv, fcdp__region_loaded(b->region)));
}

static void use_of_nothing(bench *b) {
    acquire(b);
    check(fcdp__driver_stream_sync(b->drv, b->stream));
    release(b);
}

/* Like another holder that needs the memory. */
static void slots_lose(bench *b) {
    fcdp_phys block;
    check(fcdp__pool_take_handle(b->pool, FCDP_HOLDER_GATHERED, b->bytes / PAGE + 1, &block));
    fcdp__pool_give_handle(b->pool, FCDP_HOLDER_GATHERED, b->bytes / PAGE + 1, block);
}

static void run(bench *b) {
    measure(b, "memcpy, host to host", NULL, plain_memcpy);
    acquire(b);
    measure(b, "driver copy, device to host block", NULL, raw_d2h);
    measure(b, "driver copy, host block to device", NULL, raw_h2d);
    measure(b, "region store", fill, store);
    measure(b, "region load_whole", NULL, load_whole);
    release(b);
    measure(b, b->exact ? "acquire and release: map, unmap" : "acquire and release: the slot is there", NULL,
            use_of_nothing);
    measure(b, "acquire and release: a new slot", slots_lose, use_of_nothing);
}

static void run_with(bench *b, fcdp_host *host, const fcdp_layout *layout, bool exact) {
    fcdp_tiering *tiering;
    fcdp_host_block *block;
    uint64_t offset;
    b->exact = exact;
    check(fcdp__pool_create(b->drv, b->bytes + PAGE, &b->pool));
    check(fcdp__tiering_create(b->drv, b->pool, &(fcdp_tiering_config){.exact = exact}, &tiering));
    check(fcdp__host_block_alloc(host, layout->bytes, &offset));
    check(fcdp__host_attach(host, offset, layout->bytes, NULL, &block));
    check(fcdp__region_create(tiering, "bench", layout, 0, block, &b->region));
    b->host = fcdp__host_data(block);
    printf("%s mapping\n", exact ? "exact" : "slots");
    run(b);
    fcdp__region_destroy(b->region);
    fcdp__host_detach(block);
    fcdp__host_block_free(host, offset);
    fcdp__tiering_destroy(tiering);
    fcdp__pool_destroy(b->pool);
}

int main(int argc, char **argv) {
    fcdp_options options;
    fcdp_host *host;
    fcdp_shared_ticket ticket;
    fcdp_layout *layout;
    fcdp_account *account;
    bench b = {.bytes = (size_t)(argc > 1 ? atoi(argv[1]) : 256) << 20,
               .n_rounds = argc > 2 ? atoi(argv[2]) : 10};
    if (!b.bytes || b.n_rounds < 1 || b.n_rounds > MAX_ROUNDS)
        return fprintf(stderr, "usage: %s [MiB] [rounds, up to %d]\n", argv[0], MAX_ROUNDS), 2;
    b.other = malloc(b.bytes);
    if (!b.other) return 1;
    memset(b.other, 1, b.bytes);
    check(fcdp_options_load(environ, &options));
    check(fcdp__driver_open(options.driver, 0, NULL, &b.drv));
    check(fcdp__driver_stream_create(b.drv, &b.stream));
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
    printf("%s driver, %zu MiB, %d rounds\n", fcdp__driver_is_sim(b.drv) ? "simulated" : "CUDA",
           b.bytes >> 20, b.n_rounds);
    for (int exact = 0; exact < 2; exact++) run_with(&b, host, layout, exact);
    fcdp__layout_destroy(layout);
    free(b.other);
    fcdp__host_destroy(host);
    fcdp__account_destroy(account);
    fcdp__driver_stream_destroy(b.drv, b.stream);
    fcdp__driver_close(b.drv);
    return 0;
}
