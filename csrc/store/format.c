/* Encoding and decoding of a store's control structures: see format.h. */
#include "store/format.h"

#include <endian.h>
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"

/* The CRC of a block is its last four bytes and covers the others. */
#define BLOCK_CRC_BYTES (LH_BLOCK_BYTES - sizeof(uint32_t))

static bool is_zero_block(const void *block)
{
    const uint8_t *bytes = block;
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, LH_BLOCK_BYTES - 1) == 0;
}

void lh_store_control_plan(const struct lh_store_header *header,
                           struct lh_store_control *control_out)
{
    struct lh_store_control *control = control_out;
    LH_ASSERT(header->version >= 1 && header->version <= LH_STORE_FORMAT_VERSION);
    LH_ASSERT(header->file_count >= 1 && header->file_count <= LH_STORE_DIRECTORY_COUNT_MAX);
    memset(control, 0, sizeof(*control));
    control->copy_count = header->version == 1 ? 1 : LH_STORE_COPY_COUNT_MAX;
    control->has_witnesses = header->version > 1;
    control->group_offset = lh_align_up(header->cycle_stripes, 8);
    control->extent_offset = control->group_offset + lh_align_up(header->group_count, 8);
    control->table_bytes = control->extent_offset +
                           header->extent_count * (uint64_t)sizeof(struct lh_store_extent_disk);
    control->manifest_extent_offset =
        sizeof(struct lh_store_manifest_disk) + lh_align_up(header->group_count, 8);
    control->manifest_sum_offset =
        control->manifest_extent_offset + lh_align_up(header->extent_count, 8);
    control->manifest_scalar_offset =
        control->manifest_sum_offset +
        lh_align_up(header->checksum_count * (uint64_t)sizeof(uint32_t), 8);
    control->manifest_bytes =
        lh_align_up(control->manifest_scalar_offset + header->scalar_bytes_max, LH_BLOCK_BYTES);

    /* All of copy 0 lies before all of copy 1, so the two copies of a block are never adjacent. */
    uint64_t end = header->version == 1 ? LH_STORE_TABLE_OFFSET_1 : LH_STORE_TABLE_OFFSET;
    for (uint32_t copy = 0; copy < control->copy_count; copy++) {
        control->table_offset[copy] = end;
        control->meta_offset[copy] = end + lh_align_up(control->table_bytes, LH_BLOCK_BYTES);
        end = lh_align_up(control->meta_offset[copy] + header->meta_bytes, 64 * LH_KIB);
        LH_ASSERT(control->table_offset[copy] + control->table_bytes <= control->meta_offset[copy]);
        LH_ASSERT(control->meta_offset[copy] + header->meta_bytes <= end);
        for (uint32_t area = 0; area < LH_COUNT_OF(control->manifest_offset); area++) {
            control->manifest_offset[area][copy] = end;
            end = lh_align_up(end + control->manifest_bytes, 64 * LH_KIB);
        }
    }
    control->data_offset[0] = lh_align_up(end, LH_STORE_DATA_ALIGNMENT);
    for (uint32_t file = 1; file < header->file_count; file++)
        control->data_offset[file] = LH_STORE_DATA_ALIGNMENT;
}

void lh_store_header_encode(const struct lh_store_header *header, void *block)
{
    struct lh_store_header_disk *disk = block;
    memset(disk, 0, sizeof(*disk));
    memcpy(disk->magic, "LOHANDAT", sizeof(disk->magic));
    disk->version = htole32(header->version);
    disk->flags = htole32(header->is_single_slot ? LH_STORE_HEADER_SINGLE_SLOT : 0);
    memcpy(disk->uuid, header->uuid, sizeof(disk->uuid));
    disk->file_index = htole32(header->file_index);
    disk->file_count = htole32(header->file_count);
    disk->extent_count = htole32(header->extent_count);
    disk->group_count = htole32(header->group_count);
    disk->cycle_stripes = htole32(header->cycle_stripes);
    disk->checksum_bytes = htole32((uint32_t)LH_CHECKSUM_BYTES);
    disk->stripe_bytes = htole64(header->stripe_bytes);
    disk->file_bytes = htole64(header->file_bytes);
    disk->checksum_count = htole64(header->checksum_count);
    disk->meta_bytes = htole64(header->meta_bytes);
    disk->scalar_bytes_max = htole64(header->scalar_bytes_max);
    disk->table_crc = htole32(header->table_crc);
    disk->meta_crc = htole32(header->meta_crc);
    disk->crc = htole32(lh_crc32c(0, disk, BLOCK_CRC_BYTES));
}

