/* The Engine's methods around a step: begin, close, abort, flush, statistics. */
#include <string.h>

#include "py/lhpy.h"

static PyObject *session_begin(PyObject *object, PyObject *flag)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    bool train = false;
    if (!self || LHPY_VALUE(flag, train) < 0)
        return NULL;
    lhpy_engine_sweep(self);
    enum lh_engine_mode mode = train ? LH_ENGINE_MODE_TRAIN : LH_ENGINE_MODE_EVAL;
    if (lh_engine_begin(self->core->engine, mode) < 0)
        return lhpy_raise_engine(self);
    self->forward_is_train = train;
    Py_RETURN_NONE;
}

static PyObject *session_hyper(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t group = 0;
    struct lh_adam_hyper hyper = {0};
    if (!self ||
        LHPY_ARGS(args, NULL, LHPY_ARG(group), LHPY_ARG_AS("lr", hyper.lr),
                  LHPY_ARG_AS("beta1", hyper.beta1), LHPY_ARG_AS("beta2", hyper.beta2),
                  LHPY_ARG_AS("eps", hyper.eps), LHPY_ARG_AS("weight_decay", hyper.weight_decay),
                  LHPY_ARG_AS("average_rest", hyper.average_rest, .is_optional = true)) < 0)
        return NULL;
    lh_engine_hyper_set(self->core->engine, group, &hyper);
    Py_RETURN_NONE;
}

static PyObject *session_backward_end(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    self->backward_is_open = false;
    self->backward_number++;
    if (lhpy_is_open(self)) {
        lhpy_engine_unscoped_release(self);
        lhpy_engine_backward_release(self);
        lhpy_engine_sweep(self);
    }
    return PyBool_FromLong(self->backward_has_gradients);
}

static int close_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    const struct lhpy_bytes *scalars = (const struct lhpy_bytes *)(uintptr_t)argument;
    return lh_engine_close(engine, scalars->data, scalars->bytes, timeout_ms);
}

/* Raise an error for a unit with gradients that is still lent: its update would wait forever. */
static int lent_refuse(struct lhpy_engine *self)
{
    for (uint32_t i = 0; i < self->unit_count; i++) {
        uint32_t pins = lh_engine_pin_count(self->core->engine, i);
        if (!self->unit_states[i].has_gradients || pins == 0)
            continue;
        lhpy_raise(self->raiser, -EBUSY,
                   "unit %u cannot be updated: %u tensors are still views of its parameters"
                   " (kept from a forward, a backward or the traceback of an error); delete them"
                   " before step()",
                   i, pins);
        return -1;
    }
    return 0;
}

/* Reset the binding's state of a step that the engine has taken or discarded. */
static void step_over(struct lhpy_engine *self)
{
    for (uint32_t i = 0; i < self->unit_count; i++) {
        self->unit_states[i].epoch += self->unit_states[i].has_gradients;
        self->unit_states[i].has_gradients = false;
    }
    self->step_has_gradients = false;
    self->backward_is_open = false;
    self->backward_number++;
    lhpy_sums_forget(self);
}

struct tail {
    const void *pointer;
    uint64_t bytes;
};

static int tail_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    const struct tail *tail = (const struct tail *)(uintptr_t)argument;
    return lh_tail_post(engine, tail->pointer, tail->bytes, timeout_ms);
}

static PyObject *session_post_tail(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    struct tail tail = {0};
    if (!self || LHPY_ARGS(args, NULL, LHPY_ARG_AS("pointer", tail.pointer),
                           LHPY_ARG_AS("bytes", tail.bytes)) < 0)
        return NULL;
    lhpy_device_stream_note(self);
    if (lhpy_engine_request(self, tail_wait, (uint64_t)(uintptr_t)&tail) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *session_close_step(PyObject *object, PyObject *bytes)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    struct lhpy_bytes scalars;
    if (!self || LHPY_VALUE(bytes, scalars) < 0)
        return NULL;
    lhpy_engine_unscoped_release(self);
    lhpy_engine_backward_release(self);
    if (lent_refuse(self) < 0)
        return NULL;
    if (lhpy_engine_request(self, close_wait, (uint64_t)(uintptr_t)&scalars) < 0)
        return NULL;
    step_over(self);
    lhpy_engine_sweep(self);
    Py_RETURN_NONE;
}

static int norm_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    return lh_norm_wait(engine, (double *)(uintptr_t)argument, timeout_ms);
}

