#include "py/plan.h"

#include <string.h>

#include "plan/policy.h"

PyObject *lhpy_plan_raise(const struct lh_error *err)
{
    PyObject *kind = PyExc_OSError;
    if (err->code == -EINVAL)
        kind = PyExc_ValueError;
    else if (err->code == -ENOMEM || err->code == -ENOSPC)
        kind = PyExc_MemoryError;
    PyErr_SetString(kind, err->message);
    return NULL;
}

/* A new reference, or NULL with an error that names the owner of the missing key. */
static PyObject *item_get(PyObject *dict, const char *key, const char *owner)
{
    if (!dict || !PyDict_Check(dict)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "a %s must be a dict", owner);
        return NULL;
    }
    PyObject *item = PyDict_GetItemString(dict, key);
    if (!item)
        PyErr_Format(PyExc_ValueError, "a %s has no '%s'", owner, key);
    return Py_XNewRef(item);
}

static int u64_get(PyObject *dict, const char *key, const char *owner, uint64_t *value)
{
    PyObject *item = item_get(dict, key, owner);
    if (!item)
        return -1;
    *value = PyLong_AsUnsignedLongLong(item);
    Py_DECREF(item);
    if (!PyErr_Occurred())
        return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "a %s's '%s' must be an integer from 0 to 2**64 - 1", owner,
                 key);
    return -1;
}

static int u32_get(PyObject *dict, const char *key, const char *owner, uint32_t *value)
{
    uint64_t wide = 0;
    if (u64_get(dict, key, owner, &wide) < 0)
        return -1;
    if (wide > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "a %s's '%s' must be at most 2**31 - 1", owner, key);
        return -1;
    }
    *value = (uint32_t)wide;
    return 0;
}

static int bool_get(PyObject *dict, const char *key, const char *owner, bool *value)
{
    PyObject *item = item_get(dict, key, owner);
    if (!item)
        return -1;
    *value = item == Py_True;
    bool is_bool = PyBool_Check(item);
    Py_DECREF(item);
    if (!is_bool)
        PyErr_Format(PyExc_ValueError, "a %s's '%s' must be True or False", owner, key);
    return is_bool ? 0 : -1;
}

int lhpy_plan_machine_parse(PyObject *dict, struct lh_plan_machine *machine)
{
    *machine = (struct lh_plan_machine){0};
    const struct {
        const char *key;
        uint64_t *value;
    } fields[] = {
        {"gpu_flop_per_s", &machine->gpu_flop_per_s},
        {"gpu_bytes", &machine->gpu_bytes},
        {"link_in_bytes_per_s", &machine->link_in_bytes_per_s},
        {"link_out_bytes_per_s", &machine->link_out_bytes_per_s},
        {"host_bytes", &machine->host_bytes},
        {"adam_params_per_s", &machine->adam_params_per_s},
        {"ssd_count", &machine->ssd_count},
        {"ssd_bytes", &machine->ssd_bytes},
        {"ssd_read_bytes_per_s", &machine->ssd_read_bytes_per_s},
        {"ssd_write_bytes_per_s", &machine->ssd_write_bytes_per_s},
        {"ssd_total_bytes_per_s", &machine->ssd_total_bytes_per_s},
    };
    for (size_t i = 0; i < LH_COUNT_OF(fields); i++)
        if (u64_get(dict, fields[i].key, "machine", fields[i].value) < 0)
            return -1;
    struct lh_error err = {0};
    if (lh_plan_machine_check(machine, &err) == 0)
        return 0;
    lhpy_plan_raise(&err);
    return -1;
}

static int layer_parse(PyObject *dict, struct lh_plan_layer *layer)
{
    if (u64_get(dict, "param_count", "layer", &layer->param_count) < 0 ||
        u64_get(dict, "forward_flop", "layer", &layer->forward_flop) < 0 ||
        u64_get(dict, "activation_bytes", "layer", &layer->activation_bytes) < 0 ||
        u64_get(dict, "working_bytes", "layer", &layer->working_bytes) < 0 ||
        bool_get(dict, "is_inter_block", "layer", &layer->is_inter_block) < 0)
        return -1;
    return 0;
}

/* The item of a list of dicts, borrowed; NULL with an error. */
static PyObject *list_get(PyObject *dict, const char *key, const char *owner)
{
    PyObject *list = item_get(dict, key, owner);
    if (list && !PyList_Check(list)) {
        PyErr_Format(PyExc_TypeError, "a %s's '%s' must be a list", owner, key);
        Py_CLEAR(list);
    }
    return list;
}

