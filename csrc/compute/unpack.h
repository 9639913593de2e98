/*
 * Decode quantized tensors into the element type in which a model computes.
 *
 *      format    a value                                 its scale
 *      RAW       the bytes themselves                    none: the bytes are copied
 *      F8_E4M3   the number that the byte encodes        scales[row / block_rows]
 *      I8        the byte as a signed integer                  [column / block_columns]
 *      NIBBLES   table[4 bits], the high ones first      the same
 *      E2M1      the number that 4 bits encode, the      the same
 *                low ones first
 *      U4, U8    4 or 8 bits, the low ones first,        one for each block_columns elements of
 *                minus a zero                            a row: see [Note: Zeros]
 *      F32, BF16, F16    the number itself               1
 *      Q8_0      the byte as a signed integer            in each grain, one
 *      Q4_K      4 bits                                  in each grain, 8, and 8 minima
 *      Q6_K      6 bits minus 32                         in each grain, 16
 *      IQ4_NL    one of 16 integers                      in each grain, one
 *      IQ4_XS    one of 16 integers                      in each grain, 8
 *      MXFP4     the number that 4 bits encode           in each grain, one of E8M0
 *
 * [Note: Decoding] An element is (float)value * scale, one multiplication in fp32, which is then
 * rounded to `rounding`, and the result to `dtype`; every rounding is to nearest, ties to even. A
 * scale of fp32, bf16 or fp16 is widened exactly. A scale of type NESTED is itself quantized: it is
 * (nested_table[byte] * nested[index / nested_block]) + nested_offset, with two roundings in fp32.
 * A scale of type E8M0 is 2^(byte - 127), and a NaN if the byte is 255; one of type E4M3 is the
 * number that the byte encodes, divided by nested[0]; one of type E4M3_TIMES is multiplied by it.
 * With rounds_scale a scale is then rounded to `dtype`. Every NaN becomes the positive quiet NaN of
 * the result's type. These are the bits of
 *
 *      files                                  reference                          rounding
 *      weight_scale_inv (transformers' FP8)   Fp8Dequantize of transformers      F32
 *      weight_scale (compressed-tensors)      dequantize() of compressed-tensors the scales' type
 *      absmax (bitsandbytes' NF4 and FP4)     dequantize_4bit() of bitsandbytes  quant_state's type
 *      weight_packed (MXFP4 and NVFP4)        decompress() of compressed-tensors BF16
 *      weight_scale_2 (modelopt's NVFP4)      NVFP4QTensor of modelopt          F32
 *      weight_scale (modelopt's FP8)          FP8QTensor of modelopt             `dtype`
 *      _blocks (gpt-oss' MXFP4)               convert_moe_packed_tensors() of    F32
 *                                             transformers
 *      qweight (GPTQ)                         dequantize_weight() of gptqmodel   the scales' type
 *      qweight (AWQ)                          dequantize_gemm() of autoawq       the scales' type
 *      weight_packed (integers)               decompress() of compressed-tensors the scales' type
 *      GGUF                                   dequantize() of gguf-py            F32
 *
 * A tensor is a matrix of rows and columns. The scales form a matrix with one element for each
 * block of block_rows rows and block_columns columns; blocks at the edges may be smaller. NIBBLES,
 * and E2M1 in the order of rows, have one row.
 *
 * [Note: Grains] A grain is the shortest run of elements that begins and ends at a whole byte: 32
 * elements of Q8_0, IQ4_NL and MXFP4, 256 of Q4_K, Q6_K and IQ4_XS, 2 of 4-bit formats, otherwise
 * one. Scales and minima in a grain are products, in fp32, of a small integer and the grain's own
 * scale of fp16 (in IQ4_NL just this scale); an element of Q4_K is its scale times its bits, minus
 * its minimum, with two roundings. Formats with scales in grains, and F32, BF16 and F16, have none
 * elsewhere, and no rounding of their own.
 *
 * [Note: Groups of rows] With group_rows, a file has the rows of each group of that many in another
 * order: the rows of its two halves alternate. GGUF files have the rows of each head of Llama's
 * queries and keys so, because llama.cpp rotates neighbors. Row i of half j is row 2 * i + j of the
 * group in the file.
 *
 * A scale of E8M0 with byte 255 is what OCP's specification of MX formats says. Libraries differ:
 * torch's float8_e8m0fnu agrees, transformers and gguf-py decode with 2^128, and compressed-tensors
 * with an infinite scale. A valid file has no such block.
 *
 * [Note: Orders] Some files have the elements of a group in another order than rows: then no packed
 * byte of a group is free before its last row is decoded, and a group is not decoded over its own
 * bytes. With W the decoded group, of R rows, and 32-bit words of N elements, low bits first:
 *
 *      ROWS         row after row
 *      WORDS        word [c / N][r] has N consecutive elements of row r (GPTQ)
 *      TRANSPOSED   word [c][r / 8] has 8 consecutive elements of column c, of 4 bits
 *      AWQ          the same, and their rows are 0, 2, 4, 6, 1, 3, 5, 7 of the eight (AWQ)
 *
 * [Note: Zeros] An element of U4 and U8 is (float)(bits - zero) * scale. Without has_zeros the zero
 * is `zero`. With it, zeros are packed in 32-bit words, one for each scale, those of consecutive
 * rows in a word, with AWQ in its order of rows; and `zero`, 0 or 1, is added to each part of a
 * word, with carries into the next part: that is what gptqmodel does with GPTQ's first format, in
 * which zeros are less by one. Scales and zeros form a matrix with one row for each group of
 * block_columns columns, and one column for each row of W. With has_index, column c belongs to
 * group index[c] instead of c / block_columns. In the order of rows (compressed-tensors' integers)
 * words have consecutive elements of a row, the scales form a matrix with one row for each row of
 * W, and the zeros one with a row of words for each N rows of W; `zero` is 0 if there are zeros.
 *
 * Sources may have any alignment. Thread: any. The floating-point environment does not matter.
 */
