// Calls PyTorch's own pluggable allocator as PyTorch does, for a process without a GPU: what it caches,
// counts and throws is torch's code.
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <cstring>

using torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

static CUDAPluggableAllocator *current() {
    return dynamic_cast<CUDAPluggableAllocator *>(c10::cuda::CUDACachingAllocator::get());
}

enum outcome { DONE, OUT_OF_MEMORY, C10_ERROR, OTHER };

template <typename F> static int caught(char *text, size_t room, F call) {
    auto say = [&](const char *what) { snprintf(text, room, "%s", what); };
    try {
        call();
        return DONE;
    } catch (const c10::OutOfMemoryError &error) {
        say(error.what_without_backtrace());
        return OUT_OF_MEMORY;
    } catch (const c10::Error &error) {
        say(error.what_without_backtrace());
        return C10_ERROR;
    } catch (const std::exception &error) {
        say(error.what());
        return OTHER;
    }
}

extern "C" {

int pluggable_is_current() {
    return current() != nullptr;
}

int pluggable_malloc(size_t bytes, int device, void *stream, void **out, char *text, size_t room) {
    return caught(text, room,
                  [&] { *out = current()->malloc(bytes, device, static_cast<cudaStream_t>(stream)); });
}

int pluggable_free(void *at, char *text, size_t room) {
    return caught(text, room, [&] { current()->raw_delete(at); });
}

// Not by recordStream, which turns its CUDAStream into a cudaStream_t by the CUDA runtime, and so needs a
// GPU.
int pluggable_record_stream(void (*hook)(void *, cudaStream_t), void *at, void *stream, char *text,
                            size_t room) {
    return caught(text, room, [&] { hook(at, static_cast<cudaStream_t>(stream)); });
}

int pluggable_begin_pool(int device, uint64_t id, void *only, char *text, size_t room) {
    // Two words of state and a string: more than a std::function keeps inside itself, so that it must be
    // copied rightly.
    std::string ballast(64, 'x');
    return caught(text, room, [&] {
        current()->beginAllocateToPool(device, {id, 7}, [only, ballast](cudaStream_t stream) {
            if (reinterpret_cast<intptr_t>(only) == -1) throw std::runtime_error("the filter throws");
            return ballast.size() == 64 && ballast[63] == 'x' && stream == static_cast<cudaStream_t>(only);
        });
    });
}

int pluggable_end_pool(int device, uint64_t id, char *text, size_t room) {
    return caught(text, room, [&] { current()->endAllocateToPool(device, {id, 7}); });
}

int pluggable_release_pool(int device, uint64_t id, char *text, size_t room) {
    return caught(text, room, [&] { current()->releasePool(device, {id, 7}); });
}

// As PyTorch does where it initialises CUDA.
int pluggable_init(char *text, size_t room) {
    return caught(text, room, [&] { c10::cuda::CUDACachingAllocator::init(1); });
}

int pluggable_snapshot(size_t *n_segments, char *text, size_t room) {
    return caught(text, room,
                  [&] { *n_segments = c10::cuda::CUDACachingAllocator::snapshot().segments.size(); });
}

int pluggable_attach(char *text, size_t room) {
    return caught(text, room, [&] {
        c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
            [](const c10::cuda::CUDACachingAllocator::TraceEntry &) {});
    });
}

// `detach` is c10d::nccl2::ProcessGroupNCCL::detachMemoryHook, of a group that never attached: what it does
// is to make NCCL's hook into the allocator.
int pluggable_nccl_hook(void (*detach)(void *group), char *text, size_t room) {
    alignas(16) static char group[1 << 16];
    return caught(text, room, [&] { detach(group); });
}

int pluggable_empty_cache(char *text, size_t room) {
    return caught(text, room, [&] { current()->emptyCache(); });
}

int pluggable_set_fraction(double fraction, int device, char *text, size_t room) {
    return caught(text, room, [&] { current()->setMemoryFraction(fraction, device); });
}
}
