/* split.h - a region whose linear layers are in parts (fcdp.split), as the regions that it becomes. Pure.
 *
 *     pieces = what is left of the region, then the parts of each of its linear layers in turn
 *
 * Parameters, computing and activations of the pieces add up to those of the region. A region that has
 * nothing but its linear layers leaves nothing. Parts do not stay gathered, though the region may: each is a
 * parameter group of its own, which FSDP2 reshards.
 */
#ifndef PLAN_SPLIT_H
#define PLAN_SPLIT_H

#include "tools/plan/job.h"

enum { PLAN_N_SPLITS = 7 }; /* 1, 2, 4, ... 64 parts */

/* Can each of its linear layers be in so many parts, all of them of a block of rows at least? 1: always. */
bool plan_can_split(const plan_region *region, uint32_t parts);

/* With its linear layers in so many parts each; 1: none is split, and the region is the only piece. */
size_t plan_split_n_pieces(const plan_region *region, uint32_t parts);

/* `pieces_out`: plan_split_n_pieces of them. `ahead`: parts that are gathered ahead of the one that computes
 * (FCDP_PREFETCH); one at least, as FSDP2 gathers one ahead in backward. */
void plan_split(const plan_region *region, const plan_job *job, uint32_t parts, uint32_t ahead,
                plan_region *pieces_out);

#endif
