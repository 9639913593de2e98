/*
 * Decode integers in order WORDS, of which each column may belong to any group.
 *
 * [Note: Indexed] In order WORDS, what tables do not serve is decoded with vectors of rows: the
 * scales and zeros of consecutive rows are consecutive, so columns may belong to groups in any
 * order. The kernel exchanges rows and columns of the results in registers. The scales and zeros
 * of all groups are prepared for LH_UNPACK_INDEXED_ROWS rows at once, because what has just been
 * stored is slow to load while stores that bypass the caches are under way; if there are too many
 * groups, those that a tile meets. Tiles are decoded from left to right, and the kernel prefetches
 * the packed bytes of the next one: see [Note: Tables].
 *
 * [Note: Short scales] A usual scale is short if fp16 has it. The products of integers of 9 bits
 * with it are exact in fp32, and fp16 has those below its least normal number. So a product less
 * that of the zero is one fused operation, for which `zeros` has the latter, negated; otherwise it
 * has the zeros plus 2^23. Rounding to fp16 and then to bf16 is one addition to the bits: of the 16
 * that are left out, those from 0x7000 to 0x9000 are rounded to the tie first, and then up if the
 * last bit that remains is odd.
 */
#include <string.h>

#include "base/assert.h"
#include "compute/unpack_orders.h"

struct indexed {
    uint64_t row;   /* the first one */
    uint64_t begin; /* of the groups that are prepared */
    uint64_t end;
    struct lh_unpack_indexed all;
    _Alignas(LINE_BYTES) uint8_t values[LH_UNPACK_INDEXED_ROWS][LH_UNPACK_TILE * sizeof(float)];
};

/* Whether LH_UNPACK_INDEXED_ROWS scales are usual. */
static bool are_usual(const float *scales)
{
    uint32_t bits[LH_UNPACK_INDEXED_ROWS], all = 0;
    memcpy(bits, scales, sizeof(bits));
    for (uint64_t i = 0; i < LH_UNPACK_INDEXED_ROWS; i++)
        all |= (bits[i] - LH_UNPACK_USUAL_BITS_MIN) | (LH_UNPACK_USUAL_BITS_MAX - bits[i]);
    return all >> 31 == 0;
}

/* Whether LH_UNPACK_INDEXED_ROWS usual scales are short: see [Note: Short scales]. */
static bool are_short(const float *scales)
{
    uint32_t bits[LH_UNPACK_INDEXED_ROWS], unused = 0, small = 0;
    memcpy(bits, scales, sizeof(bits));
    for (uint64_t i = 0; i < LH_UNPACK_INDEXED_ROWS; i++) {
        unused |= bits[i] & 0x1FFF;
        small |= bits[i] - UINT32_C(0x38800000); /* 2^-14 */
    }
    for (uint64_t i = 0; i < LH_UNPACK_INDEXED_ROWS && small >> 31 && !unused; i++)
        unused = scales[i] * 0x1p24f != (float)(int32_t)(scales[i] * 0x1p24f);
    return unused == 0;
}

static void indexed_widen(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                          const struct lh_unpack_source *source, struct indexed *indexed)
{
    LH_ASSERT(indexed->end - indexed->begin <= LH_UNPACK_INDEXED_GROUP_MAX);
    indexed->all.is_usual = indexed->all.is_short = true;
    for (uint64_t g = indexed->begin; g < indexed->end; g++) {
        const uint64_t at = (g - indexed->begin) * LH_UNPACK_INDEXED_ROWS;
        float *scales = indexed->all.scales + at, *zeros = indexed->all.zeros + at;
        lh_unpack_batch_widen(kernel, unpack, source, g, indexed->row, 0x1p23f, scales, zeros);
        indexed->all.is_usual = indexed->all.is_usual && are_usual(scales);
        indexed->all.is_short = indexed->all.is_usual && indexed->all.is_short && are_short(scales);
    }
    indexed->all.is_short = indexed->all.is_short && unpack->dtype == LH_DTYPE_BF16;
    for (uint64_t g = 0; g < indexed->end - indexed->begin && indexed->all.is_short; g++) {
        float *zeros = indexed->all.zeros + g * LH_UNPACK_INDEXED_ROWS;
        for (uint64_t i = 0; i < LH_UNPACK_INDEXED_ROWS; i++)
            zeros[i] = (0x1p23f - zeros[i]) * indexed->all.scales[g * LH_UNPACK_INDEXED_ROWS + i];
    }
}

