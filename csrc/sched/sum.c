/*
 * Sums of gradients over several backwards, for a model that an accelerator computes.
 *
 * The sums are in main memory, in fp32. A gradient gets there piece by piece: a piece is copied to
 * a block of main memory, and a worker adds it to the sum, while later pieces are copied. The
 * device's memory is released when the last copy is over; the training thread waits for nothing.
 *
 *      posted (device tensor) -> copies, one a piece -> released -> jobs of the workers -> finished
 *
 * Gradients are copied in the order in which they were posted. Copies of a parameter's next
 * gradient begin only after its previous gradient has been added, so that each element is added in
 * the order of the backwards, whichever worker does it.
 *
 * Source: LoHan IV-C and Fuyou 4.3 (gradients are offloaded as backward makes them), for gradients
 * that are not updated from at once.
 */
#include <errno.h>
#include <inttypes.h>

#include "sched/engine_private.h"

/* Small enough that copies, sums and the next copies overlap, large enough for the link's rate. */
#define PIECE_BYTES_MAX (UINT64_C(8) << 20)
#define PIECE_COUNT_MAX 32

struct lh_sum_piece {
    struct lh_job job; /* must be first: the job's end returns a pointer to it */
    struct lh_sum_piece *next_free;
    uint8_t *block;
    uint32_t param;
    uint64_t first; /* element in the parameter */
    uint64_t count;
    float *sum;
    enum lh_dtype dtype;
    struct lh_sum_join join;
};

int lh_sum_post(struct lh_engine *engine, uint32_t param, const void *gradient, enum lh_dtype dtype,
                float *sum, const struct lh_sum_join *join)
{
    LH_ASSERT(param < engine->param_count && engine->sums && engine->dev);
    LH_ASSERT(dtype <= LH_DTYPE_F16 && !atomic_load(&engine->gradients[param].is_held));
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    struct lh_sum_param *item = &engine->sums->params[param];
    item->gradient = gradient;
    item->sum = sum;
    item->dtype = dtype;
    item->join = *join;
    atomic_store(&engine->gradients[param].is_held, true);
    lh_stream_record(engine, engine->gradients[param].is_computed);
    atomic_fetch_add(&engine->sums->posted, 1);
    lh_engine_post(engine, LH_MESSAGE_SUM, param, 0, 0);
    return 0;
}

static bool are_finished(struct lh_engine *engine, uint64_t argument)
{
    (void)argument;
    const struct lh_sums *sums = engine->sums;
    return !sums || atomic_load(&sums->finished) == atomic_load(&sums->posted);
}

int lh_sum_wait(struct lh_engine *engine, int timeout_ms)
{
    return lh_engine_room_wait(engine, are_finished, 0, timeout_ms);
}

static bool is_released(struct lh_engine *engine, uint64_t param)
{
    return lh_engine_gradient_is_consumed(engine, (uint32_t)param);
}

int lh_sum_release_wait(struct lh_engine *engine, uint64_t param, int timeout_ms)
{
    LH_ASSERT(param < engine->param_count);
    return lh_engine_room_wait(engine, is_released, param, timeout_ms);
}

static uint64_t gradient_bytes(const struct lh_engine *engine, uint32_t param)
{
    return engine->params[param].count * lh_dtype_bytes(engine->sums->params[param].dtype);
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    if (message->words[0] != LH_MESSAGE_SUM)
        return false;
    struct lh_sums *sums = engine->sums;
    uint32_t param = (uint32_t)message->words[1];
    LH_ASSERT(param < engine->param_count && sums->end - sums->first < engine->param_count);
    LH_ASSERT(sums->params[param].copies == 0);
    sums->queue[sums->end++ % engine->param_count] = param;
    lh_gradient_hold(engine, gradient_bytes(engine, param));
    return true;
}

static void piece_free(struct lh_engine *engine, struct lh_sum_piece *piece)
{
    LH_ASSERT(piece->block && piece->next_free == NULL);
    piece->next_free = engine->sums->free;
    engine->sums->free = piece;
}

static void piece_add(struct lh_exec_job *exec)
{
    const struct lh_sum_piece *piece = exec->context;
    LH_ASSERT(piece->sum && piece->count > 0);
    lh_sum_join(piece->sum, &piece->join, piece->block, piece->dtype, piece->count);
}

static void piece_added(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_sum_piece *piece = (struct lh_sum_piece *)(void *)job;
    struct lh_sum_param *item = &engine->sums->params[piece->param];
    LH_ASSERT(item->jobs > 0);
    item->jobs--;
    piece_free(engine, piece);
    if (item->jobs > 0 || item->copies > 0 || item->issued < engine->params[piece->param].count)
        return;
    atomic_fetch_add(&engine->sums->finished, 1);
    lh_core_notify(engine);
}

static void piece_copied(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_sum_piece *piece = &engine->sums->pieces[copy->item];
    struct lh_sum_param *item = &engine->sums->params[copy->param];
    LH_ASSERT(copy->item < engine->sums->piece_count && piece->param == copy->param);
    LH_ASSERT(item->copies > 0);
    item->jobs++;
    lh_job_submit(engine, &piece->job);
    if (--item->copies > 0 || item->issued < engine->params[copy->param].count)
        return;
    lh_gradient_unhold(engine, gradient_bytes(engine, copy->param));
    lh_gradient_release(engine, copy->param);
    lh_core_notify(engine);
}

