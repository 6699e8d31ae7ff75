/* methods_comm.c - _fcdp.ShardGroup, and the trees in it: _fcdp.Tree. */
#include <stdlib.h>
#include <string.h>

#include "comm/tree.h"
#include "comm/unshard.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/transport.h"

FUNCTION(topology) {
    PyObject *node_of;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "SI:topology", &node_of, &rank)) return NULL;
    fcdp_topology t;
    fcdp_status status = binding_topology(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    return Py_BuildValue("{s:I,s:I,s:I,s:I}", "nodes", t.n_nodes, "ranks_per_node", t.node_size, "node",
                         t.node, "local_rank", t.local);
}

FUNCTION_NOARGS(python_calls) {
    return PyLong_FromUnsignedLongLong(binding_transport_python_calls());
}

PyObject *methods_create_shard_group(PyObject *self, PyObject *args) {
    PyObject *node_of, *callables;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "SIO:create_shard_group", &node_of, &rank, &callables)) return NULL;
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    fcdp_topology t;
    fcdp_status status = binding_topology(node_of, rank, &t);
    if (status != FCDP_OK) return binding_raise(status);
    binding_transport *transport = binding_transport_create(callables, engine, &t);
    if (!transport) return NULL;
    fcdp_transport table = binding_transport_table(transport);
    fcdp_comm *comm;
    CALL(fcdp_comm_create(engine, &t, &table, &comm));
    if (status != FCDP_OK) {
        binding_raise(status);
        binding_transport_destroy(transport);
        return NULL;
    }
    PyObject *shard_group = binding_wrap(BINDING_COMM, comm, self);
    if (shard_group)
        binding_set_carrier(shard_group, transport, NULL);
    else
        binding_transport_destroy(transport);
    return shard_group;
}

METHOD_O(comm_set_number) {
    fcdp_comm *comm = binding_core(self);
    if (!comm) return NULL;
    unsigned long long number = PyLong_AsUnsignedLongLongMask(argument);
    if (PyErr_Occurred()) return NULL;
    fcdp_comm_set_shard_group(comm, number);
    Py_RETURN_NONE;
}

METHOD_O(comm_set_streams) {
    fcdp_comm *comm = binding_core(self);
    fcdp_comm *beside = comm && argument != Py_None ? binding_unwrap(BINDING_COMM, argument) : NULL;
    if (!comm || (argument != Py_None && !beside)) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_set_streams(comm, beside));
    return methods_none_or_raise(status);
}

METHOD_O(comm_set_ahead) {
    fcdp_comm *comm = binding_core(self);
    int ahead = comm ? PyObject_IsTrue(argument) : -1;
    if (ahead < 0) return NULL;
    fcdp_comm_set_ahead(comm, ahead);
    Py_RETURN_NONE;
}

METHOD_NOARGS(comm_check) {
    fcdp_comm *comm = binding_core(self);
    return comm ? methods_none_or_raise(fcdp_comm_check(comm)) : NULL;
}

METHOD_NOARGS(comm_create_host_memory) {
    fcdp_comm *comm = binding_core(self);
    if (!comm) return NULL;
    fcdp_shared_ticket ticket = {0};
    fcdp_status status;
    CALL(fcdp_comm_host_create(comm, &ticket));
    return methods_ticket_or_raise(status, &ticket);
}

METHOD_O(comm_join_host_memory) {
    fcdp_comm *comm = binding_core(self);
    fcdp_shared_ticket ticket;
    if (!comm || !methods_ticket(argument, &ticket)) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_host_join(comm, &ticket));
    return methods_none_or_raise(status);
}

/* (groups, stays), parsed by `format`: an array of the n groups, the caller's, and stays[n] of the bytes
 * object. NULL: an exception is set. */
static fcdp_group **groups_and_stays(PyObject *self, PyObject *args, const char *format, uint32_t *n_out,
                                     const void **stays_out) {
    PyObject *list, *bytes;
    if (!PyArg_ParseTuple(args, format, &list, &bytes) || !binding_core(self)) return NULL;
    fcdp_group **groups = methods_groups(list, n_out);
    if (!groups) return NULL;
    *stays_out = methods_bytes(bytes, *n_out, "stays");
    if (*stays_out) return groups;
    free(groups);
    return NULL;
}

static PyObject *indices_list(const uint32_t *indices, uint32_t n) {
    PyObject *list = PyList_New(n);
    for (uint32_t i = 0; list && i < n; i++) PyList_SetItem(list, i, PyLong_FromUnsignedLong(indices[i]));
    return list;
}

METHOD(comm_host_order) {
    uint32_t n;
    const void *stays;
    fcdp_group **groups = groups_and_stays(self, args, "OO:host_order", &n, &stays);
    if (!groups) return NULL;
    uint32_t *order = calloc((size_t)n + 1, sizeof *order), n_memory = 0, n_file = 0;
    fcdp_status status = order ? fcdp_groups_host_order(groups, stays, n, order, &n_memory, &n_file)
                               : FCDP_OK;
    free(groups);
    PyObject *result = NULL;
    if (!order)
        PyErr_NoMemory();
    else if (status)
        binding_raise(status);
    else
        result = Py_BuildValue("(NNN)", indices_list(order, n_memory), indices_list(order + n_memory, n_file),
                               indices_list(order + n_memory + n_file, n - n_memory - n_file));
    free(order);
    return result;
}

