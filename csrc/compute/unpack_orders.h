/* What the files that decode other orders than rows share; only they include this. */
#ifndef LH_COMPUTE_UNPACK_ORDERS_H
#define LH_COMPUTE_UNPACK_ORDERS_H

#include "base/base.h"
#include "compute/unpack_kernels.h"

#define LINE_BYTES 64

static inline uint32_t element_bits(const struct lh_unpack *unpack)
{
    return unpack->format == LH_UNPACK_FORMAT_U8 ? 8 : 4;
}

/* Groups of columns. */
static inline uint64_t group_count(const struct lh_unpack *unpack)
{
    return lh_div_ceil(unpack->columns, unpack->block_columns);
}

/* Elements [begin, end) of the tensor are decoded to `out`. */
struct lh_unpack_range {
    uint64_t begin;
    uint64_t end;
    uint8_t *out;
};

/* The part of a range that is in one row of a strip or of columns; `columns` is 0 if none is. */
struct lh_unpack_piece {
    uint64_t skip; /* columns before it */
    uint64_t columns;
    uint8_t *out;
};

/* The part of a range that is in `columns` columns of a row, from `column` on. */
struct lh_unpack_piece lh_unpack_piece_of(const struct lh_unpack *unpack,
                                          const struct lh_unpack_range *range, uint64_t row,
                                          uint64_t column, uint64_t columns);
/* The scales, and the zeros plus `more`, of LH_UNPACK_BATCH rows of a group of columns. */
void lh_unpack_batch_widen(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                           const struct lh_unpack_source *source, uint64_t group, uint64_t row,
                           float more, float *scales, float *zeros);
/* Decode one element by the definition; `group` has the packed bytes of its group of rows. */
void lh_unpack_order_put(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                         const uint8_t *group, uint64_t row, uint64_t column, void *out);

/*
 * unpack_indexed.c: whether the kernel serves, and what decodes the part of a range that is in
 * LH_UNPACK_INDEXED_ROWS rows from `row` on.
 */
bool lh_unpack_is_indexed(const struct lh_unpack *unpack);
void lh_unpack_indexed_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                          const struct lh_unpack_source *source, uint64_t row,
                          const struct lh_unpack_range *range);

#endif
