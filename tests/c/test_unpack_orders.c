/* Test the decoding of tensors in the orders of GPTQ and AWQ, as their writers pack them. */
#include "compute/unpack.h"
#include "lh_test.h"

#define COUNT_MAX 40000

static uint8_t packed[2 * COUNT_MAX];
static uint8_t scales[COUNT_MAX];
static uint8_t zeros[COUNT_MAX];
static uint32_t groups[COUNT_MAX];

static const struct lh_unpack_source source = {
    .packed = packed,
    .scales = scales,
    .zeros = zeros,
    .index = (const uint8_t *)groups,
};

/* Store the low bits of a value in a word. */
static void part_put(uint8_t *words, uint64_t word, uint64_t bit, uint32_t value)
{
    words[4 * word + bit / 8] |= (uint8_t)(value << bit % 8);
}

/* Where an element of the tensor, and a zero, is packed: as the libraries' writers have it. */
static void element_pack(const struct lh_unpack *unpack, uint8_t *words, uint64_t row,
                         uint64_t column, uint32_t value)
{
    static const uint8_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    uint64_t bits = unpack->format == LH_UNPACK_FORMAT_U8 ? 8 : 4, parts = 32 / bits, place = 0;
    if (unpack->order == LH_UNPACK_ORDER_ROWS) {
        part_put(words, (row * unpack->columns + column) / parts, column % parts * bits, value);
        return;
    }
    if (unpack->order == LH_UNPACK_ORDER_WORDS) {
        part_put(words, column / parts * unpack->rows + row, column % parts * bits, value);
        return;
    }
    while (unpack->order == LH_UNPACK_ORDER_AWQ ? order[place] != row % 8 : place != row % 8)
        place++;
    part_put(words, column * (unpack->rows / 8) + row / 8, place * bits, value);
}

static void zero_pack(const struct lh_unpack *unpack, uint64_t group, uint64_t row, uint32_t value)
{
    static const uint8_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    uint64_t bits = unpack->format == LH_UNPACK_FORMAT_U8 ? 8 : 4, parts = 32 / bits;
    uint64_t place = row % parts;
    if (unpack->order == LH_UNPACK_ORDER_AWQ)
        for (place = 0; order[place] != row % 8;)
            place++;
    if (unpack->order == LH_UNPACK_ORDER_ROWS) {
        part_put(zeros, row / parts * 10 + group, place * bits, value);
        return;
    }
    part_put(zeros, group * (unpack->rows / parts) + row / parts, place * bits, value);
}

static void test_orders(void)
{
    static float values[COUNT_MAX];
    uint64_t seed = 8;
    lh_test_name("integers minus zeros times scales, in the orders of GPTQ, AWQ and rows");
    for (int turn = 0; turn < 80; turn++) {
        struct lh_unpack unpack = {
            .format = turn % 3 == 0 ? LH_UNPACK_FORMAT_U8 : LH_UNPACK_FORMAT_U4,
            .has_index = turn % 2 && turn % 3 != 1,
            .rows = 64 + 8 * (lh_test_random(&seed) % 3),
            .group_rows = 0,
            .columns = 320,
            .block_rows = 1,
            .block_columns = 32,
            .has_zeros = 1,
            .order = turn % 3 == 1 ? LH_UNPACK_ORDER_AWQ : LH_UNPACK_ORDER_WORDS};
        unpack.group_rows = unpack.rows;
        unpack.zero = turn % 5 == 0;
        const bool is_rows = turn >= 60;
        if (is_rows) {
            unpack.order = LH_UNPACK_ORDER_ROWS;
            unpack.group_rows = unpack.zero = 0;
        }
        LH_CHECK(lh_unpack_is_valid(&unpack));
        uint32_t most = unpack.format == LH_UNPACK_FORMAT_U8 ? 255 : 15;
        for (uint64_t i = 0; i < lh_unpack_scale_count(&unpack); i++) {
            float scale = (float)(1 + lh_test_random(&seed) % 100);
            memcpy(scales + 4 * i, &scale, sizeof(scale));
        }
        memset(packed, 0, sizeof(packed));
        memset(zeros, 0, sizeof(zeros));
        static uint8_t all_zeros[40][144], all[144][320];
        for (uint64_t r = 0; r < unpack.rows; r++) {
            for (uint64_t g = 0; g < 10; g++) {
                all_zeros[g][r] = (uint8_t)(lh_test_random(&seed) % (most + 1));
                if (unpack.zero && all_zeros[g][r] == 0)
                    all_zeros[g][r] = 1; /* no carry: see below */
                zero_pack(&unpack, g, r, all_zeros[g][r] - unpack.zero);
            }
            for (uint64_t c = 0; c < 320; c++) {
                groups[c] = (uint32_t)(lh_test_random(&seed) % 10);
                all[r][c] = (uint8_t)(lh_test_random(&seed) % (most + 1));
                element_pack(&unpack, packed, r, c, all[r][c]);
            }
        }
        lh_unpack(&unpack, &source, 0, lh_unpack_count(&unpack), values);
        for (uint64_t r = 0; r < unpack.rows; r++) {
            for (uint64_t c = 0; c < 320; c++) {
                uint64_t g = unpack.has_index ? groups[c] : c / 32;
                float scale;
                uint64_t place = is_rows ? r * 10 + g : g * unpack.rows + r;
                memcpy(&scale, scales + 4 * place, sizeof(scale));
                LH_CHECK(values[r * 320 + c] == (float)(all[r][c] - all_zeros[g][r]) * scale);
            }
        }
    }
}

