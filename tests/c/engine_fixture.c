#include "engine_fixture.h"

#include "compute/adam.h"
#include "compute/half.h"
#include "lh_test.h"
#include "rig_device.h"
#include "rig_in_place.h"
#include "rig_inline.h"
#include "rig_repeat.h"
#include "rig_saved.h"
#include "rig_reference.h"
#include "rig_team.h"
#include "rig_wait.h"
#include "sched/idle.h"
#include "sched/split.h"
#include "store_fixture.h"

#define SCALARS "of the caller"

static uint32_t extent_add(struct lh_store_extent_desc *extents, uint32_t *count, uint64_t bytes,
                           uint32_t group)
{
    if (bytes == 0)
        return LH_ENGINE_EXTENT_NONE;
    LH_CHECK(*count < RIG_EXTENT_COUNT_MAX);
    extents[*count] = (struct lh_store_extent_desc){.bytes = bytes, .group = group};
    return (*count)++;
}

static void model_init(struct rig *rig)
{
    uint64_t odd = rig->opts.matrices >> 5 == 0; /* a matrix of four rows has no odd count */
    uint64_t last_count = rig->opts.large ? 1300000 + odd : 3000;
    uint64_t frozen_count = rig->opts.in_place_large ? 2600003 : 8000;
    if (rig->opts.packed)
        frozen_count = rig_in_place_packed_bytes(rig);
    uint64_t counts[RIG_PARAM_COUNT] = {1500, 700, 3000, 100, frozen_count, 5000, 2100, last_count};
    static const uint64_t rows[RIG_PARAM_COUNT] = {30, 20, 40, 20, 0, 50, 42, 4};
    const uint32_t unit_of[RIG_PARAM_COUNT] = {0, 0, 1, 1, 2, 3, 4, 5};
    enum lh_dtype dtypes[RIG_UNIT_COUNT] = {LH_DTYPE_BF16, LH_DTYPE_F32, LH_DTYPE_BYTES,
                                            LH_DTYPE_F16,  LH_DTYPE_F32, LH_DTYPE_BF16};
    static const enum lh_dtype trainable[] = {LH_DTYPE_F32, LH_DTYPE_BF16, LH_DTYPE_F16};
    uint64_t seed = rig->opts.model_seed;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT && rig->opts.model_seed > 0; i++) {
        counts[i] = 1 + lh_test_random(&seed) % 9000;
        if (dtypes[unit_of[i]] != LH_DTYPE_BYTES)
            dtypes[unit_of[i]] = trainable[lh_test_random(&seed) % 3];
    }
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        rig->units[i] = (struct lh_engine_unit){
            .dtype = dtypes[i],
            .always = i == 0,
            .is_announced = (rig->opts.announced >> i) % 2 != 0,
            .family = (rig->opts.family >> i) % 2,
            .param_first = UINT32_MAX,
            .is_given = (rig->opts.given >> i) % 2 != 0,
            .rule = (rig->opts.matrices >> i) % 2 != 0 ? LH_RULE_MUON : LH_RULE_ADAMW,
            .store_group = i};
    uint64_t at = 0;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        struct lh_engine_unit *unit = &rig->units[unit_of[i]];
        at = unit->param_count++ == 0 ? 0 : lh_align_up(at, LH_ENGINE_PARAM_ALIGN);
        if (unit->param_first == UINT32_MAX)
            unit->param_first = i;
        rig->params[i] = (struct lh_engine_param){
            .unit = unit_of[i], .first = at, .count = counts[i], .group = i % RIG_GROUP_COUNT};
        if (unit->rule == LH_RULE_MUON) {
            rig->params[i].matrix_rows = rows[i];
            rig->params[i].lr_ratio = 1 + i;
        }
        at += counts[i];
        bool is_frozen = unit->dtype == LH_DTYPE_BYTES;
        unit->elements = is_frozen ? 0 : lh_align_up(at, LH_ENGINE_ELEMENT_ALIGN);
        unit->bytes = is_frozen ? lh_align_up(at, LH_BLOCK_BYTES)
                                : unit->elements * lh_dtype_bytes(unit->dtype);
        unit->place_bytes = unit->bytes + rig->opts.beside_bytes;
    }
    rig->hypers[0] = (struct lh_adam_hyper){1e-2, 0.9, 0.999, 1e-8, 0.01, 0};
    rig->hypers[1] = (struct lh_adam_hyper){3e-3, 0.8, 0.99, 1e-6, 0, 0};
}

