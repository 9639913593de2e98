/*
 * lohan._core.plan(), plan_step() and plan_policies(): csrc/plan from plain dicts, whose keys
 * python/lohan/planning/_plan.py documents. Thread: with the GIL.
 */
#include <string.h>

#include "plan/machine.h"
#include "plan/model.h"
#include "plan/policy.h"
#include "py/lhpy.h"

static const struct lhpy_table machine_table = LHPY_TABLE_PLAIN(
    "a machine", LHPY_FORM_DICT, struct lh_plan_machine, gpu_flop_per_s, gpu_bytes,
    link_in_bytes_per_s, link_out_bytes_per_s, host_bytes, adam_params_per_s, ssd_count, ssd_bytes,
    ssd_read_bytes_per_s, ssd_write_bytes_per_s, ssd_total_bytes_per_s);

static const struct lhpy_table layer_table =
    LHPY_TABLE("a layer", LHPY_FORM_DICT, struct lh_plan_layer,
               LHPY_FIELDS(struct lh_plan_layer, param_count, forward_flop, activation_bytes,
                           working_bytes, is_inter_block),
               LHPY_FIELD(struct lh_plan_layer, others_count, .is_optional = true),
               LHPY_FIELD(struct lh_plan_layer, products_count, .is_optional = true),
               LHPY_FIELD(struct lh_plan_layer, frozen_bytes, .is_optional = true),
               LHPY_FIELD(struct lh_plan_layer, frozen_read_bytes, .is_optional = true),
               LHPY_FIELD(struct lh_plan_layer, frozen_flop, .is_optional = true));

struct block {
    struct lh_plan_layer *layers;
    uint32_t layer_count;
    uint32_t shared_block;
};

static const struct lhpy_table block_table =
    LHPY_TABLE("a block", LHPY_FORM_DICT, struct block,
               LHPY_ROWS("layers", struct block, layers, layer_count, layer_table),
               LHPY_FIELD(struct block, shared_block, .is_index = true, .max = INT32_MAX));

/* What plan() and plan_step() read of their first two arguments, from INPUT_INIT on. */
struct input {
    uint32_t param_bytes;
    uint32_t residual_bytes;
    uint32_t moment_block_bytes;
    struct block *blocks;
    uint32_t block_count;
    struct lh_plan_machine machine;
};

static const struct lhpy_table model_table = LHPY_TABLE(
    "a model", LHPY_FORM_DICT, struct input, LHPY_FIELDS(struct input, param_bytes, residual_bytes),
    LHPY_FIELD(struct input, moment_block_bytes, .is_optional = true),
    LHPY_ROWS("blocks", struct input, blocks, block_count, block_table));

#define INPUT_INIT {.moment_block_bytes = LH_PLAN_MOMENT_BLOCK_BYTES_F32}
#define INPUT_ARGS(input)                                                                          \
    LHPY_ARG_STRUCT("model", input, model_table),                                                  \
        LHPY_ARG_STRUCT("machine", (input).machine, machine_table)

/* Make a model of what was read, which is released. 0, or -1 with a Python error. */
static int model_make(struct input *input, struct lh_plan_model *model, struct lh_alloc *alloc)
{
    struct lh_error err = {0};
    uint64_t layer_count = 0;
    for (uint32_t i = 0; i < input->block_count; i++)
        layer_count += input->blocks[i].layer_count;
    int rc = lh_plan_machine_check(&input->machine, &err);
    if (rc == 0 && layer_count > INT32_MAX)
        rc = lh_error_set(&err, -EINVAL, "a model of %u blocks and %llu layers is too large",
                          input->block_count, (unsigned long long)layer_count);
    if (rc == 0)
        rc = lh_plan_model_init(model, input->block_count, (uint32_t)layer_count, alloc, &err);
    if (rc != 0) {
        lhpy_clear(&model_table, input);
        lhpy_raise_builtin(&err);
        return -1;
    }
    model->param_bytes = input->param_bytes;
    model->residual_bytes = input->residual_bytes;
    model->moment_block_bytes = input->moment_block_bytes;
    uint32_t layer_next = 0;
    for (uint32_t i = 0; i < input->block_count; i++) {
        const struct block *block = &input->blocks[i];
        model->blocks[i] = (struct lh_plan_block){.layer_first = layer_next,
                                                  .layer_count = block->layer_count,
                                                  .shared_block = block->shared_block};
        memcpy(&model->layers[layer_next], block->layers,
               block->layer_count * sizeof(*block->layers));
        layer_next += block->layer_count;
    }
    lhpy_clear(&model_table, input);
    if (lh_plan_model_check(model, &err) == 0)
        return 0;
    lh_plan_model_deinit(model, alloc);
    lhpy_raise_builtin(&err);
    return -1;
}

