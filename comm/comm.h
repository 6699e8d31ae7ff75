/* comm.h - one shard process group, seen as nodes x ranks. It has a transport, the host memory of its ranks
 * on this node, and a latched failure. Shard groups of different shapes (experts beside dense layers) are
 * served side by side.
 */
#ifndef FCDP_COMM_H
#define FCDP_COMM_H

#include "comm/ballot.h"
#include "comm/engine.h"
#include "comm/topology.h"
#include "comm/transport.h"

typedef struct fcdp_comm fcdp_comm;

/* After the engine's account. The transport's ctx stays the caller's. */
fcdp_status fcdp_comm_create(fcdp_engine *engine, const fcdp_topology *topology,
                             const fcdp_transport *transport, fcdp_comm **comm_out) FCDP_MUST_CHECK;
/* A number for its ranks, the same on each and no other comm's: by it a reader of the trace tells whether
 * regions of one name on two ranks are parts of one. Before the first group; 0, as without it: not said. */
void fcdp_comm_set_shard_group(fcdp_comm *comm, uint64_t shard_group);
/* Its operations go on the streams of `beside`, with which one thread uses it in the program's order; NULL:
 * on streams that no other comm uses. Without this call, on those of the engine's first comm. Before the
 * first group. Where streams cannot be made, all stays as it was. */
fcdp_status fcdp_comm_set_streams(fcdp_comm *comm, const fcdp_comm *beside) FCDP_MUST_CHECK;
/* Has every rank's device room for a group that is begun ahead of its use? (fcdp_groups_fit, of all groups.)
 * Not so: no restore begins before it is waited for. The same on all ranks; at first true. */
void fcdp_comm_set_ahead(fcdp_comm *comm, bool ahead);
/* Its groups and trees first. */
void fcdp_comm_destroy(fcdp_comm *comm);
/* The host memory of the comm's ranks on this node: local rank 0 creates, the others join with its ticket.
 * Once, before the first group. */
fcdp_status fcdp_comm_host_create(fcdp_comm *comm, fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
fcdp_status fcdp_comm_host_join(fcdp_comm *comm, const fcdp_shared_ticket *ticket) FCDP_MUST_CHECK;
/* The ranks' votes become their maximum (ballot.h), n bytes at `votes`, once all have their host memory.
 * Calls on one comm are the caller's to order. sent_bytes_out: by this rank to other nodes, in this
 * agreement; written after a failure too. A failure is the caller's to raise, and is not the comm's. */
fcdp_status fcdp_comm_agree(fcdp_comm *comm, const fcdp_carrier *carrier, uint64_t number, uint8_t *votes,
                            size_t n, uint64_t *sent_bytes_out) FCDP_MUST_CHECK;
/* Fingerprints (fingerprint.h) of shards in device memory, for the evidence of all groups that one agreement
 * asks for: n of shard_bytes[i] bytes at shards[i], read once, by one launch behind what is on `stream` now.
 * Between the two the host may see to other evidence; at the end it waits, as long as what is on `stream`
 * before takes. Shards are not written or freed before that. Calls on one comm are the caller's to order.
 * FCDP_ERR_UNSUPPORTED: the driver cannot, now and later; signals decide then. FCDP_ERR_INVALID: `stream`
 * captures a CUDA graph, or the call before has not ended. Other failures are the comm's. */
fcdp_status fcdp_comm_fingerprint_begin(fcdp_comm *comm, const uint64_t *shards, const size_t *shard_bytes,
                                        size_t n, fcdp_stream stream) FCDP_MUST_CHECK;
fcdp_status fcdp_comm_fingerprint_end(fcdp_comm *comm, uint64_t *fingerprints_out) FCDP_MUST_CHECK;
/* Its latched failure; FCDP_OK: none is known of. */
fcdp_status fcdp_comm_check(fcdp_comm *comm) FCDP_MUST_CHECK;

#endif
