/* attach.c - finds the memfd "fcdp-trace" of a process, maps it and copies from it. */
#include "tools/memtrace/attach.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tools/memtrace/processes.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* Opens the segment's descriptor among those of `pid`. -1 with errno: EACCES, ENOENT (it has none), ESRCH. */
static int open_descriptor(pid_t pid) {
    char folder[64], path[96], target[64];
    snprintf(folder, sizeof folder, "/proc/%d/fd", (int)pid);
    DIR *descriptors = opendir(folder);
    if (!descriptors) {
        if (errno == ENOENT) errno = ESRCH;
        return -1;
    }
    int fd = -1, failure = ENOENT;
    for (struct dirent *entry; fd < 0 && (entry = readdir(descriptors));) {
        ssize_t n = readlinkat(dirfd(descriptors), entry->d_name, target, sizeof target - 1);
        if (n <= 0) continue;
        target[n] = 0;
        if (strncmp(target, "/memfd:" FCDP_TRACE_MEMFD " ", sizeof "/memfd:" FCDP_TRACE_MEMFD) != 0) continue;
        snprintf(path, sizeof path, "%s/%.16s", folder, entry->d_name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) failure = errno;
    }
    closedir(descriptors);
    errno = failure;
    return fd;
}

/* Do the parts that a header names lie within the segment? The segment may be another program's. */
static bool header_is_valid(const fcdp_trace_header *h, size_t n_bytes) {
    uint64_t n_counter_bytes = (uint64_t)h->n_counters * sizeof(uint64_t);
    uint64_t n_object_bytes = (uint64_t)h->n_objects * sizeof(fcdp_trace_object);
    if (!h->ring_events || (h->ring_events & (h->ring_events - 1)) ||
        h->ring_events > n_bytes / FCDP_TRACE_EVENT_BYTES)
        return false;
    uint64_t n_ring_bytes = h->ring_events * FCDP_TRACE_EVENT_BYTES;
    return h->counters_at % 8 == 0 && h->objects_at % 64 == 0 && h->ring_at % 64 == 0 &&
           h->segment_bytes <= n_bytes && h->counters_at >= sizeof *h && h->counters_at <= n_bytes &&
           n_counter_bytes <= n_bytes - h->counters_at && h->objects_at <= n_bytes &&
           n_object_bytes <= n_bytes - h->objects_at && h->ring_at <= n_bytes &&
           n_ring_bytes <= n_bytes - h->ring_at;
}

/* What the header must say before anything else is read: `h` is a copy of it, zeroes where there is none. A
 * forked child holds its parent's descriptor, and writes no events: its segment is not its own. */
static bool header_is_accepted(pid_t pid, const fcdp_trace_header *h, size_t n_bytes, memtrace_error *error) {
    if (memcmp(h->magic, FCDP_TRACE_MAGIC, sizeof h->magic) != 0)
        return memtrace_fail(error, "process %d: its trace is not set up yet; try again", (int)pid);
    if (h->version != FCDP_TRACE_VERSION)
        return memtrace_fail(
            error,
            "process %d writes traces of version %u, and this program reads version %d: use the "
            "fcdp-memtrace of the job's own installation",
            (int)pid, h->version, FCDP_TRACE_VERSION);
    if (!header_is_valid(h, n_bytes))
        return memtrace_fail(error, "process %d: its trace's header is damaged", (int)pid);
    if (h->pid != memtrace_process_inner_pid(pid))
        return memtrace_fail(error, "process %d writes no trace: it is a fork of process %d, which does",
                             (int)pid, (int)h->pid);
    return true;
}

static bool attach_failed(pid_t pid, int failure, memtrace_error *error) {
    if (failure == ESRCH) return memtrace_fail(error, "there is no process %d", (int)pid);
    if (failure == EACCES || failure == EPERM)
        return memtrace_fail(
            error, "process %d belongs to another user, and only that user may read its trace", (int)pid);
    if (failure == ENOENT)
        return memtrace_fail(
            error,
            "process %d writes no trace: it runs without FCDP=1, with FCDP_TRACE=0, or has not "
            "come to its first FSDP2 module yet",
            (int)pid);
    return memtrace_fail(error, "process %d: cannot open its trace: %s", (int)pid, strerror(failure));
}

