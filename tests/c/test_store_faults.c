/* Test what can be wrong with files, directories, drives and memory, and the store's errors. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* for pipe2 and unshare */
#endif
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "base/crc32c.h"
#include "lh_test.h"
#include "store/format.h"
#include "store_fixture.h"

static struct lh_error err;
static struct lh_store *store;

static void make_steps(const char *name, uint32_t count, uint64_t step_count)
{
    LH_CHECK(fixture_create(name, &(struct fixture_opts){.directory_count = count, .small = true},
                            &store, &err) == 0);
    for (uint64_t step = 1; step <= step_count; step++) {
        fixture_write_step(store, step);
        fixture_commit(store, step);
    }
    lh_store_close(store);
    store = NULL;
}

static int reopen(const char *name, uint32_t count)
{
    memset(&err, 0, sizeof(err));
    int rc = fixture_open(name, count, false, false, &store, &err);
    LH_CHECK((rc == 0) == (store != NULL));
    LH_CHECK(rc == 0 || (err.code == rc && err.message[0] != '\0'));
    LH_CHECK(rc == 0 || fixture_alloc.live_count == 0);
    return rc;
}

static void header_get(const char *path, struct lh_store_header_disk *header)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    LH_CHECK(fd >= 0 && pread(fd, header, sizeof(*header), 0) == sizeof(*header));
    close(fd);
}

static void header_put(const char *path, struct lh_store_header_disk *header, bool with_crc)
{
    if (with_crc)
        header->crc = lh_crc32c(0, header, offsetof(struct lh_store_header_disk, crc));
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    LH_CHECK(fd >= 0 && pwrite(fd, header, sizeof(*header), 0) == sizeof(*header));
    close(fd);
}

static void test_missing(void)
{
    lh_test_name("a store that is not there, or only in part, is named");
    LH_CHECK(reopen("absent", 1) == -ENOENT && strstr(err.message, "absent0") != NULL);
    make_steps("part", 3, 1);
    LH_CHECK(reopen("part", 2) == -EXDEV && strstr(err.message, "file 2") != NULL);
    make_steps("alone", 1, 1);
    LH_CHECK(rename(fixture_path("part2"), fixture_path("part2-kept")) == 0);
    LH_CHECK(rename(fixture_path("alone0"), fixture_path("part2")) == 0);
    LH_CHECK(reopen("part", 3) == -EXDEV && strstr(err.message, "different stores") != NULL);
    fixture_remove(fixture_path("part2"));
    LH_CHECK(reopen("part", 3) == -ENOENT);
    LH_CHECK(rename(fixture_path("part2-kept"), fixture_path("part2")) == 0);
    LH_CHECK(reopen("part", 3) == 0 && fixture_holds_step(store, 1));
    lh_store_close(store);
}

