/*
 * The update of units whose states another process has: in each step that process computes the
 * unit's new parameters and sends them, and the engine puts them where an AdamW update would.
 *
 * A given unit has no extents of R, M and V. In place of a gradient the caller passes the address
 * of the new values, in the unit's dtype, before the close; the values themselves come later, and
 * lh_given_arrived() says that they are there. Only then is the unit's update queued. So a closed
 * step ends once all values have come and are written, and its commit covers them like the units
 * that were updated here.
 *
 * The caller says so in the same order in every step, so that the plan can predict the updates.
 * Norms leave given units out: the process that has the states has the gradients, too.
 *
 * The division is that of ZeRO's stage 2 (Rajbhandari et al. 2020): states and gradients are
 * divided among processes, parameters are not.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/crc32c.h"
#include "sched/engine_private.h"

bool lh_given_is_any(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (lh_unit_is_given(&engine->units[i]))
            return true;
    }
    return false;
}

void lh_given_arrived(struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count && lh_unit_is_given(&engine->units[unit]));
    lh_engine_post(engine, LH_MESSAGE_GIVEN, unit, 0, 0);
}

void lh_given_never(struct lh_engine *engine)
{
    if (lh_given_is_any(engine)) /* otherwise no feature would understand the message */
        lh_engine_post(engine, LH_MESSAGE_GIVEN, LH_UNIT_NONE, 0, 0);
}

/* Runs on a worker: put new values into a chunk of the unit, in place of an AdamW update. */
static void run(struct lh_exec_job *job)
{
    struct lh_slab *slab = job->context;
    const struct lh_adam_chunk *chunk = &slab->adam;
    uint64_t element_bytes = lh_dtype_bytes(chunk->param_dtype);
    uint64_t bytes = chunk->count * element_bytes;
    uint8_t *param = chunk->param;

    for (uint32_t i = 0; i < chunk->segment_count; i++) {
        const struct lh_adam_segment *segment = &chunk->segments[i];
        LH_ASSERT(segment->gradient_dtype == chunk->param_dtype);
        memcpy(param + segment->first * element_bytes, segment->gradient,
               segment->count * element_bytes);
    }
    for (uint64_t at = 0; at < bytes; at += LH_CHECKSUM_BYTES)
        chunk->param_checksums[at / LH_CHECKSUM_BYTES] =
            lh_crc32c(0, param + at, lh_min_u64(LH_CHECKSUM_BYTES, bytes - at));
    slab->result = 0;
}

static void chunk_job(struct lh_engine *engine, const struct lh_chunk *chunk,
                      struct lh_exec_job *job)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    if (!lh_unit_is_given(unit))
        return;
    job->run = run;
    job->work_bytes = 2 * chunk->count * lh_dtype_bytes(unit->desc->dtype); /* of P only */
}

static bool is_awaited(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return engine->step_state == LH_STEP_STATE_CLOSED && lh_unit_is_given(unit) &&
           unit->update.gradient_count > 0 && !unit->parts->given.is_there;
}

static bool update_may_queue(struct lh_engine *engine, struct lh_unit *unit)
{
    (void)engine;
    return !lh_unit_is_given(unit) || unit->parts->given.is_there;
}

static bool is_busy(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (is_awaited(engine, &engine->units[i]))
            return true;
    }
    return false;
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    if (message->words[0] != LH_MESSAGE_GIVEN)
        return false;
    uint32_t index = (uint32_t)message->words[1];
    if (index == LH_UNIT_NONE && !is_busy(engine))
        return true; /* all values have come */
    if (index == LH_UNIT_NONE) {
        struct lh_error err = {0};
        lh_error_set(&err, -ECONNABORTED,
                     "step %" PRIu64 " cannot be finished: other processes, which have the states"
                     " of some units, did not send the units' new values",
                     engine->step);
        lh_core_fail(engine, &err);
        return true;
    }
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(is_awaited(engine, unit)); /* lh_given_arrived() is called once after the close */
    unit->parts->given.is_there = true;
    lh_update_consider(engine, index);
    return true;
}

static void step_forgotten(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].parts->given.is_there = false;
}

const struct lh_feature lh_given_feature = {
    .name = "given",
    .message = message,
    .update_may_queue = update_may_queue,
    .chunk_job = chunk_job,
    .step_forgotten = step_forgotten,
    .is_busy = is_busy,
};
