/* run.c - runs a scenario in processes of its own. */
#include "tools/bench/overlap/run.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

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

bool scenario_run(const run_config *config, shared *s) {
    pid_t pids[N_RANKS];
    simnet_fabric *fabric;
    memset(s->results, 0, sizeof s->results);
    board_init(&s->board, N_RANKS);
    simnet_config net = {
        .nodes = N_NODES, .ranks_per_node = NODE_SIZE, .ids = 6, .staging_bytes = 1 << 20, .timeout_s = 60};
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

static int ascending(const void *a, const void *b) {
    double one = *(const double *)a, other = *(const double *)b;
    return one < other ? -1 : one > other;
}

double median_step_ms(const shared *s, uint32_t n_steps, double *least_out, double *most_out) {
    double all[N_RANKS * BOARD_MAX_STEPS];
    uint32_t n = 0;
    for (uint32_t r = 0; r < N_RANKS; r++)
        for (uint32_t i = 0; i < n_steps; i++) all[n++] = s->results[r].step_ms[i];
    qsort(all, n, sizeof *all, ascending);
    *least_out = all[0];
    *most_out = all[n - 1];
    return n % 2 ? all[n / 2] : (all[n / 2 - 1] + all[n / 2]) / 2;
}

rank_result sum_of(const shared *s) {
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
        sum.crossed_bytes += one->crossed_bytes;
        sum.n_differences += one->n_differences;
        sum.n_whole += one->n_whole;
        sum.n_by_device += one->n_by_device;
        sum.encode_ns += one->encode_ns;
        sum.decode_ns += one->decode_ns;
        if (one->peak_bytes > sum.peak_bytes) sum.peak_bytes = one->peak_bytes;
    }
    return sum;
}
