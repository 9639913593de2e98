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

/* kind: "emu", or "fake" (dev_fixture.h). Wakes rig's engine. */
struct rig_device *rig_device_open(struct rig *rig, const char *kind, uint64_t bytes);
/* The engine is made (or made again): it is told of the stream. */
void rig_device_begin(struct rig *rig);
void rig_device_opts(struct rig *rig, struct lh_engine_opts *opts);
/* Enqueue a read of a pinned unit; rig_device_check compares it with what expected holds now. */
void rig_device_read(struct rig *rig, uint32_t unit, const void *expected);
/* Enqueue the making of a gradient from rig->gradients; where it will be. */
void *rig_device_gradient(struct rig *rig, uint32_t param);
/* All that was enqueued is executed, and every read saw the right bytes. */
void rig_device_check(struct rig *rig);
/* All that was enqueued is executed. */
void rig_device_drain(struct rig *rig);
struct machine *rig_device_machine(struct rig *rig);
/* The engine is gone. Checks, and frees. */
void rig_device_close(struct rig *rig);

#endif
