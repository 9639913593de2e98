/*
 * The update of a chunk with its checksums.
 *
 * The chunk is walked in windows of LH_CHECKSUM_BYTES of an fp32 array. Every checksum block of
 * every array ends at the end of a window: those of an fp32 array at each one, those of a 2-byte
 * array at every second one. A window is cut into pieces, each inside one segment or outside all:
 *
 *      window  |----------------------------------------------------------------|
 *      pieces  |  gap  |ragged|    whole words, checked by the kernel    |ragged|
 *
 * The checksums of a block's pieces are joined: those of short pieces by chaining, the kernel's by
 * lh_crc32c_combine(). If no kernel computes checksums, all elements are handled like the ragged
 * pieces: tile by tile, checksum, update, checksum, while the tile is in cache.
 *
 * So are moments that are not stored in fp32 (adam_states.h). Their tiles are decoded and encoded
 * in parts, through two arrays of fp32 moments that stay in the first-level cache. So are second
 * moments of rows, of which each tile is cut into pieces of one row.
 */
#include <fenv.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "compute/adam_kernels.h"

#define WINDOW_ELEMENTS (LH_CHECKSUM_BYTES / 4)
/* Elements that are decoded at a time, and how far ahead of them memory is prefetched. */
#define PART_ELEMENTS 256
#define PREFETCH_ELEMENTS 1024
#define CACHE_LINE_BYTES 64

_Static_assert(WINDOW_ELEMENTS % LH_ADAM_TILE_ELEMENTS == 0, "windows are whole tiles");
_Static_assert(LH_ADAM_TILE_ELEMENTS % LH_ADAM_FOLD_ELEMENTS == 0, "tiles are whole words");
_Static_assert(LH_ADAM_SCALES_ELEMENTS % WINDOW_ELEMENTS == 0, "scales end at windows");
_Static_assert(LH_ADAM_TILE_ELEMENTS % PART_ELEMENTS == 0, "tiles are whole parts");
_Static_assert(PART_ELEMENTS % LH_ADAM_STATES_BLOCK == 0, "parts are whole blocks");

/* The streams of a walk: those of kernels, and those of averages and scales. */
enum {
    STREAM_AVERAGE_READ = LH_ADAM_STREAM_COUNT,
    STREAM_AVERAGE,
    STREAM_SCALES_READ,
    STREAM_SCALES,
    STREAM_COUNT
};

struct stream {
    const char *array;
    uint64_t element_bytes;
    const uint32_t *expected; /* the checksums of what is read; NULL: not checked */
    uint32_t *checksums;      /* where the checksums of what is written are stored, or NULL */
    uint32_t crc;
};

struct walk {
    const struct lh_adam_kernel *kernel;
    lh_adam_fn run; /* the kernel's for the chunk's rule */
    const struct lh_adam_chunk *chunk;
    bool checksums; /* whether any checksums are checked or stored; if not, none are computed */
    uint64_t align; /* pieces begin and end at multiples: of a block, or 1 if nothing has blocks */
    uint64_t block_bytes; /* of scales or rows; 0: there are none */
    bool is_fp32;         /* moments are */
    bool *has_nan;        /* as in struct lh_adam_run */
    struct stream streams[STREAM_COUNT];
};

/* Extend the checksums of streams [begin, end) by elements [first, first + count). */
static void streams_chain(struct walk *walk, int begin, int end, uint64_t first, uint64_t count)
{
    for (struct stream *stream = walk->streams + begin; stream < walk->streams + end; stream++) {
        if (stream->expected || stream->checksums)
            stream->crc = lh_crc32c(stream->crc, stream->array + first * stream->element_bytes,
                                    count * stream->element_bytes);
    }
}

