/*
 * The trace of a simulation: what its parts reported (sim/hooks.h), with times. Two runs are the
 * same if their traces are, byte for byte.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_TRACE_H
#define LH_TEST_SIM_TRACE_H

#include "sim/world.h"

#define LH_SIM_TRACE_RECORD_BYTES 40

struct lh_sim_trace {
    uint8_t *records; /* the first bytes_max bytes of the trace */
    uint64_t bytes;
    uint64_t bytes_max;
    uint64_t hash; /* FNV-1a of the whole trace */
};

/*
 * Initialize an empty trace. bytes_max limits how much of it is kept; the hash covers all records.
 *
 * Owns: *trace owns its records; release with lh_sim_trace_deinit().
 */
void lh_sim_trace_init(struct lh_sim_trace *trace, uint64_t bytes_max, struct lh_alloc *alloc);
void lh_sim_trace_deinit(struct lh_sim_trace *trace, struct lh_alloc *alloc);
void lh_sim_trace_add(struct lh_sim_trace *trace, uint64_t now_ns, enum lh_sim_trace_kind kind,
                      uint64_t a, uint64_t b, uint64_t c);

#endif
