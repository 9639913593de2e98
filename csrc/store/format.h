/*
 * The on-disk format of a store, as specified in docs/store-format.md: little-endian structs with
 * asserted sizes, and the functions that encode and decode them. All functions are pure functions
 * over buffers.
 *
 * All decoders treat their input as hostile: a CRC detects accidental damage, and further checks
 * reject all other invalid input. No successfully decoded value can make a later operation overflow
 * or fail an assertion.
 *
 * Thread: any.
 */
#ifndef LH_STORE_FORMAT_H
#define LH_STORE_FORMAT_H

#include "store/extent.h"

#define LH_STORE_FILE_NAME "lohan.data"
#define LH_STORE_UUID_BYTES 16

/*
 * Fixed offsets, the same in every file. The two copies of a structure, and all superblocks, are at
 * least 64 KiB apart, so that no internal page of a drive holds two of them. Version 1 has only
 * copy 0.
 */
#define LH_STORE_COPY_COUNT_MAX 2
#define LH_STORE_HEADER_OFFSET(copy) (320 * (uint64_t)(copy) * LH_KIB)
#define LH_STORE_OWNER_OFFSET (32 * LH_KIB)
/* The superblock with sequence number s is in place s % 2. */
#define LH_STORE_SUPERBLOCK_OFFSET(number, copy)                                                   \
    ((64 + 64 * (uint64_t)(number) + 128 * (uint64_t)(copy)) * LH_KIB)
/* The witness of a commit in the other files is where file 0 has copy 0 of its superblock. */
#define LH_STORE_WITNESS_OFFSET(number) LH_STORE_SUPERBLOCK_OFFSET(number, 0)
#define LH_STORE_TABLE_OFFSET_1 (192 * LH_KIB) /* the table's offset in version 1 */
#define LH_STORE_TABLE_OFFSET (384 * LH_KIB)   /* copy 0 */
#define LH_STORE_DATA_ALIGNMENT LH_MIB
/* The last sequence number that creation writes. Commits, marks and repairs write higher ones. */
#define LH_STORE_SEQUENCE_CREATED(version) ((version) == 1 ? UINT64_C(1) : UINT64_C(2))
/* No store reaches this number, so arithmetic on sequence numbers cannot overflow. */
#define LH_STORE_SEQUENCE_MAX (UINT64_C(1) << 62)

#define LH_STORE_EXTENT_COUNT_MAX (UINT32_C(1) << 20)
#define LH_STORE_GROUP_COUNT_MAX (UINT32_C(1) << 20)
#define LH_STORE_META_BYTES_MAX (256 * LH_MIB)
#define LH_STORE_SCALAR_BYTES_MAX (64 * LH_MIB)
#define LH_STORE_STRIPE_BYTES_MAX LH_GIB
/* The maximum total size of all places, so that sizes computed from it stay far below 2^64. */
#define LH_STORE_TOTAL_BYTES_MAX (UINT64_C(1) << 60)

#define LH_STORE_HEADER_SINGLE_SLOT 1u
#define LH_STORE_SUPERBLOCK_CLEAN 1u
/* The flags of a group in a manifest: the committed slot, and whether it was ever committed. */
#define LH_STORE_GROUP_SLOT 1u
#define LH_STORE_GROUP_WRITTEN 2u
/* The flag of an extent in a manifest: its committed slot reads as zeros. */
#define LH_STORE_EXTENT_ZERO 1u

/* The header of a file. Copy 0 is the first block of the file. */
struct lh_store_header_disk {
    uint8_t magic[8]; /* "LOHANDAT" */
    uint32_t version;
    uint32_t flags;
    uint8_t uuid[LH_STORE_UUID_BYTES];
    uint32_t file_index;
    uint32_t file_count;
    uint32_t extent_count;
    uint32_t group_count;
    uint32_t cycle_stripes;
    uint32_t checksum_bytes;
    uint64_t stripe_bytes;
    uint64_t file_bytes;
    uint64_t checksum_count;
    uint64_t meta_bytes;
    uint64_t scalar_bytes_max;
    uint32_t table_crc;
    uint32_t meta_crc;
    uint8_t zeros[3988];
    uint32_t crc; /* the CRC of the bytes before it; at this offset in every version */
};
_Static_assert(sizeof(struct lh_store_header_disk) == LH_BLOCK_BYTES, "one block");
_Static_assert(offsetof(struct lh_store_header_disk, stripe_bytes) == 56, "no padding");
_Static_assert(offsetof(struct lh_store_header_disk, zeros) == 104, "no padding");

