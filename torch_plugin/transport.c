/* transport.c - a transport whose collectives are a Python callable over host memory (gloo, through
 * torch.distributed).
 *
 * An all-gather is four steps on the stream: the parts are packed into a buffer; a host function begins the
 * collective, in its turn on the lane; another waits for its end; the parts are unpacked. The lane's next
 * collective begins before the last one's end and queues behind it, so that nothing but the link stands
 * between two transfers. Host functions pack; where the device's memory is not the host's, copies do, and the
 * buffer is page-locked.
 */
#include "torch_plugin/transport.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "torch_plugin/handles.h"

typedef struct lane_side {
    uint32_t size, place; /* members, and which one this rank is */
} lane_side;

/* A stream's, whose operations use it one after another: as large as any needed so far; page-locked where the
 * device's memory is not the host's. Replaced by whoever enqueues, when the stream is done with it. */
typedef struct bounce {
    fcdp_stream stream;
    char *at;
    size_t bytes;
} bounce;

/* Operations whose last host function has not run. A device that has failed runs none of them any more. */
typedef struct operation {
    struct operation *next;
    binding_transport *transport;
    fcdp_lane lane;
    char *buffer;    /* of `size` members' bytes: a stream's, or the only part's own place */
    PyObject *begun; /* what Python's `begin` returned; NULL: not begun, failed, or finished */
    size_t bytes, n; /* bytes: of one member, in all parts together */
    const fcdp_part *parts;
    fcdp_part own_parts[];
} operation;

enum { MAX_STREAMS = 4 };

struct binding_transport {
    uint64_t generation; /* of the engine */
    PyObject *python;    /* begin, finish */
    fcdp_driver *drv;
    bool is_host_memory;
    lane_side lanes[FCDP_N_LANES];
    bounce bounces[MAX_STREAMS];
    pthread_mutex_t mutex;
    operation *pending;        /* guarded by mutex, as is what follows */
    fcdp_failure failure;      /* the first one */
    void (*failed)(void *arg); /* told of the first failure; NULL: nobody */
    void *failed_arg;
};

static atomic_size_t n_transports;

bool binding_transport_uses_python(void) {
    return atomic_load_explicit(&n_transports, memory_order_relaxed) > 0;
}

/* ---- failures ---- */

static void fail(binding_transport *transport, const char *text) {
    pthread_mutex_lock(&transport->mutex);
    if (!transport->failure.status) {
        transport->failure = fcdp__failure_keep(fcdp__fail(FCDP_ERR_TRANSPORT, "%s", text));
        if (transport->failed) transport->failed(transport->failed_arg); /* before the stream goes on */
    }
    pthread_mutex_unlock(&transport->mutex);
}

static fcdp_status python_check(void *ctx) {
    binding_transport *transport = ctx;
    pthread_mutex_lock(&transport->mutex);
    fcdp_status status = fcdp__failure_restore(&transport->failure);
    pthread_mutex_unlock(&transport->mutex);
    return status;
}

static void python_abort(void *ctx, const char *why) {
    fail(ctx, why);
}

static void python_on_failure(void *ctx, void (*failed)(void *arg), void *arg) {
    binding_transport *transport = ctx;
    pthread_mutex_lock(&transport->mutex);
    transport->failed = failed;
    transport->failed_arg = arg;
    pthread_mutex_unlock(&transport->mutex);
}

static bool has_failed(binding_transport *transport) {
    pthread_mutex_lock(&transport->mutex);
    bool failed = transport->failure.status != FCDP_OK;
    pthread_mutex_unlock(&transport->mutex);
    return failed;
}

/* ---- the call ---- */

/* Each takes the GIL, on a thread of a stream's. */
static _Atomic uint64_t n_python_calls;

uint64_t binding_transport_python_calls(void) {
    return n_python_calls;
}

static PyGILState_STATE python_enter(void) {
    PyGILState_STATE gil = PyGILState_Ensure();
    n_python_calls++;
    binding_host_function_begin();
    return gil;
}

