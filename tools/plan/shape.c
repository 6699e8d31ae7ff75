/* shape.c - the arithmetic of a decoder. */
#include "tools/plan/shape.h"

#include <stdlib.h>
#include <string.h>

/* Of a token and a vocabulary entry: logits in the gathered dtype, and in float32, with their gradients. */
enum { LOGIT_BYTES = 10 };
enum { SCORE_BYTES = 5 };      /* scores, their softmax and a mask of dropout */
enum { CHECKPOINT_BYTES = 2 }; /* a layer's input, per token and unit of the hidden size */

typedef struct layer {
    double weights, rest; /* of matrices; biases and norms */
    double adapters;
} layer;

static layer layer_of(const plan_shape *s) {
    double q = s->heads * s->head_size, kv = s->kv_heads * s->head_size, h = s->hidden, r = s->lora_rank;
    double matrices = s->gated ? 3 : 2;
    return (layer){.weights = h * (2 * q + 2 * kv) + matrices * h * s->intermediate,
                   .rest = s->biases ? q + 2 * kv + h + s->intermediate + h + 4 * h : 2 * h,
                   .adapters = r * (2 * (h + q) + 2 * (h + kv))};
}

void plan_shape_describe(const plan_shape *shape, double batch, const plan_constants *constants,
                         plan_job *job_inout, plan_region *regions_out) {
    double tokens = batch * shape->sequence, h = shape->hidden, head = shape->vocab * h;
    bool adapts = shape->lora_rank > 0;
    layer l = layer_of(shape);
    double attention = 4 * shape->sequence * shape->heads * shape->head_size * tokens;
    double forward = 2 * (l.weights + l.adapters) * tokens + attention;
    double width = job_inout->parameter_bytes / 2; /* the constants are those of 16-bit numbers */
    double whole = constants->activation_bytes * width * tokens * h;
    if (shape->scores) whole += SCORE_BYTES * width * shape->heads * shape->sequence * tokens;
    size_t n = plan_shape_n_regions(shape);
    memset(regions_out, 0, n * sizeof *regions_out);
    for (size_t i = 0; i < n; i++) {
        plan_region *r = &regions_out[i];
        bool edge = i == 0 || i == n - 1;
        double norm = i ? (shape->biases ? 2 : 1) * h : 0;
        double own = !edge         ? l.weights + l.rest
                     : i == 0      ? head + shape->positions * h
                     : shape->tied ? norm
                                   : head + norm;
        double flops = !edge ? forward : i ? 2 * head * tokens : 0;
        *r = (plan_region){.trainable = adapts ? (edge ? 0 : l.adapters) : own,
                           .frozen = adapts ? own : 0,
                           .forward_flops = flops,
                           /* of weights that are frozen, no gradients are computed */
                           .backward_flops = adapts && !edge ? forward + attention + 2 * l.adapters * tokens
                                             : adapts        ? flops
                                                             : 2 * flops,
                           .activation_bytes = edge ? 0 : whole,
                           .stays = edge};
        if (!edge && shape->recompute) {
            r->backward_flops += forward;
            r->activation_bytes = CHECKPOINT_BYTES * width * tokens * h;
        }
    }
    job_inout->n_regions = n;
    job_inout->regions = regions_out;
    job_inout->other_bytes = LOGIT_BYTES * tokens * shape->vocab + (shape->recompute ? whole : 0);
}

bool plan_largest_batch(const plan_shape *shape, const plan_job *costs, const plan_cluster *cluster,
                        plan_mode mode, plan_tier tier, const plan_constants *constants, double *batch_out) {
    size_t n = plan_shape_n_regions(shape);
    plan_region *regions = calloc(n, sizeof *regions);
    uint8_t *tiers = malloc(n);
    bool is_good = regions && tiers;
    double most = 0;
    if (is_good) memset(tiers, tier, n);
    for (double batch = 1; is_good && batch < 1 << 20; batch *= 2) {
        plan_job job = *costs;
        plan_memory memory;
        plan_shape_describe(shape, batch, constants, &job, regions);
        plan_memory_of(&job, cluster, mode, tiers, constants, &memory);
        if (!memory.fits) break;
        most = batch;
    }
    if (is_good) *batch_out = most;
    free(regions);
    free(tiers);
    return is_good;
}
