/*
 * How long a stream has nothing to execute, measured by the CUDA backend with pairs of events.
 *
 *      stream   work   begun   (the caller waits, or the stream waits for a fence)   ended   work
 *
 * `begun` passes when the stream has executed everything before it, so the time until `ended`
 * passes is 0 for a device that was busy meanwhile.
 *
 * The pairs are a ring. A gap is collected when its place is needed, or when the sums are taken; a
 * gap that finds no free place is not measured.
 *
 * Thread: lh_cuda_gap_begin(), lh_cuda_gap_end(), lh_cuda_gaps_take(): any.
 */
#include "dev/cuda_private.h"

#include "base/assert.h"

struct lh_dev_gap {
    struct CUevent_st *begun;
    struct CUevent_st *ended;
    uint32_t kind;
    bool is_open;     /* between gap_begin and gap_end */
    bool is_measured; /* both events were recorded */
};

static struct lh_dev_gap *gap_at(const struct lh_cuda_gaps *gaps, uint64_t number)
{
    return &gaps->ring[number % LH_CUDA_GAP_COUNT];
}

/* Add the oldest gap to its sum, if the device has passed it. The caller holds the mutex. */
static bool collect(struct lh_cuda *cuda)
{
    struct lh_cuda_gaps *gaps = &cuda->gaps;
    const struct lh_dev_gap *gap = gap_at(gaps, gaps->first);
    uint64_t elapsed_ns = 0;
    if (gaps->first == gaps->end || gap->is_open)
        return false;
    unsigned result =
        gap->is_measured ? lh_cuda_elapsed(cuda, gap->begun, gap->ended, &elapsed_ns) : 0;
    if (result == LH_CUDA_NOT_READY)
        return false;
    gaps->sums[gap->kind] += result == 0 ? elapsed_ns : 0;
    gaps->first++;
    return true;
}

struct lh_dev_gap *lh_cuda_gap_begin(struct lh_dev *dev, void *stream)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    struct lh_cuda_gaps *gaps = &cuda->gaps;
    struct lh_dev_gap *gap = NULL;
    if (!gaps->ring || lh_cuda_enter(cuda, NULL) < 0)
        return NULL;
    pthread_mutex_lock(&gaps->mutex);
    if (gaps->end - gaps->first < LH_CUDA_GAP_COUNT || collect(cuda)) {
        gap = gap_at(gaps, gaps->end++);
        gap->is_open = true;
    }
    pthread_mutex_unlock(&gaps->mutex);
    if (gap)
        gap->is_measured = lh_cuda_event_record(cuda, gap->begun, stream, NULL) == 0;
    lh_cuda_leave(cuda);
    return gap;
}

void lh_cuda_gap_end(struct lh_dev *dev, struct lh_dev_gap *gap, void *stream, uint32_t kind)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    LH_ASSERT(kind < LH_DEV_GAP_KIND_COUNT);
    if (!gap)
        return;
    bool can_record = lh_cuda_enter(cuda, NULL) == 0;
    gap->is_measured =
        gap->is_measured && can_record && lh_cuda_event_record(cuda, gap->ended, stream, NULL) == 0;
    if (can_record)
        lh_cuda_leave(cuda);
    pthread_mutex_lock(&cuda->gaps.mutex);
    gap->kind = kind;
    gap->is_open = false;
    pthread_mutex_unlock(&cuda->gaps.mutex);
}

bool lh_cuda_gaps_take(struct lh_dev *dev, uint32_t kind, uint64_t *ns_out)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    struct lh_cuda_gaps *gaps = &cuda->gaps;
    LH_ASSERT(kind < LH_DEV_GAP_KIND_COUNT);
    if (!gaps->ring || lh_cuda_enter(cuda, NULL) < 0)
        return false;
    pthread_mutex_lock(&gaps->mutex);
    while (collect(cuda))
        continue;
    *ns_out = gaps->sums[kind];
    gaps->sums[kind] = 0;
    pthread_mutex_unlock(&gaps->mutex);
    lh_cuda_leave(cuda);
    return true;
}

int lh_cuda_gaps_create(struct lh_cuda *cuda, struct lh_error *err)
{
    struct lh_cuda_gaps *gaps = &cuda->gaps;
    if (!cuda->calls.event_elapsed)
        return 0;
    int rc = pthread_mutex_init(&gaps->mutex, NULL);
    if (rc != 0)
        return lh_error_set(err, -rc, "no mutex for the times of a stream");
    gaps->ring = lh_alloc_zeroed(cuda->base.alloc, LH_CUDA_GAP_COUNT, sizeof(*gaps->ring));
    if (!gaps->ring) {
        pthread_mutex_destroy(&gaps->mutex);
        return lh_error_set(err, -ENOMEM, "no memory for the times of a stream");
    }
    LH_TRY(lh_cuda_enter(cuda, err));
    for (uint32_t i = 0; i < LH_CUDA_GAP_COUNT && rc == 0; i++) {
        rc = lh_cuda_event_create(cuda, &gaps->ring[i].begun, LH_CUDA_EVENT_DEFAULT, err);
        if (rc == 0)
            rc = lh_cuda_event_create(cuda, &gaps->ring[i].ended, LH_CUDA_EVENT_DEFAULT, err);
    }
    lh_cuda_leave(cuda);
    return rc;
}

void lh_cuda_gaps_close(struct lh_cuda *cuda)
{
    for (uint32_t i = 0; cuda->gaps.ring && i < LH_CUDA_GAP_COUNT; i++) {
        lh_cuda_event_destroy(cuda, cuda->gaps.ring[i].begun);
        lh_cuda_event_destroy(cuda, cuda->gaps.ring[i].ended);
    }
}

void lh_cuda_gaps_free(struct lh_cuda *cuda)
{
    if (!cuda->gaps.ring)
        return;
    pthread_mutex_destroy(&cuda->gaps.mutex);
    lh_free(cuda->base.alloc, cuda->gaps.ring);
}