/* The run of elements [first, first + count), which lie inside segment. */
static struct lh_adam_run run_make(const struct walk *walk, const struct lh_adam_segment *segment,
                                   uint64_t first, uint64_t count)
{
    const struct lh_adam_chunk *chunk = walk->chunk;
    uint64_t gradient_bytes = lh_dtype_bytes(segment->gradient_dtype);

    float *moment2 = walk->is_fp32 && chunk->moment2 ? (float *)chunk->moment2 + first : NULL;

    return (struct lh_adam_run){
        .param = (char *)chunk->param + first * lh_dtype_bytes(chunk->param_dtype),
        .residual = chunk->residual ? (char *)chunk->residual +
                                          first * lh_adam_residual_bytes(chunk->param_dtype)
                                    : NULL,
        .moment1 = walk->is_fp32 && chunk->moment1 ? (float *)chunk->moment1 + first : NULL,
        .moment2 = segment->update ? segment->update + (first - segment->first) : moment2,
        .gradient = segment->gradient ? (const char *)segment->gradient +
                                            (first - segment->first) * gradient_bytes
                                      : NULL,
        .count = count,
        .param_dtype = chunk->param_dtype,
        .gradient_dtype = segment->gradient_dtype,
        .has_nan = walk->has_nan,
    };
}

/* Move the averages of elements that were just updated. */
static void average_update(const struct walk *walk, const struct lh_adam_run *run, uint64_t first,
                           float rest)
{
    float masters[PART_ELEMENTS];
    float *average = walk->chunk->average;

    if (!average)
        return;
    if (run->param_dtype != LH_DTYPE_BF16) {
        lh_adam_average(average + first, run->residual ? run->residual : run->param, run->count,
                        rest);
        return;
    }
    LH_ASSERT(run->residual);
    for (uint64_t at = 0; at < run->count; at += PART_ELEMENTS) {
        uint64_t count = lh_min_u64(run->count - at, PART_ELEMENTS);

        lh_adam_join((uint16_t *)run->param + at, (int16_t *)run->residual + at, masters, count);
        lh_adam_average(average + first + at, masters, count, rest);
    }
}

/* Update a tile and its averages with gradients of zeros, once for each of the scalars. */
static void zeros_run(const struct walk *walk, const struct lh_adam_segment *segment,
                      struct lh_adam_run *run, uint64_t first)
{
    static const float zeros[LH_ADAM_TILE_ELEMENTS];

    LH_ASSERT(run->count <= LH_ADAM_TILE_ELEMENTS);
    run->gradient = zeros;
    run->gradient_dtype = LH_DTYPE_F32;
    for (uint32_t i = 0; i < segment->zero_count; i++) {
        if (!segment->averages_only)
            walk->run(run, &segment->zeros[i]);
        average_update(walk, run, first, segment->zeros[i].average_rest);
    }
}

/* Update a run from an element of the parameter on, with estimates of its second moments. */
static void factored_run(const struct walk *walk, const struct lh_adam_segment *segment,
                         const struct lh_adam_run *run, uint64_t param_first)
{
    float estimates[PART_ELEMENTS] __attribute__((aligned(64)));

    for (uint64_t at = 0; at < run->count; at += PART_ELEMENTS) {
        struct lh_adam_run part = lh_adam_run_from(run, at);

        part.count = lh_min_u64(part.count, PART_ELEMENTS);
        part.moment2 = estimates;
        lh_factor_estimate(&segment->factors, param_first + at, part.count, estimates);
        walk->run(&part, &segment->scalars);
    }
}

/* Checksum, update, checksum, one tile at a time. segment NULL: a gap, which is left unchanged. */
static void piece_by_tiles(struct walk *walk, const struct lh_adam_segment *segment, uint64_t first,
                           uint64_t count)
{
    while (count > 0) {
        uint64_t part = lh_min_u64(count, LH_ADAM_TILE_ELEMENTS);

        streams_chain(walk, 0, LH_ADAM_STREAM_PARAM, first, part);
        streams_chain(walk, STREAM_AVERAGE_READ, STREAM_AVERAGE, first, part);
        if (segment) {
            struct lh_adam_run run = run_make(walk, segment, first, part);

            if (segment->gradient) {
                if (segment->factors.values)
                    factored_run(walk, segment, &run,
                                 segment->param_first + first - segment->first);
                else
                    walk->run(&run, &segment->scalars);
                average_update(walk, &run, first, segment->scalars.average_rest);
            } else {
                zeros_run(walk, segment, &run, first);
            }
        }
        streams_chain(walk, LH_ADAM_STREAM_PARAM, LH_ADAM_STREAM_COUNT, first, part);
        streams_chain(walk, STREAM_AVERAGE, STREAM_SCALES_READ, first, part);
        first += part;
        count -= part;
    }
}

