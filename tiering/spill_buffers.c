/* spill_buffers.c - the buffers, and the thread between them and the disk.
 *
 * A thread waits for a buffer that ends by itself, or by what it has enqueued itself: not for one that is
 * claimed (fetched, and not loaded yet), nor for one that another model's gather is to fill or from which
 * its restore copies, for which a peer may wait for this thread. Where there are only such, one more is
 * made.
 *
 * A stream's host function may take no lock that a caller of the driver holds, so it only sets a flag and
 * raises a semaphore.
 */
#include "tiering/spill_buffers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/size.h"
#include "tiering/shared.h"
#include "tiering/trace_events.h"

enum { BLOCK = FCDP_DISK_BLOCK_BYTES, LOOK_NS = FCDP_SPILL_LOOK_NS, SMALL = 64 << 10 };

/* ---- the thread ---- */

size_t fcdp__spilled_n_blocks(const fcdp_spilled *slice) {
    return (slice->file_bytes + BLOCK - 1) / BLOCK;
}

static void disk_warn(fcdp_spill_buffers *set, const fcdp_spill_buffer *b) {
    if (set->warned) return;
    set->warned = true;
    fcdp__log(FCDP_LOG_WARN,
              "FCDP_SPILL_DIR: a part of '%s' cannot be %s: %s. What is lost there is gathered again; check "
              "the disk (this is said once)",
              b->of->name, b->state == FCDP_SPILL_BUFFER_READING ? "read" : "written",
              b->error == EBADMSG ? "it is not what was written" : strerror(b->error));
}

/* With the mutex: the last block of a transfer has ended. */
static void transfer_end(fcdp_spill_buffers *set, fcdp_spill_buffer *b) {
    bool reads = b->state == FCDP_SPILL_BUFFER_READING;
    fcdp__count(set->counts, reads ? FCDP_COUNT_SPILL_READ_BYTES : FCDP_COUNT_SPILL_WRITTEN_BYTES,
                b->error ? 0 : b->of->bytes);
    fcdp__trace_since(b->start_ns,
                      (fcdp_trace_event){.kind = reads ? FCDP_EVENT_SPILL_READ : FCDP_EVENT_SPILL_WRITE,
                                         .object = b->of->object,
                                         .bytes = b->of->bytes,
                                         .a = (uint64_t)b->error});
    if (b->error) {
        disk_warn(set, b);
        fcdp__count(set->counts, FCDP_COUNT_SPILL_FAILURES, 1);
    }
    b->of->in_file = !b->error && b->version == b->of->version;
    if (reads && b->error) b->of = NULL;
    b->state = FCDP_SPILL_BUFFER_IDLE;
    pthread_cond_broadcast(&set->changed);
}

/* With the mutex: of what has blocks to begin, reads that the host waits for, then other reads, then
 * writes; the one that was asked for first. */
static fcdp_spill_buffer *next_transfer(fcdp_spill_buffers *set) {
    fcdp_spill_buffer *best = NULL;
    for (fcdp_spill_buffer *b = set->first; b; b = b->next) {
        if (b->state == FCDP_SPILL_BUFFER_FILLING && atomic_load_explicit(&b->filled, memory_order_acquire)) {
            b->state = FCDP_SPILL_BUFFER_WRITING;
            b->n_begun = b->n_ended = 0;
            b->error = 0;
            b->start_ns = fcdp__trace_start();
        }
        if (b->state != FCDP_SPILL_BUFFER_WRITING && b->state != FCDP_SPILL_BUFFER_READING) continue;
        if (b->error || b->n_begun == fcdp__spilled_n_blocks(b->of)) continue;
        int rank = (b->state == FCDP_SPILL_BUFFER_READING) +
                   (b->state == FCDP_SPILL_BUFFER_READING && b->claimed);
        int of_best = best ? (best->state == FCDP_SPILL_BUFFER_READING) +
                                 (best->state == FCDP_SPILL_BUFFER_READING && best->claimed)
                           : -1;
        if (rank > of_best || (rank == of_best && b->asked < best->asked)) best = b;
    }
    return best;
}

static bool anything_unfinished(const fcdp_spill_buffers *set) {
    for (const fcdp_spill_buffer *b = set->first; b; b = b->next)
        if (b->state == FCDP_SPILL_BUFFER_WRITING || b->state == FCDP_SPILL_BUFFER_READING) return true;
    return false;
}

