/* The bench of the overlap: it ends, says what it must in the form it must, and the
 * engine's steady state costs no driver call. How large its figures are is not asserted,
 * but that no step is shorter than its bound. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { N_SCENARIOS = 3, N_RANKS = 4 };

static const char *const names[N_SCENARIOS] = {"compute", "pcie", "link"};

/* What it printed, and its exit status. */
static int run(const char *arguments, char *text, size_t n) {
    char command[1024];
    const char *program = getenv("TEST_OVERLAP");
    assert_non_null(program);
    snprintf(command, sizeof command, "%s %s", program, arguments);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    text[fread(text, 1, n - 1, pipe)] = '\0';
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static size_t count(const char *text, const char *part) {
    size_t n = 0;
    for (; (text = strstr(text, part)); text++) n++;
    return n;
}

/* The three ratios; the form to the last byte. */
static void last_line_read(const char *text, double ratios_out[N_SCENARIOS]) {
    char again[128];
    const char *line = strstr(text, "overlap over the bound: ");
    assert_non_null(line);
    double *r = ratios_out;
    assert_int_equal(
        sscanf(line, "overlap over the bound: compute %lf pcie %lf link %lf", &r[0], &r[1], &r[2]),
        N_SCENARIOS);
    snprintf(again, sizeof again, "overlap over the bound: compute %.2f pcie %.2f link %.2f\n", r[0], r[1],
             r[2]);
    assert_string_equal(line, again);
}

static void timelines_check(const char *folder) {
    char path[512];
    struct stat about;
    for (int s = 0; s < N_SCENARIOS; s++)
        for (int r = 0; r < N_RANKS; r++) {
            snprintf(path, sizeof path, "%s/%s.%d.json", folder, names[s], r);
            assert_int_equal(stat(path, &about), 0);
            assert_true(about.st_size > 1000);
            unlink(path);
        }
}

static void a_short_run_ends_with_nothing_mapped_and_nobody_waiting(void **state) {
    (void)state;
    static char text[8192];
    char folder[] = "/tmp/fcdp-overlap-XXXXXX", arguments[256];
    double ratios[N_SCENARIOS];
    assert_non_null(mkdtemp(folder));
    snprintf(arguments, sizeof arguments, "--steps 3 --warm 2 --scale 0.3 --timelines %s", folder);
    int status = run(arguments, text, sizeof text);
    print_message("%s", text);
    assert_int_equal(status, 0);
    last_line_read(text, ratios);
    for (int s = 0; s < N_SCENARIOS; s++) assert_true(ratios[s] >= 1);
    assert_int_equal(count(text, "per step and rank: creates 0.00 maps 0.00 set-access 0.00 unmaps 0.00\n"),
                     N_SCENARIOS);
    assert_int_equal(count(text, "agreements 2.00, other calls that may wait 0.00, of which waited 0.00;"),
                     N_SCENARIOS);
    timelines_check(folder);
    assert_int_equal(rmdir(folder), 0);
}

/* NCCL's entry points in the path: the same counts, and no rule of NCCL's broken (the ranks look). */
static void a_short_run_over_nccls_double(void **state) {
    (void)state;
    static char text[8192];
    double ratios[N_SCENARIOS];
    int status = run("--steps 3 --warm 2 --scale 0.3 --transport nccl", text, sizeof text);
    print_message("%s", text);
    assert_int_equal(status, 0);
    last_line_read(text, ratios);
    for (int s = 0; s < N_SCENARIOS; s++) assert_true(ratios[s] >= 1);
    assert_non_null(strstr(text, "transport nccl\n"));
    assert_int_equal(count(text, "agreements 2.00, other calls that may wait 0.00, of which waited 0.00;"),
                     N_SCENARIOS);
}

/* Each gather but a group's first is of differences, and all that is gathered is right (else it ends with
 * 2 or a word on stderr, and says so in its status). Whether the goals are met is not asserted. */
static void a_short_run_of_differences(void **state) {
    (void)state;
    static char text[8192];
    static const char *const ways[] = {"--codec delta", "--codec delta --transport nccl"};
    const char *coarser = getenv("TEST_COARSER");
    size_t n = coarser && atoi(coarser) >= 32 ? 1 : sizeof ways / sizeof *ways;
    for (size_t i = 0; i < n; i++) {
        char arguments[128];
        double ratios[N_SCENARIOS], of, ratio;
        snprintf(arguments, sizeof arguments, "--steps 2 --warm 2 --scale 0.3 %s 2>&1", ways[i]);
        int status = run(arguments, text, sizeof text);
        print_message("%s", text);
        assert_in_range(status, 0, 1);
        last_line_read(text, ratios);
        for (int s = 0; s < N_SCENARIOS; s++) assert_true(ratios[s] >= 1);
        assert_non_null(strstr(text, "codec delta\n"));
        assert_int_equal(count(text, "differences: "), N_SCENARIOS);
        const char *line = text;
        while ((line = strstr(line, "differences: "))) {
            assert_int_equal(sscanf(line, "differences: %lf of the bytes", &of), 1);
            assert_true(of > 0.05 && of < 0.5);
            line++;
        }
        assert_null(strstr(text, "crossed whole"));
        assert_null(strstr(text, "wrong"));
        assert_null(strstr(text, "the steady state"));
        assert_int_equal(count(text, "  groups of "), 3);
        line = strstr(text, "Gbit/s: ");
        assert_non_null(line);
        assert_int_equal(sscanf(line, "Gbit/s: %lf (goal", &ratio), 1);
        assert_true(ratio > 0.9);
    }
}

/* Every use maps its region and unmaps it, so the counters do count. */
static void exact_mapping_is_counted(void **state) {
    (void)state;
    static char text[8192];
    double ratios[N_SCENARIOS];
    assert_int_equal(run("--steps 2 --warm 2 --scale 0.3 --mapping exact", text, sizeof text), 0);
    last_line_read(text, ratios);
    assert_int_equal(count(text, "creates 0.00 maps "), N_SCENARIOS);
    assert_int_equal(count(text, "maps 0.00"), 0);
}

/* Where all of it fits nothing moves, and the less fits the more does; a plan that holds evicts nothing. The
 * first table; whether the goals are met is not asserted. */
static void less_memory_moves_more_and_evicts_nothing(void **state) {
    (void)state;
    static const unsigned percents[] = {100, 75, 50, 25, 0};
    static char text[8192];
    double restored_before = -1;
    int status = run("--budgets --steps 2 --warm 6 --scale 0.2", text, sizeof text);
    print_message("%s", text);
    assert_in_range(status, 0, 1);
    const char *row = text;
    for (size_t i = 0; i < sizeof percents / sizeof *percents; i++) {
        char head[16];
        double ms, ratio, stored, restored, evictions;
        snprintf(head, sizeof head, "\n| %u %% |", percents[i]);
        row = strstr(row, head);
        assert_non_null(row);
        int n = sscanf(row + strlen(head), " %lf ms | %lf | %lf | %lf | %lf |", &ms, &ratio, &stored,
                       &restored, &evictions);
        assert_int_equal(n, 5);
        assert_true(evictions == 0 && (i > 0 || (stored == 0 && restored == 0)));
        assert_true(restored >= restored_before && restored <= stored);
        restored_before = restored;
    }
    assert_true(restored_before > 8);
    assert_int_equal(count(text, "over all on the device: "), 2);
}

/* A row for each budget, with as many groups kept as it has room for, and the root, which stays. Whether the
 * goals are met is not asserted. */
static void plans_keep_what_the_budget_has_room_for(void **state) {
    (void)state;
    static const unsigned percents[] = {75, 50, 25, 0}, n_kept[] = {13, 9, 5, 1};
    static char text[8192];
    int status = run("--plans --steps 1 --warm 2 --scale 0.1", text, sizeof text);
    print_message("%s", text);
    assert_in_range(status, 0, 1);
    for (size_t i = 0; i < sizeof percents / sizeof *percents; i++) {
        char head[16];
        double ms, predicted, error, best, tau, ratio;
        unsigned kept;
        snprintf(head, sizeof head, "\n| %u %% |", percents[i]);
        const char *row = strstr(text, head);
        assert_non_null(row);
        int n = sscanf(row + strlen(head), " %lf ms | %lf ms | %lf %% | %u | %lf ms, FCDP_TAU=%lf | %lf", &ms,
                       &predicted, &error, &kept, &best, &tau, &ratio);
        assert_int_equal(n, 7);
        assert_int_equal(kept, n_kept[i]);
        assert_true(ms > 0 && predicted > 0 && best > 0);
    }
}

static void wrong_arguments_are_refused(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "--steps 0",      "--steps 33",    "--warm x",     "--scale 0",    "--scale 1x",
        "--mapping none", "--transport x", "--prefetch 9", "--codec int8", "--codec delta --plans",
        "--steps",        "--unknown 1",   "--help"};
    static char text[8192];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "%s 2>&1", wrong[i]);
        assert_int_equal(run(arguments, text, sizeof text), 2);
        assert_non_null(strstr(text, "fcdp-overlap [--steps N]"));
    }
}

int main(void) {
    if (getenv("TEST_EMULATED")) {
        printf("the bench is another program, which the emulator does not start\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_short_run_ends_with_nothing_mapped_and_nobody_waiting),
        cmocka_unit_test(a_short_run_over_nccls_double),
        cmocka_unit_test(a_short_run_of_differences),
        cmocka_unit_test(exact_mapping_is_counted),
        cmocka_unit_test(less_memory_moves_more_and_evicts_nothing),
        cmocka_unit_test(plans_keep_what_the_budget_has_room_for),
        cmocka_unit_test(wrong_arguments_are_refused),
    };
    return cmocka_run_group_tests_name("bench overlap", tests, NULL, NULL);
}
