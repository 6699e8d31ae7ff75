/* arena.c - the blocks of an arena: taken, given back, grown, unmapped.
 *
 * A block is linked to the blocks beside it in its span. Free blocks are in lists by size, quick blocks in
 * slots by size, live and quick blocks in a table by address: a free names an address alone, so each one pays
 * for a look-up. Open addressing with linear probing, in a table that is at most half full, keeps it short.
 *
 * Every call reserves the host memory that it may need before it changes anything (nodes_reserve,
 * table_reserve), so a call that fails leaves the arena as it was. The arena knows addresses and sizes alone:
 * it calls no driver and takes no lock. Where a block goes, arena_place.c decides.
 */
#include "alloc/arena_internal.h"

#include <stdlib.h>
#include <string.h>

/* ---- invariants ---- */

static bool neighbours_are_valid(const fcdp_arena *arena, const fcdp_block *block) {
    const fcdp_block *after = block->after;
    if (block->bytes == 0 || block->bytes % FCDP_ARENA_UNIT) return false;
    if (block->state == FCDP_BLOCK_HOLE &&
        (!block->unmapped || block->address % arena->page_bytes || block->bytes % arena->page_bytes))
        return false;
    if (block->state != FCDP_BLOCK_HOLE && block->state != FCDP_BLOCK_BUSY && block->unmapped) return false;
    if (!after) return block->address + block->bytes == block->span->base + block->span->bytes;
    bool alike = after->state == block->state &&
                 (block->state == FCDP_BLOCK_FREE || block->state == FCDP_BLOCK_HOLE);
    return after->before == block && after->address == block->address + block->bytes && !alike;
}

/* No mapping reaches into a hole, or beyond one. */
static bool hole_is_valid(const fcdp_arena *arena, const fcdp_block *hole) {
    const fcdp_span *span = hole->span;
    size_t first = (hole->address - span->base) / arena->page_bytes, n = hole->bytes / arena->page_bytes;
    for (size_t i = first; i <= first + n && i < span->bytes / arena->page_bytes; i++)
        if (span->joined[i]) return false;
    return true;
}

static bool arena_is_valid(const fcdp_arena *arena) {
    fcdp_arena_stats is = {0};
    for (const fcdp_span *span = arena->spans; span; span = span->next) {
        if (!span->first || span->first->before || span->first->address != span->base) return false;
        for (const fcdp_block *block = span->first; block; block = block->after) {
            if (!neighbours_are_valid(arena, block)) return false;
            if (block->state == FCDP_BLOCK_HOLE && !hole_is_valid(arena, block)) return false;
            size_t *bytes[] = {NULL, &is.free_bytes, &is.quick_bytes, &is.live_bytes, &is.busy_bytes};
            size_t *count[] = {&is.n_holes, &is.n_free, &is.n_quick, &is.n_live, NULL};
            if (bytes[block->state] && !block->unmapped) *bytes[block->state] += block->bytes;
            if (count[block->state]) ++*count[block->state];
            if (block->state == FCDP_BLOCK_LIVE) is.requested_bytes += block->requested_bytes;
        }
    }
    return memcmp(&is, &arena->counts, sizeof is) == 0 &&
           arena->n_table == arena->counts.n_live + arena->counts.n_quick;
}

/* ---- nodes ---- */

/* Zeroed, on cache lines of its own, so that arenas of different threads share none. */
static void *lines_alloc(size_t bytes) {
    enum { CACHE_LINE = 64 };
    size_t rounded = fcdp__round_up(bytes, CACHE_LINE);
    void *at = aligned_alloc(CACHE_LINE, rounded);
    return at ? memset(at, 0, rounded) : NULL;
}

static fcdp_status nodes_reserve(fcdp_arena *arena, size_t n) {
    while (arena->n_unused < n) {
        node_chunk *chunk = lines_alloc(sizeof *chunk);
        if (!chunk) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator's blocks");
        chunk->next = arena->chunks;
        arena->chunks = chunk;
        for (size_t i = 0; i < ARENA_NODES_PER_CHUNK; i++) {
            chunk->nodes[i].list_next = arena->unused;
            arena->unused = &chunk->nodes[i];
        }
        arena->n_unused += ARENA_NODES_PER_CHUNK;
    }
    return FCDP_OK;
}

