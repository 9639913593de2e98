#include "lives/disk.h"

#include <string.h>

#include "base/assert.h"

enum image { IMAGE_WRITTEN, IMAGE_DURABLE };

/* Which of the writes that no sync covers survive a crash. */
enum keep {
    KEEP_BLOCKS, /* drawn for each block */
    KEEP_WRITES, /* drawn for each write as a whole */
    KEEP_NONE,
    KEEP_NEWEST, /* the newest writes only: a drive may write in any order */
    KEEP_COUNT,
};

void lh_sim_disk_init(struct lh_sim_disk *disk, struct lh_sim_fault_log *faults,
                      uint32_t file_count)
{
    LH_ASSERT(file_count <= LH_SIM_DISK_FILE_COUNT_MAX);
    *disk =
        (struct lh_sim_disk){.world = faults->world, .faults = faults, .file_count = file_count};
}

static void write_free(struct lh_sim_disk *disk, struct lh_sim_disk_write *write)
{
    lh_free(disk->world->alloc, write->copy);
    lh_free(disk->world->alloc, write);
}

/* Discard the writes of one file, or of all files (UINT32_MAX). */
static void writes_forget(struct lh_sim_disk *disk, struct lh_sim_disk_write **list, uint32_t file)
{
    while (*list) {
        struct lh_sim_disk_write *write = *list;
        if (file != UINT32_MAX && write->file != file) {
            list = &write->next;
            continue;
        }
        *list = write->next;
        write_free(disk, write);
    }
}

static void tail_find(struct lh_sim_disk *disk)
{
    disk->tail = disk->head;
    while (disk->tail && disk->tail->next)
        disk->tail = disk->tail->next;
}

static void page_clear(struct lh_sim_disk *disk, struct lh_sim_disk_page *page)
{
    if (page->durable != page->written)
        lh_free(disk->world->alloc, page->durable);
    lh_free(disk->world->alloc, page->written);
    *page = (struct lh_sim_disk_page){0};
}

static void contents_forget(struct lh_sim_disk *disk, uint32_t index)
{
    struct lh_sim_disk_file *file = &disk->files[index];
    for (uint64_t i = 0; i < file->page_count; i++)
        page_clear(disk, &file->pages[i]);
    lh_free(disk->world->alloc, file->pages);
    file->pages = NULL;
    file->page_count = 0;
    file->bytes = 0;
    file->durable_bytes = 0;
    writes_forget(disk, &disk->head, index);
    writes_forget(disk, &disk->limbo, index);
    tail_find(disk);
}

void lh_sim_disk_deinit(struct lh_sim_disk *disk)
{
    for (uint32_t i = 0; i < disk->file_count; i++)
        contents_forget(disk, i);
    *disk = (struct lh_sim_disk){0};
}

void lh_sim_disk_name_set(struct lh_sim_disk *disk, struct lh_sim_disk_name *name, bool is_there)
{
    LH_ASSERT(name->is_there != is_there);
    for (uint32_t i = 0; is_there && i < disk->file_count; i++) {
        if (name == &disk->files[i].name)
            contents_forget(disk, i);
    }
    /* Conservative: a change that returns to the durable state is not treated as durable. */
    *name = (struct lh_sim_disk_name){.is_there = is_there, .is_durable = false};
}

void lh_sim_disk_name_sync(struct lh_sim_disk_name *name)
{
    name->is_durable = true;
}

void lh_sim_disk_resize(struct lh_sim_disk *disk, uint32_t index, uint64_t bytes)
{
    struct lh_sim_disk_file *file = &disk->files[index];
    uint64_t page_count = lh_div_ceil(bytes, LH_SIM_DISK_PAGE_BYTES);
    struct lh_sim_disk_page *pages =
        lh_alloc_zeroed(disk->world->alloc, lh_max_u64(page_count, 1), sizeof(*pages));
    LH_ASSERT(pages != NULL);
    for (uint64_t i = 0; i < file->page_count; i++) {
        if (i < page_count)
            pages[i] = file->pages[i];
        else
            page_clear(disk, &file->pages[i]);
    }
    lh_free(disk->world->alloc, file->pages);
    file->pages = pages;
    file->page_count = page_count;
    file->bytes = bytes;
    file->durable_bytes = lh_min_u64(file->durable_bytes, bytes);
}

