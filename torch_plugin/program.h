/* program.h - the plugin as the core's program (comm/unshard.h): methods of group.Group. */
#ifndef FCDP_PLUGIN_PROGRAM_H
#define FCDP_PLUGIN_PROGRAM_H

#include "comm/unshard.h"
#include "torch_plugin/handles.h"

/* Of one call into the core. The functions take the GIL, which the call is made without. What Python raises
 * in one is kept, and comes out of the call as it was. */
typedef struct binding_program {
    fcdp_program table;
    PyObject *side;                 /* borrowed: of side.py, or None */
    PyObject *type, *value, *trace; /* the first exception; NULL: none */
} binding_program;

/* With the GIL. `side`: where inputs are made; None: on the current stream. */
void binding_program_begin(binding_program *program, PyObject *side);
/* The core's `status` as Python has it: NULL with an exception set, or None. */
PyObject *binding_program_end(binding_program *program, fcdp_status status);
/* Has a function raised that cannot fail? Its call has not stopped for it. */
bool binding_program_has_raised(const binding_program *program);
/* Has somebody written into what was gathered of the group? < 0: an exception is set. With the GIL. */
int binding_program_written(const fcdp_group *group);
/* A test's: what Python's callable says of the id of a group whose restore begins, true: it finds none. */
void binding_refuse_restores(PyObject *callable);

#endif
