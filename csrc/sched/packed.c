/* Packed units: see [Note: Packed units] in in_place.h. */
#include "sched/engine_private.h"

/* Whether one of the unit's runs has bytes [offset, offset + bytes). */
static bool is_in_a_run(const struct lh_in_place_unit *made, uint64_t offset, uint64_t bytes)
{
    for (uint32_t i = 0; i < made->run_count; i++) {
        const struct lh_in_place_run *run = &made->runs[i];
        if (offset >= run->offset && offset - run->offset < run->bytes)
            return bytes <= run->bytes - (offset - run->offset);
    }
    return false;
}

/*
 * The same for items that must stay until the last parameter, which ends at `end`, is decoded. If
 * there are none, the offset is 0.
 */
static bool stays(const struct lh_in_place_unit *made, uint64_t end, uint64_t offset,
                  uint64_t count, uint64_t item_bytes)
{
    /* A description that is valid has at most 2^48 items. */
    return count == 0 ? offset == 0
                      : offset >= end && is_in_a_run(made, offset, count * item_bytes);
}

static bool pack_is_good(const struct lh_in_place_unit *made, const struct lh_in_place_pack *pack,
                         uint64_t end)
{
    const struct lh_unpack *unpack = &pack->unpack;
    bool has_table = unpack->format == LH_UNPACK_FORMAT_NIBBLES;
    uint64_t nested_count = lh_unpack_nested_count(unpack);
    return stays(made, end, pack->scales, lh_unpack_scale_count(unpack),
                 lh_dtype_bytes((enum lh_dtype)unpack->scale_dtype)) &&
           stays(made, end, pack->table, has_table ? LH_UNPACK_TABLE_COUNT : 0, sizeof(float)) &&
           stays(made, end, pack->nested, nested_count, sizeof(float)) &&
           stays(made, end, pack->nested_table, nested_count > 0 ? LH_UNPACK_NESTED_TABLE_COUNT : 0,
                 sizeof(float));
}

bool lh_packed_is_good(const struct lh_in_place_unit *made, uint64_t unit_bytes)
{
    uint64_t read = 0;
    uint64_t decoded = 0;
    if (made->move_count > 0 || made->run_count == 0)
        return false;
    for (uint32_t i = 0; i < made->pack_count; i++) {
        const struct lh_in_place_pack *pack = &made->packs[i];
        if (!lh_unpack_is_valid(&pack->unpack) || pack->from < read || pack->to < decoded ||
            pack->to > unit_bytes || !lh_is_aligned(pack->to, LH_IN_PLACE_ALIGN))
            return false;
        uint64_t count = lh_unpack_count(&pack->unpack);
        uint64_t bytes = lh_unpack_packed_bytes(&pack->unpack, count);
        if (!is_in_a_run(made, pack->from, bytes))
            return false;
        read = pack->from + bytes;
        decoded = pack->to + count * lh_unpack_element_bytes(&pack->unpack);
        if (decoded > read)
            return false;
    }
    LH_ASSERT(read <= unit_bytes);
    for (uint32_t i = 0; i < made->pack_count; i++) {
        if (!pack_is_good(made, &made->packs[i], decoded))
            return false;
    }
    return true;
}

/* Runs on a worker. */
static void decode_run(struct lh_exec_job *job)
{
    const struct lh_unit *unit = job->context;
    const struct lh_in_place_unit *made = unit->in_place.made;
    LH_ASSERT(made && unit->memory);
    for (uint32_t i = 0; i < made->pack_count; i++) {
        const struct lh_in_place_pack *pack = &made->packs[i];
        const struct lh_unpack_source source = {
            .packed = unit->memory + pack->from,
            .scales = unit->memory + pack->scales,
            .table = unit->memory + pack->table,
            .nested = unit->memory + pack->nested,
            .nested_table = unit->memory + pack->nested_table,
        };
        lh_unpack_forward(&pack->unpack, &source, unit->memory + pack->to);
    }
}

static void decode_done(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_unit *unit = job->exec.context;
    lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                  .kind = LH_ENGINE_TRACE_CHECK,
                                  .unit = (uint32_t)(unit - engine->units),
                                  .lane = job->exec.worker_index,
                                  .start_ns = job->exec.started_ns,
                                  .end_ns = job->exec.ended_ns,
                                  .bytes = job->exec.work_bytes,
                              });
    lh_unit_arrived(engine, unit);
}

void lh_packed_decode(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->state == LH_UNIT_STATE_LOADING && unit->in_place.made->pack_count > 0);
    unit->in_place.job = (struct lh_job){
        .exec = {.run = decode_run, .context = unit, .work_bytes = unit->desc.bytes},
        .done = decode_done,
    };
    lh_job_submit(engine, &unit->in_place.job);
}
