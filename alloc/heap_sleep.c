/* heap_sleep.c - tensors leave the device, and come back to their addresses.
 *
 * A page's live bytes go to a page of host memory, pinned, at the same place in it; then the device's page is
 * unmapped, and given to the pool. The blocks stay as they are: what is freed meanwhile becomes free without
 * a page, and nothing is allocated in an arena that is asleep. Waking maps a page under each address that had
 * one, in handles of the same sizes, and copies what is still live.
 *
 * The host's page stays beside the device's after waking, with a fingerprint of what it has. When the
 * device's has the same fingerprint at the next sleep, over the same blocks, it is not copied again.
 *
 * Sleeping waits for the whole device first, so no stream uses what is copied. No lock is held across a
 * driver's call: `asleep` keeps the arena's pages as they are.
 */
#include "alloc/heap_internal.h"
#include "alloc/trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/size.h"

/* ---- host pages ---- */

/* Pinned as one. A copy of several pages stays within a chunk, as CUDA takes no other. */
enum { CHUNK_PAGES = 16 };
struct heap_chunk {
    heap_chunk *next;
    char *at;
    size_t bytes;
    bool pinned;
};

/* Nothing is lost that way: addresses that are pinned must stay mapped. */
static void chunk_free(fcdp_heap *heap, heap_chunk *chunk) {
    size_t stay_bytes = 0;
    if (chunk->pinned && fcdp__driver_host_unpin(heap->drv, chunk->at, chunk->bytes, &stay_bytes))
        fcdp__log(FCDP_LOG_WARN,
                  "sleep: %s of host memory stay in use, and pinned, until the process ends: %s",
                  fcdp__size_text(chunk->bytes).s, fcdp_error_text());
    if (stay_bytes == 0) munmap(chunk->at, chunk->bytes);
    free(chunk);
}

static fcdp_status chunk_add(fcdp_heap *heap) {
    heap_sleep *sleep = &heap->sleep;
    heap_chunk *chunk = calloc(1, sizeof *chunk);
    size_t bytes = CHUNK_PAGES * heap->page_bytes, stay_bytes;
    char **pages = realloc(sleep->free_pages, (sleep->n_pages + CHUNK_PAGES) * sizeof *pages);
    if (pages) sleep->free_pages = pages;
    char *at = chunk && pages ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                              : MAP_FAILED;
    if (at == MAP_FAILED) {
        int error = errno;
        free(chunk);
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory (%s) for tensors that sleep: %s",
                          fcdp__size_text(bytes).s, strerror(error));
    }
    (void)madvise(at, bytes, MADV_HUGEPAGE);
    (void)madvise(at, bytes, MADV_DONTFORK); /* behind a fork, a write would move pages that are pinned */
    *chunk = (heap_chunk){.next = sleep->chunks, .at = at, .bytes = bytes};
    chunk->pinned = fcdp__driver_host_pin(heap->drv, at, bytes, &stay_bytes) == FCDP_OK;
    if (!chunk->pinned && stay_bytes) { /* in part, and the driver would not undo that */
        free(chunk);
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "host memory for tensors that sleep is pinned in part: %s",
                          fcdp_error_text());
    }
    if (!chunk->pinned && !sleep->warned)
        fcdp__log(FCDP_LOG_WARN,
                  "sleep: host memory is not pinned, so copies are slower; this is said once: %s",
                  fcdp_error_text());
    sleep->warned = sleep->warned || !chunk->pinned;
    sleep->chunks = chunk;
    sleep->n_pages += CHUNK_PAGES;
    for (size_t i = CHUNK_PAGES; i-- > 0;) sleep->free_pages[sleep->n_free++] = at + i * heap->page_bytes;
    return FCDP_OK;
}

/* None of their pages is in use. */
static void chunks_free(fcdp_heap *heap) {
    while (heap->sleep.chunks) {
        heap_chunk *chunk = heap->sleep.chunks;
        heap->sleep.chunks = chunk->next;
        chunk_free(heap, chunk);
    }
    heap->sleep.n_pages = heap->sleep.n_free = 0;
}

