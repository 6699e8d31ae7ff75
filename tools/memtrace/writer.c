/* writer.c - chunks to a file, and their index behind them.
 *
 * The file begins as .NAME.part beside `path` and is renamed once it has its first chunk, so that a recording
 * of nothing costs no file. A file without a name (in /proc/self/fd) is written itself. The lock is on the
 * file, whatever its name.
 */
#include "tools/memtrace/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tools/memtrace/chunk.h"
#include "tools/memtrace/grow.h"

struct memtrace_writer {
    int fd;
    char *path, *part; /* what the file is to be called; what it is called until then, NULL: it is `path` */
    bool replaces;     /* another file of that name, as when the writer began */
    uint64_t at;       /* bytes written */
    bool has_failed;
    fcdp_trace_index_entry *index;
    size_t n, room;
};

static bool write_failed(memtrace_writer *w, memtrace_error *error) {
    w->has_failed = true;
    if (w->part) return memtrace_fail(error, "cannot write %s: %s", w->path, strerror(errno));
    return memtrace_fail(error,
                         "cannot write to %s behind byte %" PRIu64 ": %s; what it holds so far can be read",
                         w->path, w->at, strerror(errno));
}

/* All parts, however many calls that takes. `parts` are used up. */
static bool write_all(memtrace_writer *w, struct iovec *parts, int n, memtrace_error *error) {
    while (n) {
        ssize_t written = writev(w->fd, parts, n);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return write_failed(w, error);
        w->at += (uint64_t)written;
        for (; n && (size_t)written >= parts->iov_len; parts++, n--) written -= (ssize_t)parts->iov_len;
        if (!n) break;
        parts->iov_base = (char *)parts->iov_base + written;
        parts->iov_len -= (size_t)written;
    }
    return true;
}

/* ---- the file's name ---- */

static bool has_no_name(const char *path) {
    char *target = realpath(path, NULL);
    free(target);
    return !target && access(path, F_OK) == 0;
}

/* What `path` leads to, if it is there. A link to what is not there yet leads into its own folder. */
static char *target_of(const char *path) {
    char *target = realpath(path, NULL), link[4096];
    if (target || has_no_name(path)) return target ? target : strdup(path);
    ssize_t n = readlink(path, link, sizeof link - 1);
    if (n < 0) return strdup(path);
    link[n] = '\0';
    const char *slash = link[0] == '/' ? NULL : strrchr(path, '/');
    size_t n_folder = slash ? (size_t)(slash - path) + 1 : 0;
    target = malloc(n_folder + (size_t)n + 1);
    if (target) snprintf(target, n_folder + (size_t)n + 1, "%.*s%s", (int)n_folder, path, link);
    return target;
}

static char *part_of(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t n_bytes = strlen(path) + sizeof "..part";
    char *part = malloc(n_bytes);
    if (part) snprintf(part, n_bytes, "%.*s.%s.part", (int)(name - path), path, name);
    return part;
}

static bool refuse_written(const char *path, memtrace_error *error) {
    return memtrace_fail(error, "cannot write %s: another fcdp-memtrace is writing it", path);
}

/* May the file at `path`, if there is one, be replaced? A writer holds an exclusive lock, a reader at most a
 * shared one: only the first keeps this from a shared one. */
static bool target_is_accepted(const char *path, bool replaces, memtrace_error *error) {
    struct stat status;
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT || memtrace_fail(error, "cannot write %s: %s", path, strerror(errno));
    bool is_file = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    bool is_written = is_file && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(fd);
    if (!is_file) return memtrace_fail(error, "cannot write %s: it is not a file", path);
    if (is_written) return refuse_written(path, error);
    return replaces || status.st_size == 0 ||
           memtrace_fail(error,
                         "%s is there already, with %" PRIu64
                         " bytes: name another file, or replace it with --force",
                         path, (uint64_t)status.st_size);
}

