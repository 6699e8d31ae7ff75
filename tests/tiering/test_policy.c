/* Policy: the table of tau, properties of the victim, and plans against all that could be kept. */
#include "tests/alloc/support.h"

#include "tiering/policy.h"

static void tau_keeps_below_its_share_of_the_budget(void **state) {
    (void)state;
    static const struct {
        double tau;
        size_t used, budget;
        bool keeps;
    } table[] = {
        {0.0, 0, 100, false},
        {0.0, 1, 100, false},
        {0.5, 49, 100, true},
        {0.5, 50, 100, false},
        {0.5, 51, 100, false},
        {1.0, 0, 100, true},
        {1.0, 99, 100, true},
        {1.0, 100, 100, false},
        {0.25, (size_t)10 << 30, (size_t)80 << 30, true},
        {0.25, (size_t)20 << 30, (size_t)80 << 30, false},
        {1.0, 0, 0, false},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (fcdp__policy_keeps(table[i].tau, table[i].used, table[i].budget) != table[i].keeps)
            fail_msg("row %zu", i);
}

static void more_room_or_more_tau_never_stops_keeping(void **state) {
    (void)state;
    uint64_t rng = seed_choose("policy tau");
    for (int i = 0; i < 10000; i++) {
        double tau = (double)random_below(&rng, 101) / 100;
        size_t used = random_below(&rng, 1000), budget = random_below(&rng, 1000);
        if (!fcdp__policy_keeps(tau, used, budget)) continue;
        assert_true(fcdp__policy_keeps(1.0, used, budget));
        assert_true(fcdp__policy_keeps(tau, used, budget + 1));
        assert_true(fcdp__policy_keeps(tau, used ? used - 1 : 0, budget));
    }
}

static void the_victim_is_idle_then_unplanned_then_clean_then_furthest(void **state) {
    (void)state;
    uint64_t rng = seed_choose("policy victim");
    fcdp_candidate c[12];
    for (int round = 0; round < 20000; round++) {
        size_t n = random_below(&rng, 13);
        bool any = false, any_unplanned = false, any_clean = false;
        for (size_t i = 0; i < n; i++) {
            c[i] = (fcdp_candidate){random_below(&rng, 3), random_below(&rng, 20), random_below(&rng, 2),
                                    random_below(&rng, 2), random_below(&rng, 2)};
            bool eligible = c[i].bytes && !c[i].busy;
            any |= eligible;
            any_unplanned |= eligible && !c[i].planned;
        }
        for (size_t i = 0; i < n; i++)
            any_clean |= c[i].bytes && !c[i].busy && c[i].planned == !any_unplanned && c[i].clean;
        size_t v = fcdp__policy_victim(c, n);
        if (!any) {
            assert_int_equal(v, n);
            continue;
        }
        assert_true(v < n && c[v].bytes && !c[v].busy && c[v].planned == !any_unplanned &&
                    c[v].clean == any_clean);
        for (size_t i = 0; i < n; i++)
            if (c[i].bytes && !c[i].busy && c[i].planned == c[v].planned && c[i].clean == c[v].clean)
                assert_true(c[i].distance <= c[v].distance);
    }
}

/* ---- host memory ---- */

static size_t spared(const fcdp_host_claim *claim) {
    size_t plain = (claim->stays ? 1 : 2) * claim->bytes; /* gathered in a step without a copy on the host */
    return plain - (claim->bytes - claim->frozen_bytes);
}

static void host_memory_goes_first_where_it_spares_most(void **state) {
    (void)state;
    enum { KB = 1024, N = 6 };
    fcdp_host_claim claims[N] = {
        {.bytes = 8 * KB, .index = 0, .stays = true},
        {.bytes = 8 * KB, .index = 1},
        {.bytes = 8 * KB, .frozen_bytes = 4 * KB, .index = 2},
        {.bytes = 4 * KB, .frozen_bytes = 4 * KB, .index = 3},
        {.bytes = 16 * KB, .index = 4},
        {.bytes = 2 * KB, .frozen_bytes = 2 * KB, .index = 5, .stays = true},
    };
    static const uint32_t expected[N] = {3, 2, 5, 4, 1, 0};
    fcdp__policy_host_order(claims, N);
    for (size_t i = 0; i < N; i++) assert_int_equal(claims[i].index, expected[i]);
}

static void what_a_plan_has_elsewhere_takes_no_host_memory(void **state) {
    (void)state;
    enum { N = 6 };
    fcdp_host_claim claims[N] = {
        {.bytes = 4096, .frozen_bytes = 4096, .index = 0, .tier = FCDP_TIER_GATHER},
        {.bytes = 4096, .index = 1, .tier = FCDP_TIER_FILE},
        {.bytes = 4096, .index = 2, .tier = FCDP_TIER_HOST_WHOLE},
        {.bytes = 8192, .frozen_bytes = 8192, .index = 3, .tier = FCDP_TIER_FILE},
        {.bytes = 4096, .frozen_bytes = 4096, .index = 4, .tier = FCDP_TIER_DEVICE},
        {.bytes = 8192, .index = 5},
    };
    static const uint32_t expected[N] = {4, 5, 2, 1, 3, 0};
    fcdp__policy_host_order(claims, N);
    for (size_t i = 0; i < N; i++) assert_int_equal(claims[i].index, expected[i]);
}

/* No other choice that takes as little spares more than the first claims of the order do; and the order does
 * not depend on that of the arguments. */
static void no_choice_of_as_many_bytes_spares_more(void **state) {
    (void)state;
    uint64_t rng = seed_choose("policy host order");
    enum { MOST = 9 };
    for (int round = 0; round < 2000; round++) {
        uint32_t n = 1 + (uint32_t)random_below(&rng, MOST);
        fcdp_host_claim claims[MOST], again[MOST];
        /* the largest sizes show that products of two do not overflow */
        size_t unit = (size_t)512 << (random_below(&rng, 2) ? 27 : 0);
        for (uint32_t i = 0; i < n; i++) {
            size_t bytes = 1 + random_below(&rng, 12);
            size_t frozen = random_below(&rng, 2) ? random_below(&rng, bytes + 1) : 0;
            claims[i] = (fcdp_host_claim){bytes * unit, frozen * unit, random_below(&rng, 3) == 0, i,
                                          FCDP_TIER_POLICY};
        }
        for (uint32_t i = 0; i < n; i++) again[i] = claims[n - 1 - i];
        fcdp__policy_host_order(claims, n);
        fcdp__policy_host_order(again, n);
        size_t bytes = 0, spares = 0;
        for (uint32_t first = 0; first < n; first++) {
            assert_int_equal(claims[first].index, again[first].index);
            bytes += claims[first].bytes;
            spares += spared(&claims[first]);
            for (uint32_t chosen = 0; chosen < UINT32_C(1) << n; chosen++) {
                size_t other_bytes = 0, other_spares = 0;
                for (uint32_t i = 0; i < n; i++) {
                    if (!(chosen >> i & 1)) continue;
                    other_bytes += claims[i].bytes;
                    other_spares += spared(&claims[i]);
                }
                if (other_bytes <= bytes) assert_true(other_spares <= spares);
            }
        }
    }
}

/* ---- the period ---- */

static void a_period_is_found_as_by_hand(void **state) {
    (void)state;
    uint64_t rng = seed_choose("policy period");
    enum { MOST = 60 };
    uint32_t symbols[MOST], scratch[MOST];
    for (int round = 0; round < 5000; round++) {
        size_t n = random_below(&rng, MOST + 1), best = 0, best_same = 0, n_same;
        uint64_t n_symbols = 1 + random_below(&rng, 4);
        for (size_t i = 0; i < n; i++) symbols[i] = (uint32_t)random_below(&rng, n_symbols);
        for (size_t period = 1; period < n; period++) {
            size_t same = 0;
            while (same + period < n && symbols[n - 1 - same] == symbols[n - 1 - same - period]) same++;
            if (same > best_same) {
                best_same = same;
                best = period;
            }
        }
        assert_int_equal(fcdp__policy_period(symbols, n, scratch, &n_same), best);
        assert_int_equal(n_same, best_same);
    }
}

/* ---- plans ---- */

enum { PAGE = 1000, MOST_USES = 64, MOST_REGIONS = 16 };

typedef struct schedule {
    fcdp_planned_use uses[MOST_USES];
    size_t n;
    uint32_t n_regions;
} schedule;

static size_t next_of(const schedule *s, size_t i) {
    size_t next = i + 1;
    while (s->uses[next % s->n].region != s->uses[i].region) next++;
    return next;
}

/* Bytes that a period moves between device and host. */
static size_t moved(const schedule *s, const bool *keep) {
    size_t bytes = 0;
    for (size_t i = 0; i < s->n; i++) {
        const fcdp_planned_use *next = &s->uses[next_of(s, i) % s->n];
        if (!keep[i]) bytes += next->load_bytes;
        bool stores = false;
        size_t at = i;
        do {
            stores |= !keep[at];
            at = next_of(s, at) % s->n;
        } while (at != i && !s->uses[at].store_bytes);
        if (stores) bytes += s->uses[i].store_bytes;
    }
    return bytes;
}

static bool is_feasible(const schedule *s, size_t n_budget, const bool *keep) {
    size_t open[MOST_USES] = {0};
    for (size_t i = 0; i < s->n; i++)
        for (size_t at = i + 1; keep[i] && at < next_of(s, i); at++) open[at % s->n] += s->uses[i].n_pages;
    for (size_t i = 0; i < s->n; i++)
        if (open[i] && open[i] + s->uses[i].busy_pages > n_budget) return false;
    return true;
}

/* By trying all sets of intervals that may spare anything. */
static size_t least_moved(const schedule *s, size_t n_budget) {
    size_t worth[MOST_USES], n = 0, best = (size_t)-1;
    for (size_t i = 0; i < s->n; i++) {
        bool fills = false;
        for (size_t k = 0; k < s->n; k++)
            fills |= s->uses[k].region == s->uses[i].region && s->uses[k].store_bytes;
        if (fills || s->uses[next_of(s, i) % s->n].load_bytes) worth[n++] = i;
    }
    for (uint32_t set = 0; set < 1u << n; set++) {
        bool keep[MOST_USES] = {0};
        for (size_t k = 0; k < n; k++) keep[worth[k]] = set >> k & 1;
        if (!is_feasible(s, n_budget, keep)) continue;
        size_t bytes = moved(s, keep);
        if (bytes < best) best = bytes;
    }
    return best;
}

static void use_add(schedule *s, uint32_t region, uint32_t n_pages, bool fills) {
    size_t bytes = (size_t)n_pages * PAGE;
    s->uses[s->n++] = (fcdp_planned_use){.region = region,
                                         .n_pages = n_pages,
                                         .load_bytes = fills ? 0 : bytes,
                                         .store_bytes = fills ? bytes : 0,
                                         .busy_pages = n_pages};
    if (region >= s->n_regions) s->n_regions = region + 1;
}

/* What FSDP2 makes of a model: forward and backward of `n_micro` micro-batches, of `n` groups, the first
 * `n_frozen` frozen; then `n_evaluated` forwards. */
static void training(schedule *s, uint32_t n, uint32_t n_frozen, int n_micro, int n_evaluated,
                     const uint32_t *pages) {
    *s = (schedule){0};
    for (int micro = 0; micro < n_micro; micro++) {
        for (uint32_t i = 0; i < n; i++) use_add(s, i, pages[i], micro == 0 && i >= n_frozen);
        for (uint32_t i = n; i-- > 0;) use_add(s, i, pages[i], false);
    }
    for (int pass = 0; pass < n_evaluated; pass++) /* behind the optimizer's step */
        for (uint32_t i = 0; i < n; i++) use_add(s, i, pages[i], pass == 0 && i >= n_frozen);
    if (n_evaluated > 0) /* which the next forward then need not gather */
        for (uint32_t i = n_frozen; i < n; i++) {
            s->uses[i].load_bytes = s->uses[i].store_bytes;
            s->uses[i].store_bytes = 0;
        }
}

static void plan_check(const schedule *s, size_t n_budget, bool *keep) {
    assert_ok(fcdp__policy_plan(s->uses, s->n, s->n_regions, n_budget, PAGE, keep));
    if (!is_feasible(s, n_budget, keep)) fail_msg("a plan of %zu uses exceeds its %zu pages", s->n, n_budget);
}

static void training_is_planned_at_most_a_twentieth_over_the_optimum(void **state) {
    (void)state;
    static const struct {
        uint32_t n, n_frozen;
        int n_micro, n_evaluated;
    } jobs[] = {{6, 0, 1, 0}, {3, 0, 2, 0}, {3, 0, 1, 2}, {6, 6, 1, 0},
                {5, 3, 1, 0}, {4, 4, 1, 1}, {2, 1, 2, 1}, {3, 2, 2, 0}};
    static const uint32_t equal[] = {2, 2, 2, 2, 2, 2, 2, 2};
    for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++) {
        schedule s;
        bool keep[MOST_USES];
        training(&s, jobs[j].n, jobs[j].n_frozen, jobs[j].n_micro, jobs[j].n_evaluated, equal);
        for (size_t n_budget = 2; n_budget <= 2 * jobs[j].n + 2; n_budget++) {
            plan_check(&s, n_budget, keep);
            size_t got = moved(&s, keep), best = least_moved(&s, n_budget);
            if ((double)got > 1.05 * (double)best)
                fail_msg("job %zu with %zu pages: %zu bytes, the optimum is %zu", j, n_budget, got, best);
        }
    }
}

