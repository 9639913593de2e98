/*
 * Directories and data files: creation and removal, their space, and blocking transfers. Locks are
 * in lock.c.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "store/store_impl.h"

static int path_set(struct lh_store_file *file, const char *directory, struct lh_error *err)
{
    const uint64_t name_bytes = sizeof("/" LH_STORE_FILE_NAME);
    uint64_t chars = directory != NULL ? strlen(directory) : 0;
    if (chars == 0)
        return lh_error_set(err, -EINVAL, "the name of a directory is empty");
    while (chars > 0 && directory[chars - 1] == '/')
        chars--;
    if (chars + name_bytes > sizeof(file->path))
        return lh_error_set(err, -ENAMETOOLONG,
                            "the name of a directory has %" PRIu64
                            " characters; the maximum is %" PRIu64,
                            chars, (uint64_t)sizeof(file->path) - name_bytes);
    memcpy(file->path, directory, chars);
    memcpy(file->path + chars, "/" LH_STORE_FILE_NAME, name_bytes);
    file->directory_chars = (uint32_t)chars;
    return 0;
}

int lh_store_file_paths_set(struct lh_store *store, const char *const *directories,
                            struct lh_error *err)
{
    for (uint32_t file = 0; file < store->file_count; file++) {
        LH_TRY(path_set(&store->files[file], directories[file], err));
        for (uint32_t other = 0; other < file; other++) {
            if (strcmp(store->files[other].path, store->files[file].path) == 0)
                return lh_error_set(err, -EINVAL, "directory %s is given twice", directories[file]);
        }
    }
    return 0;
}

/* Copy the first chars characters of the file's path; "/" if chars is 0. */
static void path_cut(const struct lh_store_file *file, uint32_t chars, char *path_out)
{
    LH_ASSERT(chars < LH_STORE_PATH_BYTES_MAX);
    if (chars == 0)
        memcpy(path_out, "/", 2);
    else
        memcpy(path_out, file->path, chars);
    path_out[lh_max_u64(chars, 1)] = '\0';
}

/* The length of the parent of the path's first chars characters; 0 for a name without a parent. */
static uint32_t parent_chars(const struct lh_store_file *file, uint32_t chars)
{
    LH_ASSERT(chars <= file->directory_chars);
    while (chars > 0 && file->path[chars - 1] != '/')
        chars--;
    while (chars > 0 && file->path[chars - 1] == '/')
        chars--;
    return chars;
}

static int directory_make(struct lh_store *store, struct lh_store_file *file, struct lh_error *err)
{
    const struct lh_store_fs *fs = store->fs;
    char path[LH_STORE_PATH_BYTES_MAX];
    struct lh_store_fs_info info;
    LH_ASSERT(file->made_chars == 0 && !file->is_made);
    for (uint32_t end = 1; end <= file->directory_chars; end++) {
        if (file->path[end] != '/' || file->path[end - 1] == '/')
            continue;
        path_cut(file, end, path);
        int rc = fs->ops->path_info(fs, path, &info);
        if (rc == 0 && !info.is_directory)
            return lh_error_set(err, -ENOTDIR, "%s is not a directory", path);
        if (rc == -ENOENT) {
            rc = fs->ops->make_directory(fs, path);
            if (rc == 0 && file->made_chars == 0)
                file->made_chars = end;
        }
        /* EEXIST: another process has made the directory in the meantime. */
        if (rc != 0 && rc != -EEXIST)
            return lh_error_set(err, rc, "cannot make directory %s: %s", path, strerror(-rc));
    }
    return 0;
}

/* Reject a directory or file that is given under two names: it would be written to twice. */
static int identity_check(struct lh_store *store, uint32_t file_index,
                          const struct lh_store_fs_info *info, struct lh_error *err)
{
    struct lh_store_file *file = &store->files[file_index];
    LH_ASSERT(file_index < store->file_count);
    file->device = info->device;
    file->inode = info->inode;
    for (uint32_t index = 0; index < file_index; index++) {
        const struct lh_store_file *other = &store->files[index];
        if (other->device == file->device && other->inode == file->inode)
            return lh_error_set(err, -EINVAL,
                                "%.*s and %.*s are the same directory under two names; list each "
                                "directory once",
                                (int)other->directory_chars, other->path,
                                (int)file->directory_chars, file->path);
    }
    return 0;
}

static int medium_check(struct lh_store *store, uint32_t file_index, bool allow_tmpfs,
                        struct lh_error *err)
{
    struct lh_store_fs_info info;
    char directory[LH_STORE_PATH_BYTES_MAX];
    path_cut(&store->files[file_index], store->files[file_index].directory_chars, directory);
    int rc = store->fs->ops->path_info(store->fs, directory, &info);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot examine the file system of %s: %s", directory,
                            strerror(-rc));
    LH_TRY(identity_check(store, file_index, &info, err));
    if (info.memory_name != NULL && !allow_tmpfs)
        return lh_error_set(err, -EMEDIUMTYPE,
                            "%s is in main memory (%s): a store there would use the memory that it "
                            "is meant to save; choose a directory on an SSD",
                            directory, info.memory_name);
    return 0;
}

