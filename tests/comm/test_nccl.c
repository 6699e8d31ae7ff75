/* The NCCL transport over the double, between processes: what it
 * gathers, in which order, and how it fails. */
#include <dirent.h>
#include <errno.h>

#include "comm/nccl_api.h"
#include "tests/comm/nccl_world.h"
#include "tests/fail_thread.h"
#include "tests/log_text.h"

enum { MAX_PARTS = 5, LANE_BYTES = MEMORY_BYTES / FCDP_N_LANES / 4096 * 4096, FAULT_S = 20 };

/* ---- schedules: the same on every rank ---- */

static void lane_of(const member *m, int lane, uint32_t *size_out, uint32_t *place_out) {
    *size_out = lane == FCDP_LANE_NODE ? m->topology.node_size : m->topology.n_nodes;
    *place_out = lane == FCDP_LANE_NODE ? m->topology.local : m->topology.node;
}

static uint32_t rank_at(const member *m, int lane, uint32_t place) {
    return lane == FCDP_LANE_NODE ? m->topology.node * m->topology.node_size + place
                                  : place * m->topology.node_size + m->topology.local;
}

static uint8_t content(uint32_t rank, uint64_t salt, size_t part, size_t i) {
    return (uint8_t)(1 + rank * 37 + salt * 11 + part * 101 + i * 7);
}

/* Parts of the lane's own memory that do not overlap. */
static size_t parts_choose(const member *m, int lane, uint64_t *random, fcdp_part parts[MAX_PARTS]) {
    size_t n = 1 + random_below(random, MAX_PARTS), offset = (size_t)lane * LANE_BYTES;
    uint32_t size, place;
    lane_of(m, lane, &size, &place);
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 1 + random_below(random, 3000),
               stride = random_below(random, 2) ? bytes : bytes + random_below(random, 5000);
        parts[i] = (fcdp_part){fcdp__dptr_add(m->memory, offset), bytes, stride};
        offset += size * stride;
    }
    return n;
}

static uint8_t *at_of(const member *m, const fcdp_part *part, uint32_t place) {
    return m->bytes + (part->at.addr - m->memory.addr) + place * part->stride_bytes;
}

static void parts_fill(const member *m, int lane, const fcdp_part *parts, size_t n, uint64_t salt) {
    uint32_t size, place;
    lane_of(m, lane, &size, &place);
    memset(m->bytes + (size_t)lane * LANE_BYTES, 0, LANE_BYTES);
    for (size_t p = 0; p < n; p++)
        for (size_t i = 0; i < parts[p].bytes; i++)
            at_of(m, &parts[p], place)[i] = content(m->topology.rank, salt, p, i);
}

/* Every member's bytes are there, and nothing between them. */
static void parts_check(const member *m, int lane, const fcdp_part *parts, size_t n, uint64_t salt) {
    uint32_t size, place;
    lane_of(m, lane, &size, &place);
    for (size_t p = 0; p < n; p++)
        for (uint32_t who = 0; who < size; who++) {
            const uint8_t *at = at_of(m, &parts[p], who);
            for (size_t i = 0; i < parts[p].stride_bytes; i++)
                MUST(at[i] == (i < parts[p].bytes ? content(rank_at(m, lane, who), salt, p, i) : 0));
        }
}

static bool serves(const member *m, int lane) {
    return lane != FCDP_LANE_NODE || m->topology.node_size > 1;
}

/* ---- what it gathers ---- */

/* In rounds of one launch per lane in random order, without a wait between; then all is looked at. */
static void schedules_body(member *m) {
    uint64_t random = m->seed;
    fcdp_part parts[FCDP_N_LANES][MAX_PARTS];
    size_t n[FCDP_N_LANES];
    MUST(!transport_make(m));
    for (uint64_t round = 0; round < m->n; round++) {
        int first = (int)random_below(&random, FCDP_N_LANES);
        for (int k = 0; k < FCDP_N_LANES; k++) {
            int lane = (first + k) % FCDP_N_LANES;
            n[lane] = parts_choose(m, lane, &random, parts[lane]);
            parts_fill(m, lane, parts[lane], n[lane], round);
            if (serves(m, lane)) MUST(!member_all_gather(m, lane, parts[lane], n[lane]));
        }
        streams_sync(m);
        MUST(!m->table.check(m->table.ctx));
        for (int lane = 0; lane < FCDP_N_LANES; lane++)
            if (serves(m, lane)) parts_check(m, lane, parts[lane], n[lane], round);
    }
    meet(m);
}

