/* board.c - the words in shared memory.
 *
 * A wait is a futex wait with a timeout, since neither a dead writer nor a stream wakes the sleeper: each
 * time-out reads all words again and looks whether the writers still live.
 */
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

/* Neither a dead writer nor a stream wakes a sleeper, so a sleep lasts at most this long. */
enum { LOOK_FOR_DEAD_NS = 100 * 1000 * 1000, LOOK_FOR_WORD_NS = 500 * 1000 };

/* A process that has not joined yet is not gone; the timeout's message names it. Nor is one that cannot be
 * looked at, as while this process has no descriptor to spare. */
static bool member_gone(const fcdp_host *host, uint32_t slice) {
    const fcdp_slab_member *member = &host->header->members[slice];
    int32_t pid = atomic_load_explicit(
        &member->pid, memory_order_acquire); /* member_enter's release: start_time is there */
    uint64_t start_time;
    if (pid == FCDP_MEMBER_ABSENT) return false;
    if (pid == FCDP_MEMBER_LEFT) return true;
    if (!fcdp__process_start_time(pid, &start_time)) return errno == ESRCH;
    return start_time != member->start_time;
}

static void waiters_wake(_Atomic uint32_t *word) {
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void fcdp__board_publish(fcdp_host_block *block, fcdp_board_word word, uint32_t value) {
    _Atomic uint32_t *at = &block->board[block->host->config.slice].words[word];
    /* Release: a reader that reads the word with acquire (board_read) sees what this slice wrote before. */
    atomic_store_explicit(at, value, memory_order_release);
    waiters_wake(at);
}

uint32_t fcdp__board_read(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice) {
    FCDP_CHECK(1, slice < block->host->config.n_slices && (unsigned)word < FCDP_BOARD_N_WORDS);
    return atomic_load_explicit(&block->board[slice].words[word], memory_order_acquire);
}

static bool has_come(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice, uint32_t at_least) {
    return (int32_t)(fcdp__board_read(block, word, slice) - at_least) >= 0;
}

/* Slices [first, end) that must come, to which value of their word. */
typedef struct awaited {
    const fcdp_host_block *block;
    fcdp_board_word word;
    uint32_t first, end, at_least;
    double timeout_s;
    const char *what;
} awaited;

static bool awaits(const awaited *a, uint32_t slice) {
    return !has_come(a->block, a->word, slice, a->at_least);
}

/* A rank that has failed lives on but comes to no meeting. It raises its other words (fcdp__board_raise). */
static bool member_failed(const awaited *a, uint32_t slice) {
    const fcdp_slab_member *member = &a->block->host->header->members[slice];
    return a->word >= FCDP_BOARD_CAME && atomic_load_explicit(&member->has_failed, memory_order_acquire);
}

/* A list of slices: "slice 1 (process 4711, gone), slice 3 (process 4713)". */
typedef struct slice_list {
    int n;
    size_t at;
    char text[1024];
} slice_list;

/* `fate` is that of its process: "", ", gone". */
static void slice_add(slice_list *list, const fcdp_host *host, uint32_t slice, const char *fate) {
    int32_t pid = atomic_load_explicit(&host->header->members[slice].pid, memory_order_acquire);
    size_t room = sizeof list->text - list->at;
    char who[48];
    if (pid > 0)
        snprintf(who, sizeof who, "process %d%s", (int)pid, fate);
    else
        snprintf(who, sizeof who, "%s", pid == FCDP_MEMBER_LEFT ? "has left" : "never joined");
    int len = snprintf(list->text + list->at, room, "%sslice %u (%s)", list->n++ ? ", " : "", slice, who);
    if (len > 0) list->at += (size_t)len < room ? (size_t)len : room - 1;
}

/* Those that have not come. */
static void missing_list(const awaited *a, uint64_t gone, slice_list *list) {
    for (uint32_t i = a->first; i < a->end; i++) {
        const char *fate = member_failed(a, i) ? ", which has failed" : ", gone";
        if (awaits(a, i)) slice_add(list, a->block->host, i, gone >> i & 1 ? fate : "");
    }
}

static bool all_have_come(const awaited *a) {
    for (uint32_t i = a->first; i < a->end; i++)
        if (awaits(a, i)) return false;
    return true;
}

/* FCDP_PENDING while the processes that have not come live and may come yet. The word of a dead process is
 * read again, since publishing it may have been the last thing that the process did. */
static fcdp_status missing_query(const awaited *a, uint64_t waited_ns) {
    uint64_t gone = 0; /* a bit for each slice that has not come and never will */
    for (uint32_t i = a->first; i < a->end; i++)
        if (awaits(a, i) && (member_gone(a->block->host, i) || member_failed(a, i)) && awaits(a, i))
            gone |= UINT64_C(1) << i;
    bool is_late = (double)waited_ns >= a->timeout_s * 1e9;
    slice_list missing = {0};
    if (!gone && !is_late) return FCDP_PENDING;
    missing_list(a, gone, &missing);
    if (!missing.n) return FCDP_PENDING;
    return fcdp__fail(gone ? FCDP_ERR_PEER : FCDP_ERR_TIMEOUT, "%s: did not come from %s after %.1f s%s",
                      a->what, missing.text, (double)waited_ns / 1e9, gone ? "" : " (FCDP_TIMEOUT)");
}

static awaited all_of(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                      const char *what) {
    const fcdp_host_config *config = &block->host->config;
    return (awaited){block, word, 0, config->n_slices, at_least, config->timeout_s, what};
}

fcdp_status fcdp__board_query_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                  const char *what, uint64_t waited_ns) {
    awaited a = all_of(block, word, at_least, what);
    return all_have_come(&a) ? FCDP_OK : missing_query(&a, waited_ns);
}

