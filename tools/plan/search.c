/* search.c - dynamic programming over the regions, with dominance and a Lagrangian bound.
 *
 * With prices for a byte of the device and of the host, each region's best choice is its own: the sum is a
 * lower bound of what the regions that are left can give, whatever the prices. They are raised while the
 * bound grows. The choices that they lead to are a first solution wherever they fit.
 */
#include "tools/plan/search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 400 };

typedef struct state {
    double seconds, device, host;
    uint32_t before; /* in the states of the region before */
    uint8_t chosen;
} state;

typedef struct search {
    const plan_choice *choices;
    size_t n, n_choices, max_states;
    double budget[2], price[2];
    double *rest;     /* [i]: the bound of regions i and on, their bytes priced */
    double *least[2]; /* [i]: bytes that regions i and on take at least */
    double best;      /* seconds of the best solution that is known */
    bool has_found;   /* it is best_chosen, and not the caller's */
    uint8_t *best_chosen;
    size_t n_states;
    double dropped; /* the least bound of the states that there was no room for */
} search;

static const plan_choice *choice_at(const search *s, size_t i, size_t c) {
    return &s->choices[i * s->n_choices + c];
}

static double priced(const search *s, const plan_choice *choice) {
    return choice->seconds + s->price[0] * choice->device_bytes + s->price[1] * choice->host_bytes;
}

/* The cheapest choices at the prices; their sum, less what the budgets are worth, is a bound. `used`:
 * bytes that they take. */
static double relax(const search *s, double used[2], uint8_t *chosen) {
    double bound = -s->price[0] * s->budget[0] - s->price[1] * s->budget[1];
    used[0] = used[1] = 0;
    for (size_t i = 0; i < s->n; i++) {
        size_t best = 0;
        for (size_t c = 1; c < s->n_choices; c++)
            if (priced(s, choice_at(s, i, c)) < priced(s, choice_at(s, i, best))) best = c;
        const plan_choice *b = choice_at(s, i, best);
        bound += priced(s, b);
        used[0] += b->device_bytes;
        used[1] += b->host_bytes;
        chosen[i] = (uint8_t)best;
    }
    return bound;
}

/* If what was chosen fits and is better than what is known, it is known now. */
static void offer(search *s, const uint8_t *chosen) {
    double seconds = 0, used[2] = {0, 0};
    for (size_t i = 0; i < s->n; i++) {
        const plan_choice *c = choice_at(s, i, chosen[i]);
        seconds += c->seconds;
        used[0] += c->device_bytes;
        used[1] += c->host_bytes;
    }
    if (used[0] > s->budget[0] || used[1] > s->budget[1] || !(seconds < s->best)) return;
    s->best = seconds;
    s->has_found = true;
    memcpy(s->best_chosen, chosen, s->n);
}

/* A solution at the prices: of each region in turn the cheapest choice that leaves the others what they
 * take at least; then whatever is faster and still fits. Nothing is offered if none fits. */
static void offer_greedy(search *s, uint8_t *chosen) {
    double used[2] = {0, 0};
    for (size_t i = 0; i < s->n; i++) {
        size_t best = s->n_choices;
        for (size_t c = 0; c < s->n_choices; c++) {
            const plan_choice *choice = choice_at(s, i, c);
            if (used[0] + choice->device_bytes + s->least[0][i + 1] > s->budget[0] ||
                used[1] + choice->host_bytes + s->least[1][i + 1] > s->budget[1])
                continue;
            if (best == s->n_choices || priced(s, choice) < priced(s, choice_at(s, i, best))) best = c;
        }
        if (best == s->n_choices) return;
        chosen[i] = (uint8_t)best;
        used[0] += choice_at(s, i, best)->device_bytes;
        used[1] += choice_at(s, i, best)->host_bytes;
    }
    for (size_t i = 0; i < s->n; i++)
        for (size_t c = 0; c < s->n_choices; c++) {
            const plan_choice *now = choice_at(s, i, chosen[i]), *choice = choice_at(s, i, c);
            double device = used[0] - now->device_bytes + choice->device_bytes;
            double host = used[1] - now->host_bytes + choice->host_bytes;
            if (choice->seconds >= now->seconds || device > s->budget[0] || host > s->budget[1]) continue;
            chosen[i] = (uint8_t)c;
            used[0] = device;
            used[1] = host;
        }
    offer(s, chosen);
}

/* Raises prices along what the choices take over the budgets, by Polyak's step: as far as the bound would
 * have to grow to meet what is known. Keeps those of the best bound. In units of a whole budget. */
