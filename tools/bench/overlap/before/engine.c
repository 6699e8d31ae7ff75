/* engine.c - the engine of commit 55b92e3, whose jobs ran on worker threads that waited on the host for every
 * copy, collective and stream. It is compiled with that commit's headers (build.sh), and so has its names.
 *
 * It is driven as that commit's runtime.py and fsdp2.py did on a GPU: the thread that runs the model submits
 * jobs and waits for each unshard before it launches the group's compute; in forward it lets the groups that
 * follow cross the nodes ahead; before an agreement the workers end what they have. Its transport's calls
 * wait for nothing but the network: there is no Python here. Both lanes have a worker, as on CPUs then; with
 * NCCL they would have shared one, which took as long here.
 */
#include <stdlib.h>
#include <string.h>

#include "comm/engine.h"
#include "tools/bench/overlap/rank.h"

const engine_traits the_engine = {
    .name = "the engine before, of commit 55b92e3: ", .has_slots = false, .has_nccl = false};

enum { LANES = 2, WAITED_NS = 100000 };

typedef struct lane {
    simnet_comm *comm;
    fcdp_stream stream;
} lane;

typedef struct use {          /* of a group */
    uint8_t stale[N_EXTENTS]; /* as agreed; none once it is gathered */
    bool ahead;               /* its bytes cross the nodes */
    bool later;               /* asked for, and begun when it is waited for: a restore with FCDP_PREFETCH=0 */
    fcdp_job *job;
} use;

struct engine {
    fcdp_device device;
    fcdp_engine *fcdp;
    fcdp_comm *comm;
    fcdp_group *groups[N_GROUPS];
    use uses[N_GROUPS];
    lane lanes[LANES];
    bool agreed; /* in this pass */
};

/* ---- transport: a stream per lane, and an event that the caller's thread waits for ---- */

static fcdp_status net_start(void *ctx, fcdp_lane which, fcdp_dptr buffer, size_t bytes, void **pending_out) {
    rank *r = ctx;
    lane *l = &r->engine->lanes[which];
    fcdp_event done;
    fcdp_status status = fcdp__driver_event_create(r->drv, &done);
    if (status) return status;
    status = simnet_all_gather(l->comm, buffer, bytes, l->stream);
    if (!status) status = fcdp__driver_event_record(r->drv, done, l->stream);
    if (status)
        fcdp__driver_event_destroy(r->drv, done);
    else
        *pending_out = done;
    return status;
}

static fcdp_status net_wait(void *ctx, void *pending) {
    rank *r = ctx;
    char text[512];
    fcdp_status status = fcdp__driver_event_sync(r->drv, pending);
    fcdp__driver_event_destroy(r->drv, pending);
    if (status) return status;
    status = simnet_status(r->endpoint, text, sizeof text);
    return status ? fcdp__fail(status, "%s", text) : FCDP_OK;
}

/* ---- agreements ---- */

/* The model's thread has been in a call of the engine's since then, which may wait for the workers. */
static void count_wait(rank *r, uint64_t since_ns) {
    r->blocking++;
    r->waits += fcdp__now_ns() - since_ns > WAITED_NS;
}

static void signals_make(const rank *r, fcdp_signals signals[N_EXTENTS]) {
    for (uint32_t i = 0; i < N_EXTENTS; i++)
        signals[i] = (fcdp_signals){.optimizer_steps = r->step, .requires_grad = 1};
}

static void observe(rank *r, uint32_t g, uint8_t stale_out[N_EXTENTS]) {
    fcdp_signals signals[N_EXTENTS];
    fcdp_scene scene = {.grad_mode = true, .optimizer_seen = true, .reductions = r->step};
    signals_make(r, signals);
    fcdp_group_observe(r->engine->groups[g], signals, &scene, NULL, NULL, stale_out);
    for (uint32_t i = 0; i < N_EXTENTS; i++) stale_out[i] = stale_out[i] != 0;
}

/* All groups, once in a pass. A release under way may yet find that somebody wrote to
 * its copy: the workers end it first. */
