/* main.c - runs the scenarios, each in processes of its own, and reports steps over their bound. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim/gpu/simgpu.h"
#include "tools/bench/overlap/content.h"
#include "tools/bench/overlap/run.h"

/* What bounds a step takes 5 ms per group (backward's kernel and a reduction longer), the rest at most 3. */
static const scenario scenarios[N_RESOURCES] = {
    {"compute", 5, 10, 4, 3, 3, 0.25, 50, 10},
    {"pcie", 1.5, 3, 4, 5, 2, 0.25, 50, 10},
    {"link", 1.5, 3, 4, 3, 5, 0.25, 50, 10},
};

/* Of --budgets: kernels as in the first one, and over PCIe a step's stores and loads take as long as they. Of
 * --plans: so, and the link is so slow that to gather a group again would cost more than to restore it. */
static const scenario moves_as_long = {"budgets", 5, 10, 4, 7.5, 3, 0.25, 50, 10};
static const scenario moves_and_gathers = {"plans", 5, 10, 4, 7.5, 5, 0.25, 50, 10};

enum { CODEC_SCALE = 8 };
static const double CODEC_GBIT = 10; /* of the link that the three scenarios are meant for, with --codec */
static const double MOST_OVER_BOUND = 1.05;

static const char usage[] =
    "fcdp-overlap [--steps N] [--warm N] [--scale X] [--prefetch N] [--mapping slots|exact]\n"
    "             [--transport net|nccl] [--codec none|delta] [--codec-threads N] [--timelines FOLDER]\n"
    "             [--budgets | --plans]\n"
    "    --steps, --warm   measured, and before them (10, 4; at most 32)\n"
    "    --scale           all durations are X times as long (1; 8 with --codec delta: meanwhile this "
    "machine\n"
    "                      does what four ranks' cores would)\n"
    "    --prefetch        FCDP_PREFETCH, groups gathered ahead in forward (2)\n"
    "    --mapping         FCDP_MAPPING (slots)\n"
    "    --transport       simnet's own collectives, or NCCL's entry points by a double over it (net)\n"
    "    --codec           FCDP_CODEC (none); delta: with what that adds to a step that compute binds. It\n"
    "                      ends with 1 where a goal is missed\n"
    "    --codec-threads   FCDP_CODEC_THREADS: threads of a rank that decode what one gather brings (4)\n"
    "    --timelines       a Chrome trace for each scenario and rank goes there: SCENARIO.RANK.json\n"
    "    --budgets         FCDP_POLICY=next-use in less and less device memory, in place of the three "
    "scenarios\n"
    "    --plans           instead: what fcdp-plan search finds, beside its prediction and fixed FCDP_TAU\n";

/* ---- report ---- */

static void print_bounds(const bound *bounds, int n, int busiest) {
    for (int i = 0; i < n; i++) {
        const bound *b = &bounds[i];
        printf("  %-*s %7.2f ms = %.2f before + %.2f busy + %.2f turn + %.2f after%s\n",
               n > N_RESOURCES ? 10 : 8, resource_names[i], bound_ms(b), b->before_ms, b->busy_ms, b->turn_ms,
               b->after_ms, i == busiest ? "  <- the bound" : "");
    }
}

/* Prints; returns the ratio. Negative: the steady state costs what it must not, or gathered parameters were
 * wrong. With the codec, the host may wait for a group's last gather. What one core of each rank can do is
 * shown beside the bound, and is none: a rank has more threads for it. */
static double report(const run_config *config, const shared *s) {
    bound bounds[N_CODEC_BOUNDS];
    double least, most, median = median_step_ms(s, config->n_steps, &least, &most);
    int busiest = RESOURCE_COMPUTE, n = config->codec ? N_CODEC_BOUNDS : N_RESOURCES;
    rank_result sum = sum_of(s);
    double per_step = (double)config->n_steps * N_RANKS;
    if (config->codec)
        codec_bounds_of(config->scenario, crossing_ms(config, &sum), host_ms(config, &sum), bounds);
    else
        bounds_of(config->scenario, bounds);
    for (int i = 0; i < n; i++)
        if (i != CODEC_BOUND_HOST && bound_ms(&bounds[i]) > bound_ms(&bounds[busiest])) busiest = i;
    double ratio = median / bound_ms(&bounds[busiest]);
    double by_host = config->codec ? median / bound_ms(&bounds[CODEC_BOUND_HOST]) : ratio;
    printf("%s: a step takes %.2f ms (median of %u; %.2f to %.2f), %.2f of its bound", config->scenario->name,
           median, config->n_steps, least, most, ratio);
    if (by_host < ratio) printf(", %.2f of what one core a rank can do", by_host);
    printf("%s:\n", config->codec && ratio > MOST_OVER_BOUND ? " (goal 1.05, MISSED)" : "");
    print_bounds(bounds, n, busiest);
    printf("  per step and rank: creates %.2f maps %.2f set-access %.2f unmaps %.2f\n",
           (double)sum.creates / per_step, (double)sum.maps / per_step, (double)sum.accesses / per_step,
           (double)sum.unmaps / per_step);
    printf("  of the model's thread: agreements %.2f, other calls that may wait %.2f, of which waited %.2f; "
           "%.1f ms to enqueue\n",
           (double)sum.agreements / per_step, (double)sum.blocking / per_step, (double)sum.waits / per_step,
           (double)sum.enqueue_ns / per_step / 1e6);
    if (sum.wrong) fprintf(stderr, "%lu gathered shards were wrong\n", sum.wrong);
    bool whole = config->codec && !codec_print(config, &sum);
    bool maps = !config->exact &&
                (sum.maps || sum.accesses || sum.unmaps || (sum.blocking && !config->codec));
    if (maps || sum.creates)
        fprintf(stderr, "the steady state makes or maps pages, or waits for the device\n");
    return sum.wrong || sum.creates || maps || whole ? -ratio : ratio;
}

