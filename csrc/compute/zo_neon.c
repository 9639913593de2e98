/* z with NEON, four at a time. */
#if defined(__aarch64__)

#include <arm_neon.h>

#define VECTOR_BYTES 16
#define KERNEL lh_zo_neon

typedef uint64_t longs __attribute__((vector_size(VECTOR_BYTES)));

static inline __attribute__((always_inline)) longs multiply32(longs left, longs right)
{
    return (longs)vmull_u32(vmovn_u64((uint64x2_t)left), vmovn_u64((uint64x2_t)right));
}

static inline __attribute__((always_inline)) float32x4_t root(float32x4_t value)
{
    return vsqrtq_f32(value);
}

#include "compute/zo_body.h"

#endif
