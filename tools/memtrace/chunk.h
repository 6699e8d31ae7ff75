/* chunk.h - the checks and sums of a file's chunks, of which reader and writer make the same. */
#ifndef MEMTRACE_CHUNK_H
#define MEMTRACE_CHUNK_H

#include <stdbool.h>
#include <stddef.h>

#include "base/trace_format.h"

#define MEMTRACE_CHUNK_MAGIC "chnk"
enum {
    MEMTRACE_ALIGNMENT = 64,           /* of chunks in a file */
    MEMTRACE_MAX_CHUNK_BYTES = 1 << 30 /* a longer one is damage; the index may be longer */
};

uint64_t memtrace_checksum(const void *bytes, size_t n_bytes);
/* Of the header's fields before it. */
uint64_t memtrace_header_checksum(const fcdp_trace_chunk *chunk);
/* Is this the header of a chunk, and undamaged? The body is looked at when it is read. */
bool memtrace_chunk_is_valid(const fcdp_trace_chunk *chunk);
/* Bytes of a body with `n` bytes of content: its zeroes at the end counted. */
uint64_t memtrace_padded(uint64_t n);

#endif