static void test_carries(void)
{
    static float values[64];
    lh_test_name("adding one to a part of a word of zeros carries, as in gptqmodel");
    struct lh_unpack unpack = {.format = LH_UNPACK_FORMAT_U4, .rows = 8, .group_rows = 8};
    const uint8_t words[] = {0xF7, 0x7F, 0xF7, 0xFF};
    const float subtracted[] = {8, 0, 1, 9, 8, 0, 1, 1};
    const float one = 1;
    unpack.columns = unpack.block_columns = 8;
    unpack.block_rows = unpack.has_zeros = unpack.zero = 1;
    unpack.order = LH_UNPACK_ORDER_WORDS;
    memset(packed, 0, sizeof(packed));
    memcpy(zeros, words, sizeof(words));
    for (int r = 0; r < 8; r++)
        memcpy(scales + 4 * r, &one, sizeof(one));
    LH_CHECK(lh_unpack_is_valid(&unpack));
    lh_unpack(&unpack, &source, 0, 64, values);
    for (int r = 0; r < 8; r++)
        LH_CHECK(values[8 * r] == -subtracted[r]);
}

/*
 * Scales: any bits (0), values of the sizes that files have (1), large ones (2), small ones (3),
 * positive ones from 2^-24 to 2^7 (4).
 */
static void scales_draw(uint64_t *seed, uint32_t type, int size)
{
    static const uint32_t exponents[][3] = {[LH_UNPACK_SCALE_F32] = {0x3B, 0x44, 0x37},
                                            [LH_UNPACK_SCALE_BF16] = {0x3B, 0x44, 0x37},
                                            [LH_UNPACK_SCALE_F16] = {0x1C, 0x64, 0x00}};
    const uint64_t bytes = type == LH_UNPACK_SCALE_F32 ? 4 : 2;
    for (uint64_t i = 0; i < COUNT_MAX; i++) {
        scales[i] = (uint8_t)lh_test_random(seed);
        if (size == 4 && type == LH_UNPACK_SCALE_F16)
            scales[i] = i % 2 ? scales[i] % 0x58 : scales[i] | 1;
        else if (size == 4 && i % bytes == bytes - 1)
            scales[i] = (uint8_t)(0x34 + scales[i] % 15);
        else if (size > 0 && size < 4 && i % bytes == bytes - 1)
            scales[i] = (uint8_t)(exponents[type][size - 1] | (scales[i] & 0x83));
    }
}

