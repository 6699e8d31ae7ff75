/* The option table: defaults, every kind of value there and back, every refusal's text. */
#include <locale.h>

#include "tests/alloc/support.h"

static fcdp_status load_one(const char *variable, fcdp_options *options) {
    char *envp[] = {(char *)variable, NULL};
    return fcdp_options_load(envp, options);
}

static void assert_refused(const char *variable, const char *text) {
    fcdp_options options, untouched;
    memset(&options, 0x5A, sizeof options);
    memcpy(&untouched, &options, sizeof options);
    if (load_one(variable, &options) != FCDP_ERR_OPTION) fail_msg("%s was accepted", variable);
    assert_string_equal(fcdp_error_text(), text);
    assert_memory_equal(&options, &untouched, sizeof options);
}

static void assert_default(const fcdp_options *options) {
    assert_false(options->enabled);
    assert_int_equal(options->driver, FCDP_DRIVER_AUTO);
    assert_true(options->tau == 0);
    assert_int_equal(options->restore, FCDP_RESTORE_AUTO);
    assert_string_equal(options->plan, "");
    assert_int_equal(options->policy, FCDP_POLICY_AUTO);
    assert_int_equal(options->alloc, FCDP_ALLOC_FCDP);
    assert_int_equal(options->local_size, 0);
    assert_int_equal(options->device_budget_bytes, 0);
    assert_int_equal(options->headroom_bytes, 2ull << 30);
    assert_int_equal(options->host_budget_bytes, 0);
    assert_int_equal(options->pin, FCDP_PIN_AUTO);
    assert_int_equal(options->pin_cpu, FCDP_PIN_CPU_AUTO);
    assert_int_equal(options->host_copies, FCDP_HOST_COPIES_NODE);
    assert_int_equal(options->fingerprint, FCDP_FINGERPRINT_AUTO);
    assert_int_equal(options->agree, FCDP_AGREE_FORWARD);
    assert_int_equal(options->prefetch, 1);
    assert_int_equal(options->codec, FCDP_CODEC_AUTO);
    assert_int_equal(options->codec_threads, 0);
    assert_int_equal(options->reduce, FCDP_REDUCE_FLAT);
    assert_true(options->whole_tensors);
    assert_true(options->timeout_s == 300);
    assert_int_equal(options->check, 0);
    assert_int_equal(options->log, FCDP_LOG_WARN);
    assert_true(options->summary);
    assert_int_equal(options->trace, 1);
    assert_int_equal(options->trace_bytes, 8 << 20);
}

static void nothing_set_gives_the_defaults(void **state) {
    (void)state;
    static char *const ours_not[] = {
        "PATH=/bin", "FCDPX=1",       "XFCDP_TAU=7",   "fcdp_tau=7",       "FCDP_NOVALUE", "FCD=1",
        "",          "FCDP_CACHE=/x", "FCDP_PYTHON=3", "FCDP_TEST_SEED=x", "FCDP_LAB_X=",  NULL};
    fcdp_options options;
    assert_ok(fcdp_options_load(ours_not, &options));
    assert_default(&options);
}

static void an_empty_value_is_the_default(void **state) {
    (void)state;
    size_t n_rows;
    const fcdp_option_row *rows = fcdp_options_table(&n_rows);
    for (size_t i = 0; i < n_rows; i++) {
        char variable[96];
        fcdp_options options;
        snprintf(variable, sizeof variable, "%s=", rows[i].name);
        assert_ok(load_one(variable, &options));
        assert_default(&options);
    }
}

static void every_row_is_complete_and_its_default_is_allowed(void **state) {
    (void)state;
    size_t n_rows;
    const fcdp_option_row *rows = fcdp_options_table(&n_rows);
    assert_true(n_rows >= 14);
    for (size_t i = 0; i < n_rows; i++) {
        char variable[96];
        fcdp_options options;
        assert_true(rows[i].help[0] && rows[i].values[0]);
        assert_memory_equal(rows[i].name, "FCDP", 4);
        snprintf(variable, sizeof variable, "%s=%s", rows[i].name, rows[i].fallback);
        assert_ok(load_one(variable, &options));
        assert_default(&options);
        for (size_t k = 0; k < i; k++) assert_string_not_equal(rows[i].name, rows[k].name);
    }
}

