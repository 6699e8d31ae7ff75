/* The simulated GPU's ABI is CUDA's: same names, layouts and values. Built where
 * a cuda.h of 12.2 or newer is found. */
#include <dlfcn.h>

#include "tests/simgpu/support.h"

#include "tests/simgpu/abi_values.h"

static const struct abi_value ours[] = ABI_VALUES;

static void layouts_and_values_are_cudas(void **state) {
    (void)state;
    size_t i = 0;
    for (; ours[i].what && abi_theirs[i].what; i++)
        if (ours[i].value != abi_theirs[i].value)
            fail_msg("%s is %lld, CUDA's %lld", ours[i].what, ours[i].value, abi_theirs[i].value);
    assert_true(!ours[i].what && !abi_theirs[i].what);
}

static void symbols_have_the_names_that_cuda_programs_look_up(void **state) {
    (void)state;
    size_t n = 0;
    for (; abi_their_names[n]; n++) assert_string_equal(abi_their_names[n], simgpu_entry_name((unsigned)n));
    assert_null(simgpu_entry_name((unsigned)n));
    for (n = 0; abi_their_names[n]; n++)
        if (!dlsym(RTLD_DEFAULT, abi_their_names[n])) fail_msg("%s is not exported", abi_their_names[n]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_and_values_are_cudas),
        cmocka_unit_test(symbols_have_the_names_that_cuda_programs_look_up),
    };
    return cmocka_run_group_tests_name("simgpu abi", tests, NULL, NULL);
}
