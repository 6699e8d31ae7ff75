/* test_model.c - the planner's model where the answer is known by other means. */
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

#include "comm/ballot.h"
#include "tools/plan/moves.h"
#include "tools/plan/shape.h"
#include "tools/plan/simulate.h"

enum { N = 20 };
#define REGION_BYTES 64e6 /* divides by all ranks here, so nothing is padded */

static plan_cluster a_cluster(void) {
    return (plan_cluster){.n_nodes = 4,
                          .gpus_per_node = 8,
                          .gpu_memory_bytes = 48e9,
                          .host_memory_bytes = 512e9,
                          .flops = 1e14,
                          .pcie_rate = 2e10,
                          .node_rate = 1e11,
                          .inter_rate = 1e9,
                          .cpu_rate = 1e11};
}

static void fill_job(plan_job *job, plan_region *regions, double frozen) {
    for (int i = 0; i < N; i++)
        regions[i] = (plan_region){.trainable = (1 - frozen) * REGION_BYTES / 2,
                                   .frozen = frozen * REGION_BYTES / 2,
                                   .forward_flops = 1e12,
                                   .backward_flops = 2e12};
    *job = (plan_job){.parameter_bytes = 2,
                      .gradient_bytes = 2,
                      .state_bytes = 12,
                      .shard_bytes = 2,
                      .n_regions = N,
                      .regions = regions};
}

static plan_step step_of(const plan_job *job, const plan_cluster *cluster, plan_mode mode, plan_tier tier,
                         plan_schedule schedule) {
    uint8_t tiers[N];
    plan_step step;
    memset(tiers, tier, sizeof tiers);
    if (!schedule.n_steps) schedule.n_steps = 1;
    if (!schedule.micro_batches) schedule.micro_batches = 1;
    if (schedule.reduce_times <= 0) schedule.reduce_times = 1;
    if (schedule.differences <= 0) schedule.differences = 1;
    assert_true(plan_simulate(job, cluster, mode, tiers, &schedule, &step));
    return step;
}

static const plan_schedule ahead = {.prefetch = 1};

static void assert_near(double a, double b) {
    if (fabs(a - b) > 1e-9 * fmax(fabs(a), fabs(b))) fail_msg("%.12g is not %.12g", a, b);
}

/* W a gather: FSDP2 2 (G-1)/G and as much again for gradients / 1; FCDP (N-1)/N once. */
static void bytes_between_nodes_are_the_papers(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    double w = N * REGION_BYTES, ring = 31.0 / 32, nodes = 3.0 / 4;
    fill_job(&job, regions, 0);
    plan_step s = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead);
    assert_near(s.forward_inter, w * ring);
    assert_near(s.backward_inter, 2 * w * ring);
    assert_near(s.reduce_inter, w * ring);
    s = step_of(&job, &c, PLAN_HPZ, PLAN_GATHERED, ahead);
    assert_near(s.forward_inter, w * ring);
    assert_near(s.backward_inter, w * ring);
    s = step_of(&job, &c, PLAN_HSDP, PLAN_GATHERED, ahead);
    assert_near(s.forward_inter, 0);
    assert_near(s.backward_inter, 2 * w * nodes);
    s = step_of(&job, &c, PLAN_HFSDP, PLAN_GATHERED, ahead);
    assert_near(s.forward_inter, w * nodes);
    assert_near(s.backward_inter, 2 * w * nodes);
    plan_step four = step_of(&job, &c, PLAN_HFSDP, PLAN_GATHERED,
                             (plan_schedule){.prefetch = 1, .micro_batches = 4});
    assert_near(four.forward_inter + four.backward_inter, 3 * w * nodes); /* once per optimizer step */
    for (int tier = PLAN_ON_DEVICE; tier <= PLAN_IN_FILE; tier++) {
        s = step_of(&job, &c, PLAN_FCDP, (plan_tier)tier, ahead);
        assert_near(s.forward_inter, w * nodes);
        assert_near(s.backward_inter, w * ring);
        assert_near(s.to_host, tier == PLAN_ON_DEVICE ? 0 : w / 8);
        assert_near(s.to_device, tier == PLAN_ON_DEVICE ? 0 : tier == PLAN_WHOLE ? w : w / 8);
        assert_near(s.file, tier == PLAN_IN_FILE ? 2 * w : 0);
    }
    s = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, (plan_schedule){.prefetch = 1, .differences = 0.25});
    assert_near(s.forward_inter, w * nodes / 4);
    fill_job(&job, regions, 1);
    s = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead);
    assert_near(s.forward_inter + s.backward_inter, 0);
    assert_near(s.to_device, 2 * w / 8);
    s = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead);
    assert_near(s.forward_inter + s.backward_inter, 2 * w * ring);
}

