/* The driver table on a simulated driver whose calls fail: by name and number, what callers make of it,
 * pinning. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "tests/alloc/driver_world.h"
#include "tests/log_text.h"

static void open_fails_cleanly_at_every_call(void **state) {
    (void)state;
    fcdp__driver_close(driver_open_sim());
    size_t n_failed = 0;
    for (unsigned long n = 1;; n++) {
        simgpu_reset();
        unsigned long before = simgpu_calls(NULL);
        assert_int_equal(simgpu_fail_nth(NULL, n, CUDA_UNKNOWN), 0);
        fcdp_driver *drv = NULL;
        fcdp_status status = fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &drv);
        bool spent = simgpu_calls(NULL) - before >= n;
        if (status)
            assert_true(strlen(fcdp_error_text()) > 0);
        else
            fcdp__driver_close(drv); /* some calls only ask: an attribute that is not told has a default */
        n_failed += status != FCDP_OK;
        assert_int_equal(simgpu_fail_nth(NULL, 0, 0), 0);
        bool close_failed = !spent ||
                            n == simgpu_calls(NULL) - before; /* the fault may have hit the close itself */
        if (!close_failed)
            assert_int_not_equal(cuDevicePrimaryCtxRelease_v2(0), 0); /* no reference is left */
        assert_nothing_lives();
        if (!spent) break;
    }
    assert_true(n_failed >= 5);
    simgpu_reset();
}

/* Each entry once: so that any of them can be made to fail. Outputs must stay as they were. */
static fcdp_status entry_run(world *w, int entry) {
    fcdp_phys phys = {77};
    fcdp_dptr base = {77};
    fcdp_stream stream = (void *)77;
    fcdp_event event = (void *)77;
    size_t free_bytes = 77, total_bytes = 77, stay_bytes;
    fcdp_status status = FCDP_OK;
    switch (entry) {
    case 0: status = fcdp__driver_mem_info(w->drv, &free_bytes, &total_bytes); break;
    case 1: status = fcdp__driver_phys_create(w->drv, PAGE, &phys); break;
    case 2: status = fcdp__driver_phys_release(w->drv, w->phys); break;
    case 3: status = fcdp__driver_range_reserve(w->drv, PAGE, &base); break;
    case 4: status = fcdp__driver_range_free(w->drv, w->base, 2 * PAGE); break;
    case 5: status = fcdp__driver_map(w->drv, fcdp__dptr_add(w->base, PAGE), PAGE, w->phys); break;
    case 6: status = fcdp__driver_unmap(w->drv, w->base, PAGE); break;
    case 7: status = fcdp__driver_set_access(w->drv, w->base, PAGE); break;
    case 8: status = fcdp__driver_copy_h2d(w->drv, w->base, w->host, 4096, w->stream); break;
    case 9: status = fcdp__driver_copy_d2h(w->drv, w->host, w->base, 4096, w->stream); break;
    case 10:
        status = fcdp__driver_copy_d2d(w->drv, w->base, fcdp__dptr_add(w->base, 8192), 4096, w->stream);
        break;
    case 11: status = fcdp__driver_stream_create(w->drv, &stream); break;
    case 12: status = fcdp__driver_sync(w->drv); break;
    case 13: status = fcdp__driver_stream_wait(w->drv, w->stream, w->event); break;
    case 14: status = fcdp__driver_event_create(w->drv, &event); break;
    case 15: status = fcdp__driver_event_record(w->drv, w->event, w->stream); break;
    case 16: status = fcdp__driver_event_sync(w->drv, w->event); break;
    case 17: status = fcdp__driver_event_query(w->drv, w->event); break;
    case 18: status = fcdp__driver_host_pin(w->drv, w->host, PAGE, &stay_bytes); break;
    case 19: status = fcdp__driver_host_function(w->drv, w->stream, do_nothing, NULL); break;
    case 20: status = fcdp__driver_write_value32(w->drv, w->stream, w->base, 1); break;
    case 21: status = fcdp__driver_wait_value32(w->drv, w->stream, w->base, 1); break;
    case 22: status = fcdp__driver_event_create_blocking(w->drv, &event); break;
    case 23: status = fcdp__driver_host_dptr(w->drv, w->host, &base); break;
    case 24:
        status = fcdp__driver_copy_rows(
            w->drv, &(fcdp_rows){w->base, fcdp__dptr_add(w->base, 8192), 64, 64, 32, 4}, w->stream);
        break;
    }
    assert_true(phys.handle == 77 && base.addr == 77 && stream == (void *)77 && event == (void *)77);
    assert_true(free_bytes == 77 && total_bytes == 77);
    return status;
}

