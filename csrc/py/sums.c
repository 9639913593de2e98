/*
 * Gradients that are summed over several backwards, and reach the engine as one.
 *
 * They are added in the order in which they come, or in that of a tree ([Note: Trees of sums] in
 * compute/sum_tree.h), whose partial sums have places in further blocks of memory like the first.
 *
 * Each parameter has a place in one block of memory, in fp32 whatever the gradients' dtype is. Its
 * first gradient of a step is copied there, later ones are added in their hooks, so autograd's
 * tensors are freed at once. The engine does not see the gradients until the step is closed (or its
 * norm is requested): forwards and backwards in between are ordinary uses.
 *
 * A parameter whose states another process has (sched/given.c) has no sum here. Its place, in the
 * parameter's dtype, is for the new values that the other process sends.
 */
#include <string.h>

#include "compute/sum.h"
#include "compute/sum_tree.h"
#include "py/lhpy.h"

enum sum_state {
    SUM_STATE_NONE = 0,
    SUM_STATE_SUMMED,
    SUM_STATE_GIVEN, /* the engine reads the sum, until the step is over */
};

/* Whether another process has the sums and the states of a trained unit. */
static bool is_given(const struct lh_engine_unit *unit)
{
    return unit->is_given || unit->elements == 0;
}

static enum lh_dtype place_dtype(const struct lh_engine_unit *unit)
{
    return is_given(unit) ? unit->dtype : LH_DTYPE_F32;
}

/* The size of a unit's place, which is whole cache lines. */
static uint64_t place_bytes(const struct lh_engine_unit *unit)
{
    return unit->elements > 0 ? unit->elements * lh_dtype_bytes(place_dtype(unit)) : 0;
}

/* The size of a block with one place for each parameter. */
static uint64_t block_bytes(const struct lhpy_engine *self)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < self->unit_count; i++)
        bytes += place_bytes(&self->units[i]);
    return bytes;
}

uint64_t lhpy_sums_bytes(const struct lhpy_engine *self)
{
    return block_bytes(self) * lh_sum_tree_places(self->sum_leaf_count);
}

void lhpy_sums_place(struct lhpy_engine *self, uint8_t *memory)
{
    self->sum_stride = block_bytes(self) / sizeof(float);
    for (uint32_t i = 0; i < self->unit_count; i++) {
        const struct lh_engine_unit *unit = &self->units[i];
        for (uint32_t j = 0; unit->elements > 0 && j < unit->param_count; j++) {
            uint32_t index = unit->param_first + j;
            uint64_t first = self->engine_params[index].first;
            self->params[index].place = memory + first * lh_dtype_bytes(place_dtype(unit));
        }
        memory += place_bytes(unit);
    }
    self->has_sums = true;
}

static float *sum_of(const struct lhpy_param *param)
{
    return (float *)(void *)param->place;
}

/*
 * [Note: Second gradients] After a backward p.grad is a stand-in (session/_gradients.py in the
 * Python package), to which autograd adds the next gradient; the stand-in keeps it for lohan.
 * Within a backward there is no stand-in yet: a hook that runs the model, with a backward of its
 * own (a cached contrastive loss), brings several gradients of a parameter in one backward.
 */
PyObject *lhpy_sums_unwrap(struct lhpy_engine *self, uint32_t index, PyObject *gradient)
{
    struct lhpy_param *param = &self->params[index];
    bool is_same_backward = param->sum_backward == self->backward_number;
    param->sum_backward = self->backward_number;
    PyObject *take = PyObject_GetAttrString(gradient, "take_added");
    if (take) {
        PyObject *added = PyObject_CallNoArgs(take);
        Py_DECREF(take);
        return added;
    }
    PyErr_Clear();
    if (param->sum_state == SUM_STATE_NONE || is_same_backward)
        return Py_NewRef(gradient);
    return lhpy_raise(self->raiser, -EINVAL,
                      "p.grad of param %u was removed or replaced between two backwards of one"
                      " step: the first one's gradient is in a sum already."
                      " model.optimizer.zero_grad() forgets the step",
                      index);
}

