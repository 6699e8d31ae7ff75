/* NUMA nodes: of described machines, and the kernel's own word on this one's pages and threads. */
#include "tests/alloc/support.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/tiering/described.h"
#include "tiering/host.h"
#include "tiering/numa.h"
#include "tiering/trace_events.h"

enum { MAX_NODES = 1024, WORDS = MAX_NODES / (8 * sizeof(unsigned long)) };

/* ---- described machines ---- */

#define NODE "/sys/devices/system/node"

/* Two sockets of two nodes each, of 16 CPUs; node 4 is memory alone, beside node 2. A GPU on each of 1, 3. */
static int machine_make(void **state) {
    static const char *const cpus[] = {"0-3", "4-7", "8-11", "12-15", ""};
    static const char *const distances[] = {"10 12 32 32 40", "12 10 32 32 40", "32 32 10 12 14",
                                            "32 32 12 10 20", "40 40 14 20 10"};
    if (described_make(state)) return -1;
    described_put("/sys/devices/system/cpu/online", "0-15\n");
    described_put(NODE "/online", "0-4\n");
    described_put(NODE "/has_memory", "0-2,4\n");
    for (int i = 0; i < 5; i++) {
        char path[128], line[64];
        snprintf(path, sizeof path, NODE "/node%d/cpulist", i);
        snprintf(line, sizeof line, "%s\n", cpus[i]);
        described_put(path, line);
        snprintf(path, sizeof path, NODE "/node%d/distance", i);
        snprintf(line, sizeof line, "%s\n", distances[i]);
        described_put(path, line);
    }
    described_put("/sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
    described_put("/sys/bus/pci/devices/0000:d8:00.0/numa_node", "-1\n");
    return 0;
}

static fcdp_cpus cpus_of(const char *text) {
    fcdp_cpus cpus = {0};
    int first, last, n;
    for (; sscanf(text, "%d-%d%n", &first, &last, &n) == 2; text += n + (text[n] == ','))
        for (int i = first; i <= last; i++) CPU_SET_S((size_t)i, sizeof cpus, cpus.sets);
    return cpus;
}

typedef struct expected {
    int node, memory_node;
    const char *cpus; /* NULL: nothing is bound */
    const char *says;
} expected;

static void assert_plan(const fcdp_numa_device *device, bool wanted, const char *own, expected is) {
    fcdp_numa_plan plan;
    fcdp_cpus own_cpus = cpus_of(own);
    char text[128];
    fcdp__numa_plan(described_root, device, wanted, &own_cpus, &plan);
    assert_int_equal(plan.node, is.node);
    assert_int_equal(plan.memory_node, is.memory_node);
    if (!strstr(plan.text, is.says)) fail_msg("\"%s\" is not in \"%s\"", is.says, plan.text);
    assert_int_equal(plan.binds, is.cpus != NULL);
    if (!is.cpus) return;
    fcdp__cpus_text(&plan.cpus, text, sizeof text);
    assert_string_equal(text, is.cpus);
}

static void a_process_goes_to_its_devices_node(void **state) {
    (void)state;
    const fcdp_numa_device told = {.node = 2, .pci = "0000:3b:00.0"},
                           on_pci = {.node = -1, .pci = "0000:3b:00.0"};
    assert_plan(&told, true, "0-15",
                (expected){2, 2, "8-11", "NUMA node 2 of 5; threads are bound to its CPUs 8-11"});
    assert_plan(&on_pci, true, "0-15",
                (expected){1, 1, "4-7", "NUMA node 1 of 5; threads are bound to its CPUs 4-7"});
    assert_plan(&on_pci, false, "0-15", (expected){1, 1, NULL, "FCDP_PIN_CPU=off: threads run on CPUs 0-15"});
}

static void a_node_without_memory_or_cpus_has_a_nearest_one(void **state) {
    (void)state;
    const fcdp_numa_device no_memory = {.node = 3, .pci = ""}, no_cpus = {.node = 4, .pci = ""};
    assert_plan(&no_memory, true, "0-15", (expected){3, 2, "12-15", "CPUs 12-15"});
    assert_plan(
        &no_cpus, true, "0-15",
        (expected){4, 4, "8-11", "no CPUs for this process; threads are bound to CPUs 8-11 of node 2"});
}

static void an_affinity_that_something_else_chose_stays(void **state) {
    (void)state;
    const fcdp_numa_device device = {.node = 1, .pci = ""};
    assert_plan(&device, true, "4-14",
                (expected){1, 1, NULL, "threads stay on CPUs 4-14, to which something else"});
    assert_plan(&device, true, "8-11", (expected){1, 1, NULL, "threads stay on CPUs 8-11"});
}

static void all_cpus_of_the_cpuset_are_no_ones_choice(void **state) {
    (void)state;
    const fcdp_numa_device device = {.node = 1, .pci = ""};
    described_put("/proc/self/cgroup", "0::/pods/job\n");
    described_put("/sys/fs/cgroup/pods/cpuset.cpus.effective", "6-13\n"); /* the job's own has no cpuset */
    assert_plan(&device, true, "6-13", (expected){1, 1, "6-7", "its CPUs 6-7"});
    assert_plan(&device, true, "8-13", (expected){1, 1, NULL, "something else"});
    assert_plan(&device, true, "0-15",
                (expected){1, 1, NULL, "something else"});                /* not the cpuset that we see */
    described_put("/sys/fs/cgroup/pods/cpuset.cpus.effective", "8-13\n"); /* none of node 1's */
    assert_plan(&device, true, "8-13", (expected){1, 1, "8-11", "CPUs 8-11 of node 2"});
    described_put("/sys/devices/system/cpu/online", "0-15,40-41\n"); /* the latter are no node's */
    described_put("/sys/fs/cgroup/pods/cpuset.cpus.effective", "40-41\n");
    assert_plan(
        &device, true, "40-41",
        (expected){1, 1, NULL, "NUMA node 1 of 5; threads stay on CPUs 40-41: no node has CPUs among these"});
    described_put("/proc/self/cgroup", "7:cpuset:/job\n0::/\n");
    described_put("/sys/fs/cgroup/cpuset/job/cpuset.effective_cpus", "4-5\n");
    assert_plan(&device, true, "4-5",
                (expected){1, 1, NULL, "threads stay on CPUs 4-5, which are on node 1"});
}

static void cpus_of_one_node_have_a_node(void **state) {
    (void)state;
    static const struct {
        const char *cpus;
        int node;
    } cases[] = {{"8-11", 2}, {"9-10", 2}, {"0-0", 0}, {"3-4", -1}, {"0-15", -1}, {"", -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fcdp_cpus cpus = cpus_of(cases[i].cpus);
        assert_int_equal(fcdp__cpus_node(described_root, &cpus), cases[i].node);
    }
    assert_int_equal(fcdp__cpus_node("/nowhere", &(fcdp_cpus){0}), -1);
}

static void what_is_not_known_binds_nothing(void **state) {
    (void)state;
    const fcdp_numa_device lost = {.node = -1, .pci = "0000:d8:00.0"},
                           absent = {.node = -1, .pci = "0000:01:00.0"}, nowhere = {.node = -1, .pci = ""},
                           offline = {.node = 7, .pci = ""};
    assert_plan(&lost, true, "0-15", (expected){-1, -1, NULL, "5 NUMA nodes; the device's is not known"});
    assert_plan(&absent, true, "0-15", (expected){-1, -1, NULL, "not known"});
    assert_plan(&nowhere, true, "0-15", (expected){-1, -1, NULL, "not known"});
    assert_plan(&offline, true, "0-15", (expected){-1, -1, NULL, "not known"});
    described_put(NODE "/online", "0\n");
    assert_plan(&(fcdp_numa_device){.node = 0, .pci = ""}, true, "0-15",
                (expected){-1, -1, NULL, "1 NUMA node: nothing is bound"});
    described_put(NODE "/online", "0-x\n");
    assert_plan(&offline, true, "0-15", (expected){-1, -1, NULL, "no NUMA nodes in /sys"});
}

/* ---- pages, on a kernel that is made up ---- */

/* It has two nodes. A page of the shared memory comes from the node that was asked for last, if that has
 * room; else from the other one. */
enum { FAKE_PAGES = 4096 };
static struct fake_kernel {
    size_t page_bytes;
    int8_t node_of[FAKE_PAGES]; /* by page of the file; -1: not asked for */
    int full;                   /* this node has no room; -1: both have */
    int refuses;                /* errno of every call; 0: none */
} kernel;

/* Two ranks have the same page at two addresses: which page of the file is it? */
static size_t file_page(const void *at) {
    unsigned long begin, end, offset = 0;
    char line[512];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "re");
    assert_non_null(maps);
    while (!found && fgets(line, sizeof line, maps))
        found = sscanf(line, "%lx-%lx %*s %lx", &begin, &end, &offset) == 3 && (uintptr_t)at >= begin &&
                (uintptr_t)at < end && strstr(line, "memfd:fcdp-host");
    fclose(maps);
    assert_true(found);
    size_t page = (offset + (uintptr_t)at - begin) / kernel.page_bytes;
    assert_true(page < FAKE_PAGES);
    return page;
}

static long fake_mbind(void *at, unsigned long bytes, int mode, const unsigned long *nodes,
                       unsigned long max_node, unsigned flags) {
    (void)max_node;
    assert_int_equal(mode, MPOL_PREFERRED);
    assert_int_equal(flags, 0);
    assert_int_equal((uintptr_t)at % kernel.page_bytes, 0);
    if (kernel.refuses) return errno = kernel.refuses, -1;
    int node = nodes[0] == 1 ? 0 : nodes[0] == 2 ? 1 : -1;
    assert_true(node >= 0);
    for (size_t page = file_page(at), end = page + bytes / kernel.page_bytes; page < end; page++)
        kernel.node_of[page] = (int8_t)(node == kernel.full ? !node : node);
    return 0;
}

static long fake_move_pages(int pid, unsigned long n, void **pages, const int *nodes, int *status_out,
                            int flags) {
    assert_true(pid == 0 && !nodes && !flags);
    if (kernel.refuses) return errno = kernel.refuses, -1;
    size_t first = file_page(pages[0]);
    for (unsigned long i = 0; i < n; i++) {
        int8_t node =
            kernel.node_of[first + (size_t)((char *)pages[i] - (char *)pages[0]) / kernel.page_bytes];
        status_out[i] = node >= 0 ? node : -ENOENT;
    }
    return 0;
}

enum { N_RANKS = 2, N_READERS = 3, UNTOUCHED = -1 };

typedef struct rank {
    fcdp_host *host;
    fcdp_host_block *block;
    fcdp_counts counts;
    fcdp_host_share share;
} rank;

/* `i` of `n`; the first makes the slab. */
static void rank_open(rank *rank, uint32_t i, uint32_t n, int numa_node, bool per_numa_node,
                      fcdp_account *account, fcdp_shared_ticket *ticket) {
    fcdp_host_config config = {.account = account,
                               .numa_node = numa_node,
                               .counts = &rank->counts,
                               .per_numa_node = per_numa_node,
                               .slice = i,
                               .n_slices = n,
                               .timeout_s = 10};
    assert_ok(i ? fcdp__host_join(&config, ticket, &rank->host)
                : fcdp__host_create(&config, &rank->host, ticket));
}

static void kernel_make(int full, int refuses) {
    kernel = (struct fake_kernel){
        .page_bytes = (size_t)sysconf(_SC_PAGESIZE), .full = full, .refuses = refuses};
    memset(kernel.node_of, UNTOUCHED, sizeof kernel.node_of);
    fcdp__numa_calls = (fcdp_numa_calls){fake_mbind, fake_move_pages};
}

static bool is_inner(const fcdp_piece *piece, size_t page, size_t page_bytes) {
    return page * page_bytes >= piece->offset_bytes &&
           (page + 1) * page_bytes <= piece->offset_bytes + piece->bytes;
}

/* Two ranks attach a block of two spans, whose slices end anywhere; rank i's device is on node i. Each page
 * is looked at; pages in which slices of both meet are of either. `whole`: rank 0 alone attaches, and copies
 * all; what it uses first is where its rank wants it nonetheless. */
static void placement_check(int full, int refuses, bool whole) {
    const fcdp_extent_spec specs[] = {{.shard_bytes = 1000003, .span = FCDP_SPAN_FROZEN},
                                      {.shard_bytes = 333333, .span = FCDP_SPAN_TRAINABLE}};
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const fcdp_numa_calls usual = fcdp__numa_calls;
    static rank ranks[N_RANKS];
    fcdp_account *account;
    fcdp_shared_ticket ticket;
    fcdp_layout *layout;
    uint64_t offset = 0;
    memset(ranks, 0, sizeof ranks);
    kernel_make(full, refuses);
    assert_ok(fcdp__layout_create(specs, 2, N_RANKS, N_RANKS, &layout));
    assert_ok(fcdp__account_create(64 << 20, &account, &ticket));
    for (uint32_t i = 0; i < N_RANKS; i++) rank_open(&ranks[i], i, N_RANKS, (int)i, false, account, &ticket);
    assert_ok(fcdp__host_block_alloc(ranks[0].host, layout->bytes, &offset));
    for (uint32_t i = 0; i < N_RANKS; i++) {
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
            ranks[i].share.own[s] = ranks[i].share.copied[s] = fcdp__layout_slice(layout, s, i);
        for (uint32_t s = 0; s < FCDP_N_SPANS && whole; s++) ranks[i].share.copied[s] = layout->span[s];
        if (!whole || i == 0)
            assert_ok(
                fcdp__host_attach(ranks[i].host, offset, layout->bytes, &ranks[i].share, &ranks[i].block));
    }
    size_t first = (size_t)offset / page, n_inner[N_RANKS] = {0};
    assert_int_equal(kernel.node_of[first], UNTOUCHED); /* the board, which all write */
    for (size_t i = 0; i < (layout->bytes + page - 1) / page; i++)
        for (uint32_t r = 0; r < N_RANKS; r++) {
            const fcdp_piece *own = ranks[r].share.own;
            if (!is_inner(&own[0], i, page) && !is_inner(&own[1], i, page)) continue;
            n_inner[r]++;
            int node = refuses ? UNTOUCHED : (int)r == full ? !r : (int)r;
            assert_int_equal(kernel.node_of[first + 1 + i], node);
        }
    for (uint32_t r = 0; r < (whole ? 1 : N_RANKS); r++) {
        const _Atomic uint64_t *n = ranks[r].counts.n;
        bool is_far = (int)r == full;
        assert_true(n_inner[r] * page > 1300000);
        assert_int_equal(n[FCDP_COUNT_HOST_NEAR_BYTES], refuses || is_far ? 0 : n_inner[r] * page);
        assert_int_equal(n[FCDP_COUNT_HOST_FAR_BYTES], !refuses && is_far ? n_inner[r] * page : 0);
    }
    for (uint32_t i = N_RANKS; i--;) {
        fcdp__host_detach(ranks[i].block);
        if (!i) fcdp__host_block_free(ranks[0].host, offset);
        fcdp__host_destroy(ranks[i].host);
    }
    fcdp__account_destroy(account);
    fcdp__layout_destroy(layout);
    fcdp__numa_calls = usual;
}

static void each_ranks_slices_come_from_its_devices_node(void **state) {
    (void)state;
    placement_check(-1, 0, false);
    placement_check(-1, 0, true);
}

static void pages_from_another_node_are_counted(void **state) {
    (void)state;
    placement_check(1, 0, false);
    placement_check(0, 0, false);
}

static void a_kernel_that_refuses_stops_nothing(void **state) {
    (void)state;
    placement_check(-1, EPERM, false);
    placement_check(-1, ENOSYS, false);
}

/* Ranks whose devices are on nodes 1, 0 and 1: the first and the third read one copy, the second another.
 * Whichever attaches first, each page of a copy is asked for on its node, and each rank finds its copy there,
 * unless that node has no room. */
static void copies_check(int full) {
    enum { DATA_BYTES = 3000000 };
    static const int nodes[N_READERS] = {1, 0, 1};
    static rank ranks[N_READERS];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), copy_pages = (DATA_BYTES + page - 1) / page;
    const fcdp_numa_calls usual = fcdp__numa_calls;
    fcdp_account *account;
    fcdp_shared_ticket ticket;
    uint64_t offset;
    size_t taken_bytes, peak_bytes;
    memset(ranks, 0, sizeof ranks);
    kernel_make(full, 0);
    assert_ok(fcdp__account_create(64 << 20, &account, &ticket));
    for (uint32_t i = 0; i < N_READERS; i++) {
        rank_open(&ranks[i], i, N_READERS, nodes[i], true, account, &ticket);
        assert_int_equal(fcdp__host_copies(ranks[i].host), i + 1 < N_READERS ? 0 : 2);
        if (i + 1 == N_READERS) continue;
        assert_int_equal(fcdp__host_block_alloc(ranks[0].host, DATA_BYTES, &offset), FCDP_ERR_INVALID);
        assert_text("has not joined");
    }
    assert_ok(fcdp__host_block_alloc(ranks[0].host, DATA_BYTES, &offset));
    fcdp__account_usage(account, &taken_bytes, &peak_bytes);
    assert_int_equal(taken_bytes, page + 2 * copy_pages * page);
    size_t first = (size_t)offset / page;
    for (uint32_t i = N_READERS; i-- > 0;) {
        fcdp_host_block **block = &ranks[i].block;
        assert_ok(fcdp__host_attach(ranks[i].host, offset, DATA_BYTES, NULL, block));
        for (size_t k = 0; k < 2 * copy_pages; k++) {
            int wanted = k < copy_pages ? 1 : 0;
            assert_int_equal(kernel.node_of[first + 1 + k], wanted == full ? !wanted : wanted);
        }
        assert_int_equal(kernel.node_of[first], UNTOUCHED);
        const _Atomic uint64_t *n = ranks[i].counts.n;
        bool is_far = nodes[i] == full;
        assert_int_equal(n[FCDP_COUNT_HOST_NEAR_BYTES], is_far ? 0 : copy_pages * page);
        assert_int_equal(n[FCDP_COUNT_HOST_FAR_BYTES], is_far ? copy_pages * page : 0);
        assert_int_equal(fcdp__host_block_copies(*block), 2);
        assert_ptr_equal(fcdp__host_data(*block), fcdp__host_copy(*block, nodes[i] ? 0 : 1));
    }
    *(char *)fcdp__host_copy(ranks[0].block, 1) = 7;
    assert_int_equal(*(const char *)fcdp__host_data(ranks[1].block), 7);
    assert_int_equal(*(const char *)fcdp__host_data(ranks[2].block), 0);
    for (uint32_t i = N_READERS; i-- > 0;) {
        fcdp__host_detach(ranks[i].block);
        if (!i) fcdp__host_block_free(ranks[0].host, offset);
        fcdp__host_destroy(ranks[i].host);
    }
    fcdp__account_usage(account, &taken_bytes, &peak_bytes);
    assert_int_equal(taken_bytes, 0);
    fcdp__account_destroy(account);
    fcdp__numa_calls = usual;
}

