/* bench_copies - how fast host memory such as FCDP's is page-locked, and how fast it is copied to the device,
 * from it, and both at once, on the driver that FCDP_DRIVER chooses.
 *
 * Usage: bench_copies [MIB, default 1024] [ROUNDS, default 5]. One figure a line, "NAME = VALUE UNIT",
 * medians; GB = 1e9 bytes; a rate of both at once counts both ways.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "alloc/driver.h"
#include "base/options.h"

extern char **environ;
enum { MIB = 1 << 20, MAX_ROUNDS = 100 };

typedef enum way { H2D = 1, D2H = 2, BOTH = 3 } way;

typedef struct bench {
    fcdp_driver *drv;
    size_t bytes; /* of each way */
    int n_rounds;
    char *host[2]; /* what goes up, and where to what comes down */
    fcdp_dptr device[2];
    fcdp_phys handles[2];
    fcdp_stream streams[2];
} bench;

static void must(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench_copies: %s\n", fcdp_error_text());
    exit(1);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, size_t bytes, uint64_t *ns, int n) {
    qsort(ns, (size_t)n, sizeof *ns, by_value);
    printf("%s = %.3f GB/s\n", name, (double)bytes / (double)ns[n / 2]);
    fflush(stdout);
}

/* As FCDP's host memory is: a memfd's, shared. */
static char *host_map(size_t bytes) {
    int fd = memfd_create("bench_copies", MFD_CLOEXEC);
    void *at = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0
                   ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                   : MAP_FAILED;
    if (at == MAP_FAILED) {
        perror("bench_copies: host memory");
        exit(1);
    }
    close(fd);
    return at;
}

/* It creates untouched pages, and only locks pages that are there. */
static void pin_measure(const bench *b) {
    uint64_t ns[2][MAX_ROUNDS];
    int n_rounds = b->n_rounds < 3 ? b->n_rounds : 3; /* a second each */
    for (int round = 0; round < n_rounds; round++)
        for (int touched = 0; touched < 2; touched++) {
            char *at = host_map(b->bytes);
            if (touched) memset(at, 1, b->bytes);
            uint64_t begin_ns = fcdp__now_ns();
            must(fcdp__driver_host_pin(b->drv, at, b->bytes, &(size_t){0}));
            ns[touched][round] = fcdp__now_ns() - begin_ns;
            must(fcdp__driver_host_unpin(b->drv, at, b->bytes, &(size_t){0}));
            munmap(at, b->bytes);
        }
    print("page-locking memory that is there", b->bytes, ns[1], n_rounds);
    print("page-locking memory that was not touched", b->bytes, ns[0], n_rounds);
}

/* All bytes in copies of `each`, one behind the other on a stream of each way. */
static void copies_run(const bench *b, way which, size_t each) {
    for (size_t at = 0; at < b->bytes; at += each) {
        if (which & H2D)
            must(fcdp__driver_copy_h2d(b->drv, fcdp__dptr_add(b->device[0], at), b->host[0] + at, each,
                                       b->streams[0]));
        if (which & D2H)
            must(fcdp__driver_copy_d2h(b->drv, b->host[1] + at, fcdp__dptr_add(b->device[1], at), each,
                                       b->streams[1]));
    }
    for (int i = 0; i < 2; i++) must(fcdp__driver_stream_sync(b->drv, b->streams[i]));
}

static void copies_measure(const bench *b, const char *memory, size_t each) {
    static const struct {
        way which;
        const char *name;
    } ways[] = {{H2D, "to the device"}, {D2H, "to the host"}, {BOTH, "both at once"}};
    for (size_t w = 0; w < 3; w++) {
        uint64_t ns[MAX_ROUNDS];
        char name[96];
        copies_run(b, ways[w].which, each);
        for (int round = 0; round < b->n_rounds; round++) {
            uint64_t begin_ns = fcdp__now_ns();
            copies_run(b, ways[w].which, each);
            ns[round] = fcdp__now_ns() - begin_ns;
        }
        snprintf(name, sizeof name, "%s, copies of %zu MiB, %s", memory, each / MIB, ways[w].name);
        print(name, b->bytes * (ways[w].which == BOTH ? 2 : 1), ns, b->n_rounds);
    }
}

static void bench_open(bench *b) {
    for (int i = 0; i < 2; i++) {
        b->host[i] = host_map(b->bytes);
        memset(b->host[i], i + 1, b->bytes);
        must(fcdp__driver_range_reserve(b->drv, b->bytes, &b->device[i]));
        must(fcdp__driver_phys_create(b->drv, b->bytes, &b->handles[i]));
        must(fcdp__driver_map(b->drv, b->device[i], b->bytes, b->handles[i]));
        must(fcdp__driver_set_access(b->drv, b->device[i], b->bytes));
        must(fcdp__driver_stream_create(b->drv, &b->streams[i]));
    }
}

static void bench_close(bench *b) {
    for (int i = 0; i < 2; i++) {
        fcdp__driver_stream_destroy(b->drv, b->streams[i]);
        must(fcdp__driver_unmap(b->drv, b->device[i], b->bytes));
        must(fcdp__driver_phys_release(b->drv, b->handles[i]));
        must(fcdp__driver_range_free(b->drv, b->device[i], b->bytes));
        munmap(b->host[i], b->bytes);
    }
}

int main(int argc, char **argv) {
    static const size_t sizes_mib[] = {2, 16, 64, 256};
    bench b = {.bytes = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1024) * MIB,
               .n_rounds = argc > 2 ? atoi(argv[2]) : 5};
    fcdp_options options;
    if (!b.bytes || b.n_rounds < 1 || b.n_rounds > MAX_ROUNDS)
        return fprintf(stderr, "usage: %s [MIB] [ROUNDS, up to %d]\n", argv[0], MAX_ROUNDS), 2;
    must(fcdp_options_load(environ, &options));
    must(fcdp__driver_open(options.driver, 0, NULL, &b.drv));
    printf("%s driver, %zu MiB, medians of %d rounds\n", fcdp__driver_is_sim(b.drv) ? "simulated" : "CUDA",
           b.bytes / MIB, b.n_rounds);
    bench_open(&b);
    copies_measure(&b, "pageable", b.bytes); /* before it is locked */
    pin_measure(&b);
    for (int i = 0; i < 2; i++) must(fcdp__driver_host_pin(b.drv, b.host[i], b.bytes, &(size_t){0}));
    for (size_t i = 0; i < sizeof sizes_mib / sizeof *sizes_mib; i++)
        if (b.bytes % (sizes_mib[i] * MIB) == 0) copies_measure(&b, "page-locked", sizes_mib[i] * MIB);
    for (int i = 0; i < 2; i++) must(fcdp__driver_host_unpin(b.drv, b.host[i], b.bytes, &(size_t){0}));
    bench_close(&b);
    fcdp__driver_close(b.drv);
    return 0;
}
