/*
 * Decode a store's control structures that an attacker wrote: header, table, superblock and
 * manifest, with corrected checksums, so that the code after these checks is tested.
 *
 * Decoded structures must be usable: every extent maps into its files, and nothing overflows.
 *
 *      clang -fsanitize=fuzzer,address,undefined -Icsrc tests/fuzz/fuzz_store_header.c <csrc/...>
 *      gcc ... tests/fuzz/fuzz_store_header.c tests/fuzz/replay_main.c <csrc/...>; ./a.out FILE...
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/format.h"

/* Larger stores are as good as these, and slower. */
#define FUZZ_BYTES_MAX (4 * LH_MIB)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct fuzz_input {
    const uint8_t *data;
    size_t size;
};

/* Return the next bytes of the input, and zeros after its end. */
static void take(struct fuzz_input *input, void *target, uint64_t bytes)
{
    uint64_t taken = lh_min_u64(bytes, input->size);
    memset(target, 0, bytes);
    memcpy(target, input->data, taken);
    input->data += taken;
    input->size -= taken;
}

static void *take_new(struct fuzz_input *input, uint64_t bytes)
{
    void *target = malloc(bytes);
    LH_ASSERT(target != NULL);
    take(input, target, bytes);
    return target;
}

/* Both control blocks end with the CRC of the bytes before it. */
static void block_seal(uint8_t *block)
{
    uint32_t crc = lh_crc32c(0, block, LH_BLOCK_BYTES - sizeof(crc));
    memcpy(block + LH_BLOCK_BYTES - sizeof(crc), &crc, sizeof(crc));
}

static void layout_check(const struct lh_store_shape *shape, const struct lh_store_control *control)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_store_layout layout;
    if (lh_store_layout_init(&layout, shape, control->data_offset, &alloc, NULL) < 0)
        return;
    for (uint32_t place = 0; place < layout.place_count; place++) {
        struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
        const struct lh_store_extent_desc *desc = &shape->extents[place / 2];
        if (place % 2 >= shape->slot_counts[desc->group])
            continue;
        uint64_t bytes = lh_min_u64(desc->bytes, 64 * shape->stripe_bytes);
        int count = lh_store_layout_map(&layout, place, desc->bytes - bytes, bytes, pieces,
                                        LH_STORE_PIECE_COUNT_MAX);
        for (int index = 0; index < count; index++) {
            uint32_t file = pieces[index].file_index;
            LH_ASSERT(file < layout.file_count);
            LH_ASSERT(pieces[index].file_offset >= layout.data_offset[file]);
            LH_ASSERT(pieces[index].file_offset + pieces[index].bytes <= layout.file_bytes[file]);
        }
    }
    lh_store_layout_deinit(&layout, &alloc);
}

static void manifest_check(struct fuzz_input *input, const struct lh_store_header *header,
                           const struct lh_store_control *control, const uint8_t *slot_counts)
{
    uint8_t block[LH_BLOCK_BYTES];
    uint64_t scalar_bytes = 0;
    struct lh_store_superblock superblock;
    take(input, block, sizeof(block));
    uint8_t *manifest = take_new(input, control->manifest_bytes);
    uint32_t crc = lh_crc32c(0, manifest, control->manifest_bytes);
    memcpy(block + offsetof(struct lh_store_superblock_disk, manifest_crc), &crc, sizeof(crc));
    block_seal(block);
    if (lh_store_superblock_decode(block, header, &superblock, NULL) == 0 &&
        lh_store_manifest_decode(manifest, header, control, &superblock, slot_counts, &scalar_bytes,
                                 NULL) == 0)
        LH_ASSERT(control->manifest_scalar_offset + scalar_bytes <= control->manifest_bytes);
    free(manifest);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {.data = data, .size = size};
    uint8_t block[LH_BLOCK_BYTES];
    struct lh_store_header header;
    struct lh_store_control control;
    take(&input, block, sizeof(block));
    block_seal(block);
    if (lh_store_header_decode(block, &header, NULL) < 0)
        return 0;
    lh_store_control_plan(&header, &control);
    uint32_t last = control.copy_count - 1;
    LH_ASSERT(control.meta_offset[last] + header.meta_bytes <= control.manifest_offset[0][last]);
    LH_ASSERT(control.manifest_offset[1][last] + control.manifest_bytes <= control.data_offset[0]);
    if (control.table_bytes > FUZZ_BYTES_MAX || control.manifest_bytes > FUZZ_BYTES_MAX)
        return 0;

    uint8_t *table = take_new(&input, control.table_bytes);
    struct lh_store_extent_desc *extents = calloc(header.extent_count, sizeof(*extents));
    uint8_t *slot_counts = calloc(header.group_count, 1);
    uint8_t *tail_files = calloc(header.extent_count, LH_STORE_SLOT_COUNT_MAX);
    LH_ASSERT(extents != NULL && slot_counts != NULL && tail_files != NULL);
    struct lh_store_shape shape = {
        .file_count = header.file_count,
        .extent_count = header.extent_count,
        .group_count = header.group_count,
        .stripe_bytes = header.stripe_bytes,
        .cycle_stripes = header.cycle_stripes,
        .extents = extents,
        .slot_counts = slot_counts,
        .tail_files = tail_files,
    };
    if (lh_store_table_decode(table, &header, &control, shape.cycle, extents, slot_counts,
                              tail_files, NULL) == 0) {
        layout_check(&shape, &control);
        manifest_check(&input, &header, &control, slot_counts);
    }
    free(table);
    free(extents);
    free(slot_counts);
    free(tail_files);
    return 0;
}