struct lh_store_superblock_disk {
    uint8_t magic[8]; /* "LOHANSUP" */
    uint32_t version;
    uint32_t flags;
    uint8_t uuid[LH_STORE_UUID_BYTES];
    uint64_t sequence;
    uint64_t step;
    uint64_t manifest_bytes;
    uint32_t manifest_area;
    uint32_t manifest_crc;
    uint64_t witness; /* 0 in version 1 */
    uint8_t zeros[4020];
    uint32_t crc;
};
_Static_assert(sizeof(struct lh_store_superblock_disk) == LH_BLOCK_BYTES, "one block");
_Static_assert(offsetof(struct lh_store_superblock_disk, zeros) == 72, "no padding");

struct lh_store_witness_disk {
    uint8_t magic[8]; /* "LOHANWIT" */
    uint32_t version;
    uint32_t zero;
    uint8_t uuid[LH_STORE_UUID_BYTES];
    uint64_t sequence;
    uint64_t step;
    uint8_t zeros[4044];
    uint32_t crc;
};
_Static_assert(sizeof(struct lh_store_witness_disk) == LH_BLOCK_BYTES, "one block");
_Static_assert(offsetof(struct lh_store_witness_disk, zeros) == 48, "no padding");

struct lh_store_extent_disk {
    uint64_t bytes;
    uint32_t group;
    uint8_t tail_files[LH_STORE_SLOT_COUNT_MAX];
    uint8_t zeros[2];
};
_Static_assert(sizeof(struct lh_store_extent_disk) == 16, "no padding");

struct lh_store_manifest_disk {
    uint8_t magic[8]; /* "LOHANMAN" */
    uint32_t version;
    uint32_t group_count;
    uint32_t extent_count;
    uint32_t zeros;
    uint8_t uuid[LH_STORE_UUID_BYTES];
    uint64_t step;
    uint64_t checksum_count;
    uint64_t scalar_bytes;
};
_Static_assert(sizeof(struct lh_store_manifest_disk) == 64, "no padding");

/* Names the process that has the file open for writing, for error messages. It has no CRC. */
struct lh_store_owner_disk {
    uint8_t magic[8]; /* "LOHANPID" */
    uint64_t pid;     /* 0: no process */
    uint8_t zeros[4080];
};
_Static_assert(sizeof(struct lh_store_owner_disk) == LH_BLOCK_BYTES, "one block");

struct lh_store_header {
    uint32_t version;
    bool is_single_slot;
    uint8_t uuid[LH_STORE_UUID_BYTES];
    uint32_t file_index;
    uint32_t file_count;
    uint32_t extent_count;
    uint32_t group_count;
    uint32_t cycle_stripes;
    uint64_t stripe_bytes;
    uint64_t file_bytes;
    uint64_t checksum_count; /* the checksums of one slot of every extent */
    uint64_t meta_bytes;
    uint64_t scalar_bytes_max;
    uint32_t table_crc;
    uint32_t meta_crc;
};

struct lh_store_superblock {
    bool is_clean;
    uint64_t sequence;
    uint64_t step;
    uint32_t manifest_area;
    uint32_t manifest_crc;
    /*
     * The sequence number of the commit whose manifest this superblock names. The witnesses of the
     * other files have this number or a higher one, unless a directory was restored from an older
     * copy. It is 0 in version 1, which has no witnesses.
     */
    uint64_t witness;
};

/* How recent the bytes of a file other than file 0 are: the commit that wrote the witness. */
struct lh_store_witness {
    uint64_t sequence;
    uint64_t step;
};