static void each_ranks_copy_comes_from_its_devices_node(void **state) {
    (void)state;
    copies_check(-1);
    copies_check(1);
}

/* One NUMA node, or none that is known: one copy, which takes what one copy takes; where the budget does not
 * hold all, the text says how many there are. */
static void as_many_copies_as_nodes_that_are_known(void **state) {
    (void)state;
    static const struct {
        int nodes[N_RANKS];
        uint32_t n_copies;
    } cases[] = {{{1, 1}, 1}, {{-1, -1}, 1}, {{-1, 1}, 1}, {{0, 1}, 2}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        rank ranks[N_RANKS];
        fcdp_account *account;
        fcdp_shared_ticket ticket;
        uint64_t offset;
        memset(ranks, 0, sizeof ranks);
        assert_ok(fcdp__account_create(3 << 20, &account, &ticket));
        for (uint32_t i = 0; i < N_RANKS; i++)
            rank_open(&ranks[i], i, N_RANKS, cases[k].nodes[i], true, account, &ticket);
        assert_int_equal(fcdp__host_copies(ranks[1].host), cases[k].n_copies);
        fcdp_status status = fcdp__host_block_alloc(ranks[0].host, 2 << 20, &offset);
        assert_int_equal(status, cases[k].n_copies > 1 ? FCDP_ERR_NO_HOST_MEM : FCDP_OK);
        if (status) assert_text("of 2 copies: FCDP_HOST_COPIES=node keeps one");
        if (status) { /* nor are there addresses for two of them */
            status = fcdp__host_block_alloc(ranks[0].host, (size_t)3 << 30, &offset);
            assert_int_equal(status, FCDP_ERR_NO_HOST_MEM);
            assert_text("does not fit");
            assert_text("of 2 copies: FCDP_HOST_COPIES=node keeps one");
        }
        if (!status) fcdp__host_block_free(ranks[0].host, offset);
        for (uint32_t i = 0; i < N_RANKS; i++) fcdp__host_destroy(ranks[i].host);
        fcdp__account_destroy(account);
    }
}

