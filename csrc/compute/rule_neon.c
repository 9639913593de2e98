/* Every rule but AdamW with NEON, four elements at a time. Runs on every ARMv8-A. */
#if defined(__aarch64__)

#include <arm_neon.h>

#define VECTOR_BYTES 16
#define TABLE lh_rule_neon

#include "compute/zo_vectors.h"

typedef floats values;

static INLINE values splat(float a)
{
    return (values)vdupq_n_f32(a);
}

static INLINE values fma_of(values a, values b, values c)
{
    return (values)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

static INLINE values root_of(values a)
{
    return (values)vsqrtq_f32((float32x4_t)a);
}

static INLINE values sign_of(values a)
{
    words above = (words)(a > 0), below = (words)(a < 0);
    words one = (words)splat(1), minus = (words)splat(-1);

    return (values)((above & one) | (below & minus));
}

static INLINE values halves_load(const uint16_t *source)
{
    return (values)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source)));
}

static INLINE void halves_store(uint16_t *target, values a)
{
    vst1_u16(target, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a)));
}

#include "compute/rule_body.h"

#endif
