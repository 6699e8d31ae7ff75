/* fingerprint.c - bytes are fingerprinted where they lie.
 *
 * A kernel (fingerprint.cu) reads shards that lie on a GPU: a copy to the host would take the link that
 * stores and restores need. The same function in C serves the simulated device. Bytes that this host alone
 * compares get XXH3, which is faster on a CPU.
 *
 * One launch serves many arrays, so the host's cost does not grow with their number. The tasks lie in pinned
 * memory that the device reads and writes itself: no copy, no memory of the device's, nothing to zero, and no
 * atomics. The host adds the blocks' sums up, a few thousand at most. The memory is shared, not private:
 * after a fork, the device would write to pages that only the child has.
 *
 * This file computes; vote.c decides what a fingerprint is compared with.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "comm/fingerprint.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- the function ---- */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little endian, as they are on every GPU"
#endif

extern const char fcdp__fingerprint_ptx[]; /* comm/CMakeLists.txt makes it of fingerprint.ptx */

enum { WORD_BYTES = sizeof(uint64_t) };
static const uint64_t STEP = 0x9e3779b97f4a7c15, FACTOR = 0xd6e8feb86659fd93;

static inline uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= FACTOR;
    x ^= x >> 32;
    x *= FACTOR;
    return x ^ x >> 32;
}

uint64_t fcdp__fingerprint_of_sum(uint64_t sum, size_t n_bytes) {
    return mix(sum + n_bytes);
}

/* The terms of the task's words. They come through memcpy, as they may lie anywhere. */
static void run_task(void *task) {
    fcdp_fingerprint_task *of = task;
    const unsigned char *bytes = (const unsigned char *)(uintptr_t)of->address;
    uint64_t sum = 0, key = (of->first + 1) * STEP, word;
    size_t n_words = of->bytes / WORD_BYTES, n_rest = of->bytes % WORD_BYTES;
    for (size_t i = 0; i < n_words; i++, key += STEP) {
        memcpy(&word, bytes + i * WORD_BYTES, WORD_BYTES);
        sum += mix(word + key);
    }
    word = 0;
    memcpy(&word, bytes + n_words * WORD_BYTES, n_rest);
    of->sum = n_rest ? sum + mix(word + key) : sum;
}

const fcdp_kernel_source fcdp__fingerprint_kernel = {
    .image = fcdp__fingerprint_ptx,
    .entry = "fcdp_fingerprint",
    .n_threads = FCDP_FINGERPRINT_THREADS,
    .task_bytes = sizeof(fcdp_fingerprint_task),
    .n_read = 1,
    .run = run_task,
};

uint64_t fcdp__fingerprint_by_host(const void *bytes, size_t n_bytes, uint64_t before) {
    return XXH3_64bits_withSeed(bytes, n_bytes, before);
}

/* ---- a batch on the device ---- */

/*     begun <=> the device may read and write tasks[0 .. n_tasks) */
struct fcdp_fingerprints {
    fcdp_driver *drv;
    fcdp_kernel kernel;
    bool owns_kernel;
    fcdp_event done; /* NULL: none yet */
    fcdp_stream stream;
    bool begun;
    fcdp_fingerprint_task *tasks; /* NULL: none yet */
    size_t capacity_bytes;        /* pinned */
    size_t n_tasks, n;
    size_t *bytes; /* of each of the n arrays */
    size_t n_bytes_capacity;
};

static size_t n_tasks_of(size_t bytes) {
    return (bytes + FCDP_FINGERPRINT_TASK_BYTES - 1) / FCDP_FINGERPRINT_TASK_BYTES;
}

/* `beside`: it uses the kernel of that batch; NULL: its own. */
static fcdp_status create(fcdp_driver *drv, const fcdp_fingerprints *beside,
                          fcdp_fingerprints **fingerprints_out) {
    fcdp_fingerprints *f = calloc(1, sizeof *f);
    if (!f) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to fingerprint shards on the device");
    f->drv = drv;
    fcdp_status status = FCDP_OK;
    if (beside)
        f->kernel = beside->kernel;
    else
        status = fcdp__driver_kernel_load(drv, &fcdp__fingerprint_kernel, &f->kernel);
    f->owns_kernel = !beside && !status;
    if (!status) status = fcdp__driver_event_create_blocking(drv, &f->done);
    if (status) {
        fcdp__fingerprints_destroy(f);
        return status;
    }
    *fingerprints_out = f;
    return FCDP_OK;
}

fcdp_status fcdp__fingerprints_create(fcdp_driver *drv, fcdp_fingerprints **fingerprints_out) {
    return create(drv, NULL, fingerprints_out);
}

fcdp_status fcdp__fingerprints_create_beside(const fcdp_fingerprints *first,
                                             fcdp_fingerprints **fingerprints_out) {
    return create(first->drv, first, fingerprints_out);
}

/* The device is through with them. What stays registered, though it was tried twice,
 * stays mapped: see fcdp__host_detach(). */
static void tasks_free(fcdp_fingerprints *f) {
    if (!f->tasks) return;
    size_t stay_bytes;
    bool stays = fcdp__driver_host_unpin(f->drv, f->tasks, f->capacity_bytes, &stay_bytes);
    if (stays) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    if (!stays) munmap(f->tasks, f->capacity_bytes);
    f->tasks = NULL;
    f->capacity_bytes = 0;
}

void fcdp__fingerprints_destroy(fcdp_fingerprints *f) {
    if (!f) return;
    if (f->begun && fcdp__driver_event_sync(f->drv, f->done)) /* its stream may be gone */
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    tasks_free(f);
    if (f->done) fcdp__driver_event_destroy(f->drv, f->done);
    if (f->owns_kernel) fcdp__driver_kernel_unload(f->drv, &f->kernel);
    free(f->bytes);
    free(f);
}

