/* trace_stream.c - gives the trace the device's own times of work on streams.
 *
 * A pair of timing events is free, in use by a span that has begun, or pending. Pending pairs are in the
 * order in which spans ended, which on each stream is the order in which they run. So a poll that finds an
 * unfinished span can skip the later ones of that stream.
 *
 * An anchor translates the device's clock to the host's: a timing event on a stream without other work, and
 * the host's time when it was recorded. Differences are floats of 24 bits, so the anchor is recorded anew
 * from time to time:
 *
 *     host time of e = anchor.host_ns + elapsed(anchor.event, e)
 *
 * The two clocks drift, and a record takes some microseconds. So the times of a stream are made to ascend,
 * and none is before the host enqueued it.
 */
#include "alloc/trace_stream.h"

#include "alloc/trace_events.h"

#include <stdlib.h>

enum { FIRST_PAIRS = 64, MOST_PAIRS = 1024, N_TRACKS = 128 };
static const uint64_t ANCHOR_NS = 500 * 1000 * 1000; /* 30 ns of a float's last bit */

/* What a span becomes. */
typedef struct saying {
    fcdp_trace_event events[2];
    uint32_t n_events;
    unsigned n_counter, ns_counter; /* to which its time is added; 0: none */
} saying;

typedef struct pair {
    fcdp_event begin, end;
    saying said;
    uint32_t next;          /* number of the next free or pending one, 0: the last */
    _Atomic uint32_t turn;  /* how many spans have had it */
    _Atomic uint64_t bytes; /* of the first event, by the work itself; 0: as enqueued */
} pair;

typedef struct anchor {
    fcdp_event event;
    uint64_t host_ns; /* 0: never recorded */
} anchor;

typedef struct pair_list {
    uint32_t first, last; /* numbers, 0: empty */
} pair_list;

struct fcdp_trace_spans {
    fcdp_driver *drv;
    fcdp_stream stream; /* the anchors' */
    fcdp_lock lock;
    /* under lock */
    uint32_t free, n_free; /* the first of those that are */
    pair_list pending;
    bool polls;      /* one thread does: all below is its own */
    uint32_t n_made; /* pairs 1, 2, ..., n_made */
    bool ends;       /* no more of them */
    anchor now, coming;
    uint64_t last_ns[N_TRACKS]; /* the end of the last span that was written */
    pair pairs[MOST_PAIRS + 1]; /* 0 stands for none */
};

static void events_write(const fcdp_trace_event *events, size_t n) {
    for (size_t i = 0; i < n; i++) fcdp__trace_as_is(&events[i]);
    fcdp__trace_count(FCDP_COUNT_SPANS_ENDED, n);
}

static void bytes_take(pair *of) {
    uint64_t bytes = atomic_load_explicit(&of->bytes, memory_order_relaxed);
    if (bytes) of->said.events[0].bytes = of->said.events[0].a = bytes;
}

static void pair_give(fcdp_trace_spans *spans, uint32_t number) {
    fcdp__lock_acquire(&spans->lock);
    spans->pairs[number].next = spans->free;
    spans->free = number;
    spans->n_free++;
    fcdp__lock_release(&spans->lock);
}

/* ---- life ---- */

void fcdp__trace_spans_destroy(fcdp_trace_spans *spans) {
    if (!spans) return;
    spans->ends = true;
    fcdp__trace_spans_poll(spans);
    for (uint32_t number = spans->pending.first; number; number = spans->pairs[number].next) {
        bytes_take(&spans->pairs[number]);
        fcdp__trace_count(FCDP_COUNT_SPANS_UNTIMED, spans->pairs[number].said.n_events);
        events_write(spans->pairs[number].said.events, spans->pairs[number].said.n_events);
    }
    for (uint32_t number = 1; number <= MOST_PAIRS; number++) {
        if (spans->pairs[number].begin) fcdp__driver_event_destroy(spans->drv, spans->pairs[number].begin);
        if (spans->pairs[number].end) fcdp__driver_event_destroy(spans->drv, spans->pairs[number].end);
    }
    if (spans->now.event) fcdp__driver_event_destroy(spans->drv, spans->now.event);
    if (spans->coming.event) fcdp__driver_event_destroy(spans->drv, spans->coming.event);
    if (spans->stream) fcdp__driver_stream_destroy(spans->drv, spans->stream);
    fcdp__lock_destroy(&spans->lock);
    free(spans);
}

/* By the thread that creates, or polls. False: the driver refuses. */
static bool pairs_make(fcdp_trace_spans *spans, uint32_t n) {
    for (; n > 0 && spans->n_made < MOST_PAIRS; n--) {
        pair *made = &spans->pairs[spans->n_made + 1];
        if (!made->begin && fcdp__driver_timer_create(spans->drv, &made->begin)) return false;
        if (!made->end && fcdp__driver_timer_create(spans->drv, &made->end)) return false;
        pair_give(spans, ++spans->n_made);
    }
    return true;
}

