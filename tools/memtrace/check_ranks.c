/* check_ranks.c - a hit is a hit on every rank: ranks gather alike. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/check_internal.h"
#include "tools/memtrace/each.h"
#include "tools/memtrace/kinds.h"

/* How often each rank gathered a region in a step. Ordered by name, step, process. */
typedef struct gathered {
    const char *name;
    uint32_t step;
    size_t process;
    uint64_t n;
} gathered;

typedef struct pass {
    check *c;
    gathered *rows;
    size_t n, room;
} pass;

/* Events of one region and step mostly follow each other: those make one row at once. */
static bool visit(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    pass *p = context;
    if (e->kind != FCDP_EVENT_USE || e->cause != FCDP_CAUSE_MADE || !e->object) return true;
    const char *name = memtrace_file_object_name(p->c->file, process, chunk, e->object);
    if (!*name) return true;
    if (p->n && p->rows[p->n - 1].name == name && p->rows[p->n - 1].step == e->step) {
        p->rows[p->n - 1].n++;
        return true;
    }
    if (p->n == p->room) {
        size_t room = p->room ? 2 * p->room : 1024;
        gathered *rows = realloc(p->rows, room * sizeof *rows);
        if (!rows) return false;
        p->rows = rows;
        p->room = room;
    }
    p->rows[p->n++] = (gathered){name, e->step, process, 1};
    return true;
}

static int compare(const void *a, const void *b) {
    const gathered *x = a, *y = b;
    int names = strcmp(x->name, y->name);
    if (names) return names;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    return x->process < y->process ? -1 : x->process > y->process;
}

/* Rows of one name, step and process into one. */
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

void check_ranks(check *c) {
    pass p = {.c = c};
    if (!is_one_whole_job(c)) return;
    memtrace_each(c->file, MEMTRACE_ALL, visit, &p);
    if (p.n) qsort(p.rows, p.n, sizeof *p.rows, compare);
    merge(&p);
    for (size_t i = 1; i < p.n && !c->is_broken; i++) {
        const gathered *x = &p.rows[i - 1], *y = &p.rows[i];
        if (strcmp(x->name, y->name) != 0 || x->step != y->step) continue;
        char first[64], second[64];
        memtrace_process_label(memtrace_file_process(c->file, x->process), first);
        memtrace_process_label(memtrace_file_process(c->file, y->process), second);
        c->process = y->process;
        check_rule(c, MEMTRACE_RULE_RANKS, x->n == y->n,
                   "%s gathered %s %" PRIu64 " times in step %u, and %s %" PRIu64 " times", first, x->name,
                   x->n, x->step, second, y->n);
    }
    free(p.rows);
}
