#include "rig_inline.h"

#include "lh_test.h"

#define FILE_COUNT_MAX 16

struct inline_io {
    struct lh_io io;
    struct rig *rig;
    struct lh_io_file files[FILE_COUNT_MAX];
    struct lh_io_request *head;
    struct lh_io_request **tail;
};

/* Jobs have no link of their own. */
#define JOB_COUNT_MAX 256

struct inline_exec {
    struct lh_exec exec;
    struct rig *rig;
    struct lh_exec_job *jobs[JOB_COUNT_MAX];
    uint32_t first;
    uint32_t end;
};

struct inline_dev {
    struct lh_dev dev;
    struct rig *rig;
    struct lh_dev_copy *head;
    struct lh_dev_copy **tail;
};

/* --- I/O -------------------------------------------------------------------------------------- */

static int io_submit(struct lh_io *io, struct lh_io_request *request)
{
    struct inline_io *self = (struct inline_io *)(void *)io;
    request->next = NULL;
    request->submitted_ns = lh_clock_now_ns(&self->rig->clock);
    *self->tail = request;
    self->tail = &request->next;
    io->in_flight_count++;
    return 0;
}

static int64_t request_run(const struct inline_io *self, const struct lh_io_request *request)
{
    int fd = self->files[request->file_index].fd;
    uint64_t done = 0;
    if (request->kind == LH_IO_KIND_SYNC)
        return fdatasync(fd) == 0 ? 0 : -errno;
    while (done < request->bytes) {
        uint8_t *at = (uint8_t *)request->buffer + done;
        uint64_t left = request->bytes - done;
        off_t offset = (off_t)(request->offset + done);
        ssize_t moved = request->kind == LH_IO_KIND_READ ? pread(fd, at, left, offset)
                                                         : pwrite(fd, at, left, offset);
        if (moved <= 0)
            return moved < 0 ? -errno : done >= lh_max_u64(request->least_bytes, 1) ? 0 : -ENODATA;
        done += (uint64_t)moved;
    }
    return 0;
}

static uint32_t io_poll(struct lh_io *io, struct lh_io_request **done, uint32_t done_max)
{
    struct inline_io *self = (struct inline_io *)(void *)io;
    struct lh_io_request **link = &self->head;
    LH_CHECK(done_max > 0);
    while (*link && (self->rig->holds.requests & LH_IO_FAULT_ON((*link)->kind)))
        link = &(*link)->next;
    struct lh_io_request *request = *link;
    if (!request)
        return 0;
    *link = request->next;
    if (!request->next)
        self->tail = link;
    request->result = request_run(self, request);
    request->completed_ns = lh_clock_now_ns(&self->rig->clock);
    io->in_flight_count--;
    done[0] = request;
    return 1;
}

static void io_destroy(struct lh_io *io)
{
    LH_CHECK(io->in_flight_count == 0);
    lh_free(&((struct inline_io *)(void *)io)->rig->alloc, io);
}

struct lh_io *rig_inline_io(struct rig *rig, const struct lh_io_opts *opts)
{
    static const struct lh_io_ops ops = {.version = LH_IO_OPS_VERSION,
                                         .name = "inline",
                                         .submit = io_submit,
                                         .poll = io_poll,
                                         .destroy = io_destroy};
    struct inline_io *self = lh_alloc_zeroed(&rig->alloc, 1, sizeof(*self));
    LH_CHECK(self && opts->file_count <= FILE_COUNT_MAX);
    memcpy(self->files, opts->files, opts->file_count * sizeof(*self->files));
    self->io.ops = &ops;
    self->rig = rig;
    self->tail = &self->head;
    return &self->io;
}

/* --- Workers ---------------------------------------------------------------------------------- */

static int exec_submit(struct lh_exec *exec, struct lh_exec_job *job)
{
    struct inline_exec *self = (struct inline_exec *)(void *)exec;
    LH_CHECK(self->end - self->first < JOB_COUNT_MAX);
    self->jobs[self->end++ % JOB_COUNT_MAX] = job;
    return 0;
}

