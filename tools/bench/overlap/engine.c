/* engine.c - the engine of this tree: its operations are on streams, its collectives
 * simnet's or those of NCCL's double on it. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"
#include "comm/nccl.h"
#include "comm/unshard.h"
#include "sim/gpu/simgpu.h"
#include "sim/nccl/simnccl.h"
#include "tools/bench/overlap/content.h"
#include "tools/bench/overlap/rank.h"

struct engine {
    fcdp_engine *fcdp;
    fcdp_comm *comm;
    fcdp_tree *tree;
    fcdp_group *groups[N_GROUPS];
    simnet_comm *lanes[FCDP_N_LANES];
    fcdp_nccl *nccl;                         /* NULL: the lanes are simnet's */
    fcdp_transport carrier;                  /* with the codec: of all but exchanges */
    simnet_comm *exchanges[FCDP_N_CHANNELS]; /* of host memory, between the nodes */
};

/* ---- transport ---- */

static fcdp_status net_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n,
                                  fcdp_stream stream, fcdp_event turn) {
    rank *r = ctx;
    simnet_part own[4 * N_EXTENTS * N_NODES];
    if (n > sizeof own / sizeof *own) return fcdp__fail(FCDP_ERR_INVALID, "%zu parts in one collective", n);
    for (size_t i = 0; i < n; i++) own[i] = (simnet_part){parts[i].at, parts[i].bytes, parts[i].stride_bytes};
    fcdp_status status = fcdp__driver_stream_wait(r->drv, stream, turn);
    if (!status) status = simnet_all_gather_parts(r->engine->lanes[lane], own, n, stream);
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
    r->engine->lanes[FCDP_LANE_INTER] = simnet_comm_get(r->endpoint, SIMNET_INTER, 0);
    r->engine->lanes[FCDP_LANE_NODE] = simnet_comm_get(r->endpoint, SIMNET_INTRA, 0);
    return (fcdp_transport){.ctx = r, .all_gather = net_all_gather, .check = net_check, .abort = net_abort};
}

static fcdp_transport nccl_transport(rank *r) {
    Dl_info about;
    fcdp_nccl_ids ids[N_RANKS];
    fcdp_nccl_transport *transport;
    engine *e = r->engine;
    _Static_assert(sizeof ids[0] == BOARD_ID_BYTES, "what a rank brings to the exchange");
    simnccl_device_set(r->endpoint, r->drv);
    MUST(dladdr((void *)(uintptr_t)simnccl_device_set, &about));
    MUST(!fcdp__nccl_load(about.dli_fname, NULL, &e->nccl));
    MUST(!fcdp__nccl_ids_make(e->nccl, &r->topology, &ids[r->topology.rank]));
    memcpy(r->board->ids[r->topology.rank], &ids[r->topology.rank], BOARD_ID_BYTES);
    meet(r);
    memcpy(ids, r->board->ids, sizeof ids);
    fcdp_nccl_config config = {e->nccl, r->drv, r->topology, ids, TIMEOUT_S};
    MUST(!fcdp__nccl_create(&config, &transport));
    return fcdp__nccl_table(transport); /* the comm destroys it */
}

/* ---- beside it an exchange of host memory, as the plugin has gloo's beside NCCL ---- */

static fcdp_status pair_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n,
                                   fcdp_stream stream, fcdp_event turn) {
    const fcdp_transport *carrier = &((rank *)ctx)->engine->carrier;
    return carrier->all_gather(carrier->ctx, lane, parts, n, stream, turn);
}

static fcdp_status pair_exchange(void *ctx, fcdp_channel channel, void *buffer, size_t bytes) {
    return simnet_exchange(((rank *)ctx)->engine->exchanges[channel], buffer, bytes);
}

static fcdp_status pair_check(void *ctx) {
    const fcdp_transport *carrier = &((rank *)ctx)->engine->carrier;
    fcdp_status status = net_check(ctx);
    return status ? status : carrier->check(carrier->ctx);
}

static void pair_abort(void *ctx, const char *why) {
    const fcdp_transport *carrier = &((rank *)ctx)->engine->carrier;
    net_abort(ctx, why);
    carrier->abort(carrier->ctx, why);
}

static void pair_destroy(void *ctx) {
    const fcdp_transport *carrier = &((rank *)ctx)->engine->carrier;
    if (carrier->destroy) carrier->destroy(carrier->ctx);
}

