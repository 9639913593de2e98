/*
 * Decode tensors in other orders than rows, and integers with zeros: [Note: Orders] and
 * [Note: Zeros] in unpack.h.
 *
 * [Note: Tiles] With a kernel, a group is decoded in bands of LH_UNPACK_TILE rows, and a band in
 * strips of LH_UNPACK_STRIP columns. The kernel first copies the bits of a strip so that those of
 * each row are consecutive, in tiles of LH_UNPACK_TILE columns; it then decodes them row by row.
 * What the tiles and batches do not cover is copied and decoded by the definition. Order WORDS is
 * decoded in another way: [Note: Tables] and [Note: Indexed].
 */
#include <string.h>

#include "base/assert.h"
#include "base/base.h"
#include "compute/unpack_orders.h"

/* The most groups of at least LH_UNPACK_BATCH columns that a strip meets. */
#define STRIP_GROUP_COUNT_MAX (LH_UNPACK_STRIP / LH_UNPACK_BATCH + 1)

static uint32_t word_at(const uint8_t *words, uint64_t index)
{
    uint32_t word;
    memcpy(&word, words + index * sizeof(word), sizeof(word));
    return word;
}

/* The place, in a word, of the bits of one of its eight rows. */
static uint32_t awq_place(uint64_t row)
{
    static const uint8_t places[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    return places[row % 8];
}

/* The bits of an element of a group. */
static uint32_t bits_at(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                        uint64_t column)
{
    const uint32_t bits = element_bits(unpack), parts = 32 / bits, mask = (UINT32_C(1) << bits) - 1;
    if (unpack->order == LH_UNPACK_ORDER_WORDS) {
        uint32_t word = word_at(group, column / parts * unpack->group_rows + row);
        return word >> (column % parts * bits) & mask;
    }
    uint32_t word = word_at(group, column * (unpack->group_rows / 8) + row / 8);
    uint32_t place = unpack->order == LH_UNPACK_ORDER_AWQ ? awq_place(row) : (uint32_t)(row % 8);
    return word >> (place * bits) & mask;
}

/* A word of zeros. */
static uint32_t zeros_at(const struct lh_unpack *unpack, const uint8_t *zeros, uint64_t index)
{
    uint32_t ones = UINT32_MAX / ((UINT32_C(1) << element_bits(unpack)) - 1);
    return word_at(zeros, index) + unpack->zero * ones;
}

/* In other orders than rows. */
static uint32_t zero_at(const struct lh_unpack *unpack, const uint8_t *zeros, uint64_t group,
                        uint64_t row)
{
    const uint32_t bits = element_bits(unpack), parts = 32 / bits, mask = (UINT32_C(1) << bits) - 1;
    if (!unpack->has_zeros)
        return unpack->zero;
    uint32_t word = zeros_at(unpack, zeros, group * (unpack->rows / parts) + row / parts);
    bool is_awq = unpack->order == LH_UNPACK_ORDER_AWQ;
    return word >> ((is_awq ? awq_place(row) : row % parts) * bits) & mask;
}

/* The group of columns to which a column belongs. */
static uint64_t group_of(const struct lh_unpack *unpack, const uint8_t *index, uint64_t column)
{
    if (!unpack->has_index)
        return column / unpack->block_columns;
    return lh_min_u64(word_at(index, column), group_count(unpack) - 1);
}

/* The definition: an element with these bits. `row` counts from the first row of the tensor. */
static void put(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                uint32_t bits, uint64_t row, uint64_t column, uint64_t at, void *out)
{
    if (unpack->format == LH_UNPACK_FORMAT_E2M1) {
        uint64_t blocks = unpack->group_rows / unpack->block_rows;
        uint64_t first = row / unpack->group_rows * unpack->columns + column;
        uint64_t block = row % unpack->group_rows / unpack->block_rows;
        float scale = lh_unpack_scale_at(unpack, source, first * blocks + block);
        lh_unpack_put(unpack, lh_unpack_e2m1[bits] * scale, at, out);
        return;
    }
    uint64_t group = group_of(unpack, source->index, column);
    int32_t zero = (int32_t)zero_at(unpack, source->zeros, group, row);
    float scale = lh_unpack_scale_at(unpack, source, group * unpack->rows + row);
    lh_unpack_put(unpack, (float)((int32_t)bits - zero) * scale, at, out);
}

void lh_unpack_order_put(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                         const uint8_t *group, uint64_t row, uint64_t column, void *out)
{
    put(unpack, source, bits_at(unpack, group, row % unpack->group_rows, column), row, column, 0,
        out);
}

/* --- With a kernel: see [Note: Tiles] --------------------------------------------------------- */

/* A strip; `row` and `column` are its first ones. */
struct strip {
    const uint8_t *group; /* the packed bytes of its group */
    uint64_t group_first; /* the group's first row in the tensor */
    uint64_t row;         /* in the group */
    uint64_t rows;
    uint64_t column;
    uint64_t columns;
    uint8_t bits[LH_UNPACK_TILE][LH_UNPACK_STRIP]; /* 4 for each element */
    float scales[STRIP_GROUP_COUNT_MAX * LH_UNPACK_TILE];
    float zeros[STRIP_GROUP_COUNT_MAX * LH_UNPACK_TILE];
};

static void strip_fill(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                       struct strip *strip)
{
    bool is_tile = strip->rows == LH_UNPACK_TILE;
    uint64_t done = is_tile ? strip->columns - strip->columns % LH_UNPACK_TILE : 0;
    for (uint64_t c = 0; c < done; c += LH_UNPACK_TILE)
        kernel->tile(unpack, strip->group, strip->row, strip->column + c, strip->bits[0] + c / 2);
    for (uint64_t r = 0; r < strip->rows; r++) {
        uint8_t *to = strip->bits[r];
        for (uint64_t c = done; c < strip->columns; c++) {
            uint8_t bits =
                (uint8_t)bits_at(unpack, strip->group, strip->row + r, strip->column + c);
            to[c / 2] = c % 2 == 0 ? bits : (uint8_t)(to[c / 2] | bits << 4);
        }
    }
}

/* LH_UNPACK_BATCH scales. */
static void scales_widen(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                         const uint8_t *from, float *scales)
{
    static const uint32_t formats[] = {[LH_UNPACK_SCALE_F32] = LH_UNPACK_FORMAT_F32,
                                       [LH_UNPACK_SCALE_BF16] = LH_UNPACK_FORMAT_BF16,
                                       [LH_UNPACK_SCALE_F16] = LH_UNPACK_FORMAT_F16};
    const struct lh_unpack wide = {.format = formats[unpack->scale_type], .dtype = LH_DTYPE_F32};
    kernel->bytes(&wide, from, 1, LH_UNPACK_BATCH, scales);
}

/* The parts of a word, a byte each. */
static uint64_t parts_spread(uint32_t word, uint32_t bits)
{
    uint64_t parts = word;
    if (bits == 8)
        return parts;
    parts = (parts | parts << 16) & UINT64_C(0x0000FFFF0000FFFF);
    parts = (parts | parts << 8) & UINT64_C(0x00FF00FF00FF00FF);
    return (parts | parts << 4) & UINT64_C(0x0F0F0F0F0F0F0F0F);
}

void lh_unpack_batch_widen(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                           const struct lh_unpack_source *source, uint64_t group, uint64_t row,
                           float more, float *scales, float *zeros)
{
    const uint64_t first = group * unpack->rows + row;
    const uint32_t bits = element_bits(unpack), parts = 32 / bits;
    const bool is_awq = unpack->order == LH_UNPACK_ORDER_AWQ;
    uint8_t bytes[LH_UNPACK_BATCH];
    scales_widen(kernel, unpack, source->scales + first * lh_unpack_scale_bytes(unpack), scales);
    memset(bytes, (int)unpack->zero, sizeof(bytes));
    for (uint32_t i = 0; i < LH_UNPACK_BATCH && unpack->has_zeros; i += parts) {
        uint64_t all = parts_spread(zeros_at(unpack, source->zeros, (first + i) / parts), bits);
        memcpy(bytes + i, &all, parts);
        for (uint32_t j = 0; j < parts && is_awq; j++)
            bytes[i + j] = (uint8_t)(all >> 8 * awq_place(j));
    }
    for (uint32_t i = 0; i < LH_UNPACK_BATCH; i++)
        zeros[i] = more + (float)bytes[i];
}

/* Prepare the scales of a strip of integers, if its columns belong to consecutive groups. */
static bool strip_widen(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                        const struct lh_unpack_source *source, struct strip *strip)
{
    if (unpack->block_columns < LH_UNPACK_BATCH || strip->rows % LH_UNPACK_BATCH != 0)
        return false;
    uint64_t first = strip->column / unpack->block_columns;
    uint64_t end = lh_div_ceil(strip->column + strip->columns, unpack->block_columns);
    LH_ASSERT(end - first <= STRIP_GROUP_COUNT_MAX);
    for (uint64_t g = first; g < end; g++) {
        for (uint64_t r = 0; r < strip->rows; r += LH_UNPACK_BATCH) {
            uint64_t at = (g - first) * LH_UNPACK_TILE + r;
            lh_unpack_batch_widen(kernel, unpack, source, g, strip->row + r, 0, strip->scales + at,
                                  strip->zeros + at);
        }
    }
    return true;
}

/* The same for a strip of E2M1: a scale for each column, and each block of rows. */
static bool strip_powers(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                         struct strip *strip)
{
    const uint64_t blocks = unpack->group_rows / unpack->block_rows;
    if (unpack->block_rows != LH_UNPACK_TILE / 2)
        return false;
    for (uint64_t b = 0; b < lh_div_ceil(strip->rows, unpack->block_rows); b++) {
        uint64_t first = strip->group_first / unpack->group_rows * unpack->columns + strip->column;
        for (uint64_t c = 0; c < strip->columns; c++)
            strip->scales[b * LH_UNPACK_STRIP + c] = lh_unpack_scale_at(
                unpack, source, (first + c) * blocks + (strip->row / unpack->block_rows + b));
    }
    return true;
}

struct lh_unpack_piece lh_unpack_piece_of(const struct lh_unpack *unpack,
                                          const struct lh_unpack_range *range, uint64_t row,
                                          uint64_t column, uint64_t columns)
{
    const uint64_t first = row * unpack->columns + column;
    const uint64_t begin = lh_max_u64(first, range->begin);
    const uint64_t end = lh_min_u64(first + columns, range->end);
    struct lh_unpack_piece piece = {0};
    if (begin >= end)
        return piece;
    piece.skip = begin - first;
    piece.columns = end - begin;
    piece.out = range->out + (begin - range->begin) * lh_unpack_element_bytes(unpack);
    return piece;
}

/* Decode one element of a row of a strip by the definition; `row` counts from the strip's first. */
static void strip_put(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                      const struct strip *strip, uint64_t row, uint64_t column, void *out)
{
    put(unpack, source, strip->bits[row][column / 2] >> (column % 2 * 4) & 15,
        strip->group_first + strip->row + row, strip->column + column, 0, out);
}

/*
 * Decode a piece of a row, run by run: the elements of a run belong to one group, whose scales and
 * zeros are those of the strip.
 */
static void runs_put(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                     const struct lh_unpack_source *source, const struct strip *strip, uint64_t row,
                     struct lh_unpack_piece piece)
{
    const uint64_t element_bytes = lh_unpack_element_bytes(unpack);
    const uint64_t phase = strip->column % unpack->block_columns;
    uint64_t group = 0, column = piece.skip, end = piece.skip + piece.columns;
    for (uint64_t stop = unpack->block_columns - phase; column < end;
         stop += unpack->block_columns, group++) {
        uint64_t run = lh_min_u64(end, stop);
        while (column < run) {
            uint8_t *to = piece.out + (column - piece.skip) * element_bytes;
            uint64_t count = column % 2 == 0 ? run - column : 0, at = group * LH_UNPACK_TILE + row;
            count -= count % LH_UNPACK_BATCH;
            if (count > 0)
                kernel->integers(unpack, strip->bits[row] + column / 2, strip->zeros[at],
                                 strip->scales[at], count, to);
            else
                strip_put(unpack, source, strip, row, column, to);
            column += lh_max_u64(count, 1);
        }
    }
}

/* Decode a piece of a row of E2M1, of whose scales those of the strip are the powers. */
static void powers_put(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                       const struct lh_unpack_source *source, const struct strip *strip,
                       uint64_t row, struct lh_unpack_piece piece)
{
    const float *scales = strip->scales + row / unpack->block_rows * LH_UNPACK_STRIP;
    uint64_t end = piece.skip + piece.columns;
    for (uint64_t column = piece.skip; column < end;) {
        uint8_t *to = piece.out + (column - piece.skip) * lh_unpack_element_bytes(unpack);
        uint64_t count = column % 2 == 0 ? end - column : 0;
        count -= count % LH_UNPACK_BATCH;
        if (count > 0)
            kernel->scaled(unpack, strip->bits[row] + column / 2, scales + column, count, to);
        else
            strip_put(unpack, source, strip, row, column, to);
        column += lh_max_u64(count, 1);
    }
}

/* Decode the part of a range that is in a band. */
static void band_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                    const struct lh_unpack_source *source, struct strip *strip,
                    const struct lh_unpack_range *range)
{
    const bool is_e2m1 = unpack->format == LH_UNPACK_FORMAT_E2M1;
    for (uint64_t c = 0; c < unpack->columns; c += LH_UNPACK_STRIP) {
        strip->column = c;
        strip->columns = lh_min_u64(LH_UNPACK_STRIP, unpack->columns - c);
        strip_fill(kernel, unpack, strip);
        bool is_ready = is_e2m1 ? strip_powers(unpack, source, strip)
                                : strip_widen(kernel, unpack, source, strip);
        for (uint64_t r = 0; r < strip->rows; r++) {
            struct lh_unpack_piece piece = lh_unpack_piece_of(
                unpack, range, strip->group_first + strip->row + r, c, strip->columns);
            if (is_ready && is_e2m1)
                powers_put(kernel, unpack, source, strip, r, piece);
            else if (is_ready)
                runs_put(kernel, unpack, source, strip, r, piece);
            for (uint64_t i = 0; !is_ready && i < piece.columns; i++)
                strip_put(unpack, source, strip, r, piece.skip + i,
                          piece.out + i * lh_unpack_element_bytes(unpack));
        }
    }
}

