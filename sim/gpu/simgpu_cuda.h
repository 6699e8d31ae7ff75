/* The part of CUDA's driver ABI that the simulated GPU exports: types, values and symbol names as in CUDA
 * 13.0. A plain machine has no cuda.h, so they are declared here; where cuda.h was included first, only the
 * prototypes remain and the compiler compares them with NVIDIA's (tests/simgpu/abi_theirs.c does that).
 */
#ifndef FCDP_SIMGPU_CUDA_H
#define FCDP_SIMGPU_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "sim/gpu/simgpu.h"

#ifndef CUDA_VERSION
#define SIMGPU_OWN_TYPES 1

typedef unsigned long long CUdeviceptr;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef uint32_t cuuint32_t;
typedef void (*CUhostFn)(void *user_data);

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

typedef enum cudaError_enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_UNMAP_FAILED = 206,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_NOT_MAPPED = 211,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef enum CUstreamCaptureStatus_enum {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
} CUstreamCaptureStatus;

typedef enum CUstreamCaptureMode_enum {
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2
} CUstreamCaptureMode;

typedef enum CUdevice_attribute_enum {
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
    CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
    CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED = 78,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED = 107,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR = 123,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141
} CUdevice_attribute;

typedef enum CUmemAllocationType_enum {
    CU_MEM_ALLOCATION_TYPE_INVALID = 0,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_ALLOCATION_TYPE_MAX = 0x7FFFFFFF
} CUmemAllocationType;

typedef enum CUmemAllocationHandleType_enum {
    CU_MEM_HANDLE_TYPE_NONE = 0,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_HANDLE_TYPE_FABRIC = 8,
    CU_MEM_HANDLE_TYPE_MAX = 0x7FFFFFFF
} CUmemAllocationHandleType;

typedef enum CUmemLocationType_enum {
    CU_MEM_LOCATION_TYPE_INVALID = 0,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_LOCATION_TYPE_HOST = 2,
    CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
    CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4,
    CU_MEM_LOCATION_TYPE_MAX = 0x7FFFFFFF
} CUmemLocationType;

typedef enum CUmemAccess_flags_enum {
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_ACCESS_FLAGS_PROT_MAX = 0x7FFFFFFF
} CUmemAccess_flags;

typedef enum CUmemAllocationGranularity_flags_enum {
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1
} CUmemAllocationGranularity_flags;

typedef struct CUmemLocation_st {
    CUmemLocationType type;
    int id;
} CUmemLocation;

typedef struct CUmemAllocationProp_st {
    CUmemAllocationType type;
    CUmemAllocationHandleType requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc_st {
    CUmemLocation location;
    CUmemAccess_flags flags;
} CUmemAccessDesc;

typedef enum CUmemorytype_enum {
    CU_MEMORYTYPE_HOST = 1,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_MEMORYTYPE_ARRAY = 3,
    CU_MEMORYTYPE_UNIFIED = 4
} CUmemorytype;
typedef struct CUarray_st *CUarray;
typedef struct CUDA_MEMCPY2D_st {
    size_t srcXInBytes, srcY;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

typedef enum CUstream_flags_enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 } CUstream_flags;

typedef enum CUevent_flags_enum {
    CU_EVENT_DEFAULT = 0,
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4
} CUevent_flags;

typedef enum CUstreamWaitValue_flags_enum {
    CU_STREAM_WAIT_VALUE_GEQ = 0,
    CU_STREAM_WAIT_VALUE_EQ = 1,
    CU_STREAM_WAIT_VALUE_AND = 2,
    CU_STREAM_WAIT_VALUE_NOR = 3,
    CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30
} CUstreamWaitValue_flags;

typedef enum CUstreamWriteValue_flags_enum {
    CU_STREAM_WRITE_VALUE_DEFAULT = 0,
    CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1
} CUstreamWriteValue_flags;

#define CU_MEMHOSTREGISTER_PORTABLE 0x01
#define CU_MEMHOSTREGISTER_DEVICEMAP 0x02
#define CU_MEMHOSTREGISTER_IOMEMORY 0x04
#define CU_MEMHOSTREGISTER_READ_ONLY 0x08
#endif /* CUDA_VERSION */

#ifdef __cplusplus
extern "C" {
#endif

SIMGPU_API CUresult cuInit(unsigned int flags);
SIMGPU_API CUresult cuDriverGetVersion(int *version_out);
SIMGPU_API CUresult cuGetErrorName(CUresult error, const char **name_out);
SIMGPU_API CUresult cuGetErrorString(CUresult error, const char **text_out);
SIMGPU_API CUresult cuDeviceGetCount(int *count_out);
SIMGPU_API CUresult cuDeviceGet(CUdevice *device_out, int ordinal);
SIMGPU_API CUresult cuDeviceGetName(char *name_out, int len, CUdevice device);
SIMGPU_API CUresult cuDeviceGetAttribute(int *value_out, CUdevice_attribute attribute, CUdevice device);
SIMGPU_API CUresult cuDeviceTotalMem_v2(size_t *bytes_out, CUdevice device);
SIMGPU_API CUresult cuDevicePrimaryCtxRetain(CUcontext *context_out, CUdevice device);
SIMGPU_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
SIMGPU_API CUresult cuCtxSetCurrent(CUcontext context);
SIMGPU_API CUresult cuCtxGetCurrent(CUcontext *context_out);
SIMGPU_API CUresult cuCtxSynchronize(void);

SIMGPU_API CUresult cuMemGetInfo_v2(size_t *free_out, size_t *total_out);
SIMGPU_API CUresult cuMemGetAllocationGranularity(size_t *bytes_out, const CUmemAllocationProp *prop,
                                                  CUmemAllocationGranularity_flags option);
SIMGPU_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle_out, size_t bytes,
                                const CUmemAllocationProp *prop, unsigned long long flags);
SIMGPU_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
SIMGPU_API CUresult cuMemExportToShareableHandle(void *shareable_out, CUmemGenericAllocationHandle handle,
                                                 CUmemAllocationHandleType type, unsigned long long flags);
SIMGPU_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle_out, void *shareable,
                                                   CUmemAllocationHandleType type);