static fcdp_block *node_take(fcdp_arena *arena) {
    fcdp_block *node = arena->unused;
    FCDP_CHECK(0, node);
    arena->unused = node->list_next;
    arena->n_unused--;
    *node = (fcdp_block){.state = FCDP_BLOCK_BUSY};
    return node;
}

static void node_give(fcdp_arena *arena, fcdp_block *node) {
    node->state = FCDP_BLOCK_HOLE;
    node->list_next = arena->unused;
    arena->unused = node;
    arena->n_unused++;
}

/* ---- free lists by size ---- */

unsigned fcdp__arena_class_of(size_t bytes) {
    size_t units = bytes / FCDP_ARENA_UNIT;
    unsigned log2 = 63 - (unsigned)__builtin_clzll(units);
    if (log2 < ARENA_SUB_BITS) return (unsigned)units;
    return (log2 << ARENA_SUB_BITS) +
           (unsigned)((units >> (log2 - ARENA_SUB_BITS)) & ((1u << ARENA_SUB_BITS) - 1));
}

static void free_insert(fcdp_arena *arena, fcdp_block *block) {
    unsigned class = fcdp__arena_class_of(block->bytes);
    block->state = FCDP_BLOCK_FREE;
    block->list_prev = NULL;
    block->list_next = arena->free_lists[class];
    if (block->list_next) block->list_next->list_prev = block;
    arena->free_lists[class] = block;
    arena->class_bits[class / 64] |= 1ull << class % 64;
    arena->counts.free_bytes += block->bytes;
    arena->counts.n_free++;
}

static void free_remove(fcdp_arena *arena, fcdp_block *block) {
    unsigned class = fcdp__arena_class_of(block->bytes);
    if (block->list_next) block->list_next->list_prev = block->list_prev;
    if (block->list_prev)
        block->list_prev->list_next = block->list_next;
    else
        arena->free_lists[class] = block->list_next;
    if (!arena->free_lists[class]) arena->class_bits[class / 64] &= ~(1ull << class % 64);
    arena->counts.free_bytes -= block->bytes;
    arena->counts.n_free--;
}

unsigned fcdp__arena_class_next(const fcdp_arena *arena, unsigned class) {
    for (unsigned word = class / 64; word < ARENA_N_CLASSES / 64; word++) {
        uint64_t bits = arena->class_bits[word];
        if (word == class / 64) bits &= ~0ull << class % 64;
        if (bits) return word * 64 + (unsigned)__builtin_ctzll(bits);
    }
    return ARENA_N_CLASSES;
}

/* ---- live and quick blocks by address ---- */

static size_t table_slot(const fcdp_arena *arena, uint64_t address) {
    return (size_t)((address / FCDP_ARENA_UNIT * 0x9e3779b97f4a7c15u) >> 20) & (arena->table_capacity - 1);
}

static void table_insert(fcdp_arena *arena, fcdp_block *block) {
    size_t at = table_slot(arena, block->address);
    while (arena->table[at]) at = (at + 1) & (arena->table_capacity - 1);
    arena->table[at] = block;
    arena->n_table++;
}

/* Make room for one more block, so that the next insert cannot fail. */
static fcdp_status table_reserve(fcdp_arena *arena) {
    if ((arena->n_table + 1) * 2 <= arena->table_capacity) return FCDP_OK;
    size_t old_capacity = arena->table_capacity, capacity = old_capacity ? 2 * old_capacity : 256;
    fcdp_block **old = arena->table, **table = calloc(capacity, sizeof *table);
    if (!table) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator's table");
    arena->table = table;
    arena->table_capacity = capacity;
    arena->n_table = 0;
    for (size_t i = 0; i < old_capacity; i++)
        if (old[i]) table_insert(arena, old[i]);
    free(old);
    return FCDP_OK;
}

