/* spill.c - buffers between the device and the file, and the thread that moves bytes between them and the
 * disk.
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
 * A thread waits for a buffer that ends by itself, or by what it has enqueued itself: not for one that is
 * claimed (fetched, and not loaded yet), nor for one that another model's gather is to fill, for which a
 * peer may wait for this thread. Where there are only such, one more is made.
 *
 * A stream's host function may take no lock that a caller of the driver holds, so it only sets a flag and
 * raises a semaphore.
 */
#include "tiering/spill.h"

#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/size.h"
#include "tiering/disk.h"
#include "tiering/foresight.h"
#include "tiering/trace_events.h"

enum { BLOCK = FCDP_DISK_BLOCK_BYTES, LOOK_NS = 1000000000, HUGE = 2 << 20, SMALL = 64 << 10 };

typedef enum buffer_state { IDLE, FILLING, WRITING, READING, BROKEN } buffer_state;

typedef struct buffer {
    struct buffer *next; /* fixed */
    fcdp_spill *spill;
    int number, registered; /* disk.h; registered -1: it is not */
    fcdp_event loaded;      /* behind the last copy from it; one that was never recorded has passed */
    atomic_bool filled;     /* release: the copy's bytes are there; acquire in the thread */
    /* under the mutex */
    char *at;
    size_t capacity_bytes;
    buffer_state state;
    fcdp_spilled *of;
    uint64_t version;      /* of `of`, which it holds or is to hold */
    bool claimed, loading; /* loading: `loaded` may not have passed */
    uint64_t last_use, asked;
    fcdp_stream filler; /* FILLING: the stream */
    /* WRITING, READING: the thread's */
    size_t n_begun, n_ended; /* blocks */
    uint64_t start_ns;
    int error;
} buffer;

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

struct fcdp_spill {
    fcdp_driver *drv;
    fcdp_disk *disk;
    fcdp_counts *counts;
    uint64_t patience_ns; /* with a disk that does not answer */
    pthread_t thread;
    sem_t wake;
    fcdp_disk_block blocks[FCDP_DISK_DEPTH];
    /* mutex guards all below it; `changed`: a buffer has become IDLE */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    buffer *buffers;
    uint32_t n_buffers, n_wanted;
    size_t most_bytes; /* of a slice that has a place */
    fcdp_spilled *free;
    uint64_t end, used_bytes; /* of the file */
    uint64_t clock;
    bool stops, warned;
    fcdp_foresight foresight;
};

/* ---- the thread ---- */

static size_t n_blocks(const fcdp_spilled *slice) {
    return (slice->file_bytes + BLOCK - 1) / BLOCK;
}

static void disk_warn(fcdp_spill *spill, const buffer *b) {
    if (spill->warned) return;
    spill->warned = true;
    fcdp__log(
        FCDP_LOG_WARN,
        "FCDP_SPILL_DIR: %s a part of '%s': %s. What is lost there is gathered again; this is said once",
        b->state == READING ? "reading" : "writing", b->of->name,
        b->error == EBADMSG ? "it is not what was written" : strerror(b->error));
}

/* With the mutex: the last block of a transfer has ended. */
static void transfer_end(fcdp_spill *spill, buffer *b) {
    bool reads = b->state == READING;
    fcdp__count(spill->counts, reads ? FCDP_COUNT_SPILL_READ_BYTES : FCDP_COUNT_SPILL_WRITTEN_BYTES,
                b->error ? 0 : b->of->bytes);
    fcdp__trace_since(b->start_ns,
                      (fcdp_trace_event){.kind = reads ? FCDP_EVENT_SPILL_READ : FCDP_EVENT_SPILL_WRITE,
                                         .object = b->of->object,
                                         .bytes = b->of->bytes,
                                         .a = (uint64_t)b->error});
    if (b->error) {
        disk_warn(spill, b);
        fcdp__count(spill->counts, FCDP_COUNT_SPILL_FAILURES, 1);
    }
    b->of->in_file = !b->error && b->version == b->of->version;
    if (reads && b->error) b->of = NULL;
    b->state = IDLE;
    pthread_cond_broadcast(&spill->changed);
}

