/* heap_internal.h - what the heap's files share.
 *
 *     heap.c            the calls, the tables of streams and of address ranges
 *     heap_pages.c      pages for a miss: found, mapped, unmapped
 *     heap_quiescent.c  freed memory, until the device has passed its uses
 *     heap_private.c    private pools: what a captured graph's addresses need
 *     heap_sleep.c      tensors leave the device and come back
 *     heap_stats.c      reports
 */
#ifndef FCDP_HEAP_INTERNAL_H
#define FCDP_HEAP_INTERNAL_H

#include <stdatomic.h>

#include "alloc/heap.h"

enum { HEAP_MAX_STREAMS = 2048 };

typedef struct heap_event {
    struct heap_event *next;
    fcdp_event event;
} heap_event;

/* What other streams do with a block; its tag while it lives. Once it is freed, on
 * the heap's list until they are done. */
typedef struct heap_uses {
    struct heap_uses *next;
    struct heap_arena *arena;
    fcdp_block *block;
    heap_event *events; /* those that have not passed */
    bool awaits_all;    /* every stream of the heap, too: it goes to quarantine; none has an event yet */
    size_t n;           /* streams that have no event yet: a capture is under way, or it lives */
    fcdp_stream streams[];
} heap_uses;

typedef struct heap_range {
    fcdp_dptr reserved;
    size_t reserved_bytes;
    uint64_t base; /* the arena's part of it */
    size_t bytes;
    /* by index from base; handle 0: a hole. Of busy blocks: the thread that made
     * them busy, else under the arena's lock */
    fcdp_phys *pages;
    struct heap_saved *saved; /* by index; NULL: it has never been asleep. heap_sleep.c's */
} heap_range;

/* heap_sleep.c. Of one device page: what host memory has of it. */
typedef struct heap_saved {
    char *host; /* a page; NULL: none */
    uint64_t print;
    bool is_valid; /* the host's page has what it says, and `print` is its */
    bool is_away;  /* the device's page is unmapped, until it wakes */
    bool is_back;  /* it is mapped anew, and has no bytes yet */
    bool in_use;   /* within a call */
} heap_saved;
typedef struct heap_chunk heap_chunk;
typedef struct heap_sleep { /* one thread at a time */
    fcdp_stream stream;
    heap_chunk *chunks;
    char **free_pages;
    size_t n_pages, n_free; /* host pages, ever; not in use */
    bool warned;
    bool all; /* everything was put to sleep, and not woken; under the heap's lock */
} heap_sleep;

typedef struct heap_private {
    struct heap_private *next;
    fcdp_private_id id;
    _Atomic size_t n_uses;   /* begun and not released: its pages stay */
    uint64_t n_begins;       /* ever, under any id; guarded by private_lock */
    _Atomic bool has_served; /* since it has begun: a malloc whose stream is in the table, or its end */
    /* guarded by the heap's private_lock */
    bool open;    /* mallocs may go to it */
    bool begun;   /* and not ended by its owner */
    bool counted; /* in n_open: open, or ended while its streams are captured still. open => counted */
    fcdp_covers_fn covers;
    void *ctx;
} heap_private;

typedef struct heap_arena {
    fcdp_heap *heap;
    fcdp_stream stream;
    heap_private *private; /* NULL: of no private pool */
    uint32_t tag;
    bool small;
    /* its pages are away, or going: nothing is allocated there. Written under `lock` */
    _Atomic bool asleep;
    struct heap_arena *sibling; /* the stream's other one */
    fcdp_lock lock;
    /* guarded by lock */
    fcdp_arena *blocks;
    size_t n_growths;       /* under way: a search for pages, without the lock */
    size_t reported;        /* live bytes that the heap's `allocated` knows of */
    size_t most_unreported; /* most live bytes since then */
    uint64_t n_mallocs, n_frees, n_hits, n_fits, n_grows, malloc_bytes, malloc_requested_bytes;
    size_t peak_n_live, peak_live_bytes, peak_requested_bytes, peak_mapped_bytes; /* since they were reset */
    uint64_t quiescent_clock; /* what was freed up to then is quiescent */
    /* guarded by the heap's fence_lock */
    uint64_t fence_clock; /* when the fence was begun */
} heap_arena;

