/*
 * LoHan's model of an iteration, one function a numbered equation, and its Algorithm 1.
 *
 * T_iter = T_f + T_b: each stage lasts as long as the busiest of GPU, link out, link in and SSDs.
 * The link is duplex, an SSD simplex: reads and writes add up. What is swapped out of the GPU (A)
 * and does not fit into main memory passes through the SSDs (alpha * A). Layers whose activations
 * are not swapped are computed again in backward. Bytes and FLOP are exact integers, times are
 * doubles, computed from them by one division and, of the SSDs, one sum.
 *
 * Pure; includes base only.
 * Source: LoHan IV-D.
 */
#ifndef LH_PLAN_COST_LOHAN_H
#define LH_PLAN_COST_LOHAN_H

#include "plan/machine.h"
#include "plan/model.h"

/* Bytes of a parameter over the SSDs and the link: P16, and all states with P16. */
#define LH_COST_LOHAN_P16_BYTES 2
#define LH_COST_LOHAN_STATE_BYTES 14

struct lh_cost_lohan {
    uint64_t param_count;          /* P */
    uint64_t forward_flop;         /* FLOP_f */
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
    LH_COST_CASE_TURNS = 3, /* A where T_iter turns */
};

struct lh_cost_swap {
    uint64_t swapped_bytes;  /* A */
    uint64_t recompute_flop; /* FLOP_r */
    double iteration_s;      /* T_iter of these two */
    uint32_t layer_count;    /* swapped: the first so many of the order */
    enum lh_cost_case kind;
};

/* The inputs of the equations; host_available_bytes is the caller's. Both passed their checks. */
struct lh_cost_lohan lh_cost_lohan_make(const struct lh_plan_machine *machine,
                                        const struct lh_plan_totals *totals,
                                        uint64_t host_available_bytes);

/* T_iter. Source: LoHan eq. 1 */
double lh_cost_lohan_iteration_s(double forward_s, double backward_s);
/* T_f, and T_b likewise: the busiest resource. Source: LoHan eq. 2 */
double lh_cost_lohan_stage_s(const struct lh_cost_stage *stage);
/* alpha * A: of swapped_bytes, what goes to the SSDs. Source: LoHan eq. 3 */
uint64_t lh_cost_lohan_ssd_bytes(uint64_t swapped_bytes, uint64_t host_available_bytes);
/* The parts of T_f. Source: LoHan eq. 4 */
struct lh_cost_stage lh_cost_lohan_forward(const struct lh_cost_lohan *cost,
                                           uint64_t swapped_bytes);
/* The parts of T_b. Source: LoHan eq. 5 */
struct lh_cost_stage lh_cost_lohan_backward(const struct lh_cost_lohan *cost,
                                            uint64_t swapped_bytes, uint64_t recompute_flop);
/* OB, FLOP a byte; infinite where nothing is saved. Source: LoHan eq. 6 */
double lh_cost_lohan_benefit(const struct lh_plan_layer *layer);
/*
 * FLOP_r where swapped_bytes of activations are swapped, of layers in the order given: all of some,
 * a part of the next. swapped_bytes is at most their sum. Source: LoHan eq. 7
 */
double lh_cost_lohan_recompute_flop(const struct lh_plan_layer *layers, const uint32_t *order,
                                    uint32_t count, uint64_t swapped_bytes);
/* Its slope there, FLOP a byte; 0 behind the last layer. Source: LoHan eq. 8 */
double lh_cost_lohan_recompute_slope(const struct lh_plan_layer *layers, const uint32_t *order,
                                     uint32_t count, uint64_t swapped_bytes);

/*
 * The order in which layers are swapped: inter-block ones (they cannot be recomputed), then by
 * falling OB. Equal ones are spread over the model, so that what moves in any stretch of a step is
 * what the links have time for there: the equations know sums only. order has layer_count places.
 */
void lh_cost_lohan_order(const struct lh_plan_model *model, uint32_t *order);
/* T_iter with A and FLOP_r given. */
double lh_cost_lohan_swap_s(const struct lh_cost_lohan *cost, uint64_t swapped_bytes,
                            uint64_t recompute_flop);
/*
 * Algorithm 1: which layers of order to swap. It stops where T_iter stops falling, but not before
 * all inter-block activations are swapped: then A >= A_interBlock, as the algorithm ensures.
 * swapped_bytes_max: A may not be more (main memory alone takes it); the inter-block ones are
 * swapped all the same.
 * Source: LoHan alg. 1
 */
struct lh_cost_swap lh_cost_lohan_swap(const struct lh_cost_lohan *cost,
                                       const struct lh_plan_model *model, const uint32_t *order,
                                       uint64_t swapped_bytes_max);

#endif
