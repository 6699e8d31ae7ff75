/* bench_mapping - what physical handles cost by their size, on the driver that FCDP_DRIVER chooses: create,
 * map, set-access, unmap, release, each handle by itself and many in one call; beside running kernels; and
 * mapped at several addresses.
 *
 * Usage: bench_mapping [MIB, default 1024] [ROUNDS, default 5]. Each size takes all of MIB in handles of that
 * size. One figure a line, "NAME = VALUE UNIT": medians of the rounds, per handle. "worst": the longest
 * single call of all rounds.
 *
 * The kernel that runs beside is the fingerprint's. It reads memory of its own, as does the one that reads
 * through the mappings.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/options.h"
#include "comm/fingerprint.h"

extern char **environ;
enum { MIB = 1 << 20, BUSY_MIB = 256, N_ALIASES = 3, MAX_ROUNDS = 100 };

typedef enum kind {
    CREATE,
    MAP,
    ACCESS_EACH,
    UNMAP_EACH,
    ACCESS_ALL,
    UNMAP_ALL,
    RELEASE,
    ALIAS_MAP,
    ALIAS_ACCESS_ALL,
    ALIAS_UNMAP_ALL,
    N_KINDS
} kind;
static const char *const KIND[N_KINDS] = {"create",
                                          "map",
                                          "set-access, each",
                                          "unmap, each",
                                          "set-access, all in one call",
                                          "unmap, all in one call",
                                          "release",
                                          "alias: map",
                                          "alias: set-access, all in one call",
                                          "alias: unmap, all in one call"};

static void must(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench_mapping: %s\n", fcdp_error_text());
    exit(1);
}

/* ---- memory, and a kernel that reads it ---- */

typedef struct range {
    fcdp_driver *drv;
    fcdp_dptr base;
    fcdp_phys *handles;
    size_t n, each; /* handles, and the bytes of each */
} range;

static fcdp_dptr place(const range *r, size_t i) {
    return fcdp__dptr_add(r->base, i * r->each);
}

typedef struct reader {
    fcdp_fingerprints *prints;
    uint64_t array;
    size_t bytes;
    fcdp_stream stream;
} reader;

static void reader_begin(const reader *of) {
    must(fcdp__fingerprints_begin(of->prints, &of->array, &of->bytes, 1, of->stream));
}

static uint64_t reader_end(const reader *of) {
    uint64_t said;
    must(fcdp__fingerprints_end(of->prints, &said));
    return said;
}

/* ---- kernels beside: two under way at any time, so that the device never idles ---- */

typedef struct busy {
    fcdp_driver *drv;
    range memory;
    fcdp_phys handle;
    reader readers[2];
    pthread_t thread;
    atomic_bool stop;
    atomic_ulong n_done;
} busy;

static void *busy_main(void *arg) {
    busy *b = arg;
    for (int i = 0; i < 2; i++) reader_begin(&b->readers[i]);
    for (unsigned i = 0; !atomic_load(&b->stop); i++) {
        reader_end(&b->readers[i % 2]);
        atomic_fetch_add(&b->n_done, 1);
        reader_begin(&b->readers[i % 2]);
    }
    for (int i = 0; i < 2; i++) reader_end(&b->readers[i]);
    return NULL;
}

static void busy_start(busy *b, fcdp_driver *drv, size_t bytes) {
    b->drv = drv;
    b->memory = (range){drv, {0}, &b->handle, 1, bytes};
    must(fcdp__driver_range_reserve(drv, bytes, &b->memory.base));
    must(fcdp__driver_phys_create(drv, bytes, &b->handle));
    must(fcdp__driver_map(drv, b->memory.base, bytes, b->handle));
    must(fcdp__driver_set_access(drv, b->memory.base, bytes));
    fcdp_stream stream;
    must(fcdp__driver_stream_create(drv, &stream));
    for (int i = 0; i < 2; i++) {
        b->readers[i] = (reader){NULL, b->memory.base.addr, bytes, stream};
        must(fcdp__fingerprints_create(drv, &b->readers[i].prints));
    }
    atomic_store(&b->stop, false);
    atomic_store(&b->n_done, 0);
    if (pthread_create(&b->thread, NULL, busy_main, b)) exit(1);
    /* they run; where they fail, the thread ends the process */
    while (atomic_load(&b->n_done) < 3) sched_yield();
}

