/* Requests: ranges of extents cut into I/O requests, issued by priority, checked when read. */
#include <inttypes.h>
#include <string.h>

#include "base/crc32c.h"
#include "sched/engine_private.h"

void lh_io_busy_begin(struct lh_engine *engine)
{
    if (engine->io_in_flight++ == 0)
        engine->io_busy_since_ns = lh_engine_now(engine);
}

void lh_io_busy_end(struct lh_engine *engine)
{
    LH_ASSERT(engine->io_in_flight > 0);
    if (--engine->io_in_flight == 0)
        lh_step_stats(engine, lh_step_current(engine))->ssd_busy_ns +=
            lh_engine_now(engine) - engine->io_busy_since_ns;
}

void lh_transfer_submit(struct lh_engine *engine, struct lh_transfer *transfer)
{
    LH_ASSERT(transfer->bytes > 0 && lh_is_aligned(transfer->bytes, LH_BLOCK_BYTES));
    LH_ASSERT(lh_is_aligned(transfer->offset, LH_BLOCK_BYTES));
    LH_ASSERT(transfer->priority < LH_PRIORITY_COUNT);
    transfer->issued_bytes = 0;
    transfer->outstanding = 0;
    transfer->next = NULL;
    if (transfer->step > 0)
        engine->step_transfers[transfer->step % 2]++;
    enum lh_priority priority = transfer->priority;
    if (engine->queue_tails[priority])
        engine->queue_tails[priority]->next = transfer;
    else
        engine->queue_heads[priority] = transfer;
    engine->queue_tails[priority] = transfer;
}

/* Somebody now waits for a transfer that was queued as a prefetch: move it to the demand queue. */
void lh_transfer_raise(struct lh_engine *engine, struct lh_transfer *transfer)
{
    enum lh_priority priority = transfer->priority;
    if (priority == LH_PRIORITY_DEMAND)
        return;
    struct lh_transfer *before = NULL;
    struct lh_transfer *at = engine->queue_heads[priority];
    while (at && at != transfer) {
        before = at;
        at = at->next;
    }
    if (!at)
        return; /* all of it is issued */
    if (before)
        before->next = at->next;
    else
        engine->queue_heads[priority] = at->next;
    if (engine->queue_tails[priority] == at)
        engine->queue_tails[priority] = before;
    at->priority = LH_PRIORITY_DEMAND;
    at->next = engine->queue_heads[LH_PRIORITY_DEMAND];
    engine->queue_heads[LH_PRIORITY_DEMAND] = at;
    if (!engine->queue_tails[LH_PRIORITY_DEMAND])
        engine->queue_tails[LH_PRIORITY_DEMAND] = at;
}

static struct lh_transfer *next_transfer(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < LH_PRIORITY_COUNT; i++) {
        if (engine->queue_heads[i])
            return engine->queue_heads[i];
    }
    return NULL;
}

static struct lh_store *store_of(const struct lh_transfer *transfer, const struct lh_engine *engine)
{
    return transfer->saved ? engine->opts.saved.store : engine->store;
}

/* NULL: it is of a store. */
static const struct lh_in_place_unit *in_place_of(const struct lh_transfer *transfer,
                                                  const struct lh_engine *engine)
{
    bool is_load = !transfer->saved && transfer->extent == LH_ENGINE_EXTENT_NONE;
    return is_load ? engine->units[transfer->unit].in_place : NULL;
}

/* Where its files begin among io's. */
static uint32_t file_first(const struct lh_transfer *transfer, const struct lh_engine *engine)
{
    if (in_place_of(transfer, engine))
        return engine->opts.in_place.file_first;
    return transfer->saved ? engine->opts.saved.file_first : 0;
}

static const char *path_of(const struct lh_engine_request *request)
{
    const struct lh_engine *engine = request->engine;
    uint32_t file = request->io.file_index - file_first(request->transfer, engine);
    if (in_place_of(request->transfer, engine))
        return engine->opts.in_place.files[file].path;
    return lh_store_file_path(store_of(request->transfer, engine), file);
}

