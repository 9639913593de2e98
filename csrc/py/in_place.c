/* Units that are read in place (sched/in_place.h), as Python describes them. */
#include <string.h>

#include "py/lhpy.h"

/* Parse a list of tuples into rows. release frees what parse allocated for a row; may be NULL.
 * NULL with a Python error. */
static void *rows_parse(PyObject *items, uint64_t row_bytes, bool (*parse)(PyObject *, void *),
                        void (*release)(const void *row), uint32_t *count_out)
{
    Py_ssize_t count = PyList_Size(items);
    *count_out = 0;
    if (count < 0)
        return NULL;
    uint8_t *rows = PyMem_Calloc((size_t)count + 1, (size_t)row_bytes);
    if (!rows)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!parse(PyList_GetItem(items, i), rows + (uint64_t)i * row_bytes)) {
            while (release && i-- > 0)
                release(rows + (uint64_t)i * row_bytes);
            PyMem_Free(rows);
            return NULL;
        }
    }
    *count_out = (uint32_t)count;
    return rows;
}

static bool run_parse(PyObject *item, void *row)
{
    struct lh_in_place_run *run = row;
    unsigned long long file_offset, offset, bytes;
    unsigned int file, checksum_first;
    if (!PyArg_ParseTuple(item, "IKKKI", &file, &file_offset, &offset, &bytes, &checksum_first))
        return false;
    *run = (struct lh_in_place_run){.file = file,
                                    .file_offset = file_offset,
                                    .offset = offset,
                                    .bytes = bytes,
                                    .checksum_first = checksum_first};
    return true;
}

static bool move_parse(PyObject *item, void *row)
{
    struct lh_in_place_move *move = row;
    unsigned long long from, to, bytes;
    if (!PyArg_ParseTuple(item, "KKK", &from, &to, &bytes))
        return false;
    *move = (struct lh_in_place_move){.from = from, .to = to, .bytes = bytes};
    return true;
}

static void unit_release(const void *row)
{
    const struct lh_in_place_unit *unit = row;
    PyMem_Free((void *)unit->runs);
    PyMem_Free((void *)unit->moves);
    PyMem_Free((void *)unit->checksums);
}

/* Parse (unit, runs, moves, bytes of checksums). */
static bool unit_parse(PyObject *item, void *row)
{
    struct lh_in_place_unit *unit = row;
    PyObject *runs = NULL;
    PyObject *moves = NULL;
    const char *checksums = NULL;
    Py_ssize_t checksum_bytes = 0;
    if (!PyArg_ParseTuple(item, "IO!O!y#", &unit->unit, &PyList_Type, &runs, &PyList_Type, &moves,
                          &checksums, &checksum_bytes))
        return false;
    unit->checksum_count = (uint32_t)((uint64_t)checksum_bytes / sizeof(uint32_t));
    uint32_t *copy = PyMem_Malloc((size_t)checksum_bytes + 1);
    if (!copy) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(copy, checksums, (size_t)checksum_bytes);
    unit->checksums = copy;
    unit->runs = rows_parse(runs, sizeof(*unit->runs), run_parse, NULL, &unit->run_count);
    if (unit->runs)
        unit->moves = rows_parse(moves, sizeof(*unit->moves), move_parse, NULL, &unit->move_count);
    if (unit->moves)
        return true;
    unit_release(unit);
    return false;
}

/* Parse (fd, path, bytes, is direct); path is borrowed from item. */
static bool file_parse(PyObject *item, struct lh_in_place_file *file, struct lh_io_file *io_file)
{
    unsigned long long bytes = 0;
    int fd = -1;
    int is_direct = 0;
    const char *path = NULL;
    if (!PyArg_ParseTuple(item, "iyKp", &fd, &path, &bytes, &is_direct))
        return false;
    *file = (struct lh_in_place_file){.path = path, .bytes = bytes};
    *io_file = (struct lh_io_file){.fd = fd, .direct = is_direct != 0};
    return true;
}

/* Parse (files, units), both lists. */
int lhpy_in_place_parse(PyObject *tuple, struct lhpy_in_place *made)
{
    PyObject *files = NULL;
    PyObject *units = NULL;
    if (!PyArg_ParseTuple(tuple, "O!O!", &PyList_Type, &files, &PyList_Type, &units))
        return -1;
    Py_ssize_t file_count = PyList_Size(files);
    if (file_count > LHPY_IN_PLACE_FILE_COUNT_MAX) {
        PyErr_Format(PyExc_ValueError, "%zd files are read in place: the maximum is %d", file_count,
                     LHPY_IN_PLACE_FILE_COUNT_MAX);
        return -1;
    }
    made->object = Py_NewRef(tuple);
    for (Py_ssize_t i = 0; i < file_count; i++) {
        if (!file_parse(PyList_GetItem(files, i), &made->files[i], &made->io_files[i]))
            return -1;
    }
    uint32_t unit_count = 0;
    struct lh_in_place_unit *rows =
        rows_parse(units, sizeof(*rows), unit_parse, unit_release, &unit_count);
    if (!rows)
        return -1;
    made->opts = (struct lh_in_place_opts){
        .files = made->files,
        .file_count = (uint32_t)file_count,
        .units = rows,
        .unit_count = unit_count,
    };
    return 0;
}

void lhpy_in_place_free(struct lhpy_in_place *made)
{
    for (uint32_t i = 0; i < made->opts.unit_count; i++)
        unit_release(&made->opts.units[i]);
    PyMem_Free((void *)made->opts.units);
    made->opts = (struct lh_in_place_opts){0};
}
