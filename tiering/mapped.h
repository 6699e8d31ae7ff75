/* mapped.h - regions whose pages are host memory, which the device reads at the region's own addresses
 * (FCDP_HOST_MAP): for groups of which a use reads little, such as embeddings.
 *
 * Such a region takes no device memory. Its pages are this process's alone, of the NUMA node of its device,
 * and count in the node's host budget. They are mapped once, for the region's life: a gather writes into
 * them, kernels read them over PCIe, and there is nothing to restore or to evict. To the rest of tiering it
 * is a region that is always kept, in a slot that no other region can take.
 *
 *     slot->on_host => slot->owner == region, and region->in_use or region->kept
 *     host budget: fcdp__mapped_bytes(region) more of every process that has mapped it
 *
 * With exact mapping it stays mapped too, so a stale access to it does not fault. A sleep leaves it as it is.
 */
#ifndef FCDP_MAPPED_H
#define FCDP_MAPPED_H

#include "tiering/account.h"
#include "tiering/region.h"

/* Does the system offer such pages? One is taken, mapped, and given back. FCDP_ERR_NO_HOST_MEM and the
 * driver's failures, with the reason. */
fcdp_status fcdp__mapped_probe(fcdp_driver *drv, int numa_node) FCDP_MUST_CHECK;
/* Take the pages and map them: the region's tier is FCDP_TIER_MAPPED from here on. Before its first use; not
 * spilled. `account` is borrowed until the region is destroyed or unmapped. numa_node -1: not known, so node
 * 0's. FCDP_ERR_NO_HOST_MEM: the budget is spent, or the machine's memory; other failures are the driver's,
 * which may not offer such pages here. On failure the region is as it was. */
fcdp_status fcdp__region_map_host(fcdp_region *region, fcdp_account *account, int numa_node) FCDP_MUST_CHECK;
/* Undo it, with the tier that the region had before. Before its first use. On failure it stays mapped. */
fcdp_status fcdp__region_unmap_host(fcdp_region *region, fcdp_tier tier) FCDP_MUST_CHECK;
bool fcdp__region_is_mapped_on_host(const fcdp_region *region);
/* What it takes of the host budget, or would: whole pages. */
size_t fcdp__mapped_bytes(const fcdp_region *region);

#endif
