/* handles.c - capsules around the core's objects, and the errors they raise. */
#include "torch_plugin/binding.h"

#include "comm/worker.h"

#include <stdlib.h>
#include <unistd.h>

extern PyObject *binding_error_class;

static const char *const kind_name[] = {"fcdp.engine", "fcdp.comm", "fcdp.group", "fcdp.job"};

typedef struct handle {
    struct handle *next;        /* of the abandoned */
    binding_kind kind;
    void *object;
    uint64_t generation;
    pid_t pid;                  /* a forked child owns nothing */
    PyObject *owner;            /* keeps what the object stands on alive: job -> group -> comm -> engine */
} handle;

static uint64_t generation_now; /* guarded by the GIL */

PyObject *binding_raise(fcdp_status status) {
    PyObject *args = Py_BuildValue("(si)", fcdp_error_text(), (int)status);
    if (args) {
        PyErr_SetObject(binding_error_class, args);
        Py_DECREF(args);
    }
    return NULL;
}

/* Ended by a garbage collection on a worker's thread, which must not wait for itself: ended by the next caller. GIL. */
static handle *abandoned;

static void handle_end(handle *h) {
    if (h->object && h->generation == generation_now && h->pid == getpid()) {
        /* These wait for the worker, which may want the GIL for a collective. */
        Py_BEGIN_ALLOW_THREADS
        if (h->kind == BINDING_COMM) fcdp_comm_destroy(h->object);
        if (h->kind == BINDING_GROUP) fcdp_group_destroy(h->object);
        if (h->kind == BINDING_JOB && fcdp_job_wait(h->object) != FCDP_OK) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(h->owner);
    free(h);
}

static void abandoned_end(void) {
    while (abandoned && !fcdp__worker_is_current()) {
        handle *h = abandoned;
        abandoned = h->next;
        handle_end(h);
    }
}

static void handle_free(PyObject *capsule, binding_kind kind) {
    handle *h = PyCapsule_GetPointer(capsule, kind_name[kind]);
    if (!h) {
        PyErr_Clear();
        return;
    }
    if (fcdp__worker_is_current()) {
        h->next = abandoned;
        abandoned = h;
    } else {
        handle_end(h);
    }
}

static void engine_free(PyObject *capsule) { handle_free(capsule, BINDING_ENGINE); }
static void comm_free(PyObject *capsule) { handle_free(capsule, BINDING_COMM); }
static void group_free(PyObject *capsule) { handle_free(capsule, BINDING_GROUP); }
static void job_free(PyObject *capsule) { handle_free(capsule, BINDING_JOB); }

PyObject *binding_wrap(binding_kind kind, void *object, PyObject *owner) {
    static const PyCapsule_Destructor destructors[] = {engine_free, comm_free, group_free, job_free};
    handle *h = malloc(sizeof *h);
    if (!h) return PyErr_NoMemory();
    *h = (handle){NULL, kind, object, generation_now, getpid(), owner};
    PyObject *capsule = PyCapsule_New(h, kind_name[kind], destructors[kind]);
    if (!capsule) {
        free(h);
        return NULL;
    }
    Py_XINCREF(owner);
    return capsule;
}

void *binding_unwrap(binding_kind kind, PyObject *capsule) {
    abandoned_end();
    handle *h = PyCapsule_GetPointer(capsule, kind_name[kind]);
    if (!h) return NULL;
    if (!h->object || h->generation != generation_now) {
        PyErr_Format(PyExc_RuntimeError, "this %s has ended", kind_name[kind]);
        return NULL;
    }
    return h->object;
}

void binding_end_generation(void) { generation_now++; }

void binding_consume(PyObject *capsule) {
    handle *h = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    if (h) h->object = NULL;
    Py_CLEAR(h->owner);
}