/* The slot of the block that begins at `address`, SIZE_MAX: none. */
static size_t table_find(const fcdp_arena *arena, uint64_t address) {
    if (arena->n_table == 0) return SIZE_MAX;
    size_t at = table_slot(arena, address);
    while (arena->table[at] && arena->table[at]->address != address)
        at = (at + 1) & (arena->table_capacity - 1);
    return arena->table[at] ? at : SIZE_MAX;
}

static void table_remove(fcdp_arena *arena, uint64_t address) {
    size_t hole = table_find(arena, address), mask = arena->table_capacity - 1;
    FCDP_CHECK(0, hole != SIZE_MAX);
    for (size_t at = (hole + 1) & mask; arena->table[at]; at = (at + 1) & mask) {
        size_t home = table_slot(arena, arena->table[at]->address);
        if (((at - home) & mask) < ((at - hole) & mask)) continue; /* it may not move before its home */
        arena->table[hole] = arena->table[at];
        hole = at;
    }
    arena->table[hole] = NULL;
    arena->n_table--;
}

/* ---- blocks side by side ---- */

/* Cut `block` so that it keeps its first `bytes`; the rest follows it, in the same state, in no list. */
static fcdp_block *block_cut(fcdp_block *block, size_t bytes, fcdp_block *node) {
    *node = (fcdp_block){.address = block->address + bytes,
                         .bytes = block->bytes - bytes,
                         .state = block->state,
                         .unmapped = block->unmapped,
                         .span = block->span,
                         .freed_at = block->freed_at,
                         .before = block,
                         .after = block->after};
    if (node->after) node->after->before = node;
    block->after = node;
    block->bytes = bytes;
    return node;
}

/* `block` takes over the block after it, which is in no list. */
static void block_join(fcdp_arena *arena, fcdp_block *block) {
    fcdp_block *gone = block->after;
    block->bytes += gone->bytes;
    if (gone->freed_at > block->freed_at) block->freed_at = gone->freed_at;
    block->after = gone->after;
    if (block->after) block->after->before = block;
    node_give(arena, gone);
}

/* A mapped block in no list becomes free and joins the free blocks beside it. */
static void block_free(fcdp_arena *arena, fcdp_block *block) {
    block->tag = NULL;
    if (block->after && block->after->state == FCDP_BLOCK_FREE) {
        free_remove(arena, block->after);
        block_join(arena, block);
    }
    if (block->before && block->before->state == FCDP_BLOCK_FREE) {
        block = block->before;
        free_remove(arena, block);
        block_join(arena, block);
    }
    free_insert(arena, block);
}

/* An unmapped block in no list becomes a hole and joins the holes beside it. */
static void block_hole(fcdp_arena *arena, fcdp_block *block) {
    block->state = FCDP_BLOCK_HOLE;
    block->unmapped = true;
    block->freed_at = 0;
    arena->counts.n_holes++;
    if (block->after && block->after->state == FCDP_BLOCK_HOLE) {
        block_join(arena, block);
        arena->counts.n_holes--;
    }
    if (block->before && block->before->state == FCDP_BLOCK_HOLE) {
        block_join(arena, block->before);
        arena->counts.n_holes--;
    }
}

static void block_live(fcdp_arena *arena, fcdp_block *block) {
    block->state = FCDP_BLOCK_LIVE;
    block->unmapped = false;
    block->requested_bytes = 0;
    block->born = arena->n_takes++;
    arena->counts.live_bytes += block->bytes;
    arena->counts.n_live++;
}

/* ---- life ---- */

fcdp_status fcdp__arena_create(size_t page_bytes, fcdp_arena **arena_out) {
    fcdp_arena *arena = lines_alloc(sizeof *arena);
    if (!arena) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for an arena");
    arena->page_bytes = page_bytes;
    *arena_out = arena;
    return FCDP_OK;
}

void fcdp__arena_destroy(fcdp_arena *arena) {
    if (!arena) return;
    while (arena->spans) {
        fcdp_span *span = arena->spans;
        arena->spans = span->next;
        free(span->joined);
        free(span);
    }
    while (arena->chunks) {
        node_chunk *chunk = arena->chunks;
        arena->chunks = chunk->next;
        free(chunk);
    }
    free(arena->table);
    free(arena);
}

