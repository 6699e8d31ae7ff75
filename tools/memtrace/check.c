/* check.c - goes through a trace and applies the rules to each event. */
#include "tools/memtrace/check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/check_internal.h"
#include "tools/memtrace/kinds.h"

#define AS_NAME(NAME, name, says) name,
#define AS_SAYS(NAME, name, says) says,
static const char *const names[] = {MEMTRACE_RULES(AS_NAME)};
static const char *const says_of[] = {MEMTRACE_RULES(AS_SAYS)};

const char *memtrace_rule_name(memtrace_rule rule) {
    return names[rule];
}

const char *memtrace_rule_says(memtrace_rule rule) {
    return says_of[rule];
}

bool check_rule(check *c, memtrace_rule rule, bool holds, const char *format, ...) {
    c->checked->n_by_rule[rule]++;
    if (holds || c->is_broken) return holds;
    c->is_broken = true;
    memtrace_violation *v = c->violation;
    *v = (memtrace_violation){
        .rule = rule, .process = c->process, .chunk = c->chunk, .has_event = c->event != NULL};
    if (c->event) v->event = *c->event;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(v->text, sizeof v->text, format, arguments);
    va_end(arguments);
    return false;
}

void check_forget(check_process *p) {
    memset(p->regions, 0, FCDP_TRACE_N_OBJECTS * sizeof *p->regions);
    memset(p->slots, 0, sizeof p->slots);
    memset(p->held, 0, sizeof p->held);
    memset(p->created, 0, sizeof p->created);
    p->steps.is_known = false;
}

static void check_number(check *c, check_process *p, const fcdp_trace_event *e) {
    if (!p->has_begun) {
        p->has_begun = true;
        p->from_start = p->is_whole = e->stamp == 0;
        p->next = e->stamp;
    }
    if (!check_rule(c, MEMTRACE_RULE_NUMBERS, e->stamp >= p->next,
                    "event %" PRIu64 " comes after event %" PRIu64, e->stamp, p->next - 1))
        return;
    if (e->stamp > p->next) {
        p->n_missing += e->stamp - p->next;
        p->is_whole = false;
        check_forget(p);
    }
    p->next = e->stamp + 1;
}

/* The place of a thread, or of a region's operations on a stream. NULL: no more room. */
static check_thread *thread_of(check_process *p, const fcdp_trace_event *e) {
    bool is_stream = e->flags & FCDP_TRACE_ON_STREAM;
    uint32_t object = is_stream ? e->object : 0, at = e->thread * 2654435761u ^ object * 40503u;
    for (int i = 0; i < CHECK_N_PROBES; i++, at++) {
        check_thread *t = &p->threads[at % CHECK_N_THREADS];
        if (t->end_ns && (t->thread != e->thread || t->is_stream != is_stream || t->object != object))
            continue;
        *t = (check_thread){e->thread, is_stream, object, t->end_ns};
        return t;
    }
    return NULL;
}

/* Two clocks are involved, each told in CLOCK_MONOTONIC. A stream's span without the device's times says when
 * it was enqueued. */
static void check_time(check *c, check_process *p, const fcdp_trace_event *e) {
    enum { CLOCKS_DIFFER_NS = 1000000 };
    uint64_t end = e->time_ns + e->duration_ns;
    bool is_untimed = (e->flags & FCDP_TRACE_ON_STREAM) && !e->duration_ns;
    if (!check_rule(c, MEMTRACE_RULE_TIMES, end >= e->time_ns && e->time_ns,
                    "it has no time, or ends before it begins") ||
        is_untimed)
        return;
    check_thread *t = thread_of(p, e);
    if (!t) return;
    check_rule(c, MEMTRACE_RULE_TIMES, end + CLOCKS_DIFFER_NS >= t->end_ns,
               "it ends at %" PRIu64 " ns, %" PRIu64 " ns before what the same %s did before it", end,
               t->end_ns - end, t->is_stream ? "stream" : "thread");
    if (end > t->end_ns) t->end_ns = end;
}

static void check_step(check *c, check_process *p, const fcdp_trace_event *e) {
    if (e->kind != FCDP_EVENT_STEP) return;
    if (p->steps.is_known)
        check_rule(c, MEMTRACE_RULE_STEPS, e->a == p->steps.value + 1,
                   "it counts %" PRIu64 " steps, and the one before counted %" PRIu64, e->a, p->steps.value);
    p->steps = (check_known){true, e->a};
}

