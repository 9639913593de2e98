/*
 * z of zeroth-order training (compute/zo.h) against arithmetic: every kernel beside the operations
 * that z takes, as many and of the same kinds, none of which waits for another or for memory. On
 * one core, in its first cache, interleaved.
 *
 *      bench_rng [repetitions = 9]
 *
 * One JSON line a result. value, min, median and max are numbers a second; fraction_of_bound is the
 * median over repetitions of (time of the bound / time of the kernel).
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "compute/zo.h"

#define COUNT 4096
#define ROUNDS 4096
#define BLOCK 64
#define REPETITION_COUNT_MAX 101

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#if defined(__x86_64__)

/*
 * What sixteen counters take in vectors of 16 lanes: Philox 2 x 10 rounds of 2 products, 2 shifts
 * and 2 exclusive ors of three, 8 to pack; then twice 24 multiplications, 16 additions, 3
 * conversions, a square root and 18 operations on integers.
 */
#define WIDE_ROUND                                                                                 \
    "vpmuludq %%zmm30, %%zmm31, %%zmm\\r\n"                                                        \
    "vpsrlq $32, %%zmm30, %%zmm\\r\n"                                                              \
    "vpternlogq $0x96, %%zmm30, %%zmm31, %%zmm\\r\n"
#define WIDE_FLOATS                                                                                \
    "vmulps %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vaddps %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vpaddd %%zmm30, %%zmm31, %%zmm\\r\n"
#define WIDE_REST                                                                                  \
    "vmulps %%zmm30, %%zmm31, %%zmm\\r\n"                                                          \
    "vpslld $2, %%zmm30, %%zmm\\r\n"

static void wide_block(void)
{
    __asm__ volatile(
        ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19\n" WIDE_ROUND ".endr\n"
        ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n" WIDE_FLOATS ".endr\n"
        ".irp r,0,1,2,3,4,5,6,7\n" WIDE_REST ".endr\n"
        "vsqrtps %%zmm30, %%zmm28\n"
        ".irp r,0,1,2\n"
        "vcvtdq2ps %%zmm30, %%zmm\\r\n"
        ".endr\n"
        ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19\n" WIDE_ROUND ".endr\n"
        ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n" WIDE_FLOATS ".endr\n"
        ".irp r,0,1,2,3,4,5,6,7\n" WIDE_REST ".endr\n"
        "vsqrtps %%zmm30, %%zmm28\n"
        ".irp r,0,1,2\n"
        "vcvtdq2ps %%zmm30, %%zmm\\r\n"
        ".endr\n" ::
            : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
              "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

/* The same in vectors of 8 lanes, twice as many; an exclusive or of three is two. */
#define NARROW_ROUND                                                                               \
    "vpmuludq %%ymm14, %%ymm15, %%ymm\\r\n"                                                        \
    "vpsrlq $32, %%ymm14, %%ymm\\r\n"                                                              \
    "vpxor %%ymm14, %%ymm15, %%ymm\\r\n"                                                           \
    "vpxor %%ymm14, %%ymm15, %%ymm\\r\n"
#define NARROW_FLOATS                                                                              \
    "vmulps %%ymm14, %%ymm15, %%ymm\\r\n"                                                          \
    "vaddps %%ymm14, %%ymm15, %%ymm\\r\n"                                                          \
    "vpaddd %%ymm14, %%ymm15, %%ymm\\r\n"
#define NARROW_REST                                                                                \
    "vmulps %%ymm14, %%ymm15, %%ymm\\r\n"                                                          \
    "vpslld $2, %%ymm14, %%ymm\\r\n"

static void narrow_quarter(void)
{
    __asm__ volatile(".irp r,0,1,2,3,4,5,6,7,8,9\n" NARROW_ROUND ".endr\n"
                     ".irp r,0,1,2,3,4,5,6,7,8,9\n" NARROW_ROUND ".endr\n"
                     ".irp r,0,1,2,3,4,5,6,7\n" NARROW_FLOATS ".endr\n"
                     ".irp r,0,1,2,3,4,5,6,7\n" NARROW_FLOATS ".endr\n"
                     ".irp r,0,1,2,3,4,5,6,7\n" NARROW_REST ".endr\n"
                     "vsqrtps %%ymm14, %%ymm12\n"
                     ".irp r,0,1,2\n"
                     "vcvtdq2ps %%ymm14, %%ymm\\r\n"
                     ".endr\n" ::
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
        for (uint64_t i = 0; i < blocks; i++)
            wide_block();
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

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
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
    qsort(speeds, (size_t)repetition_count, sizeof(*speeds), compare);
    qsort(bounds, (size_t)repetition_count, sizeof(*bounds), compare);
    qsort(fractions, (size_t)repetition_count, sizeof(*fractions), compare);
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
    int repetition_count = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 9;
    const struct lh_zo_kernel *kernels;
    int kernel_count = lh_zo_kernels(&kernels);
    if (repetition_count < 1 || repetition_count > REPETITION_COUNT_MAX) {
        fprintf(stderr, "bench_rng [repetitions, 1 to %d]\n", REPETITION_COUNT_MAX);
        return 1;
    }
    /* The definition goes one counter at a time; its speed says nothing. */
    for (int i = 0; i < kernel_count - 1; i++)
        kernel_bench(&kernels[i], repetition_count);
    return 0;
}