static void test_exists(void)
{
    lh_test_name("creating over a store is refused, and leaves it and nothing else");
    make_steps("twice", 1, 2);
    LH_CHECK(rename(fixture_path("twice0"), fixture_path("twice1")) == 0);
    struct fixture_opts opts = {.directory_count = 2};
    LH_CHECK(fixture_create("twice", &opts, &store, &err) == -EEXIST && store == NULL);
    LH_CHECK(strstr(err.message, "twice1/lohan.data") != NULL);
    LH_CHECK(access(fixture_path("twice0"), F_OK) != 0);
    LH_CHECK(rename(fixture_path("twice1"), fixture_path("twice0")) == 0);
    LH_CHECK(reopen("twice", 1) == 0 && fixture_holds_step(store, 2));
    lh_store_close(store);
    LH_CHECK(close(open(fixture_path("file0"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)) == 0);
    opts.directory_count = 1;
    LH_CHECK(fixture_create("file", &opts, &store, &err) == -ENOTDIR);
}

static void test_busy(void)
{
    lh_test_name("a store in use names the process that has it, until that dies");
    make_steps("busy", 2, 1);
    int ready[2];
    char byte = 0;
    LH_CHECK(pipe2(ready, O_CLOEXEC) == 0);
    pid_t child = fork();
    if (child == 0) {
        /* Were this test to fail, its children would outlive it. */
        alarm(60);
        _exit(fixture_open("busy", 2, false, false, &store, &err) == 0 &&
                      write(ready[1], "x", 1) == 1 && pause() == 0
                  ? 0
                  : 1);
    }
    LH_CHECK(read(ready[0], &byte, 1) == 1);
    char pid[32];
    snprintf(pid, sizeof(pid), "process %d;", (int)child);
    LH_CHECK(reopen("busy", 2) == -EBUSY && strstr(err.message, pid) != NULL);
    LH_CHECK(fixture_open("busy", 2, true, true, &store, &err) == -EBUSY);
    LH_CHECK(strstr(err.message, pid) != NULL);
    LH_CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
    LH_CHECK(reopen("busy", 2) == 0 && fixture_holds_step(store, 1));

    lh_test_name("a child that outlives the close does not keep the lock");
    child = fork();
    if (child == 0) {
        alarm(60);
        pause();
        _exit(0);
    }
    lh_store_close(store);
    LH_CHECK(reopen("busy", 2) == 0);
    lh_store_close(store);
    LH_CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
    close(ready[0]);
    close(ready[1]);
}

static void block_clear(const char *path, uint64_t offset)
{
    static const uint8_t zeros[LH_BLOCK_BYTES];
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    LH_CHECK(fd >= 0);
    LH_CHECK(pwrite(fd, zeros, sizeof(zeros), (off_t)offset) == sizeof(zeros));
    close(fd);
}

static void test_newer(void)
{
    lh_test_name("a newer format is refused by both versions' names");
    struct lh_store_header_disk header;
    make_steps("newer", 1, 1);
    const char *path = fixture_path("newer0/lohan.data");
    header_get(path, &header);
    header.version = LH_STORE_FORMAT_VERSION + 6;
    header_put(path, &header, true);
    LH_CHECK(reopen("newer", 1) == -EPROTO);
    LH_CHECK(strstr(err.message, "version 8") != NULL && strstr(err.message, "version 2") != NULL);

    lh_test_name("a creation that was interrupted is told from damage");
    for (uint64_t step_count = 0; step_count < 2; step_count++) {
        char name[32];
        snprintf(name, sizeof(name), "begun%d-", (int)step_count);
        make_steps(name, 2, step_count);
        for (int file = 1; file >= 0; file--) {
            char file_name[64];
            snprintf(file_name, sizeof(file_name), "%s%d/lohan.data", name, file);
            for (uint32_t copy = 0; copy < 2; copy++)
                block_clear(fixture_path(file_name), LH_STORE_HEADER_OFFSET(copy));
            LH_CHECK(reopen(name, 2) == (step_count == 0 ? -EINPROGRESS : -EILSEQ));
            LH_CHECK((strstr(err.message, "interrupted") != NULL) == (step_count == 0));
            LH_CHECK((strstr(err.message, "holds commits") != NULL) == (step_count > 0));
        }
    }
    LH_CHECK(truncate(path, 0) == 0);
    LH_CHECK(reopen("newer", 1) == -EINPROGRESS && strstr(err.message, "is empty") != NULL);
}

static void test_not_a_file(void)
{
    lh_test_name("a link, a FIFO or a folder in a file's place is refused by name, at once");
    make_steps("odd", 1, 1);
    const char *path = fixture_path("odd0/lohan.data");
    const char *kept = fixture_path("odd-kept");
    LH_CHECK(rename(path, kept) == 0);
    /* Opening a FIFO could wait for its other end forever. */
    alarm(60);
    for (int read_only = 0; read_only < 2; read_only++) {
        LH_CHECK(symlink(kept, path) == 0);
        LH_CHECK(fixture_open("odd", 1, false, read_only, &store, &err) == -ELOOP);
        LH_CHECK(strstr(err.message, "odd0/lohan.data is a symbolic link") != NULL);
        LH_CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0);
        LH_CHECK(fixture_open("odd", 1, false, read_only, &store, &err) == -EINVAL);
        LH_CHECK(strstr(err.message, "odd0/lohan.data is not a regular file") != NULL);
        LH_CHECK(unlink(path) == 0 && mkdir(path, 0700) == 0);
        int rc = fixture_open("odd", 1, false, read_only, &store, &err);
        LH_CHECK(rc == (read_only ? -EINVAL : -EISDIR) && strstr(err.message, path) != NULL);
        LH_CHECK(rmdir(path) == 0);
    }
    alarm(0);
    LH_CHECK(rename(kept, path) == 0);
    LH_CHECK(reopen("odd", 1) == 0 && fixture_holds_step(store, 1));
    lh_store_close(store);
}