#ifndef LH_COMPUTE_UNPACK_H
#define LH_COMPUTE_UNPACK_H

#include "base/dtype.h"

enum lh_unpack_format {
    LH_UNPACK_FORMAT_RAW = 0,
    LH_UNPACK_FORMAT_F8_E4M3,
    LH_UNPACK_FORMAT_I8,
    LH_UNPACK_FORMAT_NIBBLES,
    LH_UNPACK_FORMAT_E2M1,
    LH_UNPACK_FORMAT_Q8_0,
    LH_UNPACK_FORMAT_Q4_K,
    LH_UNPACK_FORMAT_Q6_K,
    LH_UNPACK_FORMAT_F32,
    LH_UNPACK_FORMAT_BF16,
    LH_UNPACK_FORMAT_F16,
    LH_UNPACK_FORMAT_U4,
    LH_UNPACK_FORMAT_U8,
    LH_UNPACK_FORMAT_IQ4_NL,
    LH_UNPACK_FORMAT_IQ4_XS,
    LH_UNPACK_FORMAT_MXFP4,
};
#define LH_UNPACK_FORMAT_COUNT 16
#define LH_UNPACK_GRAIN_MAX 256 /* elements */

/* See [Note: Orders]. */
enum lh_unpack_order {
    LH_UNPACK_ORDER_ROWS = 0,
    LH_UNPACK_ORDER_WORDS,
    LH_UNPACK_ORDER_TRANSPOSED,
    LH_UNPACK_ORDER_AWQ,
};
#define LH_UNPACK_ORDER_COUNT 4

/* The types of scales; the first three have the numbers of enum lh_dtype. */
enum lh_unpack_scale {
    LH_UNPACK_SCALE_F32 = LH_DTYPE_F32,
    LH_UNPACK_SCALE_BF16 = LH_DTYPE_BF16,
    LH_UNPACK_SCALE_F16 = LH_DTYPE_F16,
    LH_UNPACK_SCALE_NESTED,
    LH_UNPACK_SCALE_E8M0,
    LH_UNPACK_SCALE_E4M3,
    LH_UNPACK_SCALE_E4M3_TIMES,
};
#define LH_UNPACK_SCALE_COUNT 7

