/* Hand gradients from autograd to the engine. */
#include "base/assert.h"
#include "py/lhpy.h"

/* Dropping a gradient may run Python code that calls this again, so the list is updated first. */
static void gradient_let_go(struct lhpy_engine *self, uint32_t i)
{
    struct lhpy_param *param = &self->params[self->held_params[i]];
    PyObject *gradient = param->gradient;
    param->gradient = NULL;
    self->held_bytes -= param->gradient_bytes;
    self->held_params[i] = self->held_params[--self->held_count];
    Py_DECREF(gradient);
}

void lhpy_engine_sweep(struct lhpy_engine *self)
{
    /* A unit's gradients (up to thousands) arrive one by one, but are released together. */
    uint64_t release_count = lh_engine_gradient_release_count(self->core->engine);
    if (release_count == self->release_count)
        return;
    self->release_count = release_count;
    for (uint32_t i = 0; i < self->held_count;) {
        if (lh_engine_gradient_is_consumed(self->core->engine, self->held_params[i]))
            gradient_let_go(self, i);
        else
            i++;
    }
}

void lhpy_engine_gradients_drop(struct lhpy_engine *self)
{
    while (self->held_count > 0)
        gradient_let_go(self, self->held_count - 1);
}

/* Replace a gradient, and its view, by what one of its methods returned; steals both objects. */
static PyObject *gradient_change(PyObject *owned, struct lhpy_dl_tensor *view, PyObject *changed)
{
    Py_DECREF(owned);
    if (changed && lhpy_tensor_read(changed, view) < 0)
        Py_CLEAR(changed);
    return changed;
}

/*
 * Make a gradient readable for the engine: in the order of the unit's elements, in a known dtype.
 * New reference, or NULL with an error.
 */
static PyObject *gradient_prepare(struct lhpy_engine *self, uint32_t index, PyObject *gradient,
                                  struct lhpy_dl_tensor *view)
{
    PyObject *owned = Py_NewRef(gradient);
    if (lhpy_tensor_read(owned, view) < 0) {
        PyErr_Clear();
        Py_DECREF(owned);
        return lhpy_raise(self->raiser, -EOPNOTSUPP,
                          "param %u has a gradient that is not a dense tensor (a sparse"
                          " embedding?): use sparse=False",
                          index);
    }
    PyObject *order = self->params[index].order;
    if (order)
        owned = gradient_change(owned, view, PyObject_CallMethod(owned, "permute", "O", order));
    if (owned && !lhpy_tensor_is_contiguous(view))
        owned = gradient_change(owned, view, PyObject_CallMethod(owned, "contiguous", NULL));
    if (!owned)
        return NULL;
    enum lh_dtype dtype = lhpy_dtype(view->dtype);
    bool is_known = dtype != LH_DTYPE_BYTES && view->device_type == self->core->device_type;
    if (is_known && (uint64_t)lhpy_tensor_count(view) == self->engine_params[index].count)
        return owned;
    long long count = lhpy_tensor_count(view);
    Py_DECREF(owned);
    return lhpy_raise(self->raiser, -EOPNOTSUPP,
                      "param %u has a gradient of %lld elements of %d bits; expected %llu of"
                      " float32, bfloat16 or float16",
                      index, count, (int)view->dtype.bits,
                      (unsigned long long)self->engine_params[index].count);
}

static int step_gradients_begin(struct lhpy_engine *self)
{
    if (lhpy_engine_wait_plain(self, lh_engine_over_wait) < 0)
        return -1;
    /* The previous step is over, so its gradients are consumed: release them here, because a graph
     * that saved no parameter may bring new gradients before any forward waits for the update. */
    lhpy_engine_sweep(self);
    PyObject *answer = PyObject_CallNoArgs(self->on_gradient);
    if (!answer)
        return -1;
    Py_DECREF(answer);
    self->step_has_gradients = true;
    return 0;
}

/* Raise the reason why the engine rejected a gradient, in terms of the user's code. */
static PyObject *gradient_refuse(struct lhpy_engine *self, uint32_t index,
                                 const struct lhpy_dl_tensor *view, int rc)
{
    static const char *const names[] = {"float32", "bfloat16", "float16", "bytes"};
    if (rc == -EALREADY)
        return lhpy_raise(self->raiser, rc,
                          "param %u already has a gradient in this step: a second backward before"
                          " optimizer.step(), or several reentrant checkpoints that use it (pass"
                          " use_reentrant=False)",
                          index);
    if (rc == -EINVAL)
        return lhpy_raise(self->raiser, -EOPNOTSUPP,
                          "param %u has a gradient of %s and is %s: on an accelerator they are the"
                          " same (leave grad_dtype as it is)",
                          index, names[lhpy_dtype(view->dtype)],
                          names[lhpy_dtype(self->params[index].dtype)]);
    return lhpy_raise_engine(self);
}

