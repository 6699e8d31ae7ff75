/*
 * The control side of the simulated GPU: what a test may set and ask, beyond what CUDA offers.
 *
 * libfcdp_simgpu.so exports CUDA driver entry points (simgpu_cuda.h) over memfd and mmap. Each process has
 * one simulated device. No CUDA type appears here, so any layer's tests can include it.
 *
 * Settings are read from the environment when cuInit or a function of this header is first called:
 *   FCDP_SIM_CAPACITY  bytes of device memory, suffix K, M, G or T (powers of 1024); default 16G
 *   FCDP_SIM_PCIE      GB/s (1e9 bytes) that host-to-device copies share, and device-to-host copies share
 *   likewise;
 *                      0, the default, is as fast as memory
 *   FCDP_SIM_FAIL      NAME:N[:CODE]: the N-th call of NAME (`any`: of any entry point) fails with CODE
 *   (default 999) FCDP_SIM_POISON    1: fresh physical memory is filled with 0xA5, so that reading a page
 *   never written shows FCDP_SIM_RACES     1: simgpu_set_races FCDP_SIM_TIMELINE  PATH: simgpu_timeline_begin
 *   FCDP_SIM_SERIAL    1: simgpu_set_serial
 *   CUDA_DEVICE_MAX_CONNECTIONS   simgpu_set_queues; CUDA's own default is 8
 * A malformed one makes cuInit fail with CUDA_ERROR_INVALID_VALUE, after one line on stderr that names it.
 *
 * All functions are thread-safe, except that simgpu_reset must not run beside a cu* call. In a forked child
 * they do nothing, as cu* calls do there.
 */
#ifndef FCDP_SIMGPU_H
#define FCDP_SIMGPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SIMGPU_API __attribute__((visibility("default")))

/* What this process still holds. Nothing leaked: all zero. */
struct simgpu_live {
    size_t handles; /* created or imported, not released */
    size_t ranges;  /* address reservations */
    size_t maps;
    size_t streams; /* without the null stream */
    size_t events;
    size_t registrations; /* of host memory */
    size_t modules;
    size_t device_bytes; /* physical device memory created here that a handle or a map keeps alive */
};

/* Back to the state before cuInit: pending work is dropped, everything is freed, counts and faults are
 * cleared, the sticky error is gone, and the environment is read again at the next use. */
SIMGPU_API void simgpu_reset(void);

SIMGPU_API void simgpu_set_capacity(size_t bytes);
SIMGPU_API void simgpu_set_pcie(double gigabytes_per_s); /* 0: unlimited */
/* Of copies within the device, and fills, each on its own. 0, at first: they end when they are done, which is
 * then not a modelled time but one of this machine's. */
SIMGPU_API void simgpu_set_memory(double gigabytes_per_s);

/* Host functions take `times` times as long as their thread has had of a core, from when they could
 * start: however late it woke up, and whatever else the machine computes. More than 1 is for functions
 * that are given fewer bytes than they stand for. Not those that say their end (simgpu_end_at). 0, at
 * first: they end when they return. */
SIMGPU_API void simgpu_set_core(double times);

/* Streams share so many hardware queues (at most 32) in turn, as they were created, and wait for each other
 * there: stream.c. 0, at first: each has its own, as where several ranks are one process. */
SIMGPU_API void simgpu_set_queues(unsigned n);

/* Host functions run one after another, in any order that their streams have, as cuLaunchHostFunc allows. 0,
 * at first: each stream's beside the others'. */
SIMGPU_API void simgpu_set_serial(int on);
/* The calling thread's next host function stands for what a device does, such as a collective's kernel: it is
 * none of those. */
SIMGPU_API void simgpu_stand_in(void);

/* The n-th call from now (1: the next) of `entry` fails with `code` and has no other effect; then the fault
 * is spent, but CUDA_ERROR_ILLEGAL_ADDRESS is the context's from there on. NULL or "any": of any entry point.
 * A name may leave out its _v2. n = 0 disarms. One fault is armed at a time. Returns 0, or -1 when no entry
 * point has that name. */
