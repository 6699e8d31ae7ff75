/* reader_processes.c - the processes of a trace's file, by its chunks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/grow.h"
#include "tools/memtrace/reader_internal.h"

static bool make_room(memtrace_file *file, size_t n) {
    if (n <= file->n_processes) return true;
    memtrace_process *all = realloc(file->processes, n * sizeof *all);
    if (!all) return false;
    file->processes = all;
    for (; file->n_processes < n; file->n_processes++) {
        memtrace_process *p = &all[file->n_processes];
        *p = (memtrace_process){.first_state = MEMTRACE_NO_CHUNK, .last_state = MEMTRACE_NO_CHUNK};
        p->header.rank = -1;
        p->first_ns = UINT64_MAX;
    }
    return true;
}

/* Texts of a damaged or foreign writer end somewhere. */
static void end_texts(fcdp_trace_header *h) {
    h->host[sizeof h->host - 1] = h->device[sizeof h->device - 1] = h->command[sizeof h->command - 1] = 0;
}

/* A process whose PROCESS chunk is damaged keeps its events, without a name. */
static void read_header(memtrace_file *file, memtrace_process *process, size_t i) {
    const void *body = file->chunks[i].chunk.bytes >= sizeof process->header ? memtrace_file_body(file, i)
                                                                             : NULL;
    if (!body) return;
    memcpy((void *)&process->header, body, sizeof process->header);
    end_texts(&process->header);
}

/* The last state of process `number` that can be read becomes its last_state. False: there is none. */
static bool find_last_state(memtrace_file *file, uint32_t number, memtrace_state *state_out) {
    memtrace_process *process = &file->processes[number];
    for (long i = process->last_state; i != MEMTRACE_NO_CHUNK; i--) {
        if (file->chunks[i].chunk.process != number || !memtrace_file_state(file, (size_t)i, state_out))
            continue;
        process->last_state = i;
        return true;
    }
    return false;
}

static void read_end(memtrace_file *file, uint32_t number) {
    memtrace_process *process = &file->processes[number];
    memtrace_state s;
    if (!find_last_state(file, number, &s)) return;
    size_t i = (size_t)process->last_state;
    process->n_lost = s.state.n_lost;
    process->n_dropped = s.state.n_dropped;
    process->header.step = s.state.step;
    if (file->chunks[i].chunk.type != FCDP_CHUNK_END) return;
    process->is_ended = true;
    process->ended = s.state.ended;
}

/* What a chunk's header says of its process, and the body of the few PROCESS chunks. */
static bool take_chunk(memtrace_file *file, size_t i) {
    const fcdp_trace_chunk *chunk = &file->chunks[i].chunk;
    if (chunk->process >= MEMTRACE_MAX_PROCESSES) {
        memtrace__leave_out(file, i, "is of a process behind the 4096th, which no subcommand shows");
        return true;
    }
    if (!make_room(file, (size_t)chunk->process + 1)) return false;
    memtrace_process *process = &file->processes[chunk->process];
    if (chunk->first_ns < process->first_ns) process->first_ns = chunk->first_ns;
    if (chunk->last_ns > process->last_ns) process->last_ns = chunk->last_ns;
    if (chunk->type == FCDP_CHUNK_PROCESS) read_header(file, process, i);
    if (chunk->type == FCDP_CHUNK_EVENTS) {
        process->n_events += chunk->n;
        file->n_events += chunk->n;
    }
    if (chunk->type == FCDP_CHUNK_STATE || chunk->type == FCDP_CHUNK_END) {
        if (process->first_state == MEMTRACE_NO_CHUNK) process->first_state = (long)i;
        process->last_state = (long)i;
    }
    return true;
}

/* One pass over the headers; of the bodies only PROCESS and each process's last state are read. */
bool memtrace__read_processes(memtrace_file *file) {
    file->is_damaged = calloc(file->n_chunks + 1, sizeof *file->is_damaged);
    if (!file->is_damaged) return false;
    file->body_chunk = file->n_chunks;
    for (size_t i = 0; i < file->n_chunks; i++)
        if (!take_chunk(file, i)) return false;
    for (size_t i = 0; i < file->n_processes; i++) {
        memtrace_process *process = &file->processes[i];
        read_end(file, (uint32_t)i);
        if (process->first_ns > process->last_ns) process->first_ns = process->last_ns;
    }
    return true;
}

