/*
 * Directories and data files: making and unmaking them, their space, and blocking transfers. What
 * locks them is in lock.c.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* fallocate */
#endif
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/assert.h"
#include "store/store_impl.h"

#define TMPFS_TYPE 0x01021994
#define RAMFS_TYPE 0x858458f6

static int path_set(struct lh_store_file *file, const char *directory, struct lh_error *err)
{
    const uint64_t name_bytes = sizeof("/" LH_STORE_FILE_NAME);
    uint64_t chars = directory != NULL ? strlen(directory) : 0;
    if (chars == 0)
        return lh_error_set(err, -EINVAL, "a directory's name is empty");
    while (chars > 0 && directory[chars - 1] == '/')
        chars--;
    if (chars + name_bytes > sizeof(file->path))
        return lh_error_set(err, -ENAMETOOLONG,
                            "a directory's name has %" PRIu64 " characters, at most %" PRIu64
                            " are possible",
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

/* The first chars of the file's path; "/" where that is nothing. */
static void path_cut(const struct lh_store_file *file, uint32_t chars, char *path_out)
{
    if (chars == 0)
        memcpy(path_out, "/", 2);
    else
        memcpy(path_out, file->path, chars);
    path_out[lh_max_u64(chars, 1)] = '\0';
}

/* Where the parent of the first chars of the path ends; a relative name's outermost parent is at 0.
 */
static uint32_t parent_chars(const struct lh_store_file *file, uint32_t chars)
{
    while (chars > 0 && file->path[chars - 1] != '/')
        chars--;
    while (chars > 0 && file->path[chars - 1] == '/')
        chars--;
    return chars;
}

static int directory_make(struct lh_store_file *file, struct lh_error *err)
{
    char path[LH_STORE_PATH_BYTES_MAX];
    struct stat info;
    for (uint32_t end = 1; end <= file->directory_chars; end++) {
        if (file->path[end] != '/' || file->path[end - 1] == '/')
            continue;
        path_cut(file, end, path);
        if (stat(path, &info) == 0) {
            if (!S_ISDIR(info.st_mode))
                return lh_error_set(err, -ENOTDIR, "%s is not a directory", path);
            continue;
        }
        int error = errno;
        if (error == ENOENT && mkdir(path, 0700) == 0) {
            if (file->made_chars == 0)
                file->made_chars = end;
            continue;
        }
        error = error == ENOENT ? errno : error;
        /* Another process may have made it in between. */
        if (error != EEXIST)
            return lh_error_set(err, -error, "cannot make directory %s: %s", path, strerror(error));
    }
    return 0;
}

static int medium_check(const char *directory, bool allow_tmpfs, struct lh_error *err)
{
    struct statfs info;
    if (statfs(directory, &info) != 0)
        return lh_error_set(err, -errno, "cannot examine the file system of %s: %s", directory,
                            strerror(errno));
    uint32_t type = (uint32_t)info.f_type;
    if ((type == TMPFS_TYPE || type == RAMFS_TYPE) && !allow_tmpfs)
        return lh_error_set(err, -EMEDIUMTYPE,
                            "%s is in main memory (%s): a store there takes the memory that it is "
                            "meant to save; choose a directory on an SSD",
                            directory, type == TMPFS_TYPE ? "tmpfs" : "ramfs");
    return 0;
}

int lh_store_file_create(struct lh_store *store, uint32_t file_index, bool allow_tmpfs,
                         struct lh_error *err)
{
    struct lh_store_file *file = &store->files[file_index];
    char directory[LH_STORE_PATH_BYTES_MAX];
    LH_TRY(directory_make(file, err));
    path_cut(file, file->directory_chars, directory);
    LH_TRY(medium_check(directory, allow_tmpfs, err));
    int fd = open(file->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 && errno == EEXIST)
        return lh_error_set(err, -EEXIST,
                            "%s exists: a store is there; resume it, or choose another directory",
                            file->path);
    if (fd < 0)
        return lh_error_set(err, -errno, "cannot create %s: %s", file->path, strerror(errno));
    file->is_made = true;
    store->io_files[file_index].fd = fd;
    return lh_store_file_lock(store, file_index, err);
}

int lh_store_file_open(struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    const char *path = store->files[file_index].path;
    int fd = open(path, (store->is_read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return lh_error_set(err, -ENOENT, "there is no store: %s does not exist", path);
    if (fd < 0)
        return lh_error_set(err, -errno, "cannot open %s: %s", path, strerror(errno));
    store->io_files[file_index].fd = fd;
    return store->is_held ? 0 : lh_store_file_lock(store, file_index, err);
}

/* What the files on one file system need together has to be available there. */
static int space_check(const struct lh_store *store, struct lh_error *err)
{
    struct stat info[LH_STORE_DIRECTORY_COUNT_MAX];
    for (uint32_t file = 0; file < store->file_count; file++) {
        if (fstat(store->io_files[file].fd, &info[file]) != 0)
            return lh_error_set(err, -errno, "cannot examine %s: %s", store->files[file].path,
                                strerror(errno));
    }
    for (uint32_t file = 0; file < store->file_count; file++) {
        uint64_t needed_bytes = 0;
        for (uint32_t other = 0; other < store->file_count; other++) {
            if (info[other].st_dev == info[file].st_dev)
                needed_bytes += store->layout.file_bytes[other];
        }
        struct statvfs space;
        if (fstatvfs(store->io_files[file].fd, &space) != 0)
            return lh_error_set(err, -errno, "cannot examine the file system of %s: %s",
                                store->files[file].path, strerror(errno));
        /* A file system that does not count its blocks has no answer; reserving will tell. */
        if (space.f_blocks == 0)
            continue;
        uint64_t available_bytes = (uint64_t)space.f_bavail * space.f_frsize;
        if (needed_bytes > available_bytes)
            return lh_error_set(err, -ENOSPC,
                                "directory %.*s needs %" PRIu64 " bytes, %" PRIu64
                                " are available, %" PRIu64
                                " are missing; free space there, or add a directory on another "
                                "drive",
                                (int)store->files[file].directory_chars, store->files[file].path,
                                needed_bytes, available_bytes, needed_bytes - available_bytes);
    }
    return 0;
}

int lh_store_files_reserve(struct lh_store *store, struct lh_error *err)
{
    LH_TRY(space_check(store, err));
    for (uint32_t file = 0; file < store->file_count; file++) {
        const char *path = store->files[file].path;
        int fd = store->io_files[file].fd;
        off_t bytes = (off_t)store->layout.file_bytes[file];
        /* Never posix_fallocate(): where a file system cannot, it would write all of it. */
        int rc = 0;
        do {
            rc = fallocate(fd, 0, 0, bytes);
        } while (rc != 0 && errno == EINTR);
        if (rc != 0 && errno == EOPNOTSUPP) {
            lh_store_note_add(store,
                              "%s: its file system cannot reserve space (fallocate: %s); a full "
                              "drive will show only when it is written",
                              path, strerror(errno));
            rc = ftruncate(fd, bytes);
        }
        if (rc != 0)
            return lh_error_set(err, -errno, "cannot reserve %" PRIu64 " bytes for %s: %s",
                                (uint64_t)bytes, path, strerror(errno));
    }
    return 0;
}

int lh_store_file_sync_directories(const struct lh_store *store, uint32_t file_index,
                                   struct lh_error *err)
{
    const struct lh_store_file *file = &store->files[file_index];
    char path[LH_STORE_PATH_BYTES_MAX];
    /* The directory holds the file's entry, and each parent of one that was made holds that. */
    uint32_t last =
        file->made_chars != 0 ? parent_chars(file, file->made_chars) : file->directory_chars;
    for (uint32_t end = file->directory_chars;; end = parent_chars(file, end)) {
        path_cut(file, end, path);
        if (end == 0 && file->path[0] != '/')
            memcpy(path, ".", 2);
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            return lh_error_set(err, -errno, "cannot open directory %s: %s", path, strerror(errno));
        int error = fsync(fd) == 0 ? 0 : errno;
        close(fd);
        /* Some file systems have nothing to sync here and say so. */
        if (error != 0 && error != EINVAL)
            return lh_error_set(err, -error, "cannot sync directory %s: %s", path, strerror(error));
        if (end <= last)
            return 0;
    }
}

void lh_store_files_unmake(struct lh_store *store)
{
    char path[LH_STORE_PATH_BYTES_MAX];
    /* Backwards: a later directory may lie in one that was made for an earlier file. */
    for (uint32_t index = store->file_count; index-- > 0;) {
        struct lh_store_file *file = &store->files[index];
        if (file->is_made)
            unlink(file->path);
        file->is_made = false;
        if (file->made_chars == 0)
            continue;
        for (uint32_t end = file->directory_chars; end >= file->made_chars;
             end = parent_chars(file, end)) {
            path_cut(file, end, path);
            rmdir(path);
        }
        file->made_chars = 0;
    }
}

void lh_store_files_close(struct lh_store *store)
{
    for (uint32_t file = 0; file < store->file_count; file++) {
        if (store->io_files[file].fd < 0)
            continue;
        lh_store_file_unlock(store, file);
        close(store->io_files[file].fd);
        store->io_files[file].fd = -1;
    }
}

int lh_store_file_read(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                       void *buffer, uint64_t bytes, struct lh_error *err)
{
    for (uint64_t done = 0; done < bytes;) {
        ssize_t rc = pread(store->io_files[file_index].fd, (uint8_t *)buffer + done, bytes - done,
                           (off_t)(offset + done));
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc < 0)
            return lh_error_set(
                err, -errno, "cannot read %" PRIu64 " bytes at offset %" PRIu64 " of %s: %s",
                bytes - done, offset + done, store->files[file_index].path, strerror(errno));
        if (rc == 0)
            return lh_error_set(err, -ENODATA,
                                "%s ends at %" PRIu64 ", bytes up to %" PRIu64
                                " were to be read: it was truncated",
                                store->files[file_index].path, offset + done, offset + bytes);
        done += (uint64_t)rc;
    }
    return 0;
}

int lh_store_file_write(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                        const void *buffer, uint64_t bytes, struct lh_error *err)
{
    for (uint64_t done = 0; done < bytes;) {
        ssize_t rc = pwrite(store->io_files[file_index].fd, (const uint8_t *)buffer + done,
                            bytes - done, (off_t)(offset + done));
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc <= 0) {
            int error = rc == 0 ? EIO : errno;
            return lh_error_set(
                err, -error, "cannot write %" PRIu64 " bytes at offset %" PRIu64 " of %s: %s",
                bytes - done, offset + done, store->files[file_index].path, strerror(error));
        }
        done += (uint64_t)rc;
    }
    return 0;
}

int lh_store_file_sync(const struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    /* Not tried again after EINTR or anything else: a failed sync may have dropped the bytes. */
    if (fdatasync(store->io_files[file_index].fd) != 0)
        return lh_error_set(err, -errno, "cannot sync %s: %s", store->files[file_index].path,
                            strerror(errno));
    return 0;
}
