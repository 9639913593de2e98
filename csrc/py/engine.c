/* The Engine type: creation, closing, pins, waits. */
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "py/lhpy.h"

/* How long a wait lasts before it checks for signals (Ctrl-C). */
#define WAIT_SLICE_MS 100
/* An owner's own reads may take some time, and end even if a mate is gone. */
#define OWNER_SLICES 10
/* How often a thread checks whether it is its turn. */
#define TURN_SLICE_NS 200000

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

int lhpy_engine_turn_take(struct lhpy_engine *self)
{
    const unsigned long thread = PyThread_get_thread_ident();
    while (self->turn_depth > 0 && self->turn_thread != thread) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&(struct timespec){.tv_nsec = TURN_SLICE_NS}, NULL);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0 || lhpy_check_open(self) < 0)
            return -1;
    }
    self->turn_thread = thread;
    self->turn_depth++;
    return 0;
}

void lhpy_engine_turn_give(struct lhpy_engine *self)
{
    LH_ASSERT(self->turn_depth > 0 && self->turn_thread == PyThread_get_thread_ident());
    self->turn_depth--;
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
        is_interrupted = PyErr_CheckSignals() < 0 || lhpy_team_check(self) < 0;
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

int lhpy_engine_request(struct lhpy_engine *self, lhpy_wait_fn wait, uint64_t argument)
{
    if (lhpy_engine_turn_take(self) < 0)
        return -1;
    int rc = lhpy_engine_wait(self, wait, argument);
    lhpy_engine_turn_give(self);
    return rc;
}

static int plain_wait(struct lh_engine *engine, uint64_t wait, int timeout_ms)
{
    return ((lhpy_wait_plain_fn)(uintptr_t)wait)(engine, timeout_ms);
}

int lhpy_engine_wait_plain(struct lhpy_engine *self, lhpy_wait_plain_fn wait)
{
    return lhpy_engine_wait(self, plain_wait, (uint64_t)(uintptr_t)wait);
}

int lhpy_engine_request_plain(struct lhpy_engine *self, lhpy_wait_plain_fn wait)
{
    return lhpy_engine_request(self, plain_wait, (uint64_t)(uintptr_t)wait);
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

/* Raise the reason why a use could not begin: there is no room now, or the engine has failed. */
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

/*
 * Whether another process of the team is gone, without which the wait for a unit may not end. Then
 * a Python error is set, that of an earlier interrupt or one that names the process, and the engine
 * has failed, which ends the wait.
 */
static bool peer_is_lost(struct lhpy_engine *self, uint32_t slices)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *trace = NULL;
    if (!self->team_check || (!lhpy_team_is_mate(self) && slices < OWNER_SLICES))
        return false;
    PyErr_Fetch(&type, &value, &trace);
    bool is_lost = lhpy_team_check(self) < 0;
    if (is_lost)
        lh_engine_peer_lost(self->core->engine);
    if (type)
        PyErr_Restore(type, value, trace);
    return is_lost;
}

int lhpy_engine_use(struct lhpy_engine *self, uint32_t unit)
{
    lhpy_device_stream_note(self);
    struct lh_engine *engine = self->core->engine;
    int rc = lh_engine_acquire(engine, unit);
    bool is_tentative = rc == 0;
    bool is_interrupted = false;
    uint32_t slices = 0;
    if (is_tentative)
        lh_engine_tentative_begin(engine);
    while (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = lh_engine_acquire_wait(engine, unit, WAIT_SLICE_MS);
        Py_END_ALLOW_THREADS
        if (rc != 0)
            break;
        room_make(self, &is_tentative);
        /* The pin will be granted anyway, unless a process is gone: take it, then raise. */
        is_interrupted = is_interrupted || PyErr_CheckSignals() < 0;
        is_interrupted |= peer_is_lost(self, ++slices);
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
    if (state->is_used_backward) { /* another thread pinned it during the wait without the GIL */
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

static PyObject *engine_acquire(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t unit = 0;
    if (!self || lhpy_index_read(number, "unit", self->unit_count, &unit) < 0 ||
        lhpy_engine_use(self, unit) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *engine_release(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t unit = 0;
    if (!self->core || lhpy_index_read(number, "unit", self->unit_count, &unit) < 0)
        return NULL;
    if (!lhpy_core_is_forked(self->core))
        lhpy_engine_unuse(self, unit);
    Py_RETURN_NONE;
}

/* held_bytes(): bytes of gradients that the engine has not read yet. */
static PyObject *engine_held_bytes(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    if (lhpy_is_open(self))
        lhpy_engine_sweep(self);
    return PyLong_FromUnsignedLongLong(self->held_bytes);
}

/* Lend one parameter outside of any forward, for reading: its unit becomes resident. */
static PyObject *engine_lend(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0;
    if (!self || lhpy_index_read(number, "param", self->param_count, &index) < 0)
        return NULL;
    const struct lhpy_param *param = &self->params[index];
    uint32_t unit = self->engine_params[index].unit;
    if (lhpy_engine_use(self, unit) < 0)
        return NULL;
    PyObject *lend =
        lhpy_lend(self->core, unit, param->byte_offset, param->ndim, param->shape, param->dtype);
    lhpy_engine_unuse(self, unit);
    return lend;
}

static const struct lhpy_table stride_table = LHPY_TABLE_OF("a stride", int64_t);

/* Make an array of sizes, then the given or contiguous strides. NULL with a Python error. */
static int64_t *shape_make(const struct lhpy_dl_tensor *view, const int64_t *strides,
                           uint32_t stride_count)
{
    size_t ndim = (size_t)view->ndim;
    if (strides && stride_count != ndim) {
        PyErr_SetString(PyExc_TypeError, "strides and sizes must have the same length");
        return NULL;
    }
    int64_t *shape = PyMem_Malloc((2 * ndim + 1) * sizeof(int64_t));
    if (!shape) {
        PyErr_NoMemory();
        return NULL;
    }
    int64_t stride = 1;
    for (size_t i = ndim; i-- > 0;) {
        shape[i] = view->shape[i];
        shape[ndim + i] = strides ? strides[i] : stride;
        stride *= view->shape[i];
    }
    return shape;
}

static PyObject *engine_bind(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    PyObject *tensor, *hollow, *order = NULL;
    int64_t *strides = NULL;
    uint32_t index = 0, stride_count = 0;
    struct lhpy_dl_tensor view;
    if (!self ||
        LHPY_ARGS(
            args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(tensor), LHPY_ARG(hollow),
            LHPY_ARG_ROWS("strides", strides, stride_count, stride_table, .is_optional = true),
            LHPY_ARG(order, .is_optional = true)) < 0)
        return NULL;
    int64_t *shape = NULL;
    if (lhpy_index_check("param", index, self->param_count) == 0 &&
        lhpy_tensor_read(hollow, &view) == 0)
        shape = shape_make(&view, strides, stride_count);
    PyMem_Free(strides);
    if (!shape)
        return NULL;
    struct lhpy_param *param = &self->params[index];
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
    struct lhpy_engine *self = lhpy_engine_open(object);
    struct lhpy_dl_tensor view;
    if (!self || lhpy_tensor_read(array, &view) < 0)
        return NULL;
    enum lh_dtype dtype = lhpy_dtype(view.dtype);
    self->hollow_base[dtype] = (uint64_t)(uintptr_t)view.data;
    self->hollow_bytes[dtype] = (uint64_t)lhpy_tensor_count(&view) * (view.dtype.bits / 8);
    Py_RETURN_NONE;
}

static PyObject *engine_autocast(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    int32_t dtype = 0;
    if (LHPY_VALUE(number, dtype) < 0)
        return NULL;
    self->autocast_dtype = (struct lhpy_dl_type){0};
    if (dtype == LH_DTYPE_BF16)
        self->autocast_dtype = (struct lhpy_dl_type){LHPY_DL_CODE_BFLOAT, 16, 1};
    else if (dtype == LH_DTYPE_F16)
        self->autocast_dtype = (struct lhpy_dl_type){LHPY_DL_CODE_FLOAT, 16, 1};
    Py_RETURN_NONE;
}

static PyObject *engine_forward(PyObject *object, PyObject *flag)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    bool is_open = false;
    if (LHPY_VALUE(flag, is_open) < 0)
        return NULL;
    self->forward_is_open = is_open;
    self->forward_thread = PyThread_get_thread_ident();
    if (lhpy_is_open(self) && !is_open)
        lhpy_engine_unscoped_release(self);
    Py_RETURN_NONE;
}

/* The parameters that forwards changed in place since the last call. */
static PyObject *engine_changed_take(PyObject *object, PyObject *Py_UNUSED(args))
{
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
    PyObject *on_backward, *on_gradient, *on_forward, *in_backward;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(on_backward), LHPY_ARG(on_gradient), LHPY_ARG(on_forward),
                  LHPY_ARG(in_backward)) < 0)
        return NULL;
    lhpy_replace(&self->in_backward, Py_NewRef(in_backward));
    lhpy_replace(&self->on_forward, Py_NewRef(on_forward));
    lhpy_replace(&self->on_backward, Py_NewRef(on_backward));
    lhpy_replace(&self->on_gradient, Py_NewRef(on_gradient));
    Py_RETURN_NONE;
}

static PyObject *engine_on_use(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *callback, *params;
    uint32_t *moved = NULL;
    uint32_t count = 0;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(callback), LHPY_ARG(params)) < 0 ||
        lhpy_indices_read(params, "param", self->param_count, &moved, &count) < 0)
        return NULL;
    for (uint32_t i = 0; i < count; i++)
        self->params[moved[i]].is_moved = true;
    PyMem_Free(moved);
    lhpy_replace(&self->on_use, Py_NewRef(callback));
    Py_RETURN_NONE;
}

static PyObject *engine_device_policy(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    bool no_overlap, no_reuse;
    uint64_t alloc_bytes_per_s = 0;
    if (!self || LHPY_ARGS(args, NULL, LHPY_ARG(no_overlap), LHPY_ARG(no_reuse),
                           LHPY_ARG(alloc_bytes_per_s)) < 0)
        return NULL;
    lh_device_policy_set(self->core->engine,
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
        self->exec = NULL; /* exec and io belong to the parent process, as does the ring */
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

static PyObject *engine_close(PyObject *object, PyObject *Py_UNUSED(args))
{
    engine_shut((struct lhpy_engine *)object);
    Py_RETURN_NONE;
}

/* The objects that an Engine and each of its parameters own. */
static const size_t engine_objects[] = {
    offsetof(struct lhpy_engine, store),           offsetof(struct lhpy_engine, saved_store),
    offsetof(struct lhpy_engine, apart_store),     offsetof(struct lhpy_engine, raiser),
    offsetof(struct lhpy_engine, in_place_object), offsetof(struct lhpy_engine, on_backward),
    offsetof(struct lhpy_engine, on_gradient),     offsetof(struct lhpy_engine, on_forward),
    offsetof(struct lhpy_engine, in_backward),     offsetof(struct lhpy_engine, team_check),
    offsetof(struct lhpy_engine, on_use),          offsetof(struct lhpy_engine, handle_type),
    offsetof(struct lhpy_engine, scope_type),      offsetof(struct lhpy_engine, zo_image),
    offsetof(struct lhpy_engine, cast_class),
};
static const size_t param_objects[] = {
    offsetof(struct lhpy_param, tensor),       offsetof(struct lhpy_param, order),
    offsetof(struct lhpy_param, hollow),       offsetof(struct lhpy_param, bound_class),
    offsetof(struct lhpy_param, hollow_class), offsetof(struct lhpy_param, gradient),
};

static PyObject **object_at(void *owner, size_t offset)
{
    return (PyObject **)(void *)((char *)owner + offset);
}

static int engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t k = 0; k < LH_COUNT_OF(engine_objects); k++)
        Py_VISIT(*object_at(self, engine_objects[k]));
    for (uint32_t i = 0; self->params && i < self->param_count; i++)
        for (size_t k = 0; k < LH_COUNT_OF(param_objects); k++)
            Py_VISIT(*object_at(&self->params[i], param_objects[k]));
    return 0;
}

static int engine_clear(PyObject *object)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    engine_shut(self);
    for (uint32_t i = 0; self->params && i < self->param_count; i++)
        for (size_t k = 0; k < LH_COUNT_OF(param_objects); k++)
            lhpy_replace(object_at(&self->params[i], param_objects[k]), NULL);
    for (size_t k = 0; k < LH_COUNT_OF(engine_objects); k++)
        lhpy_replace(object_at(self, engine_objects[k]), NULL);
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
    lhpy_clear(&lhpy_in_place_table, &self->in_place);
    PyMem_Free(self->units);
    PyMem_Free(self->engine_params);
    PyMem_Free(self->unit_states);
    PyMem_Free(self->bound_units);
    PyMem_Free(self->backward_units);
    PyMem_Free(self->unscoped_units);
    PyMem_Free(self->held_params);
    PyMem_Free(self->sum_trees);
    if (self->core && !lhpy_core_is_forked(self->core)) {
        Py_BEGIN_ALLOW_THREADS
        lhpy_core_release(self->core);
        Py_END_ALLOW_THREADS
    }
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef own_methods[] = {
    {"bind", engine_bind, METH_VARARGS, "bind(param, tensor, hollow)"},
    {"hollow_array", engine_hollow_array, METH_O, "The array that hollow parameters point into."},
    {"callbacks", engine_callbacks, METH_VARARGS,
     "callbacks(on_backward, on_gradient, on_forward, in_backward)"},
    {"on_use", engine_on_use, METH_VARARGS,
     "on_use(callback, params): callback(unit, address, make count, out count, is_from_write_back, "
     "pins) ->"
     " moved, called after each pin; params: the parameters it applies to."},
    {"device_policy", engine_device_policy, METH_VARARGS,
     "device_policy(no_overlap, no_reuse, alloc_bytes_per_s)"},
    {"forward", engine_forward, METH_O, "forward(is_open)"},
    {"changed_take", engine_changed_take, METH_NOARGS,
     "Parameters that forwards changed in place."},
    {"autocast", engine_autocast, METH_O, "autocast(dtype code; -1: no autocast)"},
    {"acquire", engine_acquire, METH_O, "acquire(unit): wait until resident, and pin."},
    {"release", engine_release, METH_O, "release(unit)"},
    {"held_bytes", engine_held_bytes, METH_NOARGS,
     "Bytes of gradients that the engine has not read yet."},
    {"lend", engine_lend, METH_O, "lend(param) -> tensor"},
    {"close", engine_close, METH_NOARGS, "Stop the engine."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef engine_methods[80]; /* the type keeps pointers to them */

void lhpy_engine_methods_join(void)
{
    const PyMethodDef *const tables[] = {
        own_methods,        lhpy_session_methods, lhpy_hook_methods, lhpy_handle_methods,
        lhpy_saved_methods, lhpy_sums_methods,    lhpy_zo_methods,   lhpy_team_methods};
    size_t count = 0;
    for (size_t i = 0; i < LH_COUNT_OF(tables); i++) {
        for (const PyMethodDef *method = tables[i]; method->ml_name; method++) {
            LH_ASSERT(count + 1 < LH_COUNT_OF(engine_methods));
            engine_methods[count++] = *method;
        }
    }
}

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
