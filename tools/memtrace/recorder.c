/* recorder.c - finds the processes of a job, and writes their events to one file. */
#include "tools/memtrace/recorder.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "tools/memtrace/grow.h"
#include "tools/memtrace/kinds.h"
#include "tools/memtrace/processes.h"
#include "tools/memtrace/source.h"

enum { MAX_POLLED = 64 };

struct memtrace_recorder {
    memtrace_writer *writer;
    memtrace_process_entry *ancestors; /* those that are there */
    size_t n_ancestors;
    memtrace_source **sources;
    size_t n, room;
    uint64_t scan_at_ns;    /* when to look for new processes again */
    memtrace_error failure; /* of a process that was found while looking */
    bool has_failed;
};

static const uint64_t SCAN_AFTER_NS = 20000000;
enum { SCAN_SHARE = 20 }; /* looking takes at most 1/20 of the time */

static bool is_known(const memtrace_recorder *r, pid_t pid, uint64_t start_ticks) {
    for (size_t i = 0; i < r->n; i++)
        if (r->sources[i]->segment.pid == pid && r->sources[i]->segment.start_ticks == start_ticks)
            return true;
    return false;
}

/* The segment becomes the recorder's. */
static bool add(memtrace_recorder *r, memtrace_segment *segment, memtrace_error *error) {
    if (is_known(r, segment->pid, segment->start_ticks)) {
        memtrace_detach(segment);
        return true;
    }
    void *sources = memtrace_grown(r->sources, &r->room, r->n, sizeof *r->sources);
    if (sources) r->sources = sources;
    memtrace_source *source = sources ? calloc(1, sizeof *source) : NULL;
    if (!source) {
        memtrace_detach(segment);
        return memtrace_fail(error, "not enough memory to record process %d", (int)segment->pid);
    }
    r->sources[r->n] = source;
    bool is_good = memtrace_source_begin(source, segment, (uint32_t)r->n, r->writer, error);
    r->n++;
    return is_good;
}

static void detach_all(memtrace_segment *segments, size_t n) {
    for (size_t i = 0; i < n; i++) memtrace_detach(&segments[i]);
}

static bool attach_all(const pid_t *pids, size_t n, memtrace_segment *segments, memtrace_error *error) {
    for (size_t i = 0; i < n; i++)
        if (!memtrace_attach(pids[i], &segments[i], error)) {
            detach_all(segments, i);
            return false;
        }
    return true;
}

/* The segments become the recorder's, or are detached. */
static bool add_all(memtrace_recorder *r, memtrace_segment *segments, size_t n, memtrace_error *error) {
    for (size_t i = 0; i < n; i++)
        if (!add(r, &segments[i], error)) {
            detach_all(segments + i + 1, n - i - 1);
            return false;
        }
    return true;
}

static void add_ancestors(memtrace_recorder *r, const memtrace_targets *targets) {
    for (size_t i = 0; i < targets->n_ancestors; i++)
        if (memtrace_process_get(targets->ancestors[i], &r->ancestors[r->n_ancestors])) r->n_ancestors++;
}

/* Attach first, since a failure to attach must not replace the file. */
bool memtrace_recorder_create(const char *path, bool replaces, const memtrace_targets *targets,
                              memtrace_recorder **recorder_out, memtrace_error *error) {
    const size_t n_pids = targets->n_pids;
    memtrace_recorder *r = calloc(1, sizeof *r);
    memtrace_segment *segments = calloc(n_pids + 1, sizeof *segments);
    if (r) r->ancestors = calloc(targets->n_ancestors + 1, sizeof *r->ancestors);
    bool is_good = (r && segments && r->ancestors) ||
                   memtrace_fail(error, "not enough memory to record to %s", path);
    bool is_attached = is_good && attach_all(targets->pids, n_pids, segments, error);
    is_good = is_attached && memtrace_writer_create(path, replaces, &r->writer, error);
    if (is_good) {
        memtrace_progress unused;
        add_ancestors(r, targets);
        is_good = add_all(r, segments, n_pids, error);
        if (!is_good) (void)memtrace_recorder_close(r, &unused, NULL);
    } else {
        if (is_attached) detach_all(segments, n_pids);
        if (r) free(r->ancestors);
        free(r);
    }
    free(segments);
    if (is_good) *recorder_out = r;
    return is_good;
}