SIMGPU_API CUresult cuMemAddressReserve(CUdeviceptr *address_out, size_t bytes, size_t alignment,
                                        CUdeviceptr hint, unsigned long long flags);
SIMGPU_API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
SIMGPU_API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                             CUmemGenericAllocationHandle handle, unsigned long long flags);
SIMGPU_API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
SIMGPU_API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *descs,
                                   size_t n_descs);
SIMGPU_API CUresult cuMemGetAccess(unsigned long long *flags_out, const CUmemLocation *location,
                                   CUdeviceptr address);

SIMGPU_API CUresult cuStreamCreate(CUstream *stream_out, unsigned int flags);
SIMGPU_API CUresult cuStreamCreateWithPriority(CUstream *stream_out, unsigned int flags, int priority);
SIMGPU_API CUresult cuStreamDestroy_v2(CUstream stream);
SIMGPU_API CUresult cuStreamSynchronize(CUstream stream);
SIMGPU_API CUresult cuStreamQuery(CUstream stream);
SIMGPU_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status_out);
/* Which thread captures is not known here: a thread-local mode is as the global one. */
SIMGPU_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode);
SIMGPU_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
SIMGPU_API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                           unsigned int flags);
SIMGPU_API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                            unsigned int flags);
SIMGPU_API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data);

SIMGPU_API CUresult cuEventCreate(CUevent *event_out, unsigned int flags);
SIMGPU_API CUresult cuEventDestroy_v2(CUevent event);
SIMGPU_API CUresult cuEventRecord(CUevent event, CUstream stream);
SIMGPU_API CUresult cuEventQuery(CUevent event);
SIMGPU_API CUresult cuEventSynchronize(CUevent event);
SIMGPU_API CUresult cuEventElapsedTime_v2(float *milliseconds_out, CUevent start, CUevent end);

SIMGPU_API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream);
SIMGPU_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream);
SIMGPU_API CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream);
SIMGPU_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream);
SIMGPU_API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream);
SIMGPU_API CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream);

SIMGPU_API CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags);
SIMGPU_API CUresult cuMemHostUnregister(void *address);
SIMGPU_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address_out, void *host, unsigned int flags);

SIMGPU_API CUresult cuModuleLoadData(CUmodule *module_out, const void *image);
SIMGPU_API CUresult cuModuleUnload(CUmodule module);
SIMGPU_API CUresult cuModuleGetFunction(CUfunction *function_out, CUmodule module, const char *name);
SIMGPU_API CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                   void **parameters, void **extra);

#ifdef __cplusplus
}
#endif
#endif