static bool is_header_possible(const struct lh_store_header *header)
{
    return header->file_count >= 1 && header->file_count <= LH_STORE_DIRECTORY_COUNT_MAX &&
           header->file_index < header->file_count && header->extent_count >= 1 &&
           header->extent_count <= LH_STORE_EXTENT_COUNT_MAX && header->group_count >= 1 &&
           header->group_count <= LH_STORE_GROUP_COUNT_MAX && header->cycle_stripes >= 1 &&
           header->cycle_stripes <= LH_STORE_CYCLE_STRIPES_MAX && header->stripe_bytes > 0 &&
           lh_is_aligned(header->stripe_bytes, LH_CHECKSUM_BYTES) &&
           header->stripe_bytes <= LH_STORE_STRIPE_BYTES_MAX &&
           /* The owner's block is written before the rest of the file is checked. */
           header->file_bytes >= LH_STORE_OWNER_OFFSET + LH_BLOCK_BYTES &&
           header->checksum_count <=
               LH_STORE_TOTAL_BYTES_MAX / LH_CHECKSUM_BYTES + LH_STORE_EXTENT_COUNT_MAX &&
           header->meta_bytes <= LH_STORE_META_BYTES_MAX &&
           header->scalar_bytes_max <= LH_STORE_SCALAR_BYTES_MAX;
}

int lh_store_header_decode(const void *block, struct lh_store_header *header_out,
                           struct lh_error *err)
{
    struct lh_store_header_disk disk;
    memcpy(&disk, block, sizeof(disk));
    memset(header_out, 0, sizeof(*header_out));
    if (is_zero_block(block))
        return lh_error_set(err, -ENODATA, "the header is all zeros");
    if (memcmp(disk.magic, "LOHANDAT", sizeof(disk.magic)) != 0)
        return lh_error_set(err, -EILSEQ, "the header does not start with LOHANDAT");
    uint32_t crc = lh_crc32c(0, &disk, BLOCK_CRC_BYTES);
    if (crc != le32toh(disk.crc))
        return lh_error_set(err, -EILSEQ,
                            "the header has checksum %08" PRIx32 ", but records %08" PRIx32, crc,
                            le32toh(disk.crc));
    uint32_t version = le32toh(disk.version);
    if (version > LH_STORE_FORMAT_VERSION)
        return lh_error_set(err, -EPROTO,
                            "store format version %" PRIu32 " is newer than version %d, the "
                            "newest that this build of lohan reads; use a newer lohan",
                            version, LH_STORE_FORMAT_VERSION);
    *header_out = (struct lh_store_header){
        .version = version,
        .is_single_slot = (le32toh(disk.flags) & LH_STORE_HEADER_SINGLE_SLOT) != 0,
        .file_index = le32toh(disk.file_index),
        .file_count = le32toh(disk.file_count),
        .extent_count = le32toh(disk.extent_count),
        .group_count = le32toh(disk.group_count),
        .cycle_stripes = le32toh(disk.cycle_stripes),
        .stripe_bytes = le64toh(disk.stripe_bytes),
        .file_bytes = le64toh(disk.file_bytes),
        .checksum_count = le64toh(disk.checksum_count),
        .meta_bytes = le64toh(disk.meta_bytes),
        .scalar_bytes_max = le64toh(disk.scalar_bytes_max),
        .table_crc = le32toh(disk.table_crc),
        .meta_crc = le32toh(disk.meta_crc),
    };
    memcpy(header_out->uuid, disk.uuid, sizeof(disk.uuid));
    if (version == 0 || le32toh(disk.checksum_bytes) != LH_CHECKSUM_BYTES ||
        !is_header_possible(header_out))
        return lh_error_set(err, -EILSEQ,
                            "the header holds values that no store can have (version "
                            "%" PRIu32 ", file %" PRIu32 " of %" PRIu32 ", %" PRIu32
                            " extents, %" PRIu32 " groups, %" PRIu64 " bytes)",
                            version, header_out->file_index, header_out->file_count,
                            header_out->extent_count, header_out->group_count,
                            header_out->file_bytes);
    return 0;
}

