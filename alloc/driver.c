/* driver.c - the calls of the driver, CUDA's or the simulated one's (driver_open.c finds it).
 *
 * It knows no page pool, no region and no policy. Each function is one driver call (or a bounded retry of
 * one), with the context bound around it and a failure text that has the call's name and numbers.
 *
 * Kernels come as PTX rather than machine code: the driver compiles it for its own device, so the wheel needs
 * no nvcc, no list of architectures and no CUDA runtime.
 */
#include "alloc/driver_internal.h"
#include "base/size.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* NOT_READY from cuMemSetAccess means that work is in flight. A synchronise ends it, unless other threads
 * keep adding work. */
enum { MAX_ACCESS_TRIES = 8 };
/* Lower is more urgent; the driver clamps to what the device has. */
enum { HIGHEST_PRIORITY = -1000 };
size_t fcdp__driver_pin_chunk_bytes = (size_t)64 << 30;

/* ---- calls and failures ---- */

const char *fcdp__driver_result_name(const fcdp_driver *drv, CUresult result) {
    const char *name = NULL;
    if (drv->api.cuGetErrorName && drv->api.cuGetErrorName(result, &name) == CUDA_SUCCESS && name)
        return name;
    return "an unknown CUDA error";
}

fcdp_status fcdp__driver_failed(fcdp_driver *drv, CUresult result, const char *format, ...) {
    char call[256];
    va_list args;
    va_start(args, format);
    vsnprintf(call, sizeof call, format, args);
    va_end(args);

    size_t free_bytes, total_bytes;
    if (result == CUDA_ERROR_OUT_OF_MEMORY &&
        CALL(drv, cuMemGetInfo_v2, &free_bytes, &total_bytes) == CUDA_SUCCESS)
        return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM, "%s: %s; device %d has %zu of %zu bytes free", call,
                          fcdp__driver_result_name(drv, result), drv->ordinal, free_bytes, total_bytes);
    fcdp_status status = FCDP_ERR_DRIVER;
    if (result == CUDA_ERROR_OUT_OF_MEMORY) status = FCDP_ERR_NO_DEVICE_MEM;
    if (result == CUDA_ERROR_NOT_SUPPORTED) status = FCDP_ERR_UNSUPPORTED;
    return fcdp__fail(status, "%s: %s (CUresult %d)", call, fcdp__driver_result_name(drv, result), result);
}

/* ---- physical memory and ranges ---- */

fcdp_status fcdp__driver_mem_info(fcdp_driver *drv, size_t *free_bytes_out, size_t *total_bytes_out) {
    size_t free_bytes, total_bytes;
    CUresult result = CALL(drv, cuMemGetInfo_v2, &free_bytes, &total_bytes);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuMemGetInfo(device %d)", drv->ordinal);
    *free_bytes_out = free_bytes;
    *total_bytes_out = total_bytes;
    return FCDP_OK;
}

fcdp_status fcdp__driver_phys_create(fcdp_driver *drv, size_t bytes, fcdp_phys *phys_out) {
    CUmemGenericAllocationHandle handle;
    CUresult result = CALL(drv, cuMemCreate, &handle, bytes, &drv->prop, 0);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuMemCreate(%zu bytes, device %d)", bytes, drv->ordinal);
    phys_out->handle = handle;
    return FCDP_OK;
}

fcdp_status fcdp__driver_phys_create_host(fcdp_driver *drv, int numa_node, size_t bytes,
                                          fcdp_phys *phys_out) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, numa_node}};
    CUmemGenericAllocationHandle handle;
    CUresult result = CALL(drv, cuMemCreate, &handle, bytes, &prop, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "cuMemCreate(%zu bytes of host memory, NUMA node %d): %s",
                          bytes, numa_node, fcdp__driver_result_name(drv, result));
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuMemCreate(%zu bytes of host memory, NUMA node %d)", bytes,
                                   numa_node);
    phys_out->handle = handle;
    return FCDP_OK;
}

