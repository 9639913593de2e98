/* Test a store from create to close: steps, slots, rollback, zeros, blocking transfers. */
#include <fcntl.h>
#include <sys/stat.h>

#include "lh_test.h"
#include "store_fixture.h"

static struct lh_error err;

static struct lh_store *made(const char *name, const struct fixture_opts *opts)
{
    struct lh_store *store = NULL;
    int rc = fixture_create(name, opts, &store, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0 && store != NULL);
    return store;
}

static struct lh_store *opened(const char *name, uint32_t count, bool reversed)
{
    struct lh_store *store = NULL;
    int rc = fixture_open(name, count, reversed, false, &store, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0 && store != NULL);
    return store;
}

static void closed(struct lh_store *store)
{
    lh_store_close(store);
    LH_CHECK(fixture_alloc.live_count == 0);
}

static void test_round_trip(uint32_t count, const uint64_t *weights)
{
    lh_test_name("steps come back after close and open, %u directories in any order", count);
    char name[32];
    char uuid[64];
    snprintf(name, sizeof(name), "trip%u-", count);
    struct lh_store *store =
        made(name, &(struct fixture_opts){.directory_count = count, .weights = weights});
    snprintf(uuid, sizeof(uuid), "%s", lh_store_uuid(store));
    LH_CHECK(strlen(uuid) == 36);
    LH_CHECK(lh_store_step(store) == 0 && fixture_holds_step(store, 0));
    lh_alloc_seal(&fixture_alloc);
    fixture_write_step(store, 1);
    LH_CHECK(fixture_holds_step(store, 1));
    fixture_commit(store, 1);
    LH_CHECK(lh_store_step(store) == 1 && fixture_holds_step(store, 1));
    uint64_t scalar_bytes = 0;
    LH_CHECK(strcmp(lh_store_scalars(store, &scalar_bytes), "scalars of step 1") == 0);
    LH_CHECK(scalar_bytes == sizeof("scalars of step 1"));
    lh_alloc_unseal(&fixture_alloc);
    LH_CHECK(fixture_alloc.refused_count == 0);
    closed(store);

    for (uint64_t step = 2; step < 6; step++) {
        uint64_t bytes = 0;
        char scalars[64];
        snprintf(scalars, sizeof(scalars), "scalars of step %d", (int)step - 1);
        store = opened(name, count, step % 2 == 0);
        LH_CHECK(strcmp(lh_store_uuid(store), uuid) == 0);
        LH_CHECK(lh_store_step(store) == step - 1 && fixture_holds_step(store, step - 1));
        LH_CHECK(strcmp(lh_store_scalars(store, &bytes), scalars) == 0);
        LH_CHECK(bytes == strlen(scalars) + 1);
        LH_CHECK(memcmp(lh_store_meta(store, &bytes), FIXTURE_META, sizeof(FIXTURE_META)) == 0);
        LH_CHECK(bytes == sizeof(FIXTURE_META));
        LH_CHECK(lh_store_file_count(store) == count);
        for (uint32_t file = 0; file < count; file++) {
            struct stat info;
            char suffix[64];
            snprintf(suffix, sizeof(suffix), "%s%u/lohan.data", name, file);
            LH_CHECK(strstr(lh_store_file_path(store, file), suffix) != NULL);
            LH_CHECK(fstat(lh_store_files(store)[file].fd, &info) == 0);
            LH_CHECK((uint64_t)info.st_size == lh_store_file_bytes(store, file));
        }
        fixture_write_step(store, step);
        LH_CHECK(lh_store_is_staged(store, 0) && !lh_store_is_staged(store, FIXTURE_FROZEN_GROUP));
        fixture_commit(store, step);
        closed(store);
    }
}

static void test_modes(void)
{
    lh_test_name("directories are made with mode 0700 and files with 0600, whatever the umask");
    mode_t old_mask = umask(0);
    struct stat info;
    struct lh_store *store = made("deep/er/mode", &(struct fixture_opts){0});
    umask(old_mask);
    LH_CHECK(stat(fixture_path("deep"), &info) == 0 && (info.st_mode & 07777) == 0700);
    LH_CHECK(stat(fixture_path("deep/er/mode0"), &info) == 0 && (info.st_mode & 07777) == 0700);
    LH_CHECK(stat(lh_store_file_path(store, 0), &info) == 0 && (info.st_mode & 07777) == 0600);
    LH_CHECK((uint64_t)info.st_blocks * 512 >= lh_store_file_bytes(store, 0));
    closed(store);
}

