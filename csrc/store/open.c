/*
 * Opening a store at its last committed step, and closing it.
 *
 * Which step that is: the valid superblock with the higher sequence number whose manifest is whole.
 * The other one is the fallback; a crash needs it only while the newer one is being written, when
 * everything that it names is still there (see commit.c). What was passed over is told in the note.
 */
#include <endian.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/store_impl.h"

/* Lock the file and read its header; nothing is written before its version is known. */
static int file_begin(struct lh_store *store, uint32_t file_index, struct lh_store_header *header,
                      struct lh_error *err)
{
    const char *path = store->files[file_index].path;
    LH_TRY(lh_store_file_open(store, file_index, err));
    struct stat info;
    if (fstat(store->io_files[file_index].fd, &info) != 0)
        return lh_error_set(err, -errno, "cannot examine %s: %s", path, strerror(errno));
    if (info.st_size == 0)
        return lh_error_set(err, -EINPROGRESS,
                            "%s is empty: its creation was interrupted, or it was truncated; "
                            "remove the file and create the store again",
                            path);
    LH_TRY(lh_store_file_read(store, file_index, LH_STORE_HEADER_OFFSET, store->bounce.base,
                              LH_BLOCK_BYTES, err));
    int rc = lh_store_header_decode(store->bounce.base, header, err);
    if (rc < 0) {
        (void)lh_error_prefix(err, "%s", path);
        return rc;
    }
    if ((uint64_t)info.st_size < header->file_bytes)
        return lh_error_set(err, -ENODATA,
                            "%s was truncated: it has %" PRIu64 " bytes, %" PRIu64 " are expected",
                            path, (uint64_t)info.st_size, header->file_bytes);
    return 0;
}

/*
 * The files may come in any order: their headers say which is which. Sorted here, so that
 * file_index means the same in every session.
 */
static int files_sort(struct lh_store *store, const struct lh_store_header *headers,
                      uint64_t *file_bytes_out, struct lh_error *err)
{
    const struct lh_store_header *first = &headers[0];
    struct lh_store_header same = *first;
    const uint8_t *block = store->bounce.base;
    const uint8_t *same_block = store->superblock_block.base;
    uint32_t from[LH_STORE_DIRECTORY_COUNT_MAX];
    bool is_here[LH_STORE_DIRECTORY_COUNT_MAX] = {false};
    for (uint32_t file = 0; file < store->file_count; file++) {
        const struct lh_store_header *header = &headers[file];
        if (memcmp(header->uuid, first->uuid, sizeof(first->uuid)) != 0)
            return lh_error_set(err, -EXDEV, "%.256s and %.256s belong to different stores",
                                store->files[0].path, store->files[file].path);
        same.file_index = header->file_index;
        same.file_bytes = header->file_bytes;
        lh_store_header_encode(header, store->bounce.base);
        lh_store_header_encode(&same, store->superblock_block.base);
        if (memcmp(block, same_block, LH_BLOCK_BYTES) != 0)
            return lh_error_set(err, -EILSEQ, "the headers of %.256s and %.256s disagree",
                                store->files[0].path, store->files[file].path);
        if (is_here[header->file_index])
            return lh_error_set(err, -EXDEV, "%.256s is a copy of file %" PRIu32 " of the store",
                                store->files[file].path, header->file_index);
        is_here[header->file_index] = true;
        from[header->file_index] = file;
    }
    for (uint32_t index = 0; index < first->file_count; index++) {
        if (!is_here[index])
            return lh_error_set(err, -EXDEV,
                                "the store of %.256s has %" PRIu32 " directories, and the one with "
                                "file %" PRIu32 " is not among the %" PRIu32 " that were given",
                                store->files[0].path, first->file_count, index, store->file_count);
    }
    LH_ASSERT(store->file_count == first->file_count);
    for (uint32_t index = 0; index < store->file_count; index++) {
        /* What was exchanged before this may have moved the file that belongs here. */
        uint32_t other = from[index];
        while (other < index)
            other = from[other];
        struct lh_store_file file = store->files[index];
        struct lh_io_file io_file = store->io_files[index];
        store->files[index] = store->files[other];
        store->io_files[index] = store->io_files[other];
        store->files[other] = file;
        store->io_files[other] = io_file;
        file_bytes_out[index] = headers[from[index]].file_bytes;
    }
    store->header = same;
    return 0;
}

