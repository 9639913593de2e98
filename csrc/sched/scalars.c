#include "sched/scalars.h"

#include <string.h>

#include "sched/engine_private.h"

#define SCALARS_MAGIC UINT64_C(0x31534c4143534c48) /* "HLSCALS1" */

/* What a commit carries: this header, a step count a parameter, the caller's bytes. */
struct scalars_header {
    uint64_t magic;
    uint64_t param_count;
    uint64_t caller_bytes;
};

uint64_t lh_scalars_overhead_bytes(uint32_t param_count)
{
    return sizeof(struct scalars_header) + (uint64_t)param_count * sizeof(uint64_t);
}

const void *lh_scalars_find(const void *scalars, uint64_t scalar_bytes, uint64_t *bytes_out)
{
    struct scalars_header header;
    *bytes_out = 0;
    if (!scalars || scalar_bytes < sizeof(header))
        return NULL;
    memcpy(&header, scalars, sizeof(header));
    if (header.magic != SCALARS_MAGIC || header.param_count > UINT32_MAX)
        return NULL;
    uint64_t overhead = lh_scalars_overhead_bytes((uint32_t)header.param_count);
    if (header.caller_bytes > scalar_bytes || overhead != scalar_bytes - header.caller_bytes)
        return NULL;
    *bytes_out = header.caller_bytes;
    return (const uint8_t *)scalars + overhead;
}

void *lh_scalars_begin(uint8_t *scalars, uint32_t param_count, uint64_t caller_bytes)
{
    struct scalars_header header = {
        .magic = SCALARS_MAGIC, .param_count = param_count, .caller_bytes = caller_bytes};
    memcpy(scalars, &header, sizeof(header));
    return scalars + sizeof(header);
}

void lh_scalars_make(const uint64_t *param_steps, uint32_t param_count, const void *caller,
                     uint64_t caller_bytes, void *scalars_out)
{
    memcpy(lh_scalars_begin(scalars_out, param_count, caller_bytes), param_steps,
           param_count * sizeof(uint64_t));
    if (caller_bytes > 0)
        memcpy((uint8_t *)scalars_out + lh_scalars_overhead_bytes(param_count), caller,
               caller_bytes);
}

void lh_scalars_steps_clear(struct lh_engine *engine)
{
    LH_ASSERT(engine->shared.is_paused);
    memset(engine->param_steps, 0, engine->param_count * sizeof(*engine->param_steps));
}
