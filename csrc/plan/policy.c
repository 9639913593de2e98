#include "plan/policy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/*
 * As csrc/plan/budget.h divides it: parameters of three blocks, gradients of two, and a full
 * pipeline of slabs.
 */
#define BLOCK_COUNT_P16 3
#define BLOCK_COUNT_GRADIENTS 2
#define SLAB_BYTES (UINT64_C(8) * 12 * LH_MIB)

struct policy {
    const char *name;
    int (*plan)(struct lh_plan *plan, const struct lh_plan_model *model,
                const struct lh_plan_machine *machine, struct lh_alloc *alloc,
                struct lh_error *err);
};

uint64_t lh_plan_host_working_bytes(const struct lh_plan_model *model)
{
    uint64_t block_params = lh_plan_model_totals(model).block_param_count_max;
    return (BLOCK_COUNT_P16 + BLOCK_COUNT_GRADIENTS) * model->param_bytes * block_params +
           SLAB_BYTES;
}

static int host_available(const struct lh_plan_model *model, const struct lh_plan_machine *machine,
                          uint64_t *bytes_out, struct lh_error *err)
{
    uint64_t working_bytes = lh_plan_host_working_bytes(model);
    *bytes_out = 0;
    if (machine->host_bytes < working_bytes)
        return lh_error_set(
            err, -ENOSPC,
            "host_bytes %" PRIu64 " is too small: the buffers of a step need %" PRIu64
            " (blocks of %" PRIu64 " parameters)",
            machine->host_bytes, working_bytes, lh_plan_model_totals(model).block_param_count_max);
    *bytes_out = machine->host_bytes - working_bytes;
    return 0;
}

/* Swapped layers to main memory in forward order while they fit, the others to SSD. */
static void places_fill(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                        uint64_t host_bytes)
{
    for (uint32_t i = 0; i < model->layer_count; i++) {
        if (choice->fates[i] != LH_PLAN_FATE_SWAP_SSD)
            continue;
        if (model->layers[i].activation_bytes > host_bytes)
            continue;
        host_bytes -= model->layers[i].activation_bytes;
        choice->fates[i] = LH_PLAN_FATE_SWAP_HOST;
    }
}

static int lohan_plan(struct lh_plan *plan, const struct lh_plan_model *model,
                      const struct lh_plan_machine *machine, struct lh_alloc *alloc,
                      struct lh_error *err)
{
    uint64_t available_bytes = 0;
    LH_TRY(host_available(model, machine, &available_bytes, err));
    uint32_t *order = lh_alloc_zeroed(alloc, model->layer_count, sizeof(*order));
    if (!order)
        return lh_error_set(err, -ENOMEM, "no memory to sort %u layers", model->layer_count);
    lh_cost_lohan_order(model, order);
    struct lh_plan_totals totals = lh_plan_model_totals(model);
    struct lh_cost_lohan cost = lh_cost_lohan_make(machine, &totals, available_bytes);
    struct lh_cost_swap swap = lh_cost_lohan_swap(&cost, model, order, UINT64_MAX);
    for (uint32_t i = 0; i < model->layer_count; i++)
        plan->choice.fates[order[i]] =
            i < swap.layer_count ? LH_PLAN_FATE_SWAP_SSD : LH_PLAN_FATE_RECOMPUTE;
    lh_free(alloc, order);
    places_fill(&plan->choice, model, available_bytes);
    plan->kind = swap.kind;
    plan->iteration_s = swap.iteration_s;
    return 0;
}

static const struct policy policies[] = {
    {"lohan", lohan_plan},
};

const char *const *lh_plan_policy_names(void)
{
    static const char *const names[] = {"lohan", NULL};
    _Static_assert(LH_COUNT_OF(names) == LH_COUNT_OF(policies) + 1, "a name a policy");
    return names;
}

static int name_refuse(const char *name, struct lh_error *err)
{
    char all[256] = "";
    for (size_t i = 0; i < LH_COUNT_OF(policies); i++) {
        size_t used = strlen(all);
        snprintf(all + used, sizeof(all) - used, "%s%s", i ? ", " : "", policies[i].name);
    }
    return lh_error_set(err, -EINVAL, "there is no policy '%.64s': the names are %s", name, all);
}

int lh_plan_make(struct lh_plan *plan, const struct lh_plan_model *model,
                 const struct lh_plan_machine *machine, const char *policy, struct lh_alloc *alloc,
                 struct lh_error *err)
{
    memset(plan, 0, sizeof(*plan));
    const struct policy *found = NULL;
    for (size_t i = 0; i < LH_COUNT_OF(policies); i++)
        if (strcmp(policies[i].name, policy) == 0)
            found = &policies[i];
    if (!found)
        return name_refuse(policy, err);
    LH_TRY(lh_plan_choice_init(&plan->choice, model, alloc, err));
    int rc = found->plan(plan, model, machine, alloc, err);
    if (rc < 0)
        lh_plan_deinit(plan, alloc);
    return rc;
}

void lh_plan_deinit(struct lh_plan *plan, struct lh_alloc *alloc)
{
    lh_plan_choice_deinit(&plan->choice, alloc);
    memset(plan, 0, sizeof(*plan));
}
