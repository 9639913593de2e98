#include "plan/budget.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

/* Forward takes a third of a step, or less if backward recomputes activations. */
#define FREE_DIVISOR 3
/* Slabs for all chunks come before parameters if they take at most this part of frozen ones. */
#define ADAPTERS_DIVISOR 8
#define BLOCK_ELEMENTS 64

struct needs {
    uint64_t always_bytes;
    uint64_t largest_bytes;
    uint64_t second_bytes;
    uint64_t apart_bytes_max;
    uint64_t all_bytes;
    uint64_t frozen_bytes;
    uint64_t gradient_bytes_max;
    uint64_t trainable_bytes_max;
    uint64_t waiting_bytes;        /* all gradients that wait for the end of the step */
    uint64_t waiting_memory_bytes; /* the part of these gradients that cannot wait on SSD */
    uint64_t waiting_free_bytes;   /* gradients that may wait, but need not */
    uint32_t slab_bytes_per_element;
    uint32_t slab_bytes_per_block;
    uint64_t whole_elements_max; /* of a unit that needs slabs for all of its chunks */
};

/* Bytes of gradients; if they are stored in blocks, rounded up to whole blocks. */
static uint64_t gradients_round(const struct lh_budget_unit *unit, uint64_t bytes,
                                uint64_t chunk_elements)
{
    if (unit->block_bytes_per_element == 0 || bytes == 0)
        return bytes;
    uint64_t all = lh_align_up(unit->elements, chunk_elements) * unit->block_bytes_per_element;
    return lh_max_u64(bytes, all);
}

uint64_t lh_budget_apart_bytes(const uint64_t *bytes, uint32_t count)
{
    uint64_t largest_bytes = 0;
    uint64_t sum_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        largest_bytes = lh_max_u64(largest_bytes, bytes[i]);
        sum_bytes += bytes[i];
    }
    return sum_bytes + (count > 1 ? count - 1 : 0) * largest_bytes;
}

static struct needs needs_sum(const struct lh_budget_unit *units, uint32_t unit_count,
                              uint64_t chunk_elements)
{
    struct needs needs = {0};
    for (uint32_t i = 0; i < unit_count; i++) {
        const struct lh_budget_unit *unit = &units[i];
        needs.all_bytes += unit->bytes;
        needs.frozen_bytes += unit->elements == 0 ? unit->bytes : 0;
        needs.gradient_bytes_max = lh_max_u64(
            needs.gradient_bytes_max, gradients_round(unit, unit->gradient_bytes, chunk_elements));
        if (unit->elements > 0)
            needs.trainable_bytes_max = lh_max_u64(
                needs.trainable_bytes_max, gradients_round(unit, unit->bytes, chunk_elements));
        uint64_t waiting_bytes =
            gradients_round(unit, unit->elements * unit->waiting_bytes_per_element, chunk_elements);
        uint32_t slab_element_bytes = unit->state_bytes_per_element;
        if (unit->state_bytes_per_block > needs.slab_bytes_per_block)
            needs.slab_bytes_per_block = unit->state_bytes_per_block;
        if (unit->waits_at_will) {
            needs.waiting_free_bytes += waiting_bytes;
            waiting_bytes = 0;
        }
        needs.waiting_bytes += waiting_bytes;
        if (unit->waits_in_memory || unit->waits_at_will)
            needs.waiting_memory_bytes += waiting_bytes;
        else
            slab_element_bytes += unit->waiting_bytes_per_element;
        if (slab_element_bytes > needs.slab_bytes_per_element)
            needs.slab_bytes_per_element = slab_element_bytes;
        if (unit->is_whole)
            needs.whole_elements_max = lh_max_u64(needs.whole_elements_max, unit->elements);
        needs.apart_bytes_max = lh_max_u64(needs.apart_bytes_max, unit->apart_bytes);
        uint64_t in_use_bytes = lh_max_u64(unit->bytes, unit->together_bytes);
        if (unit->always) {
            needs.always_bytes += unit->bytes;
        } else if (unit->is_together) {
            continue;
        } else if (in_use_bytes > needs.largest_bytes) {
            needs.second_bytes = needs.largest_bytes;
            needs.largest_bytes = in_use_bytes;
        } else {
            needs.second_bytes = lh_max_u64(needs.second_bytes, in_use_bytes);
        }
    }
    return needs;
}

static void chunks_count(const struct lh_budget_unit *units, uint32_t unit_count,
                         struct lh_budget *budget)
{
    uint64_t count = 0;
    uint64_t state_count = 0;
    for (uint32_t i = 0; i < unit_count; i++) {
        uint64_t chunks = lh_div_ceil(units[i].elements, budget->chunk_elements);
        count += chunks;
        state_count += units[i].state_bytes_per_element > 0 ? chunks : 0;
    }
    LH_ASSERT(count < UINT32_MAX);
    budget->chunk_count = (uint32_t)count;
    budget->state_chunk_count = (uint32_t)state_count;
}