/* With the mutex: of what has blocks to begin, reads that the host waits for, then other reads, then
 * writes; the one that was asked for first. */
static buffer *next_transfer(fcdp_spill *spill) {
    buffer *best = NULL;
    for (buffer *b = spill->buffers; b; b = b->next) {
        if (b->state == FILLING && atomic_load_explicit(&b->filled, memory_order_acquire)) {
            b->state = WRITING;
            b->n_begun = b->n_ended = 0;
            b->error = 0;
            b->start_ns = fcdp__trace_start();
        }
        if (b->state != WRITING && b->state != READING) continue;
        if (b->error || b->n_begun == n_blocks(b->of)) continue;
        int rank = (b->state == READING) + (b->state == READING && b->claimed);
        int of_best = best ? (best->state == READING) + (best->state == READING && best->claimed) : -1;
        if (rank > of_best || (rank == of_best && b->asked < best->asked)) best = b;
    }
    return best;
}

static bool anything_unfinished(const fcdp_spill *spill) {
    for (const buffer *b = spill->buffers; b; b = b->next)
        if (b->state == WRITING || b->state == READING) return true;
    return false;
}

/* The bytes behind the slice's end, up to a whole sector, are whatever the buffer has there. */
static void block_begin(fcdp_spill *spill, buffer *b) {
    fcdp_disk_block *block = spill->blocks;
    while (block->owner) block++;
    size_t k = b->n_begun++, from = k * BLOCK;
    size_t bytes = b->of->file_bytes - from < BLOCK ? b->of->file_bytes - from : BLOCK;
    *block = (fcdp_disk_block){.at = b->at + from,
                               .bytes = bytes,
                               .offset = b->of->offset + from,
                               .writes = b->state == WRITING,
                               .buffer = b->registered,
                               .owner = b};
    if (block->writes) b->of->sums[k] = XXH3_64bits(block->at, bytes);
    fcdp__disk_begin(spill->disk, block);
}

static void block_end(fcdp_spill *spill, fcdp_disk_block *block) {
    buffer *b = block->owner;
    size_t k = (block->offset - b->of->offset) / BLOCK;
    int error = block->error;
    if (!error && !block->writes && XXH3_64bits(block->at, block->bytes) != b->of->sums[k]) error = EBADMSG;
    block->owner = NULL;
    pthread_mutex_lock(&spill->mutex);
    b->n_ended++;
    if (error && !b->error) b->error = error;
    if (b->n_ended == b->n_begun && (b->error || b->n_ended == n_blocks(b->of))) transfer_end(spill, b);
    pthread_mutex_unlock(&spill->mutex);
}

static void *thread_main(void *arg) {
    fcdp_spill *spill = arg;
    for (;;) {
        buffer *b = NULL;
        pthread_mutex_lock(&spill->mutex);
        if (fcdp__disk_has_room(spill->disk)) b = next_transfer(spill);
        bool ends = spill->stops && !anything_unfinished(spill);
        pthread_mutex_unlock(&spill->mutex);
        if (ends) return NULL;
        if (b) {
            block_begin(spill, b);
            continue;
        }
        fcdp_disk_block *block = fcdp__disk_end(spill->disk);
        if (block)
            block_end(spill, block);
        else
            while (sem_wait(&spill->wake) && errno == EINTR) {
            }
    }
}

/* ---- buffers ---- */

static void memory_free(fcdp_spill *spill, buffer *b) {
    size_t stay_bytes = 0;
    if (!b->at) return;
    (void)fcdp__disk_register(spill->disk, b->registered, NULL, 0);
    if (fcdp__driver_host_unpin(spill->drv, b->at, b->capacity_bytes, &stay_bytes))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    if (!stay_bytes) munmap(b->at, b->capacity_bytes);
    b->at = NULL;
    b->capacity_bytes = 0;
}

/* Aligned, in huge pages where the system has them: of 4 KiB pages, a block has more pieces than most disks
 * take in one request. NULL: no memory. */
static char *memory_map(size_t bytes) {
    char *mapped = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    size_t before = fcdp__round_up((uintptr_t)mapped, HUGE) - (uintptr_t)mapped;
    if (before) munmap(mapped, before);
    if (before < HUGE) munmap(mapped + before + bytes, HUGE - before);
    (void)madvise(mapped + before, bytes, MADV_HUGEPAGE);
    return mapped + before;
}

