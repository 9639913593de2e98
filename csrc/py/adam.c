/* See adam.h. Addresses and counts are trusted: the caller owns the arrays. */
#include "py/adam.h"

#include <pthread.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "base/thread.h"
#include "compute/adam.h"

#define CHUNK_ELEMENTS (UINT64_C(1) << 19)
/* Checksums of a chunk's array; a 2-byte array uses one of them. */
#define CHUNK_CHECKSUMS (CHUNK_ELEMENTS * 4 / LH_CHECKSUM_BYTES)
#define THREAD_COUNT_MAX 256

/* The checksums of a chunk as adam_update() returns them: opaque bytes that only it reads. */
struct seal {
    uint32_t param[CHUNK_CHECKSUMS];
    uint32_t residual[CHUNK_CHECKSUMS];
    uint32_t moment1[CHUNK_CHECKSUMS];
    uint32_t moment2[CHUNK_CHECKSUMS];
};

/* One call: threads take chunks in turn until none is left. */
struct work {
    struct lh_adam_run run;
    struct lh_adam_scalars scalars;
    const struct lh_adam_kernel *kernel; /* NULL: only move the bytes */
    const struct seal *expected;         /* one per chunk; NULL: nothing is checked */
    struct seal *made;                   /* one per chunk; NULL: no checksums */
    _Atomic uint64_t chunk_next;
    _Atomic uint64_t wrong_chunk; /* UINT64_MAX: none */
};

static struct lh_adam_run chunk_run(const struct lh_adam_run *run, uint64_t first)
{
    struct lh_adam_run part = *run;

    part.param = (char *)run->param + first * lh_dtype_bytes(run->param_dtype);
    part.residual = run->residual
                        ? (char *)run->residual + first * lh_adam_residual_bytes(run->param_dtype)
                        : NULL;
    part.moment1 += first;
    part.moment2 += first;
    part.gradient = (const char *)run->gradient + first * lh_dtype_bytes(run->gradient_dtype);
    part.count = lh_min_u64(CHUNK_ELEMENTS, run->count - first);
    return part;
}

static int chunk_update(const struct work *work, const struct lh_adam_run *run, uint64_t index)
{
    struct seal *made = work->made + index;
    const struct seal *expected = work->expected ? work->expected + index : NULL;
    struct lh_adam_segment segment = {0, run->count, run->gradient, run->gradient_dtype,
                                      work->scalars};
    struct lh_adam_chunk chunk = {
        .param = run->param,
        .residual = run->residual,
        .moment1 = run->moment1,
        .moment2 = run->moment2,
        .count = run->count,
        .param_dtype = run->param_dtype,
        .segments = &segment,
        .segment_count = 1,
        .residual_expected = expected ? expected->residual : NULL,
        .moment1_expected = expected ? expected->moment1 : NULL,
        .moment2_expected = expected ? expected->moment2 : NULL,
        .param_checksums = made->param,
        .residual_checksums = made->residual,
        .moment1_checksums = made->moment1,
        .moment2_checksums = made->moment2,
    };
    struct lh_adam_mismatch mismatch;

    return lh_adam_chunk_update_by(work->kernel, &chunk, &mismatch);
}

static void *work_run(void *context)
{
    struct work *work = context;
    uint64_t chunk_count = lh_div_ceil(work->run.count, CHUNK_ELEMENTS);

    for (;;) {
        uint64_t index = atomic_fetch_add(&work->chunk_next, 1);
        struct lh_adam_run run;

        if (index >= chunk_count)
            return NULL;
        run = chunk_run(&work->run, index * CHUNK_ELEMENTS);
        if (!work->kernel)
            (void)lh_adam_stream(&run);
        else if (!work->made)
            work->kernel->run(&run, &work->scalars);
        else if (chunk_update(work, &run, index) < 0)
            atomic_store(&work->wrong_chunk, index);
    }
}

/*
 * Run work on thread_count threads, including the caller's, without the GIL. If a thread cannot be
 * started, the others do its share and the call fails anyway, because the caller measures the
 * threads. 0, or -1 with a Python error.
 */
