/*
 * Gradients that are summed over several backwards, and reach the engine as one.
 *
 * Each parameter has a place in one block of memory, in fp32 whatever the gradients' dtype is. Its
 * first gradient of a step is copied there, later ones are added in their hooks, so autograd's
 * tensors are freed at once. The engine does not see the gradients until the step is closed (or its
 * norm is requested): forwards and backwards in between are ordinary uses.
 */
#include "compute/sum.h"
#include "py/lhpy.h"

enum sum_state {
    SUM_STATE_NONE = 0,
    SUM_STATE_SUMMED,
    SUM_STATE_GIVEN, /* the engine reads the sum, until the step is over */
};

uint64_t lhpy_sums_bytes(const struct lhpy_engine *self)
{
    uint64_t elements = 0;
    for (uint32_t i = 0; i < self->unit_count; i++)
        elements += self->units[i].elements;
    return elements * sizeof(float);
}

void lhpy_sums_place(struct lhpy_engine *self, uint8_t *memory)
{
    float *next = (float *)(void *)memory;
    for (uint32_t i = 0; i < self->unit_count; i++) {
        const struct lh_engine_unit *unit = &self->units[i];
        for (uint32_t j = 0; unit->elements > 0 && j < unit->param_count; j++) {
            uint32_t index = unit->param_first + j;
            self->params[index].sum = next + self->engine_params[index].first;
        }
        next += unit->elements;
    }
    self->has_sums = true;
}

/*
 * [Note: Second gradients] After a backward p.grad is a stand-in (session/_gradients.py in the
 * Python package), to which autograd adds the next gradient; the stand-in keeps it for lohan.
 */
PyObject *lhpy_sums_unwrap(struct lhpy_engine *self, uint32_t index, PyObject *gradient)
{
    PyObject *take = PyObject_GetAttrString(gradient, "take_added");
    if (take) {
        PyObject *added = PyObject_CallNoArgs(take);
        Py_DECREF(take);
        return added;
    }
    PyErr_Clear();
    if (self->params[index].sum_state == SUM_STATE_NONE)
        return Py_NewRef(gradient);
    return lhpy_raise(self->raiser, -EINVAL,
                      "p.grad of param %u was removed or replaced between two backwards of one"
                      " step: the first one's gradient is in a sum already."
                      " model.optimizer.zero_grad() forgets the step",
                      index);
}

int lhpy_sums_add(struct lhpy_engine *self, uint32_t index, PyObject *gradient)
{
    struct lhpy_param *param = &self->params[index];
    struct lhpy_dl_tensor view;
    /* The gradient itself if it is in main memory; otherwise a copy, for which cpu() waits. */
    PyObject *host = PyObject_CallMethod(gradient, "cpu", NULL);
    if (!host || lhpy_tensor_read(host, &view) < 0) {
        Py_XDECREF(host);
        return -1;
    }
    enum lh_dtype dtype = lhpy_dtype(view.dtype);
    uint64_t count = self->engine_params[index].count;
    bool is_first = param->sum_state == SUM_STATE_NONE;
    Py_BEGIN_ALLOW_THREADS
    if (is_first)
        lh_sum_start(param->sum, view.data, dtype, count);
    else
        lh_sum_add(param->sum, view.data, dtype, count);
    Py_END_ALLOW_THREADS
    Py_DECREF(host);
    param->sum_state = SUM_STATE_SUMMED;
    return 0;
}

/*
 * sums_add(param, first, count, address, dtype, is_first): add a part of a gradient to a sum.
 *
 * The gradient may be another process's. Any thread may call this for other elements, or for the
 * same ones one after the other. is_first: no gradient of the step has been added to this part.
 */
static PyObject *sums_add(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0, dtype = 0;
    uint64_t first = 0, count = 0;
    const void *address = NULL;
    bool is_first = false;
    if (!self ||
        LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(first), LHPY_ARG(count),
                  LHPY_ARG(address), LHPY_ARG(dtype, .max = LH_DTYPE_F16), LHPY_ARG(is_first)) < 0)
        return NULL;
    if (lhpy_index_check("param", index, self->param_count) < 0)
        return NULL;
    struct lhpy_param *param = &self->params[index];
    uint64_t length = self->engine_params[index].count;
    if (!param->sum || first > length || count > length - first) {
        PyErr_Format(PyExc_ValueError, "param %u has no sum of %llu elements from %llu on", index,
                     (unsigned long long)count, (unsigned long long)first);
        return NULL;
    }
    param->sum_state = SUM_STATE_SUMMED;
    Py_BEGIN_ALLOW_THREADS
    if (is_first)
        lh_sum_start(param->sum + first, address, (enum lh_dtype)dtype, count);
    else
        lh_sum_add(param->sum + first, address, (enum lh_dtype)dtype, count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Hand to the engine every sum of the open step that it does not have yet. */
static PyObject *sums_give(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    for (uint32_t i = 0; self->has_sums && i < self->param_count; i++) {
        struct lhpy_param *param = &self->params[i];
        if (param->sum_state != SUM_STATE_SUMMED)
            continue;
        if (lh_engine_gradient(self->core->engine, i, param->sum, LH_DTYPE_F32) < 0)
            return lhpy_raise_engine(self);
        param->sum_state = SUM_STATE_GIVEN;
        self->unit_states[self->engine_params[i].unit].has_gradients = true;
    }
    Py_RETURN_NONE;
}

void lhpy_sums_forget(struct lhpy_engine *self)
{
    for (uint32_t i = 0; i < self->param_count; i++)
        self->params[i].sum_state = SUM_STATE_NONE;
}

PyMethodDef lhpy_sums_methods[] = {
    {"sums_add", sums_add, METH_VARARGS,
     "sums_add(param, first, count, address, dtype, is_first): add a part of a gradient to a sum."},
    {"sums_give", sums_give, METH_NOARGS, "Hand the summed gradients to the engine."},
    {NULL, NULL, 0, NULL},
};
