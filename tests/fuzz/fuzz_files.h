/*
 * The files of a store, in memory, for fuzz_store.c: csrc/store's file calls, of which one may
 * fail, or one block be unreadable. The file that includes this defines changed(), which is called
 * with the bytes that a write has changed.
 */
#ifndef LH_FUZZ_FILES_H
#define LH_FUZZ_FILES_H

#include "fuzz.h"
#include "store/fs.h"
#include "store/store.h"

#define FILE_COUNT_MAX 2
#define FILE_BYTES_MAX (4 * LH_MIB)

struct memory_file {
    uint8_t *bytes;
    uint64_t size;
    bool is_there;
    bool is_open;
    bool is_direct; /* all transfers are whole blocks */
};

static struct memory_file files[FILE_COUNT_MAX];
/* How the store is opened, and which calls fail then. */
static struct faults {
    uint32_t read, write, sync; /* the number of the call that fails; 0: none */
    int bad_file;               /* the file with a block that cannot be read; below 0: none */
    uint64_t bad_offset;
    uint64_t step;
    bool has_step;
} faults;

static void changed(int file, uint64_t offset, uint64_t bytes);

static int file_of(const char *path)
{
    return path[0] == '/' && path[1] >= '0' && path[1] < '0' + FILE_COUNT_MAX ? path[1] - '0' : -1;
}

static int memory_open(const struct lh_store_fs *fs, const char *path,
                       enum lh_store_fs_access access, int *fd_out)
{
    (void)fs;
    int file = file_of(path);
    *fd_out = -1;
    LH_ASSERT(file >= 0 && !files[file].is_open);
    if (access == LH_STORE_FS_CREATE && files[file].is_there)
        return -EEXIST;
    if (access != LH_STORE_FS_CREATE && !files[file].is_there)
        return -ENOENT;
    files[file].is_there = true;
    files[file].is_open = true;
    files[file].is_direct = false;
    *fd_out = file;
    return 0;
}

static void memory_close(const struct lh_store_fs *fs, int fd)
{
    (void)fs;
    LH_ASSERT(files[fd].is_open);
    files[fd].is_open = false;
}

static int64_t memory_read(const struct lh_store_fs *fs, int fd, void *buffer, uint64_t bytes,
                           uint64_t offset)
{
    (void)fs;
    LH_ASSERT(files[fd].is_open);
    if (files[fd].is_direct && !lh_is_aligned(offset | bytes, LH_BLOCK_BYTES))
        return -EINVAL;
    if (faults.read > 0 && --faults.read == 0)
        return -EIO;
    if (faults.bad_file == fd && offset < faults.bad_offset + LH_BLOCK_BYTES &&
        faults.bad_offset < offset + bytes)
        return -EIO;
    if (offset >= files[fd].size)
        return 0;
    uint64_t count = lh_min_u64(bytes, files[fd].size - offset);
    memcpy(buffer, files[fd].bytes + offset, count);
    return (int64_t)count;
}

static int64_t memory_write(const struct lh_store_fs *fs, int fd, const void *buffer,
                            uint64_t bytes, uint64_t offset)
{
    (void)fs;
    LH_ASSERT(files[fd].is_open && lh_is_aligned(offset, LH_BLOCK_BYTES));
    LH_ASSERT(offset + bytes <= files[fd].size);
    if (faults.write > 0 && --faults.write == 0)
        return -EIO;
    memcpy(files[fd].bytes + offset, buffer, bytes);
    changed(fd, offset, bytes);
    return (int64_t)bytes;
}

static int memory_sync(const struct lh_store_fs *fs, int fd)
{
    (void)fs;
    LH_ASSERT(files[fd].is_open);
    return faults.sync > 0 && --faults.sync == 0 ? -EIO : 0;
}

static int memory_resize(const struct lh_store_fs *fs, int fd, uint64_t bytes)
{
    (void)fs;
    LH_ASSERT(bytes <= FILE_BYTES_MAX);
    files[fd].size = bytes;
    return 0;
}

static int memory_info(const struct lh_store_fs *fs, int fd, struct lh_store_fs_info *info_out)
{
    (void)fs;
    *info_out = (struct lh_store_fs_info){.device = 1,
                                          .inode = (uint64_t)fd + 1,
                                          .bytes = files[fd].size,
                                          .is_regular = true,
                                          .available_bytes = UINT64_MAX};
    return 0;
}

static int memory_path_info(const struct lh_store_fs *fs, const char *path,
                            struct lh_store_fs_info *info_out)
{
    (void)fs;
    bool is_file = strstr(path, LH_STORE_FILE_NAME) != NULL;
    int file = file_of(path);
    *info_out = (struct lh_store_fs_info){.device = 1,
                                          .inode = (uint64_t)(file + 1) + (is_file ? 0 : 100),
                                          .is_regular = is_file,
                                          .is_directory = !is_file,
                                          .available_bytes = UINT64_MAX};
    return is_file && !files[file].is_there ? -ENOENT : 0;
}

static int memory_lock(const struct lh_store_fs *fs, int fd, enum lh_store_fs_lock lock)
{
    (void)fs;
    (void)lock;
    return files[fd].is_open ? 0 : -EBADF;
}

static int memory_set_direct(const struct lh_store_fs *fs, int fd, bool direct)
{
    (void)fs;
    files[fd].is_direct = direct;
    return files[fd].is_open ? 0 : -EBADF;
}

static int memory_path(const struct lh_store_fs *fs, const char *path)
{
    (void)fs;
    (void)path;
    return 0;
}

static int memory_random(const struct lh_store_fs *fs, void *buffer, uint64_t bytes)
{
    (void)fs;
    memset(buffer, 0x55, bytes);
    return 0;
}

static const struct lh_store_fs_ops memory_ops = {
    .open = memory_open,
    .close = memory_close,
    .read = memory_read,
    .write = memory_write,
    .sync = memory_sync,
    .reserve = memory_resize,
    .truncate = memory_resize,
    .info = memory_info,
    .lock = memory_lock,
    .set_direct = memory_set_direct,
    .path_info = memory_path_info,
    .make_directory = memory_path,
    .sync_directory = memory_path,
    .remove = memory_path,
    .random = memory_random,
};
static const struct lh_store_fs memory_fs = {.ops = &memory_ops};

#endif
