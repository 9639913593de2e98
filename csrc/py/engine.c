/* The Engine type: creation, closing, pins, waits. */
#include <string.h>

#include "base/assert.h"
#include "py/engine_make.h"
#include "py/lhpy.h"

/* How long a wait lasts before it checks for signals (Ctrl-C). */
#define WAIT_SLICE_MS 100

/*
 * Release the units of the backward, whose pins are only a convenience, and let the engine judge
 * whether there is room.
 */
static void room_make(struct lhpy_engine *self, bool *is_tentative)
{
    lhpy_engine_backward_release(self);
    if (*is_tentative)
        lh_engine_tentative_end(self->core->engine);
    *is_tentative = false;
}

int lhpy_engine_wait(struct lhpy_engine *self, lhpy_wait_fn wait, uint64_t argument)
{
    struct lh_engine *engine = self->core->engine;
    bool is_tentative = true;
    bool is_interrupted = false;
    int rc = 0;
    lh_engine_tentative_begin(engine);
    while (rc == 0 && !is_interrupted) {
        Py_BEGIN_ALLOW_THREADS
        rc = wait(engine, argument, WAIT_SLICE_MS);
        Py_END_ALLOW_THREADS
        if (rc != 0)
            break;
        is_interrupted = PyErr_CheckSignals() < 0;
        /* An update may be waiting for room that units of the backward occupy. */
        if (!is_interrupted) {
            room_make(self, &is_tentative);
            lhpy_engine_sweep(self);
        }
    }
    if (is_tentative)
        lh_engine_tentative_end(engine);
    if (rc < 0)
        lhpy_raise_engine(self);
    return rc > 0 ? 1 : -1;
}

/* Let the on_use callback change the bytes of a unit that was just pinned, before they are read. */
static int use_tell(struct lhpy_engine *self, uint32_t unit)
{
    const struct lh_engine *engine = self->core->engine;
    if (!self->on_use)
        return 0;
    struct lh_engine_bytes bytes = lh_engine_bytes(engine, unit);
    PyObject *answer = PyObject_CallFunction(
        self->on_use, "IKIIOI", unit, (unsigned long long)(uintptr_t)bytes.address,
        bytes.make_count, bytes.out_count, bytes.is_from_write_back ? Py_True : Py_False,
        lh_engine_pin_count(engine, unit));
    if (!answer) {
        lh_engine_unpin(self->core->engine, unit);
        return -1;
    }
    if (answer == Py_True)
        lh_engine_moved(self->core->engine, unit);
    Py_DECREF(answer);
    return 0;
}

/* Raise why a use could not begin: there is no room for it now, or the engine has failed. */
static void use_raise(struct lhpy_engine *self, int rc)
{
    struct lh_error err = {0};
    if (rc != -ENOSPC || lh_engine_error(self->core->engine, NULL) < 0) {
        lhpy_raise_engine(self);
        return;
    }
    lh_engine_refusal(self->core->engine, &err);
    lhpy_raise_error(self->raiser, &err);
}

int lhpy_engine_use(struct lhpy_engine *self, uint32_t unit)
{
    lhpy_device_stream_note(self);
    struct lh_engine *engine = self->core->engine;
    int rc = lh_engine_acquire(engine, unit);
    bool is_tentative = rc == 0;
    bool is_interrupted = false;
    if (is_tentative)
        lh_engine_tentative_begin(engine);
    while (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = lh_engine_acquire_wait(engine, unit, WAIT_SLICE_MS);
        Py_END_ALLOW_THREADS
        if (rc != 0)
            break;
        room_make(self, &is_tentative);
        if (!is_interrupted && PyErr_CheckSignals() < 0)
            is_interrupted = true; /* the pin will be granted anyway: take it, then raise */
    }
    if (is_tentative)
        lh_engine_tentative_end(engine);
    if (rc < 0 && !is_interrupted)
        use_raise(self, rc);
    if (rc > 0 && is_interrupted)
        lh_engine_unpin(engine, unit);
    return rc < 0 || is_interrupted ? -1 : use_tell(self, unit);
}

