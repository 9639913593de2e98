/*
 * The vtable of a store's file calls. It lets a simulator keep stores in memory and make drives and
 * power fail inside create, open, mark and close, too.
 *
 * The real implementation passes each call on to the kernel. Requests submitted to csrc/io bypass
 * this interface: they use the descriptors that open() returned (lh_store_files()).
 *
 * Every call returns 0 (or a count) or -errno, and never -EINTR. A short read or write is not an
 * error; a read of 0 bytes means the end of the file.
 *
 * Thread: the store's owner. One file system may serve several stores on several threads.
 */
#ifndef LH_STORE_FS_H
#define LH_STORE_FS_H

#include "base/base.h"

enum lh_store_fs_access {
    LH_STORE_FS_READ,
    LH_STORE_FS_WRITE,  /* open for reading and writing */
    LH_STORE_FS_CREATE, /* create (mode 0600) and open as WRITE; -EEXIST if the name is in use */
};

enum lh_store_fs_lock {
    LH_STORE_FS_UNLOCKED,
    LH_STORE_FS_SHARED,
    LH_STORE_FS_EXCLUSIVE,
};

struct lh_store_fs_info {
    uint64_t device;
    uint64_t inode;
    uint64_t bytes; /* the file's size */
    bool is_regular;
    bool is_directory;
    bool is_deleted; /* an open file that has no name any more */
    /* The name of the file system if it keeps its data in main memory, else NULL; static. */
    const char *memory_name;
    /* The space of the file system available to this process; UINT64_MAX: unknown. */
    uint64_t available_bytes;
};

struct lh_store_fs;

struct lh_store_fs_ops {
    /*
     * Open a file without blocking, without following a symbolic link at the end of path (-ELOOP),
     * and close-on-exec. It need not be a regular file: see info().
     */
    int (*open)(const struct lh_store_fs *fs, const char *path, enum lh_store_fs_access access,
                int *fd_out);
    /* Close fd. The lock is released when the last descriptor of the open file is closed. */
    void (*close)(const struct lh_store_fs *fs, int fd);
    int64_t (*read)(const struct lh_store_fs *fs, int fd, void *buffer, uint64_t bytes,
                    uint64_t offset);
    int64_t (*write)(const struct lh_store_fs *fs, int fd, const void *buffer, uint64_t bytes,
                     uint64_t offset);
    int (*sync)(const struct lh_store_fs *fs, int fd); /* fdatasync(), never retried */
    /* Reserve space and set the size. -EOPNOTSUPP: the file system cannot reserve space. */
    int (*reserve)(const struct lh_store_fs *fs, int fd, uint64_t bytes);
    int (*truncate)(const struct lh_store_fs *fs, int fd, uint64_t bytes);
    int (*info)(const struct lh_store_fs *fs, int fd, struct lh_store_fs_info *info_out);
    /* Change the lock without waiting: -EWOULDBLOCK if another open file has a conflicting one. */
    int (*lock)(const struct lh_store_fs *fs, int fd, enum lh_store_fs_lock lock);
    int (*set_direct)(const struct lh_store_fs *fs, int fd, bool direct); /* O_DIRECT */

    /* As info(), for a path. Symbolic links are followed. */
    int (*path_info)(const struct lh_store_fs *fs, const char *path,
                     struct lh_store_fs_info *info_out);
    int (*make_directory)(const struct lh_store_fs *fs, const char *path); /* mode 0700 */
    int (*sync_directory)(const struct lh_store_fs *fs, const char *path); /* fsync() */
    int (*remove)(const struct lh_store_fs *fs, const char *path); /* file or empty directory */
    int (*random)(const struct lh_store_fs *fs, void *buffer, uint64_t bytes); /* for UUIDs */
};

/* Every implementation begins with this struct. */
struct lh_store_fs {
    const struct lh_store_fs_ops *ops;
};

/* The kernel's file calls, in a static object. */
const struct lh_store_fs *lh_store_fs_real(void);

#endif