fcdp_status fcdp__driver_phys_release(fcdp_driver *drv, fcdp_phys phys) {
    CUresult result = CALL(drv, cuMemRelease, phys.handle);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemRelease(handle %#llx)", (unsigned long long)phys.handle);
}

fcdp_status fcdp__driver_range_reserve(fcdp_driver *drv, size_t bytes, fcdp_dptr *base_out) {
    CUdeviceptr base;
    CUresult result = CALL(drv, cuMemAddressReserve, &base, bytes, drv->page_bytes, 0, 0);
    /* The process is out of addresses, not of memory, so there is nothing that policy could reclaim. */
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return fcdp__fail(FCDP_ERR_DRIVER,
                          "cuMemAddressReserve(%zu bytes): %s: no device addresses are left for the range",
                          bytes, fcdp__driver_result_name(drv, result));
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuMemAddressReserve(%zu bytes)", bytes);
    base_out->addr = base;
    return FCDP_OK;
}

fcdp_status fcdp__driver_range_free(fcdp_driver *drv, fcdp_dptr base, size_t bytes) {
    CUresult result = CALL(drv, cuMemAddressFree, base.addr, bytes);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemAddressFree(%#llx, %zu bytes)",
                               (unsigned long long)base.addr, bytes);
}

fcdp_status fcdp__driver_map(fcdp_driver *drv, fcdp_dptr at, size_t bytes, fcdp_phys phys) {
    CUresult result = CALL(drv, cuMemMap, at.addr, bytes, 0, phys.handle, 0);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemMap(%#llx, %zu bytes, handle %#llx)",
                               (unsigned long long)at.addr, bytes, (unsigned long long)phys.handle);
}

fcdp_status fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes) {
    CUresult result = CALL(drv, cuMemUnmap, at.addr, bytes);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemUnmap(%#llx, %zu bytes)", (unsigned long long)at.addr,
                               bytes);
}

fcdp_status fcdp__driver_set_access(fcdp_driver *drv, fcdp_dptr at, size_t bytes) {
    CUmemAccessDesc desc = {{CU_MEM_LOCATION_TYPE_DEVICE, drv->device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult result = CALL(drv, cuMemSetAccess, at.addr, bytes, &desc, 1);
    for (int i = 1; result == CUDA_ERROR_NOT_READY && i < MAX_ACCESS_TRIES; i++) {
        result = CALL(drv, cuCtxSynchronize);
        if (result != CUDA_SUCCESS)
            return fcdp__driver_failed(drv, result, "cuCtxSynchronize before another cuMemSetAccess");
        result = CALL(drv, cuMemSetAccess, at.addr, bytes, &desc, 1);
    }
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemSetAccess(%#llx, %zu bytes)", (unsigned long long)at.addr,
                               bytes);
}

/* ---- copies, streams, events ---- */

fcdp_status fcdp__driver_copy_h2d(fcdp_driver *drv, fcdp_dptr dst, const void *src, size_t bytes,
                                  fcdp_stream stream) {
    CUresult result = CALL(drv, cuMemcpyHtoDAsync_v2, dst.addr, src, bytes, stream);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemcpyHtoDAsync(to %#llx, from %p, %zu bytes)",
                               (unsigned long long)dst.addr, src, bytes);
}

fcdp_status fcdp__driver_copy_d2h(fcdp_driver *drv, void *dst, fcdp_dptr src, size_t bytes,
                                  fcdp_stream stream) {
    CUresult result = CALL(drv, cuMemcpyDtoHAsync_v2, dst, src.addr, bytes, stream);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemcpyDtoHAsync(to %p, from %#llx, %zu bytes)", dst,
                               (unsigned long long)src.addr, bytes);
}

fcdp_status fcdp__driver_copy_d2d(fcdp_driver *drv, fcdp_dptr dst, fcdp_dptr src, size_t bytes,
                                  fcdp_stream stream) {
    CUresult result = CALL(drv, cuMemcpyDtoDAsync_v2, dst.addr, src.addr, bytes, stream);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuMemcpyDtoDAsync(to %#llx, from %#llx, %zu bytes)",
                               (unsigned long long)dst.addr, (unsigned long long)src.addr, bytes);
}

/* CUDA may refuse pitches that it has not chosen itself, and those above 2 GiB. */
fcdp_status fcdp__driver_copy_rows(fcdp_driver *drv, const fcdp_rows *rows, fcdp_stream stream) {
    CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                          .srcDevice = rows->src.addr,
                          .srcPitch = rows->src_stride,
                          .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                          .dstDevice = rows->dst.addr,
                          .dstPitch = rows->dst_stride,
                          .WidthInBytes = rows->bytes,
                          .Height = rows->n};
    CUresult result = CALL(drv, cuMemcpy2DAsync_v2, &copy, stream);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    if (result != CUDA_ERROR_INVALID_VALUE)
        return fcdp__driver_failed(
            drv, result, "cuMemcpy2DAsync(to %#llx, from %#llx, %zu rows of %zu bytes)",
            (unsigned long long)rows->dst.addr, (unsigned long long)rows->src.addr, rows->n, rows->bytes);
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < rows->n && !status; i++)
        status = fcdp__driver_copy_d2d(drv, fcdp__dptr_add(rows->dst, i * rows->dst_stride),
                                       fcdp__dptr_add(rows->src, i * rows->src_stride), rows->bytes, stream);
    return status;
}

