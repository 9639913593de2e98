/* The Store type: extents by number, blocking access, for creation, loading, inspection. */
#include <string.h>

#include "py/lhpy.h"
#include "store/store.h"

struct store {
    PyObject_HEAD struct lh_store *store;
    struct lh_alloc alloc;
    PyObject *raiser; /* owned */
    pid_t owner_pid;  /* a forked child shares the files and their lock, and must not close them */
};

struct lh_store *lhpy_store_get(PyObject *object)
{
    struct store *self = (struct store *)object;
    if (!self->store)
        lhpy_raise(self->raiser, -ECANCELED, "the store is closed");
    if (!self->store || self->owner_pid == getpid())
        return self->store;
    lhpy_raise(self->raiser, -ECANCELED, "the store was opened in another process");
    return NULL;
}

uint64_t lhpy_store_live_bytes(PyObject *object)
{
    const struct store *self = (const struct store *)object;
    return self->alloc.live_bytes;
}

static void store_shut(struct store *self)
{
    struct lh_store *store = self->store;
    self->store = NULL;
    if (self->owner_pid != getpid())
        return;
    Py_BEGIN_ALLOW_THREADS
    lh_store_close(store);
    Py_END_ALLOW_THREADS
}

static void store_dealloc(PyObject *object)
{
    struct store *self = (struct store *)object;
    PyTypeObject *type = Py_TYPE(object);
    store_shut(self);
    Py_XDECREF(self->raiser);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(object);
    Py_DECREF(type);
}

/* Directory names, borrowed from bytes objects that the list owns. */
struct names {
    PyObject *list; /* owned */
    const char *paths[LH_STORE_DIRECTORY_COUNT_MAX];
    uint32_t count;
};

static int names_parse(PyObject *sequence, PyObject *raiser, struct names *names)
{
    Py_ssize_t count = PySequence_Size(sequence);
    names->list = PyList_New(0);
    if (count < 0 || !names->list)
        return -1;
    if (count == 0 || count > LH_STORE_DIRECTORY_COUNT_MAX) {
        struct lh_error err = {0};
        lh_error_set(&err, -EINVAL, "%zd directories: must be 1 to %d", count,
                     LH_STORE_DIRECTORY_COUNT_MAX);
        lhpy_raise_error(raiser, &err);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        PyObject *bytes = NULL;
        int ok =
            item && PyUnicode_FSConverter(item, &bytes) && PyList_Append(names->list, bytes) == 0;
        Py_XDECREF(item);
        Py_XDECREF(bytes);
        if (!ok)
            return -1;
        names->paths[names->count++] = PyBytes_AsString(bytes);
    }
    return 0;
}

static struct store *store_new(PyObject *type_object, PyObject *raiser)
{
    PyTypeObject *type = (PyTypeObject *)type_object;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct store *self = (struct store *)allocate(type, 0);
    if (!self)
        return NULL;
    self->alloc = (struct lh_alloc)LH_ALLOC_INIT;
    self->raiser = Py_NewRef(raiser);
    self->owner_pid = getpid();
    return self;
}

struct layout {
    struct lh_store_extent_desc *extents;
    struct lh_store_group_desc *groups;
    uint64_t *weights;
};

static int layout_parse(PyObject *extents, PyObject *groups, PyObject *weights,
                        struct layout *layout)
{
    Py_ssize_t extent_count = PyList_Size(extents);
    Py_ssize_t group_count = PyList_Size(groups);
    Py_ssize_t weight_count = PyList_Size(weights);
    layout->extents = PyMem_Calloc((size_t)extent_count + 1, sizeof(*layout->extents));
    layout->groups = PyMem_Calloc((size_t)group_count + 1, sizeof(*layout->groups));
    layout->weights = PyMem_Calloc((size_t)weight_count + 1, sizeof(*layout->weights));
    if (!layout->extents || !layout->groups || !layout->weights) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < extent_count; i++) {
        unsigned long long bytes = 0;
        unsigned int group = 0;
        if (!PyArg_ParseTuple(PyList_GetItem(extents, i), "KI", &bytes, &group))
            return -1;
        layout->extents[i] = (struct lh_store_extent_desc){.bytes = bytes, .group = group};
    }
    for (Py_ssize_t i = 0; i < group_count; i++)
        layout->groups[i].slot_count = (uint32_t)PyLong_AsUnsignedLong(PyList_GetItem(groups, i));
    for (Py_ssize_t i = 0; i < weight_count; i++)
        layout->weights[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(weights, i));
    return PyErr_Occurred() ? -1 : 0;
}

