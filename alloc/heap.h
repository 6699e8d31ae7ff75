/* heap.h - the caching, stream-aware allocator behind fcdp_alloc, on the page pool that regions use too.
 *
 * Every stream has two arenas (arena.h), one for blocks up to FCDP_HEAP_SMALL_BYTES and one for larger
 * blocks, each in address ranges of its own. A stream may reuse a block that it has freed at once, since it
 * orders the uses. A block that another stream has used (fcdp_heap_record_stream) is deferred until an event
 * of that stream. A hit takes one lock, the arena's, and calls no driver.
 *
 * A miss needs pages. While more than half of the budget is spare and no free bytes suffice, the pages are
 * new: handles of many pages (up to 64), which grow with what the arena has mapped and cost few driver calls.
 * After that, handles are single pages, which can move, and a block goes where it uses the fewest of them.
 * Pages come in this order:
 *
 *     1  idle pages of the pool, or new ones, while the pool's budget and the device allow
 *     2  the stream's own quiescent pages: no block lies on them, and every stream of the heap has finished
 *        the work that it had when they were freed. They are unmapped and mapped again where they are needed;
 *        a large handle is released.
 *     3  quiescent pages of other streams
 *     4  the pool's reclaimers: staging, free slots, clean regions (an unmap), regions to be stored first
 *     5  pages that are not quiescent yet: waits, for events first and then for the whole device
 *     6  FCDP_ERR_NO_DEVICE_MEM, with a text that lists the memory of each holder and says what would help
 *
 * The stream that freed a block orders its reuse there, but not an unmap. So pages move only behind events of
 * all streams ever passed to fcdp_heap_malloc or fcdp_heap_record_stream. The heap knows no
 * other stream: a program that uses a block on one must record it, or free the block after that use.
 *
 * No lock is held across a driver's map or unmap, a wait or a reclaim. The one exception is private_lock,
 * held as a reader across a wait: a wait would break a capture, so a capture begins after it. The heap is
 * itself a reclaimer of the pool, with steps 2, 3 and 5.
 *
 *     reserved = pages mapped in arenas = idle pages + pages in use,  allocated <= reserved
 *
 * All functions may be called from any thread, except destroy: during it no thread may be in the heap or in
 * fcdp__pool_take. A stream must live as long as the heap, as PyTorch's do, and must be one stream:
 * CU_STREAM_PER_THREAD is not, since it is another stream in every thread.
 */
#ifndef FCDP_HEAP_H
#define FCDP_HEAP_H

#include "alloc/arena.h"
#include "alloc/pages.h"

/* A larger one leaves less than two thirds of a page beside itself. Chosen by the replays of tools/replay,
 * where 768 to 960 KiB do equally well. */
enum { FCDP_HEAP_SMALL_BYTES = 768 << 10 };

enum { FCDP_HOLDER_TENSORS = 0 }; /* of the heap's pages (pages.h) */

typedef struct fcdp_heap fcdp_heap;

fcdp_status fcdp_heap_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_heap **heap_out) FCDP_MUST_CHECK;
/* Nothing of the heap may be in use any more, not even by the device. Frees live blocks too. */
void fcdp_heap_destroy(fcdp_heap *heap);

/* `bytes` of device memory, aligned to 512, first used on `stream`; 0 bytes: the null address. */
fcdp_status fcdp_heap_malloc(fcdp_heap *heap, size_t bytes, fcdp_stream stream,
                             fcdp_dptr *address_out) FCDP_MUST_CHECK;
/* FCDP_ERR_INVALID, with a text, for what is not a live block of this heap. The null address is ignored. */
fcdp_status fcdp_heap_free(fcdp_heap *heap, fcdp_dptr address) FCDP_MUST_CHECK;
/* `stream` uses the block too: when it is freed, it is not used again before what
 * is on that stream then has been done. */
fcdp_status fcdp_heap_record_stream(fcdp_heap *heap, fcdp_dptr address, fcdp_stream stream) FCDP_MUST_CHECK;
/* Wait for the streams that have freed something, give every unused page to the pool, and the pool's idle
 * pages to the driver. */
