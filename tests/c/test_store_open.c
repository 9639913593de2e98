/* Test opening and closing: how the headers of several files must agree, and what is written. */
#include "lh_test.h"
#include "store/format.h"
#include "store_disk.h"
#include "store_fixture.h"

#define FILE_COUNT 3

static struct lh_error err;
static struct disk *whole;
static struct disk *disk; /* a copy of it, which the tests change */

static struct disk *store_make(bool single_slot)
{
    struct lh_store *store = NULL;
    struct disk *made = disk_new();
    struct fixture_opts opts = {
        .directory_count = FILE_COUNT, .small = true, .single_slot = single_slot};
    fixture_fs = &made->fs;
    LH_CHECK(fixture_create("headers", &opts, &store, &err) == 0);
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    lh_store_close(store);
    disk_settle(made);
    return made;
}

static int open_now(struct lh_store **store_out)
{
    memset(&err, 0, sizeof(err));
    fixture_fs = &disk->fs;
    return fixture_open("headers", FILE_COUNT, false, false, store_out, &err);
}

static struct lh_store_header header_get(uint32_t file)
{
    struct lh_store_header header;
    LH_CHECK(lh_store_header_decode(disk_bytes(disk, file, 0), &header, &err) == 0);
    return header;
}

static void header_put(uint32_t file, const struct lh_store_header *header)
{
    for (uint32_t copy = 0; copy < 2; copy++)
        lh_store_header_encode(header, disk_bytes(disk, file, LH_STORE_HEADER_OFFSET(copy)));
}

/* Count events except writes of owners' blocks, which only name a process. */
static uint32_t change_count(void)
{
    uint32_t count = 0;
    for (uint32_t index = 0; index < disk->event_count; index++)
        count += disk->events[index].offset != LH_STORE_OWNER_OFFSET;
    return count;
}

static void expect_refused(int code, const char *says)
{
    struct lh_store *store = NULL;
    int rc = open_now(&store);
    if (rc != code || strstr(err.message, says) == NULL)
        fprintf(stderr, "%d: %s\n", rc, err.message);
    LH_CHECK(rc == code && strstr(err.message, says) != NULL);
    LH_CHECK(change_count() == 0);
    disk_copy(whole, disk);
}

static void test_disagree(void)
{
    lh_test_name("files whose headers differ in any value are not one store");
    for (int field = 0; field < 6; field++) {
        struct lh_store_header header = header_get(2);
        header.is_single_slot ^= field == 0;
        header.stripe_bytes += field == 1 ? LH_CHECKSUM_BYTES : 0;
        header.scalar_bytes_max += field == 2;
        header.table_crc ^= field == 3;
        header.meta_crc ^= field == 4;
        header.meta_bytes -= field == 5;
        header_put(2, &header);
        expect_refused(-EILSEQ, "disagree");
    }

    lh_test_name("a file that is given twice, and one of another size, are named");
    memcpy(disk_bytes(disk, 1, 0), disk_bytes(disk, 2, 0), LH_BLOCK_BYTES);
    expect_refused(-EXDEV, "is a copy of file 2");
    struct lh_store_header header = header_get(2);
    header.file_bytes -= LH_BLOCK_BYTES;
    header_put(2, &header);
    expect_refused(-EILSEQ, "its header says");

    lh_test_name("a header that asks for more than its file has room for allocates nothing");
    for (uint32_t file = 0; file < FILE_COUNT; file++) {
        header = header_get(file);
        header.extent_count = LH_STORE_EXTENT_COUNT_MAX;
        header.checksum_count = LH_STORE_EXTENT_COUNT_MAX;
        header_put(file, &header);
    }
    expect_refused(-EILSEQ, "does not fit");
}

static void test_unreadable(void)
{
    lh_test_name("a header of which one copy is damaged and one cannot be read may be whole");
    for (uint32_t bad = 0; bad < 2; bad++) {
        disk_bytes(disk, 1, LH_STORE_HEADER_OFFSET(1 - bad))[100] ^= 1;
        disk->bad_file = 1;
        disk->bad_offset = LH_STORE_HEADER_OFFSET(bad);
        expect_refused(-EIO, "cannot read");
        disk->bad_file = -1;
    }

    struct lh_store_header header = header_get(0);
    struct lh_store_control control;
    lh_store_control_plan(&header, &control);
    for (uint32_t bad = 0; bad < 2; bad++) {
        *disk_bytes(disk, 0, control.table_offset[1 - bad]) ^= 1;
        disk->bad_file = 0;
        disk->bad_offset = control.table_offset[bad];
        expect_refused(-EIO, "cannot read");
        disk->bad_file = -1;
    }

    lh_test_name("a table or meta of which no copy is whole is damage");
    for (uint32_t part = 0; part < 2; part++) {
        for (uint32_t copy = 0; copy < 2; copy++)
            *disk_bytes(disk, 0, (part ? control.meta_offset : control.table_offset)[copy]) ^= 1;
        expect_refused(-EILSEQ, part ? "meta of" : "the table of");
    }
}

