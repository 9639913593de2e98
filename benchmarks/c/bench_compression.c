/*
 * Measure the coding of pack.h on an array of bf16 or fp32, in pieces of 2 MiB as a store's stripes
 * are. Each piece is decoded and compared once before. A small array stays in the cache, as what an
 * update has just written does.
 *
 *      bench_compression [FILE ELEMENT_BYTES] [repetitions = 5]
 *
 * Without FILE, the array is 16 Mi bf16 numbers of about a normal distribution. Each result is a
 * JSON line: `stored` is the share of the bytes that are left, each piece in whole blocks of 4 KiB,
 * and encode and decode have the least, median and largest bytes of the array per processor second.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/base.h"
#include "measure.h"
#include "pack.h"

#define PIECE_BYTES (UINT64_C(2) << 20)
#define BLOCK_BYTES 4096
#define SYNTHETIC_BYTES (UINT64_C(32) << 20)
#define CORE_COUNT 2
#define REPETITION_COUNT_MAX 101

struct bench {
    struct pack_format format;
    uint8_t *elements, *packed, *decoded;
    uint64_t bytes;
    uint64_t *packed_bytes;     /* of each piece */
    double seconds[CORE_COUNT]; /* of each thread's processor */
    int thread_count;
    bool is_decoding;
};

static uint64_t piece_count(const struct bench *bench)
{
    return lh_div_ceil(bench->bytes, PIECE_BYTES);
}

static uint64_t bytes_of(const struct bench *bench, uint64_t piece)
{
    uint64_t left = bench->bytes - piece * PIECE_BYTES;
    return left < PIECE_BYTES ? left : PIECE_BYTES;
}

static double processor_seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void work(void *context, int index)
{
    struct bench *bench = context;
    uint64_t room = pack_bound(&bench->format, PIECE_BYTES / bench->format.element_bytes);
    double begin = processor_seconds();
    for (uint64_t p = (uint64_t)index; p < piece_count(bench); p += (uint64_t)bench->thread_count) {
        uint64_t count = bytes_of(bench, p) / bench->format.element_bytes;
        uint8_t *packed = bench->packed + p * room;
        if (bench->is_decoding)
            pack_decode(&bench->format, packed, count, bench->decoded + p * PIECE_BYTES);
        else
            bench->packed_bytes[p] =
                pack_encode(&bench->format, bench->elements + p * PIECE_BYTES, count, packed);
    }
    bench->seconds[index] = processor_seconds() - begin;
}

/* Bytes of the array per second, if all threads are busy. */
static double speed_of(struct bench *bench)
{
    double sum = 0;
    measure_threads(bench->thread_count, work, bench);
    for (int t = 0; t < bench->thread_count; t++)
        sum += bench->seconds[t];
    return (double)bench->bytes * bench->thread_count / sum;
}

static uint64_t stored_bytes(const struct bench *bench)
{
    uint64_t sum = 0;
    for (uint64_t p = 0; p < piece_count(bench); p++) {
        uint64_t bytes = lh_align_up(bench->packed_bytes[p], BLOCK_BYTES);
        sum += bytes < bytes_of(bench, p) ? bytes : bytes_of(bench, p);
    }
    return sum;
}

static void direction_bench(struct bench *bench, bool is_decoding, int repetition_count)
{
    double speeds[REPETITION_COUNT_MAX];
    bench->is_decoding = is_decoding;
    for (int r = -1; r < repetition_count; r++) /* the first one warms up */
        speeds[r < 0 ? 0 : r] = speed_of(bench);
    double median = measure_sort(speeds, repetition_count);
    printf(", \"%s\": [%.4g, %.4g, %.4g]", is_decoding ? "decode" : "encode", speeds[0], median,
           speeds[repetition_count - 1]);
}