/* --- With tables ------------------------------------------------------------------------------ */

/*
 * [Note: Tables] Elements of 4 bits with a result of 16 bits have 16 results in each row and group
 * of columns. Those of a tile's rows are computed once for a group, and a kernel looks them up
 * while it exchanges rows and columns in registers, so that nothing is stored in between. Tiles are
 * decoded from left to right. The packed bytes of a tile are far from each other, where no
 * hardware expects them, so those of the next tile are prefetched; in order AWQ by the kernel, one
 * by one, and into the second level of caches, because its 64 lines may compete for the few places
 * of one set of the first. In orders AWQ and TRANSPOSED 128 rows of a column are the bytes of a
 * cache line.
 */
#define LINE_ROWS 128

struct tables {
    uint64_t row; /* the first one, in the group of rows */
    uint64_t rows;
    uint64_t groups[2]; /* of columns, plus one; 0: none */
    struct lh_unpack_table all[2][LINE_ROWS];
};

/* Whether elements are looked up, and each half of a tile has one group. */
static bool has_tables(const struct lh_unpack *unpack, const void *out)
{
    return unpack->format == LH_UNPACK_FORMAT_U4 && unpack->dtype != LH_DTYPE_F32 &&
           !unpack->has_index && unpack->block_columns % LH_UNPACK_BATCH == 0 &&
           unpack->columns % LH_UNPACK_BATCH == 0 && lh_is_aligned((uintptr_t)out, LINE_BYTES);
}

