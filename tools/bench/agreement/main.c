/* main.c - what the agreements of a micro-batch cost the device: the time between the end of what the
 * program had enqueued and the begin of what it enqueues next.
 *
 * The ranks of one node are threads, each with a stream of the simulated device. A micro-batch is an
 * optimizer's kernel, an agreement, a forward's kernel, an agreement, a backward's kernel. What is FCDP's
 * is its own code: fingerprints, what they and the signals say (validity.h), the ballots of the node's
 * ranks, and what its first rank asks of the other nodes. What is modelled is a time on simgpu's clock or
 * the host's: how long the device reads shards, how long Python collects evidence, how long a thread takes
 * to wake, and a hop between nodes, at whose other end a node has come to the same place. All of these are
 * `scale` times as long, and the figures are divided by it: so this machine's own threads, which are more
 * than its cores, count for little.
 *
 * "before" is as FCDP was: in both agreements the host waits for the device, then collects evidence, then
 * all ranks of the group take part in gloo's all-reduce, a ring, of which each step is modelled.
 */
#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "alloc/heap.h"
#include "comm/ballot.h"
#include "comm/fingerprint.h"
#include "comm/validity.h"
#include "sim/gpu/simgpu.h"

enum { N_LOCAL = 8, N_EXTENTS = 291, N_VOTES = N_EXTENTS + 33, ARRAY_BYTES = 256, MAX_REPEAT = 1000 };

static const char usage[] =
    "fcdp-agreement [--repeat N] [--scale X] [--evidence US] [--wake US] [--hop US] [--node-hop US]\n"
    "               [--memory GB/S]\n"
    "    --repeat    micro-batches, of which the least counts (9; at most 1000)\n"
    "    --scale     all that is modelled takes X times as long here (10)\n"
    "    --evidence  Python collects signals and addresses of all parameters so long (1000)\n"
    "    --wake      a thread that waited goes on so long after what it waited for (50)\n"
    "    --hop       between nodes (100)\n"
    "    --node-hop  of gloo, between two ranks of a node (30)\n"
    "    --memory    at which the device reads shards (2000)\n";

/* Python's part was 0.9 ms of a core for the 291 parameters, with torch 2.15 and Python 3.11. */
static struct {
    unsigned repeat;
    double scale, evidence_us, wake_us, hop_us, node_hop_us, memory_gbs;
} settings = {9, 10, 1000, 50, 100, 30, 2000};

