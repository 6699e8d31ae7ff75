/* reader.c - opens a trace's file, reads its chunks on demand. */
#include "tools/memtrace/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/memtrace/chunk.h"
#include "tools/memtrace/reader_internal.h"

void memtrace__note(memtrace_file *file, const char *format, ...) {
    char text[512];
    va_list arguments;
    if (file->n_notes == MEMTRACE_MAX_NOTES) return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (file->n_notes == MEMTRACE_MAX_NOTES - 1) snprintf(text, sizeof text, "more of the file is damaged");
    char *note = strdup(text);
    if (note) file->notes[file->n_notes++] = note;
}

bool memtrace__read(const memtrace_file *file, uint64_t at, void *bytes, size_t n_bytes) {
    for (size_t n_read = 0; n_read < n_bytes;) {
        ssize_t n = pread(file->fd, (char *)bytes + n_read, n_bytes - n_read, (off_t)(at + n_read));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        n_read += (size_t)n;
    }
    return true;
}

/* What a file must begin with. The message for a foreign version names both, as an older installation may
 * read it. */
static bool header_is_accepted(const memtrace_file *file, memtrace_error *error) {
    const fcdp_trace_file_header *h = &file->header;
    if (memcmp(h->magic, FCDP_TRACE_FILE_MAGIC, sizeof h->magic) != 0)
        return memtrace_fail(
            error, "%s is not a trace of fcdp-memtrace: it does not begin with " FCDP_TRACE_FILE_MAGIC,
            file->path);
    if (h->version != FCDP_TRACE_VERSION)
        return memtrace_fail(error,
                             "%s is a trace of version %u, %" PRIu64
                             " bytes; this program reads version %d: use the "
                             "fcdp-memtrace of the installation that recorded it",
                             file->path, h->version, file->n_bytes, FCDP_TRACE_VERSION);
    if (h->header_bytes != sizeof *h)
        return memtrace_fail(error, "%s: the file's header is damaged: it says that it has %u bytes, not %zu",
                             file->path, h->header_bytes, sizeof *h);
    return true;
}

/* The recorder holds an exclusive lock as long as it writes. */
static bool has_a_writer(int fd) {
    if (flock(fd, LOCK_SH | LOCK_NB) == 0) {
        flock(fd, LOCK_UN);
        return false;
    }
    return errno == EWOULDBLOCK;
}

/* The lock is checked before the size is read, so bytes that a recorder adds in between belong to its next
 * chunk. */
static bool open_contents(memtrace_file *file, memtrace_error *error) {
    struct stat status;
    if (fstat(file->fd, &status) != 0 || !S_ISREG(status.st_mode))
        return memtrace_fail(error, "%s is not a file", file->path);
    file->is_growing = has_a_writer(file->fd);
    file->n_bytes = (uint64_t)status.st_size;
    if (file->n_bytes < sizeof file->header || !memtrace__read(file, 0, &file->header, sizeof file->header))
        return memtrace_fail(
            error, "%s is not a trace of fcdp-memtrace: it has %" PRIu64 " bytes, its header alone has %zu",
            file->path, file->n_bytes, sizeof file->header);
    if (!header_is_accepted(file, error)) return false;
    file->is_complete = memtrace__read_index(file);
    if ((!file->is_complete && !memtrace__scan(file)) || !memtrace__read_processes(file))
        return memtrace_fail(error, "%s: not enough memory for the list of its %zu chunks", file->path,
                             file->n_chunks);
    file->body_chunk = file->n_chunks;
    return true;
}

bool memtrace_file_open_descriptor(int fd, const char *name, memtrace_file **file_out,
                                   memtrace_error *error) {
    memtrace_file *file = calloc(1, sizeof *file);
    if (!file) {
        close(fd);
        return memtrace_fail(error, "not enough memory to open %s", name);
    }
    file->fd = fd;
    file->path = strdup(name);
    if (!file->path || !open_contents(file, error)) {
        memtrace_file_close(file);
        return false;
    }
    *file_out = file;
    return true;
}

bool memtrace_file_open(const char *path, memtrace_file **file_out, memtrace_error *error) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return memtrace_fail(error, "cannot open %s: %s", path, strerror(errno));
    return memtrace_file_open_descriptor(fd, path, file_out, error);
}

void memtrace_file_close(memtrace_file *file) {
    if (!file) return;
    for (size_t i = 0; i < file->n_notes; i++) free(file->notes[i]);
    for (size_t i = 0; i < file->n_names; i++) free((void *)(uintptr_t)file->names[i].object.name);
    close(file->fd);
    free(file->names);
    free(file->path);
    free(file->chunks);
    free(file->is_damaged);
    free(file->processes);
    free(file->body);
    free(file);
}

memtrace_summary memtrace_file_summary(const memtrace_file *file) {
    return (memtrace_summary){
        file->n_bytes,  file->n_events,    file->n_unreadable_bytes, file->header.created_real_ns,
        file->n_chunks, file->n_processes, file->is_complete,        file->is_growing};
}

size_t memtrace_file_n_notes(const memtrace_file *file) {
    return file->n_notes;
}

const char *memtrace_file_note(const memtrace_file *file, size_t i) {
    return file->notes[i];
}

const fcdp_trace_chunk *memtrace_file_chunk(const memtrace_file *file, size_t i) {
    return &file->chunks[i].chunk;
}