static void agree(rank *r) {
    engine *e = r->engine;
    uint8_t votes[N_GROUPS][N_EXTENTS];
    uint64_t since_ns = fcdp__now_ns();
    MUST(!fcdp_engine_drain(e->fcdp));
    count_wait(r, since_ns);
    for (uint32_t g = 0; g < N_GROUPS; g++) observe(r, g, votes[g]);
    agree_on(r, votes[0], sizeof votes);
    for (uint32_t g = 0; g < N_GROUPS; g++) memcpy(e->uses[g].stale, votes[g], N_EXTENTS);
    e->agreed = true;
}

static void audit(rank *r, uint32_t g) {
    fcdp_signals signals[N_EXTENTS];
    uint8_t moved[N_EXTENTS];
    signals_make(r, signals);
    fcdp_group_moved(r->engine->groups[g], signals, NULL, NULL, moved);
    for (uint32_t i = 0; i < N_EXTENTS; i++) MUST(!moved[i]);
}

/* ---- uses ---- */

static bool is_stale(const use *u) {
    return u->stale[0] || u->stale[1];
}

static void inputs_of(const rank *r, uint32_t g, uint64_t inputs[N_EXTENTS]) {
    for (uint32_t i = 0; i < N_EXTENTS; i++) inputs[i] = shard_at(r, g, i);
}

static void begin(rank *r, uint32_t g, fcdp_pass pass) {
    use *u = &r->engine->uses[g];
    uint64_t inputs[N_EXTENTS];
    inputs_of(r, g, inputs);
    MUST(!fcdp_group_unshard(r->engine->groups[g], u->stale, u->ahead ? NULL : inputs, pass, r->compute,
                             &u->job));
    *u = (use){.job = u->job};
}

/* The engine says how many may be under way. */
static void look_ahead(rank *r, uint32_t g) {
    for (uint32_t next = g + 1; next < N_GROUPS && next <= g + (uint32_t)r->config->prefetch; next++) {
        use *u = &r->engine->uses[next];
        uint64_t inputs[N_EXTENTS];
        if (u->ahead || !is_stale(u)) continue;
        inputs_of(r, next, inputs);
        MUST(!fcdp_group_prefetch(r->engine->groups[next], u->stale, inputs, r->compute, &u->ahead));
        if (!u->ahead) return;
    }
}

void engine_begin_forward(rank *r) {
    r->engine->agreed = false;
}

void engine_begin_backward(rank *r) {
    r->engine->agreed = false;
}

void engine_unshard(rank *r, uint32_t g, bool forward) {
    use *u = &r->engine->uses[g];
    if (r->engine->agreed)
        audit(r, g);
    else
        agree(r);
    u->later = r->config->prefetch == 0 && !is_stale(u);
    if (!u->later) begin(r, g, forward ? FCDP_PASS_FORWARD : FCDP_PASS_BACKWARD);
    if (forward) look_ahead(r, g);
}

/* The root has no job in backward: it is still there. */
void engine_wait(rank *r, uint32_t g) {
    use *u = &r->engine->uses[g];
    if (u->later) begin(r, g, FCDP_PASS_BACKWARD);
    if (!u->job) return;
    uint64_t since_ns = fcdp__now_ns();
    MUST(!fcdp_job_wait(u->job));
    count_wait(r, since_ns);
    u->job = NULL;
}

void engine_reshard(rank *r, uint32_t g) {
    MUST(!fcdp_group_reshard(r->engine->groups[g], r->compute));
}

void engine_reduced(rank *r, uint32_t g) {
    (void)r;
    (void)g; /* that would be asked for again, if it were unsharded again before the next pass */
}

void engine_check(rank *r) {
    (void)r; /* failures are those of the jobs */
}

/* ---- life ---- */

