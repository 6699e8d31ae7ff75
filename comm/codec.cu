/* codec.cu - the encoder of exact differences (comm/codec.h) on a GPU. codec.ptx beside it is what is
 * shipped: the driver compiles it for the device that it finds. tools/ptx/compile_ptx.py makes it anew, and
 * tests/comm/test_ptx.py runs it against codec.c, whose payloads it makes byte for byte.
 *
 * A CUDA block takes a task, and each of its warps a block of FCDP_DELTA_BLOCK values at a time, on its own:
 * a lane holds a word of 64 values, and masks of them are 64 bits in its registers. Of 4 bytes a value, only
 * two warps work, as only they have shared memory. The steps are codec.c's:
 *
 *     difference   now, base -> z in shared memory, in rows of 64 values; 16 bytes at a time if both lie so
 *     rows         a lane's row -> its bytes, so that 8 values transposed are 8 planes
 *     planes       a byte of the values at a time, from the highest; the lanes' counts added up
 *     choose       a lane for each `top`
 *     write        bits under a mask side by side; the lanes' counts say where each begins; OR to shared
 *                  memory, whole, then 16 bytes at a time to the slot
 *
 * Bytes of both arrays are read once, but those of `now` twice where a block goes as it is. `slots` is at a
 * multiple of 16, and nothing is written behind a payload's last byte.
 */
typedef unsigned char byte;
typedef unsigned short half_word;
typedef unsigned int word;
typedef unsigned long long mask;

struct task { /* fcdp_delta_task */
    mask now, now_bytes, base, base_bytes, slots, slots_bytes, element_bytes, done;
};

enum {
    N_THREADS = 128,
    N_WARPS = N_THREADS / 32,
    BLOCK_VALUES = 2048,
    WORD_VALUES = 64,
    TASK_BLOCKS = 16,
    MAX_DEPTH = 11,
    SPARSE = 3,
    PLANES_BYTES = 2 * BLOCK_VALUES, /* of 2 bytes a value, and twice that of 4 */
    OUT_BYTES = 16,                  /* beyond a payload that is less than the block */
    WARP_BYTES = 2 * PLANES_BYTES + OUT_BYTES,
    OUT_BITS = 14 * 8, /* a payload begins there in shared memory: what follows its header is at 16 bytes */
    TREE_WORDS = 69,
    UNROLLED = 4,
    FEW = 10, /* bits of a mask: below, one at a time is faster than all by steps */
};
#define ALL 0xffffffffu
#define EVEN 0x55555555u

/* A warp's part of the shared memory. Of the z of 64 values, `rows` has a row of 16-byte pieces, and the lane
 * w moves those of row w about: all lanes then read a piece of their own at once. Later it is the payload.
 * `planes` has 32-bit words, of which the lane w has every 32nd: of the byte b of half h of its row, 8. Their
 * bytes c are values 8 c + r, r = 0 .. 7; transposed: planes 8 b + r. */
struct warp {
    word *rows, *planes;
    half_word *n_over; /* [33]: values that are 2^j or more */
    mask *tree;
    unsigned lane, wide, bits; /* of a value: 16, wide 0; or 32, wide 1 */
};

#define DEVICE static __device__ __forceinline__

/* ---- a warp ---- */

DEVICE unsigned warp_sum(unsigned x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(ALL, x, by);
    return x;
}

DEVICE word warp_or(word x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x |= __shfl_xor_sync(ALL, x, by);
    return x;
}

DEVICE unsigned warp_least(unsigned x) {
#pragma unroll
    for (int by = 16; by; by /= 2) {
        unsigned other = __shfl_xor_sync(ALL, x, by);
        x = other < x ? other : x;
    }
    return x;
}

/* The sum of x of the lanes before this one. */
DEVICE unsigned before(unsigned x, unsigned lane) {
    unsigned sum = x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        unsigned other = __shfl_up_sync(ALL, sum, by);
        sum += lane >= by ? other : 0;
    }
    return sum - x;
}

/* ---- bits ---- */

/* The bytes of b above those of a, chosen by the digits of `how`; 8 more: its sign in all bits. */
DEVICE word permuted(word a, word b, word how) {
    word c;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(how));
    return c;
}

DEVICE mask joined(word low, word high) {
    return low | (mask)high << 32;
}

