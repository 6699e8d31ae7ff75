/* spill_buffers.h - the page-locked buffers that spilled slices (spill.h) pass through, and the thread that
 * moves bytes between them and the disk.
 *
 * The life of a buffer:
 *
 *     IDLE      holds `of` as it was stored last, or nothing (of == NULL)
 *     FILLING   a stream copies `of` into it; `filled` is set behind the copy
 *     WRITING   the thread writes it to the file
 *     READING   the thread reads it from the file
 *     BROKEN    a failed device may still write into it: it is used no more
 *
 *     a slice is in at most one buffer       in_file <=> the file has what was stored last, and the checksums
 *     a buffer may take another slice <=> IDLE && !claimed && the last copy from it has passed
 *
 * Functions are called with the mutex, unless they say otherwise.
 */
#ifndef FCDP_SPILL_BUFFERS_H
#define FCDP_SPILL_BUFFERS_H

#include <semaphore.h>
#include <stdatomic.h>

#include "tiering/disk.h"
#include "tiering/spill.h"

/* How long a wait lasts before it looks whether what it waits for has failed. */
enum { FCDP_SPILL_LOOK_NS = 1000000000 };

typedef enum fcdp_spill_buffer_state {
    FCDP_SPILL_BUFFER_IDLE,
    FCDP_SPILL_BUFFER_FILLING,
    FCDP_SPILL_BUFFER_WRITING,
    FCDP_SPILL_BUFFER_READING,
    FCDP_SPILL_BUFFER_BROKEN
} fcdp_spill_buffer_state;

typedef struct fcdp_spill_buffers fcdp_spill_buffers;

typedef struct fcdp_spill_buffer {
    struct fcdp_spill_buffer *next; /* fixed */
    fcdp_spill_buffers *set;
    int number, registered; /* disk.h; registered -1: it is not */
    /* behind the last copy to it, and the last one from it; one that was never recorded has passed */
    fcdp_event stored, loaded;
    atomic_bool filled; /* release: the copy's bytes are there; acquire in the thread */
    /* under the mutex */
    char *at;
    size_t capacity_bytes;
    fcdp_spill_buffer_state state;
    fcdp_spilled *of;
    uint64_t version;      /* of `of`, which it holds or is to hold */
    bool claimed, loading; /* loading: `loaded` may not have passed */
    uint64_t last_use, asked;
    fcdp_stream filler; /* FILLING: the stream */
    /* WRITING, READING: the thread's */
    size_t n_begun, n_ended; /* blocks */
    uint64_t start_ns;
    int error;
} fcdp_spill_buffer;

struct fcdp_spilled {
    fcdp_spill *spill;
    fcdp_spilled *next; /* free places of the file */
    char *name;
    uint32_t object;
    uint64_t offset;
    size_t bytes, file_bytes; /* file_bytes: in whole sectors */
    uint64_t *sums;           /* one a block; the thread's while it writes or reads, else constant */
    bool in_file;             /* under the mutex, as are the rest */
    uint64_t version;         /* what was stored last */
    fcdp_stream filler;       /* that stored it */
};
size_t fcdp__spilled_n_blocks(const fcdp_spilled *slice); /* without the mutex */

struct fcdp_spill_buffers {
    fcdp_driver *drv;
    fcdp_disk *disk; /* borrowed */
    fcdp_counts *counts;
    uint64_t patience_ns; /* with a disk that does not answer */
    pthread_t thread;
    sem_t wake;
    fcdp_disk_block blocks[FCDP_DISK_DEPTH];
    /* mutex guards all below it, and the slices; `changed`: a buffer has become IDLE */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    fcdp_spill_buffer *first;
    uint32_t n;
    uint64_t clock;
    bool stops, warned;
};

/* Start the thread, and stop it and free the buffers; without the mutex. The caller has filled in the fields
 * before `thread`. */
fcdp_status fcdp__spill_buffers_start(fcdp_spill_buffers *set) FCDP_MUST_CHECK;
void fcdp__spill_buffers_stop(fcdp_spill_buffers *set);
/* At least `n` buffers of at least `bytes`. What a smaller one holds goes; one that is in use is replaced
 * when it is taken next. */
fcdp_status fcdp__spill_buffers_fit(fcdp_spill_buffers *set, uint32_t n, size_t bytes) FCDP_MUST_CHECK;
/* The memory of those that are not in use goes back to the system. */
void fcdp__spill_buffers_give(fcdp_spill_buffers *set);

/* NULL: no buffer holds the slice, or is about to. */
fcdp_spill_buffer *fcdp__spill_buffer_of(const fcdp_spill_buffers *set, const fcdp_spilled *slice);
/* The one that was used longest ago, of those that may take another slice; NULL: none. Of less than `bytes`,
 * if there is no other, and if `any`. */
fcdp_status fcdp__spill_buffer_find_free(fcdp_spill_buffers *set, size_t bytes, bool any,
                                         fcdp_spill_buffer **found_out) FCDP_MUST_CHECK;
/* One that is IDLE and holds nothing, for a thread that has given `filler` its copies. The mutex may be
 * released meanwhile. *waits_out becomes true if there was none at first. */
fcdp_status fcdp__spill_buffer_take(fcdp_spill_buffers *set, size_t bytes, fcdp_stream filler,
                                    bool *waits_out, fcdp_spill_buffer **taken_out) FCDP_MUST_CHECK;
/* Wait until no transfer of the slice is under way. The mutex may be released meanwhile. */
fcdp_status fcdp__spill_buffer_settle(fcdp_spill_buffers *set, const fcdp_spilled *slice) FCDP_MUST_CHECK;
void fcdp__spill_buffer_touch(fcdp_spill_buffers *set, fcdp_spill_buffer *b);
/* The thread reads the slice, which no buffer has, into this one. */
void fcdp__spill_buffer_read(fcdp_spill_buffers *set, fcdp_spill_buffer *b, fcdp_spilled *slice);
/* The slice's filler is to copy its new version into this one. */
void fcdp__spill_buffer_fill(fcdp_spill_buffers *set, fcdp_spill_buffer *b, fcdp_spilled *slice);
/* It has: a stream's host function, with the buffer. Without the mutex. */
void fcdp__spill_buffer_filled(void *context);
/* FCDP_ERR_TIMEOUT, with the text. */
fcdp_status fcdp__spill_late_fail(const fcdp_spill_buffers *set) FCDP_MUST_CHECK;

#endif
