/*
 * Opens a store at its last committed step, and closes it. choose.c determines the step.
 */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/store_impl.h"

/*
 * Whether a file without a valid header has held commits: the file is then damaged, rather than the
 * result of an interrupted creation. The places of copy 1 count only if they hold a superblock,
 * because version 1 has other data in them.
 */
static int is_past_creation(struct lh_store *store, uint32_t file_index, uint64_t file_bytes,
                            struct lh_error *err)
{
    for (uint32_t copy = 0; copy < LH_STORE_COPY_COUNT_MAX; copy++) {
        for (uint32_t number = 0; number < 2; number++) {
            uint64_t offset = LH_STORE_SUPERBLOCK_OFFSET(number, copy);
            if (offset + LH_BLOCK_BYTES > file_bytes)
                continue;
            LH_TRY(lh_store_file_read(store, file_index, offset, store->bounce.base, LH_BLOCK_BYTES,
                                      err));
            if (copy > 0 && memcmp(store->bounce.base, "LOHANSUP", 8) != 0)
                continue;
            if (lh_store_is_past_creation(store->bounce.base))
                return 1;
        }
    }
    return 0;
}

/* Report that no copy of the header is valid. errors: the error of each copy. */
static int header_missing(struct lh_store *store, uint32_t file_index, uint64_t file_bytes,
                          const struct lh_error *errors, struct lh_error *err)
{
    const char *path = store->files[file_index].path;
    LH_ASSERT(errors[0].code < 0 && errors[1].code < 0);
    /* A creation leaves one copy blank while it writes the other. */
    bool is_begun = errors[0].code == -ENODATA || errors[1].code == -ENODATA;
    int rc = is_past_creation(store, file_index, file_bytes, err);
    LH_TRY(rc);
    if (is_begun && rc == 0)
        return lh_error_set(err, -EINPROGRESS,
                            "%s has no header: its creation was interrupted, or a copy of it; copy "
                            "the store again if this is a copy, otherwise remove the file and "
                            "create the store again",
                            path);
    return lh_error_set(err, -EILSEQ,
                        "%s has no valid header%s: %s, and the copy at offset %" PRIu64
                        ": %s; restore the file from a backup",
                        path, rc > 0 ? ", but holds commits" : "", errors[0].message,
                        LH_STORE_HEADER_OFFSET(1), errors[1].message);
}

static int header_read(struct lh_store *store, uint32_t file_index, uint64_t file_bytes,
                       struct lh_store_header *header_out, struct lh_error *err)
{
    struct lh_store_file *file = &store->files[file_index];
    struct lh_store_header found[LH_STORE_COPY_COUNT_MAX];
    struct lh_error errors[LH_STORE_COPY_COUNT_MAX] = {{.code = 0}};
    uint32_t good = LH_STORE_COPY_COUNT_MAX;
    for (uint32_t copy = LH_STORE_COPY_COUNT_MAX; copy-- > 0;) {
        uint64_t offset = LH_STORE_HEADER_OFFSET(copy);
        if (copy > 0 && offset + LH_BLOCK_BYTES > file_bytes) {
            lh_error_set(&errors[copy], -ENODATA, "the file ends before it");
            continue;
        }
        int rc = lh_store_file_read(store, file_index, offset, store->bounce.base, LH_BLOCK_BYTES,
                                    &errors[copy]);
        if (rc == -ENODATA)
            return lh_error_set(err, rc, "%s", errors[copy].message);
        if (rc == 0)
            rc = lh_store_header_decode(store->bounce.base, &found[copy], &errors[copy]);
        /* A store of a newer version is rejected even if the other copy could be read. */
        if (rc == -EPROTO) {
            lh_error_set(err, rc, "%s: %s", file->path, errors[copy].message);
            return rc;
        }
        /* Version 1 has other data where copy 1 would be. */
        if (rc == 0 && copy > 0 && found[copy].version == 1)
            rc = lh_error_set(&errors[copy], -EILSEQ, "it has version 1, which has no second copy");
        if (rc == 0)
            good = copy;
    }
    if (good == LH_STORE_COPY_COUNT_MAX) {
        for (uint32_t copy = 0; copy < LH_STORE_COPY_COUNT_MAX; copy++) {
            if (errors[copy].code != -EILSEQ && errors[copy].code != -ENODATA)
                return lh_error_set(err, errors[copy].code, "%s", errors[copy].message);
        }
        return header_missing(store, file_index, file_bytes, errors, err);
    }
    LH_ASSERT(errors[good].code == 0);
    *header_out = found[good];
    for (uint32_t copy = 0; copy < LH_STORE_COPY_COUNT_MAX; copy++)
        file->header_codes[copy] = errors[copy].code;
    return 0;
}

