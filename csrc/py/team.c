/* Engines that share parameters with other processes of the machine (team/team.h). */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "py/lhpy.h"

/* How long a wait for a gather lasts before it is repeated. */
#define GATHER_SLICE_MS 10000

const struct lhpy_table lhpy_team_table = LHPY_TABLE_PLAIN(
    "team", LHPY_FORM_TUPLE, struct lhpy_team_opts, mate, mate_count, fd, gather_wait_ms);

int lhpy_team_make(struct lhpy_engine *self, const struct lhpy_team_opts *opts,
                   struct lh_error *err)
{
    struct lhpy_core *core = self->core;
    if (opts->mate_count == 0)
        return 0;
    struct lh_team_opts team_opts = {
        .unit_count = self->unit_count,
        .mate_count = opts->mate_count,
        .region_bytes = self->budget.region_bytes,
    };
    if (opts->mate == 0) {
        LH_TRY(lh_mem_available_check(team_opts.region_bytes, err));
        LH_TRY(lh_team_create(&team_opts, &core->team, err));
    } else {
        int fd = fcntl(opts->fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            return lh_error_set(err, -errno, "cannot use the shared memory: %s", strerror(errno));
        LH_TRY(lh_team_join(fd, opts->mate, &core->team, err));
    }
    core->has_team = true;
    return 0;
}

void lhpy_team_close(struct lhpy_core *core)
{
    if (!core->has_team)
        return;
    for (uint32_t i = 0; i <= core->team.mate_count; i++) {
        if (core->team.bells[i] >= 0)
            close(core->team.bells[i]);
    }
    lh_team_leave(&core->team);
}

int lhpy_team_check(struct lhpy_engine *self)
{
    if (!self->team_check)
        return 0;
    PyObject *answer = PyObject_CallFunction(self->team_check, NULL);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

static PyObject *team_on_wait(PyObject *object, PyObject *callback)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    lhpy_replace(&self->team_check, Py_NewRef(callback));
    Py_RETURN_NONE;
}

static PyObject *team_files(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    LH_ASSERT(self->core->has_team);
    return Py_BuildValue("(ii)", self->core->team.fd, self->core->waker.fd);
}

static PyObject *team_bell(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t process = 0;
    int32_t fd = -1;
    if (!self || LHPY_ARGS(args, NULL, LHPY_ARG(process), LHPY_ARG(fd)) < 0 ||
        lhpy_index_check("process", process, self->core->team.mate_count + 1) < 0)
        return NULL;
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    self->core->team.bells[process] = copy;
    Py_RETURN_NONE;
}

static PyObject *team_step(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    if (!self)
        return NULL;
    LH_ASSERT(self->core->has_team);
    return PyLong_FromUnsignedLongLong(lh_team_step(&self->core->team));
}

/*
 * gather_next(): wait for the next unit to gather. Returns the unit and a tensor of bytes over its
 * place, or None once the engine has stopped.
 */
static PyObject *gather_next(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct lhpy_engine *self = lhpy_engine_open(object);
    uint32_t unit = 0;
    int rc = 0;
    if (!self)
        return NULL;
    struct lh_engine *engine = self->core->engine;
    while (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = lh_gather_next(engine, &unit, GATHER_SLICE_MS);
        Py_END_ALLOW_THREADS
    }
    if (rc < 0)
        Py_RETURN_NONE;
    PyObject *place = lhpy_place_lend(self->core, lh_engine_address(engine, unit),
                                      (int64_t)self->units[unit].bytes);
    return place ? Py_BuildValue("(IN)", unit, place) : NULL;
}

/* gather_done(unit, is_complete) */
static PyObject *gather_done(PyObject *object, PyObject *args)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint32_t unit = 0;
    bool is_complete = false;
    if (LHPY_ARGS(args, NULL, LHPY_ARG(unit), LHPY_ARG(is_complete)) < 0 ||
        lhpy_index_check("unit", unit, self->unit_count) < 0)
        return NULL;
    if (lhpy_is_open(self))
        lh_gather_done(self->core->engine, unit, is_complete);
    Py_RETURN_NONE;
}

static PyObject *gather_round(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint64_t round = 0;
    if (LHPY_VALUE(number, round) < 0)
        return NULL;
    if (lhpy_is_open(self))
        lh_gather_round(self->core->engine, round);
    Py_RETURN_NONE;
}

static PyObject *gather_wait(PyObject *object, PyObject *flag)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    bool waits = false;
    if (LHPY_VALUE(flag, waits) < 0)
        return NULL;
    if (lhpy_is_open(self))
        lh_gather_wait(self->core->engine, waits);
    Py_RETURN_NONE;
}

/* gather_parts(bytes): where the parts of a unit of this size begin, and where the last ends. */
static PyObject *gather_parts(PyObject *object, PyObject *number)
{
    struct lhpy_engine *self = (struct lhpy_engine *)object;
    uint64_t bytes = 0;
    if (LHPY_VALUE(number, bytes) < 0)
        return NULL;
    LH_ASSERT(self->core->has_team);
    uint32_t count = self->core->team.mate_count + 1;
    PyObject *edges = PyList_New(0);
    for (uint32_t i = 0; edges && i <= count; i++) {
        PyObject *edge = PyLong_FromUnsignedLongLong(lh_gather_edge(bytes, count, i));
        if (!edge || PyList_Append(edges, edge) < 0)
            Py_CLEAR(edges);
        Py_XDECREF(edge);
    }
    return edges;
}

PyMethodDef lhpy_team_methods[] = {
    {"team_files", team_files, METH_NOARGS, "(fd of the shared memory, fd that wakes this engine)"},
    {"team_bell", team_bell, METH_VARARGS, "team_bell(process, fd): what wakes another process."},
    {"team_on_wait", team_on_wait, METH_O,
     "The function that raises an error if a process is gone that the engine may wait for."},
    {"gather_next", gather_next, METH_NOARGS, "gather_next() -> (unit, its bytes), or None"},
    {"gather_done", gather_done, METH_VARARGS, "gather_done(unit, is_complete)"},
    {"gather_round", gather_round, METH_O, "gather_round(number of backwards that have ended)"},
    {"gather_wait", gather_wait, METH_O, "gather_wait(whether the thread waits for others)"},
    {"gather_parts", gather_parts, METH_O, "gather_parts(bytes) -> edges of the parts"},
    {"team_step", team_step, METH_NOARGS, "The number of the last step that the owner has closed."},
    {NULL, NULL, 0, NULL},
};