/* Does the segment keep its size? Checked before the size is read: a shrunken mapping would kill its
 * reader. */
static bool is_sealed(int fd) {
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && seals & F_SEAL_SHRINK;
}

/* The whole of what `fd` is, read-only. False with errno. */
static bool map(int fd, memtrace_segment *s) {
    struct stat status;
    if (fstat(fd, &status) != 0) return false;
    errno = ENOENT;
    if (status.st_size <= 0) return false;
    void *base = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return false;
    s->base = s->header = base;
    s->n_mapped_bytes = (size_t)status.st_size;
    return true;
}

/* Of a header that has been copied and checked: what the process makes of its own afterwards is not asked. */
static void follow_header(memtrace_segment *s, const fcdp_trace_header *h) {
    s->counters = (const void *)((const char *)s->base + h->counters_at);
    s->objects = (const void *)((const char *)s->base + h->objects_at);
    s->ring = (const void *)((const char *)s->base + h->ring_at);
    s->n_counters = h->n_counters;
    s->n_objects = h->n_objects;
    s->ring_events = h->ring_events;
}

bool memtrace_attach(pid_t pid, memtrace_segment *segment_out, memtrace_error *error) {
    memtrace_process_entry process;
    if (!memtrace_process_get(pid, &process)) return attach_failed(pid, ESRCH, error);
    int fd = open_descriptor(pid);
    if (fd < 0) return attach_failed(pid, errno, error);
    memtrace_segment s = {.pid = pid, .start_ticks = process.start_ticks, .pidfd = -1};
    bool is_safe = is_sealed(fd), is_mapped = is_safe && map(fd, &s);
    int failure = errno;
    close(fd);
    if (!is_safe)
        return memtrace_fail(error,
                             "process %d: its trace may shrink while it is read, as FCDP's may not "
                             "(F_SEAL_SHRINK): it is not read",
                             (int)pid);
    if (!is_mapped) return attach_failed(pid, failure, error);
    fcdp_trace_header header = {0};
    if (s.n_mapped_bytes >= sizeof header) memtrace_read_header(&s, &header);
    if (!header_is_accepted(pid, &header, s.n_mapped_bytes, error)) {
        memtrace_detach(&s);
        return false;
    }
    follow_header(&s, &header);
    s.pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    *segment_out = s;
    return true;
}

void memtrace_detach(memtrace_segment *segment) {
    if (segment->base) munmap((void *)(uintptr_t)segment->base, segment->n_mapped_bytes);
    if (segment->pidfd >= 0) close(segment->pidfd);
    *segment = (memtrace_segment){.pidfd = -1};
}

bool memtrace_is_alive(const memtrace_segment *segment) {
    struct pollfd ends = {.fd = segment->pidfd, .events = POLLIN};
    if (segment->pidfd >= 0) return poll(&ends, 1, 0) == 0;
    memtrace_process_entry now;
    return memtrace_process_get(segment->pid, &now) && now.start_ticks == segment->start_ticks;
}

memtrace_scan memtrace_find(pid_t ancestor, void (*found)(pid_t pid, uint64_t start_ticks, void *context),
                            void *context) {
    memtrace_scan scan = {0};
    size_t n;
    memtrace_process_entry *all = memtrace_processes(ancestor, &n);
    for (size_t i = 0; all && i < n; i++) {
        int fd = open_descriptor(all[i].pid);
        scan.n_processes++;
        if (fd < 0) {
            if (errno == EACCES || errno == EPERM) scan.n_refused++;
            continue;
        }
        fcdp_trace_header h;
        bool is_own = pread(fd, &h, sizeof h, 0) == (ssize_t)sizeof h &&
                      memcmp(h.magic, FCDP_TRACE_MAGIC, sizeof h.magic) == 0 &&
                      h.pid == memtrace_process_inner_pid(all[i].pid);
        close(fd);
        if (is_own) found(all[i].pid, all[i].start_ticks, context);
    }
    free(all);
    return scan;
}

