/* Test the memory traffic of an update without its arithmetic (adam_stream.c). */
#include "compute/adam.h"
#include "lh_test.h"

#define COUNT 2048
#define LANES 8 /* words of 8 bytes in one of 64 */

static uint64_t memory[5][COUNT / 2];

/* Fill an array with different words, and return it. */
static void *filled(int array)
{
    for (uint64_t i = 0; i < COUNT / 2; i++)
        memory[array][i] = (i + 1) * 0x9E3779B97F4A7C15U + (uint64_t)array;
    return memory[array];
}

/* Check that the first bytes of an array were read and written once, and no byte after them. */
static void check_touched(int array, uint64_t bytes)
{
    for (uint64_t i = 0; i < COUNT / 2; i++) {
        uint64_t filled_with = (i + 1) * 0x9E3779B97F4A7C15U + (uint64_t)array;
        LH_CHECK(memory[array][i] == filled_with + (i < bytes / 8 ? 1 : 0));
    }
}

/* The sum over the gradient by its definition: lane by lane, then exclusive or. */
static uint64_t gradient_sum(uint64_t bytes)
{
    uint64_t lanes[LANES] = {0}, sum = 0;
    for (uint64_t i = 0; i < bytes / 8; i++)
        lanes[i % LANES] += memory[4][i];
    for (int i = 0; i < LANES; i++)
        sum ^= lanes[i];
    return sum;
}

static void test_touches(enum lh_dtype dtype, enum lh_dtype gradient_dtype, uint64_t count)
{
    lh_test_name("a stream of %d elements of dtype %d touches each byte of the arrays once and "
                 "reads the whole gradient, dtype %d",
                 (int)count, (int)dtype, (int)gradient_dtype);
    uint64_t residual_bytes = lh_adam_residual_bytes(dtype);
    struct lh_adam_run run = {
        .param = filled(0),
        .residual = residual_bytes > 0 ? filled(1) : NULL,
        .moment1 = filled(2),
        .moment2 = filled(3),
        .gradient = filled(4),
        .count = count,
        .param_dtype = dtype,
        .gradient_dtype = gradient_dtype,
    };
    uint64_t whole = count / 64 * 64; /* a rest that fills no word is not read */
    uint64_t sum = lh_adam_stream(&run, NULL);
    LH_CHECK(sum == gradient_sum(whole * lh_dtype_bytes(gradient_dtype)));
    check_touched(0, whole * lh_dtype_bytes(dtype));
    if (residual_bytes > 0)
        check_touched(1, whole * residual_bytes);
    check_touched(2, whole * sizeof(float));
    check_touched(3, whole * sizeof(float));
    check_touched(4, 0);
}

static void test_moments(enum lh_adam_states states, bool has_moment1, bool has_moment2)
{
    lh_test_name("a stream touches the moments that there are, format %d: %d, %d", (int)states,
                 has_moment1, has_moment2);
    struct lh_adam_run run = {.param = filled(0), .gradient = filled(4), .count = 128};
    struct lh_adam_moments moments = {.states = states};
    uint64_t bytes1 = run.count * lh_adam_moment1_bytes(states);
    uint64_t bytes2 = run.count * lh_adam_moment2_bytes(states);

    moments.moment1 = has_moment1 ? filled(2) : (filled(2), NULL);
    moments.moment2 = has_moment2 ? filled(3) : (filled(3), NULL);
    lh_adam_stream(&run, &moments);
    check_touched(0, run.count * sizeof(float));
    check_touched(2, has_moment1 ? bytes1 : 0);
    check_touched(3, has_moment2 ? bytes2 : 0);
}

int main(void)
{
    static const enum lh_dtype dtypes[] = {LH_DTYPE_F32, LH_DTYPE_BF16, LH_DTYPE_F16};
    for (size_t i = 0; i < LH_COUNT_OF(dtypes); i++) {
        for (size_t j = 0; j < LH_COUNT_OF(dtypes); j++) {
            test_touches(dtypes[i], dtypes[j], 64);
            test_touches(dtypes[i], dtypes[j], 1000 + 17);
        }
    }
    for (enum lh_adam_states states = LH_ADAM_STATES_F32; states < LH_ADAM_STATES_COUNT; states++)
        for (int has = 0; has < 4; has++)
            test_moments(states, has & 1, has & 2);
    return 0;
}
