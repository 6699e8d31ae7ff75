/* reader_scan.c - the list of a file's chunks, from its index or without. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/chunk.h"
#include "tools/memtrace/grow.h"
#include "tools/memtrace/reader_internal.h"

bool memtrace__add_chunk(memtrace_file *file, uint64_t at, const fcdp_trace_chunk *chunk) {
    void *chunks = memtrace_grown(file->chunks, &file->room_chunks, file->n_chunks, sizeof *file->chunks);
    if (!chunks) return false;
    file->chunks = chunks;
    file->chunks[file->n_chunks++] = (fcdp_trace_index_entry){at, *chunk};
    return true;
}

/* Does the index's list hold what scanning would find: valid headers, one behind the other, up to it? */
static bool entries_are_valid(const fcdp_trace_index_entry *entries, size_t n, uint64_t index_at) {
    uint64_t at = sizeof(fcdp_trace_file_header);
    for (size_t i = 0; i < n; i++) {
        const fcdp_trace_chunk *chunk = &entries[i].chunk;
        if (entries[i].at != at || !memtrace_chunk_is_valid(chunk) || chunk->type == FCDP_CHUNK_INDEX ||
            chunk->bytes > index_at || at + sizeof *chunk > index_at - chunk->bytes)
            return false;
        at += sizeof *chunk + chunk->bytes;
    }
    return at == index_at;
}

/* The index is believed as a whole or not at all: its checksum and each entry's are right, and the entries
 * follow each other. A file that is cut or goes on behind it is scanned. */
bool memtrace__read_index(memtrace_file *file) {
    fcdp_trace_file_trailer trailer;
    fcdp_trace_chunk chunk;
    if (file->n_bytes < sizeof file->header + sizeof chunk + sizeof trailer) return false;
    uint64_t end = file->n_bytes - sizeof trailer;
    if (!memtrace__read(file, end, &trailer, sizeof trailer) ||
        memcmp(trailer.magic, FCDP_TRACE_FILE_MAGIC, sizeof trailer.magic) != 0 ||
        trailer.index_at < sizeof file->header || trailer.index_at > end - sizeof chunk ||
        !memtrace__read(file, trailer.index_at, &chunk, sizeof chunk) || !memtrace_chunk_is_valid(&chunk) ||
        chunk.type != FCDP_CHUNK_INDEX || chunk.bytes != end - trailer.index_at - sizeof chunk ||
        (uint64_t)chunk.n * sizeof *file->chunks > chunk.bytes)
        return false;
    fcdp_trace_index_entry *entries = malloc(chunk.bytes ? chunk.bytes : 1);
    if (!entries) return false;
    if (!memtrace__read(file, trailer.index_at + sizeof chunk, entries, chunk.bytes) ||
        memtrace_checksum(entries, chunk.bytes) != chunk.checksum ||
        !entries_are_valid(entries, chunk.n, trailer.index_at)) {
        free(entries);
        return false;
    }
    file->chunks = entries;
    file->n_chunks = chunk.n;
    file->room_chunks = chunk.bytes / sizeof *entries;
    return true;
}

/* The next place at or behind `at` with a whole chunk's valid header; n_bytes: there is none. Chunks begin at
 * multiples of 64 from the file's start, whatever is between them. */
static uint64_t next_chunk(const memtrace_file *file, uint64_t at, fcdp_trace_chunk *chunk_out) {
    enum { N = 1024 };
    fcdp_trace_chunk *headers = malloc(N * sizeof *headers);
    at = memtrace_padded(at);
    while (headers && at + sizeof *headers <= file->n_bytes) {
        uint64_t n = (file->n_bytes - at) / sizeof *headers;
        if (n > N) n = N;
        if (!memtrace__read(file, at, headers, n * sizeof *headers)) break;
        for (uint64_t i = 0; i < n; i++, at += sizeof *headers) {
            if (!memtrace_chunk_is_valid(&headers[i]) ||
                headers[i].bytes > file->n_bytes - at - sizeof *headers)
                continue;
            *chunk_out = headers[i];
            free(headers);
            return at;
        }
    }
    free(headers);
    return file->n_bytes;
}

/* What a reader sees of a file without its index: why, and what that costs. */
static void note_what_is_missing(memtrace_file *file, uint64_t end, bool has_index) {
    uint64_t n_cut = file->n_bytes - end;
    if (file->is_growing)
        memtrace__note(
            file, "the file is still being written: this is what it holds now, up to byte %" PRIu64, end);
    else if (has_index)
        memtrace__note(file, "the file's index is damaged; its chunks were found without it");
    else if (n_cut)
        memtrace__note(file,
                       "the file is cut: %zu whole chunks were found up to byte %" PRIu64
                       ", the last %" PRIu64 " bytes are part of one and are left out, and there is no index",
                       file->n_chunks, end, n_cut);
    else
        memtrace__note(
            file,
            "the file has no index: its recorder was killed, or the file was cut; it is read up to its last "
            "whole chunk, at byte %" PRIu64,
            end);
}

/* Walks from header to header; where one is damaged, searches for the next. */
bool memtrace__scan(memtrace_file *file) {
    uint64_t at = sizeof file->header, end = at;
    bool has_index = false;
    while (at < file->n_bytes) {
        fcdp_trace_chunk chunk;
        bool is_whole = file->n_bytes - at >= sizeof chunk &&
                        memtrace__read(file, at, &chunk, sizeof chunk) && memtrace_chunk_is_valid(&chunk) &&
                        chunk.bytes <= file->n_bytes - at - sizeof chunk;
        if (!is_whole) {
            uint64_t next = next_chunk(file, at + 1, &chunk);
            if (next < file->n_bytes)
                memtrace__note(file,
                               "%" PRIu64 " bytes from byte %" PRIu64 " on are no chunk: they are left out",
                               next - at, at);
            bool is_coming = file->is_growing && next == file->n_bytes;
            if (!has_index && !is_coming) file->n_unreadable_bytes += next - at;
            at = next;
            continue;
        }
        if (chunk.type == FCDP_CHUNK_INDEX)
            has_index = true;
        else if (!memtrace__add_chunk(file, at, &chunk))
            return false;
        at += sizeof chunk + chunk.bytes;
        end = at;
    }
    note_what_is_missing(file, end, has_index);
    return true;
}
