/* driver_world.h - the driver table on a fresh simulated device, with what its entries are called on. */
#ifndef FCDP_TESTS_ALLOC_DRIVER_WORLD_H
#define FCDP_TESTS_ALLOC_DRIVER_WORLD_H

#include <sys/mman.h>

#include "alloc/driver_internal.h"
#include "tests/alloc/support.h"

/* Of the simulated driver, beside the table. */
int cuCtxGetCurrent(void **ctx);
int cuCtxSetCurrent(void *ctx);
int cuDevicePrimaryCtxRetain(void **ctx, int device);
int cuDevicePrimaryCtxRelease_v2(int device);

enum { MIB = 1 << 20, PAGE = 2 * MIB };

typedef struct world {
    fcdp_driver *drv;
    fcdp_dptr base;
    fcdp_phys phys;
    fcdp_stream stream;
    fcdp_event event;
    char *host;
} world;

static inline world world_create(void) {
    world w = {.drv = driver_open_sim()};
    assert_ok(fcdp__driver_range_reserve(w.drv, 2 * PAGE, &w.base));
    assert_ok(fcdp__driver_phys_create(w.drv, PAGE, &w.phys));
    assert_ok(fcdp__driver_map(w.drv, w.base, PAGE, w.phys));
    assert_ok(fcdp__driver_set_access(w.drv, w.base, PAGE));
    assert_ok(fcdp__driver_stream_create(w.drv, &w.stream));
    assert_ok(fcdp__driver_event_create(w.drv, &w.event));
    w.host = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(w.host, MAP_FAILED);
    return w;
}

static inline void world_destroy(world *w) {
    fcdp__driver_event_destroy(w->drv, w->event);
    fcdp__driver_stream_destroy(w->drv, w->stream);
    assert_ok(fcdp__driver_unmap(w->drv, w->base, PAGE));
    assert_ok(fcdp__driver_phys_release(w->drv, w->phys));
    assert_ok(fcdp__driver_range_free(w->drv, w->base, 2 * PAGE));
    munmap(w->host, PAGE);
    assert_nothing_lives();
    fcdp__driver_close(w->drv);
}

static inline void do_nothing(void *arg) {
    (void)arg;
}

#endif
