// device.cpp - what PyTorch calls a device, by simgpu's driver calls: its streams, events, guard and hooks.
//
// A torch stream is a simgpu stream (its id is the handle, the default stream is the null stream), a torch
// event a simgpu event. Work put on a stream runs on that stream's thread, behind the host, in the order that
// CUDA promises; simgpu knows each operation's reads and writes, and with FCDP_SIM_RACES=1 refuses two that
// nothing orders.
//
// A process has one simulated device, as a process under CUDA_VISIBLE_DEVICES has. torch is told of as many
// as the node has ranks, so that a script's set_device(local_rank) works: the first index that is used is
// this process's own.
//
// All calls of the driver are in this file. An operation that throws on its stream is latched: the host's
// next synchronisation raises it, as CUDA reports a kernel's failure.
#include "sim.h"

#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "sim/gpu/simgpu_cuda.h"

namespace sim {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// ---- the driver ----

#define SIM_CALLS(X)                                                                                         \
    X(cuInit)                                                                                                \
    X(cuDevicePrimaryCtxRetain)                                                                              \
    X(cuCtxSetCurrent)                                                                                       \
    X(cuCtxSynchronize)                                                                                      \
    X(cuMemGetInfo_v2)                                                                                       \
    X(cuStreamCreateWithPriority)                                                                            \
    X(cuStreamSynchronize)                                                                                   \
    X(cuStreamQuery)                                                                                         \
    X(cuStreamWaitEvent)                                                                                     \
    X(cuEventCreate)                                                                                         \
    X(cuEventDestroy_v2)                                                                                     \
    X(cuEventRecord)                                                                                         \
    X(cuEventQuery)                                                                                          \
    X(cuEventSynchronize)                                                                                    \
    X(cuEventElapsedTime_v2)                                                                                 \
    X(cuMemcpyHtoDAsync_v2)                                                                                  \
    X(cuMemcpyDtoHAsync_v2)                                                                                  \
    X(cuMemcpyDtoDAsync_v2)                                                                                  \
    X(cuMemHostRegister_v2)                                                                                  \
    X(cuMemHostUnregister)                                                                                   \
    X(cuGetErrorName)                                                                                        \
    X(simgpu_launch)                                                                                         \
    X(simgpu_unordered)

static struct {
#define X(name) decltype(&::name) name;
    SIM_CALLS(X)
#undef X
    CUcontext context;
} driver;
static Setup given;
static thread_local bool has_context = false;

const Setup &settings() {
    return given;
}

static std::mutex latch;
static std::string latched; // the first failure of an operation, until it is raised

static void latch_failure(const std::string &text) {
    std::lock_guard<std::mutex> guard(latch);
    if (latched.empty()) latched = text;
}

static void raise_latched() {
    std::string text;
    {
        std::lock_guard<std::mutex> guard(latch);
        text.swap(latched);
    }
    TORCH_CHECK(text.empty(), "sim: an operation on a stream failed: ", text);
}

// An error of the driver. Behind 700 there is most often an order that is missing, of which simgpu knows
// more.
static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return;
    raise_latched();
    const char *name = "an unknown CUresult";
    driver.cuGetErrorName(result, &name);
    struct simgpu_unordered unordered;
    driver.simgpu_unordered(&unordered);
    TORCH_CHECK(false, "sim: ", what, ": ", name, " (", static_cast<int>(result), ")",
                unordered.text[0] ? "; " : "", unordered.text);
}

// Every thread that calls the driver needs the context to be current.
static void need_context() {
    if (has_context) return;
    TORCH_CHECK(driver.context, "sim: the device is not set up; import torch_sim first");
    check(driver.cuCtxSetCurrent(driver.context), "cuCtxSetCurrent");
    has_context = true;
}

void setup(const Setup &from) {
    TORCH_CHECK(!driver.context, "sim: the device is set up already");
    void *library = dlopen(from.library.c_str(), RTLD_NOW);
    TORCH_CHECK(library, "sim: cannot load the simulated driver: ", dlerror());
#define X(name)                                                                                              \
    driver.name = reinterpret_cast<decltype(driver.name)>(dlsym(library, #name));                            \
    TORCH_CHECK(driver.name, "sim: ", from.library, " has no ", #name,                                       \
                "; build it again with tools/setup.sh");
    SIM_CALLS(X)
#undef X
    given = from;
    check(driver.cuInit(0), "cuInit");
    check(driver.cuDevicePrimaryCtxRetain(&driver.context, 0), "cuDevicePrimaryCtxRetain");
}

// ---- the current device and stream ----

static std::atomic<int> own_index{-1};     // this process's one; -1: not chosen yet
static thread_local int thread_index = -1; // what this thread has set; -1: as the process
static thread_local CUstream thread_stream = nullptr;

static int current_index() {
    int own = own_index.load(std::memory_order_relaxed);
    return thread_index >= 0 ? thread_index : own >= 0 ? own : 0;
}

Device device() {
    return Device(kSim, static_cast<DeviceIndex>(current_index()));
}

void use(DeviceIndex index) {
    int own = -1;
    if (own_index.compare_exchange_strong(own, index)) return;
    TORCH_CHECK(own == index, "sim: this process simulates sim:", own,
                " alone and cannot use sim:", int(index),
                "; give each rank one index, by torch.sim.set_device(local_rank) before its first tensor");
}

void select(DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < given.n_devices, "sim: there is no sim:", int(index), " among the ",
                given.n_devices, " devices; TORCH_SIM_DEVICES sets how many there are");
    use(index);
    thread_index = index;
}

StreamHandle current() {
    return thread_stream;
}

StreamHandle handle_of(const Stream &stream) {
    return reinterpret_cast<StreamHandle>(stream.id());
}

Stream stream_of(StreamHandle stream) {
    return Stream(Stream::UNSAFE, device(), reinterpret_cast<int64_t>(stream));
}

StreamHandle stream_new(int priority) {
    need_context();
    CUstream stream;
    check(driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority), "cuStreamCreate");
    return stream;
}

