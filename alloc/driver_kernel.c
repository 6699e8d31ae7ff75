/* driver_kernel.c - loads and launches kernels from PTX.
 *
 * PTX rather than machine code: the driver compiles it for its own device, so the wheel needs no nvcc, no
 * list of architectures and no CUDA runtime.
 */
#include "alloc/driver_internal.h"

struct simgpu_module { /* as sim/gpu/simgpu.h has it */
    const char *image, *entry;
    size_t task_bytes;
    void (*run)(void *task);
};

/* Failures that no retry and no wait would cure: the caller works without the kernel. */
static fcdp_status load_failed(fcdp_driver *drv, CUresult result, const char *call, const char *entry) {
    switch (result) {
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "%s(%s, device %d): %s; the driver must compile PTX 6.4 for compute capability 7.0 or "
            "newer: install libnvidia-ptxjitcompiler beside libcuda, unset CUDA_DISABLE_PTX_JIT",
            call, entry, drv->ordinal, fcdp__driver_result_name(drv, result));
    default: return fcdp__driver_failed(drv, result, "%s(%s, device %d)", call, entry, drv->ordinal);
    }
}

/* The simulated driver gets the block's C function before the load, so that callers treat both drivers
 * alike. */
fcdp_status fcdp__driver_kernel_load(fcdp_driver *drv, const fcdp_kernel_source *source,
                                     fcdp_kernel *kernel_out) {
    CUmodule module;
    CUfunction function;
    bool has_calls = drv->api.cuModuleLoadData && drv->api.cuModuleUnload && drv->api.cuModuleGetFunction &&
                     drv->api.cuLaunchKernel && (!drv->is_sim || drv->sim.module_define);
    if (!has_calls)
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "device %d's driver cannot load %s: it has no cuModuleLoadData, cuModuleGetFunction "
            "or cuLaunchKernel; update the driver",
            drv->ordinal, source->entry);
    if (drv->is_sim) {
        struct simgpu_module told = {source->image, source->entry, source->task_bytes, source->run};
        CUresult result = drv->sim.module_define(&told);
        if (result != CUDA_SUCCESS) return load_failed(drv, result, "simgpu_module_define", source->entry);
    }
    CUresult result = CALL(drv, cuModuleLoadData, &module, source->image);
    if (result != CUDA_SUCCESS) return load_failed(drv, result, "cuModuleLoadData", source->entry);
    result = CALL(drv, cuModuleGetFunction, &function, module, source->entry);
    if (result != CUDA_SUCCESS) {
        (void)CALL(drv, cuModuleUnload, module);
        return load_failed(drv, result, "cuModuleGetFunction", source->entry);
    }
    *kernel_out = (fcdp_kernel){module, function, source->n_threads};
    return FCDP_OK;
}

void fcdp__driver_kernel_unload(fcdp_driver *drv, const fcdp_kernel *kernel) {
    if (!kernel->module) return;
    CUresult result = CALL(drv, cuModuleUnload, kernel->module);
    if (result != CUDA_SUCCESS)
        fcdp__log(FCDP_LOG_DEBUG, "cuModuleUnload(%p): %s", kernel->module,
                  fcdp__driver_result_name(drv, result));
}

fcdp_status fcdp__driver_launch(fcdp_driver *drv, const fcdp_kernel *kernel, fcdp_dptr tasks,
                                uint32_t n_tasks, fcdp_stream stream) {
    void *parameters[] = {&tasks.addr};
    CUresult result = CALL(drv, cuLaunchKernel, kernel->function, n_tasks, 1, 1, kernel->n_threads, 1, 1, 0,
                           stream, parameters, NULL);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuLaunchKernel(%u blocks of %u threads, stream %p)", n_tasks,
                               kernel->n_threads, stream);
}