static void set_prices(search *s, uint8_t *chosen) {
    double used[2], best = -INFINITY, kept[2] = {0, 0}, pace = 1;
    for (int round = 0; round < ROUNDS; round++) {
        double bound = relax(s, used, chosen), over[2], length = 0;
        offer(s, chosen);
        offer_greedy(s, chosen);
        if (bound > best) {
            best = bound;
            memcpy(kept, s->price, sizeof kept);
        } else {
            pace *= 0.97;
        }
        for (int k = 0; k < 2; k++) {
            over[k] = s->budget[k] > 0 ? used[k] / s->budget[k] - 1 : 0;
            if (over[k] < 0 && s->price[k] <= 0) over[k] = 0;
            length += over[k] * over[k];
        }
        double gap = isfinite(s->best) ? s->best - bound : fabs(bound) / 10 + 1e-9;
        if (length <= 0 || gap <= 0) break;
        for (int k = 0; k < 2; k++)
            if (s->budget[k] > 0)
                s->price[k] = fmax(0, s->price[k] + pace * gap / length * over[k] / s->budget[k]);
    }
    memcpy(s->price, kept, sizeof kept);
}

/* No state with this bound need be kept. A solution as good is known then, within rounding. */
static bool is_beaten(const search *s, double bound) {
    return bound >= s->best - 1e-12 * fabs(s->best);
}

static double bound_of(const search *s, const state *t, size_t next) {
    return t->seconds + s->rest[next] - s->price[0] * (s->budget[0] - t->device) -
           s->price[1] * (s->budget[1] - t->host);
}

static bool set_least(search *s) {
    for (int k = 0; k < 2; k++)
        if (!(s->least[k] = calloc(s->n + 1, sizeof *s->least[k]))) return false;
    for (size_t i = s->n; i-- > 0;) {
        double device = INFINITY, host = INFINITY;
        for (size_t c = 0; c < s->n_choices; c++) {
            const plan_choice *choice = choice_at(s, i, c);
            if (!isfinite(choice->seconds)) continue;
            device = fmin(device, choice->device_bytes);
            host = fmin(host, choice->host_bytes);
        }
        s->least[0][i] = s->least[0][i + 1] + device;
        s->least[1][i] = s->least[1][i + 1] + host;
    }
    return true;
}

static bool set_rest(search *s) {
    if (!(s->rest = calloc(s->n + 1, sizeof *s->rest))) return false;
    for (size_t i = s->n; i-- > 0;) {
        double best = INFINITY;
        for (size_t c = 0; c < s->n_choices; c++) best = fmin(best, priced(s, choice_at(s, i, c)));
        s->rest[i] = s->rest[i + 1] + best;
    }
    return true;
}

static int by_memory(const void *a, const void *b) {
    const state *x = a, *y = b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    if (x->host != y->host) return x->host < y->host ? -1 : 1;
    return (x->seconds > y->seconds) - (x->seconds < y->seconds);
}

static int by_seconds(const void *a, const void *b) {
    const state *x = a, *y = b;
    return (x->seconds > y->seconds) - (x->seconds < y->seconds);
}

/* Keeps those that none dominates, of `n` sorted by memory; how many. `stairs` has room for n: those kept
 * of the host and seconds, as a falling line. */
static size_t drop_dominated(state *states, size_t n, state *stairs) {
    size_t kept = 0, high = 0;
    for (size_t i = 0; i < n; i++) {
        size_t low = 0, top = high; /* the first stair with more host memory than this one's */
        while (low < top) {
            size_t middle = (low + top) / 2;
            if (stairs[middle].host <= states[i].host)
                low = middle + 1;
            else
                top = middle;
        }
        if (low > 0 && stairs[low - 1].seconds <= states[i].seconds) continue;
        size_t end = low;
        while (end < high && stairs[end].seconds >= states[i].seconds) end++;
        size_t from = low > 0 && stairs[low - 1].host == states[i].host ? low - 1 : low;
        memmove(&stairs[from + 1], &stairs[end], (high - end) * sizeof *stairs);
        stairs[from] = states[i];
        high = from + 1 + high - end;
        states[kept++] = states[i];
    }
    return kept;
}