/* How the next gradient of a parameter is added. */
static struct lh_sum_join next_join(struct lhpy_engine *self, uint32_t index)
{
    if (!self->sum_trees)
        return lh_sum_join_one(self->params[index].sum_state == SUM_STATE_NONE);
    bool is_last = self->sum_leaf + 1 == self->sum_leaf_count;
    return lh_sum_tree_add(&self->sum_trees[index], self->sum_leaf, is_last, self->sum_stride);
}

void lhpy_sums_add(struct lhpy_engine *self, uint32_t index, const struct lhpy_dl_tensor *view)
{
    struct lhpy_param *param = &self->params[index];
    enum lh_dtype dtype = lhpy_dtype(view->dtype);
    uint64_t count = self->engine_params[index].count;
    struct lh_sum_join join = next_join(self, index);
    Py_BEGIN_ALLOW_THREADS
    lh_sum_join(sum_of(param), &join, view->data, dtype, count);
    Py_END_ALLOW_THREADS
    param->sum_state = SUM_STATE_SUMMED;
}

int lhpy_sums_post(struct lhpy_engine *self, uint32_t index, const struct lhpy_dl_tensor *view)
{
    struct lhpy_param *param = &self->params[index];
    struct lh_sum_join join = next_join(self, index);
    int rc = lh_sum_post(self->core->engine, index, view->data, lhpy_dtype(view->dtype),
                         sum_of(param), &join);
    if (rc == 0)
        param->sum_state = SUM_STATE_SUMMED;
    return rc;
}

/* Whether a parameter has a place for a sum, or for given values, and in it a part. */
static bool part_is_there(const struct lhpy_engine *self, uint32_t index, bool given,
                          uint64_t first, uint64_t count)
{
    uint64_t length = self->engine_params[index].count;
    const struct lh_engine_unit *unit = &self->units[self->engine_params[index].unit];
    if (self->params[index].place && is_given(unit) == given && first <= length &&
        count <= length - first)
        return true;
    PyErr_Format(PyExc_ValueError, "param %u has no %s of %llu elements from %llu on", index,
                 given ? "given values" : "sum", (unsigned long long)count,
                 (unsigned long long)first);
    return false;
}

static const struct lhpy_table address_table = LHPY_TABLE_OF("an address", const void *);
static const struct lhpy_table leaf_table = LHPY_TABLE_OF("a micro-batch", uint64_t);

/*
 * sums_add(param, first, count, addresses, dtype, is_first): add a part of gradients to a sum, one
 * gradient after the other.
 *
 * The gradients may be other processes'. Any thread may call this for other elements, or for the
 * same ones one after the other. is_first: no gradient of the step has been added to this part.
 */
static PyObject *sums_add(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0, dtype = 0, gradient_count = 0;
    uint64_t first = 0, count = 0;
    const void **gradients = NULL;
    bool is_first = false;
    if (!self ||
        LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(first), LHPY_ARG(count),
                  LHPY_ARG_ROWS("addresses", gradients, gradient_count, address_table),
                  LHPY_ARG(dtype, .max = LH_DTYPE_F16), LHPY_ARG(is_first)) < 0)
        return NULL;
    bool is_there = lhpy_index_check("param", index, self->param_count) == 0 &&
                    part_is_there(self, index, false, first, count);
    if (is_there && gradient_count > 0) {
        self->params[index].sum_state = SUM_STATE_SUMMED;
        float *sum = sum_of(&self->params[index]) + first;
        Py_BEGIN_ALLOW_THREADS
        lh_sum_add_all(sum, gradients, gradient_count, (enum lh_dtype)dtype, count, is_first);
        Py_END_ALLOW_THREADS
    }
    lhpy_free(&address_table, gradients, gradient_count);
    return is_there ? Py_NewRef(Py_None) : NULL;
}

