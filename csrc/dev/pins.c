#include "dev/pins.h"

#include "base/assert.h"

/* Smaller pieces are not tried: registering them takes longer than it saves. */
#define PIECE_BYTES_MIN (UINT64_C(64) << 10)
/* A buffer has about this many pieces at most, so that several buffers fit into the table. */
#define PIECE_COUNT 48
#define PAGE_BYTES UINT64_C(4096)

bool lh_dev_pins_add(struct lh_dev_pins *pins, const struct lh_dev_buffer *buffer)
{
    struct lh_error err = {0};
    if (buffer->bytes == 0)
        return true;
    if (pins->count == LH_DEV_PIN_COUNT_MAX)
        return false;
    if (pins->dev->ops->memory_register(pins->dev, buffer->base, buffer->bytes, &err) < 0) {
        if (pins->refusal.code == 0)
            pins->refusal = err;
        return false;
    }
    pins->ranges[pins->count++] = *buffer;
    return true;
}

static void last_remove(struct lh_dev_pins *pins)
{
    const struct lh_dev_buffer *last = &pins->ranges[--pins->count];
    pins->dev->ops->memory_unregister(pins->dev, last->base);
}

/*
 * Register a buffer in pieces: it was refused as a whole. After a further refusal the rest is tried
 * in pieces of half the size.
 */
static void pieces_add(struct lh_dev_pins *pins, const struct lh_dev_buffer *buffer,
                       uint64_t piece_bytes)
{
    uint64_t least_bytes = lh_min_u64(piece_bytes, PIECE_BYTES_MIN);
    uint64_t at = 0;
    piece_bytes = lh_max_u64(piece_bytes, buffer->bytes / PIECE_COUNT);
    piece_bytes = lh_min_u64(piece_bytes, buffer->bytes / 2);
    piece_bytes = lh_align_up(piece_bytes, PAGE_BYTES);
    while (at < buffer->bytes && piece_bytes >= least_bytes) {
        struct lh_dev_buffer piece = {.base = buffer->base + at,
                                      .bytes = lh_min_u64(piece_bytes, buffer->bytes - at)};
        if (lh_dev_pins_add(pins, &piece))
            at += piece.bytes;
        else
            piece_bytes = (piece_bytes / 2) & ~(PAGE_BYTES - 1);
    }
}

void lh_dev_pins_fit(struct lh_dev_pins *pins, const struct lh_dev_buffer *staging,
                     const struct lh_dev_buffer *buffers, uint32_t buffer_count,
                     uint64_t piece_bytes)
{
    LH_ASSERT(piece_bytes >= PAGE_BYTES && lh_is_aligned(piece_bytes, PAGE_BYTES));
    while (!lh_dev_pins_add(pins, staging) && pins->count > 0)
        last_remove(pins);
    for (uint32_t i = 0; i < buffer_count; i++) {
        if (buffers[i].bytes > 0 && lh_dev_pins_bytes(pins, &buffers[i]) == 0)
            pieces_add(pins, &buffers[i], piece_bytes);
    }
}

void lh_dev_pins_remove(struct lh_dev_pins *pins)
{
    while (pins->count > 0)
        last_remove(pins);
}

uint64_t lh_dev_pins_run(const struct lh_dev_pins *pins, const void *base, uint64_t bytes,
                         bool *is_pinned_out)
{
    uintptr_t first = (uintptr_t)base;
    LH_ASSERT(bytes > 0);
    *is_pinned_out = false;
    for (uint32_t i = 0; i < pins->count; i++) {
        uintptr_t begin = (uintptr_t)pins->ranges[i].base;
        uintptr_t end = begin + pins->ranges[i].bytes;
        if (first >= begin && first < end) {
            *is_pinned_out = true;
            return lh_min_u64(bytes, end - first);
        }
        if (begin > first)
            bytes = lh_min_u64(bytes, begin - first);
    }
    return bytes;
}

uint64_t lh_dev_pins_bytes(const struct lh_dev_pins *pins, const struct lh_dev_buffer *buffer)
{
    uint64_t pinned_bytes = 0;
    for (uint64_t at = 0, bytes; at < buffer->bytes; at += bytes) {
        bool is_pinned = false;
        bytes = lh_dev_pins_run(pins, buffer->base + at, buffer->bytes - at, &is_pinned);
        pinned_bytes += is_pinned ? bytes : 0;
    }
    return pinned_bytes;
}
