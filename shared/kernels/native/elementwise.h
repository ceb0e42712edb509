/* Root-mean-square norm and SiLU-and-mul: one row is one piece of work. */
#ifndef TRIPTYCH_ELEMENTWISE_H
#define TRIPTYCH_ELEMENTWISE_H

#include <math.h>

#include "pool.h"
#include "vec.h"

/* out = x / sqrt(mean(x^2) + eps) * weight; out may be x. dim is a multiple of LANES. */
static void rms_norm_row(float *out, const float *x, const float *weight, int dim, float eps) {
    v8 squares = splat8(0);
    for (int i = 0; i < dim; i += LANES) {
        v8 v = load8(x + i);
        squares = fma8(v, v, squares);
    }
    v8 scale = splat8(1.0f / sqrtf(sum1(squares) / dim + eps));
    for (int i = 0; i < dim; i += LANES) store8(out + i, load8(x + i) * scale * load8(weight + i));
}

typedef struct {
    float *out; /* [rows, dim] */
    const float *x, *weight;
    int rows, dim;
    float eps;
} Norm;

static void rms_norm_part(Worker *me, const Norm *n) {
    (void)me;
    for (int r; (r = next_chunk()) < n->rows;)
        rms_norm_row(n->out + (int64_t)r * n->dim, n->x + (int64_t)r * n->dim, n->weight, n->dim, n->eps);
}

typedef struct {
    float *out;     /* [rows, dim] */
    const float *x; /* [rows, 2 * dim]: gate, then up */
    int rows, dim;
} SiluMul;

static void silu_mul_part(Worker *me, const SiluMul *s) {
    (void)me;
    for (int r; (r = next_chunk()) < s->rows;) {
        const float *gate = s->x + (int64_t)r * 2 * s->dim, *up = gate + s->dim;
        float *out = s->out + (int64_t)r * s->dim;
        for (int i = 0; i < s->dim; i += LANES) {
            v8 g = load8(gate + i);
            store8(out + i, g / (splat8(1.0f) + exp8(-g)) * load8(up + i));
        }
    }
}

#endif
