/* codec_kernel.c - what surrounds the kernel of codec.cu: its tasks, its twin for the simulated device, and
 * the wire of what it has written.
 */
#include "comm/codec_kernel.h"

#include <string.h>

extern const char fcdp__codec_ptx[]; /* comm/CMakeLists.txt makes it of codec.ptx */

static size_t block_bytes_of(unsigned element_bytes) {
    return (size_t)FCDP_DELTA_BLOCK * element_bytes;
}

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Where block i's slot begins. */
static size_t slot_of(size_t i, unsigned element_bytes) {
    return FCDP_DELTA_TASK_BLOCKS * sizeof(uint16_t) + i * block_bytes_of(element_bytes);
}

static void run_task(void *task) {
    const fcdp_delta_task *of = task;
    const char *base = (const char *)(uintptr_t)of->base, *now = (const char *)(uintptr_t)of->now;
    char *slots = (char *)(uintptr_t)of->slots;
    unsigned element_bytes = (unsigned)of->element_bytes;
    uint16_t payload_bytes[FCDP_DELTA_TASK_BLOCKS] = {0};
    size_t block_bytes = block_bytes_of(element_bytes);
    for (size_t i = 0, at = 0; at < of->now_bytes; i++, at += block_bytes)
        payload_bytes[i] = (uint16_t)fcdp__delta_block_encode(
            base + at, now + at, least(block_bytes, of->now_bytes - at), element_bytes,
            slots + slot_of(i, element_bytes));
    memcpy(slots, payload_bytes, sizeof payload_bytes);
}

const fcdp_kernel_source fcdp__delta_kernel = {
    .image = fcdp__codec_ptx,
    .entry = "fcdp_delta_encode",
    .n_threads = FCDP_DELTA_THREADS,
    .task_bytes = sizeof(fcdp_delta_task),
    .n_read = 2,
    .n_written = 1,
    .run = run_task,
};

size_t fcdp__delta_tasks_of(size_t bytes) {
    return bytes / FCDP_DELTA_TASK_BYTES + (bytes % FCDP_DELTA_TASK_BYTES != 0);
}

void fcdp__delta_tasks_fill(fcdp_delta_task *tasks, fcdp_dptr base, fcdp_dptr now, size_t bytes,
                            unsigned element_bytes, fcdp_dptr slots) {
    FCDP_CHECK(2, (base.addr | now.addr) % element_bytes == 0);
    for (size_t i = 0, at = 0; at < bytes; i++, at += FCDP_DELTA_TASK_BYTES) {
        size_t here = least(FCDP_DELTA_TASK_BYTES, bytes - at);
        tasks[i] = (fcdp_delta_task){.now = now.addr + at,
                                     .now_bytes = here,
                                     .base = base.addr + at,
                                     .base_bytes = here,
                                     .slots = slots.addr + i * FCDP_DELTA_SLOTS_BYTES,
                                     .slots_bytes = slot_of(0, element_bytes) + here,
                                     .element_bytes = element_bytes};
    }
}

size_t fcdp__delta_wire_of_slots(const void *slots, size_t bytes, unsigned element_bytes, void *wire_out,
                                 size_t capacity) {
    const char *task = slots;
    char *sizes = wire_out, *wire = wire_out;
    size_t block_bytes = block_bytes_of(element_bytes);
    size_t used = (bytes + block_bytes - 1) / block_bytes * sizeof(uint16_t);
    if (used > capacity) return 0;
    for (size_t left = bytes; left; task += FCDP_DELTA_SLOTS_BYTES) {
        for (size_t i = 0; left && i < FCDP_DELTA_TASK_BYTES / block_bytes; i++) {
            uint16_t payload;
            memcpy(&payload, task + i * sizeof payload, sizeof payload);
            if (payload > least(left, block_bytes) || payload > capacity - used) return 0;
            memcpy(wire + used, task + slot_of(i, element_bytes), payload);
            memcpy(sizes, &payload, sizeof payload);
            sizes += sizeof payload;
            used += payload;
            left -= least(left, block_bytes);
        }
    }
    return used;
}
