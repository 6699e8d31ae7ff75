/* pinned.h - page-locked memory of this process alone, which the device reads and writes.
 *
 * A child that is forked has none of it: it would share the pages with the device, or a write would move them
 * away from it.
 */
#ifndef FCDP_PINNED_H
#define FCDP_PINNED_H

#include "alloc/driver.h"

typedef struct fcdp_pinned {
    char *at; /* NULL: none */
    size_t bytes;
} fcdp_pinned;

/* At least `bytes`, zeroed and aligned to 64. `what` is what they are for, in a failure's text. */
fcdp_status fcdp__pinned_create(fcdp_driver *drv, size_t bytes, const char *what,
                                fcdp_pinned *memory_out) FCDP_MUST_CHECK;
/* No stream uses it. It is none from here on: what the driver does not give back, after a failure, stays
 * page-locked and so mapped (fcdp__driver_host_unpin). */
fcdp_status fcdp__pinned_destroy(fcdp_driver *drv, fcdp_pinned *memory) FCDP_MUST_CHECK;

#endif
