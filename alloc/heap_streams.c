/* heap_streams.c - the table of the heap's streams with their arenas.
 *
 * Every malloc looks its stream up, so the table is read without a lock. Entries are only ever added, each
 * published by one store once it is complete.
 */
#include <stdlib.h>
#include <string.h>

#include "alloc/heap_internal.h"

static size_t stream_slot(fcdp_stream stream, const heap_private *private) {
    uint64_t key = (uint64_t)(uintptr_t)stream ^ (uint64_t)(uintptr_t)private << 20;
    return (size_t)(key * 0x9e3779b97f4a7c15u >> 40) % HEAP_MAX_STREAMS;
}

static heap_stream *stream_find(fcdp_heap *heap, fcdp_stream stream, const heap_private *private) {
    for (size_t i = 0, at = stream_slot(stream, private); i < HEAP_MAX_STREAMS;
         i++, at = (at + 1) % HEAP_MAX_STREAMS) {
        heap_stream *found = atomic_load_explicit(&heap->streams[at], memory_order_acquire);
        if (!found || (found->stream == stream && found->private == private)) return found;
    }
    return NULL;
}

void fcdp__heap_stream_free(fcdp_heap *heap, heap_stream *of) {
    if (of->fence) fcdp__driver_event_destroy(heap->drv, of->fence);
    for (int small = 0; small < 2; small++) {
        fcdp__arena_destroy(of->arenas[small].blocks);
        fcdp__lock_destroy(&of->arenas[small].lock);
    }
    free(of);
}

/* Both arenas at once, so that a stream is in the table with both or not at all. */
static fcdp_status stream_make(fcdp_heap *heap, fcdp_stream stream, heap_private *private,
                               heap_stream **stream_out) {
    heap_stream *made = aligned_alloc(HEAP_CACHE_LINE, fcdp__round_up(sizeof *made, HEAP_CACHE_LINE));
    if (!made) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a stream's arenas");
    memset(made, 0, sizeof *made);
    made->stream = stream;
    made->private = private;
    fcdp_status status = FCDP_OK;
    for (int small = 0; small < 2; small++) {
        heap_arena *arena = &made->arenas[small];
        arena->heap = heap;
        arena->stream = stream;
        arena->private = private;
        arena->small = small;
        arena->sibling = &made->arenas[!small];
        fcdp__lock_init(&arena->lock, FCDP_RANK_ARENA);
        if (!status) status = fcdp__arena_create(heap->page_bytes, &arena->blocks);
    }
    if (status)
        fcdp__heap_stream_free(heap, made);
    else
        *stream_out = made;
    return status;
}

/* A stream that is in the table costs no lock. */
fcdp_status fcdp__heap_stream_of(fcdp_heap *heap, fcdp_stream stream, heap_private *private,
                                 heap_stream **stream_out) {
    *stream_out = stream_find(heap, stream, private);
    if (*stream_out) return FCDP_OK;
    fcdp_status status = FCDP_OK;
    fcdp__lock_acquire(&heap->lock);
    heap_stream *found = stream_find(heap, stream, private);
    bool is_new = !found;
    if (is_new && heap->n_streams == HEAP_MAX_STREAMS / 2)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED, "tensors on more than %d streams and private pools",
                            HEAP_MAX_STREAMS / 2);
    else if (is_new)
        status = stream_make(heap, stream, private, &found);
    if (!status && is_new) {
        size_t at = stream_slot(stream, private);
        while (atomic_load_explicit(&heap->streams[at], memory_order_relaxed))
            at = (at + 1) % HEAP_MAX_STREAMS;
        /* partners: stream_find, fcdp__heap_stream_at */
        atomic_store_explicit(&heap->streams[at], found, memory_order_release);
        heap->n_streams++;
    }
    fcdp__lock_release(&heap->lock);
    *stream_out = found;
    return status;
}

size_t fcdp__heap_arenas(fcdp_heap *heap, heap_arena **arenas_out) {
    size_t n = 0;
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        for (int small = 0; of && small < 2; small++) arenas_out[n++] = &of->arenas[small];
    }
    return n;
}
