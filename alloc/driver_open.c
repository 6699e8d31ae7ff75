/* driver_open.c - finds a driver and takes a device of it.
 *
 * FCDP links no CUDA: the table of calls is filled with dlopen, from libcuda.so.1 or from the simulated
 * driver, so one wheel serves machines with and without a GPU. A failure text says for each of the two why it
 * does not serve, since the user can change either. Of the device it takes the primary context, which PyTorch
 * uses too, and makes it current for no longer than a call: threads of the program may work with other
 * devices.
 *
 * It gives no memory and has no streams: driver.c has the calls.
 */
#include "alloc/driver_internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the table ---- */

/* Fill the table from the library at `path`. The library is never unloaded: it has threads of its own, and
 * others may use it. On failure `reason_out` says why. */
static bool api_load(fcdp_driver *drv, const char *path, char *reason_out, size_t n_reason) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(reason_out, n_reason, "%s", dlerror());
        return false;
    }
#define AS_LOAD(name, args)                                                                                  \
    if (!(*(void **)&drv->api.name = dlsym(library, #name))) {                                               \
        snprintf(reason_out, n_reason, "%s has no %s: it is too old", path, #name);                          \
        return false;                                                                                        \
    }
    CUDA_CALLS(AS_LOAD)
#define AS_LOAD_OPTIONAL(name, args) *(void **)&drv->api.name = dlsym(library, #name);
    CUDA_OPTIONAL_CALLS(AS_LOAD_OPTIONAL)
    drv->library = library;
    return true;
}

/* Whether at least one device answers through the loaded table. */
static bool device_answers(fcdp_driver *drv, char *reason_out, size_t n_reason) {
    int count = 0;
    CUresult result = drv->api.cuInit(0);
    if (result != CUDA_SUCCESS) {
        snprintf(reason_out, n_reason, "cuInit: %s", fcdp__driver_result_name(drv, result));
        return false;
    }
    result = drv->api.cuDeviceGetCount(&count);
    if (result == CUDA_SUCCESS && count > 0) return true;
    snprintf(reason_out, n_reason, "cuDeviceGetCount: %s, %d devices", fcdp__driver_result_name(drv, result),
             count);
    return false;
}

static bool sim_answers(fcdp_driver *drv, const char *sim_library, char *reason_out, size_t n_reason) {
    const char *path = getenv("FCDP_SIM_LIBRARY");
    if (!path || !path[0]) path = sim_library;
    if (!path || !path[0]) {
        snprintf(reason_out, n_reason,
                 "no simulated driver is known: set FCDP_SIM_LIBRARY to the path of libfcdp_simgpu.so");
        return false;
    }
    drv->is_sim = true;
    if (!api_load(drv, path, reason_out, n_reason)) return false;
    *(void **)&drv->sim.annotate = dlsym(drv->library, "simgpu_annotate");
    *(void **)&drv->sim.stream_name = dlsym(drv->library, "simgpu_stream_name");
    *(void **)&drv->sim.announce = dlsym(drv->library, "simgpu_announce");
    *(void **)&drv->sim.module_define = dlsym(drv->library, "simgpu_module_define");
    *(void **)&drv->sim.work_hand = dlsym(drv->library, "simgpu_work_hand");
    *(void **)&drv->sim.work_begin = dlsym(drv->library, "simgpu_work_begin");
    *(void **)&drv->sim.work_end = dlsym(drv->library, "simgpu_work_end");
    *(void **)&drv->sim.here_ns = dlsym(drv->library, "simgpu_here_ns");
    *(void **)&drv->sim.end_at = dlsym(drv->library, "simgpu_end_at");
    *(void **)&drv->sim.word_store = dlsym(drv->library, "simgpu_word_store");
    return device_answers(drv, reason_out, n_reason);
}

/* Load the table that `kind` asks for. */
static fcdp_status table_open(fcdp_driver *drv, fcdp_driver_kind kind, const char *sim_library) {
    char no_cuda[512] = "", no_sim[512] = "";
    if (kind != FCDP_DRIVER_SIM) {
        if (api_load(drv, "libcuda.so.1", no_cuda, sizeof no_cuda) &&
            device_answers(drv, no_cuda, sizeof no_cuda))
            return FCDP_OK;
        if (kind == FCDP_DRIVER_CUDA)
            return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                              "FCDP_DRIVER=cuda, but no CUDA device answers (%s); use FCDP_DRIVER=auto, "
                              "or sim to run without a GPU",
                              no_cuda);
    }
    if (sim_answers(drv, sim_library, no_sim, sizeof no_sim)) return FCDP_OK;
    if (kind == FCDP_DRIVER_SIM) return fcdp__fail(FCDP_ERR_UNSUPPORTED, "FCDP_DRIVER=sim, but %s", no_sim);
    return fcdp__fail(FCDP_ERR_UNSUPPORTED, "FCDP_DRIVER=auto, but no CUDA device answers (%s), and %s",
                      no_cuda, no_sim);
}

/* ---- the device ---- */

static int attribute_get(const fcdp_driver *drv, int attribute, int fallback) {
    int value;
    return drv->api.cuDeviceGetAttribute(&value, attribute, drv->device) == CUDA_SUCCESS ? value : fallback;
}

/* Drivers before CUDA 12.2 do not know the NUMA node. The simulated device has no place on a PCI bus. */
static void place_find(fcdp_driver *drv) {
    int bus = attribute_get(drv, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, -1);
    int slot = attribute_get(drv, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, -1);
    int domain = attribute_get(drv, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0);
    drv->numa_node = attribute_get(drv, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1);
    if (!drv->is_sim && bus >= 0 && slot >= 0)
        snprintf(drv->pci, sizeof drv->pci, "%04x:%02x:%02x.0", (unsigned)domain, (unsigned)bus,
                 (unsigned)slot);
}

static fcdp_status granularity_get(fcdp_driver *drv) {
    CUresult result = CALL(drv, cuMemGetAllocationGranularity, &drv->page_bytes, &drv->prop,
                           CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuMemGetAllocationGranularity(device %d)", drv->ordinal);
    if (drv->page_bytes && !(drv->page_bytes & (drv->page_bytes - 1))) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                      "device %d maps memory in units of %zu bytes, which is not a power of two",
                      drv->ordinal, drv->page_bytes);
}

/* The table is loaded and a device answers: take device `ordinal`. */
static fcdp_status device_take(fcdp_driver *drv, int ordinal) {
    int count = 0;
    drv->ordinal = ordinal;
    if (drv->api.cuDeviceGetCount(&count) == CUDA_SUCCESS && (ordinal < 0 || ordinal >= count))
        return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                          "device %d was asked for, but there are %d (0 to %d); see CUDA_VISIBLE_DEVICES",
                          ordinal, count, count - 1);
    CUresult result = drv->api.cuDeviceGet(&drv->device, ordinal);
    if (result != CUDA_SUCCESS) return fcdp__driver_failed(drv, result, "cuDeviceGet(%d)", ordinal);
    if (attribute_get(drv, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1) == 0)
        return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                          "device %d cannot map memory (cuMemMap); FCDP cannot work on it", ordinal);

    drv->prop = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, drv->device}};
    if (attribute_get(drv, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0) == 1)
        drv->prop.allocFlags.gpuDirectRDMACapable = 1;
    place_find(drv);

    result = drv->api.cuDevicePrimaryCtxRetain(&drv->ctx, drv->device);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuDevicePrimaryCtxRetain(device %d)", ordinal);
    fcdp_status status = granularity_get(drv);
    if (status) (void)drv->api.cuDevicePrimaryCtxRelease_v2(drv->device);
    return status;
}

