/*
 * The parts of the CUDA backend, which cuda.c describes: calls of the driver (cuda_call.c), copies
 * (cuda_lane.c), gaps of a stream (cuda_gap.c) and everything else (cuda.c). Private to csrc/dev.
 *
 * Thread: lh_cuda_judge() to lh_cuda_elapsed(), and those that cuda_gap.c names: any. The others:
 *         the owner of the backend.
 */
#ifndef LH_DEV_CUDA_PRIVATE_H
#define LH_DEV_CUDA_PRIVATE_H

#include <pthread.h>

#include "dev/cuda_abi.h"
#include "dev/dev_private.h"

struct lh_cuda;
struct lh_cuda_lane;

/* Copies of a lane with one host call. */
struct lh_cuda_burst {
    struct lh_cuda_lane *lane;
    struct CUevent_st
        *begun; /* recorded before the first copy; NULL: the driver measures no time */
    struct CUevent_st *ended; /* recorded after the last copy */
    uint64_t end;             /* the number of the lane's first copy after the burst */
    uint64_t bytes;
    uint64_t polled_bytes; /* of the copies that poll has returned */
    uint64_t elapsed_ns;   /* from begun to ended; valid if is_measured */
    bool is_measured;
};

struct lh_cuda_lane {
    struct lh_cuda *cuda;
    uint32_t index; /* among the lanes */
    enum lh_dev_direction direction;
    struct CUstream_st *copy_stream;
    struct CUstream_st *notify_stream;
    struct lh_cuda_burst *bursts; /* burst n is at n % copy_count */
    uint64_t closed_count;        /* bursts that have their host call; the next one may be open */
    uint64_t polled_count;        /* bursts whose copies have all been returned */
    uint64_t closed_copy_count;   /* copies of the closed bursts */
    uint32_t open_copy_count;     /* copies of the open burst; 0: no burst is open */
    uint64_t ended_ns; /* the end of the last copy; used by host calls, which run one at a time */
};

#define LH_CUDA_GAP_COUNT 256

struct lh_cuda_gaps {
    pthread_mutex_t mutex;   /* protects everything here; initialized if ring is */
    struct lh_dev_gap *ring; /* gap n is at n % LH_CUDA_GAP_COUNT; NULL: not measured */
    uint64_t first;          /* the oldest gap that is not in its sum */
    uint64_t end;
    uint64_t sums[LH_DEV_GAP_KIND_COUNT];
};

struct lh_dev_kernel {
    struct CUmod_st *module; /* NULL: unused */
    struct CUfunc_st *function;
};

struct lh_cuda {
    struct lh_dev_base base; /* must be first: callers have a pointer to it */
    struct lh_cuda_calls calls;
    struct lh_cuda_lane lanes[LH_DEV_LANE_COUNT_MAX];
    struct lh_cuda_gaps gaps;
    struct lh_dev_kernel kernels[LH_DEV_KERNEL_COUNT_MAX];
    struct CUctx_st *context; /* NULL: not retained */
    int device;
    uint64_t heard_ns;    /* when a copy last came back, or the driver was last queried */
    unsigned lost_result; /* the driver's error when the context broke; 0: the context works */
    bool was_refused;     /* entering the context failed when the driver was last queried */
};

/* Return 0, or record the driver's error for the call that format describes. */
LH_PRINTF(4, 5)
int lh_cuda_judge(const struct lh_cuda *cuda, unsigned result, struct lh_error *err,
                  const char *format, ...);
/* Make the context current on this thread, whose current context may be another one or none. */
int lh_cuda_enter(const struct lh_cuda *cuda, struct lh_error *err);
void lh_cuda_leave(const struct lh_cuda *cuda);
/* The next three functions need a current context. On failure *event_out is NULL. */
int lh_cuda_event_create(const struct lh_cuda *cuda, struct CUevent_st **event_out, unsigned flags,
                         struct lh_error *err);
int lh_cuda_event_record(const struct lh_cuda *cuda, struct CUevent_st *event,
                         struct CUstream_st *stream, struct lh_error *err);
int lh_cuda_stream_wait(const struct lh_cuda *cuda, struct CUstream_st *stream,
                        struct CUevent_st *event, struct lh_error *err);
void lh_cuda_event_destroy(const struct lh_cuda *cuda, struct CUevent_st *event); /* may be NULL */
/* Ask for the time between two events. Returns 0, or the driver's error. */
unsigned lh_cuda_elapsed(const struct lh_cuda *cuda, struct CUevent_st *begun,
                         struct CUevent_st *ended, uint64_t *ns_out);

/* Create the streams and events of both directions. On failure, close what was created. */
int lh_cuda_lanes_create(struct lh_cuda *cuda, struct lh_error *err);
/* Close the lanes; this needs a current context. */
void lh_cuda_lanes_close(struct lh_cuda *cuda);
/* The functions of the vtable. */
int lh_cuda_side_create(struct lh_dev *dev, struct lh_error *err);
int lh_cuda_order(struct lh_dev *dev, enum lh_dev_direction direction, struct lh_dev_fence *fence,
                  struct lh_error *err);
int lh_cuda_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err);
uint32_t lh_cuda_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max);

/* Create the ring of gaps, if the driver measures times. On failure, close and free it. */
int lh_cuda_gaps_create(struct lh_cuda *cuda, struct lh_error *err);
/* Destroy the events; this needs a current context. */
void lh_cuda_gaps_close(struct lh_cuda *cuda);
void lh_cuda_gaps_free(struct lh_cuda *cuda);
/* The functions of the vtable. */
struct lh_dev_gap *lh_cuda_gap_begin(struct lh_dev *dev, void *stream);
void lh_cuda_gap_end(struct lh_dev *dev, struct lh_dev_gap *gap, void *stream, uint32_t kind);
bool lh_cuda_gaps_take(struct lh_dev *dev, uint32_t kind, uint64_t *ns_out);

/* A fence is the driver's event itself, so nothing else has to be allocated. */
static inline struct CUevent_st *lh_cuda_event_of(struct lh_dev_fence *fence)
{
    return (struct CUevent_st *)(void *)fence;
}

#endif
