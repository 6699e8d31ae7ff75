/* driver.h - every CUDA call that FCDP makes. No layer above it knows CUDA's types.
 *
 * dlopen fills the table from libcuda.so.1 or from the simulated driver; FCDP links neither. A device address
 * has a type of its own, so that the host cannot dereference it by accident.
 */
#ifndef FCDP_DRIVER_H
#define FCDP_DRIVER_H

#include "base/options.h"

typedef struct fcdp_driver fcdp_driver;
typedef struct fcdp_dptr {
    uint64_t addr;
} fcdp_dptr; /* a device address */
/* a physical allocation (CUmemGenericAllocationHandle) */
typedef struct fcdp_phys {
    uint64_t handle;
} fcdp_phys;
/* CUstream; NULL is the legacy default stream */
typedef void *fcdp_stream;
typedef void *fcdp_event; /* CUevent, timing disabled */

static inline fcdp_dptr fcdp__dptr_add(fcdp_dptr p, size_t bytes) {
    return (fcdp_dptr){p.addr + bytes};
}

/* Load the driver and take device `ordinal`'s primary context. AUTO: CUDA where a device answers, else sim.
 * The sim library is $FCDP_SIM_LIBRARY, else `sim_library` (may be NULL). FCDP_ERR_UNSUPPORTED with a text
 * that says what to do when the requested driver or device is missing. Later calls, from any thread, bind the
 * context for their own duration and then restore the thread's own context. */
fcdp_status fcdp__driver_open(fcdp_driver_kind kind, int ordinal, const char *sim_library,
                              fcdp_driver **drv_out) FCDP_MUST_CHECK;
void fcdp__driver_close(fcdp_driver *drv);
unsigned long fcdp__driver_calls(const fcdp_driver *drv); /* made so far, contexts aside */
bool fcdp__driver_is_sim(const fcdp_driver *drv);
size_t fcdp__driver_page_bytes(const fcdp_driver *drv); /* mapping granularity, 2 MiB */
int fcdp__driver_numa_node(const fcdp_driver *drv);   /* the device's, as the driver says; -1: it does not */
const char *fcdp__driver_pci(const fcdp_driver *drv); /* as in /sys/bus/pci/devices; "": unknown, or sim */
fcdp_status fcdp__driver_mem_info(fcdp_driver *drv, size_t *free_bytes_out,
                                  size_t *total_bytes_out) FCDP_MUST_CHECK;

/* call(arg) with the device's context current on this thread: for a library beside the driver, which uses
 * the thread's current device. */
fcdp_status fcdp__driver_with_context(fcdp_driver *drv, void (*call)(void *arg), void *arg) FCDP_MUST_CHECK;
/* The device's context as a value, for a thread that may outlive the driver. Binding it makes it the calling
 * thread's context for good. */
typedef struct fcdp_driver_context {
    struct CUctx_st *ctx;
    int (*set)(struct CUctx_st *ctx);
} fcdp_driver_context;
fcdp_driver_context fcdp__driver_context(const fcdp_driver *drv);
void fcdp__driver_context_take(fcdp_driver_context context);

/* Physical memory and ranges; rules: facts of cuMemMap (whole handles,
 * offset 0), cuMemUnmap (whole mappings). */
fcdp_status fcdp__driver_phys_create(fcdp_driver *drv, size_t bytes, fcdp_phys *phys_out) FCDP_MUST_CHECK;
/* Pages of host memory, on NUMA node `numa_node`, that can be mapped like device pages; they take no device
 * memory. FCDP_ERR_NO_HOST_MEM: the node has none left. Many systems refuse otherwise (drivers before CUDA
 * 12.2, containers without SYS_NICE, nodes without CPUs), and no attribute tells. */