DEVICE mask below(unsigned n) { /* n < 64 */
    return ((mask)1 << n) - 1;
}

/* The bits of x at even positions, in the lower half. */
DEVICE word evens(word x) {
    x &= EVEN;
    x = (x | x >> 1) & 0x33333333;
    x = (x | x >> 2) & 0x0f0f0f0f;
    x = (x | x >> 4) & 0x00ff00ff;
    return (x | x >> 8) & 0xffff;
}

DEVICE word evens_of(mask x) {
    return evens((word)x) | evens((word)(x >> 32)) << 16;
}

/* Of 4 bytes: which are not 0, in their lowest bits. */
DEVICE word nonzero(word x) {
    return (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) >> 7 & 0x01010101;
}

/* The bits of x and y where m has ones, side by side.
 * Hacker's Delight, 7-4: a bit moves by as many places as there are zeroes below it, by 1, 2, 4, 8, 16. */
DEVICE void extract_by_steps(word m, word *x, word *y) {
    word zeroes = ~m << 1;
    *x &= m;
    *y &= m;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        word odd = zeroes ^ zeroes << 1; /* where the number of zeroes below is odd */
        odd ^= odd << 2;
        odd ^= odd << 4;
        odd ^= odd << 8;
        odd ^= odd << 16;
        const word moved = odd & m, moved_x = moved & *x, moved_y = moved & *y;
        m = (m ^ moved) | moved >> by;
        *x = (*x ^ moved_x) | moved_x >> by;
        *y = (*y ^ moved_y) | moved_y >> by;
        zeroes &= ~odd;
    }
}

/* The bits of x and y among those of m. One by one where no lane has many. */
DEVICE void extract(mask m, mask *x, mask *y) {
    word ms[2] = {(word)m, (word)(m >> 32)};
    word xs[2] = {(word)*x, (word)(*x >> 32)}, ys[2] = {(word)*y, (word)(*y >> 32)};
    const unsigned n = __popc(ms[0]), n_high = __popc(ms[1]);
    if (__any_sync(ALL, n > FEW || n_high > FEW)) {
        extract_by_steps(ms[0], &xs[0], &ys[0]);
        if (__any_sync(ALL, n_high))
            extract_by_steps(ms[1], &xs[1], &ys[1]);
        else
            xs[1] = ys[1] = 0;
    } else {
        word to = 1, to_x[2] = {0}, to_y[2] = {0};
#pragma unroll 1
        for (; ms[0] | ms[1]; to <<= 1)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const word lowest = ms[h] & -ms[h];
                if (xs[h] & lowest) to_x[h] |= to;
                if (ys[h] & lowest) to_y[h] |= to;
                ms[h] ^= lowest;
            }
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; h++) xs[h] = to_x[h], ys[h] = to_y[h];
    }
    *x = xs[0] | (mask)xs[1] << n;
    *y = ys[0] | (mask)ys[1] << n;
}

/* To the bits at `at` and behind it, which are 0 or another lane's. */
DEVICE void put(word *to, unsigned at, mask bits) {
    const unsigned by = at % 32;
    const word low = (word)bits, high = (word)(bits >> 32);
    const word each[3] = {low << by, __funnelshift_l(low, high, by), __funnelshift_l(high, 0, by)};
#pragma unroll
    for (int i = 0; i < 3; i++)
        if (each[i]) atomicOr(&to[at / 32 + i], each[i]);
}

/* Rows `BY` apart change fields of so many bits, of which `low` has the lower ones. */
template <int BY> DEVICE void fields_swap(word rows[8], word low) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = i / BY * 2 * BY + i % BY;
        const word a = rows[r], b = rows[r + BY];
        rows[r] = (a & low) | (b << BY & ~low);
        rows[r + BY] = (a >> BY & low) | (b & ~low);
    }
}

/* 8 rows of 4 matrices of 8 x 8 bits, a byte of each: transposed. */
DEVICE void bits_transpose(word rows[8]) {
    fields_swap<4>(rows, 0x0f0f0f0f);
    fields_swap<2>(rows, 0x33333333);
    fields_swap<1>(rows, 0x55555555);
}

