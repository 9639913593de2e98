/*
 * Context(enter, leave, is_atomic=False): a context manager that a Ctrl-C cannot leave half-way.
 *
 * [Note: Interrupted contexts] Python calls signal handlers when a function written in Python
 * begins, and after each call. A KeyboardInterrupt may therefore appear inside contextlib just
 * after the code of a @contextmanager has set something up, so that the `with` block is not
 * entered, or just before that code would undo it at the end of the block. What was set up then
 * lasts as long as the traceback does: during an `except KeyboardInterrupt:`, and in a notebook
 * until the next error. For a paused engine this is a deadlock.
 *
 * Here, both ends are C, in which no handler is called. leave() is a function of Python and may be
 * interrupted itself, even before its first line, so it is called again until it has run without.
 * It must therefore be idempotent, and must also undo an enter() that was interrupted half-way or
 * before its begin. With is_atomic, both are functions in C that are never interrupted half-way,
 * such as those of a lock, and leave() follows only an enter() that succeeded.
 *
 * `with lock:` alone would not do: up to Python 3.13 one instruction calls __enter__() and begins
 * the block, but Python 3.14 may raise KeyboardInterrupt between the two: the lock stays locked.
 */
#include "base/assert.h"
#include "py/lhpy.h"

/* A leave() that raises KeyboardInterrupt more often than this does so by itself. */
#define LEAVE_COUNT_MAX 64

struct context {
    PyObject_HEAD PyObject *enter; /* owned, as the next */
    PyObject *leave;
    bool is_atomic;
    bool is_entered;
};

static int context_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct context *self = (struct context *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->enter);
    Py_VISIT(self->leave);
    return 0;
}

static int context_clear(PyObject *object)
{
    struct context *self = (struct context *)object;
    Py_CLEAR(self->enter);
    Py_CLEAR(self->leave);
    return 0;
}

/* Call leave() until no Ctrl-C interrupts it; one that did is raised afterwards. */
static int left(struct context *self)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    int rc = -1;
    LH_ASSERT(self->is_entered);
    self->is_entered = false;
    for (uint32_t count = 0; count < LEAVE_COUNT_MAX; count++) {
        PyObject *answer = PyObject_CallNoArgs(self->leave);
        rc = answer ? 0 : -1;
        Py_XDECREF(answer);
        if (rc == 0 || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
            break;
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        PyErr_Fetch(&type, &value, &traceback);
    }
    if (type && !PyErr_Occurred()) {
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return rc;
}

/* Undo what is still set up, without a change of the current exception. */
static void context_end(struct context *self)
{
    PyObject *type, *value, *traceback;
    if (!self->is_entered || !self->leave)
        return;
    PyErr_Fetch(&type, &value, &traceback);
    if (left(self) < 0)
        PyErr_WriteUnraisable(self->leave);
    PyErr_Restore(type, value, traceback);
}

/* ExitStack, and Python 3.14 after __enter__(), may drop a context that they were to leave. */
static void context_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    context_end((struct context *)object);
    (void)context_clear(object);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *enter, *leave;
    bool is_atomic = false;
    if (LHPY_ARGS(args, kwargs, LHPY_ARG(enter), LHPY_ARG(leave),
                  LHPY_ARG(is_atomic, .is_optional = true)) < 0)
        return NULL;
    struct context *self = lhpy_type_new((PyObject *)type);
    if (!self)
        return NULL;
    self->enter = Py_NewRef(enter);
    self->leave = Py_NewRef(leave);
    self->is_atomic = is_atomic;
    return (PyObject *)self;
}

static PyObject *context_enter(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct context *self = (struct context *)object;
    if (self->is_entered) {
        PyErr_SetString(PyExc_RuntimeError, "a Context is entered again before it was left");
        return NULL;
    }
    self->is_entered = !self->is_atomic;
    PyObject *answer = PyObject_CallNoArgs(self->enter);
    if (answer)
        self->is_entered = true;
    else
        context_end(self);
    return answer;
}

static PyObject *context_exit(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct context *self = (struct context *)object;
    if (self->is_entered && left(self) < 0)
        return NULL;
    Py_RETURN_FALSE;
}

static PyMethodDef context_methods[] = {
    {"__enter__", context_enter, METH_NOARGS, "Call enter() and return its result."},
    {"__exit__", context_exit, METH_VARARGS, "Call leave()."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot context_slots[] = {
    {Py_tp_new, context_new},
    {Py_tp_dealloc, context_dealloc},
    {Py_tp_traverse, context_traverse},
    {Py_tp_clear, context_clear},
    {Py_tp_methods, context_methods},
    {Py_tp_doc,
     "Context(enter, leave, is_atomic=False): a context manager that a Ctrl-C cannot leave "
     "half-way."},
    {0, NULL},
};

PyType_Spec lhpy_context_spec = {
    .name = "lohan._core.Context",
    .basicsize = sizeof(struct context),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = context_slots,
};