void lh_store_superblock_encode(const struct lh_store_superblock *superblock,
                                const struct lh_store_header *header, void *block)
{
    struct lh_store_control control;
    lh_store_control_plan(header, &control);
    struct lh_store_superblock_disk *disk = block;
    LH_ASSERT(superblock->manifest_area < LH_COUNT_OF(control.manifest_offset));
    memset(disk, 0, sizeof(*disk));
    memcpy(disk->magic, "LOHANSUP", sizeof(disk->magic));
    disk->version = htole32(header->version);
    disk->flags = htole32(superblock->is_clean ? LH_STORE_SUPERBLOCK_CLEAN : 0);
    memcpy(disk->uuid, header->uuid, sizeof(disk->uuid));
    disk->sequence = htole64(superblock->sequence);
    disk->step = htole64(superblock->step);
    disk->manifest_bytes = htole64(control.manifest_bytes);
    disk->manifest_area = htole32(superblock->manifest_area);
    disk->manifest_crc = htole32(superblock->manifest_crc);
    disk->witness = htole64(superblock->witness);
    disk->crc = htole32(lh_crc32c(0, disk, BLOCK_CRC_BYTES));
}

int lh_store_superblock_decode(const void *block, const struct lh_store_header *header,
                               struct lh_store_superblock *superblock_out, struct lh_error *err)
{
    struct lh_store_superblock_disk disk;
    memcpy(&disk, block, sizeof(disk));
    memset(superblock_out, 0, sizeof(*superblock_out));
    if (is_zero_block(block))
        return lh_error_set(err, -ENODATA, "it is all zeros");
    if (memcmp(disk.magic, "LOHANSUP", sizeof(disk.magic)) != 0)
        return lh_error_set(err, -EILSEQ, "it does not start with LOHANSUP");
    uint32_t crc = lh_crc32c(0, &disk, BLOCK_CRC_BYTES);
    if (crc != le32toh(disk.crc))
        return lh_error_set(err, -EILSEQ, "it has checksum %08" PRIx32 ", but records %08" PRIx32,
                            crc, le32toh(disk.crc));
    struct lh_store_control control;
    lh_store_control_plan(header, &control);
    *superblock_out = (struct lh_store_superblock){
        .is_clean = (le32toh(disk.flags) & LH_STORE_SUPERBLOCK_CLEAN) != 0,
        .sequence = le64toh(disk.sequence),
        .step = le64toh(disk.step),
        .manifest_area = le32toh(disk.manifest_area),
        .manifest_crc = le32toh(disk.manifest_crc),
        .witness = le64toh(disk.witness),
    };
    if (memcmp(disk.uuid, header->uuid, sizeof(disk.uuid)) != 0 ||
        le32toh(disk.version) != header->version || superblock_out->manifest_area > 1 ||
        le64toh(disk.manifest_bytes) != control.manifest_bytes)
        return lh_error_set(err, -EILSEQ, "it does not match this store's header");
    if (superblock_out->sequence < 1 || superblock_out->sequence > LH_STORE_SEQUENCE_MAX ||
        superblock_out->witness > superblock_out->sequence ||
        (superblock_out->witness != 0) != control.has_witnesses)
        return lh_error_set(err, -EILSEQ,
                            "its sequence number %" PRIu64 " (witness %" PRIu64
                            ") is one that no store can have",
                            superblock_out->sequence, superblock_out->witness);
    return 0;
}

void lh_store_witness_encode(const struct lh_store_witness *witness,
                             const struct lh_store_header *header, void *block)
{
    struct lh_store_witness_disk *disk = block;
    LH_ASSERT(witness->sequence >= 1 && witness->sequence <= LH_STORE_SEQUENCE_MAX);
    memset(disk, 0, sizeof(*disk));
    memcpy(disk->magic, "LOHANWIT", sizeof(disk->magic));
    disk->version = htole32(header->version);
    memcpy(disk->uuid, header->uuid, sizeof(disk->uuid));
    disk->sequence = htole64(witness->sequence);
    disk->step = htole64(witness->step);
    disk->crc = htole32(lh_crc32c(0, disk, BLOCK_CRC_BYTES));
}