/* A process that ends between being found and being attached is left out of the recording; a full disk is a
 * failure. */
static void add_found(pid_t pid, uint64_t start_ticks, void *context) {
    memtrace_recorder *r = context;
    memtrace_segment segment;
    if (is_known(r, pid, start_ticks) || !memtrace_attach(pid, &segment, NULL)) return;
    if (!add(r, &segment, &r->failure)) r->has_failed = true;
}

/* Those that have ended: they start no more, and another process may get such a number. */
static void ancestors_forget(memtrace_recorder *r) {
    size_t n = 0;
    for (size_t i = 0; i < r->n_ancestors; i++) {
        memtrace_process_entry now;
        if (memtrace_process_get(r->ancestors[i].pid, &now) && !now.has_ended &&
            now.start_ticks == r->ancestors[i].start_ticks)
            r->ancestors[n++] = r->ancestors[i];
    }
    r->n_ancestors = n;
}

static bool scan(memtrace_recorder *r, memtrace_error *error) {
    uint64_t start = memtrace_now_ns();
    if (start < r->scan_at_ns) return true;
    ancestors_forget(r);
    for (size_t i = 0; i < r->n_ancestors; i++) memtrace_find(r->ancestors[i].pid, add_found, r);
    uint64_t end = memtrace_now_ns(), pause = SCAN_SHARE * (end - start);
    r->scan_at_ns = end + (pause > SCAN_AFTER_NS ? pause : SCAN_AFTER_NS);
    return !r->has_failed || memtrace_fail(error, "%s", r->failure.text);
}

static void wait_for_an_end(const memtrace_recorder *r, int timeout_ms) {
    struct pollfd ends[MAX_POLLED];
    nfds_t n = 0;
    for (size_t i = 0; i < r->n && n < MAX_POLLED; i++)
        if (!r->sources[i]->is_gone && r->sources[i]->segment.pidfd >= 0)
            ends[n++] = (struct pollfd){.fd = r->sources[i]->segment.pidfd, .events = POLLIN};
    poll(ends, n, timeout_ms);
}

static void read_progress(const memtrace_recorder *r, memtrace_progress *progress_out) {
    memtrace_progress p = {
        .n_processes = r->n, .n_ancestors = r->n_ancestors, .n_bytes = memtrace_writer_n_bytes(r->writer)};
    for (size_t i = 0; i < r->n; i++) {
        const memtrace_source *s = r->sources[i];
        p.n_live += !s->is_gone;
        p.n_events += s->n_events + s->n;
        p.n_lost += s->n_lost;
        if (s->step > p.step) p.step = s->step;
    }
    *progress_out = p;
}

bool memtrace_recorder_poll(memtrace_recorder *r, int timeout_ms, memtrace_progress *progress_out,
                            memtrace_error *error) {
    wait_for_an_end(r, timeout_ms);
    bool is_good = scan(r, error);
    uint64_t now = memtrace_now_ns();
    for (size_t i = 0; is_good && i < r->n; i++)
        is_good = memtrace_source_drain(r->sources[i], now, r->writer, error);
    read_progress(r, progress_out);
    return is_good;
}

