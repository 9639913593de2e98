/* Decode rows whose columns have scales of their own with AVX-512: see unpack_indexed_body.h. */
#if defined(__x86_64__)

#include <string.h>

#include "compute/unpack_avx2.h"

#define LANES 16
#define INLINE inline __attribute__((always_inline))
#define INDEXED lh_unpack_indexed_avx512
#define INTEGERS lh_unpack_integers_avx512

typedef uint32_t words __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));

static INLINE floats fused(floats a, float b, floats c)
{
    return (floats)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)c);
}

static INLINE floats fused_all(floats a, floats b, floats c)
{
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static INLINE floats widened(words codes)
{
    return (floats)_mm512_cvtepi32_ps((__m512i)codes);
}

static INLINE words bytes_picked(words all, uint64_t part)
{
    return all >> (uint32_t)(8 * part) & 255;
}

static INLINE words halves_widened(__m256i bytes, int part)
{
    (void)part;
    return (words)_mm512_cvtepu16_epi32(bytes);
}

static INLINE words odd_chosen(words bits, uint32_t even, uint32_t odd)
{
    const __mmask16 is_odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(1 << 16));
    return (words)_mm512_mask_blend_epi32(is_odd, _mm512_set1_epi32((int)even),
                                          _mm512_set1_epi32((int)odd));
}

static INLINE words high_joined(words low, words high)
{
    return (words)_mm512_mask_blend_epi16(0xAAAAAAAA, (__m512i)(low >> 16), (__m512i)high);
}

static INLINE floats larger(floats a, float b)
{
    return (floats)_mm512_max_ps((__m512)a, _mm512_set1_ps(b));
}

static INLINE floats settled_rounded(floats value, uint32_t rounding)
{
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
    __m512 all = (__m512)value;
    all = _mm512_mask_mov_ps(all, _mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q), nan);
    if (rounding == LH_DTYPE_F16)
        return (floats)_mm512_cvtph_ps(_mm512_cvtps_ph(all, _MM_FROUND_TO_NEAREST_INT));
    if (rounding == LH_DTYPE_BF16) {
        words bits = (words)all;
        return (floats)((bits + 0x7FFF + (bits >> 16 & 1)) & UINT32_C(0xFFFF0000));
    }
    return (floats)all;
}

static INLINE words half_bits(floats value)
{
    return (words)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
}

static INLINE void words_transpose(words *v)
{
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        __m512i even[2], odd[2]; /* lanes of 128 bits */
        even[0] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        even[1] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        odd[0] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xDD);
        odd[1] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xDD);
        v[i] = (words)_mm512_shuffle_i32x4(even[0], even[1], 0x88);
        v[i + 4] = (words)_mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        v[i + 8] = (words)_mm512_shuffle_i32x4(even[0], even[1], 0xDD);
        v[i + 12] = (words)_mm512_shuffle_i32x4(odd[0], odd[1], 0xDD);
    }
}

static INLINE words bytes_widened(const uint8_t *bytes)
{
    return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)bytes));
}

static INLINE words high_halves(words first, words second)
{
    const __m512i indices =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (words)_mm512_permutex2var_epi16((__m512i)first, indices, (__m512i)second);
}

static INLINE void words_put(uint8_t *out, words value, bool is_past_caches)
{
    if (is_past_caches)
        _mm512_stream_si512((void *)out, (__m512i)value);
    else
        _mm512_storeu_si512(out, (__m512i)value);
}

#include "compute/unpack_indexed_body.h"

const struct lh_unpack_kernel lh_unpack_avx512 = {.bytes = lh_unpack_bytes_avx2,
                                                  .nibbles = lh_unpack_nibbles_avx2,
                                                  .e2m1 = lh_unpack_e2m1_avx2,
                                                  .grains = lh_unpack_grains_avx512,
                                                  .tile = lh_unpack_tile_avx2,
                                                  .integers = lh_unpack_integers_avx512,
                                                  .tables = lh_unpack_tables_avx2,
                                                  .looked_up = lh_unpack_looked_up_avx2,
                                                  .stored = lh_unpack_stored_avx2,
                                                  .indexed = lh_unpack_indexed_avx512,
                                                  .scaled = lh_unpack_scaled_avx2,
                                                  .powers = lh_unpack_powers_avx2};

#endif
