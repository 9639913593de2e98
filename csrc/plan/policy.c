#include "plan/policy.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/cost_fuyou.h"

typedef int (*policy_fn)(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err);

uint64_t lh_plan_places_fill(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                             uint64_t host_bytes)
{
    for (uint32_t i = 0; i < model->layer_count; i++) {
        uint64_t bytes = model->layers[i].activation_bytes;
        if (choice->fates[i] != LH_PLAN_FATE_SWAP_SSD || bytes > host_bytes)
            continue;
        host_bytes -= bytes;
        choice->fates[i] = LH_PLAN_FATE_SWAP_HOST;
    }
    return host_bytes;
}

void lh_plan_last_keep(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                       uint64_t gpu_bytes)
{
    for (uint32_t i = model->layer_count; i-- > 0;) {
        uint64_t bytes = model->layers[i].activation_bytes;
        if (choice->fates[i] != LH_PLAN_FATE_SWAP_SSD)
            continue;
        if (bytes > gpu_bytes)
            return;
        gpu_bytes -= bytes;
        choice->fates[i] = LH_PLAN_FATE_KEEP;
    }
}

/* Set the fates of inter-block layers and of all other layers; those that save nothing are kept. */
static void fates_set(struct lh_plan *plan, const struct lh_plan_ask *ask, enum lh_plan_fate inter,
                      enum lh_plan_fate intra)
{
    for (uint32_t i = 0; i < ask->model->layer_count; i++) {
        const struct lh_plan_layer *layer = &ask->model->layers[i];
        enum lh_plan_fate fate = layer->is_inter_block ? inter : intra;
        plan->choice.fates[i] = layer->activation_bytes > 0 ? fate : LH_PLAN_FATE_KEEP;
    }
}

static int host_refuse(const struct lh_plan_ask *ask, const char *policy, uint64_t bytes,
                       struct lh_error *err)
{
    return lh_error_set(err, -ENOSPC,
                        "policy %s swaps only to main memory, which is too small for the"
                        " inter-block activations: they have %" PRIu64 " bytes, and %" PRIu64
                        " of host_bytes %" PRIu64 " are available for activations; use 'lohan' or"
                        " 'auto', which swap to SSDs as well",
                        policy, bytes, ask->host_bytes, ask->machine->host_bytes);
}

static int zero_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    if (ask->totals.inter_block_activation_bytes > ask->host_bytes)
        return host_refuse(ask, "zero", ask->totals.inter_block_activation_bytes, err);
    fates_set(plan, ask, LH_PLAN_FATE_SWAP_HOST, LH_PLAN_FATE_RECOMPUTE);
    return 0;
}

/* Whether computation hides the swapping of this many bytes, without other traffic on the link. */
static bool is_hidden(const struct lh_plan_ask *ask, uint64_t bytes, uint64_t recompute_flop)
{
    const struct lh_plan_machine *machine = ask->machine;
    double gpu = (double)machine->gpu_flop_per_s;
    double forward_s = (double)ask->totals.forward_flop / gpu;
    double backward_s = (double)(ask->totals.backward_flop + recompute_flop) / gpu;
    return (double)bytes / (double)machine->link_out_bytes_per_s <= forward_s &&
           (double)bytes / (double)machine->link_in_bytes_per_s <= backward_s;
}

