/* region_specs.h - the extents of the regions that tests use one at a time. */
#ifndef FCDP_TESTS_TIERING_REGION_SPECS_H
#define FCDP_TESTS_TIERING_REGION_SPECS_H

#include "tests/tiering/support.h"

static const fcdp_extent_spec SPECS[] = {{3000, FCDP_SPAN_TRAINABLE},
                                         {70000, FCDP_SPAN_FROZEN},
                                         {1, FCDP_SPAN_TRAINABLE},
                                         {90001, FCDP_SPAN_TRAINABLE}};

enum {
    N_SPECS = sizeof SPECS / sizeof SPECS[0],
    BOTH = FCDP_SPAN_MASK_ALL,
    TRAINABLE = 1u << FCDP_SPAN_TRAINABLE
};
enum { MS = 1000000 };

#endif
