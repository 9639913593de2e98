/*
 * Test damage at rest to a store's metadata: one bad block loses nothing, two are reported, and
 * nothing committed is given up unless the user asks for it.
 */
#include "base/crc32c.h"
#include "lh_test.h"
#include "store/format.h"
#include "store_disk.h"
#include "store_fixture.h"

#define FILE_COUNT 2
/* Creation's superblocks have sequence numbers 1 and 2, step 3 has 5. */
#define NEWEST_STEP 3
#define NEWEST_NUMBER 1

enum damage { DAMAGE_ZEROS, DAMAGE_BIT, DAMAGE_GARBAGE, DAMAGE_UNREADABLE, DAMAGE_COUNT };

static struct lh_error err;
static struct disk *whole;   /* a store at step 3 */
static struct disk *damaged; /* a copy of it to be damaged */
static struct lh_store_header header;
static struct lh_store_control control;

static int open_at(bool read_only, const uint64_t *step, struct lh_store **store_out)
{
    memset(&err, 0, sizeof(err));
    fixture_fs = &damaged->fs;
    int rc = fixture_open_at("damage", FILE_COUNT, read_only, step, store_out, &err);
    LH_CHECK((rc == 0) == (*store_out != NULL) && rc == err.code);
    return rc;
}

static void store_make(struct disk *disk, uint64_t step_count)
{
    struct lh_store *store = NULL;
    struct fixture_opts opts = {.directory_count = FILE_COUNT, .small = true};
    fixture_fs = &disk->fs;
    LH_CHECK(fixture_create("damage", &opts, &store, &err) == 0);
    for (uint64_t step = 1; step <= step_count; step++) {
        fixture_write_step(store, step);
        fixture_commit(store, step);
    }
    lh_store_close(store);
    disk_settle(disk);
    LH_CHECK(lh_store_header_decode(disk_bytes(disk, 0, 0), &header, &err) == 0);
    lh_store_control_plan(&header, &control);
}

static void block_damage(uint32_t file, uint64_t offset, enum damage damage)
{
    uint8_t *block = disk_bytes(damaged, file, offset);
    uint64_t seed = offset;
    if (damage == DAMAGE_ZEROS)
        memset(block, 0, LH_BLOCK_BYTES);
    if (damage == DAMAGE_BIT)
        block[lh_test_random(&seed) % 16] ^= 4; /* padding is not checked */
    for (uint32_t index = 0; index < LH_BLOCK_BYTES && damage == DAMAGE_GARBAGE; index++)
        block[index] = (uint8_t)lh_test_random(&seed);
    if (damage == DAMAGE_UNREADABLE) {
        damaged->bad_file = (int)file;
        damaged->bad_offset = offset;
    }
}

static void damage_undo(void)
{
    damaged->bad_file = -1;
    disk_copy(whole, damaged);
}

static void expect_step(uint64_t step, bool is_noted)
{
    struct lh_store *store = NULL;
    int rc = open_at(false, NULL, &store);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0);
    LH_CHECK(lh_store_step(store) == step && fixture_holds_step(store, step));
    LH_CHECK(!lh_store_is_fallback(store));
    LH_CHECK(!is_noted || lh_store_note(store)[0] != '\0');
    lh_store_close(store);
}

/* Commit, and check the store's content after it. */
static void expect_commit(uint64_t step)
{
    struct lh_store *store = NULL;
    LH_CHECK(open_at(false, NULL, &store) == 0);
    fixture_write_step(store, step);
    fixture_commit(store, step);
    lh_store_close(store);
    expect_step(step, false);
}

static bool is_owner(uint64_t offset)
{
    return offset == LH_STORE_OWNER_OFFSET;
}

/* All that was written, but for the owner's block, was synced. */
static void expect_synced(void)
{
    bool is_pending[FILE_COUNT] = {false};
    for (uint32_t index = 0; index < damaged->event_count; index++) {
        const struct disk_event *event = &damaged->events[index];
        if (event->kind == DISK_SYNC)
            is_pending[event->file] = false;
        if (event->kind == DISK_WRITE && !is_owner(event->offset))
            is_pending[event->file] = true;
    }
    for (uint32_t file = 0; file < FILE_COUNT; file++)
        LH_CHECK(!is_pending[file]);
}