static void snapshot_take(struct rig *rig)
{
    LH_CHECK(rig->step < RIG_STEP_COUNT_MAX);
    if (!rig->snapshots[rig->step])
        rig->snapshots[rig->step] = malloc(rig->state_bytes);
    LH_CHECK(rig->snapshots[rig->step]);
    memcpy(rig->snapshots[rig->step], rig->state, rig->state_bytes);
}

static uint32_t directories_name(const struct rig *rig, char (*paths)[8192], const char **names)
{
    uint32_t count = rig->opts.directory_count > 0 ? rig->opts.directory_count : 1;
    bool in_memory = rig->opts.in_memory && access("/dev/shm", W_OK) == 0;
    for (uint32_t i = 0; i < count; i++) {
        if (in_memory)
            snprintf(paths[i], sizeof(paths[i]), "%s/%s-%u", fixture_memory_root(), rig->name, i);
        else
            snprintf(paths[i], sizeof(paths[i]), "%s/%s-%u", fixture_root(), rig->name, i);
        names[i] = paths[i];
    }
    return count;
}

static void store_make(struct rig *rig)
{
    static char paths[4][8192];
    const char *names[4];
    uint32_t directory_count = directories_name(rig, paths, names);
    struct lh_store_extent_desc extents[RIG_EXTENT_COUNT_MAX];
    struct lh_store_group_desc groups[RIG_UNIT_COUNT];
    struct lh_error err = {0};
    uint32_t extent_count = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        struct lh_engine_unit *unit = &rig->units[i];
        uint32_t *targets[RIG_ARRAY_COUNT] = {&unit->param_extent, &unit->residual_extent,
                                              &unit->moment1_extent, &unit->moment2_extent};
        groups[i].slot_count = unit->elements > 0 ? 2 : 1;
        for (enum rig_array j = RIG_ARRAY_PARAM; j < RIG_ARRAY_COUNT; j++)
            *targets[j] = extent_add(extents, &extent_count, rig_array_bytes(unit, j), i);
    }
    struct lh_store_opts opts = {
        .directories = names,
        .directory_count = directory_count,
        .extents = extents,
        .extent_count = extent_count,
        .groups = groups,
        .group_count = RIG_UNIT_COUNT,
        .meta = "{}",
        .meta_bytes = 2,
        .scalar_bytes_max = 64 + rig->opts.tail_bytes + lh_scalars_overhead_bytes(RIG_PARAM_COUNT),
        .allow_buffered = true,
        .allow_tmpfs = rig->opts.in_memory,
    };
    int rc = lh_store_create(&opts, &rig->alloc, &rig->store, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        for (enum rig_array j = RIG_ARRAY_PARAM; j <= RIG_ARRAY_RESIDUAL; j++) {
            uint64_t bytes = rig_array_bytes(&rig->units[i], j);
            uint32_t extent = rig_array_extent(&rig->units[i], j);
            const uint8_t *source = rig_array_at(rig, rig->state, i, j);
            LH_CHECK(bytes == 0 ||
                     lh_store_write_sync(rig->store, extent, 0, source, bytes, NULL) == 0);
        }
    }
    LH_CHECK(lh_store_commit_sync(rig->store, 0, "", 0, NULL) == 0);
}

