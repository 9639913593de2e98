#include "sched/transfer.h"

#include <inttypes.h>
#include <string.h>

#include "base/crc32c.h"
#include "sched/engine_private.h"

void lh_transfer_busy_begin(struct lh_engine *engine)
{
    if (engine->transfers.in_flight++ == 0)
        engine->transfers.busy_since_ns = lh_core_now(engine);
}

void lh_transfer_busy_end(struct lh_engine *engine)
{
    LH_ASSERT(engine->transfers.in_flight > 0);
    if (--engine->transfers.in_flight == 0)
        lh_core_stats(engine, lh_core_step(engine))->ssd_busy_ns +=
            lh_core_now(engine) - engine->transfers.busy_since_ns;
}

void lh_transfer_step_over(struct lh_engine *engine, struct lh_engine_step_stats *stats)
{
    uint64_t now = lh_core_now(engine);
    if (engine->transfers.in_flight == 0)
        return;
    LH_ASSERT(now >= engine->transfers.busy_since_ns);
    stats->ssd_busy_ns += now - engine->transfers.busy_since_ns;
    engine->transfers.busy_since_ns = now;
}

bool lh_transfer_is_idle(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < LH_PRIORITY_COUNT; i++) {
        if (engine->transfers.heads[i])
            return false;
    }
    return engine->transfers.in_flight == 0 && engine->transfers.checks_in_flight == 0;
}

void lh_transfer_submit(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_transfer_queue *queue = &engine->transfers;
    enum lh_priority priority = transfer->priority;
    LH_ASSERT(transfer->bytes > 0 && lh_is_aligned(transfer->bytes, LH_BLOCK_BYTES));
    LH_ASSERT(lh_is_aligned(transfer->offset, LH_BLOCK_BYTES));
    LH_ASSERT(priority < LH_PRIORITY_COUNT && transfer->done && transfer->source);
    LH_ASSERT(transfer->buffer && transfer->link < LH_ENGINE_LINK_COUNT);
    LH_ASSERT(transfer->step <= engine->step + 1);
    LH_ASSERT(transfer->kind == LH_IO_KIND_READ || transfer->source->store);
    /* A step that is aborted partway leaves its writes in the slot. */
    if (transfer->kind == LH_IO_KIND_WRITE)
        lh_store_mark_dirty(transfer->source->store, transfer->extent, transfer->slot);
    transfer->issued_bytes = 0;
    transfer->outstanding = 0;
    transfer->next = NULL;
    if (transfer->step > 0)
        queue->step_counts[transfer->step % 2]++;
    if (queue->tails[priority])
        queue->tails[priority]->next = transfer;
    else
        queue->heads[priority] = transfer;
    queue->tails[priority] = transfer;
}

/* A thread now waits for a transfer that was queued as a prefetch: move it to the demand queue. */
void lh_transfer_raise(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_transfer_queue *queue = &engine->transfers;
    enum lh_priority priority = transfer->priority;
    LH_ASSERT(priority < LH_PRIORITY_COUNT);
    if (priority == LH_PRIORITY_DEMAND)
        return;
    struct lh_transfer *before = NULL;
    struct lh_transfer *at = queue->heads[priority];
    while (at && at != transfer) {
        before = at;
        at = at->next;
    }
    if (!at)
        return; /* all of the transfer's requests are issued */
    if (before)
        before->next = at->next;
    else
        queue->heads[priority] = at->next;
    if (queue->tails[priority] == at)
        queue->tails[priority] = before;
    at->priority = LH_PRIORITY_DEMAND;
    at->next = queue->heads[LH_PRIORITY_DEMAND];
    queue->heads[LH_PRIORITY_DEMAND] = at;
    if (!queue->tails[LH_PRIORITY_DEMAND])
        queue->tails[LH_PRIORITY_DEMAND] = at;
}

static struct lh_transfer *next_transfer(struct lh_transfer_queue *queue)
{
    for (uint32_t i = 0; i < LH_PRIORITY_COUNT; i++) {
        if (queue->heads[i])
            return queue->heads[i];
    }
    return NULL;
}

static const char *path_of(const struct lh_transfer_request *request)
{
    const struct lh_source *source = request->transfer->source;
    LH_ASSERT(request->io.file_index >= source->file_first);
    return source->ops->path(request->engine, request->transfer,
                             request->io.file_index - source->file_first);
}

