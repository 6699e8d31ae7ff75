/* evidence.h - what FSDP2's parameters are now, for the core's evidence (comm/vote.h).
 *
 * The extents are those of fsdp2.py, one piece each; FSDP1's and those of extensions say the same in Python
 * (group.Extent). With the GIL; every function may raise what an attribute of a parameter raises. */
#ifndef FCDP_PLUGIN_EVIDENCE_H
#define FCDP_PLUGIN_EVIDENCE_H

#include "comm/validity.h"
#include "torch_plugin/binding.h"

/* Where a reading goes: arrays of an entry per extent. NULL: not wanted. */
typedef struct binding_evidence {
    fcdp_signals *signals;
    /* of the pieces: where they are (NULL: cannot be read), sizes (0 of what cannot be read, unless its bytes
     * are not there) */
    const void **shards;
    size_t *shard_bytes;
} binding_evidence;

/* `group`: the group.Group of `extents`, a list; it says which shards are read, and whether the
 * device reads them. */
bool binding_evidence_read(PyObject *group, PyObject *extents, const binding_evidence *evidence,
                           bool *by_device_out);
/* Has somebody written into a gathered parameter since it was last asked? -1 with an error set. */
int binding_evidence_written(PyObject *extents);

/* (group, [extent]) -> (addresses, sizes): n uint64 each */
PyObject *binding_evidence_places(PyObject *self, PyObject *args);
/* (group, [extent]) -> n x 8 uint64 */
PyObject *binding_evidence_signals(PyObject *self, PyObject *args);
/* [extent] -> bool */
PyObject *binding_evidence_was_written(PyObject *self, PyObject *extents);
/* (dtype of the shard, dtype of what is gathered) -> a signal (comm/validity.h) */
PyObject *binding_evidence_dtypes(PyObject *self, PyObject *args);
/* Once for the module; false with an error set. */
bool binding_evidence_init(void);

#endif
