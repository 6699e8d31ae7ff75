/* shard.c - reads this rank's shard of what was last gathered.
 *
 * It is asked for at any time, and says nothing on whether the copy is fresh: who asks has the fingerprint of
 * what it expects.
 */
#include "comm/shard.h"

#include "comm/internal.h"

fcdp_status fcdp_group_gathered_shard(fcdp_group *group, uint32_t i, void *to_out, size_t bytes,
                                      bool *has_out) {
    const fcdp_topology *topology = &group->comm->topology;
    const char *name = fcdp__name_text(group->name);
    *has_out = false;
    atomic_store_explicit(&group->comm->engine->old_shards_are_read, true, memory_order_relaxed);
    fcdp_status status = fcdp__engine_check_process(group->comm->engine, group->name);
    if (status || bytes == 0 || !group->region || fcdp__extent_rounds(group, i)) return status;
    if (group->comm->engine->asleep)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is asleep: fcdp.wake() comes first", name);
    if (group->begun && !group->waited)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is being unsharded: its shards are read between steps",
                          name);
    if (bytes > group->layout->extents[i].shard_bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s': a shard of extent %u has %zu bytes, not %zu", name, i,
                          group->layout->extents[i].shard_bytes, bytes);
    fcdp_piece own = fcdp__plan_shard(group->layout, topology, i, topology->node, topology->local);
    own.bytes = bytes;
    return fcdp__region_peek(group->region, group->layout->extents[i].span, own, to_out, has_out);
}