/*
 * lh_crc32c() starts and ends with an inversion. When it continues from UINT32_MAX, the initial
 * inversion yields 0, as if no bytes preceded. Combining then adds the crc of the preceding bytes,
 * advanced by the stream's length.
 */
static void piece_by_checking(struct walk *walk, const struct lh_adam_segment *segment,
                              uint64_t first, uint64_t count)
{
    struct lh_adam_run run = run_make(walk, segment, first, count);
    uint32_t crcs[LH_ADAM_STREAM_COUNT];

    walk->kernel->run_checking[walk->chunk->rule](&run, &segment->scalars, crcs);
    for (int i = 0; i < LH_ADAM_STREAM_COUNT; i++) {
        struct stream *stream = walk->streams + i;

        if (stream->expected || stream->checksums)
            stream->crc =
                lh_crc32c_combine(stream->crc ^ UINT32_MAX, crcs[i], count * stream->element_bytes);
    }
}

/* Prefetch what elements [first, first + PART_ELEMENTS) occupy; addresses may be invalid. */
static void part_prefetch(const struct walk *walk, const struct lh_adam_segment *segment,
                          uint64_t first)
{
    const char *gradient = segment->gradient;
    uint64_t gradient_bytes = lh_dtype_bytes(segment->gradient_dtype);

    for (int i = LH_ADAM_STREAM_PARAM; i < LH_ADAM_STREAM_COUNT; i++) {
        const struct stream *stream = walk->streams + i;

        for (uint64_t at = 0; at < PART_ELEMENTS * stream->element_bytes; at += CACHE_LINE_BYTES)
            __builtin_prefetch(stream->array + first * stream->element_bytes + at);
    }
    gradient += (first - segment->first) * gradient_bytes;
    for (uint64_t at = 0; at < PART_ELEMENTS * gradient_bytes; at += CACHE_LINE_BYTES)
        __builtin_prefetch(gradient + at);
}

/* Update the blocks [first, first + count), which are inside segment except for padding. */
static void part_update(const struct walk *walk, const struct lh_adam_segment *segment,
                        uint64_t first, uint64_t count)
{
    float moment1[PART_ELEMENTS] __attribute__((aligned(64)));
    float moment2[PART_ELEMENTS] __attribute__((aligned(64)));
    uint32_t words[PART_ELEMENTS] __attribute__((aligned(64)));
    const struct lh_adam_chunk *chunk = walk->chunk;
    const struct lh_adam_states_ops *states = walk->kernel->states;
    const bool has_scales = lh_adam_has_scales(chunk->states);
    const struct lh_adam_moments all = {chunk->states, chunk->moment1, chunk->moment2,
                                        chunk->scales};
    const struct lh_adam_moments moments = lh_adam_moments_from(&all, first);
    uint64_t end = lh_min_u64(first + count, segment->first + segment->count);
    uint64_t param_first = segment->param_first + (first - segment->first);
    struct lh_adam_run run = run_make(walk, segment, first, end - first);
    const bool is_direct = walk->kernel->run_stored && run.count == count;

    run.moment1 = chunk->moment1 ? moment1 : NULL;
    run.moment2 = lh_rules[chunk->rule].has_moment2 ? moment2 : NULL;
    run.has_roots = has_scales;
    if (is_direct) {
        if (!has_scales)
            lh_adam_states_words(states, words, param_first, count, &segment->random);
        walk->kernel->run_stored[chunk->rule](&run, &segment->scalars, &moments,
                                              has_scales ? NULL : words);
    } else {
        part_prefetch(walk, segment, first + PREFETCH_ELEMENTS);
        lh_adam_states_decode(states, &moments, run.moment1, run.moment2, count);
        /* padding, in which 4 bits have no 0 for the second moment */
        memset(moment1 + run.count, 0, (count - run.count) * sizeof(*moment1));
        memset(moment2 + run.count, 0, (count - run.count) * sizeof(*moment2));
        walk->run(&run, &segment->scalars);
    }
    if (has_scales || !is_direct)
        lh_adam_states_encode(states, &moments, run.moment1, run.moment2, param_first, count,
                              &segment->random);
    average_update(walk, &run, first, segment->scalars.average_rest);
}

