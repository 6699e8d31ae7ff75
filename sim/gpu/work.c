/* What operations do when their turn comes, and how long the simulated PCIe link takes for them. */
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "sim/gpu/internal.h"

#define LONGEST_SLEEP_NS 20000000u
#define STREAMED_BYTES (32u << 10)

enum sim_place simgpu__place_of(uintptr_t address, size_t bytes) {
    enum sim_place host = simgpu__host_place(address, bytes);
    return host != SIM_FOREIGN ? host : simgpu__vspace_place(address, bytes);
}

static bool is_accessible(uintptr_t address, size_t bytes, bool write) {
    switch (simgpu__place_of(address, bytes)) {
    case SIM_RESERVED: return simgpu__vspace_granted(address, bytes, write);
    case SIM_MIXED: return false;
    default: return true;
    }
}

bool simgpu__work_is_legal(const struct sim_op *op) {
    const struct simgpu_access *accesses = simgpu__accesses_of(op);
    for (unsigned i = 0; i < op->n_accesses; i++)
        if (!is_accessible(accesses[i].address, accesses[i].bytes, accesses[i].writes)) return false;
    return true;
}

/* Pairs with whatever store, of any thread or process, made the value; acquire, so that what was written
 * before it is seen by the operations behind the wait. */
bool simgpu__work_value_reached(const struct sim_op *op) {
    uint32_t now = __atomic_load_n((const uint32_t *)op->src, __ATOMIC_ACQUIRE);
    switch (op->flags) {
    case CU_STREAM_WAIT_VALUE_EQ: return now == op->value;
    case CU_STREAM_WAIT_VALUE_AND: return (now & op->value) != 0;
    case CU_STREAM_WAIT_VALUE_NOR: return ~(now | op->value) != 0;
    default: return (int32_t)(now - op->value) >= 0;
    }
}

const char *simgpu__op_name(const struct sim_op *op) {
    switch (op->work) {
    case SIM_COPY:
        return op->link == SIM_LINK_TO_DEVICE ? "copy to device"
               : op->link == SIM_LINK_TO_HOST ? "copy to host"
                                              : "copy";
    case SIM_FILL: return "fill";
    case SIM_POINT: return "event";
    case SIM_WAIT_POINT: return "wait for event";
    case SIM_WAIT_VALUE: return "wait for value";
    case SIM_WRITE_VALUE: return "write value";
    case SIM_HOST_FUNCTION: return "host function";
    case SIM_KERNEL: break;
    }
    return op->name;
}

uint64_t simgpu__now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t simgpu__core_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t simgpu__work_here_ns(const struct sim_op *op) {
    uint64_t from = op->finish_ns ? op->finish_ns : op->ready_ns, now = simgpu__now_ns();
    if (op->core_times > 0)
        return from + (uint64_t)(op->core_times * (double)(simgpu__core_ns() - op->core_ns));
    return now > from ? now : from;
}

static uint64_t memory_end(const struct sim_op *op) {
    if (op->work != SIM_COPY && op->work != SIM_FILL) return 0;
    return sim.memory_bytes_per_ns > 0
               ? op->ready_ns + (uint64_t)((double)op->bytes / sim.memory_bytes_per_ns)
               : 0;
}

/* Copies of one direction share the link one after another: each starts when the one before is through. */
uint64_t simgpu__link_book(const struct sim_op *op) {
    if (op->link == SIM_LINK_NONE) return memory_end(op);
    if (sim.link_bytes_per_ns <= 0) return 0;
    uint64_t *free_ns = &sim.link_free_ns[op->link];
    uint64_t start = *free_ns > op->ready_ns ? *free_ns : op->ready_ns;
    *free_ns = start + (uint64_t)((double)op->bytes / sim.link_bytes_per_ns);
    return *free_ns;
}

/* In short steps, so that a reset, or an error, need not wait for a long operation. */
void simgpu__until_ns(uint64_t finish_ns) {
    for (uint64_t now; !simgpu__work_is_dropped() && (now = simgpu__now_ns()) < finish_ns;) {
        uint64_t until = finish_ns - now > LONGEST_SLEEP_NS ? now + LONGEST_SLEEP_NS : finish_ns;
        struct timespec at = {.tv_sec = (time_t)(until / 1000000000u),
                              .tv_nsec = (long)(until % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
    }
}

/* As a copy engine writes: past the caches, which a copy of megabytes would fill, and without reading what it
 * overwrites. */
static void copy(char *to, const char *from, size_t bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) &&                                                 \
    !defined(__SANITIZE_THREAD__) /* gcc's see no such store */
    enum { STEP = 64, AHEAD = 1024 };
    bool apart = to + bytes <= from || from + bytes <= to;
    if (bytes >= STREAMED_BYTES && apart && (uintptr_t)to % sizeof(__m128i) == 0) {
        for (; bytes >= STEP; bytes -= STEP, to += STEP, from += STEP) {
            _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
            for (size_t i = 0; i < STEP; i += sizeof(__m128i))
                _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        }
        _mm_sfence(); /* before anyone is told that the copy is over */
    }
#endif
    memmove(to, from, bytes);
}

static void call_function(const struct sim_op *op) {
    simgpu__host_function_mark(true);
    op->function(op->user_data);
    simgpu__host_function_mark(false);
}

/* What it does behind the end that it said is left out. */
static void host_function(struct sim_op *op) {
    op->core_ns = simgpu__core_ns();
    call_function(op);
    if (!op->finish_ns && op->core_times > 0) op->finish_ns = simgpu__work_here_ns(op);
}

void simgpu__work_perform(struct sim_op *op) {
    switch (op->work) {
    case SIM_COPY: copy((char *)op->dst, (const char *)op->src, op->bytes); break;
    case SIM_FILL: memset((void *)op->dst, (int)op->value, op->bytes); break;
    case SIM_HOST_FUNCTION: host_function(op); break;
    case SIM_KERNEL:
        if (op->function) call_function(op);
        break;
    default: break; /* what takes no time is done under the lock */
    }
    simgpu__until_ns(op->finish_ns);
}
