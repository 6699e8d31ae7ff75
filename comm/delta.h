/* delta.h - a gather between the nodes that brings what has changed since the last one.
 *
 * After a gather every member of an inter lane has what each of them sent: the base of the next gather.
 * Then a member need only send the difference between its shards and their base (codec.h). The others add it
 * to the base, which is read where it lies, in host memory or in the region:
 *
 *     before the turn   this rank encodes its shards
 *     heads             an all-gather of a few words a member: the size of what it encoded, the name of the
 *                       base of all members
 *     differences       an all-gather of the largest size
 *     decoding          where the host does not compute the model, behind the turn
 *     verdict           an all-gather of a word a member: the name of all members' bytes, as it has them,
 *                       which is that of the next base; 0: they are not decoded
 *
 * A name is a fingerprint of the bytes of all members, one behind the other: of its own shards as a member
 * has read them, and of the others' as it has decoded them. So it comes out the same on all members only if
 * the bytes do. A base is read for its name only if no verdict has named it.
 *
 * All members see the same heads and verdicts, so they go on alike. If one of them has no base, or another
 * one, or if its differences would be no smaller, the shards cross whole; so they do behind a verdict that
 * some member's bytes are others. Bytes of a wrong base reach no use.
 *
 * With FCDP_CODEC=auto, for models whose compute the host is, a group's differences cross only while all
 * members together expect to gain by it, from the rates of the link and of the codec that they have measured.
 * Where they would lose even if nothing had changed, they do not encode, and measure the link anew.
 *
 * With FCDP_CODEC=int8 shards cross rounded (int8.h), in the same frame, and need no base. A rank puts what
 * it decodes of its own wire into its own place, so the region has the same bytes on every rank: not what the
 * shards are. If they are to cross whole, it is these bytes that do.
 *
 * The host decodes, over a transport that can exchange host memory, and it encodes where the device has no
 * own base (own_base.h). Where the model computes on a device, this rank's shards, and what the device has
 * encoded, are written to page-locked memory, which needs none of the region's pages: before the turn, or,
 * where the host needs the shards only to name and store them, those beside it, on a stream of their own. If
 * shards are to cross whole then, they do so behind the turn, with the verdict. Behind the turn, what came of
 * the other members goes from there to its places on the device, and this rank's own shards go there within
 * the device. Where the shards come beside the turn, it goes part by part, each once it is decoded, before
 * the verdict. If shards cross whole then, they come to the places behind these copies, and the device copies
 * all of it once more (copy_if.h). The node's host memory, where the base is, gets all of it from page-locked
 * memory too, by the host: nothing is stored over PCIe, and a use does not wait for this rank's store (where
 * restores are whole, for those of the node's other ranks). Small groups that are gathered together, mapped
 * groups and spans that are stale in part are stored as ever; of the first two, and of what is frozen, the
 * host encodes. Rounded numbers are for models whose compute the host is (host_computes), and whose ranks
 * restore the whole.
 *
 * By slices, other ranks of the node may have stored parts of the base (a gather of differences stores its
 * lane's pieces; any other, and a use's end, slices). The stage that encodes looks whether the words of all
 * of them say so, and waits for none: a rank that keeps the group on its device may never store it, so
 * then there is no base. What these ranks store of the next fill as slices, they store behind the node's
 * all-gather of it, to which this rank brings its pieces behind the gather, and so behind its last read of
 * the base; and as pieces, it is none of this rank's base.
 */
#ifndef FCDP_DELTA_H
#define FCDP_DELTA_H

#include <stdatomic.h>

#include "alloc/pinned.h"
#include "alloc/team.h"
#include "alloc/worker.h"
#include "comm/group.h"
#include "comm/int8.h"
#include "comm/transport.h"

/* ---- what others keep for this file ---- */

/* What the host does for a gather. */
typedef enum fcdp_delta_stage {
    FCDP_DELTA_ENCODE,
    FCDP_DELTA_CROSS,
    FCDP_DELTA_DECODE,
    FCDP_DELTA_JUDGE,
    FCDP_DELTA_MEND,
    FCDP_DELTA_STORE,
    FCDP_DELTA_N_STAGES
} fcdp_delta_stage;

enum {
    FCDP_DELTA_N_ROOMS = 2,
    /* What is decoded one after another, and brought to the device meanwhile */
    FCDP_DELTA_MOST_PARTS = 2
};

/* A stream's, whose gathers use it one after another. All zeroes at first. */
typedef struct fcdp_delta_scratch {
    char *own, *all, *prints; /* what this rank sends; what all members send; prints of their shards */
    size_t own_bytes, all_bytes, prints_bytes;
    /* Page-locked, where the device's memory is not the host's: two rooms of own_room_bytes for this rank's
     * shards, which gathers take in turn; what the device has encoded, in slots_room_bytes; two rooms for the
     * others' places, likewise; then a base that the device alone has. Each room has its place whatever the
     * gather's size: others may still be in use */
    fcdp_pinned staged;
    size_t own_room_bytes, slots_room_bytes, places_room_bytes;
    uint32_t room; /* the last gather's */
    /* the last gather's: the device has encoded, the shards are fetched, the places are filled. And of one
     * whose parts come to the device before the verdict: each is decoded, all are copied */
    fcdp_event encoded, fetched, arrived, decoded[FCDP_DELTA_MOST_PARTS], parts_brought;
    /* the last gather of each room: its places have been copied to the device, and stored, if they were to
     * be */
    fcdp_event brought[FCDP_DELTA_N_ROOMS], stored[FCDP_DELTA_N_ROOMS];
} fcdp_delta_scratch;
/* All streams have ended. */
void fcdp__delta_scratch_free(fcdp_delta_scratch *scratch, fcdp_driver *drv);

