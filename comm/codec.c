/* codec.c - differences of floating point numbers, coded as planes of bits.
 *
 * A block goes through these steps; the decoder takes them backwards:
 *
 *     difference   base, now -> z             by the compiler's vectors
 *     split        z -> planes                each plane 64 values a word
 *     choose       popcounts -> header        by the exact size of each choice, before anything is written
 *     write        planes -> bits             a word at a time: extract (pext) and append
 *
 * The coder of a block is compiled twice: for any processor, and for x86-64 with AVX2 and a fast pext
 * (codec_cpu.h), of which the program chooses when it runs. Both make the same wire.
 */
#include "comm/codec.h"

#include <string.h>

#include "comm/codec_cpu.h"

enum {
    MAX_BITS = 32,
    MAX_DEPTH = 11,        /* a single node over all values of a block */
    READ_AHEAD_BYTES = 16, /* that take() and put() may touch behind the end */
};

typedef struct planes {
    uint64_t bit[MAX_BITS][BLOCK_WORDS];
    uint64_t over[MAX_BITS + 1][BLOCK_WORDS];
} planes;

typedef struct header {
    unsigned k, top, depth;
    bool escapes;
} header;

/* Level l has a bit for 2^l values: in `tree[l]`. */
typedef uint64_t tree[MAX_DEPTH + 1][BLOCK_WORDS];

/* ---- bits ---- */

typedef struct writer {
    uint8_t *at;
    uint64_t pending;
    unsigned n_pending; /* < 64 */
} writer;

/* n <= 64 bits; the others of `bits` are zero. Without branches: the lengths are random. */
EACH void put(writer *w, uint64_t bits, unsigned n) {
    uint64_t all = w->pending | bits << w->n_pending;
    unsigned sum = w->n_pending + n;
    memcpy(w->at, &all, sizeof all); /* the last of these writes is block_write's */
    w->pending = sum >= 64 ? (bits >> 1) >> (63 - w->n_pending) : all;
    w->at += sum >> 6 << 3;
    w->n_pending = sum & 63;
}

typedef struct reader {
    const uint8_t *from;
    size_t n_bytes, at_bit; /* READ_AHEAD_BYTES behind n_bytes can be read */
} reader;

/* The next n <= 64 bits, with others above them. Behind the end it returns anything; the caller looks at
 * at_bit when it has all. */
EACH uint64_t take(reader *r, unsigned n) {
    size_t byte = r->at_bit >> 3;
    unsigned shift = r->at_bit & 7;
    byte = byte < r->n_bytes ? byte : r->n_bytes;
    r->at_bit += n;
    uint64_t bits = load64(r->from + byte) >> shift;
    if (n > 56) bits |= (uint64_t)r->from[byte + 8] << 1 << (63 - shift);
    return bits;
}

static inline uint64_t lowest(uint64_t x, unsigned n) {
    return n < 64 ? x & ((UINT64_C(1) << n) - 1) : x;
}

/* ---- values and differences ---- */

/* Sign and magnitude to an integer in the order of the numbers, and back. */
static inline uint16_t ordered16(uint16_t x) {
    return (uint16_t)(x ^ ((uint16_t)((int16_t)x >> 15) & 0x7fff));
}

static inline uint32_t ordered32(uint32_t x) {
    return x ^ ((uint32_t)((int32_t)x >> 31) & 0x7fffffff);
}

/* The compiler makes of these what the processor has. */
typedef uint16_t lanes16 __attribute__((vector_size(32)));
typedef int16_t signed16 __attribute__((vector_size(32)));
typedef uint32_t lanes32 __attribute__((vector_size(32)));
typedef int32_t signed32 __attribute__((vector_size(32)));