/* 8 G parameters in float32, and 32 blocks and a root, as a Llama of 8B has them. */
static const double PARAMETER_BYTES = 8e9 * 4;
static const double KERNEL_US = 12000;

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        if (call) {                                                                                          \
            fprintf(stderr, "%s: %s\n", #call, fcdp_error_text());                                           \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef enum way { BEFORE, AFTER, ACCUMULATED, N_WAYS } way; /* ACCUMULATED: no optimizer steps */

typedef struct world {
    uint32_t n_nodes;
    way way;
    fcdp_driver *drv;
    fcdp_account *account;
    pthread_barrier_t barrier;
    double ring_us; /* BEFORE: a whole all-reduce, once all have come */
} world;

typedef struct rank {
    world *w;
    uint32_t local;
    fcdp_host *host;
    fcdp_ballots ballots;
    fcdp_stream stream;
    fcdp_fingerprints *fingerprints;
    fcdp_validity *validity;
    fcdp_signals signals[N_EXTENTS];
    uint64_t reads;
    uint8_t shards[N_EXTENTS][ARRAY_BYTES];
    pthread_t thread;
    uint64_t free_ns;                /* when the device was through with what the program had enqueued */
    uint64_t exposed_ns;             /* of this micro-batch */
    uint64_t all_ns[MAX_REPEAT + 2]; /* exposed, of each */
} rank;

static uint64_t scaled_ns(double us) {
    return (uint64_t)(us * 1e3 * settings.scale);
}

static void host_works(double us) {
    struct timespec until;
    uint64_t ns = scaled_ns(us);
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t at_ns = (uint64_t)until.tv_sec * 1000000000u + (uint64_t)until.tv_nsec + ns;
    until = (struct timespec){(time_t)(at_ns / 1000000000u), (long)(at_ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) continue;
}

/* ---- gloo's ring: reduce-scatter and all-gather, N - 1 steps each, of which each waits for the one before
 * of this rank and of the next one ---- */

static double ring_us(uint32_t n_nodes) {
    uint32_t n = n_nodes * N_LOCAL;
    double *at = calloc(2 * (size_t)n, sizeof *at), *next = at + n, last = 0;
    if (!at) exit(1);
    for (uint32_t step = 0; step < 2 * (n - 1); step++) {
        for (uint32_t r = 0; r < n; r++) {
            double come = at[(r + n - 1) % n] + (r % N_LOCAL == 0 ? settings.hop_us : settings.node_hop_us);
            next[r] = come > at[r] ? come : at[r];
        }
        memcpy(at, next, n * sizeof *at);
    }
    for (uint32_t r = 0; r < n; r++)
        if (at[r] > last) last = at[r];
    free(at);
    return last;
}

/* The other node is at the same place, and says the same. */
static fcdp_status swap(void *ctx, uint32_t to, uint32_t from, const void *sent, void *received_out,
                        size_t bytes, double timeout_s) {
    (void)ctx, (void)to, (void)from, (void)timeout_s;
    host_works(settings.hop_us);
    memcpy(received_out, sent, bytes);
    return FCDP_OK;
}

/* ---- the device ---- */

/* A kernel of the program's: at its begin, how long its stream had nothing of the program's to do. */
static void kernel_body(void *data) {
    rank *r = data;
    uint64_t ready_ns = simgpu_ready_ns();
    if (r->free_ns && ready_ns > r->free_ns) r->exposed_ns += ready_ns - r->free_ns;
    r->free_ns = ready_ns + scaled_ns(KERNEL_US);
}

static void program_computes(rank *r) {
    const struct simgpu_kernel kernel = {
        .name = "compute", .duration_ns = scaled_ns(KERNEL_US), .body = kernel_body, .data = r};
    if (simgpu_launch(r->stream, &kernel)) exit(1);
}

/* The shards are small here; the time is that of their true size. */
static void fingerprints_begin(rank *r) {
    double bytes = PARAMETER_BYTES / (N_LOCAL * r->w->n_nodes);
    const struct simgpu_kernel reading = {.name = "fingerprints",
                                          .duration_ns = scaled_ns(bytes / settings.memory_gbs / 1e3)};
    uint64_t arrays[N_EXTENTS];
    size_t sizes[N_EXTENTS];
    for (size_t i = 0; i < N_EXTENTS; i++) {
        arrays[i] = (uintptr_t)r->shards[i];
        sizes[i] = ARRAY_BYTES;
    }
    MUST(fcdp__fingerprints_begin(r->fingerprints, arrays, sizes, N_EXTENTS, r->stream));
    if (simgpu_launch(r->stream, &reading)) exit(1);
}

/* ---- one agreement ---- */

static bool needs_fingerprints(const rank *r) {
    for (uint32_t i = 0; i < N_EXTENTS; i++)
        if (!fcdp__validity_is_foretold(r->validity, i, r->signals[i].optimizer_steps)) return true;
    return false;
}

/* What is stale is gathered, and the device fingerprints what that reads. */
static void votes_make(rank *r, const uint64_t *fingerprints, uint8_t *votes) {
    const fcdp_process_signals process = {.grad_mode = true, .optimizer_seen = true};
    for (uint32_t i = 0; i < N_EXTENTS; i++)
        votes[i] = (uint8_t)fcdp__validity_observe(r->validity, i, &r->signals[i], &process,
                                                   fingerprints ? &fingerprints[i] : NULL);
}

static void gather(rank *r, const uint8_t *votes) {
    r->reads++;
    for (uint32_t i = 0; i < N_EXTENTS; i++) {
        if (!votes[i]) continue;
        fcdp__validity_await(r->validity, i, &r->signals[i], r->reads);
        fcdp_observation seen = fcdp__validity_observed(r->validity, i);
        fcdp__validity_accept(r->validity, i, &seen);
        fcdp__validity_amend(r->validity, i, r->reads, r->signals[i].optimizer_steps);
    }
}

static void agree(rank *r) {
    uint64_t taken[N_EXTENTS];
    uint8_t votes[N_VOTES] = {0};
    bool before = r->w->way == BEFORE, takes = before || needs_fingerprints(r);
    if (takes) fingerprints_begin(r);
    if (!before) host_works(settings.evidence_us);
    if (takes) MUST(fcdp__fingerprints_end(r->fingerprints, taken));
    if (takes) MUST(fcdp__driver_stream_sync(r->w->drv, r->stream)); /* the modelled time, too */
    if (takes) host_works(settings.wake_us);
    if (before) host_works(settings.evidence_us);
    for (uint32_t i = 0; i < N_EXTENTS; i++)
        taken[i] = r->signals[i].optimizer_steps; /* as the bytes would be */
    votes_make(r, takes ? taken : NULL, votes);
    if (before) {
        pthread_barrier_wait(&r->w->barrier);
        host_works(r->w->ring_us);
    } else {
        const fcdp_carrier carrier = {.swap = swap};
        MUST(fcdp__ballots_agree(&r->ballots, &carrier, r->reads, votes, sizeof votes));
        host_works(2 * settings.wake_us); /* the first rank's, and the others' */
    }
    gather(r, votes);
}

/* ---- micro-batches ---- */

static void *rank_main(void *arg) {
    rank *r = arg;
    for (unsigned n = 0; n < settings.repeat + 2; n++) {
        bool steps = r->w->way != ACCUMULATED || n < 2;
        pthread_barrier_wait(&r->w->barrier);
        MUST(fcdp__driver_stream_sync(r->w->drv, r->stream));
        r->free_ns = r->exposed_ns = 0;
        program_computes(r); /* the optimizer's, or the last backward's */
        for (uint32_t i = 0; i < N_EXTENTS && steps; i++) r->signals[i].optimizer_steps++;
        agree(r);
        program_computes(r);
        agree(r);
        program_computes(r);
        MUST(fcdp__driver_stream_sync(r->w->drv, r->stream));
        r->all_ns[n] = r->exposed_ns;
    }
    return NULL;
}

static void rank_open(rank *r, world *w, uint32_t local, fcdp_shared_ticket *ticket) {
    const fcdp_host_config config = {.account = w->account,
                                     .numa_node = -1,
                                     .pin = FCDP_PIN_NEVER,
                                     .slice = local,
                                     .n_slices = N_LOCAL,
                                     .timeout_s = 60};
    *r = (rank){.w = w, .local = local};
    if (local)
        MUST(fcdp__host_join(&config, ticket, &r->host));
    else
        MUST(fcdp__host_create(&config, &r->host, ticket));
    r->ballots = (fcdp_ballots){
        .meeting = fcdp__host_meeting(r->host),
        .topology = {w->n_nodes * N_LOCAL, w->n_nodes, N_LOCAL, local, 0, local},
        .timeout_s = 60,
    };
    MUST(fcdp__driver_stream_create(w->drv, &r->stream));
    MUST(fcdp__fingerprints_create(w->drv, &r->fingerprints));
    MUST(fcdp__validity_create(N_EXTENTS, &r->validity));
}

/* Of each micro-batch the rank counts that waited longest; of those the least, as what else runs on this
 * machine only ever adds. Milliseconds. */
static double measure(world *w, uint32_t n_nodes, way way) {
    static rank ranks[N_LOCAL];
    uint64_t least_ns = UINT64_MAX;
    fcdp_shared_ticket ticket;
    w->n_nodes = n_nodes;
    w->way = way;
    w->ring_us = ring_us(n_nodes);
    pthread_barrier_init(&w->barrier, NULL, N_LOCAL);
    for (uint32_t i = 0; i < N_LOCAL; i++) rank_open(&ranks[i], w, i, &ticket);
    for (uint32_t i = 0; i < N_LOCAL; i++)
        if (pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i])) exit(1);
    for (uint32_t i = 0; i < N_LOCAL; i++) pthread_join(ranks[i].thread, NULL);
    for (unsigned n = 0; n < settings.repeat; n++) {
        uint64_t longest_ns = 0;
        for (uint32_t i = 0; i < N_LOCAL; i++)
            if (ranks[i].all_ns[n + 2] > longest_ns) longest_ns = ranks[i].all_ns[n + 2];
        if (longest_ns < least_ns) least_ns = longest_ns;
    }
    for (uint32_t i = N_LOCAL; i-- > 0;) {
        fcdp__validity_destroy(ranks[i].validity);
        fcdp__fingerprints_destroy(ranks[i].fingerprints);
        fcdp__driver_stream_destroy(w->drv, ranks[i].stream);
        fcdp__host_destroy(ranks[i].host);
    }
    pthread_barrier_destroy(&w->barrier);
    return (double)least_ns / 1e6 / settings.scale;
}

static bool number_read(const char *text, double *number_out) {
    char *end;
    *number_out = strtod(text, &end);
    return *text && !*end && *number_out >= 0;
}

static bool settings_read(int argc, char **argv) {
    static const struct option options[] = {
        {"repeat", 1, NULL, 'r'},   {"scale", 1, NULL, 's'}, {"wake", 1, NULL, 'w'},
        {"evidence", 1, NULL, 'e'}, {"hop", 1, NULL, 'h'},   {"node-hop", 1, NULL, 'n'},
        {"memory", 1, NULL, 'm'},   {"help", 0, NULL, '?'},  {NULL, 0, NULL, 0}};
    double x = 0;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == '?' || !number_read(optarg, &x)) return false;
        if (c == 'r') settings.repeat = (unsigned)x;
        if (c == 's') settings.scale = x;
        if (c == 'w') settings.wake_us = x;
        if (c == 'e') settings.evidence_us = x;
        if (c == 'h') settings.hop_us = x;
        if (c == 'n') settings.node_hop_us = x;
        if (c == 'm') settings.memory_gbs = x;
    }
    return optind == argc && settings.repeat >= 1 && settings.repeat <= MAX_REPEAT &&
           settings.memory_gbs > 0 && settings.scale > 0;
}

