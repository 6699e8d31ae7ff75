/* synthetic.c - memtrace_synthetic: processes with segments as trace_format.h has them, that play a job
 * without one.
 *
 * For tests of what attaches to live jobs, and to see the tool where there is no torch. One process per
 * rank; each writes what FCDP would write in training a model of so many layers: gathers, stores and
 * restores, evictions, waits. It is told on stdin what to do, a command per line, and answers "ok" once
 * all ranks have done it:
 *
 *     steps N          plays N steps at once
 *     run, pause       plays a step each --step-ms from here on; none
 *     evict REGION     which was kept on the device
 *     short BYTES      memory is asked for in vain
 *     wait MS CAUSE    in each step, from here on
 *     flood N          N events that say nothing
 *     end              the job ends in order, as at the end of stdin
 *
 * Its writer has one thread per ring and is no model for the product's.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "torch_plugin/trace_events.h"

#include "base/trace_format.h"

#define MIB (1ull << 20)
enum { MAX_RANKS = 64, MAX_REGIONS = 1024, POOL = 3, TENSORS = 0, GATHERED = 1 };

typedef struct config {
    int n_ranks, n_nodes, n_regions, step_ms;
    uint64_t ring_events, region_bytes;
    const char *label;
} config;

typedef struct rank {
    const config *config;
    fcdp_trace_header *header;
    _Atomic uint64_t *counters;
    fcdp_trace_object *objects;
    char *ring;
    uint64_t wait_ns;
    uint8_t wait_cause;
} rank;

static uint64_t now_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "memtrace_synthetic: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- the segment ---- */

static void count(rank *r, unsigned counter, uint64_t n) {
    atomic_fetch_add_explicit(&r->counters[counter], n, memory_order_relaxed);
}

static void set(rank *r, unsigned counter, uint64_t value) {
    atomic_store_explicit(&r->counters[counter], value, memory_order_relaxed);
}

static uint64_t get(rank *r, unsigned counter) {
    return atomic_load_explicit(&r->counters[counter], memory_order_relaxed);
}

static void emit(rank *r, fcdp_trace_event event) {
    uint64_t n = atomic_fetch_add_explicit(&r->header->head, 1, memory_order_relaxed);
    char *place = r->ring + (n & (r->header->ring_events - 1)) * sizeof event;
    _Atomic uint64_t *words = (_Atomic uint64_t *)(void *)place;
    uint64_t copy[sizeof event / 8];
    if (!event.time_ns) event.time_ns = now_ns(CLOCK_MONOTONIC) - event.duration_ns;
    event.step = atomic_load_explicit(&r->header->step, memory_order_relaxed);
    event.thread = (uint32_t)getpid();
    memcpy(copy, &event, sizeof copy);
    atomic_store_explicit(&words[0], 2 * n + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    for (size_t i = 1; i < sizeof copy / 8; i++)
        atomic_store_explicit(&words[i], copy[i], memory_order_relaxed);
    atomic_store_explicit(&words[0], 2 * n + 2, memory_order_release);
}

static void object_make(rank *r, uint32_t number, uint64_t bytes, const char *name) {
    fcdp_trace_object *object = &r->objects[number];
    atomic_store_explicit(&object->generation, 1, memory_order_relaxed);
    snprintf(object->name, sizeof object->name, "%s", name);
    atomic_store_explicit(&object->bytes, bytes, memory_order_relaxed);
    atomic_store_explicit(&object->state, FCDP_OBJECT_LIVE, memory_order_relaxed);
    atomic_store_explicit(&object->generation, 2, memory_order_release);
}

/* The table first, then the event that says so. */
static void place(rank *r, uint32_t number, uint32_t state, uint64_t device_bytes, uint64_t host_bytes) {
    fcdp_trace_object *object = &r->objects[number];
    state |= FCDP_OBJECT_LIVE;
    atomic_store_explicit(&object->state, state, memory_order_relaxed);
    atomic_store_explicit(&object->device_bytes, device_bytes, memory_order_relaxed);
    atomic_store_explicit(&object->host_bytes, host_bytes, memory_order_relaxed);
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_STATE,
                               .object = number,
                               .flags = (uint8_t)(state << FCDP_TRACE_STATE_SHIFT),
                               .a = device_bytes,
                               .b = host_bytes});
}

