/* The store's file calls, implemented by the kernel: see fs.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* fallocate, O_DIRECT */
#endif
#include "store/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/assert.h"

#define TMPFS_TYPE 0x01021994
#define RAMFS_TYPE 0x858458f6

static int fs_open(const struct lh_store_fs *fs, const char *path, enum lh_store_fs_access access,
                   int *fd_out)
{
    (void)fs;
    int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
    if (access == LH_STORE_FS_READ)
        flags |= O_RDONLY;
    else
        flags |= O_RDWR | (access == LH_STORE_FS_CREATE ? O_CREAT | O_EXCL : 0);
    *fd_out = -1;
    int fd = -1;
    do {
        fd = open(path, flags, 0600);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return -errno;
    /* O_NONBLOCK is only for open(): asynchronous I/O on such a file might return -EAGAIN. */
    int status = fcntl(fd, F_GETFL);
    if (status < 0 || fcntl(fd, F_SETFL, status & ~O_NONBLOCK) != 0) {
        int code = -errno;
        close(fd);
        return code;
    }
    *fd_out = fd;
    return 0;
}

static void fs_close(const struct lh_store_fs *fs, int fd)
{
    (void)fs;
    close(fd);
}

static int64_t fs_read(const struct lh_store_fs *fs, int fd, void *buffer, uint64_t bytes,
                       uint64_t offset)
{
    (void)fs;
    ssize_t rc = -1;
    do {
        rc = pread(fd, buffer, bytes, (off_t)offset);
    } while (rc < 0 && errno == EINTR);
    return rc < 0 ? -errno : rc;
}

static int64_t fs_write(const struct lh_store_fs *fs, int fd, const void *buffer, uint64_t bytes,
                        uint64_t offset)
{
    (void)fs;
    ssize_t rc = -1;
    do {
        rc = pwrite(fd, buffer, bytes, (off_t)offset);
    } while (rc < 0 && errno == EINTR);
    return rc < 0 ? -errno : rc;
}

static int fs_sync(const struct lh_store_fs *fs, int fd)
{
    (void)fs;
    /* A sync is never retried, even after EINTR: a failed one may have dropped the bytes. */
    if (fdatasync(fd) == 0)
        return 0;
    return errno == EINTR ? -EIO : -errno;
}

static int fs_reserve(const struct lh_store_fs *fs, int fd, uint64_t bytes)
{
    (void)fs;
    int rc = 0;
    /* posix_fallocate() would write every block if the file system cannot reserve space. */
    do {
        rc = fallocate(fd, 0, 0, (off_t)bytes);
    } while (rc != 0 && errno == EINTR);
    return rc != 0 ? -errno : 0;
}

static int fs_truncate(const struct lh_store_fs *fs, int fd, uint64_t bytes)
{
    (void)fs;
    int rc = 0;
    do {
        rc = ftruncate(fd, (off_t)bytes);
    } while (rc != 0 && errno == EINTR);
    return rc != 0 ? -errno : 0;
}

static void info_fill(const struct stat *file, const struct statfs *system,
                      struct lh_store_fs_info *info_out)
{
    uint32_t type = (uint32_t)system->f_type;
    uint64_t unit_bytes = (uint64_t)(system->f_frsize != 0 ? system->f_frsize : system->f_bsize);
    *info_out = (struct lh_store_fs_info){
        .device = file->st_dev,
        .inode = file->st_ino,
        .bytes = (uint64_t)file->st_size,
        .is_regular = S_ISREG(file->st_mode),
        .is_directory = S_ISDIR(file->st_mode),
        .is_deleted = file->st_nlink == 0,
        .memory_name = type == TMPFS_TYPE   ? "tmpfs"
                       : type == RAMFS_TYPE ? "ramfs"
                                            : NULL,
        /* If the file system does not count its blocks, only reserving space shows what is free. */
        .available_bytes =
            system->f_blocks == 0 ? UINT64_MAX : (uint64_t)system->f_bavail * unit_bytes,
    };
}

static int fs_info(const struct lh_store_fs *fs, int fd, struct lh_store_fs_info *info_out)
{
    (void)fs;
    struct stat file;
    struct statfs system;
    if (fstat(fd, &file) != 0 || fstatfs(fd, &system) != 0)
        return -errno;
    info_fill(&file, &system, info_out);
    return 0;
}

static int fs_lock(const struct lh_store_fs *fs, int fd, enum lh_store_fs_lock lock)
{
    static const int operations[] = {
        [LH_STORE_FS_UNLOCKED] = LOCK_UN,
        [LH_STORE_FS_SHARED] = LOCK_SH | LOCK_NB,
        [LH_STORE_FS_EXCLUSIVE] = LOCK_EX | LOCK_NB,
    };
    (void)fs;
    LH_ASSERT((uint64_t)lock < LH_COUNT_OF(operations));
    int rc = 0;
    do {
        rc = flock(fd, operations[lock]);
    } while (rc != 0 && errno == EINTR);
    return rc != 0 ? -errno : 0;
}

static int fs_set_direct(const struct lh_store_fs *fs, int fd, bool direct)
{
    (void)fs;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0)
        return -errno;
    flags = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
    return fcntl(fd, F_SETFL, flags) != 0 ? -errno : 0;
}

static int fs_path_info(const struct lh_store_fs *fs, const char *path,
                        struct lh_store_fs_info *info_out)
{
    (void)fs;
    struct stat file;
    struct statfs system;
    if (stat(path, &file) != 0 || statfs(path, &system) != 0)
        return -errno;
    info_fill(&file, &system, info_out);
    return 0;
}

static int fs_make_directory(const struct lh_store_fs *fs, const char *path)
{
    (void)fs;
    return mkdir(path, 0700) != 0 ? -errno : 0;
}

static int fs_sync_directory(const struct lh_store_fs *fs, const char *path)
{
    (void)fs;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = fsync(fd) == 0 ? 0 : -errno;
    close(fd);
    /* Some file systems have nothing to sync for a directory and return EINVAL. */
    return rc == -EINVAL ? 0 : rc;
}

static int fs_remove(const struct lh_store_fs *fs, const char *path)
{
    (void)fs;
    return remove(path) != 0 ? -errno : 0;
}

static int fs_random(const struct lh_store_fs *fs, void *buffer, uint64_t bytes)
{
    (void)fs;
    LH_ASSERT(bytes <= 256); /* getrandom(2) returns up to 256 bytes completely */
    ssize_t rc = getrandom(buffer, bytes, 0);
    if (rc < 0)
        return -errno;
    return (uint64_t)rc == bytes ? 0 : -EIO;
}

const struct lh_store_fs *lh_store_fs_real(void)
{
    static const struct lh_store_fs_ops ops = {
        .open = fs_open,
        .close = fs_close,
        .read = fs_read,
        .write = fs_write,
        .sync = fs_sync,
        .reserve = fs_reserve,
        .truncate = fs_truncate,
        .info = fs_info,
        .lock = fs_lock,
        .set_direct = fs_set_direct,
        .path_info = fs_path_info,
        .make_directory = fs_make_directory,
        .sync_directory = fs_sync_directory,
        .remove = fs_remove,
        .random = fs_random,
    };
    static const struct lh_store_fs real = {.ops = &ops};
    return &real;
}