PyObject *lhpy_engine_gradient_begin(struct lhpy_engine *self, uint32_t index, PyObject *gradient,
                                     struct lhpy_dl_tensor *view)
{
    if (lhpy_check_open(self) < 0 || lhpy_engine_backward_begin(self) < 0)
        return NULL;
    lhpy_engine_unscoped_release(self);
    PyObject *owned = gradient_prepare(self, index, gradient, view);
    if (!owned)
        return NULL;
    if (!self->step_has_gradients && step_gradients_begin(self) < 0) {
        Py_DECREF(owned);
        return NULL;
    }
    /* A forward between two backwards of a step has reopened the last one (sched/idle.h). */
    if (lh_engine_is_reopened(self->core->engine) &&
        lhpy_engine_wait_plain(self, lh_engine_over_wait) < 0) {
        Py_DECREF(owned);
        return NULL;
    }
    self->backward_has_gradients = true;
    return owned;
}

/*
 * Wait until updates in progress hold few enough bytes of gradients.
 *
 * Gradients that the engine's thread has not heard of are in no update yet, and would not be
 * limited: hooks can follow each other faster than this thread runs, above all on an accelerator,
 * where the host runs ahead of the computation.
 */
static int updates_wait(struct lhpy_engine *self)
{
    uint64_t ahead_bytes = self->budget.gradient_ahead_bytes;
    if (self->unheard_bytes > ahead_bytes ||
        !lh_engine_gradients_fit(self->core->engine, ahead_bytes - self->unheard_bytes)) {
        if (lhpy_engine_wait_plain(self, lh_engine_heard_wait) < 0)
            return -1;
        self->unheard_bytes = 0;
    }
    return lhpy_engine_wait(self, lh_engine_gradient_wait, ahead_bytes);
}

/* Tell the engine of a gradient. On an accelerator, sums are made by the engine, too. */
static int gradient_post(struct lhpy_engine *self, uint32_t index,
                         const struct lhpy_dl_tensor *view)
{
    if (self->has_sums)
        return lhpy_sums_post(self, index, view);
    return lh_engine_gradient(self->core->engine, index, view->data, lhpy_dtype(view->dtype));
}

/* Wait until the parameter's gradient of an earlier backward is copied, and release it. */
static int earlier_wait(struct lhpy_engine *self, uint32_t index)
{
    lhpy_engine_sweep(self);
    if (!self->params[index].gradient)
        return 0;
    if (lhpy_engine_wait(self, lh_sum_release_wait, index) < 0)
        return -1;
    lhpy_engine_sweep(self);
    return 0;
}

PyObject *lhpy_engine_gradient_take(struct lhpy_engine *self, uint32_t index, PyObject *gradient)
{
    struct lhpy_param *param = &self->params[index];
    struct lhpy_dl_tensor view;
    PyObject *owned = lhpy_engine_gradient_begin(self, index, gradient, &view);
    if (!owned)
        return NULL;
    bool has_device = self->core->dev != NULL;
    if (self->has_sums && !has_device) {
        lhpy_sums_add(self, index, &view);
        Py_DECREF(owned);
        Py_RETURN_NONE;
    }
    if (self->has_sums && earlier_wait(self, index) < 0) {
        Py_DECREF(owned);
        return NULL;
    }
    /* Wait before this gradient is taken, not after, so that nothing waits for the last one. */
    if (updates_wait(self) < 0) {
        Py_DECREF(owned);
        return NULL;
    }
    /* autograd accumulates gradients on the leaf's stream, which is not always the stream of the
     * operations, where the units in use are read. */
    void *stream = has_device ? lhpy_device_stream_note(self) : NULL;
    int rc = gradient_post(self, index, &view);
    if (has_device)
        lh_engine_stream_set(self->core->engine, stream);
    if (rc < 0) {
        Py_DECREF(owned);
        return gradient_refuse(self, index, &view, rc);
    }
    LH_ASSERT(!param->gradient);
    param->gradient = owned;
    param->gradient_bytes = (uint64_t)lhpy_tensor_count(&view) * (view.dtype.bits / 8);
    self->held_bytes += param->gradient_bytes;
    self->unheard_bytes += param->gradient_bytes;
    self->held_params[self->held_count++] = index;
    if (!self->has_sums)
        self->unit_states[self->engine_params[index].unit].has_gradients = true;
    lhpy_engine_sweep(self);
    Py_RETURN_NONE;
}