/* Return the page of one image for writing, separate from the other image's. */
static uint8_t *page_own(struct lh_sim_disk *disk, struct lh_sim_disk_page *page, enum image image)
{
    uint8_t **bytes = image == IMAGE_WRITTEN ? &page->written : &page->durable;
    if (*bytes && page->written != page->durable)
        return *bytes;
    uint8_t *own = lh_alloc_zeroed(disk->world->alloc, 1, LH_SIM_DISK_PAGE_BYTES);
    LH_ASSERT(own != NULL);
    if (*bytes)
        memcpy(own, *bytes, LH_SIM_DISK_PAGE_BYTES);
    *bytes = own;
    return own;
}

static void image_write(struct lh_sim_disk *disk, enum image image, uint32_t index, uint64_t offset,
                        const uint8_t *bytes, uint64_t count)
{
    struct lh_sim_disk_file *file = &disk->files[index];
    LH_ASSERT(index < disk->file_count && offset <= file->bytes && count <= file->bytes - offset);
    for (uint64_t done = 0; done < count;) {
        uint64_t inside = (offset + done) % LH_SIM_DISK_PAGE_BYTES;
        uint64_t part = lh_min_u64(count - done, LH_SIM_DISK_PAGE_BYTES - inside);
        struct lh_sim_disk_page *page = &file->pages[(offset + done) / LH_SIM_DISK_PAGE_BYTES];
        memcpy(page_own(disk, page, image) + inside, bytes + done, part);
        done += part;
    }
}

static void image_read(const struct lh_sim_disk *disk, enum image image, uint32_t index,
                       uint64_t offset, uint8_t *buffer, uint64_t bytes)
{
    const struct lh_sim_disk_file *file = &disk->files[index];
    LH_ASSERT(index < disk->file_count && offset <= file->bytes && bytes <= file->bytes - offset);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t inside = (offset + done) % LH_SIM_DISK_PAGE_BYTES;
        uint64_t part = lh_min_u64(bytes - done, LH_SIM_DISK_PAGE_BYTES - inside);
        const struct lh_sim_disk_page *both =
            &file->pages[(offset + done) / LH_SIM_DISK_PAGE_BYTES];
        const uint8_t *page = image == IMAGE_WRITTEN ? both->written : both->durable;
        if (page)
            memcpy(buffer + done, page + inside, part);
        else
            memset(buffer + done, 0, part);
        done += part;
    }
}

void lh_sim_disk_read(const struct lh_sim_disk *disk, uint32_t index, uint64_t offset, void *buffer,
                      uint64_t bytes)
{
    image_read(disk, IMAGE_WRITTEN, index, offset, buffer, bytes);
}

bool lh_sim_disk_read_stale(const struct lh_sim_disk *disk, uint32_t index, uint64_t offset,
                            void *buffer, uint64_t bytes)
{
    uint8_t *now = lh_alloc_zeroed(disk->world->alloc, 1, bytes);
    LH_ASSERT(now != NULL);
    image_read(disk, IMAGE_WRITTEN, index, offset, now, bytes);
    image_read(disk, IMAGE_DURABLE, index, offset, buffer, bytes);
    bool is_other = memcmp(now, buffer, bytes) != 0;
    lh_free(disk->world->alloc, now);
    return is_other;
}

static struct lh_sim_disk_write *write_make(struct lh_sim_disk *disk, uint32_t file,
                                            uint64_t offset, const void *buffer, uint64_t bytes)
{
    struct lh_alloc *alloc = disk->world->alloc;
    struct lh_sim_disk_write *write = lh_alloc_zeroed(alloc, 1, sizeof(*write));
    uint8_t *copy = lh_alloc_zeroed(alloc, 1, bytes);
    LH_ASSERT(write != NULL && copy != NULL);
    memcpy(copy, buffer, bytes);
    *write =
        (struct lh_sim_disk_write){.file = file, .offset = offset, .bytes = bytes, .copy = copy};
    return write;
}

void lh_sim_disk_write(struct lh_sim_disk *disk, uint32_t file, uint64_t offset, const void *buffer,
                       uint64_t bytes)
{
    image_write(disk, IMAGE_WRITTEN, file, offset, buffer, bytes);
    struct lh_sim_disk_write *write = write_make(disk, file, offset, buffer, bytes);
    write->sequence = disk->next_sequence++;
    if (disk->tail)
        disk->tail->next = write;
    else
        disk->head = write;
    disk->tail = write;
}

