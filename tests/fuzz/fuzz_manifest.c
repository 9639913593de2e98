/* A manifest of a given header and superblock: its slots exist, its scalars are inside of it. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {.data = data, .size = size};
    uint8_t flags = fuzz_byte(&input);
    struct lh_store_header header = fuzz_header(&input);
    struct lh_store_superblock superblock = {.sequence = 1, .step = fuzz_byte(&input)};
    struct lh_store_control control;
    struct lh_error err = {0};
    uint8_t slot_counts[4];
    uint64_t scalar_bytes = 1;
    for (uint32_t group = 0; group < header.group_count; group++)
        slot_counts[group] = (uint8_t)fuzz_count(&input, header.is_single_slot ? 1 : 2);
    lh_store_control_plan(&header, &control);
    uint8_t *manifest = fuzz_zeroed(control.manifest_bytes);
    /* Two thirds of all inputs begin with a valid head, so that its flags are checked. */
    uint64_t head = flags / 4 % 3 != 0 ? sizeof(struct lh_store_manifest_disk) : 0;
    if (head > 0)
        lh_store_manifest_encode(&header, superblock.step, 0, manifest);
    fuzz_take(&input, manifest + head, control.manifest_bytes - head);
    if (flags % 4 != 0)
        superblock.manifest_crc = lh_crc32c(0, manifest, control.manifest_bytes);
    int rc = lh_store_manifest_decode(manifest, &header, &control, &superblock, slot_counts,
                                      &scalar_bytes, &err);
    LH_ASSERT(rc == 0 || (rc == err.code && err.message[0] != '\0' && scalar_bytes == 0));
    LH_ASSERT(control.manifest_scalar_offset + scalar_bytes <= control.manifest_bytes);
    for (uint32_t group = 0; rc == 0 && group < header.group_count; group++) {
        uint8_t flag = manifest[sizeof(struct lh_store_manifest_disk) + group];
        LH_ASSERT((flag & LH_STORE_GROUP_SLOT) < slot_counts[group]);
    }
    free(manifest);
    return 0;
}
