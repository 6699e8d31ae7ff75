/* check_sums.c - the rules of sums: pools, holders, counters. */
#include <inttypes.h>

#include "tools/memtrace/check_internal.h"
#include "tools/memtrace/kinds.h"

/* Compare the number that the event reports with the one that is known, if any; from here on it is known.
 * False: the rule is broken. */
static bool moves_to(check_known *known, uint64_t change, bool is_more, uint64_t now) {
    bool holds = !known->is_known || now == (is_more ? known->value + change : known->value - change);
    *known = (check_known){true, now};
    return holds;
}

static void check_created(check *c, check_process *p, size_t pool, const fcdp_trace_event *e) {
    uint64_t before = p->created[pool].value;
    bool is_more = e->kind == FCDP_EVENT_PAGES_CREATE;
    check_rule(c, MEMTRACE_RULE_CREATED, moves_to(&p->created[pool], e->bytes, is_more, e->b),
               "pool %zu had created %" PRIu64 " bytes, and %" PRIu64 " %s make %" PRIu64, pool, before,
               e->bytes, is_more ? "more" : "fewer", e->b);
}

/* Held by all holders of the pool, as far as it is known. */
static uint64_t held_of(const check_process *p, size_t pool) {
    uint64_t sum = 0;
    for (size_t i = 0; i < CHECK_N_HOLDERS; i++)
        if (p->held[pool][i].is_known) sum += p->held[pool][i].value;
    return sum;
}

static void check_held(check *c, check_process *p, size_t pool, size_t holder, const fcdp_trace_event *e) {
    uint64_t before = p->held[pool][holder].value, all = 0;
    bool is_more = e->kind == FCDP_EVENT_PAGES_TAKE;
    check_rule(c, MEMTRACE_RULE_HELD, moves_to(&p->held[pool][holder], e->bytes, is_more, e->b),
               "holder %zu had %" PRIu64 " bytes, and %" PRIu64 " %s make %" PRIu64, holder, before, e->bytes,
               is_more ? "more" : "fewer", e->b);
    if (is_more && p->created[pool].is_known)
        check_rule(c, MEMTRACE_RULE_CREATED, held_of(p, pool) <= p->created[pool].value,
                   "the holders of pool %zu have %" PRIu64 " bytes, and it has created %" PRIu64, pool,
                   held_of(p, pool), p->created[pool].value);
    for (size_t i = 0; i < CHECK_N_POOLS; i++) all += held_of(p, i);
    if (all > p->peak_bytes) p->peak_bytes = all;
}

void check_event_of_pool(check *c, check_process *p, const fcdp_trace_event *e) {
    switch (e->kind) {
    case FCDP_EVENT_PAGES_CREATE:
    case FCDP_EVENT_PAGES_RELEASE:
        if (e->a < CHECK_N_POOLS) check_created(c, p, (size_t)e->a, e);
        break;
    case FCDP_EVENT_PAGES_TAKE:
    case FCDP_EVENT_PAGES_GIVE:
        if ((e->a >> 8) < CHECK_N_POOLS && (e->a & 255) < CHECK_N_HOLDERS)
            check_held(c, p, (size_t)(e->a >> 8), (size_t)(e->a & 255), e);
        break;
    default: break;
    }
}

/* ---- counters ---- */

