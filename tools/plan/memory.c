/* memory.c - the sums of memory.h.
 *
 * The peak is taken at the end of forward: all activations are there, and the last region is gathered, beside
 * those that stay. What backward adds (a region ahead, a region's gradients) comes as activations go. Of a
 * layer in parts, those ahead count as well, as the layer would be gathered whole otherwise.
 */
#include "tools/plan/memory.h"

static double largest(const plan_job *job) {
    double most = 0;
    for (size_t i = 0; i < job->n_regions; i++)
        if (!job->regions[i].stays) most = fmax(most, plan_gathered(&job->regions[i]));
    return most * job->parameter_bytes;
}

void plan_memory_of(const plan_job *job, const plan_cluster *cluster, plan_mode mode, const uint8_t *tiers,
                    const plan_constants *constants, plan_memory *memory_out) {
    double ranks = plan_n_gpus(cluster), size = cluster->gpus_per_node;
    double shards = mode == PLAN_HSDP ? size : ranks;
    double all = 0, trainable = 0, stay = 0, kept = 0;
    plan_memory m = {.limit = cluster->gpu_memory_bytes * constants->usable, .other = job->other_bytes};
    for (size_t i = 0; i < job->n_regions; i++) {
        const plan_region *region = &job->regions[i];
        double bytes = plan_parameters(region) * job->parameter_bytes;
        all += bytes;
        trainable += region->trainable;
        m.activations += region->activation_bytes;
        if (region->stays || mode == PLAN_KEEP) {
            stay += bytes;
        } else if (mode == PLAN_FCDP && tiers[i] == PLAN_ON_DEVICE) {
            kept += bytes;
        }
        if (mode == PLAN_FCDP && (tiers[i] == PLAN_BY_SLICE || tiers[i] == PLAN_WHOLE)) m.host += bytes;
        if (mode == PLAN_FCDP && tiers[i] == PLAN_IN_FILE) m.file += bytes;
    }
    double state = trainable * job->state_bytes, parameters = all / job->parameter_bytes;
    m.state = (parameters * job->shard_bytes + trainable * job->gradient_bytes) / shards;
    if (mode == PLAN_OFFLOAD)
        m.host = (state + trainable * job->gradient_bytes) / cluster->n_nodes;
    else
        m.state += state / shards;
    m.cache = kept;
    if (mode == PLAN_HPZ) m.cache += constants->cache * all / size;
    if (mode == PLAN_HFSDP) m.cache += all / size;
    m.gathered = stay + (mode == PLAN_KEEP ? 0 : largest(job));
    m.total = m.state + m.cache + m.gathered + m.activations + m.other;
    m.fits = m.total <= m.limit && (cluster->host_memory_bytes <= 0 || m.host <= cluster->host_memory_bytes);
    *memory_out = m;
}
