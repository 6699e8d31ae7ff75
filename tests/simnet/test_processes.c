/* Ranks that are processes: over an inherited descriptor and over /proc, and what is left when one of them is
 * killed. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "tests/simnet/support.h"

enum { ALL_WELL = 0, PEER_DIED = 42 };

/* Told by the children: how many operations each has ended, and a child's descriptor of a fabric. */
typedef struct board {
    _Atomic bool attached[SIMNET_MAX_RANKS];
    _Atomic uint64_t ended[SIMNET_MAX_RANKS];
    _Atomic int fd;
} board;

/* One rank gathers for ever, or `n` times, and checks what it gets. Exits with ALL_WELL, or PEER_DIED when it
 * was told that a rank has died. */
static void rank_main(simnet_fabric *fabric, uint32_t rank, uint64_t n, board *board, uint32_t victim) {
    enum { BYTES = 70000 };
    fcdp_driver *drv;
    simnet_endpoint *endpoint;
    fcdp_stream stream;
    char text[512] = "", name[32];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    MUST(!fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &drv));
    MUST(!simnet_attach(fabric, rank, drv, &endpoint));
    board->attached[rank] = true;
    MUST(!fcdp__driver_stream_create(drv, &stream));
    simnet_comm *comms[] = {simnet_comm_get(endpoint, SIMNET_WORLD, 0),
                            simnet_comm_get(endpoint, SIMNET_INTER, 1)};
    uint8_t *at = malloc((size_t)BYTES * SIMNET_MAX_RANKS);
    fcdp_dptr device = {(uintptr_t)at};
    fcdp_status status = FCDP_OK;
    for (uint64_t i = 0; !status && (n == 0 || i < n); i++) {
        simnet_comm *comm = comms[i % 2];
        uint32_t members = simnet_comm_size(comm), me = simnet_comm_index(comm);
        for (size_t k = 0; k < BYTES; k++) at[me * (size_t)BYTES + k] = pattern(me, (uint32_t)i, k);
        status = simnet_all_gather(comm, device, BYTES, stream);
        if (!status) MUST(!fcdp__driver_stream_sync(drv, stream));
        if (!status) status = simnet_status(endpoint, text, sizeof text);
        for (uint32_t m = 0; !status && m < members; m++)
            for (size_t k = 0; k < BYTES; k += 97)
                MUST(at[m * (size_t)BYTES + k] == pattern(m, (uint32_t)i, k));
        board->ended[rank]++;
    }
    if (status) {
        snprintf(name, sizeof name, "rank %u has ", victim);
        MUST(status == FCDP_ERR_PEER);
        MUST(strstr(text, name)); /* died, or failed since another died */
    }
    simnet_detach(endpoint);
    free(at);
    fcdp__driver_close(drv);
    _exit(status ? PEER_DIED : ALL_WELL);
}

static board *board_make(void) {
    board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(board, MAP_FAILED);
    return board;
}

static pid_t child_start(void) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    return pid;
}

static void assert_exits(pid_t pid, int code) {
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != code)
        fail_msg("wait status %#x, expected exit %d", status, code);
}

static bool has_ended(pid_t pid) {
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

static void forked_ranks_gather(void **state) {
    (void)state;
    enum { N = 4 };
    pid_t pids[N];
    simnet_fabric *fabric;
    board *board = board_make();
    assert_ok(simnet_create(
        &(simnet_config){.nodes = 2, .ranks_per_node = 2, .staging_bytes = 64 << 10, .timeout_s = 60},
        &fabric));
    for (uint32_t r = 0; r < N; r++)
        if ((pids[r] = child_start()) == 0) rank_main(fabric, r, 50, board, N);
    for (uint32_t r = 0; r < N; r++) assert_exits(pids[r], ALL_WELL);
    for (uint32_t r = 0; r < N; r++) assert_int_equal(board->ended[r], 50);
    munmap(board, sizeof *board);
    simnet_close(fabric);
}

/* The first rank makes the fabric, the other opens it by the first one's descriptor. */
static void a_fabric_is_opened_through_proc(void **state) {
    (void)state;
    pid_t pids[2];
    board *board = board_make();
    board->fd = -1;
    for (uint32_t r = 0; r < 2; r++) {
        if ((pids[r] = child_start()) > 0) continue;
        simnet_fabric *fabric;
        if (r == 0) {
            MUST(!simnet_create(&(simnet_config){.nodes = 2, .ranks_per_node = 1, .timeout_s = 60}, &fabric));
            board->fd = simnet_fd(fabric);
        } else {
            char path[64];
            while (board->fd < 0) sched_yield();
            snprintf(path, sizeof path, "/proc/%d/fd/%d", pids[0], board->fd);
            int fd = open(path, O_RDWR | O_CLOEXEC);
            MUST(fd >= 0);
            MUST(!simnet_open(fd, &fabric));
            close(fd);
        }
        rank_main(fabric, r, 20, board, 2);
    }
    for (uint32_t r = 0; r < 2; r++) assert_exits(pids[r], ALL_WELL);
    munmap(board, sizeof *board);
}

/* At a random moment; it stays a zombie until all others have said that it died. */
static void a_killed_rank_ends_the_others_with_its_name(void **state) {
    (void)state;
    enum { N = 4, ROUNDS = 12 };
    uint64_t random = seed_choose("a_killed_rank_ends_the_others_with_its_name");
    for (int round = 0; round < ROUNDS; round++) {
        pid_t pids[N];
        simnet_fabric *fabric;
        board *board = board_make();
        uint32_t victim = (uint32_t)random_below(&random, N);
        uint64_t after = random_below(&random, 20), spins = random_below(&random, 2000000);
        assert_ok(simnet_create(&(simnet_config){.nodes = 2, .ranks_per_node = 2, .staging_bytes = 16 << 10},
                                &fabric));
        for (uint32_t r = 0; r < N; r++)
            if ((pids[r] = child_start()) == 0) rank_main(fabric, r, 0, board, victim);
        while (!board->attached[victim] || board->ended[victim] < after) { /* before, no rank knows it */
            if (has_ended(pids[victim])) fail_msg("rank %u ended by itself", victim);
            sched_yield();
        }
        for (; spins > 0; spins--) __asm__ volatile("");
        kill(pids[victim], SIGKILL);
        for (uint32_t r = 0; r < N; r++)
            if (r != victim) assert_exits(pids[r], PEER_DIED);
        int status;
        waitpid(pids[victim], &status, 0);
        assert_true(WIFSIGNALED(status));
        munmap(board, sizeof *board);
        simnet_close(fabric);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forked_ranks_gather),
        cmocka_unit_test(a_fabric_is_opened_through_proc),
        cmocka_unit_test(a_killed_rank_ends_the_others_with_its_name),
    };
    return cmocka_run_group_tests_name("simnet processes", tests, NULL, NULL);
}
