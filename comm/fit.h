/* fit.h - do groups fit the device, before the first of them is gathered? */
#ifndef FCDP_FIT_H
#define FCDP_FIT_H

#include "comm/group.h"

/* Is the device's budget enough to gather each of one model's `groups` in its turn? stays[i]: group i is not
 * resharded after forward. Else FCDP_ERR_NO_DEVICE_MEM, with the FCDP_DEVICE_BUDGET that would do.
 * *ahead_out: is there room to begin one ahead of its use? Created, attached or not. Takes nothing. */
fcdp_status fcdp_groups_fit(fcdp_group *const *groups, const uint8_t *stays, uint32_t n,
                            bool *ahead_out) FCDP_MUST_CHECK;

#endif