/* What is gathered again and again is FSDP2's step, whatever the mode is called. But backward's first
 * gather waits for the agreement, and so for the last forward. */
static void fcdp_without_a_tier_is_fsdp2(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    fill_job(&job, regions, 0);
    plan_step fsdp2 = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead);
    plan_step fcdp = step_of(&job, &c, PLAN_FCDP, PLAN_GATHERED, ahead);
    assert_true(fcdp.seconds >= fsdp2.seconds && fcdp.seconds <= fsdp2.seconds + 10e-3 + 1e-9);
    assert_near(fcdp.backward_inter, fsdp2.backward_inter);
}

/* Between the busiest resource and the sum of all operations; without overlap it is the sum. */
static void a_step_lies_between_its_bounds(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    fill_job(&job, regions, 0);
    for (int mode = 0; mode < PLAN_N_MODES; mode++)
        for (int k = 0; k < 40; k++) {
            plan_cluster c = a_cluster();
            c.inter_rate = 1e8 * pow(1.3, k % 20);
            c.node_rate = 1e9 * pow(1.5, k % 7);
            c.inter_latency_s = k % 3 * 1e-4;
            plan_schedule s = {.prefetch = (uint32_t)k % 4, .micro_batches = 1 + (uint32_t)k % 2};
            plan_step step = step_of(&job, &c, (plan_mode)mode, PLAN_BY_SLICE, s);
            double most = step.compute_seconds;
            for (int link = 0; link < PLAN_N_LINKS; link++) most = fmax(most, step.busy_seconds[link]);
            assert_true(step.seconds >= most * (1 - 1e-12));
            s.no_overlap = true;
            plan_step serial = step_of(&job, &c, (plan_mode)mode, PLAN_BY_SLICE, s);
            assert_true(step.seconds <= serial.seconds * (1 + 1e-12));
        }
}

/* By hand: no bytes but those between nodes, which take 4 times as long as a layer's forward. */
static void a_bound_link_is_busy_all_the_time(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    fill_job(&job, regions, 0);
    double gather = REGION_BYTES * 31 / 32 / c.inter_rate; /* 62 ms; a forward 10 ms, a backward 20 ms */
    plan_step s = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead);
    double link = 3 * N * gather;
    assert_near(s.busy_seconds[PLAN_LINK_INTER], link);
    assert_true(s.seconds >= link * (1 - 1e-9) && s.seconds <= link + gather);
    c.inter_rate = 0; /* no time at all */
    c.node_rate = 0;
    s = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead);
    assert_near(s.seconds, N * 30e-3);
}

static void a_faster_link_never_takes_longer(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    fill_job(&job, regions, 0);
    for (int mode = 0; mode < PLAN_N_MODES; mode++) {
        double before = INFINITY;
        for (int k = 0; k < 30; k++) {
            plan_cluster c = a_cluster();
            c.inter_rate = 5e7 * pow(1.4, k);
            plan_step s = step_of(&job, &c, (plan_mode)mode, PLAN_BY_SLICE, ahead);
            assert_true(s.seconds <= before * 1.02); /* an order of operations may be luckier */
            before = s.seconds;
        }
    }
}

/* Where hops are all that takes time: a ring of all ranks, one of the nodes, or log2 of them. */
static void hops_are_those_of_the_ring_or_tree(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    fill_job(&job, regions, 1); /* nothing to reduce, nothing stale */
    c.n_nodes = 16;
    c.inter_rate = c.node_rate = c.pcie_rate = c.flops = 0;
    c.inter_latency_s = 1e-3;
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead).seconds, 2 * N * 127e-3);
    assert_near(step_of(&job, &c, PLAN_HFSDP, PLAN_GATHERED, ahead).seconds, 2 * N * 15e-3);
    assert_near(step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead).seconds, 2 * 4e-3); /* agreements */
    c.trees = true;
    assert_near(step_of(&job, &c, PLAN_HFSDP, PLAN_GATHERED, ahead).seconds, 2 * N * 4e-3);
}

/* The slowest of more ranks is slower; the seed alone decides. */
static void jitter_grows_with_ranks(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    fill_job(&job, regions, 0);
    c.inter_rate = c.node_rate = 0;
    plan_schedule s = {.prefetch = 1, .n_steps = 2000, .jitter = 0.02, .seed = 7};
    double few = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, s).seconds;
    assert_true(few == step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, s).seconds);
    assert_true(fabs(few / (N * 30e-3) - (1 + 0.02 * 2.07)) <
                0.002); /* the mean maximum of 32 normal numbers */
    c.n_nodes = 125;
    double many = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, s).seconds;
    assert_true(fabs(many / (N * 30e-3) - (1 + 0.02 * 3.24)) < 0.002); /* of 1000 */
}