static void layout_free(struct layout *layout)
{
    PyMem_Free(layout->extents);
    PyMem_Free(layout->groups);
    PyMem_Free(layout->weights);
}

/*
 * store_create(type, raiser, directories, weights, extents, groups, meta, scalar_bytes_max,
 * flags...)
 */
PyObject *lhpy_store_create(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *keys[] = {"type",        "raiser",    "directories",    "weights",
                           "extents",     "groups",    "meta",           "scalar_bytes_max",
                           "single_slot", "temporary", "allow_buffered", "allow_tmpfs",
                           NULL};
    PyObject *type, *raiser, *directories, *weights, *extents, *groups;
    const char *meta = NULL;
    Py_ssize_t meta_bytes = 0;
    unsigned long long scalar_bytes_max = 0;
    int single_slot = 0, temporary = 0, allow_buffered = 0, allow_tmpfs = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!O!O!y#Kpppp", keys, &type, &raiser,
                                     &directories, &PyList_Type, &weights, &PyList_Type, &extents,
                                     &PyList_Type, &groups, &meta, &meta_bytes, &scalar_bytes_max,
                                     &single_slot, &temporary, &allow_buffered, &allow_tmpfs))
        return NULL;
    struct names names = {0};
    struct layout layout = {0};
    struct lh_error err = {0};
    struct store *self = NULL;
    if (names_parse(directories, raiser, &names) == 0 &&
        layout_parse(extents, groups, weights, &layout) == 0)
        self = store_new(type, raiser);
    if (self) {
        struct lh_store_opts opts = {
            .directories = names.paths,
            .directory_count = names.count,
            .weights = PyList_Size(weights) > 0 ? layout.weights : NULL,
            .extents = layout.extents,
            .extent_count = (uint32_t)PyList_Size(extents),
            .groups = layout.groups,
            .group_count = (uint32_t)PyList_Size(groups),
            .meta = meta,
            .meta_bytes = (uint64_t)meta_bytes,
            .scalar_bytes_max = scalar_bytes_max,
            .single_slot = single_slot != 0,
            .temporary = temporary != 0,
            .allow_buffered = allow_buffered != 0,
            .allow_tmpfs = allow_tmpfs != 0,
        };
        int rc;
        Py_BEGIN_ALLOW_THREADS
        rc = lh_store_create(&opts, &self->alloc, &self->store, &err);
        Py_END_ALLOW_THREADS
        if (rc < 0) {
            lhpy_raise_error(raiser, &err);
            Py_DECREF(self);
            self = NULL;
        }
    }
    layout_free(&layout);
    Py_XDECREF(names.list);
    return (PyObject *)self;
}

PyObject *lhpy_store_open(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *keys[] = {"type",           "raiser",  "directories", "read_only",
                           "allow_buffered", "is_held", "open_at",     NULL};
    PyObject *type, *raiser, *directories;
    PyObject *open_at = Py_None;
    int read_only = 0, allow_buffered = 0, is_held = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOpp|pO", keys, &type, &raiser, &directories,
                                     &read_only, &allow_buffered, &is_held, &open_at))
        return NULL;
    uint64_t step = open_at == Py_None ? 0 : PyLong_AsUnsignedLongLong(open_at);
    if (PyErr_Occurred())
        return NULL;
    struct names names = {0};
    struct lh_error err = {0};
    struct store *self = NULL;
    if (names_parse(directories, raiser, &names) == 0)
        self = store_new(type, raiser);
    if (self) {
        struct lh_store_open_opts opts = {.directories = names.paths,
                                          .directory_count = names.count,
                                          .read_only = read_only != 0 || is_held != 0,
                                          .is_held = is_held != 0,
                                          .open_at = open_at == Py_None ? NULL : &step,
                                          .allow_buffered = allow_buffered != 0};
        int rc;
        Py_BEGIN_ALLOW_THREADS
        rc = lh_store_open(&opts, &self->alloc, &self->store, &err);
        Py_END_ALLOW_THREADS
        if (rc < 0) {
            lhpy_raise_error(raiser, &err);
            Py_DECREF(self);
            self = NULL;
        }
    }
    Py_XDECREF(names.list);
    return (PyObject *)self;
}