#define LH_UNPACK_TABLE_COUNT 16
#define LH_UNPACK_NESTED_TABLE_COUNT 256

struct lh_unpack {
    uint32_t format;   /* enum lh_unpack_format; RAW: only rows (1) and columns (bytes) count */
    uint32_t dtype;    /* of the result: F32, BF16 or F16 */
    uint32_t rounding; /* F32 (no rounding of its own), BF16 or F16 */
    uint64_t rows;
    uint64_t columns;
    uint64_t block_rows;
    uint64_t block_columns;
    uint32_t scale_type;   /* enum lh_unpack_scale */
    uint64_t nested_block; /* with NESTED */
    float nested_offset;   /* with NESTED */
    uint64_t group_rows;   /* see [Note: Groups of rows]; 0: the rows are in order */
    uint32_t order;        /* enum lh_unpack_order; others than ROWS have group_rows */
    uint32_t has_zeros;    /* U4, U8: see [Note: Zeros] */
    uint32_t has_index;
    uint32_t zero;
    uint32_t rounds_scale;
};

/* What elements are decoded with besides the packed bytes. */
enum lh_unpack_part {
    LH_UNPACK_PART_SCALES = 0,
    LH_UNPACK_PART_TABLE,
    LH_UNPACK_PART_NESTED,
    LH_UNPACK_PART_NESTED_TABLE,
    LH_UNPACK_PART_ZEROS,
    LH_UNPACK_PART_INDEX,
};
#define LH_UNPACK_PART_COUNT 6

/* What a tensor is decoded from. */
struct lh_unpack_source {
    const uint8_t *packed;       /* what is at lh_unpack_needed() of the first element to decode */
    const uint8_t *scales;       /* all scales of the tensor, as are the next five */
    const uint8_t *table;        /* NIBBLES: 16 floats */
    const uint8_t *nested;       /* floats */
    const uint8_t *nested_table; /* 256 floats */
    const uint8_t *zeros;        /* 32-bit words */
    const uint8_t *index;        /* a number of a group for each column, of 32 bits */
};

/* Whether the description is valid, and its sizes can be computed without overflow. */
bool lh_unpack_is_valid(const struct lh_unpack *unpack);
uint64_t lh_unpack_count(const struct lh_unpack *unpack);
uint64_t lh_unpack_element_bytes(const struct lh_unpack *unpack);
/* The bytes of `count` elements, packed and decoded. */
uint64_t lh_unpack_packed_bytes(const struct lh_unpack *unpack, uint64_t count);
/* The offset of the first packed byte that elements from `first` on are decoded from. */
uint64_t lh_unpack_needed(const struct lh_unpack *unpack, uint64_t first);
/* Whether what is packed at offset `from` can be decoded to offset `to` of the same memory. */
bool lh_unpack_fits(const struct lh_unpack *unpack, uint64_t from, uint64_t to);
/* Whether elements of 4 bits lie one after the other. */
bool lh_unpack_is_narrow(const struct lh_unpack *unpack);
uint64_t lh_unpack_scale_count(const struct lh_unpack *unpack);
uint64_t lh_unpack_scale_bytes(const struct lh_unpack *unpack); /* of one scale */
/* The bytes of a part; 0: there is no such part. */
uint64_t lh_unpack_part_bytes(const struct lh_unpack *unpack, enum lh_unpack_part part);

/*
 * Decode `count` elements from element `first` on, which must be even if lh_unpack_is_narrow().
 * `out` may overlap source->packed as lh_unpack_fits() permits: elements are decoded from front to
 * back, and each grain is read before its bytes are overwritten. It must not overlap the other
 * sources.
 */
void lh_unpack(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
               uint64_t first, uint64_t count, void *out);
/* The definition: the same bits without SIMD instructions. */
void lh_unpack_ref(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                   uint64_t first, uint64_t count, void *out);

#endif
