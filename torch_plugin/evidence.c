/* evidence.c - reads FSDP2's parameters by their Python attributes, which is all that torch promises of them.
 *
 * Every unshard looks at every parameter of its group, so this is the longest part of a cached one. Python
 * spends most of it on frames, tuples and the numbers in them. Here are the same reads: an attribute may be a
 * property, a tensor of a subclass, or raise. Nothing is kept between two readings but the names and the
 * dtypes; Python is called where an extent's objects are others than before (fsdp2.py's _Extent.renew). */
#include "torch_plugin/evidence.h"

#include <stdlib.h>

/* ---- names, for the life of the process ---- */

#define NAMES(X)                                                                                             \
    X(_local_tensor)                                                                                         \
    X(_objects)                                                                                              \
    X(_sharded_param_data)                                                                                   \
    X(_unsharded_param)                                                                                      \
    X(_unsharded_version)                                                                                    \
    X(_version)                                                                                              \
    X(by_device)                                                                                             \
    X(by_host)                                                                                               \
    X(data_ptr)                                                                                              \
    X(dtype)                                                                                                 \
    X(fsdp_param)                                                                                            \
    X(is_copied)                                                                                             \
    X(is_cpu)                                                                                                \
    X(is_inference)                                                                                          \
    X(nbytes)                                                                                                \
    X(param_dtype)                                                                                           \
    X(renew) X(requires_grad) X(sharded_param) X(steps) X(untyped_storage)

#define FIELD(name) PyObject *name;
static struct {
    NAMES(FIELD)
} names;

