/* test_split.c - a region whose linear layers are in parts: its pieces, what they take of memory and time,
 * and the choice of parts and tiers against exhaustive enumeration. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <math.h>

#include "tests/comm/random.h"
#include "tools/plan/choices.h"
#include "tools/plan/memory.h"
#include "tools/plan/simulate.h"

enum { MOST = 4, LINEARS = 2, SPLITS = 3, CHOICES = SPLITS * PLAN_N_TIERS, INSTANCES = 200, LAYERS = 100 };
enum { MAX_PIECES = 1 + LINEARS * 64, ALL_STATES = 1 << 20, SOME_STATES = 1 << 13 };

static const plan_constants constants = {.usable = 1};

static void assert_near(double a, double b) {
    if (fabs(a - b) > 1e-9 * fmax(fabs(a), fabs(b))) fail_msg("%.12g is not %.12g", a, b);
}

static plan_cluster a_cluster(void) {
    return (plan_cluster){.n_nodes = 4,
                          .gpus_per_node = 2,
                          .gpu_memory_bytes = 48e9,
                          .flops = 1e12,
                          .memory_rate = 1e12,
                          .pcie_rate = 2e10,
                          .node_rate = 1e11,
                          .inter_rate = 1e9};
}

static plan_job a_job(const plan_region *regions, size_t n) {
    return (plan_job){.parameter_bytes = 2,
                      .gradient_bytes = 2,
                      .state_bytes = 12,
                      .shard_bytes = 2,
                      .n_regions = n,
                      .regions = regions};
}

static double chance(test_random *random) {
    return random_below(random, 1u << 30) / (double)(1u << 30);
}

typedef struct instance {
    plan_region regions[MOST];
    plan_linear linears[MOST][LINEARS];
    plan_job job;
    plan_cluster cluster;
    plan_limits limits;
} instance;

/* A region with up to two linear layers, which may be all of it, and have too few rows for some numbers of
 * parts. */
static void region_make(plan_region *region, plan_linear *linears, test_random *random) {
    double parameters = 1e6 * (1 + random_below(random, 30)), share = 0.5 + chance(random) / 2;
    bool frozen = !random_below(random, 3);
    *region = (plan_region){.trainable = frozen ? 0 : parameters,
                            .frozen = frozen ? parameters : 0,
                            .forward_flops = 1e10 * chance(random),
                            .backward_flops = 2e10 * chance(random),
                            .activation_bytes = 1e6,
                            .stays = !random_below(random, 4),
                            .n_linears = random_below(random, LINEARS + 1),
                            .linears = linears};
    if (random_below(random, 2)) region->forward_seconds = chance(random) / 10;
    for (size_t k = 0; k < region->n_linears; k++) {
        double of = !random_below(random, 3) ? 1.0 / (double)region->n_linears : 0.1 + 0.3 * chance(random);
        linears[k] = (plan_linear){.rows = 64 + random_below(random, random_below(random, 2) ? 400 : 8000),
                                   .trainable = of * region->trainable,
                                   .frozen = of * region->frozen,
                                   .share = share / (double)region->n_linears,
                                   .input_bytes = 1e5 * chance(random),
                                   .output_bytes = 1e6 * chance(random)};
    }
}

static void instance_make(instance *x, test_random *random) {
    size_t n = 1 + random_below(random, MOST);
    double all = 0;
    for (size_t i = 0; i < n; i++) {
        region_make(&x->regions[i], x->linears[i], random);
        all += 2 * plan_parameters(&x->regions[i]);
    }
    x->job = a_job(x->regions, n);
    x->cluster = a_cluster();
    x->cluster.inter_rate = 1e8 + 1e10 * chance(random);
    x->cluster.pcie_rate = 1e9 + 1e10 * chance(random);
    x->cluster.inter_latency_s = 1e-4 * chance(random);
    if (random_below(random, 2)) x->cluster.file_rate = 1e10 * chance(random);
    x->limits = (plan_limits){.device_bytes = all * 1.2 * chance(random),
                              .host_bytes = random_below(random, 3) ? 1e30 : all * chance(random),
                              .ahead = random_below(random, 4),
                              .n_splits = SPLITS,
                              .max_states = ALL_STATES};
}

