/* Host memory that CUDA knows: registered (pinned) ranges. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sim/gpu/internal.h"

/* Newer drivers refuse larger ones. */
#define MOST_BYTES ((size_t)512 << 30)

struct registration {
    uintptr_t address;
    size_t bytes;
    bool is_mapped; /* for the device: CU_MEMHOSTREGISTER_DEVICEMAP */
    struct sim_history *history;
};

static struct registration *registrations; /* sorted by address, disjoint */
static size_t n_registrations, n_capacity;

/* The first registration that ends behind `address`. */
static size_t index_of(uintptr_t address) {
    size_t low = 0, high = n_registrations;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (registrations[middle].address + registrations[middle].bytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

enum sim_place simgpu__host_place(uintptr_t address, size_t bytes) {
    size_t i = index_of(address);
    if (i == n_registrations || registrations[i].address >= address + bytes) return SIM_FOREIGN;
    const struct registration *one = &registrations[i];
    bool inside = one->address <= address && address + bytes <= one->address + one->bytes;
    return inside ? SIM_PINNED : SIM_MIXED;
}

void simgpu__host_visit(uintptr_t address, size_t bytes, sim_visit *visit, void *context) {
    struct registration *one = &registrations[index_of(address)];
    visit(context, &one->history, address - one->address, bytes, one->address);
}

/* The system calls themselves, since sanitizers make mlock and munlock do nothing. */
static bool lock_pages(void *address, size_t bytes) {
    return syscall(SYS_mlock, address, bytes) == 0;
}
static void unpin(void *address, size_t bytes) {
    syscall(SYS_munlock, address, bytes);
}

size_t simgpu__host_count(void) {
    return n_registrations;
}

void simgpu__host_reset(void) {
    for (size_t i = 0; i < n_registrations; i++) {
        unpin((void *)registrations[i].address, registrations[i].bytes);
        simgpu__history_free(registrations[i].history);
    }
    free(registrations);
    registrations = NULL;
    n_registrations = n_capacity = 0;
}

static bool grow(void) {
    if (n_registrations < n_capacity) return true;
    size_t n = n_capacity ? 2 * n_capacity : 16;
    struct registration *grown = realloc(registrations, n * sizeof *grown);
    if (!grown) return false;
    registrations = grown;
    n_capacity = n;
    return true;
}

/* msync touches no page and answers ENOMEM for a range that is not mapped throughout. */
static bool is_mapped(void *address, size_t bytes) {
    return msync(address, bytes, MS_ASYNC) == 0 || errno != ENOMEM;
}

static CUresult pin(void *address, size_t bytes) {
    if (!is_mapped(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (lock_pages(address, bytes)) return CUDA_SUCCESS;
    int error = errno;
    unpin(address, bytes); /* what it locked before it failed */
    return error == EAGAIN ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult register_locked(void *address, size_t bytes, bool is_mapped) {
    uintptr_t begin = (uintptr_t)address;
    if (simgpu__vspace_place(begin, bytes) != SIM_FOREIGN) return CUDA_ERROR_INVALID_VALUE;
    if (simgpu__host_place(begin, bytes) != SIM_FOREIGN) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!grow()) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = pin(address, bytes);
    if (result != CUDA_SUCCESS) return result;
    size_t i = index_of(begin);
    memmove(&registrations[i + 1], &registrations[i], (n_registrations - i) * sizeof *registrations);
    registrations[i] = (struct registration){.address = begin, .bytes = bytes, .is_mapped = is_mapped};
    n_registrations++;
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags) {
    SIM_ENTER(cuMemHostRegister_v2);
    size_t host_page = (size_t)sysconf(_SC_PAGESIZE);
    if (!address || bytes == 0 || (uintptr_t)address % host_page || bytes % host_page || bytes >= MOST_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & (CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY)) return CUDA_ERROR_NOT_SUPPORTED;
    if (flags & ~(unsigned)(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
        return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    return sim_unlock_with(register_locked(address, bytes, flags & CU_MEMHOSTREGISTER_DEVICEMAP));
}

static CUresult unregister_locked(void *address) {
    size_t i = index_of((uintptr_t)address);
    if (i == n_registrations || registrations[i].address != (uintptr_t)address)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    simgpu__stream_wait_unused((uintptr_t)address, registrations[i].bytes);
    i = index_of((uintptr_t)address); /* the wait gave the lock up */
    if (i == n_registrations || registrations[i].address != (uintptr_t)address)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    unpin(address, registrations[i].bytes);
    simgpu__history_free(registrations[i].history);
    n_registrations--;
    memmove(&registrations[i], &registrations[i + 1], (n_registrations - i) * sizeof *registrations);
    return CUDA_SUCCESS;
}

/* Waits for the work that uses the memory, as freeing pinned memory does. */
CUresult cuMemHostUnregister(void *address) {
    SIM_ENTER(cuMemHostUnregister);
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    simgpu__block_begin(SIM_cuMemHostUnregister);
    sim_lock();
    CUresult result = sim_unlock_with(unregister_locked(address));
    simgpu__block_end();
    return result;
}

/* The device sees registered memory where the host does (CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), if it was
 * registered for that: the call's text in the driver's manual asks for the flag, whatever unified addressing
 * maps besides. */
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address_out, void *host, unsigned int flags) {
    SIM_ENTER(cuMemHostGetDevicePointer_v2);
    if (!address_out || !host || flags) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    if (simgpu__host_place((uintptr_t)host, 1) != SIM_PINNED ||
        !registrations[index_of((uintptr_t)host)].is_mapped)
        return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    *address_out = (uintptr_t)host;
    return sim_unlock_with(CUDA_SUCCESS);
}
