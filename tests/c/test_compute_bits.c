/*
 * Test that csrc/compute gives the same bits on every machine: the checksums of its results for
 * fixed input are compared with those from an x86-64 machine. Scalars are literals, because pow()
 * depends on the C library.
 */
#include "base/crc32c.h"
#include "compute/adam.h"
#include "compute/half.h"
#include "compute/norm.h"
#include "compute/sum.h"
#include "lh_test.h"

/* The count is not a multiple of any kernel's step. */
#define COUNT 20011

static const struct lh_adam_scalars scalars = {
    .gradient_scale = 0.75f,
    .beta1_rest = 0.1f,
    .beta2 = 0.999f,
    .beta2_rest = 0.001f,
    .bias2_sqrt_inverse = 18.25f,
    .eps = 1e-8f,
    .step_size = 1.25e-2f,
    .decay = 0.99997f,
    .beta1 = 0.9f,
    .coupled = 0.01f,
};

/* The values are as in training; one in eight has random bits, and one in eight is a denormal. */
static void fill(void *array, uint64_t seed, uint32_t mask)
{
    for (uint64_t i = 0; i < COUNT; i++) {
        uint64_t r = lh_test_random(&seed);
        uint32_t bits = (uint32_t)r;

        if (r >> 61 == 1)
            bits &= mask & 0x807FFFFF;
        else if (r >> 61 != 0)
            bits = (bits & mask & 0x83FFFFFF) + 0x3A000000;
        memcpy((char *)array + i * sizeof(bits), &bits, sizeof(bits));
    }
}

/* All differences are printed before the program ends, with the values that are expected. */
static int different_count;

static void golden_compare(const char *what, uint32_t crc, uint32_t golden)
{
    if (crc != golden)
        fprintf(stderr, "%s: 0x%08" PRIX32 ", not 0x%08" PRIX32 "\n", what, crc, golden);
    different_count += crc != golden;
}

/* Update the run as a chunk whose checksums are checked and made. */
static void chunk_update(const struct lh_adam_kernel *kernel, enum lh_rule rule,
                         const struct lh_adam_run *run)
{
    const uint64_t residual_bytes = COUNT * lh_adam_residual_bytes(run->param_dtype);
    const uint64_t param_bytes = COUNT * lh_dtype_bytes(run->param_dtype);
    const uint32_t residual_expected = lh_crc32c(0, run->residual, residual_bytes);
    const uint64_t moment1_bytes = run->moment1 ? COUNT * 4 : 0;
    const uint64_t moment2_bytes = run->moment2 ? COUNT * 4 : 0;
    const uint32_t moment1_expected = lh_crc32c(0, run->moment1, moment1_bytes);
    const uint32_t moment2_expected = lh_crc32c(0, run->moment2, moment2_bytes);
    const struct lh_adam_segment segment = {.count = COUNT,
                                            .gradient = run->gradient,
                                            .gradient_dtype = run->gradient_dtype,
                                            .scalars = scalars};
    uint32_t param = 0, residual = 0, moment1 = 0, moment2 = 0;
    struct lh_adam_chunk chunk = {.param = run->param,
                                  .residual = run->residual,
                                  .moment1 = run->moment1,
                                  .moment2 = run->moment2,
                                  .count = COUNT,
                                  .param_dtype = run->param_dtype,
                                  .rule = rule,
                                  .segments = &segment,
                                  .segment_count = 1,
                                  .residual_expected = &residual_expected,
                                  .moment1_expected = &moment1_expected,
                                  .moment2_expected = &moment2_expected,
                                  .param_checksums = &param,
                                  .residual_checksums = &residual,
                                  .moment1_checksums = &moment1,
                                  .moment2_checksums = &moment2};
    struct lh_adam_mismatch mismatch;

    LH_CHECK(lh_adam_chunk_update(kernel, &chunk, &mismatch) == 0);
    LH_CHECK(param == lh_crc32c(0, run->param, param_bytes));
    LH_CHECK(residual == lh_crc32c(0, run->residual, residual_bytes));
    LH_CHECK(moment1 == lh_crc32c(0, run->moment1, moment1_bytes));
    LH_CHECK(moment2 == lh_crc32c(0, run->moment2, moment2_bytes));
}

