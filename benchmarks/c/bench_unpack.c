/*
 * Compare the decoding of quantized tensors with memory: each format is decoded to bf16 by
 * lh_unpack(), and beside it the same bytes are moved and nothing is computed: the packed bytes are
 * read once, and the bytes of the result written once. Both use the same threads and arrays and
 * take turns, so that a drift of the machine affects both.
 *
 *      bench_unpack [elements = 67108864] [repetitions = 9] [threads = 2]
 *
 * Each result is a JSON line. value, min and max are elements per second; fraction_of_bound is the
 * median over repetitions of (time of moving / time of decoding).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/base.h"
#include "compute/unpack.h"
#include "measure.h"

#define PIECE_ELEMENTS (UINT64_C(1) << 18) /* what a worker of an engine decodes at once */
#define LINE_BYTES 64
#define COLUMNS 4096
#define REPETITION_COUNT_MAX 101

struct bench {
    struct lh_unpack unpack;
    struct lh_unpack_source source;
    uint8_t *out;
    int thread_count;
    bool is_moving;
};

static const struct form {
    const char *name;
    enum lh_unpack_format format;
    enum lh_unpack_scale scale_type;
    uint64_t block_rows, block_columns; /* 0 if no scales are stored apart from the values */
    enum lh_unpack_order order;
    bool has_index;
} forms[] = {
    {"nf4_nested", LH_UNPACK_FORMAT_NIBBLES, LH_UNPACK_SCALE_NESTED, 1, 64},
    {"nf4", LH_UNPACK_FORMAT_NIBBLES, LH_UNPACK_SCALE_F32, 1, 64},
    {"fp8", LH_UNPACK_FORMAT_F8_E4M3, LH_UNPACK_SCALE_F32, 128, 128},
    {"int8", LH_UNPACK_FORMAT_I8, LH_UNPACK_SCALE_BF16, 1, COLUMNS},
    {"mxfp4", LH_UNPACK_FORMAT_E2M1, LH_UNPACK_SCALE_E8M0, 1, 32},
    {"nvfp4", LH_UNPACK_FORMAT_E2M1, LH_UNPACK_SCALE_E4M3, 1, 16},
    {"q8_0", LH_UNPACK_FORMAT_Q8_0, LH_UNPACK_SCALE_F32, 0, 0},
    {"q4_k", LH_UNPACK_FORMAT_Q4_K, LH_UNPACK_SCALE_F32, 0, 0},
    {"q6_k", LH_UNPACK_FORMAT_Q6_K, LH_UNPACK_SCALE_F32, 0, 0},
    {"iq4_nl", LH_UNPACK_FORMAT_IQ4_NL, LH_UNPACK_SCALE_F32, 0, 0},
    {"iq4_xs", LH_UNPACK_FORMAT_IQ4_XS, LH_UNPACK_SCALE_F32, 0, 0},
    {"mxfp4_gguf", LH_UNPACK_FORMAT_MXFP4, LH_UNPACK_SCALE_F32, 0, 0},
    {"f16", LH_UNPACK_FORMAT_F16, LH_UNPACK_SCALE_F32, 0, 0},
    {"gptq", LH_UNPACK_FORMAT_U4, LH_UNPACK_SCALE_F16, 1, 128, LH_UNPACK_ORDER_WORDS},
    {"gptq_groups_of_32", LH_UNPACK_FORMAT_U4, LH_UNPACK_SCALE_F16, 1, 32, LH_UNPACK_ORDER_WORDS},
    {"gptq_act_order", LH_UNPACK_FORMAT_U4, LH_UNPACK_SCALE_F16, 1, 128, LH_UNPACK_ORDER_WORDS,
     true},
    {"gptq_8_bits", LH_UNPACK_FORMAT_U8, LH_UNPACK_SCALE_F16, 1, 128, LH_UNPACK_ORDER_WORDS},
    {"gptq_8_bits_act_order", LH_UNPACK_FORMAT_U8, LH_UNPACK_SCALE_F16, 1, 128,
     LH_UNPACK_ORDER_WORDS, true},
    {"int4_packed", LH_UNPACK_FORMAT_U4, LH_UNPACK_SCALE_BF16, 1, 128},
    {"int8_packed", LH_UNPACK_FORMAT_U8, LH_UNPACK_SCALE_BF16, 1, 128},
    {"awq", LH_UNPACK_FORMAT_U4, LH_UNPACK_SCALE_F16, 1, 128, LH_UNPACK_ORDER_AWQ},
    {"mxfp4_transposed", LH_UNPACK_FORMAT_E2M1, LH_UNPACK_SCALE_E8M0, 32, 1,
     LH_UNPACK_ORDER_TRANSPOSED},
};

