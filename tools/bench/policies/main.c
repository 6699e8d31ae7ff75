/* fcdp-policies: what policy.c plans, for tools/bench/policies/table.py.
 *
 * stdin: schedules, each a line "n n_regions page_bytes n_budgets budget ..." (budgets in pages), and then a
 * line "region n_pages load_bytes store_bytes busy_pages" for each of the n uses. stdout: a line of n digits
 * for each budget, 1 where the interval that begins at the use is kept. */
#include "tiering/policy.h"

#include <stdio.h>
#include <stdlib.h>

static bool uses_read(fcdp_planned_use *uses, size_t n) {
    for (size_t i = 0; i < n; i++) {
        fcdp_planned_use *use = &uses[i];
        if (scanf("%u %u %zu %zu %zu", &use->region, &use->n_pages, &use->load_bytes, &use->store_bytes,
                  &use->busy_pages) != 5)
            return false;
    }
    return true;
}

static bool plans_print(const fcdp_planned_use *uses, size_t n, uint32_t n_regions, size_t page_bytes,
                        const size_t *budgets, size_t n_budgets) {
    bool *keep = calloc(n, sizeof *keep), ok = keep != NULL;
    for (size_t b = 0; b < n_budgets && ok; b++) {
        ok = !fcdp__policy_plan(uses, n, n_regions, budgets[b], page_bytes, keep);
        for (size_t i = 0; i < n && ok; i++) putchar(keep[i] ? '1' : '0');
        putchar('\n');
    }
    free(keep);
    return ok;
}

int main(void) {
    size_t n, page_bytes, n_budgets;
    uint32_t n_regions;
    while (scanf("%zu %u %zu %zu", &n, &n_regions, &page_bytes, &n_budgets) == 4) {
        size_t *budgets = calloc(n_budgets, sizeof *budgets);
        fcdp_planned_use *uses = calloc(n, sizeof *uses);
        bool ok = budgets && uses;
        for (size_t b = 0; b < n_budgets && ok; b++) ok = scanf("%zu", &budgets[b]) == 1;
        ok = ok && uses_read(uses, n) && plans_print(uses, n, n_regions, page_bytes, budgets, n_budgets);
        free(budgets);
        free(uses);
        if (!ok) {
            fprintf(stderr, "fcdp-policies: no such schedule: see the head of tools/bench/policies/main.c\n");
            return 2;
        }
    }
    return 0;
}
