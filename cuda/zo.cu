/*
 * Zeroth-order training on the GPU: a batch of operations over a range of a parameter, in place, or
 * from what is kept of it in another format to that and to what computation reads.
 *
 * Formula: for each element in order of the ops, p + s z, or p - lr (s z + d p), or z, each
 * operation rounded to fp32; z is Box and Muller's normal number of the element's own counter
 * ([Note: Counters] in csrc/compute/zo.h).
 * CPU reference: lh_zo_ref() (csrc/compute/zo_ref.c) and lh_zo_lead() (zo_kept.c), bit for bit.
 * Bytes moved: 8 an element (read once, written once; of a parameter that is kept those of its two
 * formats, and the state's twice where it is rounded) however many ops a batch has, which come as
 * the kernel's argument; 16 threads that are neighbours access 64 bytes that are, or 32, or 16.
 */
#include "zo_counter.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
#define ZO_ARGUMENT const __grid_constant__ /* addresses of it are taken, and no copy is made */
#else
#define ZO_ARGUMENT const
#endif

static_assert(sizeof(struct lh_zo_batch) == LH_ZO_BATCH_BYTES, "as the CPU's compiler lays it out");

extern "C" __global__ void __launch_bounds__(LH_ZO_BATCH_THREADS)
    lh_zo_batch(ZO_ARGUMENT struct lh_zo_batch batch)
{
    uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    zo_thread(&batch, thread, (uint64_t)gridDim.x * blockDim.x);
}
