/* spill.h - slices for which the node's host memory has no room, in a file of this process
 * (FCDP_SPILL_DIR).
 *
 * All bytes pass through a few page-locked buffers, each as large as the largest slice:
 *
 *     store    device -> buffer (the caller's stream) -> file (the spill's thread, behind it)
 *     fetch    file -> buffer (the thread; the host waits), each block compared with its checksum
 *     load     buffer -> device (the caller's stream)
 *
 * A buffer keeps what passed through it until another slice needs it, and what was read next the last time
 * is read ahead (foresight.h). So a fetch waits for the disk only where the disk is slower than the steps.
 *
 * What the disk does not give back as it was stored is lost: fetch says so, and the caller gets the bytes
 * from elsewhere. Once a slice has its place, nothing fails because a disk does, unless
 * that does not answer at all.
 *
 * Threads: calls on one slice are the caller's to order; on several, any threads.
 */
#ifndef FCDP_SPILL_H
#define FCDP_SPILL_H

#include "alloc/driver.h"
#include "base/trace.h"

typedef struct fcdp_spill fcdp_spill;
typedef struct fcdp_spilled fcdp_spilled; /* a slice */

typedef struct fcdp_spill_config {
    uint32_t n_buffers;  /* >= 2 */
    double timeout_s;    /* how long to wait for a disk that does not answer */
    fcdp_counts *counts; /* whose FCDP_COUNT_SPILL_... are raised */
} fcdp_spill_config;
/* FCDP_ERR_OPTION: the directory cannot be used. */
fcdp_status fcdp__spill_open(fcdp_driver *drv, const char *dir, const fcdp_spill_config *config,
                             fcdp_spill **spill_out) FCDP_MUST_CHECK;
/* What would make it faster, for the user; "": nothing. */
const char *fcdp__spill_lacks(const fcdp_spill *spill);
/* All slices have been released. NULL: does nothing. */
void fcdp__spill_close(fcdp_spill *spill);

/* Room in the file for a slice of `bytes`, and in each buffer. `name` for messages, `object` in the trace's
 * table. FCDP_ERR_NO_HOST_MEM: the disk is full, or the buffers cannot be page-locked. */
fcdp_status fcdp__spill_reserve(fcdp_spill *spill, const char *name, uint32_t object, size_t bytes,
                                fcdp_spilled **slice_out) FCDP_MUST_CHECK;
/* Waits for what is under way. NULL: does nothing. */
void fcdp__spill_release(fcdp_spilled *slice);

/* Enqueue the copy of the slice from the device, in place of what it was. The host may wait for a buffer:
 * all that holds one ends without this thread. After a failure the slice is lost. */
fcdp_status fcdp__spill_store(fcdp_spilled *slice, fcdp_dptr from, fcdp_stream stream) FCDP_MUST_CHECK;
/* The host waits until a buffer holds the slice as it was stored, and keeps it there until it is loaded.
 * False: it is lost. Said once: the first time that a disk is at fault. */
bool fcdp__spill_fetch(fcdp_spilled *slice);
/* Enqueue the copy to the device of what was fetched. FCDP_ERR_INVALID: it was not. */
fcdp_status fcdp__spill_load(fcdp_spilled *slice, fcdp_dptr to, fcdp_stream stream) FCDP_MUST_CHECK;

/* Of the file, now. */
uint64_t fcdp__spill_bytes(fcdp_spill *spill);

#endif