/* Whether numbers of micro-batches are in ascending order; otherwise with a Python error. */
static bool leaves_ascend(const uint64_t *leaves, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (leaves[i] < LH_SUM_LEAF_END && (i == 0 || leaves[i] > leaves[i - 1]))
            continue;
        PyErr_SetString(PyExc_ValueError, "the numbers of micro-batches do not ascend");
        return false;
    }
    return true;
}

/* Whether nodes of a tree have a number each, in ascending order; otherwise with a Python error. */
static bool are_nodes(uint32_t node_count, const uint64_t *leaves, uint32_t leaf_count)
{
    if (!leaves_ascend(leaves, leaf_count))
        return false;
    if (node_count == leaf_count && node_count > 0)
        return true;
    PyErr_Format(PyExc_ValueError, "%u nodes have %u numbers", node_count, leaf_count);
    return false;
}

/*
 * sums_tree(param, first, count, addresses, leaves, dtype): set a part of a sum to that of nodes of
 * a tree. leaves: for each node, the number of a micro-batch in it, in ascending order.
 *
 * Any thread may call this for other elements, or for the same ones one after the other.
 */
static PyObject *sums_tree(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0, dtype = 0, node_count = 0, leaf_count = 0;
    uint64_t first = 0, count = 0, *leaves = NULL;
    const void **nodes = NULL;
    PyObject *answer = NULL;
    if (!self ||
        LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(first), LHPY_ARG(count),
                  LHPY_ARG_ROWS("addresses", nodes, node_count, address_table),
                  LHPY_ARG_ROWS("leaves", leaves, leaf_count, leaf_table),
                  LHPY_ARG(dtype, .max = LH_DTYPE_F16)) < 0)
        return NULL;
    if (lhpy_index_check("param", index, self->param_count) < 0 ||
        !part_is_there(self, index, false, first, count) ||
        !are_nodes(node_count, leaves, leaf_count))
        goto out;
    self->params[index].sum_state = SUM_STATE_SUMMED;
    float *sum = sum_of(&self->params[index]) + first;
    Py_BEGIN_ALLOW_THREADS
    lh_sum_of_tree(sum, nodes, leaves, node_count, (enum lh_dtype)dtype, count);
    Py_END_ALLOW_THREADS
    answer = Py_NewRef(Py_None);
out:
    lhpy_free(&address_table, nodes, node_count);
    lhpy_free(&leaf_table, leaves, leaf_count);
    return answer;
}

/*
 * given_expect(param): the parameter has a gradient in the open step, and the process that has its
 * states will give its new values.
 */
static PyObject *given_expect(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0;
    if (!self || LHPY_VALUE(number, index) < 0 ||
        lhpy_index_check("param", index, self->param_count) < 0 ||
        !part_is_there(self, index, true, 0, 0))
        return NULL;
    if (self->params[index].sum_state == SUM_STATE_NONE)
        self->params[index].sum_state = SUM_STATE_SUMMED;
    Py_RETURN_NONE;
}