/* The exchanges' communicators are such that NCCL's double makes none of its own over them. */
static fcdp_transport with_exchange(rank *r, fcdp_transport carrier) {
    enum { EXCHANGES = 3 };
    r->engine->carrier = carrier;
    for (uint32_t channel = 0; channel < FCDP_N_CHANNELS; channel++) {
        r->engine->exchanges[channel] = simnet_comm_get(r->endpoint, SIMNET_INTER, EXCHANGES + channel);
        MUST(r->engine->exchanges[channel]);
    }
    return (fcdp_transport){.ctx = r,
                            .all_gather = pair_all_gather,
                            .exchange = pair_exchange,
                            .all_channels = true,
                            .check = pair_check,
                            .abort = pair_abort,
                            .destroy = pair_destroy};
}

/* A broken rule fails the run even if its operation was lucky. */
static void nccl_end(fcdp_nccl *nccl) {
    struct simnccl_state state;
    if (!nccl) return;
    fcdp__nccl_unload(nccl);
    simnccl_state(&state);
    MUST(state.broken == 0 && state.live == 0 && state.groups == 0 && state.launches > 0);
    simnccl_reset();
}

/* ---- the program ---- */

static uint32_t index_of(const rank *r, const fcdp_group *group) {
    uint32_t g = 0;
    while (r->engine->groups[g] != group) g++;
    return g;
}

static fcdp_status program_look(void *ctx, fcdp_group *group, unsigned what, fcdp_sight *sight) {
    const rank *r = ctx;
    (void)group;
    (void)what;
    for (uint32_t i = 0; i < N_EXTENTS; i++)
        sight->signals[i] = (fcdp_signals){.optimizer_steps = r->step, .requires_grad = 1};
    sight->process = (fcdp_process_signals){.grad_mode = true, .optimizer_seen = true};
    return FCDP_OK;
}

static fcdp_status program_inputs(void *ctx, fcdp_group *group, const uint8_t *stale, uint64_t *inputs_out,
                                  fcdp_stream *stream) {
    const rank *r = ctx;
    (void)stale;
    (void)stream;
    for (uint32_t i = 0; i < N_EXTENTS; i++) inputs_out[i] = shard_at(r, index_of(r, group), i);
    return FCDP_OK;
}

static fcdp_status program_agree(void *ctx, fcdp_group *const *groups, uint32_t n_groups, uint8_t *votes,
                                 size_t n) {
    (void)groups;
    (void)n_groups;
    agree_on(ctx, votes, n);
    return FCDP_OK;
}

static fcdp_program program_of(rank *r) {
    return (fcdp_program){.ctx = r, .look = program_look, .inputs = program_inputs, .agree = program_agree};
}

/* ---- uses ---- */

void engine_begin_forward(rank *r) {
    fcdp_engine_begin_pass(r->engine->fcdp);
    fcdp_tree_begin_forward(r->engine->tree);
}

void engine_begin_backward(rank *r) {
    fcdp_tree_begin_backward(r->engine->tree);
}

void engine_unshard(rank *r, uint32_t g, bool forward) {
    fcdp_program program = program_of(r);
    fcdp_unshard_args args = {.pass = forward ? FCDP_PASS_FORWARD : FCDP_PASS_BACKWARD, .stream = r->compute};
    MUST(!fcdp_unshard(r->engine->groups[g], r->engine->tree, &program, &args));
}

void engine_wait(rank *r, uint32_t g) {
    fcdp_program program = program_of(r);
    MUST(!fcdp_wait(r->engine->groups[g], &program, r->compute));
}

void engine_reshard(rank *r, uint32_t g) {
    MUST(!fcdp_group_reshard(r->engine->groups[g], r->compute, false));
}

void engine_reduced(rank *r, uint32_t g) {
    fcdp_group_ask_again(r->engine->groups[g]);
}

void engine_check(rank *r) {
    MUST(!fcdp_engine_check(r->engine->fcdp));
}

/* ---- life ---- */

