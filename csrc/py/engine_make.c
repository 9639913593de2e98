/* Create an Engine: parse descriptions, divide memory, choose backends. */
#include <string.h>

#include "base/assert.h"
#include "compute/adam.h"
#include "py/lhpy.h"
#include "store/store.h"

static const struct lhpy_table unit_table = LHPY_TABLE(
    "a unit", LHPY_FORM_TUPLE, struct lh_engine_unit,
    LHPY_FIELDS(struct lh_engine_unit, bytes, place_bytes, elements),
    LHPY_FIELD(struct lh_engine_unit, dtype, .max = LH_DTYPE_BYTES),
    LHPY_FIELDS(struct lh_engine_unit, always, is_announced, family, param_first, param_count),
    LHPY_FIELD(struct lh_engine_unit, param_extent, .is_index = true),
    LHPY_FIELD(struct lh_engine_unit, residual_extent, .is_index = true),
    LHPY_FIELD(struct lh_engine_unit, moment1_extent, .is_index = true),
    LHPY_FIELD(struct lh_engine_unit, moment2_extent, .is_index = true),
    LHPY_FIELDS(struct lh_engine_unit, is_given, averages_idle),
    LHPY_FIELD(struct lh_engine_unit, rule, .max = LH_RULE_COUNT - 1),
    LHPY_FIELD(struct lh_engine_unit, states, .max = LH_ADAM_STATES_COUNT - 1),
    LHPY_FIELD(struct lh_engine_unit, scales_extent, .is_index = true),
    LHPY_FIELDS(struct lh_engine_unit, average_extent),
    LHPY_FIELD(struct lh_engine_unit, store_group));

static const struct lhpy_table param_table = LHPY_TABLE_PLAIN(
    "a param", LHPY_FORM_TUPLE, struct lh_engine_param, unit, first, count, group, number,
    row_elements, factor_rows, factor_columns, factor_first, matrix_rows, lr_ratio);

static const struct lhpy_table budget_table =
    LHPY_TABLE_PLAIN("a budget", LHPY_FORM_DICT, struct lh_budget, host_bytes, region_bytes,
                     chunk_elements, slab_bytes, slab_count, chunk_count, state_chunk_count,
                     kept_chunk_count, gradient_bytes, gradient_ahead_bytes, gradient_waiting_bytes,
                     bookkeeping_bytes, host_bytes_min, host_bytes_full);

/* --- budget() ----------------------------------------------------------------------------- */

/* A unit, and the gradients and units that are in memory while it is in use. */
struct demand {
    struct lh_engine_unit unit;
    uint64_t gradient_bytes;
    uint64_t together_bytes;
    uint64_t apart_bytes;
};

static const struct lhpy_table demand_table =
    LHPY_TABLE("a unit's demand", LHPY_FORM_TUPLE, struct demand,
               LHPY_STRUCT("unit", struct demand, unit, unit_table),
               LHPY_FIELDS(struct demand, gradient_bytes, together_bytes, apart_bytes));

/* How gradients wait for the step's close. */
struct waiting {
    bool is_any;
    bool is_in_memory;
    bool is_summed;
    bool is_at_will;
    uint32_t block_bytes; /* per element, in blocks of main memory; 0: in torch's tensors */
};

static struct lh_budget_unit budget_unit(const struct demand *demand, const struct waiting *waiting)
{
    const struct lh_engine_unit *unit = &demand->unit;
    bool has_states = !unit->is_given;
    return (struct lh_budget_unit){
        .bytes = unit->bytes,
        .elements = unit->elements,
        .gradient_bytes = demand->gradient_bytes,
        .state_bytes_per_element = lh_engine_state_bytes(unit),
        .state_bytes_per_block =
            unit->elements > 0 ? (uint32_t)lh_adam_block_bytes(unit->rule, unit->states) : 0,
        .is_whole = unit->elements > 0 && has_states && lh_rules[unit->rule].has_matrices,
        .waiting_bytes_per_element =
            waiting->is_any && unit->elements > 0
                ? (uint32_t)lh_dtype_bytes(waiting->is_summed && has_states ? LH_DTYPE_F32
                                                                            : unit->dtype)
                : 0,
        .waits_in_memory = waiting->is_in_memory || waiting->is_summed,
        .waits_at_will = waiting->is_at_will,
        .block_bytes_per_element = unit->elements > 0 ? waiting->block_bytes : 0,
        .together_bytes = demand->together_bytes,
        .is_together = demand->together_bytes == 0,
        .apart_bytes = demand->apart_bytes,
        .always = unit->always,
    };
}

