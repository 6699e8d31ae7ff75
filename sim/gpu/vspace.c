/* Virtual addresses: reservations, maps and access, with CUDA's rules enforced and not forgiven.
 *
 * A reservation is a PROT_NONE mmap; a map puts a handle's memfd range over it; SetAccess is an mprotect. So
 * what CUDA would fault on faults here too, with the CPU's threads in the part of the GPU's.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim/gpu/internal.h"

struct map {
    uintptr_t address;
    size_t bytes;
    struct sim_phys *phys;
    uint8_t device_access; /* CUmemAccess_flags */
    uint8_t host_access;   /* of memory located on the host */
};

/* Maps are sorted by address, whole within the range, and do not overlap. */
struct range {
    uintptr_t address;
    size_t bytes;
    size_t n_maps;
    size_t n_maps_capacity;
    struct map *maps;
};

static struct range **ranges; /* sorted by address */
static size_t n_ranges, n_ranges_capacity;
static size_t n_maps_total;

/* The first index whose range, or map, ends behind `address`. */
static size_t range_index(uintptr_t address) {
    size_t low = 0, high = n_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle]->address + ranges[middle]->bytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static size_t map_index(const struct range *range, uintptr_t address) {
    size_t low = 0, high = range->n_maps;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (range->maps[middle].address + range->maps[middle].bytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The reservation that holds all of [address, address + bytes), NULL without one. */
static struct range *range_around(uintptr_t address, size_t bytes) {
    size_t i = range_index(address);
    if (i == n_ranges || ranges[i]->address > address) return NULL;
    uintptr_t end = ranges[i]->address + ranges[i]->bytes;
    return bytes <= end - address ? ranges[i] : NULL;
}

/* The maps that touch [address, address + bytes) and whether they leave no gap in it. */
struct cover {
    struct map *maps;
    size_t n;
    bool is_full;
    bool is_whole; /* full, and no map reaches beyond it */
};

static struct cover cover_of(struct range *range, uintptr_t address, size_t bytes) {
    size_t first = map_index(range, address), i = first;
    uintptr_t reached = address, end = address + bytes;
    struct cover cover = {
        .maps = range->maps ? range->maps + first : NULL, .is_full = true, .is_whole = true};
    for (; i < range->n_maps && range->maps[i].address < end; i++) {
        const struct map *map = &range->maps[i];
        if (map->address > reached) cover.is_full = false;
        reached = map->address + map->bytes;
    }
    cover.n = i - first;
    if (cover.n == 0 || reached < end) cover.is_full = false;
    cover.is_whole = cover.is_full && cover.maps[0].address == address && reached == end;
    return cover;
}

/* ---- questions of the other files ---- */

enum sim_place simgpu__vspace_place(uintptr_t address, size_t bytes) {
    size_t i = range_index(address);
    if (i == n_ranges || ranges[i]->address >= address + bytes) return SIM_FOREIGN;
    return range_around(address, bytes) ? SIM_RESERVED : SIM_MIXED;
}

bool simgpu__vspace_granted(uintptr_t address, size_t bytes, bool write) {
    struct range *range = range_around(address, bytes);
    if (!range) return false;
    struct cover cover = cover_of(range, address, bytes);
    uint8_t wanted = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    for (size_t i = 0; i < cover.n; i++)
        if ((cover.maps[i].device_access & wanted) != wanted) return false;
    return cover.is_full;
}

bool simgpu__vspace_is_host(uintptr_t address, size_t bytes) {
    struct range *range = range_around(address, bytes);
    if (!range) return false;
    struct cover cover = cover_of(range, address, bytes);
    for (size_t i = 0; i < cover.n; i++)
        if (!simgpu__phys_is_host(cover.maps[i].phys)) return false;
    return cover.is_full;
}

void simgpu__vspace_visit(uintptr_t address, size_t bytes, sim_visit *visit, void *context) {
    struct range *range = range_around(address, bytes);
    if (!range) return;
    struct cover cover = cover_of(range, address, bytes);
    for (size_t i = 0; i < cover.n; i++) {
        const struct map *map = &cover.maps[i];
        uintptr_t begin = address > map->address ? address : map->address;
        uintptr_t end = address + bytes, map_end = map->address + map->bytes;
        if (end > map_end) end = map_end;
        if (!visit(context, simgpu__phys_history(map->phys), begin - map->address, end - begin, map->address))
            return;
    }
}

struct sim_key simgpu__vspace_key(uintptr_t address) {
    struct range *range = range_around(address, 1);
    struct cover cover = range ? cover_of(range, address, 1) : (struct cover){0};
    if (cover.n == 0) return (struct sim_key){.offset = address};
    return (struct sim_key){.base = (uintptr_t)cover.maps[0].phys, .offset = address - cover.maps[0].address};
}

void simgpu__vspace_count(size_t *n_ranges_out, size_t *n_maps_out) {
    *n_ranges_out = n_ranges;
    *n_maps_out = n_maps_total;
}

/* ---- reservations ---- */

static void *reserve_pages(size_t bytes, size_t alignment, uintptr_t hint) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint && hint % alignment == 0) {
        void *at = mmap((void *)hint, bytes, PROT_NONE, flags, -1, 0);
        if (at != MAP_FAILED && (uintptr_t)at % alignment == 0) return at;
        if (at != MAP_FAILED) munmap(at, bytes);
    }
    if (bytes > SIZE_MAX - alignment) return NULL;
    char *at = mmap(NULL, bytes + alignment, PROT_NONE, flags, -1, 0);
    if (at == MAP_FAILED) return NULL;
    size_t before = (alignment - (uintptr_t)at % alignment) % alignment;
    if (before) munmap(at, before);
    munmap(at + before + bytes, alignment - before);
    return at + before;
}

