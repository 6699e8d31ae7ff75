/* replay.c - fcdp-replay: recorded allocations of training runs into FCDP's allocator and into models of
 * PyTorch's own.
 *
 * A trace (record.py): lines `SIZE STREAM` and `-NUMBER`, gzipped. Everything runs on the driver that
 * FCDP_DRIVER names. Peak live is of sizes rounded to 512 bytes, which all three allocators do; the ratio is
 * peak reserved over that, rounded up to whole pages.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/heap.h"
#include "alloc/options.h"
#include "tools/replay/torch_model.h"

extern char **environ;

enum { MIB = 1 << 20, N_TIMED = 5 };

typedef struct event {
    size_t bytes;    /* 0: the free of `number` */
    uint32_t number; /* or the stream */
} event;

typedef struct trace {
    char name[64];
    event *events;
    size_t n, n_mallocs, peak_live;
    unsigned n_streams;
} trace;

typedef struct outcome {
    size_t reserved;
    unsigned long n_calls;
    double ns; /* per event, 0: not known */
} outcome;

static void die(const char *what, const char *detail) {
    fprintf(stderr, "fcdp-replay: %s: %s\n", what, detail);
    exit(1);
}

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        if (call) die(#call, fcdp_error_text());                                                             \
    } while (0)

/* ---- traces ---- */

static void *grow(void *items, size_t n, size_t each) {
    if (n & (n - 1)) return items; /* not a power of two: there is room */
    items = realloc(items, (n ? 2 * n : 1) * each);
    if (!items) die("reading", "no memory");
    return items;
}

static void trace_name(trace *t, const char *path) {
    const char *base = strrchr(path, '/');
    snprintf(t->name, sizeof t->name, "%s", base ? base + 1 : path);
    t->name[strcspn(t->name, ".")] = '\0';
}

static void trace_read(trace *t, const char *path) {
    char command[4096], line[256];
    if (strchr(path, '\'')) die(path, "a quote in a path is not supported");
    snprintf(command, sizeof command, "gzip -dcf -- '%s'", path);
    FILE *in = popen(command, "r");
    if (!in) die(path, "gzip cannot be started");
    while (fgets(line, sizeof line, in)) {
        unsigned long long a = 0;
        unsigned stream = 0;
        if (line[0] == '#') continue;
        t->events = grow(t->events, t->n, sizeof *t->events);
        if (sscanf(line, "-%llu", &a) == 1 && a < t->n_mallocs)
            t->events[t->n++] = (event){0, (uint32_t)a};
        else if (line[0] != '-' && sscanf(line, "%llu %u", &a, &stream) == 2 && a > 0)
            t->events[t->n++] = (event){a, stream}, t->n_mallocs++;
        else
            die(path, "not a trace of record.py");
        if (t->events[t->n - 1].bytes && stream >= t->n_streams) t->n_streams = stream + 1;
    }
    if (pclose(in) || t->n == 0) die(path, "cannot be read, or is empty");
    trace_name(t, path);
}

static void trace_measure(trace *t) {
    size_t *sizes = calloc(t->n_mallocs, sizeof *sizes), live = 0, k = 0;
    for (size_t i = 0; i < t->n; i++) {
        if (t->events[i].bytes)
            live += sizes[k++] = fcdp__round_up(t->events[i].bytes, FCDP_ARENA_UNIT);
        else
            live -= sizes[t->events[i].number];
        if (live > t->peak_live) t->peak_live = live;
    }
    free(sizes);
}

/* ---- replays ---- */

static outcome run_torch(const trace *t, bool expandable) {
    torch_model *model = torch_model_create(expandable);
    torch_block **blocks = calloc(t->n_mallocs, sizeof *blocks);
    size_t k = 0;
    for (size_t i = 0; i < t->n; i++) {
        const event *e = &t->events[i];
        if (e->bytes)
            blocks[k++] = torch_model_malloc(model, e->bytes, e->number);
        else
            torch_model_free(model, blocks[e->number]);
    }
    outcome result = {torch_model_reserved(model), torch_model_driver_calls(model), 0};
    free(blocks);
    torch_model_destroy(model);
    return result;
}

typedef struct machine {
    fcdp_driver *drv;
    fcdp_stream streams[8];
} machine;