/* The bytes behind the slice's end, up to a whole sector, are whatever the buffer has there. */
static void block_begin(fcdp_spill_buffers *set, fcdp_spill_buffer *b) {
    fcdp_disk_block *block = set->blocks;
    while (block->owner) block++;
    size_t k = b->n_begun++, from = k * BLOCK;
    size_t bytes = b->of->file_bytes - from < BLOCK ? b->of->file_bytes - from : BLOCK;
    *block = (fcdp_disk_block){.at = b->at + from,
                               .bytes = bytes,
                               .offset = b->of->offset + from,
                               .writes = b->state == FCDP_SPILL_BUFFER_WRITING,
                               .buffer = b->registered,
                               .owner = b};
    if (block->writes) b->of->sums[k] = XXH3_64bits(block->at, bytes);
    fcdp__disk_begin(set->disk, block);
}

static void block_end(fcdp_spill_buffers *set, fcdp_disk_block *block) {
    fcdp_spill_buffer *b = block->owner;
    size_t k = (block->offset - b->of->offset) / BLOCK;
    int error = block->error;
    if (!error && !block->writes && XXH3_64bits(block->at, block->bytes) != b->of->sums[k]) error = EBADMSG;
    block->owner = NULL;
    pthread_mutex_lock(&set->mutex);
    b->n_ended++;
    if (error && !b->error) b->error = error;
    if (b->n_ended == b->n_begun && (b->error || b->n_ended == fcdp__spilled_n_blocks(b->of)))
        transfer_end(set, b);
    pthread_mutex_unlock(&set->mutex);
}

static void *thread_main(void *arg) {
    fcdp_spill_buffers *set = arg;
    for (;;) {
        fcdp_spill_buffer *b = NULL;
        pthread_mutex_lock(&set->mutex);
        if (fcdp__disk_has_room(set->disk)) b = next_transfer(set);
        bool ends = set->stops && !anything_unfinished(set);
        pthread_mutex_unlock(&set->mutex);
        if (ends) return NULL;
        if (b) {
            block_begin(set, b);
            continue;
        }
        fcdp_disk_block *block = fcdp__disk_end(set->disk);
        if (block)
            block_end(set, block);
        else
            while (sem_wait(&set->wake) && errno == EINTR) {
            }
    }
}

/* ---- buffers ---- */

static void memory_free(fcdp_spill_buffers *set, fcdp_spill_buffer *b) {
    size_t stay_bytes = 0;
    if (!b->at) return;
    (void)fcdp__disk_register(set->disk, b->registered, NULL, 0);
    if (fcdp__driver_host_unpin(set->drv, b->at, b->capacity_bytes, &stay_bytes))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    if (!stay_bytes) munmap(b->at, b->capacity_bytes);
    b->at = NULL;
    b->capacity_bytes = 0;
}

/* Aligned, in huge pages where the system has them: of 4 KiB pages, a block has more pieces than most disks
 * take in one request. NULL: no memory. */
static char *memory_map(size_t bytes) {
    char *mapped = mmap(NULL, bytes + FCDP_HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    size_t before = fcdp__round_up((uintptr_t)mapped, FCDP_HUGE_BYTES) - (uintptr_t)mapped;
    if (before) munmap(mapped, before);
    if (before < FCDP_HUGE_BYTES) munmap(mapped + before + bytes, FCDP_HUGE_BYTES - before);
    (void)madvise(mapped + before, bytes, MADV_HUGEPAGE);
    return mapped + before;
}

/* A child that shared the pages would see the device's and the disk's writes, or make them go elsewhere. */
static fcdp_status memory_make(fcdp_spill_buffers *set, fcdp_spill_buffer *b, size_t bytes) {
    size_t stay_bytes = 0;
    bytes = fcdp__round_up(bytes, bytes < FCDP_HUGE_BYTES ? SMALL : FCDP_HUGE_BYTES);
    char *at = memory_map(bytes);
    if (!at)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory (%s) for a buffer of FCDP_SPILL_DIR: %s",
                          fcdp__size_text(bytes).s, strerror(errno));
    (void)madvise(at, bytes, MADV_DONTFORK);
    fcdp_status status = fcdp__driver_host_pin(set->drv, at, bytes, &stay_bytes);
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        if (!stay_bytes) munmap(at, bytes);
        return fcdp__fail(failure.status, "a buffer of FCDP_SPILL_DIR must be pinned: %s", failure.text);
    }
    b->at = at;
    b->capacity_bytes = bytes;
    b->registered = fcdp__disk_register(set->disk, b->number, at, bytes);
    return FCDP_OK;
}