/* Copy the next piece of param's gradient. Returns false if that is not possible now. */
static bool piece_copy(struct lh_engine *engine, uint32_t param)
{
    struct lh_sums *sums = engine->sums;
    struct lh_sum_param *item = &sums->params[param];
    struct lh_sum_piece *piece = sums->free;
    /* The end of the earlier gradient, which must come first, depends on `issued`. */
    bool is_after_another = !sums->is_begun && item->jobs > 0;
    if (!piece || is_after_another || !lh_copy_is_free(engine, LH_COPY_USER_GRADIENT))
        return false;
    if (!sums->is_begun)
        item->issued = 0;
    sums->is_begun = true;
    uint64_t element_bytes = lh_dtype_bytes(item->dtype);
    sums->free = piece->next_free;
    piece->next_free = NULL;
    piece->param = param;
    piece->first = item->issued;
    piece->count =
        lh_min_u64(engine->params[param].count - item->issued, sums->piece_bytes / element_bytes);
    piece->sum = item->sum + piece->first;
    piece->dtype = item->dtype;
    piece->join = item->join;
    piece->job.exec.work_bytes = piece->count * (element_bytes + 2 * sizeof(float));
    LH_ASSERT(item->gradient && piece->count > 0);
    struct lh_copy *copy = lh_copy_take(engine, LH_COPY_USER_GRADIENT);
    copy->done = piece_copied;
    copy->what = "a gradient's copy";
    copy->unit = engine->params[param].unit;
    copy->param = param;
    copy->item = (uint32_t)(piece - sums->pieces);
    copy->dev = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_OUT,
        .host = piece->block,
        .device = (uint8_t *)(uintptr_t)item->gradient + piece->first * element_bytes,
        .bytes = piece->count * element_bytes,
        /* The direction is a queue: later pieces follow the first one. */
        .after = item->issued == 0 ? engine->gradients[param].is_computed : NULL,
    };
    lh_core_stats(engine, lh_core_step(engine))->bytes[LH_ENGINE_LINK_COPY_OUT] += copy->dev.bytes;
    sums->moved_bytes += copy->dev.bytes;
    if (!lh_copy_submit(engine, copy))
        return false;
    item->issued += piece->count;
    item->copies++;
    return true;
}

static bool pump_before(struct lh_engine *engine)
{
    struct lh_sums *sums = engine->sums;
    bool moved = false;
    while (sums->first < sums->end && engine->step_state == LH_STEP_STATE_OPEN &&
           !atomic_load(&engine->failed)) {
        uint32_t param = sums->queue[sums->first % engine->param_count];
        if (!piece_copy(engine, param))
            break;
        moved = true;
        if (sums->params[param].issued < engine->params[param].count)
            continue;
        sums->is_begun = false;
        sums->first++;
    }
    return moved;
}

/* The number of backwards in a step is known at its close, so only then are they planned. */
static void plan_corrected(struct lh_engine *engine, struct lh_unit *unit)
{
    (void)unit; /* the first unit of a step takes the bytes of all */
    lh_core_stats(engine, engine->step)->planned_bytes[LH_ENGINE_LINK_COPY_OUT] +=
        engine->sums->moved_bytes;
    engine->sums->moved_bytes = 0;
}

static void step_forgotten(struct lh_engine *engine)
{
    struct lh_sums *sums = engine->sums;
    for (uint32_t i = 0; i < engine->param_count; i++)
        LH_ASSERT(sums->params[i].copies == 0 && sums->params[i].jobs == 0);
    sums->first = 0;
    sums->end = 0;
    sums->is_begun = false;
    sums->moved_bytes = 0;
    atomic_store(&sums->finished, atomic_load(&sums->posted));
}

int lh_sum_create(struct lh_engine *engine, struct lh_error *err)
{
    const struct lh_engine_opts *opts = &engine->opts;
    if (opts->sum_bytes < LH_BLOCK_BYTES || !opts->dev)
        return lh_error_set(err, -EINVAL,
                            "sum_bytes %" PRIu64 " must be at least %" PRIu64 ", with a device",
                            opts->sum_bytes, LH_BLOCK_BYTES);
    LH_TRY(LH_ENGINE_PART_CREATE(engine, sums, err));
    struct lh_sums *sums = engine->sums;
    /* Two pieces at least, so that one is copied while the other is added. */
    sums->piece_bytes =
        lh_min_u64(PIECE_BYTES_MAX, lh_align_up(opts->sum_bytes / 2, LH_BLOCK_BYTES));
    sums->piece_count = (uint32_t)lh_min_u64(PIECE_COUNT_MAX, opts->sum_bytes / sums->piece_bytes);
    uint64_t count = lh_max_u64(engine->param_count, 1);
    sums->params = lh_alloc_zeroed(engine->alloc, count, sizeof(*sums->params));
    sums->queue = lh_alloc_zeroed(engine->alloc, count, sizeof(*sums->queue));
    sums->pieces = lh_alloc_zeroed(engine->alloc, sums->piece_count, sizeof(*sums->pieces));
    if (!sums->params || !sums->queue || !sums->pieces)
        return lh_error_set(err, -ENOMEM, "no memory for the sums of %u gradients",
                            engine->param_count);
    for (uint32_t i = 0; i < sums->piece_count; i++) {
        struct lh_sum_piece *piece = &sums->pieces[i];
        piece->block = opts->sum_memory + i * sums->piece_bytes;
        piece->job.exec.run = piece_add;
        piece->job.exec.context = piece;
        piece->job.done = piece_added;
        piece_free(engine, piece);
    }
    return 0;
}

void lh_sum_destroy(struct lh_engine *engine)
{
    if (!engine->sums)
        return;
    lh_free(engine->alloc, engine->sums->params);
    lh_free(engine->alloc, engine->sums->queue);
    lh_free(engine->alloc, engine->sums->pieces);
}

const struct lh_feature lh_sum_feature = {
    .name = "sum",
    .message = message,
    .plan_corrected = plan_corrected,
    .step_forgotten = step_forgotten,
    .pump_before = pump_before,
};