/* ---- open and close ---- */

fcdp_status fcdp__driver_open(fcdp_driver_kind kind, int ordinal, const char *sim_library,
                              fcdp_driver **drv_out) {
    fcdp_driver *drv = calloc(1, sizeof *drv);
    if (!drv)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no memory for the driver table (%zu bytes)", sizeof *drv);
    fcdp_status status = table_open(drv, kind, sim_library);
    if (!status) status = device_take(drv, ordinal);
    if (status) {
        free(drv);
        return status;
    }
    *drv_out = drv;
    return FCDP_OK;
}

void fcdp__driver_close(fcdp_driver *drv) {
    if (!drv) return;
    CUresult result = drv->api.cuDevicePrimaryCtxRelease_v2(drv->device);
    if (result != CUDA_SUCCESS)
        fcdp__log(FCDP_LOG_DEBUG, "cuDevicePrimaryCtxRelease(device %d): %s", drv->ordinal,
                  fcdp__driver_result_name(drv, result));
    free(drv);
}

unsigned long fcdp__driver_calls(const fcdp_driver *drv) {
    return atomic_load_explicit(&drv->n_calls, memory_order_relaxed);
}

fcdp_status fcdp__driver_with_context(fcdp_driver *drv, void (*call)(void *arg), void *arg) {
    CUcontext before = NULL;
    CUresult result = context_enter(drv, &before);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuCtxSetCurrent(device %d)", drv->ordinal);
    call(arg);
    context_leave(drv, before);
    return FCDP_OK;
}

fcdp_driver_context fcdp__driver_context(const fcdp_driver *drv) {
    return (fcdp_driver_context){.ctx = drv->ctx, .set = drv->api.cuCtxSetCurrent};
}

void fcdp__driver_context_take(fcdp_driver_context context) {
    CUresult result = context.set(context.ctx);
    if (result != CUDA_SUCCESS) fcdp__log(FCDP_LOG_DEBUG, "cuCtxSetCurrent: CUresult %d", result);
}

bool fcdp__driver_is_sim(const fcdp_driver *drv) {
    return drv->is_sim;
}
size_t fcdp__driver_page_bytes(const fcdp_driver *drv) {
    return drv->page_bytes;
}
int fcdp__driver_numa_node(const fcdp_driver *drv) {
    return drv->numa_node;
}
const char *fcdp__driver_pci(const fcdp_driver *drv) {
    return drv->pci;
}