static void test_relative(void)
{
    lh_test_name("names relative to the current directory work, and so do slashes at their end");
    const char *directories[2] = {"rel/", "rel/x//y"};
    struct lh_store_extent_desc extent = {.bytes = LH_BLOCK_BYTES};
    struct lh_store_group_desc group = {.slot_count = 2};
    struct lh_store_opts opts = {
        .directories = directories,
        .directory_count = 2,
        .extents = &extent,
        .extent_count = 1,
        .groups = &group,
        .group_count = 1,
        .allow_buffered = true,
        .temporary = true,
    };
    struct lh_store *store = NULL;
    LH_CHECK(chdir(fixture_root()) == 0);
    LH_CHECK(lh_store_create(&opts, &fixture_alloc, &store, &err) == 0);
    LH_CHECK(access("rel", F_OK) != 0);
    closed(store);
    opts.temporary = false;
    LH_CHECK(lh_store_create(&opts, &fixture_alloc, &store, &err) == 0);
    LH_CHECK(access("rel/lohan.data", F_OK) == 0 && access("rel/x/y/lohan.data", F_OK) == 0);
    LH_CHECK(lh_store_commit_sync(store, 8, NULL, 0, &err) == 0);
    closed(store);
    const char *turned[2] = {"rel/x/y", "./rel"};
    struct lh_store_open_opts open_opts = {
        .directories = turned, .directory_count = 2, .allow_buffered = true};
    LH_CHECK(lh_store_open(&open_opts, &fixture_alloc, &store, &err) == 0);
    LH_CHECK(lh_store_step(store) == 8 && strstr(lh_store_file_path(store, 0), "./rel/lohan"));
    closed(store);
}

static void test_staged_is_lost(void)
{
    lh_test_name("what was staged and not committed is gone after reopening");
    struct lh_store *store = made("staged", &(struct fixture_opts){.directory_count = 2});
    fixture_write_step(store, 1);
    closed(store);
    store = opened("staged", 2, false);
    LH_CHECK(lh_store_step(store) == 0 && fixture_holds_step(store, 0));
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    fixture_write_step(store, 2);
    closed(store);
    store = opened("staged", 2, false);
    LH_CHECK(lh_store_step(store) == 1 && fixture_holds_step(store, 1));
    closed(store);
}

static void test_rollback(void)
{
    lh_test_name("a rollback shows the committed step again, and the next step continues from it");
    struct lh_store *store = made("rollback", &(struct fixture_opts){0});
    fixture_write_step(store, 1);
    lh_store_rollback(store);
    LH_CHECK(fixture_holds_step(store, 0));
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    fixture_write_step(store, 2);
    lh_store_rollback(store);
    LH_CHECK(!lh_store_is_staged(store, 0) && fixture_holds_step(store, 1));
    uint32_t slot = lh_store_read_slot(store, 0);
    LH_CHECK(lh_store_write_slot(store, 0) == 1 - slot);
    fixture_write_step(store, 2);
    LH_CHECK(lh_store_read_slot(store, 0) == 1 - slot);
    fixture_commit(store, 2);
    LH_CHECK(fixture_holds_step(store, 2));
    closed(store);
}

/* Collect the requests of the commit's next phase, and run them. */
static int commit_phase(struct lh_store *store)
{
    static struct lh_io_request requests[LH_STORE_COMMIT_REQUEST_COUNT_MAX];
    int count = lh_store_commit_next(store, requests, LH_COUNT_OF(requests), &err);
    for (int index = 0; index < count; index++) {
        const struct lh_io_request *request = &requests[index];
        int fd = lh_store_files(store)[request->file_index].fd;
        bool is_done = request->kind == LH_IO_KIND_SYNC
                           ? fdatasync(fd) == 0
                           : pwrite(fd, request->buffer, request->bytes, (off_t)request->offset) ==
                                 (ssize_t)request->bytes;
        requests[index].result = is_done ? 0 : -EIO;
    }
    return count;
}