static void budget_make(struct rig *rig)
{
    struct lh_budget_unit units[RIG_UNIT_COUNT];
    bool is_auto = rig->opts.schedule == LH_ENGINE_SCHEDULE_AUTO;
    bool is_waiting = is_auto || rig->opts.repeats ||
                      rig->opts.schedule == LH_ENGINE_SCHEDULE_SERIAL ||
                      rig->opts.schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_engine_unit *unit = &rig->units[i];
        units[i] = (struct lh_budget_unit){
            .bytes =
                rig->opts.device && !rig->opts.units_in_memory ? unit->bytes : unit->place_bytes,
            .elements = unit->elements,
            .gradient_bytes = unit->elements * lh_dtype_bytes(unit->dtype),
            .state_bytes_per_element = unit->elements == 0 || rig->opts.given & (1u << i)
                                           ? 0
                                           : (uint32_t)(lh_engine_state_bytes(unit)),
            .is_whole = unit->rule == LH_RULE_MUON && !unit->is_given,
            .waiting_bytes_per_element =
                is_waiting && unit->elements > 0 ? (uint32_t)lh_dtype_bytes(unit->dtype) : 0,
            .waits_in_memory = rig->opts.commit_every != 1,
            .block_bytes_per_element =
                rig->opts.device && unit->elements > 0 ? (uint32_t)sizeof(float) : 0,
            .waits_at_will = is_auto,
            .always = unit->always,
        };
    }
    uint64_t host_bytes = UINT64_C(1) << 40;
    LH_CHECK(lh_budget_make(units, RIG_UNIT_COUNT, host_bytes, 0, &rig->budget, NULL) == 0);
    host_bytes = rig->opts.least_memory ? rig->budget.host_bytes_min + rig->opts.spare_bytes
                                        : rig->budget.host_bytes_full;
    LH_CHECK(lh_budget_make(units, RIG_UNIT_COUNT, host_bytes, 0, &rig->budget, NULL) == 0);
    rig->memory_bytes = rig->budget.region_bytes + rig->budget.slab_count * rig->budget.slab_bytes;
    if (rig->opts.device)
        rig->memory_bytes += rig->budget.gradient_bytes;
    rig->memory_bytes = lh_align_up(rig->memory_bytes + rig->opts.tail_bytes, LH_HUGE_PAGE_BYTES);
    rig->memory = aligned_alloc(LH_HUGE_PAGE_BYTES, rig->memory_bytes);
    LH_CHECK(rig->memory);
    memset(rig->memory, 0xa5, rig->memory_bytes);
}

struct lh_engine_opts rig_engine_opts(struct rig *rig)
{
    struct lh_engine_opts opts = {
        .units = rig->units,
        .unit_count = RIG_UNIT_COUNT,
        .params = rig->params,
        .param_count = RIG_PARAM_COUNT,
        .group_count = RIG_GROUP_COUNT,
        .budget = &rig->budget,
        .memory = rig->memory,
        .memory_bytes = rig->memory_bytes,
        .store = rig->store,
        .io = rig->io,
        .exec = rig->exec,
        .waker = &rig->waker,
        .clock = rig->clock,
        .io_depth = 3,
        .transfer_bytes = LH_MIB,
        .commit_every = rig->opts.commit_every,
        .schedule = rig->opts.schedule,
        .verify = !rig->opts.skip_verify,
        .trace_count = 16,
        .norms = rig->opts.norms,
        .gradients_in_memory = rig->opts.given != 0 || rig->opts.sums,
        .manual = rig->opts.manual,
        .team = rig->team,
        .gather_wait_ns = rig->opts.gather_wait_ns,
    };
    if (rig->opts.sums) {
        opts.sum_memory = rig->memory + rig->budget.region_bytes +
                          rig->budget.slab_count * rig->budget.slab_bytes;
        opts.sum_bytes = lh_align_up(rig->budget.gradient_bytes / 4, LH_BLOCK_BYTES);
    }
    opts.tail_bytes = rig->opts.tail_bytes;
    opts.tail_memory = rig->memory + rig->memory_bytes - rig->opts.tail_bytes;
    rig_device_opts(rig, &opts);
    rig_saved_opts(rig, &opts);
    rig_repeat_opts(rig, &opts);
    rig_in_place_opts(rig, &opts);
    return opts;
}

