#include "base/range.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

int lh_range_init(struct lh_range *range, struct lh_alloc *alloc, uint64_t total_bytes,
                  uint64_t granule, uint32_t hole_max, struct lh_error *err)
{
    memset(range, 0, sizeof(*range));
    if (granule == 0 || hole_max == 0 || !lh_is_aligned(total_bytes, granule))
        return lh_error_set(err, -EINVAL,
                            "a region of %" PRIu64 " bytes with %" PRIu32
                            " holes is not a multiple of its granule of %" PRIu64 " bytes",
                            total_bytes, hole_max, granule);
    range->holes = lh_alloc_zeroed(alloc, hole_max, sizeof(*range->holes));
    if (!range->holes)
        return lh_error_set(err, -ENOMEM, "no memory for the %" PRIu32 " holes of a region",
                            hole_max);
    range->hole_max = hole_max;
    range->total_bytes = total_bytes;
    range->granule = granule;
    lh_range_reset(range);
    return 0;
}

void lh_range_deinit(struct lh_range *range, struct lh_alloc *alloc)
{
    lh_free(alloc, range->holes);
    memset(range, 0, sizeof(*range));
}

void lh_range_reset(struct lh_range *range)
{
    range->hole_count = range->total_bytes > 0;
    range->holes[0] = (struct lh_range_hole){.offset = 0, .bytes = range->total_bytes};
    range->free_bytes = range->total_bytes;
}

void lh_range_copy(struct lh_range *target, const struct lh_range *source)
{
    LH_ASSERT(target->hole_max >= source->hole_max);
    memcpy(target->holes, source->holes, source->hole_count * sizeof(*source->holes));
    target->hole_count = source->hole_count;
    target->total_bytes = source->total_bytes;
    target->free_bytes = source->free_bytes;
    target->granule = source->granule;
}

/* The index of the first hole of at least bytes (a multiple of the granule), or hole_count. */
static uint32_t first_fit(const struct lh_range *range, uint64_t bytes)
{
    uint32_t index = 0;
    while (index < range->hole_count && range->holes[index].bytes < bytes)
        index++;
    return index;
}

static void hole_remove(struct lh_range *range, uint32_t index)
{
    LH_ASSERT(index < range->hole_count);
    range->hole_count--;
    memmove(&range->holes[index], &range->holes[index + 1],
            (range->hole_count - index) * sizeof(*range->holes));
}

static void hole_insert(struct lh_range *range, uint32_t index, struct lh_range_hole hole)
{
    LH_ASSERT(range->hole_count < range->hole_max);
    memmove(&range->holes[index + 1], &range->holes[index],
            (range->hole_count - index) * sizeof(*range->holes));
    range->holes[index] = hole;
    range->hole_count++;
}

uint64_t lh_range_acquire(struct lh_range *range, uint64_t bytes)
{
    LH_ASSERT(bytes > 0);
    if (bytes > range->free_bytes)
        return LH_RANGE_NONE;
    bytes = lh_align_up(bytes, range->granule);
    uint32_t index = first_fit(range, bytes);
    if (index == range->hole_count)
        return LH_RANGE_NONE;
    struct lh_range_hole *hole = &range->holes[index];
    uint64_t offset = hole->offset;
    hole->offset += bytes;
    hole->bytes -= bytes;
    if (hole->bytes == 0)
        hole_remove(range, index);
    range->free_bytes -= bytes;
    return offset;
}

void lh_range_take(struct lh_range *range, uint64_t offset, uint64_t bytes)
{
    LH_ASSERT(bytes > 0 && lh_is_aligned(offset, range->granule));
    bytes = lh_align_up(bytes, range->granule);
    uint32_t index = 0;
    while (index < range->hole_count &&
           range->holes[index].offset + range->holes[index].bytes <= offset)
        index++;
    LH_ASSERT(index < range->hole_count);
    struct lh_range_hole *hole = &range->holes[index];
    LH_ASSERT(hole->offset <= offset && offset + bytes <= hole->offset + hole->bytes);
    struct lh_range_hole behind = {.offset = offset + bytes,
                                   .bytes = hole->offset + hole->bytes - (offset + bytes)};
    hole->bytes = offset - hole->offset;
    if (hole->bytes == 0)
        hole_remove(range, index);
    else
        index++;
    if (behind.bytes > 0)
        hole_insert(range, index, behind);
    range->free_bytes -= bytes;
}

bool lh_range_has(const struct lh_range *range, uint64_t bytes)
{
    LH_ASSERT(bytes > 0);
    return bytes <= range->free_bytes &&
           first_fit(range, lh_align_up(bytes, range->granule)) < range->hole_count;
}

void lh_range_release(struct lh_range *range, uint64_t offset, uint64_t bytes)
{
    LH_ASSERT(bytes > 0 && bytes <= range->total_bytes);
    bytes = lh_align_up(bytes, range->granule);
    LH_ASSERT(lh_is_aligned(offset, range->granule));
    LH_ASSERT(offset <= range->total_bytes - bytes);

    /* Find the first hole after the range by bisection: [low, high) contains the answer. */
    uint32_t low = 0;
    uint32_t high = range->hole_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (range->holes[middle].offset > offset)
            high = middle;
        else
            low = middle + 1;
    }
    struct lh_range_hole *before = low > 0 ? &range->holes[low - 1] : NULL;
    struct lh_range_hole *behind = low < range->hole_count ? &range->holes[low] : NULL;
    /* A range that overlaps a hole was released twice, or was never acquired. */
    LH_ASSERT(!before || before->offset + before->bytes <= offset);
    LH_ASSERT(!behind || offset + bytes <= behind->offset);

    bool joins_before = before && before->offset + before->bytes == offset;
    bool joins_behind = behind && offset + bytes == behind->offset;
    range->free_bytes += bytes;
    if (joins_before && joins_behind) {
        before->bytes += bytes + behind->bytes;
        hole_remove(range, low);
    } else if (joins_before) {
        before->bytes += bytes;
    } else if (joins_behind) {
        behind->offset = offset;
        behind->bytes += bytes;
    } else {
        hole_insert(range, low, (struct lh_range_hole){.offset = offset, .bytes = bytes});
    }
}
