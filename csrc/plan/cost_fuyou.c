#include "plan/cost_fuyou.h"

#include <math.h>

#define P16_BYTES 2
#define STATE_BYTES 12 /* P32, M and V */

static double seconds(uint64_t amount, uint64_t per_s)
{
    return (double)amount / (double)per_s;
}

struct lh_cost_fuyou lh_cost_fuyou_make(const struct lh_plan_machine *machine,
                                        const struct lh_plan_totals *totals)
{
    return (struct lh_cost_fuyou){
        .param_count = totals->param_count,
        .forward_flop = totals->forward_flop,
        .gpu_flop_per_s = machine->gpu_flop_per_s,
        .link_in_bytes_per_s = machine->link_in_bytes_per_s,
        .link_out_bytes_per_s = machine->link_out_bytes_per_s,
        .read_bytes_per_s = lh_plan_machine_read_bytes_per_s(machine),
        .write_bytes_per_s = lh_plan_machine_write_bytes_per_s(machine),
        .adam_params_per_s = machine->adam_params_per_s,
    };
}

double lh_cost_fuyou_iteration_s(double forward_s, double backward_s)
{
    return forward_s + backward_s;
}

double lh_cost_fuyou_forward_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes)
{
    double transfer_s = fmax(lh_cost_fuyou_forward_link_s(cost, swapped_bytes),
                             lh_cost_fuyou_forward_ssd_s(cost, swapped_bytes));
    return fmax(seconds(cost->forward_flop, cost->gpu_flop_per_s), transfer_s);
}

double lh_cost_fuyou_forward_link_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes)
{
    return fmax(seconds(P16_BYTES * cost->param_count, cost->link_in_bytes_per_s),
                seconds(swapped_bytes, cost->link_out_bytes_per_s));
}

double lh_cost_fuyou_forward_ssd_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes)
{
    return seconds(P16_BYTES * cost->param_count, cost->read_bytes_per_s) +
           seconds(swapped_bytes, cost->write_bytes_per_s);
}

double lh_cost_fuyou_backward_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes,
                                uint64_t recompute_flop)
{
    double compute_s = fmax(lh_cost_fuyou_backward_gpu_s(cost, recompute_flop),
                            seconds(cost->param_count, cost->adam_params_per_s));
    double transfer_s = fmax(lh_cost_fuyou_backward_link_s(cost, swapped_bytes),
                             lh_cost_fuyou_backward_ssd_s(cost, swapped_bytes));
    return fmax(compute_s, transfer_s);
}

double lh_cost_fuyou_backward_link_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes)
{
    uint64_t p16_bytes = P16_BYTES * cost->param_count;
    return fmax(seconds(p16_bytes, cost->link_out_bytes_per_s),
                seconds(p16_bytes + swapped_bytes, cost->link_in_bytes_per_s));
}

double lh_cost_fuyou_backward_ssd_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes)
{
    uint64_t all_bytes = (STATE_BYTES + P16_BYTES) * cost->param_count;
    return seconds(all_bytes + swapped_bytes, cost->read_bytes_per_s) +
           seconds(all_bytes, cost->write_bytes_per_s);
}

double lh_cost_fuyou_backward_gpu_s(const struct lh_cost_fuyou *cost, uint64_t recompute_flop)
{
    return 2 * seconds(cost->forward_flop, cost->gpu_flop_per_s) +
           seconds(recompute_flop, cost->gpu_flop_per_s);
}

double lh_cost_fuyou_gain_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes,
                            uint64_t recompute_flop)
{
    return lh_cost_fuyou_backward_gpu_s(cost, recompute_flop) -
           fmax(lh_cost_fuyou_backward_link_s(cost, swapped_bytes),
                lh_cost_fuyou_backward_ssd_s(cost, swapped_bytes));
}

uint64_t lh_cost_fuyou_swapped_bytes_max(const struct lh_cost_fuyou *cost, double gain_s)
{
    uint64_t link = lh_min_u64(cost->link_in_bytes_per_s, cost->link_out_bytes_per_s);
    uint64_t ssd = lh_min_u64(cost->read_bytes_per_s, cost->write_bytes_per_s);
    double bytes = gain_s * (double)lh_min_u64(link, ssd);
    if (bytes <= 0)
        return 0;
    return bytes < (double)INT64_MAX ? (uint64_t)bytes : INT64_MAX;
}