/* Source: LoHan V-E (what Capuchin considers), LoHan IV-D (what it ignores) */
static int capuchin_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    uint64_t gpu_bytes = ask->gpu_bytes;
    uint64_t host_bytes = ask->host_bytes;
    uint64_t swapped_bytes = 0;
    uint64_t recompute_flop = ask->totals.forward_flop;
    for (uint32_t i = 0; i < ask->model->layer_count; i++) {
        uint32_t index = ask->order[i];
        const struct lh_plan_layer *layer = &ask->model->layers[index];
        uint64_t bytes = layer->activation_bytes;
        uint64_t left_flop = recompute_flop - layer->forward_flop;
        enum lh_plan_fate fate = LH_PLAN_FATE_RECOMPUTE;
        if (bytes <= gpu_bytes) {
            fate = LH_PLAN_FATE_KEEP;
            gpu_bytes -= bytes;
        } else if (bytes <= host_bytes &&
                   (layer->is_inter_block || is_hidden(ask, swapped_bytes + bytes, left_flop))) {
            fate = LH_PLAN_FATE_SWAP_HOST;
            host_bytes -= bytes;
            swapped_bytes += bytes;
        } else if (layer->is_inter_block) {
            return host_refuse(ask, "capuchin", ask->totals.inter_block_activation_bytes, err);
        }
        plan->choice.fates[index] = (uint8_t)fate;
        if (fate != LH_PLAN_FATE_RECOMPUTE)
            recompute_flop = left_flop;
    }
    return 0;
}

static int g10_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    (void)err;
    fates_set(plan, ask, LH_PLAN_FATE_SWAP_SSD, LH_PLAN_FATE_SWAP_SSD);
    /* The activations that are needed soonest are inactive for the shortest time. */
    lh_plan_last_keep(&plan->choice, ask->model, ask->gpu_bytes);
    return 0;
}

static void algorithm_apply(struct lh_plan *plan, struct lh_plan_ask *ask,
                            uint64_t swapped_bytes_max)
{
    struct lh_cost_lohan cost = lh_cost_lohan_make(ask->machine, &ask->totals, ask->host_bytes);
    struct lh_cost_swap swap = lh_cost_lohan_swap(&cost, ask->model, ask->order, swapped_bytes_max);
    fates_set(plan, ask, LH_PLAN_FATE_RECOMPUTE, LH_PLAN_FATE_RECOMPUTE);
    for (uint32_t i = 0; i < swap.layer_count; i++)
        if (plan->choice.fates[ask->order[i]] == LH_PLAN_FATE_RECOMPUTE)
            plan->choice.fates[ask->order[i]] = LH_PLAN_FATE_SWAP_SSD;
    (void)lh_plan_places_fill(&plan->choice, ask->model, ask->host_bytes);
    plan->kind = swap.kind;
    plan->policy_s = swap.iteration_s;
}

static int cpu_act_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    if (ask->totals.inter_block_activation_bytes > ask->host_bytes)
        return host_refuse(ask, "cpu_act", ask->totals.inter_block_activation_bytes, err);
    algorithm_apply(plan, ask, ask->host_bytes);
    return 0;
}

static int lohan_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    (void)err;
    algorithm_apply(plan, ask, UINT64_MAX);
    return 0;
}

static int naive_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    plan->choice.schedule = LH_PLAN_SCHEDULE_NAIVE;
    return lohan_plan(plan, ask, err);
}

static int fuyou_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    uint32_t count = ask->model->layer_count;
    bool *is_swapped = lh_alloc_zeroed(ask->alloc, count, sizeof(*is_swapped));
    if (!is_swapped)
        return lh_error_set(err, -ENOMEM, "no memory for queues of %u layers", count);
    struct lh_cost_fuyou cost = lh_cost_fuyou_make(ask->machine, &ask->totals);
    struct lh_cost_fuyou_swap swap = lh_cost_fuyou_swap(&cost, ask->model, is_swapped);
    fates_set(plan, ask, LH_PLAN_FATE_SWAP_SSD, LH_PLAN_FATE_RECOMPUTE);
    for (uint32_t i = 0; i < count; i++)
        if (is_swapped[i] && plan->choice.fates[i] == LH_PLAN_FATE_RECOMPUTE)
            plan->choice.fates[i] = LH_PLAN_FATE_SWAP_SSD;
    lh_free(ask->alloc, is_swapped);
    (void)lh_plan_places_fill(&plan->choice, ask->model, ask->host_bytes);
    plan->policy_s = swap.iteration_s;
    return 0;
}

