/* board.c - the board's words in shared memory: reading and writing them, waiting for them by futex, finding
 * out who will never write his. */
#include "tiering/board.h"

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

/* A dead writer wakes nobody, and neither does a stream: look for the one and the other this often. */
enum { LOOK_FOR_DEAD_NS = 100 * 1000 * 1000, LOOK_FOR_WORD_NS = 500 * 1000 };

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

/* The slices (a bit each) that have not come and never will. The word is read again after the death: the last
 * thing the process did may have been to publish it. */
static uint64_t gone_mask(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least) {
    uint64_t gone = 0;
    for (uint32_t i = 0; i < block->host->config.n_slices; i++)
        if (!has_come(block, word, i, at_least) && member_gone(block->host, i) &&
            !has_come(block, word, i, at_least))
            gone |= UINT64_C(1) << i;
    return gone;
}

static bool all_have_come(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least) {
    for (uint32_t i = 0; i < block->host->config.n_slices; i++)
        if (!has_come(block, word, i, at_least)) return false;
    return true;
}

/* FCDP_PENDING while those that have not come live, and may come yet. */
static fcdp_status missing_query(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                 const char *what, uint64_t waited_ns) {
    const fcdp_host_config *config = &block->host->config;
    uint64_t gone = gone_mask(block, word, at_least);
    bool is_late = (double)waited_ns >= config->timeout_s * 1e9;
    char missing[1024];
    if (!gone && !is_late) return FCDP_PENDING;
    if (!missing_describe(block, word, at_least, gone, missing, sizeof missing)) return FCDP_PENDING;
    return fcdp__fail(gone ? FCDP_ERR_PEER : FCDP_ERR_TIMEOUT, "%s: did not come from %s after %.1f s%s",
                      what, missing, (double)waited_ns / 1e9, gone ? "" : " (FCDP_TIMEOUT)");
}

fcdp_status fcdp__board_query_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                  const char *what, uint64_t waited_ns) {
    return all_have_come(block, word, at_least) ? FCDP_OK
                                                : missing_query(block, word, at_least, what, waited_ns);
}

/* Waits on one word that has not come, whichever: a look at all of them follows. */
static void word_wait(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least) {
    for (uint32_t i = 0; i < block->host->config.n_slices; i++) {
        uint32_t seen = fcdp__board_read(block, word, i);
        if ((int32_t)(seen - at_least) >= 0) continue;
        futex_wait(&block->board[i].words[word], seen, LOOK_FOR_WORD_NS);
        return;
    }
}

fcdp_status fcdp__board_wait_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                 const char *what) {
    uint64_t start_ns = fcdp__now_ns(), looked_ns = start_ns;
    while (!all_have_come(block, word, at_least)) {
        uint64_t now_ns = fcdp__now_ns();
        if (now_ns - looked_ns >= LOOK_FOR_DEAD_NS) {
            fcdp_status status = missing_query(block, word, at_least, what, now_ns - start_ns);
            if (status != FCDP_PENDING) return status;
            looked_ns = now_ns;
        }
        word_wait(block, word, at_least);
    }
    return FCDP_OK;
}

fcdp_dptr fcdp__board_word_at(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice) {
    size_t offset = slice * sizeof(fcdp_board_line) + (size_t)word * sizeof(uint32_t);
    return fcdp__dptr_add(block->board_at, offset);
}

void fcdp__board_raise(fcdp_host_block *block, fcdp_board_word word, uint32_t at_least) {
    for (uint32_t i = 0; i < block->host->config.n_slices; i++) {
        _Atomic uint32_t *at = &block->board[i].words[word];
        uint32_t seen = atomic_load_explicit(at, memory_order_relaxed);
        while ((int32_t)(seen - at_least) < 0 &&
               !atomic_compare_exchange_weak_explicit(at, &seen, at_least, memory_order_release,
                                                      memory_order_relaxed))
            continue;
        (void)syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}
