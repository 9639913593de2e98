/*
 * The arrays of a rig's units, and the same training in memory, by the definition of the rule: what
 * the engine's tests compare with.
 */
#ifndef LH_TEST_RIG_REFERENCE_H
#define LH_TEST_RIG_REFERENCE_H

#include "engine_fixture.h"

enum rig_array {
    RIG_ARRAY_PARAM,
    RIG_ARRAY_RESIDUAL,
    RIG_ARRAY_MOMENT1,
    RIG_ARRAY_MOMENT2,
    RIG_ARRAY_COUNT
};

/* The size of a unit's array; 0: the unit has no such array. */
uint64_t rig_array_bytes(const struct lh_engine_unit *unit, enum rig_array array);
uint32_t rig_array_extent(const struct lh_engine_unit *unit, enum rig_array array);
/* Where a unit's array is in a copy of all arrays, such as rig->state. */
uint8_t *rig_array_at(const struct rig *rig, uint8_t *state, uint32_t unit, enum rig_array array);
/* Fill the masters with random values, and the moments with zeros. */
void rig_reference_init(struct rig *rig);
/* Update a parameter by its gradient. A given unit gets the gradient as its new value. */
void rig_reference_update(struct rig *rig, uint32_t index);

#endif
