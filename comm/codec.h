/* codec.h - what changed in an array of floating point numbers, in fewer bytes than the array, exactly.
 *
 * An optimizer's step moves most weights by a few units in the last place, or not at all. Where the bytes
 * from before the step are known, the new ones follow from the differences: the wire, as it is called here.
 * Encoder and decoder are pure functions of their arguments, for any thread, without allocations; they need
 * 60 KiB of stack. The wire has no checksum: a caller that cannot trust the base compares fingerprints
 * (comm/fingerprint.h). The wire's bytes are the same on every machine.
 *
 * The wire. The array is cut into blocks of FCDP_DELTA_BLOCK values; the last one may be shorter.
 *
 *     u16 payload_bytes[n_blocks]     little endian, as all here; then the payloads, one behind the other
 *
 *     payload_bytes = 0               the block is unchanged
 *     payload_bytes = the block's     the block as it is
 *     payload_bytes < the block's     coded, see below; more is malformed
 *
 * A payload depends on its own block alone, and the table says where it begins: blocks are coded in parallel.
 *
 * A coded block. The bits of a value, read as sign and magnitude, become an integer o in the order of the
 * numbers; d = now.o - base.o; z is d zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ... The block is padded
 * with zeroes to whole words of 64 values. "Plane j" is the bits j of all z; "over j" is those bits that say
 * z >= 2^j. "A among B" is the bits of A where B has ones, side by side.
 *
 *     u16 header                  k | top << 5 | escapes << 10 | depth << 11
 *     planes 0 .. k-1             whole, but each 8 of them as bytes of the z, which come first
 *     over k                      as a tree of `depth` levels (0: as it is). A node is set if one of its two
 *                                 children is. The topmost level whole; then of each level downwards, word by
 *                                 word, the left children among the nodes, and the right children among the
 *                                 left ones: a set node whose left child is not set has a right one
 *     over j, j = k+1 .. top      among over j-1
 *     plane j, j = k .. top-1     among over j+1, without the escaped
 *     z >> k of the escaped       only if `escapes`: all z >= 2^top, in the width of a value less k bits
 *
 * So a value takes k bits and the Elias gamma code of what is above these, which suits the long tail of such
 * differences; `top` bounds it for weights that cross zero, which move far. The tree is for arrays of which
 * little changed. All of it is popcounts, and bits moved to where masks have ones: a GPU can do that block by
 * block at the speed of its memory.
 */
#ifndef FCDP_CODEC_H
#define FCDP_CODEC_H

#include "base/base.h"

enum { FCDP_DELTA_BLOCK = 2048 }; /* values */

/* Bytes of wire that suffice for any `bytes` bytes. */
size_t fcdp__delta_bound(size_t bytes);

/* Returns the wire's bytes, at most `capacity`. 0: it would take more, and `wire_out` has nothing of use; or
 * `bytes` is 0, whose wire is empty. The arrays may begin anywhere, and wire_out overlaps none of them.
 * element_bytes: 2 or 4 for floating point numbers of that size; integers are coded too, only less well. Of
 * any other width, a block is unchanged or goes as it is. Odd bytes at the end are one more value. */
size_t fcdp__delta_encode(const void *base, const void *now, size_t bytes, unsigned element_bytes,
                          void *wire_out, size_t capacity);

/* One block's payload, of at most `bytes`, as many as the block has; returns its bytes. */
size_t fcdp__delta_block_encode(const void *base, const void *now, size_t bytes, unsigned element_bytes,
                                void *payload_out);

/* Makes `out` what `now` was, of the same base. `out` may be `base` itself, and otherwise overlaps neither
 * argument. FCDP_ERR_INVALID: the wire is not one of so many bytes; nothing beyond the arguments is read or
 * written, whatever the wire has, and `out` is undefined. */
fcdp_status fcdp__delta_decode(const void *base, void *out, size_t bytes, unsigned element_bytes,
                               const void *wire, size_t wire_bytes) FCDP_MUST_CHECK;

/* Of the bytes from `begin` until `end` alone, each a multiple of FCDP_DELTA_BLOCK values (of 4096 bytes, if
 * element_bytes is neither 2 nor 4) or the array's end: for threads side by side. If all ranges of an array
 * are FCDP_OK, so is the whole. */
fcdp_status fcdp__delta_decode_range(const void *base, void *out, size_t bytes, unsigned element_bytes,
                                     const void *wire, size_t wire_bytes, size_t begin,
                                     size_t end) FCDP_MUST_CHECK;

/* For tests and benchmarks: true: the C code for any processor, also where there is a faster one. */
extern bool fcdp__delta_portable;

#endif
