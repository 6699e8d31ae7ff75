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
#include "tools/bench/overlap/overlap.h"

/* What bounds a step takes 5 ms per group (backward's kernel and a reduction longer), the rest at most 3. */
static const scenario scenarios[N_RESOURCES] = {
    {"compute", 5, 10, 4, 3, 3, 0.25, 50, 10},
    {"pcie", 1.5, 3, 4, 5, 2, 0.25, 50, 10},
    {"link", 1.5, 3, 4, 3, 5, 0.25, 50, 10},
};

typedef struct shared {
    board board;
    rank_result results[N_RANKS];
} shared;

static const char usage[] =
    "fcdp-overlap [--steps N] [--warm N] [--scale X] [--prefetch N] [--mapping slots|exact]\n"
    "             [--transport net|nccl] [--timelines FOLDER] [--budgets]\n"
    "    --steps, --warm   measured, and before them (10, 4; at most 32)\n"
    "    --scale           all durations are X times as long\n"
    "    --prefetch        FCDP_PREFETCH, groups gathered ahead in forward (2)\n"
    "    --mapping         FCDP_MAPPING (slots)\n"
    "    --transport       simnet's own collectives, or NCCL's entry points by a double over it (net)\n"
    "    --timelines       a Chrome trace for each scenario and rank goes there: SCENARIO.RANK.json\n"
    "    --budgets         FCDP_POLICY=next-use in less and less device memory, in place of the three "
    "scenarios\n";

/* ---- one scenario ---- */

static scenario scaled(scenario s, double x) {
    double *const ms[] = {&s.forward_ms, &s.backward_ms, &s.optimizer_ms, &s.pcie_ms, &s.link_ms, &s.node_ms};
    for (size_t i = 0; i < sizeof ms / sizeof *ms; i++) *ms[i] *= x;
    return s;
}