static void values_reach_their_fields(void **state) {
    (void)state;
    static char *const envp[] = {"FCDP=1",
                                 "FCDP_DRIVER=sim",
                                 "FCDP_TAU=0.25",
                                 "FCDP_RESTORE=whole",
                                 "FCDP_PLAN=plans/8B.json",
                                 "FCDP_LOCAL_SIZE=8",
                                 "FCDP_DEVICE_BUDGET=8G",
                                 "FCDP_HEADROOM=3G",
                                 "FCDP_HOST_BUDGET=512m",
                                 "FCDP_PIN=never",
                                 "FCDP_PIN_CPU=off",
                                 "FCDP_HOST_COPIES=numa",
                                 "FCDP_FINGERPRINT=never",
                                 "FCDP_PREFETCH=0",
                                 "FCDP_CODEC_THREADS=64",
                                 "FCDP_REDUCE=hierarchical",
                                 "FCDP_REDUCE_DTYPE=int8",
                                 "FCDP_WHOLE_TENSORS=0",
                                 "FCDP_TIMEOUT=2.5",
                                 "FCDP_CHECK=3",
                                 "FCDP_LOG=debug",
                                 "FCDP_SUMMARY=0",
                                 "FCDP_SIM_LIBRARY=/x/y.so",
                                 "FCDP_SIM_CAPACITY=1G",
                                 "FCDP_SIM_PCIE=12",
                                 "FCDP_SIM_FAIL=cuMemMap:3",
                                 "FCDP_SIM_POISON=1",
                                 "FCDP_CACHE=/tmp",
                                 "FCDP_CACHE_DIR=/var/cache/fcdp",
                                 "FCDP_CACHE_SIZE=20G",
                                 "FCDP_JEMALLOC=/j",
                                 "FCDP_LAB_ANYTHING=at all",
                                 NULL};
    fcdp_options options;
    assert_ok(fcdp_options_load(envp, &options));
    assert_true(options.enabled);
    assert_int_equal(options.driver, FCDP_DRIVER_SIM);
    assert_true(options.tau == 0.25);
    assert_int_equal(options.restore, FCDP_RESTORE_WHOLE);
    assert_string_equal(options.plan, "plans/8B.json");
    assert_int_equal(options.local_size, 8);
    assert_int_equal(options.device_budget_bytes, 8ull << 30);
    assert_int_equal(options.headroom_bytes, 3ull << 30);
    assert_int_equal(options.host_budget_bytes, 512ull << 20);
    assert_int_equal(options.pin, FCDP_PIN_NEVER);
    assert_int_equal(options.pin_cpu, FCDP_PIN_CPU_OFF);
    assert_int_equal(options.host_copies, FCDP_HOST_COPIES_NUMA);
    assert_int_equal(options.fingerprint, FCDP_FINGERPRINT_NEVER);
    assert_int_equal(options.prefetch, 0);
    assert_int_equal(options.codec_threads, 64);
    assert_int_equal(options.reduce, FCDP_REDUCE_HIERARCHICAL);
    assert_int_equal(options.reduce_dtype, FCDP_REDUCE_DTYPE_INT8);
    assert_false(options.whole_tensors);
    assert_true(options.timeout_s == 2.5);
    assert_string_equal(options.cache_dir, "/var/cache/fcdp");
    assert_int_equal(options.cache_bytes, 20ull << 30);
    assert_int_equal(options.check, 3);
    assert_int_equal(options.log, FCDP_LOG_DEBUG);
    assert_false(options.summary);
}