/* Every block in front of the data that is not blank, in every kind of damage. */
static void test_single_blocks(uint64_t step)
{
    lh_test_name("damage to one block before the data at step %d: opens there for writing, and is "
                 "repaired",
                 (int)step);
    uint32_t block_count = 0;
    for (uint32_t file = 0; file < FILE_COUNT; file++) {
        for (uint64_t offset = 0; offset < control.data_offset[file]; offset += LH_BLOCK_BYTES) {
            const uint8_t *block = disk_bytes(whole, file, offset);
            if (block[0] == 0 && memcmp(block, block + 1, LH_BLOCK_BYTES - 1) == 0)
                continue;
            block_count++;
            for (enum damage damage = 0; damage < DAMAGE_COUNT; damage++) {
                damage_undo();
                block_damage(file, offset, damage);
                struct lh_store *store = NULL;
                int rc = open_at(true, NULL, &store);
                if (rc < 0)
                    fprintf(stderr, "file %u, offset %d, damage %d: %s\n", file, (int)offset,
                            damage, err.message);
                LH_CHECK(rc == 0 && lh_store_step(store) == step);
                lh_store_close(store);
                disk_settle(damaged);
                expect_step(step, false);
                expect_synced();
                damaged->bad_file = -1;
                /* Opening for writing has put back what was there, but for the owner's block. */
                uint8_t *now = disk_bytes(damaged, file, offset);
                bool is_back = memcmp(now, block, LH_BLOCK_BYTES) == 0;
                bool is_witness = file > 0 && offset != LH_STORE_HEADER_OFFSET(0) &&
                                  offset != LH_STORE_HEADER_OFFSET(1) && !is_owner(offset);
                bool is_older = offset == control.manifest_offset[step % 2][0] ||
                                offset == control.manifest_offset[step % 2][1];
                if (!is_back && !is_owner(offset) && !is_witness && !is_older)
                    fprintf(stderr, "file %u, offset %d, damage %d stays\n", file, (int)offset,
                            damage);
                LH_CHECK(is_back || is_owner(offset) || is_witness || is_older);
                expect_commit(step + 1);
            }
        }
    }
    /* Headers, owners, witnesses; then superblocks, table, meta and manifests, twice each. */
    LH_CHECK(block_count == FILE_COUNT * 3 + 2 * (FILE_COUNT - 1) + 12);
    damage_undo();
}

static void test_notes(void)
{
    lh_test_name("a damaged copy is noted, unless a crash can have caused the damage");
    static const struct {
        uint32_t file;
        uint64_t offset;
        enum damage damage;
        const char *says;
    } cases[] = {
        {0, LH_STORE_HEADER_OFFSET(0), DAMAGE_BIT, "copy 0 of the header"},
        {1, LH_STORE_HEADER_OFFSET(0), DAMAGE_ZEROS, "damage1/lohan.data: copy 0 of the header"},
        {0, LH_STORE_HEADER_OFFSET(1), DAMAGE_UNREADABLE, "copy 1 of the header"},
        {0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, 0), DAMAGE_BIT, "copy 0 of superblock 1"},
        {0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, 1), DAMAGE_ZEROS, "copy 1 of superblock 1"},
        {0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, 1), DAMAGE_UNREADABLE, "cannot read"},
        {0, LH_STORE_SUPERBLOCK_OFFSET(0, 0), DAMAGE_ZEROS, "copy 0 of superblock 0"},
        {0, LH_STORE_SUPERBLOCK_OFFSET(0, 1), DAMAGE_GARBAGE, "copy 1 of superblock 0"},
        {0, LH_STORE_TABLE_OFFSET, DAMAGE_BIT, "the table"},
        {1, LH_STORE_WITNESS_OFFSET(NEWEST_NUMBER), DAMAGE_BIT, "the witness"},
        {1, LH_STORE_WITNESS_OFFSET(NEWEST_NUMBER), DAMAGE_UNREADABLE, "the witness"},
        {0, LH_STORE_OWNER_OFFSET, DAMAGE_UNREADABLE, "records the process"},
        {0, 0, DAMAGE_COUNT, ""},
    };
    for (uint32_t index = 0; index < LH_COUNT_OF(cases); index++) {
        struct lh_store *store = NULL;
        damage_undo();
        if (cases[index].damage != DAMAGE_COUNT)
            block_damage(cases[index].file, cases[index].offset, cases[index].damage);
        LH_CHECK(open_at(true, NULL, &store) == 0);
        bool is_right = cases[index].says[0] == '\0'
                            ? lh_store_note(store)[0] == '\0'
                            : strstr(lh_store_note(store), cases[index].says) != NULL;
        if (!is_right)
            fprintf(stderr, "case %u: '%s'\n", index, lh_store_note(store));
        LH_CHECK(is_right);
        lh_store_close(store);
    }
    damage_undo();
}

