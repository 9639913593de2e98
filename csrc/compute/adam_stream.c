/*
 * The memory traffic of an update without its arithmetic: the same bytes are read and written, in
 * the same order and in place.
 */
#include <string.h>

#include "base/assert.h"
#include "compute/adam.h"

/* A word of 64 bytes; the compiler splits it into the target's registers. */
typedef uint64_t word __attribute__((vector_size(64)));

#define WORD_BYTES sizeof(word)
/* Arrays of 4-byte elements have two words for these, and of 2-byte elements one. */
#define STEP_ELEMENTS (WORD_BYTES / 2)
/* The prefetch distance of the kernels. */
#define PREFETCH_BYTES 2048

static inline __attribute__((always_inline)) void word_read(const char *address, word *sum)
{
    word value;

    __builtin_prefetch(address + PREFETCH_BYTES);
    memcpy(&value, address, WORD_BYTES);
    *sum += value;
}

/* Read and write words, whose number is a constant. */
static inline __attribute__((always_inline)) void words_touch(char *address, const uint64_t count)
{
#pragma GCC unroll 2
    for (uint64_t w = 0; w < count; w++) {
        word value = {1, 1, 1, 1, 1, 1, 1, 1};

        word_read(address + w * WORD_BYTES, &value);
        memcpy(address + w * WORD_BYTES, &value, WORD_BYTES);
    }
}

/* Read and write the words from element i on. The array is absent if elements have 0 bytes. */
static inline __attribute__((always_inline)) void array_touch(void *array, uint64_t i,
                                                              uint64_t element_bytes)
{
    char *address = (char *)array + i * element_bytes;

    if (element_bytes == 4)
        words_touch(address, 2);
    else if (element_bytes == 2 || (element_bytes == 1 && i % WORD_BYTES == 0))
        words_touch(address, 1);
}

/* Inlined for constants but those of moments. */
static inline __attribute__((always_inline)) uint64_t body(const struct lh_adam_run *run,
                                                           const struct lh_adam_moments *moments,
                                                           const uint64_t param_bytes,
                                                           const uint64_t residual_bytes,
                                                           const uint64_t gradient_bytes)
{
    const uint64_t moment1_bytes = moments->moment1 ? lh_adam_moment1_bytes(moments->states) : 0;
    const uint64_t moment2_bytes = moments->moment2 ? lh_adam_moment2_bytes(moments->states) : 0;
    char *const moment1 = moments->moment1, *const moment2 = moments->moment2;
    char *const param = run->param, *const residual = run->residual;
    const char *const gradient = run->gradient;
    const uint64_t count = run->count / WORD_BYTES * WORD_BYTES;
    word sum = {0};

    for (uint64_t i = 0; i < count; i += STEP_ELEMENTS) {
#pragma GCC unroll 2
        for (uint64_t w = 0; w < gradient_bytes / 2; w++)
            word_read(gradient + i * gradient_bytes + w * WORD_BYTES, &sum);
        array_touch(param, i, param_bytes);
        array_touch(residual, i, residual_bytes);
        array_touch(moment1, i, moment1_bytes);
        array_touch(moment2, i, moment2_bytes);
    }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

uint64_t lh_adam_stream(const struct lh_adam_run *run, const struct lh_adam_moments *stored)
{
    const struct lh_adam_moments in_fp32 = {LH_ADAM_STATES_F32, run->moment1, run->moment2, NULL};
    const struct lh_adam_moments *moments = stored ? stored : &in_fp32;
    const bool is_narrow = lh_dtype_bytes(run->gradient_dtype) == 2;

    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));
    switch (run->param_dtype) {
    case LH_DTYPE_BF16:
        return is_narrow ? body(run, moments, 2, 2, 2) : body(run, moments, 2, 2, 4);
    case LH_DTYPE_F16:
        return is_narrow ? body(run, moments, 2, 4, 2) : body(run, moments, 2, 4, 4);
    default:
        return is_narrow ? body(run, moments, 4, 0, 2) : body(run, moments, 4, 0, 4);
    }
}