static void every_choice_is_its_enums_constant(void **state) {
    (void)state;
    static const struct {
        const char *variable;
        size_t offset;
        int constant;
    } cases[] = {
        {"FCDP_DRIVER=auto", offsetof(fcdp_options, driver), FCDP_DRIVER_AUTO},
        {"FCDP_DRIVER=cuda", offsetof(fcdp_options, driver), FCDP_DRIVER_CUDA},
        {"FCDP_DRIVER=sim", offsetof(fcdp_options, driver), FCDP_DRIVER_SIM},
        {"FCDP_RESTORE=slice", offsetof(fcdp_options, restore), FCDP_RESTORE_SLICE},
        {"FCDP_RESTORE=whole", offsetof(fcdp_options, restore), FCDP_RESTORE_WHOLE},
        {"FCDP_RESTORE=auto", offsetof(fcdp_options, restore), FCDP_RESTORE_AUTO},
        {"FCDP_PIN=auto", offsetof(fcdp_options, pin), FCDP_PIN_AUTO},
        {"FCDP_PIN=require", offsetof(fcdp_options, pin), FCDP_PIN_REQUIRE},
        {"FCDP_PIN=never", offsetof(fcdp_options, pin), FCDP_PIN_NEVER},
        {"FCDP_PIN_CPU=auto", offsetof(fcdp_options, pin_cpu), FCDP_PIN_CPU_AUTO},
        {"FCDP_PIN_CPU=off", offsetof(fcdp_options, pin_cpu), FCDP_PIN_CPU_OFF},
        {"FCDP_HOST_COPIES=node", offsetof(fcdp_options, host_copies), FCDP_HOST_COPIES_NODE},
        {"FCDP_HOST_COPIES=numa", offsetof(fcdp_options, host_copies), FCDP_HOST_COPIES_NUMA},
        {"FCDP_FINGERPRINT=auto", offsetof(fcdp_options, fingerprint), FCDP_FINGERPRINT_AUTO},
        {"FCDP_FINGERPRINT=device", offsetof(fcdp_options, fingerprint), FCDP_FINGERPRINT_DEVICE},
        {"FCDP_FINGERPRINT=never", offsetof(fcdp_options, fingerprint), FCDP_FINGERPRINT_NEVER},
        {"FCDP_ALLOC=fcdp", offsetof(fcdp_options, alloc), FCDP_ALLOC_FCDP},
        {"FCDP_ALLOC=native", offsetof(fcdp_options, alloc), FCDP_ALLOC_NATIVE},
        {"FCDP_POLICY=tau", offsetof(fcdp_options, policy), FCDP_POLICY_TAU},
        {"FCDP_POLICY=next-use", offsetof(fcdp_options, policy), FCDP_POLICY_NEXT_USE},
        {"FCDP_POLICY=auto", offsetof(fcdp_options, policy), FCDP_POLICY_AUTO},
        {"FCDP_TRANSPORT=auto", offsetof(fcdp_options, transport), FCDP_TRANSPORT_AUTO},
        {"FCDP_TRANSPORT=nccl", offsetof(fcdp_options, transport), FCDP_TRANSPORT_NCCL},
        {"FCDP_TRANSPORT=torch", offsetof(fcdp_options, transport), FCDP_TRANSPORT_TORCH},
        {"FCDP_AGREE=forward", offsetof(fcdp_options, agree), FCDP_AGREE_FORWARD},
        {"FCDP_AGREE=unshard", offsetof(fcdp_options, agree), FCDP_AGREE_UNSHARD},
        {"FCDP_REDUCE=flat", offsetof(fcdp_options, reduce), FCDP_REDUCE_FLAT},
        {"FCDP_REDUCE=hierarchical", offsetof(fcdp_options, reduce), FCDP_REDUCE_HIERARCHICAL},
        {"FCDP_REDUCE_DTYPE=same", offsetof(fcdp_options, reduce_dtype), FCDP_REDUCE_DTYPE_SAME},
        {"FCDP_REDUCE_DTYPE=bf16", offsetof(fcdp_options, reduce_dtype), FCDP_REDUCE_DTYPE_BF16},
        {"FCDP_REDUCE_DTYPE=int8", offsetof(fcdp_options, reduce_dtype), FCDP_REDUCE_DTYPE_INT8},
        {"FCDP_LOG=quiet", offsetof(fcdp_options, log), FCDP_LOG_QUIET},
        {"FCDP_LOG=warn", offsetof(fcdp_options, log), FCDP_LOG_WARN},
        {"FCDP_LOG=info", offsetof(fcdp_options, log), FCDP_LOG_INFO},
        {"FCDP_LOG=debug", offsetof(fcdp_options, log), FCDP_LOG_DEBUG},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fcdp_options options;
        int value;
        assert_ok(load_one(cases[i].variable, &options));
        memcpy(&value, (char *)&options + cases[i].offset, sizeof value);
        if (value != cases[i].constant)
            fail_msg("%s gave %d, not %d", cases[i].variable, value, cases[i].constant);
    }
}

