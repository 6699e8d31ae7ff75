/* staging.h - the staging buffer of a set of streams: device pages in which small groups are packed
 * (coalesce.h), and the shards of large ones (moves.c).
 *
 * It has two halves, used in turn. One thread at a time has the buffer, from fcdp__staging_acquire to
 * fcdp__staging_release. Its pages stay mapped while passes use it; a taker that lacks device memory in
 * between gets them.
 */
#ifndef FCDP_STAGING_H
#define FCDP_STAGING_H

#include "comm/engine.h"
#include "comm/lent.h"

typedef struct fcdp_stream_set fcdp_stream_set;

typedef struct fcdp_staging {
    fcdp_lent pages; /* whoever has them has the buffer */
    unsigned n_idle; /* passes that have begun since it was used last */
    int next;        /* the half that the next gather takes */
    bool incomplete; /* a gather has failed half way: operations may be behind the events */
    /* of each half: the end of the collective into it; the end of the copies out of it */
    fcdp_event filled[2], emptied[2];
} fcdp_staging;

void fcdp__staging_init(fcdp_staging *staging);
/* The pool asks it no more. */
void fcdp__staging_destroy(fcdp_stream_set *set);

/* Waits until no other thread has it. */
void fcdp__staging_acquire(fcdp_staging *staging);
void fcdp__staging_release(fcdp_staging *staging);
/* Acquired: two halves of at least `half_bytes`, and their events. A larger buffer replaces a smaller one; it
 * does not shrink. */
fcdp_status fcdp__staging_reserve(fcdp_stream_set *set, size_t half_bytes) FCDP_MUST_CHECK;

/* The half whose turn it is, by number: behind its `emptied`, the caller fills it, records `filled`, empties
 * it and records `emptied`. Where it lies depends on the buffer's size alone, so what is in the other half
 * stays. */
int fcdp__staging_take(fcdp_stream_set *set, fcdp_dptr *half_out);

/* A pass begins: the pages go where the last passes did not use them. */
void fcdp__staging_begin_pass(fcdp_stream_set *set);
/* The last group has gone: so do the pages. */
void fcdp__staging_trim(fcdp_stream_set *set);
/* Pages that went, all or nothing. The thread that has the buffer may be the one that asks, so this waits for
 * none. */
size_t fcdp__staging_reclaim(fcdp_stream_set *set);
size_t fcdp__staging_idle(fcdp_stream_set *set);

#endif
