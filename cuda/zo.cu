/*
 * Zeroth-order training on the GPU: a batch of operations over a range of a parameter, in place, or
 * from a stored state in another format to that state and to the values that computation reads.
 *
 * Formula: for each element, in the order of the ops: p + s z, or p - lr (s z + d p), or z, with
 * each operation rounded to fp32. z is the Box-Muller normal number of the element's own counter
 * ([Note: Counters] in csrc/compute/zo.h).
 * CPU reference: lh_zo_ref() (csrc/compute/zo_ref.c) and lh_zo_lead() (zo_kept.c), bit for bit.
 * Bytes moved: 8 per element (read once, written once), independent of the number of ops, which are
 * the kernel's argument. For a parameter with a state: the bytes of its two formats, and the
 * state's twice if it is rounded. 16 adjacent threads access 64, 32 or 16 adjacent bytes.
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
