/* Create an Engine: parse descriptions, divide memory, choose backends. */
#include <string.h>

#include "base/assert.h"
#include "compute/adam.h"
#include "py/engine_make.h"
#include "store/store.h"

/*
 * (bytes, place_bytes, elements, dtype, always, param_first, param_count, extents P R M V (-1:
 * none), store group)
 */
#define UNIT_FORMAT "KKKiiIIiiiiI"

static int unit_parse(PyObject *item, struct lh_engine_unit *unit)
{
    unsigned long long bytes, place_bytes, elements;
    int dtype, always, param, residual, moment1, moment2;
    unsigned int param_first, param_count, group;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a unit must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(item, UNIT_FORMAT, &bytes, &place_bytes, &elements, &dtype, &always,
                          &param_first, &param_count, &param, &residual, &moment1, &moment2,
                          &group))
        return -1;
    *unit = (struct lh_engine_unit){
        .bytes = bytes,
        .place_bytes = place_bytes,
        .elements = elements,
        .dtype = (enum lh_dtype)dtype,
        .always = always != 0,
        .param_first = param_first,
        .param_count = param_count,
        .param_extent = param < 0 ? LH_ENGINE_EXTENT_NONE : (uint32_t)param,
        .residual_extent = residual < 0 ? LH_ENGINE_EXTENT_NONE : (uint32_t)residual,
        .moment1_extent = moment1 < 0 ? LH_ENGINE_EXTENT_NONE : (uint32_t)moment1,
        .moment2_extent = moment2 < 0 ? LH_ENGINE_EXTENT_NONE : (uint32_t)moment2,
        .store_group = group,
    };
    return 0;
}

static int param_parse(PyObject *item, struct lh_engine_param *param)
{
    unsigned long long first, count;
    unsigned int unit, group;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "IKKI", &unit, &first, &count, &group)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a param must be a tuple");
        return -1;
    }
    *param = (struct lh_engine_param){.unit = unit, .first = first, .count = count, .group = group};
    return 0;
}

static int units_parse(struct lhpy_engine *self, PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    if (count < 0)
        return -1;
    self->units = PyMem_Calloc((size_t)count + 1, sizeof(*self->units));
    self->unit_states = PyMem_Calloc((size_t)count + 1, sizeof(*self->unit_states));
    self->bound_units = PyMem_Calloc((size_t)count + 1, sizeof(uint32_t));
    self->backward_units = PyMem_Calloc((size_t)count + 1, sizeof(uint32_t));
    self->unscoped_units = PyMem_Calloc((size_t)count + 1, sizeof(uint32_t));
    if (!self->units || !self->unit_states || !self->bound_units || !self->backward_units ||
        !self->unscoped_units) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (unit_parse(PyList_GetItem(list, i), &self->units[i]) < 0)
            return -1;
    }
    self->unit_count = (uint32_t)count;
    return 0;
}

static int params_parse(struct lhpy_engine *self, PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    if (count < 0)
        return -1;
    self->params = PyMem_Calloc((size_t)count + 1, sizeof(*self->params));
    self->engine_params = PyMem_Calloc((size_t)count + 1, sizeof(*self->engine_params));
    self->held_params = PyMem_Calloc((size_t)count + 1, sizeof(uint32_t));
    if (!self->params || !self->engine_params || !self->held_params) {
        PyErr_NoMemory();
        return -1;
    }
    self->param_count = (uint32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        struct lh_engine_param *param = &self->engine_params[i];
        if (param_parse(PyList_GetItem(list, i), param) < 0)
            return -1;
        if (param->unit >= self->unit_count) {
            PyErr_Format(PyExc_IndexError, "unit %u is out of range: there are %u units",
                         param->unit, self->unit_count);
            return -1;
        }
        const struct lh_engine_unit *unit = &self->units[param->unit];
        uint64_t scale = unit->elements > 0 ? lh_dtype_bytes(unit->dtype) : 1;
        self->params[i].byte_offset = param->first * scale;
    }
    return 0;
}

/* How gradients wait for the step's close. */
struct waiting {
    int is_any;
    int is_in_memory;
    int is_summed;
    int is_at_will;
    unsigned int block_bytes; /* per element, in blocks of main memory; 0: in torch's tensors */
};

