/*
 * The policy auto: a search for the choice with the least cost, which is mainly the step's length.
 *
 * A choice is generated from a few numbers:
 *
 *      saved      how many layers are not recomputed: the first in LoHan's order of benefit
 *      deferred   how many updates run ahead of forward, not in backward, spread over the blocks
 *      share      the share of main memory that swapped activations may take
 *      held       the share of the remaining memory that states may take: a commit writes them
 *      kept       the share of GPU memory that activations may take that stay there
 *
 * The rest follows from these numbers. The last of the saved layers stay on the GPU, which needs
 * them soonest, while activations in transit have room, too. The states of the first blocks, which
 * are updated last and needed first, stay in main memory: first P16, because each byte saves three
 * bytes of traffic, then the other states, where each byte saves two. Masters are the model's
 * residuals (12P).
 *
 * From several starts, each number is moved up and down by a step that is halved when no move
 * helps. For small models, where rounding to whole layers matters most, layers and blocks are then
 * changed one by one, and two or three at a time.
 *
 * Source: LoHan IV-D (the order, and the starting point).
 */
#include <math.h>

#include "plan/policy.h"

#define SHARE_MAX 32
/* Layers and blocks are changed one by one if there are no more than this many in all. */
#define SINGLE_COUNT_MAX 16

/* The starts of the search are all combinations of this many values for each of the numbers. */
static const uint32_t start_counts[] = {3, 3, 2, 2, 2};
static const uint32_t start_counts_small[] = {2, 2, 2, 2, 1};
/* Weights fitted to the engine's gains and losses in the simulator: 13B, batch 32, 1 to 12 SSDs. */
#define SSD_WEIGHT 0.005
#define SWAPPED_SSD_WEIGHT 0.1
#define SWAPPED_LINK_WEIGHT 0.11
#define KEPT_WEIGHT 0.8
#define LATE_WEIGHT 100.0
/* A factor that tolerates the rounding errors of the same sums in a different order. */
#define ROUNDED (1 + 1e-9)

enum number {
    NUMBER_SAVED = 0,
    NUMBER_DEFERRED,
    NUMBER_SHARE,
    NUMBER_HELD,
    NUMBER_KEPT,
    NUMBER_COUNT
};

struct search {
    struct lh_plan_ask *ask;
    struct lh_plan_choice *best;
    double best_s;
    double limit_s;             /* no result may be slower than the choice that the search got */
    struct lh_plan_choice here; /* the best of one start */
    double here_s;
    struct lh_plan_choice work;
    uint32_t saved_min;
    uint32_t held_max;
};

static bool is_spread(uint32_t index, uint32_t part, uint32_t whole)
{
    return (uint64_t)(index + 1) * part / whole > (uint64_t)index * part / whole;
}

/* Keep as many states of the first blocks in main memory as fit into host_bytes. */
static void states_hold(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                        uint64_t host_bytes)
{
    for (uint32_t i = 0; i < model->block_count; i++) {
        uint64_t bytes = lh_plan_block_param_count(model, i) * model->param_bytes +
                         lh_plan_block_frozen_bytes(model, i);
        choice->blocks[i].has_host_p16 = bytes <= host_bytes;
        host_bytes -= bytes <= host_bytes ? bytes : 0;
    }
    for (uint32_t i = 0; i < model->block_count; i++) {
        struct lh_plan_block_choice *block = &choice->blocks[i];
        uint64_t count = lh_plan_block_param_count(model, i);
        uint64_t moment_bytes = lh_plan_block_moment_bytes(model, i);
        block->has_host_moments = moment_bytes <= host_bytes;
        host_bytes -= block->has_host_moments ? moment_bytes : 0;
        block->has_host_master = count * choice->master_bytes <= host_bytes;
        host_bytes -= block->has_host_master ? count * choice->master_bytes : 0;
    }
}