/* ---- this machine ---- */

static void *pages_map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(at != MAP_FAILED);
    return at;
}

static void the_kernel_prefers_the_node_that_was_asked_for(void **state) {
    (void)state;
    size_t bytes = 4 * (size_t)sysconf(_SC_PAGESIZE), near_bytes, far_bytes;
    char *at = pages_map(2 * bytes);
    int mode = -1;
    unsigned long mask[WORDS] = {0};
    if (!fcdp__numa_prefer(at, bytes, 0)) skip(); /* EPERM in some containers, ENOSYS without CONFIG_NUMA */
    assert_int_equal(syscall(SYS_get_mempolicy, &mode, mask, (unsigned long)MAX_NODES + 1, at, MPOL_F_ADDR),
                     0);
    assert_int_equal(mode, MPOL_PREFERRED);
    assert_int_equal(mask[0], 1);
    for (size_t i = 1; i < WORDS; i++) assert_int_equal(mask[i], 0);
    assert_int_equal(syscall(SYS_get_mempolicy, &mode, NULL, 0UL, at + bytes, MPOL_F_ADDR), 0);
    assert_int_equal(mode, MPOL_DEFAULT); /* beyond what was asked for */
    fcdp__numa_count(at, bytes, 0, &near_bytes, &far_bytes);
    assert_int_equal(near_bytes + far_bytes, 0); /* no page is there yet */
    memset(at, 1, bytes / 2);
    fcdp__numa_count(at, bytes, 0, &near_bytes, &far_bytes);
    assert_int_equal(near_bytes, bytes / 2);
    assert_int_equal(far_bytes, 0);
    fcdp__numa_count(at, bytes, 1, &near_bytes, &far_bytes);
    assert_int_equal(far_bytes, bytes / 2);
    munmap(at, 2 * bytes);
}

