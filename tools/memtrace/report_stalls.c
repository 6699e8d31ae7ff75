/* report_stalls.c - finds what each of the longest waits waited for. */
#include "tools/memtrace/each.h"
#include "tools/memtrace/kinds.h"
#include "tools/memtrace/report_internal.h"

#define AS_SAYS(NAME, says, option, advice) says,
#define AS_OPTION(NAME, says, option, advice) option,
#define AS_ADVICE(NAME, says, option, advice) advice,
static const char *const says_of[] = {MEMTRACE_REASONS(AS_SAYS)};
static const char *const option_of[] = {MEMTRACE_REASONS(AS_OPTION)};
static const char *const advice_of[] = {MEMTRACE_REASONS(AS_ADVICE)};

const char *memtrace_reason_says(memtrace_reason reason) {
    return says_of[reason];
}

const char *memtrace_reason_option(memtrace_reason reason) {
    return option_of[reason];
}

const char *memtrace_reason_advice(memtrace_reason reason) {
    return advice_of[reason];
}

static bool is_move(const fcdp_trace_event *e) {
    return e->kind == FCDP_EVENT_GATHER || e->kind == FCDP_EVENT_RESTORE || e->kind == FCDP_EVENT_LOAD;
}

static bool waits_for_moves(const fcdp_trace_event *wait) {
    return wait->kind == FCDP_EVENT_STALL || wait->cause == FCDP_CAUSE_FOR_COMPUTE;
}

/* How long both were under way. */
static uint64_t overlap_ns(const fcdp_trace_event *x, const fcdp_trace_event *y) {
    uint64_t x_end = x->time_ns + x->duration_ns, y_end = y->time_ns + y->duration_ns;
    uint64_t begin = x->time_ns > y->time_ns ? x->time_ns : y->time_ns, end = x_end < y_end ? x_end : y_end;
    return end > begin ? end - begin : 0;
}

/* Of the region's moves that ended by the wait's end, it waited for the one that took most of it. Two
 * clocks are compared, the device's and the host's, so some slack is given. */
static bool visit(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    enum { SLACK_NS = 200000 };
    memtrace_report *report = context;
    (void)chunk;
    for (size_t i = 0; i < report->n_stalls; i++) {
        memtrace_stall *stall = &report->stalls[i];
        const fcdp_trace_event *wait = &stall->event;
        uint64_t wait_end = wait->time_ns + wait->duration_ns, end = e->time_ns + e->duration_ns;
        bool is_of_many = !e->object && e->kind == FCDP_EVENT_GATHER; /* small groups together */
        if (stall->process != process || (wait->object && e->object != wait->object && !is_of_many)) continue;
        if (e->kind == FCDP_EVENT_EVICT && wait->object && e->time_ns <= wait_end) stall->was_evicted = true;
        if (e->kind == FCDP_EVENT_ACQUIRE && wait->object && e->time_ns + SLACK_NS < wait->time_ns &&
            e->step < wait->step)
            stall->was_evicted = false;
        if (!is_move(e) || !waits_for_moves(wait)) continue;
        if (end + SLACK_NS < wait->time_ns || e->time_ns > wait_end || end > wait_end + SLACK_NS) continue;
        uint64_t ns = overlap_ns(wait, e);
        if (stall->move.kind && ns < stall->move_ns) continue;
        stall->move = *e;
        stall->move_ns = ns;
    }
    return true;
}

static memtrace_reason reason_of_gather(const memtrace_stall *stall) {
    enum { SMALL_BYTES = 1 << 20, SMALL_GROUP_BYTES = 8 << 20, NEAR_NS = 100000 };
    const fcdp_trace_event *move = &stall->move;
    /* the differences of a large group are few bytes, too */
    bool is_small = move->object && move->bytes < SMALL_BYTES && stall->event.bytes < SMALL_GROUP_BYTES;
    if ((move->flags | stall->event.flags) & FCDP_TRACE_BACKWARD) return MEMTRACE_BECAUSE_GATHER_AGAIN;
    if (is_small) return MEMTRACE_BECAUSE_GATHER_SMALL;
    return move->time_ns + NEAR_NS >= stall->event.time_ns ? MEMTRACE_BECAUSE_GATHER_LATE
                                                           : MEMTRACE_BECAUSE_GATHER_LONG;
}

/* A wait of the host says what for. That for CPU tensors is for moves, as a stream's would be. */
static memtrace_reason reason_of(const memtrace_stall *stall) {
    if (stall->event.kind == FCDP_EVENT_HOST_WAIT) {
        switch (stall->event.cause) {
        case FCDP_CAUSE_FOR_AGREEMENT: return MEMTRACE_BECAUSE_AGREEMENT;
        case FCDP_CAUSE_FOR_MEMORY: return MEMTRACE_BECAUSE_MEMORY;
        case FCDP_CAUSE_FOR_END: return MEMTRACE_BECAUSE_END;
        case FCDP_CAUSE_FOR_WRITES: return MEMTRACE_BECAUSE_WRITES;
        case FCDP_CAUSE_FOR_FINGERPRINT: return MEMTRACE_BECAUSE_FINGERPRINT;
        case FCDP_CAUSE_FOR_COMPUTE: break;
        default: return MEMTRACE_BECAUSE_UNKNOWN;
        }
    }
    if (stall->move.kind && stall->move_ns < stall->event.duration_ns / 4) return MEMTRACE_BECAUSE_OTHERS;
    switch (stall->move.kind) {
    case FCDP_EVENT_GATHER: return reason_of_gather(stall);
    case FCDP_EVENT_LOAD: return stall->was_evicted ? MEMTRACE_BECAUSE_LOAD_EVICTED : MEMTRACE_BECAUSE_LOAD;
    case FCDP_EVENT_RESTORE:
        return stall->was_evicted ? MEMTRACE_BECAUSE_LOAD_EVICTED : MEMTRACE_BECAUSE_RESTORE;
    default:
        return stall->event.kind == FCDP_EVENT_HOST_WAIT ? MEMTRACE_BECAUSE_COMPUTE
                                                         : MEMTRACE_BECAUSE_UNKNOWN;
    }
}

void memtrace__explain(memtrace_file *file, memtrace_report *report) {
    if (report->n_stalls) memtrace_each(file, MEMTRACE_ALL, visit, report);
    for (size_t i = 0; i < report->n_stalls; i++) {
        memtrace_stall *stall = &report->stalls[i];
        stall->region = memtrace_file_object_name(file, stall->process, stall->chunk, stall->event.object);
        stall->reason = reason_of(stall);
    }
}
