/* spill.c - slices: their places in the file, what is read ahead of its use, and the copies between the
 * device and a buffer. The buffers, and the thread that reads and writes, are those of spill_buffers.h, whose
 * mutex guards all of it.
 */
#include "tiering/spill.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "tiering/foresight.h"
#include "tiering/spill_buffers.h"
#include "tiering/trace_events.h"

struct fcdp_spill {
    fcdp_spill_buffers buffers; /* and the disk */
    /* under their mutex */
    uint32_t n_wanted; /* buffers */
    size_t most_bytes; /* of a slice that has a place */
    fcdp_spilled *free;
    uint64_t end, used_bytes; /* of the file */
    fcdp_foresight foresight;
};

/* ---- reading ---- */

static void wait_count(const fcdp_spill *spill, uint64_t start_ns) {
    fcdp__count(spill->buffers.counts, FCDP_COUNT_SPILL_WAITS, 1);
    fcdp__count(spill->buffers.counts, FCDP_COUNT_SPILL_WAIT_NS, fcdp__now_ns() - start_ns);
}

/* With the mutex: read what will be wanted next into buffers that are free now. What is to be used soonest
 * is touched last, and what holds a slice that is still to come is not taken. */
static void read_ahead(fcdp_spill *spill) {
    enum { MOST = 16 };
    const void *next[MOST];
    uint64_t before = spill->buffers.clock;
    size_t most = spill->n_wanted - 1 < MOST ? spill->n_wanted - 1 : MOST;
    size_t n = fcdp__foresight_reads(&spill->foresight, next, most);
    for (size_t i = n; i > 0; i--) {
        fcdp_spill_buffer *b = fcdp__spill_buffer_of(&spill->buffers, next[i - 1]);
        if (b) fcdp__spill_buffer_touch(&spill->buffers, b);
    }
    for (size_t i = 0; i < n; i++) {
        fcdp_spilled *slice = (fcdp_spilled *)next[i]; /* the foresight knows no more than addresses */
        fcdp_spill_buffer *b = NULL;
        if (!slice->in_file || fcdp__spill_buffer_of(&spill->buffers, slice)) continue;
        if (fcdp__spill_buffer_find_free(&spill->buffers, slice->file_bytes, false, &b) || !b ||
            b->last_use > before)
            return;
        fcdp__spill_buffer_touch(&spill->buffers, b);
        fcdp__spill_buffer_read(&spill->buffers, b, slice);
    }
}

/* With the mutex, which may be released meanwhile: others may begin to read it then. FCDP_PENDING: it is
 * lost. */
static fcdp_status fetch(fcdp_spilled *slice) {
    fcdp_spill *spill = slice->spill;
    uint64_t start_ns = fcdp__now_ns();
    for (;;) {
        fcdp_spill_buffer *b = fcdp__spill_buffer_of(&spill->buffers, slice);
        if (b && b->version != slice->version) return FCDP_PENDING; /* a fault of this file's */
        if (b) b->claimed = true;
        if (b && b->state == FCDP_SPILL_BUFFER_BROKEN) return FCDP_PENDING;
        if (b && b->state != FCDP_SPILL_BUFFER_READING) {
            fcdp__spill_buffer_touch(&spill->buffers, b);
            return FCDP_OK;
        }
        if (b) {
            (void)fcdp__condition_wait(&spill->buffers.changed, &spill->buffers.mutex,
                                       fcdp__now_ns() + FCDP_SPILL_LOOK_NS);
            bool late = b->state == FCDP_SPILL_BUFFER_READING &&
                        fcdp__now_ns() - start_ns > spill->buffers.patience_ns;
            if (b->of == NULL || late) b->claimed = false; /* it could not be read */
            if (late) return fcdp__spill_late_fail(&spill->buffers);
            continue;
        }
        if (!slice->in_file) return FCDP_PENDING;
        bool waits; /* counted with the read */
        fcdp_status status = fcdp__spill_buffer_take(&spill->buffers, slice->file_bytes, slice->filler,
                                                     &waits, &b);
        if (status) return status;
        if (fcdp__spill_buffer_of(&spill->buffers, slice) || !slice->in_file)
            continue; /* what was taken is free */
        b->claimed = true;
        fcdp__spill_buffer_read(&spill->buffers, b, slice);
    }
}

