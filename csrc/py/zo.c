/* Passes of zeroth-order training over addresses (compute/zo.h), on the CPU or on a device. */
#include <string.h>

#include "compute/zo_launch.h"
#include "py/adam.h"

#define OP_COUNT_MAX 1024

static PyObject *zo_kernels(PyObject *module, PyObject *unused)
{
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    (void)module;
    (void)unused;
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(kernels[i].name);
        if (!name || PyTuple_SetItem(names, i, name) < 0)
            Py_CLEAR(names);
    }
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

static int format_parse(const char *name, enum lh_zo_format *format_out)
{
    static const char *const names[] = {"fp32", "bf16", "fp16", "fp8"};
    for (size_t i = 0; i < LH_COUNT_OF(names); i++) {
        if (strcmp(name, names[i]) == 0) {
            *format_out = (enum lh_zo_format)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "unknown format %s: must be fp32, bf16, fp16 or fp8", name);
    return -1;
}

/* format: of ROUND; NULL: there may be none. */
static int op_parse(PyObject *row, const enum lh_zo_format *format, struct lh_zo_op *op)
{
    static const char *const kinds[] = {"perturb", "update", "draw", "round"};
    unsigned long long seed;
    unsigned sample, param, step;
    const char *word;
    int is_same;
    if (!PyTuple_Check(row)) {
        PyErr_SetString(PyExc_TypeError, "an op must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(row, "spKIIIfff", &word, &is_same, &seed, &sample, &param, &step,
                          &op->scale, &op->lr, &op->decay))
        return -1;
    for (size_t i = 0; i < LH_COUNT_OF(kinds); i++) {
        if (strcmp(word, kinds[i]) != 0)
            continue;
        op->kind = (enum lh_zo_op_kind)i;
        op->is_same = is_same != 0;
        op->stream = (struct lh_zo_stream){seed, sample, param, step};
        if (op->kind == LH_ZO_OP_ROUND && !format) {
            PyErr_SetString(PyExc_ValueError, "a round needs a format");
            return -1;
        }
        if (op->kind == LH_ZO_OP_ROUND)
            op->format = *format;
        if (sample < LH_ZO_SAMPLE_COUNT_MAX)
            return 0;
        PyErr_Format(PyExc_ValueError, "sample %u: must be less than %d", sample,
                     LH_ZO_SAMPLE_COUNT_MAX);
        return -1;
    }
    PyErr_Format(PyExc_ValueError, "unknown op %s", word);
    return -1;
}

/* An op that has no z before it, or is no z's, is not of the same z. */
static int same_check(const struct lh_zo_op *ops, Py_ssize_t i)
{
    const char *what = NULL;
    if (i == 0)
        what = "the first op has no z before it";
    else if (ops[i].kind == LH_ZO_OP_ROUND)
        what = "a round has no z";
    else if (ops[i - 1].kind == LH_ZO_OP_ROUND)
        what = "an op behind a round has no z before it";
    if (!ops[i].is_same || !what)
        return 0;
    PyErr_SetString(PyExc_ValueError, what);
    return -1;
}

/* format: of ROUND; NULL: there may be none. */
static int ops_parse(PyObject *rows, const enum lh_zo_format *format, struct lh_zo_op **ops_out,
                     uint32_t *count_out)
{
    Py_ssize_t count = PySequence_Size(rows);
    if (count < 0)
        return -1;
    if (count > OP_COUNT_MAX) {
        PyErr_Format(PyExc_ValueError, "%zd ops: at most %d", count, OP_COUNT_MAX);
        return -1;
    }
    struct lh_zo_op *ops = PyMem_Calloc((size_t)count + 1, sizeof(*ops));
    if (!ops) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *row = PySequence_GetItem(rows, i);
        int rc = row ? op_parse(row, format, &ops[i]) : -1;
        Py_XDECREF(row);
        if (rc < 0 || same_check(ops, i) < 0) {
            PyMem_Free(ops);
            return -1;
        }
    }
    *ops_out = ops;
    *count_out = (uint32_t)count;
    return 0;
}

static int range_check(unsigned long long first, unsigned long long count)
{
    if (first <= LH_ZO_ELEMENT_COUNT_MAX && count <= LH_ZO_ELEMENT_COUNT_MAX - first)
        return 0;
    PyErr_Format(PyExc_ValueError, "elements %llu to %llu + %llu: at most 2^50", first, first,
                 count);
    return -1;
}

static PyObject *zo_apply(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"values_ptr", "source_ptr", "first",  "count",
                            "ops",        "kernel",     "format", NULL};
    unsigned long long values, source, first, count;
    const struct lh_zo_kernel *kernel;
    struct lh_zo_op *ops = NULL;
    const char *name = NULL, *format_name = NULL;
    enum lh_zo_format format;
    uint32_t op_count = 0;
    PyObject *rows;

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKO|zz", names, &values, &source, &first,
                                     &count, &rows, &name, &format_name))
        return NULL;
    kernel = kernel_named(name);
    if (!kernel || range_check(first, count) < 0)
        return NULL;
    if (format_name && format_parse(format_name, &format) < 0)
        return NULL;
    if (ops_parse(rows, format_name ? &format : NULL, &ops, &op_count) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lh_zo_apply_by(kernel, (float *)(uintptr_t)values, (const float *)(uintptr_t)source, first,
                   count, ops, op_count);
    Py_END_ALLOW_THREADS
    PyMem_Free(ops);
    return Py_NewRef(Py_None);
}