/* Create the engine and its backends, for an open store. */
static void parts_make(struct rig *rig)
{
    struct lh_io *threads = NULL;
    LH_CHECK(lh_waker_init(&rig->waker, NULL) == 0);
    struct lh_io_opts io_opts = {
        .files = lh_store_files(rig->store),
        .file_count = lh_store_file_count(rig->store),
        .queue_depth_max = 64,
        .thread_count = 2,
        .waker = &rig->waker,
        .clock = &rig->clock,
    };
    rig->saved = rig_saved_open(rig);
    rig_saved_files(rig, &io_opts);
    rig->repeat = rig_repeat_open(rig);
    rig_repeat_files(rig, &io_opts);
    rig_in_place_files(rig, &io_opts);
    if (rig->opts.manual)
        threads = rig_inline_io(rig, &io_opts);
    else
        LH_CHECK(lh_io_create("threads", &io_opts, &rig->alloc, &threads, NULL) == 0);
    struct lh_io_faulty_opts faulty_opts = {
        .inner = threads, .waker = &rig->waker, .clock = &rig->clock};
    LH_CHECK(lh_io_faulty_create(&faulty_opts, &rig->alloc, &rig->io, NULL) == 0);
    struct lh_exec_threads_opts exec_opts = {
        .thread_count = 2, .queue_depth_max = 64, .waker = &rig->waker, .clock = &rig->clock};
    if (rig->opts.manual)
        rig->exec = rig_inline_exec(rig);
    else
        LH_CHECK(lh_exec_threads_create(&exec_opts, &rig->alloc, &rig->exec, NULL) == 0);
    if (rig->opts.device)
        rig->device = rig_device_open(rig, rig->opts.device, rig->opts.device_bytes);
    rig->team = rig_team_open(rig);
    struct lh_engine_opts opts = rig_engine_opts(rig);
    struct lh_error err = {0};
    int rc = lh_engine_create(&opts, &rig->engine_alloc, &rig->engine, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0);
    rig_device_begin(rig);
    lh_alloc_seal(&rig->engine_alloc); /* from here on, nothing may allocate memory */
    /* From the first step on: it would measure some first, and no run here is as long. */
    if (rig->opts.schedule == LH_ENGINE_SCHEDULE_AUTO)
        lh_split_set(rig->engine, RIG_UNIT_COUNT);
}

void rig_make(struct rig *rig, const char *name, struct rig_opts opts)
{
    *rig = (struct rig){
        .opts = opts,
        .name = name,
        .alloc = LH_ALLOC_INIT,
        .engine_alloc = LH_ALLOC_INIT,
        .clock = lh_clock_real(),
    };
    model_init(rig);
    rig_reference_init(rig);
    rig->in_place = rig_in_place_open(rig, rig_array_at(rig, rig->state, 2, RIG_ARRAY_PARAM));
    store_make(rig);
    snapshot_take(rig);
    budget_make(rig);
    parts_make(rig);
}

void rig_shut(struct rig *rig)
{
    if (!rig->store)
        return;
    if (rig->engine) {
        LH_CHECK(rig->engine_alloc.refused_count == 0);
        rig_stop(rig);
        lh_engine_stop(rig->engine);
        lh_alloc_unseal(&rig->engine_alloc);
        lh_engine_destroy(rig->engine);
    }
    LH_CHECK(rig->engine_alloc.live_count == 0);
    rig_device_close(rig);
    rig_team_close(rig);
    rig->exec->ops->destroy(rig->exec);
    rig->io->ops->destroy(rig->io);
    lh_waker_deinit(&rig->waker);
    rig_saved_close(rig);
    rig_repeat_close(rig);
    lh_store_close(rig->store);
    LH_CHECK(rig->alloc.live_count == 0);
    rig->engine = NULL;
    rig->store = NULL;
}

void rig_unmake(struct rig *rig)
{
    static char paths[4][8192];
    const char *names[4];
    rig_shut(rig);
    rig_in_place_close(rig);
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++)
        free(rig->gradients[i]);
    for (uint32_t i = 0; i < RIG_STEP_COUNT_MAX; i++)
        free(rig->snapshots[i]);
    free(rig->state);
    free(rig->memory);
    uint32_t count = directories_name(rig, paths, names);
    for (uint32_t i = 0; i < count; i++)
        fixture_remove(names[i]);
}

/* Take the step counts from the engine; a family's are those of its unit that owes nothing. */
static void family_resume(struct rig *rig)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        rig->param_steps[i] = lh_engine_param_step(rig->engine, i);
        if (rig->units[rig->params[i].unit].family > 0 && rig->param_steps[i] > most)
            most = rig->param_steps[i];
    }
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        if (rig->units[rig->params[i].unit].family > 0)
            rig->param_steps[i] = most;
    }
    for (uint64_t step = 1; step <= rig->step && rig->opts.family > 0; step++) {
        for (uint32_t i = 0; i < RIG_GROUP_COUNT; i++)
            lh_idle_history_set(rig->engine, step, i, &rig->history[step][i]);
    }
}