static void nodes_that_cannot_be_are_refused(void **state) {
    (void)state;
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *at = pages_map(bytes);
    assert_false(fcdp__numa_prefer(at, bytes, -1));
    /* the kernel's refusal: no machine here has it */
    assert_false(fcdp__numa_prefer(at, bytes, MAX_NODES - 1));
    assert_false(fcdp__numa_prefer(at, bytes, MAX_NODES)); /* ours */
    munmap(at, bytes);
}

/* The same CPUs and the same number of nodes as libnuma finds, which reads this machine alone. */
static void this_machine_is_as_libnuma_sees_it(void **state) {
    (void)state;
    void *libnuma = dlopen("libnuma.so.1", RTLD_NOW);
    if (!libnuma) skip(); /* package libnuma1 */
    int (*available)(void), (*n_nodes)(void), (*node_of_cpu)(int);
    *(void **)&available = dlsym(libnuma, "numa_available");
    *(void **)&n_nodes = dlsym(libnuma, "numa_num_configured_nodes");
    *(void **)&node_of_cpu = dlsym(libnuma, "numa_node_of_cpu");
    if (available() < 0) skip();
    fcdp_cpus own;
    fcdp_numa_plan plan;
    assert_true(fcdp__cpus_own(&own));
    fcdp__numa_plan("", &(fcdp_numa_device){.node = 0, .pci = ""}, true, &own, &plan);
    assert_int_equal(plan.n_nodes, n_nodes());
    assert_true(!plan.binds || plan.n_nodes > 1);
    for (int cpu = 0; cpu < FCDP_MAX_CPUS && plan.binds; cpu++)
        if (CPU_ISSET_S((size_t)cpu, sizeof plan.cpus, plan.cpus.sets)) assert_int_equal(node_of_cpu(cpu), 0);
    dlclose(libnuma);
}