SIMGPU_API int simgpu_fail_nth(const char *entry, unsigned long n, int code);

/* Calls of `entry` since the last reset of the counts or of all, failed ones too; NULL or "any": of all. 0
 * for an unknown name. */
SIMGPU_API unsigned long simgpu_calls(const char *entry);
SIMGPU_API void simgpu_calls_reset(void); /* an armed fault stays armed */

/* The i-th entry point's exported name, NULL past the last: to walk over all of them. */
SIMGPU_API const char *simgpu_entry_name(unsigned i);

/* A stream's graph capture begins (1) or ends (0), in CUDA's global mode: until it ends, no thread may wait
 * for a stream, an event or the device, nor ask about one, but in relaxed mode
 * (cuThreadExchangeStreamCaptureMode). Such a call fails with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and
 * invalidates every capture, as does, with CUDA_ERROR_STREAM_CAPTURE_ISOLATION, a wait of the stream for an
 * event that was recorded outside of a capture. What is put on the stream meanwhile runs at once; there is no
 * graph. Returns 0; 1: it had been invalidated; -1: no such stream, or not capturing. */
SIMGPU_API int simgpu_capture(void *stream, int begins);

SIMGPU_API void simgpu_live(struct simgpu_live *live_out);

/* ---- calls that make the program wait ---- */

/* Such calls: cuStreamSynchronize, cuEventSynchronize, cuCtxSynchronize, cuMemcpyHtoDAsync and DtoHAsync with
 * memory that is not registered, cuMemHostUnregister, and the last cuDevicePrimaryCtxRelease. Each is
 * counted, whether or not there was anything to wait for; calls that are refused are not. */
struct simgpu_blocking {
    int thread; /* the kernel's id of it (gettid); 0: no longer known, there were too many rows */
    const char *entry;
    char label[48]; /* the thread's, see simgpu_annotate */
    char site[512]; /* the callers: "function (file) < its caller < ...", or file+offset */
    unsigned long calls;
    unsigned long waits; /* of the calls, those that found something to wait for */
    /* of the calls, those in which CUDA may keep a core busy until the end, as the context's flags say:
     *                             cuStreamSynchronize, and cuEventSynchronize of an event without
     * CU_EVENT_BLOCKING_SYNC */
    unsigned long spins;
    uint64_t wait_ns;
    uint64_t longest_ns;
};

/* One row per thread, entry point, label and site since the last reset; the longest waits first. Returns how
 * many rows there are, of which at most n are written. */
SIMGPU_API size_t simgpu_blocking_list(struct simgpu_blocking *list_out, size_t n);
/* The sum over one thread's rows (0: the calling thread; -1: all threads); no label and no site. */
SIMGPU_API void simgpu_blocking_total(int thread, struct simgpu_blocking *total_out);
SIMGPU_API void simgpu_blocking_reset(void);

/* ---- labels, for reports and the timeline; texts are copied, up to 47 bytes ---- */

/* The label of what the calling thread enqueues from now on; NULL or "": none. */
SIMGPU_API void simgpu_annotate(const char *text);
/* A stream's name (NULL: the null stream's). 0, or -1 when there is no such stream. */
SIMGPU_API int simgpu_stream_name(void *stream, const char *text);

/* ---- the timeline ---- */

/* Writes what happens from now on to a file as a Chrome trace, which chrome://tracing and Perfetto open: a
 * row per stream with its operations (and its waits, where it waited), a row per thread with the calls in
 * which it waited and the work that host functions handed to it. "%p" in the path is the process's id. A
 * timeline that was on ends first, as it does when the process exits; a reset does not end it. What has a
 * modelled end has "ready_us", the modelled time from when it could run, and "modelled_us", how long it then
 * took. Times are the monotonic clock's in microseconds, so that files of several processes fit together:
 * sim/gpu/merge_timelines.py. Returns 0, or -1 with errno. */
