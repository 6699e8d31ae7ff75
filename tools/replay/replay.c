/* replay.c - fcdp-replay: recorded allocations of training runs into FCDP's allocator and into models of
 * PyTorch's own.
 *
 * A trace (record.py): lines `SIZE STREAM` and `-NUMBER`, gzipped where it is named .gz. Everything runs on
 * the driver that FCDP_DRIVER names. Peak live is of sizes rounded to 512 bytes, which all three allocators
 * do, rounded up to whole pages.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "alloc/heap.h"
#include "base/options.h"
#include "tools/replay/torch_model.h"

extern char **environ;

enum { MIB = 1 << 20 };

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
    bool fits; /* it ran to its end */
    size_t peak_reserved;
    unsigned long n_calls; /* of the driver */
    double ns;             /* per event; 0: of a model */
} outcome;

typedef struct bounds { /* what is asked of FCDP */
    double budget, calls;
} bounds;

typedef enum allocator { NATIVE, EXPANDABLE, FCDP, N_ALLOCATORS } allocator;

typedef struct machine {
    fcdp_driver *drv;
    fcdp_stream streams[8];
} machine;

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

static bool is_gzipped(const char *path) {
    size_t n = strlen(path);
    return n > 3 && strcmp(path + n - 3, ".gz") == 0;
}

/* gzip is needed for what is gzipped alone: not every machine with a GPU has it. */
static FILE *trace_open(const char *path) {
    char command[4096];
    if (strchr(path, '\'')) die(path, "a quote in a path is not supported");
    if (snprintf(command, sizeof command, "gzip -dc -- '%s'", path) >= (int)sizeof command)
        die(path, "the path is too long");
    FILE *in = is_gzipped(path) ? popen(command, "r") : fopen(path, "r");
    if (!in) die(path, strerror(errno));
    return in;
}

static void trace_close(FILE *in, const char *path) {
    bool failed = ferror(in);
    if (is_gzipped(path) && pclose(in))
        die(path, "`gzip -dc` failed: the file cannot be read or is no gzip file, or gzip is not installed");
    if (!is_gzipped(path)) fclose(in);
    if (failed) die(path, "cannot be read to its end");
}