/* given_put(param, first, count, address): copy a part of a parameter's new values. */
static PyObject *given_put(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0;
    uint64_t first = 0, count = 0;
    const void *address = NULL;
    if (!self || LHPY_ARGS(args, NULL, LHPY_ARG_AS("param", index), LHPY_ARG(first),
                           LHPY_ARG(count), LHPY_ARG(address)) < 0)
        return NULL;
    if (lhpy_index_check("param", index, self->param_count) < 0 ||
        !part_is_there(self, index, true, first, count))
        return NULL;
    uint64_t bytes = lh_dtype_bytes(self->units[self->engine_params[index].unit].dtype);
    uint8_t *place = self->params[index].place + first * bytes;
    Py_BEGIN_ALLOW_THREADS
    memcpy(place, address, count * bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* given(unit): after the close of a step, all new values of the unit are there. */
static PyObject *given_unit(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t index = 0;
    if (!self || LHPY_VALUE(number, index) < 0 ||
        lhpy_index_check("unit", index, self->unit_count) < 0)
        return NULL;
    if (!is_given(&self->units[index]) || self->units[index].elements == 0)
        return PyErr_Format(PyExc_ValueError, "this process has the states of unit %u", index);
    lh_given_arrived(self->core->engine, index);
    Py_RETURN_NONE;
}

static PyObject *given_never(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    lh_given_never(self->core->engine);
    Py_RETURN_NONE;
}

/* Add up the partial sums that are left, if a step has fewer micro-batches than it may have. */
static void tree_close(struct lhpy_engine *self, uint32_t index)
{
    struct lh_sum_join join = lh_sum_tree_close(&self->sum_trees[index], self->sum_stride);
    if (join.before == join.merged)
        return;
    Py_BEGIN_ALLOW_THREADS
    lh_sum_join(sum_of(&self->params[index]), &join, NULL, LH_DTYPE_F32,
                self->engine_params[index].count);
    Py_END_ALLOW_THREADS
}

/* sums_leaf(number): the next gradients are those of this micro-batch of the step. */
static PyObject *sums_leaf(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint64_t leaf = 0;
    if (!self || LHPY_VALUE(number, leaf) < 0)
        return NULL;
    if (leaf >= self->sum_leaf_count)
        return PyErr_Format(PyExc_ValueError, "micro-batch %llu of %llu", (unsigned long long)leaf,
                            (unsigned long long)self->sum_leaf_count);
    self->sum_leaf = leaf;
    Py_RETURN_NONE;
}

/* Hand to the engine every sum of the open step that it does not have yet. */
static PyObject *sums_give(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    if (lh_engine_is_reopened(self->core->engine) &&
        lhpy_engine_wait_plain(self, lh_engine_over_wait) < 0)
        return NULL;
    if (self->has_sums && self->core->dev && lhpy_engine_wait_plain(self, lh_sum_wait) < 0)
        return NULL;
    for (uint32_t i = 0; self->has_sums && i < self->param_count; i++) {
        struct lhpy_param *param = &self->params[i];
        if (param->sum_state != SUM_STATE_SUMMED)
            continue;
        if (self->sum_trees)
            tree_close(self, i);
        enum lh_dtype dtype = place_dtype(&self->units[self->engine_params[i].unit]);
        if (lh_engine_gradient(self->core->engine, i, param->place, dtype) < 0)
            return lhpy_raise_engine(self);
        param->sum_state = SUM_STATE_GIVEN;
        self->unit_states[self->engine_params[i].unit].has_gradients = true;
    }
    Py_RETURN_NONE;
}

void lhpy_sums_forget(struct lhpy_engine *self)
{
    for (uint32_t i = 0; i < self->param_count; i++)
        self->params[i].sum_state = SUM_STATE_NONE;
    for (uint32_t i = 0; self->sum_trees && i < self->param_count; i++)
        self->sum_trees[i].depth = 0;
    self->sum_leaf = 0;
}

/* Read places in use, as a list of numbers that partial_add() has returned. */
static bool tree_read(struct lh_sum_tree *tree, const uint64_t *leaves, uint32_t count,
                      uint64_t next, bool is_end)
{
    uint64_t last = count > 0 && count <= LH_SUM_DEPTH_MAX ? leaves[count - 1] : 0;
    bool is_after = is_end ? last < next || count == 0 : last <= next;
    if (count > LH_SUM_DEPTH_MAX || !leaves_ascend(leaves, count) || !is_after ||
        next >= LH_SUM_LEAF_END + is_end) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "%u partial sums before micro-batch %llu", count,
                         (unsigned long long)next);
        return false;
    }
    *tree = (struct lh_sum_tree){.depth = count, .last = last};
    for (uint32_t i = 0; i < count; i++)
        tree->leaves[i] = leaves[i];
    return true;
}

/*
 * partial_add(sums, stride, first, leaves, next, gradient, dtype, count) -> leaves: add a gradient
 * to the partial sums of a tree, which begin at the address sums; or, with the address 0 as the
 * gradient, add up those that are complete because no number below `next` follows.
 *
 * first: the first micro-batch of this process. leaves: the places in use, each by a number in its
 * node; empty at the begin of a step. The last one is the number of the last gradient.
 */
