/*
 * Test the time of a step on the machines of tests/c/sim_preset.h, with each schedule: exact
 * nanoseconds and bytes, compared with tests/golden/sim_steps.csv. A change of the engine that
 * alters them has to be explained in its commit, together with the new file, which
 * LH_GOLDEN_WRITE=1 in the environment writes.
 */
#include "lh_test.h"
#include "sim_preset.h"
#include "sim/timing.h"

#define LINE_BYTES_MAX 512
#define STEP_S_MAX 2.0
#define HEAD                                                                                       \
    "preset,schedule,host_bytes,step_ns,forward_ns,backward_ns,forward_wait_ns,backward_wait_ns,"  \
    "gradient_wait_ns,ssd_busy_ns,update_busy_ns,param_read,state_read,param_write,state_write,"   \
    "commit_write,gradient_write,gradient_read,copy_in,copy_out,saved_write,saved_read,saved_in,"  \
    "saved_out,copy_in_busy_ns,copy_out_busy_ns\n"

struct row {
    enum lh_sim_preset preset;
    enum lh_engine_schedule schedule;
    double busiest_s; /* the time that the busiest resource needs */
    struct lh_sim_timing timing;
    struct lh_sim_run_opts opts;
    double cpu_s;
};

static const char *schedule_name(enum lh_engine_schedule schedule)
{
    static const char *const names[] = {"optimized", "serial", "naive", "deferred", "auto"};
    return names[schedule];
}

static void row_run(struct row *row)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_sim_model model;
    struct lh_error err = {0};
    LH_CHECK(lh_sim_preset_make(row->preset, &alloc, &model, &row->opts, &err) == 0);
    struct lh_sim_timing_opts opts = {
        .machine = row->opts.machine,
        .model = &model,
        .host_bytes = row->opts.host_bytes,
        .commit_every = row->opts.commit_every,
        .schedule = row->schedule,
        .io_depth = row->opts.io_depth,
        .transfer_bytes = row->opts.transfer_bytes,
    };
    clock_t before = clock();
    if (lh_sim_timing_run(&opts, &alloc, &row->timing, &err) < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(err.code == 0);
    row->cpu_s = (double)(clock() - before) / CLOCKS_PER_SEC / (double)(row->timing.step + 1);
    LH_CHECK(row->timing.plan_around_count == 0);
    lh_sim_model_deinit(&model);
    LH_CHECK(alloc.live_count == 0);
}

static void row_print(const struct row *row, char *line)
{
    const struct lh_sim_timing *timing = &row->timing;
    const struct lh_engine_step_stats *stats = &timing->stats;
    int used = snprintf(line, LINE_BYTES_MAX,
                        "%s,%s,%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64
                        ",%" PRIu64 ",%" PRIu64 ",%" PRIu64,
                        lh_sim_preset_name(row->preset), schedule_name(row->schedule),
                        row->opts.host_bytes, timing->step_ns, timing->forward_ns,
                        timing->backward_ns + timing->close_wait_ns, timing->forward_wait_ns,
                        timing->backward_wait_ns, timing->gradient_wait_ns, stats->ssd_busy_ns,
                        stats->update_busy_ns);
    for (uint32_t i = 0; i < LH_ENGINE_LINK_SHARED; i++) /* one process: nothing is shared */
        used +=
            snprintf(line + used, (size_t)(LINE_BYTES_MAX - used), ",%" PRIu64, stats->bytes[i]);
    snprintf(line + used, (size_t)(LINE_BYTES_MAX - used), ",%" PRIu64 ",%" PRIu64 "\n",
             stats->copy_busy_ns[LH_DEV_DIRECTION_IN], stats->copy_busy_ns[LH_DEV_DIRECTION_OUT]);
}

/* The time of the busier direction of an accelerator's link. */
static double copies_s(const struct lh_sim_accelerator *accelerator, const uint64_t *bytes)
{
    const uint64_t *rates = accelerator->link.bytes_per_s;
    if (accelerator->copy_count == 0)
        return 0;
    double in_s = (double)bytes[LH_ENGINE_LINK_COPY_IN] / (double)rates[LH_SIM_DIRECTION_READ];
    double out_s = (double)bytes[LH_ENGINE_LINK_COPY_OUT] / (double)rates[LH_SIM_DIRECTION_WRITE];
    return in_s > out_s ? in_s : out_s;
}

/* No step is faster than its computation, transfers and updates at full speed. */
static void bounds_check(struct row *row)
{
    const struct lh_sim_machine *machine = &row->opts.machine;
    const uint64_t *rates = machine->ssd.bytes_per_s;
    const uint64_t *bytes = row->timing.stats.bytes;
    double read = (double)(bytes[LH_ENGINE_LINK_PARAM_READ] + bytes[LH_ENGINE_LINK_STATE_READ] +
                           bytes[LH_ENGINE_LINK_GRADIENT_READ]);
    double written =
        (double)(bytes[LH_ENGINE_LINK_PARAM_WRITE] + bytes[LH_ENGINE_LINK_STATE_WRITE] +
                 bytes[LH_ENGINE_LINK_GRADIENT_WRITE]);
    double ssd_s = (read / (double)rates[0] + written / (double)rates[1]) / machine->ssd_count;
    if (machine->cap_bytes_per_s > 0 && (read + written) / (double)machine->cap_bytes_per_s > ssd_s)
        ssd_s = (read + written) / (double)machine->cap_bytes_per_s;
    double update_s = (double)row->timing.stats.update_busy_ns / 1e9 / machine->worker_count;
    double copy_s = copies_s(&machine->accelerator, bytes);
    printf("  %-10s %-9s %.3f s; compute %.3f, SSDs %.3f, updates %.3f, copies %.3f; %.2f s to "
           "simulate\n",
           lh_sim_preset_name(row->preset), schedule_name(row->schedule),
           (double)row->timing.step_ns / 1e9, (double)row->timing.compute_ns / 1e9, ssd_s, update_s,
           copy_s, row->cpu_s);
    row->busiest_s = (double)row->timing.compute_ns / 1e9;
    row->busiest_s = copy_s > row->busiest_s ? copy_s : row->busiest_s;
    row->busiest_s = ssd_s > row->busiest_s ? ssd_s : row->busiest_s;
    row->busiest_s = update_s > row->busiest_s ? update_s : row->busiest_s;
    LH_CHECK((double)row->timing.step_ns / 1e9 >= row->busiest_s);
}