/* Prepare to decode a tile. */
static void indexed_begin(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                          const struct lh_unpack_source *source, uint64_t column, uint64_t columns,
                          struct indexed *indexed)
{
    const uint64_t block = unpack->block_columns, last = column + columns - 1;
    const bool has_all = group_count(unpack) <= LH_UNPACK_INDEXED_GROUP_MAX;
    const uint64_t begin = has_all ? 0 : column / block;
    const uint64_t end = has_all ? group_count(unpack) : last / block + 1;
    const bool is_ready = indexed->begin == begin && indexed->end == end;
    indexed->begin = begin;
    indexed->end = end;
    if (!is_ready)
        indexed_widen(kernel, unpack, source, indexed);
    indexed->all.last = (uint32_t)(end - begin - 1);
    indexed->all.index = unpack->has_index ? source->index + column * sizeof(uint32_t) : NULL;
    for (uint64_t c = 0; c < columns; c += LH_UNPACK_INDEXED_COLUMNS)
        indexed->all.groups[c / LH_UNPACK_INDEXED_COLUMNS] =
            (uint32_t)((column + c) / block - begin);
}

bool lh_unpack_is_indexed(const struct lh_unpack *unpack)
{
    if (unpack->order != LH_UNPACK_ORDER_WORDS)
        return false;
    if (unpack->has_index)
        return group_count(unpack) <= LH_UNPACK_INDEXED_GROUP_MAX;
    return unpack->block_columns % LH_UNPACK_INDEXED_COLUMNS == 0 || group_count(unpack) == 1;
}

void lh_unpack_indexed_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                          const struct lh_unpack_source *source, uint64_t row,
                          const struct lh_unpack_range *range)
{
    const uint64_t element_bytes = lh_unpack_element_bytes(unpack), columns = unpack->columns;
    const uint64_t parts = 32 / element_bits(unpack), row_bytes = columns * element_bytes;
    const bool is_whole = range->begin == row * columns &&
                          range->end - range->begin == LH_UNPACK_INDEXED_ROWS * columns;
    struct indexed indexed; /* of which most is not used: setting all of it takes time */
    indexed.row = row;
    indexed.begin = indexed.end = 0;
    indexed.all.is_past_caches =
        is_whole && lh_is_aligned((uintptr_t)range->out | row_bytes, LINE_BYTES);
    for (uint64_t c = 0; c < columns; c += LH_UNPACK_TILE) {
        const uint64_t some = lh_min_u64(LH_UNPACK_TILE, columns - c);
        const uint64_t done = some - some % LH_UNPACK_INDEXED_COLUMNS;
        const uint8_t *packed =
            source->packed + (c / parts * unpack->rows + row) * sizeof(uint32_t);
        indexed_begin(kernel, unpack, source, c, some, &indexed);
        indexed.all.ahead = columns - c >= 2 * LH_UNPACK_TILE ? LH_UNPACK_TILE / parts : 0;
        if (is_whole)
            kernel->indexed(unpack, packed, done, &indexed.all, range->out + c * element_bytes,
                            row_bytes);
        else
            kernel->indexed(unpack, packed, done, &indexed.all, indexed.values[0],
                            sizeof(indexed.values[0]));
        for (uint64_t r = 0; r < LH_UNPACK_INDEXED_ROWS && (!is_whole || done < some); r++) {
            struct lh_unpack_piece piece = lh_unpack_piece_of(unpack, range, row + r, c, some);
            uint64_t i = piece.skip < done ? lh_min_u64(piece.columns, done - piece.skip) : 0;
            if (!is_whole && i > 0)
                memcpy(piece.out, indexed.values[r] + piece.skip * element_bytes,
                       i * element_bytes);
            for (; i < piece.columns; i++)
                lh_unpack_order_put(unpack, source, source->packed, row + r, c + piece.skip + i,
                                    piece.out + i * element_bytes);
        }
    }
    if (indexed.all.is_past_caches)
        kernel->stored();
}
