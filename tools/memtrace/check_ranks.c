/* check_ranks.c - a hit is a hit on every rank: ranks gather alike. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/check_internal.h"
#include "tools/memtrace/each.h"
#include "tools/memtrace/grow.h"
#include "tools/memtrace/kinds.h"

/* How often a process gathered a region of a shard group in a step, where it did; with NO_STEP that it has or
 * uses the region at all: in a step without a row of its own it gathered it 0 times. */
typedef struct gathered {
    memtrace_object region;
    uint64_t step;
    size_t process;
    uint64_t n;
} gathered;

enum { NO_STEP = 0, FIRST_STEP = 1 }; /* a step's number + FIRST_STEP */

/* By object: the last name of it in an event that told of it. */
typedef const char *used_names[FCDP_TRACE_N_OBJECTS];

typedef struct pass {
    check *c;
    used_names *used; /* by process */
    gathered *rows;
    size_t n, room;
} pass;

/* False: no memory, and no row is compared with what would be only a part. */
static bool row_add(pass *p, gathered row) {
    gathered *rows = memtrace_grown(p->rows, &p->room, p->n, sizeof *rows);
    if (!rows) {
        p->n = 0;
        return false;
    }
    p->rows = rows;
    p->rows[p->n++] = row;
    return true;
}

/* Without a shard group, a region of the same name may be that of other ranks: only its uses tell then.
 * Events of one region and step mostly follow each other: those make one row at once. The last step is left
 * out unless the optimizer has ended it: a rank that fails, and so the job, may end in its middle. */
static bool visit(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    pass *p = context;
    bool is_begin = e->kind == FCDP_EVENT_REGION_CREATE;
    if ((e->kind != FCDP_EVENT_USE && !is_begin) || !e->object || e->object >= FCDP_TRACE_N_OBJECTS)
        return true;
    const memtrace_object region = memtrace_file_object(p->c->file, process, chunk, e->object);
    const char **used = &p->used[process][e->object];
    if (!*region.name || (is_begin && !region.shard_group)) return true;
    if (*used != region.name && !row_add(p, (gathered){region, NO_STEP, process, 0})) return false;
    *used = region.name;
    bool has_ended = e->step < memtrace_file_process(p->c->file, process)->header.step;
    if (is_begin || e->cause != FCDP_CAUSE_MADE || !has_ended) return true;
    gathered row = {region, (uint64_t)e->step + FIRST_STEP, process, 1};
    gathered *last = &p->rows[p->n - 1];
    if (last->region.name != region.name || last->step != row.step) return row_add(p, row);
    last->n++;
    return true;
}

static int compare_regions(const memtrace_object *x, const memtrace_object *y) {
    if (x->shard_group != y->shard_group) return x->shard_group < y->shard_group ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int compare(const void *a, const void *b) {
    const gathered *x = a, *y = b;
    int regions = compare_regions(&x->region, &y->region);
    if (regions) return regions;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    return x->process < y->process ? -1 : x->process > y->process;
}

/* Rows of one region, step and process into one. */
static void merge(pass *p) {
    size_t n = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (n && compare(&p->rows[n - 1], &p->rows[i]) == 0)
            p->rows[n - 1].n += p->rows[i].n;
        else
            p->rows[n++] = p->rows[i];
    }
    p->n = n;
}

/* Do all processes of the file belong to one job that has ended, and is every event of theirs there? Else a
 * rank may be in another step than the others, or have gathered what is not in the file. */
static bool is_one_whole_job(const check *c) {
    size_t n = memtrace_file_summary(c->file).n_processes;
    for (size_t i = 0; i < n; i++) {
        const memtrace_process *p = memtrace_file_process(c->file, i),
                               *first = memtrace_file_process(c->file, 0);
        if (!p->is_ended || !p->ended || !c->processes[i].is_whole || p->header.step != first->header.step ||
            p->header.world_size != first->header.world_size || p->header.rank < 0)
            return false;
    }
    return n > 1;
}

/* Rows from `i` on with the region and the step of row `i`. */
static size_t n_alike(const pass *p, size_t i) {
    size_t n = 1;
    while (i + n < p->n && p->rows[i + n].step == p->rows[i].step &&
           compare_regions(&p->rows[i + n].region, &p->rows[i].region) == 0)
        n++;
    return n;
}

/* Each of a region's users with the one before it, in one step: both lists are in the order of processes. */
static void compare_users(check *c, const gathered *users, size_t n_users, const gathered *made,
                          size_t n_made) {
    uint64_t before = 0;
    for (size_t i = 0, k = 0; i < n_users; i++) {
        uint64_t n = k < n_made && made[k].process == users[i].process ? made[k++].n : 0;
        char first[64] = "", second[64] = "";
        if (i && n != before) {
            memtrace_process_label(memtrace_file_process(c->file, users[i - 1].process), first);
            memtrace_process_label(memtrace_file_process(c->file, users[i].process), second);
        }
        c->process = users[i].process;
        if (i)
            check_rule(c, MEMTRACE_RULE_RANKS, n == before,
                       "%s gathered %s %" PRIu64 " times in step %" PRIu64 ", and %s %" PRIu64 " times",
                       first, made->region.name, before, made->step - FIRST_STEP, second, n);
        before = n;
    }
}

/* A region's users come before its steps. */
void check_ranks(check *c) {
    pass p = {.c = c};
    if (!is_one_whole_job(c)) return;
    p.used = calloc(memtrace_file_summary(c->file).n_processes, sizeof *p.used);
    if (p.used) memtrace_each(c->file, MEMTRACE_ALL, visit, &p);
    if (p.n) qsort(p.rows, p.n, sizeof *p.rows, compare);
    merge(&p);
    const gathered *users = p.rows;
    size_t n_users = 0;
    for (size_t i = 0, n; i < p.n && !c->is_broken; i += n) {
        n = n_alike(&p, i);
        if (p.rows[i].step == NO_STEP)
            users = &p.rows[i], n_users = n;
        else
            compare_users(c, users, n_users, &p.rows[i], n);
    }
    free(p.rows);
    free(p.used);
}
