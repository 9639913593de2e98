/*
 * Test power loss and process death between any two file calls of a creation, a commit, a mark, an
 * opening for writing and a return to an older step.
 *
 * What a sync of its file has covered survives, and any part of the rest, in sectors of 512 bytes.
 * Each such disk has to open at a legal step, with all of its bytes and without a note.
 */
#include "lh_test.h"
#include "store/format.h"
#include "store_disk.h"
#include "store_fixture.h"

#define FILE_COUNT 2
#define VARIANT_COUNT (LH_TEST_IS_SLOW ? 5 : 12)

static struct lh_error err;
static struct disk *disk;  /* the disk of the simulated machine */
static struct disk *after; /* its state after a crash */
static uint64_t seed = 1;
static uint32_t image_count;

static struct lh_store *opened(struct disk *of, const uint64_t *step)
{
    struct lh_store *store = NULL;
    fixture_fs = &of->fs;
    int rc = fixture_open_at("crash", FILE_COUNT, false, step, &store, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0);
    return store;
}

/* A store at step, of which nothing is under way. */
static void begin(uint64_t step, bool single_slot)
{
    struct lh_store *store = NULL;
    struct fixture_opts opts = {
        .directory_count = FILE_COUNT, .small = true, .single_slot = single_slot};
    disk = disk_new();
    after = disk_new();
    fixture_fs = &disk->fs;
    LH_CHECK(fixture_create("crash", &opts, &store, &err) == 0);
    for (uint64_t at = 1; at <= step; at++) {
        fixture_write_step(store, at);
        fixture_commit(store, at);
    }
    lh_store_close(store);
    disk_settle(disk);
}

static void end(void)
{
    disk_delete(disk);
    disk_delete(after);
    LH_CHECK(fixture_alloc.live_count == 0);
}

/* Return the first event that writes to a superblock, or the count of events. */
static uint32_t superblock_event(void)
{
    uint32_t index = 0;
    for (; index < disk->event_count; index++) {
        const struct disk_event *event = &disk->events[index];
        if (event->kind == DISK_WRITE && event->file == 0 &&
            event->offset >= LH_STORE_SUPERBLOCK_OFFSET(0, 0) &&
            event->offset <= LH_STORE_SUPERBLOCK_OFFSET(1, 1))
            break;
    }
    return index;
}

/*
 * Open what a crash left: whole, and silent. Returns its step. If the drive has failed as well, a
 * note may say that one copy of a superblock is damaged.
 */
static uint64_t step_after(uint32_t cut, int variant, bool has_failed)
{
    struct lh_store *store = opened(after, NULL);
    uint64_t step = lh_store_step(store);
    const char *note = lh_store_note(store);
    bool is_silent = note[0] == '\0' || (has_failed && strstr(note, "the other one was used"));
    bool is_right = is_silent && fixture_holds_step(store, step);
    if (!is_right)
        fprintf(stderr, "cut before event %u, variant %d: step %d, %s\n", cut, variant, (int)step,
                lh_store_note(store));
    LH_CHECK(is_right);
    /* Continue the session that crashed. */
    if (variant == 3) {
        fixture_write_step(store, step + 1);
        fixture_commit(store, step + 1);
        lh_store_close(store);
        store = opened(after, NULL);
        LH_CHECK(lh_store_step(store) == step + 1 && fixture_holds_step(store, step + 1));
    }
    lh_store_close(store);
    fixture_fs = &disk->fs;
    image_count++;
    return step;
}

static void test_commit(uint64_t old_step)
{
    lh_test_name("power loss in the commit of step %d leaves step %d or step %d, whole",
                 (int)old_step + 1, (int)old_step, (int)old_step + 1);
    begin(old_step, false);
    struct lh_store *store = opened(disk, NULL);
    disk_settle(disk);
    fixture_write_step(store, old_step + 1);
    fixture_commit(store, old_step + 1);
    uint32_t superblock = superblock_event();
    LH_CHECK(superblock + 4 == disk->event_count);
    for (uint32_t cut = 0; cut <= disk->event_count; cut++) {
        for (int variant = 0; variant < VARIANT_COUNT * (cut < superblock ? 1 : 4); variant++) {
            disk_cut(disk, cut, variant, &seed, after);
            uint64_t step = step_after(cut, variant, false);
            LH_CHECK(step == old_step || step == old_step + 1);
            LH_CHECK(cut > superblock || step == old_step);
            /* One copy of the superblock is durable. */
            LH_CHECK(cut < superblock + 2 || step == old_step + 1);
        }
    }
    lh_store_close(store);
    end();
}

/* Open after a process died at event killed, write a step, and let power fail at each event. */
static void resume_and_cut(uint32_t killed, uint64_t old_step, bool has_failed)
{
    struct lh_store *store = opened(disk, NULL);
    uint64_t step = lh_store_step(store);
    uint32_t open_end = disk->event_count;
    LH_CHECK(step == old_step || step == old_step + 1);
    fixture_write_step(store, step + 1);
    for (uint32_t cut = killed; cut <= disk->event_count; cut++) {
        for (int variant = 0; variant < VARIANT_COUNT; variant++) {
            disk_cut(disk, cut, variant, &seed, after);
            uint64_t found = step_after(cut, variant, has_failed);
            LH_CHECK(found == old_step || found == old_step + 1);
            /*
             * The state that opening for writing returned is durable, whatever was written since.
             */
            LH_CHECK(cut < open_end || found == step);
        }
    }
    lh_store_close(store);
}

