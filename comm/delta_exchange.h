/* delta_exchange.h - one gather of differences (delta.h): what delta.c and delta_device.c enqueue, and what
 * its stages make of it. For these three files.
 */
#ifndef FCDP_DELTA_EXCHANGE_H
#define FCDP_DELTA_EXCHANGE_H

#include <stdatomic.h>

#include "comm/delta.h"
#include "comm/internal.h"

typedef struct fcdp_delta_head { /* of a member; all zeroes but for the gains: it has no base */
    uint64_t wire_bytes;         /* 0: there are too many differences */
    uint64_t base;               /* the name of all members' */
    int64_t gain_ns;             /* by_gain: what it expects of differences, in this gather */
    int64_t most_ns;             /* and would if there were none */
    uint64_t may_decode_behind;  /* its stream has FCDP_DELTA_DECODE and _JUDGE, behind the turn */
} fcdp_delta_head;

typedef struct fcdp_delta_rows { /* of all members: that of member i begins i * stride_bytes on */
    char *at;
    size_t stride_bytes;
    /* NULL, or member `me`'s, which lies apart: the others' follow each other as if there were none */
    char *own;
    uint32_t me;
} fcdp_delta_rows;

typedef struct fcdp_delta_extent { /* one stale extent */
    fcdp_group *group;
    const char *shard;      /* this rank's */
    fcdp_delta_rows places; /* of what comes */
    fcdp_delta_rows base;   /* read alone, or the places; NULL: there is none */
    /* where the places are in each copy of the group's host memory */
    size_t host_offset_bytes, host_stride_bytes;
    fcdp_base from;
    uint32_t span, index; /* index: of the group's extents */
    size_t bytes;
    unsigned element_bytes;
    fcdp_number number;
    /* What the device has encoded (codec_kernel.h); NULL: the host does. With own_is_known only if the
     * base's own_fingerprint is this one: else it encoded from the base itself, or from the same fill */
    const char *slots;
    size_t slots_bytes; /* 0: likewise */
    bool own_is_known;
    uint64_t own_fingerprint;
    /* The shard is kept as an own base, of this generation; 0: it is not */
    uint64_t keeps;
    bool shard_is_known;
    uint64_t shard_fingerprint, base_fingerprint; /* of this rank's own */
} fcdp_delta_extent;

/* With fewer bytes of the others' shards for each, there are fewer parts. For tests */
extern size_t fcdp__delta_part_bytes;

/* Whose the gather is; while it runs, a stage's. */
enum { FCDP_DELTA_IDLE, FCDP_DELTA_RUNNING, FCDP_DELTA_DONE, FCDP_DELTA_CANCELLED };

/* One gather, of the last ones of its state. Made by the thread that enqueues it, then the stream's; freed by
 * the former once it is done. */
typedef struct fcdp_delta {
    struct fcdp_delta *next; /* of the state's; then of those that a device which failed has left undone */
    atomic_int phase; /* release: all of this, and the state, has been written; acquire where it is read */
    fcdp_comm *comm;
    fcdp_delta_state *state;
    fcdp_delta_scratch *scratch;
    uint32_t object;      /* the trace's */
    fcdp_trace_span span; /* of FCDP_DELTA_CROSS */
    /* of each stage; then of FCDP_DELTA_DECODE's parts but the first */
    fcdp_worker_job jobs[FCDP_DELTA_N_STAGES + FCDP_DELTA_MOST_PARTS - 1];
    uint32_t n, me;         /* members */
    uint32_t inter_index;   /* of its stream among those between the nodes; the same on all members */
    uint32_t room;          /* of the scratch's */
    bool by_gain;           /* FCDP_CODEC=auto */
    bool encodes;           /* it has a base to encode from, and may gain by it */
    bool rounds;            /* FCDP_CODEC=int8 */
    bool may_decode_behind; /* FCDP_DELTA_DECODE and _JUDGE come, behind the turn */
    bool decodes_behind;    /* all members can */
    bool stores;            /* FCDP_DELTA_STORE comes; the gather is done behind it */
    bool fetches_beside;    /* this rank's shards are not there before FCDP_DELTA_JUDGE */
    /* Each part comes to the device once it is decoded, right or wrong. The device reads these behind
     * FCDP_DELTA_MEND, and copies all of it once more if a stage has set that. NULL: all of it comes behind
     * FCDP_DELTA_JUDGE, and there is no FCDP_DELTA_MEND */
    fcdp_copy_if_task *copies;
    size_t n_copies;
    unsigned n_parts, n_decoded; /* how often FCDP_DELTA_DECODE comes, and how often it has run */
    bool malformed;              /* some part */
    bool mends;                  /* the shards have crossed whole; FCDP_DELTA_MEND puts them to the places */
    bool came;                   /* all of it is in the places, or will be behind FCDP_DELTA_JUDGE or _MEND */
    uint64_t base_name;          /* 0: the base is read for it */
    uint64_t brings;             /* a fingerprint of which bytes: fcdp_delta_named's cuts */
    uint64_t name;               /* by a verdict on which all members agree; 0: by none */
    size_t wire_bytes; /* of differences, which are in the scratch; 0: the shards have crossed whole */
    fcdp_rounding rounding;
    uint64_t encode_ns;
    double decode_ns; /* a byte */
    size_t bytes;     /* of one member's shards */
    uint64_t sent_bytes;
    fcdp_delta_head *heads; /* n */
    uint32_t n_by_device;   /* cuts that the device has encoded */
    uint32_t n_cuts;
    fcdp_delta_extent cuts[];
} fcdp_delta;

