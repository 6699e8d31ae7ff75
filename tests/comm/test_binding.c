/* An engine binds the process's threads to the CPUs of its device's NUMA node, and gives them back: on a
 * described machine of two nodes, which share this machine's CPUs. */
#include "tests/alloc/support.h"

#include "comm/engine.h"
#include "tests/tiering/described.h"

static fcdp_cpus everywhere, there; /* `there`: node 1's */

#define NODE "/sys/devices/system/node"

static int machine_make(void **state) {
    char text[256];
    int first = 0;
    fcdp_cpus here = {0};
    if (described_make(state) || !fcdp__cpus_own(&everywhere)) return -1;
    while (!CPU_ISSET_S((size_t)first, sizeof everywhere, everywhere.sets)) first++;
    CPU_SET_S((size_t)first, sizeof here, here.sets);
    there = everywhere;
    CPU_CLR_S((size_t)first, sizeof there, there.sets);
    fcdp__cpus_text(&everywhere, text, sizeof text);
    described_put("/sys/devices/system/cpu/online", text);
    described_put(NODE "/online", "0-1\n");
    fcdp__cpus_text(&here, text, sizeof text);
    described_put(NODE "/node0/cpulist", text);
    fcdp__cpus_text(&there, text, sizeof text);
    described_put(NODE "/node1/cpulist", text);
    described_put(NODE "/node1/distance", "21 10\n");
    setenv("FCDP_SIM_ROOT", described_root, 1);
    setenv("FCDP_SIM_NUMA", "1", 1);
    return 0;
}

static int machine_remove(void **state) {
    unsetenv("FCDP_SIM_ROOT");
    unsetenv("FCDP_SIM_NUMA");
    return described_remove(state);
}

static bool runs_on(const fcdp_cpus *cpus) {
    fcdp_cpus own;
    return fcdp__cpus_own(&own) && CPU_EQUAL_S(sizeof own, own.sets, cpus->sets);
}

static fcdp_engine_config config_of(fcdp_pin_cpu_mode pin_cpu, bool host_computes) {
    return (fcdp_engine_config){
        .options = {.pin_cpu = pin_cpu, .device_budget_bytes = 64 << 20, .timeout_s = 10},
        .driver = FCDP_DRIVER_SIM,
        .host_computes = host_computes,
        .storages_raise = true,
    };
}

static void an_engine_binds_threads_and_gives_them_back(void **state) {
    (void)state;
    fcdp_engine *engine, *second;
    fcdp_engine_stats stats;
    if (fcdp__cpus_count(&everywhere) < 2) skip();
    fcdp_engine_config config = config_of(FCDP_PIN_CPU_AUTO, false);
    assert_ok(fcdp_engine_create(&config, &engine));
    assert_true(runs_on(&there));
    fcdp_engine_stats_get(engine, &stats);
    assert_true(stats.numa.binds && stats.numa.node == 1 && stats.numa.n_nodes == 2);
    assert_ok(fcdp_engine_create(&config, &second)); /* respects the first one's choice */
    fcdp_engine_stats_get(second, &stats);
    assert_false(stats.numa.binds);
    fcdp_engine_destroy(second);
    assert_true(runs_on(&there));
    fcdp_engine_destroy(engine);
    assert_true(runs_on(&everywhere));
}

static void threads_stay_where_the_host_computes_and_where_it_is_off(void **state) {
    (void)state;
    fcdp_engine *engine;
    fcdp_engine_stats stats;
    for (int i = 0; i < 2; i++) {
        fcdp_engine_config config = config_of(i ? FCDP_PIN_CPU_OFF : FCDP_PIN_CPU_AUTO, !i);
        assert_ok(fcdp_engine_create(&config, &engine));
        assert_true(runs_on(&everywhere));
        fcdp_engine_stats_get(engine, &stats);
        assert_non_null(strstr(stats.numa.text, i ? "FCDP_PIN_CPU=off" : "computes on CPUs"));
        assert_int_equal(stats.numa.memory_node, 1); /* pages go to the device's node in either case */
        fcdp_engine_destroy(engine);
    }
}

/* Whichever call of the driver fails. */
static void an_engine_that_cannot_be_made_gives_the_threads_back(void **state) {
    (void)state;
    static const char *const calls[] = {"cuStreamCreateWithPriority", "cuEventCreate", "cuMemGetInfo"};
    fcdp_engine_config config = config_of(FCDP_PIN_CPU_AUTO, false);
    unsigned n_failed = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (unsigned long n = 1;; n++) {
            fcdp_engine *engine = NULL;
            assert_int_equal(simgpu_fail_nth(calls[i], n, CUDA_OUT_OF_MEMORY), 0);
            fcdp_status status = fcdp_engine_create(&config, &engine);
            assert_int_equal(simgpu_fail_nth(calls[i], 0, 0), 0);
            if (!status) {
                fcdp_engine_destroy(engine);
                assert_true(runs_on(&everywhere));
                break;
            }
            n_failed++;
            assert_true(runs_on(&everywhere));
        }
    assert_true(n_failed > 2);
}

int main(void) {
#define DESCRIBED(test) cmocka_unit_test_setup_teardown(test, machine_make, machine_remove)
    const struct CMUnitTest tests[] = {
        DESCRIBED(an_engine_binds_threads_and_gives_them_back),
        DESCRIBED(threads_stay_where_the_host_computes_and_where_it_is_off),
        DESCRIBED(an_engine_that_cannot_be_made_gives_the_threads_back),
    };
    return cmocka_run_group_tests_name("comm_binding", tests, NULL, NULL);
}
