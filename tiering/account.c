/* account.c - the node's host budget: one page of counters in shared memory.
 *
 * Ranks of several shard groups take from one budget. So the counters are atomics that every process of the
 * node maps, and a take is one compare-and-swap: a process that dies leaves no lock behind.
 */
#include "tiering/account.h"

#include "base/size.h"
#include "base/trace.h"
#include "tiering/headroom.h"
#include "tiering/trace_events.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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
