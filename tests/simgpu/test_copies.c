/* Copies: pinned and pageable host memory, foreign device memory, the
 * link's rate; registration of host memory. */
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/simgpu/support.h"

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void bytes_go_there_and_back(void **state) {
    (void)state;
    struct pages pages = pages_make(3);
    unsigned char *out = host_make(2 * PAGE, true), *back = host_make(2 * PAGE, true);
    for (size_t i = 0; i < 2 * PAGE; i++) out[i] = (unsigned char)(i * 2654435761u >> 13);
    OK(cuMemcpyHtoDAsync_v2(pages.at + 100, out, 2 * PAGE - 7, NULL));
    OK(cuMemcpyDtoDAsync_v2(pages.at + PAGE + 300, pages.at + 100, PAGE, NULL));
    OK(cuMemsetD8Async(pages.at + PAGE + 300, 0xEE, 10, NULL));
    OK(cuMemcpyDtoHAsync_v2(back, pages.at + PAGE + 300, PAGE, NULL));
    OK(cuMemcpyAsync(pages.at + 5, (uintptr_t)(out + 50), 3, NULL));
    OK(cuStreamSynchronize(NULL));
    assert_memory_equal(bytes_at(pages.at) + 5, out + 50, 3);
    memset(out, 0xEE, 10);
    assert_memory_equal(back, out, PAGE);
    host_destroy(out, 2 * PAGE);
    host_destroy(back, 2 * PAGE);
}

/* Large ones are written past the caches, where their places allow it. */
static void large_copies_of_any_length_and_place_are_whole(void **state) {
    (void)state;
    static const size_t lengths[] = {(32 << 10) - 1, 32 << 10, (32 << 10) + 1, (1 << 20) + 63,
                                     (1 << 20) + 64};
    static const size_t from[] = {0, 1, 64}, to[] = {0, 16, 48, 5};
    struct pages pages = pages_make(3);
    unsigned char *out = host_make(PAGE, true), *expected = host_make(PAGE, false);
    for (size_t i = 0; i < PAGE; i++) out[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t c = 0; c < 5 * 3 * 4; c++) {
        size_t bytes = lengths[c % 5], src = from[c / 5 % 3], dst = to[c / 15];
        memset(expected, 0xEE, PAGE);
        memcpy(expected + dst, out + src, bytes);
        OK(cuMemsetD8Async(pages.at, 0xEE, PAGE, NULL));
        OK(cuMemcpyHtoDAsync_v2(pages.at + dst, out + src, bytes, NULL));
        OK(cuStreamSynchronize(NULL));
        assert_memory_equal(bytes_at(pages.at), expected, PAGE);
    }
    host_destroy(out, PAGE);
    host_destroy(expected, PAGE);
}

static CUDA_MEMCPY2D rows_of(CUdeviceptr dst, size_t dst_pitch, CUdeviceptr src, size_t src_pitch) {
    return (CUDA_MEMCPY2D){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                           .srcDevice = src,
                           .srcPitch = src_pitch,
                           .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                           .dstDevice = dst,
                           .dstPitch = dst_pitch,
                           .WidthInBytes = 10,
                           .Height = 5};
}

static void rows_go_to_rows(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    memset(bytes_at(pages.at), 7, 2 * PAGE);
    for (size_t i = 0; i < 50; i++) bytes_at(pages.at)[i] = (unsigned char)(100 + i);
    CUDA_MEMCPY2D copy = rows_of(pages.at + PAGE, 33, pages.at, 10);
    OK(cuMemcpy2DAsync_v2(&copy, NULL));
    OK(cuStreamSynchronize(NULL));
    for (size_t i = 0; i < 5 * 33; i++)
        assert_int_equal(bytes_at(pages.at)[PAGE + i], i % 33 < 10 ? 100 + i / 33 * 10 + i % 33 : 7);
    copy = rows_of(pages.at + PAGE, 9, pages.at, 10);
    REFUSED(cuMemcpy2DAsync_v2(&copy, NULL), CUDA_ERROR_INVALID_VALUE);
    copy = rows_of(pages.at + PAGE, 10, pages.at, (size_t)1 << 31);
    REFUSED(cuMemcpy2DAsync_v2(&copy, NULL), CUDA_ERROR_INVALID_VALUE);
}

/* A gate holds the stream: a call that waited for its copy could not come back. */
static void registered_memory_is_copied_asynchronously(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char *host = host_make(PAGE, true);
    struct gate gate;
    host[0] = 1;
    gate_close(&gate, NULL);
    OK(cuMemcpyHtoDAsync_v2(pages.at, host, PAGE, NULL));
    OK(cuMemcpyDtoHAsync_v2(host, pages.at, PAGE, NULL));
    REFUSED(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    host[0] = 2; /* the copy is not done: it will take this */
    gate_open(&gate);
    OK(cuStreamSynchronize(NULL));
    assert_int_equal(bytes_at(pages.at)[0], 2);
    OK(cuMemHostUnregister(host));
    host_destroy(host, PAGE);
}

static void unregistered_memory_makes_the_call_wait(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char host[64] = "there", back[64] = {0};
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemcpyHtoDAsync_v2(pages.at, host, sizeof host, stream));
    OK(cuStreamQuery(stream));
    memset(host, 0, sizeof host);
    OK(cuMemcpyDtoHAsync_v2(back, pages.at, sizeof back, stream));
    assert_string_equal((char *)back, "there");
}

