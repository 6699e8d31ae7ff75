/* What the simulated GPU's tests share: a fresh device per test, mapped
 * memory, a probe for faults, a held stream. */
#ifndef FCDP_TESTS_SIMGPU_SUPPORT_H
#define FCDP_TESTS_SIMGPU_SUPPORT_H

#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "sim/gpu/simgpu.h"
#include "sim/gpu/simgpu_cuda.h"

#define PAGE ((size_t)2 << 20)
#define OK(call) assert_int_equal(call, CUDA_SUCCESS)
#define REFUSED(call, code) assert_int_equal(call, code)

/* cmocka setup and teardown: a reset device with a current context; afterwards reset again. */
int fresh_device(void **state);
int end_device(void **state);
#define test(function) cmocka_unit_test_setup_teardown(function, fresh_device, end_device)

extern const CUmemAllocationProp device_memory, exportable_memory;
extern const CUmemLocation on_device;
extern const CUmemAccessDesc read_write, read_only, no_access;

struct simgpu_live live_now(void);

/* n pages, one handle each, mapped side by side in a range of their own, READWRITE. */
struct pages {
    CUdeviceptr at;
    size_t n;
    CUmemGenericAllocationHandle handles[64];
};
struct pages pages_make(size_t n);
void pages_destroy(struct pages *pages);
CUmemGenericAllocationHandle handle_make(size_t bytes);
CUdeviceptr range_make(size_t bytes);

/* Whether a load, or a store, by this thread goes through; it faults otherwise. */
bool can_read(CUdeviceptr address);
bool can_write(CUdeviceptr address);
static inline unsigned char *bytes_at(CUdeviceptr address) {
    return (unsigned char *)(uintptr_t)address;
}

/* Host memory; page-aligned, registered if asked for. */
void *host_make(size_t bytes, bool registered);
void host_destroy(void *memory, size_t bytes);

/* A host function that waits until the gate is opened: whatever is enqueued behind it is pending for sure. */
struct gate {
    sem_t entered;
    sem_t opened;
};
void gate_close(struct gate *gate, CUstream stream);
void gate_wait_entered(struct gate *gate);
void gate_open(struct gate *gate);

#endif
