/*
 * Test chunks: how units are cut into them, which ones keep a slab, how loaded ones are counted,
 * what is read for them, and what is reported if that is wrong.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define UNIT_COUNT 24
#define ROUND_COUNT 200

/* The parts of an engine that cutting reads, with random units. */
struct cut {
    struct lh_alloc alloc;
    struct lh_engine engine;
    struct lh_unit units[UNIT_COUNT];
    struct lh_engine_unit descs[UNIT_COUNT];
};

static void cut_make(struct cut *cut, uint64_t seed)
{
    memset(cut, 0, sizeof(*cut));
    struct lh_engine *engine = &cut->engine;
    cut->alloc = (struct lh_alloc)LH_ALLOC_INIT;
    engine->alloc = &cut->alloc;
    engine->units = cut->units;
    engine->opts.unit_count = UNIT_COUNT;
    engine->budget.chunk_elements = LH_ENGINE_ELEMENT_ALIGN * (1 + lh_test_random(&seed) % 9);
    for (uint32_t i = 0; i < UNIT_COUNT; i++) {
        uint64_t parts = lh_test_random(&seed) % 40; /* 0: the unit is frozen */
        cut->descs[i].elements = parts * LH_ENGINE_ELEMENT_ALIGN;
        cut->units[i].desc = &cut->descs[i];
        engine->budget.chunk_count +=
            lh_div_ceil(cut->units[i].desc->elements, engine->budget.chunk_elements);
    }
    engine->budget.state_chunk_count = engine->budget.chunk_count;
    engine->budget.kept_chunk_count =
        (uint32_t)(lh_test_random(&seed) % (engine->budget.chunk_count + 1ULL));
    LH_CHECK(lh_chunk_create(engine, NULL) == 0);
}

static void check_tiles(const struct lh_engine *engine)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < UNIT_COUNT; i++) {
        const struct lh_unit *unit = &engine->units[i];
        uint64_t end = 0;
        LH_CHECK(unit->chunk_first == next);
        for (uint32_t j = 0; j < unit->chunk_count; j++) {
            const struct lh_chunk *chunk = &engine->chunks[next++];
            bool is_last = j + 1 == unit->chunk_count;
            LH_CHECK(chunk->unit == i && chunk->first == end && chunk->count > 0);
            LH_CHECK(is_last ? chunk->count <= engine->budget.chunk_elements
                             : chunk->count == engine->budget.chunk_elements);
            LH_CHECK(chunk->state == LH_CHUNK_STATE_IDLE && chunk->slab == LH_CHUNK_NONE);
            LH_CHECK(!chunk->landing.block);
            end += chunk->count;
        }
        LH_CHECK(end == unit->desc->elements);
    }
    LH_CHECK(next == engine->chunk_count && next == engine->budget.chunk_count);
}

/*
 * The first sixteenth of the chunks, if there are slabs; the rest at distances that differ by at
 * most one.
 */
static void check_kept(const struct lh_engine *engine)
{
    uint32_t kept_count = 0;
    uint32_t first_count = engine->chunk_count / 16;
    uint32_t last = UINT32_MAX;
    uint32_t gap_min = UINT32_MAX;
    uint32_t gap_max = 0;
    for (uint32_t i = 0; i < engine->chunk_count; i++) {
        const struct lh_chunk *chunk = &engine->chunks[i];
        if (i < first_count)
            LH_CHECK(chunk->is_kept == (i < engine->budget.kept_chunk_count));
        if (!chunk->is_kept)
            continue;
        LH_CHECK(chunk->kept_slab == kept_count++); /* each has its own slab */
        if (i >= first_count && last != UINT32_MAX) {
            gap_min = i - last < gap_min ? i - last : gap_min;
            gap_max = i - last > gap_max ? i - last : gap_max;
        }
        last = i >= first_count ? i : last;
    }
    LH_CHECK(kept_count == engine->budget.kept_chunk_count);
    LH_CHECK(gap_max == 0 || gap_max - gap_min <= 1);
}

static void test_cut(void)
{
    static struct cut cut;
    lh_test_name("chunks tile the trainable units in order, and those that keep a slab are the "
                 "first ones and others spread evenly");
    for (uint64_t seed = 1; seed <= ROUND_COUNT; seed++) {
        cut_make(&cut, seed);
        check_tiles(&cut.engine);
        check_kept(&cut.engine);
        lh_free(&cut.alloc, cut.engine.chunks);
        LH_CHECK(cut.alloc.live_count == 0);
    }
}

