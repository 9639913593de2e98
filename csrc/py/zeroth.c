/* lohan._core.zeroth_step(): csrc/plan/zeroth.h from plain integers. Thread: with the GIL. */
#include "plan/zeroth.h"

#include "base/alloc.h"
#include "py/lhpy.h"
#include "py/plan.h"

/* (upload_ns, compute_ns, update_ns, offload_ns, alloc_ns) */
static int block_parse(PyObject *item, struct lh_plan_zeroth_block *block)
{
    unsigned long long upload_ns, compute_ns, update_ns, offload_ns, alloc_ns;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a block must be a tuple of five times");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "KKKKK", &upload_ns, &compute_ns, &update_ns, &offload_ns,
                          &alloc_ns))
        return -1;
    *block = (struct lh_plan_zeroth_block){.upload_ns = upload_ns,
                                           .compute_ns = compute_ns,
                                           .update_ns = update_ns,
                                           .offload_ns = offload_ns,
                                           .alloc_ns = alloc_ns};
    return 0;
}

static PyObject *step_dict(const struct lh_plan_zeroth_step *step)
{
    static const char *const names[LH_PLAN_ZEROTH_STREAM_COUNT] = {"upload", "compute", "offload"};
    return Py_BuildValue("{s:K,s:{s:K,s:K,s:K},s:K,s:s}", "step_ns", step->step_ns, "busy_ns",
                         names[0], step->busy_ns[0], names[1], step->busy_ns[1], names[2],
                         step->busy_ns[2], "alloc_ns", step->alloc_ns, "bound_by",
                         names[step->bound_by]);
}

static PyObject *step_make(PyObject *list, struct lh_plan_zeroth *zeroth, struct lh_alloc *alloc)
{
    Py_ssize_t count = PyList_Size(list);
    if (count > LH_PLAN_ZEROTH_BLOCK_COUNT_MAX)
        return PyErr_Format(PyExc_ValueError, "%zd blocks: at most %d", count,
                            LH_PLAN_ZEROTH_BLOCK_COUNT_MAX);
    struct lh_plan_zeroth_block *blocks =
        lh_alloc_zeroed(alloc, (size_t)count + 1, sizeof(*blocks));
    if (!blocks)
        return PyErr_NoMemory();
    int rc = 0;
    for (Py_ssize_t i = 0; rc == 0 && i < count; i++)
        rc = block_parse(PyList_GetItem(list, i), &blocks[i]);
    zeroth->blocks = blocks;
    zeroth->block_count = (uint32_t)count;
    PyObject *made = NULL;
    struct lh_error err = {0};
    if (rc == 0 && lh_plan_zeroth_check(zeroth, &err) < 0) {
        (void)lhpy_plan_raise(&err);
    } else if (rc == 0) {
        struct lh_plan_zeroth_step step = lh_plan_zeroth_step(zeroth);
        made = step_dict(&step);
    }
    lh_free(alloc, blocks);
    return made;
}

static PyObject *zeroth_step(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"blocks",    "slot_count",   "embedding_ns", "head_ns", "has_overlap",
                            "has_reuse", "has_deferral", "looks_ahead",  NULL};
    PyObject *list = NULL;
    unsigned int slot_count = 0;
    unsigned long long embedding_ns = 0;
    unsigned long long head_ns = 0;
    int has_overlap = 1;
    int has_reuse = 1;
    int has_deferral = 1;
    int looks_ahead = 0;

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IKK|pppp", names, &PyList_Type, &list,
                                     &slot_count, &embedding_ns, &head_ns, &has_overlap, &has_reuse,
                                     &has_deferral, &looks_ahead))
        return NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_zeroth zeroth = {
        .slot_count = slot_count,
        .embedding_ns = embedding_ns,
        .head_ns = head_ns,
        .has_overlap = has_overlap != 0,
        .has_reuse = has_reuse != 0,
        .has_deferral = has_deferral != 0,
        .looks_ahead = looks_ahead != 0,
    };
    return step_make(list, &zeroth, &alloc);
}

static PyMethodDef methods[] = {
    {"zeroth_step", (PyCFunction)(void (*)(void))zeroth_step, METH_VARARGS | METH_KEYWORDS,
     "zeroth_step(blocks, slot_count, embedding_ns, head_ns, has_overlap=True, has_reuse=True,"
     " has_deferral=True, looks_ahead=False) -> dict"},
    {NULL, NULL, 0, NULL},
};

int lhpy_zeroth_register(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
