/* arena_place.c - chooses the place for a block: the one that leaves the most memory for other requests.
 *
 * It rates every candidate and changes nothing, so arena.c can give up a place without undoing anything.
 */
#include "alloc/arena_internal.h"

/* ---- mappings ---- */

static bool is_joined(const fcdp_arena *arena, const fcdp_span *span, uint64_t address) {
    return span->joined[(address - span->base) / arena->page_bytes];
}

/* The nearest boundary of a mapping, upwards or downwards. The end of the span is a boundary. */
static uint64_t boundary(const fcdp_arena *arena, const fcdp_span *span, uint64_t address, bool up) {
    while (address < span->base + span->bytes && is_joined(arena, span, address))
        address = up ? address + arena->page_bytes : address - arena->page_bytes;
    return address;
}

arena_range fcdp__arena_whole_mappings(const fcdp_arena *arena, const fcdp_block *block) {
    uint64_t from = fcdp__arena_page_up(arena, block->address);
    uint64_t to = fcdp__arena_page_down(arena, block->address + block->bytes);
    if (from >= to) return (arena_range){0, 0};
    from = boundary(arena, block->span, from, true);
    to = boundary(arena, block->span, to, false);
    return from < to ? (arena_range){from, to} : (arena_range){0, 0};
}

uint64_t fcdp__arena_mapping_start(const fcdp_arena *arena, const fcdp_span *span, uint64_t to) {
    return boundary(arena, span, to - arena->page_bytes, false);
}

/* Whole pages of the free block that [address, end) touches, all of them unused until now. */
static size_t pages_touched(const fcdp_arena *arena, const fcdp_block *block, uint64_t address,
                            uint64_t end) {
    uint64_t first = fcdp__arena_page_up(arena, block->address);
    uint64_t last = fcdp__arena_page_down(arena, block->address + block->bytes);
    uint64_t from = fcdp__arena_page_down(arena, address), to = fcdp__arena_page_up(arena, end);
    if (from < first) from = first;
    if (to > last) to = last;
    return from < to ? (to - from) / arena->page_bytes : 0;
}

/* ---- comparing ---- */

size_t fcdp__arena_least_touched(const fcdp_arena *arena, size_t bytes) {
    size_t page = arena->page_bytes;
    return bytes > 2 * page ? (bytes - 2 * page) / page : 0;
}

static size_t first_cost(const arena_place *of, bool is_short) {
    return is_short ? of->n_touched : of->n_unmapped;
}

static size_t second_cost(const arena_place *of, bool is_short) {
    return is_short ? of->n_unmapped : of->n_touched;
}

/* First the number of unused pages that the place occupies (when memory is short) or of pages to be mapped
 * (otherwise). Then a block of the same size beside it, since such blocks are often freed together; then the
 * smaller run, which spares the larger ones; then the younger block beside it, for the first reason. */
static bool is_better(const arena_place *it, const arena_place *best, bool is_short) {
    if (!best->first) return true;
    size_t a = first_cost(it, is_short), b = first_cost(best, is_short);
    if (a != b) return a < b;
    a = second_cost(it, is_short), b = second_cost(best, is_short);
    if (a != b) return a < b;
    if (it->is_alike != best->is_alike) return it->is_alike;
    if (it->run_bytes != best->run_bytes) return it->run_bytes < best->run_bytes;
    if (it->born != best->born) return it->born > best->born;
    return it->address < best->address;
}

static bool is_spare(const fcdp_block *block) {
    return block && (block->state == FCDP_BLOCK_FREE || block->state == FCDP_BLOCK_HOLE);
}

/* The place touches `block`, which may be NULL, free or a hole: then it touches nothing. */
static void touch(arena_place *it, const fcdp_block *block, size_t bytes) {
    if (!block || is_spare(block)) return;
    if (block->bytes == bytes) it->is_alike = true;
    if (block->born > it->born) it->born = block->born;
}

/* ---- in one free block ---- */