/* The exception of a call that has raised one is the transport's failure. */
static void failure_take(binding_transport *transport, bool succeeded) {
    if (succeeded) return;
    (void)!binding_exception_take(FCDP_ERR_TRANSPORT);
    fail(transport, fcdp_error_text());
}

static void python_exit(PyGILState_STATE gil) {
    binding_host_function_end();
    PyGILState_Release(gil);
}

/* With the GIL. NULL: it has failed, and so has the transport. */
static PyObject *python_begin(binding_transport *transport, fcdp_lane lane, void *buffer, size_t bytes) {
    PyObject *begun = PyObject_CallMethod(transport->python, "begin", "iKn", (int)lane,
                                          (unsigned long long)(uintptr_t)buffer, (Py_ssize_t)bytes);
    failure_take(transport, begun != NULL);
    return begun;
}

/* With the GIL. Takes the reference. */
static void python_finish(binding_transport *transport, fcdp_lane lane, PyObject *begun) {
    PyObject *result = PyObject_CallMethod(transport->python, "finish", "iO", (int)lane, begun);
    failure_take(transport, result != NULL);
    Py_XDECREF(result);
    Py_DECREF(begun);
}

/* Pending from here on. */
static operation *operation_make(binding_transport *transport, fcdp_lane lane, const fcdp_part *parts,
                                 size_t n) {
    operation *op = malloc(sizeof *op + n * sizeof *parts);
    if (!op) return NULL;
    *op = (operation){.transport = transport, .lane = lane, .n = n};
    memcpy(op->own_parts, parts, n * sizeof *parts);
    op->parts = op->own_parts;
    for (size_t i = 0; i < n; i++) op->bytes += parts[i].bytes;
    pthread_mutex_lock(&transport->mutex);
    op->next = transport->pending;
    transport->pending = op;
    pthread_mutex_unlock(&transport->mutex);
    return op;
}

/* ---- what streams wait for: host functions, and exchanges by a worker (alloc/worker.h) ---- */

/* Between the parts and the buffer: this rank's own share to it, or everybody else's from it. */
static void parts_move(const operation *op, bool own) {
    const lane_side *side = &op->transport->lanes[op->lane];
    for (uint32_t member = 0; member < side->size; member++) {
        char *at = op->buffer + member * op->bytes;
        for (size_t i = 0; i < op->n && (member == side->place) == own; i++) {
            char *there = (char *)(uintptr_t)op->parts[i].at.addr + member * op->parts[i].stride_bytes;
            memcpy(own ? at : there, own ? there : at, op->parts[i].bytes);
            at += op->parts[i].bytes;
        }
    }
}

static void pack_run(void *arg) {
    operation *op = arg;
    if (!has_failed(op->transport)) parts_move(op, true);
}

static void begin_run(void *arg) {
    operation *op = arg;
    if (has_failed(op->transport)) return;
    PyGILState_STATE gil = python_enter();
    op->begun = python_begin(op->transport, op->lane, op->buffer, op->bytes);
    python_exit(gil);
}

/* The only part lies as the call wants it, so nothing is packed. */
static bool is_in_place(const operation *op) {
    return op->transport->is_host_memory && op->n == 1 && op->parts[0].stride_bytes == op->parts[0].bytes;
}

/* What has begun is waited for even where the transport has failed since: it
 * writes to the buffer until it ends. */
static void finish_run(void *arg) {
    operation *op = arg;
    binding_transport *transport = op->transport;
    if (op->begun) {
        PyGILState_STATE gil = python_enter();
        python_finish(transport, op->lane, op->begun);
        op->begun = NULL;
        python_exit(gil);
    }
    bool unpacks = transport->is_host_memory && !is_in_place(op);
    if (unpacks && !has_failed(transport)) parts_move(op, false);
    pthread_mutex_lock(&transport->mutex);
    operation **link = &transport->pending;
    while (*link != op) link = &(*link)->next;
    *link = op->next;
    pthread_mutex_unlock(&transport->mutex);
    free(op);
}