PyObject *lhpy_store_measure(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *raiser = NULL;
    PyObject *directory = NULL;
    unsigned long long probe_bytes = 0;
    uint64_t write_bytes_per_s = 0;
    uint64_t read_bytes_per_s = 0;
    struct lh_error err = {0};
    if (!PyArg_ParseTuple(args, "OO&K", &raiser, PyUnicode_FSConverter, &directory, &probe_bytes))
        return NULL;
    const char *path = PyBytes_AsString(directory);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lh_store_measure(path, probe_bytes, &write_bytes_per_s, &read_bytes_per_s, &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(directory);
    if (rc < 0)
        return lhpy_raise_error(raiser, &err);
    return Py_BuildValue("(KK)", write_bytes_per_s, read_bytes_per_s);
}

/* read(extent, offset, address, bytes) and write(...): the address is trusted. */
static PyObject *store_transfer(PyObject *object, PyObject *args, bool is_write)
{
    struct store *self = (struct store *)object;
    unsigned int extent = 0;
    unsigned long long offset = 0, address = 0, bytes = 0;
    struct lh_error err = {0};
    if (!PyArg_ParseTuple(args, "IKKK", &extent, &offset, &address, &bytes) ||
        !lhpy_store_get(object))
        return NULL;
    if (extent >= lh_store_extent_count(self->store))
        return PyErr_Format(PyExc_IndexError, "extent %u is out of range: there are %u extents",
                            extent, lh_store_extent_count(self->store));
    void *memory = (void *)(uintptr_t)address;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    if (is_write)
        rc = lh_store_write_sync(self->store, extent, offset, memory, bytes, &err);
    else
        rc = lh_store_read_sync(self->store, extent, offset, memory, bytes, &err);
    Py_END_ALLOW_THREADS
    if (rc < 0)
        return lhpy_raise_error(self->raiser, &err);
    Py_RETURN_NONE;
}

static PyObject *store_read(PyObject *object, PyObject *args)
{
    return store_transfer(object, args, false);
}

static PyObject *store_write(PyObject *object, PyObject *args)
{
    return store_transfer(object, args, true);
}

static PyObject *store_commit(PyObject *object, PyObject *args)
{
    struct store *self = (struct store *)object;
    unsigned long long step = 0;
    const char *scalars = NULL;
    Py_ssize_t scalar_bytes = 0;
    struct lh_error err = {0};
    if (!PyArg_ParseTuple(args, "Ky#", &step, &scalars, &scalar_bytes) || !lhpy_store_get(object))
        return NULL;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lh_store_commit_sync(self->store, step, scalars, (uint64_t)scalar_bytes, &err);
    Py_END_ALLOW_THREADS
    if (rc < 0)
        return lhpy_raise_error(self->raiser, &err);
    Py_RETURN_NONE;
}

/* Whether only the creation itself was ever committed: every byte reads as zero. */
static bool is_empty(const struct lh_store *store)
{
    for (uint32_t i = 0; i < lh_store_extent_count(store); i++) {
        uint32_t slot = lh_store_read_slot(store, lh_store_extent(store, i).group);
        if (!lh_store_is_zero(store, i, slot))
            return false;
    }
    return true;
}

static PyObject *store_describe(PyObject *object, PyObject *args)
{
    (void)args;
    struct store *self = (struct store *)object;
    if (!lhpy_store_get(object))
        return NULL;
    uint64_t meta_bytes = 0, scalar_bytes = 0, caller_bytes = 0;
    const void *meta = lh_store_meta(self->store, &meta_bytes);
    const void *scalars = lh_store_scalars(self->store, &scalar_bytes);
    const void *caller = lh_scalars_find(scalars, scalar_bytes, &caller_bytes);
    PyObject *paths = PyList_New(0);
    for (uint32_t i = 0; paths && i < lh_store_file_count(self->store); i++) {
        PyObject *item =
            Py_BuildValue("(NKO)", PyUnicode_DecodeFSDefault(lh_store_file_path(self->store, i)),
                          lh_store_file_bytes(self->store, i),
                          lh_store_files(self->store)[i].direct ? Py_True : Py_False);
        if (!item || PyList_Append(paths, item) < 0)
            Py_CLEAR(paths);
        Py_XDECREF(item);
    }
    if (!paths)
        return NULL;
    return Py_BuildValue(
        "{s:y#,s:y#,s:y#,s:K,s:N,s:s,s:N,s:I,s:I,s:K,s:O,s:K,s:O,s:O}", "meta", meta ? meta : "",
        (Py_ssize_t)meta_bytes, "scalars", scalars ? scalars : "", (Py_ssize_t)scalar_bytes,
        "caller_scalars", caller ? caller : "", (Py_ssize_t)caller_bytes, "step",
        lh_store_step(self->store), "note", lhpy_text(lh_store_note(self->store)), "uuid",
        lh_store_uuid(self->store), "files", paths, "extent_count",
        lh_store_extent_count(self->store), "group_count", lh_store_group_count(self->store),
        "commit_bytes", lh_store_commit_bytes(self->store), "is_empty",
        is_empty(self->store) ? Py_True : Py_False, "scalar_bytes_max",
        lh_store_scalar_bytes_max(self->store), "is_single_slot",
        lh_store_is_single_slot(self->store) ? Py_True : Py_False, "is_fallback",
        lh_store_is_fallback(self->store) ? Py_True : Py_False);
}

/* Each extent: (bytes, group, slots of the group, whether it reads as zeros). */
static PyObject *store_extents(PyObject *object, PyObject *args)
{
    (void)args;
    const struct lh_store *store = lhpy_store_get(object);
    PyObject *list = store ? PyList_New(0) : NULL;
    for (uint32_t i = 0; list && i < lh_store_extent_count(store); i++) {
        struct lh_store_extent_desc extent = lh_store_extent(store, i);
        uint32_t slot = lh_store_read_slot(store, extent.group);
        PyObject *item = Py_BuildValue("(KIIO)", extent.bytes, extent.group,
                                       lh_store_slot_count(store, extent.group),
                                       lh_store_is_zero(store, i, slot) ? Py_True : Py_False);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* Where a byte of an extent lies: (path, offset in the file). */
static PyObject *store_locate(PyObject *object, PyObject *args)
{
    const struct lh_store *store = lhpy_store_get(object);
    unsigned int extent = 0;
    unsigned long long offset = 0;
    struct lh_store_piece piece;
    if (!store || !PyArg_ParseTuple(args, "IK", &extent, &offset))
        return NULL;
    if (extent >= lh_store_extent_count(store) || offset >= lh_store_extent(store, extent).bytes)
        return PyErr_Format(PyExc_IndexError, "extent %u has no byte %llu", extent, offset);
    uint64_t block = offset / LH_BLOCK_BYTES * LH_BLOCK_BYTES;
    uint32_t slot = lh_store_read_slot(store, lh_store_extent(store, extent).group);
    if (lh_store_map(store, extent, slot, block, LH_BLOCK_BYTES, &piece, 1) != 1)
        return PyErr_Format(PyExc_IndexError, "extent %u has no byte %llu", extent, offset);
    return Py_BuildValue("(NK)",
                         PyUnicode_DecodeFSDefault(lh_store_file_path(store, piece.file_index)),
                         piece.file_offset + (offset - block));
}

static PyObject *store_close(PyObject *object, PyObject *args)
{
    (void)args;
    store_shut((struct store *)object);
    Py_RETURN_NONE;
}

static PyMethodDef store_methods[] = {
    {"read", store_read, METH_VARARGS, "read(extent, offset, address, bytes)"},
    {"write", store_write, METH_VARARGS, "write(extent, offset, address, bytes)"},
    {"commit", store_commit, METH_VARARGS, "commit(step, scalars)"},
    {"describe", store_describe, METH_NOARGS, "What the store is: a dict."},
    {"extents", store_extents, METH_NOARGS,
     "Each extent: (bytes, group, slots, whether it reads as zeros)."},
    {"locate", store_locate, METH_VARARGS, "locate(extent, offset) -> (path, offset in the file)"},
    {"close", store_close, METH_NOARGS, "Close files, release the lock."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot store_slots[] = {
    {Py_tp_dealloc, store_dealloc},
    {Py_tp_methods, store_methods},
    {Py_tp_doc, "A store of tensors on SSDs."},
    {0, NULL},
};

PyType_Spec lhpy_store_spec = {
    .name = "lohan._core.Store",
    .basicsize = sizeof(struct store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = store_slots,
};