/* The tables of a group of columns. */
static const struct lh_unpack_table *tables_get(const struct lh_unpack_kernel *kernel,
                                                const struct lh_unpack *unpack,
                                                const struct lh_unpack_source *source,
                                                struct tables *tables, uint64_t group)
{
    const uint64_t scale_bytes = lh_unpack_scale_bytes(unpack);
    struct lh_unpack_table *to = tables->all[group % 2];
    LH_ASSERT(source->scales && (!unpack->has_zeros || source->zeros));
    if (tables->groups[group % 2] == group + 1)
        return to;
    tables->groups[group % 2] = group + 1;
    for (uint64_t r = 0; r < tables->rows; r += LH_UNPACK_BATCH) {
        const uint64_t first = group * unpack->rows + tables->row + r;
        const uint8_t *scales = source->scales + first * scale_bytes;
        const uint8_t *zeros = unpack->has_zeros ? source->zeros + first / 2 : NULL;
        float wide[LH_UNPACK_BATCH];
        scales_widen(kernel, unpack, scales, wide);
        kernel->tables(unpack, wide, zeros, to + r);
        if (group + 1 == group_count(unpack))
            continue;
        __builtin_prefetch(scales + unpack->rows * scale_bytes);
        if (zeros)
            __builtin_prefetch(zeros + unpack->rows / 2);
    }
    return to;
}