/* Run three steps: a plain one, and two that also compute checksums. */
static uint32_t update_crc(const struct lh_adam_kernel *kernel, enum lh_rule rule,
                           enum lh_dtype param, enum lh_dtype gradient)
{
    static float params[COUNT], residuals[COUNT], moment1[COUNT], moment2[COUNT];
    static float gradients[COUNT];
    uint64_t residual_bytes = lh_adam_residual_bytes(param);
    /* an element's kernel is given an estimate, or the update of its matrix */
    const bool is_given = lh_rules[rule].has_factors || lh_rules[rule].has_matrices;
    struct lh_adam_run run = {.param = params,
                              .residual = residual_bytes > 0 ? residuals : NULL,
                              .moment1 = lh_rules[rule].has_moment1 ? moment1 : NULL,
                              .moment2 = lh_rules[rule].has_moment2 || is_given ? moment2 : NULL,
                              .gradient = gradients,
                              .count = COUNT,
                              .param_dtype = param,
                              .gradient_dtype = gradient};
    uint32_t crc;

    fill(params, 1, UINT32_MAX);
    fill(residuals, 2, UINT32_MAX);
    fill(moment1, 3, UINT32_MAX);
    fill(moment2, 4, INT32_MAX);
    fill(gradients, 5, UINT32_MAX);
    kernel->run[rule](&run, &scalars);
    for (uint64_t seed = 6; seed < 8; seed++) {
        fill(gradients, seed, UINT32_MAX);
        /* an element's kernel is given the root of its row */
        if (is_given || lh_rules[rule].has_rows)
            kernel->run[rule](&run, &scalars);
        else
            chunk_update(kernel, rule, &run);
    }
    crc = lh_crc32c(0, params, COUNT * lh_dtype_bytes(param));
    crc = lh_crc32c(crc, residuals, COUNT * residual_bytes);
    crc = lh_crc32c(crc, moment1, sizeof(moment1));
    return lh_crc32c(crc, moment2, sizeof(moment2));
}

static void test_updates(void)
{
    static const uint32_t goldens[3][3] = {
        {0x5AB8315E, 0xE6DEFE24, 0xCAB8DEE3},
        {0xD5240A7E, 0xDDC54901, 0x11114FC0},
        {0xC185A40A, 0xD38293B1, 0x35AB3CF6},
    };
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    for (int k = 0; k < kernel_count; k++) {
        lh_test_name("kernel %s updates to the same bits on every machine", kernels[k].name);
        for (enum lh_dtype param = LH_DTYPE_F32; param <= LH_DTYPE_F16; param++)
            for (enum lh_dtype gradient = LH_DTYPE_F32; gradient <= LH_DTYPE_F16; gradient++) {
                char what[64];

                snprintf(what, sizeof(what), "param %d, gradient %d", (int)param, (int)gradient);
                golden_compare(what, update_crc(kernels + k, LH_RULE_ADAMW, param, gradient),
                               goldens[param][gradient]);
            }
    }
}

