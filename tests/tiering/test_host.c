/* The host tier seen from one process: budgets and bytes, tickets that do not fit,
 * forks, pinning, and waiting in vain. */
#include "tests/alloc/support.h"
#include "tests/log_text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "tiering/board.h"
#include "tiering/host.h"
#include "tiering/trace_events.h"

/* jemalloc takes all of its locks before a fork, more than the thread
 * sanitizer's lock order detector can hold (64). */
const char *__tsan_default_options(void);
__attribute__((visibility("default"))) const char *__tsan_default_options(void) {
    return "detect_deadlocks=0";
}

enum { KIB4 = 4096 };

/* The library's, too: the kernel's. */
static int punch_error;

int fallocate(int fd, int mode, off_t offset, off_t len) {
    if (punch_error) {
        errno = punch_error;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, offset, len);
}

/* The linker's. */
static int map_error;
void *__real_fcdp__shared_map(int fd, uint64_t offset, size_t bytes);
void *__wrap_fcdp__shared_map(int fd, uint64_t offset, size_t bytes);

__attribute__((visibility("default"))) void *__wrap_fcdp__shared_map(int fd, uint64_t offset, size_t bytes) {
    if (!map_error) return __real_fcdp__shared_map(fd, offset, bytes);
    errno = map_error;
    return NULL;
}

static fcdp_account *account; /* of the test that runs */

static void account_open(size_t budget_bytes) {
    fcdp_shared_ticket ticket;
    fcdp__account_destroy(account);
    assert_ok(fcdp__account_create(budget_bytes, &account, &ticket));
}

/* Slice 0's comes first in a test, and begins a new account. */
static fcdp_host_config config_of(uint32_t slice, uint32_t n_slices) {
    if (slice == 0) account_open(256 << 20);
    return (fcdp_host_config){.account = account,
                              .numa_node = -1,
                              .pin = FCDP_PIN_NEVER,
                              .slice = slice,
                              .n_slices = n_slices,
                              .timeout_s = 30};
}

static size_t physical_bytes(const fcdp_shared_ticket *ticket) {
    struct stat st;
    assert_int_equal(fstat(ticket->fd, &st), 0);
    return (size_t)st.st_blocks * 512;
}

static void assert_usage(fcdp_host *host, size_t current, size_t peak) {
    size_t current_bytes, peak_bytes;
    fcdp__host_reap(host);
    fcdp__account_usage(account, &current_bytes, &peak_bytes);
    assert_int_equal(current_bytes, current);
    assert_int_equal(peak_bytes, peak);
}

static void carved_bytes_are_exact_and_physical_ones_near(void **state) {
    (void)state;
    enum { N = 24 };
    uint64_t rng = seed_choose("host bytes"), offsets[N];
    size_t data[N], allocated = 0, sum = 0;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_usage(host, 0, 0);
    for (int i = 0; i < N; i++) {
        fcdp_host_block *block;
        data[i] = 300000 + random_below(&rng, 6 << 20);
        assert_ok(fcdp__host_block_alloc(host, data[i], &offsets[i]));
        assert_ok(fcdp__host_attach(host, offsets[i], data[i], NULL, &block));
        memset(fcdp__host_data(block), 0x5a, data[i]);
        fcdp__board_publish(block, FCDP_BOARD_STORED_0, 1);
        assert_int_equal((uintptr_t)fcdp__host_data(block) % KIB4, 0);
        fcdp__host_detach(block);
        sum += data[i];
        allocated += KIB4 + fcdp__round_up(data[i], KIB4);
        assert_usage(host, allocated, allocated);
    }
    size_t physical = physical_bytes(&ticket);
    print_message("%.2f MiB of data, %.2f MiB allocated, %.2f MiB physical: %+.2f %%\n", (double)sum / 0x1p20,
                  (double)allocated / 0x1p20, (double)physical / 0x1p20,
                  100 * ((double)physical / (double)sum - 1));
    assert_true(physical >= sum && (double)physical <= 1.03 * (double)sum);
    for (int i = 0; i < N; i += 2) {
        fcdp__host_block_free(host, offsets[i]);
        allocated -= KIB4 + fcdp__round_up(data[i], KIB4);
        sum -= data[i];
    }
    assert_true((double)physical_bytes(&ticket) <= 1.03 * (double)sum);
    size_t peak;
    fcdp__account_usage(account, &sum, &peak);
    assert_true(sum == allocated && peak > allocated);
    fcdp__account_reset_peak(account);
    assert_usage(host, allocated, allocated);
    for (int i = 1; i < N; i += 2) fcdp__host_block_free(host, offsets[i]);
    assert_usage(host, 0, allocated);
    assert_true(physical_bytes(&ticket) <= KIB4); /* the header */
    fcdp__host_destroy(host);
}