fcdp_status fcdp__arena_add_span(fcdp_arena *arena, uint64_t base, size_t bytes, void *owner) {
    fcdp_status status = nodes_reserve(arena, 1);
    if (status) return status;
    fcdp_span *span = calloc(1, sizeof *span);
    uint8_t *joined = calloc(bytes / arena->page_bytes, sizeof *joined);
    if (!span || !joined) {
        free(span);
        free(joined);
        return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a span");
    }
    FCDP_CHECK(1, base % arena->page_bytes == 0 && bytes && bytes % arena->page_bytes == 0);
    fcdp_block *hole = node_take(arena);
    *span = (fcdp_span){.base = base, .bytes = bytes, .owner = owner, .first = hole, .joined = joined};
    hole->address = base;
    hole->bytes = bytes;
    hole->span = span;
    block_hole(arena, hole);
    fcdp_span **link = &arena->spans;
    while (*link) link = &(*link)->next; /* the oldest span is filled first */
    *link = span;
    return FCDP_OK;
}

const fcdp_span *fcdp__arena_spans(const fcdp_arena *arena) {
    return arena->spans;
}

uint64_t fcdp__arena_clock(const fcdp_arena *arena) {
    return arena->clock;
}

/* ---- take, give ---- */

static quick_slot *quick_slot_of(fcdp_arena *arena, size_t bytes) {
    return &arena->quick[(bytes / FCDP_ARENA_UNIT * 0x9e3779b1u >> 16) % ARENA_N_QUICK_SLOTS];
}

fcdp_block *fcdp__arena_take_quick(fcdp_arena *arena, size_t bytes) {
    quick_slot *slot = quick_slot_of(arena, bytes);
    fcdp_block *block = slot->head;
    if (!block || slot->bytes != bytes) return NULL;
    slot->head = block->list_next;
    block->state = FCDP_BLOCK_LIVE;
    block->requested_bytes = 0;
    block->born = arena->n_takes++;
    arena->counts.quick_bytes -= bytes;
    arena->counts.n_quick--;
    arena->counts.live_bytes += bytes;
    arena->counts.n_live++;
    FCDP_CHECK(3, arena_is_valid(arena));
    return block;
}

fcdp_status fcdp__arena_take(fcdp_arena *arena, size_t bytes, bool is_short, fcdp_block **block_out) {
    FCDP_CHECK(1, bytes && bytes % FCDP_ARENA_UNIT == 0);
    fcdp_status status = nodes_reserve(arena, 1);
    if (!status) status = table_reserve(arena);
    if (status) return status;
    arena_place at = fcdp__arena_fit_find(arena, bytes, is_short);
    fcdp_block *block = at.first;
    if (!block || (is_short && at.n_touched > fcdp__arena_least_touched(arena, bytes))) return FCDP_PENDING;
    free_remove(arena, block);
    if (block->bytes > bytes) {
        bool at_end = at.address > block->address;
        fcdp_block *rest = block_cut(block, at_end ? block->bytes - bytes : bytes, node_take(arena));
        free_insert(arena, at_end ? block : rest);
        if (at_end) block = rest;
    }
    block_live(arena, block);
    table_insert(arena, block);
    FCDP_CHECK(3, arena_is_valid(arena));
    *block_out = block;
    return FCDP_OK;
}

void fcdp__arena_set_busy(fcdp_arena *arena, fcdp_block *block) {
    FCDP_CHECK(0, block->state == FCDP_BLOCK_LIVE);
    table_remove(arena, block->address);
    block->state = FCDP_BLOCK_BUSY;
    arena->counts.live_bytes -= block->bytes;
    arena->counts.requested_bytes -= block->requested_bytes;
    arena->counts.n_live--;
    arena->counts.busy_bytes += block->bytes;
    FCDP_CHECK(3, arena_is_valid(arena));
}

void fcdp__arena_request(fcdp_arena *arena, fcdp_block *block, size_t requested_bytes) {
    block->requested_bytes = requested_bytes;
    arena->counts.requested_bytes += requested_bytes;
}

