/* fingerprint.c - the fingerprint on a CPU; the kernel is fingerprint.cu's. */
#include "comm/fingerprint.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little endian, as they are on every GPU"
#endif

extern const char fcdp__fingerprint_ptx[]; /* comm/CMakeLists.txt makes it of fingerprint.ptx */

enum { WORD_BYTES = sizeof(uint64_t) };
static const uint64_t STEP = 0x9e3779b97f4a7c15, FACTOR = 0xd6e8feb86659fd93;

static inline uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= FACTOR;
    x ^= x >> 32;
    x *= FACTOR;
    return x ^ x >> 32;
}

uint64_t fcdp__fingerprint_of_sum(uint64_t sum, size_t n_bytes) {
    return mix(sum + n_bytes);
}

/* The terms of the task's words. They come through memcpy, as they may lie anywhere. */
static void run_task(void *task) {
    fcdp_fingerprint_task *of = task;
    const unsigned char *bytes = (const unsigned char *)(uintptr_t)of->address;
    uint64_t sum = 0, key = (of->first + 1) * STEP, word;
    size_t n_words = of->bytes / WORD_BYTES, n_rest = of->bytes % WORD_BYTES;
    for (size_t i = 0; i < n_words; i++, key += STEP) {
        memcpy(&word, bytes + i * WORD_BYTES, WORD_BYTES);
        sum += mix(word + key);
    }
    word = 0;
    memcpy(&word, bytes + n_words * WORD_BYTES, n_rest);
    of->sum = n_rest ? sum + mix(word + key) : sum;
}

const fcdp_kernel_source fcdp__fingerprint_kernel = {
    .image = fcdp__fingerprint_ptx,
    .entry = "fcdp_fingerprint",
    .n_threads = FCDP_FINGERPRINT_THREADS,
    .task_bytes = sizeof(fcdp_fingerprint_task),
    .run = run_task,
};