static void test_rules(void)
{
    static const uint32_t goldens[LH_RULE_COUNT] = {
        [LH_RULE_ADAM] = 0x012E209E,
        [LH_RULE_LION] = 0xDA7B0E51,
        [LH_RULE_SGD] = 0xFAF9A9B4,
        [LH_RULE_SGD_MOMENTUM] = 0x8CB6C2AC,
        [LH_RULE_ADAGRAD] = 0x3AF882BD,
        [LH_RULE_RMSPROP] = 0xC5DCA831,
        [LH_RULE_RMSPROP_MOMENTUM] = 0x3110151E,
        [LH_RULE_ADAM_MINI] = 0x2D8B637B,
        [LH_RULE_ADAFACTOR] = 0x6229019E,
        [LH_RULE_MUON] = 0x9DBCBE43,
    };
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    for (int k = 0; k < kernel_count; k++) {
        lh_test_name("kernel %s has the same bits under every rule", kernels[k].name);
        for (enum lh_rule rule = LH_RULE_ADAM; rule < LH_RULE_COUNT; rule++) {
            uint32_t crcs[3][3];

            for (enum lh_dtype param = LH_DTYPE_F32; param <= LH_DTYPE_F16; param++)
                for (enum lh_dtype gradient = LH_DTYPE_F32; gradient <= LH_DTYPE_F16; gradient++)
                    crcs[param][gradient] = update_crc(kernels + k, rule, param, gradient);
            golden_compare(lh_rules[rule].name, lh_crc32c(0, crcs, sizeof(crcs)), goldens[rule]);
        }
    }
}

static void test_halves(void)
{
    static uint32_t widened[1 << 16];
    static uint16_t rounded[1 << 20];

    lh_test_name("halves are widened and floats rounded to the same bits on every machine");
    for (uint32_t i = 0; i < LH_COUNT_OF(widened); i++)
        widened[i] = lh_half_widen((uint16_t)i);
    for (uint32_t i = 0; i < LH_COUNT_OF(rounded); i++)
        rounded[i] = lh_half_round(i * 4099);
    golden_compare("widened", lh_crc32c(0, widened, sizeof(widened)), 0x7AA322BA);
    golden_compare("rounded", lh_crc32c(0, rounded, sizeof(rounded)), 0x568EE83E);
}

static void test_split(void)
{
    static float masters[COUNT], joined[COUNT];
    static uint16_t params[COUNT];
    static int16_t residuals[COUNT];
    uint32_t crc;

    lh_test_name("masters are split and joined to the same bits on every machine");
    fill(masters, 11, UINT32_MAX);
    lh_adam_split(masters, params, residuals, COUNT);
    lh_adam_join(params, residuals, joined, COUNT);
    crc = lh_crc32c(lh_crc32c(0, params, sizeof(params)), residuals, sizeof(residuals));
    golden_compare("split", crc, 0x0E488332);
    golden_compare("joined", lh_crc32c(0, joined, sizeof(joined)), 0xC0DCA56B);
}

/* NaN is left out, because IEEE does not specify its payload. */
static void test_sums(void)
{
    static const uint32_t golden_norms[] = {0x9BCB532D, 0x8FC79259, 0xCB1FBEE1};
    static const uint32_t golden_sums[] = {0xC3D1EB35, 0x95ED895D, 0x39D1277E};
    static float values[COUNT];
    static float sums[COUNT];

    lh_test_name("norms and sums of gradients have the same bits on every machine");
    fill(values, 12, UINT32_MAX);
    for (uint64_t i = 0; i < COUNT; i++) {
        uint32_t bits;

        memcpy(&bits, values + i, sizeof(bits));
        bits &= 0xBFFFBFFF; /* the value is neither infinity nor NaN in any of the dtypes */
        memcpy(values + i, &bits, sizeof(bits));
    }
    for (enum lh_dtype dtype = LH_DTYPE_F32; dtype <= LH_DTYPE_F16; dtype++) {
        double norm = lh_norm_square_sum(values, dtype, COUNT);

        lh_sum_start(sums, values, dtype, COUNT);
        lh_sum_add(sums, (const char *)values + 4, dtype, COUNT - 1);
        golden_compare("norm", lh_crc32c(0, &norm, sizeof(norm)), golden_norms[dtype]);
        golden_compare("sum", lh_crc32c(0, sums, sizeof(sums)), golden_sums[dtype]);
    }
}

int main(void)
{
    test_updates();
    test_rules();
    test_halves();
    test_split();
    test_sums();
    lh_test_name("nothing differs from what an x86-64 machine wrote");
    LH_CHECK(different_count == 0);
    return 0;
}