METHOD(comm_fits) {
    uint32_t n;
    const void *stays;
    fcdp_group **groups = groups_and_stays(self, args, "OO:fits", &n, &stays);
    if (!groups) return NULL;
    bool ahead;
    fcdp_status status = fcdp_groups_fit(groups, stays, n, &ahead);
    free(groups);
    return status ? binding_raise(status) : PyBool_FromLong(ahead);
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

METHOD(comm_agree) {
    PyObject *swap, *votes;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "OKS:agree", &swap, &number, &votes)) return NULL;
    fcdp_comm *comm = binding_core(self);
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

METHOD(comm_begin_fingerprints) {
    PyObject *addresses, *sizes;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "SSK:begin_fingerprints", &addresses, &sizes, &stream)) return NULL;
    fcdp_comm *comm = binding_core(self);
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

METHOD(comm_end_fingerprints) {
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "n:end_fingerprints", &n)) return NULL;
    fcdp_comm *comm = binding_core(self);
    PyObject *fingerprints = comm ? PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(uint64_t)) : NULL;
    if (!fingerprints) return NULL;
    fcdp_status status;
    CALL(fcdp_comm_fingerprint_end(comm, (uint64_t *)(void *)PyBytes_AsString(fingerprints)));
    if (status == FCDP_OK) return fingerprints;
    Py_DECREF(fingerprints);
    return binding_raise(status);
}

/* ---- trees ---- */

METHOD_NOARGS(comm_create_tree) {
    fcdp_comm *comm = binding_core(self);
    if (!comm) return NULL;
    fcdp_tree *tree;
    fcdp_status status = fcdp_tree_create(comm, &tree);
    return status == FCDP_OK ? binding_wrap(BINDING_TREE, tree, self) : binding_raise(status);
}

METHOD_NOARGS(tree_begin_forward) {
    fcdp_tree *tree = binding_core(self);
    if (!tree) return NULL;
    fcdp_tree_begin_forward(tree);
    Py_RETURN_NONE;
}

METHOD_NOARGS(tree_begin_backward) {
    fcdp_tree *tree = binding_core(self);
    if (!tree) return NULL;
    fcdp_tree_begin_backward(tree);
    Py_RETURN_NONE;
}

METHOD_O(tree_set_groups) {
    uint32_t n;
    fcdp_tree *tree = binding_core(self);
    fcdp_group **groups = tree ? methods_groups(argument, &n) : NULL;
    if (!groups) return NULL;
    fcdp_status status = fcdp_tree_set_groups(tree, groups, n);
    free(groups);
    return methods_none_or_raise(status);
}

/* ---- the types ---- */

