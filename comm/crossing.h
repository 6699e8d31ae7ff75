/* crossing.h - the inter-node step of a gather: own shards packed into a column, and all-gathered over the nodes.
 *
 * Crossings are started by a worker of their own (or by the node worker: one_worker in engine.h), in the order of submission, so that the link is busy while the node's ranks complete an
 * earlier gather among themselves and while the model computes; that worker waits for none of them, so that a second one is under way
 * when the first ends. The group's next unshard that gathers takes the column.
 *
 * Order and pages. A crossing starts when the jobs of the node worker that it names (`after`) are done, and all of those were
 * submitted before it; a job of the node worker waits for its own crossing only, which was submitted before it. So every wait points back in the
 * program's order, and none can close a circle. `after` is chosen so that at most `limit` columns of a comm have pages at a time (one more where a group comes
 * that was not expected), where
 *
 *     limit = min(FCDP_PREFETCH, ranks per node), at least 1            a column is 1/g of its group: limit columns <= one group
 *
 *     prefetch        k columns wait for their unshards, itself among them: after the last unshard but (limit - k) that took one
 *     not ahead       after all that was submitted
 */
#ifndef FCDP_CROSSING_H
#define FCDP_CROSSING_H

#include "comm/group.h"

struct fcdp_crossing {
    fcdp_work work; /* first; of the inter worker */
    fcdp_engine *engine;
    fcdp_group *group;
    fcdp_mark mark;
    uint64_t after; /* ticket of the node worker */
    fcdp_plan *plan;
    uint64_t *inputs;    /* device addresses of this rank's shards, in the order of plan->extents */
    uint8_t *stale;      /* n_extents */
    fcdp_seen_list seen; /* the shards' signals at submission, if it is ahead of its unshard */
    bool waited_for;     /* by who takes it */
    fcdp_column *column; /* once done; NULL if it failed */
    bool is_restless;    /* its collective failed, and may still write to the column */
    void *pending;       /* the transport's; once done without a failure, until waited for */
};

/* Not submitted yet; `stale` and `inputs` as for fcdp_group_unshard. *crossing_out = NULL where nothing is stale. */
fcdp_status fcdp__crossing_create(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs, fcdp_stream stream,
                                  fcdp_crossing **crossing_out) FCDP_MUST_CHECK;
/* Never submitted, or ended. May be NULL. */
void fcdp__crossing_destroy(fcdp_crossing *crossing);
bool fcdp__crossing_matches(const fcdp_crossing *crossing, const uint8_t *stale);

void fcdp__crossing_submit(fcdp_crossing *crossing);
/* A prefetch; false: as many as may be are ahead already, nothing was submitted. */
bool fcdp__crossing_submit_ahead(fcdp_crossing *crossing);
/* One that was submitted by _ahead waits for its unshard no more. */
void fcdp__crossing_not_ahead(fcdp_comm *comm);
/* The unshard at `ticket` of the node worker takes a crossing. */
void fcdp__crossing_taken(fcdp_comm *comm, uint64_t ticket);

/* Until its bytes are in the column. Once per submitted crossing. */
fcdp_status fcdp__crossing_wait(fcdp_crossing *crossing) FCDP_MUST_CHECK;
fcdp_dptr fcdp__crossing_column(const fcdp_crossing *crossing);
/* What the column of such a plan takes. */
size_t fcdp__crossing_column_bytes(const fcdp_group *group, const fcdp_plan *plan);
/* The device is done with the column, whose pages go. On failure it is still there. */
fcdp_status fcdp__crossing_end(fcdp_crossing *crossing) FCDP_MUST_CHECK;
/* After the failure `status`: until it is not running, and has no column; copies out of that may be pending on `stream`. Keeps the
 * thread's text, returns `status`. */
fcdp_status fcdp__crossing_abandon(fcdp_crossing *crossing, fcdp_stream stream, fcdp_status status) FCDP_MUST_CHECK;

#endif
