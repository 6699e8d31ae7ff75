/* Plans and models: which region each group is, and the first difference where they are not alike. */
#include "tests/alloc/support.h"

#include "tiering/tiers.h"

static void names_are_those_of_plans(void **state) {
    (void)state;
    static const char *const names[FCDP_N_TIERS] = {"policy", "device", "host",  "host-whole",
                                                    "file",   "gather", "mapped"};
    fcdp_tier tier;
    for (int i = 0; i < FCDP_N_TIERS; i++) {
        assert_string_equal(fcdp__tier_name((fcdp_tier)i), names[i]);
        assert_true(fcdp__tier_parse(names[i], &tier) && tier == (fcdp_tier)i);
    }
    assert_false(fcdp__tier_parse("hos", &tier) || fcdp__tier_parse("", &tier));
}

enum { MOST = 6 };

typedef struct row {
    uint32_t n_regions, n_groups;
    fcdp_counted regions[MOST], groups[MOST];
    uint32_t expected[MOST];
    const char *differs; /* NULL: it does not */
} row;

/* What a model's root has comes first in the job, and where its shape has it in a description. */
static const row rows[] = {
    {3, 3, {{"a", 5, 0}, {"b", 0, 6}, {"", 7, 1}}, {{"", 7, 1}, {"a", 5, 0}, {"b", 0, 6}}, {2, 0, 1}, NULL},
    {2, 2, {{"(root)", 7, 1}, {"a", 5, 0}}, {{"", 7, 1}, {"a", 5, 0}}, {0, 1}, NULL},
    {2, 2, {{"a", 7, 0}, {"a", 7, 0}}, {{"a", 7, 0}, {"a", 7, 0}}, {0, 1}, NULL},
    /* padded shards are counted; more than that is another model */
    {1, 1, {{"a", 1065000, 0}}, {{"a", 1000000, 0}}, {0}, NULL},
    {1, 1, {{"a", 1100000, 0}}, {{"a", 1000000, 0}}, {0}, "region 'a' has 1100000 trainable and 0 frozen"},
    {1, 1, {{"a", 1000000, 0}}, {{"a", 1100000, 0}}, {0}, "model's group 'a' has 1100000 and 0"},
    {1, 1, {{"a", 5, 1}}, {{"a", 5, 0}}, {0}, "5 trainable and 1 frozen"},
    /* of a shape */
    {4,
     4,
     {{"embedding", 9, 0}, {"layer 0", 4, 0}, {"layer 1", 4, 0}, {"head", 2, 0}},
     {{"", 2, 0}, {"embed", 9, 0}, {"layers.0", 4, 0}, {"layers.1", 4, 0}},
     {3, 0, 1, 2},
     NULL},
    {2, 2, {{"layer 0", 4, 0}, {"head", 9, 0}}, {{"x", 9, 0}, {"y", 5, 0}}, {0}, "'layer 0' has 4"},
    {2, 2, {{"layer 0", 4, 0}, {"a", 9, 0}}, {{"a", 9, 0}, {"y", 4, 0}}, {1, 0}, NULL},
    {2, 1, {{"layer 0", 4, 0}, {"head", 9, 0}}, {{"x", 4, 0}}, {0}, "2 regions, and the model 1 groups"},
    {2, 1, {{"a", 4, 0}, {"b", 9, 0}}, {{"a", 4, 0}}, {0}, "the model has no group 'b'"},
    {2, 3, {{"a", 4, 0}, {"b", 9, 0}}, {{"", 1, 0}, {"a", 4, 0}, {"b", 9, 0}}, {0}, "group '(root)'"},
};

static void groups_are_found_by_name_or_else_by_their_counts(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const row *r = &rows[i];
        uint32_t region_of[MOST];
        fcdp_status status = fcdp__tiers_match(r->regions, r->n_regions, r->groups, r->n_groups, region_of);
        if (r->differs) {
            if (status != FCDP_ERR_INVALID || !strstr(fcdp_error_text(), r->differs))
                fail_msg("row %zu: %d, %s", i, (int)status, fcdp_error_text());
            continue;
        }
        if (status) fail_msg("row %zu: %s", i, fcdp_error_text());
        for (uint32_t g = 0; g < r->n_groups; g++) assert_int_equal(region_of[g], r->expected[g]);
    }
}

static void shuffle(uint64_t *rng, fcdp_counted *list, uint32_t n) {
    for (uint32_t i = n; i > 1; i--) {
        size_t k = random_below(rng, i);
        fcdp_counted one = list[i - 1];
        list[i - 1] = list[k];
        list[k] = one;
    }
}

/* Names and counts of few kinds, in any order. A match is one to one, of regions that are alike; and there is
 * one exactly if there are as many of each kind on both sides. */
static void a_match_is_one_to_one(void **state) {
    (void)state;
    uint64_t rng = seed_choose("tiers match");
    for (int round = 0; round < 20000; round++) {
        uint32_t n = 1 + (uint32_t)random_below(&rng, MOST), region_of[MOST];
        bool named = random_below(&rng, 2);
        static const char *const names[] = {"a", "b", "c"}, *const described[] = {"x", "y", "z"};
        fcdp_counted regions[MOST], groups[MOST];
        for (uint32_t i = 0; i < n; i++) {
            size_t kind = random_below(&rng, 3);
            regions[i] = (fcdp_counted){named ? names[kind] : described[kind], 10 + kind, kind};
            groups[i] = (fcdp_counted){names[kind], 10 + kind, kind};
        }
        shuffle(&rng, groups, n);
        bool differs = !named && random_below(&rng, 3) == 0;
        if (differs) groups[random_below(&rng, n)].trainable = 99;
        fcdp_status status = fcdp__tiers_match(regions, n, groups, n, region_of);
        if (status != (differs ? FCDP_ERR_INVALID : FCDP_OK)) fail_msg("%s", fcdp_error_text());
        for (uint32_t g = 0; g < n && !differs; g++) {
            assert_true(region_of[g] < n && regions[region_of[g]].trainable == groups[g].trainable);
            for (uint32_t other = 0; other < g; other++) {
                assert_int_not_equal(region_of[other], region_of[g]);
                if (groups[other].frozen == groups[g].frozen) assert_true(region_of[other] < region_of[g]);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_those_of_plans),
        cmocka_unit_test(groups_are_found_by_name_or_else_by_their_counts),
        cmocka_unit_test(a_match_is_one_to_one),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
