/*
 * A machine as plans see it: rates and capacities, nothing else.
 *
 *      GPU <== link, duplex ==> main memory <== SSDs together, simplex ==> SSDs
 *
 * Rates are sustained ones, as a profile measures them or a datasheet states them. An SSD reads or
 * writes; all SSDs together are no faster than the bus that they share.
 *
 * Pure; includes base only.
 * Source: LoHan IV-B, Fuyou 4.2 (what a profile yields).
 */
#ifndef LH_PLAN_MACHINE_H
#define LH_PLAN_MACHINE_H

#include "base/error.h"

struct lh_plan_machine {
    uint64_t gpu_flop_per_s; /* THP_G */
    uint64_t gpu_bytes;
    uint64_t link_in_bytes_per_s;  /* BW_G, main memory to GPU */
    uint64_t link_out_bytes_per_s; /* BW_G, GPU to main memory */
    uint64_t host_bytes;           /* of main memory, what may be used */
    uint64_t adam_params_per_s;    /* AdamW on the CPU, on states in main memory */
    uint64_t ssd_count;
    uint64_t ssd_bytes;             /* of one; 0: its capacity is not looked at */
    uint64_t ssd_read_bytes_per_s;  /* of one */
    uint64_t ssd_write_bytes_per_s; /* of one */
    uint64_t ssd_total_bytes_per_s; /* of all together, either way; 0: the sum of each */
};

/* Errors: -EINVAL (a rate, a capacity or the number of SSDs is 0 or above 2^60: named). */
int lh_plan_machine_check(const struct lh_plan_machine *machine, struct lh_error *err)
    LH_MUST_CHECK;

/* BW_S2M and BW_M2S: of all SSDs together. */
uint64_t lh_plan_machine_read_bytes_per_s(const struct lh_plan_machine *machine);
uint64_t lh_plan_machine_write_bytes_per_s(const struct lh_plan_machine *machine);

#endif