/* Writers are refused, readers see step 2, and a session returns to step 2 only if it names it. */
static void expect_fallback(const char *says)
{
    struct lh_store *store = NULL;
    LH_CHECK(open_at(false, NULL, &store) == -EILSEQ);
    LH_CHECK(strstr(err.message, says) != NULL && strstr(err.message, "resume=2") != NULL);
    LH_CHECK(open_at(true, NULL, &store) == 0);
    LH_CHECK(lh_store_is_fallback(store) && lh_store_step(store) == 2);
    LH_CHECK(fixture_holds_step(store, 2) && strstr(lh_store_note(store), says) != NULL);
    lh_store_close(store);
    uint64_t step = 1;
    LH_CHECK(open_at(false, &step, &store) == -EINVAL && strstr(err.message, "are: 2") != NULL);
    step = 3;
    LH_CHECK(open_at(false, &step, &store) == -EINVAL && strstr(err.message, says) != NULL);
    step = 2;
    LH_CHECK(open_at(true, &step, &store) == 0);
    lh_store_close(store);
    LH_CHECK(open_at(false, NULL, &store) == -EILSEQ);
    LH_CHECK(open_at(false, &step, &store) == 0 && fixture_holds_step(store, 2));
    lh_store_close(store);
    expect_step(2, false);
    expect_commit(3);
    expect_commit(4);
    damage_undo();
}

static void test_both_copies(void)
{
    lh_test_name("without the newest superblock or manifest the step before is for readers only");
    for (enum damage damage = 0; damage < DAMAGE_UNREADABLE; damage++) {
        for (uint32_t copy = 0; copy < 2; copy++)
            block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, copy), damage);
        expect_fallback("superblock 1 (offset 131072");
        for (uint32_t copy = 0; copy < 2; copy++)
            block_damage(0, control.manifest_offset[0][copy], damage);
        expect_fallback("the manifest of");
    }

    lh_test_name("a read error is an error, for readers as well, and goes with it");
    struct lh_store *store = NULL;
    block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, 0), DAMAGE_BIT);
    block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, 1), DAMAGE_UNREADABLE);
    LH_CHECK(open_at(true, NULL, &store) == -EIO && open_at(false, NULL, &store) == -EIO);
    LH_CHECK(strstr(err.message, "cannot read") != NULL);
    damaged->bad_file = -1;
    expect_step(NEWEST_STEP, true);
    damage_undo();

    lh_test_name("a superblock in the place of the other one is damage");
    for (uint32_t copy = 0; copy < 2; copy++)
        memcpy(disk_bytes(damaged, 0, LH_STORE_SUPERBLOCK_OFFSET(0, copy)),
               disk_bytes(damaged, 0, LH_STORE_SUPERBLOCK_OFFSET(1, copy)), LH_BLOCK_BYTES);
    LH_CHECK(open_at(false, NULL, &store) == -EILSEQ);
    LH_CHECK(strstr(err.message, "belongs to the other superblock") != NULL);
    damage_undo();

    lh_test_name("no intact step is left: refused, with both reasons");
    for (uint32_t copy = 0; copy < 2; copy++) {
        block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(0, copy), DAMAGE_BIT);
        block_damage(0, control.manifest_offset[0][copy], DAMAGE_BIT);
    }
    LH_CHECK(open_at(true, NULL, &store) == -EILSEQ);
    LH_CHECK(strstr(err.message, "superblock 0") && strstr(err.message, "the manifest"));
    damage_undo();
}