static bool ranges_grow(void) {
    if (n_ranges < n_ranges_capacity) return true;
    size_t n = n_ranges_capacity ? 2 * n_ranges_capacity : 16;
    struct range **grown = realloc(ranges, n * sizeof *grown);
    if (!grown) return false;
    ranges = grown;
    n_ranges_capacity = n;
    return true;
}

CUresult cuMemAddressReserve(CUdeviceptr *address_out, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    SIM_ENTER(cuMemAddressReserve);
    size_t host_page = (size_t)sysconf(_SC_PAGESIZE);
    if (!address_out || flags || bytes == 0 || bytes % host_page || hint % host_page)
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
    if (alignment < SIM_PAGE_BYTES) alignment = SIM_PAGE_BYTES;
    sim_lock();
    struct range *range = calloc(1, sizeof *range);
    void *at = range && ranges_grow() ? reserve_pages(bytes, alignment, hint) : NULL;
    if (!at) {
        free(range);
        return sim_unlock_with(CUDA_ERROR_OUT_OF_MEMORY);
    }
    range->address = (uintptr_t)at;
    range->bytes = bytes;
    size_t i = range_index(range->address);
    memmove(&ranges[i + 1], &ranges[i], (n_ranges - i) * sizeof *ranges);
    ranges[i] = range;
    n_ranges++;
    *address_out = range->address;
    return sim_unlock_with(CUDA_SUCCESS);
}

static void range_destroy(struct range *range) {
    munmap((void *)range->address, range->bytes);
    free(range->maps);
    free(range);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    SIM_ENTER(cuMemAddressFree);
    sim_lock();
    size_t i = range_index(address);
    bool is_one = i < n_ranges && ranges[i]->address == address && ranges[i]->bytes == bytes;
    if (!is_one || ranges[i]->n_maps > 0) return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    range_destroy(ranges[i]);
    n_ranges--;
    memmove(&ranges[i], &ranges[i + 1], (n_ranges - i) * sizeof *ranges);
    return sim_unlock_with(CUDA_SUCCESS);
}

void simgpu__vspace_reset(void) {
    for (size_t i = 0; i < n_ranges; i++) {
        for (size_t k = 0; k < ranges[i]->n_maps; k++) simgpu__phys_drop(ranges[i]->maps[k].phys);
        range_destroy(ranges[i]);
    }
    free(ranges);
    ranges = NULL;
    n_ranges = n_ranges_capacity = n_maps_total = 0;
}

/* ---- maps ---- */

