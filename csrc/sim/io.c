#include "sim/io.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"

#define GARBAGE 0xb5

struct sim_io;

/* A request in flight, and the faults drawn for it. */
struct slot {
    struct lh_sim_transfer transfer;
    struct sim_io *io;
    struct lh_io_request *request; /* NULL: free */
    bool is_done;
    bool is_commit;
    uint64_t moved_bytes;
    int64_t result;
    uint64_t mark;   /* SYNC: what it covers */
    uint32_t crc;    /* WRITE: of the buffer at submit */
    uint64_t offset; /* the actual target, if a write is misdirected */
    uint64_t flip_bit;
    bool is_flipped;
    bool is_stale;   /* READ: returns the durable bytes */
    bool is_lost;    /* WRITE: succeeds without effect; SYNC: covers nothing */
    bool is_dropped; /* SYNC: what it would have covered goes to limbo */
    bool hangs;
};

struct flip {
    const uint8_t *base;
    uint64_t bytes;
};

struct sim_io {
    struct lh_io io; /* first: the caller's pointer is this one */
    struct lh_alloc *alloc;
    struct lh_sim_io_opts opts;
    struct lh_sim_random random;
    bool has_faults;
    struct lh_sim_cap cap;
    struct lh_sim_link links[LH_SIM_DISK_FILE_COUNT_MAX];
    struct slot *slots;
    uint32_t *done; /* slots to be polled, in order */
    uint32_t done_count;
    uint32_t transfer_count; /* in flight, without commit requests */
    const void *commit_owner;
    struct flip flips[LH_SIM_FLIP_COUNT_MAX];
    uint32_t flip_count;
    struct lh_sim_io_stats stats;
};

