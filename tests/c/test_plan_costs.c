/*
 * Test every equation of the papers against tests/golden/plan_costs.csv, whose rows
 * tests/py/test_plan_costs.py computes with fractions: bytes and FLOP exactly, times to 1e-12.
 */
#include <math.h>

#include "lh_test.h"
#include "plan/cost_fuyou.h"
#include "plan/cost_lohan.h"

#define LAYER_COUNT_MAX 32
#define ROW_BYTES_MAX 1024
#define COLUMN_COUNT 11

/* A row's inputs, in the file's order. */
enum {
    COLUMN_PARAM_COUNT = 0,
    COLUMN_FORWARD_FLOP,
    COLUMN_GPU,
    COLUMN_LINK_IN,
    COLUMN_LINK_OUT,
    COLUMN_READ,
    COLUMN_WRITE,
    COLUMN_HOST,
    COLUMN_ADAM,
    COLUMN_SWAPPED,
    COLUMN_RECOMPUTE,
};

struct row {
    char name[32];
    uint64_t in[COLUMN_COUNT];
    char expected[64];
};

struct answers {
    struct lh_plan_layer layers[LAYER_COUNT_MAX];
    struct lh_plan_block block;
    struct lh_plan_model model;
    uint32_t order[LAYER_COUNT_MAX];
};

static FILE *golden_open(void)
{
    char path[4096];
    const char *slash = strrchr(__FILE__, '/');
    LH_CHECK(slash != NULL);
    snprintf(path, sizeof(path), "%.*s/../golden/plan_costs.csv", (int)(slash - __FILE__),
             __FILE__);
    FILE *file = fopen(path, "r");
    LH_CHECK(file != NULL);
    return file;
}

static struct row row_parse(char *line)
{
    struct row row = {0};
    char *rest = line;
    snprintf(row.name, sizeof(row.name), "%s", strsep(&rest, ","));
    for (int i = 0; i < COLUMN_COUNT; i++) {
        char *text = strsep(&rest, ",");
        char *end = NULL;
        LH_CHECK(text != NULL);
        row.in[i] = strtoull(text, &end, 10);
        LH_CHECK(*end == '\0');
    }
    LH_CHECK(rest != NULL);
    rest[strcspn(rest, "\n")] = '\0';
    snprintf(row.expected, sizeof(row.expected), "%s", rest);
    return row;
}

static struct lh_cost_lohan lohan_of(const struct row *row)
{
    return (struct lh_cost_lohan){
        .param_count = row->in[COLUMN_PARAM_COUNT],
        .forward_flop = row->in[COLUMN_FORWARD_FLOP],
        .gpu_flop_per_s = row->in[COLUMN_GPU],
        .link_in_bytes_per_s = row->in[COLUMN_LINK_IN],
        .link_out_bytes_per_s = row->in[COLUMN_LINK_OUT],
        .read_bytes_per_s = row->in[COLUMN_READ],
        .write_bytes_per_s = row->in[COLUMN_WRITE],
        .host_available_bytes = row->in[COLUMN_HOST],
    };
}

static struct lh_cost_fuyou fuyou_of(const struct row *row)
{
    return (struct lh_cost_fuyou){
        .param_count = row->in[COLUMN_PARAM_COUNT],
        .forward_flop = row->in[COLUMN_FORWARD_FLOP],
        .gpu_flop_per_s = row->in[COLUMN_GPU],
        .link_in_bytes_per_s = row->in[COLUMN_LINK_IN],
        .link_out_bytes_per_s = row->in[COLUMN_LINK_OUT],
        .read_bytes_per_s = row->in[COLUMN_READ],
        .write_bytes_per_s = row->in[COLUMN_WRITE],
        .adam_params_per_s = row->in[COLUMN_ADAM],
    };
}

