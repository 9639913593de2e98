/* The table of rules, and the scalars of their steps. */
#include "compute/rule.h"

#include "base/assert.h"
#include "compute/adam.h"

/* Decay is coupled: it is a part of the gradient. */
static struct lh_adam_scalars adam_scalars(const struct lh_adam_hyper *hyper, uint64_t step,
                                           double gradient_scale)
{
    struct lh_adam_scalars scalars = lh_adam_scalars_make(hyper, step, gradient_scale);

    scalars.decay = 1;
    scalars.coupled = (float)hyper->weight_decay;
    return scalars;
}

static struct lh_adam_scalars lion_scalars(const struct lh_adam_hyper *hyper, uint64_t step,
                                           double gradient_scale)
{
    LH_ASSERT(step >= 1);
    return (struct lh_adam_scalars){
        .gradient_scale = (float)gradient_scale,
        .beta1 = (float)hyper->beta1,
        .beta1_rest = (float)(1.0 - hyper->beta1),
        .beta2 = (float)hyper->beta2,
        .beta2_rest = (float)(1.0 - hyper->beta2),
        .step_size = (float)hyper->lr,
        .decay = (float)(1.0 - hyper->lr * hyper->weight_decay),
        .average_rest = (float)hyper->average_rest,
    };
}

static struct lh_adam_scalars sgd_scalars(const struct lh_adam_hyper *hyper, uint64_t step,
                                          double gradient_scale)
{
    double momentum = hyper->beta1, dampening = hyper->beta2;
    bool is_nesterov = hyper->eps != 0;
    bool has_momentum = momentum != 0; /* without it, as in torch, the buffer stays as it is */

    LH_ASSERT(step >= 1);
    return (struct lh_adam_scalars){
        .gradient_scale = (float)gradient_scale,
        .beta1 = has_momentum ? (float)momentum : 1,
        .beta1_rest = !has_momentum ? 0
                      : step == 1   ? 1
                                    : (float)(1.0 - dampening),
        .beta2 = is_nesterov || !has_momentum ? 1 : 0,
        .eps = is_nesterov || !has_momentum ? (float)momentum : 1,
        .step_size = (float)hyper->lr,
        .decay = 1,
        .coupled = (float)hyper->weight_decay,
        .average_rest = (float)hyper->average_rest,
    };
}

/* The state of a parameter that has made no step is 0; its first step makes the sum begin. */
static struct lh_adam_scalars adagrad_scalars(const struct lh_adam_hyper *hyper, uint64_t step,
                                              double gradient_scale)
{
    double lr_decay = hyper->beta1, initial = hyper->beta2;

    LH_ASSERT(step >= 1);
    return (struct lh_adam_scalars){
        .gradient_scale = (float)gradient_scale,
        .beta1 = step == 1 ? (float)initial : 0,
        .eps = (float)hyper->eps,
        .step_size = (float)(hyper->lr / (1 + (double)(step - 1) * lr_decay)),
        .decay = 1,
        .coupled = (float)hyper->weight_decay,
        .average_rest = (float)hyper->average_rest,
    };
}

static struct lh_adam_scalars rmsprop_scalars(const struct lh_adam_hyper *hyper, uint64_t step,
                                              double gradient_scale)
{
    double momentum = hyper->beta1, alpha = hyper->beta2;
    bool has_momentum = momentum != 0; /* without it, as in torch, the buffer stays as it is */

    LH_ASSERT(step >= 1);
    return (struct lh_adam_scalars){
        .gradient_scale = (float)gradient_scale,
        .beta1 = has_momentum ? (float)momentum : 1,
        .beta1_rest = has_momentum ? 1 : 0,
        .beta2 = (float)alpha,
        .beta2_rest = (float)(1.0 - alpha),
        .eps = (float)hyper->eps,
        .step_size = (float)hyper->lr,
        .decay = 1,
        .coupled = (float)hyper->weight_decay,
        .average_rest = (float)hyper->average_rest,
    };
}

/* step_size, which depends on all of a parameter, is not known here. */
static struct lh_adam_scalars adafactor_scalars(const struct lh_adam_hyper *hyper, uint64_t step,
                                                double gradient_scale)
{
    LH_ASSERT(step >= 1);
    return (struct lh_adam_scalars){
        .gradient_scale = (float)gradient_scale,
        .decay = (float)(1.0 - hyper->lr * hyper->weight_decay),
        .average_rest = (float)hyper->average_rest,
    };
}

/* The engine multiplies step_size by what the parameter's shape makes of it. */
static struct lh_adam_scalars muon_scalars(const struct lh_adam_hyper *hyper, uint64_t step,
                                           double gradient_scale)
{
    struct lh_adam_scalars scalars = lion_scalars(hyper, step, gradient_scale);

    scalars.eps = (float)hyper->eps;
    return scalars;
}

const struct lh_rule_row lh_rules[LH_RULE_COUNT] = {
    [LH_RULE_ADAMW] = {.name = "adamw",
                       .has_moment1 = true,
                       .has_moment2 = true,
                       .scalars = lh_adam_scalars_make},
    [LH_RULE_ADAM] = {.name = "adam",
                      .has_moment1 = true,
                      .has_moment2 = true,
                      .scalars = adam_scalars},
    [LH_RULE_LION] = {.name = "lion", .has_moment1 = true, .scalars = lion_scalars},
    [LH_RULE_SGD] = {.name = "sgd", .scalars = sgd_scalars},
    [LH_RULE_SGD_MOMENTUM] = {.name = "sgd_momentum", .has_moment1 = true, .scalars = sgd_scalars},
    [LH_RULE_ADAGRAD] = {.name = "adagrad", .has_moment2 = true, .scalars = adagrad_scalars},
    [LH_RULE_RMSPROP] = {.name = "rmsprop", .has_moment2 = true, .scalars = rmsprop_scalars},
    [LH_RULE_RMSPROP_MOMENTUM] = {.name = "rmsprop_momentum",
                                  .has_moment1 = true,
                                  .has_moment2 = true,
                                  .scalars = rmsprop_scalars},
    [LH_RULE_ADAM_MINI] = {.name = "adam_mini",
                           .has_moment1 = true,
                           .has_rows = true,
                           .scalars = lh_adam_scalars_make},
    [LH_RULE_ADAFACTOR] = {.name = "adafactor", .has_factors = true, .scalars = adafactor_scalars},
    [LH_RULE_MUON] = {.name = "muon",
                      .has_moment1 = true,
                      .has_matrices = true,
                      .scalars = muon_scalars},
};
