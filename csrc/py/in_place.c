/* Units that are read in place (sched/in_place.h), as Python describes them. */
#include <sys/stat.h>

#include "base/assert.h"
#include "py/lhpy.h"

const struct lhpy_table lhpy_unpack_table =
    LHPY_TABLE_PLAIN("a packed tensor", LHPY_FORM_TUPLE, struct lh_unpack, format, dtype, rounding,
                     rows, columns, block_rows, block_columns, scale_type, nested_block,
                     nested_offset, group_rows, order, has_zeros, has_index, zero, rounds_scale);

static const struct lhpy_table run_table =
    LHPY_TABLE_PLAIN("a run", LHPY_FORM_TUPLE, struct lh_in_place_run, file, file_offset, offset,
                     bytes, checksum_first);

static const struct lhpy_table move_table =
    LHPY_TABLE_PLAIN("a move", LHPY_FORM_TUPLE, struct lh_in_place_move, from, to, bytes);

static const struct lhpy_table pack_table =
    LHPY_TABLE("a pack", LHPY_FORM_TUPLE, struct lh_in_place_pack,
               LHPY_STRUCT("unpack", struct lh_in_place_pack, unpack, lhpy_unpack_table),
               LHPY_FIELDS(struct lh_in_place_pack, from, to, scales, table, nested, nested_table,
                           zeros, index));

static const struct lhpy_table unit_table =
    LHPY_TABLE("a unit in place", LHPY_FORM_TUPLE, struct lh_in_place_unit,
               LHPY_FIELD(struct lh_in_place_unit, unit),
               LHPY_ROWS("runs", struct lh_in_place_unit, runs, run_count, run_table),
               LHPY_ROWS("moves", struct lh_in_place_unit, moves, move_count, move_table),
               LHPY_ROWS("packs", struct lh_in_place_unit, packs, pack_count, pack_table),
               LHPY_FIELDS(struct lh_in_place_unit, checksums, checksum_count));

static const struct lhpy_table file_table =
    LHPY_TABLE("a file", LHPY_FORM_TUPLE, struct lhpy_in_place_row,
               LHPY_FIELD_AS("fd", struct lhpy_in_place_row, io_file.fd),
               LHPY_FIELD_AS("path", struct lhpy_in_place_row, file.path),
               LHPY_FIELD_AS("bytes", struct lhpy_in_place_row, file.bytes),
               LHPY_FIELD_AS("is_direct", struct lhpy_in_place_row, io_file.direct),
               LHPY_FIELD(struct lhpy_in_place_row, mtime_ns));

const struct lhpy_table lhpy_in_place_table =
    LHPY_TABLE("in_place", LHPY_FORM_TUPLE, struct lhpy_in_place,
               LHPY_ROWS("files", struct lhpy_in_place, rows, row_count, file_table),
               LHPY_ROWS("units", struct lhpy_in_place, opts.units, opts.unit_count, unit_table),
               LHPY_FIELD_AS("kept_bytes", struct lhpy_in_place, opts.kept_bytes),
               LHPY_FIELD(struct lhpy_in_place, checksums));

/* Whether a file has the size and the time of modification that Python has seen. */
static bool is_unchanged(const void *context, uint32_t file)
{
    const struct lhpy_in_place *in_place = context;
    const struct lhpy_in_place_row *row = &in_place->rows[file];
    struct stat found;
    LH_ASSERT(file < in_place->row_count);
    return fstat(row->io_file.fd, &found) == 0 && (uint64_t)found.st_size == row->file.bytes &&
           found.st_mtim.tv_sec * INT64_C(1000000000) + found.st_mtim.tv_nsec == row->mtime_ns;
}

int lhpy_in_place_prepare(struct lhpy_in_place *in_place)
{
    if (in_place->row_count > LHPY_IN_PLACE_FILE_COUNT_MAX) {
        PyErr_Format(PyExc_ValueError, "%u files are read in place: the maximum is %d",
                     in_place->row_count, LHPY_IN_PLACE_FILE_COUNT_MAX);
        return -1;
    }
    for (uint32_t i = 0; i < in_place->row_count; i++)
        in_place->files[i] = in_place->rows[i].file;
    in_place->opts.files = in_place->files;
    in_place->opts.file_count = in_place->row_count;
    in_place->opts.is_unchanged = is_unchanged;
    in_place->opts.context = in_place;
    return 0;
}

static PyObject *unpack(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct lh_unpack what = {0};
    void *packed = NULL, *scales = NULL, *table = NULL;
    void *nested = NULL, *nested_table = NULL, *zeros = NULL, *index = NULL, *out = NULL;
    uint64_t first = 0, count = 0;
    if (LHPY_ARGS(args, NULL, LHPY_ARG_STRUCT("unpack", what, lhpy_unpack_table), LHPY_ARG(first),
                  LHPY_ARG(count), LHPY_ARG(packed), LHPY_ARG(scales), LHPY_ARG(table),
                  LHPY_ARG(nested), LHPY_ARG(nested_table), LHPY_ARG(zeros), LHPY_ARG(index),
                  LHPY_ARG(out)) < 0)
        return NULL;
    if (!lh_unpack_is_valid(&what) || first > lh_unpack_count(&what) ||
        count > lh_unpack_count(&what) - first || (lh_unpack_is_narrow(&what) && first % 2 != 0)) {
        PyErr_Format(PyExc_ValueError, "%llu elements from %llu on of a packed tensor are invalid",
                     (unsigned long long)count, (unsigned long long)first);
        return NULL;
    }
    const struct lh_unpack_source source = {packed,       scales, table, nested,
                                            nested_table, zeros,  index};
    Py_BEGIN_ALLOW_THREADS
    lh_unpack(&what, &source, first, count, out);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

PyMethodDef lhpy_in_place_functions[] = {
    {"unpack", unpack, METH_VARARGS,
     "unpack(description, first, count, addresses of what is packed, of scales, table, nested, "
     "nested_table, zeros, index, and of the result): decode elements of a quantized tensor."},
    {NULL, NULL, 0, NULL},
};
