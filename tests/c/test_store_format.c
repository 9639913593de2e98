/* Test the control structures on disk: known bytes, and mutations that must be rejected. */
#include "../fuzz/fuzz_store_header.c"
#include "lh_test.h"

#define EXTENT_COUNT 5
#define GROUP_COUNT 2

static struct lh_store_header header = {
    .version = LH_STORE_FORMAT_VERSION,
    .uuid = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
    .file_count = 3,
    .extent_count = EXTENT_COUNT,
    .group_count = GROUP_COUNT,
    .stripe_bytes = LH_STORE_STRIPE_BYTES,
    .file_bytes = 77 * LH_BLOCK_BYTES,
    .meta_bytes = 1000,
    .scalar_bytes_max = 300,
    .table_crc = 0x11223344,
    .meta_crc = 0x55667788,
};
static struct lh_store_extent_desc extents[EXTENT_COUNT] = {
    {LH_BLOCK_BYTES, 0}, {3 * LH_MIB, 1}, {9 * LH_MIB, 0}, {2 * LH_MIB, 0}, {LH_BLOCK_BYTES, 1}};
static const uint8_t slot_counts[GROUP_COUNT] = {2, 1};
static uint8_t tail_files[EXTENT_COUNT * LH_STORE_SLOT_COUNT_MAX];

/* A complete, valid input of the fuzz driver. */
static uint8_t *seed_make(size_t *size_out)
{
    struct lh_store_shape shape = {
        .file_count = header.file_count,
        .extent_count = EXTENT_COUNT,
        .group_count = GROUP_COUNT,
        .stripe_bytes = header.stripe_bytes,
        .extents = extents,
        .slot_counts = slot_counts,
        .tail_files = tail_files,
    };
    struct lh_store_control control;
    shape.cycle_stripes = lh_store_cycle_plan((const uint64_t[]){3, 2, 1}, 3, shape.cycle);
    lh_store_tails_plan(&shape, tail_files);
    header.cycle_stripes = shape.cycle_stripes;
    header.checksum_count = 1 + 3 + 9 + 2 + 1;
    lh_store_control_plan(&header, &control);
    *size_out = 2 * LH_BLOCK_BYTES + control.table_bytes + control.manifest_bytes;
    uint8_t *seed = calloc(1, *size_out);
    LH_CHECK(seed != NULL);
    uint8_t *table = seed + LH_BLOCK_BYTES;
    uint8_t *superblock = table + control.table_bytes;
    lh_store_header_encode(&header, seed);
    lh_store_table_encode(&shape, &control, table);
    lh_store_manifest_encode(&header, 5, 299, superblock + LH_BLOCK_BYTES);
    struct lh_store_superblock values = {
        .sequence = 9, .step = 5, .manifest_area = 1, .witness = 8};
    values.manifest_crc = lh_crc32c(0, superblock + LH_BLOCK_BYTES, control.manifest_bytes);
    lh_store_superblock_encode(&values, &header, superblock);
    return seed;
}

static void test_round_trip(const uint8_t *seed)
{
    lh_test_name(
        "what was encoded decodes to the same, and the first bytes are the documented ones");
    struct lh_store_header decoded;
    struct lh_store_control control;
    struct lh_store_superblock superblock;
    struct lh_store_extent_desc found[EXTENT_COUNT];
    uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];
    uint8_t found_slots[GROUP_COUNT];
    uint8_t found_tails[sizeof(tail_files)];
    uint64_t scalar_bytes = 0;
    LH_CHECK(memcmp(seed, "LOHANDAT\2\0\0\0\0\0\0\0\1\2\3\4", 20) == 0);
    LH_CHECK(lh_store_header_decode(seed, &decoded, NULL) == 0);
    LH_CHECK(memcmp(decoded.uuid, header.uuid, sizeof(header.uuid)) == 0);
    LH_CHECK(decoded.file_bytes == header.file_bytes && decoded.meta_crc == header.meta_crc);
    lh_store_control_plan(&decoded, &control);
    LH_CHECK(control.data_offset[0] == LH_MIB && control.meta_offset[0] == 388 * LH_KIB);
    const uint8_t *table = seed + LH_BLOCK_BYTES;
    LH_CHECK(lh_store_table_decode(table, &decoded, &control, cycle, found, found_slots,
                                   found_tails, NULL) == 0);
    LH_CHECK(memcmp(found_slots, slot_counts, sizeof(slot_counts)) == 0);
    LH_CHECK(memcmp(found_tails, tail_files, sizeof(tail_files)) == 0);
    for (uint32_t extent = 0; extent < EXTENT_COUNT; extent++)
        LH_CHECK(found[extent].bytes == extents[extent].bytes &&
                 found[extent].group == extents[extent].group);
    const uint8_t *block = table + control.table_bytes;
    LH_CHECK(lh_store_superblock_decode(block, &decoded, &superblock, NULL) == 0);
    LH_CHECK(superblock.sequence == 9 && superblock.step == 5 && !superblock.is_clean);
    LH_CHECK(lh_store_manifest_decode(block + LH_BLOCK_BYTES, &decoded, &control, &superblock,
                                      slot_counts, &scalar_bytes, NULL) == 0);
    LH_CHECK(scalar_bytes == 299);
}