static struct lh_unpack unpack_make(const struct form *form, uint64_t elements)
{
    bool is_ordered = form->order != LH_UNPACK_ORDER_ROWS;
    bool is_flat = !is_ordered && (form->format == LH_UNPACK_FORMAT_NIBBLES ||
                                   form->format == LH_UNPACK_FORMAT_E2M1);
    bool has_zeros = form->format == LH_UNPACK_FORMAT_U4 || form->format == LH_UNPACK_FORMAT_U8;
    uint64_t columns = is_flat ? elements : COLUMNS;
    return (struct lh_unpack){
        .format = form->format,
        .dtype = LH_DTYPE_BF16,
        .rounding = has_zeros ? form->scale_type : LH_DTYPE_F32,
        .rows = elements / columns,
        .columns = columns,
        .block_rows = form->block_rows ? form->block_rows : 1,
        .block_columns = form->block_columns ? form->block_columns : columns,
        .scale_type = form->scale_type,
        .nested_block = 256,
        .group_rows = is_ordered ? elements / columns : 0,
        .order = form->order,
        .has_zeros = has_zeros,
        .has_index = form->has_index,
        .zero = has_zeros && is_ordered,
    };
}

/* Write a piece's result by lines, which together have all bytes of the packed elements. */
static void move(const uint8_t *packed, uint64_t packed_bytes, uint8_t *out, uint64_t out_bytes)
{
    uint64_t step = lh_div_ceil(packed_bytes * LINE_BYTES, out_bytes);
    for (uint64_t at = 0; at < out_bytes; at += LINE_BYTES, packed += step)
        memcpy(out + at, packed, LINE_BYTES);
}

static void work(void *context, int index)
{
    const struct bench *bench = context;
    uint64_t elements = lh_unpack_count(&bench->unpack), pieces = elements / PIECE_ELEMENTS;
    uint64_t end = pieces * (uint64_t)(index + 1) / (uint64_t)bench->thread_count;
    for (uint64_t p = pieces * (uint64_t)index / (uint64_t)bench->thread_count; p < end; p++) {
        uint64_t first = p * PIECE_ELEMENTS;
        struct lh_unpack_source source = bench->source;
        uint8_t *out = bench->out + first * lh_unpack_element_bytes(&bench->unpack);
        source.packed += lh_unpack_needed(&bench->unpack, first);
        if (bench->is_moving)
            move(source.packed, lh_unpack_packed_bytes(&bench->unpack, PIECE_ELEMENTS), out,
                 PIECE_ELEMENTS * lh_unpack_element_bytes(&bench->unpack));
        else
            lh_unpack(&bench->unpack, &source, first, PIECE_ELEMENTS, out);
    }
}

static void form_bench(struct bench *bench, const char *name, int repetition_count)
{
    double speeds[REPETITION_COUNT_MAX], bounds[REPETITION_COUNT_MAX];
    double fractions[REPETITION_COUNT_MAX], count = (double)lh_unpack_count(&bench->unpack);
    /* The first repetition warms up and is overwritten. */
    for (int r = -1; r < repetition_count; r++) {
        int at = r < 0 ? 0 : r;
        bench->is_moving = true;
        bounds[at] = count / measure_threads(bench->thread_count, work, bench);
        bench->is_moving = false;
        speeds[at] = count / measure_threads(bench->thread_count, work, bench);
        fractions[at] = speeds[at] / bounds[at];
    }
    double bound = measure_sort(bounds, repetition_count);
    double speed = measure_sort(speeds, repetition_count);
    double fraction = measure_sort(fractions, repetition_count);
    printf("{\"name\": \"unpack/%s\", \"value\": %.4g, \"unit\": \"elements/s\", \"peer\": null, "
           "\"peer_value\": null, \"ratio\": null, \"bound\": %.4g, \"fraction_of_bound\": %.3f, "
           "\"fraction_min\": %.3f, \"fraction_max\": %.3f, \"n\": %d, \"min\": %.4g, "
           "\"max\": %.4g}\n",
           name, speed, bound, fraction, fractions[0], fractions[repetition_count - 1],
           repetition_count, speeds[0], speeds[repetition_count - 1]);
    fflush(stdout);
}

