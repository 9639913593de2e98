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
/* The prefetch distance of the kernels. */
#define PREFETCH_BYTES 2048

static inline __attribute__((always_inline)) void word_read(const char *address, word *sum)
{
    word value;

    __builtin_prefetch(address + PREFETCH_BYTES);
    memcpy(&value, address, WORD_BYTES);
    *sum += value;
}

static inline __attribute__((always_inline)) void word_touch(void *array, uint64_t offset_bytes)
{
    char *address = (char *)array + offset_bytes;
    word value = {1, 1, 1, 1, 1, 1, 1, 1};

    word_read(address, &value);
    memcpy(address, &value, WORD_BYTES);
}

static inline __attribute__((always_inline)) uint64_t body(const struct lh_adam_run *run,
                                                           const uint64_t param_bytes,
                                                           const uint64_t residual_bytes,
                                                           const uint64_t gradient_bytes)
{
    const uint64_t step_elements = WORD_BYTES / 2;
    word sum = {0};

    for (uint64_t i = 0; i + step_elements <= run->count; i += step_elements) {
        for (uint64_t w = 0; w < gradient_bytes / 2; w++)
            word_read((const char *)run->gradient + i * gradient_bytes + w * WORD_BYTES, &sum);
        for (uint64_t w = 0; w < param_bytes / 2; w++)
            word_touch(run->param, i * param_bytes + w * WORD_BYTES);
        for (uint64_t w = 0; w < residual_bytes / 2; w++)
            word_touch(run->residual, i * residual_bytes + w * WORD_BYTES);
        for (uint64_t w = 0; w < 2; w++) {
            word_touch(run->moment1, i * 4 + w * WORD_BYTES);
            word_touch(run->moment2, i * 4 + w * WORD_BYTES);
        }
    }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

uint64_t lh_adam_stream(const struct lh_adam_run *run)
{
    bool is_narrow = lh_dtype_bytes(run->gradient_dtype) == 2;

    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));
    switch (run->param_dtype) {
    case LH_DTYPE_BF16:
        return is_narrow ? body(run, 2, 2, 2) : body(run, 2, 2, 4);
    case LH_DTYPE_F16:
        return is_narrow ? body(run, 2, 4, 2) : body(run, 2, 4, 4);
    default:
        return is_narrow ? body(run, 4, 0, 2) : body(run, 4, 0, 4);
    }
}
