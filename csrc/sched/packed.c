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
 * The same for bytes that must stay until the last parameter, which ends at `end`, is decoded. If
 * there are none, the offset is 0.
 */
static bool stays(const struct lh_in_place_unit *made, uint64_t end, uint64_t offset,
                  uint64_t bytes)
{
    return bytes == 0 ? offset == 0 : offset >= end && is_in_a_run(made, offset, bytes);
}

/* Where a part of what a parameter is decoded with is. */
static uint64_t part_place(const struct lh_in_place_pack *pack, enum lh_unpack_part part)
{
    const uint64_t places[LH_UNPACK_PART_COUNT] = {
        [LH_UNPACK_PART_SCALES] = pack->scales, [LH_UNPACK_PART_TABLE] = pack->table,
        [LH_UNPACK_PART_NESTED] = pack->nested, [LH_UNPACK_PART_NESTED_TABLE] = pack->nested_table,
        [LH_UNPACK_PART_ZEROS] = pack->zeros,   [LH_UNPACK_PART_INDEX] = pack->index,
    };
    return places[part];
}

static bool pack_is_good(const struct lh_in_place_unit *made, const struct lh_in_place_pack *pack,
                         uint64_t end)
{
    for (uint32_t i = 0; i < LH_UNPACK_PART_COUNT; i++) {
        enum lh_unpack_part part = (enum lh_unpack_part)i;
        if (!stays(made, end, part_place(pack, part), lh_unpack_part_bytes(&pack->unpack, part)))
            return false;
    }
    return true;
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
        if (!is_in_a_run(made, pack->from, bytes) ||
            !lh_unpack_fits(&pack->unpack, pack->from, pack->to))
            return false;
        read = pack->from + bytes;
        decoded = pack->to + count * lh_unpack_element_bytes(&pack->unpack);
        LH_ASSERT(decoded <= read);
    }
    LH_ASSERT(read <= unit_bytes);
    for (uint32_t i = 0; i < made->pack_count; i++) {
        if (!pack_is_good(made, &made->packs[i], decoded))
            return false;
    }
    return true;
}

/* --- Decoding --------------------------------------------------------------------------------- */

/*
 * [Note: Rounds] Workers decode a packed unit in rounds. All parameters before an offset of the
 * unit are decoded; the next round decodes up to the first packed byte that is still needed. So no
 * output of the round touches an input of the round, and its jobs may run at the same time. Each
 * round leaves a half (8 bits to 16) or a quarter (4 bits) of the rest. One job decodes a short
 * rest, from front to back. Kept bytes are not overwritten, so one round decodes all of a unit.
 */
#define ROUND_BYTES_MIN (UINT64_C(256) << 10)

static uint64_t pack_end(const struct lh_in_place_pack *pack)
{
    return pack->to + lh_unpack_count(&pack->unpack) * lh_unpack_element_bytes(&pack->unpack);
}

static uint64_t unit_end(const struct lh_in_place_unit *made)
{
    LH_ASSERT(made->pack_count > 0);
    return pack_end(&made->packs[made->pack_count - 1]);
}

/* The offset of the first packed byte that is needed for what is decoded to `offset` and after. */
static uint64_t needed_from(const struct lh_in_place_unit *made, uint64_t offset)
{
    uint32_t i = 0;
    LH_ASSERT(offset < unit_end(made));
    while (pack_end(&made->packs[i]) <= offset)
        i++;
    const struct lh_in_place_pack *pack = &made->packs[i];
    uint64_t bytes = offset > pack->to ? offset - pack->to : 0;
    return pack->from +
           lh_unpack_needed(&pack->unpack, bytes / lh_unpack_element_bytes(&pack->unpack));
}

/* A part of a parameter's description that it may lack; its offset in the unit is then 0. */
static const uint8_t *part_at(const uint8_t *packed, uint64_t offset, uint64_t skipped)
{
    return offset == 0 ? NULL : packed + (offset - skipped);
}