static void test_whole_rows(void)
{
    static _Alignas(64) uint16_t found[4 * COUNT_MAX], expected[4 * COUNT_MAX];
    uint64_t seed = 9;
    lh_test_name("whole rows, from any row to any other, are those of the definition");
    for (int turn = 0; turn < 600; turn++) {
        struct lh_unpack unpack = {.format = LH_UNPACK_FORMAT_U4, .block_rows = 1};
        unpack.order = turn % 2 ? LH_UNPACK_ORDER_AWQ : LH_UNPACK_ORDER_WORDS;
        if (turn % 4 == 0)
            unpack.format = LH_UNPACK_FORMAT_U8;
        unpack.dtype = turn % 5 == 0 ? LH_DTYPE_F16 : turn % 5 == 1 ? LH_DTYPE_F32 : LH_DTYPE_BF16;
        unpack.rounding = turn % 3 == 0 ? (uint32_t)(lh_test_random(&seed) % 3) : LH_DTYPE_F16;
        unpack.rows = unpack.group_rows = 64 + 8 * (lh_test_random(&seed) % 33);
        unpack.columns = 32 * (1 + lh_test_random(&seed) % 7);
        unpack.block_columns = 32 * (1 + lh_test_random(&seed) % 5);
        unpack.scale_type = (uint32_t)(lh_test_random(&seed) % 3);
        unpack.has_zeros = lh_test_random(&seed) % 4 > 0;
        unpack.has_index = turn % 2 == 0 && lh_test_random(&seed) % 2 == 0;
        unpack.zero = (uint32_t)(lh_test_random(&seed) % (unpack.has_zeros ? 2 : 256));
        LH_CHECK(lh_unpack_is_valid(&unpack));
        scales_draw(&seed, unpack.scale_type, (int)(lh_test_random(&seed) % 5));
        for (uint64_t i = 0; i < sizeof(packed); i++)
            packed[i] = (uint8_t)lh_test_random(&seed);
        for (uint64_t i = 0; i < COUNT_MAX; i++)
            zeros[i] = (uint8_t)lh_test_random(&seed);
        for (uint64_t i = 0; i < unpack.columns; i++)
            groups[i] = (uint32_t)(lh_test_random(&seed) % 9);
        const uint64_t unit = turn % 7 == 0 ? 1 : 32, units = unpack.rows / unit;
        const uint64_t first = turn % 3 ? lh_test_random(&seed) % units * unit : 0;
        uint64_t rows = unpack.rows - first;
        if (lh_test_random(&seed) % 4 == 0)
            rows = 1 + lh_test_random(&seed) % rows;
        const uint64_t count = rows * unpack.columns;
        memset(found, 0xA5, sizeof(found));
        memset(expected, 0xA5, sizeof(expected));
        lh_unpack_ref(&unpack, &source, first * unpack.columns, count, expected);
        lh_unpack(&unpack, &source, first * unpack.columns, count, found);
        LH_CHECK(memcmp(found, expected, sizeof(found)) == 0);
    }
}

static void test_powers(void)
{
    static _Alignas(64) uint16_t found[4 * COUNT_MAX], expected[4 * COUNT_MAX];
    uint64_t seed = 10;
    lh_test_name("columns of E2M1 with any powers of two are those of the definition");
    for (int turn = 0; turn < 400; turn++) {
        struct lh_unpack unpack = {.format = LH_UNPACK_FORMAT_E2M1,
                                   .order = LH_UNPACK_ORDER_TRANSPOSED,
                                   .scale_type = LH_UNPACK_SCALE_E8M0,
                                   .block_rows = 32,
                                   .block_columns = 1};
        unpack.dtype = turn % 5 == 0 ? LH_DTYPE_F16 : LH_DTYPE_BF16;
        unpack.rounding = turn % 4 == 0   ? LH_DTYPE_F16
                          : turn % 4 == 1 ? LH_DTYPE_BF16
                                          : LH_DTYPE_F32;
        unpack.group_rows = 32 * (1 + lh_test_random(&seed) % 6);
        unpack.rows = unpack.group_rows * (1 + lh_test_random(&seed) % 3);
        unpack.columns = 32 * (1 + lh_test_random(&seed) % 7);
        LH_CHECK(lh_unpack_is_valid(&unpack));
        LH_CHECK(lh_unpack_count(&unpack) <= LH_COUNT_OF(found));
        for (uint64_t i = 0; i < sizeof(packed); i++)
            packed[i] = (uint8_t)lh_test_random(&seed);
        /* Any bytes, those of files, and the first and the last ones with normal products. */
        for (uint64_t i = 0; i < COUNT_MAX; i++) {
            uint8_t byte = (uint8_t)lh_test_random(&seed);
            scales[i] = turn % 3 == 0 ? byte : turn % 3 == 1 ? 112 + byte % 16 : byte % 2 ? 2 : 252;
        }
        const uint64_t unit = turn % 7 == 0 ? 1 : 32, units = unpack.rows / unit;
        const uint64_t first = lh_test_random(&seed) % units * unit;
        const uint64_t rows = 1 + lh_test_random(&seed) % (unpack.rows - first);
        const uint64_t count =
            turn % 2 ? rows * unpack.columns : (unpack.rows - first) * unpack.columns;
        memset(found, 0xA5, sizeof(found));
        memset(expected, 0xA5, sizeof(expected));
        struct lh_unpack_source from = source;
        from.packed += lh_unpack_needed(&unpack, first * unpack.columns);
        lh_unpack_ref(&unpack, &from, first * unpack.columns, count, expected);
        lh_unpack(&unpack, &from, first * unpack.columns, count, found);
        LH_CHECK(memcmp(found, expected, sizeof(found)) == 0);
    }
}