/* In order WORDS: prefetch the packed bytes of rows and of a tile's columns. */
static void tile_prefetch(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                          uint64_t rows, uint64_t column)
{
    const uint64_t stride = unpack->group_rows * sizeof(uint32_t), bytes = rows * sizeof(uint32_t);
    const uint64_t end = lh_min_u64(unpack->columns, column + LH_UNPACK_TILE);
    const uint8_t *words = group + column / 8 * stride + row * sizeof(uint32_t);
    for (uint64_t c = column; c < end; c += 8, words += stride)
        for (uint64_t at = 0; at < bytes; at += LINE_BYTES)
            __builtin_prefetch(words + at);
}

/*
 * Decode whole rows from element `first` on, at most `count` elements. Returns how many: 0 if
 * tables do not serve the first ones.
 */
static uint64_t tables_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                          const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                          uint16_t *out)
{
    const bool is_awq = unpack->order == LH_UNPACK_ORDER_AWQ;
    const uint64_t unit = is_awq ? LH_UNPACK_TILE : LH_UNPACK_BATCH, columns = unpack->columns;
    const uint64_t height = is_awq ? LINE_ROWS : LH_UNPACK_TILE, row = first / columns;
    const uint64_t most = lh_min_u64(count / columns, unpack->rows - row);
    const uint64_t rows = lh_min_u64(most - most % unit, height - row % height);
    if (rows == 0 || first % columns > 0 || row % unit > 0 || !has_tables(unpack, out))
        return 0;
    struct tables tables = {.row = row, .rows = rows};
    const uint64_t done = columns - columns % LH_UNPACK_TILE;
    for (uint64_t c = 0; c < done; c += LH_UNPACK_TILE) {
        const uint64_t middle = c + LH_UNPACK_TILE / 2;
        const struct lh_unpack_table *const halves[2] = {
            tables_get(kernel, unpack, source, &tables, c / unpack->block_columns),
            tables_get(kernel, unpack, source, &tables, middle / unpack->block_columns)};
        if (!is_awq)
            tile_prefetch(unpack, source->packed, row, rows, c + LH_UNPACK_TILE);
        kernel->looked_up(unpack, source->packed, row, rows, c, halves, out + c);
    }
    kernel->stored();
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = done; c < columns; c++)
            lh_unpack_order_put(unpack, source, source->packed, row + r, c, out + r * columns + c);
    return rows * columns;
}

