/*
 * csrc/compute for Python's tests, benchmarks and doctor: plain functions over addresses. The
 * engine does not use them. Addresses and counts are trusted: the caller owns the arrays.
 *
 * Thread: with the GIL; it is released while arrays are worked on.
 */
#include "py/lhpy.h"

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
    uint32_t scales[CHUNK_CHECKSUMS];
};

/* One call: threads take chunks in turn until none is left. */
struct work {
    struct lh_adam_run run;
    struct lh_adam_moments moments; /* with states other than F32, instead of the run's */
    struct lh_adam_random random;
    struct lh_adam_scalars scalars;
    enum lh_rule rule;
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
    part.moment1 = run->moment1 ? run->moment1 + first : NULL;
    part.moment2 = run->moment2 ? run->moment2 + first : NULL;
    part.gradient = (const char *)run->gradient + first * lh_dtype_bytes(run->gradient_dtype);
    part.count = lh_min_u64(CHUNK_ELEMENTS, run->count - first);
    return part;
}

static void chunk_stream(const struct work *work, const struct lh_adam_run *run, uint64_t index)
{
    const struct lh_adam_moments part =
        lh_adam_moments_from(&work->moments, index * CHUNK_ELEMENTS);

    (void)lh_adam_stream(run, &part);
}

static int chunk_update(const struct work *work, const struct lh_adam_run *run, uint64_t index)
{
    const struct lh_adam_moments *moments = &work->moments;
    struct seal *made = work->made ? work->made + index : NULL;
    const struct seal *expected = work->expected ? work->expected + index : NULL;
    uint64_t first = index * CHUNK_ELEMENTS;
    bool has_scales = lh_adam_has_scales(moments->states);
    struct lh_adam_moments part = lh_adam_moments_from(moments, first);
    struct lh_adam_segment segment = {
        .count = run->count,
        .gradient = run->gradient,
        .gradient_dtype = run->gradient_dtype,
        .scalars = work->scalars,
        .param_first = first,
        .random = work->random,
    };
    struct lh_adam_chunk chunk = {
        .param = run->param,
        .residual = run->residual,
        .moment1 = part.moment1,
        .moment2 = part.moment2,
        .scales = part.scales,
        .count = run->count,
        .param_dtype = run->param_dtype,
        .states = moments->states,
        .rule = work->rule,
        .segments = &segment,
        .segment_count = 1,
        .residual_expected = expected ? expected->residual : NULL,
        .moment1_expected = expected ? expected->moment1 : NULL,
        .moment2_expected = expected ? expected->moment2 : NULL,
        .scales_expected = expected && has_scales ? expected->scales : NULL,
        .param_checksums = made ? made->param : NULL,
        .residual_checksums = made ? made->residual : NULL,
        .moment1_checksums = made ? made->moment1 : NULL,
        .moment2_checksums = made ? made->moment2 : NULL,
        .scales_checksums = made && has_scales ? made->scales : NULL,
    };
    struct lh_adam_mismatch mismatch;

    return lh_adam_chunk_update(work->kernel, &chunk, &mismatch);
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
            chunk_stream(work, &run, index);
        else if (!work->made && work->moments.states == LH_ADAM_STATES_F32)
            work->kernel->run[work->rule](&run, &work->scalars);
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

static const char *const dtype_names[] = {"float32", "bfloat16", "float16", NULL};

static const char *const states_names[] = {"fp32", "bf16", "8bit", "4bit", NULL};

int lhpy_rule_of(const char *name, enum lh_rule *rule_out)
{
    const struct lh_rule_row *row = lh_rules;

    while (name && row < lh_rules + LH_RULE_COUNT && strcmp(row->name, name) != 0)
        row++;
    if (row == lh_rules + LH_RULE_COUNT) {
        PyErr_Format(PyExc_ValueError, "there is no rule '%s'", name);
        return -1;
    }
    *rule_out = (enum lh_rule)(row - lh_rules);
    return 0;
}

/* Read the name of a rule, and check that it has the moments of a run. */
static int rule_take(struct work *work, const char *name)
{
    if (lhpy_rule_of(name, &work->rule) < 0)
        return -1;
    const struct lh_rule_row *row = &lh_rules[work->rule];
    if (row->has_rows || row->has_factors || row->has_matrices) {
        PyErr_Format(PyExc_ValueError, "rule '%s' needs %s, which only an engine has", row->name,
                     row->has_matrices ? "the updates of matrices" : "sums of rows");
        return -1;
    }
    bool is_4bit = work->moments.states == LH_ADAM_STATES_4BIT;
    if (is_4bit && !(row->has_moment1 && row->has_moment2)) {
        PyErr_Format(PyExc_ValueError, "rule '%s' has no moments in 4 bits", row->name);
        return -1;
    }
    if ((work->run.moment1 != NULL) == row->has_moment1 &&
        (work->run.moment2 != NULL) == (row->has_moment2 && !is_4bit))
        return 0;
    PyErr_Format(PyExc_ValueError, "rule '%s' has %s first and %s second moment%s", row->name,
                 row->has_moment1 ? "a" : "no", row->has_moment2 ? "a" : "no",
                 is_4bit ? ", both in the first one's array" : "");
    return -1;
}

/* The arguments common to both functions over a whole run. */
#define RUN_ARGS(run)                                                                              \
    LHPY_ARG_AS("param_ptr", (run).param), LHPY_ARG_AS("residual_ptr", (run).residual),            \
        LHPY_ARG_AS("moment1_ptr", (run).moment1), LHPY_ARG_AS("moment2_ptr", (run).moment2),      \
        LHPY_ARG_AS("gradient_ptr", (run).gradient), LHPY_ARG_AS("count", (run).count),            \
        LHPY_ARG_AS("param_dtype", (run).param_dtype, .names = dtype_names),                       \
        LHPY_ARG_AS("gradient_dtype", (run).gradient_dtype, .names = dtype_names)

static int run_check(const struct lh_adam_run *run)
{
    if ((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0))
        return 0;
    PyErr_SetString(PyExc_ValueError, "residual must be the residual of a bfloat16 param, the fp32"
                                      " master of a float16 one, and 0 for a float32 one");
    return -1;
}

/* Take the places of moments, which are in a run's arrays, and check them. */
static int moments_take(struct work *work, void *scales)
{
    struct lh_adam_moments *moments = &work->moments;

    moments->moment1 = work->run.moment1;
    moments->moment2 = work->run.moment2;
    moments->scales = scales;
    if (moments->states != LH_ADAM_STATES_F32 &&
        !lh_is_aligned(work->run.count, LH_ADAM_STATES_BLOCK)) {
        PyErr_Format(PyExc_ValueError, "count must be a multiple of %d", LH_ADAM_STATES_BLOCK);
        return -1;
    }
    if ((moments->scales != NULL) == lh_adam_has_scales(moments->states))
        return 0;
    PyErr_SetString(PyExc_ValueError, "scales_ptr is needed by 8-bit and 4-bit states alone");
    return -1;
}

/* Find a kernel by name. NULL: the best one. */
static const struct lh_adam_kernel *kernel_by_name(const char *name)
{
    const struct lh_adam_kernel *kernels;
    int count = lh_adam_kernels(&kernels);

    for (int k = 0; k < count; k++)
        if (!name || strcmp(kernels[k].name, name) == 0)
            return kernels + k;
    PyErr_Format(PyExc_ValueError, "kernel %s is not available on this machine", name);
    return NULL;
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

static PyObject *adam_update(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    struct lh_adam_hyper hyper = {0};
    struct work work = {.kernel = NULL};
    const char *kernel = NULL, *rule = NULL;
    uint64_t step = 0;
    double gradient_scale = 0;
    uint32_t threads = 1;
    bool checksums = false;
    void *scales = NULL;
    PyObject *expected = Py_None, *made = NULL;

    if (LHPY_ARGS(
            args, kwargs, LHPY_ARG(kernel, .may_be_none = true), RUN_ARGS(work.run),
            LHPY_ARG_AS("lr", hyper.lr), LHPY_ARG_AS("beta1", hyper.beta1),
            LHPY_ARG_AS("beta2", hyper.beta2), LHPY_ARG_AS("eps", hyper.eps),
            LHPY_ARG_AS("weight_decay", hyper.weight_decay), LHPY_ARG(step, .min = 1),
            LHPY_ARG(gradient_scale),
            LHPY_ARG(threads, .min = 1, .max = THREAD_COUNT_MAX, .is_optional = true),
            LHPY_ARG(checksums, .is_optional = true), LHPY_ARG(expected, .is_optional = true),
            LHPY_ARG_AS("states", work.moments.states, .names = states_names, .is_optional = true),
            LHPY_ARG_AS("scales_ptr", scales, .is_optional = true),
            LHPY_ARG(rule, .is_optional = true)) < 0 ||
        run_check(&work.run) < 0 || rule_take(&work, rule) < 0 || moments_take(&work, scales) < 0)
        return NULL;
    work.random.step = (uint32_t)step;
    work.kernel = kernel_by_name(kernel);
    if (!work.kernel)
        return NULL;
    work.scalars = lh_rules[work.rule].scalars(&hyper, step, gradient_scale);
    if (checksums || expected != Py_None) {
        made = seals_make(&work, expected);
        if (!made)
            return NULL;
    }
    if (work_on_threads(&work, threads) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made ? made : Py_NewRef(Py_None);
}

static PyObject *stream_bound(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    struct work work = {.kernel = NULL};
    uint32_t threads = 1;

    if (LHPY_ARGS(args, kwargs, RUN_ARGS(work.run),
                  LHPY_ARG(threads, .min = 1, .max = THREAD_COUNT_MAX, .is_optional = true),
                  LHPY_ARG_AS("states", work.moments.states, .names = states_names,
                              .is_optional = true)) < 0 ||
        run_check(&work.run) < 0)
        return NULL;
    work.moments.moment1 = work.run.moment1;
    work.moments.moment2 = work.run.moment2;
    if (work_on_threads(&work, threads) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

static PyObject *adam_split(PyObject *Py_UNUSED(module), PyObject *args)
{
    void *master, *param, *residual;
    uint64_t count;

    if (LHPY_ARGS(args, NULL, LHPY_ARG(master), LHPY_ARG(param), LHPY_ARG(residual),
                  LHPY_ARG(count)) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lh_adam_split(master, param, residual, count);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyObject *adam_join(PyObject *Py_UNUSED(module), PyObject *args)
{
    void *param, *residual, *master;
    uint64_t count;

    if (LHPY_ARGS(args, NULL, LHPY_ARG(param), LHPY_ARG(residual), LHPY_ARG(master),
                  LHPY_ARG(count)) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lh_adam_join(param, residual, master, count);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

/* The arguments common to both conversions of moments. */
#define MOMENTS_ARGS(moments, scales)                                                              \
    LHPY_ARG_AS("states", (moments).states, .names = states_names),                                \
        LHPY_ARG_AS("moment1_ptr", (moments).moment1),                                             \
        LHPY_ARG_AS("moment2_ptr", (moments).moment2), LHPY_ARG_AS("scales_ptr", scales)

static PyObject *adam_decode(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct lh_adam_moments moments;
    void *scales, *moment1, *moment2;
    uint64_t count;

    if (LHPY_ARGS(args, NULL, MOMENTS_ARGS(moments, scales), LHPY_ARG(moment1), LHPY_ARG(moment2),
                  LHPY_ARG(count)) < 0)
        return NULL;
    moments.scales = scales;
    Py_BEGIN_ALLOW_THREADS
    lh_adam_states_decode(NULL, &moments, moment1, moment2, count);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyObject *adam_encode(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct lh_adam_moments moments;
    struct lh_adam_random random = {.seed = LH_ADAM_SEED};
    void *scales, *moment1, *moment2;
    uint64_t first, count;

    if (LHPY_ARGS(args, NULL, MOMENTS_ARGS(moments, scales), LHPY_ARG(moment1), LHPY_ARG(moment2),
                  LHPY_ARG(first), LHPY_ARG(count), LHPY_ARG_AS("param", random.param),
                  LHPY_ARG_AS("step", random.step)) < 0)
        return NULL;
    moments.scales = scales;
    Py_BEGIN_ALLOW_THREADS
    lh_adam_states_root(moments.states, moment2, count);
    lh_adam_states_encode(NULL, &moments, moment1, moment2, first, count, &random);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyObject *crc32c(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    PyObject *buffer = NULL;
    uint32_t value = 0;
    Py_buffer view;

    if (LHPY_ARGS(args, kwargs, LHPY_ARG(buffer), LHPY_ARG(value, .is_optional = true)) < 0 ||
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    value = lh_crc32c(value, view.buf, (uint64_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(value);
}

static PyObject *crc32c_copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    void *to = NULL;
    const void *from = NULL;
    uint64_t bytes = 0;
    uint32_t value = 0;

    if (LHPY_ARGS(args, NULL, LHPY_ARG(to), LHPY_ARG(from), LHPY_ARG(bytes), LHPY_ARG(value)) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    value = lh_crc32c_copy(value, to, from, bytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(value);
}

static PyObject *rules(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    PyObject *made = PyTuple_New(LH_RULE_COUNT);

    for (Py_ssize_t i = 0; made && i < LH_RULE_COUNT; i++) {
        const struct lh_rule_row *row = &lh_rules[i];
        PyObject *item =
            Py_BuildValue("(sNNNN)", row->name, PyBool_FromLong(row->has_moment1),
                          PyBool_FromLong(row->has_moment2), PyBool_FromLong(row->has_rows),
                          PyBool_FromLong(row->has_factors));

        if (!item || PyTuple_SetItem(made, i, item) < 0)
            Py_CLEAR(made);
    }
    return made;
}

PyMethodDef lhpy_adam_functions[] = {
    {"adam_update", LHPY_KEYWORDS(adam_update),
     "One update; with checksums returns them, to be `expected` by the next."},
    {"rules", rules, METH_NOARGS,
     "(name, has_moment1, has_moment2, has_rows, has_factors) of every rule, in order."},
    {"adam_split", adam_split, METH_VARARGS, "(master, param, residual, count), addresses."},
    {"adam_join", adam_join, METH_VARARGS, "(param, residual, master, count), addresses."},
    {"adam_decode", adam_decode, METH_VARARGS,
     "(states, stored moments and scales, fp32 moments, count): addresses; whole blocks."},
    {"adam_encode", adam_encode, METH_VARARGS,
     "(states, stored moments and scales, fp32 moments, first, count, unit, step); the fp32 moments"
     " are garbage after."},
    {"stream_bound", LHPY_KEYWORDS(stream_bound),
     "Move the bytes of an update and compute nothing; the arrays are garbage after."},
    {"crc32c", LHPY_KEYWORDS(crc32c), "CRC-32C of a buffer, continued from value."},
    {"crc32c_copy", crc32c_copy, METH_VARARGS,
     "(to, from, bytes, value): copy bytes between addresses; their CRC-32C, continued from "
     "value."},
    {NULL, NULL, 0, NULL},
};
