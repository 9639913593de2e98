#include "compute/unpack.h"

#include <fenv.h>
#include <string.h>

#include "base/assert.h"
#include "base/cpu.h"
#include "compute/half.h"
#include "compute/unpack_kernels.h"

#define SIZE_MAX_LOG2 48

struct grain {
    uint32_t elements;
    uint32_t bytes;
};

static struct grain grain_of(const struct lh_unpack *unpack)
{
    static const struct grain grains[LH_UNPACK_FORMAT_COUNT] = {
        [LH_UNPACK_FORMAT_RAW] = {1, 1},
        [LH_UNPACK_FORMAT_F8_E4M3] = {1, 1},
        [LH_UNPACK_FORMAT_I8] = {1, 1},
        [LH_UNPACK_FORMAT_NIBBLES] = {2, 1},
        [LH_UNPACK_FORMAT_E2M1] = {2, 1},
        [LH_UNPACK_FORMAT_Q8_0] = {32, LH_UNPACK_Q8_0_BYTES},
        [LH_UNPACK_FORMAT_Q4_K] = {LH_UNPACK_GRAIN_MAX, LH_UNPACK_Q4_K_BYTES},
        [LH_UNPACK_FORMAT_Q6_K] = {LH_UNPACK_GRAIN_MAX, LH_UNPACK_Q6_K_BYTES},
        [LH_UNPACK_FORMAT_F32] = {1, 4},
        [LH_UNPACK_FORMAT_BF16] = {1, 2},
        [LH_UNPACK_FORMAT_F16] = {1, 2},
        [LH_UNPACK_FORMAT_U4] = {2, 1},
        [LH_UNPACK_FORMAT_U8] = {1, 1},
        [LH_UNPACK_FORMAT_IQ4_NL] = {32, LH_UNPACK_IQ4_NL_BYTES},
        [LH_UNPACK_FORMAT_IQ4_XS] = {LH_UNPACK_GRAIN_MAX, LH_UNPACK_IQ4_XS_BYTES},
        [LH_UNPACK_FORMAT_MXFP4] = {32, LH_UNPACK_MXFP4_BYTES},
    };
    LH_ASSERT(unpack->format < LH_UNPACK_FORMAT_COUNT);
    return grains[unpack->format];
}

static bool has_zero(const struct lh_unpack *unpack)
{
    return unpack->format == LH_UNPACK_FORMAT_U4 || unpack->format == LH_UNPACK_FORMAT_U8;
}

/* Whether elements have scales of their own, outside of what is packed. */
static bool has_scales(const struct lh_unpack *unpack)
{
    return has_zero(unpack) ||
           (unpack->format >= LH_UNPACK_FORMAT_F8_E4M3 && unpack->format <= LH_UNPACK_FORMAT_E2M1);
}

static bool scales_are_valid(const struct lh_unpack *unpack)
{
    const uint64_t most = UINT64_C(1) << SIZE_MAX_LOG2;
    return unpack->scale_type < LH_UNPACK_SCALE_COUNT && unpack->block_rows > 0 &&
           unpack->block_columns > 0 && unpack->block_rows <= most &&
           unpack->block_columns <= most &&
           (unpack->group_rows > 0) == (unpack->order != LH_UNPACK_ORDER_ROWS) &&
           (unpack->scale_type != LH_UNPACK_SCALE_NESTED || unpack->nested_block > 0);
}

/* See [Note: Orders] and [Note: Zeros]. */
static bool order_is_valid(const struct lh_unpack *unpack)
{
    const uint64_t part = unpack->format == LH_UNPACK_FORMAT_U8 ? 4 : 8; /* elements in a word */
    if (!has_zero(unpack))
        return unpack->format == LH_UNPACK_FORMAT_E2M1 &&
               unpack->order == LH_UNPACK_ORDER_TRANSPOSED && unpack->group_rows % part == 0 &&
               unpack->rows % unpack->group_rows == 0 && unpack->block_columns == 1 &&
               unpack->block_rows % part == 0 && unpack->group_rows % unpack->block_rows == 0 &&
               unpack->scale_type == LH_UNPACK_SCALE_E8M0;
    return (unpack->order == LH_UNPACK_ORDER_WORDS ||
            (unpack->order == LH_UNPACK_ORDER_AWQ && part == 8 && !unpack->has_index)) &&
           unpack->group_rows == unpack->rows && unpack->rows % part == 0 &&
           unpack->columns % part == 0 && unpack->block_rows == 1 &&
           unpack->scale_type <= LH_UNPACK_SCALE_F16 && unpack->zero <= UINT8_MAX &&
           (!unpack->has_zeros || unpack->zero <= 1);
}