/* The leader may be ahead of its peers: what they still read stays, and is not handed out again. */
static void a_freed_block_lives_until_its_last_rank_has_detached(void **state) {
    (void)state;
    enum { BYTES = 50000 };
    fcdp_host_config leader_config = config_of(0, 2), peer_config = config_of(1, 2);
    fcdp_shared_ticket ticket;
    fcdp_host *leader, *peer;
    fcdp_host_block *mine, *theirs;
    uint64_t offset, other;
    assert_ok(fcdp__host_create(&leader_config, &leader, &ticket));
    assert_ok(fcdp__host_join(&peer_config, &ticket, &peer));
    assert_ok(fcdp__host_block_alloc(leader, BYTES, &offset));
    assert_ok(fcdp__host_attach(leader, offset, BYTES, NULL, &mine));
    assert_ok(fcdp__host_attach(peer, offset, BYTES, NULL, &theirs));
    memset(fcdp__host_data(mine), 0x5a, BYTES);
    fcdp__board_publish(mine, FCDP_BOARD_READY, 3);
    fcdp__host_detach(mine);
    fcdp__host_block_free(leader, offset);
    assert_ok(fcdp__host_block_alloc(leader, BYTES, &other));
    assert_true(other != offset);
    assert_int_equal(fcdp__board_read(theirs, FCDP_BOARD_READY, 0), 3);
    assert_int_equal(((uint8_t *)fcdp__host_data(theirs))[BYTES - 1], 0x5a);
    fcdp__host_detach(theirs);
    fcdp__host_block_free(leader, other);
    size_t current, peak;
    fcdp__host_reap(leader);
    fcdp__account_usage(account, &current, &peak);
    assert_int_equal(current, 0);
    assert_true(physical_bytes(&ticket) <= KIB4);
    fcdp__host_destroy(peer);
    fcdp__host_destroy(leader);
}

/* Blocks come and go at random: they never overlap, and a new one is always zero. */
static void blocks_never_overlap_and_start_as_zero(void **state) {
    (void)state;
    enum { N = 40 };
    struct {
        uint64_t offset;
        size_t bytes;
        fcdp_host_block *block;
    } live[N] = {0};
    uint64_t rng = seed_choose("host blocks");
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    for (int round = 0; round < 600; round++) {
        size_t i = random_below(&rng, N);
        if (live[i].block) {
            uint8_t *data = fcdp__host_data(live[i].block);
            for (size_t b = 0; b < live[i].bytes; b += 1000) assert_int_equal(data[b], (uint8_t)(i + 1));
            fcdp__host_detach(live[i].block);
            fcdp__host_block_free(host, live[i].offset);
            live[i].block = NULL;
            continue;
        }
        live[i].bytes = 1 + random_below(&rng, (size_t)1 << (8 + random_below(&rng, 14)));
        assert_ok(fcdp__host_block_alloc(host, live[i].bytes, &live[i].offset));
        assert_true(live[i].offset % KIB4 == 0 && live[i].offset >= KIB4);
        for (size_t k = 0; k < N; k++)
            if (k != i && live[k].block)
                assert_true(live[i].offset + KIB4 + live[i].bytes <= live[k].offset ||
                            live[k].offset + KIB4 + live[k].bytes <= live[i].offset);
        assert_ok(fcdp__host_attach(host, live[i].offset, live[i].bytes, NULL, &live[i].block));
        uint8_t *data = fcdp__host_data(live[i].block);
        for (size_t b = 0; b < live[i].bytes; b += 1000) assert_int_equal(data[b], 0);
        for (int word = 0; word < FCDP_BOARD_ATTACHED; word++)
            assert_int_equal(fcdp__board_read(live[i].block, (fcdp_board_word)word, 0), 0);
        memset(data, (int)(i + 1), live[i].bytes);
        fcdp__board_publish(live[i].block, FCDP_BOARD_STORED_1, 7);
    }
    for (size_t i = 0; i < N; i++)
        if (live[i].block) {
            fcdp__host_detach(live[i].block);
            fcdp__host_block_free(host, live[i].offset);
        }
    assert_true(physical_bytes(&ticket) <= KIB4);
    fcdp__host_destroy(host);
}

