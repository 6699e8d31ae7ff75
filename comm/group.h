/* group.h - one FSDP parameter group, from creation to destruction.
 *
 * A group's parameters are the extents of one region, in the device's and in the node's host memory. What is
 * stale of it is in vote.h, when its unshards ask the other ranks in tree.h, what an unshard does in
 * unshard.h.
 *
 * Calls on one group are the caller's to order.
 */
#ifndef FCDP_GROUP_H
#define FCDP_GROUP_H

#include "comm/comm.h"
#include "tiering/layout.h"
#include "tiering/tiers.h"

typedef struct fcdp_group fcdp_group;

/* A group's layout is made here; it cannot be used before it is attached
 * to host memory. `name` for messages. */
fcdp_status fcdp_group_create(fcdp_comm *comm, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents, fcdp_group **group_out) FCDP_MUST_CHECK;
/* Waits for its operations, unmaps, detaches. */
void fcdp_group_destroy(fcdp_group *group);
/* Where a plan has it live (tiers.h), the same on every rank, since it decides which collectives restore it;
 * FCDP_TIER_POLICY without this call. Before it is attached. A group of FCDP_TIER_FILE is one like the others
 * until fcdp_group_attach_file, and one of FCDP_TIER_GATHER is not for attaching. */
void fcdp_group_set_tier(fcdp_group *group, fcdp_tier tier);
/* Give it pages of host memory at its addresses on the device, of this rank's alone (mapped.h), and
 * FCDP_TIER_MAPPED; after it is attached, before its first use. All ranks of the shard group do, or those
 * that did undo it. FCDP_ERR_UNSUPPORTED: the model is on CPUs, or the group lives in a file; other errors as
 * from fcdp__region_map_host. On failure the group is as it was. */
fcdp_status fcdp_group_map_host(fcdp_group *group) FCDP_MUST_CHECK;
/* It has the tier again that it had before. */
fcdp_status fcdp_group_unmap_host(fcdp_group *group) FCDP_MUST_CHECK;
/* In which order `groups` of one shard group take host memory, where it may not suffice for all of them: the
 * same on every rank (fcdp__policy_host_order). stays[i]: group i is not resharded after forward.
 * order_out[place]: which of the n; the first *n_memory_out take host memory, the next *n_file_out live in
 * files, and the others are gathered again. */
fcdp_status fcdp_groups_host_order(fcdp_group *const *groups, const uint8_t *stays, uint32_t n,
                                   uint32_t *order_out, uint32_t *n_memory_out,
                                   uint32_t *n_file_out) FCDP_MUST_CHECK;
/* Leader: take the group's block of host memory. Every rank, leader included: attach at the
 * leader's offset; then the region exists. */
fcdp_status fcdp_group_host_alloc(fcdp_group *group, uint64_t *offset_out) FCDP_MUST_CHECK;
fcdp_status fcdp_group_attach(fcdp_group *group, uint64_t offset) FCDP_MUST_CHECK;
/* From here on a SIGSEGV in the region says so, with the group's name and names[i] of extent i
 * (tiering/segv.h). Attached, once. */
fcdp_status fcdp_group_watch(fcdp_group *group, const char *const *names, uint32_t n_names) FCDP_MUST_CHECK;
/* What messages call the extents: n_extents names, of which the group has its own copies. Without them they
 * name the group. */
fcdp_status fcdp_group_name_extents(fcdp_group *group, const char *const *names) FCDP_MUST_CHECK;
/* Of one number of each extent, n_extents: 2 or 4, else its bits are compared as if they were of 4. For
 * differences between gathers (delta.h). Before the first begin. */
void fcdp_group_set_element_bytes(fcdp_group *group, const uint8_t *element_bytes);
/* Of what kind the numbers of each extent are, n_extents: fcdp_number (int8.h). A frozen extent's are
 * OTHER: it is gathered once, and what looks like numbers may be packed bits (bitsandbytes'
 * quant_storage). OTHER without this call, which FCDP_CODEC=int8 leaves as they are. Before the first
 * begin. */
void fcdp_group_set_numbers(fcdp_group *group, const uint8_t *numbers);
/* The program's own of the group, for its functions (unshard.h); NULL: none. */
void fcdp_group_set_owner(fcdp_group *group, void *owner);
void *fcdp_group_owner(const fcdp_group *group);
/* Addresses of the extents' storages, for life; bytes of extent i = n_ranks * shard_bytes. */
fcdp_dptr fcdp_group_extent(const fcdp_group *group, uint32_t i);
uint32_t fcdp_group_n_extents(const fcdp_group *group);
/* Not 0, and no other group's of this process, before or after. */
uint64_t fcdp_group_id(const fcdp_group *group);

typedef struct fcdp_group_stats {
    const char *name;       /* borrowed from the group */
    size_t bytes;           /* region */
    size_t trainable_bytes; /* of those, in the trainable span */
    bool in_file;           /* spilled.h */
    bool on_disk;           /* its frozen span's slice, too (frozen.h) */
    fcdp_tier tier;
    fcdp_gather_counts gathers;
    uint64_t plain_bytes, gather_bytes; /* of its unshards, as the engine's stats count them */
    const char *state;                  /* "device", "host", "file", "mapped", "mixed", "invalid" */
} fcdp_group_stats;
void fcdp_group_stats_get(fcdp_group *group, fcdp_group_stats *stats_out);

#endif
