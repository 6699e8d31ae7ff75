/*
 * The timeline: what every stream did and where the program waited, as a Chrome trace (a JSON array of
 * complete events, which chrome://tracing and Perfetto open). Times are the monotonic clock's, which is one
 * for all processes of a machine.
 *
 * Events are written as they end, through a buffer of our own: a forked child that exits must not write its
 * parent's out a second time, as stdio would. A process that is killed leaves all but its last tenth of a
 * second, and no closing bracket.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "sim/gpu/internal.h"

#define BUFFER_BYTES 65536
#define MOST_EVENT_BYTES 1024
#define FLUSH_NS 100000000u
#define STREAM_ROWS (1 << 23) /* rows of streams are numbered from here, beyond all threads' ids */

static struct {
    pthread_mutex_t lock; /* below the simulator's */
    atomic_int pid;       /* the process whose timeline is on; 0: none */
    unsigned generation;  /* counts timelines, so that each names its rows */
    int fd;
    size_t n;
    uint64_t flushed_ns;
    char buffer[BUFFER_BYTES];
} timeline = {.lock = PTHREAD_MUTEX_INITIALIZER};

bool simgpu__timeline_is_on(void) {
    int pid = atomic_load_explicit(&timeline.pid, memory_order_relaxed);
    return pid && pid == getpid();
}

/* ---- writing; under the timeline's lock ---- */

static void flush(void) {
    for (size_t done = 0; done < timeline.n;) {
        ssize_t n = write(timeline.fd, timeline.buffer + done, timeline.n - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) break; /* a full disk costs the timeline, not the run */
        done += (size_t)n;
    }
    timeline.n = 0;
    timeline.flushed_ns = simgpu__now_ns();
}

__attribute__((format(printf, 1, 2))) static void put(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(timeline.buffer + timeline.n, BUFFER_BYTES - timeline.n, format, arguments);
    va_end(arguments);
    if (n > 0 && (size_t)n < BUFFER_BYTES - timeline.n) timeline.n += (size_t)n;
}

static void put_text(const char *text) {
    put("\"");
    for (; *text; text++)
        put((unsigned char)*text < 0x20     ? "\\u%04x"
            : *text == '"' || *text == '\\' ? "\\%c"
                                            : "%c",
            (unsigned char)*text);
    put("\"");
}

