/* program.c - steps of micro-batches, evaluations, unshards by hand, broken off forwards.
 *
 * `schedule` is drawn alike on every rank and decides what the program does; `own` decides what a rank does
 * alone: how fast it is, and what else wants its device memory. A rank makes no other call after a failed
 * one: it leaves the council, as a process does that raises an exception.
 */
#include "tests/comm/program.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/internal.h"
#include "comm/tree.h"

typedef struct presser { /* another holder of the rank's device memory */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* guarded by mutex */
    size_t n_wanted;
    bool stop;
    fcdp_pool *pool;
} presser;

enum { NOBODY = CLUSTER_MAX_RANKS + 1 };

typedef struct runner {
    program *program;
    member *m;
    rank_end *end;
    uint32_t n; /* groups */
    test_random schedule, own;
    int step, n_actions;
    bool ended, is_wrong;
    bool live[CLUSTER_MAX_GROUPS];
    bool root_stays, steps_in_backward; /* of the whole program */
    presser presser;
} runner;

/* ---- reports ---- */

static bool chance(runner *r, uint32_t one_in) {
    return !r->program->plain && random_below(&r->schedule, one_in) == 0;
}

/* True when the call succeeded. */
static bool went(runner *r, const char *what, uint32_t g, fcdp_status status) {
    if (!status) return true;
    r->ended = true;
    r->end->status = status;
    r->end->step = r->step;
    snprintf(r->end->text, sizeof r->end->text, "%s of group %u: status %d: %s", what, g, (int)status,
             fcdp_error_text());
    council_leave(&r->m->cluster->council);
    /* Its process ends. Others need not see that: they come to the agreement, unless their
     * hosts wait for what it will not begin. */
    if (r->m->cluster->config.fingerprints)
        (void)!fcdp__comm_fail(r->m->comm, fcdp__fail(status, "%s", r->end->text));
    return false;
}

/* ---- what a rank does alone ---- */

