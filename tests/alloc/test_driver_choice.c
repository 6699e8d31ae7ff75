/* Which driver FCDP_DRIVER chooses. libcuda.so.1 is here a link to the simulated driver (the build sets
 * LD_LIBRARY_PATH), so that "CUDA" can answer, refuse or be gone on any machine. */
#include "tests/alloc/support.h"

static fcdp_driver *open_or_null(fcdp_driver_kind kind) {
    fcdp_driver *drv = NULL;
    fcdp_status status = fcdp__driver_open(kind, 0, NULL, &drv);
    assert_true(status == FCDP_OK || status == FCDP_ERR_UNSUPPORTED);
    return drv;
}

static void cuda_is_taken_where_a_device_answers(void **state) {
    (void)state;
    const fcdp_driver_kind kinds[] = {FCDP_DRIVER_CUDA, FCDP_DRIVER_AUTO};
    for (int i = 0; i < 2; i++) {
        fcdp_driver *drv = open_or_null(kinds[i]);
        assert_non_null(drv);
        assert_false(fcdp__driver_is_sim(drv));
        assert_null(fcdp__driver_sim_symbol(drv, "simgpu_live")); /* though this library has it */
        fcdp__driver_annotate(drv, "nothing hears this");
        fcdp__driver_close(drv);
    }
}

static void auto_falls_back_to_the_simulated_driver(void **state) {
    (void)state;
    assert_int_equal(simgpu_fail_nth("cuInit", 1, CUDA_NO_DEVICE), 0);
    fcdp_driver *drv = open_or_null(FCDP_DRIVER_AUTO);
    assert_non_null(drv);
    assert_true(fcdp__driver_is_sim(drv));
    fcdp__driver_close(drv);
}

static void auto_does_not_hide_a_device_that_is_there(void **state) {
    (void)state;
    fcdp_driver *drv = NULL;
    assert_int_equal(simgpu_fail_nth("cuDevicePrimaryCtxRetain", 1, CUDA_OUT_OF_MEMORY), 0);
    assert_true(fcdp__driver_open(FCDP_DRIVER_AUTO, 0, NULL, &drv) < 0);
    assert_text("cuDevicePrimaryCtxRetain");
    assert_null(drv);
}

static void cuda_without_a_device_says_what_to_do(void **state) {
    (void)state;
    assert_int_equal(simgpu_fail_nth("cuInit", 1, CUDA_NO_DEVICE), 0);
    assert_null(open_or_null(FCDP_DRIVER_CUDA));
    assert_string_equal(fcdp_error_text(),
                        "FCDP_DRIVER=cuda, but no CUDA device answers (cuInit: CUDA_ERROR_NO_DEVICE); use "
                        "FCDP_DRIVER=auto, or sim to run without a GPU");
}

static void auto_with_neither_names_both(void **state) {
    (void)state;
    char *named = strdup(getenv("FCDP_SIM_LIBRARY"));
    unsetenv("FCDP_SIM_LIBRARY");
    assert_int_equal(simgpu_fail_nth("cuInit", 1, CUDA_NO_DEVICE), 0);
    assert_null(open_or_null(FCDP_DRIVER_AUTO));
    assert_string_equal(fcdp_error_text(),
                        "FCDP_DRIVER=auto, but no CUDA device answers (cuInit: CUDA_ERROR_NO_DEVICE), and no "
                        "simulated driver is known: set FCDP_SIM_LIBRARY to the path of libfcdp_simgpu.so");
    setenv("FCDP_SIM_LIBRARY", named, 1);
    free(named);
}

static int reset(void **state) {
    (void)state;
    simgpu_reset();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(cuda_is_taken_where_a_device_answers, reset),
        cmocka_unit_test_setup(auto_falls_back_to_the_simulated_driver, reset),
        cmocka_unit_test_setup(auto_does_not_hide_a_device_that_is_there, reset),
        cmocka_unit_test_setup(cuda_without_a_device_says_what_to_do, reset),
        cmocka_unit_test_setup(auto_with_neither_names_both, reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