void engine_open(rank *r) {
    size_t budget_bytes = (size_t)1 << 30;
    engine *e = r->engine = calloc(1, sizeof *r->engine);
    MUST(e);
    MUST(!fcdp_device_open(FCDP_DRIVER_SIM, 0, r->config->sim_library, budget_bytes, false, &e->device));
    fcdp_engine_config config = {
        .options = {.restore = FCDP_RESTORE_SLICE,
                    .prefetch = r->config->prefetch,
                    .device_budget_bytes = budget_bytes,
                    .host_budget_bytes = budget_bytes,
                    .timeout_s = TIMEOUT_S},
        .driver = FCDP_DRIVER_SIM,
        .device = &e->device,
    };
    MUST(!fcdp_engine_create(&config, &e->fcdp));
    r->drv = e->device.drv;
}

static void group_make(rank *r, uint32_t g) {
    fcdp_extent_spec specs[N_EXTENTS];
    char name[32];
    engine *e = r->engine;
    uint64_t *offset = &r->board->offset[r->topology.node];
    for (uint32_t i = 0; i < N_EXTENTS; i++) specs[i] = (fcdp_extent_spec){EXTENT_SHARD_BYTES[i], 1};
    snprintf(name, sizeof name, "group %u", g);
    MUST(!fcdp_group_create(e->comm, name, specs, N_EXTENTS, &e->groups[g]));
    if (r->topology.local == 0) MUST(!fcdp_group_carve(e->groups[g], offset));
    meet(r);
    MUST(!fcdp_group_attach(e->groups[g], *offset));
    for (uint32_t i = 0; i < N_EXTENTS; i++) r->extents[g][i] = fcdp_group_extent(e->groups[g], i).addr;
    meet(r);
}

static void lanes_make(rank *r) {
    lane *lanes = r->engine->lanes;
    lanes[FCDP_LANE_INTER].comm = simnet_comm_get(r->endpoint, SIMNET_INTER, 0);
    lanes[FCDP_LANE_INTRA].comm = simnet_comm_get(r->endpoint, SIMNET_INTRA, 0);
    for (int i = 0; i < LANES; i++) MUST(!fcdp__driver_stream_create(r->drv, &lanes[i].stream));
    fcdp__driver_stream_name(r->drv, lanes[FCDP_LANE_INTER].stream, "inter");
    fcdp__driver_stream_name(r->drv, lanes[FCDP_LANE_INTRA].stream, "node");
}

/* The node's leader makes what its ranks share; agreements order who reads what. */
void engine_connect(rank *r) {
    engine *e = r->engine;
    fcdp_transport transport = {.ctx = r, .start = net_start, .wait = net_wait, .fails_quietly = true};
    fcdp_shared_ticket *account = &r->board->account[r->topology.node],
                       *host = &r->board->host[r->topology.node];
    bool leads = r->topology.local == 0;
    lanes_make(r);
    if (leads) MUST(!fcdp_engine_account_create(e->fcdp, account));
    meet(r);
    if (!leads) MUST(!fcdp_engine_account_join(e->fcdp, account));
    MUST(!fcdp_comm_create(e->fcdp, &r->topology, &transport, &e->comm));
    if (leads) MUST(!fcdp_comm_host_create(e->comm, host));
    meet(r);
    if (!leads) MUST(!fcdp_comm_host_join(e->comm, host));
    for (uint32_t g = 0; g < N_GROUPS; g++) group_make(r, g);
}

void engine_drain(rank *r) {
    MUST(!fcdp_engine_drain(r->engine->fcdp));
}

/* The leader frees the groups' host memory, once the others have let go of it. */
void engine_disconnect(rank *r) {
    if (r->topology.local == 0) meet(r);
    for (uint32_t g = 0; g < N_GROUPS; g++) fcdp_group_destroy(r->engine->groups[g]);
    if (r->topology.local != 0) meet(r);
}

void engine_close(rank *r) {
    engine *e = r->engine;
    fcdp_comm_destroy(e->comm);
    fcdp_engine_destroy(e->fcdp);
    for (int i = 0; i < LANES; i++) fcdp__driver_stream_destroy(r->drv, e->lanes[i].stream);
    fcdp_device_close(&e->device);
    free(e);
}
