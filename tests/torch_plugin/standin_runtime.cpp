// For a process without a GPU, loaded before all others: the part of the CUDA runtime that PyTorch's own
// caching allocator calls. Its memory is the simulated driver's, of which it uses handles alone, so that both
// share one capacity; addresses are made up. Nothing is ever under way on its streams.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

static std::mutex mutex;
static std::map<void *, unsigned long long> handles;
static char *next_address = reinterpret_cast<char *>(0x10000000000);
static cudaError_t last = cudaSuccess;
static int n_mallocs;

struct properties {
    int type, handles, location_type, location_id;
    void *windows;
    unsigned char flags[8];
};

template <typename F> static F driver(const char *name) {
    static void *library = dlopen(getenv("STANDIN_DRIVER"), RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<F>(dlsym(library, name));
}

static void enter() {
    void *context;
    driver<int (*)(unsigned)>("cuInit")(0);
    static int retained = driver<int (*)(void **, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
    (void)retained;
    if (!driver<int (*)(void **)>("cuCtxGetCurrent")(&context) && !context) {
        driver<int (*)(void **, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
        driver<int (*)(void *)>("cuCtxSetCurrent")(context);
    }
}

extern "C" {

int standin_mallocs() {
    return n_mallocs;
}
int standin_last_error() {
    return last;
}

cudaError_t cudaMalloc(void **at, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    enter();
    n_mallocs++;
    unsigned long long handle;
    properties what = {1, 0, 1, 0, nullptr, {}};
    size_t rounded = (bytes + (2u << 20) - 1) / (2u << 20) * (2u << 20);
    if (driver<int (*)(unsigned long long *, size_t, const properties *, unsigned long long)>("cuMemCreate")(
            &handle, rounded, &what, 0))
        return last = cudaErrorMemoryAllocation;
    *at = next_address;
    next_address += rounded;
    handles[*at] = handle;
    return cudaSuccess;
}

cudaError_t cudaFree(void *at) {
    std::lock_guard<std::mutex> lock(mutex);
    enter();
    auto it = handles.find(at);
    if (it == handles.end()) return last = cudaErrorInvalidValue;
    driver<int (*)(unsigned long long)>("cuMemRelease")(it->second);
    handles.erase(it);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    enter();
    return driver<int (*)(size_t *, size_t *)>("cuMemGetInfo_v2")(free_bytes, total_bytes) ? cudaErrorUnknown
                                                                                           : cudaSuccess;
}

cudaError_t cudaGetLastError() {
    cudaError_t was = last;
    last = cudaSuccess;
    return was;
}
cudaError_t cudaPeekAtLastError() {
    return last;
}
cudaError_t cudaGetDeviceCount(int *n) {
    return *n = 1, cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    return *device = 0, cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) {
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -1, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    return *stream = nullptr, cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "a stand-in");
    return cudaSuccess;
}
}