static const char *link_name(enum lh_engine_link link)
{
    static const char *const names[LH_ENGINE_LINK_COUNT] = {"parameters read",
                                                            "states read",
                                                            "parameters written",
                                                            "states written",
                                                            "commit",
                                                            "gradients written",
                                                            "gradients read",
                                                            "copies in",
                                                            "copies out",
                                                            "saved tensors written",
                                                            "saved tensors read",
                                                            "saved tensors in",
                                                            "saved tensors out",
                                                            "parameters shared"};
    LH_ASSERT(link < LH_ENGINE_LINK_COUNT);
    return names[link];
}

static void request_fail(struct lh_engine *engine, const struct lh_transfer_request *request)
{
    struct lh_error err = {0};
    const struct lh_transfer *transfer = request->transfer;
    lh_error_set(&err, (int)request->io.result,
                 "unit %u, %s: %s, offset %" PRIu64 ", %" PRIu64 " bytes: %s", transfer->unit,
                 link_name(transfer->link), path_of(request), request->io.offset, request->io.bytes,
                 strerror((int)-request->io.result));
    lh_core_fail(engine, &err);
}

static void request_finish(struct lh_engine *engine, struct lh_transfer_request *request)
{
    struct lh_transfer_queue *queue = &engine->transfers;
    struct lh_transfer *transfer = request->transfer;
    LH_ASSERT(transfer->outstanding > 0 && transfer->issued_bytes <= transfer->bytes);
    request->next_free = queue->free_requests;
    queue->free_requests = request;
    if (--transfer->outstanding > 0 || transfer->issued_bytes < transfer->bytes)
        return;
    if (transfer->step > 0) {
        LH_ASSERT(queue->step_counts[transfer->step % 2] > 0);
        queue->step_counts[transfer->step % 2]--;
    }
    transfer->done(engine, transfer);
}

static uint32_t unit_traced(const struct lh_transfer *transfer)
{
    return transfer->source->is_of_units ? transfer->unit : LH_UNIT_NONE;
}

static void request_account(struct lh_engine *engine, const struct lh_transfer_request *request)
{
    const struct lh_transfer *transfer = request->transfer;
    static const uint32_t kinds[LH_ENGINE_LINK_COUNT] = {
        [LH_ENGINE_LINK_PARAM_READ] = LH_ENGINE_TRACE_PARAM_READ,
        [LH_ENGINE_LINK_STATE_READ] = LH_ENGINE_TRACE_STATE_READ,
        [LH_ENGINE_LINK_PARAM_WRITE] = LH_ENGINE_TRACE_WRITE,
        [LH_ENGINE_LINK_STATE_WRITE] = LH_ENGINE_TRACE_WRITE,
        [LH_ENGINE_LINK_GRADIENT_WRITE] = LH_ENGINE_TRACE_WRITE,
        [LH_ENGINE_LINK_GRADIENT_READ] = LH_ENGINE_TRACE_GRADIENT_READ,
        [LH_ENGINE_LINK_SAVED_WRITE] = LH_ENGINE_TRACE_WRITE,
        [LH_ENGINE_LINK_SAVED_READ] = LH_ENGINE_TRACE_SAVED_READ,
    };
    LH_ASSERT(lh_engine_link_is_ssd(transfer->link));
    if (transfer->source->is_of_units)
        lh_core_stats(engine, transfer->step)->bytes[transfer->link] += request->io.bytes;
    lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                  .kind = kinds[transfer->link],
                                  .unit = unit_traced(transfer),
                                  .lane = (uint32_t)(request - engine->transfers.requests),
                                  .start_ns = request->io.submitted_ns,
                                  .end_ns = request->io.completed_ns,
                                  .bytes = request->io.bytes,
                              });
}

static bool moves(const struct lh_engine *engine, const struct lh_transfer *transfer)
{
    const struct lh_source_ops *ops = transfer->source->ops;
    return ops->moves && ops->moves(engine, transfer);
}

static bool records(const struct lh_transfer_request *request, uint64_t offset, uint32_t checksum)
{
    const struct lh_source *source = request->transfer->source;
    LH_ASSERT(request->io.file_index >= source->file_first);
    return source->ops->record &&
           source->ops->record(request->engine, request->transfer, offset,
                               request->io.file_index - source->file_first, checksum);
}

/*
 * Runs on a worker: verify each block of what was read that has a checksum, and move the block to
 * where it belongs while it is in the cache.
 */