static PyObject *session_gradient_square_sum(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    double sum = 0;
    if (!self || lhpy_engine_request(self, norm_wait, (uint64_t)(uintptr_t)&sum) < 0)
        return NULL;
    lhpy_engine_sweep(self);
    return PyFloat_FromDouble(sum);
}

/*
 * The sums of squares of the parameters of this process that have gradients, as bytes of doubles:
 * for a norm over several processes, each of which has other parameters' sums.
 */
static PyObject *session_gradient_square_sums(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    double sum = 0;
    if (!self || lhpy_engine_request(self, norm_wait, (uint64_t)(uintptr_t)&sum) < 0)
        return NULL;
    lhpy_engine_sweep(self);
    const double *sums = lh_norm_sums(self->core->engine);
    double *mine = PyMem_Calloc((size_t)self->param_count + 1, sizeof(*mine));
    if (!mine)
        return PyErr_NoMemory();
    Py_ssize_t count = 0;
    for (uint32_t i = 0; i < self->param_count; i++) {
        uint32_t unit = self->engine_params[i].unit;
        if (self->unit_states[unit].has_gradients && !self->units[unit].is_given)
            mine[count++] = sums[i];
    }
    PyObject *made =
        PyBytes_FromStringAndSize((const char *)mine, count * (Py_ssize_t)sizeof(*mine));
    PyMem_Free(mine);
    return made;
}

static PyObject *session_gradient_scale(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    double scale = 0;
    if (!self || LHPY_VALUE(number, scale) < 0)
        return NULL;
    lh_engine_gradient_scale_set(self->core->engine, scale);
    Py_RETURN_NONE;
}

static PyObject *session_repeat(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    lhpy_engine_unscoped_release(self);
    lhpy_engine_backward_release(self);
    if (lent_refuse(self) < 0)
        return NULL;
    if (lhpy_engine_request_plain(self, lh_repeat) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *session_repeat_wait(PyObject *object, PyObject *flag)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    bool waits = false;
    if (!self || LHPY_VALUE(flag, waits) < 0)
        return NULL;
    lh_repeat_wait_set(self->core->engine, waits);
    Py_RETURN_NONE;
}

static PyObject *session_commit_every(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint64_t every = 0;
    if (!self || LHPY_VALUE(number, every) < 0)
        return NULL;
    return PyBool_FromLong(lh_every_set(self->core->engine, every));
}

static PyObject *session_abort(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    lhpy_engine_unscoped_release(self);
    lhpy_engine_backward_release(self);
    if (lhpy_engine_request_plain(self, lh_engine_abort) < 0)
        return NULL;
    step_over(self);
    lhpy_engine_gradients_drop(self);
    Py_RETURN_NONE;
}

static int flush_wait(struct lh_engine *engine, uint64_t argument, int timeout_ms)
{
    return lh_engine_flush(engine, argument != 0, timeout_ms);
}

static PyObject *session_flush(PyObject *object, PyObject *flag)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    bool commit = false;
    if (!self || LHPY_VALUE(flag, commit) < 0 || lhpy_engine_request(self, flush_wait, commit) < 0)
        return NULL;
    lhpy_engine_sweep(self);
    Py_RETURN_NONE;
}

static PyObject *session_await_steps(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self || lhpy_engine_request_plain(self, lh_engine_over_wait) < 0)
        return NULL;
    lhpy_engine_sweep(self);
    Py_RETURN_NONE;
}

