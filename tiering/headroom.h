/* headroom.h - how much host memory this process may still take. */
#ifndef FCDP_HEADROOM_H
#define FCDP_HEADROOM_H

#include "base/base.h"

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

#endif
