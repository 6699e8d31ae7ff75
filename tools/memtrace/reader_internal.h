/* reader_internal.h - the parts of a memtrace_file, for reader*.c. */
#ifndef MEMTRACE_READER_INTERNAL_H
#define MEMTRACE_READER_INTERNAL_H

#include "tools/memtrace/reader.h"

enum {
    MEMTRACE_MAX_PROCESSES = 1 << 12, /* a greater number in a chunk is damage */
    MEMTRACE_MAX_NOTES = 64           /* more damage than anybody reads about */
};

/* An object's name, from the state in `chunk` on. */
typedef struct memtrace_name {
    uint32_t process, number;
    size_t chunk;
    memtrace_object object; /* its name is owned */
} memtrace_name;

struct memtrace_file {
    int fd;
    char *path;
    fcdp_trace_file_header header;
    uint64_t n_bytes, n_unreadable_bytes, n_events;
    bool is_complete, is_growing;
    fcdp_trace_index_entry *chunks;
    bool *is_damaged; /* n_chunks: seen, and noted */
    size_t n_chunks, room_chunks;
    memtrace_process *processes;
    size_t n_processes;
    void *body; /* of the last chunk that was read */
    size_t body_room;
    size_t body_chunk;    /* which; n_chunks: none */
    memtrace_name *names; /* by process, number, chunk; made when first asked for */
    size_t n_names, room_names;
    bool has_names;
    char *notes[MEMTRACE_MAX_NOTES];
    size_t n_notes;
};

__attribute__((format(printf, 2, 3))) void memtrace__note(memtrace_file *file, const char *format, ...);
/* Chunk i is left out: notes it the first time, says what it holds and `how` it is damaged. NULL. */
const void *memtrace__leave_out(memtrace_file *file, size_t i, const char *how);
/* Reads exactly n_bytes at `at`; false: they are not there. */
bool memtrace__read(const memtrace_file *file, uint64_t at, void *bytes, size_t n_bytes);
bool memtrace__add_chunk(memtrace_file *file, uint64_t at, const fcdp_trace_chunk *chunk);
/* Fills file->chunks from the index; false: there is none, or it is damaged. */
bool memtrace__read_index(memtrace_file *file);
/* Fills file->chunks from the chunks' headers. */
bool memtrace__scan(memtrace_file *file);
/* Fills file->processes from file->chunks. */
bool memtrace__read_processes(memtrace_file *file);

#endif
