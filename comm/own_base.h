/* own_base.h - this rank's shards as its last gather sent them, kept on the device: the base from which a
 * kernel encodes the next differences (codec_kernel.h), where the base of all members is in host memory. And
 * the tasks of that kernel, and of the one that copies what came whole in the end (copy_if.h).
 *
 * Of what is trainable, they are W/G bytes of the device, of pages that nothing else wants: none are
 * reclaimed for them, as many more must be spare, and a taker that lacks pages gets theirs. Without them the
 * host encodes.
 *
 *     an own base is known  =>  its bytes have its fingerprint, once the stream has passed what wrote them
 *
 * Whether it is the base that the members have, is known by the epoch (delta_device.c), or found out by that
 * fingerprint (delta_exchange.c).
 *
 * Of one set of streams, and so of one thread at a time, which has them from fcdp__own_bases_acquire to
 * fcdp__own_bases_release. While no thread has them, any may reclaim the pages.
 */
#ifndef FCDP_OWN_BASE_H
#define FCDP_OWN_BASE_H

#include "alloc/pinned.h"
#include "comm/codec_kernel.h"
#include "comm/copy_if.h"
#include "comm/engine.h"
#include "comm/lent.h"

typedef struct fcdp_stream_set fcdp_stream_set;
typedef struct fcdp_group fcdp_group;

typedef struct fcdp_own_bases {
    fcdp_lent pages;
    /* fcdp_own_task: each group's own, as its last gather has ended. They outlast the pages */
    fcdp_pinned tasks;
    uint64_t generation; /* raised when the pages come: what groups know of others is void */
    unsigned n_rests;    /* passes to come in which they are not asked for */
    bool incomplete;     /* a gather has failed half way: operations may be behind the events */
    enum { FCDP_KERNEL_UNTRIED, FCDP_KERNEL_LOADED, FCDP_KERNEL_LACKS } has_kernel;
    bool lacks_memory; /* for what the kernel writes */
    fcdp_kernel kernel;
    fcdp_kernel copy_if; /* loaded with the kernel, unless the driver lacks it */
} fcdp_own_bases;

typedef union fcdp_own_task {
    fcdp_delta_task encode;
    fcdp_copy_if_task copy;
} fcdp_own_task;
_Static_assert(sizeof(fcdp_delta_task) == sizeof(fcdp_copy_if_task), "a kernel's tasks follow one another");

/* Of one extent. */
typedef struct fcdp_own_base {
    bool has_place, known;
    uint32_t epoch;       /* known: the fill that sent these bytes (tiering/region.h) */
    size_t offset_bytes;  /* in the range */
    uint64_t fingerprint; /* fcdp__fingerprint_by_host */
} fcdp_own_base;

/* A group's. */
typedef struct fcdp_own_group {
    uint64_t generation;           /* of all this; 0: it has none */
    size_t first_task, first_copy; /* those that encode its shards, and that copy the other members' */
    fcdp_own_base *extents;        /* NULL: none yet */
    fcdp_event copied;             /* behind the copies' last launch; NULL: there was none */
    bool copies_are_lost;          /* there may be a launch behind `copied`: they are used no more */
} fcdp_own_group;

void fcdp__own_bases_init(fcdp_own_bases *own);
/* The pool asks it no more. */
void fcdp__own_bases_destroy(fcdp_stream_set *set);

/* Waits until no other thread has them. */
void fcdp__own_bases_acquire(fcdp_own_bases *own);
void fcdp__own_bases_release(fcdp_own_bases *own);

/* Acquired: sees to the kernel. False: the device has none. */
bool fcdp__own_bases_kernel(fcdp_stream_set *set);
/* Acquired: there is no memory for what it writes, so from here on it is not used. */
void fcdp__own_bases_lack(fcdp_stream_set *set);
/* Acquired, with the kernel: sees to the group's place among the pages. False: there are none for it. */
bool fcdp__own_bases_reserve(fcdp_group *group);
/* Acquired and reserved. */
fcdp_dptr fcdp__own_base_at(const fcdp_group *group, uint32_t extent);

/* Acquired and reserved: the group's tasks of copies. The host waits until the last launch has read them.
 * NULL: they cannot be used. Else they are lost, unless the caller launches the first n of them. */
fcdp_copy_if_task *fcdp__own_copies_take(fcdp_group *group);
fcdp_status fcdp__own_copies_launch(fcdp_group *group, size_t n, fcdp_stream stream) FCDP_MUST_CHECK;
/* Acquired: a gather has failed half way. */
void fcdp__own_bases_fail(fcdp_stream_set *set);
/* The group ends. */
void fcdp__own_group_free(fcdp_own_group *own, fcdp_driver *drv);

/* A pass begins. */
void fcdp__own_bases_begin_pass(fcdp_stream_set *set);
/* Nothing is known any more: the pages go. */
void fcdp__own_bases_trim(fcdp_stream_set *set);
/* Pages that went, all or nothing: a thread that has them is not waited for, nor the device, where there are
 * several sets. */
size_t fcdp__own_bases_reclaim(fcdp_stream_set *set);
/* The pages that policy does not count, as whoever wants them gets them. */
size_t fcdp__own_bases_idle(fcdp_stream_set *set);

#endif
