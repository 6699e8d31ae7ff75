/* fuzz_main.h - for a program with libFuzzer's entry, the main that it has without libFuzzer (FCDP_FUZZ off):
 * it runs the files that it is given. */
#ifndef FCDP_TESTS_FUZZ_MAIN_H
#define FCDP_TESTS_FUZZ_MAIN_H

#include <stdint.h>
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

#ifndef FCDP_FUZZ
int main(int argc, char **argv) {
    static uint8_t bytes[1 << 20];
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

#endif
