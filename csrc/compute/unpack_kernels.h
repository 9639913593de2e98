/*
 * The kernels of lh_unpack(), one file for each instruction set. Only csrc/compute includes this
 * header.
 */
#ifndef LH_COMPUTE_UNPACK_KERNELS_H
#define LH_COMPUTE_UNPACK_KERNELS_H

#include "compute/unpack.h"

/* Elements per step of a kernel; a count is a multiple of it. */
#define LH_UNPACK_BATCH 32
/* Scales per step of e2m1(). */
#define LH_UNPACK_SCALE_BATCH 8
/* Blocks per call of nibbles(), whose scales are widened first. */
#define LH_UNPACK_BLOCK_COUNT_MAX 64

#define LH_UNPACK_Q8_0_BYTES 34    /* fp16, 32 integers */
#define LH_UNPACK_Q4_K_BYTES 144   /* 2 of fp16, 12 bytes of scales and minima, 128 of values */
#define LH_UNPACK_IQ4_NL_BYTES 18  /* fp16, 16 bytes of values */
#define LH_UNPACK_IQ4_XS_BYTES 136 /* fp16, 6 bytes of scales, 128 of values */
#define LH_UNPACK_MXFP4_BYTES 17   /* a power of two, 16 bytes of values */
#define LH_UNPACK_Q6_K_BYTES 210   /* 128 bytes of low bits, 64 of high bits, 16 scales, fp16 */

/* The values of the codes of E2M1. */
extern const float lh_unpack_e2m1[LH_UNPACK_TABLE_COUNT];

/* A scale as fp32, and an element's product rounded and stored as element `at` of the result. */
float lh_unpack_scale_at(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                         uint64_t index);
void lh_unpack_put(const struct lh_unpack *unpack, float product, uint64_t at, void *out);

/* The integers that 4 bits stand for in IQ4_NL and IQ4_XS; in MXFP4, twice the values of E2M1. */
extern const int8_t lh_unpack_iq4[LH_UNPACK_TABLE_COUNT];
extern const int8_t lh_unpack_doubled[LH_UNPACK_TABLE_COUNT];
/* Half the scale of a grain of MXFP4; a NaN if its byte is 255. */
float lh_unpack_half_power(uint8_t byte);
/* The scales of the 8 parts of a grain of IQ4_XS, as integers. */
void lh_unpack_iq4_xs_scales(const uint8_t *grain, int8_t *scales);

/* The values of a grain. */
void lh_unpack_grain_ref(uint32_t format, const uint8_t *grain, float *values);
/* The scales and the minima of the 8 parts of a grain of Q4_K, as integers of 6 bits. */
void lh_unpack_q4_k_scales(const uint8_t *grain, uint8_t *scales, uint8_t *minima);

/* [Note: Tiles] in unpack_orders.c. */
#define LH_UNPACK_TILE 64
#define LH_UNPACK_STRIP 256
#define LH_UNPACK_INDEXED_ROWS 32
#define LH_UNPACK_INDEXED_COLUMNS 32
#define LH_UNPACK_INDEXED_GROUP_MAX 512

/* The results of the 16 codes of a row and a group of columns. */
struct lh_unpack_table {
    uint8_t lows[LH_UNPACK_TABLE_COUNT];
    uint8_t highs[LH_UNPACK_TABLE_COUNT];
};

/* Scales of U4 whose products with zeros of at most 16 are 0 or normal halves. */
#define LH_UNPACK_USUAL_MIN 0x1p-14f
#define LH_UNPACK_USUAL_MAX 0x1p11f

/* The bits of scales of 2^-24, which is the least one of fp16, and of 2^7: those between are usual.
 */
#define LH_UNPACK_USUAL_BITS_MIN UINT32_C(0x33800000)
#define LH_UNPACK_USUAL_BITS_MAX UINT32_C(0x43000000)

/* What LH_UNPACK_INDEXED_ROWS rows of a tile are decoded with: see [Note: Indexed]. */
struct lh_unpack_indexed {
    _Alignas(64) float scales[LH_UNPACK_INDEXED_GROUP_MAX * LH_UNPACK_INDEXED_ROWS];
    _Alignas(64) float zeros[LH_UNPACK_INDEXED_GROUP_MAX * LH_UNPACK_INDEXED_ROWS];
    const uint8_t *index; /* the number of the group of each column, of 32 bits, or else NULL */
    uint32_t groups[LH_UNPACK_TILE / LH_UNPACK_INDEXED_COLUMNS]; /* those of the batches */
    uint32_t last;       /* the greatest number of a group; a greater one counts as this */
    uint32_t ahead;      /* the words of a row from a column's to one that is prefetched */
    bool is_usual;       /* all scales are */
    bool is_short;       /* all scales are usual and short: see [Note: Short scales] */
    bool is_past_caches; /* stores bypass the caches: `out` is aligned to their lines */
};

