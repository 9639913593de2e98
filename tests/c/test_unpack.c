/* Test the decoding of quantized tensors: its definition, the kernels, and decoding in place. */
#include "compute/unpack.h"

#include <math.h>

#include "compute/half.h"
#include "fp_fixture.h"
#include "lh_test.h"

#define COUNT_MAX 40000
#define SCALE_COUNT_MAX 8192

static uint8_t packed[COUNT_MAX];
static uint8_t scales[4 * SCALE_COUNT_MAX];
static float nested[SCALE_COUNT_MAX];
static float table[LH_UNPACK_TABLE_COUNT];
static float nested_table[LH_UNPACK_NESTED_TABLE_COUNT];
static uint8_t zeros[4 * SCALE_COUNT_MAX];
static uint32_t groups[COUNT_MAX];
static uint8_t found[4 * COUNT_MAX + 64];
static uint8_t expected[4 * COUNT_MAX + 64];

static const struct lh_unpack_source source = {
    .packed = packed,
    .scales = scales,
    .table = (const uint8_t *)table,
    .nested = (const uint8_t *)nested,
    .nested_table = (const uint8_t *)nested_table,
    .zeros = zeros,
    .index = (const uint8_t *)groups,
};

/* Change a description to one of a tensor in another order than rows. */
static void order_draw(struct lh_unpack *made, uint64_t *seed)
{
    bool is_e2m1 = made->format == LH_UNPACK_FORMAT_E2M1;
    made->rows = 8 * (1 + lh_test_random(seed) % 18);
    if (lh_test_random(seed) % 2)
        made->rows = 64 * (1 + lh_test_random(seed) % 2);
    made->columns = 8 * (1 + lh_test_random(seed) % (36000 / 8 / made->rows));
    made->group_rows = made->rows;
    made->order = LH_UNPACK_ORDER_WORDS;
    if (is_e2m1) {
        made->order = LH_UNPACK_ORDER_TRANSPOSED;
        made->group_rows = made->rows % 3 == 0 ? made->rows / 3 : made->rows;
        made->rows = made->group_rows = 8 * (made->group_rows / 8);
        made->block_rows = made->rows % 32 == 0 ? 32 : 8;
        made->block_columns = 1;
        if (made->columns % 2 == 0 && made->columns > 8)
            made->columns /= 2, made->rows *= 2;
        made->scale_type = LH_UNPACK_SCALE_E8M0;
        return;
    }
    if (made->format == LH_UNPACK_FORMAT_U4 && lh_test_random(seed) % 2)
        made->order = LH_UNPACK_ORDER_AWQ;
    made->block_rows = 1;
    made->block_columns = 32 * (1 + lh_test_random(seed) % 5);
    if (lh_test_random(seed) % 4 == 0)
        made->block_columns = 1 + lh_test_random(seed) % 100;
    made->scale_type %= 3;
    made->has_zeros = lh_test_random(seed) % 4 > 0;
    made->has_index = made->order == LH_UNPACK_ORDER_WORDS && lh_test_random(seed) % 2;
    made->zero = (uint32_t)(lh_test_random(seed) % (made->has_zeros ? 2 : 256));
    if (lh_test_random(seed) % 3 == 0) {
        made->order = LH_UNPACK_ORDER_ROWS;
        made->group_rows = 0;
        made->zero = made->has_zeros ? 0 : made->zero;
    }
}

/* The elements of a grain of GGUF's types. */
static uint32_t grain_elements(uint32_t format)
{
    if (format == LH_UNPACK_FORMAT_Q8_0 || format == LH_UNPACK_FORMAT_IQ4_NL ||
        format == LH_UNPACK_FORMAT_MXFP4)
        return 32;
    return format < LH_UNPACK_FORMAT_F32 || format == LH_UNPACK_FORMAT_IQ4_XS ? 256 : 1;
}

