/* Contexts, names, settings, counts, and the n-th call that fails, for every entry point. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/simgpu/support.h"

/* ---- every entry point, called so that it succeeds ---- */

static struct world {
    struct pages pages; /* two mapped pages, of which calls remap the second */
    CUdeviceptr empty;
    CUmemGenericAllocationHandle spare, exportable;
    CUstream stream;
    CUevent event;
    CUmodule module;
    CUfunction function;
    void *host, *unregistered; /* a page each */
    int fd;
    CUcontext context;
} world;

static void do_nothing(void *argument) {
    (void)argument;
}

/* Each makes the call that is its name; the next of the list undoes nothing, so calls
 * that consume use what only they use. */
#define CALL(entry, call)                                                                                    \
    static CUresult call_##entry(void) {                                                                     \
        return call;                                                                                         \
    }
static int an_int;
static size_t a_size, b_size;
static const char *a_text;
static char a_name[64];
static CUstream a_stream;
static CUevent an_event;
static float some_time;
static CUdeviceptr an_address;
static CUmemGenericAllocationHandle a_handle;
static unsigned long long some_flags;
static CUstreamCaptureStatus some_status;
static CUstreamCaptureMode some_mode;
static CUmodule a_module;
static CUfunction a_function;
static const char image[] = ".version 6.4 .visible .entry a_kernel()";

static CUDA_MEMCPY2D a_copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .dstMemoryType = CU_MEMORYTYPE_DEVICE};

CALL(cuInit, cuInit(0))
CALL(cuDriverGetVersion, cuDriverGetVersion(&an_int))
CALL(cuGetErrorName, cuGetErrorName(CUDA_SUCCESS, &a_text))
CALL(cuGetErrorString, cuGetErrorString(CUDA_SUCCESS, &a_text))
CALL(cuDeviceGetCount, cuDeviceGetCount(&an_int))
CALL(cuDeviceGet, cuDeviceGet(&an_int, 0))
CALL(cuDeviceGetName, cuDeviceGetName(a_name, sizeof a_name, 0))
CALL(cuDeviceGetAttribute, cuDeviceGetAttribute(&an_int, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0))
CALL(cuDeviceTotalMem_v2, cuDeviceTotalMem_v2(&a_size, 0))
CALL(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain(&world.context, 0))
CALL(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease_v2(0))
CALL(cuCtxSetCurrent, cuCtxSetCurrent(world.context))
CALL(cuCtxGetCurrent, cuCtxGetCurrent(&world.context))
CALL(cuCtxSynchronize, cuCtxSynchronize())
CALL(cuMemGetInfo_v2, cuMemGetInfo_v2(&a_size, &b_size))
CALL(cuMemGetAllocationGranularity,
     cuMemGetAllocationGranularity(&a_size, &device_memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM))
