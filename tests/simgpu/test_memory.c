/* Virtual memory: facts.md's rules of the CUDA driver, each refused where CUDA refuses it. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/simgpu/support.h"

static void fact_1_map_takes_offset_zero_and_the_whole_handle(void **state) {
    (void)state;
    CUdeviceptr at = range_make(4 * PAGE);
    CUmemGenericAllocationHandle handle = handle_make(2 * PAGE);
    REFUSED(cuMemMap(at, PAGE, PAGE, handle, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap(at, 2 * PAGE, PAGE, handle, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap(at, PAGE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap(at, 4 * PAGE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap(at, 2 * PAGE, 0, handle, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap(at + 3 * PAGE, 2 * PAGE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap(at + 4096, 2 * PAGE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(live_now().maps, 0);
    OK(cuMemMap(at, 2 * PAGE, 0, handle, 0));
}

static void fact_1_map_takes_unmapped_ranges_only(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    CUmemGenericAllocationHandle two = handle_make(2 * PAGE), one = handle_make(PAGE);
    bytes_at(pages.at)[0] = 7;
    REFUSED(cuMemMap(pages.at, PAGE, 0, one, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap(pages.at, 2 * PAGE, 0, two, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemUnmap(pages.at, PAGE));
    REFUSED(cuMemMap(pages.at, 2 * PAGE, 0, two, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemMap(pages.at, PAGE, 0, pages.handles[0], 0));
    OK(cuMemSetAccess(pages.at, PAGE, &read_only, 1));
    assert_int_equal(bytes_at(pages.at)[0], 7);
}

static void a_map_lies_inside_one_reservation(void **state) {
    (void)state;
    CUdeviceptr first = range_make(2 * PAGE), second;
    CUmemGenericAllocationHandle two = handle_make(2 * PAGE);
    OK(cuMemAddressReserve(&second, 2 * PAGE, 0, first + 2 * PAGE, 0));
    REFUSED(cuMemMap(first + PAGE, 2 * PAGE, 0, two, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemMap((uintptr_t)0x1000 * PAGE, 2 * PAGE, 0, two, 0), CUDA_ERROR_INVALID_VALUE);
}

static void fact_2_unmap_takes_whole_mappings_only(void **state) {
    (void)state;
    CUdeviceptr at = range_make(8 * PAGE);
    CUmemGenericAllocationHandle two = handle_make(2 * PAGE), one = handle_make(PAGE);
    OK(cuMemMap(at + PAGE, 2 * PAGE, 0, two, 0));
    OK(cuMemMap(at + 3 * PAGE, PAGE, 0, one, 0));
    REFUSED(cuMemUnmap(at + PAGE, PAGE), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemUnmap(at + 2 * PAGE, PAGE), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemUnmap(at + 2 * PAGE, 2 * PAGE), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemUnmap(at, 4 * PAGE), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemUnmap(at + PAGE, 4 * PAGE), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemUnmap(at + PAGE, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemUnmap(at + PAGE, (size_t)-1), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(live_now().maps, 2);
}

static void fact_2_one_unmap_covers_several_adjacent_maps(void **state) {
    (void)state;
    struct pages pages = pages_make(5);
    OK(cuMemUnmap(pages.at + PAGE, 3 * PAGE));
    assert_int_equal(live_now().maps, 2);
    assert_true(can_read(pages.at) && can_read(pages.at + 4 * PAGE));
    for (size_t i = 1; i < 4; i++) assert_false(can_read(pages.at + i * PAGE));
}

static void fact_2_new_maps_start_inaccessible(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned long long flags;
    assert_true(can_write(pages.at));
    OK(cuMemUnmap(pages.at, PAGE));
    assert_false(can_read(pages.at));
    REFUSED(cuMemGetAccess(&flags, &on_device, pages.at), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemMap(pages.at, PAGE, 0, pages.handles[0], 0));
    assert_false(can_read(pages.at));
    OK(cuMemGetAccess(&flags, &on_device, pages.at));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
}

static void fact_2_set_access_takes_one_fully_mapped_range(void **state) {
    (void)state;
    CUdeviceptr at = range_make(4 * PAGE);
    CUmemGenericAllocationHandle two = handle_make(2 * PAGE), one = handle_make(PAGE);
    OK(cuMemMap(at, 2 * PAGE, 0, two, 0));
    OK(cuMemMap(at + 3 * PAGE, PAGE, 0, one, 0));
    REFUSED(cuMemSetAccess(at, 4 * PAGE, &read_write, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemSetAccess(at, PAGE, &read_write, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemSetAccess(at + 2 * PAGE, PAGE, &read_write, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemSetAccess(at, 2 * PAGE, &read_write, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemSetAccess(at, 2 * PAGE, &(CUmemAccessDesc){on_device, 2}, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemSetAccess(at, 2 * PAGE, &(CUmemAccessDesc){{CU_MEM_LOCATION_TYPE_DEVICE, 1}, 3}, 1),
            CUDA_ERROR_INVALID_DEVICE);
    assert_false(can_read(at));
    OK(cuMemSetAccess(at, 2 * PAGE, &read_write, 1));
    assert_true(can_write(at) && can_write(at + 2 * PAGE - 1));
    assert_false(can_read(at + 3 * PAGE));
}

static void access_is_what_was_granted(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    unsigned long long flags;
    OK(cuMemSetAccess(pages.at, PAGE, &read_only, 1));
    assert_true(can_read(pages.at));
    assert_false(can_write(pages.at));
    OK(cuMemGetAccess(&flags, &on_device, pages.at + PAGE - 1));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_READ);
    assert_true(can_write(pages.at + PAGE));
    OK(cuMemSetAccess(pages.at, 2 * PAGE, &no_access, 1));
    assert_false(can_read(pages.at) || can_read(pages.at + PAGE));
    OK(cuMemSetAccess(pages.at, 2 * PAGE, &read_write, 1));
    assert_true(can_write(pages.at) && can_write(pages.at + PAGE));
}

static void fact_5_granularity_is_2_mib(void **state) {
    (void)state;
    size_t bytes = 0;
    CUmemGenericAllocationHandle handle;
    OK(cuMemGetAllocationGranularity(&bytes, &device_memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    assert_int_equal(bytes, PAGE);
    OK(cuMemGetAllocationGranularity(&bytes, &device_memory, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    assert_int_equal(bytes, PAGE);
    REFUSED(cuMemCreate(&handle, PAGE / 2, &device_memory, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemCreate(&handle, PAGE + 4096, &device_memory, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemCreate(&handle, 0, &device_memory, 0), CUDA_ERROR_INVALID_VALUE);
}

static void fact_5_reservations_are_host_pages_and_the_address_is_a_hint(void **state) {
    (void)state;
    CUdeviceptr at, again;
    REFUSED(cuMemAddressReserve(&at, 100, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemAddressReserve(&at, 0, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemAddressReserve(&at, PAGE, 3 * PAGE, 0, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemAddressReserve(&at, PAGE + 4096, 0, 0, 0));
    assert_int_equal(at % PAGE, 0);
    OK(cuMemAddressReserve(&again, PAGE, 0, at, 0)); /* taken: the hint is not followed */
    assert_true(again != at);
    OK(cuMemAddressFree(again, PAGE));
    OK(cuMemAddressFree(at, PAGE + 4096));
    OK(cuMemAddressReserve(&again, PAGE, 0, at, 0));
    assert_true(again == at);
    OK(cuMemAddressReserve(&again, PAGE, 64 * PAGE, 0, 0));
    assert_int_equal(again % (64 * PAGE), 0);
}

