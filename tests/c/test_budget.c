/* Test the division of main memory: sums, the minimum, and that more memory is never worse. */
#include "lh_test.h"
#include "plan/budget.h"

#define UNIT_COUNT_MAX 12
#define BOOKKEEPING_BYTES (UINT64_C(3) << 20)

struct model {
    struct lh_budget_unit units[UNIT_COUNT_MAX];
    uint32_t count;
    uint64_t bytes;
    uint64_t largest_two_bytes; /* of the units that are not always in memory */
    uint64_t second_bytes;
    uint64_t always_bytes;
    /* the same maximum applies to a unit's gradients and to its parameters */
    uint64_t gradient_bytes_max;
};

static struct lh_budget_unit unit_random(uint64_t *seed)
{
    bool is_trainable = lh_test_below(seed, 4) > 0;
    bool is_bf16 = lh_test_below(seed, 2) > 0;
    uint64_t scale = lh_test_below(seed, 3) == 0 ? 4000 : 40;
    uint64_t elements = 2048 * (1 + lh_test_below(seed, scale));
    uint64_t bytes = elements * (is_bf16 ? 2 : 4);
    return (struct lh_budget_unit){
        .bytes = bytes,
        .elements = is_trainable ? elements : 0,
        .gradient_bytes = is_trainable ? bytes : 0,
        .state_bytes_per_element = is_trainable ? (is_bf16 ? 10 : 8) : 0,
        .always = lh_test_below(seed, 6) == 0,
    };
}

static struct model model_random(uint64_t *seed)
{
    struct model model = {.count = (uint32_t)(1 + lh_test_below(seed, UNIT_COUNT_MAX))};
    uint64_t first = 0;
    uint64_t second = 0;
    for (uint32_t i = 0; i < model.count; i++) {
        struct lh_budget_unit unit = unit_random(seed);
        model.units[i] = unit;
        model.bytes += unit.bytes;
        model.gradient_bytes_max = lh_max_u64(model.gradient_bytes_max, unit.gradient_bytes);
        if (unit.always) {
            model.always_bytes += unit.bytes;
            continue;
        }
        second = lh_max_u64(second, lh_min_u64(first, unit.bytes));
        first = lh_max_u64(first, unit.bytes);
    }
    model.largest_two_bytes = first + second;
    model.second_bytes = second;
    return model;
}

static int make(const struct model *model, uint64_t host_bytes, struct lh_budget *budget,
                struct lh_error *err)
{
    return lh_budget_make(model->units, model->count, host_bytes, BOOKKEEPING_BYTES, budget, err);
}

static void check_parts(const struct model *model, const struct lh_budget *budget,
                        uint64_t host_bytes)
{
    uint64_t slabs_bytes = budget->slab_count * budget->slab_bytes;
    LH_CHECK(budget->host_bytes == budget->region_bytes + slabs_bytes + budget->gradient_bytes +
                                       budget->bookkeeping_bytes);
    LH_CHECK(budget->host_bytes <= host_bytes);
    LH_CHECK(budget->host_bytes_min <= budget->host_bytes);
    LH_CHECK(budget->region_bytes >= model->always_bytes + model->largest_two_bytes);
    LH_CHECK(budget->region_bytes <= model->bytes);
    LH_CHECK(lh_is_aligned(budget->region_bytes, LH_BLOCK_BYTES));
    LH_CHECK(lh_is_aligned(budget->slab_bytes, LH_BLOCK_BYTES));
    LH_CHECK(budget->gradient_bytes == model->gradient_bytes_max + budget->gradient_ahead_bytes);
    LH_CHECK(budget->gradient_ahead_bytes <= model->gradient_bytes_max);
    LH_CHECK(budget->gradient_ahead_bytes == model->gradient_bytes_max ||
             budget->slab_count <= LH_BUDGET_SLAB_COUNT_MIN);
    LH_CHECK(budget->bookkeeping_bytes == BOOKKEEPING_BYTES);
    uint64_t chunk_count = 0;
    for (uint32_t i = 0; i < model->count; i++) {
        const struct lh_budget_unit *unit = &model->units[i];
        chunk_count += lh_div_ceil(unit->elements, budget->chunk_elements);
        uint64_t elements = lh_min_u64(unit->elements, budget->chunk_elements);
        LH_CHECK(budget->slab_bytes >= elements * unit->state_bytes_per_element);
    }
    LH_CHECK(budget->chunk_count == chunk_count);
    LH_CHECK(budget->slab_count <= budget->chunk_count);
    LH_CHECK(budget->slab_count >= lh_min_u64(LH_BUDGET_SLAB_COUNT_MIN, chunk_count));
    LH_CHECK(budget->kept_chunk_count <= budget->slab_count);
    /* Either every chunk keeps its slab, or a whole pipeline is left for the others. */
    LH_CHECK(budget->kept_chunk_count == 0 || budget->kept_chunk_count == chunk_count ||
             budget->slab_count - budget->kept_chunk_count >= LH_BUDGET_SLAB_COUNT_PIPELINE);
}

