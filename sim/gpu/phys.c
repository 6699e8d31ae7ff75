/* Physical memory: handles, what they refer to, and sharing it with other processes.
 *
 * Memory that cannot be exported lies in one memfd per location (one descriptor, however many handles).
 * Memory created with requestedHandleTypes POSIX_FD has a memfd of its own; its descriptor is what is
 * exported, and an importer's handle refers to the same pages. Only memory created here counts against this
 * process's device.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sim/gpu/arena.h"
#include "sim/gpu/internal.h"

#define SHARED_NAME_DEVICE "fcdp-simgpu-device-handle"
#define SHARED_NAME_HOST "fcdp-simgpu-host-handle"
#define MPOL_PREFERRED 1

/* refs = handles + maps */
struct sim_phys {
    size_t refs;
    size_t bytes;
    struct sim_arena *arena; /* NULL: a memfd of its own */
    int fd;
    size_t offset;
    ino_t inode; /* of the memfd of its own */
    struct sim_phys *next_shared;
    bool on_host;
    int numa_node; /* -1: anywhere */
    bool is_charged;
    bool was_granted; /* its pages probably exist */
    struct sim_history *history;
};

static struct sim_arena device_arena = {.name = "fcdp-simgpu-device"};
static struct sim_arena host_arena = {.name = "fcdp-simgpu-host"};
static struct sim_table handles = {.tag = 0x4D};
static struct sim_phys *shared; /* those with a memfd of their own */

void simgpu__phys_keep(struct sim_phys *phys) {
    phys->refs++;
}

static void give_memory_back(struct sim_phys *phys) {
    if (phys->arena) {
        simgpu__arena_give(phys->arena, phys->offset, phys->bytes);
        return;
    }
    close(phys->fd);
    struct sim_phys **link = &shared;
    while (*link != phys) link = &(*link)->next_shared;
    *link = phys->next_shared;
}

void simgpu__phys_drop(struct sim_phys *phys) {
    if (--phys->refs > 0) return;
    give_memory_back(phys);
    if (phys->is_charged) sim.used_bytes -= phys->bytes;
    simgpu__history_free(phys->history);
    free(phys);
}

static void drop_item(void *item) {
    simgpu__phys_drop(item);
}

struct sim_phys *simgpu__phys_of(CUmemGenericAllocationHandle handle) {
    return simgpu__table_get(&handles, handle);
}
size_t simgpu__phys_bytes(const struct sim_phys *phys) {
    return phys->bytes;
}
bool simgpu__phys_is_host(const struct sim_phys *phys) {
    return phys->on_host;
}
struct sim_history **simgpu__phys_history(struct sim_phys *phys) {
    return &phys->history;
}
size_t simgpu__phys_handles(void) {
    return handles.n_live;
}

/* Maps are dropped before (vspace), so the arenas are empty here. */
void simgpu__phys_reset(void) {
    simgpu__table_clear(&handles, drop_item);
    simgpu__arena_close(&device_arena);
    simgpu__arena_close(&host_arena);
}

bool simgpu__phys_grant(struct sim_phys *phys) {
    bool before = phys->was_granted;
    phys->was_granted = true;
    return before;
}

static int fd_of(const struct sim_phys *phys) {
    return phys->arena ? phys->arena->fd : phys->fd;
}

/* Not inherited by a forked child, as device addresses are not; huge pages
 * where the machine has them to give. */
bool simgpu__phys_place(const struct sim_phys *phys, void *address) {
    void *at = mmap(address, phys->bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd_of(phys),
                    (off_t)phys->offset);
    if (at == MAP_FAILED) return false;
    madvise(at, phys->bytes, MADV_DONTFORK);
    madvise(at, phys->bytes, MADV_HUGEPAGE);
    if (phys->numa_node >= 0) {
        unsigned long mask[16] = {0};
        mask[phys->numa_node / 64] = 1UL << phys->numa_node % 64;
        syscall(SYS_mbind, at, phys->bytes, MPOL_PREFERRED, mask, sizeof mask * 8, 0);
    }
    return true;
}

static bool fill_with_poison(const struct sim_phys *phys) {
    void *at = mmap(NULL, phys->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_of(phys), (off_t)phys->offset);
    if (at == MAP_FAILED) return false;
    memset(at, 0xA5, phys->bytes);
    munmap(at, phys->bytes);
    return true;
}

static void add_shared(struct sim_phys *phys, ino_t inode) {
    phys->inode = inode;
    phys->next_shared = shared;
    shared = phys;
}