/* z of all values; returns the OR of them. */
EACH uint32_t difference(const uint8_t *base, const uint8_t *now, size_t n_words, unsigned bits, values *v) {
    uint32_t any = 0;
    if (bits == 16) {
        lanes16 a, b, d, each = {0};
        for (size_t i = 0; i < n_words * WORD_VALUES; i += sizeof a / 2) {
            memcpy(&a, now + 2 * i, sizeof a);
            memcpy(&b, base + 2 * i, sizeof b);
            a ^= (lanes16)((signed16)a >> 15) & 0x7fff;
            b ^= (lanes16)((signed16)b >> 15) & 0x7fff;
            d = a - b;
            d = d << 1 ^ (lanes16)((signed16)d >> 15);
            each |= d;
            memcpy(v->z16 + i, &d, sizeof d);
        }
        for (size_t i = 0; i < sizeof each / 2; i++) any |= each[i];
    } else {
        lanes32 a, b, d, each = {0};
        for (size_t i = 0; i < n_words * WORD_VALUES; i += sizeof a / 4) {
            memcpy(&a, now + 4 * i, sizeof a);
            memcpy(&b, base + 4 * i, sizeof b);
            a ^= (lanes32)((signed32)a >> 31) & 0x7fffffff;
            b ^= (lanes32)((signed32)b >> 31) & 0x7fffffff;
            d = a - b;
            d = d << 1 ^ (lanes32)((signed32)d >> 31);
            each |= d;
            memcpy(v->z32 + i, &d, sizeof d);
        }
        for (size_t i = 0; i < sizeof each / 4; i++) any |= each[i];
    }
    return any;
}

/* base + z, into `out`, which may be the base. */
EACH void apply(const uint8_t *base, const values *v, size_t n_words, unsigned bits, uint8_t *out) {
    if (bits == 16) {
        lanes16 b, z;
        for (size_t i = 0; i < n_words * WORD_VALUES; i += sizeof b / 2) {
            memcpy(&b, base + 2 * i, sizeof b);
            memcpy(&z, v->z16 + i, sizeof z);
            b ^= (lanes16)((signed16)b >> 15) & 0x7fff;
            b += z >> 1 ^ -(z & 1);
            b ^= (lanes16)((signed16)b >> 15) & 0x7fff;
            memcpy(out + 2 * i, &b, sizeof b);
        }
    } else {
        lanes32 b, z;
        for (size_t i = 0; i < n_words * WORD_VALUES; i += sizeof b / 4) {
            memcpy(&b, base + 4 * i, sizeof b);
            memcpy(&z, v->z32 + i, sizeof z);
            b ^= (lanes32)((signed32)b >> 31) & 0x7fffffff;
            b += z >> 1 ^ -(z & 1);
            b ^= (lanes32)((signed32)b >> 31) & 0x7fffffff;
            memcpy(out + 4 * i, &b, sizeof b);
        }
    }
}

/* The same of one value, in place. */
EACH void apply_one(uint8_t *value, uint32_t z, unsigned bits) {
    if (bits == 16) {
        uint16_t b, d = (uint16_t)(z >> 1 ^ -(z & 1));
        memcpy(&b, value, sizeof b);
        b = ordered16((uint16_t)(ordered16(b) + d));
        memcpy(value, &b, sizeof b);
    } else {
        uint32_t b;
        memcpy(&b, value, sizeof b);
        b = ordered32(ordered32(b) + (z >> 1 ^ -(z & 1)));
        memcpy(value, &b, sizeof b);
    }
}

/* ---- trees ---- */

static inline size_t nodes_of(size_t n_words, unsigned level) {
    size_t size = (size_t)1 << level;
    return (n_words * WORD_VALUES + size - 1) / size;
}

static inline size_t words_of(size_t n_bits) {
    return (n_bits + WORD_VALUES - 1) / WORD_VALUES;
}

/* Builds tree[1 ..] upon tree[0], of which it returns the depth that takes the fewest bits, and these. */
EACH unsigned tree_grow(tree t, size_t n_words, size_t n_set, size_t *bits_out, bool fast) {
    unsigned best = 0;
    size_t n_nodes = n_words * WORD_VALUES, best_bits = n_nodes, bits_below = 0;
    /* With more ones than that no level saves anything. */
    unsigned depth = n_set * 2 < n_nodes ? MAX_DEPTH : 0;
    for (unsigned level = 1; level <= depth && n_nodes > 1; level++) {
        size_t n_children = words_of(n_nodes), nodes = 0, left = 0;
        n_nodes = (n_nodes + 1) / 2;
        for (size_t w = 0; w < words_of(n_nodes); w++) {
            uint64_t a = t[level - 1][2 * w], b = 2 * w + 1 < n_children ? t[level - 1][2 * w + 1] : 0;
            uint64_t either = evens(a | a >> 1, fast) | evens(b | b >> 1, fast) << 32;
            t[level][w] = either;
            nodes += count(either);
            left += count(a & EVEN) + count(b & EVEN);
        }
        bits_below += nodes + left;
        if (n_nodes + bits_below < best_bits) {
            best_bits = n_nodes + bits_below;
            best = level;
        } else if (bits_below >= best_bits)
            break;
    }
    *bits_out = best_bits;
    return best;
}

