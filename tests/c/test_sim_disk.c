/* Test the simulator's drives: what each kind of fault leaves behind, with many seeds. */
#include <errno.h>

#include "lh_test.h"
#include "lives/fs.h"
#include "store/format.h"

#define SEED_COUNT 200
#define PATH "/sim/0/" LH_STORE_FILE_NAME
#define BLOCK_COUNT 4
#define FILE_BYTES (BLOCK_COUNT * LH_BLOCK_BYTES)

static struct lh_alloc alloc;
static struct lh_sim_world world;
static struct lh_sim_fault_log faults;
static struct lh_sim_disk disk;
static struct lh_sim_fs fs;
static struct lh_sim_random lots;
static int fd;

/* Make a file of zeros that is durable, like its name. */
static void setup(uint64_t seed)
{
    const struct lh_store_fs_ops *ops = NULL;
    alloc = (struct lh_alloc)LH_ALLOC_INIT;
    LH_CHECK(lh_sim_world_init(&world, &alloc, 16, NULL) == 0);
    faults = (struct lh_sim_fault_log){.world = &world};
    lh_sim_disk_init(&disk, &faults, 1);
    lh_sim_fs_init(&fs, &disk, seed);
    lh_sim_random_init(&lots, seed, LH_SIM_STREAM_CRASH);
    ops = fs.fs.ops;
    LH_CHECK(ops->make_directory(&fs.fs, "/sim/0") == 0);
    LH_CHECK(ops->open(&fs.fs, PATH, LH_STORE_FS_CREATE, &fd) == 0);
    LH_CHECK(ops->reserve(&fs.fs, fd, FILE_BYTES) == 0);
    LH_CHECK(ops->sync(&fs.fs, fd) == 0);
    LH_CHECK(ops->sync_directory(&fs.fs, "/sim/0") == 0);
    LH_CHECK(ops->sync_directory(&fs.fs, "/sim") == 0);
}

static void teardown(void)
{
    lh_sim_disk_deinit(&disk);
    lh_sim_world_deinit(&world);
    LH_CHECK(alloc.live_count == 0);
}

static int block_put(uint64_t block, uint8_t value)
{
    uint8_t bytes[LH_BLOCK_BYTES];
    memset(bytes, value, sizeof(bytes));
    int64_t rc = fs.fs.ops->write(&fs.fs, fd, bytes, sizeof(bytes), block * LH_BLOCK_BYTES);
    return rc < 0 ? (int)rc : 0;
}

/* Return the first and last byte of a block, or -1 if they differ. */
static int block_get(uint64_t block)
{
    uint8_t bytes[LH_BLOCK_BYTES];
    lh_sim_disk_read(&disk, 0, block * LH_BLOCK_BYTES, bytes, sizeof(bytes));
    return memcmp(bytes, bytes + 1, sizeof(bytes) - 1) == 0 ? bytes[0] : -1;
}

static void fault_set(enum lh_sim_fault fault)
{
    fs.faults = (struct lh_sim_faults){0};
    fs.faults.ppm[fault] = LH_SIM_PPM_ONE;
}

static void test_power(void)
{
    uint32_t kept = 0;
    lh_test_name("a power loss keeps what was synced, and of the rest some blocks in some seeds");
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++) {
        setup(seed);
        LH_CHECK(block_put(0, 1) == 0 && fs.fs.ops->sync(&fs.fs, fd) == 0);
        LH_CHECK(block_put(1, 2) == 0);
        lh_sim_disk_crash(&disk, false, &lots);
        LH_CHECK(block_get(0) == 1 && (block_get(1) == 0 || block_get(1) == 2));
        kept += block_get(1) == 2;
        teardown();
    }
    LH_CHECK(kept > SEED_COUNT / 10 && kept < SEED_COUNT - SEED_COUNT / 10);
}

static void test_kill(void)
{
    uint32_t lost = 0;
    lh_test_name("the end of a process keeps what was written; a later power loss may take it");
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++) {
        setup(seed);
        LH_CHECK(block_put(0, 1) == 0);
        lh_sim_fs_kill(&fs);
        LH_CHECK(block_put(1, 2) == -EIO && fs.fs.ops->sync(&fs.fs, fd) == -EIO);
        lh_sim_fs_restart(&fs, NULL);
        LH_CHECK(block_get(0) == 1 && block_get(1) == 0);
        lh_sim_disk_crash(&disk, false, &lots);
        lost += block_get(0) == 0;
        teardown();
    }
    LH_CHECK(lost > SEED_COUNT / 10 && lost < SEED_COUNT);
}

static void test_drop(void)
{
    uint32_t lost = 0;
    uint32_t seen = 0;
    lh_test_name(
        "what a failed sync dropped is not covered by the next one, until it is rewritten");
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++) {
        setup(seed);
        LH_CHECK(block_put(0, 1) == 0 && block_put(1, 1) == 0);
        fault_set(LH_SIM_FAULT_DROP);
        LH_CHECK(fs.fs.ops->sync(&fs.fs, fd) == -EIO);
        lh_sim_fs_restart(&fs, NULL);
        LH_CHECK(fs.fs.ops->open(&fs.fs, PATH, LH_STORE_FS_WRITE, &fd) == 0);
        seen += block_get(0) == 1;
        LH_CHECK(block_put(1, 3) == 0 && fs.fs.ops->sync(&fs.fs, fd) == 0);
        lh_sim_disk_crash(&disk, false, &lots);
        lost += block_get(0) == 0;
        LH_CHECK(block_get(1) == 3);
        teardown();
    }
    LH_CHECK(seen > 0 && seen < SEED_COUNT && lost > SEED_COUNT / 2 && lost < SEED_COUNT);
}

