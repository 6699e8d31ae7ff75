/* The driver table on the simulated driver: opening, kernels, contexts of threads, order. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/alloc/driver_world.h"

static void open_tells_the_device(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    size_t free_bytes = 0, total_bytes = 0;
    assert_int_equal(fcdp__driver_page_bytes(drv), PAGE);
    assert_in_range(fcdp__driver_numa_node(drv) + 1, 0, 1024);
    assert_ok(fcdp__driver_mem_info(drv, &free_bytes, &total_bytes));
    assert_true(free_bytes > 0 && free_bytes <= total_bytes);
    fcdp__driver_close(drv);
}

static void assert_unsupported(fcdp_driver_kind kind, int ordinal, const char *sim_library) {
    fcdp_driver *drv = NULL;
    assert_int_equal(fcdp__driver_open(kind, ordinal, sim_library, &drv), FCDP_ERR_UNSUPPORTED);
    assert_null(drv);
}

static void a_missing_library_says_what_to_do(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp__driver_close(drv);
    char *named = strdup(getenv("FCDP_SIM_LIBRARY"));

    assert_ok(fcdp__driver_open(FCDP_DRIVER_SIM, 0, "/nowhere/first.so",
                                &drv)); /* the variable goes before the argument */
    fcdp__driver_close(drv);
    unsetenv("FCDP_SIM_LIBRARY");
    assert_ok(fcdp__driver_open(FCDP_DRIVER_SIM, 0, named, &drv));
    fcdp__driver_close(drv);
    assert_unsupported(FCDP_DRIVER_SIM, 0, NULL);
    assert_string_equal(
        fcdp_error_text(),
        "FCDP_DRIVER=sim, but no simulated driver is known: set FCDP_SIM_LIBRARY to the path of "
        "libfcdp_simgpu.so");
    setenv("FCDP_SIM_LIBRARY", "/nowhere/sim.so", 1);
    assert_unsupported(FCDP_DRIVER_SIM, 0, named);
    assert_text("FCDP_DRIVER=sim, but /nowhere/sim.so: cannot open");
    setenv("FCDP_SIM_LIBRARY", "libc.so.6", 1);
    assert_unsupported(FCDP_DRIVER_SIM, 0, NULL);
    assert_text("libc.so.6 has no cuInit: it is too old");
    setenv("FCDP_SIM_LIBRARY", named, 1);
    free(named);
}

static void an_absent_device_says_how_many_there_are(void **state) {
    (void)state;
    fcdp__driver_close(driver_open_sim());
    assert_unsupported(FCDP_DRIVER_SIM, 7, NULL);
    assert_string_equal(fcdp_error_text(),
                        "device 7 was asked for, but there are 1 (0 to 0); see CUDA_VISIBLE_DEVICES");
    assert_unsupported(FCDP_DRIVER_SIM, -1, NULL);
}

static void a_refused_init_is_named(void **state) {
    (void)state;
    fcdp__driver_close(driver_open_sim());
    assert_int_equal(simgpu_fail_nth("cuInit", 1, CUDA_NO_DEVICE), 0);
    assert_unsupported(FCDP_DRIVER_SIM, 0, NULL);
    assert_string_equal(fcdp_error_text(), "FCDP_DRIVER=sim, but cuInit: CUDA_ERROR_NO_DEVICE");
}

/* ---- kernels ---- */

typedef struct count_task {
    uint64_t address, bytes, n;
} count_task;

static void count_block(void *task) {
    count_task *of = task;
    of->n = of->bytes;
}

static const fcdp_kernel_source count_kernel = {
    ".visible .entry count(.param .u64 tasks)", "count", 64, sizeof(count_task), 1, 0, count_block};

static size_t n_modules(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    return live.modules;
}

static void a_kernel_runs_on_its_tasks(void **state) {
    (void)state;
    world w = world_create();
    count_task *tasks = (count_task *)(void *)w.host;
    fcdp_kernel kernel;
    fcdp_dptr at;
    assert_ok(fcdp__driver_host_pin(w.drv, w.host, PAGE, &(size_t){0}));
    assert_ok(fcdp__driver_host_dptr(w.drv, w.host, &at));
    assert_ok(fcdp__driver_kernel_load(w.drv, &count_kernel, &kernel));
    for (uint64_t i = 0; i < 30; i++) tasks[i] = (count_task){w.base.addr + 1000 * i, 10 + i, 0};
    assert_ok(fcdp__driver_launch(w.drv, &kernel, at, 30, w.stream));
    assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
    for (uint64_t i = 0; i < 30; i++) assert_int_equal(tasks[i].n, 10 + i);

    assert_int_equal(simgpu_fail_nth("cuLaunchKernel", 1, CUDA_UNKNOWN), 0);
    assert_int_equal(fcdp__driver_launch(w.drv, &kernel, at, 30, w.stream), FCDP_ERR_DRIVER);
    assert_text("cuLaunchKernel(30 blocks of 64 threads");
    fcdp__driver_kernel_unload(w.drv, &kernel);
    fcdp__driver_kernel_unload(w.drv, &(fcdp_kernel){0}); /* never loaded */
    assert_ok(fcdp__driver_host_unpin(w.drv, w.host, PAGE, &(size_t){0}));
    world_destroy(&w);
}

