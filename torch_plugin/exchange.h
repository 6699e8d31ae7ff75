/* exchange.h - _fcdp.Exchange: what exchanges host memory between the nodes beside NCCL (comm/exchange.h). */
#ifndef FCDP_EXCHANGE_METHODS_H
#define FCDP_EXCHANGE_METHODS_H

#include "comm/exchange.h"
#include "torch_plugin/binding.h"

bool binding_exchange_type(PyObject *module);
/* The module's listen. */
PyObject *binding_exchange_listen(PyObject *self, PyObject *args);
/* A connected one, which is the caller's from here on; NULL with an error set: `object` is none. */
fcdp_exchange *binding_exchange_take(PyObject *object);

#endif
