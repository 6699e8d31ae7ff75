/* Streams: queues in order, each drained by a thread of its own that starts with the first work that cannot
 * be done on the spot.
 *
 * The null stream (0, or CU_STREAM_LEGACY) orders itself against every stream without CU_STREAM_NON_BLOCKING,
 * both ways: its work waits for all their earlier work, and their later work waits for it. Since operations
 * are numbered across streams, both are a look at the queues' heads. CU_STREAM_PER_THREAD is refused.
 *
 * A device has CUDA_DEVICE_MAX_CONNECTIONS hardware queues, which streams share in turn. A queue starts its
 * operations in the order in which the host has enqueued them: one that waits, for an event, a value or what
 * is before it on its stream, holds up those of other streams behind it. What has started holds up nothing.
 *
 * Once the sticky error is set, queued work is dropped: points still become done, so that no thread waits for
 * ever.
 *
 * Time: a kernel, and a copy over a link of a set rate, has a modelled end, and the next operation counts as
 * ready from then, not from when a thread of this machine woke up. So late wake-ups do not add up along a
 * stream or from stream to stream, while nothing ever ends before its modelled time. What takes no set time
 * ends when it is done. Another process may write a value, and its modelled time is not known: a value
 * that is there when the stream comes to wait for it counts as there all along, and one that comes later as
 * written when it was seen. What a thread of this process stores (simgpu_word_store) has its modelled time.
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim/gpu/internal.h"

/* How often a waiting stream looks at memory that something other than a stream may write, since such a write
 * wakes no thread. */
#define VALUE_LOOK_NS 2000000

/* head..tail is the queue; the head stays there while it runs. */
struct sim_stream {
    struct sim_stream *next; /* all streams but the null stream, also those destroyed with work left */
    struct sim_op *head;
    struct sim_op *tail;
    pthread_cond_t work; /* for its worker: the queue got an operation, its head may start, closing is set */
    bool non_blocking;
    unsigned queue; /* modulo the number of queues: the hardware queue that it shares */
    bool has_worker;
    bool waits;       /* the worker, on `work`, for the head's turn */
    bool closing;     /* destroyed: the worker ends when the queue is empty */
    uint64_t free_ns; /* the modelled end of what it did last */
    struct sim_position position;
    char name[SIM_TEXT_BYTES];
    unsigned row;      /* in timelines; the null stream's is 0 */
    unsigned named_in; /* the timeline that knows the name */
    CUstreamCaptureStatus capture;
};

static struct sim_table stream_table = {.tag = 0x53};
static struct sim_stream null_stream = {.work = PTHREAD_COND_INITIALIZER, .name = "null stream"};
static struct sim_stream *streams;
static unsigned n_workers;
static unsigned n_awaiting;   /* threads of the program's that wait, not for one point */
static bool point_is_awaited; /* one that is done, and whose waiters have not been woken up */
static unsigned n_created;    /* since the last reset: for the names of streams without one */
static unsigned n_rows;       /* ever */
static _Thread_local struct sim_stream *working; /* the stream that this thread works for */
static uint64_t last_seq;
static uint64_t queue_ns[SIM_MAX_QUEUES]; /* the modelled time at which each started something last */

size_t simgpu__stream_count(void) {
    return stream_table.n_live;
}

struct sim_stream *simgpu__stream_of(CUstream stream) {
    if (!stream || stream == CU_STREAM_LEGACY) return &null_stream;
    return simgpu__table_get(&stream_table, (uintptr_t)stream);
}

/* ---- points ---- */

struct sim_point *simgpu__point_new(void) {
    struct sim_point *point = calloc(1, sizeof *point);
    if (point) point->refs = 1;
    return point;
}

void simgpu__point_drop(struct sim_point *point) {
    if (!point || --point->refs > 0) return;
    simgpu__clock_drop(point->position.known);
    free(point);
}