void memtrace_read_header(const memtrace_segment *segment, fcdp_trace_header *header_out) {
    uint64_t words[sizeof *header_out / sizeof(uint64_t)];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        words[i] = __atomic_load_n((const uint64_t *)segment->base + i, __ATOMIC_RELAXED);
    memcpy((void *)header_out, words, sizeof *header_out);
}

uint64_t memtrace_read_counter(const memtrace_segment *segment, uint32_t number) {
    if (number >= segment->n_counters) return 0;
    return atomic_load_explicit(&segment->counters[number], memory_order_relaxed);
}

/* Partner of slot_write (base/trace.c): it stores stamp 2n+1, then the words and 2n+2 with release. An equal
 * stamp before and after says that no word is of another event. */
memtrace_read memtrace_read_event(const memtrace_segment *segment, uint64_t n, fcdp_trace_event *event_out) {
    const fcdp_trace_event *at = &segment->ring[n & (segment->ring_events - 1)];
    const uint64_t whole = 2 * n + 2;
    uint64_t stamp = __atomic_load_n(&at->stamp, __ATOMIC_ACQUIRE);
    if (stamp != whole) return stamp > whole ? MEMTRACE_LOST : MEMTRACE_NOT_YET;
    uint64_t words[FCDP_TRACE_EVENT_BYTES / sizeof(uint64_t)];
    for (size_t i = 1; i < sizeof words / sizeof *words; i++)
        words[i] = __atomic_load_n((const uint64_t *)at + i, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&at->stamp, __ATOMIC_RELAXED) != whole) return MEMTRACE_LOST;
    words[0] = n;
    memcpy(event_out, words, sizeof words);
    return MEMTRACE_READ;
}

/* Partner of object_write (base/trace.c): the generation is odd while the object is written, and larger by 2
 * for each user of the number. */
bool memtrace_read_any_object(const memtrace_segment *segment, uint32_t number,
                              fcdp_trace_object *object_out) {
    if (number >= segment->n_objects) return false;
    const fcdp_trace_object *at = &segment->objects[number];
    uint32_t generation = atomic_load_explicit(&at->generation, memory_order_acquire);
    if (!generation || generation % 2) return false;
    uint64_t words[sizeof *at / sizeof(uint64_t)];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        words[i] = __atomic_load_n((const uint64_t *)at + i, __ATOMIC_ACQUIRE);
    if (atomic_load_explicit(&at->generation, memory_order_relaxed) != generation) return false;
    memcpy((void *)object_out, words, sizeof words);
    object_out->name[sizeof object_out->name - 1] = 0;
    return true;
}

bool memtrace_read_object(const memtrace_segment *segment, uint32_t number, fcdp_trace_object *object_out) {
    return memtrace_read_any_object(segment, number, object_out) && object_out->state & FCDP_OBJECT_LIVE;
}

void memtrace_read_text(const memtrace_segment *segment, uint32_t number, char *text_out, size_t n_bytes) {
    fcdp_trace_object object;
    size_t n = 0;
    text_out[0] = 0;
    /* A damaged segment may have a circle of them: it ends where the text is full, or a piece is empty. */
    while (number && n + 1 < n_bytes && memtrace_read_any_object(segment, number, &object)) {
        if (!(object.state & FCDP_OBJECT_TEXT) || !object.name[0]) return;
        n += (size_t)snprintf(text_out + n, n_bytes - n, "%s", object.name);
        number = object.why;
    }
}

uint64_t memtrace_head(const memtrace_segment *segment) {
    return atomic_load_explicit(&segment->header->head, memory_order_acquire);
}

uint64_t memtrace_n_dropped(const memtrace_segment *segment) {
    return atomic_load_explicit(&segment->header->n_dropped, memory_order_relaxed);
}