static void test_sums(void)
{
    lh_test_name(
        "the parts add up to what is used, at most what was given, and all that must fits");
    uint64_t seed = 1;
    for (int round = 0; round < 3000; round++) {
        struct model model = model_random(&seed);
        struct lh_budget budget;
        LH_CHECK(make(&model, UINT64_MAX / 4, &budget, NULL) == 0);
        uint64_t full = budget.host_bytes_full;
        uint64_t least = budget.host_bytes_min;
        check_parts(&model, &budget, UINT64_MAX / 4);
        for (int i = 0; i < 8; i++) {
            uint64_t host_bytes = least + lh_test_below(&seed, full - least + 1);
            LH_CHECK(make(&model, host_bytes, &budget, NULL) == 0);
            check_parts(&model, &budget, host_bytes);
            LH_CHECK(budget.host_bytes_min == least);
        }
    }
}

static void test_minimum(void)
{
    lh_test_name("the minimum is accepted, and a byte less is refused with both numbers");
    uint64_t seed = 2;
    for (int round = 0; round < 3000; round++) {
        struct model model = model_random(&seed);
        struct lh_error err = {0};
        struct lh_budget budget;
        char number[32];
        LH_CHECK(make(&model, 1, &budget, &err) == -ENOSPC && err.code == -ENOSPC);
        uint64_t least = budget.host_bytes_min;
        LH_CHECK(make(&model, least, &budget, NULL) == 0);
        check_parts(&model, &budget, least);
        LH_CHECK(budget.host_bytes == least && budget.host_bytes_min == least);
        LH_CHECK(make(&model, least - 1, &budget, &err) == -ENOSPC);
        LH_CHECK(budget.host_bytes_min == least);
        snprintf(number, sizeof(number), "%" PRIu64 " ", least - 1);
        LH_CHECK(strstr(err.message, number) != NULL);
        snprintf(number, sizeof(number), "at least %" PRIu64 " ", least);
        LH_CHECK(strstr(err.message, number) != NULL);
    }
}

