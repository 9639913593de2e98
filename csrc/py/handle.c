/*
 * What autograd keeps in place of a saved tensor: a handle, or the tensor itself.
 *
 * pack is called for every tensor that an operation saves. One that lies in a bound unit becomes a
 * handle (parameter, sizes, strides, offset): autograd then holds no lend, and the unit may leave
 * memory until backward. Under autocast the cast of a bound parameter becomes a handle that casts
 * again. Anything else is an activation and stays, without its history. unpack makes the unit
 * resident and lends that view of it.
 *
 * With hooks torch does not check whether an activation was changed in place since it was saved, so
 * its version is saved with it and compared. For version 0, the usual one, the tensor alone is
 * kept; for other versions a tuple (tensor, version).
 */
#include <string.h>

#include "base/assert.h"
#include "py/lhpy.h"

struct handle {
    PyObject_HEAD PyObject *engine; /* owned: struct lhpy_engine */
    struct lhpy_core *core;         /* retained */
    uint32_t unit;
    uint32_t param;
    uint32_t epoch;
    int32_t ndim;
    uint64_t byte_offset;           /* the view's offset in the parameter, or in its cast */
    struct lhpy_dl_type cast_dtype; /* bits 0: no cast */
    int64_t *shape_strides;         /* points to `numbers` if they fit, else allocated */
    int64_t numbers[8];
};

static void handle_dealloc(PyObject *object)
{
    struct handle *handle = (struct handle *)object;
    struct lhpy_engine *self = (struct lhpy_engine *)handle->engine;
    if (handle->core && !lhpy_core_is_forked(handle->core)) {
        lh_engine_handle_drop(handle->core->engine, handle->unit);
        bool is_last = lh_engine_handle_count(handle->core->engine, handle->unit) == 0;
        if (is_last && self->unit_states && self->unit_states[handle->unit].is_used_backward)
            lhpy_engine_unuse_backward(self, handle->unit);
        lhpy_core_release(handle->core);
    }
    if (handle->shape_strides != handle->numbers)
        PyMem_Free(handle->shape_strides);
    Py_XDECREF(handle->engine);
    lhpy_type_free(object);
}

static PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_doc, "A saved parameter: where it is, not what it is."},
    {0, NULL},
};

