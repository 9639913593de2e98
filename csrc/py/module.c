/* lohan._core: slots, types, method table. The work is in the other files of this folder. */
#include "py/adam.h"
#include "py/engine_make.h"
#include "py/lhpy.h"
#include "py/plan.h"

static int type_add(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int rc = type ? PyModule_AddObjectRef(module, name, type) : -1;
    Py_XDECREF(type);
    return rc;
}

static int module_exec(PyObject *module)
{
    if (type_add(module, &lhpy_engine_spec, "Engine") < 0 ||
        type_add(module, &lhpy_store_spec, "Store") < 0 ||
        type_add(module, &lhpy_handle_spec, "Handle") < 0 ||
        type_add(module, &lhpy_scope_spec, "Scope") < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "ELEMENT_ALIGN", LH_ENGINE_ELEMENT_ALIGN) < 0 ||
        PyModule_AddIntConstant(module, "PARAM_ALIGN", LH_ENGINE_PARAM_ALIGN) < 0 ||
        PyModule_AddIntConstant(module, "BLOCK_BYTES", LH_BLOCK_BYTES) < 0 ||
        PyModule_AddIntConstant(module, "CHECKSUM_BYTES", LH_CHECKSUM_BYTES) < 0 ||
        PyModule_AddIntConstant(module, "IN_PLACE_ALIGN", LH_IN_PLACE_ALIGN) < 0 ||
        PyModule_AddIntConstant(module, "IN_PLACE_FILE_COUNT_MAX", LHPY_IN_PLACE_FILE_COUNT_MAX) <
            0 ||
        PyModule_AddIntConstant(module, "TRACE_COUNT_MAX", LH_ENGINE_TRACE_COUNT_MAX) < 0)
        return -1;
    if (lhpy_adam_register(module) < 0 || lhpy_doctor_register(module) < 0 ||
        lhpy_plan_register(module) < 0 || lhpy_zo_register(module) < 0 ||
        lhpy_zeroth_register(module) < 0)
        return -1;
    return 0;
}

static PyObject *scalar_overhead(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned int param_count = 0;
    if (!PyArg_ParseTuple(args, "I", &param_count))
        return NULL;
    return PyLong_FromUnsignedLongLong(lh_scalars_overhead_bytes(param_count));
}

static PyObject *scalars_make(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *steps = NULL;
    const char *caller = NULL;
    Py_ssize_t caller_bytes = 0;
    if (!PyArg_ParseTuple(args, "Oy#", &steps, &caller, &caller_bytes))
        return NULL;
    Py_ssize_t count = PySequence_Size(steps);
    if (count < 0)
        return NULL;
    uint64_t *param_steps = PyMem_Calloc((size_t)count + 1, sizeof(*param_steps));
    if (!param_steps)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        PyObject *step = PySequence_GetItem(steps, i);
        param_steps[i] = step ? PyLong_AsUnsignedLongLong(step) : 0;
        Py_XDECREF(step);
    }
    PyObject *made = NULL;
    if (!PyErr_Occurred())
        made = PyBytes_FromStringAndSize(
            NULL, (Py_ssize_t)lh_scalars_overhead_bytes((uint32_t)count) + caller_bytes);
    if (made)
        lh_scalars_make(param_steps, (uint32_t)count, caller, (uint64_t)caller_bytes,
                        PyBytes_AsString(made));
    PyMem_Free(param_steps);
    return made;
}

static PyMethodDef module_methods[] = {
    {"store_create", (PyCFunction)(void (*)(void))lhpy_store_create, METH_VARARGS | METH_KEYWORDS,
     "Make a store."},
    {"store_open", (PyCFunction)(void (*)(void))lhpy_store_open, METH_VARARGS | METH_KEYWORDS,
     "Open a store."},
    {"store_measure", lhpy_store_measure, METH_VARARGS,
     "store_measure(raiser, directory, probe_bytes) -> (write, read) bytes/s"},
    {"budget", lhpy_budget, METH_VARARGS,
     "budget(units, host_bytes, bookkeeping, is_waiting, waits_in_memory, is_summed,"
     " block_bytes, waits_at_will, raiser) -> dict"},
    {"simulate", (PyCFunction)(void (*)(void))lhpy_simulate, METH_VARARGS | METH_KEYWORDS,
     "A step in virtual time."},
    {"scalar_overhead_bytes", scalar_overhead, METH_VARARGS, "scalar_overhead_bytes(param_count)"},
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