/* A child that shared the pages would see the device's and the disk's writes, or make them go elsewhere. */
static fcdp_status memory_make(fcdp_spill *spill, buffer *b, size_t bytes) {
    size_t stay_bytes = 0;
    bytes = fcdp__round_up(bytes, bytes < HUGE ? SMALL : HUGE);
    char *at = memory_map(bytes);
    if (!at)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no %zu bytes for a buffer of FCDP_SPILL_DIR: %s", bytes,
                          strerror(errno));
    (void)madvise(at, bytes, MADV_DONTFORK);
    fcdp_status status = fcdp__driver_host_pin(spill->drv, at, bytes, &stay_bytes);
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        if (!stay_bytes) munmap(at, bytes);
        return fcdp__failure_restore(&failure);
    }
    b->at = at;
    b->capacity_bytes = bytes;
    b->registered = fcdp__disk_register(spill->disk, b->number, at, bytes);
    return FCDP_OK;
}

/* With the mutex, which keeps other threads from the list. */
static fcdp_status buffer_make(fcdp_spill *spill, size_t bytes, buffer **made_out) {
    buffer *b = calloc(1, sizeof *b);
    if (!b) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a buffer of FCDP_SPILL_DIR");
    b->spill = spill;
    b->number = (int)spill->n_buffers;
    fcdp_status status = fcdp__driver_event_create_blocking(spill->drv, &b->loaded);
    if (status) {
        free(b);
        return status;
    }
    status = memory_make(spill, b, bytes);
    if (status) {
        fcdp__driver_event_destroy(spill->drv, b->loaded);
        free(b);
        return status;
    }
    b->next = spill->buffers;
    spill->buffers = b;
    spill->n_buffers++;
    *made_out = b;
    return FCDP_OK;
}

/* With the mutex. FCDP_PENDING: the last copy from it has not passed. */
static fcdp_status loaded_query(buffer *b) {
    if (!b->loading) return FCDP_OK;
    fcdp_status status = fcdp__driver_event_query(b->spill->drv, b->loaded);
    if (!status) b->loading = false;
    return status;
}

/* With the mutex: the one that was used longest ago, of those that may take another slice; NULL: none. Of
 * less than `bytes`, if there is no other, and if `any`. */
static fcdp_status free_find(fcdp_spill *spill, size_t bytes, bool any, buffer **found_out) {
    buffer *best = NULL;
    *found_out = NULL;
    for (buffer *b = spill->buffers; b; b = b->next) {
        bool suits = b->capacity_bytes >= bytes;
        if (b->state != IDLE || b->claimed || (!any && !suits)) continue;
        fcdp_status status = loaded_query(b);
        if (status == FCDP_PENDING) continue;
        if (status) return status;
        bool best_suits = best && best->capacity_bytes >= bytes;
        if (best && suits != best_suits) {
            if (suits) best = b;
        } else if (!best || !b->of || (best->of && b->last_use < best->last_use)) {
            best = b;
        }
    }
    *found_out = best;
    return FCDP_OK;
}

/* Of the thread that has given `filler` its copies. */
static bool ends_by_itself(const buffer *b, fcdp_stream filler) {
    return b->state == WRITING || b->state == READING || (b->state == FILLING && b->filler == filler);
}

/* With the mutex, which is released meanwhile: wait for what ends by itself; *none_out: nothing does. A
 * stream that has failed never runs its host function. */
static fcdp_status any_await(fcdp_spill *spill, fcdp_stream filler, bool *none_out) {
    buffer *busy = NULL, *loading = NULL;
    fcdp_status status = FCDP_OK;
    for (buffer *b = spill->buffers; b; b = b->next) {
        if (ends_by_itself(b, filler)) busy = b;
        if (b->state == IDLE && !b->claimed && b->loading) loading = b;
    }
    *none_out = !busy && !loading;
    if (loading) {
        pthread_mutex_unlock(&spill->mutex);
        status = fcdp__driver_event_sync(spill->drv, loading->loaded);
        pthread_mutex_lock(&spill->mutex);
        if (!status) status = loaded_query(loading);
    } else if (busy && !fcdp__condition_wait(&spill->changed, &spill->mutex, fcdp__now_ns() + LOOK_NS)) {
        for (buffer *b = spill->buffers; b && status >= 0; b = b->next)
            if (b->state == FILLING) status = fcdp__driver_stream_query(spill->drv, b->filler);
    }
    return status < 0 ? status : FCDP_OK;
}

