/* spilled.h - groups for which the nodes' host memory has no room: their slices live in files
 * (FCDP_SPILL_DIR).
 *
 * A restore by slices is one collective of the node's ranks, and a rank whose disk fails has nothing to
 * bring to it. So before each restore every rank reads its slice, and the ranks tell each other whether
 * they have it. What some rank has lost is stale then, and gathered, by the same steps as if its parameters
 * had changed.
 *
 * Such a group takes part in nothing else that host memory is for: it is not kept on the device between
 * uses, not gathered together with others, and not begun ahead where it has to be restored. Its slice is
 * read ahead instead.
 */
#ifndef FCDP_SPILLED_H
#define FCDP_SPILLED_H

#include "comm/unshard.h"

/* Every rank of the shard group, in place of fcdp_group_attach: the region exists then.
 * FCDP_ERR_UNSUPPORTED: there is no FCDP_SPILL_DIR that can be used, or the ranks of a node meet in host
 * memory, which has no room; FCDP_ERR_NO_HOST_MEM: the disk has none either. */
fcdp_status fcdp_group_attach_file(fcdp_group *group) FCDP_MUST_CHECK;

/* The engine's file, if there is a directory for one; else what is wrong with it is for warn to say, and for
 * fcdp_group_attach_file. */
void fcdp__spilled_open(fcdp_engine *engine);
void fcdp__spilled_warn(const fcdp_comm *comm);

bool fcdp__group_is_spilled(const fcdp_group *group);
/* It is spilled, and its next begin restores a part of it. The same on every rank. */
bool fcdp__group_needs_file(const fcdp_group *group);
/* The ranks have agreed on what is stale: they read the rest, and what one of them has lost is stale too. */
fcdp_status fcdp__spilled_fetch(fcdp_group *group, const fcdp_program *program) FCDP_MUST_CHECK;

#endif
