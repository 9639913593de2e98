/*
 * The vectors of zo_body.h: VECTOR_BYTES, REGISTER and CONSTANT_VECTORS are the file's own.
 */
#ifndef LH_COMPUTE_ZO_VECTORS_H
#define LH_COMPUTE_ZO_VECTORS_H

#include <stdint.h>

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

/* The compiler neither moves what makes a vector behind this nor what uses it before. */
#define PIN(vector) __asm__("" : REGISTER(vector))
/* The compiler forgets where a pointer points, and so what it has read there. */
#define HIDE(pointer) __asm__ volatile("" : "+r"(pointer))

typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t longs __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef float floats __attribute__((vector_size(VECTOR_BYTES)));

/*
 * What operations read from memory beside a vector: a number for all lanes, where they can; else a
 * vector, or each would take an instruction more (CONSTANT_VECTORS).
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