static void trace_read(trace *t, const char *path) {
    char line[256];
    FILE *in = trace_open(path);
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
    trace_close(in, path);
    if (t->n == 0) die(path, "the trace is empty: it has no malloc and no free");
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

static outcome run_torch(const trace *t, bool expandable, size_t budget_bytes) {
    torch_model *model = torch_model_create(expandable, budget_bytes);
    torch_block **blocks = calloc(t->n_mallocs, sizeof *blocks);
    size_t k = 0;
    bool fits = true;
    for (size_t i = 0; i < t->n && fits; i++) {
        const event *e = &t->events[i];
        if (!e->bytes)
            torch_model_free(model, blocks[e->number]);
        else
            fits = (blocks[k++] = torch_model_malloc(model, e->bytes, e->number)) != NULL;
    }
    outcome result = {fits, torch_model_peak_reserved(model), torch_model_driver_calls(model), 0};
    free(blocks);
    torch_model_destroy(model);
    return result;
}

/* On the simulator of this thread's CPU time: what else runs on the machine is no part of it. A GPU's driver
 * sleeps in its waits, which are part. */
static uint64_t clock_ns(const machine *m) {
    if (!fcdp__driver_is_sim(m->drv)) return fcdp__now_ns();
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static outcome run_fcdp(const trace *t, const machine *m, size_t budget_bytes) {
    fcdp_pool *pool;
    fcdp_heap *heap;
    fcdp_heap_stats stats;
    fcdp_dptr *at = calloc(t->n_mallocs, sizeof *at);
    size_t k = 0;
    fcdp_status status = FCDP_OK;
    MUST(fcdp__pool_create(m->drv, budget_bytes, &pool));
    MUST(fcdp_heap_create(m->drv, pool, &heap));
    unsigned long calls = fcdp__driver_calls(m->drv);
    uint64_t begun = clock_ns(m);
    for (size_t i = 0; i < t->n && !status; i++) {
        const event *e = &t->events[i];
        if (e->bytes)
            status = fcdp_heap_malloc(heap, e->bytes, m->streams[e->number % 8], &at[k++]);
        else
            MUST(fcdp_heap_free(heap, at[e->number]));
    }
    if (status && status != FCDP_ERR_NO_DEVICE_MEM) die(t->name, fcdp_error_text());
    double ns = (double)(clock_ns(m) - begun) / (double)t->n;
    fcdp_heap_stats_get(heap, &stats);
    outcome result = {!status, stats.peak_reserved_bytes, fcdp__driver_calls(m->drv) - calls, ns};
    fcdp_heap_destroy(heap);
    fcdp__pool_destroy(pool);
    free(at);
    return result;
}

static outcome run(const trace *t, const machine *m, allocator which, size_t budget_bytes) {
    return which == FCDP ? run_fcdp(t, m, budget_bytes) : run_torch(t, which == EXPANDABLE, budget_bytes);
}

/* ---- what is measured ---- */

typedef struct measured {
    outcome roomy;       /* with twice what is live at the peak */
    size_t budget_bytes; /* the smallest in which it runs */
    outcome tight;       /* in that */
} measured;

static size_t peak_bytes(const trace *t, const machine *m) {
    return fcdp__round_up(t->peak_live, fcdp__driver_page_bytes(m->drv));
}

/* Page by page from the peak upwards: what a trace fits in is not monotonic in the budget. */
static void measure(const trace *t, const machine *m, allocator which, measured *result) {
    size_t page = fcdp__driver_page_bytes(m->drv), peak = peak_bytes(t, m);
    result->roomy = run(t, m, which, 2 * peak);
    if (!result->roomy.fits) die(t->name, "twice what is live at its peak is not enough");
    size_t budget = peak;
    while (!(result->tight = run(t, m, which, budget)).fits) budget += page;
    result->budget_bytes = budget;
}

static double over_peak(const trace *t, const machine *m, size_t bytes) {
    return (double)bytes / (double)peak_bytes(t, m);
}

static void print_row(const trace *t, const machine *m, const measured *of) {
    printf("| %s | %zu | %.1f |", t->name, t->n, (double)t->peak_live / MIB);
    for (int i = 0; i < N_ALLOCATORS; i++) printf(" %.3f |", over_peak(t, m, of[i].budget_bytes));
    for (int i = 0; i < N_ALLOCATORS; i++) printf(" %.3f |", over_peak(t, m, of[i].roomy.peak_reserved));
    for (int i = 0; i < N_ALLOCATORS; i++) printf(" %lu |", of[i].roomy.n_calls);
    for (int i = 0; i < N_ALLOCATORS; i++) printf(" %lu |", of[i].tight.n_calls);
    printf(" %.0f, %.0f |\n", of[FCDP].roomy.ns, of[FCDP].tight.ns);
    fflush(stdout);
}

/* Whether FCDP keeps within the bounds that are asked of it. */
static bool replay(const char *path, const machine *m, const bounds *asked) {
    trace t = {0};
    measured of[N_ALLOCATORS];
    trace_read(&t, path);
    trace_measure(&t);
    for (int i = 0; i < N_ALLOCATORS; i++) measure(&t, m, (allocator)i, &of[i]);
    print_row(&t, m, of);
    bool least = of[FCDP].budget_bytes < of[NATIVE].budget_bytes &&
                 of[FCDP].budget_bytes < of[EXPANDABLE].budget_bytes;
    bool small = over_peak(&t, m, of[FCDP].budget_bytes) <= asked->budget;
    bool few = (double)of[FCDP].roomy.n_calls <= asked->calls * (double)of[NATIVE].roomy.n_calls;
    free(t.events);
    return least && small && few;
}

static void print_head(void) {
    printf("Each trace in FCDP's allocator and in models of PyTorch's. Budgets and reserved bytes are over "
           "the peak of live bytes, in whole pages.\n"
           "Driver calls: each call is one, of whatever kind; native: cudaMalloc, cudaFree; expandable "
           "segments: create, map, unmap, release of\n"
           "each handle, set-access of each range; FCDP: every call it makes. \"Roomy\": with twice the peak "
           "of live bytes as budget; \"tight\": in its smallest.\n\n"
           "| trace | events | peak live, MiB | smallest budget: native | expandable | FCDP "
           "| reserved, roomy: native | expandable | FCDP | driver calls, roomy: native | expandable | FCDP "
           "| driver calls, tight: native | expandable | FCDP | FCDP: ns per event, roomy and tight |\n"
           "|");
    for (int i = 0; i < 16; i++) printf(" --- |");
    printf("\n");
}

static void help(FILE *out) {
    fprintf(out, "usage: fcdp-replay [--help] [--budget RATIO] [--calls RATIO] TRACE...\n\n"
                 "Replays recorded allocations (tools/replay/traces/*.txt.gz; tools/replay/record.py makes "
                 "them) into models of\n"
                 "PyTorch's allocator, native and with expandable segments, and into FCDP's, and looks for "
                 "the smallest budget in\n"
                 "which each runs to its end. Prints one row of a table per trace.\n\n"
                 "Ends with 1 if FCDP, on some trace, needs as much as either, or more than RATIO times the "
                 "peak of live bytes\n"
                 "(--budget), or more than RATIO times the driver calls of the native allocator where memory "
                 "is not short (--calls).\n");
}

int main(int argc, char **argv) {
    machine m;
    fcdp_options options;
    bounds asked = {HUGE_VAL, HUGE_VAL};
    bool kept = true;
    int first = 1;
    for (; first + 1 < argc && strncmp(argv[first], "--", 2) == 0 && strcmp(argv[first], "--help") != 0;
         first += 2) {
        if (strcmp(argv[first], "--budget") == 0)
            asked.budget = atof(argv[first + 1]);
        else if (strcmp(argv[first], "--calls") == 0)
            asked.calls = atof(argv[first + 1]);
        else
            die(argv[first], "no such option; see --help");
    }
    if (first >= argc || strcmp(argv[first], "--help") == 0 || strcmp(argv[first], "-h") == 0) {
        help(first >= argc ? stderr : stdout);
        return first >= argc ? 2 : 0;
    }
    MUST(fcdp_options_load(environ, &options));
    MUST(fcdp__driver_open(options.driver, 0, NULL, &m.drv));
    for (int i = 0; i < 8; i++) MUST(fcdp__driver_stream_create(m.drv, &m.streams[i]));
    print_head();
    for (int i = first; i < argc; i++) kept = replay(argv[i], &m, &asked) && kept;
    for (int i = 0; i < 8; i++) fcdp__driver_stream_destroy(m.drv, m.streams[i]);
    fcdp__driver_close(m.drv);
    return kept ? 0 : 1;
}