static void request_start(struct lh_engine *engine, struct lh_transfer *transfer,
                          const struct lh_store_piece *piece)
{
    struct lh_engine_request *request = engine->free_requests;
    LH_ASSERT(request != NULL);
    engine->free_requests = request->next_free;
    uint64_t offset = transfer->issued_bytes;
    request->transfer = transfer;
    request->offset = transfer->offset + offset;
    request->io = (struct lh_io_request){
        .kind = transfer->kind,
        .file_index = piece->file_index + file_first(transfer, engine),
        .buffer = transfer->buffer + offset,
        .bytes = piece->bytes,
        .offset = piece->file_offset,
        .least_bytes = in_place_of(transfer, engine) ? lh_in_place_least_bytes(engine, piece) : 0,
        .owner = request,
    };
    transfer->issued_bytes += piece->bytes;
    transfer->outstanding++;
    lh_io_busy_begin(engine);
    int rc = engine->io->ops->submit(engine->io, &request->io);
    LH_ASSERT(rc == 0); /* io_in_flight is below the queue's depth */
}

/*
 * Issue the next requests of transfer: at most one mapped range, as many pieces as there are
 * requests.
 */
static void transfer_issue(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
    uint64_t at = transfer->offset + transfer->issued_bytes;
    const struct lh_in_place_unit *in_place = in_place_of(transfer, engine);
    if (in_place) {
        pieces[0] = lh_in_place_map(engine, in_place, at);
        request_start(engine, transfer, &pieces[0]);
        return;
    }
    /* End on a multiple of transfer_bytes, so that checks always cover whole checksum blocks. */
    uint64_t room = engine->opts.transfer_bytes - at % engine->opts.transfer_bytes;
    uint64_t bytes = lh_min_u64(room, transfer->bytes - transfer->issued_bytes);
    int count = lh_store_map(store_of(transfer, engine), transfer->extent, transfer->slot, at,
                             bytes, pieces, LH_STORE_PIECE_COUNT_MAX);
    LH_ASSERT(count > 0);
    for (int i = 0; i < count; i++) {
        if (!engine->free_requests || engine->io_in_flight >= engine->opts.io_depth)
            break;
        LH_ASSERT(pieces[i].buffer_offset + at == transfer->offset + transfer->issued_bytes);
        request_start(engine, transfer, &pieces[i]);
    }
}

bool lh_transfer_pump(struct lh_engine *engine)
{
    bool issued = false;
    while (engine->free_requests && engine->io_in_flight < engine->opts.io_depth) {
        struct lh_transfer *transfer = next_transfer(engine);
        if (!transfer)
            break;
        transfer_issue(engine, transfer);
        issued = true;
        if (transfer->issued_bytes == transfer->bytes) {
            enum lh_priority priority = transfer->priority;
            engine->queue_heads[priority] = transfer->next;
            if (!transfer->next)
                engine->queue_tails[priority] = NULL;
            transfer->next = NULL;
        }
    }
    if (issued && engine->io->ops->flush)
        engine->io->ops->flush(engine->io);
    return issued;
}

static const struct lh_unit *moved_unit(const struct lh_transfer *transfer,
                                        const struct lh_engine *engine)
{
    bool moves = in_place_of(transfer, engine) && engine->units[transfer->unit].in_place_moves;
    return moves ? &engine->units[transfer->unit] : NULL;
}

/*
 * On a worker: compare each checksum block of what was read, and move it to where it belongs while
 * it is in the cache.
 */
static void check_run(struct lh_exec_job *job)
{
    struct lh_engine_request *request = job->context;
    const struct lh_transfer *transfer = request->transfer;
    uint32_t count = 0;
    const struct lh_in_place_unit *in_place = in_place_of(transfer, request->engine);
    const uint32_t *expected = in_place
                                   ? lh_in_place_checksums(in_place, request->offset)
                                   : lh_store_checksums(store_of(transfer, request->engine),
                                                        transfer->extent, transfer->slot, &count) +
                                         request->offset / LH_CHECKSUM_BYTES;
    const struct lh_unit *moved = moved_unit(transfer, request->engine);
    const uint8_t *bytes = request->io.buffer;
    request->bad_offset = UINT64_MAX;
    for (uint64_t done = 0; done < request->io.bytes; done += LH_CHECKSUM_BYTES) {
        uint64_t length = lh_min_u64(LH_CHECKSUM_BYTES, request->io.bytes - done);
        uint64_t block = done / LH_CHECKSUM_BYTES;
        uint32_t actual =
            request->engine->opts.verify ? lh_crc32c(0, bytes + done, length) : expected[block];
        if (actual != expected[block]) {
            request->bad_offset = request->offset + done;
            request->crc_expected = expected[block];
            request->crc_actual = actual;
            return;
        }
        if (moved)
            lh_in_place_move(moved, request->offset, request->offset + done, length);
    }
}

