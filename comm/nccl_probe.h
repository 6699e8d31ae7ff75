/* nccl_probe.h - the first all-gather of each lane of a transport over NCCL.
 *
 * NCCL connects members when they first send to each other, and the host waits for that. It is done here, in
 * both forms that all_gather has, so that no training step waits for a peer's host. What came is compared
 * with what was sent, before anything relies on it.
 */
#ifndef FCDP_NCCL_PROBE_H
#define FCDP_NCCL_PROBE_H

#include "comm/nccl.h"

/* On every rank of the shard group. After a failure the transport is aborted. */
fcdp_status fcdp__nccl_probe(fcdp_nccl_transport *transport) FCDP_MUST_CHECK;

#endif
