/* bench_host_map - how fast the device reads host memory that is mapped at its addresses (FCDP_HOST_MAP),
 * beside device memory, on the driver that FCDP_DRIVER chooses: all of it, rows of it as an embedding's
 * lookup reads them, and by a copy.
 *
 * Usage: bench_host_map [MIB, default 1024] [ROUNDS, default 5]. One figure a line, "NAME = VALUE UNIT",
 * medians; GB = 1e9 bytes; the reader is the kernel of fingerprints. Where the system does not offer such
 * memory, one line says "refused: " and why; that is no failure.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/options.h"
#include "comm/fingerprint.h"

extern char **environ;
enum { MIB = 1 << 20, MAX_ROUNDS = 100, N_ROWS = 4096, ROW_BYTES = 8192 };

typedef enum place { ON_DEVICE, ON_HOST, N_PLACES } place;
static const char *const names[N_PLACES] = {"device memory", "host memory, mapped"};

typedef struct bench {
    fcdp_driver *drv;
    fcdp_stream stream;
    fcdp_fingerprints *reader;
    size_t bytes;
    int n_rounds;
    fcdp_phys pages[N_PLACES];
    fcdp_dptr at[N_PLACES];
} bench;

static void must(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench_host_map: %s\n", fcdp_error_text());
    exit(1);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void print(place place, const char *what, size_t bytes, uint64_t *ns, int n) {
    qsort(ns, (size_t)n, sizeof *ns, by_value);
    printf("%s: %s = %.3f GB/s\n", names[place], what, (double)bytes / (double)ns[n / 2]);
    fflush(stdout);
}

static void kernel_measure(const bench *b, place place, const char *what, const uint64_t *arrays,
                           const size_t *bytes, size_t n) {
    uint64_t ns[MAX_ROUNDS], said[N_ROWS];
    size_t total = 0;
    for (size_t i = 0; i < n; i++) total += bytes[i];
    for (int round = -1; round < b->n_rounds; round++) { /* the first one warms up */
        uint64_t begin_ns = fcdp__now_ns();
        must(fcdp__fingerprints_begin(b->reader, arrays, bytes, n, b->stream));
        must(fcdp__fingerprints_end(b->reader, said));
        if (round >= 0) ns[round] = fcdp__now_ns() - begin_ns;
    }
    print(place, what, total, ns, b->n_rounds);
}

/* Rows far from each other, in no order. */
static void rows_measure(const bench *b, place place) {
    uint64_t arrays[N_ROWS];
    size_t bytes[N_ROWS], n_rows = b->bytes / ROW_BYTES;
    for (size_t i = 0; i < N_ROWS; i++) {
        arrays[i] = b->at[place].addr + i * 2654435761u % n_rows * ROW_BYTES;
        bytes[i] = ROW_BYTES;
    }
    kernel_measure(b, place, "4096 rows of 8 KiB read by a kernel", arrays, bytes, N_ROWS);
}

static void copy_measure(const bench *b) {
    uint64_t ns[MAX_ROUNDS];
    for (int round = -1; round < b->n_rounds; round++) {
        uint64_t begin_ns = fcdp__now_ns();
        must(fcdp__driver_copy_d2d(b->drv, b->at[ON_DEVICE], b->at[ON_HOST], b->bytes, b->stream));
        must(fcdp__driver_stream_sync(b->drv, b->stream));
        if (round >= 0) ns[round] = fcdp__now_ns() - begin_ns;
    }
    print(ON_HOST, "copied to device memory", b->bytes, ns, b->n_rounds);
}

/* Map `place`'s pages, which are there. */
static fcdp_status place_map(bench *b, place place) {
    must(fcdp__driver_range_reserve(b->drv, b->bytes, &b->at[place]));
    fcdp_status status = fcdp__driver_map(b->drv, b->at[place], b->bytes, b->pages[place]);
    if (status) return status;
    status = fcdp__driver_set_access(b->drv, b->at[place], b->bytes);
    if (status && fcdp__driver_unmap(b->drv, b->at[place], b->bytes)) return FCDP_ERR_DRIVER;
    return status;
}

static void place_unmap(const bench *b, place place) {
    must(fcdp__driver_unmap(b->drv, b->at[place], b->bytes));
    must(fcdp__driver_phys_release(b->drv, b->pages[place]));
    must(fcdp__driver_range_free(b->drv, b->at[place], b->bytes));
}

static void place_measure(const bench *b, place place) {
    kernel_measure(b, place, "all of it read by a kernel", &b->at[place].addr, &b->bytes, 1);
    rows_measure(b, place);
}

int main(int argc, char **argv) {
    fcdp_options options;
    bench b = {.bytes = (size_t)(argc > 1 ? atoi(argv[1]) : 1024) * MIB,
               .n_rounds = argc > 2 ? atoi(argv[2]) : 5};
    if (b.bytes < N_ROWS * (size_t)ROW_BYTES || b.n_rounds < 1 || b.n_rounds > MAX_ROUNDS)
        return fprintf(stderr, "usage: %s [MIB, from 32] [ROUNDS, up to %d]\n", argv[0], MAX_ROUNDS), 2;
    must(fcdp_options_load(environ, &options));
    must(fcdp__driver_open(options.driver, 0, NULL, &b.drv));
    must(fcdp__driver_stream_create(b.drv, &b.stream));
    must(fcdp__fingerprints_create(b.drv, &b.reader));
    must(fcdp__driver_phys_create(b.drv, b.bytes, &b.pages[ON_DEVICE]));
    must(place_map(&b, ON_DEVICE));
    place_measure(&b, ON_DEVICE);
    int node = fcdp__driver_numa_node(b.drv);
    fcdp_status status = fcdp__driver_phys_create_host(b.drv, node < 0 ? 0 : node, b.bytes,
                                                       &b.pages[ON_HOST]);
    if (!status) status = place_map(&b, ON_HOST);
    if (status) {
        printf("refused: %s\n", fcdp_error_text());
        return 0; /* the driver takes back what is left */
    }
    place_measure(&b, ON_HOST);
    copy_measure(&b);
    fcdp__fingerprints_destroy(b.reader);
    for (int i = 0; i < N_PLACES; i++) place_unmap(&b, (place)i);
    fcdp__driver_stream_destroy(b.drv, b.stream);
    fcdp__driver_close(b.drv);
    return 0;
}