/* Where each kind of bytes begins in the scratch's page-locked memory. */
typedef struct fcdp_delta_staged {
    char *own, *slots, *places, *base;
} fcdp_delta_staged;

/* ---- delta_device.c; the thread that enqueues calls them, in this order, and has acquired own bases ---- */

/* Decides what the device encodes. */
void fcdp__delta_encoder_begin(fcdp_delta *d, const fcdp_delta_cut *cuts);
/* Page-locked memory for all of the gather. */
fcdp_status fcdp__delta_staged_reserve(fcdp_delta *d, fcdp_delta_staged *staged_out) FCDP_MUST_CHECK;
/* Where the shards are fetched beside the turn: whether parts come before the verdict. */
void fcdp__delta_copies_begin(fcdp_delta *d, const fcdp_delta_cut *cuts);
/* The encoder's launch, and the copies of this rank's shards. */
fcdp_status fcdp__delta_shards_fetch(const fcdp_delta *d, const fcdp_delta_cut *cuts,
                                     fcdp_stream inter) FCDP_MUST_CHECK;
/* Behind this, on `stream`, the places may be written. */
fcdp_status fcdp__delta_places_await(const fcdp_delta *d, fcdp_stream stream) FCDP_MUST_CHECK;
/* What comes to the device: a part of the others' shards (part 0 of 1 is all of them), and this rank's
 * own. */
fcdp_status fcdp__delta_part_bring(const fcdp_delta *d, const fcdp_delta_cut *cuts, unsigned part,
                                   fcdp_stream bring) FCDP_MUST_CHECK;
fcdp_status fcdp__delta_own_bring(const fcdp_delta *d, const fcdp_delta_cut *cuts,
                                  fcdp_stream bring) FCDP_MUST_CHECK;
/* Later, and not acquired, as this does it: the gather is done, and what it kept is known. */
void fcdp__own_bases_learn(const fcdp_delta *d);

static inline bool fcdp__delta_keeps(const fcdp_delta *d) {
    bool keeps = false;
    for (const fcdp_delta_extent *c = d->cuts; c < d->cuts + d->n_cuts; c++) keeps = keeps || c->keeps;
    return keeps;
}

/* ---- rows ---- */

static inline char *fcdp__delta_row(fcdp_delta_rows of, uint32_t member) {
    if (of.own && member == of.me) return of.own;
    return of.at + (member - (of.own && member > of.me)) * of.stride_bytes;
}

static inline char *fcdp__delta_host_row(const fcdp_delta_extent *of, uint32_t copy, uint32_t member) {
    return (char *)fcdp__host_copy(of->group->block, copy) + of->host_offset_bytes +
           member * of->host_stride_bytes;
}

/* ---- parts ---- */

/* Bytes of one member's cut, whole pieces but for the cut's last one; the first of these is the member's
 * piece `piece`. */
typedef struct fcdp_delta_run {
    uint32_t member, cut;
    size_t begin, end, piece;
} fcdp_delta_run;

/* Over the pieces of the members but this one, member by member and cut by cut. */
typedef struct fcdp_delta_walk {
    const fcdp_delta *d;
    size_t first, until;  /* of these pieces */
    size_t at, in_member; /* of those before the row that comes next */
    uint32_t member, cut; /* the row */
} fcdp_delta_walk;

/* Share `i` of `n` of a part. */
fcdp_delta_walk fcdp__delta_walk(const fcdp_delta *d, unsigned part, unsigned i, unsigned n);
bool fcdp__delta_walk_next(fcdp_delta_walk *walk, fcdp_delta_run *run_out);

/* ---- what the host does in the streams' order, of delta_exchange.c ---- */

/* All are of an fcdp_delta; all but the last are on the gather's stream. This encodes this rank's shards,
 * before the lane's turn. */
void fcdp__delta_encode_run(void *gather);
/* In the lane's turn. */
void fcdp__delta_cross_run(void *gather);
/* Where it may part, behind the turn: the next part; all of them. Behind the second one the places have the
 * bytes of all members, or the scratch, where copies are. */
void fcdp__delta_decode_run(void *gather);
void fcdp__delta_judge_run(void *gather);
/* With copies, behind those of the parts: not before may the places be written anew. */
void fcdp__delta_mend_run(void *gather);
/* From the places to every copy of the groups' host memory. */
void fcdp__delta_store_run(void *gather);

void fcdp__delta_rate_note(double *rate, double measured);
/* The gather's span in the trace ends: on `stream`, or at once. */
void fcdp__delta_span_end(const fcdp_delta *d, fcdp_stream stream, uint64_t bytes);

#endif
