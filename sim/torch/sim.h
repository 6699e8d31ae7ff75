// What the files of torch.device("sim") share. ops.cpp tells how an operator runs; device.cpp owns streams,
// events and every call of the simulated driver; memory.cpp owns bytes.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace c10 {
class OperatorHandle;
}

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

// A stream or an event of the simulated driver: CUstream, CUevent. The null stream is nullptr. A
// c10::Stream's id is the stream's handle.
using StreamHandle = void *;
using EventHandle = void *;

// ---- device.cpp ----

// Where the simulated driver and fcdp_alloc's hooks are. Called once, before anything else here.
struct Setup {
    std::string library; // libfcdp_simgpu.so
    uintptr_t malloc, free, record_stream, reset;
    int n_devices; // that torch is told of; this process uses one of them
};
void setup(const Setup &setup);
const Setup &settings();

c10::Device device();             // the current one; its index is what set_device chose
void use(c10::DeviceIndex index); // this process's one device is `index` from now on; raises if it is another
void select(c10::DeviceIndex index);   // set_device
StreamHandle current();                // the calling thread's stream
StreamHandle stream_new(int priority); // lives as long as the process
StreamHandle handle_of(const c10::Stream &stream);
c10::Stream stream_of(StreamHandle stream);

void event_record(EventHandle *event, StreamHandle stream,
                  bool timed); // makes the event where *event is nullptr
void event_block(EventHandle event, StreamHandle stream);
bool event_query(EventHandle event);
void event_destroy(EventHandle event) noexcept;
void stream_synchronize(StreamHandle stream);
void device_synchronize();

// Bytes that an operation touches.
struct Access {
    uint64_t address;
    size_t bytes;
    bool writes;
};

// Puts `body` on the stream, as a kernel of that name which takes at least duration_ns; it runs on the
// stream's thread. What it throws is raised by the host's next synchronisation.
void launch(StreamHandle stream, const char *name, const std::vector<Access> &accesses, uint64_t duration_ns,
            std::function<void()> body);
// Copies of contiguous bytes by the driver, over the simulated PCIe link where one side is the host's. With
// pageable host memory the call waits for the copy, as CUDA's does.
enum class Copy { kToDevice, kToHost, kOnDevice };
void copy_bytes(Copy kind, void *dst, const void *src, size_t bytes, StreamHandle stream);
void host_register(void *address, size_t bytes);
void host_unregister(void *address);     // waits for the device
std::pair<size_t, size_t> memory_info(); // free and total bytes of the device

// ---- memory.cpp ----

c10::Allocator *allocator();
void record_stream(const c10::DataPtr &data, StreamHandle stream);
bool is_pinned(const void *address);
c10::Allocator *pinned_allocator();
void pinned_record(const at::Tensor &host, StreamHandle stream); // in use until the stream comes here
void pinned_empty_cache();
void storage_resize(const c10::Storage &storage, size_t bytes);
// What fcdp_alloc says of itself, for torch.accelerator.memory_stats() and PyTorch's own callers. Given once;
// it lives as long as the process.
struct Figures {
    std::function<c10::CachingDeviceAllocator::DeviceStats()> stats;
    std::function<void()> reset_peaks, reset_accumulated;
};
void figures_from(const Figures *of);

// ---- random.cpp ----

const at::Generator &default_generator();
at::Generator generator_new();
// The CPU generator from which one kernel draws: a function of the device generator's seed and offset.
// Advances it.
at::Generator generator_for_kernel(const std::optional<at::Generator> &asked);

// ---- ops.cpp ----

// The same bytes as a CPU tensor. It holds nothing: only what runs in stream order may use it.
at::Tensor as_cpu(const at::Tensor &tensor);
void add_access(std::vector<Access> &accesses, const at::Tensor &tensor, bool writes);

struct Counts { // of operators since the last reset
    std::atomic<uint64_t> launched, waited, meta_calls, meta_hits;
};
extern Counts counts;
std::vector<std::pair<std::string, uint64_t>> waited_ops(
    bool reset);                              // those for which the host waited, by name
void set_rates(double gflops, double gbytes); // 0: as fast as the CPU

// Runs `handle`, an operator with a CPU kernel, on the arguments on the stack.
void run(const c10::OperatorHandle &handle, torch::jit::Stack *stack);

} // namespace sim
