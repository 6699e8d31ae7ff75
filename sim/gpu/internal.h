/*
 * What the files of the simulated GPU share: one lock, one state, and which file owns which part of it.
 *
 * One lock, `sim.lock`, guards every table and queue. Work itself (copies, fills, host functions) runs on the
 * streams' workers without it; an operation that runs is marked so, which is how unmap knows that its memory
 * is in use.
 */
#ifndef FCDP_SIMGPU_INTERNAL_H
#define FCDP_SIMGPU_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sim/gpu/history.h"
#include "sim/gpu/simgpu.h"
#include "sim/gpu/simgpu_cuda.h"

#define SIM_PAGE_BYTES ((size_t)2 << 20)

/* ---- entry points (entry.c) ---- */

enum sim_need { SIM_NEEDS_NOTHING, SIM_NEEDS_INIT, SIM_NEEDS_CONTEXT };

#define SIM_ENTRIES(X)                                                                                       \
    X(cuInit, SIM_NEEDS_NOTHING)                                                                             \
    X(cuDriverGetVersion, SIM_NEEDS_NOTHING)                                                                 \
    X(cuGetErrorName, SIM_NEEDS_NOTHING)                                                                     \
    X(cuGetErrorString, SIM_NEEDS_NOTHING)                                                                   \
    X(cuDeviceGetCount, SIM_NEEDS_INIT)                                                                      \
    X(cuDeviceGet, SIM_NEEDS_INIT)                                                                           \
    X(cuDeviceGetName, SIM_NEEDS_INIT)                                                                       \
    X(cuDeviceGetAttribute, SIM_NEEDS_INIT)                                                                  \
    X(cuDeviceTotalMem_v2, SIM_NEEDS_INIT)                                                                   \
    X(cuDevicePrimaryCtxRetain, SIM_NEEDS_INIT)                                                              \
    X(cuDevicePrimaryCtxRelease_v2, SIM_NEEDS_INIT)                                                          \
    X(cuCtxSetCurrent, SIM_NEEDS_INIT)                                                                       \
    X(cuCtxGetCurrent, SIM_NEEDS_INIT)                                                                       \
    X(cuCtxSynchronize, SIM_NEEDS_CONTEXT)                                                                   \
    X(cuMemGetInfo_v2, SIM_NEEDS_CONTEXT)                                                                    \
    X(cuMemGetAllocationGranularity, SIM_NEEDS_INIT)                                                         \
    X(cuMemCreate, SIM_NEEDS_CONTEXT)                                                                        \
    X(cuMemRelease, SIM_NEEDS_CONTEXT)                                                                       \
    X(cuMemExportToShareableHandle, SIM_NEEDS_CONTEXT)                                                       \
    X(cuMemImportFromShareableHandle, SIM_NEEDS_CONTEXT)                                                     \
    X(cuMemAddressReserve, SIM_NEEDS_CONTEXT)                                                                \
    X(cuMemAddressFree, SIM_NEEDS_CONTEXT)                                                                   \
    X(cuMemMap, SIM_NEEDS_CONTEXT)                                                                           \
    X(cuMemUnmap, SIM_NEEDS_CONTEXT)                                                                         \
    X(cuMemSetAccess, SIM_NEEDS_CONTEXT)                                                                     \
    X(cuMemGetAccess, SIM_NEEDS_CONTEXT)                                                                     \
    X(cuStreamCreate, SIM_NEEDS_CONTEXT)                                                                     \
    X(cuStreamCreateWithPriority, SIM_NEEDS_CONTEXT)                                                         \
    X(cuStreamDestroy_v2, SIM_NEEDS_CONTEXT)                                                                 \
    X(cuStreamSynchronize, SIM_NEEDS_CONTEXT)                                                                \
    X(cuStreamQuery, SIM_NEEDS_CONTEXT)                                                                      \
    X(cuStreamIsCapturing, SIM_NEEDS_CONTEXT)                                                                \
    X(cuThreadExchangeStreamCaptureMode, SIM_NEEDS_INIT)                                                     \
    X(cuStreamWaitEvent, SIM_NEEDS_CONTEXT)                                                                  \
    X(cuStreamWaitValue32_v2, SIM_NEEDS_CONTEXT)                                                             \
    X(cuStreamWriteValue32_v2, SIM_NEEDS_CONTEXT)                                                            \
    X(cuLaunchHostFunc, SIM_NEEDS_CONTEXT)                                                                   \
    X(cuEventCreate, SIM_NEEDS_CONTEXT)                                                                      \
    X(cuEventDestroy_v2, SIM_NEEDS_CONTEXT)                                                                  \
    X(cuEventRecord, SIM_NEEDS_CONTEXT)                                                                      \
    X(cuEventQuery, SIM_NEEDS_CONTEXT)                                                                       \
    X(cuEventSynchronize, SIM_NEEDS_CONTEXT)                                                                 \
    X(cuEventElapsedTime_v2, SIM_NEEDS_CONTEXT)                                                              \
    X(cuMemcpyAsync, SIM_NEEDS_CONTEXT)                                                                      \
    X(cuMemcpyHtoDAsync_v2, SIM_NEEDS_CONTEXT)                                                               \
    X(cuMemcpyDtoHAsync_v2, SIM_NEEDS_CONTEXT)                                                               \
    X(cuMemcpyDtoDAsync_v2, SIM_NEEDS_CONTEXT)                                                               \
    X(cuMemcpy2DAsync_v2, SIM_NEEDS_CONTEXT)                                                                 \
    X(cuMemsetD8Async, SIM_NEEDS_CONTEXT)                                                                    \
    X(cuMemHostRegister_v2, SIM_NEEDS_CONTEXT)                                                               \
    X(cuMemHostUnregister, SIM_NEEDS_CONTEXT)                                                                \
    X(cuMemHostGetDevicePointer_v2, SIM_NEEDS_CONTEXT)                                                       \
    X(cuModuleLoadData, SIM_NEEDS_CONTEXT)                                                                   \
    X(cuModuleUnload, SIM_NEEDS_CONTEXT)                                                                     \
    X(cuModuleGetFunction, SIM_NEEDS_CONTEXT)                                                                \
    X(cuLaunchKernel, SIM_NEEDS_CONTEXT)