/* 100 layers on 1,000 nodes: 10,000 steps are to take less than a minute. */
static void many_steps_take_seconds(void **state) {
    (void)state;
    plan_shape shape = {.layers = 100,
                        .hidden = 8192,
                        .heads = 64,
                        .kv_heads = 64,
                        .head_size = 128,
                        .intermediate = 32768,
                        .vocab = 50257,
                        .biases = 1,
                        .tied = 1,
                        .sequence = 2048};
    plan_constants constants = {1, 24, 1};
    plan_job job = {.parameter_bytes = 2, .gradient_bytes = 2, .state_bytes = 12, .shard_bytes = 2};
    plan_region regions[102];
    uint8_t tiers[102];
    plan_cluster c = a_cluster();
    plan_schedule schedule = {.prefetch = 1,
                              .n_steps = 1000,
                              .micro_batches = 1,
                              .reduce_times = 1,
                              .differences = 1,
                              .jitter = 0.01};
    plan_step step;
    c.n_nodes = 1000;
    memset(tiers, PLAN_BY_SLICE, sizeof tiers);
    plan_shape_describe(&shape, 1, &constants, &job, regions);
    assert_int_equal(job.n_regions, 102);
    clock_t begin = clock();
    assert_true(plan_simulate(&job, &c, PLAN_FCDP, tiers, &schedule, &step));
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    printf("1000 steps of %g operations: %.2f s of a CPU\n", step.n_operations, seconds);
    assert_true(step.n_operations > 700);
}

/* Measured seconds stand for operations, and a faster GPU takes less of them. */
static void measured_seconds_stand_for_operations(void **state) {
    (void)state;
    plan_region described[N], measured[N];
    plan_job job, other;
    plan_cluster c = a_cluster();
    fill_job(&job, described, 0);
    fill_job(&other, measured, 0);
    for (int i = 0; i < N; i++) {
        measured[i].forward_seconds = measured[i].forward_flops / c.flops;
        measured[i].backward_seconds = measured[i].backward_flops / c.flops;
        measured[i].forward_flops = measured[i].backward_flops = 1e30; /* not looked at */
    }
    plan_step a = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead);
    plan_step b = step_of(&other, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead);
    assert_near(a.seconds, b.seconds);
    assert_near(a.compute_seconds, b.compute_seconds);
    c.speed = 2;
    plan_step faster = step_of(&other, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead);
    assert_near(faster.compute_seconds, b.compute_seconds / 2);
    other.optimizer_seconds = 3.2; /* of 32 GPUs, each 0.1 s; in HSDP 8 have all: 0.4 s; twice as fast */
    other.step_seconds = 0.5;
    plan_step more = step_of(&other, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead);
    assert_near(more.seconds, faster.seconds + 0.05 + 0.25);
    double before = step_of(&other, &c, PLAN_HSDP, PLAN_GATHERED, ahead).seconds;
    other.optimizer_seconds = 0;
    assert_near(before, step_of(&other, &c, PLAN_HSDP, PLAN_GATHERED, ahead).seconds + 0.2);
}

/* By hand: what FSDP2 sends holds up compute, FCDP's gathers do not. A forward takes 10 ms of a region, a
 * backward 20 ms, its gather 62 ms in a ring of all ranks, and 48 ms between nodes. */
static void on_cpus_only_fcdps_gathers_run_beside_compute(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    plan_schedule on_cpus = {.prefetch = 1, .host_computes = true};
    fill_job(&job, regions, 0);
    c.node_rate = c.pcie_rate = 0;
    double ring = REGION_BYTES * 31 / 32 / c.inter_rate, gather = REGION_BYTES * 3 / 4 / c.inter_rate;
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds, N * (0.03 + 3 * ring));
    plan_step fcdp = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, on_cpus);
    assert_near(fcdp.seconds, N * gather + 0.01 + N * (0.02 + ring));
    /* Each rank takes the others' parts of a gather from host memory, and a whole region in backward. */
    assert_near(fcdp.to_device, N * REGION_BYTES * (7.0 / 8 + 1));
    assert_near(step_of(&job, &c, PLAN_FCDP, PLAN_ON_DEVICE, on_cpus).to_device, N * REGION_BYTES * 7 / 8);
    double on_gpus = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead).seconds;
    for (int i = 0; i < N; i++) { /* FSDP2's own work: two unshards and a reduction */
        regions[i].unshard_seconds = 0.001;
        regions[i].reduce_seconds = 0.002;
    }
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds, N * (0.034 + 3 * ring));
    assert_near(step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, on_cpus).seconds, fcdp.seconds + N * 0.002);
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, ahead).seconds, on_gpus);
}

