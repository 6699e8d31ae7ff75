/* copy_fingerprint.h - tells whether anybody has written into a gathered copy that is kept.
 *
 * A fingerprint of the region's bytes is taken when they are there, and compared when the use ends. Plain
 * FSDP drops a write into a gathered parameter at reshard; in a kept copy it would live on. This works only
 * where the host can read the device's bytes (the simulated one, with host_computes). On a GPU the caller's
 * version counters are the only sign of such a write.
 */
#ifndef FCDP_COPY_FINGERPRINT_H
#define FCDP_COPY_FINGERPRINT_H

#include "comm/group.h"

/* Takes it, where the host can read the bytes. They are there. */
void fcdp__copy_fingerprint_take(fcdp_group *group);
/* Was one taken before the program could write, or can none be taken? */
bool fcdp__copy_fingerprint_is_known(const fcdp_group *group);
/* Is the copy as it was, as far as can be told? A copy that nobody has waited for is: nobody has written into
 * it, and it may not be there yet. */
bool fcdp__copy_fingerprint_matches(const fcdp_group *group);

/* The same function (XXH3) of any bytes that the host can read. `before`: of the piece that these follow; 0:
 * they are the first. */
uint64_t fcdp__copy_fingerprint_of(const void *bytes, size_t n_bytes, uint64_t before);

#endif
