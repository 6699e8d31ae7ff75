/* mover.h - copies between device pages and host memory, on two streams of its own, one each way.
 *
 * A run is synchronous for its caller: when it returns, well or not, the device no longer touches the pieces. Any thread
 * may run copies; those of different threads in one direction share the stream.
 */
#ifndef FCDP_MOVER_H
#define FCDP_MOVER_H

#include "alloc/driver.h"

typedef struct fcdp_mover fcdp_mover;

typedef enum fcdp_direction { FCDP_TO_HOST, FCDP_TO_DEVICE, FCDP_N_DIRECTIONS } fcdp_direction;

typedef struct fcdp_copy {
    fcdp_dptr device;
    void *host;
    size_t bytes;
} fcdp_copy;

fcdp_status fcdp__mover_create(fcdp_driver *drv, fcdp_mover **mover_out) FCDP_MUST_CHECK;
void fcdp__mover_destroy(fcdp_mover *mover);
/* After all of `after` have passed, carry out the copies, and wait for them. Nothing is waited for when there is no byte to copy. */
fcdp_status fcdp__mover_run(fcdp_mover *mover, fcdp_direction direction, const fcdp_copy *copies,
                            size_t n_copies, const fcdp_event *after, size_t n_after) FCDP_MUST_CHECK;
/* Bytes of all runs that succeeded. */
uint64_t fcdp__mover_bytes(const fcdp_mover *mover, fcdp_direction direction);

#endif