static void fit_consider(const fcdp_arena *arena, fcdp_block *block, size_t bytes, bool is_short,
                         arena_place *best) {
    uint64_t end = block->address + block->bytes;
    for (int at_end = 0; at_end < 2; at_end++) {
        uint64_t address = at_end ? end - bytes : block->address;
        arena_place it = {.first = block, .address = address, .run_bytes = block->bytes};
        it.n_touched = pages_touched(arena, block, address, address + bytes);
        if (address == block->address) touch(&it, block->before, bytes);
        if (address + bytes == end) touch(&it, block->after, bytes);
        if (is_better(&it, best, is_short)) *best = it;
    }
}

/* From the smallest blocks that are large enough upwards, until none can
 * be better or enough were looked at. */
arena_place fcdp__arena_fit_find(const fcdp_arena *arena, size_t bytes, bool is_short) {
    enum { MAX_LOOKED_AT = 512 };
    size_t n_looked_at = 0, n_least = fcdp__arena_least_touched(arena, bytes);
    arena_place best = {0};
    for (unsigned class = fcdp__arena_class_next(arena, fcdp__arena_class_of(bytes)); class < ARENA_N_CLASSES;
         class = fcdp__arena_class_next(arena, class + 1)) {
        for (fcdp_block *block = arena->free_lists[class]; block; block = block->list_next, n_looked_at++)
            if (block->bytes >= bytes) fit_consider(arena, block, bytes, is_short, &best);
        if (best.first && (best.n_touched == n_least || n_looked_at > MAX_LOOKED_AT)) break;
    }
    return best;
}

/* ---- in a run of free blocks and holes ---- */

typedef struct run {
    fcdp_block *first, *last;
    uint64_t begin, end;
} run;

/* Rate one place of a run by its pages and the blocks beside it. It goes block by block, since only a hole
 * needs pages. */
static void place_consider(const fcdp_arena *arena, const run *in, fcdp_block *first, uint64_t address,
                           size_t bytes, bool is_short, arena_place *best) {
    arena_place it = {.first = first, .address = address, .run_bytes = in->end - in->begin};
    uint64_t end = address + bytes;
    for (const fcdp_block *block = first; block && block->address < end; block = block->after) {
        uint64_t stop = block->address + block->bytes < end ? block->address + block->bytes : end;
        uint64_t from = address > block->address ? address : block->address;
        if (block->unmapped) {
            uint64_t hole = fcdp__arena_page_up(arena, stop) - fcdp__arena_page_down(arena, from);
            it.n_unmapped += hole / arena->page_bytes;
            it.n_touched += hole / arena->page_bytes;
        } else {
            it.n_touched += pages_touched(arena, block, from, stop);
        }
    }
    if (address == in->begin) touch(&it, in->first->before, bytes);
    if (end == in->end) touch(&it, in->last->after, bytes);
    if (is_better(&it, best, is_short)) *best = it;
}

/* Every place that begins where a block of the run begins, or ends where a free one ends. */
static void run_consider(const fcdp_arena *arena, const run *in, size_t bytes, bool is_short,
                         arena_place *best) {
    for (fcdp_block *block = in->first; block != in->last->after; block = block->after)
        if (in->end - block->address >= bytes)
            place_consider(arena, in, block, block->address, bytes, is_short, best);
    for (fcdp_block *block = in->first; block != in->last->after; block = block->after) {
        uint64_t stop = block->address + block->bytes;
        if ((block->unmapped && block != in->last) || stop - in->begin < bytes) continue;
        fcdp_block *holder = block;
        while (holder->address > stop - bytes) holder = holder->before;
        place_consider(arena, in, holder, stop - bytes, bytes, is_short, best);
    }
}

arena_place fcdp__arena_place_find(const fcdp_arena *arena, size_t bytes, bool is_short) {
    arena_place best = {0};
    for (fcdp_span *span = arena->spans; span; span = span->next)
        for (fcdp_block *block = span->first, *next; block; block = next) {
            next = block->after;
            if (!is_spare(block)) continue;
            run in = {block, block, block->address, 0};
            while (is_spare(in.last->after)) in.last = in.last->after;
            in.end = in.last->address + in.last->bytes;
            if (in.end - in.begin >= bytes) run_consider(arena, &in, bytes, is_short, &best);
            next = in.last->after;
        }
    return best;
}
