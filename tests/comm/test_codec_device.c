/* That a device's wire of differences is the CPU's, and that it copies once more what came wrong, on any
 * driver: FCDP_DRIVER=cuda runs the PTX. With an argument: how fast it reads both arrays, of modelled
 * weights. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/options.h"
#include "base/size.h"
#include "comm/codec_kernel.h"
#include "comm/copy_if.h"
#include "tests/assert_ok.h"
#include "tests/comm/random.h"
#include "tools/bench/codec/weights.h"

enum { MAX_BYTES = 4 * FCDP_DELTA_TASK_BYTES + 5000, SHIFTS = 64 };
extern char **environ;

typedef struct world {
    fcdp_driver *drv;
    fcdp_kernel kernel;
    fcdp_stream stream;
    fcdp_phys block;
    fcdp_dptr device; /* the base, then `now`, each with room to be shifted; then slots */
    size_t room_bytes, slots_bytes, device_bytes;
    char *pinned; /* tasks, then slots */
    size_t pinned_bytes;
} world;

/* For arrays of so many bytes. */
static world world_create(size_t most_bytes) {
    fcdp_options options;
    size_t stay_bytes, n_tasks = fcdp__delta_tasks_of(most_bytes);
    world w = {.room_bytes = fcdp__round_up(most_bytes + SHIFTS, 16),
               .slots_bytes = n_tasks * FCDP_DELTA_SLOTS_BYTES};
    assert_ok(fcdp_options_load(environ, &options));
    assert_ok(fcdp__driver_open(options.driver, 0, NULL, &w.drv));
    assert_ok(fcdp__driver_kernel_load(w.drv, &fcdp__delta_kernel, &w.kernel));
    assert_ok(fcdp__driver_stream_create(w.drv, &w.stream));
    w.device_bytes = fcdp__round_up(2 * w.room_bytes + w.slots_bytes, fcdp__driver_page_bytes(w.drv));
    assert_ok(fcdp__driver_range_reserve(w.drv, w.device_bytes, &w.device));
    assert_ok(fcdp__driver_phys_create(w.drv, w.device_bytes, &w.block));
    assert_ok(fcdp__driver_map(w.drv, w.device, w.device_bytes, w.block));
    assert_ok(fcdp__driver_set_access(w.drv, w.device, w.device_bytes));
    w.pinned_bytes = fcdp__round_up(n_tasks * sizeof(fcdp_delta_task) + w.slots_bytes, 4096);
    w.pinned = mmap(NULL, w.pinned_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(w.pinned != MAP_FAILED);
    assert_ok(fcdp__driver_host_pin(w.drv, w.pinned, w.pinned_bytes, &stay_bytes));
    return w;
}

static void world_destroy(world *w) {
    size_t stay_bytes;
    assert_ok(fcdp__driver_stream_sync(w->drv, w->stream));
    fcdp__driver_kernel_unload(w->drv, &w->kernel);
    fcdp__driver_stream_destroy(w->drv, w->stream);
    assert_ok(fcdp__driver_host_unpin(w->drv, w->pinned, w->pinned_bytes, &stay_bytes));
    munmap(w->pinned, w->pinned_bytes);
    assert_ok(fcdp__driver_unmap(w->drv, w->device, w->device_bytes));
    assert_ok(fcdp__driver_phys_release(w->drv, w->block));
    assert_ok(fcdp__driver_range_free(w->drv, w->device, w->device_bytes));
    fcdp__driver_close(w->drv);
}

/* The device's wire, made of arrays that begin so many elements behind where they would be aligned. */
static size_t device_encode(world *w, const char *base, const char *now, size_t bytes, unsigned element_bytes,
                            size_t shift, char *wire_out, size_t capacity) {
    fcdp_delta_task *tasks = (fcdp_delta_task *)(void *)w->pinned;
    fcdp_dptr tasks_at, slots_at, base_at = fcdp__dptr_add(w->device, shift * element_bytes);
    fcdp_dptr now_at = fcdp__dptr_add(w->device, w->room_bytes + shift * element_bytes);
    size_t n = fcdp__delta_tasks_of(bytes);
    char *slots = w->pinned + n * sizeof *tasks;
    memset(slots, 0xee, n * FCDP_DELTA_SLOTS_BYTES);
    assert_ok(fcdp__driver_copy_h2d(w->drv, base_at, base, bytes, w->stream));
    assert_ok(fcdp__driver_copy_h2d(w->drv, now_at, now, bytes, w->stream));
    assert_ok(fcdp__driver_host_dptr(w->drv, tasks, &tasks_at));
    assert_ok(fcdp__driver_host_dptr(w->drv, slots, &slots_at));
    fcdp__delta_tasks_fill(tasks, base_at, now_at, bytes, element_bytes, slots_at);
    assert_ok(fcdp__driver_launch(w->drv, &w->kernel, tasks_at, (uint32_t)n, w->stream));
    assert_ok(fcdp__driver_stream_sync(w->drv, w->stream));
    return fcdp__delta_wire_of_slots(slots, bytes, element_bytes, wire_out, capacity);
}

/* Block by block, `now` is the base, or some of its values have moved, by any distance up to one. */
static void arrays_fill(char *base, char *now, size_t bytes, unsigned element_bytes, test_random *seed) {
    for (size_t i = 0; i < bytes; i++) base[i] = (char)random_next(seed);
    memcpy(now, base, bytes);
    size_t block_bytes = (size_t)FCDP_DELTA_BLOCK * element_bytes;
    for (size_t at = 0; at < bytes; at += block_bytes) {
        static const uint32_t shares[] = {0, 1, 3, 30, 200, 500, 1000, 1000};
        uint32_t share = shares[random_below(seed, 8)], most = random_below(seed, 8 * element_bytes + 1);
        for (size_t i = at; i + element_bytes <= bytes && i < at + block_bytes; i += element_bytes) {
            uint32_t value = 0;
            memcpy(&value, now + i, element_bytes);
            if (random_below(seed, 1000) < share) value += (uint32_t)(random_next(seed) >> (64 - most) % 64);
            memcpy(now + i, &value, element_bytes);
        }
        if (bytes % element_bytes && random_below(seed, 2)) now[bytes - 1] ^= 1;
    }
}

static void test_the_device_encodes_as_the_cpu(void **state) {
    (void)state;
    static const size_t edges[] = {1,    2,    3,    4,    127,   128,   130,   4094,   4096,
                                   4098, 8191, 8192, 8200, 65535, 65536, 65538, 131072, MAX_BYTES};
    enum { N_EDGES = sizeof edges / sizeof *edges };
    const char *rounds = getenv("TEST_ROUNDS");
    int n_rounds = rounds ? atoi(rounds) : 8;
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    world w = world_create(MAX_BYTES);
    size_t bound = fcdp__delta_bound(MAX_BYTES);
    char *base = malloc(MAX_BYTES), *now = malloc(MAX_BYTES), *wire = malloc(bound),
         *expected = malloc(bound);
    for (int i = 0; i < n_rounds * N_EDGES; i++) {
        unsigned element_bytes = i & 1 ? 2 : 4;
        size_t bytes = i < 2 * N_EDGES ? edges[i / 2] : 1 + random_below(&seed, MAX_BYTES);
        size_t shift = random_below(&seed, 2) * random_below(&seed, SHIFTS / 4);
        arrays_fill(base, now, bytes, element_bytes, &seed);
        size_t n = fcdp__delta_encode(base, now, bytes, element_bytes, expected, bound);
        assert_int_equal(device_encode(&w, base, now, bytes, element_bytes, shift, wire, bound), n);
        if (memcmp(wire, expected, n) != 0)
            fail_msg("%zu bytes of width %u, shifted by %zu", bytes, element_bytes, shift);
        /* there is no room for all of it */
        size_t less = random_below(&seed, (uint32_t)n);
        assert_int_equal(device_encode(&w, base, now, bytes, element_bytes, shift, wire, less), 0);
    }
    free(expected);
    free(wire);
    free(now);
    free(base);
    world_destroy(&w);
}

/* Slots that no kernel has written, or one that is at fault: nothing beyond a slot is read. */
static void test_slots_without_sense_make_no_wire(void **state) {
    (void)state;
    enum { BYTES = FCDP_DELTA_TASK_BYTES };
    char *slots = malloc(FCDP_DELTA_SLOTS_BYTES), *wire = malloc(2 * BYTES);
    memset(slots, 0xff, FCDP_DELTA_SLOTS_BYTES);
    for (unsigned element_bytes = 2; element_bytes <= 4; element_bytes += 2)
        assert_int_equal(fcdp__delta_wire_of_slots(slots, BYTES, element_bytes, wire, 2 * BYTES), 0);
    free(wire);
    free(slots);
}

static void want(void *task) {
    ((fcdp_copy_if_task *)task)->wanted = 1;
}

/* The host says so behind the launch, before the stream comes to it. Else the device has what it had. */
static void test_copies_are_made_if_they_are_wanted(void **state) {
    (void)state;
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    world w = world_create(MAX_BYTES);
    fcdp_kernel kernel;
    fcdp_copy_if_task *tasks = (fcdp_copy_if_task *)(void *)w.pinned;
    fcdp_dptr tasks_at, from_at;
    char *had = malloc(MAX_BYTES), *has = malloc(MAX_BYTES);
    assert_ok(fcdp__driver_kernel_load(w.drv, &fcdp__copy_if_kernel, &kernel));
    assert_ok(fcdp__driver_host_dptr(w.drv, tasks, &tasks_at));
    assert_true(fcdp__copy_if_tasks_of(MAX_BYTES) == 2);
    for (int i = 0; i < 12; i++) {
        size_t bytes = i < 2 ? MAX_BYTES - SHIFTS : 1 + random_below(&seed, MAX_BYTES - SHIFTS);
        char *from = w.pinned + 2 * sizeof *tasks + (i % 2 ? random_below(&seed, SHIFTS) : 0);
        fcdp_dptr to = fcdp__dptr_add(w.device, i % 3 ? random_below(&seed, SHIFTS) : 0);
        size_t n = fcdp__copy_if_tasks_of(bytes), wanted = random_below(&seed, (uint32_t)n + 1);
        for (size_t k = 0; k < bytes; k++) {
            from[k] = (char)random_next(&seed);
            had[k] = (char)random_next(&seed);
        }
        assert_ok(fcdp__driver_copy_h2d(w.drv, to, had, bytes, w.stream));
        assert_ok(fcdp__driver_host_dptr(w.drv, from, &from_at));
        fcdp__copy_if_tasks_fill(tasks, to, from_at, bytes);
        if (wanted < n) assert_ok(fcdp__driver_host_function(w.drv, w.stream, want, &tasks[wanted]));
        assert_ok(fcdp__driver_launch(w.drv, &kernel, tasks_at, (uint32_t)n, w.stream));
        assert_ok(fcdp__driver_copy_d2h(w.drv, has, to, bytes, w.stream));
        assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
        if (wanted < n) {
            size_t at = wanted * FCDP_COPY_IF_TASK_BYTES;
            memcpy(had + at, from + at,
                   bytes - at < FCDP_COPY_IF_TASK_BYTES ? bytes - at : FCDP_COPY_IF_TASK_BYTES);
        }
        if (memcmp(has, had, bytes) != 0) fail_msg("%zu bytes, of which task %zu is wanted", bytes, wanted);
    }
    fcdp__driver_kernel_unload(w.drv, &kernel);
    free(has);
    free(had);
    world_destroy(&w);
}

/* ---- how fast ---- */

/* The best of ten, with the host's wait. */
static double seconds_of(world *w, size_t bytes, unsigned element_bytes, fcdp_dptr slots_at) {
    fcdp_delta_task *tasks = (fcdp_delta_task *)(void *)w->pinned;
    fcdp_dptr tasks_at, now_at = fcdp__dptr_add(w->device, w->room_bytes);
    double best = 1e9;
    assert_ok(fcdp__driver_host_dptr(w->drv, tasks, &tasks_at));
    fcdp__delta_tasks_fill(tasks, w->device, now_at, bytes, element_bytes, slots_at);
    for (int k = 0; k < 10; k++) {
        uint64_t start_ns = fcdp__now_ns();
        assert_ok(fcdp__driver_launch(w->drv, &w->kernel, tasks_at, (uint32_t)fcdp__delta_tasks_of(bytes),
                                      w->stream));
        assert_ok(fcdp__driver_stream_sync(w->drv, w->stream));
        double seconds = (double)(fcdp__now_ns() - start_ns) / 1e9;
        if (seconds < best) best = seconds;
    }
    return best;
}

/* Of the bytes of both arrays, in whole MiB: 4 MiB of weights, again and again. */
static void print_rate(size_t bytes, unsigned element_bytes, double lr) {
    enum { PART_BYTES = 4 << 20 };
    uint64_t state = 1;
    world w = world_create(bytes);
    char *base = malloc(PART_BYTES), *now = malloc(PART_BYTES), *wire = malloc(bytes);
    for (size_t i = 0; i < PART_BYTES; i += element_bytes) {
        double first, second;
        weights_normal_pair(&state, &first, &second);
        float before = weights_first(first), after = weights_next(before, second, lr);
        uint16_t halves[] = {weights_bf16(before), weights_bf16(after)};
        memcpy(base + i, element_bytes == 2 ? (void *)&halves[0] : &before, element_bytes);
        memcpy(now + i, element_bytes == 2 ? (void *)&halves[1] : &after, element_bytes);
    }
    for (size_t at = 0; at < bytes; at += PART_BYTES) {
        size_t here = bytes - at < PART_BYTES ? bytes - at : PART_BYTES;
        fcdp_dptr base_at = fcdp__dptr_add(w.device, at), now_at = fcdp__dptr_add(base_at, w.room_bytes);
        assert_ok(fcdp__driver_copy_h2d(w.drv, base_at, base, here, w.stream));
        assert_ok(fcdp__driver_copy_h2d(w.drv, now_at, now, here, w.stream));
    }
    assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
    char *slots = w.pinned + fcdp__delta_tasks_of(bytes) * sizeof(fcdp_delta_task);
    fcdp_dptr slots_at, near_at = fcdp__dptr_add(w.device, 2 * w.room_bytes);
    assert_ok(fcdp__driver_host_dptr(w.drv, slots, &slots_at));
    double near_s = seconds_of(&w, bytes, element_bytes, near_at);
    double s = seconds_of(&w, bytes, element_bytes, slots_at);
    size_t wire_bytes = fcdp__delta_wire_of_slots(slots, bytes, element_bytes, wire, bytes);
    printf("%s weights, lr %g, %.3f of the array: %s reads %.1f GB/s with slots on the device, %.1f in host "
           "memory\n",
           element_bytes == 2 ? "bf16" : "float32", lr, (double)wire_bytes / (double)bytes,
           fcdp__driver_is_sim(w.drv) ? "the simulated device" : "the device", 2e-9 * (double)bytes / near_s,
           2e-9 * (double)bytes / s);
    free(wire);
    free(now);
    free(base);
    world_destroy(&w);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_device_encodes_as_the_cpu),
        cmocka_unit_test(test_slots_without_sense_make_no_wire),
        cmocka_unit_test(test_copies_are_made_if_they_are_wanted),
    };
    if (argc > 1) {
        static const double rates[] = {3e-4, 1e-4, 1e-5, 0};
        for (unsigned element_bytes = 2; element_bytes <= 4; element_bytes += 2)
            for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
                print_rate(strtoull(argv[1], NULL, 0) << 20, element_bytes, rates[i]);
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
