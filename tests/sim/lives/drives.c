#include "lives/drives.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "lives/lives.h"
#include "sched/engine_private.h"

#define GARBAGE 0xb5

void lh_sim_drives_init(struct lh_sim_drives *drives, struct lh_sim_disk *disk, uint32_t slot_count,
                        struct lh_alloc *alloc)
{
    *drives = (struct lh_sim_drives){.disk = disk};
    drives->slots = lh_alloc_zeroed(alloc, slot_count, sizeof(*drives->slots));
    LH_ASSERT(drives->slots != NULL);
}

void lh_sim_drives_deinit(struct lh_sim_drives *drives, struct lh_alloc *alloc)
{
    lh_free(alloc, drives->slots);
    drives->slots = NULL;
}

void lh_sim_drives_restart(struct lh_sim_drives *drives, const struct lh_sim_faults *faults,
                           uint64_t seed)
{
    drives->faults = faults ? *faults : (struct lh_sim_faults){0};
    lh_sim_random_init(&drives->random, seed, LH_SIM_STREAM_FAULTS);
    drives->has_faults = false;
    for (uint32_t i = 0; i < LH_SIM_FAULT_REQUEST_COUNT; i++)
        drives->has_faults |= drives->faults.ppm[i] > 0;
    drives->flip_count = 0;
    drives->write_count = 0;
    drives->hang_count = 0;
}

