/* The Store type: blocking access to extents by number, to create, load and inspect stores. */
#include <string.h>

#include "base/thread.h"
#include "py/lhpy.h"
#include "store/store.h"

struct store {
    PyObject_HEAD struct lh_store *store;
    struct lh_alloc alloc;
    PyObject *raiser; /* owned */
    /* When the store was opened: a forked child shares the files and their lock, and must not close
     * them. */
    uint32_t fork_count;
};

struct lh_store *lhpy_store_get(PyObject *object)
{
    struct store *self = (struct store *)object;
    if (!self->store)
        lhpy_raise(self->raiser, -ECANCELED, "the store is closed");
    if (!self->store || self->fork_count == lh_thread_fork_count())
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
    if (self->fork_count != lh_thread_fork_count())
        return;
    Py_BEGIN_ALLOW_THREADS
    lh_store_close(store);
    Py_END_ALLOW_THREADS
}

static void store_dealloc(PyObject *object)
{
    struct store *self = (struct store *)object;
    store_shut(self);
    Py_XDECREF(self->raiser);
    lhpy_type_free(object);
}

/* Directory names, borrowed from bytes objects that the list owns. */
struct names {
    PyObject *list; /* owned */
    const char *paths[LH_STORE_DIRECTORY_COUNT_MAX];
    uint32_t count;
};

static int names_read(PyObject *sequence, PyObject *raiser, struct names *names)
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

static struct store *store_new(PyObject *type, PyObject *raiser)
{
    struct store *self = lhpy_type_new(type);
    if (!self)
        return NULL;
    self->alloc = (struct lh_alloc)LH_ALLOC_INIT;
    self->raiser = Py_NewRef(raiser);
    self->fork_count = lh_thread_fork_count();
    return self;
}

static const struct lhpy_table extent_table =
    LHPY_TABLE_PLAIN("an extent", LHPY_FORM_TUPLE, struct lh_store_extent_desc, bytes, group);

static const struct lhpy_table group_table =
    LHPY_TABLE_PLAIN("a group", LHPY_FORM_VALUE, struct lh_store_group_desc, slot_count);

static const struct lhpy_table weight_table = LHPY_TABLE_OF("a weight", uint64_t);

/* The arguments of store_create() and store_open() besides options. */
struct request {
    PyObject *type;
    PyObject *raiser;
    PyObject *directories;
    struct names names;
};

/* Create or open a store: the other options are NULL. Reads the directories, after all else. */
static PyObject *store_make(struct request *request, struct lh_store_opts *create,
                            struct lh_store_open_opts *open)
{
    struct lh_error err = {0};
    struct names *names = &request->names;
    struct store *self = NULL;
    if (names_read(request->directories, request->raiser, names) == 0)
        self = store_new(request->type, request->raiser);
    if (self) {
        int rc;
        Py_BEGIN_ALLOW_THREADS
        if (create) {
            create->directories = names->paths;
            create->directory_count = names->count;
            rc = lh_store_create(create, &self->alloc, &self->store, &err);
        } else {
            open->directories = names->paths;
            open->directory_count = names->count;
            rc = lh_store_open(open, &self->alloc, &self->store, &err);
        }
        Py_END_ALLOW_THREADS
        if (rc < 0) {
            lhpy_raise_error(request->raiser, &err);
            Py_CLEAR(self);
        }
    }
    Py_XDECREF(names->list);
    return (PyObject *)self;
}

static PyObject *store_create(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    struct request request = {0};
    struct lh_store_opts opts = {0};
    uint64_t *weights = NULL;
    uint32_t weight_count = 0;
    struct lhpy_bytes meta;
    if (LHPY_ARGS(
            args, kwargs, LHPY_ARG_AS("type", request.type), LHPY_ARG_AS("raiser", request.raiser),
            LHPY_ARG_AS("directories", request.directories),
            LHPY_ARG_ROWS("weights", weights, weight_count, weight_table),
            LHPY_ARG_ROWS("extents", opts.extents, opts.extent_count, extent_table),
            LHPY_ARG_ROWS("groups", opts.groups, opts.group_count, group_table), LHPY_ARG(meta),
            LHPY_ARG_AS("scalar_bytes_max", opts.scalar_bytes_max),
            LHPY_ARG_AS("single_slot", opts.single_slot), LHPY_ARG_AS("temporary", opts.temporary),
            LHPY_ARG_AS("allow_buffered", opts.allow_buffered),
            LHPY_ARG_AS("allow_tmpfs", opts.allow_tmpfs)) < 0)
        return NULL;
    opts.weights = weight_count > 0 ? weights : NULL;
    opts.meta = meta.data;
    opts.meta_bytes = meta.bytes;
    PyObject *made = store_make(&request, &opts, NULL);
    lhpy_free(&weight_table, weights, weight_count);
    lhpy_free(&extent_table, opts.extents, opts.extent_count);
    lhpy_free(&group_table, opts.groups, opts.group_count);
    return made;
}