static int highest_first(const void *a, const void *b) {
    const char *x = *(char *const *)a, *y = *(char *const *)b;
    return (x < y) - (x > y);
}

/* Those of which no page is in use. The free pages are in order then, so that a chunk's are side by side, and
 * neighbours are taken together again. */
static void chunks_free_idle(fcdp_heap *heap) {
    heap_sleep *sleep = &heap->sleep;
    if (sleep->n_free) qsort(sleep->free_pages, sleep->n_free, sizeof *sleep->free_pages, highest_first);
    for (heap_chunk **link = &sleep->chunks; *link;) {
        heap_chunk *chunk = *link;
        size_t from = 0, to = sleep->n_free; /* the first page that is not above the chunk lies between */
        while (from < to) {
            size_t mid = from + (to - from) / 2;
            if (sleep->free_pages[mid] >= chunk->at + chunk->bytes)
                from = mid + 1;
            else
                to = mid;
        }
        size_t behind = from + CHUNK_PAGES;
        if (behind > sleep->n_free || sleep->free_pages[behind - 1] != chunk->at) {
            link = &chunk->next;
            continue;
        }
        memmove(&sleep->free_pages[from], &sleep->free_pages[behind],
                (sleep->n_free - behind) * sizeof *sleep->free_pages);
        sleep->n_free -= CHUNK_PAGES;
        sleep->n_pages -= CHUNK_PAGES;
        *link = chunk->next;
        chunk_free(heap, chunk);
    }
}

static void saved_drop(fcdp_heap *heap, heap_saved *saved) {
    if (saved->host) heap->sleep.free_pages[heap->sleep.n_free++] = saved->host;
    saved->host = NULL;
    saved->is_valid = false;
}

/* Neighbours in address order get neighbours, as long as nothing has come back. */
static fcdp_status saved_need(fcdp_heap *heap, heap_saved *saved) {
    fcdp_status status = saved->host || heap->sleep.n_free ? FCDP_OK : chunk_add(heap);
    if (!status && !saved->host) saved->host = heap->sleep.free_pages[--heap->sleep.n_free];
    return status;
}

static bool chunk_is_same(const fcdp_heap *heap, const char *a, const char *b) {
    for (const heap_chunk *chunk = heap->sleep.chunks; chunk; chunk = chunk->next)
        if (a >= chunk->at && a < chunk->at + chunk->bytes)
            return b >= chunk->at && b < chunk->at + chunk->bytes;
    return false;
}

/* ---- what lives ---- */

/* Live bytes of one page. */
typedef struct piece {
    heap_saved *saved;
    uint64_t address;
    size_t offset_bytes, bytes; /* in the page */
} piece;

typedef struct pieces {
    piece *at;
    size_t n, room;
} pieces;

static bool piece_add(pieces *list, piece added) {
    if (list->n == list->room) {
        size_t room = 2 * list->room + 256;
        piece *at = realloc(list->at, room * sizeof *at);
        if (!at) return false;
        list->at = at;
        list->room = room;
    }
    list->at[list->n++] = added;
    return true;
}

static bool range_need_saved(const fcdp_heap *heap, heap_range *range) {
    if (!range->saved) range->saved = calloc(range->bytes / heap->page_bytes, sizeof *range->saved);
    return range->saved != NULL;
}

/* Every live block of the arena, page by page, in address order within a span. `sleeps`: no block may be on
 * its way; to a wake, one that waits for an event is as good as freed. The arena's lock is held. */
