/* device.c - opens a device's parts: driver, then pool, then heap. Closing is the reverse, and a part that
 * fails to open closes those before it. */
#include "alloc/device.h"

fcdp_status fcdp_device_open(fcdp_driver_kind kind, int ordinal, const char *sim_library, size_t budget_bytes,
                             size_t headroom_bytes, bool with_heap, fcdp_device *device_out) {
    fcdp_device device = {NULL, NULL, NULL};
    fcdp_status status = fcdp__driver_open(kind, ordinal, sim_library, &device.drv);
    if (!status)
        status = budget_bytes ? fcdp__pool_create(device.drv, budget_bytes, &device.pool)
                              : fcdp__pool_create_with_headroom(device.drv, headroom_bytes, &device.pool);
    if (!status && with_heap) status = fcdp_heap_create(device.drv, device.pool, &device.heap);
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        fcdp_device_close(&device);
        return fcdp__failure_restore(&failure);
    }
    *device_out = device;
    return FCDP_OK;
}

void fcdp_device_close(fcdp_device *device) {
    if (device->heap) fcdp_heap_destroy(device->heap);
    if (device->pool) fcdp__pool_destroy(device->pool);
    if (device->drv) fcdp__driver_close(device->drv);
    *device = (fcdp_device){NULL, NULL, NULL};
}