static void test_open_at(void)
{
    lh_test_name("the newest step may be named, the one before it gone back to, and no other");
    struct lh_store *store = NULL;
    uint64_t step = 3;
    LH_CHECK(open_at(false, &step, &store) == 0 && fixture_holds_step(store, 3));
    lh_store_close(store);
    step = 7;
    LH_CHECK(open_at(true, &step, &store) == -EINVAL && strstr(err.message, "are: 3 and 2"));
    step = 2;
    LH_CHECK(open_at(true, &step, &store) == 0 && fixture_holds_step(store, 2));
    lh_store_close(store);
    expect_step(3, false);
    LH_CHECK(open_at(false, &step, &store) == 0 && fixture_holds_step(store, 2));
    lh_store_close(store);
    expect_step(2, false);
    LH_CHECK(open_at(false, &step, &store) == 0);
    lh_store_close(store);
    step = 3;
    LH_CHECK(open_at(false, &step, &store) == -EINVAL);
    expect_commit(3);
    damage_undo();
}

static void test_sequence_limit(void)
{
    lh_test_name("a sequence number that leaves no room for commits is not written behind");
    for (uint32_t copy = 0; copy < 2; copy++) {
        struct lh_store *store = NULL;
        struct lh_store_superblock found;
        uint8_t *block = disk_bytes(damaged, 0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, copy));
        LH_CHECK(lh_store_superblock_decode(block, &header, &found, &err) == 0);
        found.sequence = LH_STORE_SEQUENCE_MAX - 1;
        lh_store_superblock_encode(&found, &header, block);
        LH_CHECK(open_at(true, NULL, &store) == 0 && fixture_holds_step(store, NEWEST_STEP));
        lh_store_close(store);
        LH_CHECK(open_at(false, NULL, &store) == -EILSEQ);
        LH_CHECK(strstr(err.message, "sequence number") != NULL);
        damage_undo();
    }
}

static uint32_t flaky_count;

/* Copy 1 of the table reads well once, and wrong after that. */
static int64_t flaky_read(const struct lh_store_fs *fs, int fd, void *buffer, uint64_t bytes,
                          uint64_t offset)
{
    int64_t rc = whole->fs.ops->read(fs, fd, buffer, bytes, offset);
    if (offset == control.table_offset[1] && flaky_count++ > 0)
        ((uint8_t *)buffer)[0] ^= 1;
    return rc;
}

static void test_flaky_copy(void)
{
    lh_test_name("a copy that is read twice is checked twice");
    struct lh_store *store = NULL;
    struct lh_store_fs_ops ops = *whole->fs.ops;
    ops.read = flaky_read;
    block_damage(0, control.table_offset[0], DAMAGE_BIT);
    damaged->fs.ops = &ops;
    LH_CHECK(open_at(false, NULL, &store) == -EILSEQ && flaky_count > 1);
    LH_CHECK(strstr(err.message, "has checksum") != NULL);
    damaged->fs.ops = whole->fs.ops;
    damage_undo();
}

static void file_restore(const struct disk *older, uint32_t file)
{
    memcpy(disk_bytes(damaged, file, 0), older->files[file].bytes, older->files[file].size);
}

