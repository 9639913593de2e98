/*
 * Compare the generation of z in zeroth-order training (compute/zo.h) with its arithmetic: each
 * kernel is timed beside a loop of the operations that z takes, in the same number and of the same
 * kinds, of which none waits for another or for memory. All run in turns on one core, in its first-
 * level cache.
 *
 *      bench_rng [repetitions = 99]
 *
 * It also times the cost of parameters that are stored in another format: ROUND alone, and a step's
 * update, ROUND and perturbation from the stored format to values in bf16, beside an update and a
 * perturbation of fp32 in place.
 *
 * Each result is a JSON line. value, min, median and max are numbers per second; fraction_of_bound
 * is the median over repetitions of (time of the bound / time of the kernel).
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "compute/zo.h"
#include "measure.h"

#define COUNT 4096
#define ROUNDS 256
#define BLOCK 64
#define REPETITION_COUNT_MAX 101

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#if defined(__x86_64__)

/*
 * The operations that eight counters and sixteen pairs of numbers take in vectors of 64 bytes, as
 * zo_avx512.c compiles. Philox takes 17 products, 16 shifts, 3 shuffles, 14 exclusive ors of three
 * operands and 4 of two, and a sum (half of the first two rounds is the same for all counters). The
 * numbers take 22 multiplications, 16 additions, 3 conversions and a root, and on integers 2
 * shifts, 5 additions, 2 ands, a test, an operation of three operands and 2 by a mask: 110 in all,
 * and twice that for 64 numbers. Loads, stores and the application of z are not counted. Their
 * order changes the bound by less than 2 %, because none of them waits for another.
 */
#define WIDE_MOST                                                                                  \
    "vpmuludq %%zmm30, %%zmm31, %%zmm\\r\n"                                                        \
    "vmulps %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vpsrlq $32, %%zmm30, %%zmm\\r\n"                                                              \
    "vaddps %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vpternlogq $0x96, %%zmm30, %%zmm31, %%zmm\\r\n"
#define WIDE_MULTIPLY "vmulps %%zmm30, %%zmm31, %%zmm\\r\n"
#define WIDE_THREE                                                                                 \
    "vpmuludq %%zmm30, %%zmm31, %%zmm\\r\n"                                                        \
    "vshufps $0x88, %%zmm30, %%zmm31, %%zmm\\r\n"                                                  \
    "vcvtdq2ps %%zmm30, %%zmm\\r\n"
#define WIDE_TWO                                                                                   \
    "vpsrlq $32, %%zmm30, %%zmm\\r\n"                                                              \
    "vaddps %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vpslld $2, %%zmm30, %%zmm\\r\n"                                                               \
    "vpandd %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vpxorq %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vpxorq %%zmm30, %%zmm31, %%zmm\\r\n"
#define WIDE_ADD "vpaddd %%zmm30, %%zmm31, %%zmm\\r\n"
#define WIDE_ONE                                                                                   \
    "vpaddq %%zmm30, %%zmm31, %%zmm0\n"                                                            \
    "vsqrtps %%zmm30, %%zmm1\n"                                                                    \
    "vptestmd %%zmm30, %%zmm31, %%k1\n"                                                            \
    "vpternlogd $0x78, %%zmm30, %%zmm31, %%zmm2\n"                                                 \
    "vblendmps %%zmm30, %%zmm31, %%zmm3%{%%k2%}\n"                                                 \
    "vxorps %%zmm30, %%zmm31, %%zmm4%{%%k2%}\n"
#define EACH_OF(registers, text) ".irp r," registers "\n" text ".endr\n"

