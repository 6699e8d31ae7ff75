/* history.c - a ring of entries, the oldest of which give way. */
#include "torch_plugin/history.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

typedef struct entry {
    uint64_t address, bytes, stream, time_us;
    int ordinal;
    history_action action;
    bool requested; /* the first of a free's two */
} entry;

static struct {
    _Atomic bool records;
    pthread_mutex_t lock;
    /* guarded by lock */
    entry *ring;
    size_t n, room, most, first; /* n entries from `first` on, once the ring has `most` */
} history = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t now_us(void) { /* since the epoch, as PyTorch's */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* With the lock. */
static entry *entry_next(void) {
    if (history.n == history.most) { /* the oldest */
        entry *oldest = &history.ring[history.first];
        history.first = (history.first + 1) % history.most;
        return oldest;
    }
    if (history.n == history.room) {
        size_t room = history.room ? 2 * history.room : 4096;
        if (room > history.most) room = history.most;
        entry *ring = realloc(history.ring, room * sizeof *ring);
        if (!ring) return NULL;
        history.ring = ring;
        history.room = room;
    }
    return &history.ring[history.n++];
}

bool binding_history_records(void) {
    return atomic_load_explicit(&history.records, memory_order_relaxed);
}

/* With the lock. */
static void entry_add(const entry *new) {
    entry *next = history.most ? entry_next() : NULL;
    if (next) *next = *new;
}

void binding_history_add(history_action action, int ordinal, uint64_t address, size_t bytes, void *stream) {
    if (!binding_history_records()) return;
    entry new = {address, bytes, (uintptr_t)stream, now_us(), ordinal, action, action == HISTORY_FREE};
    pthread_mutex_lock(&history.lock);
    entry_add(&new);
    new.requested = false;
    if (action == HISTORY_FREE) entry_add(&new);
    pthread_mutex_unlock(&history.lock);
}

/* (max_entries: 0 stops, clear: forget what was) */
PyObject *binding_history_record(PyObject *self, PyObject *args) {
    (void)self;
    Py_ssize_t most;
    int clear;
    if (!PyArg_ParseTuple(args, "np:history_record", &most, &clear)) return NULL;
    pthread_mutex_lock(&history.lock);
    if (clear || (most > 0 && (size_t)most != history.most)) { /* when it only stops, it can still be read */
        free(history.ring);
        history.ring = NULL;
        history.n = history.room = history.first = 0;
        history.most = (size_t)most;
    }
    pthread_mutex_unlock(&history.lock);
    atomic_store_explicit(&history.records, most > 0, memory_order_relaxed);
    Py_RETURN_NONE;
}

static PyObject *entry_tuple(const entry *e) {
    static const char *const action_name[] = {"alloc", "free_completed", "oom"};
    return Py_BuildValue("(sKKKKi)", e->requested ? "free_requested" : action_name[e->action], e->address,
                         e->bytes, e->stream, e->time_us, e->ordinal);
}

/* A copy of the ring, oldest first: no Python with the lock. */
static entry *entries_copy(size_t *n_out) {
    pthread_mutex_lock(&history.lock);
    entry *copy = malloc((history.n + 1) * sizeof *copy);
    *n_out = copy ? history.n : 0;
    for (size_t i = 0; i < *n_out; i++) copy[i] = history.ring[(history.first + i) % history.n];
    pthread_mutex_unlock(&history.lock);
    return copy;
}

/* () -> [(action, address, bytes, stream, time_us, ordinal)], oldest first */
PyObject *binding_history_entries(PyObject *self, PyObject *args) {
    (void)self;
    if (!PyArg_ParseTuple(args, ":history_entries")) return NULL;
    size_t n;
    entry *entries = entries_copy(&n);
    PyObject *out = entries ? PyList_New(0) : PyErr_NoMemory();
    for (size_t i = 0; out && i < n; i++) {
        PyObject *tuple = entry_tuple(&entries[i]);
        if (!tuple || PyList_Append(out, tuple) < 0) Py_CLEAR(out);
        Py_XDECREF(tuple);
    }
    free(entries);
    return out;
}
