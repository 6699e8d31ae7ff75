/* account.c - the node's host budget: how large it is, and how much of it is taken.
 *
 * A container sees the machine's MemAvailable, not its own limit. So the default budget rests on every cgroup
 * that encloses the process, of v2 and v1, as well as on /proc/meminfo, and the smallest number counts.
 *
 * Ranks of several shard groups take from one budget. So what is taken is counted in one page of shared
 * memory, by atomics that every process of the node maps, and a take is one compare-and-swap: a process that
 * dies leaves no lock behind. It allocates nothing: host.c does, after a take.
 */
#include "tiering/account.h"

#include "base/size.h"
#include "base/trace.h"
#include "tiering/cgroup.h"
#include "tiering/trace_events.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- what the machine and its cgroups leave ---- */

enum { PATH_BYTES = PATH_MAX };
/* Other processes of the machine still grow, so an eighth of what is left stays free by default. */
enum { KEEP_FREE_DIVISOR = 8 };

/* The names differ between the two cgroup versions, the meaning does not. */
typedef struct memory_controller {
    const char *name, *mount, *limit_file, *usage_file, *cache_key;
} memory_controller;

/* Above memory.high processes are held up until what they use is reclaimed, and what FCDP pins never is. */
static const memory_controller CONTROLLERS[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "},
    {"", "/sys/fs/cgroup", "memory.high", "memory.current", "inactive_file "},
    {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_inactive_file "},
};
/* v1 writes "no limit" as the largest page-aligned int64. */
static const uint64_t UNLIMITED_FROM = UINT64_C(1) << 60;

/* The number after `key` at the start of a line (key "": the file's first
 * word); false when absent or not a number. */
static bool read_number(const char *path, const char *key, uint64_t *value_out) {
    FILE *file = fopen(path, "re");
    if (!file) return false;
    char line[256];
    bool found = false;
    while (!found && fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key))) found = sscanf(line + strlen(key), "%" SCNu64, value_out) == 1;
    fclose(file);
    return found;
}

static size_t left_of(uint64_t limit, uint64_t usage, uint64_t reclaimable) {
    usage -= reclaimable < usage ? reclaimable : usage;
    return limit > usage ? (size_t)(limit - usage) : 0;
}

/* Every cgroup from `group` up to the root may have a limit; the tightest counts. */
static void narrow_by_cgroup(const char *root, const memory_controller *controller, char *group,
                             fcdp_headroom *h) {
    char dir[PATH_BYTES], path[PATH_BYTES + 64];
    do {
        uint64_t limit, usage = 0, cache = 0;
        if (snprintf(dir, sizeof dir, "%s%s%s", root, controller->mount, group) >= (int)sizeof dir) return;
        snprintf(path, sizeof path, "%s/%s", dir, controller->usage_file);
        (void)read_number(path, "", &usage);
        snprintf(path, sizeof path, "%s/memory.stat", dir);
        (void)read_number(path, controller->cache_key, &cache);
        snprintf(path, sizeof path, "%s/%s", dir, controller->limit_file);
        if (read_number(path, "", &limit) && limit < UNLIMITED_FROM &&
            left_of(limit, usage, cache) < h->available_bytes) {
            h->available_bytes = left_of(limit, usage, cache);
            snprintf(h->limit, sizeof h->limit, "what the cgroup's limit of %s leaves (%.100s)",
                     fcdp__size_text(limit).s, path + strlen(root));
        }
    } while (fcdp__cgroup_up(group));
}

fcdp_status fcdp__headroom_read(const char *root, fcdp_headroom *headroom_out) {
    char path[PATH_BYTES], group[PATH_BYTES];
    uint64_t total_kib, available_kib;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (!read_number(path, "MemTotal:", &total_kib) || !read_number(path, "MemAvailable:", &available_kib))
        return fcdp__fail(FCDP_ERR_SYSTEM,
                          "host tier: %s has no MemTotal or MemAvailable; set FCDP_HOST_BUDGET", path);
    fcdp_headroom h = {.available_bytes = available_kib * 1024, .total_bytes = total_kib * 1024};
    snprintf(h.limit, sizeof h.limit, "the memory that this machine has left (MemAvailable)");

    for (size_t k = 0; k < sizeof CONTROLLERS / sizeof *CONTROLLERS; k++)
        if (fcdp__cgroup_find(root, CONTROLLERS[k].name, group, sizeof group))
            narrow_by_cgroup(root, &CONTROLLERS[k], group, &h);
    *headroom_out = h;
    return FCDP_OK;
}

fcdp_status fcdp__host_budget_read(const char *root, size_t option_bytes, fcdp_host_budget *budget_out) {
    fcdp_host_budget budget = {.bytes = option_bytes, .limit = "FCDP_HOST_BUDGET"};
    if (!option_bytes) {
        fcdp_headroom headroom;
        fcdp_status status = fcdp__headroom_read(root, &headroom);
        if (status) return status;
        budget.bytes = headroom.available_bytes - headroom.available_bytes / KEEP_FREE_DIVISOR;
        snprintf(budget.limit, sizeof budget.limit, "7/8 of %s", headroom.limit);
    }
    *budget_out = budget;
    return FCDP_OK;
}

/* ---- what is taken ---- */

#define ACCOUNT_MAGIC UINT64_C(0x31544e4343504446) /* "FDPCCNT1" */
enum { ACCOUNT_BYTES = 4096 };