CUresult simgpu__point_wait(struct sim_point *point) {
    point->refs++;
    if (!point->done) simgpu__block_waits();
    point->n_waiting++;
    while (!point->done) pthread_cond_wait(&sim.progress, &sim.lock);
    point->n_waiting--;
    simgpu__point_drop(point);
    return (CUresult)atomic_load(&sim.sticky);
}

/* ---- when an operation may start ---- */

bool simgpu__work_is_dropped(void) {
    return atomic_load(&sim.stopping) || atomic_load(&sim.sticky) != CUDA_SUCCESS;
}

static bool has_work_before(const struct sim_stream *stream, uint64_t seq) {
    return stream->head && stream->head->seq < seq;
}

static bool is_ordered(const struct sim_stream *stream, uint64_t seq) {
    if (stream->non_blocking) return true;
    if (stream != &null_stream) return !has_work_before(&null_stream, seq);
    for (const struct sim_stream *other = streams; other; other = other->next)
        if (!other->non_blocking && has_work_before(other, seq)) return false;
    return true;
}

static bool holds_up(const struct sim_stream *other, const struct sim_stream *stream, uint64_t seq) {
    if (other == stream || other->queue % sim.n_queues != stream->queue % sim.n_queues) return false;
    const struct sim_op *first = other->head && other->head->running ? other->head->next : other->head;
    return first && first->seq < seq;
}

/* Something that its hardware queue has before it has not started. */
static bool is_held_up(const struct sim_stream *stream, uint64_t seq) {
    if (!sim.n_queues) return false;
    if (holds_up(&null_stream, stream, seq)) return true;
    for (const struct sim_stream *other = streams; other; other = other->next)
        if (holds_up(other, stream, seq)) return true;
    return false;
}

static bool is_function(const struct sim_op *op) {
    return sim.serial && op->work == SIM_HOST_FUNCTION && !op->stands_in;
}

static bool may_start(const struct sim_stream *stream, const struct sim_op *op) {
    if (!is_ordered(stream, op->seq) || is_held_up(stream, op->seq)) return false;
    if (op->work == SIM_WAIT_POINT) return op->waits_for->done;
    if (is_function(op)) return !sim.in_function;
    if (op->work == SIM_WAIT_VALUE) return !simgpu__work_is_legal(op) || simgpu__work_value_reached(op);
    return true;
}

/* ---- waking up ----
 *
 * A stream's worker is woken up when its head may start, which it looks at once more. (All of them at each
 * operation's end made tests/comm/test_delta.c take 66 s instead of 43.) */

static void stream_wake(struct sim_stream *stream, bool anyhow) {
    if (stream->waits && (anyhow || may_start(stream, stream->head))) pthread_cond_signal(&stream->work);
}

static void workers_wake(bool anyhow) {
    stream_wake(&null_stream, anyhow);
    for (struct sim_stream *stream = streams; stream; stream = stream->next) stream_wake(stream, anyhow);
}

/* An operation has ended. */
static void progress_tell(void) {
    workers_wake(false);
    if (n_awaiting || point_is_awaited) pthread_cond_broadcast(&sim.progress);
    point_is_awaited = false;
}

void simgpu__streams_wake(void) {
    workers_wake(true);
    pthread_cond_broadcast(&sim.progress);
}

static void progress_await(void) {
    n_awaiting++;
    pthread_cond_wait(&sim.progress, &sim.lock);
    n_awaiting--;
}

/* ---- turns ---- */

static uint32_t value_at(uintptr_t address) {
    return __atomic_load_n((const uint32_t *)address, __ATOMIC_ACQUIRE);
}

static void value_store(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); /* wait_for_turn */
}

/* A value in memory can be written by anything, without a word: it is looked at again and again. A stream
 * that writes one, of whichever process, wakes those that wait for it (order_value). */
