/*
 * Reads of a unit's bytes in main memory by the training thread, while an accelerator computes:
 * state dicts, exports and other values that the caller wants in main memory. Main memory has the
 * newest bytes of every unit that no caller has changed on the accelerator ([Note: Moved units] in
 * engine.h), so such a read needs neither a place on the accelerator nor a copy.
 *
 *      training thread      message       engine
 *      lh_reading_begin --> READ -------> queue the unit's deferred update, load the unit
 *      lh_reading_wait <----------------- the unit is READY, and no update is pending: it is lent
 *      lh_reading_end ----> READ_END ---> it may be updated and evicted again
 *
 * Only one read is under way at a time. A read may end before its unit is lent, when its caller was
 * interrupted: reads are numbered, so that the next one does not take a late lend for its own.
 *
 * A read is no use: it is not recorded, so that it does not change what is predicted of the next
 * step, and it changes only the plan of main memory.
 */
#include <errno.h>
#include <inttypes.h>

#include "sched/engine_private.h"

void lh_reading_begin(struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(engine->copies_units && unit < engine->opts.unit_count);
    lh_engine_post(engine, LH_MESSAGE_READ, unit, ++engine->reading->begun_count, 0);
}

static bool is_lent(struct lh_engine *engine, uint64_t number)
{
    return atomic_load(&engine->reading->lent_number) == number;
}

int lh_reading_wait(struct lh_engine *engine, int timeout_ms)
{
    /* Bytes of an engine that has failed must not be used. */
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    return lh_engine_wait_until(engine, is_lent, engine->reading->begun_count, timeout_ms);
}

const uint8_t *lh_reading_address(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return engine->units[unit].memory;
}

void lh_reading_end(struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    lh_engine_post(engine, LH_MESSAGE_READ_END, unit, engine->reading->begun_count, 0);
}

static void begin(struct lh_engine *engine, uint32_t index, uint64_t number)
{
    struct lh_reading *reading = engine->reading;
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(!reading->unit && number > reading->number);
    reading->unit = unit;
    reading->number = number;
    lh_defer_approach(engine, index);
    LH_FEATURE_CALL(engine, unit_asked, unit);
    if (unit->state == LH_UNIT_STATE_LOADING)
        lh_transfer_raise(engine, &unit->load);
}

static void end(struct lh_engine *engine, uint32_t index, uint64_t number)
{
    struct lh_reading *reading = engine->reading;
    LH_ASSERT(reading->unit == &engine->units[index] && reading->number == number);
    reading->unit = NULL;
    reading->is_lent = false;
    reading->is_planned = false;
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    uint32_t unit = (uint32_t)message->words[1];
    if (message->words[0] == LH_MESSAGE_READ)
        begin(engine, unit, message->words[2]);
    else if (message->words[0] == LH_MESSAGE_READ_END)
        end(engine, unit, message->words[2]);
    else
        return false;
    return true;
}

static bool pump_before(struct lh_engine *engine)
{
    struct lh_reading *reading = engine->reading;
    const struct lh_unit *unit = reading->unit;
    if (!unit || reading->is_lent || lh_unit_is_stale(engine, unit))
        return false;
    if (unit->state == LH_UNIT_STATE_READY) {
        reading->is_lent = true;
        atomic_store(&reading->lent_number, reading->number);
        lh_core_notify(engine);
        return true;
    }
    if (unit->state != LH_UNIT_STATE_ABSENT || reading->is_planned)
        return false;
    reading->is_planned = true;
    lh_region_plan_host(engine);
    return true;
}

static bool unit_is_awaited(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return engine->reading->unit == unit;
}

static bool unit_is_read(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return engine->reading->unit == unit && engine->reading->is_lent;
}

static bool unit_is_wanted(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return engine->reading->unit == unit && !engine->reading->is_lent;
}

static bool is_stuck(const struct lh_engine *engine, struct lh_error *err)
{
    const struct lh_unit *unit = engine->reading->unit;
    if (!unit || engine->reading->is_lent)
        return false;
    lh_error_set(err, -ENOSPC,
                 "unit %u, which is read in main memory, has no room beside the units in use:"
                 " raise host_bytes",
                 (uint32_t)(unit - engine->units));
    return true;
}

const struct lh_feature lh_reading_feature = {
    .name = "reading",
    .message = message,
    .unit_is_wanted = unit_is_wanted,
    .unit_is_awaited = unit_is_awaited,
    .unit_is_read = unit_is_read,
    .unit_is_lent = unit_is_read,
    .pump_before = pump_before,
    .is_stuck = is_stuck,
};