static fcdp_status pieces_collect(const heap_arena *arena, bool sleeps, pieces *list) {
    const size_t page = arena->heap->page_bytes;
    bool ok = true, is_busy = sleeps && arena->n_growths > 0;
    for (const fcdp_span *span = fcdp__arena_spans(arena->blocks); span; span = span->next) {
        heap_range *range = span->owner;
        ok = ok && range_need_saved(arena->heap, range);
        for (const fcdp_block *block = span->first; block && ok; block = block->after) {
            is_busy = is_busy || (sleeps && block->state == FCDP_BLOCK_BUSY && !block->unmapped);
            for (uint64_t at = block->address, end = at + block->bytes;
                 block->state == FCDP_BLOCK_LIVE && at < end && ok;) {
                size_t offset = (at - range->base) % page;
                size_t bytes = end - at < page - offset ? end - at : page - offset;
                ok = piece_add(list, (piece){&range->saved[(at - range->base) / page], at, offset, bytes});
                at += bytes;
            }
        }
    }
    if (is_busy)
        return fcdp__fail(FCDP_ERR_INVALID,
                          "another thread allocates or frees tensors: sleep when none does");
    return ok ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no host memory to list the live tensors");
}

/* ---- copies ---- */

static uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

/* Of each piece's bytes on the device; NULL: they are not compared. */
static fcdp_status prints_take(const pieces *list, fcdp_read_fn read, void *ctx, uint64_t **prints_out) {
    *prints_out = NULL;
    if (!read || list->n == 0) return FCDP_OK;
    uint64_t *arrays = malloc(list->n * sizeof *arrays), *prints = malloc(list->n * sizeof *prints);
    size_t *bytes = malloc(list->n * sizeof *bytes);
    fcdp_status status = arrays && prints && bytes
                             ? FCDP_OK
                             : fcdp__fail(FCDP_ERR_SYSTEM, "no host memory to compare live tensors");
    for (size_t i = 0; i < list->n && !status; i++) {
        arrays[i] = list->at[i].address;
        bytes[i] = list->at[i].bytes;
    }
    if (!status) status = read(ctx, arrays, bytes, list->n, prints);
    free(arrays);
    free(bytes);
    if (status) free(prints);
    if (!status) *prints_out = prints;
    return status == FCDP_ERR_UNSUPPORTED ? FCDP_OK : status; /* then all is copied */
}

/* Where the pieces of list->at[from]'s page end. */
static size_t page_end(const pieces *list, size_t from) {
    size_t to = from + 1;
    while (to < list->n && list->at[to].saved == list->at[from].saved) to++;
    return to;
}

/* Of a page's pieces, with their places. */
static uint64_t page_print(const pieces *list, const uint64_t *prints, size_t from, size_t to) {
    uint64_t sum = 0;
    for (size_t i = from; i < to; i++)
        sum = mix(sum + prints[i]) + mix(list->at[i].offset_bytes << 32 ^ list->at[i].bytes);
    return sum;
}

/* The longest copy from piece `from` on, before `to`: its pieces lie side by side in both memories. */
static size_t run_end(const fcdp_heap *heap, const pieces *list, size_t from, size_t to, size_t *bytes_out) {
    size_t i = from;
    *bytes_out = 0;
    for (; i < to; i++) {
        const piece *first = &list->at[from], *one = &list->at[i];
        const char *begin = first->saved->host + first->offset_bytes,
                   *here = one->saved->host + one->offset_bytes;
        if (one->address != first->address + *bytes_out || here != begin + *bytes_out ||
            (one->saved != first->saved && !chunk_is_same(heap, begin, here)))
            break;
        *bytes_out += one->bytes;
    }
    return i;
}

/* Pieces [from, to), whose pages have a host page. */
static fcdp_status pieces_copy(fcdp_heap *heap, const pieces *list, size_t from, size_t to, bool to_host,
                               size_t *copied) {
    fcdp_status status = FCDP_OK;
    while (from < to && !status) {
        size_t bytes, end = run_end(heap, list, from, to, &bytes);
        const piece *first = &list->at[from];
        char *host = first->saved->host + first->offset_bytes;
        fcdp_dptr device = {first->address};
        status = to_host ? fcdp__driver_copy_d2h(heap->drv, host, device, bytes, heap->sleep.stream)
                         : fcdp__driver_copy_h2d(heap->drv, device, host, bytes, heap->sleep.stream);
        *copied += bytes;
        from = end;
    }
    return status;
}

