/*
 * Declarations that the binding's files share. Python.h is included only in csrc/py, always through
 * reader.h.
 *
 * Each file has a table of its functions or of its methods of an Engine; module.c and engine.c
 * collect these tables.
 *
 * [Note: What outlives what] A lend (a torch tensor over a unit's bytes) may outlive everything:
 * the user keeps a view, closes the session, exits. struct lhpy_core therefore holds what a lend
 * needs (the engine's counters, the memory). The Engine object and each lend hold a reference to
 * it; whoever drops the last reference frees it, on any thread, without the GIL.
 *
 * Thread: everything here runs with the GIL, except a lend's deleter.
 */
#ifndef LH_PY_LHPY_H
#define LH_PY_LHPY_H

#include "py/reader.h"

#include <stdatomic.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/waker.h"
#include "compute/rule.h"
#include "dev/pins.h"
#include "mem/arena.h"
#include "py/dlpack_abi.h"
#include "sched/engine.h"
#include "team/team.h"

/* The most copies to and from an accelerator in flight. */
#define LHPY_COPY_COUNT 64
/* No unit. */
#define LHPY_UNIT_NONE UINT32_MAX

struct lhpy_core {
    _Atomic uint32_t references;
    struct lh_alloc alloc;
    struct lh_engine *engine;
    struct lh_arena *arena;
    struct lh_dev *dev;                    /* NULL: computation is in main memory */
    struct lh_arena *device_arena;         /* emulated device memory, or NULL */
    struct lhpy_dl_managed *device_memory; /* torch's tensor of device memory, or NULL */
    uint8_t *device_base; /* where the device finds units, or the region that has them */
    int32_t device_type;  /* the device of lends and gradients, as DLPack numbers it */
    int32_t device_id;
    struct lh_dev_pins *pins; /* main memory that is registered with dev, or NULL */
    struct lh_arena *staging; /* for copies of the rest, or NULL: all is registered */
    uint32_t fork_count;      /* of the process that created the core: see lhpy_core_is_forked() */
    struct lh_waker waker;
    bool has_waker;
    struct lh_team team; /* of the processes that share parameters */
    bool has_team;
};

/* An Engine's options for a team (team.c). */
struct lhpy_team_opts {
    uint32_t mate;       /* this process; 0: the owner, or no team */
    uint32_t mate_count; /* 0: no team */
    int32_t fd;          /* a mate's: the team's memory, which stays the caller's */
    /* how long to wait for a process that does not gather a unit; 0: units are copied whole */
    uint32_t gather_wait_ms;
};

struct lhpy_device_opts {
    const char *name; /* "cpu", or the name of a backend */
    int32_t index;
    int32_t numa_node; /* for main memory that is copied to and from the device; -1: any */
    uint64_t bytes;    /* the size of the device memory for parameters */
    uint64_t link_bytes_per_s[LH_DEV_DIRECTION_COUNT];
    uint64_t tail_bytes; /* the most that lh_tail_post() copies */
    bool is_unified;     /* the device reads units in main memory, and bytes is 0 */
    PyObject *memory;    /* borrowed: a tensor of bytes on the device, or None */
};

/* An Engine's options for saved tensors (saved.c). */
struct lhpy_saved_make {
    struct lh_saved_opts opts;
    PyObject *object; /* the Store or None */
};

/* An Engine's options for units that are read in place (in_place.c). */
#define LHPY_IN_PLACE_FILE_COUNT_MAX 192
struct lhpy_in_place_row {
    struct lh_io_file io_file;
    struct lh_in_place_file file; /* the path in it is borrowed from Python */
    int64_t mtime_ns;
};
struct lhpy_in_place {
    struct lhpy_in_place_row *rows; /* owned, and so are the units of opts */
    uint32_t row_count;
    struct lh_in_place_opts opts;
    PyObject *checksums; /* borrowed: what owns the memory of all checksums */
    struct lh_in_place_file files[LHPY_IN_PLACE_FILE_COUNT_MAX];
};

