/* Create an Engine from Python's description of a model (engine_make.c). */
#ifndef LH_PY_ENGINE_MAKE_H
#define LH_PY_ENGINE_MAKE_H

#include "py/lhpy.h"

PyObject *lhpy_engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
/* budget(units, host_bytes, bookkeeping_bytes, raiser) -> dict: the result of lh_budget_make. */
PyObject *lhpy_budget(PyObject *module, PyObject *args);

#endif