/* 4 x 4 bytes: transposed. */
DEVICE void bytes_transpose(const word x[4], word y_out[4]) {
    const word a = permuted(x[0], x[1], 0x5140), b = permuted(x[2], x[3], 0x5140);
    const word c = permuted(x[0], x[1], 0x7362), d = permuted(x[2], x[3], 0x7362);
    y_out[0] = permuted(a, b, 0x5410);
    y_out[1] = permuted(a, b, 0x7632);
    y_out[2] = permuted(c, d, 0x5410);
    y_out[3] = permuted(c, d, 0x7632);
}

/* ---- differences ---- */

/* z of the values in a word: of one, or of two. Sign and magnitude to an integer in the order of the numbers;
 * the difference; zigzag. */
template <int BITS> DEVICE word difference(word now, word base) {
    if (BITS == 32) {
        now ^= (word)((int)now >> 31) & 0x7fffffff;
        base ^= (word)((int)base >> 31) & 0x7fffffff;
        now -= base;
        return now << 1 ^ (word)((int)now >> 31);
    }
    now ^= permuted(now, 0, 0xbb99) & 0x7fff7fff;
    base ^= permuted(base, 0, 0xbb99) & 0x7fff7fff;
    const word d = ((now | 0x80008000) - (base & 0x7fff7fff)) ^ ((now ^ ~base) & 0x80008000);
    return (d << 1 & 0xfffefffe) ^ permuted(d, 0, 0xbb99);
}

/* 4 bytes of an array of so many, at `at` of it: 0 behind its end. */
template <int BITS> DEVICE word word_at(mask array, unsigned at, unsigned bytes) {
    word value = 0;
    unsigned i = 0;
#pragma unroll
    for (; i < 4 && at + i + BITS / 8 <= bytes; i += BITS / 8)
        value |= BITS == 32 ? __ldg((const word *)(array + at))
                            : (word)__ldg((const half_word *)(array + at + i)) << 8 * i;
#pragma unroll 1
    for (; i < 4 && at + i < bytes; i++) value |= (word)__ldg((const byte *)(array + at + i)) << 8 * i;
    return value;
}

/* Where the 16-byte piece i of the block is in `rows`. */
DEVICE unsigned piece_at(unsigned i, unsigned wide) {
    return i ^ (i >> (3 + wide) & 7);
}

/* z of all values; returns the OR of them, of all lanes. */
template <int BITS> DEVICE word differences(const struct warp *w, mask now, mask base, unsigned bytes) {
    enum { N = BLOCK_VALUES * BITS / 8 / 16 };
    uint4 *rows = (uint4 *)w->rows;
    word any = 0;
    if ((now | base) % 16 == 0 && bytes == 16 * N) {
        const uint4 *nows = (const uint4 *)now, *bases = (const uint4 *)base;
#pragma unroll 1
        for (unsigned i = w->lane; i < N; i += 32 * UNROLLED) {
            uint4 a[UNROLLED], b[UNROLLED];
#pragma unroll
            for (int k = 0; k < UNROLLED; k++)
                a[k] = __ldg(&nows[i + 32 * k]), b[k] = __ldg(&bases[i + 32 * k]);
#pragma unroll
            for (int k = 0; k < UNROLLED; k++) {
                uint4 z = {difference<BITS>(a[k].x, b[k].x), difference<BITS>(a[k].y, b[k].y),
                           difference<BITS>(a[k].z, b[k].z), difference<BITS>(a[k].w, b[k].w)};
                any |= z.x | z.y | z.z | z.w;
                rows[piece_at(i + 32 * k, BITS / 32)] = z;
            }
        }
    } else {
#pragma unroll 1
        for (unsigned i = w->lane; i < 4 * N; i += 32) {
            word z = difference<BITS>(word_at<BITS>(now, 4 * i, bytes), word_at<BITS>(base, 4 * i, bytes));
            any |= z;
            w->rows[4 * piece_at(i / 4, BITS / 32) + i % 4] = z;
        }
    }
    if (BITS == 16) any = (any | any >> 16) & 0xffff;
    return warp_or(any);
}

/* ---- rows, planes ---- */

DEVICE unsigned plane_word(unsigned byte_at, unsigned half, unsigned r) {
    return ((byte_at * 2 + half) * 8 + r) * 32;
}

