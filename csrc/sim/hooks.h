/*
 * Hooks: what a caller adds to a simulation, as one table of functions.
 *
 * `lohan simulate` has no hooks: no byte exists, every request succeeds, and the training thread
 * trains until the last step. The simulator's tests (tests/sim/lives) have them: they give the
 * drives contents and faults, check every byte, vary the training script, and end the process at
 * any point. The parts of csrc/sim call the table at the points below and know nothing else about
 * it.
 *
 * Any of the functions may be NULL, and so may the table. Each function gets the world's
 * hooks_context as its first argument, and may schedule events and call the engine. In the comments
 * below, "True:" and "False:" say what that result means.
 *
 * Thread: one.
 */
#ifndef LH_SIM_HOOKS_H
#define LH_SIM_HOOKS_H

struct lh_dev_copy;
struct lh_engine_opts;
struct lh_error;
struct lh_exec_job;
struct lh_io_request;
struct lh_sim_transfer;

/* The kinds of trace records; the comments list the three numbers of each record, in order. */
enum lh_sim_trace_kind {
    LH_SIM_TRACE_SUBMIT = 1, /* kind << 32 | file, offset, bytes */
    LH_SIM_TRACE_DONE,       /* kind << 32 | file, offset, -result */
    LH_SIM_TRACE_FAULT,      /* by hooks: kind of fault << 32 | file, offset, detail */
    LH_SIM_TRACE_JOB,        /* worker, work_bytes, nanoseconds */
    LH_SIM_TRACE_TRAIN,      /* state of the training thread, step, block << 32 | unit */
    LH_SIM_TRACE_STEP,       /* step that ended, its time since the previous one, bytes */
    LH_SIM_TRACE_CRASH,      /* by hooks: unsynced writes, blocks kept, blocks lost */
    LH_SIM_TRACE_COPY,       /* direction, bytes, -result, at the end of a copy */
};

struct lh_sim_hooks {
    /* Something happened at the current time: receive a trace record. */
    void (*traced)(void *context, enum lh_sim_trace_kind kind, uint64_t a, uint64_t b, uint64_t c);

    /* run.c: memory was mapped as inaccessible; its first used_bytes are used. */
    void (*memory_mapped)(void *context, void *memory, uint64_t bytes, uint64_t used_bytes);
    /* An engine is about to be created with these options. */
    void (*engine_described)(void *context, struct lh_engine_opts *opts);
    /* Nothing moves at the current time. True: the process has ended. */
    bool (*has_died)(void *context);
    /* The checkers of csrc/sim are about to run. */
    void (*quiet)(void *context);
    /* Training is over. False: there were aborted steps, whose bytes are not those of any step. */
    bool (*trained)(void *context);
    /* True: the process ends before the next event. */
    bool (*stops)(void *context);
    /* No event is pending. True: the reason is a request that never completes. */
    bool (*hangs)(void *context);

    /* io.c: a request was submitted into a slot, which is not reused until the request is done or
     * dropped. The hook may shorten or delay the transfer. False: the request never completes. */
    bool (*request_begun)(void *context, uint32_t slot, struct lh_io_request *request,
                          struct lh_sim_transfer *transfer);
    /* A transfer of a request ended. True: the transfer was submitted again, for the rest. */
    bool (*request_continued)(void *context, uint32_t slot, struct lh_sim_transfer *transfer);
    /* A request's time is over. Returns the request's result; *offset: where it took effect. */
    int (*request_done)(void *context, uint32_t slot, uint64_t *offset);
    /* The process ends while a request is in flight. */
    void (*request_dropped)(void *context, uint32_t slot);

    /* exec.c: the time of a job is over. */
    void (*job_done)(void *context, struct lh_exec_job *job);

    /* dev.c: a copy is submitted, and takes *extra_ns longer. Returns 0, or -errno to refuse it. */
    int (*copy_taken)(void *context, struct lh_dev_copy *copy, uint64_t *extra_ns,
                      struct lh_error *err);
    void (*copy_begun)(void *context, struct lh_dev_copy *copy);
    /* A copy's time is over. Returns the copy's result. */
    int (*copy_ended)(void *context, struct lh_dev_copy *copy);
    /* True: the accelerator executes nothing more, and copies in flight fail. */
    bool (*dev_is_dead)(void *context);

    /* train.c: called whenever the training thread is polled. True: something happened. */
    bool (*train_polled)(void *context);
    /* Poll a state of the script that only hooks enter. True: something happened. */
    bool (*state_polled)(void *context);
    /* A step is about to begin. True: the script does something else first, between two steps. */
    bool (*forward_replaced)(void *context);
    /* A step has begun; has_gradient[i]: whether parameter i has a gradient in it. */
    void (*forward_begun)(void *context, bool *has_gradient);
    /* All blocks were computed in forward. True: something other than backward follows. */
    bool (*backward_replaced)(void *context);
    /* A block was computed in backward. True: the step is aborted, before the block's gradients. */
    bool (*backward_aborted)(void *context);
    /* The first gradient of a step is about to be passed. */
    void (*gradients_begun)(void *context);
    /* A block or a gradient is about to be computed; use_ended is called in the same order. */
    void (*use_made)(void *context);
    /* Returns the address of the gradient's bytes. */
    const void *(*gradient_made)(void *context, uint32_t param);
    /* A gradient's computation was requested. True: the hook keeps the gradient, and passes one to
     * the engine itself, before the close. */
    bool (*gradient_kept)(void *context, uint32_t param);
    /* The last block was computed in backward. True: something other than the close follows. */
    bool (*close_replaced)(void *context);
    void (*use_begun)(void *context); /* the computation of a block begins */
    void (*use_ended)(void *context);
    /* The step is about to be closed. Called each time that a close is tried. */
    void (*closing)(void *context);
    /* The step is closed. True: a flush follows, unless the hook has entered another state. */
    bool (*closed)(void *context);
};

/* Call a function of a world's hooks, if there is one. */
#define LH_SIM_HOOK_CALL(world, function, ...)                                                     \
    do {                                                                                           \
        if ((world)->hooks && (world)->hooks->function)                                            \
            (world)->hooks->function((world)->hooks_context, ##__VA_ARGS__);                       \
    } while (0)

/* The result of a function of a world's hooks, or `otherwise` if there is no such function. */
#define LH_SIM_HOOK_GET(world, otherwise, function, ...)                                           \
    ((world)->hooks && (world)->hooks->function                                                    \
         ? (world)->hooks->function((world)->hooks_context, ##__VA_ARGS__)                         \
         : (otherwise))

#endif