/* --- Plans as dicts ----------------------------------------------------------------------- */

static const char *const fate_names[LH_PLAN_FATE_COUNT + 1] = {"keep", "host", "ssd", "recompute"};
static const char *const schedule_names[] = {"optimized", "naive", "serial", NULL};
static const char *const resource_names[LH_PLAN_RESOURCE_COUNT + 1] = {"gpu", "link_in", "link_out",
                                                                       "ssd", "cpu"};

static const struct lhpy_table fate_table =
    LHPY_TABLE("a fate", LHPY_FORM_VALUE, uint8_t, {.kind = LHPY_KIND_U8, .names = fate_names});

static const struct lhpy_table choice_table =
    LHPY_TABLE_PLAIN("a block's choice", LHPY_FORM_DICT, struct lh_plan_block_choice, is_deferred,
                     has_host_p16, has_host_master, has_host_moments);

static const struct lhpy_table busy_table =
    LHPY_TABLE("busy_s", LHPY_FORM_DICT, struct lh_plan_step,
               LHPY_FIELD_AS("gpu", struct lh_plan_step, busy_s[LH_PLAN_RESOURCE_GPU]),
               LHPY_FIELD_AS("link_in", struct lh_plan_step, busy_s[LH_PLAN_RESOURCE_IN]),
               LHPY_FIELD_AS("link_out", struct lh_plan_step, busy_s[LH_PLAN_RESOURCE_OUT]),
               LHPY_FIELD_AS("ssd", struct lh_plan_step, busy_s[LH_PLAN_RESOURCE_SSD]),
               LHPY_FIELD_AS("cpu", struct lh_plan_step, busy_s[LH_PLAN_RESOURCE_CPU]));

static const struct lhpy_table step_table = LHPY_TABLE(
    "a step", LHPY_FORM_DICT, struct lh_plan_step, LHPY_FIELD(struct lh_plan_step, iteration_s),
    LHPY_FIELD(struct lh_plan_step, bound_by, .names = resource_names),
    LHPY_FIELDS(struct lh_plan_step, recompute_flop, kept_bytes, swapped_bytes, swapped_ssd_bytes,
                link_in_bytes, link_out_bytes, ssd_read_bytes, ssd_write_bytes, commit_bytes,
                commit_every, gpu_bytes, host_bytes, ssd_bytes));

static const struct lhpy_table plan_table =
    LHPY_TABLE("a plan", LHPY_FORM_DICT, struct lh_plan,
               LHPY_FIELD_AS("schedule", struct lh_plan, choice.schedule, .names = schedule_names),
               LHPY_FIELD_AS("master_bytes", struct lh_plan, choice.master_bytes),
               LHPY_FIELD_AS("case", struct lh_plan, kind), LHPY_FIELD(struct lh_plan, policy_s));

static PyObject *plan_dict(const struct lh_plan *plan)
{
    const struct lh_plan_choice *choice = &plan->choice;
    PyObject *step = lhpy_make(&step_table, &plan->step);
    step = lhpy_dict_add(step, "busy_s", lhpy_make(&busy_table, &plan->step));
    PyObject *dict = lhpy_dict_add(lhpy_make(&plan_table, plan), "step", step);
    dict =
        lhpy_dict_add(dict, "layers", lhpy_list(&fate_table, choice->fates, choice->layer_count));
    return lhpy_dict_add(dict, "blocks",
                         lhpy_list(&choice_table, choice->blocks, choice->block_count));
}

static PyObject *plan_call(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct input input = INPUT_INIT;
    const char *policy = NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_model model;
    if (LHPY_ARGS(args, NULL, INPUT_ARGS(input), LHPY_ARG(policy)) < 0 ||
        model_make(&input, &model, &alloc) < 0)
        return NULL;
    struct lh_error err = {0};
    struct lh_plan plan;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lh_plan_make(&plan, &model, &input.machine, policy, &alloc, &err);
    Py_END_ALLOW_THREADS
    PyObject *made = rc < 0 ? lhpy_raise_builtin(&err) : plan_dict(&plan);
    if (rc == 0)
        lh_plan_deinit(&plan, &alloc);
    lh_plan_model_deinit(&model, &alloc);
    return made;
}