/* Generate work from numbers. Returns false if gradients of deferred updates do not fit. */
static bool choice_make(struct search *search, const uint32_t *numbers)
{
    const struct lh_plan_ask *ask = search->ask;
    const struct lh_plan_model *model = ask->model;
    struct lh_plan_choice *work = &search->work;
    uint64_t host_bytes = ask->host_bytes;
    for (uint32_t i = 0; i < model->block_count; i++) {
        work->blocks[i] = (struct lh_plan_block_choice){
            .is_deferred = is_spread(i, numbers[NUMBER_DEFERRED], model->block_count)};
        if (!work->blocks[i].is_deferred)
            continue;
        uint64_t bytes = lh_plan_block_param_count(model, i) * model->param_bytes;
        if (bytes > host_bytes)
            return false;
        host_bytes -= bytes;
    }
    for (uint32_t i = 0; i < model->layer_count; i++) {
        bool is_empty = model->layers[ask->order[i]].activation_bytes == 0;
        enum lh_plan_fate fate =
            i < numbers[NUMBER_SAVED] ? LH_PLAN_FATE_SWAP_SSD : LH_PLAN_FATE_RECOMPUTE;
        work->fates[ask->order[i]] = is_empty ? LH_PLAN_FATE_KEEP : (uint8_t)fate;
    }
    lh_plan_last_keep(work, model, ask->gpu_bytes / SHARE_MAX * numbers[NUMBER_KEPT]);
    uint64_t saved_bytes = host_bytes / SHARE_MAX * numbers[NUMBER_SHARE];
    host_bytes -= saved_bytes;
    host_bytes += lh_plan_places_fill(work, model, saved_bytes);
    states_hold(work, model, host_bytes / SHARE_MAX * numbers[NUMBER_HELD]);
    return true;
}

double lh_plan_auto_cost_s(const struct lh_plan_step *step, const struct lh_plan_machine *machine)
{
    double out = (double)machine->link_out_bytes_per_s;
    double in = (double)machine->link_in_bytes_per_s;
    double read = (double)lh_plan_machine_read_bytes_per_s(machine);
    double write = (double)lh_plan_machine_write_bytes_per_s(machine);
    double link_s = (double)step->swapped_bytes / out + (double)step->swapped_bytes / in;
    double ssd_s = (double)step->swapped_ssd_bytes / write + (double)step->swapped_ssd_bytes / read;
    return step->iteration_s + SSD_WEIGHT * step->busy_s[LH_PLAN_RESOURCE_SSD] +
           SWAPPED_SSD_WEIGHT * ssd_s + SWAPPED_LINK_WEIGHT * link_s +
           KEPT_WEIGHT * (double)step->kept_bytes / out;
}

/* The cost of work; infinite if it does not fit. */
static double work_s(struct search *search)
{
    struct lh_plan_step step = lh_plan_timeline_step(&search->ask->timeline, &search->work);
    if (lh_plan_step_check(&step, search->ask->machine, NULL) < 0)
        return INFINITY;
    /* The search may pass through choices slower than limit_s, but must not end there. */
    double late_s = isinf(search->limit_s) ? 0 : fmax(step.iteration_s - search->limit_s, 0);
    return lh_plan_auto_cost_s(&step, search->ask->machine) + LATE_WEIGHT * late_s;
}

static double numbers_s(struct search *search, const uint32_t *numbers)
{
    return choice_make(search, numbers) ? work_s(search) : INFINITY;
}

static uint32_t deferred_max(const struct lh_plan_ask *ask)
{
    return ask->is_eager ? 0 : ask->model->block_count;
}

static uint32_t kept_max(const struct lh_plan_ask *ask)
{
    return ask->is_moved ? 0 : SHARE_MAX;
}

