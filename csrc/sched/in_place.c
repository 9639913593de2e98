/*
 * See in_place.h. Loads go through transfer.c; this file provides their source and moves the bytes.
 *
 * [Note: Seams] The worker that verifies the bytes of a request also moves them, while they are in
 * the worker's cache. The worker writes only inside the request's own range, because other workers
 * check the ranges before and after it at the same time: bytes that belong before the range (of one
 * parameter, less than LH_IN_PLACE_ALIGN) are set aside, and are put in their places once all
 * requests are done.
 */
#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

static const struct lh_in_place_run *run_at(const struct lh_in_place_unit *unit, uint64_t offset)
{
    LH_ASSERT(unit->run_count > 0);
    uint32_t low = 0;
    uint32_t high = unit->run_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (unit->runs[middle].offset <= offset)
            low = middle;
        else
            high = middle;
    }
    LH_ASSERT(unit->runs[low].offset <= offset);
    return &unit->runs[low];
}

/* Whether a unit's moves are valid. The unit's runs must be valid. */
static bool moves_are_good(const struct lh_in_place_unit *unit)
{
    uint64_t read = 0;
    uint64_t moved = 0;
    for (uint32_t i = 0; i < unit->move_count; i++) {
        const struct lh_in_place_move *move = &unit->moves[i];
        if (unit->run_count == 0 || move->to < moved || move->from < read ||
            move->from < move->to || move->from - move->to >= LH_IN_PLACE_ALIGN ||
            !lh_is_aligned(move->to, LH_IN_PLACE_ALIGN))
            return false;
        const struct lh_in_place_run *run = run_at(unit, move->to);
        uint64_t run_end = run->offset + run->bytes;
        if (move->from > run_end || move->bytes > run_end - move->from)
            return false;
        read = move->from + move->bytes;
        moved = move->to + move->bytes;
    }
    return true;
}

static bool is_packed(const struct lh_in_place_unit *unit)
{
    return unit->pack_count > 0;
}

static int unit_validate(const struct lh_engine *engine, const struct lh_in_place_unit *made,
                         struct lh_error *err)
{
    const struct lh_in_place_opts *opts = &engine->opts.in_place;
    if (made->unit >= engine->opts.unit_count)
        return lh_error_set(err, -EINVAL, "in-place unit %u is out of range: there are %u units",
                            made->unit, engine->opts.unit_count);
    const struct lh_engine_unit *desc = engine->units[made->unit].desc;
    uint64_t at = is_packed(made) && made->run_count > 0 ? made->runs[0].offset : 0;
    uint64_t checksum_count = 0;
    bool is_good = lh_is_aligned(at, LH_BLOCK_BYTES) && desc->elements == 0 &&
                   desc->param_extent == LH_ENGINE_EXTENT_NONE;
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
    is_good = is_good && at == desc->bytes;
    if (is_good)
        is_good = is_packed(made) ? lh_packed_is_good(made, desc->bytes) : moves_are_good(made);
    if (!is_good || checksum_count != made->checksum_count)
        return lh_error_set(
            err, -EINVAL,
            "unit %u cannot be read in place: its %u runs have %" PRIu64
            " bytes, with %u moves, %u packs and %u checksums, but the unit has %" PRIu64 " bytes",
            made->unit, made->run_count, at, made->move_count, made->pack_count,
            made->checksum_count, desc->bytes);
    return 0;
}

static bool unit_moves(const struct lh_in_place_unit *unit)
{
    for (uint32_t i = 0; i < unit->move_count; i++) {
        if (unit->moves[i].from != unit->moves[i].to)
            return true;
    }
    return false;
}

static const struct lh_in_place_unit *made_of(const struct lh_engine *engine,
                                              const struct lh_transfer *transfer)
{
    LH_ASSERT(transfer->unit < engine->opts.unit_count);
    const struct lh_in_place_unit *made = engine->units[transfer->unit].parts->in_place.made;
    LH_ASSERT(made != NULL);
    return made;
}

/* Map the range that one request can read, starting at offset in the unit. */
static int source_map(struct lh_engine *engine, const struct lh_transfer *transfer, uint64_t offset,
                      uint64_t bytes, struct lh_store_piece *pieces)
{
    const struct lh_in_place_run *run = run_at(made_of(engine, transfer), offset);
    uint64_t at = offset - run->offset;
    (void)bytes; /* ends at a multiple of transfer_bytes in the unit, not in the run */
    /* End on a multiple of transfer_bytes, so that checks always cover whole checksum blocks. */
    uint64_t room = engine->opts.transfer_bytes - at % engine->opts.transfer_bytes;
    LH_ASSERT(at < run->bytes);
    pieces[0] = (struct lh_store_piece){
        .file_index = run->file,
        .file_offset = run->file_offset + at,
        .bytes = lh_min_u64(room, run->bytes - at),
    };
    return 1;
}

