/* What a kernel knows of a step: its tokens, their rows and positions, and the paged KV memory.
 * Mirrored field by field in shared/kernels/records.py. */
#ifndef TRIPTYCH_BATCH_H
#define TRIPTYCH_BATCH_H

#include <stdint.h>

#define TILE_TOKENS 4 /* most tokens of a tile */

/* One KV group: block ``b``, head ``h``, layer ``l`` starts at data + b * block_stride +
 * h * head_stride + l * 2 * block_size * dim, K before V, each [block_size, dim]. */
typedef struct {
    float *data;
    int64_t block_stride, head_stride; /* in floats */
    const int32_t *tables;             /* [max_rows, table_stride] block ids */
    int64_t table_stride;
    int32_t block_size, window; /* window 0: unlimited */
} KVGroup;

/* Tokens in plan order. A tile is up to TILE_TOKENS tokens of one row at consecutive positions;
 * tile i holds tokens tiles[i] .. tiles[i + 1]. */
typedef struct {
    const int32_t *rows, *positions; /* [num_tokens] */
    const int32_t *tiles;            /* [num_tiles + 1] */
    const float *cos, *sin;          /* [num_tokens, dim / 2] */
    int32_t num_tokens, num_tiles;
} Batch;

typedef struct {
    int32_t num_heads, num_kv_heads, dim;
    float scale, eps;
} Heads;

#endif