static bool overlaps(const uint8_t *a, uint64_t a_bytes, const uint8_t *b, uint64_t b_bytes)
{
    return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

/* Check invariant 2. A new read into the same place removes the flipped bit. */
static void flips_check(struct lh_sim_drives *drives, const struct lh_io_request *request)
{
    for (uint32_t i = drives->flip_count; i-- > 0;) {
        const struct lh_sim_flip *flip = &drives->flips[i];
        if (!overlaps(flip->base, flip->bytes, request->buffer, request->bytes))
            continue;
        if (request->kind == LH_IO_KIND_WRITE)
            lh_sim_world_fail(drives->disk->world,
                              "bytes with a flipped bit were used: file %" PRIu32 " at %" PRIu64
                              " is written from their memory",
                              request->file_index, request->offset);
        drives->flips[i] = drives->flips[--drives->flip_count];
    }
}

static void fault_note(struct lh_sim_drives *drives, const struct lh_io_request *request,
                       enum lh_sim_fault fault, uint64_t detail)
{
    lh_sim_fault_add(drives->disk->faults, fault, request->file_index, request->offset, detail);
}

static bool is_hit(struct lh_sim_drives *drives, enum lh_sim_fault fault)
{
    return lh_sim_random_chance(&drives->random, drives->faults.ppm[fault]);
}

static void delays_draw(struct lh_sim_drives *drives, const struct lh_io_request *request,
                        struct lh_sim_transfer *transfer)
{
    const struct lh_sim_faults *faults = &drives->faults;
    if (is_hit(drives, LH_SIM_FAULT_SPIKE)) {
        transfer->extra_ns += faults->spike_ns;
        fault_note(drives, request, LH_SIM_FAULT_SPIKE, faults->spike_ns);
    }
    if (is_hit(drives, LH_SIM_FAULT_REORDER)) {
        uint64_t extra_ns = lh_sim_random_below(&drives->random, faults->reorder_ns + 1);
        transfer->extra_ns += extra_ns;
        fault_note(drives, request, LH_SIM_FAULT_REORDER, extra_ns);
    }
}

/* Draw the errors of a request, which set the request's result. */
static void errors_draw(struct lh_sim_drives *drives, struct lh_sim_drives_slot *slot)
{
    const struct lh_io_request *request = slot->request;
    struct lh_sim_disk *disk = drives->disk;
    if (is_hit(drives, LH_SIM_FAULT_DEAD)) {
        disk->files[request->file_index].is_dead = true;
        fault_note(drives, request, LH_SIM_FAULT_DEAD, 0);
    }
    if (disk->files[request->file_index].is_dead)
        slot->result = -EIO;
    if (is_hit(drives, LH_SIM_FAULT_ERROR) && slot->result == 0) {
        slot->result = -EIO;
        fault_note(drives, request, LH_SIM_FAULT_ERROR, 0);
    }
    if (is_hit(drives, LH_SIM_FAULT_SPACE) && request->kind == LH_IO_KIND_WRITE &&
        slot->result == 0) {
        slot->result = -ENOSPC;
        fault_note(drives, request, LH_SIM_FAULT_SPACE, 0);
    }
    if (is_hit(drives, LH_SIM_FAULT_DROP) && request->kind == LH_IO_KIND_SYNC &&
        slot->result == 0) {
        slot->result = -EIO;
        slot->is_dropped = true;
        fault_note(drives, request, LH_SIM_FAULT_DROP, 0);
    }
    if (is_hit(drives, LH_SIM_FAULT_HANG)) {
        slot->hangs = true;
        drives->hang_count++;
        fault_note(drives, request, LH_SIM_FAULT_HANG, 0);
    }
}

/* Draw the faults of a request that reports success. */
static void lies_draw(struct lh_sim_drives *drives, struct lh_sim_drives_slot *slot)
{
    const struct lh_io_request *request = slot->request;
    struct lh_sim_random *random = &drives->random;
    bool is_read = request->kind == LH_IO_KIND_READ;
    bool is_write = request->kind == LH_IO_KIND_WRITE;
    bool has_data = slot->result == 0 && !slot->hangs;
    if (is_hit(drives, LH_SIM_FAULT_FLIP) && has_data && is_read) {
        slot->is_flipped = true;
        slot->flip_bit = lh_sim_random_below(random, request->bytes * 8);
        fault_note(drives, request, LH_SIM_FAULT_FLIP, slot->flip_bit);
    }
    if (is_hit(drives, LH_SIM_FAULT_MISDIRECT) && has_data && is_write) {
        uint64_t room = drives->disk->files[request->file_index].bytes - request->bytes;
        slot->offset = LH_BLOCK_BYTES * lh_sim_random_below(random, room / LH_BLOCK_BYTES + 1);
        fault_note(drives, request, LH_SIM_FAULT_MISDIRECT, slot->offset);
    }
    if (is_hit(drives, LH_SIM_FAULT_LOST) && has_data && is_write) {
        slot->is_lost = true;
        fault_note(drives, request, LH_SIM_FAULT_LOST, 0);
    }
    if (is_hit(drives, LH_SIM_FAULT_LIE) && has_data && !is_read && !is_write) {
        slot->is_lost = true;
        fault_note(drives, request, LH_SIM_FAULT_LIE, 0);
    }
    if (is_hit(drives, LH_SIM_FAULT_STALE) && has_data && is_read)
        slot->is_stale = true;
}

/* Draw the faults of a request; the order of the draws is part of the meaning of a seed. */
static void fate_draw(struct lh_sim_drives *drives, struct lh_sim_drives_slot *slot,
                      struct lh_sim_transfer *transfer)
{
    const struct lh_io_request *request = slot->request;
    uint64_t blocks = request->bytes / LH_BLOCK_BYTES;
    if (!drives->has_faults && !drives->disk->files[request->file_index].is_dead)
        return;
    delays_draw(drives, request, transfer);
    errors_draw(drives, slot);
    if (is_hit(drives, LH_SIM_FAULT_SHORT) && request->kind != LH_IO_KIND_SYNC && blocks > 1) {
        transfer->bytes = LH_BLOCK_BYTES * (1 + lh_sim_random_below(&drives->random, blocks - 1));
        fault_note(drives, request, LH_SIM_FAULT_SHORT, transfer->bytes);
    }
    lies_draw(drives, slot);
}

/* Write some blocks of a write that failed, or whose process ended. */
static void blocks_write(struct lh_sim_drives *drives, const struct lh_sim_drives_slot *slot,
                         struct lh_sim_random *random)
{
    const struct lh_io_request *request = slot->request;
    if (!drives->disk->files[request->file_index].is_dead)
        lh_sim_disk_write_some(drives->disk, request->file_index, slot->offset, request->buffer,
                               request->bytes, random);
}

static void bytes_read(struct lh_sim_drives *drives, const struct lh_sim_drives_slot *slot)
{
    struct lh_io_request *request = slot->request;
    uint8_t *bytes = request->buffer;
    lh_sim_disk_read(drives->disk, request->file_index, slot->offset, bytes, request->bytes);
    if (slot->is_stale && lh_sim_disk_read_stale(drives->disk, request->file_index, slot->offset,
                                                 bytes, request->bytes))
        fault_note(drives, request, LH_SIM_FAULT_STALE, 0);
    if (!slot->is_flipped || drives->flip_count == LH_SIM_FLIP_COUNT_MAX)
        return;
    bytes[slot->flip_bit / 8] ^= (uint8_t)(1U << slot->flip_bit % 8);
    drives->flips[drives->flip_count++] = (struct lh_sim_flip){
        .base = bytes + slot->flip_bit / 8 / LH_BLOCK_BYTES * LH_BLOCK_BYTES,
        .bytes = LH_BLOCK_BYTES,
    };
}

static void bytes_move(struct lh_sim_drives *drives, struct lh_sim_drives_slot *slot)
{
    struct lh_io_request *request = slot->request;
    struct lh_sim_disk *disk = drives->disk;
    switch (request->kind) {
    case LH_IO_KIND_READ:
        if (slot->result == 0)
            bytes_read(drives, slot);
        return;
    case LH_IO_KIND_WRITE:
        if (lh_crc32c(0, request->buffer, request->bytes) != slot->crc)
            lh_sim_world_fail(drives->disk->world,
                              "the bytes of a write to file %" PRIu32 " at %" PRIu64
                              " changed while it was in flight",
                              request->file_index, request->offset);
        if (slot->result == 0 && !slot->is_lost)
            lh_sim_disk_write(disk, request->file_index, slot->offset, request->buffer,
                              request->bytes);
        else if (slot->result == -EIO)
            blocks_write(drives, slot, &drives->random);
        return;
    case LH_IO_KIND_SYNC:
        if (slot->is_dropped)
            lh_sim_disk_sync_drop(disk, request->file_index, slot->mark, &drives->random);
        else if (slot->result == 0 && !slot->is_lost)
            lh_sim_disk_sync(disk, request->file_index, slot->mark);
        return;
    }
}

static struct lh_sim_drives *of(void *context)
{
    return &((struct lh_sim_lives *)context)->drives;
}

bool lh_sim_drives_request_begun(void *context, uint32_t index, struct lh_io_request *request,
                                 struct lh_sim_transfer *transfer)
{
    struct lh_sim_drives *drives = of(context);
    struct lh_sim_drives_slot *slot = &drives->slots[index];
    *slot = (struct lh_sim_drives_slot){.request = request, .offset = request->offset};
    switch (request->kind) {
    case LH_IO_KIND_READ:
        flips_check(drives, request);
        memset(request->buffer, GARBAGE, request->bytes);
        break;
    case LH_IO_KIND_WRITE:
        flips_check(drives, request);
        drives->write_count++;
        slot->crc = lh_crc32c(0, request->buffer, request->bytes);
        break;
    case LH_IO_KIND_SYNC:
        slot->mark = lh_sim_disk_mark(drives->disk);
        break;
    }
    fate_draw(drives, slot, transfer);
    return !slot->hangs;
}

bool lh_sim_drives_request_continued(void *context, uint32_t index,
                                     struct lh_sim_transfer *transfer)
{
    struct lh_sim_drives_slot *slot = &of(context)->slots[index];
    slot->moved_bytes += transfer->bytes;
    if (slot->request->kind == LH_IO_KIND_SYNC || slot->moved_bytes >= slot->request->bytes)
        return false;
    transfer->bytes = slot->request->bytes - slot->moved_bytes;
    transfer->extra_ns = 0;
    lh_sim_link_submit(transfer->link, transfer);
    return true;
}

int lh_sim_drives_request_done(void *context, uint32_t index, uint64_t *offset)
{
    struct lh_sim_drives *drives = of(context);
    struct lh_sim_drives_slot *slot = &drives->slots[index];
    bytes_move(drives, slot);
    *offset = slot->offset;
    return slot->result;
}

void lh_sim_drives_request_dropped(void *context, uint32_t index)
{
    struct lh_sim_drives *drives = of(context);
    struct lh_sim_drives_slot *slot = &drives->slots[index];
    if (slot->request->kind == LH_IO_KIND_WRITE)
        blocks_write(drives, slot, &((struct lh_sim_lives *)context)->crash_random);
}

uint32_t lh_sim_drives_flip_count(const struct lh_sim_drives *drives, const uint8_t *base,
                                  uint64_t bytes)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < drives->flip_count; i++)
        count += overlaps(drives->flips[i].base, drives->flips[i].bytes, base, bytes);
    return count;
}