static void bytes_come_to_their_places(void **state) {
    (void)state;
    static const uint32_t shapes[][2] = {{2, 2}, {4, 1}, {3, 2}, {2, 4}};
    uint64_t seed = seed_choose("bytes_come_to_their_places");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        world_run(&(world){shapes[i][0], shapes[i][1], 30, seed + i, 10, schedules_body}, NULL);
}

/* Many launches on each lane before anything is waited for: their order is the double's to judge. */
static void long_schedule_body(member *m) {
    enum { SCHEDULES = 100, LENGTH = 20 };
    uint64_t random = m->seed, own = m->seed + m->topology.rank;
    struct simnccl_state before, now;
    MUST(!transport_make(m));
    simnccl_state(&before);
    for (int s = 0; s < SCHEDULES; s++) {
        for (int i = 0; i < LENGTH; i++) {
            fcdp_part parts[MAX_PARTS];
            int lane = (int)random_below(&random, FCDP_N_LANES);
            size_t n = parts_choose(m, lane, &random, parts);
            MUST(!member_all_gather(m, lane, parts, n));
            for (size_t spins = random_below(&own, 3000); spins > 0; spins--) __asm__ volatile("");
        }
        streams_sync(m);
        MUST(!m->table.check(m->table.ctx));
    }
    simnccl_state(&now);
    MUST(now.launches - before.launches == SCHEDULES * LENGTH);
    MUST(now.connections == before.connections); /* all were made before */
    meet(m);
}

/* Its connections are made with the communicators: others may have all of the device from then on. Where they
 * have it before, the text says so. */
static void full_device_body(member *m) {
    enum { CONNECTION_BYTES = 4 << 20 };
    struct simgpu_live live;
    simnccl_set_connection_bytes(CONNECTION_BYTES);
    simgpu_live(&live);
    MUST(!transport_make(m));
    meet(m);
    simgpu_live(&live);
    simgpu_set_capacity(live.device_bytes);
    uint64_t random = m->seed;
    for (int i = 0; i < 20; i++) {
        fcdp_part parts[MAX_PARTS];
        int lane = (int)random_below(&random, FCDP_N_LANES);
        MUST(!member_all_gather(m, lane, parts, parts_choose(m, lane, &random, parts)));
    }
    streams_sync(m);
    MUST(!m->table.check(m->table.ctx));
    meet(m);
    fcdp__nccl_destroy(m->transport);
    m->transport = NULL;
    simgpu_live(&live);
    simgpu_set_capacity(live.device_bytes + CONNECTION_BYTES); /* less what the probe has */
    MUST(transport_make(m) && strstr(fcdp_error_text(), "out of memory"));
}

static void connections_take_their_memory_before_the_first_step(void **state) {
    (void)state;
    world_run(&(world){2, 2, 30, seed_choose("connections_take_their_memory"), 0, full_device_body}, NULL);
}

static void a_hundred_schedules_keep_their_order(void **state) {
    (void)state;
    world_run(&(world){2, 2, 30, seed_choose("a_hundred_schedules_keep_their_order"), 0, long_schedule_body},
              NULL);
}

/* ---- how it fails ---- */

static const int lane_at[] = {FCDP_LANE_INTER, FCDP_LANE_NODE,  FCDP_LANE_INTER,
                              FCDP_LANE_NODE,  FCDP_LANE_INTER, FCDP_LANE_INTER};
enum { N_CALLS = sizeof lane_at / sizeof *lane_at };

static fcdp_status call(member *m, int lane) {
    fcdp_part parts[2] = {{fcdp__dptr_add(m->memory, (size_t)lane * LANE_BYTES), 4096, 4096},
                          {fcdp__dptr_add(m->memory, (size_t)lane * LANE_BYTES + (128 << 10)), 4096, 8192}};
    return member_all_gather(m, lane, parts, 2);
}

