/* Torch tensors through DLPack's C exchange table: inspect them, and lend lohan's memory. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "py/lhpy.h"

static const struct lhpy_dl_exchange *exchange_table;

/* The table lives as long as the process; it is looked up once. */
const struct lhpy_dl_exchange *lhpy_exchange(void)
{
    if (exchange_table)
        return exchange_table;
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *type = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    PyObject *capsule = type ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : NULL;
    const struct lhpy_dl_exchange *table =
        capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    Py_XDECREF(type);
    Py_XDECREF(torch);
    if (!table && torch) {
        PyErr_Clear();
        PyErr_SetString(
            PyExc_ImportError,
            "this torch has no DLPack C exchange table: lohan needs torch 2.11 or later");
    }
    if (table && table->version.major != LHPY_DL_VERSION_MAJOR) {
        PyErr_Format(PyExc_ImportError,
                     "torch uses DLPack %u.%u, lohan %u.%u: install a newer lohan",
                     table->version.major, table->version.minor, LHPY_DL_VERSION_MAJOR,
                     LHPY_DL_VERSION_MINOR);
        return NULL;
    }
    exchange_table = table;
    return table;
}

int lhpy_tensor_read(PyObject *tensor, struct lhpy_dl_tensor *out)
{
    const struct lhpy_dl_exchange *table = lhpy_exchange();
    if (!table)
        return -1;
    if (table->tensor_from_object(tensor, out) != 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "DLPack cannot describe this tensor");
        return -1;
    }
    out->data = (uint8_t *)out->data + out->byte_offset;
    out->byte_offset = 0;
    return 0;
}

int64_t lhpy_tensor_count(const struct lhpy_dl_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

long lhpy_tensor_version(PyObject *tensor)
{
    static PyObject *name; /* never freed */
    if (!name)
        name = PyUnicode_InternFromString("_version");
    PyObject *version = name ? PyObject_GetAttr(tensor, name) : NULL;
    long number = version ? PyLong_AsLong(version) : -1;
    Py_XDECREF(version);
    return number;
}

bool lhpy_tensor_is_contiguous(const struct lhpy_dl_tensor *tensor)
{
    int64_t expected = 1;
    for (int32_t i = tensor->ndim; i-- > 0;) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != expected)
            return false;
        expected *= tensor->shape[i];
    }
    return true;
}

/* Whether the elements fill contiguous memory, in some order of dimensions. */
bool lhpy_tensor_is_dense(const struct lhpy_dl_tensor *tensor)
{
    int64_t count = lhpy_tensor_count(tensor);
    /*
     * Every stride has to be the product of the sizes with smaller strides. Select the dimensions
     * by increasing stride; no sort is needed, because ndim is small.
     */
    int64_t expected = 1;
    while (expected < count) {
        int32_t at = -1;
        for (int32_t i = 0; i < tensor->ndim; i++) {
            if (tensor->shape[i] > 1 && tensor->strides[i] == expected)
                at = i;
        }
        if (at < 0)
            return false;
        expected *= tensor->shape[at];
    }
    return true;
}

enum lh_dtype lhpy_dtype(struct lhpy_dl_type type)
{
    if (type.lanes != 1)
        return LH_DTYPE_BYTES;
    if (type.code == LHPY_DL_CODE_FLOAT && type.bits == 32)
        return LH_DTYPE_F32;
    if (type.code == LHPY_DL_CODE_FLOAT && type.bits == 16)
        return LH_DTYPE_F16;
    if (type.code == LHPY_DL_CODE_BFLOAT && type.bits == 16)
        return LH_DTYPE_BF16;
    return LH_DTYPE_BYTES;
}

/*
 * A lend: the DLPack struct, followed by what its deleter needs. The deleter of a unit's lend
 * removes the pin, that of a saved tensor's lend drops the item.
 */
struct lend {
    struct lhpy_dl_managed managed;
    struct lhpy_core *core;
    void (*release)(struct lh_engine *engine, uint32_t number);
    uint32_t number; /* of the unit, or of the item */
    int64_t shape_strides[];
};

/* Called by torch, on any thread, without the GIL, when the last tensor over the storage dies. */
static void lend_delete(struct lhpy_dl_managed *managed)
{
    struct lend *lend = managed->manager_ctx;
    if (lhpy_core_is_forked(lend->core))
        return;
    lend->release(lend->core->engine, lend->number);
    lhpy_core_release(lend->core);
    free(lend); /* not from the engine's allocator: torch decides how long a lend lives */
}

/* Make a lend without its data. It has a reference to the core. NULL with a Python error. */
static struct lend *lend_new(struct lhpy_core *core, uint32_t number, int32_t ndim,
                             const int64_t *shape_strides)
{
    size_t numbers_bytes = 2 * (size_t)ndim * sizeof(int64_t);
    struct lend *lend = lhpy_exchange() ? malloc(sizeof(*lend) + numbers_bytes) : NULL;
    if (!lend) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        return NULL;
    }
    *lend = (struct lend){.core = core, .number = number};
    memcpy(lend->shape_strides, shape_strides, numbers_bytes);
    lend->managed = (struct lhpy_dl_managed){
        .version = {LHPY_DL_VERSION_MAJOR, LHPY_DL_VERSION_MINOR},
        .manager_ctx = lend,
        .deleter = lend_delete,
        .tensor = {.ndim = ndim,
                   .shape = lend->shape_strides,
                   .strides = lend->shape_strides + ndim},
    };
    lhpy_core_retain(core);
    return lend;
}