static fcdp_trace_header header_of(const config *c, int number) {
    int node_size = c->n_ranks / c->n_nodes;
    uint64_t counters_at = 4096, objects_at = counters_at + FCDP_TRACE_N_COUNTERS * 8;
    uint64_t ring_at = objects_at + FCDP_TRACE_N_OBJECTS * sizeof(fcdp_trace_object);
    return (fcdp_trace_header){.version = FCDP_TRACE_VERSION,
                               .header_bytes = sizeof(fcdp_trace_header),
                               .n_counters = FCDP_TRACE_N_COUNTERS,
                               .n_objects = FCDP_TRACE_N_OBJECTS,
                               .ring_events = c->ring_events,
                               .counters_at = counters_at,
                               .objects_at = objects_at,
                               .ring_at = ring_at,
                               .segment_bytes = ring_at + c->ring_events * FCDP_TRACE_EVENT_BYTES,
                               .pid = getpid(),
                               .level = 1,
                               .start_monotonic_ns = now_ns(CLOCK_MONOTONIC),
                               .start_real_ns = now_ns(CLOCK_REALTIME),
                               .rank = number,
                               .world_size = c->n_ranks,
                               .node = number / node_size,
                               .n_nodes = c->n_nodes,
                               .local_rank = number % node_size,
                               .node_size = node_size,
                               .page_bytes = 2 * MIB,
                               .device_budget_bytes = 64 * MIB,
                               .device = "simulated"};
}

/* The magic is written last: readers take it for whole then. They read no segment that may shrink. */
static void segment_make(rank *r, int number) {
    fcdp_trace_header header = header_of(r->config, number);
    int fd = memfd_create(FCDP_TRACE_MEMFD, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || fchmod(fd, 0600) || ftruncate(fd, (off_t)header.segment_bytes) ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        fail("memfd");
    char *at = mmap(NULL, header.segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) fail("mmap");
    gethostname(header.host, sizeof header.host - 1);
    snprintf(header.command, sizeof header.command, "%s", r->config->label);
    r->header = (fcdp_trace_header *)(void *)at;
    *r->header = header;
    r->counters = (_Atomic uint64_t *)(void *)(at + header.counters_at);
    r->objects = (fcdp_trace_object *)(void *)(at + header.objects_at);
    r->ring = at + header.ring_at;
    memcpy(r->header->magic, FCDP_TRACE_MAGIC, sizeof header.magic);
}

/* ---- what a job does ---- */

static void take(rank *r, unsigned holder, uint64_t bytes) {
    count(r, FCDP_COUNT_HELD_0_BYTES + holder, bytes);
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_PAGES_TAKE,
                               .bytes = bytes,
                               .a = holder | POOL << 8,
                               .b = get(r, FCDP_COUNT_HELD_0_BYTES + holder)});
}

static void give(rank *r, unsigned holder, uint64_t bytes) {
    count(r, FCDP_COUNT_HELD_0_BYTES + holder, 0 - bytes);
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_PAGES_GIVE,
                               .bytes = bytes,
                               .a = holder | POOL << 8,
                               .b = get(r, FCDP_COUNT_HELD_0_BYTES + holder)});
}

static uint64_t slice_bytes(const rank *r) {
    return r->config->region_bytes / (uint64_t)(r->config->n_ranks / r->config->n_nodes);
}

static void span(rank *r, uint16_t kind, uint32_t region, uint64_t bytes, uint64_t a, uint64_t b) {
    emit(r, (fcdp_trace_event){.kind = kind,
                               .object = region,
                               .bytes = bytes,
                               .duration_ns = 1000,
                               .flags = FCDP_TRACE_ON_STREAM,
                               .a = a,
                               .b = b});
}

