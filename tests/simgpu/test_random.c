/* A seeded random schedule of reservations, handles, maps, grants, unmaps and
 * releases against an oracle: a plain table of pages that says of every call
 * whether CUDA takes it, and what each page holds and allows afterwards.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/simgpu/support.h"

#define N_STEPS 6000
#define N_RANGES 6
#define N_HANDLES 24
#define MOST_RANGE_PAGES 12
#define MOST_HANDLE_PAGES 3
#define CAPACITY_PAGES 30

/* mem: the oracle's physical memory; a handle and every map of it count as references */
struct mem {
    unsigned refs;
    size_t n_pages;
    unsigned char stamp[MOST_HANDLE_PAGES]; /* each page's first byte */
};

struct slot { /* one page of a range */
    struct mem *mem;
    size_t page_of_mem, first_slot, n_slots; /* the map that it is part of */
    unsigned access;
};

static struct range {
    CUdeviceptr at;
    size_t n_pages; /* 0: not reserved */
    struct slot slots[MOST_RANGE_PAGES];
} ranges[N_RANGES];

static struct {
    CUmemGenericAllocationHandle id;
    struct mem *mem; /* NULL: none */
} handles[N_HANDLES];

static size_t used_pages;
static uint64_t random_state;

static unsigned pick(unsigned n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % n;
}

static void mem_drop(struct mem *mem) {
    if (--mem->refs > 0) return;
    used_pages -= mem->n_pages;
    free(mem);
}

static void step_create(void) {
    unsigned i = pick(N_HANDLES);
    if (handles[i].mem) return;
    size_t n = 1 + pick(MOST_HANDLE_PAGES);
    CUresult expected = used_pages + n <= CAPACITY_PAGES ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    assert_int_equal(cuMemCreate(&handles[i].id, n * PAGE, pick(4) ? &device_memory : &exportable_memory, 0),
                     expected);
    if (expected != CUDA_SUCCESS) return;
    handles[i].mem = calloc(1, sizeof *handles[i].mem);
    *handles[i].mem = (struct mem){.refs = 1, .n_pages = n};
    used_pages += n;
}

static void step_release(void) {
    unsigned i = pick(N_HANDLES);
    CUresult expected = handles[i].mem ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* also a second release */
    assert_int_equal(cuMemRelease(handles[i].id), expected);
    if (handles[i].mem) mem_drop(handles[i].mem);
    handles[i].mem = NULL;
}

static void step_reserve(void) {
    struct range *range = &ranges[pick(N_RANGES)];
    if (range->n_pages) return;
    memset(range, 0, sizeof *range);
    range->n_pages = 1 + pick(MOST_RANGE_PAGES);
    range->at = range_make(range->n_pages * PAGE);
}

