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
#define COPY_COUNT 64
#define TRACE_COUNT_MAX (UINT32_C(1) << 24)

struct field {
    const char *name;
    uint64_t *value;
    uint64_t least;
    uint64_t most;
};

/* The numbers of a dict by name. -1 with a Python error. */
static int fields_parse(PyObject *dict, const struct field *fields, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *item = PyDict_GetItemString(dict, fields[i].name);
        if (!item) {
            PyErr_Format(PyExc_KeyError, "%s", fields[i].name);
            return -1;
        }
        *fields[i].value = PyLong_AsUnsignedLongLong(item);
        if (PyErr_Occurred())
            return -1;
        if (*fields[i].value < fields[i].least || *fields[i].value > fields[i].most) {
            PyErr_Format(PyExc_ValueError, "%s is %R: must be %llu to %llu", fields[i].name, item,
                         (unsigned long long)fields[i].least, (unsigned long long)fields[i].most);
            return -1;
        }
    }
    return 0;
}

/* Room for saved tensors. */
static int saved_opts_parse(PyObject *dict, struct lh_sim_saved_opts *saved)
{
    const struct field fields[] = {
        {"memory_bytes", &saved->memory_bytes, 0, NUMBER_MAX},
        {"transit_bytes", &saved->transit_bytes, 0, NUMBER_MAX},
        {"ssd_bytes", &saved->ssd_bytes, 0, NUMBER_MAX},
        {"out_bytes", &saved->out_bytes, 0, NUMBER_MAX},
        {"ahead_bytes", &saved->ahead_bytes, 0, NUMBER_MAX},
    };
    return fields_parse(dict, fields, LH_COUNT_OF(fields));
}

static int machine_parse(PyObject *dict, struct lh_sim_machine *machine)
{
    uint64_t ssd_count, ssd_queue_depth, worker_count, copy_latency_ns;
    struct lh_sim_accelerator *accelerator = &machine->accelerator;
    struct lh_sim_link_opts *ssd = &machine->ssd;
    const struct field fields[] = {
        {"ssd_count", &ssd_count, 1, LH_SIM_SSD_COUNT_MAX},
        {"ssd_read_bytes_per_s", &ssd->bytes_per_s[LH_SIM_DIRECTION_READ], 1, NUMBER_MAX},
        {"ssd_write_bytes_per_s", &ssd->bytes_per_s[LH_SIM_DIRECTION_WRITE], 1, NUMBER_MAX},
        {"ssd_total_bytes_per_s", &machine->cap_bytes_per_s, 0, NUMBER_MAX},
        {"ssd_latency_ns", &ssd->latency_ns, 0, LATENCY_NS_MAX},
        {"ssd_queue_depth", &ssd_queue_depth, 1, QUEUE_DEPTH_MAX},
        {"ssd_sync_ns", &machine->sync_ns, 0, LATENCY_NS_MAX},
        {"worker_count", &worker_count, 1, WORKER_COUNT_MAX},
        {"worker_bytes_per_s", &machine->worker_bytes_per_s, 1, NUMBER_MAX},
        {"device_bytes", &accelerator->bytes, 0, NUMBER_MAX},
        {"copy_in_bytes_per_s", &accelerator->link.bytes_per_s[0], 1, NUMBER_MAX},
        {"copy_out_bytes_per_s", &accelerator->link.bytes_per_s[1], 1, NUMBER_MAX},
        {"copy_latency_ns", &copy_latency_ns, 0, LATENCY_NS_MAX},
    };
    if (fields_parse(dict, fields, LH_COUNT_OF(fields)) < 0)
        return -1;
    machine->ssd_count = (uint32_t)ssd_count;
    ssd->queue_depth = (uint32_t)ssd_queue_depth;
    machine->worker_count = (uint32_t)worker_count;
    accelerator->link.latency_ns = copy_latency_ns;
    accelerator->link.queue_depth = COPY_COUNT;
    accelerator->link.duplex = true;
    accelerator->bytes = accelerator->bytes / LH_BLOCK_BYTES * LH_BLOCK_BYTES;
    accelerator->copy_count = accelerator->bytes > 0 ? COPY_COUNT : 0;
    return 0;
}

