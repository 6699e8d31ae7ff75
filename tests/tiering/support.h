/* support.h - a node inside one process: every rank has its own pool, tiering and view of the shared host memory.
 *
 * Content is a function of (seed, epoch, offset), so that any byte anywhere can be checked against the epoch it must be of.
 * Bytes are written and read by copies, so that what runs here runs on a real device too.
 */
#ifndef FCDP_TESTS_TIERING_SUPPORT_H
#define FCDP_TESTS_TIERING_SUPPORT_H

#include "tests/alloc/support.h"

#include "tiering/region.h"

enum { PAGE = 2 << 20, MAX_RANKS = 8 };

typedef struct rank {
    fcdp_pool *pool;
    fcdp_tiering *tiering;
    fcdp_host *host;
} rank;

typedef struct node {
    fcdp_driver *drv;
    fcdp_account *account;
    fcdp_stream stream;
    uint32_t n;
    rank ranks[MAX_RANKS];
} node;

typedef struct group {
    node *node;
    fcdp_layout *layout;
    uint64_t offset, seed;
    fcdp_host_block *blocks[MAX_RANKS];
    fcdp_region *regions[MAX_RANKS];
} group;

/* A step that a failed driver call may hit: clean error, then the retry must succeed. Outside of fault runs: assert_ok. */
extern bool steps_may_fail_once;
#define step(call)                                                                                           \
    do {                                                                                                     \
        fcdp_status first_ = (call);                                                                         \
        if (first_ && steps_may_fail_once) {                                                                 \
            assert_true(first_ < 0 && fcdp_error_text()[0]);                                                 \
            assert_ok(call);                                                                                 \
        } else if (first_)                                                                                   \
            fail_msg("%s: %s (%s)", #call, fcdp_status_name(first_), fcdp_error_text());                     \
    } while (0)

void node_open(node *node, uint32_t n_ranks, size_t pool_pages);
/* Every page is back in its pool, nothing of the simulated device lives. */
void node_close(node *node);
void group_open(group *group, node *node, const char *name, const fcdp_extent_spec *specs, uint32_t n_extents,
                uint64_t seed);
void group_close(group *group);

/* What every byte of span `s` of `epoch` is. */
void content_make(const group *group, uint32_t s, uint32_t epoch, size_t offset, size_t bytes,
                  uint8_t *bytes_out);
/* The gather's effect on one rank: its pages of the spans are written, and a new epoch begins. In use. */
void span_fill(group *group, uint32_t r, uint32_t span_mask);
/* The node's all-gather into rank r's pages: every other slice, of `epoch`, arrives. In use. */
void slices_arrive(group *group, uint32_t r, uint32_t s, uint32_t epoch);
/* The pages of rank r hold span `s` of `epoch`. In use. */
void assert_content(group *group, uint32_t r, uint32_t s, uint32_t epoch);
fcdp_region_state state_of(fcdp_region *region);

#endif