static void test_restored(void)
{
    lh_test_name("a directory that was restored from an older copy is named, with both steps");
    struct disk *older[NEWEST_STEP] = {disk_new(), disk_new(), disk_new()};
    struct disk *world = disk_new();
    struct lh_store *store = NULL;
    store_make(world, 0);
    for (uint64_t step = 0; step < NEWEST_STEP; step++) {
        disk_copy(world, older[step]);
        fixture_fs = &world->fs;
        LH_CHECK(fixture_open("damage", FILE_COUNT, false, false, &store, &err) == 0);
        fixture_write_step(store, step + 1);
        fixture_commit(store, step + 1);
        lh_store_close(store);
    }
    for (uint64_t step = 0; step < NEWEST_STEP; step++) {
        char steps[64];
        disk_copy(world, damaged);
        file_restore(older[step], 1);
        LH_CHECK(open_at(true, NULL, &store) == -ESTALE && open_at(false, NULL, &store) == -ESTALE);
        snprintf(steps, sizeof(steps), "its newest commit is step %" PRIu64 " ", step);
        LH_CHECK(strstr(err.message, "damage1 was restored") && strstr(err.message, steps));
        LH_CHECK(strstr(err.message, "the store is at step 3") != NULL);

        disk_copy(world, damaged);
        file_restore(older[step], 0);
        int rc = open_at(false, NULL, &store);
        /* This is exactly the previous step, as a crash in the last commit leaves it. */
        LH_CHECK(rc == (step + 1 == NEWEST_STEP ? 0 : -ESTALE));
        if (rc == 0)
            LH_CHECK(lh_store_step(store) == step && fixture_holds_step(store, step));
        else
            LH_CHECK(strstr(err.message, "damage0 was restored") != NULL);
        lh_store_close(store);
        store = NULL;
    }
    disk_copy(older[1], damaged);
    expect_step(1, false);
    for (uint32_t index = 0; index < NEWEST_STEP; index++)
        disk_delete(older[index]);
    disk_delete(world);
    damage_undo();
}

/* A session whose process ends when the witness of its commit is there, and no superblock yet. */
static void commit_interrupt(struct disk *world, uint64_t step)
{
    struct lh_store *store = NULL;
    uint32_t index = 0;
    fixture_fs = &world->fs;
    LH_CHECK(fixture_open("damage", FILE_COUNT, false, false, &store, &err) == 0);
    disk_settle(world);
    fixture_write_step(store, step);
    fixture_commit(store, step);
    lh_store_close(store);
    while (world->events[index].file != 0 || world->events[index].kind != DISK_WRITE ||
           world->events[index].offset > LH_STORE_SUPERBLOCK_OFFSET(1, 1))
        index++;
    disk_kill(world, index);
}

static void test_restored_interrupted(void)
{
    lh_test_name("a copy made after an interrupted commit does not pass for one of the commit that "
                 "took its place");
    struct disk *older = disk_new();
    struct disk *world = disk_new();
    struct lh_store *store = NULL;
    store_make(world, NEWEST_STEP);
    /* Several times: each session that is interrupted leaves the witness of another commit. */
    for (int interrupted = 0; interrupted < 3; interrupted++) {
        commit_interrupt(world, NEWEST_STEP + 1);
        disk_copy(world, older);
        disk_copy(world, damaged);
        expect_step(NEWEST_STEP, false);
        expect_commit(NEWEST_STEP + 1);
        file_restore(older, 1);
        LH_CHECK(open_at(true, NULL, &store) == -ESTALE && open_at(false, NULL, &store) == -ESTALE);
        LH_CHECK(strstr(err.message, "damage1 was restored") != NULL);
    }
    disk_delete(older);
    disk_delete(world);
    damage_undo();
}

/* The process of a session ends right after the witness of a commit that changes no values. */
static void witness_leave(struct disk *world)
{
    struct lh_store *store = NULL;
    uint32_t index = 0;
    fixture_fs = &world->fs;
    LH_CHECK(fixture_open("damage", FILE_COUNT, false, false, &store, &err) == 0);
    disk_settle(world);
    fixture_commit(store, NEWEST_STEP);
    lh_store_close(store);
    while (world->events[index].file != 1 || world->events[index].kind != DISK_WRITE)
        index++;
    LH_CHECK(world->events[index].offset == LH_STORE_WITNESS_OFFSET(0));
    disk_kill(world, index + 1);
}