void lh_sim_disk_write_some(struct lh_sim_disk *disk, uint32_t file, uint64_t offset,
                            const void *buffer, uint64_t bytes, struct lh_sim_random *random)
{
    bool is_all = lh_sim_random_below(random, 2) == 0;
    for (uint64_t at = 0; at < bytes; at += LH_BLOCK_BYTES) {
        if (is_all || lh_sim_random_below(random, 2) == 0)
            lh_sim_disk_write(disk, file, offset + at, (const uint8_t *)buffer + at,
                              lh_min_u64(LH_BLOCK_BYTES, bytes - at));
    }
}

uint64_t lh_sim_disk_mark(const struct lh_sim_disk *disk)
{
    return disk->next_sequence;
}

static bool meets(const struct lh_sim_disk_write *a, const struct lh_sim_disk_write *b)
{
    return a->file == b->file && a->offset < b->offset + b->bytes &&
           b->offset < a->offset + a->bytes;
}

/* Discard the blocks in limbo that overlap a newer write. */
static void limbo_cut(struct lh_sim_disk *disk, const struct lh_sim_disk_write *newer)
{
    struct lh_sim_disk_write **at = &disk->limbo;
    while (*at) {
        struct lh_sim_disk_write *block = *at;
        if (!meets(block, newer)) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        write_free(disk, block);
    }
}

/* Remove the writes of file before mark from the list and return them, in order. */
static struct lh_sim_disk_write *covered_take(struct lh_sim_disk *disk, uint32_t file,
                                              uint64_t mark)
{
    struct lh_sim_disk_write **at = &disk->head;
    struct lh_sim_disk_write *covered = NULL;
    struct lh_sim_disk_write **end = &covered;
    disk->tail = NULL;
    while (*at) {
        struct lh_sim_disk_write *write = *at;
        if (write->file != file || write->sequence >= mark) {
            disk->tail = write;
            at = &write->next;
            continue;
        }
        *at = write->next;
        write->next = NULL;
        *end = write;
        end = &write->next;
    }
    return covered;
}

void lh_sim_disk_sync(struct lh_sim_disk *disk, uint32_t file, uint64_t mark)
{
    struct lh_sim_disk_write *covered = covered_take(disk, file, mark);
    while (covered) {
        struct lh_sim_disk_write *write = covered;
        covered = write->next;
        limbo_cut(disk, write);
        image_write(disk, IMAGE_DURABLE, file, write->offset, write->copy, write->bytes);
        write_free(disk, write);
    }
    disk->files[file].durable_bytes = disk->files[file].bytes;
}

/* Make reads of a block return the durable bytes again, unless a newer write overlaps it. */
static void block_evict(struct lh_sim_disk *disk, const struct lh_sim_disk_write *block)
{
    uint8_t bytes[LH_BLOCK_BYTES];
    for (const struct lh_sim_disk_write *write = disk->head; write; write = write->next) {
        if (meets(write, block))
            return;
    }
    image_read(disk, IMAGE_DURABLE, block->file, block->offset, bytes, block->bytes);
    image_write(disk, IMAGE_WRITTEN, block->file, block->offset, bytes, block->bytes);
}

void lh_sim_disk_sync_drop(struct lh_sim_disk *disk, uint32_t file, uint64_t mark,
                           struct lh_sim_random *random)
{
    struct lh_sim_disk_write *covered = covered_take(disk, file, mark);
    bool evicts = lh_sim_random_below(random, 2) == 0;
    while (covered) {
        struct lh_sim_disk_write *write = covered;
        covered = write->next;
        for (uint64_t at = 0; at < write->bytes; at += LH_BLOCK_BYTES) {
            uint64_t part = lh_min_u64(LH_BLOCK_BYTES, write->bytes - at);
            struct lh_sim_disk_write *block =
                write_make(disk, file, write->offset + at, write->copy + at, part);
            if (evicts) {
                block_evict(disk, block);
                write_free(disk, block);
                continue;
            }
            limbo_cut(disk, block);
            block->next = disk->limbo;
            disk->limbo = block;
        }
        write_free(disk, write);
    }
}

/* Keep some sectors of a block: those up to a point, those from a point on, or a random choice. */
static void block_tear(struct lh_sim_disk *disk, const struct lh_sim_disk_write *write, uint64_t at,
                       uint64_t bytes, struct lh_sim_random *random)
{
    uint64_t count = lh_div_ceil(bytes, LH_SIM_DISK_SECTOR_BYTES);
    uint64_t style = lh_sim_random_below(random, 3);
    uint64_t cut = lh_sim_random_below(random, count);
    lh_sim_fault_add(disk->faults, LH_SIM_FAULT_TORN, write->file, write->offset + at, cut);
    for (uint64_t i = 0; i < count; i++) {
        bool is_kept = style == 0   ? i <= cut
                       : style == 1 ? i >= cut
                                    : lh_sim_random_below(random, 2) == 0;
        uint64_t inside = at + i * LH_SIM_DISK_SECTOR_BYTES;
        if (is_kept)
            image_write(disk, IMAGE_DURABLE, write->file, write->offset + inside,
                        write->copy + inside,
                        lh_min_u64(LH_SIM_DISK_SECTOR_BYTES, at + bytes - inside));
    }
}

