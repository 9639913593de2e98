#include "pack.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "base/assert.h"

#define TARGET __attribute__((target("avx512vbmi,avx512vbmi2,bmi2,popcnt")))
#define INLINE static inline __attribute__((always_inline)) TARGET
/* After each array: whole vectors are stored, and loaded, also where fewer bytes are used. */
#define SLACK_BYTES 64

/* Where the four arrays of a packed piece are. */
struct places {
    uint8_t *largest, *rest, *codes, *far;
};

static struct places places_of(const struct pack_format *format, uint8_t *packed, uint64_t count)
{
    struct places at = {.largest = packed, .rest = packed + count / PACK_BLOCK};
    uint32_t bits = format->code_bits - format->is_unsigned;
    at.codes = at.rest + count * (format->element_bytes - 1) + SLACK_BYTES;
    at.far = at.codes + count * bits / 8 + SLACK_BYTES;
    return at;
}

bool pack_is_supported(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2");
}

uint64_t pack_bound(const struct pack_format *format, uint64_t count)
{
    return count * (format->element_bytes + 1) + count / PACK_BLOCK + 3 * SLACK_BYTES;
}

INLINE __m512i join(__m256i low, __m256i high)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

INLINE uint8_t largest_of(__m512i bytes)
{
    __m256i half =
        _mm256_max_epu8(_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64(bytes, 1));
    __m128i quarter = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    __m128i least = _mm_xor_si128(quarter, _mm_set1_epi8(-1));
    least = _mm_min_epu8(least, _mm_srli_epi16(least, 8)); /* upper bytes become zeros */
    return (uint8_t)~_mm_cvtsi128_si32(_mm_minpos_epu16(least));
}

/* The first three of every four bytes, in the first 48 bytes. */
INLINE __m512i squeeze4(__m512i lanes)
{
    static const uint8_t order[64] = {0,  1,  2,  4,  5,  6,  8,  9,  10, 12, 13, 14,
                                      16, 17, 18, 20, 21, 22, 24, 25, 26, 28, 29, 30,
                                      32, 33, 34, 36, 37, 38, 40, 41, 42, 44, 45, 46,
                                      48, 49, 50, 52, 53, 54, 56, 57, 58, 60, 61, 62};
    return _mm512_permutexvar_epi8(_mm512_loadu_si512(order), lanes);
}

/* The inverse; each fourth byte is 0. */
INLINE __m512i spread4(__m512i bytes)
{
    static const uint8_t order[64] = {0,  1,  2,  0, 3,  4,  5,  0, 6,  7,  8,  0, 9,  10, 11, 0,
                                      12, 13, 14, 0, 15, 16, 17, 0, 18, 19, 20, 0, 21, 22, 23, 0,
                                      24, 25, 26, 0, 27, 28, 29, 0, 30, 31, 32, 0, 33, 34, 35, 0,
                                      36, 37, 38, 0, 39, 40, 41, 0, 42, 43, 44, 0, 45, 46, 47, 0};
    const __mmask64 three = UINT64_C(0x7777777777777777);
    return _mm512_maskz_permutexvar_epi8(three, _mm512_loadu_si512(order), bytes);
}

/* Store 64 codes in bits (3 or 4) each. */
INLINE void codes_store(__m512i codes, uint32_t bits, uint8_t *out)
{
    if (bits == 4) {
        __m512i pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));
        _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi16_epi8(pairs));
        return;
    }
    static const uint8_t order[64] = {0,  1,  2,  8,  9,  10, 16, 17, 18, 24, 25, 26,
                                      32, 33, 34, 40, 41, 42, 48, 49, 50, 56, 57, 58};
    __m512i pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x0801));
    __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(64 << 16 | 1));
    __m512i eights = _mm512_or_si512(fours, _mm512_srli_epi64(fours, 20));
    eights = _mm512_permutexvar_epi8(_mm512_loadu_si512(order), eights);
    _mm256_storeu_si256((__m256i *)out, _mm512_castsi512_si256(eights));
}

