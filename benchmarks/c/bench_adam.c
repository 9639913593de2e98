/*
 * Compare the AdamW kernels with memory: each kernel, with and without checksums, is timed beside a
 * kernel that moves the same bytes and computes nothing (lh_adam_stream). Both use the same threads
 * and arrays and take turns, so that a drift of the machine affects both.
 *
 *      bench_adam [elements = 50000000] [repetitions = 9] [threads = 2]
 *
 * Each result is a JSON line. value, min, median and max are elements per second; fraction_of_bound
 * is the median over repetitions of (time of the stream / time of the kernel). Rows whose names end
 * in a format of moments (adam_states.h) are compared with the same kernel for moments in fp32:
 * their ratio is the median of (time with fp32 / time with that format).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute/adam.h"
#include "measure.h"

#define CHUNK_ELEMENTS (UINT64_C(1) << 20)
/* Checksums of one chunk and array; 2-byte arrays use half of them. */
#define CHUNK_CHECKSUMS (CHUNK_ELEMENTS * 4 / LH_CHECKSUM_BYTES)
#define REPETITION_COUNT_MAX 101

/* WORK_SEAL makes the checksums that WORK_CHECKSUMS then expects; its time does not count. */
enum work { WORK_STREAM, WORK_UPDATE, WORK_SEAL, WORK_CHECKSUMS, WORK_COUNT };

struct checksums {
    uint32_t *param, *residual, *moment1, *moment2, *scales;
};

struct bench {
    struct lh_adam_run run; /* all elements */
    struct lh_adam_scalars scalars;
    const struct lh_adam_kernel *kernel;
    struct lh_adam_moments
        stored[LH_ADAM_STATES_COUNT]; /* the run's moments in every other format */
    struct checksums read, written;
    int thread_count;
    enum work work;
    enum lh_adam_states states;
};

static struct checksums checksums_create(uint64_t chunk_count)
{
    uint64_t bytes = chunk_count * CHUNK_CHECKSUMS * sizeof(uint32_t);

    return (struct checksums){measure_pages(bytes), measure_pages(bytes), measure_pages(bytes),
                              measure_pages(bytes), measure_pages(bytes)};
}

static struct lh_adam_run part(const struct lh_adam_run *run, uint64_t first, uint64_t count)
{
    struct lh_adam_run piece = *run;

    piece.param = (char *)run->param + first * lh_dtype_bytes(run->param_dtype);
    piece.residual = run->residual ? (int16_t *)run->residual + first : NULL;
    piece.moment1 += first;
    piece.moment2 += first;
    piece.gradient = (const char *)run->gradient + first * lh_dtype_bytes(run->gradient_dtype);
    piece.count = count;
    return piece;
}

/* Point a chunk to its moments, which begin at an element of all. */
static void chunk_moments(const struct bench *bench, struct lh_adam_chunk *chunk, uint64_t first)
{
    const struct lh_adam_moments *stored = bench->stored + bench->states;
    struct lh_adam_moments part = lh_adam_moments_from(stored, first);

    chunk->states = bench->states;
    if (bench->states == LH_ADAM_STATES_F32)
        return;
    chunk->count = lh_align_up(chunk->count, LH_ADAM_STATES_BLOCK);
    chunk->moment1 = part.moment1;
    chunk->moment2 = part.moment2;
    chunk->scales = part.scales;
}

static void chunk_work(const struct bench *bench, const struct lh_adam_run *run, uint64_t index)
{
    const struct checksums *read = &bench->read, *written = &bench->written;
    uint64_t place = index * CHUNK_CHECKSUMS;
    struct lh_adam_segment segment = {.count = run->count,
                                      .gradient = run->gradient,
                                      .gradient_dtype = run->gradient_dtype,
                                      .scalars = bench->scalars,
                                      .param_first = index * CHUNK_ELEMENTS};
    bool checked = bench->work == WORK_CHECKSUMS, made = bench->work != WORK_UPDATE;
    bool has_scales = lh_adam_has_scales(bench->states);
    struct lh_adam_chunk chunk = {
        .param = run->param,
        .residual = run->residual,
        .moment1 = run->moment1,
        .moment2 = run->moment2,
        .count = run->count,
        .param_dtype = run->param_dtype,
        .segments = &segment,
        .segment_count = 1,
        .residual_expected = checked ? read->residual + place : NULL,
        .moment1_expected = checked ? read->moment1 + place : NULL,
        .moment2_expected = checked ? read->moment2 + place : NULL,
        .scales_expected = checked && has_scales ? read->scales + place : NULL,
        .param_checksums = made ? written->param + place : NULL,
        .residual_checksums = made ? written->residual + place : NULL,
        .moment1_checksums = made ? written->moment1 + place : NULL,
        .moment2_checksums = made ? written->moment2 + place : NULL,
        .scales_checksums = made && has_scales ? written->scales + place : NULL,
    };
    struct lh_adam_mismatch mismatch;

    chunk_moments(bench, &chunk, index * CHUNK_ELEMENTS);
    if (lh_adam_chunk_update(bench->kernel, &chunk, &mismatch) != 0) {
        fprintf(stderr, "array %d, block %llu: a checksum differs\n", (int)mismatch.array,
                (unsigned long long)mismatch.block);
        exit(1);
    }
}

