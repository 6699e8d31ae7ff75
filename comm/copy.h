/* copy.h - has the program written into a copy that outlives its use?
 *
 * Plain FSDP drops a write into a gathered parameter at reshard, and so does a restore. In a copy that is
 * kept on the device, or stored once its use has ended, the write would live on, and no signal of a
 * parameter tells of it. So the region's bytes are fingerprinted twice: when they are there, before the
 * program sees them, and when the use ends.
 *
 *     fcdp__copy_taken (wait) -> the program's use -> fcdp__copy_ended (reshard) -> fcdp__copy_judged (vote)
 *
 * Where the host is the compute stream it reads the bytes itself, and the reshard knows. On a device the
 * kernel reads them, in the order of the program's stream, and the host collects both answers at the
 * group's next vote. A copy that was written into is stale then, so all ranks gather it. No use comes in
 * between: a group that was resharded is asked for before its next unshard (use.c), if the votes said
 * that a copy of it may be lost on any rank (vote.h).
 */
#ifndef FCDP_COPY_H
#define FCDP_COPY_H

#include "comm/internal.h"

/* May this rank keep a copy behind its use, or store it then, of which only the next vote can tell
 * whether it was written into? By the options and its tier, so that it is the same in each use. */
bool fcdp__copy_may_outlive(const fcdp_group *group);
/* May this rank have no valid copy behind a use, as the program wrote into the only one, or as it was
 * dropped (use.c)? One rank may do so alone, so all ranks ask before the next use wherever that is possible.
 * By the options and its tier, too. */
bool fcdp__copy_may_be_lost(const fcdp_group *group);
/* Has the device not done this read of the group yet, of which there may be some later? A first use makes
 * both, whether or not they are needed, so that the memory of their tasks is pinned in the first step. */
bool fcdp__copy_is_first(const fcdp_group *group, int which);
/* The bytes are there, behind what is on `stream` now, and the program has not seen them. A failure is the
 * comm's. */
fcdp_status fcdp__copy_taken(fcdp_group *group, fcdp_stream stream) FCDP_MUST_CHECK;
/* Is there something to compare the copy with, or can there be nothing? Else it may not outlive its use. */
bool fcdp__copy_is_known(const fcdp_group *group);
/* The use ends, behind what is on `stream` now. *written_out: the copy was written into, as far as is
 * known by now. A failure is the comm's. */
fcdp_status fcdp__copy_ended(fcdp_group *group, fcdp_stream stream, bool *written_out) FCDP_MUST_CHECK;
/* Waits for what the device reads. A copy that was written into is nowhere valid afterwards. */
fcdp_status fcdp__copy_judged(fcdp_group *group) FCDP_MUST_CHECK;
/* Other bytes come into the region. */
void fcdp__copy_replaced(fcdp_group *group);
void fcdp__copy_free(fcdp_group *group);

#endif