/* Integers in the order of rows: see [Note: Zeros]. */
static bool integers_are_valid(const struct lh_unpack *unpack)
{
    const uint64_t part = unpack->format == LH_UNPACK_FORMAT_U8 ? 4 : 8;
    return unpack->columns % part == 0 && (!unpack->has_zeros || unpack->rows % part == 0) &&
           unpack->block_rows == 1 && unpack->scale_type <= LH_UNPACK_SCALE_F16 &&
           !unpack->rounds_scale && unpack->zero <= (unpack->has_zeros ? 0 : UINT8_MAX);
}

bool lh_unpack_is_valid(const struct lh_unpack *unpack)
{
    const uint64_t most = UINT64_C(1) << SIZE_MAX_LOG2;
    if (unpack->format >= LH_UNPACK_FORMAT_COUNT || unpack->order >= LH_UNPACK_ORDER_COUNT ||
        unpack->rows == 0 || unpack->columns == 0)
        return false;
    if (unpack->rounds_scale && (!has_scales(unpack) || unpack->order != LH_UNPACK_ORDER_ROWS))
        return false;
    if (!has_zero(unpack) && (unpack->has_zeros || unpack->has_index || unpack->zero > 0))
        return false;
    if (unpack->columns > most || unpack->rows > most / unpack->columns)
        return false;
    if (unpack->format == LH_UNPACK_FORMAT_RAW)
        return unpack->rows == 1 && unpack->group_rows == 0 &&
               unpack->order == LH_UNPACK_ORDER_ROWS;
    if (unpack->dtype >= LH_DTYPE_BYTES || unpack->rounding >= LH_DTYPE_BYTES)
        return false;
    if (has_zero(unpack) && unpack->order == LH_UNPACK_ORDER_ROWS)
        return scales_are_valid(unpack) && integers_are_valid(unpack);
    if (unpack->order != LH_UNPACK_ORDER_ROWS)
        return has_scales(unpack) && scales_are_valid(unpack) && order_is_valid(unpack);
    if (lh_unpack_is_narrow(unpack))
        return unpack->rows == 1 && scales_are_valid(unpack);
    if (has_scales(unpack))
        return scales_are_valid(unpack);
    return unpack->rounding == LH_DTYPE_F32 && unpack->columns % grain_of(unpack).elements == 0 &&
           unpack->group_rows % 2 == 0 &&
           (unpack->group_rows == 0 || unpack->rows % unpack->group_rows == 0);
}

uint64_t lh_unpack_count(const struct lh_unpack *unpack)
{
    return unpack->rows * unpack->columns;
}

uint64_t lh_unpack_element_bytes(const struct lh_unpack *unpack)
{
    return unpack->format == LH_UNPACK_FORMAT_RAW ? 1 : lh_dtype_bytes(unpack->dtype);
}

uint64_t lh_unpack_packed_bytes(const struct lh_unpack *unpack, uint64_t count)
{
    struct grain grain = grain_of(unpack);
    return lh_div_ceil(count, grain.elements) * grain.bytes;
}

uint64_t lh_unpack_needed(const struct lh_unpack *unpack, uint64_t first)
{
    uint64_t group = unpack->group_rows * unpack->columns;
    return lh_unpack_packed_bytes(unpack,
                                  first - first % (group > 0 ? group : grain_of(unpack).elements));
}

bool lh_unpack_fits(const struct lh_unpack *unpack, uint64_t from, uint64_t to)
{
    uint64_t count = lh_unpack_count(unpack), group = unpack->group_rows * unpack->columns;
    uint64_t element_bytes = lh_unpack_element_bytes(unpack);
    /* Rows of a group are read in another order: no group is decoded over its own bytes. */
    return to <= from && group * element_bytes <= from - to &&
           to + count * element_bytes + lh_unpack_packed_bytes(unpack, group) <=
               from + lh_unpack_packed_bytes(unpack, count);
}

