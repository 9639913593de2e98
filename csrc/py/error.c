/* The core's errors as Python exceptions: the raiser (python/lohan/errors.py) knows the classes. */
#include <string.h>

#include "py/lhpy.h"

PyObject *lhpy_text(const char *message)
{
    return PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
}

/*
 * is_rule: a rule of the binding was broken, and code names the rule. Otherwise code is an errno,
 * with the system's meaning of that number.
 */
static PyObject *exception_raise(PyObject *raiser, int code, const char *message, bool is_rule)
{
    if (!raiser || raiser == Py_None) {
        PyErr_Format(PyExc_OSError, "[errno %d] %s", -code, message);
        return NULL;
    }
    PyObject *text = lhpy_text(message);
    if (!text)
        return NULL;
    PyObject *exception =
        PyObject_CallFunction(raiser, "iNO", code, text, is_rule ? Py_True : Py_False);
    if (exception)
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_XDECREF(exception);
    return NULL;
}

PyObject *lhpy_raise(PyObject *raiser, int code, const char *message)
{
    return exception_raise(raiser, code, message, true);
}

PyObject *lhpy_raise_error(PyObject *raiser, const struct lh_error *err)
{
    return exception_raise(raiser, err->code, err->message, false);
}

PyObject *lhpy_raise_engine(struct lhpy_engine *self)
{
    struct lh_error err = {.code = -ECANCELED, .message = "the session is closed"};
    if (self->core && self->core->engine)
        (void)lh_engine_error(self->core->engine, &err);
    return lhpy_raise_error(self->raiser, &err);
}

bool lhpy_is_open(const struct lhpy_engine *self)
{
    return self->io && !lhpy_core_is_forked(self->core);
}

int lhpy_check_open(struct lhpy_engine *self)
{
    if (lhpy_is_open(self))
        return 0;
    lhpy_raise(self->raiser, -ECANCELED,
               self->io ? "the model was wrapped in another process: wrap it after the fork"
                        : "the session is closed");
    return -1;
}
