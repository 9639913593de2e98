/* simulate(): a step in virtual time, on a machine and a model of plain numbers. */
#include <string.h>

#include "py/lhpy.h"
#include "sim/timing.h"

/* The largest rate, time or count of bytes; larger ones are unrealistic and overflow sums. */
#define NUMBER_MAX (UINT64_C(1) << 60)
#define LATENCY_NS_MAX (10 * LH_SIM_NS_PER_S)
#define WORKER_COUNT_MAX 64
#define QUEUE_DEPTH_MAX 1024
#define BLOCK_COUNT_MAX 4096
#define PART_COUNT_MAX 65536
#define SAVED_COUNT_MAX 65536
#define SCALES_COUNT_MAX (1 << 24)
#define COPY_COUNT 64
#define CARD_QUEUE_DEPTH 64
#define MICRO_STEP_COUNT_MAX 1024
#define TRACE_COUNT_MAX (UINT32_C(1) << 24)

/* Room for saved tensors. */
static const struct lhpy_table saved_opts_table =
    LHPY_TABLE("room", LHPY_FORM_DICT, struct lh_sim_saved_opts,
               LHPY_FIELD(struct lh_sim_saved_opts, memory_bytes, .max = NUMBER_MAX),
               LHPY_FIELD(struct lh_sim_saved_opts, transit_bytes, .max = NUMBER_MAX),
               LHPY_FIELD(struct lh_sim_saved_opts, ssd_bytes, .max = NUMBER_MAX),
               LHPY_FIELD(struct lh_sim_saved_opts, out_bytes, .max = NUMBER_MAX),
               LHPY_FIELD(struct lh_sim_saved_opts, ahead_bytes, .max = NUMBER_MAX));

#define MACHINE(name, member, ...) LHPY_FIELD_AS(name, struct lh_sim_machine, member, __VA_ARGS__)
static const struct lhpy_table machine_table = LHPY_TABLE(
    "a machine", LHPY_FORM_DICT, struct lh_sim_machine,
    MACHINE("ssd_count", ssd_count, .min = 1, .max = LH_SIM_SSD_COUNT_MAX),
    MACHINE("ssd_read_bytes_per_s", ssd.bytes_per_s[LH_SIM_DIRECTION_READ], .min = 1,
            .max = NUMBER_MAX),
    MACHINE("ssd_write_bytes_per_s", ssd.bytes_per_s[LH_SIM_DIRECTION_WRITE], .min = 1,
            .max = NUMBER_MAX),
    MACHINE("ssd_total_bytes_per_s", cap_bytes_per_s, .max = NUMBER_MAX),
    MACHINE("ssd_latency_ns", ssd.latency_ns, .max = LATENCY_NS_MAX),
    MACHINE("ssd_queue_depth", ssd.queue_depth, .min = 1, .max = QUEUE_DEPTH_MAX),
    MACHINE("ssd_sync_ns", sync_ns, .max = LATENCY_NS_MAX),
    MACHINE("worker_count", worker_count, .min = 1, .max = WORKER_COUNT_MAX),
    MACHINE("worker_bytes_per_s", worker_bytes_per_s, .min = 1, .max = NUMBER_MAX),
    MACHINE("device_bytes", accelerator.bytes, .max = NUMBER_MAX),
    MACHINE("copy_in_bytes_per_s", accelerator.link.bytes_per_s[0], .min = 1, .max = NUMBER_MAX),
    MACHINE("copy_out_bytes_per_s", accelerator.link.bytes_per_s[1], .min = 1, .max = NUMBER_MAX),
    MACHINE("copy_latency_ns", accelerator.link.latency_ns, .max = LATENCY_NS_MAX));

#define CLUSTER(name, member, ...)                                                                 \
    LHPY_FIELD_AS(name, struct lh_sim_cluster_opts, member, __VA_ARGS__)
