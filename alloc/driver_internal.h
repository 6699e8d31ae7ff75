/* driver_internal.h - CUDA's driver API as the driver's own files call it.
 *
 * The few types and constants are declared here, so that building needs no CUDA; they are ABI and do not
 * change.
 */
#ifndef FCDP_DRIVER_INTERNAL_H
#define FCDP_DRIVER_INTERNAL_H

#include <stdatomic.h>

#include "alloc/driver.h"

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef void *CUstream;
typedef void *CUevent;
typedef void *CUmodule;
typedef void *CUfunction;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUmemLocation {
    int type, id;
} CUmemLocation;
typedef struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;
typedef struct CUDA_MEMCPY2D {
    size_t srcXInBytes, srcY;
    int srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    void *srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    int dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    void *dstArray;
    size_t dstPitch, WidthInBytes, Height;
} CUDA_MEMCPY2D;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,

    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
    CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,

    CU_MEMORYTYPE_DEVICE = 2,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_STREAM_WAIT_VALUE_GEQ = 0,
    CU_STREAM_WRITE_VALUE_DEFAULT = 0,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
};

/* Every symbol that FCDP uses, under the name that libcuda exports. */
#define CUDA_CALLS(X)                                                                                        \
    X(cuInit, (unsigned flags))                                                                              \
    X(cuGetErrorName, (CUresult result, const char **name))                                                  \
    X(cuDeviceGetCount, (int *count))                                                                        \
    X(cuDeviceGet, (CUdevice * device, int ordinal))                                                         \
    X(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                                    \
    X(cuDevicePrimaryCtxRetain, (CUcontext * ctx, CUdevice device))                                          \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                                       \
    X(cuCtxGetCurrent, (CUcontext * ctx))                                                                    \
    X(cuCtxSetCurrent, (CUcontext ctx))                                                                      \
    X(cuCtxSynchronize, (void))                                                                              \
    X(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes))                                            \
    X(cuMemGetAllocationGranularity, (size_t *bytes, const CUmemAllocationProp *prop, int option))           \
    X(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop,    \
                    unsigned long long flags))                                                               \
    X(cuMemRelease, (CUmemGenericAllocationHandle handle))                                                   \
    X(cuMemAddressReserve,                                                                                   \
      (CUdeviceptr * base, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))      \
    X(cuMemAddressFree, (CUdeviceptr base, size_t bytes))                                                    \
    X(cuMemMap, (CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,           \
                 unsigned long long flags))                                                                  \
    X(cuMemUnmap, (CUdeviceptr at, size_t bytes))                                                            \
    X(cuMemSetAccess, (CUdeviceptr at, size_t bytes, const CUmemAccessDesc *desc, size_t n))                 \
    X(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream))               \
    X(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream))                     \
    X(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream))               \
    X(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream))                                      \
    X(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority))                         \
    X(cuStreamDestroy_v2, (CUstream stream))                                                                 \
    X(cuStreamSynchronize, (CUstream stream))                                                                \
    X(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                                   \
    X(cuEventCreate, (CUevent * event, unsigned flags))                                                      \
    X(cuEventDestroy_v2, (CUevent event))                                                                    \
    X(cuEventRecord, (CUevent event, CUstream stream))                                                       \
    X(cuEventSynchronize, (CUevent event))                                                                   \
    X(cuStreamQuery, (CUstream stream))                                                                      \
    X(cuStreamIsCapturing, (CUstream stream, int *status))                                                   \
    X(cuThreadExchangeStreamCaptureMode, (int *mode))                                                        \
    X(cuEventQuery, (CUevent event))                                                                         \
    X(cuMemHostRegister_v2, (void *at, size_t bytes, unsigned flags))                                        \
    X(cuMemHostUnregister, (void *at))                                                                       \
    X(cuMemHostGetDevicePointer_v2, (CUdeviceptr * at, void *host, unsigned flags))                          \
    X(cuLaunchHostFunc, (CUstream stream, void (*function)(void *context), void *context))

/* Symbols that a driver may lack. */
#define CUDA_OPTIONAL_CALLS(X)                                                                               \
    X(cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags))            \
    X(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags))             \
    X(cuEventElapsedTime_v2, (float *milliseconds, CUevent start, CUevent end))                              \
    X(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end))                                 \
    X(cuModuleLoadData, (CUmodule * module, const void *image))                                              \
    X(cuModuleUnload, (CUmodule module))                                                                     \
    X(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name))                       \
    X(cuLaunchKernel, (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,               \
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,          \
                       CUstream stream, void **parameters, void **extra))