static void every_failure_names_its_call(void **state) {
    (void)state;
    static const char *const calls[] = {
        "cuMemGetInfo",        "cuMemCreate",        "cuMemRelease",
        "cuMemAddressReserve", "cuMemAddressFree",   "cuMemMap",
        "cuMemUnmap",          "cuMemSetAccess",     "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",   "cuMemcpyDtoDAsync",  "cuStreamCreateWithPriority",
        "cuCtxSynchronize",    "cuStreamWaitEvent",  "cuEventCreate",
        "cuEventRecord",       "cuEventSynchronize", "cuEventQuery",
        "cuMemHostRegister",   "cuLaunchHostFunc",   "cuStreamWriteValue32",
        "cuStreamWaitValue32", "cuEventCreate",      "cuMemHostGetDevicePointer",
        "cuMemcpy2DAsync"};
    world w = world_create();
    for (int entry = 0; entry < (int)(sizeof calls / sizeof calls[0]); entry++) {
        assert_int_equal(simgpu_fail_nth(calls[entry], 1, CUDA_UNKNOWN), 0);
        assert_int_equal(entry_run(&w, entry), FCDP_ERR_DRIVER);
        assert_text(calls[entry]);
        assert_text("CUDA_ERROR_UNKNOWN");
        assert_int_equal(simgpu_fail_nth("cuCtxGetCurrent", 1, CUDA_UNKNOWN), 0); /* the binding around it */
        assert_int_equal(entry_run(&w, entry), FCDP_ERR_DRIVER);
        assert_text(calls[entry]);
    }
    world_destroy(&w);
}

/* This thread has none: the second call of cuCtxSetCurrent. */
static void a_context_that_does_not_come_back_is_said(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    size_t free_bytes, total_bytes;
    log_keep(FCDP_LOG_WARN);
    assert_int_equal(simgpu_fail_nth("cuCtxSetCurrent", 2, CUDA_UNKNOWN), 0);
    fcdp_status status = fcdp__driver_mem_info(drv, &free_bytes, &total_bytes);
    simgpu_fail_nth(NULL, 0, 0);
    assert_says(log_kept(),
                "warning: cuCtxSetCurrent (back to the thread's own context): CUDA_ERROR_UNKNOWN\n");
    assert_ok(status);
    fcdp__driver_close(drv);
}

/* CUDA may refuse pitches that it has not chosen itself. */
static void rows_that_are_refused_are_copied_one_by_one(void **state) {
    (void)state;
    enum { CUDA_INVALID_VALUE = 1, ROWS = 4, BYTES = 32 };
    world w = world_create();
    unsigned char *at = (unsigned char *)(uintptr_t)w.base.addr;
    for (int i = 0; i < ROWS * BYTES; i++) at[8192 + i] = (unsigned char)i;
    unsigned long before = simgpu_calls("cuMemcpyDtoDAsync");
    assert_int_equal(simgpu_fail_nth("cuMemcpy2DAsync", 1, CUDA_INVALID_VALUE), 0);
    assert_ok(fcdp__driver_copy_rows(
        w.drv, &(fcdp_rows){w.base, fcdp__dptr_add(w.base, 8192), 2 * BYTES, BYTES, BYTES, ROWS}, w.stream));
    assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
    assert_int_equal(simgpu_calls("cuMemcpyDtoDAsync") - before, ROWS);
    for (int i = 0; i < ROWS * BYTES; i++) assert_int_equal(at[i / BYTES * 2 * BYTES + i % BYTES], i);
    world_destroy(&w);
}

