/* account.h - the host budget: how much host memory the ranks of a node may take together.
 *
 * It is FCDP_HOST_BUDGET, or what the machine and the process's cgroups leave. Every shard group of a node
 * has host memory of its own (host.h). A page, shared by all processes of the node, counts what all of them
 * take.
 *
 *     taken_bytes = sum over the node's fcdp__account_take, less what was given <= budget_bytes
 */
#ifndef FCDP_ACCOUNT_H
#define FCDP_ACCOUNT_H

#include "tiering/shared.h"

/* ---- how large the budget is ---- */

typedef struct fcdp_headroom {
    size_t available_bytes; /* the smallest of MemAvailable and what each enclosing cgroup leaves */
    size_t total_bytes;     /* the machine's memory */
    char limit[192];        /* what sets available_bytes, for messages: "MemAvailable" or a cgroup's file */
} fcdp_headroom;

typedef struct fcdp_host_budget {
    size_t bytes;    /* that the ranks of a node may take together */
    char limit[256]; /* what sets it, for messages */
} fcdp_host_budget;

/* `root` is put before /proc and /sys ("" outside of tests). */
fcdp_status fcdp__headroom_read(const char *root, fcdp_headroom *headroom_out) FCDP_MUST_CHECK;
/* FCDP_HOST_BUDGET, which is `option_bytes`; where that is 0, 7/8 of the headroom. */
fcdp_status fcdp__host_budget_read(const char *root, size_t option_bytes,
                                   fcdp_host_budget *budget_out) FCDP_MUST_CHECK;

/* ---- what is taken of it ---- */

typedef struct fcdp_account fcdp_account;

/* budget_bytes: as `option_bytes` above. Any process of the node; others join. */
fcdp_status fcdp__account_create(size_t budget_bytes, fcdp_account **account_out,
                                 fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
fcdp_status fcdp__account_join(const fcdp_shared_ticket *ticket, fcdp_account **account_out) FCDP_MUST_CHECK;
void fcdp__account_destroy(fcdp_account *account);
size_t fcdp__account_budget_bytes(const fcdp_account *account);
/* Any thread, any process of the node. FCDP_ERR_NO_HOST_MEM with need, budget and what to do. */
fcdp_status fcdp__account_take(fcdp_account *account, size_t bytes) FCDP_MUST_CHECK;
void fcdp__account_give(fcdp_account *account, size_t bytes);
/* Of the node: now, and at most since the last reset. */
void fcdp__account_usage(const fcdp_account *account, size_t *current_bytes_out, size_t *peak_bytes_out);
/* Write fcdp__account_usage's numbers to the trace. Other processes change them too, so call it again. */
void fcdp__account_trace(const fcdp_account *account);
void fcdp__account_reset_peak(fcdp_account *account);

#endif