fcdp_status fcdp__driver_phys_create_host(fcdp_driver *drv, int numa_node, size_t bytes,
                                          fcdp_phys *phys_out) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_phys_release(fcdp_driver *drv, fcdp_phys phys) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_range_reserve(fcdp_driver *drv, size_t bytes, fcdp_dptr *base_out) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_range_free(fcdp_driver *drv, fcdp_dptr base, size_t bytes) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_map(fcdp_driver *drv, fcdp_dptr at, size_t bytes, fcdp_phys phys) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes) FCDP_MUST_CHECK;
/* Read-write for this device, one contiguous fully mapped range. NOT_READY is retried after a synchronise. */
fcdp_status fcdp__driver_set_access(fcdp_driver *drv, fcdp_dptr at, size_t bytes) FCDP_MUST_CHECK;

/* Copies, asynchronous on `stream` (with unpinned host memory the driver may make them synchronous). */
fcdp_status fcdp__driver_copy_h2d(fcdp_driver *drv, fcdp_dptr dst, const void *src, size_t bytes,
                                  fcdp_stream stream) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_copy_d2h(fcdp_driver *drv, void *dst, fcdp_dptr src, size_t bytes,
                                  fcdp_stream stream) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_copy_d2d(fcdp_driver *drv, fcdp_dptr dst, fcdp_dptr src, size_t bytes,
                                  fcdp_stream stream) FCDP_MUST_CHECK;
/* `n` rows of `bytes` each, which begin at one stride from each other: strides >= bytes. */
typedef struct fcdp_rows {
    fcdp_dptr dst, src;
    size_t dst_stride, src_stride, bytes, n;
} fcdp_rows;
fcdp_status fcdp__driver_copy_rows(fcdp_driver *drv, const fcdp_rows *rows,
                                   fcdp_stream stream) FCDP_MUST_CHECK;

/* non-blocking, high priority */
fcdp_status fcdp__driver_stream_create(fcdp_driver *drv, fcdp_stream *stream_out) FCDP_MUST_CHECK;
void fcdp__driver_stream_destroy(fcdp_driver *drv, fcdp_stream stream);
/* The thread sleeps while it waits, if the driver has an event to spare. */
fcdp_status fcdp__driver_stream_sync(fcdp_driver *drv, fcdp_stream stream) FCDP_MUST_CHECK;
/* Wait for all streams of the device. It may spin, as the framework has set the context up, so it is for
 * memory pressure and for the end. */
fcdp_status fcdp__driver_sync(fcdp_driver *drv) FCDP_MUST_CHECK;
/* FCDP_OK: idle, or FCDP_PENDING */
fcdp_status fcdp__driver_stream_query(fcdp_driver *drv, fcdp_stream stream) FCDP_MUST_CHECK;
/* FCDP_OK, or FCDP_PENDING: a graph is captured */
fcdp_status fcdp__driver_stream_capture_query(fcdp_driver *drv, fcdp_stream stream) FCDP_MUST_CHECK;
/* Set the calling thread's capture mode; *mode becomes the previous one. In the default mode a query or a
 * wait fails and breaks the graph that another thread captures; in the relaxed mode it does neither. */
enum { FCDP_CAPTURE_MODE_RELAXED = 2 };
fcdp_status fcdp__driver_capture_mode_exchange(fcdp_driver *drv, int *mode) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_stream_wait(fcdp_driver *drv, fcdp_stream stream, fcdp_event event) FCDP_MUST_CHECK;
/* An event for streams to wait for and for queries. A host thread that waits for it may spin. */
fcdp_status fcdp__driver_event_create(fcdp_driver *drv, fcdp_event *event_out) FCDP_MUST_CHECK;
void fcdp__driver_event_destroy(fcdp_driver *drv, fcdp_event event);
fcdp_status fcdp__driver_event_record(fcdp_driver *drv, fcdp_event event, fcdp_stream stream) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_event_sync(fcdp_driver *drv, fcdp_event event) FCDP_MUST_CHECK;
/* FCDP_OK or FCDP_PENDING */
fcdp_status fcdp__driver_event_query(fcdp_driver *drv, fcdp_event event) FCDP_MUST_CHECK;
/* An event for host threads: fcdp__driver_event_sync sleeps. It wakes up tens of microseconds later than a
 * spin would. */