/* Move one number up or down by step. Returns true if that lowered the cost. */
static bool number_move(struct search *search, uint32_t *numbers, int which, uint32_t step,
                        double *here_s)
{
    const uint32_t min[NUMBER_COUNT] = {search->saved_min};
    const uint32_t max[] = {search->ask->model->layer_count, deferred_max(search->ask), SHARE_MAX,
                            search->held_max, kept_max(search->ask)};
    uint32_t before = numbers[which];
    uint32_t up = lh_min_u64(before + (uint64_t)step, max[which]) & UINT32_MAX;
    uint32_t down = before >= min[which] + step ? before - step : min[which];
    const uint32_t moves[] = {up, down};
    for (size_t i = 0; i < LH_COUNT_OF(moves); i++) {
        numbers[which] = moves[i];
        double moved_s = moves[i] != before ? numbers_s(search, numbers) : INFINITY;
        if (moved_s < *here_s) {
            *here_s = moved_s;
            return true;
        }
    }
    numbers[which] = before;
    return false;
}

static void numbers_search(struct search *search, uint32_t *numbers)
{
    /* The first held state incurs the cost of commits: holding none is a separate case. */
    search->held_max = numbers[NUMBER_HELD] > 0 ? SHARE_MAX : 0;
    double here_s = numbers_s(search, numbers);
    uint32_t step = search->ask->model->layer_count;
    while (step > 0) {
        bool is_moved = false;
        for (int which = 0; which < NUMBER_COUNT; which++)
            is_moved |= number_move(search, numbers, which, step, &here_s);
        if (!is_moved)
            step /= 2;
    }
    search->here_s = numbers_s(search, numbers);
    lh_plan_choice_copy(&search->here, &search->work);
}

/* Single moves: first changes of one layer (its fate), then of one block (update, held states). */
#define BLOCK_MOVE_COUNT 10
#define MOVE_COUNT_MAX 3

static uint32_t moves_count(const struct lh_plan_model *model)
{
    return model->layer_count * LH_PLAN_FATE_COUNT + model->block_count * BLOCK_MOVE_COUNT;
}

/* Set a layer's new fate. Returns false if that would recompute an inter-block layer. */
static bool layer_move(const struct lh_plan_layer *layer, uint32_t way, uint8_t *fate)
{
    *fate = (uint8_t)way;
    return way != LH_PLAN_FATE_RECOMPUTE || !layer->is_inter_block;
}

static struct lh_plan_block_choice block_move(uint32_t way)
{
    uint32_t held = way / 2;
    return (struct lh_plan_block_choice){
        .is_deferred = way % 2 == 1,
        .has_host_p16 = held == 1 || held >= 3,
        .has_host_moments = held >= 2,
        .has_host_master = held == 2 || held == 4,
    };
}

static bool moves_try(struct search *search, uint32_t move, int count);

/* Evaluate work after a move, then with up to count further moves. */
static bool moved_try(struct search *search, uint32_t move, int count)
{
    bool is_shorter = false;
    double moved_s = work_s(search);
    if (moved_s < search->here_s) {
        search->here_s = moved_s;
        lh_plan_choice_copy(&search->here, &search->work);
        is_shorter = true;
    }
    return (count > 0 && moves_try(search, move + 1, count)) || is_shorter;
}

/*
 * Change work by up to count moves, starting with move. Returns true if here was improved; work is
 * restored.
 */
static bool moves_try(struct search *search, uint32_t move, int count)
{
    const struct lh_plan_model *model = search->ask->model;
    struct lh_plan_choice *work = &search->work;
    uint32_t layer_move_count = model->layer_count * LH_PLAN_FATE_COUNT;
    bool is_shorter = false;
    for (; move < moves_count(model); move++) {
        if (move < layer_move_count) {
            uint32_t layer = move / LH_PLAN_FATE_COUNT;
            uint8_t before = work->fates[layer];
            if (layer_move(&model->layers[layer], move % LH_PLAN_FATE_COUNT, &work->fates[layer]))
                is_shorter |= moved_try(search, move, count - 1);
            work->fates[layer] = before;
        } else {
            struct lh_plan_block_choice *block =
                &work->blocks[(move - layer_move_count) / BLOCK_MOVE_COUNT];
            struct lh_plan_block_choice before = *block;
            *block = block_move((move - layer_move_count) % BLOCK_MOVE_COUNT);
            is_shorter |= moved_try(search, move, count - 1);
            *block = before;
        }
    }
    return is_shorter;
}

