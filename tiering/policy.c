/* policy.c - what moves where. It touches nothing: the caller takes the
 * snapshot and carries out the answer. */
#include "tiering/policy.h"

bool fcdp__policy_keeps(double tau, size_t used_bytes, size_t budget_bytes) {
    return (double)used_bytes < tau * (double)budget_bytes;
}

static bool better_victim(const fcdp_candidate *a, const fcdp_candidate *b) {
    if (a->clean != b->clean) return a->clean;
    return a->last_use < b->last_use;
}

size_t fcdp__policy_victim(const fcdp_candidate *candidates, size_t n) {
    size_t best = n;
    for (size_t i = 0; i < n; i++) {
        if (candidates[i].busy || !candidates[i].bytes) continue;
        if (best == n || better_victim(&candidates[i], &candidates[best])) best = i;
    }
    return best;
}
