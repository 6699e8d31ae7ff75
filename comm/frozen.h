/* frozen.h - frozen parameters come from the node's disk when a job starts again (FCDP_CACHE_DIR).
 *
 * The first gather of a group's frozen span can be spared if every node has the bytes on its disk. Each rank
 * keeps its slice of the span there (tiering/cache.h). A slice is found by a key that all ranks' shards make:
 * the hash of the fingerprints of what each of them would send, and of the span's layout. Once the slices are
 * in host memory, the ranks of a node hash all shards there and compare: 128 bits of each rank's shards, as
 * that rank has them now. So a changed weight, another layout and another dtype are other keys, and a damaged
 * file is found before its bytes are used; neither the file nor the run that wrote it is trusted.
 *
 * The ranks agree on each step, so all of them use what is on disk, or all gather. A rank without the option,
 * or whose directory cannot be used, has all of them gather.
 *
 * What was gathered is written behind the first use that has stored it in host memory, by a thread that the
 * training does not wait for. The end of a group waits for its write.
 */
#ifndef FCDP_FROZEN_H
#define FCDP_FROZEN_H

#include "comm/unshard.h"

typedef struct fcdp_frozen fcdp_frozen; /* an engine's: its cache and the writer */

/* *frozen_out is NULL without the option. */
fcdp_status fcdp__frozen_open(fcdp_engine *engine, fcdp_frozen **frozen_out) FCDP_MUST_CHECK;
/* Warn, once in a process and on one rank of the node, if the directory cannot be used. */
void fcdp__frozen_warn(const fcdp_comm *comm);
/* Every group has ended. NULL: does nothing. */
void fcdp__frozen_close(fcdp_frozen *frozen);

/* Of a rank's slices, after which the ranks meet again; tests lower it. */
extern size_t fcdp__frozen_batch_bytes;
/* How long the end of a group waits for what is being written before it says so; tests lower it. */
extern uint64_t fcdp__frozen_quiet_ns;
/* This rank's vote: may the frozen span come from disk? Once in a group's life. */
bool fcdp__frozen_is_asked(const fcdp_group *group);
/* Right after an agreement on `groups`: bring the frozen spans that all ranks voted for and that all nodes
 * have, into host memory. They are no longer stale then. `stream`: the current one. A collective. */
fcdp_status fcdp__frozen_load(fcdp_group *const *groups, uint32_t n, const fcdp_program *program,
                              fcdp_stream stream) FCDP_MUST_CHECK;
/* The spans that a use must store though the group is kept: they are to be written to disk. The same on
 * every rank. */
uint32_t fcdp__frozen_stores(const fcdp_group *group);
/* A use has ended: what it stored is written, if it is to be. */
void fcdp__frozen_write(fcdp_group *group);
/* The group ends. Waits for its write. */
void fcdp__frozen_forget(fcdp_group *group);

#endif
