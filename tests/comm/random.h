/* random.h - the random numbers of a seeded test: the same everywhere, and the seed printed. */
#ifndef FCDP_TEST_RANDOM_H
#define FCDP_TEST_RANDOM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct test_random {
    uint64_t state;
} test_random;

/* splitmix64: every seed, 0 too, gives a good sequence. */
static inline uint64_t random_next(test_random *random) {
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* In [0, n). */
static inline uint32_t random_below(test_random *random, uint32_t n) {
    return (uint32_t)(random_next(random) % n);
}

/* The environment's TEST_SEED, else `fallback`. */
static inline uint64_t random_seed(const char *test, uint64_t fallback) {
    const char *given = getenv("TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : fallback;
    printf("%s: TEST_SEED=%llu\n", test, (unsigned long long)seed);
    return seed;
}

#endif