/* A rank that ends badly takes the others with it, which would wait for it. */
static bool ranks_await(const pid_t *pids) {
    bool good = true;
    for (uint32_t n = 0; n < N_RANKS; n++) {
        int status = 0;
        pid_t ended = wait(&status);
        if (ended > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
        if (good)
            fprintf(stderr, "a rank (process %d) ended with wait status %#x\n", (int)ended, (unsigned)status);
        if (good)
            for (uint32_t i = 0; i < N_RANKS; i++)
                if (pids[i] != ended) kill(pids[i], SIGKILL);
        good = false;
    }
    return good;
}

static bool scenario_run(const run_config *config, shared *s) {
    pid_t pids[N_RANKS];
    simnet_fabric *fabric;
    memset(s->results, 0, sizeof s->results);
    board_init(&s->board, N_RANKS);
    simnet_config net = {
        .nodes = N_NODES, .ranks_per_node = NODE_SIZE, .staging_bytes = 1 << 20, .timeout_s = 60};
    if (simnet_create(&net, &fabric)) {
        fprintf(stderr, "%s\n", fcdp_error_text());
        return false;
    }
    simnet_set_rate(fabric, SIMNET_INTER, link_rate(config->scenario), config->scenario->link_latency_us);
    simnet_set_rate(fabric, SIMNET_INTRA, node_rate(config->scenario), config->scenario->node_latency_us);
    fflush(NULL);
    for (uint32_t r = 0; r < N_RANKS; r++) {
        pids[r] = fork();
        if (pids[r] > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (pids[r] == 0) rank_run(config, fabric, &s->board, r, &s->results[r]);
        exit(pids[r] < 0);
    }
    bool good = ranks_await(pids);
    simnet_close(fabric);
    return good;
}

/* ---- report ---- */

static int ascending(const void *a, const void *b) {
    double one = *(const double *)a, other = *(const double *)b;
    return one < other ? -1 : one > other;
}

/* Medians are of the ranks' steps together: all ranks have the same steps. */
static double median_step_ms(const shared *s, uint32_t n_steps, double *least_out, double *most_out) {
    double all[N_RANKS * BOARD_MAX_STEPS];
    uint32_t n = 0;
    for (uint32_t r = 0; r < N_RANKS; r++)
        for (uint32_t i = 0; i < n_steps; i++) all[n++] = s->results[r].step_ms[i];
    qsort(all, n, sizeof *all, ascending);
    *least_out = all[0];
    *most_out = all[n - 1];
    return n % 2 ? all[n / 2] : (all[n / 2 - 1] + all[n / 2]) / 2;
}

static rank_result sum_of(const shared *s) {
    rank_result sum = {0};
    for (uint32_t r = 0; r < N_RANKS; r++) {
        const rank_result *one = &s->results[r];
        sum.creates += one->creates;
        sum.maps += one->maps;
        sum.accesses += one->accesses;
        sum.unmaps += one->unmaps;
        sum.blocking += one->blocking;
        sum.waits += one->waits;
        sum.agreements += one->agreements;
        sum.wrong += one->wrong;
        sum.enqueue_ns += one->enqueue_ns;
        sum.d2h_bytes += one->d2h_bytes;
        sum.h2d_bytes += one->h2d_bytes;
        sum.evictions += one->evictions;
        if (one->peak_bytes > sum.peak_bytes) sum.peak_bytes = one->peak_bytes;
    }
    return sum;
}

static void print_bounds(const bound *bounds, resource busiest) {
    for (int i = 0; i < N_RESOURCES; i++) {
        const bound *b = &bounds[i];
        printf("  %-8s %7.2f ms = %.2f before + %.2f busy + %.2f turn + %.2f after%s\n", resource_names[i],
               bound_ms(b), b->before_ms, b->busy_ms, b->turn_ms, b->after_ms,
               i == (int)busiest ? "  <- the bound" : "");
    }
}

/* Prints; returns the ratio. Negative: the steady state costs what it must
 * not, or gathered parameters were wrong. */
static double report(const run_config *config, const shared *s) {
    bound bounds[N_RESOURCES];
    double least, most, median = median_step_ms(s, config->n_steps, &least, &most);
    resource busiest = RESOURCE_COMPUTE;
    rank_result sum = sum_of(s);
    double per_step = (double)config->n_steps * N_RANKS;
    bounds_of(config->scenario, bounds);
    for (int i = 0; i < N_RESOURCES; i++)
        if (bound_ms(&bounds[i]) > bound_ms(&bounds[busiest])) busiest = (resource)i;
    double ratio = median / bound_ms(&bounds[busiest]);
    printf("%s: a step takes %.2f ms (median of %u; %.2f to %.2f), %.2f of its bound:\n",
           config->scenario->name, median, config->n_steps, least, most, ratio);
    print_bounds(bounds, busiest);
    printf("  per step and rank: creates %.2f maps %.2f set-access %.2f unmaps %.2f\n",
           (double)sum.creates / per_step, (double)sum.maps / per_step, (double)sum.accesses / per_step,
           (double)sum.unmaps / per_step);
    printf("  of the model's thread: agreements %.2f, other calls that may wait %.2f, of which waited %.2f; "
           "%.1f ms to enqueue\n",
           (double)sum.agreements / per_step, (double)sum.blocking / per_step, (double)sum.waits / per_step,
           (double)sum.enqueue_ns / per_step / 1e6);
    if (sum.wrong) fprintf(stderr, "%lu samples of gathered parameters were wrong\n", sum.wrong);
    bool maps = !config->exact && (sum.maps || sum.accesses || sum.unmaps || sum.blocking);
    if (maps || sum.creates)
        fprintf(stderr, "the steady state makes or maps pages, or waits for the device\n");
    return sum.wrong || sum.creates || maps ? -ratio : ratio;
}

/* ---- budgets ----
 *
 * Kernels as in the first scenario, and over PCIe a step's stores and loads take as long as its kernels.
 * Budgets are what may be kept beside the groups in use: those pages are measured first, with nothing kept.
 */

static const scenario moves_as_long = {"budgets", 5, 10, 4, 7.5, 3, 0.25, 50, 10};
static const struct budget {
    uint32_t percent; /* of all groups */
    double goal;      /* of the step over that with all of them on the device; 0: none */
} budgets[] = {{100, 0}, {75, 0}, {50, 1.05}, {25, 0}, {0, 1.15}};
enum { N_BUDGETS = sizeof budgets / sizeof *budgets };

/* The median step, negative where something was wrong; a row of the table. */
static double budget_run(const run_config *config, shared *s, double all_ms) {
    double least, most;
    if (!scenario_run(config, s)) exit(1);
    rank_result sum = sum_of(s);
    double median = median_step_ms(s, config->n_steps, &least, &most);
    double per_step = (double)config->n_steps * N_RANKS * SHARD_BYTES * N_RANKS / NODE_SIZE;
    printf(" %.2f ms | %.3f | %.1f | %.1f | %.1f |", median, all_ms > 0 ? median / all_ms : 1,
           (double)sum.d2h_bytes / per_step, (double)sum.h2d_bytes / per_step,
           (double)sum.evictions / (double)config->n_steps / N_RANKS);
    if (sum.wrong) fprintf(stderr, "%lu samples of gathered parameters were wrong\n", sum.wrong);
    return sum.wrong ? -median : median;
}

/* Pages that the groups in use take where none is kept. */
static size_t pages_in_use(run_config config, shared *s) {
    config.policy = FCDP_POLICY_TAU;
    config.budget_bytes = (size_t)1 << 30;
    if (!scenario_run(&config, s)) exit(1);
    return sum_of(s).peak_bytes / PAGE_BYTES;
}

static bool budgets_report(const run_config *asked, shared *s, const scenario *of) {
    run_config config = *asked;
    double all_ms = 0, ratios[2][N_BUDGETS];
    bool good = true;
    config.scenario = of;
    for (int ahead = 1; ahead >= 0; ahead--) {
        config.prefetch = ahead ? asked->prefetch : 0;
        size_t n_in_use = pages_in_use(config, s);
        printf("\nFCDP_PREFETCH=%d, %zu pages for groups in use; per step and rank:\n\n", config.prefetch,
               n_in_use);
        printf("| budget | step | over all on the device | stored | restored | evictions |\n"
               "| --- | --- | --- | --- | --- | --- |\n");
        for (int i = 0; i < N_BUDGETS; i++) {
            config.policy = FCDP_POLICY_NEXT_USE;
            config.budget_bytes = (n_in_use + N_GROUPS * budgets[i].percent / 100) * PAGE_BYTES;
            printf("| %u %% |", budgets[i].percent);
            double ms = budget_run(&config, s, all_ms);
            printf("\n");
            good = good && ms > 0;
            if (ms < 0) ms = -ms;
            if (ahead && i == 0) all_ms = ms;
            ratios[ahead][i] = ms / all_ms;
        }
    }
    printf("\n");
    for (int i = 0; i < N_BUDGETS; i++) {
        if (budgets[i].goal == 0) continue;
        bool meets = ratios[1][i] <= budgets[i].goal;
        printf("step at %u %% of W over all on the device: %.3f (goal %.2f%s); without prefetch %.3f\n",
               budgets[i].percent, ratios[1][i], budgets[i].goal, meets ? "" : ", MISSED", ratios[0][i]);
        good = good && meets;
    }
    return good;
}

/* ---- command line ---- */

typedef struct arguments {
    run_config run;
    double scale;
    bool budgets;
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
    if (!strcmp(name, "--timelines")) return (a->run.timelines = value);
    if (!strcmp(name, "--scale")) return (a->scale = strtod(value, &end)) > 0 && !*end;
    if (!strcmp(name, "--transport")) {
        a->run.nccl = !strcmp(value, "nccl");
        return a->run.nccl || !strcmp(value, "net");
    }
    if (strcmp(name, "--mapping")) return false;
    a->run.exact = !strcmp(value, "exact");
    return a->run.exact || !strcmp(value, "slots");
}

static bool parse(arguments *a, int argc, char **argv) {
    *a = (arguments){.run = {.n_warm = 4, .n_steps = 10, .prefetch = 2, .budget_bytes = (size_t)1 << 30},
                     .scale = 1};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--budgets")) {
            a->budgets = true;
            continue;
        }
        if (i + 1 == argc || !parse_one(a, argv[i], argv[i + 1])) return false;
        i++;
    }
    return true;
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
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) return 2;
    if (a.budgets) {
        scenario of = scaled(moves_as_long, a.scale);
        return budgets_report(&a.run, s, &of) ? 0 : 1;
    }
    printf("%d groups as %d nodes x %d ranks, FCDP_PREFETCH=%d, FCDP_TAU=0, FCDP_RESTORE=slice, mapping "
           "%s, transport %s\n",
           N_GROUPS, N_NODES, NODE_SIZE, a.run.prefetch, a.run.exact ? "exact" : "slots",
           a.run.nccl ? "nccl" : "net");
    for (int i = 0; i < N_RESOURCES; i++) {
        scenario of = scaled(scenarios[i], a.scale);
        a.run.scenario = &of;
        if (!scenario_run(&a.run, s)) return 1;
        ratios[i] = report(&a.run, s);
        good = good && ratios[i] > 0;
        if (ratios[i] < 0) ratios[i] = -ratios[i];
    }
    printf("overlap over the bound: compute %.2f pcie %.2f link %.2f\n", ratios[RESOURCE_COMPUTE],
           ratios[RESOURCE_PCIE], ratios[RESOURCE_LINK]);
    return good ? 0 : 1;
}