static const char *link_name(enum lh_engine_link link)
{
    static const char *const names[LH_ENGINE_LINK_COUNT] = {
        "parameters read",  "states read",           "parameters written", "states written",
        "commit",           "gradients written",     "gradients read",     "copies in",
        "copies out",       "saved tensors written", "saved tensors read", "saved tensors in",
        "saved tensors out"};
    return names[link];
}

static void request_fail(struct lh_engine *engine, const struct lh_engine_request *request)
{
    struct lh_error err = {0};
    const struct lh_transfer *transfer = request->transfer;
    lh_error_set(&err, (int)request->io.result,
                 "unit %u, %s: %s, offset %" PRIu64 ", %" PRIu64 " bytes: %s", transfer->unit,
                 link_name(transfer->link), path_of(request), request->io.offset, request->io.bytes,
                 strerror((int)-request->io.result));
    lh_engine_fail(engine, &err);
}

static void request_finish(struct lh_engine *engine, struct lh_engine_request *request)
{
    struct lh_transfer *transfer = request->transfer;
    LH_ASSERT(transfer->outstanding > 0);
    request->next_free = engine->free_requests;
    engine->free_requests = request;
    if (--transfer->outstanding > 0 || transfer->issued_bytes < transfer->bytes)
        return;
    if (transfer->step > 0) {
        LH_ASSERT(engine->step_transfers[transfer->step % 2] > 0);
        engine->step_transfers[transfer->step % 2]--;
    }
    if (transfer->saved)
        lh_saved_transferred(engine, transfer->saved);
    else if (transfer->slab == LH_CHUNK_NONE && transfer->kind == LH_IO_KIND_WRITE)
        lh_update_param_written(engine, lh_engine_unit_at(engine, transfer->unit));
    else if (in_place_of(transfer, engine))
        lh_in_place_loaded(engine, lh_engine_unit_at(engine, transfer->unit));
    else if (transfer->slab == LH_CHUNK_NONE)
        lh_unit_load_done(engine, lh_engine_unit_at(engine, transfer->unit));
    else
        lh_update_transfer_done(engine, transfer);
}

/* What a saved tensor's transfer has there is no unit's index. */
static uint32_t unit_traced(const struct lh_transfer *transfer)
{
    return transfer->saved ? LH_CHUNK_NONE : transfer->unit;
}

static void request_account(struct lh_engine *engine, const struct lh_engine_request *request)
{
    const struct lh_transfer *transfer = request->transfer;
    static const uint32_t kinds[LH_ENGINE_LINK_COUNT] = {LH_ENGINE_TRACE_PARAM_READ,
                                                         LH_ENGINE_TRACE_STATE_READ,
                                                         LH_ENGINE_TRACE_WRITE,
                                                         LH_ENGINE_TRACE_WRITE,
                                                         LH_ENGINE_TRACE_COMMIT,
                                                         LH_ENGINE_TRACE_WRITE,
                                                         LH_ENGINE_TRACE_GRADIENT_READ,
                                                         0,
                                                         0,
                                                         LH_ENGINE_TRACE_WRITE,
                                                         LH_ENGINE_TRACE_SAVED_READ};
    if (!transfer->saved) /* counted when it begins: its step may be over before it is */
        lh_step_stats(engine, transfer->step)->bytes[transfer->link] += request->io.bytes;
    lh_engine_trace_add(engine, (struct lh_engine_trace_event){
                                    .kind = kinds[transfer->link],
                                    .unit = unit_traced(transfer),
                                    .lane = (uint32_t)(request - engine->requests),
                                    .start_ns = request->io.submitted_ns,
                                    .end_ns = request->io.completed_ns,
                                    .bytes = request->io.bytes,
                                });
}