/* The binding's state of a parameter. */
struct lhpy_param {
    PyObject *tensor;       /* owned: the Parameter */
    PyObject *hollow;       /* owned: the Parameter's data while not resident */
    PyObject *bound_class;  /* owned, or NULL: the type while resident */
    PyObject *hollow_class; /* owned, or NULL: the type while not resident; reads raise an error */
    PyObject *gradient;     /* owned while the engine reads it, else NULL */
    uint64_t gradient_bytes;
    uint64_t byte_offset; /* in the unit */
    int32_t ndim;
    int64_t *shape;  /* ndim sizes, then ndim strides */
    PyObject *order; /* owned: dimensions, the outermost in memory first; NULL: contiguous */
    struct lhpy_dl_type dtype;
    int64_t version; /* tensor._version when the tensor was bound in a forward; -1: not read */
    bool is_changed; /* changed in place inside a forward */
    bool is_cast;    /* frozen fp32 on an accelerator: cast_class is its type under autocast */
    bool is_moved;   /* trained, but not by the engine's optimizer: frozen for the engine */
    uint8_t *place;  /* of the sum of gradients, in the arena; NULL: they are not summed (sums.c) */
    uint8_t sum_state;
    uint64_t sum_backward; /* the number of the backward that brought its last gradient */
};

struct lhpy_unit {
    uint32_t scope_depth;  /* open scopes of the unit: above 0, its parameters are bound */
    unsigned long binder;  /* the thread that binds or unbinds it, or 0: [Note: One binder] */
    bool is_used_backward; /* pinned for handles that are still to be unpacked */
    bool has_gradients;    /* in the open step */
    uint32_t epoch;        /* counts steps and writes; a handle with an older epoch is stale */
};

/* The Engine type's instance (engine.c). */
struct lhpy_engine {
    PyObject_HEAD struct lhpy_core *core;
    PyObject *store;           /* owned: the Store that the engine uses */
    PyObject *saved_store;     /* owned: the Store of saved tensors, or None */
    PyObject *apart_store;     /* owned: the Store of gradients apart, or None */
    PyObject *in_place_object; /* owned: what in_place was read from */
    PyObject *cast_class;      /* owned, or NULL: a type for parameters, see is_cast */
    struct lh_saved_opts saved;
    struct lhpy_in_place in_place;
    struct lh_io *io;
    struct lh_exec *exec;
    struct lh_engine_unit *units;
    struct lh_engine_param *engine_params;
    struct lhpy_unit *unit_states;
    uint32_t unit_count;
    struct lhpy_param *params;
    uint32_t param_count;
    uint32_t bound_unit_count; /* units with scope_depth > 0, in bound_units */
    uint32_t *bound_units;     /* followed by LHPY_UNIT_NONE, which no function accepts */
    uint32_t backward_unit_count;
    uint32_t *backward_units;
    uint32_t unscoped_unit_count; /* bound by Scope.read() or Scope.hold(): see hooks.c */
    uint32_t *unscoped_units;
    uint32_t held_count; /* gradients held, in held_params */
    uint32_t *held_params;
    uint64_t held_bytes;
    uint64_t unheard_bytes; /* of gradients since the last wait for the engine to hear of them */
    struct lh_budget budget;
    uint64_t hollow_base[4]; /* by enum lh_dtype: the array that hollow parameters point into */
    uint64_t hollow_bytes[4];
    struct lhpy_dl_type autocast_dtype; /* bits 0: no autocast */
    /* Between the first unpack or gradient and the end-of-backward callback. */
    bool backward_is_open;
    bool step_has_gradients;
    uint64_t backward_number;    /* how many backwards and steps have ended */
    bool backward_has_gradients; /* the last backward that began has passed gradients */
    bool has_sums;
    struct lh_sum_tree
        *sum_trees;               /* owned, one a parameter; NULL: sums are not in a tree's order */
    uint64_t sum_leaf_count;      /* the most micro-batches of a step, with sum_trees */
    uint64_t sum_leaf;            /* the number of the micro-batch of the next gradients */
    uint64_t sum_stride;          /* from a partial sum to the next one, in elements */
    bool is_paused;               /* turn_thread may use the store until resume() */
    bool forward_is_open;         /* inside a forward whose saved tensors are packed */
    unsigned long forward_thread; /* the thread that opened the forward */
    uint32_t turn_depth;          /* nested calls of turn_thread; 0: no thread has the turn */
    unsigned long turn_thread;
    bool forward_is_train; /* the last forward that began had gradients enabled */
    PyObject *raiser;      /* (code, message) -> exception */
    PyObject *on_backward; /* called once per backward */
    PyObject *on_gradient; /* called before the first gradient of a step */
    PyObject *team_check;  /* raises an error if another process of the team is gone; or NULL */
    PyObject *on_forward;  /* called when a scope begins (True) or ends (False) outside a forward */
    PyObject *in_backward; /* called to ask whether the current thread runs a backward */
    PyObject *zo_image;    /* bytes: the image of zo_kernel; NULL: none is loaded */
    struct lh_dev_kernel *zo_kernel;
    PyObject *on_use; /* called with a unit that was just pinned; may be NULL */
    PyObject *handle_type;
    PyObject *scope_type;
    char io_reason[512];
    uint64_t release_count; /* the engine's count of released gradients at the last sweep */
};