int lh_store_witness_decode(const void *block, const struct lh_store_header *header,
                            struct lh_store_witness *witness_out, struct lh_error *err)
{
    struct lh_store_witness_disk disk;
    memcpy(&disk, block, sizeof(disk));
    memset(witness_out, 0, sizeof(*witness_out));
    if (memcmp(disk.magic, "LOHANWIT", sizeof(disk.magic)) != 0)
        return lh_error_set(err, -EILSEQ, "it does not start with LOHANWIT");
    uint32_t crc = lh_crc32c(0, &disk, BLOCK_CRC_BYTES);
    if (crc != le32toh(disk.crc))
        return lh_error_set(err, -EILSEQ, "it has checksum %08" PRIx32 ", but records %08" PRIx32,
                            crc, le32toh(disk.crc));
    uint64_t sequence = le64toh(disk.sequence);
    if (memcmp(disk.uuid, header->uuid, sizeof(disk.uuid)) != 0 ||
        le32toh(disk.version) != header->version || sequence < 1 ||
        sequence > LH_STORE_SEQUENCE_MAX)
        return lh_error_set(err, -EILSEQ, "it does not match this store's header");
    *witness_out = (struct lh_store_witness){.sequence = sequence, .step = le64toh(disk.step)};
    return 0;
}

bool lh_store_is_past_creation(const void *block)
{
    struct lh_store_superblock_disk superblock;
    struct lh_store_witness_disk witness;
    memcpy(&superblock, block, sizeof(superblock));
    memcpy(&witness, block, sizeof(witness));
    /* A blank magic: creation was interrupted before it wrote the first sector of this block. */
    bool is_blank = superblock.magic[0] == 0 && memcmp(superblock.magic, superblock.magic + 1,
                                                       sizeof(superblock.magic) - 1) == 0;
    if (is_blank)
        return false;
    uint64_t sequence = UINT64_MAX;
    if (memcmp(superblock.magic, "LOHANSUP", sizeof(superblock.magic)) == 0)
        sequence = le64toh(superblock.sequence);
    if (memcmp(witness.magic, "LOHANWIT", sizeof(witness.magic)) == 0)
        sequence = le64toh(witness.sequence);
    return sequence > LH_STORE_SEQUENCE_CREATED(le32toh(superblock.version));
}

void lh_store_table_encode(const struct lh_store_shape *shape,
                           const struct lh_store_control *control, void *table)
{
    uint8_t *bytes = table;
    LH_ASSERT(shape->cycle_stripes <= control->group_offset);
    LH_ASSERT(control->group_offset + shape->group_count <= control->extent_offset);
    memcpy(bytes, shape->cycle, shape->cycle_stripes);
    memcpy(bytes + control->group_offset, shape->slot_counts, shape->group_count);
    for (uint32_t extent = 0; extent < shape->extent_count; extent++) {
        const uint8_t *tail_files = shape->tail_files + lh_store_place_index(extent, 0);
        struct lh_store_extent_disk disk = {
            .bytes = htole64(shape->extents[extent].bytes),
            .group = htole32(shape->extents[extent].group),
            .tail_files = {tail_files[0], tail_files[1]},
        };
        LH_ASSERT(control->extent_offset + (extent + 1) * sizeof(disk) <= control->table_bytes);
        memcpy(bytes + control->extent_offset + extent * sizeof(disk), &disk, sizeof(disk));
    }
}

int lh_store_table_decode(const void *table, const struct lh_store_header *header,
                          const struct lh_store_control *control, uint8_t *cycle,
                          struct lh_store_extent_desc *extents, uint8_t *slot_counts,
                          uint8_t *tail_files, struct lh_error *err)
{
    const uint8_t *bytes = table;
    LH_ASSERT(header->cycle_stripes <= LH_STORE_CYCLE_STRIPES_MAX);
    LH_ASSERT(control->group_offset + header->group_count <= control->extent_offset);
    memset(cycle, 0, LH_STORE_CYCLE_STRIPES_MAX);
    memcpy(cycle, bytes, header->cycle_stripes);
    for (uint32_t stripe = 0; stripe < header->cycle_stripes; stripe++) {
        if (cycle[stripe] >= header->file_count)
            return lh_error_set(err, -EILSEQ,
                                "the table puts stripe %" PRIu32
                                " on file %u, but there are only %u files",
                                stripe, cycle[stripe], header->file_count);
    }
    memcpy(slot_counts, bytes + control->group_offset, header->group_count);
    for (uint32_t group = 0; group < header->group_count; group++) {
        uint32_t slot_max = header->is_single_slot ? 1 : LH_STORE_SLOT_COUNT_MAX;
        if (slot_counts[group] < 1 || slot_counts[group] > slot_max)
            return lh_error_set(err, -EILSEQ,
                                "the table gives group %" PRIu32 " an invalid number of slots: %u",
                                group, slot_counts[group]);
    }
    uint64_t total_bytes = 0;
    uint64_t checksum_count = 0;
    for (uint32_t extent = 0; extent < header->extent_count; extent++) {
        struct lh_store_extent_disk disk;
        memcpy(&disk, bytes + control->extent_offset + extent * sizeof(disk), sizeof(disk));
        extents[extent].bytes = le64toh(disk.bytes);
        extents[extent].group = le32toh(disk.group);
        memcpy(&tail_files[lh_store_place_index(extent, 0)], disk.tail_files,
               sizeof(disk.tail_files));
        uint64_t extent_bytes = extents[extent].bytes;
        if (extent_bytes == 0 || !lh_is_aligned(extent_bytes, LH_BLOCK_BYTES) ||
            extent_bytes > LH_STORE_TOTAL_BYTES_MAX ||
            extents[extent].group >= header->group_count ||
            disk.tail_files[0] >= header->file_count || disk.tail_files[1] >= header->file_count)
            return lh_error_set(err, -EILSEQ, "extent %" PRIu32 " in the table is invalid", extent);
        checksum_count += lh_store_checksum_count(extent_bytes);
        total_bytes += extent_bytes * slot_counts[extents[extent].group];
        if (total_bytes > LH_STORE_TOTAL_BYTES_MAX)
            return lh_error_set(err, -EILSEQ, "the table's extents exceed 2^60 bytes");
    }
    if (checksum_count != header->checksum_count)
        return lh_error_set(err, -EILSEQ,
                            "the table needs %" PRIu64 " checksums, but the header counts %" PRIu64,
                            checksum_count, header->checksum_count);
    return 0;
}

