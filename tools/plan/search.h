/* search.h - which choice each region has, so that the step is shortest within the memory of a GPU and of a
 * node.
 *
 * Exact for costs that add up: every choice has seconds, bytes of the device and bytes of the host, and
 * the sum of the seconds is least while the sums of the bytes stay within their budgets. States that
 * another one dominates (no more of either memory, no more seconds) are dropped, and so are those that a
 * bound shows to be no better than a choice that is known.
 */
#ifndef PLAN_SEARCH_H
#define PLAN_SEARCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct plan_choice {
    double seconds, device_bytes, host_bytes; /* infinite seconds: not to be had */
} plan_choice;

typedef struct plan_found {
    double seconds, device_bytes, host_bytes;
    double bound;    /* no choice takes less; == seconds where is_exact */
    double price[2]; /* seconds of a byte of the device, and of the host, that gave the best bound */
    size_t n_states; /* that were kept: the work that it was */
    bool is_exact;
    bool fits; /* false: none fits and takes less than what is known; seconds and bytes are not written */
} plan_found;

/* `choices`: n x n_choices, of region after region. `chosen_out`: n of them. Budgets are finite. `known`:
 * seconds of a solution that the caller has, so that only a better one is looked for; INFINITY: none.
 * `max_states`: how many to keep at most; with more, the best are kept, and `bound` says what the others
 * could have given. False: no memory. */
bool plan_search(const plan_choice *choices, size_t n, size_t n_choices, double device_budget,
                 double host_budget, double known, size_t max_states, uint8_t *chosen_out,
                 plan_found *found_out);

/* No choices take less seconds, whatever the prices (0 or more). In O(n x n_choices). */
double plan_search_bound(const plan_choice *choices, size_t n, size_t n_choices, double device_budget,
                         double host_budget, const double price[2]);

#endif