PyObject *lhpy_budget(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct demand *demands = NULL;
    uint32_t count = 0;
    PyObject *raiser = NULL;
    uint64_t host_bytes = 0, bookkeeping_bytes = 0;
    struct waiting waiting = {0};
    if (LHPY_ARGS(args, NULL, LHPY_ARG_ROWS("units", demands, count, demand_table),
                  LHPY_ARG(host_bytes), LHPY_ARG(bookkeeping_bytes),
                  LHPY_ARG_AS("is_waiting", waiting.is_any),
                  LHPY_ARG_AS("waits_in_memory", waiting.is_in_memory),
                  LHPY_ARG_AS("is_summed", waiting.is_summed),
                  LHPY_ARG_AS("block_bytes_per_element", waiting.block_bytes),
                  LHPY_ARG_AS("waits_at_will", waiting.is_at_will), LHPY_ARG(raiser)) < 0)
        return NULL;
    struct lh_budget_unit *units = PyMem_Calloc((size_t)count + 1, sizeof(*units));
    for (uint32_t i = 0; units && i < count; i++)
        units[i] = budget_unit(&demands[i], &waiting);
    lhpy_free(&demand_table, demands, count);
    if (!units)
        return PyErr_NoMemory();
    struct lh_error err = {0};
    struct lh_budget budget;
    int rc = lh_budget_make(units, count, host_bytes, bookkeeping_bytes, &budget, &err);
    PyMem_Free(units);
    return rc < 0 ? lhpy_raise_error(raiser, &err) : lhpy_make(&budget_table, &budget);
}

/* --- Engine() ----------------------------------------------------------------------------- */

static const struct lhpy_table device_table = LHPY_TABLE(
    "device", LHPY_FORM_TUPLE, struct lhpy_device_opts,
    LHPY_FIELDS(struct lhpy_device_opts, name, index, numa_node, bytes),
    LHPY_FIELD_AS("in_bytes_per_s", struct lhpy_device_opts, link_bytes_per_s[LH_DEV_DIRECTION_IN]),
    LHPY_FIELD_AS("out_bytes_per_s", struct lhpy_device_opts,
                  link_bytes_per_s[LH_DEV_DIRECTION_OUT]),
    LHPY_FIELDS(struct lhpy_device_opts, tail_bytes, is_unified, memory));

struct types {
    PyObject *handle;
    PyObject *scope;
};

static const struct lhpy_table types_table = LHPY_TABLE(
    "types", LHPY_FORM_TUPLE, struct types, LHPY_FIELD(struct types, handle, .type = &PyType_Type),
    LHPY_FIELD(struct types, scope, .type = &PyType_Type));

struct make_opts {
    struct lh_engine_opts engine; /* what Python decides; the rest is added later */
    PyObject *store;
    const char *io_name;   /* "auto" or a backend's */
    const char *directory; /* for the probe */
    uint32_t threads;
    int32_t nice;
    bool sums;
    PyObject *apart; /* the store for gradients of steps that may be repeated, or None */
    struct lhpy_device_opts device;
    struct lhpy_team_opts team;
};

/*
 * The bytes of memory for disk I/O, which is the first part of the arena. Memory for sums of
 * gradients, or for gradients that come from an accelerator, for saved tensors and for packed bytes
 * that are kept follows.
 */
static uint64_t moved_bytes(const struct lhpy_engine *self)
{
    uint64_t region_bytes = self->core->has_team ? 0 : self->budget.region_bytes;
    return region_bytes + self->budget.slab_count * self->budget.slab_bytes;
}

/*
 * The bytes of the region whose pages are allocated when a parameter first comes there. Where most
 * parameters are frozen, wrap() of files that are read in place would otherwise spend most of its
 * time on pages that nothing uses yet. Disk I/O then does not register them, since that allocates
 * them, too. What a session trains, an accelerator's memory and shared memory are ready from the
 * start.
 */
static uint64_t later_bytes(const struct lhpy_engine *self, const struct make_opts *opts)
{
    uint64_t frozen_bytes = 0, trained_bytes = 0;
    for (uint32_t i = 0; i < self->unit_count; i++) {
        const struct lh_engine_unit *unit = &self->units[i];
        *(unit->elements == 0 ? &frozen_bytes : &trained_bytes) += unit->bytes;
    }
    bool is_cpu = strcmp(opts->device.name, "cpu") == 0;
    bool is_late = is_cpu && !self->core->has_team && frozen_bytes > trained_bytes;
    return is_late ? self->budget.region_bytes : 0;
}