/* Like part_update(), also without a gradient: then with zeros, once for each of the scalars. */
static void part_or_zeros_update(const struct walk *walk, const struct lh_adam_segment *segment,
                                 uint64_t first, uint64_t count)
{
    static const float zeros[PART_ELEMENTS];
    struct lh_adam_segment part = *segment;

    if (segment->gradient) {
        part_update(walk, segment, first, count);
        return;
    }
    part.first = first;
    part.count = lh_min_u64(first + count, segment->first + segment->count) - first;
    part.param_first += first - segment->first;
    if (segment->averages_only) {
        struct lh_adam_run run = run_make(walk, segment, first, part.count);

        for (uint32_t i = 0; i < segment->zero_count; i++)
            average_update(walk, &run, first, segment->zeros[i].average_rest);
        return;
    }
    part.gradient = zeros;
    part.gradient_dtype = LH_DTYPE_F32;
    for (uint32_t i = 0; i < segment->zero_count; i++) {
        part.scalars = segment->zeros[i];
        part.random.step = segment->random.step + i;
        part_update(walk, &part, first, count);
    }
}

/* Update elements from an element of the parameter on, which begin a block, row by row. */
static void rows_update(const struct walk *walk, const struct lh_adam_segment *segment,
                        const struct lh_adam_run *run, struct lh_adam_rows *rows, uint64_t begin)
{
    const uint64_t end = begin + run->count;
    const double scale = segment->scalars.gradient_scale;
    struct lh_adam_scalars scalars = segment->scalars;

    for (uint64_t at = begin; at < end;) {
        uint64_t row = at / segment->row_elements;
        uint64_t row_end = lh_min_u64((row + 1) * segment->row_elements, end);
        uint64_t block = (at - begin) / LH_ADAM_STATES_BLOCK;
        struct lh_adam_run part = lh_adam_run_from(run, at - begin);
        double sum = segment->row_sums ? segment->row_sums[row] * (scale * scale) : 0;
        float mean = (float)(sum / (double)segment->row_elements);
        float v = lh_is_aligned(at, LH_ADAM_STATES_BLOCK) ? rows[block].first : rows[block].last;

        v = fmaf(v, scalars.beta2, mean * scalars.beta2_rest);
        v = isnan(v) ? NAN : v;
        scalars.eps = fmaf(sqrtf(v), scalars.bias2_sqrt_inverse, segment->scalars.eps);
        part.count = row_end - at;
        walk->run(&part, &scalars);
        for (uint64_t first = begin + block * LH_ADAM_STATES_BLOCK; first < row_end; block++) {
            uint64_t next = first + LH_ADAM_STATES_BLOCK;

            if (first >= at)
                rows[block].first = v;
            if (next <= row_end || row_end == end)
                rows[block].last = v;
            first = next;
        }
        at = row_end;
    }
}

/*
 * Update the blocks [first, first + count), with moments in fp32 and second moments of rows;
 * without a gradient with zeros, once for each of the scalars.
 */
static void rows_tile(const struct walk *walk, const struct lh_adam_segment *segment,
                      uint64_t first, uint64_t count)
{
    static const float zeros[LH_ADAM_TILE_ELEMENTS];
    uint64_t last = lh_min_u64(first + count, segment->first + segment->count);
    uint64_t param_first = segment->param_first + (first - segment->first);
    struct lh_adam_run run = run_make(walk, segment, first, last - first);
    struct lh_adam_rows *rows = walk->chunk->rows + first / LH_ADAM_STATES_BLOCK;
    struct lh_adam_segment zero = *segment;

    if (segment->gradient) {
        rows_update(walk, segment, &run, rows, param_first);
        average_update(walk, &run, first, segment->scalars.average_rest);
        return;
    }
    run.gradient = zeros;
    run.gradient_dtype = LH_DTYPE_F32;
    for (uint32_t i = 0; i < segment->zero_count; i++) {
        zero.scalars = segment->zeros[i];
        if (!segment->averages_only)
            rows_update(walk, &zero, &run, rows, param_first);
        average_update(walk, &run, first, zero.scalars.average_rest);
    }
}

