/* cache.c - the node's disk cache of frozen slices: plain files, read and written in long runs.
 *
 * A job reads each slice once, when it starts, and writes each at most once, behind its first step; so the
 * system's page cache and ordinary reads do. The lock on the directory is held while files are counted and
 * room is made, and not while bytes are copied.
 */
#include "tiering/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/size.h"

#define SUFFIX ".frozen"
#define WRITING ".writing-"
enum { RUN_BYTES = 8 << 20, KEY_DIGITS = 32, NAME_MAX_BYTES = 64 };

struct fcdp_cache {
    char *dir;
    int fd; /* the directory's */
    size_t limit_bytes;
    struct timespec opened; /* by the file system's clock: what was used since stays */
};

_Static_assert(sizeof(fcdp_cache_header) <= FCDP_CACHE_HEADER_BYTES, "the header fits its page");

static void name_of(const fcdp_cache_key *key, char name[NAME_MAX_BYTES]) {
    for (int i = 0; i < 16; i++) snprintf(name + 2 * (size_t)i, 3, "%02x", key->bytes[i]);
    snprintf(name + KEY_DIGITS, NAME_MAX_BYTES - KEY_DIGITS, SUFFIX);
}

static bool is_entry(const char *name) {
    return strspn(name, "0123456789abcdef") == KEY_DIGITS && strcmp(name + KEY_DIGITS, SUFFIX) == 0;
}

static bool is_being_written(const char *name) {
    return strncmp(name, WRITING, sizeof WRITING - 1) == 0;
}

/* ---- the directory ---- */

static fcdp_status refused(const char *dir, const char *what) {
    return fcdp__fail(FCDP_ERR_OPTION, "FCDP_CACHE_DIR=%s: %s: %s", dir, what, strerror(errno));
}

/* With its parents, as mkdir -p does. */
static bool directory_make(const char *dir) {
    char *path = strdup(dir);
    if (!path) return false;
    for (char *at = path + 1; *at; at++) {
        if (*at != '/') continue;
        *at = '\0';
        (void)mkdir(path, 0777);
        *at = '/';
    }
    bool made = mkdir(path, 0777) == 0 || errno == EEXIST;
    int error = errno;
    free(path);
    errno = error;
    return made;
}

/* Of a file that is being written: processes in several containers may have the same number. */
static void name_make(char name[NAME_MAX_BYTES]) {
    static _Atomic unsigned n_names;
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) < 0) random = fcdp__now_ns();
    snprintf(name, NAME_MAX_BYTES, WRITING "%d-%u-%016llx", (int)getpid(), n_names++,
             (unsigned long long)random);
}

/* A file of its own tells the file system's time, which may not be this machine's. */
static fcdp_status probe(fcdp_cache *cache) {
    struct stat state;
    char name[NAME_MAX_BYTES];
    name_make(name);
    int fd = openat(cache->fd, name, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && fstat(fd, &state) == 0;
    int error = errno;
    if (ok) cache->opened = state.st_mtim;
    if (fd >= 0) {
        (void)unlinkat(cache->fd, name, 0);
        close(fd);
    }
    errno = error;
    return ok ? FCDP_OK : refused(cache->dir, "no file can be written there");
}

fcdp_status fcdp__cache_open(const char *dir, size_t limit_bytes, fcdp_cache **cache_out) {
    fcdp_cache *cache = calloc(1, sizeof *cache);
    if (cache) *cache = (fcdp_cache){.dir = strdup(dir), .fd = -1, .limit_bytes = limit_bytes};
    fcdp_status status = cache && cache->dir ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a cache");
    if (!status && !directory_make(dir)) status = refused(dir, "the directory cannot be made");
    if (!status) cache->fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!status && cache->fd < 0) status = refused(dir, "the directory cannot be opened");
    if (!status) status = probe(cache);
    if (status)
        fcdp__cache_close(cache);
    else
        *cache_out = cache;
    return status;
}

void fcdp__cache_close(fcdp_cache *cache) {
    if (!cache) return;
    int error = errno;
    if (cache->fd >= 0) close(cache->fd);
    free(cache->dir);
    free(cache);
    errno = error;
}

const char *fcdp__cache_dir(const fcdp_cache *cache) {
    return cache->dir;
}

/* ---- reading ---- */