// As CUDA's in PyTorch: 32 streams of each priority, handed out in turn and never destroyed.
static StreamHandle stream_from_pool(bool high) {
    static std::mutex lock;
    static struct {
        std::vector<StreamHandle> streams;
        size_t next;
    } pools[2];
    std::lock_guard<std::mutex> guard(lock);
    auto &pool = pools[high];
    if (pool.streams.size() < 32) {
        pool.streams.push_back(stream_new(high ? -1 : 0));
        return pool.streams.back();
    }
    return pool.streams[pool.next++ % 32];
}

// ---- events and waits ----

static bool is_done(CUresult result, const char *what) {
    if (result == CUDA_ERROR_NOT_READY) return false;
    check(result, what);
    return true;
}

void event_record(EventHandle *event, StreamHandle stream, bool timed) {
    need_context();
    auto *made = static_cast<CUevent>(*event);
    if (!made)
        check(driver.cuEventCreate(&made, timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING),
              "cuEventCreate");
    *event = made;
    check(driver.cuEventRecord(made, static_cast<CUstream>(stream)), "cuEventRecord");
}

void event_block(EventHandle event, StreamHandle stream) {
    need_context();
    if (event)
        check(driver.cuStreamWaitEvent(static_cast<CUstream>(stream), static_cast<CUevent>(event), 0),
              "cuStreamWaitEvent");
}

bool event_query(EventHandle event) {
    need_context();
    return !event || is_done(driver.cuEventQuery(static_cast<CUevent>(event)), "cuEventQuery");
}

void event_destroy(EventHandle event) noexcept {
    if (!event || !driver.context) return;
    driver.cuCtxSetCurrent(driver.context);
    driver.cuEventDestroy_v2(static_cast<CUevent>(event));
}

void stream_synchronize(StreamHandle stream) {
    need_context();
    check(driver.cuStreamSynchronize(static_cast<CUstream>(stream)), "waiting for a stream");
    raise_latched();
}

void device_synchronize() {
    need_context();
    check(driver.cuCtxSynchronize(), "waiting for the device");
    raise_latched();
}

std::pair<size_t, size_t> memory_info() {
    need_context();
    size_t free_bytes, total_bytes;
    check(driver.cuMemGetInfo_v2(&free_bytes, &total_bytes), "cuMemGetInfo");
    return {free_bytes, total_bytes};
}

// ---- work ----

using Body = std::function<void()>;

// On the stream's thread. One CPU thread per operator: what a kernel rounds must not depend on how many there
// are.
static void run_body(void *data) {
    std::unique_ptr<Body> body(static_cast<Body *>(data));
    static thread_local bool is_prepared = false;
    if (!is_prepared) at::set_num_threads(1);
    is_prepared = true;
    try {
        (*body)();
    } catch (const c10::Error &error) {
        latch_failure(error.what_without_backtrace());
    } catch (const std::exception &error) {
        latch_failure(error.what());
    }
}

void launch(StreamHandle stream, const char *name, const std::vector<Access> &accesses, uint64_t duration_ns,
            Body body) {
    need_context();
    auto *on = static_cast<CUstream>(stream);
    simgpu_kernel kernel{};
    kernel.name = name;
    // A kernel names so many accesses. What is more is declared by kernels without a body, right in front of
    // it.
    for (const Access &access : accesses) {
        if (kernel.n_accesses == SIMGPU_MAX_ACCESSES) {
            check(static_cast<CUresult>(driver.simgpu_launch(on, &kernel)), name);
            kernel.n_accesses = 0;
        }
        kernel.accesses[kernel.n_accesses++] = {access.address, access.bytes, access.writes};
    }
    auto boxed = std::make_unique<Body>(std::move(body));
    kernel.duration_ns = duration_ns;
    kernel.body = run_body;
    kernel.data = boxed.get();
    check(static_cast<CUresult>(driver.simgpu_launch(on, &kernel)), name);
    boxed.release(); // run_body's now
}

