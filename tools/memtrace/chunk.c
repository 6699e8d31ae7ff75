/* chunk.c - checksums of chunks. */
#include "tools/memtrace/chunk.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t memtrace_checksum(const void *bytes, size_t n_bytes) {
    return XXH3_64bits(bytes, n_bytes);
}

uint64_t memtrace_header_checksum(const fcdp_trace_chunk *chunk) {
    return memtrace_checksum(chunk, offsetof(fcdp_trace_chunk, header_checksum));
}

bool memtrace_chunk_is_valid(const fcdp_trace_chunk *chunk) {
    return memcmp(chunk->magic, MEMTRACE_CHUNK_MAGIC, sizeof chunk->magic) == 0 &&
           chunk->bytes % MEMTRACE_ALIGNMENT == 0 &&
           (chunk->bytes <= MEMTRACE_MAX_CHUNK_BYTES || chunk->type == FCDP_CHUNK_INDEX) &&
           chunk->header_checksum == memtrace_header_checksum(chunk);
}

uint64_t memtrace_padded(uint64_t n) {
    return (n + MEMTRACE_ALIGNMENT - 1) / MEMTRACE_ALIGNMENT * MEMTRACE_ALIGNMENT;
}
