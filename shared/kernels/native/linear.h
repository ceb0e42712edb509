/* Matrix product with row-major weights: out_RN = x_RK . w_NK^T (+ bias) (+ out).
 *
 * Each output element is one chain of 8-lane multiply-adds along k and one fixed reduction. It does
 * not depend on the number of rows, on its place in a tile or on the thread: results are the same
 * bits alone, batched or chunked. bfloat16 weights are widened exactly, so they equal float32 ones;
 * int8 ones have scales, and are multiplied by inputs that are quantised row by row (int8.h). */
#ifndef TRIPTYCH_LINEAR_H
#define TRIPTYCH_LINEAR_H

#include "int8.h"
#include "pool.h"

typedef enum { FLOAT32, BFLOAT16, INT8 } Kind;

typedef struct {
    const void *data;    /* [n, k] of this kind */
    const float *bias;   /* [n] or NULL */
    const float *scales; /* [n], of int8 */
    int32_t n, k;        /* k is a multiple of LANES */
    int32_t kind;
    int32_t reserved;
} Matrix;

#define ROWS 4   /* rows of a tile */
#define COLS 3   /* columns of a tile: 12 accumulators, 3 weights and 1 input fill 16 registers */
#define CHUNK 48 /* columns handed to a thread at a time */
#define LINE_BF16 32 /* bfloat16 values of a cache line */
#define WIDEN_ROWS 16 /* with more rows, bfloat16 weights are widened once and not in each tile */
#define SCRATCH_FLOATS (96 * 1024)

/* dots[i * cols + j] = x row i . w row j, for constant rows, cols with rows * cols <= 12.
 *
 * bfloat16 weights come from main memory, so the rows of the next tile are fetched ahead: as fast as
 * memory can, while this tile computes. (Asking for what lies past the end does no harm.) */
INLINE void dot_tile(const int rows, const int cols, const float *x, int64_t ldx, const void *w, int64_t ldw,
                     int k, const int bf16, float *dots) {
    v8 acc[12] = {0};
    const uint16_t *ahead = (const uint16_t *)w + cols * ldw;
#pragma GCC unroll 4
    for (int p = 0; p < k; p += LANES) {
        v8 b[8];
        for (int j = 0; bf16 && p % LINE_BF16 == 0 && j < cols; j++) __builtin_prefetch(ahead + j * ldw + p);
        for (int j = 0; j < cols; j++)
            b[j] = bf16 ? load8_bf16((const uint16_t *)w + j * ldw + p) : load8((const float *)w + j * ldw + p);
        for (int i = 0; i < rows; i++) {
            v8 a = load8(x + i * ldx + p);
            for (int j = 0; j < cols; j++) acc[i * cols + j] = fma8(a, b[j], acc[i * cols + j]);
        }
    }
    for (int i = 0; i < rows * cols; i += 4) {
        v4 s = sum4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
        memcpy(dots + i, &s, sizeof s);
    }
}

/* The same for any row count up to ROWS; cols is a constant. */
INLINE void dot_rows(int rows, const int cols, const float *x, int64_t ldx, const void *w, int64_t ldw, int k,
                     const int bf16, float *dots) {
    if (cols > COLS) rows = 1; /* lets the compiler drop the other cases */
    switch (rows) {
    case 1: dot_tile(1, cols, x, ldx, w, ldw, k, bf16, dots); break;
    case 2: dot_tile(2, cols, x, ldx, w, ldw, k, bf16, dots); break;
    case 3: dot_tile(3, cols, x, ldx, w, ldw, k, bf16, dots); break;
    default: dot_tile(4, cols, x, ldx, w, ldw, k, bf16, dots); break;
    }
}

typedef struct {
    float *out; /* [rows, n] */
    const float *x;
    const Matrix *m;
    int rows, add;
} Linear;

static inline void put(const Linear *l, int row, int col, float value) {
    float *out = l->out + (int64_t)row * l->m->n + col;
    if (l->m->bias) value += l->m->bias[col];
    *out = l->add ? *out + value : value;
}