static void test_lies(void)
{
    lh_test_name("a sync that lies covers nothing; a lost write is not there; a stale read is old");
    uint32_t lost = 0;
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++) {
        uint8_t bytes[LH_BLOCK_BYTES];
        setup(seed);
        fault_set(LH_SIM_FAULT_LOST);
        LH_CHECK(block_put(2, 7) == 0 && block_get(2) == 0);
        fault_set(LH_SIM_FAULT_LIE);
        LH_CHECK(block_put(0, 1) == 0 && fs.fs.ops->sync(&fs.fs, fd) == 0);
        fault_set(LH_SIM_FAULT_STALE);
        LH_CHECK(fs.fs.ops->read(&fs.fs, fd, bytes, sizeof(bytes), 0) == sizeof(bytes));
        LH_CHECK(bytes[0] == 0 && block_get(0) == 1);
        lh_sim_disk_crash(&disk, false, &lots);
        lost += block_get(0) == 0;
        LH_CHECK(faults.counts[LH_SIM_FAULT_LIE] == 1 && faults.counts[LH_SIM_FAULT_LOST] == 1 &&
                 faults.counts[LH_SIM_FAULT_STALE] == 1);
        teardown();
    }
    LH_CHECK(lost > 0);
}

static void test_torn(void)
{
    uint32_t torn = 0;
    lh_test_name("power loss tears blocks where it may, and counts them; else never");
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++) {
        bool tears = seed % 2 == 0;
        setup(seed);
        LH_CHECK(block_put(0, 1) == 0);
        lh_sim_disk_crash(&disk, tears, &lots);
        LH_CHECK(tears || block_get(0) >= 0);
        LH_CHECK(block_get(0) >= 0 || faults.counts[LH_SIM_FAULT_TORN] > 0);
        torn += block_get(0) < 0;
        teardown();
    }
    LH_CHECK(torn > 0);
}

static void test_names(void)
{
    uint32_t lost = 0;
    lh_test_name("a name whose directory was not synced may be gone after a power loss");
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++) {
        setup(seed);
        LH_CHECK(fs.fs.ops->remove(&fs.fs, PATH) == 0);
        LH_CHECK(fs.fs.ops->sync_directory(&fs.fs, "/sim/0") == 0);
        LH_CHECK(fs.fs.ops->open(&fs.fs, PATH, LH_STORE_FS_CREATE, &fd) == 0);
        LH_CHECK(fs.fs.ops->reserve(&fs.fs, fd, FILE_BYTES) == 0);
        LH_CHECK(fs.fs.ops->sync(&fs.fs, fd) == 0);
        lh_sim_disk_crash(&disk, false, &lots);
        lost += !disk.files[0].name.is_there;
        teardown();
    }
    LH_CHECK(lost > SEED_COUNT / 10 && lost < SEED_COUNT - SEED_COUNT / 10);
}

static void test_dead(void)
{
    lh_test_name("a dead drive answers an error until it is revived, in the next life too");
    setup(1);
    LH_CHECK(block_put(0, 1) == 0 && fs.fs.ops->sync(&fs.fs, fd) == 0);
    fault_set(LH_SIM_FAULT_DEAD);
    LH_CHECK(block_put(0, 2) == -EIO);
    lh_sim_fs_restart(&fs, NULL);
    LH_CHECK(fs.fs.ops->open(&fs.fs, PATH, LH_STORE_FS_WRITE, &fd) == -EIO);
    disk.files[0].is_dead = false;
    LH_CHECK(fs.fs.ops->open(&fs.fs, PATH, LH_STORE_FS_WRITE, &fd) == 0 && block_get(0) == 1);
    teardown();
}

static void test_damage(void)
{
    lh_test_name("damage at rest changes the drive, and an older copy comes back whole");
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++) {
        struct lh_sim_disk_copy copy = {0};
        setup(seed);
        LH_CHECK(block_put(0, 1) == 0 && block_put(1, 2) == 0);
        LH_CHECK(fs.fs.ops->sync(&fs.fs, fd) == 0);
        lh_sim_disk_crash(&disk, false, &lots);
        lh_sim_disk_copy_make(&disk, 0, &copy);
        LH_CHECK(lh_sim_disk_damage(&disk, LH_SIM_FAULT_BIT, 0, &copy, &lots));
        LH_CHECK(lh_sim_disk_damage(&disk, LH_SIM_FAULT_OLD, 0, &copy, &lots));
        LH_CHECK(block_get(0) == 1 && block_get(1) == 2 && block_get(2) == 0);
        LH_CHECK(!lh_sim_disk_damage(&disk, LH_SIM_FAULT_OLD, 0, &copy, &lots));
        LH_CHECK(lh_sim_disk_damage(&disk, LH_SIM_FAULT_TRUNCATE, 0, &copy, &lots));
        LH_CHECK(disk.files[0].bytes < FILE_BYTES);
        lh_sim_disk_copy_free(&disk, &copy);
        teardown();
    }
}

int main(void)
{
    test_power();
    test_kill();
    test_drop();
    test_lies();
    test_torn();
    test_names();
    test_dead();
    test_damage();
    return 0;
}