void lhpy_engine_unuse(struct lhpy_engine *self, uint32_t unit)
{
    lh_engine_unpin(self->core->engine, unit);
}

int lhpy_engine_use_backward(struct lhpy_engine *self, uint32_t unit)
{
    struct lhpy_unit *state = &self->unit_states[unit];
    if (lhpy_engine_backward_begin(self) < 0)
        return -1;
    if (state->is_used_backward || state->scope_depth > 0)
        return 0;
    if (lhpy_engine_use(self, unit) < 0)
        return -1;
    if (state->is_used_backward) { /* by another thread, while this one waited without the GIL */
        lhpy_engine_unuse(self, unit);
        return 0;
    }
    state->is_used_backward = true;
    self->backward_units[self->backward_unit_count++] = unit;
    return 0;
}

void lhpy_engine_unuse_backward(struct lhpy_engine *self, uint32_t unit)
{
    for (uint32_t i = 0; i < self->backward_unit_count; i++) {
        if (self->backward_units[i] != unit)
            continue;
        self->backward_units[i] = self->backward_units[--self->backward_unit_count];
        self->unit_states[unit].is_used_backward = false;
        lh_engine_unpin(self->core->engine, unit);
        return;
    }
}

void lhpy_engine_backward_release(struct lhpy_engine *self)
{
    while (self->backward_unit_count > 0)
        lhpy_engine_unuse_backward(self, self->backward_units[self->backward_unit_count - 1]);
}

int lhpy_engine_backward_begin(struct lhpy_engine *self)
{
    if (self->backward_is_open)
        return 0;
    PyObject *answer = PyObject_CallNoArgs(self->on_backward);
    if (!answer)
        return -1;
    Py_DECREF(answer);
    self->backward_is_open = true;
    self->backward_has_gradients = false;
    return 0;
}

/* --- Methods ------------------------------------------------------------------------------ */

static struct lhpy_engine *engine_open(PyObject *object)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    return lhpy_check_open(self) < 0 ? NULL : self;
}

static int unit_parse(struct lhpy_engine *self, PyObject *args, uint32_t *unit_out)
{
    unsigned int unit = 0;
    if (!PyArg_ParseTuple(args, "I", &unit))
        return -1;
    if (unit >= self->unit_count) {
        PyErr_Format(PyExc_IndexError, "unit %u is out of range: there are %u units", unit,
                     self->unit_count);
        return -1;
    }
    *unit_out = unit;
    return 0;
}