static void test_file_bytes(void)
{
    lh_test_name("a header of a file that ends before the owner's block is refused");
    const uint64_t least = LH_STORE_OWNER_OFFSET + LH_BLOCK_BYTES;
    uint8_t block[LH_BLOCK_BYTES];
    struct lh_store_header decoded;
    struct lh_store_header small = header;
    small.file_bytes = least;
    lh_store_header_encode(&small, block);
    LH_CHECK(lh_store_header_decode(block, &decoded, NULL) == 0);
    small.file_bytes = least - 1;
    lh_store_header_encode(&small, block);
    struct lh_error err = {0};
    LH_CHECK(lh_store_header_decode(block, &decoded, &err) == -EILSEQ);
    LH_CHECK(strstr(err.message, "36863 bytes") != NULL);
}

static void test_manifest_checksum(const uint8_t *seed, size_t size)
{
    lh_test_name("a manifest in which any single byte was changed is refused");
    struct lh_store_control control;
    struct lh_store_superblock superblock;
    uint64_t scalar_bytes = 0;
    lh_store_control_plan(&header, &control);
    uint8_t *copy = malloc(size);
    LH_CHECK(copy != NULL);
    memcpy(copy, seed, size);
    uint8_t *block = copy + LH_BLOCK_BYTES + control.table_bytes;
    uint8_t *manifest = block + LH_BLOCK_BYTES;
    LH_CHECK(lh_store_superblock_decode(block, &header, &superblock, NULL) == 0);
    for (uint64_t at = 0; at < control.manifest_bytes; at++) {
        manifest[at] ^= 1;
        LH_CHECK(lh_store_manifest_decode(manifest, &header, &control, &superblock, slot_counts,
                                          &scalar_bytes, NULL) == -EILSEQ);
        manifest[at] ^= 1;
    }
    LH_CHECK(lh_store_manifest_decode(manifest, &header, &control, &superblock, slot_counts,
                                      &scalar_bytes, NULL) == 0);
    free(copy);
}

static void test_sequences(void)
{
    lh_test_name(
        "sequence numbers that no store gets to are refused, and those below them are not");
    static const struct {
        uint64_t sequence;
        uint64_t witness;
        bool is_possible;
    } cases[] = {
        {1, 1, true},
        {LH_STORE_SEQUENCE_MAX, 7, true},
        {0, 0, false},
        {5, 0, false},
        {5, 6, false},
        {LH_STORE_SEQUENCE_MAX + 1, 7, false},
        {UINT64_MAX - 1, 7, false},
        {UINT64_MAX, 7, false},
    };
    uint8_t block[LH_BLOCK_BYTES];
    struct lh_store_superblock superblock;
    struct lh_store_witness witness;
    for (uint32_t index = 0; index < LH_COUNT_OF(cases); index++) {
        struct lh_store_superblock values = {.sequence = cases[index].sequence,
                                             .witness = cases[index].witness};
        lh_store_superblock_encode(&values, &header, block);
        int rc = lh_store_superblock_decode(block, &header, &superblock, NULL);
        LH_CHECK(rc == (cases[index].is_possible ? 0 : -EILSEQ));
    }

    lh_test_name("a witness decodes to what it was, and not as another store's");
    struct lh_store_header other = header;
    other.uuid[3] ^= 1;
    lh_store_witness_encode(&(struct lh_store_witness){.sequence = 9, .step = 4}, &header, block);
    LH_CHECK(lh_store_witness_decode(block, &header, &witness, NULL) == 0);
    LH_CHECK(witness.sequence == 9 && witness.step == 4);
    LH_CHECK(lh_store_witness_decode(block, &other, &witness, NULL) == -EILSEQ);
    block[50] ^= 1;
    LH_CHECK(lh_store_witness_decode(block, &header, &witness, NULL) == -EILSEQ);
}

static void test_mutations(const uint8_t *seed, size_t size)
{
    lh_test_name("mutations with right checksums are refused or placed, and break nothing");
    static const uint64_t wild[] = {
        0,      1,    2,    0x7fffffff,        0xffffffff,        UINT64_MAX, 4096, LH_MIB,
        LH_GIB, 1024, 1025, UINT64_C(1) << 60, UINT64_C(1) << 63, 16,         17};
    uint64_t state = 1;
    uint8_t *mutant = malloc(size);
    LH_CHECK(mutant != NULL);
    for (int round = 0; round < 30000; round++) {
        memcpy(mutant, seed, size);
        uint64_t count = 1 + lh_test_random(&state) % 4;
        for (uint64_t change = 0; change < count; change++) {
            /* Most of the bytes are padding: aim at the fields in front of it. */
            uint64_t offset = lh_test_random(&state) % 110;
            uint64_t where = lh_test_random(&state) % 3;
            offset += where == 1 ? LH_BLOCK_BYTES : where == 2 ? LH_BLOCK_BYTES + 96 : 0;
            uint64_t value = wild[lh_test_random(&state) % LH_COUNT_OF(wild)];
            if (lh_test_random(&state) % 2)
                mutant[offset] = (uint8_t)lh_test_random(&state);
            else
                memcpy(mutant + offset / 4 * 4, &value, 1 + lh_test_random(&state) % 8);
        }
        LLVMFuzzerTestOneInput(mutant, lh_test_random(&state) % 8 ? size : size / 2);
    }
    free(mutant);
}

int main(void)
{
    size_t size = 0;
    uint8_t *seed = seed_make(&size);
    test_round_trip(seed);
    test_manifest_checksum(seed, size);
    LH_CHECK(LLVMFuzzerTestOneInput(seed, size) == 0);
    test_file_bytes();
    test_sequences();
    test_mutations(seed, size);
    free(seed);
    return 0;
}
