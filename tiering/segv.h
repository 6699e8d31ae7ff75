/* segv.h - a SIGSEGV in memory of ours says whose memory it was, before the process dies of it.
 *
 * A handler, installed at the first watch, for good. After a fault in a watched range it writes one line to
 * stderr, puts the action of before back and lets the instruction run again: what follows (faulthandler's
 * traceback, another handler, the default) sees the very fault, so that exit status and core dump stay what
 * they were. Any other SIGSEGV goes to that action as it came. It cannot speak after a handler that is
 * installed later and raises the signal anew instead of returning: that one has no address.
 */
#ifndef FCDP_SEGV_H
#define FCDP_SEGV_H

#include "alloc/driver.h"

typedef struct fcdp_segv_watch fcdp_segv_watch;

typedef struct fcdp_segv_part { /* of a range, for instance a parameter */
    size_t offset_bytes, bytes;
    const char *name;
} fcdp_segv_part;

/* `bytes` from `base` on are `name`'s; `parts` in any order, need not cover them. All is copied. */
fcdp_status fcdp__segv_watch(fcdp_dptr base, size_t bytes, const char *name, const fcdp_segv_part *parts,
                             size_t n_parts, fcdp_segv_watch **watch_out) FCDP_MUST_CHECK;
/* NULL: nothing. Waits for handlers that are reading the table, which wait for nobody. */
void fcdp__segv_unwatch(fcdp_segv_watch *watch);

#endif
