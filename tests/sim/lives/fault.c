#include "lives/fault.h"

#include "base/assert.h"

const char *lh_sim_fault_name(enum lh_sim_fault fault)
{
    static const char *const names[LH_SIM_FAULT_COUNT] = {
        [LH_SIM_FAULT_SPIKE] = "spike",
        [LH_SIM_FAULT_REORDER] = "reorder",
        [LH_SIM_FAULT_ERROR] = "error",
        [LH_SIM_FAULT_SPACE] = "space",
        [LH_SIM_FAULT_SHORT] = "short",
        [LH_SIM_FAULT_FLIP] = "flip",
        [LH_SIM_FAULT_MISDIRECT] = "misdirect",
        [LH_SIM_FAULT_DROP] = "drop",
        [LH_SIM_FAULT_LIE] = "lie",
        [LH_SIM_FAULT_LOST] = "lost",
        [LH_SIM_FAULT_STALE] = "stale",
        [LH_SIM_FAULT_HANG] = "hang",
        [LH_SIM_FAULT_DEAD] = "dead",
        [LH_SIM_FAULT_KILL] = "kill",
        [LH_SIM_FAULT_POWER] = "power",
        [LH_SIM_FAULT_TORN] = "torn",
        [LH_SIM_FAULT_BIT] = "bit",
        [LH_SIM_FAULT_ZEROS] = "zeros",
        [LH_SIM_FAULT_TRUNCATE] = "truncate",
        [LH_SIM_FAULT_OLD] = "old",
    };
    LH_ASSERT(fault < LH_SIM_FAULT_COUNT);
    return names[fault];
}

void lh_sim_fault_add(struct lh_sim_fault_log *log, enum lh_sim_fault fault, uint64_t file,
                      uint64_t offset, uint64_t detail)
{
    log->counts[fault]++;
    lh_sim_world_trace(log->world, LH_SIM_TRACE_FAULT, (uint64_t)fault << 32 | file, offset,
                       detail);
}

bool lh_sim_fault_had(const struct lh_sim_fault_log *log, uint64_t faults)
{
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++) {
        if ((faults & LH_SIM_FAULT_BIT_OF(i)) != 0 && log->counts[i] > 0)
            return true;
    }
    return false;
}

uint64_t lh_sim_fault_count(const struct lh_sim_fault_log *log)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++)
        count += log->counts[i];
    return count;
}