/* Start from the best result of the other policies, so that none of them is faster. */
static int auto_plan(struct lh_plan *plan, struct lh_plan_ask *ask, struct lh_error *err)
{
    static const policy_fn others[] = {zero_plan,    capuchin_plan, g10_plan,
                                       cpu_act_plan, fuyou_plan,    lohan_plan};
    struct lh_plan other = {0};
    LH_TRY(lh_plan_choice_init(&other.choice, ask->model, ask->alloc, err));
    int rc = 0;
    double best_s = INFINITY;
    for (size_t i = 0; rc != -ENOMEM && i < LH_COUNT_OF(others); i++) {
        rc = others[i](&other, ask, NULL);
        struct lh_plan_step step = lh_plan_timeline_step(&ask->timeline, &other.choice);
        if (rc < 0 || step.iteration_s >= best_s ||
            lh_plan_step_check(&step, ask->machine, NULL) < 0)
            continue;
        best_s = step.iteration_s;
        lh_plan_choice_copy(&plan->choice, &other.choice);
    }
    lh_plan_choice_deinit(&other.choice, ask->alloc);
    plan->choice.master_bytes = ask->model->residual_bytes;
    if (rc == -ENOMEM)
        return lh_error_set(err, rc, "no memory for a plan of %u layers", ask->model->layer_count);
    LH_TRY(lh_plan_auto(&plan->choice, best_s, ask, err));
    plan->policy_s = lh_plan_timeline_step(&ask->timeline, &plan->choice).iteration_s;
    return 0;
}

static const char *const policy_names[] = {"zero",  "capuchin", "g10",  "cpu_act", "naive",
                                           "fuyou", "lohan",    "auto", NULL};
static const policy_fn policies[] = {zero_plan,  capuchin_plan, g10_plan,   cpu_act_plan,
                                     naive_plan, fuyou_plan,    lohan_plan, auto_plan};
_Static_assert(LH_COUNT_OF(policy_names) == LH_COUNT_OF(policies) + 1, "a name a policy");

const char *const *lh_plan_policy_names(void)
{
    return policy_names;
}

static int name_refuse(const char *name, struct lh_error *err)
{
    char all[256] = "";
    for (size_t i = 0; i < LH_COUNT_OF(policies); i++) {
        size_t used = strlen(all);
        snprintf(all + used, sizeof(all) - used, "%s%s", i ? ", " : "", policy_names[i]);
    }
    return lh_error_set(err, -EINVAL, "unknown policy '%.64s'; valid names: %s", name, all);
}

/* Parse the suffixes after "auto". Returns false if one is unknown. */
static bool words_parse(struct lh_plan_ask *ask, const char *words)
{
    const struct {
        const char *name;
        bool *is_said;
    } known[] = {{"eager", &ask->is_eager}, {"ssd", &ask->is_ssd}, {"moved", &ask->is_moved}};
    while (*words == '/') {
        size_t length = strcspn(++words, "/");
        size_t i = 0;
        while (i < LH_COUNT_OF(known) &&
               (strlen(known[i].name) != length || strncmp(known[i].name, words, length) != 0))
            i++;
        if (i == LH_COUNT_OF(known))
            return false;
        *known[i].is_said = true;
        words += length;
    }
    return *words == '\0';
}

/* The index of the policy, whose suffixes are set in ask; -1: unknown name. */
static int name_parse(struct lh_plan_ask *ask, const char *name)
{
    size_t length = strcspn(name, "/");
    for (int i = 0; policy_names[i]; i++) {
        bool is_it = strlen(policy_names[i]) == length && !strncmp(policy_names[i], name, length);
        bool has_words = policies[i] == auto_plan && words_parse(ask, name + length);
        if (is_it)
            return has_words || name[length] == '\0' ? i : -1;
    }
    return -1;
}