/* If the file ends inside the piece: the number of the piece's bytes that exist; otherwise 0. */
static uint64_t source_least_bytes(const struct lh_engine *engine,
                                   const struct lh_store_piece *piece)
{
    LH_ASSERT(piece->file_index < engine->opts.in_place.file_count);
    LH_ASSERT(piece->file_offset < engine->opts.in_place.files[piece->file_index].bytes);
    uint64_t rest = engine->opts.in_place.files[piece->file_index].bytes - piece->file_offset;
    return rest < piece->bytes ? rest : 0;
}

static uint32_t *checksums_at(const struct lh_engine *engine, const struct lh_transfer *transfer,
                              uint64_t offset)
{
    const struct lh_in_place_unit *made = made_of(engine, transfer);
    const struct lh_in_place_run *run = run_at(made, offset);
    uint64_t index = run->checksum_first + (offset - run->offset) / LH_CHECKSUM_BYTES;
    LH_ASSERT(lh_is_aligned(offset - run->offset, LH_CHECKSUM_BYTES));
    LH_ASSERT(index < made->checksum_count);
    return made->checksums + index;
}

static const uint32_t *source_checksums(struct lh_engine *engine,
                                        const struct lh_transfer *transfer, uint64_t offset)
{
    return checksums_at(engine, transfer, offset);
}

/* [Note: First reads] in in_place.h. */
static bool source_record(struct lh_engine *engine, const struct lh_transfer *transfer,
                          uint64_t offset, uint32_t file, uint32_t checksum)
{
    const struct lh_in_place_opts *opts = &engine->opts.in_place;
    uint32_t *place = checksums_at(engine, transfer, offset);
    LH_ASSERT(file < opts->file_count);
    if (*place != 0 || (opts->is_unchanged && !opts->is_unchanged(opts->context, file)))
        return false;
    *place = checksum;
    return true;
}

static const char *source_path(const struct lh_engine *engine, const struct lh_transfer *transfer,
                               uint32_t file)
{
    (void)transfer;
    LH_ASSERT(file < engine->opts.in_place.file_count);
    return engine->opts.in_place.files[file].path;
}

static bool source_moves(const struct lh_engine *engine, const struct lh_transfer *transfer)
{
    return engine->units[transfer->unit].parts->in_place.moves;
}

/* The index of the unit's first move whose bytes, as read, end after offset; or move_count. */
static uint32_t move_at(const struct lh_in_place_unit *unit, uint64_t offset)
{
    uint32_t low = 0;
    uint32_t high = unit->move_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (unit->moves[middle].from + unit->moves[middle].bytes <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/*
 * The place for bytes that the request at offset sets aside. Only requests after the first of a run
 * set bytes aside, and these begin at least transfer_bytes apart, so each has a place of its own.
 */
static uint8_t *seam_of(const struct lh_unit *unit, uint64_t offset)
{
    const struct lh_engine *engine = unit->engine;
    LH_ASSERT(unit->parts->in_place.moves && engine->in_place->seams);
    uint64_t index = unit->parts->in_place.seam_first + offset / engine->opts.transfer_bytes;
    return engine->in_place->seams + index * LH_IN_PLACE_ALIGN;
}

/*
 * Runs on a worker: move the bytes of a range of a request to where they belong. `request` is the
 * offset in the unit at which the request begins; its ranges are moved in order. See [Note: Seams].
 */
static void source_move(const struct lh_engine *engine, const struct lh_transfer *transfer,
                        uint64_t request, uint64_t first, uint64_t bytes)
{
    const struct lh_unit *unit = &engine->units[transfer->unit];
    uint8_t *memory = unit->memory;
    LH_ASSERT(request <= first && first + bytes <= unit->desc->bytes);
    const struct lh_in_place_unit *made = unit->parts->in_place.made;
    for (uint32_t i = move_at(made, first); i < made->move_count; i++) {
        const struct lh_in_place_move *move = &made->moves[i];
        uint64_t begin = lh_max_u64(move->from, first);
        uint64_t end = lh_min_u64(move->from + move->bytes, first + bytes);
        uint64_t shift = move->from - move->to;
        if (move->from >= first + bytes)
            return;
        if (begin - shift < request) {
            uint64_t count = lh_min_u64(request - (begin - shift), end - begin);
            memcpy(seam_of(unit, request), memory + begin, count);
            begin += count;
        }
        if (shift > 0)
            memmove(memory + begin - shift, memory + begin, end - begin);
    }
}

/* Copy the bytes that the request at offset has set aside to their places, before offset. */
static void seam_close(const struct lh_unit *unit, uint64_t offset)
{
    const struct lh_in_place_unit *made = unit->parts->in_place.made;
    uint32_t index = move_at(made, offset);
    if (index == made->move_count)
        return;
    const struct lh_in_place_move *move = &made->moves[index];
    uint64_t begin = lh_max_u64(move->from, offset) - (move->from - move->to);
    uint64_t end = lh_min_u64(move->to + move->bytes, offset);
    if (begin < end)
        memcpy(unit->memory + begin, seam_of(unit, offset), end - begin);
}

/* All requests of the unit are done: put the bytes that were set aside in their places. */
static void source_loaded(struct lh_engine *engine, const struct lh_transfer *transfer)
{
    const struct lh_unit *unit = &engine->units[transfer->unit];
    uint64_t step = engine->opts.transfer_bytes;
    for (uint32_t i = 0; unit->parts->in_place.moves && i < unit->parts->in_place.made->run_count;
         i++) {
        const struct lh_in_place_run *run = &unit->parts->in_place.made->runs[i];
        for (uint64_t at = step; at < run->bytes; at += step)
            seam_close(unit, run->offset + at);
    }
}

#define ADVICE                                                                                     \
    "; the file has changed since the store was created, or the drive returned wrong bytes"

static const struct lh_source_ops source_ops = {
    .map = source_map,
    .checksums = source_checksums,
    .record = source_record,
    .path = source_path,
    .least_bytes = source_least_bytes,
    .moves = source_moves,
    .move = source_move,
    .loaded = source_loaded,
    .advice = ADVICE,
};

static const struct lh_source_ops packed_source_ops = {
    .map = source_map,
    .checksums = source_checksums,
    .record = source_record,
    .path = source_path,
    .least_bytes = source_least_bytes,
    .load_first = lh_packed_load_first,
    .complete = lh_packed_decode,
    .advice = ADVICE,
};

static int jobs_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < engine->opts.in_place.unit_count; i++)
        count += is_packed(&engine->opts.in_place.units[i]) ? LH_IN_PLACE_JOB_COUNT : 0;
    if (count == 0)
        return 0;
    engine->in_place->jobs = lh_alloc_zeroed(engine->alloc, count, sizeof(struct lh_packed_job));
    if (!engine->in_place->jobs)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " jobs", count);
    return 0;
}