static bool streams_are_idle(member *m) {
    bool idle = true;
    for (int i = 0; i < WORLD_N_STREAMS; i++) {
        fcdp_status status = fcdp__driver_stream_query(m->drv, m->streams[i]);
        MUST(status >= 0);
        idle = idle && status == FCDP_OK;
    }
    return idle;
}

/* What a monitor does: until the transport says that it has failed, or what is on the streams is late; then
 * it aborts. False: all has ended well. */
static bool watch(member *m, fcdp_status status, double late_s, char *text, size_t n) {
    uint64_t begin_ns = fcdp__now_ns();
    bool late = false, idle = false;
    for (; !status && !late && !idle; sched_yield()) {
        idle = streams_are_idle(m);
        status = m->table.check(m->table.ctx);
        late = (double)(fcdp__now_ns() - begin_ns) > late_s * 1e9;
    }
    if (!status && idle) return false;
    snprintf(text, n, "%s", status ? fcdp_error_text() : "late");
    m->table.abort(m->table.ctx, text);
    return true;
}

/* After an abort: streams end, the first text stays, and nothing is launched any more. */
static void assert_ended(member *m, const char *text) {
    streams_sync(m);
    MUST(m->table.check(m->table.ctx));
    MUST(strstr(fcdp_error_text(), text));
    m->table.abort(m->table.ctx, "again");
    MUST(m->table.check(m->table.ctx) && strstr(fcdp_error_text(), text));
    MUST(call(m, FCDP_LANE_INTER) && strstr(fcdp_error_text(), text));
}

static void failing_body(member *m) {
    uint32_t victim = m->n % m->topology.n_ranks;
    bool stalls = m->seed == SIMNET_FAULT_STALL;
    char text[512];
    MUST(!transport_make(m));
    if (m->topology.rank == victim) simnet_fail_nth(m->endpoint, m->n + 1, (simnet_fault)m->seed);
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < N_CALLS && !status; i++) status = call(m, lane_at[i]);
    if (watch(m, status, stalls ? 0.5 : FAULT_S, text, sizeof text)) {
        bool own = strstr(text, stalls ? "late" : "was made to fail"),
             told = strstr(text, "aborted") || strstr(text, "was made to fail");
        if (!own && (m->topology.rank == victim || !told))
            fprintf(stderr, "rank %u: %s\n", m->topology.rank, text);
        MUST(own || (m->topology.rank != victim && told));
        assert_ended(m, text);
    } else {
        MUST(m->topology.rank != victim); /* this rank shares no later call with it */
    }
    meet(m);
}

/* Of the calls every third, from a random one on, where TEST_COARSER is what TSan has, or tools/test.sh
 * --quick. */
static unsigned stride_of_calls(void) {
    const char *coarser = getenv("TEST_COARSER");
    return coarser && atoi(coarser) >= 16 ? 3 : 1;
}

static unsigned first_of_calls(void) {
    return (unsigned)(fcdp__now_ns() / 1000 % stride_of_calls());
}

static void every_call_may_fail_or_stall(void **state) {
    (void)state;
    const unsigned stride = stride_of_calls();
    for (unsigned n = first_of_calls(); n < N_CALLS; n += stride)
        for (uint64_t fault = SIMNET_FAULT_CALL; fault <= SIMNET_FAULT_STALL; fault++)
            world_run(&(world){2, 2, 5, fault, n, failing_body}, NULL);
}

static void killed_body(member *m) {
    uint32_t victim = m->n % m->topology.n_ranks;
    char text[512];
    MUST(!transport_make(m));
    meet(m);
    fcdp_status status = FCDP_OK;
    for (unsigned i = 0; i < N_CALLS && !status; i++) {
        if (i == m->n && m->topology.rank == victim) member_die(m);
        status = call(m, lane_at[i]);
    }
    if (!watch(m, status, FAULT_S, text, sizeof text)) return;
    MUST(strstr(text, "has died") || strstr(text, "aborted"));
    assert_ended(m, text);
}

