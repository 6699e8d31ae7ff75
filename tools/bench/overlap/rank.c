/* rank.c - one rank: what FSDP2's hooks do, in their order, over the engine, simgpu and simnet, or NCCL's double on it.
 *
 * As FSDP2: the next group is unsharded in backward while one computes; gradients are reduced on a stream of their own, at most one reduction
 * behind compute; the optimizer waits for the last. Nothing else in the loop waits for anything: steps are enqueued ahead of the device.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/group.h"
#include "comm/nccl.h"
#include "tools/bench/overlap/overlap.h"
#include "tools/simgpu/simgpu.h"
#include "tools/simnccl/simnccl.h"

enum { ROOT = 0, MAX_AHEAD = 8, N_GRADIENTS = 2, TIMEOUT_S = 60, PAGE_BYTES = 2 << 20, MEMORY_RATE = 1000 };

typedef struct stamps { /* of one rank; written by its compute stream */
    uint64_t end_ns[BOARD_MAX_STEPS];
    _Atomic unsigned long wrong;
} stamps;

typedef struct rank {
    const run_config *config;
    board *board;
    fcdp_topology topology;
    fcdp_engine *engine;
    fcdp_driver *drv;
    fcdp_comm *comm;
    fcdp_tree *tree;
    fcdp_group *groups[N_GROUPS];
    simnet_endpoint *endpoint;
    simnet_comm *lanes[FCDP_N_LANES], *world;
    fcdp_nccl *nccl; /* NULL: the lanes are simnet's */
    fcdp_stream compute, reduce;
    fcdp_event computed, reduced[N_GRADIENTS]; /* reduced: of the group that used this buffer last */
    uint64_t memory; /* shards of all groups, their reduced gradients, then N_GRADIENTS times those of a whole group */
    size_t memory_bytes;
    fcdp_phys pages;
    uint32_t step;
    unsigned long agreements;
    uint64_t agreed_ns;
    stamps stamps;
} rank;

#define MUST(condition)                                                                                              \
    do {                                                                                                             \
        if (!(condition)) {                                                                                          \
            fprintf(stderr, "%s:%d: %s; last failure: %s\n", __FILE__, __LINE__, #condition, fcdp_error_text());     \
            _exit(2);                                                                                                \
        }                                                                                                            \
    } while (0)

static uint64_t ns_of(double ms) {
    return (uint64_t)(ms * 1e6);
}

/* ---- where things are ---- */

static uint64_t shard_at(const rank *r, uint32_t g, uint32_t extent) {
    return r->memory + (uint64_t)g * SHARD_BYTES + (extent ? EXTENT_SHARD_BYTES[0] : 0);
}

static uint64_t reduced_at(const rank *r, uint32_t g) {
    return r->memory + (uint64_t)(N_GROUPS + g) * SHARD_BYTES;
}

static uint64_t gradients_at(const rank *r, uint32_t g) {
    return r->memory + (uint64_t)(2 * N_GROUPS + g % N_GRADIENTS * N_RANKS) * SHARD_BYTES;
}

/* What every byte of a shard is in a step. */
static uint8_t content_of(uint32_t g, uint32_t extent, uint32_t rank, uint32_t step) {
    return (uint8_t)(1 + g * 31 + extent * 17 + rank * 7 + step * 13);
}

/* ---- transport ---- */

static fcdp_status net_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n, fcdp_stream stream,
                                  fcdp_event turn) {
    rank *r = ctx;
    simnet_part own[4 * N_EXTENTS * N_NODES];
    if (n > sizeof own / sizeof *own) return fcdp__fail(FCDP_ERR_INVALID, "%zu parts in one collective", n);
    for (size_t i = 0; i < n; i++) own[i] = (simnet_part){parts[i].at, parts[i].bytes, parts[i].stride_bytes};
    fcdp_status status = fcdp__driver_stream_wait(r->drv, stream, turn);
    if (!status) status = simnet_all_gather_parts(r->lanes[lane], own, n, stream);
    return status ? status : fcdp__driver_event_record(r->drv, turn, stream);
}

static fcdp_status net_check(void *ctx) {
    char text[512];
    fcdp_status status = simnet_status(((rank *)ctx)->endpoint, text, sizeof text);
    return status ? fcdp__fail(status, "%s", text) : FCDP_OK;
}

static void net_abort(void *ctx, const char *why) {
    (void)why;
    simnet_abort(((rank *)ctx)->endpoint);
}

