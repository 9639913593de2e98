/* The Engine's methods around a step: begin, close, abort, flush, statistics. */
#include "py/lhpy.h"

static struct lhpy_engine *engine_open(PyObject *object)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    return lhpy_check_open(self) < 0 ? NULL : self;
}

PyObject *lhpy_engine_begin(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    int train = 0;
    if (!self || !PyArg_ParseTuple(args, "p", &train))
        return NULL;
    lhpy_engine_sweep(self);
    enum lh_engine_mode mode = train ? LH_ENGINE_MODE_TRAIN : LH_ENGINE_MODE_EVAL;
    if (lh_engine_begin(self->core->engine, mode) < 0)
        return lhpy_raise_engine(self);
    self->forward_is_train = train != 0;
    Py_RETURN_NONE;
}

PyObject *lhpy_engine_hyper(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    unsigned int group = 0;
    struct lh_adam_hyper hyper;
    if (!self || !PyArg_ParseTuple(args, "Iddddd", &group, &hyper.lr, &hyper.beta1, &hyper.beta2,
                                   &hyper.eps, &hyper.weight_decay))
        return NULL;
    lh_engine_hyper_set(self->core->engine, group, &hyper);
    Py_RETURN_NONE;
}

PyObject *lhpy_engine_backward_end(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    self->backward_is_open = false;
    if (lhpy_is_open(self)) {
        lhpy_engine_unscoped_release(self);
        lhpy_engine_backward_release(self);
        lhpy_engine_sweep(self);
    }
    return PyBool_FromLong(self->backward_has_gradients);
}

struct close_argument {
    const void *scalars;
    uint64_t scalar_bytes;
};

static int close_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    const struct close_argument *close = (const struct close_argument *)(uintptr_t)argument;
    return lh_engine_close(engine, close->scalars, close->scalar_bytes, timeout_ms);
}

/* Raise an error for a unit with gradients that is still lent: its update would wait forever. */
static int lent_refuse(struct lhpy_engine *self)
{
    for (uint32_t i = 0; i < self->unit_count; i++) {
        uint32_t pins = lh_engine_pin_count(self->core->engine, i);
        if (!self->unit_states[i].has_gradients || pins == 0)
            continue;
        char message[256];
        PyOS_snprintf(message, sizeof(message),
                      "unit %u cannot be updated: %u tensors are still views of its parameters"
                      " (kept from a forward or a backward); delete them before step()",
                      (unsigned)i, (unsigned)pins);
        lhpy_raise(self->raiser, -EBUSY, message);
        return -1;
    }
    return 0;
}

PyObject *lhpy_engine_close_step(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    const char *scalars = NULL;
    Py_ssize_t bytes = 0;
    if (!self || !PyArg_ParseTuple(args, "y#", &scalars, &bytes))
        return NULL;
    lhpy_engine_unscoped_release(self);
    lhpy_engine_backward_release(self);
    if (lent_refuse(self) < 0)
        return NULL;
    struct close_argument close = {scalars, (uint64_t)bytes};
    if (lhpy_engine_wait(self, close_wait, (uint64_t)(uintptr_t)&close) < 0)
        return NULL;
    for (uint32_t i = 0; i < self->unit_count; i++) {
        self->unit_states[i].epoch += self->unit_states[i].has_gradients;
        self->unit_states[i].has_gradients = false;
    }
    self->step_has_gradients = false;
    self->backward_is_open = false;
    lhpy_sums_forget(self);
    lhpy_engine_sweep(self);
    Py_RETURN_NONE;
}

static int norm_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    return lh_engine_norm(engine, (double *)(uintptr_t)argument, timeout_ms);
}

PyObject *lhpy_engine_gradient_square_sum(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = engine_open(object);
    double sum = 0;
    if (!self || lhpy_engine_wait(self, norm_wait, (uint64_t)(uintptr_t)&sum) < 0)
        return NULL;
    lhpy_engine_sweep(self);
    return PyFloat_FromDouble(sum);
}

PyObject *lhpy_engine_gradient_scale(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    double scale = 0;
    if (!self || !PyArg_ParseTuple(args, "d", &scale))
        return NULL;
    lh_engine_gradient_scale_set(self->core->engine, scale);
    Py_RETURN_NONE;
}

static int abort_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    (void)argument;
    return lh_engine_abort(engine, timeout_ms);
}

PyObject *lhpy_engine_abort(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = engine_open(object);
    if (!self)
        return NULL;
    lhpy_engine_unscoped_release(self);
    lhpy_engine_backward_release(self);
    if (lhpy_engine_wait(self, abort_wait, 0) < 0)
        return NULL;
    for (uint32_t i = 0; i < self->unit_count; i++) {
        self->unit_states[i].epoch += self->unit_states[i].has_gradients;
        self->unit_states[i].has_gradients = false;
    }
    self->step_has_gradients = false;
    self->backward_is_open = false;
    lhpy_sums_forget(self);
    lhpy_engine_gradients_drop(self);
    Py_RETURN_NONE;
}