static void test_same_directory(void)
{
    lh_test_name("one directory under two names is named, at once");
    const char *names[2] = {fixture_path("same0"), fixture_path("same1")};
    struct fixture_opts opts = {.directory_count = 2, .small = true};
    LH_CHECK(mkdir(names[0], 0700) == 0 && symlink("same0", names[1]) == 0);
    LH_CHECK(fixture_create("same", &opts, &store, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, names[0]) != NULL && strstr(err.message, names[1]) != NULL);
    LH_CHECK(unlink(names[1]) == 0 && rmdir(names[0]) == 0);
    make_steps("same", 2, 1);
    /* Killed, so that its owner's block names a process that has ended. */
    pid_t child = fork();
    if (child == 0)
        _exit(fixture_open("same", 2, false, false, &store, &err) == 0 ? 0 : 1);
    int status = 0;
    LH_CHECK(waitpid(child, &status, 0) == child && status == 0);
    LH_CHECK(rename(names[1], fixture_path("same-kept")) == 0 && symlink("same0", names[1]) == 0);
    alarm(5);
    LH_CHECK(reopen("same", 2) == -EINVAL && strstr(err.message, "under two names") != NULL);
    LH_CHECK(strstr(err.message, names[0]) != NULL && strstr(err.message, names[1]) != NULL);
    alarm(0);
}

static void test_truncated(void)
{
    lh_test_name("a truncated file says what it has and what it should have");
    make_steps("short", 2, 1);
    const char *path = fixture_path("short1/lohan.data");
    struct stat info;
    char expected[64];
    LH_CHECK(stat(path, &info) == 0);
    snprintf(expected, sizeof(expected), "%" PRIu64 " bytes, expected %" PRIu64,
             (uint64_t)info.st_size - 1, (uint64_t)info.st_size);
    LH_CHECK(truncate(path, info.st_size - 1) == 0);
    LH_CHECK(reopen("short", 2) == -ENODATA && strstr(err.message, expected) != NULL);
    for (off_t size = 8000; size >= 0; size -= 1000) {
        LH_CHECK(truncate(path, size) == 0);
        LH_CHECK(reopen("short", 2) == (size > 0 ? -ENODATA : -EINPROGRESS));
    }
}

static void test_data_flip(void)
{
    lh_test_name("one wrong bit of data is found by its reader, with file and offset");
    make_steps("data", 1, 1);
    LH_CHECK(reopen("data", 1) == 0);
    struct lh_store_piece piece;
    uint8_t buffer[16 * 1024];
    char place[64];
    LH_CHECK(lh_store_map(store, 0, lh_store_read_slot(store, 0), 0, sizeof(buffer), &piece, 1) ==
             1);
    fixture_flip(lh_store_file_path(store, 0), piece.file_offset + 9000, 5);
    snprintf(place, sizeof(place), "offset %" PRIu64 " of ", piece.file_offset);
    for (uint64_t bytes = 1; bytes <= sizeof(buffer); bytes += 4095) {
        LH_CHECK(lh_store_read_sync(store, 0, 0, buffer, bytes, &err) == -EILSEQ);
        LH_CHECK(strstr(err.message, "data0/lohan.data") && strstr(err.message, place));
        LH_CHECK(strstr(err.message, "extent 0 slot 1") != NULL);
    }
    LH_CHECK(lh_store_read_sync(store, 1, 0, buffer, 4096, &err) == 0);
    lh_store_close(store);
}