static void wait_for_turn(struct sim_stream *stream, const struct sim_op *op) {
    if (op->work != SIM_WAIT_VALUE) {
        stream->waits = true;
        pthread_cond_wait(&stream->work, &sim.lock);
        stream->waits = false;
        return;
    }
    const struct timespec pause = {.tv_nsec = VALUE_LOOK_NS};
    uint32_t seen = value_at(op->src);
    sim_unlock();
    (void)syscall(SYS_futex, op->src, FUTEX_WAIT, seen, &pause, NULL, 0);
    sim_lock();
}

/* ---- the worker ---- */

static void op_destroy(struct sim_op *op) {
    simgpu__point_drop(op->waits_for);
    simgpu__point_drop(op->point);
    if (op->owns_user_data) free(op->user_data);
    free(op->announced);
    simgpu__clock_drop(op->host);
    free(op);
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* The modelled time from when the operation could run: after what is before it on its stream, what it waits
 * for, and what the null stream's order puts before it. */
static uint64_t ready_ns(const struct sim_stream *stream, const struct sim_op *op) {
    uint64_t ready = later(stream->free_ns, op->enqueued_ns);
    if (op->work == SIM_WAIT_VALUE) {
        if (op->waited && !op->stored_ns) return simgpu__now_ns();
        ready = later(ready, op->stored_ns);
    }
    if (op->waits_for) ready = later(ready, op->waits_for->end_ns);
    if (is_function(op)) ready = later(ready, sim.function_free_ns);
    if (sim.n_queues) ready = later(ready, queue_ns[stream->queue % sim.n_queues]);
    if (stream->non_blocking) return ready;
    ready = later(ready, null_stream.free_ns);
    for (const struct sim_stream *other = streams; stream == &null_stream && other; other = other->next)
        if (!other->non_blocking) ready = later(ready, other->free_ns);
    return ready;
}

static bool takes_no_time(const struct sim_op *op) {
    return op->work == SIM_POINT || op->work == SIM_WAIT_POINT || op->work == SIM_WAIT_VALUE ||
           op->work == SIM_WRITE_VALUE;
}

/* What the null stream's order puts before an operation of this stream is over:
 * it is what those streams did so far. */
static void join_implicit(struct sim_stream *stream) {
    if (stream->non_blocking) return;
    if (stream != &null_stream) simgpu__order_learn(&stream->position, &null_stream.position);
    for (const struct sim_stream *other = streams; stream == &null_stream && other; other = other->next)
        if (!other->non_blocking) simgpu__order_learn(&stream->position, &other->position);
}

/* A value is written and its order noted under one hold of the lock, so that a reader of the value knows
 * which write it saw. */
static void order_value(struct sim_stream *stream, const struct sim_op *op) {
    if (op->work == SIM_WRITE_VALUE) {
        bool barrier = !(op->flags & CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER);
        simgpu__order_write_value(&stream->position, simgpu__vspace_key(op->dst), op->value, barrier);
        value_store((uint32_t *)op->dst, op->value);
    } else if (op->work == SIM_WAIT_VALUE) {
        simgpu__order_wait_value(&stream->position, simgpu__vspace_key(op->src), value_at(op->src));
    }
}

/* The operation's turn has come: its order is settled, and its end is known where it is a matter of rates.
 * False: it touches what something else touches that is not ordered with it. */
static bool op_start(struct sim_stream *stream, struct sim_op *op) {
    join_implicit(stream);
    simgpu__order_start(&stream->position, op);
    if (!simgpu__order_check(&stream->position, op, stream->name)) return false;
    order_value(stream, op);
    op->ready_ns = ready_ns(stream, op);
    op->core_times = sim.core_times;
    if (sim.n_queues) queue_ns[stream->queue % sim.n_queues] = op->ready_ns;
    op->finish_ns = op->duration_ns ? op->ready_ns + op->duration_ns : simgpu__link_book(op);
    return true;
}

static void op_end(struct sim_stream *stream, struct sim_op *op) {
    stream->free_ns = op->finish_ns ? op->finish_ns : takes_no_time(op) ? op->ready_ns : simgpu__now_ns();
    if (!op->point) return;
    op->point->end_ns = stream->free_ns;
    op->point->position = stream->position;
    simgpu__clock_keep(stream->position.known);
    op->point->done = true;
    point_is_awaited = point_is_awaited || op->point->n_waiting;
}

/* In timelines: waits that found nothing to wait for would hide what the others waited for. */
static bool shows(const struct sim_op *op) {
    bool is_wait = op->work == SIM_WAIT_POINT || op->work == SIM_WAIT_VALUE;
    return is_wait ? op->waited : op->work != SIM_POINT;
}

/* The next one ends before another thread gets the lock, so that waiters for either are woken once. */
static bool goes_on_at_once(const struct sim_stream *stream) {
    const struct sim_op *next = stream->head;
    return next && takes_no_time(next) && !simgpu__work_is_dropped() && may_start(stream, next);
}

/* The head stays in the queue while it runs without the lock, so that others see what it uses. */
static void run_head(struct sim_stream *stream) {
    struct sim_op *op = stream->head;
    uint64_t begin_ns = simgpu__now_ns();
    while (!simgpu__work_is_dropped() && !may_start(stream, op)) {
        op->waited = true;
        wait_for_turn(stream, op);
    }
    if (!simgpu__work_is_dropped() && (!simgpu__work_is_legal(op) || !op_start(stream, op)))
        simgpu__sticky_set(CUDA_ERROR_ILLEGAL_ADDRESS);
    if (!simgpu__work_is_dropped()) {
        if (!takes_no_time(op)) { /* it runs from here; what only waits has waited */
            begin_ns = simgpu__now_ns();
            op->running = true;
            bool is_serial = is_function(op);
            if (is_serial) sim.in_function = true;
            if (sim.n_queues) workers_wake(false);
            sim_unlock();
            simgpu__work_perform(op);
            sim_lock();
            if (is_serial) sim.in_function = false;
            if (is_serial && op->finish_ns > op->ready_ns) sim.function_free_ns = op->finish_ns;
        }
        if (shows(op) && simgpu__timeline_is_on())
            simgpu__timeline_op(op, begin_ns, stream->row, stream->name, &stream->named_in);
    }
    op_end(stream, op);
    stream->head = op->next;
    if (!stream->head) stream->tail = NULL;
    op_destroy(op);
    if (!goes_on_at_once(stream)) progress_tell();
}

static void stream_free(struct sim_stream *stream) {
    struct sim_stream **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    simgpu__order_end(&stream->position);
    pthread_cond_destroy(&stream->work);
    free(stream);
}

static void *stream_worker(void *argument) {
    struct sim_stream *stream = working = argument;
    /* of nanoseconds, where 50 microseconds are usual: modelled ends are slept for */
    prctl(PR_SET_TIMERSLACK, 1UL);
    sim_lock();
    for (;;) {
        while (!stream->head && !stream->closing) pthread_cond_wait(&stream->work, &sim.lock);
        if (!stream->head) break;
        run_head(stream);
    }
    stream->has_worker = false;
    if (stream != &null_stream) stream_free(stream);
    n_workers--;
    progress_tell();
    sim_unlock();
    return NULL;
}

/* Signals are the program's threads' business. */
static bool start_worker(struct sim_stream *stream) {
    if (stream->has_worker) return true;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, NULL, stream_worker, stream) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started) return false;
    pthread_setname_np(thread, "simgpu-stream");
    pthread_detach(thread);
    stream->has_worker = true;
    n_workers++;
    return true;
}

