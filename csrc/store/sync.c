/*
 * Blocking reads, writes and commits, for create, load, inspect and verify.
 *
 * Bytes are transferred in units that one checksum covers ("sum blocks"), through the bounce buffer
 * if the caller's buffer is not aligned or the range covers only a part of the sum block. A partial
 * write first reads the whole sum block, so offsets and lengths are arbitrary. Whole sum blocks of
 * aligned memory are written several at a time: drives are fastest with large transfers.
 */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "base/thread.h"
#include "store/store_impl.h"

/* Sum blocks that are written together. A stripe has at least one, so a piece has one, too. */
#define RUN_BLOCK_COUNT_MAX 8
_Static_assert(RUN_BLOCK_COUNT_MAX < LH_STORE_PIECE_COUNT_MAX, "lh_store_map() finds all pieces");

/* One sum block of one slot, and the part of it that the caller requested. */
struct sum_block {
    uint32_t extent;
    uint32_t slot;
    uint64_t index;
    uint64_t bytes;  /* the size of the whole block */
    uint64_t inside; /* the offset of the requested part in the block */
    uint64_t wanted_bytes;
};

static struct sum_block sum_block_at(const struct lh_store *store, uint32_t extent, uint32_t slot,
                                     uint64_t offset, uint64_t bytes)
{
    uint64_t index = offset / LH_CHECKSUM_BYTES;
    uint64_t start = index * LH_CHECKSUM_BYTES;
    LH_ASSERT(extent < store->header.extent_count);
    LH_ASSERT(bytes > 0 && offset < store->extents[extent].bytes);
    uint64_t block_bytes = lh_min_u64(LH_CHECKSUM_BYTES, store->extents[extent].bytes - start);
    return (struct sum_block){
        .extent = extent,
        .slot = slot,
        .index = index,
        .bytes = block_bytes,
        .inside = offset - start,
        .wanted_bytes = lh_min_u64(bytes, start + block_bytes - offset),
    };
}

static struct lh_store_piece sum_block_place(const struct lh_store *store,
                                             const struct sum_block *block)
{
    struct lh_store_piece piece = {0};
    int count = lh_store_map(store, block->extent, block->slot, block->index * LH_CHECKSUM_BYTES,
                             block->bytes, &piece, 1);
    LH_ASSERT(count == 1);
    LH_ASSERT(piece.bytes == block->bytes);
    return piece;
}

static uint32_t *sum_block_crc(struct lh_store *store, const struct sum_block *block)
{
    uint32_t count = 0;
    uint32_t *checksums = lh_store_checksums(store, block->extent, block->slot, &count);
    LH_ASSERT(block->index < count);
    return &checksums[block->index];
}

static int sum_block_read(struct lh_store *store, const struct sum_block *block, void *buffer,
                          struct lh_error *err)
{
    LH_ASSERT(block->bytes <= LH_STORE_BOUNCE_BYTES);
    if (lh_store_is_zero(store, block->extent, block->slot)) {
        memset(buffer, 0, block->bytes);
        return 0;
    }
    struct lh_store_piece piece = sum_block_place(store, block);
    LH_TRY(
        lh_store_file_read(store, piece.file_index, piece.file_offset, buffer, block->bytes, err));
    uint32_t crc = lh_crc32c(0, buffer, block->bytes);
    uint32_t expected_crc = *sum_block_crc(store, block);
    if (crc != expected_crc)
        return lh_error_set(err, -EILSEQ,
                            "extent %" PRIu32 " slot %" PRIu32 ": the %" PRIu64
                            " bytes at offset %" PRIu64 " of %s have checksum %08" PRIx32
                            ", but %08" PRIx32 " is recorded: the drive returned wrong bytes",
                            block->extent, block->slot, block->bytes, piece.file_offset,
                            store->files[piece.file_index].path, crc, expected_crc);
    return 0;
}

static int sum_block_write(struct lh_store *store, const struct sum_block *block,
                           const void *buffer, struct lh_error *err)
{
    struct lh_store_piece piece = sum_block_place(store, block);
    LH_TRY(
        lh_store_file_write(store, piece.file_index, piece.file_offset, buffer, block->bytes, err));
    *sum_block_crc(store, block) = lh_crc32c(0, buffer, block->bytes);
    return 0;
}