fcdp_status fcdp__driver_event_create_blocking(fcdp_driver *drv, fcdp_event *event_out) FCDP_MUST_CHECK;
/* Each that is NULL. Those that were made before a failure stay, for the next try. */
fcdp_status fcdp__driver_events_make_blocking(fcdp_driver *drv, fcdp_event *const *events,
                                              size_t n) FCDP_MUST_CHECK;

/* Timing events, for measurements. A failure here fails nothing else and writes no text. */
fcdp_status fcdp__driver_timer_create(fcdp_driver *drv, fcdp_event *event_out) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_timer_record(fcdp_driver *drv, fcdp_event event, fcdp_stream stream) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_timer_wait(fcdp_driver *drv, fcdp_stream stream, fcdp_event event) FCDP_MUST_CHECK;
/* Nanoseconds of the device from `start` to `end`, exact to 2^-24 of their distance. FCDP_PENDING: one of
 * them has not passed. FCDP_ERR_UNSUPPORTED: the driver has no such call. */
fcdp_status fcdp__driver_timer_elapsed(fcdp_driver *drv, fcdp_event start, fcdp_event end,
                                       double *ns_out) FCDP_MUST_CHECK;

/* `function(context)` runs in the stream's order, on a thread of the driver's; it must not call the driver.
 * It does not run once the device has failed, so it must not be the only place that frees something. */
typedef void (*fcdp_host_function)(void *context);
fcdp_status fcdp__driver_host_function(fcdp_driver *drv, fcdp_stream stream, fcdp_host_function function,
                                       void *context) FCDP_MUST_CHECK;

/* The stream writes a 32-bit word once all before it is done and visible, or waits until a word w has
 * (int32_t)(w - value) >= 0. The word is in device memory, or in pinned host memory at its device address.
 * FCDP_ERR_UNSUPPORTED: the driver is older than CUDA 11.7, or the device cannot. CUDA does not see this
 * order, so record events as well where both ends belong to this process. */
fcdp_status fcdp__driver_write_value32(fcdp_driver *drv, fcdp_stream stream, fcdp_dptr word,
                                       uint32_t value) FCDP_MUST_CHECK;
fcdp_status fcdp__driver_wait_value32(fcdp_driver *drv, fcdp_stream stream, fcdp_dptr word,
                                      uint32_t value) FCDP_MUST_CHECK;
/* Can streams of this driver do both? */
bool fcdp__driver_has_values(const fcdp_driver *drv);
/* Where the device sees a byte of pinned host memory: on most devices at the same address. */
fcdp_status fcdp__driver_host_dptr(fcdp_driver *drv, void *host, fcdp_dptr *at_out) FCDP_MUST_CHECK;

/* One registration's largest size: newer drivers refuse 512 GiB and more. 64 GiB; tests lower it. */
extern size_t fcdp__driver_pin_chunk_bytes;
/* Page-lock host memory for asynchronous copies (cuMemHostRegister, portable and mapped for the device, in
 * chunks; all or none). `at` page aligned. FCDP_ERR_NO_HOST_MEM with the limit (RLIMIT_MEMLOCK) in the text
 * when that is the cause.
 *
 * *stay_bytes_out: on failure, how many bytes from `at` on stay registered, since undoing their registration
 * failed too, twice. They must stay mapped: CUDA would take another mapping there for these pages. */
fcdp_status fcdp__driver_host_pin(fcdp_driver *drv, void *at, size_t bytes,
                                  size_t *stay_bytes_out) FCDP_MUST_CHECK;
/* Undo fcdp__driver_host_pin of `bytes`, or of what it or this left. Each chunk is tried twice, as a failure
 * may be transient. *stay_bytes_out: as above. */
fcdp_status fcdp__driver_host_unpin(fcdp_driver *drv, void *at, size_t bytes,
                                    size_t *stay_bytes_out) FCDP_MUST_CHECK;