static void a_rank_killed_before_each_call(void **state) {
    (void)state;
    const unsigned stride = stride_of_calls();
    for (unsigned n = first_of_calls(); n < N_CALLS; n += stride)
        world_run(&(world){2, 2, 10, 0, n, killed_body}, NULL);
}

/* Its last member never comes. */
static void absent_body(member *m) {
    if (m->topology.rank == 3) {
        meet(m); /* transport_make's */
        return;
    }
    uint64_t begin_ns = fcdp__now_ns();
    fcdp_status status = transport_make(m);
    /* in which the others would wait for this one */
    MUST((double)(fcdp__now_ns() - begin_ns) < m->timeout_s * 1e9);
    if (m->topology.rank == 0) { /* its lane between nodes is there: 0 and 2, 0 and 1; 1 waits for 3 */
        MUST(status == FCDP_ERR_TIMEOUT && strstr(fcdp_error_text(), "(node, member 0 of 2)"));
        return;
    }
    MUST(status == FCDP_ERR_TIMEOUT);
    MUST(strstr(fcdp_error_text(), "ncclCommInitRankConfig (") && strstr(fcdp_error_text(), "FCDP_TIMEOUT"));
}

static void a_member_that_does_not_come_is_a_timeout(void **state) {
    (void)state;
    world_run(&(world){2, 2, 2, 0, 0, absent_body}, NULL);
}

/* ---- every entry point fails ---- */

static const char *entry; /* inherited by the ranks */

/* Rank 0's n-th call of it; the others end by themselves, in time. */
static void entry_body(member *m) {
    char text[512];
    if (m->topology.rank == 0) MUST(!simnccl_fail_nth(entry, m->n, 2));
    fcdp_status status = transport_make(m);
    if (status) {
        MUST(m->topology.rank != 0 || strstr(fcdp_error_text(), "was made to fail") ||
             !simnccl_fault_is_spent());
        m->board->spent = m->board->spent || (m->topology.rank == 0 && simnccl_fault_is_spent());
        return;
    }
    for (int i = 0; i < N_CALLS && !status; i++) status = call(m, lane_at[i]);
    uint64_t begin_ns = fcdp__now_ns();
    while (!status && !streams_are_idle(m) && fcdp__now_ns() - begin_ns < 300000000)
        status = m->table.check(m->table.ctx);
    if (status || !streams_are_idle(m)) {
        snprintf(text, sizeof text, "%s", status ? fcdp_error_text() : "late");
        m->table.abort(m->table.ctx, text);
        assert_ended(m, text);
    }
    if (m->topology.rank == 0) {
        fcdp__nccl_destroy(m->transport);
        m->transport = NULL;
        m->board->spent = simnccl_fault_is_spent();
    }
}

/* The first call of each, and of those behind it as many as stride_of_calls says. */
static void every_entry_point_may_fail(void **state) {
    (void)state;
    static const char *const entries[] = {"ncclGetUniqueId", "ncclCommInitRankConfig",
                                          "ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd",
                                          /* what destroying or aborting fails to free is NCCL's loss */
                                          "ncclAllGather", "ncclSend", "ncclRecv", "ncclCommFinalize"};
    unsigned long runs = 0;
    for (size_t e = 0; e < sizeof entries / sizeof *entries; e++) {
        board *b;
        /* of polls there are many */
        unsigned n = 0, step = strcmp(entries[e], "ncclCommGetAsyncError") ? 1 : 4;
        entry = entries[e];
        double timeout_s = 0.6;
        do {
            n += step * (n == 0 ? 1 : n == step ? 1 + first_of_calls() : stride_of_calls());
            world_run(&(world){2, 2, timeout_s, 0, n, entry_body}, &b);
            runs++;
            if (!b->spent && n == step && timeout_s < 5) { /* too busy a machine for the first call even */
                timeout_s *= 2;
                n = 0;
            }
        } while ((b->spent || n == 0) && n < 24);
        assert_true(n > 1);
    }
    print_message("%lu runs\n", runs);
}

/* ---- an abort beside launches ---- */

typedef struct launcher {
    member *m;
    uint64_t seed;
} launcher;