void engine_open(rank *r) {
    fcdp_engine_config config = {
        .options = {.restore = FCDP_RESTORE_SLICE,
                    .mapping = r->config->exact ? FCDP_MAPPING_EXACT : FCDP_MAPPING_SLOTS,
                    .prefetch = r->config->prefetch,
                    .codec = r->config->codec ? FCDP_CODEC_DELTA : FCDP_CODEC_NONE,
                    .codec_threads = r->config->codec_threads,
                    .policy = r->config->policy,
                    .tau = r->config->tau,
                    .device_budget_bytes = r->config->budget_bytes,
                    .host_budget_bytes = (size_t)1 << 30,
                    .timeout_s = TIMEOUT_S},
        .driver = FCDP_DRIVER_SIM,
        .sim_library = r->config->sim_library,
    };
    r->engine = calloc(1, sizeof *r->engine);
    MUST(r->engine);
    MUST(!fcdp_engine_create(&config, &r->engine->fcdp));
    r->drv = fcdp_engine_driver(r->engine->fcdp);
}

static void group_make(rank *r, uint32_t g) {
    static const uint8_t element_bytes[N_EXTENTS] = {CONTENT_ELEMENT_BYTES, CONTENT_ELEMENT_BYTES};
    fcdp_extent_spec specs[N_EXTENTS];
    char name[32];
    engine *e = r->engine;
    uint64_t *offset = &r->board->offset[r->topology.node];
    for (uint32_t i = 0; i < N_EXTENTS; i++) specs[i] = (fcdp_extent_spec){EXTENT_SHARD_BYTES[i], 1};
    snprintf(name, sizeof name, "group %u", g);
    MUST(!fcdp_group_create(e->comm, name, specs, N_EXTENTS, &e->groups[g]));
    fcdp_group_set_element_bytes(e->groups[g], element_bytes);
    if (r->config->tiers) fcdp_group_set_tier(e->groups[g], r->config->tiers[g]);
    fcdp_group_join(e->groups[g], e->tree);
    if (r->topology.local == 0) MUST(!fcdp_group_host_alloc(e->groups[g], offset));
    meet(r);
    MUST(!fcdp_group_attach(e->groups[g], *offset));
    for (uint32_t i = 0; i < N_EXTENTS; i++) r->extents[g][i] = fcdp_group_extent(e->groups[g], i).addr;
    meet(r);
}

/* The node's leader makes what its ranks share; agreements order the reads. */
void engine_connect(rank *r) {
    engine *e = r->engine;
    fcdp_transport transport = r->config->nccl ? nccl_transport(r) : net_transport(r);
    if (r->config->codec) transport = with_exchange(r, transport);
    fcdp_shared_ticket *account = &r->board->account[r->topology.node],
                       *host = &r->board->host[r->topology.node];
    bool leads = r->topology.local == 0;
    if (leads) MUST(!fcdp_engine_account_create(e->fcdp, account));
    meet(r);
    if (!leads) MUST(!fcdp_engine_account_join(e->fcdp, account));
    MUST(!fcdp_comm_create(e->fcdp, &r->topology, &transport, &e->comm));
    if (leads) MUST(!fcdp_comm_host_create(e->comm, host));
    meet(r);
    if (!leads) MUST(!fcdp_comm_host_join(e->comm, host));
    MUST(!fcdp_tree_create(e->comm, &e->tree));
    for (uint32_t g = 0; g < N_GROUPS; g++) group_make(r, g);
    MUST(!fcdp_tree_set_groups(e->tree, e->groups, N_GROUPS));
}

void engine_stats(const rank *r, fcdp_engine_stats *stats_out) {
    fcdp_engine_stats_get(r->engine->fcdp, stats_out);
}

void engine_drain(rank *r) {
    MUST(!fcdp_engine_drain(r->engine->fcdp));
}

void engine_codec(const rank *r, rank_result *result_out) {
    const fcdp_delta_rates *rates = &r->engine->comm->delta_rates;
    fcdp_engine_stats stats;
    engine_stats(r, &stats);
    result_out->n_differences = stats.n_delta_gathers;
    result_out->n_whole = stats.n_delta_whole;
    result_out->n_by_device = stats.n_delta_by_device;
    result_out->crossed_bytes = stats.gather.inter_bytes_sent -
                                (uint64_t)N_GROUPS * (N_NODES - 1) * SHARD_BYTES;
    result_out->encode_ns = rates->encode_ns;
    result_out->decode_ns = rates->decode_ns;
}

void engine_disconnect(rank *r) {
    for (uint32_t g = 0; g < N_GROUPS; g++) fcdp_group_destroy(r->engine->groups[g]);
    fcdp_tree_destroy(r->engine->tree);
}

void engine_close(rank *r) {
    fcdp_comm_destroy(r->engine->comm);
    nccl_end(r->engine->nccl);
    fcdp_engine_destroy(r->engine->fcdp);
    free(r->engine);
}