fcdp_status fcdp__driver_stream_create(fcdp_driver *drv, fcdp_stream *stream_out) {
    CUstream stream;
    CUresult result = CALL(drv, cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING,
                           HIGHEST_PRIORITY);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuStreamCreateWithPriority(device %d)", drv->ordinal);
    *stream_out = stream;
    return FCDP_OK;
}

void fcdp__driver_stream_destroy(fcdp_driver *drv, fcdp_stream stream) {
    CUresult result = CALL(drv, cuStreamDestroy_v2, stream);
    if (result != CUDA_SUCCESS)
        fcdp__log(FCDP_LOG_DEBUG, "cuStreamDestroy(%p): %s", stream, fcdp__driver_result_name(drv, result));
}

static fcdp_status stream_spin(fcdp_driver *drv, fcdp_stream stream) {
    CUresult result = CALL(drv, cuStreamSynchronize, stream);
    return result == CUDA_SUCCESS ? FCDP_OK
                                  : fcdp__driver_failed(drv, result, "cuStreamSynchronize(%p)", stream);
}

/* cuStreamSynchronize obeys the context's flags, which the framework sets, and spins a core by default. So it
 * is used only where the driver has no event to spare. */
fcdp_status fcdp__driver_stream_sync(fcdp_driver *drv, fcdp_stream stream) {
    fcdp_event end = NULL;
    if (fcdp__driver_event_create_blocking(drv, &end)) return stream_spin(drv, stream);
    fcdp_status status = fcdp__driver_event_record(drv, end, stream);
    status = status ? stream_spin(drv, stream) : fcdp__driver_event_sync(drv, end);
    fcdp__driver_event_destroy(drv, end);
    return status;
}

fcdp_status fcdp__driver_sync(fcdp_driver *drv) {
    CUresult result = CALL(drv, cuCtxSynchronize);
    return result == CUDA_SUCCESS ? FCDP_OK : fcdp__driver_failed(drv, result, "cuCtxSynchronize()");
}

fcdp_status fcdp__driver_stream_query(fcdp_driver *drv, fcdp_stream stream) {
    CUresult result = CALL(drv, cuStreamQuery, stream);
    if (result == CUDA_ERROR_NOT_READY) return FCDP_PENDING;
    return result == CUDA_SUCCESS ? FCDP_OK : fcdp__driver_failed(drv, result, "cuStreamQuery(%p)", stream);
}

