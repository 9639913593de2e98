/* lohan._core.zeroth_step(): csrc/plan/zeroth.h from plain integers. Thread: with the GIL. */
#include "plan/zeroth.h"

#include "py/lhpy.h"

static const struct lhpy_table block_table =
    LHPY_TABLE_PLAIN("a block", LHPY_FORM_TUPLE, struct lh_plan_zeroth_block, upload_ns, compute_ns,
                     update_ns, offload_ns, alloc_ns);

static PyObject *step_dict(const struct lh_plan_zeroth_step *step)
{
    static const char *const names[LH_PLAN_ZEROTH_STREAM_COUNT] = {"upload", "compute", "offload"};
    return Py_BuildValue("{s:K,s:{s:K,s:K,s:K},s:K,s:s}", "step_ns", step->step_ns, "busy_ns",
                         names[0], step->busy_ns[0], names[1], step->busy_ns[1], names[2],
                         step->busy_ns[2], "alloc_ns", step->alloc_ns, "bound_by",
                         names[step->bound_by]);
}

static PyObject *step_make(const struct lh_plan_zeroth *zeroth)
{
    struct lh_error err = {0};
    if (zeroth->block_count > LH_PLAN_ZEROTH_BLOCK_COUNT_MAX)
        return PyErr_Format(PyExc_ValueError, "%u blocks: at most %d", zeroth->block_count,
                            LH_PLAN_ZEROTH_BLOCK_COUNT_MAX);
    if (lh_plan_zeroth_check(zeroth, &err) < 0)
        return lhpy_raise_builtin(&err);
    struct lh_plan_zeroth_step step = lh_plan_zeroth_step(zeroth);
    return step_dict(&step);
}

static PyObject *zeroth_step(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    struct lh_plan_zeroth zeroth = {.has_overlap = true, .has_reuse = true, .has_deferral = true};
    if (LHPY_ARGS(args, kwargs,
                  LHPY_ARG_ROWS("blocks", zeroth.blocks, zeroth.block_count, block_table),
                  LHPY_ARG_AS("slot_count", zeroth.slot_count),
                  LHPY_ARG_AS("embedding_ns", zeroth.embedding_ns),
                  LHPY_ARG_AS("head_ns", zeroth.head_ns),
                  LHPY_ARG_AS("has_overlap", zeroth.has_overlap, .is_optional = true),
                  LHPY_ARG_AS("has_reuse", zeroth.has_reuse, .is_optional = true),
                  LHPY_ARG_AS("has_deferral", zeroth.has_deferral, .is_optional = true),
                  LHPY_ARG_AS("looks_ahead", zeroth.looks_ahead, .is_optional = true)) < 0)
        return NULL;
    PyObject *made = step_make(&zeroth);
    lhpy_free(&block_table, zeroth.blocks, zeroth.block_count);
    return made;
}

PyMethodDef lhpy_zeroth_functions[] = {
    {"zeroth_step", LHPY_KEYWORDS(zeroth_step),
     "zeroth_step(blocks, slot_count, embedding_ns, head_ns, has_overlap=True, has_reuse=True,"
     " has_deferral=True, looks_ahead=False) -> dict"},
    {NULL, NULL, 0, NULL},
};