static void busy_stop(busy *b) {
    atomic_store(&b->stop, true);
    pthread_join(b->thread, NULL);
    for (int i = 0; i < 2; i++) fcdp__fingerprints_destroy(b->readers[i].prints);
    fcdp__driver_stream_destroy(b->drv, b->readers[0].stream);
    must(fcdp__driver_unmap(b->drv, b->memory.base, b->memory.each));
    must(fcdp__driver_phys_release(b->drv, b->handle));
    must(fcdp__driver_range_free(b->drv, b->memory.base, b->memory.each));
}

/* ---- measuring ---- */

typedef struct times {
    uint64_t total_ns[N_KINDS][MAX_ROUNDS], worst_ns[N_KINDS];
    uint64_t read_ns[2][MAX_ROUNDS]; /* through the first address, through an alias */
    bool refused[N_KINDS];           /* a call for all that the driver does not take */
} times;

static void note(times *t, kind k, int round, uint64_t begin_ns) {
    uint64_t ns = fcdp__now_ns() - begin_ns;
    t->total_ns[k][round] += ns;
    if (ns > t->worst_ns[k]) t->worst_ns[k] = ns;
}

#define TIMED(k, call)                                                                                       \
    do {                                                                                                     \
        uint64_t begin_ns_ = fcdp__now_ns();                                                                 \
        must(call);                                                                                          \
        note(t, k, round, begin_ns_);                                                                        \
    } while (0)

/* In one call; where the driver takes none, each by itself, and that is said. */
static void unmap_all(const range *r, times *t, kind k, int round) {
    uint64_t begin_ns = fcdp__now_ns();
    if (!t->refused[k] && fcdp__driver_unmap(r->drv, r->base, r->n * r->each) == FCDP_OK) {
        note(t, k, round, begin_ns);
        return;
    }
    if (!t->refused[k])
        fprintf(stderr, "one unmap of %zu handles of %zu bytes: %s\n", r->n, r->each, fcdp_error_text());
    t->refused[k] = true;
    for (size_t i = 0; i < r->n; i++) must(fcdp__driver_unmap(r->drv, place(r, i), r->each));
}

static void map_each(const range *r, times *t, kind k, int round) {
    for (size_t i = 0; i < r->n; i++) TIMED(k, fcdp__driver_map(r->drv, place(r, i), r->each, r->handles[i]));
}

static uint64_t read_time(const reader *of, uint64_t *said) {
    uint64_t begin_ns = fcdp__now_ns();
    reader_begin(of);
    *said = reader_end(of);
    return fcdp__now_ns() - begin_ns;
}

/* The handles at one more address each time; a kernel reads the same
 * through the last one as through the first. */
static void aliases_round(const range *first, const reader *read, times *t, int round) {
    range aliases[N_ALIASES];
    reader through = *read;
    uint64_t said, again;
    (void)read_time(read, &said); /* warm */
    t->read_ns[0][round] = read_time(read, &said);
    for (int a = 0; a < N_ALIASES; a++) {
        aliases[a] = *first;
        must(fcdp__driver_range_reserve(first->drv, first->n * first->each, &aliases[a].base));
        map_each(&aliases[a], t, ALIAS_MAP, round);
        TIMED(ALIAS_ACCESS_ALL, fcdp__driver_set_access(first->drv, aliases[a].base, first->n * first->each));
    }
    through.array = aliases[N_ALIASES - 1].base.addr;
    (void)read_time(&through, &again);
    t->read_ns[1][round] = read_time(&through, &again);
    if (said != again) {
        fprintf(stderr, "bench_mapping: a kernel reads other bytes through an alias\n");
        exit(1);
    }
    for (int a = 0; a < N_ALIASES; a++) {
        unmap_all(&aliases[a], t, ALIAS_UNMAP_ALL, round);
        must(fcdp__driver_range_free(first->drv, aliases[a].base, first->n * first->each));
    }
}

static void size_round(range *r, const reader *read, times *t, int round) {
    fcdp_driver *drv = r->drv;
    for (size_t i = 0; i < r->n; i++) TIMED(CREATE, fcdp__driver_phys_create(drv, r->each, &r->handles[i]));
    map_each(r, t, MAP, round);
    for (size_t i = 0; i < r->n; i++) TIMED(ACCESS_EACH, fcdp__driver_set_access(drv, place(r, i), r->each));
    for (size_t i = 0; i < r->n; i++) TIMED(UNMAP_EACH, fcdp__driver_unmap(drv, place(r, i), r->each));
    map_each(r, t, MAP, round);
    TIMED(ACCESS_ALL, fcdp__driver_set_access(drv, r->base, r->n * r->each));
    aliases_round(r, read, t, round);
    unmap_all(r, t, UNMAP_ALL, round);
    for (size_t i = 0; i < r->n; i++) TIMED(RELEASE, fcdp__driver_phys_release(drv, r->handles[i]));
}

