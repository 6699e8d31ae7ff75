/* segv.h - names the parameter when a program dies of a SIGSEGV in FCDP's memory.
 *
 * The first watch installs a handler, for good. After a fault in a watched range it writes one line to
 * stderr, restores the previous action and lets the instruction run again: what follows (faulthandler's
 * traceback, another handler, the default) sees the original fault, so exit status and core dump stay what
 * they were. Any other SIGSEGV goes to that action as it came. The line is missing if a handler that was
 * installed later raises the signal anew instead of returning, since that signal has no address.
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
/* NULL: does nothing. Waits for handlers that are reading the table; they never wait. */
void fcdp__segv_unwatch(fcdp_segv_watch *watch);

#endif