/* ---- threads ---- */

typedef struct sleeper {
    pthread_t thread;
    fcdp_cpus cpus;    /* at the end */
    bool goes_its_way; /* binds itself first */
} sleeper;

static pthread_barrier_t bound, looked;
static fcdp_cpus own_way;

static void *sleeper_main(void *arg) {
    sleeper *me = arg;
    if (me->goes_its_way) (void)sched_setaffinity(0, sizeof own_way, own_way.sets);
    pthread_barrier_wait(&bound);
    pthread_barrier_wait(&looked);
    (void)fcdp__cpus_own(&me->cpus);
    return NULL;
}

static bool same(const fcdp_cpus *a, const fcdp_cpus *b) {
    return CPU_EQUAL_S(sizeof *a, a->sets, b->sets);
}

static void threads_are_bound_and_given_back_but_those_that_go_their_way(void **state) {
    (void)state;
    enum { N = 4 };
    fcdp_cpus before, one = {0}, now, wider;
    sleeper sleepers[N] = {{.goes_its_way = true}};
    int first = 0, last;
    assert_true(fcdp__cpus_own(&before));
    if (fcdp__cpus_count(&before) < 2) skip();
    while (!CPU_ISSET_S((size_t)first, sizeof before, before.sets)) first++;
    for (last = FCDP_MAX_CPUS - 1; !CPU_ISSET_S((size_t)last, sizeof before, before.sets);) last--;
    CPU_SET_S((size_t)last, sizeof one, one.sets);
    CPU_SET_S((size_t)first, sizeof own_way, own_way.sets);
    pthread_barrier_init(&bound, NULL, N + 1);
    pthread_barrier_init(&looked, NULL, N + 1);
    for (int i = 0; i < N; i++)
        assert_int_equal(pthread_create(&sleepers[i].thread, NULL, sleeper_main, &sleepers[i]), 0);
    pthread_barrier_wait(&bound);
    assert_in_range(fcdp__cpus_bind(&before, &one), N, N + 1); /* a sanitizer's own thread may be the last */
    assert_int_equal(fcdp__cpus_bind(&before, &one), 0);
    pthread_barrier_wait(&looked);
    for (int i = 0; i < N; i++) {
        pthread_join(sleepers[i].thread, NULL);
        assert_true(same(&sleepers[i].cpus, i ? &one : &own_way));
    }
    assert_true(fcdp__cpus_bind(&one, &before) >= 1);
    assert_true(fcdp__cpus_own(&now) && same(&now, &before));
    assert_int_equal(fcdp__cpus_bind(&before, &(fcdp_cpus){0}), 0); /* nowhere is not a place */
    /* CPUs that the process has lost meanwhile: the kernel takes the others, where the thread is already */
    wider = before;
    CPU_SET_S(FCDP_MAX_CPUS - 1, sizeof wider, wider.sets);
    assert_int_equal(fcdp__cpus_bind(&before, &wider), 0);
    pthread_barrier_destroy(&bound);
    pthread_barrier_destroy(&looked);
}