/* Set found to the core's result for a row of LoHan's equations. Returns false for other rows. */
static bool lohan_answer(const struct answers *answers, const struct row *row, double *time_out,
                         uint64_t *whole_out, bool *is_whole)
{
    struct lh_cost_lohan cost = lohan_of(row);
    uint64_t swapped = row->in[COLUMN_SWAPPED];
    struct lh_cost_stage forward = lh_cost_lohan_forward(&cost, swapped);
    struct lh_cost_stage backward =
        lh_cost_lohan_backward(&cost, swapped, row->in[COLUMN_RECOMPUTE]);
    struct lh_plan_layer layer = {.forward_flop = cost.forward_flop, .activation_bytes = swapped};
    double forward_s = lh_cost_lohan_stage_s(&forward);
    uint32_t count = answers->model.layer_count;
    const struct {
        const char *name;
        double value;
    } times[] = {
        {"lohan-1", lh_cost_lohan_iteration_s(forward_s, lh_cost_lohan_stage_s(&backward))},
        {"lohan-2", forward_s},
        {"lohan-4-gpu", forward.gpu_s},
        {"lohan-4-out", forward.out_s},
        {"lohan-4-in", forward.in_s},
        {"lohan-4-ssd", forward.ssd_s},
        {"lohan-5-gpu", backward.gpu_s},
        {"lohan-5-out", backward.out_s},
        {"lohan-5-in", backward.in_s},
        {"lohan-5-ssd", backward.ssd_s},
        {"lohan-6", lh_cost_lohan_benefit(&layer)},
    };
    for (size_t i = 0; i < LH_COUNT_OF(times); i++)
        if (strcmp(row->name, times[i].name) == 0) {
            *time_out = times[i].value;
            return true;
        }
    *is_whole = strcmp(row->name, "lohan-3") == 0;
    *whole_out = lh_cost_lohan_ssd_bytes(swapped, cost.host_available_bytes);
    if (strcmp(row->name, "lohan-7") == 0)
        *time_out = lh_cost_lohan_recompute_flop(answers->layers, answers->order, count, swapped);
    else if (strcmp(row->name, "lohan-8") == 0)
        *time_out = lh_cost_lohan_recompute_slope(answers->layers, answers->order, count, swapped);
    else
        return *is_whole;
    return true;
}

static bool fuyou_answer(const struct row *row, double *time_out, uint64_t *whole_out,
                         bool *is_whole)
{
    struct lh_cost_fuyou cost = fuyou_of(row);
    uint64_t swapped = row->in[COLUMN_SWAPPED];
    uint64_t flop = row->in[COLUMN_RECOMPUTE];
    struct lh_plan_layer layer = {.forward_flop = cost.forward_flop, .activation_bytes = swapped};
    double forward_s = lh_cost_fuyou_forward_s(&cost, swapped);
    double backward_s = lh_cost_fuyou_backward_s(&cost, swapped, flop);
    double gain_s = lh_cost_fuyou_gain_s(&cost, swapped, flop);
    const struct {
        const char *name;
        double value;
    } times[] = {
        {"fuyou-1", lh_cost_fuyou_iteration_s(forward_s, backward_s)},
        {"fuyou-2", forward_s},
        {"fuyou-3", lh_cost_fuyou_forward_link_s(&cost, swapped)},
        {"fuyou-4", lh_cost_fuyou_forward_ssd_s(&cost, swapped)},
        {"fuyou-5", backward_s},
        {"fuyou-6", lh_cost_fuyou_backward_link_s(&cost, swapped)},
        {"fuyou-7", lh_cost_fuyou_backward_ssd_s(&cost, swapped)},
        {"fuyou-8", lh_cost_fuyou_backward_gpu_s(&cost, flop)},
        {"fuyou-9", gain_s},
        {"fuyou-12", lh_cost_fuyou_benefit(&cost, &layer)},
    };
    for (size_t i = 0; i < LH_COUNT_OF(times); i++)
        if (strcmp(row->name, times[i].name) == 0) {
            *time_out = times[i].value;
            return true;
        }
    *is_whole = strcmp(row->name, "fuyou-10") == 0;
    *whole_out = lh_cost_fuyou_swapped_bytes_max(&cost, gain_s);
    return *is_whole;
}

