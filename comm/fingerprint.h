/* fingerprint.h - 64 bits that say whether bytes are what they were. A CPU computes the same ones as a GPU,
 * which reads the bytes once.
 *
 * The definition. n bytes are words w[0], w[1], ... of 8 bytes, little endian, the last one filled up with
 * zeroes. With arithmetic modulo 2^64:
 *
 *     mix(x):     x ^= x >> 32;  x *= f;  x ^= x >> 32;  x *= f;  x ^= x >> 32        f = 0xd6e8feb86659fd93
 *     sum         = mix(w[0] + 1 * s) + mix(w[1] + 2 * s) + ...                       s = 0x9e3779b97f4a7c15
 *     fingerprint = mix(sum + n)
 *
 * A sum has no order: blocks of a GPU add up what they come to. What it sees:
 *   - One flipped bit, and whatever else changes within one word, always: mix is a bijection (each of its
 *     steps is one: a shift to the right by half undoes itself, f is odd), so one term differs, and so do the
 *     sum and the fingerprint.
 *   - Two words that change places, almost surely. A sum of mix(w[i]) would not see it: the index, multiplied
 *     and added, makes the two terms those of other arguments, {a + i s, b + j s} against {b + i s, a + j s},
 *     which are the same set only for a = b. What is left is chance: that four values of mix cancel. mix is
 *     not linear, so the high bits of two words cannot cancel as they would in a sum of products.
 *   - Any other change in two words or more: as two values out of 2^64 are equal, by chance 5e-20.
 *   - Zeroes at the end, more or fewer: within the last word always, by n; else almost surely. No defence
 *     against a search for two shards of one fingerprint. Where both ends are a CPU's, XXH3 does
 *     the same and is faster.
 */
#ifndef FCDP_FINGERPRINT_H
#define FCDP_FINGERPRINT_H

#include "alloc/driver.h"

/* From the sum of all words' terms. */
uint64_t fcdp__fingerprint_of_sum(uint64_t sum, size_t n_bytes);

/* ---- the kernel ---- */

/* a block's: up to FCDP_FINGERPRINT_TASK_BYTES of one array of bytes */
typedef struct fcdp_fingerprint_task {
    uint64_t address, bytes;
    uint64_t first; /* index of its first word in the array */
    uint64_t sum;   /* the block's answer */
} fcdp_fingerprint_task;
enum { FCDP_FINGERPRINT_TASK_BYTES = 256 << 10, FCDP_FINGERPRINT_THREADS = 256 };

/* fingerprint.ptx, with the same function in C for the simulated device. */
extern const fcdp_kernel_source fcdp__fingerprint_kernel;

/* ---- many arrays in device memory, by one launch ---- */

/* One batch at a time: a kernel, the pinned memory of its tasks, an event. */
typedef struct fcdp_fingerprints fcdp_fingerprints;

/* FCDP_ERR_UNSUPPORTED: the driver cannot run the kernel. */
fcdp_status fcdp__fingerprints_create(fcdp_driver *drv, fcdp_fingerprints **fingerprints_out) FCDP_MUST_CHECK;
/* Another batch, by the kernel of `first`, which is destroyed last. */
fcdp_status fcdp__fingerprints_create_beside(const fcdp_fingerprints *first,
                                             fcdp_fingerprints **fingerprints_out) FCDP_MUST_CHECK;
/* Waits for what was begun. NULL: nothing. */
void fcdp__fingerprints_destroy(fcdp_fingerprints *fingerprints);
/* One launch behind what is on `stream` now, for n arrays: bytes[i] bytes at the device's address arrays[i],
 * of any alignment (one that is not of 16 is read byte by byte, several times slower). They are not written
 * or freed before the end. */
fcdp_status fcdp__fingerprints_begin(fcdp_fingerprints *fingerprints, const uint64_t *arrays,
                                     const size_t *bytes, size_t n, fcdp_stream stream) FCDP_MUST_CHECK;
/* The host waits, asleep; fingerprints_out[i] of array i. After a failure nothing is begun, unless the device
 * is no more. */
fcdp_status fcdp__fingerprints_end(fcdp_fingerprints *fingerprints,
                                   uint64_t *fingerprints_out) FCDP_MUST_CHECK;

/* All of it in one call: an fcdp_read_fn (alloc/heap.h), of which `driver` is the fcdp_driver. It makes what
 * it needs, and waits. */
fcdp_status fcdp_fingerprints_of(void *driver, const uint64_t *arrays, const size_t *bytes, size_t n,
                                 uint64_t *fingerprints_out) FCDP_MUST_CHECK;

/* ---- where both ends are this host ---- */

/* XXH3 of bytes that the host can read. `before`: of the piece that these follow; 0: they are the first. */
uint64_t fcdp__fingerprint_by_host(const void *bytes, size_t n_bytes, uint64_t before);

#endif