fcdp_status fcdp__driver_stream_capture_query(fcdp_driver *drv, fcdp_stream stream) {
    int capture = 0; /* CU_STREAM_CAPTURE_STATUS_NONE */
    CUresult result = CALL(drv, cuStreamIsCapturing, stream, &capture);
    /* the legacy stream, beside one that captures */
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return FCDP_PENDING;
    if (result != CUDA_SUCCESS) return fcdp__driver_failed(drv, result, "cuStreamIsCapturing(%p)", stream);
    return capture ? FCDP_PENDING : FCDP_OK;
}

fcdp_status fcdp__driver_capture_mode_exchange(fcdp_driver *drv, int *mode) {
    CUresult result = CALL(drv, cuThreadExchangeStreamCaptureMode, mode);
    return result == CUDA_SUCCESS
               ? FCDP_OK
               : fcdp__driver_failed(drv, result, "cuThreadExchangeStreamCaptureMode(%d)", *mode);
}

fcdp_status fcdp__driver_stream_wait(fcdp_driver *drv, fcdp_stream stream, fcdp_event event) {
    CUresult result = CALL(drv, cuStreamWaitEvent, stream, event, 0);
    return result == CUDA_SUCCESS
               ? FCDP_OK
               : fcdp__driver_failed(drv, result, "cuStreamWaitEvent(%p, event %p)", stream, event);
}

static fcdp_status event_create(fcdp_driver *drv, unsigned flags, fcdp_event *event_out) {
    CUevent event;
    CUresult result = CALL(drv, cuEventCreate, &event, flags);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuEventCreate(device %d)", drv->ordinal);
    *event_out = event;
    return FCDP_OK;
}

fcdp_status fcdp__driver_event_create(fcdp_driver *drv, fcdp_event *event_out) {
    return event_create(drv, CU_EVENT_DISABLE_TIMING, event_out);
}

fcdp_status fcdp__driver_event_create_blocking(fcdp_driver *drv, fcdp_event *event_out) {
    return event_create(drv, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC, event_out);
}

fcdp_status fcdp__driver_events_make_blocking(fcdp_driver *drv, fcdp_event *const *events, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (*events[i]) continue;
        fcdp_status status = fcdp__driver_event_create_blocking(drv, events[i]);
        if (!status) continue;
        *events[i] = NULL;
        return status;
    }
    return FCDP_OK;
}

void fcdp__driver_event_destroy(fcdp_driver *drv, fcdp_event event) {
    CUresult result = CALL(drv, cuEventDestroy_v2, event);
    if (result != CUDA_SUCCESS)
        fcdp__log(FCDP_LOG_DEBUG, "cuEventDestroy(%p): %s", event, fcdp__driver_result_name(drv, result));
}

fcdp_status fcdp__driver_event_record(fcdp_driver *drv, fcdp_event event, fcdp_stream stream) {
    CUresult result = CALL(drv, cuEventRecord, event, stream);
    return result == CUDA_SUCCESS
               ? FCDP_OK
               : fcdp__driver_failed(drv, result, "cuEventRecord(%p, stream %p)", event, stream);
}

fcdp_status fcdp__driver_event_sync(fcdp_driver *drv, fcdp_event event) {
    CUresult result = CALL(drv, cuEventSynchronize, event);
    return result == CUDA_SUCCESS ? FCDP_OK
                                  : fcdp__driver_failed(drv, result, "cuEventSynchronize(%p)", event);
}

fcdp_status fcdp__driver_event_query(fcdp_driver *drv, fcdp_event event) {
    CUresult result = CALL(drv, cuEventQuery, event);
    if (result == CUDA_ERROR_NOT_READY) return FCDP_PENDING;
    return result == CUDA_SUCCESS ? FCDP_OK : fcdp__driver_failed(drv, result, "cuEventQuery(%p)", event);
}

/* ---- host functions, values ---- */