static fcdp_status python_exchange(void *ctx, fcdp_channel channel, void *buffer, size_t bytes) {
    binding_transport *transport = ctx;
    const fcdp_lane lane = FCDP_LANE_INTER;
    FCDP_CHECK(1, channel == FCDP_CHANNEL_TURN);
    if (!has_failed(transport)) {
        PyGILState_STATE gil = python_enter();
        PyObject *begun = python_begin(transport, lane, buffer, bytes);
        if (begun) python_finish(transport, lane, begun);
        python_exit(gil);
    }
    return python_check(transport);
}

/* ---- the buffers ---- */

static void bounce_unmap(bounce *b) {
    if (b->at) munmap(b->at, b->bytes);
    *b = (bounce){.stream = b->stream};
}

static fcdp_status bounce_free(binding_transport *transport, bounce *b) {
    fcdp_status status = FCDP_OK;
    size_t stay_bytes;
    if (b->at && !transport->is_host_memory)
        status = fcdp__driver_host_unpin(transport->drv, b->at, b->bytes, &stay_bytes);
    if (status) return status;
    bounce_unmap(b);
    return FCDP_OK;
}

/* A stream keeps its buffer: a larger one takes the place of it once the stream is done with it. */
static fcdp_status bounce_reserve(binding_transport *transport, fcdp_stream stream, size_t bytes,
                                  char **at_out) {
    bounce *b = transport->bounces, *last = b + MAX_STREAMS - 1;
    while (b < last && b->stream && b->stream != stream) b++;
    if (b->stream && b->stream != stream)
        return fcdp__fail(FCDP_ERR_INVALID, "collectives on more than %d streams", MAX_STREAMS);
    b->stream = stream;
    if (b->bytes < bytes) {
        size_t rounded = fcdp__round_up(bytes, 64 << 10);
        fcdp_status status = b->at ? fcdp__driver_stream_sync(transport->drv, stream) : FCDP_OK;
        if (!status) status = bounce_free(transport, b);
        if (status) return status;
        char *at = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED)
            return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for collectives of %zu bytes", bytes);
        (void)madvise(at, rounded,
                      MADV_DONTFORK); /* behind a fork, a write would move pages that are pinned */
        size_t stay_bytes = 0;
        if (!transport->is_host_memory)
            status = fcdp__driver_host_pin(transport->drv, at, rounded, &stay_bytes);
        if (status) {
            if (!stay_bytes) munmap(at, rounded);
            return status;
        }
        b->at = at;
        b->bytes = rounded;
    }
    *at_out = b->at;
    return FCDP_OK;
}

/* ---- enqueueing ---- */

/* What the next host function does to the parts, for simgpu's checks: reads this rank's own share, writes
 * everybody else's. */
static void parts_announce(const operation *op, bool reads, bool writes) {
    const lane_side *side = &op->transport->lanes[op->lane];
    if (!op->transport->is_host_memory) return;
    size_t n = 0;
    fcdp_access *accesses = malloc((op->n * side->size + 1) * sizeof *accesses);
    for (uint32_t member = 0; member < side->size && accesses; member++)
        for (size_t i = 0; i < op->n && (member == side->place ? reads : writes); i++)
            accesses[n++] = (fcdp_access){fcdp__dptr_add(op->parts[i].at, member * op->parts[i].stride_bytes),
                                          op->parts[i].bytes, member != side->place};
    fcdp__driver_announce(op->transport->drv, accesses, n);
    free(accesses);
}

/* Copies on the stream: this rank's own share to the buffer, or everybody else's from it. */
static fcdp_status parts_copy(const operation *op, bool own, fcdp_stream stream) {
    const lane_side *side = &op->transport->lanes[op->lane];
    fcdp_driver *drv = op->transport->drv;
    fcdp_status status = FCDP_OK;
    for (uint32_t member = 0; member < side->size; member++) {
        char *at = op->buffer + member * op->bytes;
        for (size_t i = 0; i < op->n && (member == side->place) == own && !status; i++) {
            const fcdp_part *part = &op->parts[i];
            fcdp_dptr there = fcdp__dptr_add(part->at, member * part->stride_bytes);
            status = own ? fcdp__driver_copy_d2h(drv, at, there, part->bytes, stream)
                         : fcdp__driver_copy_h2d(drv, there, at, part->bytes, stream);
            at += part->bytes;
        }
    }
    return status;
}