static bool overlaps(const uint8_t *a, uint64_t a_bytes, const uint8_t *b, uint64_t b_bytes)
{
    return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

/* Check invariant 2 for a request that is being submitted. */
static void races_check(struct sim_io *sim, const struct lh_io_request *request)
{
    for (uint32_t i = 0; i < sim->opts.queue_depth_max; i++) {
        const struct lh_io_request *other = sim->slots[i].request;
        if (!other || sim->slots[i].is_done || other->kind == LH_IO_KIND_SYNC)
            continue;
        bool both_read = request->kind == LH_IO_KIND_READ && other->kind == LH_IO_KIND_READ;
        bool both_write = request->kind == LH_IO_KIND_WRITE && other->kind == LH_IO_KIND_WRITE;
        bool meet_in_file = request->file_index == other->file_index &&
                            request->offset < other->offset + other->bytes &&
                            other->offset < request->offset + request->bytes;
        if (meet_in_file && !both_read)
            lh_sim_world_fail(sim->opts.world,
                              "two requests in flight overlap at offset %" PRIu64
                              " of file %" PRIu32,
                              request->offset, request->file_index);
        if (!both_write && overlaps(request->buffer, request->bytes, other->buffer, other->bytes))
            lh_sim_world_fail(sim->opts.world,
                              "two requests in flight, of file %" PRIu32 " at %" PRIu64
                              " and file %" PRIu32 " at %" PRIu64 ", overlap in memory",
                              request->file_index, request->offset, other->file_index,
                              other->offset);
    }
}

/* Check invariant 4. A new read into the same place removes the flipped bit. */
static void flips_check(struct sim_io *sim, const struct lh_io_request *request)
{
    for (uint32_t i = sim->flip_count; i-- > 0;) {
        const struct flip *flip = &sim->flips[i];
        if (!overlaps(flip->base, flip->bytes, request->buffer, request->bytes))
            continue;
        if (request->kind == LH_IO_KIND_WRITE)
            lh_sim_world_fail(sim->opts.world,
                              "bytes with a flipped bit were used: file %" PRIu32 " at %" PRIu64
                              " is written from their memory",
                              request->file_index, request->offset);
        sim->flips[i] = sim->flips[--sim->flip_count];
    }
}

static void fault_note(struct sim_io *sim, const struct lh_io_request *request,
                       enum lh_sim_fault fault, uint64_t detail)
{
    lh_sim_world_fault(sim->opts.world, fault, request->file_index, request->offset, detail);
}

static bool is_hit(struct sim_io *sim, enum lh_sim_fault fault)
{
    return lh_sim_random_chance(&sim->random, sim->opts.faults.ppm[fault]);
}

static void delays_draw(struct sim_io *sim, struct slot *slot, const struct lh_io_request *request)
{
    const struct lh_sim_faults *faults = &sim->opts.faults;
    if (is_hit(sim, LH_SIM_FAULT_SPIKE)) {
        slot->transfer.extra_ns += faults->spike_ns;
        fault_note(sim, request, LH_SIM_FAULT_SPIKE, faults->spike_ns);
    }
    if (is_hit(sim, LH_SIM_FAULT_REORDER)) {
        uint64_t extra_ns = lh_sim_random_below(&sim->random, faults->reorder_ns + 1);
        slot->transfer.extra_ns += extra_ns;
        fault_note(sim, request, LH_SIM_FAULT_REORDER, extra_ns);
    }
}

/* Draw the errors of a request: its result, if not 0. */
static void errors_draw(struct sim_io *sim, struct slot *slot, const struct lh_io_request *request)
{
    struct lh_sim_disk *disk = sim->opts.disk;
    if (disk && is_hit(sim, LH_SIM_FAULT_DEAD)) {
        disk->files[request->file_index].is_dead = true;
        fault_note(sim, request, LH_SIM_FAULT_DEAD, 0);
    }
    if (disk && disk->files[request->file_index].is_dead)
        slot->result = -EIO;
    if (is_hit(sim, LH_SIM_FAULT_ERROR) && slot->result == 0) {
        slot->result = -EIO;
        fault_note(sim, request, LH_SIM_FAULT_ERROR, 0);
    }
    if (is_hit(sim, LH_SIM_FAULT_SPACE) && request->kind == LH_IO_KIND_WRITE && slot->result == 0) {
        slot->result = -ENOSPC;
        fault_note(sim, request, LH_SIM_FAULT_SPACE, 0);
    }
    if (is_hit(sim, LH_SIM_FAULT_DROP) && disk && request->kind == LH_IO_KIND_SYNC &&
        slot->result == 0) {
        slot->result = -EIO;
        slot->is_dropped = true;
        fault_note(sim, request, LH_SIM_FAULT_DROP, 0);
    }
    if (is_hit(sim, LH_SIM_FAULT_HANG)) {
        slot->hangs = true;
        sim->stats.hang_count++;
        fault_note(sim, request, LH_SIM_FAULT_HANG, 0);
    }
}

/* Draw the faults of a request that reports success. */
static void lies_draw(struct sim_io *sim, struct slot *slot, const struct lh_io_request *request)
{
    struct lh_sim_random *random = &sim->random;
    bool is_read = request->kind == LH_IO_KIND_READ;
    bool is_write = request->kind == LH_IO_KIND_WRITE;
    bool has_data = sim->opts.disk != NULL && slot->result == 0 && !slot->hangs;
    if (is_hit(sim, LH_SIM_FAULT_FLIP) && has_data && is_read) {
        slot->is_flipped = true;
        slot->flip_bit = lh_sim_random_below(random, request->bytes * 8);
        fault_note(sim, request, LH_SIM_FAULT_FLIP, slot->flip_bit);
    }
    if (is_hit(sim, LH_SIM_FAULT_MISDIRECT) && has_data && is_write) {
        uint64_t room = sim->opts.disk->files[request->file_index].bytes - request->bytes;
        slot->offset = LH_BLOCK_BYTES * lh_sim_random_below(random, room / LH_BLOCK_BYTES + 1);
        fault_note(sim, request, LH_SIM_FAULT_MISDIRECT, slot->offset);
    }
    if (is_hit(sim, LH_SIM_FAULT_LOST) && has_data && is_write) {
        slot->is_lost = true;
        fault_note(sim, request, LH_SIM_FAULT_LOST, 0);
    }
    if (is_hit(sim, LH_SIM_FAULT_LIE) && has_data && !is_read && !is_write) {
        slot->is_lost = true;
        fault_note(sim, request, LH_SIM_FAULT_LIE, 0);
    }
    if (is_hit(sim, LH_SIM_FAULT_STALE) && has_data && is_read)
        slot->is_stale = true;
}

/* Draw the faults of a request; the order of the draws is part of the meaning of a seed. */
static void fate_draw(struct sim_io *sim, struct slot *slot, const struct lh_io_request *request)
{
    uint64_t blocks = request->bytes / LH_BLOCK_BYTES;
    if (!sim->has_faults &&
        (!sim->opts.disk || !sim->opts.disk->files[request->file_index].is_dead))
        return;
    delays_draw(sim, slot, request);
    errors_draw(sim, slot, request);
    if (is_hit(sim, LH_SIM_FAULT_SHORT) && request->kind != LH_IO_KIND_SYNC && blocks > 1) {
        slot->transfer.bytes = LH_BLOCK_BYTES * (1 + lh_sim_random_below(&sim->random, blocks - 1));
        fault_note(sim, request, LH_SIM_FAULT_SHORT, slot->transfer.bytes);
    }
    lies_draw(sim, slot, request);
}

static void transfer_done(struct lh_sim_transfer *transfer);

static int sim_submit(struct lh_io *io, struct lh_io_request *request)
{
    struct sim_io *sim = (struct sim_io *)io;
    bool is_sync = request->kind == LH_IO_KIND_SYNC;
    uint32_t index = 0;
    LH_ASSERT(request->file_index < sim->opts.file_count);
    LH_ASSERT(is_sync || (lh_is_aligned(request->offset, LH_BLOCK_BYTES) && request->bytes > 0 &&
                          lh_is_aligned(request->bytes, LH_BLOCK_BYTES) &&
                          lh_is_aligned((uintptr_t)request->buffer, LH_BLOCK_BYTES)));
    if (io->in_flight_count == sim->opts.queue_depth_max)
        return -EAGAIN;
    if (!is_sync) {
        races_check(sim, request);
        flips_check(sim, request);
    }
    while (sim->slots[index].request)
        index++;
    struct slot *slot = &sim->slots[index];
    *slot = (struct slot){.io = sim, .request = request, .offset = request->offset};
    slot->is_commit = request->owner == sim->commit_owner;
    slot->transfer = (struct lh_sim_transfer){
        .direction =
            request->kind == LH_IO_KIND_READ ? LH_SIM_DIRECTION_READ : LH_SIM_DIRECTION_WRITE,
        .bytes = is_sync ? 0 : request->bytes,
        .extra_ns = is_sync ? sim->opts.sync_ns : 0,
        .done = transfer_done,
        .owner = slot,
    };
    io->in_flight_count++;
    if (io->in_flight_count > sim->stats.in_flight_max)
        sim->stats.in_flight_max = io->in_flight_count;
    sim->stats.write_count += request->kind == LH_IO_KIND_WRITE;
    sim->transfer_count += !slot->is_commit;
    if (sim->transfer_count > sim->opts.io_depth)
        lh_sim_world_fail(sim->opts.world,
                          "%" PRIu32 " transfers are in flight, but io_depth is %" PRIu32,
                          sim->transfer_count, sim->opts.io_depth);
    request->result = -EINPROGRESS;
    request->submitted_ns = sim->opts.world->now_ns;
    lh_sim_world_trace(sim->opts.world, LH_SIM_TRACE_SUBMIT,
                       (uint64_t)request->kind << 32 | request->file_index,
                       is_sync ? 0 : request->offset, is_sync ? 0 : request->bytes);
    if (sim->opts.disk && request->kind == LH_IO_KIND_WRITE)
        slot->crc = lh_crc32c(0, request->buffer, request->bytes);
    if (sim->opts.disk && request->kind == LH_IO_KIND_READ)
        memset(request->buffer, GARBAGE, request->bytes);
    if (sim->opts.disk && is_sync)
        slot->mark = lh_sim_disk_mark(sim->opts.disk);
    fate_draw(sim, slot, request);
    if (slot->hangs)
        return 0;
    lh_sim_link_submit(&sim->links[request->file_index % sim->opts.link_count], &slot->transfer);
    return 0;
}

/* Write some blocks of a write that failed, or whose process ended. */
static void blocks_write(struct sim_io *sim, const struct slot *slot, struct lh_sim_random *random)
{
    const struct lh_io_request *request = slot->request;
    if (!sim->opts.disk->files[request->file_index].is_dead)
        lh_sim_disk_write_some(sim->opts.disk, request->file_index, slot->offset, request->buffer,
                               request->bytes, random);
}

static void bytes_read(struct sim_io *sim, const struct slot *slot)
{
    struct lh_io_request *request = slot->request;
    uint8_t *bytes = request->buffer;
    lh_sim_disk_read(sim->opts.disk, request->file_index, slot->offset, bytes, request->bytes);
    if (slot->is_stale && lh_sim_disk_read_stale(sim->opts.disk, request->file_index, slot->offset,
                                                 bytes, request->bytes))
        fault_note(sim, request, LH_SIM_FAULT_STALE, 0);
    if (!slot->is_flipped || sim->flip_count == LH_SIM_FLIP_COUNT_MAX)
        return;
    bytes[slot->flip_bit / 8] ^= (uint8_t)(1U << slot->flip_bit % 8);
    sim->flips[sim->flip_count++] = (struct flip){
        .base = bytes + slot->flip_bit / 8 / LH_BLOCK_BYTES * LH_BLOCK_BYTES,
        .bytes = LH_BLOCK_BYTES,
    };
}

static void bytes_move(struct sim_io *sim, struct slot *slot)
{
    struct lh_io_request *request = slot->request;
    struct lh_sim_disk *disk = sim->opts.disk;
    switch (request->kind) {
    case LH_IO_KIND_READ:
        if (slot->result == 0)
            bytes_read(sim, slot);
        return;
    case LH_IO_KIND_WRITE:
        if (lh_crc32c(0, request->buffer, request->bytes) != slot->crc)
            lh_sim_world_fail(sim->opts.world,
                              "the bytes of a write to file %" PRIu32 " at %" PRIu64
                              " changed while it was in flight",
                              request->file_index, request->offset);
        if (slot->result == 0 && !slot->is_lost)
            lh_sim_disk_write(disk, request->file_index, slot->offset, request->buffer,
                              request->bytes);
        else if (slot->result == -EIO)
            blocks_write(sim, slot, &sim->random);
        return;
    case LH_IO_KIND_SYNC:
        if (slot->is_dropped)
            lh_sim_disk_sync_drop(disk, request->file_index, slot->mark, &sim->random);
        else if (slot->result == 0 && !slot->is_lost)
            lh_sim_disk_sync(disk, request->file_index, slot->mark);
        return;
    }
}

static void transfer_done(struct lh_sim_transfer *transfer)
{
    struct slot *slot = transfer->owner;
    struct sim_io *sim = slot->io;
    struct lh_io_request *request = slot->request;
    slot->moved_bytes += transfer->bytes;
    if (request->kind != LH_IO_KIND_SYNC && slot->moved_bytes < request->bytes) {
        transfer->bytes = request->bytes - slot->moved_bytes;
        transfer->extra_ns = 0;
        lh_sim_link_submit(transfer->link, transfer);
        return;
    }
    if (sim->opts.disk)
        bytes_move(sim, slot);
    if (slot->result == 0 && request->kind == LH_IO_KIND_SYNC)
        sim->stats.sync_count++;
    else if (slot->result == 0)
        sim->stats.bytes[transfer->direction] += request->bytes;
    slot->is_done = true;
    request->result = slot->result;
    request->completed_ns = sim->opts.world->now_ns;
    sim->done[sim->done_count++] = (uint32_t)(slot - sim->slots);
    lh_sim_world_trace(sim->opts.world, LH_SIM_TRACE_DONE,
                       (uint64_t)request->kind << 32 | request->file_index, slot->offset,
                       (uint64_t)-slot->result);
}

static uint32_t sim_poll(struct lh_io *io, struct lh_io_request **done, uint32_t done_max)
{
    struct sim_io *sim = (struct sim_io *)io;
    uint32_t count = sim->done_count < done_max ? sim->done_count : done_max;
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &sim->slots[sim->done[i]];
        done[i] = slot->request;
        sim->transfer_count -= !slot->is_commit;
        slot->request = NULL;
    }
    memmove(sim->done, sim->done + count, (sim->done_count - count) * sizeof(*sim->done));
    sim->done_count -= count;
    LH_ASSERT(io->in_flight_count >= count);
    io->in_flight_count -= count;
    return count;
}

