/* arena_oracle.c - an arena against an oracle of held ranges and mapped pages, as a schedule of bytes says.
 */
#include "tests/alloc/arena_oracle.h"

#include <string.h>

#include "alloc/arena.h"

enum { PAGE = 8192, N_PAGES = 64, SPAN = PAGE * N_PAGES, UNIT = FCDP_ARENA_UNIT };
static const uint64_t BASE = 1 << 30;

enum { MAX_HELD = 256, MAX_BUSY = 8 };

typedef struct range { /* nobody else may have it: live, or busy */
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

static void growth_map(oracle *o, const fcdp_growth *growth) {
    size_t n = 0;
    for (const fcdp_block *block = growth->first;; block = block->after) {
        for (size_t at = 0; block->unmapped && at < block->bytes; at += PAGE, n++) {
            size_t page = (block->address + at - BASE) / PAGE;
            FCDP_CHECK(0, !(o->mapped[page]));
            o->mapped[page] = true;
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
    fcdp_status status = fcdp__arena_grow_begin(o->arena, bytes, &growth);
    if (status == FCDP_PENDING) return NULL;
    FCDP_CHECK(0, !(status));
    if (below(o, 4) == 0) { /* no pages were to be had */
        fcdp__arena_grow_abort(o->arena, &growth);
        return NULL;
    }
    growth_map(o, &growth);
    return fcdp__arena_grow_commit(o->arena, &growth);
}

static void oracle_take(oracle *o) {
    size_t bytes = UNIT * (1 + (below(o, 4) ? below(o, 40) : below(o, 300)));
    if (o->n_held == MAX_HELD) return;
    fcdp_block *block = below(o, 2) ? fcdp__arena_take_quick(o->arena, bytes) : NULL;
    if (!block && below(o, 4)) fcdp__arena_flush(o->arena);
    if (!block && fcdp__arena_take(o->arena, bytes, &block) == FCDP_PENDING) block = oracle_grow(o, bytes);
    if (block) held_add(o, block, bytes);
}

static void oracle_give(oracle *o) {
    if (o->n_held == 0) return;
    range *r = &o->held[below(o, o->n_held)];
    FCDP_CHECK(0, fcdp__arena_find(o->arena, r->address) == (r->busy ? NULL : r->block));
    if (!r->busy && o->n_busy < MAX_BUSY && below(o, 8) == 0) {
        fcdp__arena_hold(o->arena, r->block);
        r->busy = true;
        o->n_busy++;
        return;
    }
    o->n_busy -= r->busy;
    fcdp__arena_give(o->arena, r->block);
    *r = o->held[--o->n_held];
}

static void oracle_vacate(oracle *o) {
    fcdp_block *blocks[4];
    uint64_t clock = fcdp__arena_clock(o->arena) - below(o, 4);
    size_t limit = 1 + below(o, 20), n_pages = 0, n = fcdp__arena_vacate_begin(o->arena, clock, limit, blocks, 4);
    for (size_t i = 0; i < n; i++) {
        FCDP_CHECK(0, ((blocks[i]->address - BASE) % PAGE) == (0));
        FCDP_CHECK(0, blocks[i]->freed_at <= clock);
        n_pages += blocks[i]->bytes / PAGE;
    }
    FCDP_CHECK(0, n_pages <= limit);
    for (size_t i = 0; i < n; i++) {
        bool refused = below(o, 4) == 0;
        for (size_t at = 0; at < blocks[i]->bytes; at += PAGE) {
            size_t page = (blocks[i]->address + at - BASE) / PAGE;
            FCDP_CHECK(0, o->mapped[page]);
            o->mapped[page] = refused;
        }
        if (refused)
            fcdp__arena_vacate_abort(o->arena, blocks[i]);
        else
            fcdp__arena_vacate_commit(o->arena, blocks[i]);
    }
}

static size_t idle_pages(const oracle *o) {
    bool idle[N_PAGES];
    size_t n = 0;
    memcpy(idle, o->mapped, sizeof idle);
    for (size_t i = 0; i < o->n_held; i++)
        for (size_t at = 0; at < o->held[i].bytes; at += UNIT)
            idle[(o->held[i].address + at - BASE) / PAGE] = false;
    for (size_t i = 0; i < N_PAGES; i++) n += idle[i];
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
    size_t n = fcdp__arena_vacate_begin(o->arena, UINT64_MAX, N_PAGES, blocks, N_PAGES);
    for (size_t i = 0; i < n; i++) fcdp__arena_vacate_commit(o->arena, blocks[i]);
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
            oracle_vacate(&o);
        else
            fcdp__arena_flush(o.arena);
        check_totals(&o);
    }
    oracle_end(&o);
    fcdp__check_level = level;
}
