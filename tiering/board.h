/* board.h - the words by which the ranks of a node see each other without a collective.
 *
 * A block of the node's memory begins with a page of 32-bit words (host.h), one per slice and kind. The
 * slice's owner writes its words with release order, from a stream or from the host; the other ranks read
 * them with acquire order. A host thread that waits sleeps on a futex, with a timeout, and looks whether the
 * writer still lives.
 */
#ifndef FCDP_BOARD_H
#define FCDP_BOARD_H

#include "tiering/host.h"

typedef enum fcdp_board_word {
    FCDP_BOARD_STORED_0, /* region.h: epoch of span 0 of which this rank's pieces are in host memory */
    FCDP_BOARD_STORED_1, /* the same of span 1 */
    /* region.h: number of the fill for which this rank's older reads and writes are over */
    FCDP_BOARD_READY,
    FCDP_BOARD_ATTACHED, /* host.c's: 1 while this rank has the block attached */
    /* Hosts write the words from here on, and wake the threads that wait for them. Of the meeting
     * (fcdp__host_meeting), see comm/ballot.h: meetings that this rank has come to, and those of which the
     * first slice has told what came of them */
    FCDP_BOARD_CAME,
    FCDP_BOARD_TOLD,
    FCDP_BOARD_N_WORDS,
} fcdp_board_word;

/* Write this rank's word from the host, and wake the threads that wait for it. */
void fcdp__board_publish(fcdp_host_block *block, fcdp_board_word word, uint32_t value);
/* Acquire: the reader sees what the writer wrote before, whether a stream or the host wrote the word. */
uint32_t fcdp__board_read(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice);
/* The word's device address, for the owner's streams to write and the others' to wait for. Page-locked,
 * whatever FCDP_PIN says. */
fcdp_dptr fcdp__board_word_at(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice);
/* The host waits until (int32_t)(word[slice] - at_least) >= 0 for every slice. FCDP_ERR_TIMEOUT or, when
 * the owner's process is gone (or, of a meeting's word, has failed), FCDP_ERR_PEER; the text names the
 * slices that did not come and `what`. */
fcdp_status fcdp__board_wait_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                 const char *what) FCDP_MUST_CHECK;
/* The same for one slice, with a timeout of its own. */
fcdp_status fcdp__board_wait(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice,
                             uint32_t at_least, double timeout_s, const char *what) FCDP_MUST_CHECK;
/* The same without waiting, for a caller that has waited for waited_ns: FCDP_PENDING while some slices have
 * not come, live, and may come yet. */
fcdp_status fcdp__board_query_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                  const char *what, uint64_t waited_ns) FCDP_MUST_CHECK;
/* FCDP_ERR_PEER: the process of another slice has ended, or has left; the text names these and `what` they
 * may have been needed for. One that has not joined yet may come. For a caller that has waited for
 * waited_ns. */
fcdp_status fcdp__board_query_alive(const fcdp_host_block *block, const char *what,
                                    uint64_t waited_ns) FCDP_MUST_CHECK;
/* Raise every slice's word to `at_least`, so that streams whose peer is gone go on. After fcdp__host_fail. */
void fcdp__board_raise(fcdp_host_block *block, fcdp_board_word word, uint32_t at_least);

#endif
