/* test_engine.c - predicted steps against the engine's own, on the simulated device: the bench of the
 * overlap says what its scenarios take in modelled time, whatever else the machine does. Nothing here is
 * fitted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "tools/bench/overlap/predicted.h"

#define SCALE 0.3

/* As in tools/bench/overlap/main.c. */
static const scenario scenarios[] = {
    {"compute", 5, 10, 4, 3, 3, 0.25, 50, 10},
    {"pcie", 1.5, 3, 4, 5, 2, 0.25, 50, 10},
    {"link", 1.5, 3, 4, 3, 5, 0.25, 50, 10},
};
enum { N_SCENARIOS = sizeof scenarios / sizeof *scenarios, N_PREFETCH = 2, N_RUNS = 10 };

static double predicted(const scenario *s, uint32_t prefetch) {
    uint8_t tiers[N_GROUPS];
    scenario of = scenario_scaled(*s, SCALE);
    memset(tiers, PLAN_BY_SLICE, sizeof tiers);
    double ms = predicted_ms(&of, prefetch, tiers);
    assert_true(ms > 0);
    return ms;
}

/* The shortest step of each scenario, where it is shorter than what is known. */
static void measure(uint32_t prefetch, double *least_ms) {
    char command[1024], text[8192];
    snprintf(command, sizeof command, "%s --steps 4 --warm 2 --scale %g --prefetch %u",
             getenv("TEST_OVERLAP"), SCALE, prefetch);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    text[fread(text, 1, sizeof text - 1, pipe)] = '\0';
    pclose(pipe);
    for (int i = 0; i < N_SCENARIOS; i++) {
        char head[64];
        double median, ms;
        unsigned n;
        snprintf(head, sizeof head, "\n%s: a step takes ", scenarios[i].name);
        const char *line = strstr(text, head);
        assert_non_null(line);
        assert_int_equal(sscanf(line + strlen(head), "%lf ms (median of %u; %lf to", &median, &n, &ms), 3);
        least_ms[i] = fmin(least_ms[i], ms);
    }
}

/* A busy machine makes the host late, and the step longer than what the device took for it, never shorter.
 * So the shortest step counts, and the measurement is repeated while one is still longer than was
 * predicted. */
static void steps_are_the_engine_s(void **state) {
    (void)state;
    assert_non_null(getenv("TEST_OVERLAP"));
    for (uint32_t prefetch = 0; prefetch < N_PREFETCH; prefetch++) {
        double least_ms[N_SCENARIOS];
        bool is_late = true;
        for (int i = 0; i < N_SCENARIOS; i++) least_ms[i] = INFINITY;
        for (int run = 0; is_late && run < N_RUNS; run++) {
            measure(prefetch, least_ms);
            is_late = false;
            for (int i = 0; i < N_SCENARIOS; i++)
                if (least_ms[i] > 1.05 * predicted(&scenarios[i], prefetch)) is_late = true;
        }
        for (int i = 0; i < N_SCENARIOS; i++) {
            double error = predicted(&scenarios[i], prefetch) / least_ms[i] - 1;
            printf("FCDP_PREFETCH=%u, bound by %s: %.2f ms, predicted %+.1f %%\n", prefetch,
                   scenarios[i].name, least_ms[i], 100 * error);
            assert_true(fabs(error) < 0.05);
        }
    }
}

int main(void) {
    if (getenv("TEST_EMULATED")) {
        printf("the bench is another program, which the emulator does not start\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps_are_the_engine_s)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
