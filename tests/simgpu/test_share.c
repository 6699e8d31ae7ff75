/* Handles that travel between processes, and what a forked child may do. The
 * program starts itself anew as importer. */
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/simgpu/support.h"

#define PASSED_FD 10
#define PEER_FLAG "--import"
#define STAMP 0x5B
extern char **environ;

/* The importer: reads what the exporter wrote, answers in the page's last
 * word, leaves. 0, or the failing step. */
static int import_and_answer(void) {
    CUcontext context;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    if (cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)PASSED_FD,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return 2;
    close(PASSED_FD); /* the handle keeps the memory */
    if (cuMemAddressReserve(&at, 2 * PAGE, 0, 0, 0) || cuMemMap(at, 2 * PAGE, 0, handle, 0)) return 3;
    if (cuMemSetAccess(at, 2 * PAGE, &read_write, 1)) return 4;
    if (live_now().device_bytes != 0) return 5; /* the memory is another device's */
    if (strcmp((char *)bytes_at(at), "from the exporter")) return 6;
    strcpy((char *)bytes_at(at + PAGE), "from the importer");
    simgpu_reset();
    return 0;
}

static int run_importer(const char *program, int fd) {
    char *arguments[] = {(char *)program, PEER_FLAG, NULL};
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, PASSED_FD);
    assert_int_equal(posix_spawn(&child, "/proc/self/exe", &actions, NULL, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void an_exported_handle_is_the_same_memory_in_another_process(void **state) {
    (void)state;
    CUmemGenericAllocationHandle handle;
    int fd = -1;
    CUdeviceptr at = range_make(2 * PAGE);
    OK(cuMemCreate(&handle, 2 * PAGE, &exportable_memory, 0));
    OK(cuMemMap(at, 2 * PAGE, 0, handle, 0));
    OK(cuMemSetAccess(at, 2 * PAGE, &read_write, 1));
    strcpy((char *)bytes_at(at), "from the exporter");
    OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    assert_int_equal(run_importer("importer", fd), 0);
    close(fd);
    assert_string_equal((char *)bytes_at(at + PAGE), "from the importer");
}

static void only_handles_made_for_it_are_exported(void **state) {
    (void)state;
    CUmemGenericAllocationHandle plain = handle_make(PAGE), exportable;
    int fd = -1;
    OK(cuMemCreate(&exportable, PAGE, &exportable_memory, 0));
    REFUSED(cuMemExportToShareableHandle(&fd, plain, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemExportToShareableHandle(&fd, exportable, CU_MEM_HANDLE_TYPE_FABRIC, 0),
            CUDA_ERROR_NOT_SUPPORTED);
    REFUSED(cuMemExportToShareableHandle(&fd, exportable, CU_MEM_HANDLE_TYPE_NONE, 0),
            CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemExportToShareableHandle(&fd, exportable + 1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(fd, -1);
}

static void only_exported_descriptors_are_imported(void **state) {
    (void)state;
    CUmemGenericAllocationHandle handle;
    int other = memfd_create("other", MFD_CLOEXEC);
    assert_int_equal(ftruncate(other, PAGE), 0);
    const int wrong[] = {-1, 1000, other};
    for (size_t i = 0; i < 3; i++)
        REFUSED(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)wrong[i],
                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                CUDA_ERROR_INVALID_VALUE);
    close(other);
}

static void importing_ones_own_export_counts_the_memory_once(void **state) {
    (void)state;
    CUmemGenericAllocationHandle handle, imported;
    int fd;
    OK(cuMemCreate(&handle, PAGE, &exportable_memory, 0));
    OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    assert_int_equal(live_now().handles, 2);
    assert_int_equal(live_now().device_bytes, PAGE);
    OK(cuMemRelease(handle));
    assert_int_equal(live_now().device_bytes, PAGE); /* the import keeps it */
    OK(cuMemRelease(imported));
    assert_int_equal(live_now().device_bytes, 0);
}

static int exit_code_of(pid_t child) {
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int what_a_forked_child_gets(CUdeviceptr at) {
    int count;
    CUmemGenericAllocationHandle handle;
    if (cuInit(0) != CUDA_ERROR_NOT_INITIALIZED) return 1;
    if (cuDeviceGetCount(&count) != CUDA_ERROR_NOT_INITIALIZED) return 2;
    if (cuMemCreate(&handle, PAGE, &device_memory, 0) != CUDA_ERROR_NOT_INITIALIZED) return 3;
    if (cuCtxSynchronize() != CUDA_ERROR_NOT_INITIALIZED) return 4;
    /* gone; something of the child's own may lie there */
    if (can_read(at) && *bytes_at(at) == STAMP) return 5;
    simgpu_reset(); /* nothing of the parent's is touched */
    if (cuInit(0) != CUDA_ERROR_NOT_INITIALIZED) return 6;
    uint32_t word = 0;
    simgpu_word_store(&word, 1);
    if (word) return 8;
    return live_now().handles == 0 ? 0 : 7;
}

static void a_forked_child_has_no_device(void **state) {
    (void)state;
    if (getenv("TEST_EMULATED")) skip(); /* qemu-user ignores MADV_DONTFORK */
    struct pages pages = pages_make(1);
    *bytes_at(pages.at) = STAMP;
    pid_t child = fork();
    if (child == 0) _exit(what_a_forked_child_gets(pages.at));
    assert_int_equal(exit_code_of(child), 0);
    assert_true(can_write(pages.at));
    pages_destroy(&pages);
}

static void a_child_forked_before_cuinit_has_its_own(void **state) {
    (void)state;
    simgpu_reset();
    pid_t child = fork();
    if (child == 0) {
        fresh_device(NULL);
        _exit(live_now().handles == 0 && handle_make(PAGE) != 0 ? 0 : 1);
    }
    assert_int_equal(exit_code_of(child), 0);
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], PEER_FLAG) == 0) return import_and_answer();
    const struct CMUnitTest tests[] = {
        test(an_exported_handle_is_the_same_memory_in_another_process),
        test(only_handles_made_for_it_are_exported),
        test(only_exported_descriptors_are_imported),
        test(importing_ones_own_export_counts_the_memory_once),
        test(a_forked_child_has_no_device),
        test(a_child_forked_before_cuinit_has_its_own),
    };
    return cmocka_run_group_tests_name("simgpu share", tests, NULL, NULL);
}
