/* Conversions between element types, as torch makes them. Thread: any. */
#ifndef LH_COMPUTE_CAST_H
#define LH_COMPUTE_CAST_H

#include "base/dtype.h"

/*
 * True when bf16[i] is values[i] rounded to nearest, ties to even (torch's .to(bfloat16)), for
 * every i.
 */
bool lh_cast_is_bf16_of(const void *bf16, const float *values, uint64_t count);

#endif