/* The copies of one sleep, in as many parts, so that pages are unmapped while later ones are copied. */
enum { MAX_PARTS = 32 };
static const size_t PART_BYTES = (size_t)16 << 20;
typedef struct saving {
    fcdp_heap *heap;
    const pieces *list;
    uint64_t *wanted;             /* of the page that begins with a piece: its print, once it is saved */
    size_t ends[MAX_PARTS];       /* of a part: the piece behind it */
    fcdp_event events[MAX_PARTS]; /* recorded behind its copies */
    size_t n, n_done;
} saving;

static fcdp_status saving_begin(saving *s, fcdp_heap *heap, const pieces *list) {
    *s = (saving){.heap = heap, .list = list, .wanted = calloc(list->n + 1, sizeof *s->wanted)};
    return s->wanted ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no host memory to save live tensors");
}

static void saving_end(saving *s) {
    for (size_t i = 0; i < s->n; i++) fcdp__driver_event_destroy(s->heap->drv, s->events[i]);
    free(s->wanted);
}

/* What was enqueued up to piece `end` is a part. */
static fcdp_status part_end(saving *s, size_t end) {
    fcdp_status status = fcdp__driver_event_create_blocking(s->heap->drv, &s->events[s->n]);
    if (status) return status;
    s->ends[s->n] = end;
    return fcdp__driver_event_record(s->heap->drv, s->events[s->n++], s->heap->sleep.stream);
}

/* The host waits until the pages up to piece `end` are saved: they are valid then. */
static fcdp_status parts_await(saving *s, size_t end) {
    const pieces *list = s->list;
    while (s->n_done < s->n && (s->n_done ? s->ends[s->n_done - 1] : 0) < end) {
        size_t from = s->n_done ? s->ends[s->n_done - 1] : 0;
        fcdp_status status = fcdp__driver_event_sync(s->heap->drv, s->events[s->n_done]);
        if (status) return status;
        for (size_t i = from; i < s->ends[s->n_done]; i = page_end(list, i)) {
            list->at[i].saved->is_valid = true;
            list->at[i].saved->print = s->wanted[i];
        }
        s->n_done++;
    }
    return FCDP_OK;
}

/* Enqueue the copies of what the host's pages lack. Their pages are not valid until they have ended. */
static fcdp_status pieces_save(saving *s, const uint64_t *prints, fcdp_sleep_counts *counts) {
    const pieces *list = s->list;
    fcdp_status status = FCDP_OK;
    size_t part_bytes = counts->live_bytes / (MAX_PARTS - 1) + 1, bytes = 0;
    size_t from = 0; /* of a run of pages that are to be copied */
    if (part_bytes < PART_BYTES) part_bytes = PART_BYTES;
    for (size_t i = 0, end; i < list->n && !status; i = end) {
        heap_saved *saved = list->at[i].saved;
        end = page_end(list, i);
        s->wanted[i] = prints ? page_print(list, prints, i, end) : 0;
        bool copies = !prints || !saved->is_valid || saved->print != s->wanted[i];
        if (copies) saved->is_valid = false;
        if (copies) status = saved_need(s->heap, saved);
        for (size_t k = i; k < end; k++) bytes += list->at[k].bytes;
        bool ends_part = bytes >= part_bytes || end == list->n;
        if (status || (copies && !ends_part)) continue;
        status = pieces_copy(s->heap, list, from, copies ? end : i, true, &counts->copied_bytes);
        from = end;
        if (!status && ends_part) {
            status = part_end(s, end);
            bytes = 0;
        }
    }
    return status;
}

/* ---- pages ---- */

/* Mapping by mapping, in the order of the pieces, each once its bytes are saved: *next_piece is the first one
 * behind what was unmapped. A mapping that the driver refuses to unmap stays, with its bytes. */
