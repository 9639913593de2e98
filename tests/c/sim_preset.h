/*
 * Machines and models for timing steps.
 *
 *      papers     the machine of LoHan's evaluation: 12 SSDs of 6.5 GB/s read and 3.4 GB/s write,
 *                 28 GB/s together, AdamW at 1.1e9 parameters/s, a GPU that sustains 155 TFLOP/s.
 *                 Latencies are those of a data-centre NVMe drive: 80 us, a flush 200 us. The GPU
 *                 has PCIe of 21 GB/s each way, 10 us a copy, and 4 GB of its 24 for parameters;
 *                 the rest is for activations and computation.
 *      balanced   one SSD and 40 equal blocks, with balanced times: backward computes as long as
 *                 its traffic takes, twice as long as AdamW, and twice as long as forward.
 *
 *      ssd-bound  the same blocks with an SSD that moves all bytes of a step in less time than the
 *                 step computes, but those of backward in more time than backward computes.
 *
 * The work of a transformer block in forward is 2 FLOP per parameter and token, plus 4 * sequence *
 * hidden per token for attention. Backward is three times that, because it recomputes forward.
 *
 * The training thread waits for a copy to complete and then computes (dev.h, not ordered).
 *
 * Thread: one.
 * Source: LoHan V-A (the machine), LoHan eq. 5 (backward's FLOP).
 */
#ifndef LH_TEST_SIM_PRESET_H
#define LH_TEST_SIM_PRESET_H

#include "sim/run.h"

enum lh_sim_preset {
    LH_SIM_PRESET_PAPERS_13B = 0, /* 40 blocks of 5120, batch 32 of 1024 tokens */
    LH_SIM_PRESET_BALANCED,
    LH_SIM_PRESET_SSD_BOUND,
};
#define LH_SIM_PRESET_COUNT 3
/* Saved tensors that a caller may add to a preset's model. */
#define LH_SIM_PRESET_SAVED_COUNT_MAX 1024

/* "papers-13b", "balanced", "ssd-bound" */
const char *lh_sim_preset_name(enum lh_sim_preset preset);
/*
 * Make the preset's machine, model and options. The caller sets schedule and commits.
 *
 * Owns:   *model owns its tables; release with lh_sim_model_deinit(), after the run.
 * Errors: -ENOMEM.
 */
int lh_sim_preset_make(enum lh_sim_preset preset, struct lh_alloc *alloc,
                       struct lh_sim_model *model, struct lh_sim_run_opts *opts_out,
                       struct lh_error *err) LH_MUST_CHECK;

#endif