void rig_reopen(struct rig *rig)
{
    static char paths[4][8192];
    const char *names[4];
    struct lh_error err = {0};
    struct lh_store_open_opts opts = {.directories = names, .allow_buffered = true};
    opts.directory_count = directories_name(rig, paths, names);
    int rc = lh_store_open(&opts, &rig->alloc, &rig->store, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0);
    uint64_t step = lh_store_step(rig->store);
    LH_CHECK(step <= rig->step && rig->snapshots[step]);
    rig_check_store(rig, step);
    memcpy(rig->state, rig->snapshots[step], rig->state_bytes);
    rig->step = step;
    parts_make(rig);
    LH_CHECK(lh_engine_step(rig->engine) == step);
    family_resume(rig);
}

/* --- Training --------------------------------------------------------------------------------- */

int rig_acquire(struct rig *rig, uint32_t unit)
{
    rig_wait_begin(rig);
    int rc = lh_engine_acquire(rig->engine, unit);
    while (rig_waits(rig, rc))
        rc = lh_engine_acquire_wait(rig->engine, unit, rig_slice_ms(rig));
    if (rc < 0)
        return rc;
    const uint8_t *expected = rig_array_at(rig, rig->state, unit, RIG_ARRAY_PARAM);
    if (rig->device) {
        rig_device_read(rig, unit, expected);
        return 0;
    }
    uint8_t *found = lh_engine_address(rig->engine, unit);
    LH_CHECK(memcmp(found, expected, rig_in_place_param_bytes(rig, unit)) == 0);
    memset(found + rig->units[unit].bytes, 0x5a, rig->opts.beside_bytes);
    return 0;
}

int rig_forward(struct rig *rig, enum lh_engine_mode mode)
{
    LH_TRY(lh_engine_begin(rig->engine, mode));
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        if (rig->unused & (1u << i))
            continue;
        LH_TRY(rig_acquire(rig, i));
        if (mode == LH_ENGINE_MODE_TRAIN)
            lh_engine_handle_add(rig->engine, i);
        lh_engine_unpin(rig->engine, i);
    }
    return 0;
}

/* Return the gradients' dtype: the parameters', except that every other bf16 parameter has fp32. */
enum lh_dtype rig_gradient_dtype(const struct rig *rig, uint32_t param)
{
    enum lh_dtype dtype = rig->units[rig->params[param].unit].dtype;
    bool is_wide = param % 2 != 0 && !rig->opts.device && !rig->opts.plain_gradients;
    return dtype == LH_DTYPE_BF16 && is_wide ? LH_DTYPE_F32 : dtype;
}

static void gradient_fill(struct rig *rig, uint32_t param)
{
    uint64_t seed = rig->step * 100 + param;
    uint8_t *target = rig->gradients[param];
    enum lh_dtype dtype = rig_gradient_dtype(rig, param);
    for (uint64_t i = 0; i < rig->params[param].count; i++) {
        float value = (float)((double)(int32_t)lh_test_random(&seed) / 1e9);
        uint32_t bits = 0;
        memcpy(&bits, &value, sizeof(bits));
        uint16_t narrow = dtype == LH_DTYPE_F16 ? lh_half_round(bits) : (uint16_t)(bits >> 16);
        if (dtype == LH_DTYPE_F32)
            memcpy(target + 4 * i, &value, sizeof(value));
        else
            memcpy(target + 2 * i, &narrow, sizeof(narrow));
    }
}

