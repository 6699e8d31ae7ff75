/* imprint.h - has anybody written into a gathered copy? A fingerprint of the region's bytes, taken when a gather has filled it and compared
 * before the copy is stored or kept. Plain FSDP drops such writes at reshard; a stored or kept one would live on.
 *
 * Only where the device's bytes can be read by this process (the simulated device). On a GPU torch's version counters are the one sign.
 * With tau 0 nothing is ever kept and a rank stores its own slices alone, so those are all that is read (nothing, where a gather through the
 * host has stored them already); else every extent is.
 */
#ifndef FCDP_IMPRINT_H
#define FCDP_IMPRINT_H

#include "comm/group.h"

/* After a gather filled the region, which is mapped and wholly on the device. */
void fcdp__imprint_take(fcdp_group *group);
/* False: the bytes are not those of the last fill. The region is in use. */
bool fcdp__imprint_holds(const fcdp_group *group);

#endif
