/* NVIDIA's side. Including both headers also makes the compiler compare every prototype. */
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>

#include "sim/gpu/simgpu_cuda.h"
#include "tests/simgpu/abi_values.h"

#ifdef SIMGPU_OWN_TYPES
#error "cuda.h did not come first"
#endif

const struct abi_value abi_theirs[] = ABI_VALUES;

#define TEXT(name) #name
#define EXPORTED(name) TEXT(name)
const char *const abi_their_names[] = {EXPORTED(cuInit),
                                       EXPORTED(cuDriverGetVersion),
                                       EXPORTED(cuGetErrorName),
                                       EXPORTED(cuGetErrorString),
                                       EXPORTED(cuDeviceGetCount),
                                       EXPORTED(cuDeviceGet),
                                       EXPORTED(cuDeviceGetName),
                                       EXPORTED(cuDeviceGetAttribute),
                                       EXPORTED(cuDeviceTotalMem),
                                       EXPORTED(cuDevicePrimaryCtxRetain),
                                       EXPORTED(cuDevicePrimaryCtxRelease),
                                       EXPORTED(cuCtxSetCurrent),
                                       EXPORTED(cuCtxGetCurrent),
                                       EXPORTED(cuCtxSynchronize),
                                       EXPORTED(cuMemGetInfo),
                                       EXPORTED(cuMemGetAllocationGranularity),
                                       EXPORTED(cuMemCreate),
                                       EXPORTED(cuMemRelease),
                                       EXPORTED(cuMemExportToShareableHandle),
                                       EXPORTED(cuMemImportFromShareableHandle),
                                       EXPORTED(cuMemAddressReserve),
                                       EXPORTED(cuMemAddressFree),
                                       EXPORTED(cuMemMap),
                                       EXPORTED(cuMemUnmap),
                                       EXPORTED(cuMemSetAccess),
                                       EXPORTED(cuMemGetAccess),
                                       EXPORTED(cuStreamCreate),
                                       EXPORTED(cuStreamCreateWithPriority),
                                       EXPORTED(cuStreamDestroy),
                                       EXPORTED(cuStreamSynchronize),
                                       EXPORTED(cuStreamQuery),
                                       EXPORTED(cuStreamIsCapturing),
                                       EXPORTED(cuThreadExchangeStreamCaptureMode),
                                       EXPORTED(cuStreamWaitEvent),
                                       EXPORTED(cuStreamWaitValue32),
                                       EXPORTED(cuStreamWriteValue32),
                                       EXPORTED(cuLaunchHostFunc),
                                       EXPORTED(cuEventCreate),
                                       EXPORTED(cuEventDestroy),
                                       EXPORTED(cuEventRecord),
                                       EXPORTED(cuEventQuery),
                                       EXPORTED(cuEventSynchronize),
                                       "cuEventElapsedTime_v2", /* a cuda.h before 12.8 has the first alone */
                                       EXPORTED(cuMemcpyAsync),
                                       EXPORTED(cuMemcpyHtoDAsync),
                                       EXPORTED(cuMemcpyDtoHAsync),
                                       EXPORTED(cuMemcpyDtoDAsync),
                                       EXPORTED(cuMemcpy2DAsync),
                                       EXPORTED(cuMemsetD8Async),
                                       EXPORTED(cuMemHostRegister),
                                       EXPORTED(cuMemHostUnregister),
                                       EXPORTED(cuMemHostGetDevicePointer),
                                       EXPORTED(cuModuleLoadData),
                                       EXPORTED(cuModuleUnload),
                                       EXPORTED(cuModuleGetFunction),
                                       EXPORTED(cuLaunchKernel),
                                       NULL};