static void check_run(struct lh_exec_job *job)
{
    struct lh_transfer_request *request = job->context;
    struct lh_engine *engine = request->engine;
    const struct lh_transfer *transfer = request->transfer;
    const struct lh_source_ops *ops = transfer->source->ops;
    const uint32_t *expected = ops->checksums(engine, transfer, request->offset);
    const bool has_moves = moves(engine, transfer);
    const uint8_t *bytes = request->io.buffer;
    request->bad_offset = UINT64_MAX;
    for (uint64_t done = 0; done < request->io.bytes; done += LH_CHECKSUM_BYTES) {
        uint64_t length = lh_min_u64(LH_CHECKSUM_BYTES, request->io.bytes - done);
        uint64_t block = done / LH_CHECKSUM_BYTES;
        uint32_t actual =
            engine->opts.verify ? lh_crc32c(0, bytes + done, length) : expected[block];
        uint32_t wanted = expected[block];
        if (actual != wanted && !records(request, request->offset + done, actual)) {
            request->bad_offset = request->offset + done;
            request->crc_expected = wanted;
            request->crc_actual = actual;
            return;
        }
        if (has_moves)
            ops->move(engine, transfer, request->offset, request->offset + done, length);
    }
}

static void check_done(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_transfer_request *request = job->exec.context;
    LH_ASSERT(engine->transfers.checks_in_flight > 0);
    lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                  .kind = LH_ENGINE_TRACE_CHECK,
                                  .unit = unit_traced(request->transfer),
                                  .lane = job->exec.worker_index,
                                  .start_ns = job->exec.started_ns,
                                  .end_ns = job->exec.ended_ns,
                                  .bytes = job->exec.work_bytes,
                              });
    engine->transfers.checks_in_flight--;
    if (request->bad_offset == UINT64_MAX) {
        request_finish(engine, request);
        return;
    }
    struct lh_error err = {0};
    lh_error_set(&err, -EILSEQ,
                 "unit %u: %s from %s have a wrong checksum at byte %" PRIu64
                 " of the unit (file offset %" PRIu64 "): %08x, expected %08x%s",
                 request->transfer->unit, link_name(request->transfer->link), path_of(request),
                 request->bad_offset, request->io.offset + (request->bad_offset - request->offset),
                 request->crc_actual, request->crc_expected,
                 request->transfer->source->ops->advice);
    lh_core_fail(engine, &err);
}

static void request_done(struct lh_engine *engine, struct lh_io_request *io)
{
    struct lh_transfer_request *request = io->owner;
    const struct lh_transfer *transfer = request->transfer;
    LH_ASSERT(request->engine == engine && transfer->outstanding > 0);
    lh_transfer_busy_end(engine);
    if (io->result < 0) {
        request_fail(engine, request);
        return;
    }
    request_account(engine, request);
    if (io->least_bytes > 0) /* the file ends inside this request */
        memset((uint8_t *)io->buffer + io->least_bytes, 0, io->bytes - io->least_bytes);
    /* The update verifies R, M and V, when they are in the cache anyway. */
    bool is_checked = transfer->link == LH_ENGINE_LINK_PARAM_READ ||
                      transfer->link == LH_ENGINE_LINK_GRADIENT_READ ||
                      transfer->link == LH_ENGINE_LINK_SAVED_READ;
    if ((engine->opts.verify && is_checked) || moves(engine, transfer)) {
        request->job = (struct lh_job){
            .exec = {.run = check_run, .context = request, .work_bytes = io->bytes},
            .done = check_done,
        };
        engine->transfers.checks_in_flight++;
        lh_job_submit(engine, &request->job);
        return;
    }
    request_finish(engine, request);
}

/* Issue the next requests of a transfer: those of one mapped range, or as many as are available. */
static void transfer_issue(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_transfer_queue *queue = &engine->transfers;
    const struct lh_source *source = transfer->source;
    struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
    LH_ASSERT(transfer->issued_bytes < transfer->bytes);
    uint64_t at = transfer->offset + transfer->issued_bytes;
    /* End on a multiple of transfer_bytes, so that checks always cover whole checksum blocks. */
    uint64_t room = engine->opts.transfer_bytes - at % engine->opts.transfer_bytes;
    uint64_t bytes = lh_min_u64(room, transfer->bytes - transfer->issued_bytes);
    int count = source->ops->map(engine, transfer, at, bytes, pieces);
    LH_ASSERT(count > 0 && count <= LH_STORE_PIECE_COUNT_MAX);
    for (const struct lh_store_piece *piece = pieces; piece < pieces + count; piece++) {
        struct lh_transfer_request *request = queue->free_requests;
        if (!request || queue->in_flight >= engine->opts.io_depth)
            break;
        uint64_t offset = transfer->issued_bytes;
        LH_ASSERT(piece->buffer_offset + at == transfer->offset + offset);
        LH_ASSERT(piece->bytes > 0 && offset + piece->bytes <= transfer->bytes);
        queue->free_requests = request->next_free;
        request->transfer = transfer;
        request->offset = transfer->offset + offset;
        request->io = (struct lh_io_request){
            .kind = transfer->kind,
            .file_index = piece->file_index + source->file_first,
            .buffer = transfer->buffer + offset,
            .bytes = piece->bytes,
            .offset = piece->file_offset,
            .least_bytes = source->ops->least_bytes ? source->ops->least_bytes(engine, piece) : 0,
            .owner = request,
        };
        transfer->issued_bytes += piece->bytes;
        transfer->outstanding++;
        lh_transfer_busy_begin(engine);
        int rc = engine->io->ops->submit(engine->io, &request->io);
        LH_ASSERT(rc == 0); /* in_flight is below the queue's depth */
    }
}

