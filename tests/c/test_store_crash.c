/*
 * Power loss at every point of a commit.
 *
 * The commit's requests are not run but logged, after the blocks that the step wrote. A crash
 * leaves what a sync of its file has covered, and any part of the rest: any subset of the blocks,
 * and control blocks torn at 512-byte sectors. Each such image has to open at the old step or the
 * new one, with every byte of it.
 */
#include <fcntl.h>
#include <sys/stat.h>

#include "lh_test.h"
#include "store_fixture.h"

#define FILE_COUNT 2
#define EVENT_MAX 128
#define SECTOR_BYTES 512

struct event {
    bool is_sync;
    bool is_control; /* manifest or superblock: torn as well */
    uint32_t file;
    uint64_t offset;
    uint8_t bytes[LH_BLOCK_BYTES];
};

struct image {
    uint8_t *bytes[FILE_COUNT];
    uint64_t size[FILE_COUNT];
};

static struct event events[EVENT_MAX];
static uint32_t event_count;
static uint32_t superblock_event; /* the write of the superblock; its sync is the last event */
static struct image base;
static struct lh_error err;

static const char *image_path(const char *name, uint32_t file)
{
    char relative[64];
    snprintf(relative, sizeof(relative), "%s%u/lohan.data", name, file);
    return fixture_path(relative);
}

static uint8_t *file_load(const char *path, uint64_t *size_out)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    LH_CHECK(fd >= 0 && fstat(fd, &info) == 0);
    uint8_t *bytes = calloc(1, (size_t)info.st_size);
    LH_CHECK(bytes != NULL && pread(fd, bytes, (size_t)info.st_size, 0) == info.st_size);
    close(fd);
    *size_out = (uint64_t)info.st_size;
    return bytes;
}

static void image_load(const char *name, struct image *image)
{
    for (uint32_t file = 0; file < FILE_COUNT; file++)
        image->bytes[file] = file_load(image_path(name, file), &image->size[file]);
}

static void image_drop(struct image *image)
{
    for (uint32_t file = 0; file < FILE_COUNT; file++)
        free(image->bytes[file]);
}

