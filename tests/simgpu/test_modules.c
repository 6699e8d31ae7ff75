/* Modules: loading, launches as kernels of a stream that reads what the tasks say, and what is refused. */
#include <string.h>

#include "tests/simgpu/support.h"

struct task {
    uint64_t address, bytes, sum;
};

static const char image[] =
    ".version 6.4\n.target sm_70\n.visible .entry add_up(\n\t.param .u64 tasks\n)\n{\n\tret;\n}\n";
enum { N_TASKS = 40 };

static void add_up(void *argument) {
    struct task *task = argument;
    task->sum = 0;
    for (size_t i = 0; i < task->bytes; i++) task->sum += bytes_at(task->address)[i];
}

static const struct simgpu_module module_add_up = {image, "add_up", sizeof(struct task), 1, 0, add_up};

struct sum_task {
    uint64_t first, first_bytes, second, second_bytes, sums, sums_bytes;
};

static const char sums_image[] =
    ".version 6.4\n.target sm_70\n.visible .entry sums(\n\t.param .u64 tasks\n)\n{\n\tret;\n}\n";

static void sums(void *argument) {
    const struct sum_task *task = argument;
    for (size_t i = 0; i < task->sums_bytes; i++)
        bytes_at(task->sums)[i] = (unsigned char)(bytes_at(task->first)[i] + bytes_at(task->second)[i]);
}

static const struct simgpu_module module_sums = {sums_image, "sums", sizeof(struct sum_task), 2, 1, sums};

static CUfunction function_make(CUmodule *module_out) {
    CUfunction function;
    OK(simgpu_module_define(&module_add_up));
    OK(cuModuleLoadData(module_out, image));
    OK(cuModuleGetFunction(&function, *module_out, "add_up"));
    return function;
}

static CUresult launch(CUfunction function, CUstream stream, struct task *tasks, unsigned n) {
    return cuLaunchKernel(function, n, 1, 1, 128, 1, 1, 0, stream, (void *[]){&tasks}, NULL);
}

/* One page of ones, read by tasks of which none touches the next. */
static struct task *tasks_make(struct pages *pages_out) {
    struct task *tasks = host_make(4096, true);
    *pages_out = pages_make(1);
    OK(cuMemsetD8Async(pages_out->at, 1, PAGE, NULL));
    OK(cuStreamSynchronize(NULL));
    for (uint64_t i = 0; i < N_TASKS; i++) tasks[i] = (struct task){pages_out->at + 1000 * i, 100 + i, 0};
    return tasks;
}