static struct lh_budget_unit budget_unit(const struct lh_engine_unit *unit, uint64_t gradient_bytes,
                                         const struct waiting *waiting)
{
    uint32_t state_bytes = 8 + (uint32_t)lh_adam_residual_bytes(unit->dtype);
    return (struct lh_budget_unit){
        .bytes = unit->bytes,
        .elements = unit->elements,
        .gradient_bytes = gradient_bytes,
        .state_bytes_per_element = unit->elements == 0 ? 0 : state_bytes,
        .waiting_bytes_per_element =
            waiting->is_any && unit->elements > 0
                ? (uint32_t)lh_dtype_bytes(waiting->is_summed ? LH_DTYPE_F32 : unit->dtype)
                : 0,
        .waits_in_memory = waiting->is_in_memory || waiting->is_summed,
        .waits_at_will = waiting->is_at_will != 0,
        .block_bytes_per_element = unit->elements > 0 ? waiting->block_bytes : 0,
        .always = unit->always,
    };
}

static PyObject *budget_dict(const struct lh_budget *budget)
{
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:I,s:I,s:I,s:K,s:K,s:K,s:K,s:K,s:K}", "host_bytes",
                         budget->host_bytes, "region_bytes", budget->region_bytes, "chunk_elements",
                         budget->chunk_elements, "slab_bytes", budget->slab_bytes, "slab_count",
                         budget->slab_count, "chunk_count", budget->chunk_count, "kept_chunk_count",
                         budget->kept_chunk_count, "gradient_bytes", budget->gradient_bytes,
                         "gradient_ahead_bytes", budget->gradient_ahead_bytes,
                         "gradient_waiting_bytes", budget->gradient_waiting_bytes,
                         "bookkeeping_bytes", budget->bookkeeping_bytes, "host_bytes_min",
                         budget->host_bytes_min, "host_bytes_full", budget->host_bytes_full);
}

PyObject *lhpy_budget(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *list = NULL;
    PyObject *raiser = NULL;
    unsigned long long host_bytes, bookkeeping;
    struct waiting waiting = {0};
    if (!PyArg_ParseTuple(args, "O!KKpppIpO", &PyList_Type, &list, &host_bytes, &bookkeeping,
                          &waiting.is_any, &waiting.is_in_memory, &waiting.is_summed,
                          &waiting.block_bytes, &waiting.is_at_will, &raiser))
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    struct lh_budget_unit *units = PyMem_Calloc((size_t)count + 1, sizeof(*units));
    if (!units)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GetItem(list, i);
        struct lh_engine_unit unit;
        unsigned long long gradient_bytes = 0;
        unsigned long long together_bytes = 0;
        unsigned long long apart_bytes = 0;
        PyObject *description = NULL;
        if (!PyArg_ParseTuple(pair, "OKKK", &description, &gradient_bytes, &together_bytes,
                              &apart_bytes) ||
            unit_parse(description, &unit) < 0) {
            PyMem_Free(units);
            return NULL;
        }
        units[i] = budget_unit(&unit, gradient_bytes, &waiting);
        units[i].together_bytes = together_bytes;
        units[i].is_together = together_bytes == 0;
        units[i].apart_bytes = apart_bytes;
    }
    struct lh_error err = {0};
    struct lh_budget budget;
    int rc = lh_budget_make(units, (uint32_t)count, host_bytes, bookkeeping, &budget, &err);
    PyMem_Free(units);
    return rc < 0 ? lhpy_raise_error(raiser, &err) : budget_dict(&budget);
}

struct make_opts {
    PyObject *store;
    PyObject *budget;
    const char *io_name;   /* "auto" or a backend's */
    const char *directory; /* for the probe */
    unsigned int threads;
    int nice;
    unsigned int io_depth;
    unsigned long long transfer_bytes;
    unsigned long long commit_every;
    uint32_t schedule;
    int norms;
    int sums;
    int verify;
    unsigned int trace_count;
    unsigned int group_count;
    struct lhpy_device_opts device;
};

static int budget_read(PyObject *dict, struct lh_budget *budget)
{
    struct {
        const char *name;
        uint64_t *wide;
        uint32_t *narrow;
    } fields[] = {
        {"host_bytes", &budget->host_bytes, NULL},
        {"region_bytes", &budget->region_bytes, NULL},
        {"chunk_elements", &budget->chunk_elements, NULL},
        {"slab_bytes", &budget->slab_bytes, NULL},
        {"slab_count", NULL, &budget->slab_count},
        {"chunk_count", NULL, &budget->chunk_count},
        {"kept_chunk_count", NULL, &budget->kept_chunk_count},
        {"gradient_bytes", &budget->gradient_bytes, NULL},
        {"gradient_ahead_bytes", &budget->gradient_ahead_bytes, NULL},
        {"gradient_waiting_bytes", &budget->gradient_waiting_bytes, NULL},
    };
    for (size_t i = 0; i < LH_COUNT_OF(fields); i++) {
        PyObject *value = PyDict_GetItemString(dict, fields[i].name);
        if (!value) {
            PyErr_Format(PyExc_KeyError, "%s", fields[i].name);
            return -1;
        }
        unsigned long long number = PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred())
            return -1;
        if (fields[i].wide)
            *fields[i].wide = number;
        else
            *fields[i].narrow = (uint32_t)number;
    }
    return 0;
}

