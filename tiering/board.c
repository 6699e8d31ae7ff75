/* board.c - the node's ranks see each other: words in shared memory, futex waits, and an eye on the writers' lives. */
#include "tiering/host_internal.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A dead writer wakes nobody: look for it this often. */
enum { LOOK_EVERY_NS = 100 * 1000 * 1000 };

bool fcdp__process_start_time(int32_t pid, uint64_t *start_time_out) {
    char path[48], text[1024];
    /* The first thread's, which says the same: qemu-user makes up /proc/PID/stat, with a start time for each thread. */
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", (int)pid, (int)pid);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
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

/* One that has not joined yet is not gone: the timeout speaks of it. */
static bool member_gone(const fcdp_host *host, uint32_t slice) {
    const fcdp_slab_member *member = &host->header->members[slice];
    int32_t pid = atomic_load_explicit(
        &member->pid, memory_order_acquire); /* member_enter's release: start_time is there */
    uint64_t start_time;
    if (pid == FCDP_MEMBER_ABSENT) return false;
    if (pid == FCDP_MEMBER_LEFT) return true;
    return !fcdp__process_start_time(pid, &start_time) || start_time != member->start_time;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns) {
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                               .tv_nsec = (long)(timeout_ns % 1000000000u)};
    /* Every outcome leads back to reading the word. */
    (void)syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

void fcdp__board_publish(fcdp_host_block *block, fcdp_board_word word, uint32_t value) {
    _Atomic uint32_t *at = &block->board[block->host->config.slice].words[word];
    /* Release: what this slice wrote before is there for whoever reads the word with acquire (board_read). */
    atomic_store_explicit(at, value, memory_order_release);
    (void)syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t fcdp__board_read(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice) {
    FCDP_CHECK(1, slice < block->host->config.n_slices && (unsigned)word < FCDP_BOARD_N_WORDS);
    return atomic_load_explicit(&block->board[slice].words[word], memory_order_acquire);
}

static bool has_come(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice, uint32_t at_least) {
    return (int32_t)(fcdp__board_read(block, word, slice) - at_least) >= 0;
}

/* "slice 1 (process 4711, gone), slice 3 (process 4713)" of those that have not come. The number of them. */
static int missing_describe(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                            uint64_t gone, char *text, size_t text_bytes) {
    int n = 0;
    size_t at = 0;
    text[0] = 0;
    for (uint32_t i = 0; i < block->host->config.n_slices; i++) {
        if (has_come(block, word, i, at_least)) continue;
        int32_t pid = atomic_load_explicit(&block->host->header->members[i].pid, memory_order_acquire);
        char who[48];
        if (pid > 0)
            snprintf(who, sizeof who, "process %d%s", (int)pid, gone >> i & 1 ? ", gone" : "");
        else
            snprintf(who, sizeof who, "%s", pid == FCDP_MEMBER_LEFT ? "has left" : "never joined");
        int len = snprintf(text + at, text_bytes - at, "%sslice %u (%s)", n++ ? ", " : "", i, who);
        if (len > 0) at = at + (size_t)len < text_bytes ? at + (size_t)len : text_bytes - 1;
    }
    return n;
}

/* The slices (a bit each) that have not come and never will. The word is read again after the death: the last thing the
 * process did may have been to publish it. */
static uint64_t gone_mask(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least) {
    uint64_t gone = 0;
    for (uint32_t i = 0; i < block->host->config.n_slices; i++)
        if (!has_come(block, word, i, at_least) && member_gone(block->host, i) &&
            !has_come(block, word, i, at_least))
            gone |= UINT64_C(1) << i;
    return gone;
}

fcdp_status fcdp__board_wait_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                 const char *what) {
    const fcdp_host_config *config = &block->host->config;
    uint64_t start_ns = fcdp__now_ns(), limit_ns = (uint64_t)(config->timeout_s * 1e9);
    char missing[1024];
    for (uint32_t i = 0; i < config->n_slices;) {
        uint32_t seen = fcdp__board_read(block, word, i);
        if ((int32_t)(seen - at_least) >= 0) {
            i++;
            continue;
        }
        uint64_t waited_ns = fcdp__now_ns() - start_ns;
        uint64_t gone = waited_ns >= LOOK_EVERY_NS ? gone_mask(block, word, at_least) : 0;
        if ((gone || waited_ns >= limit_ns) &&
            missing_describe(block, word, at_least, gone, missing, sizeof missing))
            return fcdp__fail(gone ? FCDP_ERR_PEER : FCDP_ERR_TIMEOUT,
                              "%s: did not come from %s after %.1f s%s", what, missing,
                              (double)waited_ns / 1e9, gone ? "" : " (FCDP_TIMEOUT)");
        uint64_t left_ns = waited_ns < limit_ns ? limit_ns - waited_ns : 0;
        futex_wait(&block->board[i].words[word], seen, left_ns < LOOK_EVERY_NS ? left_ns : LOOK_EVERY_NS);
    }
    return FCDP_OK;
}
