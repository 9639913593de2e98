/*
 * Train a small model on a small machine by seed, for some steps, with a random schedule and any
 * amount of memory that works. At the end the store holds, bit for bit, the result of plain
 * training in order; every use saw the right bytes; no checker of csrc/sim reported a failure; and
 * running the seed again gives the same trace. A second argument names a file for the trace, so
 * that two builds can be compared.
 */
#include "../c/lh_test.h"
#include "fixture.h"

#define TRACE_BYTES_MAX (UINT64_C(4) << 20)

static struct lh_error err;

static void open_well(struct lh_sim_lives *lives)
{
    enum lh_sim_open open = lh_sim_lives_open(lives, true, &err);
    if (open != LH_SIM_OPEN_DONE)
        fprintf(stderr, "open %d: %s\n", (int)open, err.message);
    LH_CHECK(open == LH_SIM_OPEN_DONE);
}

/* Train to the end, open the store again, and compare. Returns the trace's hash. */
static uint64_t train(struct sim_case *sim, uint8_t *trace, uint64_t *trace_bytes_out)
{
    static struct lh_sim_lives lives;
    sim_require(lh_sim_lives_init(&lives, &sim->opts, &sim->alloc, &err), &err, "init");
    open_well(&lives);
    enum lh_sim_end end = lh_sim_lives_drive(&lives, &err);
    if (end != LH_SIM_END_DONE)
        fprintf(stderr, "end %d: %s\n", (int)end, err.message);
    LH_CHECK(end == LH_SIM_END_DONE);
    lh_sim_lives_stop(&lives);
    LH_CHECK(lives.committed_step == sim->opts.run.step_last);
    open_well(&lives);
    LH_CHECK(lh_store_step(lives.run.store) == sim->opts.run.step_last);
    *trace_bytes_out = lives.trace.bytes;
    memcpy(trace, lives.trace.records, lives.trace.bytes);
    uint64_t hash = lives.trace.hash;
    lh_sim_lives_deinit(&lives);
    return hash;
}

static void trace_write(const char *path, const uint8_t *trace, uint64_t bytes)
{
    FILE *file = fopen(path, "wb");
    LH_CHECK(file != NULL && fwrite(trace, 1, bytes, file) == bytes && fclose(file) == 0);
}

int main(int argc, char **argv)
{
    static struct sim_case sim;
    static uint8_t traces[2][TRACE_BYTES_MAX];
    uint64_t trace_bytes[2];
    uint64_t hashes[2];
    const char *path = argc == 3 ? argv[2] : NULL;
    uint64_t seed = sim_seed(path ? 2 : argc, argv);
    const struct lh_sim_sizes sizes = {.count_max = 12000, .large_ppm = 150000};
    sim_case_make(&sim, seed, &sizes);
    sim.opts.trace_bytes_max = TRACE_BYTES_MAX;
    sim.opts.chances = (struct lh_sim_train_chances){
        .eval_ppm = lh_sim_random_below(&sim.random, 2) == 0 ? 200000 : 0,
        .abort_ppm =
            sim.opts.run.commit_every == 1 && lh_sim_random_below(&sim.random, 3) == 0 ? 50000 : 0,
        .skip_ppm = lh_sim_random_below(&sim.random, 3) == 0 ? 100000 : 0,
        .flush_ppm = lh_sim_random_below(&sim.random, 3) == 0 ? 200000 : 0,
        .split_ppm = 500000,
    };
    if (sim.opts.chances.abort_ppm == 0 && sim.opts.run.commit_every != LH_ENGINE_COMMIT_NEVER &&
        lh_sim_random_below(&sim.random, 3) == 0)
        sim.opts.chances.hold_ppm = 300000;
    lh_test_name("seed %" PRIu64 ": the store holds what plain training gives", seed);
    hashes[0] = train(&sim, traces[0], &trace_bytes[0]);
    if (path)
        trace_write(path, traces[0], trace_bytes[0]);
    if (seed % 4 == 0) {
        lh_test_name("seed %" PRIu64 ": its trace is the same again", seed);
        lh_sim_reference_begin_again(&sim.reference);
        hashes[1] = train(&sim, traces[1], &trace_bytes[1]);
        LH_CHECK(trace_bytes[0] > 0 && trace_bytes[0] == trace_bytes[1]);
        LH_CHECK(memcmp(traces[0], traces[1], trace_bytes[0]) == 0);
        LH_CHECK(hashes[0] == hashes[1]);
    }
    sim_case_unmake(&sim);
    return 0;
}