static void the_budget_is_kept_and_the_refusal_says_what_to_do(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    uint64_t offset, second;
    account_open(10 << 20);
    config.account = account;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_block_alloc(host, 6 << 20, &offset));
    assert_int_equal(fcdp__host_block_alloc(host, 5 << 20, &second), FCDP_ERR_NO_HOST_MEM);
    assert_text("5.25 MB more do not fit");
    assert_text("6.3 MB of 10.5 MB are taken");
    assert_text("FCDP_HOST_BUDGET");
    assert_usage(host, (6 << 20) + KIB4, (6 << 20) + KIB4);
    assert_ok(fcdp__host_block_alloc(host, (4 << 20) - 2 * KIB4, &second)); /* to the last byte */
    assert_usage(host, 10 << 20, 10 << 20);
    assert_int_equal(fcdp__host_block_alloc(host, 1, &second), FCDP_ERR_NO_HOST_MEM);
    fcdp__host_block_free(host, offset);
    assert_ok(fcdp__host_block_alloc(host, 5 << 20, &offset));
    assert_int_equal(fcdp__host_block_alloc(host, SIZE_MAX - 100, &second), FCDP_ERR_NO_HOST_MEM);
    assert_text(
        "a block of 18.4 EB does not fit into the node's host memory, which has addresses for 4.29 GB: ");
    assert_text("raise FCDP_HOST_BUDGET");
    assert_int_equal(fcdp__host_block_alloc(host, ticket.bytes - 2 * KIB4, &second), FCDP_ERR_NO_HOST_MEM);
    assert_text("no free addresses for a block of 4.29 GB, of 4.29 GB: raise FCDP_HOST_BUDGET");
    assert_int_equal(fcdp__host_block_alloc(host, 0, &second), FCDP_ERR_INVALID);
    fcdp__host_destroy(host);

    account_open(0); /* what the machine leaves */
    config.account = account;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_int_equal(fcdp__host_block_alloc(host, (size_t)1 << 50, &offset), FCDP_ERR_NO_HOST_MEM);
    assert_int_equal(fcdp__host_block_alloc(host, ticket.bytes / 2, &offset), FCDP_ERR_NO_HOST_MEM);
    assert_text("7/8 of");
    fcdp__host_destroy(host);

    account_open(SIZE_MAX / 2);
    config.account = account;
    assert_int_equal(fcdp__host_create(&config, &host, &ticket), FCDP_ERR_OPTION);
    assert_text("no machine has a host budget of 9.22 EB; lower FCDP_HOST_BUDGET");
}

static void what_the_kernel_refuses_is_said(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_host_block *block;
    uint64_t offset;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_block_alloc(host, 1 << 20, &offset));
    map_error = ENOMEM;
    assert_int_equal(fcdp__host_attach(host, offset, 1 << 20, NULL, &block), FCDP_ERR_SYSTEM);
    map_error = 0;
    assert_text("cannot map 1.05 MB of the node's host memory: Cannot allocate memory; ");
    assert_text("raise vm.max_map_count");
    log_keep(FCDP_LOG_WARN);
    punch_error = ENOSYS;
    fcdp__host_block_free(host, offset);
    fcdp_status status = fcdp__host_block_alloc(host, 1 << 20, &offset);
    punch_error = 0;
    assert_says(log_kept(),
                "warning: host tier: 1.05 MB of the node's host memory cannot be emptied: Function not "
                "implemented; they stay in use until the node's ranks end\n");
    assert_int_equal(status, FCDP_ERR_SYSTEM);
    assert_text("1.05 MB of the node's host memory cannot be emptied: ");
    fcdp__host_destroy(host);
}

static int n_descriptors(void) {
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder)) n++;
    closedir(folder);
    return n;
}

/* What fcdp-doctor asks; so often that addresses would run out if it kept any: 512 times 275 GB. Under TSan a
 * process has 1.5 TB. */
static void a_budget_can_be_tried_and_leaves_nothing(void **state) {
    (void)state;
    int before = n_descriptors();
    for (int i = 0; i < 512; i++) {
        assert_ok(fcdp__host_try((size_t)1 << 36));
        assert_int_equal(fcdp__host_try((size_t)99999 << 30), FCDP_ERR_SYSTEM);
        assert_text("cannot reserve 429 TB of addresses");
        assert_text("lower FCDP_HOST_BUDGET");
    }
    assert_int_equal(fcdp__host_try(SIZE_MAX), FCDP_ERR_OPTION);
    assert_int_equal(n_descriptors(), before);
}

static void a_slab_cannot_be_truncated_under_its_users(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_int_equal(ftruncate(ticket.fd, 0), -1);
    assert_int_equal(ftruncate(ticket.fd, (off_t)ticket.bytes * 2), -1);
    assert_true(fcntl(ticket.fd, F_GETFD) & FD_CLOEXEC);
    fcdp__host_destroy(host);
}

