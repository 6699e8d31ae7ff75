/* cache.h - slices of frozen parameters on the node's disk, kept across runs (FCDP_CACHE_DIR).
 *
 * A directory of files, one per slice: <key>.frozen is a page with a header, then the slice's bytes. The key
 * is a hash of what the slice must be (comm/frozen.c), so a file never changes: it is there, or not. A caller
 * verifies what it has read, since a file may be torn or damaged; this file checks no content.
 *
 * Several processes and jobs may share the directory. A file is written under a name of its own, locked while
 * its writer lives, and renamed when it is complete. What a writer that was killed has left goes with the
 * next write. The directory is bounded: the files that were used longest ago make room, but never those that
 * were used since this cache was opened. So a job whose slices do not fit keeps those that do.
 *
 * Threads: read and write may be called on several threads at once.
 */
#ifndef FCDP_CACHE_H
#define FCDP_CACHE_H

#include "base/base.h"

typedef struct fcdp_cache fcdp_cache;
typedef struct fcdp_cache_key {
    uint8_t bytes[16];
} fcdp_cache_key;

enum { FCDP_CACHE_HEADER_BYTES = 4096, FCDP_CACHE_NAME_BYTES = 256 };
#define FCDP_CACHE_MAGIC "FCDPFRZ1"
typedef struct fcdp_cache_header { /* little endian; the rest of its page is zeroes */
    char magic[8];
    uint64_t bytes; /* of the slice, behind the header's page */
    uint8_t key[16];
    uint32_t slice, n_slices;
    char name[FCDP_CACHE_NAME_BYTES]; /* of the parameter group; for those who look at the file */
} fcdp_cache_header;

/* Make the directory where it is missing. limit_bytes: of all files in it; 0: half of what the file system
 * has free, with what the files take. FCDP_ERR_OPTION: it cannot be used, with a text that says why. */
fcdp_status fcdp__cache_open(const char *dir, size_t limit_bytes, fcdp_cache **cache_out) FCDP_MUST_CHECK;
/* NULL: does nothing. */
void fcdp__cache_close(fcdp_cache *cache);
const char *fcdp__cache_dir(const fcdp_cache *cache);

/* Read the slice into `bytes` bytes at `to`. FCDP_PENDING: it is not there. FCDP_ERR_SYSTEM, and a
 * warning: it cannot be read, or its file is not whole, which is removed then; `to` may have been written. */
fcdp_status fcdp__cache_read(fcdp_cache *cache, const fcdp_cache_key *key, void *to,
                             size_t bytes) FCDP_MUST_CHECK;
/* The slice's file holds something else than its key says. */
void fcdp__cache_drop(fcdp_cache *cache, const fcdp_cache_key *key);

typedef struct fcdp_cache_entry {
    fcdp_cache_key key;
    const char *name;
    uint32_t slice, n_slices;
    const void *from;
    size_t bytes;
} fcdp_cache_entry;
/* Write the slice, unless it is there. It stays while `is_valid(ctx)` says so: asked once all bytes have been
 * read from memory, before the file gets its name. FCDP_PENDING: nothing was written, as it was there, or was
 * not valid. FCDP_ERR_NO_HOST_MEM: there is no room within the limit, or on the disk. FCDP_ERR_SYSTEM: an I/O
 * error. Nothing is left then. */
fcdp_status fcdp__cache_write(fcdp_cache *cache, const fcdp_cache_entry *entry, bool (*is_valid)(void *ctx),
                              void *ctx) FCDP_MUST_CHECK;

#endif
