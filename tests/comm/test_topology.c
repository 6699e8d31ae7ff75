/* Which rank layouts are served, and what the refused ones are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "comm/topology.h"

typedef struct row {
    const char *name;
    uint32_t n_ranks, node_of[8];
    fcdp_status status;
    uint32_t n_nodes, node_size; /* when served */
    const char *said;            /* in the text when refused */
} row;

static const row rows[] = {
    {"2 x 2", 4, {0, 0, 1, 1}, FCDP_OK, 2, 2, NULL},
    {"2 x 1", 2, {7, 3}, FCDP_OK, 2, 1, NULL},
    {"4 x 2, any names", 8, {9, 9, 2, 2, 5, 5, 0, 0}, FCDP_OK, 4, 2, NULL},
    {"3 x 2", 6, {1, 1, 2, 2, 3, 3}, FCDP_OK, 3, 2, NULL},
    {"one node", 4, {3, 3, 3, 3}, FCDP_ERR_UNSUPPORTED, 0, 0, "all 4 ranks"},
    {"one rank", 1, {0}, FCDP_ERR_UNSUPPORTED, 0, 0, "one node"},
    {"3 and 1", 4, {0, 0, 0, 1}, FCDP_ERR_UNSUPPORTED, 0, 0, "3 on node 0, 1 on node 1"},
    {"2, 2 and 1", 5, {0, 0, 1, 1, 2}, FCDP_ERR_UNSUPPORTED, 0, 0, "2 on node 0, 1 on node 2"},
    {"round robin", 4, {0, 1, 0, 1}, FCDP_ERR_UNSUPPORTED, 0, 0, "side by side"},
    {"torn apart", 4, {0, 1, 1, 0}, FCDP_ERR_UNSUPPORTED, 0, 0, "side by side"},
    {"no rank", 0, {0}, FCDP_ERR_INVALID, 0, 0, "0 ranks"},
};

static void test_table(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const row *r = &rows[i];
        print_message("%s\n", r->name);
        for (uint32_t rank = 0; rank < r->n_ranks || rank == 0; rank++) {
            fcdp_topology topology;
            assert_int_equal(fcdp__topology_make(r->node_of, r->n_ranks, rank, &topology), r->status);
            if (r->status) {
                assert_non_null(strstr(fcdp_error_text(), r->said));
                continue;
            }
            assert_int_equal(topology.n_nodes, r->n_nodes);
            assert_int_equal(topology.node_size, r->node_size);
            assert_int_equal(topology.n_ranks, r->n_nodes * r->node_size);
            assert_int_equal(topology.rank, rank);
            assert_int_equal(topology.node * r->node_size + topology.local, rank);
            assert_true(topology.local < r->node_size);
        }
    }
}

static void test_rank_out_of_range_is_refused(void **state) {
    (void)state;
    const uint32_t node_of[] = {0, 1};
    fcdp_topology topology;
    assert_int_equal(fcdp__topology_make(node_of, 2, 2, &topology), FCDP_ERR_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_rank_out_of_range_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