static fcdp_status span_unmap(saving *s, const fcdp_span *span, size_t *next_piece,
                              fcdp_sleep_counts *counts) {
    fcdp_heap *heap = s->heap;
    heap_range *range = span->owner;
    size_t n = range->bytes / heap->page_bytes;
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && span->joined[end];) end++;
        if (!range->pages[i].handle) continue;
        uint64_t at = range->base + i * heap->page_bytes;
        size_t bytes = (end - i) * heap->page_bytes;
        while (*next_piece < s->list->n && s->list->at[*next_piece].address - at < bytes) ++*next_piece;
        fcdp_status status = parts_await(s, *next_piece);
        for (size_t k = i; k < end && !status; k++)
            if (range->saved[k].host && !range->saved[k].is_valid) status = parts_await(s, s->list->n);
        if (status) return status;
        if (FCDP_RETRY_ONCE(fcdp__driver_unmap(heap->drv, (fcdp_dptr){at}, bytes))) {
            fcdp__log(FCDP_LOG_WARN, "sleep: %s of device memory stay in use: %s", fcdp__size_text(bytes).s,
                      fcdp_error_text());
            continue;
        }
        fcdp__trace_unmap(at, bytes);
        fcdp__trace_count(FCDP_COUNT_ASLEEP_BYTES, bytes);
        fcdp__heap_pages_give(heap, end - i, &range->pages[i], end - i);
        memset(&range->pages[i], 0, (end - i) * sizeof *range->pages);
        for (size_t k = i; k < end; k++) range->saved[k].is_away = true;
        counts->page_bytes += bytes;
    }
    return FCDP_OK;
}

/* Pages, mapped; they may have no access yet. */
static fcdp_status mapping_take(fcdp_heap *heap, fcdp_dptr at, size_t n, fcdp_phys *handle_out) {
    fcdp_phys handle;
    fcdp_status status = n == 1 ? fcdp__pool_take(heap->pool, FCDP_HOLDER_TENSORS, 1, &handle)
                                : fcdp__pool_take_handle(heap->pool, FCDP_HOLDER_TENSORS, n, &handle);
    if (status) return status;
    fcdp__heap_pages_add(heap, n);
    status = fcdp__driver_map(heap->drv, at, n * heap->page_bytes, handle);
    if (status) {
        fcdp__heap_pages_give(heap, n, &handle, n);
        return status;
    }
    fcdp__trace_map(at.addr, n * heap->page_bytes);
    *handle_out = handle;
    return FCDP_OK;
}

/* One mapping, of `n` pages. If the driver neither gives access nor unmaps, they stay mapped while they are
 * away, and the next wake asks for access again. */
static fcdp_status mapping_restore(fcdp_heap *heap, heap_range *range, size_t i, size_t n) {
    fcdp_dptr at = {range->base + i * heap->page_bytes};
    size_t bytes = n * heap->page_bytes;
    fcdp_phys handle = range->pages[i];
    fcdp_status status = handle.handle ? FCDP_OK : mapping_take(heap, at, n, &handle);
    if (status) return status;
    status = fcdp__driver_set_access(heap->drv, at, bytes);
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        if (!FCDP_RETRY_ONCE(fcdp__driver_unmap(heap->drv, at, bytes))) {
            fcdp__trace_unmap(at.addr, bytes);
            fcdp__heap_pages_give(heap, n, &handle, n);
            handle = (fcdp_phys){0};
        }
        status = fcdp__failure_restore(&failure);
    }
    for (size_t k = i; k < i + n; k++) range->pages[k] = handle;
    if (status) return status;
    fcdp__trace_count(FCDP_COUNT_ASLEEP_BYTES, -(uint64_t)bytes);
    for (size_t k = i; k < i + n; k++) {
        range->saved[k].is_away = false;
        range->saved[k].is_back = true;
    }
    return FCDP_OK;
}

