/* Damage to a drive while no process uses it: both images change alike. */
#include <string.h>

#include "base/assert.h"
#include "lives/disk.h"

#define CONTROL_BYTES LH_MIB
/* A few blocks, or enough to reach from one copy of a superblock to the next. */
#define ZERO_BLOCK_COUNT_MAX 8
#define ZERO_BLOCK_COUNT_MANY 64
#define PLACE_TRY_COUNT 32

/*
 * Draw a block of the file, if possible one that is not all zeros: what was never written is not
 * worth damaging. Half of the draws are among the first blocks, which have the metadata.
 */
static uint64_t place_draw(const struct lh_sim_disk *disk, uint32_t index,
                           struct lh_sim_random *random)
{
    const struct lh_sim_disk_file *file = &disk->files[index];
    uint64_t blocks = file->bytes / LH_BLOCK_BYTES;
    uint64_t offset = 0;
    if (lh_sim_random_below(random, 2) == 0)
        blocks = lh_min_u64(blocks, CONTROL_BYTES / LH_BLOCK_BYTES);
    for (uint32_t i = 0; i < PLACE_TRY_COUNT; i++) {
        uint8_t block[LH_BLOCK_BYTES];
        offset = LH_BLOCK_BYTES * lh_sim_random_below(random, blocks);
        lh_sim_disk_read(disk, index, offset, block, sizeof(block));
        if (block[0] != 0 || memcmp(block, block + 1, sizeof(block) - 1) != 0)
            break;
    }
    return offset;
}

/* Set a block in both images. Returns whether anything changed. */
static bool block_set(struct lh_sim_disk *disk, uint32_t file, uint64_t offset,
                      const uint8_t *bytes)
{
    uint8_t before[LH_BLOCK_BYTES];
    lh_sim_disk_read(disk, file, offset, before, sizeof(before));
    if (memcmp(before, bytes, sizeof(before)) == 0)
        return false;
    lh_sim_disk_write(disk, file, offset, bytes, LH_BLOCK_BYTES);
    lh_sim_disk_sync(disk, file, lh_sim_disk_mark(disk));
    return true;
}

static bool bit_flip(struct lh_sim_disk *disk, uint32_t file, struct lh_sim_random *random)
{
    uint8_t block[LH_BLOCK_BYTES];
    uint64_t offset = place_draw(disk, file, random);
    uint64_t bit = lh_sim_random_below(random, sizeof(block) * 8);
    lh_sim_disk_read(disk, file, offset, block, sizeof(block));
    block[bit / 8] ^= (uint8_t)(1U << bit % 8);
    return block_set(disk, file, offset, block);
}

static bool zeros_put(struct lh_sim_disk *disk, uint32_t file, struct lh_sim_random *random)
{
    static const uint8_t zeros[LH_BLOCK_BYTES];
    uint64_t offset = place_draw(disk, file, random);
    bool is_many = lh_sim_random_below(random, 2) == 0;
    uint64_t count =
        1 + lh_sim_random_below(random, is_many ? ZERO_BLOCK_COUNT_MANY : ZERO_BLOCK_COUNT_MAX);
    bool is_changed = false;
    for (uint64_t i = 0; i < count && offset + LH_BLOCK_BYTES <= disk->files[file].bytes; i++) {
        is_changed |= block_set(disk, file, offset, zeros);
        offset += LH_BLOCK_BYTES;
    }
    return is_changed;
}

static bool truncate(struct lh_sim_disk *disk, uint32_t file, struct lh_sim_random *random)
{
    lh_sim_disk_resize(disk, file, place_draw(disk, file, random));
    return true;
}

static bool copy_restore(struct lh_sim_disk *disk, const struct lh_sim_disk_copy *copy)
{
    static const uint8_t zeros[LH_SIM_DISK_PAGE_BYTES];
    uint32_t file = copy->file;
    bool is_changed = false;
    if (!copy->pages || copy->bytes != disk->files[file].bytes)
        return false;
    for (uint64_t i = 0; i < copy->page_count; i++) {
        const uint8_t *page = copy->pages[i] ? copy->pages[i] : zeros;
        for (uint64_t at = 0; at < LH_SIM_DISK_PAGE_BYTES; at += LH_BLOCK_BYTES) {
            uint64_t offset = i * LH_SIM_DISK_PAGE_BYTES + at;
            if (offset + LH_BLOCK_BYTES <= copy->bytes)
                is_changed |= block_set(disk, file, offset, page + at);
        }
    }
    return is_changed;
}

bool lh_sim_disk_damage(struct lh_sim_disk *disk, enum lh_sim_fault fault, uint32_t file,
                        const struct lh_sim_disk_copy *copy, struct lh_sim_random *random)
{
    LH_ASSERT(disk->head == NULL); /* after a crash, everything is durable or lost */
    bool is_changed = false;
    if (disk->files[file].bytes < LH_BLOCK_BYTES)
        return false;
    switch (fault) {
    case LH_SIM_FAULT_BIT:
        is_changed = bit_flip(disk, file, random);
        break;
    case LH_SIM_FAULT_ZEROS:
        is_changed = zeros_put(disk, file, random);
        break;
    case LH_SIM_FAULT_TRUNCATE:
        is_changed = truncate(disk, file, random);
        break;
    default:
        LH_ASSERT(fault == LH_SIM_FAULT_OLD);
        is_changed = copy->file == file && copy_restore(disk, copy);
        break;
    }
    if (is_changed)
        lh_sim_fault_add(disk->faults, fault, file, 0, 0);
    return is_changed;
}

void lh_sim_disk_copy_make(const struct lh_sim_disk *disk, uint32_t index,
                           struct lh_sim_disk_copy *copy_out)
{
    const struct lh_sim_disk_file *file = &disk->files[index];
    struct lh_alloc *alloc = disk->world->alloc;
    lh_sim_disk_copy_free(disk, copy_out);
    *copy_out = (struct lh_sim_disk_copy){
        .file = index, .bytes = file->bytes, .page_count = file->page_count};
    copy_out->pages = lh_alloc_zeroed(alloc, lh_max_u64(file->page_count, 1), sizeof(uint8_t *));
    LH_ASSERT(copy_out->pages != NULL);
    for (uint64_t i = 0; i < file->page_count; i++) {
        if (!file->pages[i].durable)
            continue;
        copy_out->pages[i] = lh_alloc_zeroed(alloc, 1, LH_SIM_DISK_PAGE_BYTES);
        LH_ASSERT(copy_out->pages[i] != NULL);
        memcpy(copy_out->pages[i], file->pages[i].durable, LH_SIM_DISK_PAGE_BYTES);
    }
}

void lh_sim_disk_copy_free(const struct lh_sim_disk *disk, struct lh_sim_disk_copy *copy)
{
    for (uint64_t i = 0; copy->pages && i < copy->page_count; i++)
        lh_free(disk->world->alloc, copy->pages[i]);
    lh_free(disk->world->alloc, (void *)copy->pages);
    *copy = (struct lh_sim_disk_copy){0};
}