static fcdp_status late_fail(const fcdp_spill *spill) {
    return fcdp__fail(FCDP_ERR_TIMEOUT, "the disk of FCDP_SPILL_DIR has not answered for %.0f s",
                      (double)spill->patience_ns / 1e9);
}

/* With the mutex, which may be released meanwhile. The buffer is IDLE and holds nothing. *waits_out becomes
 * true if there was none at first. */
static fcdp_status take(fcdp_spill *spill, size_t bytes, fcdp_stream filler, bool *waits_out,
                        buffer **taken_out) {
    fcdp_status status = FCDP_OK;
    uint64_t start_ns = fcdp__now_ns();
    for (*taken_out = NULL; !*taken_out && !status;) {
        bool none = false;
        status = free_find(spill, bytes, true, taken_out);
        if (status || *taken_out) break;
        *waits_out = true;
        status = any_await(spill, filler, &none);
        if (!status && none) status = buffer_make(spill, bytes, taken_out);
        if (!status && !*taken_out && fcdp__now_ns() - start_ns > spill->patience_ns)
            status = late_fail(spill);
    }
    if (status) return status;
    (*taken_out)->of = NULL;
    if ((*taken_out)->capacity_bytes >= bytes) return FCDP_OK;
    memory_free(spill, *taken_out);
    return memory_make(spill, *taken_out, bytes);
}

static void wait_count(const fcdp_spill *spill, uint64_t start_ns) {
    fcdp__count(spill->counts, FCDP_COUNT_SPILL_WAITS, 1);
    fcdp__count(spill->counts, FCDP_COUNT_SPILL_WAIT_NS, fcdp__now_ns() - start_ns);
}

/* With the mutex. NULL: no buffer holds it, or is about to. */
static buffer *buffer_of(const fcdp_spilled *slice) {
    buffer *b = slice->spill->buffers;
    while (b && b->of != slice) b = b->next;
    return b;
}

static void touch(fcdp_spill *spill, buffer *b) {
    b->last_use = ++spill->clock;
}

/* With the mutex: wait until no transfer of the slice is under way. */
static fcdp_status settle(fcdp_spilled *slice) {
    fcdp_spill *spill = slice->spill;
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = FCDP_OK;
    for (buffer *b = buffer_of(slice); !status && b && b->state != IDLE; b = buffer_of(slice)) {
        if (fcdp__condition_wait(&spill->changed, &spill->mutex, fcdp__now_ns() + LOOK_NS)) continue;
        if (b->state == FILLING) {
            status = fcdp__driver_stream_query(spill->drv, b->filler);
            if (status == FCDP_PENDING) status = FCDP_OK;
        } else if (fcdp__now_ns() - start_ns > spill->patience_ns) {
            status = late_fail(spill);
        }
    }
    return status;
}

/* ---- reading ---- */

/* With the mutex. */
static void read_begin(fcdp_spill *spill, buffer *b, fcdp_spilled *slice) {
    FCDP_CHECK(1, slice->in_file && !buffer_of(slice));
    b->of = slice;
    b->version = slice->version;
    b->state = READING;
    b->n_begun = b->n_ended = 0;
    b->error = 0;
    b->asked = ++spill->clock;
    b->start_ns = fcdp__trace_start();
    sem_post(&spill->wake);
}

/* With the mutex: read what will be wanted next into buffers that are free now. What is to be used soonest
 * is touched last, and what holds a slice that is still to come is not taken. */
