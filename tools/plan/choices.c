/* choices.c - a region's choices from what its pieces move, and the search below each peak of what is
 * gathered. */
#include "tools/plan/choices.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/plan/moves.h"

/* Of what is left after so many searches, or after those that had to drop states, a bound is known. Quick
 * searches are first: with what they find, the others have less to keep. */
enum { MAX_SEARCHES = 32, QUICKER = 16 };
/* What a part is said to take, so that of choices that take as long the one with fewer parts is better. */
#define PART_SECONDS 1e-9

/* Of one unshard alone: the slowest link, if all of them work side by side. */
static double slowest_leg(const plan_cluster *c, const plan_bytes *b, double inter_bytes) {
    double pcie = plan_copy_rate(c);
    double most = plan_seconds(inter_bytes, c->inter_rate) + b->inter_hops * c->inter_latency_s;
    most = fmax(most, plan_seconds(b->node, c->node_rate) + b->node_hops * c->node_latency_s);
    most = fmax(most, plan_seconds(b->to_device, pcie));
    most = fmax(most, plan_seconds(b->to_host, pcie));
    return fmax(most, plan_seconds(b->file, c->file_rate));
}

static void sum_bytes(plan_bytes *sum, const plan_bytes *more) {
    sum->inter += more->inter;
    sum->node += more->node;
    sum->to_device += more->to_device;
    sum->to_host += more->to_host;
    sum->file += more->file;
    sum->inter_hops += more->inter_hops;
    sum->node_hops += more->node_hops;
}

/* What brings one piece, in forward and in backward. */
typedef struct brought {
    double forward, backward;
} brought;

static bool bring(const plan_job *job, const plan_cluster *cluster, const plan_region *piece, plan_tier tier,
                  brought *brought_out) {
    double bytes = plan_parameters(piece) * job->parameter_bytes;
    double reduced = plan_flat_ring(cluster, piece->trainable * job->gradient_bytes).inter;
    plan_bytes forward = {0}, backward = {0};
    if (tier == PLAN_GATHERED) {
        forward = plan_flat_ring(cluster, bytes);
        backward = piece->stays ? (plan_bytes){0} : forward;
    } else {
        plan_engine_moves first, again;
        if (!plan_engine_moves_make(cluster, job, piece, tier, false, true, &first) ||
            !plan_engine_moves_make(cluster, job, piece, tier, false, false, &again))
            return false;
        sum_bytes(&forward, &first.gather);
        sum_bytes(&forward, &first.node);
        sum_bytes(&forward, &first.store);
        sum_bytes(&forward, &first.restore);
        if (!piece->stays) backward = again.restore;
    }
    plan_bytes once = backward;
    for (int k = 0; k < piece->extra_gathers; k++) sum_bytes(&backward, &once);
    *brought_out = (brought){slowest_leg(cluster, &forward, forward.inter),
                             slowest_leg(cluster, &backward, backward.inter + reduced)};
    return true;
}

static bool are_alike(const plan_region *a, const plan_region *b) {
    return a->trainable == b->trainable && a->frozen == b->frozen && a->stays == b->stays &&
           a->forward_flops == b->forward_flops && a->backward_flops == b->backward_flops &&
           a->forward_seconds == b->forward_seconds && a->backward_seconds == b->backward_seconds;
}

/* What a gather of so many seconds is waited for longer, if it runs beside `last`, and not beside `all`. */
static double lost(double gather, double last, double all) {
    return fmax(0, gather - last) - fmax(0, gather - all);
}

/* Of region i in `n` pieces. Each is gathered while the one before computes, so the region behind is gathered
 * beside the last piece alone: as if what it waits for were as large as this region's first piece, since the
 * choices of two regions cannot be in one's seconds. */