/* Every event follows another: the process's name is the first. */
static void put_name(const char *what, int row, const char *name) {
    put(",\n{\"name\":\"%s\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":", what, getpid(), row);
    put_text(name);
    put("}}");
}

/* Leaves the event open within its "args". */
static void put_event(const char *name, const char *category, int row, uint64_t begin_ns, uint64_t end_ns) {
    put(",\n{\"name\":");
    put_text(name);
    put(",\"cat\":");
    put_text(category);
    put(",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d,\"args\":{", (double)begin_ns / 1e3,
        (double)(end_ns - begin_ns) / 1e3, getpid(), row);
}

static void put_label(const char *label) {
    if (!*label) return;
    put(",\"label\":");
    put_text(label);
}

static void event_done(uint64_t end_ns) {
    bool due = end_ns > timeline.flushed_ns + FLUSH_NS || timeline.n + MOST_EVENT_BYTES > BUFFER_BYTES;
    if (due) flush();
}

static void end_locked(void) {
    if (!simgpu__timeline_is_on()) return;
    put("\n]\n");
    flush();
    close(timeline.fd);
    atomic_store(&timeline.pid, 0);
}

/* ---- what happened ---- */

static size_t bytes_of(const struct sim_op *op) {
    size_t bytes = op->bytes;
    for (unsigned i = 0; !op->bytes && i < op->n_accesses; i++) bytes += op->accesses[i].bytes;
    return bytes;
}

/* The row gets its name with its first event: only then is it sure to be in this timeline. */
void simgpu__timeline_op(const struct sim_op *op, uint64_t begin_ns, unsigned stream, const char *stream_name,
                         unsigned *named) {
    const char *kind = simgpu__op_name(op);
    uint64_t end_ns = simgpu__now_ns();
    int row = STREAM_ROWS + (int)stream;
    pthread_mutex_lock(&timeline.lock);
    if (simgpu__timeline_is_on()) {
        if (*named != timeline.generation) put_name("thread_name", row, stream_name);
        *named = timeline.generation;
        bool is_kernel = op->work == SIM_KERNEL;
        put_event(is_kernel || !*op->label ? kind : op->label, is_kernel ? "kernel" : kind, row, begin_ns,
                  end_ns);
        put("\"bytes\":%zu", bytes_of(op));
        if (op->finish_ns)
            put(",\"ready_us\":%.3f,\"modelled_us\":%.3f", (double)op->ready_ns / 1e3,
                (double)(op->finish_ns - op->ready_ns) / 1e3);
        put_label(op->label);
        put("}}");
        event_done(end_ns);
    }
    pthread_mutex_unlock(&timeline.lock);
}

/* As above; a thread's row is its own, so its notes of the name need no lock. The last name counts. */
static int thread_row(bool has_name) {
    static _Thread_local unsigned named, named_well;
    int row = simgpu__thread_id();
    char name[64];
    if (has_name ? named_well == timeline.generation : named == timeline.generation) return row;
    if (has_name)
        pthread_getname_np(pthread_self(), name, sizeof name);
    else
        snprintf(name, sizeof name, row == getpid() ? "main thread" : "thread %d", row);
    put_name("thread_name", row, name);
    named = timeline.generation;
    if (has_name) named_well = named;
    return row;
}

void simgpu__timeline_work(uint64_t ready_ns, uint64_t begin_ns, uint64_t finish_ns) {
    uint64_t end_ns = simgpu__now_ns();
    pthread_mutex_lock(&timeline.lock);
    if (simgpu__timeline_is_on()) {
        put_event("work", "work", thread_row(true), begin_ns, end_ns);
        put("\"ready_us\":%.3f,\"modelled_us\":%.3f}}", (double)ready_ns / 1e3,
            (double)(finish_ns - ready_ns) / 1e3);
        event_done(end_ns);
    }
    pthread_mutex_unlock(&timeline.lock);
}

void simgpu__timeline_wait(const char *entry, const char *label, uint64_t begin_ns, uint64_t end_ns) {
    pthread_mutex_lock(&timeline.lock);
    if (simgpu__timeline_is_on()) {
        int row = thread_row(false);
        put_event(entry, "wait", row, begin_ns, end_ns);
        put("\"thread\":%d", row);
        put_label(label);
        put("}}");
        event_done(end_ns);
    }
    pthread_mutex_unlock(&timeline.lock);
}

/* ---- on and off ---- */

static bool expand(char *path, size_t n, const char *pattern) {
    size_t at = 0;
    for (; *pattern && at < n; pattern++) {
        if (pattern[0] == '%' && pattern[1] == 'p') {
            at += (size_t)snprintf(path + at, n - at, "%d", getpid());
            pattern++;
        } else {
            path[at++] = *pattern;
        }
    }
    if (at >= n) return false;
    path[at] = '\0';
    return true;
}

/* The head is written at once: a process that is killed early leaves a file that says whose it is. */
int simgpu__timeline_open(const char *pattern) {
    char path[4096];
    if (!expand(path, sizeof path, pattern)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    pthread_mutex_lock(&timeline.lock);
    end_locked();
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd >= 0) {
        timeline.fd = fd;
        timeline.n = 0; /* in a child that was forked meanwhile: its parent's */
        timeline.generation++;
        put("[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"process "
            "%d\"}}",
            getpid(), getpid());
        flush();
        atomic_store(&timeline.pid, getpid());
    }
    pthread_mutex_unlock(&timeline.lock);
    return fd >= 0 ? 0 : -1;
}

int simgpu_timeline_begin(const char *pattern) {
    if (simgpu__forked() || !pattern) {
        errno = EINVAL;
        return -1;
    }
    simgpu__settings_load();
    return simgpu__timeline_open(pattern);
}

void simgpu_timeline_end(void) {
    if (simgpu__forked()) return;
    pthread_mutex_lock(&timeline.lock);
    end_locked();
    pthread_mutex_unlock(&timeline.lock);
}

__attribute__((destructor)) static void at_exit(void) {
    simgpu_timeline_end();
}