EACH void tree_put(writer *out, const tree t, size_t n_words, unsigned depth, bool fast) {
    size_t n_nodes = nodes_of(n_words, depth);
    for (size_t w = 0; w < words_of(n_nodes); w++) {
        size_t left = n_nodes - w * WORD_VALUES;
        put(out, t[depth][w], left < WORD_VALUES ? (unsigned)left : WORD_VALUES);
    }
    for (unsigned level = depth; level > 0; level--) {
        size_t n_children = words_of(nodes_of(n_words, level - 1));
        for (size_t w = 0; 2 * w < n_children; w++) {
            uint64_t a = t[level - 1][2 * w], b = 2 * w + 1 < n_children ? t[level - 1][2 * w + 1] : 0;
            uint64_t nodes = t[level][w], lefts = evens(a, fast) | evens(b, fast) << 32;
            uint64_t rights = evens(a >> 1, fast) | evens(b >> 1, fast) << 32;
            put(out, extract(lefts, nodes, fast), count(nodes));
            put(out, extract(rights, lefts, fast), count(lefts));
        }
    }
}

EACH void tree_take(reader *in, tree t, size_t n_words, unsigned depth, bool fast) {
    size_t n_nodes = nodes_of(n_words, depth);
    for (size_t w = 0; w < words_of(n_nodes); w++) {
        size_t left = n_nodes - w * WORD_VALUES;
        unsigned n = left < WORD_VALUES ? (unsigned)left : WORD_VALUES;
        t[depth][w] = lowest(take(in, n), n);
    }
    for (unsigned level = depth; level > 0; level--) {
        size_t n_children = words_of(nodes_of(n_words, level - 1));
        for (size_t w = 0; 2 * w < n_children; w++) {
            uint64_t nodes = t[level][w], lefts = deposit(take(in, count(nodes)), nodes, fast);
            uint64_t rights = nodes & (~lefts | deposit(take(in, count(lefts)), lefts, fast));
            t[level - 1][2 * w] = spread(lefts, fast) | spread(rights, fast) << 1;
            if (2 * w + 1 < n_children)
                t[level - 1][2 * w + 1] = spread(lefts >> 32, fast) | spread(rights >> 32, fast) << 1;
        }
    }
}

/* ---- a block ---- */

/* With fewer values changed than one in so many, the planes are made of those alone, side by side: the bits
 * among others are the same then, and there are fewer words of them. */
enum { SPARSE = 3 };

/* The planes of z < 2^n_planes, and how many values are over each; returns k. Not made are the planes of
 * bytes that go as they are, below plane k; and those of high bytes of which so few are not 0 that to escape
 * these takes less than a bit a value: *n_planes_out is then how many planes there are below. */