static bool is_direct_possible(const struct sum_block *block, const void *buffer)
{
    return block->wanted_bytes == block->bytes && lh_is_aligned((uintptr_t)buffer, LH_BLOCK_BYTES);
}

struct run {
    const uint8_t *buffer;
    uint64_t bytes;
    uint32_t checksums[RUN_BLOCK_COUNT_MAX];
};

static void *run_sum(void *context)
{
    struct run *run = context;
    LH_ASSERT(run->bytes <= RUN_BLOCK_COUNT_MAX * LH_CHECKSUM_BYTES);
    for (uint64_t at = 0; at < run->bytes; at += LH_CHECKSUM_BYTES)
        run->checksums[at / LH_CHECKSUM_BYTES] =
            lh_crc32c(0, run->buffer + at, lh_min_u64(LH_CHECKSUM_BYTES, run->bytes - at));
    return NULL;
}

/* The bytes of the whole sum blocks at the start of a range that can be written together. */
static uint64_t run_bytes(const struct lh_store *store, uint32_t extent, uint64_t offset,
                          const void *buffer, uint64_t bytes)
{
    if (!lh_is_aligned(offset, LH_CHECKSUM_BYTES) ||
        !lh_is_aligned((uintptr_t)buffer, LH_BLOCK_BYTES))
        return 0;
    uint64_t whole = lh_min_u64(bytes, RUN_BLOCK_COUNT_MAX * LH_CHECKSUM_BYTES);
    /* The last sum block of an extent may be short. */
    if (offset + whole < store->extents[extent].bytes)
        whole = whole / LH_CHECKSUM_BYTES * LH_CHECKSUM_BYTES;
    return whole;
}

/* Write the sum blocks of a run. Another thread computes their checksums in the meantime. */
static int run_write(struct lh_store *store, uint32_t extent, uint32_t slot, uint64_t offset,
                     struct run *run, struct lh_error *err)
{
    struct lh_store_piece pieces[RUN_BLOCK_COUNT_MAX + 1];
    pthread_t thread;
    uint32_t count = 0;
    uint32_t *checksums = lh_store_checksums(store, extent, slot, &count);
    int piece_count =
        lh_store_map(store, extent, slot, offset, run->bytes, pieces, LH_COUNT_OF(pieces));
    LH_ASSERT(piece_count > 0 && lh_div_ceil(offset + run->bytes, LH_CHECKSUM_BYTES) <= count);
    bool has_thread =
        run->bytes > LH_CHECKSUM_BYTES && lh_thread_start(&thread, NULL, run_sum, run) == 0;
    int rc = 0;
    for (int i = 0; i < piece_count && rc == 0; i++)
        rc = lh_store_file_write(store, pieces[i].file_index, pieces[i].file_offset,
                                 run->buffer + pieces[i].buffer_offset, pieces[i].bytes, err);
    if (has_thread) {
        int joined = pthread_join(thread, NULL);
        LH_ASSERT(joined == 0);
    } else {
        run_sum(run);
    }
    if (rc == 0)
        memcpy(checksums + offset / LH_CHECKSUM_BYTES, run->checksums,
               lh_div_ceil(run->bytes, LH_CHECKSUM_BYTES) * sizeof(*checksums));
    return rc;
}

static int range_check(const struct lh_store *store, uint32_t extent, uint64_t offset,
                       uint64_t bytes, struct lh_error *err)
{
    if (extent >= store->header.extent_count)
        return lh_error_set(err, -EINVAL,
                            "extent %" PRIu32 " does not exist: the store has %" PRIu32, extent,
                            store->header.extent_count);
    uint64_t extent_bytes = store->extents[extent].bytes;
    if (offset > extent_bytes || bytes > extent_bytes - offset)
        return lh_error_set(err, -EINVAL,
                            "%" PRIu64 " bytes at offset %" PRIu64 " are outside extent "
                            "%" PRIu32 ", which has %" PRIu64 " bytes",
                            bytes, offset, extent, extent_bytes);
    return 0;
}

