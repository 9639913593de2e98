/* What the tests of AdamW's stored moments share. */
#ifndef ADAM_STATES_FIXTURE_H
#define ADAM_STATES_FIXTURE_H

#include "compute/adam.h"
#include "lh_test.h"

#define BLOCK LH_ADAM_STATES_BLOCK
#define GUARD 64

static const struct lh_adam_random random_bits = {0x123456789ABCDEF, 7, 5};
static const enum lh_adam_states formats[] = {LH_ADAM_STATES_BF16, LH_ADAM_STATES_8BIT,
                                              LH_ADAM_STATES_4BIT};

static const struct lh_adam_kernel *kernel_ref(void)
{
    const struct lh_adam_kernel *kernels;
    int count = lh_adam_kernels(&kernels);

    LH_CHECK(strcmp(kernels[count - 1].name, "ref") == 0);
    return kernels + count - 1;
}

static void *bytes_create(uint64_t bytes)
{
    void *memory = aligned_alloc(64, lh_align_up(bytes + 2 * GUARD, 64));

    LH_CHECK(memory != NULL);
    memset(memory, 0, lh_align_up(bytes + 2 * GUARD, 64));
    return memory;
}

/* Encode a copy of the values: encoding overwrites them. */
static void encode(const struct lh_adam_kernel *kernel, const struct lh_adam_moments *target,
                   const float *moment1, const float *moment2, uint64_t first, uint64_t count)
{
    float *copy1 = bytes_create(count * 4), *copy2 = bytes_create(count * 4);

    memcpy(copy1, moment1, count * 4);
    memcpy(copy2, moment2, count * 4);
    lh_adam_states_root(target->states, copy2, count);
    lh_adam_states_encode(kernel->states, target, copy1, copy2, first, count, &random_bits);
    free(copy1);
    free(copy2);
}

#endif