/* Make the tensor. On failure torch has not called the deleter: the caller still owns the lend. */
static PyObject *lend_tensor(struct lend *lend)
{
    void *tensor = NULL;
    if (lhpy_exchange()->managed_to_object(&lend->managed, &tensor) == 0)
        return tensor;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "torch rejected a tensor over lohan's memory");
    return NULL;
}

/* [Note: Lends are no inference tensors] A tensor that is made under torch.inference_mode gives its
 * class to the parameter whose data it becomes, and torch chooses some kernels by that; parameters
 * of a plain model were made outside the mode. torch.inference_mode is written in Python, where a
 * Ctrl-C may interrupt it half-way; torch._C._InferenceMode is not. Returns the context that left
 * the mode; NULL if the mode is off, or with a Python error.
 */
static PyObject *inference_leave(void)
{
    static PyObject *is_enabled, *context_type; /* never freed */
    if (!is_enabled) {
        PyObject *torch = PyImport_ImportModule("torch._C");
        context_type = torch ? PyObject_GetAttrString(torch, "_InferenceMode") : NULL;
        is_enabled =
            context_type ? PyObject_GetAttrString(torch, "is_inference_mode_enabled") : NULL;
        Py_XDECREF(torch);
        if (!is_enabled)
            return NULL;
    }
    PyObject *answer = PyObject_CallNoArgs(is_enabled);
    int is_on = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    PyObject *context = is_on > 0 ? PyObject_CallFunction(context_type, "O", Py_False) : NULL;
    PyObject *entered = context ? PyObject_CallMethod(context, "__enter__", NULL) : NULL;
    if (!entered)
        Py_CLEAR(context);
    Py_XDECREF(entered);
    return context;
}

/* Return to the mode. A pending error stays set; an error of the context is only printed. */
static void inference_return(PyObject *context)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *left = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
    if (!left)
        PyErr_WriteUnraisable(context);
    Py_XDECREF(left);
    Py_DECREF(context);
    PyErr_Restore(type, value, traceback);
}

PyObject *lhpy_lend(struct lhpy_core *core, uint32_t unit, uint64_t byte_offset, int32_t ndim,
                    const int64_t *shape_strides, struct lhpy_dl_type dtype)
{
    PyObject *outside = inference_leave();
    if (!outside && PyErr_Occurred())
        return NULL;
    struct lend *lend = lend_new(core, unit, ndim, shape_strides);
    PyObject *tensor = NULL;
    if (lend) {
        lend->release = lh_engine_unpin;
        lend->managed.tensor.data = lh_engine_address(core->engine, unit) + byte_offset;
        lend->managed.tensor.device_type = core->device_type;
        lend->managed.tensor.device_id = core->device_id;
        lend->managed.tensor.dtype = dtype;
        lh_engine_pin(core->engine, unit);
        tensor = lend_tensor(lend);
    }
    if (outside)
        inference_return(outside);
    if (lend && !tensor)
        lend_delete(&lend->managed);
    return tensor;
}

PyObject *lhpy_saved_lend(struct lhpy_core *core, uint32_t item, int64_t bytes)
{
    struct lend *lend = lend_new(core, item, 1, (const int64_t[]){bytes, 1});
    if (!lend)
        return NULL;
    lend->release = lh_saved_drop;
    lend->managed.tensor.data = (uint8_t *)(uintptr_t)lh_saved_address(core->engine, item);
    lend->managed.tensor.device_type = LHPY_DL_DEVICE_CPU;
    lend->managed.tensor.dtype = (struct lhpy_dl_type){LHPY_DL_CODE_UINT, 8, 1};
    PyObject *tensor = lend_tensor(lend);
    if (!tensor) { /* the item still belongs to the caller */
        lhpy_core_release(core);
        free(lend);
    }
    return tensor;
}

static void nothing_release(struct lh_engine *engine, uint32_t number)
{
    (void)engine;
    (void)number;
}

PyObject *lhpy_place_lend(struct lhpy_core *core, uint8_t *address, int64_t bytes)
{
    struct lend *lend = lend_new(core, 0, 1, (const int64_t[]){bytes, 1});
    if (!lend)
        return NULL;
    lend->release = nothing_release;
    lend->managed.tensor.data = address;
    lend->managed.tensor.device_type = core->device_type;
    lend->managed.tensor.device_id = core->device_id;
    lend->managed.tensor.dtype = (struct lhpy_dl_type){LHPY_DL_CODE_UINT, 8, 1};
    PyObject *tensor = lend_tensor(lend);
    if (!tensor)
        lend_delete(&lend->managed);
    return tensor;
}
