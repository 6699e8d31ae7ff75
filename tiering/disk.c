/* disk.c - the file's descriptor, the ring, and the blocks under way.
 *
 * A kernel may answer with fewer bytes than were asked for: the rest is asked for again, and a transfer that
 * brings nothing has failed. Nothing here knows what the bytes are; who checks them is spill.c.
 */
#include "tiering/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef FCDP_HAVE_LIBURING
#include <liburing.h>
#else
struct io_uring {
    int none;
};
#endif

enum { REGISTERED_BUFFERS = 64, MOST_AGAIN = 1000 };
static const size_t REGISTERED_BYTES = (size_t)1 << 30; /* the most of one that the kernel takes */

struct fcdp_disk {
    int fd;
    struct io_uring ring;
    bool uring;      /* else `first` .. are done one after the other, in end */
    bool registered; /* the ring has a table of buffers */
    unsigned n;      /* under way */
    fcdp_disk_block *first, **last;
    char lacks[256];
};

int64_t (*fcdp__disk_fault)(const fcdp_disk_block *block, int64_t result);
bool fcdp__disk_without_uring;

/* ---- the ring ---- */

#ifdef FCDP_HAVE_LIBURING

/* Linux 5.6 and later. */
static bool ring_reads_and_writes(struct io_uring *ring) {
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    bool does = probe && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                io_uring_opcode_supported(probe, IORING_OP_WRITE);
    if (probe) io_uring_free_probe(probe);
    return does;
}

/* 0, or a negative errno. */
static int ring_open(fcdp_disk *disk) {
    int error = fcdp__disk_without_uring ? -EPERM : io_uring_queue_init(FCDP_DISK_DEPTH, &disk->ring, 0);
    if (!error && !ring_reads_and_writes(&disk->ring)) {
        io_uring_queue_exit(&disk->ring);
        error = -ENOSYS;
    }
    disk->uring = !error;
    disk->registered = !error && !io_uring_register_buffers_sparse(&disk->ring, REGISTERED_BUFFERS);
    return error;
}

static void ring_close(fcdp_disk *disk) {
    if (disk->uring) io_uring_queue_exit(&disk->ring);
}

static bool ring_register(fcdp_disk *disk, int index, struct iovec memory) {
    return io_uring_register_buffers_update_tag(&disk->ring, (unsigned)index, &memory, NULL, 1) == 1;
}

static void ring_ask(fcdp_disk *disk, fcdp_disk_block *block) {
    char *at = block->at + block->done;
    unsigned bytes = (unsigned)(block->bytes - block->done);
    uint64_t offset = block->offset + block->done;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&disk->ring); /* there is one: at most DEPTH are under way */
    FCDP_CHECK(0, sqe);
    if (block->buffer >= 0 && block->writes)
        io_uring_prep_write_fixed(sqe, disk->fd, at, bytes, offset, block->buffer);
    else if (block->buffer >= 0)
        io_uring_prep_read_fixed(sqe, disk->fd, at, bytes, offset, block->buffer);
    else if (block->writes)
        io_uring_prep_write(sqe, disk->fd, at, bytes, offset);
    else
        io_uring_prep_read(sqe, disk->fd, at, bytes, offset);
    io_uring_sqe_set_data(sqe, block);
}

/* What was asked for and not handed over yet is handed over with the wait. A ring that fails as such ends no
 * block any more, and the kernel may still write: nothing can go on. */
static int64_t ring_await(fcdp_disk *disk, fcdp_disk_block **block_out) {
    struct io_uring_cqe *cqe;
    int error;
    do error = io_uring_submit_and_wait(&disk->ring, 1);
    while (error == -EINTR || error == -EAGAIN || error == -EBUSY);
    if (error >= 0) error = io_uring_wait_cqe(&disk->ring, &cqe);
    while (error == -EINTR) error = io_uring_wait_cqe(&disk->ring, &cqe);
    FCDP_CHECK(0, error >= 0);
    int64_t result = cqe->res;
    *block_out = io_uring_cqe_get_data(cqe);
    io_uring_cqe_seen(&disk->ring, cqe);
    return result;
}

#else /* a build without liburing: `uring` is never set */

static int ring_open(fcdp_disk *disk) {
    (void)disk;
    return -ENOSYS;
}

static void ring_close(fcdp_disk *disk) {
    (void)disk;
}

static bool ring_register(fcdp_disk *disk, int index, struct iovec memory) {
    (void)disk, (void)index, (void)memory;
    return false;
}

static void ring_ask(fcdp_disk *disk, fcdp_disk_block *block) {
    (void)disk, (void)block;
}

static int64_t ring_await(fcdp_disk *disk, fcdp_disk_block **block_out) {
    (void)disk, (void)block_out;
    FCDP_CHECK(0, false);
    return 0;
}

#endif

/* ---- the file ---- */

static fcdp_status dir_fail(const char *dir) {
    return fcdp__fail(FCDP_ERR_OPTION, "FCDP_SPILL_DIR=%s: %s", dir, strerror(errno));
}

/* Without O_TMPFILE, as on some network filesystems, it has a name for a moment. */
static int unnamed_open(const char *dir, int flags) {
    char path[4096];
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
    if (snprintf(path, sizeof path, "%s/.fcdp-spill-XXXXXX", dir) >= (int)sizeof path) return -1;
    fd = mkostemp(path, O_CLOEXEC | flags);
    int error = errno;
    unlink(path); /* it may be there although it could not be opened */
    errno = error;
    return fd;
}

