/* A store in memory: its description, and the state of its slots. See store.h. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/store_impl.h"

void *lh_store_allocate(struct lh_store *store, uint64_t count, uint64_t bytes,
                        struct lh_error *err)
{
    LH_ASSERT(bytes > 0);
    void *memory = lh_alloc_zeroed(store->alloc, count, bytes);
    if (memory == NULL)
        lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " bytes of the store's tables",
                     count * bytes);
    return memory;
}

int lh_store_buffer_init(struct lh_store *store, struct lh_store_buffer *buffer, uint64_t bytes,
                         struct lh_error *err)
{
    LH_ASSERT(buffer->raw == NULL);
    LH_ASSERT(lh_is_aligned(bytes, LH_BLOCK_BYTES));
    buffer->raw = lh_store_allocate(store, 1, bytes + LH_BLOCK_BYTES, err);
    if (buffer->raw == NULL)
        return -ENOMEM;
    buffer->base = (uint8_t *)(uintptr_t)lh_align_up((uintptr_t)buffer->raw, LH_BLOCK_BYTES);
    return 0;
}

int lh_store_new(struct lh_alloc *alloc, uint32_t file_count, struct lh_store **store_out,
                 struct lh_error *err)
{
    *store_out = NULL;
    LH_ASSERT(file_count >= 1 && file_count <= LH_STORE_DIRECTORY_COUNT_MAX);
    struct lh_store *store = lh_alloc_zeroed(alloc, 1, sizeof(struct lh_store));
    if (store == NULL)
        return lh_error_set(err, -ENOMEM, "no memory for a store");
    store->alloc = alloc;
    store->fs = lh_store_fs_real();
    store->file_count = file_count;
    store->header.version = LH_STORE_FORMAT_VERSION;
    for (uint32_t file = 0; file < LH_STORE_DIRECTORY_COUNT_MAX; file++)
        store->io_files[file].fd = -1;
    if (lh_store_buffer_init(store, &store->bounce, LH_STORE_BOUNCE_BYTES, err) < 0 ||
        lh_store_buffer_init(store, &store->superblock_block, LH_BLOCK_BYTES, err) < 0 ||
        lh_store_buffer_init(store, &store->witness_block, LH_BLOCK_BYTES, err) < 0) {
        lh_store_delete(store);
        return -ENOMEM;
    }
    *store_out = store;
    return 0;
}

int lh_store_description_init(struct lh_store *store, struct lh_error *err)
{
    const struct lh_store_header *header = &store->header;
    LH_ASSERT(header->file_count == store->file_count);
    LH_ASSERT(store->extents == NULL && store->slot_counts == NULL);
    lh_store_control_plan(header, &store->control);
    store->extents = lh_store_allocate(store, header->extent_count, sizeof(*store->extents), err);
    store->slot_counts = lh_store_allocate(store, header->group_count, 1, err);
    store->tail_files =
        lh_store_allocate(store, header->extent_count, LH_STORE_SLOT_COUNT_MAX, err);
    store->checksum_first = lh_store_allocate(store, header->extent_count, sizeof(uint64_t), err);
    if (store->extents == NULL || store->slot_counts == NULL || store->tail_files == NULL ||
        store->checksum_first == NULL)
        return -ENOMEM;
    LH_TRY(lh_store_buffer_init(store, &store->table,
                                lh_align_up(store->control.table_bytes, LH_BLOCK_BYTES), err));
    return lh_store_buffer_init(store, &store->meta,
                                lh_align_up(header->meta_bytes, LH_BLOCK_BYTES), err);
}

struct lh_store_shape lh_store_shape(const struct lh_store *store)
{
    struct lh_store_shape shape = {
        .file_count = store->file_count,
        .extent_count = store->header.extent_count,
        .group_count = store->header.group_count,
        .stripe_bytes = store->header.stripe_bytes,
        .cycle_stripes = store->header.cycle_stripes,
        .extents = store->extents,
        .slot_counts = store->slot_counts,
        .tail_files = store->tail_files,
    };
    memcpy(shape.cycle, store->cycle, sizeof(shape.cycle));
    return shape;
}

int lh_store_state_init(struct lh_store *store, struct lh_error *err)
{
    const struct lh_store_header *header = &store->header;
    struct lh_store_shape shape = lh_store_shape(store);
    LH_ASSERT(store->group_states == NULL && store->extent_states == NULL);
    LH_TRY(lh_store_layout_init(&store->layout, &shape, store->control.data_offset, store->alloc,
                                err));
    uint64_t next = 0;
    for (uint32_t extent = 0; extent < header->extent_count; extent++) {
        LH_ASSERT(store->extents[extent].group < header->group_count);
        store->checksum_first[extent] = next;
        next += lh_store_checksum_count(store->extents[extent].bytes);
    }
    LH_ASSERT(next == header->checksum_count);
    store->group_states = lh_store_allocate(store, header->group_count, 1, err);
    store->extent_states = lh_store_allocate(store, header->extent_count, 1, err);
    if (store->group_states == NULL || store->extent_states == NULL)
        return -ENOMEM;
    for (uint32_t slot = 0; slot < LH_STORE_SLOT_COUNT_MAX; slot++) {
        store->checksums[slot] =
            lh_store_allocate(store, header->checksum_count, sizeof(uint32_t), err);
        if (store->checksums[slot] == NULL)
            return -ENOMEM;
    }
    for (uint32_t area = 0; area < LH_COUNT_OF(store->manifests); area++)
        LH_TRY(lh_store_buffer_init(store, &store->manifests[area], store->control.manifest_bytes,
                                    err));
    const uint8_t *uuid = header->uuid;
    char *text = store->uuid;
    for (uint32_t byte = 0; byte < LH_STORE_UUID_BYTES; byte++) {
        bool is_dash = byte == 4 || byte == 6 || byte == 8 || byte == 10;
        text += snprintf(text, 4, "%s%02x", is_dash ? "-" : "", uuid[byte]);
    }
    LH_ASSERT(text + 1 == store->uuid + sizeof(store->uuid));
    return 0;
}

void lh_store_delete(struct lh_store *store)
{
    struct lh_alloc *alloc = store->alloc;
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_ASSERT(store->io_files[file].fd < 0 && !store->files[file].is_locked);
    struct lh_store_buffer *const buffers[] = {
        &store->bounce,       &store->superblock_block, &store->table,         &store->meta,
        &store->manifests[0], &store->manifests[1],     &store->witness_block,
    };
    for (uint32_t index = 0; index < LH_COUNT_OF(buffers); index++)
        lh_free(alloc, buffers[index]->raw);
    for (uint32_t slot = 0; slot < LH_STORE_SLOT_COUNT_MAX; slot++)
        lh_free(alloc, store->checksums[slot]);
    lh_free(alloc, store->group_states);
    lh_free(alloc, store->extent_states);
    lh_free(alloc, store->extents);
    lh_free(alloc, store->slot_counts);
    lh_free(alloc, store->tail_files);
    lh_free(alloc, store->checksum_first);
    lh_store_layout_deinit(&store->layout, alloc);
    lh_free(alloc, store);
}

void lh_store_note_add(struct lh_store *store, const char *format, ...)
{
    uint64_t used = strlen(store->note);
    LH_ASSERT(used < sizeof(store->note));
    uint64_t space = sizeof(store->note) - used;
    if (used > 0 && space > 1) {
        store->note[used++] = '\n';
        space--;
    }
    va_list arguments;
    va_start(arguments, format);
    /* A note that does not fit is truncated. */
    vsnprintf(store->note + used, space, format, arguments);
    va_end(arguments);
}