fcdp_status fcdp_heap_trim(fcdp_heap *heap) FCDP_MUST_CHECK;

/* For finding stale accesses: from here on blocks above FCDP_HEAP_SMALL_BYTES have pages of their own, which
 * are unmapped when all streams of the heap are done with a freed block (seen at the next call of the heap),
 * so that it faults there; the last `bytes` of such addresses are not used again. Before the first malloc. */
void fcdp_heap_set_quarantine(fcdp_heap *heap, size_t bytes);

/* Private pools, which PyTorch uses for CUDA graphs. ("Pool" alone is the pool of pages.) From begin to end,
 * mallocs on the streams that `covers` accepts go to the private pool, and its blocks serve that pool alone.
 * Its pages stay where they are, since a graph knows their addresses, until the pool has been released as
 * often as it has begun. Then other streams may use them, after a wait for the device: a graph may have run
 * on any stream.
 *
 * `covers` runs inside fcdp_heap_malloc and must not call the heap. It may throw a C++ exception, which
 * fcdp_heap_malloc lets through. While a private pool is open, the heap queries no stream and records no
 * event, since either would break a capture: memory freed meanwhile becomes quiescent later. */
typedef struct fcdp_private_id {
    uint64_t first, second;
} fcdp_private_id;
typedef bool (*fcdp_covers_fn)(void *ctx, fcdp_stream stream);
/* FCDP_ERR_INVALID: the pool has begun and not ended. It may end and begin again within a capture, and the
 * heap stays quiet in between. A capture that failed may leave its private pool open; the heap closes it when
 * memory runs short. Then `stale_ctx_out` gets the ctx of its begin, else NULL. */
fcdp_status fcdp_heap_private_begin(fcdp_heap *heap, fcdp_private_id id, fcdp_covers_fn covers, void *ctx,
                                    void **stale_ctx_out) FCDP_MUST_CHECK;
/* FCDP_ERR_INVALID: there is no such private pool, or it has not begun. `covers` is not called any
 * more; its ctx is the caller's again. */
fcdp_status fcdp_heap_private_end(fcdp_heap *heap, fcdp_private_id id, void **ctx_out) FCDP_MUST_CHECK;
fcdp_status fcdp_heap_private_release(fcdp_heap *heap, fcdp_private_id id) FCDP_MUST_CHECK;

/* ---- sleep ----
 *
 * Tensors leave the device, and come back to their addresses: for a job that shares a GPU with another that
 * computes in between (an inference engine). Asleep, nothing may use them, and a malloc there fails with
 * FCDP_ERR_INVALID; a free does what it always does. Each malloc has its thread's tag: 0, or what
 * fcdp_heap_set_tag has set. One thread at a time calls sleep and wake. */
uint32_t fcdp_heap_set_tag(uint32_t tag); /* the one before */
typedef struct fcdp_sleep_of {            /* whose tensors */
    bool all;
    uint32_t tag; /* unless all */
} fcdp_sleep_of;
typedef struct fcdp_sleep_counts {
    size_t live_bytes;   /* of live tensors */
    size_t copied_bytes; /* of these, those that were copied */
    size_t page_bytes;   /* of device pages that went, or came back */
    bool fell_asleep;    /* something was awake before */
} fcdp_sleep_counts;
/* FCDP_ERR_INVALID: a CUDA graph is captured with one of the heap's private pools, on whichever stream. */
fcdp_status fcdp_heap_check_capture(fcdp_heap *heap) FCDP_MUST_CHECK;
/* Fingerprints of n arrays in device memory, bytes[i] at arrays[i]; the host waits for them.
 * FCDP_ERR_UNSUPPORTED: there are none. */
typedef fcdp_status (*fcdp_read_fn)(void *ctx, const uint64_t *arrays, const size_t *bytes, size_t n,
                                    uint64_t *prints_out);
/* Copy the live bytes to pinned host memory, those that it has not had already (by `read`; NULL: all), unmap
 * every page, and give them to the driver. Waits for the device. FCDP_ERR_INVALID: a CUDA graph is captured,
 * or another thread allocates. FCDP_ERR_NO_HOST_MEM. On failure nothing is asleep, unless the
 * driver refuses that as well, with a warning: then wake them. */
