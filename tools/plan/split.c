/* split.c - the arithmetic of a region in pieces. */
#include "tools/plan/split.h"

#include <math.h>

enum { BLOCK = 64 }; /* rows: the parts of fcdp.split() begin at multiples of them */
/* What adding up one part's gradient of the input reads and writes, in the input's bytes: in float32, and of
 * 16-bit numbers, whose sum is in float32. */
enum { SUM_TIMES = 3, SUM_TIMES_16_BIT = 5 };

static double left_of(double all, double taken) {
    return fmax(0, all - taken);
}

bool plan_can_split(const plan_region *region, uint32_t parts) {
    for (size_t i = 0; i < region->n_linears; i++)
        if (region->linears[i].rows < (double)parts * BLOCK) return parts == 1;
    return parts == 1 || region->n_linears;
}

static plan_region sum_of(const plan_region *region) {
    plan_region sum = {0};
    for (size_t i = 0; i < region->n_linears; i++) {
        sum.trainable += region->linears[i].trainable;
        sum.frozen += region->linears[i].frozen;
    }
    return sum;
}

/* Less than one parameter is a rounding error. */
static bool leaves_something(const plan_region *region, const plan_region *linears) {
    return plan_parameters(region) - plan_parameters(linears) >= 1;
}

size_t plan_split_n_pieces(const plan_region *region, uint32_t parts) {
    plan_region linears = sum_of(region);
    if (parts == 1 || !region->n_linears) return 1;
    return region->n_linears * parts + leaves_something(region, &linears);
}

/* `share` of what the region computes, and of what FSDP2 itself computes for it by its parameters. */
static plan_region share_of(const plan_region *region, double trainable, double frozen, double share) {
    plan_region piece = {.trainable = trainable,
                         .frozen = frozen,
                         .forward_flops = region->forward_flops * share,
                         .backward_flops = region->backward_flops * share,
                         .forward_seconds = region->forward_seconds * share,
                         .backward_seconds = region->backward_seconds * share};
    double of_region = plan_parameters(&piece) / plan_parameters(region);
    piece.unshard_seconds = region->unshard_seconds * of_region;
    piece.reduce_seconds = region->reduce_seconds * of_region;
    return piece;
}

static plan_region part_of(const plan_region *region, const plan_job *job, const plan_linear *linear,
                           double share, double parts) {
    plan_region part = share_of(region, linear->trainable / parts, linear->frozen / parts,
                                linear->share * share / parts);
    double times = job->parameter_bytes < 4 ? SUM_TIMES_16_BIT : SUM_TIMES;
    part.forward_copied_bytes = 2 * linear->output_bytes / parts; /* into the whole output */
    part.backward_copied_bytes = times * linear->input_bytes;
    part.extra_gathers = linear->extra_gathers;
    return part;
}

void plan_split(const plan_region *region, const plan_job *job, uint32_t parts, uint32_t ahead,
                plan_region *pieces_out) {
    plan_region linears = sum_of(region), *next = pieces_out;
    double shares = 0, largest = 0;
    if (plan_split_n_pieces(region, parts) == 1) {
        *pieces_out = *region;
        return;
    }
    for (size_t i = 0; i < region->n_linears; i++) {
        const plan_linear *l = &region->linears[i];
        shares += l->share;
        largest = fmax(largest, (l->trainable + l->frozen) / parts);
    }
    bool has_rest = leaves_something(region, &linears);
    plan_region rest = share_of(region, left_of(region->trainable, linears.trainable),
                                left_of(region->frozen, linears.frozen), left_of(1, shares));
    rest.stays = region->stays;
    if (has_rest) *next++ = rest;
    double scale = has_rest || shares <= 0 ? 1 : 1 / shares;
    for (size_t i = 0; i < region->n_linears; i++) {
        plan_region part = part_of(region, job, &region->linears[i], scale, parts);
        double others = plan_parameters(&linears) - plan_parameters(&part);
        part.beside = fmin(others, (ahead > 1 ? ahead : 1) * largest) + (has_rest ? plan_gathered(&rest) : 0);
        for (uint32_t k = 0; k < parts; k++) *next++ = part;
    }
    pieces_out->activation_bytes = region->activation_bytes;
}