/*
 * Make the arena: memory for disk I/O; for sums of gradients, or for gradients that come from an
 * accelerator; and for saved tensors.
 */
static uint64_t moved_bytes(const struct lhpy_engine *self)
{
    return self->budget.region_bytes + self->budget.slab_count * self->budget.slab_bytes;
}

static uint64_t saved_offset(const struct lhpy_engine *self, const struct make_opts *opts)
{
    bool has_landings = strcmp(opts->device.name, "cpu") != 0 && !opts->sums;
    return lh_align_up(moved_bytes(self) + (opts->sums ? lhpy_sums_bytes(self) : 0) +
                           (has_landings ? self->budget.gradient_bytes : 0),
                       LH_BLOCK_BYTES);
}

static int io_make(struct lhpy_engine *self, const struct make_opts *opts, struct lh_store *store,
                   struct lh_error *err)
{
    struct lhpy_core *core = self->core;
    struct lh_clock clock = lh_clock_real();
    static struct lh_clock io_clock; /* the backends borrow it for life; it has no state */
    io_clock = clock;
    const struct lh_saved_opts *saved = &self->saved.opts;
    struct lh_io_buffer buffers[] = {{.base = core->arena->base, .bytes = moved_bytes(self)},
                                     {.base = saved->memory, .bytes = saved->memory_bytes}};
    struct lh_io_file files[LH_IO_FILE_COUNT_MAX];
    uint32_t file_count = lh_store_file_count(store);
    memcpy(files, lh_store_files(store), file_count * sizeof(*files));
    if (saved->store) {
        LH_ASSERT(file_count + lh_store_file_count(saved->store) <= LH_IO_FILE_COUNT_MAX);
        memcpy(files + file_count, lh_store_files(saved->store),
               lh_store_file_count(saved->store) * sizeof(*files));
        file_count += lh_store_file_count(saved->store);
    }
    self->in_place.opts.file_first = file_count;
    LH_ASSERT(file_count + self->in_place.opts.file_count <= LH_IO_FILE_COUNT_MAX);
    memcpy(files + file_count, self->in_place.io_files,
           self->in_place.opts.file_count * sizeof(*files));
    file_count += self->in_place.opts.file_count;
    struct lh_io_opts io_opts = {
        .files = files,
        .file_count = file_count,
        .buffers = buffers,
        .buffer_count = saved->memory_bytes > 0 ? 2 : 1,
        .queue_depth_max = opts->io_depth + 8 * LH_STORE_DIRECTORY_COUNT_MAX,
        .thread_count = 0,
        .waker = &core->waker,
        .clock = &io_clock,
    };
    if (strcmp(opts->io_name, "auto") == 0)
        return lh_io_create_best(opts->directory, &io_opts, &core->alloc, &self->io,
                                 self->io_reason, sizeof(self->io_reason), err);
    return lh_io_create(opts->io_name, &io_opts, &core->alloc, &self->io, err);
}

static int exec_make(struct lhpy_engine *self, const struct make_opts *opts, struct lh_error *err)
{
    static struct lh_clock exec_clock;
    exec_clock = lh_clock_real();
    struct lh_exec_threads_opts exec_opts = {
        .thread_count = opts->threads,
        .queue_depth_max = 4 * opts->io_depth + self->budget.slab_count + self->unit_count + 32,
        .nice = opts->nice,
        .waker = &self->core->waker,
        .clock = &exec_clock,
    };
    return lh_exec_threads_create(&exec_opts, &self->core->alloc, &self->exec, err);
}

static int engine_make(struct lhpy_engine *self, const struct make_opts *opts,
                       struct lh_store *store, struct lh_error *err)
{
    struct lhpy_core *core = self->core;
    struct lh_engine_opts engine_opts = {
        .units = self->units,
        .unit_count = self->unit_count,
        .params = self->engine_params,
        .param_count = self->param_count,
        .group_count = opts->group_count,
        .budget = &self->budget,
        .memory = core->arena->base,
        .memory_bytes = core->arena->bytes,
        .store = store,
        .io = self->io,
        .exec = self->exec,
        .waker = &core->waker,
        .clock = lh_clock_real(),
        .dev = core->dev,
        .device_memory = core->device_base,
        .device_bytes = opts->device.bytes,
        .saved = self->saved.opts,
        .in_place = self->in_place.opts,
        .gradients_in_memory = opts->sums != 0,
        .copy_count = core->dev ? LHPY_COPY_COUNT : 0,
        .io_depth = opts->io_depth,
        .transfer_bytes = opts->transfer_bytes,
        .commit_every = opts->commit_every,
        .schedule = (enum lh_engine_schedule)opts->schedule,
        .norms = opts->norms != 0,
        .verify = opts->verify != 0,
        .trace_count = opts->trace_count,
    };
    return lh_engine_create(&engine_opts, &core->alloc, &core->engine, err);
}

