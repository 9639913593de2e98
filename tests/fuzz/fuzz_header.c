/* A data file's first block: what decodes is a header that can be laid out, and encodes again. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {.data = data, .size = size};
    uint8_t block[LH_BLOCK_BYTES];
    uint8_t again[LH_BLOCK_BYTES];
    struct lh_store_header header;
    struct lh_store_header same;
    struct lh_store_control control;
    struct lh_error err = {0};
    bool is_sealed = fuzz_byte(&input) % 4 != 0;
    fuzz_take(&input, block, sizeof(block));
    if (is_sealed && input.size == 0)
        fuzz_block_seal(block);
    int rc = lh_store_header_decode(block, &header, &err);
    LH_ASSERT(rc == 0 || (rc == err.code && err.message[0] != '\0'));
    if (rc < 0)
        return 0;
    lh_store_control_plan(&header, &control);
    for (uint32_t copy = 0; copy < control.copy_count; copy++) {
        uint64_t first = control.manifest_offset[0][copy];
        uint64_t second = control.manifest_offset[1][copy];
        uint64_t end =
            copy + 1 < control.copy_count ? control.table_offset[copy + 1] : control.data_offset[0];
        LH_ASSERT(control.table_offset[copy] + control.table_bytes <= control.meta_offset[copy]);
        LH_ASSERT(control.meta_offset[copy] + header.meta_bytes <= first);
        LH_ASSERT(first + control.manifest_bytes <= second);
        LH_ASSERT(second + control.manifest_bytes <= end);
    }
    lh_store_header_encode(&header, again);
    LH_ASSERT(lh_store_header_decode(again, &same, NULL) == 0);
    lh_store_header_encode(&same, block);
    LH_ASSERT(memcmp(block, again, sizeof(block)) == 0);
    return 0;
}