/* Region 1 is the root: gathered once, and kept. The last is never used: it is nowhere. */
static void forward(rank *r, uint32_t region) {
    uint64_t bytes = r->config->region_bytes, inter = bytes / (uint64_t)r->config->n_ranks, node = inter;
    bool kept = region == 1;
    take(r, TENSORS, MIB);
    take(r, GATHERED, bytes);
    place(r, region, FCDP_OBJECT_IN_USE, bytes, 0);
    span(r, FCDP_EVENT_GATHER, region, inter + node, inter, node);
    count(r, FCDP_COUNT_GATHER_INTER_BYTES, inter);
    count(r, FCDP_COUNT_GATHER_INTRA_BYTES, node);
    count(r, FCDP_COUNT_SAVED_PLAIN_BYTES, 2 * bytes);
    count(r, FCDP_COUNT_SAVED_GATHER_BYTES, bytes);
    span(r, FCDP_EVENT_STORE, region, slice_bytes(r), 0, 0);
    count(r, FCDP_COUNT_D2H_BYTES, slice_bytes(r));
    if (!kept) give(r, GATHERED, bytes);
    place(r, region, kept ? FCDP_OBJECT_KEPT : 0, kept ? bytes : 0, bytes);
}

static void backward(rank *r, uint32_t region) {
    uint64_t bytes = r->config->region_bytes;
    take(r, GATHERED, bytes);
    span(r, FCDP_EVENT_LOAD, region, slice_bytes(r), 0, 0);
    count(r, FCDP_COUNT_H2D_BYTES, slice_bytes(r));
    span(r, FCDP_EVENT_RESTORE, region, slice_bytes(r), 0, slice_bytes(r));
    count(r, FCDP_COUNT_RESTORE_INTRA_BYTES, slice_bytes(r));
    place(r, region, FCDP_OBJECT_IN_USE, bytes, bytes);
    give(r, GATHERED, bytes);
    place(r, region, 0, 0, bytes);
    give(r, TENSORS, MIB);
}

static bool is_kept(rank *r, uint32_t region) {
    return atomic_load_explicit(&r->objects[region].state, memory_order_relaxed) & FCDP_OBJECT_KEPT;
}

static void step(rank *r) {
    uint32_t n = (uint32_t)r->config->n_regions;
    for (uint32_t region = 1; region < n; region++)
        if (!is_kept(r, region)) forward(r, region);
    if (r->wait_ns) {
        emit(r, (fcdp_trace_event){.kind = r->wait_cause ? FCDP_EVENT_HOST_WAIT : FCDP_EVENT_STALL,
                                   .cause = r->wait_cause,
                                   .object = 2,
                                   .duration_ns = r->wait_ns});
        count(r, r->wait_cause ? FCDP_COUNT_HOST_WAIT_NS : FCDP_COUNT_STALL_NS, r->wait_ns);
    }
    for (uint32_t region = n - 1; region > 1; region--) backward(r, region);
    uint32_t steps = atomic_fetch_add_explicit(&r->header->step, 1, memory_order_relaxed) + 1;
    set(r, FCDP_COUNT_STEPS, steps);
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_STEP, .a = steps});
}

static void evict(rank *r, const char *name) {
    for (uint32_t i = 1; i <= (uint32_t)r->config->n_regions; i++) {
        if (strcmp(r->objects[i].name, name) != 0 || !is_kept(r, i)) continue;
        uint64_t bytes = r->config->region_bytes;
        emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_EVICT,
                                   .cause = FCDP_CAUSE_MEMORY_SHORT,
                                   .object = i,
                                   .bytes = bytes,
                                   .b = 0});
        count(r, FCDP_COUNT_EVICTIONS, 1);
        give(r, GATHERED, bytes);
        place(r, i, 0, 0, bytes);
    }
}

static uint32_t number_of(const rank *r, const char *name) {
    uint32_t i = (uint32_t)r->config->n_regions;
    while (i > 0 && strcmp(r->objects[i].name, name) != 0) i--;
    return i;
}