bool lh_unpack_is_narrow(const struct lh_unpack *unpack)
{
    return (unpack->format == LH_UNPACK_FORMAT_NIBBLES || unpack->format == LH_UNPACK_FORMAT_E2M1 ||
            unpack->format == LH_UNPACK_FORMAT_U4) &&
           unpack->order == LH_UNPACK_ORDER_ROWS;
}

uint64_t lh_unpack_scale_count(const struct lh_unpack *unpack)
{
    if (!has_scales(unpack))
        return 0;
    return lh_div_ceil(unpack->rows, unpack->block_rows) *
           lh_div_ceil(unpack->columns, unpack->block_columns);
}

uint64_t lh_unpack_scale_bytes(const struct lh_unpack *unpack)
{
    if (unpack->scale_type == LH_UNPACK_SCALE_F32)
        return sizeof(float);
    return unpack->scale_type <= LH_UNPACK_SCALE_F16 ? sizeof(uint16_t) : 1;
}

/* The number of scales of scales. */
static uint64_t nested_count(const struct lh_unpack *unpack)
{
    if (!has_scales(unpack))
        return 0;
    if (unpack->scale_type >= LH_UNPACK_SCALE_E4M3)
        return 1;
    bool is_nested = unpack->scale_type == LH_UNPACK_SCALE_NESTED;
    return is_nested ? lh_div_ceil(lh_unpack_scale_count(unpack), unpack->nested_block) : 0;
}

