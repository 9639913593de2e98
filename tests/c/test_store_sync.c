/*
 * Test that the kernel's file calls sync the requested file once, and report every failure; and
 * that blocking writes are few and large.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lh_test.h"
#include "store/fs.h"
#include "store_fixture.h"

/* These functions replace the C library's in the whole program. */
static struct {
    uint32_t file_count;
    uint32_t directory_count;
    int fail_code; /* the error of the sync that fails; 0: none fails */
} syncs;

int fdatasync(int fd)
{
    syncs.file_count++;
    errno = syncs.fail_code;
    return syncs.fail_code != 0 ? -1 : (int)syscall(SYS_fdatasync, fd);
}

int fsync(int fd)
{
    struct stat info;
    LH_CHECK(fstat(fd, &info) == 0);
    syncs.directory_count += S_ISDIR(info.st_mode);
    syncs.file_count += !S_ISDIR(info.st_mode);
    errno = syncs.fail_code;
    return syncs.fail_code != 0 ? -1 : (int)syscall(SYS_fsync, fd);
}

static void begin(int fail_code)
{
    memset(&syncs, 0, sizeof(syncs));
    syncs.fail_code = fail_code;
}

static void test_file(const struct lh_store_fs *fs)
{
    int fd = -1;
    lh_test_name("a file is synced by one call");
    LH_CHECK(fs->ops->open(fs, fixture_path("file"), LH_STORE_FS_CREATE, &fd) == 0);
    begin(0);
    LH_CHECK(fs->ops->sync(fs, fd) == 0 && syncs.file_count == 1);

    lh_test_name("a sync that fails is an error, and is not tried again");
    static const int codes[] = {EIO, ENOSPC, EDQUOT, EINTR};
    for (uint32_t i = 0; i < LH_COUNT_OF(codes); i++) {
        begin(codes[i]);
        int rc = fs->ops->sync(fs, fd);
        LH_CHECK(rc == (codes[i] == EINTR ? -EIO : -codes[i]) && syncs.file_count == 1);
    }
    begin(0);
    LH_CHECK(fs->ops->sync(fs, -1) == -EBADF);
    fs->ops->close(fs, fd);
}

static void test_directory(const struct lh_store_fs *fs)
{
    lh_test_name("a directory is synced by one call, and nothing else is");
    begin(0);
    LH_CHECK(fs->ops->sync_directory(fs, fixture_root()) == 0);
    LH_CHECK(syncs.directory_count == 1 && syncs.file_count == 0);

    lh_test_name("a file system that has nothing to sync there says EINVAL; all else is an error");
    begin(EINVAL);
    LH_CHECK(fs->ops->sync_directory(fs, fixture_root()) == 0);
    begin(EIO);
    LH_CHECK(fs->ops->sync_directory(fs, fixture_root()) == -EIO && syncs.directory_count == 1);
    LH_CHECK(fs->ops->sync_directory(fs, fixture_path("absent")) == -ENOENT);
}

static struct {
    uint32_t count;
    int fail_code; /* the error of every write; 0: none fails */
} writes;

static int64_t counted_write(const struct lh_store_fs *fs, int fd, const void *buffer,
                             uint64_t bytes, uint64_t offset)
{
    (void)fs;
    writes.count++;
    const struct lh_store_fs *real = lh_store_fs_real();
    return writes.fail_code != 0 ? writes.fail_code
                                 : real->ops->write(real, fd, buffer, bytes, offset);
}

static void test_large_writes(void)
{
    lh_test_name("whole MiB of aligned memory are written up to 8 at a time");
    const uint32_t extent = 2;
    const uint64_t bytes = fixture_extents[extent].bytes;
    struct lh_store_fs_ops ops = *lh_store_fs_real()->ops;
    struct lh_store_fs fs = {.ops = &ops};
    struct lh_error err = {0};
    struct lh_store *store = NULL;
    void *memory = NULL;
    LH_CHECK(bytes == 9 * LH_MIB && posix_memalign(&memory, LH_BLOCK_BYTES, bytes) == 0);
    fixture_fill(memory, extent, 1, 0, bytes);
    ops.write = counted_write;
    fixture_fs = &fs;
    LH_CHECK(fixture_create("large", &(struct fixture_opts){0}, &store, &err) == 0);
    writes.count = 0;
    LH_CHECK(lh_store_write_sync(store, extent, 0, memory, bytes, &err) == 0);
    LH_CHECK(writes.count == 2);
    memset(memory, 0, bytes);
    LH_CHECK(lh_store_read_sync(store, extent, 0, memory, bytes, &err) == 0);
    uint8_t *expected = malloc(bytes);
    LH_CHECK(expected != NULL);
    fixture_fill(expected, extent, 1, 0, bytes);
    LH_CHECK(memcmp(memory, expected, bytes) == 0);

    lh_test_name("a large write that fails is an error, and keeps the checksums that were there");
    void *other = NULL;
    LH_CHECK(posix_memalign(&other, LH_BLOCK_BYTES, bytes) == 0);
    memset(other, 1, bytes);
    writes.fail_code = -EIO;
    LH_CHECK(lh_store_write_sync(store, extent, 0, other, bytes, &err) == -EIO);
    writes.fail_code = 0;
    LH_CHECK(lh_store_read_sync(store, extent, 0, other, bytes, &err) == 0);
    LH_CHECK(memcmp(memory, other, bytes) == 0);
    lh_store_close(store);
    free(expected);
    free(other);
    free(memory);
}

int main(void)
{
    test_large_writes();
    test_file(lh_store_fs_real());
    test_directory(lh_store_fs_real());
    return 0;
}