static void set(void *flag) {
    __atomic_store_n((bool *)flag, true, __ATOMIC_RELEASE);
}

static unsigned long n_spins(void) {
    struct simgpu_blocking here;
    simgpu_blocking_total(0, &here);
    return here.spins;
}

/* Without an event it spins, rather than not wait. */
static void who_waits_for_a_stream_sleeps(void **state) {
    (void)state;
    static const struct {
        const char *fails;
        unsigned long spins;
        fcdp_status status;
    } cases[] = {{NULL, 0, FCDP_OK},
                 {"cuEventCreate", 1, FCDP_OK},
                 {"cuEventRecord", 1, FCDP_OK},
                 {"cuEventSynchronize", 0, FCDP_ERR_DRIVER}};
    world w = world_create();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool done = false;
        simgpu_blocking_reset();
        assert_int_equal(simgpu_launch(w.stream, &(struct simgpu_kernel){.duration_ns = 2000000}), 0);
        assert_ok(fcdp__driver_host_function(w.drv, w.stream, set, &done));
        if (cases[i].fails) assert_int_equal(simgpu_fail_nth(cases[i].fails, 1, CUDA_UNKNOWN), 0);
        assert_int_equal(fcdp__driver_stream_sync(w.drv, w.stream), cases[i].status);
        if (cases[i].status) assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
        assert_true(done);
        assert_int_equal(n_spins(), cases[i].spins);
    }
    world_destroy(&w);
}

