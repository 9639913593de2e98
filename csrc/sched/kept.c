/* Packed bytes that stay in main memory: [Note: Kept bytes] in in_place.h. */
#include "sched/engine_private.h"

/* Whether to keep a unit's packed bytes at this load: see [Note: Kept bytes]. */
static bool is_chosen(struct lh_engine *engine, const struct lh_unit *unit, uint64_t bytes)
{
    struct lh_kept *kept = &engine->in_place->kept;
    uint64_t room = engine->opts.in_place.kept_bytes - kept->taken_bytes;
    if (unit->parts->in_place.load_count == 2) {
        kept->seen_bytes += bytes;
        LH_ASSERT(kept->seen_bytes <= kept->total_bytes);
        double share = (double)kept->seen_bytes / (double)kept->total_bytes;
        double due = (double)engine->opts.in_place.kept_bytes * share + (double)bytes / 2;
        return bytes <= room && (double)(kept->taken_bytes + bytes) <= due;
    }
    return bytes <= room && unit->parts->in_place.load_count >= 4;
}

static void load_done(struct lh_engine *engine, struct lh_transfer *transfer)
{
    struct lh_unit *unit = lh_engine_unit_at(engine, transfer->unit);
    LH_ASSERT(transfer == &unit->load && unit->state == LH_UNIT_STATE_LOADING);
    if (unit->parts->in_place.kept) {
        lh_region_unread(engine, transfer->unit);
        unit->parts->in_place.first = unit->desc->bytes;
    }
    lh_packed_decode(engine, unit);
}

static void load(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    struct lh_in_place_part *part = &unit->parts->in_place;
    struct lh_kept *kept = &engine->in_place->kept;
    LH_ASSERT(unit->state == LH_UNIT_STATE_LOADING);
    if (part->kept) {
        lh_packed_decode(engine, unit);
        return;
    }
    uint64_t bytes = unit->desc->bytes - part->first;
    part->load_count++;
    if (is_chosen(engine, unit, bytes)) {
        part->kept = engine->opts.in_place.kept_memory + kept->taken_bytes;
        kept->taken_bytes += bytes;
    }
    bool is_awaited = lh_unit_is_awaited(engine, unit);
    unit->load = (struct lh_transfer){
        .source = &engine->in_place->packed_source,
        .done = load_done,
        .kind = LH_IO_KIND_READ,
        .priority = is_awaited ? LH_PRIORITY_DEMAND : LH_PRIORITY_PREFETCH,
        .link = LH_ENGINE_LINK_PARAM_READ,
        .unit = part->made->unit,
        .slab = LH_CHUNK_NONE,
        .step = step,
        .extent = unit->desc->param_extent,
        .offset = part->first,
        .bytes = bytes,
        .buffer = part->kept ? part->kept : unit->memory + part->first,
    };
    lh_transfer_submit(engine, &unit->load);
}

uint64_t lh_kept_taken_bytes(const struct lh_engine *engine)
{
    return engine->in_place ? atomic_load(&engine->in_place->kept.taken_bytes) : 0;
}

const struct lh_source_ops lh_kept_source_ops = {
    .load = load, .load_first = lh_packed_load_first, .advice = ""};

void lh_kept_add(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(engine->opts.in_place.kept_memory && unit->parts->in_place.made->pack_count > 0);
    engine->in_place->kept.total_bytes += unit->desc->bytes - unit->parts->in_place.first;
    unit->source = &engine->in_place->kept_source;
}