/* ---- command line ---- */

typedef struct arguments {
    run_config run;
    double scale;
    bool (*instead)(const run_config *asked, shared *s); /* NULL: the three scenarios */
} arguments;

static bool parse_count(const char *text, uint32_t least, uint32_t most, uint32_t *out) {
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    *out = (uint32_t)value;
    return text[0] >= '0' && text[0] <= '9' && !*end && value >= least && value <= most;
}

static bool parse_one(arguments *a, const char *name, const char *value) {
    char *end = NULL;
    if (!strcmp(name, "--steps")) return parse_count(value, 1, BOARD_MAX_STEPS / 2, &a->run.n_steps);
    if (!strcmp(name, "--warm")) return parse_count(value, 1, BOARD_MAX_STEPS / 2, &a->run.n_warm);
    if (!strcmp(name, "--prefetch")) {
        uint32_t prefetch;
        bool good = parse_count(value, 0, 8, &prefetch);
        a->run.prefetch = (int)prefetch;
        return good;
    }
    if (!strcmp(name, "--codec-threads")) {
        uint32_t n;
        bool good = parse_count(value, 1, 64, &n);
        a->run.codec_threads = (int)n;
        return good;
    }
    if (!strcmp(name, "--timelines")) return (a->run.timelines = value);
    if (!strcmp(name, "--scale")) return (a->scale = strtod(value, &end)) > 0 && !*end;
    if (!strcmp(name, "--transport")) {
        a->run.nccl = !strcmp(value, "nccl");
        return a->run.nccl || !strcmp(value, "net");
    }
    if (!strcmp(name, "--codec")) {
        a->run.codec = !strcmp(value, "delta");
        return a->run.codec || !strcmp(value, "none");
    }
    if (strcmp(name, "--mapping")) return false;
    a->run.exact = !strcmp(value, "exact");
    return a->run.exact || !strcmp(value, "slots");
}

static bool parse(arguments *a, int argc, char **argv) {
    *a = (arguments){
        .run = {
            .n_warm = 4, .n_steps = 10, .prefetch = 2, .codec_threads = 4, .budget_bytes = (size_t)1 << 30}};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--budgets")) a->instead = budgets_report;
        if (!strcmp(argv[i], "--plans")) a->instead = plans_report;
        if (!strcmp(argv[i], "--budgets") || !strcmp(argv[i], "--plans")) continue;
        if (i + 1 == argc || !parse_one(a, argv[i], argv[i + 1])) return false;
        i++;
    }
    if (!a->scale) a->scale = a->run.codec ? CODEC_SCALE : 1;
    return !a->instead || !a->run.codec;
}

/* The library that this program is linked with is the one that the engine opens. */
static const char *sim_library(void) {
    Dl_info about;
    return dladdr((void *)(uintptr_t)simgpu_launch, &about) ? about.dli_fname : NULL;
}

int main(int argc, char **argv) {
    arguments a;
    double ratios[N_RESOURCES];
    bool good = true;
    if (!parse(&a, argc, argv)) {
        fputs(usage, stderr);
        return 2;
    }
    a.run.sim_library = sim_library();
    if (!content_make()) return 2;
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) return 2;
    if (a.instead) {
        scenario of = scenario_scaled(a.instead == plans_report ? moves_and_gathers : moves_as_long, a.scale);
        a.run.scenario = &of;
        return a.instead(&a.run, s) ? 0 : 1;
    }
    printf("%d groups as %d nodes x %d ranks, FCDP_PREFETCH=%d, FCDP_TAU=0, FCDP_RESTORE=slice, mapping "
           "%s, transport %s%s\n",
           N_GROUPS, N_NODES, NODE_SIZE, a.run.prefetch, a.run.exact ? "exact" : "slots",
           a.run.nccl ? "nccl" : "net", a.run.codec ? ", codec delta" : "");
    if (a.run.codec) printf("all durations are %g times as long\n", a.scale);
    for (int i = 0; i < N_RESOURCES; i++) {
        scenario of = scenario_scaled(scenarios[i], a.scale);
        a.run.scenario = &of;
        a.run.core_times = a.run.codec ? core_times(&of, CODEC_GBIT) : 1;
        if (!scenario_run(&a.run, s)) return 1;
        ratios[i] = report(&a.run, s);
        good = good && ratios[i] > 0 && (!a.run.codec || ratios[i] <= MOST_OVER_BOUND);
        if (ratios[i] < 0) ratios[i] = -ratios[i];
    }
    if (a.run.codec) {
        scenario of = scenario_scaled(scenarios[RESOURCE_COMPUTE], a.scale);
        a.run.scenario = &of;
        good = codec_cost(&a.run, s) && good;
    }
    printf("overlap over the bound: compute %.2f pcie %.2f link %.2f\n", ratios[RESOURCE_COMPUTE],
           ratios[RESOURCE_PCIE], ratios[RESOURCE_LINK]);
    return good ? 0 : 1;
}
