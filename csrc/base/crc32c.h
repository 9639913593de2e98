/*
 * CRC-32C (Castagnoli), the checksum of everything in a store.
 *
 * Three implementations give the same value: a table (any machine), the SSE4.2 / ARMv8 instruction,
 * and AVX-512 VPCLMULQDQ folding, which runs at cache speed: the optimizer checks and makes
 * checksums for 24 bytes a parameter in the pass that has them in cache, so anything slower would
 * bound it.
 *
 * Chaining: crc = lh_crc32c(crc, next, bytes) over consecutive pieces equals one call over the
 * whole; start with 0.
 * Thread: any.
 */
#ifndef LH_BASE_CRC32C_H
#define LH_BASE_CRC32C_H

#include "base/base.h"

uint32_t lh_crc32c(uint32_t crc, const void *data, uint64_t bytes);

typedef uint32_t (*lh_crc32c_fn)(uint32_t crc, const void *data, uint64_t bytes);

struct lh_crc32c_kernel {
    const char *name; /* "portable", "sse42", "avx512", "armv8" */
    lh_crc32c_fn run;
};

/*
 * The kernels this machine can run, best first; the count is returned. For tests, benchmarks and
 * doctor.
 */
int lh_crc32c_kernels(const struct lh_crc32c_kernel **kernels_out);

/* crc of the concatenation A|B from crc(A), crc(B) and B's length. */
uint32_t lh_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t b_bytes);

#endif
