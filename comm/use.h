/* use.h - one use of a group on the streams: begin, wait, reshard. When each comes is unshard.h's to say.
 *
 * fcdp_group_begin puts all of an unshard on the streams; fcdp_group_wait lets a stream wait for its end;
 * fcdp_group_reshard ends the use. A group may be begun ahead of its use, and resharded without one. The
 * ranks have agreed on what is stale before (vote.h).
 */
#ifndef FCDP_USE_H
#define FCDP_USE_H

#include "comm/group.h"

typedef enum fcdp_pass { FCDP_PASS_FORWARD, FCDP_PASS_BACKWARD, FCDP_PASS_OTHER } fcdp_pass;

/* FCDP_ERR_INVALID while `stream` captures a CUDA graph, of which no gather can be part: to be asked before
 * an agreement. begin, wait, reshard and fcdp_groups_coalesce return the same then, and nothing has
 * happened. */
fcdp_status fcdp_group_check_capture(const fcdp_group *group, fcdp_stream stream) FCDP_MUST_CHECK;

/* Put everything on the streams. inputs[i]: device address of this rank's shard of extent i in the gathered
 * dtype (shard_bytes long), read where stale, after what is on `stream` now; it lives until `stream` has
 * passed a fcdp_group_wait, whatever stream that was for. May be NULL where nothing is stale. Nothing to do
 * where the group has begun already. FCDP_ERR_NO_DEVICE_MEM: nothing was begun, and the ranks may go on
 * together if all of them failed so. */
fcdp_status fcdp_group_begin(fcdp_group *group, const uint64_t *inputs, fcdp_pass pass,
                             fcdp_stream stream) FCDP_MUST_CHECK;
/* A test's: does this restore, of a group that begins alone, find no device memory? NULL: it takes what it
 * finds. */
extern bool (*fcdp__restore_is_refused)(const fcdp_group *group);
bool fcdp_group_has_begun(const fcdp_group *group);
/* Would a use begun now make no collective? Then this rank may put it off while its peers do not: it copies
 * from host memory what is stale on no rank. */
bool fcdp_group_begins_alone(const fcdp_group *group);
/* Begins the use that was put off so: with what the ranks had agreed on by then, which its peers have begun
 * with, whatever they have agreed on since. */
fcdp_status fcdp_group_begin_late(fcdp_group *group, fcdp_pass pass, fcdp_stream stream) FCDP_MUST_CHECK;
/* `stream` goes on when the bytes are there; with host_computes the calling thread does. Where it is another
 * than begin's, that one goes on when the inputs have been read. The failure of the group's shard group, if
 * it has one by then. */
fcdp_status fcdp_group_wait(fcdp_group *group, fcdp_stream stream) FCDP_MUST_CHECK;
/* The use ends: `stream` is behind it, or the stream that waited for the group is, for which it waits then.
 * `written`: the gathered bytes were written into, and must not be used again. Does nothing where the
 * group has not begun. */
fcdp_status fcdp_group_reshard(fcdp_group *group, fcdp_stream stream, bool written) FCDP_MUST_CHECK;

#endif