static void test_counts(void)
{
    static struct cut cut;
    lh_test_name("a unit counts its loaded chunks that this step has not computed, and of these "
                 "those that pass through a slab");
    cut_make(&cut, 3);
    struct lh_engine *engine = &cut.engine;
    struct lh_chunk *chunk = NULL;
    for (uint32_t i = 0; i < engine->chunk_count && !chunk; i++)
        chunk = engine->chunks[i].is_kept ? NULL : &engine->chunks[i];
    LH_CHECK(chunk);
    struct lh_unit *unit = &engine->units[chunk->unit];
    const struct lh_update_unit *counted = &unit->update;
    for (int is_kept = 0; is_kept < 2; is_kept++) {
        chunk->is_kept = is_kept != 0;
        chunk->computed_step = 0;
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_READING);
        LH_CHECK(counted->chunks_loaded == 0 && counted->chunks_to_pass == 0);
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_LOADED);
        LH_CHECK(counted->chunks_loaded == 1 && counted->chunks_to_pass == !is_kept);
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_COMPUTING);
        LH_CHECK(counted->chunks_loaded == 0 && counted->chunks_to_pass == 0);
        /* the open step has computed it, so the step must not compute it a second time */
        chunk->computed_step = 1;
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_COMPUTED);
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_WRITING);
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_LOADED);
        LH_CHECK(counted->chunks_loaded == 0 && counted->chunks_to_pass == 0);
        lh_chunk_state_set(engine, chunk, LH_CHUNK_STATE_IDLE);
        LH_CHECK(counted->chunks_loaded == 0);
    }
    lh_free(&cut.alloc, engine->chunks);
}

static void test_recount(void)
{
    struct rig rig;
    lh_test_name("when a step is over, chunks that stayed in their slabs are counted as loaded");
    rig_make(&rig, "chunk-recount",
             (struct rig_opts){.manual = true, .in_memory = true, .commit_every = 1});
    LH_CHECK(rig_step(&rig, 0x0f) == 0); /* gradients of two units */
    rig_over(&rig);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_unit *unit = &rig.engine->units[i];
        LH_CHECK(unit->update.chunks_loaded == (i < 2 ? unit->chunk_count : 0));
        LH_CHECK(unit->update.chunks_to_pass == 0 && unit->update.chunk_next == 0);
    }
    rig_unmake(&rig);
}

static void test_arrays(void)
{
    struct rig rig;
    lh_test_name("R, M and V have the bytes and extents of their dtype, and each megabyte of an "
                 "array its own checksum");
    rig_make(
        &rig, "chunk-arrays",
        (struct rig_opts){.manual = true, .in_memory = true, .large = true, .commit_every = 1});
    struct lh_engine *engine = rig.engine;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->desc->elements == 0)
            continue;
        const uint64_t residual = unit->desc->dtype == LH_DTYPE_F32    ? 0
                                  : unit->desc->dtype == LH_DTYPE_BF16 ? 2
                                                                       : 4;
        const uint64_t bytes[LH_STATE_ARRAY_COUNT] = {residual, 4, 4};
        const uint32_t extents[LH_STATE_ARRAY_COUNT] = {
            unit->desc->residual_extent, unit->desc->moment1_extent, unit->desc->moment2_extent};
        for (uint32_t j = 0; j < LH_STATE_ARRAY_COUNT; j++) {
            LH_CHECK(unit->states[j].bytes == bytes[j]);
            LH_CHECK(unit->states[j].extent == extents[j]);
        }
    }
    const struct lh_unit *large = &engine->units[RIG_UNIT_COUNT - 1];
    const uint32_t extent = large->desc->moment1_extent;
    LH_CHECK(large->chunk_count > 1);
    for (uint32_t i = 0; i < large->chunk_count; i++) {
        uint64_t offset = engine->chunks[large->chunk_first + i].first * 4;
        LH_CHECK(lh_chunk_checksums(engine, large, extent, offset) ==
                 lh_chunk_checksums(engine, large, extent, 0) + offset / LH_MIB);
    }
    uint32_t count = 0;
    uint32_t slot = lh_store_write_slot(rig.store, large->desc->store_group);
    LH_CHECK(lh_chunk_checksums(engine, large, extent, 0) ==
             lh_store_checksums(rig.store, extent, slot, &count));
    LH_CHECK(slot != lh_store_read_slot(rig.store, large->desc->store_group));
    rig_unmake(&rig);
}