static void a_kernel_that_cannot_be_loaded_leaves_nothing(void **state) {
    (void)state;
    static const struct {
        const char *call;
        int code;
        fcdp_status status;
    } rows[] = {{"cuModuleLoadData", CUDA_UNKNOWN, FCDP_ERR_DRIVER},
                {"cuModuleLoadData", 209, FCDP_ERR_UNSUPPORTED},
                {"cuModuleLoadData", 222, FCDP_ERR_UNSUPPORTED},
                {"cuModuleLoadData", CUDA_OUT_OF_MEMORY, FCDP_ERR_NO_DEVICE_MEM},
                {"cuModuleGetFunction", CUDA_UNKNOWN, FCDP_ERR_DRIVER},
                {"cuModuleGetFunction", 221, FCDP_ERR_UNSUPPORTED}};
    world w = world_create();
    fcdp_kernel kernel = {(void *)77, (void *)77, 77};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(simgpu_fail_nth(rows[i].call, 1, rows[i].code), 0);
        assert_int_equal(fcdp__driver_kernel_load(w.drv, &count_kernel, &kernel), rows[i].status);
        assert_text(rows[i].call);
        assert_int_equal(n_modules(), 0);
    }
    assert_true(kernel.module == (void *)77 && kernel.function == (void *)77);
    fcdp_kernel_source unknown = count_kernel;
    unknown.entry = "another";
    assert_true(fcdp__driver_kernel_load(w.drv, &unknown, &kernel) < 0);
    w.drv->api.cuLaunchKernel = NULL; /* as in a library that has none */
    assert_int_equal(fcdp__driver_kernel_load(w.drv, &count_kernel, &kernel), FCDP_ERR_UNSUPPORTED);
    assert_text("cuLaunchKernel; update the driver");
    world_destroy(&w);
}

/* ---- contexts ---- */

typedef struct visit {
    world *w;
    bool bound_before;
    fcdp_status status;
    bool same_after;
} visit;

static void *visit_from_thread(void *arg) {
    visit *v = arg;
    void *before = NULL, *after = NULL;
    if (v->bound_before && (cuDevicePrimaryCtxRetain(&before, 0) || cuCtxSetCurrent(before))) return NULL;
    char bytes[64] = "written by another thread";
    fcdp_event event;
    v->status = fcdp__driver_copy_h2d(v->w->drv, v->w->base, bytes, sizeof bytes, v->w->stream);
    if (!v->status) v->status = fcdp__driver_event_create(v->w->drv, &event);
    if (!v->status) v->status = fcdp__driver_event_record(v->w->drv, event, v->w->stream);
    if (!v->status) v->status = fcdp__driver_event_sync(v->w->drv, event);
    if (!v->status) fcdp__driver_event_destroy(v->w->drv, event);
    v->same_after = cuCtxGetCurrent(&after) == 0 && after == before;
    if (v->bound_before) cuDevicePrimaryCtxRelease_v2(0);
    return NULL;
}

static void any_thread_may_call_and_keeps_its_context(void **state) {
    (void)state;
    world w = world_create();
    for (int bound = 0; bound < 2; bound++) {
        visit v = {.w = &w, .bound_before = bound, .status = FCDP_ERR_INVALID};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, visit_from_thread, &v), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(v.status, FCDP_OK);
        assert_true(v.same_after);
    }
    assert_ok(fcdp__driver_copy_d2h(w.drv, w.host, w.base, 64, w.stream));
    assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
    assert_string_equal(w.host, "written by another thread");
    world_destroy(&w);
}

static void two_drivers_share_the_device(void **state) {
    (void)state;
    fcdp_driver *one = driver_open_sim(), *two = driver_open_any();
    fcdp_phys page;
    fcdp__driver_close(one);
    assert_ok(fcdp__driver_phys_create(two, PAGE, &page));
    assert_ok(fcdp__driver_phys_release(two, page));
    fcdp__driver_close(two);
}

/* ---- copies ---- */