/* ---- printing ---- */

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double median_us(uint64_t *ns, int n) {
    qsort(ns, (size_t)n, sizeof *ns, by_value);
    return (double)ns[n / 2] / 1e3;
}

/* How often a round does it to each handle. */
static size_t times_a_round(kind k) {
    return k == MAP ? 2 : k >= ALIAS_MAP ? N_ALIASES : 1;
}

static void print(const range *r, times *t, int n_rounds, const char *beside) {
    for (int k = 0; k < N_KINDS; k++) {
        if (t->refused[k]) continue;
        double us = median_us(t->total_ns[k], n_rounds) / (double)(r->n * times_a_round((kind)k));
        printf("%zu MiB, %s, %s = %.2f us, worst %.2f us\n", r->each / MIB, beside, KIND[k], us,
               (double)t->worst_ns[k] / 1e3);
    }
    for (int alias = 0; alias < 2; alias++)
        printf("%zu MiB, %s, a kernel reads through %s = %.1f GB/s\n", r->each / MIB, beside,
               alias ? "the fourth address" : "one address",
               (double)(r->n * r->each) / median_us(t->read_ns[alias], n_rounds) / 1e3);
    fflush(stdout);
}

static void size_measure(fcdp_driver *drv, size_t each, size_t total, int n_rounds, busy *kernels) {
    times *t = calloc(1, sizeof *t);
    range r = {
        .drv = drv, .n = total / each, .each = each, .handles = calloc(total / each, sizeof(fcdp_phys))};
    reader read = {.bytes = total};
    if (!t || !r.handles) exit(1);
    must(fcdp__driver_range_reserve(drv, total, &r.base));
    must(fcdp__driver_stream_create(drv, &read.stream));
    must(fcdp__fingerprints_create(drv, &read.prints));
    read.array = r.base.addr;
    unsigned long before = kernels ? atomic_load(&kernels->n_done) : 0;
    uint64_t begin_ns = fcdp__now_ns();
    for (int round = 0; round < n_rounds; round++) size_round(&r, &read, t, round);
    double took_s = (double)(fcdp__now_ns() - begin_ns) / 1e9;
    print(&r, t, n_rounds, kernels ? "beside kernels" : "idle");
    if (kernels)
        printf("%zu MiB, kernels that ran meanwhile = %.1f 1/s\n", each / MIB,
               (double)(atomic_load(&kernels->n_done) - before) / took_s);
    fcdp__fingerprints_destroy(read.prints);
    fcdp__driver_stream_destroy(drv, read.stream);
    must(fcdp__driver_range_free(drv, r.base, total));
    free(r.handles);
    free(t);
}

/* What the kernels come to with nothing beside them. */
static void kernels_alone(busy *kernels) {
    unsigned long before = atomic_load(&kernels->n_done);
    uint64_t begin_ns = fcdp__now_ns();
    nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
    printf("kernels with nothing beside them = %.1f 1/s\n",
           (double)(atomic_load(&kernels->n_done) - before) / ((double)(fcdp__now_ns() - begin_ns) / 1e9));
}

int main(int argc, char **argv) {
    static const size_t sizes_mib[] = {2, 8, 32, 128, 512, 1024};
    size_t total = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1024) * MIB;
    int n_rounds = argc > 2 ? atoi(argv[2]) : 5;
    fcdp_options options;
    fcdp_driver *drv;
    busy kernels;
    if (total < 2 * MIB || n_rounds < 1 || n_rounds > MAX_ROUNDS)
        return fprintf(stderr, "usage: %s [MIB] [ROUNDS, up to %d]\n", argv[0], MAX_ROUNDS), 2;
    must(fcdp_options_load(environ, &options));
    must(fcdp__driver_open(options.driver, 0, NULL, &drv));
    printf("%s driver, %zu MiB, medians of %d rounds, per handle\n",
           fcdp__driver_is_sim(drv) ? "simulated" : "CUDA", total / MIB, n_rounds);
    for (int beside = 0; beside < 2; beside++) {
        if (beside)
            busy_start(&kernels, drv, total < BUSY_MIB * (size_t)MIB ? total : BUSY_MIB * (size_t)MIB);
        if (beside) kernels_alone(&kernels);
        for (size_t i = 0; i < sizeof sizes_mib / sizeof *sizes_mib; i++)
            if (total % (sizes_mib[i] * MIB) == 0)
                size_measure(drv, sizes_mib[i] * MIB, total, n_rounds, beside ? &kernels : NULL);
        if (beside) busy_stop(&kernels);
    }
    fcdp__driver_close(drv);
    return 0;
}
