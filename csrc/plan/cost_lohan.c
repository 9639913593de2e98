#include "plan/cost_lohan.h"

#include <math.h>
#include <stdlib.h>

#include "base/assert.h"

static double seconds(uint64_t amount, uint64_t per_s)
{
    return (double)amount / (double)per_s;
}

struct lh_cost_lohan lh_cost_lohan_make(const struct lh_plan_machine *machine,
                                        const struct lh_plan_totals *totals,
                                        uint64_t host_available_bytes)
{
    return (struct lh_cost_lohan){
        .param_count = totals->param_count,
        .forward_flop = totals->forward_flop,
        .frozen_bytes = totals->frozen_bytes,
        .frozen_read_bytes = totals->frozen_read_bytes,
        .frozen_flop = 2 * totals->forward_flop - totals->backward_flop,
        .moments_less_bytes = totals->moments_less_bytes,
        .gpu_flop_per_s = machine->gpu_flop_per_s,
        .link_in_bytes_per_s = machine->link_in_bytes_per_s,
        .link_out_bytes_per_s = machine->link_out_bytes_per_s,
        .read_bytes_per_s = lh_plan_machine_read_bytes_per_s(machine),
        .write_bytes_per_s = lh_plan_machine_write_bytes_per_s(machine),
        .host_available_bytes = host_available_bytes,
    };
}

double lh_cost_lohan_iteration_s(double forward_s, double backward_s)
{
    return forward_s + backward_s;
}

double lh_cost_lohan_stage_s(const struct lh_cost_stage *stage)
{
    return fmax(fmax(stage->gpu_s, stage->out_s), fmax(stage->in_s, stage->ssd_s));
}

uint64_t lh_cost_lohan_ssd_bytes(uint64_t swapped_bytes, uint64_t host_available_bytes)
{
    return swapped_bytes > host_available_bytes ? swapped_bytes - host_available_bytes : 0;
}

struct lh_cost_stage lh_cost_lohan_forward(const struct lh_cost_lohan *cost, uint64_t swapped_bytes)
{
    uint64_t p16_bytes = LH_COST_LOHAN_P16_BYTES * cost->param_count;
    uint64_t ssd_bytes = lh_cost_lohan_ssd_bytes(swapped_bytes, cost->host_available_bytes);
    return (struct lh_cost_stage){
        .gpu_s = seconds(cost->forward_flop, cost->gpu_flop_per_s),
        .out_s = seconds(swapped_bytes, cost->link_out_bytes_per_s),
        .in_s = seconds(p16_bytes + cost->frozen_bytes, cost->link_in_bytes_per_s),
        .ssd_s = seconds(p16_bytes + cost->frozen_read_bytes, cost->read_bytes_per_s) +
                 seconds(ssd_bytes, cost->write_bytes_per_s),
    };
}

struct lh_cost_stage lh_cost_lohan_backward(const struct lh_cost_lohan *cost,
                                            uint64_t swapped_bytes, uint64_t recompute_flop)
{
    uint64_t p16_bytes = LH_COST_LOHAN_P16_BYTES * cost->param_count;
    uint64_t state_bytes = LH_COST_LOHAN_STATE_BYTES * cost->param_count - cost->moments_less_bytes;
    uint64_t ssd_bytes = lh_cost_lohan_ssd_bytes(swapped_bytes, cost->host_available_bytes);
    return (struct lh_cost_stage){
        .gpu_s = seconds(2 * cost->forward_flop - cost->frozen_flop + recompute_flop,
                         cost->gpu_flop_per_s),
        .out_s = seconds(p16_bytes, cost->link_out_bytes_per_s),
        .in_s = seconds(p16_bytes + cost->frozen_bytes + swapped_bytes, cost->link_in_bytes_per_s),
        .ssd_s =
            seconds(state_bytes + cost->frozen_read_bytes + ssd_bytes, cost->read_bytes_per_s) +
            seconds(state_bytes, cost->write_bytes_per_s),
    };
}

double lh_cost_lohan_benefit(const struct lh_plan_layer *layer)
{
    if (layer->activation_bytes == 0)
        return INFINITY;
    return (double)layer->forward_flop / (double)layer->activation_bytes;
}

double lh_cost_lohan_recompute_flop(const struct lh_plan_layer *layers, const uint32_t *order,
                                    uint32_t count, uint64_t swapped_bytes)
{
    uint64_t whole_flop = 0;
    for (uint32_t i = 0; i < count; i++)
        whole_flop += layers[i].forward_flop;
    for (uint32_t i = 0; i < count; i++) {
        const struct lh_plan_layer *layer = &layers[order[i]];
        if (swapped_bytes < layer->activation_bytes) {
            double part = (double)swapped_bytes / (double)layer->activation_bytes;
            return (double)whole_flop - (double)layer->forward_flop * part;
        }
        swapped_bytes -= layer->activation_bytes;
        whole_flop -= layer->forward_flop;
    }
    LH_ASSERT(swapped_bytes == 0);
    return (double)whole_flop;
}

