/* exchange.c - makes what exchanges host memory between the nodes beside NCCL.
 *
 * Python carries the cards of the members to each other and says what the job's environment tells of its
 * network. After that no exchange needs Python: a stream waits for it, and a program may have the GIL while
 * it waits for that stream.
 */
#include "torch_plugin/exchange.h"

#include "comm/interface.h"
#include "torch_plugin/methods.h"

static PyTypeObject *type; /* for the life of the process */

/* Listens, then is connected, then is a shard group's. */
typedef struct instance {
    PyObject_HEAD fcdp_listener *listener; /* NULL: not any more */
    fcdp_exchange *exchange;               /* NULL: not yet, or not any more */
} instance;

static void instance_free(PyObject *self) {
    instance *i = (instance *)self;
    Py_BEGIN_ALLOW_THREADS fcdp__sockets_close(i->listener);
    fcdp__exchange_destroy(i->exchange);
    Py_END_ALLOW_THREADS PyObject_Free(self);
    Py_DECREF(type);
}

static fcdp_status listen_at_choice(const fcdp_interface_hints *hints, fcdp_listener **listener_out) {
    struct sockaddr_storage address;
    fcdp_status status = fcdp__interface_choose(hints, &address);
    return status ? status : fcdp__sockets_listen(&address, listener_out);
}

PyObject *binding_exchange_listen(PyObject *self __attribute__((unused)), PyObject *args) {
    fcdp_interface_hints hints;
    if (!PyArg_ParseTuple(args, "zzz:listen", &hints.gloo, &hints.nccl, &hints.master)) return NULL;
    fcdp_listener *listener;
    fcdp_status status;
    CALL(listen_at_choice(&hints, &listener));
    if (status) return binding_raise(status);
    PyObject *made = PyType_GenericAlloc(type, 0);
    if (made)
        ((instance *)made)->listener = listener;
    else
        fcdp__sockets_close(listener);
    return made;
}

/* The listener; NULL with an error set: it has gone. */
static fcdp_listener *listener_of(PyObject *self) {
    fcdp_listener *listener = ((instance *)self)->listener;
    if (!listener) PyErr_SetString(PyExc_RuntimeError, "this exchange does not listen any more");
    return listener;
}

METHOD_NOARGS(exchange_card) {
    const fcdp_listener *listener = listener_of(self);
    const char *card = listener ? (const char *)fcdp__sockets_card(listener) : NULL;
    return card ? PyBytes_FromStringAndSize(card, sizeof(fcdp_card)) : NULL;
}

METHOD(exchange_connect) {
    const char *cards, *ranks;
    Py_ssize_t cards_bytes, ranks_bytes;
    unsigned int place;
    double limit_s;
    if (!PyArg_ParseTuple(args, "y#y#Id:connect", &cards, &cards_bytes, &ranks, &ranks_bytes, &place,
                          &limit_s))
        return NULL;
    size_t n = (size_t)ranks_bytes / sizeof(uint32_t);
    if ((size_t)ranks_bytes % sizeof(uint32_t) || (size_t)cards_bytes != n * sizeof(fcdp_card) || place >= n)
        return PyErr_Format(PyExc_ValueError,
                            "expected %zu cards and a place among them, got %zd bytes and %u", n, cards_bytes,
                            place);
    fcdp_listener *listener = listener_of(self);
    if (!listener) return NULL;
    instance *i = (instance *)self;
    fcdp_members members = {.n = (uint32_t)n, .me = place, .ranks = (const uint32_t *)(const void *)ranks};
    double timeout_s = binding_options()->timeout_s;
    fcdp_exchange *exchange = NULL;
    fcdp_status status;
    i->listener = NULL; /* no other call uses it meanwhile */
    CALL(fcdp__exchange_connect(listener, &members, (const fcdp_card *)(const void *)cards, limit_s,
                                timeout_s, &exchange));
    fcdp__sockets_close(listener);
    i->exchange = exchange;
    return methods_none_or_raise(status);
}

fcdp_exchange *binding_exchange_take(PyObject *object) {
    if (Py_TYPE(object) != type) {
        PyErr_SetString(PyExc_TypeError, "expected an object of fcdp._fcdp.Exchange");
        return NULL;
    }
    fcdp_exchange *exchange = ((instance *)object)->exchange;
    ((instance *)object)->exchange = NULL;
    if (!exchange)
        PyErr_SetString(PyExc_RuntimeError, "this exchange is not connected, or is a shard group's");
    return exchange;
}

static PyMethodDef methods[] = {
    {"card", exchange_card, METH_NOARGS,
     DOC("card($self, /)", "Where it listens, and a secret, as bytes, for connect() on the other members.")},
    {"connect", exchange_connect, METH_VARARGS,
     DOC("connect($self, cards, ranks, place, limit_s, /)",
         "Connect to every other member of a lane; a collective of them. Once; it listens no longer.\n\n"
         "cards: bytes, what card() returned on each member, one after another in the members' order.\n"
         "ranks: bytes, a uint32 for each member: its rank, as messages name it. place: this one's among\n"
         "them. limit_s: for how many seconds to wait for the others. Raises Error, and ValueError where\n"
         "`cards` is not of all members.")},
    {NULL, NULL, 0, NULL},
};

bool binding_exchange_type(PyObject *module) {
    static const char doc[] = "Exchanges host memory between the nodes, over TCP connections of its own.\n\n"
                              "Made by listen() alone. A shard group that is made with it takes it over.";
    PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                           {Py_tp_methods, methods},
                           {Py_tp_dealloc, instance_free},
                           {0, NULL}};
    PyType_Spec spec = {.name = "fcdp._fcdp.Exchange",
                        .basicsize = sizeof(instance),
                        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                        .slots = slots};
    type = (PyTypeObject *)PyType_FromSpec(&spec);
    return type && PyModule_AddType(module, type) == 0;
}