EACH unsigned planes_make(planes *p, const values *v, size_t n_words, unsigned bits, unsigned n_planes,
                          bool sparse, uint32_t n_over[MAX_BITS + 1], unsigned *n_planes_out, bool fast) {
    size_t n = n_words * WORD_VALUES;
    memset(p->over[n_planes], 0, sizeof p->over[n_planes]);
    n_over[n_planes] = 0;
    for (unsigned byte = (n_planes - 1) / 8; byte > 0; byte--) {
        uint32_t sum = 0;
        for (size_t w = 0; w < n_words; w++)
            sum += count(p->over[8 * byte][w] = nonzero(v, w, bits, byte, fast));
        if (sum * bits > n) break;
        n_planes = 8 * byte;
        n_over[n_planes] = sum;
    }
    unsigned k = n_planes, first;
    for (unsigned end = n_planes; end > 0; end = first) {
        first = (end - 1) / 8 * 8;
        for (size_t w = 0; w < n_words; w++) split(v, w, bits, first / 8, end - first, p->bit + first, fast);
        for (unsigned j = end; j-- > first;) {
            uint32_t sum = 0;
            for (size_t w = 0; w < n_words; w++)
                sum += count(p->over[j][w] = p->over[j + 1][w] | p->bit[j][w]);
            n_over[j] = sum;
        }
        /* One more plane as it is takes n bits, and saves those of two: a mark of each value over it, and a
         * bit of each over the next. n_over falls with j, so k is the first j where that saves nothing. */
        while (k > first && n_over[k - 1] + n_over[k] <= n) k--;
        if (k > first && !sparse) break;
    }
    *n_planes_out = n_planes;
    return sparse ? 0 : k;
}

typedef struct choice {
    header h;
    size_t bits; /* of a block: header and all */
} choice;

/* The cheapest `top` for this k, by the sizes of what would be written behind `over k`. */
static choice choose_top(const uint32_t *n_over, unsigned k, unsigned n_planes, unsigned bits) {
    choice best = {.bits = SIZE_MAX};
    size_t marks = 0, rest = 0; /* over k+1 .. top; planes k .. top-2, with the escaped */
    for (unsigned top = k; top <= n_planes && n_over[top]; top++) {
        size_t n_rest = top > k ? top - 1 - k : 0;
        size_t cost = marks + rest - n_rest * n_over[top] + (size_t)(bits - k) * n_over[top];
        if (cost < best.bits) best = (choice){{.k = k, .top = top, .escapes = true}, cost};
        marks += n_over[top];
        rest += top > k ? n_over[top] : 0;
        if (top == n_planes || n_over[top + 1]) continue;
        cost = marks - n_over[top] + rest; /* none is over the next */
        if (cost <= best.bits) best = (choice){{.k = k, .top = top}, cost};
    }
    return best;
}

/* `n_words` are those of the planes, `n_tree_words` of the tree: more if the block is sparse. */
EACH void block_write(uint8_t *to, const header *h, const values *v, const planes *p, const tree t,
                      size_t n_words, size_t n_tree_words, unsigned bits, bool fast) {
    uint16_t word = (uint16_t)(h->k | h->top << 5 | (unsigned)h->escapes << 10 | h->depth << 11);
    memcpy(to, &word, sizeof word);
    to += sizeof word;
    for (unsigned byte = 0; byte < h->k / 8; byte++)
        for (size_t w = 0; w < n_words; w++, to += WORD_VALUES) bytes_of(v, w, bits, byte, to, fast);
    writer out = {.at = to};
    for (unsigned j = h->k / 8 * 8; j < h->k; j++)
        for (size_t w = 0; w < n_words; w++) put(&out, p->bit[j][w], WORD_VALUES);
    tree_put(&out, t, n_tree_words, h->depth, fast);
    for (unsigned j = h->k + 1; j <= h->top; j++)
        for (size_t w = 0; w < n_words; w++) {
            uint64_t among = p->over[j - 1][w];
            put(&out, extract(p->over[j][w], among, fast), count(among));
        }
    for (unsigned j = h->k; j + h->escapes < h->top; j++)
        for (size_t w = 0; w < n_words; w++) {
            uint64_t among = p->over[j + 1][w] & ~(h->escapes ? p->over[h->top][w] : 0);
            put(&out, extract(p->bit[j][w], among, fast), count(among));
        }
    for (size_t w = 0; h->escapes && w < n_words; w++)
        for (uint64_t left = p->over[h->top][w]; left; left &= left - 1)
            put(&out, z_at(v, bits, w * WORD_VALUES + (size_t)__builtin_ctzll(left)) >> h->k, bits - h->k);
    memcpy(out.at, &out.pending, sizeof out.pending);
}

