/* The layers of a dense decoder, as one job: every thread walks the same stages between barriers. */
#ifndef TRIPTYCH_DECODER_H
#define TRIPTYCH_DECODER_H

#include "attention.h"

typedef struct {
    Matrix qkv, o, gate_up, down;
    const float *attn_norm, *mlp_norm; /* [hidden] */
    const float *q_norm, *k_norm;      /* [dim] or NULL */
    int32_t group, index;              /* KV group, and the layer's place in it */
} Layer;

typedef struct {
    const Layer *layers;
    const KVGroup *groups;
    Heads heads;
    int32_t num_layers, hidden;
} Model;

/* Memory for one step of num_tokens tokens, [num_tokens, ...] each. */
typedef struct {
    float *normed;  /* hidden */
    float *qkv;     /* (num_heads + 2 * num_kv_heads) * dim */
    float *mixed;   /* num_heads * dim */
    float *gate_up; /* 2 * intermediate */
    float *gated;   /* intermediate */
} Workspace;

typedef struct {
    const Model *model;
    const Batch *batch;
    const Workspace *w;
    float *x; /* [num_tokens, hidden], updated in place */
} Forward;

static void decoder_part(Worker *me, const Forward *f) {
    const Model *m = f->model;
    const Workspace *w = f->w;
    const int tokens = f->batch->num_tokens;
    for (int i = 0; i < m->num_layers; i++) {
        const Layer *l = &m->layers[i];
        Norm norm = {w->normed, f->x, l->attn_norm, tokens, m->hidden, m->heads.eps};
        rms_norm_part(me, &norm), barrier();
        Linear qkv = {w->qkv, w->normed, &l->qkv, tokens, 0};
        linear_part(me, &qkv), barrier();
        Attention a = {w->mixed, w->qkv, l->q_norm, l->k_norm, &m->heads, f->batch, &m->groups[l->group], l->index};
        rotary_store_part(me, &a), barrier();
        attention_part(me, &a), barrier();
        Linear o = {f->x, w->mixed, &l->o, tokens, 1};
        linear_part(me, &o), barrier();
        norm.weight = l->mlp_norm;
        rms_norm_part(me, &norm), barrier();
        Linear gate_up = {w->gate_up, w->normed, &l->gate_up, tokens, 0};
        linear_part(me, &gate_up), barrier();
        SiluMul silu = {w->gated, w->gate_up, tokens, l->down.k};
        silu_mul_part(me, &silu), barrier();
        Linear down = {f->x, w->gated, &l->down, tokens, 1};
        linear_part(me, &down), barrier();
    }
}

#endif