static void test_monotone(void)
{
    lh_test_name(
        "more memory: more slabs, then more parameters, then more kept; never less of one");
    uint64_t seed = 3;
    for (int round = 0; round < 1000; round++) {
        struct model model = model_random(&seed);
        struct lh_budget before;
        struct lh_budget budget;
        LH_CHECK(make(&model, UINT64_MAX / 4, &budget, NULL) == 0);
        uint64_t full = budget.host_bytes_full;
        uint64_t host_bytes = budget.host_bytes_min;
        LH_CHECK(make(&model, host_bytes, &before, NULL) == 0);
        for (int i = 0; i < 40; i++) {
            host_bytes += lh_test_below(&seed, (full - budget.host_bytes_min) / 16 + 2);
            LH_CHECK(make(&model, host_bytes, &budget, NULL) == 0);
            LH_CHECK(budget.chunk_elements >= before.chunk_elements);
            LH_CHECK(budget.slab_count * budget.slab_bytes >=
                     lh_min_u64(before.slab_count, LH_BUDGET_SLAB_COUNT_PIPELINE) *
                         before.slab_bytes);
            if (budget.chunk_elements == before.chunk_elements) {
                /* Before there is a pipeline, what is too little for a slab waits here for more. */
                bool has_pipeline = before.slab_count >=
                                    lh_min_u64(before.chunk_count, LH_BUDGET_SLAB_COUNT_PIPELINE);
                LH_CHECK(!has_pipeline || budget.region_bytes >= before.region_bytes);
                LH_CHECK(budget.slab_count >= before.slab_count);
                LH_CHECK(budget.kept_chunk_count >= before.kept_chunk_count);
                LH_CHECK(budget.host_bytes >= before.host_bytes);
            }
            before = budget;
        }
    }
}

static void test_full(void)
{
    lh_test_name("with the full budget everything stays, and more than that is not taken");
    uint64_t seed = 4;
    for (int round = 0; round < 1000; round++) {
        struct model model = model_random(&seed);
        struct lh_budget budget;
        LH_CHECK(make(&model, UINT64_MAX / 4, &budget, NULL) == 0);
        LH_CHECK(budget.host_bytes == budget.host_bytes_full);
        uint64_t full = budget.host_bytes_full;
        LH_CHECK(make(&model, full, &budget, NULL) == 0);
        LH_CHECK(budget.host_bytes == full && budget.region_bytes == model.bytes);
        LH_CHECK(budget.kept_chunk_count == budget.chunk_count);
    }
}

/* A base of frozen_count blocks with an adapter in each of two more units. */
static struct model model_adapted(uint32_t frozen_count)
{
    struct model model = {.count = frozen_count + 2};
    for (uint32_t i = 0; i < frozen_count; i++)
        model.units[i] = (struct lh_budget_unit){.bytes = UINT64_C(200) << 20};
    for (uint32_t i = frozen_count; i < model.count; i++)
        model.units[i] = (struct lh_budget_unit){.bytes = UINT64_C(14) << 20,
                                                 .elements = UINT64_C(7) << 20,
                                                 .gradient_bytes = UINT64_C(14) << 20,
                                                 .state_bytes_per_element = 10};
    return model;
}

static void test_adapters(void)
{
    lh_test_name("states of adapters stay in memory before frozen parameters, others after them");
    for (uint32_t frozen_count = 2; frozen_count <= UNIT_COUNT_MAX - 2; frozen_count += 4) {
        struct model model = model_adapted(frozen_count);
        struct lh_budget before;
        struct lh_budget budget;
        LH_CHECK(make(&model, UINT64_MAX / 4, &budget, NULL) == 0);
        uint64_t full = budget.host_bytes_full;
        uint64_t all_bytes = budget.region_bytes;
        bool are_few =
            8 * budget.slab_count * budget.slab_bytes <= frozen_count * model.units[0].bytes;
        LH_CHECK(are_few == (frozen_count > 2));
        LH_CHECK(make(&model, budget.host_bytes_min, &before, NULL) == 0);
        uint64_t least = before.host_bytes_min;
        uint64_t first_bytes = before.region_bytes + 2 * model.units[0].bytes;
        for (uint64_t i = 1; i <= 64; i++) {
            LH_CHECK(make(&model, least + (full - least) / 64 * i, &budget, NULL) == 0);
            bool has_pipeline = before.slab_count >= LH_BUDGET_SLAB_COUNT_PIPELINE &&
                                budget.chunk_elements == before.chunk_elements;
            LH_CHECK(!has_pipeline || budget.region_bytes >= before.region_bytes);
            bool is_kept = budget.kept_chunk_count == budget.state_chunk_count;
            LH_CHECK(!are_few || budget.region_bytes <= first_bytes || is_kept);
            LH_CHECK(are_few || budget.kept_chunk_count == 0 || budget.region_bytes == all_bytes);
            before = budget;
        }
    }
}