static int region_read(struct lh_store *store, const char *name, uint64_t offset,
                       struct lh_store_buffer *buffer, uint64_t bytes, uint32_t expected_crc,
                       struct lh_error *err)
{
    LH_TRY(lh_store_file_read(store, 0, offset, buffer->base, lh_align_up(bytes, LH_BLOCK_BYTES),
                              err));
    uint32_t crc = lh_crc32c(0, buffer->base, bytes);
    if (crc != expected_crc)
        return lh_error_set(err, -EILSEQ,
                            "%s of %s (offset %" PRIu64 ", %" PRIu64 " bytes) has checksum "
                            "%08" PRIx32 ", and the header says %08" PRIx32,
                            name, store->files[0].path, offset, bytes, crc, expected_crc);
    return 0;
}

static int description_read(struct lh_store *store, const uint64_t *file_bytes,
                            struct lh_error *err)
{
    const struct lh_store_header *header = &store->header;
    struct lh_store_control control;
    lh_store_control_plan(header, &control);
    /* Nothing is believed, or allocated, that the file has no room for. */
    if (control.data_offset[0] > file_bytes[0])
        return lh_error_set(err, -EILSEQ, "the header of %s does not fit its %" PRIu64 " bytes",
                            store->files[0].path, file_bytes[0]);
    LH_TRY(lh_store_description_init(store, err));
    LH_TRY(region_read(store, "the table", LH_STORE_TABLE_OFFSET, &store->table,
                       control.table_bytes, header->table_crc, err));
    LH_TRY(region_read(store, "meta", control.meta_offset, &store->meta, header->meta_bytes,
                       header->meta_crc, err));
    int rc = lh_store_table_decode(store->table.base, header, &store->control, store->cycle,
                                   store->extents, store->slot_counts, store->tail_files, err);
    if (rc < 0) {
        (void)lh_error_prefix(err, "%s", store->files[0].path);
        return rc;
    }
    LH_TRY(lh_store_state_init(store, err));
    for (uint32_t file = 0; file < store->file_count; file++) {
        if (store->layout.file_bytes[file] != file_bytes[file])
            return lh_error_set(
                err, -EILSEQ, "the table puts %" PRIu64 " bytes in %s, its header says %" PRIu64,
                store->layout.file_bytes[file], store->files[file].path, file_bytes[file]);
    }
    return 0;
}

/* Read the manifest that superblock names into its area's buffer. */
static int manifest_read(struct lh_store *store, const struct lh_store_superblock *superblock,
                         uint64_t *scalar_bytes_out, struct lh_error *err)
{
    uint32_t area = superblock->manifest_area;
    uint64_t offset = store->control.manifest_offset[area];
    void *manifest = store->manifests[area].base;
    LH_TRY(lh_store_file_read(store, 0, offset, manifest, store->control.manifest_bytes, err));
    int rc = lh_store_manifest_decode(manifest, &store->header, &store->control, superblock,
                                      store->slot_counts, scalar_bytes_out, err);
    if (rc < 0)
        (void)lh_error_prefix(err, "the manifest of step %" PRIu64 " at offset %" PRIu64,
                              superblock->step, offset);
    return rc;
}

/* The state as the manifest of the chosen superblock has it. */
static void state_load(struct lh_store *store)
{
    const struct lh_store_control *control = &store->control;
    const uint8_t *manifest = store->manifests[store->superblock.manifest_area].base;
    const uint8_t *groups = manifest + sizeof(struct lh_store_manifest_disk);
    const uint8_t *extents = manifest + control->manifest_extent_offset;
    const uint8_t *sums = manifest + control->manifest_sum_offset;
    for (uint32_t group = 0; group < store->header.group_count; group++)
        store->group_states[group] =
            groups[group] & (LH_STORE_GROUP_STATE_SLOT | LH_STORE_GROUP_STATE_WRITTEN);
    for (uint32_t extent = 0; extent < store->header.extent_count; extent++) {
        uint32_t slot = lh_store_committed_slot(store, store->extents[extent].group);
        unsigned state = LH_STORE_EXTENT_STATE_DIRTY(0) | LH_STORE_EXTENT_STATE_DIRTY(1);
        if (extents[extent] & LH_STORE_EXTENT_ZERO)
            state |= LH_STORE_EXTENT_STATE_ZERO(slot);
        store->extent_states[extent] = (uint8_t)state;
        uint32_t count = 0;
        uint32_t *checksums = lh_store_checksums(store, extent, slot, &count);
        for (uint32_t index = 0; index < count; index++) {
            uint32_t value = 0;
            memcpy(&value, sums + (store->checksum_first[extent] + index) * sizeof(value),
                   sizeof(value));
            checksums[index] = le32toh(value);
        }
    }
}