/* With the mutex, which keeps other threads from the list. */
static fcdp_status buffer_make(fcdp_spill_buffers *set, size_t bytes, fcdp_spill_buffer **made_out) {
    fcdp_spill_buffer *b = calloc(1, sizeof *b);
    if (!b) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a buffer of FCDP_SPILL_DIR");
    b->set = set;
    b->number = (int)set->n;
    fcdp_status status = fcdp__driver_event_create_blocking(set->drv, &b->loaded);
    if (status) {
        free(b);
        return status;
    }
    status = fcdp__driver_event_create(set->drv, &b->stored);
    if (status) b->stored = NULL;
    if (!status) status = memory_make(set, b, bytes);
    if (status) {
        if (b->stored) fcdp__driver_event_destroy(set->drv, b->stored);
        fcdp__driver_event_destroy(set->drv, b->loaded);
        free(b);
        return status;
    }
    b->next = set->first;
    set->first = b;
    set->n++;
    *made_out = b;
    return FCDP_OK;
}

/* With the mutex. FCDP_PENDING: the last copy from it has not passed. */
static fcdp_status loaded_query(fcdp_spill_buffer *b) {
    if (!b->loading) return FCDP_OK;
    fcdp_status status = fcdp__driver_event_query(b->set->drv, b->loaded);
    if (!status) b->loading = false;
    return status;
}

