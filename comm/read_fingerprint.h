/* read_fingerprint.h - what a gather reads, fingerprinted by the device while the host goes on.
 *
 * A shard may be written after the ranks agreed, before its gather reads it, and be as it was when they agree
 * the next time. So what is compared then is what the gather read: the device's fingerprints of it begin with
 * the gather, and end at the group's next vote, which has waited for later ones of the same device anyway.
 *
 *     fcdp_group_confirm -> fcdp__read_fingerprint_begin -> the gather -> fcdp__read_fingerprint_end -> vote
 */
#ifndef FCDP_READ_FINGERPRINT_H
#define FCDP_READ_FINGERPRINT_H

#include "comm/vote.h"

/* Of what is agreed stale, behind what is on `stream` now: evidence->shards are addresses in device memory. A
 * failure is the comm's. */
fcdp_status fcdp__read_fingerprint_begin(fcdp_group *group, const fcdp_evidence *evidence,
                                         fcdp_stream stream) FCDP_MUST_CHECK;
/* The copies that were gathered then are of these bytes. Nothing where none has begun. */
fcdp_status fcdp__read_fingerprint_end(fcdp_group *group) FCDP_MUST_CHECK;

#endif