/* A description with random sizes that fits the arrays above. */
static struct lh_unpack any(uint64_t *seed)
{
    struct lh_unpack made = {
        .format = 1 + (uint32_t)(lh_test_random(seed) % (LH_UNPACK_FORMAT_COUNT - 1)),
        .dtype = (uint32_t)(lh_test_random(seed) % 3),
        .rounding = (uint32_t)(lh_test_random(seed) % 3),
        .rows = 1 + lh_test_random(seed) % 40,
        .columns = 1 + lh_test_random(seed) % 900,
        .block_rows = 1 + lh_test_random(seed) % 20,
        .block_columns = 1 + lh_test_random(seed) % 300,
        .scale_type = (uint32_t)(lh_test_random(seed) % LH_UNPACK_SCALE_COUNT),
        .nested_block = 1 + lh_test_random(seed) % 20,
        .nested_offset = 0.37f,
        .rounds_scale = lh_test_random(seed) % 4 == 0,
    };
    if (made.format == LH_UNPACK_FORMAT_U4 || made.format == LH_UNPACK_FORMAT_U8 ||
        (made.format == LH_UNPACK_FORMAT_E2M1 && lh_test_random(seed) % 2)) {
        made.rounds_scale = 0;
        order_draw(&made, seed);
        while (lh_unpack_scale_count(&made) > SCALE_COUNT_MAX)
            made.block_columns *= 2;
        return made;
    }
    if (made.format >= LH_UNPACK_FORMAT_Q8_0) {
        uint64_t rows = 2 * (1 + lh_test_random(seed) % 4); /* of a group, at most */
        uint64_t grain = grain_elements(made.format);
        made.columns = lh_max_u64(1, made.columns / grain) * grain;
        made.rows = rows * (1 + made.rows % 30 / rows);
        if (grain == 1)
            made.columns = 1 + made.columns % 200;
        made.group_rows = lh_test_random(seed) % 2 ? rows : 0;
        made.rounding = LH_DTYPE_F32;
        made.rounds_scale = 0;
    }
    if (lh_unpack_is_narrow(&made)) {
        made.columns *= made.rows;
        made.rows = 1;
    }
    if (made.format == LH_UNPACK_FORMAT_E2M1 && lh_test_random(seed) % 4 > 0) {
        made.block_columns = lh_test_random(seed) % 2 ? 16 : 32; /* as in files */
        made.scale_type = LH_UNPACK_SCALE_E8M0 + (uint32_t)(lh_test_random(seed) % 3);
    }
    if (made.format == LH_UNPACK_FORMAT_NIBBLES && lh_test_random(seed) % 4 > 0)
        made.block_columns = 32 * (1 + lh_test_random(seed) % 4);
    while (lh_unpack_scale_count(&made) > SCALE_COUNT_MAX)
        made.block_columns *= 2;
    return made;
}

static void fill(uint64_t *seed, bool has_specials)
{
    for (int i = 0; i < COUNT_MAX; i++)
        packed[i] = (uint8_t)lh_test_random(seed);
    for (uint64_t i = 0; i < sizeof(scales); i++)
        scales[i] = (uint8_t)lh_test_random(seed);
    for (uint64_t i = 0; i < sizeof(zeros); i++)
        zeros[i] = (uint8_t)lh_test_random(seed);
    for (int i = 0; i < COUNT_MAX; i++)
        groups[i] = (uint32_t)lh_test_random(seed) % (lh_test_random(seed) % 4 ? 4 : 4000);
    for (int i = 0; i < SCALE_COUNT_MAX; i++)
        nested[i] = (float)(int32_t)lh_test_random(seed) / 1e9f;
    for (int i = 0; i < LH_UNPACK_TABLE_COUNT; i++)
        table[i] = (float)(int32_t)lh_test_random(seed) / 2e9f;
    for (int i = 0; i < LH_UNPACK_NESTED_TABLE_COUNT; i++)
        nested_table[i] = (float)(int32_t)lh_test_random(seed) / 2e9f;
    if (has_specials) {
        nested[0] = INFINITY;
        nested[1] = -NAN;
        table[3] = NAN;
        table[5] = 0x1p-149f;
    }
}