/* The job with its regions in pieces, and their tiers. */
static plan_job in_pieces(const instance *x, const uint8_t *parts, const uint8_t *tiers, plan_region *pieces,
                          uint8_t *tiers_out) {
    plan_job job = x->job;
    job.n_regions = 0;
    job.regions = pieces;
    for (size_t i = 0; i < x->job.n_regions; i++) {
        size_t n = plan_split_n_pieces(&x->regions[i], parts[i]);
        plan_split(&x->regions[i], &x->job, parts[i], x->limits.ahead, &pieces[job.n_regions]);
        memset(&tiers_out[job.n_regions], tiers[i], n);
        job.n_regions += n;
    }
    return job;
}

static void pieces_add_up_to_their_region(void **state) {
    (void)state;
    test_random random = {random_seed("plan_split", (uint64_t)time(NULL))};
    int n_split = 0;
    for (int round = 0; round < INSTANCES; round++) {
        plan_region region, pieces[MAX_PIECES], sum = {0};
        plan_linear linears[LINEARS];
        uint32_t parts = 1u << random_below(&random, PLAN_N_SPLITS);
        region_make(&region, linears, &random);
        plan_job job = a_job(&region, 1);
        if (!plan_can_split(&region, parts)) continue;
        size_t n = plan_split_n_pieces(&region, parts);
        plan_split(&region, &job, parts, 1, pieces);
        n_split += n > 1;
        for (size_t i = 0; i < n; i++) {
            sum.trainable += pieces[i].trainable;
            sum.frozen += pieces[i].frozen;
            sum.forward_flops += pieces[i].forward_flops;
            sum.backward_flops += pieces[i].backward_flops;
            sum.forward_seconds += pieces[i].forward_seconds;
            sum.activation_bytes += pieces[i].activation_bytes;
            assert_true(pieces[i].stays == (region.stays && (n == 1 || !pieces[i].beside)));
        }
        assert_near(sum.trainable, region.trainable);
        assert_near(sum.frozen, region.frozen);
        assert_near(sum.forward_flops, region.forward_flops);
        assert_near(sum.backward_flops, region.backward_flops);
        assert_near(sum.forward_seconds, region.forward_seconds);
        assert_near(sum.activation_bytes, region.activation_bytes);
    }
    assert_true(n_split > INSTANCES / 10);
}

/* A head of 64 M parameters that is the root's, with 1 M beside it, and a layer of 4 M. */
static void fill_head(plan_region regions[2], plan_linear *head, bool stays) {
    *head = (plan_linear){.rows = 64000, .trainable = 64e6, .share = 1};
    regions[0] = (plan_region){.trainable = 4e6};
    regions[1] = (plan_region){.trainable = 65e6, .stays = stays, .n_linears = 1, .linears = head};
}

/* What is gathered at the peak is what is left of the region, one part, and those ahead of it. */
static void the_peak_is_lower_by_the_parts_that_are_not_there(void **state) {
    (void)state;
    for (int stays = 0; stays < 2; stays++)
        for (uint32_t ahead = 0; ahead < 4; ahead++)
            for (uint32_t parts = 1; parts <= 64; parts *= 2) {
                instance x = {.limits = {.ahead = ahead}};
                plan_region pieces[MAX_PIECES + 1];
                uint8_t tiers[MAX_PIECES + 1], n_parts[] = {1, (uint8_t)parts},
                                               whole[] = {PLAN_BY_SLICE, PLAN_BY_SLICE};
                plan_memory m;
                fill_head(x.regions, x.linears[1], stays);
                x.job = a_job(x.regions, 2);
                x.cluster = a_cluster();
                plan_job job = in_pieces(&x, n_parts, whole, pieces, tiers);
                plan_memory_of(&job, &x.cluster, PLAN_FCDP, tiers, &constants, &m);
                /* the layer of 4 M may be larger than what the head has */
                double of_head = 64e6 * fmin(parts, 1 + fmax(1, ahead)) / parts, gathered;
                if (stays)
                    gathered = 1e6 + (parts == 1 ? 64e6 + 4e6 : fmax(4e6, of_head));
                else
                    gathered = fmax(4e6, 1e6 + of_head);
                assert_near(m.gathered, 2 * gathered);
                assert_near(m.host, 2 * 69e6);
            }
}

