/*
 * Declarations shared by crc32c.c and its kernels: arithmetic on polynomials over GF(2) modulo the
 * Castagnoli polynomial P, and the kernels. No other file includes this.
 *
 * [Note: Reflected polynomials]
 * CRC-32C sends the lowest bit of each byte first. So bit n of a 32-bit remainder is the
 * coefficient of x^(31-n), bit n of a 64-bit word of x^(63-n), and of a 128-bit lane of x^(127-n):
 * bytes that come first have the highest powers. A remainder r as a 64-bit word is r << 32.
 *
 * A carry-less product adds bit numbers. For two 64-bit words, bit i + j stands for
 * x^(63-i) * x^(63-j) = x^(126-i-j), but in a 128-bit lane the same bit stands for x^(127-i-j): the
 * lane holds the product times x. The kernels' constants are one power lower to compensate.
 *
 * Appending n zero bits to a message multiplies its remainder by x^n modulo P. The kernels join
 * pieces, lanes and accumulators by this rule alone.
 */
#ifndef LH_BASE_CRC32C_KERNELS_H
#define LH_BASE_CRC32C_KERNELS_H

#include "base/crc32c.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as little-endian");

/* P without its term x^32, reflected. */
#define LH_CRC32C_POLYNOMIAL UINT32_C(0x82F63B78)

/* Compute left * right modulo P. */
uint32_t lh_crc32c_multiply(uint32_t left, uint32_t right);
/* Compute x^exponent modulo P. */
uint32_t lh_crc32c_power(uint64_t exponent);

/* Each kernel implements lh_crc32c(). */
uint32_t lh_crc32c_portable(uint32_t crc, const void *data, uint64_t bytes);

#if defined(__x86_64__)
/* Each init computes its kernel's constants, and must be called once before the kernel. */
void lh_crc32c_sse42_init(void);
void lh_crc32c_avx512_init(void);
/* This kernel needs SSE4.2 and PCLMUL. */
uint32_t lh_crc32c_sse42(uint32_t crc, const void *data, uint64_t bytes);
/* This needs AVX-512 F, BW, VL, DQ, VPCLMULQDQ, and lh_crc32c_sse42_init() for the last bytes. */
uint32_t lh_crc32c_avx512(uint32_t crc, const void *data, uint64_t bytes);
#elif defined(__aarch64__)
/* This kernel needs the CRC32 extension. */
uint32_t lh_crc32c_armv8(uint32_t crc, const void *data, uint64_t bytes);
#endif

#endif
