/* Regions of a whole node against a model, under seeded random schedules with too few device pages.
 *
 * The model knows what each rank's spans must be; only when the reclaimer takes pages is not in it: a region that has lost
 * them must then look exactly like one that was evicted. Content is checked wherever the model says that there is some.
 */
#include "tests/tiering/support.h"

enum { N_GROUPS = 4, N_STEPS = 300 };

typedef struct model_span {
    bool on_device, slice_on_host, whole_on_host;
    uint32_t epoch;
} model_span;
typedef struct model {
    bool mapped;
    unsigned n_uses;
    model_span span[FCDP_N_SPANS];
} model;

typedef struct world {
    node node;
    group groups[N_GROUPS];
    model models[N_GROUPS][MAX_RANKS];
    uint64_t rng;
} world;

static bool has_bytes(const world *w, int i, uint32_t s) {
    return w->groups[i].layout->span[s].bytes > 0;
}

static bool peers_stored(const world *w, int i, uint32_t s, uint32_t epoch) {
    for (uint32_t r = 0; r < w->node.n; r++)
        if ((int32_t)(fcdp__board_read(w->groups[i].blocks[0], s ? FCDP_BOARD_STORED_1 : FCDP_BOARD_STORED_0,
                                       r) -
                      epoch) < 0)
            return false;
    return true;
}

static void model_unmap(model *m) {
    m->mapped = false;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) m->span[s].on_device = false;
}

static void model_evict(model *m) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (m->span[s].on_device) m->span[s].slice_on_host = m->span[s].whole_on_host = true;
    model_unmap(m);
}

/* Compare every region with its model, after taking over what the reclaimer may have done. */
static void world_check(world *w) {
    for (int i = 0; i < N_GROUPS; i++)
        for (uint32_t r = 0; r < w->node.n; r++) {
            model *m = &w->models[i][r];
            fcdp_region_state state = state_of(w->groups[i].regions[r]);
            assert_int_equal(state.in_use, m->n_uses > 0);
            if (m->mapped && !state.mapped && !m->n_uses) model_evict(m);
            assert_int_equal(state.mapped, m->mapped);
            for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
                assert_int_equal(state.span[s].on_device, m->span[s].on_device);
                assert_int_equal(state.span[s].slice_on_host, m->span[s].slice_on_host);
                assert_int_equal(state.span[s].whole_on_host, m->span[s].whole_on_host);
                assert_int_equal(state.span[s].epoch, m->span[s].epoch);
            }
        }
}

static bool use_begin(world *w, int i, uint32_t r) {
    model *m = &w->models[i][r];
    fcdp_status status = fcdp__region_begin_use(w->groups[i].regions[r]);
    if (status == FCDP_ERR_NO_DEVICE_MEM) return false;
    assert_ok(status);
    /* It may have been evicted since the model looked last, and be mapped anew: then nothing is on the device. */
    fcdp_region_state state = state_of(w->groups[i].regions[r]);
    bool lost = false;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) lost |= m->span[s].on_device && !state.span[s].on_device;
    if (lost) model_evict(m);
    m->mapped = true;
    m->n_uses++;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (m->span[s].on_device) assert_content(&w->groups[i], r, s, m->span[s].epoch);
    return true;
}

static void use_end(world *w, int i, uint32_t r) {
    fcdp__region_end_use(w->groups[i].regions[r]);
    w->models[i][r].n_uses--;
}

/* Optimizer step, then a gather: all ranks of the node. */
static void do_fill(world *w, int i) {
    uint32_t mask = 1 + (uint32_t)random_below(&w->rng, 3);
    for (uint32_t r = 0; r < w->node.n; r++) {
        if (random_below(&w->rng, 2)) {
            fcdp__region_invalidate(w->groups[i].regions[r], mask);
            for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
                if (mask & 1u << s)
                    w->models[i][r].span[s] = (model_span){.epoch = w->models[i][r].span[s].epoch};
        }
        assert_true(use_begin(w, i, r));
        span_fill(&w->groups[i], r, mask);
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
            if (mask & 1u << s)
                w->models[i][r].span[s] =
                    (model_span){.on_device = true, .epoch = w->models[i][r].span[s].epoch + 1};
        use_end(w, i, r);
    }
}

static void do_store(world *w, int i, uint32_t r) {
    assert_ok(fcdp__region_store(w->groups[i].regions[r], NULL));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        model_span *span = &w->models[i][r].span[s];
        if (!span->on_device || span->slice_on_host) continue;
        span->slice_on_host = true;
        span->whole_on_host = w->node.n == 1;
    }
}

