/* device.h - one device of this process: its driver, its page pool, its heap of tensors.
 *
 * All layers share it, so that a gathered parameter and an activation take their pages from one pool.
 */
#ifndef FCDP_DEVICE_H
#define FCDP_DEVICE_H

#include "alloc/heap.h"

typedef struct fcdp_device {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_heap *heap; /* NULL: another allocator serves tensors */
} fcdp_device;

/* `sim_library` as in fcdp__driver_open. budget_bytes 0: what is free but `headroom_bytes`, as in
 * fcdp__pool_create_with_headroom. */
fcdp_status fcdp_device_open(fcdp_driver_kind kind, int ordinal, const char *sim_library, size_t budget_bytes,
                             size_t headroom_bytes, bool with_heap, fcdp_device *device_out) FCDP_MUST_CHECK;
/* Nothing of the device may be in use any more. A zeroed device counts as closed. */
void fcdp_device_close(fcdp_device *device);

#endif
