/* lohan._core: slots, types, method table. The work is in the other files of this folder. */
#include <stdlib.h>

#include "base/cpu.h"
#include "py/lhpy.h"

static int type_add(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int rc = type ? PyModule_AddObjectRef(module, name, type) : -1;
    Py_XDECREF(type);
    return rc;
}

static int module_exec(PyObject *module)
{
    static PyMethodDef *const functions[] = {lhpy_store_functions,    lhpy_adam_functions,
                                             lhpy_doctor_functions,   lhpy_plan_functions,
                                             lhpy_zo_functions,       lhpy_in_place_functions,
                                             lhpy_sequence_functions, lhpy_sums_functions};
    static const struct {
        const char *name;
        long value;
    } constants[] = {
        {"ELEMENT_ALIGN", LH_ENGINE_ELEMENT_ALIGN},
        {"SCALED_ALIGN", LH_ENGINE_SCALED_ALIGN},
        {"SCALES_ELEMENTS", LH_ADAM_SCALES_ELEMENTS},
        {"PARAM_ALIGN", LH_ENGINE_PARAM_ALIGN},
        {"BLOCK_BYTES", LH_BLOCK_BYTES},
        {"CHECKSUM_BYTES", LH_CHECKSUM_BYTES},
        {"IN_PLACE_ALIGN", LH_IN_PLACE_ALIGN},
        {"IN_PLACE_FILE_COUNT_MAX", LHPY_IN_PLACE_FILE_COUNT_MAX},
        {"TRACE_COUNT_MAX", LH_ENGINE_TRACE_COUNT_MAX},
    };
    const char *invalid_cap = lh_cpu_invalid_cap();
    if (invalid_cap) {
        PyErr_Format(PyExc_ImportError, "LOHAN_MAX_CPU_ISA=%s: must be " LH_CPU_ISA_NAMES,
                     invalid_cap);
        return -1;
    }
    lhpy_engine_methods_join();
    if (type_add(module, &lhpy_engine_spec, "Engine") < 0 ||
        type_add(module, &lhpy_store_spec, "Store") < 0 ||
        type_add(module, &lhpy_handle_spec, "Handle") < 0 ||
        type_add(module, &lhpy_scope_spec, "Scope") < 0 ||
        type_add(module, &lhpy_context_spec, "Context") < 0)
        return -1;
    for (size_t i = 0; i < LH_COUNT_OF(constants); i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            return -1;
    for (size_t i = 0; i < LH_COUNT_OF(functions); i++)
        if (PyModule_AddFunctions(module, functions[i]) < 0)
            return -1;
    return 0;
}

static PyObject *scalar_overhead(PyObject *Py_UNUSED(module), PyObject *number)
{
    uint32_t param_count = 0;
    if (LHPY_VALUE(number, param_count) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(lh_scalars_overhead_bytes(param_count));
}

static const struct lhpy_table step_table = LHPY_TABLE_OF("a count of updates", uint64_t);

static PyObject *scalars_make(PyObject *Py_UNUSED(module), PyObject *args)
{
    uint64_t *steps = NULL;
    uint32_t count = 0;
    struct lhpy_bytes caller = {0};
    if (LHPY_ARGS(args, NULL, LHPY_ARG_ROWS("param_steps", steps, count, step_table),
                  LHPY_ARG(caller)) < 0)
        return NULL;
    PyObject *made = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(lh_scalars_overhead_bytes(count) + caller.bytes));
    if (made)
        lh_scalars_make(steps, count, caller.data, caller.bytes, PyBytes_AsString(made));
    PyMem_Free(steps);
    return made;
}

#if defined(__GLIBC__)
/* Runs after the interpreter has ended. With glibc, exit() in a handler replaces the status. */
static void exit_as_failed(int status, void *Py_UNUSED(context))
{
    if (status == EXIT_SUCCESS)
        exit(EXIT_FAILURE);
}
#endif

/*
 * Let the process, which is ending, do so with status 1 instead of 0: what Python runs at exit
 * cannot change the status. Returns whether it will; without glibc it will not.
 */
static PyObject *exit_fails(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
#if defined(__GLIBC__)
    return PyBool_FromLong(on_exit(exit_as_failed, NULL) == 0);
#else
    Py_RETURN_FALSE;
#endif
}

static PyMethodDef module_methods[] = {
    {"budget", lhpy_budget, METH_VARARGS,
     "budget(units, host_bytes, bookkeeping, is_waiting, waits_in_memory, is_summed,"
     " block_bytes, waits_at_will, raiser) -> dict"},
    {"simulate", LHPY_KEYWORDS(lhpy_simulate), "A step in virtual time."},
    {"exit_fails", exit_fails, METH_NOARGS, "End with status 1 instead of 0."},
    {"scalar_overhead_bytes", scalar_overhead, METH_O, "scalar_overhead_bytes(param_count)"},
    {"scalars_make", scalars_make, METH_VARARGS,
     "scalars_make(updates of each parameter, the caller's part) -> bytes"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "lohan._core",
    .m_doc = "lohan's engine, store and kernels.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