static void cpus_are_written_as_the_kernel_does(void **state) {
    (void)state;
    static const char *const lists[] = {"0-3,8-8,10-11", "", "8190-8191"};
    static const char *const texts[] = {"0-3,8,10-11", "", "8190-8191"};
    char text[64];
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        fcdp_cpus cpus = cpus_of(lists[i]);
        fcdp__cpus_text(&cpus, text, sizeof text);
        assert_string_equal(text, texts[i]);
    }
    fcdp_cpus cpus = cpus_of(lists[0]);
    fcdp__cpus_text(&cpus, text, 7);
    assert_string_equal(text, "0-3,8");
}

int main(void) {
#define DESCRIBED(test) cmocka_unit_test_setup_teardown(test, machine_make, described_remove)
    const struct CMUnitTest tests[] = {
        DESCRIBED(a_process_goes_to_its_devices_node),
        DESCRIBED(a_node_without_memory_or_cpus_has_a_nearest_one),
        DESCRIBED(an_affinity_that_something_else_chose_stays),
        DESCRIBED(all_cpus_of_the_cpuset_are_no_ones_choice),
        DESCRIBED(cpus_of_one_node_have_a_node),
        DESCRIBED(what_is_not_known_binds_nothing),
        cmocka_unit_test(each_ranks_slices_come_from_its_devices_node),
        cmocka_unit_test(each_ranks_copy_comes_from_its_devices_node),
        cmocka_unit_test(as_many_copies_as_nodes_that_are_known),
        cmocka_unit_test(pages_from_another_node_are_counted),
        cmocka_unit_test(a_kernel_that_refuses_stops_nothing),
        cmocka_unit_test(the_kernel_prefers_the_node_that_was_asked_for),
        cmocka_unit_test(nodes_that_cannot_be_are_refused),
        cmocka_unit_test(this_machine_is_as_libnuma_sees_it),
        cmocka_unit_test(threads_are_bound_and_given_back_but_those_that_go_their_way),
        cmocka_unit_test(cpus_are_written_as_the_kernel_does),
    };
    return cmocka_run_group_tests_name("tiering_numa", tests, NULL, NULL);
}
