// memory.cpp - bytes: tensors from fcdp_alloc on simgpu's pages, and pinned host memory.
//
// A tensor's memory comes from the hooks that FCDP gives PyTorch's pluggable CUDA allocator, so that tensors
// and gathered parameters share one pool here too. A freed block is used again in the order of the stream on
// which it was made, and behind every stream that record_stream named. simgpu's pages are mapped into this
// process: PyTorch's CPU kernels compute on them.
//
// Pinned memory is PyTorch's own caching host allocator over memory that simgpu has registered.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/version.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

namespace sim {

// ---- of tensors ----

using MallocHook = void *(*)(size_t bytes, int ordinal, void *stream);
using FreeHook = void (*)(void *at, size_t bytes, int ordinal, void *stream);
using RecordHook = void (*)(void *at, void *stream);
using ResetHook = void (*)();

struct Block {
    void *at;
    size_t bytes;
    StreamHandle stream;
};

static constexpr int ORDINAL = 0; // simgpu has one device, whatever its index in torch

static void block_free(void *context) {
    auto *block = static_cast<Block *>(context);
    reinterpret_cast<FreeHook>(settings().free)(block->at, block->bytes, ORDINAL, block->stream);
    delete block;
}

static const Figures *figures;

void figures_from(const Figures *of) {
    figures = of;
}

struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t bytes) override {
        c10::Device on = device();
        use(on.index());
        if (bytes == 0) return {nullptr, nullptr, &block_free, on};
        StreamHandle stream = current();
        void *at = reinterpret_cast<MallocHook>(settings().malloc)(bytes, ORDINAL, stream);
        return {at, new Block{at, bytes, stream}, &block_free, on};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return nullptr; // a block is more than its address
    }
    void copy_data(void *dst, const void *src, size_t bytes) const override {
        copy_bytes(Copy::kOnDevice, dst, src, bytes, current());
    }
    bool initialized() override {
        return settings().malloc != 0;
    }
    void emptyCache(c10::MempoolId_t) override {
        reinterpret_cast<ResetHook>(settings().reset)();
    }
    void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
        record_stream(data, handle_of(stream));
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        return figures->stats();
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {
        figures->reset_accumulated();
    }
    void resetPeakStats(c10::DeviceIndex) override {
        figures->reset_peaks();
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
        return memory_info();
    }
};

static Allocator device_allocator;
REGISTER_ALLOCATOR(kSim, &device_allocator);

c10::Allocator *allocator() {
    return &device_allocator;
}

void record_stream(const c10::DataPtr &data, StreamHandle stream) {
    if (data) reinterpret_cast<RecordHook>(settings().record_stream)(data.get(), stream);
}

// The bytes move in the order of the current stream, as on CUDA: the old block is free behind the copy.
void storage_resize(const c10::Storage &storage, size_t bytes) {
    c10::StorageImpl *impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(),
                "sim: a storage whose memory belongs to another library cannot be resized");
    c10::DataPtr fresh = device_allocator.allocate(bytes);
    size_t kept_bytes = std::min(bytes, impl->nbytes());
    if (kept_bytes) copy_bytes(Copy::kOnDevice, fresh.get(), impl->data(), kept_bytes, current());
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
}

// ---- pinned ----

static std::mutex pinned_lock;
static std::map<uintptr_t, size_t> pinned_ranges; // address to bytes of what is registered

struct PinnedImpl final : at::CachingHostAllocatorImpl<c10::Stream, c10::Event> {
    static size_t in_pages(size_t bytes) {
        static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        return (bytes + page - 1) / page * page;
    }
    // Pages of its own, so that a registration covers nothing else.
    void allocate_host_memory(size_t wanted_bytes, void **at) override {
        size_t bytes = in_pages(wanted_bytes);
        *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        TORCH_CHECK(*at != MAP_FAILED, "sim: no host memory for ", bytes, " pinned bytes");
        host_register(*at, bytes);
        std::lock_guard<std::mutex> guard(pinned_lock);
        pinned_ranges[reinterpret_cast<uintptr_t>(*at)] = bytes;
    }
    void free_block(at::HostBlock<c10::Stream> *block) override {
        {
            std::lock_guard<std::mutex> guard(pinned_lock);
            pinned_ranges.erase(reinterpret_cast<uintptr_t>(block->ptr_));
        }
        host_unregister(block->ptr_);
        munmap(block->ptr_, in_pages(block->size_));
    }
    void record_stream(std::optional<std::vector<c10::Event>> &events, c10::Stream stream) override {
        c10::Event event(kSim);
        event.record(stream);
        events->push_back(std::move(event));
    }
    bool query_event(c10::Event &event) override {
        return event.query();
    }
    c10::Stream get_current_stream() const override {
        return stream_of(current());
    }
    bool stream_is_capturing(c10::Stream) const override {
        return false;
    }
};

void pinned_free(void *at);
struct Pinned final : at::CachingHostAllocatorInterface<PinnedImpl, pinned_free> {};
static Pinned pinned;
void pinned_free(void *at) {
    pinned.free(at);
}
REGISTER_HOST_ALLOCATOR(kSim, &pinned);

c10::Allocator *pinned_allocator() {
    return &pinned;
}

bool is_pinned(const void *address) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto at = reinterpret_cast<uintptr_t>(address);
    auto next = pinned_ranges.upper_bound(at);
    if (next == pinned_ranges.begin()) return false;
    auto range = std::prev(next);
    return at < range->first + range->second;
}

void pinned_record(const at::Tensor &host, StreamHandle stream) {
    const c10::DataPtr &data = host.storage().data_ptr();
    pinned.record_event(data.get(), data.get_context(), stream_of(stream));
}

void pinned_empty_cache() {
    pinned.empty_cache();
}

} // namespace sim