/* Open and lock the file and read its header. Nothing is written before the version is known. */
static int file_begin(struct lh_store *store, uint32_t file_index, struct lh_store_header *header,
                      struct lh_error *err)
{
    const char *path = store->files[file_index].path;
    LH_TRY(lh_store_file_open(store, file_index, err));
    struct lh_store_fs_info info;
    LH_TRY(lh_store_file_info(store, file_index, &info, err));
    if (info.bytes == 0)
        return lh_error_set(err, -EINPROGRESS,
                            "%s is empty: its creation was interrupted, or it was truncated; copy "
                            "the store again if this is a copy, otherwise remove the file and "
                            "create the store again",
                            path);
    LH_TRY(header_read(store, file_index, info.bytes, header, err));
    if (info.bytes < header->file_bytes)
        return lh_error_set(err, -ENODATA,
                            "%s was truncated: it has %" PRIu64 " bytes, expected %" PRIu64
                            "; copy the store again if this is a copy, otherwise restore it from "
                            "a snapshot",
                            path, info.bytes, header->file_bytes);
    return 0;
}

/*
 * Sort the files by the indices in their headers, because directories may be given in any order.
 * file_index then means the same in every session.
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
            return lh_error_set(
                err, -EILSEQ,
                "the headers of %.256s and %.256s disagree: one of them was changed; "
                "restore the store from a backup",
                store->files[0].path, store->files[file].path);
        LH_ASSERT(header->file_index < LH_STORE_DIRECTORY_COUNT_MAX);
        if (is_here[header->file_index])
            return lh_error_set(err, -EXDEV, "%.256s is a copy of file %" PRIu32 " of the store",
                                store->files[file].path, header->file_index);
        is_here[header->file_index] = true;
        from[header->file_index] = file;
    }
    for (uint32_t index = 0; index < first->file_count; index++) {
        if (!is_here[index])
            return lh_error_set(err, -EXDEV,
                                "the store of %.256s has %" PRIu32 " directories, but the one with "
                                "file %" PRIu32 " is not among the %" PRIu32 " that were given",
                                store->files[0].path, first->file_count, index, store->file_count);
    }
    LH_ASSERT(store->file_count == first->file_count);
    for (uint32_t index = 0; index < store->file_count; index++) {
        /* An earlier exchange may have moved the file that belongs here. */
        uint32_t other = from[index];
        while (other < index)
            other = from[other];
        LH_ASSERT(other < store->file_count);
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

static int description_read(struct lh_store *store, const uint64_t *file_bytes,
                            struct lh_error *err)
{
    const struct lh_store_header *header = &store->header;
    struct lh_store_control control;
    LH_ASSERT(header->file_count == store->file_count);
    lh_store_control_plan(header, &control);
    /* Check this before allocating tables whose sizes come from the header. */
    if (control.data_offset[0] > file_bytes[0])
        return lh_error_set(err, -EILSEQ,
                            "what the header of %s describes does not fit its %" PRIu64 " bytes",
                            store->files[0].path, file_bytes[0]);
    LH_TRY(lh_store_description_init(store, err));
    LH_TRY(lh_store_copies_read(store, "the table", control.table_offset, &store->table,
                                control.table_bytes, header->table_crc, err));
    LH_TRY(lh_store_copies_read(store, "meta", control.meta_offset, &store->meta,
                                header->meta_bytes, header->meta_crc, err));
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
                err, -EILSEQ,
                "the table puts %" PRIu64 " bytes in %s, but its header says %" PRIu64,
                store->layout.file_bytes[file], store->files[file].path, file_bytes[file]);
    }
    return 0;
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
    return lh_store_choose(store, opts->open_at, err);
}

int lh_store_open(const struct lh_store_open_opts *opts, struct lh_alloc *alloc,
                  struct lh_store **store_out, struct lh_error *err)
{
    *store_out = NULL;
    if (opts->directory_count < 1 || opts->directory_count > LH_STORE_DIRECTORY_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "%" PRIu32 " directories: a store has 1 to %d",
                            opts->directory_count, LH_STORE_DIRECTORY_COUNT_MAX);
    struct lh_store *store = NULL;
    LH_TRY(lh_store_new(alloc, opts->directory_count, &store, err));
    if (opts->fs != NULL)
        store->fs = opts->fs;
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
    /* If this fails, the store stays marked unclean, and the next open reports that. */
    if (store->header.is_single_slot && is_whole && !store->superblock.is_clean)
        (void)!lh_store_mark_sync(store, true, NULL);
    lh_store_files_close(store);
    lh_store_delete(store);
}
