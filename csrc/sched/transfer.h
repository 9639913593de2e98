/* Transfers: ranges of extents on their way (transfer.c). Private to csrc/sched. */
#ifndef LH_SCHED_TRANSFER_H
#define LH_SCHED_TRANSFER_H

#include "exec/exec.h"
#include "io/io.h"
#include "sched/engine.h"

struct lh_engine_request;
struct lh_saved;

enum lh_priority {
    LH_PRIORITY_DEMAND = 0, /* somebody waits */
    LH_PRIORITY_PREFETCH,
    LH_PRIORITY_STATE,
    LH_PRIORITY_WRITE,
    LH_PRIORITY_COUNT,
};

/* One range of an extent on its way; embedded in the unit or slab it serves. */
struct lh_transfer {
    struct lh_transfer *next;
    enum lh_io_kind kind;
    enum lh_priority priority;
    enum lh_engine_link link;
    uint32_t unit;
    uint32_t slab;          /* LH_CHUNK_NONE: a unit's load */
    struct lh_saved *saved; /* a saved tensor's; NULL: a unit's or slab's, in the engine's store */
    uint64_t step;          /* whose bytes these are; 0: no step's */
    uint32_t extent;
    uint32_t slot;
    uint64_t offset;
    uint64_t bytes;
    uint64_t issued_bytes;
    uint32_t outstanding; /* requests in flight or being checked */
    uint8_t *buffer;
};

struct lh_engine_request {
    struct lh_io_request io;
    struct lh_exec_job job; /* the check of what was read */
    struct lh_transfer *transfer;
    struct lh_engine *engine;
    uint64_t offset;     /* in the extent */
    uint64_t bad_offset; /* set by a failed check; UINT64_MAX: good */
    uint32_t crc_expected;
    uint32_t crc_actual;
    struct lh_engine_request *next_free;
};

/* Queue a transfer, which is its owner's until it is told that all of it is done. */
void lh_transfer_submit(struct lh_engine *engine, struct lh_transfer *transfer);
/* Somebody waits for it now. */
void lh_transfer_raise(struct lh_engine *engine, struct lh_transfer *transfer);
/* Issue what the queue depth allows; take back what is done. True: something moved. */
bool lh_transfer_pump(struct lh_engine *engine);
bool lh_transfer_poll(struct lh_engine *engine);

#endif
