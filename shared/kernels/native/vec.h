/* Portable 8-lane float vectors (GCC/Clang vector extensions), and the few functions built on them.
 *
 * Every reduction here has one fixed order, so a value never depends on how work was split. */
#ifndef TRIPTYCH_VEC_H
#define TRIPTYCH_VEC_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef float v8_any __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t h8_any __attribute__((vector_size(16), aligned(2), may_alias));

INLINE v8 load8(const float *p) { return *(const v8_any *)p; }
INLINE void store8(float *p, v8 x) { *(v8_any *)p = x; }
INLINE v8 splat8(float x) { return (v8){x, x, x, x, x, x, x, x}; }

/* bfloat16 is the upper half of a float: widening is exact. */
INLINE v8 load8_bf16(const uint16_t *p) {
#if defined(__AVX2__) /* GCC 12 needs six instructions for the conversion below */
    return (v8)((u8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
#else
    return (v8)(__builtin_convertvector(*(const h8_any *)p, u8) << 16);
#endif
}

/* a * b + c. Spelled out, and built with -ffp-contract=off, because a compiler left to itself fuses
 * in one place and not in another, and then bits depend on the tile that a value was computed in. */
INLINE v8 fma8(v8 a, v8 b, v8 c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE v4 fold(v8 x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}

INLINE v4 pairs(v4 a, v4 b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

/* Four sums over lanes at once; lane i of the result is the sum of the i-th argument. */
INLINE v4 sum4(v8 a, v8 b, v8 c, v8 d) {
    return pairs(pairs(fold(a), fold(b)), pairs(fold(c), fold(d)));
}

/* The same order of additions as sum4. */
INLINE float sum1(v8 a) {
    v4 s = fold(a);
    return (s[0] + s[1]) + (s[2] + s[3]);
}

INLINE v8 max8(v8 a, v8 b) {
    i8 m = a > b;
    return (v8)(((i8)a & m) | ((i8)b & ~m));
}

INLINE float max1(v8 a) {
    float m = a[0];
    for (int i = 1; i < LANES; i++) m = a[i] > m ? a[i] : m;
    return m;
}

/* exp(x) within 2 ulp for -87 <= x <= 88; 0 below, NaN stays NaN. Reduction x = n ln 2 + r with
 * |r| <= ln 2 / 2, then the Taylor polynomial of degree 7 (remainder below 1e-8). */
INLINE v8 exp8(v8 x) {
    i8 tiny = x < splat8(-87.0f);
    i8 huge = x > splat8(88.0f);
    x = (v8)(((i8)splat8(-87.0f) & tiny) | ((i8)x & ~tiny));
    x = (v8)(((i8)splat8(88.0f) & huge) | ((i8)x & ~huge));
    const v8 magic = splat8(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    v8 shifted = fma8(x, splat8(1.44269504f), magic);
    v8 n = shifted - magic;
    v8 r = fma8(n, splat8(-0.693145752f), x);
    r = fma8(n, splat8(-1.42860677e-06f), r);
    v8 p = splat8(1.0f / 5040);
    p = fma8(p, r, splat8(1.0f / 720));
    p = fma8(p, r, splat8(1.0f / 120));
    p = fma8(p, r, splat8(1.0f / 24));
    p = fma8(p, r, splat8(1.0f / 6));
    p = fma8(p, r, splat8(0.5f));
    p = fma8(p, r, splat8(1.0f));
    p = fma8(p, r, splat8(1.0f));
    i8 exponent = ((i8)shifted - (i8)magic + 127) << 23;
    v8 y = p * (v8)exponent;
    return (v8)((i8)y & ~tiny);
}

#endif
