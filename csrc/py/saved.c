/* Offloaded saved tensors (sched/saved.h), for Python: the Engine's methods saved_*(). */
#include "base/assert.h"
#include "py/lhpy.h"

const struct lhpy_table lhpy_saved_table =
    LHPY_TABLE("saved", LHPY_FORM_TUPLE, struct lhpy_saved_make,
               LHPY_FIELD_AS("memory_bytes", struct lhpy_saved_make, opts.memory_bytes),
               LHPY_FIELD_AS("transit_bytes", struct lhpy_saved_make, opts.transit_bytes),
               LHPY_FIELD_AS("store", struct lhpy_saved_make, object),
               LHPY_FIELD_AS("item_max", struct lhpy_saved_make, opts.item_max));

/* saved_put(pointer, bytes, on SSD) -> item; None: no room, so the tensor stays where it is. */
static PyObject *saved_put(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    const void *pointer = NULL;
    uint64_t bytes = 0;
    bool is_on_ssd = false;
    uint32_t item = 0;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(pointer), LHPY_ARG(bytes), LHPY_ARG(is_on_ssd)) < 0 ||
        lhpy_check_open(self) < 0)
        return NULL;
    lhpy_device_stream_note(self);
    int rc = lh_saved_put(self->core->engine, pointer, bytes,
                          is_on_ssd ? LH_SAVED_TIER_SSD : LH_SAVED_TIER_MEMORY, &item);
    if (rc == -E2BIG || rc == -EAGAIN)
        Py_RETURN_NONE;
    return rc < 0 ? lhpy_raise_engine(self) : PyLong_FromUnsignedLong(item);
}

static int item_read(struct lhpy_engine *self, PyObject *number, uint32_t *item)
{
    if (lhpy_check_open(self) < 0)
        return -1;
    return lhpy_index_read(number, "saved tensor", self->saved.item_max, item);
}

/* saved_is_taken(item): whether the memory that was put belongs to the caller again. */
static PyObject *saved_is_taken(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t item = 0;
    if (item_read(self, number, &item) < 0)
        return NULL;
    return PyBool_FromLong(lh_saved_is_taken(self->core->engine, item));
}

/* saved_room(bytes): wait until at most this many bytes have been put, but not yet taken. */
static PyObject *saved_room(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint64_t bytes = 0;
    if (LHPY_VALUE(number, bytes) < 0 || lhpy_check_open(self) < 0 ||
        lhpy_engine_wait(self, lh_saved_room_wait, bytes) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* saved_fetch(item, pointer on the device; 0: computation is in main memory): start a fetch. */
static PyObject *saved_fetch(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *number = NULL;
    void *target = NULL;
    uint32_t item = 0;
    if (LHPY_ARGS(args, NULL, LHPY_ARG_AS("item", number), LHPY_ARG(target)) < 0 ||
        item_read(self, number, &item) < 0)
        return NULL;
    if ((target != NULL) != (self->core->dev != NULL)) {
        PyErr_SetString(PyExc_ValueError, "target must be device memory, and 0 without a device");
        return NULL;
    }
    lhpy_device_stream_note(self);
    lh_saved_fetch(self->core->engine, item, target);
    Py_RETURN_NONE;
}

static int back_wait(struct lh_engine *engine, uint64_t item, int timeout_ms)
{
    return lh_saved_wait(engine, (uint32_t)item, timeout_ms);
}

/* saved_wait(item): wait until the item's bytes have been fetched. */
static PyObject *saved_wait(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t item = 0;
    if (item_read(self, number, &item) < 0)
        return NULL;
    lhpy_device_stream_note(self);
    if (lhpy_engine_wait(self, back_wait, item) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* saved_drop(item): drop an item that was taken, once. After the session's close: no effect. */
static PyObject *saved_drop(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t item = 0;
    if (!lhpy_is_open(self))
        Py_RETURN_NONE;
    if (item_read(self, number, &item) < 0)
        return NULL;
    lh_saved_drop(self->core->engine, item);
    Py_RETURN_NONE;
}

/* saved_lend(item, bytes) -> tensor of bytes; after saved_wait(), instead of saved_drop(). */
static PyObject *saved_lend(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *number = NULL;
    uint64_t bytes = 0;
    uint32_t item = 0;
    if (LHPY_ARGS(args, NULL, LHPY_ARG_AS("item", number), LHPY_ARG(bytes, .max = INT64_MAX)) < 0 ||
        item_read(self, number, &item) < 0)
        return NULL;
    return lhpy_saved_lend(self->core, item, (int64_t)bytes);
}

PyMethodDef lhpy_saved_methods[] = {
    {"saved_put", saved_put, METH_VARARGS, "saved_put(pointer, bytes, on SSD) -> item, or None"},
    {"saved_is_taken", saved_is_taken, METH_O,
     "Whether the memory that was put may be changed again."},
    {"saved_room", saved_room, METH_O,
     "saved_room(bytes): wait until at most bytes are put and not taken."},
    {"saved_fetch", saved_fetch, METH_VARARGS, "saved_fetch(item, target)"},
    {"saved_wait", saved_wait, METH_O, "saved_wait(item): wait until it is back."},
    {"saved_lend", saved_lend, METH_VARARGS, "saved_lend(item, bytes) -> tensor"},
    {"saved_drop", saved_drop, METH_O, "saved_drop(item)"},
    {NULL, NULL, 0, NULL},
};