int lh_store_read_sync(struct lh_store *store, uint32_t extent, uint64_t offset, void *buffer,
                       uint64_t bytes, struct lh_error *err)
{
    LH_TRY(range_check(store, extent, offset, bytes, err));
    uint32_t slot = lh_store_read_slot(store, store->extents[extent].group);
    uint8_t *target = buffer;
    for (uint64_t done = 0; done < bytes;) {
        struct sum_block block = sum_block_at(store, extent, slot, offset + done, bytes - done);
        bool is_direct = is_direct_possible(&block, target + done);
        LH_ASSERT(block.wanted_bytes > 0 && block.inside + block.wanted_bytes <= block.bytes);
        LH_TRY(sum_block_read(store, &block, is_direct ? target + done : store->bounce.base, err));
        if (!is_direct)
            memcpy(target + done, store->bounce.base + block.inside, block.wanted_bytes);
        done += block.wanted_bytes;
    }
    return 0;
}

/* Write zeros to a slot that only reads as zeros, because a part of it is about to change. */
static int zeros_write(struct lh_store *store, uint32_t extent, uint32_t slot, struct lh_error *err)
{
    uint64_t bytes = store->extents[extent].bytes;
    LH_ASSERT(lh_store_is_zero(store, extent, slot));
    memset(store->bounce.base, 0, LH_STORE_BOUNCE_BYTES);
    for (uint64_t done = 0; done < bytes; done += LH_CHECKSUM_BYTES) {
        struct sum_block block = sum_block_at(store, extent, slot, done, bytes - done);
        LH_TRY(sum_block_write(store, &block, store->bounce.base, err));
    }
    return 0;
}

static int extent_copy(struct lh_store *store, uint32_t extent, uint32_t source_slot,
                       uint32_t target_slot, struct lh_error *err)
{
    LH_ASSERT(source_slot != target_slot);
    if (lh_store_is_zero(store, extent, source_slot)) {
        lh_store_set_zero(store, extent, target_slot);
        return 0;
    }
    uint64_t bytes = store->extents[extent].bytes;
    lh_store_clear_zero(store, extent, target_slot);
    for (uint64_t done = 0; done < bytes; done += LH_CHECKSUM_BYTES) {
        struct sum_block block = sum_block_at(store, extent, source_slot, done, bytes - done);
        LH_TRY(sum_block_read(store, &block, store->bounce.base, err));
        block.slot = target_slot;
        LH_TRY(sum_block_write(store, &block, store->bounce.base, err));
    }
    return 0;
}

/*
 * Stage a group, and copy its committed slot to its write slot, because the write that follows may
 * cover only a part of the group.
 */
static int group_stage(struct lh_store *store, uint32_t group, struct lh_error *err)
{
    if (store->is_read_only)
        return lh_error_set(err, -EROFS, "the store was opened for reading only");
    /* After a failure it may be unknown which slots are the committed ones. */
    if (store->failure.code != 0)
        return lh_store_fail(store, err);
    if (!lh_store_may_stage(store, group))
        return lh_error_set(err, -EPERM,
                            store->phase != LH_STORE_PHASE_IDLE
                                ? "group %" PRIu32 " is being committed; write to it afterwards"
                                : "group %" PRIu32
                                  " is frozen: it has one slot, which is already committed",
                            group);
    LH_TRY(lh_store_write_begin(store, err));
    if (lh_store_is_staged(store, group))
        return 0;
    uint32_t source_slot = lh_store_committed_slot(store, group);
    uint32_t target_slot = lh_store_write_slot(store, group);
    LH_ASSERT(target_slot < store->slot_counts[group]);
    for (uint32_t extent = 0; extent < store->header.extent_count; extent++) {
        if (store->extents[extent].group == group && source_slot != target_slot)
            LH_TRY(extent_copy(store, extent, source_slot, target_slot, err));
    }
    lh_store_stage(store, group);
    return 0;
}