static void test_rollback_in_commit(void)
{
    for (int single_slot = 0; single_slot < 2; single_slot++) {
        lh_test_name("a rollback during a commit, with %d slots, leaves what is being committed",
                     2 - single_slot);
        const char *name = single_slot ? "during-one" : "during";
        struct fixture_opts opts = {.small = true, .single_slot = single_slot};
        struct lh_store *store = made(name, &opts);
        for (uint64_t step = 1; step < 3; step++) {
            fixture_write_step(store, step);
            LH_CHECK(lh_store_commit_begin(store, step, NULL, 0, &err) == 0);
            int count = commit_phase(store);
            LH_CHECK(count > 0);
            lh_store_rollback(store);
            LH_CHECK(fixture_holds_step(store, step));
            while (count > 0)
                count = commit_phase(store);
            LH_CHECK(count == 0 && lh_store_step(store) == step && fixture_holds_step(store, step));
        }
        closed(store);
        store = opened(name, 1, false);
        LH_CHECK(fixture_holds_step(store, 2));
        closed(store);
    }

    lh_test_name("a rollback after a failed commit does not hide its error");
    struct lh_store *store = made("hidden", &(struct fixture_opts){.single_slot = true});
    struct lh_io_request requests[LH_STORE_COMMIT_REQUEST_COUNT_MAX];
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    fixture_write_step(store, 2);
    LH_CHECK(lh_store_commit_begin(store, 2, NULL, 0, &err) == 0);
    int count = lh_store_commit_next(store, requests, LH_COUNT_OF(requests), &err);
    for (int index = 0; index < count; index++)
        requests[index].result = -ENOSPC;
    LH_CHECK(lh_store_commit_next(store, requests, LH_COUNT_OF(requests), &err) == -ENOSPC);
    lh_store_rollback(store);
    LH_CHECK(lh_store_commit_sync(store, 3, NULL, 0, &err) == -ENOSPC);
    closed(store);
}

static void test_partial_commit(void)
{
    lh_test_name("groups that were not staged keep their step, and slots, through a commit");
    struct lh_store *store = made("partial", &(struct fixture_opts){0});
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    uint32_t slots[2] = {lh_store_read_slot(store, 0), lh_store_read_slot(store, 1)};
    uint8_t *buffer = calloc(1, fixture_extents[2].bytes);
    LH_CHECK(buffer != NULL);
    LH_CHECK(lh_store_write_sync(store, 2, 0, buffer, fixture_extents[2].bytes, &err) == 0);
    fixture_commit(store, 2);
    closed(store);
    store = opened("partial", 1, false);
    LH_CHECK(lh_store_read_slot(store, 0) == slots[0] && lh_store_read_slot(store, 1) != slots[1]);
    uint8_t *expected = calloc(1, fixture_extents[2].bytes);
    LH_CHECK(lh_store_read_sync(store, 2, 0, buffer, fixture_extents[2].bytes, &err) == 0);
    LH_CHECK(memcmp(buffer, expected, fixture_extents[2].bytes) == 0);
    LH_CHECK(lh_store_read_sync(store, 0, 0, buffer, fixture_extents[0].bytes, &err) == 0);
    fixture_fill(expected, 0, 1, 0, fixture_extents[0].bytes);
    LH_CHECK(memcmp(buffer, expected, fixture_extents[0].bytes) == 0);
    closed(store);
    free(buffer);
    free(expected);
}

/*
 * Compare random writes and reads with an array, with commits, rollbacks and reopenings in between.
 */
static void test_odd_ranges(bool single_slot)
{
    lh_test_name("transfers of any offset, length and address agree with an array%s",
                 single_slot ? ", with one slot" : "");
    const char *name = single_slot ? "odd-single" : "odd";
    const uint32_t extent = 0;
    const uint64_t bytes = fixture_extents[extent].bytes;
    uint8_t *now = calloc(1, bytes);
    uint8_t *committed = calloc(1, bytes);
    void *memory = NULL;
    LH_CHECK(posix_memalign(&memory, LH_BLOCK_BYTES, bytes + 1) == 0);
    uint64_t seed = 7;
    struct lh_store *store =
        made(name, &(struct fixture_opts){.directory_count = 3, .single_slot = single_slot});
    for (uint64_t round = 0; round < 200; round++) {
        uint64_t offset = lh_test_random(&seed) % bytes;
        uint64_t length = lh_test_random(&seed) % (bytes - offset);
        uint64_t action = lh_test_random(&seed) % 16;
        uint8_t *odd = (uint8_t *)memory + 1;
        if (round % 2) { /* whole blocks in the middle need no copy, and are written together */
            odd = memory;
            offset = offset / LH_BLOCK_BYTES * LH_BLOCK_BYTES;
        }
        if (action >= 8)
            length = lh_min_u64(length, 70000);
        if (action % 2) {
            for (uint64_t index = 0; index < length; index++)
                odd[index] = (uint8_t)lh_test_random(&seed);
            memcpy(now + offset, odd, length);
            LH_CHECK(lh_store_write_sync(store, extent, offset, odd, length, &err) == 0);
        } else if (action == 2) {
            fixture_commit(store, round);
            memcpy(committed, now, bytes);
        } else if (action == 4 && !single_slot) {
            lh_store_rollback(store);
            memcpy(now, committed, bytes);
        } else if (action == 6) {
            if (single_slot) {
                fixture_commit(store, round);
                memcpy(committed, now, bytes);
            }
            closed(store);
            store = opened(name, 3, true);
            memcpy(now, committed, bytes);
        } else {
            int rc = lh_store_read_sync(store, extent, offset, odd, length, &err);
            LH_CHECK(rc == 0 && memcmp(odd, now + offset, length) == 0);
        }
    }
    LH_CHECK(lh_store_read_sync(store, extent, 0, memory, bytes, &err) == 0);
    LH_CHECK(memcmp(memory, now, bytes) == 0);
    closed(store);
    free(now);
    free(committed);
    free(memory);
}