CALL(cuMemCreate, cuMemCreate(&a_handle, PAGE, &device_memory, 0))
CALL(cuMemRelease, cuMemRelease(world.spare))
CALL(cuMemExportToShareableHandle,
     cuMemExportToShareableHandle(&an_int, world.exportable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
CALL(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle(&a_handle, (void *)(intptr_t)world.fd,
                                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
CALL(cuMemAddressReserve, cuMemAddressReserve(&an_address, PAGE, 0, 0, 0))
CALL(cuMemAddressFree, cuMemAddressFree(world.empty, PAGE))
CALL(cuMemMap, cuMemMap(world.empty, PAGE, 0, world.spare, 0))
CALL(cuMemUnmap, cuMemUnmap(world.pages.at + PAGE, PAGE))
CALL(cuMemSetAccess, cuMemSetAccess(world.pages.at, PAGE, &read_only, 1))
CALL(cuMemGetAccess, cuMemGetAccess(&some_flags, &on_device, world.pages.at))
CALL(cuStreamCreate, cuStreamCreate(&a_stream, CU_STREAM_NON_BLOCKING))
CALL(cuStreamCreateWithPriority, cuStreamCreateWithPriority(&a_stream, CU_STREAM_NON_BLOCKING, -1))
CALL(cuStreamDestroy_v2, cuStreamDestroy_v2(world.stream))
CALL(cuStreamSynchronize, cuStreamSynchronize(world.stream))
CALL(cuStreamQuery, cuStreamQuery(world.stream))
CALL(cuStreamIsCapturing, cuStreamIsCapturing(world.stream, &some_status))
CALL(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode(&some_mode))
CALL(cuStreamWaitEvent, cuStreamWaitEvent(world.stream, world.event, 0))
CALL(cuStreamWaitValue32_v2,
     cuStreamWaitValue32_v2(world.stream, world.pages.at, 0, CU_STREAM_WAIT_VALUE_GEQ))
CALL(cuStreamWriteValue32_v2, cuStreamWriteValue32_v2(world.stream, world.pages.at, 0, 0))
CALL(cuLaunchHostFunc, cuLaunchHostFunc(world.stream, do_nothing, NULL))
CALL(cuEventCreate, cuEventCreate(&an_event, CU_EVENT_DEFAULT))
CALL(cuEventDestroy_v2, cuEventDestroy_v2(world.event))
CALL(cuEventRecord, cuEventRecord(world.event, world.stream))
CALL(cuEventQuery, cuEventQuery(world.event))
CALL(cuEventSynchronize, cuEventSynchronize(world.event))
CALL(cuEventElapsedTime_v2, cuEventElapsedTime_v2(&some_time, world.event, world.event))
CALL(cuMemcpyAsync, cuMemcpyAsync(world.pages.at, world.pages.at + PAGE, 64, world.stream))
CALL(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2(world.pages.at, world.host, 64, world.stream))
CALL(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2(world.host, world.pages.at, 64, world.stream))
CALL(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2(world.pages.at, world.pages.at + PAGE, 64, world.stream))
CALL(cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2(&a_copy, world.stream))
CALL(cuMemsetD8Async, cuMemsetD8Async(world.pages.at, 0, 64, world.stream))
CALL(cuMemHostRegister_v2, cuMemHostRegister_v2(world.unregistered, 4096, 0))
CALL(cuMemHostUnregister, cuMemHostUnregister(world.host))
CALL(cuMemHostGetDevicePointer_v2, cuMemHostGetDevicePointer_v2(&an_address, world.host, 0))
CALL(cuModuleLoadData, cuModuleLoadData(&a_module, image))
CALL(cuModuleUnload, cuModuleUnload(world.module))
CALL(cuModuleGetFunction, cuModuleGetFunction(&a_function, world.module, "a_kernel"))
CALL(cuLaunchKernel,
     cuLaunchKernel(world.function, 1, 1, 1, 32, 1, 1, 0, world.stream, (void *[]){&world.host}, NULL))

#define ROW(entry) {#entry, call_##entry}
static const struct {
    const char *name;
    CUresult (*call)(void);
} calls[] = {
    ROW(cuInit),
    ROW(cuDriverGetVersion),
    ROW(cuGetErrorName),
    ROW(cuGetErrorString),
    ROW(cuDeviceGetCount),
    ROW(cuDeviceGet),
    ROW(cuDeviceGetName),
    ROW(cuDeviceGetAttribute),
    ROW(cuDeviceTotalMem_v2),
    ROW(cuDevicePrimaryCtxRetain),
    ROW(cuDevicePrimaryCtxRelease_v2),
    ROW(cuCtxSetCurrent),
    ROW(cuCtxGetCurrent),
    ROW(cuCtxSynchronize),
    ROW(cuMemGetInfo_v2),
    ROW(cuMemGetAllocationGranularity),
    ROW(cuMemCreate),
    ROW(cuMemRelease),
    ROW(cuMemExportToShareableHandle),
    ROW(cuMemImportFromShareableHandle),
    ROW(cuMemAddressReserve),
    ROW(cuMemAddressFree),
    ROW(cuMemMap),
    ROW(cuMemUnmap),
    ROW(cuMemSetAccess),
    ROW(cuMemGetAccess),
    ROW(cuStreamCreate),
    ROW(cuStreamCreateWithPriority),
    ROW(cuStreamDestroy_v2),
    ROW(cuStreamSynchronize),
    ROW(cuStreamQuery),
    ROW(cuStreamIsCapturing),
    ROW(cuThreadExchangeStreamCaptureMode),
    ROW(cuStreamWaitEvent),
    ROW(cuStreamWaitValue32_v2),
    ROW(cuStreamWriteValue32_v2),
    ROW(cuLaunchHostFunc),
    ROW(cuEventCreate),
    ROW(cuEventDestroy_v2),
    ROW(cuEventRecord),
    ROW(cuEventQuery),
    ROW(cuEventSynchronize),
    ROW(cuEventElapsedTime_v2),
    ROW(cuMemcpyAsync),
    ROW(cuMemcpyHtoDAsync_v2),
    ROW(cuMemcpyDtoHAsync_v2),
    ROW(cuMemcpyDtoDAsync_v2),
    ROW(cuMemcpy2DAsync_v2),
    ROW(cuMemsetD8Async),
    ROW(cuMemHostRegister_v2),
    ROW(cuMemHostUnregister),
    ROW(cuMemHostGetDevicePointer_v2),
    ROW(cuModuleLoadData),
    ROW(cuModuleUnload),
    ROW(cuModuleGetFunction),
    ROW(cuLaunchKernel),
};
#define N_CALLS (sizeof calls / sizeof *calls)

static void world_make(void) {
    fresh_device(NULL);
    OK(cuCtxGetCurrent(&world.context));
    world.pages = pages_make(2);
    world.empty = range_make(PAGE);
    world.spare = handle_make(PAGE);
    OK(cuMemCreate(&world.exportable, PAGE, &exportable_memory, 0));
    OK(cuMemExportToShareableHandle(&world.fd, world.exportable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    0));
    OK(cuStreamCreate(&world.stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&world.event, CU_EVENT_DEFAULT));
    OK(cuEventRecord(world.event, world.stream));
    OK(cuEventSynchronize(world.event));
    world.host = host_make(4096, true);
    world.unregistered = host_make(4096, false);
    OK(simgpu_module_define(&(struct simgpu_module){image, "a_kernel", 4096, 1, 0, do_nothing}));
    OK(cuModuleLoadData(&world.module, image));
    OK(cuModuleGetFunction(&world.function, world.module, "a_kernel"));
}

static void world_end(void) {
    close(world.fd);
    simgpu_reset();
    host_destroy(world.host, 4096);
    host_destroy(world.unregistered, 4096);
}

static void every_entry_point_is_tried(void **state) {
    (void)state;
    unsigned n = 0;
    for (; simgpu_entry_name(n); n++) assert_string_equal(simgpu_entry_name(n), calls[n].name);
    assert_int_equal(n, N_CALLS);
}

static void a_failed_call_has_no_effect_whichever_it_is(void **state) {
    (void)state;
    for (size_t i = 0; i < N_CALLS; i++) {
        world_make();
        struct simgpu_live before = live_now();
        unsigned long long access;
        assert_int_equal(simgpu_fail_nth(calls[i].name, 1, CUDA_ERROR_LAUNCH_FAILED), 0);
        unsigned long n_before = simgpu_calls(calls[i].name);
        assert_int_equal(calls[i].call(), CUDA_ERROR_LAUNCH_FAILED);
        assert_int_equal(simgpu_calls(calls[i].name), n_before + 1);
        struct simgpu_live after = live_now();
        assert_memory_equal(&before, &after, sizeof before);
        OK(cuMemGetAccess(&access, &on_device, world.pages.at));
        assert_int_equal(access, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        OK(cuStreamQuery(world.stream));
        if (calls[i].call() != CUDA_SUCCESS) fail_msg("%s fails again", calls[i].name);
        if (calls[i].call == call_cuMemExportToShareableHandle) close(an_int);
        if (strcmp(calls[i].name, "cuDevicePrimaryCtxRelease_v2") != 0) OK(cuCtxSynchronize());
        world_end();
    }
}

static void the_nth_call_fails_and_no_other(void **state) {
    (void)state;
    CUdeviceptr at;
    assert_int_equal(simgpu_fail_nth("cuMemGetInfo", 3, CUDA_ERROR_NOT_READY), 0); /* without its _v2 */
    for (int i = 1; i <= 5; i++)
        assert_int_equal(call_cuMemGetInfo_v2(), i == 3 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
    assert_int_equal(simgpu_fail_nth(NULL, 2, CUDA_ERROR_OUT_OF_MEMORY), 0);
    OK(cuCtxSynchronize());
    REFUSED(cuMemAddressReserve(&at, PAGE, 0, 0, 0), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemAddressReserve(&at, PAGE, 0, 0, 0));
    assert_int_equal(simgpu_fail_nth("any", 1, 1), 0);
    assert_int_equal(simgpu_fail_nth(NULL, 0, 1), 0);
    OK(cuCtxSynchronize());
    assert_int_equal(simgpu_fail_nth("cuMemGet", 1, 1), -1);
    assert_int_equal(simgpu_calls("cuMemGet"), 0);
    assert_int_equal(simgpu_calls("cuMemGetInfo_v2"), 5);
    unsigned long all = simgpu_calls(NULL);
    OK(cuCtxSynchronize());
    assert_int_equal(simgpu_calls("any"), all + 1);
}

/* ---- contexts ---- */

static void calls_need_cuinit_and_a_current_context(void **state) {
    (void)state;
    CUcontext context, current;
    int count;
    simgpu_reset();
    REFUSED(cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
    REFUSED(call_cuMemCreate(), CUDA_ERROR_NOT_INITIALIZED);
    REFUSED(cuInit(1), CUDA_ERROR_INVALID_VALUE);
    OK(cuInit(0));
    REFUSED(call_cuMemCreate(), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuCtxGetCurrent(&current));
    assert_null(current);
    REFUSED(cuCtxSetCurrent((CUcontext)(void *)&count), CUDA_ERROR_INVALID_CONTEXT);
    REFUSED(cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    REFUSED(call_cuMemCreate(), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuCtxSetCurrent(context));
    OK(call_cuMemCreate());
    OK(cuCtxGetCurrent(&current));
    assert_ptr_equal(current, context);
    OK(cuCtxSetCurrent(NULL));
    REFUSED(call_cuMemCreate(), CUDA_ERROR_INVALID_CONTEXT);
}

static void the_last_release_of_the_context_ends_it(void **state) {
    (void)state;
    CUcontext context;
    void *host = host_make(4096, true);
    struct pages pages = pages_make(1);
    OK(call_cuStreamCreate());
    OK(call_cuEventCreate());
    OK(cuMemsetD8Async(pages.at, 5, PAGE, a_stream));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    OK(cuCtxSynchronize());
    OK(cuDevicePrimaryCtxRelease_v2(0));
    REFUSED(cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    struct simgpu_live live = live_now();
    assert_int_equal(live.streams + live.events + live.registrations, 0);
    assert_int_equal(live.maps, 1);
    assert_int_equal(bytes_at(pages.at)[PAGE - 1], 5); /* its work was done */
    host_destroy(host, 4096);
}

static void the_device_says_what_it_is(void **state) {
    (void)state;
    int value, wrong = 7;
    char name[64], cut[5];
    OK(cuDeviceGetCount(&value));
    assert_int_equal(value, 1);
    REFUSED(cuDeviceGet(&wrong, 1), CUDA_ERROR_INVALID_DEVICE);
    OK(cuDeviceGetName(name, sizeof name, 0));
    assert_string_equal(name, "FCDP simulated GPU");
    OK(cuDeviceGetName(cut, sizeof cut, 0));
    assert_string_equal(cut, "FCDP");
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    assert_int_equal(value, 1);
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 0));
    assert_int_equal(value, 0);
    REFUSED(cuDeviceGetAttribute(&wrong, (CUdevice_attribute)100000, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuDeviceGetAttribute(&wrong, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 1), CUDA_ERROR_INVALID_DEVICE);
    assert_int_equal(wrong, 7);
}

static void errors_have_names(void **state) {
    (void)state;
    const char *text;
    OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    assert_string_equal(text, "CUDA_ERROR_OUT_OF_MEMORY");
    OK(cuGetErrorString(CUDA_ERROR_ILLEGAL_ADDRESS, &text));
    assert_string_equal(text, "an illegal memory access was encountered");
    REFUSED(cuGetErrorName((CUresult)12345, &text), CUDA_ERROR_INVALID_VALUE);
    assert_null(text);
}

/* ---- settings ---- */

static CUresult init_with(const char *name, const char *value) {
    CUcontext context;
    simgpu_reset();
    setenv(name, value, 1);
    CUresult result = cuInit(0);
    unsetenv(name);
    if (result == CUDA_SUCCESS) {
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuCtxSetCurrent(context));
    }
    return result;
}

static size_t total_with(const char *capacity) {
    size_t bytes;
    OK(init_with("FCDP_SIM_CAPACITY", capacity));
    OK(cuDeviceTotalMem_v2(&bytes, 0));
    return bytes;
}

static void the_environment_sets_the_capacity(void **state) {
    (void)state;
    size_t bytes;
    OK(cuDeviceTotalMem_v2(&bytes, 0));
    assert_int_equal(bytes, (size_t)16 << 30);
    assert_int_equal(total_with("64M"), 64 << 20);
    assert_int_equal(total_with("4194304"), 4 << 20);
    assert_int_equal(total_with("3G"), (size_t)3 << 30);
    assert_int_equal(total_with("1T"), (size_t)1 << 40);
}

static void the_environment_fails_a_call(void **state) {
    (void)state;
    OK(init_with("FCDP_SIM_FAIL", "cuMemCreate:2:2"));
    OK(call_cuMemCreate());
    REFUSED(call_cuMemCreate(), CUDA_ERROR_OUT_OF_MEMORY);
    OK(call_cuMemCreate());
    REFUSED(init_with("FCDP_SIM_FAIL", "any:1"), CUDA_ERROR_UNKNOWN);
}

static void the_environment_poisons_fresh_memory(void **state) {
    (void)state;
    OK(init_with("FCDP_SIM_POISON", "1"));
    struct pages pages = pages_make(1);
    for (size_t i = 0; i < PAGE; i += 511) assert_int_equal(bytes_at(pages.at)[i], 0xA5);
}

static void a_malformed_setting_is_refused(void **state) {
    (void)state;
    static const char *const wrong[][2] = {
        {"FCDP_SIM_CAPACITY", "much"},
        {"FCDP_SIM_CAPACITY", "-1"},
        {"FCDP_SIM_CAPACITY", "16X"},
        {"FCDP_SIM_CAPACITY", "16Gb/s"},
        {"FCDP_SIM_CAPACITY", "1K"},
        {"FCDP_SIM_CAPACITY", "99999999T"},
        {"FCDP_SIM_PCIE", "fast"},
        {"FCDP_SIM_PCIE", "-1"},
        {"FCDP_SIM_PCIE", "inf"},
        {"FCDP_SIM_FAIL", "cuMemCreate"},
        {"FCDP_SIM_FAIL", "cuNoSuch:1"},
        {"FCDP_SIM_FAIL", "any:0"},
        {"FCDP_SIM_FAIL", "any:1:0"},
        {"FCDP_SIM_FAIL", "any:1:2:3"},
        {"FCDP_SIM_FAIL", ":1"},
        {"FCDP_SIM_POISON", "yes"},
        {"FCDP_SIM_RACES", "2"},
        {"FCDP_SIM_SERIAL", "yes"},
        {"FCDP_SIM_TIMELINE", "/nowhere/at/all"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (init_with(wrong[i][0], wrong[i][1]) != CUDA_ERROR_INVALID_VALUE)
            fail_msg("%s=%s was taken", wrong[i][0], wrong[i][1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(every_entry_point_is_tried),
        test(a_failed_call_has_no_effect_whichever_it_is),
        test(the_nth_call_fails_and_no_other),
        test(calls_need_cuinit_and_a_current_context),
        test(the_last_release_of_the_context_ends_it),
        test(the_device_says_what_it_is),
        test(errors_have_names),
        test(the_environment_sets_the_capacity),
        test(the_environment_fails_a_call),
        test(the_environment_poisons_fresh_memory),
        test(a_malformed_setting_is_refused),
    };
    return cmocka_run_group_tests_name("simgpu control", tests, NULL, NULL);
}