/* By hand, as above. A hop takes 1 ms of the cores: a ring of 62 ms hides 31 of them, a link 100 times as
 * fast does not. Other host work is added to FSDP2's step, and hidden behind gathers in FCDP's forward. */
static void on_cpus_the_cores_work_while_a_slow_link_carries(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    plan_schedule on_cpus = {.prefetch = 1, .host_computes = true};
    fill_job(&job, regions, 0);
    c.node_rate = c.pcie_rate = 0;
    c.inter_latency_s = 0.001;
    double ring = REGION_BYTES * 31 / 32 / c.inter_rate;
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds, N * (0.03 + 3 * ring));
    double fcdp = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, on_cpus).seconds;
    on_cpus.host_seconds = N * 0.01;
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds, N * (0.04 + 3 * ring));
    double forward = 0.005, hidden = N * forward - forward; /* all but the last region's */
    assert_near(step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, on_cpus).seconds, fcdp + N * 0.01 - hidden);
    c.inter_rate *= 100;
    on_cpus.host_seconds = -1; /* no less than nothing computes */
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds, N * 3 * 0.031);
    on_cpus.gather_cores = 2;
    on_cpus.reduce_cores = 3;
    plan_step step = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus);
    assert_near(step.seconds, N * (2 * 0.062 + 0.093));
    assert_near(step.gather_core_seconds, N * 2 * 0.062);
    assert_near(step.reduce_core_seconds, N * 0.093);
}

/* A bucket of 4 ms at the link's rate is full behind 10 or 20 ms of computing, empty behind a collective. */
static void what_a_token_bucket_holds_passes_at_once(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    plan_schedule on_cpus = {.prefetch = 1, .host_computes = true};
    fill_job(&job, regions, 0);
    c.node_rate = c.pcie_rate = 0;
    c.inter_latency_s = 0;
    double before = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds;
    c.burst_bytes = 0.004 * c.inter_rate;
    double with = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds;
    /* Gathers and reductions come behind computes; of a backward's gathers the first alone does. */
    assert_near(before - with, (2 * N + 1) * 0.004);
    c.burst_bytes = 0;
    c.gather_times = 1.5;
    c.reduce_times = 2;
    double ring = REGION_BYTES * 31 / 32 / c.inter_rate;
    assert_near(step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, on_cpus).seconds, N * (0.03 + 5 * ring));
}

/* By hand, of parts of 2 MB: packets of 64,000 bytes carry half of one in 16. */
static void a_message_has_headers_and_notices(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    plan_schedule gloo = {.prefetch = 1, .host_computes = true, .reduce_times = 2};
    fill_job(&job, regions, 0);
    c.node_rate = c.pcie_rate = 0;
    plan_step plain = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, gloo);
    plan_step hsdp = step_of(&job, &c, PLAN_HSDP, PLAN_GATHERED, gloo);
    plan_step fcdp = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, gloo);
    c.message_bytes = 300;
    c.packet_bytes = 100;
    c.packet_payload = 64000;
    double half = 300 + 16 * 100, ballots = 2 * (FCDP_BALLOT_FRAME_BYTES + 300 + 100);
    plan_step step = step_of(&job, &c, PLAN_FSDP2, PLAN_GATHERED, gloo);
    assert_near(step.forward_inter - plain.forward_inter, N * 31 * 2 * half);
    assert_near(step.reduce_inter - plain.reduce_inter, N * 2 * 31 * 2 * half);
    assert_near(step.backward_inter - plain.backward_inter, N * 3 * 31 * 2 * half);
    assert_near(step.seconds - plain.seconds, N * 4 * 31 * 2 * 300 / c.inter_rate);
    step = step_of(&job, &c, PLAN_HSDP, PLAN_GATHERED, gloo); /* 8 lanes, each 3 steps twice */
    assert_near(step.forward_inter, hsdp.forward_inter);
    assert_near(step.reduce_inter - hsdp.reduce_inter, N * 8 * 6 * 2 * half);
    step = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, gloo);
    assert_near(step.forward_inter - fcdp.forward_inter, N * 8 * 3 * 2 * half + ballots);
    assert_near(step.backward_inter - fcdp.backward_inter, N * 2 * 31 * 2 * half + ballots);
    for (int i = 0; i < N; i++) regions[i].trainable /= 1000; /* 2 KB: two messages all the same */
    fcdp = step_of(&job, &c, PLAN_FCDP, PLAN_GATHERED, gloo);
    assert_near(fcdp.reduce_inter, N * 2 * 31 * (2000 + 2 * (300 + 100)));
}