static void test_zeros(void)
{
    lh_test_name("a slot that was never written is zeros in the file as well, checksums included");
    struct lh_store *store = made("zeros", &(struct fixture_opts){0});
    static uint8_t buffer[12 * LH_MIB];
    LH_CHECK(lh_store_is_zero(store, 0, 0) && lh_store_is_zero(store, 0, 1));
    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++) {
        lh_store_clear_zero(store, extent, 0);
        LH_CHECK(!lh_store_is_zero(store, extent, 0));
        memset(buffer, 1, sizeof(buffer));
        uint64_t bytes = fixture_extents[extent].bytes;
        LH_CHECK(lh_store_read_sync(store, extent, 0, buffer, bytes, &err) == 0);
        for (uint64_t index = 0; index < bytes; index++)
            LH_CHECK(buffer[index] == 0);
    }
    closed(store);
}

static void test_dirty(void)
{
    lh_test_name("after a write that was never finished, the rest of its slot reads as zeros");
    struct lh_store *store = made("dirty", &(struct fixture_opts){.small = true});
    struct lh_store_piece piece;
    uint8_t buffer[12 * LH_KIB];
    uint32_t slot = lh_store_write_slot(store, 1);
    LH_CHECK(lh_store_map(store, 2, slot, 0, sizeof(buffer), &piece, 1) == 1);
    lh_store_mark_dirty(store, 2, slot);
    LH_CHECK(lh_store_is_zero(store, 2, slot));
    for (uint64_t offset = 0; offset < sizeof(buffer); offset += 1000)
        fixture_flip(lh_store_file_path(store, 0), piece.file_offset + offset, 3);
    LH_CHECK(lh_store_write_sync(store, 2, 5000, "x", 1, &err) == 0);
    LH_CHECK(lh_store_read_sync(store, 2, 0, buffer, sizeof(buffer), &err) == 0);
    for (uint64_t offset = 0; offset < sizeof(buffer); offset++)
        LH_CHECK(buffer[offset] == (offset == 5000 ? 'x' : 0));
    closed(store);
}

static void test_zeros_over_garbage(void)
{
    lh_test_name("an extent of zeros in either slot is zeros after reopening, whatever lies there");
    struct lh_store *store = made("garbage", &(struct fixture_opts){.small = true});
    uint8_t bytes[4096];
    for (uint64_t step = 1; step < 4; step++) {
        memset(bytes, 0xa5, sizeof(bytes));
        LH_CHECK(lh_store_write_sync(store, FIXTURE_ZERO_EXTENT, 0, bytes, 4096, &err) == 0);
        lh_store_rollback(store);
        LH_CHECK(lh_store_write_sync(store, FIXTURE_ZERO_EXTENT, 100, bytes, 0, &err) == 0);
        LH_CHECK(fixture_holds_step(store, step - 1));
        fixture_write_step(store, step);
        fixture_commit(store, step);
        LH_CHECK(lh_store_write_sync(store, 0, 0, bytes, 8, &err) == 0);
        fixture_fill(bytes, 1, step, 0, sizeof(bytes));
        uint8_t found[4096];
        LH_CHECK(lh_store_read_sync(store, 1, 0, found, sizeof(found), &err) == 0);
        LH_CHECK(memcmp(found, bytes, sizeof(found)) == 0);
        closed(store);
        store = opened("garbage", 1, false);
        LH_CHECK(fixture_holds_step(store, step));
    }
    closed(store);
}