static fcdp_transport net_transport(rank *r) {
    return (fcdp_transport){.ctx = r, .all_gather = net_all_gather, .check = net_check, .abort = net_abort};
}

/* ---- agreements ---- */

static void meet(rank *r) {
    MUST(!board_agree(r->board, NULL, 0));
}

static fcdp_evidence evidence_of(const rank *r, fcdp_signals signals[N_EXTENTS]) {
    static const void *const none[N_EXTENTS];
    static const size_t no_bytes[N_EXTENTS];
    for (uint32_t i = 0; i < N_EXTENTS; i++) signals[i] = (fcdp_signals){.optimizer_steps = r->step, .requires_grad = 1};
    return (fcdp_evidence){signals, none, no_bytes, NULL};
}

/* Groups [first, end): the ranks' votes, their maximum. */
static void agree(rank *r, uint32_t first, uint32_t end) {
    enum { VOTES = N_EXTENTS + 1 };
    uint8_t votes[N_GROUPS * VOTES];
    fcdp_signals signals[N_EXTENTS];
    fcdp_evidence evidence = evidence_of(r, signals);
    fcdp_scene scene = {.grad_mode = true, .optimizer_seen = true};
    for (uint32_t g = first; g < end; g++)
        MUST(!fcdp_group_vote(r->groups[g], &evidence, &scene, votes + (g - first) * VOTES));
    uint64_t begin_ns = fcdp__now_ns();
    MUST(!board_agree(r->board, votes, (size_t)(end - first) * VOTES));
    r->agreed_ns += fcdp__now_ns() - begin_ns;
    r->agreements++;
    for (uint32_t g = first; g < end; g++) fcdp_group_agree(r->groups[g], votes + (g - first) * VOTES);
    if (end - first == N_GROUPS) fcdp_tree_agreed(r->tree);
}

static void ask(rank *r, uint32_t g) {
    fcdp_signals signals[N_EXTENTS];
    fcdp_evidence evidence = evidence_of(r, signals);
    switch (fcdp_group_question(r->groups[g], false)) {
    case FCDP_ASK_TREE:
        agree(r, 0, N_GROUPS);
        break;
    case FCDP_ASK_GROUP:
        agree(r, g, g + 1);
        break;
    case FCDP_ASK_NOBODY:
        break;
    }
    MUST(fcdp_group_audit(r->groups[g], &evidence) == N_EXTENTS);
}

/* ---- uses ---- */

static void begin(rank *r, fcdp_group *group, fcdp_pass pass) {
    uint64_t inputs[N_EXTENTS];
    uint32_t g = 0;
    while (r->groups[g] != group) g++;
    for (uint32_t i = 0; i < N_EXTENTS; i++) inputs[i] = shard_at(r, g, i);
    MUST(!fcdp_group_begin(group, inputs, pass, r->compute));
}

static void unshard(rank *r, uint32_t g, bool forward) {
    fcdp_group *ahead[MAX_AHEAD];
    fcdp_pass pass = forward ? FCDP_PASS_FORWARD : FCDP_PASS_BACKWARD;
    ask(r, g);
    begin(r, r->groups[g], pass);
    size_t n = fcdp_group_unsharded(r->groups[g], forward, ahead, MAX_AHEAD);
    for (size_t i = 0; i < n; i++) begin(r, ahead[i], pass);
}

typedef struct look {
    rank *r;
    uint32_t g, step;
} look;

/* Samples of every shard: first byte, last byte. On the compute stream's thread. */
static void look_body(void *data) {
    const look *l = data;
    for (uint32_t i = 0; i < N_EXTENTS; i++) {
        const uint8_t *at = (const uint8_t *)(uintptr_t)fcdp_group_extent(l->r->groups[l->g], i).addr;
        for (uint32_t rank = 0; rank < N_RANKS; rank++) {
            const uint8_t *shard = at + rank * EXTENT_SHARD_BYTES[i];
            uint8_t expected = content_of(l->g, i, rank, l->step);
            if (shard[0] != expected || shard[EXTENT_SHARD_BYTES[i] - 1] != expected) l->r->stamps.wrong++;
        }
    }
}

