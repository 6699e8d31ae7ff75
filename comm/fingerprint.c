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

/* The terms of n bytes whose first word has the index `first`. Words come
 * through memcpy, as they may lie anywhere. */
static uint64_t sum_of(const unsigned char *bytes, size_t n_bytes, uint64_t first) {
    uint64_t sum = 0, key = (first + 1) * STEP, word;
    size_t n_words = n_bytes / WORD_BYTES;
    for (size_t i = 0; i < n_words; i++, key += STEP) {
        memcpy(&word, bytes + i * WORD_BYTES, WORD_BYTES);
        sum += mix(word + key);
    }
    if (n_bytes % WORD_BYTES == 0) return sum;
    word = 0;
    memcpy(&word, bytes + n_words * WORD_BYTES, n_bytes % WORD_BYTES);
    return sum + mix(word + key);
}

uint64_t fcdp__fingerprint_of_sum(uint64_t sum, size_t n_bytes) {
    return mix(sum + n_bytes);
}

uint64_t fcdp__fingerprint(const void *bytes, size_t n_bytes) {
    return fcdp__fingerprint_of_sum(sum_of(bytes, n_bytes, 0), n_bytes);
}

static void run_task(void *task) {
    fcdp_fingerprint_task *of = task;
    of->sum = sum_of((const unsigned char *)(uintptr_t)of->address, of->bytes, of->first);
}

const fcdp_kernel_source fcdp__fingerprint_kernel = {
    .image = fcdp__fingerprint_ptx,
    .entry = "fcdp_fingerprint",
    .n_threads = FCDP_FINGERPRINT_THREADS,
    .task_bytes = sizeof(fcdp_fingerprint_task),
    .run = run_task,
};