const void *lh_store_meta(const struct lh_store *store, uint64_t *bytes_out)
{
    *bytes_out = store->header.meta_bytes;
    return store->meta.base;
}

const void *lh_store_scalars(const struct lh_store *store, uint64_t *bytes_out)
{
    LH_ASSERT(store->superblock.manifest_area < LH_COUNT_OF(store->manifests));
    LH_ASSERT(store->scalar_bytes <= store->header.scalar_bytes_max);
    *bytes_out = store->scalar_bytes;
    return store->manifests[store->superblock.manifest_area].base +
           store->control.manifest_scalar_offset;
}

uint64_t lh_store_step(const struct lh_store *store)
{
    return store->superblock.step;
}

uint64_t lh_store_scalar_bytes_max(const struct lh_store *store)
{
    return store->header.scalar_bytes_max;
}

uint32_t lh_store_file_count(const struct lh_store *store)
{
    return store->file_count;
}

const struct lh_io_file *lh_store_files(const struct lh_store *store)
{
    return store->io_files;
}

const char *lh_store_file_path(const struct lh_store *store, uint32_t file_index)
{
    LH_ASSERT(file_index < store->file_count);
    return store->files[file_index].path;
}

uint32_t lh_store_extent_count(const struct lh_store *store)
{
    return store->header.extent_count;
}

struct lh_store_extent_desc lh_store_extent(const struct lh_store *store, uint32_t extent)
{
    LH_ASSERT(extent < store->header.extent_count);
    return store->extents[extent];
}

uint32_t lh_store_group_count(const struct lh_store *store)
{
    return store->header.group_count;
}

uint32_t lh_store_slot_count(const struct lh_store *store, uint32_t group)
{
    LH_ASSERT(group < store->header.group_count);
    return store->slot_counts[group];
}

bool lh_store_is_single_slot(const struct lh_store *store)
{
    return store->header.is_single_slot;
}

uint64_t lh_store_file_bytes(const struct lh_store *store, uint32_t file_index)
{
    LH_ASSERT(file_index < store->file_count);
    return store->layout.file_bytes[file_index];
}

const char *lh_store_note(const struct lh_store *store)
{
    return store->note;
}

bool lh_store_is_fallback(const struct lh_store *store)
{
    return store->is_fallback;
}

