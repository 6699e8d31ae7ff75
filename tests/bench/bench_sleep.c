/* bench_sleep - how fast tensors leave the device and come back (fcdp_heap_sleep, _wake), beside one plain
 * copy of as many bytes from and to page-locked memory, on the driver that FCDP_DRIVER chooses.
 *
 * Usage: bench_sleep [MIB, default 1024] [ROUNDS, default 5]. One figure a line, "NAME = VALUE UNIT",
 * medians; GB = 1e9 live bytes. "nothing has changed": a sleep behind another, which compares by the
 * fingerprint's kernel, and copies nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "alloc/heap.h"
#include "comm/fingerprint.h"

extern char **environ;
enum { MIB = 1 << 20, MAX_ROUNDS = 100, MAX_BLOCKS = 4096 };

typedef enum what { PLAIN_DOWN, PLAIN_UP, SLEEP, WAKE, SLEEP_UNCHANGED, N_WHATS } what;
static const char *const names[N_WHATS] = {"a plain copy to the host", "a plain copy to the device", "sleep",
                                           "wake", "sleep, nothing has changed"};

typedef struct bench {
    fcdp_device device;
    size_t bytes;
    fcdp_dptr blocks[MAX_BLOCKS]; /* the first is the plain copies' */
    size_t sizes[MAX_BLOCKS], n_blocks;
    char *host;
    fcdp_stream stream;
} bench;

static void must(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench_sleep: %s\n", fcdp_error_text());
    exit(1);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* As a model's state: large blocks, smaller ones, and many of a few kilobytes. */
static void blocks_make(bench *b) {
    static const size_t sizes[] = {96 * MIB, 11 * MIB + 512, 3 * MIB, 300 << 10, 8 << 10, 4 << 10, 512};
    size_t left = b->bytes;
    for (size_t i = 0; left >= 512 && b->n_blocks < MAX_BLOCKS; i++) {
        size_t bytes = sizes[i % (sizeof sizes / sizeof *sizes)];
        bytes = bytes < left ? bytes : left;
        must(fcdp_heap_malloc(b->device.heap, bytes, b->stream, &b->blocks[b->n_blocks]));
        b->sizes[b->n_blocks++] = bytes;
        left -= bytes;
    }
    b->bytes -= left;
}

/* All bytes in one stream; the host's memory is as large as the largest block. */
static double plain_copy(const bench *b, bool to_host) {
    uint64_t begin_ns = fcdp__now_ns();
    for (size_t done = 0, run; done < b->bytes; done += run) {
        run = b->bytes - done < b->sizes[0] ? b->bytes - done : b->sizes[0];
        must(to_host ? fcdp__driver_copy_d2h(b->device.drv, b->host, b->blocks[0], run, b->stream)
                     : fcdp__driver_copy_h2d(b->device.drv, b->blocks[0], b->host, run, b->stream));
    }
    must(fcdp__driver_stream_sync(b->device.drv, b->stream));
    return (double)(fcdp__now_ns() - begin_ns);
}

static void round_measure(const bench *b, double ns[N_WHATS]) {
    const fcdp_sleep_of all = {.all = true};
    fcdp_sleep_counts counts;
    ns[PLAIN_DOWN] = plain_copy(b, true);
    ns[PLAIN_UP] = plain_copy(b, false);
    uint64_t begin_ns = fcdp__now_ns();
    must(fcdp_heap_sleep(b->device.heap, &all, NULL, NULL, &counts));
    ns[SLEEP] = (double)(fcdp__now_ns() - begin_ns);
    begin_ns = fcdp__now_ns();
    must(fcdp_heap_wake(b->device.heap, &all, true, &counts));
    ns[WAKE] = (double)(fcdp__now_ns() - begin_ns);
    must(fcdp_heap_sleep(b->device.heap, &all, fcdp_fingerprints_of, b->device.drv, &counts));
    must(fcdp_heap_wake(b->device.heap, &all, true, &counts));
    begin_ns = fcdp__now_ns();
    must(fcdp_heap_sleep(b->device.heap, &all, fcdp_fingerprints_of, b->device.drv, &counts));
    ns[SLEEP_UNCHANGED] = (double)(fcdp__now_ns() - begin_ns);
    must(fcdp_heap_wake(b->device.heap, &all, true, &counts));
    if (counts.live_bytes != counts.copied_bytes) must(fcdp__fail(FCDP_ERR_INVALID, "not all came back"));
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return values[n / 2];
}

int main(int argc, char **argv) {
    bench b = {.bytes = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1024) * MIB};
    int n_rounds = argc > 2 ? atoi(argv[2]) : 5;
    double ns[N_WHATS][MAX_ROUNDS], one[N_WHATS];
    fcdp_options options;
    if (!b.bytes || n_rounds < 1 || n_rounds > MAX_ROUNDS)
        return fprintf(stderr, "usage: %s [MIB] [ROUNDS, up to %d]\n", argv[0], MAX_ROUNDS), 2;
    must(fcdp_options_load(environ, &options));
    must(fcdp_device_open(options.driver, 0, NULL, 0, 0, true, &b.device));
    must(fcdp__driver_stream_create(b.device.drv, &b.stream));
    blocks_make(&b);
    b.host = mmap(NULL, b.sizes[0], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.host == MAP_FAILED) return perror("bench_sleep: host memory"), 1;
    must(fcdp__driver_host_pin(b.device.drv, b.host, b.sizes[0], &(size_t){0}));
    printf("%s driver, %zu MiB in %zu blocks, medians of %d rounds\n",
           fcdp__driver_is_sim(b.device.drv) ? "simulated" : "CUDA", b.bytes / MIB, b.n_blocks, n_rounds);
    round_measure(&b, one); /* host memory is taken */
    for (int round = 0; round < n_rounds; round++) {
        round_measure(&b, one);
        for (int w = 0; w < N_WHATS; w++) ns[w][round] = one[w];
    }
    for (int w = 0; w < N_WHATS; w++) {
        one[w] = median(ns[w], n_rounds);
        printf("%s = %.3f GB/s\n", names[w], (double)b.bytes / one[w]);
    }
    printf("sleep over a plain copy = %.3f share\n", one[PLAIN_DOWN] / one[SLEEP]);
    printf("wake over a plain copy = %.3f share\n", one[PLAIN_UP] / one[WAKE]);
    for (size_t i = 0; i < b.n_blocks; i++) must(fcdp_heap_free(b.device.heap, b.blocks[i]));
    must(fcdp__driver_host_unpin(b.device.drv, b.host, b.sizes[0], &(size_t){0}));
    munmap(b.host, b.sizes[0]);
    fcdp_heap_destroy(b.device.heap);
    b.device.heap = NULL;
    fcdp__driver_stream_destroy(b.device.drv, b.stream);
    fcdp_device_close(&b.device);
    return 0;
}
