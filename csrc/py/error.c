/* The core's errors as Python exceptions: the raiser (python/lohan/errors.py) knows the classes. */
#include "py/lhpy.h"

PyObject *lhpy_raise(PyObject *raiser, int code, const char *message)
{
    if (!raiser || raiser == Py_None) {
        PyErr_Format(PyExc_OSError, "[errno %d] %s", -code, message);
        return NULL;
    }
    PyObject *exception = PyObject_CallFunction(raiser, "is", code, message);
    if (exception)
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_XDECREF(exception);
    return NULL;
}

PyObject *lhpy_raise_error(PyObject *raiser, const struct lh_error *err)
{
    return lhpy_raise(raiser, err->code, err->message);
}

PyObject *lhpy_raise_engine(struct lhpy_engine *self)
{
    struct lh_error err = {.code = -ECANCELED, .message = "the session is closed"};
    if (self->core && self->core->engine)
        (void)lh_engine_error(self->core->engine, &err);
    return lhpy_raise_error(self->raiser, &err);
}

int lhpy_check_open(struct lhpy_engine *self)
{
    if (self->io)
        return 0;
    lhpy_raise(self->raiser, -ECANCELED, "the session is closed");
    return -1;
}