/* Host -> device on one stream; device -> device -> host on another that waits for the first by an event. */
static void an_event_orders_two_streams(void **state) {
    (void)state;
    enum { N = PAGE / 2, ROUNDS = 20 };
    fcdp_driver *drv = driver_open_any();
    fcdp_dptr base;
    fcdp_phys phys;
    fcdp_stream up, down;
    fcdp_event event;
    unsigned char *sent = malloc(N), *received = malloc(N);
    assert_ok(fcdp__driver_range_reserve(drv, PAGE, &base));
    assert_ok(fcdp__driver_phys_create(drv, PAGE, &phys));
    assert_ok(fcdp__driver_map(drv, base, PAGE, phys));
    assert_ok(fcdp__driver_set_access(drv, base, PAGE));
    assert_ok(fcdp__driver_stream_create(drv, &up));
    assert_ok(fcdp__driver_stream_create(drv, &down));
    assert_ok(fcdp__driver_event_create(drv, &event));
    for (int round = 0; round < ROUNDS; round++) {
        memset(sent, round + 1, N);
        assert_ok(fcdp__driver_copy_h2d(drv, base, sent, N, up));
        assert_ok(fcdp__driver_event_record(drv, event, up));
        assert_ok(fcdp__driver_stream_wait(drv, down, event));
        fcdp_dptr there = fcdp__dptr_add(base, N);
        if (round % 2)
            assert_ok(fcdp__driver_copy_d2d(drv, there, base, N, down));
        else
            assert_ok(fcdp__driver_copy_rows(drv, &(fcdp_rows){there, base, N / 8, N / 8, N / 8, 8}, down));
        assert_ok(fcdp__driver_copy_d2h(drv, received, fcdp__dptr_add(base, N), N, down));
        assert_ok(fcdp__driver_event_record(drv, event, down));
        assert_ok(fcdp__driver_event_sync(drv, event));
        assert_int_equal(fcdp__driver_event_query(drv, event), FCDP_OK);
        assert_memory_equal(sent, received, N);
    }
    fcdp__driver_event_destroy(drv, event);
    fcdp__driver_stream_destroy(drv, up);
    fcdp__driver_stream_destroy(drv, down);
    assert_ok(fcdp__driver_unmap(drv, base, PAGE));
    assert_ok(fcdp__driver_phys_release(drv, phys));
    assert_ok(fcdp__driver_range_free(drv, base, PAGE));
    fcdp__driver_close(drv);
    free(sent);
    free(received);
}

/* ---- host functions, values, blocking events ---- */

static void append(void *arg) {
    char **end = arg;
    *(*end)++ = 'f';
}

/* A word in device memory, and one in pinned host memory: `down` goes on
 * when `up` wrote it, and not before. */
static void streams_meet_at_words(void **state) {
    (void)state;
    world w = world_create();
    fcdp_stream other;
    fcdp_event done;
    fcdp_dptr words[2] = {w.base};
    char text[8] = "", *end = text;
    assert_ok(fcdp__driver_stream_create(w.drv, &other));
    assert_ok(fcdp__driver_event_create_blocking(w.drv, &done));
    assert_ok(fcdp__driver_host_pin(w.drv, w.host, PAGE, &(size_t){0}));
    assert_ok(fcdp__driver_host_dptr(w.drv, w.host + 64, &words[1]));
    for (int i = 0; i < 2; i++) {
        assert_ok(fcdp__driver_wait_value32(w.drv, other, words[i], 7));
        assert_ok(fcdp__driver_host_function(w.drv, other, append, &end));
        assert_ok(fcdp__driver_event_record(w.drv, done, other));
        assert_ok(fcdp__driver_write_value32(w.drv, w.stream, words[i], 6));
        assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
        assert_int_equal(fcdp__driver_event_query(w.drv, done), FCDP_PENDING);
        assert_ok(fcdp__driver_write_value32(w.drv, w.stream, words[i], 8)); /* at least 7 */
        assert_ok(fcdp__driver_event_sync(w.drv, done));
        assert_int_equal(strlen(text), i + 1);
    }
    assert_int_equal(*(uint32_t *)(w.host + 64), 8);
    assert_ok(fcdp__driver_host_unpin(w.drv, w.host, PAGE, &(size_t){0}));
    fcdp__driver_event_destroy(w.drv, done);
    fcdp__driver_stream_destroy(w.drv, other);
    world_destroy(&w);
}

