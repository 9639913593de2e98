/*
 * The length of a zeroth-order step whose blocks pass through an accelerator, simulated event by
 * event on three streams.
 *
 *      upload     |U1|U2|U3|U4|..                 |U1|
 *      compute    |embedding|C1|C2|C3|..|Cn|head  |embedding|C1|
 *      offload                 |O1|O2|..      |On|
 *
 * Ci is everything that block i computes while it is on the device: both forwards, the
 * perturbations to either side and back, and the update by the last step's losses. Each stream does
 * one thing at a time, in order:
 *
 *      Ci follows Ui, and Oi follows Ci;
 *      an upload follows the offload that frees its slot: slots are used in turn;
 *      a step's first upload follows the losses of the previous step, for which the training thread
 *      waits, except with looks_ahead;
 *      there are no other dependencies.
 *
 * A schedule may lack these features; then:
 *
 *      has_overlap     one stream: U1, C1, O1, U2, ...
 *      has_reuse       each upload first allocates its slot, for which the device comes to a
 *                      standstill: everything launched must finish, and nothing runs meanwhile
 *      has_deferral    the update is a separate pass after the losses, in which each block is
 *                      uploaded, updated and offloaded once more
 *
 * Times are integers, in nanoseconds, and the result is exact: steps are run from a standstill
 * until their timing repeats; the result is the mean of as many steps as there are slots, rounded
 * up.
 *
 * Pure; includes base only.
 * Source: ZO2 alg. 3, ZO2 5.2-5.4.
 */
#ifndef LH_PLAN_ZEROTH_H
#define LH_PLAN_ZEROTH_H

#include "base/error.h"

#define LH_PLAN_ZEROTH_BLOCK_COUNT_MAX 4096
#define LH_PLAN_ZEROTH_SLOT_COUNT_MAX 16
/* The maximum of each time: about 18 minutes. */
#define LH_PLAN_ZEROTH_NS_MAX (UINT64_C(1) << 40)

enum lh_plan_zeroth_stream {
    LH_PLAN_ZEROTH_UPLOAD = 0,
    LH_PLAN_ZEROTH_COMPUTE,
    LH_PLAN_ZEROTH_OFFLOAD,
};
#define LH_PLAN_ZEROTH_STREAM_COUNT 3

struct lh_plan_zeroth_block {
    uint64_t upload_ns;
    uint64_t compute_ns; /* the time of computation, without the update */
    uint64_t update_ns;
    uint64_t offload_ns;
    uint64_t alloc_ns; /* the time to allocate and free a slot; used without has_reuse */
};

struct lh_plan_zeroth {
    const struct lh_plan_zeroth_block *blocks; /* borrowed */
    uint32_t block_count;                      /* 0: everything stays on the device */
    uint32_t slot_count;   /* the number of blocks that the device has room for */
    uint64_t embedding_ns; /* the time of the layers before the blocks, which stay on the device */
    uint64_t head_ns;      /* the time of the layers after the blocks, which stay on the device */
    bool has_overlap;
    bool has_reuse;
    bool has_deferral;
    bool looks_ahead;
};

/* A step in the steady state. */
struct lh_plan_zeroth_step {
    uint64_t step_ns;
    uint64_t busy_ns[LH_PLAN_ZEROTH_STREAM_COUNT];
    uint64_t alloc_ns; /* the time in which all streams stand still while slots are allocated */
    enum lh_plan_zeroth_stream bound_by;
};

/*
 * Check the input.
 *
 * Errors: -EINVAL (a count or a time is out of range; the message has the limits).
 */
int lh_plan_zeroth_check(const struct lh_plan_zeroth *zeroth, struct lh_error *err) LH_MUST_CHECK;
/* The steady-state step of input that passed the check. */
struct lh_plan_zeroth_step lh_plan_zeroth_step(const struct lh_plan_zeroth *zeroth);

#endif