static void a_refusal_says_what_is_allowed(void **state) {
    (void)state;
#define BYTES_EXPECTED "expected bytes, such as 512M, 1.5GiB or 8GB (M = MiB = 1024 KiB, MB = 1000 KB)"
    static const char *const cases[][2] = {
        {"FCDP=maybe", "FCDP=maybe: expected 0 or 1"},
        {"FCDP=true", "FCDP=true: expected 0 or 1"},
        {"FCDP=11", "FCDP=11: expected 0 or 1"},
        {"FCDP= 1", "FCDP= 1: expected 0 or 1"},
        {"FCDP=0|1", "FCDP=0|1: expected 0 or 1"},
        {"FCDP_DRIVER=gpu", "FCDP_DRIVER=gpu: expected auto, cuda or sim"},
        {"FCDP_DRIVER=CUDA", "FCDP_DRIVER=CUDA: expected auto, cuda or sim"},
        {"FCDP_TAU=1.5", "FCDP_TAU=1.5: expected a number from 0 to 1"},
        {"FCDP_TAU=-0.1", "FCDP_TAU=-0.1: expected a number from 0 to 1"},
        {"FCDP_TAU=nan", "FCDP_TAU=nan: expected a number from 0 to 1"},
        {"FCDP_TAU=inf", "FCDP_TAU=inf: expected a number from 0 to 1"},
        {"FCDP_TAU=0x1", "FCDP_TAU=0x1: expected a number from 0 to 1"},
        {"FCDP_TAU=0,5", "FCDP_TAU=0,5: expected a number from 0 to 1"},
        {"FCDP_TAU=0.5 ", "FCDP_TAU=0.5 : expected a number from 0 to 1"},
        {"FCDP_TAU=1e-", "FCDP_TAU=1e-: expected a number from 0 to 1"},
        {"FCDP_RESTORE=half", "FCDP_RESTORE=half: expected slice, whole or auto"},
        {"FCDP_POLICY=lru", "FCDP_POLICY=lru: expected tau, next-use or auto"},
        {"FCDP_LOCAL_SIZE=-1", "FCDP_LOCAL_SIZE=-1: expected a whole number from 0 to 65536"},
        {"FCDP_LOCAL_SIZE=2.0", "FCDP_LOCAL_SIZE=2.0: expected a whole number from 0 to 65536"},
        {"FCDP_LOCAL_SIZE=99999999999999999999",
         "FCDP_LOCAL_SIZE=99999999999999999999: expected a whole number from 0 to 65536"},
        {"FCDP_DEVICE_BUDGET=8X", "FCDP_DEVICE_BUDGET=8X: " BYTES_EXPECTED},
        {"FCDP_DEVICE_BUDGET=G", "FCDP_DEVICE_BUDGET=G: " BYTES_EXPECTED},
        {"FCDP_DEVICE_BUDGET=-1", "FCDP_DEVICE_BUDGET=-1: " BYTES_EXPECTED},
        {"FCDP_DEVICE_BUDGET=1.5.G", "FCDP_DEVICE_BUDGET=1.5.G: " BYTES_EXPECTED},
        {"FCDP_HOST_BUDGET=18446744073709551616", "FCDP_HOST_BUDGET=18446744073709551616: " BYTES_EXPECTED},
        {"FCDP_HOST_BUDGET=16777216T", "FCDP_HOST_BUDGET=16777216T: " BYTES_EXPECTED},
        {"FCDP_PIN=1", "FCDP_PIN=1: expected auto, require or never"},
        {"FCDP_FINGERPRINT=on", "FCDP_FINGERPRINT=on: expected auto, device or never"},
        {"FCDP_ALLOC=torch", "FCDP_ALLOC=torch: expected fcdp or native"},
        {"FCDP_AGREE=always", "FCDP_AGREE=always: expected forward or unshard"},
        {"FCDP_PREFETCH=9", "FCDP_PREFETCH=9: expected a whole number from 0 to 8"},
        {"FCDP_CODEC_THREADS=65", "FCDP_CODEC_THREADS=65: expected a whole number from 0 to 64"},
        {"FCDP_CODEC_THREADS=-1", "FCDP_CODEC_THREADS=-1: expected a whole number from 0 to 64"},
        {"FCDP_TIMEOUT=0", "FCDP_TIMEOUT=0: expected a number from 0.1 to 86400"},
        {"FCDP_CHECK=4", "FCDP_CHECK=4: expected a whole number from 0 to 3"},
        {"FCDP_LOG=loud", "FCDP_LOG=loud: expected quiet, warn, info or debug"},
        {"FCDP_SUMMARY=yes", "FCDP_SUMMARY=yes: expected 0 or 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) assert_refused(cases[i][0], cases[i][1]);
}

static void an_unknown_name_gets_the_nearest(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"FCDP_TAUU=0.5", "FCDP_TAUU is not an option; did you mean FCDP_TAU?"},
        {"FCDP_TAUU=", "FCDP_TAUU is not an option; did you mean FCDP_TAU?"},
        {"FCDP_=1", "FCDP_ is not an option; did you mean FCDP?"},
        {"FCDP_HOSTBUDGET=1G", "FCDP_HOSTBUDGET is not an option; did you mean FCDP_HOST_BUDGET?"},
        {"FCDP_LOCALSIZE=2", "FCDP_LOCALSIZE is not an option; did you mean FCDP_LOCAL_SIZE?"},
        {"FCDP_FINGERPRINTS=1", "FCDP_FINGERPRINTS is not an option; did you mean FCDP_FINGERPRINT?"},
        {"FCDP_tau=1", "FCDP_tau is not an option; did you mean FCDP_TAU?"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) assert_refused(cases[i][0], cases[i][1]);
}

/* One edit away from a name, the name is what is suggested. */
/* FCDP_PLIN may be FCDP_PIN with a letter too many, or FCDP_PLAN with a wrong one. */
static bool is_a_letter_from_another(const char *variable, const fcdp_option_row *rows, size_t n_rows) {
    size_t n = strcspn(variable, "=");
    for (size_t row = 0; row < n_rows; row++) {
        size_t n_wrong = 0;
        if (strlen(rows[row].name) != n) continue;
        for (size_t i = 0; i < n; i++) n_wrong += rows[row].name[i] != variable[i];
        if (n_wrong == 1) return true;
    }
    return false;
}

static void one_slip_is_always_recognised(void **state) {
    (void)state;
    size_t n_rows;
    const fcdp_option_row *rows = fcdp_options_table(&n_rows);
    uint64_t rng = seed_choose(__func__);
    for (int round = 0; round < 2000; round++) {
        const char *name = rows[1 + random_below(&rng, n_rows - 1)].name;
        char variable[96];
        size_t n = strlen(name), at = 5 + random_below(&rng, n - 4);
        char letter = (char)('A' + random_below(&rng, 26));
        snprintf(variable, sizeof variable, "%.*s%c%s=1", (int)at, name, letter,
                 name + at); /* a letter too many */
        fcdp_options options;
        if (strncmp(variable, "FCDP_LAB_", 9) == 0) continue;
        if (is_a_letter_from_another(variable, rows, n_rows)) continue;
        assert_int_equal(load_one(variable, &options), FCDP_ERR_OPTION);
        char suggestion[96];
        snprintf(suggestion, sizeof suggestion, "did you mean %s?", name);
        assert_text(suggestion);
    }
}

static void numbers_round_trip(void **state) {
    (void)state;
    static const char units[] = "KMGT";
    uint64_t rng = seed_choose(__func__);
    for (int round = 0; round < 5000; round++) {
        char variable[96];
        fcdp_options options;
        double tau = (double)(random_next(&rng) >> 11) * 0x1p-53;
        snprintf(variable, sizeof variable, "FCDP_TAU=%.17g", tau);
        assert_ok(load_one(variable, &options));
        assert_true(options.tau == tau);

        size_t bytes = (size_t)random_next(&rng) >> random_below(&rng, 64);
        snprintf(variable, sizeof variable, "FCDP_HOST_BUDGET=%zu", bytes);
        assert_ok(load_one(variable, &options));
        assert_int_equal(options.host_budget_bytes, bytes);

        size_t unit = random_below(&rng, 4),
               number = (size_t)random_next(&rng) >> (10 * (unit + 1) + random_below(&rng, 20));
        snprintf(variable, sizeof variable, "FCDP_DEVICE_BUDGET=%zu%c", number,
                 units[unit] | (round % 2 ? 0x20 : 0));
        assert_ok(load_one(variable, &options));
        assert_int_equal(options.device_budget_bytes, number << (10 * (unit + 1)));

        int ranks = (int)random_below(&rng, 65537);
        snprintf(variable, sizeof variable, "FCDP_LOCAL_SIZE=%d", ranks);
        assert_ok(load_one(variable, &options));
        assert_int_equal(options.local_size, ranks);
    }
}

/* No bytes at all make the parser do anything but accept or refuse with a text. */
static void garbage_is_refused_with_a_text(void **state) {
    (void)state;
    static const char alphabet[] = "0123456789.eE+-xKMGTkmgt |=_,nainf\t\x80";
    size_t n_rows;
    const fcdp_option_row *rows = fcdp_options_table(&n_rows);
    uint64_t rng = seed_choose(__func__);
    for (int round = 0; round < 20000; round++) {
        char variable[128];
        const fcdp_option_row *row = &rows[random_below(&rng, n_rows)];
        size_t at = (size_t)snprintf(variable, sizeof variable, "%s=", row->name);
        for (size_t n = random_below(&rng, 12); n > 0; n--)
            variable[at++] = alphabet[random_below(&rng, sizeof alphabet - 1)];
        variable[at] = '\0';
        fcdp_options options;
        fcdp_status status = load_one(variable, &options);
        if (status) {
            assert_int_equal(status, FCDP_ERR_OPTION);
            assert_memory_equal(fcdp_error_text(), variable, at);
            continue;
        }
        assert_true(options.tau >= 0 && options.tau <= 1);
        assert_true(options.timeout_s >= 0.1 && options.timeout_s <= 86400);
        assert_in_range(options.check, 0, 3);
        assert_in_range(options.local_size, 0, 65536);
    }
}

/* Who sets it, to the default even, asks for its rule (FCDP_POLICY=auto). */
static void it_is_known_whether_tau_was_set(void **state) {
    (void)state;
    static char *const nothing[] = {"FCDP_TAU=", "FCDP_POLICY=auto", NULL};
    fcdp_options options;
    assert_ok(fcdp_options_load(nothing, &options));
    assert_false(options.tau_is_set);
    assert_ok(load_one("FCDP_TAU=0", &options));
    assert_true(options.tau_is_set);
}

static void a_locale_with_commas_changes_nothing(void **state) {
    (void)state;
    fcdp_options options;
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8") && !setlocale(LC_NUMERIC, "fr_FR.UTF-8")) {
        print_message("no locale with a decimal comma is installed\n");
        skip();
    }
    assert_ok(load_one("FCDP_TAU=0.5", &options));
    setlocale(LC_NUMERIC, "C");
    assert_true(options.tau == 0.5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_set_gives_the_defaults),
        cmocka_unit_test(it_is_known_whether_tau_was_set),
        cmocka_unit_test(an_empty_value_is_the_default),
        cmocka_unit_test(every_row_is_complete_and_its_default_is_allowed),
        cmocka_unit_test(values_reach_their_fields),
        cmocka_unit_test(every_choice_is_its_enums_constant),
        cmocka_unit_test(a_refusal_says_what_is_allowed),
        cmocka_unit_test(an_unknown_name_gets_the_nearest),
        cmocka_unit_test(one_slip_is_always_recognised),
        cmocka_unit_test(numbers_round_trip),
        cmocka_unit_test(garbage_is_refused_with_a_text),
        cmocka_unit_test(a_locale_with_commas_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
