/* stream_set.c - which shard groups put their work on the same streams.
 *
 * What two shard groups put on one stream is carried out in one order, so each waits for the other's peers.
 * That is right where one thread runs them: its program's order is the same on every rank, and all
 * communicators of the device see it (transport.h). Where a thread runs each, a rank may come to A first and
 * another to B: on common streams the first would wait in A for the second, which waits in B for the first.
 * So the shard groups of one model have a set of streams in common, and those of another model another one.
 * Between two sets' gathers and restores nothing is waited for on a stream: not for a turn on a lane, nor a
 * half of the staging buffer, nor the last user of a slot (slot.c). An optimizer's step waits for whatever
 * still reads shards, of all sets (fcdp_engine_order_writes).
 *
 * A set stays until the engine ends, and serves again once its last comm has gone: there are as many as
 * models with shard groups of their own live at once.
 */
#include <stdlib.h>

#include "comm/comm.h"
#include "comm/internal.h"

static void set_free(fcdp_stream_set *set) {
    fcdp_driver *drv = set->engine->drv;
    fcdp__staging_destroy(set);
    fcdp__own_bases_destroy(set);
    for (int i = 0; i < FCDP_N_STREAMS; i++)
        if (set->streams[i]) fcdp__driver_stream_destroy(drv, set->streams[i]);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++)
        if (set->owns_copies && set->copies[d]) fcdp__driver_stream_destroy(drv, set->copies[d]);
    for (int i = 0; i < FCDP_N_INTER; i++) fcdp__worker_destroy(set->workers[i]);
    for (int i = 0; i < FCDP_N_INTER; i++) fcdp__team_destroy(set->teams[i]);
    fcdp__worker_destroy(set->storer);
    for (int i = 0; i < FCDP_N_INTER; i++) fcdp__delta_scratch_free(&set->delta_scratch[i], drv);
    for (int lane = 0; lane < FCDP_N_LANES; lane++)
        if (set->turn[lane]) fcdp__driver_event_destroy(drv, set->turn[lane]);
    free(set);
}

static fcdp_status stream_make(fcdp_driver *drv, const char *name, fcdp_stream *stream_out) {
    fcdp_status status = fcdp__driver_stream_create(drv, stream_out);
    if (status)
        *stream_out = NULL;
    else
        fcdp__driver_stream_name(drv, *stream_out, name);
    return status;
}

fcdp_status fcdp__stream_set_create(fcdp_engine *engine, const fcdp_stream *copies,
                                    fcdp_stream_set **set_out) {
    static const char *const names[FCDP_N_STREAMS] = {"inter 0", "inter 1", "node", "fetch"};
    static const char *const directions[FCDP_N_DIRECTIONS] = {"d2h", "h2d"};
    fcdp_stream_set *set = calloc(1, sizeof *set);
    if (!set) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for streams");
    fcdp_status status = FCDP_OK;
    set->engine = engine;
    set->owns_copies = !copies;
    fcdp__staging_init(&set->staging);
    fcdp__own_bases_init(&set->own_bases);
    for (int i = 0; i < FCDP_N_STREAMS && !status; i++)
        status = stream_make(engine->drv, names[i], &set->streams[i]);
    for (int d = 0; d < FCDP_N_DIRECTIONS && !status; d++)
        if (copies)
            set->copies[d] = copies[d];
        else
            status = stream_make(engine->drv, directions[d], &set->copies[d]);
    for (int lane = 0; lane < FCDP_N_LANES && !status; lane++) {
        status = fcdp__driver_event_create(engine->drv, &set->turn[lane]);
        if (status) set->turn[lane] = NULL;
    }
    if (status) {
        set_free(set);
        return status;
    }
    set->next = engine->sets;
    engine->sets = set;
    *set_out = set;
    return FCDP_OK;
}

void fcdp__stream_sets_destroy(fcdp_engine *engine) {
    fcdp_stream_set *set = engine->sets;
    engine->sets = NULL;
    while (set) {
        fcdp_stream_set *next = set->next;
        set_free(set);
        set = next;
    }
}

/* The copy streams last: what they wait for is done then. */
fcdp_status fcdp__stream_set_drain(fcdp_stream_set *set) {
    fcdp_driver *drv = set->engine->drv;
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_STREAMS && !status; i++)
        status = fcdp__driver_stream_sync(drv, set->streams[i]);
    for (int d = 0; d < FCDP_N_DIRECTIONS && !status; d++)
        status = fcdp__driver_stream_sync(drv, set->copies[d]);
    if (status) return status;
    for (int i = 0; i < FCDP_N_INTER; i++) fcdp__worker_drain(set->workers[i]);
    fcdp__worker_drain(set->storer);
    return FCDP_OK;
}

/* The first set made lies last, and is the first to serve again. */
static fcdp_stream_set *idle_set(fcdp_engine *engine) {
    fcdp_stream_set *idle = NULL;
    for (fcdp_stream_set *set = engine->sets; set; set = set->next)
        if (!set->n_comms) idle = set;
    return idle;
}

fcdp_status fcdp_comm_set_streams(fcdp_comm *comm, const fcdp_comm *beside) {
    fcdp_engine *engine = comm->engine;
    fcdp_status status = FCDP_OK;
    FCDP_CHECK(1, !comm->groups);
    fcdp__lock_acquire(&engine->lock);
    comm->set->n_comms--;
    fcdp_stream_set *set = beside ? beside->set : idle_set(engine);
    if (!set) status = fcdp__stream_set_create(engine, NULL, &set);
    if (!status) comm->set = set;
    comm->set->n_comms++;
    fcdp__lock_release(&engine->lock);
    return status;
}
