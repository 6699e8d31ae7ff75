/* copy_if.c - what surrounds the kernel of copy_if.cu: its tasks, and its twin for the simulated device. */
#include "comm/copy_if.h"

#include <string.h>

extern const char fcdp__copy_if_ptx[]; /* comm/CMakeLists.txt makes it of copy_if.ptx */

static void run_task(void *task) {
    const fcdp_copy_if_task *of = task;
    if (of->wanted) memcpy((void *)(uintptr_t)of->to, (const void *)(uintptr_t)of->from, of->to_bytes);
}

const fcdp_kernel_source fcdp__copy_if_kernel = {
    .image = fcdp__copy_if_ptx,
    .entry = "fcdp_copy_if",
    .n_threads = FCDP_COPY_IF_THREADS,
    .task_bytes = sizeof(fcdp_copy_if_task),
    .n_read = 1,
    .n_written = 1,
    .run = run_task,
};

size_t fcdp__copy_if_tasks_of(size_t bytes) {
    return bytes / FCDP_COPY_IF_TASK_BYTES + (bytes % FCDP_COPY_IF_TASK_BYTES != 0);
}

void fcdp__copy_if_tasks_fill(fcdp_copy_if_task *tasks, fcdp_dptr to, fcdp_dptr from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += FCDP_COPY_IF_TASK_BYTES, tasks++) {
        size_t here = bytes - at < FCDP_COPY_IF_TASK_BYTES ? bytes - at : FCDP_COPY_IF_TASK_BYTES;
        *tasks = (fcdp_copy_if_task){
            .from = from.addr + at, .from_bytes = here, .to = to.addr + at, .to_bytes = here};
    }
}
