/*
 * Fuyou's model of an iteration, one function per numbered equation, and its choice of swaps.
 *
 * T_iter = T_f + T_b+o: forward, and backward combined with the optimizer, each as long as its
 * busiest part. All swapped activations (D_f) pass through the SSDs. Layers are in two queues, each
 * in forward order: the first has the layers with a high benefit, the second all other layers.
 * Layers are taken from the front of the queues, as many as give the smallest T_iter.
 *
 * Pure; includes base only.
 * Source: Fuyou 4.5.
 */
#ifndef LH_PLAN_COST_FUYOU_H
#define LH_PLAN_COST_FUYOU_H

#include "plan/machine.h"
#include "plan/model.h"

struct lh_cost_fuyou {
    uint64_t param_count;          /* p */
    uint64_t forward_flop;         /* T_f^comp * Tput_f */
    uint64_t gpu_flop_per_s;       /* Tput_f */
    uint64_t link_in_bytes_per_s;  /* BW_GPU */
    uint64_t link_out_bytes_per_s; /* BW_GPU */
    uint64_t read_bytes_per_s;     /* BW_S2C * N_SSD */
    uint64_t write_bytes_per_s;    /* BW_C2S * N_SSD */
    uint64_t adam_params_per_s;    /* p / T_o^comp */
};

struct lh_cost_fuyou_swap {
    uint64_t swapped_bytes;     /* D_f */
    uint64_t swapped_bytes_max; /* D_max */
    uint64_t recompute_flop;
    double iteration_s;
};

/* The inputs of the equations, from a machine and a model's totals that passed their checks. */
struct lh_cost_fuyou lh_cost_fuyou_make(const struct lh_plan_machine *machine,
                                        const struct lh_plan_totals *totals);

/* T_iter. Source: Fuyou eq. 1 */
double lh_cost_fuyou_iteration_s(double forward_s, double backward_s);
/* T_f. Source: Fuyou eq. 2 */
double lh_cost_fuyou_forward_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes);
/* T_f^GPU. Source: Fuyou eq. 3 */
double lh_cost_fuyou_forward_link_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes);
/* T_f^SSD. Source: Fuyou eq. 4 */
double lh_cost_fuyou_forward_ssd_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes);
/* T_b+o. Source: Fuyou eq. 5 */
double lh_cost_fuyou_backward_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes,
                                uint64_t recompute_flop);
/* T_b+o^GPU. Source: Fuyou eq. 6 */
double lh_cost_fuyou_backward_link_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes);
/* T_b+o^SSD. Source: Fuyou eq. 7 */
double lh_cost_fuyou_backward_ssd_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes);
/* T_b^comp. Source: Fuyou eq. 8 */
double lh_cost_fuyou_backward_gpu_s(const struct lh_cost_fuyou *cost, uint64_t recompute_flop);
/*
 * T_max, the time that swapping may cost in backward before it stops being a gain; negative if
 * transfers are already the bottleneck. Source: Fuyou eq. 9
 */
double lh_cost_fuyou_gain_s(const struct lh_cost_fuyou *cost, uint64_t swapped_bytes,
                            uint64_t recompute_flop);
/* D_max; 0 if T_max is negative. Source: Fuyou eq. 10 */
uint64_t lh_cost_fuyou_swapped_bytes_max(const struct lh_cost_fuyou *cost, double gain_s);
/* D_start <= D_f <= D_max; D_start itself is always allowed. Source: Fuyou eq. 11 */
bool lh_cost_fuyou_is_swappable(uint64_t start_bytes, uint64_t swapped_bytes,
                                uint64_t swapped_bytes_max);
/*
 * SBF: FLOP saved per second of swapping; infinite if the layer saves nothing. Source: Fuyou eq. 12
 */
double lh_cost_fuyou_benefit(const struct lh_cost_fuyou *cost, const struct lh_plan_layer *layer);

/*
 * Decide which layers to swap; is_swapped has layer_count places. D_start is the size of the
 * inter-block activations. A benefit is high if it is at least half of the highest benefit of any
 * layer that saves activations. Source: Fuyou 4.5
 */
struct lh_cost_fuyou_swap lh_cost_fuyou_swap(const struct lh_cost_fuyou *cost,
                                             const struct lh_plan_model *model, bool *is_swapped);

#endif