static void test_failed_commit(void)
{
    lh_test_name("whatever request of a commit fails, that is the answer from then on");
    for (int failing = 0; failing < 10; failing++) {
        char name[32];
        snprintf(name, sizeof(name), "fail%d-", failing);
        make_steps(name, 2, 1);
        LH_CHECK(reopen(name, 2) == 0);
        fixture_write_step(store, 2);
        struct lh_io_request requests[LH_STORE_COMMIT_REQUEST_COUNT_MAX];
        LH_CHECK(lh_store_commit_begin(store, 2, NULL, 0, &err) == 0);
        int number = 0;
        int rc = 1;
        while ((rc = lh_store_commit_next(store, requests, LH_COUNT_OF(requests), &err)) > 0) {
            for (int index = 0; index < rc; index++)
                requests[index].result = number++ == failing ? -EIO : 0;
        }
        LH_CHECK(rc == -EIO && number > failing && !lh_store_is_committing(store));
        /* A witness, two syncs, two manifests and a sync come before the superblock. */
        LH_CHECK((strstr(err.message, "is unknown") != NULL) == (failing >= 6));
        LH_CHECK(strstr(err.message, "commit of step 2") && strstr(err.message, "lohan.data"));
        struct lh_error later = {0};
        LH_CHECK(lh_store_commit_sync(store, 3, NULL, 0, &later) == -EIO);
        LH_CHECK(strcmp(later.message, err.message) == 0 && lh_store_step(store) == 1);
        lh_store_rollback(store);
        LH_CHECK(fixture_holds_step(store, 1));
        lh_store_close(store);
        LH_CHECK(reopen(name, 2) == 0 && fixture_holds_step(store, 1));
        lh_store_close(store);
    }
}

static void test_memory(void)
{
    lh_test_name("create and open fail for each allocation in turn, and leave nothing");
    struct fixture_opts opts = {.directory_count = 2, .small = true};
    int rc = -ENOMEM;
    int64_t after = 0;
    for (; rc == -ENOMEM; after++) {
        fixture_alloc.fail_after = after;
        rc = fixture_create("new/memory", &opts, &store, &err);
        LH_CHECK(rc == 0 || (store == NULL && fixture_alloc.live_count == 0));
        LH_CHECK(rc == 0 || access(fixture_path("new"), F_OK) != 0);
    }
    LH_CHECK(rc == 0 && after > 10);
    lh_store_close(store);
    rc = -ENOMEM;
    for (after = 0; rc == -ENOMEM; after++) {
        fixture_alloc.fail_after = after;
        rc = reopen("new/memory", 2);
    }
    LH_CHECK(rc == 0 && after > 10);
    lh_store_close(store);
    fixture_alloc.fail_after = -1;
}

static void test_access(void)
{
    lh_test_name("a directory that may not be written to is refused, and nothing is left");
    LH_CHECK(mkdir(fixture_path("closed"), 0755) == 0 && chmod(fixture_root(), 0755) == 0);
    pid_t child = fork();
    if (child == 0) {
        if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0))
            _exit(2);
        /* If that user cannot enter the parent folders either, the result is the same. */
        int rc =
            fixture_create("closed/x", &(struct fixture_opts){.directory_count = 1}, &store, &err);
        bool is_named = strstr(err.message, "cannot make directory") != NULL;
        bool is_right = geteuid() != 65534 || (rc == -EACCES && store == NULL && is_named);
        _exit(is_right ? 0 : 1);
    }
    int status = 0;
    LH_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    LH_CHECK(getuid() != 0 || access(fixture_path("closed/x0"), F_OK) != 0);
}

