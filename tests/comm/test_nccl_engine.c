/* The engine over the NCCL transport and the double, between processes: steps of a small model, of
 * which any collective fails, stalls, or meets a rank that has been killed. All that live end, with a
 * text, in time, and give everything back. */
#include "comm/spilled.h"
#include "tests/comm/nccl_world.h"

enum {
    N_GROUPS = 3,
    N_STEPS = 2,
    SHARD_BYTES = 8 << 10,
    FAULT_NONE = -1,
    FAULT_KILL = SIMNET_FAULT_STALL + 1,
    /* each node's first rank is killed, of which the transport says nothing: a collective never ends */
    FAULT_KILL_UNSAID,
    FAULT_KILL_UNSAID_SPILLED
};

typedef struct rank {
    member *m;
    fcdp_engine *engine;
    fcdp_comm *comm;
    fcdp_tree *tree;
    fcdp_group *groups[N_GROUPS];
    fcdp_stream compute;
    uint32_t step;
    unsigned long until_kill, until_stuck; /* launches; 0: it lives; none is stuck */
    bool spilled, unsaid;
    _Atomic bool aborted;
    _Atomic unsigned long wrong;
} rank;

static uint64_t shard_at(const rank *r, uint32_t g) {
    return r->m->memory.addr + g * SHARD_BYTES;
}

static uint8_t content(uint32_t g, uint32_t number, uint32_t step) {
    return (uint8_t)(1 + g * 31 + number * 7 + step * 13);
}

/* ---- a transport that kills ---- */

static void until_aborted(void *ctx) {
    rank *r = ctx;
    while (!atomic_load(&r->aborted)) sched_yield();
}

static fcdp_status counted_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n,
                                      fcdp_stream stream, fcdp_event turn) {
    rank *r = ctx;
    if (r->until_kill && --r->until_kill == 0) member_die(r->m);
    if (r->until_stuck && r->until_stuck-- == 1)
        return fcdp__driver_host_function(r->m->drv, stream, until_aborted, r);
    fcdp_status status = r->m->table.all_gather(r->m->table.ctx, lane, parts, n, stream, turn);
    if (!status || !r->unsaid) return status;
    /* Another one has died already, and the double says so: this transport does not. */
    if (r->until_kill) member_die(r->m);
    r->until_stuck = 0;
    return fcdp__driver_host_function(r->m->drv, stream, until_aborted, r);
}

static fcdp_status counted_check(void *ctx) {
    rank *r = ctx;
    return r->unsaid ? FCDP_OK : r->m->table.check(r->m->table.ctx);
}

static void counted_abort(void *ctx, const char *why) {
    rank *r = ctx;
    atomic_store(&r->aborted, true);
    r->m->table.abort(r->m->table.ctx, why);
}

/* ---- the program ---- */

static uint32_t index_of(const rank *r, const fcdp_group *group) {
    uint32_t g = 0;
    while (r->groups[g] != group) g++;
    return g;
}

static fcdp_status program_look(void *ctx, fcdp_group *group, unsigned what, fcdp_sight *sight) {
    const rank *r = ctx;
    (void)group;
    (void)what;
    sight->signals[0] = (fcdp_signals){.optimizer_steps = r->step, .requires_grad = 1};
    sight->process = (fcdp_process_signals){.grad_mode = true, .optimizer_seen = true};
    return FCDP_OK;
}

static fcdp_status program_inputs(void *ctx, fcdp_group *group, const uint8_t *stale, uint64_t *inputs_out,
                                  fcdp_stream *stream) {
    const rank *r = ctx;
    (void)stale;
    (void)stream;
    inputs_out[0] = shard_at(r, index_of(r, group));
    return FCDP_OK;
}

/* Each rank votes for all: all have the same votes, until one fails, which then takes part in nothing. */
static fcdp_status program_agree(void *ctx, fcdp_group *const *groups, uint32_t n_groups, uint8_t *votes,
                                 size_t n) {
    (void)ctx;
    (void)groups;
    (void)n_groups;
    (void)votes;
    (void)n;
    return FCDP_OK;
}

static fcdp_program program_of(rank *r) {
    return (fcdp_program){.ctx = r, .look = program_look, .inputs = program_inputs, .agree = program_agree};
}

/* ---- a step ---- */

typedef struct look {
    rank *r;
    uint32_t g, step;
} look;

static void write_body(void *data) {
    const look *l = data;
    for (uint32_t g = 0; g < N_GROUPS; g++)
        memset((void *)(uintptr_t)shard_at(l->r, g), content(g, l->r->m->topology.rank, l->step),
               SHARD_BYTES);
}

static void optimizer(rank *r) {
    look l = {r, 0, r->step};
    struct simgpu_kernel kernel = {.name = "optimizer",
                                   .n_accesses = 1,
                                   .accesses = {{shard_at(r, 0), N_GROUPS * SHARD_BYTES, 1}},
                                   .body = write_body,
                                   .data = &l,
                                   .data_bytes = sizeof l};
    MUST(simgpu_launch(r->compute, &kernel) == 0);
}

