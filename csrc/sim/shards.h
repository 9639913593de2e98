/*
 * Shards: the model of one of several nodes among which the optimizer's states are divided equally.
 *
 *      unit of n elements  ->  own unit:   n / N of them, with states
 *                              given unit: the rest, whose new values the other nodes send
 *
 * Each node has another shard of a unit, but all shards have the same size (rounded up), and each
 * node uses its own shard before the rest. So all nodes have the same model, and this is it. Frozen
 * units are not divided.
 *
 * Thread: one.
 */
#ifndef LH_SIM_SHARDS_H
#define LH_SIM_SHARDS_H

#include "sim/model.h"

/*
 * Make the model of one of node_count nodes. With one node it has the same units, of one parameter
 * each, whose gradients are summed in fp32 (has_sums).
 *
 * Owns:   *model_out owns its tables; release with lh_sim_model_deinit(), also after an error.
 * Errors: -ENOMEM; -EINVAL: a block has too many units to be divided.
 */
int lh_sim_shards_make(const struct lh_sim_model *whole, uint32_t node_count,
                       struct lh_alloc *alloc, struct lh_sim_model *model_out, struct lh_error *err)
    LH_MUST_CHECK;

#endif