fcdp_status fcdp__spill_buffer_find_free(fcdp_spill_buffers *set, size_t bytes, bool any,
                                         fcdp_spill_buffer **found_out) {
    fcdp_spill_buffer *best = NULL;
    *found_out = NULL;
    for (fcdp_spill_buffer *b = set->first; b; b = b->next) {
        bool suits = b->capacity_bytes >= bytes;
        if (b->state != FCDP_SPILL_BUFFER_IDLE || b->claimed || (!any && !suits)) continue;
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
static bool ends_by_itself(const fcdp_spill_buffer *b, fcdp_stream filler) {
    return b->state == FCDP_SPILL_BUFFER_WRITING || b->state == FCDP_SPILL_BUFFER_READING ||
           (b->state == FCDP_SPILL_BUFFER_FILLING && b->filler == filler);
}

/* With the mutex, which is released meanwhile: wait for what ends by itself; *none_out: nothing does. A
 * stream that has failed never runs its host function. */
static fcdp_status any_await(fcdp_spill_buffers *set, fcdp_stream filler, bool *none_out) {
    fcdp_spill_buffer *busy = NULL, *loading = NULL;
    fcdp_status status = FCDP_OK;
    for (fcdp_spill_buffer *b = set->first; b; b = b->next) {
        if (ends_by_itself(b, filler)) busy = b;
        if (b->state == FCDP_SPILL_BUFFER_IDLE && !b->claimed && b->loading && b->of &&
            b->of->filler == filler)
            loading = b;
    }
    *none_out = !busy && !loading;
    if (loading) {
        pthread_mutex_unlock(&set->mutex);
        status = fcdp__driver_event_sync(set->drv, loading->loaded);
        pthread_mutex_lock(&set->mutex);
        if (!status) status = loaded_query(loading);
    } else if (busy && !fcdp__condition_wait(&set->changed, &set->mutex, fcdp__now_ns() + LOOK_NS)) {
        for (fcdp_spill_buffer *b = set->first; b && status >= 0; b = b->next)
            if (b->state == FCDP_SPILL_BUFFER_FILLING)
                status = fcdp__driver_stream_query(set->drv, b->filler);
    }
    return status < 0 ? status : FCDP_OK;
}

fcdp_status fcdp__spill_late_fail(const fcdp_spill_buffers *set) {
    return fcdp__fail(FCDP_ERR_TIMEOUT, "the disk of FCDP_SPILL_DIR has not answered for %.0f s: check it",
                      (double)set->patience_ns / 1e9);
}

fcdp_status fcdp__spill_buffer_take(fcdp_spill_buffers *set, size_t bytes, fcdp_stream filler,
                                    bool *waits_out, fcdp_spill_buffer **taken_out) {
    fcdp_status status = FCDP_OK;
    uint64_t start_ns = fcdp__now_ns();
    for (*taken_out = NULL; !*taken_out && !status;) {
        bool none = false;
        status = fcdp__spill_buffer_find_free(set, bytes, true, taken_out);
        if (status || *taken_out) break;
        *waits_out = true;
        status = any_await(set, filler, &none);
        if (!status && none) status = buffer_make(set, bytes, taken_out);
        if (!status && !*taken_out && fcdp__now_ns() - start_ns > set->patience_ns)
            status = fcdp__spill_late_fail(set);
    }
    if (status) return status;
    (*taken_out)->of = NULL;
    if ((*taken_out)->capacity_bytes >= bytes) return FCDP_OK;
    memory_free(set, *taken_out);
    return memory_make(set, *taken_out, bytes);
}

fcdp_spill_buffer *fcdp__spill_buffer_of(const fcdp_spill_buffers *set, const fcdp_spilled *slice) {
    fcdp_spill_buffer *b = set->first;
    while (b && b->of != slice) b = b->next;
    return b;
}

void fcdp__spill_buffer_touch(fcdp_spill_buffers *set, fcdp_spill_buffer *b) {
    b->last_use = ++set->clock;
}

fcdp_status fcdp__spill_buffer_settle(fcdp_spill_buffers *set, const fcdp_spilled *slice) {
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = FCDP_OK;
    for (fcdp_spill_buffer *b = fcdp__spill_buffer_of(set, slice);
         !status && b && b->state != FCDP_SPILL_BUFFER_IDLE; b = fcdp__spill_buffer_of(set, slice)) {
        if (fcdp__condition_wait(&set->changed, &set->mutex, fcdp__now_ns() + LOOK_NS)) continue;
        if (b->state == FCDP_SPILL_BUFFER_FILLING) {
            status = fcdp__driver_stream_query(set->drv, b->filler);
            if (status == FCDP_PENDING) status = FCDP_OK;
        } else if (fcdp__now_ns() - start_ns > set->patience_ns) {
            status = fcdp__spill_late_fail(set);
        }
    }
    return status;
}

void fcdp__spill_buffer_read(fcdp_spill_buffers *set, fcdp_spill_buffer *b, fcdp_spilled *slice) {
    FCDP_CHECK(1, slice->in_file && !fcdp__spill_buffer_of(set, slice));
    b->of = slice;
    b->version = slice->version;
    b->state = FCDP_SPILL_BUFFER_READING;
    b->n_begun = b->n_ended = 0;
    b->error = 0;
    b->asked = ++set->clock;
    b->start_ns = fcdp__trace_start();
    sem_post(&set->wake);
}

void fcdp__spill_buffer_fill(fcdp_spill_buffers *set, fcdp_spill_buffer *b, fcdp_spilled *slice) {
    b->of = slice;
    b->version = slice->version;
    b->claimed = false;
    b->state = FCDP_SPILL_BUFFER_FILLING;
    b->filler = slice->filler;
    b->asked = ++set->clock;
    atomic_store_explicit(&b->filled, false, memory_order_relaxed);
    fcdp__spill_buffer_touch(set, b);
}

void fcdp__spill_buffer_filled(void *context) {
    fcdp_spill_buffer *b = context;
    atomic_store_explicit(&b->filled, true, memory_order_release);
    sem_post(&b->set->wake);
}

fcdp_status fcdp__spill_buffers_fit(fcdp_spill_buffers *set, uint32_t n, size_t bytes) {
    fcdp_status status = FCDP_OK;
    while (!status && set->n < n) {
        fcdp_spill_buffer *made;
        status = buffer_make(set, bytes, &made);
    }
    for (fcdp_spill_buffer *b = set->first; b && !status; b = b->next) {
        if (b->capacity_bytes >= bytes || b->state != FCDP_SPILL_BUFFER_IDLE || b->claimed || loaded_query(b))
            continue;
        b->of = NULL;
        memory_free(set, b);
        status = memory_make(set, b, bytes);
    }
    return status;
}

/* ---- life ---- */

void fcdp__spill_buffers_give(fcdp_spill_buffers *set) {
    for (fcdp_spill_buffer *b = set->first; b; b = b->next)
        if (b->state == FCDP_SPILL_BUFFER_IDLE && !b->loading) memory_free(set, b);
}

fcdp_status fcdp__spill_buffers_start(fcdp_spill_buffers *set) {
    pthread_mutex_init(&set->mutex, NULL);
    fcdp__condition_init(&set->changed);
    sem_init(&set->wake, 0, 0);
    int error = fcdp__thread_start(thread_main, set, &set->thread);
    if (error) return fcdp__fail(FCDP_ERR_SYSTEM, "FCDP_SPILL_DIR: no thread: %s", strerror(error));
    pthread_setname_np(set->thread, "fcdp-spill");
    return FCDP_OK;
}

void fcdp__spill_buffers_stop(fcdp_spill_buffers *set) {
    pthread_mutex_lock(&set->mutex);
    set->stops = true;
    pthread_mutex_unlock(&set->mutex);
    sem_post(&set->wake);
    pthread_join(set->thread, NULL);
    while (set->first) {
        fcdp_spill_buffer *b = set->first;
        set->first = b->next;
        if (b->state == FCDP_SPILL_BUFFER_IDLE) memory_free(set, b); /* else the device may write there yet */
        fcdp__driver_event_destroy(set->drv, b->stored);
        fcdp__driver_event_destroy(set->drv, b->loaded);
        free(b);
    }
    sem_destroy(&set->wake);
    pthread_cond_destroy(&set->changed);
    pthread_mutex_destroy(&set->mutex);
}