static void compute(rank *r, uint32_t g, const char *what, double ms, bool has_gradients) {
    char name[48];
    look l = {r, g, r->step};
    snprintf(name, sizeof name, "%s %u", what, g);
    struct simgpu_kernel kernel = {.name = name, .duration_ns = ns_of(ms), .body = look_body, .data = &l, .data_bytes = sizeof l};
    for (uint32_t i = 0; i < N_EXTENTS; i++)
        kernel.accesses[kernel.n_accesses++] =
            (struct simgpu_access){fcdp_group_extent(r->groups[g], i).addr, N_RANKS * EXTENT_SHARD_BYTES[i], 0};
    if (has_gradients) kernel.accesses[kernel.n_accesses++] = (struct simgpu_access){gradients_at(r, g), N_RANKS * SHARD_BYTES, 1};
    MUST(!fcdp_group_wait(r->groups[g], r->compute));
    MUST(!simgpu_launch(r->compute, &kernel));
}

/* Behind the group's backward. Compute goes on when the reduction before this one is over: its input's buffer is the next one's. */
static void reduce(rank *r, uint32_t g) {
    char label[48];
    if (g + 1 < N_GROUPS) MUST(!fcdp__driver_stream_wait(r->drv, r->compute, r->reduced[(g + 1) % N_GRADIENTS]));
    MUST(!fcdp__driver_event_record(r->drv, r->computed, r->compute));
    MUST(!fcdp__driver_stream_wait(r->drv, r->reduce, r->computed));
    snprintf(label, sizeof label, "reduce-scatter %u", g);
    simgpu_annotate(label);
    MUST(!simnet_reduce_scatter(r->world, (fcdp_dptr){gradients_at(r, g)}, (fcdp_dptr){reduced_at(r, g)}, SHARD_BYTES, r->reduce));
    simgpu_annotate(NULL);
    MUST(!fcdp__driver_event_record(r->drv, r->reduced[g % N_GRADIENTS], r->reduce));
}

/* New content for all shards; its modelled end is the step's. */
static void optimizer_body(void *data) {
    const look *l = data;
    for (uint32_t g = 0; g < N_GROUPS; g++)
        for (uint32_t i = 0; i < N_EXTENTS; i++)
            memset((void *)(uintptr_t)shard_at(l->r, g, i), content_of(g, i, l->r->topology.rank, l->step), EXTENT_SHARD_BYTES[i]);
    if (l->step > 0) l->r->stamps.end_ns[l->step - 1] = simgpu_ready_ns() + ns_of(l->r->config->scenario->optimizer_ms);
}

static void optimizer(rank *r) {
    look l = {r, 0, r->step};
    struct simgpu_kernel kernel = {.name = "optimizer",
                                   .duration_ns = ns_of(r->config->scenario->optimizer_ms),
                                   .n_accesses = 2,
                                   .accesses = {{shard_at(r, 0, 0), N_GROUPS * SHARD_BYTES, 1},
                                                {reduced_at(r, 0), N_GROUPS * SHARD_BYTES, 0}},
                                   .body = optimizer_body,
                                   .data = &l,
                                   .data_bytes = sizeof l};
    MUST(!simgpu_launch(r->compute, &kernel));
}

/* ---- a step ---- */

static void forward(rank *r) {
    fcdp_engine_begin_pass(r->engine);
    fcdp_tree_begin_forward(r->tree);
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        unshard(r, g, true);
        compute(r, g, "forward", r->config->scenario->forward_ms, false);
        if (g != ROOT) MUST(!fcdp_group_reshard(r->groups[g], r->compute, false));
    }
}

static void backward(rank *r) {
    fcdp_tree_begin_backward(r->tree);
    unshard(r, N_GROUPS - 1, false);
    for (uint32_t g = N_GROUPS; g-- > 0;) {
        if (g > ROOT + 1) unshard(r, g - 1, false);
        compute(r, g, "backward", r->config->scenario->backward_ms, true);
        MUST(!fcdp_group_reshard(r->groups[g], r->compute, false));
        reduce(r, g);
        fcdp_group_ask_again(r->groups[g]);
    }
}

static void step(rank *r) {
    forward(r);
    backward(r);
    MUST(!fcdp_engine_check(r->engine));
    MUST(!fcdp__driver_stream_wait(r->drv, r->compute, r->reduced[ROOT % N_GRADIENTS]));
    r->step++;
    optimizer(r);
}

/* ---- life ---- */

static void memory_make(rank *r) {
    size_t bytes = fcdp__round_up((size_t)(2 * N_GROUPS + N_GRADIENTS * N_RANKS) * SHARD_BYTES, PAGE_BYTES);
    fcdp_dptr at;
    MUST(!fcdp__driver_range_reserve(r->drv, bytes, &at));
    MUST(!fcdp__driver_phys_create(r->drv, bytes, &r->pages));
    MUST(!fcdp__driver_map(r->drv, at, bytes, r->pages));
    MUST(!fcdp__driver_set_access(r->drv, at, bytes));
    r->memory = at.addr;
    r->memory_bytes = bytes;
}