static const char *const division_names[] = {"whole", "shards", NULL};
static const struct lhpy_table cluster_table = LHPY_TABLE(
    "a cluster", LHPY_FORM_DICT, struct lh_sim_cluster_opts,
    CLUSTER("node_count", node_count, .min = 1, .max = LH_SIM_NODE_COUNT_MAX),
    CLUSTER("gpu_count", gpu_count, .min = 1, .max = LH_SIM_GPU_COUNT_MAX),
    CLUSTER("micro_steps", micro_steps, .min = 1, .max = MICRO_STEP_COUNT_MAX),
    CLUSTER("division", division, .names = division_names),
    CLUSTER("net_bytes_per_s", card.bytes_per_s[LH_SIM_DIRECTION_WRITE], .max = NUMBER_MAX),
    CLUSTER("net_latency_ns", card.latency_ns, .max = LATENCY_NS_MAX),
    CLUSTER("is_mirror", is_mirror));

/* One parameter; packs: a frozen unit of parameters that are read in their packed form. */
struct unit {
    enum lh_dtype dtype;
    bool always;
    uint64_t elements;
    struct lh_unpack *packs;
    uint32_t pack_count;
    uint64_t work_bytes; /* what its update takes beside memory traffic: struct lh_engine_unit */
    bool has_others;     /* it is trained by the rule that `others` names */
};

static const char *const states_names[] = {"fp32", "bf16", "8bit", "4bit", NULL};

static const char *const dtype_names[] = {"float32", "bfloat16", "float16", "frozen", NULL};
static const struct lhpy_table unit_table = LHPY_TABLE(
    "a unit", LHPY_FORM_TUPLE, struct unit, LHPY_FIELD(struct unit, dtype, .names = dtype_names),
    LHPY_FIELD(struct unit, always),
    LHPY_FIELD(struct unit, elements, .min = 1, .max = NUMBER_MAX / 64),
    {.name = "packs",
     .kind = LHPY_KIND_ROWS,
     .place = offsetof(struct unit, packs),
     .count_place = offsetof(struct unit, pack_count),
     .table = &lhpy_unpack_table,
     .is_optional = true},
    LHPY_FIELD(struct unit, work_bytes, .is_optional = true, .max = NUMBER_MAX / 64),
    LHPY_FIELD(struct unit, has_others, .is_optional = true));

/* A tensor, or several combined, that a part of a block saves. */
struct saved {
    uint64_t bytes;
    bool is_on_ssd;
};

static const struct lhpy_table saved_table =
    LHPY_TABLE("a saved tensor", LHPY_FORM_TUPLE, struct saved,
               LHPY_FIELD(struct saved, bytes, .min = 1, .max = NUMBER_MAX / 1024),
               LHPY_FIELD(struct saved, is_on_ssd));

struct part {
    uint64_t forward_ns;
    uint64_t backward_ns;
    struct saved *saved;
    uint32_t saved_count;
};

static const struct lhpy_table part_table =
    LHPY_TABLE("a part", LHPY_FORM_TUPLE, struct part,
               LHPY_FIELD(struct part, forward_ns, .max = NUMBER_MAX / 1024),
               LHPY_FIELD(struct part, backward_ns, .max = NUMBER_MAX / 1024),
               LHPY_ROWS("saved", struct part, saved, saved_count, saved_table));

static const struct lhpy_table index_table = LHPY_TABLE_OF("a block's unit", uint32_t);

struct block {
    uint32_t *units;
    uint32_t unit_count;
    struct part *parts;
    uint32_t part_count;
    uint64_t room_bytes; /* for saved tensors */
};

static const struct lhpy_table block_table =
    LHPY_TABLE("a block", LHPY_FORM_TUPLE, struct block,
               LHPY_ROWS("units", struct block, units, unit_count, index_table),
               LHPY_ROWS("parts", struct block, parts, part_count, part_table),
               LHPY_FIELD(struct block, room_bytes, .is_optional = true));

/* The arguments of simulate() besides options. */
struct input {
    struct unit *units;
    uint32_t unit_count;
    struct block *blocks;
    uint32_t block_count;
    enum lh_rule rule;
    enum lh_rule others;
    enum lh_adam_states states;
    bool has_sums;
};

