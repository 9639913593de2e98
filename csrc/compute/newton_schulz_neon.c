/* Tiles of 2 rows with NEON: 16 vectors of sums. */
#if defined(__aarch64__)

#include <arm_neon.h>

#define VECTOR_BYTES 16
#define ROWS 2
#define NAME "neon"
#define KERNEL lh_newton_schulz_neon

#include "compute/zo_vectors.h"

static INLINE floats splat(float a)
{
    return (floats)vdupq_n_f32(a);
}

static INLINE floats fma_of(floats a, floats b, floats c)
{
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

#include "compute/newton_schulz_body.h"

#endif