static void address_free_takes_whole_empty_reservations(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    REFUSED(cuMemAddressFree(pages.at, 2 * PAGE), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemUnmap(pages.at, 2 * PAGE));
    REFUSED(cuMemAddressFree(pages.at, PAGE), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemAddressFree(pages.at + PAGE, PAGE), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemAddressFree(pages.at, 2 * PAGE));
    REFUSED(cuMemAddressFree(pages.at, 2 * PAGE), CUDA_ERROR_INVALID_VALUE);
}

static void released_memory_lives_until_its_last_unmap(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    CUdeviceptr other = range_make(PAGE);
    OK(cuMemMap(other, PAGE, 0, pages.handles[0], 0));
    OK(cuMemSetAccess(other, PAGE, &read_write, 1));
    bytes_at(pages.at)[5] = 42;
    OK(cuMemRelease(pages.handles[0]));
    REFUSED(cuMemMap(other, PAGE, 0, pages.handles[0], 0), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(live_now().handles, 0);
    OK(cuMemUnmap(pages.at, PAGE));
    assert_int_equal(bytes_at(other)[5], 42);
    assert_int_equal(live_now().device_bytes, PAGE);
    OK(cuMemUnmap(other, PAGE));
    assert_int_equal(live_now().device_bytes, 0);
}

static void foreign_and_released_handles_are_refused(void **state) {
    (void)state;
    CUmemGenericAllocationHandle handle = handle_make(PAGE), stale = handle;
    CUstream stream;
    OK(cuStreamCreate(&stream, 0));
    OK(cuMemRelease(handle));
    REFUSED(cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemRelease(0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemRelease((uintptr_t)stream), CUDA_ERROR_INVALID_VALUE);
    handle = handle_make(PAGE); /* takes the released one's slot, not its identity */
    assert_true(handle != stale);
    REFUSED(cuMemRelease(stale), CUDA_ERROR_INVALID_VALUE);
}

static void capacity_is_the_sum_of_live_memory(void **state) {
    (void)state;
    size_t free_bytes, total_bytes;
    CUmemGenericAllocationHandle three, more;
    simgpu_set_capacity(4 * PAGE);
    OK(cuMemCreate(&three, 3 * PAGE, &device_memory, 0));
    OK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    assert_int_equal(free_bytes, PAGE);
    assert_int_equal(total_bytes, 4 * PAGE);
    REFUSED(cuMemCreate(&more, 2 * PAGE, &device_memory, 0), CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(live_now().handles, 1);
    REFUSED(cuMemCreate(&more, (size_t)1 << 62, &device_memory, 0), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemCreate(&more, PAGE, &exportable_memory, 0)); /* exportable memory counts alike */
    OK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    assert_int_equal(free_bytes, 0);
    OK(cuMemRelease(three));
    OK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    assert_int_equal(free_bytes, 3 * PAGE);
    simgpu_set_capacity(PAGE / 2);
    OK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    assert_int_equal(free_bytes, 0);
    REFUSED(cuMemCreate(&three, PAGE, &device_memory, 0), CUDA_ERROR_OUT_OF_MEMORY);
}

static void released_memory_comes_back_empty(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    memset(bytes_at(pages.at), 1, PAGE);
    pages_destroy(&pages);
    pages = pages_make(1);
    for (size_t i = 0; i < PAGE; i += 4096) assert_int_equal(bytes_at(pages.at)[i], 0);
}

static void fact_6_kinds_of_handles(void **state) {
    (void)state;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = device_memory;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
    REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    prop = device_memory;
    prop.location.id = 1;
    REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_DEVICE);
    prop = device_memory;
    prop.type = CU_MEM_ALLOCATION_TYPE_INVALID;
    REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemCreate(&handle, PAGE, &device_memory, 1), CUDA_ERROR_INVALID_VALUE);
    prop = device_memory;
    prop.allocFlags.gpuDirectRDMACapable = 1;
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
}

static void fact_7_host_memory_is_mapped_beside_device_memory(void **state) {
    (void)state;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}};
    const CUmemAccessDesc both[] = {read_write, {{CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, 3}};
    CUdeviceptr at = range_make(2 * PAGE);
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
    assert_int_equal(live_now().device_bytes, 0);
    OK(cuMemMap(at, PAGE, 0, handle, 0));
    OK(cuMemSetAccess(at, PAGE, both, 2));
    assert_true(can_write(at));
    unsigned long long flags;
    OK(cuMemGetAccess(&flags, &both[1].location, at));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemGenericAllocationHandle page = handle_make(PAGE); /* the CPU is not granted device pages */
    OK(cuMemMap(at + PAGE, PAGE, 0, page, 0));
    REFUSED(cuMemSetAccess(at + PAGE, PAGE, both, 2), CUDA_ERROR_INVALID_VALUE);
    assert_false(can_read(at + PAGE));
    prop.location.id = 1000;
    REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0};
    REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST, 0};
    REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
}

