/* nccl_world.c - ranks as forked processes over NCCL's entry points: each has a device and communicators of
 * its own. */
#include "tests/comm/nccl_world.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/prctl.h>

enum { PAGE_BYTES = 2 << 20, ALARM_S = 60, PROBE_BYTES = 2 * SIMNCCL_LARGE_BYTES };

const char *double_path(void) {
    Dl_info about;
    MUST(dladdr((void *)(uintptr_t)simnccl_reset, &about));
    return about.dli_fname;
}

void meet(member *m) {
    pthread_barrier_wait(&m->board->barrier);
}

fcdp_status member_all_gather(member *m, int lane, const fcdp_part *parts, size_t n) {
    fcdp_stream stream = m->streams[lane == FCDP_LANE_NODE ? 2 : m->n_inter++ % 2];
    return m->table.all_gather(m->table.ctx, (fcdp_lane)lane, parts, n, stream, m->turn[lane]);
}

void streams_sync(member *m) {
    for (int i = 0; i < WORLD_N_STREAMS; i++) MUST(!fcdp__driver_stream_sync(m->drv, m->streams[i]));
}

void member_die(member *m) {
    m->board->reached[m->topology.rank] = WORLD_DIES;
    kill(getpid(), SIGKILL);
    _exit(99);
}

fcdp_status transport_make(member *m) {
    fcdp_nccl_ids *own = &m->board->ids[m->topology.rank];
    memset(own, 0, sizeof *own);
    fcdp_status status = fcdp__nccl_ids_make(m->nccl, &m->topology, own);
    char text[512];
    snprintf(text, sizeof text, "%s", fcdp_error_text());
    meet(m);
    if (status) return fcdp__fail(status, "%s", text);
    fcdp_nccl_config config = {m->nccl, m->drv, m->topology, m->board->ids, m->timeout_s};
    status = fcdp__nccl_create(&config, &m->transport);
    if (!status) m->table = fcdp__nccl_table(m->transport);
    return status;
}

/* ---- a rank's life ---- */

static void topology_make(const world *w, uint32_t rank, fcdp_topology *topology_out) {
    uint32_t node_of[WORLD_MAX_RANKS];
    for (uint32_t i = 0; i < w->nodes * w->ranks_per_node; i++) node_of[i] = i / w->ranks_per_node;
    MUST(!fcdp__topology_make(node_of, w->nodes * w->ranks_per_node, rank, topology_out));
}

static void memory_make(member *m, fcdp_phys *pages) {
    MUST(!fcdp__driver_range_reserve(m->drv, MEMORY_BYTES, &m->memory));
    MUST(!fcdp__driver_phys_create(m->drv, MEMORY_BYTES, pages));
    MUST(!fcdp__driver_map(m->drv, m->memory, MEMORY_BYTES, *pages));
    MUST(!fcdp__driver_set_access(m->drv, m->memory, MEMORY_BYTES));
    m->bytes = (uint8_t *)(uintptr_t)m->memory.addr;
}

static void memory_free(member *m, fcdp_phys pages) {
    MUST(!fcdp__driver_unmap(m->drv, m->memory, MEMORY_BYTES));
    MUST(!fcdp__driver_phys_release(m->drv, pages));
    MUST(!fcdp__driver_range_free(m->drv, m->memory, MEMORY_BYTES));
}

static void nothing_is_left(void) {
    struct simgpu_live live;
    struct simnccl_state state;
    simnccl_state(&state);
    if (state.broken) fprintf(stderr, "a rule of NCCL's is broken: %s\n", state.text);
    MUST(state.broken == 0 && state.live == 0 && state.groups == 0);
    simgpu_live(&live);
    MUST(live.handles + live.ranges + live.maps + live.streams + live.events + live.device_bytes == 0);
}

static void member_run(const world *w, simnet_fabric *fabric, board *b, uint32_t rank) {
    member m = {.board = b, .seed = w->seed, .n = w->n, .timeout_s = w->timeout_s};
    fcdp_phys pages;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(ALARM_S * (getenv("TEST_COARSER") ? 4 : 1)); /* whatever hangs is a failure of its own */
    topology_make(w, rank, &m.topology);
    MUST(!fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &m.drv));
    simgpu_set_races(1);
    fcdp__nccl_probe_bytes = PROBE_BYTES;
    MUST(!simnet_attach(fabric, rank, m.drv, &m.endpoint));
    simnccl_device_set(m.endpoint, m.drv);
    MUST(!fcdp__nccl_load(double_path(), NULL, &m.nccl));
    for (int i = 0; i < WORLD_N_STREAMS; i++) MUST(!fcdp__driver_stream_create(m.drv, &m.streams[i]));
    for (int i = 0; i < FCDP_N_LANES; i++) MUST(!fcdp__driver_event_create(m.drv, &m.turn[i]));
    memory_make(&m, &pages);
    meet(&m); /* from here on each may wait for each */
    w->body(&m);
    fcdp__nccl_destroy(m.transport);
    for (int i = 0; i < WORLD_N_STREAMS; i++) fcdp__driver_stream_destroy(m.drv, m.streams[i]);
    for (int i = 0; i < FCDP_N_LANES; i++) fcdp__driver_event_destroy(m.drv, m.turn[i]);
    memory_free(&m, pages);
    nothing_is_left();
    simnccl_reset();
    fcdp__nccl_unload(m.nccl);
    simnet_detach(m.endpoint);
    fcdp__driver_close(m.drv);
    _exit(0);
}

/* ---- the world ---- */

static board *board_make(uint32_t n) {
    static board *b;
    if (!b) b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(b, MAP_FAILED);
    memset(b, 0, sizeof *b);
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&b->barrier, &shared, n);
    return b;
}

/* The next one that ends; where it ends badly, it takes those with it that would wait for it. */
static bool rank_await(const board *b, pid_t *pids, uint32_t n) {
    int status;
    uint32_t r = 0;
    pid_t pid = waitpid(-1, &status, 0);
    while (r < n && pids[r] != pid) r++;
    assert_true(r < n);
    pids[r] = 0;
    bool dies = b->reached[r] == WORLD_DIES;
    if (dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
             : WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    print_message("rank %u ended with wait status %#x\n", r, (unsigned)status);
    for (uint32_t i = 0; i < n; i++)
        if (pids[i]) kill(pids[i], SIGTERM);
    return false;
}

void world_run(const world *w, board **board_out) {
    pid_t pids[WORLD_MAX_RANKS];
    uint32_t n = w->nodes * w->ranks_per_node, wrong = 0;
    simnet_fabric *fabric;
    board *b = board_make(n);
    assert_ok(simnet_create(
        &(simnet_config){.nodes = w->nodes, .ranks_per_node = w->ranks_per_node, .staging_bytes = 64 << 10},
        &fabric));
    fflush(NULL);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    for (uint32_t r = 0; r < n; r++) {
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0) member_run(w, fabric, b, r);
    }
    for (uint32_t ended = 0; ended < n; ended++) wrong += !rank_await(b, pids, n);
    simnet_close(fabric);
    assert_int_equal(wrong, 0);
    if (board_out) *board_out = b;
}