/* --- With powers of two ----------------------------------------------------------------------- */

/* The same as tables_by() for E2M1 in order TRANSPOSED; see struct lh_unpack_kernel, powers(). */
static uint64_t powers_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                          const struct lh_unpack_source *source, const uint8_t *group,
                          uint64_t first, uint64_t count, uint16_t *out)
{
    const uint64_t columns = unpack->columns, group_rows = unpack->group_rows;
    const uint64_t half = LH_UNPACK_TILE / 2, blocks = group_rows / half;
    const uint64_t row = first / columns, place = row % group_rows;
    const uint64_t most = lh_min_u64(count / columns, group_rows - place);
    const uint64_t rows = lh_min_u64(most - most % LH_UNPACK_TILE, LINE_ROWS - place % LINE_ROWS);
    const uint8_t *scales = source->scales + row / group_rows * columns * blocks + place / half;
    uint8_t tile[LINE_ROWS / (LH_UNPACK_TILE / 2)][LH_UNPACK_TILE];
    if (unpack->format != LH_UNPACK_FORMAT_E2M1 || unpack->dtype != LH_DTYPE_BF16 ||
        unpack->rounding == LH_DTYPE_F16 || unpack->scale_type != LH_UNPACK_SCALE_E8M0 ||
        unpack->block_rows != half || columns % half > 0 ||
        !lh_is_aligned((uintptr_t)out, LINE_BYTES) || first % columns > 0 ||
        place % LH_UNPACK_TILE > 0 || rows == 0)
        return 0;
    const uint64_t done = columns - columns % LH_UNPACK_TILE;
    for (uint64_t c = 0; c < done; c += LH_UNPACK_TILE) {
        for (uint64_t i = 0; i < LH_UNPACK_TILE; i++)
            for (uint64_t b = 0; b < rows / half; b++)
                tile[b][i] = scales[(c + i) * blocks + b];
        kernel->powers(unpack, group, place, rows, c, tile[0], out + c);
    }
    kernel->stored();
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = done; c < columns; c++)
            lh_unpack_order_put(unpack, source, group, row + r, c, out + r * columns + c);
    return rows * columns;
}

