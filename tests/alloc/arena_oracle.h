/* arena_oracle.h - for the random test and the fuzzer of arenas. */
#ifndef FCDP_TESTS_ARENA_ORACLE_H
#define FCDP_TESTS_ARENA_ORACLE_H

#include <stddef.h>
#include <stdint.h>

/* Takes, gives, growths that succeed or not, unmapped pages, as the bytes choose; ends by giving all back.
 * Aborts with the expression that does not hold. Any bytes will do. */
void arena_oracle_run(const uint8_t *choices, size_t n_choices);

#endif