static PyMethodDef of_shard_group[] = {
    {"set_number", comm_set_number, METH_O,
     DOC("set_number($self, number, /)",
         "Give the shard group a number of 64 bits, the same on each of its ranks and no other\n"
         "group's, by which a reader of the trace knows it. Before its first group.")},
    {"set_streams", comm_set_streams, METH_O,
     DOC("set_streams($self, beside, /)",
         "Choose the streams of its operations, before its first group.\n\n"
         "beside: a ShardGroup whose streams it shares, because one thread uses both in the program's\n"
         "order; None: streams of its own. Without this call it shares those of the engine's first.\n"
         "Raises Error where streams cannot be made, and changes nothing then.")},
    {"create_host_memory", comm_create_host_memory, METH_NOARGS,
     DOC("create_host_memory($self, /)",
         "Create the host memory that the group's ranks on this node share; local rank 0 does, the\n"
         "others join.\n\n"
         "Once, before the first group. Returns the ticket for join_host_memory, as bytes. Raises\n"
         "Error.")},
    {"join_host_memory", comm_join_host_memory, METH_O,
     DOC("join_host_memory($self, ticket, /)",
         "Join the host memory that local rank 0 of the group has created.\n\n"
         "ticket: what its create_host_memory returned. Once, before the first group. Raises Error.")},
    {"create_group", methods_create_group, METH_VARARGS,
     DOC("create_group($self, name, extents, /)",
         "Lay out a parameter group of the shard group.\n\n"
         "name: for messages. extents: a list of (shard_bytes, span[, element_bytes[, number]]) for\n"
         "each parameter: the bytes of one rank's shard in the gathered dtype, the same on every rank; 1\n"
         "for a trainable parameter, 0 for a frozen one; the bytes of one element; NUMBER_BF16, NUMBER_F16\n"
         "or NUMBER_F32 if FCDP_CODEC=int8 may round it. Returns a Group, which keeps the shard group; it\n"
         "has no memory before attach(). Raises Error.")},
    {"host_order", comm_host_order, METH_VARARGS,
     DOC("host_order($self, groups, stays, /)",
         "In which order groups of a model take host memory while it lasts: first those of which a copy\n"
         "there spares the most bytes between the nodes for each of its own. The same on every rank.\n\n"
         "groups: a list of Group. stays: bytes, 1 for each group that is not resharded after forward,\n"
         "else 0. Returns three lists of indices into `groups`: those that take host memory, in this\n"
         "order; those that a plan puts in files; those that it has gathered again. Raises Error.")},
    {"fits", comm_fits, METH_VARARGS,
     DOC("fits($self, groups, stays, /)",
         "Check that each group of a model can be gathered in its turn within FCDP_DEVICE_BUDGET.\n"
         "Takes nothing.\n\n"
         "groups: a list of Group. stays: bytes, 1 for each group that is not resharded after forward,\n"
         "else 0. Returns whether there is room to begin one ahead of its use. Raises Error\n"
         "(ERR_NO_DEVICE_MEM), which names a sufficient budget.")},
    {"set_ahead", comm_set_ahead, METH_O,
     DOC("set_ahead($self, ahead, /)",
         "Say whether the device of every rank has room for a group that is begun ahead of its use, as\n"
         "fits() of all groups returned it; the same on all ranks. Not so: no restore begins before it\n"
         "is waited for.")},
    {"create_tree", comm_create_tree, METH_NOARGS,
     DOC("create_tree($self, /)",
         "Create the agreement of those groups of the shard group that lie under one root module.\n\n"
         "Returns a Tree, which keeps the shard group. Raises Error.")},
    {"agree", comm_agree, METH_VARARGS,
     DOC("agree($self, swap, number, votes, /)",
         "Take the maximum of each byte over the group's ranks, which all call it; after they share\n"
         "host memory.\n\n"
         "swap: a callable (to, from, sent, timeout_s) -> received that swaps equally many bytes with\n"
         "the first ranks of two other nodes; it is called on this thread. number: the agreement's,\n"
         "the same on all ranks. votes: bytes, as many on all ranks. Returns (the maxima, bytes that\n"
         "this rank sent to other nodes). Raises Error, and what `swap` raised if that was an\n"
         "interrupt.")},
    {"begin_fingerprints", comm_begin_fingerprints, METH_VARARGS,
     DOC("begin_fingerprints($self, addresses, sizes, stream, /)",
         "Let the device fingerprint shards in its memory, behind what is on `stream` now.\n\n"
         "addresses, sizes: bytes, a uint64 for each shard: where it is, and its bytes. The shards\n"
         "must not be written or freed before end_fingerprints. Returns False where the device cannot,\n"
         "now and later. Raises Error.")},
    {"end_fingerprints", comm_end_fingerprints, METH_VARARGS,
     DOC("end_fingerprints($self, n, /)",
         "Wait for the n fingerprints that begin_fingerprints has begun. Returns a uint64 for each, as\n"
         "bytes. Raises Error.")},
    {"check", comm_check, METH_NOARGS,
     DOC("check($self, /)",
         "Raise the failure of the group's collectives, streams or peers that is known by now.")},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef of_tree[] = {
    {"set_groups", tree_set_groups, METH_O,
     DOC("set_groups($self, groups, /)",
         "Set the groups that an agreement on the whole tree asks for, in place of those before.\n\n"
         "groups: a list of Group of the tree's shard group, the same on every rank and in the same\n"
         "order. The tree keeps no reference to them. Raises Error.")},
    {"begin_forward", tree_begin_forward, METH_NOARGS,
     DOC("begin_forward($self, /)",
         "The root module's forward begins: the ranks agree anew at the next unshard.")},
    {"begin_backward", tree_begin_backward, METH_NOARGS,
     DOC("begin_backward($self, /)",
         "The root module's backward begins: the ranks agree anew at the next unshard.")},
    {NULL, NULL, 0, NULL},
};

bool methods_comm_types(PyObject *module) {
    static const char of_shard_groups[] =
        "A process group over which parameters are sharded, as nodes x ranks: its collectives, the\n"
        "host memory of its ranks on this node, and its first failure.\n\n"
        "Made by Engine.create_shard_group() and create_nccl_shard_group() alone. It ends with its\n"
        "last reference, and waits for its operations then.";
    static const char of_trees[] =
        "The groups of a shard group that lie under one root module, on which the ranks agree at\n"
        "once.\n\n"
        "Made by ShardGroup.create_tree() alone.";
    return binding_type_add(module, BINDING_COMM, of_shard_groups, of_shard_group, NULL) &&
           binding_type_add(module, BINDING_TREE, of_trees, of_tree, NULL);
}

PyMethodDef methods_comm[] = {
    {"topology", topology, METH_VARARGS,
     DOC("topology($module, node_of, rank, /)",
         "A process group as nodes x ranks: a dict of nodes, ranks_per_node, node and local_rank.\n\n"
         "node_of: bytes, a uint32 for each rank of the group: its node. rank: this one's place in the\n"
         "group. Raises Error where FCDP cannot serve such a group: one node, or unequal ranks per\n"
         "node.")},
    {"python_calls", python_calls, METH_NOARGS,
     DOC("python_calls($module, /)",
         "How often collectives of this process have called Python so far, with the GIL: twice for\n"
         "each over Python's transport, and never over NCCL.")},
    {NULL, NULL, 0, NULL},
};