SIMGPU_API int simgpu_timeline_begin(const char *path);
SIMGPU_API void simgpu_timeline_end(void);

/* ---- kernels ---- */

enum { SIMGPU_MAX_ACCESSES = 8 };

/* Bytes that an operation reads, or reads and writes. */
struct simgpu_access {
    uint64_t address;
    size_t bytes; /* 0: none */
    int writes;
};

struct simgpu_kernel {
    const char *name;     /* for reports and the timeline, copied, up to 47 bytes; NULL: "kernel" */
    uint64_t duration_ns; /* the stream is held for so long from when the kernel could start */
    unsigned n_accesses;
    struct simgpu_access accesses[SIMGPU_MAX_ACCESSES];
    void (*body)(void *data); /* NULL, or what it computes, on the stream's thread; must not call CUDA */
    const void *data;         /* the body's argument points to a copy of these bytes ... */
    size_t data_bytes;        /* ... or, where this is 0, to `data` itself */
};

/* Enqueues a kernel on a stream (NULL: the null stream). When it starts, what it accesses must be mapped and
 * granted as for a copy, else the sticky error is 700; memory that is not the simulator's is taken for legal.
 * A body that takes longer than the duration is waited for. Returns a CUresult: 0, or an error as from a
 * launch. No context needs to be current. */
SIMGPU_API int simgpu_launch(void *stream, const struct simgpu_kernel *kernel);

/* What the next host function that the calling thread enqueues (cuLaunchHostFunc) accesses, any number: it is
 * then checked as a kernel is. Otherwise nothing is known of it. 0, or a CUresult. */
SIMGPU_API int simgpu_announce(const struct simgpu_access *accesses, unsigned n);

/* For what models a device of its own in a host function, or in a kernel's body, such as a network: the
 * modelled time from when the running operation could start (monotonic, nanoseconds), which may be a little
 * before the thread woke up; 0 elsewhere. And its modelled end, until when the stream is held; without it the
 * operation ends when the function returns. */
SIMGPU_API uint64_t simgpu_ready_ns(void);
SIMGPU_API void simgpu_end_at(uint64_t end_ns);
/* In a host function: the modelled time at which it is, which is how long it has run (simgpu_set_core) behind
 * its begin, or behind the end that it said last. 0 elsewhere. So it may do several things that take modelled
 * time, one after another. */
SIMGPU_API uint64_t simgpu_here_ns(void);

/* A host function hands its work to a thread of the program, and its stream waits for a word
 * (cuStreamWaitValue32). In the host function: it takes no modelled time. Returns when it could start. */
SIMGPU_API uint64_t simgpu_work_hand(void);
/* In the thread: the work begins then, or when the thread's last work ended, if that is later. simgpu_here_ns
 * and simgpu_end_at are the thread's from here on, and simgpu_set_core applies. */
SIMGPU_API void simgpu_work_begin(uint64_t from_ns);
/* It ends without a word, for a thread that waits for this one. Returns its modelled end, where simgpu_end_at
 * may put that thread; 0: the thread has never had such work. */
SIMGPU_API uint64_t simgpu_work_end(void);
/* It ends, and stores the word at its modelled end, from when the stream goes on. That orders nothing: all
 * that the work did counts as the host function's, which the stream is behind. */
SIMGPU_API void simgpu_word_store(uint32_t *word, uint32_t value);

/* ---- kernels of modules ---- */

/* The simulator compiles nothing: with a module comes a C function that does what a block of its kernel does.
 * The kernel has one parameter, the address of an array of tasks in registered host memory, one for each
 * block. A task begins with ranges, each an address and a number of bytes (two times 8 bytes): those that its
 * block reads, then those that it writes; beside them it writes nothing but its task. All are checked as for
 * simgpu_launch. A launch takes the time to read the former from the device's memory. The device reads a task
 * when its block runs: if it begins otherwise then than at the launch, a line on stderr says so and the
 * sticky error is 700. */