static void test_lost_after_interrupted(void)
{
    lh_test_name("witnesses of interrupted commits do not turn a lost newest superblock into a "
                 "directory that was restored");
    struct disk *world = disk_new();
    struct lh_store *store = NULL;
    store_make(world, NEWEST_STEP);
    for (int interrupted = 0; interrupted < 4; interrupted++) {
        disk_copy(world, damaged);
        for (uint32_t copy = 0; copy < 2; copy++)
            block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(NEWEST_NUMBER, copy), DAMAGE_BIT);
        LH_CHECK(open_at(false, NULL, &store) == -EILSEQ);
        LH_CHECK(strstr(err.message, "resume=2 goes back") != NULL);
        LH_CHECK(open_at(true, NULL, &store) == 0 && lh_store_is_fallback(store));
        lh_store_close(store);
        LH_CHECK(open_at(false, &(uint64_t){2}, &store) == 0 && fixture_holds_step(store, 2));
        lh_store_close(store);
        expect_commit(3);
        expect_commit(4);
        witness_leave(world);
    }
    disk_delete(world);
    damage_undo();
}

/* A store that was made by the code before format version 2, gzipped: three steps in two files. */
static struct disk *golden_load(void)
{
    struct disk *disk = disk_new();
    for (uint32_t file = 0; file < FILE_COUNT; file++) {
        char command[4096];
        const char *slash = strrchr(__FILE__, '/');
        snprintf(disk->files[file].path, sizeof(disk->files[file].path), "%s/damage%u/lohan.data",
                 fixture_root(), file);
        snprintf(command, sizeof(command), "gzip -dc '%.*s/../golden/store_v1_%u.gz'",
                 (int)(slash - __FILE__), __FILE__, file);
        FILE *pipe = popen(command, "r");
        LH_CHECK(pipe != NULL);
        disk->files[file].bytes = malloc(4 * LH_MIB);
        LH_CHECK(disk->files[file].bytes != NULL);
        disk->files[file].size = fread(disk->files[file].bytes, 1, 4 * LH_MIB, pipe);
        disk->files[file].is_there = true;
        LH_CHECK(pclose(pipe) == 0 && disk->files[file].size > LH_MIB);
    }
    disk_settle(disk);
    return disk;
}

static void test_version_1(void)
{
    lh_test_name("a store of version 1 opens, commits, and stays of version 1");
    struct lh_store *store = NULL;
    disk_delete(whole);
    whole = golden_load();
    damage_undo();
    expect_step(3, false);
    expect_commit(4);
    expect_commit(5);
    LH_CHECK(disk_bytes(damaged, 0, 8)[0] == 1 && disk_bytes(damaged, 1, 8)[0] == 1);
    damage_undo();

    /* Creation's superblock has sequence number 1 there, so step 3 has 4. */
    lh_test_name("version 1: a torn superblock may be a crash, a blank one is damage");
    block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(0, 0), DAMAGE_BIT);
    LH_CHECK(open_at(false, NULL, &store) == 0 && fixture_holds_step(store, 2));
    LH_CHECK(strstr(lh_store_note(store), "superblock 0") != NULL);
    lh_store_close(store);
    damage_undo();
    block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(0, 0), DAMAGE_ZEROS);
    expect_fallback("superblock 0");
    block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(0, 0), DAMAGE_UNREADABLE);
    LH_CHECK(open_at(true, NULL, &store) == -EIO && open_at(false, NULL, &store) == -EIO);
    damage_undo();

    lh_test_name("version 1: a lost header of a store with commits is damage");
    block_damage(0, LH_STORE_HEADER_OFFSET(0), DAMAGE_ZEROS);
    LH_CHECK(open_at(false, NULL, &store) == -EILSEQ && strstr(err.message, "holds commits"));
    damage_undo();

    lh_test_name("version 1: what lies where version 2 has a copy of the header is ignored");
    memcpy(disk_bytes(damaged, 0, LH_STORE_HEADER_OFFSET(1)), disk_bytes(damaged, 0, 0),
           LH_BLOCK_BYTES);
    block_damage(0, LH_STORE_HEADER_OFFSET(0), DAMAGE_BIT);
    LH_CHECK(open_at(true, NULL, &store) == -EILSEQ);
    damage_undo();

    lh_test_name("version 1: a table where version 2 has superblocks is no sign of commits");
    struct lh_store_superblock superblock;
    LH_CHECK(lh_store_header_decode(disk_bytes(damaged, 0, 0), &header, &err) == 0);
    uint8_t *block = disk_bytes(damaged, 0, LH_STORE_SUPERBLOCK_OFFSET(1, 0));
    LH_CHECK(lh_store_superblock_decode(block, &header, &superblock, &err) == 0);
    superblock.sequence = LH_STORE_SEQUENCE_CREATED(1);
    lh_store_superblock_encode(&superblock, &header, block);
    block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(0, 0), DAMAGE_ZEROS);
    block_damage(0, LH_STORE_HEADER_OFFSET(0), DAMAGE_ZEROS);
    LH_CHECK(open_at(false, NULL, &store) == -EINPROGRESS);
    memcpy(disk_bytes(damaged, 0, 0), disk_bytes(whole, 0, 0), LH_BLOCK_BYTES);
    lh_test_name("version 1: creation fills one superblock, and a blank other one is no damage");
    LH_CHECK(open_at(false, NULL, &store) == 0 && lh_store_note(store)[0] == '\0');
    lh_store_close(store);
    damage_undo();
}

