/* member.h - what the framework's side does on one rank: it drives the protocol (comm/unshard.h), computes,
 * and steps. */
#ifndef FCDP_TEST_MEMBER_H
#define FCDP_TEST_MEMBER_H

#include "comm/unshard.h"
#include "tests/comm/cluster.h"

typedef enum unshard_kind { UNSHARD_FORWARD, UNSHARD_BACKWARD, UNSHARD_BY_HAND } unshard_kind;

fcdp_program member_program(member *m);
/* A root forward, or a backward, begins. */
void member_begin_forward(member *m);
void member_begin_backward(member *m);
/* fcdp_unshard. */
fcdp_status member_unshard(member *m, uint32_t g, unshard_kind kind) FCDP_MUST_CHECK;
/* Wait, and read every byte: what is not what the group held when it began is in m->wrong. */
fcdp_status member_use(member *m, uint32_t g) FCDP_MUST_CHECK;
/* A write into the gathered bytes, by compute. */
fcdp_status member_scribble(member *m, uint32_t g) FCDP_MUST_CHECK;
fcdp_status member_reshard(member *m, uint32_t g, bool written) FCDP_MUST_CHECK;
/* Extents `which` of the group get new content. `noticed`: this rank sees an optimizer step. */
fcdp_status member_step(member *m, uint32_t g, const uint8_t *which, bool noticed) FCDP_MUST_CHECK;
/* The trainable parameters of all groups, by an optimizer that is noticed. */
void member_step_trainable(member *m);
/* Votes of this rank on one group, as it is now: n_extents + FCDP_VOTE_MORE. */
fcdp_status member_vote(member *m, uint32_t g, uint8_t *vote_out) FCDP_MUST_CHECK;
/* Begin without an agreement: as the group was agreed on. */
fcdp_status member_begin(member *m, uint32_t g, fcdp_pass pass) FCDP_MUST_CHECK;

#endif