fcdp_status fcdp__board_query_alive(const fcdp_host_block *block, const char *what, uint64_t waited_ns) {
    const fcdp_host *host = block->host;
    slice_list gone = {0};
    for (uint32_t i = 0; i < host->config.n_slices; i++)
        if (i != host->config.slice && member_gone(host, i)) slice_add(&gone, host, i, ", gone");
    if (!gone.n) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_PEER, "%s: did not come from %s after %.1f s", what, gone.text,
                      (double)waited_ns / 1e9);
}

static fcdp_status wait_for(const awaited *a) {
    uint64_t start_ns = fcdp__now_ns(), looked_ns = start_ns;
    while (!all_have_come(a)) {
        uint64_t now_ns = fcdp__now_ns();
        if (now_ns - looked_ns >= LOOK_FOR_DEAD_NS) {
            fcdp_status status = missing_query(a, now_ns - start_ns);
            if (status != FCDP_PENDING) return status;
            looked_ns = now_ns;
        }
        /* Sleep on any one word that has not come: the loop reads all of them again. */
        uint32_t i = a->first;
        while (i < a->end && !awaits(a, i)) i++;
        if (i == a->end) continue;
        uint32_t seen = fcdp__board_read(a->block, a->word, i);
        bool by_stream = a->word < FCDP_BOARD_CAME;
        struct timespec timeout = {.tv_nsec = by_stream ? LOOK_FOR_WORD_NS : LOOK_FOR_DEAD_NS};
        if ((int32_t)(seen - a->at_least) < 0)
            (void)syscall(SYS_futex, &a->block->board[i].words[a->word], FUTEX_WAIT, seen, &timeout, NULL, 0);
    }
    return FCDP_OK;
}

fcdp_status fcdp__board_wait_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                 const char *what) {
    awaited a = all_of(block, word, at_least, what);
    return wait_for(&a);
}

fcdp_status fcdp__board_wait(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice,
                             uint32_t at_least, double timeout_s, const char *what) {
    awaited a = {block, word, slice, slice + 1, at_least, timeout_s, what};
    return wait_for(&a);
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
        waiters_wake(at);
    }
}