static void memory_free(rank *r) {
    MUST(!fcdp__driver_unmap(r->drv, (fcdp_dptr){r->memory}, r->memory_bytes));
    MUST(!fcdp__driver_phys_release(r->drv, r->pages));
    MUST(!fcdp__driver_range_free(r->drv, (fcdp_dptr){r->memory}, r->memory_bytes));
}

static void device_make(rank *r) {
    fcdp_engine_config config = {
        .options = {.restore = FCDP_RESTORE_SLICE,
                    .mapping = r->config->mapping,
                    .prefetch = r->config->prefetch,
                    .device_budget_bytes = (size_t)1 << 30,
                    .host_budget_bytes = (size_t)1 << 30,
                    .timeout_s = TIMEOUT_S},
        .driver = FCDP_DRIVER_SIM,
        .sim_library = r->config->sim_library,
    };
    MUST(!fcdp_engine_create(&config, &r->engine));
    r->drv = fcdp_engine_driver(r->engine);
    simgpu_set_pcie(pcie_rate(r->config->scenario));
    simgpu_set_memory(MEMORY_RATE);
    MUST(!fcdp__driver_stream_create(r->drv, &r->compute));
    MUST(!fcdp__driver_stream_create(r->drv, &r->reduce));
    fcdp__driver_stream_name(r->drv, r->compute, "compute");
    fcdp__driver_stream_name(r->drv, r->reduce, "reduce-scatter");
    MUST(!fcdp__driver_event_create(r->drv, &r->computed));
    for (int i = 0; i < N_GRADIENTS; i++) MUST(!fcdp__driver_event_create(r->drv, &r->reduced[i]));
    memory_make(r);
}

static void net_make(rank *r, simnet_fabric *fabric) {
    MUST(!simnet_attach(fabric, r->topology.rank, r->drv, &r->endpoint));
    r->lanes[FCDP_LANE_INTER] = simnet_comm_get(r->endpoint, SIMNET_INTER, 0);
    r->lanes[FCDP_LANE_NODE] = simnet_comm_get(r->endpoint, SIMNET_INTRA, 0);
    r->world = simnet_comm_get(r->endpoint, SIMNET_WORLD, 0);
}

static fcdp_transport nccl_transport(rank *r) {
    Dl_info about;
    simnccl_device_set(r->endpoint, r->drv);
    MUST(dladdr((void *)(uintptr_t)simnccl_device_set, &about));
    MUST(!fcdp__nccl_load(about.dli_fname, &r->nccl));
    MUST(!fcdp__nccl_ids_make(r->nccl, &r->topology, &r->board->nccl_ids[r->topology.rank]));
    meet(r);
    fcdp_nccl_config config = {r->nccl, r->drv, r->topology, r->board->nccl_ids, TIMEOUT_S};
    fcdp_nccl_transport *transport;
    MUST(!fcdp__nccl_create(&config, &transport));
    return fcdp__nccl_table(transport); /* the comm destroys it */
}

/* A broken rule fails the run even if its operation was lucky. */
static void nccl_end(rank *r) {
    struct simnccl_state state;
    if (!r->nccl) return;
    fcdp__nccl_unload(r->nccl);
    simnccl_state(&state);
    MUST(state.broken == 0 && state.live == 0 && state.groups == 0 && state.launches > 0);
    simnccl_reset();
}

/* The node's leader makes what its ranks share; agreements order who reads what. */
static void comm_make(rank *r) {
    fcdp_transport transport = r->config->nccl ? nccl_transport(r) : net_transport(r);
    board *b = r->board;
    uint32_t node = r->topology.node;
    bool leads = r->topology.local == 0;
    if (leads) MUST(!fcdp_engine_account_create(r->engine, &b->account[node]));
    meet(r);
    if (!leads) MUST(!fcdp_engine_account_join(r->engine, &b->account[node]));
    MUST(!fcdp_comm_create(r->engine, &r->topology, &transport, &r->comm));
    if (leads) MUST(!fcdp_comm_host_create(r->comm, &b->host[node]));
    meet(r);
    if (!leads) MUST(!fcdp_comm_host_join(r->comm, &b->host[node]));
    MUST(!fcdp_tree_create(r->comm, &r->tree));
}

