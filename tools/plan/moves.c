/* moves.c - bytes per leg, from the engine's plans and from the arithmetic of a ring. */
#include "tools/plan/moves.h"

#include <stdlib.h>

#include "comm/plan.h"

plan_bytes plan_flat_ring(const plan_cluster *cluster, double bytes) {
    double ranks = plan_n_gpus(cluster), sent = bytes * (ranks - 1) / ranks;
    plan_bytes moves = {0};
    if (cluster->n_nodes < 2) return plan_node_ring(cluster, bytes);
    moves.inter = moves.node = sent; /* of each node's link, one GPU uses it as its way to the next one */
    moves.inter_hops = ranks - 1;    /* a ring moves on when its slowest hop has */
    return moves;
}

plan_bytes plan_node_ring(const plan_cluster *cluster, double bytes) {
    double ranks = cluster->gpus_per_node;
    return (plan_bytes){.node = bytes * (ranks - 1) / ranks, .node_hops = ranks - 1};
}

plan_bytes plan_hsdp_reduction(const plan_cluster *cluster, double bytes) {
    plan_bytes moves = plan_node_ring(cluster, bytes);
    double nodes = cluster->n_nodes;
    moves.inter = 2 * bytes * (nodes - 1) / nodes; /* the node's ranks together, each of its 1/g */
    moves.inter_hops = 2 * plan_node_hops(cluster);
    return moves;
}

plan_bytes plan_between_nodes(const plan_cluster *cluster, double bytes) {
    double nodes = cluster->n_nodes;
    return (plan_bytes){.inter = bytes * (nodes - 1) / nodes, .inter_hops = plan_node_hops(cluster)};
}

static double sum_parts(const fcdp_part *parts, size_t n, double times) {
    double bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += (double)parts[i].bytes;
    return bytes * times;
}

static double sum_pieces(const fcdp_piece *pieces, size_t n) {
    double bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += (double)pieces[i].bytes;
    return bytes;
}

/* A region's frozen and trainable parameters, as one extent each, and the rank that looks at them. */
typedef struct view {
    fcdp_layout *layout;
    fcdp_topology topology;
    fcdp_plan *plan;
    fcdp_part *parts;
    fcdp_piece *pieces;
} view;

static void view_free(view *v) {
    fcdp__layout_destroy(v->layout);
    fcdp__plan_destroy(v->plan);
    free(v->parts);
    free(v->pieces);
}

static bool view_make(view *v, const plan_cluster *cluster, const plan_job *job, const plan_region *region,
                      const uint8_t stale[FCDP_N_SPANS]) {
    uint32_t nodes = (uint32_t)cluster->n_nodes, size = (uint32_t)cluster->gpus_per_node;
    double ranks = plan_n_gpus(cluster);
    fcdp_extent_spec specs[] = {
        {(size_t)(region->frozen * job->parameter_bytes / ranks + 0.999), FCDP_SPAN_FROZEN},
        {(size_t)(region->trainable * job->parameter_bytes / ranks + 0.999), FCDP_SPAN_TRAINABLE}};
    *v = (view){.topology = {nodes * size, nodes, size, 0, 0, 0}};
    v->parts = calloc(FCDP_N_SPANS * (size_t)nodes + FCDP_N_SPANS, sizeof *v->parts);
    v->pieces = calloc(FCDP_N_SPANS * ((size_t)nodes + 1), sizeof *v->pieces);
    if (v->parts && v->pieces && !fcdp__layout_create(specs, FCDP_N_SPANS, nodes * size, size, &v->layout) &&
        !fcdp__plan_make(v->layout, stale, &v->plan))
        return true;
    view_free(v);
    return false;
}

/* Of what is stale: the inter step, and the node step. */
static void add_gather(const view *v, double hops, plan_engine_moves *moves) {
    const fcdp_topology *t = &v->topology;
    size_t n = fcdp__plan_inter_parts(v->plan, v->layout, t, (fcdp_dptr){0}, v->parts);
    moves->gather.inter = sum_parts(v->parts, n, (double)t->node_size * (t->n_nodes - 1));
    moves->gather.inter_hops = n ? hops : 0;
    n = fcdp__plan_node_parts(v->plan, v->layout, t, (fcdp_dptr){0}, v->parts);
    moves->node.node = sum_parts(v->parts, n, t->node_size - 1);
    moves->node.node_hops = n ? t->node_size - 1 : 0;
}

/* Of the spans that are fresh at least in part. */
static void add_restore(const view *v, plan_tier tier, plan_bytes *restore) {
    const fcdp_topology *t = &v->topology;
    size_t n = fcdp__plan_slice_parts(v->plan->restore_mask, v->layout, t, (fcdp_dptr){0}, v->parts);
    double slice = sum_parts(v->parts, n, 1);
    if (tier == PLAN_WHOLE) {
        restore->to_device = slice * t->node_size;
        return;
    }
    restore->to_device = slice;
    restore->node = slice * (t->node_size - 1);
    restore->node_hops = n ? t->node_size - 1 : 0;
    if (tier == PLAN_IN_FILE) restore->file = slice * t->node_size;
}

bool plan_engine_moves_make(const plan_cluster *cluster, const plan_job *job, const plan_region *region,
                            plan_tier tier, bool stale_frozen, bool stale_trainable,
                            plan_engine_moves *moves_out) {
    bool nowhere = tier == PLAN_GATHERED;
    uint8_t stale[FCDP_N_SPANS] = {stale_frozen || nowhere, stale_trainable || nowhere};
    view v;
    if (!view_make(&v, cluster, job, region, stale)) return false;
    *moves_out = (plan_engine_moves){0};
    add_gather(&v, plan_node_hops(cluster), moves_out);
    if (tier != PLAN_ON_DEVICE && !nowhere) {
        add_restore(&v, tier, &moves_out->restore);
        size_t n = fcdp__plan_put_slices(v.plan, 0, v.layout, &v.topology, v.pieces);
        moves_out->store.to_host = sum_pieces(v.pieces, n);
        if (tier == PLAN_IN_FILE) moves_out->store.file = moves_out->store.to_host * cluster->gpus_per_node;
    }
    view_free(&v);
    return true;
}
