/* disk.h - one process's unnamed file, read and written in blocks beside the page cache.
 *
 * By io_uring, with several blocks under way at once, from registered buffers where the kernel has them;
 * where it refuses io_uring (seccomp, kernel.io_uring_disabled), by pread and pwrite, one block at a time.
 * The file has no name: it is gone when the process is, however that ends.
 *
 * Threads: one calls begin, end and has_room; any thread may call the others beside it.
 */
#ifndef FCDP_DISK_H
#define FCDP_DISK_H

#include "base/base.h"

typedef struct fcdp_disk fcdp_disk;

/* Of a block's address, offset and size. */
enum { FCDP_DISK_ALIGN = 4096, FCDP_DISK_BLOCK_BYTES = 1 << 20, FCDP_DISK_DEPTH = 16 };

typedef struct fcdp_disk_block {
    char *at;
    size_t bytes; /* <= FCDP_DISK_BLOCK_BYTES */
    uint64_t offset;
    bool writes;
    int buffer; /* of fcdp__disk_register, in which `at` lies; -1: none */
    void *owner;
    int error;   /* when it has ended: an errno, or 0. A transfer that stops short is EIO. */
    size_t done; /* the disk's, as is n_again */
    unsigned n_again;
    struct fcdp_disk_block *next;
} fcdp_disk_block;

/* The directory is made, its parents are not. FCDP_ERR_OPTION: it cannot be used; the text is the user's. */
fcdp_status fcdp__disk_open(const char *dir, fcdp_disk **disk_out) FCDP_MUST_CHECK;
void fcdp__disk_close(fcdp_disk *disk);
/* What of the above the machine does not have, for the user; "": nothing. */
const char *fcdp__disk_lacks(const fcdp_disk *disk);
/* What open would find there; no file stays. */
fcdp_status fcdp__disk_probe(const char *dir, char *lacks_out, size_t n_bytes) FCDP_MUST_CHECK;
/* Room for [offset, offset + bytes). FCDP_ERR_NO_HOST_MEM: there is none: the disk, or a quota on it, is
 * full, or it fails. */
fcdp_status fcdp__disk_reserve(fcdp_disk *disk, uint64_t offset, size_t bytes) FCDP_MUST_CHECK;
/* It has no bytes any more. No block is under way. */
void fcdp__disk_truncate(fcdp_disk *disk);
/* Memory that blocks come from, page aligned, until the disk is closed or the next call with this index.
 * -1: it has no room for more, or the kernel does not; it can be used all the same. */
int fcdp__disk_register(fcdp_disk *disk, int index, char *at, size_t bytes);

/* At most FCDP_DISK_DEPTH at a time. The block is the disk's until end returns it. */
bool fcdp__disk_has_room(const fcdp_disk *disk);
void fcdp__disk_begin(fcdp_disk *disk, fcdp_disk_block *block);
/* Waits until one has ended. NULL: none is under way. */
fcdp_disk_block *fcdp__disk_end(fcdp_disk *disk);

/* Tests: what becomes of each transfer. Returns its result: as given, fewer bytes, or a negative errno. */
extern int64_t (*fcdp__disk_fault)(const fcdp_disk_block *block, int64_t result);
extern bool fcdp__disk_without_uring;

#endif