static bool open_shared(struct sim_phys *phys) {
    struct stat about;
    const char *name = phys->on_host ? SHARED_NAME_HOST : SHARED_NAME_DEVICE;
    phys->fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (phys->fd < 0) return false;
    bool ok = ftruncate(phys->fd, (off_t)phys->bytes) == 0 &&
              fcntl(phys->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0 &&
              fstat(phys->fd, &about) == 0;
    if (!ok) {
        close(phys->fd);
        return false;
    }
    add_shared(phys, about.st_ino);
    return true;
}

static bool has_node(const char *root, int node) {
    char path[4096 + 64];
    snprintf(path, sizeof path, "%.4095s/sys/devices/system/node/node%d", root, node);
    return access(path, F_OK) == 0;
}

/* On the machine that FCDP_SIM_ROOT describes, else on this one. One without nodes has node 0. */
static bool numa_node_exists(int node) {
    const char *described = getenv("FCDP_SIM_ROOT"), *root = described ? described : "";
    if (node < 0 || node >= 1024) return false;
    return has_node(root, node) || (node == 0 && !has_node(root, 0));
}

static CUresult check_prop(const CUmemAllocationProp *prop) {
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    unsigned types = (unsigned)prop->requestedHandleTypes;
    if (types & CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED; /* needs an IMEX channel */
    if (types & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    if (prop->win32HandleMetaData || prop->allocFlags.gpuDirectRDMACapable > 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->allocFlags.compressionType || prop->allocFlags.usage) return CUDA_ERROR_NOT_SUPPORTED;
    switch (prop->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return prop->location.id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST: return types == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return numa_node_exists(prop->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuMemGetAllocationGranularity(size_t *bytes_out, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
    SIM_ENTER(cuMemGetAllocationGranularity);
    bool known_option = option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ||
                        option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    if (!bytes_out || !known_option) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_prop(prop);
    if (result != CUDA_SUCCESS) return result;
    *bytes_out = SIM_PAGE_BYTES;
    return CUDA_SUCCESS;
}

static struct sim_phys *phys_create(size_t bytes, const CUmemAllocationProp *prop) {
    struct sim_phys *phys = calloc(1, sizeof *phys);
    if (!phys) return NULL;
    phys->refs = 1;
    phys->bytes = bytes;
    phys->on_host = prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
    phys->numa_node = prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ? prop->location.id : -1;
    bool exportable = prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (!exportable) phys->arena = phys->on_host ? &host_arena : &device_arena;
    if (exportable ? !open_shared(phys) : !simgpu__arena_take(phys->arena, bytes, &phys->offset)) {
        free(phys);
        return NULL;
    }
    phys->is_charged = !phys->on_host;
    if (phys->is_charged) sim.used_bytes += bytes;
    if (sim.poison && !fill_with_poison(phys)) {
        simgpu__phys_drop(phys);
        return NULL;
    }
    return phys;
}

/* A new handle takes over the caller's reference, also when there is no memory for one. */
static CUresult hand_out(struct sim_phys *phys, CUmemGenericAllocationHandle *handle_out) {
    uint64_t id = phys ? simgpu__table_put(&handles, phys) : 0;
    if (!id) {
        if (phys) simgpu__phys_drop(phys);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle_out = id;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle_out, size_t bytes, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    SIM_ENTER(cuMemCreate);
    if (!handle_out || flags || bytes == 0 || bytes % SIM_PAGE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_prop(prop);
    if (result != CUDA_SUCCESS) return result;
    sim_lock();
    bool on_device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    bool fits = sim.used_bytes <= sim.capacity_bytes && bytes <= sim.capacity_bytes - sim.used_bytes;
    if (on_device && !fits) return sim_unlock_with(CUDA_ERROR_OUT_OF_MEMORY);
    return sim_unlock_with(hand_out(phys_create(bytes, prop), handle_out));
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    SIM_ENTER(cuMemRelease);
    sim_lock();
    struct sim_phys *phys = simgpu__table_take(&handles, handle);
    if (phys) simgpu__phys_drop(phys);
    return sim_unlock_with(phys ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemExportToShareableHandle(void *shareable_out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    SIM_ENTER(cuMemExportToShareableHandle);
    if (!shareable_out || flags) return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    struct sim_phys *phys = simgpu__phys_of(handle);
    if (!phys || phys->arena) return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(phys->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return sim_unlock_with(CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareable_out = fd;
    return sim_unlock_with(CUDA_SUCCESS);
}

/* A descriptor that some process's export made, and nothing else that happens to be open. */
static bool is_exported(int fd, bool *on_host_out) {
    char link[64], target[128];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return false;
    target[length] = '\0';
    *on_host_out = strncmp(target, "/memfd:" SHARED_NAME_HOST, sizeof "/memfd:" SHARED_NAME_HOST - 1) == 0;
    return *on_host_out ||
           strncmp(target, "/memfd:" SHARED_NAME_DEVICE, sizeof "/memfd:" SHARED_NAME_DEVICE - 1) == 0;
}

/* Importing what this process has already refers to the same memory; the descriptor stays the caller's. */
static struct sim_phys *phys_import(int fd) {
    struct stat about;
    bool on_host;
    if (!is_exported(fd, &on_host) || fstat(fd, &about) != 0) return NULL;
    for (struct sim_phys *phys = shared; phys; phys = phys->next_shared)
        if (phys->inode == about.st_ino) {
            simgpu__phys_keep(phys);
            return phys;
        }
    struct sim_phys *phys = calloc(1, sizeof *phys);
    if (!phys) return NULL;
    *phys = (struct sim_phys){.refs = 1, .bytes = (size_t)about.st_size, .on_host = on_host, .numa_node = -1};
    phys->was_granted = true;
    phys->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (phys->fd < 0) {
        free(phys);
        return NULL;
    }
    add_shared(phys, about.st_ino);
    return phys;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle_out, void *shareable,
                                        CUmemAllocationHandleType type) {
    SIM_ENTER(cuMemImportFromShareableHandle);
    if (!handle_out) return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    struct sim_phys *phys = phys_import((int)(intptr_t)shareable);
    if (!phys) return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    return sim_unlock_with(hand_out(phys, handle_out));
}