PyType_Spec lhpy_handle_spec = {
    .name = "lohan._core.Handle",
    .basicsize = sizeof(struct handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = handle_slots,
};

static PyObject *handle_new(struct lhpy_engine *self, uint32_t param, uint64_t byte_offset,
                            const struct lhpy_dl_tensor *tensor, struct lhpy_dl_type cast_dtype)
{
    struct handle *handle = lhpy_type_new(self->handle_type);
    if (!handle)
        return NULL;
    size_t numbers = 2 * (size_t)tensor->ndim;
    handle->shape_strides = handle->numbers;
    if (numbers > LH_COUNT_OF(handle->numbers))
        handle->shape_strides = PyMem_Malloc(numbers * sizeof(int64_t));
    if (!handle->shape_strides) {
        handle->shape_strides = handle->numbers;
        Py_DECREF(handle);
        return PyErr_NoMemory();
    }
    memcpy(handle->shape_strides, tensor->shape, (size_t)tensor->ndim * sizeof(int64_t));
    memcpy(handle->shape_strides + tensor->ndim, tensor->strides,
           (size_t)tensor->ndim * sizeof(int64_t));
    handle->engine = Py_NewRef((PyObject *)self);
    handle->unit = self->engine_params[param].unit;
    handle->param = param;
    handle->epoch = self->unit_states[handle->unit].epoch;
    handle->ndim = tensor->ndim;
    handle->byte_offset = byte_offset;
    handle->cast_dtype = cast_dtype;
    lhpy_core_retain(self->core);
    handle->core = self->core;
    lh_engine_handle_add(self->core->engine, handle->unit);
    return (PyObject *)handle;
}

/* The last parameter of a bound unit that begins at or before the byte at offset. */
static uint32_t param_find(const struct lhpy_engine *self, uint32_t unit, uint64_t offset)
{
    uint32_t low = self->units[unit].param_first;
    uint32_t high = low + self->units[unit].param_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (self->params[middle].byte_offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int hollow_refuse(struct lhpy_engine *self, const struct lhpy_dl_tensor *tensor)
{
    enum lh_dtype dtype = lhpy_dtype(tensor->dtype);
    uint64_t offset = (uint64_t)(uintptr_t)tensor->data - self->hollow_base[dtype];
    if (self->hollow_bytes[dtype] == 0 || offset >= self->hollow_bytes[dtype])
        return 0;
    lhpy_raise(self->raiser, -ENXIO,
               "param %u was read outside the forward of the module that owns it, while it was not"
               " resident",
               (unsigned)(offset / ((uint64_t)tensor->dtype.bits / 8)));
    return -1;
}

/*
 * Keep an activation without its history. Otherwise, an operation that saves its own output would
 * own the output, which owns the operation: a cycle that nothing frees if the graph is never run
 * backward. autograd restores the history when it unpacks.
 */
static PyObject *activation_detach(PyObject *tensor)
{
    static PyObject *is_leaf, *detach; /* never freed */
    if (!is_leaf)
        is_leaf = PyUnicode_InternFromString("is_leaf");
    if (!detach)
        detach = PyUnicode_InternFromString("detach");
    PyObject *flag = is_leaf && detach ? PyObject_GetAttr(tensor, is_leaf) : NULL;
    if (!flag)
        return NULL;
    Py_DECREF(flag);
    if (flag == Py_True)
        return Py_NewRef(tensor);
    return PyObject_CallMethodObjArgs(tensor, detach, NULL);
}

static PyObject *activation_keep(PyObject *tensor)
{
    PyObject *kept = activation_detach(tensor);
    long version = kept ? lhpy_tensor_version(kept) : -1;
    if (version == 0 || !kept)
        return kept;
    if (version < 0)
        PyErr_Clear(); /* a tensor created under inference_mode has no version */
    return Py_BuildValue("(Nl)", kept, version);
}

static PyObject *activation_unpack(PyObject *packed)
{
    bool is_pair = PyTuple_Check(packed);
    PyObject *tensor = is_pair ? PyTuple_GetItem(packed, 0) : packed;
    long expected = is_pair ? PyLong_AsLong(PyTuple_GetItem(packed, 1)) : 0;
    long version = expected < 0 ? expected : lhpy_tensor_version(tensor);
    if (version == expected)
        return Py_NewRef(tensor);
    PyObject *shape = PyErr_Occurred() ? NULL : PyObject_GetAttrString(tensor, "shape");
    if (!shape)
        return NULL;
    PyErr_Format(PyExc_RuntimeError,
                 "one of the variables needed for gradient computation has been modified by an"
                 " inplace operation: a tensor of %S, saved by an operation of the forward, is at"
                 " version %ld; expected version %ld instead. Change a clone() of it",
                 shape, version, expected);
    Py_DECREF(shape);
    return NULL;
}

static PyObject *handle_pack(PyObject *object, PyObject *tensor)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    struct lhpy_dl_tensor view;
    if (!lhpy_is_open(self) || lhpy_tensor_read(tensor, &view) < 0) {
        /* A tensor that DLPack cannot describe is not one of lohan's. */
        PyErr_Clear();
        return activation_keep(tensor);
    }
    if (view.device_type != self->core->device_type || !view.data)
        return activation_keep(tensor);
    for (uint32_t i = 0; i < self->bound_unit_count; i++) {
        uint32_t unit = self->bound_units[i];
        const uint8_t *base = lh_engine_address(self->core->engine, unit);
        uint64_t offset = (uint64_t)((const uint8_t *)view.data - base);
        if ((const uint8_t *)view.data < base || offset >= self->units[unit].bytes)
            continue;
        uint32_t param = param_find(self, unit, offset);
        if (memcmp(&view.dtype, &self->params[param].dtype, sizeof(view.dtype)) != 0)
            return activation_keep(tensor); /* a reinterpreted view: its storage pins the unit */
        return handle_new(self, param, offset - self->params[param].byte_offset, &view,
                          (struct lhpy_dl_type){0});
    }
    if (hollow_refuse(self, &view) < 0)
        return NULL;
    uint64_t offset;
    uint32_t param = lhpy_cast_find(self, tensor, &view, &offset);
    if (param < self->param_count)
        return handle_new(self, param, offset, &view, self->autocast_dtype);
    return activation_keep(tensor);
}

static const struct lhpy_table number_table = LHPY_TABLE_OF("a number", int64_t);

/* Lend the whole parameter, cast it, and view it with the handle's sizes and strides. */
static PyObject *cast_unpack(struct lhpy_engine *self, const struct handle *handle)
{
    const struct lhpy_param *param = &self->params[handle->param];
    PyObject *whole = lhpy_lend(self->core, handle->unit, param->byte_offset, param->ndim,
                                param->shape, param->dtype);
    const char *method = lhpy_dtype(handle->cast_dtype) == LH_DTYPE_F16 ? "half" : "bfloat16";
    PyObject *cast = whole ? PyObject_CallMethod(whole, method, NULL) : NULL;
    Py_XDECREF(whole);
    if (!cast)
        return NULL;
    uint32_t ndim = (uint32_t)handle->ndim;
    PyObject *size = lhpy_list(&number_table, handle->shape_strides, ndim);
    PyObject *stride = size ? lhpy_list(&number_table, handle->shape_strides + ndim, ndim) : NULL;
    long long offset = (long long)(handle->byte_offset / (handle->cast_dtype.bits / 8));
    PyObject *view =
        stride ? PyObject_CallMethod(cast, "as_strided", "OOL", size, stride, offset) : NULL;
    Py_XDECREF(size);
    Py_XDECREF(stride);
    Py_DECREF(cast);
    return view;
}

static PyObject *handle_unpack(PyObject *object, PyObject *packed)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    if (self->unscoped_unit_count > 0 && lhpy_is_open(self))
        lhpy_engine_unscoped_release(self);
    if ((PyObject *)Py_TYPE(packed) != self->handle_type)
        return activation_unpack(packed);
    const struct handle *handle = (const struct handle *)packed;
    if (lhpy_check_open(self) < 0)
        return NULL;
    struct lhpy_unit *unit = &self->unit_states[handle->unit];
    if (handle->epoch != unit->epoch) {
        return lhpy_raise(self->raiser, -ESTALE,
                          "param %u was changed (by step(), load_state_dict() or a write) after"
                          " this graph saved it: a backward through it would use values that are"
                          " gone",
                          handle->param);
    }
    if (lhpy_engine_use_backward(self, handle->unit) < 0)
        return NULL;
    if (handle->cast_dtype.bits > 0)
        return cast_unpack(self, handle);
    return lhpy_lend(self->core, handle->unit,
                     self->params[handle->param].byte_offset + handle->byte_offset, handle->ndim,
                     handle->shape_strides, self->params[handle->param].dtype);
}

PyMethodDef lhpy_handle_methods[] = {
    {"pack", handle_pack, METH_O, "Saved-tensor hook."},
    {"unpack", handle_unpack, METH_O, "Saved-tensor hook."},
    {NULL, NULL, 0, NULL},
};
