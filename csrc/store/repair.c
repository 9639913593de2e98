/*
 * Repairs a store when it is opened for writing, before lh_store_open() returns it.
 *
 * The bytes that open has read need not be durable. If a process was killed, or its sync failed,
 * between the write of a superblock and the end of its sync, that superblock may be only in the
 * page cache or in the drive's cache: it can be read, but power loss discards it. By then the new
 * session may have overwritten the step before it. A sync alone is not enough, because an earlier
 * failed sync may have left pages that are marked clean but are not on the drive. Therefore the
 * superblock is written once more.
 *
 * Every damaged copy is rewritten from the intact one, so that both copies exist again when the
 * next damage occurs.
 */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "store/store_impl.h"

/* Add a note if a repair failed. The store remains as usable as before. */
static void repair_result(struct lh_store *store, uint32_t file_index, uint64_t offset, int rc)
{
    LH_ASSERT(file_index < store->file_count);
    if (rc < 0)
        lh_store_note_add(store,
                          "%s: the damaged block at offset %" PRIu64 " cannot be repaired: %s",
                          store->files[file_index].path, offset, strerror(-rc));
}

static int write_and_sync(struct lh_store *store, uint64_t offset, const void *buffer,
                          uint64_t bytes)
{
    LH_TRY(lh_store_file_write(store, 0, offset, buffer, bytes, NULL));
    return lh_store_file_sync(store, 0, NULL);
}

static void copies_repair(struct lh_store *store)
{
    for (uint32_t file = 0; file < store->file_count; file++) {
        for (uint32_t copy = 0; copy < store->control.copy_count; copy++) {
            if (store->files[file].header_codes[copy] == 0)
                continue;
            int rc = lh_store_header_write(store, file, copy, NULL);
            if (rc == 0)
                rc = lh_store_file_sync(store, file, NULL);
            repair_result(store, file, LH_STORE_HEADER_OFFSET(copy), rc);
        }
    }
    LH_ASSERT(store->repair_count <= LH_STORE_REPAIR_COUNT_MAX);
    for (uint32_t index = 0; index < store->repair_count; index++) {
        const struct lh_store_repair *repair = &store->repairs[index];
        LH_ASSERT(repair->buffer->base != NULL);
        repair_result(store, 0, repair->offset,
                      write_and_sync(store, repair->offset, repair->buffer->base, repair->bytes));
    }
}

/* Whether a copy is valid and the newest of its place. It must stay until the other one is both. */
static bool is_current(const struct lh_store_superblocks *place, uint32_t copy)
{
    LH_ASSERT(copy < LH_STORE_COPY_COUNT_MAX && place->best < LH_STORE_COPY_COUNT_MAX);
    return place->best >= 0 && place->errors[copy].code == 0 &&
           place->found[copy].sequence == place->found[place->best].sequence;
}

/* Rewrite outdated or damaged copies of the superblock place that was not just written. */
static void place_repair(struct lh_store *store, uint32_t number,
                         const struct lh_store_superblocks *place)
{
    if (place->best < 0)
        return;
    const struct lh_store_superblock *best = &place->found[place->best];
    LH_ASSERT(best->sequence % 2 == number);
    for (uint32_t copy = 0; copy < store->control.copy_count; copy++) {
        if (is_current(place, copy))
            continue;
        uint64_t offset = LH_STORE_SUPERBLOCK_OFFSET(number, copy);
        lh_store_superblock_encode(best, &store->header, store->superblock_block.base);
        repair_result(store, 0, offset,
                      write_and_sync(store, offset, store->superblock_block.base, LH_BLOCK_BYTES));
    }
}

int lh_store_settle(struct lh_store *store, const struct lh_store_superblocks *places,
                    uint32_t chosen, uint64_t rejected_sequence, struct lh_error *err)
{
    LH_ASSERT(!store->is_read_only && store->phase == LH_STORE_PHASE_IDLE);
    LH_ASSERT(chosen < 2 && places[chosen].best >= 0);
    LH_ASSERT(rejected_sequence == 0 || rejected_sequence > store->superblock.sequence);
    for (uint32_t file = 0; file < store->file_count; file++)
        LH_TRY(lh_store_file_sync(store, file, err));
    uint32_t written = chosen;
    store->next = store->superblock;
    if (rejected_sequence != 0) {
        /*
         * Overwrite the rejected superblock by a newer one that names the older step's manifest and
         * witness. Nothing that the older step needs is changed before this superblock is durable.
         */
        written = 1 - chosen;
        store->next.sequence = rejected_sequence + 2;
        LH_ASSERT(store->next.sequence % 2 == written);
    } else if (store->witness_sequence > store->superblock.sequence) {
        /*
         * An interrupted commit left its witness. The next commit must not reuse its sequence
         * number, because a directory restored from a copy made now would look as if it were of
         * the next commit.
         */
        store->next.sequence += 2;
    }
    /*
     * A copy that is damaged or outdated is written first, because power loss may destroy the block
     * that is being written. If both are current, copy 0 stays: a torn copy 1 causes no note.
     */
    uint32_t first_copy = is_current(&places[written], 0) ? 1 : 0;
    LH_TRY(lh_store_superblock_write(store, first_copy, err));
    place_repair(store, 1 - written, &places[1 - written]);
    copies_repair(store);
    return 0;
}
