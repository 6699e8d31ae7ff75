/* The gate that every entry point passes, and the state that it checks. */
#include "sim/gpu/internal.h"

struct sim_state sim = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .progress = PTHREAD_COND_INITIALIZER,
    .generation = 1,
};

static const uint8_t needs[SIM_N_ENTRIES] = {
#define X(name, need) [SIM_##name] = need,
    SIM_ENTRIES(X)
#undef X
};

static _Thread_local unsigned current_generation; /* 0: no context is current */
static _Thread_local bool in_host_function;
static _Thread_local CUstreamCaptureMode capture_mode;

void simgpu__context_set_current(bool current) {
    current_generation = current ? atomic_load(&sim.generation) : 0;
}

bool simgpu__context_is_current(void) {
    return current_generation == atomic_load(&sim.generation);
}

void simgpu__host_function_mark(bool running) {
    in_host_function = running;
}

/* In a forked child the parent's lock may be held for ever and its workers are gone, so nothing may touch
 * them. Every call asks: getpid() would make a system call of each. A child of clone() alone is not seen. */
static atomic_bool forked;

static void child_mark(void) {
    if (atomic_load(&sim.initialised)) atomic_store(&forked, true);
}

static void forks_register(void) {
    (void)pthread_atfork(NULL, NULL, child_mark);
}

void simgpu__forks_watch(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, forks_register);
}

bool simgpu__forked(void) {
    return atomic_load_explicit(&forked, memory_order_relaxed);
}

/* Calls that would query, or wait for, work that a capture has not enqueued yet. */
static bool breaks_captures(enum sim_entry entry) {
    if (capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    return entry == SIM_cuCtxSynchronize || entry == SIM_cuStreamSynchronize || entry == SIM_cuStreamQuery ||
           entry == SIM_cuEventSynchronize || entry == SIM_cuEventQuery || entry == SIM_cuEventElapsedTime_v2;
}

CUresult simgpu__enter(enum sim_entry entry) {
    if (simgpu__forked()) return CUDA_ERROR_NOT_INITIALIZED;
    CUresult fault = simgpu__fault_count(entry);
    if (fault == CUDA_ERROR_ILLEGAL_ADDRESS) {
        sim_lock();
        simgpu__sticky_set(fault);
        sim_unlock();
    }
    if (fault != CUDA_SUCCESS) return fault;
    if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    if (needs[entry] == SIM_NEEDS_NOTHING) return CUDA_SUCCESS;
    if (!atomic_load(&sim.initialised)) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs[entry] == SIM_NEEDS_INIT) return CUDA_SUCCESS;
    if (!simgpu__context_is_current()) return CUDA_ERROR_INVALID_CONTEXT;
    if (atomic_load(&sim.context_refs) == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (atomic_load(&sim.n_capturing) > 0 && breaks_captures(entry)) {
        simgpu__captures_invalidate();
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return (CUresult)atomic_load(&sim.sticky);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    SIM_ENTER(cuThreadExchangeStreamCaptureMode);
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult simgpu__enter_control(void) {
    if (simgpu__forked() || !atomic_load(&sim.initialised)) return CUDA_ERROR_NOT_INITIALIZED;
    if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    if (atomic_load(&sim.context_refs) == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return (CUresult)atomic_load(&sim.sticky);
}

void simgpu__sticky_set(CUresult code) {
    if (atomic_load(&sim.sticky) == CUDA_SUCCESS) atomic_store(&sim.sticky, code);
    simgpu__streams_wake();
}