/* Parse (dtype, always, elements): one parameter per unit. */
static int unit_parse(PyObject *item, struct lh_sim_model *model)
{
    static const enum lh_dtype dtypes[] = {LH_DTYPE_F32, LH_DTYPE_BF16, LH_DTYPE_F16,
                                           LH_DTYPE_BYTES};
    static const char *const names[] = {"float32", "bfloat16", "float16", "frozen"};
    const char *name = NULL;
    int always = 0;
    unsigned long long count = 0;
    if (!PyArg_ParseTuple(item, "spK", &name, &always, &count))
        return -1;
    size_t index = 0;
    while (index < LH_COUNT_OF(names) && strcmp(names[index], name) != 0)
        index++;
    if (index == LH_COUNT_OF(names) || count < 1 || count > NUMBER_MAX / 64) {
        PyErr_Format(PyExc_ValueError, "invalid unit: %llu elements of %s", count, name);
        return -1;
    }
    uint64_t elements = count;
    struct lh_sim_unit_desc desc = {
        .dtype = dtypes[index], .always = always != 0, .counts = &elements, .count = 1};
    (void)lh_sim_model_unit_add(model, &desc);
    return 0;
}

/* Parse the tensors that a part saves: (bytes, is_on_ssd) each. */
static int saved_parse(PyObject *saved, struct lh_sim_model *model)
{
    Py_ssize_t count = PyTuple_Size(saved);
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long bytes = 0;
        int is_on_ssd = 0;
        if (!PyArg_ParseTuple(PyTuple_GetItem(saved, i), "Kp", &bytes, &is_on_ssd))
            return -1;
        if (bytes < 1 || bytes > NUMBER_MAX / 1024 || model->saved_count == model->opts.saved_max) {
            PyErr_Format(PyExc_ValueError, "invalid saved tensor %zd: %llu bytes", i, bytes);
            return -1;
        }
        lh_sim_model_saved_add(model, bytes, is_on_ssd ? LH_SAVED_TIER_SSD : LH_SAVED_TIER_MEMORY);
    }
    return 0;
}

/* Parse (forward_ns, backward_ns, saved). The first part also adds the block. */
static int part_parse(PyObject *item, struct lh_sim_block *first, struct lh_sim_model *model)
{
    unsigned long long forward_ns = 0;
    unsigned long long backward_ns = 0;
    PyObject *saved = NULL;
    if (!PyArg_ParseTuple(item, "KKO!", &forward_ns, &backward_ns, &PyTuple_Type, &saved))
        return -1;
    if (forward_ns > NUMBER_MAX / 1024 || backward_ns > NUMBER_MAX / 1024 ||
        model->part_count == model->opts.part_max) {
        PyErr_Format(PyExc_ValueError, "invalid part %u: %llu ns forward, %llu ns backward",
                     (unsigned)model->part_count, forward_ns, backward_ns);
        return -1;
    }
    if (first) {
        first->forward_ns = forward_ns;
        first->backward_ns = backward_ns;
        lh_sim_model_block_add(model, first);
    } else {
        lh_sim_model_part_add(model, forward_ns, backward_ns);
    }
    return saved_parse(saved, model);
}

