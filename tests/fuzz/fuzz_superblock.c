/* A superblock of a given header: what decodes encodes again, and has a successor. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {.data = data, .size = size};
    uint8_t block[LH_BLOCK_BYTES];
    struct lh_store_superblock superblock;
    struct lh_store_superblock same;
    struct lh_error err = {0};
    bool is_sealed = fuzz_byte(&input) % 4 != 0;
    struct lh_store_header header = fuzz_header(&input);
    fuzz_take(&input, block, sizeof(block));
    if (is_sealed && input.size == 0)
        fuzz_block_seal(block);
    int rc = lh_store_superblock_decode(block, &header, &superblock, &err);
    LH_ASSERT(rc == 0 || (rc == err.code && err.message[0] != '\0'));
    if (rc < 0)
        return 0;
    LH_ASSERT(superblock.manifest_area <= 1 && superblock.sequence + 1 > superblock.sequence);
    lh_store_superblock_encode(&superblock, &header, block);
    LH_ASSERT(lh_store_superblock_decode(block, &header, &same, NULL) == 0);
    LH_ASSERT(same.sequence == superblock.sequence && same.step == superblock.step);
    LH_ASSERT(same.manifest_crc == superblock.manifest_crc && same.is_clean == superblock.is_clean);
    return 0;
}