static void test_values(void)
{
    struct lh_unpack unpack = {.format = LH_UNPACK_FORMAT_F8_E4M3,
                               .rows = 1,
                               .columns = 256,
                               .block_rows = 1,
                               .block_columns = 256};
    const float one = 1;
    float values[256];
    lh_test_name("each byte of E4M3 and of I8 has the value that its format defines");
    for (int i = 0; i < 256; i++)
        packed[i] = (uint8_t)i;
    memcpy(scales, &one, sizeof(one));
    lh_unpack_ref(&unpack, &source, 0, 256, values);
    for (int i = 0; i < 256; i++) {
        int exponent = i >> 3 & 15, mantissa = i & 7;
        double meaning = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
        bool is_nan = (i & 0x7F) == 0x7F;
        LH_CHECK(is_nan ? bits_of(values[i]) == 0x7FC00000
                        : (double)values[i] == (i & 0x80 ? -meaning : meaning) &&
                              !signbit(values[i]) == !(i & 0x80));
    }
    unpack.format = LH_UNPACK_FORMAT_I8;
    lh_unpack_ref(&unpack, &source, 0, 256, values);
    for (int i = 0; i < 256; i++)
        LH_CHECK(values[i] == (float)(i < 128 ? i : i - 256));
    unpack.format = LH_UNPACK_FORMAT_NIBBLES;
    for (int i = 0; i < 16; i++)
        table[i] = (float)i - 5;
    lh_unpack_ref(&unpack, &source, 0, 256, values);
    for (int i = 0; i < 256; i++)
        LH_CHECK(values[i] == (float)(i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4) - 5);
    unpack.format = LH_UNPACK_FORMAT_E2M1;
    lh_unpack_ref(&unpack, &source, 0, 256, values);
    for (int i = 0; i < 256; i++) {
        int code = i % 2 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
        int exponent = code >> 1 & 3;
        double meaning = exponent == 0 ? (code & 1) / 2.0 : ldexp(2 + (code & 1), exponent - 2);
        LH_CHECK((double)fabsf(values[i]) == meaning && !signbit(values[i]) == !(code & 8));
    }
}

static float half_of(const uint8_t *at)
{
    return float_of(lh_half_widen((uint16_t)(at[0] | at[1] << 8)));
}

static float scale_of(const struct lh_unpack *unpack, uint64_t index)
{
    uint16_t narrow = (uint16_t)(scales[2 * index] | scales[2 * index + 1] << 8);
    float wide;
    memcpy(&wide, scales + 4 * index, sizeof(wide));
    if (unpack->scale_type == LH_UNPACK_SCALE_E8M0)
        return scales[index] == 255 ? NAN : (float)ldexp(1, scales[index] - 127);
    bool is_times = unpack->scale_type == LH_UNPACK_SCALE_E4M3_TIMES;
    if (unpack->scale_type == LH_UNPACK_SCALE_E4M3 || is_times) {
        int exponent = scales[index] >> 3 & 15, mantissa = scales[index] & 7;
        double value = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
        if ((scales[index] & 0x7F) == 0x7F)
            return NAN;
        value = scales[index] & 0x80 ? -value : value;
        return is_times ? (float)value * nested[0] : (float)value / nested[0];
    }
    if (unpack->scale_type == LH_UNPACK_SCALE_NESTED) {
        volatile float scaled = nested_table[scales[index]] * nested[index / unpack->nested_block];
        return scaled + unpack->nested_offset;
    }
    if (unpack->scale_type == LH_UNPACK_SCALE_F32)
        return wide;
    return float_of(unpack->scale_type == LH_UNPACK_SCALE_F16 ? lh_half_widen(narrow)
                                                              : (uint32_t)narrow << 16);
}

