/*
 * Shared by the fuzz targets: an input that is read piece by piece, and checksums that are
 * corrected, so that the code after the check is tested as well.
 *
 * The first byte of most inputs selects the checksums that are corrected. After its end an input
 * consists of zeros, so that small inputs describe complete structures.
 */
#ifndef LH_TEST_FUZZ_H
#define LH_TEST_FUZZ_H

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/format.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct fuzz_input {
    const uint8_t *data;
    size_t size;
};

/* Return the next bytes of the input, and zeros after its end. */
static inline void fuzz_take(struct fuzz_input *input, void *target, uint64_t bytes)
{
    uint64_t taken = lh_min_u64(bytes, input->size);
    memset(target, 0, bytes);
    if (taken > 0)
        memcpy(target, input->data, taken);
    input->data += taken;
    input->size -= taken;
}

static inline uint8_t fuzz_byte(struct fuzz_input *input)
{
    uint8_t byte = 0;
    fuzz_take(input, &byte, 1);
    return byte;
}

/* Return a number from 1 to most. */
static inline uint32_t fuzz_count(struct fuzz_input *input, uint32_t most)
{
    return 1 + fuzz_byte(input) % most;
}

static inline void *fuzz_zeroed(uint64_t bytes)
{
    void *memory = calloc(1, lh_max_u64(bytes, 1));
    LH_ASSERT(memory != NULL);
    return memory;
}

/* Control blocks end with the CRC of the bytes before it. */
static inline void fuzz_block_seal(uint8_t *block)
{
    uint32_t crc = lh_crc32c(0, block, LH_BLOCK_BYTES - sizeof(crc));
    memcpy(block + LH_BLOCK_BYTES - sizeof(crc), &crc, sizeof(crc));
}

/* A header that a small store could have, of an input's next bytes. */
static inline struct lh_store_header fuzz_header(struct fuzz_input *input)
{
    struct lh_store_header header = {
        .version = fuzz_byte(input) % 4 == 0 ? 1 : LH_STORE_FORMAT_VERSION,
        .is_single_slot = fuzz_byte(input) % 4 == 0,
        .file_count = fuzz_count(input, 4),
        .extent_count = fuzz_count(input, 8),
        .group_count = fuzz_count(input, 4),
        .cycle_stripes = fuzz_count(input, 16),
        .stripe_bytes = fuzz_count(input, 4) * LH_MIB,
        .checksum_count = fuzz_byte(input),
        .scalar_bytes_max = fuzz_byte(input),
    };
    memset(header.uuid, 0x55, sizeof(header.uuid));
    return header;
}

#endif
