/* shared.h - memory that the processes of a node share. It is an unnamed memfd: one process creates it, the
 * others open it through /proc/<pid>/fd. Nothing is named, so nothing outlives the processes, however they
 * end.
 */
#ifndef FCDP_SHARED_H
#define FCDP_SHARED_H

#include "base/base.h"

/* how another process of the node opens it; plain bytes, to be sent to it */
typedef struct fcdp_shared_ticket {
    int32_t pid, fd;
    uint64_t pid_start_time, inode, bytes;
} fcdp_shared_ticket;

/* A sparse memfd of `bytes`, mode 0600, whose size is sealed. The caller closes *fd_out. */
fcdp_status fcdp__shared_create(const char *name, size_t bytes, int *fd_out,
                                fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
/* FCDP_ERR_UNSUPPORTED with the reason: the maker is gone, in another PID
 * namespace or container, or another user's. */
fcdp_status fcdp__shared_open(const fcdp_shared_ticket *ticket, int *fd_out) FCDP_MUST_CHECK;
/* A huge page, where the architecture's is of this size. */
enum { FCDP_HUGE_BYTES = 2 << 20 };
/* Map `bytes` at `offset`, not inherited by forked children; NULL: errno says why. Where `bytes` is at least
 * FCDP_HUGE_BYTES, the address leaves the same rest modulo that as the offset. */
void *fcdp__shared_map(int fd, uint64_t offset, size_t bytes);

/* Start time of `pid` in clock ticks since boot (field 22 of /proc/PID/stat). False when it has ended, as a
 * zombie has, with errno ESRCH; or when it cannot be looked at now: EMFILE, ENFILE, ENOMEM, ... */
bool fcdp__process_start_time(int32_t pid, uint64_t *start_time_out);

#endif
