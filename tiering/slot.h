/* slot.h - device pages that regions pass on to each other in stream order, without a driver call.
 *
 * A slot is one physical handle, and CUDA lets a handle be mapped at several addresses. So each region that a
 * slot has served stays mapped onto it, and when the slot passes on, the next region's first operation waits
 * on its stream for the last one's events (fcdp__region_order). In the steady state of a training step every
 * region finds the slot that it is mapped onto free, so no thread waits and the driver is not called. With
 * exact mapping a region is unmapped when it is released, so that a stale access faults. Then a use costs an
 * unmap, a map and a set-access, each of the whole handle, and the host waits for the device before the
 * unmap. A slot is pending while the device still uses a region that is mapped onto it. A region takes a slot
 * that is not pending; else, if pages are idle and at most FCDP_SLOTS_PENDING slots are pending, a new one;
 * else it waits for the slot that was released first.
 *
 *     owner != NULL: its pages are one region's, from acquire to release, or to eviction where it is kept
 *     free: owner == NULL && !dissolving
 *     n_mapped = number of regions with region->slot == this one
 *     of each class: pages of all slots <= the most that were owned at once in the last passes
 *     (while memory is plentiful), and with exact mapping FCDP_SLOTS_PENDING slots more
 * Class c has the slots of 4^c to 4^(c+1) - 1 pages, so that each may serve every region of the class that is
 * not larger than itself. Within a class, slots are exchanged for larger ones until they fit; a class never
 * loses a slot to another class.
 *
 * All of it is under the tiering's lock; a slot that is dissolving belongs to the thread that takes it apart.
 */
#ifndef FCDP_SLOT_H
#define FCDP_SLOT_H

#include "tiering/internal.h"

/* how much larger than a region a slot may be that it takes over: its range is so long */
enum { FCDP_SLOT_RATIO = 4 };
/* with exact mapping, of a class: slots that only the device still uses, before the host waits for one */
enum { FCDP_SLOTS_PENDING = 2 };

struct fcdp_slot {
    fcdp_slot *next;
    fcdp_phys phys;
    size_t n_pages, page_bytes;
    uint32_t number; /* 1, 2, ...: in the trace */
    fcdp_region *owner;
    /* its events come after all that was done with the pages before this use; NULL: nothing is pending */
    fcdp_region *last;
    uint64_t last_use; /* the tiering's clock */
    size_t n_mapped;
    uint64_t failed_call; /* the reclaimer's call in which it failed to dissolve, 0: none */
    bool dissolving;
    bool on_host; /* host memory, its owner's for life, and not in the tiering's list (mapped.h) */
};

/* Make `region` the owner of a free slot: of the one that it is mapped onto, else of the smallest that is
 * large enough, the longest unused first; with exact mapping of one that is not pending, or of a new one.
 * NULL: none is free. Lock held on entry and exit, not in between; this thread moves the region. */
fcdp_slot *fcdp__slot_choose(fcdp_region *region);
/* End the ownership of the slot. Lock held. */
void fcdp__slot_disown(fcdp_slot *slot);
/* A new slot, owned by `region`. Lock not held. FCDP_ERR_NO_DEVICE_MEM when no more pages can be
 * reclaimed. */
fcdp_status fcdp__slot_make(fcdp_region *region, fcdp_slot **slot_out) FCDP_MUST_CHECK;
/* Map the region onto the slot that it owns. It is unmapped from another slot first; with exact mapping so
 * are the slot's other regions. The host waits for their events if it must. Lock not held; this thread
 * moves the region. */
fcdp_status fcdp__slot_map(fcdp_region *region, fcdp_slot *slot) FCDP_MUST_CHECK;
/* With exact mapping: unmap the released region if the device is done with it already. Lock not held. */
void fcdp__slot_unmap_if_done(fcdp_region *region);
/* Unmap the region once its operations are over (waits for them). Lock not held; this thread moves the
 * region. */
fcdp_status fcdp__slot_unmap(fcdp_region *region) FCDP_MUST_CHECK;
/* Give the free slot's handle back to the pool. Lock held on entry and exit, not in between. */
fcdp_status fcdp__slot_dissolve(fcdp_tiering *tiering, fcdp_slot *slot) FCDP_MUST_CHECK;
/* `gone` has left the list. If some slot is now superfluous, dissolve one that no region is mapped onto. Lock
 * held on entry and exit, not in between. */
void fcdp__slot_drop_spare(const fcdp_region *gone);
/* The free slot that has been unused longest, except those that failed to dissolve in the reclaimer's `call`.
 * NULL: none. Lock held. */
fcdp_slot *fcdp__slot_oldest_free(const fcdp_tiering *tiering, uint64_t call);
/* Dissolve the free slots beyond what the last passes needed at once, class by class. Lock not held. */
void fcdp__slots_trim(fcdp_tiering *tiering);

#endif
