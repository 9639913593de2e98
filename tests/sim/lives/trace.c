#include "lives/trace.h"

#include "base/assert.h"

#define FNV_OFFSET UINT64_C(0xCBF29CE484222325)
#define FNV_PRIME UINT64_C(0x100000001B3)

void lh_sim_trace_init(struct lh_sim_trace *trace, uint64_t bytes_max, struct lh_alloc *alloc)
{
    *trace = (struct lh_sim_trace){
        .bytes_max = bytes_max / LH_SIM_TRACE_RECORD_BYTES * LH_SIM_TRACE_RECORD_BYTES,
        .hash = FNV_OFFSET,
    };
    if (trace->bytes_max > 0)
        trace->records = lh_alloc_zeroed(alloc, 1, trace->bytes_max);
    LH_ASSERT(trace->bytes_max == 0 || trace->records != NULL);
}

void lh_sim_trace_deinit(struct lh_sim_trace *trace, struct lh_alloc *alloc)
{
    lh_free(alloc, trace->records);
    *trace = (struct lh_sim_trace){0};
}

void lh_sim_trace_add(struct lh_sim_trace *trace, uint64_t now_ns, enum lh_sim_trace_kind kind,
                      uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t words[] = {now_ns, kind, a, b, c};
    _Static_assert(sizeof(words) == LH_SIM_TRACE_RECORD_BYTES, "no padding");
    bool is_kept = trace->bytes + sizeof(words) <= trace->bytes_max;
    for (uint32_t i = 0; i < LH_SIM_TRACE_RECORD_BYTES; i++) {
        /* Little endian, on every machine. */
        uint8_t byte = (uint8_t)(words[i / 8] >> (i % 8 * 8));
        trace->hash = (trace->hash ^ byte) * FNV_PRIME;
        if (is_kept)
            trace->records[trace->bytes++] = byte;
    }
}
