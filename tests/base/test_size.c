/* Sizes: every way to write one, what is refused, and that what is printed can be written back. */
#include "base/size.h"
#include "tests/alloc/support.h"

static void a_size_may_be_written_as_people_do(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
    } cases[] = {
        {"0", 0},
        {"4096", 4096},
        {"4096B", 4096},
        {"1K", 1024},
        {"1KiB", 1024},
        {"1KB", 1000},
        {"512M", 512ull << 20},
        {"512m", 512ull << 20},
        {"512MiB", 512ull << 20},
        {"512Mi", 512ull << 20},
        {"512MB", 512000000},
        {"512mb", 512000000},
        {"8G", 8ull << 30},
        {"8GiB", 8ull << 30},
        {"8GB", 8000000000},
        {"8 GB", 8000000000},
        {"2T", 2ull << 40},
        {"2TB", 2000000000000},
        {"1.5G", 3ull << 29},
        {"1.5GB", 1500000000},
        {"0.5k", 512},
        {"1.0001K", 1024},
        {"0.000000000000000000001T", 0},
        {"1.999999999999999999999999KB", 1999},
        {"18446744073709551615", SIZE_MAX},
        {"16777215.999T", (size_t)(16777215.0 * 0x1p40) + (size_t)(0.999L * 0x1p40L)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t bytes = 1;
        if (!fcdp__size_parse(cases[i].text, &bytes)) fail_msg("%s was refused", cases[i].text);
        if (bytes != cases[i].bytes) fail_msg("%s gave %zu, not %zu", cases[i].text, bytes, cases[i].bytes);
    }
}

static void what_is_no_size_is_refused(void **state) {
    (void)state;
    static const char *const cases[] = {
        "",
        " ",
        "G",
        "GB",
        "-1",
        "+1",
        " 1",
        "1 ",
        "1  G",
        "1.",
        ".5G",
        "1.G",
        "1.5",
        "1.5B",
        "8X",
        "8GG",
        "8GiBB",
        "8iB",
        "8Gb/s",
        "8bit",
        "8Gbit",
        "0x10",
        "1e9",
        "1,5G",
        "8G B",
        "8KIX",
        "18446744073709551616",
        "16777216T",
        "18446744073709551615K",
        "nan",
        "inf",
        "\x80G",
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t bytes = 7;
        if (fcdp__size_parse(cases[i], &bytes)) fail_msg("%s gave %zu", cases[i], bytes);
        assert_int_equal(bytes, 7);
    }
}

static void a_size_is_printed_in_powers_of_1000(void **state) {
    (void)state;
    static const struct {
        size_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"},
        {999, "999 B"},
        {1000, "1 KB"},
        {2 << 20, "2.1 MB"},
        {999499, "999 KB"},
        {999500, "1 MB"},
        {8ull << 30, "8.59 GB"},
        {SIZE_MAX, "18.4 EB"},
        {12600000, "12.6 MB"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_string_equal(fcdp__size_text(cases[i].bytes).s, cases[i].text);
}

/* To half of the last of its three digits. */
static void what_is_printed_can_be_written_back(void **state) {
    (void)state;
    uint64_t rng = seed_choose(__func__);
    for (int round = 0; round < 20000; round++) {
        size_t bytes = (size_t)random_next(&rng) >> (15 + random_below(&rng, 49)), read; /* up to 562 TB */
        fcdp_size_text text = fcdp__size_text(bytes);
        if (!fcdp__size_parse(text.s, &read)) fail_msg("%s, of %zu, was refused", text.s, bytes);
        size_t off = read > bytes ? read - bytes : bytes - read;
        if (off > bytes / 199 + 1) fail_msg("%zu was printed as %s, which is %zu", bytes, text.s, read);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_size_may_be_written_as_people_do),
        cmocka_unit_test(what_is_no_size_is_refused),
        cmocka_unit_test(a_size_is_printed_in_powers_of_1000),
        cmocka_unit_test(what_is_printed_can_be_written_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
