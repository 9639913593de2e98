/*
 * csrc/compute for Python's tests, benchmarks and doctor: plain functions over addresses. The
 * engine does not come this way.
 *
 * Thread: with the GIL; it is released while arrays are worked on.
 */
#ifndef LH_PY_ADAM_H
#define LH_PY_ADAM_H

#include "py/lhpy.h"

/*
 * Add adam_kernels, adam_update, adam_split, adam_join, stream_bound and crc32c to module. 0, or -1
 * with a Python error.
 */
int lhpy_adam_register(PyObject *module);
/* Add zo_kernels, zo_apply and zo_lead (zo.c). */
int lhpy_zo_register(PyObject *module);

#endif