fcdp_status fcdp__driver_host_function(fcdp_driver *drv, fcdp_stream stream, fcdp_host_function function,
                                       void *context) {
    CUresult result = CALL(drv, cuLaunchHostFunc, stream, function, context);
    return result == CUDA_SUCCESS ? FCDP_OK
                                  : fcdp__driver_failed(drv, result, "cuLaunchHostFunc(stream %p)", stream);
}

static fcdp_status no_values(const fcdp_driver *drv, const char *name) {
    return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                      "device %d's driver has no %s: it is older than CUDA 11.7; update the driver",
                      drv->ordinal, name);
}

bool fcdp__driver_has_values(const fcdp_driver *drv) {
    return drv->api.cuStreamWriteValue32_v2 && drv->api.cuStreamWaitValue32_v2;
}

fcdp_status fcdp__driver_write_value32(fcdp_driver *drv, fcdp_stream stream, fcdp_dptr word, uint32_t value) {
    if (!drv->api.cuStreamWriteValue32_v2) return no_values(drv, "cuStreamWriteValue32");
    CUresult result = CALL(drv, cuStreamWriteValue32_v2, stream, word.addr, value,
                           CU_STREAM_WRITE_VALUE_DEFAULT);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuStreamWriteValue32(%p, %#llx, %u)", stream,
                               (unsigned long long)word.addr, value);
}

fcdp_status fcdp__driver_wait_value32(fcdp_driver *drv, fcdp_stream stream, fcdp_dptr word, uint32_t value) {
    if (!drv->api.cuStreamWaitValue32_v2) return no_values(drv, "cuStreamWaitValue32");
    CUresult result = CALL(drv, cuStreamWaitValue32_v2, stream, word.addr, value, CU_STREAM_WAIT_VALUE_GEQ);
    if (result == CUDA_SUCCESS) return FCDP_OK;
    return fcdp__driver_failed(drv, result, "cuStreamWaitValue32(%p, %#llx, %u)", stream,
                               (unsigned long long)word.addr, value);
}

/* ---- the simulated driver ---- */

struct simgpu_access { /* as sim/gpu/simgpu.h has it */
    uint64_t address;
    size_t bytes;
    int writes;
};

void fcdp__driver_annotate(fcdp_driver *drv, const char *label) {
    if (drv->sim.annotate) drv->sim.annotate(label);
}

void fcdp__driver_stream_name(fcdp_driver *drv, fcdp_stream stream, const char *name) {
    if (drv->sim.stream_name) drv->sim.stream_name(stream, name);
}

uint64_t fcdp__driver_work_hand(const fcdp_driver *drv) {
    return drv->sim.work_hand ? drv->sim.work_hand() : 0;
}

void fcdp__driver_work_begin(const fcdp_driver *drv, uint64_t from_ns) {
    if (drv->sim.work_begin) drv->sim.work_begin(from_ns);
}

uint64_t fcdp__driver_work_end(const fcdp_driver *drv) {
    return drv->sim.work_end ? drv->sim.work_end() : 0;
}

uint64_t fcdp__driver_work_here(const fcdp_driver *drv) {
    return drv->sim.here_ns ? drv->sim.here_ns() : 0;
}

void fcdp__driver_work_until(const fcdp_driver *drv, uint64_t ns) {
    if (ns > fcdp__driver_work_here(drv)) drv->sim.end_at(ns);
}