int lh_store_file_create(struct lh_store *store, uint32_t file_index, bool allow_tmpfs,
                         struct lh_error *err)
{
    struct lh_store_file *file = &store->files[file_index];
    LH_ASSERT(file_index < store->file_count && store->io_files[file_index].fd < 0);
    LH_ASSERT(!store->is_read_only && !store->is_held);
    LH_TRY(directory_make(store, file, err));
    LH_TRY(medium_check(store, file_index, allow_tmpfs, err));
    int rc = store->fs->ops->open(store->fs, file->path, LH_STORE_FS_CREATE,
                                  &store->io_files[file_index].fd);
    if (rc == -EEXIST)
        return lh_error_set(err, -EEXIST,
                            "%s exists: the directory holds a store; resume it, or choose another "
                            "directory",
                            file->path);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot create %s: %s", file->path, strerror(-rc));
    file->is_made = true;
    return lh_store_file_lock(store, file_index, err);
}

int lh_store_file_info(const struct lh_store *store, uint32_t file_index,
                       struct lh_store_fs_info *info_out, struct lh_error *err)
{
    LH_ASSERT(file_index < store->file_count);
    int rc = store->fs->ops->info(store->fs, store->io_files[file_index].fd, info_out);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot examine %s: %s", store->files[file_index].path,
                            strerror(-rc));
    return 0;
}

int lh_store_file_open(struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    const char *path = store->files[file_index].path;
    struct lh_store_fs_info info;
    LH_ASSERT(file_index < store->file_count && store->io_files[file_index].fd < 0);
    int rc = store->fs->ops->open(store->fs, path,
                                  store->is_read_only ? LH_STORE_FS_READ : LH_STORE_FS_WRITE,
                                  &store->io_files[file_index].fd);
    if (rc == -ENOENT)
        return lh_error_set(err, -ENOENT, "there is no store: %s does not exist", path);
    if (rc == -ELOOP)
        return lh_error_set(err, -ELOOP,
                            "%s is a symbolic link, but a store's file must be a regular file; "
                            "pass the directory that the link points into",
                            path);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot open %s: %s", path, strerror(-rc));
    LH_TRY(lh_store_file_info(store, file_index, &info, err));
    if (!info.is_regular)
        return lh_error_set(err, -EINVAL,
                            "%s is not a regular file, so it does not belong to a store: remove "
                            "it, or choose another directory",
                            path);
    LH_TRY(identity_check(store, file_index, &info, err));
    return store->is_held ? 0 : lh_store_file_lock(store, file_index, err);
}

/* Check that each file system has enough space for all of its files together. */
static int space_check(const struct lh_store *store, struct lh_error *err)
{
    struct lh_store_fs_info info[LH_STORE_DIRECTORY_COUNT_MAX];
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_TRY(lh_store_file_info(store, file, &info[file], err));
    for (uint32_t file = 0; file < store->file_count; file++) {
        uint64_t needed_bytes = 0;
        for (uint32_t other = 0; other < store->file_count; other++) {
            if (info[other].device == info[file].device)
                needed_bytes += store->layout.file_bytes[other];
        }
        uint64_t available_bytes = info[file].available_bytes;
        if (needed_bytes > available_bytes)
            return lh_error_set(err, -ENOSPC,
                                "directory %.*s needs %" PRIu64 " bytes, but only %" PRIu64
                                " are available: %" PRIu64
                                " are missing; free space there, or add a directory on another "
                                "drive",
                                (int)store->files[file].directory_chars, store->files[file].path,
                                needed_bytes, available_bytes, needed_bytes - available_bytes);
    }
    return 0;
}

int lh_store_files_reserve(struct lh_store *store, struct lh_error *err)
{
    const struct lh_store_fs *fs = store->fs;
    LH_ASSERT(store->layout.file_count == store->file_count);
    LH_TRY(space_check(store, err));
    for (uint32_t file = 0; file < store->file_count; file++) {
        const char *path = store->files[file].path;
        uint64_t bytes = store->layout.file_bytes[file];
        int rc = fs->ops->reserve(fs, store->io_files[file].fd, bytes);
        if (rc == -EOPNOTSUPP) {
            lh_store_note_add(store,
                              "%s: its file system cannot reserve space (fallocate: %s); a full "
                              "drive will be noticed only when a write fails",
                              path, strerror(-rc));
            rc = fs->ops->truncate(fs, store->io_files[file].fd, bytes);
        }
        if (rc != 0)
            return lh_error_set(err, rc, "cannot reserve %" PRIu64 " bytes for %s: %s", bytes, path,
                                strerror(-rc));
    }
    return 0;
}