/* A copy of the simulated driver in which two functions have other names. */
static void old_driver_make(char *path) {
    static const char *const newer[] = {"cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"};
    struct stat about;
    int from = open(getenv("FCDP_SIM_LIBRARY"), O_RDONLY), to = mkstemp(path);
    assert_true(from >= 0 && to >= 0 && fstat(from, &about) == 0);
    size_t bytes = (size_t)about.st_size;
    char *image = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, from, 0);
    assert_ptr_not_equal(image, MAP_FAILED);
    for (int i = 0; i < 2; i++)
        for (char *at = image; (at = memmem(at, bytes - (size_t)(at - image), newer[i], strlen(newer[i])));)
            at[2] = 'X';
    assert_int_equal(write(to, image, bytes), bytes);
    munmap(image, bytes);
    close(from);
    close(to);
}

static void an_old_driver_lacks_values_alone(void **state) {
    (void)state;
    fcdp__driver_close(driver_open_sim());
    char path[] = "/tmp/fcdp-old-driver-XXXXXX", *named = strdup(getenv("FCDP_SIM_LIBRARY"));
    fcdp_driver *drv;
    fcdp_stream stream;
    old_driver_make(path);
    setenv("FCDP_SIM_LIBRARY", path, 1);
    assert_ok(fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &drv));
    setenv("FCDP_SIM_LIBRARY", named, 1);
    assert_ok(fcdp__driver_stream_create(drv, &stream));
    assert_int_equal(fcdp__driver_write_value32(drv, stream, (fcdp_dptr){64}, 1), FCDP_ERR_UNSUPPORTED);
    assert_string_equal(fcdp_error_text(),
                        "device 0's driver has no cuStreamWriteValue32: it is older than CUDA "
                        "11.7; update the driver");
    assert_int_equal(fcdp__driver_wait_value32(drv, stream, (fcdp_dptr){64}, 1), FCDP_ERR_UNSUPPORTED);
    assert_text("cuStreamWaitValue32");
    fcdp__driver_stream_destroy(drv, stream);
    fcdp__driver_close(drv);
    unlink(path);
    free(named);
}

/* ---- what only the simulated driver hears ---- */

static void labels_and_names_reach_the_simulated_driver(void **state) {
    (void)state;
    world w = world_create();
    struct simgpu_blocking row;
    struct simgpu_unordered unordered;
    fcdp_dptr beyond = fcdp__dptr_add(w.base, PAGE);
    fcdp__driver_annotate(w.drv, "agreement");
    assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
    fcdp__driver_annotate(w.drv, NULL);
    assert_int_equal(simgpu_blocking_list(&row, 1), 1);
    assert_string_equal(row.label, "agreement");

    assert_ok(fcdp__driver_map(w.drv, beyond, PAGE, w.phys)); /* the same page */
    assert_ok(fcdp__driver_set_access(w.drv, beyond, PAGE));
    fcdp_stream other;
    assert_ok(fcdp__driver_stream_create(w.drv, &other));
    fcdp__driver_stream_name(w.drv, other, "inter");
    fcdp__driver_announce(w.drv, &(fcdp_access){w.base, 64, false}, 1);
    assert_ok(fcdp__driver_host_function(w.drv, w.stream, do_nothing, NULL));
    fcdp__driver_announce(w.drv, &(fcdp_access){beyond, 64, true}, 1);
    assert_ok(fcdp__driver_host_function(w.drv, other, do_nothing, NULL));
    assert_int_equal(fcdp__driver_sync(w.drv), FCDP_ERR_DRIVER);
    simgpu_unordered(&unordered);
    assert_int_equal(unordered.aliases, 1);
    assert_non_null(strstr(unordered.text, "on stream \"inter\" writes"));
    assert_ptr_equal(fcdp__driver_sim_symbol(w.drv, "simgpu_live"), simgpu_live);
    assert_null(fcdp__driver_sim_symbol(w.drv, "simgpu_no_such_thing"));
    fcdp__driver_close(w.drv);
    munmap(w.host, PAGE);
    simgpu_reset();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_tells_the_device),
        cmocka_unit_test(a_missing_library_says_what_to_do),
        cmocka_unit_test(an_absent_device_says_how_many_there_are),
        cmocka_unit_test(a_refused_init_is_named),
        cmocka_unit_test(a_kernel_runs_on_its_tasks),
        cmocka_unit_test(a_kernel_that_cannot_be_loaded_leaves_nothing),
        cmocka_unit_test(any_thread_may_call_and_keeps_its_context),
        cmocka_unit_test(two_drivers_share_the_device),
        cmocka_unit_test(an_event_orders_two_streams),
        cmocka_unit_test(streams_meet_at_words),
        cmocka_unit_test(an_old_driver_lacks_values_alone),
        cmocka_unit_test(labels_and_names_reach_the_simulated_driver),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