int lh_store_write_sync(struct lh_store *store, uint32_t extent, uint64_t offset,
                        const void *buffer, uint64_t bytes, struct lh_error *err)
{
    LH_TRY(range_check(store, extent, offset, bytes, err));
    uint32_t group = store->extents[extent].group;
    LH_TRY(group_stage(store, group, err));
    uint32_t slot = lh_store_write_slot(store, group);
    const uint8_t *source = buffer;
    if (bytes == 0)
        return 0;
    if (lh_store_is_zero(store, extent, slot)) {
        unsigned dirty = store->extent_states[extent] & LH_STORE_EXTENT_STATE_DIRTY(slot);
        if (dirty != 0 && bytes != store->extents[extent].bytes)
            LH_TRY(zeros_write(store, extent, slot, err));
        lh_store_clear_zero(store, extent, slot);
    }
    for (uint64_t done = 0; done < bytes;) {
        struct run run = {.buffer = source + done};
        run.bytes = run_bytes(store, extent, offset + done, run.buffer, bytes - done);
        if (run.bytes > 0) {
            LH_TRY(run_write(store, extent, slot, offset + done, &run, err));
            done += run.bytes;
            continue;
        }
        struct sum_block block = sum_block_at(store, extent, slot, offset + done, bytes - done);
        LH_ASSERT(block.wanted_bytes > 0 && block.inside + block.wanted_bytes <= block.bytes);
        if (block.wanted_bytes != block.bytes)
            LH_TRY(sum_block_read(store, &block, store->bounce.base, err));
        memcpy(store->bounce.base + block.inside, source + done, block.wanted_bytes);
        LH_TRY(sum_block_write(store, &block, store->bounce.base, err));
        done += block.wanted_bytes;
    }
    return 0;
}

static int request_run(const struct lh_store *store, const struct lh_io_request *request)
{
    LH_ASSERT(request->file_index < store->file_count);
    LH_ASSERT(request->result == -EINPROGRESS);
    switch (request->kind) {
    case LH_IO_KIND_WRITE:
        return lh_store_file_write(store, request->file_index, request->offset, request->buffer,
                                   request->bytes, NULL);
    case LH_IO_KIND_SYNC:
        return lh_store_file_sync(store, request->file_index, NULL);
    default:
        LH_ASSERT(request->kind == LH_IO_KIND_READ);
        return lh_store_file_read(store, request->file_index, request->offset, request->buffer,
                                  request->bytes, NULL);
    }
}

int lh_store_commit_sync(struct lh_store *store, uint64_t step, const void *scalars,
                         uint64_t scalar_bytes, struct lh_error *err)
{
    struct lh_io_request requests[LH_STORE_COMMIT_REQUEST_COUNT_MAX];
    LH_TRY(lh_store_commit_begin(store, step, scalars, scalar_bytes, err));
    for (;;) {
        int count = lh_store_commit_next(store, requests, LH_COUNT_OF(requests), err);
        if (count <= 0)
            return count;
        for (int index = 0; index < count; index++)
            requests[index].result = request_run(store, &requests[index]);
    }
}

int lh_store_superblock_write(struct lh_store *store, uint32_t first_copy, struct lh_error *err)
{
    uint32_t copy_count = store->control.copy_count;
    LH_ASSERT(!store->is_read_only && first_copy < LH_STORE_COPY_COUNT_MAX);
    for (uint32_t index = 0; index < copy_count; index++) {
        uint64_t offset = lh_store_superblock_prepare(store, (first_copy + index) % copy_count);
        LH_TRY(lh_store_file_write(store, 0, offset, store->superblock_block.base, LH_BLOCK_BYTES,
                                   err));
        LH_TRY(lh_store_file_sync(store, 0, err));
    }
    store->superblock = store->next;
    return 0;
}

int lh_store_mark_sync(struct lh_store *store, bool is_clean, struct lh_error *err)
{
    LH_ASSERT(store->phase == LH_STORE_PHASE_IDLE && store->failure.code == 0);
    store->next = store->superblock;
    store->next.sequence++;
    store->next.is_clean = is_clean;
    return lh_store_superblock_write(store, 0, err);
}