static void a_slab_is_its_users_alone(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    struct stat st;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_int_equal(fstat(ticket.fd, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    fcdp__host_destroy(host);
}

static void a_ticket_that_does_not_fit_is_refused(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 2), second = config_of(1, 2), third = config_of(1, 3),
                     same = config; /* slice 0's begins a new account */
    fcdp_shared_ticket ticket, bad;
    fcdp_host *host, *peer = NULL;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    bad = ticket, bad.inode++;
    assert_int_equal(fcdp__host_join(&second, &bad, &peer), FCDP_ERR_UNSUPPORTED);
    bad = ticket, bad.pid_start_time++;
    assert_int_equal(fcdp__host_join(&second, &bad, &peer), FCDP_ERR_UNSUPPORTED);
    assert_text("container");
    bad = ticket, bad.pid = 0x3fffffff;
    assert_int_equal(fcdp__host_join(&second, &bad, &peer), FCDP_ERR_UNSUPPORTED);
    assert_text("FCDP_LOCAL_SIZE");
    bad = ticket, bad.fd = 4000;
    assert_int_equal(fcdp__host_join(&second, &bad, &peer), FCDP_ERR_UNSUPPORTED);
    assert_text("/proc");
    bad = ticket, bad.bytes /= 2;
    assert_int_equal(fcdp__host_join(&second, &bad, &peer), FCDP_ERR_UNSUPPORTED);
    assert_int_equal(fcdp__host_join(&third, &ticket, &peer), FCDP_ERR_UNSUPPORTED);
    assert_text("FCDP_LOCAL_SIZE");
    third = second;
    third.per_numa_node = true;
    assert_int_equal(fcdp__host_join(&third, &ticket, &peer), FCDP_ERR_UNSUPPORTED);
    assert_text("FCDP_HOST_COPIES");
    assert_int_equal(fcdp__host_join(&same, &ticket, &peer), FCDP_ERR_INVALID);
    assert_text("already taken");
    assert_null(peer);
    assert_ok(fcdp__host_join(&second, &ticket, &peer));
    uint64_t offset;
    assert_int_equal(fcdp__host_block_alloc(peer, 4096, &offset), FCDP_ERR_INVALID);
    fcdp__host_destroy(peer);
    fcdp__host_destroy(host);
}

/* The memory that the first rank made begins otherwise. */
static void another_version_is_refused(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 2), second = config_of(1, 2);
    fcdp_shared_ticket ticket, budget;
    fcdp_host *host, *peer = NULL;
    fcdp_account *joined = NULL;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_int_equal(pwrite(ticket.fd, "FDPHOST0", 8, 0), 8);
    assert_int_equal(fcdp__host_join(&second, &ticket, &peer), FCDP_ERR_UNSUPPORTED);
    assert_text("the node's ranks run different versions of FCDP; install one version for all of them");
    fcdp__host_destroy(host);
    fcdp__account_destroy(account);
    assert_ok(fcdp__account_create(1 << 20, &account, &budget));
    assert_int_equal(pwrite(budget.fd, "FDPCCNT0", 8, 0), 8);
    assert_int_equal(fcdp__account_join(&budget, &joined), FCDP_ERR_UNSUPPORTED);
    assert_text("the node's ranks run different versions of FCDP; install one version for all of them");
    assert_null(peer);
    assert_null(joined);
}

static void an_offset_outside_of_the_slab_is_refused(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_host_block *block = NULL;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    const uint64_t bad[] = {0, 1, KIB4 + 1, ticket.bytes, ticket.bytes - KIB4, UINT64_MAX - KIB4 + 1};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(fcdp__host_attach(host, bad[i], 100, NULL, &block), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__host_attach(host, KIB4, SIZE_MAX - 10, NULL, &block), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__host_attach(host, KIB4, 0, NULL, &block), FCDP_ERR_INVALID);
    assert_null(block);
    fcdp__host_destroy(host);
}

static void carve_in_child(void *arg) {
    uint64_t offset;
    if (fcdp__host_block_alloc(arg, 4096, &offset) != FCDP_ERR_INVALID) _exit(1);
    fcdp__host_destroy(arg);
}

static void a_forked_child_leaves_the_parents_memory_alone(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_host_block *block;
    uint64_t offset;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_block_alloc(host, 1 << 20, &offset));
    assert_ok(fcdp__host_attach(host, offset, 1 << 20, NULL, &block));
    memset(fcdp__host_data(block), 3, 1 << 20);
    assert_int_equal(child_run(carve_in_child, host), 0);
    assert_int_equal(((char *)fcdp__host_data(block))[12345], 3);
    fcdp__host_detach(block);
    fcdp__host_block_free(host, offset);
    assert_ok(fcdp__host_block_alloc(host, 2 << 20, &offset));
    fcdp__host_destroy(host);
}

