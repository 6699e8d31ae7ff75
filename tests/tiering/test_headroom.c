/* What host memory is left, read from a made-up /proc and /sys. */
#include "tests/alloc/support.h"

#include "tests/tiering/described.h"
#include "tiering/account.h"

static int root_make(void **state) {
    if (described_make(state)) return -1;
    described_put("/proc/meminfo",
                  "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n");
    return 0;
}

static void assert_left(size_t mib, const char *limit_part) {
    fcdp_headroom h;
    assert_ok(fcdp__headroom_read(described_root, &h));
    assert_int_equal(h.available_bytes >> 20, mib);
    assert_int_equal(h.total_bytes >> 30, 16);
    if (!strstr(h.limit, limit_part)) fail_msg("\"%s\" is not in \"%s\"", limit_part, h.limit);
}

static void without_a_cgroup_the_machine_is_the_limit(void **state) {
    (void)state;
    assert_left(8192, "MemAvailable");
    described_put("/proc/self/cgroup", "0::/\n");
    assert_left(8192, "MemAvailable");
}

static void the_tightest_ancestor_counts_and_its_cache_is_free(void **state) {
    (void)state;
    described_put("/proc/self/cgroup", "0::/pods/job/rank\n");
    described_put("/sys/fs/cgroup/pods/job/rank/memory.max", "max\n");
    described_put("/sys/fs/cgroup/pods/job/rank/memory.current", "1000\n");
    described_put("/sys/fs/cgroup/pods/job/memory.max", "4294967296\n");
    described_put("/sys/fs/cgroup/pods/job/memory.current", "3221225472\n");
    described_put("/sys/fs/cgroup/pods/job/memory.stat", "anon 1\ninactive_file 2147483648\nactive_file 7\n");
    described_put("/sys/fs/cgroup/pods/memory.max", "8589934592\n");
    described_put("/sys/fs/cgroup/pods/memory.current", "4294967296\n");
    assert_left(3072, "/sys/fs/cgroup/pods/job/memory.max");
}

static void what_slows_a_cgroup_down_counts(void **state) {
    (void)state;
    described_put("/proc/self/cgroup", "0::/pods/job\n");
    described_put("/sys/fs/cgroup/pods/job/memory.max", "4294967296\n");
    described_put("/sys/fs/cgroup/pods/job/memory.high", "3221225472\n");
    described_put("/sys/fs/cgroup/pods/job/memory.current", "1073741824\n");
    described_put("/sys/fs/cgroup/pods/memory.high", "max\n");
    assert_left(2048, "/sys/fs/cgroup/pods/job/memory.high");
}

static void a_container_sees_its_own_cgroup_at_the_mount(void **state) {
    (void)state; /* the path names a cgroup of the host, which the container's mount does not show */
    described_put("/proc/self/cgroup", "0::/system.slice/docker-1234.scope\n");
    described_put("/sys/fs/cgroup/memory.max", "2147483648\n");
    described_put("/sys/fs/cgroup/memory.current", "1073741824\n");
    assert_left(1024, "/sys/fs/cgroup/memory.max");
}

static void version_1_counts_too(void **state) {
    (void)state;
    described_put("/proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/job\n");
    described_put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
    described_put("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "268435456\n");
    described_put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    described_put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n");
    assert_left(768, "memory.limit_in_bytes");
}

static void a_cgroup_over_its_limit_leaves_nothing(void **state) {
    (void)state;
    described_put("/proc/self/cgroup", "0::/job\n");
    described_put("/sys/fs/cgroup/job/memory.max", "1048576\n");
    described_put("/sys/fs/cgroup/job/memory.current", "2097152\n");
    assert_left(0, "/sys/fs/cgroup/job/memory.max");
}

static void the_budget_is_the_option_or_seven_eighths_of_what_the_cgroup_leaves(void **state) {
    (void)state;
    fcdp_host_budget budget;
    described_put("/proc/self/cgroup", "0::/job\n");
    described_put("/sys/fs/cgroup/job/memory.max", "1073741824\n");
    described_put("/sys/fs/cgroup/job/memory.current", "0\n");
    assert_ok(fcdp__host_budget_read(described_root, 0, &budget));
    assert_int_equal(budget.bytes >> 20, 896);
    assert_non_null(strstr(budget.limit, "/sys/fs/cgroup/job/memory.max"));
    assert_ok(fcdp__host_budget_read(described_root, 5, &budget));
    assert_int_equal(budget.bytes, 5);
    assert_string_equal(budget.limit, "FCDP_HOST_BUDGET");
}

static void without_meminfo_the_text_says_what_to_set(void **state) {
    (void)state;
    fcdp_headroom h;
    described_put("/proc/meminfo", "nothing\n");
    assert_int_equal(fcdp__headroom_read(described_root, &h), FCDP_ERR_SYSTEM);
    assert_text("FCDP_HOST_BUDGET");
}

int main(void) {
#define ROOTED(test) cmocka_unit_test_setup_teardown(test, root_make, described_remove)
    const struct CMUnitTest tests[] = {
        ROOTED(without_a_cgroup_the_machine_is_the_limit),
        ROOTED(the_tightest_ancestor_counts_and_its_cache_is_free),
        ROOTED(what_slows_a_cgroup_down_counts),
        ROOTED(a_container_sees_its_own_cgroup_at_the_mount),
        ROOTED(version_1_counts_too),
        ROOTED(a_cgroup_over_its_limit_leaves_nothing),
        ROOTED(the_budget_is_the_option_or_seven_eighths_of_what_the_cgroup_leaves),
        ROOTED(without_meminfo_the_text_says_what_to_set),
    };
    return cmocka_run_group_tests_name("tiering_headroom", tests, NULL, NULL);
}