static void scales_chain(struct walk *walk, int stream_index, uint64_t first, uint64_t count)
{
    struct stream *stream = walk->streams + stream_index;

    if (stream->expected || stream->checksums)
        stream->crc =
            lh_crc32c(stream->crc, stream->array + first / LH_ADAM_STATES_BLOCK * walk->block_bytes,
                      count / LH_ADAM_STATES_BLOCK * walk->block_bytes);
}

/* Like piece_by_tiles(), for what is stored in blocks: first and count are multiples of these. */
static void piece_by_blocks(struct walk *walk, const struct lh_adam_segment *segment,
                            uint64_t first, uint64_t count)
{
    while (count > 0) {
        uint64_t tile = lh_min_u64(count, LH_ADAM_TILE_ELEMENTS);

        streams_chain(walk, 0, LH_ADAM_STREAM_PARAM, first, tile);
        streams_chain(walk, STREAM_AVERAGE_READ, STREAM_AVERAGE, first, tile);
        scales_chain(walk, STREAM_SCALES_READ, first, tile);
        if (segment && walk->is_fp32)
            rows_tile(walk, segment, first, tile);
        for (uint64_t at = 0; segment && !walk->is_fp32 && at < tile; at += PART_ELEMENTS)
            part_or_zeros_update(walk, segment, first + at, lh_min_u64(tile - at, PART_ELEMENTS));
        streams_chain(walk, LH_ADAM_STREAM_PARAM, LH_ADAM_STREAM_COUNT, first, tile);
        streams_chain(walk, STREAM_AVERAGE, STREAM_SCALES_READ, first, tile);
        scales_chain(walk, STREAM_SCALES, first, tile);
        first += tile;
        count -= tile;
    }
}

/* Update elements [first, end), which are inside segment and one window. */
static void segment_piece(struct walk *walk, const struct lh_adam_segment *segment, uint64_t first,
                          uint64_t end)
{
    /* Words are aligned to the arrays' cache lines if the chunk itself is. */
    uint64_t words_first = lh_min_u64(lh_align_up(first, LH_ADAM_FOLD_ELEMENTS), end);
    uint64_t words_end = end / LH_ADAM_FOLD_ELEMENTS * LH_ADAM_FOLD_ELEMENTS;

    /* Updates that idle units owe have no gradient. They go tile by tile, like short pieces, second
     * moments that are estimated part by part, and chunks with averages, whose masters are then
     * still in cache. */
    bool has_pass = segment->gradient && walk->kernel->run_checking && words_first < words_end &&
                    !walk->chunk->average && !segment->factors.values;

    if (walk->align > 1) {
        piece_by_blocks(walk, segment, first, end - first);
    } else if (segment->gradient && !walk->checksums && !walk->chunk->average &&
               !segment->factors.values) {
        struct lh_adam_run run = run_make(walk, segment, first, end - first);

        walk->run(&run, &segment->scalars);
    } else if (!has_pass) {
        piece_by_tiles(walk, segment, first, end - first);
    } else {
        piece_by_tiles(walk, segment, first, words_first - first);
        piece_by_checking(walk, segment, words_first, words_end - words_first);
        piece_by_tiles(walk, segment, words_end, end - words_end);
    }
}

/* Compare or write the checksums of the scales that end at element end. */
static int scales_end(struct walk *walk, uint64_t end, struct lh_adam_mismatch *mismatch_out)
{
    struct stream *read = walk->streams + STREAM_SCALES_READ;
    struct stream *written = walk->streams + STREAM_SCALES;
    uint64_t block = lh_div_ceil(end, LH_ADAM_SCALES_ELEMENTS) - 1;

    if (end < walk->chunk->count && !lh_is_aligned(end, LH_ADAM_SCALES_ELEMENTS))
        return 0;
    if (written->checksums)
        written->checksums[block] = written->crc;
    if (read->expected && read->expected[block] != read->crc) {
        *mismatch_out = (struct lh_adam_mismatch){LH_ADAM_ARRAY_SCALES, block,
                                                  read->expected[block], read->crc};
        return -EILSEQ;
    }
    read->crc = 0;
    written->crc = 0;
    return 0;
}