enum sim_entry {
#define X(name, need) SIM_##name,
    SIM_ENTRIES(X)
#undef X
        SIM_N_ENTRIES
};

/* The gate of every entry point, taken without the lock: counts the call, then answers in CUDA's order of
 * refusal. */
CUresult simgpu__enter(enum sim_entry entry);
/* The same for control functions that put work on streams, which need no current context and are not
 * counted. */
CUresult simgpu__enter_control(void);
#define SIM_ENTER(entry)                                                                                     \
    do {                                                                                                     \
        CUresult refused_ = simgpu__enter(SIM_##entry);                                                      \
        if (refused_ != CUDA_SUCCESS) return refused_;                                                       \
    } while (0)

/* Device 0 is current for this thread; cleared by a reset. */
void simgpu__context_set_current(bool current);
bool simgpu__context_is_current(void);
/* This thread runs a host function of a stream, which must not call CUDA. */
void simgpu__host_function_mark(bool running);
/* From the first call on, simgpu__forked() is true in children forked off a process that has initialised. */
void simgpu__forks_watch(void);
bool simgpu__forked(void);

/* ---- counting and failing calls (fault.c) ---- */

int simgpu__fault_find(const char *name); /* enum sim_entry, SIM_N_ENTRIES for any, -1 unknown */
void simgpu__fault_arm(int entry, unsigned long n, int code);
CUresult simgpu__fault_count(enum sim_entry entry); /* the code to fail with, or CUDA_SUCCESS */
void simgpu__fault_clear(void);

struct sim_op;

/* ---- calls that order (site.c) ---- */

struct sim_site { /* text "": sites are not listed */
    char text[sizeof((struct simgpu_site *)0)->site];
};

/* Without the lock. */
void simgpu__site_take(struct sim_site *site_out);
/* Should the call be left out? Counts it. *taught_out: where to count what a wait teaches, NULL: nowhere. */
bool simgpu__site_drops(const struct sim_site *site, enum sim_entry entry, const char *stream,
                        const char *event, unsigned long **taught_out);

/* ---- calls that wait (block.c) ---- */

/* The calling thread is in an entry point that may wait (without the lock), and leaves it. */
void simgpu__block_begin(enum sim_entry entry);
void simgpu__block_end(void);
/* Between the two: the call is one that may spin. */
void simgpu__block_spins(void);
/* It waits from here on. */
void simgpu__block_waits(void);
int simgpu__thread_id(void);

/* ---- the timeline (timeline.c) ---- */

bool simgpu__timeline_is_on(void);
/* 0, or -1 with errno. */
int simgpu__timeline_open(const char *pattern);
/* An operation of the stream with this number ended; `named` is the stream's own note of which timeline has
 * its name. */
void simgpu__timeline_op(const struct sim_op *op, uint64_t begin_ns, unsigned stream, const char *stream_name,
                         unsigned *named);
/* What a host function handed to the calling thread, which has a name of its own, ended: in modelled time,
 * and from `begin_ns` on by the clock. */
void simgpu__timeline_work(uint64_t ready_ns, uint64_t begin_ns, uint64_t finish_ns);
/* The calling thread waited. */
void simgpu__timeline_wait(const char *entry, const char *label, uint64_t begin_ns, uint64_t end_ns);

/* ---- settings (settings.c) ---- */

/* Reads the environment once; false, after a line on stderr, when a setting is malformed. Takes the lock. */
bool simgpu__settings_load(void);

/* ---- ids (table.c): handles that cannot be dereferenced, are never reused and are checked ---- */

struct sim_table {
    uint8_t tag;
    size_t n_live;
    size_t n_slots;
    size_t n_capacity;
    uint32_t first_free; /* slot + 1; 0: none */
    struct sim_slot *slots;
};

uint64_t simgpu__table_put(struct sim_table *table, void *item); /* 0: no memory */
void *simgpu__table_get(const struct sim_table *table, uint64_t id);
void *simgpu__table_take(struct sim_table *table, uint64_t id);
/* Takes every item out and hands it to `drop`. */
void simgpu__table_clear(struct sim_table *table, void (*drop)(void *item));

/* ---- physical memory (phys.c) ---- */

struct sim_phys;

/* One reference is a handle's or a map's; the last one gives the memory back. All under the lock. */
void simgpu__phys_keep(struct sim_phys *phys);
void simgpu__phys_drop(struct sim_phys *phys);
struct sim_phys *simgpu__phys_of(CUmemGenericAllocationHandle handle);
size_t simgpu__phys_bytes(const struct sim_phys *phys);
bool simgpu__phys_is_host(const struct sim_phys *phys);
/* Puts the memory at `address`, inaccessible. False: out of memory maps. */
bool simgpu__phys_place(const struct sim_phys *phys, void *address);
/* Access is granted; returns whether it was granted before. */
bool simgpu__phys_grant(struct sim_phys *phys);
struct sim_history **simgpu__phys_history(struct sim_phys *phys);
size_t simgpu__phys_handles(void);
void simgpu__phys_reset(void);

/* ---- addresses (vspace.c, host.c) ---- */

enum sim_place {
    SIM_FOREIGN,  /* nothing that the simulator knows */
    SIM_RESERVED, /* inside one reservation; mapped and granted or not */
    SIM_PINNED,   /* inside one registration */
    SIM_MIXED     /* across the border of one of those */
};

enum sim_place simgpu__place_of(uintptr_t address, size_t bytes);
/* Every byte of a range inside a reservation is mapped, and the device may access it so. */
bool simgpu__vspace_granted(uintptr_t address, size_t bytes, bool write);
/* Every byte is mapped to memory located on the host. */
bool simgpu__vspace_is_host(uintptr_t address, size_t bytes);
enum sim_place simgpu__vspace_place(uintptr_t address, size_t bytes);
enum sim_place simgpu__host_place(uintptr_t address, size_t bytes);
/* Calls `visit` for each piece of memory behind a range that is mapped, or registered, throughout: with its
 * history, the bytes of it, and the address of its first byte. Ends when that returns false. */
typedef bool sim_visit(void *context, struct sim_history **history, size_t begin, size_t bytes,
                       uintptr_t base);
void simgpu__vspace_visit(uintptr_t address, size_t bytes, sim_visit *visit, void *context);
void simgpu__host_visit(uintptr_t address, size_t bytes, sim_visit *visit, void *context);
/* What memory is at an address, whatever the address: two that are mapped to the same byte have the same
 * key. */
struct sim_key {
    uintptr_t base;
    size_t offset;
};
struct sim_key simgpu__vspace_key(uintptr_t address);
void simgpu__vspace_count(size_t *n_ranges_out, size_t *n_maps_out);
size_t simgpu__host_count(void);
void simgpu__vspace_reset(void);
void simgpu__host_reset(void);

/* ---- streams (stream.c), their work (work.c), events (event.c) ---- */

/* A point in a stream that something waits for: an event's recorded state, or a synchronous copy's end. */
struct sim_point {
    unsigned refs;
    unsigned n_waiting; /* threads of the program's */
    bool done;
    uint64_t end_ns; /* once done: the modelled time of it */
    struct sim_position position;
};

enum sim_work {
    SIM_COPY,
    SIM_FILL,
    SIM_POINT,
    SIM_WAIT_POINT,
    SIM_WAIT_VALUE,
    SIM_WRITE_VALUE,
    SIM_HOST_FUNCTION,
    SIM_KERNEL
};
enum sim_link { SIM_LINK_NONE, SIM_LINK_TO_DEVICE, SIM_LINK_TO_HOST, SIM_N_LINKS };

struct sim_op {
    struct sim_op *next;
    uint64_t seq; /* order of enqueueing over all streams */
    uint64_t enqueued_ns;
    uint64_t ready_ns;  /* once it starts: the modelled time from when it could */
    uint64_t finish_ns; /* its modelled end; 0: when the work itself is over */
    double core_times;  /* simgpu_set_core's, when it starts */
    uint64_t core_ns;   /* a host function's thread's time of a core, at its begin or as it said its end */
    uint64_t stored_ns; /* the modelled time at which a thread stored what it waits for; 0: none did */
    bool waited;        /* it could not start when its turn came */
    bool running;       /* its memory is in use without the lock */
    enum sim_work work;
    enum sim_link link;
    uintptr_t dst;
    uintptr_t src;
    size_t bytes;
    uint32_t value;
    unsigned flags;
    unsigned n_accesses; /* what it reads and writes, of whatever kind it is */
    struct simgpu_access accesses[SIMGPU_MAX_ACCESSES];
    struct simgpu_access *announced; /* its own memory: these instead, of a host function; NULL: none */
    uint64_t duration_ns;            /* of a kernel */
    struct sim_point *waits_for;
    unsigned long *taught;   /* site.c */
    struct sim_point *point; /* done when the operation is */
    CUhostFn function;       /* a host function, or a kernel's body */
    void *user_data;
    bool owns_user_data;
    bool stands_in;             /* for a device: a host function that is none of the program's */
    struct sim_clock *host;     /* what the host knew when it enqueued this */
    char name[SIM_TEXT_BYTES];  /* a kernel's */
    char label[SIM_TEXT_BYTES]; /* the enqueuing thread's */
};

struct sim_stream;

enum { SIM_MAX_QUEUES = 32 };

struct sim_stream *simgpu__stream_of(CUstream stream); /* NULL: no such stream */
/* Enqueues a copy of `op`; the stream takes over the op's point references. CUDA_ERROR_OUT_OF_MEMORY or
 * success. */
CUresult simgpu__stream_push(struct sim_stream *stream, const struct sim_op *op);
/* Waits, giving the lock up meanwhile, until the point is done; then the sticky error or success. */
CUresult simgpu__point_wait(struct sim_point *point);
struct sim_point *simgpu__point_new(void);
void simgpu__point_drop(struct sim_point *point);
/* An operation that is queued (or, with running_only, that runs) reads or writes a byte of the range. */
bool simgpu__stream_uses(uintptr_t address, size_t bytes, bool running_only);
void simgpu__stream_wait_unused(uintptr_t address, size_t bytes);
void simgpu__stream_sync_all(void);
/* A thread of the program stores a word that streams may wait for, at a modelled time; wakes them. */
void simgpu__stream_store_value(uint32_t *word, uint32_t value, uint64_t stored_ns);
/* The host learns that the work so far of the stream, or of all streams, is over. */
void simgpu__stream_host_learns(const struct sim_stream *stream);
void simgpu__stream_host_learns_all(void);
/* Of the stream whose host function or kernel this thread runs; NULL: a thread of the program. */
struct sim_position *simgpu__stream_position(void);
size_t simgpu__stream_count(void);
void simgpu__captures_invalidate(void);
/* With the lock. */
bool simgpu__stream_captures(const struct sim_stream *stream);
const char *simgpu__stream_label(const struct sim_stream *stream);
/* Something else than an operation's end has changed what they may start: the sticky error, a setting. */
void simgpu__streams_wake(void);
void simgpu__stream_reset(void);
void simgpu__stream_forget_order(void); /* of the null stream, which outlives a reset */
size_t simgpu__event_count(void);
void simgpu__event_reset(void);

/* A reset, or the sticky error, lets queued work go undone. */
bool simgpu__work_is_dropped(void);
/* Whether the op's memory is what it needs at the moment it starts; under the lock. */
bool simgpu__work_is_legal(const struct sim_op *op);
/* Performs what the operation does, and returns at its modelled end; without the lock. */
void simgpu__work_perform(struct sim_op *op);
/* Where a running host function is, see simgpu_here_ns; on its thread. */
uint64_t simgpu__work_here_ns(const struct sim_op *op);
uint64_t simgpu__core_ns(void);
/* Sleeps until then, or until work is dropped; without the lock. */
void simgpu__until_ns(uint64_t finish_ns);
bool simgpu__work_value_reached(const struct sim_op *op);
/* False: too many, or no addresses. */
bool simgpu__accesses_take(struct sim_op *op, const struct simgpu_access *accesses, unsigned n);
/* What the calling thread announced for its next host function; the caller frees op->announced, or a stream
 * that the op is pushed on. */
void simgpu__announced_take(struct sim_op *op);
/* Did it say so of its next host function? */
bool simgpu__stand_in_taken(void);
static inline const struct simgpu_access *simgpu__accesses_of(const struct sim_op *op) {
    return op->announced ? op->announced : op->accesses;
}
/* Books the op's bytes on its link, from ready_ns on; when they are through, 0 when the link is unlimited. */
uint64_t simgpu__link_book(const struct sim_op *op);
uint64_t simgpu__now_ns(void);
void simgpu__text_set(char text[SIM_TEXT_BYTES], const char *from);

const char *simgpu__op_name(const struct sim_op *op);
const char *simgpu__label(void); /* the calling thread's */

/* ---- work of the program's threads (thread.c), as simgpu_here_ns and simgpu_end_at ---- */

uint64_t simgpu__thread_here_ns(void);
void simgpu__thread_end_at(uint64_t end_ns);

/* ---- modules (module.c) ---- */

size_t simgpu__module_count(void);
void simgpu__module_reset(void);

/* ---- what is ordered (order.c) ---- */

/* A stream's position begins, and ends with it. False: no memory. */
bool simgpu__order_begin(struct sim_position *position);
void simgpu__order_end(struct sim_position *position);
/* The position is behind `of`, from now on. */
void simgpu__order_learn(struct sim_position *position, const struct sim_position *of);
/* An operation is the next at this position. */
void simgpu__order_start(struct sim_position *position, const struct sim_op *op);
void simgpu__order_write_value(const struct sim_position *position, struct sim_key key, uint32_t value,
                               bool barrier);
void simgpu__order_wait_value(struct sim_position *position, struct sim_key key, uint32_t value);
/* A thread of the program stores the value there. It tells nothing of what is over. */
void simgpu__order_store_value(struct sim_key key, uint32_t value);
/* Whether all that the operation touches is ordered with what touched it before; if not, a line on stderr
 * says so. */
bool simgpu__order_check(const struct sim_position *position, const struct sim_op *op,
                         const char *stream_name);
/* Whether the host knows that all that touched the memory through `base` is over, where races are looked
 * for. */
bool simgpu__order_check_unmap(const struct sim_history *history, uintptr_t base);
void simgpu__order_host_learns(const struct sim_position *of);
void simgpu__order_host_learns_ended(void); /* the streams that are no more */
/* Does the host know that all up to `of` is over? */
bool simgpu__order_host_knows(const struct sim_position *of);
struct sim_clock *simgpu__order_host(void);
void simgpu__order_reset(void);

/* ---- the state ---- */

struct sim_state {
    pthread_mutex_t lock;
    /* for the program's threads: a point that they wait for is done, an operation has ended, a worker has
     * left. A stream's worker has a condition of its own */
    pthread_cond_t progress;

    /* read by the gate without the lock, written under it */
    atomic_bool initialised;
    /* of the state; a reset starts a new one, which voids every thread's current context */
    atomic_uint generation;
    atomic_uint context_refs;
    atomic_int sticky;       /* CUresult */
    atomic_uint n_capturing; /* streams */
    atomic_bool stopping;    /* a reset drops all work */

    /* under the lock */
    bool settings_loaded;
    bool settings_valid;
    bool poison;
    bool races;
    unsigned n_queues; /* hardware queues that streams share; 0: each has its own */
    bool strict;       /* SIMGPU_RACES_STRICT */
    bool serial;       /* host functions run one after another */
    bool in_function;  /* one runs */
    bool goes_on;      /* SIMGPU_RACES_GO_ON */
    size_t capacity_bytes;
    size_t used_bytes;          /* sum of the bytes of physical device memory alive */
    double memory_bytes_per_ns; /* 0: as fast as memory, as is link_bytes_per_ns */
    double link_bytes_per_ns;
    double core_times;
    uint64_t function_free_ns; /* the last one's end */
    uint64_t link_free_ns[SIM_N_LINKS];
};

extern struct sim_state sim;

static inline void sim_lock(void) {
    pthread_mutex_lock(&sim.lock);
}
static inline void sim_unlock(void) {
    pthread_mutex_unlock(&sim.lock);
}
static inline CUresult sim_unlock_with(CUresult result) {
    pthread_mutex_unlock(&sim.lock);
    return result;
}

/* The error that stays until a reset; under the lock. */
void simgpu__sticky_set(CUresult code);

#endif
