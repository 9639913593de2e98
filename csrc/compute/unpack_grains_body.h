/*
 * Grains whose elements are signed bytes times a scale, for vectors of any width. A file includes
 * this after
 *
 *      half_value(half)                                    widens a number of fp16
 *      scaled_put(bytes, first, second, dtype, out, at)    stores 32 signed bytes, of which each 16
 *                                                          have a finite scale, as elements `at`
 *                                                          and following ones of `out`
 */
#ifndef LH_COMPUTE_UNPACK_GRAINS_BODY_H
#define LH_COMPUTE_UNPACK_GRAINS_BODY_H

static inline __attribute__((always_inline)) uint64_t q8_0_unpack(const uint8_t *packed,
                                                                  uint64_t count, void *out,
                                                                  uint32_t dtype)
{
    for (uint64_t i = 0; i < count; i++, packed += LH_UNPACK_Q8_0_BYTES) {
        uint16_t half;
        memcpy(&half, packed, sizeof(half));
        if (!half_is_finite(half))
            return i;
        float scale = half_value(half);
        scaled_put(_mm256_loadu_si256((const void *)(packed + 2)), scale, scale, dtype, out,
                   32 * i);
    }
    return count;
}

static inline __attribute__((always_inline)) uint64_t q6_k_unpack(const uint8_t *packed,
                                                                  uint64_t count, void *out,
                                                                  uint32_t dtype)
{
    const __m256i low_nibbles = _mm256_set1_epi8(15), high_bits = _mm256_set1_epi8(0x30);
    for (uint64_t i = 0; i < count; i++, packed += LH_UNPACK_Q6_K_BYTES) {
        uint8_t grain[LH_UNPACK_Q6_K_BYTES]; /* `out` may overlap what is packed */
        uint16_t half;
        memcpy(grain, packed, sizeof(grain));
        memcpy(&half, grain + 208, sizeof(half));
        if (!half_is_finite(half))
            return i;
        float scale = half_value(half);
        const int8_t *scales = (const int8_t *)(grain + 192);
        for (uint32_t part = 0; part < 8; part++) {
            uint32_t quarter = part % 4;
            __m256i low =
                _mm256_loadu_si256((const void *)(grain + part / 4 * 64 + quarter % 2 * 32));
            __m256i high = _mm256_loadu_si256((const void *)(grain + 128 + part / 4 * 32));
            if (quarter >= 2)
                low = _mm256_srli_epi16(low, 4);
            high = quarter == 3   ? _mm256_srli_epi16(high, 2)
                   : quarter == 2 ? high
                   : quarter == 1 ? _mm256_slli_epi16(high, 2)
                                  : _mm256_slli_epi16(high, 4);
            __m256i bits = _mm256_or_si256(_mm256_and_si256(low, low_nibbles),
                                           _mm256_and_si256(high, high_bits));
            scaled_put(_mm256_sub_epi8(bits, _mm256_set1_epi8(32)), scale * (float)scales[2 * part],
                       scale * (float)scales[2 * part + 1], dtype, out,
                       LH_UNPACK_GRAIN_MAX * i + 32 * part);
        }
    }
    return count;
}

#endif
