/* shared.c - memfds that the processes of a node share.
 *
 * A ticket names a process, its start time, a descriptor and an inode. Opening checks all of them, since a
 * pid may have been reused, and containers may see different /proc file systems.
 */
#include "tiering/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/size.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

bool fcdp__process_start_time(int32_t pid, uint64_t *start_time_out) {
    char path[48], text[1024];
    /* The first thread's, which says the same: qemu-user makes up
     * /proc/PID/stat, with a start time for each thread. */
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", (int)pid, (int)pid);
    FILE *file = fopen(path, "re");
    if (!file) {
        if (errno == ENOENT) errno = ESRCH;
        return false;
    }
    errno = 0;
    size_t n = fread(text, 1, sizeof text - 1, file);
    int error = errno;
    fclose(file);
    errno = error ? error : ESRCH;
    text[n] = 0;
    char *field = strrchr(text, ')'); /* field 2 is the name, which may hold anything */
    if (!field || n < 4) return false;
    char state = field[2];
    for (int i = 2; i < 22 && field; i++) field = strchr(field + 1, ' ');
    if (!field || state == 'Z' || state == 'X')
        return false; /* killed, whether or not its parent has noticed */
    *start_time_out = strtoull(field + 1, NULL, 10);
    return true;
}

/* A huge page of the file is one of the mapping where both begin at multiples of its size. So addresses are
 * chosen that leave the same rest as the offset does; those beside them go back. */
static void *map_in_step(int fd, uint64_t offset, size_t bytes) {
    char *room = mmap(NULL, bytes + FCDP_HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0);
    if (room == MAP_FAILED) return MAP_FAILED;
    size_t before = (size_t)(offset - (uintptr_t)room) % FCDP_HUGE_BYTES;
    size_t end = fcdp__round_up(before + bytes, (size_t)sysconf(_SC_PAGESIZE));
    void *at = mmap(room + before, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd,
                    (off_t)offset);
    int error = errno;
    if (at == MAP_FAILED) munmap(room, bytes + FCDP_HUGE_BYTES);
    if (at != MAP_FAILED && before) munmap(room, before);
    if (at != MAP_FAILED && end < bytes + FCDP_HUGE_BYTES) munmap(room + end, bytes + FCDP_HUGE_BYTES - end);
    errno = error;
    return at;
}

void *fcdp__shared_map(int fd, uint64_t offset, size_t bytes) {
    void *at = bytes < FCDP_HUGE_BYTES
                   ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset)
                   : map_in_step(fd, offset, bytes);
    if (at == MAP_FAILED) return NULL;
    /* A forked data loader must not keep pinned pages alive, nor write them. */
    (void)madvise(at, bytes, MADV_DONTFORK);
    return at;
}

fcdp_status fcdp__shared_create(const char *name, size_t bytes, int *fd_out, fcdp_shared_ticket *ticket_out) {
    fcdp_shared_ticket ticket = {.pid = getpid(), .bytes = bytes};
    if (!fcdp__process_start_time(ticket.pid, &ticket.pid_start_time))
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "/proc/%d/stat cannot be read; FCDP needs /proc",
                          (int)ticket.pid);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return fcdp__fail(FCDP_ERR_SYSTEM, "memfd_create(%s): %s", name, strerror(errno));
    struct stat st;
    if (fchmod(fd, 0600) || ftruncate(fd, (off_t)bytes) ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) || fstat(fd, &st)) {
        fcdp_status status = fcdp__fail(FCDP_ERR_SYSTEM, "cannot make a sparse memfd of %s: %s",
                                        fcdp__size_text(bytes).s, strerror(errno));
        close(fd);
        return status;
    }
    ticket.fd = fd;
    ticket.inode = st.st_ino;
    *fd_out = fd;
    *ticket_out = ticket;
    return FCDP_OK;
}

fcdp_status fcdp__shared_open(const fcdp_shared_ticket *ticket, int *fd_out) {
    char path[64];
    uint64_t start_time;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)ticket->pid, (int)ticket->fd);
    bool is_there = fcdp__process_start_time(ticket->pid, &start_time);
    if (is_there ? start_time != ticket->pid_start_time : errno == ESRCH)
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "process %d, another rank of this node, is not visible from here. Either it has ended, "
            "or the ranks of this node run in different containers or PID namespaces: run them in "
            "one, or set FCDP_LOCAL_SIZE to the ranks that share one",
            (int)ticket->pid);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "cannot open %s: %s. The ranks of a node share host memory through /proc: run them as "
            "one user, in one container, without hidepid on /proc",
            path, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) || st.st_ino != ticket->inode || (uint64_t)st.st_size != ticket->bytes) {
        close(fd);
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "%s is not the memory that process %d made; the ranks of this node see different /proc "
            "file systems",
            path, (int)ticket->pid);
    }
    *fd_out = fd;
    return FCDP_OK;
}
