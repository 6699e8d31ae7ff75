/* schedule.h - the order in which a device's regions are used, and what FCDP_POLICY=next-use keeps by it.
 *
 * Every use is recorded, with the pages that others have meanwhile. When the program does what it did L uses
 * ago, the last L uses are its period, and policy.c plans which regions to keep between their uses. The plan
 * holds for one period, and ends at the first use that the period did not tell: another phase of the program
 * (evaluation, another model), which is learned anew. Without a plan nothing is kept. Once a whole period has
 * come as planned, it is believed, too, where it says that a region's next use fills it anew
 * (fcdp__region_dies).
 *
 * A reclaim that evicts says that the period's memory is not what it was. The next plans leave so much free;
 * each period takes an eighth off that, so that more is kept when room comes back. Where a region was kept
 * and evicted twice in turn, none is for some periods: a plan that is wrong in each of them does not evict in
 * each.
 *
 * A region with a tier of its own (tiers.h) is recorded like the others, since it tells the period too. No
 * plan made here keeps it: whether it is kept is decided already, and the pages of those that are count as
 * others'.
 *
 * Lock: the tiering's.
 */
#ifndef FCDP_SCHEDULE_H
#define FCDP_SCHEDULE_H

#include "tiering/internal.h"

/* Decisions of `tiering` are next-use from here on. Before its first region. */
fcdp_status fcdp__schedule_create(fcdp_tiering *tiering) FCDP_MUST_CHECK;
void fcdp__schedule_destroy(fcdp_tiering *tiering);

/* All of these do nothing where there is no schedule. Lock not held: they ask the pool, and the driver. */

/* Before a use begins: makes the plan that is due. */
void fcdp__schedule_prepare(fcdp_tiering *tiering);
/* Now `n_pages` more are asked for: how many pages others have, for the use that began last. */
void fcdp__schedule_sample(fcdp_tiering *tiering, size_t n_pages);

/* The same, lock held. */

/* A region is created or destroyed: what was recorded means nothing any more. */
void fcdp__schedule_forget(fcdp_tiering *tiering);
/* The region's use begins. */
void fcdp__schedule_record(fcdp_region *region);
/* The region's use ends. */
void fcdp__schedule_note_release(fcdp_region *region);
/* The reclaimer took the pages of a kept region. */
void fcdp__schedule_note_eviction(fcdp_tiering *tiering, const fcdp_region *region);
/* Uses until the region is needed again, UINT64_MAX: never, or not before it is filled anew; where no plan
 * holds, uses since the last. */
uint64_t fcdp__schedule_distance(const fcdp_region *region);

/* Uses in the period for which there is a plan, 0: there is none. */
size_t fcdp__schedule_period(fcdp_tiering *tiering);

#endif
