/*
 * Test the order in which bytes become durable: the file calls of a creation, of marks and of
 * blocking commits, recorded on their way to the kernel.
 *
 * A write is pending until its file is synced. When a header, a manifest or a superblock is
 * written, nothing that it refers to may be pending; when a call returns, nothing at all may be
 * pending. The owner's block refers to no other bytes and is never waited for.
 */
#include "lh_test.h"
#include "store/format.h"
#include "store/fs.h"
#include "store_fixture.h"

#define FD_COUNT_MAX 1024
#define PATH_COUNT_MAX 64
#define NO_FAILURE UINT32_MAX

enum content {
    CONTENT_DATA, /* also table and meta */
    CONTENT_MANIFEST,
    CONTENT_SUPERBLOCK,
    CONTENT_HEADER,
    CONTENT_COUNT,
};

static struct {
    bool is_made; /* a creation has returned: manifests and superblocks refer to existing bytes */
    uint32_t written[CONTENT_COUNT];
    uint32_t pending[FD_COUNT_MAX][CONTENT_COUNT];
    char synced[PATH_COUNT_MAX][256]; /* the directories that were synced */
    uint32_t synced_count;
    uint32_t sync_count; /* the number of syncs of files and directories */
    bool is_synced[FD_COUNT_MAX];
    uint32_t synced_fd_count;
    uint32_t fail_at; /* the number of the sync that fails */
} record;

static struct lh_error err;
static struct lh_store *store;

static uint32_t pending_count(enum content content)
{
    uint32_t count = 0;
    for (int fd = 0; fd < FD_COUNT_MAX; fd++)
        count += record.pending[fd][content];
    return count;
}

static uint32_t pending_total(void)
{
    uint32_t count = 0;
    for (int content = 0; content < CONTENT_COUNT; content++)
        count += pending_count((enum content)content);
    return count;
}

static bool is_synced(const char *path)
{
    for (uint32_t i = 0; i < record.synced_count; i++) {
        if (strcmp(record.synced[i], path) == 0)
            return true;
    }
    return false;
}

static void record_begin(uint32_t fail_at)
{
    memset(&record, 0, sizeof(record));
    record.fail_at = fail_at;
}

static enum content content_of(const void *buffer)
{
    if (memcmp(buffer, "LOHANDAT", 8) == 0)
        return CONTENT_HEADER;
    if (memcmp(buffer, "LOHANMAN", 8) == 0)
        return CONTENT_MANIFEST;
    return memcmp(buffer, "LOHANSUP", 8) == 0 ? CONTENT_SUPERBLOCK : CONTENT_DATA;
}

/* Copies of one block may be on their way together; all that they speak of is durable. */
static void order_check(enum content content, const void *buffer)
{
    const struct lh_store_header_disk *header = buffer;
    if (content == CONTENT_HEADER && header->file_index == 0) {
        LH_CHECK(pending_count(CONTENT_DATA) == 0);
        LH_CHECK(pending_count(CONTENT_MANIFEST) == 0 && pending_count(CONTENT_SUPERBLOCK) == 0);
        LH_CHECK(record.written[CONTENT_MANIFEST] > 0 && record.written[CONTENT_SUPERBLOCK] > 0);
        LH_CHECK(record.written[CONTENT_DATA] > 0 && record.synced_count > 0);
        LH_CHECK(record.written[CONTENT_HEADER] + 1 >= header->file_count);
    }
    if (content == CONTENT_MANIFEST && record.is_made)
        LH_CHECK(pending_count(CONTENT_DATA) == 0);
    if (content == CONTENT_SUPERBLOCK && record.is_made)
        LH_CHECK(pending_count(CONTENT_DATA) == 0 && pending_count(CONTENT_MANIFEST) == 0);
}

