/* Many copies in one call, with or without checksums of what was copied.
 *
 * A plain copy first loads every line of the target that it is about to overwrite. What is large is stored
 * past the cache here, which saves a third of the traffic. With checksums, each piece is hashed a kilobyte
 * at a time, from the target, while the first level of the cache has it. */
#include "xxh3.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define PAST_CACHE_TOTAL (1 << 20) /* bytes in a call, and in one copy of it, from which on that pays */
#define PAST_CACHE_COPY (1 << 13)

typedef struct {
    int64_t source, target, nbytes; /* offsets */
} Copy;

#if defined(__SSE2__)
#define LINE 64

static void copy_line(uint8_t *target, const uint8_t *source) {
#if defined(__AVX__)
    __m256i a = _mm256_loadu_si256((const void *)source), b = _mm256_loadu_si256((const void *)(source + 32));
    _mm256_stream_si256((void *)target, a);
    _mm256_stream_si256((void *)(target + 32), b);
#else
    for (int i = 0; i < LINE; i += 16)
        _mm_stream_si128((void *)(target + i), _mm_loadu_si128((const void *)(source + i)));
#endif
}

static void copy_past_cache(uint8_t *target, const uint8_t *source, int64_t nbytes) {
    const int64_t head = -(uintptr_t)target % LINE;
    memcpy(target, source, head);
    int64_t at = head;
    for (; at + LINE <= nbytes; at += LINE) copy_line(target + at, source + at);
    memcpy(target + at, source + at, nbytes - at);
}
#define FENCE _mm_sfence()
#else
#define copy_past_cache memcpy
#define FENCE
#endif

/* Source and target do not overlap. */
void triptych_copy(uint8_t *target, const uint8_t *source, const Copy *copies, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += copies[i].nbytes;
    for (int64_t i = 0; i < count; i++) {
        const Copy c = copies[i];
        if (total >= PAST_CACHE_TOTAL && c.nbytes >= PAST_CACHE_COPY)
            copy_past_cache(target + c.target, source + c.source, c.nbytes);
        else
            memcpy(target + c.target, source + c.source, c.nbytes);
    }
    FENCE;
}

/* The same, and the hash of every ``piece`` bytes of each copy, in order. Each copy is a whole number of
 * pieces, of more than XXH3_SHORT bytes. */
void triptych_copy_sums(uint8_t *target, const uint8_t *source, const Copy *copies, int64_t count,
                        int64_t piece, uint64_t *sums) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t at = 0; at < copies[i].nbytes; at += piece)
            *sums++ = xxh3_copied(target + copies[i].target + at, source + copies[i].source + at, piece);
}