INLINE __m512i codes_load(const uint8_t *in, uint32_t bits)
{
    __m256i packed = _mm256_loadu_si256((const __m256i *)in);
    if (bits == 4) {
        __m512i pairs = _mm512_cvtepu8_epi16(packed);
        pairs = _mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4));
        return _mm512_and_si512(pairs, _mm512_set1_epi8(15));
    }
    static const uint8_t order[64] = {0,  1,  2,  0, 0, 0, 0, 0, 3,  4,  5,  0, 0, 0, 0, 0,
                                      6,  7,  8,  0, 0, 0, 0, 0, 9,  10, 11, 0, 0, 0, 0, 0,
                                      12, 13, 14, 0, 0, 0, 0, 0, 15, 16, 17, 0, 0, 0, 0, 0,
                                      18, 19, 20, 0, 0, 0, 0, 0, 21, 22, 23, 0, 0, 0, 0, 0};
    __m512i eights =
        _mm512_permutexvar_epi8(_mm512_loadu_si512(order), _mm512_castsi256_si512(packed));
    const __m512i shifts = _mm512_set1_epi64(0x15120F0C09060300);
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, eights), _mm512_set1_epi8(7));
}

/* Split 64 elements into exponents (the result) and their rests. */
INLINE __m512i bf16_split(const uint8_t *in, uint8_t *rest)
{
    __m256i exponents[2], rests[2];
    for (int i = 0; i < 2; i++) {
        __m512i bits = _mm512_loadu_si512(in + 64 * i);
        bits = _mm512_or_si512(_mm512_slli_epi16(bits, 1), _mm512_srli_epi16(bits, 15));
        exponents[i] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(bits, 8));
        rests[i] = _mm512_cvtepi16_epi8(bits);
    }
    _mm512_storeu_si512(rest, join(rests[0], rests[1]));
    return join(exponents[0], exponents[1]);
}

INLINE __m512i fp32_exponents(const uint8_t *in)
{
    __m128i parts[4];
    for (int i = 0; i < 4; i++) {
        __m512i bits = _mm512_loadu_si512(in + 64 * i);
        parts[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_rol_epi32(bits, 1), 24));
    }
    return join(_mm256_set_m128i(parts[1], parts[0]), _mm256_set_m128i(parts[3], parts[2]));
}

/* The rests of fp32; bit 3 of the codes takes the place of the sign if is_unsigned. */
INLINE void fp32_rests(const uint8_t *in, __m512i codes, bool is_unsigned, uint8_t *rest)
{
    uint8_t high[64];
    if (is_unsigned) {
        __m512i bit = _mm512_and_si512(_mm512_srli_epi16(codes, 3), _mm512_set1_epi8(1));
        _mm512_storeu_si512(high, bit);
    }
    for (int i = 0; i < 4; i++) {
        __m512i bits = _mm512_rol_epi32(_mm512_loadu_si512(in + 64 * i), 1);
        if (is_unsigned) {
            __m128i part = _mm_loadu_si128((const __m128i *)(high + 16 * i));
            bits = _mm512_or_si512(bits, _mm512_cvtepu8_epi32(part));
        }
        _mm512_storeu_si512(rest + 48 * i, squeeze4(bits));
    }
}

INLINE uint64_t encode(struct pack_format format, const uint8_t *in, uint64_t count, uint8_t *out)
{
    struct places at = places_of(&format, out, count);
    const __m512i last = _mm512_set1_epi8((char)((1 << format.code_bits) - 1));
    const uint32_t bits = format.code_bits - format.is_unsigned;
    uint8_t *far = at.far;
    for (uint64_t b = 0; b < count / PACK_BLOCK; b++) {
        const uint8_t *block = in + b * PACK_BLOCK * format.element_bytes;
        uint8_t *rest = at.rest + b * PACK_BLOCK * (format.element_bytes - 1);
        __m512i exponents =
            format.element_bytes == 2 ? bf16_split(block, rest) : fp32_exponents(block);
        uint8_t largest = largest_of(exponents);
        __m512i below = _mm512_sub_epi8(_mm512_set1_epi8((char)largest), exponents);
        __mmask64 is_far = _mm512_cmpge_epu8_mask(below, last);
        __m512i codes = _mm512_min_epu8(below, last);
        at.largest[b] = largest;
        if (format.element_bytes == 4)
            fp32_rests(block, codes, format.is_unsigned, rest);
        if (format.is_unsigned)
            codes = _mm512_and_si512(codes, _mm512_set1_epi8(7));
        codes_store(codes, bits, at.codes + b * PACK_BLOCK * bits / 8);
        _mm512_storeu_si512(far, _mm512_maskz_compress_epi8(is_far, below));
        far += __builtin_popcountll(is_far);
    }
    return (uint64_t)(far - out);
}