static bool choose_one(const plan_job *job, const plan_cluster *cluster, size_t i, const plan_region *pieces,
                       size_t n, plan_tier tier, plan_choice *choice_out) {
    const plan_region *region = &job->regions[i];
    const plan_region *before = i ? region - 1 : region,
                      *behind = i + 1 < job->n_regions ? region + 1 : region;
    double copied = 0, forward = 0, backward = 0;
    plan_choice made = {.seconds = n > 1 ? PART_SECONDS * (double)n : 0};
    brought first = {0, 0}, now = {0, 0};
    for (size_t k = 0; k < n; k++) {
        double bytes = plan_parameters(&pieces[k]) * job->parameter_bytes, last = now.backward;
        bool is_new = !k || !are_alike(&pieces[k], &pieces[k - 1]);
        if (is_new && !bring(job, cluster, &pieces[k], tier, &now)) return false;
        if (!k) first = now;
        /* what its neighbour computes is in the sum already: of pieces, in that of the region behind */
        made.seconds += !k ? fmax(now.forward, plan_forward_seconds(before, cluster))
                           : fmax(0, now.forward - plan_forward_seconds(&pieces[k - 1], cluster));
        if (k) made.seconds += fmax(0, last - plan_backward_seconds(&pieces[k], cluster));
        forward += plan_forward_seconds(&pieces[k], cluster);
        backward += plan_backward_seconds(&pieces[k], cluster);
        copied += pieces[k].forward_copied_bytes + pieces[k].backward_copied_bytes;
        if (pieces[k].stays || tier == PLAN_ON_DEVICE) made.device_bytes += bytes;
        if (tier == PLAN_BY_SLICE || tier == PLAN_WHOLE) made.host_bytes += bytes;
    }
    made.seconds += fmax(now.backward, plan_backward_seconds(behind, cluster));
    made.seconds += plan_seconds(copied, cluster->memory_rate);
    if (behind != region)
        made.seconds += lost(first.forward, plan_forward_seconds(&pieces[n - 1], cluster), forward);
    if (before != region)
        made.seconds += lost(now.backward, plan_backward_seconds(&pieces[0], cluster), backward);
    if (tier == PLAN_IN_FILE && cluster->file_rate <= 0) made.seconds = INFINITY;
    *choice_out = made;
    return true;
}

/* The choices of region i in `parts` parts, PLAN_N_TIERS of them; what is gathered. */
static bool choose_split(const plan_job *job, const plan_cluster *cluster, size_t i, uint32_t parts,
                         uint32_t ahead, plan_choice *choices_out, double *gathered_out) {
    const plan_region *region = &job->regions[i];
    bool is_good = true;
    *gathered_out = 0;
    for (int tier = 0; tier < PLAN_N_TIERS; tier++) choices_out[tier] = (plan_choice){.seconds = INFINITY};
    if (!plan_can_split(region, parts)) return true;
    size_t n = plan_split_n_pieces(region, parts);
    plan_region *pieces = calloc(n, sizeof *pieces);
    if (!pieces) return false;
    plan_split(region, job, parts, ahead, pieces);
    for (size_t k = 0; k < n; k++)
        if (!pieces[k].stays)
            *gathered_out = fmax(*gathered_out, plan_gathered(&pieces[k]) * job->parameter_bytes);
    for (int tier = 0; is_good && tier < PLAN_N_TIERS; tier++)
        is_good = choose_one(job, cluster, i, pieces, n, (plan_tier)tier, &choices_out[tier]);
    free(pieces);
    return is_good;
}

bool plan_choices_make(const plan_job *job, const plan_cluster *cluster, uint32_t ahead, uint32_t n_splits,
                       plan_choice *choices_out, double *gathered_out) {
    for (size_t i = 0; i < job->n_regions; i++)
        for (uint32_t k = 0; k < n_splits; k++) {
            size_t at = i * n_splits + k;
            double gathered;
            if (!choose_split(job, cluster, i, 1u << k, ahead, &choices_out[at * PLAN_N_TIERS], &gathered))
                return false;
            if (gathered_out) gathered_out[at] = gathered;
        }
    return true;
}

/* ---- the best of them ---- */

/* A value that the most gathered bytes can have, and the bound of what is found below it. */
typedef struct peak {
    double bytes, bound;
    bool is_searched;
} peak;