/* Its partners: the device's wait, and on the simulated device an acquire. */
void fcdp__driver_word_store(const fcdp_driver *drv, uint32_t *word, uint32_t value) {
    if (drv->sim.word_store)
        drv->sim.word_store(word, value);
    else
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

void fcdp__driver_announce(fcdp_driver *drv, const fcdp_access *accesses, size_t n) {
    if (!drv->sim.announce || n == 0) return;
    struct simgpu_access *told = malloc(n * sizeof *told);
    for (size_t i = 0; told && i < n; i++)
        told[i] = (struct simgpu_access){accesses[i].at.addr, accesses[i].bytes, accesses[i].writes};
    if (!told || drv->sim.announce(told, (unsigned)n))
        fcdp__log(FCDP_LOG_DEBUG, "%zu accesses of a host function go unchecked", n);
    free(told);
}

void *fcdp__driver_sim_symbol(const fcdp_driver *drv, const char *name) {
    return drv->is_sim ? dlsym(drv->library, name) : NULL;
}

/* ---- host memory ---- */

/* Bytes that this process has locked by mlock; what a driver pinned need not be among them. */
static size_t locked_bytes(void) {
    char line[256];
    size_t kib = 0;
    FILE *file = fopen("/proc/self/status", "re");
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "VmLck: %zu kB", &kib) == 1) break;
    fclose(file);
    return kib << 10;
}

/* The usual cause is RLIMIT_MEMLOCK, which CUDA's own error does not name. Whether FCDP_PIN helps, the caller
 * knows. */
static fcdp_status pin_failed(fcdp_driver *drv, CUresult result, const void *at, size_t bytes,
                              size_t n_done) {
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    (void)getrlimit(RLIMIT_MEMLOCK, &limit);
    size_t n_locked = locked_bytes();
    bool limited = limit.rlim_cur != RLIM_INFINITY;
    bool no_room = result == CUDA_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_OPERATING_SYSTEM ||
                   (limited && n_locked + bytes > limit.rlim_cur);
    if (!no_room || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        return fcdp__driver_failed(drv, result, "cuMemHostRegister(%p, %s, after %s)", at,
                                   fcdp__size_text(bytes).s, fcdp__size_text(n_done).s);

    char advice[256] = "free host memory";
    if (limited)
        snprintf(advice, sizeof advice,
                 "locked memory is limited to %s (RLIMIT_MEMLOCK), of which %s are in use: raise the limit "
                 "(ulimit -l unlimited) or free host memory",
                 fcdp__size_text((size_t)limit.rlim_cur).s, fcdp__size_text(n_locked).s);
    return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "cuMemHostRegister(%p, %s, after %s): %s; %s", at,
                      fcdp__size_text(bytes).s, fcdp__size_text(n_done).s,
                      fcdp__driver_result_name(drv, result), advice);
}

static size_t chunk_bytes(size_t begin, size_t bytes) {
    size_t left = bytes - begin;
    return left < fcdp__driver_pin_chunk_bytes ? left : fcdp__driver_pin_chunk_bytes;
}

/* From the last chunk to the first, so that what stays is one range from `at` on. */
fcdp_status fcdp__driver_host_unpin(fcdp_driver *drv, void *at, size_t bytes, size_t *stay_bytes_out) {
    size_t n_chunks = (bytes + fcdp__driver_pin_chunk_bytes - 1) / fcdp__driver_pin_chunk_bytes;
    for (; n_chunks; n_chunks--) {
        size_t begin = (n_chunks - 1) * fcdp__driver_pin_chunk_bytes, n = chunk_bytes(begin, bytes);
        CUresult result = CALL(drv, cuMemHostUnregister, (char *)at + begin);
        if (result != CUDA_SUCCESS) result = CALL(drv, cuMemHostUnregister, (char *)at + begin);
        if (result != CUDA_SUCCESS) {
            *stay_bytes_out = begin + n;
            return fcdp__driver_failed(drv, result, "cuMemHostUnregister(%p)", (char *)at + begin);
        }
        atomic_fetch_add_explicit(&drv->n_pins_undone, 1, memory_order_relaxed);
        atomic_fetch_sub_explicit(&drv->pinned_bytes, n, memory_order_relaxed);
    }
    *stay_bytes_out = 0;
    return FCDP_OK;
}