static void look_body(void *data) {
    const look *l = data;
    const uint8_t *at = (const uint8_t *)(uintptr_t)fcdp_group_extent(l->r->groups[l->g], 0).addr;
    for (uint32_t i = 0; i < l->r->m->topology.n_ranks; i++)
        for (size_t k = 0; k < SHARD_BYTES; k++)
            if (at[i * SHARD_BYTES + k] != content(l->g, i, l->step)) l->r->wrong++;
}

/* What was gathered must be right as long as nothing has failed: so what is looked at counts only then. */
static fcdp_status use(rank *r, uint32_t g) {
    look l = {r, g, r->step};
    struct simgpu_kernel kernel = {
        .name = "compute",
        .n_accesses = 1,
        .accesses = {{fcdp_group_extent(r->groups[g], 0).addr, r->m->topology.n_ranks * SHARD_BYTES, 0}},
        .body = look_body,
        .data = &l,
        .data_bytes = sizeof l};
    fcdp_program program = program_of(r);
    fcdp_status status = fcdp_wait(r->groups[g], &program, r->compute);
    if (!status) MUST(simgpu_launch(r->compute, &kernel) == 0);
    return status;
}

static fcdp_status pass_over(rank *r, bool forward) {
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < N_GROUPS && !status; k++) {
        uint32_t g = forward ? k : N_GROUPS - 1 - k;
        fcdp_program program = program_of(r);
        fcdp_unshard_args args = {.pass = forward ? FCDP_PASS_FORWARD : FCDP_PASS_BACKWARD,
                                  .stream = r->compute};
        status = fcdp_unshard(r->groups[g], r->tree, &program, &args);
        if (!status) status = use(r, g);
        if (!status) status = fcdp_group_reshard(r->groups[g], r->compute, false);
    }
    return status;
}

static fcdp_status train(rank *r) {
    fcdp_status status = FCDP_OK;
    while (r->step < N_STEPS && !status) {
        fcdp_engine_begin_pass(r->engine);
        fcdp_tree_begin_forward(r->tree);
        status = pass_over(r, true);
        fcdp_tree_begin_backward(r->tree);
        if (!status) status = pass_over(r, false);
        if (!status) status = fcdp_engine_check(r->engine);
        r->step++;
        if (!status) optimizer(r);
    }
    return status ? status : fcdp_engine_drain(r->engine);
}

/* ---- life ---- */

static void comm_make(rank *r) {
    board *b = r->m->board;
    uint32_t node = r->m->topology.node;
    bool leads = r->m->topology.local == 0;
    fcdp_transport transport = {
        .ctx = r, .all_gather = counted_all_gather, .check = counted_check, .abort = counted_abort};
    if (leads) MUST(!fcdp_engine_account_create(r->engine, &b->account[node]));
    meet(r->m);
    if (!leads) MUST(!fcdp_engine_account_join(r->engine, &b->account[node]));
    MUST(!fcdp_comm_create(r->engine, &r->m->topology, &transport, &r->comm));
    if (leads) MUST(!fcdp_comm_host_create(r->comm, &b->host[node]));
    meet(r->m);
    if (!leads) MUST(!fcdp_comm_host_join(r->comm, &b->host[node]));
    MUST(!fcdp_tree_create(r->comm, &r->tree));
}

static void group_make(rank *r, uint32_t g) {
    fcdp_extent_spec spec = {SHARD_BYTES, 1};
    char name[32];
    uint32_t node = r->m->topology.node;
    snprintf(name, sizeof name, "layers.%u", g);
    MUST(!fcdp_group_create(r->comm, name, &spec, 1, &r->groups[g]));
    fcdp_group_join(r->groups[g], r->tree);
    if (r->spilled) {
        MUST(!fcdp_group_attach_file(r->groups[g]));
        return;
    }
    if (r->m->topology.local == 0) MUST(!fcdp_group_host_alloc(r->groups[g], &r->m->board->offset[node]));
    meet(r->m);
    MUST(!fcdp_group_attach(r->groups[g], r->m->board->offset[node]));
    meet(r->m);
}

static void rank_make(rank *r) {
    fcdp_engine_config config = {.options = {.restore = FCDP_RESTORE_SLICE,
                                             .mapping = FCDP_MAPPING_SLOTS,
                                             .prefetch = 1,
                                             .device_budget_bytes = 64 << 20,
                                             .host_budget_bytes = 64 << 20,
                                             .timeout_s = r->m->timeout_s},
                                 .driver = FCDP_DRIVER_SIM};
    if (r->spilled) strcpy(config.options.spill_dir, "/tmp");
    MUST(!transport_make(r->m));
    MUST(!fcdp_engine_create(&config, &r->engine));
    MUST(!fcdp__driver_stream_create(r->m->drv, &r->compute));
    comm_make(r);
    for (uint32_t g = 0; g < N_GROUPS; g++) group_make(r, g);
    MUST(!fcdp_tree_set_groups(r->tree, r->groups, N_GROUPS));
    optimizer(r);
    meet(r->m);
}

