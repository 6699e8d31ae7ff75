/* libFuzzer's entry into the arena's oracle. Without libFuzzer (FCDP_FUZZ off) a main that runs the files it
 * is given.
 *
 *     CC=clang cmake -B build/fuzz -DFCDP_FUZZ=ON && ninja -C build/fuzz fuzz_arena &&
 * build/fuzz/tests/alloc/fuzz_arena tests/alloc/corpus
 */
#include "tests/alloc/arena_oracle.h"
#include "tests/fuzz_main.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    arena_oracle_run(data, n_bytes);
    return 0;
}