static PyObject *engine_acquire(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    uint32_t unit = 0;
    if (!self || unit_parse(self, args, &unit) < 0 || lhpy_engine_use(self, unit) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *engine_release(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t unit = 0;
    if (!self->core || unit_parse(self, args, &unit) < 0)
        return NULL;
    if (!lhpy_core_is_forked(self->core))
        lhpy_engine_unuse(self, unit);
    Py_RETURN_NONE;
}

/* held_bytes(): bytes of gradients that the engine has not read yet. */
static PyObject *engine_held_bytes(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    if (lhpy_is_open(self))
        lhpy_engine_sweep(self);
    return PyLong_FromUnsignedLongLong(self->held_bytes);
}

/* Bring the parameters of a unit in from outside any forward, for reading them. */
static PyObject *engine_lend(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    unsigned int index = 0;
    if (!self || !PyArg_ParseTuple(args, "I", &index))
        return NULL;
    if (index >= self->param_count)
        return PyErr_Format(PyExc_IndexError, "param %u is out of range: there are %u params",
                            index, self->param_count);
    const struct lhpy_param *param = &self->params[index];
    uint32_t unit = self->engine_params[index].unit;
    if (lhpy_engine_use(self, unit) < 0)
        return NULL;
    PyObject *lend =
        lhpy_lend(self->core, unit, param->byte_offset, param->ndim, param->shape, param->dtype);
    lhpy_engine_unuse(self, unit);
    return lend;
}

/* strides: a tuple of as many numbers as the parameter has dimensions. */
static int strides_parse(PyObject *strides, int64_t *numbers, size_t count)
{
    if (!PyTuple_Check(strides) || (size_t)PyTuple_Size(strides) != count) {
        PyErr_SetString(PyExc_TypeError, "strides and sizes must have the same length");
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(strides, (Py_ssize_t)i));
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *engine_bind(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    unsigned int index = 0;
    PyObject *tensor = NULL;
    PyObject *hollow = NULL;
    PyObject *strides = NULL;
    PyObject *order = NULL;
    struct lhpy_dl_tensor view;
    if (!self || !PyArg_ParseTuple(args, "IOO|OO", &index, &tensor, &hollow, &strides, &order))
        return NULL;
    if (index >= self->param_count)
        return PyErr_Format(PyExc_IndexError, "param %u is out of range: there are %u params",
                            index, self->param_count);
    if (lhpy_tensor_read(hollow, &view) < 0)
        return NULL;
    struct lhpy_param *param = &self->params[index];
    size_t ndim = (size_t)view.ndim;
    int64_t *shape = PyMem_Malloc((2 * ndim + 1) * sizeof(int64_t));
    if (!shape)
        return PyErr_NoMemory();
    int64_t stride = 1;
    for (size_t i = ndim; i-- > 0;) {
        shape[i] = view.shape[i];
        shape[ndim + i] = stride;
        stride *= view.shape[i];
    }
    if (strides && strides_parse(strides, shape + ndim, ndim) < 0) {
        PyMem_Free(shape);
        return NULL;
    }
    PyMem_Free(param->shape);
    param->shape = shape;
    param->ndim = view.ndim;
    param->dtype = view.dtype;
    lhpy_replace(&param->order, Py_XNewRef(order));
    lhpy_replace(&param->tensor, Py_NewRef(tensor));
    lhpy_replace(&param->hollow, Py_NewRef(hollow));
    Py_RETURN_NONE;
}

static PyObject *engine_hollow_array(PyObject *object, PyObject *array)
{
    struct lhpy_engine *self = engine_open(object);
    struct lhpy_dl_tensor view;
    if (!self || lhpy_tensor_read(array, &view) < 0)
        return NULL;
    enum lh_dtype dtype = lhpy_dtype(view.dtype);
    self->hollow_base[dtype] = (uint64_t)(uintptr_t)view.data;
    self->hollow_bytes[dtype] = (uint64_t)lhpy_tensor_count(&view) * (view.dtype.bits / 8);
    Py_RETURN_NONE;
}

static PyObject *engine_scope(PyObject *object, PyObject *units)
{
    struct lhpy_engine *self = engine_open(object);
    return self ? lhpy_scope_new(self, self->scope_type, units) : NULL;
}

static PyObject *engine_autocast(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    int dtype = 0;
    if (!PyArg_ParseTuple(args, "i", &dtype))
        return NULL;
    self->autocast_dtype = (struct lhpy_dl_type){0};
    if (dtype == LH_DTYPE_BF16)
        self->autocast_dtype = (struct lhpy_dl_type){LHPY_DL_CODE_BFLOAT, 16, 1};
    else if (dtype == LH_DTYPE_F16)
        self->autocast_dtype = (struct lhpy_dl_type){LHPY_DL_CODE_FLOAT, 16, 1};
    Py_RETURN_NONE;
}

static PyObject *engine_forward(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    int is_open = 0;
    if (!PyArg_ParseTuple(args, "p", &is_open))
        return NULL;
    self->forward_is_open = is_open != 0;
    self->forward_thread = PyThread_get_thread_ident();
    if (lhpy_is_open(self) && !is_open)
        lhpy_engine_unscoped_release(self);
    Py_RETURN_NONE;
}

/* The parameters that forwards changed in place since the last call. */
static PyObject *engine_changed_take(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < self->param_count; i++) {
        if (!self->params[i].is_changed)
            continue;
        PyObject *index = PyLong_FromUnsignedLong(i);
        if (!index || PyList_Append(list, index) < 0)
            Py_CLEAR(list);
        Py_XDECREF(index);
    }
    for (uint32_t i = 0; list && i < self->param_count; i++)
        self->params[i].is_changed = false;
    return list;
}

static PyObject *engine_callbacks(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *backward = NULL;
    PyObject *gradient = NULL;
    PyObject *forward = NULL;
    PyObject *in_backward = NULL;
    if (!PyArg_ParseTuple(args, "OOOO", &backward, &gradient, &forward, &in_backward))
        return NULL;
    lhpy_replace(&self->in_backward, Py_NewRef(in_backward));
    lhpy_replace(&self->on_forward, Py_NewRef(forward));
    lhpy_replace(&self->on_backward, Py_NewRef(backward));
    lhpy_replace(&self->on_gradient, Py_NewRef(gradient));
    Py_RETURN_NONE;
}

static PyObject *engine_on_use(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *callback = NULL;
    PyObject *moved = NULL;
    if (!PyArg_ParseTuple(args, "OO!", &callback, &PyList_Type, &moved))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(moved); i++) {
        unsigned long index = PyLong_AsUnsignedLong(PyList_GetItem(moved, i));
        if (PyErr_Occurred())
            return NULL;
        if (index >= self->param_count)
            return PyErr_Format(PyExc_IndexError, "param %lu is out of range: there are %u params",
                                index, self->param_count);
        self->params[index].is_moved = true;
    }
    lhpy_replace(&self->on_use, Py_NewRef(callback));
    Py_RETURN_NONE;
}

static PyObject *engine_device_policy(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    int no_overlap = 0;
    int no_reuse = 0;
    unsigned long long alloc_bytes_per_s = 0;
    if (!self || !PyArg_ParseTuple(args, "ppK", &no_overlap, &no_reuse, &alloc_bytes_per_s))
        return NULL;
    lh_engine_device_policy_set(self->core->engine,
                                (no_overlap ? LH_ENGINE_DEVICE_NO_OVERLAP : 0) |
                                    (no_reuse ? LH_ENGINE_DEVICE_NO_REUSE : 0),
                                alloc_bytes_per_s);
    Py_RETURN_NONE;
}

/* End the engine's thread and free everything except what lends need. Idempotent. */
static void engine_shut(struct lhpy_engine *self)
{
    if (!self->io)
        return;
    if (lhpy_core_is_forked(self->core)) {
        self->exec = NULL; /* not destroyed: they belong to the parent, as does the ring */
        self->io = NULL;
        return;
    }
    lhpy_engine_unscoped_release(self);
    lhpy_engine_backward_release(self);
    Py_BEGIN_ALLOW_THREADS
    lh_engine_stop(self->core->engine);
    lhpy_engine_zo_unload(self);
    self->exec->ops->destroy(self->exec);
    self->io->ops->destroy(self->io);
    Py_END_ALLOW_THREADS
    self->exec = NULL;
    self->io = NULL;
    Py_CLEAR(self->zo_image);
    lhpy_engine_gradients_drop(self);
}

static PyObject *engine_close(PyObject *object, PyObject *args)
{
    (void)args;
    engine_shut((struct lhpy_engine *)object);
    Py_RETURN_NONE;
}

static int engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->store);
    Py_VISIT(self->saved.object);
    Py_VISIT(self->in_place.object);
    Py_VISIT(self->raiser);
    Py_VISIT(self->on_backward);
    Py_VISIT(self->on_gradient);
    Py_VISIT(self->on_forward);
    Py_VISIT(self->in_backward);
    Py_VISIT(self->on_use);
    Py_VISIT(self->handle_type);
    Py_VISIT(self->scope_type);
    for (uint32_t i = 0; self->params && i < self->param_count; i++) {
        Py_VISIT(self->params[i].tensor);
        Py_VISIT(self->params[i].order);
        Py_VISIT(self->params[i].hollow);
        Py_VISIT(self->params[i].bound_class);
        Py_VISIT(self->params[i].hollow_class);
        Py_VISIT(self->params[i].gradient);
    }
    return 0;
}

