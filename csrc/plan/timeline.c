#include "plan/timeline.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/*
 * The division of main memory by csrc/plan/budget.h: parameters of three blocks, gradients of two,
 * and a full pipeline of slabs.
 */
#define HOST_BLOCK_COUNT_P16 3
#define HOST_BLOCK_COUNT_GRADIENTS 2
#define SLAB_BYTES (UINT64_C(8) * 12 * LH_MIB)
/* GPU memory: parameters of the current and the next block, and gradients of the current one. */
#define GPU_BLOCK_COUNT_P16 2
#define GPU_BLOCK_COUNT_GRADIENTS 1
#define GPU_ROUNDING_BYTES (UINT64_C(2) << 20)

/* A master of at least this many bytes is complete: with it, an update reads no P16. */
#define MASTER_BYTES_WHOLE 4
#define SLOT_COUNT 2
#define COMMIT_SHARE 0.01
/* The number of steps simulated from a standstill; only the last ones are measured. */
#define STEP_COUNT 5
#define STEP_COUNT_MEASURED 2
#define AHEAD_COUNT 2
/* Half of the free GPU memory is used for slots of parameters. */
#define ROOM_DIVISOR 2

/* The work of a block on each resource, in seconds. */
struct lh_plan_timeline_block {
    double forward_s;
    double backward_s;
    double p16_in_s;
    double saved_out_s;
    double saved_in_s;
    double gradient_out_s;
    double p16_read_s;    /* 0: P16 is in main memory */
    double frozen_read_s; /* the same of frozen parameters */
    double saved_write_s;
    double saved_read_s;
    double update_read_s;
    double update_write_s;
    double update_s;
    double updated_s; /* when the block's parameters are up to date */
    bool is_deferred;
};

/* GPU memory that computation and kept activations leave free, in seconds of link time. */
struct room {
    double in_s;
    double out_s;
};

struct clocks {
    double gpu_s;
    double in_s;
    double out_s;
    double ssd_s;
    double cpu_s;
};

uint64_t lh_plan_host_working_bytes(const struct lh_plan_model *model)
{
    struct lh_plan_totals totals = lh_plan_model_totals(model);
    uint64_t gradient_bytes = model->param_bytes * totals.block_param_count_max;
    return HOST_BLOCK_COUNT_P16 * totals.block_bytes_max +
           HOST_BLOCK_COUNT_GRADIENTS * gradient_bytes + SLAB_BYTES;
}

static uint64_t gpu_working_bytes(const struct lh_plan_model *model,
                                  const struct lh_plan_totals *totals)
{
    uint64_t gradient_bytes = model->param_bytes * totals->block_param_count_max;
    return GPU_BLOCK_COUNT_P16 * totals->block_bytes_max +
           GPU_BLOCK_COUNT_GRADIENTS * gradient_bytes + GPU_ROUNDING_BYTES +
           totals->block_gpu_bytes_max;
}

uint64_t lh_plan_gpu_working_bytes(const struct lh_plan_model *model)
{
    struct lh_plan_totals totals = lh_plan_model_totals(model);
    return gpu_working_bytes(model, &totals);
}

int lh_plan_timeline_init(struct lh_plan_timeline *timeline, const struct lh_plan_model *model,
                          const struct lh_plan_machine *machine, struct lh_alloc *alloc,
                          struct lh_error *err)
{
    *timeline = (struct lh_plan_timeline){
        .model = model, .machine = machine, .totals = lh_plan_model_totals(model)};
    timeline->blocks = lh_alloc_zeroed(alloc, model->block_count, sizeof(*timeline->blocks));
    if (!timeline->blocks)
        return lh_error_set(err, -ENOMEM, "no memory for a timeline of %u blocks",
                            model->block_count);
    return 0;
}

void lh_plan_timeline_deinit(struct lh_plan_timeline *timeline, struct lh_alloc *alloc)
{
    lh_free(alloc, timeline->blocks);
    memset(timeline, 0, sizeof(*timeline));
}

static double seconds(uint64_t amount, uint64_t per_s)
{
    return (double)amount / (double)per_s;
}