static uint64_t state = 1;

static uint32_t draw(void)
{
    state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (uint32_t)(state >> 32);
}

/* Fill memory with bytes that are finite numbers of fp16, E4M3 and E8M0: one bit is never set. */
static uint8_t *bytes_make(uint64_t bytes)
{
    uint8_t *memory = measure_pages(bytes);
    for (uint64_t i = 0; i < bytes; i++)
        memory[i] = (uint8_t)(draw() >> 24 & 0xBF);
    return memory;
}

/* Make numbers of fp16 or bf16 of the sizes that scales of integers have: 2^-11 to 2^-7. */
static uint8_t *narrow_make(uint64_t count, bool is_half)
{
    uint16_t *values = measure_pages(count * sizeof(*values));
    for (uint64_t i = 0; i < count; i++)
        values[i] =
            is_half ? (uint16_t)(0x1000 + draw() % 0x1000) : (uint16_t)(0x3A00 + draw() % 0x200);
    return (uint8_t *)values;
}

/* Make powers of two of the sizes that scales of E8M0 have: 2^-15 to 2^0. */
static uint8_t *powers_make(uint64_t count)
{
    uint8_t *values = measure_pages(count);
    for (uint64_t i = 0; i < count; i++)
        values[i] = (uint8_t)(112 + draw() % 16);
    return values;
}

/* Make floats of the sizes that scales have, so that nothing runs into denormals. */
static uint8_t *floats_make(uint64_t count)
{
    float *values = measure_pages(count * sizeof(*values));
    for (uint64_t i = 0; i < count; i++)
        values[i] = 0.5f + (float)(draw() >> 8) * 0x1p-24f;
    return (uint8_t *)values;
}

int main(int argc, char **argv)
{
    uint64_t elements = argc > 1 ? strtoull(argv[1], NULL, 10) : UINT64_C(67108864);
    int repetition_count = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 9;
    int thread_count = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 2;
    if (elements == 0 || elements % (PIECE_ELEMENTS * 2) != 0 || repetition_count < 1 ||
        repetition_count > REPETITION_COUNT_MAX || thread_count < 1 ||
        thread_count > MEASURE_THREAD_COUNT_MAX) {
        fprintf(stderr,
                "bench_unpack [elements, a multiple of %d] [repetitions, 1 to %d] [threads, 1 to "
                "%d]\n",
                (int)PIECE_ELEMENTS * 2, REPETITION_COUNT_MAX, MEASURE_THREAD_COUNT_MAX);
        return 1;
    }
    uint8_t *packed = bytes_make(elements * 2), *out = measure_pages(elements * 2);
    uint8_t *bytes = bytes_make(elements / 8), *floats = floats_make(elements / 32 + 256);
    uint8_t *halves = narrow_make(elements / 32, true);
    uint8_t *bfloats = narrow_make(elements / 32, false);
    uint8_t *powers = powers_make(elements / 32);
    uint32_t *groups = measure_pages(COLUMNS * sizeof(*groups));
    for (size_t i = 0; i < COLUMNS; i++)
        groups[i] = draw() % (COLUMNS / 128);
    for (size_t f = 0; f < LH_COUNT_OF(forms); f++) {
        uint8_t *const scale_arrays[LH_UNPACK_SCALE_COUNT] = {[LH_UNPACK_SCALE_F32] = floats,
                                                              [LH_UNPACK_SCALE_BF16] = bfloats,
                                                              [LH_UNPACK_SCALE_F16] = halves,
                                                              [LH_UNPACK_SCALE_E8M0] = powers};
        uint8_t *scales = scale_arrays[forms[f].scale_type];
        scales = scales ? scales : bytes;
        struct bench bench = {
            .unpack = unpack_make(forms + f, elements),
            .source = {packed, scales, floats, floats, floats, bytes, (const uint8_t *)groups},
            .out = out,
            .thread_count = thread_count};
        LH_ASSERT(lh_unpack_is_valid(&bench.unpack));
        LH_ASSERT(lh_unpack_scale_count(&bench.unpack) * lh_unpack_scale_bytes(&bench.unpack) <=
                  elements / 8);
        form_bench(&bench, forms[f].name, repetition_count);
    }
    return 0;
}