uint64_t lh_store_older_step(const struct lh_store *store)
{
    return store->older_step;
}

const char *lh_store_uuid(const struct lh_store *store)
{
    return store->uuid;
}

uint32_t lh_store_committed_slot(const struct lh_store *store, uint32_t group)
{
    LH_ASSERT(group < store->header.group_count);
    return store->group_states[group] & LH_STORE_GROUP_STATE_SLOT;
}

uint32_t lh_store_write_slot(const struct lh_store *store, uint32_t group)
{
    uint32_t committed = lh_store_committed_slot(store, group);
    LH_ASSERT(committed < store->slot_counts[group]);
    return store->slot_counts[group] == 1 ? committed : 1 - committed;
}

bool lh_store_is_staged(const struct lh_store *store, uint32_t group)
{
    LH_ASSERT(group < store->header.group_count);
    return (store->group_states[group] & LH_STORE_GROUP_STATE_STAGED) != 0;
}

uint32_t lh_store_read_slot(const struct lh_store *store, uint32_t group)
{
    return lh_store_is_staged(store, group) ? lh_store_write_slot(store, group)
                                            : lh_store_committed_slot(store, group);
}

/* Assert that extent has this slot. */
static void check_slot(const struct lh_store *store, uint32_t extent, uint32_t slot)
{
    LH_ASSERT(extent < store->header.extent_count);
    LH_ASSERT(store->extents[extent].group < store->header.group_count);
    LH_ASSERT(slot < store->slot_counts[store->extents[extent].group]);
}

bool lh_store_is_zero(const struct lh_store *store, uint32_t extent, uint32_t slot)
{
    check_slot(store, extent, slot);
    return (store->extent_states[extent] & LH_STORE_EXTENT_STATE_ZERO(slot)) != 0;
}

void lh_store_clear_zero(struct lh_store *store, uint32_t extent, uint32_t slot)
{
    check_slot(store, extent, slot);
    LH_ASSERT(!store->is_read_only);
    unsigned state = store->extent_states[extent];
    state &= ~LH_STORE_EXTENT_STATE_ZERO(slot);
    state |= LH_STORE_EXTENT_STATE_DIRTY(slot);
    store->extent_states[extent] = (uint8_t)state;
}

void lh_store_mark_dirty(struct lh_store *store, uint32_t extent, uint32_t slot)
{
    check_slot(store, extent, slot);
    LH_ASSERT(!store->is_read_only);
    store->extent_states[extent] |= (uint8_t)LH_STORE_EXTENT_STATE_DIRTY(slot);
}

/* Compute the CRC of zero bytes, in a number of steps logarithmic in the number of blocks. */
static uint32_t zeros_crc(uint64_t bytes)
{
    static const uint8_t block[LH_BLOCK_BYTES];
    uint32_t crc = 0;
    uint32_t power_crc = lh_crc32c(0, block, sizeof(block));
    LH_ASSERT(lh_is_aligned(bytes, LH_BLOCK_BYTES));
    LH_ASSERT(bytes <= LH_CHECKSUM_BYTES);
    for (uint64_t power_bytes = LH_BLOCK_BYTES; power_bytes <= bytes; power_bytes *= 2) {
        if (bytes & power_bytes)
            crc = lh_crc32c_combine(crc, power_crc, power_bytes);
        power_crc = lh_crc32c_combine(power_crc, power_crc, power_bytes);
    }
    return crc;
}

void lh_store_set_zero(struct lh_store *store, uint32_t extent, uint32_t slot)
{
    uint32_t count = 0;
    uint32_t *checksums = lh_store_checksums(store, extent, slot, &count);
    uint64_t tail_bytes = store->extents[extent].bytes % LH_CHECKSUM_BYTES;
    uint32_t full_crc = zeros_crc(LH_CHECKSUM_BYTES);
    for (uint32_t index = 0; index < count; index++)
        checksums[index] = full_crc;
    if (tail_bytes != 0)
        checksums[count - 1] = zeros_crc(tail_bytes);
    store->extent_states[extent] |= (uint8_t)LH_STORE_EXTENT_STATE_ZERO(slot);
}

uint32_t *lh_store_checksums(struct lh_store *store, uint32_t extent, uint32_t slot,
                             uint32_t *count_out)
{
    check_slot(store, extent, slot);
    *count_out = (uint32_t)lh_store_checksum_count(store->extents[extent].bytes);
    LH_ASSERT(store->checksum_first[extent] + *count_out <= store->header.checksum_count);
    return store->checksums[slot] + store->checksum_first[extent];
}

int lh_store_map(const struct lh_store *store, uint32_t extent, uint32_t slot, uint64_t offset,
                 uint64_t bytes, struct lh_store_piece *pieces, uint32_t piece_max)
{
    check_slot(store, extent, slot);
    LH_ASSERT(piece_max > 0);
    return lh_store_layout_map(&store->layout, lh_store_place_index(extent, slot), offset, bytes,
                               pieces, piece_max);
}
