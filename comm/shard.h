/* shard.h - this rank's shard of a parameter, as it was when it was last gathered.
 *
 * After an optimizer's step the parameters hold the new values, and the gathered copy those of before. What
 * differs between the two is what the step has changed (codec.h), and no other copy is needed to know it.
 */
#ifndef FCDP_SHARD_H
#define FCDP_SHARD_H

#include "comm/group.h"

/* The first `bytes` bytes of this rank's shard in extent i, to `to_out` in host memory; the host waits.
 * *has_out: false, and nothing is copied, if no copy is on the node, if only a file has it (FCDP_SPILL_DIR),
 * if host memory has it, but for what another rank keeps on its device, or if the copy is rounded
 * (FCDP_CODEC=int8).
 * FCDP_ERR_INVALID between a begin and its wait, while the engine is asleep, and for more bytes than the
 * shard has. */
fcdp_status fcdp_group_gathered_shard(fcdp_group *group, uint32_t i, void *to_out, size_t bytes,
                                      bool *has_out) FCDP_MUST_CHECK;

#endif
