/* Matrix product with int8 weights: one scale a column, and one a row of inputs, quantised here.
 *
 * Sums of products are integers, so they are exact in any order: a row's result depends on that row and
 * the weights alone. Every value is within +-127, which keeps pairs of products inside of 16 bits. */
#ifndef TRIPTYCH_INT8_H
#define TRIPTYCH_INT8_H

#include <math.h>

#include "vec.h"

#define INT8_LANES 32
#define INT8_LINE 64
#define INT8_MAX_VALUE 127.0f
#define INT8_COLS 2 /* columns of a tile of several rows; of one row it has 8 */

/* out[p] = x[p] * (127 / max |x|), rounded once, half to even; returns the scale that undoes it. A row that is not
 * finite gets a scale that is not finite either. k is a multiple of LANES. */
static float quantise_row(int8_t *out, const float *x, int k) {
    v8 most = splat8(0.0f), sum = splat8(0.0f);
    const u8 magnitude = (u8)splat8(-0.0f) ^ 0xFFFFFFFFu;
    for (int p = 0; p < k; p += LANES) {
        v8 a = (v8)((u8)load8(x + p) & magnitude);
        most = max8(most, a), sum = sum + a;
    }
    const float peak = max1(most), total = sum1(sum);
    if (!isfinite(total)) return NAN;
    if (peak == 0.0f) {
        memset(out, 0, k);
        return 0.0f;
    }
    const v8 factor = splat8(INT8_MAX_VALUE / peak);
    const v8 magic = splat8(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    for (int p = 0; p < k; p += LANES) {
        const i8 q = (i8)fma8(load8(x + p), factor, magic) - (i8)magic;
        for (int i = 0; i < LANES; i++) out[p + i] = (int8_t)(q[i] > 127 ? 127 : q[i] < -127 ? -127 : q[i]);
    }
    return peak / INT8_MAX_VALUE;
}

/* sums[i * cols + j] = x row i . w row j, for constant rows, cols with rows * cols <= 8. For one row the
 * weights of the next columns are fetched ahead, as in linear.h. */
INLINE void int8_tile(const int rows, const int cols, const int8_t *x, int64_t ldx, const int8_t *w, int64_t ldw,
                      int k, int32_t *sums) {
    int p = 0;
#if defined(__AVX2__)
    __m256i acc[8];
    for (int t = 0; t < rows * cols; t++) acc[t] = _mm256_setzero_si256();
    const __m256i ones = _mm256_set1_epi16(1);
    for (; p + INT8_LANES <= k; p += INT8_LANES) {
        __m256i b[8];
        for (int j = 0; cols > INT8_COLS && p % INT8_LINE == 0 && j < cols; j++) __builtin_prefetch(w + (cols + j) * ldw + p);
        for (int j = 0; j < cols; j++) b[j] = _mm256_loadu_si256((const void *)(w + j * ldw + p));
        for (int i = 0; i < rows; i++) {
            const __m256i a = _mm256_loadu_si256((const void *)(x + i * ldx + p)), size = _mm256_abs_epi8(a);
            for (int j = 0; j < cols; j++) {
                const __m256i pairs16 = _mm256_maddubs_epi16(size, _mm256_sign_epi8(b[j], a));
                acc[i * cols + j] = _mm256_add_epi32(acc[i * cols + j], _mm256_madd_epi16(pairs16, ones));
            }
        }
    }
    for (int t = 0; t < rows * cols; t++) {
        int32_t lanes[8];
        memcpy(lanes, &acc[t], sizeof lanes);
        sums[t] = lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
    }
#else
    memset(sums, 0, sizeof *sums * rows * cols);
#endif
    for (; p < k; p++)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) sums[i * cols + j] += (int32_t)x[i * ldx + p] * w[j * ldw + p];
}

/* The same for 1 to 4 rows; cols is a constant. */
INLINE void int8_rows(int rows, const int cols, const int8_t *x, int64_t ldx, const int8_t *w, int64_t ldw, int k,
                      int32_t *sums) {
    if (cols > INT8_COLS) rows = 1; /* lets the compiler drop the other cases */
    switch (rows) {
    case 1: int8_tile(1, cols, x, ldx, w, ldw, k, sums); break;
    case 2: int8_tile(2, cols, x, ldx, w, ldw, k, sums); break;
    case 3: int8_tile(3, cols, x, ldx, w, ldw, k, sums); break;
    default: int8_tile(4, cols, x, ldx, w, ldw, k, sums); break;
    }
}

#endif
