/* Shared by the tests of zeroth-order training: random operations. */
#ifndef ZO_FIXTURE_H
#define ZO_FIXTURE_H

#include "compute/zo.h"
#include "lh_test.h"

/* first_kind_end: kinds below it may come first, where nothing is known of what z was before. */
static void zo_ops_make(struct lh_zo_op *ops, uint32_t op_count, uint32_t first_kind_end,
                        uint64_t *seed)
{
    for (uint32_t i = 0; i < op_count; i++)
        ops[i] = (struct lh_zo_op){
            .kind = (enum lh_zo_op_kind)(lh_test_random(seed) %
                                         (i == 0 ? first_kind_end : LH_ZO_OP_DRAW)),
            .is_same = i > 0 && lh_test_random(seed) % 2,
            .stream = {lh_test_random(seed), (uint32_t)lh_test_random(seed) % 65536,
                       (uint32_t)lh_test_random(seed), (uint32_t)lh_test_random(seed)},
            .scale = (float)(int32_t)lh_test_random(seed) * 0x1p-31f,
            .lr = 0.1f,
            .decay = lh_test_random(seed) % 2 ? 0.01f : 0,
        };
}

/* The same, a third of which are ROUNDs. */
__attribute__((unused)) static void zo_rounds_make(struct lh_zo_op *ops, uint32_t op_count,
                                                   enum lh_zo_format format, uint64_t *seed)
{
    zo_ops_make(ops, op_count, LH_ZO_OP_DRAW, seed);
    for (uint32_t i = 0; i < op_count; i++) {
        if (lh_test_random(seed) % 3 == 0) {
            ops[i].kind = LH_ZO_OP_ROUND;
            ops[i].stream.sample = LH_ZO_SAMPLE_ROUND;
            ops[i].is_same = false;
            ops[i].format = format;
        } else if (i > 0 && ops[i - 1].kind == LH_ZO_OP_ROUND) {
            ops[i].is_same = false;
        }
    }
}

#endif