/* Parse (units, parts, room for saved tensors). */
static int block_parse(PyObject *item, struct lh_sim_model *model)
{
    PyObject *units = NULL;
    PyObject *parts = NULL;
    unsigned long long room_bytes = 0;
    if (!PyArg_ParseTuple(item, "O!O!|K", &PyTuple_Type, &units, &PyTuple_Type, &parts,
                          &room_bytes))
        return -1;
    Py_ssize_t count = PyTuple_Size(units);
    Py_ssize_t part_count = PyTuple_Size(parts);
    if (count < 0 || count > LH_SIM_BLOCK_UNIT_COUNT_MAX || part_count < 1) {
        PyErr_Format(PyExc_ValueError, "invalid block: %zd units and %zd parts", count, part_count);
        return -1;
    }
    struct lh_sim_block block = {.unit_count = (uint32_t)count,
                                 .saved_room_bytes = lh_min_u64(room_bytes, NUMBER_MAX)};
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long unit = PyLong_AsUnsignedLong(PyTuple_GetItem(units, i));
        if (PyErr_Occurred())
            return -1;
        if (unit >= model->unit_count) {
            PyErr_Format(PyExc_ValueError, "unit %lu is out of range: there are %u units", unit,
                         model->unit_count);
            return -1;
        }
        block.units[i] = (uint32_t)unit;
    }
    for (Py_ssize_t i = 0; i < part_count; i++) {
        if (part_parse(PyTuple_GetItem(parts, i), i == 0 ? &block : NULL, model) < 0)
            return -1;
    }
    return 0;
}

/* The caller owns *model, also after an error. */
static int model_parse(PyObject *units, PyObject *blocks, struct lh_alloc *alloc,
                       struct lh_sim_model *model)
{
    Py_ssize_t unit_count = PyList_Size(units);
    Py_ssize_t block_count = PyList_Size(blocks);
    if (unit_count < 1 || block_count < 1 || unit_count > BLOCK_COUNT_MAX ||
        block_count > BLOCK_COUNT_MAX) {
        PyErr_Format(PyExc_ValueError, "invalid model: %zd units and %zd blocks", unit_count,
                     block_count);
        return -1;
    }
    struct lh_sim_model_opts opts = {.unit_max = (uint32_t)unit_count,
                                     .param_max = (uint32_t)unit_count,
                                     .block_max = (uint32_t)block_count,
                                     .saved_max = SAVED_COUNT_MAX,
                                     .part_max = PART_COUNT_MAX};
    if (lh_sim_model_init(model, &opts, alloc, NULL) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < unit_count; i++) {
        if (unit_parse(PyList_GetItem(units, i), model) < 0)
            return -1;
    }
    for (Py_ssize_t i = 0; i < block_count; i++) {
        if (block_parse(PyList_GetItem(blocks, i), model) < 0)
            return -1;
    }
    return 0;
}

static PyObject *timing_dict(const struct lh_sim_timing *timing)
{
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"begin_ns", timing->begin_ns},
        {"step_ns", timing->step_ns},
        {"commit_ns", timing->commit_ns},
        {"commit_write_bytes", timing->commit_write_bytes},
        {"forward_ns", timing->forward_ns},
        {"backward_ns", timing->backward_ns},
        {"close_wait_ns", timing->close_wait_ns},
        {"compute_ns", timing->compute_ns},
        {"forward_wait_ns", timing->forward_wait_ns},
        {"backward_wait_ns", timing->backward_wait_ns},
        {"gradient_wait_ns", timing->gradient_wait_ns},
        {"saved_wait_ns", timing->saved_wait_ns},
        {"update_busy_ns", timing->stats.update_busy_ns},
        {"deferred_units", timing->stats.deferred_units},
        {"host_bytes", timing->budget.host_bytes},
        {"host_bytes_min", timing->budget.host_bytes_min},
        {"region_bytes", timing->budget.region_bytes},
        {"slab_bytes", timing->budget.slab_count * timing->budget.slab_bytes},
        {"gradient_bytes", timing->budget.gradient_bytes},
        {"ssd_bytes", timing->ssd_bytes},
    };
    PyObject *bytes = PyDict_New();
    PyObject *answer = PyDict_New();
    int rc = bytes && answer ? 0 : -1;
    for (size_t i = 0; rc == 0 && i < LH_COUNT_OF(numbers); i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i].value);
        rc = number ? PyDict_SetItemString(answer, numbers[i].name, number) : -1;
        Py_XDECREF(number);
    }
    for (size_t i = 0; rc == 0 && i < LH_ENGINE_LINK_COUNT; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(timing->stats.bytes[i]);
        rc = number ? PyDict_SetItemString(bytes, lhpy_link_names[i], number) : -1;
        Py_XDECREF(number);
    }
    if (rc == 0)
        rc = PyDict_SetItemString(answer, "bytes", bytes);
    if (rc < 0)
        Py_CLEAR(answer);
    Py_XDECREF(bytes);
    return answer;
}

