/* Conversions between element types, with torch's rounding. Thread: any. */
#ifndef LH_COMPUTE_CAST_H
#define LH_COMPUTE_CAST_H

#include "base/dtype.h"

/*
 * True when cast[i], of dtype (BF16 or F16), is values[i] rounded to nearest, ties to even (torch's
 * .to(dtype)), for every i.
 */
bool lh_cast_is_of(const void *cast, enum lh_dtype dtype, const float *values, uint64_t count);

#endif
