/* Stripes, cycles and tails: see extent.h. */
#include "store/extent.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

static uint64_t greatest_divisor(uint64_t a, uint64_t b)
{
    LH_ASSERT(a > 0);
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Round weights that are too fine for a cycle to the nearest shares that fill the longest one. */
static void shares_round(const uint64_t *weights, uint32_t file_count, uint64_t sum,
                         uint32_t *shares)
{
    const uint32_t length = LH_STORE_CYCLE_STRIPES_MAX;
    uint32_t total = 0;
    LH_ASSERT(sum > 0 && file_count <= length);
    for (uint32_t file = 0; file < file_count; file++) {
        shares[file] = (uint32_t)((unsigned __int128)weights[file] * length / sum);
        if (shares[file] == 0)
            shares[file] = 1;
        total += shares[file];
    }
    while (total != length) {
        /* Correct the share that deviates most from its exact value, by one stripe. */
        uint32_t best = 0;
        __int128 best_gap = 0;
        for (uint32_t file = 0; file < file_count; file++) {
            __int128 gap = (__int128)weights[file] * length - (__int128)shares[file] * sum;
            if (total > length)
                gap = shares[file] > 1 ? -gap : INT64_MIN * (__int128)length;
            if (file == 0 || gap > best_gap) {
                best = file;
                best_gap = gap;
            }
        }
        LH_ASSERT(total < length || shares[best] > 1);
        shares[best] = total < length ? shares[best] + 1 : shares[best] - 1;
        total = total < length ? total + 1 : total - 1;
    }
}

/*
 * Order the stripes of a cycle by the quota method of Balinski and Young. After n stripes, a file
 * is due n * share / length stripes. The next stripe goes to the file with the largest
 * share / (its stripes + 1) among the files that have fewer stripes than they are due after this
 * stripe. After every stripe, each file then has what it is due, rounded down or up.
 */
static void cycle_order(const uint32_t *shares, uint32_t file_count, uint32_t length,
                        uint8_t *cycle)
{
    uint32_t held[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    LH_ASSERT(length <= LH_STORE_CYCLE_STRIPES_MAX);
    for (uint32_t stripe = 0; stripe < length; stripe++) {
        uint32_t best = file_count;
        for (uint32_t file = 0; file < file_count; file++) {
            bool may_have = held[file] * length < (stripe + 1) * shares[file];
            if (!may_have)
                continue;
            if (best == file_count ||
                shares[file] * (held[best] + 1) > shares[best] * (held[file] + 1))
                best = file;
        }
        LH_ASSERT(best < file_count);
        cycle[stripe] = (uint8_t)best;
        held[best]++;
    }
    for (uint32_t file = 0; file < file_count; file++)
        LH_ASSERT(held[file] == shares[file]);
}

uint32_t lh_store_cycle_plan(const uint64_t *weights, uint32_t file_count,
                             uint8_t cycle_out[LH_STORE_CYCLE_STRIPES_MAX])
{
    LH_ASSERT(file_count >= 1 && file_count <= LH_STORE_DIRECTORY_COUNT_MAX);
    static const uint64_t equal[LH_STORE_DIRECTORY_COUNT_MAX] = {1, 1, 1, 1, 1, 1, 1, 1,
                                                                 1, 1, 1, 1, 1, 1, 1, 1};
    if (weights == NULL)
        weights = equal;
    uint64_t divisor = 0;
    uint64_t sum = 0;
    for (uint32_t file = 0; file < file_count; file++) {
        LH_ASSERT(weights[file] >= 1 && weights[file] <= LH_STORE_WEIGHT_MAX);
        divisor = greatest_divisor(weights[file], divisor);
        sum += weights[file];
    }
    LH_ASSERT(divisor > 0 && sum % divisor == 0);
    uint32_t shares[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    uint32_t length = LH_STORE_CYCLE_STRIPES_MAX;
    if (sum / divisor <= length) {
        length = (uint32_t)(sum / divisor);
        for (uint32_t file = 0; file < file_count; file++)
            shares[file] = (uint32_t)(weights[file] / divisor);
    } else {
        shares_round(weights, file_count, sum, shares);
    }
    LH_ASSERT(length >= file_count);
    memset(cycle_out, 0, LH_STORE_CYCLE_STRIPES_MAX);
    cycle_order(shares, file_count, length, cycle_out);
    return length;
}

static void shares_count(const struct lh_store_shape *shape, uint32_t *shares)
{
    LH_ASSERT(shape->file_count >= 1 && shape->file_count <= LH_STORE_DIRECTORY_COUNT_MAX);
    memset(shares, 0, sizeof(uint32_t) * LH_STORE_DIRECTORY_COUNT_MAX);
    for (uint32_t stripe = 0; stripe < shape->cycle_stripes; stripe++) {
        LH_ASSERT(shape->cycle[stripe] < shape->file_count);
        shares[shape->cycle[stripe]]++;
    }
}

void lh_store_tails_plan(const struct lh_store_shape *shape, uint8_t *tail_files_out)
{
    uint32_t shares[LH_STORE_DIRECTORY_COUNT_MAX];
    uint64_t held[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    uint64_t total = 0;
    shares_count(shape, shares);
    for (uint32_t extent = 0; extent < shape->extent_count; extent++) {
        const struct lh_store_extent_desc *desc = &shape->extents[extent];
        LH_ASSERT(desc->group < shape->group_count);
        uint64_t tail_bytes = desc->bytes % shape->stripe_bytes;
        for (uint32_t slot = 0; slot < LH_STORE_SLOT_COUNT_MAX; slot++) {
            uint8_t *tail_file = &tail_files_out[lh_store_place_index(extent, slot)];
            *tail_file = 0;
            if (tail_bytes == 0 || slot >= shape->slot_counts[desc->group])
                continue;
            /* At most 2^21 tails of at most 2^30 bytes, times a share of at most 2^10, is 2^61. */
            total += tail_bytes;
            int64_t best_due = INT64_MIN;
            for (uint32_t file = 0; file < shape->file_count; file++) {
                int64_t due =
                    (int64_t)(total * shares[file]) - (int64_t)(held[file] * shape->cycle_stripes);
                if (due > best_due) {
                    best_due = due;
                    *tail_file = (uint8_t)file;
                }
            }
            LH_ASSERT(best_due > INT64_MIN && *tail_file < shape->file_count);
            held[*tail_file] += tail_bytes;
        }
    }
}

/* The number of stripes on file that precede stripe. */
static uint64_t stripes_before(const struct lh_store_layout *layout, uint64_t stripe, uint32_t file)
{
    LH_ASSERT(file < layout->file_count);
    return stripe / layout->cycle_stripes * layout->shares[file] +
           layout->before[stripe % layout->cycle_stripes][file];
}

static void cycle_count(struct lh_store_layout *layout)
{
    uint16_t held[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    for (uint32_t stripe = 0; stripe < layout->cycle_stripes; stripe++) {
        memcpy(layout->before[stripe], held, sizeof(held));
        held[layout->cycle[stripe]]++;
    }
}

static void places_fill(struct lh_store_layout *layout, const struct lh_store_shape *shape)
{
    uint64_t tails[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    uint64_t next_stripe = 0;
    for (uint32_t index = 0; index < layout->place_count; index++) {
        uint32_t extent = index / LH_STORE_SLOT_COUNT_MAX;
        uint32_t slot = index % LH_STORE_SLOT_COUNT_MAX;
        const struct lh_store_extent_desc *desc = &shape->extents[extent];
        LH_ASSERT(desc->group < shape->group_count);
        if (slot >= shape->slot_counts[desc->group])
            continue;
        struct lh_store_place *place = &layout->places[index];
        place->first_stripe = next_stripe;
        place->stripe_count = desc->bytes / shape->stripe_bytes;
        place->tail_bytes = desc->bytes % shape->stripe_bytes;
        place->tail_file = shape->tail_files[index];
        LH_ASSERT(place->tail_file < shape->file_count);
        memcpy(layout->tails_before + (uint64_t)index * layout->file_count, tails,
               sizeof(uint64_t) * layout->file_count);
        tails[place->tail_file] += place->tail_bytes;
        next_stripe += place->stripe_count;
    }
    for (uint32_t file = 0; file < layout->file_count; file++)
        layout->file_bytes[file] = layout->data_offset[file] + tails[file] +
                                   stripes_before(layout, next_stripe, file) * layout->stripe_bytes;
}

int lh_store_layout_init(struct lh_store_layout *layout, const struct lh_store_shape *shape,
                         const uint64_t *data_offset, struct lh_alloc *alloc, struct lh_error *err)
{
    LH_ASSERT(shape->cycle_stripes >= 1 && shape->cycle_stripes <= LH_STORE_CYCLE_STRIPES_MAX);
    LH_ASSERT(shape->stripe_bytes > 0 && lh_is_aligned(shape->stripe_bytes, LH_CHECKSUM_BYTES));
    LH_ASSERT(shape->extent_count <= UINT32_MAX / LH_STORE_SLOT_COUNT_MAX);
    memset(layout, 0, sizeof(*layout));
    layout->file_count = shape->file_count;
    layout->place_count = shape->extent_count * LH_STORE_SLOT_COUNT_MAX;
    layout->stripe_bytes = shape->stripe_bytes;
    layout->cycle_stripes = shape->cycle_stripes;
    memcpy(layout->cycle, shape->cycle, sizeof(layout->cycle));
    memcpy(layout->data_offset, data_offset, sizeof(uint64_t) * shape->file_count);
    shares_count(shape, layout->shares);
    cycle_count(layout);

    uint64_t tail_count = (uint64_t)layout->place_count * layout->file_count;
    layout->places = lh_alloc_zeroed(alloc, layout->place_count, sizeof(struct lh_store_place));
    layout->tails_before = lh_alloc_zeroed(alloc, tail_count, sizeof(uint64_t));
    if (layout->places == NULL || layout->tails_before == NULL) {
        lh_store_layout_deinit(layout, alloc);
        return lh_error_set(err, -ENOMEM, "no memory for the places of %" PRIu32 " extents",
                            shape->extent_count);
    }
    places_fill(layout, shape);
    return 0;
}

void lh_store_layout_deinit(struct lh_store_layout *layout, struct lh_alloc *alloc)
{
    lh_free(alloc, layout->places);
    lh_free(alloc, layout->tails_before);
    memset(layout, 0, sizeof(*layout));
}

int lh_store_layout_map(const struct lh_store_layout *layout, uint32_t place_index, uint64_t offset,
                        uint64_t bytes, struct lh_store_piece *pieces, uint32_t piece_max)
{
    LH_ASSERT(place_index < layout->place_count);
    const struct lh_store_place *place = &layout->places[place_index];
    const uint64_t *tails = layout->tails_before + (uint64_t)place_index * layout->file_count;
    const uint64_t stripe_bytes = layout->stripe_bytes;
    const uint64_t place_bytes = place->stripe_count * stripe_bytes + place->tail_bytes;
    LH_ASSERT(offset <= place_bytes && bytes <= place_bytes - offset);
    LH_ASSERT(lh_is_aligned(offset, LH_BLOCK_BYTES) && lh_is_aligned(bytes, LH_BLOCK_BYTES));

    uint32_t count = 0;
    for (uint64_t done = 0; done < bytes;) {
        uint64_t index = (offset + done) / stripe_bytes;
        uint64_t inside = (offset + done) % stripe_bytes;
        uint64_t stripe = place->first_stripe + index;
        bool is_tail = index == place->stripe_count;
        uint32_t file = is_tail ? place->tail_file : layout->cycle[stripe % layout->cycle_stripes];
        uint64_t end = is_tail ? place->tail_bytes : stripe_bytes;
        LH_ASSERT(index <= place->stripe_count && inside < end);
        uint64_t length = lh_min_u64(end - inside, bytes - done);
        uint64_t file_offset = layout->data_offset[file] + tails[file] + inside +
                               stripes_before(layout, stripe, file) * stripe_bytes;
        struct lh_store_piece *last = count > 0 ? &pieces[count - 1] : NULL;
        if (last != NULL && last->file_index == file &&
            last->file_offset + last->bytes == file_offset) {
            last->bytes += length;
        } else {
            if (count == piece_max)
                return -E2BIG;
            pieces[count++] = (struct lh_store_piece){.file_index = file,
                                                      .file_offset = file_offset,
                                                      .buffer_offset = done,
                                                      .bytes = length};
        }
        done += length;
    }
    return (int)count;
}