void fcdp__arena_give(fcdp_arena *arena, fcdp_block *block) {
    block->freed_at = ++arena->clock;
    if (block->state == FCDP_BLOCK_BUSY) {
        arena->counts.busy_bytes -= block->bytes;
        block_free(arena, block);
        return;
    }
    FCDP_CHECK(0, block->state == FCDP_BLOCK_LIVE);
    arena->counts.live_bytes -= block->bytes;
    arena->counts.requested_bytes -= block->requested_bytes;
    arena->counts.n_live--;
    quick_slot *slot = quick_slot_of(arena, block->bytes);
    if (slot->head && slot->bytes != block->bytes) { /* taken by another size */
        table_remove(arena, block->address);
        block_free(arena, block);
        return;
    }
    slot->bytes = block->bytes;
    block->list_next = slot->head;
    slot->head = block;
    block->state = FCDP_BLOCK_QUICK;
    arena->counts.quick_bytes += block->bytes;
    arena->counts.n_quick++;
    FCDP_CHECK(3, arena_is_valid(arena));
}

fcdp_block *fcdp__arena_find(const fcdp_arena *arena, uint64_t address) {
    size_t at = table_find(arena, address);
    if (at == SIZE_MAX || arena->table[at]->state != FCDP_BLOCK_LIVE) return NULL;
    return arena->table[at];
}

void fcdp__arena_flush(fcdp_arena *arena) {
    if (arena->counts.n_quick == 0) return;
    for (unsigned i = 0; i < ARENA_N_QUICK_SLOTS; i++)
        while (arena->quick[i].head) {
            fcdp_block *block = arena->quick[i].head;
            arena->quick[i].head = block->list_next;
            arena->counts.quick_bytes -= block->bytes;
            arena->counts.n_quick--;
            table_remove(arena, block->address);
            block_free(arena, block);
        }
    FCDP_CHECK(3, arena_is_valid(arena));
}

/* ---- growth ---- */

/* Take `block` off its list, so that no other request finds it. */
static void block_seize(fcdp_arena *arena, fcdp_block *block) {
    if (block->unmapped)
        arena->counts.n_holes--;
    else
        free_remove(arena, block);
    block->state = FCDP_BLOCK_BUSY;
    if (!block->unmapped) arena->counts.busy_bytes += block->bytes;
}

static void block_release(fcdp_arena *arena, fcdp_block *block) {
    if (!block->unmapped) arena->counts.busy_bytes -= block->bytes;
    if (block->unmapped)
        block_hole(arena, block);
    else
        block_free(arena, block);
}

/* A free block or a hole is cut at `address`, a hole at the page; the part before stays what it was. */
static fcdp_block *spare_cut_before(fcdp_arena *arena, fcdp_block *block, uint64_t address) {
    if (block->unmapped) address = fcdp__arena_page_down(arena, address);
    if (address == block->address) return block;
    bool hole = block->unmapped;
    if (!hole) free_remove(arena, block);
    fcdp_block *rest = block_cut(block, address - block->address, node_take(arena));
    if (hole) {
        arena->counts.n_holes++;
    } else {
        free_insert(arena, block);
        free_insert(arena, rest);
    }
    return rest;
}

static void spare_cut_after(fcdp_arena *arena, fcdp_block *block, uint64_t end) {
    if (block->unmapped) end = fcdp__arena_page_up(arena, end);
    if (end < block->address + block->bytes) (void)spare_cut_before(arena, block, end);
}

