/* readers.c - the streams that read a region in its use.
 *
 * Waits walk the list without the owner's lock, so an entry is published whole, stays until the region is
 * destroyed, and serves all later uses by its stream.
 */
#include "tiering/readers.h"

#include <stdlib.h>

fcdp_status fcdp__readers_note(fcdp_readers *readers, fcdp_driver *drv, fcdp_stream stream) {
    fcdp_reader *reader = atomic_load_explicit(readers, memory_order_relaxed);
    while (reader && reader->stream != stream) reader = reader->next;
    if (!reader) {
        reader = calloc(1, sizeof *reader);
        if (!reader) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a stream that reads parameters");
        fcdp_status status = fcdp__driver_event_create_blocking(drv, &reader->done);
        if (status) {
            free(reader);
            return status;
        }
        reader->stream = stream;
        reader->next = atomic_load_explicit(readers, memory_order_relaxed);
        atomic_store_explicit(readers, reader, memory_order_release); /* partner: first */
    }
    reader->noted = true;
    return FCDP_OK;
}

fcdp_status fcdp__readers_record(fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_status first_failure = FCDP_OK;
    for (fcdp_reader *r = atomic_load_explicit(readers, memory_order_relaxed); r; r = r->next) {
        if (!r->noted) continue;
        fcdp_status status = fcdp__driver_event_record(drv, r->done, r->stream);
        if (status) status = fcdp__driver_stream_sync(drv, r->stream);
        r->noted = status != FCDP_OK;
        if (!first_failure) first_failure = status;
    }
    return first_failure;
}

static const fcdp_reader *first(const fcdp_readers *readers) {
    return atomic_load_explicit(readers, memory_order_acquire); /* partner: fcdp__readers_note */
}

fcdp_status fcdp__readers_stream_wait(const fcdp_readers *readers, fcdp_driver *drv, fcdp_stream stream) {
    fcdp_status status = FCDP_OK;
    for (const fcdp_reader *r = first(readers); r && !status; r = r->next)
        status = fcdp__driver_stream_wait(drv, stream, r->done);
    return status;
}

fcdp_status fcdp__readers_sync(const fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_status status = FCDP_OK;
    for (const fcdp_reader *r = first(readers); r && !status; r = r->next)
        status = fcdp__driver_event_sync(drv, r->done);
    return status;
}

fcdp_status fcdp__readers_query(const fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_status status = FCDP_OK;
    for (const fcdp_reader *r = first(readers); r && !status; r = r->next)
        status = fcdp__driver_event_query(drv, r->done);
    return status;
}

void fcdp__readers_free(fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_reader *reader = atomic_load_explicit(readers, memory_order_relaxed);
    while (reader) {
        fcdp_reader *next = reader->next;
        fcdp__driver_event_destroy(drv, reader->done);
        free(reader);
        reader = next;
    }
}