typedef struct heap_stream { /* in a private pool, or in none; of one tag */
    fcdp_stream stream;
    uint32_t tag;
    heap_private *private;
    heap_arena arenas[2]; /* large, small */
    /* guarded by the heap's fence_lock */
    fcdp_event fence; /* created when first needed */
    bool fence_waits; /* it was recorded for the heap's fence, and has not been seen to have passed */
} heap_stream;

typedef struct heap_quarantined { /* a freed block without pages; its addresses are not reused yet */
    struct heap_quarantined *next;
    heap_arena *arena;
    fcdp_block *block;
} heap_quarantined;

/* The fields that every hit reads are on other cache lines than those that misses and reports write. */
enum { HEAP_CACHE_LINE = 64 };

struct fcdp_heap {
    fcdp_driver *drv;
    fcdp_pool *pool;
    size_t page_bytes, quarantine_bytes;              /* the second: 0 is off */
    _Atomic size_t n_open;                            /* private pools that a capture may be using */
    _Atomic(heap_arena *) *granules;                  /* by address >> 30; set once */
    _Atomic(heap_stream *) streams[HEAP_MAX_STREAMS]; /* open addressing; set once */
    _Alignas(HEAP_CACHE_LINE) _Atomic size_t allocated;
    _Atomic size_t peak_allocated, n_pages, peak_pages;
    _Atomic uint64_t n_moved, n_taken, n_waits, n_retries, n_ooms;
    _Atomic size_t n_deferred, n_searching; /* searching: threads that look for pages */
    /* pages given to the pool, ever: whether another attempt could end differently */
    _Atomic uint64_t n_returns;
    /* A reader holds it while `covers` runs and while a stream is queried or an event recorded. So a pool
     * ends when no thread is in its `covers`, and begins when no thread queries a stream. After an arena's
     * lock. */
    pthread_rwlock_t private_lock;
    heap_private *privates; /* guarded by private_lock */
    fcdp_lock fence_lock;   /* before an arena's */
    bool has_fence;         /* begun and not passed; guarded by fence_lock */
    fcdp_lock lock;
    /* guarded by lock */
    size_t n_streams;
    heap_event *idle_events;
    heap_quarantined *quarantine, **quarantine_end; /* oldest first */
    size_t quarantined_bytes;
    heap_uses *deferred;    /* freed blocks that other streams still use */
    size_t n_checking;      /* threads that have taken this list away, to check it */
    pthread_cond_t checked; /* one of them is done */
    heap_sleep sleep;
};

/* With the arena's lock. */
static inline size_t fcdp__heap_mapped_bytes(const heap_arena *arena) {
    const fcdp_arena_stats *of = fcdp__arena_stats(arena->blocks);
    return of->live_bytes + of->free_bytes + of->quick_bytes + of->busy_bytes;
}

static inline void fcdp__heap_peak_raise(_Atomic size_t *peak, size_t value) {
    size_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < value && !atomic_compare_exchange_weak_explicit(peak, &seen, value, memory_order_relaxed,
                                                                  memory_order_relaxed)) {
    }
}

/* Its pages stay where they are. */
static inline bool fcdp__heap_is_pinned(const heap_arena *arena) {
    return arena->private && atomic_load_explicit(&arena->private->n_uses, memory_order_relaxed) > 0;
}

/* One of HEAP_MAX_STREAMS places; NULL: nothing is there. Partner: stream_of. */
static inline heap_stream *fcdp__heap_stream_at(fcdp_heap *heap, size_t place) {
    return atomic_load_explicit(&heap->streams[place], memory_order_acquire);
}

static inline bool fcdp__heap_is_capturing(const fcdp_heap *heap) {
    return atomic_load_explicit(&heap->n_open, memory_order_relaxed) > 0;
}

/* heap.c */
/* The arena's live bytes to the heap's counts, with the arena's lock: at once, or when they have changed by
 * much. */
void fcdp__heap_live_report(heap_arena *arena, bool at_once);

/* The arenas of all streams: at most 2 * HEAP_MAX_STREAMS. */
size_t fcdp__heap_arenas(fcdp_heap *heap, heap_arena **arenas_out);