uint64_t lh_unpack_part_bytes(const struct lh_unpack *unpack, enum lh_unpack_part part)
{
    bool is_nested = has_scales(unpack) && unpack->scale_type == LH_UNPACK_SCALE_NESTED;
    switch (part) {
    case LH_UNPACK_PART_SCALES:
        return lh_unpack_scale_count(unpack) * lh_unpack_scale_bytes(unpack);
    case LH_UNPACK_PART_TABLE:
        return unpack->format == LH_UNPACK_FORMAT_NIBBLES ? LH_UNPACK_TABLE_COUNT * sizeof(float)
                                                          : 0;
    case LH_UNPACK_PART_NESTED:
        return nested_count(unpack) * sizeof(float);
    case LH_UNPACK_PART_NESTED_TABLE:
        return is_nested ? LH_UNPACK_NESTED_TABLE_COUNT * sizeof(float) : 0;
    case LH_UNPACK_PART_ZEROS:
        return unpack->has_zeros ? lh_unpack_packed_bytes(unpack, lh_unpack_scale_count(unpack))
                                 : 0;
    case LH_UNPACK_PART_INDEX:
        break;
    }
    return unpack->has_index ? unpack->columns * sizeof(uint32_t) : 0;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static float float_at(const uint8_t *floats, uint64_t index)
{
    float value;
    memcpy(&value, floats + index * sizeof(value), sizeof(value));
    return value;
}

/* The number that a byte of format E4M3 (without infinities) encodes. */
static float e4m3_value(uint8_t byte)
{
    uint32_t magnitude = byte & 0x7F;
    uint32_t sign = (uint32_t)(byte & 0x80) << 24;
    uint32_t bits = (magnitude << 20) + (UINT32_C(120) << 23);
    float denormal = (float)magnitude * 0x1p-9f;
    if (magnitude == 0x7F)
        bits = UINT32_C(0x7FC00000);
    else if (magnitude < 8)
        memcpy(&bits, &denormal, sizeof(bits));
    return float_of(sign | bits);
}

/* The number of fp16, or else bf16, at an address. */
static float narrow_at(const uint8_t *at, bool is_half)
{
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    return float_of(is_half ? lh_half_widen(bits) : (uint32_t)bits << 16);
}

/* Which element of `nested` a scale is multiplied by; bitsandbytes' blocks are powers of two. */
static uint64_t nested_index(uint64_t index, uint64_t block)
{
    bool is_power = (block & (block - 1)) == 0;
    return is_power ? index >> __builtin_ctzll(block) : index / block;
}

/* Round to dtype; the result is the bits of a float. */
static uint32_t rounded(uint32_t bits, uint32_t dtype)
{
    if (dtype == LH_DTYPE_BF16)
        return (uint32_t)lh_bf16_round(bits) << 16;
    return dtype == LH_DTYPE_F16 ? lh_half_widen(lh_half_round(bits)) : bits;
}

static float exact_scale_at(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                            uint64_t index)
{
    const uint8_t *at = source->scales + index * lh_unpack_scale_bytes(unpack);
    float value;
    switch ((enum lh_unpack_scale)unpack->scale_type) {
    case LH_UNPACK_SCALE_F32:
        return float_at(at, 0);
    case LH_UNPACK_SCALE_NESTED:
        value = float_at(source->nested_table, *at);
        value *= float_at(source->nested, nested_index(index, unpack->nested_block));
        return value + unpack->nested_offset;
    case LH_UNPACK_SCALE_E8M0:
        if (*at == UINT8_MAX)
            return float_of(UINT32_C(0x7FC00000));
        return *at == 0 ? 0x1p-127f : float_of((uint32_t)*at << 23);
    case LH_UNPACK_SCALE_E4M3:
        return e4m3_value(*at) / float_at(source->nested, 0);
    case LH_UNPACK_SCALE_E4M3_TIMES:
        return e4m3_value(*at) * float_at(source->nested, 0);
    case LH_UNPACK_SCALE_BF16:
    case LH_UNPACK_SCALE_F16:
        break;
    }
    return narrow_at(at, unpack->scale_type == LH_UNPACK_SCALE_F16);
}

const float lh_unpack_e2m1[LH_UNPACK_TABLE_COUNT] = {
    0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f,
};

static float value_at(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                      uint64_t at)
{
    const uint8_t *packed = source->packed;
    switch ((enum lh_unpack_format)unpack->format) {
    case LH_UNPACK_FORMAT_F8_E4M3:
        return e4m3_value(packed[at]);
    case LH_UNPACK_FORMAT_I8:
        return (float)(int8_t)packed[at];
    case LH_UNPACK_FORMAT_E2M1:
        return lh_unpack_e2m1[at % 2 == 0 ? packed[at / 2] & 15 : packed[at / 2] >> 4];
    case LH_UNPACK_FORMAT_F32:
        return float_at(packed, at);
    case LH_UNPACK_FORMAT_BF16:
    case LH_UNPACK_FORMAT_F16:
        return narrow_at(packed + 2 * at, unpack->format == LH_UNPACK_FORMAT_F16);
    default:
        return float_at(source->table, at % 2 == 0 ? packed[at / 2] >> 4 : packed[at / 2] & 15);
    }
}

float lh_unpack_scale_at(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                         uint64_t index)
{
    float scale = exact_scale_at(unpack, source, index);
    uint32_t bits;
    if (!unpack->rounds_scale)
        return scale;
    memcpy(&bits, &scale, sizeof(bits));
    return float_of(rounded(bits, unpack->dtype));
}

void lh_unpack_put(const struct lh_unpack *unpack, float product, uint64_t at, void *out)
{
    uint32_t bits;
    memcpy(&bits, &product, sizeof(bits));
    if ((bits & UINT32_C(0x7FFFFFFF)) > UINT32_C(0x7F800000))
        bits = UINT32_C(0x7FC00000);
    bits = rounded(bits, unpack->rounding);
    uint16_t narrow = unpack->dtype == LH_DTYPE_F16 ? lh_half_round(bits) : lh_bf16_round(bits);
    if (unpack->dtype == LH_DTYPE_F32)
        memcpy((uint8_t *)out + at * sizeof(bits), &bits, sizeof(bits));
    else
        memcpy((uint8_t *)out + at * sizeof(narrow), &narrow, sizeof(narrow));
}

/* The SIMD kernel; NULL if this machine has none. */
static const struct lh_unpack_kernel *kernel_get(void)
{
#if defined(__x86_64__)
    if (lh_cpu_has(LH_CPU_ISA_AVX2))
        return lh_cpu_has(LH_CPU_ISA_AVX512) ? &lh_unpack_avx512 : &lh_unpack_avx2;
#endif
    return NULL;
}

/*
 * Decode elements [at, at + count) of the range, which have one scale. Returns how many the kernel
 * has decoded; the rest, fewer than LH_UNPACK_BATCH unless there is no kernel, is the caller's.
 */
static uint64_t run_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                       const struct lh_unpack_source *source, float scale, uint64_t at,
                       uint64_t count, uint8_t *out)
{
    uint64_t batches = count - count % LH_UNPACK_BATCH;
    if (!kernel || batches == 0 || lh_unpack_is_narrow(unpack))
        return 0;
    kernel->bytes(unpack, source->packed + at * grain_of(unpack).bytes, scale, batches,
                  out + at * lh_unpack_element_bytes(unpack));
    return batches;
}