static void wide_half(void)
{
    __asm__ volatile(EACH_OF("0,1,2,3,4,5,6", WIDE_MOST) EACH_OF("7,8", WIDE_TWO)
                         EACH_OF("9,10,11,12", WIDE_MULTIPLY) EACH_OF("13,14,15", WIDE_THREE)
                             EACH_OF("0,1,2,3,4,5,6", WIDE_MOST)
                                 WIDE_ONE EACH_OF("7,8,9,10", WIDE_MULTIPLY)
                                     EACH_OF("11,12,13,14,15", WIDE_ADD)
                     :
                     :
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

/*
 * The operations that four counters and eight pairs take in vectors of 32 bytes. In addition to the
 * above, an exclusive or of three operands is two operations, and a selection by a mask takes a
 * shift, 2 blends and 3 more: 126 in all, four times.
 */
#define NARROW_MOST                                                                                \
    "vpmuludq %%ymm14, %%ymm15, %%ymm\\r\n"                                                        \
    "vmulps %%ymm14, %%ymm15, %%ymm\\r\n"                                                          \
    "vpsrlq $32, %%ymm14, %%ymm\\r\n"                                                              \
    "vpxor %%ymm14, %%ymm15, %%ymm\\r\n"                                                           \
    "vaddps %%ymm14, %%ymm15, %%ymm\\r\n"                                                          \
    "vpxor %%ymm14, %%ymm15, %%ymm\\r\n"
#define NARROW_MULTIPLY "vmulps %%ymm14, %%ymm15, %%ymm\\r\n"
#define NARROW_THREE                                                                               \
    "vpmuludq %%ymm14, %%ymm15, %%ymm\\r\n"                                                        \
    "vshufps $0x88, %%ymm14, %%ymm15, %%ymm\\r\n"                                                  \
    "vcvtdq2ps %%ymm14, %%ymm\\r\n"                                                                \
    "vpslld $2, %%ymm14, %%ymm\\r\n"                                                               \
    "vpand %%ymm14, %%ymm15, %%ymm\\r\n"
#define NARROW_TWO                                                                                 \
    "vpsrlq $32, %%ymm14, %%ymm\\r\n"                                                              \
    "vaddps %%ymm14, %%ymm15, %%ymm\\r\n"                                                          \
    "vpxor %%ymm14, %%ymm15, %%ymm\\r\n"                                                           \
    "vpxor %%ymm14, %%ymm15, %%ymm\\r\n"                                                           \
    "vxorps %%ymm14, %%ymm15, %%ymm\\r\n"                                                          \
    "vblendvps %%ymm14, %%ymm15, %%ymm14, %%ymm\\r\n"
#define NARROW_ADD "vpaddd %%ymm14, %%ymm15, %%ymm\\r\n"
#define NARROW_ONE                                                                                 \
    "vpaddq %%ymm14, %%ymm15, %%ymm0\n"                                                            \
    "vsqrtps %%ymm14, %%ymm1\n"

static void narrow_quarter(void)
{
    __asm__ volatile(EACH_OF("0,1,2,3,4,5,6", NARROW_MOST) EACH_OF("7,8", NARROW_TWO)
                         EACH_OF("9,10,11,12", NARROW_MULTIPLY) EACH_OF("2,3,4", NARROW_THREE)
                             EACH_OF("5,6,7,8,9,10,11", NARROW_MOST)
                                 NARROW_ONE EACH_OF("12,13,2,3", NARROW_MULTIPLY)
                                     EACH_OF("4,5,6,7,8", NARROW_ADD)
                     :
                     :
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

/* False: there is none for the kernel. */
static bool bound_run(const char *kernel)
{
    static const float one_and_a_half = 1.5f; /* whatever is no denormal number */
    uint64_t blocks = (uint64_t)ROUNDS * COUNT / BLOCK;
    if (strcmp(kernel, "avx512") == 0) {
        __asm__ volatile("vbroadcastss %0, %%zmm30\n vbroadcastss %0, %%zmm31\n"
                         :
                         : "m"(one_and_a_half));
        for (uint64_t i = 0; i < 2 * blocks; i++)
            wide_half();
        __asm__ volatile("vzeroupper");
        return true;
    }
    if (strcmp(kernel, "avx2") == 0) {
        __asm__ volatile("vbroadcastss %0, %%ymm14\n vbroadcastss %0, %%ymm15\n"
                         :
                         : "m"(one_and_a_half)
                         : "xmm14", "xmm15");
        for (uint64_t i = 0; i < 4 * blocks; i++)
            narrow_quarter();
        __asm__ volatile("vzeroupper");
        return true;
    }
    return false;
}

#else

static bool bound_run(const char *kernel)
{
    (void)kernel;
    return false;
}

#endif

static void fractions_print(const char *what, const char *kernel, const char *format,
                            const char *peer, double *speeds, double *peer_speeds, int n)
{
    double ratios[REPETITION_COUNT_MAX];
    for (int i = 0; i < n; i++)
        ratios[i] = speeds[i] / peer_speeds[i];
    measure_sort(speeds, n);
    measure_sort(peer_speeds, n);
    measure_sort(ratios, n);
    printf("{\"name\": \"%s/%s/%s\", \"value\": %.4g, \"unit\": \"numbers/s\", \"peer\": \"%s\", "
           "\"peer_value\": %.4g, \"ratio\": %.3f, \"bound\": null, \"fraction_of_bound\": null, "
           "\"n\": %d, \"min\": %.4g, \"median\": %.4g, \"max\": %.4g}\n",
           what, kernel, format, speeds[n / 2], peer, peer_speeds[n / 2], ratios[n / 2], n,
           speeds[0], speeds[n / 2], speeds[n - 1]);
    fflush(stdout);
}

static void kept_bench(const struct lh_zo_kernel *kernel, enum lh_zo_format format, int n)
{
    static const char *const names[] = {"fp32", "bf16", "fp16", "fp8"};
    static float values[COUNT] __attribute__((aligned(64)));
    static float state[COUNT] __attribute__((aligned(64)));
    static float wide[COUNT] __attribute__((aligned(64)));
    double speeds[4][REPETITION_COUNT_MAX];
    const struct lh_zo_op round = {
        .kind = LH_ZO_OP_ROUND, .stream = {1, LH_ZO_SAMPLE_ROUND, 3, 4}, .format = format};
    const struct lh_zo_op draw = {.kind = LH_ZO_OP_DRAW, .stream = {1, 2, 3, 4}};
    const struct lh_zo_op update = {
        .kind = LH_ZO_OP_UPDATE, .stream = {1, 2, 3, 4}, .scale = 1, .lr = 0x1p-10f};
    const struct lh_zo_op perturb = {
        .kind = LH_ZO_OP_PERTURB, .stream = {1, 2, 3, 5}, .scale = 0x1p-10f};
    const struct lh_zo_op step[] = {update, round, perturb}, plain[] = {update, perturb};
    const struct lh_zo_kept kept = {state, format, values, LH_ZO_FORMAT_BF16};
    memset(state, 0, sizeof(state));
    memset(wide, 0, sizeof(wide));
    for (int r = -1; r < n; r++) {
        double begin_s[5];
        for (int i = 0; i < 5; i++) {
            begin_s[i] = now_s();
            for (uint64_t j = 0; i < 4 && j < ROUNDS / 4; j++) {
                if (i == 0)
                    lh_zo_apply_by(kernel, wide, wide, j * COUNT, COUNT, &round, 1);
                else if (i == 1)
                    lh_zo_apply_by(kernel, values, values, j * COUNT, COUNT, &draw, 1);
                else if (i == 2)
                    lh_zo_lead_by(kernel, &kept, j * COUNT, COUNT, step, 3);
                else
                    lh_zo_apply_by(kernel, wide, wide, j * COUNT, COUNT, plain, 2);
            }
        }
        for (int i = 0; i < 4 && r >= 0; i++)
            speeds[i][r] = (double)(ROUNDS / 4 * COUNT) / (begin_s[i + 1] - begin_s[i]);
    }
    fractions_print("round", kernel->name, names[format], "z", speeds[0], speeds[1], n);
    fractions_print("lead", kernel->name, names[format], "in fp32", speeds[2], speeds[3], n);
}

static void kernel_bench(const struct lh_zo_kernel *kernel, int repetition_count)
{
    static float values[COUNT] __attribute__((aligned(64)));
    double speeds[REPETITION_COUNT_MAX], bounds[REPETITION_COUNT_MAX];
    double fractions[REPETITION_COUNT_MAX];
    struct lh_zo_op op = {.kind = LH_ZO_OP_DRAW, .stream = {1, 2, 3, 4}};
    double count = (double)ROUNDS * COUNT;
    bool has_bound = true;
    for (int r = -1; r < repetition_count; r++) { /* the first one warms up */
        double begin_s = now_s();
        for (uint64_t i = 0; i < ROUNDS; i++)
            lh_zo_apply_by(kernel, values, values, i * COUNT, COUNT, &op, 1);
        double between_s = now_s();
        has_bound = bound_run(kernel->name);
        double end_s = now_s();
        if (r < 0)
            continue;
        speeds[r] = count / (between_s - begin_s);
        bounds[r] = count / (end_s - between_s);
        fractions[r] = speeds[r] / bounds[r];
    }
    int middle = repetition_count / 2;
    measure_sort(speeds, repetition_count);
    measure_sort(bounds, repetition_count);
    measure_sort(fractions, repetition_count);
    printf("{\"name\": \"rng/%s\", \"value\": %.4g, \"unit\": \"numbers/s\", \"peer\": null, "
           "\"peer_value\": null, \"ratio\": null, ",
           kernel->name, speeds[middle]);
    if (has_bound)
        printf("\"bound\": %.4g, \"fraction_of_bound\": %.3f, ", bounds[middle], fractions[middle]);
    else
        printf("\"bound\": null, \"fraction_of_bound\": null, ");
    printf("\"n\": %d, \"min\": %.4g, \"median\": %.4g, \"max\": %.4g}\n", repetition_count,
           speeds[0], speeds[middle], speeds[repetition_count - 1]);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    int repetition_count = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 99;
    const struct lh_zo_kernel *kernels;
    int kernel_count = lh_zo_kernels(&kernels);
    if (repetition_count < 1 || repetition_count > REPETITION_COUNT_MAX) {
        fprintf(stderr, "bench_rng [repetitions, 1 to %d]\n", REPETITION_COUNT_MAX);
        return 1;
    }
    /* The definition goes one counter at a time; its speed says nothing. */
    for (int i = 0; i < kernel_count - 1; i++) {
        kernel_bench(&kernels[i], repetition_count);
        for (int format = LH_ZO_FORMAT_BF16; format <= LH_ZO_FORMAT_F8; format++)
            kept_bench(&kernels[i], (enum lh_zo_format)format, repetition_count);
    }
    return 0;
}