static void sim_destroy(struct lh_io *io)
{
    struct sim_io *sim = (struct sim_io *)io;
    LH_ASSERT(io->in_flight_count == 0);
    lh_free(sim->alloc, sim->slots);
    lh_free(sim->alloc, sim->done);
    lh_free(sim->alloc, sim);
}

static const struct lh_io_ops sim_ops = {
    .version = LH_IO_OPS_VERSION,
    .name = "simulator",
    .submit = sim_submit,
    .poll = sim_poll,
    .destroy = sim_destroy,
};

int lh_sim_io_create(const struct lh_sim_io_opts *opts, struct lh_alloc *alloc,
                     struct lh_io **io_out, struct lh_error *err)
{
    *io_out = NULL;
    LH_ASSERT(opts->link_count >= 1 && opts->link_count <= LH_SIM_DISK_FILE_COUNT_MAX);
    LH_ASSERT(!opts->disk || opts->file_count == opts->link_count);
    struct sim_io *sim = lh_alloc_zeroed(alloc, 1, sizeof(*sim));
    if (!sim)
        return lh_error_set(err, -ENOMEM, "no memory for a simulated backend");
    sim->io.ops = &sim_ops;
    sim->alloc = alloc;
    sim->opts = *opts;
    sim->slots = lh_alloc_zeroed(alloc, opts->queue_depth_max, sizeof(*sim->slots));
    sim->done = lh_alloc_zeroed(alloc, opts->queue_depth_max, sizeof(*sim->done));
    if (!sim->slots || !sim->done) {
        sim_destroy(&sim->io);
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu32 " simulated requests",
                            opts->queue_depth_max);
    }
    lh_sim_random_init(&sim->random, opts->seed, LH_SIM_STREAM_FAULTS);
    for (uint32_t i = 0; i < LH_SIM_FAULT_REQUEST_COUNT; i++)
        sim->has_faults |= opts->faults.ppm[i] > 0;
    lh_sim_cap_init(&sim->cap, opts->cap_bytes_per_s);
    for (uint32_t i = 0; i < opts->link_count; i++)
        lh_sim_link_init(&sim->links[i], opts->world, &opts->links[i],
                         opts->cap_bytes_per_s > 0 ? &sim->cap : NULL);
    *io_out = &sim->io;
    return 0;
}