/* The most slabs that are of use: one for each chunk with states, and a pipeline for the others. */
static uint32_t slab_count_max(const struct lh_budget *budget, uint32_t pipeline)
{
    uint64_t count = budget->state_chunk_count;
    if (count < budget->chunk_count)
        count = lh_min_u64(count + pipeline, budget->chunk_count);
    return (uint32_t)count;
}

/* Add as many slabs as fit into spare, up to count_max in all. Returns what is left of spare. */
static uint64_t slabs_grow(struct lh_budget *budget, uint64_t spare, uint32_t count_max)
{
    if (budget->slab_bytes == 0 || budget->slab_count >= count_max)
        return spare;
    uint64_t more = lh_min_u64(spare / budget->slab_bytes, count_max - budget->slab_count);
    budget->slab_count += (uint32_t)more;
    return spare - more * budget->slab_bytes;
}

static uint64_t whole_chunks(const struct lh_budget *budget, const struct needs *needs)
{
    return lh_div_ceil(needs->whole_elements_max, budget->chunk_elements);
}

/* The slabs that keep no chunk. */
static uint32_t pipeline_of(const struct lh_budget *budget, const struct needs *needs,
                            uint64_t host_bytes)
{
    uint64_t affordable =
        host_bytes / LH_BUDGET_PIPELINE_DIVISOR / lh_max_u64(budget->slab_bytes, 1);
    uint64_t count = lh_min_u64(affordable, LH_BUDGET_SLAB_COUNT_PIPELINE_MAX);
    count = lh_max_u64(count, LH_BUDGET_SLAB_COUNT_PIPELINE);
    return (uint32_t)lh_max_u64(count, whole_chunks(budget, needs));
}

static void parts_start(struct lh_budget *budget, const struct needs *needs,
                        uint64_t bookkeeping_bytes)
{
    uint64_t others = needs->largest_bytes + 2 * needs->second_bytes;
    uint64_t region = needs->always_bytes + lh_max_u64(others, needs->apart_bytes_max);
    budget->region_bytes = lh_min_u64(region, needs->all_bytes);
    budget->gradient_waiting_bytes = needs->waiting_memory_bytes;
    budget->gradient_bytes = needs->gradient_bytes_max + needs->waiting_memory_bytes;
    budget->bookkeeping_bytes = bookkeeping_bytes;
    uint64_t of_blocks = budget->chunk_elements / BLOCK_ELEMENTS * needs->slab_bytes_per_block;
    budget->slab_bytes = lh_align_up(
        budget->chunk_elements * needs->slab_bytes_per_element + of_blocks, LH_BLOCK_BYTES);
    uint64_t slabs = lh_max_u64(whole_chunks(budget, needs), LH_BUDGET_SLAB_COUNT_MIN);
    budget->slab_count = (uint32_t)lh_min_u64(budget->chunk_count, slabs);
    budget->host_bytes_min = budget->region_bytes + budget->slab_count * budget->slab_bytes +
                             budget->gradient_bytes + budget->bookkeeping_bytes;
}

static int budget_try(const struct lh_budget_unit *units, uint32_t unit_count, uint64_t host_bytes,
                      uint64_t bookkeeping_bytes, uint64_t chunk_elements_max,
                      struct lh_budget *budget, struct lh_error *err)
{
    memset(budget, 0, sizeof(*budget));
    uint64_t elements_max = 1;
    for (uint32_t i = 0; i < unit_count; i++)
        elements_max = lh_max_u64(elements_max, units[i].elements);
    budget->chunk_elements = lh_min_u64(chunk_elements_max, elements_max);
    struct needs needs = needs_sum(units, unit_count, budget->chunk_elements);
    chunks_count(units, unit_count, budget);
    parts_start(budget, &needs, bookkeeping_bytes);
    uint64_t slabs_full = slab_count_max(budget, LH_BUDGET_SLAB_COUNT_PIPELINE_MAX);
    budget->host_bytes_full = needs.all_bytes + slabs_full * budget->slab_bytes +
                              needs.gradient_bytes_max + needs.waiting_bytes +
                              needs.waiting_free_bytes / FREE_DIVISOR + needs.trainable_bytes_max +
                              budget->bookkeeping_bytes;
    if (host_bytes < budget->host_bytes_min)
        return lh_error_set(
            err, -ENOSPC,
            "host_bytes %" PRIu64 " is too small: this model needs at least %" PRIu64
            " (parameters %" PRIu64 ", %u slabs of %" PRIu64 ", gradients %" PRIu64
            ", bookkeeping %" PRIu64 ")",
            host_bytes, budget->host_bytes_min, budget->region_bytes, budget->slab_count,
            budget->slab_bytes, budget->gradient_bytes, budget->bookkeeping_bytes);