static void waiting_ends_with_the_names_of_those_who_did_not_come(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 3), second = config_of(1, 3);
    fcdp_shared_ticket ticket;
    fcdp_host *host, *peer;
    fcdp_host_block *block, *peers;
    uint64_t offset;
    config.timeout_s = 0.25;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_join(&second, &ticket, &peer));
    assert_ok(fcdp__host_block_alloc(host, 4096, &offset));
    assert_ok(fcdp__host_attach(host, offset, 4096, NULL, &block));
    assert_ok(fcdp__host_attach(peer, offset, 4096, NULL, &peers));
    fcdp__board_publish(block, FCDP_BOARD_STORED_1,
                        0x7fffffff); /* far from the others' 0: the order is modulo 2^32 */
    assert_int_equal(fcdp__board_wait_all(block, FCDP_BOARD_STORED_1, 0x7fffffff, "the weights of layer 3"),
                     FCDP_ERR_TIMEOUT);
    assert_text("the weights of layer 3");
    assert_text("slice 1 (process");
    assert_text("slice 2 (never joined)");
    assert_null(strstr(fcdp_error_text(), "slice 0"));
    fcdp__board_publish(peers, FCDP_BOARD_STORED_1, 0x80000001); /* two further on */
    fcdp__host_detach(peers);
    fcdp__host_destroy(peer);
    assert_int_equal(fcdp__board_wait_all(block, FCDP_BOARD_STORED_1, 0x7fffffff, "it"), FCDP_ERR_TIMEOUT);
    assert_null(strstr(fcdp_error_text(), "slice 1"));
    assert_int_equal(fcdp__board_wait_all(block, FCDP_BOARD_STORED_0, 1, "it"), FCDP_ERR_PEER);
    assert_text("slice 1 (has left)");
    fcdp__host_detach(block);
    fcdp__host_destroy(host);
}

typedef struct pingpong {
    fcdp_host_block *block;
    fcdp_status status;
} pingpong;

static void *answer(void *arg) {
    pingpong *p = arg;
    for (uint32_t i = 1; i <= 2000 && !p->status; i++) {
        fcdp__board_publish(p->block, FCDP_BOARD_READY, i);
        p->status = fcdp__board_wait_all(p->block, FCDP_BOARD_READY, i, "pong");
    }
    return NULL;
}

static void waiters_are_woken_not_polled(void **state) {
    (void)state;
    fcdp_host_config config = config_of(0, 2), second = config_of(1, 2);
    fcdp_shared_ticket ticket;
    fcdp_host *host, *peer;
    pingpong mine = {0}, theirs = {0};
    uint64_t offset;
    pthread_t thread;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_join(&second, &ticket, &peer));
    assert_ok(fcdp__host_block_alloc(host, 1, &offset));
    assert_ok(fcdp__host_attach(host, offset, 1, NULL, &mine.block));
    assert_ok(fcdp__host_attach(peer, offset, 1, NULL, &theirs.block));
    uint64_t start_ns = fcdp__now_ns();
    assert_int_equal(pthread_create(&thread, NULL, answer, &theirs), 0);
    answer(&mine);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(mine.status);
    assert_ok(theirs.status);
    /* A missed wake-up costs 100 ms: 2000 rounds of them would take 200 s. */
    assert_true(fcdp__now_ns() - start_ns < 60u * 1000000000u);
    fcdp__host_detach(mine.block);
    fcdp__host_detach(theirs.block);
    fcdp__host_destroy(peer);
    fcdp__host_destroy(host);
}

/* ---- pinning: in processes of their own, since limits and capabilities do not come back ---- */

static void privilege_drop(void) {
    struct rlimit limit = {64 << 10, 64 << 10};
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (setrlimit(RLIMIT_MEMLOCK, &limit) || syscall(SYS_capget, &header, data)) exit(90);
    data[CAP_IPC_LOCK / 32].effective &= ~(1u << (CAP_IPC_LOCK % 32));
    data[CAP_IPC_LOCK / 32].permitted &= ~(1u << (CAP_IPC_LOCK % 32));
    if (syscall(SYS_capset, &header, data)) exit(91);
}

/* Two blocks: what attach says, between the warnings. */
static int pin_main(fcdp_pin_mode pin) {
    fcdp_options options;
    fcdp_host_config config = config_of(0, 1);
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_host_block *blocks[2] = {0};
    uint64_t offsets[2];
    privilege_drop();
    config.pin = pin;
    if (fcdp_options_load(environ, &options) || fcdp__driver_open(options.driver, 0, NULL, &config.drv))
        return 92;
    if (fcdp__host_create(&config, &host, &ticket)) return 93;
    for (int i = 0; i < 2; i++) {
        if (fcdp__host_block_alloc(host, 1 << 20, &offsets[i])) return 94;
        fcdp_status status = fcdp__host_attach(host, offsets[i], 1 << 20, NULL, &blocks[i]);
        fprintf(stderr, "status %d: %s\n", (int)status, status ? fcdp_error_text() : "");
        if (!status) memset(fcdp__host_data(blocks[i]), 1, 1 << 20);
    }
    for (int i = 0; i < 2; i++) fcdp__host_detach(blocks[i]);
    fcdp__host_destroy(host);
    fcdp__driver_close(config.drv);
    return 0;
}