/* FCDP_SIM_ROOT describes a machine of which node 3 alone exists. */
static void host_memory_has_the_nodes_of_the_described_machine(void **state) {
    (void)state;
    static const char *const parts[] = {"/sys", "/devices", "/system", "/node", "/node3"};
    char root[] = "/tmp/fcdp-simgpu-XXXXXX", path[128];
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 3}};
    assert_non_null(mkdtemp(root));
    snprintf(path, sizeof path, "%s", root);
    for (int i = 0; i < 5; i++) assert_int_equal(mkdir(strcat(path, parts[i]), 0700), 0);
    setenv("FCDP_SIM_ROOT", root, 1);
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
    prop.location.id = 1;
    REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    unsetenv("FCDP_SIM_ROOT");
    prop.location.id = 3;
    if (access("/sys/devices/system/node/node3", F_OK) != 0)
        REFUSED(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    for (int i = 5; i-- > 0; path[strlen(path) - strlen(parts[i])] = '\0') assert_int_equal(rmdir(path), 0);
    assert_int_equal(rmdir(root), 0);
}

static void fact_10_a_remap_at_the_same_address_shows_the_new_memory(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    CUmemGenericAllocationHandle other = handle_make(PAGE);
    bytes_at(pages.at)[0] = 1;
    OK(cuMemUnmap(pages.at, PAGE));
    OK(cuMemMap(pages.at, PAGE, 0, other, 0));
    OK(cuMemSetAccess(pages.at, PAGE, &read_write, 1));
    assert_int_equal(bytes_at(pages.at)[0], 0);
    bytes_at(pages.at)[0] = 2;
    OK(cuMemUnmap(pages.at, PAGE));
    OK(cuMemMap(pages.at, PAGE, 0, pages.handles[0], 0));
    OK(cuMemSetAccess(pages.at, PAGE, &read_write, 1));
    assert_int_equal(bytes_at(pages.at)[0], 1);
}