static void test_order(void)
{
    lh_test_name("files may be given in any order");
    static const uint32_t orders[][FILE_COUNT] = {{0, 2, 1}, {1, 0, 2}, {1, 2, 0},
                                                  {2, 0, 1}, {2, 1, 0}, {0, 1, 2}};
    for (uint32_t order = 0; order < LH_COUNT_OF(orders); order++) {
        struct lh_store *store = NULL;
        char directories[FILE_COUNT][64];
        const char *names[FILE_COUNT];
        for (uint32_t index = 0; index < FILE_COUNT; index++) {
            snprintf(directories[index], sizeof(directories[index]), "headers%u",
                     orders[order][index]);
            names[index] = fixture_path(directories[index]);
        }
        struct lh_store_open_opts opts = {
            .directories = names, .directory_count = FILE_COUNT, .fs = &disk->fs};
        LH_CHECK(lh_store_open(&opts, &fixture_alloc, &store, &err) == 0);
        for (uint32_t index = 0; index < FILE_COUNT; index++) {
            snprintf(directories[0], sizeof(directories[0]), "headers%u/", index);
            LH_CHECK(strstr(lh_store_file_path(store, index), directories[0]) != NULL);
        }
        LH_CHECK(fixture_holds_step(store, 1));
        lh_store_close(store);
        disk_copy(whole, disk);
    }
}

static void test_held(void)
{
    lh_test_name("a store that is read beside its writer is not written to");
    struct lh_store *writer = NULL;
    struct lh_store *reader = NULL;
    const char *names[FILE_COUNT] = {fixture_path("headers0"), fixture_path("headers1"),
                                     fixture_path("headers2")};
    struct lh_store_open_opts opts = {.directories = names,
                                      .directory_count = FILE_COUNT,
                                      .read_only = true,
                                      .is_held = true,
                                      .fs = &disk->fs};
    LH_CHECK(open_now(&writer) == 0);
    uint32_t before = disk->event_count;
    LH_CHECK(lh_store_open(&opts, &fixture_alloc, &reader, &err) == 0);
    LH_CHECK(fixture_holds_step(reader, 1));
    LH_CHECK(lh_store_write_sync(reader, 0, 0, "x", 1, &err) == -EROFS);
    LH_CHECK(lh_store_commit_sync(reader, 2, NULL, 0, &err) == -EROFS);
    lh_store_close(reader);
    LH_CHECK(disk->event_count == before);
    fixture_write_step(writer, 2);
    fixture_commit(writer, 2);
    lh_store_close(writer);
    disk_copy(whole, disk);
}

static void test_created(void)
{
    lh_test_name("a creation that was cut short leaves no file's header but the first one's torn");
    struct lh_store *store = NULL;
    struct fixture_opts opts = {.directory_count = FILE_COUNT, .small = true};
    struct disk *made = disk_new();
    fixture_fs = &made->fs;
    LH_CHECK(fixture_create("headers", &opts, &store, &err) == 0);
    lh_store_close(store);
    for (uint32_t file = 0; file < 2; file++) {
        disk_copy(made, disk);
        disk_bytes(disk, file, LH_STORE_HEADER_OFFSET(1))[100] ^= 1;
        LH_CHECK(open_now(&store) == 0);
        LH_CHECK((lh_store_note(store)[0] != '\0') == (file > 0));
        lh_store_close(store);
    }
    disk_delete(made);
    disk_copy(whole, disk);
}

static const struct lh_store_fs_ops *plain_ops;
static bool writes_nothing;

static int64_t short_read(const struct lh_store_fs *fs, int fd, void *buffer, uint64_t bytes,
                          uint64_t offset)
{
    return plain_ops->read(fs, fd, buffer, lh_min_u64(bytes, 2048), offset);
}

static int64_t short_write(const struct lh_store_fs *fs, int fd, const void *buffer, uint64_t bytes,
                           uint64_t offset)
{
    return writes_nothing ? 0 : plain_ops->write(fs, fd, buffer, lh_min_u64(bytes, 2048), offset);
}