/* Registrations made, and undone, so far, and the bytes that are registered now. */
typedef struct fcdp_driver_pins {
    uint64_t n_made, n_undone, bytes;
} fcdp_driver_pins;
fcdp_driver_pins fcdp__driver_pins_get(const fcdp_driver *drv);

/* ---- kernels ---- */

/* A module of one kernel with one parameter: the address of an array of tasks in pinned host memory, one
 * for each block. A task begins with ranges, each an address and a number of bytes (a uint64_t each): those
 * that its block reads, then those that it writes; beside them it writes nothing but its task. `run` is the
 * block's work in C, for the simulated driver, which compiles nothing. */
typedef struct fcdp_kernel_source {
    const char *image;  /* PTX, ends with a 0 */
    const char *entry;  /* the kernel's name */
    uint32_t n_threads; /* of a block */
    size_t task_bytes;
    uint32_t n_read, n_written; /* ranges */
    void (*run)(void *task);
} fcdp_kernel_source;
typedef struct fcdp_kernel {
    void *module, *function; /* CUmodule, CUfunction; NULL: not loaded */
    uint32_t n_threads;
} fcdp_kernel;
/* FCDP_ERR_UNSUPPORTED: the driver lacks the calls, or does not compile the image for this device. */
fcdp_status fcdp__driver_kernel_load(fcdp_driver *drv, const fcdp_kernel_source *source,
                                     fcdp_kernel *kernel_out) FCDP_MUST_CHECK;
/* Only when the host has seen all launches end. */
void fcdp__driver_kernel_unload(fcdp_driver *drv, const fcdp_kernel *kernel);
/* `tasks`: their device address (fcdp__driver_host_dptr). They stay there until the kernel has run, with the
 * ranges that they have now. */
fcdp_status fcdp__driver_launch(fcdp_driver *drv, const fcdp_kernel *kernel, fcdp_dptr tasks,
                                uint32_t n_tasks, fcdp_stream stream) FCDP_MUST_CHECK;

/* ---- the simulated driver's reports, checks and timeline; on CUDA these do nothing ---- */

typedef struct fcdp_access {
    fcdp_dptr at;
    size_t bytes;
    bool writes;
} fcdp_access;

/* Label the calling thread's work from here on; copied, up to 47 bytes. NULL: no label. */
void fcdp__driver_annotate(fcdp_driver *drv, const char *label);
void fcdp__driver_stream_name(fcdp_driver *drv, fcdp_stream stream, const char *name);
/* Declare what the calling thread's next host function reads and writes. It is checked like a copy. */
void fcdp__driver_announce(fcdp_driver *drv, const fcdp_access *accesses, size_t n);
/* Modelled times, so that a thread which does a host function's work takes as long as that would: the running
 * host function hands it over (returns the time; 0 on CUDA), and the calling thread's begins, no sooner. */
uint64_t fcdp__driver_work_hand(const fcdp_driver *drv);
void fcdp__driver_work_begin(const fcdp_driver *drv, uint64_t from_ns);
/* The modelled time that the calling thread's work has come to; 0 on CUDA. */
uint64_t fcdp__driver_work_here(const fcdp_driver *drv);
/* It ends there, for a thread that waits for this one. */
uint64_t fcdp__driver_work_end(const fcdp_driver *drv);
/* It goes on from `ns`, if that is later. */
void fcdp__driver_work_until(const fcdp_driver *drv, uint64_t ns);
/* On CUDA too: a store with release, which ends that work. What the calling thread has written before is
 * there for what a stream does behind fcdp__driver_wait_value32. */
void fcdp__driver_word_store(const fcdp_driver *drv, uint32_t *word, uint32_t value);
/* A function of the simulated driver by its name, for tools beside it; NULL: no such function, or CUDA. */
void *fcdp__driver_sim_symbol(const fcdp_driver *drv, const char *name);

#endif
