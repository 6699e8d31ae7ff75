/* absent.c - the simulated GPU's control functions where a real one is used: nothing is there to
 * control. A test that runs on any driver is linked with this instead of the simulated driver, whose cu*
 * symbols would stand in libcuda's way. */
#include <string.h>

#include "sim/gpu/simgpu.h"

void simgpu_reset(void) {}

void simgpu_live(struct simgpu_live *live_out) {
    memset(live_out, 0, sizeof *live_out);
}

int simgpu_fail_nth(const char *entry, unsigned long n, int code) {
    (void)entry, (void)n, (void)code;
    return -1;
}

void simgpu_set_capacity(size_t bytes) {
    (void)bytes;
}

unsigned long simgpu_calls(const char *entry) {
    (void)entry;
    return 0;
}
