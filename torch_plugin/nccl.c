/* nccl.c - loads NCCL and makes shard groups whose collectives are NCCL's.
 *
 * Python carries the ids of the communicators to the other ranks. After that it has no part in such a shard
 * group's collectives: the core enqueues them on its streams. What FCDP_CODEC exchanges in host memory
 * crosses by connections beside NCCL (comm/exchange.h).
 */
#include "torch_plugin/nccl.h"

#include <stdlib.h>
#include <string.h>

#include "comm/nccl.h"
#include "torch_plugin/exchange.h"
#include "torch_plugin/methods.h"

static PyTypeObject *type; /* for the life of the process */

typedef struct library {
    PyObject_HEAD fcdp_nccl *nccl; /* NULL: it is being made */
} library;

static void library_free(PyObject *self) {
    fcdp_nccl *nccl = ((library *)self)->nccl;
    if (nccl) fcdp__nccl_unload(nccl);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyObject *binding_nccl_load(PyObject *self __attribute__((unused)), PyObject *args) {
    const char *named, *beside_torch;
    if (!PyArg_ParseTuple(args, "zz:load_nccl", &named, &beside_torch)) return NULL;
    fcdp_nccl *nccl;
    fcdp_status status;
    Py_BEGIN_ALLOW_THREADS status = fcdp__nccl_load(named, beside_torch, &nccl);
    Py_END_ALLOW_THREADS if (status) return binding_raise(status);
    PyObject *loaded = PyType_GenericAlloc(type, 0);
    if (loaded)
        ((library *)loaded)->nccl = nccl;
    else
        fcdp__nccl_unload(nccl);
    return loaded;
}

METHOD(library_ids) {
    PyObject *node_of;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "SI:ids", &node_of, &rank)) return NULL;
    const fcdp_nccl *nccl = ((library *)self)->nccl;
    fcdp_topology topology;
    fcdp_nccl_ids ids;
    fcdp_status status = binding_topology(node_of, rank, &topology);
    if (status) return binding_raise(status);
    Py_BEGIN_ALLOW_THREADS status = fcdp__nccl_ids_make(nccl, &topology, &ids);
    Py_END_ALLOW_THREADS return status ? binding_raise(status)
                                       : PyBytes_FromStringAndSize((const char *)&ids, sizeof ids);
}

static PyMethodDef methods[] = {
    {"ids", library_ids, METH_VARARGS,
     DOC("ids($self, node_of, rank, /)",
         "Make the ids of the communicators that this rank leads, as bytes, for\n"
         "Engine.create_nccl_shard_group() on all ranks.\n\n"
         "node_of: bytes, a uint32 for each rank of the group: its node. rank: this one's place in the\n"
         "group. Raises Error.")},
    {NULL, NULL, 0, NULL},
};

bool binding_nccl_type(PyObject *module) {
    static const char doc[] =
        "NCCL's library, loaded for as long as it or a shard group of it is referred to.\n\n"
        "Made by load_nccl() alone.";
    PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                           {Py_tp_methods, methods},
                           {Py_tp_dealloc, library_free},
                           {0, NULL}};
    PyType_Spec spec = {.name = "fcdp._fcdp.Nccl",
                        .basicsize = sizeof(library),
                        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                        .slots = slots};
    type = (PyTypeObject *)PyType_FromSpec(&spec);
    return type && PyModule_AddType(module, type) == 0;
}

/* ---- NCCL, and an exchange beside it ---- */

typedef struct pair {
    fcdp_transport nccl;
    fcdp_exchange *beside; /* of the lane between the nodes */
} pair;

static fcdp_status pair_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n,
                                   fcdp_stream stream, fcdp_event turn) {
    const fcdp_transport *nccl = &((pair *)ctx)->nccl;
    return nccl->all_gather(nccl->ctx, lane, parts, n, stream, turn);
}

static fcdp_status pair_exchange(void *ctx, fcdp_channel channel, void *buffer, size_t bytes) {
    return fcdp__exchange_run(((pair *)ctx)->beside, channel, buffer, bytes);
}

static fcdp_status pair_check(void *ctx) {
    const pair *p = ctx;
    fcdp_status status = fcdp__exchange_check(p->beside);
    return status ? status : p->nccl.check(p->nccl.ctx);
}

static void pair_abort(void *ctx, const char *why) {
    const pair *p = ctx;
    fcdp__exchange_abort(p->beside, why);
    p->nccl.abort(p->nccl.ctx, why);
}

static bool pair_missing(void *ctx, char *text_out, size_t text_bytes) {
    return fcdp__exchange_missing(((pair *)ctx)->beside, text_out, text_bytes);
}

