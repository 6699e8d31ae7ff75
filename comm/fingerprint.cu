/* fingerprint.cu - the fingerprint's sum (comm/fingerprint.h) on a GPU. fingerprint.ptx beside it is what is
 * shipped: the driver compiles it for the device that it finds. tools/ptx/compile_ptx.py makes it anew, and
 * tests/comm/test_ptx.py runs it.
 *
 * One block per task, each of up to 256 KiB of one extent: no block waits for another and none adds to what
 * another adds to. 8 blocks of 256 threads fill an SM, with 16 KiB of each one's loads in flight. A task is
 * in the host's memory, so one thread reads it, and writes the sum.
 */
typedef unsigned long long word;

struct task { /* fcdp_fingerprint_task */
    word address, bytes, first, sum;
};

enum { N_THREADS = 256, UNROLLED = 4, HALF_UNROLLED = UNROLLED / 2 };
#define STEP 0x9e3779b97f4a7c15ull
#define FACTOR 0xd6e8feb86659fd93ull

static __device__ __forceinline__ word mix(word x) {
    x ^= x >> 32;
    x *= FACTOR;
    x ^= x >> 32;
    x *= FACTOR;
    return x ^ x >> 32;
}

/* Words 2i and 2i + 1, which are added to the key of the first and the next. */
static __device__ __forceinline__ word mix_pair(ulonglong2 pair, word key) {
    return mix(pair.x + key) + mix(pair.y + key + STEP);
}

/* The word that begins `shift` bits behind `low`'s begin, and ends in `high`. */
static __device__ __forceinline__ word joined(word low, word high, unsigned shift) {
    return shift ? low >> shift | high << (64 - shift) : low;
}

extern "C" __global__ void __launch_bounds__(N_THREADS) fcdp_fingerprint(struct task *tasks) {
    __shared__ word shared[N_THREADS];
    volatile struct task *mine = &tasks[blockIdx.x];
    const unsigned t = threadIdx.x;
    if (t == 0) {
        shared[0] = mine->address;
        shared[1] = mine->bytes;
        shared[2] = mine->first;
    }
    __syncthreads();
    const word address = shared[0], bytes = shared[1], first = shared[2];
    __syncthreads();

    /* 16 bytes at a time, where they lie so. */
    const unsigned n_pairs = address % 16 ? 0 : (unsigned)(bytes / 16);
    const ulonglong2 *pairs = (const ulonglong2 *)address;
    word sum = 0;
    unsigned i = t;
    for (; i + (UNROLLED - 1) * N_THREADS < n_pairs; i += UNROLLED * N_THREADS) {
        ulonglong2 loaded[UNROLLED];
#pragma unroll
        for (int k = 0; k < UNROLLED; k++) loaded[k] = __ldg(&pairs[i + k * N_THREADS]);
#pragma unroll
        for (int k = 0; k < UNROLLED; k++)
            sum += mix_pair(loaded[k], (first + 2 * (i + k * N_THREADS) + 1) * STEP);
    }
    for (; i < n_pairs; i += N_THREADS) sum += mix_pair(__ldg(&pairs[i]), (first + 2 * i + 1) * STEP);

    /* Where they lie otherwise, a word is parts of two aligned ones, or is one (at 8). Words [begin, end) are
     * those of which both are the array's. Half as many at a time, or fewer than 8 blocks have registers. */
    const unsigned offset = (unsigned)(address % 8), shift = 8 * offset, beside = offset != 0;
    const word *aligned = (const word *)(address - offset);
    const unsigned n_words = (unsigned)((bytes + 7) / 8), begin = 2 * n_pairs + beside;
    const unsigned whole = (unsigned)((bytes + offset) / 8),
                   end = whole > begin + beside ? whole - beside : begin;
    unsigned w = begin + t;
    for (; w + (HALF_UNROLLED - 1) * N_THREADS < end; w += HALF_UNROLLED * N_THREADS) {
        word low[HALF_UNROLLED], high[HALF_UNROLLED];
#pragma unroll
        for (int k = 0; k < HALF_UNROLLED; k++) {
            low[k] = __ldg(&aligned[w + k * N_THREADS]);
            high[k] = __ldg(&aligned[w + k * N_THREADS + beside]);
        }
#pragma unroll
        for (int k = 0; k < HALF_UNROLLED; k++)
            sum += mix(joined(low[k], high[k], shift) + (first + w + k * N_THREADS + 1) * STEP);
    }
    for (; w < end; w += N_THREADS)
        sum += mix(joined(__ldg(&aligned[w]), __ldg(&aligned[w + beside]), shift) + (first + w + 1) * STEP);

    /* The first word and the last ones: byte by byte. */
    const unsigned char *at = (const unsigned char *)address;
    const unsigned n_before = begin < n_words ? beside : n_words - 2 * n_pairs;
    const unsigned n_left = n_before + (end < n_words ? n_words - end : 0);
    for (i = t; i < n_left; i += N_THREADS) {
        const word number = i < n_before ? 2 * n_pairs + i : end + i - n_before;
        word value = 0;
#pragma unroll 1
        for (word b = 8 * number; b < bytes && b < 8 * number + 8; b++)
            value |= (word)__ldg(&at[b]) << 8 * (b - 8 * number);
        sum += mix(value + (first + number + 1) * STEP);
    }

    shared[t] = sum;
#pragma unroll 1
    for (unsigned half = N_THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (t < half) shared[t] += shared[t + half];
    }
    if (t == 0) mine->sum = shared[0];
}