static void *launcher_main(void *arg) {
    const launcher *l = arg;
    uint64_t random = l->seed;
    fcdp_status status = FCDP_OK;
    while (!status) status = call(l->m, (int)random_below(&random, FCDP_N_LANES));
    return NULL;
}

/* The double refuses calls of aborted communicators, and those that would need another order. */
static void aborting_body(member *m) {
    pthread_t thread;
    launcher l = {m, m->seed};
    uint64_t own = m->seed + m->topology.rank;
    MUST(!transport_make(m));
    MUST(pthread_create(&thread, NULL, launcher_main, &l) == 0);
    uint64_t until_ns = fcdp__now_ns() + random_below(&own, 20000000);
    while (fcdp__now_ns() < until_ns && !m->table.check(m->table.ctx)) sched_yield();
    m->table.abort(m->table.ctx, "a rank gives up");
    pthread_join(thread, NULL);
    streams_sync(m);
    MUST(m->table.check(m->table.ctx));
}

static void an_abort_beside_launches(void **state) {
    (void)state;
    uint64_t seed = seed_choose("an_abort_beside_launches");
    for (unsigned round = 0; round < 10; round++)
        world_run(&(world){2, 2, 5, seed + 100 * round, 0, aborting_body}, NULL);
}

/* ---- an abort that does not end ---- */

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    unsigned n_inside;
    bool may_end;
} held = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, false};

static int abort_held(ncclComm_t comm) {
    (void)comm;
    pthread_mutex_lock(&held.mutex);
    held.n_inside++;
    pthread_cond_broadcast(&held.changed);
    while (!held.may_end) pthread_cond_wait(&held.changed, &held.mutex);
    pthread_mutex_unlock(&held.mutex);
    return 1; /* then it asks the library for the error's name */
}

static unsigned n_threads(void) {
    unsigned n = 0;
    DIR *tasks = opendir("/proc/self/task");
    MUST(tasks);
    for (struct dirent *entry; (entry = readdir(tasks));) n += entry->d_name[0] != '.';
    closedir(tasks);
    return n;
}

/* The driver and the library's table go first. */
static void held_body(member *m) {
    fcdp_driver *own;
    fcdp_nccl *nccl;
    MUST(!fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &own));
    MUST(!fcdp__nccl_load(double_path(), NULL, &nccl));
    nccl->ncclCommAbort = abort_held;
    fcdp_driver *drv = m->drv;
    fcdp_nccl *usual = m->nccl;
    m->drv = own, m->nccl = nccl;
    MUST(!transport_make(m));
    m->table.abort(m->table.ctx, "a rank gives up");
    pthread_mutex_lock(&held.mutex);
    while (held.n_inside < FCDP_N_LANES) pthread_cond_wait(&held.changed, &held.mutex);
    pthread_mutex_unlock(&held.mutex);
    log_keep(FCDP_LOG_WARN);
    fcdp__nccl_destroy(m->transport);
    const char *said = log_kept();
    MUST(strstr(said, "warning: NCCL's communicators have not been aborted after "));
    MUST(strstr(said, " s; they stay until the process ends\n"));
    memset(nccl, 0, sizeof *nccl);
    fcdp__nccl_unload(nccl);
    fcdp__driver_close(own);
    unsigned n = n_threads();
    pthread_mutex_lock(&held.mutex);
    held.may_end = true;
    pthread_cond_broadcast(&held.changed);
    pthread_mutex_unlock(&held.mutex);
    while (n_threads() > n - FCDP_N_LANES) sched_yield();
    m->drv = drv, m->nccl = usual, m->transport = NULL;
    meet(m);
    _exit(0); /* what was not aborted stays */
}

static void an_abort_may_outlive_the_driver(void **state) {
    (void)state;
    world_run(&(world){2, 2, 2, 0, 0, held_body}, NULL);
}

static void threadless_body(member *m) {
    MUST(!transport_make(m));
    log_keep(FCDP_LOG_WARN);
    starts_no_thread = true;
    m->table.abort(m->table.ctx, "a rank gives up");
    starts_no_thread = false;
    const char *said = log_kept();
    MUST(log_count(said, "warning: no thread to abort NCCL's communicator (") == FCDP_N_LANES);
    MUST(strstr(said, "): its collectives do not end before this process does\n"));
    meet(m);
    _exit(0); /* what was not aborted stays */
}

