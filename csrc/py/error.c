/* The core's errors as Python exceptions: the raiser (python/lohan/errors.py) knows the classes. */
#include <stdarg.h>
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

PyObject *lhpy_raise(PyObject *raiser, int code, const char *format, ...)
{
    char message[256];
    va_list arguments;
    va_start(arguments, format);
    PyOS_vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return exception_raise(raiser, code, message, true);
}

PyObject *lhpy_raise_error(PyObject *raiser, const struct lh_error *err)
{
    return exception_raise(raiser, err->code, err->message, false);
}

PyObject *lhpy_raise_builtin(const struct lh_error *err)
{
    PyObject *kind = PyExc_OSError;
    if (err->code == -EINVAL)
        kind = PyExc_ValueError;
    else if (err->code == -ENOMEM || err->code == -ENOSPC)
        kind = PyExc_MemoryError;
    PyErr_SetString(kind, err->message);
    return NULL;
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
    lhpy_raise(self->raiser, -ECANCELED, "%s",
               self->io ? "the model was wrapped in another process: wrap it after the fork"
                        : "the session is closed");
    return -1;
}

struct lhpy_engine *lhpy_engine_open(PyObject *object)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    return lhpy_check_open(self) < 0 ? NULL : self;
}

int lhpy_index_check(const char *what, uint32_t index, uint32_t count)
{
    if (index < count)
        return 0;
    PyErr_Format(PyExc_IndexError, "%s %u is out of range: there are %u %ss", what, index, count,
                 what);
    return -1;
}

int lhpy_index_read(PyObject *number, const char *what, uint32_t count, uint32_t *index_out)
{
    const struct lhpy_field field = LHPY_ARG_AS(what, *index_out, .max = 0);
    return lhpy_value_read(number, &field) < 0 ? -1 : lhpy_index_check(what, *index_out, count);
}

int lhpy_indices_read(PyObject *numbers, const char *what, uint32_t count, uint32_t **indices_out,
                      uint32_t *index_count_out)
{
    const struct lhpy_table table = LHPY_TABLE_OF(what, uint32_t);
    int rc = lhpy_rows_read(numbers, &table, indices_out, index_count_out);
    for (uint32_t i = 0; rc == 0 && i < *index_count_out; i++)
        rc = lhpy_index_check(what, (*indices_out)[i], count);
    if (rc < 0) {
        PyMem_Free(*indices_out);
        *indices_out = NULL;
    }
    return rc;
}
