/* Test that the kernel's file calls sync the requested file once, and report every failure. */
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

int main(void)
{
    test_file(lh_store_fs_real());
    test_directory(lh_store_fs_real());
    return 0;
}