/* As a group of FCDP_HOST_MAP is all its life. */
static void map_on_host(rank *r, const char *name) {
    uint32_t i = number_of(r, name);
    uint64_t bytes = r->config->region_bytes;
    atomic_store(&r->objects[i].lives, FCDP_LIVES_MAPPED | FCDP_LIVES_ON_DISK);
    atomic_store(&r->objects[i].host_bytes, bytes);
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_STATE,
                               .cause = FCDP_CAUSE_MAPPED,
                               .flags = FCDP_OBJECT_LIVE << FCDP_TRACE_STATE_SHIFT,
                               .object = i,
                               .b = bytes});
}

/* Tensors leave the device and come back, and of a region neither file can be read. */
static void sleep_and_lose(rank *r, const char *name) {
    uint32_t i = number_of(r, name);
    uint64_t bytes = r->config->region_bytes;
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_SLEEP, .bytes = bytes, .a = bytes, .b = bytes / 4});
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_WAKE, .bytes = bytes, .a = bytes, .b = bytes});
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_SPILL_READ, .object = i, .bytes = bytes, .a = EIO});
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_SPILL_READ, .object = i, .bytes = bytes});
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_CACHE_READ, .object = i, .bytes = bytes, .a = 1});
    emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_CACHE_WRITE, .object = i, .bytes = bytes});
}

static uint8_t cause_of(const char *name) {
#define CAUSE_IF(NAME, number, word, ...)                                                                    \
    if (strcmp(name, word) == 0) return number;
    FCDP_ALLOC_CAUSES(CAUSE_IF)
    FCDP_COMM_CAUSES(CAUSE_IF)
    return 0;
}

static void short_of(rank *r, uint64_t bytes) {
    uint64_t held = get(r, FCDP_COUNT_HELD_0_BYTES) + get(r, FCDP_COUNT_HELD_1_BYTES);
    emit(r,
         (fcdp_trace_event){
             .kind = FCDP_EVENT_PRESSURE, .bytes = bytes, .a = held, .b = get(r, FCDP_COUNT_BUDGET_BYTES)});
    count(r, FCDP_COUNT_PRESSURES, 1);
}

static void job_begin(rank *r) {
    const config *c = r->config;
    set(r, FCDP_COUNT_BUDGET_BYTES, 64 * MIB);
    set(r, FCDP_COUNT_TOTAL_BYTES, 256 * MIB);
    set(r, FCDP_COUNT_FREE_BYTES, 150 * MIB);
    set(r, FCDP_COUNT_OTHERS_BYTES, 42 * MIB);
    object_make(r, 1, c->region_bytes, "model");
    char name[64];
    for (int i = 2; i <= c->n_regions; i++) {
        snprintf(name, sizeof name, "model.layers.%d", i - 2);
        object_make(r, (uint32_t)i, c->region_bytes, name);
    }
}

/* False: the job ends. */
static bool obey(rank *r, const char *line, bool *runs) {
    char word[64] = "", rest[160] = "";
    unsigned long long n = 0;
    if (sscanf(line, "%63s %159s %*s", word, rest) < 1) return true;
    n = strtoull(rest, NULL, 10);
    if (strcmp(word, "end") == 0) return false;
    if (strcmp(word, "run") == 0)
        *runs = true;
    else if (strcmp(word, "pause") == 0)
        *runs = false;
    else if (strcmp(word, "evict") == 0)
        evict(r, rest);
    else if (strcmp(word, "map") == 0)
        map_on_host(r, rest);
    else if (strcmp(word, "lose") == 0)
        sleep_and_lose(r, rest);
    else if (strcmp(word, "short") == 0)
        short_of(r, n);
    else if (strcmp(word, "steps") == 0)
        for (unsigned long long i = 0; i < n; i++) step(r);
    else if (strcmp(word, "flood") == 0)
        for (unsigned long long i = 0; i < n; i++) emit(r, (fcdp_trace_event){.kind = FCDP_EVENT_PASS});
    else if (strcmp(word, "wait") == 0) {
        char cause[64] = "";
        sscanf(line, "%*s %*s %63s", cause);
        r->wait_ns = n * 1000000;
        r->wait_cause = cause_of(cause);
    } else
        fprintf(stderr, "memtrace_synthetic: unknown command '%s'\n", word);
    return true;
}

