/* trace.c - writes a region's events and its row in the table of objects.
 *
 * Each change of state compares the new row with the last one written, so a reader that comes late finds the
 * same state in the table as one that has read all events.
 */
#include "tiering/trace.h"

static uint64_t slot_bytes(const fcdp_slot *slot, const fcdp_tiering *tiering) {
    return (uint64_t)slot->n_pages * fcdp__driver_page_bytes(tiering->drv);
}

void fcdp__region_trace_create(fcdp_region *region) {
    region->object = fcdp__trace_object_create(region->name[0] ? region->name : "(root)",
                                               region->layout->bytes);
    fcdp__trace_now(FCDP_EVENT_REGION_CREATE, region->object, region->layout->bytes,
                    fcdp__vrange_base(region->range).addr, 0);
    fcdp__trace_count(FCDP_COUNT_REGIONS, 1);
    fcdp__trace_count(FCDP_COUNT_REGION_BYTES, region->layout->bytes);
    region->is_traced = true;
}

void fcdp__region_trace_destroy(fcdp_region *region) {
    if (!region->is_traced) return;
    fcdp__trace_now(FCDP_EVENT_REGION_DESTROY, region->object, region->layout->bytes,
                    fcdp__vrange_base(region->range).addr, 0);
    fcdp__trace_count(FCDP_COUNT_REGIONS, (uint64_t)-1);
    fcdp__trace_count(FCDP_COUNT_REGION_BYTES, -(uint64_t)region->layout->bytes);
    fcdp__trace_object_destroy(region->object);
}

uint32_t fcdp__region_object(const fcdp_region *region) {
    return region->object;
}

void fcdp__region_trace(const fcdp_region *region, uint16_t kind, uint8_t cause, uint64_t a, uint64_t b) {
    fcdp__trace(&(fcdp_trace_event){.kind = kind,
                                    .cause = cause,
                                    .object = region->object,
                                    .bytes = region->layout->bytes,
                                    .a = a,
                                    .b = b});
}

void fcdp__region_trace_acquire(const fcdp_region *region, const fcdp_region *last) {
    if (!fcdp__trace_is_on(1)) return;
    const fcdp_slot *slot = region->slot;
    fcdp__region_trace(region, FCDP_EVENT_ACQUIRE, 0, slot->number, slot_bytes(slot, region->tiering));
    if (last) fcdp__region_trace(region, FCDP_EVENT_SLOT_PASSED, 0, slot->number, last->object);
}

void fcdp__slot_trace(const fcdp_slot *slot, uint16_t kind, const fcdp_region *region) {
    fcdp__trace_now(kind, region ? region->object : 0, (uint64_t)slot->n_pages * slot->page_bytes,
                    slot->number, 0);
}

/* ---- state ---- */

typedef struct state {
    uint64_t device_bytes, host_bytes, file_bytes, mapped_bytes;
    uint32_t flags;
} state;

/* As everywhere in tiering, a tier holds what it will hold once the streams have run. A mapped region's own
 * pages are host memory. */
static state state_of(const fcdp_region *region) {
    bool on_host = fcdp__region_is_mapped_on_host(region);
    bool owns = region->slot && region->slot->owner == region && !on_host;
    state now = {.flags = FCDP_OBJECT_LIVE | (region->in_use ? FCDP_OBJECT_IN_USE : 0) |
                          (region->kept && !on_host ? FCDP_OBJECT_KEPT : 0),
                 .mapped_bytes = owns ? slot_bytes(region->slot, region->tiering) : 0};
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        uint64_t bytes = region->layout->span[s].bytes;
        bool has_pages = region->span[s].on_device;
        bool is_stored = region->span[s].stored || region->span[s].whole || (on_host && has_pages);
        uint64_t *stored_bytes = region->block ? &now.host_bytes : &now.file_bytes;
        now.device_bytes += has_pages && !on_host ? bytes : 0;
        *stored_bytes += is_stored ? bytes : 0;
    }
    return now;
}

static void level_move(unsigned counter, bool before, bool now, uint64_t bytes) {
    if (before != now) fcdp__trace_count(counter, now ? bytes : -bytes);
}

/* The table is written before the event, so a reader of the event sees a state that is not older. */
void fcdp__region_trace_state(fcdp_region *region) {
    fcdp_trace_object *object = fcdp__trace_object(region->object);
    if (!object) return;
    state now = state_of(region);
    bool on_host = fcdp__region_is_mapped_on_host(region);
    uint32_t before = atomic_load_explicit(&object->state, memory_order_relaxed);
    bool same = (before & ~(uint32_t)FCDP_OBJECT_MOVING) == now.flags &&
                atomic_load_explicit(&object->device_bytes, memory_order_relaxed) == now.device_bytes &&
                atomic_load_explicit(&object->host_bytes, memory_order_relaxed) == now.host_bytes &&
                atomic_load_explicit(&object->file_bytes, memory_order_relaxed) == now.file_bytes &&
                atomic_load_explicit(&object->mapped_bytes, memory_order_relaxed) == now.mapped_bytes;
    uint32_t moving = region->moving ? FCDP_OBJECT_MOVING : 0;
    atomic_store_explicit(&object->state, now.flags | moving, memory_order_relaxed);
    if (same) return;
    atomic_store_explicit(&object->device_bytes, now.device_bytes, memory_order_relaxed);
    atomic_store_explicit(&object->host_bytes, now.host_bytes, memory_order_relaxed);
    atomic_store_explicit(&object->file_bytes, now.file_bytes, memory_order_relaxed);
    atomic_store_explicit(&object->mapped_bytes, now.mapped_bytes, memory_order_relaxed);
    uint64_t bytes = region->layout->bytes;
    level_move(FCDP_COUNT_ACQUIRED_BYTES, before & FCDP_OBJECT_IN_USE, region->in_use, bytes);
    level_move(FCDP_COUNT_KEPT_BYTES, before & FCDP_OBJECT_KEPT, now.flags & FCDP_OBJECT_KEPT, bytes);
    fcdp__trace(&(fcdp_trace_event){.kind = FCDP_EVENT_STATE,
                                    .flags = (uint8_t)((now.flags | moving) << FCDP_TRACE_STATE_SHIFT),
                                    .cause = on_host          ? FCDP_CAUSE_MAPPED
                                             : !region->block ? FCDP_CAUSE_IN_FILE
                                                              : 0,
                                    .object = region->object,
                                    .bytes = now.mapped_bytes,
                                    .a = now.device_bytes,
                                    .b = now.host_bytes + now.file_bytes});
}
