/*
 * An accelerator for the engine's tests: computation that the training thread only enqueues. Units
 * are read, and gradients written, when the stream reaches them; before that, and as soon as the
 * engine has released a gradient, its memory holds garbage. So a missing fence or wait shows as a
 * wrong byte.
 */
#ifndef LH_TEST_RIG_DEVICE_H
#define LH_TEST_RIG_DEVICE_H

#include "engine_fixture.h"

struct machine;
struct rig_device;

struct rig_copies_out {
    uint32_t count;
    uint32_t wait_count;
};

/*
 * Open an accelerator that wakes rig's engine. kind: as in dev_fixture.h; a manual rig
 * has that of rig_inline.h instead.
 */
struct rig_device *rig_device_open(struct rig *rig, const char *kind, uint64_t bytes);
/* Pass the stream to the engine, after it was created or recreated. */
void rig_device_begin(struct rig *rig);
void rig_device_opts(struct rig *rig, struct lh_engine_opts *opts);
/* Enqueue a read of a pinned unit; rig_device_check() compares it with the current *expected. */
void rig_device_read(struct rig *rig, uint32_t unit, const void *expected);
/* Enqueue the computation of a gradient from rig->gradients; returns its future address. */
void *rig_device_gradient(struct rig *rig, uint32_t param);
/* Wait for all enqueued work, and check that every read saw the right bytes. */
void rig_device_check(struct rig *rig);
/* Wait for all enqueued work. */
void rig_device_drain(struct rig *rig);
struct machine *rig_device_machine(struct rig *rig);
/* From now on, count the copies out of the accelerator, and those that wait for a fence. */
const struct rig_copies_out *rig_device_count(struct rig *rig);
/* Check and free everything, after the engine was destroyed. */
void rig_device_close(struct rig *rig);

#endif