/* heap_stats.c */
/* How messages describe the heap's pages. */
extern const fcdp_holder_words fcdp__heap_words;
/* The failure of a malloc of `bytes`, for which `n_missing` pages could not be found. */
fcdp_status fcdp__heap_out_of_memory(fcdp_heap *heap, size_t bytes, size_t n_missing) FCDP_MUST_CHECK;

/* heap_private.c */
/* The open pool that mallocs on `stream` go to; NULL: none. */
heap_private *fcdp__heap_private_covering(fcdp_heap *heap, fcdp_stream stream);
/* End the pools whose captures have ended without them. True: there were some. */
bool fcdp__heap_privates_end_dead(fcdp_heap *heap);

/* heap_quiescent.c */
/* Find what is quiescent by now, without waiting, and begin a fence if some freed memory is not. */
void fcdp__heap_quiesce(fcdp_heap *heap);
bool fcdp__heap_arena_is_quiescent(heap_arena *arena);
/* One wait, for deferred blocks and for the fence that is under way: it was begun earlier, and lets the
 * device go on. With `whole_device`, or without a fence, for all work of the device: that covers streams
 * that the heap was never given, and graphs. False: nothing more could be had by waiting, or a capture
 * is under way, or the driver failed. */
bool fcdp__heap_await(fcdp_heap *heap, bool whole_device);
/* The second of these alone. */
bool fcdp__heap_device_quiesce(fcdp_heap *heap);
/* Of whole pages, which are unmapped when it is freed. */
bool fcdp__heap_quarantines(const heap_arena *arena, const fcdp_block *block);
/* `block`, busy and with a tag, is given back once the streams of its tag have done what is on them now. */
void fcdp__heap_defer(heap_arena *arena, fcdp_block *block);
/* Free the deferred blocks that no stream uses any more. */
void fcdp__heap_deferred_poll(fcdp_heap *heap);
void fcdp__heap_deferred_destroy(fcdp_heap *heap);
void fcdp__heap_quarantine_destroy(fcdp_heap *heap);

/* heap_sleep.c */
fcdp_status fcdp__heap_asleep_fail(void) FCDP_MUST_CHECK;
void fcdp__heap_sleep_destroy(fcdp_heap *heap);

/* heap_pages.c */
/* `n` more pages are mapped, or on their way to be. */
void fcdp__heap_pages_add(fcdp_heap *heap, size_t n);
/* A busy block's pages, or with `as_one` the handle that they are, off their place. False: the driver
 * refuses, nothing has changed. */
bool fcdp__heap_block_unmap(fcdp_heap *heap, const fcdp_block *block, bool as_one, fcdp_phys *pages_out);
/* `pages` under the growth's holes; a handle of several pages is repeated: in each hole they are handles of
 * `n_each` pages, and a smaller one for the rest. On failure they are the pool's again and none is mapped,
 * or *stuck_out: the driver refuses to take some away. */
fcdp_status fcdp__heap_map(fcdp_heap *heap, const fcdp_growth *growth, const fcdp_phys *pages, size_t n_each,
                           bool *stuck_out) FCDP_MUST_CHECK;
/* `n` unmapped pages to the pool, in such handles. */
void fcdp__heap_pages_give(fcdp_heap *heap, size_t n, const fcdp_phys *pages, size_t n_each);
/* `n` pages for a malloc of `bytes` in `arena`, in the order of pressure: all or none. */
fcdp_status fcdp__heap_pages_find(heap_arena *arena, size_t n, size_t bytes,
                                  fcdp_phys *pages_out) FCDP_MUST_CHECK;
/* New handles for a growth, as fcdp__heap_map wants them: all or FCDP_PENDING. */
fcdp_status fcdp__heap_handles_find(fcdp_heap *heap, const fcdp_growth *growth, size_t n_each,
                                    fcdp_phys *pages_out) FCDP_MUST_CHECK;
/* How many pages a new handle for a block of `bytes` in `arena` has; 0: memory is short, each page counts. */
size_t fcdp__heap_handle_pages(heap_arena *arena, size_t bytes);
/* The pool's reclaimers, and what it asks of pages that nothing lies on. */
size_t fcdp__heap_reclaim(void *heap, size_t n_pages);
size_t fcdp__heap_reclaim_waiting(void *heap, size_t n_pages);
size_t fcdp__heap_idle(void *ctx);

#endif