static void worker_run(void *context, int index)
{
    const struct bench *bench = context;
    uint64_t chunk_count = lh_div_ceil(bench->run.count, CHUNK_ELEMENTS);
    uint64_t begin = chunk_count * (uint64_t)index / (uint64_t)bench->thread_count;
    uint64_t end = chunk_count * (uint64_t)(index + 1) / (uint64_t)bench->thread_count;

    for (uint64_t c = begin; c < end; c++) {
        uint64_t first = c * CHUNK_ELEMENTS;
        struct lh_adam_run run =
            part(&bench->run, first, lh_min_u64(CHUNK_ELEMENTS, bench->run.count - first));

        if (bench->work == WORK_STREAM)
            lh_adam_stream(&run, NULL);
        else if (bench->work == WORK_UPDATE && bench->states == LH_ADAM_STATES_F32)
            bench->kernel->run[LH_RULE_ADAMW](&run, &bench->scalars);
        else
            chunk_work(bench, &run, c);
    }
}

static double seconds_of(struct bench *bench, enum work work)
{
    bench->work = work;
    return measure_threads(bench->thread_count, worker_run, bench);
}

/* The seconds of a repetition, by format and work; the stream is in [0]. */
typedef double times[LH_ADAM_STATES_COUNT][WORK_COUNT];

/* Print a result, compared with what WORK_STREAM or, for formats other than fp32, fp32 took. */
static void report(const struct bench *bench, enum work work, const times *seconds,
                   int repetition_count)
{
    static const char *const states_names[] = {"", "/bf16_moments", "/8bit_moments",
                                               "/4bit_moments"};
    double speeds[REPETITION_COUNT_MAX], others[REPETITION_COUNT_MAX];
    double ratios[REPETITION_COUNT_MAX], count = (double)bench->run.count;
    bool is_fp32 = bench->states == LH_ADAM_STATES_F32;
    int middle = repetition_count / 2;
    char other[160];

    for (int r = 0; r < repetition_count; r++) {
        double other_seconds = seconds[r][0][is_fp32 ? WORK_STREAM : work];

        speeds[r] = count / seconds[r][bench->states][work];
        others[r] = count / other_seconds;
        ratios[r] = other_seconds / seconds[r][bench->states][work];
    }
    measure_sort(speeds, repetition_count);
    measure_sort(others, repetition_count);
    measure_sort(ratios, repetition_count);
    if (is_fp32)
        snprintf(other, sizeof(other),
                 "\"peer\": null, \"peer_value\": null, \"ratio\": null, "
                 "\"bound\": %.4g, \"fraction_of_bound\": %.3f",
                 others[middle], ratios[middle]);
    else
        snprintf(other, sizeof(other),
                 "\"peer\": \"fp32_moments\", \"peer_value\": %.4g, \"ratio\": %.3f, "
                 "\"bound\": null, \"fraction_of_bound\": null",
                 others[middle], ratios[middle]);
    printf("{\"name\": \"adam/%s/%s_param_%s_gradient%s%s\", \"value\": %.4g, "
           "\"unit\": \"elements/s\", %s, \"n\": %d, \"min\": %.4g, \"median\": %.4g, "
           "\"max\": %.4g}\n",
           bench->kernel->name, bench->run.param_dtype == LH_DTYPE_F32 ? "fp32" : "bf16",
           bench->run.gradient_dtype == LH_DTYPE_F32 ? "fp32" : "bf16",
           work == WORK_CHECKSUMS ? "/checksums" : "", states_names[bench->states], speeds[middle],
           other, repetition_count, speeds[0], speeds[middle], speeds[repetition_count - 1]);
    fflush(stdout);
}

static void kernel_bench(struct bench *bench, int repetition_count)
{
    times seconds[REPETITION_COUNT_MAX + 1];

    /* The first repetition warms up and is not reported. */
    for (int r = 0; r <= repetition_count; r++) {
        for (int states = 0; states < LH_ADAM_STATES_COUNT; states++)
            for (int work = states == 0 ? 0 : WORK_UPDATE; work < WORK_COUNT; work++) {
                struct checksums swap = bench->read;

                bench->states = (enum lh_adam_states)states;
                seconds[r][states][work] = seconds_of(bench, (enum work)work);
                if (work == WORK_SEAL) {
                    bench->read = bench->written;
                    bench->written = swap;
                }
            }
    }
    for (int states = 0; states < LH_ADAM_STATES_COUNT; states++) {
        bench->states = (enum lh_adam_states)states;
        report(bench, WORK_UPDATE, seconds + 1, repetition_count);
        report(bench, WORK_CHECKSUMS, seconds + 1, repetition_count);
    }
}

