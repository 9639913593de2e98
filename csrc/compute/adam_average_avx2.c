/* Averages with AVX2 and FMA, eight elements at a time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>

#include "compute/adam_kernels.h"

#define LANES 8

void lh_adam_average_avx2(float *average, const float *values, uint64_t count, float rest)
{
    bool is_small = fabsf(rest) < 0.5F;
    __m256 weight = _mm256_set1_ps(is_small ? rest : rest - 1.0F);
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32((int)LH_ADAM_NAN_BITS));
    uint64_t i = 0;

    for (; i + LANES <= count; i += LANES) {
        __m256 p = _mm256_loadu_ps(values + i);
        __m256 e = _mm256_loadu_ps(average + i);
        __m256 made = _mm256_fmadd_ps(weight, _mm256_sub_ps(p, e), is_small ? e : p);

        if (rest == 1.0F)
            made = p;
        made = _mm256_blendv_ps(made, nan, _mm256_cmp_ps(made, made, _CMP_UNORD_Q));
        _mm256_storeu_ps(average + i, made);
    }
    lh_adam_average_ref(average + i, values + i, count - i, rest);
}

#endif