static void lacks(fcdp_disk *disk, const char *what, int error) {
    size_t n = strlen(disk->lacks);
    n += (size_t)snprintf(disk->lacks + n, sizeof disk->lacks - n, "%s%s", n ? "; " : "", what);
    if (error && n < sizeof disk->lacks)
        snprintf(disk->lacks + n, sizeof disk->lacks - n, " (%s)", strerror(error));
}

fcdp_status fcdp__disk_open(const char *dir, fcdp_disk **disk_out) {
    if (mkdir(dir, 0700) && errno != EEXIST) return dir_fail(dir);
    fcdp_disk *disk = calloc(1, sizeof *disk);
    if (!disk) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for FCDP_SPILL_DIR");
    disk->last = &disk->first;
    disk->fd = unnamed_open(dir, O_DIRECT);
    if (disk->fd < 0 && errno == EINVAL) {
        lacks(disk, "no direct I/O there, so the page cache holds a copy too", errno);
        disk->fd = unnamed_open(dir, 0);
    }
    if (disk->fd < 0) {
        free(disk);
        return dir_fail(dir);
    }
    struct statfs of;
    if (!fstatfs(disk->fd, &of) && of.f_type == TMPFS_MAGIC) lacks(disk, "it is memory, and not a disk", 0);
    int error = ring_open(disk);
    if (error) lacks(disk, "no io_uring, so one block is read or written at a time", -error);
    *disk_out = disk;
    return FCDP_OK;
}

void fcdp__disk_close(fcdp_disk *disk) {
    if (!disk) return;
    FCDP_CHECK(1, disk->n == 0);
    ring_close(disk);
    close(disk->fd);
    free(disk);
}

const char *fcdp__disk_lacks(const fcdp_disk *disk) {
    return disk->lacks;
}

fcdp_status fcdp__disk_probe(const char *dir, char *lacks_out, size_t n_bytes) {
    fcdp_disk *disk;
    fcdp_status status = fcdp__disk_open(dir, &disk);
    if (status) return status;
    snprintf(lacks_out, n_bytes, "%s", disk->lacks);
    fcdp__disk_close(disk);
    return FCDP_OK;
}

fcdp_status fcdp__disk_reserve(fcdp_disk *disk, uint64_t offset, size_t bytes) {
    int error;
    do error = fallocate(disk->fd, 0, (off_t)offset, (off_t)bytes) ? errno : 0;
    while (error == EINTR);
    if (!error || error == EOPNOTSUPP) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "%s", strerror(error));
}

void fcdp__disk_truncate(fcdp_disk *disk) {
    if (ftruncate(disk->fd, 0)) fcdp__log(FCDP_LOG_DEBUG, "FCDP_SPILL_DIR: %s", strerror(errno));
}

int fcdp__disk_register(fcdp_disk *disk, int index, char *at, size_t bytes) {
    struct iovec memory = {at, bytes};
    if (!disk->registered || index < 0 || index >= REGISTERED_BUFFERS || bytes > REGISTERED_BYTES) return -1;
    return ring_register(disk, index, memory) ? index : -1;
}

/* ---- blocks ---- */

bool fcdp__disk_has_room(const fcdp_disk *disk) {
    return disk->n < FCDP_DISK_DEPTH;
}

static void ask(fcdp_disk *disk, fcdp_disk_block *block) {
    if (disk->uring) {
        ring_ask(disk, block);
        return;
    }
    block->next = NULL;
    *disk->last = block;
    disk->last = &block->next;
}

void fcdp__disk_begin(fcdp_disk *disk, fcdp_disk_block *block) {
    FCDP_CHECK(1, fcdp__disk_has_room(disk) && block->bytes && block->bytes <= FCDP_DISK_BLOCK_BYTES);
    block->done = 0;
    block->n_again = 0;
    block->error = 0;
    disk->n++;
    ask(disk, block);
}

static int64_t first_do(fcdp_disk *disk, fcdp_disk_block **block_out) {
    fcdp_disk_block *block = disk->first;
    disk->first = block->next;
    if (!disk->first) disk->last = &disk->first;
    char *at = block->at + block->done;
    size_t bytes = block->bytes - block->done;
    off_t offset = (off_t)(block->offset + block->done);
    ssize_t n = block->writes ? pwrite(disk->fd, at, bytes, offset) : pread(disk->fd, at, bytes, offset);
    *block_out = block;
    return n < 0 ? -errno : n;
}

fcdp_disk_block *fcdp__disk_end(fcdp_disk *disk) {
    while (disk->n > 0) {
        fcdp_disk_block *block;
        int64_t result = disk->uring ? ring_await(disk, &block) : first_do(disk, &block);
        if (fcdp__disk_fault) result = fcdp__disk_fault(block, result);
        if ((result == -EINTR || result == -EAGAIN) && block->n_again++ < MOST_AGAIN) {
            ask(disk, block);
            continue;
        }
        if (result > 0) block->done += (size_t)result;
        /* direct I/O cannot go on from the middle of a sector */
        bool goes_on = result > 0 && block->done < block->bytes && block->done % FCDP_DISK_ALIGN == 0;
        if (goes_on) {
            ask(disk, block);
            continue;
        }
        block->error = result < 0 ? (int)-result : block->done < block->bytes ? EIO : 0;
        disk->n--;
        return block;
    }
    return NULL;
}