/* All states of region i from those before it. NULL: no memory. */
static state *extend(search *s, size_t i, const state *before, size_t n_before, size_t *n_out) {
    state *made = malloc((n_before * s->n_choices + 1) * sizeof *made), *stairs;
    size_t n = 0;
    if (!made) return NULL;
    for (size_t k = 0; k < n_before; k++)
        for (size_t c = 0; c < s->n_choices; c++) {
            const plan_choice *choice = choice_at(s, i, c);
            state t = {before[k].seconds + choice->seconds, before[k].device + choice->device_bytes,
                       before[k].host + choice->host_bytes, (uint32_t)k, (uint8_t)c};
            if (!isfinite(t.seconds) || t.device + s->least[0][i + 1] > s->budget[0] ||
                t.host + s->least[1][i + 1] > s->budget[1] || is_beaten(s, bound_of(s, &t, i + 1)))
                continue;
            made[n++] = t;
        }
    qsort(made, n, sizeof *made, by_memory);
    stairs = malloc((n + 1) * sizeof *stairs);
    if (!stairs) {
        free(made);
        return NULL;
    }
    n = drop_dominated(made, n, stairs);
    free(stairs);
    if (n > s->max_states) {
        for (size_t k = 0; k < n; k++) made[k].seconds = bound_of(s, &made[k], i + 1);
        qsort(made, n, sizeof *made, by_seconds);
        s->dropped = fmin(s->dropped, made[s->max_states].seconds);
        n = s->max_states;
        for (size_t k = 0; k < n; k++)
            made[k].seconds += s->price[0] * (s->budget[0] - made[k].device) +
                               s->price[1] * (s->budget[1] - made[k].host) - s->rest[i + 1];
    }
    *n_out = n;
    return made;
}

/* The best of the last region's states, if it is better than what is known. */
static void take_best(search *s, state *const *levels, const size_t *counts) {
    size_t best = counts[s->n];
    for (size_t k = 0; k < counts[s->n]; k++)
        if (levels[s->n][k].seconds < s->best) {
            s->best = levels[s->n][k].seconds;
            s->has_found = true;
            best = k;
        }
    if (best == counts[s->n]) return;
    for (size_t i = s->n; i > 0; i--) {
        s->best_chosen[i - 1] = levels[i][best].chosen;
        best = levels[i][best].before;
    }
}

static bool run(search *s) {
    state **levels = calloc(s->n + 1, sizeof *levels);
    size_t *counts = calloc(s->n + 1, sizeof *counts);
    bool is_good = levels && counts && (levels[0] = calloc(1, sizeof **levels));
    if (is_good) counts[0] = 1;
    for (size_t i = 0; is_good && i < s->n; i++)
        is_good = (levels[i + 1] = extend(s, i, levels[i], counts[i], &counts[i + 1])) != NULL;
    if (is_good) take_best(s, levels, counts);
    for (size_t i = 0; is_good && i <= s->n; i++) s->n_states += counts[i];
    for (size_t i = 0; levels && i <= s->n; i++) free(levels[i]);
    free(levels);
    free(counts);
    return is_good;
}

bool plan_search(const plan_choice *choices, size_t n, size_t n_choices, double device_budget,
                 double host_budget, double known, size_t max_states, uint8_t *chosen_out,
                 plan_found *found_out) {
    search s = {.choices = choices,
                .n = n,
                .n_choices = n_choices,
                .max_states = max_states,
                .budget = {device_budget, host_budget},
                .best = known,
                .dropped = INFINITY};
    uint8_t *room = malloc(n + 1);
    s.best_chosen = malloc(n + 1);
    bool is_good = room && s.best_chosen;
    if (is_good) is_good = set_least(&s);
    if (is_good) {
        set_prices(&s, room);
        is_good = set_rest(&s) && run(&s);
    }
    if (is_good) {
        *found_out = (plan_found){
            .fits = s.has_found, .is_exact = s.dropped >= s.best, .n_states = s.n_states};
        found_out->bound = fmin(s.dropped, s.best);
        memcpy(found_out->price, s.price, sizeof s.price);
        for (size_t i = 0; found_out->fits && i < n; i++) {
            const plan_choice *c = choice_at(&s, i, s.best_chosen[i]);
            chosen_out[i] = s.best_chosen[i];
            found_out->seconds += c->seconds;
            found_out->device_bytes += c->device_bytes;
            found_out->host_bytes += c->host_bytes;
        }
    }
    free(room);
    free(s.best_chosen);
    free(s.rest);
    free(s.least[0]);
    free(s.least[1]);
    return is_good;
}

double plan_search_bound(const plan_choice *choices, size_t n, size_t n_choices, double device_budget,
                         double host_budget, const double price[2]) {
    search s = {.choices = choices, .n_choices = n_choices, .price = {price[0], price[1]}};
    double bound = -price[0] * device_budget - price[1] * host_budget;
    for (size_t i = 0; i < n; i++) {
        double best = INFINITY;
        for (size_t c = 0; c < n_choices; c++) best = fmin(best, priced(&s, choice_at(&s, i, c)));
        bound += best;
    }
    return bound;
}