DEVICE mask plane(const struct warp *w, unsigned j) {
    const word *low = &w->planes[plane_word(j / 8, 0, j % 8) + w->lane];
    return joined(low[0], low[8 * 32]);
}

/* `rows` to the bytes of `planes`. over_out[b]: the values with a bit in byte b or above, b < n_bytes.
 * `halves`: only the first 32 values of each row are not 0. */
template <int BITS>
DEVICE void rows_read(const struct warp *w, unsigned n_bytes, bool halves, mask over_out[4]) {
    enum { N_BYTES = BITS / 8, N_GROUPS = N_BYTES / 2 };
    const uint4 *row = (const uint4 *)w->rows + w->lane * (BITS / 2);
    word *planes = w->planes + w->lane;
    word over[2][N_BYTES] = {{0}};
#pragma unroll
    for (unsigned h = 0; h < 2; h++) {
        if (h && halves) break;
#pragma unroll
        for (unsigned g = 0; g < N_GROUPS; g++) {
            uint4 piece[4];
#pragma unroll
            for (unsigned c = 0; c < 4; c++)
                piece[c] = row[(h * 4 * N_GROUPS + c * N_GROUPS + g) ^ (w->lane & 7)];
#pragma unroll
            for (unsigned q = 0; q < 4; q++) {
                word x[4], y[4];
#pragma unroll
                for (unsigned c = 0; c < 4; c++)
                    x[c] = q == 0 ? piece[c].x : q == 1 ? piece[c].y : q == 2 ? piece[c].z : piece[c].w;
                bytes_transpose(x, y);
#pragma unroll
                for (unsigned i = 0; i < 4 / N_BYTES; i++) { /* the values of a word */
                    const unsigned r = BITS == 32 ? 4 * g + q : 2 * q + i;
                    word above = 0;
#pragma unroll
                    for (int b = N_BYTES - 1; b >= 0; b--) {
                        planes[plane_word(b, h, r)] = y[N_BYTES * i + b];
                        above |= y[N_BYTES * i + b];
                        if (b == 0 || b < n_bytes) over[h][b] |= nonzero(above) << r;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int b = 0; b < 4; b++)
        over_out[b] = b < N_BYTES ? joined(over[0][b % N_BYTES], over[1][b % N_BYTES]) : 0;
}

/* 8 words of a byte of half a row, transposed or not. */
DEVICE void byte_read(const struct warp *w, unsigned byte_at, unsigned h, word x_out[8]) {
#pragma unroll
    for (int r = 0; r < 8; r++) x_out[r] = w->planes[plane_word(byte_at, h, r) + w->lane];
}

/* Makes the planes of a byte, and counts them upon `over`. */
DEVICE mask byte_split(const struct warp *w, unsigned byte_at, bool halves, mask over) {
    word x[2][8] = {{0}}, sums[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!h || !halves) {
            byte_read(w, byte_at, h, x[h]);
            bits_transpose(x[h]);
        }
#pragma unroll
        for (int r = 0; r < 8; r++) w->planes[plane_word(byte_at, h, r) + w->lane] = x[h][r];
    }
#pragma unroll
    for (int r = 7; r >= 0; r--) {
        over |= joined(x[0][r], x[1][r]);
        const word n = __popcll(over);
        sums[r / 2] = r % 2 ? n << 16 : sums[r / 2] | n;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = warp_sum(sums[i]);
    if (w->lane == 0) *(uint4 *)&w->n_over[8 * byte_at] = make_uint4(sums[0], sums[1], sums[2], sums[3]);
    __syncwarp();
    return over;
}

/* The bytes `lowest` and above of z of value i of the lane's row; those below n_planes / 8 are transposed. */
DEVICE word value_read(const struct warp *w, unsigned i, unsigned lowest, unsigned n_planes) {
    word z = 0;
#pragma unroll 1
    for (int b = w->bits / 8 - 1; b >= (int)lowest; b--) {
        const word *at = &w->planes[plane_word(b, i / 32, 0) + w->lane];
        if (8 * b >= n_planes) {
            z = z << 8 | (at[i % 8 * 32] >> (i % 32 & 24) & 0xff);
            continue;
        }
#pragma unroll
        for (int r = 7; r >= 0; r--) z = z << 1 | (at[r * 32] >> i % 32 & 1);
    }
    return z;
}

/* ---- trees ---- */

/* Level l has a bit for 2^l values; where it begins among the words. */
DEVICE unsigned level_at(unsigned level) {
    return level <= 5 ? 64 - (64 >> level) : 57 + level;
}

DEVICE unsigned nodes_of(unsigned n_words, unsigned level) {
    return (n_words * WORD_VALUES + (1u << level) - 1) >> level;
}

/* The tree upon `leaves`; returns the depth that takes the fewest bits, and these. */
DEVICE unsigned tree_grow(const struct warp *w, mask leaves, unsigned n_words, unsigned n_set,
                          unsigned *bits_out) {
    unsigned best = 0, n_nodes = n_words * WORD_VALUES, best_bits = n_nodes, bits_below = 0;
    w->tree[w->lane] = leaves;
    if (n_set * 2 < n_nodes)
#pragma unroll 1
        for (unsigned level = 1; level <= MAX_DEPTH && n_nodes > 1; level++) {
            const word either = evens_of(leaves | leaves >> 1);
            const unsigned left = __popcll(leaves & (EVEN | (mask)EVEN << 32));
            const word low = __shfl_sync(ALL, either, 2 * w->lane & 31);
            const word high = __shfl_sync(ALL, either, (2 * w->lane + 1) & 31);
            leaves = w->lane < 16 ? joined(low, high) : 0;
            if (w->lane < (level < 5 ? 32 >> level : 1)) w->tree[level_at(level) + w->lane] = leaves;
            n_nodes = (n_nodes + 1) / 2;
            const unsigned sums = warp_sum(__popcll(leaves) | left << 16);
            bits_below += (sums & 0xffff) + (sums >> 16);
            if (n_nodes + bits_below < best_bits) {
                best_bits = n_nodes + bits_below;
                best = level;
            } else if (bits_below >= best_bits)
                break;
        }
    __syncwarp();
    *bits_out = best_bits;
    return best;
}

/* Levels 11 .. 7, of a word each; then a lane for each word of the levels 6 .. 1, in the wire's order. */
DEVICE void tree_put(const struct warp *w, unsigned at, unsigned n_words, unsigned depth) {
    const unsigned n_nodes = nodes_of(n_words, depth);
    if (w->lane * WORD_VALUES < n_nodes)
        put(w->rows, at + w->lane * WORD_VALUES, w->tree[level_at(depth) + w->lane]);
    at += n_nodes;
#pragma unroll 1
    for (bool high = depth > 6; depth; high = false) {
        const unsigned up = 31 - __clz(w->lane), level = high ? MAX_DEPTH - w->lane : w->lane ? 5 - up : 6;
        const unsigned i = high || !w->lane ? 0 : w->lane - (1u << up);
        mask nodes = 0, a = 0, b = 0;
        if (high ? w->lane < 5 && level <= depth : level <= depth) {
            const mask *children = w->tree + level_at(level - 1) + 2 * i;
            nodes = w->tree[level_at(level) + i];
            a = children[0];
            b = level < 6 ? children[1] : 0;
        }
        const mask lefts = joined(evens_of(a), evens_of(b));
        mask left = lefts, right = joined(evens_of(a >> 1), evens_of(b >> 1)), none = 0;
        const unsigned n = __popcll(nodes), n_left = __popcll(lefts), mine = at + before(n + n_left, w->lane);
        extract(nodes, &left, &none);
        put(w->rows, mine, left);
        none = 0;
        extract(lefts, &right, &none);
        put(w->rows, mine + n, right);
        at += __shfl_sync(ALL, mine + n + n_left - at, 31);
        if (!high) break;
    }
}

/* ---- a block ---- */

struct choice {
    unsigned k, top, depth, bits;
    bool escapes;
    unsigned n_over, sum; /* lane j: values over j, and over k .. j-1 */
};

/* The cheapest `top` for this k, as codec.c's choose_top: lane j has the cost of j. */
DEVICE struct choice choose_top(const struct warp *w, unsigned k, unsigned n_planes) {
    const unsigned j = w->lane, n = j <= n_planes ? w->n_over[j] : 0;
    const unsigned next = j + 1 <= n_planes ? w->n_over[j + 1] : 0;
    const unsigned sum = before(j >= k ? n : 0, j), n_k = __shfl_sync(ALL, n, k & 31);
    const unsigned rest = j > k ? sum - n_k : 0;
    const unsigned escaped = sum + rest - (j > k ? j - 1 - k : 0) * n + (w->bits - k) * n;
    const unsigned all = sum + rest + (j > k ? n : 0); /* where none is over the next */
    const unsigned least = warp_least(j >= k && n ? escaped << 5 | j : ALL);
    const unsigned ends = __ballot_sync(ALL, j >= k && n && j < n_planes && !next);
    struct choice c = {k, least & 31, 0, least >> 5, true, n, sum};
    if (ends) {
        const unsigned last = 31 - __clz(ends), bits = __shfl_sync(ALL, all, last);
        if (bits <= c.bits) c.top = last, c.bits = bits, c.escapes = false;
    }
    return c;
}

/* The bytes 0 .. k/8-1 as they are; the lowest of the transposed ones is `made`. */
DEVICE void low_put(const struct warp *w, unsigned k, unsigned made, unsigned n_words) {
    if (w->lane >= n_words) return;
#pragma unroll 1
    for (unsigned b = 0; b < k / 8; b++)
#pragma unroll
        for (unsigned h = 0; h < 2; h++) {
            word x[8], low[4], high[4];
            byte_read(w, b, h, x);
            if (b >= made) bits_transpose(x);
            bytes_transpose(x, low);
            bytes_transpose(x + 4, high);
            uint4 *to = (uint4 *)w->rows + 1 + (b * n_words + w->lane) * 4 + h * 2;
            to[0] = make_uint4(low[0], high[0], low[1], high[1]);
            to[1] = make_uint4(low[2], high[2], low[3], high[3]);
        }
}

/* Behind `over k`; all of it begins at `at`. */
DEVICE void planes_put(const struct warp *w, const struct choice *c, unsigned at, unsigned n_planes,
                       mask over) {
    const unsigned k = c->k, top = c->top, n_k = __shfl_sync(ALL, c->n_over, k & 31);
    const unsigned planes_at = at + __shfl_sync(ALL, c->sum, top), n_top = __shfl_sync(ALL, c->n_over, top);
    const unsigned n_escaped = c->escapes ? n_top : 0;
#pragma unroll 1
    for (unsigned j = n_planes; j > top; j--) over |= plane(w, j - 1);
    const mask escaped = c->escapes ? over : 0;
    const unsigned escaped_before = n_escaped ? before(__popcll(escaped), w->lane) : 0;
    mask next = 0;
#pragma unroll 1
    for (int i = top; i >= (int)k; i--) { /* what is among over i */
        if (i < top) next = over, over |= plane(w, i);
        const bool marks = i<top, bits = i> k && i + c->escapes <= top;
        if (!marks && !bits) continue;
        const unsigned sum = __shfl_sync(ALL, c->sum, i);
        const unsigned first = before(__popcll(over), w->lane);
        mask mark = next, bit = bits ? plane(w, i - 1) : 0;
        extract(over, &mark, &bit);
        if (marks) put(w->rows, at + sum + first, mark);
        if (!bits) continue;
        if (n_escaped) {
#pragma unroll 1
            for (mask left = escaped; left;) { /* out, from the highest */
                const unsigned b = 63 - __clzll(left), position = __popcll(over & below(b));
                bit = (bit & below(position)) | (bit >> 1 & ~below(position));
                left ^= (mask)1 << b;
            }
            __syncwarp();
        }
        /* behind those of k .. i-2, which are among over k+1 .. i-1 */
        put(w->rows, planes_at + sum - n_k - (i - 1 - k) * n_escaped + first - escaped_before, bit);
    }
    if (!n_escaped) return;
    unsigned to = at + __shfl_sync(ALL, c->sum, top);
    if (top > k) to += __shfl_sync(ALL, c->sum, top) - n_k - (top - 1 - k) * n_escaped;
    to += escaped_before * (w->bits - k);
#pragma unroll 1
    for (mask left = escaped; left; left &= left - 1, to += w->bits - k)
        put(w->rows, to, value_read(w, __ffsll(left) - 1, k / 8, n_planes) >> k % 8);
    __syncwarp();
}

/* The bytes of `rows` that are written or shared, of `bytes` bytes of payload. */
DEVICE void out_clear(const struct warp *w, unsigned bytes) {
    __syncwarp();
#pragma unroll 1
    for (unsigned i = w->lane; 16 * i < OUT_BITS / 8 + bytes; i += 32)
        ((uint4 *)w->rows)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
}

/* Of a block with few changes: `rows` of those alone, side by side, 32 in each row. */
DEVICE void rows_pack(const struct warp *w, mask changed) {
    const unsigned value_bytes = w->bits / 8;
    out_clear(w, BLOCK_VALUES * value_bytes - OUT_BITS / 8);
    unsigned i = before(__popcll(changed), w->lane);
#pragma unroll 1
    for (mask left = changed; left; left &= left - 1, i++) {
        const word z = value_read(w, __ffsll(left) - 1, 0, 0);
        const unsigned first = (i + (i & ~31)) * value_bytes;
        byte *at = (byte *)w->rows + 16 * piece_at(first / 16, w->wide) + first % 16;
        if (w->bits == 16)
            *(half_word *)at = (half_word)z;
        else
            *(word *)at = z;
    }
    __syncwarp();
}

/* A payload of at most `bytes`, which means: as it is. `rows` has it then. */
DEVICE unsigned block_encode(const struct warp *w, mask now, mask base, unsigned bytes) {
    const unsigned n_words = (((bytes + 1 + 2 * w->wide) >> (1 + w->wide)) + WORD_VALUES - 1) / WORD_VALUES;
    const word any = w->bits == 32 ? differences<32>(w, now, base, bytes)
                                   : differences<16>(w, now, base, bytes);
    if (!any) return 0;
    __syncwarp();

    unsigned n_planes = 32 - __clz(any), n_plane_words = n_words;
    mask over_bytes[4], changed;
    bool sparse = false;
#pragma unroll 1
    for (;;) {
        if (w->bits == 32)
            rows_read<32>(w, (n_planes + 7) / 8, sparse, over_bytes);
        else
            rows_read<16>(w, (n_planes + 7) / 8, sparse, over_bytes);
        if (sparse) break;
        changed = over_bytes[0];
        const unsigned n_changed = warp_sum(__popcll(changed));
        sparse = n_changed * SPARSE < n_words * WORD_VALUES;
        if (!sparse) break;
        rows_pack(w, changed);
        n_plane_words = (n_changed + WORD_VALUES - 1) / WORD_VALUES;
    }

    /* planes_make of codec.c */
    const unsigned n_values = n_plane_words * WORD_VALUES;
    mask highest = 0;
    if (w->lane == 0) w->n_over[n_planes] = 0;
    bool ends = false;
#pragma unroll
    for (int b = 3; b > 0; b--) {
        if (8 * b >= n_planes || ends) continue;
        const unsigned n = warp_sum(__popcll(over_bytes[b]));
        ends = n * w->bits > n_values;
        if (ends) continue;
        n_planes = 8 * b;
        highest = over_bytes[b];
        if (w->lane == 0) w->n_over[n_planes] = n;
    }
    __syncwarp();
    unsigned k = 0, made = (n_planes + 7) / 8;
    mask over = highest;
#pragma unroll 1
    while (made > 0) {
        made--;
        over = byte_split(w, made, sparse, over);
        const unsigned j = w->lane;
        const bool pays = j > 8 * made && j <= n_planes && w->n_over[j - 1] + w->n_over[j] > n_values;
        const word at = __ballot_sync(ALL, pays && !sparse);
        if (!at) continue;
        k = 31 - __clz(at);
        break;
    }

    struct choice c = choose_top(w, k, n_planes);
    over = highest;
#pragma unroll 1
    for (unsigned j = n_planes; j > k; j--) over |= plane(w, j - 1);
    unsigned tree_bits;
    c.depth = tree_grow(w, sparse ? changed : over, n_words, __shfl_sync(ALL, c.n_over, k & 31), &tree_bits);
    const unsigned whole_bits = n_words * WORD_VALUES * k;
    const unsigned payload = (16 + whole_bits + tree_bits + c.bits + 7) / 8;
    if (payload >= bytes) return bytes;

    out_clear(w, payload);
    if (w->lane == 0) w->rows[3] = (k | c.top << 5 | (unsigned)c.escapes << 10 | c.depth << 11) << 16;
    low_put(w, k, made, n_words);
#pragma unroll 1
    for (unsigned j = k / 8 * 8; j < k; j++)
        if (w->lane < n_words) ((mask *)w->rows)[2 + j * n_words + w->lane] = plane(w, j);
    __syncwarp();
    const unsigned tree_at = OUT_BITS + 16 + whole_bits;
    tree_put(w, tree_at, n_words, c.depth);
    planes_put(w, &c, tree_at + tree_bits, n_planes, highest);
    __syncwarp();
    return payload;
}

/* ---- a task ---- */

/* The payload in `rows`, or `now` as it is, to the slot. */
DEVICE void slot_write(const struct warp *w, mask now, unsigned bytes, mask slot, unsigned payload) {
    uint4 *pieces = (uint4 *)slot;
    const word *from = w->rows + 3; /* and 2 bytes */
    if (payload < bytes) {
#pragma unroll 1
        for (unsigned i = w->lane; i < payload / 16; i += 32) {
            const word first = from[4 * i];
            const uint4 x = *(const uint4 *)(from + 4 * i + 1);
            pieces[i] = make_uint4(__funnelshift_r(first, x.x, 16), __funnelshift_r(x.x, x.y, 16),
                                   __funnelshift_r(x.y, x.z, 16), __funnelshift_r(x.z, x.w, 16));
        }
        const unsigned i = payload / 16 * 16 + w->lane;
        if (i < payload) ((byte *)slot)[i] = ((const byte *)from)[2 + i];
        return;
    }
    if (now % 16 == 0) {
#pragma unroll 1
        for (unsigned i = w->lane; i < bytes / 16; i += 32) pieces[i] = __ldg((const uint4 *)now + i);
    } else {
#pragma unroll 1
        for (unsigned i = w->lane; i < bytes / 4; i += 32) ((word *)slot)[i] = word_at<16>(now, 4 * i, bytes);
    }
    const unsigned n_written = now % 16 == 0 ? bytes / 16 * 16 : bytes / 4 * 4, i = n_written + w->lane;
    if (i < bytes) ((byte *)slot)[i] = __ldg((const byte *)now + i);
}

DEVICE void blocks_encode(const struct warp *w, unsigned warp, const mask *task, half_word *sizes) {
    const unsigned block_bytes = BLOCK_VALUES * w->bits / 8, step = N_WARPS >> w->wide;
    const mask now = task[0], base = task[2], slots = task[4];
    const unsigned bytes = (unsigned)task[1], n_blocks = (bytes + block_bytes - 1) >> (12 + w->wide);
    if (warp >= step) return;
#pragma unroll 1
    for (unsigned i = warp; i < n_blocks; i += step) {
        const unsigned at = i * block_bytes, here = bytes - at < block_bytes ? bytes - at : block_bytes;
        const unsigned payload = block_encode(w, now + at, base + at, here);
        if (payload) slot_write(w, now + at, here, slots + 2 * TASK_BLOCKS + at, payload);
        if (w->lane == 0) sizes[i] = (half_word)payload;
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(N_THREADS) fcdp_delta_encode(struct task *tasks) {
    __shared__ uint4 memory[N_WARPS * WARP_BYTES / 16];
    __shared__ uint4 n_over[N_WARPS][5]; /* 40 half words */
    __shared__ mask tree[N_WARPS][TREE_WORDS + 1];
    __shared__ mask task[8];
    __shared__ uint4 sizes[2];
    const unsigned t = threadIdx.x, warp = t / 32;
    if (t < 8) task[t] = ((volatile mask *)&tasks[blockIdx.x])[t];
    if (t < 2) sizes[t] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const unsigned wide = task[6] == 4;
    struct warp w = {0, 0, (half_word *)n_over[warp], tree[warp], t % 32, wide, 16u << wide};
    w.rows = (word *)memory + (warp << wide) % N_WARPS * (WARP_BYTES / 4);
    w.planes = w.rows + ((PLANES_BYTES << wide) + OUT_BYTES) / 4;
    blocks_encode(&w, warp, task, (half_word *)sizes);
    __syncthreads();
    if (t < 2) ((uint4 *)task[4])[t] = sizes[t];
}
