/* fail_release.h - device memory that the driver does not take back, for a test that is linked with
 * -Wl,--wrap=fcdp__driver_phys_release. */
#ifndef FCDP_TESTS_FAIL_RELEASE_H
#define FCDP_TESTS_FAIL_RELEASE_H

#include "alloc/driver.h"

/* The driver's, by the linker: simgpu fails one call, and this one is tried twice. */
static int n_releases_to_fail;
static fcdp_phys unreleased;
fcdp_status __real_fcdp__driver_phys_release(fcdp_driver *drv, fcdp_phys phys);
fcdp_status __wrap_fcdp__driver_phys_release(fcdp_driver *drv, fcdp_phys phys);

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_phys_release(fcdp_driver *drv,
                                                                                    fcdp_phys phys) {
    if (!n_releases_to_fail) return __real_fcdp__driver_phys_release(drv, phys);
    n_releases_to_fail--;
    unreleased = phys;
    return fcdp__fail(FCDP_ERR_DRIVER, "no release");
}

#endif