static void test_definition(void)
{
    uint64_t seed = 3;
    lh_test_name("an element is its value times the scale of its block, rounded twice");
    for (int turn = 0; turn < 120; turn++) {
        struct lh_unpack unpack = any(&seed);
        if (unpack.format >= LH_UNPACK_FORMAT_Q8_0 || unpack.order != LH_UNPACK_ORDER_ROWS)
            continue;
        struct lh_unpack plain = unpack;
        fill(&seed, false);
        uint64_t count = lh_unpack_count(&unpack);
        static float values[COUNT_MAX];
        float one = 1;
        static uint8_t ones[4];
        memcpy(ones, &one, sizeof(one));
        struct lh_unpack_source unit = source;
        unit.scales = ones;
        plain.rounding = plain.dtype = LH_DTYPE_F32;
        plain.rounds_scale = 0;
        plain.scale_type = LH_UNPACK_SCALE_F32;
        plain.block_rows = plain.rows;
        plain.block_columns = plain.columns;
        lh_unpack_ref(&plain, &unit, 0, count, values);
        lh_unpack_ref(&unpack, &source, 0, count, found);
        uint64_t across = (unpack.columns + unpack.block_columns - 1) / unpack.block_columns;
        for (uint64_t i = 0; i < count; i++) {
            uint64_t row = i / unpack.columns, column = i % unpack.columns;
            float scale =
                scale_of(&unpack, row / unpack.block_rows * across + column / unpack.block_columns);
            if (unpack.rounds_scale && unpack.dtype == LH_DTYPE_BF16)
                scale = float_of((uint32_t)lh_bf16_round(bits_of(scale)) << 16);
            else if (unpack.rounds_scale && unpack.dtype == LH_DTYPE_F16)
                scale = float_of(lh_half_widen(lh_half_round(bits_of(scale))));
            float product = values[i] * scale;
            if (isnan(product))
                product = NAN;
            if (unpack.rounding == LH_DTYPE_BF16)
                product = float_of((uint32_t)lh_bf16_round(bits_of(product)) << 16);
            else if (unpack.rounding == LH_DTYPE_F16)
                product = float_of(lh_half_widen(lh_half_round(bits_of(product))));
            uint32_t bits = bits_of(product);
            uint16_t narrow =
                unpack.dtype == LH_DTYPE_F16 ? lh_half_round(bits) : lh_bf16_round(bits);
            bool is_wide = unpack.dtype == LH_DTYPE_F32;
            LH_CHECK(memcmp(found + i * lh_unpack_element_bytes(&unpack),
                            is_wide ? (void *)&bits : (void *)&narrow, is_wide ? 4 : 2) == 0);
        }
    }
}

/* A number of `count` bits that begins at bit `at` of a grain. */
static int bits_at(const uint8_t *grain, int at, int count)
{
    int value = 0;
    for (int i = 0; i < count; i++)
        value |= (grain[(at + i) / 8] >> (at + i) % 8 & 1) << i;
    return value;
}

/* The same for the types with a table. */
static float looked_up_value(uint32_t format, const uint8_t *grain, int i)
{
    static const int values[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                 1,    13,   25,  38,  53,  69,  89,  113};
    static const float fours[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};
    int head = format == LH_UNPACK_FORMAT_MXFP4 ? 1 : format == LH_UNPACK_FORMAT_IQ4_NL ? 2 : 8;
    int part = i / 32, code = bits_at(grain + head + 16 * part, 8 * (i % 16) + i / 16 % 2 * 4, 4);
    if (format == LH_UNPACK_FORMAT_MXFP4)
        return grain[0] == 255 ? NAN : (float)ldexp(fours[code], grain[0] - 127);
    if (format == LH_UNPACK_FORMAT_IQ4_NL)
        return half_of(grain) * (float)values[code];
    int scale = bits_at(grain + 4, 4 * part, 4) | bits_at(grain + 2, 2 * part, 2) << 4;
    volatile float factor = half_of(grain) * (float)(scale - 32);
    return factor * (float)values[code];
}

/* Element `i` of a grain, from the picture in ggml's sources. */
static float grain_value(uint32_t format, const uint8_t *grain, int i)
{
    const uint8_t *small = grain + 4;
    int part = i / 32, low, high, scale, less;
    if (format == LH_UNPACK_FORMAT_Q8_0)
        return half_of(grain) * (float)(int8_t)grain[2 + i];
    if (format >= LH_UNPACK_FORMAT_IQ4_NL)
        return looked_up_value(format, grain, i);
    if (format == LH_UNPACK_FORMAT_Q4_K) {
        int value = bits_at(grain + 16, 8 * (i % 32 + i / 64 * 32) + i / 32 % 2 * 4, 4);
        int four = 8 * (part % 4);
        scale = part < 4 ? bits_at(small, four, 6)
                         : bits_at(small + 8, four, 4) | bits_at(small, four + 6, 2) << 4;
        less = part < 4 ? bits_at(small + 4, four, 6)
                        : bits_at(small + 8, four + 4, 4) | bits_at(small + 4, four + 6, 2) << 4;
        volatile float factor = half_of(grain) * (float)scale;
        volatile float product = factor * (float)value, minimum = half_of(grain + 2) * (float)less;
        return product - minimum;
    }
    low = bits_at(grain, 8 * (i / 128 * 64 + i % 64) + i / 64 % 2 * 4, 4);
    high = bits_at(grain + 128, 8 * (i / 128 * 32 + i % 32) + i / 32 % 4 * 2, 2);
    volatile float factor = half_of(grain + 208) * (float)(int8_t)grain[192 + i / 16];
    return factor * (float)((low | high << 4) - 32);
}

