/* The types' layouts and the values that the simulated GPU declares for itself, to be compared with cuda.h's. */
#define ABI_VALUES(X)                                                                                              \
    X(sizeof(CUdeviceptr)) X(sizeof(CUdevice)) X(sizeof(CUresult)) X(sizeof(CUmemGenericAllocationHandle))         \
    X(sizeof(CUstream)) X(sizeof(CUevent)) X(sizeof(CUcontext)) X(sizeof(CUhostFn)) X(sizeof(cuuint32_t))          \
    X(sizeof(CUmemLocation)) X(offsetof(CUmemLocation, type)) X(offsetof(CUmemLocation, id))                       \
    X(sizeof(CUmemAccessDesc)) X(offsetof(CUmemAccessDesc, location)) X(offsetof(CUmemAccessDesc, flags))          \
    X(sizeof(CUmemAllocationProp)) X(offsetof(CUmemAllocationProp, type))                                          \
    X(offsetof(CUmemAllocationProp, requestedHandleTypes)) X(offsetof(CUmemAllocationProp, location))              \
    X(offsetof(CUmemAllocationProp, win32HandleMetaData))                                                          \
    X(offsetof(CUmemAllocationProp, allocFlags.compressionType))                                                   \
    X(offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable))                                              \
    X(offsetof(CUmemAllocationProp, allocFlags.usage)) X(offsetof(CUmemAllocationProp, allocFlags.reserved))       \
    X(CUDA_SUCCESS) X(CUDA_ERROR_INVALID_VALUE) X(CUDA_ERROR_OUT_OF_MEMORY) X(CUDA_ERROR_NOT_INITIALIZED)          \
    X(CUDA_ERROR_NO_DEVICE) X(CUDA_ERROR_INVALID_DEVICE) X(CUDA_ERROR_INVALID_CONTEXT) X(CUDA_ERROR_MAP_FAILED)    \
    X(CUDA_ERROR_UNMAP_FAILED) X(CUDA_ERROR_ALREADY_MAPPED) X(CUDA_ERROR_NOT_MAPPED)                               \
    X(CUDA_ERROR_NO_BINARY_FOR_GPU) X(sizeof(CUmodule)) X(sizeof(CUfunction))                                      \
    X(CUDA_ERROR_OPERATING_SYSTEM) X(CUDA_ERROR_INVALID_HANDLE) X(CUDA_ERROR_ILLEGAL_STATE)                        \
    X(CUDA_ERROR_NOT_FOUND) X(CUDA_ERROR_NOT_READY) X(CUDA_ERROR_ILLEGAL_ADDRESS)                                  \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED) X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)                                \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) X(CUDA_ERROR_LAUNCH_FAILED) X(CUDA_ERROR_NOT_PERMITTED)               \
    X(CUDA_ERROR_NOT_SUPPORTED) X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) X(CUDA_ERROR_UNKNOWN)                     \
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION) X(sizeof(CUstreamCaptureMode)) X(CU_STREAM_CAPTURE_MODE_GLOBAL)         \
    X(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) X(CU_STREAM_CAPTURE_MODE_RELAXED)                                       \
    X(sizeof(CUstreamCaptureStatus)) X(CU_STREAM_CAPTURE_STATUS_NONE) X(CU_STREAM_CAPTURE_STATUS_ACTIVE)           \
    X(CU_STREAM_CAPTURE_STATUS_INVALIDATED)                                                                        \
    X(CU_DEVICE_ATTRIBUTE_INTEGRATED) X(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) X(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)       \
    X(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT) X(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)                            \
    X(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID) X(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED)                        \
    X(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) X(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)  \
    X(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) X(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)      \
    X(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)                                             \
    X(CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED)                                                           \
    X(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)                                                 \
    X(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) X(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR)  \
    X(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) X(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)                 \
    X(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID) X(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)       \
    X(CU_MEM_ALLOCATION_TYPE_INVALID) X(CU_MEM_ALLOCATION_TYPE_PINNED) X(CU_MEM_HANDLE_TYPE_NONE)                  \
    X(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) X(CU_MEM_HANDLE_TYPE_FABRIC) X(CU_MEM_LOCATION_TYPE_INVALID)       \
    X(CU_MEM_LOCATION_TYPE_DEVICE) X(CU_MEM_LOCATION_TYPE_HOST) X(CU_MEM_LOCATION_TYPE_HOST_NUMA)                  \
    X(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) X(CU_MEM_ACCESS_FLAGS_PROT_NONE) X(CU_MEM_ACCESS_FLAGS_PROT_READ)    \
    X(CU_MEM_ACCESS_FLAGS_PROT_READWRITE) X(CU_MEM_ALLOC_GRANULARITY_MINIMUM)                                      \
    X(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) X(CU_STREAM_DEFAULT) X(CU_STREAM_NON_BLOCKING) X(CU_EVENT_DEFAULT)     \
    X(CU_EVENT_BLOCKING_SYNC) X(CU_EVENT_DISABLE_TIMING) X(CU_EVENT_INTERPROCESS) X(CU_STREAM_WAIT_VALUE_GEQ)      \
    X(CU_STREAM_WAIT_VALUE_EQ) X(CU_STREAM_WAIT_VALUE_AND) X(CU_STREAM_WAIT_VALUE_NOR)                             \
    X(CU_STREAM_WAIT_VALUE_FLUSH) X(CU_STREAM_WRITE_VALUE_DEFAULT) X(CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER)      \
    X(CU_MEMHOSTREGISTER_PORTABLE) X(CU_MEMHOSTREGISTER_DEVICEMAP) X(CU_MEMHOSTREGISTER_IOMEMORY)                  \
    X(CU_MEMHOSTREGISTER_READ_ONLY) X((uintptr_t)CU_STREAM_LEGACY) X((uintptr_t)CU_STREAM_PER_THREAD)

struct abi_value {
    const char *what;
    long long value;
};
#define ABI_ROW(expression) {#expression, (long long)(expression)},

extern const struct abi_value abi_theirs[];
extern const char *const abi_their_names[]; /* the exported name of each entry point; NULL ends */