static void random_plans_have_room_and_are_near_the_optimum(void **state) {
    (void)state;
    uint64_t rng = seed_choose("policy plan");
    size_t got = 0, best = 0;
    for (int round = 0; round < 1000; round++) {
        schedule s = {0};
        uint32_t n_regions = 1 + (uint32_t)random_below(&rng, 5), pages[MOST_REGIONS];
        size_t n = 1 + random_below(&rng, 10), n_budget = random_below(&rng, 14);
        for (uint32_t r = 0; r < n_regions; r++) pages[r] = 1 + (uint32_t)random_below(&rng, 4);
        for (size_t i = 0; i < n; i++) {
            uint32_t region = (uint32_t)random_below(&rng, n_regions);
            use_add(&s, region, pages[region], random_below(&rng, 3) == 0);
            s.uses[i].busy_pages += random_below(&rng, 3);
        }
        bool keep[MOST_USES];
        plan_check(&s, n_budget, keep);
        size_t bytes = moved(&s, keep), least = least_moved(&s, n_budget);
        assert_true(bytes >= least);
        got += bytes;
        best += least;
    }
    print_message("random plans move %.3f of the optimum\n", (double)got / (double)best);
    assert_true((double)got <= 1.05 * (double)best);
}

/* A pass over frozen groups of several sizes, all needed once in each period: what is left out is the least
 * that makes room. */