/* ---- names ---- */

static int compare_names(const void *a, const void *b) {
    const memtrace_name *x = a, *y = b;
    if (x->process != y->process) return x->process < y->process ? -1 : 1;
    if (x->number != y->number) return x->number < y->number ? -1 : 1;
    return x->chunk < y->chunk ? -1 : x->chunk > y->chunk;
}

static void add_name(memtrace_file *file, uint32_t process, uint32_t number, size_t chunk,
                     const fcdp_trace_object *object) {
    void *names = memtrace_grown(file->names, &file->room_names, file->n_names, sizeof *file->names);
    if (!names) return;
    file->names = names;
    char *text = strndup(object->name, sizeof object->name);
    if (text) file->names[file->n_names++] = (memtrace_name){process, number, chunk, {text, 0}};
}

/* By number: the generation that was read last, and the place + 1 of its entry, 0: it has none. */
typedef struct last_read {
    uint32_t generation;
    size_t entry;
} last_read;

/* One entry for each new generation of a number in a process's states. An object is there a moment before its
 * shard group is told: the first state may not have it. */
static void read_names_of(memtrace_file *file, uint32_t process, last_read *of) {
    memset(of, 0, FCDP_TRACE_N_OBJECTS * sizeof *of);
    for (size_t i = 0; i < file->n_chunks; i++) {
        memtrace_state s;
        if (file->chunks[i].chunk.process != process || !memtrace_file_state(file, i, &s)) continue;
        for (size_t k = 0; k < s.state.n_objects; k++) {
            uint32_t number;
            const fcdp_trace_object *object = memtrace_state_object(&s, k, &number);
            if (number >= FCDP_TRACE_N_OBJECTS) continue;
            if (of[number].generation != object->generation) {
                size_t n = file->n_names;
                add_name(file, process, number, i, object);
                of[number] = (last_read){object->generation, file->n_names > n ? file->n_names : 0};
            }
            if (of[number].entry) file->names[of[number].entry - 1].object.shard_group = object->shard_group;
        }
    }
}

/* In a buffer of its own: the caller may be in the middle of a chunk. */
static void read_names(memtrace_file *file) {
    void *body = file->body;
    size_t room = file->body_room, chunk = file->body_chunk;
    file->has_names = true;
    file->body = NULL;
    file->body_room = 0;
    file->body_chunk = file->n_chunks;
    last_read *of = malloc(FCDP_TRACE_N_OBJECTS * sizeof *of);
    for (uint32_t p = 0; of && p < file->n_processes; p++) read_names_of(file, p, of);
    free(of);
    free(file->body);
    file->body = body;
    file->body_room = room;
    file->body_chunk = chunk;
    if (file->n_names) qsort(file->names, file->n_names, sizeof *file->names, compare_names);
}

memtrace_object memtrace_file_object(memtrace_file *file, size_t process, size_t chunk, uint32_t number) {
    if (!file->has_names) read_names(file);
    const memtrace_name key = {(uint32_t)process, number, chunk, {NULL, 0}};
    size_t low = 0, high = file->n_names;
    while (low < high) { /* the first entry at or behind the key */
        size_t middle = low + (high - low) / 2;
        if (compare_names(&file->names[middle], &key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    const memtrace_name *before = low ? &file->names[low - 1] : NULL,
                        *at = low < file->n_names ? &file->names[low] : NULL;
    if (before && (before->process != process || before->number != number)) before = NULL;
    if (at && (at->process != process || at->number != number)) at = NULL;
    const memtrace_name *name = before ? before : at;
    return number && name ? name->object : (memtrace_object){"", 0};
}

const char *memtrace_file_object_name(memtrace_file *file, size_t process, size_t chunk, uint32_t number) {
    return memtrace_file_object(file, process, chunk, number).name;
}