static uint32_t exec_poll(struct lh_exec *exec, struct lh_exec_job **done, uint32_t done_max)
{
    struct inline_exec *self = (struct inline_exec *)(void *)exec;
    if (self->first == self->end || self->rig->holds.jobs || done_max == 0)
        return 0;
    struct lh_exec_job *job = self->jobs[self->first++ % JOB_COUNT_MAX];
    job->started_ns = lh_clock_now_ns(&self->rig->clock);
    job->run(job);
    job->ended_ns = lh_clock_now_ns(&self->rig->clock);
    job->worker_index = 0;
    done[0] = job;
    return 1;
}

static void exec_destroy(struct lh_exec *exec)
{
    struct inline_exec *self = (struct inline_exec *)(void *)exec;
    LH_CHECK(self->first == self->end);
    lh_free(&self->rig->alloc, self);
}

struct lh_exec *rig_inline_exec(struct rig *rig)
{
    static const struct lh_exec_ops ops = {.version = LH_EXEC_OPS_VERSION,
                                           .name = "inline",
                                           .submit = exec_submit,
                                           .poll = exec_poll,
                                           .destroy = exec_destroy};
    struct inline_exec *self = lh_alloc_zeroed(&rig->alloc, 1, sizeof(*self));
    LH_CHECK(self);
    self->exec = (struct lh_exec){.ops = &ops, .thread_count = 1};
    self->rig = rig;
    return &self->exec;
}

/* --- The accelerator: computation is on the caller's thread, so fences have nothing to order -- */

static int fence_create(struct lh_dev *dev, struct lh_dev_fence **fence_out, struct lh_error *err)
{
    (void)err;
    *fence_out = (struct lh_dev_fence *)(void *)dev; /* the same one for all, but not NULL */
    return 0;
}

static void fence_destroy(struct lh_dev *dev, struct lh_dev_fence *fence)
{
    LH_CHECK(!fence || fence == (struct lh_dev_fence *)(void *)dev);
}

static int fence_record(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                        struct lh_error *err)
{
    (void)dev;
    (void)fence;
    (void)stream;
    (void)err;
    return 0;
}

static int fence_order(struct lh_dev *dev, enum lh_dev_direction direction,
                       struct lh_dev_fence *fence, struct lh_error *err)
{
    (void)direction;
    return fence_record(dev, fence, NULL, err);
}

static int copy_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    struct inline_dev *self = (struct inline_dev *)(void *)dev;
    (void)err;
    copy->next = NULL;
    *self->tail = copy;
    self->tail = &copy->next;
    dev->in_flight_count++;
    return 0;
}

static uint32_t copy_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max)
{
    struct inline_dev *self = (struct inline_dev *)(void *)dev;
    struct lh_dev_copy **link = &self->head;
    LH_CHECK(done_max > 0);
    while (*link && (self->rig->holds.copies & (1U << (*link)->direction)))
        link = &(*link)->next;
    struct lh_dev_copy *copy = *link;
    if (!copy)
        return 0;
    *link = copy->next;
    if (!copy->next)
        self->tail = link;
    copy->started_ns = lh_clock_now_ns(&self->rig->clock);
    if (copy->direction == LH_DEV_DIRECTION_IN)
        memcpy(copy->device, copy->host, copy->bytes);
    else
        memcpy(copy->host, copy->device, copy->bytes);
    copy->completed_ns = lh_clock_now_ns(&self->rig->clock);
    copy->result = 0;
    dev->in_flight_count--;
    done[0] = copy;
    return 1;
}

static void dev_destroy(struct lh_dev *dev)
{
    LH_CHECK(dev->in_flight_count == 0);
    lh_free(&((struct inline_dev *)(void *)dev)->rig->alloc, dev);
}

struct lh_dev *rig_inline_dev(struct rig *rig)
{
    static const struct lh_dev_ops ops = {.version = LH_DEV_OPS_VERSION,
                                          .name = "inline",
                                          .fence_create = fence_create,
                                          .fence_destroy = fence_destroy,
                                          .record = fence_record,
                                          .wait = fence_record,
                                          .order = fence_order,
                                          .submit = copy_submit,
                                          .poll = copy_poll,
                                          .destroy = dev_destroy};
    struct inline_dev *self = lh_alloc_zeroed(&rig->alloc, 1, sizeof(*self));
    LH_CHECK(self);
    self->dev.ops = &ops;
    self->rig = rig;
    self->tail = &self->head;
    return &self->dev;
}
