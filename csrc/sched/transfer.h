/*
 * Transfers: reads and writes of ranges of extents, between files and main memory. Private to
 * csrc/sched.
 *
 * A transfer is split into requests, which are issued by priority as far as the I/O depth allows;
 * a worker verifies what is read. A transfer names the source of its bytes and the function to call
 * when all of them have moved.
 */
#ifndef LH_SCHED_TRANSFER_H
#define LH_SCHED_TRANSFER_H

#include "io/io.h"
#include "sched/engine.h"
#include "sched/job.h"

struct lh_engine;
struct lh_transfer;

enum lh_priority {
    LH_PRIORITY_DEMAND = 0, /* a thread waits */
    LH_PRIORITY_PREFETCH,
    LH_PRIORITY_STATE,
    LH_PRIORITY_WRITE,
    LH_PRIORITY_COUNT,
};

struct lh_unit;

/*
 * Functions of a source: files that transfers read or write, and how extents are laid out in them.
 */
struct lh_source_ops {
    /*
     * Map a range that begins at offset, and has about `bytes` bytes, to pieces of files. Returns
     * the number of pieces, above 0.
     */
    int (*map)(struct lh_engine *engine, const struct lh_transfer *transfer, uint64_t offset,
               uint64_t bytes, struct lh_store_piece *pieces);
    /* The checksums that bytes read from offset on must have. Thread: a worker. */
    const uint32_t *(*checksums)(struct lh_engine *engine, const struct lh_transfer *transfer,
                                 uint64_t offset);
    /*
     * (optional) Bytes read from offset on, in a file of the source, have another checksum than
     * expected: whether that one was unknown, and is now recorded. Thread: a worker.
     */
    bool (*record)(struct lh_engine *engine, const struct lh_transfer *transfer, uint64_t offset,
                   uint32_t file, uint32_t checksum);
    const char *(*path)(const struct lh_engine *engine, const struct lh_transfer *transfer,
                        uint32_t file);
    /*
     * (optional) If the file ends inside a piece: the number of the piece's bytes that exist;
     * otherwise 0.
     */
    uint64_t (*least_bytes)(const struct lh_engine *engine, const struct lh_store_piece *piece);
    /*
     * (optional) Whether blocks must be moved after they are read; and the move itself, which runs
     * on a worker.
     */
    bool (*moves)(const struct lh_engine *engine, const struct lh_transfer *transfer);
    void (*move)(const struct lh_engine *engine, const struct lh_transfer *transfer,
                 uint64_t request, uint64_t first, uint64_t bytes);
    /* (optional) Where in a unit the load of its bytes begins; otherwise 0. */
    uint64_t (*load_first)(const struct lh_unit *unit);
    /* (optional) All of a transfer was read. */
    void (*loaded)(struct lh_engine *engine, const struct lh_transfer *transfer);
    /*
     * (optional) All of a LOADING unit was read, but its bytes must still be decoded: the source
     * does so with a job, and then calls lh_unit_arrived().
     */
    void (*complete)(struct lh_engine *engine, struct lh_unit *unit);
    /*
     * (optional) The source brings a LOADING unit into main memory by itself, without transfers,
     * and calls lh_unit_arrived(); and the engine does not need the unit's bytes any more.
     */
    void (*load)(struct lh_engine *engine, struct lh_unit *unit, uint64_t step);
    void (*evicted)(struct lh_engine *engine, struct lh_unit *unit);
    /* Appended to error messages about a wrong checksum. */
    const char *advice;
};

struct lh_source {
    const struct lh_source_ops *ops;
    struct lh_store *store; /* the store that the files belong to; NULL: they are only read */
    /* The bytes belong to units. Otherwise the submitter counts them, and traces name no unit. */
    bool is_of_units;
    uint32_t file_first; /* index of the source's first file among io's files */
};

/* The transfer of one range of an extent; embedded in the object that it serves. */
struct lh_transfer {
    struct lh_transfer *next;
    const struct lh_source *source;
    void (*done)(struct lh_engine *engine, struct lh_transfer *transfer);
    enum lh_io_kind kind;
    enum lh_priority priority;
    enum lh_engine_link link;
    uint32_t unit;
    uint32_t slab;
    uint64_t step; /* the step that counts the bytes; 0: no step */
    uint32_t extent;
    uint32_t slot;
    uint64_t offset;
    uint64_t bytes;
    uint64_t issued_bytes;
    uint32_t outstanding; /* requests in flight or being verified */
    uint8_t *buffer;
};

/* The first member of the object that an I/O request's `owner` points to. */
struct lh_io_owner {
    void (*done)(struct lh_engine *engine, struct lh_io_request *request);
};

struct lh_transfer_request {
    struct lh_io_owner owner;
    struct lh_io_request io;
    struct lh_job job; /* the job that verifies what was read */
    struct lh_transfer *transfer;
    struct lh_engine *engine;
    uint64_t offset;     /* offset in the extent */
    uint64_t bad_offset; /* offset of the first block with a wrong checksum, or UINT64_MAX */
    uint32_t crc_expected;
    uint32_t crc_actual;
    struct lh_transfer_request *next_free;
};

struct lh_transfer_queue {
    struct lh_transfer_request *requests;
    struct lh_transfer_request *free_requests;
    struct lh_transfer *heads[LH_PRIORITY_COUNT];
    struct lh_transfer *tails[LH_PRIORITY_COUNT];
    uint32_t step_counts[2]; /* the number of unfinished transfers, by their step's parity */
    uint32_t in_flight;      /* the number of requests in flight, including those of commits */
    uint32_t checks_in_flight;
    uint64_t busy_since_ns;
    struct lh_source store; /* the engine's store */
};

/* The functions of a source whose files are a store's. */
extern const struct lh_source_ops lh_transfer_store_ops;

/* Create 4 * io_depth requests, for those in flight and those being verified. */
int lh_transfer_create(struct lh_engine *engine, struct lh_error *err);
void lh_transfer_destroy(struct lh_engine *engine);
/* Queue a transfer. The caller must keep the transfer until done() is called. */
void lh_transfer_submit(struct lh_engine *engine, struct lh_transfer *transfer);
/* Raise a queued transfer to LH_PRIORITY_DEMAND, because a thread now waits for it. */
void lh_transfer_raise(struct lh_engine *engine, struct lh_transfer *transfer);
/*
 * Issue requests as far as io_depth allows (pump), and collect finished requests (poll). Both
 * return whether anything moved.
 */
bool lh_transfer_pump(struct lh_engine *engine);
bool lh_transfer_poll(struct lh_engine *engine);
/* Collect finished requests after the engine has failed, without calling done(). */
bool lh_transfer_drain(struct lh_engine *engine);
bool lh_transfer_is_idle(const struct lh_engine *engine);
/*
 * Count a request in flight from its submission (begin) to its completion (end). Commits call these
 * for their own requests.
 */
void lh_transfer_busy_begin(struct lh_engine *engine);
void lh_transfer_busy_end(struct lh_engine *engine);
/* Attribute the time for which requests have been in flight so far to the step that ends. */
void lh_transfer_step_over(struct lh_engine *engine, struct lh_engine_step_stats *stats);

#endif