/* The choices that plan_step() was called with. */
struct step_ask {
    uint8_t *fates;
    uint32_t fate_count;
    struct lh_plan_block_choice *blocks; /* NULL: none were given */
    uint32_t block_count;
    enum lh_plan_schedule schedule;
    uint32_t master_bytes; /* UINT32_MAX: the model's residual */
    bool must_fit;
};

static int choice_make(const struct step_ask *ask, const struct lh_plan_model *model,
                       struct lh_plan_choice *choice, struct lh_error *err)
{
    if (ask->fate_count != choice->layer_count)
        return lh_error_set(err, -EINVAL, "%u choices for %u layers", ask->fate_count,
                            choice->layer_count);
    if (ask->blocks && ask->block_count != choice->block_count)
        return lh_error_set(err, -EINVAL, "%u choices for %u blocks", ask->block_count,
                            choice->block_count);
    memcpy(choice->fates, ask->fates, ask->fate_count * sizeof(*ask->fates));
    if (ask->blocks)
        memcpy(choice->blocks, ask->blocks, ask->block_count * sizeof(*ask->blocks));
    choice->schedule = ask->schedule;
    choice->master_bytes =
        ask->master_bytes == UINT32_MAX ? model->residual_bytes : ask->master_bytes;
    return lh_plan_choice_check(choice, model, err);
}

static PyObject *step_run(const struct step_ask *ask, const struct lh_plan_model *model,
                          const struct lh_plan_machine *machine, struct lh_alloc *alloc)
{
    struct lh_error err = {0};
    struct lh_plan plan = {0};
    if (lh_plan_choice_init(&plan.choice, model, alloc, &err) < 0)
        return lhpy_raise_builtin(&err);
    int rc = choice_make(ask, model, &plan.choice, &err);
    if (rc == 0)
        rc = lh_plan_step_make(&plan.step, &plan.choice, model, machine, alloc, &err);
    if (rc == 0 && ask->must_fit)
        rc = lh_plan_step_check(&plan.step, machine, &err);
    PyObject *made = rc < 0 ? lhpy_raise_builtin(&err) : plan_dict(&plan);
    lh_plan_deinit(&plan, alloc);
    return made;
}

static PyObject *plan_step(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    struct input input = INPUT_INIT;
    struct step_ask ask = {.master_bytes = UINT32_MAX, .must_fit = true};
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_model model;
    if (LHPY_ARGS(
            args, kwargs, INPUT_ARGS(input),
            LHPY_ARG_ROWS("fates", ask.fates, ask.fate_count, fate_table),
            LHPY_ARG_ROWS("blocks", ask.blocks, ask.block_count, choice_table, .is_optional = true,
                          .may_be_none = true),
            LHPY_ARG_AS("schedule", ask.schedule, .is_optional = true, .names = schedule_names),
            LHPY_ARG_AS("master_bytes", ask.master_bytes, .is_optional = true, .may_be_none = true,
                        .max = UINT32_MAX - 1),
            LHPY_ARG_AS("must_fit", ask.must_fit, .is_optional = true)) < 0)
        return NULL;
    PyObject *made = NULL;
    if (model_make(&input, &model, &alloc) == 0) {
        made = step_run(&ask, &model, &input.machine, &alloc);
        lh_plan_model_deinit(&model, &alloc);
    }
    PyMem_Free(ask.fates);
    PyMem_Free(ask.blocks);
    return made;
}

static const struct lhpy_table name_table = LHPY_TABLE_OF("a policy", const char *);

static PyObject *plan_policies(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    const char *const *names = lh_plan_policy_names();
    uint32_t count = 0;
    while (names[count])
        count++;
    return lhpy_list(&name_table, names, count);
}

PyMethodDef lhpy_plan_functions[] = {
    {"plan", plan_call, METH_VARARGS, "plan(model, machine, policy) -> dict"},
    {"plan_step", LHPY_KEYWORDS(plan_step),
     "plan_step(model, machine, fates, blocks=None, schedule='optimized', master_bytes=None,"
     " must_fit=True) -> dict"},
    {"plan_policies", plan_policies, METH_NOARGS, "The names of the policies."},
    {NULL, NULL, 0, NULL},
};
