/* methods_comm.c - the module's functions of a shard group, with the trees in it. */
#include <stdlib.h>
#include <string.h>

#include "comm/tree.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/transport.h"

METHOD(topology) {
    PyObject *node_of;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "SI:topology", &node_of, &rank)) return NULL;
    fcdp_topology t;
    fcdp_status status = binding_topology(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    return Py_BuildValue("{s:I,s:I,s:I,s:I}", "nodes", t.n_nodes, "ranks_per_node", t.node_size, "node",
                         t.node, "local_rank", t.local);
}

/* A comm's owner: what it stands on, and its transport, which goes after it. */
static void transport_free(PyObject *capsule) {
    binding_transport_destroy(PyCapsule_GetPointer(capsule, "fcdp.transport"));
}

METHOD(comm_create) {
    PyObject *handle, *node_of, *callable;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "OSIO:comm_create", &handle, &node_of, &rank, &callable)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    fcdp_topology t;
    fcdp_status status = binding_topology(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    binding_transport *transport = binding_transport_create(callable, engine, &t);
    PyObject *of_transport = transport ? PyCapsule_New(transport, "fcdp.transport", transport_free) : NULL;
    PyObject *owner = of_transport ? Py_BuildValue("(ON)", handle, of_transport) : NULL;
    if (!owner) return NULL;
    fcdp_transport table = binding_transport_table(transport);
    fcdp_comm *comm;
    CALL(fcdp_comm_create(engine, &t, &table, &comm));
    PyObject *wrapped = status == FCDP_OK ? binding_wrap(BINDING_COMM, comm, owner) : binding_raise(status);
    Py_DECREF(owner);
    return wrapped;
}

METHOD(comm_set_shard_group) {
    PyObject *handle;
    unsigned long long shard_group;
    if (!PyArg_ParseTuple(args, "OK:comm_set_shard_group", &handle, &shard_group)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    fcdp_comm_set_shard_group(comm, shard_group);
    Py_RETURN_NONE;
}

/* (comm, comm or None): whose streams it shares. */
METHOD(comm_set_streams) {
    PyObject *handle, *other;
    if (!PyArg_ParseTuple(args, "OO:comm_set_streams", &handle, &other)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    fcdp_comm *beside = comm && other != Py_None ? binding_unwrap(BINDING_COMM, other) : NULL;
    if (!comm || (other != Py_None && !beside)) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_set_streams(comm, beside));
    return methods_none_or_raise(status);
}

METHOD(comm_check) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:comm_check", &handle)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    return comm ? methods_none_or_raise(fcdp_comm_check(comm)) : NULL;
}

METHOD(tree_create) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:tree_create", &handle)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    fcdp_tree *tree;
    fcdp_status status = fcdp_tree_create(comm, &tree);
    return status == FCDP_OK ? binding_wrap(BINDING_TREE, tree, handle) : binding_raise(status);
}

