/* Packed units whose packed bytes stay in main memory: [Note: Kept bytes] in in_place.h. */
#include "sched/engine_private.h"

static void decode_begin(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->in_place.is_filled && unit->state == LH_UNIT_STATE_LOADING);
    lh_packed_decode(engine, unit);
}

static void fill_done(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, transfer->unit);
    LH_ASSERT(transfer == &unit->load && !unit->in_place.is_filled);
    unit->in_place.is_filled = true;
    if (unit->state == LH_UNIT_STATE_LOADING)
        decode_begin(engine, unit);
}

static void load(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    (void)step; /* no bytes move that a step counts */
    if (unit->in_place.is_filled)
        decode_begin(engine, unit);
    else if (lh_unit_is_awaited(engine, unit))
        lh_transfer_raise(engine, &unit->load);
}

const struct lh_source_ops lh_kept_source_ops = {.load = load, .advice = ""};

void lh_kept_add(struct lh_engine *engine, struct lh_unit *unit, uint64_t offset)
{
    const struct lh_in_place_unit *made = unit->in_place.made;
    uint64_t bytes = lh_in_place_kept_bytes(made);
    LH_ASSERT(made->is_kept && offset + bytes <= engine->opts.in_place.kept_bytes);
    unit->in_place.kept = engine->opts.in_place.kept_memory + offset;
    unit->in_place.first = unit->desc.bytes; /* a load reads nothing */
    unit->source = &engine->in_place.kept_source;
    unit->load = (struct lh_transfer){
        .source = &engine->in_place.packed_source,
        .done = fill_done,
        .kind = LH_IO_KIND_READ,
        .priority = LH_PRIORITY_PREFETCH,
        .link = LH_ENGINE_LINK_PARAM_READ,
        .unit = made->unit,
        .slab = LH_CHUNK_NONE,
        .extent = unit->desc.param_extent,
        .offset = made->runs[0].offset,
        .bytes = bytes,
        .buffer = unit->in_place.kept,
    };
    lh_transfer_submit(engine, &unit->load);
}