/* Compare or write the checksums of the blocks that end at element end. */
static int blocks_end(struct walk *walk, uint64_t end, struct lh_adam_mismatch *mismatch_out)
{
    static const enum lh_adam_array arrays[] = {
        [LH_ADAM_STREAM_RESIDUAL_READ] = LH_ADAM_ARRAY_RESIDUAL,
        [LH_ADAM_STREAM_MOMENT1_READ] = LH_ADAM_ARRAY_MOMENT1,
        [LH_ADAM_STREAM_MOMENT2_READ] = LH_ADAM_ARRAY_MOMENT2,
        [STREAM_AVERAGE_READ] = LH_ADAM_ARRAY_AVERAGE,
    };

    for (int i = 0; i < STREAM_SCALES_READ; i++) {
        struct stream *stream = walk->streams + i;
        uint64_t end_bytes = end * stream->element_bytes;
        uint64_t block;

        if (end < walk->chunk->count && !lh_is_aligned(end_bytes, LH_CHECKSUM_BYTES))
            continue;
        block = lh_div_ceil(end_bytes, LH_CHECKSUM_BYTES) - 1;
        if (stream->checksums)
            stream->checksums[block] = stream->crc;
        if (stream->expected && stream->expected[block] != stream->crc) {
            *mismatch_out =
                (struct lh_adam_mismatch){arrays[i], block, stream->expected[block], stream->crc};
            return -EILSEQ;
        }
        stream->crc = 0;
    }
    return walk->block_bytes > 0 ? scales_end(walk, end, mismatch_out) : 0;
}

/* Report the first segment with a NaN, and stop looking for others. */
static void nan_found(struct walk *walk, uint32_t segment)
{
    *walk->chunk->nan_segment = segment;
    walk->has_nan = NULL;
}

static int chunk_walk(struct walk *walk, struct lh_adam_mismatch *mismatch_out)
{
    const struct lh_adam_chunk *chunk = walk->chunk;
    uint64_t first = 0;
    uint32_t s = 0;

    while (first < chunk->count) {
        uint64_t window_end =
            lh_min_u64((first / WINDOW_ELEMENTS + 1) * WINDOW_ELEMENTS, chunk->count);

        while (first < window_end) {
            const struct lh_adam_segment *segment = chunk->segments + s;
            uint64_t end;

            if (s == chunk->segment_count || segment->first > first) {
                end =
                    s == chunk->segment_count ? window_end : lh_min_u64(segment->first, window_end);
                if (walk->align > 1)
                    piece_by_blocks(walk, NULL, first, end - first);
                else
                    piece_by_tiles(walk, NULL, first, end - first);
            } else {
                uint64_t segment_end = segment->first + segment->count;

                end = lh_min_u64(lh_align_up(segment_end, walk->align), window_end);
                segment_piece(walk, segment, first, end);
                if (walk->has_nan && *walk->has_nan)
                    nan_found(walk, s);
                s += end >= segment_end;
            }
            first = end;
        }
        LH_TRY(blocks_end(walk, first, mismatch_out));
    }
    return 0;
}

static void chunk_assert(const struct lh_adam_chunk *chunk, uint64_t align)
{
    uint64_t end = 0;

    const struct lh_rule_row *rule = &lh_rules[chunk->rule];
    bool is_4bit = chunk->states == LH_ADAM_STATES_4BIT;

    LH_ASSERT((chunk->scales != NULL) == lh_adam_has_scales(chunk->states));
    LH_ASSERT((chunk->rows != NULL) == rule->has_rows);
    LH_ASSERT(!chunk->rows || chunk->states == LH_ADAM_STATES_F32);
    LH_ASSERT(!is_4bit || (rule->has_moment1 && rule->has_moment2));
    LH_ASSERT((chunk->moment1 != NULL) == rule->has_moment1);
    LH_ASSERT((chunk->moment2 != NULL) == (rule->has_moment2 && !is_4bit));
    LH_ASSERT(chunk->moment1 || chunk->moment2 || chunk->states == LH_ADAM_STATES_F32);
    LH_ASSERT(chunk->average || (!chunk->average_expected && !chunk->average_checksums));
    LH_ASSERT(lh_is_aligned(chunk->count, align));
    LH_ASSERT(chunk->param_dtype <= LH_DTYPE_F16);
    LH_ASSERT((chunk->residual != NULL) == (lh_adam_residual_bytes(chunk->param_dtype) > 0));
    for (uint32_t s = 0; s < chunk->segment_count; s++) {
        const struct lh_adam_segment *segment = chunk->segments + s;

        LH_ASSERT(segment->gradient_dtype <= LH_DTYPE_F16);
        LH_ASSERT(!segment->gradient || segment->zero_count == 0);
        LH_ASSERT(segment->count > 0 && segment->first >= end);
        LH_ASSERT(lh_is_aligned(segment->first, align));
        LH_ASSERT(lh_is_aligned(segment->param_first, align));
        LH_ASSERT(!chunk->rows || !segment->gradient || segment->row_sums);
        LH_ASSERT((segment->factors.values != NULL) == rule->has_factors);
        LH_ASSERT(rule->has_matrices == (segment->update != NULL));
        end = lh_align_up(segment->first + segment->count, align);
    }
    LH_ASSERT(end <= chunk->count);
}

