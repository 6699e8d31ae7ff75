/* neighbour.h - PyTorch's own caching allocator beside an engine's pages (FCDP_ALLOC=native). Before either
 * says that memory is out, the other gives back what it does not use. */
#ifndef FCDP_NEIGHBOUR_H
#define FCDP_NEIGHBOUR_H

#include "torch_plugin/binding.h"

/* A method of an engine, and a function of the module. */
PyObject *binding_share_device(PyObject *engine, PyObject *empty_cache);
PyObject *binding_neighbour_yield(PyObject *self, PyObject *args);
/* Before the engine ends; without the GIL. Returns when nobody is in it on PyTorch's behalf. */
void binding_neighbour_end(void);

#endif
