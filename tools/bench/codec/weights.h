/* weights.h - modelled weights, as AdamW moves them with float32 masters:
 *
 *     w   normal, of deviation 0.02, as GPTs are initialized and about as they stay
 *     u   normal, of deviation sqrt((1 - 0.9) / (1 + 0.9)) = 0.23: AdamW's first moment over the root of its
 *         second one, where gradients are mostly noise (beta1 0.9, beta2 near 1)
 *     w'  w (1 - 0.1 lr) - lr u
 *
 * bf16 weights are w and w' rounded to nearest, even. A trained model may differ: its layers have other
 * deviations, and a gradient that is more than noise has a larger u.
 */
#ifndef FCDP_BENCH_WEIGHTS_H
#define FCDP_BENCH_WEIGHTS_H

#include <stdint.h>

/* Two normal numbers of deviation 1; the same sequence from the same state. */
void weights_normal_pair(uint64_t *state, double *a_out, double *b_out);
/* w, and w' of the step behind it, from a normal number each. */
float weights_first(double normal);
float weights_next(float w, double normal, double lr);
uint16_t weights_bf16(float value);

#endif