static int param_backward(struct rig *rig, uint32_t param, bool is_first)
{
    rig_wait_begin(rig);
    int rc = 0;
    do {
        rc = lh_engine_over_wait(rig->engine, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; is_first && i < RIG_GROUP_COUNT; i++)
        lh_engine_hyper_set(rig->engine, i, &rig->hypers[i]);
    gradient_fill(rig, param);
    const void *gradient = rig->device ? rig_device_gradient(rig, param) : rig->gradients[param];
    LH_TRY(lh_engine_gradient(rig->engine, param, gradient, rig_gradient_dtype(rig, param)));
    rig_wait_begin(rig);
    do {
        rc = lh_engine_gradient_wait(rig->engine, rig->budget.gradient_ahead_bytes,
                                     rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    return rc < 0 ? rc : 0;
}

int rig_backward(struct rig *rig, unsigned gradients)
{
    bool is_first = true;
    for (uint32_t i = RIG_UNIT_COUNT; i-- > 0;) {
        const struct lh_engine_unit *unit = &rig->units[i];
        if (rig->unused & (1u << i))
            continue;
        LH_TRY(rig_acquire(rig, i));
        lh_engine_handle_drop(rig->engine, i);
        lh_engine_unpin(rig->engine, i);
        for (uint32_t j = 0; j < unit->param_count; j++) {
            if (!(gradients & (1u << (unit->param_first + j))))
                continue;
            LH_TRY(param_backward(rig, unit->param_first + j, is_first));
            is_first = false;
        }
    }
    return 0;
}

int rig_forward_backward(struct rig *rig, unsigned gradients)
{
    LH_TRY(rig_forward(rig, LH_ENGINE_MODE_TRAIN));
    return rig_backward(rig, gradients);
}

/* Update the parameters with gradients, and with zeros the other ones of a family. */
static void gradients_update(struct rig *rig, unsigned gradients)
{
    unsigned family = 0;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++)
        family |= rig->units[rig->params[i].unit].family << i;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        bool has_gradient = gradients & (1u << i);
        bool is_idle = !has_gradient && (family & (1u << i)) && (family & gradients);
        if (is_idle)
            memset(rig->gradients[i], 0, rig->params[i].count * sizeof(float));
        if (has_gradient || is_idle)
            rig_reference_update(rig, i);
    }
    memcpy(rig->history[rig->step + 1], rig->hypers, sizeof(rig->hypers));
}

int rig_close(struct rig *rig, unsigned gradients)
{
    /* Before the close: it may be over, and durable, before its caller knows. */
    uint8_t *before = rig->state;
    uint64_t before_steps[RIG_PARAM_COUNT];
    memcpy(before_steps, rig->param_steps, sizeof(before_steps));
    rig->state = malloc(rig->state_bytes);
    LH_CHECK(rig->state);
    memcpy(rig->state, before, rig->state_bytes);
    gradients_update(rig, gradients);
    rig_wait_begin(rig);
    int rc = 0;
    do {
        rc = lh_engine_close(rig->engine, SCALARS, sizeof(SCALARS), rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    if (rc < 0) {
        free(rig->state);
        rig->state = before;
        memcpy(rig->param_steps, before_steps, sizeof(before_steps));
        return rc;
    }
    free(before);
    rig->step++;
    snapshot_take(rig);
    if (!rig->opts.given_late)
        rig_give(rig, gradients);
    return 0;
}

void rig_give(struct rig *rig, unsigned gradients)
{
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_engine_unit *unit = &rig->units[i];
        unsigned mine = ((1u << unit->param_count) - 1) << unit->param_first;
        if ((rig->opts.given & (1u << i)) && (gradients & mine))
            lh_given_arrived(rig->engine, i);
    }
}

int rig_step(struct rig *rig, unsigned gradients)
{
    struct lh_error err = {0};
    int rc = rig_forward_backward(rig, gradients);
    if (rc >= 0)
        rc = rig_close(rig, gradients);
    if (rc == -ENOSPC && lh_engine_error(rig->engine, &err) == 0)
        lh_engine_refusal(rig->engine, &err);
    if (rc < 0)
        fprintf(stderr, "a step returned %d: %s\n", rc, err.message);
    return rc;
}

void rig_check_store(struct rig *rig, uint64_t step)
{
    struct lh_error err = {0};
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        for (enum rig_array j = RIG_ARRAY_PARAM; j < RIG_ARRAY_COUNT; j++) {
            uint64_t bytes = rig_array_bytes(&rig->units[i], j);
            if (bytes == 0 || (rig->unchecked & (1u << i)))
                continue;
            void *found = NULL;
            LH_CHECK(posix_memalign(&found, LH_BLOCK_BYTES, bytes) == 0);
            uint32_t extent = rig_array_extent(&rig->units[i], j);
            int rc = lh_store_read_sync(rig->store, extent, 0, found, bytes, &err);
            bool is_same =
                rc == 0 && memcmp(found, rig_array_at(rig, rig->snapshots[step], i, j), bytes) == 0;
            if (!is_same)
                fprintf(stderr, "unit %u, array %d is not step %d's: %s\n", i, (int)j, (int)step,
                        err.message);
            LH_CHECK(is_same);
            free(found);
        }
    }
}
