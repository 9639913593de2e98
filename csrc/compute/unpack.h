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
 *
 * [Note: Decoding] An element is (float)value * scale, one multiplication in fp32, which is then
 * rounded to `rounding`, and the result to `dtype`; every rounding is to nearest, ties to even. A
 * scale of fp32, bf16 or fp16 is widened exactly. A scale of type NESTED is itself quantized: it is
 * (nested_table[byte] * nested[index / nested_block]) + nested_offset, with two roundings in fp32.
 * A scale of type E8M0 is 2^(byte - 127), and infinite if the byte is 255; one of type E4M3 is the
 * number that the byte encodes, divided by nested[0]. Every NaN becomes the positive quiet NaN of the result's type. These are the bits of
 *
 *      files                                  reference                          rounding
 *      weight_scale_inv (transformers' FP8)   Fp8Dequantize of transformers      F32
 *      weight_scale (compressed-tensors)      dequantize() of compressed-tensors the scales' type
 *      absmax (bitsandbytes' NF4 and FP4)     dequantize_4bit() of bitsandbytes  quant_state's type
 *      weight_packed (MXFP4 and NVFP4)        decompress() of compressed-tensors BF16
 *
 * A tensor is a matrix of rows and columns. The scales form a matrix with one element for each
 * block of block_rows rows and block_columns columns; blocks at the edges may be smaller. NIBBLES
 * and E2M1 have one row.
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
};
#define LH_UNPACK_FORMAT_COUNT 5

/* The types of scales; the first three have the numbers of enum lh_dtype. */
enum lh_unpack_scale {
    LH_UNPACK_SCALE_F32 = LH_DTYPE_F32,
    LH_UNPACK_SCALE_BF16 = LH_DTYPE_BF16,
    LH_UNPACK_SCALE_F16 = LH_DTYPE_F16,
    LH_UNPACK_SCALE_NESTED,
    LH_UNPACK_SCALE_E8M0,
    LH_UNPACK_SCALE_E4M3,
};
#define LH_UNPACK_SCALE_COUNT 6

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
};

/* What a tensor is decoded from. */
struct lh_unpack_source {
    const uint8_t *packed;       /* the elements from the first one to be decoded on */
    const uint8_t *scales;       /* all scales of the tensor, as are the next three */
    const uint8_t *table;        /* NIBBLES: 16 floats */
    const uint8_t *nested;       /* floats */
    const uint8_t *nested_table; /* 256 floats */
};

/* Whether the description is valid, and its sizes can be computed without overflow. */
bool lh_unpack_is_valid(const struct lh_unpack *unpack);
uint64_t lh_unpack_count(const struct lh_unpack *unpack);
uint64_t lh_unpack_element_bytes(const struct lh_unpack *unpack);
/* The bytes of `count` elements, packed and decoded. */
uint64_t lh_unpack_packed_bytes(const struct lh_unpack *unpack, uint64_t count);
/* Whether an element has 4 bits. */
bool lh_unpack_is_narrow(const struct lh_unpack *unpack);
uint64_t lh_unpack_scale_count(const struct lh_unpack *unpack);
uint64_t lh_unpack_scale_bytes(const struct lh_unpack *unpack); /* of one scale */
uint64_t lh_unpack_nested_count(const struct lh_unpack *unpack);

/*
 * Decode `count` elements from element `first` on, which must be even if elements have 4 bits. `out`
 * may overlap source->packed if it ends at or before the end of what is decoded: elements are
 * decoded from front to back, and each is read before its bytes are overwritten. It must not
 * overlap the other sources.
 */
void lh_unpack(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
               uint64_t first, uint64_t count, void *out);
/* The definition: the same bits without SIMD instructions. */
void lh_unpack_ref(const struct lh_unpack *unpack, const struct lh_unpack_source *source,
                   uint64_t first, uint64_t count, void *out);

#endif