fcdp_status fcdp__arena_grow_begin(fcdp_arena *arena, size_t bytes, bool is_short, size_t ahead_pages,
                                   fcdp_growth *growth_out) {
    fcdp_status status = nodes_reserve(arena, 4);
    if (!status) status = table_reserve(arena);
    if (status) return status;
    arena_place at = fcdp__arena_place_find(arena, bytes, is_short);
    if (!at.first) return FCDP_PENDING;
    fcdp_block *first = spare_cut_before(arena, at.first, at.address), *last = first;
    while (last->address + last->bytes < at.address + bytes) last = last->after;
    uint64_t end = at.address + bytes;
    if (last->unmapped &&
        ahead_pages > 0) { /* the last hole is cut further on: the next places need no pages */
        uint64_t hole_end = last->address + last->bytes,
                 wanted = last->address + ahead_pages * arena->page_bytes;
        if (wanted > hole_end) wanted = hole_end;
        if (wanted > end) end = wanted;
    }
    spare_cut_after(arena, last, end);
    size_t n_pages = 0;
    for (fcdp_block *block = first;; block = block->after) {
        block_seize(arena, block);
        if (block->unmapped) n_pages += block->bytes / arena->page_bytes;
        if (block == last) break;
    }
    *growth_out = (fcdp_growth){.first = first,
                                .last = last,
                                .address = at.address,
                                .bytes = bytes,
                                .n_pages = n_pages,
                                .spare = {node_take(arena), node_take(arena)}};
    FCDP_CHECK(3, arena_is_valid(arena));
    return FCDP_OK;
}

/* Note that the pages of a block are mappings of `n_each` pages each. */
static void pages_join(const fcdp_arena *arena, const fcdp_block *block, size_t n_each) {
    uint8_t *joined = block->span->joined + (block->address - block->span->base) / arena->page_bytes;
    for (size_t i = 0; i < block->bytes / arena->page_bytes; i++) joined[i] = i % n_each != 0;
}

/* From here on all of it is mapped, and one busy block. */
static fcdp_block *growth_join(fcdp_arena *arena, const fcdp_growth *growth, size_t n_each) {
    fcdp_block *block = growth->first;
    uint64_t end = growth->last->address + growth->last->bytes;
    for (fcdp_block *part = block;; part = part->after) {
        if (part->unmapped)
            pages_join(arena, part, n_each);
        else
            arena->counts.busy_bytes -= part->bytes;
        if (part == growth->last) break;
    }
    while (block->address + block->bytes < end) block_join(arena, block);
    block->unmapped = false;
    block->freed_at = arena->clock;
    return block;
}

fcdp_block *fcdp__arena_grow_commit(fcdp_arena *arena, fcdp_growth *growth, size_t n_each) {
    fcdp_block *block = growth_join(arena, growth, n_each);
    uint64_t end = growth->address + growth->bytes;
    if (end < block->address + block->bytes) {
        block_free(arena, block_cut(block, end - block->address, growth->spare[0]));
        growth->spare[0] = NULL;
    }
    if (growth->address > block->address) {
        fcdp_block *front = block;
        block = block_cut(front, growth->address - front->address, growth->spare[1]);
        growth->spare[1] = NULL;
        block_free(arena, front);
    }
    for (int i = 0; i < 2; i++)
        if (growth->spare[i]) node_give(arena, growth->spare[i]);
    block_live(arena, block);
    table_insert(arena, block);
    FCDP_CHECK(3, arena_is_valid(arena));
    return block;
}

void fcdp__arena_grow_abort(fcdp_arena *arena, fcdp_growth *growth) {
    for (int i = 0; i < 2; i++) node_give(arena, growth->spare[i]);
    for (fcdp_block *block = growth->first, *next;; block = next) {
        next = block->after; /* a join below frees `block` or the one before it, never the one after: that is
                                busy */
        bool is_last = block == growth->last;
        block_release(arena, block);
        if (is_last) break;
    }
    FCDP_CHECK(3, arena_is_valid(arena));
}

/* ---- unmapping pages ---- */

/* The free block that has been unused longest among those that hold whole mappings. NULL: there is none. */
static fcdp_block *longest_unused(const fcdp_arena *arena, uint64_t clock) {
    fcdp_block *found = NULL;
    for (unsigned class = fcdp__arena_class_next(arena, fcdp__arena_class_of(arena->page_bytes));
         class < ARENA_N_CLASSES; class = fcdp__arena_class_next(arena, class + 1))
        for (fcdp_block *block = arena->free_lists[class]; block; block = block->list_next) {
            if (block->freed_at > clock || (found && block->freed_at >= found->freed_at)) continue;
            arena_range whole = fcdp__arena_whole_mappings(arena, block);
            if (whole.from < whole.to) found = block;
        }
    return found;
}