/* Files of their own, as base has them, whose descriptors are left open for image_apply(). */
static void image_store(const char *name, int *fds)
{
    for (uint32_t file = 0; file < FILE_COUNT; file++) {
        char folder[64];
        snprintf(folder, sizeof(folder), "%s%u", name, file);
        if (access(fixture_path(folder), F_OK) != 0)
            LH_CHECK(mkdir(fixture_path(folder), 0700) == 0);
        fds[file] = open(image_path(name, file), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        LH_CHECK(fds[file] >= 0);
        ssize_t rc = pwrite(fds[file], base.bytes[file], base.size[file], 0);
        LH_CHECK(rc == (ssize_t)base.size[file]);
    }
}

static struct event *event_add(uint32_t file, bool is_sync)
{
    LH_CHECK(event_count < EVENT_MAX);
    struct event *event = &events[event_count++];
    *event = (struct event){.file = file, .is_sync = is_sync};
    return event;
}

/* What the step has written since base, block by block; the owner's block is not of interest. */
static void log_data(const char *name)
{
    struct image now;
    image_load(name, &now);
    for (uint32_t file = 0; file < FILE_COUNT; file++) {
        for (uint64_t offset = LH_MIB; offset < now.size[file]; offset += LH_BLOCK_BYTES) {
            if (memcmp(now.bytes[file] + offset, base.bytes[file] + offset, LH_BLOCK_BYTES) == 0)
                continue;
            struct event *event = event_add(file, false);
            event->offset = offset;
            memcpy(event->bytes, now.bytes[file] + offset, LH_BLOCK_BYTES);
        }
    }
    image_drop(&now);
}

static void log_commit(struct lh_store *store, uint64_t step)
{
    struct lh_io_request requests[LH_IO_FILE_COUNT_MAX];
    LH_CHECK(lh_store_commit_begin(store, step, "s", 2, &err) == 0);
    uint64_t written_bytes = 0;
    for (;;) {
        int count = lh_store_commit_next(store, requests, LH_IO_FILE_COUNT_MAX, &err);
        LH_CHECK(count >= 0 && lh_store_is_committing(store) == (count > 0));
        if (count == 0)
            break;
        for (int index = 0; index < count; index++) {
            struct lh_io_request *request = &requests[index];
            bool is_sync = request->kind == LH_IO_KIND_SYNC;
            struct event *event = event_add(request->file_index, is_sync);
            request->result = 0;
            if (is_sync)
                continue;
            LH_CHECK(request->bytes == LH_BLOCK_BYTES);
            LH_CHECK(lh_is_aligned((uintptr_t)request->buffer, LH_BLOCK_BYTES));
            event->is_control = true;
            event->offset = request->offset;
            memcpy(event->bytes, request->buffer, LH_BLOCK_BYTES);
            written_bytes += request->bytes;
            superblock_event = event_count - 1;
        }
    }
    LH_CHECK(written_bytes == lh_store_commit_bytes(store));
}

static bool is_durable(uint32_t write, uint32_t crash)
{
    for (uint32_t later = write + 1; later < crash; later++) {
        if (events[later].is_sync && events[later].file == events[write].file)
            return true;
    }
    return false;
}

/* Write the first sectors of a block (all: 8), or all but those where from_end. */
static void block_put(const int *fds, const struct event *event, uint32_t sectors, bool from_end)
{
    uint64_t bytes = sectors * (uint64_t)SECTOR_BYTES;
    uint64_t skipped = from_end ? LH_BLOCK_BYTES - bytes : 0;
    ssize_t rc =
        pwrite(fds[event->file], event->bytes + skipped, bytes, (off_t)(event->offset + skipped));
    LH_CHECK(rc == (ssize_t)bytes);
}

/* base, then what survived of the events before crash. */
static void image_apply(const int *fds, uint32_t crash, uint64_t *seed, int variant)
{
    for (uint32_t index = 0; index < event_count; index++) {
        const struct event *event = &events[index];
        if (event->is_sync)
            continue;
        ssize_t rc = pwrite(fds[event->file], base.bytes[event->file] + event->offset,
                            LH_BLOCK_BYTES, (off_t)event->offset);
        LH_CHECK(rc == (ssize_t)LH_BLOCK_BYTES);
    }
    for (uint32_t index = 0; index < crash; index++) {
        const struct event *event = &events[index];
        if (event->is_sync)
            continue;
        uint64_t dice = lh_test_random(seed);
        if (is_durable(index, crash) || variant == 0)
            block_put(fds, event, 8, false);
        else if (variant == 1)
            continue;
        else if (event->is_control && variant % 2)
            block_put(fds, event, 1 + (uint32_t)(dice % 7), dice & 8);
        else if (dice & 1)
            block_put(fds, event, 8, false);
    }
}

/* The session that crashed goes on: one more step, committed, on top of what was found. */
static void go_on(const char *name, struct lh_store *store)
{
    uint64_t step = lh_store_step(store) + 1;
    fixture_write_step(store, step);
    fixture_commit(store, step);
    lh_store_close(store);
    LH_CHECK(fixture_open(name, FILE_COUNT, false, false, &store, &err) == 0);
    LH_CHECK(lh_store_step(store) == step && fixture_holds_step(store, step));
    lh_store_close(store);
}

static uint32_t crash_everywhere(uint64_t old_step)
{
    int fds[FILE_COUNT];
    uint32_t image_count = 0;
    uint64_t seed = old_step;
    image_store("image", fds);
    for (uint32_t crash = 0; crash <= event_count; crash++) {
        for (int variant = 0; variant < (crash < superblock_event - 8 ? 3 : 24); variant++) {
            struct lh_store *store = NULL;
            image_apply(fds, crash, &seed, variant);
            int rc = fixture_open("image", FILE_COUNT, false, false, &store, &err);
            if (rc < 0)
                fprintf(stderr, "crash at %u, variant %d: %s\n", crash, variant, err.message);
            LH_CHECK(rc == 0);
            uint64_t step = lh_store_step(store);
            LH_CHECK(step == old_step || step == old_step + 1);
            LH_CHECK(crash > superblock_event || step == old_step);
            LH_CHECK(crash < event_count || step == old_step + 1);
            LH_CHECK(fixture_holds_step(store, step));
            /* The newest valid superblock never needs its fallback: its manifest is whole. */
            LH_CHECK(strstr(lh_store_note(store), "the manifest of step") == NULL);
            image_count++;
            if (variant != 3) {
                lh_store_close(store);
                continue;
            }
            go_on("image", store);
            for (uint32_t file = 0; file < FILE_COUNT; file++)
                close(fds[file]);
            image_store("image", fds);
        }
    }
    for (uint32_t file = 0; file < FILE_COUNT; file++)
        close(fds[file]);
    return image_count;
}

int main(void)
{
    struct lh_store *store = NULL;
    LH_CHECK(fixture_create("crash",
                            &(struct fixture_opts){.directory_count = FILE_COUNT, .small = true},
                            &store, &err) == 0);
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    for (uint64_t step = 1; step < 4; step++) {
        lh_test_name("power loss in the commit of step %d leaves step %d or step %d, whole",
                     (int)step + 1, (int)step, (int)step + 1);
        event_count = 0;
        image_load("crash", &base);
        fixture_write_step(store, step + 1);
        log_data("crash");
        log_commit(store, step + 1);
        printf("  %u images of %u events\n", crash_everywhere(step), event_count);
        image_drop(&base);
        /* The requests were only logged: the real files get them by committing once more. */
        lh_store_close(store);
        LH_CHECK(fixture_open("crash", FILE_COUNT, false, false, &store, &err) == 0);
        LH_CHECK(lh_store_step(store) == step);
        fixture_write_step(store, step + 1);
        fixture_commit(store, step + 1);
    }
    lh_store_close(store);
    LH_CHECK(fixture_alloc.live_count == 0);
    return 0;
}
