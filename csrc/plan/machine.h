/*
 * The planner's description of a machine: rates and capacities, nothing else.
 *
 *      GPU <== link, duplex ==> main memory <== SSDs together, simplex ==> SSDs
 *
 * Rates are sustained rates, as measured by a profile or stated in a datasheet. An SSD either reads
 * or writes at any time; all SSDs together are no faster than the bus that they share.
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
    uint64_t host_bytes;           /* the part of main memory that may be used */
    uint64_t adam_params_per_s;    /* AdamW on the CPU, with states in main memory */
    uint64_t ssd_count;
    uint64_t ssd_bytes;             /* per SSD; 0: the capacity is not checked */
    uint64_t ssd_read_bytes_per_s;  /* per SSD */
    uint64_t ssd_write_bytes_per_s; /* per SSD */
    uint64_t ssd_total_bytes_per_s; /* all SSDs, either direction; 0: the sum over the SSDs */
};

/*
 * Check a machine.
 *
 * Errors: -EINVAL (a rate or capacity is 0 or above 2^60, or the number of SSDs is out of range;
 *         the message names the value).
 */
int lh_plan_machine_check(const struct lh_plan_machine *machine, struct lh_error *err)
    LH_MUST_CHECK;

/* BW_S2M and BW_M2S: the rates of all SSDs together. */
uint64_t lh_plan_machine_read_bytes_per_s(const struct lh_plan_machine *machine);
uint64_t lh_plan_machine_write_bytes_per_s(const struct lh_plan_machine *machine);

#endif
