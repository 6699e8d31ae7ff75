/* support.h - N nodes x g ranks in one process: each rank has an endpoint, two streams and device memory of
 * its own. */
#ifndef FCDP_TESTS_SIMNET_SUPPORT_H
#define FCDP_TESTS_SIMNET_SUPPORT_H

#include "sim/net/simnet.h"
#include "tests/alloc/support.h"

enum { STREAMS = 2, MEMORY_BYTES = 4 << 20, PAGE_BYTES = 2 << 20 };

typedef struct rank {
    simnet_endpoint *endpoint;
    fcdp_stream streams[STREAMS];
    fcdp_dptr memory; /* MEMORY_BYTES, zero */
    uint8_t *bytes;   /* the same, as this process sees it */
    fcdp_phys pages[MEMORY_BYTES / PAGE_BYTES];
} rank;

typedef struct net {
    fcdp_driver *drv;
    simnet_fabric *fabric;
    uint32_t nodes, ranks_per_node, n;
    rank ranks[SIMNET_MAX_RANKS];
} net;

/* On a fresh simulated device. Fails the test on any error, as do the others. */
net *net_create(simnet_config config);
net *net_make(uint32_t nodes, uint32_t ranks_per_node); /* a timeout of 60 s, 64 KiB of staging memory */
/* All streams are waited for, all is given back, and nothing must live. */
void net_destroy(net *net);

simnet_comm *comm_of(net *net, uint32_t rank, simnet_lane lane, uint32_t id);
void sync_all(net *net);
/* Every endpoint is as it should be, or the test fails with its text. */
void assert_all_ok(net *net);
/* The endpoint's failure has this status, and its text has this part. */
void assert_failed(net *net, uint32_t rank, fcdp_status status, const char *part);

/* What a test puts into a rank's part of an operation: different for each byte of each. */
static inline uint8_t pattern(uint32_t rank, uint32_t salt, size_t i) {
    return (uint8_t)((i * 2654435761u >> 11) + rank * 37 + salt * 101 + 1);
}

#endif
