/* What was built, and what works on this machine: the facts that `lohan doctor` prints. */
#include "compute/adam.h"
#include "base/crc32c.h"
#include "dev/pins.h"
#include "mem/heap.h"
#include "py/lhpy.h"

#ifndef LH_BUILD_INFO
#define LH_BUILD_INFO "unknown"
#endif

/* How exactly what a driver page-locks is found; the table of pins has room for 8 GiB. */
#define PIN_PIECE_BYTES (UINT64_C(32) << 20)

static const struct lhpy_table name_table = LHPY_TABLE_OF("a name", const char *);

static PyObject *doctor_build(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    const char *const *names = lh_io_names();
    uint32_t name_count = 0;
    while (names[name_count])
        name_count++;
    PyObject *backends = lhpy_list(&name_table, names, name_count);
    if (!backends)
        return NULL;
    const struct lh_adam_kernel *adam = NULL;
    const struct lh_crc32c_kernel *crc = NULL;
    (void)lh_adam_kernels(&adam);
    (void)lh_crc32c_kernels(&crc);
    return Py_BuildValue("{s:s,s:N,s:s,s:s,s:i,s:i,s:K}", "build", LH_BUILD_INFO, "backends",
                         backends, "adam", adam[0].name, "crc32c", crc[0].name, "numa_nodes",
                         lh_numa_node_count(), "store_format", LH_STORE_FORMAT_VERSION,
                         "memory_available_bytes", lh_mem_available_bytes());
}

/* probe(backend, directory, direct) -> (code, message): 0 and "" when it works. */
static PyObject *doctor_probe(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *backend, *directory;
    bool direct;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(backend), LHPY_ARG(directory), LHPY_ARG(direct)) < 0)
        return NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = lh_io_probe(backend, directory, direct, &alloc, &err);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(is)", rc, err.message);
}

/* memory(bytes, lock) -> (pages, locked, note): the kind of memory an arena of that size gets. */
static PyObject *doctor_memory(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct lh_arena_opts opts = {.numa_node = -1};
    if (LHPY_ARGS(args, NULL, LHPY_ARG_AS("bytes", opts.bytes), LHPY_ARG_AS("lock", opts.lock)) < 0)
        return NULL;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_arena *arena = NULL;
    struct lh_error err = {0};
    int rc = lh_arena_create(&opts, &alloc, &arena, &err);
    if (rc < 0)
        return lhpy_raise_error(NULL, &err);
    static const char *const pages[] = {"4 KiB", "transparent huge", "reserved huge"};
    PyObject *answer = Py_BuildValue("(sOs)", pages[arena->pages],
                                     arena->locked ? Py_True : Py_False, arena->note);
    lh_arena_destroy(arena, &alloc);
    return answer;
}

/* Register pieces of an arena with a GPU until the driver refuses one; add up their bytes. */
static int pins_count(int32_t device_index, uint64_t bytes, uint64_t *pinned_out,
                      struct lh_error *err)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_clock clock = lh_clock_real();
    struct lh_dev_opts dev_opts = {.device_index = device_index, .copy_count = 1, .clock = &clock};
    struct lh_arena_opts arena_opts = {.bytes = bytes, .numa_node = -1};
    struct lh_dev_pins pins = {0};
    struct lh_arena *arena = NULL;
    LH_TRY(lh_dev_create("cuda", &dev_opts, &alloc, &pins.dev, err));
    int rc = lh_arena_create(&arena_opts, &alloc, &arena, err);
    if (rc == 0) {
        struct lh_dev_buffer piece = {.base = arena->base, .bytes = PIN_PIECE_BYTES};
        for (; *pinned_out < bytes; *pinned_out += piece.bytes) {
            piece.base = (uint8_t *)arena->base + *pinned_out;
            piece.bytes = lh_min_u64(PIN_PIECE_BYTES, bytes - *pinned_out);
            if (!lh_dev_pins_add(&pins, &piece))
                break;
        }
        lh_dev_pins_remove(&pins);
        lh_arena_destroy(arena, &alloc);
    }
    pins.dev->ops->destroy(pins.dev);
    return rc;
}

/* pins(device_index, bytes) -> how many of these bytes the driver of the GPU page-locks. */
static PyObject *doctor_pins(PyObject *Py_UNUSED(module), PyObject *args)
{
    int32_t device_index;
    uint64_t bytes, pinned_bytes = 0;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(device_index), LHPY_ARG(bytes)) < 0)
        return NULL;
    struct lh_error err = {0};
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = pins_count(device_index, bytes, &pinned_bytes, &err);
    Py_END_ALLOW_THREADS
    return rc < 0 ? lhpy_raise_error(NULL, &err) : PyLong_FromUnsignedLongLong(pinned_bytes);
}

/* Make the C library's heap keep freed memory from now on. False: it does not support that. */
static PyObject *doctor_heap_keep(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    return PyBool_FromLong(lh_heap_keep());
}

PyMethodDef lhpy_doctor_functions[] = {
    {"heap_keep", doctor_heap_keep, METH_NOARGS, "Have the heap keep what is freed."},
    {"build_info", doctor_build, METH_NOARGS, "What was built, and which kernels run here."},
    {"probe_io", doctor_probe, METH_VARARGS, "probe_io(backend, directory, direct) -> (code, why)"},
    {"probe_memory", doctor_memory, METH_VARARGS,
     "probe_memory(bytes, lock) -> (pages, locked, note)"},
    {"probe_pins", doctor_pins, METH_VARARGS,
     "probe_pins(device_index, bytes) -> bytes that the GPU's driver page-locks"},
    {NULL, NULL, 0, NULL},
};
