/* The codec's bench: a row for each kind of weights and learning rate, of no more bits than were planned for;
 * and what it says to options that it does not have. How fast it is, is not tested. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/assert_ok.h"

static char text[8192];

static int run(const char *arguments) {
    char command[1024];
    const char *program = getenv("TEST_CODEC");
    assert_non_null(program);
    snprintf(command, sizeof command, "%s %s 2>&1", program, arguments);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    text[fread(text, 1, sizeof text - 1, pipe)] = '\0';
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_the_table_has_all_rows(void **state) {
    (void)state;
    static const struct {
        const char *weights;
        double lr, most; /* of the array */
    } rows[] = {{"bf16", 3e-4, 0.25},    {"bf16", 1e-4, 0.175},   {"bf16", 1e-5, 0.05},
                {"bf16", 1e-6, 0.02},    {"float32", 3e-4, 0.65}, {"float32", 1e-4, 0.59},
                {"float32", 1e-5, 0.48}, {"float32", 1e-6, 0.39}};
    static const char *const ways[] = {"--size 1 --rounds 1", "--portable --rounds 2 --size 1"};
    for (size_t way = 0; way < 2; way++) {
        assert_int_equal(run(ways[way]), 0);
        print_message("%s", text);
        assert_int_equal(strstr(text, "any processor") != NULL, way);
        const char *line = strstr(text, "| --- |");
        assert_non_null(line);
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            char weights[16];
            double lr, changed, bits, of, encode, decode, copy;
            line = strchr(line, '\n') + 1;
            assert_int_equal(sscanf(line, "| %15s | %lf | %lf %% | %lf | %lf | %lf | %lf | %lf |", weights,
                                    &lr, &changed, &bits, &of, &encode, &decode, &copy),
                             8);
            assert_string_equal(weights, rows[i].weights);
            assert_true(lr == rows[i].lr && changed > 0 && of > 0 && of < rows[i].most);
        }
    }
}

static void test_help_and_what_it_does_not_know(void **state) {
    (void)state;
    static const char *const wrong[] = {"--size 0",   "--size 4097", "--size 1x", "--size -1", "--rounds 0",
                                        "--rounds x", "--quick",     "--size",    "64"};
    assert_int_equal(run("--help"), 0);
    for (const char *const *option = (const char *const[]){"--size", "--rounds", "--portable", NULL}; *option;
         option++)
        assert_non_null(strstr(text, *option));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(run(wrong[i]), 2);
        assert_non_null(strstr(text, "--rounds    of which"));
    }
}

int main(void) {
    if (getenv("TEST_EMULATED")) {
        printf("the bench is another program, which the emulator does not start\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_table_has_all_rows),
        cmocka_unit_test(test_help_and_what_it_does_not_know),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
