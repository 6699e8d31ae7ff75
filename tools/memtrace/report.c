/* report.c - sums of a trace's events. */
#include "tools/memtrace/report.h"

#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/each.h"
#include "tools/memtrace/grow.h"
#include "tools/memtrace/kinds.h"
#include "tools/memtrace/report_internal.h"

/* Where the events of an object are added, until its name is another. */
typedef struct known_object {
    const char *name;
    size_t region;
} known_object;

typedef struct pass {
    memtrace_file *file;
    memtrace_report *report;
    known_object **objects;  /* by process, by number */
    uint64_t *step_began_ns; /* by process: when its last STEP was */
    struct held {
        uint64_t of[16][4], all; /* by pool and holder; their sum */
    } *held;                     /* by process */
    size_t room_steps, room_regions;
    bool has_failed;
} pass;

/* What the events add. A GATHER's a and b are the bytes that this rank sent between and within nodes; a
 * RESTORE's b. */
static void add_move(memtrace_sums *sums, const fcdp_trace_event *e) {
    switch (e->kind) {
    case FCDP_EVENT_GATHER:
        sums->n_gathers++, sums->inter_bytes += e->a, sums->intra_bytes += e->b,
            sums->moved_ns += e->duration_ns;
        break;
    case FCDP_EVENT_RESTORE:
        sums->n_restores++, sums->intra_bytes += e->b, sums->moved_ns += e->duration_ns;
        break;
    case FCDP_EVENT_STORE:
        sums->n_stores++, sums->d2h_bytes += e->bytes, sums->moved_ns += e->duration_ns;
        break;
    case FCDP_EVENT_LOAD:
        sums->n_loads++, sums->h2d_bytes += e->bytes, sums->moved_ns += e->duration_ns;
        break;
    case FCDP_EVENT_EVICT: sums->n_evictions++; break;
    case FCDP_EVENT_USE: *(e->cause == FCDP_CAUSE_HIT ? &sums->n_hits : &sums->n_made) += 1; break;
    case FCDP_EVENT_STALE: sums->n_stale++; break;
    case FCDP_EVENT_STALL: sums->stall_ns += e->duration_ns; break;
    case FCDP_EVENT_HOST_WAIT: sums->host_wait_ns += e->duration_ns; break;
    default: break;
    }
}

static void add_wait(memtrace_sums *sums, const fcdp_trace_event *e) {
    bool is_stall = e->kind == FCDP_EVENT_STALL;
    if (!is_stall && e->kind != FCDP_EVENT_HOST_WAIT) return;
    sums->n_waits++;
    if (is_stall || e->cause == FCDP_CAUSE_FOR_COMPUTE || e->cause == FCDP_CAUSE_FOR_MEMORY)
        sums->exposed_ns += e->duration_ns;
}

static void add(memtrace_sums *sums, const fcdp_trace_event *e) {
    add_move(sums, e);
    add_wait(sums, e);
}

uint64_t memtrace_hidden_ns(const memtrace_sums *sums) {
    return sums->moved_ns > sums->exposed_ns ? sums->moved_ns - sums->exposed_ns : 0;
}

/* The region of an event; NULL: it is about none. By name, as each rank has a region of the same name. */
static memtrace_region *region_of(pass *p, size_t process, size_t chunk, uint32_t number) {
    memtrace_report *r = p->report;
    if (!number || number >= FCDP_TRACE_N_OBJECTS) return NULL;
    if (!p->objects[process] && !(p->objects[process] = calloc(FCDP_TRACE_N_OBJECTS, sizeof **p->objects)))
        return NULL;
    known_object *known = &p->objects[process][number];
    const char *name = memtrace_file_object_name(p->file, process, chunk, number);
    if (known->name == name) return &r->regions[known->region];
    size_t i = 0;
    while (i < r->n_regions && strcmp(r->regions[i].name, name) != 0) i++;
    if (i == r->n_regions) {
        void *regions = memtrace_grown(r->regions, &p->room_regions, r->n_regions, sizeof *r->regions);
        if (!regions) return NULL;
        r->regions = regions;
        r->regions[r->n_regions++] = (memtrace_region){.name = name};
    }
    *known = (known_object){name, i};
    return &r->regions[i];
}

/* Steps come nearly in order, so the search is from the end. */
static memtrace_step *step_of(pass *p, uint32_t step) {
    memtrace_report *r = p->report;
    size_t at = r->n_steps;
    while (at && r->steps[at - 1].step > step) at--;
    if (at && r->steps[at - 1].step == step) return &r->steps[at - 1];
    void *steps = memtrace_grown(r->steps, &p->room_steps, r->n_steps, sizeof *r->steps);
    if (!steps) return NULL;
    r->steps = steps;
    memmove(&r->steps[at + 1], &r->steps[at], (r->n_steps - at) * sizeof *r->steps);
    r->n_steps++;
    r->steps[at] = (memtrace_step){.step = step};
    return &r->steps[at];
}

/* STEP's `a` counts the step that it ends: the work of step a - 1 lies between two of them. */
static void end_step(pass *p, size_t process, const fcdp_trace_event *e) {
    uint64_t began = p->step_began_ns[process];
    p->step_began_ns[process] = e->time_ns;
    memtrace_step *step = began && e->a ? step_of(p, (uint32_t)e->a - 1) : NULL;
    if (!step || e->time_ns < began) return;
    step->n_timed++;
    step->span_ns += e->time_ns - began;
}

