#include "sim/io.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

struct sim_io;

struct slot {
    struct lh_sim_transfer transfer;
    struct sim_io *io;
    struct lh_io_request *request; /* NULL: free */
    bool is_done;
    bool is_commit;
};

struct sim_io {
    struct lh_io io; /* the first member, because the caller's pointer points to it */
    struct lh_alloc *alloc;
    struct lh_sim_io_opts opts;
    struct lh_sim_cap cap;
    struct lh_sim_link links[LH_SIM_SSD_COUNT_MAX];
    struct slot *slots;
    uint32_t *done; /* slots to be polled, in order */
    uint32_t done_count;
    uint32_t transfer_count; /* in flight, without commit requests */
    const void *commit_owner;
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
    if (!is_sync)
        races_check(sim, request);
    while (sim->slots[index].request)
        index++;
    struct slot *slot = &sim->slots[index];
    *slot = (struct slot){.io = sim, .request = request};
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
    if (LH_SIM_HOOK_GET(sim->opts.world, true, request_begun, index, request, &slot->transfer))
        lh_sim_link_submit(&sim->links[request->file_index % sim->opts.link_count],
                           &slot->transfer);
    return 0;
}

static void transfer_done(struct lh_sim_transfer *transfer)
{
    struct slot *slot = transfer->owner;
    struct sim_io *sim = slot->io;
    struct lh_io_request *request = slot->request;
    struct lh_sim_world *world = sim->opts.world;
    uint32_t index = (uint32_t)(slot - sim->slots);
    uint64_t offset = request->offset;
    if (LH_SIM_HOOK_GET(world, false, request_continued, index, transfer))
        return;
    request->result = LH_SIM_HOOK_GET(world, 0, request_done, index, &offset);
    if (request->result == 0 && request->kind != LH_IO_KIND_SYNC)
        sim->stats.bytes[transfer->direction] += request->bytes;
    slot->is_done = true;
    request->completed_ns = world->now_ns;
    sim->done[sim->done_count++] = index;
    lh_sim_world_trace(world, LH_SIM_TRACE_DONE,
                       (uint64_t)request->kind << 32 | request->file_index, offset,
                       (uint64_t)-request->result);
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
    LH_ASSERT(opts->link_count >= 1 && opts->link_count <= LH_SIM_SSD_COUNT_MAX);
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

void lh_sim_io_drop(struct lh_io *io)
{
    struct sim_io *sim = (struct sim_io *)io;
    for (uint32_t i = 0; i < sim->opts.queue_depth_max; i++) {
        struct slot *slot = &sim->slots[i];
        if (slot->request && !slot->is_done)
            LH_SIM_HOOK_CALL(sim->opts.world, request_dropped, i);
        slot->request = NULL;
    }
    for (uint32_t i = 0; i < sim->opts.link_count; i++)
        lh_sim_link_drop(&sim->links[i]);
    sim->done_count = 0;
    sim->transfer_count = 0;
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
