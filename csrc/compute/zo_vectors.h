/*
 * The vector types of zo_body.h. The including file defines VECTOR_BYTES, REGISTER and, where
 * needed, CONSTANT_VECTORS.
 */
#ifndef LH_COMPUTE_ZO_VECTORS_H
#define LH_COMPUTE_ZO_VECTORS_H

#include <stdint.h>

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

/* The compiler moves no computation of the vector after this point, and no use of it before. */
#define PIN(vector) __asm__("" : REGISTER(vector))
/* The compiler forgets where the pointer points, and thus what it has read from there. */
#define HIDE(pointer) __asm__ volatile("" : "+r"(pointer))

typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t longs __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef float floats __attribute__((vector_size(VECTOR_BYTES)));

/*
 * Constant operands in memory: one number for all lanes where instructions can broadcast it.
 * Otherwise (CONSTANT_VECTORS), a whole vector, because a broadcast would take one more instruction
 * per use.
 */
#ifdef CONSTANT_VECTORS
typedef longs key;
typedef ints int_constant;
typedef floats float_constant;
#define EACH(x) {(x), (x), (x), (x), (x), (x), (x), (x)}
#else
typedef uint64_t key;
typedef int32_t int_constant;
typedef float float_constant;
#define EACH(x) (x)
#endif

#endif
