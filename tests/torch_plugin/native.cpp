// Calls PyTorch's own caching allocator as PyTorch does.
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstring>

using namespace c10::cuda::CUDACachingAllocator;

template <typename F> static int caught(char *text, size_t room, F call) {
    try {
        call();
        return 0;
    } catch (const c10::OutOfMemoryError &error) {
        snprintf(text, room, "%s", error.what_without_backtrace());
        return 1;
    } catch (const std::exception &error) {
        snprintf(text, room, "%s", error.what());
        return 2;
    }
}

extern "C" {
int native_init(char *text, size_t room) {
    return caught(text, room, [&] { get()->init(1); });
}
int native_malloc(size_t bytes, void **out, char *text, size_t room) {
    return caught(text, room, [&] { *out = get()->raw_alloc(bytes); });
}
int native_free(void *at, char *text, size_t room) {
    return caught(text, room, [&] { get()->raw_delete(at); });
}
int native_empty_cache(char *text, size_t room) {
    return caught(text, room, [&] { get()->emptyCache(); });
}
}