/* Decode by elements and by runs of bytes that have one scale. */
static void unpack_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                      const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                      uint8_t *out)
{
    const uint64_t block_columns = has_scales(unpack) ? unpack->block_columns : unpack->columns;
    const uint64_t block_rows = has_scales(unpack) ? unpack->block_rows : unpack->rows;
    const uint64_t scale_columns = lh_div_ceil(unpack->columns, block_columns);
    LH_ASSERT(!lh_unpack_is_narrow(unpack) || first % 2 == 0);
    uint64_t row = first / unpack->columns;
    uint64_t column = first % unpack->columns;
    uint64_t block = column / block_columns;
    uint64_t row_scales = row / block_rows * scale_columns;
    for (uint64_t at = 0; at < count; block++) {
        if (column == unpack->columns) {
            row++;
            column = block = 0;
            row_scales = row / block_rows * scale_columns;
        }
        uint64_t end = lh_min_u64(unpack->columns, (block + 1) * block_columns);
        uint64_t run = lh_min_u64(end - column, count - at);
        float scale = 1;
        if (has_scales(unpack))
            scale = lh_unpack_scale_at(unpack, source, row_scales + block);
        uint64_t done = run_by(kernel, unpack, source, scale, at, run, out);
        for (uint64_t i = at + done; i < at + run; i++)
            lh_unpack_put(unpack, value_at(unpack, source, i) * scale, i, out);
        at += run;
        column += run;
    }
}

/* Decode whole blocks of NIBBLES, at most LH_UNPACK_BLOCK_COUNT_MAX. Returns how many elements. */
static uint64_t nibbles_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                           const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                           uint8_t *out)
{
    float scales[LH_UNPACK_BLOCK_COUNT_MAX], table[LH_UNPACK_TABLE_COUNT];
    uint64_t block = unpack->block_columns;
    uint64_t blocks = lh_min_u64(count / block, LH_UNPACK_BLOCK_COUNT_MAX);
    memcpy(table, source->table, sizeof(table));
    for (uint64_t i = 0; i < blocks; i++)
        scales[i] = lh_unpack_scale_at(unpack, source, first / block + i);
    kernel->nibbles(unpack, source->packed, table, scales, blocks, (uint16_t *)(void *)out);
    return blocks * block;
}

/*
 * Decode whole blocks of E2M1. Returns how many elements: the kernel stops at scales that are not
 * finite, and before the last few blocks.
 */
static uint64_t e2m1_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                        const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                        uint8_t *out)
{
    uint64_t block = unpack->block_columns;
    uint64_t batches = count / block / LH_UNPACK_SCALE_BATCH;
    bool has_factor = unpack->scale_type >= LH_UNPACK_SCALE_E4M3;
    float factor = has_factor ? float_at(source->nested, 0) : 1;
    return block * LH_UNPACK_SCALE_BATCH *
           kernel->e2m1(unpack, source->packed, source->scales + first / block, factor, batches,
                        out);
}

/* The definition decodes what is before the first whole block, and what the kernel leaves. */
static void blocks_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                      const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                      uint8_t *out)
{
    uint64_t block = unpack->block_columns, at = 0;
    struct lh_unpack_source rest = *source;
    while (at < count) {
        uint64_t step = lh_min_u64(block - (first + at) % block, count - at), done = 0;
        uint8_t *to = out + at * lh_unpack_element_bytes(unpack);
        if (step == block && unpack->format == LH_UNPACK_FORMAT_E2M1)
            done = e2m1_by(kernel, unpack, &rest, first + at, count - at, to);
        else if (step == block)
            done = nibbles_by(kernel, unpack, &rest, first + at, count - at, to);
        if (done == 0) {
            unpack_by(NULL, unpack, &rest, first + at, step, to);
            done = step;
        }
        at += done;
        rest.packed = source->packed + at / 2;
    }
}