/* "trace": struct lh_engine_trace_event, one after the other, as they are. Steals dict. */
static PyObject *trace_put(PyObject *dict, const struct lh_sim_timing *timing,
                           const struct lh_engine_trace_event *events)
{
    PyObject *bytes = PyBytes_FromStringAndSize(
        (const char *)events, (Py_ssize_t)(timing->trace_count * sizeof(*events)));
    if (!dict || !bytes || PyDict_SetItemString(dict, "trace", bytes) < 0)
        Py_CLEAR(dict);
    Py_XDECREF(bytes);
    return dict;
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

PyObject *lhpy_simulate(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *keys[] = {"units",    "blocks",       "machine",  "saved",          "host_bytes",
                           "schedule", "commit_every", "io_depth", "transfer_bytes", "only_checks",
                           "raiser",   "trace_count",  NULL};
    int only_checks = 0;
    PyObject *units, *blocks, *dict, *saved, *raiser;
    unsigned int schedule, io_depth, trace_count = 0;
    unsigned long long host_bytes, commit_every, transfer_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!KIKIKpO|I", keys, &PyList_Type, &units,
                                     &PyList_Type, &blocks, &PyDict_Type, &dict, &PyDict_Type,
                                     &saved, &host_bytes, &schedule, &commit_every, &io_depth,
                                     &transfer_bytes, &only_checks, &raiser, &trace_count))
        return NULL;
    if (schedule >= LH_ENGINE_SCHEDULE_COUNT || host_bytes > NUMBER_MAX || io_depth < 1 ||
        io_depth > QUEUE_DEPTH_MAX || transfer_bytes < LH_MIB || transfer_bytes > LH_GIB ||
        transfer_bytes % LH_MIB != 0 || trace_count > TRACE_COUNT_MAX)
        return PyErr_Format(
            PyExc_ValueError,
            "schedule %u, host_bytes %llu, io_depth %u, transfer_bytes %llu, trace_count %u",
            schedule, host_bytes, io_depth, transfer_bytes, trace_count);
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_sim_model model = {.alloc = &alloc};
    struct lh_error err = {0};
    struct lh_sim_timing timing;
    struct lh_sim_timing_opts opts = {
        .model = &model,
        .host_bytes = host_bytes,
        .commit_every = commit_every,
        .schedule = (enum lh_engine_schedule)schedule,
        .io_depth = io_depth,
        .transfer_bytes = transfer_bytes,
        .trace_max = trace_count,
        .only_checks = only_checks != 0,
        .is_cancelled = is_interrupted,
    };
    PyObject *answer = NULL;
    int rc = -EINVAL;
    if (trace_count > 0)
        opts.trace = lh_alloc_zeroed(&alloc, trace_count, sizeof(*opts.trace));
    if (trace_count > 0 && !opts.trace)
        PyErr_NoMemory();
    else if (machine_parse(dict, &opts.machine) == 0 && saved_opts_parse(saved, &opts.saved) == 0 &&
             model_parse(units, blocks, &alloc, &model) == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = lh_sim_timing_run(&opts, &alloc, &timing, &err);
        Py_END_ALLOW_THREADS
        if (rc == 0)
            answer = trace_put(timing_dict(&timing), &timing, opts.trace);
        else if (!PyErr_Occurred())
            lhpy_raise_error(raiser, &err);
    }
    lh_sim_model_deinit(&model);
    lh_free(&alloc, opts.trace);
    return answer;
}
