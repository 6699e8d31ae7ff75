/* libFuzzer's entry into the codec: a wire of any bytes is decoded between the ends of allocations, and what
 * comes out of a good one is encoded again. Without libFuzzer (FCDP_FUZZ off) a main that runs the files it
 * is given.
 *
 *     CC=clang cmake -B build/fuzz -DFCDP_FUZZ=ON && ninja -C build/fuzz fuzz_codec &&
 * build/fuzz/tests/comm/fuzz_codec tests/comm/corpus
 */
#include <stdlib.h>
#include <string.h>

#include "comm/codec.h"
#include "tests/fuzz_main.h"

static void must(int holds) {
    if (!holds) abort();
}

/* A table that is none would stop almost every change: its sizes are made to add up. */
static void repair(uint8_t *wire, size_t wire_bytes, size_t n, unsigned element_bytes) {
    size_t block_bytes = FCDP_DELTA_BLOCK * (size_t)(element_bytes == 4 ? 4 : 2);
    size_t n_blocks = (n + block_bytes - 1) / block_bytes, table_bytes = n_blocks * sizeof(uint16_t);
    if (wire_bytes < table_bytes) return;
    size_t left = wire_bytes - table_bytes;
    for (size_t i = 0; i < n_blocks; i++) {
        uint16_t payload;
        memcpy(&payload, wire + i * sizeof payload, sizeof payload);
        payload = (uint16_t)(i + 1 < n_blocks && payload < left ? payload : left);
        memcpy(wire + i * sizeof payload, &payload, sizeof payload);
        left -= payload;
    }
}

/* The first two bytes say how long the array is, the third its width, which code, and whether its table is
 * repaired; the wire follows. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 3) return 0;
    size_t n = (data[0] | (size_t)data[1] << 8) % (5 * FCDP_DELTA_BLOCK), wire_bytes = n_bytes - 3;
    unsigned element_bytes = 1u << data[2] % 4;
    uint8_t *base = malloc(n + 1), *out = malloc(n + !n), *wire = malloc(wire_bytes + !wire_bytes);
    must(base && out && wire);
    for (size_t i = 0; i <= n; i++) base[i] = (uint8_t)(i * 37 >> 3);
    memcpy(wire, data + 3, wire_bytes);
    if (data[2] & 8) repair(wire, wire_bytes, n, element_bytes);
    fcdp__delta_portable = data[2] & 4;
    if (!fcdp__delta_decode(base + 1, out, n, element_bytes, wire, wire_bytes) && n) {
        size_t bound = fcdp__delta_bound(n);
        uint8_t *again = malloc(bound), *back = malloc(n);
        must(again && back);
        size_t used = fcdp__delta_encode(base + 1, out, n, element_bytes, again, bound);
        must(used > 0 && used <= bound);
        must(!fcdp__delta_decode(base + 1, back, n, element_bytes, again, used));
        must(memcmp(back, out, n) == 0);
        free(again);
        free(back);
    }
    free(base);
    free(out);
    free(wire);
    return 0;
}
