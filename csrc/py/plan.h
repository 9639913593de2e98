/*
 * Machines and models of csrc/plan from plain dicts, whose keys python/lohan/planning/_plan.py
 * documents, and lohan._core.plan(), plan_step().
 *
 * Thread: with the GIL.
 */
#ifndef LH_PY_PLAN_H
#define LH_PY_PLAN_H

#include "plan/machine.h"
#include "plan/model.h"
#include "py/lhpy.h"

/* 0, or -1 with a Python error that names the missing key or the value out of range. */
int lhpy_plan_machine_parse(PyObject *dict, struct lh_plan_machine *machine);
/*
 * The same for a model, which the caller then owns: release it with lh_plan_model_deinit() and
 * alloc.
 */
int lhpy_plan_model_parse(PyObject *dict, struct lh_plan_model *model, struct lh_alloc *alloc);
/* Raise ValueError (-EINVAL), MemoryError (-ENOMEM, -ENOSPC) or OSError; returns NULL. */
PyObject *lhpy_plan_raise(const struct lh_error *err);

/* Add plan, plan_step and plan_policies to module. 0, or -1 with a Python error. */
int lhpy_plan_register(PyObject *module);
/* The same for zeroth_step (zeroth.c). */
int lhpy_zeroth_register(PyObject *module);

#endif