static void test_stateless(void)
{
    lh_test_name("parameters without states stay in memory that has room for them");
    for (uint32_t frozen_count = 0; frozen_count <= 10; frozen_count += 5) {
        struct model model = model_adapted(frozen_count);
        uint64_t all_bytes = 0;
        for (uint32_t i = 0; i < model.count; i++) {
            model.units[i].state_bytes_per_element = 0;
            all_bytes += model.units[i].bytes;
        }
        struct lh_budget budget;
        LH_CHECK(make(&model, UINT64_MAX / 4, &budget, NULL) == 0);
        LH_CHECK(budget.slab_bytes == 0);
        LH_CHECK(budget.host_bytes == budget.host_bytes_full && budget.region_bytes == all_bytes);
    }
}

static void test_edges(void)
{
    struct lh_error err = {0};
    struct lh_budget budget;
    lh_test_name("no units are refused; units without gradients need no slabs");
    LH_CHECK(lh_budget_make(NULL, 0, 1000, 0, &budget, &err) == -EINVAL);
    struct lh_budget_unit frozen = {.bytes = 3 * LH_BLOCK_BYTES};
    LH_CHECK(lh_budget_make(&frozen, 1, 3 * LH_BLOCK_BYTES, 0, &budget, &err) == 0);
    LH_CHECK(budget.slab_count == 0 && budget.chunk_count == 0 && budget.slab_bytes == 0);
    LH_CHECK(budget.host_bytes == budget.host_bytes_full);
}

/* Updates that may wait or not (schedule auto). */
static void test_at_will(void)
{
    lh_test_name("gradients that need not wait cost no minimum, get a third of theirs at most, and "
                 "leave room for two more units");
    uint64_t seed = 7;
    for (int round = 0; round < 3000; round++) {
        struct model model = model_random(&seed);
        struct lh_budget plain;
        struct lh_budget budget;
        uint64_t waiting_bytes = 0;
        LH_CHECK(make(&model, UINT64_MAX / 4, &plain, NULL) == 0);
        uint64_t least = plain.host_bytes_min;
        LH_CHECK(make(&model, least, &plain, NULL) == 0);
        uint64_t region_bytes =
            lh_min_u64(plain.region_bytes + 2 * model.second_bytes, model.bytes);
        for (uint32_t i = 0; i < model.count; i++) {
            struct lh_budget_unit *unit = &model.units[i];
            unit->waits_at_will = true;
            unit->waiting_bytes_per_element = unit->elements > 0 ? 2 : 0;
            waiting_bytes += 2 * unit->elements;
        }
        LH_CHECK(make(&model, least, &budget, NULL) == 0);
        LH_CHECK(budget.host_bytes_min == least && budget.gradient_waiting_bytes == 0);
        LH_CHECK(make(&model, UINT64_MAX / 4, &budget, NULL) == 0);
        uint64_t full = budget.host_bytes_full;
        for (int i = 0; i < 8; i++) {
            LH_CHECK(make(&model, least + lh_test_below(&seed, full - least + 1), &budget, NULL) ==
                     0);
            LH_CHECK(budget.gradient_waiting_bytes <= waiting_bytes / 3);
            LH_CHECK(budget.gradient_waiting_bytes == 0 ||
                     budget.region_bytes + LH_BLOCK_BYTES > region_bytes);
        }
        LH_CHECK(make(&model, full, &budget, NULL) == 0);
        LH_CHECK(budget.host_bytes == full && budget.gradient_waiting_bytes == waiting_bytes / 3);
        LH_CHECK(budget.region_bytes == model.bytes);
        LH_CHECK(budget.kept_chunk_count == budget.chunk_count);
    }
}

int main(void)
{
    test_at_will();
    test_sums();
    test_minimum();
    test_monotone();
    test_full();
    test_adapters();
    test_stateless();
    test_edges();
    return 0;
}