static PyObject *store_open(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    struct request request = {0};
    struct lh_store_open_opts opts = {0};
    uint64_t step = UINT64_MAX;
    if (LHPY_ARGS(args, kwargs, LHPY_ARG_AS("type", request.type),
                  LHPY_ARG_AS("raiser", request.raiser),
                  LHPY_ARG_AS("directories", request.directories),
                  LHPY_ARG_AS("read_only", opts.read_only),
                  LHPY_ARG_AS("allow_buffered", opts.allow_buffered),
                  LHPY_ARG_AS("is_held", opts.is_held, .is_optional = true),
                  LHPY_ARG_AS("open_at", step, .is_optional = true, .may_be_none = true,
                              .max = UINT64_MAX - 1)) < 0)
        return NULL;
    opts.read_only |= opts.is_held;
    opts.open_at = step == UINT64_MAX ? NULL : &step;
    return store_make(&request, NULL, &opts);
}

static PyObject *store_measure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *raiser, *directory, *name = NULL;
    uint64_t probe_bytes = 0;
    uint64_t write_bytes_per_s = 0;
    uint64_t read_bytes_per_s = 0;
    struct lh_error err = {0};
    if (LHPY_ARGS(args, NULL, LHPY_ARG(raiser), LHPY_ARG(directory), LHPY_ARG(probe_bytes)) < 0 ||
        !PyUnicode_FSConverter(directory, &name))
        return NULL;
    const char *path = PyBytes_AsString(name);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lh_store_measure(path, probe_bytes, &write_bytes_per_s, &read_bytes_per_s, &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(name);
    if (rc < 0)
        return lhpy_raise_error(raiser, &err);
    return Py_BuildValue("(KK)", write_bytes_per_s, read_bytes_per_s);
}

/* read(extent, offset, address, bytes) and write(...): the address is trusted. */
static PyObject *store_transfer(PyObject *object, PyObject *args, bool is_write)
{
    struct store *self = (struct store *)object;
    uint32_t extent = 0;
    uint64_t offset = 0, bytes = 0;
    void *address = NULL;
    struct lh_error err = {0};
    if (LHPY_ARGS(args, NULL, LHPY_ARG(extent), LHPY_ARG(offset), LHPY_ARG(address),
                  LHPY_ARG(bytes)) < 0 ||
        !lhpy_store_get(object))
        return NULL;
    if (extent >= lh_store_extent_count(self->store))
        return PyErr_Format(PyExc_IndexError, "extent %u is out of range: there are %u extents",
                            extent, lh_store_extent_count(self->store));
    int rc;
    Py_BEGIN_ALLOW_THREADS
    if (is_write)
        rc = lh_store_write_sync(self->store, extent, offset, address, bytes, &err);
    else
        rc = lh_store_read_sync(self->store, extent, offset, address, bytes, &err);
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

static PyObject *store_check_names(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct store *self = (struct store *)object;
    struct lh_error err = {0};
    if (!lhpy_store_get(object))
        return NULL;
    if (lh_store_names_check(self->store, &err) < 0)
        return lhpy_raise_error(self->raiser, &err);
    Py_RETURN_NONE;
}

static PyObject *store_commit(PyObject *object, PyObject *args)
{
    struct store *self = (struct store *)object;
    uint64_t step = 0;
    struct lhpy_bytes scalars;
    struct lh_error err = {0};
    if (LHPY_ARGS(args, NULL, LHPY_ARG(step), LHPY_ARG(scalars)) < 0 || !lhpy_store_get(object))
        return NULL;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lh_store_commit_sync(self->store, step, scalars.data, scalars.bytes, &err);
    Py_END_ALLOW_THREADS
    if (rc < 0)
        return lhpy_raise_error(self->raiser, &err);
    Py_RETURN_NONE;
}

/*
 * Whether only the creation itself was ever committed: it has no scalars, and every byte reads as
 * zero. Of a model that is read in place, the store may have scalars only.
 */
static bool is_empty(const struct lh_store *store)
{
    uint64_t scalar_bytes = 0;
    (void)lh_store_scalars(store, &scalar_bytes);
    if (scalar_bytes > 0)
        return false;
    for (uint32_t i = 0; i < lh_store_extent_count(store); i++) {
        uint32_t slot = lh_store_read_slot(store, lh_store_extent(store, i).group);
        if (!lh_store_is_zero(store, i, slot))
            return false;
    }
    return true;
}

static PyObject *store_describe(PyObject *object, PyObject *Py_UNUSED(args))
{
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
        "{s:y#,s:y#,s:y#,s:K,s:K,s:N,s:s,s:N,s:I,s:I,s:K,s:O,s:K,s:O,s:O}", "meta",
        meta ? meta : "", (Py_ssize_t)meta_bytes, "scalars", scalars ? scalars : "",
        (Py_ssize_t)scalar_bytes, "caller_scalars", caller ? caller : "", (Py_ssize_t)caller_bytes,
        "step", lh_store_step(self->store), "older_step", lh_store_older_step(self->store), "note",
        lhpy_text(lh_store_note(self->store)), "uuid", lh_store_uuid(self->store), "files", paths,
        "extent_count", lh_store_extent_count(self->store), "group_count",
        lh_store_group_count(self->store), "commit_bytes", lh_store_commit_bytes(self->store),
        "is_empty", is_empty(self->store) ? Py_True : Py_False, "scalar_bytes_max",
        lh_store_scalar_bytes_max(self->store), "is_single_slot",
        lh_store_is_single_slot(self->store) ? Py_True : Py_False, "is_fallback",
        lh_store_is_fallback(self->store) ? Py_True : Py_False);
}