static void what_may_be_a_copys_device_side(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char *pinned = host_make(2 * 4096, false), foreign[64] = "foreign", other[64] = {0};
    OK(cuMemHostRegister_v2(pinned, 4096, 0));
    /* foreign device memory, both */
    OK(cuMemcpyDtoDAsync_v2((uintptr_t)other, (uintptr_t)foreign, 64, NULL));
    OK(cuMemcpyDtoDAsync_v2(pages.at, (uintptr_t)foreign, 64, NULL));
    OK(cuStreamSynchronize(NULL));
    assert_string_equal((char *)other, "foreign");
    assert_string_equal((char *)bytes_at(pages.at), "foreign");
    REFUSED(cuMemcpyDtoDAsync_v2(pages.at, (uintptr_t)pinned, 64, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemcpyDtoDAsync_v2((uintptr_t)pinned, pages.at, 64, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemcpyHtoDAsync_v2((uintptr_t)pinned, foreign, 64, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemcpyHtoDAsync_v2(pages.at, (void *)(uintptr_t)pages.at, 64, NULL), CUDA_ERROR_INVALID_VALUE);
    /* half pinned */
    REFUSED(cuMemcpyHtoDAsync_v2(pages.at, pinned + 4090, 64, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemcpyHtoDAsync_v2(0, pinned, 64, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemcpyHtoDAsync_v2(pages.at, pinned, 64, (CUstream)0x1234), CUDA_ERROR_INVALID_HANDLE);
    OK(cuMemHostRegister_v2(pinned + 4096, 4096, 0)); /* two registrations are not one */
    REFUSED(cuMemcpyHtoDAsync_v2(pages.at, pinned + 4090, 64, NULL), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemcpyHtoDAsync_v2(pages.at, pinned, 0, NULL));
    simgpu_reset();
    host_destroy(pinned, 2 * 4096);
}

/* The copies of one direction add up, those of the other run beside them;
 * waiting time is the link's, not the CPU's. */
static double seconds_for(CUdeviceptr device, unsigned char *host, size_t bytes) {
    CUstream up, also_up, down;
    OK(cuStreamCreate(&up, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&also_up, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&down, CU_STREAM_NON_BLOCKING));
    double begin = seconds_now();
    OK(cuMemcpyHtoDAsync_v2(device, host, bytes / 2, up));
    OK(cuMemcpyDtoHAsync_v2(host + bytes, device + bytes, bytes / 2, down));
    OK(cuMemcpyHtoDAsync_v2(device + bytes / 2, host + bytes / 2, bytes / 2, also_up));
    OK(cuCtxSynchronize());
    double seconds = seconds_now() - begin;
    OK(cuStreamDestroy_v2(up));
    OK(cuStreamDestroy_v2(also_up));
    OK(cuStreamDestroy_v2(down));
    return seconds;
}

static void the_link_keeps_its_rate(void **state) {
    (void)state;
    const size_t bytes = 8 * PAGE;
    struct pages pages = pages_make(16);
    unsigned char *host = host_make(2 * bytes, true);
    memset(bytes_at(pages.at), 1, 2 * bytes);
    memset(host, 1, 2 * bytes);
    simgpu_set_pcie(0.03); /* so slow that a busy machine's scheduling is small against it */
    double expected = (double)bytes / 0.03e9, best = 1e9;
    for (int attempt = 0; attempt < 5 && best > 1.2 * expected; attempt++) {
        double seconds = seconds_for(pages.at, host, bytes);
        assert_true(seconds >= 0.99 * expected);
        if (seconds < best) best = seconds;
    }
    print_message("16.8 MB up and 8.4 MB down at 0.03 GB/s: %.3f s, expected %.3f s\n", best, expected);
    assert_true(best <= 1.2 * expected);
    OK(cuMemHostUnregister(host));
    host_destroy(host, 2 * bytes);
}

static void copies_within_the_device_do_not_use_the_link(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    simgpu_set_pcie(0.0001); /* the page would take 20 s */
    double begin = seconds_now();
    OK(cuMemcpyDtoDAsync_v2(pages.at, pages.at + PAGE, PAGE, NULL));
    OK(cuMemsetD8Async(pages.at, 3, PAGE, NULL));
    OK(cuStreamSynchronize(NULL));
    assert_true(seconds_now() - begin < 10);
}

static void registration_wants_whole_pages_once(void **state) {
    (void)state;
    unsigned char *host = host_make(4 * 4096, false);
    struct pages pages = pages_make(1);
    REFUSED(cuMemHostRegister_v2(host + 8, 4096, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostRegister_v2(host, 100, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostRegister_v2(host, 0, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostRegister_v2(NULL, 4096, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostRegister_v2(bytes_at(pages.at), 4096, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostRegister_v2(host, 4096, CU_MEMHOSTREGISTER_IOMEMORY), CUDA_ERROR_NOT_SUPPORTED);
    OK(cuMemHostRegister_v2(host + 4096, 2 * 4096,
                            CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    REFUSED(cuMemHostRegister_v2(host + 4096, 2 * 4096, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    REFUSED(cuMemHostRegister_v2(host, 2 * 4096, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    REFUSED(cuMemHostRegister_v2(host, 4 * 4096, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    OK(cuMemHostRegister_v2(host, 4096, 0));
    REFUSED(cuMemHostUnregister(host + 2 * 4096), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    CUdeviceptr at = 0;
    OK(cuMemHostGetDevicePointer_v2(&at, host + 4096 + 12, 0));
    assert_int_equal(at, (uintptr_t)host + 4096 + 12);
    REFUSED(cuMemHostGetDevicePointer_v2(&at, host + 4096, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostGetDevicePointer_v2(&at, host, 0), CUDA_ERROR_INVALID_VALUE); /* not registered for it */
    OK(cuMemHostUnregister(host + 4096));
    REFUSED(cuMemHostGetDevicePointer_v2(&at, host + 4096, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostUnregister(host + 4096), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    assert_int_equal(live_now().registrations, 1);
    OK(cuMemHostUnregister(host));
    munmap(host + 4096, 4096);
    REFUSED(cuMemHostRegister_v2(host, 4 * 4096, 0), CUDA_ERROR_INVALID_VALUE); /* a hole */
    host_destroy(host, 4 * 4096);
}

static void fact_8_one_registration_stays_below_512_gib(void **state) {
    (void)state;
    REFUSED(cuMemHostRegister_v2((void *)(uintptr_t)0x100000000, (size_t)512 << 30, 0),
            CUDA_ERROR_INVALID_VALUE);
}

static long locked_kib(void) {
    char line[256];
    long kib = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, file))
        if (strncmp(line, "VmLck:", 6) == 0) kib = strtol(line + 6, NULL, 10);
    fclose(file);
    return kib;
}

static void registered_memory_is_locked(void **state) {
    (void)state;
    long before = locked_kib();
    void *host = host_make(256 * 1024, true);
    assert_int_equal(locked_kib(), before + 256);
    OK(cuMemHostUnregister(host));
    assert_int_equal(locked_kib(), before);
    host_destroy(host, 256 * 1024);
}

/* In a child, since a right given up does not come back. 0 when the limit was honoured. */
static int register_beyond_the_limit(void) {
    struct rlimit limit = {64 * 1024, 64 * 1024};
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data) != 0) return 1;
    data[0].effective &= ~(1u << CAP_IPC_LOCK);
    if (syscall(SYS_capset, &header, data) != 0 || setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 2;
    CUcontext context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 3;
    unsigned char *host = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (cuMemHostRegister_v2(host, PAGE, 0) != CUDA_ERROR_OPERATING_SYSTEM) return 4;
    if (live_now().registrations != 0 || locked_kib() != 0) return 5;
    return cuMemHostRegister_v2(host, 32 * 1024, 0) == CUDA_SUCCESS ? 0 : 6;
}

static void registration_beyond_the_memlock_limit_is_an_os_error(void **state) {
    (void)state;
    simgpu_reset();
    pid_t child = fork();
    if (child == 0) _exit(register_beyond_the_limit());
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void unregistering_waits_for_the_copies_that_use_the_memory(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char *host = host_make(PAGE, true);
    host[7] = 7;
    OK(cuMemcpyHtoDAsync_v2(pages.at, host, PAGE, NULL));
    OK(cuMemHostUnregister(host));
    host_destroy(host, PAGE); /* a copy that was still to come would fault */
    OK(cuStreamSynchronize(NULL));
    assert_int_equal(bytes_at(pages.at)[7], 7);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(bytes_go_there_and_back),
        test(large_copies_of_any_length_and_place_are_whole),
        test(rows_go_to_rows),
        test(registered_memory_is_copied_asynchronously),
        test(unregistered_memory_makes_the_call_wait),
        test(what_may_be_a_copys_device_side),
        test(the_link_keeps_its_rate),
        test(copies_within_the_device_do_not_use_the_link),
        test(registration_wants_whole_pages_once),
        test(fact_8_one_registration_stays_below_512_gib),
        test(registered_memory_is_locked),
        test(registration_beyond_the_memlock_limit_is_an_os_error),
        test(unregistering_waits_for_the_copies_that_use_the_memory),
    };
    return cmocka_run_group_tests_name("simgpu copies", tests, NULL, NULL);
}
