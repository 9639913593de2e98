/*
 * The update with AVX2 and FMA. An iteration takes 16 elements, a whole register of each 2-byte
 * array; what is left over goes through adam_ref.c, which has the same bits.
 */
#if defined(__x86_64__)

#include <immintrin.h>

#include "base/assert.h"
#include "compute/adam_kernels.h"

#define STEP_ELEMENTS 16
#define HALF_ELEMENTS 8
/* Bytes of a 4-byte array that are asked for ahead of the loop, see adam_avx512.c. */
#define PREFETCH_BYTES 2048

struct lanes {
    __m256 gradient_scale, beta1_rest, beta2, beta2_rest, bias2_sqrt_inverse, eps, step_size;
    __m256 decay;
};

static inline struct lanes lanes_make(const struct lh_adam_scalars *scalars)
{
    return (struct lanes){
        .gradient_scale = _mm256_set1_ps(scalars->gradient_scale),
        .beta1_rest = _mm256_set1_ps(scalars->beta1_rest),
        .beta2 = _mm256_set1_ps(scalars->beta2),
        .beta2_rest = _mm256_set1_ps(scalars->beta2_rest),
        .bias2_sqrt_inverse = _mm256_set1_ps(scalars->bias2_sqrt_inverse),
        .eps = _mm256_set1_ps(scalars->eps),
        .step_size = _mm256_set1_ps(scalars->step_size),
        .decay = _mm256_set1_ps(scalars->decay),
    };
}

/* The one NaN where value is NaN. */
static inline __m256 nan_settled(__m256 value)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(LH_ADAM_NAN_BITS));

    return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

static inline __m256 bf16_widened(const void *source)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(source));

    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

static inline __attribute__((always_inline)) __m256i half_update(const struct lh_adam_run *run,
                                                                 uint64_t i,
                                                                 const struct lanes *lanes,
                                                                 bool param_bf16,
                                                                 bool gradient_bf16)
{
    const uint16_t *param16 = run->param;
    const uint16_t *gradient16 = run->gradient;
    __m256 g = gradient_bf16 ? bf16_widened(gradient16 + i)
                             : _mm256_loadu_ps((const float *)run->gradient + i);
    __m256 m = _mm256_loadu_ps(run->moment1 + i);
    __m256 v = _mm256_loadu_ps(run->moment2 + i);
    __m256 p, d;

    if (param_bf16) {
        __m256i high = _mm256_castps_si256(bf16_widened(param16 + i));
        __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(run->residual + i)));

        p = _mm256_castsi256_ps(_mm256_add_epi32(high, low));
    } else {
        p = _mm256_loadu_ps((const float *)run->param + i);
    }

    g = _mm256_mul_ps(g, lanes->gradient_scale);
    m = _mm256_fmadd_ps(_mm256_sub_ps(g, m), lanes->beta1_rest, m);
    v = _mm256_fmadd_ps(v, lanes->beta2, _mm256_mul_ps(_mm256_mul_ps(g, lanes->beta2_rest), g));
    d = _mm256_fmadd_ps(_mm256_sqrt_ps(v), lanes->bias2_sqrt_inverse, lanes->eps);
    p = _mm256_fnmadd_ps(lanes->step_size, _mm256_div_ps(m, d), _mm256_mul_ps(p, lanes->decay));

    _mm256_storeu_ps(run->moment1 + i, nan_settled(m));
    _mm256_storeu_ps(run->moment2 + i, nan_settled(v));
    return _mm256_castps_si256(nan_settled(p));
}

/* The low words of 2 x 8 dwords whose high words are 0, in order. */
static inline __m256i words_packed(__m256i first, __m256i second)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
}

static inline __attribute__((always_inline)) void
prefetch(const struct lh_adam_run *run, uint64_t i, bool param_bf16, bool gradient_bf16)
{
    uint64_t ahead_bytes = i * 4 + PREFETCH_BYTES;

    _mm_prefetch((const char *)run->param + ahead_bytes / (param_bf16 ? 2 : 1), _MM_HINT_T0);
    _mm_prefetch((const char *)run->gradient + ahead_bytes / (gradient_bf16 ? 2 : 1), _MM_HINT_T0);
    _mm_prefetch((const char *)run->moment1 + ahead_bytes, _MM_HINT_T0);
    _mm_prefetch((const char *)run->moment2 + ahead_bytes, _MM_HINT_T0);
    if (param_bf16)
        _mm_prefetch((const char *)run->residual + ahead_bytes / 2, _MM_HINT_T0);
}

/* Returns the elements done: a multiple of 16. */
static inline __attribute__((always_inline)) uint64_t body(const struct lh_adam_run *run,
                                                           const struct lh_adam_scalars *scalars,
                                                           bool param_bf16, bool gradient_bf16)
{
    const struct lanes lanes = lanes_make(scalars);
    const __m256i half_place = _mm256_set1_epi32(0x8000);
    const __m256i low_mask = _mm256_set1_epi32(0xFFFF);
    const uint64_t count = run->count / STEP_ELEMENTS * STEP_ELEMENTS;

    for (uint64_t i = 0; i < count; i += STEP_ELEMENTS) {
        __m256i bits[2];

        prefetch(run, i, param_bf16, gradient_bf16);
        for (int half = 0; half < 2; half++) {
            uint64_t first = i + (uint64_t)half * HALF_ELEMENTS;

            bits[half] = half_update(run, first, &lanes, param_bf16, gradient_bf16);
            if (!param_bf16)
                _mm256_storeu_si256((__m256i *)((float *)run->param + first), bits[half]);
        }
        if (param_bf16) {
            __m256i low = words_packed(_mm256_and_si256(bits[0], low_mask),
                                       _mm256_and_si256(bits[1], low_mask));
            __m256i high =
                words_packed(_mm256_srli_epi32(_mm256_add_epi32(bits[0], half_place), 16),
                             _mm256_srli_epi32(_mm256_add_epi32(bits[1], half_place), 16));

            _mm256_storeu_si256((__m256i *)((uint16_t *)run->param + i), high);
            _mm256_storeu_si256((__m256i *)(run->residual + i), low);
        }
    }
    return count;
}

void lh_adam_avx2(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    bool gradient_bf16 = run->gradient_dtype == LH_DTYPE_BF16;
    uint64_t done;

    LH_ASSERT((run->residual != NULL) == (run->param_dtype == LH_DTYPE_BF16));
    if (run->param_dtype == LH_DTYPE_BF16)
        done = gradient_bf16 ? body(run, scalars, true, true) : body(run, scalars, true, false);
    else
        done = gradient_bf16 ? body(run, scalars, false, true) : body(run, scalars, false, false);
    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_adam_ref(&rest, scalars);
    }
}

#endif
