/* The kernel's own word on where a mapping's pages come from. */
#include "tests/alloc/support.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiering/host_internal.h"

enum { MAX_NODES = 1024, WORDS = MAX_NODES / (8 * sizeof(unsigned long)) };

static void *pages_map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(at != MAP_FAILED);
    return at;
}

static void test_kernel_prefers_the_node_that_was_asked_for(void **state) {
    (void)state;
    size_t bytes = 4 * (size_t)sysconf(_SC_PAGESIZE);
    char *at = pages_map(2 * bytes);
    int mode = -1;
    unsigned long mask[WORDS] = {0};
    if (!fcdp__numa_prefer(at, bytes, 0)) skip(); /* EPERM in some containers, ENOSYS without CONFIG_NUMA */
    assert_int_equal(syscall(SYS_get_mempolicy, &mode, mask, (unsigned long)MAX_NODES + 1, at, MPOL_F_ADDR),
                     0);
    assert_int_equal(mode, MPOL_PREFERRED);
    assert_int_equal(mask[0], 1);
    for (size_t i = 1; i < WORDS; i++) assert_int_equal(mask[i], 0);
    assert_int_equal(syscall(SYS_get_mempolicy, &mode, NULL, 0UL, at + bytes, MPOL_F_ADDR), 0);
    assert_int_equal(mode, MPOL_DEFAULT); /* beyond what was asked for */
    munmap(at, 2 * bytes);
}

static void test_nodes_that_cannot_be_are_refused(void **state) {
    (void)state;
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *at = pages_map(bytes);
    assert_false(fcdp__numa_prefer(at, bytes, -1));
    /* the kernel's refusal: no machine here has it */
    assert_false(fcdp__numa_prefer(at, bytes, MAX_NODES - 1));
    assert_false(fcdp__numa_prefer(at, bytes, MAX_NODES)); /* ours */
    munmap(at, bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kernel_prefers_the_node_that_was_asked_for),
        cmocka_unit_test(test_nodes_that_cannot_be_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