/* The longest and largest are noted even without a gate, since they tell the user where to set one. */
static void check_gates(check *c, check_process *p, const fcdp_trace_event *e) {
    memtrace_checked *found = c->checked;
    if (e->step < c->gates->first_step) return;
    if (e->kind == FCDP_EVENT_STALL || (e->kind == FCDP_EVENT_HOST_WAIT && e->cause != FCDP_CAUSE_FOR_END)) {
        if (e->duration_ns > found->max_stall_ns) found->max_stall_ns = e->duration_ns;
        check_rule(c, MEMTRACE_RULE_MAX_STALL, e->duration_ns <= c->gates->max_stall_ns,
                   "it took %.3f ms, and --max-stall is %.3f ms", (double)e->duration_ns / 1e6,
                   (double)c->gates->max_stall_ns / 1e6);
    }
    if (e->kind != FCDP_EVENT_GATHER && e->kind != FCDP_EVENT_PLAIN_GATHER) return;
    if (p->inter_step != e->step) p->inter_bytes = 0;
    p->inter_step = e->step;
    p->inter_bytes += e->a;
    if (p->inter_bytes > found->max_inter_bytes) found->max_inter_bytes = p->inter_bytes;
    check_rule(c, MEMTRACE_RULE_MAX_INTER, p->inter_bytes <= c->gates->max_inter_bytes,
               "with it the rank has sent %" PRIu64
               " bytes between nodes in step %u, and --max-inter is %" PRIu64,
               p->inter_bytes, e->step, c->gates->max_inter_bytes);
}

static void check_events(check *c, check_process *p, size_t chunk) {
    size_t n;
    const fcdp_trace_event *events = memtrace_file_events(c->file, chunk, &n);
    for (size_t i = 0; i < n && !c->is_broken; i++) {
        const fcdp_trace_event e = events[i];
        c->event = &e;
        c->checked->n_events++;
        check_number(c, p, &e);
        check_time(c, p, &e);
        check_step(c, p, &e);
        check_event_of_region(c, p, &e);
        check_event_of_pool(c, p, &e);
        check_count(p, &e);
        check_gates(c, p, &e);
        c->event = NULL;
    }
}

static void check_peak(check *c, check_process *p) {
    uint64_t peak = p->peak_bytes;
    if (p->has_counters && p->counters[FCDP_COUNT_PEAK_BYTES] > peak)
        peak = p->counters[FCDP_COUNT_PEAK_BYTES];
    if (peak > c->checked->max_peak_bytes) c->checked->max_peak_bytes = peak;
    check_rule(c, MEMTRACE_RULE_MAX_PEAK, peak <= c->gates->max_peak_bytes,
               "it had %" PRIu64 " bytes of device memory at once, and --max-peak is %" PRIu64, peak,
               c->gates->max_peak_bytes);
}

/* Comes before the numbers: events that could not be read are not lost. */
static void check_file(check *c) {
    memtrace_summary summary = memtrace_file_summary(c->file);
    size_t n_notes = memtrace_file_n_notes(c->file);
    bool is_read = n_notes == 0 || (summary.is_growing && summary.n_unreadable_bytes == 0);
    c->event = NULL;
    c->process = SIZE_MAX; /* of none */
    check_rule(c, MEMTRACE_RULE_FILE, is_read, "%s", is_read ? "" : memtrace_file_note(c->file, 0));
}

/* Only at the end is it known how many events are missing, and that the file could be read. */
static void check_end(check *c) {
    check_file(c);
    for (size_t i = 0; i < memtrace_file_summary(c->file).n_processes && !c->is_broken; i++) {
        check_process *p = &c->processes[i];
        const memtrace_process *process = memtrace_file_process(c->file, i);
        c->process = i;
        c->checked->n_lost += p->n_missing;
        check_rule(c, MEMTRACE_RULE_NUMBERS,
                   p->n_missing <= process->n_lost || process->last_state == MEMTRACE_NO_CHUNK,
                   "%" PRIu64 " events are missing, and %" PRIu64 " were lost", p->n_missing,
                   process->n_lost);
        check_peak(c, p);
    }
    if (!c->is_broken) check_ranks(c);
}

static bool make_room(check *c) {
    size_t n = memtrace_file_summary(c->file).n_processes;
    c->processes = calloc(n + 1, sizeof *c->processes);
    for (size_t i = 0; c->processes && i < n; i++)
        if (!(c->processes[i].regions = calloc(FCDP_TRACE_N_OBJECTS, sizeof(check_region)))) return false;
    return c->processes != NULL;
}

bool memtrace_check(memtrace_file *file, const memtrace_gates *gates, memtrace_checked *checked_out,
                    memtrace_violation *violation_out) {
    check c = {.file = file, .gates = gates, .checked = checked_out, .violation = violation_out};
    memtrace_summary summary = memtrace_file_summary(file);
    *checked_out = (memtrace_checked){0};
    if (!make_room(&c))
        check_rule(&c, MEMTRACE_RULE_FILE, false, "there is not enough memory to check the file");
    for (size_t i = 0; i < summary.n_chunks && !c.is_broken; i++) {
        const fcdp_trace_chunk *chunk = memtrace_file_chunk(file, i);
        if (chunk->process >= summary.n_processes) continue;
        check_process *p = &c.processes[chunk->process];
        memtrace_state state;
        c.process = chunk->process;
        c.chunk = i;
        if (chunk->type == FCDP_CHUNK_EVENTS)
            check_events(&c, p, i);
        else if (memtrace_file_state(file, i, &state))
            check_state(&c, p, &state, chunk->type == FCDP_CHUNK_END);
    }
    if (!c.is_broken) check_end(&c);
    for (size_t i = 0; c.processes && i < summary.n_processes; i++) free(c.processes[i].regions);
    free(c.processes);
    return !c.is_broken;
}
