/*
 * What a commit contains beside parameters and states: step counts and the caller's bytes. Private
 * to csrc/sched; engine.h has the other functions of scalars.c.
 */
#ifndef LH_SCHED_SCALARS_H
#define LH_SCHED_SCALARS_H

#include <stdint.h>

/* Write the header of a commit's scalars. Returns where the step counts are, which follow it. */
void *lh_scalars_begin(uint8_t *scalars, uint32_t param_count, uint64_t caller_bytes);

#endif