/* Create everything below Python that can block or fail. */
static int parts_make(struct lhpy_engine *self, const struct make_opts *opts,
                      struct lh_store *store, struct lh_error *err)
{
    struct lhpy_core *core = self->core;
    struct lh_saved_opts *saved = &self->saved.opts;
    struct lh_arena_opts arena_opts = {
        .bytes = saved_offset(self, opts) + saved->memory_bytes,
        .numa_node = -1,
    };
    LH_TRY(lh_waker_init(&core->waker, err));
    core->has_waker = true;
    LH_TRY(lh_arena_create(&arena_opts, &core->alloc, &core->arena, err));
    saved->memory = core->arena->base + saved_offset(self, opts);
    saved->file_first = lh_store_file_count(store);
    if (opts->sums)
        lhpy_sums_place(self, core->arena->base + moved_bytes(self));
    LH_TRY(lhpy_device_make(core, &opts->device, core->arena->base, core->arena->bytes, err));
    LH_TRY(io_make(self, opts, store, err));
    int rc = exec_make(self, opts, err);
    if (rc == 0)
        rc = engine_make(self, opts, store, err);
    if (rc < 0) {
        /* dealloc destroys the rest; io and exec must go before the waker that they borrow. */
        if (self->exec)
            self->exec->ops->destroy(self->exec);
        self->io->ops->destroy(self->io);
        self->exec = NULL;
        self->io = NULL;
        return rc;
    }
    lh_alloc_seal(&core->alloc);
    return 0;
}

static int opts_parse(struct lhpy_engine *self, PyObject *args, PyObject *kwargs,
                      struct make_opts *opts)
{
    static char *names[] = {
        "store",          "units",        "params",    "group_count", "budget",      "raiser",
        "types",          "io",           "directory", "threads",     "nice",        "io_depth",
        "transfer_bytes", "commit_every", "schedule",  "verify",      "trace_count", "norms",
        "sums",           "device",       "saved",     "in_place",    NULL};
    PyObject *saved = NULL;
    PyObject *in_place = NULL;
    PyObject *units = NULL;
    PyObject *params = NULL;
    PyObject *raiser = NULL;
    PyObject *handle_type = NULL;
    PyObject *scope_type = NULL;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO!O!IO!O(OO)syIiIKKIpIpp(siKKKO)O!O!:Engine", names, &opts->store,
            &PyList_Type, &units, &PyList_Type, &params, &opts->group_count, &PyDict_Type,
            &opts->budget, &raiser, &handle_type, &scope_type, &opts->io_name, &opts->directory,
            &opts->threads, &opts->nice, &opts->io_depth, &opts->transfer_bytes,
            &opts->commit_every, &opts->schedule, &opts->verify, &opts->trace_count, &opts->norms,
            &opts->sums, &opts->device.name, &opts->device.index, &opts->device.bytes,
            &opts->device.link_bytes_per_s[LH_DEV_DIRECTION_IN],
            &opts->device.link_bytes_per_s[LH_DEV_DIRECTION_OUT], &opts->device.memory,
            &PyTuple_Type, &saved, &PyTuple_Type, &in_place) ||
        lhpy_saved_parse(saved, &self->saved) < 0 ||
        lhpy_in_place_parse(in_place, &self->in_place) < 0)
        return -1;
    self->raiser = Py_NewRef(raiser);
    self->handle_type = Py_NewRef(handle_type);
    self->scope_type = Py_NewRef(scope_type);
    self->store = Py_NewRef(opts->store);
    if (units_parse(self, units) < 0 || params_parse(self, params) < 0)
        return -1;
    return budget_read(opts->budget, &self->budget);
}

PyObject *lhpy_engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct lhpy_engine *self = (struct lhpy_engine *)allocate(type, 0);
    if (!self)
        return NULL;
    struct make_opts opts = {0};
    struct lh_store *store = NULL;
    bool is_ready = opts_parse(self, args, kwargs, &opts) == 0 && lhpy_exchange();
    if (is_ready)
        store = lhpy_store_get(opts.store);
    if (!store) {
        Py_DECREF(self);
        return NULL;
    }
    self->core = lhpy_core_create();
    if (!self->core) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    bool has_memory = opts.device.memory != Py_None;
    if (has_memory &&
        lhpy_exchange()->managed_from_object(opts.device.memory, &self->core->device_memory) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    struct lh_error err = {0};
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = parts_make(self, &opts, store, &err);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        lhpy_raise_error(self->raiser, &err);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}
