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
 */
#include <fenv.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "compute/adam_kernels.h"

#define WINDOW_ELEMENTS (LH_CHECKSUM_BYTES / 4)

_Static_assert(WINDOW_ELEMENTS % LH_ADAM_TILE_ELEMENTS == 0, "windows are whole tiles");
_Static_assert(LH_ADAM_TILE_ELEMENTS % LH_ADAM_FOLD_ELEMENTS == 0, "tiles are whole words");

struct walk {
    const struct lh_adam_kernel *kernel;
    const struct lh_adam_chunk *chunk;
    bool checksums; /* whether any checksums are checked or stored; if not, none are computed */
    uint32_t crcs[LH_ADAM_STREAM_COUNT];
};

static uint64_t stream_element_bytes(const struct walk *walk, int stream)
{
    switch ((enum lh_adam_stream)stream) {
    case LH_ADAM_STREAM_PARAM:
        return lh_dtype_bytes(walk->chunk->param_dtype);
    case LH_ADAM_STREAM_RESIDUAL:
    case LH_ADAM_STREAM_RESIDUAL_READ:
        return lh_adam_residual_bytes(walk->chunk->param_dtype);
    default:
        return 4;
    }
}

static const void *stream_array(const struct lh_adam_chunk *chunk, int stream)
{
    switch ((enum lh_adam_stream)stream) {
    case LH_ADAM_STREAM_PARAM:
        return chunk->param;
    case LH_ADAM_STREAM_RESIDUAL:
    case LH_ADAM_STREAM_RESIDUAL_READ:
        return chunk->residual;
    case LH_ADAM_STREAM_MOMENT1:
    case LH_ADAM_STREAM_MOMENT1_READ:
        return chunk->moment1;
    default:
        return chunk->moment2;
    }
}

/* The expected checksums of a stream that is read; NULL: not checked. */
static const uint32_t *stream_expected(const struct lh_adam_chunk *chunk, int stream)
{
    switch ((enum lh_adam_stream)stream) {
    case LH_ADAM_STREAM_RESIDUAL_READ:
        return chunk->residual ? chunk->residual_expected : NULL;
    case LH_ADAM_STREAM_MOMENT1_READ:
        return chunk->moment1_expected;
    case LH_ADAM_STREAM_MOMENT2_READ:
        return chunk->moment2_expected;
    default:
        return NULL;
    }
}

static uint32_t *stream_checksums(const struct lh_adam_chunk *chunk, int stream)
{
    switch ((enum lh_adam_stream)stream) {
    case LH_ADAM_STREAM_PARAM:
        return chunk->param_checksums;
    case LH_ADAM_STREAM_RESIDUAL:
        return chunk->residual ? chunk->residual_checksums : NULL;
    case LH_ADAM_STREAM_MOMENT1:
        return chunk->moment1_checksums;
    case LH_ADAM_STREAM_MOMENT2:
        return chunk->moment2_checksums;
    default:
        return NULL;
    }
}

static bool stream_is_wanted(const struct lh_adam_chunk *chunk, int stream)
{
    return stream_expected(chunk, stream) || stream_checksums(chunk, stream);
}

/* Extend the checksums of streams [begin, end) by elements [first, first + count). */
static void streams_chain(struct walk *walk, int begin, int end, uint64_t first, uint64_t count)
{
    for (int stream = begin; stream < end; stream++) {
        uint64_t bytes = stream_element_bytes(walk, stream);

        if (stream_is_wanted(walk->chunk, stream))
            walk->crcs[stream] = lh_crc32c(
                walk->crcs[stream], (const char *)stream_array(walk->chunk, stream) + first * bytes,
                count * bytes);
    }
}

/* The run of elements [first, first + count), which lie inside segment. */
static struct lh_adam_run run_make(const struct walk *walk, const struct lh_adam_segment *segment,
                                   uint64_t first, uint64_t count)
{
    const struct lh_adam_chunk *chunk = walk->chunk;
    uint64_t gradient_bytes = lh_dtype_bytes(segment->gradient_dtype);

    return (struct lh_adam_run){
        .param = (char *)chunk->param + first * lh_dtype_bytes(chunk->param_dtype),
        .residual = chunk->residual ? (char *)chunk->residual +
                                          first * lh_adam_residual_bytes(chunk->param_dtype)
                                    : NULL,
        .moment1 = chunk->moment1 + first,
        .moment2 = chunk->moment2 + first,
        .gradient = (const char *)segment->gradient + (first - segment->first) * gradient_bytes,
        .count = count,
        .param_dtype = chunk->param_dtype,
        .gradient_dtype = segment->gradient_dtype,
    };
}