/* A tuple for each extent: (bytes, group, slots of the group, whether it reads as zeros). */
static PyObject *store_extents(PyObject *object, PyObject *Py_UNUSED(args))
{
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

/* The checksums of an extent's newest bytes: a native uint32 for each LH_CHECKSUM_BYTES. */
static PyObject *store_checksums(PyObject *object, PyObject *args)
{
    struct lh_store *store = lhpy_store_get(object);
    uint32_t extent = 0;
    if (!store || LHPY_ARGS(args, NULL, LHPY_ARG(extent)) < 0)
        return NULL;
    if (extent >= lh_store_extent_count(store))
        return PyErr_Format(PyExc_IndexError, "there is no extent %u", extent);
    uint32_t slot = lh_store_read_slot(store, lh_store_extent(store, extent).group);
    uint32_t count = 0;
    const uint32_t *sums = lh_store_checksums(store, extent, slot, &count);
    return PyBytes_FromStringAndSize((const char *)sums, (Py_ssize_t)(count * sizeof *sums));
}

/* Where a byte of an extent lies: (path, offset in the file). */
static PyObject *store_locate(PyObject *object, PyObject *args)
{
    const struct lh_store *store = lhpy_store_get(object);
    uint32_t extent = 0;
    uint64_t offset = 0;
    struct lh_store_piece piece;
    if (!store || LHPY_ARGS(args, NULL, LHPY_ARG(extent), LHPY_ARG(offset)) < 0)
        return NULL;
    if (extent >= lh_store_extent_count(store) || offset >= lh_store_extent(store, extent).bytes)
        return PyErr_Format(PyExc_IndexError, "extent %u has no byte %llu", extent,
                            (unsigned long long)offset);
    uint64_t block = offset / LH_BLOCK_BYTES * LH_BLOCK_BYTES;
    uint32_t slot = lh_store_read_slot(store, lh_store_extent(store, extent).group);
    if (lh_store_map(store, extent, slot, block, LH_BLOCK_BYTES, &piece, 1) != 1)
        return PyErr_Format(PyExc_IndexError, "extent %u has no byte %llu", extent,
                            (unsigned long long)offset);
    return Py_BuildValue("(NK)",
                         PyUnicode_DecodeFSDefault(lh_store_file_path(store, piece.file_index)),
                         piece.file_offset + (offset - block));
}

static PyObject *store_close(PyObject *object, PyObject *Py_UNUSED(args))
{
    store_shut((struct store *)object);
    Py_RETURN_NONE;
}

static PyMethodDef store_methods[] = {
    {"read", store_read, METH_VARARGS, "read(extent, offset, address, bytes)"},
    {"write", store_write, METH_VARARGS, "write(extent, offset, address, bytes)"},
    {"check_names", store_check_names, METH_NOARGS,
     "Raise an error if a file of the store was deleted while it was open."},
    {"commit", store_commit, METH_VARARGS, "commit(step, scalars)"},
    {"describe", store_describe, METH_NOARGS, "What the store is: a dict."},
    {"extents", store_extents, METH_NOARGS,
     "Each extent: (bytes, group, slots, whether it reads as zeros)."},
    {"checksums", store_checksums, METH_VARARGS, "checksums(extent) -> bytes"},
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

PyMethodDef lhpy_store_functions[] = {
    {"store_create", LHPY_KEYWORDS(store_create), "Make a store."},
    {"store_open", LHPY_KEYWORDS(store_open), "Open a store."},
    {"store_measure", store_measure, METH_VARARGS,
     "store_measure(raiser, directory, probe_bytes) -> (write, read) bytes/s"},
    {NULL, NULL, 0, NULL},
};
