#include "sim_preset.h"

#include "base/assert.h"

#define GB UINT64_C(1000000000)
#define TFLOP UINT64_C(1000000000000)

#define PAPERS_LAYER_COUNT 40
#define PAPERS_HIDDEN UINT64_C(5120)
#define PAPERS_VOCABULARY UINT64_C(50257)
#define PAPERS_SEQUENCE UINT64_C(1024)
#define PAPERS_BATCH UINT64_C(32)
#define PAPERS_TFLOP_PER_S 155
#define PAPERS_ADAM_PER_S UINT64_C(1100000000)
#define PAPERS_GPU_BYTES (4 * GB / LH_BLOCK_BYTES * LH_BLOCK_BYTES)
/* The papers' machine has 52 cores, but the engine's slabs cannot keep more than these busy. */
#define PAPERS_WORKER_COUNT 4

#define BALANCED_BLOCK_COUNT 40
#define BALANCED_BLOCK_ELEMENTS (UINT64_C(16) << 20)
#define BALANCED_WORKER_COUNT 4

const char *lh_sim_preset_name(enum lh_sim_preset preset)
{
    static const char *const names[LH_SIM_PRESET_COUNT] = {"papers-13b", "balanced", "ssd-bound"};
    return names[preset];
}

static uint64_t flop_ns(unsigned __int128 flop)
{
    return (uint64_t)(flop * LH_SIM_NS_PER_S / (PAPERS_TFLOP_PER_S * TFLOP));
}

static uint32_t unit_add(struct lh_sim_model *model, uint64_t count)
{
    struct lh_sim_unit_desc desc = {.dtype = LH_DTYPE_BF16, .counts = &count, .count = 1};
    return lh_sim_model_unit_add(model, &desc);
}

/* Add blocks between an embedding and a head that share one parameter. */
static void papers_model(struct lh_sim_model *model)
{
    const uint64_t tokens = PAPERS_BATCH * PAPERS_SEQUENCE;
    const uint64_t hidden = PAPERS_HIDDEN;
    const uint64_t block_count = 12 * hidden * hidden + 13 * hidden;
    uint32_t embedding = unit_add(model, PAPERS_VOCABULARY * hidden);
    unsigned __int128 flop =
        (unsigned __int128)tokens * (2 * block_count + 4 * PAPERS_SEQUENCE * hidden);
    unsigned __int128 head_flop = (unsigned __int128)tokens * 2 * PAPERS_VOCABULARY * hidden;
    struct lh_sim_block ends = {.units = {embedding}, .unit_count = 1};
    lh_sim_model_block_add(model, &ends);
    for (uint32_t i = 0; i < PAPERS_LAYER_COUNT; i++) {
        struct lh_sim_block block = {.units = {unit_add(model, block_count)},
                                     .unit_count = 1,
                                     .forward_ns = flop_ns(flop),
                                     .backward_ns = flop_ns(3 * flop)};
        lh_sim_model_block_add(model, &block);
    }
    ends.forward_ns = flop_ns(head_flop);
    ends.backward_ns = flop_ns(2 * head_flop);
    lh_sim_model_block_add(model, &ends);
}

static struct lh_sim_machine papers_machine(void)
{
    return (struct lh_sim_machine){
        .ssd_count = 12,
        .ssd = {.bytes_per_s = {13 * GB / 2, 17 * GB / 5}, .latency_ns = 80000, .queue_depth = 64},
        .cap_bytes_per_s = 28 * GB,
        .sync_ns = 200000,
        .worker_count = PAPERS_WORKER_COUNT,
        .worker_bytes_per_s =
            PAPERS_ADAM_PER_S * LH_SIM_ADAM_BYTES_PER_ELEMENT / PAPERS_WORKER_COUNT,
        .accelerator =
            {
                .link = {.bytes_per_s = {21 * GB, 21 * GB},
                         .latency_ns = 10000,
                         .queue_depth = 64,
                         .duplex = true},
                .bytes = PAPERS_GPU_BYTES,
                .copy_count = 64,
            },
    };
}

/*
 * Backward moves 24 bytes per element (P, R, M, V read and written), which takes 1 ns at 24 GB/s.
 * Its computation takes as long, AdamW 0.5 ns, forward 0.5 ns.
 */
static void balanced_model(struct lh_sim_model *model)
{
    model->has_mixed_gradients = true;
    for (uint32_t i = 0; i < BALANCED_BLOCK_COUNT; i++) {
        struct lh_sim_block block = {.units = {unit_add(model, BALANCED_BLOCK_ELEMENTS)},
                                     .unit_count = 1,
                                     .forward_ns = BALANCED_BLOCK_ELEMENTS / 2,
                                     .backward_ns = BALANCED_BLOCK_ELEMENTS};
        lh_sim_model_block_add(model, &block);
    }
}

static struct lh_sim_machine balanced_machine(uint64_t ssd_bytes_per_s)
{
    return (struct lh_sim_machine){
        .ssd_count = 1,
        .ssd = {.bytes_per_s = {ssd_bytes_per_s, ssd_bytes_per_s},
                .latency_ns = 80000,
                .queue_depth = 64},
        .sync_ns = 200000,
        .worker_count = BALANCED_WORKER_COUNT,
        .worker_bytes_per_s = 2 * GB * LH_SIM_ADAM_BYTES_PER_ELEMENT / BALANCED_WORKER_COUNT,
    };
}

static struct lh_sim_machine machine_of(enum lh_sim_preset preset)
{
    if (preset == LH_SIM_PRESET_PAPERS_13B)
        return papers_machine();
    return balanced_machine(preset == LH_SIM_PRESET_BALANCED ? 24 * GB : 17 * GB);
}

static uint64_t host_bytes_of(enum lh_sim_preset preset)
{
    static const uint64_t host_bytes[LH_SIM_PRESET_COUNT] = {16 * LH_GIB, LH_GIB / 2, LH_GIB};
    return host_bytes[preset];
}

int lh_sim_preset_make(enum lh_sim_preset preset, struct lh_alloc *alloc,
                       struct lh_sim_model *model, struct lh_sim_run_opts *opts_out,
                       struct lh_error *err)
{
    struct lh_sim_model_opts model_opts = {.unit_max = 64,
                                           .param_max = 64,
                                           .block_max = 64,
                                           .saved_max = LH_SIM_PRESET_SAVED_COUNT_MAX};
    LH_TRY(lh_sim_model_init(model, &model_opts, alloc, err));
    bool is_papers = preset == LH_SIM_PRESET_PAPERS_13B;
    if (is_papers)
        papers_model(model);
    else
        balanced_model(model);
    *opts_out = (struct lh_sim_run_opts){
        .machine = machine_of(preset),
        .model = model,
        .host_bytes = host_bytes_of(preset),
        .io_depth = is_papers ? 64 : 16,
        .transfer_bytes = 4 * LH_MIB,
        .commit_every = 1,
    };
    return 0;
}