int lh_store_file_sync_directories(const struct lh_store *store, uint32_t file_index,
                                   struct lh_error *err)
{
    const struct lh_store_file *file = &store->files[file_index];
    char path[LH_STORE_PATH_BYTES_MAX];
    LH_ASSERT(file_index < store->file_count && file->made_chars <= file->directory_chars);
    /*
     * The directory holds the entry of the file, and the parents hold the entries of directories
     * that were made. Sync the parent of the directory even if it existed before: a creation that
     * was killed may have made it just now.
     */
    uint32_t last =
        parent_chars(file, file->made_chars != 0 ? file->made_chars : file->directory_chars);
    for (uint32_t end = file->directory_chars;; end = parent_chars(file, end)) {
        path_cut(file, end, path);
        if (end == 0 && file->path[0] != '/')
            memcpy(path, ".", 2);
        int rc = store->fs->ops->sync_directory(store->fs, path);
        /* The parent of a directory that existed before may not be readable. */
        if (rc == -EACCES && end == last && file->made_chars == 0)
            return 0;
        if (rc < 0)
            return lh_error_set(err, rc, "cannot sync directory %s: %s", path, strerror(-rc));
        if (end <= last)
            return 0;
    }
}

/* This is best effort: whatever cannot be removed remains. */
void lh_store_files_unmake(struct lh_store *store)
{
    const struct lh_store_fs *fs = store->fs;
    char path[LH_STORE_PATH_BYTES_MAX];
    /* In reverse order: a later directory may be inside one that was made for an earlier file. */
    for (uint32_t index = store->file_count; index-- > 0;) {
        struct lh_store_file *file = &store->files[index];
        if (file->is_made)
            (void)!fs->ops->remove(fs, file->path);
        file->is_made = false;
        if (file->made_chars == 0)
            continue;
        for (uint32_t end = file->directory_chars; end >= file->made_chars;
             end = parent_chars(file, end)) {
            path_cut(file, end, path);
            (void)!fs->ops->remove(fs, path);
        }
        file->made_chars = 0;
    }
}

void lh_store_files_close(struct lh_store *store)
{
    for (uint32_t file = 0; file < store->file_count; file++) {
        LH_ASSERT(store->io_files[file].fd >= 0 || !store->files[file].is_locked);
        if (store->io_files[file].fd < 0)
            continue;
        lh_store_file_unlock(store, file);
        store->fs->ops->close(store->fs, store->io_files[file].fd);
        store->io_files[file].fd = -1;
    }
}

int lh_store_file_read(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                       void *buffer, uint64_t bytes, struct lh_error *err)
{
    LH_ASSERT(file_index < store->file_count);
    LH_ASSERT(lh_is_aligned(offset, LH_BLOCK_BYTES) && lh_is_aligned(bytes, LH_BLOCK_BYTES));
    for (uint64_t done = 0; done < bytes;) {
        int64_t rc = store->fs->ops->read(store->fs, store->io_files[file_index].fd,
                                          (uint8_t *)buffer + done, bytes - done, offset + done);
        if (rc < 0)
            return lh_error_set(
                err, (int)rc, "cannot read %" PRIu64 " bytes at offset %" PRIu64 " of %s: %s",
                bytes - done, offset + done, store->files[file_index].path, strerror((int)-rc));
        if (rc == 0)
            return lh_error_set(err, -ENODATA,
                                "%s was truncated: it ends at offset %" PRIu64
                                ", and bytes up to %" PRIu64
                                " are needed; copy the store again if this "
                                "is a copy, otherwise restore it from a snapshot",
                                store->files[file_index].path, offset + done, offset + bytes);
        done += (uint64_t)rc;
    }
    return 0;
}

int lh_store_file_write(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                        const void *buffer, uint64_t bytes, struct lh_error *err)
{
    LH_ASSERT(file_index < store->file_count && !store->is_read_only);
    LH_ASSERT(lh_is_aligned(offset, LH_BLOCK_BYTES) && lh_is_aligned(bytes, LH_BLOCK_BYTES));
    for (uint64_t done = 0; done < bytes;) {
        int64_t rc =
            store->fs->ops->write(store->fs, store->io_files[file_index].fd,
                                  (const uint8_t *)buffer + done, bytes - done, offset + done);
        if (rc <= 0) {
            int code = rc == 0 ? -EIO : (int)rc;
            return lh_error_set(
                err, code, "cannot write %" PRIu64 " bytes at offset %" PRIu64 " of %s: %s",
                bytes - done, offset + done, store->files[file_index].path, strerror(-code));
        }
        done += (uint64_t)rc;
    }
    return 0;
}

int lh_store_file_sync(const struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    LH_ASSERT(file_index < store->file_count && !store->is_read_only);
    /* A sync is never retried: a failed one may have dropped the bytes. */
    int rc = store->fs->ops->sync(store->fs, store->io_files[file_index].fd);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot sync %s: %s", store->files[file_index].path,
                            strerror(-rc));
    return 0;
}

int lh_store_header_write(struct lh_store *store, uint32_t file_index, uint32_t copy,
                          struct lh_error *err)
{
    struct lh_store_header header = store->header;
    LH_ASSERT(file_index < store->file_count);
    LH_ASSERT(copy < store->control.copy_count);
    header.file_index = file_index;
    header.file_bytes = store->layout.file_bytes[file_index];
    lh_store_header_encode(&header, store->bounce.base);
    return lh_store_file_write(store, file_index, LH_STORE_HEADER_OFFSET(copy), store->bounce.base,
                               LH_BLOCK_BYTES, err);
}