static void step_free(void) {
    struct range *range = &ranges[pick(N_RANGES)];
    if (!range->n_pages) return;
    bool is_empty = true;
    for (size_t i = 0; i < range->n_pages; i++)
        if (range->slots[i].mem) is_empty = false;
    assert_int_equal(cuMemAddressFree(range->at, range->n_pages * PAGE),
                     is_empty ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    if (is_empty) range->n_pages = 0;
}

static void step_map(void) {
    struct range *range = &ranges[pick(N_RANGES)];
    unsigned h = pick(N_HANDLES);
    if (!range->n_pages) return;
    size_t first = pick((unsigned)range->n_pages), n = 1 + pick(MOST_HANDLE_PAGES);
    bool fits = handles[h].mem && handles[h].mem->n_pages == n && first + n <= range->n_pages;
    for (size_t i = first; fits && i < first + n; i++)
        if (range->slots[i].mem) fits = false;
    assert_int_equal(cuMemMap(range->at + first * PAGE, n * PAGE, 0, handles[h].id, 0),
                     fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    if (!fits) return;
    handles[h].mem->refs++;
    for (size_t i = 0; i < n; i++) range->slots[first + i] = (struct slot){handles[h].mem, i, first, n, 0};
}

/* Pages [first, first + n) are exactly some maps, side by side. */
static bool are_whole_maps(const struct range *range, size_t first, size_t n) {
    if (first + n > range->n_pages) return false;
    for (size_t i = first; i < first + n; i++) {
        const struct slot *slot = &range->slots[i];
        if (!slot->mem || slot->first_slot < first || slot->first_slot + slot->n_slots > first + n)
            return false;
    }
    return true;
}

static void step_unmap(void) {
    struct range *range = &ranges[pick(N_RANGES)];
    if (!range->n_pages) return;
    size_t first = pick((unsigned)range->n_pages), n = 1 + pick(5);
    bool whole = are_whole_maps(range, first, n);
    assert_int_equal(cuMemUnmap(range->at + first * PAGE, n * PAGE),
                     whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    for (size_t i = first; whole && i < first + n; i++) {
        if (range->slots[i].first_slot == i) mem_drop(range->slots[i].mem);
        range->slots[i].mem = NULL;
    }
}

static void step_access(void) {
    static const unsigned kinds[] = {CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READ,
                                     CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    struct range *range = &ranges[pick(N_RANGES)];
    if (!range->n_pages) return;
    size_t first = pick((unsigned)range->n_pages), n = 1 + pick(5);
    unsigned access = kinds[pick(3)];
    bool whole = are_whole_maps(range, first, n);
    CUmemAccessDesc desc = {on_device, (CUmemAccess_flags)access};
    assert_int_equal(cuMemSetAccess(range->at + first * PAGE, n * PAGE, &desc, 1),
                     whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    for (size_t i = first; whole && i < first + n; i++) range->slots[i].access = access;
}

/* One page is looked at, by loads and stores where it allows them, and rewritten. */
static void step_touch(void) {
    struct range *range = &ranges[pick(N_RANGES)];
    if (!range->n_pages) return;
    size_t i = pick((unsigned)range->n_pages);
    struct slot *slot = &range->slots[i];
    CUdeviceptr at = range->at + i * PAGE;
    unsigned access = slot->mem ? slot->access : 0;
    assert_int_equal(can_read(at), access != 0);
    assert_int_equal(can_write(at), access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (access) assert_int_equal(*bytes_at(at), slot->mem->stamp[slot->page_of_mem]);
    if (access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        *bytes_at(at) = slot->mem->stamp[slot->page_of_mem] = (unsigned char)pick(256);
}

/* The same, by a stream's fill of whole pages; only where it is legal, since the error would stay. */
static void step_fill(void) {
    struct range *range = &ranges[pick(N_RANGES)];
    if (!range->n_pages) return;
    size_t i = pick((unsigned)range->n_pages);
    struct slot *slot = &range->slots[i];
    if (!slot->mem || slot->access != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return;
    unsigned char value = (unsigned char)pick(256);
    OK(cuMemsetD8Async(range->at + i * PAGE, value, 4096, NULL));
    OK(cuStreamSynchronize(NULL));
    slot->mem->stamp[slot->page_of_mem] = value;
}

static void compare_counts(void) {
    struct simgpu_live live = live_now();
    size_t n_handles = 0, n_ranges = 0, n_maps = 0;
    for (size_t i = 0; i < N_HANDLES; i++) n_handles += handles[i].mem != NULL;
    for (size_t r = 0; r < N_RANGES; r++) {
        n_ranges += ranges[r].n_pages != 0;
        for (size_t i = 0; i < ranges[r].n_pages; i++)
            n_maps += ranges[r].slots[i].mem && ranges[r].slots[i].first_slot == i;
    }
    assert_int_equal(live.handles, n_handles);
    assert_int_equal(live.ranges, n_ranges);
    assert_int_equal(live.maps, n_maps);
    assert_int_equal(live.device_bytes, used_pages * PAGE);
}

static void oracle_clear(void) {
    for (size_t i = 0; i < N_HANDLES; i++) {
        if (handles[i].mem) mem_drop(handles[i].mem);
        handles[i].mem = NULL;
    }
    for (size_t r = 0; r < N_RANGES; r++) {
        for (size_t i = 0; i < ranges[r].n_pages; i++)
            if (ranges[r].slots[i].mem && ranges[r].slots[i].first_slot == i)
                mem_drop(ranges[r].slots[i].mem);
        ranges[r].n_pages = 0;
    }
}

static void the_schedule_goes_as_the_oracle_says(void **state) {
    (void)state;
    static void (*const steps[])(void) = {step_create, step_release, step_reserve, step_free,   step_map,
                                          step_map,    step_map,     step_unmap,   step_access, step_access,
                                          step_touch,  step_touch,   step_fill};
    const char *given = getenv("FCDP_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    print_message("FCDP_TEST_SEED=%llu\n", (unsigned long long)seed);
    random_state = seed;
    simgpu_set_capacity(CAPACITY_PAGES * PAGE);
    for (int i = 0; i < N_STEPS; i++) {
        steps[pick(sizeof steps / sizeof *steps)]();
        compare_counts();
    }
    oracle_clear();
    assert_int_equal(used_pages, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {test(the_schedule_goes_as_the_oracle_says)};
    return cmocka_run_group_tests_name("simgpu random", tests, NULL, NULL);
}