/* The simulated driver's own (sim/gpu/simgpu.h). */
struct simgpu_access;
struct simgpu_module;
struct sim_calls {
    void (*annotate)(const char *label);
    int (*stream_name)(void *stream, const char *name);
    int (*announce)(const struct simgpu_access *accesses, unsigned n);
    int (*module_define)(const struct simgpu_module *module);
    uint64_t (*work_hand)(void);
    void (*work_begin)(uint64_t from_ns);
    uint64_t (*work_end)(void);
    uint64_t (*here_ns)(void);
    void (*end_at)(uint64_t end_ns);
    void (*word_store)(uint32_t *word, uint32_t value);
};

struct fcdp_driver {
    _Atomic unsigned long n_calls;
    _Atomic uint64_t n_pins_made, n_pins_undone, pinned_bytes; /* pinned_bytes: now */
    struct {
#define AS_FIELD(name, args) CUresult(*name) args;
        CUDA_CALLS(AS_FIELD)
        CUDA_OPTIONAL_CALLS(AS_FIELD)
    } api;
    struct sim_calls sim; /* NULL: CUDA */
    void *library;
    CUdevice device;
    CUcontext ctx;
    CUmemAllocationProp prop;
    size_t page_bytes;
    int ordinal, numa_node;
    char pci[32];
    bool is_sim;
};

/* CUDA's name of it. */
const char *fcdp__driver_result_name(const fcdp_driver *drv, CUresult result);
/* The failure text of `result` from a call that `format` describes, e.g. "cuMemMap(7f00, 4096 bytes)". */
fcdp_status fcdp__driver_failed(fcdp_driver *drv, CUresult result, const char *format, ...)
    FCDP_PRINTF(3, 4) FCDP_MUST_CHECK;

/* A call binds FCDP's context and then restores the thread's own: threads of the program may work with other
 * devices. Usually both are the same context, and this costs one look into the thread's own state. */
static inline CUresult context_enter(const fcdp_driver *drv, CUcontext *before_out) {
    CUresult result = drv->api.cuCtxGetCurrent(before_out);
    if (result != CUDA_SUCCESS || *before_out == drv->ctx) return result;
    return drv->api.cuCtxSetCurrent(drv->ctx);
}

static inline void context_leave(const fcdp_driver *drv, CUcontext before) {
    if (before == drv->ctx) return;
    CUresult result = drv->api.cuCtxSetCurrent(before);
    if (result != CUDA_SUCCESS)
        fcdp__log(FCDP_LOG_WARN, "cuCtxSetCurrent (back to the thread's own context): %s",
                  fcdp__driver_result_name(drv, result));
}

/* CALL(drv, cuFoo, args...): the CUresult of one driver call made with the context bound. */
#define CALL(drv, name, ...)                                                                                 \
    __extension__({                                                                                          \
        CUcontext before_ = NULL;                                                                            \
        CUresult result_ = context_enter(drv, &before_);                                                     \
        if (result_ == CUDA_SUCCESS) {                                                                       \
            result_ = (drv)->api.name(__VA_ARGS__);                                                          \
            atomic_fetch_add_explicit(&(drv)->n_calls, 1, memory_order_relaxed);                             \
            context_leave(drv, before_);                                                                     \
        }                                                                                                    \
        result_;                                                                                             \
    })

#endif
