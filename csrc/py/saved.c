/* Offloaded saved tensors (sched/saved.h), for Python: the Engine's methods saved_*(). */
#include "base/assert.h"
#include "py/lhpy.h"

/* Parse (memory bytes, transit bytes, Store or None, most at a time). */
int lhpy_saved_parse(PyObject *tuple, struct lhpy_saved_make *make)
{
    unsigned long long bytes = 0;
    unsigned long long transit_bytes = 0;
    unsigned int item_max = 0;
    PyObject *store = NULL;
    if (!PyArg_ParseTuple(tuple, "KKOI", &bytes, &transit_bytes, &store, &item_max))
        return -1;
    *make = (struct lhpy_saved_make){
        .opts = {.memory_bytes = bytes, .transit_bytes = transit_bytes, .item_max = item_max}};
    if (store == Py_None)
        return 0;
    make->opts.store = lhpy_store_get(store);
    if (!make->opts.store)
        return -1;
    make->object = Py_NewRef(store);
    return 0;
}

/* saved_put(pointer, bytes, on SSD) -> item; None: it does not fit and stays where it is. */
PyObject *lhpy_engine_saved_put(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    unsigned long long pointer = 0;
    unsigned long long bytes = 0;
    int is_on_ssd = 0;
    uint32_t item = 0;
    if (!PyArg_ParseTuple(args, "KKp", &pointer, &bytes, &is_on_ssd) || lhpy_check_open(self) < 0)
        return NULL;
    lhpy_device_stream_note(self);
    int rc = lh_saved_put(self->core->engine, (const void *)(uintptr_t)pointer, bytes,
                          is_on_ssd ? LH_SAVED_TIER_SSD : LH_SAVED_TIER_MEMORY, &item);
    if (rc == -E2BIG || rc == -EAGAIN)
        Py_RETURN_NONE;
    return rc < 0 ? lhpy_raise_engine(self) : PyLong_FromUnsignedLong(item);
}

static int item_parse(struct lhpy_engine *self, PyObject *number, uint32_t *item)
{
    unsigned long value = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred() || lhpy_check_open(self) < 0)
        return -1;
    if (value >= self->saved.opts.item_max) {
        PyErr_Format(PyExc_IndexError, "saved tensor %lu is out of range: there are %u", value,
                     (unsigned)self->saved.opts.item_max);
        return -1;
    }
    *item = (uint32_t)value;
    return 0;
}

/* saved_is_taken(item): whether the memory that was put belongs to the caller again. */
PyObject *lhpy_engine_saved_is_taken(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t item = 0;
    if (item_parse(self, number, &item) < 0)
        return NULL;
    return PyBool_FromLong(lh_saved_is_taken(self->core->engine, item));
}

static int room_wait(struct lh_engine *engine, uint64_t bytes_max, int timeout_ms)
{
    return lh_saved_room_wait(engine, bytes_max, timeout_ms);
}

/* saved_room(bytes): wait until at most `bytes` are put and not taken. */
PyObject *lhpy_engine_saved_room(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    unsigned long long bytes = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() || lhpy_check_open(self) < 0 ||
        lhpy_engine_wait(self, room_wait, bytes) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* saved_fetch(item, pointer on the device; 0: computation is in main memory) */
PyObject *lhpy_engine_saved_fetch(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *number = NULL;
    unsigned long long target = 0;
    uint32_t item = 0;
    if (!PyArg_ParseTuple(args, "OK", &number, &target) || item_parse(self, number, &item) < 0)
        return NULL;
    if ((target != 0) != (self->core->dev != NULL)) {
        PyErr_SetString(PyExc_ValueError, "target must be device memory, and 0 without a device");
        return NULL;
    }
    lhpy_device_stream_note(self);
    lh_saved_fetch(self->core->engine, item, (void *)(uintptr_t)target);
    Py_RETURN_NONE;
}

static int back_wait(struct lh_engine *engine, uint64_t item, int timeout_ms)
{
    return lh_saved_wait(engine, (uint32_t)item, timeout_ms);
}

/* saved_wait(item): wait until its bytes are back. */
PyObject *lhpy_engine_saved_wait(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t item = 0;
    if (item_parse(self, number, &item) < 0)
        return NULL;
    lhpy_device_stream_note(self);
    if (lhpy_engine_wait(self, back_wait, item) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* saved_drop(item), once, when it is taken. After the session was closed it does nothing. */
PyObject *lhpy_engine_saved_drop(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t item = 0;
    if (!lhpy_is_open(self))
        Py_RETURN_NONE;
    if (item_parse(self, number, &item) < 0)
        return NULL;
    lh_saved_drop(self->core->engine, item);
    Py_RETURN_NONE;
}

/* saved_lend(item, bytes) -> tensor of bytes; after saved_wait(), instead of saved_drop(). */
PyObject *lhpy_engine_saved_lend(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    PyObject *number = NULL;
    long long bytes = 0;
    uint32_t item = 0;
    if (!PyArg_ParseTuple(args, "OL", &number, &bytes) || item_parse(self, number, &item) < 0)
        return NULL;
    return lhpy_saved_lend(self->core, item, bytes);
}