static void failures_map_to_what_callers_do(void **state) {
    (void)state;
    world w = world_create();
    size_t free_bytes, total_bytes;
    char numbers[96];
    assert_ok(fcdp__driver_mem_info(w.drv, &free_bytes, &total_bytes));
    snprintf(numbers, sizeof numbers, "device 0 has %zu of %zu bytes free", free_bytes, total_bytes);
    assert_int_equal(simgpu_fail_nth("cuMemCreate", 1, CUDA_OUT_OF_MEMORY), 0);
    assert_int_equal(entry_run(&w, 1), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("cuMemCreate(2097152 bytes, device 0): CUDA_ERROR_OUT_OF_MEMORY");
    assert_text(numbers);

    assert_int_equal(simgpu_fail_nth("cuMemCreate", 1, 801), 0);
    assert_int_equal(entry_run(&w, 1), FCDP_ERR_UNSUPPORTED);
    assert_int_equal(simgpu_fail_nth("cuMemCreate", 1, 12345),
                     0); /* a code that this driver has no name for */
    assert_int_equal(entry_run(&w, 1), FCDP_ERR_DRIVER);
    assert_text("CUresult 12345");
    assert_int_equal(simgpu_fail_nth("cuMemAddressReserve", 1, CUDA_OUT_OF_MEMORY), 0);
    assert_int_equal(entry_run(&w, 3), FCDP_ERR_DRIVER); /* addresses: nothing that could be reclaimed */
    assert_int_equal(simgpu_fail_nth("cuEventQuery", 1, CUDA_NOT_READY), 0);
    assert_int_equal(entry_run(&w, 17), FCDP_PENDING);
    assert_int_equal(simgpu_fail_nth("cuMemHostRegister", 1, CUDA_OUT_OF_MEMORY), 0);
    assert_int_equal(entry_run(&w, 18), FCDP_ERR_NO_HOST_MEM);
    assert_text("free host memory");
    world_destroy(&w);
}

static void real_exhaustion_is_out_of_device_memory(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_phys pages[3], more;
    simgpu_set_capacity(3 * PAGE);
    for (int i = 0; i < 3; i++) assert_ok(fcdp__driver_phys_create(drv, PAGE, &pages[i]));
    assert_int_equal(fcdp__driver_phys_create(drv, PAGE, &more), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("device 0 has 0 of 6291456 bytes free");
    for (int i = 0; i < 3; i++) assert_ok(fcdp__driver_phys_release(drv, pages[i]));
    fcdp__driver_close(drv);
    simgpu_reset();
}

static void access_not_ready_is_tried_again(void **state) {
    (void)state;
    world w = world_create();
    unsigned long n_calls = simgpu_calls("cuMemSetAccess"), n_syncs = simgpu_calls("cuCtxSynchronize");
    assert_int_equal(simgpu_fail_nth("cuMemSetAccess", 1, CUDA_NOT_READY), 0);
    assert_ok(fcdp__driver_set_access(w.drv, w.base, PAGE));
    assert_int_equal(simgpu_calls("cuMemSetAccess") - n_calls, 2);
    assert_int_equal(simgpu_calls("cuCtxSynchronize") - n_syncs, 1);
    world_destroy(&w);
}

/* ---- pinning ---- */

static size_t n_registered(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    return live.registrations;
}

static void pinning_is_all_or_nothing(void **state) {
    (void)state;
    enum { CHUNK = 64 << 10, N_CHUNKS = 5, BYTES = N_CHUNKS * CHUNK - 4096 };
    world w = world_create();
    size_t usual_bytes = fcdp__driver_pin_chunk_bytes, stay_bytes;
    assert_int_equal(usual_bytes, 64ull << 30);
    fcdp__driver_pin_chunk_bytes = CHUNK;
    for (unsigned long n = 1; n <= N_CHUNKS; n++) {
        assert_int_equal(simgpu_fail_nth("cuMemHostRegister", n, CUDA_OUT_OF_MEMORY), 0);
        assert_int_equal(fcdp__driver_host_pin(w.drv, w.host, BYTES, &stay_bytes), FCDP_ERR_NO_HOST_MEM);
        assert_int_equal(n_registered(), 0);
        assert_int_equal(stay_bytes, 0);
        assert_int_equal(fcdp__driver_pins_get(w.drv).n_made, fcdp__driver_pins_get(w.drv).n_undone);
    }
    fcdp_driver_pins before = fcdp__driver_pins_get(w.drv);
    assert_ok(fcdp__driver_host_pin(w.drv, w.host, BYTES, &stay_bytes));
    assert_int_equal(n_registered(), N_CHUNKS);
    assert_int_equal(fcdp__driver_host_pin(w.drv, w.host, BYTES, &stay_bytes), FCDP_ERR_DRIVER); /* already */
    assert_text("ALREADY_REGISTERED");
    assert_int_equal(n_registered(), N_CHUNKS);
    fcdp_driver_pins pins = fcdp__driver_pins_get(w.drv);
    assert_int_equal(pins.n_made, before.n_made + N_CHUNKS);
    assert_int_equal(pins.n_undone, before.n_undone);
    assert_int_equal(pins.bytes, BYTES);
    for (unsigned long n = 1; n <= N_CHUNKS; n++) { /* once is transient: tried again */
        assert_int_equal(simgpu_fail_nth("cuMemHostUnregister", n, CUDA_OUT_OF_MEMORY), 0);
        assert_ok(fcdp__driver_host_unpin(w.drv, w.host, BYTES, &stay_bytes));
        assert_int_equal(stay_bytes, 0);
        assert_int_equal(n_registered(), 0);
        assert_ok(fcdp__driver_host_pin(w.drv, w.host, BYTES, &stay_bytes));
    }
    assert_ok(fcdp__driver_host_unpin(w.drv, w.host, BYTES, &stay_bytes));
    assert_int_equal(n_registered(), 0);
    pins = fcdp__driver_pins_get(w.drv);
    assert_int_equal(pins.n_made, pins.n_undone);
    assert_int_equal(pins.bytes, 0);
    assert_int_equal(fcdp__driver_host_unpin(w.drv, w.host, BYTES, &stay_bytes), FCDP_ERR_DRIVER);
    fcdp__driver_pin_chunk_bytes = usual_bytes;
    world_destroy(&w);
}

/* The context fails at a chunk, so that no earlier one can be unregistered either: the caller learns how much
 * is registered, and may map nothing else there. The same where unregistering fails half way. */
static void what_cannot_be_unpinned_is_told(void **state) {
    (void)state;
    enum { CHUNK = 64 << 10, N_CHUNKS = 5, BYTES = N_CHUNKS * CHUNK - 4096, ILLEGAL_ADDRESS = 700 };
    size_t usual_bytes = fcdp__driver_pin_chunk_bytes, stay_bytes;
    fcdp__driver_pin_chunk_bytes = CHUNK;
    for (unsigned long n = 1; n <= N_CHUNKS; n++) {
        world w = world_create();
        assert_int_equal(simgpu_fail_nth("cuMemHostRegister", n, ILLEGAL_ADDRESS), 0);
        assert_int_equal(fcdp__driver_host_pin(w.drv, w.host, BYTES, &stay_bytes), FCDP_ERR_DRIVER);
        assert_text("cuMemHostRegister");
        assert_int_equal(stay_bytes, (n - 1) * CHUNK);
        assert_int_equal(n_registered(), n - 1);
        assert_int_equal(fcdp__driver_pins_get(w.drv).bytes, stay_bytes);
        simgpu_reset();
        munmap(w.host, PAGE);
        fcdp__driver_close(w.drv);
    }
    for (unsigned long n = 1; n <= N_CHUNKS; n++) {
        world w = world_create();
        assert_ok(fcdp__driver_host_pin(w.drv, w.host, BYTES, &stay_bytes));
        assert_int_equal(simgpu_fail_nth("cuMemHostUnregister", n, ILLEGAL_ADDRESS), 0);
        assert_int_equal(fcdp__driver_host_unpin(w.drv, w.host, BYTES, &stay_bytes), FCDP_ERR_DRIVER);
        assert_int_equal(stay_bytes, n == 1 ? BYTES : (N_CHUNKS - n + 1) * CHUNK);
        assert_int_equal(n_registered(), N_CHUNKS - n + 1);
        assert_int_equal(fcdp__driver_pins_get(w.drv).bytes, stay_bytes);
        simgpu_reset();
        munmap(w.host, PAGE);
        fcdp__driver_close(w.drv);
    }
    fcdp__driver_pin_chunk_bytes = usual_bytes;
}

/* In a child of its own: the limit and the user change. Exits with the number of the expectation that broke.
 */
static void pin_beyond_the_limit(void *arg) {
    (void)arg;
    struct rlimit limit = {MIB, MIB};
    fcdp_driver *drv;
    char *at = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || setrlimit(RLIMIT_MEMLOCK, &limit)) _exit(1);
    if (fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &drv)) _exit(2);
    /* Root may lock without limit. A user namespace that lacks the other user (EINVAL) has no such root. */
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) && errno != EINVAL) _exit(3);
    if (fcdp__driver_host_pin(drv, at, 8 * MIB, &(size_t){0}) != FCDP_ERR_NO_HOST_MEM) _exit(4);
    if (!strstr(fcdp_error_text(), "limited to 1.05 MB (RLIMIT_MEMLOCK)")) _exit(5);
    if (!strstr(fcdp_error_text(), "8.39 MB, after 0 B") || !strstr(fcdp_error_text(), "ulimit -l")) _exit(6);
    if (strstr(fcdp_error_text(), "FCDP_PIN")) _exit(7); /* its caller knows whether that helps */
    _exit(42);
}

static void a_memlock_limit_is_named(void **state) {
    (void)state;
    fcdp__driver_close(driver_open_sim());
    simgpu_reset(); /* the child is the one that initialises */
    int wait_status = child_run(pin_beyond_the_limit, NULL);
    assert_true(WIFEXITED(wait_status));
    assert_int_equal(WEXITSTATUS(wait_status), 42);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_fails_cleanly_at_every_call),
        cmocka_unit_test(every_failure_names_its_call),
        cmocka_unit_test(a_context_that_does_not_come_back_is_said),
        cmocka_unit_test(rows_that_are_refused_are_copied_one_by_one),
        cmocka_unit_test(who_waits_for_a_stream_sleeps),
        cmocka_unit_test(failures_map_to_what_callers_do),
        cmocka_unit_test(real_exhaustion_is_out_of_device_memory),
        cmocka_unit_test(access_not_ready_is_tried_again),
        cmocka_unit_test(pinning_is_all_or_nothing),
        cmocka_unit_test(what_cannot_be_unpinned_is_told),
        cmocka_unit_test(a_memlock_limit_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