static PyObject *partial_add(PyObject *Py_UNUSED(module), PyObject *args)
{
    float *sums = NULL;
    const void *gradient = NULL;
    uint64_t stride = 0, first = 0, next = 0, count = 0, *leaves = NULL;
    uint32_t leaf_count = 0, dtype = 0;
    struct lh_sum_tree tree;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(sums), LHPY_ARG(stride), LHPY_ARG(first),
                  LHPY_ARG_ROWS("leaves", leaves, leaf_count, leaf_table), LHPY_ARG(next),
                  LHPY_ARG(gradient), LHPY_ARG(dtype, .max = LH_DTYPE_F16), LHPY_ARG(count)) < 0)
        return NULL;
    bool is_right = tree_read(&tree, leaves, leaf_count, next, !gradient);
    lhpy_free(&leaf_table, leaves, leaf_count);
    if (!is_right)
        return NULL;
    tree.first = first;
    struct lh_sum_join join = gradient ? lh_sum_tree_add(&tree, next, false, stride)
                                       : lh_sum_tree_end(&tree, next, stride);
    Py_BEGIN_ALLOW_THREADS
    lh_sum_join(sums, &join, gradient, (enum lh_dtype)dtype, count);
    Py_END_ALLOW_THREADS
    PyObject *list = PyList_New(tree.depth);
    for (uint32_t i = 0; list && i < tree.depth; i++) {
        PyObject *leaf = PyLong_FromUnsignedLongLong(tree.leaves[i]);
        if (!leaf || PyList_SetItem(list, i, leaf) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/*
 * partial_tree(sum, addresses, leaves, count): set the fp32 elements at the address sum to those of
 * nodes of a tree, in fp32, as sums_tree() does. Any thread may call this.
 */
static PyObject *partial_tree(PyObject *Py_UNUSED(module), PyObject *args)
{
    float *sum = NULL;
    const void **nodes = NULL;
    uint64_t count = 0, *leaves = NULL;
    uint32_t node_count = 0, leaf_count = 0;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(sum),
                  LHPY_ARG_ROWS("addresses", nodes, node_count, address_table),
                  LHPY_ARG_ROWS("leaves", leaves, leaf_count, leaf_table), LHPY_ARG(count)) < 0)
        return NULL;
    bool is_right = are_nodes(node_count, leaves, leaf_count);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        lh_sum_of_tree(sum, nodes, leaves, node_count, LH_DTYPE_F32, count);
        Py_END_ALLOW_THREADS
    }
    lhpy_free(&address_table, nodes, node_count);
    lhpy_free(&leaf_table, leaves, leaf_count);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

PyMethodDef lhpy_sums_functions[] = {
    {"partial_add", partial_add, METH_VARARGS,
     "partial_add(sums, stride, first, leaves, next, gradient, dtype, count) -> leaves"},
    {"partial_tree", partial_tree, METH_VARARGS, "partial_tree(sum, addresses, leaves, count)"},
    {NULL, NULL, 0, NULL},
};

PyMethodDef lhpy_sums_methods[] = {
    {"sums_add", sums_add, METH_VARARGS,
     "sums_add(param, first, count, addresses, dtype, is_first): add a part of gradients to a "
     "sum."},
    {"sums_leaf", sums_leaf, METH_O, "sums_leaf(number): that of the next gradients' micro-batch."},
    {"sums_tree", sums_tree, METH_VARARGS,
     "sums_tree(param, first, count, addresses, leaves, dtype): set a part of a sum to that of "
     "nodes of a tree."},
    {"sums_give", sums_give, METH_NOARGS, "Hand the summed gradients to the engine."},
    {"given_expect", given_expect, METH_O, "given_expect(param): its new values will be given."},
    {"given_put", given_put, METH_VARARGS, "given_put(param, first, count, address)"},
    {"given", given_unit, METH_O, "given(unit): all new values of the unit are there."},
    {"given_never", given_never, METH_NOARGS, "The new values will not come: fail."},
    {NULL, NULL, 0, NULL},
};