/* Report the first failure; free and end everything else all the same. */
bool memtrace_recorder_close(memtrace_recorder *r, memtrace_progress *progress_out, memtrace_error *error) {
    bool is_good = true;
    r->scan_at_ns = 0;
    if (!r->has_failed) is_good = scan(r, error);
    for (size_t i = 0; i < r->n; i++)
        is_good &= memtrace_source_drain(r->sources[i], memtrace_now_ns(), r->writer, is_good ? error : NULL);
    read_progress(r, progress_out);
    for (size_t i = 0; i < r->n; i++) {
        is_good &= memtrace_source_end(r->sources[i], r->writer, is_good ? error : NULL);
        free(r->sources[i]);
    }
    progress_out->n_bytes = memtrace_writer_n_bytes(r->writer);
    is_good &= memtrace_writer_close(r->writer, is_good ? error : NULL);
    free(r->sources);
    free(r->ancestors);
    free(r);
    return is_good;
}

/* ---- in a thread ---- */

enum { THREAD_PERIOD_MS = 20 };
static const uint64_t SETTLE_NS = 1000000000;

struct memtrace_recording {
    memtrace_recorder *recorder;
    pthread_t thread;
    _Atomic bool is_stopping; /* set by stop, read by the thread */
    bool is_good;             /* the thread's, until it is joined; so is error */
    memtrace_error error;
};

/* Spans of streams that began by now and are not written yet: what ran on a stream is told a while later. */
static uint64_t n_open_spans(const memtrace_recorder *r, uint64_t begun) {
    uint64_t ended = 0;
    for (size_t i = 0; i < r->n; i++)
        if (!r->sources[i]->is_gone)
            ended += memtrace_read_counter(&r->sources[i]->segment, FCDP_COUNT_SPANS_ENDED);
    return begun > ended ? begun - ended : 0;
}

static uint64_t n_spans(const memtrace_recorder *r) {
    uint64_t n = 0;
    for (size_t i = 0; i < r->n; i++)
        if (!r->sources[i]->is_gone)
            n += memtrace_read_counter(&r->sources[i]->segment, FCDP_COUNT_SPANS_BEGUN);
    return n;
}

/* The block's last copies and collectives are part of what it asked for, so they are waited for, but not
 * for long. */
static void settle(memtrace_recording *recording) {
    memtrace_progress progress;
    uint64_t begun = n_spans(recording->recorder), until = memtrace_now_ns() + SETTLE_NS;
    while (recording->is_good && n_open_spans(recording->recorder, begun) && memtrace_now_ns() < until)
        recording->is_good = memtrace_recorder_poll(recording->recorder, THREAD_PERIOD_MS, &progress,
                                                    &recording->error);
}

static void *run(void *context) {
    memtrace_recording *recording = context;
    memtrace_progress progress;
    while (recording->is_good && !atomic_load(&recording->is_stopping))
        recording->is_good = memtrace_recorder_poll(recording->recorder, THREAD_PERIOD_MS, &progress,
                                                    &recording->error);
    settle(recording);
    return NULL;
}

/* Without the thread, nothing would close the recorder. */
bool memtrace_recording_start(memtrace_recorder *recorder, memtrace_recording **recording_out,
                              memtrace_error *error) {
    memtrace_recording *recording = calloc(1, sizeof *recording);
    memtrace_progress progress;
    if (!recording) {
        (void)memtrace_recorder_close(recorder, &progress, NULL);
        return memtrace_fail(error, "not enough memory to record");
    }
    recording->recorder = recorder;
    recording->is_good = true;
    sigset_t all, before; /* the program's signals are for its own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&recording->thread, NULL, run, recording);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure) {
        (void)memtrace_recorder_close(recorder, &progress, NULL);
        free(recording);
        return memtrace_fail(error,
                             "cannot start the thread that records: the process may start no more threads");
    }
    *recording_out = recording;
    return true;
}

bool memtrace_recording_stop(memtrace_recording *recording, memtrace_progress *progress_out,
                             memtrace_error *error) {
    atomic_store(&recording->is_stopping, true);
    pthread_join(recording->thread, NULL);
    bool is_good = recording->is_good;
    if (!is_good && error) *error = recording->error;
    is_good &= memtrace_recorder_close(recording->recorder, progress_out, is_good ? error : NULL);
    free(recording);
    return is_good;
}
