/* codec_kernel.h - the encoder of differences (codec.h) as a kernel: what an array in device memory differs
 * by from its base there, block by block, in page-locked host memory, where the host makes a wire of it.
 *
 * The payloads are those of fcdp__delta_encode, byte for byte. The device does not know where on the wire a
 * block's begins before it has those in front of it. So each block has a slot as large as itself, of which
 * the kernel writes what it needs, and the host moves the payloads together: those alone cross PCIe.
 */
#ifndef FCDP_CODEC_KERNEL_H
#define FCDP_CODEC_KERNEL_H

#include "alloc/driver.h"
#include "comm/codec.h"

/* Of an array, up to FCDP_DELTA_TASK_BYTES: whole blocks, but for the array's last one. */
typedef struct fcdp_delta_task {
    uint64_t now, now_bytes;     /* read, as is the base; each begins at a multiple of element_bytes */
    uint64_t base, base_bytes;   /* as many */
    uint64_t slots, slots_bytes; /* written: u16 payload_bytes[FCDP_DELTA_TASK_BLOCKS], then a slot a block */
    uint64_t element_bytes;      /* 2 or 4 */
    uint64_t rest;               /* 0 */
} fcdp_delta_task;
enum {
    FCDP_DELTA_TASK_BYTES = 64 << 10,
    FCDP_DELTA_TASK_BLOCKS = 16, /* of 2-byte elements; of those of 4 bytes there are half as many */
    FCDP_DELTA_SLOTS_BYTES = FCDP_DELTA_TASK_BLOCKS * 2 + FCDP_DELTA_TASK_BYTES,
    FCDP_DELTA_THREADS = 128
};

/* codec.ptx, with the same function in C for the simulated device. */
extern const fcdp_kernel_source fcdp__delta_kernel;

/* Tasks of an array of so many bytes; their slots take FCDP_DELTA_SLOTS_BYTES each. */
size_t fcdp__delta_tasks_of(size_t bytes);
/* All tasks of one array. `slots` is aligned to 16, as the device sees it. */
void fcdp__delta_tasks_fill(fcdp_delta_task *tasks, fcdp_dptr base, fcdp_dptr now, size_t bytes,
                            unsigned element_bytes, fcdp_dptr slots);
/* The wire of the array, once its tasks have run. Returns as fcdp__delta_encode does. */
size_t fcdp__delta_wire_of_slots(const void *slots, size_t bytes, unsigned element_bytes, void *wire_out,
                                 size_t capacity);

#endif