/* From the block's end, since what is before may fit again: one large mapping,
 * or as many single pages as there are. */
static fcdp_block *unmap_cut(fcdp_arena *arena, fcdp_block *block, size_t n_pages) {
    size_t page = arena->page_bytes;
    arena_range whole = fcdp__arena_whole_mappings(arena, block);
    uint64_t from = fcdp__arena_mapping_start(arena, block->span, whole.to);
    bool is_single = whole.to - from == page;
    while (is_single && whole.to - from < n_pages * page && from > whole.from &&
           fcdp__arena_mapping_start(arena, block->span, from) == from - page)
        from -= page;
    block = spare_cut_before(arena, block, from);
    spare_cut_after(arena, block, whole.to);
    return block;
}

size_t fcdp__arena_unmap_begin(fcdp_arena *arena, uint64_t clock, size_t n_pages, fcdp_block **blocks_out,
                               size_t max_blocks) {
    size_t n_blocks = 0;
    while (n_pages > 0 && n_blocks < max_blocks) {
        fcdp_block *block = longest_unused(arena, clock);
        if (!block || nodes_reserve(arena, 2)) break;
        block = unmap_cut(arena, block, n_pages);
        block_seize(arena, block);
        blocks_out[n_blocks++] = block;
        size_t n = block->bytes / arena->page_bytes;
        n_pages -= n < n_pages ? n : n_pages;
    }
    FCDP_CHECK(3, arena_is_valid(arena));
    return n_blocks;
}

bool fcdp__arena_is_joined(const fcdp_arena *arena, const fcdp_block *block) {
    size_t first = (block->address - block->span->base) / arena->page_bytes;
    return block->bytes > arena->page_bytes && block->span->joined[first + 1];
}

void fcdp__arena_unmap_commit(fcdp_arena *arena, fcdp_block *block) {
    arena->counts.busy_bytes -= block->bytes;
    pages_join(arena, block, 1);
    block_hole(arena, block);
    FCDP_CHECK(3, arena_is_valid(arena));
}

void fcdp__arena_unmap_abort(fcdp_arena *arena, fcdp_block *block) {
    block_release(arena, block);
    FCDP_CHECK(3, arena_is_valid(arena));
}

void fcdp__arena_quarantine_begin(fcdp_arena *arena, fcdp_block *block) {
    FCDP_CHECK(0, block->state == FCDP_BLOCK_BUSY && !block->unmapped);
    FCDP_CHECK(0, block->address % arena->page_bytes == 0 && block->bytes % arena->page_bytes == 0);
    arena->counts.busy_bytes -= block->bytes;
    pages_join(arena, block, 1);
    block->unmapped = true;
    FCDP_CHECK(3, arena_is_valid(arena));
}

void fcdp__arena_quarantine_end(fcdp_arena *arena, fcdp_block *block) {
    FCDP_CHECK(0, block->state == FCDP_BLOCK_BUSY && block->unmapped);
    block_hole(arena, block);
    FCDP_CHECK(3, arena_is_valid(arena));
}

static bool is_idle(const fcdp_block *block) {
    return block->state == FCDP_BLOCK_FREE || block->state == FCDP_BLOCK_QUICK;
}

size_t fcdp__arena_idle_pages(const fcdp_arena *arena) {
    size_t n = 0;
    for (const fcdp_span *span = arena->spans; span; span = span->next)
        for (const fcdp_block *block = span->first; block; block = block->after) {
            if (!is_idle(block)) continue;
            fcdp_block run = *block; /* with the idle ones that follow */
            for (; block->after && is_idle(block->after); block = block->after)
                run.bytes += block->after->bytes;
            arena_range whole = fcdp__arena_whole_mappings(arena, &run);
            n += (whole.to - whole.from) / arena->page_bytes;
        }
    return n;
}

/* ---- stats ---- */

const fcdp_arena_stats *fcdp__arena_stats(const fcdp_arena *arena) {
    return &arena->counts;
}
