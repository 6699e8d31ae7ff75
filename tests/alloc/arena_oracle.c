/* arena_oracle.c - an arena against an oracle of held ranges and mapped pages, as a schedule of bytes says.
 */
#include "tests/alloc/arena_oracle.h"

#include "alloc/arena.h"

enum { PAGE = 8192, N_PAGES = 64, SPAN = PAGE * N_PAGES, UNIT = FCDP_ARENA_UNIT };
static const uint64_t BASE = 1 << 30;

enum { MAX_HELD = 256, MAX_BUSY = 8 };

typedef struct range { /* no other block may have it: live, or busy */
    fcdp_block *block;
    uint64_t address;
    size_t bytes;
    bool busy;
} range;

typedef struct oracle {
    fcdp_arena *arena;
    const uint8_t *choices;
    size_t n_choices;
    bool mapped[N_PAGES];
    size_t mapping[N_PAGES]; /* the first page of the mapping that a mapped page is in */
    range held[MAX_HELD];
    size_t n_held, n_busy;
} oracle;

/* The next two bytes of the schedule choose. */
static size_t below(oracle *o, size_t n) {
    if (o->n_choices < 2) return 0;
    size_t choice = o->choices[0] | (size_t)o->choices[1] << 8;
    o->choices += 2;
    o->n_choices -= 2;
    return choice % n;
}

static void growth_map(oracle *o, const fcdp_growth *growth, size_t n_each) {
    size_t n = 0;
    for (const fcdp_block *block = growth->first;; block = block->after) {
        size_t first = (block->address - BASE) / PAGE;
        for (size_t i = 0; block->unmapped && i < block->bytes / PAGE; i++, n++) {
            FCDP_CHECK(0, !(o->mapped[first + i]));
            o->mapped[first + i] = true;
            o->mapping[first + i] = first + i / n_each * n_each;
        }
        if (block == growth->last) break;
    }
    FCDP_CHECK(0, (n) == (growth->n_pages));
}

static void held_add(oracle *o, fcdp_block *block, size_t bytes) {
    FCDP_CHECK(0, (block->bytes) == (bytes));
    for (size_t at = 0; at < bytes; at += UNIT) FCDP_CHECK(0, o->mapped[(block->address + at - BASE) / PAGE]);
    for (size_t i = 0; i < o->n_held; i++)
        FCDP_CHECK(0, block->address >= o->held[i].address + o->held[i].bytes ||
                          o->held[i].address >= block->address + bytes);
    fcdp__arena_request(o->arena, block, bytes - 1);
    o->held[o->n_held++] = (range){block, block->address, bytes, false};
}

static fcdp_block *oracle_grow(oracle *o, size_t bytes) {
    fcdp_growth growth;
    size_t n_ahead = below(o, 3) ? 0 : below(o, 6), n_each = 1 + (below(o, 2) ? 0 : below(o, 5));
    fcdp_status status = fcdp__arena_grow_begin(o->arena, bytes, below(o, 2), n_ahead, &growth);
    if (status == FCDP_PENDING) return NULL;
    FCDP_CHECK(0, !(status));
    if (below(o, 4) == 0) { /* no pages were to be had */
        fcdp__arena_grow_abort(o->arena, &growth);
        return NULL;
    }
    growth_map(o, &growth, n_each);
    return fcdp__arena_grow_commit(o->arena, &growth, n_each);
}

static void oracle_take(oracle *o) {
    size_t bytes = UNIT * (1 + (below(o, 4) ? below(o, 40) : below(o, 300)));
    if (o->n_held == MAX_HELD) return;
    fcdp_block *block = below(o, 2) ? fcdp__arena_take_quick(o->arena, bytes) : NULL;
    if (!block && below(o, 4)) fcdp__arena_flush(o->arena);
    if (!block && fcdp__arena_take(o->arena, bytes, below(o, 2), &block) == FCDP_PENDING)
        block = oracle_grow(o, bytes);
    if (block) held_add(o, block, bytes);
}

static void oracle_give(oracle *o) {
    if (o->n_held == 0) return;
    range *r = &o->held[below(o, o->n_held)];
    FCDP_CHECK(0, fcdp__arena_find(o->arena, r->address) == (r->busy ? NULL : r->block));
    if (!r->busy && o->n_busy < MAX_BUSY && below(o, 8) == 0) {
        fcdp__arena_set_busy(o->arena, r->block);
        r->busy = true;
        o->n_busy++;
        return;
    }
    o->n_busy -= r->busy;
    fcdp__arena_give(o->arena, r->block);
    *r = o->held[--o->n_held];
}