static int block_parse(PyObject *dict, struct lh_plan_model *model, uint32_t index,
                       uint32_t *layer_next)
{
    struct lh_plan_block *block = &model->blocks[index];
    PyObject *layers = list_get(dict, "layers", "block");
    PyObject *shared = layers ? item_get(dict, "shared_block", "block") : NULL;
    int rc = layers && shared ? 0 : -1;
    block->shared_block = LH_PLAN_BLOCK_NONE;
    if (rc == 0 && shared != Py_None)
        rc = u32_get(dict, "shared_block", "block", &block->shared_block);
    block->layer_first = *layer_next;
    Py_ssize_t count = layers ? PyList_Size(layers) : 0;
    /* The list grew after its layers were counted. */
    if (rc == 0 && count > (Py_ssize_t)(model->layer_count - *layer_next)) {
        PyErr_SetString(PyExc_RuntimeError, "the model was modified while it was being read");
        rc = -1;
    }
    for (Py_ssize_t i = 0; rc == 0 && i < count; i++)
        rc = layer_parse(PyList_GetItem(layers, i), &model->layers[(*layer_next)++]);
    block->layer_count = (uint32_t)count;
    Py_XDECREF(layers);
    Py_XDECREF(shared);
    return rc;
}

/* -1 with an error. */
static Py_ssize_t layers_count(PyObject *blocks)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(blocks); i++) {
        PyObject *layers = list_get(PyList_GetItem(blocks, i), "layers", "block");
        if (!layers)
            return -1;
        count += PyList_Size(layers);
        Py_DECREF(layers);
    }
    return count;
}

static int blocks_parse(PyObject *blocks, struct lh_plan_model *model, struct lh_alloc *alloc)
{
    Py_ssize_t layer_count = layers_count(blocks);
    Py_ssize_t block_count = PyList_Size(blocks);
    if (layer_count < 0)
        return -1;
    if (layer_count > INT32_MAX || block_count > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "a model of %zd blocks and %zd layers is too large",
                     block_count, layer_count);
        return -1;
    }
    struct lh_error err = {0};
    uint32_t param_bytes = model->param_bytes;
    uint32_t residual_bytes = model->residual_bytes;
    if (lh_plan_model_init(model, (uint32_t)block_count, (uint32_t)layer_count, alloc, &err) < 0) {
        lhpy_plan_raise(&err);
        return -1;
    }
    model->param_bytes = param_bytes;
    model->residual_bytes = residual_bytes;
    uint32_t layer_next = 0;
    int rc = 0;
    for (Py_ssize_t i = 0; rc == 0 && i < block_count; i++)
        rc = block_parse(PyList_GetItem(blocks, i), model, (uint32_t)i, &layer_next);
    if (rc == 0 && lh_plan_model_check(model, &err) < 0) {
        lhpy_plan_raise(&err);
        rc = -1;
    }
    if (rc < 0)
        lh_plan_model_deinit(model, alloc);
    return rc;
}

int lhpy_plan_model_parse(PyObject *dict, struct lh_plan_model *model, struct lh_alloc *alloc)
{
    *model = (struct lh_plan_model){0};
    if (u32_get(dict, "param_bytes", "model", &model->param_bytes) < 0 ||
        u32_get(dict, "residual_bytes", "model", &model->residual_bytes) < 0)
        return -1;
    PyObject *blocks = list_get(dict, "blocks", "model");
    int rc = blocks ? blocks_parse(blocks, model, alloc) : -1;
    Py_XDECREF(blocks);
    return rc;
}

static const char *const fate_names[LH_PLAN_FATE_COUNT] = {"keep", "host", "ssd", "recompute"};
static const char *const schedule_names[] = {"optimized", "naive", "serial"};

/* The index of a name, or -1 with an error. */
static int name_find(PyObject *name, const char *const *names, int name_count, const char *what)
{
    PyObject *bytes = PyUnicode_Check(name) ? PyUnicode_AsUTF8String(name) : NULL;
    const char *text = bytes ? PyBytes_AsString(bytes) : NULL;
    int index = text ? 0 : name_count;
    while (index < name_count && strcmp(names[index], text) != 0)
        index++;
    Py_XDECREF(bytes);
    if (index < name_count)
        return index;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "there is no %s %R", what, name);
    return -1;
}

/* Check that a list has one item for each of count things. 0, or -1 with an error. */
static int list_check(PyObject *list, uint32_t count, const char *what)
{
    if (!PyList_Check(list)) {
        PyErr_Format(PyExc_TypeError, "the choices for %ss must be a list", what);
        return -1;
    }
    if (PyList_Size(list) == (Py_ssize_t)count)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd choices for %u %ss", PyList_Size(list), count, what);
    return -1;
}