/* Add the traffic and memory of a block's states to step, and to the block's times. */
static void states_add(const struct lh_plan_timeline *timeline, const struct lh_plan_choice *choice,
                       uint32_t index, struct lh_plan_step *step)
{
    const struct lh_plan_model *model = timeline->model;
    const struct lh_plan_block_choice *states = &choice->blocks[index];
    struct lh_plan_timeline_block *block = &timeline->blocks[index];
    uint64_t count = lh_plan_block_param_count(model, index);
    uint64_t p16_bytes = count * model->param_bytes;
    uint64_t master_bytes = count * choice->master_bytes;
    uint64_t moment_bytes = lh_plan_block_moment_bytes(model, index);
    uint64_t frozen_bytes = lh_plan_block_frozen_bytes(model, index);
    uint64_t frozen_read = lh_plan_block_frozen_read_bytes(model, index);
    uint64_t frozen_ssd_bytes = states->has_host_p16 ? 0 : frozen_read;
    uint64_t p16_ssd_bytes = states->has_host_p16 ? 0 : p16_bytes;
    uint64_t state_ssd_bytes = (states->has_host_master ? 0 : master_bytes) +
                               (states->has_host_moments ? 0 : moment_bytes);
    uint64_t held_bytes = p16_bytes + master_bytes + moment_bytes - p16_ssd_bytes - state_ssd_bytes;
    uint64_t read = lh_plan_machine_read_bytes_per_s(timeline->machine);
    uint64_t write = lh_plan_machine_write_bytes_per_s(timeline->machine);
    /* A deferred update with a complete master makes P16 in memory, where forward finds it. */
    bool reads_p16 = !states->is_deferred || choice->master_bytes < MASTER_BYTES_WHOLE;
    block->is_deferred = states->is_deferred;
    block->p16_in_s = seconds(p16_bytes + frozen_bytes, timeline->machine->link_in_bytes_per_s);
    block->gradient_out_s = seconds(p16_bytes, timeline->machine->link_out_bytes_per_s);
    block->p16_read_s = seconds(p16_ssd_bytes, read);
    block->frozen_read_s = seconds(frozen_ssd_bytes, read);
    block->update_read_s = seconds(state_ssd_bytes, read);
    block->update_write_s = seconds(p16_ssd_bytes + state_ssd_bytes, write);
    block->update_s =
        seconds(lh_plan_block_update_count(model, index), timeline->machine->adam_params_per_s);
    step->ssd_read_bytes +=
        p16_ssd_bytes * (reads_p16 ? 2 : 1) + 2 * frozen_ssd_bytes + state_ssd_bytes;
    step->ssd_write_bytes += p16_ssd_bytes + state_ssd_bytes;
    step->link_in_bytes += 2 * (p16_bytes + frozen_bytes);
    step->link_out_bytes += p16_bytes;
    step->host_bytes += held_bytes + (states->is_deferred ? p16_bytes : 0) +
                        (states->has_host_p16 ? frozen_bytes : 0);
    step->commit_bytes += held_bytes;
    step->ssd_bytes += SLOT_COUNT * (p16_bytes + master_bytes + moment_bytes) + frozen_read;
}

static void layers_add(const struct lh_plan_timeline *timeline, const struct lh_plan_choice *choice,
                       uint32_t index, struct lh_plan_step *step)
{
    const struct lh_plan_block *layers = &timeline->model->blocks[index];
    const struct lh_plan_machine *machine = timeline->machine;
    struct lh_plan_timeline_block *block = &timeline->blocks[index];
    uint64_t forward_flop = 0;
    uint64_t backward_flop = 0;
    uint64_t recompute_flop = 0;
    uint64_t host_bytes = 0;
    uint64_t ssd_bytes = 0;
    for (uint32_t i = layers->layer_first; i < layers->layer_first + layers->layer_count; i++) {
        const struct lh_plan_layer *layer = &timeline->model->layers[i];
        forward_flop += layer->forward_flop;
        backward_flop += 2 * layer->forward_flop - layer->frozen_flop;
        if (choice->fates[i] == LH_PLAN_FATE_KEEP)
            step->kept_bytes += layer->activation_bytes;
        else if (choice->fates[i] == LH_PLAN_FATE_SWAP_HOST)
            host_bytes += layer->activation_bytes;
        else if (choice->fates[i] == LH_PLAN_FATE_SWAP_SSD)
            ssd_bytes += layer->activation_bytes;
        else
            recompute_flop += layer->forward_flop;
    }
    block->forward_s = seconds(forward_flop, machine->gpu_flop_per_s);
    block->backward_s = seconds(backward_flop + recompute_flop, machine->gpu_flop_per_s);
    block->saved_out_s = seconds(host_bytes + ssd_bytes, machine->link_out_bytes_per_s);
    block->saved_in_s = seconds(host_bytes + ssd_bytes, machine->link_in_bytes_per_s);
    block->saved_write_s = seconds(ssd_bytes, lh_plan_machine_write_bytes_per_s(machine));
    block->saved_read_s = seconds(ssd_bytes, lh_plan_machine_read_bytes_per_s(machine));
    step->recompute_flop += recompute_flop;
    step->swapped_bytes += host_bytes + ssd_bytes;
    step->swapped_ssd_bytes += ssd_bytes;
    step->host_bytes += host_bytes;
    step->ssd_bytes += ssd_bytes;
    step->link_in_bytes += host_bytes + ssd_bytes;
    step->link_out_bytes += host_bytes + ssd_bytes;
    step->ssd_read_bytes += ssd_bytes;
    step->ssd_write_bytes += ssd_bytes;
}

