/* See in_place.h. A load goes through transfer.c; here is where from, and what follows it. */
#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

static int unit_validate(const struct lh_engine *engine, const struct lh_in_place_unit *made,
                         struct lh_error *err)
{
    const struct lh_in_place_opts *opts = &engine->opts.in_place;
    if (made->unit >= engine->opts.unit_count)
        return lh_error_set(err, -EINVAL, "unit %u of %u is read in place", made->unit,
                            engine->opts.unit_count);
    const struct lh_engine_unit *desc = &engine->units[made->unit].desc;
    uint64_t at = 0;
    uint64_t checksum_count = 0;
    bool is_good = desc->elements == 0 && desc->param_extent == LH_ENGINE_EXTENT_NONE;
    for (uint32_t i = 0; i < made->run_count; i++) {
        const struct lh_in_place_run *run = &made->runs[i];
        is_good = is_good && run->file < opts->file_count && run->offset == at && run->bytes > 0 &&
                  lh_is_aligned(run->bytes, LH_BLOCK_BYTES) &&
                  lh_is_aligned(run->file_offset, LH_BLOCK_BYTES) &&
                  run->checksum_first == checksum_count &&
                  run->file_offset + run->bytes - LH_BLOCK_BYTES < opts->files[run->file].bytes;
        at += run->bytes;
        checksum_count += lh_div_ceil(run->bytes, LH_CHECKSUM_BYTES);
    }
    uint64_t moved = 0;
    for (uint32_t i = 0; i < made->move_count; i++) {
        const struct lh_in_place_move *move = &made->moves[i];
        is_good = is_good && move->to >= moved && move->to <= move->from && move->bytes <= at &&
                  move->from <= at - move->bytes;
        moved = move->to + move->bytes;
    }
    if (!is_good || at != desc->bytes || checksum_count != made->checksum_count)
        return lh_error_set(err, -EINVAL,
                            "unit %u cannot be read in place: %u runs of %" PRIu64
                            " bytes, %u moves and %u checksums for %" PRIu64 " bytes",
                            made->unit, made->run_count, at, made->move_count, made->checksum_count,
                            desc->bytes);
    return 0;
}

int lh_in_place_create(struct lh_engine *engine, struct lh_error *err)
{
    for (uint32_t i = 0; i < engine->opts.in_place.unit_count; i++) {
        const struct lh_in_place_unit *made = &engine->opts.in_place.units[i];
        LH_TRY(unit_validate(engine, made, err));
        engine->units[made->unit].in_place = made;
    }
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->desc.param_extent == LH_ENGINE_EXTENT_NONE && !unit->in_place)
            return lh_error_set(err, -EINVAL, "unit %u is nowhere", i);
    }
    return 0;
}

static const struct lh_in_place_run *run_at(const struct lh_in_place_unit *unit, uint64_t offset)
{
    uint32_t low = 0;
    uint32_t high = unit->run_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (unit->runs[middle].offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return &unit->runs[low];
}

struct lh_store_piece lh_in_place_map(const struct lh_engine *engine,
                                      const struct lh_in_place_unit *unit, uint64_t offset)
{
    const struct lh_in_place_run *run = run_at(unit, offset);
    uint64_t at = offset - run->offset;
    /* End on a multiple of transfer_bytes, so that checks always cover whole checksum blocks. */
    uint64_t room = engine->opts.transfer_bytes - at % engine->opts.transfer_bytes;
    return (struct lh_store_piece){
        .file_index = run->file,
        .file_offset = run->file_offset + at,
        .bytes = lh_min_u64(room, run->bytes - at),
    };
}

uint64_t lh_in_place_least_bytes(const struct lh_engine *engine, const struct lh_store_piece *piece)
{
    uint64_t rest = engine->opts.in_place.files[piece->file_index].bytes - piece->file_offset;
    return rest < piece->bytes ? rest : 0;
}

const uint32_t *lh_in_place_checksums(const struct lh_in_place_unit *unit, uint64_t offset)
{
    const struct lh_in_place_run *run = run_at(unit, offset);
    return unit->checksums + run->checksum_first + (offset - run->offset) / LH_CHECKSUM_BYTES;
}

/* On a worker. */
void lh_in_place_run(struct lh_exec_job *job)
{
    const struct lh_unit *unit = job->context;
    uint8_t *memory = unit->engine->region + unit->offset;
    for (uint32_t i = 0; i < unit->in_place->move_count; i++) {
        const struct lh_in_place_move *move = &unit->in_place->moves[i];
        if (move->from != move->to)
            memmove(memory + move->to, memory + move->from, move->bytes);
    }
}

void lh_in_place_loaded(struct lh_engine *engine, struct lh_unit *unit)
{
    bool moves = false;
    for (uint32_t i = 0; i < unit->in_place->move_count && !moves; i++)
        moves = unit->in_place->moves[i].from != unit->in_place->moves[i].to;
    if (!moves) {
        lh_unit_load_done(engine, unit);
        return;
    }
    unit->in_place_job = (struct lh_exec_job){
        .run = lh_in_place_run, .context = unit, .work_bytes = unit->desc.bytes};
    lh_job_submit(engine, &unit->in_place_job);
}
