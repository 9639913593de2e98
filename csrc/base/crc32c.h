/*
 * CRC-32C (Castagnoli), the checksum of everything in a store.
 *
 * All implementations return the same value: a table (any machine), the SSE4.2 or ARMv8
 * instruction, and AVX-512 VPCLMULQDQ folding, which runs at cache speed. The optimizer verifies
 * and computes checksums of 24 bytes per parameter while they are in cache, so its speed would
 * suffer from a slower implementation.
 *
 * Chaining: start with crc = 0; crc = lh_crc32c(crc, next, bytes) over consecutive pieces equals
 * one call over all of them.
 * Thread: any.
 */
#ifndef LH_BASE_CRC32C_H
#define LH_BASE_CRC32C_H

#include "base/base.h"

uint32_t lh_crc32c(uint32_t crc, const void *data, uint64_t bytes);
/* Copy memory, and return the CRC of the copy. It is computed while the copy is in cache. */
uint32_t lh_crc32c_copy(uint32_t crc, void *to, const void *from, uint64_t bytes);

typedef uint32_t (*lh_crc32c_fn)(uint32_t crc, const void *data, uint64_t bytes);

struct lh_crc32c_kernel {
    const char *name; /* "portable", "sse42", "avx512", "armv8" */
    lh_crc32c_fn run;
};

/*
 * Get the kernels that this machine can run, best first. Returns their number. Tests, benchmarks
 * and the doctor use this.
 */
int lh_crc32c_kernels(const struct lh_crc32c_kernel **kernels_out);

/* Compute the CRC of the concatenation A|B from crc(A), crc(B) and the length of B. */
uint32_t lh_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t b_bytes);

#endif