/* Beside the folder of this file, wherever that is. */
static FILE *golden_open(const char *mode)
{
    char path[4096];
    const char *slash = strrchr(__FILE__, '/');
    LH_CHECK(slash != NULL);
    snprintf(path, sizeof(path), "%.*s/../golden/sim_steps.csv", (int)(slash - __FILE__), __FILE__);
    FILE *file = fopen(path, mode);
    LH_CHECK(file != NULL);
    return file;
}

static void golden_check(FILE *file, const char *line)
{
    char expected[LINE_BYTES_MAX] = "";
    LH_CHECK(fgets(expected, sizeof(expected), file) != NULL);
    if (strcmp(expected, line) != 0)
        fprintf(stderr, "expected %sfound    %s", expected, line);
    LH_CHECK(strcmp(expected, line) == 0);
}

/* How much longer a step takes by one schedule than by another. */
static double ratio(const struct row *slower, const struct row *faster)
{
    return (double)slower->timing.step_ns / (double)faster->timing.step_ns;
}

/* The least that overlap is worth; docs/simulator.md compares with what the papers measured. */
static void overlap_check(const struct row *rows)
{
    static const struct {
        double serial, naive;
    } least[LH_SIM_PRESET_COUNT] = {{1.3, 1.0}, {1.5, 1.25}, {1.3, 1.0}};
    const struct row *optimized = &rows[LH_ENGINE_SCHEDULE_OPTIMIZED];
    const struct row *serial = &rows[LH_ENGINE_SCHEDULE_SERIAL];
    const struct row *naive = &rows[LH_ENGINE_SCHEDULE_NAIVE];
    lh_test_name("%s: optimized is faster than naive, and naive than serial",
                 lh_sim_preset_name(optimized->preset));
    printf("  serial %.3f, naive %.3f, deferred %.3f of optimized\n", ratio(serial, optimized),
           ratio(naive, optimized), ratio(&rows[LH_ENGINE_SCHEDULE_DEFERRED], optimized));
    LH_CHECK(ratio(serial, optimized) >= least[optimized->preset].serial);
    LH_CHECK(ratio(naive, optimized) >= least[optimized->preset].naive);
    LH_CHECK(ratio(serial, naive) >= 1.0);
}

/* Compare with optimized, and with the time of the busiest resource alone. */
static void auto_check(const struct row *rows)
{
    static const struct {
        double optimized, busiest;
    } most[LH_SIM_PRESET_COUNT] = {{1.0001, 1.03}, {1.0001, 1.03}, {0.87, 1.08}};
    const struct row *row = &rows[LH_ENGINE_SCHEDULE_AUTO];
    double of_optimized = ratio(row, &rows[LH_ENGINE_SCHEDULE_OPTIMIZED]);
    double of_busiest = (double)row->timing.step_ns / 1e9 / row->busiest_s;
    lh_test_name("%s: auto is never slower than optimized, and near the busiest resource",
                 lh_sim_preset_name(row->preset));
    printf("  auto %.4f of optimized, %.4f of the busiest resource\n", of_optimized, of_busiest);
    LH_CHECK(of_optimized <= most[row->preset].optimized);
    LH_CHECK(of_busiest <= most[row->preset].busiest);
}

int main(void)
{
    static struct row rows[LH_SIM_PRESET_COUNT][LH_ENGINE_SCHEDULE_COUNT];
    char line[LINE_BYTES_MAX];
    bool writes = getenv("LH_GOLDEN_WRITE") != NULL;
    FILE *golden = golden_open(writes ? "w" : "r");
    lh_test_name("steps take the nanoseconds and the bytes that they took before");
    if (writes)
        fputs(HEAD, golden);
    else
        golden_check(golden, HEAD);
    for (uint32_t preset = 0; preset < LH_SIM_PRESET_COUNT; preset++) {
        for (uint32_t schedule = 0; schedule < LH_ENGINE_SCHEDULE_COUNT; schedule++) {
            struct row *row = &rows[preset][schedule];
            row->preset = (enum lh_sim_preset)preset;
            row->schedule = (enum lh_engine_schedule)schedule;
            if (LH_TEST_IS_SLOW && preset == LH_SIM_PRESET_PAPERS_13B) {
                LH_CHECK(!writes && fgets(line, sizeof(line), golden) != NULL);
                continue; /* it has forty times the chunks of the others */
            }
            row_run(row);
            bounds_check(row);
            row_print(row, line);
            if (writes)
                fputs(line, golden);
            else
                golden_check(golden, line);
            LH_CHECK(row->cpu_s < STEP_S_MAX * lh_test_slowness());
        }
    }
    fclose(golden);
    for (uint32_t preset = 0; preset < LH_SIM_PRESET_COUNT; preset++) {
        if (rows[preset]->timing.step_ns == 0)
            continue;
        overlap_check(rows[preset]);
        auto_check(rows[preset]);
    }
    return 0;
}