static void test_grains(void)
{
    static float values[COUNT_MAX];
    static const uint32_t formats[] = {LH_UNPACK_FORMAT_Q8_0,   LH_UNPACK_FORMAT_Q4_K,
                                       LH_UNPACK_FORMAT_Q6_K,   LH_UNPACK_FORMAT_IQ4_NL,
                                       LH_UNPACK_FORMAT_IQ4_XS, LH_UNPACK_FORMAT_MXFP4};
    static const uint32_t bytes[] = {34, 144, 210, 18, 136, 17};
    uint64_t seed = 6;
    lh_test_name("grains have the values that their formats define; rows of a group alternate");
    for (uint32_t turn = 0; turn < 120; turn++) {
        uint32_t format = formats[turn % 6], size = grain_elements(format);
        struct lh_unpack unpack = {
            .format = format, .rows = 12, .columns = 2 * size, .group_rows = turn / 6 % 2 ? 6 : 0};
        fill(&seed, false);
        LH_CHECK(lh_unpack_is_valid(&unpack));
        lh_unpack_ref(&unpack, &source, 0, lh_unpack_count(&unpack), values);
        for (uint32_t i = 0; i < lh_unpack_count(&unpack); i++) {
            uint32_t row = i / unpack.columns, column = i % unpack.columns;
            if (unpack.group_rows)
                row = row / 6 * 6 + row % 3 * 2 + row / 3 % 2;
            float value = grain_value(format, packed + (row * 2 + column / size) * bytes[turn % 6],
                                      (int)(column % size));
            LH_CHECK(isnan(value) ? bits_of(values[i]) == 0x7FC00000
                                  : bits_of(values[i]) == bits_of(value));
        }
    }
    lh_test_name("floats keep their values");
    const float numbers[] = {1.5f, -0.0f, INFINITY, 0x1p-149f, 65504, -NAN, 3, 4, 5, 6, 7};
    struct lh_unpack unpack = {.format = LH_UNPACK_FORMAT_F32, .rows = 1, .columns = 11};
    memcpy(packed, numbers, sizeof(numbers));
    lh_unpack(&unpack, &source, 0, 11, values);
    for (int i = 0; i < 11; i++)
        LH_CHECK(bits_of(values[i]) == (i == 5 ? 0x7FC00000 : bits_of(numbers[i])));
    const uint16_t narrow[] = {0x3C00, 0x8000, 0x7C00, 1, 0x3F80};
    const float halves[] = {1, -0.0f, INFINITY, 0x1p-24f, 1.875f};
    const float brains[] = {0x1p-7f, -0.0f, 0x1p121f, 0x1p-133f, 1};
    memcpy(packed, narrow, sizeof(narrow));
    for (int i = 0; i < 2; i++) {
        unpack.format = i == 0 ? LH_UNPACK_FORMAT_F16 : LH_UNPACK_FORMAT_BF16;
        unpack.columns = 5;
        lh_unpack(&unpack, &source, 0, 5, values);
        LH_CHECK(memcmp(values, i == 0 ? halves : brains, sizeof(halves)) == 0);
    }
}

static void test_kernels(void)
{
    uint64_t seed = 4;
    lh_test_name("the kernels decode any range to the bits of the definition, in any environment");
    for (int turn = 0; turn < 900; turn++) {
        struct lh_unpack unpack = any(&seed);
        if (turn % 20 == 0)
            fill(&seed, turn % 40 == 0);
        LH_CHECK(lh_unpack_is_valid(&unpack));
        uint64_t first = lh_test_random(&seed) % lh_unpack_count(&unpack) / 2 * 2;
        uint64_t count = 1 + lh_test_random(&seed) % (lh_unpack_count(&unpack) - first);
        struct lh_unpack_source range = source;
        range.packed += lh_unpack_needed(&unpack, first);
        uint64_t bytes = count * lh_unpack_element_bytes(&unpack);
        memset(found, 0xA5, sizeof(found));
        memset(expected, 0xA5, sizeof(expected));
        lh_unpack_ref(&unpack, &range, first, count, expected);
        fenv_t before;
        fegetenv(&before);
        if (turn % 2)
            fp_environment_spoil();
        lh_unpack(&unpack, &range, first, count, found);
        fesetenv(&before);
        LH_CHECK(memcmp(found, expected, bytes + 64) == 0);
    }
}

