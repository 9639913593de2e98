/*
 * Locks data files, and finds out whether they can be accessed with O_DIRECT.
 *
 * The lock is flock() on the data file itself. It belongs to the open file, so the kernel releases
 * it when the process ends, for whatever reason. A writer stores its process id in the owner's
 * block, for the error message that a second process gets. Readers share the lock and store
 * nothing.
 *
 * A forked child shares the open file and with it the lock. Close therefore unlocks explicitly
 * instead of relying on the child to exit.
 *
 * The lock of a killed process can briefly outlive the process, because the kernel frees an
 * io_uring, which holds the files, only afterwards. Until then the last writes of the process may
 * be in flight, so lh_store_file_lock() waits for the lock of a dead process.
 */
#include <endian.h>
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "store/store_impl.h"

/* The lock of a dead process is retried for ten seconds. */
#define DEAD_RETRY_COUNT 1000
#define DEAD_RETRY_NS 10000000

/* The process id in the owner's block; 0: no process. */
static uint64_t owner_read(struct lh_store *store, uint32_t file_index)
{
    const struct lh_store_owner_disk *owner = (const void *)store->bounce.base;
    if (lh_store_file_read(store, file_index, LH_STORE_OWNER_OFFSET, store->bounce.base,
                           sizeof(*owner), NULL) < 0)
        return 0;
    bool is_owner = memcmp(owner->magic, "LOHANPID", sizeof(owner->magic)) == 0;
    return is_owner ? le64toh(owner->pid) : 0;
}

static bool is_dead(uint64_t pid)
{
    return pid > 0 && pid <= INT32_MAX && kill((pid_t)pid, 0) != 0 && errno == ESRCH;
}

static int file_lock(const struct lh_store *store, uint32_t file_index, enum lh_store_fs_lock lock)
{
    LH_ASSERT(file_index < store->file_count && store->io_files[file_index].fd >= 0);
    return store->fs->ops->lock(store->fs, store->io_files[file_index].fd, lock);
}

static int busy(struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    const struct lh_store_file *file = &store->files[file_index];
    /* If the lock can be shared, readers hold it, and the owner's block names an earlier writer. */
    bool is_readers = !store->is_read_only && file_lock(store, file_index, LH_STORE_FS_SHARED) == 0;
    if (is_readers) {
        (void)!file_lock(store, file_index, LH_STORE_FS_UNLOCKED);
        return lh_error_set(
            err, -EBUSY, "%s is open for reading in another process; close it there", file->path);
    }
    uint64_t pid = owner_read(store, file_index);
    if (is_dead(pid))
        return lh_error_set(err, -EBUSY,
                            "%s was in use by process %" PRIu64 ", which has ended, but a child of "
                            "that process still has the file open; end the child, or choose "
                            "another directory",
                            file->path, pid);
    if (pid != 0)
        return lh_error_set(err, -EBUSY,
                            "%s is in use by process %" PRIu64 "; end it, or choose another "
                            "directory",
                            file->path, pid);
    return lh_error_set(err, -EBUSY, "%s is in use by another process", file->path);
}

int lh_store_file_lock(struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    struct lh_store_file *file = &store->files[file_index];
    enum lh_store_fs_lock lock = store->is_read_only ? LH_STORE_FS_SHARED : LH_STORE_FS_EXCLUSIVE;
    int rc = -EWOULDBLOCK;
    LH_ASSERT(!file->is_locked && !store->is_held);
    for (uint32_t i = 0; i < DEAD_RETRY_COUNT && rc == -EWOULDBLOCK; i++) {
        rc = file_lock(store, file_index, lock);
        if (rc == -EWOULDBLOCK && !is_dead(owner_read(store, file_index)))
            break;
        if (rc == -EWOULDBLOCK)
            nanosleep(&(struct timespec){.tv_nsec = DEAD_RETRY_NS}, NULL);
    }
    if (rc == -EWOULDBLOCK)
        return busy(store, file_index, err);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot lock %s: %s", file->path, strerror(-rc));
    file->is_locked = true;
    return 0;
}