/* All `bytes` of them from `offset` on. False: the file is shorter (errno is 0), or cannot be read. */
static bool read_all(int fd, void *to, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        size_t run = bytes - done < RUN_BYTES ? bytes - done : RUN_BYTES;
        ssize_t n = pread(fd, (char *)to + done, run, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = 0;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

static bool header_is(const fcdp_cache_header *header, const fcdp_cache_key *key, size_t bytes) {
    return memcmp(header->magic, FCDP_CACHE_MAGIC, sizeof header->magic) == 0 && header->bytes == bytes &&
           memcmp(header->key, key->bytes, sizeof key->bytes) == 0;
}

/* Its time says when it was used last. What cannot be read now may be read in the next run. */
fcdp_status fcdp__cache_read(fcdp_cache *cache, const fcdp_cache_key *key, void *to, size_t bytes) {
    char name[NAME_MAX_BYTES];
    fcdp_cache_header header;
    name_of(key, name);
    int fd = openat(cache->fd, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return FCDP_PENDING;
    if (fd >= 0) (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    bool ok = fd >= 0 && read_all(fd, &header, sizeof header, 0);
    if (ok && !header_is(&header, key, bytes)) {
        ok = false;
        errno = 0;
    }
    ok = ok && read_all(fd, to, bytes, FCDP_CACHE_HEADER_BYTES);
    int error = errno;
    if (ok) (void)utimensat(cache->fd, name, NULL, 0);
    if (fd >= 0) close(fd);
    if (ok) return FCDP_OK;
    fcdp_status status;
    if (error) {
        status = fcdp__fail(FCDP_ERR_SYSTEM,
                            "FCDP_CACHE_DIR: %s/%s cannot be read: %s; its parameters are gathered",
                            cache->dir, name, strerror(error));
    } else {
        status = fcdp__fail(FCDP_ERR_SYSTEM,
                            "FCDP_CACHE_DIR: %s/%s is damaged, and removed; its parameters are gathered",
                            cache->dir, name);
        (void)unlinkat(cache->fd, name, 0);
    }
    fcdp__log(FCDP_LOG_WARN, "%s", fcdp_error_text());
    return status;
}

void fcdp__cache_drop(fcdp_cache *cache, const fcdp_cache_key *key) {
    char name[NAME_MAX_BYTES];
    name_of(key, name);
    (void)unlinkat(cache->fd, name, 0);
}

/* ---- room ---- */

typedef struct entry {
    char name[NAME_MAX_BYTES];
    struct timespec used;
    size_t bytes;
} entry;

typedef struct listing {
    entry *entries;
    size_t n, room;
    size_t bytes; /* of all, with what is being written */
} listing;

static bool listing_add(listing *list, const char *name, const struct stat *state) {
    if (list->n == list->room) {
        size_t room = 2 * list->room + 16;
        entry *entries = realloc(list->entries, room * sizeof *entries);
        if (!entries) return false;
        list->entries = entries;
        list->room = room;
    }
    entry *added = &list->entries[list->n++];
    snprintf(added->name, sizeof added->name, "%.*s", NAME_MAX_BYTES - 1, name);
    added->used = state->st_mtim;
    added->bytes = (size_t)state->st_size;
    return true;
}

/* A child that another thread has forked meanwhile has the same open file: it would keep the lock. */
static void unlock_and_close(int fd) {
    (void)flock(fd, LOCK_UN);
    close(fd);
}

/* A writer holds a lock on its file as long as it lives. */
static bool writer_is_gone(int dir, const char *name) {
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    bool gone = flock(fd, LOCK_EX | LOCK_NB) == 0;
    unlock_and_close(fd);
    return gone;
}

/* Removes what dead writers have left. The directory's lock is held. */
static bool listing_read(const fcdp_cache *cache, listing *list_out) {
    int copy = openat(cache->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy >= 0 ? fdopendir(copy) : NULL;
    bool ok = dir != NULL;
    *list_out = (listing){0};
    for (const struct dirent *file; ok && (file = readdir(dir));) {
        struct stat state;
        if (is_being_written(file->d_name) && writer_is_gone(cache->fd, file->d_name)) {
            (void)unlinkat(cache->fd, file->d_name, 0);
            continue;
        }
        bool counts = is_being_written(file->d_name) || is_entry(file->d_name);
        if (!counts || fstatat(cache->fd, file->d_name, &state, 0)) continue;
        list_out->bytes += (size_t)state.st_size;
        if (is_entry(file->d_name)) ok = listing_add(list_out, file->d_name, &state);
    }
    if (dir)
        closedir(dir);
    else if (copy >= 0)
        close(copy);
    return ok;
}

static int time_order(const struct timespec *a, const struct timespec *b) {
    if (a->tv_sec != b->tv_sec) return a->tv_sec < b->tv_sec ? -1 : 1;
    return (a->tv_nsec > b->tv_nsec) - (a->tv_nsec < b->tv_nsec);
}

static int oldest_first(const void *a, const void *b) {
    return time_order(&((const entry *)a)->used, &((const entry *)b)->used);
}

static size_t limit_of(const fcdp_cache *cache, const listing *list) {
    struct statvfs disk;
    if (cache->limit_bytes) return cache->limit_bytes;
    if (fstatvfs(cache->fd, &disk)) return 0;
    return ((size_t)disk.f_bavail * disk.f_frsize + list->bytes) / 2;
}

/* The directory's lock is held. */
static bool room_make(const fcdp_cache *cache, size_t bytes) {
    listing list;
    bool ok = listing_read(cache, &list);
    size_t limit = ok ? limit_of(cache, &list) : 0, can_go = 0;
    for (size_t i = 0; i < list.n; i++)
        if (time_order(&list.entries[i].used, &cache->opened) < 0) can_go += list.entries[i].bytes;
    ok = ok && bytes <= limit && list.bytes - can_go <= limit - bytes;
    if (ok && list.n) qsort(list.entries, list.n, sizeof *list.entries, oldest_first);
    for (size_t i = 0; ok && list.bytes > limit - bytes; i++) {
        (void)unlinkat(cache->fd, list.entries[i].name, 0);
        list.bytes -= list.entries[i].bytes;
    }
    free(list.entries);
    return ok;
}

/* ---- writing ---- */

static fcdp_status failed(const fcdp_cache *cache, const char *name) {
    fcdp_status status = errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? FCDP_ERR_NO_HOST_MEM
                                                                              : FCDP_ERR_SYSTEM;
    return fcdp__fail(status, "%s/%s: %s", cache->dir, name, strerror(errno));
}

/* A file of its whole size, locked, in which others see that it is being written. */
static fcdp_status file_reserve(const fcdp_cache *cache, char name[NAME_MAX_BYTES], size_t bytes,
                                int *fd_out) {
    fcdp_status status = FCDP_OK;
    int lock = openat(cache->fd, ".lock", O_CREAT | O_RDWR | O_CLOEXEC, 0666), fd = -1;
    name_make(name);
    if (lock < 0 || flock(lock, LOCK_EX)) {
        status = failed(cache, ".lock");
    } else if (!room_make(cache, bytes)) {
        status = fcdp__fail(FCDP_ERR_NO_HOST_MEM, "%s has no room for %s more (FCDP_CACHE_SIZE)", cache->dir,
                            fcdp__size_text(bytes).s);
    } else {
        fd = openat(cache->fd, name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0666);
        if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB)) status = failed(cache, name);
        int error = status ? 0 : posix_fallocate(fd, 0, (off_t)bytes);
        if (error) {
            errno = error;
            status = failed(cache, name);
        }
    }
    if (lock >= 0) unlock_and_close(lock);
    if (status && fd >= 0) {
        (void)unlinkat(cache->fd, name, 0);
        unlock_and_close(fd);
    }
    if (!status) *fd_out = fd;
    return status;
}

static bool write_all(int fd, const void *from, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        size_t run = bytes - done < RUN_BYTES ? bytes - done : RUN_BYTES;
        ssize_t n = pwrite(fd, (const char *)from + done, run, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        done += (size_t)n;
    }
    return true;
}

fcdp_status fcdp__cache_write(fcdp_cache *cache, const fcdp_cache_entry *entry, bool (*is_valid)(void *ctx),
                              void *ctx) {
    char name[NAME_MAX_BYTES], writing[NAME_MAX_BYTES];
    fcdp_cache_header header = {.bytes = entry->bytes, .slice = entry->slice, .n_slices = entry->n_slices};
    int fd = -1;
    name_of(&entry->key, name);
    if (faccessat(cache->fd, name, F_OK, 0) == 0) return FCDP_PENDING;
    fcdp_status status = file_reserve(cache, writing, FCDP_CACHE_HEADER_BYTES + entry->bytes, &fd);
    if (status) return status;
    memcpy(header.magic, FCDP_CACHE_MAGIC, sizeof header.magic);
    memcpy(header.key, entry->key.bytes, sizeof header.key);
    snprintf(header.name, sizeof header.name, "%s", entry->name);
    if (!write_all(fd, entry->from, entry->bytes, FCDP_CACHE_HEADER_BYTES) ||
        !write_all(fd, &header, sizeof header, 0))
        status = failed(cache, writing);
    bool stays = !status && is_valid(ctx);
    if (stays && renameat(cache->fd, writing, cache->fd, name)) status = failed(cache, name);
    if (!stays || status) (void)unlinkat(cache->fd, writing, 0);
    unlock_and_close(fd);
    return !status && !stays ? FCDP_PENDING : status;
}