/* Make durable the blocks that the drive is to keep of a write. Returns their number. */
static uint64_t write_settle(struct lh_sim_disk *disk, const struct lh_sim_disk_write *write,
                             bool keeps_all, bool tears, struct lh_sim_random *random)
{
    uint64_t kept_count = 0;
    for (uint64_t at = 0; at < write->bytes; at += LH_BLOCK_BYTES) {
        uint64_t part = lh_min_u64(LH_BLOCK_BYTES, write->bytes - at);
        if (!keeps_all && lh_sim_random_below(random, 2) == 0)
            continue;
        kept_count++;
        if (tears && lh_sim_random_below(random, 4) == 0)
            block_tear(disk, write, at, part, random);
        else
            image_write(disk, IMAGE_DURABLE, write->file, write->offset + at, write->copy + at,
                        part);
    }
    return kept_count;
}

static uint64_t list_settle(struct lh_sim_disk *disk, const struct lh_sim_disk_write *head,
                            bool tears, struct lh_sim_random *random)
{
    enum keep keep = (enum keep)lh_sim_random_below(random, KEEP_COUNT);
    uint64_t count = 0;
    uint64_t kept_count = 0;
    for (const struct lh_sim_disk_write *write = head; write; write = write->next)
        count++;
    /* In half of the draws keep only the last write, in the others a random number of the last. */
    uint64_t most = lh_min_u64(count, 4);
    uint64_t drawn = count == 0 ? 0 : lh_sim_random_below(random, 2 * most);
    uint64_t first = drawn < most ? drawn + 1 : 1;
    uint64_t index = 0;
    for (const struct lh_sim_disk_write *write = head; write; write = write->next, index++) {
        bool is_newest = index + first >= count;
        if (keep == KEEP_NONE || (keep == KEEP_NEWEST && !is_newest) ||
            (keep == KEEP_WRITES && lh_sim_random_below(random, 2) == 0))
            continue;
        kept_count += write_settle(disk, write, keep != KEEP_BLOCKS, tears, random);
    }
    return kept_count;
}

static void name_settle(struct lh_sim_disk_name *name, struct lh_sim_random *random)
{
    if (!name->is_durable && lh_sim_random_below(random, 2) == 0)
        name->is_there = !name->is_there;
    name->is_durable = true;
}

/* Decide which name and size a file has after a crash; contents beyond the size are lost. */
static void file_settle(struct lh_sim_disk *disk, uint32_t index, struct lh_sim_random *random)
{
    struct lh_sim_disk_file *file = &disk->files[index];
    name_settle(&file->directory, random);
    name_settle(&file->name, random);
    if (!file->directory.is_there)
        file->name.is_there = false;
    if (!file->name.is_there)
        contents_forget(disk, index);
    else if (file->durable_bytes < file->bytes && lh_sim_random_below(random, 2) == 0)
        lh_sim_disk_resize(disk, index, file->durable_bytes);
    file->durable_bytes = file->bytes;
    for (uint64_t i = 0; i < file->page_count; i++) {
        struct lh_sim_disk_page *page = &file->pages[i];
        if (page->written != page->durable)
            lh_free(disk->world->alloc, page->written);
        page->written = page->durable;
    }
}

void lh_sim_disk_crash(struct lh_sim_disk *disk, bool tears, struct lh_sim_random *random)
{
    uint64_t write_count = 0;
    for (const struct lh_sim_disk_write *write = disk->head; write; write = write->next)
        write_count++;
    uint64_t kept_count = list_settle(disk, disk->limbo, false, random);
    kept_count += list_settle(disk, disk->head, tears, random);
    writes_forget(disk, &disk->limbo, UINT32_MAX);
    writes_forget(disk, &disk->head, UINT32_MAX);
    disk->tail = NULL;
    for (uint32_t i = 0; i < disk->file_count; i++)
        file_settle(disk, i, random);
    lh_sim_world_trace(disk->world, LH_SIM_TRACE_CRASH, write_count, kept_count, 0);
}
