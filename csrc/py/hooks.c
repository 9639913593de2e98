/* Hooks that torch calls for every scope and every gradient, as C callables. */
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "py/lhpy.h"

/* A scope: the units that a module needs in its forward. */
struct scope {
    PyObject_HEAD struct lhpy_engine *engine; /* owned */
    bool opened_forward; /* the scope was entered outside any forward, and opened one */
    uint32_t unit_count;
    uint32_t *units;
};

static int scope_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct scope *scope = (struct scope *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(scope->engine);
    return 0;
}

static int scope_clear(PyObject *object)
{
    struct scope *scope = (struct scope *)object;
    Py_CLEAR(scope->engine);
    return 0;
}

static void scope_dealloc(PyObject *object)
{
    struct scope *scope = (struct scope *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    PyMem_Free(scope->units);
    (void)scope_clear(object);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static int requires_grad_check(struct lhpy_engine *self, uint32_t unit, uint32_t param)
{
    PyObject *flag = PyObject_GetAttrString(self->params[param].tensor, "requires_grad");
    int is_set = flag ? PyObject_IsTrue(flag) : -1;
    Py_XDECREF(flag);
    if (is_set < 0)
        return -1;
    if (!is_set || self->units[unit].elements > 0 || self->params[param].is_moved)
        return 0;
    lhpy_raise(self->raiser, -EPERM,
               "param %u was frozen when the model was wrapped and requires a gradient now: it has"
               " no optimizer state; set requires_grad before lohan.wrap()",
               param);
    return -1;
}

static long version_of(PyObject *tensor)
{
    long version = lhpy_tensor_version(tensor);
    if (version < 0)
        PyErr_Clear(); /* an inference tensor */
    return version;
}

/* [Note: Two classes] A parameter that is not resident has a class that refuses reads; while the
 * parameter is resident, it has a plain class. Setting data is a write, which only the plain class
 * allows.
 */
static int class_set(const struct lhpy_param *param, PyObject *type)
{
    static PyObject *name; /* never freed */
    if (!name)
        name = PyUnicode_InternFromString("__class__");
    return name ? PyObject_SetAttr(param->tensor, name, type) : -1;
}

static bool class_is_hollow(const struct lhpy_param *param)
{
    return param->hollow_class && (PyObject *)Py_TYPE(param->tensor) == param->hollow_class;
}

static PyObject *hook_classes(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t index = 0;
    PyObject *bound, *hollow;
    if (LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(bound, .type = &PyType_Type),
                  LHPY_ARG(hollow, .type = &PyType_Type)) < 0 ||
        lhpy_index_check("param", index, self->param_count) < 0)
        return NULL;
    lhpy_replace(&self->params[index].bound_class, Py_NewRef(bound));
    lhpy_replace(&self->params[index].hollow_class, Py_NewRef(hollow));
    Py_RETURN_NONE;
}

static PyObject *hook_cast_class(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t index = 0;
    PyObject *cast;
    if (LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(cast, .type = &PyType_Type)) <
            0 ||
        lhpy_index_check("param", index, self->param_count) < 0)
        return NULL;
    lhpy_replace(&self->cast_class, Py_NewRef(cast));
    self->params[index].is_cast = true;
    Py_RETURN_NONE;
}

/* The type of a parameter in memory. */
static PyObject *resident_class(const struct lhpy_engine *self, const struct lhpy_param *param)
{
    bool is_autocast = self->autocast_dtype.bits != 0;
    return is_autocast && param->is_cast ? self->cast_class : param->bound_class;
}

/* [Note: What a kernel is chosen by] torch computes some products (matmul() with a transposed first
 * argument) with another kernel, which rounds differently, if the weight requires a gradient, even
 * when autograd records nothing. Parameters that the engine's optimizer does not train require no
 * gradient outside forwards, so that nothing is saved for a backward; in forwards without
 * gradients, these parameters have the setting that they would have without lohan.
 */
static int required_set(const struct lhpy_param *param, bool is_required)
{
    if (!param->is_moved)
        return 0;
    return PyObject_SetAttrString(param->tensor, "requires_grad", is_required ? Py_True : Py_False);
}