    uint64_t spare = host_bytes - budget->host_bytes_min;
    budget->gradient_ahead_bytes = lh_min_u64(spare, needs.trainable_bytes_max);
    budget->gradient_bytes += budget->gradient_ahead_bytes;
    spare -= budget->gradient_ahead_bytes;
    uint32_t pipeline = pipeline_of(budget, &needs, host_bytes);
    uint32_t slabs_most = slab_count_max(budget, pipeline);
    spare = slabs_grow(budget, spare, pipeline < slabs_most ? pipeline : slabs_most);
    uint64_t waiting_more = lh_min_u64(spare, needs.waiting_bytes - needs.waiting_memory_bytes);
    budget->gradient_waiting_bytes += waiting_more;
    budget->gradient_bytes += waiting_more;
    spare -= waiting_more;
    /* Gradients that need not wait come after the parameters of two units. */
    uint64_t reserved = lh_min_u64(2 * needs.second_bytes, needs.all_bytes - budget->region_bytes);
    uint64_t free_more = spare - lh_min_u64(spare, reserved);
    free_more = lh_min_u64(free_more, needs.waiting_free_bytes / FREE_DIVISOR);
    budget->gradient_waiting_bytes += free_more;
    budget->gradient_bytes += free_more;
    spare -= free_more;
    /* Adapters: their states are few, and would be written in each step; the base is only read. */
    if (slabs_most * budget->slab_bytes <= needs.frozen_bytes / ADAPTERS_DIVISOR) {
        reserved = lh_min_u64(spare, reserved);
        spare = slabs_grow(budget, spare - reserved, slabs_most);
        if (budget->slab_bytes > 0 && budget->slab_count < slabs_most)
            spare = 0; /* too little for a slab: it waits for more */
        spare += reserved;
    }
    uint64_t region_more =
        lh_min_u64(spare, needs.all_bytes - budget->region_bytes) / LH_BLOCK_BYTES * LH_BLOCK_BYTES;
    budget->region_bytes += region_more;
    spare -= region_more;
    (void)slabs_grow(budget, spare, slabs_most);

    /* Gradients that are spilled to SSD and read back pass through slabs that keep no chunk. */
    bool has_spills = budget->gradient_waiting_bytes < needs.waiting_bytes;
    if (budget->slab_count == budget->chunk_count && !has_spills)
        budget->kept_chunk_count = budget->state_chunk_count;
    else if (budget->slab_count > pipeline)
        budget->kept_chunk_count =
            (uint32_t)lh_min_u64(budget->slab_count - pipeline, budget->state_chunk_count);
    budget->host_bytes = budget->region_bytes + budget->slab_count * budget->slab_bytes +
                         budget->gradient_bytes + budget->bookkeeping_bytes;
    LH_ASSERT(budget->host_bytes <= host_bytes);
    return 0;
}

int lh_budget_make(const struct lh_budget_unit *units, uint32_t unit_count, uint64_t host_bytes,
                   uint64_t bookkeeping_bytes, struct lh_budget *budget, struct lh_error *err)
{
    struct lh_budget large;
    struct lh_budget small;
    struct lh_error large_err = {0};
    struct lh_error small_err = {0};
    memset(budget, 0, sizeof(*budget));
    if (unit_count == 0)
        return lh_error_set(err, -EINVAL, "no units to plan for");
    int large_rc = budget_try(units, unit_count, host_bytes, bookkeeping_bytes,
                              LH_BUDGET_CHUNK_ELEMENTS_MAX, &large, &large_err);
    uint64_t small_elements = LH_BUDGET_CHUNK_ELEMENTS_MIN;
    for (uint32_t i = 0; i < unit_count; i++)
        if (units[i].state_bytes_per_block > 0)
            small_elements = LH_BUDGET_CHUNK_ELEMENTS_MAX;
    int small_rc = budget_try(units, unit_count, host_bytes, bookkeeping_bytes, small_elements,
                              &small, &small_err);
    bool is_full = large_rc == 0 && (large.slab_count >= LH_BUDGET_SLAB_COUNT_PIPELINE ||
                                     large.slab_count == large.chunk_count);
    /* Fewer chunks need fewer slabs, so neither chunk size always has the smaller minimum. */
    bool is_large_least = large.host_bytes_min <= small.host_bytes_min;
    uint64_t least = is_large_least ? large.host_bytes_min : small.host_bytes_min;
    *budget = is_full || small_rc < 0 ? large : small;
    budget->host_bytes_min = least;
    if (large_rc == 0 || small_rc == 0)
        return 0;
    if (err)
        *err = is_large_least ? large_err : small_err;
    return -ENOSPC;
}
