/* copy_if.h - copies to a device of what the host has, enqueued before it is known whether they are wanted.
 *
 * Once a stream waits for something, what is enqueued behind that by another thread may come too late: it can
 * lie behind the wait in a hardware queue that both share. So a copy that only the outcome of a wait calls
 * for is a kernel, enqueued in the program's order, which reads from its tasks whether it has to copy. They
 * say no, and cost their reading, unless the host says yes before the stream comes to the kernel.
 */
#ifndef FCDP_COPY_IF_H
#define FCDP_COPY_IF_H

#include "alloc/driver.h"

/* A block's. */
typedef struct fcdp_copy_if_task {
    uint64_t from, from_bytes; /* page-locked host memory, as the device sees it */
    uint64_t to, to_bytes;     /* as many, at most FCDP_COPY_IF_TASK_BYTES */
    uint64_t wanted;           /* 0: nothing is copied */
    uint64_t rest[3];
} fcdp_copy_if_task;
enum { FCDP_COPY_IF_TASK_BYTES = 256 << 10, FCDP_COPY_IF_THREADS = 256 };

/* copy_if.ptx, with the same function in C for the simulated device. */
extern const fcdp_kernel_source fcdp__copy_if_kernel;

/* Tasks of so many bytes. */
size_t fcdp__copy_if_tasks_of(size_t bytes);
/* All of them; none is wanted. */
void fcdp__copy_if_tasks_fill(fcdp_copy_if_task *tasks, fcdp_dptr to, fcdp_dptr from, size_t bytes);

#endif