/* Make the data of every parameter of a pinned unit a lend. */
int lhpy_unit_bind(struct lhpy_engine *self, uint32_t unit)
{
    const struct lh_engine_unit *desc = &self->units[unit];
    for (uint32_t i = 0; i < desc->param_count; i++) {
        uint32_t index = desc->param_first + i;
        struct lhpy_param *param = &self->params[index];
        /* First: a garbage collection here may run another thread, to which a plain class says that
         * the data are there. */
        PyObject *lend = lhpy_lend(self->core, unit, param->byte_offset, param->ndim, param->shape,
                                   param->dtype);
        int rc = lend ? 0 : -1;
        if (rc == 0 && class_is_hollow(param))
            rc = class_set(param, resident_class(self, param));
        if (rc == 0 && self->forward_is_open)
            rc = requires_grad_check(self, unit, index);
        if (rc == 0)
            rc = PyObject_SetAttrString(param->tensor, "data", lend);
        Py_XDECREF(lend);
        if (rc == 0)
            rc = required_set(param, self->forward_is_open && !self->forward_is_train);
        if (rc < 0)
            return -1;
        param->version = self->forward_is_open ? version_of(param->tensor) : -1;
    }
    LH_ASSERT(self->bound_unit_count < self->unit_count);
    self->bound_units[self->bound_unit_count++] = unit;
    return 0;
}

void lhpy_unit_unbind(struct lhpy_engine *self, uint32_t unit)
{
    const struct lh_engine_unit *desc = &self->units[unit];
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (uint32_t i = 0; i < desc->param_count; i++) {
        struct lhpy_param *param = &self->params[desc->param_first + i];
        if (class_is_hollow(param))
            continue; /* this parameter was not bound, because the bind failed partway */
        if (self->forward_is_open && param->version >= 0)
            param->is_changed |= version_of(param->tensor) > param->version;
        param->version = -1;
        if (required_set(param, false) < 0 ||
            PyObject_SetAttrString(param->tensor, "data", param->hollow) < 0 ||
            (param->hollow_class && class_set(param, param->hollow_class) < 0))
            PyErr_WriteUnraisable(param->tensor);
    }
    PyErr_Restore(type, value, traceback);
    for (uint32_t i = 0; i < self->bound_unit_count; i++) {
        if (self->bound_units[i] == unit) {
            uint32_t last = --self->bound_unit_count;
            self->bound_units[i] = self->bound_units[last];
            self->bound_units[last] = LHPY_UNIT_NONE;
            break;
        }
    }
}

/*
 * [Note: One binder] Binding and unbinding set attributes of parameters, which may run Python code,
 * so another thread may get the GIL between two parameters. Without this wait it would take a unit
 * that is bound in part for one that is bound, and read a hollow parameter; or bind what the first
 * thread then makes hollow. The binder waits for nothing, so the wait is short; a scope that is
 * entered by the binder's own thread, in a finalizer for example, does not wait for itself. During
 * the wait, another thread may close the session.
 */
static bool binder_is_other(const struct lhpy_unit *state)
{
    return state->binder != 0 && state->binder != PyThread_get_thread_ident();
}

static void binder_wait(const struct lhpy_unit *state)
{
    const struct timespec pause = {.tv_nsec = 20000};
    while (binder_is_other(state)) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&pause, NULL);
        Py_END_ALLOW_THREADS
    }
}

static void unit_unbind(struct lhpy_engine *self, uint32_t unit)
{
    struct lhpy_unit *state = &self->unit_states[unit];
    unsigned long before = state->binder; /* not 0 in a finalizer that the binder runs */
    state->binder = PyThread_get_thread_ident();
    lhpy_unit_unbind(self, unit);
    state->binder = before;
}

static int unit_enter(struct lhpy_engine *self, uint32_t unit)
{
    struct lhpy_unit *state = &self->unit_states[unit];
    binder_wait(state);
    if (lhpy_check_open(self) < 0)
        return -1;
    if (state->scope_depth > 0) {
        state->scope_depth++;
        return 0;
    }
    if (lhpy_engine_use(self, unit) < 0)
        return -1;
    binder_wait(state);
    if (lhpy_check_open(self) < 0) {
        lhpy_engine_unuse(self, unit);
        return -1;
    }
    if (state->scope_depth > 0) { /* another thread entered it during the wait without the GIL */
        lhpy_engine_unuse(self, unit);
        state->scope_depth++;
        return 0;
    }
    state->scope_depth = 1;
    unsigned long before = state->binder;
    state->binder = PyThread_get_thread_ident();
    int rc = lhpy_unit_bind(self, unit);
    state->binder = before;
    if (rc == 0)
        return 0;
    unit_unbind(self, unit);
    state->scope_depth = 0;
    lhpy_engine_unuse(self, unit);
    return -1;
}

