/*
 * Which parameter's cast a saved tensor is.
 *
 * Under autocast an operation saves the cast of a weight, which lies outside every unit. [Note:
 * Casts have a history] autograd's graph tells where a tensor comes from: the cast of a trained
 * parameter, or the tensor that it is a view of, was made by ToCopyBackward0, whose only input is
 * the parameter (AccumulateGrad), or its transpose (TBackward0). No value is read, so this serves
 * every device. Three things would make the cast differ from the one that unpack makes, and are
 * checked: its values were changed since (its version), it has another layout in memory (its
 * strides, if the cast was asked for a memory format), or it went through another dtype (a second
 * ToCopyBackward0).
 *
 * A frozen parameter's cast has no history, and other views before the cast are not followed. In
 * main memory such a cast is found by comparing values, because a wrong guess would make a wrong
 * gradient. On an accelerator, the comparison would have to wait for the device. There, the class
 * of a frozen parameter (python/lohan/torch_glue/_cast.py) makes the cast that autocast would make,
 * and its attribute SOURCE is the parameter.
 */
#include <string.h>

#include "base/assert.h"
#include "compute/cast.h"
#include "py/lhpy.h"

#define SOURCE "_lohan_cast_of"

/* The attribute of object. NULL without a Python error if it has none. */
static PyObject *attribute(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (!value)
        PyErr_Clear();
    return value;
}

static bool is_node(PyObject *node, const char *name)
{
    PyObject *type_name = attribute((PyObject *)Py_TYPE(node), "__name__");
    bool is_it = type_name && PyUnicode_CompareWithASCIIString(type_name, name) == 0;
    Py_XDECREF(type_name);
    return is_it;
}

/* Return the node that produced the first input of node, and release node. NULL: no such node. */
static PyObject *node_input(PyObject *node)
{
    PyObject *inputs = attribute(node, "next_functions");
    Py_DECREF(node);
    PyObject *first = inputs ? PySequence_GetItem(inputs, 0) : NULL;
    PyObject *input = first ? PySequence_GetItem(first, 0) : NULL;
    Py_XDECREF(inputs);
    Py_XDECREF(first);
    PyErr_Clear(); /* a node without inputs */
    if (input == Py_None)
        Py_CLEAR(input);
    return input;
}

/* Return the index of the bound parameter whose object is tensor; param_count: no such one. */
static uint32_t bound_param(const struct lhpy_engine *self, const PyObject *tensor)
{
    for (uint32_t i = 0; i < self->bound_unit_count; i++) {
        const struct lh_engine_unit *unit = &self->units[self->bound_units[i]];
        for (uint32_t j = 0; j < unit->param_count; j++)
            if (self->params[unit->param_first + j].tensor == tensor)
                return unit->param_first + j;
    }
    return self->param_count;
}

/* Whether cast has the sizes and strides of param, in reverse order if it is a transpose. */
static bool is_laid_out_as(const struct lhpy_dl_tensor *cast, const struct lhpy_param *param,
                           bool is_transpose)
{
    if (cast->ndim != param->ndim || (is_transpose && param->ndim != 2))
        return false;
    for (int32_t i = 0; i < param->ndim; i++) {
        int32_t j = is_transpose ? param->ndim - 1 - i : i;
        bool is_same_stride = cast->strides[i] == param->shape[param->ndim + j];
        if (cast->shape[i] != param->shape[j] || (!is_same_stride && cast->shape[i] > 1))
            return false;
    }
    return lhpy_tensor_is_dense(cast);
}

/* Find the parameter that the tensor whole was cast from, by its history. */
static uint32_t history_find(const struct lhpy_engine *self, PyObject *whole,
                             const struct lhpy_dl_tensor *view)
{
    PyObject *node = lhpy_tensor_version(whole) == 0 ? attribute(whole, "grad_fn") : NULL;
    PyErr_Clear(); /* a tensor created under inference_mode has no version */
    bool is_cast = node && is_node(node, "ToCopyBackward0");
    if (!is_cast) {
        Py_XDECREF(node);
        return self->param_count;
    }
    node = node_input(node);
    bool is_transpose = node && is_node(node, "TBackward0");
    if (is_transpose)
        node = node_input(node);
    PyObject *variable = node ? attribute(node, "variable") : NULL;
    Py_XDECREF(node);
    uint32_t param = variable ? bound_param(self, variable) : self->param_count;
    Py_XDECREF(variable);
    if (param == self->param_count || !is_laid_out_as(view, &self->params[param], is_transpose))
        return self->param_count;
    return param;
}

/* Find the parameter that the tensor whole was cast from by the parameter's class. */
static uint32_t source_find(const struct lhpy_engine *self, PyObject *whole,
                            const struct lhpy_dl_tensor *view)
{
    PyObject *source = attribute(whole, SOURCE);
    uint32_t param = source ? bound_param(self, source) : self->param_count;
    Py_XDECREF(source);
    if (param < self->param_count && !is_laid_out_as(view, &self->params[param], false))
        return self->param_count;
    return param;
}

/*
 * Find the parameter of a bound unit whose cast equals tensor bit for bit; param_count if there is
 * none. The unit must be in main memory.
 */
static uint32_t values_find(const struct lhpy_engine *self, const struct lhpy_dl_tensor *tensor)
{
    int64_t count = lhpy_tensor_count(tensor);
    enum lh_dtype dtype = lhpy_dtype(tensor->dtype);
    if (!lhpy_tensor_is_dense(tensor))
        return self->param_count;
    for (uint32_t i = 0; i < self->bound_unit_count; i++) {
        const struct lh_engine_unit *unit = &self->units[self->bound_units[i]];
        const uint8_t *base = lh_engine_address(self->core->engine, self->bound_units[i]);
        for (uint32_t j = 0; j < unit->param_count; j++) {
            uint32_t param = unit->param_first + j;
            if (self->engine_params[param].count != (uint64_t)count ||
                lhpy_dtype(self->params[param].dtype) != LH_DTYPE_F32)
                continue;
            const float *values = (const float *)(base + self->params[param].byte_offset);
            if (lh_cast_is_of(tensor->data, dtype, values, (uint64_t)count))
                return param;
        }
    }
    return self->param_count;
}

uint32_t lhpy_cast_find(const struct lhpy_engine *self, PyObject *tensor,
                        const struct lhpy_dl_tensor *view, uint64_t *byte_offset_out)
{
    *byte_offset_out = 0;
    struct lhpy_dl_type dtype = self->autocast_dtype;
    if (dtype.bits == 0 || memcmp(&view->dtype, &dtype, sizeof(dtype)) != 0 ||
        lhpy_tensor_count(view) == 0)
        return self->param_count;
    PyObject *base = attribute(tensor, "_base");
    PyObject *whole = base && base != Py_None ? base : tensor;
    struct lhpy_dl_tensor whole_view;
    uint32_t param = self->param_count;
    if (lhpy_tensor_read(whole, &whole_view) < 0)
        PyErr_Clear();
    else if (memcmp(&whole_view.dtype, &dtype, sizeof(dtype)) == 0) {
        param = history_find(self, whole, &whole_view);
        if (param == self->param_count && view->device_type != LHPY_DL_DEVICE_CPU)
            param = source_find(self, whole, &whole_view);
    }
    if (param < self->param_count)
        *byte_offset_out = (uint64_t)((const uint8_t *)view->data - (uint8_t *)whole_view.data);
    Py_XDECREF(base);
    if (param == self->param_count && view->device_type == LHPY_DL_DEVICE_CPU)
        param = values_find(self, view);
    return param;
}
