/*
 * How long a zeroth-order step takes whose blocks pass through an accelerator: on three streams,
 * event by event.
 *
 *      upload     |U1|U2|U3|U4|..                 |U1|
 *      compute    |embedding|C1|C2|C3|..|Cn|head  |embedding|C1|
 *      offload                 |O1|O2|..      |On|
 *
 * Ci is all that block i computes while it is there: both forwards, its moves to either side and
 * back, and the update by the last step's losses. Each stream does one thing at a time, in order:
 *
 *      Ci comes behind Ui, and Oi behind Ci;
 *      an upload comes behind the offload that leaves its slot: slots are taken in turn;
 *      a step's first upload comes behind the losses of the step before, for which the training
 *      thread waits; with looks_ahead it does not;
 *      nothing else waits for anything.
 *
 * What a schedule may do without:
 *
 *      has_overlap     one stream: U1, C1, O1, U2, ...
 *      has_reuse       each upload allocates its slot first, for which the device comes to a
 *                      standstill: all that was launched is over, and nothing runs meanwhile
 *      has_deferral    the update is a pass of its own behind the losses, in which each block is
 *                      uploaded, updated and offloaded once more
 *
 * Times are integers of nanoseconds, and what comes out is exact: steps from a standstill until
 * they repeat, then the mean of as many as there are slots, rounded up.
 *
 * Pure; includes base only.
 * Source: ZO2 alg. 3, ZO2 5.2-5.4.
 */
#ifndef LH_PLAN_ZEROTH_H
#define LH_PLAN_ZEROTH_H

#include "base/error.h"

#define LH_PLAN_ZEROTH_BLOCK_COUNT_MAX 4096
#define LH_PLAN_ZEROTH_SLOT_COUNT_MAX 16
/* Of each time: some minutes. */
#define LH_PLAN_ZEROTH_NS_MAX (UINT64_C(1) << 40)

enum lh_plan_zeroth_stream {
    LH_PLAN_ZEROTH_UPLOAD = 0,
    LH_PLAN_ZEROTH_COMPUTE,
    LH_PLAN_ZEROTH_OFFLOAD,
};
#define LH_PLAN_ZEROTH_STREAM_COUNT 3

struct lh_plan_zeroth_block {
    uint64_t upload_ns;
    uint64_t compute_ns; /* without the update */
    uint64_t update_ns;
    uint64_t offload_ns;
    uint64_t alloc_ns; /* of a slot, and giving it back; looked at without has_reuse */
};

struct lh_plan_zeroth {
    const struct lh_plan_zeroth_block *blocks; /* borrowed */
    uint32_t block_count;                      /* 0: all stays on the device */
    uint32_t slot_count;                       /* blocks that the device has room for */
    uint64_t embedding_ns;                     /* what stays on the device, ahead of the blocks */
    uint64_t head_ns;                          /* and behind them */
    bool has_overlap;
    bool has_reuse;
    bool has_deferral;
    bool looks_ahead;
};

/* Of a settled step. */
struct lh_plan_zeroth_step {
    uint64_t step_ns;
    uint64_t busy_ns[LH_PLAN_ZEROTH_STREAM_COUNT];
    uint64_t alloc_ns; /* standing still, allocating */
    enum lh_plan_zeroth_stream bound_by;
};

/*
 * Errors: -EINVAL (a count or a time out of range: named with its limits).
 */
int lh_plan_zeroth_check(const struct lh_plan_zeroth *zeroth, struct lh_error *err) LH_MUST_CHECK;
/* Of what passed the check. */
struct lh_plan_zeroth_step lh_plan_zeroth_step(const struct lh_plan_zeroth *zeroth);

#endif