/* Columns [first, last) for all rows; w points at column ``first`` with row stride k. */
INLINE void linear_columns(const Linear *l, int first, int last, const void *w, const int cols, const int bf16) {
    const int k = l->m->k;
    const int64_t item = bf16 ? 2 : 4;
    float dots[12];
    for (int row = 0; row < l->rows; row += ROWS) {
        int rows = l->rows - row < ROWS ? l->rows - row : ROWS;
        const float *x = l->x + (int64_t)row * k;
        const char *p = w;
        int col = first;
        for (; col + cols <= last; col += cols, p += cols * k * item) {
            dot_rows(rows, cols, x, k, p, k, k, bf16, dots);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < cols; j++) put(l, row + i, col + j, dots[i * cols + j]);
        }
        for (; col < last; col++, p += k * item) {
            dot_rows(rows, 1, x, k, p, k, k, bf16, dots);
            for (int i = 0; i < rows; i++) put(l, row + i, col, dots[i]);
        }
    }
}

/* Columns [first, last) for all rows of quantised inputs; cols is a constant. */
INLINE void int8_columns(const Linear *l, int first, int last, const int8_t *x, const float *row_scales,
                         const int cols) {
    const Matrix *m = l->m;
    const int k = m->k;
    int32_t sums[8];
    for (int row = 0; row < l->rows; row += ROWS) {
        const int rows = l->rows - row < ROWS ? l->rows - row : ROWS;
        const int8_t *from = x + (int64_t)row * k, *w = (const int8_t *)m->data + (int64_t)first * k;
        for (int col = first, wide; col < last; col += wide, w += wide * k) {
            wide = last - col < cols ? 1 : cols;
            if (wide == cols)
                int8_rows(rows, cols, from, k, w, k, k, sums);
            else
                int8_rows(rows, 1, from, k, w, k, k, sums);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < wide; j++)
                    put(l, row + i, col + j, (float)sums[i * wide + j] * (row_scales[row + i] * m->scales[col + j]));
        }
    }
}

/* Every thread quantises all rows for itself: that is little beside its share of the columns. */
static void int8_part(Worker *me, const Linear *l) {
    const Matrix *m = l->m;
    const int64_t bytes = (int64_t)l->rows * m->k;
    float *row_scales = scratch_for(me, l->rows + (bytes + 3) / 4);
    int8_t *x = (int8_t *)(row_scales + l->rows);
    for (int row = 0; row < l->rows; row++)
        row_scales[row] = quantise_row(x + (int64_t)row * m->k, l->x + (int64_t)row * m->k, m->k);
    for (int first; (first = next_chunk() * CHUNK) < m->n;) {
        const int last = first + CHUNK < m->n ? first + CHUNK : m->n;
        if (l->rows == 1)
            int8_columns(l, first, last, x, row_scales, 8);
        else
            int8_columns(l, first, last, x, row_scales, INT8_COLS);
    }
}

static void linear_part(Worker *me, const Linear *l) {
    const Matrix *m = l->m;
    if (m->kind == INT8) {
        int8_part(me, l);
        return;
    }
    const int bf16 = m->kind == BFLOAT16;
    int chunk = SCRATCH_FLOATS / m->k / 12 * 12;
    chunk = chunk < 12 ? 12 : chunk > CHUNK ? CHUNK : chunk;
    float *wide = l->rows > WIDEN_ROWS && bf16 ? scratch_for(me, (size_t)chunk * m->k) : NULL;
    for (int first; (first = next_chunk() * chunk) < m->n;) {
        int last = first + chunk < m->n ? first + chunk : m->n;
        const char *w = (const char *)m->data + (int64_t)first * m->k * (bf16 ? 2 : 4);
        if (wide) {
            int64_t count = (int64_t)(last - first) * m->k;
            for (int64_t i = 0; i < count; i += LANES) store8(wide + i, load8_bf16((const uint16_t *)w + i));
            linear_columns(l, first, last, wide, COLS, 0);
        } else if (l->rows > ROWS && !bf16) {
            linear_columns(l, first, last, w, COLS, 0);
        } else if (l->rows == 1 && bf16) {
            linear_columns(l, first, last, w, 8, 1);
        } else if (l->rows == 1) {
            linear_columns(l, first, last, w, 8, 0);
        } else if (bf16) {
            linear_columns(l, first, last, w, COLS, 1);
        } else {
            linear_columns(l, first, last, w, COLS, 0);
        }
    }
}

#endif
