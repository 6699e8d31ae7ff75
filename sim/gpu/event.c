/* Events: an event is the point of the stream where it was last recorded. */
#include <stdlib.h>

#include "sim/gpu/internal.h"

struct event {
    struct sim_point *point; /* NULL: never recorded, which counts as done */
    bool captured;           /* recorded in a graph capture: outside of it there is no such point */
    bool sleeps;             /* CU_EVENT_BLOCKING_SYNC: a thread that waits for it sleeps */
    bool timed;              /* no CU_EVENT_DISABLE_TIMING */
    char on[SIM_TEXT_BYTES]; /* the stream's name */
};

static struct sim_table event_table = {.tag = 0x45};

size_t simgpu__event_count(void) {
    return event_table.n_live;
}

static struct event *event_of(CUevent event) {
    return simgpu__table_get(&event_table, (uintptr_t)event);
}

static void event_drop(void *item) {
    struct event *event = item;
    simgpu__point_drop(event->point);
    free(event);
}

void simgpu__event_reset(void) {
    simgpu__table_clear(&event_table, event_drop);
}

CUresult cuEventCreate(CUevent *event_out, unsigned int flags) {
    SIM_ENTER(cuEventCreate);
    if (!event_out ||
        (flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)))
        return CUDA_ERROR_INVALID_VALUE;
    bool shared = flags & CU_EVENT_INTERPROCESS;
    if (shared && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
    if (shared) return CUDA_ERROR_NOT_SUPPORTED;
    struct event *event = calloc(1, sizeof *event);
    if (!event) return CUDA_ERROR_OUT_OF_MEMORY;
    event->sleeps = flags & CU_EVENT_BLOCKING_SYNC;
    event->timed = !(flags & CU_EVENT_DISABLE_TIMING);
    sim_lock();
    uint64_t id = simgpu__table_put(&event_table, event);
    if (!id) {
        free(event);
        return sim_unlock_with(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *event_out = (CUevent)(uintptr_t)id;
    return sim_unlock_with(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event) {
    SIM_ENTER(cuEventDestroy_v2);
    sim_lock();
    struct event *taken = simgpu__table_take(&event_table, (uintptr_t)event);
    if (taken) event_drop(taken);
    return sim_unlock_with(taken ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    SIM_ENTER(cuEventRecord);
    struct sim_site site;
    unsigned long *taught;
    simgpu__site_take(&site);
    sim_lock();
    struct event *of = event_of(event);
    struct sim_stream *on = simgpu__stream_of(stream);
    if (!of || !on) return sim_unlock_with(CUDA_ERROR_INVALID_HANDLE);
    simgpu__text_set(of->on, simgpu__stream_label(on));
    if (simgpu__site_drops(&site, SIM_cuEventRecord, of->on, "", &taught))
        return sim_unlock_with(CUDA_SUCCESS);
    struct sim_point *point = simgpu__point_new();
    if (!point) return sim_unlock_with(CUDA_ERROR_OUT_OF_MEMORY);
    point->refs++;
    CUresult result = simgpu__stream_push(on, &(struct sim_op){.work = SIM_POINT, .point = point});
    if (result != CUDA_SUCCESS) {
        simgpu__point_drop(point);
        return sim_unlock_with(result);
    }
    simgpu__point_drop(of->point);
    of->point = point;
    of->captured = simgpu__stream_captures(on);
    return sim_unlock_with(CUDA_SUCCESS);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    SIM_ENTER(cuStreamWaitEvent);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    struct sim_site site;
    unsigned long *taught;
    simgpu__site_take(&site);
    sim_lock();
    struct event *of = event_of(event);
    struct sim_stream *on = simgpu__stream_of(stream);
    if (!of || !on) return sim_unlock_with(CUDA_ERROR_INVALID_HANDLE);
    if (simgpu__site_drops(&site, SIM_cuStreamWaitEvent, simgpu__stream_label(on), of->on, &taught))
        return sim_unlock_with(CUDA_SUCCESS);
    if (!of->point) return sim_unlock_with(CUDA_SUCCESS);
    if (simgpu__stream_captures(on) && !of->captured) {
        sim_unlock();
        simgpu__captures_invalidate();
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    of->point->refs++;
    return sim_unlock_with(simgpu__stream_push(
        on, &(struct sim_op){.work = SIM_WAIT_POINT, .waits_for = of->point, .taught = taught}));
}

CUresult cuEventQuery(CUevent event) {
    SIM_ENTER(cuEventQuery);
    sim_lock();
    struct event *of = event_of(event);
    if (!of) return sim_unlock_with(CUDA_ERROR_INVALID_HANDLE);
    bool done = !of->point || of->point->done;
    if (of->point && done && sim.strict) done = simgpu__order_host_knows(&of->point->position);
    if (of->point && done) simgpu__order_host_learns(&of->point->position);
    return sim_unlock_with(done ? (CUresult)atomic_load(&sim.sticky) : CUDA_ERROR_NOT_READY);
}

static CUresult synchronize(CUevent event, const struct sim_site *site) {
    struct event *of = event_of(event);
    unsigned long *taught;
    if (!of) return CUDA_ERROR_INVALID_HANDLE;
    if (simgpu__site_drops(site, SIM_cuEventSynchronize, of->on, "", &taught)) return CUDA_SUCCESS;
    if (!of->sleeps) simgpu__block_spins();
    struct sim_point *point = of->point; /* the event may be recorded anew, or destroyed, meanwhile */
    if (!point) return CUDA_SUCCESS;
    point->refs++;
    CUresult result = simgpu__point_wait(point);
    simgpu__order_host_learns(&point->position);
    simgpu__point_drop(point);
    return result;
}

CUresult cuEventSynchronize(CUevent event) {
    SIM_ENTER(cuEventSynchronize);
    struct sim_site site;
    simgpu__site_take(&site);
    simgpu__block_begin(SIM_cuEventSynchronize);
    sim_lock();
    CUresult result = sim_unlock_with(synchronize(event, &site));
    simgpu__block_end();
    return result;
}

/* Between the ends of what was before them, in modelled time; negative where `end` came first. Nothing is
 * learnt by it of what is over: a program that reuses memory must query or wait. */
CUresult cuEventElapsedTime_v2(float *milliseconds_out, CUevent start, CUevent end) {
    SIM_ENTER(cuEventElapsedTime_v2);
    if (!milliseconds_out) return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    const struct event *from = event_of(start), *to = event_of(end);
    if (!from || !to || !from->timed || !to->timed || !from->point || !to->point)
        return sim_unlock_with(CUDA_ERROR_INVALID_HANDLE);
    if (!from->point->done || !to->point->done) return sim_unlock_with(CUDA_ERROR_NOT_READY);
    *milliseconds_out = (float)((double)(int64_t)(to->point->end_ns - from->point->end_ns) / 1e6);
    return sim_unlock_with((CUresult)atomic_load(&sim.sticky));
}