/* A payload of at most raw_bytes, which means: as it is. `to` has room for READ_AHEAD_BYTES more. */
EACH size_t block_encode(const uint8_t *base, const uint8_t *now, size_t n_words, unsigned bits,
                         size_t raw_bytes, uint8_t *to, bool fast) {
    values v;
    planes p;
    tree t;
    uint32_t any = difference(base, now, n_words, bits, &v), n_over[MAX_BITS + 1];
    size_t n_changed = 0, n_plane_words = n_words, tree_bits;
    if (!any) return 0;
    for (size_t w = 0; w < n_words; w++) n_changed += count(t[0][w] = nonzero(&v, w, bits, 0, fast));
    bool sparse = n_changed * SPARSE < n_words * WORD_VALUES;
    if (sparse) {
        size_t n = 0;
        for (size_t w = 0; w < n_words; w++)
            for (uint64_t left = t[0][w]; left; left &= left - 1)
                z_set(&v, bits, n++, z_at(&v, bits, w * WORD_VALUES + (size_t)__builtin_ctzll(left)));
        n_plane_words = words_of(n);
        while (n < n_plane_words * WORD_VALUES) z_set(&v, bits, n++, 0);
    }
    unsigned n_planes = MAX_BITS - (unsigned)__builtin_clz(any);
    unsigned k = planes_make(&p, &v, n_plane_words, bits, n_planes, sparse, n_over, &n_planes, fast);
    choice best = choose_top(n_over, k, n_planes, bits);
    if (k) memcpy(t[0], p.over[k], sizeof t[0]);
    best.h.depth = tree_grow(t, n_words, n_over[k], &tree_bits, fast);
    best.bits += 8 * sizeof(uint16_t) + n_words * WORD_VALUES * k + tree_bits;
    size_t bytes = (best.bits + 7) / 8;
    if (bytes >= raw_bytes) return raw_bytes;
    block_write(to, &best.h, &v, &p, t, n_plane_words, n_words, bits, fast);
    return bytes;
}

/* The planes behind `over k`, which the caller has set. Of a sparse block, those of its changed values. */
EACH void planes_take(reader *in, const header *h, planes *p, size_t n_words, bool fast) {
    for (unsigned j = h->k + 1; j <= h->top; j++)
        for (size_t w = 0; w < n_words; w++) {
            uint64_t among = p->over[j - 1][w];
            p->over[j][w] = deposit(take(in, count(among)), among, fast);
        }
    for (unsigned j = h->k; j < h->top; j++)
        for (size_t w = 0; w < n_words; w++) {
            uint64_t next = p->over[j + 1][w], among = next & ~(h->escapes ? p->over[h->top][w] : 0);
            p->bit[j][w] = (p->over[j][w] & ~next) | deposit(take(in, count(among)), among, fast);
        }
    if (!h->escapes) memcpy(p->bit[h->top], p->over[h->top], sizeof p->bit[h->top]);
}

/* The values of the planes, and of the bytes `low` as they are. Then of the escaped. */
EACH void values_take(reader *in, const header *h, const planes *p, const uint8_t *low, size_t n_words,
                      unsigned bits, values *v, bool fast) {
    unsigned n_planes = h->top + !h->escapes;
    for (size_t w = 0; w < n_words; w++) {
        uint8_t bytes[MAX_BITS / 8][WORD_VALUES];
        for (unsigned byte = 0; byte < bits / 8; byte++) {
            unsigned first = 8 * byte, left = first < n_planes ? n_planes - first : 0;
            if (byte < h->k / 8)
                memcpy(bytes[byte], low + (byte * n_words + w) * WORD_VALUES, WORD_VALUES);
            else if (left)
                join(p->bit + first, w, left < 8 ? left : 8, bytes[byte], fast);
            else
                memset(bytes[byte], 0, WORD_VALUES);
        }
        combine(bytes, w, bits, v, fast);
    }
    for (size_t w = 0; h->escapes && w < n_words; w++)
        for (uint64_t left = p->over[h->top][w]; left; left &= left - 1) {
            size_t i = w * WORD_VALUES + (size_t)__builtin_ctzll(left);
            uint64_t above = lowest(take(in, bits - h->k), bits - h->k) << h->k;
            z_set(v, bits, i, z_at(v, bits, i) | (uint32_t)above);
        }
}