static int work_on_threads(struct work *work, unsigned thread_count)
{
    pthread_t threads[THREAD_COUNT_MAX];
    unsigned started = 0;
    int rc = 0;

    LH_ASSERT(thread_count >= 1 && thread_count <= THREAD_COUNT_MAX);
    atomic_store(&work->chunk_next, 0);
    atomic_store(&work->wrong_chunk, UINT64_MAX);
    Py_BEGIN_ALLOW_THREADS
    while (rc == 0 && started + 1 < thread_count) {
        rc = lh_thread_start(&threads[started], NULL, work_run, work);
        started += rc == 0;
    }
    work_run(work);
    for (unsigned t = 0; t < started; t++)
        pthread_join(threads[t], NULL);
    Py_END_ALLOW_THREADS
    if (rc != 0) {
        PyErr_Format(PyExc_OSError, "only %u of %u threads could be started", started + 1,
                     thread_count);
        return -1;
    }
    if (atomic_load(&work->wrong_chunk) != UINT64_MAX) {
        PyErr_Format(PyExc_ValueError, "elements from %llu on do not match the expected checksums",
                     (unsigned long long)(atomic_load(&work->wrong_chunk) * CHUNK_ELEMENTS));
        return -1;
    }
    return 0;
}

static int dtype_from_name(const char *name, enum lh_dtype *dtype_out)
{
    if (strcmp(name, "float32") == 0) {
        *dtype_out = LH_DTYPE_F32;
    } else if (strcmp(name, "bfloat16") == 0) {
        *dtype_out = LH_DTYPE_BF16;
    } else if (strcmp(name, "float16") == 0) {
        *dtype_out = LH_DTYPE_F16;
    } else {
        PyErr_Format(PyExc_ValueError, "dtype must be float32, bfloat16 or float16, not %s", name);
        return -1;
    }
    return 0;
}

/* The arguments common to both functions over a whole run. */
struct run_arguments {
    unsigned long long param, residual, moment1, moment2, gradient, count;
    const char *param_dtype, *gradient_dtype;
    unsigned thread_count;
};

static int run_make(const struct run_arguments *arguments, struct lh_adam_run *run)
{
    if (dtype_from_name(arguments->param_dtype, &run->param_dtype) < 0 ||
        dtype_from_name(arguments->gradient_dtype, &run->gradient_dtype) < 0)
        return -1;
    if ((arguments->residual != 0) != (lh_adam_residual_bytes(run->param_dtype) > 0)) {
        PyErr_SetString(PyExc_ValueError,
                        "residual must be the residual of a bfloat16 param, the fp32"
                        " master of a float16 one, and 0 for a float32 one");
        return -1;
    }
    if (arguments->thread_count < 1 || arguments->thread_count > THREAD_COUNT_MAX) {
        PyErr_Format(PyExc_ValueError, "threads is %u: must be 1 to %d", arguments->thread_count,
                     THREAD_COUNT_MAX);
        return -1;
    }
    run->param = (void *)(uintptr_t)arguments->param;
    run->residual = (void *)(uintptr_t)arguments->residual;
    run->moment1 = (float *)(uintptr_t)arguments->moment1;
    run->moment2 = (float *)(uintptr_t)arguments->moment2;
    run->gradient = (const void *)(uintptr_t)arguments->gradient;
    run->count = arguments->count;
    return 0;
}

/* Find a kernel by name. NULL: the best one. */
static const struct lh_adam_kernel *kernel_by_name(const char *name)
{
    const struct lh_adam_kernel *kernels;
    int count = lh_adam_kernels(&kernels);

    for (int k = 0; k < count; k++)
        if (!name || strcmp(kernels[k].name, name) == 0)
            return kernels + k;
    PyErr_Format(PyExc_ValueError, "kernel %s is not available on this machine: see adam_kernels()",
                 name);
    return NULL;
}

static PyObject *adam_kernels(PyObject *module, PyObject *unused)
{
    const struct lh_adam_kernel *kernels;
    int count = lh_adam_kernels(&kernels);
    PyObject *names = PyTuple_New(count);

    (void)module;
    (void)unused;
    for (int k = 0; names && k < count; k++) {
        PyObject *name = PyUnicode_FromString(kernels[k].name);

        if (!name || PyTuple_SetItem(names, k, name) < 0) {
            Py_DECREF(names);
            return NULL;
        }
    }
    return names;
}

/* Make the bytes object that a call with checksums returns, and read the expected checksums. */
static PyObject *seals_make(struct work *work, PyObject *expected)
{
    Py_ssize_t bytes =
        (Py_ssize_t)(lh_div_ceil(work->run.count, CHUNK_ELEMENTS) * sizeof(struct seal));
    PyObject *made;

    if (expected != Py_None) {
        if (!PyBytes_Check(expected) || PyBytes_Size(expected) != bytes) {
            PyErr_Format(PyExc_ValueError,
                         "expected has the wrong size for a call over %llu elements",
                         (unsigned long long)work->run.count);
            return NULL;
        }
        work->expected = (const struct seal *)PyBytes_AsString(expected);
    }
    made = PyBytes_FromStringAndSize(NULL, bytes);
    if (made) {
        work->made = (struct seal *)PyBytes_AsString(made);
        memset(work->made, 0, (size_t)bytes);
    }
    return made;
}

