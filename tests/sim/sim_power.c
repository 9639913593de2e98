/*
 * A seed: power fails at random moments, and the drives have faults of the kinds and with the
 * probabilities that the seed chose. After each end the store opens again, as a new process would
 * open it, at the last committed step or at the one whose commit was under way, bit for bit; with
 * the last one faults cease, and training has to come to its end.
 *
 * Every error of the engine has to be one that a fault explains. A write that went to another place
 * is the one fault that may cost a committed step, as nothing reads back what was written: then an
 * error has to say so, or an older step to be there, whole; wrong bytes are never taken for right
 * ones.
 */
#include "../c/lh_test.h"
#include "fixture.h"

#define LIFE_COUNT_MAX 4

static struct lh_error err;
static uint64_t fault_counts[LH_SIM_FAULT_COUNT]; /* of all lives */

static void faults_draw(struct sim_case *sim)
{
    static const uint32_t ppms[LH_SIM_FAULT_COUNT] = {
        [LH_SIM_FAULT_SPIKE] = 50000,   [LH_SIM_FAULT_REORDER] = 300000,
        [LH_SIM_FAULT_ERROR] = 4000,    [LH_SIM_FAULT_SPACE] = 4000,
        [LH_SIM_FAULT_SHORT] = 100000,  [LH_SIM_FAULT_FLIP] = 8000,
        [LH_SIM_FAULT_MISDIRECT] = 8000};
    struct lh_sim_faults *faults = &sim->opts.faults;
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++) {
        bool is_of_data = i >= LH_SIM_FAULT_ERROR && i != LH_SIM_FAULT_SHORT;
        if (lh_sim_random_below(&sim->random, is_of_data ? 4 : 2) == 0)
            faults->ppm[i] = 1 + (uint32_t)lh_sim_random_below(&sim->random, 2 * ppms[i]);
    }
    faults->spike_ns = lh_sim_random_below(&sim->random, 50000000);
    faults->reorder_ns = lh_sim_random_below(&sim->random, 2000000);
}

static void faults_add(const struct lh_sim_run *run)
{
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++)
        fault_counts[i] += lh_sim_io_stats(run->io)->fault_counts[i] +
                           (run->dev ? lh_sim_dev_stats(run->dev)->fault_counts[i] : 0);
}

/* Whether a fault that happened explains the engine's error. */
static bool is_explained(int code)
{
    switch (code) {
    case -EIO:
        return fault_counts[LH_SIM_FAULT_ERROR] > 0;
    case -ENOSPC:
        return fault_counts[LH_SIM_FAULT_SPACE] > 0;
    case -EILSEQ:
        return fault_counts[LH_SIM_FAULT_FLIP] + fault_counts[LH_SIM_FAULT_MISDIRECT] > 0;
    default:
        return false;
    }
}

/* Open the store again; false where a misdirected write has damaged it, and it says so. */
static bool reopen(struct lh_sim_run *run, bool is_last)
{
    int rc = lh_sim_run_reopen(run, is_last, &err);
    if (rc < 0 && rc != -EPROTO && fault_counts[LH_SIM_FAULT_MISDIRECT] > 0) {
        printf("damaged, and it says so: %s\n", err.message);
        return false;
    }
    sim_require(rc, &err, "reopen");
    return true;
}

int main(int argc, char **argv)
{
    static struct sim_case sim;
    static struct lh_sim_run run;
    uint64_t seed = sim_seed(argc, argv);
    sim_case_make(&sim, seed);
    uint64_t life_count = 1 + lh_sim_random_below(&sim.random, LIFE_COUNT_MAX);
    faults_draw(&sim);
    sim.opts.step_last += 2;
    sim.opts.chances = (struct lh_sim_train_chances){
        .eval_ppm = lh_sim_random_below(&sim.random, 3) == 0 ? 200000 : 0,
        .abort_ppm =
            sim.opts.commit_every == 1 && lh_sim_random_below(&sim.random, 4) == 0 ? 50000 : 0,
        .skip_ppm = lh_sim_random_below(&sim.random, 4) == 0 ? 100000 : 0,
        .flush_ppm = lh_sim_random_below(&sim.random, 4) == 0 ? 200000 : 0,
        .split_ppm = 500000,
    };
    if (sim.opts.chances.abort_ppm == 0 && lh_sim_random_below(&sim.random, 3) == 0)
        sim.opts.chances.hold_ppm = 300000;
    sim.opts.crash_after = 1 + lh_sim_random_below(&sim.random, 800);
    lh_test_name("seed %" PRIu64 ": what is committed survives %" PRIu64 " lives", seed,
                 life_count);
    sim_require(lh_sim_run_init(&run, &sim.opts, &sim.alloc, &err), &err, "init");
    bool is_whole = true;
    for (uint64_t life = 0; is_whole && life <= life_count; life++) {
        bool is_last = life == life_count;
        enum lh_sim_end end = lh_sim_run_drive(&run, &err);
        faults_add(&run);
        printf("life %" PRIu64 " ends %d at %" PRIu64 " ns%s%s\n", life, (int)end, run.world.now_ns,
               end == LH_SIM_END_FAILED || end == LH_SIM_END_BROKEN ? ": " : "",
               end == LH_SIM_END_FAILED || end == LH_SIM_END_BROKEN ? err.message : "");
        LH_CHECK(end != LH_SIM_END_BROKEN);
        LH_CHECK(end != LH_SIM_END_FAILED || (is_explained(err.code) && !is_last));
        LH_CHECK(end == LH_SIM_END_DONE || !is_last);
        lh_sim_run_stop(&run);
        bool is_calm = life + 1 >= life_count;
        run.opts.crash_after = is_calm ? 0 : 1 + lh_sim_random_below(&sim.random, 800);
        is_whole = reopen(&run, is_calm);
    }
    /* A life that begins where training was over trains one step more. */
    LH_CHECK(!is_whole || lh_store_step(run.store) >= sim.opts.step_last);
    LH_CHECK(!is_whole || lh_store_step(run.store) == sim.reference.step);
    lh_sim_run_deinit(&run);
    sim_case_unmake(&sim);
    return 0;
}