static void read_ahead(fcdp_spill *spill) {
    enum { MOST = 16 };
    const void *next[MOST];
    uint64_t before = spill->clock;
    size_t most = spill->n_wanted - 1 < MOST ? spill->n_wanted - 1 : MOST;
    size_t n = fcdp__foresight_reads(&spill->foresight, next, most);
    for (size_t i = n; i > 0; i--) {
        buffer *b = buffer_of(next[i - 1]);
        if (b) touch(spill, b);
    }
    for (size_t i = 0; i < n; i++) {
        fcdp_spilled *slice = (fcdp_spilled *)next[i]; /* the foresight knows no more than addresses */
        buffer *b = NULL;
        if (!slice->in_file || buffer_of(slice)) continue;
        if (free_find(spill, slice->file_bytes, false, &b) || !b || b->last_use > before) return;
        touch(spill, b);
        read_begin(spill, b, slice);
    }
}

/* With the mutex, which may be released meanwhile: others may begin to read it then. FCDP_PENDING: it is
 * lost. */
static fcdp_status fetch(fcdp_spilled *slice) {
    fcdp_spill *spill = slice->spill;
    uint64_t start_ns = fcdp__now_ns();
    for (;;) {
        buffer *b = buffer_of(slice);
        if (b && b->version != slice->version) return FCDP_PENDING; /* a fault of this file's */
        if (b) b->claimed = true;
        if (b && b->state == BROKEN) return FCDP_PENDING;
        if (b && b->state != READING) {
            touch(spill, b);
            return FCDP_OK;
        }
        if (b) {
            (void)fcdp__condition_wait(&spill->changed, &spill->mutex, fcdp__now_ns() + LOOK_NS);
            bool late = b->state == READING && fcdp__now_ns() - start_ns > spill->patience_ns;
            if (b->of == NULL || late) b->claimed = false; /* it could not be read */
            if (late) return late_fail(spill);
            continue;
        }
        if (!slice->in_file) return FCDP_PENDING;
        bool waits; /* counted with the read */
        fcdp_status status = take(spill, slice->file_bytes, slice->filler, &waits, &b);
        if (status) return status;
        if (buffer_of(slice) || !slice->in_file) continue; /* what was taken is free */
        b->claimed = true;
        read_begin(spill, b, slice);
    }
}

bool fcdp__spill_fetch(fcdp_spilled *slice) {
    fcdp_spill *spill = slice->spill;
    pthread_mutex_lock(&spill->mutex);
    buffer *b = buffer_of(slice);
    uint64_t start_ns = fcdp__now_ns();
    bool waits = !(b && b->state != READING) && slice->version;
    fcdp_status status = fetch(slice);
    if (waits) wait_count(spill, start_ns);
    if (status < 0 && !spill->warned) {
        spill->warned = true;
        fcdp__log(FCDP_LOG_WARN, "FCDP_SPILL_DIR: '%s' cannot be read, and is gathered again: %s",
                  slice->name, fcdp_error_text());
    }
    if (status < 0) fcdp__count(spill->counts, FCDP_COUNT_SPILL_FAILURES, 1);
    fcdp__foresight_note(&spill->foresight, slice, false);
    read_ahead(spill);
    pthread_mutex_unlock(&spill->mutex);
    return status == FCDP_OK;
}

/* ---- the copies ---- */

static void on_filled(void *context) {
    buffer *b = context;
    atomic_store_explicit(&b->filled, true, memory_order_release);
    sem_post(&b->spill->wake);
}

/* A copy may be under way all the same when a call has failed. False: nobody can tell. */
static bool is_over(const fcdp_spill *spill, fcdp_stream stream) {
    return fcdp__driver_stream_sync(spill->drv, stream) == FCDP_OK;
}

/* With the mutex. A buffer for new content of the slice: of the same slice, or one that is taken. */
static fcdp_status filling_begin(fcdp_spilled *slice, fcdp_stream stream, buffer **b_out) {
    fcdp_spill *spill = slice->spill;
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = settle(slice);
    slice->in_file = false;
    slice->version++;
    slice->filler = stream;
    buffer *b = buffer_of(slice);
    bool waits = false;
    if (!status && b && b->loading) status = fcdp__driver_stream_wait(spill->drv, stream, b->loaded);
    if (status && b && b->state == IDLE) b->of = NULL;
    if (status) return status;
    if (!b) status = take(spill, slice->file_bytes, stream, &waits, &b);
    if (waits) wait_count(spill, start_ns);
    if (status) return status;
    b->of = slice;
    b->version = slice->version;
    b->claimed = false;
    b->state = FILLING;
    b->filler = stream;
    b->asked = ++spill->clock;
    atomic_store_explicit(&b->filled, false, memory_order_relaxed);
    touch(spill, b);
    *b_out = b;
    return FCDP_OK;
}