double lh_cost_lohan_recompute_slope(const struct lh_plan_layer *layers, const uint32_t *order,
                                     uint32_t count, uint64_t swapped_bytes)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct lh_plan_layer *layer = &layers[order[i]];
        if (swapped_bytes < layer->activation_bytes)
            return -lh_cost_lohan_benefit(layer);
        swapped_bytes -= layer->activation_bytes;
    }
    return 0.0;
}

/* Reverse the bits of index: sorted by the results, any first few layers are spread evenly. */
static uint32_t spread(uint32_t index)
{
    uint32_t reversed = 0;
    for (int i = 0; i < 32; i++)
        reversed |= (index >> i & 1) << (31 - i);
    return reversed;
}

static bool is_before(const struct lh_plan_model *model, uint32_t a, uint32_t b)
{
    const struct lh_plan_layer *x = &model->layers[a];
    const struct lh_plan_layer *y = &model->layers[b];
    if (x->is_inter_block != y->is_inter_block)
        return x->is_inter_block;
    /* Compare FLOP / bytes of x and y exactly; with 0 bytes the quotient is infinite. */
    unsigned __int128 left = (unsigned __int128)x->forward_flop * y->activation_bytes;
    unsigned __int128 right = (unsigned __int128)y->forward_flop * x->activation_bytes;
    if ((x->activation_bytes == 0) != (y->activation_bytes == 0))
        return x->activation_bytes == 0;
    return left != right ? left > right : spread(a) < spread(b);
}

/* Sift down in a heap whose root is the element that comes last in the order. */
static void sift(const struct lh_plan_model *model, uint32_t *order, uint32_t root, uint32_t count)
{
    for (;;) {
        uint32_t last = root;
        for (uint32_t child = 2 * root + 1; child <= 2 * root + 2; child++)
            if (child < count && is_before(model, order[last], order[child]))
                last = child;
        if (last == root)
            return;
        uint32_t moved = order[root];
        order[root] = order[last];
        order[last] = moved;
        root = last;
    }
}

void lh_cost_lohan_order(const struct lh_plan_model *model, uint32_t *order)
{
    uint32_t count = model->layer_count;
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    for (uint32_t i = count / 2; i-- > 0;)
        sift(model, order, i, count);
    for (uint32_t end = count; end-- > 1;) {
        uint32_t last = order[0];
        order[0] = order[end];
        order[end] = last;
        sift(model, order, 0, end);
    }
}

double lh_cost_lohan_swap_s(const struct lh_cost_lohan *cost, uint64_t swapped_bytes,
                            uint64_t recompute_flop)
{
    struct lh_cost_stage forward = lh_cost_lohan_forward(cost, swapped_bytes);
    struct lh_cost_stage backward = lh_cost_lohan_backward(cost, swapped_bytes, recompute_flop);
    return lh_cost_lohan_iteration_s(lh_cost_lohan_stage_s(&forward),
                                     lh_cost_lohan_stage_s(&backward));
}

struct lh_cost_swap lh_cost_lohan_swap(const struct lh_cost_lohan *cost,
                                       const struct lh_plan_model *model, const uint32_t *order,
                                       uint64_t swapped_bytes_max)
{
    uint64_t inter_bytes = lh_plan_model_totals(model).inter_block_activation_bytes;
    struct lh_cost_swap swap = {.recompute_flop = cost->forward_flop};
    double least_s = INFINITY;
    bool is_stopped = false;
    for (; swap.layer_count < model->layer_count && !is_stopped; swap.layer_count++) {
        const struct lh_plan_layer *layer = &model->layers[order[swap.layer_count]];
        uint64_t swapped_bytes = swap.swapped_bytes + layer->activation_bytes;
        uint64_t recompute_flop = swap.recompute_flop - layer->forward_flop;
        double iteration_s = lh_cost_lohan_swap_s(cost, swapped_bytes, recompute_flop);
        /* A layer that costs no bytes is always swapped. */
        bool may_stop = swap.swapped_bytes >= inter_bytes && layer->activation_bytes > 0;
        is_stopped = may_stop && (iteration_s >= least_s || swapped_bytes > swapped_bytes_max);
        if (is_stopped)
            break;
        least_s = fmin(least_s, iteration_s);
        swap.swapped_bytes = swapped_bytes;
        swap.recompute_flop = recompute_flop;
    }
    swap.iteration_s = lh_cost_lohan_swap_s(cost, swap.swapped_bytes, swap.recompute_flop);
    if (!is_stopped)
        swap.kind = LH_COST_CASE_FALLS;
    else
        swap.kind = swap.swapped_bytes > inter_bytes ? LH_COST_CASE_TURNS : LH_COST_CASE_RISES;
    return swap;
}