static int ask_init(struct lh_plan_ask *ask, struct lh_error *err)
{
    const struct lh_plan_model *model = ask->model;
    uint64_t host_bytes = lh_plan_host_working_bytes(model);
    uint64_t gpu_bytes = lh_plan_gpu_working_bytes(model);
    ask->totals = lh_plan_model_totals(model);
    if (ask->machine->host_bytes < host_bytes)
        return lh_error_set(
            err, -ENOSPC,
            "host_bytes %" PRIu64 " is too small: the buffers of a step need %" PRIu64
            " (the largest block has %" PRIu64
            " parameters): take a smaller model, or set host_bytes",
            ask->machine->host_bytes, host_bytes, ask->totals.block_param_count_max);
    if (ask->machine->gpu_bytes < gpu_bytes)
        return lh_error_set(
            err, -ENOSPC,
            "gpu_bytes %" PRIu64 " is too small: the buffers of a step need %" PRIu64
            " (the largest block has %" PRIu64 " parameters, and computing it takes %" PRIu64
            " bytes): take a smaller batch, or set gpu_bytes",
            ask->machine->gpu_bytes, gpu_bytes, ask->totals.block_param_count_max,
            ask->totals.block_gpu_bytes_max);
    ask->host_bytes = ask->machine->host_bytes - host_bytes;
    /* Activations may stay only where those of one block in transit still have room. */
    uint64_t transit_bytes = ask->totals.block_activation_bytes_max;
    ask->gpu_bytes = ask->machine->gpu_bytes - gpu_bytes;
    ask->gpu_bytes -= lh_min_u64(ask->gpu_bytes, transit_bytes);
    ask->order = lh_alloc_zeroed(ask->alloc, model->layer_count, sizeof(*ask->order));
    if (!ask->order)
        return lh_error_set(err, -ENOMEM, "no memory to sort %u layers", model->layer_count);
    lh_cost_lohan_order(model, ask->order);
    int rc = lh_plan_timeline_init(&ask->timeline, model, ask->machine, ask->alloc, err);
    if (rc < 0)
        lh_free(ask->alloc, ask->order);
    return rc;
}

static int plan_run(struct lh_plan *plan, struct lh_plan_ask *ask, policy_fn policy,
                    struct lh_error *err)
{
    LH_TRY(policy(plan, ask, err));
    plan->step = lh_plan_timeline_step(&ask->timeline, &plan->choice);
    return lh_plan_step_check(&plan->step, ask->machine, err);
}

int lh_plan_make(struct lh_plan *plan, const struct lh_plan_model *model,
                 const struct lh_plan_machine *machine, const char *policy, struct lh_alloc *alloc,
                 struct lh_error *err)
{
    memset(plan, 0, sizeof(*plan));
    struct lh_plan_ask ask = {.model = model, .machine = machine, .alloc = alloc};
    int index = name_parse(&ask, policy);
    if (index < 0)
        return name_refuse(policy, err);
    LH_TRY(ask_init(&ask, err));
    int rc = lh_plan_choice_init(&plan->choice, model, alloc, err);
    if (rc == 0)
        rc = plan_run(plan, &ask, policies[index], err);
    if (rc < 0)
        lh_plan_deinit(plan, alloc);
    lh_plan_timeline_deinit(&ask.timeline, alloc);
    lh_free(alloc, ask.order);
    return rc;
}

int lh_plan_step_make(struct lh_plan_step *step_out, const struct lh_plan_choice *choice,
                      const struct lh_plan_model *model, const struct lh_plan_machine *machine,
                      struct lh_alloc *alloc, struct lh_error *err)
{
    *step_out = (struct lh_plan_step){0};
    struct lh_plan_timeline timeline;
    LH_TRY(lh_plan_timeline_init(&timeline, model, machine, alloc, err));
    *step_out = lh_plan_timeline_step(&timeline, choice);
    lh_plan_timeline_deinit(&timeline, alloc);
    return 0;
}

void lh_plan_deinit(struct lh_plan *plan, struct lh_alloc *alloc)
{
    lh_plan_choice_deinit(&plan->choice, alloc);
    memset(plan, 0, sizeof(*plan));
}
