/* handles.c - gives Python capsules around the core's objects, and ends the objects in order.
 *
 * A capsule keeps what its object stands on alive: a group or a tree its shard group, that the engine. An
 * object that outlived its engine, or that a forked child inherited, is not ended a second time. To end one
 * waits for the device, so a garbage collection inside a stream's host function only puts it aside, and the
 * next call of the core ends it.
 */
#include "torch_plugin/handles.h"

#include "comm/tree.h"

#include <stdlib.h>
#include <unistd.h>

static const char *const type_name[] = {"fcdp._fcdp.Engine", "fcdp._fcdp.ShardGroup", "fcdp._fcdp.Tree",
                                        "fcdp._fcdp.Group"};
static const char *const noun[] = {"engine", "shard group", "tree", "group"};
static PyTypeObject *types[4]; /* for the life of the process */

/* What ends, apart from the Python object: it may have to wait for a thread that can end it. */
typedef struct handle {
    struct handle *next; /* of the deferred */
    binding_kind kind;
    void *object;
    uint64_t generation;
    pid_t pid;       /* a forked child owns nothing */
    PyObject *face;  /* a weak reference: binding_set_owner */
    PyObject *owner; /* keeps what the object stands on alive */
    PyObject *nccl;  /* of a shard group, as is */
    binding_transport *transport;
} handle;

typedef struct instance {
    PyObject_HEAD handle *h; /* NULL: it is being made */
} instance;

static uint64_t generation_now; /* guarded by the GIL */

/* Freed by a garbage collection inside a stream's host function, which must not call the
 * driver: ended by the next caller. Guarded by the GIL. */
static handle *deferred;
static _Thread_local bool in_host_function;

void binding_host_function_begin(void) {
    in_host_function = true;
}
void binding_host_function_end(void) {
    in_host_function = false;
}

/* These wait for the device, whose host functions want the GIL for a collective. An engine ends by itself
 * (Engine.destroy). */
static void object_end(binding_kind kind, void *object) {
    Py_BEGIN_ALLOW_THREADS if (kind == BINDING_COMM) fcdp_comm_destroy(object);
    if (kind == BINDING_TREE) fcdp_tree_destroy(object);
    if (kind == BINDING_GROUP) fcdp_group_destroy(object);
    Py_END_ALLOW_THREADS
}

static void handle_end(handle *h) {
    if (h->object && h->generation == generation_now && h->pid == getpid()) object_end(h->kind, h->object);
    if (h->transport) binding_transport_destroy(h->transport);
    Py_XDECREF(h->nccl);
    Py_XDECREF(h->face);
    Py_XDECREF(h->owner);
    free(h);
}

/* ---- the types ---- */

static void instance_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    handle *h = ((instance *)self)->h;
    PyObject_GC_UnTrack(self);
    if (h && in_host_function) {
        h->next = deferred;
        deferred = h;
    } else if (h) {
        handle_end(h);
    }
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static int instance_traverse(PyObject *self, visitproc visit, void *arg) {
    const handle *h = ((instance *)self)->h;
    Py_VISIT(Py_TYPE(self));
    if (!h) return 0;
    Py_VISIT(h->face);
    Py_VISIT(h->owner);
    Py_VISIT(h->nccl);
    if (h->transport) Py_VISIT(binding_transport_python(h->transport));
    return 0;
}

bool binding_type_add(PyObject *module, binding_kind kind, const char *doc, PyMethodDef *methods,
                      PyGetSetDef *getters) {
    static PyGetSetDef none[] = {{NULL, NULL, NULL, NULL, NULL}};
    PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},      {Py_tp_methods, methods},
                           {Py_tp_getset, getters ? getters : none}, {Py_tp_dealloc, instance_free},
                           {Py_tp_traverse, instance_traverse},      {0, NULL}};
    PyType_Spec spec = {.name = type_name[kind],
                        .basicsize = sizeof(instance),
                        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                        .slots = slots};
    types[kind] = (PyTypeObject *)PyType_FromSpec(&spec);
    return types[kind] && PyModule_AddType(module, types[kind]) == 0;
}

PyObject *binding_wrap(binding_kind kind, void *object, PyObject *owner) {
    handle *h = malloc(sizeof *h);
    PyObject *self = h ? PyType_GenericAlloc(types[kind], 0) : PyErr_NoMemory();
    if (!self) {
        free(h);
        object_end(kind, object);
        if (kind == BINDING_ENGINE) fcdp_engine_destroy(object);
        return NULL;
    }
    *h = (handle){.kind = kind, .object = object, .generation = generation_now, .pid = getpid()};
    h->owner = owner ? Py_NewRef(owner) : NULL;
    ((instance *)self)->h = h;
    return self;
}

void binding_set_carrier(PyObject *shard_group, binding_transport *transport, PyObject *nccl) {
    handle *h = ((instance *)shard_group)->h;
    h->transport = transport;
    h->nccl = nccl ? Py_NewRef(nccl) : NULL;
}

/* Every call of the core comes through here: so what was deferred ends soon. */
void *binding_core(PyObject *self) {
    while (deferred && !in_host_function) {
        handle *first = deferred;
        deferred = first->next;
        handle_end(first);
    }
    const handle *h = ((instance *)self)->h;
    if (h->object && h->generation == generation_now) return h->object;
    PyErr_Format(PyExc_RuntimeError, "this %s has ended", noun[h->kind]);
    return NULL;
}

void *binding_unwrap(binding_kind kind, PyObject *object) {
    if (object && Py_TYPE(object) == types[kind]) return binding_core(object);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "expected an object of %s", type_name[kind]);
    return NULL;
}

bool binding_set_owner(PyObject *self, PyObject *owner) {
    fcdp_group *group = binding_core(self);
    PyObject *face = group ? PyWeakref_NewRef(owner, NULL) : NULL;
    if (!face) return false;
    handle *h = ((instance *)self)->h;
    fcdp_group_set_owner(group, face);
    Py_XDECREF(h->face);
    h->face = face;
    return true;
}

void binding_end_generation(void) {
    generation_now++;
}
uint64_t binding_generation(void) {
    return generation_now;
}
