/* Regions of a whole node against a model, under seeded random schedules with too few device pages, with both
 * mappings.
 *
 * The model knows what each rank's spans must be once the device has done what is enqueued; only when the
 * reclaimer takes pages is not in it: a region that has lost them must then look exactly like one that was
 * evicted. Content is compared by kernels, wherever the model says that there is some. Ranks decide alike
 * what is filled, and each for itself what it restores, stores, keeps and loses.
 */
#include "tests/tiering/support.h"

#include "tiering/tiering.h"

enum { N_GROUPS = 4, N_STEPS = 250, POOL_PAGES = 3, NOBODY = -1, US = 1000 };

typedef struct model {
    bool in_use, kept;
    fcdp_span_state span[FCDP_N_SPANS];
    /* the epoch that the rank's word has, or will have when its stream comes to it */
    uint32_t stored[FCDP_N_SPANS];
} model;

typedef struct world {
    node node;
    group groups[N_GROUPS];
    model models[N_GROUPS][MAX_RANKS];
    int held; /* the group that stays in use from step to step, NOBODY: none */
    bool exact;
    uint64_t rng;
    unsigned n_refused, n_lost, n_whole, n_slices;
} world;

static bool chance(world *w, size_t one_in) {
    return random_below(&w->rng, one_in) == 0;
}

static fcdp_region *region_of(const world *w, int i, uint32_t r) {
    return w->groups[i].regions[r];
}

/* ---- the model ---- */

/* Have the words of all others reached the epoch? Then the host has the span, or
 * will have it without anybody's doing. */
static bool others_stored(const world *w, int i, uint32_t r, uint32_t s) {
    for (uint32_t k = 0; k < w->node.n; k++)
        if (k != r && (int32_t)(w->models[i][k].stored[s] - w->models[i][r].span[s].epoch) < 0) return false;
    return true;
}

static bool is_somewhere(const model *m, uint32_t s) {
    return m->span[s].stored || m->span[s].whole;
}

/* A load waits for nothing but what is enqueued already. */
static bool can_load(const world *w, int i, uint32_t r, uint32_t s) {
    const model *m = &w->models[i][r];
    return is_somewhere(m, s) && (m->span[s].whole || others_stored(w, i, r, s));
}

static void model_lose_pages(model *m) {
    m->kept = false;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) m->span[s].on_device = false;
}

/* What the reclaimer does with a kept region. Where the others' pieces are under way to the host it may have
 * come before or after them: then `is` says which. */
static void model_evict(world *w, int i, uint32_t r, const fcdp_region_state *is) {
    model *m = &w->models[i][r];
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        fcdp_span_state *span = &m->span[s];
        if (!span->on_device || span->whole || !w->groups[i].layout->span[s].bytes) continue;
        bool writes = !span->stored || !others_stored(w, i, r, s) || is->span[s].whole;
        if (!writes) continue;
        span->stored = span->whole = true;
        m->stored[s] = span->epoch;
    }
    model_lose_pages(m);
}

/* ---- looking ---- */

/* n_mapped, owned_pages and, with exact mapping, that no regions share a slot. No other thread runs. */
static void slots_check(const world *w, uint32_t r) {
    fcdp_tiering *tiering = w->node.ranks[r].tiering;
    size_t n_owned = 0, n_counted = 0, n_pages = 0;
    for (const fcdp_slot *slot = tiering->slots; slot; slot = slot->next) {
        size_t n_mapped = 0;
        for (const fcdp_region *region = tiering->regions; region; region = region->next)
            n_mapped += region->slot == slot;
        assert_int_equal(slot->n_mapped, n_mapped);
        assert_true(!w->exact || n_mapped <= 1);
        assert_false(slot->dissolving);
        n_owned += slot->owner ? slot->n_pages : 0;
        n_pages += slot->n_pages;
    }
    for (int class = 0; class < FCDP_SLOT_CLASSES; class++) n_counted += tiering->owned_pages[class];
    assert_int_equal(n_owned, n_counted);
    assert_int_equal(pool_stats_of(&w->node, r).live_pages, n_pages);
    assert_true(n_pages <= POOL_PAGES);
}

