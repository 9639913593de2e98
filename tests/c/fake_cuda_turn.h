/*
 * Part of fake_cuda.c, which includes it after its variables: when may a stream execute the next
 * item of its work (enum fake_cuda_order), and how is a copy executed?
 */
#ifndef FAKE_CUDA_TURN_H
#define FAKE_CUDA_TURN_H

/* Return the item of work that a stream executes next, or NULL. */
static const struct op *next_of(const struct CUstream_st *stream)
{
    if (!stream->is_used || stream->executed_count == stream->issued_count)
        return NULL;
    return &stream->ops[stream->executed_count % OP_COUNT_MAX];
}

static bool is_waiting(const struct op *op)
{
    return op->kind == OP_WAIT && op->stream->executed_count < op->number;
}

/* Whether a copy must wait for streams that compute, or these for copies (opts.order). */
static bool is_outranked(const struct CUstream_st *stream, const struct op *op)
{
    bool is_last = opts.order == FAKE_CUDA_COPIES_LAST && op->kind == OP_COPY && !stream->computes;
    bool is_second = opts.order == FAKE_CUDA_COPIES_FIRST && stream->computes;
    for (int i = 0; i < STREAM_COUNT_MAX && (is_last || is_second); i++) {
        const struct op *other = next_of(&streams[i]);
        if (!other || is_waiting(other) || &streams[i] == stream)
            continue;
        if (is_last && streams[i].computes && (allowance != 0 || other->kind != OP_CALL))
            return true;
        if (is_second && !streams[i].computes && other->kind == OP_COPY)
            return true;
    }
    return false;
}

/* Wait until a stream may execute the next item of its work. The caller holds the lock. */
static void turn_wait(const struct CUstream_st *stream, const struct op *op)
{
    bool needs_allowance = stream->computes && op->kind == OP_CALL;
    while (!is_broken && (is_paused || is_waiting(op) || (needs_allowance && allowance == 0) ||
                          is_outranked(stream, op)))
        pthread_cond_wait(&has_news, &mutex);
    allowance -= needs_allowance && allowance > 0;
}

void fake_cuda_allow(int64_t count)
{
    lock();
    allowance = count;
    unlock(0);
}

static const void *seen(const void *address)
{
    size_t offset = (uintptr_t)address - (uintptr_t)device_base;
    if ((uintptr_t)address >= FAKE_CUDA_HOST_SHIFT)
        return (const void *)((uintptr_t)address - FAKE_CUDA_HOST_SHIFT);
    return device_view && offset < device_bytes ? device_view + offset : address;
}

/* Copy in pieces, each of which is executed as if it were an item of its own. */
static void copy_run(const struct CUstream_st *stream, const struct op *op)
{
    size_t piece_bytes = opts.piece_bytes > 0 ? opts.piece_bytes : op->bytes;
    uint8_t *to = (uint8_t *)(uintptr_t)seen(op->to);
    const uint8_t *from = seen(op->from);
    for (size_t at = 0; at < op->bytes; at += piece_bytes) {
        if (at > 0) {
            lock();
            turn_wait(stream, op);
            unlock(0);
        }
        memcpy(to + at, from + at, lh_min_u64(piece_bytes, op->bytes - at));
    }
}

#endif
