/* device.c - opening a device and closing it, in order. */
#include "alloc/device.h"

#include <stdio.h>

static fcdp_status device_fill(fcdp_device *device, fcdp_driver_kind kind, int ordinal,
                               const char *sim_library, size_t budget_bytes, bool with_heap) {
    fcdp_status status = fcdp__driver_open(kind, ordinal, sim_library, &device->drv);
    if (!status) status = fcdp__pool_create(device->drv, budget_bytes, &device->pool);
    return status || !with_heap ? status : fcdp_heap_create(device->drv, device->pool, &device->heap);
}

fcdp_status fcdp_device_open(fcdp_driver_kind kind, int ordinal, const char *sim_library, size_t budget_bytes,
                             bool with_heap, fcdp_device *device_out) {
    fcdp_device device = {NULL, NULL, NULL};
    fcdp_status status = device_fill(&device, kind, ordinal, sim_library, budget_bytes, with_heap);
    if (status) {
        char text[1024];
        snprintf(text, sizeof text, "%s", fcdp_error_text());
        fcdp_device_close(&device);
        return fcdp__fail(status, "%s", text);
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