static double seconds_of(const plan_job *job, const plan_cluster *cluster, const plan_schedule *schedule) {
    uint8_t tiers[MAX_PIECES];
    plan_step step;
    memset(tiers, PLAN_GATHERED, sizeof tiers);
    assert_true(plan_simulate(job, cluster, PLAN_FCDP, tiers, schedule, &step));
    return step.seconds;
}

/* Where nothing runs beside anything else: n parts are n gathers in each direction and n reductions, each
 * with its latency, and of one size. */
static void each_part_is_a_gather_of_its_own(void **state) {
    (void)state;
    instance x = {.limits = {.ahead = 1}};
    plan_region pieces[MAX_PIECES + 1];
    uint8_t tiers[MAX_PIECES + 1], as_is[] = {1, 1}, split[] = {1, 8},
                                   nowhere[] = {PLAN_GATHERED, PLAN_GATHERED};
    plan_schedule one_by_one = {
        .n_steps = 1, .micro_batches = 1, .no_overlap = true, .reduce_times = 1, .differences = 1};
    fill_head(x.regions, x.linears[1], false);
    x.regions[1].trainable = 64e6; /* the head alone */
    x.regions[1].forward_flops = 1e12;
    x.linears[1][0].output_bytes = 5e9;
    x.linears[1][0].input_bytes = 1e9;
    x.job = a_job(x.regions, 2);
    x.cluster = a_cluster();
    x.cluster.inter_latency_s = 0.25;
    plan_job whole = in_pieces(&x, as_is, nowhere, pieces, tiers);
    double before = seconds_of(&whole, &x.cluster, &one_by_one);
    plan_job parts = in_pieces(&x, split, nowhere, pieces, tiers);
    assert_int_equal(parts.n_regions, 1 + 8);
    double hops = 4 * 2 - 1, copies = (2 * 5e9 + 8 * 5 * 1e9) / 1e12;
    assert_near(seconds_of(&parts, &x.cluster, &one_by_one) - before, 7 * 3 * hops * 0.25 + copies);
}

/* Activation checkpointing: each part is gathered once more in backward. */
static void what_is_recomputed_is_gathered_once_more(void **state) {
    (void)state;
    instance x = {.limits = {.ahead = 1}};
    plan_region pieces[MAX_PIECES + 1];
    uint8_t tiers[MAX_PIECES + 1], split[] = {1, 8}, nowhere[] = {PLAN_GATHERED, PLAN_GATHERED};
    plan_schedule schedule = {
        .prefetch = 1, .n_steps = 1, .micro_batches = 1, .reduce_times = 1, .differences = 1};
    plan_step steps[2];
    fill_head(x.regions, x.linears[1], false);
    x.job = a_job(x.regions, 2);
    x.cluster = a_cluster();
    for (int again = 0; again < 2; again++) {
        x.linears[1][0].extra_gathers = again;
        plan_job job = in_pieces(&x, split, nowhere, pieces, tiers);
        assert_true(plan_simulate(&job, &x.cluster, PLAN_FCDP, tiers, &schedule, &steps[again]));
    }
    assert_near(steps[1].forward_inter, steps[0].forward_inter);
    assert_near(steps[1].backward_inter - steps[0].backward_inter, 2 * 64e6 * 7 / 8);
    assert_true(steps[1].seconds > steps[0].seconds);
}

/* The parts compute one after another, and the next one is gathered meanwhile: where a gather takes as long
 * as computing, the first part's alone is waited for. */
static void parts_are_gathered_while_others_compute(void **state) {
    (void)state;
    plan_linear linear = {.rows = 1000, .frozen = 8e6, .share = 1};
    plan_region region = {.frozen = 8e6, .n_linears = 1, .linears = &linear};
    plan_cluster c = a_cluster();
    plan_job job = a_job(&region, 1);
    plan_schedule schedule = {
        .prefetch = 1, .n_steps = 1, .micro_batches = 1, .reduce_times = 1, .differences = 1};
    c.memory_rate = 0; /* nor do copies and the optimizer take time */
    double gather = 2 * 8e6 * 7 / 8 / c.inter_rate;
    region.forward_flops = region.backward_flops = gather * c.flops;
    assert_near(seconds_of(&job, &c, &schedule), 4 * gather);
    for (uint32_t parts = 2; parts <= 8; parts *= 2) {
        plan_region pieces[8];
        plan_split(&region, &job, parts, 1, pieces);
        plan_job split = a_job(pieces, plan_split_n_pieces(&region, parts));
        assert_int_equal(split.n_regions, parts);
        assert_near(seconds_of(&split, &c, &schedule), 2 * gather + 2 * gather / parts);
    }
}

