/* nccl_probe.h - the first all-gather of each lane of a transport over NCCL.
 *
 * NCCL connects members when it first takes an algorithm, and the host waits for that, and device memory goes
 * to it. Which one it takes depends on the size. So all-gathers of all sizes are done here, and one of
 * all_gather's other form, by sends and receives; and no training step waits for a peer's host. What came is
 * compared with what was sent, before anything relies on it.
 */
#ifndef FCDP_NCCL_PROBE_H
#define FCDP_NCCL_PROBE_H

#include "comm/nccl.h"

/* The largest one brings so many bytes to each member at most. Tests change it, of all ranks alike. */
extern size_t fcdp__nccl_probe_bytes;

/* On every rank of the shard group. After a failure the transport is aborted. */
fcdp_status fcdp__nccl_probe(fcdp_nccl_transport *transport) FCDP_MUST_CHECK;

#endif