/* What a gather's verdict has named. Written and read by the thread that enqueues. */
typedef struct fcdp_delta_named {
    uint64_t name;       /* 0: nothing */
    uint64_t cuts;       /* a fingerprint of which extents' bytes, of which fills */
    bool stored_by_host; /* by fcdp__delta_store: this rank itself has put all of them in host memory */
} fcdp_delta_named;

/* A group's, or of what a shard group gathers together. Written in the lane's turn, from what all members
 * have in common; read once the gathers have ended: so the same on all members. */
typedef struct fcdp_delta_state {
    uint32_t rest, rests_left; /* the last rest: gathers without heads; those of it from here on */
    uint32_t rest_before;      /* the one before the last gathers with heads */
    double wire;            /* bytes of differences by bytes of shards, as last made; 0: never; 1: too many */
    int64_t gain_ns;        /* that all members expected of the last gathers, together */
    int64_t most_ns;        /* and would have if nothing had changed */
    bool is_hopeless;       /* that was a loss: the next ones measure the link alone */
    bool is_primed;         /* it was gathered before: there is a base */
    fcdp_delta_named named; /* this rank's own */
    struct fcdp_delta *last; /* the last gathers with heads; NULL: they have been seen to end */
} fcdp_delta_state;

/* A shard group's; 0: not measured yet. Written in the lane's turn. Where decoding is behind that, decode_ns
 * is written by the thread that enqueues, once the gather is done. */
typedef struct fcdp_delta_rates {
    double link_ns, encode_ns, decode_ns; /* a byte */
    double latency_ns;                    /* an exchange of a few bytes, between members that are there */
} fcdp_delta_rates;

/* Once in a process: why what FCDP_CODEC asks for changes nothing here. */
void fcdp__delta_warn(const fcdp_comm *comm);

/* ---- rounded groups ---- */

/* Is each gather of it one of rounded numbers, but for extents of other kinds? The same on every rank. What
 * is in its region is not what the shards are, then. */
bool fcdp__group_rounds(const fcdp_group *group);
/* Is extent i rounded? */
bool fcdp__extent_rounds(const fcdp_group *group, uint32_t i);
/* May a gather of it be one of differences, or of rounded numbers, now or later? The same on every rank. */
bool fcdp__delta_may(const fcdp_group *group);
/* Can gathers of several groups have this one among them? Not with FCDP_CODEC=int8, if others of its shard
 * group are rounded and this one cannot be. */
bool fcdp__delta_joins(const fcdp_group *group);

/* ---- gathers ---- */

/* The base of a gather of the group's span that comes next, before its fill begins. */
fcdp_base fcdp__delta_base(fcdp_group *group, uint32_t span);

/* A stale extent in one gather. */
typedef struct fcdp_delta_cut {
    fcdp_group *group;
    uint32_t extent;
    fcdp_dptr shard; /* this rank's */
    fcdp_part part;  /* where the members' lie, on the device */
    fcdp_base base;  /* of its span. On the device: in the part */
} fcdp_delta_cut;
typedef struct fcdp_delta_way {
    fcdp_stream inter; /* behind the shards; ordered, where a base is on the device or the host computes */
    fcdp_stream bring; /* ordered: what came is copied to the parts here. `inter` where the host computes */
    bool stores;       /* fcdp__delta_store comes next */
} fcdp_delta_way;
/* In place of the copies of this rank's shards to their places, and of the all-gather of the cuts' parts; the
 * cuts of a group lie side by side. `state` lasts until the gather has ended, as the groups do. */
fcdp_status fcdp__delta_gather(fcdp_comm *comm, fcdp_delta_state *state, const fcdp_delta_cut *cuts, size_t n,
                               const fcdp_delta_way *way) FCDP_MUST_CHECK;
/* In place of the store of what the group's gather has brought to the spans of `span_mask`: from the host's
 * memory, and not from the device. The region's `stored` is recorded. */
fcdp_status fcdp__delta_store(fcdp_group *group, uint32_t span_mask) FCDP_MUST_CHECK;

/* ---- for moves.c ---- */

typedef struct fcdp_use fcdp_use;

/* Do the group's gathers of differences store what comes without the device? The same on every rank. */
bool fcdp__delta_may_store(const fcdp_group *group);
/* And is the next gather one of them, if it fills whole spans? */
bool fcdp__delta_stores_next(const fcdp_group *group);
/* Is this gather one of differences, or asks for one? The same on every member of the lane. Where the group's
 * last gather is still under way, the host waits for its end. */
fcdp_status fcdp__delta_serves(fcdp_use *use, bool *serves_out) FCDP_MUST_CHECK;

/* ---- for coalesce.c ---- */

/* As fcdp__delta_serves, for the gathers of these groups together that come next. Where the last ones are
 * still under way, the host waits for their end. */
fcdp_status fcdp__deltas_serve(fcdp_group *const *groups, uint32_t n, bool *serves_out) FCDP_MUST_CHECK;

/* ---- ends ---- */

/* The group ends, and its gathers have ended; those of the comm have. */
void fcdp__delta_forget(fcdp_group *group);
void fcdp__deltas_free(fcdp_comm *comm);

#endif
