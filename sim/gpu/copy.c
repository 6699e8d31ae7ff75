/* Copies, fills, value operations and host functions: what may be enqueued, and which copies the caller waits
 * for.
 *
 * The device's side of a copy is a simulated device address, or memory that the simulator does not know at
 * all: where tensors of the CPU play those of the device, that is foreign device memory. Registered host
 * memory is never it. The host's side of cuMemcpyHtoD and DtoH is asynchronous when registered, by one
 * registration around all of it; memory that is not registered makes the call wait for the copy, as with
 * CUDA. cuMemcpyAsync tells the direction from the addresses, and takes unknown memory for foreign device
 * memory. Whether device memory is mapped and granted is seen when the copy starts: if not, the sticky error
 * is 700.
 */
#include <stdlib.h>

#include "sim/gpu/internal.h"

enum { SIM_MAX_PITCH = 0x7fffffff }; /* CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far */

static bool is_span(uintptr_t address, size_t bytes) {
    return address && address + bytes >= address;
}

static bool is_device_side(uintptr_t address, size_t bytes) {
    enum sim_place place = simgpu__place_of(address, bytes);
    return place == SIM_RESERVED || place == SIM_FOREIGN;
}

static bool is_host_side(uintptr_t address, size_t bytes, bool *waits_out) {
    enum sim_place place = simgpu__place_of(address, bytes);
    *waits_out = place == SIM_FOREIGN;
    return place == SIM_FOREIGN || place == SIM_PINNED ||
           (place == SIM_RESERVED && simgpu__vspace_is_host(address, bytes));
}

static void add_access(struct sim_op *op, uintptr_t address, bool writes) {
    if (address) op->accesses[op->n_accesses++] = (struct simgpu_access){address, op->bytes, writes};
}

/* The caller of a copy that waits is looked up while the copy runs, and without the lock. */
static CUresult push(CUstream stream, struct sim_op op, bool waits) {
    struct sim_stream *on = simgpu__stream_of(stream);
    if (!on) return CUDA_ERROR_INVALID_HANDLE;
    add_access(&op, op.dst, true);
    add_access(&op, op.src, false);
    if (!waits) return simgpu__stream_push(on, &op);
    struct sim_point *end = simgpu__point_new();
    if (!end) return CUDA_ERROR_OUT_OF_MEMORY;
    end->refs++;
    op.point = end;
    CUresult result = simgpu__stream_push(on, &op);
    if (result == CUDA_SUCCESS) {
        simgpu__block_waits();
        sim_unlock(); /* the caller is looked up without it */
        simgpu__block_begin(op.link == SIM_LINK_TO_HOST ? SIM_cuMemcpyDtoHAsync_v2
                                                        : SIM_cuMemcpyHtoDAsync_v2);
        sim_lock();
        result = simgpu__point_wait(end);
        simgpu__block_end();
    }
    if (result == CUDA_SUCCESS && op.link == SIM_LINK_TO_HOST) simgpu__order_host_learns(&end->position);
    simgpu__point_drop(end);
    return result;
}

/* The answers that need no look at the addresses; true when the call is over with *result_out. */
static bool is_trivial(CUstream stream, uintptr_t dst, uintptr_t src, size_t bytes, CUresult *result_out) {
    if (!simgpu__stream_of(stream))
        *result_out = CUDA_ERROR_INVALID_HANDLE;
    else if (bytes == 0)
        *result_out = CUDA_SUCCESS;
    else if (!is_span(dst, bytes) || !is_span(src, bytes))
        *result_out = CUDA_ERROR_INVALID_VALUE;
    else
        return false;
    return true;
}

static CUresult copy_host_device(uintptr_t dst, uintptr_t src, size_t bytes, CUstream stream,
                                 enum sim_link link) {
    CUresult result;
    if (is_trivial(stream, dst, src, bytes, &result)) return result;
    bool to_device = link == SIM_LINK_TO_DEVICE, waits;
    if (!is_device_side(to_device ? dst : src, bytes) || !is_host_side(to_device ? src : dst, bytes, &waits))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_op op = {.work = SIM_COPY, .link = link, .dst = dst, .src = src, .bytes = bytes};
    return push(stream, op, waits);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    SIM_ENTER(cuMemcpyHtoDAsync_v2);
    sim_lock();
    return sim_unlock_with(copy_host_device(dst, (uintptr_t)src, bytes, stream, SIM_LINK_TO_DEVICE));
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    SIM_ENTER(cuMemcpyDtoHAsync_v2);
    sim_lock();
    return sim_unlock_with(copy_host_device((uintptr_t)dst, src, bytes, stream, SIM_LINK_TO_HOST));
}

