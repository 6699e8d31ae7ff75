/* Kernels of a set duration: what they access is checked, and what they compute, if anything, is a C
 * function. And what a thread says of the work that it enqueues: a label, and what a host function
 * accesses. */
#include <stdlib.h>
#include <string.h>

#include "sim/gpu/internal.h"

void simgpu__text_set(char text[SIM_TEXT_BYTES], const char *from) {
    size_t bytes = strnlen(from, SIM_TEXT_BYTES - 1);
    memcpy(text, from, bytes);
    memset(text + bytes, 0, SIM_TEXT_BYTES - bytes);
}

/* Those of no bytes are left out. False: one has no address, or goes around the end of the address space. */
static bool accesses_copy(struct simgpu_access *to, const struct simgpu_access *accesses, unsigned n,
                          unsigned *n_out) {
    *n_out = 0;
    for (unsigned i = 0; i < n; i++) {
        if (accesses[i].bytes == 0) continue;
        if (!accesses[i].address || accesses[i].address + accesses[i].bytes < accesses[i].address)
            return false;
        to[(*n_out)++] = accesses[i];
    }
    return true;
}

bool simgpu__accesses_take(struct sim_op *op, const struct simgpu_access *accesses, unsigned n) {
    return n <= SIMGPU_MAX_ACCESSES && accesses_copy(op->accesses, accesses, n, &op->n_accesses);
}

static bool take_data(struct sim_op *op, const struct simgpu_kernel *kernel) {
    op->user_data = (void *)(uintptr_t)kernel->data;
    if (kernel->data_bytes == 0) return true;
    op->user_data = malloc(kernel->data_bytes);
    if (!op->user_data) return false;
    memcpy(op->user_data, kernel->data, kernel->data_bytes);
    return op->owns_user_data = true;
}

static _Thread_local char label[SIM_TEXT_BYTES];
static _Thread_local struct {
    unsigned n;
    struct simgpu_access *accesses; /* NULL: none */
} announced;

const char *simgpu__label(void) {
    return label;
}

void simgpu_annotate(const char *text) {
    simgpu__text_set(label, text ? text : "");
}

/* What a thread announced for a function that it never launched goes when the thread ends. */
static pthread_key_t announced_key;
static pthread_once_t announced_once = PTHREAD_ONCE_INIT;

static void announced_key_make(void) {
    (void)pthread_key_create(&announced_key, free);
}

int simgpu_announce(const struct simgpu_access *accesses, unsigned n) {
    unsigned n_kept;
    struct simgpu_access *copies = n ? malloc(n * sizeof *copies) : NULL;
    if (n && !copies) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!accesses_copy(copies, accesses, n, &n_kept)) {
        free(copies);
        return CUDA_ERROR_INVALID_VALUE;
    }
    (void)pthread_once(&announced_once, announced_key_make);
    (void)pthread_setspecific(announced_key, copies);
    free(announced.accesses);
    announced.accesses = copies;
    announced.n = n_kept;
    return CUDA_SUCCESS;
}

static _Thread_local bool stands_in;

void simgpu_stand_in(void) {
    stands_in = true;
}

bool simgpu__stand_in_taken(void) {
    bool taken = stands_in;
    stands_in = false;
    return taken;
}

void simgpu__announced_take(struct sim_op *op) {
    op->announced = announced.accesses;
    op->n_accesses = announced.n;
    if (announced.accesses) (void)pthread_setspecific(announced_key, NULL);
    announced.accesses = NULL;
    announced.n = 0;
}

int simgpu_launch(void *stream, const struct simgpu_kernel *kernel) {
    CUresult refused = simgpu__enter_control();
    if (refused != CUDA_SUCCESS) return refused;
    if (!kernel) return CUDA_ERROR_INVALID_VALUE;
    struct sim_op op = {.work = SIM_KERNEL, .function = kernel->body, .duration_ns = kernel->duration_ns};
    simgpu__text_set(op.name, kernel->name ? kernel->name : "kernel");
    if (!simgpu__accesses_take(&op, kernel->accesses, kernel->n_accesses)) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    struct sim_stream *on = simgpu__stream_of(stream);
    if (!on) return sim_unlock_with(CUDA_ERROR_INVALID_HANDLE);
    if (!take_data(&op, kernel)) return sim_unlock_with(CUDA_ERROR_OUT_OF_MEMORY);
    return sim_unlock_with(simgpu__stream_push(on, &op));
}