static int fates_parse(PyObject *list, struct lh_plan_choice *choice)
{
    if (list_check(list, choice->layer_count, "layer") < 0)
        return -1;
    for (uint32_t i = 0; i < choice->layer_count; i++) {
        int fate =
            name_find(PyList_GetItem(list, (Py_ssize_t)i), fate_names, LH_PLAN_FATE_COUNT, "fate");
        if (fate < 0)
            return -1;
        choice->fates[i] = (uint8_t)fate;
    }
    return 0;
}

static int blocks_choice_parse(PyObject *list, struct lh_plan_choice *choice)
{
    if (list_check(list, choice->block_count, "block") < 0)
        return -1;
    for (uint32_t i = 0; i < choice->block_count; i++) {
        PyObject *item = PyList_GetItem(list, (Py_ssize_t)i);
        struct lh_plan_block_choice *block = &choice->blocks[i];
        if (bool_get(item, "is_deferred", "block's choice", &block->is_deferred) < 0 ||
            bool_get(item, "has_host_p16", "block's choice", &block->has_host_p16) < 0 ||
            bool_get(item, "has_host_master", "block's choice", &block->has_host_master) < 0 ||
            bool_get(item, "has_host_moments", "block's choice", &block->has_host_moments) < 0)
            return -1;
    }
    return 0;
}

