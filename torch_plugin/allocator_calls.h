/* allocator_calls.h - what PyTorch's NCCL asks of the current allocator at its start (torch 2.15's "nccl";
 * torchcomms). That is snapshot() and attachAllocatorTraceTracker(), to register the allocator's segments
 * with NCCL. PyTorch's pluggable allocator refuses both by an exception. Pages that move must not be
 * registered, so FCDP's passes them on to PyTorch's own allocator, which has no segments. */
#ifndef FCDP_ALLOCATOR_CALLS_H
#define FCDP_ALLOCATOR_CALLS_H

#include "torch_plugin/binding.h"

/* () -> None, or why this torch's pluggable allocator goes on refusing them. PyTorch's own allocator is the
 * current one still. */
PyObject *binding_allocator_calls_find(PyObject *self, PyObject *args);
/* PyTorch initialises CUDA: the pluggable allocator, which is the current one, passes them on. */
void binding_allocator_calls_pass_on(void);

#endif