bool fcdp__spill_fetch(fcdp_spilled *slice) {
    fcdp_spill *spill = slice->spill;
    pthread_mutex_lock(&spill->buffers.mutex);
    fcdp_spill_buffer *b = fcdp__spill_buffer_of(&spill->buffers, slice);
    uint64_t start_ns = fcdp__now_ns();
    bool waits = !(b && b->state != FCDP_SPILL_BUFFER_READING) && slice->version;
    fcdp_status status = fetch(slice);
    if (waits) wait_count(spill, start_ns);
    if (status < 0 && !spill->buffers.warned) {
        spill->buffers.warned = true;
        fcdp__log(FCDP_LOG_WARN,
                  "FCDP_SPILL_DIR: '%s' cannot be read, and is gathered again: %s (this is said once)",
                  slice->name, fcdp_error_text());
    }
    if (status < 0) {
        fcdp__count(spill->buffers.counts, FCDP_COUNT_SPILL_FAILURES, 1);
        fcdp__trace_now(FCDP_EVENT_SPILL_READ, slice->object, slice->bytes,
                        status == FCDP_ERR_TIMEOUT ? ETIMEDOUT : EIO, 0);
    }
    fcdp__foresight_note(&spill->foresight, slice, false);
    read_ahead(spill);
    pthread_mutex_unlock(&spill->buffers.mutex);
    return status == FCDP_OK;
}

/* ---- the copies ---- */

/* A copy may be under way all the same when a call has failed. False: nobody can tell. */
static bool is_over(const fcdp_spill *spill, fcdp_stream stream) {
    return fcdp__driver_stream_sync(spill->buffers.drv, stream) == FCDP_OK;
}

/* With the mutex. A buffer for new content of the slice: of the same slice, or one that is taken. */
static fcdp_status filling_begin(fcdp_spilled *slice, fcdp_stream stream, fcdp_spill_buffer **b_out) {
    fcdp_spill *spill = slice->spill;
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = fcdp__spill_buffer_settle(&spill->buffers, slice);
    slice->in_file = false;
    slice->version++;
    slice->filler = stream;
    fcdp_spill_buffer *b = fcdp__spill_buffer_of(&spill->buffers, slice);
    bool waits = false;
    if (!status && b && b->loading) status = fcdp__driver_stream_wait(spill->buffers.drv, stream, b->loaded);
    if (status && b && b->state == FCDP_SPILL_BUFFER_IDLE) b->of = NULL;
    if (status) return status;
    if (!b) status = fcdp__spill_buffer_take(&spill->buffers, slice->file_bytes, stream, &waits, &b);
    if (waits) wait_count(spill, start_ns);
    if (status) return status;
    fcdp__spill_buffer_fill(&spill->buffers, b, slice);
    *b_out = b;
    return FCDP_OK;
}

fcdp_status fcdp__spill_store(fcdp_spilled *slice, fcdp_dptr from, fcdp_stream stream) {
    fcdp_spill *spill = slice->spill;
    fcdp_spill_buffer *b = NULL;
    pthread_mutex_lock(&spill->buffers.mutex);
    fcdp_status status = filling_begin(slice, stream, &b);
    fcdp__foresight_note(&spill->foresight, slice, true);
    read_ahead(spill);
    pthread_mutex_unlock(&spill->buffers.mutex);
    if (status) return status;
    status = fcdp__driver_copy_d2h(spill->buffers.drv, b->at, from, slice->bytes, stream);
    if (!status) status = fcdp__driver_event_record(spill->buffers.drv, b->stored, stream);
    /* the last call: what it makes run gives the buffer to the thread */
    if (!status)
        status = fcdp__driver_host_function(spill->buffers.drv, stream, fcdp__spill_buffer_filled, b);
    if (!status) return FCDP_OK;
    fcdp_failure failure = fcdp__failure_keep(status);
    bool over = is_over(spill, stream);
    pthread_mutex_lock(&spill->buffers.mutex);
    b->state = over ? FCDP_SPILL_BUFFER_IDLE : FCDP_SPILL_BUFFER_BROKEN;
    b->of = NULL;
    pthread_cond_broadcast(&spill->buffers.changed);
    pthread_mutex_unlock(&spill->buffers.mutex);
    return fcdp__failure_restore(&failure);
}