int main(int argc, char **argv) {
    static const uint32_t nodes[] = {2, 64};
    double ms[2][N_WAYS];
    fcdp_device device;
    fcdp_shared_ticket ticket;
    world w = {0};
    if (!settings_read(argc, argv)) {
        fputs(usage, stderr);
        return 2;
    }
    MUST(fcdp_device_open(FCDP_DRIVER_SIM, 0, NULL, 64 << 20, 0, false, &device));
    MUST(fcdp__account_create(64 << 20, &w.account, &ticket));
    w.drv = device.drv;
    printf("8 G parameters in float32, %.0f us a hop between nodes, %.0f us in gloo's ring within one, %.0f "
           "us of Python\n"
           "for evidence, %.0f us to wake a thread, shards read at %.0f GB/s. What a micro-batch's "
           "agreements cost the device, in ms:\n\n"
           "               before    after    after, without an optimizer's step in between\n",
           settings.hop_us, settings.node_hop_us, settings.evidence_us, settings.wake_us,
           settings.memory_gbs);
    for (int i = 0; i < 2; i++) {
        for (way way = BEFORE; way < N_WAYS; way++) ms[i][way] = measure(&w, nodes[i], way);
        printf("  %2u x %d ranks %7.2f  %7.2f  %7.2f\n", nodes[i], N_LOCAL, ms[i][BEFORE], ms[i][AFTER],
               ms[i][ACCUMULATED]);
    }
    fcdp__account_destroy(w.account);
    fcdp_device_close(&device);
    printf(
        "\nagreements cost the device per micro-batch: 2x8 before %.2f ms after %.2f ms, 64x8 before %.2f ms "
        "after %.2f ms\n",
        ms[0][BEFORE], ms[0][AFTER], ms[1][BEFORE], ms[1][AFTER]);
    return 0;
}
