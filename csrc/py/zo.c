/* Passes of zeroth-order training over addresses (compute/zo.h), on the CPU or on a device. */
#include <string.h>

#include "compute/zo_launch.h"
#include "py/lhpy.h"

#define OP_COUNT_MAX 1024

static const struct lhpy_table name_table =
    LHPY_TABLE_PLAIN("a kernel", LHPY_FORM_VALUE, struct lh_zo_kernel, name);

static PyObject *zo_kernels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    const struct lh_zo_kernel *kernels;
    uint32_t count = (uint32_t)lh_zo_kernels(&kernels);
    PyObject *list = lhpy_list(&name_table, kernels, count);
    PyObject *names = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return names;
}

static const struct lh_zo_kernel *kernel_named(const char *name)
{
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    for (int i = 0; i < count; i++) {
        if (!name || strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    }
    PyErr_Format(PyExc_ValueError, "kernel %s is not available on this machine: see zo_kernels()",
                 name);
    return NULL;
}

static const char *const kind_names[] = {"perturb", "update", "draw", "round", NULL};
static const char *const state_formats[] = {"fp32", "bf16", "fp16", "fp8", NULL};
static const char *const value_formats[] = {"fp32", "bf16", "fp16", NULL};

static const struct lhpy_table op_table = LHPY_TABLE(
    "an op", LHPY_FORM_TUPLE, struct lh_zo_op,
    LHPY_FIELD(struct lh_zo_op, kind, .names = kind_names), LHPY_FIELD(struct lh_zo_op, is_same),
    LHPY_FIELD_AS("seed", struct lh_zo_op, stream.seed),
    LHPY_FIELD_AS("sample", struct lh_zo_op, stream.sample, .max = LH_ZO_SAMPLE_COUNT_MAX - 1),
    LHPY_FIELD_AS("param", struct lh_zo_op, stream.param),
    LHPY_FIELD_AS("step", struct lh_zo_op, stream.step),
    LHPY_FIELDS(struct lh_zo_op, scale, lr, decay));

/* Refuse is_same for an op that uses no z, or that follows no op with a z. */
static int same_check(const struct lh_zo_op *ops, uint32_t i)
{
    const char *what = NULL;
    if (i == 0)
        what = "the first op has no z before it";
    else if (ops[i].kind == LH_ZO_OP_ROUND)
        what = "a round has no z";
    else if (ops[i - 1].kind == LH_ZO_OP_ROUND)
        what = "an op after a round has no z before it";
    if (!ops[i].is_same || !what)
        return 0;
    PyErr_SetString(PyExc_ValueError, what);
    return -1;
}

/* format: that of every ROUND; NULL: a ROUND is an error. Release the ops with PyMem_Free(). */
static int ops_read(PyObject *rows, const enum lh_zo_format *format, struct lh_zo_op **ops_out,
                    uint32_t *count_out)
{
    if (lhpy_rows_read(rows, &op_table, ops_out, count_out) < 0)
        return -1;
    bool is_wrong = *count_out > OP_COUNT_MAX;
    if (is_wrong)
        PyErr_Format(PyExc_ValueError, "%u ops: at most %d", *count_out, OP_COUNT_MAX);
    for (uint32_t i = 0; !is_wrong && i < *count_out; i++) {
        bool is_round = (*ops_out)[i].kind == LH_ZO_OP_ROUND;
        is_wrong = (is_round && !format) || same_check(*ops_out, i) < 0;
        if (is_round && format)
            (*ops_out)[i].format = *format;
        else if (is_round)
            PyErr_SetString(PyExc_ValueError, "a round needs a format");
    }
    if (!is_wrong)
        return 0;
    PyMem_Free(*ops_out);
    return -1;
}

static int range_check(uint64_t first, uint64_t count)
{
    if (first <= LH_ZO_ELEMENT_COUNT_MAX && count <= LH_ZO_ELEMENT_COUNT_MAX - first)
        return 0;
    PyErr_Format(PyExc_ValueError, "%llu elements from %llu on: at most 2^50",
                 (unsigned long long)count, (unsigned long long)first);
    return -1;
}

static PyObject *zo_apply(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    void *values;
    const void *source;
    uint64_t first, count;
    PyObject *rows;
    const char *name = NULL;
    uint32_t format = UINT32_MAX;
    struct lh_zo_op *ops = NULL;
    uint32_t op_count = 0;

    if (LHPY_ARGS(
            args, kwargs, LHPY_ARG_AS("values_ptr", values), LHPY_ARG_AS("source_ptr", source),
            LHPY_ARG(first), LHPY_ARG(count), LHPY_ARG_AS("ops", rows),
            LHPY_ARG_AS("kernel", name, .is_optional = true, .may_be_none = true),
            LHPY_ARG(format, .is_optional = true, .may_be_none = true, .names = state_formats)) < 0)
        return NULL;
    const struct lh_zo_kernel *kernel = kernel_named(name);
    const enum lh_zo_format rounded = (enum lh_zo_format)format;
    if (!kernel || range_check(first, count) < 0 ||
        ops_read(rows, format < UINT32_MAX ? &rounded : NULL, &ops, &op_count) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lh_zo_apply_by(kernel, values, source, first, count, ops, op_count);
    Py_END_ALLOW_THREADS
    PyMem_Free(ops);
    return Py_NewRef(Py_None);
}

static PyObject *zo_lead(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    uint64_t first, count;
    PyObject *rows;
    const char *name = NULL;
    struct lh_zo_kept kept = {0};
    struct lh_zo_op *ops = NULL;
    uint32_t op_count = 0;

    if (LHPY_ARGS(args, kwargs, LHPY_ARG_AS("state_ptr", kept.state),
                  LHPY_ARG_AS("state_format", kept.state_format, .names = state_formats),
                  LHPY_ARG_AS("values_ptr", kept.values),
                  LHPY_ARG_AS("value_format", kept.value_format, .names = value_formats),
                  LHPY_ARG(first), LHPY_ARG(count), LHPY_ARG_AS("ops", rows),
                  LHPY_ARG_AS("kernel", name, .is_optional = true, .may_be_none = true)) < 0)
        return NULL;
    const struct lh_zo_kernel *kernel = kernel_named(name);
    if (!kernel || range_check(first, count) < 0 ||
        ops_read(rows, &kept.state_format, &ops, &op_count) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lh_zo_lead_by(kernel, &kept, first, count, ops, op_count);
    Py_END_ALLOW_THREADS
    PyMem_Free(ops);
    return Py_NewRef(Py_None);
}

/* Load the device's kernel for engine_zo_lead(), if the device needs one. */
static PyObject *engine_zo_load(PyObject *object, PyObject *image)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    struct lh_error err = {0};
    if (lhpy_check_open(self) < 0)
        return NULL;
    if (!PyBytes_Check(image) || self->zo_kernel) {
        PyErr_SetString(PyExc_TypeError, "zo_load() takes bytes, and can be called only once");
        return NULL;
    }
    struct lh_dev *dev = self->core->dev;
    if (!dev || !dev->ops->kernel_load)
        return Py_NewRef(Py_None); /* the passes run on the CPU */
    const void *code = PyBytes_AsString(image);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = dev->ops->kernel_load(dev, code, LH_ZO_KERNEL_NAME, &self->zo_kernel, &err);
    Py_END_ALLOW_THREADS
    if (rc < 0)
        return lhpy_raise_error(self->raiser, &err);
    lhpy_replace(&self->zo_image, Py_NewRef(image));
    return Py_NewRef(Py_None);
}

void lhpy_engine_zo_unload(struct lhpy_engine *self)
{
    struct lh_dev *dev = self->core->dev;
    if (self->zo_kernel)
        dev->ops->kernel_unload(dev, self->zo_kernel);
    self->zo_kernel = NULL;
}

/* Run ops by launches, or on the CPU. kept->state is NULL: values are updated in place. */
static int lead(struct lhpy_engine *self, const struct lh_zo_kept *kept, uint64_t first,
                uint64_t count, const struct lh_zo_op *ops, uint32_t op_count, void *stream,
                struct lh_error *err)
{
    struct lh_dev *dev = self->core->dev;
    bool is_launched = dev && dev->ops->launch;
    if (kept->state) /* checked on every machine: ops that a GPU refuses fail on the CPU, too */
        LH_TRY(lh_zo_launch_check(ops, op_count, err));
    if (is_launched && kept->state)
        return lh_zo_launch_lead(dev, self->zo_kernel, stream, kept, first, count, ops, op_count,
                                 err);
    if (is_launched)
        return lh_zo_launch(dev, self->zo_kernel, stream, kept->values, first, count, ops, op_count,
                            err);
    if (kept->state)
        lh_zo_lead(kept, first, count, ops, op_count);
    else
        lh_zo_apply(kept->values, kept->values, first, count, ops, op_count);
    return 0;
}

/* Like zo_apply(), or with a state like zo_lead(), on torch's current stream. */
static PyObject *engine_zo_lead(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint64_t count = 0, first = 0;
    struct lh_zo_kept kept = {0};
    struct lh_error err = {0};
    struct lh_zo_op *ops = NULL;
    uint32_t op_count = 0;
    PyObject *rows;

    if (!self ||
        LHPY_ARGS(args, NULL, LHPY_ARG_AS("address", kept.values), LHPY_ARG(count),
                  LHPY_ARG_AS("ops", rows), LHPY_ARG_AS("state", kept.state, .is_optional = true),
                  LHPY_ARG_AS("state_format", kept.state_format, .is_optional = true,
                              .names = state_formats),
                  LHPY_ARG_AS("value_format", kept.value_format, .is_optional = true,
                              .names = value_formats),
                  LHPY_ARG(first, .is_optional = true)) < 0)
        return NULL;
    struct lh_dev *dev = self->core->dev;
    bool is_long = first > LH_ZO_ELEMENT_COUNT_MAX || count > LH_ZO_ELEMENT_COUNT_MAX - first;
    if (is_long || (dev && dev->ops->launch && !self->zo_kernel)) {
        PyErr_SetString(PyExc_ValueError, "zo_lead() takes at most 2^50 elements, after zo_load()");
        return NULL;
    }
    if (!kept.state &&
        (kept.state_format != LH_ZO_FORMAT_F32 || kept.value_format != LH_ZO_FORMAT_F32)) {
        PyErr_SetString(PyExc_ValueError, "values must be fp32 if there is no state");
        return NULL;
    }
    if (ops_read(rows, kept.state ? &kept.state_format : NULL, &ops, &op_count) < 0)
        return NULL;
    void *stream = lhpy_device_stream(self);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lead(self, &kept, first, count, ops, op_count, stream, &err);
    Py_END_ALLOW_THREADS
    PyMem_Free(ops);
    return rc < 0 ? lhpy_raise_error(self->raiser, &err) : Py_NewRef(Py_None);
}

PyMethodDef lhpy_zo_methods[] = {
    {"zo_load", engine_zo_load, METH_O, "zo_load(image of the device's kernels)"},
    {"zo_lead", engine_zo_lead, METH_VARARGS,
     "zo_lead(address, count, ops[, state, state_format, value_format, first]): zo_apply() or "
     "zo_lead() on the device, which executes it in order."},
    {NULL, NULL, 0, NULL},
};

PyMethodDef lhpy_zo_functions[] = {
    {"zo_kernels", zo_kernels, METH_NOARGS, "Names of the kernels, best first."},
    {"zo_apply", LHPY_KEYWORDS(zo_apply),
     "Ops of zeroth-order training, in order, over a range of a parameter."},
    {"zo_lead", LHPY_KEYWORDS(zo_lead),
     "The same to what is kept in a format, and what computation reads of it."},
    {NULL, NULL, 0, NULL},
};