static void pin_exec(void *mode) {
    char self[256] = {0};
    if (readlink("/proc/self/exe", self, sizeof self - 1) > 0) execl(self, self, "pin", mode, NULL);
    _exit(95);
}

static const char *pin_run(const char *mode) {
    int status;
    const char *text = child_says(pin_exec, (void *)(uintptr_t)mode, &status);
    if (status) fail_msg("status %#x: %s", status, text);
    return text;
}

/* Of pin_main's lines. */
static unsigned count_status(const char *text, fcdp_status status) {
    char line[32];
    snprintf(line, sizeof line, "status %d: ", (int)status);
    return log_count(text, line);
}

static bool memlock_is_the_drivers_limit(void) {
    const char *driver = getenv("FCDP_DRIVER");
    return driver && !strcmp(driver, "sim");
}

static void a_memlock_limit_is_a_warning_or_an_error(void **state) {
    (void)state;
    if (!memlock_is_the_drivers_limit()) {
        print_message(
            "needs FCDP_DRIVER=sim: a real driver's pinning does not count against RLIMIT_MEMLOCK\n");
        skip();
    }
    const char *text = pin_run("auto");
    assert_int_equal(count_status(text, FCDP_OK), 2);
    assert_int_equal(log_count(text, "warning: "), 1); /* once, not per block */
    assert_says(text, "locked memory is limited to 65.5 KB (RLIMIT_MEMLOCK), of which ");
    assert_says(text, "raise the limit (ulimit -l unlimited)");
    assert_says(text, "FCDP_PIN=never says nothing, and uses no FCDP_SPILL_DIR");
    text = pin_run("require");
    assert_int_equal(count_status(text, FCDP_ERR_OPTION), 2);
    assert_says(text, "FCDP_PIN=require, and 1.0");
    assert_says(text, "RLIMIT_MEMLOCK");
    assert_says(text, "FCDP_PIN=auto goes on without");
    text = pin_run("never");
    assert_int_equal(count_status(text, FCDP_OK), 2);
    assert_int_equal(log_count(text, "warning: "), 0);
}

static size_t locked_kib(void) {
    char line[256];
    size_t kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "VmLck: %zu", &kib) == 1) break;
    fclose(file);
    return kib;
}

static fcdp_host *host_that_pins(fcdp_driver *drv, fcdp_pin_mode pin, fcdp_shared_ticket *ticket_out) {
    fcdp_host_config config = config_of(0, 1);
    fcdp_host *host;
    config.drv = drv;
    config.pin = pin;
    assert_ok(fcdp__host_create(&config, &host, ticket_out));
    return host;
}

static void exactly_the_block_is_pinned(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_shared_ticket ticket;
    fcdp_host_block *block;
    uint64_t offset;
    size_t before = locked_kib(), data = 3000001;
    fcdp_host *host = host_that_pins(drv, FCDP_PIN_REQUIRE, &ticket);
    assert_ok(fcdp__host_block_alloc(host, data, &offset));
    assert_ok(fcdp__host_attach(host, offset, data, NULL, &block));
    /* the board and the data */
    assert_int_equal(locked_kib() - before, (KIB4 + fcdp__round_up(data, KIB4)) / 1024);
    assert_true(physical_bytes(&ticket) <= 2 * KIB4 + fcdp__round_up(data, KIB4));
    fcdp__host_detach(block);
    assert_int_equal(locked_kib(), before);
    fcdp__host_destroy(host);
    fcdp__driver_close(drv);
    assert_nothing_lives();
}

static void the_page_of_signals_must_be_pinned(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_shared_ticket ticket;
    fcdp_host_block *block;
    uint64_t offset;
    fcdp_host *host = host_that_pins(drv, FCDP_PIN_NEVER, &ticket);
    assert_ok(fcdp__host_block_alloc(host, 1 << 20, &offset));
    assert_int_equal(simgpu_fail_nth("cuMemHostRegister", 1, CUDA_OUT_OF_MEMORY), 0);
    assert_int_equal(fcdp__host_attach(host, offset, 1 << 20, NULL, &block), FCDP_ERR_NO_HOST_MEM);
    assert_text(
        "the page of signals beside a group must be pinned, whatever FCDP_PIN says: cuMemHostRegister");
    assert_text("free host memory");
    if (strstr(fcdp_error_text(), "FCDP_PIN=")) fail_msg("%s", fcdp_error_text());
    fcdp__host_destroy(host);
    fcdp__driver_close(drv);
    assert_nothing_lives();
}