/* Make mounts for this process alone, which end with it. Returns false if that is not permitted. */
static bool mounts_isolate(void)
{
    return unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

/* Returns false where this process may not mount. */
static bool test_no_space(void)
{
    lh_test_name("too little space is refused with directory, needed, available and missing");
    const char *folder = fixture_path("small");
    LH_CHECK(mkdir(folder, 0700) == 0);
    if (mount("tmpfs", folder, "tmpfs", 0, "size=8m") != 0)
        return false;
    struct fixture_opts opts = {.root = folder, .directory_count = 2};
    int medium_rc = fixture_create("full", &opts, &store, &err);
    opts.allow_tmpfs = true;
    int rc = fixture_create("full", &opts, &store, &err);
    bool is_empty = access(fixture_path("small/full0"), F_OK) != 0;
    bool is_named = strstr(err.message, "small/full0") && strstr(err.message, "8388608 are avail");
    opts.small = true;
    int small_rc = fixture_create("full", &opts, &store, &err);
    if (small_rc == 0) {
        fixture_write_step(store, 1);
        fixture_commit(store, 1);
        LH_CHECK(fixture_holds_step(store, 1));
        lh_store_close(store);
    }
    LH_CHECK(umount(folder) == 0);
    LH_CHECK(medium_rc == -EMEDIUMTYPE);
    LH_CHECK(rc == -ENOSPC && is_empty && is_named);
    LH_CHECK(small_rc == 0);
    return true;
}

/* ramfs has neither O_DIRECT nor fallocate(). */
static bool test_buffered(void)
{
    lh_test_name("where O_DIRECT is refused the store says so, or is refused as well");
    const char *folder = fixture_path("buffered");
    LH_CHECK(mkdir(folder, 0700) == 0);
    if (mount("ramfs", folder, "ramfs", 0, NULL) != 0)
        return false;
    struct fixture_opts opts = {.root = folder, .allow_tmpfs = true, .small = true};
    opts.refuse_buffered = true;
    int refused_rc = fixture_create("b", &opts, &store, &err);
    bool is_empty = access(fixture_path("buffered/b0"), F_OK) != 0;
    opts.refuse_buffered = false;
    int rc = fixture_create("b", &opts, &store, &err);
    bool is_noted = false;
    if (rc == 0) {
        is_noted = strstr(lh_store_note(store), "O_DIRECT") != NULL &&
                   strstr(lh_store_note(store), "fallocate") != NULL;
        LH_CHECK(!lh_store_files(store)[0].direct);
        fixture_write_step(store, 1);
        fixture_commit(store, 1);
        lh_store_close(store);
        LH_CHECK(reopen("buffered/b", 1) == 0);
        LH_CHECK(fixture_holds_step(store, 1) && strstr(lh_store_note(store), "O_DIRECT"));
        lh_store_close(store);
    }
    LH_CHECK(umount(folder) == 0);
    LH_CHECK(refused_rc == -EOPNOTSUPP && is_empty);
    LH_CHECK(rc == 0 && is_noted);
    return true;
}

static void test_bad_opts(void)
{
    lh_test_name("options that no store can have are refused");
    const char *same[2] = {fixture_path("bad"), fixture_path("bad/")};
    struct lh_store_extent_desc extent = {.bytes = 4096};
    struct lh_store_group_desc group = {.slot_count = 2};
    const struct lh_store_opts good = {
        .directories = same,
        .directory_count = 1,
        .extents = &extent,
        .extent_count = 1,
        .groups = &group,
        .group_count = 1,
    };
    struct lh_store_opts opts[6] = {good, good, good, good, good, good};
    opts[0].directory_count = 0;
    opts[1].directory_count = 17;
    opts[2].directory_count = 2;
    opts[3].weights = (const uint64_t[]){0};
    opts[4].extent_count = 0;
    opts[5].extents = &(struct lh_store_extent_desc){.bytes = 5000};
    for (uint32_t index = 0; index < LH_COUNT_OF(opts); index++)
        LH_CHECK(lh_store_create(&opts[index], &fixture_alloc, &store, &err) == -EINVAL);
    extent.group = 1;
    LH_CHECK(lh_store_create(&good, &fixture_alloc, &store, &err) == -EINVAL);
    extent = (struct lh_store_extent_desc){.bytes = UINT64_C(1) << 60};
    LH_CHECK(lh_store_create(&good, &fixture_alloc, &store, NULL) == -EINVAL);
    group.slot_count = 3;
    LH_CHECK(lh_store_create(&good, &fixture_alloc, &store, &err) == -EINVAL);
    LH_CHECK(access(fixture_path("bad"), F_OK) != 0);
}

int main(void)
{
    test_missing();
    test_exists();
    test_busy();
    test_newer();
    test_not_a_file();
    test_same_directory();
    test_truncated();
    test_data_flip();
    test_failed_commit();
    test_memory();
    test_access();
    test_bad_opts();
    bool could_mount = mounts_isolate() && test_no_space() && test_buffered();
    LH_CHECK(fixture_alloc.live_count == 0);
    if (!could_mount)
        LH_TEST_SKIP("all but full and buffered file systems: mounting is not permitted");
    return 0;
}
