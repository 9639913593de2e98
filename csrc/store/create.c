/*
 * Creates a store.
 *
 * The header of file 0 is written last, when everything else is durable. A store whose creation was
 * interrupted therefore lacks this header, and cannot be mistaken for a complete one.
 */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/store_impl.h"

static int opts_check_extents(const struct lh_store_opts *opts, struct lh_error *err)
{
    uint64_t total_bytes = 0;
    LH_ASSERT(opts->extents != NULL && opts->groups != NULL);
    for (uint32_t group = 0; group < opts->group_count; group++) {
        uint32_t slot_count = opts->groups[group].slot_count;
        if (slot_count < 1 || slot_count > LH_STORE_SLOT_COUNT_MAX)
            return lh_error_set(err, -EINVAL,
                                "group %" PRIu32 " has %" PRIu32 " slots; it must have 1 or 2",
                                group, slot_count);
    }
    for (uint32_t extent = 0; extent < opts->extent_count; extent++) {
        const struct lh_store_extent_desc *desc = &opts->extents[extent];
        if (desc->bytes == 0 || !lh_is_aligned(desc->bytes, LH_BLOCK_BYTES) ||
            desc->bytes > LH_STORE_TOTAL_BYTES_MAX)
            return lh_error_set(err, -EINVAL,
                                "extent %" PRIu32 " has %" PRIu64
                                " bytes; its size must be a positive multiple of %" PRIu64
                                " of at most 2^60 bytes",
                                extent, desc->bytes, LH_BLOCK_BYTES);
        if (desc->group >= opts->group_count)
            return lh_error_set(err, -EINVAL,
                                "extent %" PRIu32 " is in group %" PRIu32 ", but only %" PRIu32
                                " groups exist",
                                extent, desc->group, opts->group_count);
        total_bytes += desc->bytes * (opts->single_slot ? 1 : opts->groups[desc->group].slot_count);
        if (total_bytes > LH_STORE_TOTAL_BYTES_MAX)
            return lh_error_set(err, -EINVAL, "the extents have more than 2^60 bytes in total");
    }
    return 0;
}

static int opts_check(const struct lh_store_opts *opts, struct lh_error *err)
{
    if (opts->directory_count < 1 || opts->directory_count > LH_STORE_DIRECTORY_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "%" PRIu32 " directories: a store has 1 to %d",
                            opts->directory_count, LH_STORE_DIRECTORY_COUNT_MAX);
    for (uint32_t file = 0; opts->weights != NULL && file < opts->directory_count; file++) {
        if (opts->weights[file] == 0 || opts->weights[file] > LH_STORE_WEIGHT_MAX)
            return lh_error_set(err, -EINVAL,
                                "the weight of directory %" PRIu32 " is %" PRIu64
                                "; it must be between 1 and 2^56",
                                file, opts->weights[file]);
    }
    if (opts->extent_count < 1 || opts->extent_count > LH_STORE_EXTENT_COUNT_MAX ||
        opts->group_count < 1 || opts->group_count > LH_STORE_GROUP_COUNT_MAX)
        return lh_error_set(err, -EINVAL,
                            "%" PRIu32 " extents in %" PRIu32
                            " groups: each count must be between 1 and %" PRIu32,
                            opts->extent_count, opts->group_count, LH_STORE_EXTENT_COUNT_MAX);
    if (opts->meta_bytes > LH_STORE_META_BYTES_MAX ||
        opts->scalar_bytes_max > LH_STORE_SCALAR_BYTES_MAX)
        return lh_error_set(err, -EINVAL,
                            "meta has %" PRIu64 " bytes and scalars up to %" PRIu64
                            ": the maxima are %" PRIu64 " and %" PRIu64,
                            opts->meta_bytes, opts->scalar_bytes_max, LH_STORE_META_BYTES_MAX,
                            LH_STORE_SCALAR_BYTES_MAX);
    return opts_check_extents(opts, err);
}

/* Build the whole description in memory, as it will be on disk. */
static int describe(struct lh_store *store, const struct lh_store_opts *opts, struct lh_error *err)
{
    struct lh_store_header *header = &store->header;
    LH_ASSERT(opts->directory_count == store->file_count);
    LH_ASSERT(opts->meta != NULL || opts->meta_bytes == 0);
    header->is_single_slot = opts->single_slot;
    header->file_count = opts->directory_count;
    header->extent_count = opts->extent_count;
    header->group_count = opts->group_count;
    header->stripe_bytes = LH_STORE_STRIPE_BYTES;
    header->cycle_stripes = lh_store_cycle_plan(opts->weights, opts->directory_count, store->cycle);
    header->meta_bytes = opts->meta_bytes;
    header->scalar_bytes_max = opts->scalar_bytes_max;
    for (uint32_t extent = 0; extent < opts->extent_count; extent++)
        header->checksum_count += lh_store_checksum_count(opts->extents[extent].bytes);
    int rc = store->fs->ops->random(store->fs, header->uuid, sizeof(header->uuid));
    if (rc < 0)
        return lh_error_set(err, rc, "the kernel returned no random bytes for the store's UUID: %s",
                            strerror(-rc));
    LH_TRY(lh_store_description_init(store, err));

    memcpy(store->extents, opts->extents, opts->extent_count * sizeof(*opts->extents));
    for (uint32_t group = 0; group < opts->group_count; group++)
        store->slot_counts[group] = opts->single_slot ? 1 : (uint8_t)opts->groups[group].slot_count;
    struct lh_store_shape shape = lh_store_shape(store);
    lh_store_tails_plan(&shape, store->tail_files);
    lh_store_table_encode(&shape, &store->control, store->table.base);
    if (opts->meta_bytes > 0)
        memcpy(store->meta.base, opts->meta, opts->meta_bytes);
    header->table_crc = lh_crc32c(0, store->table.base, store->control.table_bytes);
    header->meta_crc = lh_crc32c(0, store->meta.base, header->meta_bytes);
    LH_TRY(lh_store_state_init(store, err));
    for (uint32_t extent = 0; extent < opts->extent_count; extent++) {
        for (uint32_t slot = 0; slot < store->slot_counts[store->extents[extent].group]; slot++)
            lh_store_set_zero(store, extent, slot);
    }
    return 0;
}

