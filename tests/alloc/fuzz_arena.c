/* libFuzzer's entry into the arena's oracle. Without libFuzzer (FCDP_FUZZ off) a main that runs the files it
 * is given.
 *
 *     CC=clang cmake -B build/fuzz -DFCDP_FUZZ=ON && ninja -C build/fuzz fuzz_arena &&
 * build/fuzz/tests/alloc/fuzz_arena tests/alloc/corpus
 */
#include <stdio.h>

#include "tests/alloc/arena_oracle.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    arena_oracle_run(data, n_bytes);
    return 0;
}

#ifndef FCDP_FUZZ
int main(int argc, char **argv) {
    static uint8_t bytes[1 << 16];
    for (int i = 1; i < argc; i++) {
        FILE *in = fopen(argv[i], "rb");
        if (!in) {
            perror(argv[i]);
            return 1;
        }
        size_t n = fread(bytes, 1, sizeof bytes, in);
        fclose(in);
        LLVMFuzzerTestOneInput(bytes, n);
    }
    printf("%d inputs\n", argc - 1);
    return argc > 1 ? 0 : 1;
}
#endif
