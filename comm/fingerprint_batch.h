/* fingerprint_batch.h - the fingerprints of many arrays in device memory by one launch. */
#ifndef FCDP_FINGERPRINT_BATCH_H
#define FCDP_FINGERPRINT_BATCH_H

#include "comm/fingerprint.h"

/* One batch at a time: a kernel, the pinned memory of its tasks, an event. */
typedef struct fcdp_fingerprints fcdp_fingerprints;

/* FCDP_ERR_UNSUPPORTED: the driver cannot run the kernel. */
fcdp_status fcdp__fingerprints_create(fcdp_driver *drv, fcdp_fingerprints **fingerprints_out) FCDP_MUST_CHECK;
/* Another batch, by the kernel of `first`, which is destroyed last. */
fcdp_status fcdp__fingerprints_create_beside(const fcdp_fingerprints *first,
                                             fcdp_fingerprints **fingerprints_out) FCDP_MUST_CHECK;
/* Waits for what was begun. NULL: nothing. */
void fcdp__fingerprints_destroy(fcdp_fingerprints *fingerprints);
/* One launch behind what is on `stream` now, for n arrays: bytes[i] bytes at the device's address arrays[i],
 * of any alignment (one that is not of 16 is read byte by byte, several times slower). Nobody may write them
 * or give them back before the end. */
fcdp_status fcdp__fingerprints_begin(fcdp_fingerprints *fingerprints, const uint64_t *arrays,
                                     const size_t *bytes, size_t n, fcdp_stream stream) FCDP_MUST_CHECK;
/* The host waits, asleep; fingerprints_out[i] of array i. After a failure nothing is
 * begun, unless the device is no more. */
fcdp_status fcdp__fingerprints_end(fcdp_fingerprints *fingerprints,
                                   uint64_t *fingerprints_out) FCDP_MUST_CHECK;

#endif
