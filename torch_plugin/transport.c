/* transport.c - a transport whose collectives are a Python callable over host memory (gloo, through torch.distributed).
 *
 * An all-gather is a host function on the lane's stream: its thread packs the parts into one buffer, calls Python, and unpacks. Where the
 * device's memory is not the host's, copies on the stream stand before and behind it, through a buffer that is page-locked.
 */
#include "torch_plugin/binding.h"

#include <stdlib.h>
#include <string.h>

typedef struct lane_side {
    uint32_t size, place;     /* members, and which one this rank is */
    char *bounce;             /* where the device's memory is not the host's: page-locked, as large as any call needed so far */
    size_t bounce_bytes;
} lane_side;

/* Operations whose host function has not run, oldest last. A device that has failed runs none of them any more. */
typedef struct operation {
    struct operation *next;
    binding_transport *transport;
    fcdp_lane lane;
    size_t bytes, n; /* bytes: of one member, in all parts together */
    fcdp_part parts[];
} operation;

enum { FAILURE_BYTES = 1024 };

struct binding_transport {
    uint64_t generation; /* of the engine */
    PyObject *callable;
    fcdp_driver *drv;
    bool is_host_memory;
    lane_side lanes[FCDP_N_LANES];
    pthread_mutex_t mutex;
    operation *pending;  /* guarded by mutex, as is what follows */
    fcdp_status failure; /* the first one */
    char text[FAILURE_BYTES];
    void (*failed)(void *arg); /* told of the first failure; NULL: nobody */
    void *failed_arg;
};

/* ---- failures ---- */

static void fail(binding_transport *transport, fcdp_status status, const char *text) {
    pthread_mutex_lock(&transport->mutex);
    if (!transport->failure) {
        transport->failure = status;
        strncpy(transport->text, text, sizeof transport->text - 1);
        if (transport->failed) transport->failed(transport->failed_arg); /* before the stream goes on */
    }
    pthread_mutex_unlock(&transport->mutex);
}

static fcdp_status python_check(void *ctx) {
    binding_transport *transport = ctx;
    pthread_mutex_lock(&transport->mutex);
    fcdp_status status = transport->failure;
    if (status) status = fcdp__fail(status, "%s", transport->text);
    pthread_mutex_unlock(&transport->mutex);
    return status;
}

static void python_abort(void *ctx, const char *why) {
    fail(ctx, FCDP_ERR_TRANSPORT, why);
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
    bool failed = transport->failure != FCDP_OK;
    pthread_mutex_unlock(&transport->mutex);
    return failed;
}

/* ---- the call ---- */

/* The pending Python exception becomes the failure. GIL held. */
static void fail_by_exception(binding_transport *transport) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *chars = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    fail(transport, FCDP_ERR_TRANSPORT, chars ? chars : "the collective raised an exception");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

static void python_call(operation *op, char *buffer) {
    PyGILState_STATE gil = PyGILState_Ensure();
    binding_host_function_begin();
    PyObject *result = PyObject_CallFunction(op->transport->callable, "iKn", (int)op->lane, (unsigned long long)(uintptr_t)buffer,
                                             (Py_ssize_t)op->bytes);
    if (!result) fail_by_exception(op->transport);
    Py_XDECREF(result);
    binding_host_function_end();
    PyGILState_Release(gil);
}

/* Between the parts and one buffer of `size` members' bytes: this rank's own share, or everybody else's. */
static void parts_move(const operation *op, char *buffer, bool own) {
    const lane_side *side = &op->transport->lanes[op->lane];
    for (uint32_t member = 0; member < side->size; member++) {
        char *at = buffer + member * op->bytes;
        for (size_t i = 0; i < op->n && (member == side->place) == own; i++) {
            char *there = (char *)(uintptr_t)op->parts[i].at.addr + member * op->parts[i].stride_bytes;
            memcpy(own ? at : there, own ? there : at, op->parts[i].bytes);
            at += op->parts[i].bytes;
        }
    }
}

static void host_memory_run(operation *op) {
    size_t size = op->transport->lanes[op->lane].size;
    if (op->n == 1 && op->parts[0].stride_bytes == op->parts[0].bytes) {
        python_call(op, (char *)(uintptr_t)op->parts[0].at.addr);
        return;
    }
    char *buffer = malloc(size * op->bytes + 1);
    if (!buffer) {
        fail(op->transport, FCDP_ERR_SYSTEM, "no host memory for a collective");
        return;
    }
    parts_move(op, buffer, true);
    python_call(op, buffer);
    if (!has_failed(op->transport)) parts_move(op, buffer, false);
    free(buffer);
}

static void operation_unlink(operation *op) {
    binding_transport *transport = op->transport;
    pthread_mutex_lock(&transport->mutex);
    operation **link = &transport->pending;
    while (*link != op) link = &(*link)->next;
    *link = op->next;
    pthread_mutex_unlock(&transport->mutex);
}

/* On a thread of the stream's. */
static void operation_run(void *arg) {
    operation *op = arg;
    if (!has_failed(op->transport)) {
        if (op->transport->is_host_memory)
            host_memory_run(op);
        else
            python_call(op, op->transport->lanes[op->lane].bounce);
    }
    operation_unlink(op);
    free(op);
}

