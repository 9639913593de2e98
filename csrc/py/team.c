/* Engines that share parameters with other processes of the machine (team/team.h). */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "py/lhpy.h"

const struct lhpy_table lhpy_team_table =
    LHPY_TABLE_PLAIN("team", LHPY_FORM_TUPLE, struct lhpy_team_opts, mate, mate_count, fd);

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

void lhpy_team_register(struct lhpy_core *core)
{
    struct lh_error slow = {0}; /* ignored: after a failure, copies are slower, but correct */
    if (!core->dev || !core->has_team)
        return;
    core->is_team_registered = core->dev->ops->memory_register(core->dev, core->team.region,
                                                               core->team.region_bytes, &slow) == 0;
}

void lhpy_team_unregister(struct lhpy_core *core)
{
    if (core->is_team_registered)
        core->dev->ops->memory_unregister(core->dev, core->team.region);
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

PyMethodDef lhpy_team_methods[] = {
    {"team_files", team_files, METH_NOARGS, "(fd of the shared memory, fd that wakes this engine)"},
    {"team_bell", team_bell, METH_VARARGS, "team_bell(process, fd): what wakes another process."},
    {"team_on_wait", team_on_wait, METH_O,
     "The function that raises an error if a process is gone that the engine may wait for."},
    {"team_step", team_step, METH_NOARGS, "The number of the last step that the owner has closed."},
    {NULL, NULL, 0, NULL},
};
