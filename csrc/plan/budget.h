/*
 * How a budget of main memory is divided, before anything is allocated.
 *
 *      host_bytes = parameters region | slabs (R, M, V of chunks) | gradients | bookkeeping
 *
 * Where updates wait for the step's close, gradients wait with them: in memory as far as there is
 * room, the others on SSD; an update reads those into its slab, which is larger for that. Where an
 * update may wait or not, room is set aside for a third of the gradients (forward, which then hides
 * them, is no more of a step), behind room for two more units of parameters: updates that wait
 * take place in the region while backward goes on.
 *
 * The minimum that works: in the region every unit that is always there and the two largest others
 * (or sets of others that are in use together), with room for one more of the second kind so that
 * holes between them do not block, and for each set with the holes between its own units; three
 * slabs (one read, one computed, one written); the gradients of the largest unit, which autograd
 * keeps until the unit can be updated. What is left goes, in this order, to the gradients of a
 * second unit (else backward waits for each update), to slabs up to a full pipeline, to gradients
 * that wait (a byte saves two of traffic), to parameters (a resident byte of P16 saves two bytes of
 * traffic a step), to slabs that keep their chunk (one byte a byte), and to nothing: what is not
 * needed is not taken.
 *
 * Pure; includes base only.
 * Source: LoHan IV-D (main memory as what the plan divides), Fuyou 4.4.
 */
#ifndef LH_PLAN_BUDGET_H
#define LH_PLAN_BUDGET_H

#include "base/error.h"

/*
 * Elements of a chunk. 1 Mi makes transfers of 2 to 4 MiB an array, past the knee of every disk
 * measured; half of that where the budget would leave fewer slabs than a full pipeline has. Both
 * are multiples of what makes chunks start on checksum boundaries in 2-byte arrays.
 */
#define LH_BUDGET_CHUNK_ELEMENTS_MAX (UINT64_C(1) << 20)
#define LH_BUDGET_CHUNK_ELEMENTS_MIN (UINT64_C(1) << 19)
#define LH_BUDGET_SLAB_COUNT_MIN 3
/*
 * A full pipeline: with as many reads and writes keep SSDs and workers busy. Many workers and fast
 * SSDs want more, which a thirty-second part of a large budget may take.
 */
#define LH_BUDGET_SLAB_COUNT_PIPELINE 8
#define LH_BUDGET_SLAB_COUNT_PIPELINE_MAX 32
#define LH_BUDGET_PIPELINE_DIVISOR 32

struct lh_budget_unit {
    uint64_t bytes;    /* P16 or P32, or frozen bytes: what must be resident */
    uint64_t elements; /* trainable, padded; 0: frozen */
    /* In memory while backward is in this unit: its own, and what autograd holds. 0: frozen. */
    uint64_t gradient_bytes;
    uint32_t state_bytes_per_element; /* R + M + V: 10 (bf16), 12 (fp16), 8 (fp32), 0 (frozen) */
    /* Of gradients that wait for the close; 0: none do. */
    uint32_t waiting_bytes_per_element;
    bool waits_in_memory; /* they cannot wait on SSD */
    bool waits_at_will;   /* nor need they wait: up to a third of them does where there is room */
    /*
     * Gradients come from an accelerator and lie in blocks of main memory, one a chunk, of this
     * many bytes an element, for all units the same; 0: they are torch's tensors.
     */
    uint32_t block_bytes_per_element;
    /* With all that is in use whenever it is (the units of its block); 0: itself alone. */
    uint64_t together_bytes;
    bool is_together;     /* counted in another unit's together_bytes */
    uint64_t apart_bytes; /* of together_bytes, where it lies in holes: lh_budget_apart_bytes() */
    bool always;
};

struct lh_budget {
    uint64_t host_bytes;   /* the sum of what follows: at most what was given */
    uint64_t region_bytes; /* parameters */
    uint64_t chunk_elements;
    uint64_t slab_bytes;
    uint32_t slab_count;
    uint32_t chunk_count;      /* of all units */
    uint32_t kept_chunk_count; /* chunks that keep their slab: never read again */
    uint64_t gradient_bytes;
    uint64_t gradient_ahead_bytes;   /* of these, for updates under way while backward goes on */
    uint64_t gradient_waiting_bytes; /* and for gradients that wait for the close */
    uint64_t bookkeeping_bytes;
    uint64_t host_bytes_min;  /* the least that works for this model */
    uint64_t host_bytes_full; /* more than this is of no use */
};

/*
 * What units that are in use together, of bytes[0..count - 1], need wherever those of them that
 * came first lie: the last of count units finds count holes, which count * (its bytes) fill.
 */
uint64_t lh_budget_apart_bytes(const uint64_t *bytes, uint32_t count);

/*
 * Divide host_bytes. bookkeeping_bytes: what the caller needs besides (checksums, manifest,
 * requests).
 *
 * Errors: -EINVAL (no units), -ENOSPC: host_bytes is below the minimum; the message gives both
 *         numbers and the parts, and *budget_out's host_bytes_min is set.
 */
int lh_budget_make(const struct lh_budget_unit *units, uint32_t unit_count, uint64_t host_bytes,
                   uint64_t bookkeeping_bytes, struct lh_budget *budget_out, struct lh_error *err)
    LH_MUST_CHECK;

#endif