/* Two spans; this rank's slices are neither of whole pages nor side by side. */
static void a_rank_pins_and_binds_its_slices_alone(void **state) {
    (void)state;
    enum { SPAN_0 = 1000000, SPAN_1 = 500000 };
    fcdp_driver *drv = driver_open_sim();
    fcdp_host_config config = config_of(0, 1);
    fcdp_host_share share = {.own = {{300000, 200000}, {SPAN_0 + 5000, 100}},
                             .copied = {{300000, 200000}, {SPAN_0 + 5000, 100}}};
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_host_block *block;
    uint64_t offset;
    fcdp_counts counts = {0};
    config.drv = drv;
    config.pin = FCDP_PIN_REQUIRE;
    config.numa_node = 0;
    config.counts = &counts;
    size_t before = locked_kib(), data = SPAN_0 + SPAN_1;
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_block_alloc(host, data, &offset));
    assert_ok(fcdp__host_attach(host, offset, data, &share, &block));
    /* The board; bytes 300000 to 500000 lie on pages 73 to 122, 1005000 to 1005100 on page 245. */
    assert_int_equal(locked_kib() - before, 4 + 4 * 50 + 4);
    bool pinned;
    char *page = fcdp__host_data(block);
    assert_int_equal(fcdp__host_run_bytes(block, page, data, &pinned), 73 * KIB4);
    assert_false(pinned);
    assert_int_equal(fcdp__host_run_bytes(block, page + 300000, 200000, &pinned), 200000);
    assert_true(pinned);
    assert_int_equal(fcdp__host_run_bytes(block, page + 73 * KIB4, data, &pinned), 50 * KIB4);
    assert_int_equal(fcdp__host_run_bytes(block, page + 246 * KIB4, data - 246 * KIB4, &pinned),
                     data - 246 * KIB4);
    assert_false(pinned);
    int mode = -1;
    unsigned long mask[16] = {0};
    if (!syscall(SYS_get_mempolicy, &mode, mask, 1025UL, page + 80 * KIB4, MPOL_F_ADDR) &&
        mode == MPOL_PREFERRED) {
        assert_int_equal(mask[0], 1);
        assert_int_equal(syscall(SYS_get_mempolicy, &mode, mask, 1025UL, page, MPOL_F_ADDR), 0);
        assert_int_equal(mode, MPOL_DEFAULT); /* another rank's */
        /* pages 74 to 121 are wholly its own; node 0 need not have room for all of them */
        assert_int_equal(counts.n[FCDP_COUNT_HOST_NEAR_BYTES] + counts.n[FCDP_COUNT_HOST_FAR_BYTES],
                         48 * KIB4);
        if (access("/sys/devices/system/node/node1", F_OK))
            assert_int_equal(counts.n[FCDP_COUNT_HOST_FAR_BYTES], 0);
    }
    fcdp__host_detach(block);
    share.copied[1] = (fcdp_piece){SPAN_0, SPAN_1 + 1}; /* one byte too many */
    assert_int_equal(fcdp__host_attach(host, offset, data, &share, &block), FCDP_ERR_INVALID);
    assert_int_equal(locked_kib(), before);
    fcdp__host_destroy(host);
    fcdp__driver_close(drv);
    assert_nothing_lives();
}

/* Of [begin, end): bytes of mappings that ask for huge pages (VmFlags hg), and bytes that are mapped so. */
static void huge_bytes(const char *begin, const char *end, size_t *asked_out, size_t *got_out) {
    char line[1024];
    unsigned long from = 0, to = 0, kib;
    FILE *smaps = fopen("/proc/self/smaps", "re");
    assert_non_null(smaps);
    *asked_out = *got_out = 0;
    while (fgets(line, sizeof line, smaps)) {
        unsigned long a, b;
        if (sscanf(line, "%lx-%lx ", &a, &b) == 2) from = a, to = b;
        if (from < (uintptr_t)begin || to > (uintptr_t)end) continue;
        if (sscanf(line, "ShmemPmdMapped: %lu", &kib) == 1) *got_out += kib << 10;
        if (!strncmp(line, "VmFlags:", 8) && strstr(line, " hg")) *asked_out += to - from;
    }
    fclose(smaps);
}

/* Where the kernel gives shared memory huge pages, whole ones of the slice are such. They begin at the same
 * bytes of the file and of the mapping, which none would without that. */
