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

static const char *const kind_name[] = {"fcdp.engine", "fcdp.comm", "fcdp.tree", "fcdp.group"};

typedef struct handle {
    struct handle *next; /* of the deferred */
    binding_kind kind;
    void *object;
    uint64_t generation;
    pid_t pid;       /* a forked child owns nothing */
    PyObject *face;  /* a weak reference: binding_set_owner */
    PyObject *owner; /* keeps what the object stands on alive: group, tree -> comm -> engine */
} handle;

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

static void handle_end(handle *h) {
    if (h->object && h->generation == generation_now && h->pid == getpid()) {
        /* These wait for the device, whose host functions want the GIL for a collective. */
        Py_BEGIN_ALLOW_THREADS if (h->kind == BINDING_COMM) fcdp_comm_destroy(h->object);
        if (h->kind == BINDING_TREE) fcdp_tree_destroy(h->object);
        if (h->kind == BINDING_GROUP) fcdp_group_destroy(h->object);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(h->face);
    Py_XDECREF(h->owner);
    free(h);
}

static void handle_free(PyObject *capsule, binding_kind kind) {
    handle *h = PyCapsule_GetPointer(capsule, kind_name[kind]);
    if (!h) {
        PyErr_Clear();
        return;
    }
    if (in_host_function) {
        h->next = deferred;
        deferred = h;
    } else {
        handle_end(h);
    }
}

static void engine_free(PyObject *capsule) {
    handle_free(capsule, BINDING_ENGINE);
}
static void comm_free(PyObject *capsule) {
    handle_free(capsule, BINDING_COMM);
}
static void tree_free(PyObject *capsule) {
    handle_free(capsule, BINDING_TREE);
}
static void group_free(PyObject *capsule) {
    handle_free(capsule, BINDING_GROUP);
}

PyObject *binding_wrap(binding_kind kind, void *object, PyObject *owner) {
    static const PyCapsule_Destructor destructors[] = {engine_free, comm_free, tree_free, group_free};
    handle *h = malloc(sizeof *h);
    if (!h) return PyErr_NoMemory();
    *h = (handle){
        .kind = kind, .object = object, .generation = generation_now, .pid = getpid(), .owner = owner};
    PyObject *capsule = PyCapsule_New(h, kind_name[kind], destructors[kind]);
    if (!capsule) {
        free(h);
        return NULL;
    }
    Py_XINCREF(owner);
    return capsule;
}

/* Every call of the core comes through here: so what was deferred ends soon. */
void *binding_unwrap(binding_kind kind, PyObject *capsule) {
    while (deferred && !in_host_function) {
        handle *first = deferred;
        deferred = first->next;
        handle_end(first);
    }
    handle *h = PyCapsule_GetPointer(capsule, kind_name[kind]);
    if (!h) return NULL;
    if (!h->object || h->generation != generation_now) {
        PyErr_Format(PyExc_RuntimeError, "this %s has ended", kind_name[kind]);
        return NULL;
    }
    return h->object;
}

bool binding_set_owner(PyObject *capsule, PyObject *owner) {
    fcdp_group *group = binding_unwrap(BINDING_GROUP, capsule);
    PyObject *face = group ? PyWeakref_NewRef(owner, NULL) : NULL;
    if (!face) return false;
    handle *h = PyCapsule_GetPointer(capsule, kind_name[BINDING_GROUP]);
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