static void add_stall(memtrace_report *r, size_t process, size_t chunk, const fcdp_trace_event *e) {
    size_t at = r->n_stalls;
    while (at && r->stalls[at - 1].event.duration_ns < e->duration_ns) at--;
    if (at == MEMTRACE_N_STALLS || !e->duration_ns) return;
    if (r->n_stalls < MEMTRACE_N_STALLS) r->n_stalls++;
    memmove(&r->stalls[at + 1], &r->stalls[at], (r->n_stalls - at - 1) * sizeof *r->stalls);
    r->stalls[at] = (memtrace_stall){.event = *e, .process = process, .chunk = chunk};
}

/* PAGES_TAKE and PAGES_GIVE say what a holder has then. */
static void add_held(pass *p, size_t process, const fcdp_trace_event *e) {
    size_t pool = (size_t)(e->a >> 8), holder = (size_t)(e->a & 255);
    if (pool >= 16 || holder >= 4) return;
    struct held *held = &p->held[process];
    held->all += e->b - held->of[pool][holder];
    held->of[pool][holder] = e->b;
    if (held->all > p->report->peaks[process]) p->report->peaks[process] = held->all;
}

/* One pass for all sums, as reading a large file is what takes the time. */
static bool visit(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    pass *p = context;
    memtrace_report *r = p->report;
    r->n_by_kind[e->kind]++;
    add(&r->total, e);
    memtrace_step *step = step_of(p, e->step);
    if (step) add(&step->sums, e);
    memtrace_region *region = region_of(p, process, chunk, e->object);
    if (region) {
        add(&region->sums, e);
        if (e->kind == FCDP_EVENT_STALE || e->kind == FCDP_EVENT_EVICT) region->n_by_cause[e->cause]++;
        if (e->kind == FCDP_EVENT_REGION_CREATE || e->kind == FCDP_EVENT_EVICT) region->bytes = e->bytes;
    }
    if (e->kind == FCDP_EVENT_PAGES_TAKE || e->kind == FCDP_EVENT_PAGES_GIVE) add_held(p, process, e);
    if (e->kind == FCDP_EVENT_STEP) end_step(p, process, e);
    if (e->kind == FCDP_EVENT_HOST_WAIT)
        r->n_by_cause[e->cause]++, r->ns_by_cause[e->cause] += e->duration_ns;
    if (e->kind == FCDP_EVENT_STALL || e->kind == FCDP_EVENT_HOST_WAIT) add_stall(r, process, chunk, e);
    return true;
}

/* Of what the events of regions do not say: the sizes of those that were there before. */
static void add_sizes(pass *p) {
    for (size_t process = 0; process < memtrace_file_summary(p->file).n_processes; process++) {
        long at = memtrace_file_process(p->file, process)->last_state;
        memtrace_state s;
        if (at == MEMTRACE_NO_CHUNK || !memtrace_file_state(p->file, (size_t)at, &s)) continue;
        for (size_t i = 0; i < s.state.n_objects; i++) {
            uint32_t number;
            const fcdp_trace_object *object = memtrace_state_object(&s, i, &number);
            uint64_t bytes = object->bytes;
            char name[FCDP_TRACE_NAME_BYTES];
            memcpy(name, object->name, sizeof name);
            name[sizeof name - 1] = 0;
            for (size_t k = 0; k < p->report->n_regions; k++)
                if (bytes && strcmp(p->report->regions[k].name, name) == 0)
                    p->report->regions[k].bytes = bytes;
        }
    }
}

/* ---- steps that are compared ---- */

/* A step that only some of the processes timed has only their bytes, and is left out. */
static void choose_compared(memtrace_report *r, uint32_t first) {
    uint32_t most = 1;
    for (size_t i = 0; i < r->n_steps; i++)
        if (r->steps[i].step >= first && r->steps[i].n_timed > most) most = r->steps[i].n_timed;
    for (size_t i = 0; i < r->n_steps; i++) {
        r->steps[i].is_compared = r->steps[i].step >= first && r->steps[i].n_timed == most;
        r->n_compared += r->steps[i].is_compared;
    }
}

static bool is_compared(const memtrace_report *r, uint32_t step) {
    size_t low = 0, high = r->n_steps;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (r->steps[middle].step == step) return r->steps[middle].is_compared;
        if (r->steps[middle].step < step)
            low = middle + 1;
        else
            high = middle;
    }
    return false;
}

static bool visit_compared(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    pass *p = context;
    if (!is_compared(p->report, e->step)) return true;
    memtrace_region *region = region_of(p, process, chunk, e->object);
    if (region) add(&region->compared, e);
    return true;
}

memtrace_report *memtrace_report_create(memtrace_file *file, uint32_t first_compared) {
    size_t n_processes = memtrace_file_summary(file).n_processes;
    memtrace_report *report = calloc(1, sizeof *report);
    pass p = {.file = file, .report = report};
    p.objects = calloc(n_processes + 1, sizeof *p.objects);
    p.step_began_ns = calloc(n_processes + 1, sizeof *p.step_began_ns);
    p.held = calloc(n_processes + 1, sizeof *p.held);
    if (report) report->peaks = calloc(n_processes + 1, sizeof *report->peaks);
    if (report && p.objects && p.step_began_ns && p.held && report->peaks) {
        memtrace_each(file, MEMTRACE_ALL, visit, &p);
        add_sizes(&p);
        memtrace__explain(file, report);
        if (first_compared != MEMTRACE_COMPARE_NONE) {
            choose_compared(report, first_compared);
            memtrace_each(file, MEMTRACE_ALL, visit_compared, &p);
        }
    } else {
        memtrace_report_destroy(report);
        report = NULL;
    }
    for (size_t i = 0; p.objects && i < n_processes; i++) free(p.objects[i]);
    free(p.objects);
    free(p.step_began_ns);
    free(p.held);
    return report;
}

void memtrace_report_destroy(memtrace_report *report) {
    if (!report) return;
    free(report->steps);
    free(report->regions);
    free(report->peaks);
    free(report);
}