/* Adapters of 1 MiB, of which a lane stages 128 KiB: 8, 8 and 4 of 20 cross together, by hand. The first 8
 * hold up the first compute, where one by itself would. All are restored from host memory, kept ones too. */
static void small_regions_cross_together(void **state) {
    (void)state;
    plan_region regions[N];
    plan_job job;
    plan_cluster c = a_cluster();
    plan_schedule together = {.prefetch = 1, .coalesce_bytes = 1 << 20};
    double small = 1 << 20, gather = small * 3 / 4 / c.inter_rate, slice = small / 8;
    fill_job(&job, regions, 1);
    c.node_rate = c.pcie_rate = 0;
    for (int i = 0; i < N; i++) {
        regions[i].trainable = small / 2;
        regions[i].frozen -= regions[i].trainable;
    }
    plan_step apart = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead);
    plan_step step = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, together);
    assert_near(step.seconds - apart.seconds, 7 * gather);
    assert_near(step.forward_inter, apart.forward_inter);
    assert_near(step.to_host, apart.to_host);
    assert_near(step.to_device, apart.to_device + N * slice);
    step = step_of(&job, &c, PLAN_FCDP, PLAN_ON_DEVICE, together);
    assert_near(step.to_device, N * slice);
    assert_near(step.to_host, N * slice);
    together.micro_batches = 2; /* in the second one all is fresh */
    assert_near(step_of(&job, &c, PLAN_FCDP, PLAN_ON_DEVICE, together).to_device, N * slice);
    /* Each lane's two messages of a chunk have one announcement each; a part by itself has its own. */
    c.message_bytes = 1000;
    c.packet_payload = 1e9;
    step = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, together);
    double ballots = 2 * 2 * (FCDP_BALLOT_FRAME_BYTES + 1000);
    assert_near(step.forward_inter - apart.forward_inter, 3 * 3 * 8 * 2 * 1000 + ballots);
    /* Those in files cross by themselves, and are written. */
    c.packet_payload = c.message_bytes = 0;
    c.file_rate = 1e9;
    together.micro_batches = 1;
    apart = step_of(&job, &c, PLAN_FCDP, PLAN_IN_FILE, ahead);
    step = step_of(&job, &c, PLAN_FCDP, PLAN_IN_FILE, together);
    assert_near(step.seconds, apart.seconds);
    assert_near(step.file, apart.file);
    /* Where the host computes, the first compute waits for the first eight, not for all. */
    plan_schedule on_host = together, on_host_apart = ahead;
    on_host.host_computes = on_host_apart.host_computes = true;
    c.pcie_rate = 1e9;
    apart = step_of(&job, &c, PLAN_FCDP, PLAN_WHOLE, on_host_apart);
    step = step_of(&job, &c, PLAN_FCDP, PLAN_WHOLE, on_host);
    assert_true(step.seconds < apart.seconds);
    c.pcie_rate = c.file_rate = 0;
    /* Larger ones, and a single one, cross by themselves. */
    for (int i = 1; i < N; i++) regions[i].trainable = small;
    c.packet_payload = c.message_bytes = 0;
    together.micro_batches = 1;
    apart = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, ahead);
    step = step_of(&job, &c, PLAN_FCDP, PLAN_BY_SLICE, together);
    assert_near(step.seconds, apart.seconds);
    assert_near(step.to_device, apart.to_device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_between_nodes_are_the_papers),
        cmocka_unit_test(fcdp_without_a_tier_is_fsdp2),
        cmocka_unit_test(a_step_lies_between_its_bounds),
        cmocka_unit_test(a_bound_link_is_busy_all_the_time),
        cmocka_unit_test(a_faster_link_never_takes_longer),
        cmocka_unit_test(hops_are_those_of_the_ring_or_tree),
        cmocka_unit_test(jitter_grows_with_ranks),
        cmocka_unit_test(measured_seconds_stand_for_operations),
        cmocka_unit_test(on_cpus_only_fcdps_gathers_run_beside_compute),
        cmocka_unit_test(on_cpus_the_cores_work_while_a_slow_link_carries),
        cmocka_unit_test(what_a_token_bucket_holds_passes_at_once),
        cmocka_unit_test(a_message_has_headers_and_notices),
        cmocka_unit_test(small_regions_cross_together),
        cmocka_unit_test(many_steps_take_seconds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
