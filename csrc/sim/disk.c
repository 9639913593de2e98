#include "sim/disk.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"

enum image { IMAGE_WRITTEN, IMAGE_DURABLE };

int lh_sim_disk_init(struct lh_sim_disk *disk, struct lh_sim_world *world, const uint64_t *bytes,
                     uint32_t file_count, struct lh_error *err)
{
    LH_ASSERT(file_count <= LH_SIM_DISK_FILE_COUNT_MAX);
    *disk = (struct lh_sim_disk){.world = world, .file_count = file_count};
    for (uint32_t i = 0; i < file_count; i++) {
        struct lh_sim_disk_file *file = &disk->files[i];
        file->bytes = bytes[i];
        file->page_count = lh_div_ceil(bytes[i], LH_SIM_DISK_PAGE_BYTES);
        file->pages = lh_alloc_zeroed(world->alloc, file->page_count, sizeof(*file->pages));
        if (!file->pages) {
            lh_sim_disk_deinit(disk);
            return lh_error_set(err, -ENOMEM, "no memory for the pages of %" PRIu64 " bytes",
                                bytes[i]);
        }
    }
    return 0;
}

static void writes_forget(struct lh_sim_disk *disk)
{
    while (disk->head) {
        struct lh_sim_disk_write *write = disk->head;
        disk->head = write->next;
        lh_free(disk->world->alloc, write->copy);
        lh_free(disk->world->alloc, write);
    }
    disk->tail = NULL;
}

void lh_sim_disk_deinit(struct lh_sim_disk *disk)
{
    for (uint32_t i = 0; i < disk->file_count; i++) {
        struct lh_sim_disk_file *file = &disk->files[i];
        for (uint64_t page = 0; file->pages && page < file->page_count; page++) {
            lh_free(disk->world->alloc, file->pages[page].written);
            lh_free(disk->world->alloc, file->pages[page].durable);
        }
        lh_free(disk->world->alloc, file->pages);
    }
    if (disk->world)
        writes_forget(disk);
    *disk = (struct lh_sim_disk){0};
}

static uint8_t **page_at(const struct lh_sim_disk_file *file, enum image image, uint64_t offset)
{
    struct lh_sim_disk_page *page = &file->pages[offset / LH_SIM_DISK_PAGE_BYTES];
    return image == IMAGE_WRITTEN ? &page->written : &page->durable;
}

static void image_write(struct lh_sim_disk *disk, enum image image, uint32_t index, uint64_t offset,
                        const uint8_t *bytes, uint64_t count)
{
    struct lh_sim_disk_file *file = &disk->files[index];
    LH_ASSERT(index < disk->file_count && offset <= file->bytes && count <= file->bytes - offset);
    for (uint64_t done = 0; done < count;) {
        uint64_t inside = (offset + done) % LH_SIM_DISK_PAGE_BYTES;
        uint64_t part = lh_min_u64(count - done, LH_SIM_DISK_PAGE_BYTES - inside);
        uint8_t **page = page_at(file, image, offset + done);
        if (!*page)
            *page = lh_alloc_zeroed(disk->world->alloc, 1, LH_SIM_DISK_PAGE_BYTES);
        LH_ASSERT(*page != NULL); /* only small models are simulated with their bytes */
        memcpy(*page + inside, bytes + done, part);
        done += part;
    }
}

void lh_sim_disk_read(const struct lh_sim_disk *disk, uint32_t index, uint64_t offset, void *buffer,
                      uint64_t bytes)
{
    const struct lh_sim_disk_file *file = &disk->files[index];
    LH_ASSERT(index < disk->file_count && offset <= file->bytes && bytes <= file->bytes - offset);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t inside = (offset + done) % LH_SIM_DISK_PAGE_BYTES;
        uint64_t part = lh_min_u64(bytes - done, LH_SIM_DISK_PAGE_BYTES - inside);
        const uint8_t *page = *page_at(file, IMAGE_WRITTEN, offset + done);
        if (page)
            memcpy((uint8_t *)buffer + done, page + inside, part);
        else
            memset((uint8_t *)buffer + done, 0, part);
        done += part;
    }
}

void lh_sim_disk_write(struct lh_sim_disk *disk, uint32_t file, uint64_t offset, const void *buffer,
                       uint64_t bytes)
{
    struct lh_alloc *alloc = disk->world->alloc;
    image_write(disk, IMAGE_WRITTEN, file, offset, buffer, bytes);
    struct lh_sim_disk_write *write = lh_alloc_zeroed(alloc, 1, sizeof(*write));
    uint8_t *copy = lh_alloc_zeroed(alloc, 1, bytes);
    LH_ASSERT(write != NULL && copy != NULL);
    memcpy(copy, buffer, bytes);
    *write = (struct lh_sim_disk_write){.file = file,
                                        .offset = offset,
                                        .bytes = bytes,
                                        .sequence = disk->next_sequence++,
                                        .copy = copy};
    if (disk->tail)
        disk->tail->next = write;
    else
        disk->head = write;
    disk->tail = write;
}

