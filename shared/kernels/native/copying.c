/* Many copies in one call, with or without checksums of what was copied.
 *
 * A plain copy first loads every line of the target that it is about to overwrite. What is large is stored
 * past the cache here, which saves a third of the traffic. With checksums, each piece is hashed a kilobyte
 * at a time, from the target, while the first level of the cache has it. */
#include "helper.h"
#include "xxh3.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define PAST_CACHE_TOTAL (1 << 20) /* bytes in a call, and in one copy of it, from which on that pays */
#define PAST_CACHE_COPY (1 << 13)
#define SHARED_TOTAL (2 << 20) /* bytes from which on two threads are sooner done than one */

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

/* Of each copy, whether made by this or there already (no source), the hash of every ``piece`` bytes, in order.
 * Each copy is a whole number of pieces, of more than XXH3_SHORT bytes. */
struct Work {
    Shared shared;
    uint8_t *target;
    const uint8_t *source;
    const Copy *copies;
    int64_t piece;
    uint64_t *sums;
    int64_t num_sums;
    int64_t next; /* that nobody has taken */
};

static void take_sums(Work *w) {
    const Copy *copy = w->copies;
    int64_t i, first = 0; /* first: the number of the copy's first sum */
    while ((i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < w->num_sums) {
        for (; i - first >= copy->nbytes / w->piece; copy++) first += copy->nbytes / w->piece;
        const int64_t at = (i - first) * w->piece;
        uint8_t *target = w->target + copy->target + at;
        w->sums[i] = w->source ? xxh3_filled(target, w->source + copy->source + at, w->piece)
                               : xxh3_filled(target, NULL, w->piece);
    }
}

int triptych_helper(void) { return helper_start(); }

int64_t triptych_work_bytes(void) { return sizeof(Work); }

/* Fill ``work`` and let the helper begin; to be ended, and only then moved. Returns 0 when nobody begins. */
int triptych_sums_begin(Work *work, uint8_t *target, const uint8_t *source, const Copy *copies, int64_t piece,
                        uint64_t *sums, int64_t num_sums) {
    *work = (Work){{take_sums, 0, NULL}, target, source, copies, piece, sums, num_sums, 0};
    return helper_begin(work);
}

void triptych_sums_end(Work *work) { helper_end(work); }

/* Both in one, without the helper when that would take longer than the work. */
void triptych_copy_sums(uint8_t *target, const uint8_t *source, const Copy *copies, int64_t piece,
                        uint64_t *sums, int64_t num_sums) {
    Work work = {{take_sums, 0, NULL}, target, source, copies, piece, sums, num_sums, 0};
    if (piece * num_sums < SHARED_TOTAL) {
        take_sums(&work);
    } else {
        helper_begin(&work);
        helper_end(&work);
    }
}