/* Set the machine's fields that its dict does not have. */
static void machine_complete(struct lh_sim_machine *machine)
{
    struct lh_sim_accelerator *accelerator = &machine->accelerator;
    accelerator->link.queue_depth = COPY_COUNT;
    accelerator->link.duplex = true;
    accelerator->bytes = accelerator->bytes / LH_BLOCK_BYTES * LH_BLOCK_BYTES;
    accelerator->copy_count = accelerator->bytes > 0 ? COPY_COUNT : 0;
}

static int block_add(const struct block *from, struct lh_sim_model *model)
{
    struct lh_sim_block block = {.unit_count = from->unit_count,
                                 .saved_room_bytes = lh_min_u64(from->room_bytes, NUMBER_MAX)};
    if (from->unit_count > LH_SIM_BLOCK_UNIT_COUNT_MAX || from->part_count < 1 ||
        from->part_count > PART_COUNT_MAX - model->part_count) {
        PyErr_Format(PyExc_ValueError, "invalid block: %u units and %u parts", from->unit_count,
                     from->part_count);
        return -1;
    }
    for (uint32_t i = 0; i < from->unit_count; i++) {
        block.units[i] = from->units[i];
        if (block.units[i] < model->unit_count)
            continue;
        PyErr_Format(PyExc_ValueError, "unit %u is out of range: there are %u units",
                     block.units[i], model->unit_count);
        return -1;
    }
    for (uint32_t i = 0; i < from->part_count; i++) {
        const struct part *part = &from->parts[i];
        block.forward_ns = part->forward_ns;
        block.backward_ns = part->backward_ns;
        if (i == 0)
            lh_sim_model_block_add(model, &block); /* also adds the block's first part */
        else
            lh_sim_model_part_add(model, part->forward_ns, part->backward_ns);
        if (part->saved_count > SAVED_COUNT_MAX - model->saved_count) {
            PyErr_Format(PyExc_ValueError, "more than %d saved tensors", SAVED_COUNT_MAX);
            return -1;
        }
        for (uint32_t k = 0; k < part->saved_count; k++)
            lh_sim_model_saved_add(model, part->saved[k].bytes,
                                   part->saved[k].is_on_ssd ? LH_SAVED_TIER_SSD
                                                            : LH_SAVED_TIER_MEMORY);
    }
    return 0;
}

static int unit_check(const struct unit *unit)
{
    bool is_good = unit->pack_count <= LH_SIM_PACK_COUNT_MAX;
    for (uint32_t i = 0; is_good && i < unit->pack_count; i++)
        is_good = lh_unpack_is_valid(&unit->packs[i]);
    if (is_good && (unit->pack_count == 0 || unit->dtype == LH_DTYPE_BYTES))
        return 0;
    PyErr_Format(PyExc_ValueError, "a unit of %u packed parameters is invalid: it has to be frozen",
                 unit->pack_count);
    return -1;
}

static void unit_add(const struct input *input, const struct unit *unit, struct lh_sim_model *model)
{
    struct lh_sim_unit_desc desc = {.dtype = unit->dtype,
                                    .always = unit->always,
                                    .counts = &unit->elements,
                                    .count = 1,
                                    .packs = unit->pack_count > 0 ? unit->packs : NULL,
                                    .pack_count = unit->pack_count};
    if (unit->dtype != LH_DTYPE_BYTES) {
        desc.rule = unit->has_others ? input->others : input->rule;
        desc.work_bytes = unit->work_bytes;
        desc.states = input->states;
    }
    (void)lh_sim_model_unit_add(model, &desc);
}