static int superblock_choose(struct lh_store *store, struct lh_error *err)
{
    struct lh_store_superblock found[2];
    bool is_valid[2] = {false, false};
    struct lh_error reason = {.code = 0};
    for (uint32_t number = 0; number < 2; number++) {
        uint64_t offset = LH_STORE_SUPERBLOCK_OFFSET(number);
        int rc = lh_store_file_read(store, 0, offset, store->bounce.base, LH_BLOCK_BYTES, &reason);
        if (rc == 0)
            rc = lh_store_superblock_decode(store->bounce.base, &store->header, &found[number],
                                            &reason);
        is_valid[number] = rc == 0;
        if (rc != 0 && rc != -ENODATA)
            lh_store_note_add(store,
                              "%s: superblock %" PRIu32 " at offset %" PRIu64 " is not valid: %s",
                              store->files[0].path, number, offset, reason.message);
    }
    for (uint32_t attempt = 0; attempt < 2; attempt++) {
        uint32_t number =
            is_valid[0] && is_valid[1] ? found[1].sequence > found[0].sequence : is_valid[1];
        if (!is_valid[number])
            break;
        is_valid[number] = false;
        if (manifest_read(store, &found[number], &store->scalar_bytes, &reason) == 0) {
            store->superblock = found[number];
            state_load(store);
            return 0;
        }
        lh_store_note_add(store, "%s: %s", store->files[0].path, reason.message);
    }
    return lh_error_set(err, -EILSEQ, "no committed step is whole: %s", store->note);
}

static int open_store(struct lh_store *store, const struct lh_store_open_opts *opts,
                      struct lh_error *err)
{
    struct lh_store_header headers[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    uint64_t file_bytes[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    LH_TRY(lh_store_file_paths_set(store, opts->directories, err));
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_TRY(file_begin(store, file, &headers[file], err));
    LH_TRY(files_sort(store, headers, file_bytes, err));
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_TRY(lh_store_file_probe(store, file, opts->allow_buffered, err));
    LH_TRY(description_read(store, file_bytes, err));
    LH_TRY(superblock_choose(store, err));
    if (!store->header.is_single_slot)
        return 0;
    if (!store->superblock.is_clean)
        return lh_error_set(err, -EUCLEAN,
                            "%s keeps one copy of each value and was not closed cleanly after "
                            "step %" PRIu64 ": what it holds is a mixture of steps; start from a "
                            "checkpoint",
                            store->files[0].path, store->superblock.step);
    /* Before the first write that may come; kept until close finds nothing unfinished. */
    return store->is_read_only ? 0 : lh_store_mark_sync(store, false, err);
}

int lh_store_open(const struct lh_store_open_opts *opts, struct lh_alloc *alloc,
                  struct lh_store **store_out, struct lh_error *err)
{
    *store_out = NULL;
    if (opts->directory_count < 1 || opts->directory_count > LH_STORE_DIRECTORY_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "%" PRIu32 " directories: 1 to %d are possible",
                            opts->directory_count, LH_STORE_DIRECTORY_COUNT_MAX);
    struct lh_store *store = NULL;
    LH_TRY(lh_store_new(alloc, opts->directory_count, &store, err));
    store->is_read_only = opts->read_only;
    store->is_held = opts->is_held;
    LH_ASSERT(opts->read_only || !opts->is_held);
    int rc = open_store(store, opts, err);
    if (rc < 0) {
        lh_store_files_close(store);
        lh_store_delete(store);
        return rc;
    }
    *store_out = store;
    return 0;
}

void lh_store_close(struct lh_store *store)
{
    if (store == NULL)
        return;
    bool is_whole = store->phase == LH_STORE_PHASE_IDLE && store->failure.code == 0 &&
                    !store->is_changed && !store->is_read_only;
    /* If this fails the store stays marked unclean, and whoever opens it is told. */
    if (store->header.is_single_slot && is_whole)
        (void)!lh_store_mark_sync(store, true, NULL);
    lh_store_files_close(store);
    lh_store_delete(store);
}