static bool nameless_open(memtrace_writer *w, memtrace_error *error) {
    w->fd = open(w->path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (w->fd >= 0 && flock(w->fd, LOCK_EX | LOCK_NB) != 0) return refuse_written(w->path, error);
    return (w->fd >= 0 && ftruncate(w->fd, 0) == 0) ||
           memtrace_fail(error, "cannot write %s: %s", w->path, strerror(errno));
}

/* A part that an earlier writer has left is used again. Between opening and locking, its writer may have
 * renamed or removed it. */
static bool part_open(memtrace_writer *w, memtrace_error *error) {
    struct stat opened, named;
    w->fd = open(w->part, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (w->fd < 0 || fstat(w->fd, &opened) != 0)
        return memtrace_fail(error, "cannot write %s, as which %s begins: %s", w->part, w->path,
                             strerror(errno));
    if (!S_ISREG(opened.st_mode) || opened.st_uid != geteuid())
        return memtrace_fail(error, "cannot write %s: %s is not this user's: remove it", w->path, w->part);
    if (flock(w->fd, LOCK_EX | LOCK_NB) != 0 || lstat(w->part, &named) != 0 || named.st_ino != opened.st_ino)
        return refuse_written(w->path, error);
    return (ftruncate(w->fd, 0) == 0 && fchmod(w->fd, 0600) == 0) ||
           memtrace_fail(error, "cannot write %s: %s", w->path, strerror(errno));
}

/* From here on the file has its name. What has come under that name meanwhile is as good as what was
 * there. */
static bool part_rename(memtrace_writer *w, memtrace_error *error) {
    if (!target_is_accepted(w->path, w->replaces, error)) {
        w->has_failed = true;
        return false;
    }
    if (rename(w->part, w->path) != 0) return write_failed(w, error);
    free(w->part);
    w->part = NULL;
    return true;
}

/* ---- chunks ---- */

static void writer_free(memtrace_writer *w) {
    if (w->fd >= 0) close(w->fd);
    free(w->path);
    free(w->part);
    free(w->index);
    free(w);
}

bool memtrace_writer_create(const char *path, bool replaces, memtrace_writer **writer_out,
                            memtrace_error *error) {
    memtrace_writer *w = calloc(1, sizeof *w);
    if (!w) return memtrace_fail(error, "not enough memory to write %s", path);
    w->fd = -1;
    w->replaces = replaces;
    w->path = target_of(path);
    bool nameless = has_no_name(path);
    w->part = w->path && !nameless ? part_of(w->path) : NULL;
    bool is_good = w->path && (w->part || nameless);
    is_good = is_good || memtrace_fail(error, "not enough memory to write %s", path);
    is_good = is_good && target_is_accepted(w->path, replaces, error) &&
              (nameless ? nameless_open(w, error) : part_open(w, error));
    if (!is_good) {
        writer_free(w);
        return false;
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    fcdp_trace_file_header header = {.magic = FCDP_TRACE_FILE_MAGIC,
                                     .version = FCDP_TRACE_VERSION,
                                     .header_bytes = sizeof header,
                                     .created_real_ns = (uint64_t)now.tv_sec * 1000000000u +
                                                        (uint64_t)now.tv_nsec};
    if (!write_all(w, &(struct iovec){&header, sizeof header}, 1, error)) {
        (void)memtrace_writer_close(w, NULL);
        return false;
    }
    *writer_out = w;
    return true;
}

static bool add_to_index(memtrace_writer *w, const fcdp_trace_chunk *chunk) {
    void *index = memtrace_grown(w->index, &w->room, w->n, sizeof *w->index);
    if (!index) return false;
    w->index = index;
    w->index[w->n++] = (fcdp_trace_index_entry){w->at, *chunk};
    return true;
}

/* One system call for header, parts and padding: a chunk is mostly there as a whole, or not at all. */
bool memtrace_writer_chunk(memtrace_writer *w, const fcdp_trace_chunk *chunk, const struct iovec *parts,
                           size_t n_parts, memtrace_error *error) {
    static const char zeroes[MEMTRACE_ALIGNMENT];
    fcdp_trace_chunk header = *chunk;
    struct iovec all[MEMTRACE_MAX_PARTS + 2] = {{&header, sizeof header}};
    XXH3_state_t sum;
    uint64_t n_bytes = 0;
    if (w->has_failed) return memtrace_fail(error, "%s: an earlier write failed", w->path);
    XXH3_64bits_reset(&sum);
    for (size_t i = 0; i < n_parts; i++) {
        all[1 + i] = parts[i];
        n_bytes += parts[i].iov_len;
        if (parts[i].iov_len) XXH3_64bits_update(&sum, parts[i].iov_base, parts[i].iov_len);
    }
    header.bytes = memtrace_padded(n_bytes);
    all[1 + n_parts] = (struct iovec){(void *)(uintptr_t)zeroes, header.bytes - n_bytes};
    XXH3_64bits_update(&sum, zeroes, header.bytes - n_bytes);
    memcpy(header.magic, MEMTRACE_CHUNK_MAGIC, sizeof header.magic);
    header.checksum = XXH3_64bits_digest(&sum);
    header.header_checksum = memtrace_header_checksum(&header);
    if (header.type != FCDP_CHUNK_INDEX && !add_to_index(w, &header)) {
        errno = ENOMEM;
        return write_failed(w, error);
    }
    return write_all(w, all, (int)n_parts + 2, error) && (!w->part || part_rename(w, error));
}

bool memtrace_writer_events(memtrace_writer *w, uint32_t process, const fcdp_trace_event *events, size_t n,
                            memtrace_error *error) {
    fcdp_trace_chunk chunk = {.type = FCDP_CHUNK_EVENTS,
                              .process = process,
                              .n = (uint32_t)n,
                              .first_ns = UINT64_MAX,
                              .first_step = UINT32_MAX};
    for (size_t i = 0; i < n; i++) {
        uint64_t end = events[i].time_ns + events[i].duration_ns;
        if (end < chunk.first_ns) chunk.first_ns = end;
        if (end > chunk.last_ns) chunk.last_ns = end;
        if (events[i].step < chunk.first_step) chunk.first_step = events[i].step;
        if (events[i].step > chunk.last_step) chunk.last_step = events[i].step;
    }
    struct iovec part = {(void *)(uintptr_t)events, n * sizeof *events};
    return n == 0 || memtrace_writer_chunk(w, &chunk, &part, 1, error);
}

uint64_t memtrace_writer_n_bytes(const memtrace_writer *w) {
    return w->at;
}

/* The index ends where the trailer begins, which is what says that all is there. */
static bool write_index(memtrace_writer *w, memtrace_error *error) {
    fcdp_trace_file_trailer trailer = {.index_at = w->at, .magic = FCDP_TRACE_FILE_MAGIC};
    fcdp_trace_chunk chunk = {.type = FCDP_CHUNK_INDEX, .n = (uint32_t)w->n};
    struct iovec part = {w->index, w->n * sizeof *w->index};
    return memtrace_writer_chunk(w, &chunk, &part, 1, error) &&
           write_all(w, &(struct iovec){&trailer, sizeof trailer}, 1, error);
}

bool memtrace_writer_close(memtrace_writer *w, memtrace_error *error) {
    bool is_good = !w->has_failed ||
                   memtrace_fail(error, "%s is not whole: an earlier write failed", w->path);
    if (w->part)
        unlink(w->part);
    else
        is_good = is_good && write_index(w, error);
    if (close(w->fd) != 0 && is_good) is_good = write_failed(w, error);
    w->fd = -1;
    writer_free(w);
    return is_good;
}