/* The stream is idle: the device comes to it at once. */
static bool anchor_record(fcdp_trace_spans *spans, anchor *which) {
    uint64_t before_ns = fcdp__now_ns(); /* a thread that loses its core makes times early, and none late */
    which->host_ns = fcdp__driver_timer_record(spans->drv, which->event, spans->stream) ? 0 : before_ns;
    return which->host_ns != 0;
}

/* Nothing else depends on it, so what fails here is kept from the thread's text. */
fcdp_trace_spans *fcdp__trace_spans_create(fcdp_driver *drv) {
    if (!fcdp__trace_is_on(1)) return NULL;
    fcdp_failure before = fcdp__failure_keep(FCDP_ERR_INVALID);
    fcdp_trace_spans *spans = calloc(1, sizeof *spans);
    if (!spans) return NULL;
    spans->drv = drv;
    fcdp__lock_init(&spans->lock, FCDP_RANK_TRACE);
    fcdp_status status = fcdp__driver_stream_create(drv, &spans->stream);
    if (status) spans->stream = NULL;
    bool ok = !status && !fcdp__driver_timer_create(drv, &spans->now.event) &&
              !fcdp__driver_timer_create(drv, &spans->coming.event);
    if (!ok || !pairs_make(spans, FIRST_PAIRS) || !anchor_record(spans, &spans->now)) {
        fcdp__log(FCDP_LOG_INFO, "no device times are traced: the driver gave no events that know them");
        spans->now.host_ns = 0;
        fcdp__trace_spans_destroy(spans);
        spans = NULL;
    } else {
        fcdp__driver_stream_name(drv, spans->stream, "trace");
    }
    (void)!fcdp__failure_restore(&before);
    return spans;
}

/* ---- begin, end ---- */

static uint32_t pair_take(fcdp_trace_spans *spans) {
    fcdp__lock_acquire(&spans->lock);
    uint32_t number = spans->free;
    if (number) {
        spans->free = spans->pairs[number].next;
        spans->n_free--;
    }
    fcdp__lock_release(&spans->lock);
    return number;
}

fcdp_trace_span fcdp__trace_span_begin(fcdp_trace_spans *spans, fcdp_stream stream, uint32_t track) {
    fcdp_trace_span span = {.track = track, .step = fcdp__trace_step(), .begun_ns = fcdp__trace_start()};
    if (!span.begun_ns || !spans) return span;
    span.number = pair_take(spans);
    if (span.number) {
        pair *mine = &spans->pairs[span.number];
        span.turn = 1 + atomic_fetch_add_explicit(&mine->turn, 1, memory_order_relaxed);
        atomic_store_explicit(&mine->bytes, 0, memory_order_relaxed);
    }
    if (span.number && fcdp__driver_timer_record(spans->drv, spans->pairs[span.number].begin, stream)) {
        pair_give(spans, span.number);
        span.number = 0;
    }
    return span;
}

void fcdp__trace_span_drop(fcdp_trace_spans *spans, fcdp_trace_span span) {
    if (span.number) pair_give(spans, span.number);
}

/* The driver's event behind the work, which a poll asks after, makes it visible there. Without that event the
 * pair may serve another span by now. */
void fcdp__trace_span_bytes(fcdp_trace_spans *spans, fcdp_trace_span span, uint64_t bytes) {
    if (!span.number) return;
    pair *mine = &spans->pairs[span.number];
    if (atomic_load_explicit(&mine->turn, memory_order_relaxed) == span.turn)
        atomic_store_explicit(&mine->bytes, bytes, memory_order_relaxed);
}

static void list_append(fcdp_trace_spans *spans, pair_list *list, uint32_t number) {
    spans->pairs[number].next = 0;
    if (list->last)
        spans->pairs[list->last].next = number;
    else
        list->first = number;
    list->last = number;
}

/* Whatever fails here, the event is written: without the device's times, at once. */
static void span_end(fcdp_trace_spans *spans, fcdp_trace_span span, fcdp_stream stream, saying spoken) {
    if (!span.begun_ns) return;
    for (uint32_t i = 0; i < spoken.n_events; i++) {
        spoken.events[i].time_ns = span.begun_ns;
        spoken.events[i].duration_ns = 0;
        spoken.events[i].flags |= FCDP_TRACE_ON_STREAM;
        spoken.events[i].thread = span.track;
        spoken.events[i].step = span.step;
    }
    fcdp__trace_count(FCDP_COUNT_SPANS_BEGUN, spoken.n_events);
    if (span.number && !fcdp__driver_timer_record(spans->drv, spans->pairs[span.number].end, stream)) {
        spans->pairs[span.number].said = spoken;
        fcdp__lock_acquire(&spans->lock);
        list_append(spans, &spans->pending, span.number); /* until it has been written */
        fcdp__lock_release(&spans->lock);
        return;
    }
    if (span.number) pair_give(spans, span.number);
    fcdp__trace_count(FCDP_COUNT_SPANS_UNTIMED, spoken.n_events);
    events_write(spoken.events, spoken.n_events);
}