/* Whether there is a kernel for whole blocks of 4-bit elements. */
static bool has_blocks(const struct lh_unpack *unpack)
{
    uint64_t block = unpack->block_columns;
    if (unpack->format == LH_UNPACK_FORMAT_NIBBLES)
        return unpack->dtype != LH_DTYPE_F32 && block % LH_UNPACK_BATCH == 0;
    return unpack->format == LH_UNPACK_FORMAT_E2M1 && (block == 16 || block == 32) &&
           unpack->scale_type >= LH_UNPACK_SCALE_E8M0 && !unpack->rounds_scale;
}

/* Decode elements of formats with scales in grains. */
static void grains_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                      const uint8_t *packed, uint64_t first, uint64_t count, uint8_t *out)
{
    const struct grain grain = grain_of(unpack);
    uint64_t skip = first % grain.elements;
    for (uint64_t at = 0; at < count;) {
        uint64_t whole = skip == 0 ? (count - at) / grain.elements : 0, done = 0;
        if (kernel && whole > 0)
            done =
                kernel->grains(unpack, packed, whole, out + at * lh_unpack_element_bytes(unpack));
        at += done * grain.elements;
        packed += done * grain.bytes;
        if (done > 0)
            continue;
        float values[LH_UNPACK_GRAIN_MAX];
        uint64_t end = lh_min_u64(grain.elements, skip + count - at);
        lh_unpack_grain_ref(unpack->format, packed, values);
        for (; skip < end; skip++)
            lh_unpack_put(unpack, values[skip], at++, out);
        skip = 0;
        packed += grain.bytes;
    }
}

/* Decode elements whose rows are in order. */
static void rows_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                    const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                    uint8_t *out)
{
    if (has_zero(unpack))
        lh_unpack_integers_by(kernel, unpack, source, first, count, out);
    else if (grain_of(unpack).elements > 2)
        grains_by(kernel, unpack, source->packed, first, count, out);
    else if (kernel && has_blocks(unpack))
        blocks_by(kernel, unpack, source, first, count, out);
    else
        unpack_by(kernel, unpack, source, first, count, out);
}

/* See [Note: Groups of rows]. */
static void groups_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                      const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                      uint8_t *out)
{
    const uint64_t rows = unpack->group_rows, columns = unpack->columns;
    const uint64_t row_bytes = lh_unpack_packed_bytes(unpack, columns);
    struct lh_unpack one = *unpack;
    one.rows = 1;
    one.group_rows = 0;
    for (uint64_t at = 0; at < count;) {
        uint64_t row = (first + at) / columns, column = (first + at) % columns;
        uint64_t groups = row / rows - first / (columns * rows);
        uint64_t index = 2 * (row % rows % (rows / 2)) + row % rows / (rows / 2);
        uint64_t step = lh_min_u64(columns - column, count - at);
        struct lh_unpack_source piece = *source;
        piece.packed += (groups * rows + index) * row_bytes + lh_unpack_needed(&one, column);
        rows_by(kernel, &one, &piece, column, step, out + at * lh_unpack_element_bytes(unpack));
        at += step;
    }
}

static void unpack_range(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                         const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                         void *out)
{
    fenv_t environment;
    LH_ASSERT(first <= lh_unpack_count(unpack) && count <= lh_unpack_count(unpack) - first);
    if (unpack->format == LH_UNPACK_FORMAT_RAW) {
        memmove(out, source->packed, count);
        return;
    }
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    if (unpack->order != LH_UNPACK_ORDER_ROWS)
        lh_unpack_orders_by(kernel, unpack, source, first, count, out);
    else if (unpack->group_rows > 0)
        groups_by(kernel, unpack, source, first, count, out);
    else
        rows_by(kernel, unpack, source, first, count, out);
    fesetenv(&environment);
}

void lh_unpack(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
               uint64_t first, uint64_t count, void *out)
{
    unpack_range(kernel_get(), unpack, source, first, count, out);
}

void lh_unpack_ref(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                   uint64_t first, uint64_t count, void *out)
{
    unpack_range(NULL, unpack, source, first, count, out);
}
