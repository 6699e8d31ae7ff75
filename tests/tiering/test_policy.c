/* Policy: the table of tau, and properties of the victim. */
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

static void the_victim_is_idle_then_clean_then_oldest(void **state) {
    (void)state;
    uint64_t rng = seed_choose("policy victim");
    fcdp_candidate c[12];
    for (int round = 0; round < 20000; round++) {
        size_t n = random_below(&rng, 13);
        bool any = false, any_clean = false;
        for (size_t i = 0; i < n; i++) {
            c[i] = (fcdp_candidate){random_below(&rng, 3), random_below(&rng, 20), random_below(&rng, 2),
                                    random_below(&rng, 2)};
            bool eligible = c[i].bytes && !c[i].busy;
            any |= eligible;
            any_clean |= eligible && c[i].clean;
        }
        size_t v = fcdp__policy_victim(c, n);
        if (!any) {
            assert_int_equal(v, n);
            continue;
        }
        assert_true(v < n && c[v].bytes && !c[v].busy && c[v].clean == any_clean);
        for (size_t i = 0; i < n; i++)
            if (c[i].bytes && !c[i].busy && c[i].clean == c[v].clean)
                assert_true(c[i].last_use >= c[v].last_use);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tau_keeps_below_its_share_of_the_budget),
        cmocka_unit_test(more_room_or_more_tau_never_stops_keeping),
        cmocka_unit_test(the_victim_is_idle_then_clean_then_oldest),
    };
    return cmocka_run_group_tests_name("tiering_policy", tests, NULL, NULL);
}