/* Improve here until no combination of up to count moves helps. */
static void moves_search(struct search *search, int count)
{
    do
        lh_plan_choice_copy(&search->work, &search->here);
    while (moves_try(search, 0, count));
}

static void here_take(struct search *search)
{
    if (search->here_s >= search->best_s)
        return;
    struct lh_plan_step step = lh_plan_timeline_step(&search->ask->timeline, &search->here);
    if (step.iteration_s > search->limit_s)
        return;
    search->best_s = search->here_s;
    lh_plan_choice_copy(search->best, &search->here);
}

/* Improve the best choice by up to count moves at a time. */
static void best_move(struct search *search, int count)
{
    search->here_s = search->best_s;
    lh_plan_choice_copy(&search->here, search->best);
    moves_search(search, count);
    here_take(search);
}

static void search_run(struct search *search)
{
    const struct lh_plan_model *model = search->ask->model;
    const uint32_t *order = search->ask->order;
    search->saved_min = 0;
    while (search->saved_min < model->layer_count &&
           (model->layers[order[search->saved_min]].is_inter_block ||
            model->layers[order[search->saved_min]].activation_bytes == 0))
        search->saved_min++;
    uint32_t saved_more = model->layer_count - search->saved_min;
    bool is_whole = !search->ask->is_eager && !search->ask->is_ssd && !search->ask->is_moved;
    bool has_moves = is_whole && model->layer_count + model->block_count <= SINGLE_COUNT_MAX;
    const uint32_t *counts = has_moves ? start_counts_small : start_counts;
    const uint32_t ends[NUMBER_COUNT] = {saved_more, deferred_max(search->ask), SHARE_MAX,
                                         search->ask->is_ssd ? 0 : SHARE_MAX,
                                         kept_max(search->ask)};
    if (has_moves && isfinite(search->best_s))
        best_move(search, 2);
    uint32_t start_count = 1;
    for (int which = 0; which < NUMBER_COUNT; which++)
        start_count *= counts[which];
    for (uint32_t i = 0; i < start_count; i++) {
        uint32_t numbers[NUMBER_COUNT];
        uint32_t digits = i;
        for (int which = 0; which < NUMBER_COUNT; which++) {
            uint32_t last = counts[which] - 1;
            numbers[which] = last > 0 ? ends[which] * (digits % counts[which]) / last : ends[which];
            digits /= counts[which];
        }
        numbers[NUMBER_SAVED] += search->saved_min;
        numbers_search(search, numbers);
        if (has_moves)
            moves_search(search, 2);
        here_take(search);
    }
    if (!has_moves || isinf(search->best_s))
        return;
    best_move(search, MOVE_COUNT_MAX);
}

int lh_plan_auto(struct lh_plan_choice *choice, double limit_s, struct lh_plan_ask *ask,
                 struct lh_error *err)
{
    struct search search = {.ask = ask, .best = choice, .limit_s = limit_s * ROUNDED};
    LH_TRY(lh_plan_choice_init(&search.work, ask->model, ask->alloc, err));
    int rc = lh_plan_choice_init(&search.here, ask->model, ask->alloc, err);
    if (rc == 0) {
        search.work.master_bytes = ask->model->residual_bytes;
        search.best_s = INFINITY;
        if (isfinite(limit_s)) {
            struct lh_plan_step step = lh_plan_timeline_step(&ask->timeline, choice);
            search.best_s = lh_plan_auto_cost_s(&step, ask->machine);
        }
        search_run(&search);
        lh_plan_choice_deinit(&search.here, ask->alloc);
    }
    lh_plan_choice_deinit(&search.work, ask->alloc);
    return rc;
}