fcdp_status fcdp_heap_sleep(fcdp_heap *heap, const fcdp_sleep_of *of, fcdp_read_fn read, void *ctx,
                            fcdp_sleep_counts *counts_out) FCDP_MUST_CHECK;
/* Map pages again, copy what is still live back, and wait. `keeps`: host memory keeps its bytes for the next
 * sleep; else it goes back to the system, in chunks of which nothing else is in use, and so does that of what
 * was awake already. FCDP_ERR_NO_DEVICE_MEM: others have it. On failure all sleep on; call it again. */
fcdp_status fcdp_heap_wake(fcdp_heap *heap, const fcdp_sleep_of *of, bool keeps,
                           fcdp_sleep_counts *counts_out) FCDP_MUST_CHECK;

/* Of the arenas for small blocks, or for large ones. */
typedef struct fcdp_heap_counts {
    size_t n_live, allocated_bytes, requested_bytes; /* live blocks; rounded to 512; as asked */
    size_t n_free, free_bytes;                       /* mapped, on nothing's behalf */
    /* in freed blocks that wait for events, or on their way */
    size_t busy_bytes;
    size_t asleep_bytes; /* of all these, those whose pages are away */
    /* Exact where one stream allocates; else at most the sum of the streams' own. Never above the heap's. */
    size_t peak_n_live, peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes;
    uint64_t n_mallocs, n_frees;                   /* ever */
    uint64_t malloc_bytes, malloc_requested_bytes; /* ever */
} fcdp_heap_counts;

typedef struct fcdp_heap_stats {
    fcdp_heap_counts large, small;
    /* of both; reserved: mapped pages */
    size_t allocated_bytes, requested_bytes, reserved_bytes, busy_bytes, n_live;
    size_t peak_allocated_bytes; /* at most 2 MiB per arena but one off the true peak */
    size_t peak_reserved_bytes;
    uint64_t n_mallocs, n_frees;           /* ever */
    uint64_t n_hits;                       /* mallocs that found a block of their size */
    uint64_t n_fits;                       /* mallocs that found a larger free block */
    uint64_t n_grows;                      /* mallocs that mapped pages */
    uint64_t n_pages_moved, n_pages_taken; /* mapped from elsewhere in the heap; from the pool */
    uint64_t n_waits, n_ooms;              /* for the device, in any call; mallocs that failed */
    uint64_t n_retries;                    /* mallocs that had to wait */
} fcdp_heap_stats;
void fcdp_heap_stats_get(fcdp_heap *heap, fcdp_heap_stats *stats_out);
/* Every peak is what is now. */
void fcdp_heap_reset_peaks(fcdp_heap *heap);

/* Every block that is mapped, in address order within a stream's arena. The heap is locked
 * arena by arena: `see` must not call it. */
typedef struct fcdp_heap_view {
    fcdp_stream stream;
    fcdp_private_id private_id; /* 0, 0: none */
    bool small;
    uint64_t span, address;
    size_t bytes, requested_bytes;
    fcdp_block_state state;
} fcdp_heap_view;
void fcdp_heap_walk(fcdp_heap *heap, void (*see)(void *ctx, const fcdp_heap_view *view), void *ctx);

/* ---- a device of this process ---- */

/* All layers share it, so that a gathered parameter and an activation take their pages from one pool. */
typedef struct fcdp_device {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_heap *heap; /* NULL: another allocator serves tensors */
} fcdp_device;

/* `sim_library` as in fcdp__driver_open. budget_bytes 0: what is free but `headroom_bytes`, as in
 * fcdp__pool_create_with_headroom. */
fcdp_status fcdp_device_open(fcdp_driver_kind kind, int ordinal, const char *sim_library, size_t budget_bytes,
                             size_t headroom_bytes, bool with_heap, fcdp_device *device_out) FCDP_MUST_CHECK;
/* Nothing of the device may be in use any more. A zeroed device counts as closed. */
void fcdp_device_close(fcdp_device *device);

#endif