fcdp_status fcdp__spill_store(fcdp_spilled *slice, fcdp_dptr from, fcdp_stream stream) {
    fcdp_spill *spill = slice->spill;
    buffer *b = NULL;
    pthread_mutex_lock(&spill->mutex);
    fcdp_status status = filling_begin(slice, stream, &b);
    fcdp__foresight_note(&spill->foresight, slice, true);
    read_ahead(spill);
    pthread_mutex_unlock(&spill->mutex);
    if (status) return status;
    status = fcdp__driver_copy_d2h(spill->drv, b->at, from, slice->bytes, stream);
    if (!status) status = fcdp__driver_host_function(spill->drv, stream, on_filled, b);
    if (!status) return FCDP_OK;
    fcdp_failure failure = fcdp__failure_keep(status);
    bool over = is_over(spill, stream);
    pthread_mutex_lock(&spill->mutex);
    b->state = over ? IDLE : BROKEN;
    b->of = NULL;
    pthread_cond_broadcast(&spill->changed);
    pthread_mutex_unlock(&spill->mutex);
    return fcdp__failure_restore(&failure);
}

fcdp_status fcdp__spill_load(fcdp_spilled *slice, fcdp_dptr to, fcdp_stream stream) {
    fcdp_spill *spill = slice->spill;
    pthread_mutex_lock(&spill->mutex);
    buffer *b = buffer_of(slice);
    if (b && (!b->claimed || b->version != slice->version)) b = NULL;
    pthread_mutex_unlock(&spill->mutex);
    if (!b) return fcdp__fail(FCDP_ERR_INVALID, "'%s' was not fetched from FCDP_SPILL_DIR", slice->name);
    fcdp_status status = fcdp__driver_copy_h2d(spill->drv, to, b->at, slice->bytes, stream);
    if (!status) status = fcdp__driver_event_record(spill->drv, b->loaded, stream);
    bool over = true;
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        over = is_over(spill, stream);
        status = fcdp__failure_restore(&failure);
    }
    pthread_mutex_lock(&spill->mutex);
    b->claimed = false;
    b->loading = !status;
    if (!over && b->state == IDLE) b->state = BROKEN; /* else the thread is at it, and reads too */
    pthread_cond_broadcast(&spill->changed);
    pthread_mutex_unlock(&spill->mutex);
    return status;
}

/* ---- slices ---- */

static void slice_free(fcdp_spilled *slice) {
    free(slice->name);
    free(slice->sums);
    free(slice);
}

/* With the mutex: n_wanted buffers of at least `bytes`. What a smaller one holds goes; one that is in use
 * is replaced when it is taken next. */
static fcdp_status buffers_fit(fcdp_spill *spill, size_t bytes) {
    fcdp_status status = FCDP_OK;
    while (!status && spill->n_buffers < spill->n_wanted) {
        buffer *made;
        status = buffer_make(spill, bytes, &made);
    }
    for (buffer *b = spill->buffers; b && !status; b = b->next) {
        if (b->capacity_bytes >= bytes || b->state != IDLE || b->claimed || loaded_query(b)) continue;
        b->of = NULL;
        memory_free(spill, b);
        status = memory_make(spill, b, bytes);
    }
    return status;
}