static void whole_huge_pages_of_a_slice_are_asked_for(void **state) {
    (void)state;
    enum { HUGE = 2 << 20, DATA = 8 * HUGE };
    fcdp_host_config config = config_of(0, 1);
    fcdp_host_share share = {.own = {{0, 3 * HUGE + 1000}, {6 * HUGE + HUGE / 2, HUGE}},
                             .copied = {{0, 3 * HUGE + 1000}, {6 * HUGE + HUGE / 2, HUGE}}};
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_host_block *block;
    uint64_t offset;
    size_t asked_bytes, got_bytes;
    char enabled[128] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "re");
    if (!file) skip(); /* a kernel without huge pages for shared memory */
    assert_non_null(fgets(enabled, sizeof enabled, file));
    fclose(file);
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_block_alloc(host, DATA, &offset));
    assert_ok(fcdp__host_attach(host, offset, DATA, &share, &block));
    char *at = fcdp__host_data(block);
    uint64_t data_offset = offset + KIB4;
    assert_int_equal((uintptr_t)at % HUGE, data_offset % HUGE);
    size_t first = (HUGE - data_offset % HUGE) % HUGE, expected_bytes = 0;
    for (int s = 0; s < 2; s++)
        for (size_t page = first; page + HUGE <= DATA; page += HUGE)
            if (page >= share.own[s].offset_bytes &&
                page + HUGE <= share.own[s].offset_bytes + share.own[s].bytes)
                expected_bytes += HUGE;
    assert_true(expected_bytes >= 2 * HUGE);
    memset(at, 1, DATA);
    huge_bytes(at - KIB4, at + DATA, &asked_bytes, &got_bytes);
    assert_int_equal(asked_bytes, expected_bytes);
    assert_true(physical_bytes(&ticket) <= 128 * KIB4 + DATA);
    if (strstr(enabled, "[advise]")) assert_true(got_bytes > 0 && got_bytes <= expected_bytes);
    if (strstr(enabled, "[never]")) assert_int_equal(got_bytes, 0);
    fcdp__host_detach(block);
    fcdp__host_destroy(host);
}

/* The board's page and two slices' are three registrations. The third fails with the context, so the two
 * before it cannot be undone: to CUDA their addresses are these pages, so they stay mapped. */
static void what_stays_registered_stays_mapped(void **state) {
    (void)state;
    enum { ILLEGAL_ADDRESS = 700 };
    fcdp_driver *drv = driver_open_sim();
    fcdp_host_config config = config_of(0, 1);
    fcdp_host_share share = {.own = {{300000, 200000}, {1005000, 100}},
                             .copied = {{300000, 200000}, {1005000, 100}}};
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_host_block *block;
    uint64_t offset;
    config.drv = drv;
    config.pin = FCDP_PIN_AUTO;
    size_t before = locked_kib();
    assert_ok(fcdp__host_create(&config, &host, &ticket));
    assert_ok(fcdp__host_block_alloc(host, 1500000, &offset));
    assert_int_equal(simgpu_fail_nth("cuMemHostRegister", 3, ILLEGAL_ADDRESS), 0);
    log_keep(FCDP_LOG_WARN);
    fcdp_status status = fcdp__host_attach(host, offset, 1500000, &share, &block);
    assert_says(log_kept(),
                "warning: host tier: 1.51 MB of host memory stay mapped until the process ends, as they "
                "stay pinned: cuMemHostUnregister");
    assert_int_equal(status, FCDP_ERR_NO_HOST_MEM);
    assert_text("a group's host memory is pinned in part, which the driver does not undo: cuMemHostRegister");
    assert_int_equal(locked_kib() - before, 4 + 4 * 50);
    simgpu_reset();
    fcdp__host_destroy(host);
    fcdp__driver_close(drv);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "pin"))
        return pin_main(!strcmp(argv[2], "auto")      ? FCDP_PIN_AUTO
                        : !strcmp(argv[2], "require") ? FCDP_PIN_REQUIRE
                                                      : FCDP_PIN_NEVER);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(carved_bytes_are_exact_and_physical_ones_near),
        cmocka_unit_test(blocks_never_overlap_and_start_as_zero),
        cmocka_unit_test(a_freed_block_lives_until_its_last_rank_has_detached),
        cmocka_unit_test(the_budget_is_kept_and_the_refusal_says_what_to_do),
        cmocka_unit_test(a_budget_can_be_tried_and_leaves_nothing),
        cmocka_unit_test(what_the_kernel_refuses_is_said),
        cmocka_unit_test(a_slab_cannot_be_truncated_under_its_users),
        cmocka_unit_test(a_slab_is_its_users_alone),
        cmocka_unit_test(a_ticket_that_does_not_fit_is_refused),
        cmocka_unit_test(another_version_is_refused),
        cmocka_unit_test(an_offset_outside_of_the_slab_is_refused),
        cmocka_unit_test(a_forked_child_leaves_the_parents_memory_alone),
        cmocka_unit_test(waiting_ends_with_the_names_of_those_who_did_not_come),
        cmocka_unit_test(waiters_are_woken_not_polled),
        cmocka_unit_test(a_memlock_limit_is_a_warning_or_an_error),
        cmocka_unit_test(exactly_the_block_is_pinned),
        cmocka_unit_test(the_page_of_signals_must_be_pinned),
        cmocka_unit_test(a_rank_pins_and_binds_its_slices_alone),
        cmocka_unit_test(whole_huge_pages_of_a_slice_are_asked_for),
        cmocka_unit_test(what_stays_registered_stays_mapped),
    };
    return cmocka_run_group_tests_name("tiering_host", tests, NULL, NULL);
}
