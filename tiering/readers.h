/* readers.h - other streams that read a region in its use, as tensor.record_stream(stream) reports them.
 *
 * The program may let another stream read a gathered parameter. The release records an event on each stream
 * that was noted in the use, and the pages pass on behind these events too. The list only grows, by one entry
 * for each stream of the program, and is freed with its region.
 */
#ifndef FCDP_READERS_H
#define FCDP_READERS_H

#include "alloc/driver.h"

#include <stdatomic.h>

typedef struct fcdp_reader fcdp_reader;
struct fcdp_reader {
    fcdp_reader *next; /* fixed */
    fcdp_stream stream;
    fcdp_event
        done;   /* recorded at the last release of a use in which it was noted; if never, it has passed */
    bool noted; /* in this use; under the lock of the list's owner */
};
/* Written under the owner's lock; read without. */
typedef _Atomic(fcdp_reader *) fcdp_readers;

/* The owner's lock is held: `stream` reads the region in the current use. */
fcdp_status fcdp__readers_note(fcdp_readers *readers, fcdp_driver *drv, fcdp_stream stream) FCDP_MUST_CHECK;
/* The same: the use ends. */
fcdp_status fcdp__readers_record(fcdp_readers *readers, fcdp_driver *drv) FCDP_MUST_CHECK;
/* Without the lock: `stream` goes on behind what was recorded; the host does; FCDP_PENDING while it has not
 * passed. */
fcdp_status fcdp__readers_stream_wait(const fcdp_readers *readers, fcdp_driver *drv,
                                      fcdp_stream stream) FCDP_MUST_CHECK;
fcdp_status fcdp__readers_sync(const fcdp_readers *readers, fcdp_driver *drv) FCDP_MUST_CHECK;
fcdp_status fcdp__readers_query(const fcdp_readers *readers, fcdp_driver *drv) FCDP_MUST_CHECK;
void fcdp__readers_free(fcdp_readers *readers, fcdp_driver *drv);

#endif
