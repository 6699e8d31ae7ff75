/* history.h - a ring of the last calls of fcdp_alloc, for PyTorch's memory visualiser. Off until asked for:
 * then a hit costs one lock more. */
#ifndef FCDP_HISTORY_H
#define FCDP_HISTORY_H

#include "torch_plugin/binding.h"

typedef enum history_action { HISTORY_ALLOC, HISTORY_FREE, HISTORY_OOM } history_action;

bool binding_history_records(void);
/* Any thread, without the GIL. Dropped while nothing is recorded, and where host memory is out. `address` of
 * an OOM: the device's free bytes. A free is two entries, as PyTorch's: requested, completed. */
void binding_history_add(history_action action, int ordinal, uint64_t address, size_t bytes, void *stream);

PyObject *binding_history_record(PyObject *self, PyObject *args);
PyObject *binding_history_entries(PyObject *self, PyObject *args);

#endif