/* Takes over what the reclaimer has done since. After every use, on all ranks: an eviction writes a word that
 * the next rank's eviction of the same group may find, and its model must know. */
static fcdp_region_state model_update(world *w, int i, uint32_t r) {
    fcdp_region_state state = state_of(region_of(w, i, r));
    if (w->models[i][r].kept && !state.kept) {
        model_evict(w, i, r, &state);
        w->n_lost++;
    }
    return state;
}

static void region_check(world *w, int i, uint32_t r) {
    model *m = &w->models[i][r];
    fcdp_region_state state = model_update(w, i, r);
    assert_int_equal(state.in_use, m->in_use);
    assert_int_equal(state.kept, m->kept);
    assert_true(state.mapped || !(state.in_use || state.kept));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        assert_span(region_of(w, i, r), s, m->span[s].on_device, m->span[s].stored, m->span[s].whole,
                    m->span[s].epoch);
}

static void world_check(world *w) {
    for (uint32_t r = 0; r < w->node.n; r++) {
        for (int i = 0; i < N_GROUPS; i++) region_check(w, i, r);
        slots_check(w, r);
    }
    assert_all_is_well(&w->node);
}

/* ---- one rank's part of a use ---- */

/* False: no memory, which is only so where another group is in use. */
static bool use_begin(world *w, int i, uint32_t r) {
    (void)model_update(w, i, r);
    fcdp_status status = fcdp__region_acquire(region_of(w, i, r));
    if (status == FCDP_ERR_NO_DEVICE_MEM) return false;
    assert_ok(status);
    w->models[i][r].in_use = true;
    w->models[i][r].kept = false;
    return true;
}

static void use_end(world *w, int i, uint32_t r, bool keep) {
    model *m = &w->models[i][r];
    region_release(&w->groups[i], r, keep);
    m->in_use = false;
    if (keep)
        m->kept = true;
    else
        model_lose_pages(m);
}

static void restore(world *w, int i, uint32_t r, uint32_t s) {
    model *m = &w->models[i][r];
    if (m->span[s].on_device) return;
    if (!is_somewhere(m, s)) {
        fcdp_region *region = region_of(w, i, r);
        assert_int_equal(chance(w, 2) ? fcdp__region_load_slice(region, s)
                                      : fcdp__region_load_whole(region, s),
                         FCDP_ERR_INVALID);
        return;
    }
    if (!can_load(w, i, r, s)) return;
    bool whole = chance(w, 2);
    region_restore(&w->groups[i], r, s, whole);
    m->span[s].on_device = true;
    *(whole ? &w->n_whole : &w->n_slices) += 1;
}

static void model_store(model *m, uint32_t mask) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (mask & 1u << s) {
            m->span[s].stored = true;
            m->stored[s] = m->span[s].epoch;
        }
}

static void fill(world *w, int i, uint32_t r, uint32_t mask, fill_way way) {
    model *m = &w->models[i][r];
    region_fill(&w->groups[i], r, mask, way);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (mask & 1u << s) m->span[s] = (fcdp_span_state){.on_device = true, .epoch = m->span[s].epoch + 1};
    if (way != FILL_KEPT) model_store(m, mask);
}

static void store_late(world *w, int i, uint32_t r) {
    model *m = &w->models[i][r];
    uint32_t mask = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (m->span[s].on_device && !is_somewhere(m, s)) mask |= 1u << s;
    if (!mask) return;
    region_store_late(&w->groups[i], r, mask);
    model_store(m, mask);
}

/* ---- steps ---- */

