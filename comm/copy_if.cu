/* copy_if.cu - copies that were enqueued before it was known whether they are wanted (comm/copy_if.h), on a
 * GPU. copy_if.ptx beside it is what is shipped: the driver compiles it for the device that it finds.
 * tools/ptx/compile_ptx.py makes it anew, and tests/comm/test_ptx.py runs it.
 *
 * A CUDA block takes a task, which is in the host's memory, as are the bytes: mostly it reads that nothing is
 * wanted, and ends.
 */
typedef unsigned char byte;
typedef unsigned long long word;

struct task { /* fcdp_copy_if_task */
    word from, from_bytes, to, to_bytes, wanted, rest[3];
};

enum { N_THREADS = 256, UNROLLED = 4, PAIR_BYTES = 16 };

extern "C" __global__ void __launch_bounds__(N_THREADS) fcdp_copy_if(struct task *tasks) {
    __shared__ word shared[3];
    const unsigned t = threadIdx.x;
    if (t == 0) {
        volatile struct task *mine = &tasks[blockIdx.x];
        shared[0] = mine->from;
        shared[1] = mine->to;
        shared[2] = mine->wanted ? mine->to_bytes : 0;
    }
    __syncthreads();
    const word from = shared[0], to = shared[1];
    const unsigned bytes = (unsigned)shared[2];

    /* 16 bytes at a time, where both lie so. */
    const unsigned n_pairs = (from | to) % PAIR_BYTES ? 0 : bytes / PAIR_BYTES;
    const ulonglong2 *pairs = (const ulonglong2 *)from;
    unsigned i = t;
    for (; i + (UNROLLED - 1) * N_THREADS < n_pairs; i += UNROLLED * N_THREADS) {
        ulonglong2 loaded[UNROLLED];
#pragma unroll
        for (int k = 0; k < UNROLLED; k++) loaded[k] = __ldg(&pairs[i + k * N_THREADS]);
#pragma unroll
        for (int k = 0; k < UNROLLED; k++) ((ulonglong2 *)to)[i + k * N_THREADS] = loaded[k];
    }
#pragma unroll 1
    for (; i < n_pairs; i += N_THREADS) ((ulonglong2 *)to)[i] = __ldg(&pairs[i]);
#pragma unroll 1
    for (i = n_pairs * PAIR_BYTES + t; i < bytes; i += N_THREADS)
        ((byte *)to)[i] = __ldg((const byte *)from + i);
}