static int flush_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    return lh_engine_flush(engine, argument != 0, timeout_ms);
}

PyObject *lhpy_engine_flush(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    int commit = 0;
    if (!self || !PyArg_ParseTuple(args, "p", &commit) ||
        lhpy_engine_wait(self, flush_wait, (uint64_t)commit) < 0)
        return NULL;
    lhpy_engine_sweep(self);
    Py_RETURN_NONE;
}

static int hold_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    (void)argument;
    return lh_engine_commit_hold(engine, timeout_ms);
}

PyObject *lhpy_engine_commit_hold(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = engine_open(object);
    if (!self)
        return NULL;
    /* After a signal, too: the caller releases a hold that may still be granted. */
    if (lhpy_engine_wait(self, hold_wait, 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Any thread; also if the engine has failed or was closed. */
PyObject *lhpy_engine_commit_release(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    if (lhpy_is_open(self))
        lh_engine_commit_release(self->core->engine);
    Py_RETURN_NONE;
}

static int pause_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    (void)argument;
    return lh_engine_pause(engine, timeout_ms);
}

/* The number of unit i of a list; -1 with a Python error. */
static int64_t unit_at(const struct lhpy_engine *self, PyObject *units, Py_ssize_t i)
{
    unsigned long unit = PyLong_AsUnsignedLong(PyList_GetItem(units, i));
    if (PyErr_Occurred())
        return -1;
    if (unit < self->unit_count)
        return (int64_t)unit;
    PyErr_Format(PyExc_IndexError, "unit %lu is out of range: there are %u units", unit,
                 self->unit_count);
    return -1;
}

/* A unit whose bytes in memory are lent cannot be discarded there. */
static int changed_refuse(struct lhpy_engine *self, uint32_t unit)
{
    uint32_t pins = lh_engine_pin_count(self->core->engine, unit);
    if (pins == 0)
        return 0;
    char message[256];
    PyOS_snprintf(message, sizeof(message),
                  "unit %u cannot be written: %u tensors are still views of its parameters (kept"
                  " from a loop over them or from a forward); delete them first",
                  (unsigned)unit, (unsigned)pins);
    lhpy_raise(self->raiser, -EBUSY, message);
    return -1;
}

PyObject *lhpy_engine_pause(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    PyObject *units = NULL;
    int commit = 0;
    if (!self || !PyArg_ParseTuple(args, "O!p", &PyList_Type, &units, &commit) ||
        lhpy_engine_wait(self, flush_wait, (uint64_t)commit) < 0)
        return NULL;
    /* Before the store is handed out: what is written there cannot be taken back. */
    for (Py_ssize_t i = 0; i < PyList_Size(units); i++) {
        int64_t unit = unit_at(self, units, i);
        if (unit < 0 || changed_refuse(self, (uint32_t)unit) < 0)
            return NULL;
    }
    if (lhpy_engine_wait(self, pause_wait, 0) < 0) {
        lh_engine_resume(self->core->engine); /* after a signal: it would sleep forever */
        return NULL;
    }
    self->is_paused = true;
    Py_RETURN_NONE;
}

PyObject *lhpy_engine_resume(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = engine_open(object);
    PyObject *units = NULL;
    if (!self || !PyArg_ParseTuple(args, "O!", &PyList_Type, &units))
        return NULL;
    if (!self->is_paused) /* the pause was abandoned, or never began */
        Py_RETURN_NONE;
    self->is_paused = false;
    int rc = 0;
    for (Py_ssize_t i = 0; rc == 0 && i < PyList_Size(units); i++) {
        int64_t unit = unit_at(self, units, i);
        rc = unit < 0 ? -1 : changed_refuse(self, (uint32_t)unit);
        if (rc < 0)
            break;
        lh_engine_invalidate(self->core->engine, (uint32_t)unit);
        self->unit_states[unit].epoch++; /* older graphs would use the new values */
    }
    lh_engine_resume(self->core->engine);
    if (rc < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *lhpy_engine_check(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = engine_open(object);
    if (!self)
        return NULL;
    if (lh_engine_error(self->core->engine, NULL) < 0)
        return lhpy_raise_engine(self);
    Py_RETURN_NONE;
}

static int dict_set(PyObject *dict, const char *name, uint64_t value)
{
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    int rc = number ? PyDict_SetItemString(dict, name, number) : -1;
    Py_XDECREF(number);
    return rc;
}

const char *const lhpy_link_names[] = {
    "param_read",     "state_read",    "param_write", "state_write", "commit_write",
    "gradient_write", "gradient_read", "copy_in",     "copy_out",    "saved_write",
    "saved_read",     "saved_in",      "saved_out"};
_Static_assert(LH_COUNT_OF(lhpy_link_names) == LH_ENGINE_LINK_COUNT, "a name for each link");

static int dict_set_links(PyObject *dict, const char *prefix, const uint64_t *bytes)
{
    for (int i = 0; i < LH_ENGINE_LINK_COUNT; i++) {
        char name[64];
        PyOS_snprintf(name, sizeof(name), "%s%s_bytes", prefix, lhpy_link_names[i]);
        if (dict_set(dict, name, bytes[i]) < 0)
            return -1;
    }
    return 0;
}

PyObject *lhpy_engine_stats(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    struct lh_engine_step_stats stats;
    if (self->core && lhpy_core_is_forked(self->core) && lhpy_check_open(self) < 0)
        return NULL;
    if (!self->core || !lh_engine_stats(self->core->engine, &stats))
        Py_RETURN_NONE;
    struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"step", stats.step},
        {"begin_ns", stats.begin_ns},
        {"close_ns", stats.close_ns},
        {"end_ns", stats.end_ns},
        {"replans", stats.replans},
        {"param_wait_ns", stats.param_wait_ns},
        {"gradient_wait_ns", stats.gradient_wait_ns},
        {"ssd_busy_ns", stats.ssd_busy_ns},
        {"update_busy_ns", stats.update_busy_ns},
        {"commit_ns", stats.commit_ns},
        {"gradient_bytes_max", stats.gradient_bytes_max},
        {"updated_params", stats.updated_params},
        {"deferred_units", stats.deferred_units},
        {"copy_in_ns", stats.copy_busy_ns[LH_DEV_DIRECTION_IN]},
        {"copy_out_ns", stats.copy_busy_ns[LH_DEV_DIRECTION_OUT]},
    };
    PyObject *dict = PyDict_New();
    int rc = dict ? 0 : -1;
    for (size_t i = 0; rc == 0 && i < LH_COUNT_OF(numbers); i++)
        rc = dict_set(dict, numbers[i].name, numbers[i].value);
    if (rc == 0)
        rc = dict_set_links(dict, "", stats.bytes);
    if (rc == 0)
        rc = dict_set_links(dict, "planned_", stats.planned_bytes);
    if (rc < 0)
        Py_CLEAR(dict);
    return dict;
}

PyObject *lhpy_engine_trace(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = engine_open(object);
    if (!self || lhpy_engine_wait(self, flush_wait, 0) < 0)
        return NULL;
    uint32_t count_max = LH_ENGINE_TRACE_COUNT_MAX;
    struct lh_engine_trace_event *events = PyMem_Calloc(count_max, sizeof(*events));
    if (!events)
        return PyErr_NoMemory();
    uint32_t count = lh_engine_trace(self->core->engine, events, count_max);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list && i < count; i++) {
        const struct lh_engine_trace_event *event = &events[i];
        PyObject *item = Py_BuildValue("(IIIIKKK)", event->kind, event->unit, event->lane,
                                       event->step, event->start_ns, event->end_ns, event->bytes);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    PyMem_Free(events);
    return list;
}

PyObject *lhpy_engine_status(PyObject *object, PyObject *args)
{
    (void)args;
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    if (lhpy_check_open(self) < 0)
        return NULL;
    uint64_t pins = 0;
    uint64_t handles = 0;
    for (uint32_t i = 0; i < self->unit_count; i++) {
        pins += lh_engine_pin_count(self->core->engine, i);
        handles += lh_engine_handle_count(self->core->engine, i);
    }
    const struct lh_arena *arena = self->core->arena;
    uint64_t bookkeeping_bytes = self->core->alloc.live_bytes + lhpy_store_live_bytes(self->store);
    static const char *const pages[] = {"4 KiB", "transparent huge", "reserved huge"};
    return Py_BuildValue("{s:K,s:K,s:I,s:O,s:O,s:K,s:s,s:s,s:s,s:s,s:s,s:K,s:K}", "pins", pins,
                         "handles", handles, "held_gradients", self->held_count, "has_gradients",
                         self->step_has_gradients ? Py_True : Py_False, "backward_is_open",
                         self->backward_is_open ? Py_True : Py_False, "step",
                         lh_engine_step(self->core->engine), "io", self->io->ops->name, "io_reason",
                         self->io_reason, "io_note", self->io->note, "pages", pages[arena->pages],
                         "memory_note", arena->note, "arena_bytes", arena->bytes,
                         "bookkeeping_bytes", bookkeeping_bytes);
}