struct simgpu_module {
    const char *image; /* the text that cuModuleLoadData takes; any other is refused with 209 */
    const char *entry; /* the kernel's name, which the image has behind ".entry" */
    size_t task_bytes; /* at least its ranges' */
    unsigned n_read;   /* ranges; at least one, and with the written at most 4 */
    unsigned n_written;
    void (*run)(void *task); /* on the stream's thread; must not call CUDA */
};

/* From now on, until a reset; texts are copied. The same image again changes its kernel. 0, or a CUresult. */
SIMGPU_API int simgpu_module_define(const struct simgpu_module *module);

/* ---- accesses that are not ordered (order.c says what orders) ---- */

/* Two operations that touch the same physical bytes through different addresses, one of them writing, must be
 * ordered, by CUDA's rule on virtual aliasing: otherwise the sticky error becomes CUDA_ERROR_ILLEGAL_ADDRESS
 * (700), the later one is not run, and a line on stderr names both. That is always on. Where races are looked
 * for (FCDP_SIM_RACES=1, or here), the same holds through one address, also in registered host memory; and a
 * cuMemUnmap fails so of memory that the host was never told to be out of use, even if by luck it was. What
 * the host itself reads and writes is not seen, nor is foreign memory. */
SIMGPU_API void simgpu_set_races(int how); /* 0, or of the following */
enum {
    SIMGPU_RACES = 1, /* look for them */
    /* Look for them so that what is found depends on the program alone, not on how fast its threads are: an
     * event or a stream counts as over to a query only if the host has waited for it, or for what is behind
     * it; and a value that another process wrote tells a stream nothing of what this one did. A program that
     * asks until the answer is yes asks for ever. */
    SIMGPU_RACES_STRICT = 2,
    /* What is found, also through two addresses, is reported, the first time on stderr, and the device goes
     * on. */
    SIMGPU_RACES_GO_ON = 4
};

/* Reports since the last reset, of all or of these, and the first one's text ("": none). */
struct simgpu_unordered {
    unsigned long aliases; /* through two addresses */
    unsigned long races;   /* through one */
    unsigned long unmaps;
    char text[640];
};
SIMGPU_API void simgpu_unordered(struct simgpu_unordered *unordered_out);
SIMGPU_API void simgpu_unordered_reset(void);

/* What the caller knows to be over, a thread of the program or a host function, is known behind a later
 * simgpu_observe of the same key (any address): for threads and host functions that tell each other things by
 * means of their own. A cuStreamWriteValue32 signals the word's address, for a thread that sees it change. */
SIMGPU_API void simgpu_signal(const void *key);
SIMGPU_API void simgpu_observe(const void *key);

/* ---- the calls that order, and leaving them out ---- */

/* cuStreamWaitEvent, cuEventRecord, cuEventSynchronize, cuStreamSynchronize and cuStreamWaitValue32, by where
 * they are made. */
struct simgpu_site {
    const char *entry;
    char stream[48];      /* that waits, or is waited for, or that the event is recorded on */
    char event[48];       /* the stream that the event was last recorded on; "": none */
    char site[160];       /* "file+offset < its caller's < ..." */
    unsigned long calls;  /* left out or not */
    unsigned long taught; /* of a stream's waits that have run: not implied by what it knew before */
};

/* From now on, with nothing counted and nothing left out; 0: no more. */
SIMGPU_API void simgpu_sites_watch(int on);
/* Returns how many there are, of which at most n are written. */
SIMGPU_API size_t simgpu_sites_list(struct simgpu_site *list_out, size_t n);
/* Calls of the entry whose texts begin with these return success and do nothing; NULL: no more. 0, or -1: no
 * such entry point. */
SIMGPU_API int simgpu_sites_drop(const struct simgpu_site *like);

#ifdef __cplusplus
}
#endif
#endif
