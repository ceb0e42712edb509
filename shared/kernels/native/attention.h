/* Paged attention for a whole mixed batch, and the rotary embedding that feeds it.
 *
 * A token's output depends on its own query and the KV of its own row, in one fixed order: not on
 * the batch, the chunk or the tile that it came in. */
#ifndef TRIPTYCH_ATTENTION_H
#define TRIPTYCH_ATTENTION_H

#include "batch.h"
#include "elementwise.h"
#include "linear.h"

#define GROUP_HEADS 3 /* query heads that share the loads of one K or V vector */

typedef struct {
    float *out; /* [num_tokens, num_heads * dim] */
    float *qkv; /* [num_tokens, (num_heads + 2 * num_kv_heads) * dim] */
    const float *q_norm, *k_norm; /* [dim] or NULL */
    const Heads *heads;
    const Batch *batch;
    const KVGroup *kv;
    int32_t layer; /* index inside the group */
} Attention;

static inline float *kv_at(const Attention *a, int row, int index, int kv_head) {
    const KVGroup *g = a->kv;
    int64_t block = g->tables[row * g->table_stride + index];
    return g->data + block * g->block_stride + kv_head * g->head_stride +
           (int64_t)a->layer * 2 * g->block_size * a->heads->dim;
}

/* x_D = rotate(norm(x_D)) * scale; the two halves of D, multiples of LANES, are the pairs. */
static void rotate(float *x, const float *norm, float eps, const float *cos, const float *sin, int dim,
                   float scale) {
    const int half = dim / 2;
    if (norm) rms_norm_row(x, x, norm, dim, eps);
    for (int i = 0; i < half; i += LANES) {
        v8 a = load8(x + i), b = load8(x + half + i), c = load8(cos + i), s = load8(sin + i);
        store8(x + i, (a * c - b * s) * splat8(scale));
        store8(x + half + i, (b * c + a * s) * splat8(scale));
    }
}

/* Rotate queries in place (scaled for the softmax) and keys; write K and V to their slots. */
static void rotary_store_part(Worker *me, const Attention *a) {
    const Heads *h = a->heads;
    const Batch *b = a->batch;
    const int dim = h->dim, half = dim / 2, bs = a->kv->block_size;
    (void)me;
    for (int t; (t = next_chunk()) < b->num_tokens;) {
        float *q = a->qkv + (int64_t)t * (h->num_heads + 2 * h->num_kv_heads) * dim;
        float *k = q + h->num_heads * dim, *v = k + h->num_kv_heads * dim;
        const float *cos = b->cos + (int64_t)t * half, *sin = b->sin + (int64_t)t * half;
        for (int i = 0; i < h->num_heads; i++)
            rotate(q + i * dim, a->q_norm, h->eps, cos, sin, dim, h->scale);
        for (int i = 0; i < h->num_kv_heads; i++) {
            rotate(k + i * dim, a->k_norm, h->eps, cos, sin, dim, 1.0f);
            float *slot = kv_at(a, b->rows[t], b->positions[t] / bs, i) + b->positions[t] % bs * dim;
            memcpy(slot, k + i * dim, dim * sizeof(float));
            memcpy(slot + bs * dim, v + i * dim, dim * sizeof(float));
        }
    }
}

static inline int first_visible(const KVGroup *kv, int position) {
    return kv->window > 0 && position >= kv->window ? position - kv->window + 1 : 0;
}

/* scores[first .. last] become softmax numerators; returns their sum. Writes up to LANES past last. */
static float softmax_row(float *scores, int first, int last) {
    for (int i = 1; i < LANES; i++) scores[last + i] = -__builtin_inff();
    v8 top = splat8(-__builtin_inff()), total = splat8(0);
    for (int i = first; i <= last; i += LANES) top = max8(load8(scores + i), top);
    v8 shift = splat8(max1(top));
    for (int i = first; i <= last; i += LANES) {
        v8 p = exp8(load8(scores + i) - shift);
        total += p;
        store8(scores + i, p);
    }
    return sum1(total);
}

/* out[g][0 .. 8 * vecs) += sum over tokens of p[g][token] * v[token], for constant heads and vecs. */
INLINE void weigh(const int heads, const int vecs, float *out, int dim, const float *p, int64_t span,
                  const float *v, int tokens) {
    v8 acc[GROUP_HEADS * 4];
    for (int g = 0; g < heads; g++)
        for (int c = 0; c < vecs; c++) acc[g * vecs + c] = load8(out + g * dim + c * LANES);
    for (int t = 0; t < tokens; t++) {
        v8 b[4];
        for (int c = 0; c < vecs; c++) b[c] = load8(v + (int64_t)t * dim + c * LANES);
        for (int g = 0; g < heads; g++) {
            v8 w = splat8(p[g * span + t]);
            for (int c = 0; c < vecs; c++) acc[g * vecs + c] = fma8(w, b[c], acc[g * vecs + c]);
        }
    }
    for (int g = 0; g < heads; g++)
        for (int c = 0; c < vecs; c++) store8(out + g * dim + c * LANES, acc[g * vecs + c]);
}