/* With the mutex: no slice has a place any more. */
static void all_give(fcdp_spill *spill) {
    for (buffer *b = spill->buffers; b; b = b->next)
        if (b->state == IDLE && !b->loading) memory_free(spill, b);
    while (spill->free) {
        fcdp_spilled *slice = spill->free;
        spill->free = slice->next;
        slice_free(slice);
    }
    spill->end = 0;
    spill->most_bytes = 0;
    fcdp__disk_truncate(spill->disk);
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
    fcdp_status status = fcdp__disk_reserve(spill->disk, spill->end, slice->file_bytes);
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
                            .name = strdup(name[0] ? name : "the root"),
                            .object = object,
                            .bytes = bytes,
                            .file_bytes = fcdp__round_up(bytes, FCDP_DISK_ALIGN)};
    slice->sums = calloc(n_blocks(slice), sizeof *slice->sums);
    fcdp_status status = slice->name && slice->sums
                             ? FCDP_OK
                             : fcdp__fail(FCDP_ERR_SYSTEM, "no memory for '%s' in FCDP_SPILL_DIR", name);
    pthread_mutex_lock(&spill->mutex);
    size_t most = slice->file_bytes > spill->most_bytes ? slice->file_bytes : spill->most_bytes;
    if (!status) status = buffers_fit(spill, most);
    if (!status) status = place_find(spill, slice);
    if (!status) spill->most_bytes = most;
    if (!status) spill->used_bytes += slice->file_bytes;
    if (status && !spill->used_bytes) all_give(spill);
    fcdp__trace_set(FCDP_COUNT_SPILL_BYTES, spill->used_bytes);
    pthread_mutex_unlock(&spill->mutex);
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
    pthread_mutex_lock(&spill->mutex);
    if (settle(slice)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    buffer *b = buffer_of(slice);
    if (b &&
        (b->state == WRITING || b->state == READING)) { /* a disk that does not answer: the thread has it */
        pthread_mutex_unlock(&spill->mutex);
        return;
    }
    if (b) {
        bool over = b->state == IDLE && (!b->loading || !fcdp__driver_event_sync(spill->drv, b->loaded));
        b->state = over ? IDLE : BROKEN;
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
    pthread_cond_broadcast(&spill->changed);
    pthread_mutex_unlock(&spill->mutex);
}

uint64_t fcdp__spill_bytes(fcdp_spill *spill) {
    pthread_mutex_lock(&spill->mutex);
    uint64_t bytes = spill->used_bytes;
    pthread_mutex_unlock(&spill->mutex);
    return bytes;
}

/* ---- life ---- */

fcdp_status fcdp__spill_open(fcdp_driver *drv, const char *dir, const fcdp_spill_config *config,
                             fcdp_spill **spill_out) {
    fcdp_spill *spill = calloc(1, sizeof *spill);
    if (!spill) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for FCDP_SPILL_DIR");
    fcdp_status status = fcdp__disk_open(dir, &spill->disk);
    if (status) {
        free(spill);
        return status;
    }
    spill->drv = drv;
    spill->counts = config->counts;
    spill->n_wanted = config->n_buffers;
    spill->patience_ns = (uint64_t)(config->timeout_s * 1e9);
    pthread_mutex_init(&spill->mutex, NULL);
    fcdp__condition_init(&spill->changed);
    sem_init(&spill->wake, 0, 0);
    int error = fcdp__thread_start(thread_main, spill, &spill->thread);
    if (error) {
        fcdp__disk_close(spill->disk);
        free(spill);
        return fcdp__fail(FCDP_ERR_SYSTEM, "FCDP_SPILL_DIR: no thread: %s", strerror(error));
    }
    pthread_setname_np(spill->thread, "fcdp-spill");
    *spill_out = spill;
    return FCDP_OK;
}

const char *fcdp__spill_lacks(const fcdp_spill *spill) {
    return fcdp__disk_lacks(spill->disk);
}

void fcdp__spill_close(fcdp_spill *spill) {
    if (!spill) return;
    pthread_mutex_lock(&spill->mutex);
    spill->stops = true;
    pthread_mutex_unlock(&spill->mutex);
    sem_post(&spill->wake);
    pthread_join(spill->thread, NULL);
    while (spill->buffers) {
        buffer *b = spill->buffers;
        spill->buffers = b->next;
        if (b->state == IDLE) memory_free(spill, b); /* else the device may write there yet */
        fcdp__driver_event_destroy(spill->drv, b->loaded);
        free(b);
    }
    while (spill->free) {
        fcdp_spilled *slice = spill->free;
        spill->free = slice->next;
        slice_free(slice);
    }
    fcdp__disk_close(spill->disk);
    sem_destroy(&spill->wake);
    pthread_cond_destroy(&spill->changed);
    pthread_mutex_destroy(&spill->mutex);
    free(spill);
}