static bool maps_grow(struct range *range) {
    if (range->n_maps < range->n_maps_capacity) return true;
    size_t n = range->n_maps_capacity ? 2 * range->n_maps_capacity : 16;
    struct map *grown = realloc(range->maps, n * sizeof *grown);
    if (!grown) return false;
    range->maps = grown;
    range->n_maps_capacity = n;
    return true;
}

static CUresult map_locked(uintptr_t address, size_t bytes, CUmemGenericAllocationHandle handle) {
    struct sim_phys *phys = simgpu__phys_of(handle);
    struct range *range = range_around(address, bytes);
    if (!phys || !range || bytes != simgpu__phys_bytes(phys)) return CUDA_ERROR_INVALID_VALUE;
    if (cover_of(range, address, bytes).n > 0) return CUDA_ERROR_INVALID_VALUE;
    if (!maps_grow(range) || !simgpu__phys_place(phys, (void *)address)) return CUDA_ERROR_OUT_OF_MEMORY;
    simgpu__phys_keep(phys);
    size_t i = map_index(range, address);
    memmove(&range->maps[i + 1], &range->maps[i], (range->n_maps - i) * sizeof *range->maps);
    range->maps[i] = (struct map){.address = address, .bytes = bytes, .phys = phys};
    range->n_maps++;
    n_maps_total++;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    SIM_ENTER(cuMemMap);
    if (offset || flags || bytes == 0 || bytes % SIM_PAGE_BYTES || address % SIM_PAGE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    return sim_unlock_with(map_locked(address, bytes, handle));
}

static bool is_known_to_be_over(const struct cover *cover) {
    for (size_t i = 0; i < cover->n; i++)
        if (!simgpu__order_check_unmap(*simgpu__phys_history(cover->maps[i].phys), cover->maps[i].address))
            return false;
    return true;
}

/* Work that is queued or runs on the memory makes this an illegal access, after
 * which nothing is unmapped any more. */
static CUresult unmap_locked(uintptr_t address, size_t bytes) {
    struct range *range = range_around(address, bytes);
    struct cover cover = range ? cover_of(range, address, bytes) : (struct cover){0};
    if (!cover.is_whole) return CUDA_ERROR_INVALID_VALUE;
    if (simgpu__stream_uses(address, bytes, false)) {
        simgpu__sticky_set(CUDA_ERROR_ILLEGAL_ADDRESS);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (!is_known_to_be_over(&cover)) {
        simgpu__sticky_set(CUDA_ERROR_ILLEGAL_ADDRESS);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < cover.n; i++) {
        simgpu__history_unmap(*simgpu__phys_history(cover.maps[i].phys), cover.maps[i].address);
        simgpu__phys_drop(cover.maps[i].phys);
    }
    struct map *behind = cover.maps + cover.n;
    memmove(cover.maps, behind, (size_t)(range->maps + range->n_maps - behind) * sizeof *behind);
    range->n_maps -= cover.n;
    n_maps_total -= cover.n;
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    SIM_ENTER(cuMemUnmap);
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    return sim_unlock_with(unmap_locked(address, bytes));
}

/* ---- access ---- */

static bool is_host_location(CUmemLocationType type) {
    return type == CU_MEM_LOCATION_TYPE_HOST || type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
}

static CUresult check_desc(const CUmemAccessDesc *desc, const struct cover *cover) {
    if (desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    if (desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return desc->location.id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    if (!is_host_location(desc->location.type)) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < cover->n; i++)
        if (!simgpu__phys_is_host(cover->maps[i].phys)) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* The CPU plays the device and itself, so a page allows what either of them may do. */
static int protection_of(unsigned access) {
    if (access & (CU_MEM_ACCESS_FLAGS_PROT_READWRITE & ~CU_MEM_ACCESS_FLAGS_PROT_READ))
        return PROT_READ | PROT_WRITE;
    return access ? PROT_READ : PROT_NONE;
}

/* Memory that was in use before is entered into the page table here, as a driver does: a read at every 64 KiB
 * makes the kernel map what is around it, where faults at the first write come page by page (measured: 140
 * against 1100 microseconds per 2 MiB). Untouched memory stays sparse. */
static void enter_pages(const struct map *map) {
    for (size_t at = 0; at < map->bytes; at += 65536) (void)*(volatile const char *)(map->address + at);
}

static void note_grant(const struct map *map, unsigned access_before) {
    bool becomes_accessible = !access_before && (map->device_access | map->host_access);
    if (becomes_accessible && simgpu__phys_grant(map->phys)) enter_pages(map);
}

/* What one call sets, and for which location. */
struct grant {
    bool sets_device, sets_host;
    unsigned device, host; /* CUmemAccess_flags */
};

static unsigned device_access_after(const struct map *map, const struct grant *grant) {
    return grant->sets_device ? grant->device : map->device_access;
}

static unsigned host_access_after(const struct map *map, const struct grant *grant) {
    return grant->sets_host ? grant->host : map->host_access;
}

/* One mprotect per run of maps that end up alike, since adjacent maps with
 * equal protection merge in the kernel. */
static bool protect(const struct cover *cover, const struct grant *grant) {
    for (size_t i = 0; i < cover->n;) {
        uintptr_t begin = cover->maps[i].address, end = begin;
        int protection = -1;
        for (; i < cover->n; i++) {
            const struct map *map = &cover->maps[i];
            int wanted = protection_of(device_access_after(map, grant) | host_access_after(map, grant));
            if (protection != -1 && wanted != protection) break;
            protection = wanted;
            end = map->address + map->bytes;
        }
        if (mprotect((void *)begin, end - begin, protection) != 0) return false;
    }
    return true;
}

static CUresult read_descs(const struct cover *cover, const CUmemAccessDesc *descs, size_t n_descs,
                           struct grant *grant_out) {
    *grant_out = (struct grant){0};
    for (size_t i = 0; i < n_descs; i++) {
        CUresult result = check_desc(&descs[i], cover);
        if (result != CUDA_SUCCESS) return result;
        bool of_device = descs[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        *(of_device ? &grant_out->sets_device : &grant_out->sets_host) = true;
        *(of_device ? &grant_out->device : &grant_out->host) = descs[i].flags;
    }
    return CUDA_SUCCESS;
}

static bool takes_from_device(const struct cover *cover, const struct grant *grant) {
    for (size_t i = 0; i < cover->n; i++)
        if (cover->maps[i].device_access & ~device_access_after(&cover->maps[i], grant)) return true;
    return false;
}

static CUresult set_access_locked(const struct cover *cover, uintptr_t address, size_t bytes,
                                  const struct grant *grant) {
    if (takes_from_device(cover, grant) && simgpu__stream_uses(address, bytes, true)) {
        simgpu__sticky_set(CUDA_ERROR_ILLEGAL_ADDRESS);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (!protect(cover, grant)) {
        protect(cover, &(struct grant){0}); /* the kernel is out of map entries: back to what was */
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < cover->n; i++) {
        struct map *map = &cover->maps[i];
        unsigned before = map->device_access | map->host_access;
        map->device_access = (uint8_t)device_access_after(map, grant);
        map->host_access = (uint8_t)host_access_after(map, grant);
        note_grant(map, before);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *descs, size_t n_descs) {
    SIM_ENTER(cuMemSetAccess);
    if (bytes == 0 || !descs || n_descs == 0) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    struct range *range = range_around(address, bytes);
    struct cover cover = range ? cover_of(range, address, bytes) : (struct cover){0};
    if (!cover.is_whole) return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    struct grant grant;
    CUresult result = read_descs(&cover, descs, n_descs, &grant);
    return sim_unlock_with(result == CUDA_SUCCESS ? set_access_locked(&cover, address, bytes, &grant)
                                                  : result);
}

CUresult cuMemGetAccess(unsigned long long *flags_out, const CUmemLocation *location, CUdeviceptr address) {
    SIM_ENTER(cuMemGetAccess);
    if (!flags_out || !location) return CUDA_ERROR_INVALID_VALUE;
    bool of_device = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (of_device && location->id != 0) return CUDA_ERROR_INVALID_DEVICE;
    if (!of_device && !is_host_location(location->type)) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    struct range *range = range_around(address, 1);
    struct cover cover = range ? cover_of(range, address, 1) : (struct cover){0};
    if (cover.n == 0) return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    *flags_out = of_device ? cover.maps[0].device_access : cover.maps[0].host_access;
    return sim_unlock_with(CUDA_SUCCESS);
}