/* Where not all of it can be enqueued, it stays pending until the
 * transport ends: the stream may know of it. */
static fcdp_status python_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n,
                                     fcdp_stream stream, fcdp_event turn) {
    binding_transport *transport = ctx;
    fcdp_driver *drv = transport->drv;
    operation *op = operation_make(transport, lane, parts, n);
    if (!op) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a collective of %zu parts", n);
    fcdp_status status = FCDP_OK;
    if (is_in_place(op))
        op->buffer = (char *)(uintptr_t)parts[0].at.addr;
    else
        status = bounce_reserve(transport, stream, transport->lanes[lane].size * op->bytes, &op->buffer);
    if (!status && !is_in_place(op)) {
        parts_announce(op, true, false);
        status = transport->is_host_memory ? fcdp__driver_host_function(drv, stream, pack_run, op)
                                           : parts_copy(op, true, stream);
    }
    if (!status) status = fcdp__driver_stream_wait(drv, stream, turn);
    if (!status && is_in_place(op)) parts_announce(op, true, true);
    if (!status) status = fcdp__driver_host_function(drv, stream, begin_run, op);
    if (!status) status = fcdp__driver_event_record(drv, turn, stream);
    operation seen = *op; /* finish_run frees it, so from its enqueueing on `op` is the stream's */
    seen.parts = parts;
    if (!status) parts_announce(&seen, false, true);
    if (!status) status = fcdp__driver_host_function(drv, stream, finish_run, op);
    return status || transport->is_host_memory ? status : parts_copy(&seen, false, stream);
}

/* ---- the table ---- */

binding_transport *binding_transport_create(PyObject *python, fcdp_engine *engine,
                                            const fcdp_topology *topology) {
    binding_transport *transport = calloc(1, sizeof *transport);
    if (!transport) return (binding_transport *)PyErr_NoMemory();
    transport->python = Py_NewRef(python);
    transport->drv = fcdp_engine_driver(engine);
    transport->generation = binding_generation();
    transport->is_host_memory = fcdp_engine_host_computes(engine);
    pthread_mutex_init(&transport->mutex, NULL);
    atomic_fetch_add_explicit(&n_transports, 1, memory_order_relaxed);
    transport->lanes[FCDP_LANE_INTER] = (lane_side){.size = topology->n_nodes, .place = topology->node};
    transport->lanes[FCDP_LANE_NODE] = (lane_side){.size = topology->node_size, .place = topology->local};
    return transport;
}

PyObject *binding_transport_python(const binding_transport *transport) {
    return transport->python;
}

fcdp_transport binding_transport_table(binding_transport *transport) {
    return (fcdp_transport){.ctx = transport,
                            .all_gather = python_all_gather,
                            .exchange = python_exchange,
                            .check = python_check,
                            .abort = python_abort,
                            .on_failure = python_on_failure,
                            .through_host = true};
}

/* The comm, and so every stream's use of it, has ended. Where the engine has too, what it had page-locked is
 * the driver's to undo. A device that failed may have left a collective that has begun and that nobody waited
 * for: it may still write, so the buffers stay. */
void binding_transport_destroy(binding_transport *transport) {
    bool driver_lives = transport->generation == binding_generation();
    bool is_written = false;
    for (const operation *op = transport->pending; op; op = op->next) is_written = is_written || op->begun;
    for (bounce *b = transport->bounces; b < transport->bounces + MAX_STREAMS && !is_written; b++)
        if (!driver_lives)
            bounce_unmap(b);
        else if (bounce_free(transport, b))
            fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    while (transport->pending) {
        operation *op = transport->pending;
        transport->pending = op->next;
        Py_XDECREF(op->begun);
        free(op);
    }
    Py_XDECREF(transport->python);
    pthread_mutex_destroy(&transport->mutex);
    atomic_fetch_sub_explicit(&n_transports, 1, memory_order_relaxed);
    free(transport);
}