INLINE void decode(struct pack_format format, const uint8_t *in, uint64_t count, uint8_t *out)
{
    struct places at = places_of(&format, (uint8_t *)(uintptr_t)in, count);
    const __m512i last = _mm512_set1_epi8((char)((1 << format.code_bits) - 1));
    const uint32_t bits = format.code_bits - format.is_unsigned;
    const __m512i one = _mm512_set1_epi32(1);
    for (uint64_t b = 0; b < count / PACK_BLOCK; b++) {
        const uint8_t *rest = at.rest + b * PACK_BLOCK * (format.element_bytes - 1);
        uint8_t *block = out + b * PACK_BLOCK * format.element_bytes, high[64], exponents[64];
        __m512i codes = codes_load(at.codes + b * PACK_BLOCK * bits / 8, bits);
        __m512i rests[4];
        for (int i = 0; i < 4 && format.element_bytes == 4; i++) {
            rests[i] = spread4(_mm512_loadu_si512(rest + 48 * i));
            if (format.is_unsigned) {
                __m512i bit = _mm512_slli_epi32(_mm512_and_si512(rests[i], one), 3);
                _mm_storeu_si128((__m128i *)(high + 16 * i), _mm512_cvtepi32_epi8(bit));
                rests[i] = _mm512_andnot_si512(one, rests[i]);
            }
        }
        if (format.is_unsigned)
            codes = _mm512_or_si512(codes, _mm512_loadu_si512(high));
        __mmask64 is_far = _mm512_cmpeq_epu8_mask(codes, last);
        __m512i below = _mm512_mask_expand_epi8(codes, is_far, _mm512_loadu_si512(at.far));
        at.far += __builtin_popcountll(is_far);
        below = _mm512_sub_epi8(_mm512_set1_epi8((char)at.largest[b]), below);
        _mm512_storeu_si512(exponents, below);
        for (int i = 0; i < 2 && format.element_bytes == 2; i++) {
            __m256i low = _mm256_loadu_si256((const __m256i *)(rest + 32 * i));
            __m256i up = _mm256_loadu_si256((const __m256i *)(exponents + 32 * i));
            __m512i lanes = _mm512_slli_epi16(_mm512_cvtepu8_epi16(up), 8);
            lanes = _mm512_or_si512(lanes, _mm512_cvtepu8_epi16(low));
            lanes = _mm512_or_si512(_mm512_srli_epi16(lanes, 1), _mm512_slli_epi16(lanes, 15));
            _mm512_storeu_si512(block + 64 * i, lanes);
        }
        for (int i = 0; i < 4 && format.element_bytes == 4; i++) {
            __m128i up = _mm_loadu_si128((const __m128i *)(exponents + 16 * i));
            __m512i lanes = _mm512_slli_epi32(_mm512_cvtepu8_epi32(up), 24);
            lanes = _mm512_ror_epi32(_mm512_or_si512(lanes, rests[i]), 1);
            _mm512_storeu_si512(block + 64 * i, lanes);
        }
    }
}

/* A copy of a loop for each format, so that nothing is decided inside. */
#define EACH_FORMAT(format, call)                                                                  \
    ((format)->element_bytes == 2                                                                  \
         ? ((format)->code_bits == 3 ? call(((struct pack_format){2, 3, false}))                   \
                                     : call(((struct pack_format){2, 4, false})))                  \
     : (format)->is_unsigned    ? call(((struct pack_format){4, 4, true}))                         \
     : (format)->code_bits == 3 ? call(((struct pack_format){4, 3, false}))                        \
                                : call(((struct pack_format){4, 4, false})))

TARGET uint64_t pack_encode(const struct pack_format *format, const void *elements, uint64_t count,
                            uint8_t *packed)
{
    LH_ASSERT(count % PACK_BLOCK == 0);
#define CALL(f) encode(f, elements, count, packed)
    return EACH_FORMAT(format, CALL);
#undef CALL
}

TARGET void pack_decode(const struct pack_format *format, const uint8_t *packed, uint64_t count,
                        void *elements)
{
    LH_ASSERT(count % PACK_BLOCK == 0);
#define CALL(f) decode(f, packed, count, elements)
    EACH_FORMAT(format, CALL);
#undef CALL
}

#endif
