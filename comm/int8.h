/* int8.h - floating point numbers in a byte each, with a scale for FCDP_INT8_BLOCK of them: rounded.
 *
 * As ZeRO++ quantises weights that are gathered (qwZ, arXiv:2306.10209). What is decoded depends on the wire
 * alone, to the last bit on every machine, so all ranks that decode the same wire have the same numbers.
 * Pure functions, for any thread, without allocations.
 *
 * The wire. The array is cut into blocks of FCDP_INT8_BLOCK numbers; the last one may be shorter. All is
 * little endian.
 *
 *     f32 scale[n_blocks]       the block's largest magnitude / 127; of a block of zeroes 0
 *     then of each block        a byte for each number: number / scale, rounded to the nearest integer
 *     scale = all bits set      the block goes as it is: it has a number that is not finite, or so large or
 *                               small that float32 has no scale for it
 *
 * Odd bytes at the end, and arrays that are none of these numbers, go as they are.
 */
#ifndef FCDP_INT8_H
#define FCDP_INT8_H

#include "base/base.h"

enum { FCDP_INT8_BLOCK = 256 }; /* numbers */

typedef enum fcdp_number {
    FCDP_NUMBER_OTHER, /* not one of the others: goes as it is */
    FCDP_NUMBER_BF16,
    FCDP_NUMBER_F16,
    FCDP_NUMBER_F32,
    FCDP_N_NUMBERS
} fcdp_number;

/* What rounding has taken: sums of squares, of what was lost and of what there was. */
typedef struct fcdp_rounding {
    double lost, whole;
} fcdp_rounding;

/* Bytes of wire that suffice for any `bytes` bytes. */
size_t fcdp__int8_bound(size_t bytes, fcdp_number number);
/* Returns the wire's bytes, at most fcdp__int8_bound. The arrays may begin anywhere and do not overlap.
 * *rounding grows by what this has taken; NULL: it is not measured. */
size_t fcdp__int8_encode(const void *from, size_t bytes, fcdp_number number, void *wire_out,
                         fcdp_rounding *rounding);
/* FCDP_ERR_INVALID: the wire is not one of so many bytes; nothing beyond the arguments is read or written,
 * whatever the wire has, and `out` is undefined. They do not overlap. */
fcdp_status fcdp__int8_decode(void *out, size_t bytes, fcdp_number number, const void *wire,
                              size_t wire_bytes) FCDP_MUST_CHECK;

#endif
