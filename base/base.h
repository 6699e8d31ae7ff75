/* base.h - what every layer shares: status, error text, log, checks, locks, threads.
 *
 * A function that can fail returns fcdp_status and writes its outputs (last, `_out`) only on success. The
 * first function that can name a failure writes the text with fcdp__fail(); its callers pass the status up.
 * Out of memory is a signal to policy: it carries a text but is never logged where it happens.
 */
#ifndef FCDP_BASE_H
#define FCDP_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
#error "FCDP's core is C11"
#endif

#define FCDP_MUST_CHECK __attribute__((warn_unused_result))
#define FCDP_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

typedef enum fcdp_status {
    FCDP_OK = 0,
    FCDP_PENDING = 1,            /* not finished yet: query again, or wait */
    FCDP_ERR_INVALID = -1,       /* the caller broke a precondition */
    FCDP_ERR_NO_DEVICE_MEM = -2, /* device pages: nothing left to reclaim */
    FCDP_ERR_NO_HOST_MEM = -3,   /* host memory or a limit on it */
    FCDP_ERR_DRIVER = -4,        /* the driver refused or the device is broken */
    FCDP_ERR_SYSTEM = -5,        /* a system call failed */
    FCDP_ERR_UNSUPPORTED = -6,   /* this machine or configuration cannot: leave plain FSDP in place */
    /* an FCDP_* variable is unknown, malformed, or asks for what cannot be had: the job stops */
    FCDP_ERR_OPTION = -7,
    FCDP_ERR_TIMEOUT = -8,    /* what was waited for did not come in time */
    FCDP_ERR_PEER = -9,       /* another rank died or disagreed */
    FCDP_ERR_TRANSPORT = -10, /* a collective failed */
    FCDP_ERR_PROGRAM = -11, /* a function of the caller's failed; the caller has the error (comm/unshard.h) */
} fcdp_status;

/* The calling thread's last failure, "" when none. Valid until the thread's next failure. */
const char *fcdp_error_text(void);

/* A group's name as messages have it: a model's root has the empty name. */
static inline const char *fcdp__name_text(const char *name) {
    return name[0] ? name : "the root";
}

/* Write the calling thread's failure text and return `status`. For a text that wraps an inner one, "%s" the
 * inner fcdp_error_text(): the new text may be formatted from the old one. */
fcdp_status fcdp__fail(fcdp_status status, const char *format, ...) FCDP_PRINTF(2, 3) FCDP_MUST_CHECK;

enum { FCDP_TEXT_BYTES = 2048 }; /* longer texts are cut */
/* The calling thread's failure, saved across calls that may fail too and would overwrite its text. */
typedef struct fcdp_failure {
    fcdp_status status;
    char text[FCDP_TEXT_BYTES];
} fcdp_failure;
fcdp_failure fcdp__failure_keep(fcdp_status status);
/* Make the saved text the thread's again and return the saved status. FCDP_OK leaves the text alone. */
fcdp_status fcdp__failure_restore(const fcdp_failure *failure) FCDP_MUST_CHECK;

/* The status of `call`, which is tried twice: for calls that give memory back, since a transient failure of a
 * busy driver must not lose that memory for good. */
#define FCDP_RETRY_ONCE(call)                                                                                \
    __extension__({                                                                                          \
        fcdp_status status_ = (call);                                                                        \
        status_ ? (call) : status_;                                                                          \
    })

typedef enum fcdp_log_level {
    FCDP_LOG_QUIET = 0,
    FCDP_LOG_WARN = 1,
    FCDP_LOG_INFO = 2,
    FCDP_LOG_DEBUG = 3
} fcdp_log_level;

/* One line to stderr, "fcdp: ..." with the level's word; dropped when the level is above the threshold. */
void fcdp__log(fcdp_log_level level, const char *format, ...) FCDP_PRINTF(2, 3);
void fcdp_log_set_level(fcdp_log_level level);

/* Checks. Level 0: always on, corruption; 1: preconditions of the API; 2: internal asserts and lock ranks;
 * 3: *_is_valid() after every mutation. A failed check prints the expression and aborts: state is corrupt. */
extern int fcdp__check_level;
void fcdp__check_failed(const char *expr, const char *file, int line) __attribute__((noreturn));
#define FCDP_CHECK(level, expr)                                                                              \
    do {                                                                                                     \
        if (__builtin_expect(fcdp__check_level >= (level) && !(expr), 0))                                    \
            fcdp__check_failed(#expr, __FILE__, __LINE__);                                                   \
    } while (0)

/* Locks with ranks: a thread takes locks in descending rank order only (checked at level 2).
 * The order is the call order of the layers: ENGINE before REGION before HOST before POOL
 * before HEAP before FENCE before ARENA before DRIVER before TRACE. */
typedef enum fcdp_lock_rank {
    FCDP_RANK_TRACE = 8,
    FCDP_RANK_DRIVER = 10,
    FCDP_RANK_ARENA = 12,
    FCDP_RANK_FENCE = 13,
    FCDP_RANK_HEAP = 14,
    FCDP_RANK_POOL = 20,
    FCDP_RANK_HOST = 30,
    FCDP_RANK_REGION = 40,
    FCDP_RANK_ENGINE = 50,
} fcdp_lock_rank;

#include <pthread.h>
typedef struct fcdp_lock {
    pthread_mutex_t mutex;
    fcdp_lock_rank rank;
} fcdp_lock;
void fcdp__lock_init(fcdp_lock *lock, fcdp_lock_rank rank);
void fcdp__lock_destroy(fcdp_lock *lock);
void fcdp__lock_acquire(fcdp_lock *lock);
void fcdp__lock_release(fcdp_lock *lock);
/* Wait on `cond` with `lock` held; keeps the rank bookkeeping right. */
void fcdp__lock_wait(fcdp_lock *lock, pthread_cond_t *cond);

/* CLOCK_MONOTONIC, nanoseconds. */
uint64_t fcdp__now_ns(void);

/* Starts a thread that no signal is delivered to: signals are for the program's own threads. 0, or an errno;
 * *thread_out is the caller's to join or to detach. */
int fcdp__thread_start(void *(*main)(void *), void *arg, pthread_t *thread_out);
/* A condition whose timed waits are by the clock of fcdp__now_ns. */
void fcdp__condition_init(pthread_cond_t *condition);
/* Waits for a signal until `until_ns`. False: that time has come. With the mutex, as
 * pthread_cond_timedwait. */
bool fcdp__condition_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t until_ns);

static inline size_t fcdp__round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

#endif