/* Where gradients from an accelerator arrive: in landing blocks, or on their way to a sum. */
static uint64_t gradients_offset(const struct lhpy_engine *self, const struct make_opts *opts)
{
    return lh_align_up(moved_bytes(self) + (opts->sums ? lhpy_sums_bytes(self) : 0),
                       LH_BLOCK_BYTES);
}

static uint64_t saved_offset(const struct lhpy_engine *self, const struct make_opts *opts)
{
    bool has_device = strcmp(opts->device.name, "cpu") != 0;
    return lh_align_up(gradients_offset(self, opts) +
                           (has_device ? self->budget.gradient_bytes : 0) + opts->device.tail_bytes,
                       LH_BLOCK_BYTES);
}

static int io_make(struct lhpy_engine *self, const struct make_opts *opts, struct lh_store *store,
                   struct lh_error *err)
{
    struct lhpy_core *core = self->core;
    struct lh_clock clock = lh_clock_real();
    static struct lh_clock io_clock; /* the backends borrow it for life; it has no state */
    io_clock = clock;
    const struct lh_saved_opts *saved = &self->saved;
    struct lh_io_buffer buffers[4];
    uint32_t buffer_count = 0;
    uint64_t first = later_bytes(self, opts);
    if (moved_bytes(self) > first)
        buffers[buffer_count++] = (struct lh_io_buffer){.base = core->arena->base + first,
                                                        .bytes = moved_bytes(self) - first};
    if (saved->memory_bytes > 0)
        buffers[buffer_count++] =
            (struct lh_io_buffer){.base = saved->memory, .bytes = saved->memory_bytes};
    if (core->has_team && core->team.mate == 0)
        buffers[buffer_count++] =
            (struct lh_io_buffer){.base = core->team.region, .bytes = core->team.region_bytes};
    const struct lh_in_place_opts *in_place = &self->in_place.opts;
    if (in_place->kept_bytes > 0)
        buffers[buffer_count++] =
            (struct lh_io_buffer){.base = in_place->kept_memory, .bytes = in_place->kept_bytes};
    struct lh_io_file files[LH_IO_FILE_COUNT_MAX];
    uint32_t file_count = lh_store_file_count(store);
    memcpy(files, lh_store_files(store), file_count * sizeof(*files));
    if (saved->store) {
        LH_ASSERT(file_count + lh_store_file_count(saved->store) <= LH_IO_FILE_COUNT_MAX);
        memcpy(files + file_count, lh_store_files(saved->store),
               lh_store_file_count(saved->store) * sizeof(*files));
        file_count += lh_store_file_count(saved->store);
    }
    struct lh_store *apart = opts->engine.apart.store;
    if (apart) {
        LH_ASSERT(file_count + lh_store_file_count(apart) <= LH_IO_FILE_COUNT_MAX);
        memcpy(files + file_count, lh_store_files(apart),
               lh_store_file_count(apart) * sizeof(*files));
        file_count += lh_store_file_count(apart);
    }
    self->in_place.opts.file_first = file_count;
    LH_ASSERT(file_count + self->in_place.row_count <= LH_IO_FILE_COUNT_MAX);
    for (uint32_t i = 0; i < self->in_place.row_count; i++)
        files[file_count++] = self->in_place.rows[i].io_file;
    struct lh_io_opts io_opts = {
        .files = files,
        .file_count = file_count,
        .buffers = buffers,
        .buffer_count = buffer_count,
        .queue_depth_max = opts->engine.io_depth + 8 * LH_STORE_DIRECTORY_COUNT_MAX,
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
    uint32_t decode_count = 0;
    for (uint32_t i = 0; i < self->in_place.opts.unit_count; i++)
        decode_count += self->in_place.opts.units[i].pack_count > 0 ? LH_IN_PLACE_JOB_COUNT : 0;
    struct lh_exec_threads_opts exec_opts = {
        .thread_count = opts->threads,
        .queue_depth_max = 4 * opts->engine.io_depth + self->budget.slab_count + self->unit_count +
                           decode_count + 64,
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
    struct lh_engine_opts engine_opts = opts->engine;
    engine_opts.units = self->units;
    engine_opts.unit_count = self->unit_count;
    engine_opts.params = self->engine_params;
    engine_opts.param_count = self->param_count;
    engine_opts.budget = &self->budget;
    engine_opts.memory = core->arena->base;
    engine_opts.memory_bytes = core->arena->bytes;
    engine_opts.store = store;
    engine_opts.io = self->io;
    engine_opts.exec = self->exec;
    engine_opts.waker = &core->waker;
    engine_opts.clock = lh_clock_real();
    engine_opts.dev = core->dev;
    engine_opts.device_memory = core->device_base;
    engine_opts.device_bytes = opts->device.bytes;
    engine_opts.saved = self->saved;
    engine_opts.in_place = self->in_place.opts;
    engine_opts.team = core->has_team ? &core->team : NULL;
    engine_opts.gather_wait_ns = opts->team.gather_wait_ms * UINT64_C(1000000);
    engine_opts.gradients_in_memory = opts->sums;
    if (core->dev && opts->sums) {
        engine_opts.sum_memory = core->arena->base + gradients_offset(self, opts);
        engine_opts.sum_bytes = self->budget.gradient_bytes;
    }
    engine_opts.tail_bytes = opts->device.tail_bytes;
    engine_opts.tail_memory =
        core->arena->base + saved_offset(self, opts) - opts->device.tail_bytes;
    engine_opts.copy_count = core->dev ? LHPY_COPY_COUNT : 0;
    engine_opts.units_in_memory = opts->device.is_unified;
    return lh_engine_create(&engine_opts, &core->alloc, &core->engine, err);
}

/* Register with the accelerator what is copied there. Only the disks and AdamW use the slabs. */
static int memory_pin(struct lhpy_engine *self, const struct make_opts *opts, struct lh_error *err)
{
    const struct lhpy_core *core = self->core;
    uint8_t *base = core->arena->base;
    const struct lh_dev_buffer buffers[] = {
        {.base = core->has_team ? core->team.region : base,
         .bytes = core->has_team ? core->team.region_bytes : self->budget.region_bytes},
        {.base = base + gradients_offset(self, opts), /* and the tail of a commit's scalars */
         .bytes = saved_offset(self, opts) - gradients_offset(self, opts)},
        {.base = self->saved.memory, .bytes = self->saved.memory_bytes},
    };
    LH_TRY(lhpy_device_pin(self->core, buffers, LH_COUNT_OF(buffers), err));
    return opts->device.is_unified ? lhpy_device_find(self->core, buffers[0].base, err) : 0;
}

/* Create everything below Python that can block or fail. */
static int parts_make(struct lhpy_engine *self, struct make_opts *opts, struct lh_store *store,
                      struct lh_error *err)
{
    struct lhpy_core *core = self->core;
    struct lh_saved_opts *saved = &self->saved;
    struct lh_arena_opts arena_opts = {.numa_node = opts->device.numa_node};
    LH_TRY(lh_waker_init(&core->waker, err));
    core->has_waker = true;
    LH_TRY(lhpy_team_make(self, &opts->team, err));
    uint64_t kept_offset =
        lh_align_up(saved_offset(self, opts) + saved->memory_bytes, LH_BLOCK_BYTES);
    /* A process that reads a team's parameters, and has no states, needs none of its own. */
    arena_opts.bytes = lh_max_u64(kept_offset + self->in_place.opts.kept_bytes, LH_BLOCK_BYTES);
    arena_opts.later_bytes = later_bytes(self, opts);
    LH_TRY(lh_arena_create(&arena_opts, &core->alloc, &core->arena, err));
    saved->memory = core->arena->base + saved_offset(self, opts);
    self->in_place.opts.kept_memory = core->arena->base + kept_offset;
    saved->file_first = lh_store_file_count(store);
    opts->engine.apart.file_first =
        saved->file_first + (saved->store ? lh_store_file_count(saved->store) : 0);
    if (opts->sums)
        lhpy_sums_place(self, core->arena->base + moved_bytes(self));
    LH_TRY(lhpy_device_make(core, &opts->device, err));
    LH_TRY(memory_pin(self, opts, err));
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

/* Make what the binding keeps for each unit and parameter. -1 with a Python error. */
static int states_make(struct lhpy_engine *self)
{
    size_t unit_count = (size_t)self->unit_count + 1;
    size_t param_count = (size_t)self->param_count + 1;
    self->unit_states = PyMem_Calloc(unit_count, sizeof(*self->unit_states));
    self->bound_units = PyMem_Calloc(unit_count, sizeof(uint32_t));
    self->backward_units = PyMem_Calloc(unit_count, sizeof(uint32_t));
    self->unscoped_units = PyMem_Calloc(unit_count, sizeof(uint32_t));
    self->params = PyMem_Calloc(param_count, sizeof(*self->params));
    self->held_params = PyMem_Calloc(param_count, sizeof(uint32_t));
    if (self->sum_leaf_count > 0)
        self->sum_trees = PyMem_Calloc(param_count, sizeof(*self->sum_trees));
    if (!self->unit_states || !self->bound_units || !self->backward_units ||
        !self->unscoped_units || !self->params || !self->held_params ||
        (self->sum_leaf_count > 0 && !self->sum_trees)) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < unit_count; i++)
        self->bound_units[i] = LHPY_UNIT_NONE;
    for (uint32_t i = 0; i < self->param_count; i++) {
        const struct lh_engine_param *param = &self->engine_params[i];
        if (lhpy_index_check("unit", param->unit, self->unit_count) < 0)
            return -1;
        const struct lh_engine_unit *unit = &self->units[param->unit];
        uint64_t scale = unit->elements > 0 ? lh_dtype_bytes(unit->dtype) : 1;
        self->params[i].byte_offset = param->first * scale;
    }
    return 0;
}

static int opts_read(struct lhpy_engine *self, PyObject *args, PyObject *kwargs,
                     struct make_opts *opts)
{
    struct lhpy_saved_make saved = {0};
    struct types types;
    PyObject *raiser = NULL;
    PyObject *in_place = NULL;
    struct lh_engine_opts *engine = &opts->engine;
    if (LHPY_ARGS(args, kwargs, LHPY_ARG_AS("store", opts->store),
                  LHPY_ARG_ROWS("units", self->units, self->unit_count, unit_table),
                  LHPY_ARG_ROWS("params", self->engine_params, self->param_count, param_table),
                  LHPY_ARG_AS("group_count", engine->group_count),
                  LHPY_ARG_STRUCT("budget", self->budget, budget_table), LHPY_ARG(raiser),
                  LHPY_ARG_STRUCT("types", types, types_table), LHPY_ARG_AS("io", opts->io_name),
                  LHPY_ARG_AS("directory", opts->directory), LHPY_ARG_AS("threads", opts->threads),
                  LHPY_ARG_AS("nice", opts->nice), LHPY_ARG_AS("io_depth", engine->io_depth),
                  LHPY_ARG_AS("transfer_bytes", engine->transfer_bytes),
                  LHPY_ARG_AS("commit_every", engine->commit_every),
                  LHPY_ARG_AS("schedule", engine->schedule, .max = LH_ENGINE_SCHEDULE_COUNT - 1),
                  LHPY_ARG_AS("verify", engine->verify),
                  LHPY_ARG_AS("trace_count", engine->trace_count),
                  LHPY_ARG_AS("accept_nan", engine->accept_nan),
                  LHPY_ARG_AS("norms", engine->norms), LHPY_ARG_AS("repeats", engine->repeats),
                  LHPY_ARG_AS("apart", opts->apart), LHPY_ARG_AS("sums", opts->sums),
                  LHPY_ARG_AS("sum_leaves", self->sum_leaf_count, .max = LH_SUM_LEAF_END),
                  LHPY_ARG_STRUCT("device", opts->device, device_table),
                  LHPY_ARG_STRUCT("saved", saved, lhpy_saved_table), LHPY_ARG(in_place),
                  LHPY_ARG_STRUCT("team", opts->team, lhpy_team_table)) < 0 ||
        lhpy_read(&lhpy_in_place_table, in_place, &self->in_place) < 0 ||
        lhpy_in_place_prepare(&self->in_place) < 0)
        return -1;
    LH_ASSERT(in_place && raiser && types.handle && types.scope && opts->store && saved.object);
    self->in_place_object = Py_NewRef(in_place);
    self->raiser = Py_NewRef(raiser);
    self->handle_type = Py_NewRef(types.handle);
    self->scope_type = Py_NewRef(types.scope);
    self->store = Py_NewRef(opts->store);
    self->saved_store = Py_NewRef(saved.object);
    self->apart_store = Py_NewRef(opts->apart);
    if (opts->apart != Py_None) {
        engine->apart.store = lhpy_store_get(opts->apart);
        if (!engine->apart.store)
            return -1;
    }
    self->saved = saved.opts;
    if (saved.object != Py_None) {
        self->saved.store = lhpy_store_get(saved.object);
        if (!self->saved.store)
            return -1;
    }
    return states_make(self);
}

PyObject *lhpy_engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct lhpy_engine *self = lhpy_type_new((PyObject *)type);
    if (!self)
        return NULL;
    struct make_opts opts = {0};
    struct lh_store *store = NULL;
    if (opts_read(self, args, kwargs, &opts) == 0 && lhpy_exchange())
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