static void test_kill(void)
{
    lh_test_name("a step that a resumed session was shown survives power loss");
    for (uint32_t from_end = 0; from_end < 12; from_end++) {
        begin(2, false);
        struct lh_store *store = opened(disk, NULL);
        disk_settle(disk);
        fixture_write_step(store, 3);
        fixture_commit(store, 3);
        lh_store_close(store);
        disk_kill(disk, superblock_event() + 4 - from_end);
        resume_and_cut(disk->event_count, 2, false);
        end();
    }
}

static void test_failed_sync(void)
{
    lh_test_name("a failed sync that drops pages costs no step that was shown since");
    int failing = 0;
    for (bool has_failed = true; has_failed; failing++) {
        begin(2, false);
        struct lh_store *store = opened(disk, NULL);
        disk_settle(disk);
        fixture_write_step(store, 3);
        disk->fail_sync = failing;
        has_failed = lh_store_commit_sync(store, 3, NULL, 0, &err) == -EIO;
        bool is_unknown = strstr(err.message, "is unknown") != NULL;
        bool is_at_two = strstr(err.message, "the store is still at step 2") != NULL;
        LH_CHECK(!has_failed || is_unknown == (superblock_event() < disk->event_count));
        LH_CHECK(!has_failed || is_unknown != is_at_two);
        /* A sync is of a file, and not of a range in it. */
        LH_CHECK(!has_failed || strstr(err.message, "offset") == NULL);
        LH_CHECK(!has_failed || lh_store_write_sync(store, 0, 0, "x", 1, &err) == -EIO);
        disk->fail_sync = -1;
        lh_store_close(store);
        resume_and_cut(disk->event_count, 2, has_failed);
        end();
    }
    LH_CHECK(failing == FILE_COUNT + 3 + 1);
}

static void test_create(void)
{
    lh_test_name("an interrupted creation leaves no store or a complete one");
    struct lh_store *store = NULL;
    uint32_t opened_count = 0;
    disk = disk_new();
    after = disk_new();
    fixture_fs = &disk->fs;
    LH_CHECK(fixture_create("crash",
                            &(struct fixture_opts){.directory_count = FILE_COUNT, .small = true},
                            &store, &err) == 0);
    for (uint32_t cut = 0; cut <= disk->event_count; cut++) {
        /* The last events write the first file's header, which may be torn in many ways. */
        bool is_header = cut + 4 >= disk->event_count;
        for (int variant = 0; variant < VARIANT_COUNT * (is_header ? 8 : 1); variant++) {
            struct lh_store *found = NULL;
            disk_cut(disk, cut, variant, &seed, after);
            fixture_fs = &after->fs;
            int rc = fixture_open("crash", FILE_COUNT, false, true, &found, &err);
            lh_store_close(found);
            if (rc != 0 && rc != -ENOENT && rc != -EINPROGRESS)
                fprintf(stderr, "cut before event %u, variant %d: %s\n", cut, variant, err.message);
            LH_CHECK(rc == 0 || rc == -ENOENT || rc == -EINPROGRESS);
            LH_CHECK(rc == 0 || cut < disk->event_count);
            if (rc == 0)
                LH_CHECK(step_after(cut, variant, false) == 0);
            opened_count += rc == 0;
        }
    }
    LH_CHECK(opened_count > (uint32_t)VARIANT_COUNT);
    lh_store_close(store);
    end();
}

static void test_open_at(void)
{
    lh_test_name("power loss while going back to an older step leaves that one or the newest");
    uint64_t step = 2;
    begin(3, false);
    struct lh_store *store = opened(disk, &step);
    LH_CHECK(lh_store_step(store) == 2 && fixture_holds_step(store, 2));
    for (uint32_t cut = 0; cut <= disk->event_count; cut++) {
        for (int variant = 0; variant < 4 * VARIANT_COUNT; variant++) {
            disk_cut(disk, cut, variant, &seed, after);
            uint64_t found = step_after(cut, variant, false);
            /* The first copy of the superblock that rejects step 3 counts once it is synced. */
            LH_CHECK(found == 2 || (found == 3 && cut < superblock_event() + 2));
        }
    }
    lh_test_name("the step after an older one that was gone back to is committed as any other");
    uint32_t open_end = disk->event_count;
    fixture_write_step(store, 3);
    fixture_commit(store, 3);
    for (uint32_t cut = open_end; cut <= disk->event_count; cut++) {
        for (int variant = 0; variant < VARIANT_COUNT; variant++) {
            disk_cut(disk, cut, variant, &seed, after);
            uint64_t found = step_after(cut, variant, false);
            LH_CHECK(found == 3 || (found == 2 && cut < disk->event_count));
        }
    }
    lh_store_close(store);
    end();
}

