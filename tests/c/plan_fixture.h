/* Shared by the tests of csrc/plan: machines and models. */
#ifndef LH_TESTS_PLAN_FIXTURE_H
#define LH_TESTS_PLAN_FIXTURE_H

#include "plan/machine.h"
#include "plan/model.h"

/* Units in which small models are measured: a machine of theirs has host and GPU of some MiB. */
#define PLAN_FIXTURE_UNIT LH_MIB

struct plan_fixture_shape {
    uint32_t block_count;
    uint32_t block_layer_count; /* the last of them is inter-block */
};

/*
 * Random by seed: layers alike in every block, or not (is_uneven). Owns its tables; release with
 * lh_plan_model_deinit().
 */
struct lh_plan_model plan_fixture_model(struct plan_fixture_shape shape, bool is_uneven,
                                        uint64_t *seed, struct lh_alloc *alloc);
/*
 * Random by seed, so that any of GPU, link and SSDs may bound a step of model, and memory beyond
 * what buffers need takes from nothing to everything.
 */
struct lh_plan_machine plan_fixture_machine(const struct lh_plan_model *model, uint64_t *seed);

#endif