static void forward_run(const struct lh_plan_timeline *timeline, struct clocks *clocks,
                        const struct room *room, bool has_whole_master, bool is_first)
{
    uint32_t count = timeline->model->block_count;
    double close_s = clocks->out_s;    /* when all gradients have arrived */
    double ahead_s[AHEAD_COUNT] = {0}; /* when the GPU began each of the last blocks */
    for (uint32_t i = 0; i < count; i++) {
        struct lh_plan_timeline_block *block = &timeline->blocks[i];
        double ready_s = block->updated_s;
        bool updates = block->is_deferred && !is_first;
        if (updates) {
            clocks->ssd_s = fmax(clocks->ssd_s, close_s) + block->update_read_s;
            ready_s = clocks->ssd_s;
        }
        bool reads_p16 = !(updates && has_whole_master);
        double read_s = block->frozen_read_s + (reads_p16 ? block->p16_read_s : 0);
        if (read_s > 0) {
            clocks->ssd_s += read_s;
            ready_s = fmax(clocks->ssd_s, ready_s);
        }
        if (updates) {
            clocks->ssd_s += block->update_write_s;
            clocks->cpu_s = fmax(clocks->cpu_s, ready_s) + block->update_s;
            ready_s = clocks->cpu_s;
        }
        clocks->in_s = fmax(clocks->in_s, ready_s) + block->p16_in_s;
        clocks->gpu_s = fmax(fmax(clocks->gpu_s, clocks->in_s), clocks->out_s - room->out_s);
        ahead_s[i % AHEAD_COUNT] = clocks->gpu_s;
        clocks->gpu_s += block->forward_s;
        clocks->out_s = fmax(clocks->out_s, clocks->gpu_s) + block->saved_out_s;
        clocks->ssd_s += block->saved_write_s;
    }
    double end_s = ahead_s[count % AHEAD_COUNT];
    clocks->ssd_s = fmax(clocks->ssd_s, end_s);
    clocks->in_s = fmax(clocks->in_s, end_s);
}

static void update_run(struct lh_plan_timeline_block *block, struct clocks *clocks,
                       enum lh_plan_schedule schedule, double gradient_s)
{
    if (schedule == LH_PLAN_SCHEDULE_NAIVE) {
        clocks->ssd_s += block->update_read_s + block->update_write_s;
        clocks->cpu_s = fmax(clocks->cpu_s, gradient_s) + block->update_read_s + block->update_s +
                        block->update_write_s;
        clocks->cpu_s = fmax(clocks->cpu_s, clocks->ssd_s);
    } else {
        clocks->ssd_s += block->update_read_s;
        clocks->cpu_s = fmax(fmax(clocks->cpu_s, gradient_s), clocks->ssd_s) + block->update_s;
        clocks->ssd_s += block->update_write_s;
    }
    block->updated_s = clocks->cpu_s;
}

static void backward_run(const struct lh_plan_timeline *timeline, struct clocks *clocks,
                         const struct room *room, enum lh_plan_schedule schedule)
{
    for (uint32_t i = timeline->model->block_count; i-- > 0;) {
        struct lh_plan_timeline_block *block = &timeline->blocks[i];
        double read_s = block->p16_read_s + block->frozen_read_s + block->saved_read_s;
        clocks->ssd_s += read_s;
        double ready_s = read_s > 0 ? clocks->ssd_s : 0;
        clocks->in_s = fmax(clocks->in_s, ready_s) + block->p16_in_s;
        if (block->saved_in_s > 0)
            clocks->in_s = fmax(clocks->in_s, clocks->gpu_s - room->in_s) + block->saved_in_s;
        clocks->gpu_s = fmax(clocks->gpu_s, clocks->in_s) + block->backward_s;
        clocks->out_s = fmax(clocks->out_s, clocks->gpu_s) + block->gradient_out_s;
        block->updated_s = clocks->out_s;
        if (!block->is_deferred && schedule != LH_PLAN_SCHEDULE_SERIAL)
            update_run(block, clocks, schedule, clocks->out_s);
    }
    if (schedule != LH_PLAN_SCHEDULE_SERIAL)
        return;
    clocks->ssd_s = fmax(clocks->ssd_s, clocks->out_s);
    for (uint32_t i = timeline->model->block_count; i-- > 0;)
        update_run(&timeline->blocks[i], clocks, schedule, clocks->out_s);
    double end_s = fmax(clocks->ssd_s, clocks->cpu_s);
    *clocks = (struct clocks){end_s, end_s, end_s, end_s, end_s};
}