static void group_make(rank *r, uint32_t g) {
    fcdp_extent_spec specs[N_EXTENTS];
    char name[32];
    uint32_t node = r->topology.node;
    for (uint32_t i = 0; i < N_EXTENTS; i++) specs[i] = (fcdp_extent_spec){EXTENT_SHARD_BYTES[i], 1};
    snprintf(name, sizeof name, "group %u", g);
    MUST(!fcdp_group_create(r->comm, name, specs, N_EXTENTS, &r->groups[g]));
    fcdp_group_join(r->groups[g], r->tree);
    if (r->topology.local == 0) MUST(!fcdp_group_host_alloc(r->groups[g], &r->board->offset[node]));
    meet(r);
    MUST(!fcdp_group_attach(r->groups[g], r->board->offset[node]));
    meet(r);
}

static void rank_make(rank *r, simnet_fabric *fabric, uint32_t number) {
    uint32_t node_of[N_RANKS];
    for (uint32_t i = 0; i < N_RANKS; i++) node_of[i] = i / NODE_SIZE;
    MUST(!fcdp__topology_make(node_of, N_RANKS, number, &r->topology));
    if (r->config->timelines) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s.%u.json", r->config->timelines, r->config->scenario->name, number);
        MUST(simgpu_timeline_begin(path) == 0);
    }
    device_make(r);
    net_make(r, fabric);
    comm_make(r);
    for (uint32_t g = 0; g < N_GROUPS; g++) group_make(r, g);
    optimizer(r); /* the first content */
    meet(r);
}

/* Nobody leaves before all are done: who waits for a rank that has left takes it for a failure. */
static void rank_end(rank *r) {
    MUST(!fcdp__driver_stream_sync(r->drv, r->compute));
    MUST(!fcdp_engine_drain(r->engine));
    simgpu_timeline_end();
    meet(r);
    for (uint32_t g = 0; g < N_GROUPS; g++) fcdp_group_destroy(r->groups[g]);
    fcdp_tree_destroy(r->tree);
    for (int i = 0; i < N_GRADIENTS; i++) fcdp__driver_event_destroy(r->drv, r->reduced[i]);
    fcdp__driver_event_destroy(r->drv, r->computed);
    fcdp__driver_stream_destroy(r->drv, r->compute);
    fcdp__driver_stream_destroy(r->drv, r->reduce);
    memory_free(r);
    fcdp_comm_destroy(r->comm);
    nccl_end(r);
    fcdp_engine_destroy(r->engine);
    simnet_detach(r->endpoint);
}

static void counts_begin(rank *r) {
    simgpu_calls_reset();
    simgpu_blocking_reset();
    r->agreements = 0;
    r->agreed_ns = 0;
}

/* Calls of the driver's function of this name, without the prefix of all of them: nothing but the driver's own file and simgpu names them. */
static unsigned long calls_of(const char *function) {
    const char *name;
    for (unsigned i = 0; (name = simgpu_entry_name(i)); i++)
        if (!strcmp(name + 2, function)) return simgpu_calls(name);
    MUST(!"the simulated driver has no such function");
    return 0;
}

static void counts_end(const rank *r, rank_result *out) {
    struct simgpu_blocking blocked;
    simgpu_blocking_total(0, &blocked);
    out->blocking = blocked.calls;
    out->waits = blocked.waits;
    out->creates = calls_of("MemCreate");
    out->maps = calls_of("MemMap");
    out->accesses = calls_of("MemSetAccess");
    out->unmaps = calls_of("MemUnmap");
    out->agreements = r->agreements;
}

void rank_run(const run_config *config, simnet_fabric *fabric, board *b, uint32_t number, rank_result *result_out) {
    rank *r = calloc(1, sizeof *r);
    MUST(r);
    r->config = config;
    r->board = b;
    rank_make(r, fabric, number);
    for (uint32_t i = 0; i < config->n_warm; i++) step(r);
    counts_begin(r);
    uint64_t begin_ns = fcdp__now_ns();
    for (uint32_t i = 0; i < config->n_steps; i++) step(r);
    result_out->enqueue_ns = fcdp__now_ns() - begin_ns - r->agreed_ns;
    counts_end(r, result_out);
    rank_end(r);
    const uint64_t *before = r->stamps.end_ns + config->n_warm - 1;
    for (uint32_t i = 0; i < config->n_steps; i++) result_out->step_ms[i] = (double)(before[i + 1] - before[i]) / 1e6;
    result_out->wrong = r->stamps.wrong;
    free(r);
}
