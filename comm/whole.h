/* whole.h - one parameter as a whole, from the gathered copy, outside of the framework's own passes.
 *
 *     fcdp_group_whole_vote -> the ranks' maximum
 *     HOST:  fcdp_group_whole_read
 *     FRESH: fcdp_group_whole_begin
 *     STALE: an agreement on the group (fcdp_agree), then fcdp_group_whole_begin, which gathers what is stale
 *            -> fcdp_group_wait, a copy of the extent, fcdp_group_reshard
 *     PLAIN: the framework's own gather; nothing has happened
 *
 * The question is asked at any time, also between an agreement and the uses that trust it. So a vote changes
 * nothing, and an agreement in force stays in force.
 */
#ifndef FCDP_WHOLE_H
#define FCDP_WHOLE_H

#include "comm/unshard.h"

/* A rank's vote overrules those before it. HOST: fresh, and in the node's host memory, from where each rank
 * reads it by itself. */
typedef enum fcdp_whole { FCDP_WHOLE_HOST, FCDP_WHOLE_FRESH, FCDP_WHOLE_STALE, FCDP_WHOLE_PLAIN } fcdp_whole;

/* This rank's vote on extent i. `evidence`: of that extent alone, of one piece. PLAIN where its bytes
 * were not read: what a program may have written since is seen by them alone. PLAIN while the group is in
 * use, or is not known to any tree, and where the copy is rounded (FCDP_CODEC=int8). */
fcdp_whole fcdp_group_whole_vote(fcdp_group *group, uint32_t i, const fcdp_evidence *evidence);
/* As fcdp_group_begin, in place of the framework's gather of extent i alone. Not in use. */
fcdp_status fcdp_group_whole_begin(fcdp_group *group, uint32_t i, const fcdp_program *program,
                                   fcdp_stream stream) FCDP_MUST_CHECK;
/* The first `bytes` bytes of extent i from host memory, to memory of the program's on the device. `stream`
 * goes on when they are there; with host_computes the calling thread does. Not in use. */
fcdp_status fcdp_group_whole_read(fcdp_group *group, uint32_t i, fcdp_dptr to, size_t bytes,
                                  fcdp_stream stream) FCDP_MUST_CHECK;

#endif
