/*
 * Transfers: ranges of extents on their way between files and main memory. Private to csrc/sched.
 *
 * A transfer is cut into requests, which are issued by priority as far as the I/O depth allows, and
 * what is read is checked by a worker. It says itself where its bytes are (its source), and who is
 * told when all of them have moved.
 */
#ifndef LH_SCHED_TRANSFER_H
#define LH_SCHED_TRANSFER_H

#include "io/io.h"
#include "sched/engine.h"
#include "sched/job.h"

struct lh_engine;
struct lh_transfer;

enum lh_priority {
    LH_PRIORITY_DEMAND = 0, /* somebody waits */
    LH_PRIORITY_PREFETCH,
    LH_PRIORITY_STATE,
    LH_PRIORITY_WRITE,
    LH_PRIORITY_COUNT,
};

/* Files that transfers read and write, and how bytes lie in them. */
struct lh_source_ops {
    /* The pieces of files that hold the bytes from offset on, at most so many; a count above 0. */
    int (*map)(struct lh_engine *engine, const struct lh_transfer *transfer, uint64_t offset,
               uint64_t bytes, struct lh_store_piece *pieces);
    /* The checksums of what is read from offset on. Thread: a worker. */
    const uint32_t *(*checksums)(struct lh_engine *engine, const struct lh_transfer *transfer,
                                 uint64_t offset);
    const char *(*path)(const struct lh_engine *engine, uint32_t file);
    /* Before the first byte is written; NULL: such files are only read. */
    void (*write_queued)(struct lh_engine *engine, const struct lh_transfer *transfer);
    int (*write_begin)(struct lh_engine *engine, struct lh_error *err);
    /* (optional) How much of a piece there is where the file ends in it; 0: all. */
    uint64_t (*least_bytes)(const struct lh_engine *engine, const struct lh_store_piece *piece);
    /* (optional) Whether blocks move after they were read, and on a worker the moving itself. */
    bool (*moves)(const struct lh_engine *engine, const struct lh_transfer *transfer);
    void (*move)(const struct lh_engine *engine, const struct lh_transfer *transfer,
                 uint64_t request, uint64_t first, uint64_t bytes);
    /* (optional) All of a transfer was read. */
    void (*loaded)(struct lh_engine *engine, const struct lh_transfer *transfer);
    /* Appended to the message of a wrong checksum. */
    const char *advice;
    /* Its bytes are a unit's; else they are counted by who submits them, and traced as nobody's. */
    bool is_of_units;
};

struct lh_source {
    const struct lh_source_ops *ops;
    uint32_t file_first; /* where its files begin among io's */
};

/* One range of an extent on its way; a member of what it serves. */
struct lh_transfer {
    struct lh_transfer *next;
    const struct lh_source *source;
    void (*done)(struct lh_engine *engine, struct lh_transfer *transfer);
    enum lh_io_kind kind;
    enum lh_priority priority;
    enum lh_engine_link link;
    uint32_t unit;
    uint32_t slab;
    uint64_t step; /* whose bytes these are; 0: no step's */
    uint32_t extent;
    uint32_t slot;
    uint64_t offset;
    uint64_t bytes;
    uint64_t issued_bytes;
    uint32_t outstanding; /* requests in flight or being checked */
    uint8_t *buffer;
};

/* First in what an I/O request's owner points to. */
struct lh_io_owner {
    void (*done)(struct lh_engine *engine, struct lh_io_request *request);
};

struct lh_transfer_request {
    struct lh_io_owner owner;
    struct lh_io_request io;
    struct lh_job job; /* the check of what was read */
    struct lh_transfer *transfer;
    struct lh_engine *engine;
    uint64_t offset;     /* in the extent */
    uint64_t bad_offset; /* set by a failed check; UINT64_MAX: good */
    uint32_t crc_expected;
    uint32_t crc_actual;
    struct lh_transfer_request *next_free;
};

struct lh_transfer_queue {
    struct lh_transfer_request *requests;
    struct lh_transfer_request *free_requests;
    struct lh_transfer *heads[LH_PRIORITY_COUNT];
    struct lh_transfer *tails[LH_PRIORITY_COUNT];
    uint32_t step_counts[2]; /* submitted and not finished, by parity of their step */
    uint32_t in_flight;      /* requests, those of commits included */
    uint32_t checks_in_flight;
    uint64_t busy_since_ns;
    struct lh_source store; /* the engine's */
};

/* Four times io_depth requests: those in flight, and those being checked. */
int lh_transfer_create(struct lh_engine *engine, struct lh_error *err);
void lh_transfer_destroy(struct lh_engine *engine);
/* Queue a transfer, which is its owner's until it is told that all of it is done. */
void lh_transfer_submit(struct lh_engine *engine, struct lh_transfer *transfer);
/* Somebody waits for it now. */
void lh_transfer_raise(struct lh_engine *engine, struct lh_transfer *transfer);
/* Issue what the queue depth allows; take back what is done. True: something moved. */
bool lh_transfer_pump(struct lh_engine *engine);
bool lh_transfer_poll(struct lh_engine *engine);
/* The same for an engine that has failed: nobody is told. */
bool lh_transfer_drain(struct lh_engine *engine);
bool lh_transfer_is_idle(const struct lh_engine *engine);
/* A request that belongs to no transfer (a commit's) was given to io, or came back. */
void lh_transfer_busy_begin(struct lh_engine *engine);
void lh_transfer_busy_end(struct lh_engine *engine);
/* The time of requests in flight up to now is the step's that ends. */
void lh_transfer_step_over(struct lh_engine *engine, struct lh_engine_step_stats *stats);

#endif
