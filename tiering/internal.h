/* internal.h - what the files of tiering share: the state of the tiering and of a region. tiering.c creates
 * it and chooses which pages go; slot.c changes what is mapped, region.c and region_host.c what the tiers
 * hold.
 */
#ifndef FCDP_TIERING_INTERNAL_H
#define FCDP_TIERING_INTERNAL_H

#include "alloc/trace_stream.h"
#include "alloc/vrange.h"
#include "tiering/account.h"
#include "tiering/board.h"
#include "tiering/mapped.h"
#include "tiering/region.h"

#include <stdatomic.h>

enum { FCDP_PEAK_PASSES = 4, FCDP_SLOT_CLASSES = 24 /* of sizes: slot.h */ };

typedef struct fcdp_slot fcdp_slot;
typedef struct fcdp_schedule fcdp_schedule;
#define FCDP_NO_USE ((size_t)-1)

struct fcdp_tiering {
    fcdp_driver *drv;
    fcdp_pool *pool;
    bool exact;                             /* regions are unmapped when they are released */
    fcdp_stream streams[FCDP_N_DIRECTIONS]; /* one for each direction of copies */
    fcdp_trace_spans *spans;                /* of these and of other streams of the device; NULL: none */
    fcdp_counts counts;
    /* FCDP_RANK_REGION: all that follows, and what slots and regions say is under it */
    fcdp_lock lock;
    /* some region's `moving` or some slot's `dissolving` became false */
    pthread_cond_t moved;
    fcdp_region *regions;
    fcdp_slot *slots;
    uint32_t n_slots_made;                                  /* ever: their numbers */
    uint64_t clock;                                         /* last_use of what was used last */
    size_t owned_pages[FCDP_SLOT_CLASSES];                  /* in owned slots of each class, now */
    size_t peak_pages[FCDP_PEAK_PASSES][FCDP_SLOT_CLASSES]; /* at most, in the last passes; [0] is this one */
    size_t extra_pages[FCDP_SLOT_CLASSES];                  /* beyond these, with exact mapping: slot.h */
    uint64_t pages_given;                                   /* by all slots that were dissolved, ever */
    uint64_t n_reclaims;                                    /* calls of the reclaimer, ever */
    fcdp_schedule *schedule;                                /* schedule.h; NULL: FCDP_POLICY=tau */
};

/* The program may let another stream read a gathered parameter, as tensor.record_stream(stream) reports. The
 * release records an event on each stream that was noted in the use, and the pages pass on behind these
 * events too. The list only grows, by one entry for each stream of the program, and is freed with its
 * region. */
typedef struct fcdp_reader fcdp_reader;
struct fcdp_reader {
    fcdp_reader *next; /* fixed */
    fcdp_stream stream;
    fcdp_event
        done;   /* recorded at the last release of a use in which it was noted; if never, it has passed */
    bool noted; /* in this use; under the tiering's lock */
};
/* Written under the tiering's lock; read without. */
typedef _Atomic(fcdp_reader *) fcdp_readers;

/* moving: one thread is between two states and may map, unmap or evict without the lock
 *     in_use or kept => slot && slot->owner == region          slot == NULL: no pages under its addresses
 * Events, each recorded anew by every use of its kind; one that was never recorded has passed:
 *     ready   the caller's, of the last operation that filled or restored it
 *     used    on the caller's stream at release
 *     loaded, stored   of the last copies of this region on the two copy streams */
struct fcdp_region {
    fcdp_tiering *tiering;
    const fcdp_stream *streams; /* of its copies, one for each direction */
    fcdp_region *next;          /* under the lock */
    char *name;
    fcdp_layout *layout;
    uint32_t slice;  /* of layout->n_slices: this process's */
    uint32_t object; /* in the trace's table, 0: none */
    bool is_traced;
    fcdp_host_block *block;              /* NULL: spilled */
    fcdp_spilled *spilled[FCDP_N_SPANS]; /* NULL: it has a block, or the span no bytes */
    fcdp_vrange *range;
    fcdp_event ready, used, loaded, stored;
    fcdp_readers readers; /* their events, at release */
    /* fills begun, the same on every process of the node; written by the caller's thread alone */
    uint32_t n_fills;
    /* in use: `loaded` was recorded in this use, so this use is ordered behind the last user of the pages.
     * The caller's thread alone */
    bool ordered;
    /* a call has failed half way: the copy streams may have operations that `loaded` and `stored` do not
     * cover. Likewise */
    bool unrecorded;
    /* under the tiering's lock */
    fcdp_slot *slot;
    fcdp_account *account; /* of the pages of a mapped region (mapped.h); else NULL */
    bool moving, in_use, kept;
    uint64_t last_use;
    fcdp_tier tier;
    uint32_t number; /* in the schedule, as is the index of its last use, or FCDP_NO_USE */
    size_t use;
    bool planned;                         /* to be kept behind this use */
    bool dies;                            /* the next use is to fill it anew */
    uint64_t failed_call;                 /* the reclaimer's call that failed to evict it, 0: none */
    uint32_t awaited_fill;                /* streams wait for the others' READY to reach it, or have */
    uint32_t awaited_epoch[FCDP_N_SPANS]; /* and for STORED; 0: they never did */
    fcdp_span_state span[FCDP_N_SPANS];
};

/* By span: the word (board.h) that says how far a process has stored it. */
static const fcdp_board_word FCDP_STORED_WORD[FCDP_N_SPANS] = {FCDP_BOARD_STORED_0, FCDP_BOARD_STORED_1};

/* The tiering's lock. Unlock checks the region's invariants and writes its state to the trace. */
void fcdp__region_lock(fcdp_region *region);
void fcdp__region_unlock(fcdp_region *region);

size_t fcdp__region_pages(const fcdp_region *region);

/* All of these: lock held. */
/* Wait until no other thread moves the region, then move it until end_move. */
void fcdp__region_begin_move(fcdp_region *region);
void fcdp__region_end_move(fcdp_region *region);
/* The region no longer owns its slot. */
void fcdp__region_give_slot(fcdp_region *region);
/* The host has all of it, or it is invalid. */
bool fcdp__region_is_clean(const fcdp_region *region);

/* Lock not held. */
/* The pages of a mapped region that is unmapped go back; `slot` was its own. */
void fcdp__mapped_free(fcdp_tiering *tiering, fcdp_account *account, fcdp_slot *slot);
/* Wait until the device is done with everything that was enqueued for the region, so that its pages can go:
 * counted, with its time, if it is not done yet. */
fcdp_status fcdp__region_await(const fcdp_region *region) FCDP_MUST_CHECK;
/* The same, without waiting: FCDP_PENDING while it is not. */
fcdp_status fcdp__region_query(const fcdp_region *region) FCDP_MUST_CHECK;
/* For a kept region that this thread moves: this process alone writes what the host lacks, and the slot
 * becomes free. */
fcdp_status fcdp__region_evict(fcdp_region *region) FCDP_MUST_CHECK;

#endif