void copy_bytes(Copy kind, void *dst, const void *src, size_t bytes, StreamHandle stream) {
    need_context();
    auto *on = static_cast<CUstream>(stream);
    auto to = reinterpret_cast<CUdeviceptr>(dst), from = reinterpret_cast<CUdeviceptr>(src);
    switch (kind) {
    case Copy::kToDevice:
        return check(driver.cuMemcpyHtoDAsync_v2(to, src, bytes, on), "a copy to the device");
    case Copy::kToHost: return check(driver.cuMemcpyDtoHAsync_v2(dst, from, bytes, on), "a copy to the host");
    case Copy::kOnDevice:
        return check(driver.cuMemcpyDtoDAsync_v2(to, from, bytes, on), "a copy on the device");
    }
}

void host_register(void *address, size_t bytes) {
    need_context();
    check(driver.cuMemHostRegister_v2(address, bytes, CU_MEMHOSTREGISTER_PORTABLE), "cuMemHostRegister");
}

void host_unregister(void *address) {
    need_context();
    check(driver.cuMemHostUnregister(address), "cuMemHostUnregister");
}

// ---- what PyTorch asks ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override {
        return kSim;
    }
    Device exchangeDevice(Device to) const override {
        Device was = device();
        setDevice(to);
        return was;
    }
    Device getDevice() const override {
        return device();
    }
    // Not yet a use: autograd has a thread for each device there could be.
    void setDevice(Device to) const override {
        if (to.has_index()) thread_index = to.index();
    }
    void uncheckedSetDevice(Device to) const noexcept override {
        if (to.has_index()) thread_index = to.index();
    }
    Stream getStream(Device) const override {
        return stream_of(thread_stream);
    }
    Stream getDefaultStream(Device) const override {
        return stream_of(nullptr);
    }
    Stream getStreamFromGlobalPool(Device, bool high) const override {
        return stream_of(stream_from_pool(high));
    }
    Stream getNewStream(Device, int priority) const override {
        return stream_of(stream_from_pool(priority < 0));
    }
    Stream exchangeStream(Stream to) const override {
        Stream was = stream_of(thread_stream);
        thread_stream = static_cast<CUstream>(handle_of(to));
        return was;
    }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
    void *getStreamNativeHandle(const Stream stream) const override {
        return handle_of(stream);
    }
#endif
    DeviceIndex deviceCount() const noexcept override {
        return static_cast<DeviceIndex>(given.n_devices);
    }
    void record(void **event, const Stream &stream, const DeviceIndex,
                const c10::EventFlag flag) const override {
        event_record(event, handle_of(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
    }
    void block(void *event, const Stream &stream) const override {
        event_block(event, handle_of(stream));
    }
    bool queryEvent(void *event) const override {
        return event_query(event);
    }
    void synchronizeEvent(void *event) const override {
        need_context();
        if (event) check(driver.cuEventSynchronize(static_cast<CUevent>(event)), "waiting for an event");
        raise_latched();
    }
    void destroyEvent(void *event, const DeviceIndex) const noexcept override {
        event_destroy(event);
    }
    bool queryStream(const Stream &stream) const override {
        need_context();
        return is_done(driver.cuStreamQuery(static_cast<CUstream>(handle_of(stream))), "cuStreamQuery");
    }
    void synchronizeStream(const Stream &stream) const override {
        stream_synchronize(handle_of(stream));
    }
    void synchronizeDevice(const DeviceIndex) const override {
        device_synchronize();
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const Stream &stream) const override {
        record_stream(data, handle_of(stream));
    }
    double elapsedTime(void *begin, void *end, const DeviceIndex) const override {
        need_context();
        float milliseconds;
        check(driver.cuEventElapsedTime_v2(&milliseconds, static_cast<CUevent>(begin),
                                           static_cast<CUevent>(end)),
              "cuEventElapsedTime (were both events made with enable_timing=True, and recorded?)");
        return milliseconds;
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override {
        return true;
    }
    bool isAvailable() const override {
        return driver.context != nullptr;
    }
    bool hasPrimaryContext(DeviceIndex index) const override {
        int own = own_index.load(std::memory_order_relaxed);
        return own < 0 ? index == 0 : index == own;
    }
    DeviceIndex deviceCount() const override {
        return static_cast<DeviceIndex>(given.n_devices);
    }
    void setCurrentDevice(DeviceIndex index) const override {
        select(index);
    }
    DeviceIndex getCurrentDevice() const override {
        return static_cast<DeviceIndex>(current_index());
    }
    DeviceIndex exchangeDevice(DeviceIndex index) const override {
        DeviceIndex was = getCurrentDevice();
        thread_index = index;
        return was;
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
        return exchangeDevice(index);
    }
    Device getDeviceFromPtr(void *) const override {
        return device();
    }
    bool isPinnedPtr(const void *address) const override {
        return is_pinned(address);
    }
    c10::Allocator *getPinnedMemoryAllocator() const override {
        return pinned_allocator();
    }
    const at::Generator &getDefaultGenerator(DeviceIndex) const override {
        return default_generator();
    }
    at::Generator getNewGenerator(DeviceIndex) const override {
        return generator_new();
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        storage_resize(storage, bytes);
    }
};

static const bool is_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

} // namespace sim
