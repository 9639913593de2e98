/* Units that are read in place (sched/in_place.h), as Python describes them. */
#include "py/lhpy.h"

static const struct lhpy_table run_table =
    LHPY_TABLE_PLAIN("a run", LHPY_FORM_TUPLE, struct lh_in_place_run, file, file_offset, offset,
                     bytes, checksum_first);

static const struct lhpy_table move_table =
    LHPY_TABLE_PLAIN("a move", LHPY_FORM_TUPLE, struct lh_in_place_move, from, to, bytes);

static const struct lhpy_table checksum_table = LHPY_TABLE_OF("a checksum", uint32_t);

static const struct lhpy_table unit_table = LHPY_TABLE(
    "a unit in place", LHPY_FORM_TUPLE, struct lh_in_place_unit,
    LHPY_FIELD(struct lh_in_place_unit, unit),
    LHPY_ROWS("runs", struct lh_in_place_unit, runs, run_count, run_table),
    LHPY_ROWS("moves", struct lh_in_place_unit, moves, move_count, move_table),
    LHPY_ROWS("checksums", struct lh_in_place_unit, checksums, checksum_count, checksum_table));

static const struct lhpy_table file_table =
    LHPY_TABLE("a file", LHPY_FORM_TUPLE, struct lhpy_in_place_row,
               LHPY_FIELD_AS("fd", struct lhpy_in_place_row, io_file.fd),
               LHPY_FIELD_AS("path", struct lhpy_in_place_row, file.path),
               LHPY_FIELD_AS("bytes", struct lhpy_in_place_row, file.bytes),
               LHPY_FIELD_AS("is_direct", struct lhpy_in_place_row, io_file.direct));

const struct lhpy_table lhpy_in_place_table =
    LHPY_TABLE("in_place", LHPY_FORM_TUPLE, struct lhpy_in_place,
               LHPY_ROWS("files", struct lhpy_in_place, rows, row_count, file_table),
               LHPY_ROWS("units", struct lhpy_in_place, opts.units, opts.unit_count, unit_table));

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
    return 0;
}