/* Forget flipped bits in [base, base + bytes), which has been overwritten. */
static void flips_forget(struct lh_sim_drives *drives, const uint8_t *base, uint64_t bytes)
{
    for (uint32_t i = drives->flip_count; i-- > 0;) {
        if (overlaps(drives->flips[i].base, drives->flips[i].bytes, base, bytes))
            drives->flips[i] = drives->flips[--drives->flip_count];
    }
}

void lh_sim_drives_overwritten_forget(struct lh_sim_drives *drives, const struct lh_engine *engine)
{
    /* A large model has tens of thousands of slabs, and this runs after each event. */
    if (drives->flip_count == 0)
        return;
    for (uint32_t i = 0; i < engine->budget.slab_count; i++) {
        const struct lh_slab *slab = &engine->slabs[i];
        if (slab->is_lent)
            flips_forget(drives, slab->memory, engine->budget.slab_bytes);
        if (slab->is_lent || slab->chunk == LH_CHUNK_NONE)
            continue;
        const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
        const struct lh_unit *unit = &engine->units[chunk->unit];
        for (uint32_t j = 0; j < LH_STATE_ARRAY_COUNT; j++) {
            uint64_t bytes = lh_unit_state_bytes(&unit->states[j], chunk->count);
            if (slab->is_zero[j] && bytes > 0)
                flips_forget(drives, lh_slab_array(slab, unit, j, chunk->count), bytes);
        }
    }
}