/* Runs on a worker: decode what belongs to the offsets of the job. */
static void decode_run(struct lh_exec_job *exec)
{
    const struct lh_packed_job *job = exec->context;
    const struct lh_in_place_unit *made = job->unit->parts->in_place.made;
    uint8_t *memory = job->unit->memory;
    /* Kept bytes are those from the unit's first run on. */
    const uint8_t *kept = job->unit->parts->in_place.kept;
    const uint8_t *packed = kept ? kept : memory;
    const uint64_t skipped = kept ? made->runs[0].offset : 0;
    LH_ASSERT(memory && job->first < job->end && job->end <= unit_end(made));
    for (uint32_t i = 0; i < made->pack_count; i++) {
        const struct lh_in_place_pack *pack = &made->packs[i];
        uint64_t element_bytes = lh_unpack_element_bytes(&pack->unpack);
        uint64_t begin = lh_max_u64(pack->to, job->first);
        uint64_t end = lh_min_u64(pack_end(pack), job->end);
        if (begin >= end)
            continue;
        uint64_t first = (begin - pack->to) / element_bytes;
        const struct lh_unpack_source source = {
            .packed = packed + (pack->from + lh_unpack_needed(&pack->unpack, first) - skipped),
            .scales = part_at(packed, pack->scales, skipped),
            .table = part_at(packed, pack->table, skipped),
            .nested = part_at(packed, pack->nested, skipped),
            .nested_table = part_at(packed, pack->nested_table, skipped),
            .zeros = part_at(packed, pack->zeros, skipped),
            .index = part_at(packed, pack->index, skipped),
        };
        lh_unpack(&pack->unpack, &source, first, (end - begin) / element_bytes, memory + begin);
    }
}

static void round_begin(struct lh_engine *engine, struct lh_unit *unit);

static void decode_done(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_unit *unit = ((struct lh_packed_job *)job->exec.context)->unit;
    lh_core_trace_add(engine, (struct lh_engine_trace_event){
                                  .kind = LH_ENGINE_TRACE_CHECK,
                                  .unit = (uint32_t)(unit - engine->units),
                                  .lane = job->exec.worker_index,
                                  .start_ns = job->exec.started_ns,
                                  .end_ns = job->exec.ended_ns,
                                  .bytes = job->exec.work_bytes,
                              });
    LH_ASSERT(unit->parts->in_place.job_count > 0);
    if (--unit->parts->in_place.job_count > 0)
        return;
    if (unit->parts->in_place.decoded < unit_end(unit->parts->in_place.made))
        round_begin(engine, unit);
    else
        lh_unit_arrived(engine, unit);
}

static void job_submit(struct lh_engine *engine, struct lh_unit *unit, uint64_t first, uint64_t end)
{
    LH_ASSERT(unit->parts->in_place.job_count < LH_IN_PLACE_JOB_COUNT && first < end);
    struct lh_packed_job *job = &unit->parts->in_place.jobs[unit->parts->in_place.job_count++];
    *job = (struct lh_packed_job){
        .job = {.exec = {.run = decode_run, .context = job, .work_bytes = end - first},
                .done = decode_done},
        .unit = unit,
        .first = first,
        .end = end,
    };
    lh_job_submit(engine, &job->job);
}

/* Begin the next round. */
static void round_begin(struct lh_engine *engine, struct lh_unit *unit)
{
    const struct lh_in_place_unit *made = unit->parts->in_place.made;
    uint64_t first = unit->parts->in_place.decoded;
    uint64_t end = unit_end(made);
    uint64_t needed = unit->parts->in_place.kept ? end : needed_from(made, first);
    LH_ASSERT(unit->state == LH_UNIT_STATE_LOADING && unit->parts->in_place.job_count == 0);
    if (needed < first + ROUND_BYTES_MIN) {
        unit->parts->in_place.decoded = end;
        job_submit(engine, unit, first, end);
        return;
    }
    if (needed < end)
        end = needed - needed % LH_IN_PLACE_ALIGN;
    uint64_t count = lh_min_u64(LH_IN_PLACE_JOB_COUNT, engine->exec->thread_count);
    uint64_t step = lh_max_u64(lh_align_up(lh_div_ceil(end - first, count), LH_IN_PLACE_ALIGN),
                               ROUND_BYTES_MIN);
    unit->parts->in_place.decoded = end;
    for (uint64_t at = first; at < end; at += step)
        job_submit(engine, unit, at, lh_min_u64(end, at + step));
}

uint64_t lh_packed_load_first(const struct lh_unit *unit)
{
    LH_ASSERT(unit->parts->in_place.first <= unit->desc->bytes);
    return unit->parts->in_place.first;
}

void lh_packed_decode(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->parts->in_place.made->pack_count > 0);
    unit->parts->in_place.decoded = 0;
    round_begin(engine, unit);
}
