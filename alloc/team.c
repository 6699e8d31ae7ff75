/* team.c - threads that take a part each of what one of FCDP's threads computes (team.h). */
#include "alloc/team.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct team_thread {
    fcdp_team *team;
    pthread_t thread;
    unsigned number; /* its part's */
} team_thread;

struct fcdp_team {
    fcdp_driver *drv;
    unsigned n_parts; /* fixed */
    pthread_mutex_t mutex;
    pthread_cond_t begun, ended;
    /* guarded by the mutex */
    fcdp_team_part part;
    void *context;
    uint64_t run;       /* counts them */
    unsigned n_running; /* of the threads */
    uint64_t from_ns;   /* the simulated device's time at which the run began; 0: the caller has none */
    uint64_t until_ns;  /* and at which the last part so far has ended */
    bool stops;
    team_thread threads[]; /* n_parts - 1 */
};

/* Each run waits for all threads, so none misses one. */
static void *thread_main(void *arg) {
    const team_thread *self = arg;
    fcdp_team *team = self->team;
    uint64_t runs = 0;
    pthread_mutex_lock(&team->mutex);
    for (;;) {
        while (team->run == runs && !team->stops) pthread_cond_wait(&team->begun, &team->mutex);
        if (team->stops) break;
        runs = team->run;
        fcdp_team_part part = team->part;
        void *context = team->context;
        uint64_t from_ns = team->from_ns;
        pthread_mutex_unlock(&team->mutex);
        if (from_ns) fcdp__driver_work_begin(team->drv, from_ns);
        part(context, self->number, team->n_parts);
        uint64_t end_ns = from_ns ? fcdp__driver_work_end(team->drv) : 0;
        pthread_mutex_lock(&team->mutex);
        if (end_ns > team->until_ns) team->until_ns = end_ns;
        if (--team->n_running == 0) pthread_cond_signal(&team->ended);
    }
    pthread_mutex_unlock(&team->mutex);
    return NULL;
}

void fcdp__team_run(fcdp_team *team, fcdp_team_part part, void *context) {
    if (!team || team->n_parts == 1) {
        part(context, 0, 1);
        return;
    }
    pthread_mutex_lock(&team->mutex);
    FCDP_CHECK(1, !team->n_running);
    team->part = part;
    team->context = context;
    team->n_running = team->n_parts - 1;
    team->from_ns = fcdp__driver_work_here(team->drv);
    team->until_ns = 0;
    team->run++;
    pthread_cond_broadcast(&team->begun);
    pthread_mutex_unlock(&team->mutex);
    part(context, 0, team->n_parts);
    pthread_mutex_lock(&team->mutex);
    while (team->n_running) pthread_cond_wait(&team->ended, &team->mutex);
    uint64_t until_ns = team->until_ns;
    pthread_mutex_unlock(&team->mutex);
    fcdp__driver_work_until(team->drv, until_ns);
}

fcdp_team *fcdp__team_create(fcdp_driver *drv, const char *name, unsigned n_parts) {
    fcdp_team *team = calloc(1, sizeof *team + (n_parts - 1) * sizeof *team->threads);
    if (!team) return NULL;
    int error = 0;
    team->drv = drv;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->begun, NULL);
    pthread_cond_init(&team->ended, NULL);
    /* they read n_parts in a run, and the first comes later */
    for (team->n_parts = 1; team->n_parts < n_parts; team->n_parts++) {
        team_thread *next = &team->threads[team->n_parts - 1];
        *next = (team_thread){.team = team, .number = team->n_parts};
        error = fcdp__thread_start(thread_main, next, &next->thread);
        if (error) break;
        pthread_setname_np(next->thread, name);
    }
    if (error)
        fcdp__log(FCDP_LOG_INFO, "%s: %u of %u threads: %s", name, team->n_parts, n_parts, strerror(error));
    return team;
}

void fcdp__team_destroy(fcdp_team *team) {
    if (!team) return;
    pthread_mutex_lock(&team->mutex);
    FCDP_CHECK(1, !team->n_running);
    team->stops = true;
    pthread_cond_broadcast(&team->begun);
    pthread_mutex_unlock(&team->mutex);
    for (unsigned i = 0; i + 1 < team->n_parts; i++) pthread_join(team->threads[i].thread, NULL);
    pthread_cond_destroy(&team->begun);
    pthread_cond_destroy(&team->ended);
    pthread_mutex_destroy(&team->mutex);
    free(team);
}
