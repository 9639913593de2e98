/*
 * The C library's heap, from which torch allocates CPU tensors.
 *
 * By default a large tensor gets a mapping of its own, which is zeroed page by page as it is
 * touched and returned to the system when the tensor is freed. Training creates the same tensors in
 * every step. If the heap keeps freed memory, the pages are already present: forward and backward
 * of GPT-2 124M in bf16 (batch 4, sequence 128, two cores) went from 1.46 to 1.24 s, and from
 * 180,000 page faults per step to none. The process then stays as large as in its largest step,
 * plus the heap's fragmentation (growth from 1.38 to 1.76 GB in that case).
 */
#ifndef LH_MEM_HEAP_H
#define LH_MEM_HEAP_H

#include "base/base.h"

/*
 * Make the heap keep freed memory. Returns false if this C library does not support that.
 *
 * Thread: any.
 */
bool lh_heap_keep(void);

#endif