/* On every rank, or on none. */
static bool all_begin(world *w, int i) {
    for (uint32_t r = 0; r < w->node.n; r++) {
        if (use_begin(w, i, r)) continue;
        assert_true(w->held != NOBODY);
        while (r-- > 0) use_end(w, i, r, chance(w, 2));
        return false;
    }
    return true;
}

/* A process that loads the others' pieces from the host needs all of them to store theirs. */
static void all_fill(world *w, int i, uint32_t mask) {
    bool by_host = chance(w, 2);
    for (uint32_t r = 0; r < w->node.n; r++)
        fill(w, i, r, mask, chance(w, 2) ? FILL_SLICE : by_host ? FILL_HOST : FILL_KEPT);
}

/* Some spans are gathered, others restored, and some left where they are. */
static void all_work(world *w, int i) {
    uint32_t fills = (uint32_t)random_below(&w->rng, 4) & (uint32_t)random_below(&w->rng, 4);
    for (uint32_t r = 0; r < w->node.n; r++)
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
            if (!(fills & 1u << s) && !chance(w, 5)) restore(w, i, r, s);
    if (fills) all_fill(w, i, fills);
    for (uint32_t r = 0; r < w->node.n; r++)
        region_compute(&w->groups[i], r, random_below(&w->rng, 2) * 50 * US);
}

static void all_end(world *w, int i) {
    for (uint32_t r = 0; r < w->node.n; r++) {
        if (!chance(w, 4)) store_late(w, i, r);
        use_end(w, i, r, chance(w, 2));
    }
}

static void do_use(world *w, int i) {
    if (w->held == i) { /* another module computes with it */
        for (uint32_t r = 0; r < w->node.n; r++) region_compute(&w->groups[i], r, 0);
        return;
    }
    if (!all_begin(w, i)) {
        w->n_refused++;
        return;
    }
    all_work(w, i);
    all_end(w, i);
}

/* A group stays in use over the next steps, or no longer. */
static void do_hold(world *w, int i) {
    if (w->held != NOBODY) {
        all_end(w, w->held);
        w->held = NOBODY;
    } else if (all_begin(w, i)) {
        all_work(w, i);
        w->held = i;
    }
}

static void do_invalidate(world *w, int i) {
    uint32_t mask = 1 + (uint32_t)random_below(&w->rng, 3);
    for (uint32_t r = 0; r < w->node.n; r++) {
        fcdp__region_invalidate(region_of(w, i, r), mask);
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
            fcdp_span_state *span = &w->models[i][r].span[s];
            if (mask & 1u << s) *span = (fcdp_span_state){.epoch = span->epoch};
        }
    }
}

/* Once the words have come that are on their way. Others may keep the span, and not have stored theirs. */
static void do_peek(world *w, int i, uint32_t r) {
    node_sync(&w->node);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_span_state *span = &w->models[i][r].span[s];
        assert_peek(&w->groups[i], r, s, span->epoch, span->on_device || can_load(w, i, r, s));
    }
}

/* Everything of this rank in use at once: more than its pool has. */
static void do_exhaust(world *w, uint32_t r) {
    bool used[N_GROUPS];
    size_t n_refused = 0;
    if (w->held != NOBODY) return;
    for (int i = 0; i < N_GROUPS; i++) {
        used[i] = use_begin(w, i, r);
        n_refused += !used[i];
    }
    assert_true(n_refused > 0);
    for (int i = 0; i < N_GROUPS; i++)
        if (used[i]) use_end(w, i, r, chance(w, 2));
}

static void do_squeeze(world *w, uint32_t r) {
    if (w->held != NOBODY) {
        (void)fcdp__tiering_reclaim(w->node.ranks[r].tiering, 1 + random_below(&w->rng, POOL_PAGES));
        return;
    }
    pages_squeeze(&w->node, r, POOL_PAGES);
    assert_int_equal(pool_stats_of(&w->node, r).live_pages, 0);
    for (int i = 0; i < N_GROUPS; i++) assert_false(state_of(region_of(w, i, r)).mapped);
}

