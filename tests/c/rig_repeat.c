#include "rig_repeat.h"

#include "lh_test.h"
#include "rig_saved.h"
#include "rig_wait.h"

struct rig_repeat {
    struct lh_store *store;
    struct lh_io_file files[LH_IO_FILE_COUNT_MAX];
    uint32_t file_first;
};

struct rig_repeat *rig_repeat_open(struct rig *rig)
{
    uint64_t bytes = 0;
    if (!rig->opts.repeats)
        return NULL;
    struct rig_repeat *repeat = calloc(1, sizeof(*repeat));
    LH_CHECK(repeat);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        bytes += lh_align_up(rig->units[i].bytes, LH_CHECKSUM_BYTES);
    repeat->store = rig_saved_store(rig, "apart", bytes);
    return repeat;
}

void rig_repeat_files(struct rig *rig, struct lh_io_opts *opts)
{
    struct rig_repeat *repeat = rig->repeat;
    if (!repeat)
        return;
    uint32_t count = lh_store_file_count(repeat->store);
    repeat->file_first = opts->file_count;
    memcpy(repeat->files, opts->files, opts->file_count * sizeof(*opts->files));
    memcpy(repeat->files + opts->file_count, lh_store_files(repeat->store),
           count * sizeof(*opts->files));
    opts->file_count += count;
    opts->files = repeat->files;
}

void rig_repeat_opts(struct rig *rig, struct lh_engine_opts *opts)
{
    if (!rig->repeat)
        return;
    opts->repeats = true;
    opts->apart.store = rig->repeat->store;
    opts->apart.file_first = rig->repeat->file_first;
}

void rig_repeat_close(struct rig *rig)
{
    if (!rig->repeat)
        return;
    lh_store_close(rig->repeat->store);
    free(rig->repeat);
    rig->repeat = NULL;
}

int rig_norm(struct rig *rig, double *square_sum_out)
{
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_norm_wait(rig->engine, square_sum_out, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    return rc < 0 ? rc : 0;
}

int rig_close_again(struct rig *rig, unsigned gradients, double factor)
{
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_repeat(rig->engine, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    if (rc < 0)
        return rc;
    lh_engine_gradient_scale_set(rig->engine, factor);
    rig->factor = factor;
    rc = rig_close(rig, gradients);
    rig->factor = 0;
    return rc;
}