static CUresult copy_device(uintptr_t dst, uintptr_t src, size_t bytes, CUstream stream) {
    CUresult result;
    if (is_trivial(stream, dst, src, bytes, &result)) return result;
    if (!is_device_side(dst, bytes) || !is_device_side(src, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return push(stream, (struct sim_op){.work = SIM_COPY, .dst = dst, .src = src, .bytes = bytes}, false);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    SIM_ENTER(cuMemcpyDtoDAsync_v2);
    sim_lock();
    return sim_unlock_with(copy_device(dst, src, bytes, stream));
}

/* Between places of the device alone: each row is a copy of its own, so that what lies between rows may be
 * another stream's. */
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) {
    SIM_ENTER(cuMemcpy2DAsync_v2);
    if (!copy || copy->srcPitch < copy->srcXInBytes + copy->WidthInBytes ||
        copy->dstPitch < copy->dstXInBytes + copy->WidthInBytes || copy->srcPitch > SIM_MAX_PITCH ||
        copy->dstPitch > SIM_MAX_PITCH)
        return CUDA_ERROR_INVALID_VALUE;
    if (copy->srcMemoryType != CU_MEMORYTYPE_DEVICE || copy->dstMemoryType != CU_MEMORYTYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED; /* not modelled */
    uintptr_t dst = copy->dstDevice + copy->dstY * copy->dstPitch + copy->dstXInBytes;
    uintptr_t src = copy->srcDevice + copy->srcY * copy->srcPitch + copy->srcXInBytes;
    CUresult result = CUDA_SUCCESS;
    sim_lock();
    for (size_t i = 0; i < copy->Height && result == CUDA_SUCCESS; i++)
        result = copy_device(dst + i * copy->dstPitch, src + i * copy->srcPitch, copy->WidthInBytes, stream);
    return sim_unlock_with(result);
}

static bool is_known_host(uintptr_t address, size_t bytes) {
    enum sim_place place = simgpu__place_of(address, bytes);
    return place == SIM_PINNED || (place == SIM_RESERVED && simgpu__vspace_is_host(address, bytes));
}

static CUresult copy_any(uintptr_t dst, uintptr_t src, size_t bytes, CUstream stream) {
    CUresult result;
    if (is_trivial(stream, dst, src, bytes, &result)) return result;
    if (simgpu__place_of(dst, bytes) == SIM_MIXED || simgpu__place_of(src, bytes) == SIM_MIXED)
        return CUDA_ERROR_INVALID_VALUE;
    bool to_host = is_known_host(dst, bytes), from_host = is_known_host(src, bytes);
    enum sim_link link = SIM_LINK_NONE;
    if (to_host != from_host) link = to_host ? SIM_LINK_TO_HOST : SIM_LINK_TO_DEVICE;
    return push(stream,
                (struct sim_op){.work = SIM_COPY, .link = link, .dst = dst, .src = src, .bytes = bytes},
                false);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    SIM_ENTER(cuMemcpyAsync);
    sim_lock();
    return sim_unlock_with(copy_any(dst, src, bytes, stream));
}

static CUresult fill(uintptr_t dst, unsigned char value, size_t bytes, CUstream stream) {
    CUresult result;
    if (is_trivial(stream, dst, dst, bytes, &result)) return result;
    if (!is_device_side(dst, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return push(stream, (struct sim_op){.work = SIM_FILL, .dst = dst, .bytes = bytes, .value = value}, false);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
    SIM_ENTER(cuMemsetD8Async);
    sim_lock();
    return sim_unlock_with(fill(dst, value, bytes, stream));
}

/* Values live where the device can reach them: in its memory, or in registered host memory. */
static bool is_value_address(uintptr_t address) {
    if (!address || address % sizeof(uint32_t)) return false;
    enum sim_place place = simgpu__place_of(address, sizeof(uint32_t));
    return place == SIM_RESERVED || place == SIM_PINNED;
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    SIM_ENTER(cuStreamWaitValue32_v2);
    if (flags & CU_STREAM_WAIT_VALUE_FLUSH) return CUDA_ERROR_NOT_SUPPORTED;
    if (flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
    struct sim_site site;
    unsigned long *taught;
    simgpu__site_take(&site);
    sim_lock();
    const struct sim_stream *on = simgpu__stream_of(stream);
    if (on && simgpu__site_drops(&site, SIM_cuStreamWaitValue32_v2, simgpu__stream_label(on), "", &taught))
        return sim_unlock_with(CUDA_SUCCESS);
    if (!is_value_address(address)) return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    struct sim_op op = {
        .work = SIM_WAIT_VALUE, .src = address, .bytes = sizeof(uint32_t), .value = value, .flags = flags};
    return sim_unlock_with(push(stream, op, false));
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    SIM_ENTER(cuStreamWriteValue32_v2);
    if (flags & ~(unsigned)CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    if (!is_value_address(address)) return sim_unlock_with(CUDA_ERROR_INVALID_VALUE);
    struct sim_op op = {
        .work = SIM_WRITE_VALUE, .dst = address, .bytes = sizeof(uint32_t), .value = value, .flags = flags};
    return sim_unlock_with(push(stream, op, false));
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data) {
    struct sim_op op = {.work = SIM_HOST_FUNCTION, .function = function, .user_data = user_data};
    op.stands_in = simgpu__stand_in_taken();
    simgpu__announced_take(&op); /* also when it is refused: what comes next is another function */
    CUresult refused = simgpu__enter(SIM_cuLaunchHostFunc);
    if (refused == CUDA_SUCCESS && !function) refused = CUDA_ERROR_INVALID_VALUE;
    if (refused == CUDA_SUCCESS) {
        sim_lock();
        struct sim_stream *on = simgpu__stream_of(stream);
        if (on) return sim_unlock_with(simgpu__stream_push(on, &op));
        refused = sim_unlock_with(CUDA_ERROR_INVALID_HANDLE);
    }
    free(op.announced);
    return refused;
}