/* Of an exchange: a collective of NCCL's that fails does not end before it is aborted. */
static void pair_on_failure(void *ctx, void (*failed)(void *arg), void *arg) {
    fcdp__exchange_on_failure(((pair *)ctx)->beside, failed, arg);
}

static void pair_destroy(void *ctx) {
    pair *p = ctx;
    fcdp__exchange_destroy(p->beside);
    p->nccl.destroy(p->nccl.ctx);
    free(p);
}

/* Into the table of both, which takes `beside` over; false: no memory for it. */
static bool pair_make(fcdp_transport *table, fcdp_exchange *beside) {
    pair *p = malloc(sizeof *p);
    if (!p) return false;
    *p = (pair){*table, beside};
    *table = (fcdp_transport){.ctx = p,
                              .all_gather = pair_all_gather,
                              .exchange = pair_exchange,
                              .all_channels = true,
                              .check = pair_check,
                              .abort = pair_abort,
                              .missing = pair_missing,
                              .on_failure = pair_on_failure,
                              .destroy = pair_destroy};
    return true;
}

/* What exchanges host memory beside NCCL: takes `exchange` over, whatever comes of it. */
typedef struct company {
    fcdp_exchange *exchange; /* NULL: nothing does */
    const char *why_none;    /* NULL: it need not be said */
} company;

static fcdp_status comm_make(fcdp_engine *engine, const fcdp_nccl_config *config, company beside,
                             fcdp_comm **comm_out) {
    fcdp_nccl_transport *transport;
    fcdp_status status = fcdp__nccl_create(config, &transport);
    if (status) {
        fcdp_failure error = fcdp__failure_keep(status);
        fcdp__exchange_destroy(beside.exchange);
        return fcdp__failure_restore(&error);
    }
    fcdp_transport table = fcdp__nccl_table(transport);
    table.why_no_exchange = beside.why_none;
    if (beside.exchange && !pair_make(&table, beside.exchange)) {
        fcdp__exchange_destroy(beside.exchange);
        status = fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a transport");
    }
    if (!status) status = fcdp_comm_create(engine, &config->topology, &table, comm_out);
    if (!status) return FCDP_OK;
    fcdp_failure error = fcdp__failure_keep(status);
    table.abort(table.ctx, error.text); /* else the end would wait for peers, who know nothing of it */
    table.destroy(table.ctx);
    return fcdp__failure_restore(&error);
}

/* An Exchange, or a text, or None. False: an exception is set. */
static bool company_of(PyObject *object, company *beside_out) {
    *beside_out = (company){0};
    if (object == Py_None) return true;
    if (PyUnicode_Check(object))
        beside_out->why_none = PyUnicode_AsUTF8AndSize(object, NULL);
    else
        beside_out->exchange = binding_exchange_take(object);
    return beside_out->why_none || beside_out->exchange;
}

PyObject *binding_create_nccl_shard_group(PyObject *self, PyObject *args) {
    PyObject *node_of, *loaded, *object;
    unsigned int rank;
    const char *ids;
    Py_ssize_t ids_bytes;
    if (!PyArg_ParseTuple(args, "SIOy#O:create_nccl_shard_group", &node_of, &rank, &loaded, &ids, &ids_bytes,
                          &object))
        return NULL;
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    if (Py_TYPE(loaded) != type)
        return PyErr_Format(PyExc_TypeError, "expected an object of fcdp._fcdp.Nccl");
    fcdp_nccl_config config = {.nccl = ((library *)loaded)->nccl,
                               .drv = fcdp_engine_driver(engine),
                               .ids = (const fcdp_nccl_ids *)(const void *)ids,
                               .timeout_s = binding_options()->timeout_s};
    fcdp_status status = binding_topology(node_of, rank, &config.topology);
    if (status) return binding_raise(status);
    if ((size_t)ids_bytes != config.topology.n_ranks * sizeof(fcdp_nccl_ids)) {
        PyErr_Format(PyExc_ValueError, "ids: expected those of %u ranks, got %zd bytes",
                     config.topology.n_ranks, ids_bytes);
        return NULL;
    }
    company beside;
    if (!company_of(object, &beside)) return NULL;
    fcdp_comm *comm;
    CALL(comm_make(engine, &config, beside, &comm));
    PyObject *shard_group = status ? NULL : binding_wrap(BINDING_COMM, comm, self);
    if (shard_group) binding_set_carrier(shard_group, NULL, loaded);
    return status ? binding_raise(status) : shard_group;
}