void fcdp__trace_span_end(fcdp_trace_spans *spans, fcdp_trace_span span, fcdp_stream stream,
                          const fcdp_trace_event *events, size_t n) {
    FCDP_CHECK(1, n >= 1 && n <= 2);
    saying said = {.events = {events[0], n > 1 ? events[1] : events[0]}, .n_events = (uint32_t)n};
    span_end(spans, span, stream, said);
}

void fcdp__trace_span_end_counted(fcdp_trace_spans *spans, fcdp_trace_span span, fcdp_stream stream,
                                  const fcdp_trace_event *event, unsigned n_counter, unsigned ns_counter) {
    saying said = {.events = {*event}, .n_events = 1, .n_counter = n_counter, .ns_counter = ns_counter};
    span_end(spans, span, stream, said);
}

/* ---- poll ---- */

/* FCDP_PENDING: it has not ended. Otherwise its events have their times, or the host's where the driver
 * failed. */
static fcdp_status pair_time(fcdp_trace_spans *spans, pair *of) {
    double from_ns, for_ns;
    fcdp_status status = fcdp__driver_timer_elapsed(spans->drv, of->begin, of->end, &for_ns);
    if (!status) status = fcdp__driver_timer_elapsed(spans->drv, spans->now.event, of->begin, &from_ns);
    if (status == FCDP_PENDING) return status;
    bytes_take(of);
    if (status) {
        fcdp__trace_count(FCDP_COUNT_SPANS_UNTIMED, of->said.n_events);
        return status;
    }
    uint64_t *last_ns = &spans->last_ns[of->said.events[0].thread % N_TRACKS];
    uint64_t begin_ns = spans->now.host_ns + (uint64_t)(int64_t)from_ns,
             enqueued_ns = of->said.events[0].time_ns;
    if (begin_ns < enqueued_ns) begin_ns = enqueued_ns;
    if (begin_ns < *last_ns) begin_ns = *last_ns;
    uint64_t duration_ns = for_ns > 1 ? (uint64_t)for_ns : 1; /* 0 says that it is not known */
    *last_ns = begin_ns + duration_ns;
    for (uint32_t i = 0; i < of->said.n_events; i++) {
        of->said.events[i].time_ns = begin_ns;
        of->said.events[i].duration_ns = duration_ns;
    }
    if (of->said.ns_counter) {
        fcdp__trace_count(of->said.n_counter, 1);
        fcdp__trace_count(of->said.ns_counter, duration_ns);
    }
    return FCDP_OK;
}

/* The anchor that was recorded a while ago serves from here on, and another is on its way. */
static void anchor_renew(fcdp_trace_spans *spans) {
    double ns;
    if (fcdp__now_ns() - spans->now.host_ns < ANCHOR_NS) return;
    if (!spans->coming.host_ns) {
        (void)anchor_record(spans, &spans->coming);
        return;
    }
    fcdp_status status = fcdp__driver_timer_elapsed(spans->drv, spans->now.event, spans->coming.event, &ns);
    if (status == FCDP_PENDING) return;
    anchor before = spans->now;
    if (!status) {
        spans->now = spans->coming;
        spans->coming = before;
    }
    spans->coming.host_ns = 0;
}

/* Writes those of the list that have ended; the others, in their order. */
static pair_list ended_write(fcdp_trace_spans *spans, uint32_t number) {
    bool waits[N_TRACKS] = {false};
    pair_list kept = {0, 0};
    for (uint32_t next; number; number = next) {
        pair *of = &spans->pairs[number];
        bool *waits_here = &waits[of->said.events[0].thread % N_TRACKS];
        next = of->next;
        if (*waits_here || pair_time(spans, of) == FCDP_PENDING) {
            *waits_here = true;
            list_append(spans, &kept, number);
        } else {
            events_write(of->said.events, of->said.n_events);
            pair_give(spans, number);
        }
    }
    return kept;
}

/* One thread at a time, with the whole list, so that the driver is asked without the lock. What has not
 * ended goes back to the front. Pairs become more here, where no thread of the program waits, until half
 * of them suffice from one poll to the next. */
void fcdp__trace_spans_poll(fcdp_trace_spans *spans) {
    if (!spans) return;
    fcdp__lock_acquire(&spans->lock);
    bool polls = !spans->polls;
    uint32_t n_free = spans->n_free;
    uint32_t number = polls ? spans->pending.first : 0;
    if (polls) {
        spans->polls = true;
        spans->pending = (pair_list){0, 0};
    }
    fcdp__lock_release(&spans->lock);
    if (!polls) return;
    pair_list kept = ended_write(spans, number);
    anchor_renew(spans);
    if (n_free < spans->n_made / 2 && !spans->ends) (void)pairs_make(spans, spans->n_made);
    fcdp__lock_acquire(&spans->lock);
    if (kept.last) {
        spans->pairs[kept.last].next = spans->pending.first;
        spans->pending.first = kept.first;
        if (!spans->pending.last) spans->pending.last = kept.last;
    }
    spans->polls = false;
    fcdp__lock_release(&spans->lock);
}