static double steps_run(const struct lh_plan_timeline *timeline,
                        const struct lh_plan_choice *choice, uint64_t gpu_bytes)
{
    const struct lh_plan_machine *machine = timeline->machine;
    uint64_t room_bytes = machine->gpu_bytes > gpu_bytes ? machine->gpu_bytes - gpu_bytes : 0;
    room_bytes /= ROOM_DIVISOR;
    struct room room = {.in_s = seconds(room_bytes, machine->link_in_bytes_per_s),
                        .out_s = seconds(room_bytes, machine->link_out_bytes_per_s)};
    struct clocks clocks = {0};
    double measured_from_s = 0;
    bool has_whole_master = choice->master_bytes >= MASTER_BYTES_WHOLE;
    for (uint32_t i = 0; i < timeline->model->block_count; i++)
        timeline->blocks[i].updated_s = 0;
    for (int i = 0; i < STEP_COUNT; i++) {
        if (i == STEP_COUNT - STEP_COUNT_MEASURED)
            measured_from_s = clocks.gpu_s;
        forward_run(timeline, &clocks, &room, has_whole_master, i == 0);
        backward_run(timeline, &clocks, &room, choice->schedule);
    }
    return (clocks.gpu_s - measured_from_s) / STEP_COUNT_MEASURED;
}

struct lh_plan_step lh_plan_timeline_step(struct lh_plan_timeline *timeline,
                                          const struct lh_plan_choice *choice)
{
    const struct lh_plan_machine *machine = timeline->machine;
    const struct lh_plan_totals *totals = &timeline->totals;
    struct lh_plan_step step = {
        .gpu_bytes = gpu_working_bytes(timeline->model, totals),
        .host_bytes = lh_plan_host_working_bytes(timeline->model),
        .commit_every = 1,
    };
    for (uint32_t i = 0; i < timeline->model->block_count; i++) {
        states_add(timeline, choice, i, &step);
        layers_add(timeline, choice, i, &step);
    }
    step.gpu_bytes += step.kept_bytes;
    uint64_t read = lh_plan_machine_read_bytes_per_s(machine);
    uint64_t write = lh_plan_machine_write_bytes_per_s(machine);
    step.busy_s[LH_PLAN_RESOURCE_GPU] =
        seconds(totals->forward_flop + totals->backward_flop + step.recompute_flop,
                machine->gpu_flop_per_s);
    step.busy_s[LH_PLAN_RESOURCE_IN] = seconds(step.link_in_bytes, machine->link_in_bytes_per_s);
    step.busy_s[LH_PLAN_RESOURCE_OUT] = seconds(step.link_out_bytes, machine->link_out_bytes_per_s);
    step.busy_s[LH_PLAN_RESOURCE_SSD] =
        seconds(step.ssd_read_bytes, read) + seconds(step.ssd_write_bytes, write);
    step.busy_s[LH_PLAN_RESOURCE_CPU] = seconds(totals->update_count, machine->adam_params_per_s);
    step.iteration_s = steps_run(timeline, choice, step.gpu_bytes);
    for (int i = 0; i < LH_PLAN_RESOURCE_COUNT; i++) {
        if (step.busy_s[i] > step.busy_s[step.bound_by])
            step.bound_by = (enum lh_plan_resource)i;
        step.iteration_s = fmax(step.iteration_s, step.busy_s[i]);
    }
    if (step.commit_bytes > 0) {
        double commit_s = seconds(step.commit_bytes, write);
        double every = ceil(commit_s / (COMMIT_SHARE * step.iteration_s));
        step.commit_every = every < 1 ? 1 : (uint64_t)every;
        step.iteration_s += commit_s / (double)step.commit_every;
    }
    return step;
}

int lh_plan_step_check(const struct lh_plan_step *step, const struct lh_plan_machine *machine,
                       struct lh_error *err)
{
    uint64_t ssd_bytes = machine->ssd_count * machine->ssd_bytes;
    const struct {
        const char *name;
        uint64_t needed;
        uint64_t there;
        const char *way_out;
    } tiers[] = {
        {"gpu_bytes", step->gpu_bytes, machine->gpu_bytes,
         "take a smaller batch, or set gpu_bytes"},
        {"host_bytes", step->host_bytes, machine->host_bytes,
         "take a smaller batch, or set host_bytes"},
        {"ssd_count * ssd_bytes", step->ssd_bytes, ssd_bytes > 0 ? ssd_bytes : UINT64_MAX,
         "take a smaller model, or set ssd_count or ssd_bytes"},
    };
    for (size_t i = 0; i < LH_COUNT_OF(tiers); i++)
        if (tiers[i].needed > tiers[i].there)
            return lh_error_set(err, -ENOSPC,
                                "%s of %" PRIu64 " is too small: a step of this model and batch"
                                " needs %" PRIu64 ": %s",
                                tiers[i].name, tiers[i].there, tiers[i].needed, tiers[i].way_out);
    return 0;
}