static int engine_clear(PyObject *object)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    engine_shut(self);
    for (uint32_t i = 0; self->params && i < self->param_count; i++) {
        Py_CLEAR(self->params[i].tensor);
        Py_CLEAR(self->params[i].order);
        Py_CLEAR(self->params[i].hollow);
        Py_CLEAR(self->params[i].bound_class);
        Py_CLEAR(self->params[i].hollow_class);
        Py_CLEAR(self->params[i].gradient);
    }
    Py_CLEAR(self->zo_image);
    Py_CLEAR(self->store);
    Py_CLEAR(self->saved.object);
    Py_CLEAR(self->in_place.object);
    Py_CLEAR(self->raiser);
    Py_CLEAR(self->on_backward);
    Py_CLEAR(self->on_gradient);
    Py_CLEAR(self->on_forward);
    Py_CLEAR(self->in_backward);
    Py_CLEAR(self->on_use);
    Py_CLEAR(self->handle_type);
    Py_CLEAR(self->scope_type);
    return 0;
}

static void engine_dealloc(PyObject *object)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)engine_clear(object);
    for (uint32_t i = 0; self->params && i < self->param_count; i++)
        PyMem_Free(self->params[i].shape);
    PyMem_Free(self->params);
    lhpy_in_place_free(&self->in_place);
    PyMem_Free(self->units);
    PyMem_Free(self->engine_params);
    PyMem_Free(self->unit_states);
    PyMem_Free(self->bound_units);
    PyMem_Free(self->backward_units);
    PyMem_Free(self->unscoped_units);
    PyMem_Free(self->held_params);
    if (self->core && !lhpy_core_is_forked(self->core)) {
        Py_BEGIN_ALLOW_THREADS
        lhpy_core_release(self->core);
        Py_END_ALLOW_THREADS
    }
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef engine_methods[] = {
    {"bind", engine_bind, METH_VARARGS, "bind(param, tensor, hollow)"},
    {"classes", lhpy_engine_classes, METH_VARARGS, "classes(param, bound, hollow)"},
    {"hollow_array", engine_hollow_array, METH_O, "The array that hollow parameters point into."},
    {"callbacks", engine_callbacks, METH_VARARGS,
     "callbacks(on_backward, on_gradient, on_forward, in_backward)"},
    {"on_use", engine_on_use, METH_VARARGS,
     "on_use(callback, params): callback(unit, address, make count, out count, is_from_write_back, "
     "pins) ->"
     " moved, called after each pin; params: the parameters it applies to."},
    {"device_policy", engine_device_policy, METH_VARARGS,
     "device_policy(no_overlap, no_reuse, alloc_bytes_per_s)"},
    {"zo_load", lhpy_engine_zo_load, METH_O, "zo_load(image of the device's kernels)"},
    {"zo_lead", lhpy_engine_zo_lead, METH_VARARGS,
     "zo_lead(address, count, ops[, state, state_format, value_format]): zo_apply() or zo_lead() "
     "on the device, which executes it in order."},
    {"forward", engine_forward, METH_VARARGS, "forward(is_open)"},
    {"changed_take", engine_changed_take, METH_NOARGS,
     "Parameters that forwards changed in place."},
    {"scope", engine_scope, METH_O, "scope(units) -> Scope"},
    {"scopes_drop", lhpy_engine_scopes_drop, METH_NOARGS, "Leave every scope."},
    {"autocast", engine_autocast, METH_VARARGS, "autocast(dtype code; -1: no autocast)"},
    {"pack", lhpy_engine_pack, METH_O, "Saved-tensor hook."},
    {"unpack", lhpy_engine_unpack, METH_O, "Saved-tensor hook."},
    {"gradient_hook", lhpy_engine_gradient_hook, METH_VARARGS, "gradient_hook(param) -> hook"},
    {"acquire", engine_acquire, METH_VARARGS, "acquire(unit): wait until resident, and pin."},
    {"release", engine_release, METH_VARARGS, "release(unit)"},
    {"held_bytes", engine_held_bytes, METH_NOARGS,
     "Bytes of gradients that the engine has not read yet."},
    {"lend", engine_lend, METH_VARARGS, "lend(param) -> tensor"},
    {"begin", lhpy_engine_begin, METH_VARARGS, "begin(train)"},
    {"hyper", lhpy_engine_hyper, METH_VARARGS, "hyper(group, lr, beta1, beta2, eps, weight_decay)"},
    {"gradient_square_sum", lhpy_engine_gradient_square_sum, METH_NOARGS,
     "The sum of squares of the open step's gradients."},
    {"gradient_scale", lhpy_engine_gradient_scale, METH_VARARGS, "gradient_scale(scale)"},
    {"sums_give", lhpy_engine_sums_give, METH_NOARGS, "Hand the summed gradients to the engine."},
    {"backward_end", lhpy_engine_backward_end, METH_NOARGS,
     "Report that a backward ended or failed; returns whether it gave gradients."},
    {"close_step", lhpy_engine_close_step, METH_VARARGS, "close_step(scalars)"},
    {"abort", lhpy_engine_abort, METH_NOARGS, "Discard the open step."},
    {"commit_hold", lhpy_engine_commit_hold, METH_NOARGS,
     "Wait until no commit is in progress, and prevent new ones."},
    {"commit_release", lhpy_engine_commit_release, METH_NOARGS, "Allow commits again. Any thread."},
    {"flush", lhpy_engine_flush, METH_VARARGS, "flush(commit)"},
    {"pause", lhpy_engine_pause, METH_VARARGS,
     "pause(units, commit): hand the store to the caller."},
    {"resume", lhpy_engine_resume, METH_VARARGS, "resume(changed_units)"},
    {"stats", lhpy_engine_stats, METH_NOARGS, "The last finished step, or None."},
    {"trace", lhpy_engine_trace, METH_NOARGS,
     "The events: (kind, unit, lane, step, start, end, bytes)."},
    {"status", lhpy_engine_status, METH_NOARGS,
     "The engine's state: what is open, pinned and held."},
    {"check", lhpy_engine_check, METH_NOARGS, "Raise the first error, if there is one."},
    {"saved_put", lhpy_engine_saved_put, METH_VARARGS,
     "saved_put(pointer, bytes, on SSD) -> item, or None"},
    {"saved_is_taken", lhpy_engine_saved_is_taken, METH_O,
     "Whether the memory that was put may be changed again."},
    {"saved_room", lhpy_engine_saved_room, METH_O,
     "saved_room(bytes): wait until at most bytes are put and not taken."},
    {"saved_fetch", lhpy_engine_saved_fetch, METH_VARARGS, "saved_fetch(item, target)"},
    {"saved_wait", lhpy_engine_saved_wait, METH_O, "saved_wait(item): wait until it is back."},
    {"saved_lend", lhpy_engine_saved_lend, METH_VARARGS, "saved_lend(item, bytes) -> tensor"},
    {"saved_drop", lhpy_engine_saved_drop, METH_O, "saved_drop(item)"},
    {"close", engine_close, METH_NOARGS, "Stop the engine."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, lhpy_engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc, "The engine of one wrapped model."},
    {0, NULL},
};

PyType_Spec lhpy_engine_spec = {
    .name = "lohan._core.Engine",
    .basicsize = sizeof(struct lhpy_engine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = engine_slots,
};
