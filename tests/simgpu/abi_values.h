/* The types' layouts and the values that the simulated GPU declares for itself, beside cuda.h's. */
struct abi_value {
    const char *what;
    long long value;
};

#define ABI_VALUE(expression) {#expression, (long long)(expression)}
/* An array of them, ended by NULL. */
#define ABI_VALUES                                                                                           \
    {ABI_VALUE(sizeof(CUdeviceptr)),                                                                         \
     ABI_VALUE(sizeof(CUdevice)),                                                                            \
     ABI_VALUE(sizeof(CUresult)),                                                                            \
     ABI_VALUE(sizeof(CUmemGenericAllocationHandle)),                                                        \
     ABI_VALUE(sizeof(CUstream)),                                                                            \
     ABI_VALUE(sizeof(CUevent)),                                                                             \
     ABI_VALUE(sizeof(CUcontext)),                                                                           \
     ABI_VALUE(sizeof(CUhostFn)),                                                                            \
     ABI_VALUE(sizeof(cuuint32_t)),                                                                          \
     ABI_VALUE(sizeof(CUmemLocation)),                                                                       \
     ABI_VALUE(offsetof(CUmemLocation, type)),                                                               \
     ABI_VALUE(offsetof(CUmemLocation, id)),                                                                 \
     ABI_VALUE(sizeof(CUmemAccessDesc)),                                                                     \
     ABI_VALUE(offsetof(CUmemAccessDesc, location)),                                                         \
     ABI_VALUE(offsetof(CUmemAccessDesc, flags)),                                                            \
     ABI_VALUE(sizeof(CUDA_MEMCPY2D)),                                                                       \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, srcMemoryType)),                                                      \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, srcDevice)),                                                          \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, srcPitch)),                                                           \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, dstMemoryType)),                                                      \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, dstDevice)),                                                          \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, dstPitch)),                                                           \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, WidthInBytes)),                                                       \
     ABI_VALUE(offsetof(CUDA_MEMCPY2D, Height)),                                                             \
     ABI_VALUE(CU_MEMORYTYPE_DEVICE),                                                                        \
     ABI_VALUE(sizeof(CUmemAllocationProp)),                                                                 \
     ABI_VALUE(offsetof(CUmemAllocationProp, type)),                                                         \
     ABI_VALUE(offsetof(CUmemAllocationProp, requestedHandleTypes)),                                         \
     ABI_VALUE(offsetof(CUmemAllocationProp, location)),                                                     \
     ABI_VALUE(offsetof(CUmemAllocationProp, win32HandleMetaData)),                                          \
     ABI_VALUE(offsetof(CUmemAllocationProp, allocFlags.compressionType)),                                   \
     ABI_VALUE(offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)),                              \
     ABI_VALUE(offsetof(CUmemAllocationProp, allocFlags.usage)),                                             \
     ABI_VALUE(offsetof(CUmemAllocationProp, allocFlags.reserved)),                                          \
     ABI_VALUE(CUDA_SUCCESS),                                                                                \
     ABI_VALUE(CUDA_ERROR_INVALID_VALUE),                                                                    \
     ABI_VALUE(CUDA_ERROR_OUT_OF_MEMORY),                                                                    \
     ABI_VALUE(CUDA_ERROR_NOT_INITIALIZED),                                                                  \
     ABI_VALUE(CUDA_ERROR_NO_DEVICE),                                                                        \
     ABI_VALUE(CUDA_ERROR_INVALID_DEVICE),                                                                   \
     ABI_VALUE(CUDA_ERROR_INVALID_CONTEXT),                                                                  \
     ABI_VALUE(CUDA_ERROR_MAP_FAILED),                                                                       \
     ABI_VALUE(CUDA_ERROR_UNMAP_FAILED),                                                                     \
     ABI_VALUE(CUDA_ERROR_ALREADY_MAPPED),                                                                   \
     ABI_VALUE(CUDA_ERROR_NOT_MAPPED),                                                                       \
     ABI_VALUE(CUDA_ERROR_NO_BINARY_FOR_GPU),                                                                \
     ABI_VALUE(sizeof(CUmodule)),                                                                            \
     ABI_VALUE(sizeof(CUfunction)),                                                                          \
     ABI_VALUE(CUDA_ERROR_OPERATING_SYSTEM),                                                                 \
     ABI_VALUE(CUDA_ERROR_INVALID_HANDLE),                                                                   \
     ABI_VALUE(CUDA_ERROR_ILLEGAL_STATE),                                                                    \
     ABI_VALUE(CUDA_ERROR_NOT_FOUND),                                                                        \
     ABI_VALUE(CUDA_ERROR_NOT_READY),                                                                        \
     ABI_VALUE(CUDA_ERROR_ILLEGAL_ADDRESS),                                                                  \
     ABI_VALUE(CUDA_ERROR_CONTEXT_IS_DESTROYED),                                                             \
     ABI_VALUE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),                                                   \
     ABI_VALUE(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),                                                       \
     ABI_VALUE(CUDA_ERROR_LAUNCH_FAILED),                                                                    \
     ABI_VALUE(CUDA_ERROR_NOT_PERMITTED),                                                                    \
     ABI_VALUE(CUDA_ERROR_NOT_SUPPORTED),                                                                    \
     ABI_VALUE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),                                                       \
     ABI_VALUE(CUDA_ERROR_UNKNOWN),                                                                          \
     ABI_VALUE(CUDA_ERROR_STREAM_CAPTURE_ISOLATION),                                                         \
     ABI_VALUE(sizeof(CUstreamCaptureMode)),                                                                 \
     ABI_VALUE(CU_STREAM_CAPTURE_MODE_GLOBAL),                                                               \
     ABI_VALUE(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),                                                         \
     ABI_VALUE(CU_STREAM_CAPTURE_MODE_RELAXED),                                                              \
     ABI_VALUE(sizeof(CUstreamCaptureStatus)),                                                               \
     ABI_VALUE(CU_STREAM_CAPTURE_STATUS_NONE),                                                               \
     ABI_VALUE(CU_STREAM_CAPTURE_STATUS_ACTIVE),                                                             \
     ABI_VALUE(CU_STREAM_CAPTURE_STATUS_INVALIDATED),                                                        \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_INTEGRATED),                                                              \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),                                                              \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),                                                           \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),                                                      \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),                                                      \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),                                                           \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED),                                             \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),                                 \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES),                                                 \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),                                                 \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),                                     \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),                             \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED),                                           \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),                                 \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED),                                       \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR),                                           \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),                                            \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED),                                                     \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID),                                                            \
     ABI_VALUE(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),                           \
     ABI_VALUE(CU_MEM_ALLOCATION_TYPE_INVALID),                                                              \
     ABI_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED),                                                               \
     ABI_VALUE(CU_MEM_HANDLE_TYPE_NONE),                                                                     \
     ABI_VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),                                                    \
     ABI_VALUE(CU_MEM_HANDLE_TYPE_FABRIC),                                                                   \
     ABI_VALUE(CU_MEM_LOCATION_TYPE_INVALID),                                                                \
     ABI_VALUE(CU_MEM_LOCATION_TYPE_DEVICE),                                                                 \
     ABI_VALUE(CU_MEM_LOCATION_TYPE_HOST),                                                                   \
     ABI_VALUE(CU_MEM_LOCATION_TYPE_HOST_NUMA),                                                              \
     ABI_VALUE(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT),                                                      \
     ABI_VALUE(CU_MEM_ACCESS_FLAGS_PROT_NONE),                                                               \
     ABI_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ),                                                               \
     ABI_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE),                                                          \
     ABI_VALUE(CU_MEM_ALLOC_GRANULARITY_MINIMUM),                                                            \
     ABI_VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),                                                        \
     ABI_VALUE(CU_STREAM_DEFAULT),                                                                           \
     ABI_VALUE(CU_STREAM_NON_BLOCKING),                                                                      \
     ABI_VALUE(CU_EVENT_DEFAULT),                                                                            \
     ABI_VALUE(CU_EVENT_BLOCKING_SYNC),                                                                      \
     ABI_VALUE(CU_EVENT_DISABLE_TIMING),                                                                     \
     ABI_VALUE(CU_EVENT_INTERPROCESS),                                                                       \
     ABI_VALUE(CU_STREAM_WAIT_VALUE_GEQ),                                                                    \
     ABI_VALUE(CU_STREAM_WAIT_VALUE_EQ),                                                                     \
     ABI_VALUE(CU_STREAM_WAIT_VALUE_AND),                                                                    \
     ABI_VALUE(CU_STREAM_WAIT_VALUE_NOR),                                                                    \
     ABI_VALUE(CU_STREAM_WAIT_VALUE_FLUSH),                                                                  \
     ABI_VALUE(CU_STREAM_WRITE_VALUE_DEFAULT),                                                               \
     ABI_VALUE(CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER),                                                     \
     ABI_VALUE(CU_MEMHOSTREGISTER_PORTABLE),                                                                 \
     ABI_VALUE(CU_MEMHOSTREGISTER_DEVICEMAP),                                                                \
     ABI_VALUE(CU_MEMHOSTREGISTER_IOMEMORY),                                                                 \
     ABI_VALUE(CU_MEMHOSTREGISTER_READ_ONLY),                                                                \
     ABI_VALUE((uintptr_t)CU_STREAM_LEGACY),                                                                 \
     ABI_VALUE((uintptr_t)CU_STREAM_PER_THREAD),                                                             \
     {NULL, 0}}

extern const struct abi_value abi_theirs[];
extern const char *const abi_their_names[]; /* the exported name of each entry point; NULL ends */
