/* trace_format.h - the layout of a trace, in the segment that a process shares or in a file.
 *
 * A process writes its events into a segment of shared memory: an unnamed memfd, mode 0600, called
 * "fcdp-trace" in /proc/PID/fd and /proc/PID/maps. Readers of the same user find it there and map it
 * read-only; when the process is gone, a reader that has it mapped still reads all of it. The segment:
 *
 *     fcdp_trace_header | counters | objects | ring of events
 *
 * The ring keeps the last `ring_events` events; writers overwrite the oldest and never wait. The
 * counters and objects say what holds now, so that a reader that comes late, or has lost events, knows it
 * too.
 *
 * A file is a sequence of chunks, each with a header that says what it is and how long, so that a file
 * whose end is missing is read up to its last whole chunk. The chunks of one process are in the order of
 * their times. The last one is an index of all others. Numbers are little-endian.
 *
 *     fcdp_trace_file_header | chunk ... | index chunk | fcdp_trace_file_trailer
 *
 * A version that changes a meaning changes FCDP_TRACE_VERSION; a reader refuses what it does not know. New
 * kinds, counters and chunk types may come without that: a reader shows those it does not know by number.
 */
#ifndef FCDP_TRACE_FORMAT_H
#define FCDP_TRACE_FORMAT_H

#include <stdatomic.h>
#include <stdint.h>

#define FCDP_TRACE_MAGIC "FCDPTRC"      /* with its 0: 8 bytes, of a segment */
#define FCDP_TRACE_FILE_MAGIC "FCDPTRF" /* of a file */
#define FCDP_TRACE_MEMFD "fcdp-trace"

enum {
    FCDP_TRACE_VERSION = 1,
    FCDP_TRACE_N_COUNTERS = 128,
    FCDP_TRACE_N_OBJECTS = 4096, /* object 0 stands for none, and for those that found no place */
    FCDP_TRACE_NAME_BYTES = 160,
    FCDP_TRACE_LABEL_BYTES = 256,
    FCDP_TRACE_EVENT_BYTES = 64,
};

/* ---- what a layer says of its work ---- */

/* Every layer lists its events, causes, counters and streams in its trace_events.h. Readers, the
 * documentation and checks are made of the same rows:
 *
 *     FCDP_<LAYER>_EVENTS(X)    X(NAME, number, "name", "what a is", "what b is", "what it says")
 *     FCDP_<LAYER>_CAUSES(X)    X(NAME, number, "name", "what it says")
 *     FCDP_<LAYER>_COUNTERS(X)  X(NAME, number, "name", UNIT, WHAT, "what it says")
 *     FCDP_<LAYER>_STREAMS(X)   X(NAME, number, "name", "what runs on it")
 *
 * UNIT is BYTES, NS or COUNT. WHAT is SUM (only grows), NODE_SUM (a sum that each rank of a node counts for
 * the whole node: readers must not add the ranks' numbers), LEVEL (what holds now) or PEAK. A number is of
 * the whole process, so a reader needs no layer to understand one; each layer has 32 of each sort
 * (FCDP_TRACE_ALLOC, ...). "" as what a or b is: nothing. An event's span is [time_ns, time_ns +
 * duration_ns]; a moment has duration 0. */

/* Numbers by name: FCDP_EVENT_MAP, FCDP_CAUSE_RECLAIM_EVICT, FCDP_COUNT_MAPS, FCDP_TRACK_TO_HOST. */
#define FCDP_AS_EVENT(NAME, number, ...) FCDP_EVENT_##NAME = (number),
#define FCDP_AS_CAUSE(NAME, number, ...) FCDP_CAUSE_##NAME = (number),
#define FCDP_AS_COUNTER(NAME, number, ...) FCDP_COUNT_##NAME = (number),
#define FCDP_AS_TRACK(NAME, number, ...) FCDP_TRACK_##NAME = (number),

/* Layers number their kinds, causes, counters and streams from a base of their own (their trace_events.h). */
enum { FCDP_TRACE_ALLOC = 0, FCDP_TRACE_TIERING = 32, FCDP_TRACE_COMM = 64, FCDP_TRACE_PLUGIN = 96 };