/* False: malformed. READ_AHEAD_BYTES behind the payload can be read. */
EACH bool block_decode(const uint8_t *base, uint8_t *out, size_t n_words, unsigned bits,
                       const uint8_t *payload, size_t payload_bytes, bool fast) {
    values v;
    planes p;
    tree t;
    uint16_t word;
    if (payload_bytes < sizeof word) return false;
    memcpy(&word, payload, sizeof word);
    const header h = {.k = word & 31, .top = word >> 5 & 31, .escapes = word >> 10 & 1, .depth = word >> 11};
    size_t low_bytes = h.k / 8 * n_words * WORD_VALUES, n_changed = 0;
    if (h.top >= bits || h.k > h.top || h.depth > MAX_DEPTH || sizeof word + low_bytes > payload_bytes)
        return false;
    const uint8_t *low = payload + sizeof word;
    reader in = {.from = low + low_bytes, .n_bytes = payload_bytes - sizeof word - low_bytes};
    for (unsigned j = h.k / 8 * 8; j < h.k; j++)
        for (size_t w = 0; w < n_words; w++) p.bit[j][w] = take(&in, WORD_VALUES);
    tree_take(&in, t, n_words, h.depth, fast);
    for (size_t w = 0; w < n_words; w++) n_changed += count(t[0][w]);
    if (h.k || n_changed * SPARSE >= n_words * WORD_VALUES) {
        memcpy(p.over[h.k], t[0], sizeof t[0]);
        planes_take(&in, &h, &p, n_words, fast);
        values_take(&in, &h, &p, low, n_words, bits, &v, fast);
        apply(base, &v, n_words, bits, out);
    } else {
        size_t n_changed_words = words_of(n_changed), n = 0, value_bytes = bits / 8;
        for (size_t w = 0; w < n_changed_words; w++)
            p.over[0][w] = w + 1 < n_changed_words || n_changed % WORD_VALUES == 0
                               ? UINT64_MAX
                               : lowest(UINT64_MAX, n_changed % WORD_VALUES);
        planes_take(&in, &h, &p, n_changed_words, fast);
        values_take(&in, &h, &p, low, n_changed_words, bits, &v, fast);
        if (out != base) memcpy(out, base, n_words * WORD_VALUES * value_bytes);
        for (size_t w = 0; w < n_words; w++)
            for (uint64_t left = t[0][w]; left; left &= left - 1)
                apply_one(out + (w * WORD_VALUES + (size_t)__builtin_ctzll(left)) * value_bytes,
                          z_at(&v, bits, n++), bits);
    }
    return (in.at_bit + 7) / 8 == in.n_bytes;
}

/* ---- for this processor ---- */

typedef size_t encode_fn(const uint8_t *base, const uint8_t *now, size_t n_words, size_t raw_bytes,
                         uint8_t *to);
typedef bool decode_fn(const uint8_t *base, uint8_t *out, size_t n_words, const uint8_t *payload,
                       size_t payload_bytes);
typedef struct coder {
    encode_fn *encode;
    decode_fn *decode;
} coder;