static void test_places(void)
{
    lh_test_name("a tensor fits where no byte is overwritten that is still needed");
    struct lh_unpack wide = {.format = LH_UNPACK_FORMAT_Q8_0, .rows = 8, .columns = 32};
    wide.dtype = LH_DTYPE_BF16;
    LH_CHECK(lh_unpack_fits(&wide, 8 * 64 - 8 * 34, 0) && !lh_unpack_fits(&wide, 239, 0));
    LH_CHECK(lh_unpack_needed(&wide, 33) == 34 && lh_unpack_needed(&wide, 64) == 68);
    wide.group_rows = 4; /* of 136 bytes */
    LH_CHECK(lh_unpack_fits(&wide, 240 + 136, 0) && !lh_unpack_fits(&wide, 240 + 135, 0));
    LH_CHECK(lh_unpack_needed(&wide, 127) == 0 && lh_unpack_needed(&wide, 128) == 136);
    struct lh_unpack narrow = {.format = LH_UNPACK_FORMAT_F32, .rows = 8, .columns = 4};
    narrow.dtype = LH_DTYPE_F16;
    LH_CHECK(lh_unpack_fits(&narrow, 64, 64) && !lh_unpack_fits(&narrow, 63, 64));
    narrow.group_rows = 4; /* of 32 decoded bytes */
    LH_CHECK(lh_unpack_fits(&narrow, 96, 64) && !lh_unpack_fits(&narrow, 95, 64));
}

static void test_overlap(void)
{
    static uint8_t memory[6 * COUNT_MAX];
    uint64_t seed = 5;
    lh_test_name("a tensor is decoded over its own bytes, down to the least distance");
    for (uint64_t turn = 0; turn < 300; turn++) {
        struct lh_unpack unpack = any(&seed);
        fill(&seed, false);
        if (turn % 10 == 0)
            unpack = (struct lh_unpack){.rows = 1, .columns = 1 + lh_test_random(&seed) % 9000};
        uint64_t count = lh_unpack_count(&unpack);
        uint64_t out_bytes = count * lh_unpack_element_bytes(&unpack);
        uint64_t packed_bytes = lh_unpack_packed_bytes(&unpack, count);
        uint64_t from = turn % 3 == 0 ? 0 : turn % 64;
        struct lh_unpack_source moved = source;
        from = lh_max_u64(from, out_bytes) - lh_min_u64(out_bytes, packed_bytes);
        while (!lh_unpack_fits(&unpack, from, 0))
            from++;
        LH_CHECK(from + packed_bytes < sizeof(memory));
        moved.packed = memory + from;
        memcpy(memory + from, packed, packed_bytes);
        memory[from + packed_bytes] = 0x77;
        uint64_t first = lh_test_random(&seed) % count / 2 * 2;
        /* The first call must leave what the second one needs of a grain that they share. */
        while (first * lh_unpack_element_bytes(&unpack) > from + lh_unpack_needed(&unpack, first))
            first -= 2;
        uint64_t skip = lh_unpack_needed(&unpack, first);
        uint8_t *middle = memory + first * lh_unpack_element_bytes(&unpack);
        lh_unpack_ref(&unpack, &source, 0, count, expected);
        lh_unpack(&unpack, &moved, 0, first, memory);
        moved.packed += skip;
        lh_unpack(&unpack, &moved, first, count - first, middle);
        LH_CHECK(memcmp(memory, expected, out_bytes) == 0);
        LH_CHECK(memory[from + packed_bytes] == 0x77);
    }
}