/* Compute a row of Algorithm 1 or of Fuyou's queues, on the file's layers. */
static bool choice_answer(const struct answers *answers, const struct row *row, double *time_out,
                          uint64_t *whole_out, bool *is_whole)
{
    bool is_swapped[LAYER_COUNT_MAX] = {false};
    struct lh_plan_totals totals = lh_plan_model_totals(&answers->model);
    struct lh_cost_lohan lohan = lohan_of(row);
    struct lh_cost_fuyou fuyou = fuyou_of(row);
    lohan.forward_flop = totals.forward_flop;
    fuyou.forward_flop = totals.forward_flop;
    struct lh_cost_swap swap =
        lh_cost_lohan_swap(&lohan, &answers->model, answers->order, UINT64_MAX);
    struct lh_cost_fuyou_swap queues = lh_cost_fuyou_swap(&fuyou, &answers->model, is_swapped);
    uint64_t queue_bytes = 0;
    for (uint32_t i = 0; i < answers->model.layer_count; i++)
        queue_bytes += is_swapped[i] ? answers->layers[i].activation_bytes : 0;
    LH_CHECK(queue_bytes == queues.swapped_bytes);
    const struct {
        const char *name;
        uint64_t value;
    } wholes[] = {
        {"alg1-bytes", swap.swapped_bytes},
        {"alg1-flop", swap.recompute_flop},
        {"alg1-case", (uint64_t)swap.kind},
        {"queues-bytes", queues.swapped_bytes},
    };
    for (size_t i = 0; i < LH_COUNT_OF(wholes); i++)
        if (strcmp(row->name, wholes[i].name) == 0) {
            *whole_out = wholes[i].value;
            *is_whole = true;
            return true;
        }
    *time_out = row->name[0] == 'a' ? swap.iteration_s : queues.iteration_s;
    return strcmp(row->name, "alg1-time") == 0 || strcmp(row->name, "queues-time") == 0;
}

static void row_check(const struct answers *answers, const struct row *row)
{
    double time = NAN;
    uint64_t whole = 0;
    bool is_whole = false;
    LH_CHECK(lohan_answer(answers, row, &time, &whole, &is_whole) ||
             fuyou_answer(row, &time, &whole, &is_whole) ||
             choice_answer(answers, row, &time, &whole, &is_whole));
    char *end = NULL;
    bool is_right = false;
    if (is_whole) {
        is_right = strtoull(row->expected, &end, 10) == whole;
    } else {
        double expected = strtod(row->expected, &end);
        is_right = fabs(time - expected) <= 1e-12 * fabs(expected);
    }
    if (!is_right || *end != '\0')
        fprintf(stderr, "%s: expected %s, found %.17g or %" PRIu64 "\n", row->name, row->expected,
                time, whole);
    LH_CHECK(is_right && *end == '\0');
}

static void layer_add(struct answers *answers, const struct row *row)
{
    uint32_t count = answers->model.layer_count;
    LH_CHECK(count < LAYER_COUNT_MAX);
    answers->layers[count] = (struct lh_plan_layer){
        .forward_flop = row->in[COLUMN_RECOMPUTE],
        .activation_bytes = row->in[COLUMN_SWAPPED],
        .is_inter_block = row->expected[0] == '1',
    };
    answers->model.layer_count = ++count;
    answers->block = (struct lh_plan_block){0, count, LH_PLAN_BLOCK_NONE};
    lh_cost_lohan_order(&answers->model, answers->order);
}

int main(void)
{
    static struct answers answers = {.model = {.block_count = 1, .param_bytes = 2}};
    answers.model.layers = answers.layers;
    answers.model.blocks = &answers.block;
    char line[ROW_BYTES_MAX];
    char last[32] = "";
    FILE *golden = golden_open();
    LH_CHECK(fgets(line, sizeof(line), golden) != NULL);
    int count = 0;
    for (; fgets(line, sizeof(line), golden) != NULL; count++) {
        struct row row = row_parse(line);
        if (strcmp(row.name, "layer") == 0) {
            layer_add(&answers, &row);
            continue;
        }
        if (strcmp(last, row.name) != 0)
            lh_test_name("%s is what fractions give", row.name);
        snprintf(last, sizeof(last), "%s", row.name);
        row_check(&answers, &row);
    }
    LH_CHECK(count > 200);
    fclose(golden);

    lh_test_name("D_f may be D_start, or up to D_max");
    LH_CHECK(lh_cost_fuyou_is_swappable(10, 10, 0) && lh_cost_fuyou_is_swappable(10, 11, 11));
    LH_CHECK(!lh_cost_fuyou_is_swappable(10, 9, 20) && !lh_cost_fuyou_is_swappable(10, 12, 11));
    return 0;
}
