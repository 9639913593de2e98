/*
 * Arithmetic of the threads of zeroth-order training, on the GPU and as plain C.
 *
 * Every operation is rounded separately: the intrinsics are neither fused nor flushed to zero, and
 * C is compiled with -ffp-contract=off. The payload of a NaN depends on the processor.
 */
#ifndef CUDA_ZO_NUMBERS_H
#define CUDA_ZO_NUMBERS_H

#include "compute/zo_kernels.h"

#ifdef __CUDACC__
#define ZO_FUNCTION static __device__ __forceinline__
#else
#include <math.h>
#include <string.h>
#define ZO_FUNCTION static inline
#endif

#ifdef __CUDA_ARCH__
#define ZO_ADD(a, b) __fadd_rn(a, b)
#define ZO_SUB(a, b) __fsub_rn(a, b)
#define ZO_MUL(a, b) __fmul_rn(a, b)
#define ZO_SQRT(a) __fsqrt_rn(a)
#else
#define ZO_ADD(a, b) ((a) + (b))
#define ZO_SUB(a, b) ((a) - (b))
#define ZO_MUL(a, b) ((a) * (b))
#define ZO_SQRT(a) sqrtf(a)
#endif

ZO_FUNCTION uint32_t zo_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

ZO_FUNCTION float zo_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

#endif