/* Mapping by mapping: while later ones are mapped, the bytes of earlier ones are copied. */
static fcdp_status span_map(fcdp_heap *heap, const fcdp_span *span, const pieces *list, size_t *next_piece,
                            fcdp_sleep_counts *counts) {
    heap_range *range = span->owner;
    size_t n = range->saved ? range->bytes / heap->page_bytes : 0;
    fcdp_status status = FCDP_OK;
    for (size_t i = 0, end; i < n && !status; i = end) {
        uint64_t at = range->base + i * heap->page_bytes;
        for (end = i + 1; end < n && span->joined[end];) end++;
        size_t bytes = (end - i) * heap->page_bytes, first = *next_piece;
        while (*next_piece < list->n && list->at[*next_piece].address - at < bytes) ++*next_piece;
        if (range->saved[i].is_away) {
            status = mapping_restore(heap, range, i, end - i);
            counts->page_bytes += status ? 0 : bytes;
        }
        if (!status && range->saved[i].is_back)
            status = pieces_copy(heap, list, first, *next_piece, false, &counts->copied_bytes);
    }
    return status;
}

/* Its pages have their bytes. */
static void span_is_back(const fcdp_heap *heap, const fcdp_span *span) {
    heap_range *range = span->owner;
    size_t n = range->saved ? range->bytes / heap->page_bytes : 0;
    for (size_t i = 0; i < n; i++) range->saved[i].is_back = false;
}

/* Its host pages that no piece is in use of become free. The arena's lock is held. */
static void span_tidy(fcdp_heap *heap, const fcdp_span *span) {
    heap_range *range = span->owner;
    size_t n = range->saved ? range->bytes / heap->page_bytes : 0;
    for (size_t i = 0; i < n; i++)
        if (!range->saved[i].in_use) saved_drop(heap, &range->saved[i]);
}

/* ---- sleep and wake ---- */

typedef struct sleepers {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n;
} sleepers;

static bool is_named(const heap_arena *arena, const fcdp_sleep_of *of) {
    return of->all || arena->tag == of->tag;
}

/* Those that are to sleep, or sleep. */
static void sleepers_find(fcdp_heap *heap, const fcdp_sleep_of *of, bool asleep, sleepers *out) {
    size_t n = fcdp__heap_arenas(heap, out->arenas);
    out->n = 0;
    for (size_t i = 0; i < n; i++)
        if (is_named(out->arenas[i], of) && atomic_load(&out->arenas[i]->asleep) == asleep)
            out->arenas[out->n++] = out->arenas[i];
}

static void arenas_set(const sleepers *s, bool asleep) {
    for (size_t i = 0; i < s->n; i++) {
        fcdp__lock_acquire(&s->arenas[i]->lock);
        atomic_store(&s->arenas[i]->asleep, asleep);
        fcdp__lock_release(&s->arenas[i]->lock);
    }
}

/* From here on nothing is allocated there. */
static fcdp_status pieces_of(const sleepers *s, bool sleeps, pieces *list) {
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < s->n && !status; i++) {
        fcdp__lock_acquire(&s->arenas[i]->lock);
        atomic_store(&s->arenas[i]->asleep, true);
        status = pieces_collect(s->arenas[i], sleeps, list);
        fcdp__lock_release(&s->arenas[i]->lock);
    }
    return status;
}

/* The host's pages of these arenas, but those of the list, become free. */
static void tidy(fcdp_heap *heap, const sleepers *s, const pieces *list) {
    for (size_t i = 0; i < list->n; i++) list->at[i].saved->in_use = true;
    for (size_t i = 0; i < s->n; i++) {
        fcdp__lock_acquire(&s->arenas[i]->lock);
        for (const fcdp_span *span = fcdp__arena_spans(s->arenas[i]->blocks); span; span = span->next)
            span_tidy(heap, span);
        fcdp__lock_release(&s->arenas[i]->lock);
    }
    for (size_t i = 0; i < list->n; i++) list->at[i].saved->in_use = false;
}