/* ---- the segment ---- */

/* One event. `stamp` guards it: 2 n + 1 while event n is written, 2 n + 2 once it is whole; in a file it is
 * n. All words are atomic, stored with release. A reader loads the stamp, then the other words, then the
 * stamp again, all with acquire: where the two differ it has read what was just overwritten, and drops it. */
typedef struct fcdp_trace_event {
    uint64_t stamp;
    uint64_t time_ns;     /* CLOCK_MONOTONIC: when it began */
    uint64_t duration_ns; /* 0: a moment */
    uint64_t bytes;
    uint16_t kind;   /* of FCDP_..._EVENTS */
    uint8_t cause;   /* of FCDP_..._CAUSES; 0: none */
    uint8_t flags;   /* FCDP_TRACE_ON_STREAM, ... */
    uint32_t object; /* in the table of objects */
    uint32_t step;   /* the header's, when it was written; of a stream's span: when it was enqueued */
    uint32_t thread; /* of the process: gettid(); of a stream's span: of FCDP_..._STREAMS */
    uint64_t a, b;   /* their meaning is the kind's */
} fcdp_trace_event;
_Static_assert(sizeof(fcdp_trace_event) == FCDP_TRACE_EVENT_BYTES, "the format");

enum {
    FCDP_TRACE_ON_STREAM = 1,   /* a stream's: `thread` says which, and the times are the device's; where
                                 * they are not known, the host's when it was enqueued, and duration 0 */
    FCDP_TRACE_BACKWARD = 2,    /* in a backward pass */
    FCDP_TRACE_SLICE = 4,       /* of a part of the spans alone: this rank's, or the others' */
    FCDP_TRACE_STATE_SHIFT = 3, /* of STATE: the five bits above are the object's state, FCDP_OBJECT_... */
};

/* The subject of events: a region, by its module's name. The object's owner writes the atomics, which say
 * what holds now. `generation` guards the words that never change, as a stamp guards an event: a reader loads
 * it before and after the other words, all with acquire. */
enum {
    FCDP_OBJECT_LIVE = 1,      /* in use: neither free nor gone */
    FCDP_OBJECT_IN_USE = 2,    /* from acquire to release */
    FCDP_OBJECT_KEPT = 4,      /* on the device between uses */
    FCDP_OBJECT_MOVING = 8,    /* between two states */
    FCDP_OBJECT_BYPASSED = 16, /* left to FSDP */
    FCDP_OBJECT_TEXT = 32,     /* alone: not a region. Its name is a text, of which `why` has the rest */
};
/* Of `lives`; 0: in host memory, and on the device while there is room. */
enum {
    FCDP_LIVES_IN_FILE = 1, /* for want of host memory (FCDP_SPILL_DIR) */
    FCDP_LIVES_MAPPED = 2,  /* in host memory alone, which is under its addresses (FCDP_HOST_MAP) */
    FCDP_LIVES_ON_DISK = 4, /* its frozen span is also on the node's disk (FCDP_CACHE_DIR) */
};
typedef struct fcdp_trace_object {
    _Atomic uint32_t generation; /* odd: its name is being written. Its number may serve again: larger by 2 */
    _Atomic uint32_t state;      /* FCDP_OBJECT_... */
    _Atomic uint64_t bytes;      /* its size */
    _Atomic uint64_t device_bytes, host_bytes, file_bytes; /* valid ones in each tier; 0 in all: nowhere */
    _Atomic uint64_t mapped_bytes; /* device pages under its addresses that are its own */
    _Atomic uint64_t shard_group;  /* a number for the ranks that share it, and for no others; 0: not said */
    _Atomic uint32_t why;          /* BYPASSED: the object whose text says why; 0: it is not known */
    _Atomic uint32_t lives;        /* FCDP_LIVES_...: where, while it is not in use */
    _Atomic uint64_t trainable_bytes; /* of its size */
    /* unshards so far; sent between nodes, per node: by flat gathers in their place, by its own gathers */
    _Atomic uint64_t n_uses, plain_bytes, gather_bytes;
    char name[FCDP_TRACE_NAME_BYTES];
} fcdp_trace_object;
_Static_assert(sizeof(fcdp_trace_object) == 256, "the format");