fcdp_status fcdp__spill_load(fcdp_spilled *slice, fcdp_dptr to, fcdp_stream stream) {
    fcdp_spill *spill = slice->spill;
    pthread_mutex_lock(&spill->buffers.mutex);
    fcdp_spill_buffer *b = fcdp__spill_buffer_of(&spill->buffers, slice);
    if (b && (!b->claimed || b->version != slice->version)) b = NULL;
    pthread_mutex_unlock(&spill->buffers.mutex);
    if (!b) return fcdp__fail(FCDP_ERR_INVALID, "'%s' was not fetched from FCDP_SPILL_DIR", slice->name);
    /* another slice's even: the thread knows from a host function that it is over, which is no event's */
    fcdp_status status = fcdp__driver_stream_wait(spill->buffers.drv, stream, b->stored);
    if (!status) status = fcdp__driver_copy_h2d(spill->buffers.drv, to, b->at, slice->bytes, stream);
    if (!status) status = fcdp__driver_event_record(spill->buffers.drv, b->loaded, stream);
    bool over = true;
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        over = is_over(spill, stream);
        status = fcdp__failure_restore(&failure);
    }
    pthread_mutex_lock(&spill->buffers.mutex);
    b->claimed = false;
    b->loading = !status;
    if (!over && b->state == FCDP_SPILL_BUFFER_IDLE) { /* else the thread is at it, and reads too */
        b->state = FCDP_SPILL_BUFFER_BROKEN;
        b->of = NULL;
    }
    pthread_cond_broadcast(&spill->buffers.changed);
    pthread_mutex_unlock(&spill->buffers.mutex);
    return status;
}

/* ---- slices ---- */

static void slice_free(fcdp_spilled *slice) {
    free(slice->name);
    free(slice->sums);
    free(slice);
}

/* With the mutex: no slice has a place any more. */
static void all_give(fcdp_spill *spill) {
    fcdp__spill_buffers_give(&spill->buffers);
    while (spill->free) {
        fcdp_spilled *slice = spill->free;
        spill->free = slice->next;
        slice_free(slice);
    }
    spill->end = 0;
    spill->most_bytes = 0;
    fcdp__disk_truncate(spill->buffers.disk);
}

/* With the mutex. */
static fcdp_status place_find(fcdp_spill *spill, fcdp_spilled *slice) {
    fcdp_spilled **link = &spill->free;
    while (*link && (*link)->file_bytes != slice->file_bytes) link = &(*link)->next;
    if (*link) {
        fcdp_spilled *before = *link;
        *link = before->next;
        slice->offset = before->offset;
        slice_free(before);
        return FCDP_OK;
    }
    fcdp_status status = fcdp__disk_reserve(spill->buffers.disk, spill->end, slice->file_bytes);
    if (status) return status;
    slice->offset = spill->end;
    spill->end += slice->file_bytes;
    return FCDP_OK;
}

fcdp_status fcdp__spill_reserve(fcdp_spill *spill, const char *name, uint32_t object, size_t bytes,
                                fcdp_spilled **slice_out) {
    fcdp_spilled *slice = calloc(1, sizeof *slice);
    if (!slice) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for '%s' in FCDP_SPILL_DIR", name);
    *slice = (fcdp_spilled){.spill = spill,
                            .name = strdup(fcdp__name_text(name)),
                            .object = object,
                            .bytes = bytes,
                            .file_bytes = fcdp__round_up(bytes, FCDP_DISK_ALIGN)};
    slice->sums = calloc(fcdp__spilled_n_blocks(slice), sizeof *slice->sums);
    fcdp_status status = slice->name && slice->sums
                             ? FCDP_OK
                             : fcdp__fail(FCDP_ERR_SYSTEM, "no memory for '%s' in FCDP_SPILL_DIR", name);
    pthread_mutex_lock(&spill->buffers.mutex);
    size_t most = slice->file_bytes > spill->most_bytes ? slice->file_bytes : spill->most_bytes;
    if (!status) status = fcdp__spill_buffers_fit(&spill->buffers, spill->n_wanted, most);
    if (!status) status = place_find(spill, slice);
    if (!status) spill->most_bytes = most;
    if (!status) spill->used_bytes += slice->file_bytes;
    if (status && !spill->used_bytes) all_give(spill);
    fcdp__trace_set(FCDP_COUNT_SPILL_BYTES, spill->used_bytes);
    pthread_mutex_unlock(&spill->buffers.mutex);
    if (status) {
        status = fcdp__fail(status, "%s in FCDP_SPILL_DIR for '%s': %s", fcdp__size_text(bytes).s,
                            slice->name, fcdp_error_text());
        slice_free(slice);
        return status;
    }
    *slice_out = slice;
    return FCDP_OK;
}