/* Values of the sizes that training has, so that nothing runs into denormals. */
static void values_make(const struct lh_adam_run *run)
{
    uint64_t state = 1;

    for (uint64_t i = 0; i < run->count; i++) {
        float unit;

        state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
        unit = (float)(int32_t)(state >> 32) * 0x1p-31f;
        if (run->param_dtype == LH_DTYPE_F32)
            ((float *)run->param)[i] = 0.05f * unit;
        else
            lh_adam_split(&(float){0.05f * unit}, (uint16_t *)run->param + i,
                          (int16_t *)run->residual + i, 1);
        run->moment1[i] = 1e-3f * unit;
        run->moment2[i] = 1e-6f * unit * unit;
        unit *= 1e-3f;
        memcpy((char *)run->gradient + i * lh_dtype_bytes(run->gradient_dtype),
               (char *)&unit + 4 - lh_dtype_bytes(run->gradient_dtype),
               lh_dtype_bytes(run->gradient_dtype));
    }
}

/* Encode the run's moments in every other format. */
static void stored_make(struct bench *bench)
{
    const struct lh_adam_random random = {LH_ADAM_SEED, 0, 0};
    float moment1[4096], moment2[4096];

    for (int states = LH_ADAM_STATES_BF16; states < LH_ADAM_STATES_COUNT; states++) {
        const struct lh_adam_moments *stored = bench->stored + states;

        for (uint64_t at = 0; at < bench->run.count; at += LH_COUNT_OF(moment1)) {
            struct lh_adam_moments part = lh_adam_moments_from(stored, at);
            uint64_t count = lh_min_u64(LH_COUNT_OF(moment1), bench->run.count - at);

            memset(moment1, 0, sizeof(moment1));
            memset(moment2, 0, sizeof(moment2));
            memcpy(moment1, bench->run.moment1 + at, count * sizeof(*moment1));
            memcpy(moment2, bench->run.moment2 + at, count * sizeof(*moment2));
            lh_adam_states_root(part.states, moment2, LH_COUNT_OF(moment2));
            lh_adam_states_encode(NULL, &part, moment1, moment2, at, LH_COUNT_OF(moment1), &random);
        }
    }
}

int main(int argc, char **argv)
{
    static const enum lh_dtype modes[][2] = {
        {LH_DTYPE_F32, LH_DTYPE_F32},
        {LH_DTYPE_BF16, LH_DTYPE_BF16},
        {LH_DTYPE_BF16, LH_DTYPE_F32},
    };
    const struct lh_adam_hyper hyper = {1e-4, 0.9, 0.999, 1e-8, 0.01, 0};
    uint64_t count = argc > 1 ? strtoull(argv[1], NULL, 10) : 50000000;
    int repetition_count = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 9;
    uint64_t chunk_count = lh_div_ceil(count, CHUNK_ELEMENTS);
    uint64_t room = lh_align_up(count, CHUNK_ELEMENTS);
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);
    struct bench bench = {
        .scalars = lh_adam_scalars_make(&hyper, 10, 1.0),
        .read = checksums_create(chunk_count),
        .written = checksums_create(chunk_count),
        .thread_count = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 2,
        .run = {measure_pages(count * 4), measure_pages(count * 2), measure_pages(count * 4),
                measure_pages(count * 4), measure_pages(count * 4), count, LH_DTYPE_F32,
                LH_DTYPE_F32},
        .stored = {[LH_ADAM_STATES_BF16] = {LH_ADAM_STATES_BF16, measure_pages(room * 2),
                                            measure_pages(room * 2), NULL},
                   [LH_ADAM_STATES_8BIT] = {LH_ADAM_STATES_8BIT, measure_pages(room),
                                            measure_pages(room),
                                            measure_pages(
                                                lh_adam_scale_bytes(LH_ADAM_STATES_8BIT, room))},
                   [LH_ADAM_STATES_4BIT] = {LH_ADAM_STATES_4BIT, measure_pages(room), NULL,
                                            measure_pages(
                                                lh_adam_scale_bytes(LH_ADAM_STATES_4BIT, room))}},
    };
    void *residual = bench.run.residual;

    if (count == 0 || repetition_count < 1 || repetition_count > REPETITION_COUNT_MAX ||
        bench.thread_count < 1 || bench.thread_count > MEASURE_THREAD_COUNT_MAX) {
        fprintf(stderr, "bench_adam [elements] [repetitions, 1 to %d] [threads, 1 to %d]\n",
                REPETITION_COUNT_MAX, MEASURE_THREAD_COUNT_MAX);
        return 1;
    }
    for (size_t mode = 0; mode < LH_COUNT_OF(modes); mode++) {
        bench.run.param_dtype = modes[mode][0];
        bench.run.gradient_dtype = modes[mode][1];
        bench.run.residual = modes[mode][0] == LH_DTYPE_BF16 ? residual : NULL;
        values_make(&bench.run);
        stored_make(&bench);
        /* The definition is one call of fmaf() after another; its speed says nothing. */
        for (int k = 0; k < kernel_count - 1; k++) {
            bench.kernel = kernels + k;
            kernel_bench(&bench, repetition_count);
        }
    }
    return 0;
}