static void do_drop(world *w, int i, uint32_t r) {
    model *m = &w->models[i][r];
    bool loses = false;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        loses |= m->span[s].on_device && !m->span[s].slice_on_host && has_bytes(w, i, s);
    fcdp_status status = fcdp__region_drop(w->groups[i].regions[r], NULL);
    assert_int_equal(status, loses ? FCDP_ERR_INVALID : FCDP_OK);
    if (!status) model_unmap(m);
}

static void do_evict(world *w, int i, uint32_t r) {
    model *m = &w->models[i][r];
    assert_ok(fcdp__region_evict(w->groups[i].regions[r]));
    if (m->mapped) model_evict(m);
}

static void do_invalidate(world *w, int i) {
    uint32_t mask = 1 + (uint32_t)random_below(&w->rng, 3);
    for (uint32_t r = 0; r < w->node.n; r++) {
        fcdp__region_invalidate(w->groups[i].regions[r], mask);
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
            if (mask & 1u << s)
                w->models[i][r].span[s] = (model_span){.epoch = w->models[i][r].span[s].epoch};
    }
}

/* All ranks of the node, slice by slice. */
static void do_load_slices(world *w, int i) {
    for (uint32_t r = 0; r < w->node.n; r++) {
        assert_true(use_begin(w, i, r));
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
            model_span *span = &w->models[i][r].span[s];
            fcdp_status status = fcdp__region_load_slice(w->groups[i].regions[r], s);
            assert_int_equal(status, span->on_device || span->slice_on_host ? FCDP_OK : FCDP_ERR_INVALID);
            if (status || span->on_device) continue;
            slices_arrive(&w->groups[i], r, s, span->epoch);
            fcdp__region_loaded(w->groups[i].regions[r], s);
            span->on_device = true;
            assert_content(&w->groups[i], r, s, span->epoch);
        }
        use_end(w, i, r);
    }
}

static void do_load_whole(world *w, int i, uint32_t r) {
    assert_true(use_begin(w, i, r));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        model_span *span = &w->models[i][r].span[s];
        bool can_wait = span->whole_on_host || !has_bytes(w, i, s) || peers_stored(w, i, s, span->epoch);
        if (!span->on_device && span->slice_on_host && !can_wait)
            continue; /* it would wait for a peer of this very thread */
        fcdp_status status = fcdp__region_load_whole(w->groups[i].regions[r], s);
        assert_int_equal(status, span->on_device || span->slice_on_host ? FCDP_OK : FCDP_ERR_INVALID);
        if (status || span->on_device) continue;
        span->on_device = span->whole_on_host = true;
        assert_content(&w->groups[i], r, s, span->epoch);
    }
    use_end(w, i, r);
}

/* Everything of this rank in use at once: more than its pool has. */
static void do_exhaust(world *w, uint32_t r) {
    bool used[N_GROUPS];
    size_t n_refused = 0;
    for (int i = 0; i < N_GROUPS; i++) {
        used[i] = use_begin(w, i, r);
        n_refused += !used[i];
    }
    assert_true(n_refused > 0);
    for (int i = 0; i < N_GROUPS; i++)
        if (used[i]) use_end(w, i, r);
}

static void world_step(world *w) {
    int i = (int)random_below(&w->rng, N_GROUPS);
    uint32_t r = (uint32_t)random_below(&w->rng, w->node.n);
    switch (random_below(&w->rng, 16)) {
    case 0:
    case 1:
        do_fill(w, i);
        break;
    case 2:
    case 3:
    case 4:
        do_store(w, i, r);
        break;
    case 5:
    case 6:
        do_drop(w, i, r);
        break;
    case 7:
        do_evict(w, i, r);
        break;
    case 8:
        do_invalidate(w, i);
        break;
    case 9:
    case 10:
        do_load_slices(w, i);
        break;
    case 11:
    case 12:
    case 13:
        do_load_whole(w, i, r);
        break;
    case 14:
        for (r = 0; r < w->node.n; r++) do_store(w, i, r);
        break;
    default:
        do_exhaust(w, r);
        break;
    }
    world_check(w);
}

static void world_open(world *w, uint32_t n_ranks) {
    fcdp_extent_spec specs[6];
    node_open(&w->node, n_ranks, 3);
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

static void schedules_of(uint32_t n_ranks, int n_rounds) {
    uint64_t seed = seed_choose("regions");
    for (int round = 0; round < n_rounds; round++) {
        world w = {.rng = seed + (uint64_t)round};
        world_open(&w, n_ranks);
        for (int i = 0; i < N_STEPS; i++) world_step(&w);
        for (int i = 0; i < N_GROUPS; i++) group_close(&w.groups[i]);
        node_close(&w.node);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_rank_alone), cmocka_unit_test(two_ranks),
                                       cmocka_unit_test(five_ranks)};
    return cmocka_run_group_tests_name("tiering_region_random", tests, NULL, NULL);
}