/* What the simulation says of parts, the sums that are searched say too, but for the ends of a pipeline: with
 * the same region many times, in parts or not. */
static void the_sums_are_those_of_a_pipeline(void **state) {
    (void)state;
    enum { N = 40 };
    plan_linear linear = {.rows = 4000, .frozen = 8e6, .share = 1};
    plan_region regions[N], pieces[N * 8];
    plan_cluster c = a_cluster();
    plan_choice choices[N * 4 * PLAN_N_TIERS];
    plan_schedule schedule = {
        .prefetch = 1, .n_steps = 1, .micro_batches = 1, .reduce_times = 1, .differences = 1};
    for (int i = 0; i < N; i++)
        regions[i] = (plan_region){
            .frozen = 8e6, .forward_flops = 7e9, .backward_flops = 14e9, .n_linears = 1, .linears = &linear};
    plan_job job = a_job(regions, N);
    assert_true(plan_choices_make(&job, &c, 1, 4, choices, NULL));
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t parts = 1u << k;
        uint8_t tiers[N * 8];
        double sum = 0;
        plan_step step;
        for (int i = 0; i < N; i++) {
            plan_split(&regions[i], &job, parts, 1, &pieces[i * (int)parts]);
            sum += choices[((uint32_t)i * 4 + k) * PLAN_N_TIERS + PLAN_GATHERED].seconds;
        }
        plan_job split = a_job(pieces, N * (size_t)parts);
        memset(tiers, PLAN_GATHERED, sizeof tiers);
        assert_true(plan_simulate(&split, &c, PLAN_FCDP, tiers, &schedule, &step));
        if (fabs(sum - step.seconds) > 0.1 * step.seconds)
            fail_msg("%u parts: %.6g is not %.6g", parts, sum, step.seconds);
    }
}

typedef struct enumeration {
    const instance *x;
    const plan_choice *choices;
    double best;
    uint8_t parts[MOST], tiers[MOST];
} enumeration;

/* Does what is chosen fit, by the memory of the regions in their pieces? */
static bool fits(const enumeration *e) {
    plan_region pieces[MOST * MAX_PIECES];
    uint8_t tiers[MOST * MAX_PIECES];
    plan_memory m;
    plan_job job = in_pieces(e->x, e->parts, e->tiers, pieces, tiers);
    plan_memory_of(&job, &e->x->cluster, PLAN_FCDP, tiers, &constants, &m);
    return m.cache + m.gathered <= e->x->limits.device_bytes && m.host <= e->x->limits.host_bytes;
}

static void enumerate(enumeration *e, size_t i, double seconds) {
    if (seconds >= e->best) return;
    if (i == e->x->job.n_regions) {
        if (fits(e)) e->best = seconds;
        return;
    }
    for (size_t c = 0; c < CHOICES; c++) {
        e->parts[i] = (uint8_t)(1u << c / PLAN_N_TIERS);
        e->tiers[i] = c % PLAN_N_TIERS;
        double own = e->choices[i * CHOICES + c].seconds;
        if (isfinite(own)) enumerate(e, i + 1, seconds + own);
    }
}