/* Describe what is read and written of an array, which is nothing if the chunk has none. */
static void array_describe(struct walk *walk, int read, int written, const void *array,
                           uint64_t element_bytes, const uint32_t *expected, uint32_t *checksums)
{
    struct stream stream = {.array = array, .element_bytes = array ? element_bytes : 0};

    walk->streams[read] = stream;
    walk->streams[read].expected = array ? expected : NULL;
    walk->streams[written] = stream;
    walk->streams[written].checksums = array ? checksums : NULL;
}

static void streams_describe(struct walk *walk)
{
    const struct lh_adam_chunk *chunk = walk->chunk;

    walk->streams[LH_ADAM_STREAM_PARAM] = (struct stream){
        .array = chunk->param,
        .element_bytes = lh_dtype_bytes(chunk->param_dtype),
        .checksums = chunk->param_checksums,
    };
    array_describe(walk, LH_ADAM_STREAM_RESIDUAL_READ, LH_ADAM_STREAM_RESIDUAL, chunk->residual,
                   lh_adam_residual_bytes(chunk->param_dtype), chunk->residual_expected,
                   chunk->residual_checksums);
    array_describe(walk, LH_ADAM_STREAM_MOMENT1_READ, LH_ADAM_STREAM_MOMENT1, chunk->moment1,
                   lh_adam_moment1_bytes(chunk->states), chunk->moment1_expected,
                   chunk->moment1_checksums);
    array_describe(walk, LH_ADAM_STREAM_MOMENT2_READ, LH_ADAM_STREAM_MOMENT2, chunk->moment2,
                   lh_adam_moment2_bytes(chunk->states), chunk->moment2_expected,
                   chunk->moment2_checksums);
    array_describe(walk, STREAM_AVERAGE_READ, STREAM_AVERAGE, chunk->average, sizeof(float),
                   chunk->average_expected, chunk->average_checksums);
    array_describe(walk, STREAM_SCALES_READ, STREAM_SCALES,
                   chunk->rows ? (const void *)chunk->rows : chunk->scales, 0,
                   chunk->scales_expected, chunk->scales_checksums);
}

int lh_adam_chunk_update(const struct lh_adam_kernel *kernel, const struct lh_adam_chunk *chunk,
                         struct lh_adam_mismatch *mismatch_out)
{
    struct walk walk = {
        .kernel = kernel,
        .chunk = chunk,
        .is_fp32 = chunk->states == LH_ADAM_STATES_F32,
        .block_bytes = lh_adam_block_bytes(chunk->rule, chunk->states),
    };
    fenv_t environment;
    bool has_nan = false;
    int rc;

    walk.align = walk.is_fp32 && walk.block_bytes == 0 ? 1 : LH_ADAM_STATES_BLOCK;
    if (chunk->nan_segment) {
        *chunk->nan_segment = LH_ADAM_SEGMENT_NONE;
        walk.has_nan = &has_nan;
    }
    chunk_assert(chunk, walk.align);
    streams_describe(&walk);
    if (!kernel)
        lh_adam_kernels(&walk.kernel);
    walk.run = walk.kernel->run[chunk->rule];
    *mismatch_out = (struct lh_adam_mismatch){0};
    for (int i = 0; i < STREAM_COUNT; i++)
        walk.checksums |= walk.streams[i].expected || walk.streams[i].checksums;
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    rc = chunk_walk(&walk, mismatch_out);
    fesetenv(&environment);
    return rc;
}
