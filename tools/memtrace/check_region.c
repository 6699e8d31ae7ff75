/* check_region.c - the rules of one region's life. */
#include <inttypes.h>

#include "tools/memtrace/check_internal.h"
#include "tools/memtrace/kinds.h"

/* STORE and LOAD are written once the device's times are known. */
static bool is_late(const fcdp_trace_event *e) {
    return e->kind == FCDP_EVENT_STORE || e->kind == FCDP_EVENT_LOAD;
}

/* A region of which nothing is known yet: with all events there, it has not been created. */
static check_region *region_of(check *c, check_process *p, const fcdp_trace_event *e) {
    check_region *r = &p->regions[e->object];
    if (!r->is_known && p->is_whole)
        check_rule(c, MEMTRACE_RULE_LIFE, e->kind == FCDP_EVENT_REGION_CREATE,
                   "its region was never created");
    bool was_before = is_late(e) && e->time_ns <= r->ended_ns;
    if (r->is_known)
        check_rule(c, MEMTRACE_RULE_LIFE, r->is_alive || e->kind == FCDP_EVENT_REGION_CREATE || was_before,
                   "its region has been destroyed");
    return r;
}

static void begin_life(check *c, check_region *r, const fcdp_trace_event *e) {
    check_rule(c, MEMTRACE_RULE_LIFE, !r->is_known || !r->is_alive, "its region is there already");
    *r = (check_region){
        .is_known = true, .is_alive = true, .use_known = true, .content_known = true, .bytes = e->bytes};
}

static void free_slot(check_process *p, check_region *r) {
    if (r->slot) p->slots[r->slot - 1] = 0;
    r->slot = 0;
}

/* The region has the slot from here until it is released without being kept, or evicted. */
static void take_slot(check *c, check_process *p, check_region *r, const fcdp_trace_event *e) {
    if (e->a >= CHECK_N_SLOTS) {
        free_slot(p, r);
        return;
    }
    uint32_t *owner = &p->slots[e->a];
    check_rule(c, MEMTRACE_RULE_SLOT, !*owner || *owner == e->object,
               "slot %" PRIu64 " is that of object %u, which is in use or kept", e->a, *owner);
    if (r->slot && r->slot - 1 != e->a) free_slot(p, r);
    *owner = e->object;
    r->slot = (uint32_t)e->a + 1;
}

static void begin_use(check *c, check_process *p, check_region *r, const fcdp_trace_event *e) {
    if (r->use_known) check_rule(c, MEMTRACE_RULE_USE, !r->in_use, "its region is in use already");
    r->use_known = r->in_use = true;
    r->kept = false;
    take_slot(c, p, r, e);
}

static void end_use(check *c, check_process *p, check_region *r, const fcdp_trace_event *e) {
    if (r->use_known) check_rule(c, MEMTRACE_RULE_USE, r->in_use, "its region is not in use");
    r->use_known = true;
    r->in_use = false;
    r->kept = e->cause == FCDP_CAUSE_KEPT;
    if (!r->kept) free_slot(p, r);
}

static void evict(check *c, check_process *p, check_region *r) {
    if (r->use_known)
        check_rule(c, MEMTRACE_RULE_KEPT, r->kept && !r->in_use, "its region is %s",
                   r->in_use ? "in use" : "not on the device");
    r->use_known = true;
    r->kept = r->in_use = false;
    free_slot(p, r);
}

/* bytes valid in a tier <= size, and on_device => in_use || kept (tiering/region.h). */
static void check_tiers(check *c, check_region *r, const fcdp_trace_event *e) {
    unsigned state = (unsigned)e->flags >> FCDP_TRACE_STATE_SHIFT;
    if (r->bytes)
        check_rule(c, MEMTRACE_RULE_STATE, e->a <= r->bytes && e->b <= r->bytes,
                   "its region of %" PRIu64 " bytes has %" PRIu64 " on the device, %" PRIu64 " on the host",
                   r->bytes, e->a, e->b);
    check_rule(c, MEMTRACE_RULE_STATE, !e->a || (state & (FCDP_OBJECT_IN_USE | FCDP_OBJECT_KEPT)),
               "%" PRIu64 " bytes of its region are on the device, and it is neither in use nor kept", e->a);
    if (e->b) r->host_had = true;
    if (e->a) r->was_filled = true;
}

static void end_life(check *c, check_process *p, check_region *r, const fcdp_trace_event *e) {
    if (r->use_known) check_rule(c, MEMTRACE_RULE_USE, !r->in_use, "its region is still in use");
    free_slot(p, r);
    *r = (check_region){.is_known = true, .ended_ns = e->time_ns};
}

/* STORE and LOAD are written late, once the device's times are known: what they need must have held at any
 * time before. */
void check_event_of_region(check *c, check_process *p, const fcdp_trace_event *e) {
    if (!e->object || e->object >= FCDP_TRACE_N_OBJECTS || e->kind < FCDP_TRACE_TIERING ||
        e->kind >= FCDP_TRACE_COMM)
        return;
    check_region *r = region_of(c, p, e);
    switch (e->kind) {
    case FCDP_EVENT_REGION_CREATE: begin_life(c, r, e); break;
    case FCDP_EVENT_REGION_DESTROY: end_life(c, p, r, e); break;
    case FCDP_EVENT_ACQUIRE: begin_use(c, p, r, e); break;
    case FCDP_EVENT_RELEASE: end_use(c, p, r, e); break;
    case FCDP_EVENT_EVICT: evict(c, p, r); break;
    case FCDP_EVENT_FILL: r->was_filled = true; break;
    case FCDP_EVENT_STATE: check_tiers(c, r, e); break;
    case FCDP_EVENT_STORE:
        if (r->content_known)
            check_rule(c, MEMTRACE_RULE_STORE, r->was_filled, "its region was never filled");
        r->host_had = true;
        break;
    case FCDP_EVENT_LOAD:
        if (r->content_known) check_rule(c, MEMTRACE_RULE_LOAD, r->host_had, "the host never had its region");
        break;
    default: break;
    }
}
