/* history.c - records the last calls of fcdp_alloc for PyTorch's memory visualiser.
 *
 * The ring grows up to the number of entries that was asked for; then a new entry takes the place of the
 * oldest. Entries have PyTorch's words for actions, so that its own tools draw the picture. The file knows no
 * block: it keeps what it is told.
 */
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

bool binding_history_records(void) {
    return atomic_load_explicit(&history.records, memory_order_relaxed);
}

/* With the lock. The ring grows up to history.most entries. */
static void entry_add(const entry *new) {
    if (history.most == 0) return;
    if (history.n == history.most) { /* over the oldest */
        history.ring[history.first] = *new;
        history.first = (history.first + 1) % history.most;
        return;
    }
    if (history.n == history.room) {
        size_t room = history.room ? 2 * history.room : 4096;
        if (room > history.most) room = history.most;
        entry *ring = realloc(history.ring, room * sizeof *ring);
        if (!ring) return;
        history.ring = ring;
        history.room = room;
    }
    history.ring[history.n++] = *new;
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

/* (max_entries: 0 stops; clear: drop what was recorded) */
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

/* () -> [(action, address, bytes, stream, time_us, ordinal)], oldest first. The ring is copied: no Python
 * with the lock, since a garbage collection may free tensors. */
PyObject *binding_history_entries(PyObject *self, PyObject *args) {
    static const char *const action_name[] = {"alloc", "free_completed", "oom"};
    (void)self;
    (void)args;
    pthread_mutex_lock(&history.lock);
    size_t n = history.n;
    entry *entries = malloc((n + 1) * sizeof *entries);
    for (size_t i = 0; entries && i < n; i++) entries[i] = history.ring[(history.first + i) % n];
    pthread_mutex_unlock(&history.lock);
    PyObject *out = entries ? PyList_New(0) : PyErr_NoMemory();
    for (size_t i = 0; out && i < n; i++) {
        const entry *e = &entries[i];
        PyObject *tuple = Py_BuildValue("(sKKKKi)", e->requested ? "free_requested" : action_name[e->action],
                                        e->address, e->bytes, e->stream, e->time_us, e->ordinal);
        if (!tuple || PyList_Append(out, tuple) < 0) Py_CLEAR(out);
        Py_XDECREF(tuple);
    }
    free(entries);
    return out;
}
