/*
 * The table of a given header: what decodes can be placed. Every extent maps into its files, no two
 * of them overlap, and nothing overflows.
 */
#include "fuzz.h"

/* Check the first and last stripes of a place, which are all of a small one. */
static void place_check(const struct lh_store_layout *layout, uint32_t place, uint64_t bytes,
                        uint64_t stripe_bytes)
{
    struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
    uint64_t part = lh_min_u64(bytes, 32 * stripe_bytes);
    const uint64_t offsets[2] = {0, bytes - part};
    for (uint32_t i = 0; i < 2; i++) {
        int count =
            lh_store_layout_map(layout, place, offsets[i], part, pieces, LH_STORE_PIECE_COUNT_MAX);
        uint64_t mapped = 0;
        LH_ASSERT(count > 0);
        for (int index = 0; index < count; index++) {
            uint32_t file = pieces[index].file_index;
            LH_ASSERT(file < layout->file_count && pieces[index].buffer_offset == mapped);
            LH_ASSERT(pieces[index].file_offset >= layout->data_offset[file]);
            LH_ASSERT(pieces[index].file_offset + pieces[index].bytes <= layout->file_bytes[file]);
            mapped += pieces[index].bytes;
        }
        LH_ASSERT(mapped == part);
    }
}

static void layout_check(const struct lh_store_shape *shape, const struct lh_store_control *control)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_store_layout layout;
    LH_ASSERT(lh_store_layout_init(&layout, shape, control->data_offset, &alloc, NULL) == 0);
    uint64_t placed = 0;
    uint64_t there = 0;
    for (uint32_t place = 0; place < layout.place_count; place++) {
        const struct lh_store_extent_desc *desc = &shape->extents[place / LH_STORE_SLOT_COUNT_MAX];
        if (place % LH_STORE_SLOT_COUNT_MAX >= shape->slot_counts[desc->group])
            continue;
        place_check(&layout, place, desc->bytes, shape->stripe_bytes);
        placed += desc->bytes;
    }
    for (uint32_t file = 0; file < layout.file_count; file++)
        there += layout.file_bytes[file] - layout.data_offset[file];
    /* The file has exactly the space that the places need, so they cannot overlap. */
    LH_ASSERT(there == placed);
    lh_store_layout_deinit(&layout, &alloc);
    LH_ASSERT(alloc.live_count == 0);
}

/* Count the checksums that a table's extents need, as their own header would. */
static uint64_t checksums_count(const uint8_t *table, const struct lh_store_header *header,
                                const struct lh_store_control *control)
{
    uint64_t count = 0;
    for (uint32_t extent = 0; extent < header->extent_count; extent++) {
        uint64_t bytes;
        memcpy(&bytes,
               table + control->extent_offset + extent * sizeof(struct lh_store_extent_disk),
               sizeof(bytes));
        count += bytes <= LH_STORE_TOTAL_BYTES_MAX ? lh_store_checksum_count(bytes) : 0;
    }
    return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {.data = data, .size = size};
    bool is_counted = fuzz_byte(&input) % 4 != 0;
    struct lh_store_header header = fuzz_header(&input);
    struct lh_store_control control;
    struct lh_error err = {0};
    lh_store_control_plan(&header, &control);
    uint8_t *table = fuzz_zeroed(control.table_bytes);
    fuzz_take(&input, table, control.table_bytes);
    if (is_counted)
        header.checksum_count = checksums_count(table, &header, &control);
    struct lh_store_extent_desc *extents = fuzz_zeroed(header.extent_count * sizeof(*extents));
    uint8_t *slot_counts = fuzz_zeroed(header.group_count);
    uint8_t *tail_files = fuzz_zeroed(header.extent_count * LH_STORE_SLOT_COUNT_MAX);
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
    int rc = lh_store_table_decode(table, &header, &control, shape.cycle, extents, slot_counts,
                                   tail_files, &err);
    LH_ASSERT(rc == 0 || (rc == err.code && err.message[0] != '\0'));
    if (rc == 0) {
        uint8_t *again = fuzz_zeroed(control.table_bytes);
        lh_store_table_encode(&shape, &control, again);
        LH_ASSERT(memcmp(again, table, header.cycle_stripes) == 0);
        lh_store_control_plan(&header, &control);
        layout_check(&shape, &control);
        free(again);
    }
    free(table);
    free(extents);
    free(slot_counts);
    free(tail_files);
    return 0;
}