static void unit_leave(struct lhpy_engine *self, uint32_t unit)
{
    struct lhpy_unit *state = &self->unit_states[unit];
    if (state->scope_depth == 0)
        return;
    state->scope_depth--;
    if (state->scope_depth > 0)
        return;
    unit_unbind(self, unit);
    lhpy_engine_unuse(self, unit);
}

/* Returns 1 on a thread that runs a backward, whose end it arranges to report; 0; -1: error. */
static int backward_ask(struct lhpy_engine *self)
{
    PyObject *answer = PyObject_CallNoArgs(self->in_backward);
    int rc = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    /* Register the callback here, not in a nested backward that may follow, which ends earlier. */
    if (rc > 0 && lhpy_engine_backward_begin(self) < 0)
        return -1;
    return rc;
}

/*
 * The scope whose forward was refused on this thread before any unit was entered. torch calls its
 * forward hook anyway, which must not leave what another thread has entered.
 */
static _Thread_local const struct scope *refused;
/* The scope whose units could not be entered on this thread: leaving it only closes its forward. */
static _Thread_local const struct scope *without_units;

static bool forward_is_mine(const struct lhpy_engine *self)
{
    return self->forward_is_open && self->forward_thread == PyThread_get_thread_ident();
}

/*
 * A scope outside any forward (a submodule called on its own) is a forward of its own: Python opens
 * and closes it. In a backward it is a recomputed forward, which saves nothing with lohan. If
 * another thread has a forward open, Python decides whether this one shares it or is refused.
 */
static int forward_ask(struct scope *scope, bool begins)
{
    if (begins) {
        int backward = forward_is_mine(scope->engine) ? 1 : backward_ask(scope->engine);
        if (backward != 0)
            return backward < 0 ? -1 : 0;
    }
    PyObject *answer =
        PyObject_CallFunction(scope->engine->on_forward, "O", begins ? Py_True : Py_False);
    int rc = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (rc >= 0 || !begins) /* a refused begin leaves another thread's forward as it is */
        scope->opened_forward = rc > 0 && begins;
    return rc < 0 ? -1 : 0;
}

static PyObject *scope_enter(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t count)
{
    struct scope *scope = (struct scope *)object;
    refused = NULL;
    without_units = NULL;
    /* A call without arguments is not torch's: the caller wants to read the parameters. */
    if (lhpy_check_open(scope->engine) < 0 || (count > 0 && forward_ask(scope, true) < 0)) {
        refused = scope;
        return NULL;
    }
    if (scope->engine->forward_is_open)
        lhpy_engine_unscoped_release(scope->engine);
    for (uint32_t i = 0; i < scope->unit_count; i++) {
        if (unit_enter(scope->engine, scope->units[i]) == 0)
            continue;
        while (i-- > 0)
            unit_leave(scope->engine, scope->units[i]);
        without_units = scope;
        return NULL; /* torch calls the forward hook, which closes what was opened */
    }
    /* Otherwise gradients that waited for this forward would stay until the next backward. */
    if (scope->engine->held_count > 0)
        lhpy_engine_sweep(scope->engine);
    Py_RETURN_NONE;
}

