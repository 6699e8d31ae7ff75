/* headroom.h - how much host memory this process may still take. */
#ifndef FCDP_HEADROOM_H
#define FCDP_HEADROOM_H

#include "alloc/base.h"

typedef struct fcdp_headroom {
    size_t available_bytes; /* the smallest of MemAvailable and what each enclosing cgroup leaves */
    size_t total_bytes;     /* the machine's memory */
    char limit[192];        /* who sets available_bytes, for messages: "MemAvailable" or a cgroup's file */
} fcdp_headroom;

/* `root` is put before /proc and /sys ("" outside of tests). */
fcdp_status fcdp__headroom_read(const char *root, fcdp_headroom *headroom_out) FCDP_MUST_CHECK;

#endif