static void an_abort_without_a_thread_is_said(void **state) {
    (void)state;
    world_run(&(world){2, 2, 2, 0, 0, threadless_body}, NULL);
}

/* ---- the library ---- */

static void a_library_that_cannot_serve_is_refused(void **state) {
    (void)state;
    fcdp_nccl *nccl;
    assert_int_equal(fcdp__nccl_load("/nowhere/libnccl.so.2", NULL, &nccl), FCDP_ERR_UNSUPPORTED);
    assert_text("/nowhere/libnccl.so.2");
    assert_text("2.26");
}

static void unordered_body(member *m) {
    fcdp_nccl *nccl;
    (void)m;
    unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    MUST(fcdp__nccl_load(double_path(), NULL, &nccl) == FCDP_ERR_UNSUPPORTED);
    MUST(strstr(fcdp_error_text(), "NCCL_LAUNCH_ORDER_IMPLICIT is not set"));
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0", 1);
    MUST(fcdp__nccl_load(double_path(), NULL, &nccl) == FCDP_ERR_UNSUPPORTED);
    MUST(strstr(fcdp_error_text(), "NCCL_LAUNCH_ORDER_IMPLICIT is 0"));
}

static void without_an_order_on_the_device_nccl_is_refused(void **state) {
    (void)state;
    world_run(&(world){2, 1, 1, 0, 0, unordered_body}, NULL);
}

/* Beside torch's reduce-scatter, of all of NCCL's CTAs, the node's lane takes few. */
static void ctas_body(member *m) {
    const char *users[] = {"NCCL_MIN_CTAS", "NCCL_MAX_CTAS"};
    MUST(!transport_make(m));
    MUST(simnccl_ctas(fcdp__nccl_communicator(m->transport, FCDP_LANE_NODE)) == 8);
    MUST(simnccl_ctas(fcdp__nccl_communicator(m->transport, FCDP_LANE_INTER)) == 24);
    for (int i = 0; i < 2; i++) {
        fcdp__nccl_destroy(m->transport);
        setenv(users[i], "20", 1);
        MUST(!transport_make(m));
        MUST(simnccl_ctas(fcdp__nccl_communicator(m->transport, FCDP_LANE_NODE)) == (i ? 20 : 24));
        unsetenv(users[i]);
    }
}

static void the_nodes_lane_takes_few_ctas_unless_the_user_says(void **state) {
    (void)state;
    world_run(&(world){2, 2, 30, 0, 0, ctas_body}, NULL);
}

static void old_body(member *m) {
    fcdp_nccl *old;
    MUST(m->nccl->version == 22809);
    simnccl_set_version(22506);
    MUST(fcdp__nccl_load(double_path(), NULL, &old) == FCDP_ERR_UNSUPPORTED);
    MUST(strstr(fcdp_error_text(), "22506") && strstr(fcdp_error_text(), "2.26"));
}

static void an_old_version_is_refused(void **state) {
    (void)state;
    world_run(&(world){2, 1, 1, 0, 0, old_body}, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_come_to_their_places),
        cmocka_unit_test(a_hundred_schedules_keep_their_order),
        cmocka_unit_test(connections_take_their_memory_before_the_first_step),
        cmocka_unit_test(every_call_may_fail_or_stall),
        cmocka_unit_test(a_rank_killed_before_each_call),
        cmocka_unit_test(a_member_that_does_not_come_is_a_timeout),
        cmocka_unit_test(every_entry_point_may_fail),
        cmocka_unit_test(an_abort_beside_launches),
        cmocka_unit_test(an_abort_may_outlive_the_driver),
        cmocka_unit_test(an_abort_without_a_thread_is_said),
        cmocka_unit_test(a_library_that_cannot_serve_is_refused),
        cmocka_unit_test(an_old_version_is_refused),
        cmocka_unit_test(the_nodes_lane_takes_few_ctas_unless_the_user_says),
        cmocka_unit_test(without_an_order_on_the_device_nccl_is_refused),
    };
    return cmocka_run_group_tests_name("nccl", tests, NULL, NULL);
}