/* Whole mappings: one of several pages, or any number of single ones. */
static void unmapped_check(const oracle *o, const fcdp_block *block) {
    size_t first = (block->address - BASE) / PAGE, n = block->bytes / PAGE;
    bool joined = fcdp__arena_is_joined(o->arena, block);
    FCDP_CHECK(0, block->address % PAGE == 0 && block->bytes % PAGE == 0);
    for (size_t i = 0; i < n; i++)
        FCDP_CHECK(0, o->mapped[first + i] && o->mapping[first + i] == (joined ? first : first + i));
    FCDP_CHECK(0, first + n == N_PAGES || !o->mapped[first + n] || o->mapping[first + n] == first + n);
}

static void oracle_unmap(oracle *o) {
    fcdp_block *blocks[4];
    uint64_t clock = fcdp__arena_clock(o->arena) - below(o, 4);
    size_t limit = 1 + below(o, 20), n_pages = 0,
           n = fcdp__arena_unmap_begin(o->arena, clock, limit, blocks, 4);
    for (size_t i = 0; i < n; i++) {
        FCDP_CHECK(0, n_pages < limit && blocks[i]->freed_at <= clock);
        unmapped_check(o, blocks[i]);
        n_pages += blocks[i]->bytes / PAGE;
        FCDP_CHECK(0, n_pages <= limit || fcdp__arena_is_joined(o->arena, blocks[i]));
    }
    for (size_t i = 0; i < n; i++) {
        bool refused = below(o, 4) == 0;
        size_t first = (blocks[i]->address - BASE) / PAGE;
        for (size_t k = 0; k < blocks[i]->bytes / PAGE; k++) o->mapped[first + k] = refused;
        if (refused)
            fcdp__arena_unmap_abort(o->arena, blocks[i]);
        else
            fcdp__arena_unmap_commit(o->arena, blocks[i]);
    }
}

/* Of mappings without a byte in use. */
static size_t idle_pages(const oracle *o) {
    bool used[N_PAGES] = {false}; /* by the first page of a mapping */
    size_t n = 0;
    for (size_t i = 0; i < o->n_held; i++)
        for (size_t at = 0; at < o->held[i].bytes; at += UNIT)
            used[o->mapping[(o->held[i].address + at - BASE) / PAGE]] = true;
    for (size_t i = 0; i < N_PAGES; i++) n += o->mapped[i] && !used[o->mapping[i]];
    return n;
}

static void check_totals(const oracle *o) {
    fcdp_arena_stats stats;
    size_t mapped = 0, live = 0, requested = 0, busy = 0;
    stats = *fcdp__arena_stats(o->arena);
    for (size_t i = 0; i < N_PAGES; i++) mapped += o->mapped[i] ? PAGE : 0;
    for (size_t i = 0; i < o->n_held; i++) {
        *(o->held[i].busy ? &busy : &live) += o->held[i].bytes;
        requested += o->held[i].busy ? 0 : o->held[i].bytes - 1;
    }
    FCDP_CHECK(0, (stats.live_bytes) == (live));
    FCDP_CHECK(0, (stats.requested_bytes) == (requested));
    FCDP_CHECK(0, (stats.busy_bytes) == (busy));
    FCDP_CHECK(0, fcdp__arena_idle_pages(o->arena) == idle_pages(o));
    FCDP_CHECK(0, (stats.live_bytes + stats.busy_bytes + stats.free_bytes + stats.quick_bytes) == (mapped));
}

/* Everything is given back: then every page can leave. */
static void oracle_end(oracle *o) {
    fcdp_block *blocks[N_PAGES];
    for (size_t i = 0; i < o->n_held; i++) fcdp__arena_give(o->arena, o->held[i].block);
    fcdp__arena_flush(o->arena);
    size_t n = fcdp__arena_unmap_begin(o->arena, UINT64_MAX, N_PAGES, blocks, N_PAGES);
    for (size_t i = 0; i < n; i++) fcdp__arena_unmap_commit(o->arena, blocks[i]);
    const fcdp_arena_stats stats = *fcdp__arena_stats(o->arena);
    FCDP_CHECK(0, (stats.free_bytes + stats.busy_bytes + stats.quick_bytes + stats.live_bytes) == (0));
    FCDP_CHECK(0, (stats.n_holes) == (1));
    fcdp__arena_destroy(o->arena);
}

void arena_oracle_run(const uint8_t *choices, size_t n_choices) {
    int level = fcdp__check_level;
    fcdp__check_level = 3;
    oracle o = {.choices = choices, .n_choices = n_choices};
    FCDP_CHECK(0, !fcdp__arena_create(PAGE, &o.arena));
    FCDP_CHECK(0, !fcdp__arena_add_span(o.arena, BASE, SPAN, NULL));
    while (o.n_choices >= 2) {
        size_t what = below(&o, 16);
        if (what < 8)
            oracle_take(&o);
        else if (what < 14)
            oracle_give(&o);
        else if (what < 15)
            oracle_unmap(&o);
        else
            fcdp__arena_flush(o.arena);
        check_totals(&o);
    }
    oracle_end(&o);
    fcdp__check_level = level;
}