void lh_unpack_orders_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                         const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                         uint8_t *out)
{
    const uint64_t columns = unpack->columns, group_rows = unpack->group_rows;
    const uint64_t group_bytes = lh_unpack_packed_bytes(unpack, group_rows * columns);
    const bool is_words = unpack->order == LH_UNPACK_ORDER_WORDS;
    const uint64_t height = is_words ? LH_UNPACK_INDEXED_ROWS : LH_UNPACK_TILE;
    const uint64_t element_bytes = lh_unpack_element_bytes(unpack);
    struct strip strip = {0};
    for (uint64_t at = first; at < first + count;) {
        uint64_t row = at / columns, group = row / group_rows;
        strip.group = source->packed + (group - first / (group_rows * columns)) * group_bytes;
        uint16_t *to = (void *)(out + (at - first) * element_bytes);
        uint64_t more = 0, left = first + count - at;
        if (kernel && unpack->format == LH_UNPACK_FORMAT_E2M1)
            more = powers_by(kernel, unpack, source, strip.group, at, left, to);
        else if (kernel)
            more = tables_by(kernel, unpack, source, at, left, to);
        at += more;
        if (more > 0)
            continue;
        strip.group_first = group * group_rows;
        strip.row = row % group_rows / height * height;
        strip.rows = lh_min_u64(height, group_rows - strip.row);
        uint64_t stop = (strip.group_first + strip.row + strip.rows) * columns;
        const struct lh_unpack_range range = {at, lh_min_u64(first + count, stop),
                                              out + (at - first) * element_bytes};
        if (kernel && !is_words)
            band_by(kernel, unpack, source, &strip, &range);
        else if (kernel && strip.rows == height && lh_unpack_is_indexed(unpack))
            lh_unpack_indexed_by(kernel, unpack, source, strip.row, &range);
        else
            for (uint64_t i = range.begin; i < range.end; i++)
                lh_unpack_order_put(unpack, source, strip.group, i / columns, i % columns,
                                    range.out + (i - range.begin) * element_bytes);
        at = range.end;
    }
}

/* --- Integers in the order of rows ------------------------------------------------------------ */

/* Decode a run of elements, which have one scale and one zero. */
static void run_put(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                    const uint8_t *packed, uint64_t at, int32_t zero, float scale, uint64_t count,
                    uint8_t *out)
{
    const bool is_byte = unpack->format == LH_UNPACK_FORMAT_U8;
    const uint64_t begin = is_byte ? at : at / 2;
    uint64_t done = kernel && (is_byte || at % 2 == 0) ? count - count % LH_UNPACK_BATCH : 0;
    if (done > 0)
        kernel->integers(unpack, packed + begin, (float)zero, scale, done,
                         out + at * lh_unpack_element_bytes(unpack));
    for (uint64_t i = at + done; i < at + count; i++) {
        uint32_t bits = is_byte ? packed[i] : packed[i / 2] >> (i % 2 * 4) & 15;
        lh_unpack_put(unpack, (float)((int32_t)bits - zero) * scale, i, out);
    }
}

void lh_unpack_integers_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                           const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                           uint8_t *out)
{
    const uint64_t columns = unpack->columns, block = unpack->block_columns;
    const uint64_t groups = group_count(unpack), bits = element_bits(unpack), parts = 32 / bits;
    const uint32_t mask = (UINT32_C(1) << bits) - 1;
    uint64_t row = first / columns, column = first % columns;
    LH_ASSERT(!lh_unpack_is_narrow(unpack) || first % 2 == 0);
    for (uint64_t at = 0; at < count; row++, column = 0) {
        const uint64_t end = lh_min_u64(columns, column + count - at);
        uint64_t group = column / block, stop = (group + 1) * block;
        const uint64_t words = row / parts * groups, shift = row % parts * bits;
        for (; column < end; group++, stop += block) {
            uint64_t run = lh_min_u64(stop, end) - column;
            if (unpack->has_index) {
                group = group_of(unpack, source->index, column);
                run = 1;
            }
            const float scale = lh_unpack_scale_at(unpack, source, row * groups + group);
            uint32_t zero = unpack->zero;
            if (unpack->has_zeros)
                zero = word_at(source->zeros, words + group) >> shift & mask;
            run_put(kernel, unpack, source->packed, at, (int32_t)zero, scale, run, out);
            at += run;
            column += run;
        }
    }
}