/* Twice what is needed, so that a job comes to its size in few steps; whole
 * pages, since that is what can be pinned. */
static fcdp_status tasks_reserve(fcdp_fingerprints *f, size_t n_tasks) {
    size_t bytes = n_tasks * sizeof *f->tasks, page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes <= f->capacity_bytes) return FCDP_OK;
    bytes = fcdp__round_up(2 * bytes, page_bytes);
    void *tasks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tasks == MAP_FAILED)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no memory for %zu tasks of fingerprints (%zu bytes)",
                          n_tasks, bytes);
    size_t stay_bytes;
    fcdp_status status = fcdp__driver_host_pin(f->drv, tasks, bytes, &stay_bytes);
    if (status) {
        if (!stay_bytes) munmap(tasks, bytes);
        return status;
    }
    tasks_free(f);
    f->tasks = tasks;
    f->capacity_bytes = bytes;
    return FCDP_OK;
}

/* Each task has up to FCDP_FINGERPRINT_TASK_BYTES of one array. */
static void tasks_fill(fcdp_fingerprints *f, const uint64_t *arrays) {
    fcdp_fingerprint_task *task = f->tasks;
    for (size_t i = 0; i < f->n; i++)
        for (size_t at = 0; at < f->bytes[i]; at += FCDP_FINGERPRINT_TASK_BYTES) {
            size_t left = f->bytes[i] - at;
            *task++ = (fcdp_fingerprint_task){
                .address = arrays[i] + at,
                .bytes = left < FCDP_FINGERPRINT_TASK_BYTES ? left : FCDP_FINGERPRINT_TASK_BYTES,
                .first = at / sizeof(uint64_t),
            };
        }
}

/* After the failure `status`, which the caller is told: the tasks are the device's until its stream has
 * passed them. */
static fcdp_status launch_end(fcdp_fingerprints *f, fcdp_status status) {
    fcdp_failure error = fcdp__failure_keep(status);
    if (f->begun && !fcdp__driver_stream_sync(f->drv, f->stream)) f->begun = false;
    return fcdp__failure_restore(&error);
}

/* All that can fail for lack of memory comes before the launch, which nothing could take back. */
fcdp_status fcdp__fingerprints_begin(fcdp_fingerprints *f, const uint64_t *arrays, const size_t *bytes,
                                     size_t n, fcdp_stream stream) {
    if (f->begun)
        return fcdp__fail(FCDP_ERR_INVALID,
                          "fingerprints of %zu shards have begun: end them before those of %zu more", f->n,
                          n);
    f->n_tasks = 0;
    for (size_t i = 0; i < n; i++) f->n_tasks += n_tasks_of(bytes[i]);
    if (n > f->n_bytes_capacity) {
        size_t *larger = realloc(f->bytes, n * sizeof *larger);
        if (!larger) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the sizes of %zu shards", n);
        f->bytes = larger;
        f->n_bytes_capacity = n;
    }
    if (n) memcpy(f->bytes, bytes, n * sizeof *bytes);
    f->n = n;
    fcdp_dptr tasks;
    fcdp_status status = tasks_reserve(f, f->n_tasks);
    if (status || f->n_tasks == 0) return status;
    tasks_fill(f, arrays);
    status = fcdp__driver_host_dptr(f->drv, f->tasks, &tasks);
    if (!status) status = fcdp__driver_launch(f->drv, &f->kernel, tasks, (uint32_t)f->n_tasks, stream);
    f->begun = status == FCDP_OK;
    f->stream = stream;
    if (!status) status = fcdp__driver_event_record(f->drv, f->done, stream);
    return status ? launch_end(f, status) : FCDP_OK;
}

/* The sums are in the order in which tasks_fill made their tasks. */
fcdp_status fcdp__fingerprints_end(fcdp_fingerprints *f, uint64_t *fingerprints_out) {
    fcdp_status status = f->begun ? fcdp__driver_event_query(f->drv, f->done) : FCDP_OK;
    if (status == FCDP_PENDING) status = fcdp__driver_event_sync(f->drv, f->done);
    if (status) return launch_end(f, status);
    f->begun = false;
    const fcdp_fingerprint_task *task = f->tasks;
    for (size_t i = 0; i < f->n; i++) {
        uint64_t sum = 0;
        for (size_t k = n_tasks_of(f->bytes[i]); k > 0; k--) sum += task++->sum;
        fingerprints_out[i] = fcdp__fingerprint_of_sum(sum, f->bytes[i]);
    }
    return FCDP_OK;
}

fcdp_status fcdp_fingerprints_of(void *driver, const uint64_t *arrays, const size_t *bytes, size_t n,
                                 uint64_t *fingerprints_out) {
    fcdp_driver *drv = driver;
    fcdp_fingerprints *batch = NULL;
    fcdp_stream stream = NULL;
    fcdp_status status = fcdp__fingerprints_create(drv, &batch);
    if (status) return status;
    status = fcdp__driver_stream_create(drv, &stream);
    if (status) stream = NULL;
    if (!status) status = fcdp__fingerprints_begin(batch, arrays, bytes, n, stream);
    if (!status) status = fcdp__fingerprints_end(batch, fingerprints_out);
    fcdp_failure failure = fcdp__failure_keep(status);
    fcdp__fingerprints_destroy(batch);
    if (stream) fcdp__driver_stream_destroy(drv, stream);
    return failure.status ? fcdp__failure_restore(&failure) : FCDP_OK;
}
