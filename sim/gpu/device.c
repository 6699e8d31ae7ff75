/* The one device, its primary context and the names of errors. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "sim/gpu/internal.h"

#define DRIVER_VERSION 13000

static char context_object; /* its address is the primary context's handle */

static const struct {
    CUresult code;
    const char *name;
    const char *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_UNMAP_FAILED, "CUDA_ERROR_UNMAP_FAILED", "unmapping of buffer object failed"},
    {CUDA_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_NOT_MAPPED, "CUDA_ERROR_NOT_MAPPED", "resource not mapped"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorName(CUresult error, const char **name_out) {
    SIM_ENTER(cuGetErrorName);
    if (!name_out) return CUDA_ERROR_INVALID_VALUE;
    *name_out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) *name_out = errors[i].name;
    return *name_out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text_out) {
    SIM_ENTER(cuGetErrorString);
    if (!text_out) return CUDA_ERROR_INVALID_VALUE;
    *text_out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) *text_out = errors[i].text;
    return *text_out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuInit(unsigned int flags) {
    if (simgpu__forked()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!simgpu__settings_load()) return CUDA_ERROR_INVALID_VALUE;
    simgpu__forks_watch();
    SIM_ENTER(cuInit);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    atomic_store(&sim.initialised, true);
    return sim_unlock_with(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version_out) {
    SIM_ENTER(cuDriverGetVersion);
    if (!version_out) return CUDA_ERROR_INVALID_VALUE;
    *version_out = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count_out) {
    SIM_ENTER(cuDeviceGetCount);
    if (!count_out) return CUDA_ERROR_INVALID_VALUE;
    *count_out = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device_out, int ordinal) {
    SIM_ENTER(cuDeviceGet);
    if (!device_out) return CUDA_ERROR_INVALID_VALUE;
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    *device_out = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name_out, int len, CUdevice device) {
    SIM_ENTER(cuDeviceGetName);
    if (!name_out || len <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name_out, (size_t)len, "FCDP simulated GPU");
    return CUDA_SUCCESS;
}

/* Node 0 where the machine has nodes; FCDP_SIM_NUMA on a machine that FCDP_SIM_ROOT describes. */
static int numa_node(void) {
    const char *node = getenv("FCDP_SIM_NUMA");
    if (node && node[0]) return atoi(node);
    return access("/sys/devices/system/node/node0", F_OK) == 0 ? 0 : -1;
}

/* The PCI domain is one that no machine has, so that a real device's sysfs entry is never taken for this
 * one. */
static bool attribute_value(CUdevice_attribute attribute, int *value_out) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value_out = 0xFCD0; return true;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value_out = numa_node(); return true;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value_out = 2; return true;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value_out = 1; return true;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
    case CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *value_out = 0; return true;
    default: return false;
    }
}

CUresult cuDeviceGetAttribute(int *value_out, CUdevice_attribute attribute, CUdevice device) {
    SIM_ENTER(cuDeviceGetAttribute);
    if (!value_out) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    return attribute_value(attribute, value_out) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes_out, CUdevice device) {
    SIM_ENTER(cuDeviceTotalMem_v2);
    if (!bytes_out) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    sim_lock();
    *bytes_out = sim.capacity_bytes;
    return sim_unlock_with(CUDA_SUCCESS);
}

CUresult cuMemGetInfo_v2(size_t *free_out, size_t *total_out) {
    SIM_ENTER(cuMemGetInfo_v2);
    if (!free_out || !total_out) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    *free_out = sim.capacity_bytes > sim.used_bytes ? sim.capacity_bytes - sim.used_bytes : 0;
    *total_out = sim.capacity_bytes;
    return sim_unlock_with(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context_out, CUdevice device) {
    SIM_ENTER(cuDevicePrimaryCtxRetain);
    if (!context_out) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    sim_lock();
    atomic_fetch_add(&sim.context_refs, 1);
    *context_out = (CUcontext)(void *)&context_object;
    return sim_unlock_with(CUDA_SUCCESS);
}

/* The last release ends the context: its work is waited for, its streams, events and registrations go with
 * it. Virtual memory belongs to the process and stays. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    SIM_ENTER(cuDevicePrimaryCtxRelease_v2);
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    simgpu__block_begin(SIM_cuDevicePrimaryCtxRelease_v2);
    sim_lock();
    if (atomic_load(&sim.context_refs) == 0) return sim_unlock_with(CUDA_ERROR_INVALID_CONTEXT);
    if (atomic_fetch_sub(&sim.context_refs, 1) == 1) {
        simgpu__stream_sync_all();
        simgpu__block_end();
        simgpu__stream_reset();
        simgpu__stream_host_learns_all();
        simgpu__event_reset();
        simgpu__host_reset();
    }
    return sim_unlock_with(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    SIM_ENTER(cuCtxSetCurrent);
    bool known = context == (CUcontext)(void *)&context_object && atomic_load(&sim.context_refs) > 0;
    if (context && !known) return CUDA_ERROR_INVALID_CONTEXT;
    simgpu__context_set_current(context != NULL);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context_out) {
    SIM_ENTER(cuCtxGetCurrent);
    if (!context_out) return CUDA_ERROR_INVALID_VALUE;
    *context_out = simgpu__context_is_current() ? (CUcontext)(void *)&context_object : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    SIM_ENTER(cuCtxSynchronize);
    simgpu__block_begin(SIM_cuCtxSynchronize);
    sim_lock();
    simgpu__stream_sync_all();
    simgpu__stream_host_learns_all();
    sim_unlock();
    simgpu__block_end();
    return (CUresult)atomic_load(&sim.sticky);
}