static PyObject *session_commit_hold(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    /* After a signal, the hold may still be granted, so the caller releases it then, too. */
    if (lhpy_engine_request_plain(self, lh_engine_commit_hold) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Release a hold, on any thread, also if the engine has failed or was closed. */
static PyObject *session_commit_release(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    if (lhpy_is_open(self))
        lh_engine_commit_release(self->core->engine);
    Py_RETURN_NONE;
}

static int unit_read(struct lhpy_engine *self, uint32_t unit, uint64_t begin, uint64_t bytes,
                     void *target)
{
    struct lh_engine *engine = self->core->engine;
    lh_reading_begin(engine, unit);
    int rc = lhpy_engine_wait_plain(self, lh_reading_wait);
    if (rc >= 0) {
        Py_BEGIN_ALLOW_THREADS
        memcpy(target, lh_reading_address(engine, unit) + begin, bytes);
        Py_END_ALLOW_THREADS
    }
    lh_reading_end(engine, unit);
    return rc;
}

/* read(param, first byte, bytes, pointer): a parameter's newest bytes, from main memory. */
static PyObject *session_read(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0;
    uint64_t first = 0;
    uint64_t bytes = 0;
    void *pointer = NULL;
    if (!self ||
        LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(first), LHPY_ARG(bytes),
                  LHPY_ARG(pointer)) < 0 ||
        lhpy_index_check("param", index, self->param_count) < 0)
        return NULL;
    uint32_t unit = self->engine_params[index].unit;
    uint64_t begin = self->params[index].byte_offset + first;
    uint64_t end = self->units[unit].bytes;
    if (!self->core->dev || first > end || begin > end || bytes > end - begin) {
        PyErr_SetString(PyExc_ValueError, "the bytes are not in main memory's copy of the unit");
        return NULL;
    }
    if (lhpy_engine_turn_take(self) < 0)
        return NULL;
    int rc = -1;
    if (self->is_paused)
        PyErr_SetString(PyExc_RuntimeError, "this thread has paused the engine");
    else
        rc = unit_read(self, unit, begin, bytes, pointer);
    lhpy_engine_turn_give(self);
    if (rc < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Raise an error if the unit is lent, because its bytes in memory cannot be discarded then. */
static int changed_refuse(struct lhpy_engine *self, uint32_t unit)
{
    uint32_t pins = lh_engine_pin_count(self->core->engine, unit);
    if (pins == 0)
        return 0;
    lhpy_raise(self->raiser, -EBUSY,
               "unit %u cannot be written: %u tensors are still views of its parameters (kept from"
               " a loop over them, a forward or the traceback of an error); delete them first",
               unit, pins);
    return -1;
}

/*
 * Make the engine sleep, so that the caller may use the store. The turn stays with the calling
 * thread until resume(): other threads, whose requests the engine would not answer, wait for it.
 */
static PyObject *session_pause(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    PyObject *units = NULL;
    bool commit = false;
    uint32_t *changed = NULL;
    uint32_t count = 0;
    if (!self || LHPY_ARGS(args, NULL, LHPY_ARG(units), LHPY_ARG(commit)) < 0 ||
        lhpy_indices_read(units, "unit", self->unit_count, &changed, &count) < 0)
        return NULL;
    int rc = lhpy_engine_turn_take(self);
    bool is_turn = rc == 0;
    if (is_turn && self->is_paused) {
        PyErr_SetString(PyExc_RuntimeError, "this thread has already paused the engine");
        rc = -1;
    }
    if (rc == 0)
        rc = lhpy_engine_request(self, flush_wait, commit) < 0 ? -1 : 0;
    /* Check this before the store is handed out, because writes to it cannot be undone. */
    for (uint32_t i = 0; rc == 0 && i < count; i++)
        rc = changed_refuse(self, changed[i]);
    PyMem_Free(changed);
    if (rc == 0) {
        rc = lhpy_engine_request_plain(self, lh_engine_pause);
        if (rc < 0) /* after a signal; the engine would sleep forever otherwise */
            lh_engine_resume(self->core->engine);
        self->is_paused = rc >= 0;
    }
    if (rc >= 0)
        Py_RETURN_NONE;
    if (is_turn)
        lhpy_engine_turn_give(self);
    return NULL;
}

/* param_steps(clear): the number of updates of each parameter, while the engine is paused. */
static PyObject *session_param_steps(PyObject *object, PyObject *flag)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    bool clear = false;
    if (!self || LHPY_VALUE(flag, clear) < 0)
        return NULL;
    if (!self->is_paused) {
        PyErr_SetString(PyExc_RuntimeError, "param_steps() needs a paused engine");
        return NULL;
    }
    if (clear)
        lh_scalars_steps_clear(self->core->engine);
    PyObject *list = PyList_New((Py_ssize_t)self->param_count);
    for (uint32_t i = 0; list && i < self->param_count; i++) {
        uint64_t count = lh_engine_param_step(self->core->engine, i);
        PyObject *number = PyLong_FromUnsignedLongLong(count);
        if (!number || PyList_SetItem(list, (Py_ssize_t)i, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Does nothing unless the calling thread has paused the engine. */
static PyObject *session_resume(PyObject *object, PyObject *units)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t *changed = NULL;
    uint32_t count = 0;
    if (!self)
        return NULL;
    if (!self->is_paused || self->turn_thread != PyThread_get_thread_ident())
        Py_RETURN_NONE;
    self->is_paused = false;
    int rc = lhpy_indices_read(units, "unit", self->unit_count, &changed, &count);
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        rc = changed_refuse(self, changed[i]);
        if (rc < 0)
            break;
        if (!lhpy_team_is_mate(self))
            lh_engine_invalidate(self->core->engine, changed[i]);
        self->unit_states[changed[i]].epoch++; /* older graphs would use the new values */
    }
    PyMem_Free(changed);
    if (rc == 0 && count > 0 && lhpy_team_is_mate(self))
        lh_borrow_give_back(self->core->engine);
    lh_engine_resume(self->core->engine);
    lhpy_engine_turn_give(self);
    if (rc < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Process ids do not show this: a child in another pid namespace may have its parent's. */
static PyObject *session_is_forked(PyObject *object, PyObject *Py_UNUSED(args))
{
    const struct lhpy_engine *self = (struct lhpy_engine *)object;
    return PyBool_FromLong(self->core && lhpy_core_is_forked(self->core));
}

static PyObject *session_check(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    if (lh_engine_error(self->core->engine, NULL) < 0)
        return lhpy_raise_engine(self);
    Py_RETURN_NONE;
}

const char *const lhpy_link_names[] = {
    "param_read",     "state_read",    "param_write", "state_write", "commit_write",
    "gradient_write", "gradient_read", "copy_in",     "copy_out",    "saved_write",
    "saved_read",     "saved_in",      "saved_out",   "shared",      "gathered"};
_Static_assert(LH_COUNT_OF(lhpy_link_names) == LH_ENGINE_LINK_COUNT, "a name for each link");

/* Add the bytes of every link to dict, which is stolen and may be NULL. Returns dict, or NULL. */
static PyObject *links_add(PyObject *dict, const char *prefix, const uint64_t *bytes)
{
    for (int i = 0; dict && i < LH_ENGINE_LINK_COUNT; i++) {
        char name[64];
        PyOS_snprintf(name, sizeof(name), "%s%s_bytes", prefix, lhpy_link_names[i]);
        dict = lhpy_dict_add(dict, name, PyLong_FromUnsignedLongLong(bytes[i]));
    }
    return dict;
}

static const struct lhpy_table stats_table = LHPY_TABLE(
    "stats", LHPY_FORM_DICT, struct lh_engine_step_stats,
    LHPY_FIELDS(struct lh_engine_step_stats, step, begin_ns, close_ns, end_ns, replans,
                param_wait_ns, gradient_wait_ns, ssd_busy_ns, update_busy_ns, commit_ns,
                gradient_bytes_max, updated_params, deferred_units),
    LHPY_FIELD_AS("copy_in_ns", struct lh_engine_step_stats, copy_busy_ns[LH_DEV_DIRECTION_IN]),
    LHPY_FIELD_AS("copy_out_ns", struct lh_engine_step_stats, copy_busy_ns[LH_DEV_DIRECTION_OUT]));

static PyObject *session_stats(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    struct lh_engine_step_stats stats;
    if (self->core && lhpy_core_is_forked(self->core) && lhpy_check_open(self) < 0)
        return NULL;
    if (!self->core || !lh_engine_stats(self->core->engine, &stats))
        Py_RETURN_NONE;
    PyObject *dict = links_add(lhpy_make(&stats_table, &stats), "", stats.bytes);
    return links_add(dict, "planned_", stats.planned_bytes);
}

static const struct lhpy_table event_table =
    LHPY_TABLE_PLAIN("an event", LHPY_FORM_TUPLE, struct lh_engine_trace_event, kind, unit, lane,
                     step, start_ns, end_ns, bytes);

static PyObject *session_trace(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self || lhpy_engine_request(self, flush_wait, 0) < 0)
        return NULL;
    struct lh_engine_trace_event *events = PyMem_Calloc(LH_ENGINE_TRACE_COUNT_MAX, sizeof(*events));
    if (!events)
        return PyErr_NoMemory();
    uint32_t count = lh_engine_trace(self->core->engine, events, LH_ENGINE_TRACE_COUNT_MAX);
    PyObject *list = lhpy_list(&event_table, events, count);
    PyMem_Free(events);
    return list;
}

static PyObject *session_status(PyObject *object, PyObject *Py_UNUSED(args))
{
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
    return Py_BuildValue("{s:K,s:K,s:I,s:O,s:O,s:K,s:s,s:s,s:s,s:s,s:s,s:s,s:K,s:K,s:K}", "pins",
                         pins, "handles", handles, "held_gradients", self->held_count,
                         "has_gradients", self->step_has_gradients ? Py_True : Py_False,
                         "backward_is_open", self->backward_is_open ? Py_True : Py_False, "step",
                         lh_engine_step(self->core->engine), "io", self->io->ops->name, "io_reason",
                         self->io_reason, "io_note", self->io->note, "pages", pages[arena->pages],
                         "memory_note", arena->note, "device_note",
                         self->core->dev ? self->core->dev->note : "", "arena_bytes", arena->bytes,
                         "bookkeeping_bytes", bookkeeping_bytes, "kept_bytes",
                         lh_kept_taken_bytes(self->core->engine));
}

static PyObject *session_announce(PyObject *object, PyObject *numbers)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t *units = NULL;
    uint32_t count = 0;
    if (!self || lhpy_indices_read(numbers, "unit", self->unit_count, &units, &count) < 0)
        return NULL;
    lh_engine_announce(self->core->engine, units, count);
    PyMem_Free(units);
    Py_RETURN_NONE;
}

/* idle_history(step, group, lr, beta1, beta2, eps, weight_decay, average_rest=0) */
static PyObject *session_idle_history(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint64_t step = 0;
    uint32_t group = 0;
    struct lh_adam_hyper hyper = {0};
    if (!self ||
        LHPY_ARGS(args, NULL, LHPY_ARG(step), LHPY_ARG(group), LHPY_ARG_AS("lr", hyper.lr),
                  LHPY_ARG_AS("beta1", hyper.beta1), LHPY_ARG_AS("beta2", hyper.beta2),
                  LHPY_ARG_AS("eps", hyper.eps), LHPY_ARG_AS("weight_decay", hyper.weight_decay),
                  LHPY_ARG_AS("average_rest", hyper.average_rest, .is_optional = true)) < 0)
        return NULL;
    lh_idle_history_set(self->core->engine, step, group, &hyper);
    Py_RETURN_NONE;
}

static PyObject *session_idle_owed(PyObject *object, PyObject *numbers)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t *units = NULL;
    uint32_t count = 0;
    if (!self || lhpy_indices_read(numbers, "unit", self->unit_count, &units, &count) < 0)
        return NULL;
    uint32_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t owed = lh_idle_owed(self->core->engine, units[i]);
        most = owed > most ? owed : most;
    }
    PyMem_Free(units);
    return PyLong_FromUnsignedLong(most);
}

static PyObject *session_idle_settle(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self || lhpy_engine_request_plain(self, lh_settle_all) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyMethodDef lhpy_session_methods[] = {
    {"begin", session_begin, METH_O, "begin(train)"},
    {"hyper", session_hyper, METH_VARARGS,
     "hyper(group, lr, beta1, beta2, eps, weight_decay, average_rest=0)"},
    {"gradient_square_sum", session_gradient_square_sum, METH_NOARGS,
     "The sum of squares of the open step's gradients."},
    {"gradient_square_sums", session_gradient_square_sums, METH_NOARGS,
     "Its parts, one for each parameter, as bytes of doubles."},
    {"gradient_scale", session_gradient_scale, METH_O, "gradient_scale(scale)"},
    {"repeat", session_repeat, METH_NOARGS,
     "Undo the open step's updates, which run again after the close."},
    {"repeat_wait", session_repeat_wait, METH_O,
     "repeat_wait(waits): whether the updates of the next steps wait for the close."},
    {"commit_every", session_commit_every, METH_O,
     "commit_every(steps): whether that is possible: not if gradients wait on SSD"},
    {"backward_end", session_backward_end, METH_NOARGS,
     "Report that a backward ended or failed; returns whether it gave gradients."},
    {"post_tail", session_post_tail, METH_VARARGS,
     "post_tail(pointer, bytes): where the accelerator has the end of the next close's scalars"},
    {"close_step", session_close_step, METH_O, "close_step(scalars)"},
    {"announce", session_announce, METH_O, "announce(units): these are the next uses, in order."},
    {"idle_history", session_idle_history, METH_VARARGS,
     "idle_history(step, group, lr, beta1, beta2, eps, weight_decay, average_rest=0): those of an "
     "earlier step"},
    {"idle_owed", session_idle_owed, METH_O,
     "idle_owed(units): the most updates that one of them owes, which had no gradients."},
    {"idle_settle", session_idle_settle, METH_NOARGS, "Make all updates that units owe."},
    {"abort", session_abort, METH_NOARGS, "Discard the open step."},
    {"commit_hold", session_commit_hold, METH_NOARGS,
     "Wait until no commit is in progress, and prevent new ones."},
    {"commit_release", session_commit_release, METH_NOARGS, "Allow commits again. Any thread."},
    {"await_steps", session_await_steps, METH_NOARGS,
     "Wait until all updates of closed steps are made, and commits that are due."},
    {"flush", session_flush, METH_O, "flush(commit)"},
    {"read", session_read, METH_VARARGS,
     "read(param, first byte, bytes, pointer): copy a parameter's newest bytes from main memory."},
    {"pause", session_pause, METH_VARARGS, "pause(units, commit): hand the store to the caller."},
    {"param_steps", session_param_steps, METH_O, "param_steps(clear)"},
    {"resume", session_resume, METH_O, "resume(changed_units)"},
    {"stats", session_stats, METH_NOARGS, "The last finished step, or None."},
    {"trace", session_trace, METH_NOARGS,
     "The events: (kind, unit, lane, step, start, end, bytes)."},
    {"status", session_status, METH_NOARGS, "The engine's state: what is open, pinned and held."},
    {"check", session_check, METH_NOARGS, "Raise the first error, if there is one."},
    {"is_forked", session_is_forked, METH_NOARGS,
     "Whether this process is a forked child of the one that made the engine."},
    {NULL, NULL, 0, NULL},
};