/* Its place in the file is for the next one of its size. */
void fcdp__spill_release(fcdp_spilled *slice) {
    if (!slice) return;
    fcdp_spill *spill = slice->spill;
    pthread_mutex_lock(&spill->buffers.mutex);
    if (fcdp__spill_buffer_settle(&spill->buffers, slice)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    fcdp_spill_buffer *b = fcdp__spill_buffer_of(&spill->buffers, slice);
    if (b && (b->state == FCDP_SPILL_BUFFER_WRITING ||
              b->state == FCDP_SPILL_BUFFER_READING)) { /* a disk that does not answer: the thread has it */
        pthread_mutex_unlock(&spill->buffers.mutex);
        return;
    }
    if (b) {
        bool over = b->state == FCDP_SPILL_BUFFER_IDLE &&
                    (!b->loading || !fcdp__driver_event_sync(spill->buffers.drv, b->loaded));
        b->state = over ? FCDP_SPILL_BUFFER_IDLE : FCDP_SPILL_BUFFER_BROKEN;
        b->loading = b->claimed = false;
        b->of = NULL;
    }
    fcdp__foresight_forget(&spill->foresight, slice);
    spill->used_bytes -= slice->file_bytes;
    fcdp__trace_set(FCDP_COUNT_SPILL_BYTES, spill->used_bytes);
    slice->in_file = false;
    slice->next = spill->free;
    spill->free = slice;
    if (!spill->used_bytes) all_give(spill);
    pthread_cond_broadcast(&spill->buffers.changed);
    pthread_mutex_unlock(&spill->buffers.mutex);
}

uint64_t fcdp__spill_bytes(fcdp_spill *spill) {
    pthread_mutex_lock(&spill->buffers.mutex);
    uint64_t bytes = spill->used_bytes;
    pthread_mutex_unlock(&spill->buffers.mutex);
    return bytes;
}

/* ---- life ---- */

fcdp_status fcdp__spill_open(fcdp_driver *drv, const char *dir, const fcdp_spill_config *config,
                             fcdp_spill **spill_out) {
    fcdp_spill *spill = calloc(1, sizeof *spill);
    if (!spill) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for FCDP_SPILL_DIR");
    fcdp_status status = fcdp__disk_open(dir, &spill->buffers.disk);
    if (status) {
        free(spill);
        return status;
    }
    spill->n_wanted = config->n_buffers;
    spill->buffers.drv = drv;
    spill->buffers.counts = config->counts;
    spill->buffers.patience_ns = (uint64_t)(config->timeout_s * 1e9);
    status = fcdp__spill_buffers_start(&spill->buffers);
    if (status) {
        fcdp__disk_close(spill->buffers.disk);
        free(spill);
        return status;
    }
    *spill_out = spill;
    return FCDP_OK;
}

const char *fcdp__spill_lacks(const fcdp_spill *spill) {
    return fcdp__disk_lacks(spill->buffers.disk);
}

void fcdp__spill_close(fcdp_spill *spill) {
    if (!spill) return;
    fcdp__spill_buffers_stop(&spill->buffers);
    while (spill->free) {
        fcdp_spilled *slice = spill->free;
        spill->free = slice->next;
        slice_free(slice);
    }
    fcdp__disk_close(spill->buffers.disk);
    free(spill);
}
