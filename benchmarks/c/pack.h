/*
 * A lossless coding of floating-point numbers that costs little more than a copy: a prototype for
 * bench_compression.c, with which lohan's stores do not work.
 *
 * In a block of 64 elements, most exponents are just below the largest. An element's exponent
 * becomes the distance from it, in code_bits bits; the largest code says that the distance is that
 * or more, and stands in a byte apart. Sign and mantissa are copied. What is coded are four arrays,
 * one after the other:
 *
 *      1 byte a block       the largest exponent
 *      8 or 24 bits each    sign and mantissa
 *      code_bits each       the codes
 *      1 byte each          the distances with the largest code
 *
 * Numbers without negative ones (is_unsigned: fp32 with 4 bits) have a bit of the code in place of
 * the sign. NaNs, infinities and zeros are numbers with the exponents 255 and 0.
 *
 * Thread: pure functions over the caller's memory.
 */
#ifndef LH_BENCHMARKS_PACK_H
#define LH_BENCHMARKS_PACK_H

#include <stdbool.h>
#include <stdint.h>

#define PACK_BLOCK 64

struct pack_format {
    uint32_t element_bytes; /* 2: bf16, 4: fp32 */
    uint32_t code_bits;     /* 3 or 4 */
    bool is_unsigned;
};

/* Whether the processor has the instructions (AVX-512 with VBMI and VBMI2). */
bool pack_is_supported(void);
/* Bytes that encoding may write, most of them only if nothing can be saved. */
uint64_t pack_bound(const struct pack_format *format, uint64_t count);
/* Encode count elements, a multiple of PACK_BLOCK; return the bytes of the result. */
uint64_t pack_encode(const struct pack_format *format, const void *elements, uint64_t count,
                     uint8_t *packed);
/* Decode what pack_encode() wrote. May read, but not use, up to pack_bound() bytes. */
void pack_decode(const struct pack_format *format, const uint8_t *packed, uint64_t count,
                 void *elements);

#endif