static int all_have_bytes(const struct lh_engine *engine, struct lh_error *err)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->desc->param_extent == LH_ENGINE_EXTENT_NONE && !unit->parts->in_place.made)
            return lh_error_set(err, -EINVAL,
                                "unit %u has no parameter extent and is not read in place", i);
    }
    return 0;
}

void lh_in_place_destroy(struct lh_engine *engine)
{
    if (!engine->in_place)
        return;
    lh_free(engine->alloc, engine->in_place->seams);
    lh_free(engine->alloc, engine->in_place->jobs);
}

int lh_in_place_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t seam_count = 0;
    uint64_t packed_count = 0;
    if (engine->opts.in_place.unit_count == 0)
        return all_have_bytes(engine, err);
    LH_TRY(LH_ENGINE_PART_CREATE(engine, in_place, err));
    LH_TRY(jobs_create(engine, err));
    engine->in_place->source = (struct lh_source){
        .ops = &source_ops, .is_of_units = true, .file_first = engine->opts.in_place.file_first};
    engine->in_place->packed_source = engine->in_place->source;
    engine->in_place->packed_source.ops = &packed_source_ops;
    engine->in_place->kept_source = engine->in_place->source;
    engine->in_place->kept_source.ops = &lh_kept_source_ops;
    for (uint32_t i = 0; i < engine->opts.in_place.unit_count; i++) {
        const struct lh_in_place_unit *made = &engine->opts.in_place.units[i];
        LH_TRY(unit_validate(engine, made, err));
        struct lh_unit *unit = &engine->units[made->unit];
        unit->parts->in_place.made = made;
        unit->source = &engine->in_place->source;
        unit->parts->in_place.moves = unit_moves(made);
        unit->parts->in_place.seam_first = seam_count;
        if (unit->parts->in_place.moves)
            seam_count += lh_div_ceil(unit->desc->bytes, engine->opts.transfer_bytes);
        if (is_packed(made)) {
            unit->parts->in_place.jobs =
                engine->in_place->jobs + packed_count++ * LH_IN_PLACE_JOB_COUNT;
            unit->source = &engine->in_place->packed_source;
            unit->parts->in_place.first = lh_engine_is_mate(engine) ? 0 : made->runs[0].offset;
        }
        if (is_packed(made) && engine->opts.in_place.kept_bytes > 0 && !lh_engine_is_mate(engine))
            lh_kept_add(engine, unit);
    }
    LH_TRY(all_have_bytes(engine, err));
    if (seam_count == 0)
        return 0;
    engine->in_place->seams = lh_alloc_zeroed(engine->alloc, seam_count, LH_IN_PLACE_ALIGN);
    if (!engine->in_place->seams)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " seams of %u bytes", seam_count,
                            LH_IN_PLACE_ALIGN);
    return 0;
}