/* Make a model from the input. The caller owns *model, also after an error. */
static int model_make(const struct input *input, struct lh_alloc *alloc, struct lh_sim_model *model)
{
    uint64_t scales_count = 0;
    for (uint32_t i = 0; i < input->unit_count; i++) {
        if (unit_check(&input->units[i]) < 0)
            return -1;
        if (lh_adam_block_bytes(input->rule, input->states) > 0 &&
            input->units[i].dtype != LH_DTYPE_BYTES)
            scales_count += lh_sim_model_scales_count(input->units[i].elements);
    }
    struct lh_sim_model_opts opts = {.scales_max = (uint32_t)scales_count,
                                     .packed_max = input->unit_count,
                                     .unit_max = input->unit_count,
                                     .param_max = input->unit_count,
                                     .block_max = input->block_count,
                                     .saved_max = SAVED_COUNT_MAX,
                                     .part_max = PART_COUNT_MAX};
    if (scales_count > SCALES_COUNT_MAX || input->unit_count < 1 || input->block_count < 1 ||
        input->unit_count > BLOCK_COUNT_MAX || input->block_count > BLOCK_COUNT_MAX) {
        PyErr_Format(PyExc_ValueError, "invalid model: %u units and %u blocks", input->unit_count,
                     input->block_count);
        return -1;
    }
    if (lh_sim_model_init(model, &opts, alloc, NULL) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < input->unit_count; i++)
        unit_add(input, &input->units[i], model);
    model->has_sums = input->has_sums;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < input->block_count; i++)
        rc = block_add(&input->blocks[i], model);
    return rc;
}

static const struct lhpy_table timing_table =
    LHPY_TABLE("a timing", LHPY_FORM_DICT, struct lh_sim_timing,
               LHPY_FIELDS(struct lh_sim_timing, begin_ns, step_ns, commit_ns, commit_write_bytes,
                           forward_ns, backward_ns, close_wait_ns, compute_ns, forward_wait_ns,
                           backward_wait_ns, gradient_wait_ns, saved_wait_ns),
               LHPY_FIELD_AS("update_busy_ns", struct lh_sim_timing, stats.update_busy_ns),
               LHPY_FIELD_AS("deferred_units", struct lh_sim_timing, stats.deferred_units),
               LHPY_FIELD_AS("host_bytes", struct lh_sim_timing, budget.host_bytes),
               LHPY_FIELD_AS("host_bytes_min", struct lh_sim_timing, budget.host_bytes_min),
               LHPY_FIELD_AS("region_bytes", struct lh_sim_timing, budget.region_bytes),
               LHPY_FIELD_AS("gradient_bytes", struct lh_sim_timing, budget.gradient_bytes),
               LHPY_FIELDS(struct lh_sim_timing, ssd_bytes, net_bytes, plan_around_count));

/* Make the result's dict; its trace is bytes with the events (struct lh_engine_trace_event). */
static PyObject *timing_dict(const struct lh_sim_timing *timing,
                             const struct lh_engine_trace_event *events)
{
    uint64_t slab_bytes = timing->budget.slab_count * timing->budget.slab_bytes;
    PyObject *dict = lhpy_make(&timing_table, timing);
    dict = lhpy_dict_add(dict, "slab_bytes", PyLong_FromUnsignedLongLong(slab_bytes));
    dict = lhpy_dict_add(
        dict, "trace",
        PyBytes_FromStringAndSize((const char *)events,
                                  (Py_ssize_t)(timing->trace_count * sizeof(*events))));
    PyObject *bytes = PyDict_New();
    for (int i = 0; bytes && i < LH_ENGINE_LINK_COUNT; i++)
        bytes = lhpy_dict_add(bytes, lhpy_link_names[i],
                              PyLong_FromUnsignedLongLong(timing->stats.bytes[i]));
    return lhpy_dict_add(dict, "bytes", bytes);
}

/* Whether a signal arrived meanwhile; its Python error stays set. */
static bool is_interrupted(void *context)
{
    (void)context;
    PyGILState_STATE state = PyGILState_Ensure();
    bool is_set = PyErr_CheckSignals() < 0;
    PyGILState_Release(state);
    return is_set;
}

