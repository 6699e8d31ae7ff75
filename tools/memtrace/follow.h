/* follow.h - what one live process does with memory: its segment, read again and again.
 *
 * The objects and counters of a segment say what holds now, its events what came before and why. A
 * follower reads both and keeps: the state of every region, the bytes it moved over each link, waits by
 * cause, the last evictions, and what was resident when most device memory was held. Samples of that make
 * the history (model.h).
 *
 * One thread. The segment is the process's: it changes while it is read, and nothing here waits for it.
 */
#ifndef MEMTRACE_FOLLOW_H
#define MEMTRACE_FOLLOW_H

#include "tools/memtrace/attach.h"
#include "tools/memtrace/series.h"

enum { MEMTRACE_N_NOTES = 64 }; /* evictions, sleeps, shortages and failures that are remembered */

/* Waits by what for: 0 is the compute stream's, for a region; the last is for causes that are not known
 * here. */
enum { MEMTRACE_STALL, MEMTRACE_FIRST_CAUSE, MEMTRACE_OTHER_CAUSE = 7, MEMTRACE_N_WAITS };
/* FCDP_CAUSE_FOR_... of a wait of the program's threads; 0: of the two others. */
uint8_t memtrace_wait_cause(unsigned wait);

/* A region that the process has, or had: its id is its place in the follower's list. */
typedef struct memtrace_live_region {
    uint64_t bytes;
    char name[FCDP_TRACE_NAME_BYTES];
} memtrace_live_region;

/* Where a region's bytes are, and what it has moved since the first event that was read. */
typedef struct memtrace_live_place {
    uint32_t region; /* its id */
    uint32_t state;  /* FCDP_OBJECT_... */
    uint32_t lives;  /* FCDP_LIVES_... */
    uint64_t device_bytes, host_bytes, file_bytes;
    uint64_t moved[MEMTRACE_N_LINKS];
    uint32_t n_evictions;
} memtrace_live_place;

/* A note on what a user may want to know. */
typedef struct memtrace_live_note {
    uint64_t time_ns, bytes, a, b;
    uint32_t region; /* its id, or UINT32_MAX */
    uint16_t kind;
    uint8_t cause;
} memtrace_live_note;

/* What held at a time. */
typedef struct memtrace_sample {
    size_t sample_bytes; /* all of it */
    uint64_t time_ns;
    uint32_t step;       /* so far */
    uint32_t first_step; /* when the first event that was read was written */
    uint64_t first_end_ns,
        step_ns;        /* when the first step that was seen ended, and the last one; 0: none was */
    uint32_t first_end; /* the number of that first one */
    uint32_t n_places;
    uint64_t head, n_lost, n_dropped; /* events: written; overwritten before they were read; never written */
    uint64_t held_bytes[MEMTRACE_N_HOLDERS];
    uint64_t waited_ns[MEMTRACE_N_WAITS];
    uint64_t counters[FCDP_TRACE_N_COUNTERS];
    memtrace_live_place places[]; /* of the regions that are live, in the order of their ids */
} memtrace_sample;

typedef struct memtrace_follower memtrace_follower;

/* `segment` stays the caller's and attached until the follower is destroyed. NULL: no memory. */
memtrace_follower *memtrace_follower_create(const memtrace_segment *segment);
void memtrace_follower_destroy(memtrace_follower *follower); /* NULL: nothing */

/* Reads what is new. With `is_last` it reads all, since nothing more will be written. The sample is the
 * caller's, to free(). NULL: no memory. */
memtrace_sample *memtrace_follower_poll(memtrace_follower *follower, uint64_t now_ns, bool is_last);

/* When most device memory was held, of what the ring still had when the follower began, and since. Its
 * counters are those of the last poll. NULL: nothing was ever held. The follower's, until the next poll. */
const memtrace_sample *memtrace_follower_peak(const memtrace_follower *follower);
/* `id` < n_regions. */
const memtrace_live_region *memtrace_follower_region(const memtrace_follower *follower, uint32_t id);
/* The last MEMTRACE_N_NOTES: i 0 is the newest. NULL: there are no more. */
const memtrace_live_note *memtrace_follower_note(const memtrace_follower *follower, size_t i);

#endif
