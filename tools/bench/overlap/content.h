/* content.h - what the shards are in each step: bf16 weights that AdamW moves (weights.h), at a learning rate
 * of 1e-4. A step changes a third of them, by little.
 */
#ifndef FCDP_BENCH_CONTENT_H
#define FCDP_BENCH_CONTENT_H

#include "tools/bench/overlap/overlap.h"

enum { CONTENT_ELEMENT_BYTES = 2 };

/* Once, before the ranks are forked. False: no memory. */
bool content_make(void);
/* EXTENT_SHARD_BYTES[extent] bytes: one rank's shard in a step, which may be BOARD_MAX_STEPS too. Other bytes
 * for each. */
const void *content_of(uint32_t g, uint32_t extent, uint32_t rank, uint32_t step);

#endif