#define TREE_EVENT(name, call)                                                                               \
    METHOD(name) {                                                                                           \
        PyObject *handle;                                                                                    \
        if (!PyArg_ParseTuple(args, "O:" #name, &handle)) return NULL;                                       \
        fcdp_tree *tree = binding_unwrap(BINDING_TREE, handle);                                              \
        if (!tree) return NULL;                                                                              \
        call(tree);                                                                                          \
        Py_RETURN_NONE;                                                                                      \
    }
TREE_EVENT(tree_begin_forward, fcdp_tree_begin_forward)
TREE_EVENT(tree_begin_backward, fcdp_tree_begin_backward)

/* (tree, [group]): those that an agreement on all of them asks for, in this order. */
METHOD(tree_set_groups) {
    PyObject *handle, *list;
    uint32_t n;
    if (!PyArg_ParseTuple(args, "OO:tree_set_groups", &handle, &list)) return NULL;
    fcdp_tree *tree = binding_unwrap(BINDING_TREE, handle);
    fcdp_group **groups = tree ? methods_groups(list, &n) : NULL;
    if (!groups) return NULL;
    fcdp_status status = fcdp_tree_set_groups(tree, groups, n);
    free(groups);
    return methods_none_or_raise(status);
}

/* (comm, has every rank's device room for a group that is begun ahead?) */
METHOD(comm_set_ahead) {
    PyObject *handle;
    int ahead;
    if (!PyArg_ParseTuple(args, "Op:comm_set_ahead", &handle, &ahead)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    fcdp_comm_set_ahead(comm, ahead);
    Py_RETURN_NONE;
}

METHOD(comm_host_create) {
    PyObject *handle;
    if (!PyArg_ParseTuple(args, "O:comm_host_create", &handle)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    fcdp_shared_ticket ticket = {0};
    fcdp_status status;
    CALL(fcdp_comm_host_create(comm, &ticket));
    return methods_ticket_or_raise(status, &ticket);
}

METHOD(comm_host_join) {
    PyObject *handle, *bytes;
    fcdp_shared_ticket ticket;
    if (!PyArg_ParseTuple(args, "OO:comm_host_join", &handle, &bytes)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm || !methods_ticket(bytes, &ticket)) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_host_join(comm, &ticket));
    return methods_none_or_raise(status);
}

/* Python's (to, from, bytes, timeout in seconds) -> as many bytes, of its thread. */
static fcdp_status carrier_swap(void *ctx, uint32_t to, uint32_t from, const void *sent, void *received_out,
                                size_t bytes, double timeout_s) {
    fcdp_status status = FCDP_OK;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *answer = PyObject_CallFunction(ctx, "IIy#d", (unsigned)to, (unsigned)from, (const char *)sent,
                                             (Py_ssize_t)bytes, timeout_s);
    const void *received = answer ? methods_bytes(answer, bytes, "the other node's ballot") : NULL;
    if (received)
        memcpy(received_out, received, bytes);
    else if (!PyErr_ExceptionMatches(PyExc_Exception)) /* an interrupt stays one */
        status = fcdp__fail(FCDP_ERR_TRANSPORT, "the exchange between nodes was interrupted");
    else
        status = binding_exception_take(FCDP_ERR_TRANSPORT);
    Py_XDECREF(answer);
    PyGILState_Release(gil);
    return status;
}

/* (comm, swap, the agreement's number, votes) -> (their maximum over the ranks, bytes sent to other nodes);
 * swap carries bytes between nodes: carrier_swap. */
METHOD(comm_agree) {
    PyObject *handle, *swap, *votes;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "OOKS:comm_agree", &handle, &swap, &number, &votes)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    Py_ssize_t n = PyBytes_Size(votes);
    PyObject *agreed = PyBytes_FromStringAndSize(NULL, n);
    if (!agreed) return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AsString(agreed);
    memcpy(at, PyBytes_AsString(votes), (size_t)n);
    const fcdp_carrier carrier = {.ctx = swap, .swap = carrier_swap};
    uint64_t sent_bytes;
    fcdp_status status;
    CALL(fcdp_comm_agree(comm, &carrier, number, at, (size_t)n, &sent_bytes));
    if (status == FCDP_OK) return Py_BuildValue("(NK)", agreed, (unsigned long long)sent_bytes);
    Py_DECREF(agreed);
    return PyErr_Occurred() ? NULL : binding_raise(status);
}

/* (comm, addresses: n uint64, sizes: n uint64, stream): the device fingerprints arrays in its memory.
 * False: it cannot. */
METHOD(comm_fingerprint_begin) {
    PyObject *handle, *addresses, *sizes;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OSSK:comm_fingerprint_begin", &handle, &addresses, &sizes, &stream))
        return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    if (!comm) return NULL;
    size_t bytes = (size_t)PyBytes_Size(addresses);
    const uint64_t *at = methods_bytes(addresses, bytes, "addresses"),
                   *n_bytes = at ? methods_bytes(sizes, bytes, "sizes") : NULL;
    if (!n_bytes) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_fingerprint_begin(comm, at, n_bytes, bytes / sizeof *at, (fcdp_stream)(uintptr_t)stream));
    if (status != FCDP_OK && status != FCDP_ERR_UNSUPPORTED) return binding_raise(status);
    return PyBool_FromLong(status == FCDP_OK);
}

/* (comm, n) -> n uint64: of those that have begun. The host waits for what was on the stream then. */
METHOD(comm_fingerprint_end) {
    PyObject *handle;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "On:comm_fingerprint_end", &handle, &n)) return NULL;
    fcdp_comm *comm = binding_unwrap(BINDING_COMM, handle);
    PyObject *fingerprints = comm ? PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(uint64_t)) : NULL;
    if (!fingerprints) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_fingerprint_end(comm, (uint64_t *)(void *)PyBytes_AsString(fingerprints)));
    if (status == FCDP_OK) return fingerprints;
    Py_DECREF(fingerprints);
    return binding_raise(status);
}

PyMethodDef methods_comm[] = {
    ENTRY(topology),
    ENTRY(comm_create),
    ENTRY(comm_check),
    ENTRY(comm_set_shard_group),
    ENTRY(comm_set_streams),
    ENTRY(tree_create),
    ENTRY(tree_begin_forward),
    ENTRY(tree_begin_backward),
    ENTRY(tree_set_groups),
    ENTRY(comm_set_ahead),
    ENTRY(comm_host_create),
    ENTRY(comm_host_join),
    ENTRY(comm_fingerprint_begin),
    ENTRY(comm_fingerprint_end),
    ENTRY(comm_agree),
    {NULL, NULL, 0, NULL},
};