/* All but the counters are written before the ticket leaves the process that made it. */
typedef struct account_page {
    uint64_t magic, budget_bytes;
    char limit[256]; /* what set the budget, for messages */
    _Atomic uint64_t taken_bytes, peak_bytes;
} account_page;

struct fcdp_account {
    account_page *page;
    int fd;
};

_Static_assert(sizeof(account_page) <= ACCOUNT_BYTES, "the counters fit the smallest page");

static fcdp_status account_wrap(int fd, fcdp_account **account_out) {
    fcdp_account *account = calloc(1, sizeof *account);
    account_page *page = account ? fcdp__shared_map(fd, 0, ACCOUNT_BYTES) : NULL;
    if (!page) {
        free(account);
        close(fd);
        return fcdp__fail(FCDP_ERR_SYSTEM, "the counters of the host budget cannot be mapped: %s",
                          strerror(errno));
    }
    *account = (fcdp_account){page, fd};
    *account_out = account;
    return FCDP_OK;
}

fcdp_status fcdp__account_create(size_t budget_bytes, fcdp_account **account_out,
                                 fcdp_shared_ticket *ticket_out) {
    fcdp_host_budget budget;
    fcdp_shared_ticket ticket;
    fcdp_account *account = NULL;
    int fd;
    fcdp_status status = fcdp__host_budget_read("", budget_bytes, &budget);
    if (!status) status = fcdp__shared_create("fcdp-account", ACCOUNT_BYTES, &fd, &ticket);
    if (!status) status = account_wrap(fd, &account);
    if (status) return status;
    account_page *page = account->page;
    page->budget_bytes = budget.bytes;
    memcpy(page->limit, budget.limit, sizeof page->limit);
    page->magic = ACCOUNT_MAGIC;
    fcdp__log(FCDP_LOG_DEBUG, "host tier: budget %s (%s)", fcdp__size_text(page->budget_bytes).s,
              page->limit);
    *account_out = account;
    *ticket_out = ticket;
    return FCDP_OK;
}

fcdp_status fcdp__account_join(const fcdp_shared_ticket *ticket, fcdp_account **account_out) {
    int fd;
    fcdp_account *account = NULL;
    fcdp_status status = fcdp__shared_open(ticket, &fd);
    if (!status) status = account_wrap(fd, &account);
    if (status) return status;
    if (account->page->magic != ACCOUNT_MAGIC) {
        fcdp__account_destroy(account);
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "the node's ranks run different versions of FCDP; install one version for all of them");
    }
    *account_out = account;
    return FCDP_OK;
}

void fcdp__account_destroy(fcdp_account *account) {
    if (!account) return;
    munmap(account->page, ACCOUNT_BYTES);
    close(account->fd);
    free(account);
}

size_t fcdp__account_budget_bytes(const fcdp_account *account) {
    return account->page->budget_bytes;
}

fcdp_status fcdp__account_take(fcdp_account *account, size_t bytes) {
    account_page *page = account->page;
    uint64_t taken = atomic_load_explicit(&page->taken_bytes, memory_order_relaxed);
    do {
        if (taken > page->budget_bytes || bytes > page->budget_bytes - taken)
            return fcdp__fail(
                FCDP_ERR_NO_HOST_MEM,
                "host tier: %s more do not fit: %s of %s are taken, the limit is %s. Set "
                "FCDP_HOST_BUDGET to what this node can really give, raise the container's memory limit, "
                "or let this node's other processes use less",
                fcdp__size_text(bytes).s, fcdp__size_text(taken).s, fcdp__size_text(page->budget_bytes).s,
                page->limit);
    } while (!atomic_compare_exchange_weak_explicit(&page->taken_bytes, &taken, taken + bytes,
                                                    memory_order_relaxed, memory_order_relaxed));
    uint64_t now = taken + bytes, peak = atomic_load_explicit(&page->peak_bytes, memory_order_relaxed);
    while (peak < now && !atomic_compare_exchange_weak_explicit(&page->peak_bytes, &peak, now,
                                                                memory_order_relaxed, memory_order_relaxed))
        continue;
    fcdp__account_trace(account);
    return FCDP_OK;
}

void fcdp__account_give(fcdp_account *account, size_t bytes) {
    atomic_fetch_sub_explicit(&account->page->taken_bytes, bytes, memory_order_relaxed);
    fcdp__account_trace(account);
}

void fcdp__account_trace(const fcdp_account *account) {
    size_t now, peak;
    fcdp__account_usage(account, &now, &peak);
    fcdp__trace_set(FCDP_COUNT_HOST_BYTES, now);
    fcdp__trace_set(FCDP_COUNT_HOST_PEAK_BYTES, peak);
    fcdp__trace_set(FCDP_COUNT_HOST_BUDGET_BYTES, account->page->budget_bytes);
}

void fcdp__account_usage(const fcdp_account *account, size_t *current_bytes_out, size_t *peak_bytes_out) {
    *current_bytes_out = atomic_load_explicit(&account->page->taken_bytes, memory_order_relaxed);
    *peak_bytes_out = atomic_load_explicit(&account->page->peak_bytes, memory_order_relaxed);
}

void fcdp__account_reset_peak(fcdp_account *account) {
    uint64_t taken = atomic_load_explicit(&account->page->taken_bytes, memory_order_relaxed);
    atomic_store_explicit(&account->page->peak_bytes, taken, memory_order_relaxed);
    fcdp__account_trace(account);
}
