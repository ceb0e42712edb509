/* The exported entry points. Each runs one job on the team and returns when it is done. */
#include "decoder.h"

static void linear_job(Worker *me, void *arg) { linear_part(me, arg); }
static void rms_norm_job(Worker *me, void *arg) { rms_norm_part(me, arg); }
static void silu_mul_job(Worker *me, void *arg) { silu_mul_part(me, arg); }
static void rotary_store_job(Worker *me, void *arg) { rotary_store_part(me, arg); }
static void attention_job(Worker *me, void *arg) { attention_part(me, arg); }
static void decoder_job(Worker *me, void *arg) { decoder_part(me, arg); }

void triptych_linear(float *out, const float *x, int rows, const Matrix *m, int add) {
    Linear l = {out, x, m, rows, add};
    run(linear_job, &l);
}

void triptych_rms_norm(float *out, const float *x, const float *weight, int rows, int dim, float eps) {
    Norm n = {out, x, weight, rows, dim, eps};
    run(rms_norm_job, &n);
}

void triptych_silu_mul(float *out, const float *x, int rows, int dim) {
    SiluMul s = {out, x, rows, dim};
    run(silu_mul_job, &s);
}

void triptych_rotary_store(float *qkv, const float *q_norm, const float *k_norm, const Heads *heads,
                           const Batch *batch, const KVGroup *kv, int layer) {
    Attention a = {NULL, qkv, q_norm, k_norm, heads, batch, kv, layer};
    run(rotary_store_job, &a);
}

void triptych_attention(float *out, float *qkv, const Heads *heads, const Batch *batch, const KVGroup *kv,
                        int layer) {
    Attention a = {out, qkv, NULL, NULL, heads, batch, kv, layer};
    run(attention_job, &a);
}

void triptych_decoder(float *x, const Model *model, const Batch *batch, const Workspace *w) {
    Forward f = {model, batch, w, x};
    run(decoder_job, &f);
}