static PyObject *adam_update(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "kernel",         "param_ptr", "residual_ptr", "moment1_ptr",    "moment2_ptr",
        "gradient_ptr",   "count",     "param_dtype",  "gradient_dtype", "lr",
        "beta1",          "beta2",     "eps",          "weight_decay",   "step",
        "gradient_scale", "threads",   "checksums",    "expected",       NULL};
    struct run_arguments a = {.thread_count = 1};
    struct lh_adam_hyper hyper;
    struct work work = {.kernel = NULL};
    const char *kernel_name;
    unsigned long long step;
    double gradient_scale;
    int checksums = 0;
    PyObject *expected = Py_None, *made = NULL;

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "zKKKKKKssdddddKd|IpO", names, &kernel_name, &a.param, &a.residual,
            &a.moment1, &a.moment2, &a.gradient, &a.count, &a.param_dtype, &a.gradient_dtype,
            &hyper.lr, &hyper.beta1, &hyper.beta2, &hyper.eps, &hyper.weight_decay, &step,
            &gradient_scale, &a.thread_count, &checksums, &expected) ||
        run_make(&a, &work.run) < 0)
        return NULL;
    if (step == 0) {
        PyErr_SetString(PyExc_ValueError, "step is 0: the first step is 1");
        return NULL;
    }
    work.kernel = kernel_by_name(kernel_name);
    if (!work.kernel)
        return NULL;
    work.scalars = lh_adam_scalars_make(&hyper, step, gradient_scale);
    if (checksums || expected != Py_None) {
        made = seals_make(&work, expected);
        if (!made)
            return NULL;
    }
    if (work_on_threads(&work, a.thread_count) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made ? made : Py_NewRef(Py_None);
}

static PyObject *stream_bound(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "param_ptr", "residual_ptr", "moment1_ptr",    "moment2_ptr", "gradient_ptr",
        "count",     "param_dtype",  "gradient_dtype", "threads",     NULL};
    struct run_arguments a = {.thread_count = 1};
    struct work work = {.kernel = NULL};

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKKKss|I", names, &a.param, &a.residual,
                                     &a.moment1, &a.moment2, &a.gradient, &a.count, &a.param_dtype,
                                     &a.gradient_dtype, &a.thread_count) ||
        run_make(&a, &work.run) < 0 || work_on_threads(&work, a.thread_count) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

static PyObject *adam_split(PyObject *module, PyObject *args)
{
    unsigned long long master, param, residual, count;

    (void)module;
    if (!PyArg_ParseTuple(args, "KKKK", &master, &param, &residual, &count))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lh_adam_split((const float *)(uintptr_t)master, (uint16_t *)(uintptr_t)param,
                  (int16_t *)(uintptr_t)residual, count);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyObject *adam_join(PyObject *module, PyObject *args)
{
    unsigned long long param, residual, master, count;

    (void)module;
    if (!PyArg_ParseTuple(args, "KKKK", &param, &residual, &master, &count))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lh_adam_join((const uint16_t *)(uintptr_t)param, (const int16_t *)(uintptr_t)residual,
                 (float *)(uintptr_t)master, count);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyObject *crc32c(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "value", NULL};
    unsigned value = 0;
    Py_buffer buffer;

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*|I", names, &buffer, &value))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    value = lh_crc32c(value, buffer.buf, (uint64_t)buffer.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return PyLong_FromUnsignedLong(value);
}

static PyMethodDef methods[] = {
    {"adam_kernels", adam_kernels, METH_NOARGS, "Names of the kernels, best first."},
    {"adam_update", (PyCFunction)(void (*)(void))adam_update, METH_VARARGS | METH_KEYWORDS,
     "One AdamW update; with checksums returns them, to be `expected` by the next."},
    {"adam_split", adam_split, METH_VARARGS, "(master, param, residual, count), addresses."},
    {"adam_join", adam_join, METH_VARARGS, "(param, residual, master, count), addresses."},
    {"stream_bound", (PyCFunction)(void (*)(void))stream_bound, METH_VARARGS | METH_KEYWORDS,
     "Move the bytes of an update and compute nothing; the arrays are garbage after."},
    {"crc32c", (PyCFunction)(void (*)(void))crc32c, METH_VARARGS | METH_KEYWORDS,
     "CRC-32C of a buffer, going on from value."},
    {NULL, NULL, 0, NULL},
};

int lhpy_adam_register(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