void lh_sim_io_commit_owner_set(struct lh_io *io, const void *owner)
{
    ((struct sim_io *)io)->commit_owner = owner;
}

void lh_sim_io_crash(struct lh_io *io, struct lh_sim_random *random)
{
    struct sim_io *sim = (struct sim_io *)io;
    for (uint32_t i = 0; i < sim->opts.queue_depth_max; i++) {
        struct slot *slot = &sim->slots[i];
        if (slot->request && !slot->is_done && slot->request->kind == LH_IO_KIND_WRITE &&
            sim->opts.disk)
            blocks_write(sim, slot, random);
        slot->request = NULL;
    }
    for (uint32_t i = 0; i < sim->opts.link_count; i++)
        lh_sim_link_drop(&sim->links[i]);
    sim->done_count = 0;
    sim->transfer_count = 0;
    sim->flip_count = 0;
    sim->stats.hang_count = 0;
    io->in_flight_count = 0;
}

void lh_sim_io_check(struct lh_io *io)
{
    struct sim_io *sim = (struct sim_io *)io;
    for (uint32_t i = 0; i < sim->opts.link_count; i++)
        lh_sim_link_check(&sim->links[i]);
    if (sim->done_count > 0)
        lh_sim_world_fail(sim->opts.world, "%" PRIu32 " finished requests were not polled",
                          sim->done_count);
}

const struct lh_sim_io_stats *lh_sim_io_stats(const struct lh_io *io)
{
    return &((const struct sim_io *)io)->stats;
}

bool lh_sim_io_has_flips(const struct lh_io *io)
{
    return ((const struct sim_io *)io)->flip_count > 0;
}

uint32_t lh_sim_io_flip_count(const struct lh_io *io, const uint8_t *base, uint64_t bytes)
{
    const struct sim_io *sim = (const struct sim_io *)io;
    uint32_t count = 0;
    for (uint32_t i = 0; i < sim->flip_count; i++)
        count += overlaps(sim->flips[i].base, sim->flips[i].bytes, base, bytes);
    return count;
}

void lh_sim_io_flips_forget(struct lh_io *io, const uint8_t *base, uint64_t bytes)
{
    struct sim_io *sim = (struct sim_io *)io;
    for (uint32_t i = sim->flip_count; i-- > 0;) {
        if (overlaps(sim->flips[i].base, sim->flips[i].bytes, base, bytes))
            sim->flips[i] = sim->flips[--sim->flip_count];
    }
}
