/* mark.c - where a caller's stream stood when it submitted a job: an event of the engine's, used again and
 * again. */
#include <stdio.h>
#include <stdlib.h>

#include "comm/group.h"

static fcdp_status event_take(fcdp_engine *engine, fcdp_event_node **event_out) {
    fcdp__lock_acquire(&engine->lock);
    fcdp_event_node *node = engine->idle_events;
    if (node) engine->idle_events = node->next;
    fcdp__lock_release(&engine->lock);
    if (!node) {
        node = malloc(sizeof *node);
        if (!node) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for an event");
        fcdp_status status = fcdp__driver_event_create(engine->drv, &node->event);
        if (status) {
            free(node);
            return status;
        }
    }
    *event_out = node;
    return FCDP_OK;
}

static void event_give(fcdp_engine *engine, fcdp_event_node *event) {
    fcdp__lock_acquire(&engine->lock);
    event->next = engine->idle_events;
    engine->idle_events = event;
    fcdp__lock_release(&engine->lock);
}

static fcdp_status event_record(fcdp_engine *engine, fcdp_stream stream, fcdp_event_node **event_out) {
    fcdp_status status = event_take(engine, event_out);
    if (status) return status;
    status = fcdp__driver_event_record(engine->drv, (*event_out)->event, stream);
    if (!status) return FCDP_OK;
    event_give(engine, *event_out);
    *event_out = NULL;
    return status;
}

void fcdp__mark_make(fcdp_engine *engine, fcdp_stream stream, fcdp_mark *mark_out) {
    *mark_out = (fcdp_mark){.refused = FCDP_OK};
    if (!event_record(engine, stream, &mark_out->event)) return;
    fcdp_status status = fcdp__driver_stream_sync(engine->drv, stream);
    if (status) fcdp__mark_refuse(mark_out, status);
}

void fcdp__mark_refuse(fcdp_mark *mark, fcdp_status status) {
    mark->refused = status;
    snprintf(mark->refused_text, sizeof mark->refused_text, "%s", fcdp_error_text());
}

void fcdp__mark_forget(fcdp_engine *engine, fcdp_mark *mark) {
    if (mark->event) event_give(engine, mark->event);
    mark->event = NULL;
}

static fcdp_status mark_check(const fcdp_mark *mark) {
    return mark->refused ? fcdp__fail(mark->refused, "%s", mark->refused_text) : FCDP_OK;
}

fcdp_status fcdp__mark_precede(const fcdp_engine *engine, const fcdp_mark *mark, fcdp_stream stream) {
    fcdp_status status = mark_check(mark);
    if (status || !mark->event) return status;
    return fcdp__driver_stream_wait(engine->drv, stream, mark->event->event);
}

fcdp_status fcdp__mark_await(const fcdp_engine *engine, const fcdp_mark *mark) {
    fcdp_status status = mark_check(mark);
    if (status || !mark->event) return status;
    return fcdp__driver_event_sync(engine->drv, mark->event->event);
}

fcdp_event fcdp__mark_event(const fcdp_mark *mark) {
    return mark->event ? mark->event->event : NULL;
}

void fcdp__events_destroy(fcdp_engine *engine) {
    while (engine->idle_events) {
        fcdp_event_node *node = engine->idle_events;
        engine->idle_events = node->next;
        fcdp__driver_event_destroy(engine->drv, node->event);
        free(node);
    }
}