static int64_t recorded_write(const struct lh_store_fs *fs, int fd, const void *buffer,
                              uint64_t bytes, uint64_t offset)
{
    (void)fs;
    enum content content = content_of(buffer);
    LH_CHECK(fd < FD_COUNT_MAX);
    if (offset != LH_STORE_OWNER_OFFSET) {
        order_check(content, buffer);
        record.pending[fd][content]++;
        record.written[content]++;
    }
    return lh_store_fs_real()->ops->write(lh_store_fs_real(), fd, buffer, bytes, offset);
}

static int recorded_sync(const struct lh_store_fs *fs, int fd)
{
    (void)fs;
    if (record.sync_count++ == record.fail_at)
        return -EIO;
    memset(record.pending[fd], 0, sizeof(record.pending[fd]));
    record.synced_fd_count += !record.is_synced[fd];
    record.is_synced[fd] = true;
    return lh_store_fs_real()->ops->sync(lh_store_fs_real(), fd);
}

static int recorded_sync_directory(const struct lh_store_fs *fs, const char *path)
{
    (void)fs;
    if (record.sync_count++ == record.fail_at)
        return -EIO;
    LH_CHECK(record.synced_count < PATH_COUNT_MAX);
    snprintf(record.synced[record.synced_count++], sizeof(record.synced[0]), "%s", path);
    return lh_store_fs_real()->ops->sync_directory(lh_store_fs_real(), path);
}

static const struct lh_store_fs *recorded(void)
{
    static struct lh_store_fs_ops ops;
    static const struct lh_store_fs fs = {.ops = &ops};
    ops = *lh_store_fs_real()->ops;
    ops.write = recorded_write;
    ops.sync = recorded_sync;
    ops.sync_directory = recorded_sync_directory;
    return &fs;
}

/* A store in two directories, of which the second lies in folders that are made for it. */
static const char *directories[2];

static void directories_name(const char *name)
{
    char path[64];
    snprintf(path, sizeof(path), "%s-a", name);
    directories[0] = fixture_path(path);
    snprintf(path, sizeof(path), "%s-b/c/d", name);
    directories[1] = fixture_path(path);
}

static int create(bool single_slot)
{
    static const struct lh_store_extent_desc extents[] = {{.bytes = 8 * LH_KIB, .group = 0},
                                                          {.bytes = 4 * LH_KIB, .group = 1}};
    static const struct lh_store_group_desc groups[] = {{2}, {2}};
    struct lh_store_opts opts = {
        .directories = directories,
        .directory_count = 2,
        .extents = extents,
        .extent_count = LH_COUNT_OF(extents),
        .groups = groups,
        .group_count = LH_COUNT_OF(groups),
        .meta = FIXTURE_META,
        .meta_bytes = sizeof(FIXTURE_META),
        .scalar_bytes_max = 100,
        .single_slot = single_slot,
        .allow_buffered = true,
        .fs = recorded(),
    };
    return lh_store_create(&opts, &fixture_alloc, &store, &err);
}

static int open_again(void)
{
    struct lh_store_open_opts opts = {
        .directories = directories, .directory_count = 2, .allow_buffered = true, .fs = recorded()};
    return lh_store_open(&opts, &fixture_alloc, &store, &err);
}

static void remove_all(const char *name)
{
    char path[64];
    snprintf(path, sizeof(path), "%s-a", name);
    fixture_remove(fixture_path(path));
    snprintf(path, sizeof(path), "%s-b", name);
    fixture_remove(fixture_path(path));
}

static void test_create(void)
{
    lh_test_name("a new store's first header is written when all else is durable, and then synced");
    directories_name("made");
    record_begin(NO_FAILURE);
    LH_CHECK(create(false) == 0);
    LH_CHECK(record.written[CONTENT_HEADER] >= 2 && record.written[CONTENT_SUPERBLOCK] > 0);
    LH_CHECK(pending_total() == 0);

    lh_test_name("the directories of a new store, and those that were made for it, are synced");
    LH_CHECK(is_synced(directories[0]) && is_synced(directories[1]));
    LH_CHECK(is_synced(fixture_path("made-b/c")) && is_synced(fixture_path("made-b")));
    LH_CHECK(is_synced(fixture_root()));
    lh_store_close(store);
}