static int kept_parse(const char *state_format, const char *value_format, struct lh_zo_kept *kept)
{
    if (format_parse(state_format, &kept->state_format) < 0 ||
        format_parse(value_format, &kept->value_format) < 0)
        return -1;
    if (kept->value_format != LH_ZO_FORMAT_F8)
        return 0;
    PyErr_SetString(PyExc_ValueError, "values must be fp32, bf16 or fp16, not fp8");
    return -1;
}

static PyObject *zo_lead(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state_ptr",    "state_format", "values_ptr",
                            "value_format", "first",        "count",
                            "ops",          "kernel",       NULL};
    unsigned long long state, values, first, count;
    const char *state_format, *value_format, *name = NULL;
    const struct lh_zo_kernel *kernel;
    struct lh_zo_kept kept = {0};
    struct lh_zo_op *ops = NULL;
    uint32_t op_count = 0;
    PyObject *rows;

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KsKsKKO|z", names, &state, &state_format,
                                     &values, &value_format, &first, &count, &rows, &name))
        return NULL;
    kernel = kernel_named(name);
    if (!kernel || range_check(first, count) < 0 ||
        kept_parse(state_format, value_format, &kept) < 0)
        return NULL;
    if (ops_parse(rows, &kept.state_format, &ops, &op_count) < 0)
        return NULL;
    kept.state = (void *)(uintptr_t)state;
    kept.values = (void *)(uintptr_t)values;
    Py_BEGIN_ALLOW_THREADS
    lh_zo_lead_by(kernel, &kept, first, count, ops, op_count);
    Py_END_ALLOW_THREADS
    PyMem_Free(ops);
    return Py_NewRef(Py_None);
}

PyObject *lhpy_engine_zo_load(PyObject *object, PyObject *image)
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
        return Py_NewRef(Py_None); /* the CPU does it */
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

/* Run by launches, or on the CPU. kept->state NULL: values are updated in place. */
static int lead(struct lhpy_engine *self, const struct lh_zo_kept *kept, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count, void *stream, struct lh_error *err)
{
    struct lh_dev *dev = self->core->dev;
    bool is_launched = dev && dev->ops->launch;
    if (kept->state) /* wherever it is done: what a GPU refuses is not to pass without one */
        LH_TRY(lh_zo_launch_check(ops, op_count, err));
    if (is_launched && kept->state)
        return lh_zo_launch_lead(dev, self->zo_kernel, stream, kept, 0, count, ops, op_count, err);
    if (is_launched)
        return lh_zo_launch(dev, self->zo_kernel, stream, kept->values, 0, count, ops, op_count,
                            err);
    if (kept->state)
        lh_zo_lead(kept, 0, count, ops, op_count);
    else
        lh_zo_apply(kept->values, kept->values, 0, count, ops, op_count);
    return 0;
}

PyObject *lhpy_engine_zo_lead(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    const char *state_format = "fp32", *value_format = "fp32";
    unsigned long long address, count, state = 0;
    struct lh_zo_kept kept = {0};
    struct lh_error err = {0};
    struct lh_zo_op *ops = NULL;
    uint32_t op_count = 0;
    PyObject *rows;

    if (lhpy_check_open(self) < 0 || !PyArg_ParseTuple(args, "KKO|Kss", &address, &count, &rows,
                                                       &state, &state_format, &value_format))
        return NULL;
    struct lh_dev *dev = self->core->dev;
    if (count > LH_ZO_ELEMENT_COUNT_MAX || (dev && dev->ops->launch && !self->zo_kernel)) {
        PyErr_SetString(PyExc_ValueError, "zo_lead() takes at most 2^50 elements, after zo_load()");
        return NULL;
    }
    if (kept_parse(state_format, value_format, &kept) < 0 ||
        ops_parse(rows, state ? &kept.state_format : NULL, &ops, &op_count) < 0)
        return NULL;
    if (!state &&
        (kept.state_format != LH_ZO_FORMAT_F32 || kept.value_format != LH_ZO_FORMAT_F32)) {
        PyErr_SetString(PyExc_ValueError, "values must be fp32 if there is no state");
        PyMem_Free(ops);
        return NULL;
    }
    kept.state = (void *)(uintptr_t)state;
    kept.values = (void *)(uintptr_t)address;
    void *stream = lhpy_device_stream(self);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lead(self, &kept, count, ops, op_count, stream, &err);
    Py_END_ALLOW_THREADS
    PyMem_Free(ops);
    return rc < 0 ? lhpy_raise_error(self->raiser, &err) : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"zo_kernels", zo_kernels, METH_NOARGS, "Names of the kernels, best first."},
    {"zo_apply", (PyCFunction)(void (*)(void))zo_apply, METH_VARARGS | METH_KEYWORDS,
     "Ops of zeroth-order training, in order, over a range of a parameter."},
    {"zo_lead", (PyCFunction)(void (*)(void))zo_lead, METH_VARARGS | METH_KEYWORDS,
     "The same to what is kept in a format, and what computation reads of it."},
    {NULL, NULL, 0, NULL},
};

int lhpy_zo_register(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
