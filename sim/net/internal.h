/* internal.h - what simnet's files share: the fabric's layout in shared memory, and a process's objects over
 * it.
 *
 * Shared memory is written so that a process may die at any instruction: each word has one writer (a rank, or
 * a member of a communicator), counters only grow, and the lock is robust and held for bookings alone.
 */
#ifndef FCDP_SIMNET_INTERNAL_H
#define FCDP_SIMNET_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "sim/gpu/simgpu.h"
#include "sim/net/simnet.h"

enum { SIMNET_TEXT_BYTES = 320, SIMNET_POLL_NS = 20000000 };

typedef enum rank_state { RANK_ABSENT, RANK_ATTACHED, RANK_FAILED, RANK_LEFT } rank_state;

typedef struct shared_rank {
    _Atomic uint32_t state; /* release: what is below was written before */
    int32_t pid;
    uint64_t started;             /* when the process began, as /proc tells it: a pid may come again */
    char text[SIMNET_TEXT_BYTES]; /* of its failure */
} shared_rank;

/* Of the operation that a member is in: read by others once `written` says that it is complete. */
typedef struct shared_member {
    _Atomic uint64_t written; /* rounds of which its part is in its staging memory; release, pairs with the
                                 readers' acquire */
    _Atomic uint64_t read;    /* rounds of which it has taken all parts; written <= read + 1 */
    uint64_t operation;       /* its number in the communicator */
    uint64_t bytes;
    uint64_t ready_ns;
    uint64_t shape; /* of its parts, see simnet_op */
    uint32_t kind;
} __attribute__((aligned(64))) shared_member;

typedef struct shared_comm {
    _Atomic uint32_t wake;   /* futex: something changed that its members may wait for */
    uint64_t booked;         /* operations that have their links; under the lock */
    _Atomic uint64_t end_ns; /* of the last one booked; 0: when it is done */
    shared_member members[SIMNET_MAX_RANKS];
} __attribute__((aligned(64))) shared_comm;

/* Until `free_ns` it is booked, but for the gaps that the latest bookings have left: begin < end, in the
 * order of time, the oldest is forgotten when there are too many. */
enum { SIMNET_GAPS = 16 };
typedef struct shared_gap {
    uint64_t begin_ns, end_ns;
} shared_gap;
typedef struct shared_link {
    simnet_link total;
    uint64_t free_ns;
    uint32_t n_gaps;
    shared_gap gaps[SIMNET_GAPS];
} shared_link;

typedef struct shared_rate {
    double bytes_per_ns; /* 0: unlimited */
    uint64_t latency_ns;
} shared_rate;

typedef struct shared_fabric {
    uint64_t magic;
    uint32_t nodes, ranks_per_node, ids;
    size_t staging_bytes, total_bytes, staging_offset;
    double timeout_s;
    pthread_mutex_t lock; /* rates, links, bookings */
    shared_rate rates[2]; /* by SIMNET_INTER, SIMNET_INTRA */
    shared_link links[SIMNET_MAX_RANKS][2];
    shared_rank ranks[SIMNET_MAX_RANKS];
    /* SIMNET_INTER's by local index, SIMNET_INTRA's by node, SIMNET_WORLD's; `ids` of each */
    shared_comm comms[];
} shared_fabric;

struct simnet_fabric {
    int fd;
    shared_fabric *shared;
};

typedef enum op_kind { OP_ALL_GATHER, OP_REDUCE_SCATTER } op_kind;

/* One operation between its enqueueing and its end. */
typedef struct simnet_op {
    struct simnet_op *next, *previous;
    simnet_comm *comm;
    op_kind kind;
    char *from, *to; /* a reduce-scatter's */
    size_t bytes;    /* of one member, all parts together */
    uint64_t number; /* from 0, in the communicator */
    uint64_t shape;  /* equal for members whose parts have the same sizes, in order */
    bool fails, stalls;
    bool within; /* a host function of the caller's */
    size_t n_parts;
    simnet_part parts[]; /* an all-gather's */
} simnet_op;

struct simnet_comm {
    simnet_endpoint *endpoint;
    shared_comm *shared;
    simnet_lane lane;
    uint32_t id, n, me;
    uint32_t ranks[SIMNET_MAX_RANKS]; /* of the members */
    char *staging;                    /* of member 0; the others' follow */
    uint64_t rounds;                  /* done so far; of the operation whose turn it is */
    /* under the endpoint's lock */
    uint64_t n_enqueued;
    uint64_t n_done; /* the operation of this number may run */
};

struct simnet_endpoint {
    simnet_fabric *fabric;
    fcdp_driver *drv;
    uint32_t rank;
    simnet_comm *comms; /* SIMNET_N_LANES x ids */
    uint64_t (*ready_ns)(void);
    uint64_t (*here_ns)(void);
    void (*end_at)(uint64_t end_ns);
    void (*signal)(const void *key);
    void (*observe)(const void *key);
    int (*launch)(void *stream, const struct simgpu_kernel *kernel);
    int (*announce)(const struct simgpu_access *accesses, unsigned n);
    void (*stand_in)(void);

    _Atomic uint32_t has_failed; /* status is set; also read without the lock */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* n_done, status */
    fcdp_status status;
    char text[SIMNET_TEXT_BYTES];
    simnet_op *ops;
    uint64_t until_fault; /* operations; 0: none is armed */
    simnet_fault fault;
};

/* ---- fabric.c ---- */

uint32_t simnet__members(const shared_fabric *shared, simnet_lane lane, uint32_t rank, uint32_t *ranks_out,
                         uint32_t *me_out);
shared_comm *simnet__shared_comm(shared_fabric *shared, simnet_lane lane, uint32_t rank, uint32_t id);
char *simnet__staging(shared_fabric *shared, const shared_comm *comm);
void simnet__rank_begin(shared_fabric *shared, uint32_t rank);
/* The rank ends its part in the fabric, and wakes all ranks that may wait for it. */
void simnet__rank_end(shared_fabric *shared, uint32_t rank, rank_state state, const char *text);
/* Whether a rank will not come any more, and why ("rank 2 has left"). `look`: also whether its process lives.
 * `cause_out`: what began it, `text` or a part of it. */
bool simnet__rank_gone(const shared_fabric *shared, uint32_t rank, bool look, char *text, size_t n,
                       const char **cause_out);
void simnet__wake(shared_comm *comm);
/* Wait until a rank wakes the communicator after `seen`, or for SIMNET_POLL_NS. */
void simnet__sleep(shared_comm *comm, uint32_t seen);
/* The modelled end of an operation of which all members are there: the first caller books its links. 0: it
 * has none. */
uint64_t simnet__book(shared_fabric *shared, const simnet_op *op);

/* ---- endpoint.c ---- */

/* The first failure stays. The peers are told its cause, where another rank's failure was it, so that texts
 * do not nest; NULL: its text. */
void simnet__latch(simnet_endpoint *endpoint, fcdp_status status, const char *cause, const char *format, ...)
    FCDP_PRINTF(4, 5);
/* "operation 3 of inter/0, an all-gather of 4096 bytes a rank" */
const char *simnet__describe(const simnet_op *op, char *text, size_t n);
const char *simnet__kind_name(uint32_t kind);

/* ---- collective.c ---- */

/* Takes part in the operation; on the stream's thread, in the communicator's order. */
void simnet__run(simnet_op *op);

#endif
