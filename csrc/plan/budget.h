/*
 * How a budget of main memory is divided, before anything is allocated.
 *
 *      host_bytes = parameters region | slabs (R, M, V of chunks) | gradients | bookkeeping
 *
 * Where updates wait for the end of the step, gradients wait with them: in memory while there is
 * room, the rest on SSD. An update reads gradients from SSD into its slab, which has room for them.
 * Where updates may be deferred but need not be, room is reserved for a third of the gradients
 * (forward, which then hides these updates, is at most a third of a step). Room for two more units
 * of parameters comes first, because deferred updates use the region while backward continues.
 *
 * The minimum consists of: a region for all units that are always resident and the two largest of
 * the other units (or of the sets that are in use together), with room for one more of the second
 * largest so that holes between units block no load, and room for each set including the holes
 * between its units; three slabs (one being read, one computed, one written), or those of all
 * chunks of a unit whose update needs them at once; and the gradients of the largest unit, which
 * autograd keeps until the unit can be updated. The remaining memory goes, in this order, to the
 * gradients of a second unit (otherwise backward waits for each update), to slabs up to a full
 * pipeline, to waiting gradients (each byte saves two bytes of traffic), to parameters (each
 * resident byte of P16 saves two bytes of traffic per step), and to slabs that keep their chunk
 * (each byte saves one byte). If slabs for all chunks take at most an eighth of
 * the bytes of frozen parameters, these slabs come before parameters (except those of two more
 * units): the states of adapters are few, and each step writes those without a slab of their own,
 * while frozen parameters are only read. Memory that is not needed is not allocated.
 *
 * Pure; includes base only.
 * Source: LoHan IV-D (the plan divides main memory), Fuyou 4.4.
 */
#ifndef LH_PLAN_BUDGET_H
#define LH_PLAN_BUDGET_H

#include "base/error.h"

/*
 * Elements of a chunk. 1 Mi elements make transfers of 2 to 4 MiB per array, beyond the knee of
 * every disk measured. Half of that is used where the budget would otherwise leave fewer slabs than
 * a full pipeline has. With both sizes, chunks start on checksum boundaries in 2-byte arrays.
 */
#define LH_BUDGET_CHUNK_ELEMENTS_MAX (UINT64_C(1) << 20)
#define LH_BUDGET_CHUNK_ELEMENTS_MIN (UINT64_C(1) << 19)
#define LH_BUDGET_SLAB_COUNT_MIN 3
/*
 * A full pipeline: this many slabs keep SSDs and workers busy. Many workers and fast SSDs need more
 * slabs, which may take up to 1/32 of a large budget.
 */
#define LH_BUDGET_SLAB_COUNT_PIPELINE 8
#define LH_BUDGET_SLAB_COUNT_PIPELINE_MAX 32
#define LH_BUDGET_PIPELINE_DIVISOR 32

struct lh_budget_unit {
    uint64_t bytes;    /* P16 or P32, or frozen bytes: what must be resident */
    uint64_t elements; /* trainable, padded; 0: frozen */
    /* Gradients in memory while backward is in this unit, including autograd's. 0: frozen. */
    uint64_t gradient_bytes;
    /* R + M + V: with fp32 moments 10 (bf16), 12 (fp16), 8 (fp32); 0 (frozen) */
    uint32_t state_bytes_per_element;
    /*
     * States of blocks of 64 elements (scales, or second moments of rows); 0: there are none. With
     * them, chunks have LH_BUDGET_CHUNK_ELEMENTS_MAX elements, because smaller ones would not begin
     * at boundaries of checksums.
     */
    uint32_t state_bytes_per_block;
    bool is_whole; /* its update needs all of its chunks in slabs at once */
    /* The size of gradients that wait for the end of the step; 0: none wait. */
    uint32_t waiting_bytes_per_element;
    bool waits_in_memory; /* gradients cannot wait on SSD */
    bool waits_at_will;   /* gradients need not wait: up to a third of them waits if room is left */
    /*
     * Gradients come from an accelerator and are stored in blocks of main memory, one per chunk,
     * with this many bytes per element, the same for all units; 0: they are torch's tensors.
     */
    uint32_t block_bytes_per_element;
    /* The bytes of all units that are in use whenever this one is (those of its block), or 0. */
    uint64_t together_bytes;
    bool is_together;     /* counted in another unit's together_bytes */
    uint64_t apart_bytes; /* the same if these units lie in holes: lh_budget_apart_bytes() */
    bool always;
};

struct lh_budget {
    uint64_t host_bytes;   /* the sum of the parts below: at most what was given */
    uint64_t region_bytes; /* parameters */
    uint64_t chunk_elements;
    uint64_t slab_bytes;
    uint32_t slab_count;
    uint32_t chunk_count;       /* the number of chunks of all units */
    uint32_t state_chunk_count; /* those whose states this process has: usually all */
    uint32_t kept_chunk_count;  /* chunks that keep their slab and are never read again */
    uint64_t gradient_bytes;
    uint64_t gradient_ahead_bytes;   /* a part of these, for updates that overlap backward */
    uint64_t gradient_waiting_bytes; /* a part for gradients that wait for the step's end */
    uint64_t bookkeeping_bytes;
    uint64_t host_bytes_min;  /* the smallest budget that works for this model */
    uint64_t host_bytes_full; /* a larger budget has no effect */
};

/*
 * The bytes that units of bytes[0..count - 1], which are in use together, need in the worst case,
 * wherever the units loaded first are placed: the last unit finds at most count holes, one of which
 * is large enough if all holes together have at least count times the unit's bytes.
 */
uint64_t lh_budget_apart_bytes(const uint64_t *bytes, uint32_t count);

/*
 * Divide host_bytes. bookkeeping_bytes is what the caller needs in addition (checksums, manifest,
 * requests).
 *
 * Errors: -EINVAL (no units), -ENOSPC (host_bytes is below the minimum; the message gives both
 *         numbers and the parts, and *budget_out's host_bytes_min is set).
 */
int lh_budget_make(const struct lh_budget_unit *units, uint32_t unit_count, uint64_t host_bytes,
                   uint64_t bookkeeping_bytes, struct lh_budget *budget_out, struct lh_error *err)
    LH_MUST_CHECK;

#endif
