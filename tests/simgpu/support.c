#include "tests/simgpu/support.h"

#include <signal.h>
#include <sys/mman.h>

const CUmemLocation on_device = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
const CUmemAllocationProp device_memory = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
const CUmemAllocationProp exportable_memory = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
const CUmemAccessDesc read_write = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
const CUmemAccessDesc read_only = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ};
const CUmemAccessDesc no_access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_NONE};

int fresh_device(void **state) {
    (void)state;
    CUcontext context;
    simgpu_reset();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    return 0;
}

int end_device(void **state) {
    (void)state;
    simgpu_reset();
    return 0;
}

struct simgpu_live live_now(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    return live;
}

CUmemGenericAllocationHandle handle_make(size_t bytes) {
    CUmemGenericAllocationHandle handle;
    OK(cuMemCreate(&handle, bytes, &device_memory, 0));
    return handle;
}

CUdeviceptr range_make(size_t bytes) {
    CUdeviceptr at;
    OK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    return at;
}

struct pages pages_make(size_t n) {
    struct pages pages = {.at = range_make(n * PAGE), .n = n};
    for (size_t i = 0; i < n; i++) {
        pages.handles[i] = handle_make(PAGE);
        OK(cuMemMap(pages.at + i * PAGE, PAGE, 0, pages.handles[i], 0));
    }
    OK(cuMemSetAccess(pages.at, n * PAGE, &read_write, 1));
    return pages;
}

void pages_destroy(struct pages *pages) {
    OK(cuMemUnmap(pages->at, pages->n * PAGE));
    for (size_t i = 0; i < pages->n; i++) OK(cuMemRelease(pages->handles[i]));
    OK(cuMemAddressFree(pages->at, pages->n * PAGE));
}

static sigjmp_buf faulted;

static void on_fault(int signal) {
    (void)signal;
    siglongjmp(faulted, 1);
}

static bool touches(CUdeviceptr address, bool write) {
    struct sigaction action = {.sa_handler = on_fault}, before;
    volatile unsigned char *byte = bytes_at(address);
    sigaction(SIGSEGV, &action, &before);
    volatile bool through = false; /* kept over siglongjmp */
    if (sigsetjmp(faulted, 1) == 0) {
        unsigned char value = *byte;
        if (write) *byte = value;
        through = true;
    }
    sigaction(SIGSEGV, &before, NULL);
    return through;
}

bool can_read(CUdeviceptr address) {
    return touches(address, false);
}
bool can_write(CUdeviceptr address) {
    return touches(address, true);
}

void *host_make(size_t bytes, bool registered) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    if (registered) OK(cuMemHostRegister_v2(memory, bytes, CU_MEMHOSTREGISTER_DEVICEMAP));
    return memory;
}

void host_destroy(void *memory, size_t bytes) {
    munmap(memory, bytes);
}

static void gate_function(void *argument) {
    struct gate *gate = argument;
    sem_post(&gate->entered);
    while (sem_wait(&gate->opened) != 0) continue;
}

void gate_close(struct gate *gate, CUstream stream) {
    sem_init(&gate->entered, 0, 0);
    sem_init(&gate->opened, 0, 0);
    OK(cuLaunchHostFunc(stream, gate_function, gate));
}

void gate_wait_entered(struct gate *gate) {
    while (sem_wait(&gate->entered) != 0) continue;
}

void gate_open(struct gate *gate) {
    sem_post(&gate->opened);
}