typedef struct chooser {
    const plan_job *job;
    const plan_limits *limits;
    size_t n, n_choices;    /* of a region */
    const plan_choice *all; /* choices */
    const double *gathered; /* n_splits of each region */
    plan_choice
        *below;  /* `all`, but those over a peak, or with more parts and no better, are not to be had */
    peak *peaks; /* from the highest */
    size_t n_peaks;
    uint8_t *chosen, *best_chosen;
    size_t n_states;
    plan_found best;
} chooser;

static int by_bytes(const void *a, const void *b) {
    const peak *x = a, *y = b;
    return (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

/* All values from which each region has a choice below, or equal. */
static void find_peaks(chooser *c) {
    uint32_t n_splits = c->limits->n_splits;
    double least = 0;
    size_t n = 0;
    for (size_t i = 0; i < c->n; i++) {
        double lowest = INFINITY;
        for (uint32_t k = 0; k < n_splits; k++)
            if (plan_can_split(&c->job->regions[i], 1u << k)) {
                c->peaks[n] = (peak){.bytes = c->gathered[i * n_splits + k]};
                lowest = fmin(lowest, c->peaks[n++].bytes);
            }
        least = fmax(least, lowest);
    }
    qsort(c->peaks, n, sizeof *c->peaks, by_bytes);
    for (size_t k = 0; k < n && c->peaks[k].bytes >= least; k++)
        if (!c->n_peaks || c->peaks[k].bytes < c->peaks[c->n_peaks - 1].bytes)
            c->peaks[c->n_peaks++] = c->peaks[k];
}

/* Of one tier. Between tiers that take as long, the order of plan_tier decides, and not their bytes. */
static bool is_no_better(const plan_choice *choice, const plan_choice *with_fewer_parts) {
    return choice->seconds >= with_fewer_parts->seconds &&
           choice->device_bytes >= with_fewer_parts->device_bytes &&
           choice->host_bytes >= with_fewer_parts->host_bytes;
}

/* Sets `below` for a peak. */
static void stay_below(chooser *c, double bytes) {
    memcpy(c->below, c->all, c->n * c->n_choices * sizeof *c->below);
    for (size_t i = 0; i < c->n; i++)
        for (size_t k = 0; k < c->n_choices; k++) {
            plan_choice *own = &c->below[i * c->n_choices];
            bool is_allowed = c->gathered[i * c->limits->n_splits + k / PLAN_N_TIERS] <= bytes;
            for (size_t fewer = k % PLAN_N_TIERS; is_allowed && fewer < k; fewer += PLAN_N_TIERS)
                is_allowed = !is_no_better(&own[k], &own[fewer]);
            if (!is_allowed) own[k].seconds = INFINITY;
        }
}

/* Raises the peaks' bounds to what these prices show. */
static void bound_peaks(chooser *c, const double price[2]) {
    for (size_t k = 0; k < c->n_peaks; k++) {
        peak *p = &c->peaks[k];
        double room = c->limits->device_bytes - p->bytes;
        if (p->is_searched || p->bound >= c->best.seconds) continue;
        stay_below(c, p->bytes);
        p->bound = room < 0 ? INFINITY
                            : fmax(p->bound, plan_search_bound(c->below, c->n, c->n_choices, room,
                                                               c->limits->host_bytes, price));
    }
}

/* The peak that may give most; NULL: none may give more than what is known. */
static peak *most_promising(const chooser *c) {
    peak *best = NULL;
    for (size_t k = 0; k < c->n_peaks; k++) {
        peak *p = &c->peaks[k];
        if (!p->is_searched && p->bound < c->best.seconds && (!best || p->bound < best->bound)) best = p;
    }
    return best;
}

static bool search_peak(chooser *c, peak *p, size_t max_states) {
    plan_found found;
    const plan_limits *l = c->limits;
    stay_below(c, p->bytes);
    if (!plan_search(c->below, c->n, c->n_choices, l->device_bytes - p->bytes, l->host_bytes, c->best.seconds,
                     max_states, c->chosen, &found))
        return false;
    p->is_searched = true;
    p->bound = fmax(p->bound, found.bound);
    c->n_states += found.n_states;
    if (!found.fits) return true;
    found.device_bytes += p->bytes;
    c->best = found;
    memcpy(c->best_chosen, c->chosen, c->n);
    bound_peaks(c, found.price);
    return true;
}

/* Until no peak is left that may give more, or searches have kept so many states. */
static bool search_peaks(chooser *c, size_t max_states, size_t max_work) {
    peak *next;
    c->n_states = 0;
    for (size_t k = 0; k < c->n_peaks; k++) c->peaks[k].is_searched = false;
    for (int k = 0; k < MAX_SEARCHES && c->n_states < max_work && (next = most_promising(c)); k++)
        if (!search_peak(c, next, max_states)) return false;
    return true;
}

static bool search_all(chooser *c) {
    size_t most = c->limits->max_states, quick = most / QUICKER + 1, work = c->n * most;
    find_peaks(c);
    bound_peaks(c, (double[]){0, 0});
    if (!search_peaks(c, quick, work) || !search_peaks(c, most, work)) return false;
    c->best.bound = c->best.seconds;
    for (size_t k = 0; k < c->n_peaks; k++) c->best.bound = fmin(c->best.bound, c->peaks[k].bound);
    c->best.is_exact = c->best.bound >= c->best.seconds;
    return true;
}

bool plan_choose(const plan_job *job, const plan_cluster *cluster, const plan_limits *limits,
                 uint8_t *tiers_out, uint8_t *parts_out, plan_found *found_out) {
    size_t n = job->n_regions, n_choices = (size_t)limits->n_splits * PLAN_N_TIERS;
    plan_choice *all = calloc(n * n_choices, sizeof *all);
    double *gathered = calloc(n * limits->n_splits, sizeof *gathered);
    chooser c = {
        .job = job, .limits = limits, .n = n, .n_choices = n_choices, .all = all, .gathered = gathered};
    c.best = (plan_found){.seconds = INFINITY};
    c.below = calloc(n * n_choices, sizeof *c.below);
    c.peaks = calloc(n * limits->n_splits, sizeof *c.peaks);
    c.chosen = calloc(n, 1);
    c.best_chosen = calloc(n, 1);
    bool is_good = all && gathered && c.below && c.peaks && c.chosen && c.best_chosen &&
                   plan_choices_make(job, cluster, limits->ahead, limits->n_splits, all, gathered) &&
                   search_all(&c);
    if (is_good) {
        *found_out = c.best;
        for (size_t i = 0; i < n; i++) {
            tiers_out[i] = c.best_chosen[i] % PLAN_N_TIERS;
            parts_out[i] = (uint8_t)(1u << c.best_chosen[i] / PLAN_N_TIERS);
        }
    }
    free(all);
    free(gathered);
    free(c.below);
    free(c.peaks);
    free(c.chosen);
    free(c.best_chosen);
    return is_good;
}

/* ---- evenly spaced ---- */

/* The next region from `i` on that is like `of`, and in as many parts; n: none. */
static size_t next_alike(const plan_job *job, const uint8_t *parts, size_t of, size_t i) {
    while (i < job->n_regions &&
           !((!parts || parts[of] == parts[i]) && are_alike(&job->regions[of], &job->regions[i])))
        i++;
    return i;
}

void plan_tiers_spread(const plan_job *job, const uint8_t *parts, uint8_t *tiers) {
    for (size_t first = 0; first < job->n_regions; first++) {
        if (next_alike(job, parts, first, 0) < first) continue; /* spread with an earlier one */
        size_t n = 0, n_kept = 0, k = 0, counts[PLAN_N_TIERS] = {0};
        for (size_t i = first; i < job->n_regions; i = next_alike(job, parts, first, i + 1)) {
            counts[tiers[i]]++;
            n++;
        }
        n_kept = counts[PLAN_ON_DEVICE];
        for (size_t i = first; i < job->n_regions; i = next_alike(job, parts, first, i + 1), k++) {
            uint8_t tier = PLAN_ON_DEVICE;
            if ((k + 1) * n_kept / n == k * n_kept / n)
                for (tier = PLAN_ON_DEVICE + 1; !counts[tier]; tier++) continue;
            counts[tier]--;
            tiers[i] = tier;
        }
    }
}