static PyObject *fates_list(const struct lh_plan_choice *choice)
{
    PyObject *list = PyList_New((Py_ssize_t)choice->layer_count);
    for (uint32_t i = 0; list && i < choice->layer_count; i++) {
        PyObject *name = PyUnicode_FromString(fate_names[choice->fates[i]]);
        if (!name || PyList_SetItem(list, (Py_ssize_t)i, name) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *blocks_list(const struct lh_plan_choice *choice)
{
    PyObject *list = PyList_New((Py_ssize_t)choice->block_count);
    for (uint32_t i = 0; list && i < choice->block_count; i++) {
        const struct lh_plan_block_choice *block = &choice->blocks[i];
        PyObject *item =
            Py_BuildValue("{s:N,s:N,s:N,s:N}", "is_deferred", PyBool_FromLong(block->is_deferred),
                          "has_host_p16", PyBool_FromLong(block->has_host_p16), "has_host_master",
                          PyBool_FromLong(block->has_host_master), "has_host_moments",
                          PyBool_FromLong(block->has_host_moments));
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *step_dict(const struct lh_plan_step *step)
{
    static const char *const names[LH_PLAN_RESOURCE_COUNT] = {"gpu", "link_in", "link_out", "ssd",
                                                              "cpu"};
    PyObject *busy = PyDict_New();
    for (int i = 0; busy && i < LH_PLAN_RESOURCE_COUNT; i++) {
        PyObject *value = PyFloat_FromDouble(step->busy_s[i]);
        if (!value || PyDict_SetItemString(busy, names[i], value) < 0)
            Py_CLEAR(busy);
        Py_XDECREF(value);
    }
    if (!busy)
        return NULL;
    return Py_BuildValue(
        "{s:d,s:N,s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "iteration_s",
        step->iteration_s, "busy_s", busy, "bound_by", names[step->bound_by], "recompute_flop",
        step->recompute_flop, "kept_bytes", step->kept_bytes, "swapped_bytes", step->swapped_bytes,
        "swapped_ssd_bytes", step->swapped_ssd_bytes, "link_in_bytes", step->link_in_bytes,
        "link_out_bytes", step->link_out_bytes, "ssd_read_bytes", step->ssd_read_bytes,
        "ssd_write_bytes", step->ssd_write_bytes, "commit_bytes", step->commit_bytes,
        "commit_every", step->commit_every, "gpu_bytes", step->gpu_bytes, "host_bytes",
        step->host_bytes, "ssd_bytes", step->ssd_bytes);
}

static PyObject *plan_dict(const struct lh_plan *plan)
{
    const struct lh_plan_choice *choice = &plan->choice;
    PyObject *fates = fates_list(choice);
    PyObject *blocks = fates ? blocks_list(choice) : NULL;
    if (!blocks) {
        Py_XDECREF(fates);
        return NULL;
    }
    PyObject *step = step_dict(&plan->step);
    if (!step) {
        Py_DECREF(fates);
        Py_DECREF(blocks);
        return NULL;
    }
    return Py_BuildValue("{s:N,s:N,s:N,s:s,s:I,s:i,s:d}", "layers", fates, "blocks", blocks, "step",
                         step, "schedule", schedule_names[choice->schedule], "master_bytes",
                         (unsigned int)choice->master_bytes, "case", (int)plan->kind, "policy_s",
                         plan->policy_s);
}

static PyObject *plan_call(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *model_dict = NULL;
    PyObject *machine_dict = NULL;
    const char *policy = NULL;
    if (!PyArg_ParseTuple(args, "OOs", &model_dict, &machine_dict, &policy))
        return NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_machine machine;
    struct lh_plan_model model;
    if (lhpy_plan_machine_parse(machine_dict, &machine) < 0 ||
        lhpy_plan_model_parse(model_dict, &model, &alloc) < 0)
        return NULL;
    struct lh_error err = {0};
    struct lh_plan plan;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lh_plan_make(&plan, &model, &machine, policy, &alloc, &err);
    Py_END_ALLOW_THREADS
    PyObject *made = rc < 0 ? lhpy_plan_raise(&err) : plan_dict(&plan);
    if (rc == 0)
        lh_plan_deinit(&plan, &alloc);
    lh_plan_model_deinit(&model, &alloc);
    return made;
}

/* The choices that plan_step() was called with. */
struct step_ask {
    PyObject *fates;
    PyObject *blocks;   /* or NULL, None */
    PyObject *schedule; /* or NULL */
    PyObject *master_bytes;
    int must_fit;
};

static int choice_parse(const struct step_ask *ask, const struct lh_plan_model *model,
                        struct lh_plan_choice *choice)
{
    if (fates_parse(ask->fates, choice) < 0)
        return -1;
    if (ask->blocks && ask->blocks != Py_None && blocks_choice_parse(ask->blocks, choice) < 0)
        return -1;
    if (ask->schedule) {
        int schedule =
            name_find(ask->schedule, schedule_names, (int)LH_COUNT_OF(schedule_names), "schedule");
        if (schedule < 0)
            return -1;
        choice->schedule = (enum lh_plan_schedule)schedule;
    }
    choice->master_bytes = model->residual_bytes;
    if (ask->master_bytes && ask->master_bytes != Py_None) {
        unsigned long bytes = PyLong_AsUnsignedLong(ask->master_bytes);
        if (PyErr_Occurred())
            return -1;
        choice->master_bytes = bytes > UINT8_MAX ? UINT8_MAX : (uint32_t)bytes;
    }
    struct lh_error err = {0};
    if (lh_plan_choice_check(choice, model, &err) == 0)
        return 0;
    lhpy_plan_raise(&err);
    return -1;
}

static PyObject *step_run(const struct step_ask *ask, const struct lh_plan_model *model,
                          const struct lh_plan_machine *machine, struct lh_alloc *alloc)
{
    struct lh_error err = {0};
    struct lh_plan plan = {0};
    if (lh_plan_choice_init(&plan.choice, model, alloc, &err) < 0)
        return lhpy_plan_raise(&err);
    PyObject *made = NULL;
    if (choice_parse(ask, model, &plan.choice) == 0) {
        int rc = lh_plan_step_make(&plan.step, &plan.choice, model, machine, alloc, &err);
        if (rc == 0 && ask->must_fit)
            rc = lh_plan_step_check(&plan.step, machine, &err);
        made = rc < 0 ? lhpy_plan_raise(&err) : plan_dict(&plan);
    }
    lh_plan_deinit(&plan, alloc);
    return made;
}

static PyObject *plan_step(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"",         "",  "fates", "blocks", "schedule", "master_bytes",
                            "must_fit", NULL};
    PyObject *model_dict = NULL;
    PyObject *machine_dict = NULL;
    struct step_ask ask = {.must_fit = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|OOOp", names, &model_dict, &machine_dict,
                                     &ask.fates, &ask.blocks, &ask.schedule, &ask.master_bytes,
                                     &ask.must_fit))
        return NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_machine machine;
    struct lh_plan_model model;
    if (lhpy_plan_machine_parse(machine_dict, &machine) < 0 ||
        lhpy_plan_model_parse(model_dict, &model, &alloc) < 0)
        return NULL;
    PyObject *made = step_run(&ask, &model, &machine, &alloc);
    lh_plan_model_deinit(&model, &alloc);
    return made;
}

static PyObject *plan_policies(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    PyObject *list = PyList_New(0);
    for (const char *const *name = lh_plan_policy_names(); list && *name; name++) {
        PyObject *item = PyUnicode_FromString(*name);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyMethodDef plan_methods[] = {
    {"plan", plan_call, METH_VARARGS, "plan(model, machine, policy) -> dict"},
    {"plan_step", (PyCFunction)(void (*)(void))plan_step, METH_VARARGS | METH_KEYWORDS,
     "plan_step(model, machine, fates, blocks=None, schedule='optimized', master_bytes=None,"
     " must_fit=True) -> dict"},
    {"plan_policies", plan_policies, METH_NOARGS, "The names of the policies."},
    {NULL, NULL, 0, NULL},
};

int lhpy_plan_register(PyObject *module)
{
    return PyModule_AddFunctions(module, plan_methods);
}