/* Make a zeroed instance of a type of the module. NULL with a Python error. */
static inline void *lhpy_type_new(PyObject *type)
{
    return ((allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc))((PyTypeObject *)type, 0);
}

/* Free the memory of an instance that the garbage collector does not track. */
static inline void lhpy_type_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Replace an owned reference with value, which is stolen. */
static inline void lhpy_replace(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

/* core.c */
struct lhpy_core *lhpy_core_create(void);
void lhpy_core_retain(struct lhpy_core *core);
void lhpy_core_release(struct lhpy_core *core); /* any thread, without the GIL */
/*
 * Whether the calling process is a forked child of the one that created core: it has neither the
 * engine's threads nor its memory, and must not touch its files. Functions that would touch them do
 * nothing or raise an error.
 */
bool lhpy_core_is_forked(const struct lhpy_core *core);

/* device.c */
/* Create the accelerator opts->name; "cpu" creates nothing. Call this without the GIL. */
int lhpy_device_make(struct lhpy_core *core, const struct lhpy_device_opts *opts,
                     struct lh_error *err);
/*
 * Register the memory that copies use with the accelerator, if there is one. If the driver refuses,
 * other copies are staged from now on, and the device's note says so.
 */
int lhpy_device_pin(struct lhpy_core *core, const struct lh_dev_buffer *buffers, uint32_t count,
                    struct lh_error *err);
/*
 * Find the address at which the accelerator reads the units' region, whose copies no one makes.
 * Errors: -ENOMEM (the driver has not registered all memory), or the driver's.
 */
int lhpy_device_find(struct lhpy_core *core, uint8_t *region, struct lh_error *err);
void lhpy_device_destroy(struct lhpy_core *core);
/* torch's current stream on the device. NULL: the default stream, or no device. */
void *lhpy_device_stream(const struct lhpy_engine *self);
/* Order later acquires and gradients with torch's current stream. Returns the previous stream. */
void *lhpy_device_stream_note(struct lhpy_engine *self);

/* zo.c */
extern PyMethodDef lhpy_zo_methods[];   /* of an Engine */
extern PyMethodDef lhpy_zo_functions[]; /* of the module */
/* Unload the kernel, after all launches have finished. Call this without the GIL. */
void lhpy_engine_zo_unload(struct lhpy_engine *self);

/* tensor.c */
/* torch's exchange table; NULL with an ImportError set. */
const struct lhpy_dl_exchange *lhpy_exchange(void);
/* Read a tensor's pointer, shape and dtype, borrowed from the tensor. -1 with a Python error. */
int lhpy_tensor_read(PyObject *tensor, struct lhpy_dl_tensor *out);
bool lhpy_tensor_is_contiguous(const struct lhpy_dl_tensor *tensor);
bool lhpy_tensor_is_dense(const struct lhpy_dl_tensor *tensor);
int64_t lhpy_tensor_count(const struct lhpy_dl_tensor *tensor);
/* How often tensor was changed in place; tensors detached from it share the count. -1: error. */
long lhpy_tensor_version(PyObject *tensor);
/* The core's dtype; LH_DTYPE_BYTES for types that the core does not have. */
enum lh_dtype lhpy_dtype(struct lhpy_dl_type type);
/*
 * Create a torch tensor over bytes of a pinned unit, with a pin of its own, which is dropped when
 * the storage is freed. shape_strides: ndim sizes, then ndim strides. NULL with a Python error.
 */
PyObject *lhpy_lend(struct lhpy_core *core, uint32_t unit, uint64_t byte_offset, int32_t ndim,
                    const int64_t *shape_strides, struct lhpy_dl_type dtype);

/*
 * Create a tensor of bytes over a saved tensor that was fetched to main memory. When the storage is
 * freed, the item is dropped. NULL with a Python error: the item still belongs to the caller.
 */
PyObject *lhpy_saved_lend(struct lhpy_core *core, uint32_t item, int64_t bytes);
/* Create a tensor of bytes over memory of the device, which stays while the tensor lives. */
PyObject *lhpy_place_lend(struct lhpy_core *core, uint8_t *address, int64_t bytes);

/* error.c */
/*
 * Raise the exception that the raiser makes; return NULL. In lhpy_raise(), code names a rule of the
 * binding that was broken; in the functions below, it is an errno of the core.
 */
PyObject *lhpy_raise(PyObject *raiser, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* A str of a message; file names in it may be arbitrary bytes, truncated anywhere. */
PyObject *lhpy_text(const char *message);
PyObject *lhpy_raise_error(PyObject *raiser, const struct lh_error *err);
/* Without a raiser: ValueError (-EINVAL), MemoryError (-ENOMEM, -ENOSPC) or OSError. */
PyObject *lhpy_raise_builtin(const struct lh_error *err);
/* The engine's own error. */
PyObject *lhpy_raise_engine(struct lhpy_engine *self);
/* Whether the session is neither closed nor owned by another process. */
bool lhpy_is_open(const struct lhpy_engine *self);
int lhpy_check_open(struct lhpy_engine *self);
/* The Engine that a method was called on; NULL with a Python error if it is not open. */
struct lhpy_engine *lhpy_engine_open(PyObject *object);
/* Raise an IndexError if index is not below count. what: "unit" or "param", for the message. */
int lhpy_index_check(const char *what, uint32_t index, uint32_t count);
/* Read an index below count. what: "unit" or "param", for errors. -1 with a Python error. */
int lhpy_index_read(PyObject *number, const char *what, uint32_t count, uint32_t *index_out);
/* Read a sequence of such indices, which the caller releases with PyMem_Free(). */
int lhpy_indices_read(PyObject *numbers, const char *what, uint32_t count, uint32_t **indices_out,
                      uint32_t *index_count_out);

/* engine.c */
extern PyType_Spec lhpy_engine_spec;
/* Collect the methods of all files, before the type is made. */
void lhpy_engine_methods_join(void);
/*
 * Pin unit, waiting without the GIL; a signal that arrives meanwhile is raised once the unit is
 * resident. -1 with a Python error.
 */
int lhpy_engine_use(struct lhpy_engine *self, uint32_t unit);
void lhpy_engine_unuse(struct lhpy_engine *self, uint32_t unit);
/*
 * Requests to the engine belong to one thread at a time ([Note: Requests] in sched/request.h), but
 * the GIL is released while one waits. A thread therefore takes the turn for each of its requests,
 * or for several. -1 with a Python error: a signal arrived, or the session was closed meanwhile.
 */
int lhpy_engine_turn_take(struct lhpy_engine *self);
void lhpy_engine_turn_give(struct lhpy_engine *self);
typedef int (*lhpy_wait_fn)(struct lh_engine *engine, uint64_t argument, int timeout_ms);
/* Wait in slices without the GIL, checking for signals. 1, or -1 with a Python error. */
int lhpy_engine_wait(struct lhpy_engine *self, lhpy_wait_fn wait, uint64_t argument);
typedef int (*lhpy_wait_plain_fn)(struct lh_engine *engine, int timeout_ms);
int lhpy_engine_wait_plain(struct lhpy_engine *self, lhpy_wait_plain_fn wait);
/* The same in the calling thread's turn, for calls that send requests. */
int lhpy_engine_request(struct lhpy_engine *self, lhpy_wait_fn wait, uint64_t argument);
int lhpy_engine_request_plain(struct lhpy_engine *self, lhpy_wait_plain_fn wait);
/*
 * Pin unit until its handles are gone, or until lhpy_engine_backward_end(). -1 with a Python error.
 */
int lhpy_engine_use_backward(struct lhpy_engine *self, uint32_t unit);
void lhpy_engine_unuse_backward(struct lhpy_engine *self, uint32_t unit);
/* A backward has begun: register the callback at its end, once. -1 with a Python error. */
int lhpy_engine_backward_begin(struct lhpy_engine *self);
/* Drop every pin that waits for handles. */
void lhpy_engine_backward_release(struct lhpy_engine *self);

/* engine_make.c */
PyObject *lhpy_engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
/* budget(units, host_bytes, bookkeeping_bytes, ..., raiser): the result of lh_budget_make(). */
PyObject *lhpy_budget(PyObject *module, PyObject *args);

/* session.c: the Engine's methods around a step */
extern PyMethodDef lhpy_session_methods[];
extern const char *const lhpy_link_names[]; /* by enum lh_engine_link */

/* hooks.c */
extern PyType_Spec lhpy_scope_spec;
extern PyMethodDef lhpy_hook_methods[];
/* Bind: make the parameters' data lends. Unbind: make it hollow. -1 with a Python error. */
int lhpy_unit_bind(struct lhpy_engine *self, uint32_t unit);
/* Unbind what Scope.read() and Scope.hold() bound. */
void lhpy_engine_unscoped_release(struct lhpy_engine *self);
void lhpy_unit_unbind(struct lhpy_engine *self, uint32_t unit);

/* cast.c */
/*
 * The parameter whose autocast cast tensor is, or is a view of, and the view's offset in the cast;
 * param_count if tensor is no such cast. view: the DLPack description of tensor.
 */
uint32_t lhpy_cast_find(const struct lhpy_engine *self, PyObject *tensor,
                        const struct lhpy_dl_tensor *view, uint64_t *byte_offset_out);

/* context.c */
extern PyType_Spec lhpy_context_spec;

/* gradient.c */
/* Release gradients that the engine has read. */
void lhpy_engine_sweep(struct lhpy_engine *self);
/* Release all held gradients; the engine must not be reading any of them. */
void lhpy_engine_gradients_drop(struct lhpy_engine *self);
/*
 * Begin the backward, and the step with its first gradient; return the gradient in a known dtype
 * and in the order of the unit's elements. New reference, or NULL with an error.
 */
PyObject *lhpy_engine_gradient_begin(struct lhpy_engine *self, uint32_t param, PyObject *gradient,
                                     struct lhpy_dl_tensor *view);
PyObject *lhpy_engine_gradient_take(struct lhpy_engine *self, uint32_t param, PyObject *gradient);

/* saved.c */
extern PyMethodDef lhpy_saved_methods[];
extern const struct lhpy_table lhpy_saved_table; /* of struct lhpy_saved_make */

/* team.c: sharing parameters with other processes */
extern PyMethodDef lhpy_team_methods[];
extern const struct lhpy_table lhpy_team_table; /* of struct lhpy_team_opts */
/* Make or join a team, if opts name one: before the arena, which then has no region. */
int lhpy_team_make(struct lhpy_engine *self, const struct lhpy_team_opts *opts,
                   struct lh_error *err);
static inline bool lhpy_team_is_mate(const struct lhpy_engine *self)
{
    return self->core->has_team && self->core->team.mate > 0;
}
/* While a thread waits: check that the team's processes are there. -1 with a Python error. */
int lhpy_team_check(struct lhpy_engine *self);
void lhpy_team_close(struct lhpy_core *core);

/* in_place.c */
extern PyMethodDef lhpy_in_place_functions[];       /* of the module */
extern const struct lhpy_table lhpy_unpack_table;   /* of struct lh_unpack */
extern const struct lhpy_table lhpy_in_place_table; /* of struct lhpy_in_place */
/* Complete the options with the files that were read. -1 with a Python error. */
int lhpy_in_place_prepare(struct lhpy_in_place *in_place);

/* sums.c */
extern PyMethodDef lhpy_sums_methods[];   /* of an Engine */
extern PyMethodDef lhpy_sums_functions[]; /* of the module */
/* The size of the memory for the sums of all gradients; where it is, aligned to 4 KiB. */
uint64_t lhpy_sums_bytes(const struct lhpy_engine *self);
void lhpy_sums_place(struct lhpy_engine *self, uint8_t *memory);
/* The gradient of a backward: gradient itself, or what was added to it if it is a stand-in. */
PyObject *lhpy_sums_unwrap(struct lhpy_engine *self, uint32_t param, PyObject *gradient);
/* Add a contiguous gradient in main memory to param's sum. */
void lhpy_sums_add(struct lhpy_engine *self, uint32_t param, const struct lhpy_dl_tensor *view);
/* Let the engine add a contiguous gradient on the accelerator. Returns lh_sum_post()'s result. */
int lhpy_sums_post(struct lhpy_engine *self, uint32_t param, const struct lhpy_dl_tensor *view);
void lhpy_sums_forget(struct lhpy_engine *self);

/* handle.c */
extern PyType_Spec lhpy_handle_spec;
extern PyMethodDef lhpy_handle_methods[]; /* of an Engine */

/* store.c */
extern PyType_Spec lhpy_store_spec;
extern PyMethodDef lhpy_store_functions[];
/* The core's store; NULL with a Python error if it is closed. */
struct lh_store *lhpy_store_get(PyObject *object);
/* The heap bytes that the store holds. */
uint64_t lhpy_store_live_bytes(PyObject *object);

/*
 * The module's functions: csrc/compute for tests, benchmarks and doctor (adam.c), what works on
 * this machine (doctor.c), and csrc/plan and csrc/sim with dicts that python/lohan/planning
 * documents.
 */
extern PyMethodDef lhpy_adam_functions[];
/* Find a rule by its name; NULL: AdamW. 0, or -1 with a Python error. */
int lhpy_rule_of(const char *name, enum lh_rule *rule_out);
extern PyMethodDef lhpy_doctor_functions[];
extern PyMethodDef lhpy_sequence_functions[];
extern PyMethodDef lhpy_plan_functions[];
PyObject *lhpy_simulate(PyObject *module, PyObject *args, PyObject *kwargs);

/* A function with keyword arguments, in the form that PyMethodDef expects. */
#define LHPY_KEYWORDS(function)                                                                    \
    (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

#endif
