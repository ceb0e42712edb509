/* xxh3_64 with seed 0 of more than XXH3_SHORT bytes, of memory or taken while it is filled.
 *
 * The algorithm (constants, order of operations) is that of the xxHash specification, so the values are the
 * same as any other implementation's. Little-endian machines only, like the whole project. */
#ifndef TRIPTYCH_XXH3_H
#define TRIPTYCH_XXH3_H

#include <stdint.h>
#include <string.h>

#define XXH3_SHORT 240
#define XXH3_STRIPE 64
#define XXH3_BLOCK 1024 /* stripes that the secret, moving 8 bytes a stripe, lasts for */
#define XXH3_AHEAD 2048 /* how far the source is fetched ahead of the copy */

typedef uint64_t xxh_v4 __attribute__((vector_size(32)));
typedef struct {
    xxh_v4 low, high;
} XxhState;

static const uint8_t XXH3_SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
#define XXH3_SECRET_LAST (192 - XXH3_STRIPE) /* where the scrambling takes its part */

static inline uint64_t xxh_u64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline xxh_v4 xxh_load(const uint8_t *p) {
    xxh_v4 value;
    memcpy(&value, p, sizeof value);
    return value;
}

#if defined(__AVX2__)
#include <immintrin.h>
/* The products of the low 32 bits of each lane. */
static inline xxh_v4 xxh_mul32(xxh_v4 a, xxh_v4 b) { return (xxh_v4)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
#else
static inline xxh_v4 xxh_mul32(xxh_v4 a, xxh_v4 b) {
    const uint64_t low = 0xFFFFFFFFu;
    return (a & low) * (b & low);
}
#endif

static inline xxh_v4 xxh_mixed(xxh_v4 state, const uint8_t *data, const uint8_t *secret) {
    const xxh_v4 input = xxh_load(data), key = input ^ xxh_load(secret);
    return state + xxh_mul32(key, key >> 32) + __builtin_shuffle(input, (xxh_v4){1, 0, 3, 2});
}

static inline void xxh_stripe(XxhState *s, const uint8_t *data, const uint8_t *secret) {
    s->low = xxh_mixed(s->low, data, secret);
    s->high = xxh_mixed(s->high, data + 32, secret + 32);
}

static inline xxh_v4 xxh_scrambled(xxh_v4 state, const uint8_t *secret) {
    const uint64_t prime = 0x9E3779B1u;
    const xxh_v4 primes = {prime, prime, prime, prime}, x = (state ^ (state >> 47)) ^ xxh_load(secret);
    return xxh_mul32(x, primes) + (xxh_mul32(x >> 32, primes) << 32);
}

static inline uint64_t xxh_folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t xxh_finished(const XxhState *s, uint64_t nbytes) {
    uint64_t lanes[8], sum = nbytes * 0x9E3779B185EBCA87u;
    memcpy(lanes, &s->low, 32);
    memcpy(lanes + 4, &s->high, 32);
    for (int i = 0; i < 8; i += 2)
        sum += xxh_folded(lanes[i] ^ xxh_u64(XXH3_SECRET + 11 + 8 * i),
                          lanes[i + 1] ^ xxh_u64(XXH3_SECRET + 19 + 8 * i));
    sum = (sum ^ (sum >> 37)) * 0x165667919E3779F9u;
    return sum ^ (sum >> 32);
}

/* Copy unless there is no source, and hash what the target then holds. */
static inline __attribute__((always_inline)) uint64_t xxh3_filled(uint8_t *target, const uint8_t *source,
                                                                  int64_t nbytes) {
    XxhState s = {{0xC2B2AE3Du, 0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u},
                  {0x85EBCA77C2B2AE63u, 0x85EBCA77u, 0x27D4EB2F165667C5u, 0x9E3779B1u}};
    int64_t at = 0;
    for (; at + XXH3_BLOCK < nbytes; at += XXH3_BLOCK) {
        for (int i = 0; i < XXH3_BLOCK; i += XXH3_STRIPE) {
            __builtin_prefetch((source ? source : target) + at + i + XXH3_AHEAD);
            if (source) memcpy(target + at + i, source + at + i, XXH3_STRIPE);
        }
        __asm__ volatile("" ::: "memory"); /* from here on it is the target that is read */
        for (int i = 0; i < XXH3_BLOCK; i += XXH3_STRIPE) xxh_stripe(&s, target + at + i, XXH3_SECRET + i / 8);
        s.low = xxh_scrambled(s.low, XXH3_SECRET + XXH3_SECRET_LAST);
        s.high = xxh_scrambled(s.high, XXH3_SECRET + XXH3_SECRET_LAST + 32);
    }
    if (source) memcpy(target + at, source + at, nbytes - at);
    __asm__ volatile("" ::: "memory");
    for (int64_t i = at; i + XXH3_STRIPE < nbytes; i += XXH3_STRIPE)
        xxh_stripe(&s, target + i, XXH3_SECRET + (i - at) / 8);
    /* The last stripe, which may overlap the one before. */
    xxh_stripe(&s, target + nbytes - XXH3_STRIPE, XXH3_SECRET + XXH3_SECRET_LAST - 7);
    return xxh_finished(&s, nbytes);
}

#endif