/* Return whether the two copies of a superblock are the same block. */
static bool is_whole_place(uint32_t number)
{
    return memcmp(disk_bytes(disk, 0, LH_STORE_SUPERBLOCK_OFFSET(number, 0)),
                  disk_bytes(disk, 0, LH_STORE_SUPERBLOCK_OFFSET(number, 1)), LH_BLOCK_BYTES) == 0;
}

/* A drive that loses power while it writes may leave a sector that was neither old nor new. */
static void sector_lose(const struct disk *before, uint32_t cut)
{
    const struct disk_event *last = cut > 0 ? &before->events[cut - 1] : NULL;
    if (last && last->kind == DISK_WRITE)
        *disk_bytes(after, last->file, last->offset + 8) ^= 1;
}

/*
 * Open a store of which one copy of a superblock is damaged, or is an older one, at a step, and let
 * power fail at each event of that.
 */
static void repair_and_cut(uint32_t number, uint32_t copy, bool is_stale, bool is_interrupted,
                           const uint64_t *asked)
{
    begin(3, false);
    uint8_t *block = disk_bytes(disk, 0, LH_STORE_SUPERBLOCK_OFFSET(number, copy));
    uint8_t *older = malloc(LH_BLOCK_BYTES);
    struct lh_store *store = opened(disk, NULL);
    LH_CHECK(older != NULL);
    memcpy(older, block, LH_BLOCK_BYTES);
    for (uint64_t step = 4; step < 6; step++) {
        fixture_write_step(store, step);
        fixture_commit(store, step);
    }
    disk_settle(disk);
    if (is_interrupted) {
        fixture_write_step(store, 6);
        fixture_commit(store, 6);
        disk_kill(disk, superblock_event());
    }
    lh_store_close(store);
    if (is_stale)
        memcpy(block, older, LH_BLOCK_BYTES);
    else
        block[8] ^= 1;
    free(older);
    disk_settle(disk);
    store = opened(disk, asked);
    uint64_t step = lh_store_step(store);
    LH_CHECK(step == (asked ? *asked : 5));
    LH_CHECK(is_whole_place(0) && is_whole_place(1));
    for (uint32_t cut = 0; cut <= disk->event_count; cut++) {
        for (int variant = 0; variant < 2 * VARIANT_COUNT; variant++) {
            disk_cut(disk, cut, variant, &seed, after);
            if (variant % 2 == 1)
                sector_lose(disk, cut);
            struct lh_store *found = opened(after, NULL);
            bool is_right = lh_store_step(found) == step || lh_store_step(found) == 5;
            LH_CHECK(is_right && fixture_holds_step(found, lh_store_step(found)));
            lh_store_close(found);
        }
    }
    fixture_fs = &disk->fs;
    lh_store_close(store);
    end();
}

static void test_repair(void)
{
    lh_test_name("power loss while a copy of a superblock is repaired costs no step");
    const uint64_t before = 4;
    for (uint32_t number = 0; number < 2; number++) {
        for (uint32_t copy = 0; copy < 2; copy++) {
            for (int is_stale = 0; is_stale < 2; is_stale++) {
                repair_and_cut(number, copy, is_stale, false, NULL);
                repair_and_cut(number, copy, is_stale, true, NULL);
                repair_and_cut(number, copy, is_stale, false, &before);
            }
        }
    }
}

static void test_mark(void)
{
    lh_test_name("a store with one slot opens whole, or is refused as a mixture of steps");
    begin(1, true);
    struct lh_store *store = opened(disk, NULL);
    uint32_t open_end = disk->event_count;
    fixture_write_step(store, 2);
    uint32_t unclean_count = 0;
    fixture_commit(store, 2);
    lh_store_close(store);
    for (uint32_t cut = 0; cut <= disk->event_count; cut++) {
        for (int variant = 0; variant < VARIANT_COUNT; variant++) {
            disk_cut(disk, cut, variant, &seed, after);
            fixture_fs = &after->fs;
            int rc = fixture_open("crash", FILE_COUNT, false, true, &store, &err);
            LH_CHECK(rc == 0 || rc == -EUCLEAN);
            LH_CHECK(rc == 0 || (cut > open_end && cut < disk->event_count));
            unclean_count += rc != 0;
            if (rc != 0)
                continue;
            uint64_t step = lh_store_step(store);
            LH_CHECK(lh_store_note(store)[0] == '\0' && fixture_holds_step(store, step));
            LH_CHECK(step == 1 || (step == 2 && cut > open_end));
            LH_CHECK(cut < disk->event_count || step == 2);
            lh_store_close(store);
        }
    }
    LH_CHECK(unclean_count > 10);
    end();
}

int main(void)
{
    for (uint64_t step = 0; step < 4; step++)
        test_commit(step);
    test_kill();
    test_failed_sync();
    test_create();
    test_open_at();
    test_repair();
    test_mark();
    printf("%u disks after a crash were whole\n", image_count);
    return 0;
}