INLINE void weigh_heads(const int heads, float *out, int dim, const float *p, int64_t span, const float *v,
                        int tokens) {
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh(heads, 4, out + d, dim, p, span, v + d, tokens);
    for (; d < dim; d += LANES) weigh(heads, 1, out + d, dim, p, span, v + d, tokens);
}

/* Raw scores of one token's query heads against one whole block; scores[g * span + token]. */
static void score_block(int heads, const float *q, int dim, const float *k, int block_size, float *scores,
                        int64_t span) {
    float dots[12];
    for (int g = 0; g < heads; g += GROUP_HEADS) {
        int n = heads - g < GROUP_HEADS ? heads - g : GROUP_HEADS;
        for (int t = 0; t < block_size; t += 4) {
            const float *qg = q + g * dim, *kt = k + (int64_t)t * dim;
            switch (n) {
            case 1: dot_tile(1, 4, qg, dim, kt, dim, dim, 0, dots); break;
            case 2: dot_tile(2, 4, qg, dim, kt, dim, dim, 0, dots); break;
            default: dot_tile(3, 4, qg, dim, kt, dim, dim, 0, dots); break;
            }
            for (int i = 0; i < n; i++) memcpy(scores + (g + i) * span + t, dots + 4 * i, 4 * sizeof(float));
        }
    }
}

static void weigh_block(int heads, float *out, int dim, const float *p, int64_t span, const float *v, int tokens) {
    for (int g = 0; g < heads; g += GROUP_HEADS) {
        float *o = out + g * dim;
        const float *pg = p + g * span;
        switch (heads - g) {
        case 1: weigh_heads(1, o, dim, pg, span, v, tokens); break;
        case 2: weigh_heads(2, o, dim, pg, span, v, tokens); break;
        default: weigh_heads(3, o, dim, pg, span, v, tokens); break;
        }
    }
}

/* One tile against one kv_head. ``work`` holds scores, then sums. */
static void attend_tile(const Attention *a, int tile, int kv_head, float *work, int64_t span) {
    const Heads *h = a->heads;
    const Batch *b = a->batch;
    const int dim = h->dim, bs = a->kv->block_size, heads = h->num_heads / h->num_kv_heads;
    const int t0 = b->tiles[tile], tokens = b->tiles[tile + 1] - t0, row = b->rows[t0];
    const int64_t q_stride = (int64_t)(h->num_heads + 2 * h->num_kv_heads) * dim;
    const int first = first_visible(a->kv, b->positions[t0]) / bs, last = b->positions[t0 + tokens - 1] / bs;
    float *sums = work + tokens * heads * span;
    work -= first * bs; /* index scores by position */
    for (int i = first; i <= last; i++)
        for (int t = 0; t < tokens; t++)
            score_block(heads, a->qkv + (t0 + t) * q_stride + kv_head * heads * dim, dim,
                        kv_at(a, row, i, kv_head), bs, work + t * heads * span + i * bs, span);
    for (int t = 0; t < tokens; t++) {
        int position = b->positions[t0 + t];
        for (int g = 0; g < heads; g++)
            sums[t * heads + g] =
                softmax_row(work + (t * heads + g) * span, first_visible(a->kv, position), position);
        memset(a->out + ((int64_t)(t0 + t) * h->num_heads + kv_head * heads) * dim, 0, heads * dim * sizeof(float));
    }
    for (int i = first; i <= last; i++)
        for (int t = 0; t < tokens; t++) {
            int position = b->positions[t0 + t], from = first_visible(a->kv, position) - i * bs;
            int to = position + 1 - i * bs < bs ? position + 1 - i * bs : bs;
            from = from < 0 ? 0 : from;
            if (from >= to) continue;
            weigh_block(heads, a->out + ((int64_t)(t0 + t) * h->num_heads + kv_head * heads) * dim, dim,
                        work + t * heads * span + i * bs + from, span,
                        kv_at(a, row, i, kv_head) + (bs + from) * dim, to - from);
        }
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < heads; g++) {
            float *o = a->out + ((int64_t)(t0 + t) * h->num_heads + kv_head * heads + g) * dim;
            v8 inverse = splat8(1.0f / sums[t * heads + g]);
            for (int d = 0; d < dim; d += LANES) store8(o + d, load8(o + d) * inverse);
        }
}

/* Causal grouped-query attention over the paged memory; the step's own K and V are already stored. */
static void attention_part(Worker *me, const Attention *a) {
    const Heads *h = a->heads;
    const Batch *b = a->batch;
    const int heads = h->num_heads / h->num_kv_heads, bs = a->kv->block_size;
    for (int item; (item = next_chunk()) < b->num_tiles * h->num_kv_heads;) {
        int tile = item / h->num_kv_heads, t0 = b->tiles[tile], t1 = b->tiles[tile + 1] - 1;
        int first = first_visible(a->kv, b->positions[t0]) / bs, last = b->positions[t1] / bs;
        int64_t span = (int64_t)(last - first + 1) * bs + LANES;
        float *work = scratch_for(me, (size_t)(t1 - t0 + 1) * heads * (span + 1));
        attend_tile(a, tile, item % h->num_kv_heads, work, span);
    }
}

#endif