static int count_in(const char *file, const char *text) {
    char line[512];
    int n = 0;
    FILE *stream = fopen(file, "r");
    while (fgets(line, sizeof line, stream))
        if (strstr(line, text)) n++;
    fclose(stream);
    return n;
}

static void fact_18_adjacent_pages_merge_in_the_kernels_table(void **state) {
    (void)state;
    if (getenv("TEST_EMULATED")) skip(); /* qemu-user makes up that table */
    struct pages pages = pages_make(64);
    assert_int_equal(count_in("/proc/self/maps", "fcdp-simgpu-device"), 1);
    OK(cuMemUnmap(pages.at + 8 * PAGE, 8 * PAGE));
    assert_int_equal(count_in("/proc/self/maps", "fcdp-simgpu-device"), 2);
    for (size_t i = 8; i < 16; i++) {
        OK(cuMemRelease(pages.handles[i])); /* freed slots are taken again, lowest first */
        pages.handles[i] = 0;
    }
    for (size_t i = 8; i < 16; i++) {
        pages.handles[i] = handle_make(PAGE);
        OK(cuMemMap(pages.at + i * PAGE, PAGE, 0, pages.handles[i], 0));
    }
    OK(cuMemSetAccess(pages.at, 64 * PAGE, &read_write, 1));
    assert_int_equal(count_in("/proc/self/maps", "fcdp-simgpu-device"), 1);
}

/* Where in the device's memfd the memory at an address lies. */
static size_t offset_of(CUdeviceptr at) {
    char line[512];
    unsigned long begin, end, offset, found = (unsigned long)-1;
    FILE *stream = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, stream))
        if (sscanf(line, "%lx-%lx %*s %lx", &begin, &end, &offset) == 3 && begin <= at && at < end)
            found = offset + (at - begin);
    fclose(stream);
    return found;
}

static void freed_neighbours_become_one_extent(void **state) {
    (void)state;
    static const unsigned orders[][3] = {{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}};
    for (size_t k = 0; k < sizeof orders / sizeof *orders; k++) {
        fresh_device(NULL);
        CUmemGenericAllocationHandle pages[5];
        CUdeviceptr at = range_make(3 * PAGE);
        for (int i = 0; i < 5; i++) pages[i] = handle_make(PAGE);
        for (int i = 0; i < 3; i++) OK(cuMemRelease(pages[1 + orders[k][i]]));
        OK(cuMemMap(at, 3 * PAGE, 0, handle_make(3 * PAGE), 0));
        assert_int_equal(offset_of(at), PAGE);
    }
}

static int open_descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++)
        if (fcntl(fd, F_GETFD) >= 0) n++;
    return n;
}

static void a_thousand_handles_need_one_descriptor(void **state) {
    (void)state;
    int before = open_descriptors();
    for (int i = 0; i < 1000; i++) handle_make(PAGE);
    assert_int_equal(open_descriptors(), before + 1);
    simgpu_reset();
    assert_int_equal(open_descriptors(), before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(fact_1_map_takes_offset_zero_and_the_whole_handle),
        test(fact_1_map_takes_unmapped_ranges_only),
        test(a_map_lies_inside_one_reservation),
        test(fact_2_unmap_takes_whole_mappings_only),
        test(fact_2_one_unmap_covers_several_adjacent_maps),
        test(fact_2_new_maps_start_inaccessible),
        test(fact_2_set_access_takes_one_fully_mapped_range),
        test(access_is_what_was_granted),
        test(fact_5_granularity_is_2_mib),
        test(fact_5_reservations_are_host_pages_and_the_address_is_a_hint),
        test(address_free_takes_whole_empty_reservations),
        test(released_memory_lives_until_its_last_unmap),
        test(foreign_and_released_handles_are_refused),
        test(capacity_is_the_sum_of_live_memory),
        test(released_memory_comes_back_empty),
        test(fact_6_kinds_of_handles),
        test(fact_7_host_memory_is_mapped_beside_device_memory),
        test(host_memory_has_the_nodes_of_the_described_machine),
        test(fact_10_a_remap_at_the_same_address_shows_the_new_memory),
        test(fact_18_adjacent_pages_merge_in_the_kernels_table),
        test(freed_neighbours_become_one_extent),
        test(a_thousand_handles_need_one_descriptor),
    };
    return cmocka_run_group_tests_name("simgpu memory", tests, NULL, NULL);
}