static void format_bench(struct bench *bench, const char *name, int repetition_count)
{
    uint64_t count = PIECE_BYTES / bench->format.element_bytes;
    bench->packed = measure_pages(piece_count(bench) * pack_bound(&bench->format, count));
    bench->thread_count = 1;
    for (int i = 0; i < 2; i++) {
        bench->is_decoding = i == 1;
        work(bench, 0);
    }
    if (memcmp(bench->elements, bench->decoded, bench->bytes) != 0) {
        fprintf(stderr, "%s, %u bits: the decoded bytes differ\n", name, bench->format.code_bits);
        exit(1);
    }
    for (bench->thread_count = 1; bench->thread_count <= CORE_COUNT; bench->thread_count++) {
        printf("{\"name\": \"compression/pack%u%s\", \"file\": \"%s\", \"threads\": %d, "
               "\"n\": %d, \"stored\": %.4f",
               bench->format.code_bits, bench->format.is_unsigned ? "u" : "", name,
               bench->thread_count, repetition_count,
               (double)stored_bytes(bench) / (double)bench->bytes);
        for (int i = 0; i < 2; i++)
            direction_bench(bench, i == 1, repetition_count);
        printf("}\n");
    }
    fflush(stdout);
}

/* The upper halves of sums of eight uniform numbers. */
static void fill(struct bench *bench)
{
    uint64_t state = 1;
    bench->bytes = SYNTHETIC_BYTES;
    bench->elements = measure_pages(bench->bytes);
    for (uint64_t i = 0; i < bench->bytes / 2; i++) {
        float sum = -4;
        for (int k = 0; k < 8; k++) {
            state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
            sum += (float)(state >> 40) * 0x1p-24F;
        }
        memcpy(bench->elements + 2 * i, (const char *)&sum + 2, 2);
    }
}

static void load(struct bench *bench, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
    uint64_t bytes = (uint64_t)ftell(file);
    bench->bytes = bytes - bytes % (UINT64_C(4) * PACK_BLOCK);
    bench->elements = measure_pages(bench->bytes);
    rewind(file);
    if (bench->bytes == 0 || fread(bench->elements, 1, bench->bytes, file) != bench->bytes) {
        fprintf(stderr, "%s has fewer than %d bytes, or cannot be read\n", path, 4 * PACK_BLOCK);
        exit(1);
    }
    fclose(file);
}

static bool has_negative(const struct bench *bench)
{
    uint8_t all = 0;
    for (uint64_t i = bench->format.element_bytes - 1; i < bench->bytes;
         i += bench->format.element_bytes)
        all |= bench->elements[i];
    return all & 0x80;
}

int main(int argc, char **argv)
{
    struct bench bench = {.format = {.element_bytes = argc > 2 ? (uint32_t)atoi(argv[2]) : 2}};
    int repetition_count = argc > 3 ? atoi(argv[3]) : 5;

    if (argc == 2 || (bench.format.element_bytes != 2 && bench.format.element_bytes != 4) ||
        repetition_count < 1 || repetition_count > REPETITION_COUNT_MAX) {
        fprintf(stderr, "bench_compression [FILE ELEMENT_BYTES (2 or 4)] [repetitions, 1 to %d]\n",
                REPETITION_COUNT_MAX);
        return 1;
    }
    if (!pack_is_supported()) {
        fprintf(stderr, "note: this processor lacks AVX-512 VBMI2, without which nothing is run\n");
        return 0;
    }
    if (argc > 2)
        load(&bench, argv[1]);
    else
        fill(&bench);
    bench.decoded = measure_pages(bench.bytes);
    bench.packed_bytes = measure_pages(piece_count(&bench) * sizeof(*bench.packed_bytes));
    bool is_unsigned = bench.format.element_bytes == 4 && !has_negative(&bench);
    for (uint32_t bits = 3; bits <= 4; bits++) {
        bench.format.code_bits = bits;
        bench.format.is_unsigned = is_unsigned && bits == 4;
        format_bench(&bench, argc > 2 ? argv[1] : "synthetic", repetition_count);
    }
    return 0;
}