static int files_make(struct lh_store *store, const struct lh_store_opts *opts,
                      struct lh_error *err)
{
    LH_TRY(lh_store_file_paths_set(store, opts->directories, err));
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_TRY(lh_store_file_create(store, file, opts->allow_tmpfs, err));
    LH_TRY(lh_store_files_reserve(store, err));
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_TRY(lh_store_file_probe(store, file, opts->allow_buffered, err));
    return 0;
}

/* Write the copies of a header one after the other, so that a crash tears at most one of them. */
static int headers_write(struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    for (uint32_t copy = 0; copy < store->control.copy_count; copy++) {
        LH_TRY(lh_store_header_write(store, file_index, copy, err));
        LH_TRY(lh_store_file_sync(store, file_index, err));
    }
    return 0;
}

/*
 * Write an empty commit, without syncs, because the store does not exist before the header of file
 * 0 does. Creation does this twice (version 1: once), so that no superblock, manifest or witness is
 * blank in a complete store.
 */
static int step_zero_write(struct lh_store *store, struct lh_error *err)
{
    LH_ASSERT(store->phase == LH_STORE_PHASE_IDLE);
    lh_store_manifest_prepare(store, 0, NULL, 0);
    LH_ASSERT(store->next.sequence == store->superblock.sequence + 1);
    uint32_t area = store->next.manifest_area;
    for (uint32_t copy = 0; copy < store->control.copy_count; copy++) {
        LH_TRY(lh_store_file_write(store, 0, store->control.manifest_offset[area][copy],
                                   store->manifests[area].base, store->control.manifest_bytes,
                                   err));
        uint64_t offset = lh_store_superblock_prepare(store, copy);
        LH_TRY(lh_store_file_write(store, 0, offset, store->superblock_block.base, LH_BLOCK_BYTES,
                                   err));
    }
    uint64_t offset = lh_store_witness_prepare(store);
    for (uint32_t file = 1; file < store->file_count; file++)
        LH_TRY(lh_store_file_write(store, file, offset, store->witness_block.base, LH_BLOCK_BYTES,
                                   err));
    store->superblock = store->next;
    return 0;
}

static int control_write(struct lh_store *store, struct lh_error *err)
{
    const struct lh_store_control *control = &store->control;
    for (uint32_t copy = 0; copy < control->copy_count; copy++) {
        LH_TRY(lh_store_file_write(store, 0, control->table_offset[copy], store->table.base,
                                   lh_align_up(control->table_bytes, LH_BLOCK_BYTES), err));
        LH_TRY(lh_store_file_write(store, 0, control->meta_offset[copy], store->meta.base,
                                   lh_align_up(store->header.meta_bytes, LH_BLOCK_BYTES), err));
    }
    /* Sequence number 1 thus uses area 0. The superblock that "precedes" it is never written. */
    store->superblock.manifest_area = 1;
    while (store->superblock.sequence < LH_STORE_SEQUENCE_CREATED(store->header.version))
        LH_TRY(step_zero_write(store, err));
    LH_ASSERT(store->superblock.manifest_area == 1 - store->superblock.sequence % 2);
    for (uint32_t file = 1; file < store->file_count; file++)
        LH_TRY(headers_write(store, file, err));
    LH_TRY(lh_store_file_sync(store, 0, err));
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_TRY(lh_store_file_sync_directories(store, file, err));
    return headers_write(store, 0, err);
}

int lh_store_create(const struct lh_store_opts *opts, struct lh_alloc *alloc,
                    struct lh_store **store_out, struct lh_error *err)
{
    *store_out = NULL;
    LH_TRY(opts_check(opts, err));
    struct lh_store *store = NULL;
    LH_TRY(lh_store_new(alloc, opts->directory_count, &store, err));
    if (opts->fs != NULL)
        store->fs = opts->fs;
    int rc = describe(store, opts, err);
    if (rc == 0)
        rc = files_make(store, opts, err);
    if (rc == 0)
        rc = control_write(store, err);
    if (rc < 0 || opts->temporary)
        lh_store_files_unmake(store);
    if (rc < 0) {
        lh_store_files_close(store);
        lh_store_delete(store);
        return rc;
    }
    *store_out = store;
    return 0;
}