bool lh_cost_fuyou_is_swappable(uint64_t start_bytes, uint64_t swapped_bytes,
                                uint64_t swapped_bytes_max)
{
    return swapped_bytes == start_bytes ||
           (swapped_bytes > start_bytes && swapped_bytes <= swapped_bytes_max);
}

double lh_cost_fuyou_benefit(const struct lh_cost_fuyou *cost, const struct lh_plan_layer *layer)
{
    if (layer->activation_bytes == 0)
        return INFINITY;
    return (double)layer->forward_flop /
           seconds(layer->activation_bytes, cost->link_out_bytes_per_s);
}

/* Whether a layer is always swapped: inter-block layers, and layers that save nothing. */
static bool is_start(const struct lh_plan_layer *layer)
{
    return layer->is_inter_block || layer->activation_bytes == 0;
}

struct walk {
    const struct lh_cost_fuyou *cost;
    const struct lh_plan_model *model;
    bool *is_swapped;
    double high_benefit;
    uint32_t taken;
};

/*
 * Take up to take_max layers, from the first queue and then from the second. Returns the best of
 * the swaps tried; walk->taken is the number of layers that this swap took.
 */
static struct lh_cost_fuyou_swap queues_walk(struct walk *walk, struct lh_cost_fuyou_swap start,
                                             uint32_t take_max)
{
    struct lh_cost_fuyou_swap here = start;
    struct lh_cost_fuyou_swap best = start;
    uint32_t count = 0;
    walk->taken = 0;
    for (int queue = 0; queue < 2; queue++) {
        for (uint32_t i = 0; i < walk->model->layer_count && count < take_max; i++) {
            const struct lh_plan_layer *layer = &walk->model->layers[i];
            bool is_high = lh_cost_fuyou_benefit(walk->cost, layer) >= walk->high_benefit;
            if (is_start(layer) || is_high != (queue == 0))
                continue;
            count++;
            walk->is_swapped[i] = true;
            here.swapped_bytes += layer->activation_bytes;
            here.recompute_flop -= layer->forward_flop;
            here.iteration_s = lh_cost_fuyou_iteration_s(
                lh_cost_fuyou_forward_s(walk->cost, here.swapped_bytes),
                lh_cost_fuyou_backward_s(walk->cost, here.swapped_bytes, here.recompute_flop));
            if (here.iteration_s < best.iteration_s &&
                lh_cost_fuyou_is_swappable(start.swapped_bytes, here.swapped_bytes,
                                           start.swapped_bytes_max)) {
                best = here;
                walk->taken = count;
            }
        }
    }
    return best;
}

struct lh_cost_fuyou_swap lh_cost_fuyou_swap(const struct lh_cost_fuyou *cost,
                                             const struct lh_plan_model *model, bool *is_swapped)
{
    struct walk walk = {.cost = cost, .model = model, .is_swapped = is_swapped};
    struct lh_cost_fuyou_swap start = {.recompute_flop = cost->forward_flop};
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct lh_plan_layer *layer = &model->layers[i];
        if (layer->activation_bytes > 0)
            walk.high_benefit = fmax(walk.high_benefit, lh_cost_fuyou_benefit(cost, layer) / 2);
        if (!is_start(layer))
            continue;
        start.swapped_bytes += layer->activation_bytes;
        start.recompute_flop -= layer->forward_flop;
    }
    start.iteration_s = lh_cost_fuyou_iteration_s(
        lh_cost_fuyou_forward_s(cost, start.swapped_bytes),
        lh_cost_fuyou_backward_s(cost, start.swapped_bytes, start.recompute_flop));
    start.swapped_bytes_max = lh_cost_fuyou_swapped_bytes_max(
        cost, lh_cost_fuyou_gain_s(cost, start.swapped_bytes, start.recompute_flop));
    struct lh_cost_fuyou_swap best = queues_walk(&walk, start, UINT32_MAX);
    for (uint32_t i = 0; i < model->layer_count; i++)
        is_swapped[i] = is_start(&model->layers[i]);
    (void)queues_walk(&walk, start, walk.taken);
    return best;
}