static void request_done(struct lh_engine *engine, struct lh_engine_request *request)
{
    lh_io_busy_end(engine);
    if (request->io.result < 0) {
        request_fail(engine, request);
        return;
    }
    request_account(engine, request);
    if (request->io.least_bytes > 0) /* the file ends here */
        memset((uint8_t *)request->io.buffer + request->io.least_bytes, 0,
               request->io.bytes - request->io.least_bytes);
    /* R, M and V are checked by the update, which has them in cache then. */
    bool is_checked = request->transfer->link == LH_ENGINE_LINK_PARAM_READ ||
                      request->transfer->link == LH_ENGINE_LINK_GRADIENT_READ ||
                      request->transfer->link == LH_ENGINE_LINK_SAVED_READ;
    if ((engine->opts.verify && is_checked) || moved_unit(request->transfer, engine)) {
        request->job = (struct lh_exec_job){
            .run = check_run, .context = request, .work_bytes = request->io.bytes};
        engine->checks_in_flight++;
        lh_job_submit(engine, &request->job);
        return;
    }
    request_finish(engine, request);
}

void lh_check_done(struct lh_engine *engine, struct lh_engine_request *request)
{
    engine->checks_in_flight--;
    if (request->bad_offset != UINT64_MAX) {
        struct lh_error err = {0};
        lh_error_set(&err, -EILSEQ,
                     "unit %u: %s from %s have a wrong checksum at byte %" PRIu64
                     " of the unit (file offset %" PRIu64 "): %08x, expected %08x%s",
                     request->transfer->unit, link_name(request->transfer->link), path_of(request),
                     request->bad_offset,
                     request->io.offset + (request->bad_offset - request->offset),
                     request->crc_actual, request->crc_expected,
                     in_place_of(request->transfer, engine)
                         ? "; the file changed since the store was made, or was read wrong"
                         : "");
        lh_engine_fail(engine, &err);
        return;
    }
    request_finish(engine, request);
}

bool lh_transfer_poll(struct lh_engine *engine)
{
    struct lh_io_request *done[32];
    uint32_t count = engine->io->ops->poll(engine->io, done, LH_COUNT_OF(done));
    for (uint32_t i = 0; i < count; i++) {
        if (done[i]->owner == engine)
            lh_step_commit_request_done(engine, done[i]);
        else
            request_done(engine, done[i]->owner);
    }
    return count > 0;
}

void lh_job_submit(struct lh_engine *engine, struct lh_exec_job *job)
{
    int rc = engine->exec->ops->submit(engine->exec, job);
    LH_ASSERT(rc == 0); /* the team's queue holds a job for every slab, request and unit */
    engine->jobs_in_flight++;
}

bool lh_job_poll(struct lh_engine *engine)
{
    struct lh_exec_job *done[32];
    uint32_t count = engine->exec->ops->poll(engine->exec, done, LH_COUNT_OF(done));
    for (uint32_t i = 0; i < count; i++) {
        struct lh_exec_job *job = done[i];
        LH_ASSERT(engine->jobs_in_flight > 0);
        engine->jobs_in_flight--;
        if (job->run == lh_norm_run) {
            lh_norm_done(engine, job->context);
            continue;
        }
        if (lh_saved_is_job(job)) {
            lh_saved_summed(engine, job->context);
            continue;
        }
        bool is_check = job->run == check_run;
        if (!is_check)
            lh_step_stats(engine, lh_step_current(engine))->update_busy_ns +=
                job->ended_ns - job->started_ns;
        const struct lh_engine_request *request = is_check ? job->context : NULL;
        const struct lh_slab *slab = is_check ? NULL : job->context;
        uint32_t unit =
            is_check ? unit_traced(request->transfer) : engine->chunks[slab->chunk].unit;
        lh_engine_trace_add(engine, (struct lh_engine_trace_event){
                                        .kind = is_check         ? LH_ENGINE_TRACE_CHECK
                                                : slab->is_spill ? LH_ENGINE_TRACE_GATHER
                                                                 : LH_ENGINE_TRACE_UPDATE,
                                        .unit = unit,
                                        .lane = job->worker_index,
                                        .start_ns = job->started_ns,
                                        .end_ns = job->ended_ns,
                                        .bytes = job->work_bytes,
                                    });
        if (is_check)
            lh_check_done(engine, job->context);
        else if (slab->is_spill)
            lh_spill_gathered(engine, job->context);
        else
            lh_update_job_done(engine, job->context);
    }
    return count > 0;
}