static void rank_free(rank *r) {
    MUST(!fcdp__driver_stream_sync(r->m->drv, r->compute));
    for (uint32_t g = 0; g < N_GROUPS; g++) fcdp_group_destroy(r->groups[g]);
    fcdp_tree_destroy(r->tree);
    fcdp_comm_destroy(r->comm);
    fcdp_engine_destroy(r->engine);
    fcdp__driver_stream_destroy(r->m->drv, r->compute);
}

/* The text of a failure: by itself it must tell which group or which rank. */
static void text_check(const rank *r, int fault, bool is_victim, const char *text) {
    bool names = strstr(text, "layers.") || strstr(text, "rank ");
    bool known = strstr(text, "was made to fail") || strstr(text, "aborted") || strstr(text, "has left") ||
                 strstr(text, "has died") || strstr(text, "has failed") || strstr(text, "gone)") ||
                 strstr(text, "FCDP_TIMEOUT");
    if (!names || !known) fprintf(stderr, "rank %u, fault %d: %s\n", r->m->topology.rank, fault, text);
    MUST(names && known);
    if (is_victim && fault <= SIMNET_FAULT_FAIL) MUST(strstr(text, "was made to fail"));
}

static void training_body(member *m) {
    rank r = {.m = m};
    int fault = (int)m->seed;
    bool is_victim = fault != FAULT_NONE && m->topology.rank == m->n % m->topology.n_ranks;
    r.unsaid = fault > FAULT_KILL;
    if (r.unsaid) is_victim = m->topology.local == 0;
    r.spilled = fault == FAULT_KILL_UNSAID_SPILLED;
    rank_make(&r);
    if (is_victim && fault >= FAULT_KILL) r.until_kill = m->n + 1;
    if (!is_victim && r.unsaid) r.until_stuck = m->n + 1;
    if (is_victim && fault < FAULT_KILL) simnet_fail_nth(m->endpoint, m->n + 1, (simnet_fault)fault);
    struct simnccl_state before, state;
    simnccl_state(&before);
    uint64_t begin_ns = fcdp__now_ns();
    fcdp_status status = train(&r);
    double took_s = (double)(fcdp__now_ns() - begin_ns) / 1e9;
    if (status)
        text_check(&r, fault, is_victim, fcdp_error_text());
    else
        MUST(r.wrong == 0 && !is_victim);
    MUST(fault != FAULT_NONE || !status);
    if (r.unsaid) MUST(status == FCDP_ERR_PEER && strstr(fcdp_error_text(), "gone)"));
    MUST(took_s < m->timeout_s + 10); /* this machine's share of it aside */
    simnccl_state(&state);
    MUST(state.connections == before.connections); /* in no step */
    if (m->topology.rank == 0 && !status) m->board->launches = state.launches - before.launches;
    rank_free(&r);
}

static unsigned long launches_of_a_run(void) {
    board *b;
    world_run(&(world){2, 2, 30, (uint64_t)FAULT_NONE, 0, training_body}, &b);
    return b->launches;
}

/* TEST_COARSER=k: about every k-th, from a random one on; many runs come to all of them. Odd: the
 * kinds of collectives come in turns. */
static void every_nth(int fault, double timeout_s) {
    const char *coarser = getenv("TEST_COARSER");
    unsigned long n = launches_of_a_run(), stride = coarser ? strtoul(coarser, NULL, 10) | 1 : 1,
                  first = fcdp__now_ns() / 1000 % stride;
    assert_true(n >= 2 * N_GROUPS * N_STEPS);
    print_message("%lu collectives, from %lu on each %lu-th\n", n, first, stride);
    if (first >= n) first = n - 1;
    for (unsigned long i = first; i < n; i += stride)
        world_run(&(world){2, 2, timeout_s, (uint64_t)fault, (unsigned)i, training_body}, NULL);
}

static void every_collective_is_refused(void **state) {
    (void)state;
    every_nth(SIMNET_FAULT_CALL, 20);
}

static void every_collective_fails(void **state) {
    (void)state;
    every_nth(SIMNET_FAULT_FAIL, 20);
}

static void every_collective_stalls(void **state) {
    (void)state;
    every_nth(SIMNET_FAULT_STALL, 2);
}

static void a_rank_is_killed_in_every_collective(void **state) {
    (void)state;
    every_nth(FAULT_KILL, 1);
}

/* With a timeout that this program would not live to see: the monitor finds the process gone. */
static void a_dead_neighbour_is_found_whatever_the_transport_says(void **state) {
    (void)state;
    for (int fault = FAULT_KILL_UNSAID; fault <= FAULT_KILL_UNSAID_SPILLED; fault++)
        for (unsigned n = 1; n <= 2 * N_GROUPS;
             n += 2 * N_GROUPS - 1) /* within the node, forward and backward */
            world_run(&(world){2, 2, 3600, (uint64_t)fault, n, training_body}, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_collective_is_refused),
        cmocka_unit_test(every_collective_fails),
        cmocka_unit_test(every_collective_stalls),
        cmocka_unit_test(a_rank_is_killed_in_every_collective),
        cmocka_unit_test(a_dead_neighbour_is_found_whatever_the_transport_says),
    };
    return cmocka_run_group_tests_name("nccl engine", tests, NULL, NULL);
}