bool binding_evidence_init(void) {
#define INTERN(name)                                                                                         \
    if (!names.name && !(names.name = PyUnicode_InternFromString(#name))) return false;
    NAMES(INTERN)
    return true;
}

/* ---- reads: false with an error set ---- */

static PyObject *get(PyObject *of, PyObject *name) {
    return PyObject_GetAttr(of, name);
}

static PyObject *ask(PyObject *of, PyObject *method) {
    return PyObject_CallMethodObjArgs(of, method, NULL);
}

/* Consumes `object`, which may be NULL with an error set. */
static bool number(PyObject *object, uint64_t *out) {
    if (!object) return false;
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    Py_DECREF(object);
    *out = value;
    return value != (unsigned long long)-1 || !PyErr_Occurred();
}

static bool truth(PyObject *object, bool *out) {
    if (!object) return false;
    int value = PyObject_IsTrue(object);
    Py_DECREF(object);
    *out = value > 0;
    return value >= 0;
}

/* 0 of an inference tensor, which has no counter: asking for it raises. */
static bool version_of(PyObject *tensor, uint64_t *out) {
    bool is_inference;
    *out = 0;
    if (number(get(tensor, names._version), out)) return true;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (truth(ask(tensor, names.is_inference), &is_inference) && is_inference) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        *out = 0;
    } else {
        PyErr_Restore(type, value, trace);
    }
    return !PyErr_Occurred();
}

/* ---- dtypes, by the order in which they came ---- */

enum { MOST_DTYPES = 256 };
static struct {
    PyObject *known[MOST_DTYPES];
    unsigned n;
} dtypes; /* guarded by the GIL */

/* Not 0; 0 with an error set. */
static uint64_t dtype_code(PyObject *dtype) {
    for (unsigned i = 0; i < dtypes.n; i++)
        if (dtypes.known[i] == dtype) return i + 1;
    if (dtypes.n == MOST_DTYPES) {
        PyErr_SetString(PyExc_RuntimeError, "torch has more dtypes than FCDP knows numbers for");
        return 0;
    }
    dtypes.known[dtypes.n++] = Py_NewRef(dtype);
    return dtypes.n;
}

static bool dtype_codes(PyObject *shard, PyObject *gathered, uint64_t *out) {
    uint64_t first = dtype_code(shard), second = first ? dtype_code(gathered) : 0;
    *out = first << 16 | second;
    return second != 0;
}

/* ---- one extent ---- */

typedef struct reading { /* references, but for the extent; `param` and `local` for signals alone */
    PyObject *extent, *fsdp_param, *data, *storage, *param, *local;
    uint64_t base; /* address of the storage */
} reading;

typedef struct readers { /* of a group's shards */
    bool device, host;
    uint64_t steps; /* of optimizers, at the last observation */
} readers;

static bool readers_of(PyObject *group, readers *out) {
    out->host = false;
    return truth(get(group, names.by_device), &out->device) &&
           (out->device || truth(get(group, names.by_host), &out->host)) &&
           number(get(group, names.steps), &out->steps);
}

static bool is_read(const readers *readers, PyObject *data, bool *out) {
    *out = readers->device;
    return !readers->host || truth(get(data, names.is_cpu), out);
}

static bool reading_begin(reading *r, PyObject *extent) {
    *r = (reading){.extent = extent};
    return (r->fsdp_param = get(extent, names.fsdp_param)) &&
           (r->data = get(r->fsdp_param, names._sharded_param_data)) &&
           (r->storage = ask(r->data, names.untyped_storage)) &&
           number(ask(r->storage, names.data_ptr), &r->base);
}

static void reading_end(reading *r) {
    Py_XDECREF(r->storage);
    Py_XDECREF(r->data);
    Py_XDECREF(r->local);
    Py_XDECREF(r->param);
    Py_XDECREF(r->fsdp_param);
}

/* The number of the objects that hold the shard, which stands behind them in the tuple. */
static bool read_serial(const reading *r, PyObject *group, uint64_t *out) {
    PyObject *known = get(r->extent, names._objects);
    if (!known) return false;
    bool same = PyTuple_GetItem(known, 0) == r->param && PyTuple_GetItem(known, 1) == r->local &&
                PyTuple_GetItem(known, 2) == r->data;
    if (!same && !PyErr_Occurred()) {
        Py_DECREF(known);
        known = PyObject_CallMethodObjArgs(r->extent, names.renew, group, r->param, r->local, r->data, NULL);
    }
    PyObject *serial = known ? PyTuple_GetItem(known, 3) : NULL;
    bool done = number(Py_XNewRef(serial), out);
    Py_XDECREF(known);
    return done;
}

static bool read_dtypes(const reading *r, uint64_t *out) {
    PyObject *shard = get(r->data, names.dtype);
    PyObject *gathered = shard ? get(r->fsdp_param, names.param_dtype) : NULL;
    bool done = gathered && dtype_codes(shard, gathered == Py_None ? shard : gathered, out);
    Py_XDECREF(shard);
    Py_XDECREF(gathered);
    return done;
}

/* Without a fingerprint any optimizer may have written any trainable parameter by the time of an
 * observation. */
static bool read_steps(const reading *r, const readers *readers, fcdp_signals *out) {
    bool requires_grad, read = true;
    if (!truth(get(r->param, names.requires_grad), &requires_grad)) return false;
    if (requires_grad && !is_read(readers, r->data, &read)) return false;
    if (!number(get(r->extent, names.steps), &out->optimizer_steps)) return false;
    out->requires_grad = requires_grad;
    out->optimizer_steps += read ? 0 : readers->steps;
    return true;
}

static bool read_signals(reading *r, PyObject *group, const readers *readers, fcdp_signals *out) {
    *out = (fcdp_signals){.storage = r->base};
    return (r->param = get(r->fsdp_param, names.sharded_param)) &&
           (r->local = get(r->param, names._local_tensor)) && read_serial(r, group, &out->object_id) &&
           version_of(r->param, &out->version_outer) && version_of(r->local, &out->version_local) &&
           version_of(r->data, &out->version_data) && read_steps(r, readers, out) &&
           read_dtypes(r, &out->dtypes);
}

/* Of the shard's bytes, not 0; 0: they are not there. A program may free a storage that it does not use
 * now. */
static bool read_address(const reading *r, uint64_t bytes, uint64_t *out) {
    uint64_t there, address;
    *out = 0;
    if (!number(ask(r->storage, names.nbytes), &there) || !number(ask(r->data, names.data_ptr), &address))
        return false;
    if (bytes && there < address - r->base + bytes) return true;
    *out = address ? address : 1;
    return true;
}

static bool read_place(const reading *r, const readers *readers, const void **shard_out, size_t *bytes_out) {
    bool read;
    uint64_t address, bytes;
    if (!is_read(readers, r->data, &read) || !number(get(r->data, names.nbytes), &bytes) ||
        !read_address(r, bytes, &address))
        return false;
    *shard_out = read ? (const void *)(uintptr_t)address : NULL;
    *bytes_out = read || !address ? (size_t)bytes : 0;
    return true;
}

/* ---- all of a group ---- */

static bool read_extent(PyObject *group, PyObject *extent, const readers *readers,
                        const binding_evidence *out, Py_ssize_t i) {
    reading r;
    bool done = reading_begin(&r, extent) &&
                (!out->shards || read_place(&r, readers, &out->shards[i], &out->shard_bytes[i])) &&
                (!out->signals || read_signals(&r, group, readers, &out->signals[i]));
    reading_end(&r);
    return done;
}

bool binding_evidence_read(PyObject *group, PyObject *extents, const binding_evidence *evidence,
                           bool *by_device_out) {
    readers readers = {0};
    Py_ssize_t n = PyList_Size(extents);
    bool done = n >= 0 && readers_of(group, &readers);
    for (Py_ssize_t i = 0; done && i < n; i++)
        done = read_extent(group, PyList_GetItem(extents, i), &readers, evidence, i);
    *by_device_out = readers.device;
    return done;
}

/* A new reference; NULL without an error: it has no such attribute. */
static PyObject *get_if_there(PyObject *of, PyObject *name) {
    PyObject *found = PyObject_GetAttr(of, name);
    if (!found && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return found;
}

/* *before: 0 where nobody has asked. */
static bool remember_version(PyObject *extent, uint64_t now, uint64_t *before) {
    PyObject *known = get(extent, names._unsharded_version);
    *before = 0;
    if (known == Py_None)
        Py_DECREF(known);
    else if (!number(known, before))
        return false;
    if (now == *before) return true;
    PyObject *version = PyLong_FromUnsignedLongLong(now);
    int failed = version ? PyObject_SetAttr(extent, names._unsharded_version, version) : -1;
    Py_XDECREF(version);
    return failed == 0;
}

/* Plain FSDP2 drops such a write at reshard. */
static int was_written(PyObject *extent) {
    PyObject *fsdp_param = get(extent, names.fsdp_param);
    PyObject *unsharded = fsdp_param ? get_if_there(fsdp_param, names._unsharded_param) : NULL;
    bool is_copied;
    uint64_t now, before;
    int answer = PyErr_Occurred() ? -1 : 0;
    if (unsharded && unsharded != Py_None) {
        if (!truth(get(extent, names.is_copied), &is_copied))
            answer = -1;
        else if (!is_copied)
            answer = version_of(unsharded, &now) && remember_version(extent, now, &before) ? now != before
                                                                                           : -1;
    }
    Py_XDECREF(unsharded);
    Py_XDECREF(fsdp_param);
    return answer;
}

/* Of each: asking remembers what was seen. */
int binding_evidence_written(PyObject *extents) {
    Py_ssize_t n = PyList_Size(extents);
    int any = n < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; any >= 0 && i < n; i++) {
        int answer = was_written(PyList_GetItem(extents, i));
        any = answer < 0 ? -1 : any | answer;
    }
    return any;
}

/* ---- methods ---- */

/* n values of 8 bytes each. */
static PyObject *column_of(const void *values, Py_ssize_t n) {
    return PyBytes_FromStringAndSize(values, n * 8);
}

_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8, "a column's values");

PyObject *binding_evidence_places(PyObject *self __attribute__((unused)), PyObject *args) {
    PyObject *group, *extents, *both = NULL;
    bool by_device;
    if (!PyArg_ParseTuple(args, "OO:evidence_places", &group, &extents)) return NULL;
    Py_ssize_t n = PyList_Size(extents);
    if (n < 0) return NULL;
    binding_evidence evidence = {.shards = calloc((size_t)n + 1, sizeof(void *)),
                                 .shard_bytes = calloc((size_t)n + 1, sizeof(size_t))};
    if (!evidence.shards || !evidence.shard_bytes)
        PyErr_NoMemory();
    else if (binding_evidence_read(group, extents, &evidence, &by_device))
        both = Py_BuildValue("(NN)", column_of(evidence.shards, n), column_of(evidence.shard_bytes, n));
    free(evidence.shards);
    free(evidence.shard_bytes);
    return both;
}

PyObject *binding_evidence_signals(PyObject *self __attribute__((unused)), PyObject *args) {
    PyObject *group, *extents;
    bool by_device;
    if (!PyArg_ParseTuple(args, "OO:evidence_signals", &group, &extents)) return NULL;
    Py_ssize_t n = PyList_Size(extents);
    PyObject *signals = n < 0 ? NULL : PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(fcdp_signals));
    if (!signals) return NULL;
    binding_evidence evidence = {.signals = (fcdp_signals *)(void *)PyBytes_AsString(signals)};
    if (binding_evidence_read(group, extents, &evidence, &by_device)) return signals;
    Py_DECREF(signals);
    return NULL;
}

PyObject *binding_evidence_was_written(PyObject *self __attribute__((unused)), PyObject *extents) {
    int answer = binding_evidence_written(extents);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

PyObject *binding_evidence_dtypes(PyObject *self __attribute__((unused)), PyObject *args) {
    PyObject *shard, *gathered;
    uint64_t codes;
    if (!PyArg_ParseTuple(args, "OO:dtype_codes", &shard, &gathered)) return NULL;
    return dtype_codes(shard, gathered, &codes) ? PyLong_FromUnsignedLongLong(codes) : NULL;
}
