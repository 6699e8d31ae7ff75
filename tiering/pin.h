/* pin.h - which bytes of a mapping are page-locked, as few ranges of whole host pages.
 *
 * Page-locking takes time by its bytes (about 1 s for 1 to 2 GB) and counts for each process that does it, so
 * a rank locks what it copies and no more. CUDA takes no copy that lies partly in one registration and partly
 * outside, so copies are cut at the edges that fcdp__pinned_run_bytes tells.
 */
#ifndef FCDP_PIN_H
#define FCDP_PIN_H

#include "alloc/driver.h"
#include "tiering/layout.h"

enum { FCDP_MAX_PINNED = 1 + FCDP_N_SPANS }; /* the board, and a piece of each span */

typedef struct fcdp_pinned {
    size_t n;
    /* from the mapping's start; disjoint, ascending, none empty, of whole pages */
    fcdp_piece ranges[FCDP_MAX_PINNED];
} fcdp_pinned;

/* The fewest ranges of whole pages that hold the `n` pieces, which ascend; n <=
 * FCDP_MAX_PINNED, pieces may be empty. Pure. */
void fcdp__pinned_cover(const fcdp_piece *pieces, size_t n, size_t page_bytes, fcdp_pinned *pinned_out);
/* Page-lock all of them, from `base` on, or none. Errors as of fcdp__driver_host_pin. */
fcdp_status fcdp__pinned_lock(fcdp_driver *drv, char *base, const fcdp_pinned *pinned) FCDP_MUST_CHECK;
/* Each is tried; the first failure is returned. */
fcdp_status fcdp__pinned_unlock(fcdp_driver *drv, char *base, const fcdp_pinned *pinned) FCDP_MUST_CHECK;
size_t fcdp__pinned_bytes(const fcdp_pinned *pinned);
/* From `offset_bytes` on, of at most `bytes`: how many lie in one registration, or in none (*pinned_out:
 * false). > 0 where bytes > 0. Pure. */
size_t fcdp__pinned_run_bytes(const fcdp_pinned *pinned, size_t offset_bytes, size_t bytes, bool *pinned_out);

#endif
