/* support.h - a node inside one process: every rank has its own pool, tiering, streams and view of the shared
 * host memory.
 *
 * Everything is enqueued, as the engine does it: bytes are written and compared by kernels of the simulated
 * device, in stream order, so that whatever is not ordered shows as a race or as wrong content, and nothing
 * here makes the host know more than the code under test does. Content is a function of (seed, epoch,
 * offset): two words of every 512 bytes say where they belong and of which epoch they are.
 */
#ifndef FCDP_TESTS_TIERING_SUPPORT_H
#define FCDP_TESTS_TIERING_SUPPORT_H

#include "tests/alloc/support.h"

#include "alloc/heap.h"
#include "tiering/slot.h"

enum { PAGE = 2 << 20, MAX_RANKS = 8 };

typedef struct rank {
    fcdp_pool *pool;
    fcdp_tiering *tiering;
    fcdp_host *host;
    fcdp_stream compute, gather; /* the model's, and where its gathers run */
} rank;

typedef struct node {
    fcdp_driver *drv;
    fcdp_account *account;
    uint32_t n;
    rank ranks[MAX_RANKS];
} node;

typedef struct group {
    node *node;
    fcdp_layout *layout;
    uint64_t offset, seed;
    fcdp_host_block *blocks[MAX_RANKS];
    fcdp_region *regions[MAX_RANKS];
    fcdp_event crossed[MAX_RANKS]; /* the rank's own pieces are in place */
} group;

/* A step that a failed driver call may hit: clean error, then the retry must
 * succeed. Outside of fault runs: assert_ok. */
extern bool steps_may_fail_once;
#define step(call)                                                                                           \
    do {                                                                                                     \
        fcdp_status first_ = (call);                                                                         \
        if (first_ && steps_may_fail_once) {                                                                 \
            assert_true(first_ < 0 && fcdp_error_text()[0]);                                                 \
            assert_ok(call);                                                                                 \
        } else if (first_)                                                                                   \
            fail_msg("%s: status %d: %s", #call, (int)first_, fcdp_error_text());                            \
    } while (0)

/* How node_open has host memory pinned, FCDP_PIN_AUTO. */
extern fcdp_pin_mode node_pin;
/* Its policy, FCDP_POLICY_TAU. */
extern fcdp_policy_kind node_policy;
/* Does each rank pin its slices alone? false: everything. */
extern bool node_pins_slices;
/* Does the node keep a copy for each of two NUMA nodes, of which even ranks are on one? false: one copy. */
extern bool node_has_copies;
/* How long the host waits for peers, 20. */
extern double node_timeout_s;
/* Begins with a device as new, on which races are looked for. */
void node_open(node *node, uint32_t n_ranks, size_t pool_pages, bool exact);
/* Nothing was unordered or wrong, every page is back in its pool, nothing of the simulated device lives. */
void node_close(node *node);
/* So far: no access that nothing ordered, no wrong content. */
void assert_all_is_well(const node *node);
/* The device is done with everything, and all is well. */
void node_sync(const node *node);
void group_open(group *group, node *node, const char *name, const fcdp_extent_spec *specs, uint32_t n_extents,
                uint64_t seed);
/* One extent in the trainable span, the region being n_pages long (or a little less). */
void group_open_pages(group *group, node *node, size_t n_pages, uint64_t seed);
void group_close(group *group);

/* ---- what kernels do, enqueued ---- */

void span_write(group *group, uint32_t r, uint32_t s, uint32_t epoch, fcdp_piece piece, fcdp_stream stream);
/* Reads the span when it starts and once more after duration_ns, and compares it with `epoch`. */
void span_expect(group *group, uint32_t r, uint32_t s, uint32_t epoch, fcdp_stream stream,
                 uint64_t duration_ns);
/* A kernel that touches nothing. `done` is set at its end. */
void pause_enqueue(fcdp_stream stream, uint64_t duration_ns, _Atomic bool *done);

/* ---- one rank's part of a use, as an unshard and a reshard enqueue it; the region is acquired ---- */

typedef enum fill_way {
    FILL_KEPT,  /* the other slices come by the node's all-gather, nothing is stored */
    FILL_SLICE, /* likewise, and the rank's own slice is stored */
    FILL_HOST,  /* the rank's own slice is stored, the others are loaded from the host, as they come */
} fill_way;
void region_fill(group *group, uint32_t r, uint32_t span_mask, fill_way way);
/* From the host: its slice, the others by the node's all-gather; or the whole span. */
void region_restore(group *group, uint32_t r, uint32_t s, bool whole);
/* Behind ready, every span that is on the device is as it must be, for so long. */
void region_compute(group *group, uint32_t r, uint64_t duration_ns);
/* What an all-gather has brought and the host does not have. */
void region_store_late(group *group, uint32_t r, uint32_t span_mask);
void region_release(group *group, uint32_t r, bool keep);

/* ---- the same on every rank ---- */

void group_acquire(group *group);
void group_release(group *group, bool keep);
/* acquire, fill, compute; the regions stay in use. */
void group_fill(group *group, uint32_t span_mask, fill_way way, uint64_t duration_ns);
/* acquire, restore what is not on the device, compute. */
void group_restore(group *group, bool whole, uint64_t duration_ns);

/* ---- looking ---- */

fcdp_region_state state_of(fcdp_region *region);
void assert_span(fcdp_region *region, uint32_t s, bool on_device, bool stored, bool whole, uint32_t epoch);
/* Rank r's view of the host's copy, slice `slice`, once r's d2h stream is through. */
void assert_host_slice(group *group, uint32_t r, uint32_t s, uint32_t slice, uint32_t epoch);
void assert_host_span(group *group, uint32_t r, uint32_t s, uint32_t epoch);
/* What fcdp__region_peek makes of rank r's own slice: its bytes, or none if not `has`. */
void assert_peek(group *group, uint32_t r, uint32_t s, uint32_t epoch, bool has);
fcdp_pool_stats pool_stats_of(const node *node, uint32_t r);
fcdp_tiering_stats stats_of(const node *node, uint32_t r);
/* Like another holder that needs memory: takes all that can be had, leaving rank r's tiering
 * without free slots and kept regions. */
void pages_squeeze(node *node, uint32_t r, size_t n_pages);

/* ---- gates: what is held waits on the device until the test lets it pass ---- */

typedef struct gate {
    fcdp_driver *drv;
    _Atomic uint32_t *word;
    fcdp_dptr at;
} gate;
gate gate_make(const node *node);
void gate_hold(const gate *gate, fcdp_stream stream);
void gate_open(const gate *gate);
void gate_destroy(gate *gate);
/* The events of what has and what has not run. */
bool has_passed(const node *node, fcdp_event event);

#endif