static void groups_of_several_sizes_are_left_out_as_in_a_knapsack(void **state) {
    (void)state;
    uint64_t rng = seed_choose("policy knapsack");
    for (int round = 0; round < 200; round++) {
        schedule s = {0};
        uint32_t n = 4 + (uint32_t)random_below(&rng, 6), all = 0;
        for (uint32_t r = 0; r < n; r++) {
            uint32_t pages = 1 + (uint32_t)random_below(&rng, 3) * 3;
            use_add(&s, r, pages, false);
            all += pages;
        }
        bool keep[MOST_USES];
        size_t n_budget = all - random_below(&rng, all < 6 ? all : 6); /* so that six regions suffice */
        plan_check(&s, n_budget, keep);
        size_t got = moved(&s, keep), least = least_moved(&s, n_budget);
        if (got != least) fail_msg("round %d: %zu bytes, the optimum is %zu", round, got, least);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tau_keeps_below_its_share_of_the_budget),
        cmocka_unit_test(more_room_or_more_tau_never_stops_keeping),
        cmocka_unit_test(the_victim_is_idle_then_unplanned_then_clean_then_furthest),
        cmocka_unit_test(host_memory_goes_first_where_it_spares_most),
        cmocka_unit_test(what_a_plan_has_elsewhere_takes_no_host_memory),
        cmocka_unit_test(no_choice_of_as_many_bytes_spares_more),
        cmocka_unit_test(a_period_is_found_as_by_hand),
        cmocka_unit_test(training_is_planned_at_most_a_twentieth_over_the_optimum),
        cmocka_unit_test(random_plans_have_room_and_are_near_the_optimum),
        cmocka_unit_test(groups_of_several_sizes_are_left_out_as_in_a_knapsack),
    };
    return cmocka_run_group_tests_name("tiering_policy", tests, NULL, NULL);
}
