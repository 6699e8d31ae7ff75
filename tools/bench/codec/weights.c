/* weights.c - see the header. */
#include "tools/bench/codec/weights.h"

#include <math.h>
#include <string.h>

static const double DEVIATION = 0.02, DECAY = 0.1, BETA1 = 0.9;

/* splitmix64, then Box and Muller's two normal numbers. */
static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

void weights_normal_pair(uint64_t *state, double *a_out, double *b_out) {
    double radius = sqrt(-2 * log(((double)(random_next(state) >> 11) + 1) / 0x1p53));
    double angle = 2 * 3.14159265358979323846 * ((double)(random_next(state) >> 11) / 0x1p53);
    *a_out = radius * cos(angle);
    *b_out = radius * sin(angle);
}

float weights_first(double normal) {
    return (float)(normal * DEVIATION);
}

float weights_next(float w, double normal, double lr) {
    return (float)(w * (1 - DECAY * lr) - lr * normal * sqrt((1 - BETA1) / (1 + BETA1)));
}

uint16_t weights_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
