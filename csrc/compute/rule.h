/*
 * Update rules: one row each. The rest of lohan asks the row, not the name.
 *
 * A row says which arrays of states a rule has and how its scalars follow from the hyper-parameters
 * of a step. What a rule computes is defined by its function in rule_core.h, which rule_ref.c calls
 * for one element at a time; other kernels of a rule produce the same bits. `g` below is the
 * gradient times gradient_scale, every product and sum is fp32, and a fused multiply-add rounds
 * once:
 *
 *      adamw          adam.h
 *      adam           g = fma(p, coupled, g), then AdamW with decay 1
 *      lion           c = fma(g, beta1_rest, m * beta1)
 *                     p = fma(-step_size, fma(c, 0, sign(c)), p * decay)
 *                     m = fma(g, beta2_rest, m * beta2)
 *      sgd            g = fma(p, coupled, g)
 *                     q = fma(-step_size, g, p)
 *                     p = fma(q, 0, q)
 *      sgd_momentum   g = fma(p, coupled, g)
 *                     m = fma(g, beta1_rest, m * beta1)
 *                     d = fma(m, eps, g * beta2)
 *                     q = fma(-step_size, d, p)
 *                     p = fma(q, 0, q)
 *      adagrad        g = fma(p, coupled, g)
 *                     v = fma(g, g, v + beta1)
 *                     p = fma(-step_size, g / (sqrt(v) + eps), p)
 *      rmsprop        g = fma(p, coupled, g)
 *                     v = fma(v, beta2, (g * beta2_rest) * g)
 *                     p = fma(-step_size, g / (sqrt(v) + eps), p)
 *      rmsprop_momentum    g and v as before
 *                     q = g / (sqrt(v) + eps)
 *                     m = fma(q, beta1_rest, m * beta1)
 *                     p = fma(-step_size, fma(m, beta1_rest, q * (1 - beta1_rest)), p)
 *      adam_mini      m = fma(g - m, beta1_rest, m)
 *                     p = fma(-step_size, m / d, p * decay)
 *      adafactor      p = fma(-step_size, g / sqrt(v), p * decay), with v and step_size of
 *                     [Note: Factors] in factor.h
 *      muon           m = fma(g - m, beta1_rest, m)
 *                     p = fma(-step_size, o, p * decay)
 *
 * The order is that of torch.optim.SGD, Adam, Adagrad and RMSprop, and of lion-pytorch, on a
 * machine whose additions with a factor are fused. fma(x, 0, x) is x if x is finite and NaN
 * otherwise, so that a gradient that is not finite makes the parameter NaN under every rule ([Note:
 * Gradients that are not finite] in adam.h), and so does an update by SGD that is too large for
 * fp32. sign(c) is 1, -1 or 0. sgd_momentum: m is torch's momentum_buffer, which is g after the
 * first step; with Nesterov, d = g + momentum m, otherwise m. With momentum 0, m keeps its value
 * and d = g; rmsprop_momentum does the same, with beta1 1 and beta1_rest 0. adagrad: beta1 is the
 * value with which sums of squares begin, in the first step, and 0 in later ones.
 *
 * [Note: Second moments of rows] adam_mini is AdamW with one second moment v for all elements of a
 * row, whose gradients enter it as the mean of their squares, computed in fp64 and then rounded:
 *
 *      u = sum of squares of the row's gradients (norm.h) * gradient_scale^2 / elements of the row
 *      v = fma(v, beta2, u * beta2_rest)
 *      d = fma(sqrt(v), 1 / bias2_sqrt, eps)
 *
 * A parameter of two or more dimensions has a row for each index of the first one. It has one row,
 * as a vector has, if rows have fewer than LH_ADAM_STATES_BLOCK elements, or if they are not
 * contiguous in the unit. v is stored once for each block that has elements of its row (struct
 * lh_adam_rows), so that a chunk has all that its update needs, wherever chunks begin.
 *
 * [Note: Matrices] muon updates matrices only; other parameters of the same run have adamw. o is
 * what newton_schulz.h makes of a whole matrix
 *
 *      u = fma(g - m, beta1_rest, m)    with Nesterov and momentum >= 0.5, m the new momentum
 *      u = fma(m - g, beta1, g)         with Nesterov and momentum < 0.5
 *      u = m                            without Nesterov
 *
 * and step_size is lr times a factor of the matrix's shape. A kernel reads o where other rules have
 * the second moment.
 *
 * What a rule makes of the five hyper-parameters (struct lh_adam_hyper):
 *
 *      adamw, adam, adam_mini    lr, beta1, beta2, eps, weight_decay
 *      lion           lr, beta1, beta2, -, weight_decay
 *      sgd            lr, -, -, -, weight_decay
 *      sgd_momentum   lr, momentum, dampening, 1 with Nesterov or 0, weight_decay
 *      adagrad        lr, lr_decay, initial_accumulator_value, eps, weight_decay
 *      rmsprop        lr, -, alpha, eps, weight_decay
 *      rmsprop_momentum    lr, momentum, alpha, eps, weight_decay
 *      adafactor      lr, beta2_decay, eps2, eps1, weight_decay; eps1 < 0: that of fp32
 *      muon           lr, momentum, 1 with Nesterov or 0, eps of the norm, weight_decay
 *
 * Thread: pure functions over the caller's memory.
 * Source: torch.optim.Adam, SGD, Adagrad, RMSprop and Muon; Chen et al. 2023, Symbolic Discovery of
 *         Optimization Algorithms (Lion); Zhang et al. 2024, Adam-mini: Use Fewer Learning Rates
 *         To Gain More, algorithm 1 (the partition into rows is that of its output weights).
 */
#ifndef LH_COMPUTE_RULE_H
#define LH_COMPUTE_RULE_H

#include <stdbool.h>
#include <stdint.h>

/* The values are those of the engine's descriptions; a new rule is added at the end. */
enum lh_rule {
    LH_RULE_ADAMW = 0,
    LH_RULE_ADAM,
    LH_RULE_LION,
    LH_RULE_SGD,
    LH_RULE_SGD_MOMENTUM,
    LH_RULE_ADAGRAD,
    LH_RULE_RMSPROP,
    LH_RULE_RMSPROP_MOMENTUM,
    LH_RULE_ADAM_MINI,
    LH_RULE_ADAFACTOR,
    LH_RULE_MUON,
    LH_RULE_COUNT
};

struct lh_adam_hyper;
struct lh_adam_scalars;

struct lh_rule_row {
    const char *name; /* as stores and python/lohan/common/_rules.py name it */
    bool has_moment1; /* signed; in 8 bits: by its magnitude */
    bool has_moment2; /* never negative; in 8 bits: by its root */
    bool has_rows;    /* [Note: Second moments of rows]; moments are in fp32 */
    bool has_factors; /* [Note: Factors] in factor.h; there are no moments */
    /* Compute the scalars of a step (1, 2, ...) in double, and round each of them once. */
    struct lh_adam_scalars (*scalars)(const struct lh_adam_hyper *hyper, uint64_t step,
                                      double gradient_scale);
    bool has_matrices; /* parameters are matrices, updated as such ([Note: Matrices]) */
};

extern const struct lh_rule_row lh_rules[LH_RULE_COUNT];

#endif