static void test_short(void)
{
    lh_test_name("reads and writes that the kernel cuts short are continued where they ended");
    struct lh_store *store = NULL;
    plain_ops = disk->fs.ops;
    struct lh_store_fs_ops ops = *plain_ops;
    ops.read = short_read;
    ops.write = short_write;
    disk->fs.ops = &ops;
    LH_CHECK(open_now(&store) == 0 && fixture_holds_step(store, 1));
    fixture_write_step(store, 2);
    fixture_commit(store, 2);
    LH_CHECK(fixture_holds_step(store, 2));

    lh_test_name("a write of which nothing is taken is an error");
    writes_nothing = true;
    LH_CHECK(lh_store_write_sync(store, 0, 0, "x", 1, &err) == -EIO);
    writes_nothing = false;
    lh_store_close(store);
    disk->fs.ops = plain_ops;
    LH_CHECK(open_now(&store) == 0 && fixture_holds_step(store, 2));
    lh_store_close(store);
    disk_copy(whole, disk);
}

/* With one slot there is no older step to return to. */
static void expect_no_older(void)
{
    struct lh_store *store = NULL;
    const uint64_t older = 0;
    for (int read_only = 0; read_only < 2; read_only++) {
        disk_copy(whole, disk);
        fixture_fs = &disk->fs;
        LH_CHECK(fixture_open_at("headers", FILE_COUNT, read_only, &older, &store, &err) ==
                 -EINVAL);
        LH_CHECK(strstr(err.message, "step") != NULL);
        uint32_t newest = 0;
        uint64_t sequence = 0;
        struct lh_store_header header = header_get(0);
        for (uint32_t number = 0; number < 2; number++) {
            struct lh_store_superblock found;
            const void *block = disk_bytes(disk, 0, LH_STORE_SUPERBLOCK_OFFSET(number, 0));
            LH_CHECK(lh_store_superblock_decode(block, &header, &found, &err) == 0);
            newest = found.sequence > sequence ? number : newest;
            sequence = lh_max_u64(sequence, found.sequence);
        }
        for (uint32_t copy = 0; copy < 2; copy++)
            disk_bytes(disk, 0, LH_STORE_SUPERBLOCK_OFFSET(newest, copy))[8] ^= 1;
        memset(&err, 0, sizeof(err));
        LH_CHECK(fixture_open("headers", FILE_COUNT, false, read_only, &store, &err) == -EILSEQ);
        LH_CHECK(strstr(err.message, "has no earlier step") != NULL);
    }
}

/*
 * With one slot, a session that does not end properly leaves the store unclean, whatever its cause.
 */
static void test_close(void)
{
    static const char *const ends[] = {"a write", "a rollback", "a failed commit", "a commit",
                                       "nothing"};
    lh_test_name("a store of one slot is closed as clean only with nothing unfinished");
    disk_delete(whole);
    whole = store_make(true);
    expect_no_older();
    for (uint32_t end = 0; end < LH_COUNT_OF(ends); end++) {
        struct lh_store *store = NULL;
        struct lh_io_request requests[LH_STORE_COMMIT_REQUEST_COUNT_MAX];
        disk_copy(whole, disk);
        LH_CHECK(open_now(&store) == 0);
        disk_settle(disk);
        if (end < 4)
            fixture_write_step(store, 2);
        if (end == 1)
            lh_store_rollback(store);
        disk->fail_sync = end == 2 ? 0 : -1;
        if (end == 2)
            LH_CHECK(lh_store_commit_sync(store, 2, NULL, 0, &err) == -EIO);
        disk->fail_sync = -1;
        if (end == 3) {
            LH_CHECK(lh_store_commit_begin(store, 2, NULL, 0, &err) == 0);
            LH_CHECK(lh_store_commit_next(store, requests, LH_COUNT_OF(requests), &err) > 0);
        }
        lh_store_close(store);
        LH_CHECK((change_count() == 0) == (end == 4));
        int rc = open_now(&store);
        if (rc != (end < 4 ? -EUCLEAN : 0))
            fprintf(stderr, "after %s: %d, %s\n", ends[end], rc, err.message);
        LH_CHECK(rc == (end < 4 ? -EUCLEAN : 0));
        lh_store_close(store);
    }
}

int main(void)
{
    whole = store_make(false);
    disk = disk_new();
    disk_copy(whole, disk);
    test_disagree();
    test_unreadable();
    test_order();
    test_held();
    test_created();
    test_short();
    test_close();
    disk_delete(whole);
    disk_delete(disk);
    LH_CHECK(fixture_alloc.live_count == 0);
    return 0;
}