static void test_refusals(void)
{
    const struct lh_unpack good = {.format = LH_UNPACK_FORMAT_I8,
                                   .rows = 2,
                                   .columns = 3,
                                   .block_rows = 1,
                                   .block_columns = 3,
                                   .scale_type = LH_UNPACK_SCALE_NESTED,
                                   .nested_block = 1};
    lh_test_name("descriptions without sizes, with unknown types or with an overflow are invalid");
    LH_CHECK(lh_unpack_is_valid(&good));
    LH_CHECK(lh_unpack_part_bytes(&good, LH_UNPACK_PART_SCALES) == 2 &&
             lh_unpack_part_bytes(&good, LH_UNPACK_PART_NESTED) == 8 &&
             lh_unpack_part_bytes(&good, LH_UNPACK_PART_NESTED_TABLE) == 1024 &&
             lh_unpack_part_bytes(&good, LH_UNPACK_PART_ZEROS) == 0);
    struct lh_unpack bad[28];
    for (int turn = 0; turn < 28; turn++)
        bad[turn] = good;
    bad[0].format = LH_UNPACK_FORMAT_COUNT;
    bad[1].dtype = LH_DTYPE_BYTES;
    bad[2].rounding = LH_DTYPE_BYTES;
    bad[3].scale_type = LH_UNPACK_SCALE_COUNT;
    bad[4].rows = 0;
    bad[5].columns = 0;
    bad[6].block_rows = 0;
    bad[7].block_columns = 0;
    bad[8].nested_block = 0;
    bad[9].rows = UINT64_MAX / 2;
    bad[10].block_columns = UINT64_MAX;
    bad[11].group_rows = 2;                 /* with scales */
    bad[12].format = LH_UNPACK_FORMAT_Q8_0; /* three columns */
    bad[13].format = bad[14].format = LH_UNPACK_FORMAT_F16;
    bad[13].group_rows = 1;
    bad[14].group_rows = 4; /* of two rows */
    bad[15].format = LH_UNPACK_FORMAT_F32;
    bad[15].rounding = LH_DTYPE_BF16;
    bad[16] = (struct lh_unpack){.rows = 1, .columns = 4, .group_rows = 2};
    bad[17].format = LH_UNPACK_FORMAT_NIBBLES; /* two rows */
    bad[18].order = LH_UNPACK_ORDER_WORDS;     /* not integers with zeros */
    bad[19].has_zeros = 1;
    const struct lh_unpack words = {.format = LH_UNPACK_FORMAT_U4,
                                    .rows = 16,
                                    .columns = 8,
                                    .group_rows = 16,
                                    .block_rows = 1,
                                    .block_columns = 8,
                                    .order = LH_UNPACK_ORDER_WORDS,
                                    .has_zeros = 1};
    LH_CHECK(lh_unpack_is_valid(&words) && !lh_unpack_is_narrow(&words));
    LH_CHECK(lh_unpack_part_bytes(&words, LH_UNPACK_PART_ZEROS) == 8);
    for (int turn = 20; turn < 28; turn++)
        bad[turn] = words;
    bad[20].order = LH_UNPACK_ORDER_ROWS;
    bad[21].order = LH_UNPACK_ORDER_COUNT;
    bad[22].group_rows = 8;
    bad[23].columns = 12;
    bad[24].zero = 2;
    bad[25].block_rows = 2;
    bad[26].scale_type = LH_UNPACK_SCALE_E8M0;
    bad[27].order = LH_UNPACK_ORDER_AWQ;
    bad[27].has_index = 1;
    for (int turn = 0; turn < 28; turn++)
        LH_CHECK(!lh_unpack_is_valid(&bad[turn]));
}

static void test_integers_refused(void)
{
    const struct lh_unpack rows = {.format = LH_UNPACK_FORMAT_U4,
                                   .rows = 16,
                                   .columns = 8,
                                   .block_rows = 1,
                                   .block_columns = 8,
                                   .has_zeros = 1};
    struct lh_unpack bad[5];
    lh_test_name(
        "integers in the order of rows fill words, and have one scale for a part of a row");
    LH_CHECK(lh_unpack_is_valid(&rows) && lh_unpack_is_narrow(&rows));
    LH_CHECK(lh_unpack_part_bytes(&rows, LH_UNPACK_PART_ZEROS) == 8);
    for (int turn = 0; turn < 5; turn++)
        bad[turn] = rows;
    bad[0].zero = 1;
    bad[1].rows = 12;
    bad[2].columns = 12;
    bad[3].block_rows = 2;
    bad[4].rounds_scale = 1;
    for (int turn = 0; turn < 5; turn++)
        LH_CHECK(!lh_unpack_is_valid(&bad[turn]));
}

int main(void)
{
    test_values();
    test_definition();
    test_grains();
    test_kernels();
    test_places();
    test_overlap();
    test_refusals();
    test_integers_refused();
    return 0;
}