/* Checksum, update, checksum, one tile at a time. segment NULL: a gap, which is left unchanged. */
static void piece_by_tiles(struct walk *walk, const struct lh_adam_segment *segment, uint64_t first,
                           uint64_t count)
{
    while (count > 0) {
        uint64_t part = lh_min_u64(count, LH_ADAM_TILE_ELEMENTS);

        streams_chain(walk, 0, LH_ADAM_STREAM_PARAM, first, part);
        if (segment) {
            struct lh_adam_run run = run_make(walk, segment, first, part);

            walk->kernel->run(&run, &segment->scalars);
        }
        streams_chain(walk, LH_ADAM_STREAM_PARAM, LH_ADAM_STREAM_COUNT, first, part);
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

    walk->kernel->run_checking(&run, &segment->scalars, crcs);
    for (int stream = 0; stream < LH_ADAM_STREAM_COUNT; stream++)
        if (stream_is_wanted(walk->chunk, stream))
            walk->crcs[stream] = lh_crc32c_combine(walk->crcs[stream] ^ UINT32_MAX, crcs[stream],
                                                   count * stream_element_bytes(walk, stream));
}

/* Update elements [first, end), which are inside segment and one window. */
static void segment_piece(struct walk *walk, const struct lh_adam_segment *segment, uint64_t first,
                          uint64_t end)
{
    /* Words are aligned to the arrays' cache lines if the chunk itself is. */
    uint64_t words_first = lh_min_u64(lh_align_up(first, LH_ADAM_FOLD_ELEMENTS), end);
    uint64_t words_end = end / LH_ADAM_FOLD_ELEMENTS * LH_ADAM_FOLD_ELEMENTS;

    if (!walk->checksums) {
        struct lh_adam_run run = run_make(walk, segment, first, end - first);

        walk->kernel->run(&run, &segment->scalars);
    } else if (!walk->kernel->run_checking || words_first >= words_end) {
        piece_by_tiles(walk, segment, first, end - first);
    } else {
        piece_by_tiles(walk, segment, first, words_first - first);
        piece_by_checking(walk, segment, words_first, words_end - words_first);
        piece_by_tiles(walk, segment, words_end, end - words_end);
    }
}

/* Compare or write the checksums of the blocks that end at element end. */
static int blocks_end(struct walk *walk, uint64_t end, struct lh_adam_mismatch *mismatch_out)
{
    static const enum lh_adam_array arrays[] = {
        [LH_ADAM_STREAM_RESIDUAL_READ] = LH_ADAM_ARRAY_RESIDUAL,
        [LH_ADAM_STREAM_MOMENT1_READ] = LH_ADAM_ARRAY_MOMENT1,
        [LH_ADAM_STREAM_MOMENT2_READ] = LH_ADAM_ARRAY_MOMENT2,
    };
    const struct lh_adam_chunk *chunk = walk->chunk;

    for (int stream = 0; stream < LH_ADAM_STREAM_COUNT; stream++) {
        uint64_t end_bytes = end * stream_element_bytes(walk, stream);
        const uint32_t *expected = stream_expected(chunk, stream);
        uint32_t *checksums = stream_checksums(chunk, stream);
        uint64_t block;

        if (end < chunk->count && !lh_is_aligned(end_bytes, LH_CHECKSUM_BYTES))
            continue;
        block = lh_div_ceil(end_bytes, LH_CHECKSUM_BYTES) - 1;
        if (checksums)
            checksums[block] = walk->crcs[stream];
        if (expected && expected[block] != walk->crcs[stream]) {
            *mismatch_out = (struct lh_adam_mismatch){arrays[stream], block, expected[block],
                                                      walk->crcs[stream]};
            return -EILSEQ;
        }
        walk->crcs[stream] = 0;
    }
    return 0;
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
                piece_by_tiles(walk, NULL, first, end - first);
            } else {
                end = lh_min_u64(segment->first + segment->count, window_end);
                segment_piece(walk, segment, first, end);
                s += end == segment->first + segment->count;
            }
            first = end;
        }
        LH_TRY(blocks_end(walk, first, mismatch_out));
    }
    return 0;
}

static void chunk_assert(const struct lh_adam_chunk *chunk)
{
    uint64_t end = 0;

    LH_ASSERT(chunk->param_dtype <= LH_DTYPE_F16);
    LH_ASSERT((chunk->residual != NULL) == (lh_adam_residual_bytes(chunk->param_dtype) > 0));
    for (uint32_t s = 0; s < chunk->segment_count; s++) {
        const struct lh_adam_segment *segment = chunk->segments + s;

        LH_ASSERT(segment->gradient_dtype <= LH_DTYPE_F16);
        LH_ASSERT(segment->count > 0 && segment->first >= end);
        end = segment->first + segment->count;
    }
    LH_ASSERT(end <= chunk->count);
}

int lh_adam_chunk_update_by(const struct lh_adam_kernel *kernel, const struct lh_adam_chunk *chunk,
                            struct lh_adam_mismatch *mismatch_out)
{
    struct walk walk = {.kernel = kernel, .chunk = chunk};
    fenv_t environment;
    int rc;

    chunk_assert(chunk);
    *mismatch_out = (struct lh_adam_mismatch){0};
    for (int stream = 0; stream < LH_ADAM_STREAM_COUNT; stream++)
        walk.checksums |= stream_is_wanted(chunk, stream);
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    rc = chunk_walk(&walk, mismatch_out);
    fesetenv(&environment);
    return rc;
}

int lh_adam_chunk_update(const struct lh_adam_chunk *chunk, struct lh_adam_mismatch *mismatch_out)
{
    const struct lh_adam_kernel *best;

    lh_adam_kernels(&best);
    return lh_adam_chunk_update_by(best, chunk, mismatch_out);
}