/* Rounding to bf16, or first to fp16, of codes less a zero, with scales of all usual sizes. */
static void test_rounding(void)
{
    enum { ROWS = 2048, COLUMNS = 256, LAST = 0x5800 /* 2^7 */ };
    static uint8_t codes[ROWS * COLUMNS];
    static _Alignas(64) uint16_t found[ROWS * COLUMNS], expected[ROWS * COLUMNS];
    static uint16_t halves[ROWS];
    const struct lh_unpack_source all = {.packed = codes, .scales = (const uint8_t *)halves};
    lh_test_name("products of 8 bits and scales from 2^-24 to 2^7 are rounded to bf16");
    for (uint32_t i = 0; i < ROWS; i++)
        halves[i] = (uint16_t)(1 + i * (LAST - 1) / (ROWS - 1));
    for (uint32_t turn = 0; turn < 8; turn++) {
        const bool is_words = turn % 2 == 0;
        struct lh_unpack unpack = {.format = LH_UNPACK_FORMAT_U8,
                                   .dtype = LH_DTYPE_BF16,
                                   .rounding = turn % 4 < 2 ? LH_DTYPE_F16 : LH_DTYPE_BF16,
                                   .rows = ROWS,
                                   .group_rows = is_words ? ROWS : 0,
                                   .columns = COLUMNS,
                                   .block_rows = 1,
                                   .block_columns = COLUMNS,
                                   .scale_type = LH_UNPACK_SCALE_F16,
                                   .order = is_words ? LH_UNPACK_ORDER_WORDS : LH_UNPACK_ORDER_ROWS,
                                   .zero = turn < 4 ? 127 : 0};
        for (uint32_t i = 0; i < sizeof(codes); i++)
            codes[i] = (uint8_t)(is_words ? i / (4 * ROWS) * 4 + i % 4 : i);
        LH_CHECK(lh_unpack_is_valid(&unpack));
        lh_unpack_ref(&unpack, &all, 0, ROWS * COLUMNS, expected);
        lh_unpack(&unpack, &all, 0, ROWS * COLUMNS, found);
        LH_CHECK(memcmp(found, expected, sizeof(found)) == 0);
    }
}

/* Scales near a tie of bf16 whose products with a zero are not exact in fp32. */
static void test_long_scales(void)
{
    enum { ROWS = 64, COLUMNS = 32 };
    static uint8_t codes[ROWS * COLUMNS];
    static _Alignas(64) uint16_t found[ROWS * COLUMNS], expected[ROWS * COLUMNS];
    static float long_scales[ROWS];
    const struct lh_unpack_source all = {.packed = codes, .scales = (const uint8_t *)long_scales};
    const struct lh_unpack unpack = {.format = LH_UNPACK_FORMAT_U8,
                                     .dtype = LH_DTYPE_BF16,
                                     .rounding = LH_DTYPE_F32,
                                     .rows = ROWS,
                                     .group_rows = ROWS,
                                     .columns = COLUMNS,
                                     .block_rows = 1,
                                     .block_columns = COLUMNS,
                                     .scale_type = LH_UNPACK_SCALE_F32,
                                     .order = LH_UNPACK_ORDER_WORDS,
                                     .zero = 254};
    lh_test_name("scales of fp32 that fp16 does not have are multiplied once");
    memset(codes, 255, sizeof(codes));
    for (int i = 0; i < ROWS; i++)
        long_scales[i] = 1 + 0x1p-8f + (float)(i - ROWS / 2) * 0x1p-23f;
    LH_CHECK(lh_unpack_is_valid(&unpack));
    lh_unpack_ref(&unpack, &all, 0, ROWS * COLUMNS, expected);
    lh_unpack(&unpack, &all, 0, ROWS * COLUMNS, found);
    LH_CHECK(memcmp(found, expected, sizeof(found)) == 0);
}

int main(void)
{
    test_long_scales();
    test_rounding();
    test_whole_rows();
    test_powers();
    test_orders();
    test_carries();
    return 0;
}
