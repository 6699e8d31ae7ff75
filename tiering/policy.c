/* policy.c - decides what moves where. It touches nothing: the caller takes the snapshot and carries out the
 * decision. */
#include "tiering/policy.h"

bool fcdp__policy_keeps(double tau, size_t used_bytes, size_t budget_bytes) {
    return (double)used_bytes < tau * (double)budget_bytes;
}

size_t fcdp__policy_victim(const fcdp_candidate *candidates, size_t n) {
    size_t best = n;
    for (size_t i = 0; i < n; i++) {
        const fcdp_candidate *it = &candidates[i];
        if (it->busy || !it->bytes) continue;
        if (best == n ||
            (it->clean != candidates[best].clean ? it->clean : it->last_use < candidates[best].last_use))
            best = i;
    }
    return best;
}