static int owner_write(struct lh_store *store, uint32_t file_index, uint64_t pid,
                       struct lh_error *err)
{
    struct lh_store_owner_disk *owner = (void *)store->bounce.base;
    LH_ASSERT(!store->is_read_only);
    memset(owner, 0, sizeof(*owner));
    memcpy(owner->magic, "LOHANPID", sizeof(owner->magic));
    owner->pid = htole64(pid);
    return lh_store_file_write(store, file_index, LH_STORE_OWNER_OFFSET, owner, sizeof(*owner),
                               err);
}

void lh_store_file_unlock(struct lh_store *store, uint32_t file_index)
{
    struct lh_store_file *file = &store->files[file_index];
    if (!file->is_locked)
        return;
    LH_ASSERT(!store->is_held);
    /* Clearing the process id is only a courtesy: a stale one is harmless without a lock. */
    if (!store->is_read_only && file->is_owned)
        (void)!owner_write(store, file_index, 0, NULL);
    (void)!file_lock(store, file_index, LH_STORE_FS_UNLOCKED);
    file->is_locked = false;
}

/* Note that the owner's block is unusable. Only an error message needs it, so opening continues. */
static int owner_is_lost(struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    lh_error_clear(err);
    lh_store_note_add(store,
                      "%s: the block at offset %" PRIu64
                      ", which records the process that uses the file, cannot be read or written: "
                      "%s",
                      store->files[file_index].path, LH_STORE_OWNER_OFFSET, strerror(EIO));
    return 0;
}

static int owner_exchange(struct lh_store *store, uint32_t file_index, struct lh_error *err)
{
    struct lh_store_file *file = &store->files[file_index];
    struct lh_store_owner_disk *owner = (void *)store->bounce.base;
    const uint64_t pid = (uint64_t)getpid();
    LH_ASSERT(file->is_locked || store->is_held);
    if (!store->is_read_only) {
        int rc = owner_write(store, file_index, pid, err);
        if (rc == -EIO)
            return owner_is_lost(store, file_index, err);
        LH_TRY(rc);
        file->is_owned = true;
    }
    memset(owner, 0, sizeof(*owner));
    int rc =
        lh_store_file_read(store, file_index, LH_STORE_OWNER_OFFSET, owner, sizeof(*owner), err);
    if (rc == -EIO)
        return owner_is_lost(store, file_index, err);
    LH_TRY(rc);
    if (!store->is_read_only && le64toh(owner->pid) != pid)
        return lh_error_set(err, -EIO,
                            "%s returned other bytes than were written to it (offset %" PRIu64 ")",
                            file->path, LH_STORE_OWNER_OFFSET);
    return 0;
}

int lh_store_file_probe(struct lh_store *store, uint32_t file_index, bool allow_buffered,
                        struct lh_error *err)
{
    struct lh_io_file *io_file = &store->io_files[file_index];
    const char *path = store->files[file_index].path;
    LH_ASSERT(file_index < store->file_count);
    LH_ASSERT(io_file->fd >= 0 && !io_file->direct);
    int rc = store->fs->ops->set_direct(store->fs, io_file->fd, true);
    if (rc == 0) {
        rc = owner_exchange(store, file_index, err);
        if (rc == 0) {
            io_file->direct = true;
            return 0;
        }
    }
    /* EINVAL and EOPNOTSUPP mean that O_DIRECT is unsupported; other errors are real failures. */
    if (rc != -EINVAL && rc != -EOPNOTSUPP)
        return lh_error_set(err, rc, "%s failed with O_DIRECT: %s", path, strerror(-rc));
    if (!allow_buffered)
        return lh_error_set(err, -EOPNOTSUPP,
                            "%s: its file system refuses O_DIRECT (%s); choose another directory, "
                            "or allow buffered I/O",
                            path, strerror(-rc));
    lh_store_note_add(store, "%s: O_DIRECT is refused (%s); its I/O goes through the page cache",
                      path, strerror(-rc));
    rc = store->fs->ops->set_direct(store->fs, io_file->fd, false);
    if (rc < 0)
        return lh_error_set(err, rc, "cannot reset the flags of %s: %s", path, strerror(-rc));
    io_file->direct = false;
    return owner_exchange(store, file_index, err);
}