/* The offsets of the control structures, which follow from the counts in the header. */
struct lh_store_control {
    uint32_t copy_count;    /* copies of each structure: 1 in version 1, else 2 */
    bool has_witnesses;     /* whether the files other than file 0 have witnesses */
    uint64_t table_bytes;   /* size of the table, without padding */
    uint64_t group_offset;  /* offset in the table */
    uint64_t extent_offset; /* offset in the table */
    uint64_t table_offset[LH_STORE_COPY_COUNT_MAX];
    uint64_t meta_offset[LH_STORE_COPY_COUNT_MAX];
    uint64_t manifest_offset[2][LH_STORE_COPY_COUNT_MAX]; /* indexed by area and copy */
    uint64_t manifest_bytes;         /* size of one area; all of it is covered by the CRC */
    uint64_t manifest_extent_offset; /* offset of the extent flags in the area */
    uint64_t manifest_sum_offset;    /* offset of the checksums in the area */
    uint64_t manifest_scalar_offset; /* offset of the scalars in the area */
    uint64_t data_offset[LH_STORE_DIRECTORY_COUNT_MAX];
};

/* Compute the offsets of all control structures and of the data. */
void lh_store_control_plan(const struct lh_store_header *header,
                           struct lh_store_control *control_out);

/* block has LH_BLOCK_BYTES bytes. */
void lh_store_header_encode(const struct lh_store_header *header, void *block);
/* Errors: -EPROTO (newer version; the message has both), -EILSEQ, -ENODATA (all zeros). */
int lh_store_header_decode(const void *block, struct lh_store_header *header_out,
                           struct lh_error *err) LH_MUST_CHECK;

/* block has LH_BLOCK_BYTES bytes; header gives the version, the uuid and the manifest's size. */
void lh_store_superblock_encode(const struct lh_store_superblock *superblock,
                                const struct lh_store_header *header, void *block);
/* Errors: -ENODATA (all zeros), -EILSEQ. */
int lh_store_superblock_decode(const void *block, const struct lh_store_header *header,
                               struct lh_store_superblock *superblock_out, struct lh_error *err)
    LH_MUST_CHECK;

/* block has LH_BLOCK_BYTES bytes. */
void lh_store_witness_encode(const struct lh_store_witness *witness,
                             const struct lh_store_header *header, void *block);
/* Errors: -EILSEQ. */
int lh_store_witness_decode(const void *block, const struct lh_store_header *header,
                            struct lh_store_witness *witness_out, struct lh_error *err)
    LH_MUST_CHECK;

/*
 * Whether a block in the place of a superblock or witness holds more than creation can have left,
 * torn or complete. It then shows that something was committed to a file without a valid header.
 */
bool lh_store_is_past_creation(const void *block);

/* table has control->table_bytes bytes, which must be zeros. */
void lh_store_table_encode(const struct lh_store_shape *shape,
                           const struct lh_store_control *control, void *table);
/*
 * Fill the arrays, which have the sizes in the header, and cycle (LH_STORE_CYCLE_STRIPES_MAX).
 *
 * Errors: -EILSEQ.
 */
int lh_store_table_decode(const void *table, const struct lh_store_header *header,
                          const struct lh_store_control *control, uint8_t *cycle,
                          struct lh_store_extent_desc *extents, uint8_t *slot_counts,
                          uint8_t *tail_files, struct lh_error *err) LH_MUST_CHECK;

static inline uint64_t lh_store_checksum_count(uint64_t bytes)
{
    return lh_div_ceil(bytes, LH_CHECKSUM_BYTES);
}

/* Encode the head of a manifest. The caller writes what follows at the offsets of the control. */
void lh_store_manifest_encode(const struct lh_store_header *header, uint64_t step,
                              uint64_t scalar_bytes, void *manifest);
/*
 * Check a complete manifest against its superblock and the slot counts of the groups.
 *
 * Errors: -EILSEQ.
 */
int lh_store_manifest_decode(const void *manifest, const struct lh_store_header *header,
                             const struct lh_store_control *control,
                             const struct lh_store_superblock *superblock,
                             const uint8_t *slot_counts, uint64_t *scalar_bytes_out,
                             struct lh_error *err) LH_MUST_CHECK;

#endif
