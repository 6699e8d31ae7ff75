/* rank.c - one rank: what FSDP2's hooks do, in their order, over an engine (rank.h), simgpu and simnet.
 *
 * As FSDP2: the next group is unsharded in backward while one computes; gradients are reduced on a stream of
 * their own, at most one reduction behind compute; the optimizer waits for the last. Nothing else in the loop
 * waits for anything: where the engine does not, steps are enqueued ahead of the device.
 */
#include <stdlib.h>
#include <string.h>

#include "sim/gpu/simgpu.h"
#include "tools/bench/overlap/content.h"
#include "tools/bench/overlap/rank.h"

static uint64_t ns_of(double ms) {
    return (uint64_t)(ms * 1e6);
}

/* ---- where things are ---- */

uint64_t shard_at(const rank *r, uint32_t g, uint32_t extent) {
    return r->memory + (uint64_t)g * SHARD_BYTES + (extent ? EXTENT_SHARD_BYTES[0] : 0);
}

static uint64_t reduced_at(const rank *r, uint32_t g) {
    return r->memory + (uint64_t)(N_GROUPS + g) * SHARD_BYTES;
}

static uint64_t gradients_at(const rank *r, uint32_t g) {
    return r->memory + (uint64_t)(2 * N_GROUPS + g % N_GRADIENTS * N_RANKS) * SHARD_BYTES;
}

/* ---- agreements ---- */

void meet(rank *r) {
    MUST(!board_agree(r->board, NULL, 0));
}

void agree_on(rank *r, uint8_t *votes, size_t n_votes) {
    uint64_t begin_ns = fcdp__now_ns();
    MUST(!board_agree(r->board, votes, n_votes));
    r->agreed_ns += fcdp__now_ns() - begin_ns;
    r->agreements++;
}

/* ---- uses ---- */

typedef struct look {
    rank *r;
    uint32_t g, step;
} look;

/* Every byte. On the compute stream's thread. */
static void look_body(void *data) {
    const look *l = data;
    for (uint32_t i = 0; i < N_EXTENTS; i++) {
        const uint8_t *at = (const uint8_t *)(uintptr_t)l->r->extents[l->g][i];
        for (uint32_t rank = 0; rank < N_RANKS; rank++) {
            const uint8_t *shard = at + rank * EXTENT_SHARD_BYTES[i];
            if (memcmp(shard, content_of(l->g, i, rank, l->step), EXTENT_SHARD_BYTES[i]) != 0)
                l->r->stamps.wrong++;
        }
    }
}

static void compute(rank *r, uint32_t g, const char *what, double ms, bool has_gradients) {
    char name[48];
    look l = {r, g, r->step};
    snprintf(name, sizeof name, "%s %u", what, g);
    struct simgpu_kernel kernel = {
        .name = name, .duration_ns = ns_of(ms), .body = look_body, .data = &l, .data_bytes = sizeof l};
    for (uint32_t i = 0; i < N_EXTENTS; i++)
        kernel.accesses[kernel.n_accesses++] = (struct simgpu_access){r->extents[g][i],
                                                                      N_RANKS * EXTENT_SHARD_BYTES[i], 0};
    if (has_gradients)
        kernel.accesses[kernel.n_accesses++] = (struct simgpu_access){gradients_at(r, g),
                                                                      N_RANKS * SHARD_BYTES, 1};
    engine_wait(r, g);
    MUST(!simgpu_launch(r->compute, &kernel));
}

/* Behind the group's backward. Compute goes on when the reduction before this one is over:
 * its input's buffer is the next one's. */
static void reduce(rank *r, uint32_t g) {
    char label[48];
    if (g + 1 < N_GROUPS)
        MUST(!fcdp__driver_stream_wait(r->drv, r->compute, r->reduced[(g + 1) % N_GRADIENTS]));
    MUST(!fcdp__driver_event_record(r->drv, r->computed, r->compute));
    MUST(!fcdp__driver_stream_wait(r->drv, r->reduce, r->computed));
    snprintf(label, sizeof label, "reduce-scatter %u", g);
    simgpu_annotate(label);
    MUST(!simnet_reduce_scatter(r->world, (fcdp_dptr){gradients_at(r, g)}, (fcdp_dptr){reduced_at(r, g)},
                                SHARD_BYTES, r->reduce));
    simgpu_annotate(NULL);
    MUST(!fcdp__driver_event_record(r->drv, r->reduced[g % N_GRADIENTS], r->reduce));
}

/* New content for all shards; its modelled end is the step's. */
static void optimizer_body(void *data) {
    const look *l = data;
    for (uint32_t g = 0; g < N_GROUPS; g++)
        for (uint32_t i = 0; i < N_EXTENTS; i++)
            memcpy((void *)(uintptr_t)shard_at(l->r, g, i), content_of(g, i, l->r->topology.rank, l->step),
                   EXTENT_SHARD_BYTES[i]);
    if (l->step > 0)
        l->r->stamps.end_ns[l->step - 1] = simgpu_ready_ns() + ns_of(l->r->config->scenario->optimizer_ms);
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
    engine_begin_forward(r);
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        engine_unshard(r, g, true);
        compute(r, g, "forward", r->config->scenario->forward_ms, false);
        if (g != ROOT) engine_reshard(r, g);
    }
}