static PyObject *scope_leave(PyObject *object, PyObject *const *Py_UNUSED(args),
                             Py_ssize_t Py_UNUSED(count))
{
    struct scope *scope = (struct scope *)object;
    if (refused == scope) {
        refused = NULL;
        Py_RETURN_NONE;
    }
    bool has_units = without_units != scope;
    without_units = NULL;
    bool is_forked = scope->engine->core && lhpy_core_is_forked(scope->engine->core);
    if (scope->engine->io && scope->engine->forward_is_open && !is_forked)
        lhpy_engine_unscoped_release(scope->engine);
    bool leaves = has_units && scope->engine->core && !is_forked;
    for (uint32_t i = scope->unit_count; leaves && i-- > 0;)
        unit_leave(scope->engine, scope->units[i]);
    if (scope->opened_forward && forward_ask(scope, false) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Bind the units that are not bound yet, until lhpy_engine_unscoped_release(). */
static int unscoped_enter(struct scope *scope)
{
    struct lhpy_engine *self = scope->engine;
    for (uint32_t i = 0; i < scope->unit_count; i++) {
        uint32_t unit = scope->units[i];
        binder_wait(&self->unit_states[unit]);
        if (self->unit_states[unit].scope_depth > 0)
            continue;
        if (unit_enter(self, unit) < 0)
            return -1;
        self->unscoped_units[self->unscoped_unit_count++] = unit;
    }
    return 0;
}

/*
 * Called when a parameter is read from its module. [Note: Forwards without hooks] A checkpoint
 * around `forward` instead of around the module recomputes it in backward without the module's
 * hooks, so no scope is entered. In that case, and only then, a read makes the unit resident and
 * returns True; the unit stays bound until the backward of what was recomputed begins.
 */
static PyObject *scope_read(PyObject *object, PyObject *const *Py_UNUSED(args),
                            Py_ssize_t Py_UNUSED(count))
{
    struct scope *scope = (struct scope *)object;
    struct lhpy_engine *self = scope->engine;
    if (!lhpy_is_open(self) || self->forward_is_open)
        Py_RETURN_FALSE;
    int backward = backward_ask(self);
    if (backward <= 0)
        return backward < 0 ? NULL : Py_NewRef(Py_False);
    if (unscoped_enter(scope) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

/*
 * Make parameters resident that are arguments of an operation in a forward, outside their scope.
 * They stay until the next such operation or the next scope, so that few need room at a time.
 */
static PyObject *scope_hold(PyObject *object, PyObject *const *Py_UNUSED(args),
                            Py_ssize_t Py_UNUSED(count))
{
    struct scope *scope = (struct scope *)object;
    if (lhpy_check_open(scope->engine) < 0)
        return NULL;
    lhpy_engine_unscoped_release(scope->engine);
    if (unscoped_enter(scope) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Leave every scope, after a forward failed. */
static PyObject *hook_scopes_drop(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    self->unscoped_unit_count = 0;
    /*
     * In a forked child the pins belong to the parent, the parameters' memory is not mapped, and a
     * binder other than the thread that forked does not exist.
     */
    for (uint32_t unit = 0; self->io && !lhpy_is_open(self) && unit < self->unit_count; unit++) {
        struct lhpy_unit *state = &self->unit_states[unit];
        if (state->scope_depth > 0 || state->binder != 0)
            lhpy_unit_unbind(self, unit);
        state->scope_depth = 0;
        state->binder = 0;
    }
    while (lhpy_is_open(self) && self->bound_unit_count > 0) {
        uint32_t unit = self->bound_units[0];
        if (binder_is_other(&self->unit_states[unit])) { /* it may leave the unit by itself */
            binder_wait(&self->unit_states[unit]);
            continue;
        }
        self->unit_states[unit].scope_depth = 1;
        unit_leave(self, unit);
    }
    Py_RETURN_NONE;
}

void lhpy_engine_unscoped_release(struct lhpy_engine *self)
{
    while (self->unscoped_unit_count > 0)
        unit_leave(self, self->unscoped_units[--self->unscoped_unit_count]);
}

static PyMethodDef scope_methods[] = {
    {"read", (PyCFunction)(void (*)(void))scope_read, METH_FASTCALL,
     "A parameter is read: see [Note: Forwards without hooks]."},
    {"hold", (PyCFunction)(void (*)(void))scope_hold, METH_FASTCALL,
     "Make the units resident in a forward, until the next scope or the next hold."},
    {"enter", (PyCFunction)(void (*)(void))scope_enter, METH_FASTCALL,
     "Forward pre-hook: make the units resident and bind their parameters."},
    {"leave", (PyCFunction)(void (*)(void))scope_leave, METH_FASTCALL,
     "Forward hook: make the parameters hollow and let the units go."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot scope_slots[] = {
    {Py_tp_dealloc, scope_dealloc},
    {Py_tp_traverse, scope_traverse},
    {Py_tp_clear, scope_clear},
    {Py_tp_methods, scope_methods},
    {Py_tp_doc, "The units that a module needs in its forward."},
    {0, NULL},
};

PyType_Spec lhpy_scope_spec = {
    .name = "lohan._core.Scope",
    .basicsize = sizeof(struct scope),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = scope_slots,
};

static PyObject *hook_scope(PyObject *object, PyObject *units)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t *numbers = NULL;
    uint32_t count = 0;
    if (!self || lhpy_indices_read(units, "unit", self->unit_count, &numbers, &count) < 0)
        return NULL;
    struct scope *scope = lhpy_type_new(self->scope_type);
    if (!scope) {
        PyMem_Free(numbers);
        return NULL;
    }
    scope->engine = (struct lhpy_engine *)Py_NewRef(object);
    scope->units = numbers;
    scope->unit_count = count;
    return (PyObject *)scope;
}

/* Remove p.grad from the parameter and return it. None: the parameter has no gradient. */
static PyObject *gradient_detach(const struct lhpy_engine *self, unsigned long index,
                                 PyObject *parameter)
{
    const struct lhpy_param *param = &self->params[index];
    bool is_hollow = class_is_hollow(param) && param->tensor == parameter;
    /* The hollow class would answer in Python, which takes ten times as long. */
    if (is_hollow && class_set(param, param->bound_class) < 0)
        return NULL;
    PyObject *gradient = PyObject_GetAttrString(parameter, "grad");
    if (gradient && gradient != Py_None && PyObject_SetAttrString(parameter, "grad", Py_None) < 0) {
        Py_DECREF(gradient);
        gradient = NULL;
    }
    if (is_hollow && class_set(param, param->hollow_class) < 0)
        Py_CLEAR(gradient);
    return gradient;
}

/* Remove this backward's gradient from the parameter and return it. None: there is none. */
static PyObject *gradient_pull(struct lhpy_engine *self, uint32_t index, PyObject *parameter)
{
    if (lhpy_check_open(self) < 0)
        return NULL;
    PyObject *gradient = gradient_detach(self, index, parameter);
    bool is_alias = self->params[index].tensor != parameter; /* whose p.grad is no stand-in */
    if (!gradient || gradient == Py_None || !self->has_sums || is_alias)
        return gradient;
    PyObject *found = gradient;
    gradient = lhpy_sums_unwrap(self, index, found);
    Py_DECREF(found);
    return gradient;
}

/* The post-accumulate hook of one parameter: self is (engine, index). */
static PyObject *gradient_hook(PyObject *self_tuple, PyObject *parameter)
{
    struct lhpy_engine *engine = (struct lhpy_engine *)PyTuple_GetItem(self_tuple, 0);
    uint32_t index = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(self_tuple, 1));
    PyObject *gradient = gradient_pull(engine, index, parameter);
    if (!gradient || gradient == Py_None)
        return gradient;
    PyObject *answer = lhpy_engine_gradient_take(engine, index, gradient);
    Py_DECREF(gradient);
    return answer;
}

/* gradient_pull(param, parameter): the gradient that the hook would hand to the engine, or None. */
static PyObject *hook_gradient_pull(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    struct lhpy_dl_tensor view;
    uint32_t index = 0;
    PyObject *parameter;
    if (!self || LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(parameter)) < 0 ||
        lhpy_index_check("param", index, self->param_count) < 0)
        return NULL;
    PyObject *gradient = gradient_pull(self, index, parameter);
    if (!gradient || gradient == Py_None)
        return gradient;
    PyObject *owned = lhpy_engine_gradient_begin(self, index, gradient, &view);
    Py_DECREF(gradient);
    return owned;
}

static PyMethodDef gradient_hook_def = {"lohan_gradient_hook", gradient_hook, METH_O,
                                        "Hand the accumulated gradient to the engine."};

static PyObject *hook_gradient(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t index = 0;
    if (lhpy_index_read(number, "param", self->param_count, &index) < 0)
        return NULL;
    PyObject *pair = Py_BuildValue("(OI)", object, index);
    PyObject *hook = pair ? PyCFunction_New(&gradient_hook_def, pair) : NULL;
    Py_XDECREF(pair);
    return hook;
}

PyMethodDef lhpy_hook_methods[] = {
    {"classes", hook_classes, METH_VARARGS, "classes(param, bound, hollow)"},
    {"cast_class", hook_cast_class, METH_VARARGS, "cast_class(param, cast)"},
    {"scope", hook_scope, METH_O, "scope(units) -> Scope"},
    {"scopes_drop", hook_scopes_drop, METH_NOARGS, "Leave every scope."},
    {"gradient_hook", hook_gradient, METH_O,
     "gradient_hook(param) -> hook of the parameter, or of an alias of it"},
    {"gradient_pull", hook_gradient_pull, METH_VARARGS,
     "gradient_pull(param, parameter) -> gradient or None"},
    {NULL, NULL, 0, NULL},
};