/* Without a header, in a file that ends inside the block of a superblock or of the other header. */
static void test_truncated(void)
{
    lh_test_name("a truncated file without a header holds commits if a superblock in it says so");
    const uint64_t ends[] = {
        LH_STORE_SUPERBLOCK_OFFSET(0, 0), LH_STORE_SUPERBLOCK_OFFSET(1, 0),
        LH_STORE_SUPERBLOCK_OFFSET(0, 1), LH_STORE_SUPERBLOCK_OFFSET(1, 1),
        LH_STORE_HEADER_OFFSET(1),
    };
    for (uint32_t index = 0; index < LH_COUNT_OF(ends); index++) {
        struct lh_store *store = NULL;
        block_damage(0, LH_STORE_HEADER_OFFSET(0), DAMAGE_ZEROS);
        damaged->files[0].size = ends[index] + 100;
        int rc = open_at(false, NULL, &store);
        LH_CHECK(rc == (index > 0 ? -EILSEQ : -EINPROGRESS));
        LH_CHECK((strstr(err.message, "holds commits") != NULL) == (index > 0));
        damage_undo();
    }

    lh_test_name("without a header, a superblock that cannot be read is an error of the drive");
    struct lh_store *store = NULL;
    for (uint32_t copy = 0; copy < 2; copy++)
        block_damage(0, LH_STORE_HEADER_OFFSET(copy), DAMAGE_ZEROS);
    block_damage(0, LH_STORE_SUPERBLOCK_OFFSET(0, 0), DAMAGE_UNREADABLE);
    LH_CHECK(open_at(false, NULL, &store) == -EIO && strstr(err.message, "cannot read") != NULL);
    damage_undo();
}

int main(void)
{
    damaged = disk_new();
    whole = disk_new();
    store_make(whole, 0);
    damage_undo();
    test_single_blocks(0);
    disk_delete(whole);
    whole = disk_new();
    store_make(whole, NEWEST_STEP);
    damage_undo();
    test_single_blocks(NEWEST_STEP);
    test_notes();
    test_both_copies();
    test_open_at();
    test_sequence_limit();
    test_flaky_copy();
    test_restored();
    test_restored_interrupted();
    test_lost_after_interrupted();
    test_truncated();
    test_version_1();
    disk_delete(whole);
    disk_delete(damaged);
    LH_CHECK(fixture_alloc.live_count == 0);
    return 0;
}