static void world_step(world *w) {
    int i = (int)random_below(&w->rng, N_GROUPS);
    uint32_t r = (uint32_t)random_below(&w->rng, w->node.n);
    switch (random_below(&w->rng, 18)) {
    case 0: do_invalidate(w, i); break;
    case 1: do_squeeze(w, r); break;
    case 2: do_exhaust(w, r); break;
    case 3: fcdp__tiering_begin_pass(w->node.ranks[r].tiering); break;
    case 4: node_sync(&w->node); break;
    case 5:
    case 6: do_hold(w, i); break;
    case 7:
    case 8: do_peek(w, i, r); break;
    default: do_use(w, i); break;
    }
    world_check(w);
}

static void world_open(world *w, uint32_t n_ranks) {
    fcdp_extent_spec specs[6];
    node_open(&w->node, n_ranks, POOL_PAGES, w->exact);
    w->held = NOBODY;
    for (int i = 0; i < N_GROUPS; i++) {
        uint32_t n = 1 + (uint32_t)random_below(&w->rng, 6);
        uint8_t only = (uint8_t)random_below(&w->rng, 4); /* 0, 1: all in that span */
        for (uint32_t e = 0; e < n; e++)
            specs[e] = (fcdp_extent_spec){1 + random_below(&w->rng, 20000 / n_ranks),
                                          only < 2 ? only : (uint8_t)random_below(&w->rng, 2)};
        /* one larger than a page: two of its kind never fit */
        if (i == 0) specs[0].shard_bytes = (size_t)(PAGE + PAGE / 2) / (2 * n_ranks);
        group_open(&w->groups[i], &w->node, i ? "small" : "large", specs, n, random_next(&w->rng));
    }
}

static void world_close(world *w) {
    if (w->held != NOBODY) all_end(w, w->held);
    w->held = NOBODY;
    for (int i = 0; i < N_GROUPS; i++) {
        do_use(w, i);
        world_check(w);
    }
    node_sync(&w->node);
    for (int i = 0; i < N_GROUPS; i++) group_close(&w->groups[i]);
    node_close(&w->node);
}

/* One round with TEST_COARSER: each run of the tests has other seeds. */
static void schedules_of(uint32_t n_ranks, int n_rounds) {
    if (getenv("TEST_COARSER")) n_rounds = 1;
    uint64_t seed = seed_choose("regions");
    for (int exact = 0; exact < 2; exact++)
        for (int round = 0; round < n_rounds; round++) {
            world w = {.rng = seed + (uint64_t)round, .exact = exact};
            node_has_copies = n_ranks > 1 && random_below(&w.rng, 2);
            world_open(&w, n_ranks);
            for (int i = 0; i < N_STEPS; i++) world_step(&w);
            world_close(&w);
            print_message("%s%s: %u uses refused, %u kept regions lost, %u loads by slice, %u whole\n",
                          exact ? "exact" : "slots", node_has_copies ? ", two copies" : "", w.n_refused,
                          w.n_lost, w.n_slices, w.n_whole);
            /* else the schedule tests nothing */
            assert_true(w.n_lost > 0 && w.n_slices > 0 && w.n_whole > 0);
        }
}

static void a_rank_alone(void **state) {
    (void)state;
    schedules_of(1, 3);
}
static void two_ranks(void **state) {
    (void)state;
    schedules_of(2, 3);
}
static void five_ranks(void **state) {
    (void)state;
    schedules_of(5, 1);
}

int main(void) {
    node_policy = FCDP_POLICY_NEXT_USE; /* what is recorded changes nothing but the choice of victims */
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_rank_alone), cmocka_unit_test(two_ranks),
                                       cmocka_unit_test(five_ranks)};
    return cmocka_run_group_tests_name("tiering_region_random", tests, NULL, NULL);
}
