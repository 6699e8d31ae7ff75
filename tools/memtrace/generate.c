/* generate.c - writes a trace of a made-up job of any size: for measuring, and for tests.
 *
 *     fcdp-memtrace-generate FILE BYTES [PROCESSES]
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/kinds.h"
#include "tools/memtrace/writer.h"

enum { N_REGIONS = 100, N_OF_CHUNK = 16384, CHUNKS_OF_STATE = 16, EVENTS_OF_STEP = 8 * N_REGIONS };
static const uint64_t REGION_BYTES = 8 << 20, START_NS = 1000000000000;

typedef struct state_body {
    fcdp_trace_state state;
    uint64_t counters[FCDP_TRACE_N_COUNTERS];
    struct {
        uint64_t number;
        fcdp_trace_object object;
    } objects[N_REGIONS];
} state_body;

/* As a recorder writes it. */
static bool write_process(memtrace_writer *writer, uint32_t process, uint32_t n, memtrace_error *error) {
    fcdp_trace_header header = {.magic = FCDP_TRACE_MAGIC,
                                .version = FCDP_TRACE_VERSION,
                                .header_bytes = sizeof header,
                                .n_counters = FCDP_TRACE_N_COUNTERS,
                                .n_objects = FCDP_TRACE_N_OBJECTS,
                                .pid = 1000 + (int32_t)process,
                                .level = 1,
                                .start_monotonic_ns = START_NS,
                                .start_real_ns = 1700000000000000000,
                                .rank = (int32_t)process,
                                .world_size = (int32_t)n,
                                .host = "made-up",
                                .device = "none",
                                .command = "fcdp-memtrace-generate"};
    fcdp_trace_chunk chunk = {
        .type = FCDP_CHUNK_PROCESS, .process = process, .n = 1, .first_ns = START_NS, .last_ns = START_NS};
    return memtrace_writer_chunk(writer, &chunk, &(struct iovec){&header, sizeof header}, 1, error);
}

/* Counters stay 0: nothing here adds up, only the size is that of a real file. */
static bool write_state(memtrace_writer *writer, uint32_t process, uint64_t head, uint64_t now_ns,
                        memtrace_error *error) {
    static state_body body;
    body.state = (fcdp_trace_state){.time_ns = now_ns,
                                    .head = head,
                                    .n_counters = FCDP_TRACE_N_COUNTERS,
                                    .n_objects = N_REGIONS,
                                    .step = (uint32_t)(head / EVENTS_OF_STEP)};
    for (uint32_t i = 0; i < N_REGIONS; i++) {
        fcdp_trace_object *object = &body.objects[i].object;
        body.objects[i].number = i + 1;
        object->generation = 2;
        object->state = FCDP_OBJECT_LIVE;
        object->bytes = REGION_BYTES;
        snprintf(object->name, sizeof object->name, "model.layers.%u", i);
    }
    fcdp_trace_chunk chunk = {.type = FCDP_CHUNK_STATE,
                              .process = process,
                              .n = N_REGIONS,
                              .first_ns = now_ns,
                              .last_ns = now_ns,
                              .first_step = body.state.step,
                              .last_step = body.state.step};
    return memtrace_writer_chunk(writer, &chunk, &(struct iovec){&body, sizeof body}, 1, error);
}

/* Event n of the job: regions in turn are gathered, waited for, stored and released, and from time to time
 * stepped. */
static fcdp_trace_event event_of(uint64_t n) {
    static const uint16_t kinds[] = {FCDP_EVENT_USE,    FCDP_EVENT_ACQUIRE, FCDP_EVENT_FILL,
                                     FCDP_EVENT_GATHER, FCDP_EVENT_STALL,   FCDP_EVENT_STATE,
                                     FCDP_EVENT_STORE,  FCDP_EVENT_RELEASE};
    enum { N_KINDS = sizeof kinds / sizeof *kinds };
    uint16_t kind = kinds[n % N_KINDS];
    bool is_span = kind == FCDP_EVENT_GATHER || kind == FCDP_EVENT_STORE || kind == FCDP_EVENT_STALL;
    fcdp_trace_event event = {.stamp = n,
                              .time_ns = START_NS + n * 1000,
                              .kind = kind,
                              .object = 1 + (uint32_t)(n / N_KINDS % N_REGIONS),
                              .step = (uint32_t)(n / EVENTS_OF_STEP),
                              .bytes = REGION_BYTES / 2,
                              .duration_ns = is_span ? 100000 + n % 1000 : 0};
    if (is_span) event.flags = FCDP_TRACE_ON_STREAM;
    if (kind == FCDP_EVENT_GATHER) event.a = event.bytes, event.thread = FCDP_TRACK_INTER_0;
    if (kind == FCDP_EVENT_STORE) event.thread = FCDP_TRACK_TO_HOST;
    if (kind == FCDP_EVENT_STALL) event.thread = FCDP_TRACK_COMPUTE, event.bytes = 0;
    if (kind == FCDP_EVENT_STATE) event.a = REGION_BYTES, event.flags = 3 << FCDP_TRACE_STATE_SHIFT;
    if (kind == FCDP_EVENT_ACQUIRE) event.a = event.object;
    if (n % EVENTS_OF_STEP == 0)
        event = (fcdp_trace_event){.stamp = n,
                                   .time_ns = event.time_ns,
                                   .kind = FCDP_EVENT_STEP,
                                   .step = event.step,
                                   .a = event.step};
    return event;
}

static bool write_all(memtrace_writer *writer, uint64_t n_bytes, uint32_t n_processes,
                      memtrace_error *error) {
    static fcdp_trace_event events[N_OF_CHUNK];
    for (uint32_t p = 0; p < n_processes; p++)
        if (!write_process(writer, p, n_processes, error)) return false;
    for (uint64_t turn = 0; memtrace_writer_n_bytes(writer) < n_bytes; turn++) {
        uint64_t first = turn * N_OF_CHUNK;
        for (uint64_t i = 0; i < N_OF_CHUNK; i++) events[i] = event_of(first + i);
        for (uint32_t p = 0; p < n_processes; p++) {
            if (turn % CHUNKS_OF_STATE == 0 && !write_state(writer, p, first, START_NS + first * 1000, error))
                return false;
            if (!memtrace_writer_events(writer, p, events, N_OF_CHUNK, error)) return false;
        }
    }
    return true;
}

int main(int argc, char **argv) {
    memtrace_writer *writer;
    memtrace_error error;
    uint64_t n_bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    uint32_t n_processes = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 1;
    if (!n_bytes || !n_processes) {
        fprintf(stderr, "usage: fcdp-memtrace-generate FILE BYTES [PROCESSES]\n");
        return 2;
    }
    bool is_good = memtrace_writer_create(argv[1], true, &writer, &error);
    if (is_good) {
        is_good = write_all(writer, n_bytes, n_processes, &error);
        is_good &= memtrace_writer_close(writer, is_good ? &error : NULL);
    }
    if (!is_good) fprintf(stderr, "fcdp-memtrace-generate: %s\n", error.text);
    return is_good ? 0 : 1;
}
