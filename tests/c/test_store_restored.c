/*
 * Test a directory that was restored from an older copy while its witness, the only proof of that,
 * cannot be used: a note says that the directory may be older, and its bytes are never returned.
 */
#include "lh_test.h"
#include "store/format.h"
#include "store_disk.h"
#include "store_fixture.h"

#define FILE_COUNT 2
#define NEWEST_STEP 3
/* Creation's superblocks have sequence numbers 1 and 2, so the one of step 3 has 5. */
#define NEWEST_WITNESS LH_STORE_WITNESS_OFFSET(1)

enum loss { LOSS_ZEROS, LOSS_BIT, LOSS_UNREADABLE, LOSS_COUNT };

static struct lh_error err;
static uint8_t *expected[FIXTURE_EXTENT_COUNT]; /* what the newest step has */

static int open_disk(struct disk *disk, bool read_only, struct lh_store **store_out)
{
    memset(&err, 0, sizeof(err));
    fixture_fs = &disk->fs;
    return fixture_open("restored", FILE_COUNT, false, read_only, store_out, &err);
}

/* Make a store with three steps; older[n] is the disk at step n. */
static void steps_make(struct disk *disk, struct disk **older)
{
    struct lh_store *store = NULL;
    struct fixture_opts opts = {.directory_count = FILE_COUNT, .small = true};
    fixture_fs = &disk->fs;
    LH_CHECK(fixture_create("restored", &opts, &store, &err) == 0);
    for (uint64_t step = 0; step < NEWEST_STEP; step++) {
        disk_copy(disk, older[step]);
        fixture_write_step(store, step + 1);
        fixture_commit(store, step + 1);
    }
    lh_store_close(store);
    disk_settle(disk);
    LH_CHECK(open_disk(disk, true, &store) == 0 && fixture_holds_step(store, NEWEST_STEP));
    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++) {
        uint64_t bytes = lh_store_extent(store, extent).bytes;
        expected[extent] = aligned_alloc(LH_BLOCK_BYTES, bytes);
        LH_CHECK(expected[extent] != NULL);
        LH_CHECK(lh_store_read_sync(store, extent, 0, expected[extent], bytes, &err) == 0);
    }
    lh_store_close(store);
}

static void witness_lose(struct disk *disk, enum loss loss)
{
    uint8_t *block = disk_bytes(disk, 1, NEWEST_WITNESS);
    if (loss == LOSS_ZEROS)
        memset(block, 0, LH_BLOCK_BYTES);
    if (loss == LOSS_BIT)
        block[32] ^= 4;
    if (loss == LOSS_UNREADABLE) {
        disk->bad_file = 1;
        disk->bad_offset = NEWEST_WITNESS;
    }
}

/* Read every extent: it has the newest step's bytes, or the read fails. Returns how many fail. */
static uint32_t lost_count(struct lh_store *store)
{
    uint32_t count = 0;
    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++) {
        uint64_t bytes = lh_store_extent(store, extent).bytes;
        uint8_t *found = aligned_alloc(LH_BLOCK_BYTES, bytes);
        LH_CHECK(found != NULL);
        int rc = lh_store_read_sync(store, extent, 0, found, bytes, &err);
        LH_CHECK(rc == 0 || (rc == -EILSEQ && strstr(err.message, "restored1/lohan.data")));
        LH_CHECK(rc < 0 || memcmp(found, expected[extent], bytes) == 0);
        count += rc < 0;
        free(found);
    }
    return count;
}

static void expect_doubt(struct disk *disk)
{
    for (int is_writing = 0; is_writing < 2; is_writing++) {
        struct lh_store *store = NULL;
        LH_CHECK(open_disk(disk, is_writing == 0, &store) == 0);
        LH_CHECK(lh_store_step(store) == NEWEST_STEP);
        const char *note = lh_store_note(store);
        LH_CHECK(strstr(note, "restored1/lohan.data: the witness of the last commit") != NULL);
        LH_CHECK(strstr(note, "unknown whether this directory is as recent") != NULL);
        LH_CHECK(lost_count(store) > 0);
        lh_store_close(store);
    }
}

/*
 * File 0 is an older copy, and only a later witness at the place that the newest commit of that
 * copy did not use shows this. (Interrupted commits leave gaps in the numbers.)
 */
static void expect_later_witness_doubted(const struct disk *disk, struct disk *damaged)
{
    const uint64_t offset = LH_STORE_WITNESS_OFFSET(0);
    struct lh_store_witness witness = {.sequence = 8, .step = NEWEST_STEP + 1};
    struct lh_store_header header;
    struct lh_store *store = NULL;
    disk_copy(disk, damaged);
    LH_CHECK(lh_store_header_decode(disk_bytes(damaged, 0, 0), &header, &err) == 0);
    lh_store_witness_encode(&witness, &header, disk_bytes(damaged, 1, offset));
    damaged->bad_file = 1;
    damaged->bad_offset = offset;
    for (int is_writing = 0; is_writing < 2; is_writing++) {
        LH_CHECK(open_disk(damaged, is_writing == 0, &store) == 0);
        const char *note = lh_store_note(store);
        LH_CHECK(strstr(note, "restored1/lohan.data: the witness of an earlier or later commit"));
        LH_CHECK(strstr(note, "unknown whether this directory is as recent") != NULL);
        lh_store_close(store);
    }
    damaged->bad_file = -1;
    LH_CHECK(open_disk(damaged, false, &store) == -ESTALE);
}

int main(void)
{
    struct disk *disk = disk_new();
    struct disk *damaged = disk_new();
    struct disk *older[NEWEST_STEP] = {disk_new(), disk_new(), disk_new()};
    struct lh_store *store = NULL;
    steps_make(disk, older);

    for (uint32_t step = 0; step < NEWEST_STEP; step++) {
        lh_test_name("a directory restored to step %d whose witness is lost: a note doubts it, and "
                     "its bytes fail their checksums",
                     (int)step);
        for (enum loss loss = 0; loss < LOSS_COUNT; loss++) {
            disk_copy(disk, damaged);
            memcpy(disk_bytes(damaged, 1, 0), older[step]->files[1].bytes,
                   older[step]->files[1].size);
            witness_lose(damaged, loss);
            expect_doubt(damaged);
            damaged->bad_file = -1;
            if (loss == LOSS_UNREADABLE)
                LH_CHECK(open_disk(damaged, false, &store) == -ESTALE);
        }
    }

    lh_test_name("a later witness that cannot be read: a note doubts that file 0 is the newest");
    expect_later_witness_doubted(disk, damaged);

    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++)
        free(expected[extent]);
    for (uint32_t step = 0; step < NEWEST_STEP; step++)
        disk_delete(older[step]);
    disk_delete(damaged);
    disk_delete(disk);
    LH_CHECK(fixture_alloc.live_count == 0);
    return 0;
}