/* Nothing before it, and it takes no time. */
static bool is_done_at_once(const struct sim_stream *stream, const struct sim_op *op) {
    if (stream->head || !is_ordered(stream, last_seq + 1) || is_held_up(stream, last_seq + 1)) return false;
    return op->work == SIM_POINT || (op->work == SIM_WAIT_POINT && op->waits_for->done);
}

/* What takes no time on an idle stream is done here and now, and needs no thread. */
CUresult simgpu__stream_push(struct sim_stream *stream, const struct sim_op *op) {
    struct sim_op *queued = malloc(sizeof *queued);
    bool at_once = is_done_at_once(stream, op);
    if (!queued || (!at_once && !start_worker(stream))) {
        free(queued);
        simgpu__point_drop(op->waits_for);
        simgpu__point_drop(op->point);
        if (op->owns_user_data) free(op->user_data);
        free(op->announced);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *queued = *op;
    queued->next = NULL;
    queued->running = queued->waited = false;
    queued->stored_ns = 0;
    queued->seq = ++last_seq;
    queued->enqueued_ns = simgpu__now_ns();
    queued->host = simgpu__clock_keep(simgpu__order_host());
    simgpu__text_set(queued->label, simgpu__label());
    if (at_once) {
        op_start(stream, queued);
        op_end(stream, queued);
        op_destroy(queued);
        return CUDA_SUCCESS;
    }
    *(stream->tail ? &stream->tail->next : &stream->head) = queued;
    stream->tail = queued;
    pthread_cond_signal(&stream->work);
    return CUDA_SUCCESS;
}

/* ---- words that threads of the program store ---- */

/* Of what waits until the word is at least a value: it may not see that one, when its thread wakes up late,
 * but one that was stored after it. */
static void note_reached(const struct sim_stream *stream, const uint32_t *word, uint64_t stored_ns) {
    for (struct sim_op *op = stream->head; op; op = op->next)
        if (op->work == SIM_WAIT_VALUE && op->flags == CU_STREAM_WAIT_VALUE_GEQ &&
            op->src == (uintptr_t)word && !op->stored_ns && simgpu__work_value_reached(op))
            op->stored_ns = stored_ns ? stored_ns : op->enqueued_ns;
}

/* stored_ns 0: what is there has been, since before they were enqueued. */
static void all_note_reached(const uint32_t *word, uint64_t stored_ns) {
    note_reached(&null_stream, word, stored_ns);
    for (const struct sim_stream *stream = streams; stream; stream = stream->next)
        note_reached(stream, word, stored_ns);
}

void simgpu__stream_store_value(uint32_t *word, uint32_t value, uint64_t stored_ns) {
    all_note_reached(word, 0);
    value_store(word, value);
    all_note_reached(word, stored_ns);
}

/* ---- uses of memory ---- */

static bool overlaps(uintptr_t a, size_t a_bytes, uintptr_t b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

static bool queue_uses(const struct sim_stream *stream, uintptr_t address, size_t bytes, bool running_only) {
    for (const struct sim_op *op = stream->head; op; op = op->next) {
        if (running_only && !op->running) return false;
        const struct simgpu_access *accesses = simgpu__accesses_of(op);
        for (unsigned i = 0; i < op->n_accesses; i++)
            if (overlaps(accesses[i].address, accesses[i].bytes, address, bytes)) return true;
    }
    return false;
}

bool simgpu__stream_uses(uintptr_t address, size_t bytes, bool running_only) {
    if (queue_uses(&null_stream, address, bytes, running_only)) return true;
    for (const struct sim_stream *stream = streams; stream; stream = stream->next)
        if (queue_uses(stream, address, bytes, running_only)) return true;
    return false;
}

void simgpu__stream_wait_unused(uintptr_t address, size_t bytes) {
    while (simgpu__stream_uses(address, bytes, false)) {
        simgpu__block_waits();
        progress_await();
    }
}

static bool any_work_before(uint64_t seq) {
    if (has_work_before(&null_stream, seq)) return true;
    for (const struct sim_stream *stream = streams; stream; stream = stream->next)
        if (has_work_before(stream, seq)) return true;
    return false;
}

void simgpu__stream_sync_all(void) {
    uint64_t end = last_seq + 1;
    while (any_work_before(end)) {
        simgpu__block_waits();
        progress_await();
    }
}

static void learn_of(const struct sim_stream *stream) {
    struct sim_position done = stream->position;
    if (stream->head && stream->head->running) done.epoch--; /* what it knows is over all the same */
    simgpu__order_host_learns(&done);
}

void simgpu__stream_host_learns(const struct sim_stream *stream) {
    learn_of(stream);
    if (stream->non_blocking) return;
    if (stream != &null_stream) learn_of(&null_stream);
    for (const struct sim_stream *other = streams; stream == &null_stream && other; other = other->next)
        if (!other->non_blocking) learn_of(other);
}

void simgpu__stream_host_learns_all(void) {
    learn_of(&null_stream);
    for (const struct sim_stream *stream = streams; stream; stream = stream->next) learn_of(stream);
    simgpu__order_host_learns_ended();
}

/* The running operation is its worker's alone. */
uint64_t simgpu_ready_ns(void) {
    return working && working->head ? working->head->ready_ns : 0;
}

void simgpu_end_at(uint64_t end_ns) {
    if (!working) simgpu__thread_end_at(end_ns);
    if (!working || !working->head) return;
    working->head->finish_ns = end_ns;
    working->head->core_ns = simgpu__core_ns();
}

uint64_t simgpu_work_hand(void) {
    uint64_t ready_ns = simgpu_ready_ns();
    simgpu_end_at(ready_ns);
    return ready_ns;
}

uint64_t simgpu_here_ns(void) {
    if (!working) return simgpu__thread_here_ns();
    return working->head ? simgpu__work_here_ns(working->head) : 0;
}

struct sim_position *simgpu__stream_position(void) {
    return working ? &working->position : NULL;
}

/* ---- entry points ---- */

static CUresult stream_create(CUstream *stream_out, unsigned int flags) {
    if (!stream_out || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
    struct sim_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return CUDA_ERROR_OUT_OF_MEMORY;
    stream->non_blocking = flags & CU_STREAM_NON_BLOCKING;
    pthread_cond_init(&stream->work, NULL);
    sim_lock();
    bool placed = simgpu__order_begin(&stream->position);
    uint64_t id = placed ? simgpu__table_put(&stream_table, stream) : 0;
    if (!id) {
        if (placed) simgpu__order_end(&stream->position);
        pthread_cond_destroy(&stream->work);
        free(stream);
        return sim_unlock_with(CUDA_ERROR_OUT_OF_MEMORY);
    }
    stream->row = ++n_rows;
    stream->queue = n_created;
    snprintf(stream->name, sizeof stream->name, "stream %u", ++n_created);
    stream->next = streams;
    streams = stream;
    *stream_out = (CUstream)(uintptr_t)id;
    return sim_unlock_with(CUDA_SUCCESS);
}

CUresult cuStreamCreate(CUstream *stream_out, unsigned int flags) {
    SIM_ENTER(cuStreamCreate);
    return stream_create(stream_out, flags);
}

/* A priority is a hint, which every stream here ignores. */
CUresult cuStreamCreateWithPriority(CUstream *stream_out, unsigned int flags, int priority) {
    SIM_ENTER(cuStreamCreateWithPriority);
    (void)priority;
    return stream_create(stream_out, flags);
}

static void stream_close(void *item) {
    struct sim_stream *stream = item;
    if (!stream->has_worker) {
        stream_free(stream);
        return;
    }
    stream->closing = true;
    pthread_cond_signal(&stream->work);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    SIM_ENTER(cuStreamDestroy_v2);
    sim_lock();
    struct sim_stream *taken = simgpu__table_take(&stream_table, (uintptr_t)stream);
    if (taken && taken->capture) atomic_fetch_sub(&sim.n_capturing, 1);
    if (taken) taken->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    if (taken) stream_close(taken);
    return sim_unlock_with(taken ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

void simgpu__stream_reset(void) {
    atomic_store(&sim.stopping, true);
    simgpu__table_clear(&stream_table, stream_close);
    null_stream.closing = true;
    pthread_cond_signal(&null_stream.work);
    simgpu__streams_wake();
    while (n_workers > 0) progress_await();
    null_stream.closing = false;
    simgpu__text_set(null_stream.name, "null stream");
    null_stream.named_in = n_created = 0;
    atomic_store(&sim.n_capturing, 0);
    atomic_store(&sim.stopping, false);
}

void simgpu__stream_forget_order(void) {
    simgpu__clock_drop(null_stream.position.known);
    null_stream.position = (struct sim_position){0};
}

static CUresult synchronize(CUstream stream, const struct sim_site *site) {
    struct sim_stream *of = simgpu__stream_of(stream);
    unsigned long *taught;
    if (!of) return CUDA_ERROR_INVALID_HANDLE;
    if (simgpu__site_drops(site, SIM_cuStreamSynchronize, of->name, "", &taught)) return CUDA_SUCCESS;
    struct sim_point *end = simgpu__point_new();
    if (!end) return CUDA_ERROR_OUT_OF_MEMORY;
    end->refs++;
    CUresult result = simgpu__stream_push(of, &(struct sim_op){.work = SIM_POINT, .point = end});
    if (result == CUDA_SUCCESS) result = simgpu__point_wait(end);
    if (result == CUDA_SUCCESS) simgpu__order_host_learns(&end->position);
    simgpu__point_drop(end);
    return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
    SIM_ENTER(cuStreamSynchronize);
    struct sim_site site;
    simgpu__site_take(&site);
    simgpu__block_begin(SIM_cuStreamSynchronize);
    simgpu__block_spins();
    sim_lock();
    CUresult result = sim_unlock_with(synchronize(stream, &site));
    simgpu__block_end();
    return result;
}

int simgpu_stream_name(void *stream, const char *text) {
    if (simgpu__forked()) return -1;
    sim_lock();
    struct sim_stream *of = text ? simgpu__stream_of(stream) : NULL;
    if (of) simgpu__text_set(of->name, text);
    if (of) of->named_in = 0;
    sim_unlock();
    return of ? 0 : -1;
}

void simgpu__captures_invalidate(void) {
    sim_lock();
    for (struct sim_stream *stream = streams; stream; stream = stream->next)
        if (stream->capture) stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    sim_unlock();
}

const char *simgpu__stream_label(const struct sim_stream *stream) {
    return stream->name;
}

bool simgpu__stream_captures(const struct sim_stream *stream) {
    return stream->capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

int simgpu_capture(void *stream, int begins) {
    sim_lock();
    /* the legacy stream cannot be captured */
    struct sim_stream *of = stream ? simgpu__stream_of(stream) : NULL;
    int result = !of || of == &null_stream || !of->capture == !begins ? -1 : 0;
    if (result == 0) {
        result = of->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        of->capture = begins ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
        if (begins)
            atomic_fetch_add(&sim.n_capturing, 1);
        else
            atomic_fetch_sub(&sim.n_capturing, 1);
    }
    sim_unlock();
    return result;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status_out) {
    SIM_ENTER(cuStreamIsCapturing);
    if (!status_out) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    struct sim_stream *of = simgpu__stream_of(stream);
    if (of) *status_out = of->capture;
    return sim_unlock_with(of ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuStreamQuery(CUstream stream) {
    SIM_ENTER(cuStreamQuery);
    sim_lock();
    struct sim_stream *of = simgpu__stream_of(stream);
    if (!of) return sim_unlock_with(CUDA_ERROR_INVALID_HANDLE);
    bool idle = !of->head && is_ordered(of, last_seq + 1);
    if (sim.strict) idle = idle && simgpu__order_host_knows(&of->position);
    if (idle) simgpu__stream_host_learns(of);
    return sim_unlock_with(idle ? (CUresult)atomic_load(&sim.sticky) : CUDA_ERROR_NOT_READY);
}
