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
/* An array of n bytes per element has n words for this many elements. */
#define STEP_ELEMENTS WORD_BYTES
/* The prefetch distance of the kernels. */
#define PREFETCH_BYTES 2048

static inline __attribute__((always_inline)) void word_read(const char *address, word *sum)
{
    word value;

    __builtin_prefetch(address + PREFETCH_BYTES);
    memcpy(&value, address, WORD_BYTES);
    *sum += value;
}

/* Read and write the words of the elements from i on. */
static inline __attribute__((always_inline)) void array_touch(void *array, uint64_t i,
                                                              uint64_t element_bytes)
{
    for (uint64_t w = 0; w < element_bytes; w++) {
        char *address = (char *)array + i * element_bytes + w * WORD_BYTES;
        word value = {1, 1, 1, 1, 1, 1, 1, 1};

        word_read(address, &value);
        memcpy(address, &value, WORD_BYTES);
    }
}

uint64_t lh_adam_stream(const struct lh_adam_run *run, const struct lh_adam_moments *stored)
{
    const uint64_t param_bytes = lh_dtype_bytes(run->param_dtype);
    const uint64_t residual_bytes = lh_adam_residual_bytes(run->param_dtype);
    const uint64_t gradient_bytes = lh_dtype_bytes(run->gradient_dtype);
    const struct lh_adam_moments in_fp32 = {LH_ADAM_STATES_F32, run->moment1, run->moment2, NULL};
    const struct lh_adam_moments moments = stored ? *stored : in_fp32;
    const uint64_t moment_bytes = lh_adam_moment_bytes(moments.states);
    word sum = {0};

    LH_ASSERT((run->residual != NULL) == (residual_bytes > 0));
    for (uint64_t i = 0; i + STEP_ELEMENTS <= run->count; i += STEP_ELEMENTS) {
        for (uint64_t w = 0; w < gradient_bytes; w++)
            word_read((const char *)run->gradient + i * gradient_bytes + w * WORD_BYTES, &sum);
        array_touch(run->param, i, param_bytes);
        array_touch(run->residual, i, residual_bytes);
        array_touch(moments.moment1, i, moments.moment1 ? moment_bytes : 0);
        array_touch(moments.moment2, i, moments.moment2 ? moment_bytes : 0);
    }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}