fcdp_status fcdp__driver_host_pin(fcdp_driver *drv, void *at, size_t bytes, size_t *stay_bytes_out) {
    *stay_bytes_out = 0;
    for (size_t n_done = 0; n_done < bytes;) {
        size_t n = chunk_bytes(n_done, bytes);
        CUresult result = CALL(drv, cuMemHostRegister_v2, (char *)at + n_done, n,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
        if (result != CUDA_SUCCESS) {
            fcdp_failure failure = fcdp__failure_keep(pin_failed(drv, result, at, bytes, n_done));
            (void)!fcdp__driver_host_unpin(drv, at, n_done, stay_bytes_out);
            return fcdp__failure_restore(&failure);
        }
        atomic_fetch_add_explicit(&drv->n_pins_made, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&drv->pinned_bytes, n, memory_order_relaxed);
        n_done += n;
    }
    return FCDP_OK;
}

fcdp_driver_pins fcdp__driver_pins_get(const fcdp_driver *drv) {
    return (fcdp_driver_pins){.n_made = atomic_load_explicit(&drv->n_pins_made, memory_order_relaxed),
                              .n_undone = atomic_load_explicit(&drv->n_pins_undone, memory_order_relaxed),
                              .bytes = atomic_load_explicit(&drv->pinned_bytes, memory_order_relaxed)};
}

fcdp_status fcdp__driver_host_dptr(fcdp_driver *drv, void *host, fcdp_dptr *at_out) {
    CUdeviceptr at;
    CUresult result = CALL(drv, cuMemHostGetDevicePointer_v2, &at, host, 0);
    if (result != CUDA_SUCCESS)
        return fcdp__driver_failed(drv, result, "cuMemHostGetDevicePointer(%p)", host);
    at_out->addr = at;
    return FCDP_OK;
}

/* ---- timing events ---- */

/* A failure is a status alone: the thread's failure text and the log describe the program's own work, and a
 * measurement must not change them. */
static fcdp_status timer_status(CUresult result) {
    if (result == CUDA_ERROR_NOT_READY) return FCDP_PENDING;
    return result == CUDA_SUCCESS ? FCDP_OK : FCDP_ERR_DRIVER;
}

/* Drivers before CUDA 12.8 have the first version alone. */
static bool has_times(const fcdp_driver *drv) {
    return drv->api.cuEventElapsedTime_v2 || drv->api.cuEventElapsedTime;
}

fcdp_status fcdp__driver_timer_create(fcdp_driver *drv, fcdp_event *event_out) {
    CUevent event;
    if (!has_times(drv)) return FCDP_ERR_UNSUPPORTED;
    fcdp_status status = timer_status(CALL(drv, cuEventCreate, &event, 0));
    if (!status) *event_out = event;
    return status;
}

fcdp_status fcdp__driver_timer_record(fcdp_driver *drv, fcdp_event event, fcdp_stream stream) {
    return timer_status(CALL(drv, cuEventRecord, event, stream));
}

fcdp_status fcdp__driver_timer_wait(fcdp_driver *drv, fcdp_stream stream, fcdp_event event) {
    return timer_status(CALL(drv, cuStreamWaitEvent, stream, event, 0));
}

fcdp_status fcdp__driver_timer_elapsed(fcdp_driver *drv, fcdp_event start, fcdp_event end, double *ns_out) {
    float milliseconds = 0;
    if (!has_times(drv)) return FCDP_ERR_UNSUPPORTED;
    fcdp_status status = timer_status(drv->api.cuEventElapsedTime_v2
                                          ? CALL(drv, cuEventElapsedTime_v2, &milliseconds, start, end)
                                          : CALL(drv, cuEventElapsedTime, &milliseconds, start, end));
    if (!status) *ns_out = (double)milliseconds * 1e6;
    return status;
}

/* ---- kernels ---- */

struct simgpu_module { /* as sim/gpu/simgpu.h has it */
    const char *image, *entry;
    size_t task_bytes;
    unsigned n_read, n_written;
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
        struct simgpu_module told = {source->image,  source->entry,     source->task_bytes,
                                     source->n_read, source->n_written, source->run};
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
