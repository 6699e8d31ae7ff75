/* content.c - one row of weights for each step. Each shard is a stretch of it, from a place of its own on. */
#include "tools/bench/overlap/content.h"

#include <stdlib.h>

#include "tools/bench/codec/weights.h"

enum {
    N_ROWS = BOARD_MAX_STEPS + 1,
    N_PLACES = N_GROUPS * N_EXTENTS * N_RANKS,
    APART = 128, /* weights */
    ROW = N_PLACES * APART + SHARD_BYTES / CONTENT_ELEMENT_BYTES
};
static const double LEARNING_RATE = 1e-4;

static uint16_t (*rows)[ROW];

bool content_make(void) {
    uint64_t state = 1;
    rows = malloc(N_ROWS * sizeof *rows);
    if (!rows) return false;
    for (uint32_t i = 0; i < ROW; i++) {
        double first, next[2];
        weights_normal_pair(&state, &first, &next[0]);
        float w = weights_first(first);
        for (uint32_t step = 0; step < N_ROWS; step++) {
            rows[step][i] = weights_bf16(w);
            if (step % 2 == 0) weights_normal_pair(&state, &next[0], &next[1]);
            w = weights_next(w, next[step % 2], LEARNING_RATE);
        }
    }
    return true;
}

const void *content_of(uint32_t g, uint32_t extent, uint32_t rank, uint32_t step) {
    return &rows[step][((g * N_EXTENTS + extent) * N_RANKS + rank) * APART];
}
