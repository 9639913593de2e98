/* Saved tensors: the engine's side (saved.c). Private to csrc/sched. */
#ifndef LH_SCHED_SAVED_PRIVATE_H
#define LH_SCHED_SAVED_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/range.h"
#include "sched/feature.h"
#include "sched/saved.h"
#include "sched/states.h"
#include "sched/transfer.h"

/* The maximum number of jobs for saved tensors that the workers have at a time. */
#define LH_SAVED_JOB_COUNT 8

/* Where the bytes of a fetched tensor are, as its reader sees it. */
enum lh_saved_presence {
    LH_SAVED_PRESENCE_NONE = 0,
    LH_SAVED_PRESENCE_HERE,  /* the bytes are available, but may be evicted again */
    LH_SAVED_PRESENCE_TAKEN, /* the waiting thread uses the bytes: they are not evicted */
};

/*
 *      FREE -> QUEUED          asked             put
 *      QUEUED -> COPYING       put_start         there is room; from the accelerator
 *      QUEUED -> SUMMING       put_start         there is room; a worker copies it
 *      COPYING -> SUMMING      copied_out        it goes to SSD: a worker makes its checksums
 *      COPYING -> HELD         held              it stays in memory
 *      SUMMING -> HELD         held
 *      HELD -> WRITING         transfer_start    no thread has asked for it yet
 *      WRITING -> HELD         transferred
 *      HELD -> AWAY            settle            it is written, and its memory is given back
 *      HELD -> AWAY            room_take_back    it was fetched ahead, and another one is awaited
 *      AWAY -> READING         transfer_start    a thread has asked for it, and there is room
 *      READING -> HELD         held
 *      HELD -> FREE            gone              dropped
 *      AWAY -> FREE            gone              dropped
 */
struct lh_saved {
    struct lh_engine *engine;
    enum lh_saved_state state;
    enum lh_saved_tier tier;
    uint64_t bytes;
    uint64_t step;       /* the step whose forward put the tensor */
    uint64_t offset;     /* the tensor's place in memory; LH_RANGE_NONE: it has none */
    uint64_t ssd_offset; /* the tensor's place on SSD; LH_RANGE_NONE: it has none */
    const void *pointer;
    void *target;
    bool stays; /* the tensor is in the part of memory for tensors that stay */
    bool is_written;
    bool is_wanted;
    bool is_awaited;  /* a thread waits for the tensor */
    bool is_arriving; /* the tensor's transfer to the target has begun */
    bool is_returned; /* the tensor's transfer to the target has ended */
    bool is_dropped;
    uint64_t want_order;
    uint32_t next;  /* the next item of the queue that contains this item */
    bool has_asked; /* the waiting thread has posted its request; owned by that thread */
    _Atomic bool is_taken;
    _Atomic uint32_t presence; /* enum lh_saved_presence */
    struct lh_dev_fence *computed;
    struct lh_dev_fence *arrived;
    struct lh_transfer transfer;
    struct lh_job job;
};

/* A FIFO of items, linked by index. */
struct lh_saved_queue {
    uint32_t first;
    uint32_t last;
};

struct lh_saved_area {
    struct lh_source source;
    struct lh_saved *items;
    struct lh_range transit; /* memory for tensors in transit: the first part of the memory */
    struct lh_range staying; /* memory for tensors that stay: the rest of the memory */
    struct lh_range ssd;
    struct lh_saved_queue puts;     /* QUEUED items */
    struct lh_saved_queue ready;    /* items that have room in memory and wait for a job */
    struct lh_saved_queue wants;    /* AWAY items that wait for room in memory */
    struct lh_saved_queue arrivals; /* items in memory that wait for a copy to the target */
    uint32_t job_count;
    uint64_t want_count;
    _Atomic uint64_t put_bytes; /* the total size of the items put and not yet taken */
    pthread_mutex_t mutex;      /* protects `free`, from which other threads take items */
    struct lh_saved_queue free;
    bool has_mutex;
};

void lh_saved_push(struct lh_engine *engine, struct lh_saved_queue *queue, uint32_t item);
struct lh_saved *lh_saved_pop(struct lh_engine *engine, struct lh_saved_queue *queue);
uint8_t *lh_saved_memory(const struct lh_saved *saved);
extern const struct lh_feature lh_saved_feature;

int lh_saved_create(struct lh_engine *engine, struct lh_error *err);
void lh_saved_destroy(struct lh_engine *engine);

#endif