static outcome run_fcdp(const trace *t, const machine *m) {
    fcdp_pool *pool;
    fcdp_heap *heap;
    fcdp_heap_stats stats;
    fcdp_dptr *at = calloc(t->n_mallocs, sizeof *at);
    size_t k = 0;
    MUST(fcdp__pool_create(m->drv, 0, &pool));
    MUST(fcdp_heap_create(m->drv, pool, &heap));
    unsigned long calls = fcdp__driver_calls(m->drv);
    uint64_t begun = fcdp__now_ns();
    for (size_t i = 0; i < t->n; i++) {
        const event *e = &t->events[i];
        if (e->bytes)
            MUST(fcdp_heap_malloc(heap, e->bytes, m->streams[e->number % 8], &at[k++]));
        else
            MUST(fcdp_heap_free(heap, at[e->number]));
    }
    double ns = (double)(fcdp__now_ns() - begun) / (double)t->n;
    fcdp_heap_stats_get(heap, &stats);
    outcome result = {stats.peak_reserved_bytes, fcdp__driver_calls(m->drv) - calls, ns};
    fcdp_heap_destroy(heap);
    fcdp__pool_destroy(pool);
    free(at);
    return result;
}

static double ratio(const trace *t, const outcome *o, size_t page_bytes) {
    return (double)o->reserved / (double)fcdp__round_up(t->peak_live, page_bytes);
}

static bool replay(const char *path, const machine *m, double at_most) {
    trace t = {0};
    trace_read(&t, path);
    trace_measure(&t);
    size_t page_bytes = fcdp__driver_page_bytes(m->drv);
    outcome native = run_torch(&t, false), expandable = run_torch(&t, true), fcdp = run_fcdp(&t, m);
    for (int i = 1; i < N_TIMED; i++) {
        outcome again = run_fcdp(&t, m);
        if (again.ns < fcdp.ns) fcdp.ns = again.ns;
    }
    double ratios[3] = {ratio(&t, &native, page_bytes), ratio(&t, &expandable, page_bytes),
                        ratio(&t, &fcdp, page_bytes)};
    printf("| %s | %zu | %.1f | %.1f (%.3f), %lu | %.1f (%.3f), %lu | **%.1f (%.3f)**, %lu | %.0f |\n",
           t.name, t.n, (double)t.peak_live / MIB, (double)native.reserved / MIB, ratios[0], native.n_calls,
           (double)expandable.reserved / MIB, ratios[1], expandable.n_calls, (double)fcdp.reserved / MIB,
           ratios[2], fcdp.n_calls, fcdp.ns);
    fflush(stdout);
    free(t.events);
    return ratios[2] <= ratios[0] && ratios[2] <= ratios[1] && (at_most <= 0 || ratios[2] <= at_most);
}

static void help(FILE *out) {
    fprintf(
        out,
        "usage: fcdp-replay [--help] [--at-most RATIO] TRACE...\n\n"
        "Replays recorded allocations (tools/replay/traces/*.txt.gz; tools/replay/record.py makes them) into "
        "models of PyTorch's\n"
        "allocator, native and with expandable segments, and into FCDP's. Prints one row of a table per "
        "trace: peak\n"
        "MiB reserved (over the peak live, in whole pages), driver calls; for FCDP the time of an event.\n"
        "Ends with 1 if FCDP reserves more than either on some trace, or more than RATIO times the peak "
        "live.\n");
}

int main(int argc, char **argv) {
    machine m;
    fcdp_options options;
    bool best = true;
    int first = argc > 3 && strcmp(argv[1], "--at-most") == 0 ? 3 : 1;
    double at_most = first == 3 ? atof(argv[2]) : 0;
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        help(argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    MUST(fcdp_options_load(environ, &options));
    MUST(fcdp__driver_open(options.driver, 0, NULL, &m.drv));
    for (int i = 0; i < 8; i++) MUST(fcdp__driver_stream_create(m.drv, &m.streams[i]));
    printf("| trace | events | peak live, MiB | PyTorch native: reserved, driver calls | expandable segments "
           "| FCDP | ns per event |\n"
           "| --- | --- | --- | --- | --- | --- | --- |\n");
    for (int i = first; i < argc; i++) best = replay(argv[i], &m, at_most) && best;
    for (int i = 0; i < 8; i++) fcdp__driver_stream_destroy(m.drv, m.streams[i]);
    fcdp__driver_close(m.drv);
    return best ? 0 : 1;
}