static void test_single_slot(void)
{
    lh_test_name("a store with one slot opens after a clean close, and only then");
    struct fixture_opts opts = {.directory_count = 2, .single_slot = true};
    struct lh_store *store = made("single", &opts);
    LH_CHECK(lh_store_write_slot(store, 0) == 0 && lh_store_read_slot(store, 0) == 0);
    for (uint64_t step = 1; step < 4; step++) {
        fixture_write_step(store, step);
        fixture_commit(store, step);
        closed(store);
        store = opened("single", 2, false);
        LH_CHECK(lh_store_step(store) == step && fixture_holds_step(store, step));
        closed(store);
        store = opened("single", 2, true);
    }
    fixture_write_step(store, 4);
    closed(store);
    LH_CHECK(fixture_open("single", 2, false, false, &store, &err) == -EUCLEAN && store == NULL);
    LH_CHECK(strstr(err.message, "step 3") != NULL);
    LH_CHECK(fixture_open("single", 2, false, true, &store, &err) == -EUCLEAN);

    opts.directory_count = 1;
    for (int writes = 0; writes < 2; writes++) {
        lh_test_name("a process with a store of one slot is killed %s its first write: it is %s",
                     writes ? "after" : "before", writes ? "refused" : "whole");
        const char *name = writes ? "killed" : "idle";
        store = made(name, &opts);
        fixture_write_step(store, 1);
        fixture_commit(store, 1);
        closed(store);
        pid_t child = fork();
        if (child == 0) {
            store = opened(name, 1, false);
            _exit(writes && lh_store_write_begin(store, &err) != 0 ? 1 : 0);
        }
        int status = 0;
        LH_CHECK(waitpid(child, &status, 0) == child && status == 0);
        int rc = fixture_open(name, 1, false, false, &store, &err);
        LH_CHECK(rc == (writes ? -EUCLEAN : 0));
        if (!writes) {
            LH_CHECK(lh_store_step(store) == 1 && fixture_holds_step(store, 1));
            closed(store);
        }
    }

    lh_test_name("a rollback of what one slot overwrote is final");
    store = made("spoiled", &opts);
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    fixture_write_step(store, 2);
    lh_store_rollback(store);
    LH_CHECK(lh_store_commit_sync(store, 2, NULL, 0, &err) == -EUCLEAN);
    closed(store);
    LH_CHECK(fixture_open("spoiled", 1, false, false, &store, &err) == -EUCLEAN);
}

static void test_temporary(void)
{
    lh_test_name("a temporary store has no name once it is open, and works");
    struct fixture_opts opts = {.directory_count = 2, .temporary = true};
    struct lh_store *store = made("a/b/temporary", &opts);
    LH_CHECK(access(fixture_path("a"), F_OK) != 0);
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    fixture_write_step(store, 2);
    lh_store_rollback(store);
    LH_CHECK(fixture_holds_step(store, 1));
    closed(store);
    LH_CHECK(access(fixture_path("a"), F_OK) != 0);
}

static void test_read_only(void)
{
    lh_test_name("readers share a store, keep writers out, and change nothing");
    struct lh_store *store = made("shared", &(struct fixture_opts){0});
    struct lh_store *readers[2] = {NULL, NULL};
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    closed(store);
    LH_CHECK(chmod(fixture_path("shared0/lohan.data"), 0400) == 0);
    for (int reader = 0; reader < 2; reader++) {
        LH_CHECK(fixture_open("shared", 1, false, true, &readers[reader], &err) == 0);
        LH_CHECK(fixture_holds_step(readers[reader], 1));
    }
    LH_CHECK(chmod(fixture_path("shared0/lohan.data"), 0600) == 0);
    LH_CHECK(fixture_open("shared", 1, false, false, &store, &err) == -EBUSY);
    LH_CHECK(strstr(err.message, "reading") != NULL);
    LH_CHECK(lh_store_write_sync(readers[0], 0, 0, "x", 1, &err) == -EROFS);
    LH_CHECK(lh_store_commit_sync(readers[0], 2, NULL, 0, &err) == -EROFS);
    lh_store_close(readers[0]);
    closed(readers[1]);
    store = opened("shared", 1, false);
    closed(store);
}