static PyObject *run(const struct input *input, struct lh_sim_timing_opts *opts, PyObject *raiser)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_sim_model model = {.alloc = &alloc};
    struct lh_error err = {0};
    struct lh_sim_timing timing;
    PyObject *made = NULL;
    opts->model = &model;
    opts->is_cancelled = is_interrupted;
    if (opts->trace_max > 0)
        opts->trace = lh_alloc_zeroed(&alloc, opts->trace_max, sizeof(*opts->trace));
    if (opts->trace_max > 0 && !opts->trace) {
        PyErr_NoMemory();
    } else if (model_make(input, &alloc, &model) == 0) {
        int rc;
        Py_BEGIN_ALLOW_THREADS
        rc = lh_sim_timing_run(opts, &alloc, &timing, &err);
        Py_END_ALLOW_THREADS
        if (rc == 0)
            made = timing_dict(&timing, opts->trace);
        else if (!PyErr_Occurred())
            lhpy_raise_error(raiser, &err);
    }
    lh_sim_model_deinit(&model);
    lh_free(&alloc, opts->trace);
    opts->model = NULL;
    opts->trace = NULL;
    return made;
}

PyObject *lhpy_simulate(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    struct input input = {0};
    struct lh_sim_timing_opts opts = {0};
    struct lh_sim_cluster_opts cluster = {0};
    PyObject *raiser = NULL;
    const char *rule = NULL;
    const char *others = NULL;
    if (LHPY_ARGS(
            args, kwargs, LHPY_ARG_ROWS("units", input.units, input.unit_count, unit_table),
            LHPY_ARG_ROWS("blocks", input.blocks, input.block_count, block_table),
            LHPY_ARG_STRUCT("machine", opts.machine, machine_table),
            LHPY_ARG_STRUCT("saved", opts.saved, saved_opts_table),
            LHPY_ARG_AS("host_bytes", opts.host_bytes, .max = NUMBER_MAX),
            LHPY_ARG_AS("schedule", opts.schedule, .max = LH_ENGINE_SCHEDULE_COUNT - 1),
            LHPY_ARG_AS("commit_every", opts.commit_every),
            LHPY_ARG_AS("io_depth", opts.io_depth, .min = 1, .max = QUEUE_DEPTH_MAX),
            LHPY_ARG_AS("transfer_bytes", opts.transfer_bytes, .min = LH_MIB, .max = LH_GIB),
            LHPY_ARG_AS("only_checks", opts.only_checks), LHPY_ARG(raiser),
            LHPY_ARG_AS("trace_count", opts.trace_max, .is_optional = true, .max = TRACE_COUNT_MAX),
            LHPY_ARG_STRUCT("cluster", cluster, cluster_table, .is_optional = true),
            LHPY_ARG_AS("states", input.states, .is_optional = true, .names = states_names),
            LHPY_ARG_AS("micro_steps", opts.micro.step_count, .is_optional = true,
                        .max = MICRO_STEP_COUNT_MAX),
            LHPY_ARG_AS("visits", opts.micro.visit_count, .is_optional = true, .min = 1,
                        .max = MICRO_STEP_COUNT_MAX),
            LHPY_ARG(rule, .is_optional = true), LHPY_ARG(others, .is_optional = true)) < 0)
        return NULL;
    PyObject *made = NULL;
    bool has_rule =
        lhpy_rule_of(rule, &input.rule) == 0 && lhpy_rule_of(others, &input.others) == 0;
    input.has_sums = opts.micro.step_count > 0;
    machine_complete(&opts.machine);
    cluster.card.queue_depth = CARD_QUEUE_DEPTH;
    opts.cluster = cluster;
    bool is_plain = input.rule == LH_RULE_ADAMW && input.states == LH_ADAM_STATES_F32;
    if (has_rule && cluster.node_count > 0 && (!is_plain || input.has_sums))
        PyErr_SetString(PyExc_ValueError,
                        "a cluster has AdamW, moments in fp32 and its own micro_steps");
    else if (has_rule && opts.transfer_bytes % LH_MIB != 0)
        PyErr_Format(PyExc_ValueError, "transfer_bytes is %llu: must be a multiple of 1 MiB",
                     (unsigned long long)opts.transfer_bytes);
    else if (has_rule)
        made = run(&input, &opts, raiser);
    lhpy_free(&unit_table, input.units, input.unit_count);
    lhpy_free(&block_table, input.blocks, input.block_count);
    return made;
}