bool lh_transfer_pump(struct lh_engine *engine)
{
    struct lh_transfer_queue *queue = &engine->transfers;
    bool issued = false;
    while (queue->free_requests && queue->in_flight < engine->opts.io_depth) {
        struct lh_transfer *transfer = next_transfer(queue);
        struct lh_error err = {0};
        if (!transfer)
            break;
        /* Before the first write, a store with one slot records that it is being overwritten. */
        if (transfer->kind == LH_IO_KIND_WRITE &&
            lh_store_write_begin(transfer->source->store, &err) < 0) {
            lh_core_fail(engine, &err);
            break;
        }
        transfer_issue(engine, transfer);
        issued = true;
        if (transfer->issued_bytes == transfer->bytes) {
            enum lh_priority priority = transfer->priority;
            LH_ASSERT(queue->heads[priority] == transfer);
            queue->heads[priority] = transfer->next;
            if (!transfer->next)
                queue->tails[priority] = NULL;
            transfer->next = NULL;
        }
    }
    if (issued && engine->io->ops->flush)
        engine->io->ops->flush(engine->io);
    return issued;
}

bool lh_transfer_poll(struct lh_engine *engine)
{
    struct lh_io_request *done[32];
    uint32_t count = engine->io->ops->poll(engine->io, done, LH_COUNT_OF(done));
    for (uint32_t i = 0; i < count; i++) {
        const struct lh_io_owner *owner = done[i]->owner;
        LH_ASSERT(owner->done != NULL);
        owner->done(engine, done[i]);
    }
    return count > 0;
}

bool lh_transfer_drain(struct lh_engine *engine)
{
    struct lh_io_request *done[32];
    uint32_t count = engine->io->ops->poll(engine->io, done, LH_COUNT_OF(done));
    LH_ASSERT(engine->transfers.in_flight >= count);
    engine->transfers.in_flight -= count;
    return count > 0;
}

static int store_map(struct lh_engine *engine, const struct lh_transfer *transfer, uint64_t offset,
                     uint64_t bytes, struct lh_store_piece *pieces)
{
    (void)engine;
    return lh_store_map(transfer->source->store, transfer->extent, transfer->slot, offset, bytes,
                        pieces, LH_STORE_PIECE_COUNT_MAX);
}

static const uint32_t *store_checksums(struct lh_engine *engine, const struct lh_transfer *transfer,
                                       uint64_t offset)
{
    uint32_t count = 0;
    (void)engine;
    const uint32_t *checksums =
        lh_store_checksums(transfer->source->store, transfer->extent, transfer->slot, &count);
    LH_ASSERT(offset / LH_CHECKSUM_BYTES < count);
    return checksums + offset / LH_CHECKSUM_BYTES;
}

static const char *store_path(const struct lh_engine *engine, const struct lh_transfer *transfer,
                              uint32_t file)
{
    (void)engine;
    return lh_store_file_path(transfer->source->store, file);
}

const struct lh_source_ops lh_transfer_store_ops = {
    .map = store_map,
    .checksums = store_checksums,
    .path = store_path,
    .advice = "",
};

int lh_transfer_create(struct lh_engine *engine, struct lh_error *err)
{
    struct lh_transfer_queue *queue = &engine->transfers;
    uint64_t count = 4 * (uint64_t)engine->opts.io_depth;
    queue->store = (struct lh_source){
        .ops = &lh_transfer_store_ops, .store = engine->store, .is_of_units = true};
    queue->requests = lh_alloc_zeroed(engine->alloc, count, sizeof(*queue->requests));
    if (!queue->requests)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " I/O requests", count);
    for (uint64_t i = 0; i < count; i++) {
        queue->requests[i].owner.done = request_done;
        queue->requests[i].engine = engine;
        queue->requests[i].next_free = queue->free_requests;
        queue->free_requests = &queue->requests[i];
    }
    return 0;
}

void lh_transfer_destroy(struct lh_engine *engine)
{
    lh_free(engine->alloc, engine->transfers.requests);
}