/* What a user misses without the chunk. */
static void describe(const memtrace_file *file, const fcdp_trace_chunk *chunk, char text[128]) {
    char label[64] = "a process without a name";
    const memtrace_process *process = chunk->process < file->n_processes ? &file->processes[chunk->process]
                                                                         : NULL;
    if (process && (process->header.rank >= 0 || process->header.pid)) memtrace_process_label(process, label);
    switch (chunk->type) {
    case FCDP_CHUNK_PROCESS: snprintf(text, 128, "the name of %s", label); break;
    case FCDP_CHUNK_STATE:
    case FCDP_CHUNK_END: snprintf(text, 128, "counters and regions of %s", label); break;
    case FCDP_CHUNK_EVENTS: snprintf(text, 128, "%u events of %s", chunk->n, label); break;
    default: snprintf(text, 128, "type %u", chunk->type);
    }
}

const void *memtrace__leave_out(memtrace_file *file, size_t i, const char *how) {
    const fcdp_trace_index_entry *entry = &file->chunks[i];
    char what[128];
    if (file->is_damaged[i]) return NULL;
    describe(file, &entry->chunk, what);
    memtrace__note(file, "the chunk at byte %" PRIu64 " (%" PRIu64 " bytes: %s) %s, and is left out",
                   entry->at, entry->chunk.bytes, what, how);
    file->is_damaged[i] = true;
    file->n_unreadable_bytes += sizeof entry->chunk + entry->chunk.bytes;
    return NULL;
}

const void *memtrace_file_body(memtrace_file *file, size_t i) {
    const fcdp_trace_index_entry *entry = &file->chunks[i];
    if (file->body_chunk == i) return file->body;
    file->body_chunk = file->n_chunks;
    if (file->is_damaged[i]) return NULL;
    if (entry->chunk.bytes > file->body_room) {
        free(file->body);
        file->body = malloc(entry->chunk.bytes);
        file->body_room = file->body ? entry->chunk.bytes : 0;
        if (!file->body) return memtrace__leave_out(file, i, "does not fit into memory");
    }
    fcdp_trace_chunk there; /* the index has a copy, which may be all that is left of it */
    if (!memtrace__read(file, entry->at, &there, sizeof there) ||
        !memtrace__read(file, entry->at + sizeof entry->chunk, file->body, entry->chunk.bytes))
        return memtrace__leave_out(file, i, "cannot be read");
    if (memcmp(&there, &entry->chunk, sizeof there) != 0)
        return memtrace__leave_out(file, i, "is not the one that the index describes");
    if (memtrace_checksum(file->body, entry->chunk.bytes) != entry->chunk.checksum)
        return memtrace__leave_out(file, i, "is damaged: its checksum differs");
    file->body_chunk = i;
    return file->body;
}

const fcdp_trace_event *memtrace_file_events(memtrace_file *file, size_t i, size_t *n_out) {
    const fcdp_trace_chunk *chunk = &file->chunks[i].chunk;
    *n_out = 0;
    if (chunk->type != FCDP_CHUNK_EVENTS) return NULL;
    const fcdp_trace_event *events = memtrace_file_body(file, i);
    size_t n_whole = chunk->bytes / sizeof *events;
    if (events) *n_out = chunk->n < n_whole ? chunk->n : n_whole;
    return events;
}

bool memtrace_file_state(memtrace_file *file, size_t i, memtrace_state *state_out) {
    const fcdp_trace_chunk *chunk = &file->chunks[i].chunk;
    if (chunk->type != FCDP_CHUNK_STATE && chunk->type != FCDP_CHUNK_END) return false;
    if (chunk->bytes < sizeof(fcdp_trace_state)) return false;
    const char *body = memtrace_file_body(file, i);
    if (!body) return false;
    memtrace_state s;
    memcpy(&s.state, body, sizeof s.state);
    uint64_t room = chunk->bytes - sizeof s.state,
             n_counter_bytes = (uint64_t)s.state.n_counters * sizeof(uint64_t);
    uint64_t n_object_bytes = (uint64_t)s.state.n_objects * (sizeof(uint64_t) + sizeof(fcdp_trace_object));
    if (n_counter_bytes > room || n_object_bytes > room - n_counter_bytes) {
        memtrace__leave_out(file, i, "is damaged: it is shorter than what it says it holds");
        return false;
    }
    s.counters = (const void *)(body + sizeof s.state);
    s.objects = body + sizeof s.state + n_counter_bytes;
    *state_out = s;
    return true;
}

const fcdp_trace_object *memtrace_state_object(const memtrace_state *state, size_t i, uint32_t *number_out) {
    const char *at = (const char *)state->objects + i * (sizeof(uint64_t) + sizeof(fcdp_trace_object));
    *number_out = (uint32_t)*(const uint64_t *)(const void *)at;
    return (const void *)(at + sizeof(uint64_t));
}

const memtrace_process *memtrace_file_process(const memtrace_file *file, size_t i) {
    return &file->processes[i];
}

void memtrace_process_label(const memtrace_process *process, char label[64]) {
    int32_t rank = process->header.rank;
    if (rank >= 0)
        snprintf(label, 64, "rank %d", rank);
    else
        snprintf(label, 64, "process %d", process->header.pid);
}
