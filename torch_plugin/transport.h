/* transport.h - a transport whose collectives are Python's (gloo, through torch.distributed). */
#ifndef FCDP_PYTHON_TRANSPORT_H
#define FCDP_PYTHON_TRANSPORT_H

#include "torch_plugin/binding.h"

/* A transport whose collectives are Python's: `python.begin(lane, address, bytes)` all-gathers in place over
 * `members * bytes` of host memory at `address` behind what has begun on the lane before, and returns at
 * once; `python.finish(lane, begun)` returns when that is done. Called on threads of the engine's streams,
 * without a lock of the core's. Borrows the reference. NULL with an error set. */
typedef struct binding_transport binding_transport;
binding_transport *binding_transport_create(PyObject *python, fcdp_engine *engine,
                                            const fcdp_topology *topology);
/* Its callables, borrowed. */
PyObject *binding_transport_python(const binding_transport *transport);
/* Is there one? Then what the device does may wait for the GIL. */
bool binding_transport_uses_python(void);
fcdp_transport binding_transport_table(binding_transport *transport);
/* No operation of it is pending. Steals the reference. */
void binding_transport_destroy(binding_transport *transport);
/* How often such transports of this process have called Python so far. Any thread. */
uint64_t binding_transport_python_calls(void);

#endif