void lh_store_manifest_encode(const struct lh_store_header *header, uint64_t step,
                              uint64_t scalar_bytes, void *manifest)
{
    LH_ASSERT(scalar_bytes <= header->scalar_bytes_max);
    struct lh_store_manifest_disk disk = {
        .version = htole32(header->version),
        .group_count = htole32(header->group_count),
        .extent_count = htole32(header->extent_count),
        .step = htole64(step),
        .checksum_count = htole64(header->checksum_count),
        .scalar_bytes = htole64(scalar_bytes),
    };
    memcpy(disk.magic, "LOHANMAN", sizeof(disk.magic));
    memcpy(disk.uuid, header->uuid, sizeof(disk.uuid));
    memcpy(manifest, &disk, sizeof(disk));
}

int lh_store_manifest_decode(const void *manifest, const struct lh_store_header *header,
                             const struct lh_store_control *control,
                             const struct lh_store_superblock *superblock,
                             const uint8_t *slot_counts, uint64_t *scalar_bytes_out,
                             struct lh_error *err)
{
    *scalar_bytes_out = 0;
    LH_ASSERT(control->manifest_scalar_offset + header->scalar_bytes_max <=
              control->manifest_bytes);
    uint32_t crc = lh_crc32c(0, manifest, control->manifest_bytes);
    if (crc != superblock->manifest_crc)
        return lh_error_set(err, -EILSEQ,
                            "it has checksum %08" PRIx32 ", but its superblock says %08" PRIx32,
                            crc, superblock->manifest_crc);
    struct lh_store_manifest_disk disk;
    memcpy(&disk, manifest, sizeof(disk));
    uint64_t scalar_bytes = le64toh(disk.scalar_bytes);
    if (memcmp(disk.magic, "LOHANMAN", sizeof(disk.magic)) != 0 ||
        le32toh(disk.version) != header->version ||
        le32toh(disk.group_count) != header->group_count ||
        le32toh(disk.extent_count) != header->extent_count ||
        memcmp(disk.uuid, header->uuid, sizeof(disk.uuid)) != 0 ||
        le64toh(disk.step) != superblock->step ||
        le64toh(disk.checksum_count) != header->checksum_count ||
        scalar_bytes > header->scalar_bytes_max)
        return lh_error_set(err, -EILSEQ, "it does not match this store's header");
    const uint8_t *flags = (const uint8_t *)manifest + sizeof(disk);
    for (uint32_t group = 0; group < header->group_count; group++) {
        LH_ASSERT(slot_counts[group] >= 1 && slot_counts[group] <= LH_STORE_SLOT_COUNT_MAX);
        if ((flags[group] & LH_STORE_GROUP_SLOT) >= slot_counts[group])
            return lh_error_set(err, -EILSEQ,
                                "it names slot %u of group %" PRIu32 ", which has only %u",
                                flags[group] & LH_STORE_GROUP_SLOT, group, slot_counts[group]);
    }
    *scalar_bytes_out = scalar_bytes;
    return 0;
}