/* One rank: it ends when the socket does. */
static void rank_run(const config *c, int number, int commands) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    rank r = {.config = c};
    segment_make(&r, number);
    job_begin(&r);
    bool runs = false;
    char line[256] = "ok";
    while (write(commands, "k", 1) == 1) {
        struct pollfd wakes = {.fd = commands, .events = POLLIN};
        while (poll(&wakes, 1, runs ? c->step_ms : -1) == 0) step(&r);
        ssize_t n = read(commands, line, sizeof line - 1); /* a packet */
        if (n <= 0) break;
        line[n] = 0;
        if (!obey(&r, line, &runs)) break;
    }
    atomic_store_explicit(&r.header->ended, 1, memory_order_release);
    _exit(0);
}

/* ---- all ranks ---- */

/* A rank that was killed no longer answers, and is no longer told. */
static void tell(int *sockets, int n, const char *line) {
    char answer;
    for (int i = 0; i < n; i++)
        if (line && sockets[i] >= 0 && send(sockets[i], line, strlen(line), MSG_NOSIGNAL) < 0)
            sockets[i] = -1;
    for (int i = 0; i < n; i++)
        if (sockets[i] >= 0 && read(sockets[i], &answer, 1) != 1) sockets[i] = -1;
    puts("ok");
    fflush(stdout);
}

/* A rank holds none of the others' sockets: each sees its own end. */
static void start(const config *c, int *sockets) {
    pid_t pids[MAX_RANKS];
    for (int i = 0; i < c->n_ranks; i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) fail("socketpair");
        pids[i] = fork();
        if (pids[i] < 0) fail("fork");
        if (pids[i] == 0) {
            for (int k = 0; k < i; k++) close(sockets[k]);
            close(pair[0]);
            rank_run(c, i, pair[1]);
        }
        close(pair[1]);
        sockets[i] = pair[0];
    }
    printf("pids");
    for (int i = 0; i < c->n_ranks; i++) printf(" %d", (int)pids[i]);
    puts("");
}

/* By hand: a test program has no library for it. */
static void parse(int argc, char **argv, config *c) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--ranks") == 0)
            c->n_ranks = atoi(value);
        else if (strcmp(name, "--nodes") == 0)
            c->n_nodes = atoi(value);
        else if (strcmp(name, "--regions") == 0)
            c->n_regions = atoi(value);
        else if (strcmp(name, "--step-ms") == 0)
            c->step_ms = atoi(value);
        else if (strcmp(name, "--ring") == 0)
            c->ring_events = strtoull(value, NULL, 10);
        else if (strcmp(name, "--label") == 0)
            c->label = value;
        else
            c->n_ranks = 0;
    }
    if (argc % 2 && c->n_ranks > 0 && c->n_ranks <= MAX_RANKS && c->n_nodes > 0 &&
        c->n_ranks % c->n_nodes == 0 && c->n_regions > 0 && c->n_regions < MAX_REGIONS && c->ring_events &&
        !(c->ring_events & (c->ring_events - 1)))
        return;
    fputs("memtrace_synthetic [--ranks N] [--nodes N] [--regions N] [--step-ms MS] [--ring EVENTS (a power "
          "of two)] "
          "[--label COMMAND], then commands on stdin\n",
          stderr);
    exit(2);
}

/* Until told to end: rank by rank they are told, then waited for. */
static void play(int *sockets, int n) {
    char line[256];
    bool ends = false;
    tell(sockets, n, NULL); /* all have their segments */
    while (!ends && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        ends = strcmp(line, "end") == 0;
        tell(sockets, n, line);
    }
    for (int i = 0; i < n; i++)
        if (sockets[i] >= 0) close(sockets[i]);
    while (wait(NULL) > 0 || errno == EINTR) {
    }
}

int main(int argc, char **argv) {
    config c = {.n_ranks = 4,
                .n_nodes = 2,
                .n_regions = 8,
                .step_ms = 50,
                .ring_events = 1 << 14,
                .region_bytes = 12 * MIB,
                .label = "train.py --synthetic"};
    int sockets[MAX_RANKS];
    parse(argc, argv, &c);
    start(&c, sockets);
    play(sockets, c.n_ranks);
    return 0;
}
