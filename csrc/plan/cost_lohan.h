/*
 * LoHan's model of an iteration, one function per numbered equation, and its Algorithm 1.
 *
 * T_iter = T_f + T_b: each stage lasts as long as the busiest of GPU, link out, link in and SSDs.
 * The link is duplex, an SSD simplex: reads and writes add up. What is swapped out of the GPU (A)
 * and does not fit into main memory passes through the SSDs (alpha * A). Layers whose activations
 * are not swapped are recomputed in backward. Bytes and FLOP are exact integers; times are doubles,
 * computed from these integers by one division and, for the SSDs, one sum.
 *
 * Pure; includes base only.
 * Source: LoHan IV-D.
 */
#ifndef LH_PLAN_COST_LOHAN_H
#define LH_PLAN_COST_LOHAN_H

#include "plan/machine.h"
#include "plan/model.h"

/* Bytes per parameter that the SSDs and the link move: P16, and all states including P16. */
#define LH_COST_LOHAN_P16_BYTES 2
#define LH_COST_LOHAN_STATE_BYTES 14

struct lh_cost_lohan {
    uint64_t param_count;  /* P */
    uint64_t forward_flop; /* FLOP_f */
    /*
     * What the paper does not have, or 0: frozen parameters (bytes, and those that a load reads),
     * FLOP that backward saves because of them, and bytes that moments have less than AdamW's in
     * fp32.
     */
    uint64_t frozen_bytes;
    uint64_t frozen_read_bytes;
    uint64_t frozen_flop;
    uint64_t moments_less_bytes;
    uint64_t gpu_flop_per_s;       /* THP_G */
    uint64_t link_in_bytes_per_s;  /* BW_G */
    uint64_t link_out_bytes_per_s; /* BW_G */
    uint64_t read_bytes_per_s;     /* BW_S2M */
    uint64_t write_bytes_per_s;    /* BW_M2S */
    uint64_t host_available_bytes; /* MEM_M^avail */
};

/* How long each resource is busy in a stage. */
struct lh_cost_stage {
    double gpu_s;
    double out_s; /* G2M */
    double in_s;  /* M2G */
    double ssd_s;
};

enum lh_cost_case {
    LH_COST_CASE_NONE = 0,
    LH_COST_CASE_RISES = 1, /* A = A_interBlock */
    LH_COST_CASE_FALLS = 2, /* A = A_all */
    LH_COST_CASE_TURNS = 3, /* A at the minimum of T_iter */
};

struct lh_cost_swap {
    uint64_t swapped_bytes;  /* A */
    uint64_t recompute_flop; /* FLOP_r */
    double iteration_s;      /* T_iter for these two values */
    uint32_t layer_count;    /* the number of swapped layers: the first ones in the order */
    enum lh_cost_case kind;
};

/*
 * The inputs of the equations, from a machine and a model's totals that passed their checks. The
 * caller decides host_available_bytes.
 */
struct lh_cost_lohan lh_cost_lohan_make(const struct lh_plan_machine *machine,
                                        const struct lh_plan_totals *totals,
                                        uint64_t host_available_bytes);

/* T_iter. Source: LoHan eq. 1 */
double lh_cost_lohan_iteration_s(double forward_s, double backward_s);
/* T_f or T_b: the time of the busiest resource. Source: LoHan eq. 2 */
double lh_cost_lohan_stage_s(const struct lh_cost_stage *stage);
/* alpha * A: the part of swapped_bytes that goes to the SSDs. Source: LoHan eq. 3 */
uint64_t lh_cost_lohan_ssd_bytes(uint64_t swapped_bytes, uint64_t host_available_bytes);
/* The parts of T_f. Source: LoHan eq. 4 */
struct lh_cost_stage lh_cost_lohan_forward(const struct lh_cost_lohan *cost,
                                           uint64_t swapped_bytes);
/* The parts of T_b. Source: LoHan eq. 5 */
struct lh_cost_stage lh_cost_lohan_backward(const struct lh_cost_lohan *cost,
                                            uint64_t swapped_bytes, uint64_t recompute_flop);
/* OB, FLOP per byte; infinite if the layer saves nothing. Source: LoHan eq. 6 */
double lh_cost_lohan_benefit(const struct lh_plan_layer *layer);
/*
 * FLOP_r if swapped_bytes of activations are swapped, taken from the layers in the given order: all
 * of the first ones, and a part of the next. swapped_bytes is at most their sum.
 * Source: LoHan eq. 7
 */
double lh_cost_lohan_recompute_flop(const struct lh_plan_layer *layers, const uint32_t *order,
                                    uint32_t count, uint64_t swapped_bytes);
/* The slope of FLOP_r at swapped_bytes, FLOP per byte; 0 after all layers. Source: LoHan eq. 8 */
double lh_cost_lohan_recompute_slope(const struct lh_plan_layer *layers, const uint32_t *order,
                                     uint32_t count, uint64_t swapped_bytes);

/*
 * The order in which layers are swapped: inter-block layers first (they cannot be recomputed), then
 * by decreasing OB. Layers of equal OB are spread over the model, so that the traffic is even over
 * a step; the equations consider only sums. order has layer_count places.
 */
void lh_cost_lohan_order(const struct lh_plan_model *model, uint32_t *order);
/* T_iter for the given A and FLOP_r. */
double lh_cost_lohan_swap_s(const struct lh_cost_lohan *cost, uint64_t swapped_bytes,
                            uint64_t recompute_flop);
/*
 * Algorithm 1: decide which layers of order to swap. The algorithm stops where T_iter stops
 * falling, but not before all inter-block activations are swapped: A >= A_interBlock.
 * A does not exceed swapped_bytes_max (for policies that swap only to main memory), except that
 * inter-block activations are always swapped.
 * Source: LoHan alg. 1
 */
struct lh_cost_swap lh_cost_lohan_swap(const struct lh_cost_lohan *cost,
                                       const struct lh_plan_model *model, const uint32_t *order,
                                       uint64_t swapped_bytes_max);

#endif