static void *presser_main(void *arg) {
    enum { MAX_PAGES = 256 };
    presser *p = arg;
    fcdp_phys pages[MAX_PAGES];
    pthread_mutex_lock(&p->mutex);
    while (!p->stop || p->n_wanted) {
        size_t n = p->n_wanted;
        p->n_wanted = 0;
        if (!n) {
            pthread_cond_wait(&p->changed, &p->mutex);
            continue;
        }
        pthread_mutex_unlock(&p->mutex);
        if (n > MAX_PAGES) n = MAX_PAGES;
        if (!fcdp__pool_take(p->pool, FCDP_HOLDER_TENSORS, n, pages)) {
            sched_yield();
            fcdp__pool_give(p->pool, FCDP_HOLDER_TENSORS, n, pages);
        }
        pthread_mutex_lock(&p->mutex);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

static void presser_start(presser *p, fcdp_pool *pool) {
    p->pool = pool;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->changed, NULL);
    pthread_create(&p->thread, NULL, presser_main, p);
}

static void presser_stop(presser *p) {
    pthread_mutex_lock(&p->mutex);
    p->stop = true;
    pthread_cond_signal(&p->changed);
    pthread_mutex_unlock(&p->mutex);
    pthread_join(p->thread, NULL);
    pthread_mutex_destroy(&p->mutex);
    pthread_cond_destroy(&p->changed);
}

static void linger(runner *r) {
    uint32_t n = r->program->jitter ? random_below(&r->own, r->program->jitter) : 0;
    bool yields = random_below(&r->own, 2);
    for (uint32_t i = 0; i < n; i++) {
        if (yields)
            sched_yield();
        else
            atomic_signal_fence(memory_order_seq_cst); /* so that the loop is one */
    }
}

/* Before each call; false: the rank makes none any more. */
static bool act(runner *r) {
    const program *p = r->program;
    if (r->ended) return false;
    linger(r);
    if (p->stops == (int)r->m->topology.rank && r->n_actions >= p->stops_at) {
        r->ended = true;
        return false;
    }
    r->n_actions++;
    if (p->pressure && random_below(&r->own, 256) < p->pressure) {
        pthread_mutex_lock(&r->presser.mutex);
        r->presser.n_wanted = 1 + random_below(&r->own, (uint32_t)p->pressure_pages);
        pthread_cond_signal(&r->presser.changed);
        pthread_mutex_unlock(&r->presser.mutex);
    }
    return true;
}

/* ---- calls ---- */

static void unshard(runner *r, uint32_t g, unshard_kind kind) {
    static const char *const names[] = {"an unshard in forward", "an unshard in backward",
                                        "an unshard by hand"};
    if (r->live[g] || !act(r)) return;
    r->live[g] = went(r, names[kind], g, member_unshard(r->m, g, kind));
}

/* With host_computes every byte must be right now; else it must be, unless an error is raised later. */
static void use(runner *r, uint32_t g) {
    if (!r->live[g] || !act(r) || !went(r, "a use", g, member_use(r->m, g))) return;
    r->is_wrong = r->is_wrong || (r->m->cluster->config.host_computes && r->m->wrong[0]);
}

static void reshard(runner *r, uint32_t g, bool written) {
    if (!act(r)) return;
    r->live[g] = false;
    (void)went(r, "a reshard", g, member_reshard(r->m, g, written));
}

/* The ranks that see a signal of a step: CLUSTER_MAX_RANKS all, NOBODY none, which is enough where
 * the bytes themselves are looked at. */
static uint32_t who_notices(runner *r) {
    const cluster_config *config = &r->m->cluster->config;
    uint32_t how = random_below(&r->schedule, 4), one = random_below(&r->schedule, r->m->cluster->n_ranks);
    if (r->program->plain || how < 2) return CLUSTER_MAX_RANKS;
    return how == 2 && (config->host_computes || config->fingerprints) ? NOBODY : one;
}

static void step_group(runner *r, uint32_t g, const uint8_t *which, uint32_t noticed_by) {
    bool noticed = noticed_by == CLUSTER_MAX_RANKS || noticed_by == r->m->topology.rank;
    if (act(r)) (void)went(r, "a step", g, member_step(r->m, g, which, noticed));
}

/* ---- parts of a program ---- */

static void by_hand(runner *r) {
    uint32_t g = random_below(&r->schedule, r->n);
    if (r->live[g]) {
        if (chance(r, 2)) reshard(r, g, false);
        return;
    }
    unshard(r, g, UNSHARD_BY_HAND);
    use(r, g);
    if (chance(r, 2)) reshard(r, g, false);
}

/* Which extents an optimizer changes: some of the trainable ones; now and then the program loads weights. */
static void choose_extents(runner *r, uint32_t g, uint8_t *which) {
    const group_spec *spec = &r->m->cluster->config.groups[g];
    uint32_t much = random_below(&r->schedule, 4);
    for (uint32_t i = 0; i < spec->n_extents; i++) {
        bool trainable = spec->extents[i].span == FCDP_SPAN_TRAINABLE;
        which[i] = trainable ? random_below(&r->schedule, 4) <= much : chance(r, 12);
        if (r->program->plain) which[i] = trainable;
    }
}

static void optimizer_step(runner *r) {
    if (!act(r) || !went(r, "the check before a step", 0, fcdp_engine_check(r->m->engine))) return;
    for (uint32_t g = 0; g < r->n; g++) {
        uint8_t which[CLUSTER_MAX_EXTENTS];
        choose_extents(r, g, which);
        step_group(r, g, which, who_notices(r));
    }
}

static void forward_extras(runner *r, uint32_t g) {
    if (r->program->plain) return;
    switch (random_below(&r->schedule, 16)) {
    case 0: use(r, g); break;
    case 1:
        reshard(r, g, false);
        unshard(r, g, UNSHARD_FORWARD); /* twice in a pass */
        use(r, g);
        break;
    case 2:
        if (act(r)) (void)went(r, "a write", g, member_scribble(r->m, g));
        reshard(r, g, true);
        unshard(r, g, UNSHARD_FORWARD);
        use(r, g);
        break;
    case 3:
        reshard(r, g, false);
        reshard(r, g, false);
        break;
    case 4: by_hand(r); break;
    default: break;
    }
}

/* False: it was broken off, as by an exception: what was begun ahead stays so. */
static bool forward(runner *r, bool evaluates) {
    uint32_t first = chance(r, 8) ? random_below(&r->schedule, r->n) : 0;
    uint32_t breaks_at = chance(r, 12) ? random_below(&r->schedule, r->n) : r->n;
    if (!act(r)) return false;
    r->m->evaluates = evaluates;
    member_begin_forward(r->m);
    for (uint32_t k = 0; k < r->n; k++) {
        uint32_t g = k == 0 ? first : k == first ? 0 : k; /* another order than usual, now and then */
        if (k > 0 && chance(r, 20)) continue;
        unshard(r, g, UNSHARD_FORWARD);
        if (k == breaks_at) return false;
        use(r, g);
        forward_extras(r, g);
        if (g || !r->root_stays) reshard(r, g, false);
    }
    return true;
}

/* The write is unannounced, so only fingerprints see it. Behind its last use in the pass:
 * what the ranks agreed on is void here. */
static void raw_write(runner *r, uint32_t g) {
    bool mine = random_below(&r->schedule, r->m->cluster->n_ranks) == r->m->topology.rank;
    if (r->program->raw_writes && chance(r, 4) && mine && act(r))
        (void)went(r, "a write", g, member_scribble(r->m, g));
}

/* The gradients of a group have been reduced; some jobs step right there. */
static void reduced(runner *r, uint32_t g) {
    uint8_t which[CLUSTER_MAX_EXTENTS];
    fcdp_group_ask_again(r->m->groups[g]);
    if (!r->steps_in_backward) return;
    choose_extents(r, g, which);
    step_group(r, g, which, who_notices(r));
    if (!chance(r, 3)) return;
    unshard(r, g, UNSHARD_BACKWARD); /* used by another part of the graph */
    use(r, g);
    reshard(r, g, false);
}

/* The next group is unsharded while one computes, as FSDP2 does; one that the
 * graph does not need is never waited for. */
static void backward(runner *r, bool reduces) {
    if (!act(r)) return;
    member_begin_backward(r->m);
    for (uint32_t g = r->n; g-- > 0;) {
        bool needed = !chance(r, 20);
        unshard(r, g, UNSHARD_BACKWARD);
        if (g > 0 && !chance(r, 8)) unshard(r, g - 1, UNSHARD_BACKWARD);
        if (needed) use(r, g);
        if (needed) raw_write(r, g);
        reshard(r, g, false);
        if (reduces && needed) reduced(r, g);
    }
}

static void one_step(runner *r) {
    uint32_t n_micro = r->program->plain ? 1 : 1 + random_below(&r->schedule, 3);
    for (uint32_t k = 0; k < n_micro; k++) {
        if (chance(r, 4)) by_hand(r);
        bool whole = forward(r, false);
        if (whole && chance(r, 4)) by_hand(r);
        if (whole) backward(r, k + 1 == n_micro);
    }
    optimizer_step(r);
    while (chance(r, 3)) (void)forward(r, true);
}

static void *runner_main(void *arg) {
    runner *r = arg;
    r->schedule.state = r->program->seed * 1000003;
    r->root_stays = chance(r, 2);
    r->steps_in_backward = chance(r, 3);
    uint8_t all[CLUSTER_MAX_EXTENTS];
    memset(all, 1, sizeof all);
    for (uint32_t g = 0; g < r->n; g++) step_group(r, g, all, CLUSTER_MAX_RANKS); /* the first weights */
    for (r->step = 0; r->step < r->program->n_steps && !r->ended; r->step++) one_step(r);
    if (act(r)) (void)went(r, "the drain", 0, fcdp_engine_drain(r->m->engine));
    /* its process ends, and with it what its peers' devices wait for */
    if (r->end->status) hub_port_exit(&r->m->port);
    return NULL;
}

/* ---- all ranks ---- */

static void runner_end(runner *r) {
    program *p = r->program;
    member *m = r->m;
    presser_stop(&r->presser);
    p->n_failed += r->end->status != FCDP_OK;
    if (m->topology.rank == 0) p->n_actions = r->n_actions;
    for (int i = 0; i < 2 && !r->end->status; i++) { /* a fault may hit the first */
        fcdp_status status = fcdp__driver_stream_sync(m->engine->drv, m->stream);
        if (!status) break;
        if (i)
            snprintf(p->wrong, sizeof p->wrong, "rank %u: its stream: %s", m->topology.rank,
                     fcdp_error_text());
    }
    bool stopped = p->stops == (int)m->topology.rank;
    pthread_mutex_lock(&m->mutex); /* a rank that failed may compute yet */
    if (r->is_wrong || (m->wrong[0] && !r->end->status && !stopped))
        snprintf(p->wrong, sizeof p->wrong, "%s", m->wrong);
    pthread_mutex_unlock(&m->mutex);
}

void program_run(program *p) {
    cluster *c = p->cluster;
    runner *runners = calloc(c->n_ranks, sizeof *runners);
    pthread_t threads[CLUSTER_MAX_RANKS];
    p->wrong[0] = 0;
    p->n_failed = 0;
    for (uint32_t i = 0; i < c->n_ranks; i++) {
        runners[i] = (runner){.program = p, .m = &c->members[i], .end = &p->ends[i], .n = c->config.n_groups};
        runners[i].own.state = p->seed * 7919 + i;
        *runners[i].end = (rank_end){0};
        presser_start(&runners[i].presser, c->members[i].engine->pool);
        pthread_create(&threads[i], NULL, runner_main, &runners[i]);
    }
    for (uint32_t i = 0; i < c->n_ranks; i++) pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < c->n_ranks; i++) runner_end(&runners[i]);
    free(runners);
}

void program_check(const program *p) {
    for (uint32_t i = 0; i < p->cluster->n_ranks; i++)
        if (p->ends[i].status) print_message("step %d, rank %u, %s\n", p->ends[i].step, i, p->ends[i].text);
    assert_int_equal(p->n_failed, 0);
    if (p->wrong[0]) fail_msg("%s", p->wrong);
    cluster_check_launches(p->cluster, true);
}