/* Arenas that are made from here on sleep, or not. False: it was so before. */
static bool all_set(fcdp_heap *heap, const fcdp_sleep_of *of, bool asleep) {
    if (!of->all) return false;
    fcdp__lock_acquire(&heap->lock);
    bool changes = heap->sleep.all != asleep;
    heap->sleep.all = asleep;
    fcdp__lock_release(&heap->lock);
    return changes;
}

static void calls_trace(uint64_t start_ns, uint16_t kind, const fcdp_sleep_counts *counts) {
    fcdp__trace_since(start_ns, (fcdp_trace_event){.kind = kind,
                                                   .bytes = counts->page_bytes,
                                                   .a = counts->live_bytes,
                                                   .b = counts->copied_bytes});
}

static fcdp_status stream_need(fcdp_heap *heap) {
    if (heap->sleep.stream) return FCDP_OK;
    fcdp_status status = fcdp__driver_stream_create(heap->drv, &heap->sleep.stream);
    if (status)
        heap->sleep.stream = NULL;
    else
        fcdp__driver_stream_name(heap->drv, heap->sleep.stream, "sleep");
    return status;
}

/* A capture that has failed does not count, though it has left its pool open. */
fcdp_status fcdp_heap_check_capture(fcdp_heap *heap) {
    (void)fcdp__heap_privates_end_dead(heap);
    if (!fcdp__heap_is_capturing(heap)) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_INVALID, "tensors cannot go to sleep while a CUDA graph is captured");
}

/* Until the device has done everything, unless a graph is captured. */
static fcdp_status device_await(fcdp_heap *heap) {
    fcdp_status status = fcdp_heap_check_capture(heap);
    if (status) return status;
    (void)fcdp__heap_await(heap, true);
    return fcdp__driver_sync(heap->drv);
}

static fcdp_status arenas_unmap(saving *saved, const sleepers *s, fcdp_sleep_counts *counts) {
    fcdp_status status = FCDP_OK;
    size_t next_piece = 0;
    for (size_t i = 0; i < s->n && !status; i++)
        for (const fcdp_span *span = fcdp__arena_spans(s->arenas[i]->blocks); span && !status;
             span = span->next)
            status = span_unmap(saved, span, &next_piece, counts);
    return status;
}

/* Pages that are mapped have no bytes yet, until all are copied: what fails is to be done again. */
static fcdp_status arenas_wake(fcdp_heap *heap, const sleepers *s, fcdp_sleep_counts *counts) {
    pieces list = {0};
    size_t next_piece = 0;
    fcdp_status status = pieces_of(s, false, &list);
    for (size_t i = 0; i < list.n; i++) counts->live_bytes += list.at[i].bytes;
    for (size_t i = 0; i < s->n && !status; i++)
        for (const fcdp_span *span = fcdp__arena_spans(s->arenas[i]->blocks); span && !status;
             span = span->next)
            status = span_map(heap, span, &list, &next_piece, counts);
    if (heap->sleep.stream) {
        fcdp_failure failure = fcdp__failure_keep(status);
        fcdp_status ended = fcdp__driver_stream_sync(heap->drv, heap->sleep.stream);
        status = failure.status ? fcdp__failure_restore(&failure) : ended;
    }
    FCDP_CHECK(0, status || next_piece == list.n);
    if (!status) {
        for (size_t i = 0; i < s->n; i++)
            for (const fcdp_span *span = fcdp__arena_spans(s->arenas[i]->blocks); span; span = span->next)
                span_is_back(heap, span);
        tidy(heap, s, &list);
        arenas_set(s, false);
    }
    free(list.at);
    return status;
}