#define CODER(name, attribute, bits, fast)                                                                   \
    attribute static size_t name##_encode(const uint8_t *base, const uint8_t *now, size_t n_words,           \
                                          size_t raw_bytes, uint8_t *to) {                                   \
        return block_encode(base, now, n_words, bits, raw_bytes, to, fast);                                  \
    }                                                                                                        \
    attribute static bool name##_decode(const uint8_t *base, uint8_t *out, size_t n_words,                   \
                                        const uint8_t *payload, size_t payload_bytes) {                      \
        return block_decode(base, out, n_words, bits, payload, payload_bytes, fast);                         \
    }                                                                                                        \
    static const coder name = {name##_encode, name##_decode};
CODER(plain16, , 16, false)
CODER(plain32, , 32, false)
#if defined(__x86_64__)
CODER(fast16, FAST, 16, true)
CODER(fast32, FAST, 32, true)

#endif

bool fcdp__delta_portable;

static const coder *coder_for(unsigned element_bytes) {
#if defined(__x86_64__)
    enum { UNKNOWN, SLOW, SPEEDY };
    static _Atomic int processor; /* whichever thread finds out first: all find the same */
    if (processor == UNKNOWN) processor = has_fast() ? SPEEDY : SLOW;
    if (processor == SPEEDY && !fcdp__delta_portable)
        return element_bytes == 2 ? &fast16 : element_bytes == 4 ? &fast32 : NULL;
#endif
    return element_bytes == 2 ? &plain16 : element_bytes == 4 ? &plain32 : NULL;
}

/* ---- an array ---- */

static size_t block_bytes_of(unsigned element_bytes) {
    return FCDP_DELTA_BLOCK * (size_t)(element_bytes == 4 ? 4 : 2);
}

static size_t blocks_of(size_t bytes, unsigned element_bytes) {
    size_t block_bytes = block_bytes_of(element_bytes);
    return bytes / block_bytes + (bytes % block_bytes != 0);
}

size_t fcdp__delta_bound(size_t bytes) {
    return bytes + blocks_of(bytes, 2) * sizeof(uint16_t);
}

/* Words that hold the bytes of a block. */
static size_t words_for(size_t bytes, unsigned element_bytes) {
    size_t word_bytes = WORD_VALUES * (size_t)element_bytes;
    return (bytes + word_bytes - 1) / word_bytes;
}

enum { BLOCK_MAX_BYTES = BLOCK_VALUES * MAX_BITS / 8 };

/* A last block, with its arrays padded to whole words. */
static size_t tail_encode(const coder *c, const uint8_t *base, const uint8_t *now, size_t bytes,
                          unsigned element_bytes, uint8_t *to) {
    uint8_t padded_base[BLOCK_MAX_BYTES], padded_now[BLOCK_MAX_BYTES];
    size_t n_words = words_for(bytes, element_bytes), padded = n_words * WORD_VALUES * element_bytes;
    memcpy(padded_base, base, bytes);
    memcpy(padded_now, now, bytes);
    memset(padded_base + bytes, 0, padded - bytes);
    memset(padded_now + bytes, 0, padded - bytes);
    return c->encode(padded_base, padded_now, n_words, bytes, to);
}

static bool tail_decode(const coder *c, const uint8_t *base, uint8_t *out, size_t bytes,
                        unsigned element_bytes, const uint8_t *payload, size_t payload_bytes) {
    uint8_t padded[BLOCK_MAX_BYTES];
    size_t n_words = words_for(bytes, element_bytes);
    memcpy(padded, base, bytes);
    memset(padded + bytes, 0, n_words * WORD_VALUES * element_bytes - bytes);
    if (!c->decode(padded, padded, n_words, payload, payload_bytes)) return false;
    memcpy(out, padded, bytes);
    return true;
}

/* A payload of `bytes` says: as it is. 0 says: unchanged. Neither is in `to`, which has READ_AHEAD_BYTES
 * more. */
static size_t payload_make(const coder *c, const uint8_t *base, const uint8_t *now, size_t bytes,
                           unsigned element_bytes, uint8_t *to) {
    if (memcmp(base, now, bytes) == 0) return 0;
    if (!c) return bytes;
    return bytes == block_bytes_of(element_bytes) ? c->encode(base, now, BLOCK_WORDS, bytes, to)
                                                  : tail_encode(c, base, now, bytes, element_bytes, to);
}

size_t fcdp__delta_block_encode(const void *base, const void *now, size_t bytes, unsigned element_bytes,
                                void *payload_out) {
    uint8_t coded[BLOCK_MAX_BYTES + READ_AHEAD_BYTES];
    size_t n = payload_make(coder_for(element_bytes), base, now, bytes, element_bytes, coded);
    memcpy(payload_out, n == bytes ? now : coded, n);
    return n;
}

size_t fcdp__delta_encode(const void *base, const void *now, size_t bytes, unsigned element_bytes,
                          void *wire_out, size_t capacity) {
    const coder *c = coder_for(element_bytes);
    const uint8_t *from = base, *to = now;
    uint8_t *wire = wire_out, buffer[BLOCK_MAX_BYTES + READ_AHEAD_BYTES];
    size_t block_bytes = block_bytes_of(element_bytes), n_blocks = blocks_of(bytes, element_bytes);
    size_t used = n_blocks * sizeof(uint16_t);
    if (used > capacity) return 0;
    for (size_t i = 0; i < n_blocks; i++, from += block_bytes, to += block_bytes, bytes -= block_bytes) {
        size_t here = bytes < block_bytes ? bytes : block_bytes;
        /* straight to the wire where there is room for what put() writes beyond */
        uint8_t *at = capacity - used >= here + READ_AHEAD_BYTES ? wire + used : buffer;
        size_t payload = payload_make(c, from, to, here, element_bytes, at);
        if (payload > capacity - used) return 0;
        if (payload == here)
            memcpy(wire + used, to, here);
        else if (at == buffer)
            memcpy(wire + used, buffer, payload);
        uint16_t size = (uint16_t)payload;
        memcpy(wire + i * sizeof size, &size, sizeof size);
        used += payload;
        if (here < block_bytes) break;
    }
    return used;
}

fcdp_status fcdp__delta_decode(const void *base, void *out, size_t bytes, unsigned element_bytes,
                               const void *wire, size_t wire_bytes) {
    return fcdp__delta_decode_range(base, out, bytes, element_bytes, wire, wire_bytes, 0, bytes);
}

fcdp_status fcdp__delta_decode_range(const void *base, void *out, size_t bytes, unsigned element_bytes,
                                     const void *wire_in, size_t wire_bytes, size_t begin, size_t end) {
    const coder *c = coder_for(element_bytes);
    const uint8_t *from = base, *wire = wire_in;
    uint8_t *to = out, buffer[BLOCK_MAX_BYTES + READ_AHEAD_BYTES];
    const size_t block_bytes = block_bytes_of(element_bytes), n_blocks = blocks_of(bytes, element_bytes);
    const size_t first = begin / block_bytes, until = blocks_of(end, element_bytes);
    size_t at = n_blocks * sizeof(uint16_t);
    FCDP_CHECK(2, begin % block_bytes == 0 && (end % block_bytes == 0 || end == bytes));
    if (at > wire_bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "a wire of %zu bytes has no table of %zu blocks", wire_bytes,
                          n_blocks);
    for (size_t i = 0; i < first; i++) {
        uint16_t payload;
        memcpy(&payload, wire + i * sizeof payload, sizeof payload);
        at += payload; /* at most 64 KiB a block */
    }
    if (at > wire_bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "%zu blocks of %zu take more than a wire of %zu bytes", first,
                          n_blocks, wire_bytes);
    for (size_t i = first; i < until; i++) {
        size_t done = i * block_bytes, here = bytes - done < block_bytes ? bytes - done : block_bytes;
        uint16_t payload;
        memcpy(&payload, wire + i * sizeof payload, sizeof payload);
        if (payload > here || payload > wire_bytes - at)
            return fcdp__fail(FCDP_ERR_INVALID,
                              "block %zu of %zu, of %zu bytes, has %u on a wire with %zu left", i, n_blocks,
                              here, payload, wire_bytes - at);
        const uint8_t *coded = wire + at;
        at += payload;
        if (payload == 0) {
            if (to != from) memcpy(to + done, from + done, here);
            continue;
        }
        if (payload == here) {
            memcpy(to + done, coded, here);
            continue;
        }
        if (wire_bytes - at < READ_AHEAD_BYTES) {
            memcpy(buffer, coded, payload);
            memset(buffer + payload, 0, READ_AHEAD_BYTES);
            coded = buffer;
        }
        bool whole = here == block_bytes;
        if (!c || !(whole ? c->decode(from + done, to + done, BLOCK_WORDS, coded, payload)
                          : tail_decode(c, from + done, to + done, here, element_bytes, coded, payload)))
            return fcdp__fail(FCDP_ERR_INVALID, "block %zu of %zu on a wire of %zu bytes is malformed", i,
                              n_blocks, wire_bytes);
    }
    if (until == n_blocks && at != wire_bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "a wire of %zu bytes has %zu beyond its last block", wire_bytes,
                          wire_bytes - at);
    return FCDP_OK;
}