static void backward(rank *r) {
    engine_begin_backward(r);
    engine_unshard(r, N_GROUPS - 1, false);
    for (uint32_t g = N_GROUPS; g-- > 0;) {
        if (g > ROOT + 1) engine_unshard(r, g - 1, false);
        compute(r, g, "backward", r->config->scenario->backward_ms, true);
        engine_reshard(r, g);
        reduce(r, g);
        engine_reduced(r, g);
    }
}

static void step(rank *r) {
    forward(r);
    backward(r);
    engine_check(r);
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
    engine_open(r);
    simgpu_set_pcie(pcie_rate(r->config->scenario));
    simgpu_set_memory(MEMORY_RATE);
    simgpu_set_core(r->config->core_times > 0 ? r->config->core_times : 1);
    MUST(!fcdp__driver_stream_create(r->drv, &r->compute));
    MUST(!fcdp__driver_stream_create(r->drv, &r->reduce));
    fcdp__driver_stream_name(r->drv, r->compute, "compute");
    fcdp__driver_stream_name(r->drv, r->reduce, "reduce-scatter");
    MUST(!fcdp__driver_event_create(r->drv, &r->computed));
    for (int i = 0; i < N_GRADIENTS; i++) MUST(!fcdp__driver_event_create(r->drv, &r->reduced[i]));
    memory_make(r);
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
    MUST(!simnet_attach(fabric, r->topology.rank, r->drv, &r->endpoint));
    r->world = simnet_comm_get(r->endpoint, SIMNET_WORLD, 0);
    engine_connect(r);
    optimizer(r); /* the first content */
    meet(r);
}

/* No rank leaves before all are done: a rank that waits for one that has left takes that for a failure. */
static void rank_end(rank *r, rank_result *result_out) {
    MUST(!fcdp__driver_stream_sync(r->drv, r->compute));
    engine_drain(r);
    engine_codec(r, result_out);
    simgpu_timeline_end();
    meet(r);
    engine_disconnect(r);
    for (int i = 0; i < N_GRADIENTS; i++) fcdp__driver_event_destroy(r->drv, r->reduced[i]);
    fcdp__driver_event_destroy(r->drv, r->computed);
    fcdp__driver_stream_destroy(r->drv, r->compute);
    fcdp__driver_stream_destroy(r->drv, r->reduce);
    memory_free(r);
    engine_close(r);
    simnet_detach(r->endpoint);
}

static void counts_begin(rank *r) {
    simgpu_calls_reset();
    simgpu_blocking_reset();
    r->agreements = r->blocking = r->waits = 0;
    r->agreed_ns = 0;
}

/* Calls of the driver's function of this name, without the prefix of all of them: nothing but the driver's
 * own file and simgpu names them. */
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
    out->blocking = blocked.calls + r->blocking;
    out->waits = blocked.waits + r->waits;
    out->creates = calls_of("MemCreate");
    out->maps = calls_of("MemMap");
    out->accesses = calls_of("MemSetAccess");
    out->unmaps = calls_of("MemUnmap");
    out->agreements = r->agreements;
}

void rank_run(const run_config *config, simnet_fabric *fabric, board *b, uint32_t number,
              rank_result *result_out) {
    rank *r = calloc(1, sizeof *r);
    MUST(r);
    r->config = config;
    r->board = b;
    rank_make(r, fabric, number);
    for (uint32_t i = 0; i < config->n_warm; i++) step(r);
    counts_begin(r);
    fcdp_engine_stats before_all, stats;
    engine_stats(r, &before_all);
    uint64_t begin_ns = fcdp__now_ns();
    for (uint32_t i = 0; i < config->n_steps; i++) step(r);
    result_out->enqueue_ns = fcdp__now_ns() - begin_ns - r->agreed_ns;
    counts_end(r, result_out);
    engine_stats(r, &stats);
    result_out->d2h_bytes = stats.moves.d2h_bytes - before_all.moves.d2h_bytes;
    result_out->h2d_bytes = stats.moves.h2d_bytes - before_all.moves.h2d_bytes;
    result_out->evictions = stats.moves.n_evictions - before_all.moves.n_evictions;
    result_out->peak_bytes = stats.device_peak_bytes;
    rank_end(r, result_out);
    const uint64_t *before = r->stamps.end_ns + config->n_warm - 1;
    for (uint32_t i = 0; i < config->n_steps; i++)
        result_out->step_ms[i] = (double)(before[i + 1] - before[i]) / 1e6;
    result_out->wrong = r->stamps.wrong;
    free(r);
}