/* What events of a kind, with a cause where one is given, add to a counter. */
typedef enum addend { ONE, BYTES, A, B, DURATION } addend;
static const struct sum {
    uint16_t counter, kind;
    uint8_t cause;
    addend what;
} sums[] = {
    {FCDP_COUNT_GATHER_INTER_BYTES, FCDP_EVENT_GATHER, 0, A},
    {FCDP_COUNT_GATHER_INTRA_BYTES, FCDP_EVENT_GATHER, 0, B},
    {FCDP_COUNT_RESTORE_INTRA_BYTES, FCDP_EVENT_RESTORE, 0, B},
    {FCDP_COUNT_GATHERS_MADE, FCDP_EVENT_USE, FCDP_CAUSE_MADE, ONE},
    {FCDP_COUNT_GATHERS_AVOIDED, FCDP_EVENT_USE, FCDP_CAUSE_HIT, ONE},
    {FCDP_COUNT_H2D_BYTES, FCDP_EVENT_LOAD, 0, BYTES},
    {FCDP_COUNT_D2H_BYTES, FCDP_EVENT_STORE, 0, BYTES},
    {FCDP_COUNT_EVICTIONS, FCDP_EVENT_EVICT, 0, ONE},
    {FCDP_COUNT_REGION_MAPS, FCDP_EVENT_REGION_MAP, 0, ONE},
    {FCDP_COUNT_MAPS, FCDP_EVENT_MAP, 0, ONE},
    {FCDP_COUNT_UNMAPS, FCDP_EVENT_UNMAP, 0, ONE},
    {FCDP_COUNT_OOMS, FCDP_EVENT_OOM, 0, ONE},
    {FCDP_COUNT_OOMS_AVOIDED, FCDP_EVENT_OOM_AVOIDED, 0, ONE},
    {FCDP_COUNT_PRESSURES, FCDP_EVENT_PRESSURE, 0, ONE},
    {FCDP_COUNT_RECLAIMS, FCDP_EVENT_RECLAIM, 0, ONE},
    {FCDP_COUNT_STALLS, FCDP_EVENT_STALL, 0, ONE},
    {FCDP_COUNT_STALL_NS, FCDP_EVENT_STALL, 0, DURATION},
    {FCDP_COUNT_STEPS, FCDP_EVENT_STEP, 0, ONE},
    {FCDP_COUNT_PLAIN_GATHER_CALLS, FCDP_EVENT_PLAIN_GATHER, 0, ONE},
    {FCDP_COUNT_REDUCE_SCATTER_CALLS, FCDP_EVENT_REDUCE_SCATTER, 0, ONE},
};

void check_count(check_process *p, const fcdp_trace_event *e) {
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) {
        if (sums[i].kind != e->kind || (sums[i].cause && sums[i].cause != e->cause)) continue;
        uint64_t *said = &p->said[sums[i].counter];
        switch (sums[i].what) {
        case ONE: *said += 1; break;
        case BYTES: *said += e->bytes; break;
        case A: *said += e->a; break;
        case B: *said += e->b; break;
        case DURATION: *said += e->duration_ns; break;
        }
    }
}

static void check_monotone(check *c, const check_process *p, const memtrace_state *s) {
    for (uint32_t i = 0; p->has_counters && i < s->state.n_counters && i < FCDP_TRACE_N_COUNTERS; i++) {
        const memtrace_counter *row = memtrace_counter_of(i);
        if (row && (row->what == MEMTRACE_SUM || row->what == MEMTRACE_NODE_SUM))
            check_rule(c, MEMTRACE_RULE_COUNTERS, s->counters[i] >= p->counters[i],
                       "%s has fallen from %" PRIu64 " to %" PRIu64, row->name, p->counters[i],
                       s->counters[i]);
    }
}

/* At the end of a process whose events are all there, and that has measured all of its streams' spans: moved
 * = arrived. */
static void check_totals(check *c, const check_process *p) {
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) {
        uint32_t counter = sums[i].counter;
        const memtrace_counter *row = memtrace_counter_of(counter);
        check_rule(c, MEMTRACE_RULE_COUNTERS, p->said[counter] == p->counters[counter],
                   "%s is %" PRIu64 " in the end, and the events say %" PRIu64, row->name,
                   p->counters[counter], p->said[counter]);
    }
    uint64_t held = 0;
    for (size_t i = 0; i < CHECK_N_HOLDERS; i++) held += p->counters[FCDP_COUNT_HELD_0_BYTES + i];
    uint64_t created = p->counters[FCDP_COUNT_CREATED_BYTES], cached = p->counters[FCDP_COUNT_CACHED_BYTES];
    check_rule(c, MEMTRACE_RULE_CREATED, created == held + cached,
               "in the end %" PRIu64 " bytes of device memory are created, %" PRIu64 " held and %" PRIu64
               " cached",
               created, held, cached);
}

void check_state(check *c, check_process *p, const memtrace_state *s, bool is_end) {
    check_monotone(c, p, s);
    for (uint32_t i = 0; i < s->state.n_counters && i < FCDP_TRACE_N_COUNTERS; i++)
        p->counters[i] = s->counters[i];
    p->has_counters = true;
    /* A span without times, for want of events of the device, is counted in no sum of times. */
    bool is_measured = p->counters[FCDP_COUNT_SPANS_BEGUN] == p->counters[FCDP_COUNT_SPANS_ENDED] &&
                       !p->counters[FCDP_COUNT_SPANS_UNTIMED];
    if (is_end && s->state.ended && p->is_whole && p->from_start && s->state.head == p->next && is_measured)
        check_totals(c, p);
}