/* Pages that were unmapped already come back. */
static fcdp_status sleep_undo(fcdp_heap *heap, const sleepers *s, fcdp_sleep_counts *counts,
                              fcdp_status status) {
    fcdp_failure failure = fcdp__failure_keep(status);
    bool any = counts->page_bytes > 0, copies = counts->copied_bytes > 0;
    *counts = (fcdp_sleep_counts){0};
    if (copies) (void)!fcdp__driver_stream_sync(heap->drv, heap->sleep.stream);
    if (!any)
        arenas_set(s, false);
    else if (arenas_wake(heap, s, counts))
        fcdp__log(FCDP_LOG_WARN,
                  "sleep failed, and so did waking (%s): free memory and call fcdp.wake() again",
                  fcdp_error_text());
    return fcdp__failure_restore(&failure);
}

fcdp_status fcdp_heap_sleep(fcdp_heap *heap, const fcdp_sleep_of *of, fcdp_read_fn read, void *ctx,
                            fcdp_sleep_counts *counts_out) {
    sleepers *s = malloc(sizeof *s);
    pieces list = {0};
    saving saved = {0};
    uint64_t *prints = NULL, start_ns = fcdp__trace_start();
    *counts_out = (fcdp_sleep_counts){0};
    if (!s) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory to put tensors to sleep");
    sleepers_find(heap, of, false, s);
    fcdp_status status = s->n ? device_await(heap) : FCDP_OK;
    if (!status && s->n) status = stream_need(heap);
    fcdp__heap_deferred_poll(heap);
    if (!status) status = pieces_of(s, true, &list);
    if (!status) tidy(heap, s, &list);
    for (size_t i = 0; i < list.n; i++) counts_out->live_bytes += list.at[i].bytes;
    if (!status) status = prints_take(&list, read, ctx, &prints);
    if (!status) status = saving_begin(&saved, heap, &list);
    if (!status) status = pieces_save(&saved, prints, counts_out);
    if (!status) status = arenas_unmap(&saved, s, counts_out);
    if (status) status = sleep_undo(heap, s, counts_out, status);
    if (!status) counts_out->fell_asleep = all_set(heap, of, true) || s->n > 0;
    if (!status) (void)fcdp__pool_trim(heap->pool);
    if (!status) calls_trace(start_ns, FCDP_EVENT_SLEEP, counts_out);
    saving_end(&saved);
    free(prints);
    free(list.at);
    free(s);
    return status;
}

fcdp_status fcdp_heap_wake(fcdp_heap *heap, const fcdp_sleep_of *of, bool keeps,
                           fcdp_sleep_counts *counts_out) {
    sleepers *s = malloc(sizeof *s);
    uint64_t start_ns = fcdp__trace_start();
    *counts_out = (fcdp_sleep_counts){0};
    if (!s) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory to wake tensors");
    sleepers_find(heap, of, true, s);
    fcdp_status status = arenas_wake(heap, s, counts_out);
    if (!status) {
        (void)all_set(heap, of, false);
        sleepers_find(heap, of, true, s); /* made meanwhile: nothing of them is away */
        arenas_set(s, false);
    }
    if (!status && !keeps) { /* nor what earlier nights have left of those that were awake */
        sleepers_find(heap, of, false, s);
        tidy(heap, s, &(pieces){0});
        chunks_free_idle(heap);
    }
    if (status == FCDP_ERR_NO_DEVICE_MEM)
        status = fcdp__fail(status,
                            "tensors sleep on; call fcdp.wake() again once others have given memory back: %s",
                            fcdp_error_text());
    if (!status) calls_trace(start_ns, FCDP_EVENT_WAKE, counts_out);
    free(s);
    return status;
}

fcdp_status fcdp__heap_asleep_fail(void) {
    return fcdp__fail(FCDP_ERR_INVALID, "tensors are asleep: call fcdp.wake() before you allocate");
}

void fcdp__heap_sleep_destroy(fcdp_heap *heap) {
    if (heap->sleep.stream) fcdp__driver_stream_destroy(heap->drv, heap->sleep.stream);
    chunks_free(heap);
    free(heap->sleep.free_pages);
}