static operation *operation_make(binding_transport *transport, fcdp_lane lane, const fcdp_part *parts, size_t n) {
    operation *op = malloc(sizeof *op + n * sizeof *parts);
    if (!op) return NULL;
    *op = (operation){.transport = transport, .lane = lane, .n = n};
    memcpy(op->parts, parts, n * sizeof *parts);
    for (size_t i = 0; i < n; i++) op->bytes += parts[i].bytes;
    pthread_mutex_lock(&transport->mutex);
    op->next = transport->pending;
    transport->pending = op;
    pthread_mutex_unlock(&transport->mutex);
    return op;
}

/* ---- where the device's memory is its own ---- */

/* Grown between operations of the lane, which all run on one stream. */
static fcdp_status bounce_reserve(binding_transport *transport, lane_side *side, size_t bytes, fcdp_stream stream) {
    if (side->bounce_bytes >= bytes) return FCDP_OK;
    fcdp_status status = fcdp__driver_stream_sync(transport->drv, stream);
    if (status) return status;
    if (side->bounce) status = fcdp__driver_host_unpin(transport->drv, side->bounce, side->bounce_bytes);
    if (status) return status;
    free(side->bounce);
    side->bounce_bytes = 0;
    size_t rounded = fcdp__round_up(bytes, 64 << 10);
    side->bounce = aligned_alloc(64 << 10, rounded);
    if (!side->bounce) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for collectives of %zu bytes", bytes);
    status = fcdp__driver_host_pin(transport->drv, side->bounce, rounded);
    if (status) {
        free(side->bounce);
        side->bounce = NULL;
        return status;
    }
    side->bounce_bytes = rounded;
    return FCDP_OK;
}

/* Between the device and the buffer: this rank's own share to it, or everybody else's from it. */
static fcdp_status parts_copy(const operation *op, bool own, fcdp_stream stream) {
    const lane_side *side = &op->transport->lanes[op->lane];
    fcdp_driver *drv = op->transport->drv;
    fcdp_status status = FCDP_OK;
    for (uint32_t member = 0; member < side->size; member++) {
        char *at = side->bounce + member * op->bytes;
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

static fcdp_status device_memory_enqueue(operation *op, fcdp_stream stream) {
    binding_transport *transport = op->transport;
    lane_side *side = &transport->lanes[op->lane];
    fcdp_status status = bounce_reserve(transport, side, side->size * op->bytes, stream);
    if (!status) status = parts_copy(op, true, stream);
    if (!status) status = fcdp__driver_host_function(transport->drv, stream, operation_run, op);
    return status;
}

/* ---- the table ---- */

static fcdp_status host_memory_enqueue(operation *op, fcdp_stream stream) {
    fcdp_access accesses[FCDP_MAX_ACCESSES];
    size_t n = op->n < FCDP_MAX_ACCESSES ? op->n : FCDP_MAX_ACCESSES;
    for (size_t i = 0; i < n; i++) accesses[i] = (fcdp_access){op->parts[i].at, op->parts[i].bytes, true};
    fcdp__driver_announce(op->transport->drv, accesses, n);
    return fcdp__driver_host_function(op->transport->drv, stream, operation_run, op);
}

static fcdp_status python_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n, fcdp_stream stream) {
    binding_transport *transport = ctx;
    operation *op = operation_make(transport, lane, parts, n);
    if (!op) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a collective of %zu parts", n);
    if (transport->is_host_memory) {
        fcdp_status status = host_memory_enqueue(op, stream);
        if (!status) return FCDP_OK;
        operation_unlink(op);
        free(op);
        return status;
    }
    operation *behind = operation_make(transport, lane, parts, n); /* op is gone when the copies behind it are enqueued */
    fcdp_status status = behind ? device_memory_enqueue(op, stream)
                                : fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a collective of %zu parts", n);
    if (status) {
        operation_unlink(op);
        free(op);
    } else {
        status = parts_copy(behind, false, stream);
    }
    if (behind) {
        operation_unlink(behind);
        free(behind);
    }
    return status;
}

binding_transport *binding_transport_create(PyObject *callable, fcdp_engine *engine, const fcdp_topology *topology) {
    binding_transport *transport = calloc(1, sizeof *transport);
    if (!transport) return (binding_transport *)PyErr_NoMemory();
    transport->callable = Py_NewRef(callable);
    transport->drv = fcdp_engine_driver(engine);
    transport->generation = binding_generation();
    transport->is_host_memory = fcdp_engine_is_sim(engine);
    pthread_mutex_init(&transport->mutex, NULL);
    lane_side inter = {.size = topology->n_nodes, .place = topology->node};
    transport->lanes[FCDP_LANE_INTER_0] = transport->lanes[FCDP_LANE_INTER_1] = inter;
    transport->lanes[FCDP_LANE_NODE] = (lane_side){.size = topology->node_size, .place = topology->local};
    return transport;
}

fcdp_transport binding_transport_table(binding_transport *transport) {
    return (fcdp_transport){
        .ctx = transport, .all_gather = python_all_gather, .check = python_check, .abort = python_abort,
        .on_failure = python_on_failure};
}

/* The comm, and so every stream's use of it, has ended. Where the engine has too, what it had page-locked is the driver's to undo. */
void binding_transport_destroy(binding_transport *transport) {
    for (int lane = 0; lane < FCDP_N_LANES && transport->generation == binding_generation(); lane++) {
        lane_side *side = &transport->lanes[lane];
        if (side->bounce && fcdp__driver_host_unpin(transport->drv, side->bounce, side->bounce_bytes))
            fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
        free(side->bounce);
    }
    while (transport->pending) {
        operation *op = transport->pending;
        transport->pending = op->next;
        free(op);
    }
    Py_XDECREF(transport->callable);
    pthread_mutex_destroy(&transport->mutex);
    free(transport);
}