uint64_t lh_sim_disk_mark(const struct lh_sim_disk *disk)
{
    return disk->next_sequence;
}

void lh_sim_disk_sync(struct lh_sim_disk *disk, uint32_t file, uint64_t mark)
{
    struct lh_sim_disk_write **at = &disk->head;
    disk->tail = NULL;
    while (*at) {
        struct lh_sim_disk_write *write = *at;
        if (write->file != file || write->sequence >= mark) {
            disk->tail = write;
            at = &write->next;
            continue;
        }
        image_write(disk, IMAGE_DURABLE, file, write->offset, write->copy, write->bytes);
        *at = write->next;
        lh_free(disk->world->alloc, write->copy);
        lh_free(disk->world->alloc, write);
    }
}

void lh_sim_disk_crash(struct lh_sim_disk *disk, struct lh_sim_random *random)
{
    uint64_t write_count = 0;
    uint64_t kept_count = 0;
    uint64_t lost_count = 0;
    for (const struct lh_sim_disk_write *write = disk->head; write; write = write->next) {
        write_count++;
        for (uint64_t at = 0; at < write->bytes; at += LH_BLOCK_BYTES) {
            uint64_t part = lh_min_u64(LH_BLOCK_BYTES, write->bytes - at);
            if (lh_sim_random_below(random, 2) == 0) {
                lost_count++;
                continue;
            }
            kept_count++;
            image_write(disk, IMAGE_DURABLE, write->file, write->offset + at, write->copy + at,
                        part);
        }
    }
    writes_forget(disk);
    for (uint32_t i = 0; i < disk->file_count; i++) {
        for (uint64_t page = 0; page < disk->files[i].page_count; page++) {
            struct lh_sim_disk_page *both = &disk->files[i].pages[page];
            if (both->durable && both->written) {
                memcpy(both->written, both->durable, LH_SIM_DISK_PAGE_BYTES);
            } else {
                LH_ASSERT(!both->durable); /* what is durable was written once */
                lh_free(disk->world->alloc, both->written);
                both->written = NULL;
            }
        }
    }
    lh_sim_world_trace(disk->world, LH_SIM_TRACE_CRASH, write_count, kept_count, lost_count);
}

static bool is_zero(const uint8_t *bytes, uint64_t count)
{
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, count - 1) == 0;
}

int lh_sim_disk_load(struct lh_sim_disk *disk, uint32_t index, const char *path,
                     struct lh_error *err)
{
    struct lh_sim_disk_file *file = &disk->files[index];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return lh_error_set(err, -errno, "cannot open %s: %s", path, strerror(errno));
    uint8_t buffer[LH_SIM_DISK_PAGE_BYTES];
    int rc = 0;
    for (uint64_t at = 0; rc == 0 && at < file->bytes; at += sizeof(buffer)) {
        uint64_t part = lh_min_u64(sizeof(buffer), file->bytes - at);
        ssize_t got = pread(fd, buffer, part, (off_t)at);
        if (got != (ssize_t)part)
            rc = lh_error_set(err, got < 0 ? -errno : -ENODATA,
                              "cannot read %" PRIu64 " bytes at %" PRIu64 " of %s", part, at, path);
        else if (!is_zero(buffer, part)) {
            image_write(disk, IMAGE_WRITTEN, index, at, buffer, part);
            image_write(disk, IMAGE_DURABLE, index, at, buffer, part);
        }
    }
    close(fd);
    return rc;
}

int lh_sim_disk_store(const struct lh_sim_disk *disk, uint32_t index, const char *path,
                      struct lh_error *err)
{
    const struct lh_sim_disk_file *file = &disk->files[index];
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return lh_error_set(err, -errno, "cannot open %s: %s", path, strerror(errno));
    int rc = 0;
    for (uint64_t page = 0; rc == 0 && page < file->page_count; page++) {
        uint64_t at = page * LH_SIM_DISK_PAGE_BYTES;
        uint64_t part = lh_min_u64(LH_SIM_DISK_PAGE_BYTES, file->bytes - at);
        /* A page that never was durable is zeros in the real file as well. */
        if (file->pages[page].durable &&
            pwrite(fd, file->pages[page].durable, part, (off_t)at) != (ssize_t)part)
            rc = lh_error_set(err, -EIO, "cannot write %" PRIu64 " bytes at %" PRIu64 " of %s",
                              part, at, path);
    }
    close(fd);
    return rc;
}