static void chooses_what_enumeration_finds(void **state) {
    (void)state;
    test_random random = {random_seed("plan_choose", (uint64_t)time(NULL))};
    int n_fit = 0, n_split = 0, n_only = 0;
    for (int round = 0; round < INSTANCES; round++) {
        instance x;
        plan_choice choices[MOST * CHOICES];
        enumeration e = {&x, choices, INFINITY, {0}, {0}}, found_here = {&x, choices, 0, {0}, {0}};
        plan_found found, unsplit;
        uint8_t tiers[MOST], parts[MOST];
        instance_make(&x, &random);
        assert_true(plan_choices_make(&x.job, &x.cluster, x.limits.ahead, SPLITS, choices, NULL));
        enumerate(&e, 0, 0);
        assert_true(plan_choose(&x.job, &x.cluster, &x.limits, found_here.tiers, found_here.parts, &found));
        assert_int_equal(found.fits, isfinite(e.best));
        if (!found.fits) continue;
        assert_true(found.is_exact && fits(&found_here));
        assert_true(fabs(found.seconds - e.best) <= 1e-9 * e.best && found.bound <= e.best * (1 + 1e-9));
        double seconds = 0;
        bool has_parts = false;
        for (size_t i = 0; i < x.job.n_regions; i++) {
            size_t k = (size_t)log2(found_here.parts[i]);
            seconds += choices[i * CHOICES + k * PLAN_N_TIERS + found_here.tiers[i]].seconds;
            has_parts |= found_here.parts[i] > 1;
        }
        assert_near(seconds, found.seconds);
        plan_limits whole = x.limits;
        whole.n_splits = 1;
        assert_true(plan_choose(&x.job, &x.cluster, &whole, tiers, parts, &unsplit));
        assert_true(!unsplit.fits || found.seconds <= unsplit.seconds * (1 + 1e-12));
        /* never without a gain */
        if (has_parts) assert_true(!unsplit.fits || found.seconds < unsplit.seconds);
        n_fit++;
        n_split += has_parts;
        n_only += !unsplit.fits;
    }
    printf("%d of %d fit, %d of them with parts, %d with parts alone\n", n_fit, INSTANCES, n_split, n_only);
    assert_true(n_fit > INSTANCES / 4 && n_split > INSTANCES / 20 && n_only > 0);
}

/* 100 layers of 7 linear layers each, all of another size, where both budgets bind. The seconds are printed
 * and not asserted: others compute here too. */
static void a_job_s_layers_take_seconds(void **state) {
    (void)state;
    test_random random = {random_seed("plan_choose", (uint64_t)time(NULL))};
    static plan_region regions[LAYERS];
    static plan_linear linears[LAYERS][7];
    uint8_t tiers[LAYERS], parts[LAYERS];
    double all = 0;
    plan_cluster c = a_cluster();
    c.file_rate = 3e9;
    c.pcie_rate = 2e9;
    c.flops = 1e13;
    for (size_t i = 0; i < LAYERS; i++) {
        double parameters = 1e8 + random_below(&random, 900000000), frozen = i % 3 ? parameters : 0;
        for (int k = 0; k < 7; k++)
            linears[i][k] = (plan_linear){
                .rows = 8192, .frozen = frozen / 8, .share = 0.125, .output_bytes = 1e7};
        if (!frozen)
            for (int k = 0; k < 7; k++) linears[i][k].trainable = parameters / 8;
        regions[i] = (plan_region){.trainable = parameters - frozen,
                                   .frozen = frozen,
                                   .forward_flops = parameters * 1e3,
                                   .backward_flops = parameters * 2e3,
                                   .n_linears = 7,
                                   .linears = linears[i]};
        all += 2 * parameters;
    }
    plan_job job = a_job(regions, LAYERS);
    plan_limits limits = {all / 3, all / 3, 1, PLAN_N_SPLITS, SOME_STATES};
    plan_found found;
    clock_t begin = clock();
    assert_true(plan_choose(&job, &c, &limits, tiers, parts, &found));
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    printf("%d regions: %.2f s of a CPU, %.6g s, bound %.6g s\n", LAYERS, seconds, found.seconds,
           found.bound);
    assert_true(found.fits && found.seconds <= found.bound * 1.02);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_add_up_to_their_region),
        cmocka_unit_test(the_peak_is_lower_by_the_parts_that_are_not_there),
        cmocka_unit_test(each_part_is_a_gather_of_its_own),
        cmocka_unit_test(what_is_recomputed_is_gathered_once_more),
        cmocka_unit_test(parts_are_gathered_while_others_compute),
        cmocka_unit_test(the_sums_are_those_of_a_pipeline),
        cmocka_unit_test(chooses_what_enumeration_finds),
        cmocka_unit_test(a_job_s_layers_take_seconds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