static void test_create_fails(void)
{
    lh_test_name("whichever sync of a creation fails, it fails and leaves nothing");
    uint32_t fail_at = 0;
    int rc = -EIO;
    for (; rc == -EIO; fail_at++) {
        directories_name("failed");
        record_begin(fail_at);
        rc = create(false);
        LH_CHECK(rc == 0 || (rc == -EIO && strstr(err.message, "cannot sync") != NULL));
        LH_CHECK(rc == 0 || access(fixture_path("failed-b"), F_OK) != 0);
        LH_CHECK(rc == 0 || access(fixture_path("failed-a"), F_OK) != 0);
    }
    /* At least both files and the five directories were synced. */
    LH_CHECK(rc == 0 && fail_at > 8);
    lh_store_close(store);
    remove_all("failed");
}

static void step_write(uint64_t step)
{
    uint8_t bytes[4096];
    memset(bytes, (int)step, sizeof(bytes));
    LH_CHECK(lh_store_write_sync(store, 0, 0, bytes, sizeof(bytes), &err) == 0);
    LH_CHECK(lh_store_write_sync(store, 1, 0, bytes, sizeof(bytes), &err) == 0);
}

static void test_commit(void)
{
    record_begin(NO_FAILURE);
    directories_name("made");
    LH_CHECK(open_again() == 0);
    record.is_made = true;

    lh_test_name("open for writing writes its superblock again, and syncs every file");
    LH_CHECK(record.written[CONTENT_SUPERBLOCK] > 0 && pending_total() == 0);
    LH_CHECK(record.synced_fd_count == 2);

    lh_test_name("a blocking commit has data durable, then its manifest, then its superblock");
    for (uint64_t step = 1; step <= 3; step++) {
        uint32_t before = record.written[CONTENT_MANIFEST];
        step_write(step);
        LH_CHECK(pending_count(CONTENT_DATA) > 0);
        LH_CHECK(lh_store_commit_sync(store, step, NULL, 0, &err) == 0);
        LH_CHECK(record.written[CONTENT_MANIFEST] > before && pending_total() == 0);
    }

    lh_test_name("whichever sync of a blocking commit fails, the commit fails");
    step_write(4);
    for (uint32_t fail_at = 0; fail_at < 2; fail_at++) {
        record.sync_count = 0;
        record.fail_at = fail_at;
        LH_CHECK(lh_store_commit_sync(store, 4, NULL, 0, &err) == -EIO);
        record.fail_at = NO_FAILURE;
        lh_store_close(store);
        LH_CHECK(open_again() == 0 && lh_store_step(store) == 3);
        step_write(4);
    }
    lh_store_close(store);
    remove_all("made");
}

static void test_mark(void)
{
    lh_test_name("the marks of a store of one slot are durable when they count");
    directories_name("marked");
    record_begin(NO_FAILURE);
    LH_CHECK(create(true) == 0);
    record.is_made = true;
    step_write(1);
    LH_CHECK(lh_store_commit_sync(store, 1, NULL, 0, &err) == 0 && pending_total() == 0);
    uint32_t before = record.written[CONTENT_SUPERBLOCK];
    lh_store_close(store);
    LH_CHECK(record.written[CONTENT_SUPERBLOCK] > before && pending_total() == 0);

    LH_CHECK(open_again() == 0 && pending_total() == 0);
    before = record.written[CONTENT_SUPERBLOCK];
    step_write(2);
    LH_CHECK(record.written[CONTENT_SUPERBLOCK] > before);
    LH_CHECK(pending_count(CONTENT_SUPERBLOCK) == 0);
    LH_CHECK(lh_store_commit_sync(store, 2, NULL, 0, &err) == 0 && pending_total() == 0);
    lh_store_close(store);
    LH_CHECK(pending_total() == 0);
    remove_all("marked");
}

int main(void)
{
    test_create();
    test_create_fails();
    test_commit();
    test_mark();
    LH_CHECK(fixture_alloc.live_count == 0);
    return 0;
}