static void test_refused_writes(void)
{
    lh_test_name("writes and commits that cannot be are refused, and change nothing");
    struct lh_store *store = made("refused", &(struct fixture_opts){0});
    char scalars[101] = {0};
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    for (int reopened = 0; reopened < 2; reopened++) {
        LH_CHECK(lh_store_write_sync(store, 4, 0, "x", 1, &err) == -EPERM);
        LH_CHECK(strstr(err.message, "frozen") != NULL);
        closed(store);
        store = opened("refused", 1, false);
    }
    LH_CHECK(lh_store_write_sync(store, 6, 0, "x", 1, &err) == -EINVAL);
    LH_CHECK(lh_store_read_sync(store, 0, fixture_extents[0].bytes, scalars, 1, &err) == -EINVAL);
    LH_CHECK(lh_store_read_sync(store, 0, UINT64_MAX, scalars, 2, &err) == -EINVAL);
    LH_CHECK(lh_store_commit_sync(store, 2, scalars, 101, &err) == -EINVAL);
    LH_CHECK(lh_store_commit_sync(store, 1, scalars, 100, &err) == 0);
    LH_CHECK(fixture_holds_step(store, 1));
    closed(store);
}

static void stage_frozen(void *context)
{
    lh_store_stage(context, FIXTURE_FROZEN_GROUP);
}

static void stage_committing(void *context)
{
    struct lh_store *store = context;
    lh_store_stage(store, 0);
    (void)!lh_store_commit_begin(store, 2, NULL, 0, NULL);
    lh_store_stage(store, 0);
}

static void lose_request(void *context)
{
    struct lh_store *store = context;
    struct lh_io_request requests[LH_STORE_COMMIT_REQUEST_COUNT_MAX];
    (void)!lh_store_commit_begin(store, 2, NULL, 0, NULL);
    (void)!lh_store_commit_next(store, requests, LH_COUNT_OF(requests), NULL);
    (void)!lh_store_commit_next(store, requests, LH_COUNT_OF(requests), NULL);
}

static void test_asserts(void)
{
    lh_test_name("staging a frozen or committing group, or losing a request, stops the process");
    struct lh_store *store = made("asserts", &(struct fixture_opts){0});
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    LH_CHECK(lh_test_aborts(stage_frozen, store));
    LH_CHECK(lh_test_aborts(stage_committing, store));
    LH_CHECK(lh_test_aborts(lose_request, store));
    closed(store);
}

static void test_measure(void)
{
    lh_test_name("measuring gives numbers that a drive can have, and leaves nothing behind");
    uint64_t write_bytes_per_s = 0;
    uint64_t read_bytes_per_s = 0;
    LH_CHECK(mkdir(fixture_path("measure"), 0700) == 0);
    int rc = lh_store_measure(fixture_path("measure"), 32 * LH_MIB, &write_bytes_per_s,
                              &read_bytes_per_s, &err);
    if (rc == -EOPNOTSUPP)
        return;
    LH_CHECK(rc == 0);
    LH_CHECK(write_bytes_per_s > LH_MIB && write_bytes_per_s < 1000 * LH_GIB);
    LH_CHECK(read_bytes_per_s > LH_MIB && read_bytes_per_s < 1000 * LH_GIB);
    printf("  write %.2f GB/s, read %.2f GB/s\n", (double)write_bytes_per_s / 1e9,
           (double)read_bytes_per_s / 1e9);
    LH_CHECK(rmdir(fixture_path("measure")) == 0);
    LH_CHECK(lh_store_measure(fixture_path("nowhere"), LH_MIB, &write_bytes_per_s,
                              &read_bytes_per_s, &err) == -ENOENT);
    LH_CHECK(lh_store_measure("/", 5000, &write_bytes_per_s, &read_bytes_per_s, &err) == -EINVAL);
}

int main(void)
{
    test_round_trip(1, NULL);
    test_round_trip(2, (const uint64_t[]){3, 1});
    test_round_trip(3, (const uint64_t[]){7000000000, 3500000001, 500000000});
    test_modes();
    test_relative();
    test_staged_is_lost();
    test_rollback();
    test_rollback_in_commit();
    test_partial_commit();
    test_odd_ranges(false);
    test_odd_ranges(true);
    test_zeros();
    test_dirty();
    test_zeros_over_garbage();
    test_single_slot();
    test_temporary();
    test_read_only();
    test_refused_writes();
    test_asserts();
    test_measure();
    return 0;
}