static CUstream stream_make(void) {
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

static void every_block_runs_in_stream_order(void **state) {
    (void)state;
    struct pages pages;
    CUmodule module;
    struct task *tasks = tasks_make(&pages);
    CUfunction function = function_make(&module);
    CUstream stream = stream_make();
    struct gate gate;
    gate_close(&gate, stream);
    OK(cuMemsetD8Async(pages.at, 2, PAGE, stream));
    OK(launch(function, stream, tasks, N_TASKS));
    OK(cuModuleUnload(module)); /* what is launched needs it no more */
    OK(cuMemsetD8Async(pages.at, 3, PAGE, stream));
    gate_open(&gate);
    OK(cuStreamSynchronize(stream));
    for (uint64_t i = 0; i < N_TASKS; i++) assert_int_equal(tasks[i].sum, 2 * (100 + i));
    assert_int_equal(live_now().modules, 0);
    OK(cuMemHostUnregister(tasks));
}

static void handles_are_checked(void **state) {
    (void)state;
    struct pages pages;
    CUmodule module, other;
    CUfunction function, again;
    struct task *tasks = tasks_make(&pages);
    REFUSED(cuModuleLoadData(&module, image), CUDA_ERROR_NO_BINARY_FOR_GPU); /* not defined yet */
    function = function_make(&module);
    REFUSED(cuModuleLoadData(&other, "another text"), CUDA_ERROR_NO_BINARY_FOR_GPU);
    REFUSED(cuModuleLoadData(&other, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuModuleGetFunction(&again, module, "add"), CUDA_ERROR_NOT_FOUND);
    OK(cuModuleGetFunction(&again, module, "add_up"));
    assert_ptr_equal(again, function);
    assert_int_equal(live_now().modules, 1);
    OK(cuModuleUnload(module));
    REFUSED(cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuModuleGetFunction(&again, module, "add_up"), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(launch(function, NULL, tasks, 1), CUDA_ERROR_INVALID_HANDLE);
    simgpu_reset(); /* definitions go too */
    fresh_device(NULL);
    REFUSED(cuModuleLoadData(&module, image), CUDA_ERROR_NO_BINARY_FOR_GPU);
}

static void malformed_definitions_are_refused(void **state) {
    (void)state;
    enum { N_WRONG = 8 };
    struct simgpu_module wrong[N_WRONG];
    for (int i = 0; i < N_WRONG; i++) wrong[i] = i < 5 ? module_add_up : module_sums;
    wrong[0].entry = "add";
    wrong[1].task_bytes = 15;
    wrong[2].run = NULL;
    wrong[3].image = "no entry at all: add_up(";
    wrong[4].n_read = 0;
    wrong[5].task_bytes = 47; /* its three ranges */
    wrong[6].n_written = 3;
    wrong[7].n_written = 0xffffffff;
    REFUSED(simgpu_module_define(NULL), CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < N_WRONG; i++) REFUSED(simgpu_module_define(&wrong[i]), CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < 20; i++) OK(simgpu_module_define(&module_add_up)); /* the same one */
}

static void malformed_launches_are_refused(void **state) {
    (void)state;
    struct pages pages;
    CUmodule module;
    struct task *tasks = tasks_make(&pages);
    CUfunction function = function_make(&module);
    void *parameters[] = {&tasks};
    REFUSED(launch(function, NULL, tasks, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(launch(function, (CUstream)(uintptr_t)0x1234, tasks, 1), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuLaunchKernel(function, 1, 1, 1, 1025, 1, 1, 0, NULL, parameters, NULL),
            CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuLaunchKernel(function, 1, 2, 1, 128, 1, 1, 0, NULL, parameters, NULL),
            CUDA_ERROR_NOT_SUPPORTED);
}

static void assert_launch_is_illegal(CUfunction function, struct task *tasks, unsigned n) {
    (void)launch(function, NULL, tasks, n);
    REFUSED(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void what_the_device_cannot_touch_is_an_illegal_access(void **state) {
    (void)state;
    for (int kind = 0; kind < 5; kind++) {
        struct pages pages;
        CUmodule module;
        struct task *tasks = tasks_make(&pages), local = tasks[0];
        CUfunction function = function_make(&module);
        if (kind == 1) tasks[N_TASKS - 1].bytes = PAGE; /* past the end */
        if (kind == 2) OK(cuMemSetAccess(pages.at, PAGE, &no_access, 1));
        if (kind == 3) tasks[N_TASKS - 1].address = 0;
        if (kind == 4) tasks[N_TASKS - 1].bytes = UINT64_MAX;
        assert_launch_is_illegal(function, kind == 0 ? &local : tasks, kind == 0 ? 1 : N_TASKS);
        fresh_device(NULL);
    }
}

/* The host reuses the memory of its tasks too early. */
static void a_task_that_changes_before_its_block_runs_is_an_illegal_access(void **state) {
    (void)state;
    struct pages pages;
    CUmodule module;
    struct task *tasks = tasks_make(&pages);
    CUfunction function = function_make(&module);
    CUstream stream = stream_make();
    struct gate gate;
    gate_close(&gate, stream);
    OK(launch(function, stream, tasks, N_TASKS));
    tasks[N_TASKS - 1].bytes--;
    gate_open(&gate);
    REFUSED(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void unregistering_the_tasks_waits_for_their_blocks(void **state) {
    (void)state;
    struct pages pages;
    CUmodule module;
    struct task *tasks = tasks_make(&pages);
    CUfunction function = function_make(&module);
    CUstream stream = stream_make();
    OK(simgpu_launch(stream, &(struct simgpu_kernel){.duration_ns = 5000000}));
    OK(launch(function, stream, tasks, N_TASKS));
    OK(cuMemHostUnregister(tasks));
    assert_int_equal(tasks[N_TASKS - 1].sum, tasks[N_TASKS - 1].bytes);
}

static void reads_take_the_memorys_rate(void **state) {
    (void)state;
    struct pages pages;
    CUmodule module;
    struct task *tasks = tasks_make(&pages);
    CUfunction function = function_make(&module);
    CUstream stream = stream_make();
    CUevent event;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    simgpu_set_memory(0.2); /* 2 MiB take 10 ms */
    tasks[0] = (struct task){pages.at, PAGE, 0};
    OK(launch(function, stream, tasks, 1));
    OK(cuEventRecord(event, stream));
    REFUSED(cuEventQuery(event), CUDA_ERROR_NOT_READY);
    OK(cuEventSynchronize(event));
    assert_int_equal(tasks[0].sum, PAGE);
}

/* Of the pages' first bytes, a task for each 100 of them; then it is launched. */
static void sums_launch(const struct pages *pages, uint64_t to, struct sum_task *tasks, uint64_t n,
                        CUstream stream) {
    CUmodule module;
    CUfunction function;
    OK(simgpu_module_define(&module_sums));
    OK(cuModuleLoadData(&module, sums_image));
    OK(cuModuleGetFunction(&function, module, "sums"));
    for (uint64_t i = 0; i < n; i++)
        tasks[i] = (struct sum_task){pages->at + 100 * i,    100, pages->at + 5000 + 300 * i, 100,
                                     to + (n - 1 - i) * 100, 100};
    (void)cuLaunchKernel(function, (unsigned)n, 1, 1, 128, 1, 1, 0, stream, (void *[]){&tasks}, NULL);
}

static void a_block_reads_and_writes_several_ranges(void **state) {
    (void)state;
    struct sum_task *tasks = host_make(4096, true);
    char *to = host_make(4096, true);
    struct pages pages = pages_make(1);
    OK(cuMemsetD8Async(pages.at, 1, PAGE, NULL));
    OK(cuMemsetD8Async(pages.at + 5000, 2, 3 * 100 * N_TASKS, NULL));
    sums_launch(&pages, (uintptr_t)to, tasks, N_TASKS, NULL);
    OK(cuStreamSynchronize(NULL));
    for (int i = 0; i < 4096; i++) assert_int_equal(to[i], i < 100 * N_TASKS ? 3 : 0);
}

static void each_range_is_checked(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        struct sum_task *tasks = host_make(4096, true);
        char *to = host_make(4096, true);
        struct pages pages = pages_make(1), second = pages_make(1);
        CUstream stream = stream_make();
        struct gate gate;
        if (kind == 0) OK(cuMemSetAccess(second.at, PAGE, &no_access, 1));
        gate_close(&gate, stream);
        sums_launch(&pages, kind == 0 ? second.at : (uintptr_t)to, tasks, N_TASKS, stream);
        if (kind == 1) tasks[N_TASKS - 1].second++;
        if (kind == 2) tasks[0].sums_bytes--;
        gate_open(&gate);
        REFUSED(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
        fresh_device(NULL);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(every_block_runs_in_stream_order),
        test(handles_are_checked),
        test(malformed_definitions_are_refused),
        test(malformed_launches_are_refused),
        test(what_the_device_cannot_touch_is_an_illegal_access),
        test(a_task_that_changes_before_its_block_runs_is_an_illegal_access),
        test(unregistering_the_tasks_waits_for_their_blocks),
        test(reads_take_the_memorys_rate),
        test(a_block_reads_and_writes_several_ranges),
        test(each_range_is_checked),
    };
    return cmocka_run_group_tests_name("simgpu modules", tests, NULL, NULL);
}