/*
 * The caller has set the default floating-point environment. Kernels go from front to back, and
 * read the elements that they write next before they write them: see lh_unpack() for the overlap of
 * `packed` and `out`.
 */
struct lh_unpack_kernel {
    /* Formats of which each element begins at a byte; all elements have one scale. */
    void (*bytes)(const struct lh_unpack *unpack, const uint8_t *packed, float scale,
                  uint64_t count, void *out);
    /*
     * Format NIBBLES with a result of 16 bits: decode blocks, each of a multiple of LH_UNPACK_BATCH
     * elements, with a scale each.
     */
    void (*nibbles)(const struct lh_unpack *unpack, const uint8_t *packed, const float *table,
                    const float *scales, uint64_t blocks, uint16_t *out);
    /*
     * Format E2M1 with scales of E8M0, or of E4M3 with nested[0] as `factor`, and blocks of 16 or
     * 32 elements: decode batches of LH_UNPACK_SCALE_BATCH blocks, up to the first batch with a
     * scale that is not finite. Returns how many batches are decoded.
     */
    uint64_t (*e2m1)(const struct lh_unpack *unpack, const uint8_t *packed, const uint8_t *scales,
                     float factor, uint64_t batches, void *out);
    /*
     * Formats with scales in grains: decode grains, up to the first one with a scale that is not
     * finite. Returns how many grains are decoded.
     */
    uint64_t (*grains)(const struct lh_unpack *unpack, const uint8_t *packed, uint64_t count,
                       void *out);
    /*
     * Orders TRANSPOSED and AWQ: copy the elements of LH_UNPACK_TILE rows and columns of a group to
     * a row of LH_UNPACK_STRIP bytes for each, the low bits first.
     */
    void (*tile)(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                 uint64_t column, uint8_t *bits);
    /* U4 and U8: decode elements with one scale and one zero. */
    void (*integers)(const struct lh_unpack *unpack, const uint8_t *bits, float zero, float scale,
                     uint64_t count, void *out);
    /*
     * U4 with a result of 16 bits: make the tables of LH_UNPACK_BATCH rows, from their scales and
     * the words of their zeros (NULL: unpack->zero).
     */
    void (*tables)(const struct lh_unpack *unpack, const float *scales, const uint8_t *zeros,
                   struct lh_unpack_table *tables);
    /*
     * The same, in orders other than ROWS: decode `rows` rows (of WORDS a multiple of 8, otherwise
     * of LH_UNPACK_TILE) and LH_UNPACK_TILE columns. Each half of the columns has tables of these
     * rows. `out` is aligned to 32 bytes, and so are its rows, of unpack->columns elements. What
     * has been stored reaches other threads after stored(): the stores bypass the caches.
     */
    void (*looked_up)(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                      uint64_t rows, uint64_t column, const struct lh_unpack_table *const *tables,
                      uint16_t *out);
    void (*stored)(void);
    /*
     * U4 and U8 in order WORDS: decode LH_UNPACK_INDEXED_ROWS rows, of which `packed` is the first
     * one's first word, of a multiple of LH_UNPACK_INDEXED_COLUMNS columns.
     */
    void (*indexed)(const struct lh_unpack *unpack, const uint8_t *packed, uint64_t columns,
                    const struct lh_unpack_indexed *all, uint8_t *out, uint64_t out_stride);
    /* E2M1: decode elements with a scale each, a power of two (or infinite, or a NaN). */
    void (*scaled)(const struct lh_unpack *unpack, const uint8_t *bits, const float *scales,
                   uint64_t count, void *out);
    /*
     * E2M1 in order TRANSPOSED with scales of E8M0 and a result of bf16 that is rounded once:
     * decode `rows` rows, a multiple of LH_UNPACK_TILE, and LH_UNPACK_TILE columns. `scales` has as
     * many bytes for each half tile of rows. See looked_up() for `out`.
     */
    void (*powers)(const struct lh_unpack *unpack, const uint8_t *group, uint64_t row,
                   uint64_t rows, uint64_t column, const uint8_t *scales, uint16_t *out);
};

/* Decode elements of a tensor in another order than rows, with a kernel or without (NULL). */
void lh_unpack_orders_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                         const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                         uint8_t *out);
/* The same for U4 and U8 in the order of rows. */
void lh_unpack_integers_by(const struct lh_unpack_kernel *kernel, const struct lh_unpack *unpack,
                           const struct lh_unpack_source *source, uint64_t first, uint64_t count,
                           uint8_t *out);

#if defined(__x86_64__)
/* Needs AVX2 and F16C. */
extern const struct lh_unpack_kernel lh_unpack_avx2;
/* Needs AVX-512 F, BW, VL and DQ as well. */
extern const struct lh_unpack_kernel lh_unpack_avx512;
#endif

#endif