static uint64_t state_bytes(const struct rig *rig, bool with_moments)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        uint64_t element_bytes = lh_adam_residual_bytes(rig->units[i].dtype);
        bytes += rig->units[i].elements * (element_bytes + (with_moments ? 8 : 0));
    }
    return bytes;
}

static void test_zeros(void)
{
    struct rig rig;
    lh_test_name("moments that were never written are zeros that nobody reads; later all is read, "
                 "and nothing in slabs that keep their chunk");
    rig_make(&rig, "chunk-zeros",
             (struct rig_opts){
                 .manual = true, .in_memory = true, .least_memory = true, .commit_every = 1});
    const uint32_t link = LH_ENGINE_LINK_STATE_READ;
    /* The slabs hold what another use has left there. */
    for (uint32_t i = 0; i < rig.engine->budget.slab_count; i++)
        memset(rig.engine->slabs[i].memory, 0xff, rig.engine->budget.slab_bytes);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_over_as_planned(&rig).bytes[link] == state_bytes(&rig, false));
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_over_as_planned(&rig).bytes[link] == state_bytes(&rig, true));
    rig_finish(&rig);

    rig_make(&rig, "chunk-kept",
             (struct rig_opts){.manual = true, .in_memory = true, .commit_every = 1});
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        uint64_t expected = i == 0 ? state_bytes(&rig, false) : 0;
        LH_CHECK(rig_over_as_planned(&rig).bytes[link] == expected);
    }
    rig_finish(&rig);
}

/* Change one bit of an array on disk, where the next step reads it. */
static void spoil(struct rig *rig, uint32_t unit, uint32_t array, uint64_t offset)
{
    const struct lh_unit *found = &rig->engine->units[unit];
    uint32_t extent = found->states[array].extent;
    uint32_t slot = lh_store_read_slot(rig->store, found->desc->store_group);
    struct lh_store_piece piece;
    uint64_t block = offset / LH_BLOCK_BYTES * LH_BLOCK_BYTES;
    LH_CHECK(lh_store_map(rig->store, extent, slot, block, LH_BLOCK_BYTES, &piece, 1) == 1);
    uint8_t *bytes = aligned_alloc(LH_BLOCK_BYTES, LH_BLOCK_BYTES);
    int fd = lh_store_files(rig->store)[piece.file_index].fd;
    LH_CHECK(bytes);
    LH_CHECK(pread(fd, bytes, LH_BLOCK_BYTES, (off_t)piece.file_offset) == LH_BLOCK_BYTES);
    bytes[offset - block] ^= 0x10;
    LH_CHECK(pwrite(fd, bytes, LH_BLOCK_BYTES, (off_t)piece.file_offset) == LH_BLOCK_BYTES);
    free(bytes);
}

static void test_mismatch(void)
{
    static const struct {
        uint32_t unit;
        uint32_t array;
        const char *name;
    } cases[] = {{0, 0, "residual"},      {3, 0, "fp32 master"},  {1, 1, "first moment"},
                 {3, 2, "second moment"}, {5, 1, "first moment"}, {5, 2, "second moment"}};
    lh_test_name("a wrong byte of R, M or V fails the step that would use it, with its array, "
                 "unit, file and offset");
    for (size_t i = 0; i < LH_COUNT_OF(cases); i++) {
        struct rig rig;
        struct lh_error err = {0};
        char text[64];
        rig_make(&rig, "chunk-bad",
                 (struct rig_opts){.manual = true,
                                   .in_memory = true,
                                   .least_memory = true,
                                   /* this schedule reads nothing ahead */
                                   .schedule = LH_ENGINE_SCHEDULE_SERIAL,
                                   .commit_every = 1});
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
        rig_settle(&rig);
        spoil(&rig, cases[i].unit, cases[i].array, 5000);
        int rc = rig_step(&rig, RIG_GRADIENTS_ALL);
        rc = rc == 0 ? rig_flush(&rig, true) : rc;
        LH_CHECK(rc == -EILSEQ && lh_engine_error(rig.engine, &err) == -EILSEQ);
        snprintf(text, sizeof(text), "unit %u: its %s, read from ", cases[i].unit, cases[i].name);
        if (!strstr(err.message, text))
            fprintf(stderr, "%s\n", err.message);
        LH_CHECK(strstr(err.message, text) && strstr(err.message, "lohan.data"));
        LH_CHECK(strstr(err.message, "at byte 0 (file offset"));
        rig_unmake(&rig);
    }
}

int main(void)
{
    test_cut();
    test_counts();
    test_recount();
    test_arrays();
    test_zeros();
    test_mismatch();
    return 0;
}
