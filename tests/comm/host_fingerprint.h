/* host_fingerprint.h - the fingerprint of bytes that the host can read, as one task of the simulated
 * device. */
#ifndef FCDP_TEST_HOST_FINGERPRINT_H
#define FCDP_TEST_HOST_FINGERPRINT_H

#include "comm/fingerprint.h"

static inline uint64_t host_fingerprint(const void *bytes, size_t n_bytes) {
    fcdp_fingerprint_task task = {.address = (uintptr_t)bytes, .bytes = n_bytes};
    fcdp__fingerprint_kernel.run(&task);
    return fcdp__fingerprint_of_sum(task.sum, n_bytes);
}

#endif