typedef struct fcdp_trace_header {
    char magic[8];
    uint32_t version, header_bytes;
    uint32_t n_counters, n_objects;
    uint64_t ring_events;                                     /* a power of two */
    uint64_t counters_at, objects_at, ring_at, segment_bytes; /* from the start of the segment */
    int32_t pid;
    uint32_t level;                             /* FCDP_TRACE */
    uint64_t start_monotonic_ns, start_real_ns; /* the same moment on two clocks */
    _Atomic int32_t rank, world_size;           /* of the job; -1, 0: not known yet */
    _Atomic int32_t node, n_nodes, local_rank, node_size;
    _Atomic uint64_t page_bytes, device_budget_bytes;
    _Atomic uint32_t step;  /* optimizer steps so far */
    _Atomic uint32_t ended; /* the process has closed it; otherwise it was killed, or runs */
    char host[64];          /* of gethostname() */
    char device[64];        /* the device's name, "simulated" for simgpu */
    char command[FCDP_TRACE_LABEL_BYTES];
    _Alignas(64) _Atomic uint64_t head; /* events begun so far */
    /* events that found their place still being written, a whole ring behind: not written */
    _Alignas(64) _Atomic uint64_t n_dropped;
} fcdp_trace_header;
_Static_assert(sizeof(fcdp_trace_header) <= 4096, "counters_at");

/* ---- files ---- */

typedef struct fcdp_trace_file_header {
    char magic[8];
    uint32_t version, header_bytes;
    uint64_t created_real_ns;
    uint64_t reserved[5];
} fcdp_trace_file_header;

typedef enum fcdp_trace_chunk_type {
    /* a fcdp_trace_header, as it was: the first chunk of its process; again where it changed */
    FCDP_CHUNK_PROCESS = 1,
    FCDP_CHUNK_STATE =
        2, /* a fcdp_trace_state, the counters, the objects that are live: what held then; and, with
                            * state 0, those that came and went since the state before */
    FCDP_CHUNK_EVENTS = 3, /* fcdp_trace_event ..., in the order of their numbers */
    FCDP_CHUNK_END = 4,    /* as STATE, the last: the process is gone */
    FCDP_CHUNK_INDEX = 5,  /* fcdp_trace_index_entry ... of all chunks before */
} fcdp_trace_chunk_type;

/* Before each chunk's `bytes`; both are multiples of 64, the rest being zeroes. */
typedef struct fcdp_trace_chunk {
    char magic[4]; /* "chnk" */
    uint16_t type;
    uint16_t reserved;
    uint32_t process;           /* 0, 1, ...: in the order of their PROCESS chunks */
    uint32_t n;                 /* of events, objects, or entries */
    uint64_t bytes;             /* of the body, header not counted */
    uint64_t first_ns, last_ns; /* of its events' ends; equal for a state */
    uint32_t first_step, last_step;
    uint64_t checksum;        /* XXH3_64bits of the body */
    uint64_t header_checksum; /* XXH3_64bits of the 56 bytes before */
} fcdp_trace_chunk;
_Static_assert(sizeof(fcdp_trace_chunk) == 64, "the format");

typedef struct fcdp_trace_state {
    uint64_t time_ns;
    uint64_t head, n_dropped; /* the ring's then */
    uint64_t n_lost;          /* events that were overwritten before the recorder read them, so far */
    uint32_t step, ended;     /* the header's then */
    uint32_t n_counters, n_objects;
    uint64_t reserved[2];
} fcdp_trace_state; /* then n_counters numbers, then n_objects of {uint64_t number; fcdp_trace_object} */
_Static_assert(sizeof(fcdp_trace_state) == 64, "the format");

typedef struct fcdp_trace_index_entry {
    uint64_t at; /* of the chunk's header, in the file */
    fcdp_trace_chunk chunk;
} fcdp_trace_index_entry;

typedef struct fcdp_trace_file_trailer {
    uint64_t index_at;
    char magic[8]; /* FCDP_TRACE_FILE_MAGIC again */
} fcdp_trace_file_trailer;

#endif
